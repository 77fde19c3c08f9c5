// SPDX-License-Identifier: Apache-2.0
//! A member whose disk is dead is given up with its bytes, while the pool is in use and while it is
//! not.

use rushes_kit::mounts::sync_below;
use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{EXT4, PoolWorld, XFS, check, killed_at, put};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const LENGTH: usize = MIB + 17;
const EIO: Option<i32> = Some(5);

/// Makes files until each member has `each` of them. Returns  their names by member
fn filled(world: &PoolWorld, each: usize, member_count: u64) -> Vec<Vec<String>> {
    let mut on: Vec<Vec<String>> = vec![Vec::new(); member_count as usize];
    for seed in 0..64 {
        if on.iter().all(|names| names.len() >= each) {
            return on;
        }
        let name = format!("f{seed}");
        put(&world.path(&name), seed, LENGTH).expect("there is room");
        on[world.members_of(&name)[0] as usize].push(name);
    }
    panic!("members are not filled alike: {on:?}");
}

fn seed_of(name: &str) -> u64 {
    name[1..].parse().expect("a number")
}

/// The kind of each finding, and the file that it names.
fn named(report: &Value) -> Vec<(String, String)> {
    let all = report["findings"].as_array().expect("a list").iter();
    let mut named: Vec<(String, String)> = all
        .map(|one| {
            let word = |name: &str| one[name].as_str().unwrap_or_default().to_owned();
            (word("kind"), word("file"))
        })
        .collect();
    named.sort();
    named
}

