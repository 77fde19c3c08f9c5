// SPDX-License-Identifier: Apache-2.0
//! A mount's process that may have few descriptors: a program that opens too many files gets an
//! error, and no other program does.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::needs::{self, Need};
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use rushes_tests::ways::Hands;
use rustix::fs::{OFlags, XattrFlags, setxattr};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Enough for 37 open files of all programs together.
const LIMIT: u32 = 450;
const BYTES: usize = 10_000;
/// The mount returns ENFILE, too many files for the whole system. EMFILE would blame the caller.
const ENFILE: &str = "OSError(23,";

/// Opens new files until it gets an error. Returns  the count of its open files
fn takes_all(world: &PoolWorld, hands: &mut Hands, of: &str) -> usize {
    for number in 0..1000 {
        let path = world.path(format!("{of}{number}"));
        let flags = OFlags::RDWR | OFlags::CREATE;
        let what = path.to_str().expect("text");
        let range = (u64::from(flags.bits()), 0);
        match hands.ask("open", &format!("{of}{number}"), range, what) {
            Ok(_) => {
                hands.does("write", &format!("{of}{number}"), (0, 5000), "7");
            }
            Err(error) => {
                assert!(error.contains(ENFILE), "{error}");
                return number;
            }
        }
    }
    panic!("{of}: it never ends")
}

