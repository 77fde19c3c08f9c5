// SPDX-License-Identifier: Apache-2.0
//! `rushes pool rebalance` and `defrag`: files that move to other members, or into fewer segments.

use super::bars::{counter, waiting};
use super::hand::{Hand, asked, failed_text, moved_so_far, say_when_interrupted};
use super::opening::seen;
use super::state::{ShownState, state_of};
use super::words::{shown, told};
use crate::args::{PoolCatalogueArgs, PoolDefragArgs};
use crate::ask::{print_json, say};
use rushes_pool::{Drained, Evenness, Failed, Failure, Fragments, Request};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    state: ShownState,
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

/// The result of a defrag.
#[derive(Debug, Serialize)]
struct DefragReport {
    catalogue: String,
    file_count: u64,
    moved_count: u64,
    moved_bytes: u64,
    before: FragmentsReport,
    after: FragmentsReport,
    failed_count: u64,
    failed: Vec<Failure>,
}

/// The number of segments and extents of files.
#[derive(Debug, Serialize)]
struct FragmentsReport {
    segment_count: u64,
    extent_count: u64,
}

impl FragmentsReport {
    fn of(fragments: Fragments) -> FragmentsReport {
        FragmentsReport {
            segment_count: fragments.segment_count,
            extent_count: fragments.extent_count,
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
    let (done, fragments, failed) = done.map_err(told)?;
    let report = DefragReport {
        catalogue,
        file_count: done.file_count,
        moved_count: done.moved_count,
        moved_bytes: done.moved_bytes,
        before: FragmentsReport::of(fragments.before),
        after: FragmentsReport::of(fragments.after),
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
