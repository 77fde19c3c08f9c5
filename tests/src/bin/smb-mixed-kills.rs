// SPDX-License-Identifier: Apache-2.0
//! The daemon is killed again and again while clients work as in a facility, all at once: they
//! play, record, grade in place, copy, truncate, rename and delete. They read the written bytes,
//! get no error, and in the end the disk has all bytes.
//!
//! [`rushes_tests::kills`] measures and prints waits, and does not judge them. Nor are times of
//! files judged, which may go back.
//!
//! One file and one request at a time, where each byte can be followed, is in writing.rs.
//! `RUSHES_TEST_KILLS` is the count of kills; the work of clients follows from chance and from the
//! order in which they come.

use rushes_tests::fsx::{self, Plan};
use rushes_tests::kills::{self, Finally, OnPanic, Painter, Stroke};
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition, Handle, Status};
use rushes_tests::smbd::SHARE;
use rushes_tests::words::explained;
use rushes_tests::world::{Setup, World};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: usize = 65_536;
/// Length of footage that is played and copied.
const CLIP_BYTES: u64 = 12_000_001;
/// Length of a take that is recorded.
const TAKE_BYTES: u64 = 6_000_001;
/// Length of the file that is graded in place. Neither it nor a stripe ends with a page, so that
/// neighbours under way share pages.
const GRADE_BYTES: u64 = 3_000_017;
const STRIPE_BYTES: u64 = 30_011;
/// Requests that a client has under way.
const DEPTH: u64 = 4;
/// Steps that each client ends before the daemon may be killed, so that none only waits.
const STEPS_BETWEEN: u64 = 2;

/// The state that all clients share.
struct Stage {
    port: u16,
    kills: kills::Stage,
}

impl Stage {
    fn goes_on(&self) -> bool {
        self.kills.goes_on()
    }

    fn connect(&self) -> Connection {
        Connection::connect(self.port, SHARE).expect("smbd lets guests in")
    }
}

/// A client at work: an smbd of its own, and the count of its steps.
struct Worker<'a> {
    stage: &'a Stage,
    name: String,
    client: Connection,
    steps: &'a AtomicU64,
}

impl Worker<'_> {
    fn must<T>(&self, what: &str, request: impl FnOnce() -> Result<T, Status>) -> T {
        let begun = self.stage.kills.begin();
        let result = request();
        self.stage.kills.took(begun, &self.name, what);
        self.steps.fetch_add(1, Ordering::Relaxed);
        result.unwrap_or_else(|status| panic!("{}: {what}: {:#010x}", self.name, status.0))
    }

    fn open(&self, name: &str, how: Disposition) -> Handle {
        self.must("open", || self.client.open(name, how)).0
    }

    fn close(&self, file: Handle) {
        self.must("close", || self.client.close(file));
    }

    /// Calls `act` once for each block of so many bytes, several at a time. False: not for all,
    /// since the stage has ended.
    fn blocks(&self, bytes: u64, act: impl Fn(u64, usize) + Sync) -> bool {
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..DEPTH {
                scope.spawn(|| {
                    let _all = OnPanic(&self.stage.kills);
                    loop {
                        let at = next.fetch_add(BLOCK as u64, Ordering::Relaxed);
                        if at >= bytes || !self.stage.goes_on() {
                            return;
                        }
                        act(at, BLOCK.min((bytes - at) as usize));
                    }
                });
            }
        });
        self.stage.goes_on()
    }

    /// Reads all of a file and compares it.
    fn check(&self, name: &str, seed: u64, bytes: u64) {
        let file = self.open(name, Disposition::Open);
        self.blocks(bytes, |at, length| {
            let found = self.must("read", || self.client.read(file, at, length));
            assert_eq!(found.len(), length, "{}: {name} at {at}", self.name);
            pattern::check(seed, at, &found, &format!("{}: {name}", self.name));
        });
        self.close(file);
    }
}

/// The files that the disk must have in the end: each one's seed and length.
type Left = BTreeMap<String, (u64, u64)>;

fn play(worker: &Worker, name: &str, seed: u64) -> Left {
    while worker.stage.goes_on() {
        worker.check(name, seed, CLIP_BYTES);
    }
    Left::new()
}

