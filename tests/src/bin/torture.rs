// SPDX-License-Identifier: Apache-2.0
//! `make torture`: clients of every kind, programs that are killed, disks that fail, hang and fill,
//! for hours ([`rushes_tests::torture`]).
//!
//! `torture [--seed N] [--seconds N] [--stand plain|pool|any] [--only ROUND] [--round SECONDS]
//! [--roles LIST] [--troubles LIST]`

use rushes_tests::torture::actors::Role;
use rushes_tests::torture::troubles::KINDS;
use rushes_tests::torture::{self, Kind, Plan};
use rushes_tests::words::{Pair, explained, pairs};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
Clients of every kind through a real smbd (and a pool) while programs are killed and disks fail, hang and fill.
Each fault comes with the command that plays its round again. Needs root and the built release programs.

torture [--seed N] [--seconds N] [--stand plain|pool|any] [--only ROUND] [--round SECONDS]
        [--roles LIST] [--troubles LIST]

--seed N          what is drawn; 1
--seconds N       how long in all; 3600
--stand KIND      plain shares, pools, or by turns; any
--only ROUND      this round alone
--round SECONDS   as long as that each, whatever was drawn
--roles LIST      these clients, whatever was drawn: overlap,rename,rename,read …
--troubles LIST   these kinds of trouble, each as likely: daemon,recover,stop,both,smbd,fill,fail,
                  stall,serving,mount

Exit code: 0 without a fault, 1 with one, 2 asked wrongly, 3 something is missing here.";

fn main() -> ExitCode {
    if explained(USAGE) {
        return ExitCode::SUCCESS;
    }
    let plan = match read(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("torture: {error}");
            return ExitCode::from(2);
        }
    };
    let Some(report) = torture::run(&plan) else {
        return ExitCode::from(3);
    };
    println!(
        "torture: seed {}: {} rounds, {} steps, {} faults",
        plan.seed,
        report.rounds,
        report.steps,
        report.faults.len()
    );
    if report.faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The words of a list, each of which must mean something.
fn each<T>(pair: &Pair, known: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    let read = |word: &str| known(word).ok_or(format!("{}: unknown word {word}", pair.word));
    pair.value.split(',').map(read).collect()
}

fn read(words: impl Iterator<Item = String>) -> Result<Plan, String> {
    let mut plan = Plan {
        seed: 1,
        time: Duration::from_secs(3600),
        stand: None,
        only: None,
        round: None,
        roles: Vec::new(),
        troubles: Vec::new(),
        flips: false,
    };
    for pair in pairs(words) {
        let pair = pair?;
        match pair.word.as_str() {
            "--seed" => plan.seed = pair.number()?,
            "--seconds" => plan.time = Duration::from_secs(pair.number()?),
            "--only" => plan.only = Some(pair.number()?),
            "--roles" => plan.roles = each(&pair, Role::named)?,
            "--troubles" => {
                let known = |word: &str| KINDS.contains(&word).then(|| word.to_owned());
                plan.troubles = each(&pair, known)?;
            }
            "--round" => plan.round = Some(Duration::from_secs(pair.number()?)),
            "--stand" => {
                plan.stand = match pair.value.as_str() {
                    "plain" => Some(Kind::Plain),
                    "pool" => Some(Kind::Pool),
                    "any" => None,
                    _ => {
                        return Err(format!(
                            "{} {}: expected plain, pool or any",
                            pair.word, pair.value
                        ));
                    }
                }
            }
            _ => return Err(pair.unknown()),
        }
    }
    Ok(plan)
}
