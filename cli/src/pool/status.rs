// SPDX-License-Identifier: Apache-2.0
//! `rushes pool status`: the state of a pool, of its mount and of its members.

use super::hand::moved_so_far;
use super::listing::{catalogues, print_all};
use super::opening::seen;
use super::state::{ShownState, state_of};
use super::words::{class_of, draining_text, shown, size_on, told, with_wish};
use crate::args::PoolLsArgs;
use crate::show::{self, Table};
use rushes_pool::{Door, Drained, Duty, Failure, MountState, Pool, Work, newest_log};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// The state of a pool.
#[derive(Debug, Serialize)]
struct StatusReport {
    catalogue: String,
    wish: String,
    is_served: bool,
    mount: Option<MountReport>,
    work: Option<WorkReport>,
    tidy: TidyReport,
    is_add_interrupted: bool,
    is_empty: bool,
    log_serial: Option<u64>,
    log_members: Vec<u16>,
    members: Vec<MemberStatusReport>,
}

/// The state of the mount.
#[derive(Debug, Serialize)]
struct MountReport {
    has_keeper: bool,
    can_pass: bool,
    passed_open_count: u64,
}

impl MountReport {
    fn of(state: MountState) -> MountReport {
        MountReport {
            has_keeper: state.has_keeper,
            can_pass: state.can_pass,
            passed_open_count: state.passed_open_count,
        }
    }

    /// " with a keeper", " without a keeper, 3 files read by passthrough"
    fn text(&self) -> String {
        match (self.has_keeper, self.can_pass) {
            (true, _) => String::from(" with a keeper"),
            (false, false) => String::from(" without a keeper, without passthrough"),
            (false, true) => format!(
                " without a keeper, {} opens read by passthrough",
                self.passed_open_count
            ),
        }
    }
}

/// The mount's work on the pool at this moment.
#[derive(Debug, Serialize)]
struct WorkReport {
    kind: &'static str,
    member: Option<u16>,
    is_tidying: bool,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
    running_s: u64,
}

impl WorkReport {
    fn of(work: Work) -> WorkReport {
        WorkReport {
            kind: work.kind.name(),
            member: work.member,
            is_tidying: work.is_tidying,
            file_count: work.done.file_count,
            moved_count: work.done.moved_count,
            moved_bytes: work.done.moved_bytes,
            running_s: work.running_s,
        }
    }

    /// "drain of member 1 for 97 s: 310 files looked at, 41 moved, 12.4 GiB"
    fn text(&self) -> String {
        let of = self
            .member
            .map_or(String::new(), |number| format!(" of member {number}"));
        let done = Drained {
            file_count: self.file_count,
            moved_count: self.moved_count,
            moved_bytes: self.moved_bytes,
        };
        format!(
            "{}{of}{} for {} s: {}",
            self.kind,
            match self.is_tidying {
                true => ", tidying,",
                false => "",
            },
            self.running_s,
            moved_so_far(done)
        )
    }
}

/// The tidying of a pool.
#[derive(Debug, Serialize)]
struct TidyReport {
    schedule: String,
    waits_for: Option<String>,
    last: Option<TidiedReport>,
}

/// The result of the last tidying.
#[derive(Debug, Serialize)]
struct TidiedReport {
    ended_unix_s: u64,
    is_whole: bool,
    rebalance: MovedReport,
    defrag: MovedReport,
    failed_count: u64,
    failed: Vec<Failure>,
    trouble: Option<String>,
}

impl TidiedReport {
    /// "; 2 files could not be read or moved: reel/a (…), reel/b (…)"
    fn failed_words(&self) -> String {
        if self.failed_count == 0 {
            return String::new();
        }
        let each = |one: &Failure| {
            let (file, sentence) = (show::one_line(&one.file), show::one_line(&one.sentence));
            format!("{file} ({sentence})")
        };
        let mut all: Vec<String> = self.failed.iter().map(each).collect();
        let more = self.failed_count.saturating_sub(all.len() as u64);
        if more > 0 {
            all.push(format!("and {more} more"));
        }
        format!(
            "; {} could not be read or moved: {}",
            show::count(self.failed_count, "file"),
            all.join(", ")
        )
    }
}

/// The numbers of a move.
#[derive(Debug, Serialize)]
struct MovedReport {
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
}

impl MovedReport {
    fn of(done: Drained) -> MovedReport {
        MovedReport {
            file_count: done.file_count,
            moved_count: done.moved_count,
            moved_bytes: done.moved_bytes,
        }
    }
}

impl TidyReport {
    fn of(pool: &Pool, waits_for: Option<String>) -> TidyReport {
        let last = pool.tidied().map(|(ended, done)| TidiedReport {
            ended_unix_s: ended
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            is_whole: done.is_whole,
            rebalance: MovedReport::of(done.rebalanced),
            defrag: MovedReport::of(done.gathered),
            failed_count: done.failed.count,
            failed: done.failed.first,
            trouble: done.trouble,
        });
        TidyReport {
            schedule: pool.schedule().to_string(),
            waits_for,
            last,
        }
    }

    /// "; tidies itself idle (waits: asked), last 2026-11-24T02:10:00Z, whole: 3 files, 12 MiB
    /// moved"
    fn text(&self) -> String {
        if self.schedule == "off" && self.last.is_none() {
            return String::new();
        }
        let waits = self
            .waits_for
            .as_ref()
            .map_or(String::new(), |word| format!(" (waits: {word})"));
        let last = self.last.as_ref().map_or(String::new(), |last| {
            let ended = UNIX_EPOCH + Duration::from_secs(last.ended_unix_s);
            let how = match (&last.trouble, last.is_whole) {
                (Some(trouble), _) => format!("not all of it: {trouble}"),
                (None, true) => String::from("all of it"),
                (None, false) => String::from("interrupted"),
            };
            format!(
                ", last {}, {how}: {}, {} moved",
                humantime::format_rfc3339_seconds(ended),
                show::count(last.rebalance.moved_count + last.defrag.moved_count, "file"),
                show::bytes(last.rebalance.moved_bytes + last.defrag.moved_bytes)
            ) + &last.failed_words()
        });
        format!("; tidies itself: {}{waits}{last}", self.schedule)
    }
}

