// SPDX-License-Identifier: Apache-2.0
//! A metadata storm: clients that list a folder of 100,000 entries and look entries up at a stated
//! rate, as render farms, browsers and backup programs do beside players.

use crate::clients::client;
use crate::clients::door::{Address, Door};
use crate::clients::player::{now_ns, sleep_until_ns};
use crate::stage::Plan;
use crate::stage::footage::Dice;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// The work of a storm client; one line of JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The server's address.
    pub address: Address,
    /// Entries of the folder.
    pub entry_count: u64,
    /// Look-ups a second.
    pub rate: f64,
    /// Time from one listing of the whole folder to the next; 0: none. Units: s.
    pub list_every_s: f64,
    /// How long the storm lasts. Units: s.
    pub seconds: f64,
    /// Seed of the order of look-ups.
    pub seed: u64,
}

/// The result of a storm client; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// Look-ups answered.
    pub stat_count: u64,
    /// Listings answered.
    pub list_count: u64,
    /// Longest look-up.
    pub stat_ms_max: f64,
    /// Longest listing.
    pub list_ms_max: f64,
    /// First error.
    pub error: Option<String>,
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, works.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
    sleep_until_ns(begin);
    let mut done = Done::default();
    if let Err(error) = storm(&door, &job, begin, &mut done) {
        done.error = Some(format!("{error:#}"));
    }
    println!("{}", serde_json::to_string(&done)?);
    Ok(())
}

fn storm(door: &Door, job: &Job, begin: u64, done: &mut Done) -> Result<()> {
    let end = begin + (job.seconds * 1e9) as u64;
    let step = (1e9 / job.rate.max(0.001)) as u64;
    let mut dice = Dice::new(job.seed);
    let mut next_list = begin;
    let mut next_stat = begin;
    while now_ns() < end {
        if job.list_every_s > 0.0 && now_ns() >= next_list {
            next_list += (job.list_every_s * 1e9) as u64;
            let asked = now_ns();
            let count = door.list("archive")?;
            anyhow::ensure!(
                count as u64 == job.entry_count,
                "the folder has {count} entries; expected {}",
                job.entry_count
            );
            done.list_count += 1;
            done.list_ms_max = done.list_ms_max.max((now_ns() - asked) as f64 / 1e6);
        }
        sleep_until_ns(next_stat.min(end));
        // After a slow answer it does not catch up in a burst: the rate is an upper bound.
        next_stat = next_stat.max(now_ns().saturating_sub(step)) + step;
        let asked = now_ns();
        door.stat(&Plan::entry_path(dice.below(job.entry_count)))?;
        done.stat_count += 1;
        done.stat_ms_max = done.stat_ms_max.max((now_ns() - asked) as f64 / 1e6);
    }
    Ok(())
}
