// SPDX-License-Identifier: Apache-2.0
//! Clients that write until a pool is full, while others play: does the pool take every write as
//! long as any disk has room, and which players are late?
//!
//! Each client writes file after file as fast as possible and ends with the first write or open
//! that fails with ENOSPC. The bytes that clients write after the first such error show how much
//! room the pool still had. Afterwards the lab reads every acknowledged byte back, past all caches.

use crate::clients::client::{self, Client};
use crate::clients::door::{Address, Door};
use crate::clients::player::{now_ns, sleep_until_ns};
use crate::servers::server::Server;
use crate::stage::Stage;
use crate::stage::footage::mix;
use crate::stage::take::Take;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU64;
use std::time::Duration;

const READ_BYTES: usize = 4 << 20;
/// Makes their stamps differ from those of other writers.
const KEY_SALT: u64 = 0x6675_6c6c_2064_6973;

/// The clients that fill.
#[derive(Clone, Debug)]
pub struct Fill {
    /// Number of processes.
    pub filler_count: u64,
    /// Size of each file. Units: bytes.
    pub file_bytes: u64,
    /// Size of one write. Units: bytes.
    pub write_bytes: u64,
    /// A filler gives up so long after its beginning.
    pub limit: Duration,
    /// Seed of the content.
    pub seed: u64,
}

/// The work of a filler; one line of JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    address: Address,
    key: u64,
    /// Number of the filler.
    filler: u64,
    file_bytes: u64,
    write_bytes: u64,
    limit_ns: u64,
}

/// The result of a filler; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    files: Vec<Filled>,
    /// When each write was acknowledged. Units: ns, CLOCK_MONOTONIC.
    acknowledged_ns: Vec<u64>,
    /// When it got ENOSPC; 0: never. Units: ns, CLOCK_MONOTONIC.
    full_ns: u64,
    /// Its error, if other than ENOSPC.
    error: Option<String>,
}

/// A file, and its acknowledged bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Filled {
    number: u64,
    path: String,
    bytes: u64,
}

/// The results. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FillReport {
    /// Clients that wrote.
    pub fillers: u64,
    /// Acknowledged bytes of all. Units: bytes.
    pub filled_bytes: u64,
    /// From their beginning until the last one got ENOSPC. Units: s.
    pub full_after_s: f64,
    /// Bytes acknowledged after the first ENOSPC: the room that was left then. Units: bytes.
    pub bytes_after_refusal: u64,
    /// The size of all disks. Units: bytes.
    pub disk_bytes: u64,
    /// The free part of each disk, in thousandths of it.
    pub free_permille: Vec<u64>,
    /// Acknowledged bytes that are missing, or differ.
    pub filled_bytes_wrong: u64,
    /// Errors other than ENOSPC.
    pub fill_errors: Vec<String>,
}

impl Fill {
    fn key(&self) -> NonZeroU64 {
        NonZeroU64::MIN.saturating_add(mix(self.seed ^ KEY_SALT) >> 1)
    }

    /// Make the fillers' folders.
    pub fn prepare(&self, stage: &Stage) -> Result<()> {
        ensure!(
            stage.is_pool(),
            "filling is for pools; give --layout pool or pool-striped"
        );
        for filler in 0..self.filler_count {
            stage.make_folder_anew(&folder(filler))?;
        }
        Ok(())
    }

    /// Start the processes; they are connected and wait for their beginning.
    pub fn start(&self, server: &Server) -> Result<Vec<Client>> {
        let mut fillers = Vec::new();
        for filler in 0..self.filler_count {
            let job = Job {
                address: server.address().clone(),
                key: self.key().get(),
                filler,
                file_bytes: self.file_bytes,
                write_bytes: self.write_bytes,
                limit_ns: self.limit.as_nanos() as u64,
            };
            fillers.push(Client::start("filler", server, &job)?);
        }
        for filler in &mut fillers {
            filler.wait_ready()?;
        }
        Ok(fillers)
    }

    /// Examine the disks and read everything back, when the server is gone.
    pub fn judge(&self, stage: &mut Stage, all: &[Done], begun_ns: u64) -> Result<FillReport> {
        stage.cool()?;
        let mut report = FillReport {
            fillers: self.filler_count,
            fill_errors: all.iter().filter_map(|done| done.error.clone()).collect(),
            ..FillReport::default()
        };
        let (first, last) = refusals(all);
        report.full_after_s = last.saturating_sub(begun_ns) as f64 / 1e9;
        for done in all {
            report.filled_bytes += done.files.iter().map(|file| file.bytes).sum::<u64>();
            let late = done
                .acknowledged_ns
                .iter()
                .filter(|&&at| first > 0 && at > first);
            report.bytes_after_refusal += late.count() as u64 * self.write_bytes;
        }
        for branch in stage
            .array()
            .map(|array| array.branches())
            .unwrap_or_default()
        {
            let found = rustix::fs::statvfs(&branch)
                .with_context(|| format!("{} cannot be looked at", branch.display()))?;
            report.disk_bytes += found.f_blocks * found.f_frsize;
            let permille = found.f_bavail * 1000 / found.f_blocks.max(1);
            report.free_permille.push(permille);
        }
        for file in all.iter().flat_map(|done| &done.files) {
            report.filled_bytes_wrong += self.wrong_bytes(stage, file)?;
        }
        Ok(report)
    }

