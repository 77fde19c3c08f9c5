// SPDX-License-Identifier: Apache-2.0
//! Runs of scenarios: one or many seeds, on all cores, some of them twice.

use crate::catalogue::{self, Kept, SWARM};
use crate::judge::Report;
use crate::scenario::Scenario;
use clap::Args;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// One of so many seeds runs twice, to see whether the second run is the same.
const TWICE_EVERY: u64 = 8;

/// Runs a scenario.
#[derive(Clone, Debug, Args)]
pub struct Run {
    /// Its name, or a file. `swarm` is another scenario for every seed; `all` is every scenario but
    /// the longest.
    pub scenario: String,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 1)]
    pub count: u64,
    /// Virtual seconds, in place of those of the scenario.
    #[arg(long)]
    pub seconds: Option<u64>,
    /// One JSON object a run.
    #[arg(long)]
    pub json: bool,
    /// Print the scenario and do not run it.
    #[arg(long)]
    pub print: bool,
    /// Print the run as a kept seed with this cause and do not run it.
    #[arg(long, value_name = "CAUSE")]
    pub keep: Option<String>,
}

/// Plays one run again, and tells everything if wanted.
#[derive(Clone, Debug, Args)]
pub struct Replay {
    /// A kept seed (a file), or the name of a scenario.
    pub what: String,
    /// The seed, if it is a scenario.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Every event and action.
    #[arg(long)]
    pub trace: bool,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

impl Run {
    /// Runs it. True: all as expected.
    ///
    /// Errors   a sentence about the scenario.
    pub fn run(&self) -> Result<bool, String> {
        let names: Vec<&str> = if self.scenario == "all" {
            let all = catalogue::SCENARIOS.iter().map(|(name, _)| *name);
            all.filter(|name| *name != "thousand_disks").collect()
        } else {
            vec![&self.scenario]
        };
        let mut jobs = Vec::new();
        for name in names {
            for seed in self.seed..self.seed + self.count {
                let mut scenario = catalogue::find(name, seed)?;
                scenario.seconds = self.seconds.unwrap_or(scenario.seconds);
                if let Some(cause) = &self.keep {
                    let kept = Kept {
                        cause: cause.clone(),
                        seed,
                        scenario,
                    };
                    print!("{}", kept.print());
                } else if self.print {
                    print!("{}", scenario.print());
                } else {
                    jobs.push((name.to_owned(), seed, scenario));
                }
            }
        }
        let bad = AtomicU64::new(0);
        let next = AtomicU64::new(0);
        let out = Mutex::new(());
        let work = || {
            while let Some((name, seed, scenario)) =
                jobs.get(next.fetch_add(1, Ordering::Relaxed) as usize)
            {
                let began = std::time::Instant::now();
                let mut report = scenario.run(name, *seed);
                let seconds = began.elapsed().as_secs_f64();
                if jobs.len() as u64 >= TWICE_EVERY && seed.is_multiple_of(TWICE_EVERY) {
                    again(scenario, &mut report);
                }
                let _one_at_a_time = out.lock();
                print(
                    &report,
                    seconds,
                    self.json,
                    self.count == 1 || name != SWARM,
                );
                bad.fetch_add(u64::from(!report.failures.is_empty()), Ordering::Relaxed);
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..cores.min(jobs.len()) {
                scope.spawn(work);
            }
        });
        let bad = bad.into_inner();
        if !self.json && jobs.len() > 1 {
            println!("{} runs, {bad} not as expected", jobs.len());
        }
        Ok(bad == 0)
    }
}

/// Runs it once more and notes a difference.
pub fn again(scenario: &Scenario, report: &mut Report) {
    let second = scenario.run(&report.scenario, report.seed);
    if second.digest != report.digest {
        report.failures.push(format!(
            "the same seed told another story: {} then {}",
            report.digest, second.digest
        ));
    }
}

impl Replay {
    /// Plays it. True: all as expected.
    ///
    /// Errors   a sentence about the file or scenario.
    pub fn run(&self) -> Result<bool, String> {
        let (scenario, seed) = match std::fs::read_to_string(&self.what) {
            Ok(text) => {
                let kept: Kept = toml::from_str(&text)
                    .map_err(|error| format!("{}: not a kept seed: {error}", self.what))?;
                println!("{}", kept.cause);
                (kept.scenario, kept.seed)
            }
            Err(_) => (catalogue::find(&self.what, self.seed)?, self.seed),
        };
        let mut world = scenario.world(seed);
        world.trace = self.trace;
        let began = std::time::Instant::now();
        let report = scenario.play_in(&self.what, seed, &mut world);
        print(&report, began.elapsed().as_secs_f64(), self.json, true);
        if !self.json {
            for (client, frame, due, by) in &world.slack.late {
                let due = due.0 as f64 / 1e9;
                println!("    client {client} frame {frame}, due at {due:.3} s, was late by {by}");
            }
        }
        Ok(report.failures.is_empty())
    }
}

fn print(report: &Report, seconds: f64, json: bool, long: bool) {
    if json {
        println!("{}", serde_json::to_string(report).unwrap_or_default());
        return;
    }
    let verdict = if report.failures.is_empty() {
        "ok"
    } else {
        "NOT AS EXPECTED"
    };
    if !long && report.failures.is_empty() {
        return;
    }
    println!(
        "{} seed {}: {verdict}; {} of {} promised ({} shed), late {} of promised, {} after jumps, {} of all {} frames; worst {:.0} ms; copies {:.1} MB/s; {:.0} % busy, {} requests of {:.2} MB",
        report.scenario,
        report.seed,
        report.promised,
        report.players,
        report.shed,
        report.late_promised,
        report.late_after_jump,
        report.late,
        report.frames,
        report.worst_ms,
        report.copy_mb_per_second,
        report.busy * 100.0,
        report.requests,
        report.request_mb_mean,
    );
    println!(
        "    {:.0} virtual s in {seconds:.2} s: {} events, {:.2} million a second, {} steps; {}",
        report.virtual_seconds,
        report.events,
        report.events as f64 / 1e6 / seconds.max(1e-9),
        report.steps,
        report.digest
    );
    if report.cuts > 0 {
        println!(
            "    {} cuts, first frame {:.0}, 19 of 20 {:.0}, worst {:.0} ms; of {} frames of several files {} late, worst {:.0} ms",
            report.cuts,
            report.cut_ms_p50,
            report.cut_ms_p95,
            report.cut_ms_max,
            report.op_atom_frames,
            report.op_atom_late,
            report.op_atom_worst_ms,
        );
    }
    for line in report
        .failures
        .iter()
        .chain(&report.violations)
        .chain(&report.ledger_wrong)
    {
        println!("    {line}");
    }
}
