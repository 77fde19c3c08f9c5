// SPDX-License-Identifier: Apache-2.0
//! Members that are missing when their pool is mounted, or have a member of another pool at their
//! place; and files that are just larger than a member.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::disk::run;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const AT_ONCE: Duration = Duration::from_secs(1);

/// Makes files. Returns  the name of one on each of two members
fn two_files(world: &PoolWorld) -> [String; 2] {
    let mut found: [Option<String>; 2] = [None, None];
    for number in 0..8 {
        let name = format!("clip{number}.mov");
        put(&world.path(&name), number, 4 * MIB + 5).expect("there is room");
        let member = world.members_of(&name)[0] as usize;
        found[member].get_or_insert(name);
    }
    found.map(|name| name.expect("members of one size take turns"))
}

fn seed_of(name: &str) -> u64 {
    let digits = name.chars().filter(char::is_ascii_digit);
    digits.collect::<String>().parse().expect("a number")
}

/// Files of member 0 and listings are as ever; data of member 1 gives an error within [`AT_ONCE`].
fn only_the_other_is_there(world: &PoolWorld, [here, away]: &[String; 2]) {
    assert_eq!(fs::read_dir(world.path("")).expect("listed").count(), 8);
    check(&world.path(here), seed_of(here), 4 * MIB + 5);
    rushes_tests::caches::drop("3");
    let begun = Instant::now();
    let found = fs::metadata(world.path(away)).expect("its name is the catalogue's");
    assert_eq!(found.len(), 4 * MIB as u64 + 5);
    let error = fs::read(world.path(away)).expect_err("it is away");
    assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
    // Within its length: behind the end, a write would continue on another member.
    let file = File::options().write(true).open(world.path(away));
    let error = file.and_then(|file| file.write_all_at(b"x", 5));
    let error = error.expect_err("it is away");
    assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    let new = world.path("new.mov");
    put(&new, 99, MIB).expect("the other one takes it");
    assert_eq!(world.members_of("new.mov"), [0]);
    fs::remove_file(new).expect("removed");
}

#[test]
fn a_mount_that_starts_without_a_member_serves_the_others_and_that_one_when_it_comes() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200), (EXT4, 200)]) else {
        return;
    };
    let files = two_files(&world);
    world.end();
    world.unplug(1);
    world.start();
    only_the_other_is_there(&world, &files);
    let below = fs::read_dir(world.member(1)).expect("a folder").count();
    assert_eq!(below, 0, "nothing is written below the place of a mount");
    world.plug(1, "loop");
    for name in &files {
        check(&world.path(name), seed_of(name), 4 * MIB + 5);
    }
    let file = File::options().write(true).open(world.path(&files[1]));
    file.and_then(|file| file.write_all_at(b"x", 5))
        .expect("it is there");
    let new: Vec<Vec<u64>> = (0..4)
        .map(|number| {
            let name = format!("later{number}.mov");
            put(&world.path(&name), number, MIB).expect("there is room");
            world.members_of(&name)
        })
        .collect();
    assert!(new.contains(&vec![1]), "it takes new files: {new:?}");
    world.end();
}

#[test]
fn a_member_of_another_pool_at_the_place_of_a_member_is_refused_and_left_as_it_is() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200), (EXT4, 200)]) else {
        return;
    };
    let Some(other) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    let files = two_files(&world);
    put(&other.path("theirs.mov"), 77, MIB).expect("there is room");
    // The other pool's member is mounted at the place of ours; the other pool is not mounted.
    let image = other.scratch.path().join("m0.img");
    let mut other = other;
    other.end();
    other.unplug(0);
    let listed = |world: &PoolWorld| {
        let output = Command::new("find")
            .arg(world.member(1).join("pool"))
            .args(["-printf", "%P %s %T@\n"])
            .output()
            .expect("find is there");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines: Vec<String> = text.lines().map(String::from).collect();
        lines.sort();
        lines
    };
    for is_mounted_meanwhile in [false, true] {
        if !is_mounted_meanwhile {
            world.end();
        }
        world.unplug(1);
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(world.member(1)));
        let before = listed(&world);
        assert!(before.len() > 256, "theirs has objects: {}", before.len());
        if !is_mounted_meanwhile {
            world.start();
        }
        only_the_other_is_there(&world, &files);
        let (report, code) = world.json(&["ls"], &[]);
        assert_eq!(code, Some(1));
        let member = &report[0]["members"][1];
        assert_eq!(member["state"], "missing", "{report}");
        let why = member["reason"].as_str().expect("text");
        assert!(why.contains("belongs to another pool"), "{why}");
        let log = world.log();
        assert!(log.contains("belongs to another pool"), "{log}");
        // Within this time the pool would begin a log of names there.
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(listed(&world), before, "nothing of theirs is changed");
        world.unplug(1);
        world.plug(1, "loop");
        for name in &files {
            check(&world.path(name), seed_of(name), 4 * MIB + 5);
        }
    }
    world.end();
}

#[test]
fn a_file_of_a_member_s_size_and_one_byte_fits() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    let room = |number: usize| {
        let found = rustix::fs::statvfs(world.member(number)).expect("mounted");
        found.f_bavail * found.f_frsize
    };
    // One byte more than the room of the larger member, less than that of both together.
    let capacity = room(0).max(room(1));
    assert!(room(0) + room(1) > capacity + (1 << 20));
    let length = capacity + 1;
    let mut file = File::create(world.path("long.mov")).expect("made");
    let mut at = 0;
    while at < length {
        let count = (MIB as u64).min(length - at) as usize;
        file.write_all(&pattern::bytes(5, at, count)).expect("room");
        at += count as u64;
    }
    file.sync_all().expect("synced");
    drop(file);
    assert_eq!(world.members_of("long.mov"), [0, 1]);
    world.kill();
    world.start();
    check(&world.path("long.mov"), 5, length as usize);
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
}