    fn wrong_bytes(&self, stage: &Stage, filled: &Filled) -> Result<u64> {
        let take = Take {
            key: self.key().get(),
            number: filled.number,
        };
        let path = stage.root().join(&filled.path);
        let mut file = File::open(&path).with_context(|| format!("{}", path.display()))?;
        let mut buffer = vec![0; READ_BYTES];
        let (mut at, mut wrong) = (0, 0);
        while at < filled.bytes {
            let wanted = (filled.bytes - at).min(READ_BYTES as u64) as usize;
            let got = file.read(&mut buffer[..wanted])?;
            if got == 0 {
                // Missing bytes are wrong.
                return Ok(wrong + filled.bytes - at);
            }
            wrong += take.wrong_bytes(at, &buffer[..got]);
            at += got as u64;
        }
        Ok(wrong)
    }
}

/// When the first filler got ENOSPC, and the last; 0 if none did.
fn refusals(all: &[Done]) -> (u64, u64) {
    let times = || all.iter().map(|done| done.full_ns).filter(|&at| at > 0);
    (times().min().unwrap_or(0), times().max().unwrap_or(0))
}

impl FillReport {
    /// Errors   a wrong byte, or a write that failed otherwise than with ENOSPC
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.filled_bytes_wrong == 0 && self.fill_errors.is_empty(),
            "{} acknowledged bytes are wrong, and {} fillers failed; the report has them",
            self.filled_bytes_wrong,
            self.fill_errors.len()
        );
        Ok(())
    }

    /// The table for people.
    pub fn table(&self) -> String {
        let mut out = format!(
            "  {} fillers wrote {} MiB within {:.1} s, {} MiB of it after the first was told that the pool is full; free of the disks \
             (in thousandths): {:?}; {} bytes wrong\n",
            self.fillers,
            self.filled_bytes >> 20,
            self.full_after_s,
            self.bytes_after_refusal >> 20,
            self.free_permille,
            self.filled_bytes_wrong
        );
        for error in &self.fill_errors {
            let _ = writeln!(out, "  {error}");
        }
        out
    }
}

fn folder(filler: u64) -> String {
    format!("filled/filler{filler:02}")
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, fills.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
    sleep_until_ns(begin);
    let mut done = Done::default();
    match fill(&door, &job, begin, &mut done) {
        Err(error) if is_full(&error) => done.full_ns = now_ns(),
        Err(error) => done.error = Some(format!("filler {}: {error:#}", job.filler)),
        Ok(()) => done.error = Some(format!("filler {} gave up", job.filler)),
    }
    println!("{}", serde_json::to_string(&done)?);
    Ok(())
}

/// True for ENOSPC from any door, as an errno or as a status of NFSv4.
fn is_full(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    ["No space left on device", "os error 28", "status 28"]
        .iter()
        .any(|words| text.contains(words))
}

/// Writes files until an error, or until its time is over.
fn fill(door: &Door, job: &Job, begun_ns: u64, done: &mut Done) -> Result<()> {
    let mut buffer = vec![0; job.write_bytes as usize];
    for serial in 0.. {
        // Each filler has numbers of its own.
        let number = job.filler << 32 | serial;
        let path = format!("{}/reel{serial:05}.mxf", folder(job.filler));
        let take = Take {
            key: job.key,
            number,
        };
        let mut file = door.open_new(&path)?;
        done.files.push(Filled {
            number,
            path: path.clone(),
            bytes: 0,
        });
        for at in (0..job.file_bytes).step_by(job.write_bytes as usize) {
            if now_ns() > begun_ns + job.limit_ns {
                return Ok(());
            }
            take.fill(at, &mut buffer);
            file.write_at(&buffer, at)
                .with_context(|| format!("{path} at {at}"))?;
            done.acknowledged_ns.push(now_ns());
            if let Some(filled) = done.files.last_mut() {
                filled.bytes = at + job.write_bytes;
            }
        }
        file.finish().with_context(|| format!("closing {path}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_is_heard_from_every_door_and_nothing_else_is() {
        let full = std::io::Error::from_raw_os_error(28);
        assert!(is_full(&anyhow::Error::from(full).context("a file at 7")));
        assert!(is_full(&anyhow::anyhow!(
            "the NFS server refused operation 38 with status 28"
        )));
        let gone = std::io::Error::from_raw_os_error(5);
        assert!(!is_full(&anyhow::Error::from(gone)));
    }

    #[test]
    fn the_first_and_the_last_who_was_refused_are_found() {
        let done = |full_ns| Done {
            full_ns,
            ..Done::default()
        };
        assert_eq!(refusals(&[done(0), done(9), done(5)]), (5, 9));
        assert_eq!(refusals(&[done(0)]), (0, 0));
    }
}