fn refused(world: &PoolWorld, words: &[&str], because: &str) {
    let output = world.command(words, &[]).output().expect("rushes starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(because), "{said}");
}

fn removed_count(world: &PoolWorld) -> usize {
    let folder = fs::read_dir(world.catalogue().join("removed"));
    folder.expect("listed").count()
}

#[test]
fn a_dead_disk_is_given_up_while_files_are_in_use_and_all_else_of_them_is_kept() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let on = filled(&world, 4, 3);
    // A file over all three members: one of them goes.
    fs::create_dir(world.path("wide")).expect("made");
    let policy = Command::new(needs::path_of("rushes"))
        .args(["pool", "policy"])
        .arg(world.path("wide"))
        .args(["--set", "striped=3"])
        .status();
    assert!(policy.expect("rushes starts").success());
    put(&world.path("wide/s"), 100, 4 * MIB).expect("there is room");
    assert_eq!(world.members_of("wide/s"), [0, 1, 2]);
    let [whole, part, gone, open] = &on[1][..4] else {
        panic!("{on:?}");
    };

    // Read them all; the mount's process does not see these reads.
    for name in &on[1] {
        check(&world.path(name), seed_of(name), LENGTH);
    }
    // A member that is there is not given up.
    refused(&world, &["remove", "--lost", "1"], "is there");
    refused(&world, &["remove", "--lost", "--yes", "1"], "is there");
    world.unplug(1);
    // The file continues on another member.
    let opened = OpenOptions::new().append(true).open(world.path(part));
    let mut file = opened.expect("opened");
    file.write_all(&[7; MIB]).expect("on another member");
    refused(&world, &["remove", "1"], "--lost");
    refused(&world, &["remove", "--lost", "1"], "with --yes");
    let (report, code) = world.json(&["remove", "--lost", "--yes", "1"], &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        (&report["member"], &report["lost"]),
        (&1.into(), &true.into()),
        "{report}"
    );
    let (list, code) = world.json(&["ls"], &[]);
    assert_eq!(code, Some(0), "{list}");
    assert_eq!(list[0]["members"].as_array().map(Vec::len), Some(2));
    // The same once more: the member is gone already.
    assert_eq!(
        world.json(&["remove", "--lost", "--yes", "1"], &[]).1,
        Some(0)
    );

    // Other files are as ever, and the names of all are there.
    for name in on[0].iter().chain(&on[2]) {
        check(&world.path(name), seed_of(name), LENGTH);
    }
    let listed = fs::read_dir(world.path("")).expect("listed");
    let count: usize = on.iter().map(Vec::len).sum();
    assert_eq!(listed.count(), count + 1);
    for name in &on[1] {
        let error = fs::read(world.path(name)).expect_err("it is lost");
        assert_eq!(error.raw_os_error(), EIO, "{name}: {error}");
        let state = &world.where_is(name)["segments"][0]["objects"][0]["state"];
        assert_eq!(state, "lost", "{name}");
    }
    let error = fs::read(world.path("wide/s")).expect_err("a unit of it is lost");
    assert_eq!(error.raw_os_error(), EIO);
    // The appended bytes are there, more can be appended, and a sync makes them durable.
    file.write_all(&[8; MIB]).expect("its last member is there");
    file.sync_all().expect("what is there is durable");
    let tail = fs::File::open(world.path(part)).expect("opened");
    // The kernel reads whole pages, and the page at the border has lost bytes, too.
    let first = LENGTH.next_multiple_of(4096);
    let mut bytes = vec![0; LENGTH + 2 * MIB - first];
    tail.read_exact_at(&mut bytes, first as u64).expect("read");
    let sevens = LENGTH + MIB - first;
    assert!(bytes[..sevens].iter().all(|byte| *byte == 7));
    assert!(bytes[sevens..].iter().all(|byte| *byte == 8));
    drop((file, tail));
    // A file that is truncated within its lost bytes and made longer gives errors, not zeroes
    // where bytes were.
    let cut = OpenOptions::new().write(true).open(world.path(gone));
    let cut = cut.expect("opened");
    cut.set_len(LENGTH as u64 / 2).expect("cut");
    cut.set_len(LENGTH as u64).expect("longer");
    drop(cut);
    let error = fs::read(world.path(gone)).expect_err("it is lost");
    assert_eq!(error.raw_os_error(), EIO, "{error}");
    // A file that is written anew from a backup is whole again.
    put(&world.path(whole), 200, LENGTH).expect("written anew");
    check(&world.path(whole), 200, LENGTH);
    // A removed file that a program has open goes with its last close; the folder of removed files
    // is empty then.
    let mut held = fs::File::open(world.path(open)).expect("opened");
    for name in [gone, open] {
        fs::remove_file(world.path(name)).expect("removed");
    }
    held.read_exact(&mut [0]).expect_err("it is lost");
    drop(held);
    let new = world.disk("new", (EXT4, 100));
    let (added, code) = world.json(&["add"], &[new]);
    assert_eq!(
        (&added["numbers"][0], code),
        (&3.into(), Some(0)),
        "{added}"
    );
    world.end();
    assert_eq!(removed_count(&world), 0);

    // fsck finds each file that is not whole, and nothing else.
    let mut expected: Vec<(String, String)> = on[1][4..]
        .iter()
        .chain([part])
        .map(|name| (String::from("member_lost"), name.clone()))
        .collect();
    expected.push((String::from("member_lost"), String::from("wide/s")));
    expected.sort();
    for words in [&["fsck"][..], &["fsck", "--repair"]] {
        let (report, code) = world.json(words, &[]);
        assert_eq!(named(&report), expected, "{report}");
        assert_eq!(code, Some(1), "{report}");
    }
    // The disk comes back: it is no member any more, and nothing writes to it.
    world.plug(1, "loop");
    let old = world.member(1).join("pool");
    let output = world.command(&["add"], &[old]).output().expect("starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("when it was given up"), "{said}");
    world.start();
    for (_, name) in &expected {
        fs::remove_file(world.path(name)).expect("removed");
    }
    for name in on[0].iter().chain(&on[2]) {
        check(&world.path(name), seed_of(name), LENGTH);
    }
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(removed_count(&world), 0);
}

#[test]
fn who_has_files_open_writes_no_more_to_a_disk_that_is_given_up() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let on = filled(&world, 3, 2);
    let [read, written, _] = &on[1][..3] else {
        panic!("{on:?}");
    };
    let reader = fs::File::open(world.path(read)).expect("opened");
    reader.read_exact_at(&mut [0; 1], 0).expect("read");
    let writer = OpenOptions::new().write(true).open(world.path(written));
    let writer = writer.expect("opened");
    writer.write_all_at(&[1; 4096], 0).expect("it is there");
    // A lazy unmount, as for a disk that does not come back: programs keep their open files.
    let mut lazily = Command::new("umount");
    let lazily = lazily.arg("-l").arg(world.member(1)).status();
    assert!(lazily.expect("it starts").success());
    writer.write_all_at(&[2; 4096], 0).expect("on its disk");
    let (report, code) = world.json(&["remove", "--lost", "--yes", "1"], &[]);
    assert_eq!(code, Some(0), "{report}");
    // A write to bytes on that disk is refused; one behind the end goes to another member.
    let error = writer.write_all_at(&[3; 4096], 0).expect_err("it is lost");
    assert_eq!(error.raw_os_error(), EIO, "{error}");
    let end = LENGTH.next_multiple_of(4096) as u64;
    writer.write_all_at(&[4; 4096], end).expect("on the other");
    // The disk took bytes along that were not synced: one sync returns an error, the next one makes
    // the rest durable.
    let error = writer.sync_all().expect_err("it is lost");
    assert_eq!(error.raw_os_error(), EIO, "{error}");
    writer.sync_all().expect("what is there is durable");
    assert_eq!(world.members_of(written), [0, 1]);
    // Write a file anew while a program has it open, whose mappings lead to the old disk: no
    // program can open it to read until that one has closed it.
    put(&world.path(read), 7, LENGTH).expect("written anew");
    let error = fs::File::open(world.path(read)).expect_err("it is open");
    assert_eq!(error.raw_os_error(), EIO, "{error}");
    put(&world.path(written), 8, LENGTH).expect("written anew");
    drop((reader, writer));
    // The kernel tells the mount of a close some time later.
    let end = Instant::now() + Duration::from_secs(10);
    while fs::File::open(world.path(read)).is_err() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    check(&world.path(read), 7, LENGTH);
    check(&world.path(written), 8, LENGTH);
    world.end();
}

