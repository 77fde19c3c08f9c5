// SPDX-License-Identifier: Apache-2.0
//! A mount's process that may have few descriptors: who asks for too many files hears so, and nobody else hears anything.

use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use rushes_tests::ways::Hands;
use rustix::fs::OFlags;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// 37 files for everybody.
const LIMIT: u32 = 450;
const BYTES: usize = 10_000;
/// In too many files for the whole system: what the mount says. Not EMFILE, which would be said of the caller.
const ENFILE: &str = "OSError(23,";

/// Opens new files until it hears an error. Returns  how many it has
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
    // Opened before, and nothing done with them: the objects are to be opened, or made, when there is no room.
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

    // The files that were open are written, synced and read.
    for (file, seed) in [(&empty, 2), (&written, 3)] {
        file.write_all_at(&pattern::bytes(seed, 0, BYTES), 0)
            .expect("written");
        file.sync_all().expect("synced");
        let mut found = vec![0; BYTES];
        file.read_exact_at(&mut found, 0).expect("read");
        pattern::check(seed, 0, &found, "what was written");
    }
    assert_eq!(empty.metadata().expect("known").len(), BYTES as u64);
    // So are those of who has too many.
    hog.does("write", "hog3", (5000, 5000), "8");
    // Others open, list and make what they like.
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
    // What was let go of is anybody's again.
    let mut third = Hands::new();
    let again = takes_all(&world, &mut third, "third");
    assert!(again + 3 >= had, "{again} after {had}");
    drop(third);
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
}

/// Many names, many folders: what is kept of them only to be quick is let go of.
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