/// The state of a member.
#[derive(Debug, Serialize)]
struct MemberStatusReport {
    number: u16,
    path: String,
    state: ShownState,
    reason: Option<String>,
    duty: &'static str,
    class: &'static str,
    assigned_class: Option<String>,
    bytes_total: u64,
    bytes_free: u64,
    object_count: Option<u64>,
}

fn status_of(catalogue: &Path) -> Result<StatusReport, String> {
    let pool = seen(catalogue)?;
    let door = Door::of(pool.catalogue().path()).and_then(Door::status);
    let door = door.unwrap_or_default();
    let mut members = Vec::new();
    for member in pool.members().iter() {
        let status = member.status();
        let (mut state, mut reason) = state_of(&status.state);
        let counted = match state {
            ShownState::Missing => None,
            _ => Some(member.object_count()),
        };
        let number = member.number().0;
        let failing = door.failing.iter().find(|(failing, _)| *failing == number);
        let failing = failing.map(|(_, why)| why.clone());
        // One that fails does not hide the state of the others.
        let failed = counted.as_ref().and_then(|counted| counted.as_ref().err());
        if let Some(why) = failing.or_else(|| failed.map(ToString::to_string)) {
            (state, reason) = (ShownState::Failing, Some(why));
        }
        let object_count = counted.and_then(Result::ok);
        members.push(MemberStatusReport {
            number,
            path: shown(member.path()),
            state,
            reason,
            duty: member.duty().name(),
            class: match member.is_rotational() {
                Some(true) => "rotating",
                Some(false) => "solid_state",
                None => "unknown",
            },
            assigned_class: class_of(member),
            bytes_total: status.bytes_total.0,
            bytes_free: status.bytes_free.0,
            object_count,
        });
    }
    let log = newest_log(&pool);
    Ok(StatusReport {
        catalogue: shown(pool.catalogue().path()),
        wish: pool.wish().to_string(),
        is_served: pool.catalogue().is_served().map_err(told)?,
        mount: door.mount.map(MountReport::of),
        work: door.work.map(WorkReport::of),
        tidy: TidyReport::of(&pool, door.tidying_waits),
        is_add_interrupted: rushes_pool::is_add_interrupted(&pool),
        is_empty: pool.catalogue().is_empty().map_err(told)?,
        log_serial: log.as_ref().map(|(serial, _)| *serial),
        log_members: log
            .iter()
            .flat_map(|(_, members)| members.iter().map(|number| number.0))
            .collect(),
        members,
    })
}

pub(crate) fn status(args: &PoolLsArgs) -> Result<ExitCode, String> {
    let reports: Result<Vec<StatusReport>, String> = catalogues(args)?
        .iter()
        .map(|catalogue| status_of(catalogue))
        .collect();
    let reports = reports?;
    print_all(&reports, args.json, "status", text)?;
    let is_well = reports.iter().all(|report| {
        (report.log_serial.is_some() || report.is_empty)
            && report
                .members
                .iter()
                .all(|one| one.state == ShownState::Present)
    });
    Ok(ExitCode::from(u8::from(!is_well)))
}

fn text(report: &StatusReport) -> String {
    let heads = [
        "member", "path", "disk", "class", "state", "duty", ">size", ">free", ">objects", "",
    ];
    let mut table = Table::new(&heads);
    for member in &report.members {
        table.row(vec![
            member.number.to_string(),
            member.path.clone(),
            member.class.replace('_', " "),
            member.assigned_class.clone().unwrap_or_default(),
            member.state.word().to_owned(),
            // "full" would read as a member without space.
            match member.duty {
                "full" => String::from("all"),
                duty => duty.to_owned(),
            },
            size_on(member.state, member.bytes_total),
            size_on(member.state, member.bytes_free),
            member
                .object_count
                .map_or_else(|| String::from("?"), |count| count.to_string()),
            member.reason.clone().unwrap_or_default(),
        ]);
    }
    let served = if report.is_served {
        "in use"
    } else {
        "not in use"
    };
    let numbers: Vec<String> = report.log_members.iter().map(u16::to_string).collect();
    let names = match report.log_serial {
        Some(serial) => format!("names are on {} (log {serial})", numbers.join(" and ")),
        None if report.is_empty => String::from("there are no names yet"),
        None => String::from("no member has the names yet: mount it once"),
    };
    let add = if report.is_add_interrupted {
        "; an add was interrupted: repeat it"
    } else {
        ""
    };
    let work = report
        .work
        .as_ref()
        .map_or(String::new(), |work| format!("; {}", work.text()));
    let tidy = report.tidy.text();
    let mount = report.mount.as_ref();
    let mount = mount.map_or(String::new(), MountReport::text);
    let state = format!("{served}{mount}, {names}{add}{work}{tidy}");
    let draining = report.members.iter();
    let draining = draining.filter(|one| one.duty == Duty::Draining.name());
    format!(
        "pool {}, {}\n{}{}",
        report.catalogue,
        with_wish(&state, &report.wish),
        table.text(),
        draining_text(&report.catalogue, draining.map(|one| one.number))
    )
}
