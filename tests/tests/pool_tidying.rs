// SPDX-License-Identifier: Apache-2.0
//! Defrag of a pool, and its tidying when idle: files in several segments come together, scattered
//! ones are written anew, stripes grow with the members. The tests kill it at every step, and run
//! it beside programs that read and write.

use rushes_tests::local::Model;
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS, check, killed_at, put};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn build(members: &[Made]) -> Option<PoolWorld> {
    if !needs::all_there(&[Need::Program("strace")]) {
        return None;
    }
    PoolWorld::build(members)
}

/// fsck mends the remains of a kill, and puts none of them into lost+found.
fn mended(world: &PoolWorld, context: &str) {
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{context}: {report}");
    let lost = world.catalogue().join("tree/lost+found");
    assert!(!lost.exists(), "{context}: {report}");
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{context}: {report}");
    assert_eq!(report["findings"], json!([]), "{context}");
}

/// Makes a file beside the pool that leaves `free` bytes on a member.
fn occupy(world: &PoolWorld, member: usize, free: usize) -> PathBuf {
    let path = world.member(member).join("others");
    let found = rustix::fs::statvfs(world.member(member)).expect("mounted");
    let length = (found.f_bavail * found.f_frsize) as usize - free;
    let file = File::create(&path).expect("made");
    fallocate(&file, FallocateFlags::empty(), 0, length as u64).expect("room");
    path
}

/// Makes files `s0`, `s1`, …, each on two members although any has room for the whole.
fn split_files(world: &PoolWorld, members: usize, count: u64, length: usize) {
    for seed in 0..count {
        let free = length * 2 / 3;
        let others: Vec<PathBuf> = (0..members).map(|at| occupy(world, at, free)).collect();
        let name = format!("s{seed}");
        put(&world.path(&name), seed, length).expect("there is room");
        for path in others {
            fs::remove_file(path).expect("ours");
        }
        assert_eq!(world.members_of(&name).len(), 2, "{name}");
    }
}

/// Calls `put` while these members have free room only in small pieces: its files get many extents.
fn scattered(world: &PoolWorld, members: usize, put: impl FnOnce()) {
    let folders = in_pieces(world, members);
    put();
    for folder in folders {
        fs::remove_dir_all(folder).expect("ours");
    }
    world.sync();
}

/// Makes folders beside the pool whose files leave free room only in small pieces between them.
fn in_pieces(world: &PoolWorld, members: usize) -> Vec<PathBuf> {
    let folders: Vec<PathBuf> = (0..members)
        .map(|number| world.member(number).join("others"))
        .collect();
    for folder in &folders {
        fs::create_dir(folder).expect("made");
        let others = || (0..).map(|at: usize| folder.join(at.to_string()));
        let fill = |path: &PathBuf| {
            let made = File::create(path).map_err(|_| ());
            made.and_then(|file| {
                fallocate(&file, FallocateFlags::empty(), 0, 128 << 10).map_err(|_| ())
            })
        };
        let count = others().take_while(|path| fill(path).is_ok()).count();
        for path in others().take(count + 1).step_by(2) {
            fs::remove_file(path).expect("ours");
        }
    }
    world.sync();
    folders
}

fn number(report: &Value, words: &[&str]) -> u64 {
    let found = words.iter().fold(report, |value, word| &value[*word]);
    found
        .as_u64()
        .unwrap_or_else(|| panic!("{words:?}: {report}"))
}

fn defragged(world: &PoolWorld, paths: &[PathBuf]) -> Value {
    let (report, code) = world.json(&["defrag"], paths);
    assert_eq!(code, Some(0), "{report}");
    report
}

/// System calls at which a program is killed: all that change a file system.
const STEPS: [&str; 6] = [
    "fsetxattr",
    "pwrite64",
    "fsync",
    "fallocate",
    "unlinkat",
    "openat",
];

/// Kills a command at later and later steps, and mends each time. Returns  the count of kills
fn kill_at_steps(world: &PoolWorld, words: &[&str], counts: &[usize]) -> usize {
    let mut kill_count = 0;
    for count in counts {
        for call in STEPS {
            let context = format!("{words:?} killed at {call} {count}");
            kill_count += usize::from(killed_at(&world.command(words, &[]), call, *count));
            mended(world, &context);
        }
    }
    kill_count
}

/// One defrag after the other is killed, at each of these calls.
fn dies_at(world: &PoolWorld, phase: &str, steps: &[(&str, usize)]) {
    for &(call, count) in steps {
        let context = format!("{phase}: killed at {call} {count}");
        let is_killed = killed_at(&world.command(&["defrag"], &[]), call, count);
        assert!(is_killed, "{context}");
        mended(world, &context);
    }
}

/// A defrag has a file to write anew: its first step is to reserve room.
fn reserves(world: &PoolWorld) {
    let is_killed = killed_at(&world.command(&["defrag"], &[]), "fallocate", 1);
    assert!(is_killed, "nothing is scattered");
    mended(world, "killed before there is room");
}

/// Ends the mount, kills a defrag at its steps, lets one run to its end, and mounts the pool again:
/// files that were scattered have at most `extents_max` extents.
fn defrag_despite_kills(world: &mut PoolWorld, counts: &[usize], extents_max: u64) {
    world.end();
    reserves(world);
    let kill_count = kill_at_steps(world, &["defrag"], counts);
    assert!(kill_count > 6, "only {kill_count} kills");
    let report = defragged(world, &[]);
    let extents = number(&report, &["after", "extent_count"]);
    assert!(extents <= extents_max, "{report}");
    mended(world, "at last");
    world.start();
}

