// SPDX-License-Identifier: Apache-2.0
//! Frame sequences on a pool: frames of one sequence on several members are one stream, with one
//! contract, and the daemon fetches the next ones before a player opens them (docs/decisions/0034).

use rushes_tests::daemon::Daemon;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, XFS, nameless_open, put};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

const FRAME_BYTES: usize = (1 << 20) + 4_321;
/// 24 frames a second.
const FRAME: Duration = Duration::from_micros(41_667);
const RULE: &str = "[[rule]]\nmatch = \"shots/*/*.dpx\"\nframes_per_second = 24\n";

/// A pool of three members with a daemon, and a folder whose frames go to one after the other.
fn spread() -> Option<(PoolWorld, Daemon)> {
    let world = PoolWorld::build(&[(EXT4, 200), (XFS, 300), (EXT4, 200)])?;
    let daemon = world.served(3, RULE);
    fs::create_dir(world.path("shots")).expect("made");
    wish(&world.path("shots"), "choose=round_robin");
    Some((world, daemon))
}

fn wish(folder: &Path, text: &str) {
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(folder, "user.rushes.policy", text.as_bytes(), none).expect("a wish");
}

fn name(shot: usize, number: usize) -> String {
    format!("shots/s{shot}/f.{number:04}.dpx")
}

fn seed(shot: usize, number: usize) -> u64 {
    (shot * 1000 + number) as u64
}

fn shoot(world: &PoolWorld, shot: usize, numbers: impl Iterator<Item = usize>) {
    let _ = fs::create_dir(world.path(format!("shots/s{shot}")));
    for number in numbers {
        let path = world.path(name(shot, number));
        put(&path, seed(shot, number), FRAME_BYTES).expect("there is room");
    }
}

/// Opens, reads and closes a frame, as a player does. None: there is no such frame.
fn play(world: &PoolWorld, shot: usize, number: usize, seed: u64) -> Option<()> {
    let mut file = File::open(world.path(name(shot, number))).ok()?;
    let mut found = Vec::with_capacity(FRAME_BYTES);
    file.read_to_end(&mut found).expect("read");
    assert_eq!(found.len(), FRAME_BYTES, "frame {number}");
    pattern::check(seed, 0, &found, &name(shot, number));
    Some(())
}

fn forget(world: &PoolWorld) {
    world.sync();
    rushes_tests::caches::drop("3");
}

/// Streams that are sequences in this shot's folder.
fn sequences(status: &Value, shot: usize) -> Vec<Value> {
    let folder = format!("shots/s{shot}/");
    let of_shot = |stream: &&Value| {
        let path = stream["path"].as_str().unwrap_or_default();
        stream["sequence"] == true && path.starts_with(&folder)
    };
    let streams = status["streams"].as_array().expect("a list");
    streams.iter().filter(of_shot).cloned().collect()
}

fn count(stream: &Value, name: &str) -> u64 {
    stream[name].as_u64().expect("a count")
}

#[test]
fn sequences_over_members_are_one_stream_each_and_fetched_ahead() {
    const SHOTS: usize = 2;
    const FRAMES: usize = 72;
    let Some((world, daemon)) = spread() else {
        return;
    };
    for shot in 0..SHOTS {
        shoot(&world, shot, 1..=FRAMES);
        let members: Vec<_> = (1..=3).map(|n| world.members_of(&name(shot, n))).collect();
        assert!(members.iter().all(|one| one.len() == 1), "{members:?}");
        let differ = members[0] != members[1] || members[1] != members[2];
        assert!(differ, "round robin: {members:?}");
    }
    forget(&world);
    // The daemon drops cached bytes of a version that is less than 2 s old (decision 0038).
    std::thread::sleep(Duration::from_millis(2500));
    std::thread::scope(|scope| {
        for shot in 0..SHOTS {
            let world = &world;
            scope.spawn(move || {
                let begun = Instant::now();
                for number in 1..=FRAMES {
                    play(world, shot, number, seed(shot, number)).expect("it is there");
                    std::thread::sleep((FRAME * number as u32).saturating_sub(begun.elapsed()));
                }
            });
        }
    });
    let status = daemon.status();
    for shot in 0..SHOTS {
        let streams = sequences(&status, shot);
        assert_eq!(streams.len(), 1, "{streams:#?}");
        let stream = &streams[0];
        assert_eq!(stream["path"], Value::from(name(shot, 1)), "{stream:#}");
        assert_eq!(stream["standing"], "contract", "{stream:#}");
        let devices = stream["device"].as_str().expect("names");
        assert_eq!(devices.split(", ").count(), 3, "{stream:#}");
        let (reads, hits) = (count(stream, "read_count"), count(stream, "hit_count"));
        assert!(reads >= FRAMES as u64, "{stream:#}");
        // The first read of a frame that was not fetched ahead is no hit.
        let missed = reads - hits;
        assert!(
            missed <= FRAMES as u64 / 4,
            "{missed} of {reads}: {stream:#}"
        );
    }
    // Each device has a contract for its part and no more.
    let promised: Vec<u64> = status["devices"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|device| count(device, "promised_bytes_per_s"))
        .collect();
    let all = (SHOTS * FRAME_BYTES * 24) as u64;
    let sum: u64 = promised.iter().sum();
    assert!(sum.abs_diff(all) < all / 50, "{promised:?} of {all}");
    assert!(promised.iter().all(|part| *part < all / 2), "{promised:?}");
}

