// SPDX-License-Identifier: Apache-2.0
//! What a client was told is written: it is read back by everybody, it reaches the disk, and it outlives the daemon.

use rushes_tests::hand::{Hand, Held};
use rushes_tests::pattern;
use rushes_tests::world::{Setup, World};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");

fn setup() -> Setup {
    Setup {
        write_buffer: Some("64MiB"),
        // The analyser would leave scattered reads to the kernel's cache; here ours is on trial.
        server: String::from("analyser = false"),
        ..Setup::default()
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// A client writes or reads something at random, and what it reads is what the model has.
fn act(random: &mut Random, step: u64, hand: &mut Hand, file: Held, model: &mut Vec<u8>) {
    let offset = random.below(6_000_000);
    let length = match random.below(3) {
        0 => random.below(100) + 1,
        1 => random.below(10_000) + 1,
        _ => random.below(1_000_000) + 1,
    } as usize;
    if random.below(2) == 0 {
        let bytes = pattern::bytes(1000 + step, offset, length.min(300_000));
        let end = offset as usize + bytes.len();
        if model.len() < end {
            model.resize(end, 0);
        }
        model[offset as usize..end].copy_from_slice(&bytes);
        hand.write(file, offset, &bytes);
    } else {
        let found = hand.read(file, offset, length);
        let start = (offset as usize).min(model.len());
        let expected = &model[start..(start + length).min(model.len())];
        assert_eq!(
            found.len(),
            expected.len(),
            "step {step}: length at {offset}"
        );
        let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "step {step}: first wrong byte after {offset}");
    }
}

#[test]
fn writes_go_through_lanes_and_reach_the_disk_by_themselves() {
    let Some(mut world) = World::build(&setup()) else {
        return;
    };
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = hand.create("take.mov");
    let bytes = pattern::bytes(5, 0, 10_000_001);
    for (at, part) in (0..).step_by(1_000_000).zip(bytes.chunks(1_000_000)) {
        hand.write(file, at, part);
    }
    // At once for everybody behind the door.
    assert_eq!(other.size("take.mov"), bytes.len() as u64);
    let reading = other.open("take.mov");
    let back = other.read(reading, 9_000_000, 2_000_000);
    pattern::check(5, 9_000_000, &back, "another client's read");
    assert_eq!(back.len(), 1_000_001);
    let status = world.daemon().status();
    assert!(
        status["write"]["write_count"].as_u64() >= Some(10),
        "{status}"
    );
    assert_eq!(status["write"]["plain_count"], 0, "{status}");
    world.wait_for_file("take.mov", &bytes);
    hand.close(file);
    world
        .daemon()
        .wait_for("nothing is left to be written", |status| {
            status["write"]["used_bytes"] == 0
        });
}

#[test]
fn a_daemon_that_is_killed_again_and_again_loses_nothing_and_nobody_sees_an_error() {
    kills(50, 1);
}

fn kills(count: usize, hand_count: usize) {
    let Some(mut world) = World::build(&setup()) else {
        return;
    };
    world.put("clip.mov", 1, 5_000_000);
    let mut model = pattern::bytes(1, 0, 5_000_000);
    let mut random = Random(77);
    let mut hands: Vec<(Hand, Held)> = (0..hand_count)
        .map(|_| {
            let mut hand = Hand::connect(HAND, world.smbd.port());
            let file = hand.open_rw("clip.mov");
            (hand, file)
        })
        .collect();
    let mut daemon = world.daemon.take().expect("a daemon");
    let done = AtomicBool::new(false);
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut random = Random(5);
            for _ in 0..count {
                std::thread::sleep(Duration::from_millis(20 + random.below(200)));
                daemon.kill();
                daemon.start_again();
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut step = 0;
        while !done.load(Ordering::Relaxed) || step < 100 {
            let (hand, file) = &mut hands[random.below(hand_count as u64) as usize];
            let begun = Instant::now();
            act(&mut random, step, hand, *file, &mut model);
            longest = longest.max(begun.elapsed());
            step += 1;
        }
        killer.join().expect("the killer");
        println!("{step} steps, {count} kills, longest pause {longest:?}");
    });
    for (hand, file) in &mut hands {
        hand.close(*file);
    }
    world.daemon = Some(daemon);
    world.wait_for_file("clip.mov", &model);
    world
        .daemon()
        .wait_for("nothing is left to be written", |status| {
            status["write"]["used_bytes"] == 0
        });
}
