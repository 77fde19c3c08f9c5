// SPDX-License-Identifier: Apache-2.0
//! A writer: one process that records as a camera's ingest station does, or copies in as fast as it
//! can.
//!
//! Recording, it sends frame *k* not before `start + k·period`, one frame at a time, and notes when
//! the server has acknowledged it. `start` is when its open returned. It makes a frame before it
//! waits for the clock, so making frames delays nothing. The process ends at a hard limit even if
//! the server never answers.
//!
//! libsmbclient has no flush. A writer closes its file, and the process that started it brings the
//! bytes to the disk; a writer with `flush` set flushes over a connection of its own,
//! [`rushes_kit::wire`].

use crate::clients::client;
use crate::clients::door::{Address, Door, Opened};
use crate::clients::player::{cpu_s, now_ns, sleep_until_ns};
use crate::stage::take::Take;
use anyhow::{Context, Result, bail};
use rushes_kit::wire;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// The work of a writer, which it reads as one line of JSON from its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The server's address.
    pub address: Address,
    /// Key of the stamps.
    pub key: u64,
    /// The files, one after the other.
    pub files: Vec<Target>,
    /// Size of each. Units: bytes.
    pub file_bytes: u64,
    /// Size of one write. Units: bytes.
    pub frame_bytes: u64,
    /// Time between frames; 0: as fast as possible. Units: ns.
    pub period_ns: u64,
    /// How the writer extends a file to its size before it writes frames.
    pub extend: Extend,
    /// The writer flushes each file before it closes it.
    pub flush: bool,
    /// The process ends at the latest so long after its beginning. Units: ns.
    pub limit_ns: u64,
}

/// A file to write.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// Its number among all files of the run.
    pub number: u64,
    /// Its path below the share.
    pub path: String,
}

/// The call of a client before it writes a file whose size it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extend {
    /// Nothing.
    #[default]
    None,
    /// A write of one byte at the end of each so many bytes, as the redirector of Windows does so
    /// that no request takes long. Units: bytes.
    OneByte(u64),
    /// A request that sets the end of file.
    SetEof,
}

