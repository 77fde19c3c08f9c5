// SPDX-License-Identifier: Apache-2.0
//! `rushes pool add`, `drain`, `rebalance`, `defrag`, `remove` and `status`: the members of a pool
//! and their state. A mounted pool is changed by its mount, at the request of these commands; they
//! do not ask the daemon.

use crate::args::{
    PoolAddArgs, PoolCatalogueArgs, PoolDefragArgs, PoolDrainArgs, PoolLsArgs, PoolRemoveArgs,
};
use crate::ask::{print_json, say};
use crate::pool::{
    Standing, catalogues, class_of, print_all, settled, shown, state_of, told, whole, with_wish,
};
use crate::pool_care::counter;
use crate::show::{self, Table};
use indicatif::ProgressBar;
use rushes_pool::{
    Class, Defragged, Door, Drained, Duty, Evenness, Failed, Failure, MemberNumber, MountState,
    Nobody, Parting, Pieces, Pool, PoolError, Request, Told, Work, newest_log,
};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// Members that were added.
#[derive(Debug, Serialize)]
struct AddReport {
    catalogue: String,
    numbers: Vec<u16>,
    warnings: Vec<String>,
}

/// The program that changes a pool.
enum Hand {
    /// This program: no mount has the pool.
    Ours(Box<Pool>),
    /// The mount that has it.
    Mount(Door),
}

impl Hand {
    /// Errors   another process has it that takes no requests
    fn on(catalogue: &Path) -> Result<Hand, String> {
        match crate::pool::serve(catalogue) {
            Ok(pool) => settled(pool).map(|pool| Hand::Ours(Box::new(pool))),
            Err(error @ PoolError::Served { .. }) => match Door::of(catalogue) {
                Some(door) => Ok(Hand::Mount(door)),
                None => Err(told(error)),
            },
            Err(error) => Err(told(error)),
        }
    }
}

/// The result of a mount's work.
#[derive(Default)]
struct Done {
    numbers: Vec<u16>,
    all: Drained,
    is_empty: bool,
    defragged: Defragged,
    failed: Failed,
}