#[test]
fn giving_up_may_be_killed_at_every_step_and_is_done_whole_or_not_at_all() {
    if !needs::all_there(&[Need::Program("strace")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let on = filled(&world, 2, 3);
    world.end();
    world.unplug(1);
    let format = world.catalogue().join("rushes-pool");
    let before = fs::read(&format).expect("it is there");
    for (call, least) in [
        ("openat", 20),
        ("write", 2),
        ("fsync", 1),
        ("renameat", 1),
        ("unlinkat", 0),
    ] {
        // Kills before the member was given up.
        let mut kill_count = 0;
        for count in 1..60 {
            let remove = world.command(&["remove", "--lost", "--yes", "1"], &[]);
            let is_killed = killed_at(&remove, call, count);
            let (list, _) = world.json(&["ls"], &[]);
            if list[0]["members"].as_array().map(Vec::len) == Some(2) {
                // Undo it, so that the next command begins anew.
                fs::write(&format, &before).expect("written");
            } else {
                assert!(is_killed, "{call} {count}");
                kill_count += 1;
            }
            if !is_killed {
                break;
            }
            // The pool is as it was: with the disk mounted again it is whole.
            world.plug(1, "loop");
            let (report, code) = world.json(&["fsck"], &[]);
            assert_eq!(code, Some(0), "{call} {count}: {report}");
            world.unplug(1);
        }
        assert!(kill_count >= least, "{call}: {kill_count} kills");
    }
    let (report, code) = world.json(&["remove", "--lost", "--yes", "1"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(named(&report).len(), on[1].len(), "{report}");
    // The members that are left have the names.
    world.lose_catalogue();
    let left: Vec<_> = [0, 2].map(|at| world.member(at).join("pool")).into();
    world.plug(1, "loop");
    let all: Vec<_> = (0..3).map(|at| world.member(at).join("pool")).collect();
    let output = world.command(&["rescue"], &all).output().expect("starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("leave this folder out"), "{said}");
    let (report, _) = world.json(&["rescue"], &left);
    assert!(report["log_serial"].is_u64(), "{report}");
    world.start();
    for name in on[0].iter().chain(&on[2]) {
        check(&world.path(name), seed_of(name), LENGTH);
    }
    for name in &on[1] {
        let size = fs::metadata(world.path(name))
            .expect("its name is there")
            .len();
        assert_eq!(size, LENGTH as u64);
        fs::read(world.path(name)).expect_err("it is lost");
    }
    world.end();
}

#[test]
fn a_file_that_was_removed_while_its_member_was_away_gives_its_room_when_that_is_back() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let on = filled(&world, 1, 2);
    let removed = &on[1][0];
    let before = world.used(1);
    world.unplug(1);
    fs::remove_file(world.path(removed)).expect("its name is in the catalogue");
    let end = Instant::now() + Duration::from_secs(30);
    let says = |sentence: &str| world.log().contains(sentence);
    while !says("a deleted file keeps its space for now") {
        assert!(Instant::now() < end, "nobody buries it");
        std::thread::sleep(Duration::from_millis(20));
    }
    world.plug(1, "rw");
    // This needs no further removal.
    let end = Instant::now() + Duration::from_secs(30);
    while world.used(1) + LENGTH as u64 / 2 > before {
        assert!(Instant::now() < end, "its room stays taken");
        std::thread::sleep(Duration::from_millis(50));
    }
    world.end();
}

/// Fills a member: no byte, no block and no inode is left for any file.
fn leave_no_room(world: &PoolWorld, member: usize) {
    let folder = world.member(member).join("others");
    fs::create_dir(&folder).expect("room");
    let mut big = fs::File::create(folder.join("big")).expect("room");
    // A sync frees blocks that the file system kept aside.
    for _ in 0..3 {
        let mut piece = &vec![1; MIB][..];
        while !piece.is_empty() {
            match big.write(piece) {
                Ok(0) | Err(_) => piece = &piece[..piece.len() / 2],
                Ok(_) => {}
            }
        }
        sync_below(&folder).expect("synced");
    }
    let path = |number: usize| folder.join(format!("small{number}"));
    let full = (0..).find(|number| fs::write(path(*number), "1").is_err());
    // Inodes may be left without blocks, or blocks too few for inodes: make empty files, too.
    let next = full.expect("a number") + 1;
    let none = (next..).find(|number| fs::File::create(path(*number)).is_err());
    none.expect("a number");
    sync_below(&folder).expect("synced");
}

fn make_room(world: &PoolWorld, member: usize) {
    fs::remove_dir_all(world.member(member).join("others")).expect("ours");
}

/// Members that are full refuse the old catalogue as well when it comes back.
#[test]
fn a_rescue_takes_over_members_that_have_no_room_for_a_file() {
    let made = [(EXT4, 100), (XFS, 320), (EXT4, 100)];
    for (member_count, context) in [(3, "one has room"), (2, "none has room")] {
        let Some(mut world) = PoolWorld::build(&made[..member_count]) else {
            return;
        };
        // No file may go to XFS: when it is full, it gives up room behind the end of files.
        leave_no_room(&world, 1);
        put(&world.path("f"), 1, LENGTH).expect("there is room");
        world.end();
        let old = world.disk("old", (EXT4, 64));
        let copied = Command::new("cp")
            .args(["-a", "--no-target-directory"])
            .args([&world.catalogue(), &old])
            .status();
        assert!(copied.expect("it starts").success());
        leave_no_room(&world, 0);
        world.lose_catalogue();
        let members: Vec<_> = (0..member_count)
            .map(|at| world.member(at).join("pool"))
            .collect();
        let (report, code) = world.json(&["rescue"], &members);
        // If no member has a copy of the names, a finding says so.
        let (expected, expected_code) = match member_count {
            3 => (vec![], 0),
            _ => (vec![(String::from("log_of_names"), String::new())], 1),
        };
        assert_eq!(named(&report["fsck"]), expected, "{context}: {report}");
        assert_eq!(code, Some(expected_code), "{context}: {report}");
        if let Some(finding) = report["fsck"]["findings"].get(0) {
            let said = finding["sentence"].as_str().expect("text");
            assert!(said.contains("names could not be written"), "{said}");
        }
        // Each full member alone refuses the old catalogue.
        for full in 0..2 {
            let others = (0..member_count).filter(|other| *other != full);
            others.clone().for_each(|other| world.unplug(other));
            let output = Command::new(needs::path_of("rushes"))
                .args(["pool", "fsck"])
                .arg(&old)
                .output()
                .expect("rushes starts");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{context}: {said}");
            assert!(said.contains("belongs to a later catalogue"), "{said}");
            others.for_each(|other| world.plug(other, "loop"));
            let left = world.member(full).join("pool/rushes-pool.tmp");
            assert!(!left.exists(), "{context}: half a file is left");
        }
        world.start();
        check(&world.path("f"), 1, LENGTH);
        world.end();
        for member in 0..2 {
            make_room(&world, member);
        }
        world.start();
        put(&world.path("g"), 2, LENGTH).expect("there is room");
        world.end();
        let (report, code) = world.json(&["fsck"], &[]);
        assert_eq!(code, Some(0), "{context}: {report}");
        assert_eq!(named(&report), [], "{context}: {report}");
    }
}