#[test]
fn files_in_several_places_come_together_also_when_that_is_killed() {
    let Some(mut world) = build(&[(EXT4, 64), (EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    let (count, length) = (18, 2 * MIB + 4099);
    split_files(&world, 3, count, length);
    world.end();
    mended(&world, "at first");
    let kill_count = kill_at_steps(&world, &["defrag"], &[1, 2, 4, 9]);
    assert!(kill_count > 8, "only {kill_count} kills");
    let report = defragged(&world, &[]);
    assert_eq!(
        number(&report, &["after", "segment_count"]),
        count,
        "{report}"
    );
    let again = defragged(&world, &[]);
    assert_eq!(again["moved_count"], 0, "{again}");
    mended(&world, "at last");
    world.start();
    for seed in 0..count {
        let name = format!("s{seed}");
        assert_eq!(world.members_of(&name).len(), 1, "{name}");
        check(&world.path(name), seed, length);
    }
}

#[test]
fn a_scattered_file_is_written_anew_also_when_that_is_killed() {
    let Some(mut world) = build(&[(EXT4, 48)]) else {
        return;
    };
    let length = 12 * MIB + 17;
    put(&world.path("whole"), 2, 4 * MIB).expect("there is room");
    scattered(&world, 1, || {
        put(&world.path("scattered"), 1, length).expect("there is room");
    });
    defrag_despite_kills(&mut world, &[1, 2, 3], 6);
    check(&world.path("scattered"), 1, length);
    check(&world.path("whole"), 2, 4 * MIB);
}

#[test]
fn a_scattered_stripe_is_written_anew_on_its_members_also_when_that_is_killed() {
    let Some(mut world) = build(&[(EXT4, 170), (EXT4, 170)]) else {
        return;
    };
    let length = 22 * MIB + 4099;
    fs::create_dir(world.path("reels")).expect("made");
    wish(&world, "reels", "striped=2 unit=64KiB");
    scattered(&world, 2, || {
        put(&world.path("reels/f"), 1, length).expect("there is room");
    });
    let striped = [(String::from("striped"), 2)];
    assert_eq!(world.shapes_of("reels/f"), striped);
    defrag_despite_kills(&mut world, &[1, 2, 5], 10);
    assert_eq!(world.shapes_of("reels/f"), striped);
    check(&world.path("reels/f"), 1, length);
}

/// A defrag that gets "disk full" at one of its writes.
fn full_at(world: &PoolWorld, call: &str, count: usize) -> Value {
    let output = std::process::Command::new(needs::path_of("strace"))
        .args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .arg(format!("inject={call}:error=ENOSPC:when={count}"))
        .arg(needs::path_of("rushes"))
        .args(world.command(&["defrag", "--json"], &[]).get_args())
        .output()
        .expect("strace starts");
    let report = serde_json::from_slice(&output.stdout);
    let report = report.unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(output.status.code(), Some(0), "{report}");
    report
}

#[test]
fn a_file_that_comes_together_where_nothing_of_it_was_is_begun_afresh_when_that_is_killed_or_full()
{
    let Some(mut world) = build(&[(EXT4, 120), (EXT4, 120), (EXT4, 120)]) else {
        return;
    };
    let length = 40 * MIB + 4099;
    let others = occupy(&world, 2, MIB);
    split_files(&world, 2, 1, length);
    fs::remove_file(others).expect("ours");
    // Neither of its two members has room for the whole.
    for member in 0..2 {
        occupy(&world, member, 4 * MIB);
    }
    world.end();
    // Before the new object is in the layout, as it gets there, and while it is filled.
    let begins = [
        ("openat", 35),
        ("fsetxattr", 1),
        ("fsync", 1),
        ("fsync", 2),
        ("pwrite64", 1),
        ("pwrite64", 9),
        ("fsync", 3),
        ("fsetxattr", 2),
    ];
    dies_at(&world, "at its beginning", &begins);
    world.start();
    assert_eq!(world.members_of("s0"), [0, 1], "nothing of it is moved yet");
    world.end();
    let continues = [
        ("fsetxattr", 3),
        ("pwrite64", 3),
        ("fallocate", 1),
        ("fsync", 1),
    ];
    dies_at(&world, "on its way", &continues);
    world.start();
    assert_eq!(world.members_of("s0"), [0, 1, 2], "it is on its way");
    check(&world.path("s0"), 0, length);
    world.end();
    // The member that it goes to is full: bytes there stay there, and nothing is lost.
    let filled = occupy(&world, 2, MIB);
    let report = defragged(&world, &[]);
    assert_eq!(report["failed_count"], 0, "{report}");
    assert!(number(&report, &["after", "segment_count"]) > 1, "{report}");
    mended(&world, "full");
    world.start();
    check(&world.path("s0"), 0, length);
    world.end();
    fs::remove_file(filled).expect("ours");
    // Or it becomes full at a write.
    let mut vain_count = 0;
    for (call, count) in [
        ("pwrite64", 1),
        ("pwrite64", 5),
        ("fsetxattr", 1),
        ("pwrite64", 12),
    ] {
        let report = full_at(&world, call, count);
        vain_count += u64::from(number(&report, &["after", "segment_count"]) > 1);
        mended(&world, &format!("full at {call} {count}"));
    }
    assert_eq!(vain_count, 4);
    defragged(&world, &[]);
    mended(&world, "at last");
    world.start();
    assert_eq!(world.members_of("s0"), [2]);
    check(&world.path("s0"), 0, length);
}

#[test]
fn an_object_that_is_made_anew_is_later_than_all_that_the_file_has() {
    let Some(mut world) = build(&[(EXT4, 120), (EXT4, 120), (EXT4, 120)]) else {
        return;
    };
    let length = 40 * MIB + 4099;
    let others = occupy(&world, 2, MIB);
    split_files(&world, 2, 1, length);
    fs::remove_file(others).expect("ours");
    world.end();
    // The drain moves the first of two objects to a third one: fewer are left than were ever made.
    let others = occupy(&world, 1, 4 * MIB);
    let (report, code) = world.json(&["drain", "0"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let (report, code) = world.json(&["drain", "0", "--cancel"], &[]);
    assert_eq!(code, Some(0), "{report}");
    occupy(&world, 2, 4 * MIB);
    assert!(killed_at(&world.command(&["defrag"], &[]), "fsetxattr", 3));
    world.start();
    let segments = world.where_is("s0")["segments"].clone();
    let segments = segments.as_array().expect("a list");
    let mut serials: Vec<[u8; 2]> = Vec::new();
    for segment in segments {
        let mut mark = [0; 64];
        let object = world.object_of(segment);
        rustix::fs::getxattr(object, "trusted.rushes.object", &mut mark[..]).expect("marked");
        serials.push([mark[36], mark[37]]);
    }
    serials.sort_unstable();
    let count = serials.len();
    serials.dedup();
    assert_eq!((count, serials.len()), (3, 3), "{segments:?}");
    check(&world.path("s0"), 0, length);
    drop(others);
}

/// Room of all objects of all members on their disks. Units: bytes.
fn held_by_objects(world: &PoolWorld, members: usize) -> u64 {
    let folders = (0..members).map(|number| world.member(number).join("pool/objects"));
    let below = folders.flat_map(|path| fs::read_dir(path).expect("listed"));
    let objects =
        below.flat_map(|folder| fs::read_dir(folder.expect("listed").path()).expect("listed"));
    objects
        .map(|object| object.expect("listed").metadata().expect("known").blocks() * 512)
        .sum()
}

/// Kinds of the findings of fsck, each once; it changes nothing.
fn kinds(world: &PoolWorld) -> Vec<String> {
    let (report, _) = world.json(&["fsck"], &[]);
    let all = report["findings"].as_array().expect("a list");
    let mut kinds: Vec<String> = all
        .iter()
        .map(|one| one["kind"].as_str().expect("text").to_owned())
        .collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// Kills the repair at later and later steps. Returns  the count of kills
fn mend_killed(world: &PoolWorld) -> usize {
    let mut kill_count = 0;
    for call in ["fallocate", "ftruncate", "utimensat"] {
        for count in [1, 3] {
            let mend = world.command(&["fsck", "--repair"], &[]);
            kill_count += usize::from(killed_at(&mend, call, count));
        }
    }
    kill_count
}

#[test]
fn what_a_killed_defrag_had_reserved_and_copied_is_given_back() {
    for (made, call, count) in [
        ((EXT4, 130), "fsetxattr", 3),
        ((EXT4, 130), "fallocate", 200),
        ((XFS, 300), "fsetxattr", 3),
    ] {
        let Some(mut world) = build(&[made]) else {
            return;
        };
        let length = 40 * MIB + 4099;
        scattered(&world, 1, || {
            put(&world.path("scattered"), 1, length).expect("there is room");
        });
        world.end();
        let (mut at, mut is_killed) = (count, false);
        // At the latest such call, or an earlier one if there are fewer: the defrag reserves room
        // once for each extent of the old object.
        while !is_killed && at > 2 {
            is_killed = killed_at(&world.command(&["defrag"], &[]), call, at);
            at -= 1;
        }
        let held = held_by_objects(&world, 1);
        if !is_killed || held < (length + 8 * MIB) as u64 {
            // The defrag ended before, or was killed before a new object was in the layout.
            mended(&world, "killed elsewhere");
            assert_eq!(call, "fallocate", "{made:?} {held}");
            continue;
        }
        let (report, _) = world.json(&["fsck"], &[]);
        let reserved = number(&report, &["reserved_bytes"]);
        if call == "fsetxattr" {
            // The second piece is copied and not in the layout, room for the third is reserved.
            assert_eq!(kinds(&world), ["copied"], "{made:?}");
            assert!(reserved > 4 << 20, "{report}");
        }
        assert_eq!(held, held_by_objects(&world, 1), "a look changes nothing");
        let kill_count = mend_killed(&world);
        assert!(kill_count > 1, "only {kill_count} kills");
        mended(&world, "at last");
        let held = held_by_objects(&world, 1);
        assert!(held < (length + MIB) as u64, "{made:?}: {held}");
        world.start();
        check(&world.path("scattered"), 1, length);
        // The next defrag goes on.
        let report = defragged(&world, &[]);
        let after = number(&report, &["after", "extent_count"]);
        assert!(
            after < number(&report, &["before", "extent_count"]),
            "{report}"
        );
        check(&world.path("scattered"), 1, length);
        world.end();
        mended(&world, "after the end");
        assert!(held_by_objects(&world, 1) < (length + MIB) as u64);
    }
}

#[test]
fn what_is_left_in_objects_of_a_stripe_that_are_named_is_given_back() {
    let Some((mut world, third)) = two_groups_of_three() else {
        return;
    };
    let length = 60 * MIB + 4099;
    put(&world.path("reels/f"), 1, length).expect("there is room");
    world.end();
    let (report, code) = world.json(&["add"], &third);
    assert_eq!(code, Some(0), "{report}");
    let sizes = |world: &PoolWorld| {
        let others = ["fifth", "sixth"].map(|name| world.scratch.path().join(name));
        let objects = others.iter().flat_map(|disk| {
            let below = fs::read_dir(disk.join("pool/objects")).expect("listed");
            below.flat_map(|folder| fs::read_dir(folder.expect("listed").path()).expect("listed"))
        });
        let held = |object: std::io::Result<fs::DirEntry>| {
            object.expect("listed").metadata().expect("known").blocks() * 512
        };
        held_by_objects(world, 4) + objects.map(held).sum::<u64>()
    };
    let (mut found_count, mut more) = (0, 0);
    // fsetxattr sets six marks and a layout, then a layout for each piece; fallocate punches holes
    // in the new objects before it, in the old ones after it.
    for (call, count) in [
        ("fsetxattr", 8),
        ("fallocate", 6),
        ("fallocate", 8),
        ("fallocate", 9),
    ] {
        let is_killed = killed_at(&world.command(&["rebalance"], &[]), call, count);
        let before = sizes(&world);
        if is_killed && kinds(&world) == ["copied"] {
            found_count += 1;
            more = more.max(before.saturating_sub(length as u64));
        }
        mend_killed(&world);
        mended(&world, call);
        let after = sizes(&world);
        assert!(after < (length + MIB) as u64, "{call} {count}: {after}");
    }
    assert!(more > 8 << 20, "{more}");
    assert!(found_count > 1, "{found_count}");
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    mended(&world, "at last");
    world.start();
    assert_eq!(world.shapes_of("reels/f"), [twice(6)]);
    check(&world.path("reels/f"), 1, length);
}

#[test]
fn the_mount_gives_back_what_a_move_had_reserved_and_keeps_what_clients_have() {
    let length = 3 * MIB + 17;
    let Some(mut world) = idle_soon(1, length) else {
        return;
    };
    // Room that a client reserves stays its own: within its file's length for good, behind it until
    // fsck repairs the pool.
    let file = File::create(world.path("recorded")).expect("made");
    // More than the room elsewhere later, so that nothing moves it.
    file.write_all_at(&pattern::bytes(7, 0, 12 * MIB), 0)
        .expect("room");
    fallocate(&file, FallocateFlags::empty(), 0, 16 << 20).expect("room");
    fallocate(&file, FallocateFlags::KEEP_SIZE, 16 << 20, 16 << 20).expect("room");
    file.sync_all().expect("written");
    drop(file);
    let segments = world.where_is("s0")["segments"].clone();
    world.end();
    let blocks = |path: &PathBuf| fs::metadata(path).expect("there").blocks() * 512;
    let first = world.object_of(&segments[0]);
    // No member has room for the whole file, so that nothing of it is moved.
    let others: Vec<PathBuf> = (0..3).map(|at| occupy(&world, at, 11 * MIB)).collect();
    let end = segments[0]["end"].as_u64().expect("not the last one") + (1 << 20);
    let reserve = |path: &PathBuf| {
        let opened = File::options()
            .write(true)
            .open(path)
            .expect("our own disk");
        fallocate(&opened, FallocateFlags::KEEP_SIZE, end, 10 << 20).expect("room");
    };
    reserve(&first);
    for path in &others {
        fs::remove_file(path).expect("ours");
    }
    let others: Vec<PathBuf> = (0..3).map(|at| occupy(&world, at, MIB)).collect();
    assert!(blocks(&first) > 10 << 20);
    world.start();
    schedule(&world, "idle");
    until(&world, "gone through", |status| {
        status["tidy"]["last"]["is_whole"] == true && status["tidy"]["waits_for"] == "done"
    });
    assert_eq!(world.members_of("s0").len(), 2, "nothing was to be moved");
    assert!(blocks(&first) < 5 << 20, "{}", blocks(&first));
    let held = blocks(&world.object_of(&world.where_is("recorded")["segments"][0]));
    assert!(held >= 32 << 20, "{held}: a client's room is taken away");
    check(&world.path("s0"), 0, length);
    world.end();
    // No program has it open: fsck frees the room behind its end and keeps the room within, and no
    // byte goes.
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(
        (&report["findings"], code),
        (&json!([]), Some(0)),
        "{report}"
    );
    assert!(number(&report, &["reserved_bytes"]) >= 16 << 20, "{report}");
    mended(&world, "after the end");
    world.start();
    let held = blocks(&world.object_of(&world.where_is("recorded")["segments"][0]));
    assert!((16 << 20..17 << 20).contains(&held), "{held}");
    let bytes = fs::read(world.path("recorded")).expect("read");
    assert_eq!(bytes.len(), 16 << 20);
    pattern::check(7, 0, &bytes[..12 * MIB], "recorded");
    assert!(bytes[12 * MIB..].iter().all(|byte| *byte == 0));
    check(&world.path("s0"), 0, length);
    drop(others);
}

#[test]
fn a_mounted_pool_is_defragmented_beside_those_who_use_its_files() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 80), (XFS, 300)]) else {
        return;
    };
    let (count, length) = (8, 3 * MIB + 4099);
    split_files(&world, 2, count, length);
    let grows = File::create(world.path("grows")).expect("made");
    fs::create_dir(world.path("empty")).expect("made");
    // Only the named folder.
    let report = defragged(&world, &[world.path("empty")]);
    assert_eq!(report["file_count"], 0, "{report}");
    let split = (0..count)
        .map(|seed| format!("s{seed}"))
        .find(|name| world.members_of(name).len() > 1)
        .expect("one is split");
    let report = defragged(&world, &[world.path(&split)]);
    assert_eq!(report["file_count"], 1, "{report}");
    assert_eq!(report["before"]["segment_count"], 2, "{report}");
    assert_eq!(report["after"]["segment_count"], 1, "{report}");
    assert_eq!(world.members_of(&split).len(), 1);
    let output = world.command(&["defrag"], &[PathBuf::from("/")]).output();
    let output = output.expect("rushes starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let is_done = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let (world, is_done, grows) = (&world, &is_done, &grows);
        let reader = scope.spawn(move || {
            while !is_done.load(Ordering::Acquire) {
                for seed in 0..count {
                    check(&world.path(format!("s{seed}")), seed, length);
                }
                rushes_tests::caches::drop("3");
            }
        });
        let writer = scope.spawn(move || {
            let mut at = 0;
            while !is_done.load(Ordering::Acquire) && at < 16 << 20 {
                grows
                    .write_all_at(&pattern::bytes(99, at, 100_000), at)
                    .expect("room");
                at += 100_000;
            }
            at
        });
        let ended = Ended(is_done);
        defragged(world, &[]);
        drop(ended);
        reader.join().expect("every byte is right");
        writer.join().expect("written")
    });
    // The kernel tells the mount of a close a moment later, and open files stay.
    let end = Instant::now() + Duration::from_secs(60);
    while (0..count).any(|seed| world.members_of(&format!("s{seed}")).len() > 1) {
        let report = defragged(&world, &[]);
        assert!(Instant::now() < end, "{report}");
    }
    drop(grows);
    world.end();
    mended(&world, "after the end");
    world.start();
    for seed in 0..count {
        check(&world.path(format!("s{seed}")), seed, length);
    }
    let grown = fs::read(world.path("grows")).expect("read");
    assert_eq!(grown.len() as u64, written);
    pattern::check(99, 0, &grown, "grows");
}

/// Sets the policy of a file, or of the files that are made in a folder from now on.
fn wish(world: &PoolWorld, name: &str, words: &str) {
    let (path, words) = (world.path(name), words.as_bytes());
    setxattr(path, "user.rushes.policy", words, XattrFlags::empty()).expect("a wish");
}

/// Two groups of two members, a folder whose files go over up to three groups, and disks for the
/// third one.
fn two_groups_of_three() -> Option<(PoolWorld, [PathBuf; 2])> {
    let world = build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100), (EXT4, 100)])?;
    fs::create_dir(world.path("reels")).expect("made");
    wish(&world, "reels", "striped=3x2 unit=64KiB group_unit=128KiB");
    let third = ["fifth", "sixth"].map(|name| world.disk(name, (EXT4, 100)));
    Some((world, third))
}

