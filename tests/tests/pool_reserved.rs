// SPDX-License-Identifier: Apache-2.0
//! Room that a client has reserved in its file with fallocate, and not written yet, stays its own
//! wherever the pool moves it: by rebalance, drain, defrag and to wider stripes, mounted or not.

use rushes_tests::daemon::Daemon;
use rushes_tests::disk::forget;
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Length of a file, of which two MiB are written.
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

/// The file has blocks for its whole length, on any members, and its bytes.
fn holds(world: &PoolWorld, name: &str, context: &str) {
    world.sync();
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
    // XFS keeps some more behind the end for a while.
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

/// Makes a file beside the pool that leaves `free` bytes on a member.
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
    // A drain moves a whole object of a stripe, too.
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

/// Free room for users other than root on all members together. Units: bytes.
fn room(world: &PoolWorld, members: usize) -> u64 {
    let of = |number: usize| {
        let found = rustix::fs::statvfs(world.member(number)).expect("mounted");
        found.f_bavail * found.f_frsize
    };
    (0..members).map(of).sum()
}

const MIB_U64: u64 = MIB as u64;

#[test]
fn what_is_reserved_behind_the_end_goes_when_the_file_is_cut_there() {
    what_is_behind_the_end_goes(&[(EXT4, 100), (XFS, 320)], None);
}

#[test]
fn what_is_reserved_behind_the_end_of_a_stripe_goes_as_well() {
    what_is_behind_the_end_goes(&[(EXT4, 150); 3], Some("striped=3 unit=64KiB"));
}

fn what_is_behind_the_end_goes(members: &[Made], wish: Option<&str>) {
    let Some(world) = PoolWorld::build(members) else {
        return;
    };
    if let Some(words) = wish {
        let flags = XattrFlags::empty();
        setxattr(
            world.path(""),
            "user.rushes.policy",
            words.as_bytes(),
            flags,
        )
        .expect("a wish");
    }
    let free = || {
        world.sync();
        room(&world, members.len())
    };
    let before = free();
    let gave_back = |context: &str| {
        let now = free();
        assert!(
            now + 2 * MIB_U64 > before,
            "{context}: {before} bytes were free, {now} are"
        );
    };
    // More than the room of one member; the file has no byte.
    let empty = File::create(world.path("empty")).expect("made");
    let keep_size = FallocateFlags::KEEP_SIZE;
    fallocate(&empty, keep_size, 0, 280 * MIB_U64).expect("room");
    assert!(free() + 270 * MIB_U64 < before, "it is taken");
    rustix::fs::ftruncate(&empty, 0).expect("cut");
    gave_back("to its own length of 0");

    // Truncated to its own length, and to a smaller one, it keeps its bytes and the reservation
    // within that.
    let file = File::create(world.path("file")).expect("made");
    file.write_all_at(&pattern::bytes(9, 0, MIB), 0)
        .expect("room");
    fallocate(&file, FallocateFlags::empty(), 0, 8 * MIB_U64).expect("room");
    for (length, context) in [(8, "to its own length"), (4, "to a smaller one")] {
        fallocate(&file, keep_size, 0, 60 * MIB_U64).expect("room");
        rustix::fs::ftruncate(&file, length * MIB_U64).expect("cut");
        let now = free();
        let taken = before - now;
        // A member's own structures take and give back some, too; the file's first MiB alone is
        // far from both lengths.
        assert!(
            ((length - 1) * MIB_U64..(length + 2) * MIB_U64).contains(&taken),
            "{context}: {taken} bytes are taken"
        );
        let mut expected = pattern::bytes(9, 0, MIB);
        expected.resize(length as usize * MIB, 0);
        let bytes = fs::read(world.path("file")).expect("read");
        assert!(bytes == expected, "{context}: other bytes");
    }
}

#[test]
fn a_reservation_that_does_not_fit_takes_no_room_from_anybody() {
    what_does_not_fit_takes_no_room(false);
}

#[test]
fn a_reservation_that_does_not_fit_takes_no_room_beside_a_daemon_either() {
    what_does_not_fit_takes_no_room(true);
}

/// Waits until the daemon has given back room that it reserved for writes and did not need.
fn is_settled(world: &PoolWorld, members: usize) {
    let now = || {
        world.sync();
        room(world, members)
    };
    let end = Instant::now() + Duration::from_secs(30);
    let (mut before, mut same_count) = (now(), 0);
    while same_count < 10 {
        assert!(Instant::now() < end, "it goes on changing");
        std::thread::sleep(Duration::from_millis(200));
        let next = now();
        same_count = if next == before { same_count + 1 } else { 0 };
        before = next;
    }
}

fn what_does_not_fit_takes_no_room(is_served: bool) {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let _daemon = is_served.then(|| world.served(2, ""));
    let path = world.path("file");
    let mut file = File::create(&path).expect("made");
    file.write_all_at(&pattern::bytes(5, 0, MIB), 0)
        .expect("room");
    if is_served {
        drop(file);
        is_settled(&world, 2);
        file = File::options().write(true).open(&path).expect("there");
    }
    // An earlier reservation of the client, behind the end.
    let keep_size = FallocateFlags::KEEP_SIZE;
    fallocate(&file, keep_size, 2 * MIB_U64, 4 * MIB_U64).expect("room");
    world.sync();
    let before = room(&world, 2);
    let segments = || world.where_is("file")["segments"].as_array().map(Vec::len);
    let segments_before = segments();
    let unused = |number: usize| {
        let found = rustix::fs::statvfs(world.member(number)).expect("mounted");
        found.f_bfree * found.f_frsize
    };
    // Far too much; and a length that may just fit by the free blocks, of which ext4 keeps some for
    // itself.
    let just = unused(0) + unused(1) + 5 * MIB_U64;
    for (name, length) in [
        ("file", 1 << 30),
        ("file", just),
        ("new", just - 5 * MIB_U64),
    ] {
        let path = world.path(name);
        let open = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let refused = fallocate(open.expect("made"), FallocateFlags::empty(), 0, length);
        assert_eq!(refused, Err(rustix::io::Errno::NOSPC), "{name} {length}");
        world.sync();
        let now = room(&world, 2);
        assert!(
            now + MIB_U64 > before,
            "{name} {length}: {before} bytes were free, {now} are"
        );
        assert!(
            now < before + MIB_U64,
            "{name} {length}: the block of that file is gone"
        );
    }
    assert_eq!(segments(), segments_before);
    assert_eq!(world.where_is("new")["segments"], json!([]));
    let bytes = fs::read(world.path("file")).expect("read");
    assert!(bytes == pattern::bytes(5, 0, MIB), "other bytes");
}

#[test]
fn who_removes_a_file_finds_its_room_at_once() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    drop(world.fill("first", 3, 1 << 30));
    for turn in 0..3u64 {
        // Another file takes all of the removed file's room.
        fs::remove_file(world.path(if turn == 0 { "first" } else { "next" })).expect("removed");
        let file = File::create(world.path("next")).expect("made");
        for at in 0..90 {
            let piece = pattern::bytes(turn, at * MIB_U64, MIB);
            file.write_all_at(&piece, at * MIB_U64)
                .unwrap_or_else(|error| panic!("{error} at {at} MiB in turn {turn}"));
        }
        let left = 200 * MIB_U64;
        let error = fallocate(&file, FallocateFlags::empty(), 0, left).expect_err("too much");
        assert_eq!(error, rustix::io::Errno::NOSPC);
        drop(world.fill("rest", 4, 1 << 30));
        fs::remove_file(world.path("rest")).expect("removed");
        fs::write(world.path("small"), pattern::bytes(1, 0, 8 * MIB)).expect("room");
        fs::remove_file(world.path("small")).expect("removed");
        drop(world.fill("rest", 4, 1 << 30));
        fs::remove_file(world.path("rest")).expect("removed");
    }
}