/// Records take after take under a passing name, which a take loses while most of it is dirty;
/// checks it, and deletes the one before.
fn record(worker: &Worker, number: u64) -> Left {
    let mut left = Left::new();
    for turn in 0_u64.. {
        let seed = 1000 * (number + 1) + turn;
        let (passing, name) = (
            format!("take-{number}.tmp"),
            format!("take-{number}-{turn}.mov"),
        );
        let file = worker.open(&passing, Disposition::OverwriteIf);
        let whole = worker.blocks(TAKE_BYTES, |at, length| {
            let bytes = pattern::bytes(seed, at, length);
            worker.must("append", || worker.client.write(file, at, &bytes));
        });
        if turn % 3 == 2 {
            worker.must("flush", || worker.client.flush(file));
        }
        worker.must("rename", || worker.client.rename(file, &name));
        worker.close(file);
        if !whole {
            // It is unknown which blocks it has.
            return left;
        }
        worker.check(&name, seed, TAKE_BYTES);
        for old in std::mem::take(&mut left).into_keys() {
            let file = worker.open(&old, Disposition::Open);
            worker.must("delete", || worker.client.delete_on_close(file));
            worker.close(file);
        }
        left.insert(name, (seed, TAKE_BYTES));
    }
    left
}

/// Copies the file through the client.
fn copy(worker: &Worker, name: &str, seed: u64) -> Left {
    let mut left = Left::new();
    for turn in 0..u64::MAX {
        let copied = format!("copy-{}.mov", turn % 2);
        let from = worker.open(name, Disposition::Open);
        let to = worker.open(&copied, Disposition::OverwriteIf);
        left.remove(&copied);
        let whole = worker.blocks(CLIP_BYTES, |at, length| {
            let bytes = worker.must("read", || worker.client.read(from, at, length));
            pattern::check(seed, at, &bytes, "what is copied");
            worker.must("write", || worker.client.write(to, at, &bytes));
        });
        worker.close(from);
        worker.close(to);
        if !whole {
            break;
        }
        worker.check(&copied, seed, CLIP_BYTES);
        left.insert(copied, (seed, CLIP_BYTES));
    }
    left
}

