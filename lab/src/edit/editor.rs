// SPDX-License-Identifier: Apache-2.0
//! An editor: one process, one connection, that works through its script and tells how late each frame came.
//!
//! By the clock it asks for frame *k* not before `begin + k · period`, one piece at a time, all layers of a frame one after the other (libsmbclient has
//! one request of a program under way), and the frame is there when the last of them is. Its own lateness moves nothing: the clock goes on from
//! `begin`, through every cut. What a cut costs is counted from asking for its first frame, an open that it needs included. Bytes are checked after the
//! clock was read. The process ends at a hard limit whatever the server does; frames that did not come by then are late.

use super::script::{Pace, Script};
use crate::door::{Address, Door, Opened};
use crate::player::{cpu_s, now_ns, sleep_until_ns};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// Between two looks at a file that does not have the frame yet.
const GROWING_STEP: Duration = Duration::from_millis(10);

/// What an editor is to do; handed to it as one line of JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Where.
    pub address: Address,
    /// What.
    pub script: Script,
    /// Of the content.
    pub seed: u64,
    /// A frame that comes so long after its time is late. Units: ns.
    pub late_ns: u64,
    /// Who has no clock ends so long after its beginning. Units: ns.
    pub length_ns: u64,
    /// How long past that, or past the last frame's deadline, the process may go on. Units: ns.
    pub grace_ns: u64,
}

/// What became of it; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Edited {
    /// When it began. Units: ns, CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// When it ended, its limit included. Units: ns, CLOCK_MONOTONIC.
    pub end_ns: u64,
    /// Frames that came.
    pub frame_count: u64,
    /// Of each frame of the clock: when it was due and how much later than that it came (negative: before). Units: ms after the beginning, ms.
    pub lateness_ms: Vec<(f32, f32)>,
    /// Of each run: when its first frame was asked for and how long that took. Units: ms after the beginning, ms.
    pub first_frame_ms: Vec<(f32, f32)>,
    /// Longest open.
    pub open_ms_max: f64,
    /// Bytes received.
    pub bytes_read: u64,
    /// Bytes acknowledged.
    pub bytes_written: u64,
    /// Bytes that differ from what was written, or were missing.
    pub bytes_wrong: u64,
    /// Of what it wrote: file, place and length of each piece that was acknowledged.
    pub written: Vec<(usize, u64, u64)>,
    /// Of real files.
    pub hashed: Vec<Hashed>,
    /// What went wrong, first of its kind.
    pub error: Option<String>,
    /// CPU time of this process.
    pub cpu_s: f64,
}

/// A piece of a real file, to be compared by somebody who has that.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hashed {
    /// Index of the file.
    pub file: usize,
    /// Where it begins. Units: bytes.
    pub place: u64,
    /// How much came. Units: bytes.
    pub bytes: u64,
    /// The xxh3 of that.
    pub hash: u64,
}

/// The hidden subcommand: reads a [`Job`], connects, says `ready`, waits for the instant to begin at, works.
pub fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let job: Job = serde_json::from_str(&lines.next().context("no job was given")??)
        .context("the job is not understood")?;
    let door = Door::connect(&job.address)?;
    println!("ready");
    std::io::stdout().flush()?;
    let begin: u64 = lines
        .next()
        .context("nobody said when to begin")??
        .trim()
        .parse()
        .context("the instant to begin at is no number")?;
    let shared = Arc::new(Mutex::new(Edited {
        begin_ns: begin,
        ..Edited::default()
    }));
    let (guarded, limit) = (Arc::clone(&shared), begin + limit_ns(&job));
    std::thread::spawn(move || {
        sleep_until_ns(limit);
        let _ = finish(&guarded);
    });
    sleep_until_ns(begin);
    let mut editor = Editor {
        door: &door,
        job: &job,
        shared: &shared,
        begin,
        opened: job.script.files.iter().map(|_| None).collect(),
    };
    if let Err(error) = editor.work() {
        lock(&shared).error.get_or_insert(format!("{error:#}"));
    }
    drop(editor);
    finish(&shared)
}

fn limit_ns(job: &Job) -> u64 {
    let length = match job.script.pace {
        Pace::Clock => job.script.length_ns() + job.late_ns,
        Pace::Hand | Pace::Free => job.length_ns,
    };
    length + job.grace_ns
}

fn lock(shared: &Mutex<Edited>) -> MutexGuard<'_, Edited> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Print what is known and end the process.
fn finish(shared: &Mutex<Edited>) -> Result<()> {
    let mut edited = lock(shared);
    edited.end_ns = now_ns();
    edited.cpu_s = cpu_s();
    let line = serde_json::to_string(&*edited)?;
    // The lock stays held: whoever comes second must not print another line.
    println!("{line}");
    std::io::stdout().flush()?;
    std::process::exit(0)
}

struct Editor<'a> {
    door: &'a Door,
    job: &'a Job,
    shared: &'a Mutex<Edited>,
    begin: u64,
    opened: Vec<Option<Opened<'a>>>,
}

/// A piece that was read or written for a frame.
struct Piece {
    file: usize,
    place: u64,
    writes: bool,
    bytes: Vec<u8>,
    /// How much of it came.
    got: usize,
}