/// A bar for work without progress reports: shows that it goes on, and its name.
fn waiting(message: &'static str) -> ProgressBar {
    let bar = counter("{spinner} {msg} ({elapsed})");
    bar.set_message(message);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Asks the mount. An interrupt of this program interrupts the work.
fn asked(door: Door, request: &Request, bar: &ProgressBar) -> Result<Done, PoolError> {
    let last = door.ask(request, |told| match told {
        Told::Added { count } => bar.set_position(count),
        Told::Moved { now } => bar.set_message(moved_so_far(now)),
        Told::Done { .. } | Told::Status { .. } | Told::Refused { .. } => {}
    })?;
    Ok(match last {
        Told::Done {
            numbers,
            all,
            is_empty,
            defragged,
            failed,
        } => Done {
            numbers,
            all,
            is_empty,
            defragged,
            failed,
        },
        _ => Done::default(),
    })
}

/// The pool with its catalogue, and its members as they are now.
fn seen(catalogue: &Path) -> Result<Pool, String> {
    Pool::look(catalogue).map_err(told)
}

pub(crate) fn add(args: &PoolAddArgs) -> Result<ExitCode, String> {
    let catalogue = shown(seen(&args.catalogue)?.catalogue().path());
    crate::pool::outlast_the_machine(args.members.iter())?;
    let hand = Hand::on(&args.catalogue)?;
    let bar = counter("{pos} members");
    let done = match hand {
        Hand::Ours(pool) => {
            let added = rushes_pool::add(&pool, &args.members, args.class.as_ref(), |done, _| {
                bar.set_position(done as u64)
            });
            added.map(|numbers| numbers.iter().map(|number| number.0).collect())
        }
        Hand::Mount(door) => {
            // The mount's working folder may differ from ours.
            let members = args.members.iter().map(|member| whole(member)).collect();
            let class = args.class.as_ref().map(|class| class.name().to_owned());
            asked(door, &Request::Add { members, class }, &bar).map(|done| done.numbers)
        }
    };
    bar.finish_and_clear();
    let numbers: Vec<u16> = done.map_err(told)?;
    let beside = seen(&args.catalogue)?.beside_catalogue(|number| numbers.contains(&number.0));
    let report = AddReport {
        catalogue,
        numbers,
        warnings: beside.into_iter().collect(),
    };
    if args.json {
        print_json(&report)?;
    } else {
        for (number, path) in report.numbers.iter().zip(&args.members) {
            let path = whole(path);
            say(&format!("{} is member {number}\n", path.display()))?;
        }
        say(&of_no_class(&seen(&args.catalogue)?, &report.numbers))?;
        for warning in &report.warnings {
            say(&format!("Warning: {warning}.\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A note on new members without a class in a pool in which others have one; otherwise empty.
fn of_no_class(pool: &Pool, numbers: &[u16]) -> String {
    let members = pool.members();
    let is_new = |number: MemberNumber| numbers.contains(&number.0);
    let mut classes: Vec<&str> = members
        .iter()
        .filter(|member| !is_new(member.number()))
        .filter_map(|member| member.class().map(Class::name))
        .collect();
    classes.sort_unstable();
    classes.dedup();
    let lack = members
        .iter()
        .any(|member| is_new(member.number()) && member.class().is_none());
    match (lack, numbers.first()) {
        (true, Some(first)) if !classes.is_empty() => format!(
            "It has no class, and others have {}: files whose policy names a class do not go \
             there. `rushes pool policy {} --class {first}=CLASS` gives it one.\n",
            classes.join(", "),
            pool.catalogue().path().display()
        ),
        _ => String::new(),
    }
}

/// A draining member.
#[derive(Debug, Serialize)]
struct DrainReport {
    catalogue: String,
    member: u16,
    is_draining: bool,
    is_empty: bool,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
    failed_count: u64,
    failed: Vec<Failure>,
}

/// A member by its number, or by its folder.
fn number_of(pool: &Pool, member: &Path) -> Result<MemberNumber, String> {
    if let Some(number) = member.to_str().and_then(|text| text.parse().ok()) {
        return Ok(MemberNumber(number));
    }
    let path = member
        .canonicalize()
        .unwrap_or_else(|_| member.to_path_buf());
    let members = pool.members();
    let found = members.iter().find(|one| one.path() == path);
    found.map(|one| one.number()).ok_or_else(|| {
        let all: Vec<String> = members
            .iter()
            .map(|one| format!("{} ({})", one.number().0, one.path().display()))
            .collect();
        let catalogue = pool.catalogue().path();
        let mounts = rushes_pool::mounts_of(catalogue).unwrap_or_default();
        no_member(&path, catalogue, &mounts, &all)
    })
}

/// `path` is no member of this pool, which is mounted on `mounts`.
fn no_member(path: &Path, catalogue: &Path, mounts: &[PathBuf], members: &[String]) -> String {
    let what = if mounts.iter().any(|mount| mount == path) {
        String::from("is where the pool is mounted, and no member of it")
    } else if path == catalogue {
        String::from("is the pool's catalogue, and no member of it")
    } else {
        format!("is no member of {}", catalogue.display())
    };
    format!(
        "{} {what}; expected the number of a member, or its folder: {}",
        path.display(),
        members.join(", ")
    )
}

pub(crate) fn drain(args: &PoolDrainArgs) -> Result<ExitCode, String> {
    let pool = seen(&args.catalogue)?;
    let (catalogue, number) = (
        shown(pool.catalogue().path()),
        number_of(&pool, &args.member)?,
    );
    let hand = Hand::on(&args.catalogue)?;
    let bar = counter("{msg}");
    if !args.cancel {
        say_when_interrupted(&bar, drain_interrupted(&catalogue, number))?;
    }
    let done = match hand {
        Hand::Ours(pool) => drain_ours(&pool, number, args.cancel, &bar),
        Hand::Mount(door) => {
            let (member, cancel) = (number.0, args.cancel);
            asked(door, &Request::Drain { member, cancel }, &bar)
        }
    };
    bar.finish_and_clear();
    let Done {
        all: last,
        is_empty,
        failed,
        ..
    } = done.map_err(told)?;
    let report = DrainReport {
        catalogue,
        member: number.0,
        is_draining: !args.cancel,
        is_empty,
        file_count: last.file_count,
        moved_count: last.moved_count,
        moved_bytes: last.moved_bytes,
        failed_count: failed.count,
        failed: failed.first,
    };
    if args.json {
        print_json(&report)?;
    } else {
        let moved = format!(
            "moved {}, {}",
            show::count(report.moved_count, "file"),
            show::bytes(report.moved_bytes)
        );
        say(&match (args.cancel, is_empty) {
            (true, _) => format!("Member {} takes new bytes.\n", number.0),
            (false, true) => format!("Member {} is empty; {moved}.\n", number.0),
            (false, false) => format!(
                "Member {} is not empty; {moved}. {}{}If there is no room, add a member or delete \
                 files; then repeat this.\n",
                number.0,
                failed_text(report.failed_count, &report.failed),
                // Read the members again: another command may have changed their duties.
                seen(&args.catalogue)
                    .ok()
                    .and_then(|pool| rushes_pool::draining_with_room(&pool, number))
                    .map_or(String::new(), |sentence| format!("{sentence}\n"))
            ),
        })?;
    }
    Ok(ExitCode::from(u8::from(!args.cancel && !is_empty)))
}

fn drain_interrupted(catalogue: &str, number: MemberNumber) -> String {
    format!(
        "Interrupted. Nothing is lost; member {0} takes no new bytes, and the file that was being \
         moved may be in two segments on two members. `rushes pool drain {catalogue} {0}` \
         continues and joins them; with --cancel the member takes new bytes again, and that file \
         stays as it is.",
        number.0
    )
}

/// Prints the sentence when SIGINT or SIGTERM ends this program. Its work, its own or the mount's,
/// may stop at any instant.
fn say_when_interrupted(bar: &ProgressBar, sentence: String) -> Result<(), String> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|error| format!("cannot take signals: {error}"))?;
    let bar = bar.clone();
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            bar.finish_and_clear();
            eprintln!("{sentence}");
            // As without a handler: the caller of this program sees which signal ended it.
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

fn drain_ours(
    pool: &Pool,
    number: MemberNumber,
    cancel: bool,
    bar: &ProgressBar,
) -> Result<Done, PoolError> {
    rushes_pool::set_draining(pool, number, !cancel)?;
    if cancel {
        return Ok(Done::default());
    }
    let (all, failed) = rushes_pool::drain(pool, number, |now| bar.set_message(moved_so_far(now)))?;
    Ok(Done {
        all,
        is_empty: failed.count == 0,
        failed,
        ..Done::default()
    })
}

/// The result of a rebalance.
#[derive(Debug, Serialize)]
struct RebalanceReport {
    catalogue: String,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
    is_even: bool,
    whole_permille: u64,
    fuller: Vec<FullerReport>,
    too_large_count: u64,
    striped_count: u64,
    bound_count: u64,
    unreadable_count: u64,
    movable_count: u64,
    left_out: Vec<LeftOutReport>,
    failed_count: u64,
    failed: Vec<Failure>,
}

/// A member that is fuller than the whole pool.
#[derive(Debug, Serialize)]
struct FullerReport {
    member: u16,
    permille: u64,
}

/// A member that takes no files.
#[derive(Debug, Serialize)]
struct LeftOutReport {
    member: u16,
    duty: &'static str,
    state: Standing,
}

impl RebalanceReport {
    fn of(catalogue: String, done: Drained, failed: Failed, found: Evenness) -> RebalanceReport {
        RebalanceReport {
            catalogue,
            file_count: done.file_count,
            moved_count: done.moved_count,
            moved_bytes: done.moved_bytes,
            is_even: found.fuller.is_empty(),
            whole_permille: found.whole_permille,
            fuller: found
                .fuller
                .iter()
                .map(|&(member, permille)| FullerReport {
                    member: member.0,
                    permille,
                })
                .collect(),
            too_large_count: found.kept.too_large_count,
            striped_count: found.kept.striped_count,
            bound_count: found.kept.bound_count,
            unreadable_count: found.kept.unreadable_count,
            movable_count: found.kept.movable_count,
            left_out: found
                .left_out
                .iter()
                .map(|one| LeftOutReport {
                    member: one.member.0,
                    duty: one.duty.name(),
                    state: state_of(&one.state).0,
                })
                .collect(),
            failed_count: failed.count,
            failed: failed.first,
        }
    }

    /// Why it went no further.
    fn reason(&self) -> String {
        let percent = |permille: u64| format!("{}.{} %", permille / 10, permille % 10);
        let whole = percent(self.whole_permille);
        if self.is_even {
            return format!(
                "No member is fuller than the whole pool ({whole}) by more than 1 %.\n"
            );
        }
        let fuller: Vec<String> = self
            .fuller
            .iter()
            .map(|one| format!("member {} ({})", one.member, percent(one.permille)))
            .collect();
        let kept = [
            (
                self.too_large_count,
                "too large: any other member would be too full with them",
            ),
            (self.striped_count, "striped"),
            (
                self.bound_count,
                "bound to members of a class, which are equally full",
            ),
            (
                self.unreadable_count,
                "not readable: see `rushes pool fsck`",
            ),
            (self.movable_count, "can be moved by now: repeat this"),
        ];
        let kept: Vec<String> = kept
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, why)| format!("{count} {why}"))
            .collect();
        let kept = match kept.as_slice() {
            [] => String::from("no file has bytes there; files that are not the pool's fill it"),
            kept => format!("files that stay: {}", kept.join("; ")),
        };
        format!(
            "Fuller than the whole pool ({whole}): {}. {kept}.\n",
            fuller.join(", ")
        )
    }

    fn left_out(&self) -> String {
        let all: Vec<String> = self
            .left_out
            .iter()
            .map(|one| {
                let why = match (one.duty, one.state) {
                    ("full", state) => state.word().to_owned(),
                    (duty, _) => duty.to_owned(),
                };
                format!("member {} ({why})", one.member)
            })
            .collect();
        match all.as_slice() {
            [] => String::new(),
            all => format!(
                "Left out, since no new bytes may go there: {}.\n",
                all.join(", ")
            ),
        }
    }
}

fn rebalance_interrupted(catalogue: &str) -> String {
    format!(
        "Interrupted. Nothing is lost; the file that was being moved may be in two segments on two \
         members. `rushes pool rebalance {catalogue}` continues and joins them."
    )
}

pub(crate) fn rebalance(args: &PoolCatalogueArgs) -> Result<ExitCode, String> {
    let catalogue = shown(seen(&args.catalogue)?.catalogue().path());
    let hand = Hand::on(&args.catalogue)?;
    let bar = counter("{msg}");
    say_when_interrupted(&bar, rebalance_interrupted(&catalogue))?;
    let done = match hand {
        Hand::Ours(pool) => rushes_pool::rebalance(&pool, |now| bar.set_message(moved_so_far(now))),
        Hand::Mount(door) => {
            asked(door, &Request::Rebalance {}, &bar).map(|done| (done.all, done.failed))
        }
    };
    bar.finish_and_clear();
    let (done, failed) = done.map_err(told)?;
    let looking = waiting("reading how full members are, and why files stay");
    let found = rushes_pool::evenness(&seen(&args.catalogue)?).map_err(told);
    looking.finish_and_clear();
    let found = found?;
    let report = RebalanceReport::of(catalogue, done, failed, found);
    if args.json {
        print_json(&report)?;
    } else {
        say(&format!(
            "{}.\n{}{}{}",
            moved_so_far(done),
            report.reason(),
            report.left_out(),
            failed_text(report.failed_count, &report.failed)
        ))?;
    }
    Ok(ExitCode::from(u8::from(report.failed_count > 0)))
}

/// Files that stayed as they are, a line each, and how many more; empty if there are none.
fn failed_text(count: u64, first: &[Failure]) -> String {
    if count == 0 {
        return String::new();
    }
    let files = show::count(count, "file");
    let mut text = format!("{files} could not be read or moved:\n");
    for one in first {
        let (file, sentence) = (show::one_line(&one.file), show::one_line(&one.sentence));
        text.push_str(&format!("  {file}: {sentence}\n"));
    }
    let more = count.saturating_sub(first.len() as u64);
    if more > 0 {
        text.push_str(&format!("  and {more} more\n"));
    }
    text
}

/// The result of a defrag.
#[derive(Debug, Serialize)]
struct DefragReport {
    catalogue: String,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
    before: PiecesReport,
    after: PiecesReport,
    failed_count: u64,
    failed: Vec<Failure>,
}

/// The number of segments and extents of files.
#[derive(Debug, Serialize)]
struct PiecesReport {
    segment_count: u64,
    extent_count: u64,
}

impl PiecesReport {
    fn of(pieces: Pieces) -> PiecesReport {
        PiecesReport {
            segment_count: pieces.segment_count,
            extent_count: pieces.extent_count,
        }
    }
}

/// A path of a pool, below its tree.
fn below(catalogue: &Path, path: &Path) -> Result<PathBuf, String> {
    let place = rushes_pool::find(path).map_err(told)?;
    let is_ours = place.catalogue.canonicalize().ok() == catalogue.canonicalize().ok();
    if !is_ours {
        return Err(format!(
            "{} is in the pool {}; expected a path of {}",
            path.display(),
            place.catalogue.display(),
            catalogue.display()
        ));
    }
    Ok(place.below)
}

pub(crate) fn defrag(args: &PoolDefragArgs) -> Result<ExitCode, String> {
    let catalogue = shown(seen(&args.catalogue)?.catalogue().path());
    let paths: Result<Vec<PathBuf>, String> = args
        .paths
        .iter()
        .map(|path| below(&args.catalogue, path))
        .collect();
    let paths = paths?;
    let hand = Hand::on(&args.catalogue)?;
    let bar = counter("{msg}");
    let done = match hand {
        Hand::Ours(pool) => rushes_pool::defrag(&pool, &paths, |now| {
            bar.set_message(moved_so_far(now));
        }),
        Hand::Mount(door) => asked(door, &Request::Defrag { paths }, &bar)
            .map(|done| (done.all, done.defragged, done.failed)),
    };
    bar.finish_and_clear();
    let (done, pieces, failed) = done.map_err(told)?;
    let report = DefragReport {
        catalogue,
        file_count: done.file_count,
        moved_count: done.moved_count,
        moved_bytes: done.moved_bytes,
        before: PiecesReport::of(pieces.before),
        after: PiecesReport::of(pieces.after),
        failed_count: failed.count,
        failed: failed.first,
    };
    if args.json {
        print_json(&report)?;
    } else {
        say(&format!(
            "{}. {} segments, {} now; {} extents, {} now.\n{}",
            moved_so_far(done),
            report.before.segment_count,
            report.after.segment_count,
            report.before.extent_count,
            report.after.extent_count,
            failed_text(report.failed_count, &report.failed)
        ))?;
    }
    Ok(ExitCode::from(u8::from(report.failed_count > 0)))
}

fn moved_so_far(now: Drained) -> String {
    format!(
        "{} looked at, {} moved, {}",
        show::count(now.file_count, "file"),
        now.moved_count,
        show::bytes(now.moved_bytes)
    )
}

/// A removed member.
#[derive(Debug, Serialize)]
struct RemoveReport {
    catalogue: String,
    member: u16,
    lost: bool,
}

/// Without --yes a missing member is not given up. One that is there is refused in any case.
fn may_be_given_up(pool: &Pool, number: MemberNumber) -> Result<(), String> {
    let Some(member) = pool.member(number) else {
        return Ok(());
    };
    match member.status().state {
        rushes_pool::MemberState::Missing(why) => Err(format!(
            "member {} is missing: {} {why}. If its disk is only away, mount it there, and nothing is lost. If it is dead: with --yes its bytes are given up for good, \
             also when that disk is found again; each file with bytes there gives input/output errors from then on, and `rushes pool where` names them",
            number.0,
            member.path().display()
        )),
        rushes_pool::MemberState::Present | rushes_pool::MemberState::ReadOnly => Ok(()),
    }
}

pub(crate) fn remove(args: &PoolRemoveArgs) -> Result<ExitCode, String> {
    let pool = seen(&args.catalogue)?;
    let report = RemoveReport {
        catalogue: shown(pool.catalogue().path()),
        member: number_of(&pool, &args.member)?.0,
        lost: args.lost,
    };
    let (member, lost, number) = (report.member, report.lost, MemberNumber(report.member));
    if lost && !args.yes {
        may_be_given_up(&pool, number)?;
    }
    let hand = Hand::on(&args.catalogue)?;
    let bar = waiting("looking for files with bytes there");
    let removed = match hand {
        Hand::Ours(pool) => rushes_pool::remove(&pool, number, Parting::of(lost), &Nobody),
        Hand::Mount(door) => {
            let request = Request::Remove { member, lost };
            asked(door, &request, &bar).map(drop)
        }
    };
    bar.finish_and_clear();
    removed.map_err(told)?;
    if args.json {
        print_json(&report)?;
    } else if lost {
        say(&format!(
            "Member {} is given up. Files that had bytes on it are still in the tree: restore them \
             from your backup, or delete them. `rushes pool where` says \"lost\" of them, and when \
             the pool is not mounted `rushes pool fsck {}` names each.\n",
            report.member, report.catalogue
        ))?;
    } else {
        say(&format!("Member {} is removed.\n", report.member))?;
    }
    Ok(ExitCode::SUCCESS)
}

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
    state: Standing,
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
    let door = Door::of(pool.catalogue().path()).and_then(Door::status);
    let door = door.unwrap_or_default();
    let mut members = Vec::new();
    for member in pool.members().iter() {
        let status = member.status();
        let (mut state, mut reason) = state_of(&status.state);
        let counted = match state {
            Standing::Missing => None,
            _ => Some(member.object_count()),
        };
        let number = member.number().0;
        let failing = door.failing.iter().find(|(failing, _)| *failing == number);
        let failing = failing.map(|(_, why)| why.clone());
        // One that fails does not hide the state of the others.
        let failed = counted.as_ref().and_then(|counted| counted.as_ref().err());
        if let Some(why) = failing.or_else(|| failed.map(ToString::to_string)) {
            (state, reason) = (Standing::Failing, Some(why));
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
                .all(|one| one.state == Standing::Present)
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
            Standing::Missing => String::from("?"),
            _ => show::bytes(bytes),
        };
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

/// A note on draining members: they go on draining after the command that began it has ended.
pub(crate) fn draining_text(catalogue: &str, members: impl Iterator<Item = u16>) -> String {
    members
        .map(|number| {
            format!(
                "Member {number} is draining: it takes no new bytes until it is removed from the \
                 pool or the drain is cancelled. `rushes pool drain {catalogue} {number}` moves \
                 its last files, then `rushes pool remove {catalogue} {number}` removes it; \
                 `rushes pool drain --cancel {catalogue} {number}` cancels the drain.\n"
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_member_is_told_from_the_mount_and_the_catalogue() {
        let members = [
            String::from("0 (/mnt/a/pool)"),
            String::from("1 (/mnt/b/pool)"),
        ];
        let (catalogue, mounts) = (Path::new("/mnt/ssd/c"), [PathBuf::from("/srv/media")]);
        let said = |path: &str| no_member(Path::new(path), catalogue, &mounts, &members);
        assert_eq!(
            said("/srv/media"),
            "/srv/media is where the pool is mounted, and no member of it; expected the number of a member, or its folder: 0 (/mnt/a/pool), \
             1 (/mnt/b/pool)"
        );
        assert!(said("/mnt/ssd/c").contains("is the pool's catalogue"));
        assert!(said("/mnt/c").contains("is no member of /mnt/ssd/c; expected"));
    }

    #[test]
    fn a_member_that_is_draining_says_how_that_goes_on_and_how_it_is_undone() {
        assert_eq!(draining_text("/c", std::iter::empty()), "");
        let said = draining_text("/c", [1].into_iter());
        for part in [
            "Member 1 is draining",
            "takes no new bytes",
            "rushes pool drain /c 1",
            "rushes pool remove /c 1",
            "rushes pool drain --cancel /c 1",
        ] {
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
