// SPDX-License-Identifier: Apache-2.0
//! Hours of all faults at once, around the server alone, with every byte tracked.
//!
//! `rushes-sim torture` plays rounds; each is a world of its own, drawn from seed and number:
//! disks, files, clients of every kind, and faults. Everything comes from the seed, so a round that
//! found a fault can be replayed by its number.
//!
//! `rushes-sim run` checks times and promises, and its files have no bytes; this checks bytes, and
//! no times. Absent: Samba, rings, real files. `make torture` is for those.

mod file;
mod hands;
#[cfg(test)]
mod tests;
mod trouble;
mod world;

use crate::prng::Prng;
use clap::Args;
use rushes_core::units::Duration;
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
pub use trouble::Flip;
use trouble::Plan;
pub use world::Counts;
use world::World;

/// Rounds, and how many.
#[derive(Clone, Debug, Args)]
pub struct Torture {
    /// Seed of all rounds.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Virtual hours; the last round is played to its end.
    #[arg(long, default_value_t = 1.0)]
    pub hours: f64,
    /// This round only.
    #[arg(long)]
    pub only: Option<u64>,
    /// Totals as JSON, and no line for each round.
    #[arg(long)]
    pub json: bool,
    /// Every event and action. With --only.
    #[arg(long)]
    pub trace: bool,
}

/// The result of a round.
#[derive(Clone, Debug)]
pub struct Round {
    /// Its number.
    pub number: u64,
    /// Its virtual duration. Units: ms.
    pub virtual_ms: u64,
    /// Its fingerprint.
    pub digest: u64,
    /// The events.
    pub counts: Counts,
    /// The violations.
    pub violations: Vec<String>,
}

/// The results of all of them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Totals {
    /// Seed.
    pub seed: u64,
    /// Rounds played.
    pub rounds: u64,
    /// Virtual hours.
    pub hours: f64,
    /// The events.
    pub counts: Counts,
    /// The violations, with the command that plays each again.
    pub violations: Vec<String>,
}

/// A round that differs from the drawn one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Otherwise {
    /// The value that changes in secret.
    pub flip: Option<Flip>,
    /// How long there is work. Units: s.
    pub seconds: Option<u64>,
    /// Prints each event and action.
    pub trace: bool,
}

/// Plays one round.
pub fn round(seed: u64, number: u64, otherwise: Otherwise) -> Round {
    let mut random = Prng::fork(seed, number);
    let mut plan = Plan::drawn(&mut random);
    plan.flip = otherwise.flip;
    if let Some(seconds) = otherwise.seconds {
        plan.length = Duration::from_s(seconds);
    }
    let mut world = World::new(random, plan, otherwise.trace);
    let played = catch_unwind(AssertUnwindSafe(|| world.play()));
    if let Err(panic) = &played {
        let said = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        world.violate(format!("it panicked: {}", said.unwrap_or("without a word")));
    }
    Round {
        number,
        virtual_ms: world.now.0 / 1_000_000,
        digest: world.digest.0,
        counts: world.counts,
        violations: world.violations,
    }
}

impl Torture {
    /// Plays all of them. True: without a violation.
    pub fn run(&self) -> Result<bool, String> {
        if self.trace && self.only.is_none() {
            return Err("--trace of all rounds; expected one of them: add --only ROUND".into());
        }
        if !self.hours.is_finite() || self.hours < 0.0 {
            return Err(format!("--hours {}; expected 0 or more", self.hours));
        }
        let mut totals = Totals {
            seed: self.seed,
            ..Totals::default()
        };
        let mut number = self.only.unwrap_or(0);
        loop {
            let otherwise = Otherwise {
                trace: self.trace,
                ..Otherwise::default()
            };
            let round = round(self.seed, number, otherwise);
            if !self.json {
                println!("{}", line(&round));
            }
            totals.rounds += 1;
            totals.hours += round.virtual_ms as f64 / 3_600_000.0;
            totals.counts.add(&round.counts);
            for violation in &round.violations {
                let sentence = format!(
                    "round {number}, {violation}\n  play it: rushes-sim torture --seed {} --only {number} --trace",
                    self.seed
                );
                if !self.json {
                    println!("VIOLATION: {sentence}");
                }
                totals.violations.push(sentence);
            }
            number += 1;
            if self.only.is_some() || totals.hours >= self.hours {
                break;
            }
        }
        match self.json {
            true => println!(
                "{}",
                serde_json::to_string_pretty(&totals).unwrap_or_default()
            ),
            false => print_totals(&totals),
        }
        Ok(totals.violations.is_empty())
    }
}

fn line(round: &Round) -> String {
    let counts = &round.counts;
    format!(
        "round {}: {} s, {} steps, {} writes, {} reads, {} syncs, {} kills, {} power cuts, {} errors of disks, {} writes of strangers, digest {:016x}, {} violations",
        round.number,
        round.virtual_ms / 1000,
        counts.steps,
        counts.writes + counts.plain_writes,
        counts.reads + counts.plain_reads,
        counts.syncs,
        counts.kills,
        counts.power_cuts,
        counts.io_errors + counts.sync_errors + counts.no_space,
        counts.strange_writes + counts.strange_cuts,
        round.digest,
        round.violations.len()
    )
}

fn print_totals(totals: &Totals) {
    let named: Vec<String> = totals
        .counts
        .named()
        .iter()
        .map(|(name, count)| format!("{} {count}", name.replace('_', " ")))
        .collect();
    println!(
        "seed {}: {} rounds, {:.2} virtual hours, {} violations; {}",
        totals.seed,
        totals.rounds,
        totals.hours,
        totals.violations.len(),
        named.join(", ")
    );
}
