// SPDX-License-Identifier: Apache-2.0
//! `rushes pool destroy`: deletes a pool. engine/pool has the parts that may go, and their order.

use super::bars::counter;
use super::opening::{serve, wait_until_written};
use super::words::{shown, told};
use crate::args::PoolDestroyArgs;
use crate::ask::{print_json, say};
use crate::show;
use rushes_pool::{Doomed, Files};
use serde::Serialize;
use std::process::ExitCode;

/// A pool that is deleted, or could be.
#[derive(Debug, Serialize)]
struct DestroyReport {
    catalogue: String,
    is_done: bool,
    is_resumed: bool,
    has_files: bool,
    object_count: u64,
    folders: Vec<String>,
    left: Vec<String>,
}

pub(crate) fn destroy(args: &PoolDestroyArgs) -> Result<ExitCode, String> {
    let files = match args.with_files {
        true => Files::Go,
        false => Files::None,
    };
    let doomed = Doomed::look(&args.catalogue, files, serve).map_err(told)?;
    if !doomed.is_resumed {
        wait_until_written(doomed.pool())?;
    }
    let mut report = DestroyReport {
        catalogue: shown(doomed.catalogue()),
        is_done: args.yes,
        is_resumed: doomed.is_resumed,
        has_files: doomed.has_files,
        object_count: doomed.object_count,
        folders: doomed.folders().iter().map(|path| shown(path)).collect(),
        left: Vec::new(),
    };
    if args.yes {
        let bar = counter("{pos} members");
        let destroyed = doomed.destroy(|done| bar.set_position(done as u64));
        bar.finish_and_clear();
        let destroyed = destroyed.map_err(told)?;
        report.left = destroyed.left.iter().map(|path| shown(path)).collect();
    }
    if args.json {
        print_json(&report)?;
    } else {
        say(&text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(report: &DestroyReport) -> String {
    let folders = report.folders.join(" ");
    if !report.is_done {
        let files = match report.has_files {
            true => "all its files, which are lost for good then",
            false => "no file",
        };
        return format!(
            "The pool {} has {files}, and {}. With --yes the pool is deleted, with everything of it in these folders: {folders}\n",
            report.catalogue,
            show::count(report.object_count, "object")
        );
    }
    let left: String = report
        .left
        .iter()
        .map(|path| format!("  {path}\n"))
        .collect();
    let rest = match left.as_str() {
        "" => String::new(),
        left => format!("Files that are not the pool's are still there:\n{left}"),
    };
    format!(
        "The pool {} is deleted. Its folders are free: {folders}\n{rest}",
        report.catalogue
    )
}
