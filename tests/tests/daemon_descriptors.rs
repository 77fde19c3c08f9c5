// SPDX-License-Identifier: Apache-2.0
//! A daemon that may have few descriptors: its clients read by themselves the files for which it
//! has none, it expels no session, and closes files that no client has open.

use rushes_tests::hand::Hand;
use rushes_tests::pattern;
use rushes_tests::world::{Setup, World};
use rustix::process::{Pid, Resource, prlimit};
use std::fs;
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 100_000;
const FILES: u64 = 200;

fn descriptors_of(pid: u32) -> u64 {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("the daemon runs");
    entries.count() as u64
}

/// Sets the limit of open files of a process. Returns the limit before.
fn allow(pid: u32, count: u64) -> u64 {
    let pid = Pid::from_raw(pid as i32).expect("a process");
    let mut limit = prlimit_now(pid);
    let before = limit.current.unwrap_or(u64::MAX);
    limit.current = Some(count);
    prlimit(Some(pid), Resource::Nofile, limit).expect("ours");
    before
}

fn prlimit_now(pid: Pid) -> rustix::process::Rlimit {
    let text = fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero())).expect("ours");
    let line = text.lines().find(|line| line.starts_with("Max open files"));
    let mut words = line
        .expect("each process has one")
        .split_whitespace()
        .skip(3);
    let mut next = || words.next().and_then(|word| word.parse().ok());
    rustix::process::Rlimit {
        current: next(),
        maximum: next(),
    }
}

/// Processor time that a process has used so far. Units: ticks, a hundredth of a second.
fn ticks_of(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the daemon runs");
    let behind = text.rsplit_once(')').expect("its name is in brackets").1;
    let numbers: Vec<u64> = behind
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    // The state is no number: user and system time are the 11th and 12th behind it.
    numbers[10] + numbers[11]
}

fn name(number: u64) -> String {
    format!("file{number}.mov")
}

fn reads_right(hand: &mut Hand, held: rushes_tests::hand::Held, number: u64) {
    pattern::check(number, 0, &hand.read(held, 0, LENGTH), &name(number));
}

/// Small buffers, so that many files are cached.
fn world() -> Option<World> {
    let setup = Setup {
        cache: String::from("64MiB\"\nbuffer_bytes = \"64KiB"),
        ..Setup::default()
    };
    let world = World::build(&setup)?;
    for number in 0..FILES {
        world.put(&name(number), number, LENGTH);
    }
    // Cached bytes of a file that has just changed are not kept.
    std::thread::sleep(Duration::from_millis(2500));
    Some(world)
}

#[test]
fn a_daemon_without_descriptors_leaves_reads_to_its_clients_and_serves_again() {
    let Some(mut world) = world() else {
        return;
    };
    let pid = world.daemon().pid();
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let first = hand.open(&name(0));
    reads_right(&mut hand, first, 0);
    let few = descriptors_of(pid) + 12;
    let before = allow(pid, few);
    let mut held = Vec::new();
    let mut open = |hand: &mut Hand, number| {
        held.push((number, hand.open(&name(number))));
        reads_right(hand, held[held.len() - 1].1, number);
    };
    (1..FILES / 2).for_each(|number| open(&mut hand, number));
    // Not one is left now, also not for the descriptors that a door sends.
    allow(pid, 1);
    (FILES / 2..FILES).for_each(|number| open(&mut hand, number));
    reads_right(&mut hand, first, 0);
    // The daemon has no descriptor for another client at all; that client reads all the same.
    let mut second = Hand::connect(HAND, world.smbd.port());
    let his = second.open(&name(7));
    reads_right(&mut second, his, 7);
    // Without descriptors the daemon does not spin.
    let ticks = ticks_of(pid);
    let since = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let used = ticks_of(pid) - ticks;
    let most = since.elapsed().as_millis() as u64 / 10 / 4;
    let log = world.daemon().log();
    assert!(
        used < most,
        "{used} ticks of a processor, expected less than {most}: {log}"
    );
    allow(pid, few);
    for (number, held) in &held {
        reads_right(&mut hand, *held, *number);
    }
    for (_, held) in held {
        hand.close(held);
    }
    let log = world.daemon().log();
    assert!(!log.contains("was closed by the daemon"), "{log}");

    // Closed files make room for newly opened ones, although their bytes are in the cache.
    let again = hand.open(&name(20));
    reads_right(&mut hand, again, 20);
    let status = world.daemon().wait_for("the file is served", |status| {
        let sessions = status["sessions"].as_array();
        let counts = sessions
            .into_iter()
            .flatten()
            .map(|one| one["handle_count"].as_u64());
        counts.max().flatten() >= Some(2)
    });
    assert_eq!(status["daemon"]["expelled_session_count"], 0, "{status:#}");
    hand.close(again);
    allow(pid, before);
    reads_right(&mut second, his, 7);
    reads_right(&mut hand, first, 0);
}

#[test]
fn files_that_nobody_has_open_leave_descriptors_for_others() {
    const LIMIT: u32 = 130;
    let Some(mut world) = world() else {
        return;
    };
    let daemon = world.daemon();
    daemon.end();
    daemon.descriptor_limit = Some(LIMIT);
    daemon.start_again();
    let pid = daemon.pid();
    let mut hand = Hand::connect(HAND, world.smbd.port());
    for round in 0..3 {
        for number in 0..FILES {
            let held = hand.open(&name(number));
            reads_right(&mut hand, held, number);
            hand.close(held);
        }
        let count = descriptors_of(pid);
        assert!(count + 20 < u64::from(LIMIT), "round {round}: {count}");
    }
    // The file that the client closed last is still in the cache.
    let hits = |world: &mut World| world.daemon().status()["cache"]["hit_count"].as_u64();
    let before = hits(&mut world);
    let held = hand.open(&name(FILES - 1));
    reads_right(&mut hand, held, FILES - 1);
    assert!(hits(&mut world) > before, "it is in the cache");
    let log = world.daemon().log();
    assert!(!log.contains("Too many open files"), "{log}");
    assert_eq!(world.daemon().status()["daemon"]["plain_open_count"], 0);
}

/// If a client read such a file by itself, another that writes to it through the daemon would need
/// all of it on the disk before each of these reads.
#[test]
fn a_file_that_a_daemon_has_open_is_served_to_others_where_there_is_no_room_for_more() {
    let Some(mut world) = world() else {
        return;
    };
    let pid = world.daemon().pid();
    let mut first = Hand::connect(HAND, world.smbd.port());
    let mut second = Hand::connect(HAND, world.smbd.port());
    let mut held = Vec::new();
    for number in 0..FILES - 10 {
        let file = first.open(&name(number));
        reads_right(&mut first, file, number);
        held.push(file);
    }
    let other = second.open(&name(FILES - 1));
    reads_right(&mut second, other, FILES - 1);
    let before = allow(pid, descriptors_of(pid) + 12);
    let mut plain_opens = |hand: &mut Hand, number: u64| {
        let file = hand.open(&name(number));
        reads_right(hand, file, number);
        let count = world.daemon().status()["daemon"]["plain_open_count"].as_u64();
        count.expect("a count")
    };
    let known = plain_opens(&mut second, 3);
    assert_eq!(known, 0, "it is open already");
    let unknown = plain_opens(&mut second, FILES - 2);
    assert_eq!(unknown, 1, "three quarters are files'");
    allow(pid, before);
}
