// SPDX-License-Identifier: Apache-2.0
//! A process that recovers the data of a dead daemon may be killed as well, at any moment and again
//! and again: acknowledged bytes reach the disk, and clients see a pause.

use rushes_tests::fsx::{self, client};
use rushes_tests::pattern;
use rushes_tests::random::Random;
use rushes_tests::smb2::{Connection, Disposition, Handle};
use rushes_tests::world::{Backing, Setup, World};
use serde_json::Value;
use std::fs::{self, File};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

const FILES: usize = 3;
/// Units: bytes.
const LENGTH: usize = 12 << 20;

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

/// Only the test starts a recovery, not smbd.
fn setup(backing: Backing) -> Setup {
    let mut setup = Setup {
        backing,
        ..fsx::setup("64MiB")
    };
    setup.share.push(String::from("rushes:recover after = 600"));
    setup
}

fn rushes(world: &World, args: &[&str]) -> Output {
    world.rushes(args).output().expect("rushes was built")
}

/// Starts `rushes recover` or `rushes serve`, which writes the data in lanes. Its messages go to
/// the daemon's log.
fn start(world: &World, what: &str) -> Child {
    let log = File::options()
        .append(true)
        .create(true)
        .open(world.scratch.path().join("daemon.log"))
        .expect("scratch is writable");
    world
        .rushes(&[what])
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("rushes was built")
}

/// Returns  whether it had not ended by itself
fn kill_after(mut child: Child, wait: Duration) -> bool {
    std::thread::sleep(wait);
    let was_alive = child.try_wait().expect("it is our child").is_none();
    child.kill().expect("it is our child");
    child.wait().expect("it is our child");
    was_alive
}

