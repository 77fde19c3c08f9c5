// SPDX-License-Identifier: Apache-2.0
//! `rushes pool fsck`: looking after a pool that is not mounted. No daemon is asked.

use crate::args::PoolFsckArgs;
use crate::ask::{print_json, say};
use crate::pool::{shown, told};
use indicatif::{ProgressBar, ProgressStyle};
use rushes_pool::{ObjectName, Pool, Progress, State};
use serde::Serialize;
use std::process::ExitCode;

/// What a look through a pool came to.
#[derive(Debug, Serialize)]
pub(crate) struct FsckReport {
    pub(crate) catalogue: String,
    pub(crate) file_count: u64,
    pub(crate) object_count: u64,
    pub(crate) behind_end_count: u64,
    pub(crate) missing: Vec<MissingReport>,
    pub(crate) findings: Vec<FindingReport>,
    pub(crate) left_count: usize,
}

/// A member that could not be looked at.
#[derive(Debug, Serialize)]
pub(crate) struct MissingReport {
    pub(crate) member: u16,
    pub(crate) reason: String,
}

/// Something that does not fit.
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

/// For work whose length is not known beforehand.
pub(crate) fn counter(template: &str) -> ProgressBar {
    let bar = ProgressBar::no_length();
    bar.set_style(
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    bar
}

pub(crate) fn fsck(args: &PoolFsckArgs) -> Result<ExitCode, String> {
    let pool = Pool::serve(&args.catalogue).map_err(told)?;
    let bar = counter("{msg}");
    let done = rushes_pool::fsck(&pool, args.repair, |progress| {
        bar.set_message(match progress {
            Progress::Files(count) => format!("{count} files"),
            Progress::Objects(count) => format!("{count} objects"),
            Progress::Mending(done, of) => format!("{done} of {of} findings"),
        });
    });
    bar.finish_and_clear();
    let found = done.map_err(told)?;
    let report = FsckReport {
        catalogue: shown(pool.catalogue().path()),
        file_count: found.file_count,
        object_count: found.object_count,
        behind_end_count: found.behind_end_count,
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
    };
    if args.json {
        print_json(&report)?;
    } else {
        say(&text(&report, args.repair))?;
    }
    Ok(ExitCode::from(u8::from(report.left_count > 0)))
}

impl FindingReport {
    fn of(issue: rushes_pool::Issue) -> FindingReport {
        let (state, mended_by) = match issue.state {
            State::Mendable => ("mendable", None),
            State::Mended(how) => ("mended", Some(how)),
            State::Open => ("open", None),
        };
        FindingReport {
            kind: issue.kind,
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
        "pool {}: {} files, {} objects\n",
        report.catalogue, report.file_count, report.object_count
    );
    for missing in &report.missing {
        text += &format!(
            "  member {} was not looked at: its folder {}\n",
            missing.member, missing.reason
        );
    }
    for finding in &report.findings {
        text += &match (&finding.mended_by, finding.state) {
            (Some(how), _) => format!("  {}; mended: {how}\n", finding.sentence),
            (None, "mendable") => format!("  {} (--repair mends it)\n", finding.sentence),
            _ => format!("  {}\n", finding.sentence),
        };
    }
    text += &match (report.findings.len(), report.left_count) {
        (0, _) => String::from("Nothing is wrong.\n"),
        (_, 0) => String::from("All of it is mended.\n"),
        (_, left) if repair => format!("{left} could not be mended.\n"),
        (_, left) => format!("{left} findings. Nothing was changed.\n"),
    };
    text
}
