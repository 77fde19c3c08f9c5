// SPDX-License-Identifier: Apache-2.0
//! An editor: one process, one connection, that works through its script and reports how late each
//! frame came.
//!
//! By the clock it requests frame *k* not before `begin + k · period`, one piece at a time, all
//! layers of a frame one after the other, since libsmbclient sends one request of a program at a
//! time. The frame is complete with its last piece. A late frame moves nothing: the clock runs on
//! from `begin`, through every cut. Each pass over the list has a beginning of its own; a client
//! that is behind by then skips the rest of the pass before, so that no pass pays for another. The
//! time of a cut counts from the request for its first frame, an open included. The editor compares
//! bytes after it has read the clock. The process ends at a hard limit even if the server never
//! answers; frames that have not come by then are late.

use super::script::{Pace, Script, Source};
use crate::clients::client;
use crate::clients::door::{Address, Door, Opened};
use crate::clients::player::{cpu_s, now_ns, sleep_until_ns};
use crate::stage::footage::PAGE_BYTES;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// Pause before the next read of a growing file that does not hold the frame yet.
const GROWING_STEP: Duration = Duration::from_millis(10);

/// The work of an editor, which it reads as one line of JSON from its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The server's address.
    pub address: Address,
    /// The script.
    pub script: Script,
    /// Seed of the content.
    pub seed: u64,
    /// A frame that comes so long after its time is late. Units: ns.
    pub late_ns: u64,
    /// A client without a clock ends so long after its beginning. Units: ns.
    pub length_ns: u64,
    /// The process may go on for so long after that, or after the last frame's deadline. Units: ns.
    pub grace_ns: u64,
}

/// The result of an editor; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Edited {
    /// When it began. Units: ns, CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// When it ended, its limit included. Units: ns, CLOCK_MONOTONIC.
    pub end_ns: u64,
    /// Frames that came.
    pub frame_count: u64,
    /// Each frame of the clock: when it was due, and how long after its deadline, `late_ns` later,
    /// it came; negative: before the deadline. Units: ms after the beginning, ms.
    pub lateness_ms: Vec<(f32, f32)>,
    /// Each run: when the client requested its first frame and how long that took. Units: ms after
    /// the beginning, ms.
    pub first_frame_ms: Vec<(f32, f32)>,
    /// The counts when each pass of a clock began.
    pub pass_starts: Vec<PassStart>,
    /// The longest open. Units: ms.
    pub open_ms_max: f64,
    /// Bytes received.
    pub bytes_read: u64,
    /// Bytes acknowledged.
    pub bytes_written: u64,
    /// Bytes that differ from those written, or were missing.
    pub bytes_wrong: u64,
    /// File, place and length of each piece that it wrote and the server acknowledged.
    pub written: Vec<(usize, u64, u64)>,
    /// Pieces of real files.
    pub hashed: Vec<Hashed>,
    /// The first error.
    pub error: Option<String>,
    /// CPU time of this process.
    pub cpu_s: f64,
}

/// The counts at the beginning of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassStart {
    /// Frames with a time.
    pub frame_count: usize,
    /// First frames of runs.
    pub cut_count: usize,
    /// Bytes received.
    pub bytes_read: u64,
}

/// A piece of a real file: the lab, which has that file, compares it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hashed {
    /// Index of the file.
    pub file: usize,
    /// Where it begins. Units: bytes.
    pub place: u64,
    /// How much came. Units: bytes.
    pub bytes: u64,
    /// The xxh3 of those bytes.
    pub hash: u64,
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, works.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
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

