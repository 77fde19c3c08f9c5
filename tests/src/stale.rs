// SPDX-License-Identifier: Apache-2.0
//! Files that programs of the server change in every way there is, read over SMB meanwhile: from a
//! second after the last change on each reader has its bytes and its length.
//!
//! Each worker has a file, a program that changes it ([`crate::changer`]) and a model. A round is a
//! few changes in quick succession with reads beside them, so that there are blocks to become old;
//! then everybody reads the whole file again and again until it is right. A client that still reads
//! something else a second later has read stale bytes, and for good when a few seconds more do not
//! help.

use crate::changer::{Change, Changer, LENGTH_MAX};
use crate::random::Random;
use crate::smb2::{self, Connection, Disposition, Handle, REQUEST_MAX, Status};
use crate::smbd::SHARE;
use crate::world::{Backing, Setup};
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// From so long after the last change on reads must be right.
const PROMISE: Duration = Duration::from_secs(1);
/// And in a file to which a client of ours wrote less than so long before
/// (docs/decisions/0038-looks.md).
const BESIDE_CLIENTS: Duration = Duration::from_secs(3);
/// Bytes that are wrong for so long are wrong for good.
const FOR_GOOD: Duration = Duration::from_secs(5);
const PAGE: u64 = 4096;
/// Longest file and longest change.
const SIZE_MAX: u64 = LENGTH_MAX / 2;
const PIECE_MAX: u64 = 256 << 10;
/// Changes that a fault tells.
const HISTORY_MAX: usize = 16;

/// Ways, how often, and whether they go in whole pages.
const WAYS: [(&str, u64, bool); 22] = [
    ("write", 6, false),
    ("append", 4, false),
    ("direct", 6, true),
    ("asynchronous direct", 6, true),
    ("asynchronous", 4, false),
    ("ring", 4, false),
    ("direct ring", 4, true),
    ("splice", 4, false),
    ("store", 8, false),
    ("sync", 4, false),
    ("truncate", 6, false),
    ("punch", 6, true),
    ("zero", 4, true),
    ("collapse", 3, true),
    ("insert", 3, true),
    ("extend", 2, false),
    ("clone", 5, true),
    ("copy", 4, false),
    ("sendfile", 4, false),
    ("renew", 2, false),
    // By a client of the share.
    ("smb write", 3, false),
    ("smb length", 2, false),
];

/// The plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The changes follow from it; their times do not.
    pub seed: u64,
    /// So long.
    pub time: Duration,
    /// Each has a file.
    pub workers: u64,
    /// Only this one.
    pub only: Option<u64>,
    /// Only changes in these ways; empty: in all.
    pub ways: Vec<String>,
    /// Reads that are wrong a second after the last change are a fault, and not only those that
    /// stay so.
    pub timed: bool,
    /// Go on after a fault.
    pub go_on: bool,
}

/// The findings.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Changes made.
    pub changes: u64,
    /// Rounds, each with a look at the whole file by each reader.
    pub rounds: u64,
    /// The longest that it took until a reader had it right.
    pub slowest: Duration,
    /// The faults.
    pub faults: Vec<String>,
}

/// A server to do it on. A file of every second worker is read at a rate that is promised, and
/// scattered reads are left to the kernel; without the analyser neither.
pub fn setup(backing: Backing, write_buffer: Option<&'static str>, analyser: bool) -> Setup {
    Setup {
        backing,
        write_buffer,
        server: format!("analyser = {analyser}"),
        more: String::from("[[rule]]\nmatch = \"played*\"\nbitrate = \"20M\""),
        global: vec![String::from(smb2::GLOBAL)],
        share: smb2::SHARE_LINES.map(String::from).to_vec(),
        ..Setup::default()
    }
}

/// XFS with shared blocks.
pub const XFS: Backing = Backing::Small(&["mkfs.xfs", "-q", "-f", "-m", "reflink=1"]);

/// Do it.
pub fn run(port: u16, folder: &Path, plan: &Plan) -> Report {
    let clients: Vec<Arc<Connection>> = (0..2)
        .map(|_| Arc::new(Connection::connect(port, SHARE).expect("smbd lets guests in")))
        .collect();
    let stop = AtomicBool::new(false);
    let numbers = match plan.only {
        Some(only) => only..only + 1,
        None => 0..plan.workers,
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = numbers
            .map(|number| {
                let (clients, stop) = (clients.clone(), &stop);
                scope.spawn(move || Worker::new(plan, number, clients, folder).work(stop))
            })
            .collect();
        let mut all = Report::default();
        for worker in running {
            let one = worker.join().unwrap_or_else(|_| Report {
                faults: vec![String::from("a worker had no answer")],
                ..Report::default()
            });
            all.changes += one.changes;
            all.rounds += one.rounds;
            all.slowest = all.slowest.max(one.slowest);
            all.faults.extend(one.faults);
        }
        all
    })
}

