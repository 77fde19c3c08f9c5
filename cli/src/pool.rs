// SPDX-License-Identifier: Apache-2.0
//! `rushes pool`: makes a pool, shows its members, and finds a file's bytes. Does not ask the
//! daemon.

use crate::args::{PoolCommand, PoolCreateArgs, PoolLsArgs, PoolWhereArgs};
use crate::ask::{print_json, say};
use crate::show::{self, Table};
use crate::{pool_care, pool_destroy, pool_members, pool_mount, pool_policy};
use indicatif::{ProgressBar, ProgressStyle};
use rushes_fuse::Unwritten;
use rushes_pool::{
    Class, Duty, Layout, Member, MemberState, MemberStatus, Object, ObjectName, Pool, PoolError,
    Shape, Wanted,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// statfs(2): a file system in memory that keeps extended attributes.
const TMPFS: u64 = 0x0102_1994;
/// A mount has ended within this time after its unmount.
const ENDING: Duration = Duration::from_secs(10);
/// A shorter wait needs no message.
const SILENT: Duration = Duration::from_secs(1);

/// A pool and its members, for `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct PoolReport {
    pub(crate) catalogue: String,
    pub(crate) pool_id: String,
    pub(crate) policy: &'static str,
    pub(crate) wish: String,
    pub(crate) is_resumed: bool,
    pub(crate) bytes_total: u64,
    pub(crate) bytes_free: u64,
    pub(crate) device_count: usize,
    pub(crate) missing_count: usize,
    pub(crate) warnings: Vec<String>,
    pub(crate) members: Vec<MemberReport>,
}

/// A member.
#[derive(Debug, Serialize)]
pub(crate) struct MemberReport {
    pub(crate) number: u16,
    pub(crate) path: String,
    pub(crate) state: Standing,
    pub(crate) reason: Option<String>,
    pub(crate) duty: &'static str,
    pub(crate) bytes_total: u64,
    pub(crate) bytes_free: u64,
    pub(crate) assigned_class: Option<String>,
    pub(crate) same_device_as: Vec<u16>,
    pub(crate) with_catalogue: bool,
}

/// The places of a file's bytes.
#[derive(Debug, Serialize)]
pub(crate) struct FileReport {
    pub(crate) file: String,
    pub(crate) catalogue: String,
    pub(crate) bytes: u64,
    pub(crate) number: Option<u64>,
    pub(crate) generation: Option<u32>,
    pub(crate) wish: String,
    pub(crate) segments: Vec<SegmentReport>,
}

/// A part of it.
#[derive(Debug, Serialize)]
pub(crate) struct SegmentReport {
    pub(crate) start: u64,
    pub(crate) end: Option<u64>,
    pub(crate) shape: &'static str,
    pub(crate) unit_bytes: Option<u64>,
    pub(crate) objects: Vec<ObjectReport>,
}

/// An object that has its bytes.
#[derive(Debug, Serialize)]
pub(crate) struct ObjectReport {
    pub(crate) member: u16,
    pub(crate) assigned_class: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) state: Standing,
    pub(crate) reason: Option<String>,
}

pub(crate) fn run(command: &PoolCommand) -> Result<ExitCode, String> {
    match command {
        PoolCommand::Create(args) => create(args),
        PoolCommand::Destroy(args) => pool_destroy::destroy(args),
        PoolCommand::Ls(args) => ls(args),
        PoolCommand::Where(args) => where_is(args),
        PoolCommand::Mount(args) => pool_mount::mount(args),
        PoolCommand::Fsck(args) => pool_care::fsck(args),
        PoolCommand::Rescue(args) => pool_care::rescue(args),
        PoolCommand::Add(args) => pool_members::add(args),
        PoolCommand::Drain(args) => pool_members::drain(args),
        PoolCommand::Rebalance(args) => pool_members::rebalance(args),
        PoolCommand::Defrag(args) => pool_members::defrag(args),
        PoolCommand::Remove(args) => pool_members::remove(args),
        PoolCommand::Status(args) => pool_members::status(args),
        PoolCommand::Policy(args) => pool_policy::policy(args),
        PoolCommand::Export { command } => crate::export::run(command),
    }
}