fn twice(members: usize) -> (String, usize) {
    (String::from("striped_twice"), members)
}

#[test]
fn stripes_become_wider_by_a_group_also_when_that_is_killed() {
    let Some((mut world, third)) = two_groups_of_three() else {
        return;
    };
    let lengths = [5 * MIB + 17, 20 * MIB + 4099, 300, 19 * MIB];
    for (seed, &length) in lengths.iter().enumerate() {
        put(&world.path(format!("reels/f{seed}")), seed as u64, length).expect("room");
        assert_eq!(world.shapes_of(&format!("reels/f{seed}")), [twice(4)]);
    }
    // A file with a hole longer than a piece, and bytes behind it.
    let hole = File::create(world.path("reels/hole")).expect("made");
    hole.write_all_at(b"start", 0).expect("room");
    hole.write_all_at(b"end", 70 << 20).expect("room");
    drop(hole);
    world.end();
    let (report, code) = world.json(&["add"], &third);
    assert_eq!(code, Some(0), "{report}");
    let kill_count = kill_at_steps(&world, &["rebalance"], &[1, 3, 7, 16, 40]);
    assert!(kill_count > 12, "only {kill_count} kills");
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let (again, _) = world.json(&["rebalance"], &[]);
    assert_eq!(again["moved_count"], 0, "{again}");
    mended(&world, "at last");
    world.start();
    for (seed, &length) in lengths.iter().enumerate() {
        let name = format!("reels/f{seed}");
        assert_eq!(world.shapes_of(&name), [twice(6)], "{name}");
        check(&world.path(name), seed as u64, length);
    }
    let bytes = fs::read(world.path("reels/hole")).expect("read");
    assert!(bytes.len() == (70 << 20) + 3 && bytes.starts_with(b"start\0"));
    assert!(bytes.ends_with(b"\0end") && bytes[5..70 << 20].iter().all(|&byte| byte == 0));
    let blocks = fs::metadata(world.path("reels/hole")).expect("there");
    assert_eq!(world.shapes_of("reels/hole"), [twice(6)], "{blocks:?}");
}