struct Worker<'a> {
    plan: &'a Plan,
    number: u64,
    clients: Vec<Arc<Connection>>,
    path: PathBuf,
    name: String,
    changer: Changer,
    random: Random,
    /// The contents of the file.
    bytes: Vec<u8>,
    /// One for each client.
    handles: Vec<Handle>,
    version: u64,
    history: VecDeque<String>,
    begun: Instant,
    /// Where the player is.
    playing: u64,
    /// When a client changed it last.
    client_changed: Option<Instant>,
}

impl<'a> Worker<'a> {
    fn new(
        plan: &'a Plan,
        number: u64,
        clients: Vec<Arc<Connection>>,
        folder: &Path,
    ) -> Worker<'a> {
        let kind = if number % 2 == 1 { "played" } else { "read" };
        let name = format!("{kind}{number}");
        let path = folder.join(&name);
        let changer = Changer::new(&path, &folder.join(format!("donor{number}")));
        let open = |client: &Arc<Connection>| {
            let opened = client.open(&name, Disposition::Open);
            opened.expect("guests may open it").0
        };
        Worker {
            plan,
            number,
            handles: clients.iter().map(open).collect(),
            clients,
            path,
            name,
            changer,
            random: Random(plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number << 40)),
            bytes: Vec::new(),
            version: 0,
            history: VecDeque::new(),
            begun: Instant::now(),
            playing: 0,
            client_changed: None,
        }
    }

    fn work(mut self, stop: &AtomicBool) -> Report {
        let mut report = Report::default();
        while self.begun.elapsed() < self.plan.time && !stop.load(Ordering::Relaxed) {
            let result = self.round(&mut report);
            report.rounds += 1;
            let Err(fault) = result else { continue };
            let fault = self.tell(&fault);
            eprintln!("{fault}");
            report.faults.push(fault);
            if !self.plan.go_on {
                stop.store(true, Ordering::Relaxed);
                break;
            }
            self.start_over();
        }
        report
    }

    /// As if nothing had been wrong.
    fn start_over(&mut self) {
        self.bytes = fs::read(&self.path).expect("it is there");
        for (client, handle) in self.clients.iter().zip(&mut self.handles) {
            let _ = client.close(*handle);
            let opened = client.open(&self.name, Disposition::Open);
            *handle = opened.expect("guests may open it").0;
        }
    }

    fn round(&mut self, report: &mut Report) -> Result<(), String> {
        // Bytes that were right once must not become wrong by themselves.
        self.look(0, Instant::now(), report)?;
        self.look(1, Instant::now(), report)?;
        self.note(String::from("--"));
        let most = [1, 3, 8][self.random.below(3) as usize];
        let count = 1 + self.random.below(most);
        for _ in 0..count {
            self.change()?;
            report.changes += 1;
            let pause = [0, 0, 0, 200, 2_000, 20_000][self.random.below(6) as usize];
            std::thread::sleep(Duration::from_micros(pause));
        }
        let changed = Instant::now();
        let there = fs::read(&self.path).map_err(|error| format!("reading it: {error}"))?;
        if let Some(wrong) = difference(&there, &self.bytes) {
            return Err(format!("the file itself is not what was written: {wrong}"));
        }
        self.look(0, changed, report)?;
        self.look(1, changed, report)?;
        if self.random.below(4) == 0 {
            let which = self.random.below(2) as usize;
            self.open_again(which)?;
        }
        // A change that was told of lately hides one that nobody tells of.
        if self.random.below(2) == 0 {
            std::thread::sleep(Duration::from_millis(self.random.below(1_500)));
        }
        Ok(())
    }

    fn open_again(&mut self, which: usize) -> Result<(), String> {
        let said = |status: Status| format!("opening it again: {:#010x}", status.0);
        let client = &self.clients[which];
        client.close(self.handles[which]).map_err(said)?;
        self.handles[which] = client.open(&self.name, Disposition::Open).map_err(said)?.0;
        Ok(())
    }

    /// One change, and reads beside it.
    fn change(&mut self) -> Result<(), String> {
        let Some(change) = self.choose() else {
            return Ok(());
        };
        let since = self.begun.elapsed();
        let said = |status: Status| format!("{}: {:#010x}", change.way, status.0);
        match change.way {
            "smb write" => {
                let which = self.random.below(2) as usize;
                let data = stamped(&change);
                let (client, handle) = (&self.clients[which], self.handles[which]);
                for (index, part) in data.chunks(REQUEST_MAX).enumerate() {
                    let at = change.at + (index * REQUEST_MAX) as u64;
                    client.write(handle, at, part).map_err(said)?;
                }
                client.flush(handle).map_err(said)?;
            }
            "smb length" => {
                let which = self.random.below(2) as usize;
                let (client, handle) = (&self.clients[which], self.handles[which]);
                client.set_size(handle, change.at).map_err(said)?;
            }
            _ => {
                self.changer.begin(&change);
                for _ in 0..self.random.below(4) {
                    self.read_beside();
                }
                match self.changer.end() {
                    Ok(()) => {}
                    // EOPNOTSUPP: not on this file system; ENOTTY: it has no shared blocks.
                    Err(error) if error.contains("[Errno 95]") || error.contains("[Errno 25]") => {
                        return Ok(());
                    }
                    Err(error) => return Err(format!("{change:?}: {error}")),
                }
            }
        }
        if change.way.starts_with("smb") {
            self.client_changed = Some(Instant::now());
        }
        self.apply(&change);
        let took = self.begun.elapsed() - since;
        self.note(format!(
            "{:.4} (+{:.4}) {} at {} length {} of {:?}; then {} bytes long",
            since.as_secs_f64(),
            took.as_secs_f64(),
            change.way,
            change.at,
            change.length,
            change.stamp,
            self.bytes.len()
        ));
        Ok(())
    }

    /// The bytes that come are old or new: they are looked at later.
    fn read_beside(&mut self) {
        let which = self.random.below(2) as usize;
        let is_scattered = which == 0 && self.random.below(3) == 0;
        let at = if is_scattered {
            self.random.below(self.bytes.len() as u64 + 1)
        } else {
            let at = self.playing;
            self.playing = (at + REQUEST_MAX as u64) % (self.bytes.len() as u64 + 1);
            at
        };
        let _ = self.clients[which].read(self.handles[which], at, REQUEST_MAX);
    }

    fn choose(&mut self) -> Option<Change> {
        let is_wanted =
            |way: &str| self.plan.ways.is_empty() || self.plan.ways.iter().any(|w| w == way);
        let ways: Vec<_> = WAYS.into_iter().filter(|way| is_wanted(way.0)).collect();
        let mut left = self.random.below(ways.iter().map(|way| way.1).sum());
        let &(way, _, aligned) = ways.iter().find(|way| {
            let found = left < way.1;
            left = left.saturating_sub(way.1);
            found
        })?;
        let size = self.bytes.len() as u64;
        let step = if aligned || self.random.below(3) == 0 {
            PAGE
        } else {
            1
        };
        let mut at = self.random.below(size + 1) / step * step;
        let most = [PAGE, 4 * PAGE, 16 * PAGE, PIECE_MAX][self.random.below(4) as usize];
        let mut length = (1 + self.random.below(most)).div_ceil(step) * step;
        match way {
            "append" | "extend" => at = size,
            "renew" => length = 1 + self.random.below(SIZE_MAX),
            "truncate" | "smb length" => {
                at = match self.random.below(4) {
                    0 => size + self.random.below(SIZE_MAX.saturating_sub(size).max(1)),
                    _ => at,
                }
            }
            "store" => length = length.min(size.saturating_sub(at)),
            "punch" | "zero" => length = length.min((size.saturating_sub(at)) / PAGE * PAGE),
            // Cutting it to the end is refused.
            "collapse" => length = length.min(size.saturating_sub(at + 1) / PAGE * PAGE),
            _ => {}
        }
        let grows = !matches!(way, "truncate" | "smb length" | "renew");
        let too_long = grows && at.max(size) + length > SIZE_MAX;
        if way != "sync" && too_long || length == 0 || (way == "insert" && at >= size) {
            return None;
        }
        self.version += 1;
        let stamp = format!("{:02}-{:010}.=", self.number, self.version);
        Some(Change {
            way,
            at,
            length,
            stamp,
        })
    }

    fn apply(&mut self, change: &Change) {
        let (at, length) = (change.at as usize, change.length as usize);
        let bytes = &mut self.bytes;
        match change.way {
            "sync" => {}
            "truncate" | "smb length" => bytes.resize(at, 0),
            "extend" => bytes.resize(at + length, 0),
            "punch" | "zero" => bytes[at..at + length].fill(0),
            "collapse" => {
                bytes.drain(at..at + length);
            }
            "insert" => {
                bytes.splice(at..at, std::iter::repeat_n(0, length));
            }
            "renew" => *bytes = stamped(change),
            _ => {
                bytes.resize(bytes.len().max(at + length), 0);
                bytes[at..at + length].copy_from_slice(&stamped(change));
            }
        }
    }

    /// A reader looks at the whole file until it is right; `changed`: the last change.
    fn look(&mut self, which: usize, changed: Instant, report: &mut Report) -> Result<(), String> {
        let mut late: Option<(String, Duration)> = None;
        let is_beside = self
            .client_changed
            .is_some_and(|at| at + BESIDE_CLIENTS > changed);
        let promise = if is_beside {
            BESIDE_CLIENTS + PROMISE / 2
        } else {
            PROMISE
        };
        loop {
            let begun = changed.elapsed();
            let wrong = self.wrong(which)?;
            let Some(wrong) = wrong else {
                report.slowest = report.slowest.max(begun);
                return match late {
                    Some((wrong, begun)) if self.plan.timed => Err(format!(
                        "reader {which}, {:.3} s after the last change: {wrong}; right after {:.3} s",
                        begun.as_secs_f64(),
                        changed.elapsed().as_secs_f64(),
                    )),
                    _ => Ok(()),
                };
            };
            if begun > FOR_GOOD {
                return Err(format!(
                    "reader {which}, {:.3} s after the last change (for good): {wrong}",
                    begun.as_secs_f64()
                ));
            }
            if begun > promise && late.is_none() {
                late = Some((wrong, begun));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where what a reader sees differs from what is there.
    fn wrong(&mut self, which: usize) -> Result<Option<String>, String> {
        let said = |status: Status| format!("reader {which}: {:#010x}", status.0);
        let (client, handle) = (&self.clients[which], self.handles[which]);
        let size = client.info(handle).map_err(said)?.size;
        if size != self.bytes.len() as u64 {
            return Ok(Some(format!(
                "it is {size} bytes long, expected {}",
                self.bytes.len()
            )));
        }
        let mut found = Vec::with_capacity(self.bytes.len());
        loop {
            let part = client.read(handle, found.len() as u64, REQUEST_MAX);
            let part = part.map_err(said)?;
            if part.is_empty() || found.len() > LENGTH_MAX as usize {
                break;
            }
            found.extend(part);
        }
        Ok(difference(&found, &self.bytes))
    }

    fn note(&mut self, what: String) {
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back(what);
    }

    fn tell(&self, fault: &str) -> String {
        let there = fs::read(&self.path).unwrap_or_default();
        let kernel = difference(&there, &self.bytes).unwrap_or_else(|| String::from("right"));
        let history: Vec<&str> = self.history.iter().map(String::as_str).collect();
        format!(
            "stale: {}: {fault}\n  what a program of the server reads now: {kernel}\n  changes:\n    {}\n  \
             again: --seed {} --only {}",
            self.name,
            history.join("\n    "),
            self.plan.seed,
            self.number
        )
    }
}

fn stamped(change: &Change) -> Vec<u8> {
    let stamp = change.stamp.bytes().cycle();
    stamp.take(change.length as usize).collect()
}

/// Where two files differ first, and how much.
fn difference(found: &[u8], expected: &[u8]) -> Option<String> {
    let shorter = found.len().min(expected.len());
    let wrong: Vec<usize> = (0..shorter)
        .filter(|&at| found[at] != expected[at])
        .collect();
    let (Some(first), Some(last)) = (wrong.first(), wrong.last()) else {
        return (found.len() != expected.len()).then(|| {
            format!(
                "it ends after {} bytes, expected {}",
                found.len(),
                expected.len()
            )
        });
    };
    let shown = |bytes: &[u8]| {
        let end = (first + 16).min(bytes.len());
        String::from_utf8_lossy(&bytes[*first..end]).into_owned()
    };
    Some(format!(
        "{} bytes of {} (expected {}) are wrong, between {first} and {last}; the first: {:?}, expected {:?}",
        wrong.len(),
        found.len(),
        expected.len(),
        shown(found),
        shown(expected)
    ))
}