/// Print the result so far and end the process.
fn finish(shared: &Mutex<Edited>) -> Result<()> {
    let mut edited = lock(shared);
    edited.end_ns = now_ns();
    edited.cpu_s = cpu_s();
    let line = serde_json::to_string(&*edited)?;
    // The lock stays held: a second thread must not print another line.
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

impl<'a> Editor<'a> {
    fn work(&mut self) -> Result<()> {
        let script = &self.job.script;
        let mut due = self.begin + script.delay_ns;
        if script.pace == Pace::Clock {
            let passes = script.passes;
            for pass in 0..passes.count {
                let end = match pass + 1 < passes.count {
                    true => due + passes.start_ns(pass + 1),
                    false => u64::MAX,
                };
                self.note_pass();
                self.play(due + passes.start_ns(pass), end);
            }
            return self.close();
        }
        let end = self.begin + self.job.length_ns;
        while !script.runs.is_empty() {
            match self.play(due, end) {
                Some(next) => due = next,
                None => break,
            }
        }
        self.close()
    }

    /// Plays all runs once, the first of them due at `due`; skips frames that it has not requested
    /// by `end`.
    ///
    /// Returns  when the frame after the last would be due; `None`: it stopped at `end`
    fn play(&mut self, mut due: u64, end: u64) -> Option<u64> {
        let script = &self.job.script;
        for run in &script.runs {
            for frame in 0..run.frame_count {
                if now_ns().max(due) >= end {
                    return None;
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
        Some(due)
    }

    fn note_pass(&self) {
        let mut edited = lock(self.shared);
        let start = PassStart {
            frame_count: edited.lateness_ms.len(),
            cut_count: edited.first_frame_ms.len(),
            bytes_read: edited.bytes_read,
        };
        edited.pass_starts.push(start);
    }

    /// The pieces of this frame; makes the content of writes before their time.
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
            self.opened[piece.file] = Some(self.open(source, piece.writes)?);
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

    /// Waits for a file that another client makes and that may not be there yet.
    fn open(&self, source: &Source, writes: bool) -> Result<Opened<'a>> {
        loop {
            let opened = match writes {
                true => self.door.open_new(&source.path),
                false => self.door.open(&source.path, false),
            };
            if opened.is_ok() || !source.grows {
                return opened;
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
            let looked_at = match self.job.script.is_sampled {
                true => &came[..came.len().min(PAGE_BYTES)],
                false => came,
            };
            let clip = source.clip(self.job.seed);
            edited.bytes_wrong += clip.wrong_bytes(piece.place, looked_at);
        }
    }

    /// Closes files that do not stay open past their run.
    fn close_some(&mut self) {
        for (opened, source) in self.opened.iter_mut().zip(&self.job.script.files) {
            if !source.keep_open {
                *opened = None;
            }
        }
    }

    /// Closes all files. Written ones are on stable storage then, where the door promises that.
    fn close(&mut self) -> Result<()> {
        for opened in &mut self.opened {
            if let Some(file) = opened.take() {
                file.finish().context("closing a file")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::script::{Head, Passes, Run};
    use super::*;
    use crate::stage::room::Room;
    use std::fs;

    const FRAME: u64 = 1000;
    const FRAMES: u64 = 20;

    fn source(number: u64, is_real: bool) -> Source {
        Source {
            path: format!("clip{number}.mov"),
            number,
            bytes: FRAME * FRAMES,
            keep_open: true,
            is_real,
            grows: false,
        }
    }

    fn head(file: usize, frame: u64, stride: i64) -> Head {
        Head {
            file,
            from: frame * FRAME,
            stride: stride * FRAME as i64,
            bytes: FRAME,
            every: 1,
            writes: false,
        }
    }

    fn run(heads: Vec<Head>, frame_count: u64) -> Run {
        Run {
            heads,
            frame_count,
            period_ns: 1_000_000,
        }
    }

    /// The outcome of a script in a folder that has two clips, the first of them with one wrong
    /// byte in its frame 3.
    fn work(pace: Pace, files: Vec<Source>, runs: Vec<Run>, length_ns: u64) -> (Room, Edited) {
        let script = Script {
            pace,
            files,
            runs,
            ..Script::default()
        };
        work_through(script, length_ns)
    }

    fn work_through(script: Script, length_ns: u64) -> (Room, Edited) {
        let room = Room::create().unwrap();
        for number in 0..2 {
            let source = source(number, false);
            let mut content = vec![0; source.bytes as usize];
            source.clip(7).fill(0, &mut content);
            if number == 0 {
                content[3 * FRAME as usize] ^= 1;
            }
            fs::write(room.path().join(&source.path), content).unwrap();
        }
        let job = Job {
            address: Address::Local(room.path().to_owned()),
            script,
            seed: 7,
            late_ns: 1_000_000_000,
            length_ns,
            grace_ns: 0,
        };
        let door = Door::connect(&job.address).unwrap();
        let shared = Mutex::new(Edited::default());
        let mut editor = Editor {
            door: &door,
            job: &job,
            shared: &shared,
            begin: now_ns(),
            opened: job.script.files.iter().map(|_| None).collect(),
        };
        if let Err(error) = editor.work() {
            lock(&shared).error.get_or_insert(format!("{error:#}"));
        }
        drop(editor);
        (room, shared.into_inner().unwrap())
    }

    #[test]
    fn layers_are_one_frame_and_each_run_has_a_first_one() {
        let files = vec![source(0, false), source(1, false)];
        let runs = vec![
            run(vec![head(0, 4, 1), head(1, 0, 1)], 5),
            run(Vec::new(), 3),
            run(vec![head(1, 19, -2)], 4),
        ];
        let (_room, edited) = work(Pace::Clock, files, runs, 0);
        assert_eq!((edited.error, edited.bytes_wrong), (None, 0));
        assert_eq!(edited.frame_count, 9);
        assert_eq!(edited.bytes_read, (5 * 2 + 4) * FRAME);
        assert_eq!(edited.first_frame_ms.len(), 2);
        let due: Vec<f32> = edited.lateness_ms.iter().map(|(due, _)| *due).collect();
        assert_eq!(due, [0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0, 11.0]);
        assert!(edited.lateness_ms.iter().all(|(_, late)| *late > -1000.1));
    }

    /// A list of five frames and a gap of one, a millisecond each, in so many passes.
    fn passes(count: u64, every_ns: u64) -> Edited {
        let script = Script {
            files: vec![source(0, false), source(1, false)],
            runs: vec![
                run(vec![head(1, 0, 1)], 3),
                run(Vec::new(), 1),
                run(vec![head(1, 9, 1)], 2),
            ],
            passes: Passes { count, every_ns },
            ..Script::default()
        };
        work_through(script, 0).1
    }

    #[test]
    fn a_list_is_played_again_at_a_beginning_of_its_own() {
        let edited = passes(3, 100_000_000);
        assert_eq!((&edited.error, edited.frame_count), (&None, 15));
        let due: Vec<f32> = edited.lateness_ms.iter().map(|(due, _)| *due).collect();
        assert_eq!(due[..6], [0.0, 1.0, 2.0, 4.0, 5.0, 100.0]);
        assert_eq!(due[10], 200.0);
        let start = |pass: usize| PassStart {
            frame_count: 5 * pass,
            cut_count: 2 * pass,
            bytes_read: 5 * FRAME * pass as u64,
        };
        assert_eq!(edited.pass_starts, [start(0), start(1), start(2)]);
    }

    #[test]
    fn a_pass_that_is_not_over_when_the_next_begins_is_left() {
        // Four milliseconds are too short for the list: the last frame is due after five.
        let edited = passes(2, 4_000_000);
        let first = edited.pass_starts[1].frame_count;
        assert!((1..5).contains(&first), "{edited:?}");
        let due: Vec<f32> = edited.lateness_ms.iter().map(|(due, _)| *due).collect();
        assert_eq!(due[first], 4.0);
        assert_eq!(edited.lateness_ms.len(), first + 5, "the last has no end");
    }

    #[test]
    fn a_wrong_byte_and_a_missing_one_are_found() {
        let runs = vec![run(vec![head(0, 0, 1)], FRAMES + 1)];
        let (_room, edited) = work(Pace::Clock, vec![source(0, false)], runs, 0);
        assert_eq!(edited.bytes_wrong, 1 + FRAME);
        assert_eq!(edited.frame_count, FRAMES + 1);
    }

    #[test]
    fn of_a_sampled_piece_the_first_page_is_compared() {
        let outcome = |is_sampled: bool| {
            let script = Script {
                // The source expects clip 5, the file holds clip 1: nearly every byte differs.
                files: vec![Source {
                    number: 5,
                    ..source(1, false)
                }],
                runs: vec![run(
                    vec![Head {
                        bytes: FRAME * FRAMES,
                        ..head(0, 0, 0)
                    }],
                    1,
                )],
                is_sampled,
                ..Script::default()
            };
            let edited = work_through(script, 0).1;
            assert_eq!(edited.bytes_read, FRAME * FRAMES);
            edited.bytes_wrong
        };
        let page = PAGE_BYTES as u64;
        assert!((page - 100..=page).contains(&outcome(true)));
        assert!((FRAME * FRAMES - 200..=FRAME * FRAMES).contains(&outcome(false)));
    }

    #[test]
    fn a_hand_begins_again_until_the_time_is_up_and_a_clock_does_not() {
        let runs = || vec![run(vec![head(1, 0, 1)], 2)];
        let files = || vec![source(0, false), source(1, false)];
        let (_room, edited) = work(Pace::Hand, files(), runs(), 300_000_000);
        assert!((3..=300).contains(&edited.frame_count), "{edited:?}");
        assert!(edited.lateness_ms.is_empty());
        let (_room, edited) = work(Pace::Clock, files(), runs(), 20_000_000);
        assert_eq!(edited.frame_count, 2);
    }

    #[test]
    fn what_is_written_is_told_piece_by_piece() {
        let writes = Head {
            writes: true,
            ..head(0, 0, 1)
        };
        let new = source(9, false);
        let (room, edited) = work(
            Pace::Clock,
            vec![new.clone()],
            vec![run(vec![writes], 3)],
            0,
        );
        assert_eq!(edited.bytes_written, 3 * FRAME);
        assert_eq!(edited.written[2], (0, 2 * FRAME, FRAME));
        let content = fs::read(room.path().join(&new.path)).unwrap();
        assert_eq!(new.clip(7).wrong_bytes(0, &content), 0);
    }

    #[test]
    fn of_a_real_file_hashes_are_told_and_nothing_is_judged() {
        let runs = vec![run(vec![head(0, 3, 1)], 1)];
        let (room, edited) = work(Pace::Clock, vec![source(0, true)], runs, 0);
        let content = fs::read(room.path().join("clip0.mov")).unwrap();
        let frame = &content[3 * FRAME as usize..4 * FRAME as usize];
        assert_eq!(edited.hashed[0].hash, xxh3_64(frame));
        assert_eq!(edited.bytes_wrong, 0);
    }

    #[test]
    fn a_file_that_is_not_there_is_an_error_and_its_frames_still_count() {
        let runs = vec![run(vec![head(0, 0, 1)], 2)];
        let (_room, edited) = work(Pace::Clock, vec![source(5, false)], runs, 0);
        let error = edited.error.unwrap();
        assert!(error.contains("clip5.mov"), "{error}");
        assert_eq!(edited.bytes_wrong, 2 * FRAME);
        assert_eq!(edited.frame_count, 2);
    }
}
