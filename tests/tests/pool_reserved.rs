// SPDX-License-Identifier: Apache-2.0
//! What a client has reserved in his file (fallocate) and not written yet stays his wherever the pool moves it: by rebalance, drain, defrag
//! and to wider stripes, mounted or not.

use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, PoolWorld, XFS};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

const MIB: usize = 1 << 20;
/// Of a file, of which two MiB are written.
const LENGTH: usize = 24 * MIB;
const WRITTEN_AT: [usize; 2] = [0, 15 * MIB + 4096];

fn reserve(world: &PoolWorld, name: &str) {
    let file = File::create(world.path(name)).expect("made");
    fallocate(&file, FallocateFlags::empty(), 0, LENGTH as u64).expect("room");
    for at in WRITTEN_AT {
        file.write_all_at(&pattern::bytes(7, at as u64, MIB), at as u64)
            .expect("room");
    }
    file.sync_all().expect("written");
    drop(file);
    holds(world, name, "made");
}

/// Blocks for all of it, on whichever members, and its bytes.
fn holds(world: &PoolWorld, name: &str, context: &str) {
    rustix::fs::sync();
    let report = world.where_is(name);
    let mut objects: Vec<PathBuf> = Vec::new();
    for segment in report["segments"].as_array().expect("a list") {
        for object in segment["objects"].as_array().expect("a list") {
            objects.push(object["path"].as_str().expect("text").into());
        }
    }
    objects.sort();
    objects.dedup();
    let blocks = |path: &PathBuf| fs::metadata(path).expect("our own disk").blocks() * 512;
    let held: u64 = objects.iter().map(blocks).sum();
    // (XFS keeps some more behind the end for a while.)
    assert!(
        (LENGTH as u64..LENGTH as u64 + (8 << 20)).contains(&held),
        "{context}: {held} bytes are reserved: {report}"
    );
    let bytes = fs::read(world.path(name)).expect("read");
    assert_eq!(bytes.len(), LENGTH, "{context}");
    let mut expected = vec![0; LENGTH];
    for at in WRITTEN_AT {
        expected[at..at + MIB].copy_from_slice(&pattern::bytes(7, at as u64, MIB));
    }
    assert!(bytes == expected, "{context}: other bytes");
}

/// A file beside the pool that leaves so much room on a member.
fn occupy(world: &PoolWorld, member: u64, free: usize) -> PathBuf {
    let path = world.member(member as usize).join("others");
    let found = rustix::fs::statvfs(world.member(member as usize)).expect("mounted");
    let length = (found.f_bavail * found.f_frsize) as usize - free;
    let file = File::create(&path).expect("made");
    fallocate(&file, FallocateFlags::empty(), 0, length as u64).expect("room");
    path
}

fn done(world: &PoolWorld, words: &[&str]) -> Value {
    let (report, code) = world.json(words, &[]);
    assert_eq!(code, Some(0), "{words:?}: {report}");
    report
}

fn home(world: &PoolWorld, name: &str) -> u64 {
    let members = world.members_of(name);
    assert_eq!(members.len(), 1, "{members:?}");
    members[0]
}

#[test]
fn what_a_client_reserved_stays_his_where_his_file_goes() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 300), (XFS, 320), (BTRFS, 300)]) else {
        return;
    };
    reserve(&world, "f");
    for is_mounted in [true, false] {
        for words in [["rebalance", ""], ["drain", ""]] {
            let context = format!("{} mounted: {is_mounted}", words[0]);
            let was = home(&world, "f");
            let others = (words[0] == "rebalance").then(|| occupy(&world, was, 40 * MIB));
            if !is_mounted {
                world.end();
            }
            match &others {
                Some(_) => drop(done(&world, &["rebalance"])),
                None => {
                    done(&world, &["drain", &was.to_string()]);
                    done(&world, &["drain", &was.to_string(), "--cancel"]);
                }
            }
            if !is_mounted {
                world.start();
            }
            assert_ne!(home(&world, "f"), was, "{context}");
            holds(&world, "f", &context);
            others.map(fs::remove_file);
        }
    }
}

#[test]
fn what_a_client_reserved_in_several_places_comes_together_with_his_bytes() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    for (name, is_mounted) in [("f", true), ("g", false)] {
        let others = [0, 1].map(|member| occupy(&world, member, 16 * MIB));
        reserve(&world, name);
        for path in others {
            fs::remove_file(path).expect("ours");
        }
        assert_eq!(world.members_of(name).len(), 2);
        if !is_mounted {
            world.end();
        }
        done(&world, &["defrag"]);
        if !is_mounted {
            world.start();
        }
        home(&world, name);
        holds(&world, name, name);
    }
}

#[test]
fn what_a_client_reserved_of_a_stripe_is_reserved_in_the_wider_one() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100); 4]) else {
        return;
    };
    fs::create_dir(world.path("reels")).expect("made");
    let words = b"striped=3x2 unit=64KiB group_unit=128KiB";
    setxattr(
        world.path("reels"),
        "user.rushes.policy",
        words,
        XattrFlags::empty(),
    )
    .expect("a wish");
    reserve(&world, "reels/f");
    reserve(&world, "reels/g");
    let third = ["fifth", "sixth"].map(|name| world.disk(name, (EXT4, 100)));
    let (report, code) = world.json(&["add"], &third);
    assert_eq!(code, Some(0), "{report}");
    done(&world, &["rebalance"]);
    holds(&world, "reels/f", "wider");
    world.end();
    // A whole object of a stripe goes, too.
    done(&world, &["drain", "0"]);
    let (report, _) = world.json(&["fsck"], &[]);
    assert_eq!(report["findings"], json!([]), "{report}");
    world.start();
    for name in ["reels/f", "reels/g"] {
        let segments = &world.where_is(name)["segments"];
        assert_eq!(segments.as_array().map(Vec::len), Some(1), "{segments}");
        let objects = segments[0]["objects"].as_array().map(Vec::len);
        assert_eq!(objects, Some(6), "{segments}");
        holds(&world, name, name);
    }
}