pub(crate) fn told(error: PoolError) -> String {
    error.to_string()
}

fn create(args: &PoolCreateArgs) -> Result<ExitCode, String> {
    outlast_the_machine([&args.catalogue].into_iter().chain(&args.members))?;
    let wanted = Wanted {
        catalogue: args.catalogue.clone(),
        members: args.members.clone(),
        policy: args.policy,
    };
    let bar = ProgressBar::new(wanted.members.len() as u64);
    bar.set_style(
        ProgressStyle::with_template("{pos} of {len} members {bar:30}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let made = rushes_pool::create(&wanted, |done, _| bar.set_position(done as u64));
    bar.finish_and_clear();
    let made = made.map_err(told)?;
    let report = report(&made.pool, made.is_resumed)?;
    if args.json {
        print_json(&report)?;
    } else {
        let first = if made.is_resumed {
            "The pool is complete: an earlier create had made it, or a part of it.\n"
        } else {
            ""
        };
        say(&format!("{first}{}", text(&report)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses folders that are lost at a restart of the machine. The engine takes memory, too, for its
/// tests.
pub(crate) fn outlast_the_machine<'a>(
    mut folders: impl Iterator<Item = &'a PathBuf>,
) -> Result<(), String> {
    let is_in_memory =
        |path: &PathBuf| rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == TMPFS);
    folders
        .find(|path| is_in_memory(path))
        .map_or(Ok(()), |path| {
            Err(format!(
                "{} is on a file system in memory (tmpfs), which is empty after a restart of the \
             machine; expected ext4, XFS, btrfs or the like",
                path.display()
            ))
        })
}

/// A daemon that goes on writing after a mount has ended needs some seconds.
pub(crate) const WRITTEN_PATIENCE: Duration = Duration::from_secs(30);

/// A pool that is not mounted, once its objects have all acknowledged bytes.
pub(crate) fn settled(pool: Pool) -> Result<Pool, String> {
    has_all(&pool)?;
    Ok(pool)
}

/// Waits until no daemon has acknowledged bytes that its objects lack.
pub(crate) fn has_all(pool: &Pool) -> Result<(), String> {
    rushes_fuse::wait_until_written(pool, WRITTEN_PATIENCE, &say_that_it_waits).map_err(
        |unwritten| {
            format!(
                "{}: {unwritten}; expected all of them in their objects: {}, then repeat this",
                pool.catalogue().path().display(),
                how_to_write(&unwritten)
            )
        },
    )
}

/// A message to the terminal: the command has not begun its work.
pub(crate) fn say_that_it_waits(unwritten: &Unwritten) {
    eprintln!(
        "rushes: {unwritten}: waiting for {}, {} s at most",
        match unwritten.is_daemon_there {
            true => "them",
            false => "a daemon",
        },
        WRITTEN_PATIENCE.as_secs()
    );
}

/// How to get the bytes into their objects.
pub(crate) fn how_to_write(unwritten: &Unwritten) -> &'static str {
    match unwritten.is_daemon_there {
        true => {
            "see the log of that daemon, or of the `rushes recover` that runs there (`journalctl -u rushes`)"
        }
        false => {
            "start that daemon (`systemctl start rushes`), or write them with `rushes recover`"
        }
    }
}

fn ls(args: &PoolLsArgs) -> Result<ExitCode, String> {
    let catalogues = catalogues(args)?;
    let reports: Result<Vec<PoolReport>, String> = catalogues
        .iter()
        .map(|catalogue| report(&Pool::look(catalogue).map_err(told)?, false))
        .collect();
    let reports = reports?;
    print_all(&reports, args.json, "ls", text)?;
    let is_whole = reports
        .iter()
        .flat_map(|report| &report.members)
        .all(|member| member.state == Standing::Present);
    Ok(ExitCode::from(u8::from(!is_whole)))
}

/// Prints the report of `rushes pool COMMAND` on each of these pools.
pub(crate) fn print_all<Report: Serialize>(
    reports: &[Report],
    json: bool,
    command: &str,
    text: impl Fn(&Report) -> String,
) -> Result<(), String> {
    if json {
        return print_json(&reports);
    }
    if reports.is_empty() {
        return say(&format!(
            "No pool is mounted here. `rushes pool {command} CATALOGUE` looks at one that is not.\n"
        ));
    }
    let texts: Vec<String> = reports.iter().map(text).collect();
    say(&texts.join("\n"))
}

/// The catalogue of the pool in the arguments, or of all mounted pools.
pub(crate) fn catalogues(args: &PoolLsArgs) -> Result<Vec<PathBuf>, String> {
    if let Some(path) = &args.path {
        return Ok(vec![rushes_pool::find(path).map_err(told)?.catalogue]);
    }
    let mounted = rushes_pool::mounted().map_err(told)?;
    let mut all: Vec<PathBuf> = mounted.into_iter().map(|one| one.catalogue).collect();
    all.sort();
    all.dedup();
    Ok(all)
}

/// The state of a member, or of an object on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    /// It can be read and written.
    Present,
    /// It can be read.
    ReadOnly,
    /// It is missing.
    Missing,
    /// It is there, and its device returns errors.
    Failing,
    /// Its member was given up.
    Lost,
    /// Its member is there, and it cannot be opened.
    Unusable,
}

impl Standing {
    /// The word in tables.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Standing::Present => "present",
            Standing::ReadOnly => "read-only",
            Standing::Missing => "missing",
            Standing::Failing => "failing",
            Standing::Lost => "lost",
            Standing::Unusable => "unusable",
        }
    }
}

