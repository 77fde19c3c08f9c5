// SPDX-License-Identifier: Apache-2.0
//! A player: one process that requests frames when an editing station would, and reports how late
//! they came.
//!
//! It requests frame *k* not before `start + k·period`, one frame at a time; the frame is late when
//! it comes after `start + preroll + k·period`. `start` is when its open returned. It compares
//! bytes after it has read the clock, so the comparison makes nothing late. The process ends at a
//! hard limit even if the server never answers: frames that have not come by then are late.

use crate::clients::client;
use crate::clients::door::{Address, Door, Opened};
use crate::stage::footage::Clip;
use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// The work of a player, which it reads as one line of JSON from its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Number of the stage's stream.
    pub stream: u64,
    /// The server's address.
    pub address: Address,
    /// One file, or one per frame.
    pub files: Vec<String>,
    /// Seed of the content.
    pub seed: u64,
    /// Frames to play.
    pub frame_count: u64,
    /// Size of a frame. Units: bytes.
    pub frame_bytes: u64,
    /// Distance of frames in the clip. Units: bytes.
    pub frame_stride: u64,
    /// Time between frames. Units: ns.
    pub period_ns: u64,
    /// Units: ns.
    pub preroll_ns: u64,
    /// The process goes on for so long after the last frame's deadline. Units: ns.
    pub grace_ns: u64,
    /// The content that the bytes must have.
    pub content: Content,
}

/// The content that a player compares with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Content {
    /// Footage made up by the lab.
    MadeUp,
    /// The xxh3 of each frame of the written files.
    Hashes(Vec<u64>),
}

/// The result of a player; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Playback {
    /// Number of the stage's stream.
    pub stream: u64,
    /// When its open returned. Units: ns, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// How long its open took.
    pub open_ms: f64,
    /// From the request to open the file to the arrival of the first frame.
    pub first_frame_ms: f64,
    /// How long after its deadline each frame came; negative: before. Units: ms. Shorter than the
    /// clip if the process reached its limit.
    pub lateness_ms: Vec<f32>,
    /// Bytes that differ from those written, or were missing.
    pub bytes_wrong: u64,
    /// Bytes received.
    pub bytes: u64,
    /// The first error.
    pub error: Option<String>,
    /// CPU time of this process.
    pub cpu_s: f64,
}

/// Now. Units: ns, CLOCK_MONOTONIC, the same for all processes.
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CPU time of this process so far. Units: s.
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Sleep until an instant. Units: ns, CLOCK_MONOTONIC.
pub fn sleep_until_ns(then: u64) {
    let left = then.saturating_sub(now_ns());
    if left > 0 {
        std::thread::sleep(Duration::from_nanos(left));
    }
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, plays.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
    let shared = Arc::new(Mutex::new(Playback {
        stream: job.stream,
        ..Playback::default()
    }));
    sleep_until_ns(begin);
    guard_limit(&job, begin, Arc::clone(&shared));
    if let Err(error) = play(&door, &job, &shared) {
        note_error(&shared, &error);
    }
    finish(&shared)
}

/// Ends the process when the time is up, even if a read never returns.
fn guard_limit(job: &Job, begin: u64, shared: Arc<Mutex<Playback>>) {
    let length = job.frame_count * job.period_ns + job.preroll_ns + job.grace_ns;
    std::thread::spawn(move || {
        sleep_until_ns(begin + length);
        let _ = finish(&shared);
    });
}

fn note_error(shared: &Mutex<Playback>, error: &anyhow::Error) {
    let mut playback = shared.lock().unwrap_or_else(PoisonError::into_inner);
    playback.error.get_or_insert(format!("{error:#}"));
}

/// Print the result so far and end the process.
fn finish(shared: &Mutex<Playback>) -> Result<()> {
    let mut playback = shared.lock().unwrap_or_else(PoisonError::into_inner);
    playback.cpu_s = cpu_s();
    let line = serde_json::to_string(&*playback)?;
    // The lock stays held: a second thread must not print another line.
    println!("{line}");
    std::io::stdout().flush()?;
    std::process::exit(0)
}

fn play(door: &Door, job: &Job, shared: &Mutex<Playback>) -> Result<()> {
    let clip = Clip {
        seed: job.seed,
        number: job.stream,
    };
    let mut buffer = vec![0u8; job.frame_bytes as usize];
    let asked = now_ns();
    let first = job.files.first().context("the job names no file")?;
    let mut file = Some(door.open(first, false)?);
    let start = now_ns();
    {
        let mut playback = shared.lock().unwrap_or_else(PoisonError::into_inner);
        playback.start_ns = start;
        playback.open_ms = (start - asked) as f64 / 1e6;
    }
    for frame in 0..job.frame_count {
        sleep_until_ns(start + frame * job.period_ns);
        let got = read_frame(door, job, frame, &mut file, &mut buffer);
        let done = now_ns();
        let due = start + job.preroll_ns + frame * job.period_ns;
        let mut playback = shared.lock().unwrap_or_else(PoisonError::into_inner);
        playback
            .lateness_ms
            .push((done as f64 - due as f64) as f32 / 1e6);
        if frame == 0 {
            playback.first_frame_ms = (done - asked) as f64 / 1e6;
        }
        let got = got.unwrap_or_else(|error| {
            playback
                .error
                .get_or_insert(format!("frame {frame}: {error:#}"));
            0
        });
        playback.bytes += got as u64;
        playback.bytes_wrong += (buffer.len() - got) as u64;
        playback.bytes_wrong += match &job.content {
            Content::MadeUp => clip.wrong_bytes(frame * job.frame_stride, &buffer[..got]),
            // A hash does not say how many bytes differ: the whole frame counts.
            Content::Hashes(hashes) => match hashes.get(frame as usize) {
                Some(hash) if *hash == xxh3_64(&buffer[..got]) => 0,
                _ => got as u64,
            },
        };
    }
    Ok(())
}

fn read_frame<'a>(
    door: &'a Door,
    job: &Job,
    frame: u64,
    file: &mut Option<Opened<'a>>,
    buffer: &mut [u8],
) -> Result<usize> {
    if job.files.len() == 1 {
        let file = file.as_mut().context("the file is not open")?;
        return file.read_at(buffer, frame * job.frame_bytes);
    }
    // A sequence: open, read, close. The first file is open already.
    let mut opened = match file.take() {
        Some(opened) => opened,
        None => {
            let name = job.files.get(frame as usize).context("no such frame")?;
            door.open(name, false)?
        }
    };
    opened.read_at(buffer, 0)
}
