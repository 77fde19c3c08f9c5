// SPDX-License-Identifier: Apache-2.0
//! `rushes pool destroy`: a pool that was made is none any more, or a member's folder that no pool has is free. What may go, and in which order: engine/pool.

use crate::args::PoolDestroyArgs;
use crate::ask::{print_json, runtime_dir, say};
use crate::pool::{WRITTEN_PATIENCE, has_all, shown, told};
use crate::pool_care::counter;
use crate::show;
use rushes_pool::{Doomed, Files, Orphan};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// A pool that is gone, or could be.
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
    let catalogue = match (&args.member, &args.catalogue) {
        (Some(member), _) => return free(args, member, files),
        (None, Some(catalogue)) => catalogue,
        (None, None) => {
            return Err(String::from("no pool was named; expected its catalogue"));
        }
    };
    let doomed = Doomed::look(catalogue, files, crate::pool::serve).map_err(told)?;
    if !doomed.is_resumed {
        has_all(doomed.pool())?;
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
            "The pool {} has {files}, and {} objects. With --yes it is none any more, and what is the pool's in these folders goes: {folders}\n",
            report.catalogue, report.object_count
        );
    }
    format!(
        "The pool {} is no more. Its folders are free: {folders}\n{}",
        report.catalogue,
        rest(&report.left)
    )
}

fn rest(left: &[String]) -> String {
    let left: String = left.iter().map(|path| format!("  {path}\n")).collect();
    match left.as_str() {
        "" => String::new(),
        left => format!("What is not the pool's is still there:\n{left}"),
    }
}

/// A member's folder that is free, or could be.
#[derive(Debug, Serialize)]
struct OrphanReport {
    folder: String,
    pool_id: String,
    member: u16,
    catalogue: Option<String>,
    is_done: bool,
    file_count: u64,
    object_count: u64,
    bytes: u64,
    left: Vec<String>,
}

fn free(args: &PoolDestroyArgs, member: &Path, files: Files) -> Result<ExitCode, String> {
    let orphan = Orphan::look(member).map_err(told)?;
    let mut report = OrphanReport {
        folder: shown(orphan.path()),
        pool_id: format!("{:032x}", orphan.pool().0),
        member: orphan.number().0,
        catalogue: orphan.catalogue.as_deref().map(shown),
        is_done: args.yes,
        file_count: orphan.file_count,
        object_count: orphan.object_count,
        bytes: orphan.bytes,
        left: Vec::new(),
    };
    if args.yes {
        let folders = [orphan.path().to_path_buf()];
        let runtime_dir = runtime_dir(&args.daemon)?;
        rushes_fuse::wait_until_members_have_all(&folders, &runtime_dir, WRITTEN_PATIENCE)
            .map_err(|unwritten| {
                format!(
                    "{unwritten}; expected all of them on their disks: start that daemon, or write them with `rushes recover`, then repeat this"
                )
            })?;
        let freed = orphan.free(files).map_err(told)?;
        report.left = freed.left.iter().map(|path| shown(path)).collect();
    }
    if args.json {
        print_json(&report)?;
    } else {
        say(&orphan_text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn orphan_text(report: &OrphanReport) -> String {
    if report.is_done {
        return format!("{} is free.\n{}", report.folder, rest(&report.left));
    }
    let whose = match &report.catalogue {
        Some(catalogue) => format!("The pool {catalogue} has it no more."),
        None => String::from(
            "No catalogue of that pool was found on this machine: if the pool is in use elsewhere, or its catalogue is to be made anew (`rushes pool rescue`), leave this folder as it is.",
        ),
    };
    let (has, words) = match report.object_count {
        0 => (String::from("no bytes of files"), "--yes"),
        _ => (
            format!(
                "bytes of {} files, {}, which are lost for good then",
                report.file_count,
                show::bytes(report.bytes)
            ),
            "--with-files --yes",
        ),
    };
    format!(
        "{} was member {} of the pool {}. {whose} It has {has}. With {words} what is the pool's goes, and it is an ordinary folder again.\n",
        report.folder, report.member, report.pool_id
    )
}