/// Writes that are left in lanes, by `rushes recover --list`.
fn left(world: &World) -> u64 {
    let output = rushes(world, &["recover", "--list", "--json"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let lanes: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    for lane in &lanes {
        assert_eq!(lane["fault"], Value::Null, "{lane:#}");
    }
    lanes
        .iter()
        .filter_map(|lane| lane["write_count"].as_u64())
        .sum()
}

/// Some files, and the bytes that they must have.
struct Files {
    client: Connection,
    files: Vec<(Handle, Vec<u8>)>,
    random: Random,
    step: u64,
}

fn name_of(index: usize) -> String {
    format!("{index}.mov")
}

impl Files {
    fn put(world: &World, seed: u64) -> Files {
        let client = client(world);
        let files = (0..FILES)
            .map(|index| {
                world.put(&name_of(index), index as u64, LENGTH);
                let opened = client.open(&name_of(index), Disposition::Open);
                let bytes = pattern::bytes(index as u64, 0, LENGTH);
                (opened.expect("opened").0, bytes)
            })
            .collect();
        Files {
            client,
            files,
            random: Random(seed),
            step: 100,
        }
    }

    /// Writes here and there, over one another, some past the end. Each is acknowledged.
    fn write(&mut self, count: usize) {
        for _ in 0..count {
            let (handle, model) = &mut self.files[self.random.below(FILES as u64) as usize];
            let at = self.random.below(LENGTH as u64 + 300_000) as usize;
            let length = match self.random.below(3) {
                0 => self.random.below(500) + 1,
                1 => self.random.below(9_000) + 1,
                _ => self.random.below(60_000) + 1,
            } as usize;
            self.step += 1;
            let bytes = pattern::bytes(self.step, at as u64, length);
            let written = self.client.write(*handle, at as u64, &bytes);
            assert_eq!(written, Ok(()), "step {}", self.step);
            if model.len() < at + length {
                model.resize(at + length, 0);
            }
            model[at..at + length].copy_from_slice(&bytes);
        }
    }

    fn read(&mut self, count: usize) {
        for _ in 0..count {
            let index = self.random.below(FILES as u64) as usize;
            let (handle, model) = &self.files[index];
            let at = self.random.below(model.len() as u64) as usize;
            let end = model.len().min(at + 50_000);
            let found = self.client.read(*handle, at as u64, 50_000).expect("read");
            compare(index, at, &found, &model[at..end], "what a client reads");
        }
    }

    fn on_disk(&self, world: &World) {
        for (index, (_, model)) in self.files.iter().enumerate() {
            let found = fs::read(world.path(&name_of(index))).expect("the file is there");
            compare(index, 0, &found, model, "what the disk has");
        }
    }
}

fn compare(index: usize, at: usize, found: &[u8], expected: &[u8], what: &str) {
    let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
    let wrong = wrong.map(|offset| at + offset);
    assert_eq!(
        (found.len(), wrong),
        (expected.len(), None),
        "{what}, file {index}, from {at}: length and first wrong byte"
    );
}

/// No piece was refused, discarded or left where it was.
fn nothing_was_refused(world: &World) {
    let log = fs::read_to_string(world.scratch.path().join("daemon.log")).expect("a log");
    for word in [
        "contradict",
        "no longer exists",
        "cannot be",
        "panicked",
        "damaged",
    ] {
        let line = log.lines().find(|line| line.contains(word));
        assert_eq!(line, None);
    }
}

#[test]
fn a_recovery_that_is_killed_again_and_again_loses_nothing() {
    let Some(mut world) = World::build(&setup(Backing::Slow)) else {
        return;
    };
    let kills = number_from("RUSHES_TEST_KILLS").unwrap_or(25);
    let mut files = Files::put(&world, 7);
    world.disk.tell("timing on");
    // The disk is busy, so that most writes are only in memory.
    files.write(600);
    world.daemon().kill();
    let mut lefts = vec![left(&world)];
    assert!(lefts[0] > 100, "hardly anything is left: {lefts:?}");
    let mut random = Random(11);
    let mut midway = 0;
    for _ in 0..kills {
        let killed = kill_after(
            start(&world, "recover"),
            Duration::from_millis(random.below(250)),
        );
        let now = left(&world);
        let before = lefts[lefts.len() - 1];
        assert!(now <= before, "{now} after {lefts:?}");
        midway += u64::from(killed && now > 0 && now < before);
        lefts.push(now);
        if now < 20 {
            // Only a daemon takes more writes, and killing it is as good.
            let mut daemon = world.daemon.take().expect("a daemon");
            daemon.start_again();
            files.read(3);
            files.write(300);
            daemon.kill();
            world.daemon = Some(daemon);
            lefts.push(left(&world));
        }
    }
    assert!(midway >= 3, "only {midway} were killed midway: {lefts:?}");
    world.disk.tell("timing off");
    let last = rushes(&world, &["recover"]);
    assert!(last.status.success(), "{last:?}");
    assert_eq!(left(&world), 0);
    files.on_disk(&world);
    nothing_was_refused(&world);
    // Plain I/O is right again, and so is the next daemon.
    files.read(20);
    world.daemon().start_again();
    files.write(50);
    files.read(50);
    world.everything_is_written();
    files.on_disk(&world);
}

#[test]
fn daemons_that_are_killed_while_they_take_over_lose_nothing() {
    let Some(mut world) = World::build(&setup(Backing::Ext4)) else {
        return;
    };
    let kills = number_from("RUSHES_TEST_KILLS").unwrap_or(60);
    let mut files = Files::put(&world, 8);
    let mut daemon = world.daemon.take().expect("a daemon");
    let mut random = Random(12);
    let (mut killed, mut with_dirt) = (0, 0);
    while killed < kills {
        let count = 20 + random.below(200) as usize;
        files.write(count);
        daemon.kill();
        for _ in 0..1 + random.below(5) {
            let what = if random.below(5) == 0 {
                "recover"
            } else {
                "serve"
            };
            with_dirt += u64::from(left(&world) > 0);
            // Most moments worth a kill come early: half of the processes live for a hundredth
            // of a second or less.
            let span = if random.below(2) == 0 {
                10_000
            } else {
                120_000
            };
            kill_after(
                start(&world, what),
                Duration::from_micros(random.below(span)),
            );
            killed += 1;
        }
        if random.below(4) == 0 {
            let output = rushes(&world, &["recover"]);
            assert!(output.status.success(), "{output:?}");
            assert_eq!(left(&world), 0);
            files.on_disk(&world);
        }
        daemon.start_again();
        files.read(5);
    }
    assert!(with_dirt > kills / 2, "{with_dirt} of {killed} had dirt");
    world.daemon = Some(daemon);
    files.write(20);
    files.read(50);
    world.everything_is_written();
    files.on_disk(&world);
    nothing_was_refused(&world);
}