#[test]
fn who_opens_too_many_files_hears_it_and_nobody_else() {
    if !needs::all_there(&[Need::Program("python3"), Need::Program("sh")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    world.end();
    world.descriptor_limit = Some(LIMIT);
    world.start();
    let writable = || {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        options
    };
    // Opened before and not used yet: the mount has to open or make their objects when it has no
    // descriptor left.
    let empty = writable().open(world.path("empty")).expect("made");
    put(&world.path("written"), 1, BYTES).expect("there is room");
    let written = writable().open(world.path("written")).expect("there");
    fs::create_dir(world.path("folder")).expect("made");
    let mut hog = Hands::new();
    let had = takes_all(&world, &mut hog, "hog");
    assert!((10..30).contains(&had), "{had}: about half of all");
    let mut second = Hands::new();
    let more = takes_all(&world, &mut second, "second");
    assert!(more > 0 && more < had, "{more} after {had}");

    // Files that are open already can be written, synced and read.
    for (file, seed) in [(&empty, 2), (&written, 3)] {
        file.write_all_at(&pattern::bytes(seed, 0, BYTES), 0)
            .expect("written");
        file.sync_all().expect("synced");
        let mut found = vec![0; BYTES];
        file.read_exact_at(&mut found, 0).expect("read");
        pattern::check(seed, 0, &found, "what was written");
    }
    assert_eq!(empty.metadata().expect("known").len(), BYTES as u64);
    // So can files of the program that got the error.
    hog.does("write", "hog3", (5000, 5000), "8");
    // Other programs open, list and make files.
    for number in 0..3 {
        put(&world.path(format!("folder/other{number}")), 4, BYTES).expect("opened");
        check(&world.path(format!("folder/other{number}")), 4, BYTES);
    }
    assert_eq!(
        fs::read_dir(world.path("folder")).expect("listed").count(),
        3
    );
    drop((hog, second));
    check(&world.path("written"), 3, BYTES);
    drop((empty, written));
    assert!(!world.log().contains(" is missing"), "{}", world.log());
    // Any program may use the descriptors of closed files.
    let mut third = Hands::new();
    let again = takes_all(&world, &mut third, "third");
    assert!(again + 3 >= had, "{again} after {had}");
    drop(third);
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
}

/// Many names, many folders: the mount closes descriptors of them that it keeps only to be quick.
#[test]
fn names_and_folders_leave_room_for_files() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    world.end();
    world.descriptor_limit = Some(LIMIT);
    world.start();
    let before = File::create(world.path("before")).expect("made");
    for number in 0..150 {
        let folder = world.path(format!("folder{number}"));
        fs::create_dir(&folder).expect("made");
        put(&folder.join("file"), number, 100).expect("there is room");
    }
    for number in 0..150 {
        check(&world.path(format!("folder{number}/file")), number, 100);
    }
    before.write_all_at(b"still", 0).expect("written");
    before.sync_all().expect("synced");
    assert!(
        !world.log().contains("Too many open files"),
        "{}",
        world.log()
    );
}

/// Enough for 256 open files of all programs together, but not for eight objects of each.
const LIMIT_OF_WIDE: u32 = 1024;
const WIDTH: usize = 8;
const UNIT: usize = 64 << 10;

/// Files in many objects: each costs two descriptors when it is opened, and one for each object
/// when it is read or written.
fn wide_files_that_are_all_used(is_served: bool) {
    if !needs::all_there(&[Need::Program("python3"), Need::Program("sh")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100); WIDTH]) else {
        return;
    };
    let folder = world.path("wide");
    fs::create_dir(&folder).expect("made");
    let words = format!("striped={WIDTH} unit=64KiB");
    let wish = words.as_bytes();
    setxattr(&folder, "user.rushes.policy", wish, XattrFlags::empty()).expect("a wish");
    world.end();
    let daemon = is_served.then(|| world.serve(WIDTH, ""));
    world.descriptor_limit = Some(LIMIT_OF_WIDE);
    world.start();
    if let Some(daemon) = &daemon {
        daemon.wait_for_members(WIDTH);
    }
    let length = WIDTH * UNIT;
    put(&folder.join("other"), 5, length).expect("there is room");
    put(&folder.join("late"), 6, length).expect("there is room");
    let other = File::options()
        .read(true)
        .write(true)
        .open(folder.join("other"))
        .expect("there");
    let late = File::open(folder.join("late")).expect("there");

    // Open all files before using one.
    let mut hog = Hands::new();
    let flags = (OFlags::RDWR | OFlags::CREATE).bits();
    let mut files = 0;
    let error = loop {
        let name = format!("hog{files}");
        let path = folder.join(&name);
        match hog.ask(
            "open",
            &name,
            (u64::from(flags), 0),
            path.to_str().expect("text"),
        ) {
            Ok(_) => files += 1,
            Err(error) => break error,
        }
        assert!(files < 1000, "it never ends");
    };
    assert!(error.contains(ENFILE), "{error}");
    assert!((100..160).contains(&files), "{files}: about half of all");
    let all = (0, length as u64);
    for number in 0..files {
        hog.does(
            "write",
            &format!("hog{number}"),
            all,
            &(number % 200 + 1).to_string(),
        );
    }
    for number in 0..files {
        let seen = hog.does("see", &format!("hog{number}"), all, "-");
        assert_eq!(seen, format!("{:02x}", number % 200 + 1), "hog{number}");
    }

    // A program that has files open already gets no error, and other programs open files.
    let mut found = vec![0; length];
    late.read_exact_at(&mut found, 0).expect("read");
    pattern::check(6, 0, &found, "opened before");
    other
        .write_all_at(&pattern::bytes(7, 0, length), 0)
        .expect("written");
    other.sync_all().expect("synced");
    check(&folder.join("other"), 7, length);
    for number in 0..3 {
        put(&folder.join(format!("more{number}")), 8, length).expect("opened");
        check(&folder.join(format!("more{number}")), 8, length);
    }
    // The program that opened too many uses its files without an error.
    for number in 0..files {
        let name = format!("hog{number}");
        let middle = (3 * UNIT as u64, UNIT as u64);
        hog.does("write", &name, middle, &(number % 200 + 2).to_string());
    }
    drop(hog);
    drop((other, late));
    for number in 0..files {
        let bytes = fs::read(folder.join(format!("hog{number}"))).expect("read");
        let outer = (number % 200 + 1) as u8;
        let mut expected = vec![outer; length];
        expected[3 * UNIT..4 * UNIT].fill(outer + 1);
        assert!(bytes == expected, "hog{number} has other bytes");
    }
    let log = world.log();
    assert!(!log.contains("Too many open files"), "{log}");
    assert!(!log.contains(" is missing"), "{log}");
    world.end();
    drop(daemon);
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
}