#[test]
fn gaps_ends_and_frames_that_change_or_go_are_what_they_are() {
    const FRAMES: usize = 60;
    let Some((world, daemon)) = spread() else {
        return;
    };
    let is_there = |number: usize| !(20..=22).contains(&number);
    shoot(&world, 0, (1..=FRAMES).filter(|number| is_there(*number)));
    forget(&world);
    let begun = Instant::now();
    for number in 1..=FRAMES + 3 {
        let played = match number {
            // Replaced by then by another frame, which the daemon has not seen.
            33 => play(&world, 0, number, 777),
            _ => play(&world, 0, number, seed(0, number)),
        };
        let is_gone = number == 42 || number > FRAMES || !is_there(number);
        assert_eq!(played.is_none(), is_gone, "frame {number}");
        if number == 30 {
            // The daemon has fetched both frames ahead, or is about to.
            let other = world.path("other");
            put(&other, 777, FRAME_BYTES).expect("there is room");
            fs::rename(&other, world.path(name(0, 33))).expect("over it");
        }
        if number == 40 {
            fs::remove_file(world.path(name(0, 42))).expect("removed");
        }
        std::thread::sleep((FRAME * number as u32).saturating_sub(begun.elapsed()));
    }
    let status = daemon.status();
    let streams = sequences(&status, 0);
    assert_eq!(streams.len(), 1, "{streams:#?}");
    assert_eq!(streams[0]["standing"], "contract", "{:#}", streams[0]);
    // The daemon does not keep a removed frame for a client that might have read it.
    let end = Instant::now() + Duration::from_secs(20);
    while nameless_open(daemon.pid()) > 0 {
        assert!(Instant::now() < end, "removed frames are kept");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn daemon_that_dies_while_frames_are_wanted_costs_no_byte_and_the_next_one_goes_on() {
    const FRAMES: usize = 96;
    let Some((world, mut daemon)) = spread() else {
        return;
    };
    shoot(&world, 0, 1..=FRAMES);
    forget(&world);
    let begun = Instant::now();
    for number in 1..=FRAMES {
        if number == 24 {
            daemon.kill();
        }
        if number == 30 {
            daemon.start_again();
        }
        if number == 31 {
            daemon.wait_for("a session for each member", |status| {
                let sessions = status["sessions"].as_array();
                sessions.is_some_and(|all| all.len() == 3)
            });
        }
        play(&world, 0, number, seed(0, number)).expect("it is there");
        std::thread::sleep((FRAME * number as u32).saturating_sub(begun.elapsed()));
    }
    let streams = sequences(&daemon.status(), 0);
    assert_eq!(streams.len(), 1, "{streams:#?}");
    assert_eq!(streams[0]["standing"], "contract", "{:#}", streams[0]);
}

#[test]
fn frames_that_are_recorded_follow_each_other_unless_the_policy_says_otherwise() {
    const FRAMES: usize = 24;
    let Some(world) = PoolWorld::build(&[(EXT4, 300), (XFS, 300), (EXT4, 300)]) else {
        return;
    };
    fs::create_dir(world.path("shots")).expect("made");
    // Two shots at once, in turns: the frames of each go to one member, another one for each.
    for shot in 0..2 {
        fs::create_dir(world.path(format!("shots/s{shot}"))).expect("made");
    }
    for number in 1..=FRAMES {
        for shot in 0..2 {
            shoot(&world, shot, std::iter::once(number));
        }
    }
    let homes = |shot: usize| {
        let mut homes: Vec<u64> = (1..=FRAMES)
            .flat_map(|number| world.members_of(&name(shot, number)))
            .collect();
        homes.sort_unstable();
        homes.dedup();
        homes
    };
    let (one, other) = (homes(0), homes(1));
    assert_eq!((one.len(), other.len()), (1, 1), "{one:?} {other:?}");
    assert_ne!(one, other, "begun at once");
    // A policy spreads frames over all members.
    wish(&world.path("shots"), "choose=round_robin");
    shoot(&world, 2, 1..=6);
    let mut spread: Vec<u64> = (1..=6)
        .flat_map(|number| world.members_of(&name(2, number)))
        .collect();
    spread.sort_unstable();
    spread.dedup();
    assert_eq!(spread.len(), 3, "{spread:?}");
}