impl Extend {
    /// The places of its single bytes in a file of this size. Units: bytes.
    pub fn places(self, file_bytes: u64) -> Vec<u64> {
        match self {
            Extend::OneByte(step) if step > 0 && file_bytes > 0 => (1..=file_bytes.div_ceil(step))
                .map(|index| (index * step).min(file_bytes) - 1)
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// The result of a writer; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// The files that it opened, in order.
    pub files: Vec<Recorded>,
    /// The first error, after which it stopped.
    pub error: Option<String>,
    /// CPU time of this process.
    pub cpu_s: f64,
}

/// One file, as its writer saw it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Recorded {
    /// Its number.
    pub number: u64,
    /// Its path below the share.
    pub path: String,
    /// When its open returned. Units: ns, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// How long its open took.
    pub open_ms: f64,
    /// How long it took to extend it.
    pub extend_ms: f64,
    /// When the server acknowledged each frame. Units: ns, CLOCK_MONOTONIC.
    pub acknowledged_ns: Vec<u64>,
    /// How long its flush took.
    pub flush_ms: f64,
    /// When its close returned; 0: never. Units: ns, CLOCK_MONOTONIC.
    pub closed_ns: u64,
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, writes.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
    let shared = Arc::new(Mutex::new(Done::default()));
    let mut buffer = vec![0; job.frame_bytes as usize];
    sleep_until_ns(begin);
    let guarded = Arc::clone(&shared);
    std::thread::spawn(move || {
        sleep_until_ns(begin + job.limit_ns);
        lock(&guarded).error.get_or_insert(format!(
            "gave up {:.0} s after its beginning",
            job.limit_ns as f64 / 1e9
        ));
        let _ = finish(&guarded);
    });
    for target in &job.files {
        if let Err(error) = write_file(&door, &job, target, &mut buffer, &shared) {
            lock(&shared)
                .error
                .get_or_insert(format!("{}: {error:#}", target.path));
            break;
        }
    }
    finish(&shared)
}

fn lock(shared: &Mutex<Done>) -> std::sync::MutexGuard<'_, Done> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Print the result so far and end the process.
fn finish(shared: &Mutex<Done>) -> Result<()> {
    let mut done = lock(shared);
    done.cpu_s = cpu_s();
    let line = serde_json::to_string(&*done)?;
    // The lock stays held: a second thread must not print another line.
    println!("{line}");
    std::io::stdout().flush()?;
    std::process::exit(0)
}

fn write_file(
    door: &Door,
    job: &Job,
    target: &Target,
    buffer: &mut [u8],
    shared: &Mutex<Done>,
) -> Result<()> {
    let take = Take {
        key: job.key,
        number: target.number,
    };
    let asked = now_ns();
    let mut file = door.open_new(&target.path)?;
    let start = now_ns();
    lock(shared).files.push(Recorded {
        number: target.number,
        path: target.path.clone(),
        start_ns: start,
        open_ms: (start - asked) as f64 / 1e6,
        ..Recorded::default()
    });
    extend(&mut file, job, target)?;
    note(shared, |file| {
        file.extend_ms = (now_ns() - start) as f64 / 1e6;
    });
    for frame in 0..job.file_bytes.div_ceil(job.frame_bytes) {
        let offset = frame * job.frame_bytes;
        let length = job.frame_bytes.min(job.file_bytes - offset);
        let bytes = &mut buffer[..length as usize];
        take.fill(offset, bytes);
        sleep_until_ns(start + frame * job.period_ns);
        file.write_at(bytes, offset)
            .with_context(|| format!("frame {frame}"))?;
        let now = now_ns();
        note(shared, |file| file.acknowledged_ns.push(now));
    }
    if job.flush {
        let asked = now_ns();
        flush(&file, job, target)?;
        note(shared, |file| {
            file.flush_ms = (now_ns() - asked) as f64 / 1e6;
        });
    }
    file.finish().context("closing it")?;
    note(shared, |file| file.closed_ns = now_ns());
    Ok(())
}

/// Change the result of the current file.
fn note(shared: &Mutex<Done>, change: impl FnOnce(&mut Recorded)) {
    if let Some(file) = lock(shared).files.last_mut() {
        change(file);
    }
}

fn extend(file: &mut Opened<'_>, job: &Job, target: &Target) -> Result<()> {
    match (job.extend, &job.address) {
        (Extend::None, _) => {}
        (Extend::OneByte(_), _) => {
            for place in job.extend.places(job.file_bytes) {
                file.write_at(&[0], place)
                    .with_context(|| format!("one byte at {place}"))?;
            }
        }
        (Extend::SetEof, Address::Smb { port, share, .. }) => {
            wire::set_end_of_file(*port, share, &target.path, job.file_bytes)
                .context("setting the end of file")?;
        }
        (Extend::SetEof, Address::Local(_)) => file.set_len(job.file_bytes)?,
        (Extend::SetEof, Address::Rushes { .. }) => bail!("the lab only reads through the daemon"),
        (Extend::SetEof, Address::Nfs { .. }) => bail!("over NFS the lab sets no end of file"),
        (Extend::SetEof, Address::Disk(_)) => bail!("the lab only reads on the disk itself"),
    }
    Ok(())
}

fn flush(file: &Opened<'_>, job: &Job, target: &Target) -> Result<()> {
    match (&job.address, file) {
        (Address::Smb { port, share, .. }, _) => {
            wire::flush(*port, share, &target.path).context("the flush")
        }
        (_, Opened::Local(file)) => file.sync_all().context("the flush"),
        (_, Opened::Nfs { nfs, file }) => nfs.borrow_mut().commit(file).context("the flush"),
        _ => bail!("the lab only reads through the daemon"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_bytes_lie_at_the_end_of_each_unit_and_of_the_file() {
        let mib = 1 << 20;
        let step = Extend::OneByte(mib);
        assert_eq!(step.places(2 * mib), [mib - 1, 2 * mib - 1]);
        assert_eq!(
            step.places(2 * mib + 5),
            [mib - 1, 2 * mib - 1, 2 * mib + 4]
        );
        assert_eq!(step.places(10), [9]);
        assert!(step.places(0).is_empty());
        assert!(Extend::SetEof.places(mib).is_empty());
    }
}
