// SPDX-License-Identifier: Apache-2.0
//! A pool whose members lie in shares of the daemon: its mount reads through the daemon's cache,
//! and gets the bytes that it wrote.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, XFS, nameless_open};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const CLIP_BYTES: usize = 12 * MIB + 17;

/// Both members are shares, the first one by a folder above it, the second by a symbolic link.
fn served() -> Option<(PoolWorld, Daemon)> {
    let world = PoolWorld::build(&[(EXT4, 100), (XFS, 300)])?;
    let second = world.scratch.path().join("link");
    std::os::unix::fs::symlink(world.member(1).join("pool"), &second).expect("made");
    let spec = DaemonSpec {
        share: world.member(0),
        cache: String::from("64MiB"),
        write_buffer: None,
        server: String::new(),
        more: format!("[[share]]\nname = \"second\"\npath = {second:?}\n"),
    };
    let daemon = Daemon::start(&world.scratch, &spec);
    wait_for_doors(&daemon);
    Some((world, daemon))
}

fn wait_for_doors(daemon: &Daemon) {
    daemon.wait_for("a session for each member", |status| {
        status["sessions"]
            .as_array()
            .is_some_and(|all| all.iter().filter(|one| one["door"] == "fuse").count() == 2)
    });
}

fn put(world: &PoolWorld, name: &str, seed: u64) {
    let bytes = pattern::bytes(seed, 0, CLIP_BYTES);
    fs::write(world.path(name), bytes).expect("there is room");
}

fn forget() {
    rushes_tests::caches::drop("3");
}

fn check(world: &PoolWorld, name: &str, seed: u64) {
    let found = fs::read(world.path(name)).expect("read");
    assert_eq!(found.len(), CLIP_BYTES, "{name}");
    pattern::check(seed, 0, &found, name);
}

fn served_count(status: &Value) -> u64 {
    let of = |name: &str| status["cache"][name].as_u64().expect("a count");
    of("hit_count") + of("miss_count")
}

#[test]
fn the_mount_reads_by_way_of_the_daemon_and_sees_each_change_at_once() {
    let Some((world, daemon)) = served() else {
        return;
    };
    // One on each member at least.
    for seed in 0..4 {
        put(&world, &format!("clip{seed}.mov"), seed);
    }
    let members: Vec<Vec<u64>> = (0..4)
        .map(|seed| world.members_of(&format!("clip{seed}.mov")))
        .collect();
    let before = served_count(&daemon.status());
    forget();
    for seed in 0..4 {
        check(&world, &format!("clip{seed}.mov"), seed);
    }
    let status = daemon.status();
    assert!(served_count(&status) > before, "{status:#}");

    // The daemon's cache has the old bytes; no read may return them after the write.
    let file = File::options()
        .read(true)
        .write(true)
        .open(world.path("clip0.mov"))
        .expect("opened");
    let new = pattern::bytes(77, 5_000_000, 300_000);
    file.write_all_at(&new, 5_000_000).expect("written");
    forget();
    let mut found = vec![0; new.len()];
    file.read_exact_at(&mut found, 5_000_000).expect("read");
    pattern::check(77, 5_000_000, &found, "what was written over");
    file.read_exact_at(&mut found, 5_300_000).expect("read");
    pattern::check(0, 5_300_000, &found, "what was not");

    // Truncated and made longer: no old byte comes back.
    file.set_len(1_000_001).expect("cut");
    file.set_len(2_000_000).expect("made longer");
    forget();
    let mut found = vec![1; 1_500_000];
    file.read_exact_at(&mut found, 500_000).expect("read");
    pattern::check(0, 500_000, &found[..500_001], "what was left");
    assert!(found[500_001..].iter().all(|byte| *byte == 0), "zeros");
    drop(file);
    assert!(!members.iter().all(Vec::is_empty), "{members:?}");
}