/// Waits until `status` is so; otherwise the test fails with it.
fn until(world: &PoolWorld, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let (report, _) = world.json(&["status"], &[]);
        if is_so(&report[0]) {
            return report[0].clone();
        }
        assert!(
            Instant::now() < end,
            "never {what}: {report} {}",
            world.log()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn schedule(world: &PoolWorld, when: &str) {
    let (report, code) = world.json(&["policy", "--tidy", when], &[]);
    assert_eq!((&report["tidy"], code), (&json!(when), Some(0)), "{report}");
}

/// A pool that counts as idle after a second, with files in two segments.
fn idle_soon(count: u64, length: usize) -> Option<PoolWorld> {
    let mut world = PoolWorld::build(&[(EXT4, 300), (EXT4, 300), (EXT4, 300)])?;
    split_files(&world, 3, count, length);
    world.end();
    world.mount_options = vec!["--tidy-after", "1"];
    world.start();
    Some(world)
}

#[test]
fn a_pool_tidies_itself_when_nobody_asks_for_anything_and_says_what_it_did() {
    let (count, length) = (4, 3 * MIB + 17);
    let Some(mut world) = idle_soon(count, length) else {
        return;
    };
    let status = until(&world, "mounted", |status| {
        !status["tidy"]["waits_for"].is_null()
    });
    assert_eq!(
        status["tidy"]["schedule"], "off",
        "nobody has said that it may"
    );
    assert_eq!(status["tidy"]["last"], Value::Null);
    // While a program reads, nothing is moved.
    let name = world.path("s0");
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                check(&name, 0, length);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        schedule(&world, "idle");
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) {
            let status = until(&world, "asked", |status| {
                status["tidy"]["waits_for"] != "off"
            });
            assert_eq!(status["tidy"]["waits_for"], "asked", "{status}");
            assert_eq!(status["tidy"]["last"], Value::Null, "{status}");
        }
        is_done.store(true, Ordering::Release);
        reader.join().expect("every byte is right");
    });
    let status = until(&world, "tidied", |status| {
        status["tidy"]["last"]["is_whole"] == true
    });
    assert_eq!(
        status["tidy"]["last"]["defrag"]["moved_count"], count,
        "{status}"
    );
    until(&world, "at rest", |status| {
        status["tidy"]["waits_for"] == "done"
    });
    for seed in 0..count {
        assert_eq!(world.members_of(&format!("s{seed}")).len(), 1, "{seed}");
    }
    // A new member is a reason to begin anew.
    let new = world.disk("new", (EXT4, 300));
    let (report, code) = world.json(&["add"], &[new]);
    assert_eq!(code, Some(0), "{report}");
    until(&world, "tidied again", |status| {
        status["tidy"]["last"]["defrag"]["moved_count"] == 0
    });
    // The pool and its next mount keep the schedule and the last pass.
    world.end();
    mended(&world, "after the end");
    let (report, _) = world.json(&["status"], &[]);
    assert_eq!(report[0]["tidy"]["schedule"], "idle", "{report}");
    assert_eq!(report[0]["tidy"]["last"]["is_whole"], true, "{report}");
    schedule(&world, "off");
    for wrong in ["on", "25:00-03:00"] {
        let output = world.command(&["policy", "--tidy", wrong], &[]).output();
        assert_eq!(
            output.expect("rushes starts").status.code(),
            Some(2),
            "{wrong}"
        );
    }
    world.start();
    for seed in 0..count {
        check(&world.path(format!("s{seed}")), seed, length);
    }
}