/// Writes bytes in pieces of one MiB; none gets an error.
fn write_all(file: &File, seed: u64, length: u64, context: &str) {
    for at in (0..length).step_by(MIB) {
        let piece = pattern::bytes(seed, at, MIB);
        file.write_all_at(&piece, at)
            .unwrap_or_else(|error| panic!("{context}: {error} at byte {at}"));
    }
}

/// Fills members until they have no room for `length` bytes, and the daemon keeps none for later
/// writes.
fn fill_up(world: &PoolWorld, members: usize, length: u64) {
    for number in 0..5 {
        drop(world.fill(&format!("rest{number}"), 4, 1 << 30));
        is_settled(world, members);
        if room(world, members) < length {
            return;
        }
    }
    panic!("{} bytes are still free", room(world, members));
}

/// Whether the daemon has every object of a file open.
fn is_open_in(daemon: &Daemon, world: &PoolWorld, name: &str) -> bool {
    let all = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("it runs");
    let links = all.flatten().map(|entry| fs::read_link(entry.path()));
    let open: Vec<PathBuf> = links.flatten().collect();
    let report = world.where_is(name);
    let mut segments = report["segments"].as_array().expect("a list").iter();
    segments.all(|segment| open.contains(&world.object_of(segment)))
}

/// The room of an object comes back when the last process closes it: the daemon has those open that
/// clients have just read or written.
#[test]
fn the_next_write_finds_the_room_of_a_file_that_the_daemon_has_open() {
    const REMOVED: u64 = 24 * MIB_U64;
    const NEXT: u64 = 16 * MIB_U64;
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let daemon = world.served(2, "");
    let path = world.path("removed.mov");
    let put = |length: u64| {
        let file = File::create(&path).expect("made");
        write_all(&file, 1, length, "the file to be removed");
        file.sync_all().expect("written");
    };
    // A file in more pieces needs some more blocks.
    put(REMOVED + 4 * MIB_U64);
    fill_up(&world, 2, NEXT / 2);
    for use_of_it in ["read", "written"] {
        if use_of_it == "read" {
            forget(&path);
            let found = fs::read(&path).expect("read");
            assert!(found.len() as u64 >= REMOVED);
        } else {
            let file = File::options().write(true).open(&path).expect("there");
            write_all(&file, 2, REMOVED, "over its own bytes");
        }
        assert!(is_open_in(&daemon, &world, "removed.mov"), "{use_of_it}");
        fs::remove_file(&path).expect("removed");
        let next = File::create(world.path("next.mov")).expect("made");
        let context = format!("{use_of_it} before");
        write_all(&next, 3, NEXT, &context);
        next.sync_all().expect("it has its room");
        drop(next);
        let found = fs::read(world.path("next.mov")).expect("read");
        assert_eq!(found.len() as u64, NEXT, "{context}");
        pattern::check(3, 0, &found, &context);
        fs::remove_file(world.path("next.mov")).expect("removed");
        put(REMOVED);
        assert!(room(&world, 2) < NEXT / 2, "{context}: others have room");
    }
}