#[test]
fn files_in_many_objects_take_no_descriptor_from_others_when_they_are_used() {
    wide_files_that_are_all_used(false);
}

#[test]
fn files_in_many_objects_take_none_beside_a_daemon_either() {
    wide_files_that_are_all_used(true);
}

/// Members beside the one on the lab's disk, whose number comes after theirs.
const QUICK: usize = 5;
/// Files on these members alone.
const QUICK_COUNT: usize = 7;
/// Files with an object on each member: so many have more objects than the mount may keep open;
/// fewer would not.
const OPEN_COUNT: usize = 12;
const OPEN_LENGTH: usize = (QUICK + 1) * UNIT;
const PATIENCE: Duration = Duration::from_secs(60);
/// A program that does not use the disk that hangs waits for less than this.
const AT_ONCE: Duration = Duration::from_secs(1);

fn open(path: PathBuf) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).expect("there is room")
}

fn beside_an_obedient_disk() -> Option<PoolWorld> {
    if !needs::all_there(&[Need::Program("rushes-lab"), Need::Program("filefrag")]) {
        return None;
    }
    let mut world = PoolWorld::build(&[(EXT4, 100); QUICK])?;
    for number in 0..QUICK_COUNT {
        put(&world.path(format!("quick{number}")), 3, BYTES).expect("there is room");
    }
    world.add_slow_disk(1 << 30);
    let folder = world.path("wide");
    fs::create_dir(&folder).expect("made");
    let words = format!("striped={} unit=64KiB", QUICK + 1);
    let wish = words.as_bytes();
    setxattr(&folder, "user.rushes.policy", wish, XattrFlags::empty()).expect("a wish");
    world.end();
    world.descriptor_limit = Some(LIMIT);
    world.start();
    Some(world)
}

/// Index of the file's object that lies on that disk, and the object's path there.
fn on_obedient_disk(world: &PoolWorld, name: &str) -> (usize, PathBuf) {
    let found = world.where_is(name);
    let objects = found["segments"][0]["objects"].as_array().expect("a list");
    assert_eq!(objects.len(), QUICK + 1);
    let on_it = |object: &Value| object["member"].as_u64() == Some(QUICK as u64);
    let place = objects.iter().position(on_it).expect("one of each");
    let below = objects[place]["path"].as_str().expect("text");
    (place, PathBuf::from(below))
}

/// Counts of objects that the mount has open: on its quick members, and on the disk that hangs.
fn open_objects(world: &PoolWorld) -> (usize, usize) {
    let all = fs::read_dir(format!("/proc/{}/fd", world.keeper())).expect("ours");
    let paths: Vec<PathBuf> = all
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .collect();
    let of = |folder: PathBuf| {
        let folder = folder.join("pool/objects");
        paths
            .iter()
            .filter(|path| path.starts_with(&folder))
            .count()
    };
    let quick = (0..QUICK).map(|number| of(world.member(number))).sum();
    (quick, of(world.slow_disk().path().to_path_buf()))
}

