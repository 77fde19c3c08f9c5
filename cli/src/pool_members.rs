// SPDX-License-Identifier: Apache-2.0
//! `rushes pool add`, `drain`, `remove` and `status`: which members a pool has, and how they are. No daemon is asked.

use crate::args::{PoolAddArgs, PoolCatalogueArgs, PoolDrainArgs, PoolLsArgs, PoolRemoveArgs};
use crate::ask::{print_json, say};
use crate::pool::{PRESENT, catalogues, class_of, print_all, shown, state_of, told, with_wish};
use crate::pool_care::counter;
use crate::show::{self, Table};
use rushes_pool::{Drained, Member, MemberNumber, Pool, PoolError, newest_log};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// Members that were taken in.
#[derive(Debug, Serialize)]
struct AddReport {
    catalogue: String,
    numbers: Vec<u16>,
}

pub(crate) fn add(args: &PoolAddArgs) -> Result<ExitCode, String> {
    let pool = Pool::serve(&args.catalogue).map_err(told)?;
    let bar = counter("{pos} members");
    let done = rushes_pool::add(&pool, &args.members, |done, _| {
        bar.set_position(done as u64)
    });
    bar.finish_and_clear();
    let numbers = done.map_err(told)?;
    let report = AddReport {
        catalogue: shown(pool.catalogue().path()),
        numbers: numbers.iter().map(|number| number.0).collect(),
    };
    if args.json {
        print_json(&report)?;
    } else {
        for (number, path) in report.numbers.iter().zip(&args.members) {
            say(&format!("{} is member {number}\n", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A member that is emptied.
#[derive(Debug, Serialize)]
struct DrainReport {
    catalogue: String,
    member: u16,
    is_draining: bool,
    is_empty: bool,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
}

/// A member by its number, or by its folder.
fn number_of(pool: &Pool, member: &Path) -> Result<MemberNumber, String> {
    if let Some(number) = member.to_str().and_then(|text| text.parse().ok()) {
        return Ok(MemberNumber(number));
    }
    let path = member
        .canonicalize()
        .unwrap_or_else(|_| member.to_path_buf());
    let found = pool.members().iter().find(|one| one.path() == path);
    found.map(Member::number).ok_or_else(|| {
        format!(
            "{} is no member of {}; expected a number or a folder of `rushes pool ls`",
            member.display(),
            pool.catalogue().path().display()
        )
    })
}

pub(crate) fn drain(args: &PoolDrainArgs) -> Result<ExitCode, String> {
    let pool = Pool::serve(&args.catalogue).map_err(told)?;
    let number = number_of(&pool, &args.member)?;
    let pool = rushes_pool::set_draining(pool, number, !args.cancel).map_err(told)?;
    let mut last = Drained::default();
    let mut is_empty = false;
    if !args.cancel {
        let bar = counter("{msg}");
        let done = rushes_pool::drain(&pool, number, |now| {
            last = now;
            bar.set_message(moved_so_far(now));
        });
        bar.finish_and_clear();
        match done {
            Ok(done) => (last, is_empty) = (done, true),
            Err(PoolError::NoRoom) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    let report = DrainReport {
        catalogue: shown(pool.catalogue().path()),
        member: number.0,
        is_draining: !args.cancel,
        is_empty,
        file_count: last.file_count,
        moved_count: last.moved_count,
        moved_bytes: last.moved_bytes,
    };
    if args.json {
        print_json(&report)?;
    } else {
        let moved = format!(
            "{} files, {}, were moved",
            report.moved_count,
            show::bytes(report.moved_bytes)
        );
        say(&match (args.cancel, is_empty) {
            (true, _) => format!("Member {} takes new bytes again.\n", number.0),
            (false, true) => format!("Member {} is empty; {moved}.\n", number.0),
            (false, false) => format!(
                "The other members are full; {moved}. Add one or remove files, then repeat this.\n"
            ),
        })?;
    }
    Ok(ExitCode::from(u8::from(!args.cancel && !is_empty)))
}

/// Files that were spread anew.
#[derive(Debug, Serialize)]
struct RebalanceReport {
    catalogue: String,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
}

pub(crate) fn rebalance(args: &PoolCatalogueArgs) -> Result<ExitCode, String> {
    let pool = Pool::serve(&args.catalogue).map_err(told)?;
    let bar = counter("{msg}");
    let done = rushes_pool::rebalance(&pool, |now| bar.set_message(moved_so_far(now)));
    bar.finish_and_clear();
    let done = done.map_err(told)?;
    let report = RebalanceReport {
        catalogue: shown(pool.catalogue().path()),
        file_count: done.file_count,
        moved_count: done.moved_count,
        moved_bytes: done.moved_bytes,
    };
    if args.json {
        print_json(&report)?;
    } else {
        say(&format!("{}.\n", moved_so_far(done)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn moved_so_far(now: Drained) -> String {
    format!(
        "{} files looked at, {} moved, {}",
        now.file_count,
        now.moved_count,
        show::bytes(now.moved_bytes)
    )
}

/// A member that is gone.
#[derive(Debug, Serialize)]
struct RemoveReport {
    catalogue: String,
    member: u16,
}

pub(crate) fn remove(args: &PoolRemoveArgs) -> Result<ExitCode, String> {
    let pool = Pool::serve(&args.catalogue).map_err(told)?;
    let report = RemoveReport {
        catalogue: shown(pool.catalogue().path()),
        member: number_of(&pool, &args.member)?.0,
    };
    rushes_pool::remove(pool, MemberNumber(report.member)).map_err(told)?;
    if args.json {
        print_json(&report)?;
    } else {
        say(&format!("Member {} is removed.\n", report.member))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How a pool is.
#[derive(Debug, Serialize)]
struct StatusReport {
    catalogue: String,
    wish: String,
    is_served: bool,
    is_add_interrupted: bool,
    log_serial: Option<u64>,
    log_members: Vec<u16>,
    members: Vec<MemberStatusReport>,
}

/// How a member is.
#[derive(Debug, Serialize)]
struct MemberStatusReport {
    number: u16,
    path: String,
    state: &'static str,
    reason: Option<String>,
    duty: &'static str,
    class: &'static str,
    assigned_class: Option<String>,
    bytes_total: u64,
    bytes_free: u64,
    object_count: Option<u64>,
}

fn status_of(catalogue: &Path) -> Result<StatusReport, String> {
    let pool = Pool::look(catalogue).map_err(told)?;
    let mut members = Vec::new();
    for member in pool.members() {
        let status = member.status();
        let (state, reason) = state_of(&status.state);
        let object_count = match state {
            "missing" => None,
            _ => Some(member.object_count().map_err(told)?),
        };
        members.push(MemberStatusReport {
            number: member.number().0,
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
        is_add_interrupted: rushes_pool::is_add_interrupted(&pool),
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
        report.log_serial.is_some() && report.members.iter().all(|one| one.state == PRESENT)
    });
    Ok(ExitCode::from(u8::from(!is_well)))
}

fn text(report: &StatusReport) -> String {
    let heads = [
        "member", "path", "disk", "class", "state", "duty", ">size", ">free", ">objects", "",
    ];
    let mut table = Table::new(&heads);
    for member in &report.members {
        let size = |bytes| match member.state {
            "missing" => String::from("?"),
            _ => show::bytes(bytes),
        };
        table.row(vec![
            member.number.to_string(),
            member.path.clone(),
            member.class.replace('_', " "),
            member.assigned_class.clone().unwrap_or_default(),
            member.state.replace('_', "-"),
            member.duty.to_owned(),
            size(member.bytes_total),
            size(member.bytes_free),
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
        None => String::from("no member has the names yet: mount it once"),
    };
    let add = if report.is_add_interrupted {
        "; an add was interrupted: repeat it"
    } else {
        ""
    };
    let state = format!("{served}, {names}{add}");
    format!(
        "pool {}, {}\n{}",
        report.catalogue,
        with_wish(&state, &report.wish),
        table.text()
    )
}