/// Several threads at once write over parts of one file and read them; each has stripes of its own.
/// Returns  the bytes that the file must have
fn grade(worker: &Worker, name: &str, seed: u64) -> Vec<u8> {
    let file = worker.open(name, Disposition::Open);
    let stripes: Vec<Vec<(u64, Vec<u8>)>> = std::thread::scope(|scope| {
        let painters: Vec<_> = (0..DEPTH)
            .map(|painter| {
                scope.spawn(move || {
                    let _all = OnPanic(&worker.stage.kills);
                    let mut all = Painter::new(painter, DEPTH, GRADE_BYTES, STRIPE_BYTES, seed);
                    while worker.stage.goes_on() {
                        all.stroke(name, |stroke| match stroke {
                            Stroke::Write(at, bytes) => {
                                let write = || worker.client.write(file, at, bytes);
                                worker.must("overwrite", write);
                                Vec::new()
                            }
                            Stroke::Read(at, length) => {
                                worker.must("read", || worker.client.read(file, at, length))
                            }
                        });
                    }
                    all.stripes()
                })
            })
            .collect();
        painters
            .into_iter()
            .map(|painter| painter.join().expect("a painter"))
            .collect()
    });
    worker.close(file);
    let mut whole = pattern::bytes(seed, 0, GRADE_BYTES as usize);
    for (at, bytes) in stripes.into_iter().flatten() {
        whole[at as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    whole
}

/// All other operations of clients, at random: truncate, zero, rename, delete, copy on the server,
/// set times; compared with a model.
fn anything(stage: &Stage, world: &World, steps: &Arc<AtomicU64>) {
    for seed in 0.. {
        if !stage.goes_on() {
            return;
        }
        let plan = Plan {
            daemon_dies: true,
            steps: Arc::clone(steps),
            ..Plan::new(seed, 400)
        };
        if let Err(divergence) = fsx::run(stage.port, world.disk.path(), &plan) {
            panic!("{divergence}");
        }
        forget_all(stage, world);
    }
}

/// Deletes the files of one round, as the next one uses the same names.
fn forget_all(stage: &Stage, world: &World) {
    let client = stage.connect();
    let names = fs::read_dir(world.disk.path()).expect("our own disk");
    for name in names.flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with('w') {
            let (file, _) = client.open(&name, Disposition::Open).expect("opened");
            client.delete_on_close(file).expect("deleted");
            client.close(file).expect("closed");
        }
    }
}

const CLIENTS: usize = 7;

const USAGE: &str = "\
The daemon is killed again and again while SMB clients play, record, grade, copy, cut, rename and delete.
Takes no options. Needs root and the built release programs.

RUSHES_TEST_KILLS   how often; 50

Exit code: 0 when nothing was lost (or something is missing here, which it says), 101 otherwise.";

fn main() {
    if explained(USAGE) {
        return;
    }
    let Some(mut world) = World::build(&Setup {
        // Clients that play get contracts, as they do everywhere.
        server: String::new(),
        ..fsx::setup("64MiB")
    }) else {
        return;
    };
    for (name, seed, bytes) in [
        ("clip-0.mov", 1, CLIP_BYTES),
        ("clip-1.mov", 2, CLIP_BYTES),
        ("grade.mov", 3, GRADE_BYTES),
    ] {
        world.put(name, seed, bytes as usize);
    }
    let mut daemon = world.daemon.take().expect("a daemon");
    let stage = Stage {
        port: world.smbd.port(),
        kills: kills::Stage::default(),
    };
    let steps: [Arc<AtomicU64>; CLIENTS] = Default::default();
    let kill_count = kills::wanted();
    let (mut left, mut graded) = (Left::new(), Vec::new());
    std::thread::scope(|scope| {
        let (stage, steps, world) = (&stage, &steps, &world);
        let worker = move |number: usize, name: &str| Worker {
            stage,
            name: name.to_owned(),
            client: stage.connect(),
            steps: &steps[number],
        };
        let clients = [
            scope.spawn(move || {
                let _all = Finally(&stage.kills);
                play(&worker(0, "player 0"), "clip-0.mov", 1)
            }),
            scope.spawn(move || {
                let _all = Finally(&stage.kills);
                play(&worker(1, "player 1"), "clip-1.mov", 2)
            }),
            scope.spawn(move || {
                let _all = Finally(&stage.kills);
                record(&worker(2, "recorder 0"), 0)
            }),
            scope.spawn(move || {
                let _all = Finally(&stage.kills);
                record(&worker(3, "recorder 1"), 1)
            }),
            scope.spawn(move || {
                let _all = Finally(&stage.kills);
                copy(&worker(4, "copier"), "clip-0.mov", 1)
            }),
        ];
        let grader = scope.spawn(move || {
            let _all = Finally(&stage.kills);
            grade(&worker(5, "grader"), "grade.mov", 3)
        });
        scope.spawn(move || {
            let _all = Finally(&stage.kills);
            anything(stage, world, &steps[6]);
        });
        {
            let _all = Finally(&stage.kills);
            // Wait until steps that began after the kill have ended: as many as were under way
            // then, and some more.
            let now = || steps.each_ref().map(|s| s.load(Ordering::Relaxed));
            let least = DEPTH + STEPS_BETWEEN;
            kills::kill(&mut daemon, &stage.kills, |_| true, now, least, kill_count);
        }
        for client in clients {
            left.extend(client.join().expect("a client"));
        }
        graded = grader.join().expect("the grader");
        let sum: u64 = steps.iter().map(|s| s.load(Ordering::Relaxed)).sum();
        println!("{}", stage.kills.summary(CLIENTS, sum));
    });
    assert!(
        !daemon.log().contains("serving without waiting"),
        "a door has not let go of its lock"
    );
    world.daemon = Some(daemon);
    world.everything_is_written();
    world.disk.make_cold();
    assert!(
        fs::read(world.path("grade.mov")).expect("it is there") == graded,
        "grade.mov on the disk is not what clients were told"
    );
    assert!(left.len() >= 2, "hardly anything was recorded: {left:?}");
    for (name, (seed, bytes)) in left {
        let found = fs::read(world.path(&name)).expect("the file is there");
        assert_eq!(found.len() as u64, bytes, "{name}");
        pattern::check(seed, 0, &found, &name);
    }
}