#[test]
fn a_written_object_that_is_closed_for_room_is_asked_what_was_not_stored() {
    let Some(world) = beside_an_obedient_disk() else {
        return;
    };
    let victim = open(world.path("wide/victim"));
    victim
        .write_all_at(&pattern::bytes(1, 0, OPEN_LENGTH), 0)
        .expect("written");
    victim.sync_all().expect("stored");
    drop(victim);
    let (place, below) = on_obedient_disk(&world, "wide/victim");
    let object = world.slow_disk().path().join("pool").join(below);
    let physical = world.slow_disk().physical(&object, 0);
    let victim = open(world.path("wide/victim"));
    let reader = open(world.path("wide/victim"));
    // The file's first descriptor is that of another object, which stays open.
    let other = ((place + 1) % (QUICK + 1) * UNIT) as u64;
    victim.write_all_at(&[7; UNIT], other).expect("written");
    let at = (place * UNIT) as u64;
    victim.write_all_at(&[8; UNIT], at).expect("in memory");
    world
        .slow_disk()
        .tell(&format!("fail write {physical} 4096"));
    let files: Vec<File> = (0..OPEN_COUNT)
        .map(|number| open(world.path(format!("wide/file{number}"))))
        .collect();
    until("the disk is asked", PATIENCE, || {
        for file in &files {
            file.write_all_at(&[9; OPEN_LENGTH], 0).expect("written");
        }
        world.log().contains(" fails: ")
    });
    world.slow_disk().tell("clear");
    until("the disk works", PATIENCE, || {
        world.log().contains(" works again")
    });
    for file in [&victim, &reader] {
        let error = file.sync_all().expect_err("it was not stored");
        assert_eq!(error.raw_os_error(), Some(5), "{error}");
        file.sync_all().expect("said once");
    }
    files[0].sync_all().expect("stored");
}

#[test]
fn objects_that_cannot_be_closed_on_a_disk_that_hangs_keep_nobody_from_others() {
    let Some(mut world) = beside_an_obedient_disk() else {
        return;
    };
    let files: Vec<File> = (0..OPEN_COUNT)
        .map(|number| open(world.path(format!("wide/file{number}"))))
        .collect();
    for (number, file) in files.iter().enumerate() {
        let name = format!("wide/file{number}");
        file.write_all_at(&[1; UNIT], UNIT as u64).expect("written");
        // The file's first descriptor is that of another object, which stays open.
        assert_ne!(on_obedient_disk(&world, &name).0, 1, "{name}");
        file.write_all_at(&pattern::bytes(number as u64, 0, OPEN_LENGTH), 0)
            .expect("written");
    }
    world.slow_disk().tell("timing on");
    world.slow_disk().tell("stall 120000");
    let (quick, hung) = open_objects(&world);
    assert!(hung > QUICK_COUNT, "{hung} open on the disk that hangs");
    let mut slowest = Duration::ZERO;
    let mut others = Vec::new();
    // Each opened file leaves room for two objects fewer.
    let finished = std::thread::scope(|scope| {
        let opening = scope.spawn(|| {
            for number in 0..QUICK_COUNT {
                let begun = Instant::now();
                let file = open(world.path(format!("quick{number}")));
                let mut found = vec![0; BYTES];
                file.read_exact_at(&mut found, 0).expect("read");
                pattern::check(3, 0, &found, "a file elsewhere");
                file.write_all_at(&found, 0).expect("written");
                slowest = slowest.max(begun.elapsed());
                others.push(file);
            }
        });
        let end = Instant::now() + PATIENCE / 4;
        while !opening.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        let finished = opening.is_finished();
        if finished {
            // The mount does not close the first object of an open file; it closes others on the
            // quick members to make room.
            until("others are closed", PATIENCE, || {
                open_objects(&world).0 < quick
            });
            let (_, still) = open_objects(&world);
            assert!(still >= hung, "{still} of {hung}: it hangs");
        }
        world.slow_disk().tell("clear");
        world.slow_disk().tell("timing off");
        finished
    });
    assert!(finished && slowest < AT_ONCE, "{slowest:?} elsewhere");
    for (number, file) in files.iter().enumerate() {
        file.sync_all().expect("stored");
        let mut found = vec![0; OPEN_LENGTH];
        file.read_exact_at(&mut found, 0).expect("read");
        pattern::check(number as u64, 0, &found, "a file that hung");
    }
    drop((files, others));
    assert!(!world.log().contains(" fails: "), "{}", world.log());
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
}
