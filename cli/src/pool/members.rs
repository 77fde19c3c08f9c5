// SPDX-License-Identifier: Apache-2.0
//! `rushes pool add`, `drain` and `remove`: the members of a pool.

use super::bars::{counter, waiting};
use super::create::outlast_the_machine;
use super::hand::{Done, Hand, asked, failed_text, moved_so_far, say_when_interrupted};
use super::opening::seen;
use super::words::{shown, told, whole};
use crate::args::{PoolAddArgs, PoolDrainArgs, PoolRemoveArgs};
use crate::ask::{print_json, say};
use crate::show;
use indicatif::ProgressBar;
use rushes_pool::{Class, Failure, MemberNumber, Nobody, Parting, Pool, PoolError, Request};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Members that were added.
#[derive(Debug, Serialize)]
struct AddReport {
    catalogue: String,
    numbers: Vec<u16>,
    warnings: Vec<String>,
}

pub(crate) fn add(args: &PoolAddArgs) -> Result<ExitCode, String> {
    let catalogue = shown(seen(&args.catalogue)?.catalogue().path());
    outlast_the_machine(args.members.iter())?;
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

/// A removed member.
#[derive(Debug, Serialize)]
struct RemoveReport {
    catalogue: String,
    member: u16,
    lost: bool,
}

/// Without --yes a missing member is not given up. One that is there is refused in any case.
fn require_yes(pool: &Pool, number: MemberNumber) -> Result<(), String> {
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
        require_yes(&pool, number)?;
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
}
