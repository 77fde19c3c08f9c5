// SPDX-License-Identifier: Apache-2.0
//! Frames that the daemon asks a pool's door for: it serves files that the door finds, refuses
//! forged ones, and no read waits for the door.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_core::format::message;
use rushes_shm::Connect;
use rushes_shm::client::{Client, WantedFile};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use support::raw::{Raw, head};
use support::*;

const FRAME_BYTES: usize = 300_000;
const RULE: &str = "[[rule]]\nmatch = \"shot/*.dpx\"\nframes_per_second = 24\n";

/// A daemon with objects of a pool in its share; only the door knows the sequence of the frames.
struct World {
    daemon: Daemon,
    share: Folder,
}

impl World {
    fn new() -> World {
        let share = Folder::below(&std::env::temp_dir());
        let daemon = Daemon::start(&share.0, RULE);
        for number in 1..=40 {
            let bytes = pattern(number, FRAME_BYTES);
            std::fs::write(share.0.join(format!("object{number}")), bytes).unwrap();
        }
        World { daemon, share }
    }

    fn door(&self, pool: u64) -> Client {
        let who = Connect {
            pool,
            ..who("media")
        };
        Client::connect(&self.daemon.session_socket(), &who)
            .unwrap_or_else(|error| panic!("{error:?}"))
    }

    fn object(&self, number: u64) -> File {
        File::open(self.share.0.join(format!("object{number}"))).unwrap()
    }

    /// Frame `number` is opened, read and closed.
    fn play(&self, door: &mut Client, number: u64) {
        let path = format!("shot/f.{number:04}.dpx");
        let file = self.object(number);
        let handle = door.open(&file, path.as_bytes()).unwrap();
        let bytes = read(door, handle, 0, FRAME_BYTES);
        assert!(bytes == pattern(number, FRAME_BYTES), "frame {number}");
        door.close(handle);
    }

    fn hits(&self) -> u64 {
        self.daemon.status().cache.hit_count
    }
}

/// The files that the daemon asks for within a while; at least one.
fn wanted(door: &mut Client) -> Vec<WantedFile> {
    let end = Instant::now() + Duration::from_secs(10);
    let mut all = Vec::new();
    while all.is_empty() {
        assert!(Instant::now() < end, "nothing is asked for");
        std::thread::sleep(Duration::from_millis(20));
        all.extend(std::iter::from_fn(|| door.take_wanted()));
    }
    all
}

fn number_of(wanted: &WantedFile) -> u64 {
    let path = std::str::from_utf8(&wanted.path).unwrap();
    let digits = path.strip_prefix("shot/f.").and_then(|rest| rest.get(..4));
    digits.unwrap().parse().unwrap()
}

#[test]
fn frames_are_asked_for_by_the_names_of_the_tree_and_are_there_when_they_are_opened() {
    let world = World::new();
    // The daemon fetches the bytes of frames that were written less than two seconds ago again
    // when they are opened.
    std::thread::sleep(Duration::from_millis(2100));
    let (mut first, mut second) = (world.door(9), world.door(9));
    world.play(&mut first, 1);
    let before = world.hits();
    // The daemon may have asked either session.
    for number in 2..=30 {
        let end = Instant::now() + Duration::from_millis(60);
        while Instant::now() < end {
            while let Some(wanted) = first.take_wanted().or_else(|| second.take_wanted()) {
                let number = number_of(&wanted);
                // There are no more than 40.
                if number > 40 {
                    first.found(wanted.number, Err(2));
                } else {
                    second.found(wanted.number, Ok(world.object(number).as_fd()));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Frames alternate between the members, which are sessions.
        match number % 2 {
            0 => world.play(&mut second, number),
            _ => world.play(&mut first, number),
        }
    }
    assert!(world.hits() - before >= 26, "{}", world.hits() - before);
    let status = world.daemon.status();
    let sequences = status.streams.iter().filter(|stream| stream.sequence);
    let names: Vec<&str> = sequences.map(|stream| stream.path.as_str()).collect();
    assert_eq!(names, ["shot/f.0001.dpx"]);
    assert_eq!(status.daemon.expelled_session_count, 0);
}

#[test]
fn a_door_that_says_nothing_is_not_waited_for() {
    let world = World::new();
    let mut door = world.door(9);
    for number in 1..=12 {
        let begun = Instant::now();
        world.play(&mut door, number);
        assert!(begun.elapsed() < Duration::from_secs(3), "frame {number}");
    }
    assert!(!wanted(&mut door).is_empty());
    // The daemon asks again when the unanswered questions have ended and the player moves on.
    std::thread::sleep(Duration::from_millis(5500));
    let _ = std::iter::from_fn(|| door.take_wanted()).count();
    world.play(&mut door, 13);
    assert!(!wanted(&mut door).is_empty());
    assert!(door.alive());
}

#[test]
fn what_a_door_makes_up_is_not_served_and_harms_nobody_else() {
    let world = World::new();
    let mut door = world.door(9);
    let mut stranger = world.door(8);
    let mut honest = world.daemon.connect();
    std::fs::write(world.share.0.join("honest.mov"), pattern(77, FRAME_BYTES)).unwrap();
    let (_file, handle) = open(&mut honest, &world.share.0, "honest.mov");
    world.play(&mut door, 1);
    let secret = File::open("/etc/passwd").unwrap();
    let folder = File::open(&world.share.0).unwrap();
    let null = File::open("/dev/null").unwrap();
    for (nth, asked) in wanted(&mut door).into_iter().enumerate() {
        // The daemon ignores an answer of another pool's door.
        stranger.found(asked.number, Ok(world.object(40).as_fd()));
        match nth % 4 {
            0 => door.found(asked.number, Ok(secret.as_fd())),
            1 => door.found(asked.number, Ok(folder.as_fd())),
            2 => door.found(asked.number, Ok(null.as_fd())),
            _ => door.found(asked.number, Err(u32::MAX)),
        }
        // A second answer, and one without a question.
        door.found(asked.number, Ok(world.object(39).as_fd()));
        door.found(u64::MAX - asked.number, Ok(world.object(39).as_fd()));
    }
    for number in 2..=10 {
        world.play(&mut door, number);
        assert!(read(&mut honest, handle, 0, FRAME_BYTES) == pattern(77, FRAME_BYTES));
    }
    let status = world.daemon.status();
    assert_eq!(status.daemon.expelled_session_count, 0);
    assert!(door.alive() && stranger.alive() && honest.alive());

    // A session that is no pool's door was asked nothing: the daemon ends it.
    let raw = Raw::connect(&world.daemon.session_socket());
    let mut packet = head(message::FOUND);
    packet.extend([0; 8]);
    packet.extend(2u32.to_le_bytes());
    packet.extend([0; 4]);
    raw.send(&packet, &[]);
    world.daemon.status_when("put out", |status| {
        status.daemon.expelled_session_count == 1
    });
    assert!(read(&mut honest, handle, 0, FRAME_BYTES) == pattern(77, FRAME_BYTES));
}