impl Editor<'_> {
    fn work(&mut self) -> Result<()> {
        let script = &self.job.script;
        let mut due = self.begin + script.delay_ns;
        let end = self.begin + self.job.length_ns;
        loop {
            for run in &script.runs {
                for frame in 0..run.frame_count {
                    if script.pace != Pace::Clock && now_ns().max(due) >= end {
                        return self.close();
                    }
                    if run.heads.is_empty() {
                        due += run.period_ns;
                        continue;
                    }
                    let mut pieces = self.pieces_of(run, frame);
                    if script.pace != Pace::Free {
                        sleep_until_ns(due);
                    }
                    let asked = now_ns();
                    for piece in &mut pieces {
                        let done = self.perform(piece);
                        self.note_failure(done);
                    }
                    let done = now_ns();
                    self.note(frame, due, asked, done, &pieces);
                    due = match script.pace {
                        Pace::Clock => due + run.period_ns,
                        Pace::Hand => asked + run.period_ns,
                        Pace::Free => done,
                    };
                }
                self.close_some();
            }
            if script.pace == Pace::Clock || script.runs.is_empty() {
                return self.close();
            }
        }
    }

    /// What this frame needs; what is to be written is made before its time.
    fn pieces_of(&self, run: &super::script::Run, frame: u64) -> Vec<Piece> {
        let mut pieces = Vec::with_capacity(run.heads.len());
        for head in &run.heads {
            let Some(place) = head.place(frame) else {
                continue;
            };
            let mut bytes = vec![0; head.bytes as usize];
            if head.writes {
                let source = &self.job.script.files[head.file];
                source.clip(self.job.seed).fill(place, &mut bytes);
            }
            pieces.push(Piece {
                file: head.file,
                place,
                writes: head.writes,
                bytes,
                got: 0,
            });
        }
        pieces
    }

    fn perform(&mut self, piece: &mut Piece) -> Result<()> {
        let source = &self.job.script.files[piece.file];
        let describe = || format!("{} at {}", source.path, piece.place);
        if self.opened[piece.file].is_none() {
            let asked = now_ns();
            let file = match piece.writes {
                true => self.door.open_new(&source.path)?,
                false => self.door.open(&source.path, false)?,
            };
            self.opened[piece.file] = Some(file);
            let took = (now_ns() - asked) as f64 / 1e6;
            let mut edited = lock(self.shared);
            edited.open_ms_max = edited.open_ms_max.max(took);
        }
        let file = self.opened[piece.file]
            .as_mut()
            .context("the file is not open")?;
        if piece.writes {
            file.write_at(&piece.bytes, piece.place)
                .with_context(describe)?;
            piece.got = piece.bytes.len();
            return Ok(());
        }
        loop {
            let at = piece.place + piece.got as u64;
            piece.got += file
                .read_at(&mut piece.bytes[piece.got..], at)
                .with_context(describe)?;
            if piece.got == piece.bytes.len() || !source.grows {
                return Ok(());
            }
            std::thread::sleep(GROWING_STEP);
        }
    }

    fn note_failure(&self, done: Result<()>) {
        if let Err(error) = done {
            lock(self.shared).error.get_or_insert(format!("{error:#}"));
        }
    }

    fn note(&self, frame: u64, due: u64, asked: u64, done: u64, pieces: &[Piece]) {
        let files = &self.job.script.files;
        let since_begin = |then: u64| then.saturating_sub(self.begin) as f32 / 1e6;
        let mut edited = lock(self.shared);
        edited.frame_count += 1;
        if self.job.script.pace == Pace::Clock {
            let deadline = due + self.job.late_ns;
            let lateness = (done as f64 - deadline as f64) as f32 / 1e6;
            edited.lateness_ms.push((since_begin(due), lateness));
        }
        if frame == 0 {
            let took = (done - asked) as f32 / 1e6;
            edited.first_frame_ms.push((since_begin(asked), took));
        }
        for piece in pieces {
            if piece.writes {
                edited.bytes_written += piece.got as u64;
                if piece.got > 0 {
                    let written = (piece.file, piece.place, piece.got as u64);
                    edited.written.push(written);
                }
                continue;
            }
            let (source, came) = (&files[piece.file], &piece.bytes[..piece.got]);
            edited.bytes_read += piece.got as u64;
            edited.bytes_wrong += (piece.bytes.len() - piece.got) as u64;
            if source.is_real {
                edited.hashed.push(Hashed {
                    file: piece.file,
                    place: piece.place,
                    bytes: piece.got as u64,
                    hash: xxh3_64(came),
                });
                continue;
            }
            edited.bytes_wrong += source.clip(self.job.seed).wrong_bytes(piece.place, came);
        }
    }

    /// Files that do not stay open past their run.
    fn close_some(&mut self) {
        for (opened, source) in self.opened.iter_mut().zip(&self.job.script.files) {
            if !source.keep_open {
                *opened = None;
            }
        }
    }

    /// What was written is on stable storage where the door says so.
    fn close(&mut self) -> Result<()> {
        for opened in &mut self.opened {
            if let Some(file) = opened.take() {
                file.finish().context("closing a file")?;
            }
        }
        Ok(())
    }
}