pub(crate) fn state_of(state: &MemberState) -> (Standing, Option<String>) {
    match state {
        MemberState::Present => (Standing::Present, None),
        MemberState::ReadOnly => (Standing::ReadOnly, None),
        MemberState::Missing(why) => (Standing::Missing, Some(why.clone())),
    }
}

pub(crate) fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The full path of something that a user may have named from the working folder.
pub(crate) fn whole(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// The class of a member, as shown.
pub(crate) fn class_of(member: &Member) -> Option<String> {
    member.class().map(Class::name).map(str::to_owned)
}

fn report(pool: &Pool, is_resumed: bool) -> Result<PoolReport, String> {
    let statuses: Vec<MemberStatus> = pool.members().iter().map(|m| m.status()).collect();
    let mut on_device: BTreeMap<u64, Vec<u16>> = BTreeMap::new();
    for (member, status) in pool.members().iter().zip(&statuses) {
        if let Some(device) = status.device {
            on_device.entry(device).or_default().push(member.number().0);
        }
    }
    let catalogue_device = pool.catalogue().device().map_err(told)?;
    let members = pool
        .members()
        .iter()
        .zip(&statuses)
        .map(|(member, status)| {
            let number = member.number().0;
            let (state, reason) = state_of(&status.state);
            let neighbours = status.device.and_then(|device| on_device.get(&device));
            MemberReport {
                number,
                path: shown(member.path()),
                state,
                reason,
                duty: member.duty().name(),
                bytes_total: status.bytes_total.0,
                bytes_free: status.bytes_free.0,
                assigned_class: class_of(member),
                same_device_as: neighbours
                    .into_iter()
                    .flatten()
                    .copied()
                    .filter(|&other| other != number)
                    .collect(),
                with_catalogue: status.device == Some(catalogue_device),
            }
        })
        .collect();
    let usage = pool.usage();
    Ok(PoolReport {
        catalogue: shown(pool.catalogue().path()),
        pool_id: format!("{:032x}", pool.id().0),
        policy: pool.wish().choose.unwrap_or(pool.policy()).name(),
        wish: pool.wish().to_string(),
        is_resumed,
        bytes_total: usage.bytes_total.0,
        bytes_free: usage.bytes_free.0,
        device_count: usage.device_count,
        missing_count: usage.missing_count,
        warnings: pool.place_warnings(),
        members,
    })
}

fn text(report: &PoolReport) -> String {
    let mut table = Table::new(&["member", "path", "state", "size", "free", ""]);
    for member in &report.members {
        let mut remarks: Vec<String> = member.reason.clone().into_iter().collect();
        if member.duty != Duty::Full.name() {
            remarks.push(format!("{}, takes nothing new", member.duty));
        }
        remarks.extend(
            member
                .assigned_class
                .iter()
                .map(|class| format!("class {class}")),
        );
        if !member.same_device_as.is_empty() {
            let others: Vec<String> = member
                .same_device_as
                .iter()
                .map(|other| other.to_string())
                .collect();
            remarks.push(format!("on one device with {}", others.join(", ")));
        }
        if member.with_catalogue {
            remarks.push(String::from("on one device with the catalogue"));
        }
        let size = |bytes| match member.state {
            Standing::Missing => String::from("?"),
            _ => show::bytes(bytes),
        };
        table.row(vec![
            member.number.to_string(),
            member.path.clone(),
            member.state.word().to_owned(),
            size(member.bytes_total),
            size(member.bytes_free),
            remarks.join("; "),
        ]);
    }
    let devices = match report.device_count {
        1 => String::from("one device"),
        count => format!("{count} devices"),
    };
    let missing = match report.missing_count {
        0 => String::new(),
        count => format!(", {count} of {} members missing", report.members.len()),
    };
    let warnings: String = report
        .warnings
        .iter()
        .map(|warning| format!("Warning: {warning}.\n"))
        .collect();
    let draining = report.members.iter();
    let draining = draining.filter(|member| member.duty == Duty::Draining.name());
    format!(
        "pool {} ({}), {} free of {} on {devices}{missing}\n{}{}{warnings}",
        report.catalogue,
        with_wish(report.policy, &report.wish),
        show::bytes(report.bytes_free),
        show::bytes(report.bytes_total),
        table.text(),
        pool_members::draining_text(&report.catalogue, draining.map(|member| member.number))
    )
}

/// "most_free_space; class=ssd"
pub(crate) fn with_wish(first: &str, wish: &str) -> String {
    match wish {
        "" => first.to_owned(),
        wish => format!("{first}; {wish}"),
    }
}

fn where_is(args: &PoolWhereArgs) -> Result<ExitCode, String> {
    // One that is wrong keeps nobody from the others.
    let mut reports: Vec<FileReport> = Vec::new();
    let mut faults: Vec<String> = Vec::new();
    for file in &args.files {
        match file_report(file) {
            Ok(report) => reports.push(report),
            Err(fault) => faults.push(fault),
        }
    }
    if args.json {
        print_json(&reports)?;
    } else {
        let texts: Vec<String> = reports.iter().map(file_text).collect();
        say(&texts.join("\n"))?;
    }
    for fault in &faults {
        eprintln!("rushes: {fault}");
    }
    if !faults.is_empty() {
        return Ok(ExitCode::from(2));
    }
    let is_whole = reports
        .iter()
        .flat_map(|report| &report.segments)
        .flat_map(|segment| &segment.objects)
        .all(|object| matches!(object.state, Standing::Present | Standing::ReadOnly));
    Ok(ExitCode::from(u8::from(!is_whole)))
}

fn file_report(file: &Path) -> Result<FileReport, String> {
    let place = rushes_pool::find(file).map_err(told)?;
    let pool = Pool::look(&place.catalogue).map_err(told)?;
    let said = |error: PoolError| format!("{}: {error}", file.display());
    let stub = pool
        .catalogue()
        .open_file_below(&place.below)
        .map_err(said)?;
    let bytes = rustix::fs::fstat(&stub)
        .map_err(|error| format!("{}: {error}", file.display()))?
        .st_size as u64;
    let layout = pool.layout(stub.as_fd()).map_err(said)?;
    let segments = layout
        .as_ref()
        .map(|layout| segments(&pool, layout))
        .unwrap_or_default();
    Ok(FileReport {
        file: shown(&whole(file)),
        catalogue: shown(pool.catalogue().path()),
        bytes,
        number: layout.as_ref().map(|layout| layout.file.number),
        generation: layout.as_ref().map(|layout| layout.file.generation),
        wish: pool.wish_of(stub.as_fd()).to_string(),
        segments,
    })
}

fn segments(pool: &Pool, layout: &Layout) -> Vec<SegmentReport> {
    layout
        .segments()
        .iter()
        .enumerate()
        .map(|(at, segment)| {
            let end = layout.range_of(at).end();
            SegmentReport {
                start: segment.start.0,
                end: (end != u64::MAX).then_some(end),
                shape: match segment.shape {
                    Shape::Single => "single",
                    Shape::Striped { .. } => "striped",
                    Shape::StripedTwice { .. } => "striped_twice",
                },
                unit_bytes: (segment.shape != Shape::Single).then(|| segment.shape.unit_bytes()),
                objects: segment
                    .objects
                    .iter()
                    .map(|&object| object_report(pool, layout, object))
                    .collect(),
            }
        })
        .collect()
}

/// Opens the pool for this process alone. A mount that was unmounted a moment ago still writes its
/// names and ends in a while: this waits for it.
pub(crate) fn serve(catalogue: &Path) -> Result<Pool, PoolError> {
    let end = Instant::now() + ENDING;
    let mut is_said = false;
    loop {
        let error = match Pool::serve(catalogue) {
            Err(error @ PoolError::Served { .. }) => error,
            opened => return opened,
        };
        let path = catalogue.canonicalize();
        let is_mounted = path
            .is_ok_and(|path| rushes_pool::mounts_of(&path).is_ok_and(|mounts| !mounts.is_empty()));
        if is_mounted {
            return Err(error);
        }
        if Instant::now() > end {
            return Err(with_keeper(error));
        }
        if !is_said && Instant::now() + ENDING > end + SILENT {
            eprintln!(
                "rushes: {}. Waiting for its end, {} s at most",
                with_keeper(error),
                ENDING.as_secs()
            );
            is_said = true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// For a pool that is not mounted here: names the process elsewhere that keeps it. It looks at all
/// processes, so not at each try.
fn with_keeper(error: PoolError) -> PoolError {
    match error {
        PoolError::Served {
            catalogue,
            mut holder,
        } => {
            if let Some(clause) = rushes_pool::kept_elsewhere(&catalogue) {
                holder += &format!(", unmounted here, but {clause}");
            }
            PoolError::Served { catalogue, holder }
        }
        other => other,
    }
}

fn object_report(pool: &Pool, layout: &Layout, object: Object) -> ObjectReport {
    let member = pool.member(object.member);
    let opened = pool.open_object(layout, object, rushes_pool::Access::Read);
    let (state, reason) = match (member.as_ref().map(|member| member.status().state), opened) {
        (Some(state @ (MemberState::Present | MemberState::ReadOnly)), Ok(_)) => state_of(&state),
        (Some(state @ MemberState::Missing(_)), _) => state_of(&state),
        (None, Err(error @ PoolError::Lost { .. })) => (Standing::Lost, Some(error.to_string())),
        (None, Err(error)) => (Standing::Missing, Some(error.to_string())),
        (Some(_), Err(error)) => (Standing::Unusable, Some(error.to_string())),
        (None, Ok(_)) => (Standing::Unusable, None),
    };
    ObjectReport {
        member: object.member.0,
        assigned_class: member.as_ref().and_then(|member| class_of(member)),
        path: member.map(|member| shown(&member.path().join(ObjectName::of(object.id).as_str()))),
        state,
        reason,
    }
}

fn file_text(report: &FileReport) -> String {
    let head = with_wish(
        &format!(
            "{}: {}",
            show::one_line(&report.file),
            show::bytes(report.bytes)
        ),
        &report.wish,
    );
    if report.segments.is_empty() {
        return format!("{head}, no member has bytes of it\n");
    }
    let mut table = Table::new(&["from", "to", "member", "object", ""]);
    for segment in &report.segments {
        for object in &segment.objects {
            table.row(vec![
                segment.start.to_string(),
                segment
                    .end
                    .map_or_else(|| String::from("end"), |end| end.to_string()),
                match &object.assigned_class {
                    Some(class) => format!("{} ({class})", object.member),
                    None => object.member.to_string(),
                },
                object.path.clone().unwrap_or_default(),
                match (object.state, &object.reason) {
                    (Standing::Present, _) => String::new(),
                    (state, None) => state.word().to_owned(),
                    (state, Some(reason)) => format!("{}: {reason}", state.word()),
                },
            ]);
        }
    }
    format!("{head}\n{}", table.text())
}
