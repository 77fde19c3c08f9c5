// SPDX-License-Identifier: Apache-2.0
//! `rushes pool create`: makes a pool.

use super::listing::{report, text};
use super::words::told;
use crate::args::PoolCreateArgs;
use crate::ask::{print_json, say};
use indicatif::{ProgressBar, ProgressStyle};
use rushes_pool::Wanted;
use std::path::PathBuf;
use std::process::ExitCode;

/// statfs(2): a file system in memory that keeps extended attributes.
const TMPFS: u64 = 0x0102_1994;

pub(crate) fn create(args: &PoolCreateArgs) -> Result<ExitCode, String> {
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