#[test]
fn tidying_stops_for_whoever_asks_gives_way_to_commands_and_goes_on_after_a_kill() {
    let (count, length) = (5, 30 * MIB + 17);
    let Some(mut world) = idle_soon(count, length) else {
        return;
    };
    let tidies = |status: &Value| status["work"]["is_tidying"] == true;
    schedule(&world, "idle");
    until(&world, "tidying", tidies);
    // A program reads.
    let bytes = fs::read(world.path("s4")).expect("read");
    pattern::check(4, 0, &bytes, "s4");
    let status = until(&world, "stopped", |status| !tidies(status));
    assert_ne!(
        status["tidy"]["last"]["is_whole"], true,
        "it was at work: {status}"
    );
    // A command goes first, and gets no error that the pool is busy.
    until(&world, "tidying again", |status| {
        tidies(status) || status["tidy"]["last"]["is_whole"] == true
    });
    let (report, code) = world.json(&["defrag"], &[world.path("s3")]);
    assert_eq!(
        (code, &report["file_count"]),
        (Some(0), &json!(1)),
        "{report}"
    );
    assert_eq!(world.members_of("s3").len(), 1, "{report}");
    // Killed at work, it leaves no more than a killed move does, and the next mount goes on.
    until(&world, "tidying once more", |status| {
        tidies(status) || status["tidy"]["last"]["is_whole"] == true
    });
    world.kill();
    mended(&world, "after the kill");
    world.start();
    until(&world, "tidied", |status| {
        status["tidy"]["last"]["is_whole"] == true && status["tidy"]["waits_for"] == "done"
    });
    for seed in 0..count {
        let name = format!("s{seed}");
        assert_eq!(world.members_of(&name).len(), 1, "{name}");
        check(&world.path(name), seed, length);
    }
}

