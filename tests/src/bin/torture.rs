// SPDX-License-Identifier: Apache-2.0
//! `make torture`: clients of every kind, programs that are killed, disks that fail, hang and fill, for hours ([`rushes_tests::torture`]).
//!
//! `torture [--seed N] [--seconds N] [--stand plain|pool|any] [--only ROUND] [--round SECONDS]`

use rushes_tests::torture::{self, Kind, Plan};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
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

fn read(mut words: impl Iterator<Item = String>) -> Result<Plan, String> {
    let mut plan = Plan {
        seed: 1,
        time: Duration::from_secs(3600),
        stand: None,
        only: None,
        round: None,
        flips: false,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} lacks a value"))?;
        let number = || {
            let wrong = |error| format!("{word} {value}: {error}");
            value.parse::<u64>().map_err(wrong)
        };
        match word.as_str() {
            "--seed" => plan.seed = number()?,
            "--seconds" => plan.time = Duration::from_secs(number()?),
            "--only" => plan.only = Some(number()?),
            "--round" => plan.round = Some(Duration::from_secs(number()?)),
            "--stand" => {
                plan.stand = match value.as_str() {
                    "plain" => Some(Kind::Plain),
                    "pool" => Some(Kind::Pool),
                    "any" => None,
                    _ => return Err(format!("{word} {value}: expected plain, pool or any")),
                }
            }
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(plan)
}