/// Linux reports reserved room as data once a program has read it. Its zeroes are no bytes of a
/// file: fsck does not take them for a forgotten copy, nor a rescue for the file's bytes. Found by
/// torture, seed 5000, round 8.
#[test]
fn room_from_which_somebody_has_read_has_no_bytes() {
    for (made, name) in [(EXT4, "ext4"), (XFS, "xfs")] {
        let Some(mut world) = PoolWorld::build(&[(made, 320), (made, 320)]) else {
            return;
        };
        let mut expected = vec![0; MIB];
        expected.extend(pattern::bytes(7, MIB as u64, 3 * MIB));
        let file = File::create(world.path("f")).expect("made");
        file.write_all_at(&expected, 0).expect("room");
        let first = home(&world, "f");
        occupy(&world, first, MIB);
        let rest = pattern::bytes(7, 4 * MIB as u64, 24 * MIB);
        file.write_all_at(&rest, 4 * MIB as u64).expect("room");
        expected.extend(rest);
        file.sync_all().expect("written");
        drop(file);
        let report = world.where_is("f");
        let last = report["segments"].as_array().and_then(|all| all.last());
        let object = world.object_of(last.expect("one at least"));
        world.end();

        // Reserve where the layout leads to the other member: beside zeroes, and beside bytes.
        let object = File::options()
            .read(true)
            .write(true)
            .open(object)
            .expect("there");
        for at in [128 << 10, 2 << 20] {
            fallocate(&object, FallocateFlags::KEEP_SIZE, at, 64 << 10).expect("room");
        }
        object.sync_all().expect("written");
        let mut bytes = vec![1; 3 * MIB];
        object.read_exact_at(&mut bytes, 0).expect("read");
        let found = rustix::fs::seek(&object, rustix::fs::SeekFrom::Data(0)).expect("some");
        assert_eq!(found, 128 << 10, "{name}: Linux does so no longer");

        let report = done(&world, &["fsck"]);
        assert_eq!(report["findings"], json!([]), "{name}");
        // XFS keeps some more behind written bytes.
        let reserved = report["reserved_bytes"].as_u64();
        assert!(reserved >= Some(128 << 10), "{name}: {report}");
        world.lose_catalogue();
        let members: Vec<PathBuf> = (0..2).map(|at| world.member(at).join("pool")).collect();
        let (report, code) = world.json(&["rescue"], &members);
        assert_eq!(code, Some(0), "{name}: {report}");
        world.start();
        let bytes = fs::read(world.path("f")).expect("read");
        let differs = bytes
            .iter()
            .zip(&expected)
            .position(|(is, should)| is != should);
        assert_eq!((bytes.len(), differs), (expected.len(), None), "{name}");
        world.end();
    }
}