/// The files that a report says could not be read or moved, in order, each with a reason.
fn failed(report: &Value) -> Vec<String> {
    let all = report["failed"].as_array().expect("a list");
    let mut names = Vec::new();
    for one in all {
        assert!(!one["sentence"].as_str().expect("text").is_empty());
        names.push(one["file"].as_str().expect("text").to_owned());
    }
    assert_eq!(report["failed_count"], names.len(), "{report}");
    names.sort();
    names
}

#[test]
fn files_that_cannot_be_read_are_named_and_keep_nobody_from_the_others() {
    let Some(mut world) = build(&[(EXT4, 300), (EXT4, 300), (EXT4, 300)]) else {
        return;
    };
    let (count, length) = (5, 3 * MIB + 17);
    let others = occupy(&world, 2, MIB);
    split_files(&world, 2, count, length);
    fs::remove_file(others).expect("ours");
    let others = [0, 1].map(|member| occupy(&world, member, MIB));
    put(&world.path("away"), 9, length).expect("there is room");
    assert_eq!(world.members_of("away"), [2]);
    for path in others {
        fs::remove_file(path).expect("ours");
    }
    let others = occupy(&world, 2, MIB);
    put(&world.path("damaged"), 8, length).expect("there is room");
    assert_eq!(world.members_of("damaged").len(), 1);
    fs::remove_file(others).expect("ours");
    let object = world.object_of(&world.where_is("s1")["segments"][1]);
    world.end();
    // One file has a damaged layout, one an object without the mark of its file, one is on a member
    // that is away.
    damage_record(&world, "damaged");
    rustix::fs::removexattr(object, "trusted.rushes.object").expect("our own disk");
    world.unplug(2);
    let broken = ["away", "damaged", "s1"];
    // A disk fails at one moment: the file stays as it was.
    let strace = std::process::Command::new(needs::path_of("strace"))
        .args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .arg("inject=pwrite64:error=EIO:when=1")
        .arg(needs::path_of("rushes"))
        .args(world.command(&["defrag", "--json"], &[]).get_args())
        .output()
        .expect("strace starts");
    let report: Value = serde_json::from_slice(&strace.stdout).expect("a report");
    assert_eq!(strace.status.code(), Some(1), "{report}");
    assert_eq!(failed(&report).len(), 4, "{report}");
    assert_eq!(report["moved_count"], 3, "{report}");
    assert!(
        report.to_string().contains("Input/output error"),
        "{report}"
    );
    world.mount_options = vec!["--tidy-after", "1"];
    world.start();
    schedule(&world, "idle");
    let status = until(&world, "gone through", |status| {
        status["tidy"]["last"]["is_whole"] == true && status["tidy"]["waits_for"] == "done"
    });
    let last = &status["tidy"]["last"];
    assert_eq!(failed(last), broken, "{status}");
    assert_eq!(last["defrag"]["moved_count"], 1, "{status}");
    assert_eq!(last["trouble"], Value::Null, "{status}");
    let text = world.command(&["status"], &[]).output().expect("it starts");
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains("; 3 files could not be read or moved: "),
        "{text}"
    );
    for seed in (0..count).filter(|seed| *seed != 1) {
        let name = format!("s{seed}");
        assert_eq!(world.members_of(&name).len(), 1, "{name}");
        check(&world.path(name), seed, length);
    }
    for mounted in [true, false] {
        for words in [["defrag"], ["rebalance"]] {
            let (report, code) = world.json(&words, &[]);
            assert_eq!(
                (failed(&report), code),
                (broken.map(String::from).to_vec(), Some(1))
            );
            let text = world.command(&words, &[]).output().expect("it starts");
            let text = String::from_utf8_lossy(&text.stdout).into_owned();
            assert!(text.contains("\n  damaged: the layout record"), "{text}");
        }
        if mounted {
            world.end();
        }
    }
    world.plug(2, "loop");
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let report = defragged(&world, &[]);
    assert_eq!(failed(&report), [] as [&str; 0], "{report}");
    world.start();
    for seed in 0..count {
        let name = format!("s{seed}");
        assert_eq!(world.members_of(&name).len(), 1, "{name}");
        check(&world.path(name), seed, length);
    }
    check(&world.path("away"), 9, length);
    check(&world.path("damaged"), 8, length);
}

/// A file that continues on another member inside a block: the first object has the block's first
/// bytes, the second one the others behind zeroes. Only the layout says which object has which
/// bytes, and that is damaged.
#[test]
fn a_record_from_objects_alone_parts_them_inside_a_block() {
    let Some(mut world) = build(&[(EXT4, 300), (XFS, 300)]) else {
        return;
    };
    let (count, length) = (4, 3 * MIB + 17);
    split_files(&world, 2, count, length);
    let segments: Vec<Value> = (0..count)
        .map(|seed| world.where_is(&format!("s{seed}"))["segments"].clone())
        .collect();
    world.end();
    let mut moved = 0;
    for (seed, segments) in (0..).zip(&segments) {
        let end = segments[0]["end"].as_u64().expect("there is another");
        // As if the first member had had room for so many more bytes.
        let bytes = pattern::bytes(seed, end, 925);
        let write = |segment: &Value, bytes: &[u8]| {
            let object = File::options()
                .write(true)
                .open(world.object_of(segment))
                .expect("our own disk");
            object.write_all_at(bytes, end).expect("there is room");
            object.sync_all().expect("written");
        };
        if end % 4096 == 0 {
            write(&segments[0], &bytes);
            write(&segments[1], &[0; 925]);
            moved += 1;
        }
        damage_record(&world, &format!("s{seed}"));
    }
    assert!(moved > 0, "{segments:?}");
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.start();
    for seed in 0..count {
        check(&world.path(format!("s{seed}")), seed, length);
    }
}

