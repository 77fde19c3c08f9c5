// SPDX-License-Identifier: Apache-2.0
//! `make fsx`: a million random operations through a real smbd and a daemon that keeps written
//! bytes.
//!
//! `smb-fsx [--operations N] [--seed N] [--workers N] [--only WORKER] [--clients N] [--buffer
//! BYTES] [--share LINE]... [--global LINE]... [--modules NAMES] [--kill MS]`
//!
//! `--modules ""` is Samba alone. It shows whether the model or our module is to blame.

use rushes_tests::fsx::{self, Plan};
use rushes_tests::words::{explained, pairs};
use rushes_tests::world::{Setup, World};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The words of the command line.
struct Asked {
    plan: Plan,
    setup: Setup,
    /// Kill the daemon this often.
    kill: Option<Duration>,
}

const USAGE: &str = "\
Random operations through a real smbd and a daemon that keeps written bytes, compared with a model.
Needs root and the built release programs.

smb-fsx [--operations N] [--seed N] [--workers N] [--only WORKER] [--clients N] [--buffer BYTES]
        [--share LINE]... [--global LINE]... [--modules NAMES] [--kill MS]

--operations N    how many in all; 1000000
--seed N          what is drawn; 1
--workers N       files at once; 16
--only WORKER     this one alone
--clients N       connections to each file; 2
--buffer BYTES    the write buffer; 64MiB
--share LINE      for the share's section of smb.conf; may be said again
--global LINE     for [global]; may be said again
--modules NAMES   vfs objects of the share; \"\" is Samba alone
--kill MS         kill the daemon this often

Exit code: 0 without a divergence, 1 with one, 2 asked wrongly, 3 something is missing here.";

fn main() -> ExitCode {
    if explained(USAGE) {
        return ExitCode::SUCCESS;
    }
    let asked = match read(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("smb-fsx: {error}");
            return ExitCode::from(2);
        }
    };
    let Some(mut world) = World::build(&asked.setup) else {
        return ExitCode::from(3);
    };

    let begun = Instant::now();
    let mut daemon = world.daemon.take().expect("it runs with a daemon");
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            let Some(pause) = asked.kill else { return };
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(pause);
                daemon.kill();
                daemon.start_again();
            }
        });
        let result = fsx::run(world.smbd.port(), world.disk.path(), &asked.plan);
        done.store(true, Ordering::Relaxed);
        result
    });
    world.daemon = Some(daemon);
    match result {
        Ok(report) => {
            let seconds = begun.elapsed().as_secs_f64();
            for (kind, count) in &report.kinds {
                println!("fsx: {count:8} {kind}");
            }
            println!("fsx: daemon: {}", world.daemon().status()["write"]);
            println!(
                "fsx: {} operations of seed {} in {seconds:.0} s, no divergence",
                report.operations, asked.plan.seed
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            eprintln!("fsx: DIVERGED after {:.0} s", begun.elapsed().as_secs_f64());
            ExitCode::FAILURE
        }
    }
}

fn read(words: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked {
        plan: Plan {
            workers: 16,
            quiet: false,
            ..Plan::new(1, 1_000_000)
        },
        setup: fsx::setup("64MiB"),
        kill: None,
    };
    for pair in pairs(words) {
        let pair = pair?;
        match pair.word.as_str() {
            "--operations" => asked.plan.operations = pair.number()?,
            "--seed" => asked.plan.seed = pair.number()?,
            "--workers" => asked.plan.workers = pair.number()?.max(1),
            "--only" => asked.plan.only = Some(pair.number()?),
            "--clients" => asked.plan.clients = pair.number()?.max(1) as usize,
            "--buffer" => asked.setup.write_buffer = Some(pair.value.leak()),
            "--share" => asked.setup.share.push(pair.value),
            "--global" => asked.setup.global.push(pair.value),
            "--modules" => asked.setup.modules = pair.value,
            "--kill" => asked.kill = Some(Duration::from_millis(pair.number()?)),
            _ => return Err(pair.unknown()),
        }
    }
    Ok(asked)
}