#[test]
fn a_daemon_that_dies_costs_a_reader_no_byte_and_the_next_one_serves_him() {
    let Some((world, mut daemon)) = served() else {
        return;
    };
    for seed in 0..4 {
        put(&world, &format!("clip{seed}.mov"), seed);
    }
    for _ in 0..3 {
        std::thread::scope(|scope| {
            let world = &world;
            let readers: Vec<_> = (0..4)
                .map(|seed| {
                    scope.spawn(move || {
                        for _ in 0..3 {
                            forget();
                            check(world, &format!("clip{seed}.mov"), seed);
                        }
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(30));
            daemon.kill();
            for reader in readers {
                reader.join().expect("nothing was wrong");
            }
        });
        // Written without a daemon; the next daemon reads these bytes.
        put(&world, "clip3.mov", 3);
        daemon.start_again();
        wait_for_doors(&daemon);
    }
    let before = served_count(&daemon.status());
    forget();
    check(&world, "clip3.mov", 3);
    assert!(served_count(&daemon.status()) > before);
}

#[test]
fn what_is_removed_gives_its_room_back_though_the_daemon_had_it_open() {
    let Some((world, daemon)) = served() else {
        return;
    };
    let room = || {
        let found = rustix::fs::statvfs(world.path("")).expect("mounted");
        found.f_bavail * found.f_frsize
    };
    let before = room();
    put(&world, "clip.mov", 1);
    forget();
    check(&world, "clip.mov", 1);
    assert!(served_count(&daemon.status()) > 0);
    assert!(room() + CLIP_BYTES as u64 <= before + MIB as u64);
    fs::remove_file(world.path("clip.mov")).expect("removed");
    let end = Instant::now() + Duration::from_secs(20);
    while room() + 2 * (MIB as u64) < before {
        assert!(Instant::now() < end, "the room does not come back");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_is_cut_off_gives_its_room_back_while_the_file_stays_open() {
    let Some((world, daemon)) = served() else {
        return;
    };
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(world.path("take.mov"))
        .expect("made");
    let free = |world: &PoolWorld| {
        let found = rustix::fs::statvfs(world.path("")).expect("mounted");
        found.f_bavail * found.f_frsize
    };
    let before = free(&world);
    for take in 0..5 {
        let bytes = pattern::bytes(take, 0, CLIP_BYTES);
        file.write_all_at(&bytes, 0).expect("there is room");
        file.sync_all().expect("written");
        forget();
        let served = served_count(&daemon.status());
        let mut found = vec![0; CLIP_BYTES];
        file.read_exact_at(&mut found, 0).expect("read");
        pattern::check(take, 0, &found, "take.mov");
        assert!(served_count(&daemon.status()) > served, "the daemon has it");
        file.set_len(0).expect("cut");
    }
    let end = Instant::now() + Duration::from_secs(20);
    while nameless_open(daemon.pid()) > 0 || free(&world) + 2 * (MIB as u64) < before {
        assert!(
            Instant::now() < end,
            "the daemon has {} removed objects open, {} of {before} bytes are free",
            nameless_open(daemon.pid()),
            free(&world)
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(file);
}

#[test]
fn room_that_is_reserved_behind_the_end_is_no_length_for_the_daemon() {
    let Some((world, daemon)) = served() else {
        return;
    };
    put(&world, "clip.mov", 1);
    let file = File::options()
        .read(true)
        .write(true)
        .open(world.path("clip.mov"))
        .expect("opened");
    let mut found = vec![0; CLIP_BYTES];
    forget();
    file.read_exact_at(&mut found, 0).expect("read");
    assert!(served_count(&daemon.status()) > 0);
    let longer = CLIP_BYTES as u64 + (8 << 20);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, longer)
        .expect("there is room");
    assert_eq!(file.metadata().expect("known").len(), CLIP_BYTES as u64);
    // A hole behind it: the object stays as short as it was, although a process reserves room
    // meanwhile. A daemon that gets a wrong length once finds the true one; if it gets the wrong
    // one again and again, it blames the device.
    file.set_len(longer).expect("made longer");
    let is_read = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reserving = scope.spawn(|| {
            while !is_read.load(Ordering::Acquire) {
                let kept = rustix::fs::FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, kept, 0, longer).expect("there is room");
            }
        });
        let end = Instant::now() + Duration::from_secs(3);
        let mut wrong = None;
        let mut found = vec![1; longer as usize];
        while wrong.is_none() && Instant::now() < end {
            forget();
            wrong = file.read_exact_at(&mut found, 0).err();
        }
        is_read.store(true, Ordering::Release);
        reserving.join().expect("nothing was wrong");
        assert!(wrong.is_none(), "{wrong:?}");
        pattern::check(1, 0, &found[..CLIP_BYTES], "clip.mov");
        assert!(found[CLIP_BYTES..].iter().all(|byte| *byte == 0), "zeros");
    });
}

/// The streams of an open file in `rushes status`: by part, standing, rate in bytes a second, reads
/// and reads that had a due time.
fn parts(status: &Value, path: &str) -> BTreeMap<String, (String, u64, u64, u64)> {
    let streams = status["streams"].as_array().expect("a list");
    let open = |stream: &&Value| stream["open"] == true && stream["path"] == path;
    let told = |stream: &Value| {
        let text = |name: &str| stream[name].as_str().unwrap_or_default().to_owned();
        let count = |name: &str| stream[name].as_u64().unwrap_or_default();
        let counts = (count("rate_bytes_per_s"), count("read_count"));
        let what = (text("standing"), counts.0, counts.1, count("due_count"));
        (text("part"), what)
    };
    streams.iter().filter(open).map(told).collect()
}

#[test]
fn all_parts_of_a_striped_file_are_under_contract_from_their_first_reads() {
    let Some(world) = PoolWorld::build(&[(EXT4, 100), (XFS, 300), (EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let rules = "[[rule]]\nmatch = \"reels/**\"\nbitrate = \"100M\"\n\
                 [[rule]]\nmatch = \"scans/**\"\nframes_per_second = 24\n";
    let daemon = world.served(4, rules);
    for (folder, words) in [
        ("reels", "striped=4 unit=64KiB"),
        ("reels/twice", "striped=2x2 unit=64KiB group_unit=128KiB"),
        ("scans", "striped=4 unit=64KiB"),
    ] {
        fs::create_dir(world.path(folder)).expect("made");
        let none = rustix::fs::XattrFlags::empty();
        let wished = world.path(folder);
        rustix::fs::setxattr(wished, "user.rushes.policy", words.as_bytes(), none).expect("a wish");
    }
    for (seed, name) in [
        (1, "reels/a.mov"),
        (2, "reels/twice/b.mov"),
        (3, "scans/f.0001.dpx"),
    ] {
        put(&world, name, seed);
        assert_eq!(world.members_of(name).len(), 4, "{name}");
        world.sync();
        forget();
        let file = File::open(world.path(name)).expect("opened");
        // One unit per read, in order: the kernel's threads send its read-ahead in any order, and a
        // read out of order belongs to no stream and has no due time.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).expect("advice");
        let mut found = vec![0; 2 * MIB];
        for (unit, part) in found.chunks_mut(64 << 10).enumerate() {
            file.read_exact_at(part, (unit as u64) << 16).expect("read");
        }
        pattern::check(seed, 0, &found, name);
        let status = daemon.status();
        let seen = parts(&status, name);
        let numbers: Vec<&str> = seen.keys().map(String::as_str).collect();
        assert_eq!(numbers, ["1/4", "2/4", "3/4", "4/4"], "{name}: {status:#}");
        for (part, (standing, rate, reads, due)) in seen {
            if name.starts_with("scans/") {
                // A rule in frames gives no rate for a part of a frame.
                assert_eq!(
                    (standing.as_str(), rate, due),
                    ("best_effort", 0, 0),
                    "{part}"
                );
                continue;
            }
            assert_eq!(standing, "contract", "{name}, part {part}: {status:#}");
            assert_eq!(rate, 3_125_000, "{name}, part {part}");
            assert_eq!((reads, due), (8, 8), "{name}, part {part}");
        }
        let streams = status["streams"].as_array().expect("a list");
        assert!(streams.iter().all(|stream| stream["sequence"] == false));
        drop(file);
    }
    let status = daemon.status();
    let streams = status["streams"].as_array().expect("a list");
    for stream in streams {
        let path = stream["path"].as_str().expect("text");
        assert!(!path.contains("objects"), "{path} says nothing to anybody");
    }
}