/// Changes a byte of a file's layout.
fn damage_record(world: &PoolWorld, file: &str) {
    let stub = world.catalogue().join("tree").join(file);
    let name = "trusted.rushes.layout";
    let mut record = [0; 256];
    let length = rustix::fs::getxattr(&stub, name, &mut record[..]).expect("it has one");
    record[21] ^= 1;
    setxattr(&stub, name, &record[..length], XattrFlags::empty()).expect("our own disk");
}

/// The time at which a member's folders of objects last got or lost a name.
fn named_last(world: &PoolWorld, member: usize) -> (i64, i64) {
    let folders = fs::read_dir(world.member(member).join("pool/objects")).expect("listed");
    let seen = folders.map(|folder| folder.expect("listed").metadata().expect("known"));
    let times = seen.map(|seen| (seen.mtime(), seen.mtime_nsec()));
    times.max().expect("there are some")
}

#[test]
fn what_was_tried_in_vain_is_not_tried_again_until_the_file_or_the_room_is_another_one() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 160)]) else {
        return;
    };
    world.end();
    // The policy keeps the file on its member when others come.
    let (report, code) = world.json(&["policy", "--set", "class=a", "--class", "0=a"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.mount_options = vec!["--tidy-after", "1"];
    world.start();
    let length = 12 * MIB + 17;
    let folders = in_pieces(&world, 1);
    put(&world.path("scattered"), 1, length).expect("there is room");
    let mut disks = 0;
    // A new member is a reason for a pass.
    let mut pass = |world: &PoolWorld, files: u64| {
        disks += 1;
        let new = world.disk(&format!("new{disks}"), (EXT4, 32));
        let (before, _) = world.json(&["status"], &[]);
        let before = before[0]["tidy"]["last"]["ended_unix_s"].as_u64();
        // `status` has the end of a pass in seconds.
        std::thread::sleep(Duration::from_millis(1100));
        let (report, code) = world.json(&["add"], &[new]);
        assert_eq!(code, Some(0), "{report}");
        schedule(world, "idle");
        let status = until(world, "gone through", |status| {
            let last = &status["tidy"]["last"];
            last["is_whole"] == true
                && status["tidy"]["waits_for"] == "done"
                && last["ended_unix_s"].as_u64() > before
        });
        assert_eq!(
            status["tidy"]["last"]["defrag"]["file_count"], files,
            "{status}"
        );
        status["tidy"]["last"]["defrag"]["moved_count"].clone()
    };
    let at_first = named_last(&world, 0);
    assert_eq!(pass(&world, 1), 0);
    let tried = named_last(&world, 0);
    assert!(tried > at_first, "it is scattered, and was not tried");
    for _ in 0..2 {
        assert_eq!(pass(&world, 1), 0);
        assert_eq!(named_last(&world, 0), tried, "tried again, in vain");
    }
    // The file has changed: it may be worth another try.
    let file = File::options().write(true).open(world.path("scattered"));
    let more = pattern::bytes(1, length as u64, MIB);
    let written = file.and_then(|file| {
        file.write_all_at(&more, length as u64)
            .and_then(|()| file.sync_all())
    });
    written.expect("there is room");
    let length = length + MIB;
    assert_eq!(pass(&world, 1), 0);
    let again = named_last(&world, 0);
    assert!(again > tried, "it changed, and was not tried");
    // A command tries it in any case.
    assert_eq!(defragged(&world, &[])["moved_count"], 0);
    let by_command = named_last(&world, 0);
    assert!(by_command > again, "a command did not try");
    // With more free room a pass tries it again.
    for folder in folders {
        fs::remove_dir_all(folder).expect("ours");
    }
    world.sync();
    assert_eq!(pass(&world, 1), 1);
    check(&world.path("scattered"), 1, length);
    world.end();
    mended(&world, "after the end");
}

#[test]
fn a_stripe_that_is_written_and_read_goes_on_over_a_group_that_comes_and_is_spread_over_it() {
    let Some((mut world, third)) = two_groups_of_three() else {
        return;
    };
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    let file = options.open(world.path("reels/f")).expect("made");
    let length = AtomicU64::new(0);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (world, file, length, is_done) = (&world, &file, &length, &is_done);
        let writer = scope.spawn(move || {
            let mut at = 0;
            while !is_done.load(Ordering::Acquire) && at < 120 << 20 {
                let bytes = pattern::bytes(9, at, 300_001);
                file.write_all_at(&bytes, at).expect("there is room");
                at += bytes.len() as u64;
                length.store(at, Ordering::Release);
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let reader = scope.spawn(move || {
            let mut bytes = vec![0; MIB];
            while !is_done.load(Ordering::Acquire) {
                let known = length.load(Ordering::Acquire);
                for at in (0..known).step_by(MIB) {
                    let count = MIB.min((known - at) as usize);
                    file.read_exact_at(&mut bytes[..count], at).expect("read");
                    pattern::check(9, at, &bytes[..count], "f");
                }
                rushes_tests::caches::drop("3");
            }
        });
        let grown = |by: u64| {
            let before = length.load(Ordering::Acquire);
            while length.load(Ordering::Acquire) < before + by && !writer.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        grown(8 << 20);
        assert_eq!(world.shapes_of("reels/f"), [twice(4)]);
        let (report, code) = world.json(&["add"], &third);
        assert_eq!(code, Some(0), "{report}");
        grown(2 << 20);
        assert_eq!(world.shapes_of("reels/f"), [twice(4), twice(6)]);
        let (report, code) = world.json(&["rebalance"], &[]);
        assert_eq!(code, Some(0), "{report}");
        assert!(number(&report, &["moved_bytes"]) >= 8 << 20, "{report}");
        assert_eq!(world.shapes_of("reels/f"), [twice(6), twice(6)]);
        is_done.store(true, Ordering::Release);
        writer.join().expect("written");
        reader.join().expect("every byte is right");
    });
    drop(file);
    world.end();
    mended(&world, "after the end");
    world.start();
    check(&world.path("reels/f"), 9, length.into_inner() as usize);
}

#[test]
fn a_mount_that_is_killed_while_it_makes_stripes_wider_loses_no_byte() {
    let Some((mut world, third)) = two_groups_of_three() else {
        return;
    };
    let lengths = [30 * MIB + 17, 25 * MIB + 4099, 40 * MIB];
    for (seed, &length) in lengths.iter().enumerate() {
        put(&world.path(format!("reels/f{seed}")), seed as u64, length).expect("room");
    }
    let (report, code) = world.json(&["add"], &third);
    assert_eq!(code, Some(0), "{report}");
    let mut kill_count = 0;
    for pieces in [1, 3, 2] {
        let mut rebalance = world.command(&["rebalance"], &[]).spawn().expect("starts");
        until(&world, "at work", |status| {
            status["work"]["moved_bytes"].as_u64() >= Some(pieces << 22) || status["work"].is_null()
        });
        kill_count += usize::from(rebalance.try_wait().expect("ours").is_none());
        world.kill();
        rebalance.wait().expect("ours");
        mended(&world, "after a kill");
        world.start();
    }
    assert!(kill_count > 0, "each was done before it was killed");
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.end();
    mended(&world, "at last");
    world.start();
    for (seed, &length) in lengths.iter().enumerate() {
        let name = format!("reels/f{seed}");
        assert_eq!(world.shapes_of(&name), [twice(6)], "{name}");
        check(&world.path(name), seed as u64, length);
    }
}

#[test]
fn a_pool_does_not_tidy_itself_while_a_stream_has_a_contract() {
    const FRAME_BYTES: usize = 500_000;
    let Some(mut world) = idle_soon(3, 3 * MIB) else {
        return;
    };
    let length = 60 * FRAME_BYTES;
    put(&world.path("clip.mov"), 9, length).expect("there is room");
    let rule = "[[rule]]\nmatch = \"**\"\nbitrate = \"100M\"\n";
    let daemon = world.served(3, rule);
    let file = File::open(world.path("clip.mov")).expect("opened");
    schedule(&world, "idle");
    let waits_for = |world: &PoolWorld| {
        let (report, _) = world.json(&["status"], &[]);
        assert_eq!(report[0]["tidy"]["last"], Value::Null, "{report}");
        report[0]["tidy"]["waits_for"].clone()
    };
    // Play its beginning again and again, until tidying waits for the contract.
    let mut frame = vec![0; FRAME_BYTES];
    let end = Instant::now() + Duration::from_secs(60);
    while waits_for(&world) != "promised" {
        rushes_tests::caches::drop("3");
        for at in (0..length as u64).step_by(FRAME_BYTES).take(30) {
            file.read_exact_at(&mut frame, at).expect("read");
            pattern::check(9, at, &frame, "clip.mov");
            std::thread::sleep(Duration::from_millis(40));
        }
        assert!(Instant::now() < end, "{:#}", daemon.status());
    }
    drop(file);
    until(&world, "tidied", |status| {
        status["tidy"]["last"]["is_whole"] == true
    });
    for seed in 0..3 {
        check(&world.path(format!("s{seed}")), seed, 3 * MIB);
    }
    world.end();
    mended(&world, "after the end");
    drop(daemon);
}

/// Sets the flag when it is dropped, also by a panic.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// All calls that a program may make on a file, many times, compared with a model in memory, while
/// it is defragged, drained and striped over more and more members.
#[test]
fn random_operations_beside_tidying_are_what_a_model_says() {
    let members = [
        (EXT4, 200),
        (XFS, 300),
        (BTRFS, 200),
        (EXT4, 200),
        (EXT4, 200),
    ];
    let Some(mut world) = PoolWorld::build(&members) else {
        return;
    };
    let daemon = world.served(5, "");
    let wishes = |file: usize, words: &str| wish(&world, &format!("f{file}"), words);
    let mut models = Vec::new();
    for file in 0..3 {
        let path = world.path(format!("f{file}"));
        models.push(Model::new(&path, 70 + file as u64, 9_000_000, 400_000));
        wishes(
            file,
            if file == 2 {
                "single"
            } else {
                "striped=2 unit=64KiB"
            },
        );
    }
    let is_done = AtomicBool::new(false);
    let done = |words: &[&str]| {
        let (report, code) = world.json(words, &[]);
        assert_eq!(code, Some(0), "{words:?}: {report}");
        report["moved_count"].as_u64().expect("a number")
    };
    let (widened, gathered) = std::thread::scope(|scope| {
        for model in &mut models {
            let is_done = &is_done;
            scope.spawn(move || {
                let mut step = 0;
                while !is_done.load(Ordering::Acquire) {
                    model.step(step);
                    if step % 61 == 60 {
                        model.reopen();
                    }
                    step += 1;
                }
            });
        }
        // Ends the programs, also by a panic.
        let _ended = Ended(&is_done);
        let (mut widened, mut gathered) = (0, 0);
        for width in 2..=5 {
            for file in 0..2 {
                wishes(file, &format!("striped={width} unit=64KiB"));
            }
            widened += done(&["rebalance"]);
            // A drain that is interrupted leaves files in two segments. A file that was truncated
            // to nothing at this moment is on no member.
            let member = world.members_of("f2").first().map_or(0, |one| *one);
            let member = member.to_string();
            let mut drain = world.command(&["drain", &member], &[]);
            let mut drain = drain
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("starts");
            until(&world, "draining", |status| {
                status["work"]["moved_bytes"].as_u64() > Some(0) || status["work"].is_null()
            });
            let _ = drain.kill();
            drain.wait().expect("ours");
            until(&world, "free", |status| status["work"].is_null());
            done(&["drain", &member, "--cancel"]);
            gathered += done(&["defrag"]);
        }
        is_done.store(true, Ordering::Release);
        (widened, gathered)
    });
    println!("{widened} were made wider, {gathered} brought together");
    assert!(widened >= 3, "only {widened} were made wider");
    let ended: Vec<(PathBuf, Vec<u8>)> = models.into_iter().map(Model::end).collect();
    for file in 0..2 {
        let shapes = world.shapes_of(&format!("f{file}"));
        let is_wide = shapes.iter().any(|(_, members)| *members == 5);
        assert!(is_wide || shapes.is_empty(), "{shapes:?}");
    }
    world.end();
    mended(&world, "after the end");
    world.start();
    for (path, bytes) in ended {
        assert!(
            fs::read(&path).expect("read") == bytes,
            "{}",
            path.display()
        );
    }
    drop(daemon);
}
