// SPDX-License-Identifier: Apache-2.0
//! `make hunt-stale`: programs on the server change files in every way, and clients read them over
//! SMB meanwhile.
//!
//! `smb-stale [--seconds N] [--seed N] [--workers N] [--only WORKER] [--fs ext4|xfs] [--buffer
//! BYTES] [--way NAME]... [--analyser 1] [--first-fault 1] [--modules NAMES]`
//!
//! `--modules ""` is Samba alone. It shows whether the model or our module is to blame.

use rushes_tests::stale::{self, Plan, XFS};
use rushes_tests::words::{explained, pairs};
use rushes_tests::world::{Backing, World};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
Files that programs of the server change in every way, read over SMB meanwhile: is what is read as old as it may be?
Needs root and the built release programs.

smb-stale [--seconds N] [--seed N] [--workers N] [--only WORKER] [--fs ext4|xfs] [--buffer BYTES] [--way NAME]...
          [--analyser 1] [--first-fault 1] [--modules NAMES]

--seconds N       how long; 600
--seed N          what is drawn; 1
--workers N       files at once; 8
--only WORKER     this one alone
--fs KIND         ext4 or xfs; ext4
--buffer BYTES    with a write buffer of so much, such as 64MiB
--way NAME        change files in this way alone; may be said again
--analyser 1      reads are recognised, and fetched ahead
--first-fault 1   stop at the first
--modules NAMES   vfs objects of the share; \"\" is Samba alone

Exit code: 0 without a fault, 1 with one, 2 asked wrongly, 3 something is missing here.";

fn main() -> ExitCode {
    if explained(USAGE) {
        return ExitCode::SUCCESS;
    }
    let (plan, setup) = match read(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("smb-stale: {error}");
            return ExitCode::from(2);
        }
    };
    let Some(mut world) = World::build(&setup) else {
        return ExitCode::from(3);
    };
    let report = stale::run(world.smbd.port(), world.disk.path(), &plan);
    let status = world.daemon().status();
    println!("stale: daemon: {}", status["cache"]);
    println!(
        "stale: seed {}: {} changes in {} rounds, {} faults; the slowest reader was right after {:.3} s",
        plan.seed,
        report.changes,
        report.rounds,
        report.faults.len(),
        report.slowest.as_secs_f64()
    );
    if report.faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn read(words: impl Iterator<Item = String>) -> Result<(Plan, rushes_tests::world::Setup), String> {
    let mut plan = Plan {
        seed: 1,
        time: Duration::from_secs(600),
        workers: 8,
        only: None,
        ways: Vec::new(),
        timed: true,
        go_on: true,
    };
    let (mut backing, mut buffer, mut modules, mut analyser) = (Backing::Ext4, None, None, false);
    for pair in pairs(words) {
        let pair = pair?;
        match pair.word.as_str() {
            "--seconds" => plan.time = Duration::from_secs(pair.number()?),
            "--seed" => plan.seed = pair.number()?,
            "--workers" => plan.workers = pair.number()?.max(1),
            "--only" => plan.only = Some(pair.number()?),
            "--way" => plan.ways.push(pair.value),
            "--first-fault" => plan.go_on = pair.number()? == 0,
            "--buffer" => buffer = Some(&*pair.value.leak()),
            "--modules" => modules = Some(pair.value),
            "--analyser" => analyser = pair.number()? != 0,
            "--fs" if pair.value == "ext4" => backing = Backing::Ext4,
            "--fs" if pair.value == "xfs" => backing = XFS,
            _ => return Err(pair.unknown()),
        }
    }
    let mut setup = stale::setup(backing, buffer, analyser);
    setup.modules = modules.unwrap_or(setup.modules);
    Ok((plan, setup))
}
