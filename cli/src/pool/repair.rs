// SPDX-License-Identifier: Apache-2.0
//! `rushes pool fsck` and `rushes pool rescue`: repair a pool that is not mounted. They do not ask
//! the daemon.

use super::bars::counter;
use super::error::CommandError;
use super::opening::{WRITTEN_PATIENCE, say_that_it_waits, serve, settled};
use super::words::{shown, told};
use crate::args::{PoolFsckArgs, PoolRescueArgs};
use crate::ask::{print_json, runtime_dir, say};
use crate::show;
use rushes_pool::{Fsck, ObjectName, Progress, State};
use serde::Serialize;
use std::process::ExitCode;

/// The result of a check of a pool.
#[derive(Debug, Serialize)]
pub(crate) struct FsckReport {
    pub(crate) catalogue: String,
    pub(crate) file_count: u64,
    pub(crate) object_count: u64,
    pub(crate) behind_end_count: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) missing: Vec<MissingReport>,
    pub(crate) findings: Vec<FindingReport>,
    pub(crate) left_count: usize,
}

/// A member that could not be checked.
#[derive(Debug, Serialize)]
pub(crate) struct MissingReport {
    pub(crate) member: u16,
    pub(crate) reason: String,
}

/// An inconsistency.
#[derive(Debug, Serialize)]
pub(crate) struct FindingReport {
    pub(crate) kind: &'static str,
    pub(crate) sentence: String,
    pub(crate) file: Option<String>,
    pub(crate) member: Option<u16>,
    pub(crate) object: Option<String>,
    pub(crate) state: &'static str,
    pub(crate) mended_by: Option<String>,
}

pub(crate) fn fsck(args: &PoolFsckArgs) -> Result<ExitCode, String> {
    let pool = settled(serve(&args.catalogue).map_err(told)?)?;
    let bar = counter("{msg}");
    let done = rushes_pool::fsck(&pool, args.repair, |progress| {
        bar.set_message(message(progress));
    });
    bar.finish_and_clear();
    let report = FsckReport::of(shown(pool.catalogue().path()), done.map_err(told)?);
    if args.json {
        print_json(&report)?;
    } else {
        say(&text(&report, args.repair))?;
    }
    Ok(ExitCode::from(u8::from(!report.is_well())))
}

fn message(progress: Progress) -> String {
    match progress {
        Progress::Files(count) => show::count(count, "file"),
        Progress::Objects(count) => show::count(count, "object"),
        Progress::Mending(done, of) => format!("{done} of {}", show::count(of as u64, "finding")),
    }
}

/// A rebuilt catalogue.
#[derive(Debug, Serialize)]
pub(crate) struct RescueReport {
    pub(crate) name_count: u64,
    pub(crate) log_serial: Option<u64>,
    pub(crate) attributes_lost: u64,
    pub(crate) fsck: FsckReport,
}

/// The lost catalogue named the pool's daemon: instead this looks at the daemon of this machine's
/// configuration.
fn members_have_all(args: &PoolRescueArgs) -> Result<(), String> {
    let runtime_dir = runtime_dir(&args.daemon)?;
    let waited = rushes_fuse::wait_until_members_have_all(
        &args.members,
        &runtime_dir,
        WRITTEN_PATIENCE,
        &say_that_it_waits,
    );
    waited.map_err(|unwritten| {
        let error = CommandError::NotWritten {
            catalogue: None,
            unwritten,
        };
        error.into()
    })
}

pub(crate) fn rescue(args: &PoolRescueArgs) -> Result<ExitCode, String> {
    members_have_all(args)?;
    let bar = counter("{msg}");
    let done = rushes_pool::rescue(&args.catalogue, &args.members, |progress| {
        bar.set_message(message(progress));
    });
    bar.finish_and_clear();
    let done = done.map_err(told)?;
    let report = RescueReport {
        name_count: done.name_count,
        log_serial: done.log_serial,
        attributes_lost: done.attributes_lost,
        fsck: FsckReport::of(shown(&done.catalogue), done.fsck),
    };
    if args.json {
        print_json(&report)?;
    } else {
        let first = match report.log_serial {
            Some(_) => names_back(report.name_count),
            None => String::from("No member has a log of names: files are in lost+found.\n"),
        };
        let lost = match report.attributes_lost {
            0 => String::new(),
            count => format!(
                "The file system refused {}.\n",
                show::count(count, "attribute")
            ),
        };
        say(&format!("{first}{lost}{}", text(&report.fsck, true)))?;
    }
    let is_whole =
        report.fsck.is_well() && report.attributes_lost == 0 && report.log_serial.is_some();
    Ok(ExitCode::from(u8::from(!is_whole)))
}

fn names_back(count: u64) -> String {
    match count {
        1 => String::from("1 name is back.\n"),
        _ => format!("{count} names are back.\n"),
    }
}

impl FsckReport {
    /// Whether all of the pool was checked, and no inconsistency is left.
    fn is_well(&self) -> bool {
        self.left_count == 0 && self.missing.is_empty()
    }

    fn of(catalogue: String, found: Fsck) -> FsckReport {
        FsckReport {
            catalogue,
            file_count: found.file_count,
            object_count: found.object_count,
            behind_end_count: found.behind_end_count,
            reserved_bytes: found.reserved_bytes,
            left_count: found.left_count(),
            missing: found
                .missing
                .iter()
                .map(|(member, reason)| MissingReport {
                    member: member.0,
                    reason: reason.clone(),
                })
                .collect(),
            findings: found.issues.into_iter().map(FindingReport::of).collect(),
        }
    }
}

impl FindingReport {
    fn of(issue: rushes_pool::Issue) -> FindingReport {
        let (state, mended_by) = match issue.state {
            State::Mendable => ("mendable", None),
            State::Mended(how) => ("mended", Some(how)),
            State::Open => ("open", None),
        };
        FindingReport {
            kind: issue.kind.name(),
            sentence: issue.sentence,
            file: issue.path.map(|path| shown(&path)),
            member: issue.object.map(|object| object.member.0),
            object: issue
                .object
                .map(|object| ObjectName::of(object.id).as_str().to_owned()),
            state,
            mended_by,
        }
    }
}

fn text(report: &FsckReport, repair: bool) -> String {
    let mut text = format!(
        "pool {}: {}, {}\n",
        report.catalogue,
        show::count(report.file_count, "file"),
        show::count(report.object_count, "object")
    );
    for missing in &report.missing {
        text += &format!(
            "  member {} was not checked: its folder {}\n",
            missing.member, missing.reason
        );
    }
    for finding in &report.findings {
        text += &match (&finding.mended_by, finding.state) {
            (Some(how), _) => format!("  {}; mended: {how}\n", show::one_line(&finding.sentence)),
            (None, "mendable") => {
                format!(
                    "  {} (--repair mends it)\n",
                    show::one_line(&finding.sentence)
                )
            }
            _ => format!("  {}\n", show::one_line(&finding.sentence)),
        };
    }
    let is_all = report.missing.is_empty();
    text += &match (report.findings.len(), report.left_count) {
        (0, _) if is_all => String::from("Nothing is wrong.\n"),
        (0, _) => String::from(
            "Nothing is wrong in the part that was checked. Repeat this when all members are \
             there.\n",
        ),
        (_, 0) if is_all => String::from("All of it is mended.\n"),
        (_, 0) => {
            String::from("All that was found is mended. Repeat this when all members are there.\n")
        }
        (_, left) if repair => format!("{left} could not be mended.\n"),
        (_, left) => format!(
            "{}. Nothing was changed.\n",
            show::count(left as u64, "finding")
        ),
    };
    text
}
