// SPDX-License-Identifier: Apache-2.0
//! Files that are striped over members, through the mount: every byte is where it was written, also
//! when members fill, are drained or lost, and the mount is killed.

use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, PoolWorld, XFS, check, killed_at, put};
use rushes_tests::random::Random;
use rustix::fs::{FallocateFlags, SeekFrom, XattrFlags, fallocate, seek, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const MIB: usize = 1 << 20;
const EIO: i32 = 5;

/// Sets a policy for all files that are made in a folder from now on.
fn wish(folder: &Path, words: &str) {
    setxattr(
        folder,
        "user.rushes.policy",
        words.as_bytes(),
        XattrFlags::empty(),
    )
    .expect("a wish");
}

/// Mounts anew, so that reads come from the members' disks.
fn again(world: &mut PoolWorld) {
    world.end();
    world.assert_sound("after the mount has ended");
    world.start();
}

#[test]
fn a_striped_file_is_spread_evenly_and_its_members_have_their_shares() {
    let Some(mut world) = PoolWorld::build(&[
        (EXT4, 100),
        (XFS, 300),
        (BTRFS, 200),
        (EXT4, 100),
        (EXT4, 100),
    ]) else {
        return;
    };
    fs::create_dir(world.path("reels")).expect("made");
    wish(&world.path("reels"), "striped=3 unit=64KiB");
    fs::create_dir(world.path("reels/day")).expect("made");
    fs::create_dir(world.path("two")).expect("made");
    wish(
        &world.path("two"),
        "striped=2x2 unit=64KiB group_unit=128KiB",
    );
    let length = 5 * MIB + 17;
    put(&world.path("reels/day/a.mov"), 1, length).expect("room");
    put(&world.path("two/b.mov"), 2, length).expect("room");
    put(&world.path("plain.mov"), 3, length).expect("room");
    assert_eq!(
        world.shapes_of("reels/day/a.mov"),
        [(String::from("striped"), 3)]
    );
    assert_eq!(
        world.shapes_of("two/b.mov"),
        [(String::from("striped_twice"), 4)]
    );
    assert_eq!(world.shapes_of("plain.mov"), [(String::from("single"), 1)]);
    assert_eq!(world.members_of("reels/day/a.mov").len(), 3);
    assert_eq!(world.members_of("two/b.mov").len(), 4);
    for (name, count) in [("reels/day/a.mov", 3), ("two/b.mov", 4)] {
        let report = world.where_is(name);
        let objects = report["segments"][0]["objects"].as_array().expect("a list");
        let sizes: Vec<u64> = objects
            .iter()
            .map(|object| {
                let path = object["path"].as_str().expect("text");
                fs::metadata(path).expect("it is there").len()
            })
            .collect();
        assert_eq!(sizes.iter().sum::<u64>(), length as u64, "{name}");
        let even = length as u64 / count;
        assert!(
            sizes.iter().all(|&size| size.abs_diff(even) <= 256 << 10),
            "{name}: {sizes:?}"
        );
    }
    again(&mut world);
    check(&world.path("reels/day/a.mov"), 1, length);
    check(&world.path("two/b.mov"), 2, length);
    check(&world.path("plain.mov"), 3, length);
    // A removed file takes its objects with it.
    fs::remove_file(world.path("reels/day/a.mov")).expect("removed");
    fs::remove_file(world.path("two/b.mov")).expect("removed");
    again(&mut world);
    assert_eq!(
        fs::read_dir(world.path("reels/day"))
            .expect("listed")
            .count(),
        0
    );
}

/// All calls that a program may make on a file, many times, compared with a model in memory.
#[test]
fn whatever_is_done_to_a_striped_file_reads_back() {
    let members = [(EXT4, 100), (XFS, 300), (BTRFS, 200), (EXT4, 100)];
    let Some(mut world) = PoolWorld::build(&members) else {
        return;
    };
    for (round, (words, shape)) in [
        ("striped unit=4KiB", ("striped", 4)),
        ("striped=2 unit=64KiB", ("striped", 2)),
        (
            "striped=2x2 unit=4KiB group_unit=16KiB",
            ("striped_twice", 4),
        ),
        (
            "striped=2x2 unit=64KiB group_unit=64KiB",
            ("striped_twice", 4),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = world.path(format!("d{round}"));
        fs::create_dir(&folder).expect("made");
        wish(&folder, words);
        let mut random = Random(7 + round as u64);
        let mut model: Vec<u8> = Vec::new();
        let mut file = open(&folder.join("f"), true);
        for step in 0..400u64 {
            let at = random.below(700_000);
            let length = random.below(90_000) as usize;
            match random.below(10) {
                0..=3 => {
                    let bytes = pattern::bytes(step, at, length);
                    file.write_all_at(&bytes, at).expect("there is room");
                    let end = at as usize + length;
                    if length > 0 && model.len() < end {
                        model.resize(end, 0);
                    }
                    if length > 0 {
                        model[at as usize..end].copy_from_slice(&bytes);
                    }
                }
                4 => {
                    file.set_len(at).expect("cut or lengthened");
                    model.resize(at as usize, 0);
                }
                5 if length > 0 => {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    fallocate(&file, flags, at, length as u64).expect("a hole");
                    let end = model.len().min(at as usize + length);
                    if (at as usize) < end {
                        model[at as usize..end].fill(0);
                    }
                }
                6 if length > 0 => {
                    fallocate(&file, FallocateFlags::empty(), at, length as u64).expect("room");
                    let end = at as usize + length;
                    model.resize(model.len().max(end), 0);
                }
                7 => {
                    // Written bytes are in ranges that the mount reports as data; a range that it
                    // reports as a hole is zero.
                    if let Ok(hole) = seek(&file, SeekFrom::Hole(at)) {
                        let data = seek(&file, SeekFrom::Data(hole));
                        let end = data.map_or(model.len(), |data| data as usize);
                        let hole = (hole as usize).min(end);
                        assert!(
                            model[hole..end].iter().all(|&byte| byte == 0),
                            "{words} {step}"
                        );
                    }
                }
                8 if step % 40 == 8 => {
                    file.sync_all().expect("synced");
                    drop(file);
                    again(&mut world);
                    file = open(&folder.join("f"), false);
                }
                _ => {
                    let mut found = vec![0; length];
                    let count = read_at(&file, &mut found, at);
                    let end = model.len().min(at as usize + length);
                    let expected = model.get(at as usize..end).unwrap_or_default();
                    assert!(found[..count] == *expected, "{words}: step {step} at {at}");
                }
            }
        }
        drop(file);
        again(&mut world);
        let found = world.shapes_of(&format!("d{round}/f"));
        assert_eq!(found, [(shape.0.to_owned(), shape.1)], "{words}");
        assert!(
            fs::read(folder.join("f")).expect("read") == model,
            "{words}"
        );
        fs::copy(folder.join("f"), folder.join("copy")).expect("room");
        assert!(
            fs::read(folder.join("copy")).expect("read") == model,
            "{words}"
        );
    }
}

fn open(path: &Path, create: bool) -> File {
    File::options()
        .read(true)
        .write(true)
        .create(create)
        .open(path)
        .expect("opened")
}

fn read_at(file: &File, into: &mut [u8], at: u64) -> usize {
    let mut done = 0;
    while done < into.len() {
        match file
            .read_at(&mut into[done..], at + done as u64)
            .expect("read")
        {
            0 => break,
            count => done += count,
        }
    }
    done
}

#[test]
fn a_stripe_goes_on_over_the_members_that_have_room() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 150), (EXT4, 110), (EXT4, 190)]) else {
        return;
    };
    wish(&world.path(""), "striped unit=64KiB");
    let (file, length) = world.fill("long.mov", 3, 500 << 20);
    file.sync_all().expect("what was written fits");
    drop(file);
    let shapes = world.shapes_of("long.mov");
    assert_eq!(shapes[0], (String::from("striped"), 3), "{shapes:?}");
    assert!(shapes.len() > 1, "{shapes:?}");
    for number in 0..3 {
        world.must_be_full(number);
    }
    again(&mut world);
    check(&world.path("long.mov"), 3, length as usize);
    // Overwrite in place, then truncate in the middle of the first stripe.
    let file = File::options()
        .write(true)
        .open(world.path("long.mov"))
        .expect("opened");
    file.write_all_at(&pattern::bytes(4, 100_000, MIB), 100_000)
        .expect("it has its room");
    file.set_len(30_000_001).expect("cut");
    drop(file);
    again(&mut world);
    let mut found = Vec::new();
    File::open(world.path("long.mov"))
        .and_then(|mut file| file.read_to_end(&mut found))
        .expect("read");
    assert_eq!(found.len(), 30_000_001);
    pattern::check(3, 0, &found[..100_000], "before");
    pattern::check(4, 100_000, &found[100_000..100_000 + MIB], "overwritten");
    pattern::check(3, 100_000 + MIB as u64, &found[100_000 + MIB..], "behind");
    put(&world.path("next.mov"), 5, 40 * MIB).expect("what was cut off is room again");
    check(&world.path("next.mov"), 5, 40 * MIB);
}

#[test]
fn a_member_that_is_away_costs_its_units_and_no_others() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100), (EXT4, 100)])
    else {
        return;
    };
    const UNIT: usize = 64 << 10;
    wish(&world.path(""), "striped=3 unit=64KiB");
    put(&world.path("f"), 1, 6 * UNIT).expect("room");
    let report = world.where_is("f");
    let away = report["segments"][0]["objects"][1]["member"].as_u64();
    let away = away.expect("a number") as usize;
    again(&mut world);
    world.unplug(away);
    let file = open(&world.path("f"), false);
    // A file that cannot be truncated on all its members is truncated on none.
    let cut = file.set_len(10).expect_err("a part of it is away");
    assert_eq!(cut.raw_os_error(), Some(EIO));
    let mut unit = vec![0; UNIT];
    file.read_exact_at(&mut unit, 2 * UNIT as u64)
        .expect("there");
    pattern::check(1, 2 * UNIT as u64, &unit, "f");
    let read = file.read_exact_at(&mut unit, 4 * UNIT as u64);
    assert_eq!(read.expect_err("away").raw_os_error(), Some(EIO));
    let end = 6 * UNIT as u64;
    // With a hole before it: bytes behind the end would have to be zero on all members.
    let hole = file.write_all_at(&unit, end + 2 * UNIT as u64);
    assert_eq!(hole.expect_err("away").raw_os_error(), Some(EIO));
    // Behind the end the other members take its bytes.
    let behind = pattern::bytes(1, end, 7 * UNIT);
    file.write_all_at(&behind, end)
        .expect("the others have room");
    file.sync_all().expect("synced");
    drop(file);
    world.plug(away, "loop");
    let found = fs::read(world.path("f")).expect("all is there again");
    assert_eq!(found.len(), 13 * UNIT);
    pattern::check(1, 0, &found, "f");
}

#[test]
fn a_member_with_stripes_is_emptied_and_removed() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100), (EXT4, 100)])
    else {
        return;
    };
    wish(&world.path(""), "striped=3 unit=64KiB");
    let length = 4 * MIB + 4097;
    for seed in 0..6 {
        put(&world.path(format!("f{seed}")), seed, length).expect("room");
    }
    let there = |world: &PoolWorld| {
        let all = (0..6).map(|seed| world.members_of(&format!("f{seed}")));
        all.filter(|members| members.contains(&1)).count()
    };
    assert!(there(&world) > 0, "nothing to move");
    world.end();
    if needs::all_there(&[Need::Program("strace")]) {
        for (call, count) in [
            ("fsetxattr", 1),
            ("pwrite64", 1),
            ("fsync", 2),
            ("fsetxattr", 2),
            ("fsync", 3),
            ("unlinkat", 1),
        ] {
            assert!(
                killed_at(&world.command(&["drain", "1"], &[]), call, count),
                "{call}"
            );
            let (report, code) = world.json(&["fsck", "--repair"], &[]);
            assert_eq!(code, Some(0), "drain killed at {call} {count}: {report}");
            world.assert_sound(call);
        }
    }
    let (report, code) = world.json(&["drain", "1"], &[]);
    assert_eq!(
        (&report["is_empty"], code),
        (&json!(true), Some(0)),
        "{report}"
    );
    world.assert_sound("after the drain");
    let (report, code) = world.json(&["remove", "1"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.start();
    assert_eq!(there(&world), 0);
    for seed in 0..6 {
        check(&world.path(format!("f{seed}")), seed, length);
        // Still on three disks: the member that had no object of the file took the drained one.
        assert_eq!(world.members_of(&format!("f{seed}")), [0, 2, 3]);
    }
}

#[test]
fn a_damaged_record_and_a_lost_catalogue_cost_no_byte_of_a_stripe() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (XFS, 300), (BTRFS, 200)]) else {
        return;
    };
    wish(&world.path(""), "striped unit=64KiB");
    let length = 3 * MIB + 70_001;
    for seed in 0..4 {
        put(&world.path(format!("f{seed}")), seed, length).expect("room");
    }
    // The log of names is a second behind at most.
    std::thread::sleep(Duration::from_millis(2500));
    world.end();
    damage_record(&world.catalogue().join("tree/f1"));
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.assert_sound("after the record was written anew");
    world.start();
    check(&world.path("f1"), 1, length);
    // Without one of its objects fsck cannot know which byte is where, and mends nothing.
    let report = world.where_is("f2");
    let object = report["segments"][0]["objects"][1]["path"]
        .as_str()
        .expect("text");
    let object = PathBuf::from(object);
    world.end();
    let kept = world.scratch.path().join("kept");
    let mark = attribute(&object, "trusted.rushes.object");
    fs::copy(&object, &kept).expect("copied");
    fs::remove_file(&object).expect("ours");
    damage_record(&world.catalogue().join("tree/f2"));
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_ne!(code, Some(0), "{report}");
    let findings = report["findings"].as_array().expect("a list");
    let states: Vec<&Value> = findings.iter().map(|finding| &finding["state"]).collect();
    assert_eq!(states, ["open"], "{report}");
    fs::copy(&kept, &object).expect("copied back");
    setxattr(&object, "trusted.rushes.object", &mark, XattrFlags::empty()).expect("root");
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.assert_sound("after the object came back");
    // The catalogue is lost, and with it a file that no log of names has; most of its stripe is
    // empty.
    world.start();
    put(&world.path("late"), 9, 90_001).expect("room");
    world.kill();
    let dead = Command::new("umount")
        .arg("--lazy")
        .arg(world.path(""))
        .status();
    assert!(dead.expect("umount starts").success());
    world.lose_catalogue();
    let members: Vec<PathBuf> = (0..3).map(|at| world.member(at).join("pool")).collect();
    let (report, code) = world.json(&["rescue"], &members);
    assert_eq!(code, Some(0), "{report}");
    world.assert_sound("after the rescue");
    world.start();
    for seed in 0..4 {
        check(&world.path(format!("f{seed}")), seed, length);
        assert_eq!(
            world.shapes_of(&format!("f{seed}")),
            [(String::from("striped"), 3)]
        );
    }
    let lost = fs::read_dir(world.path("lost+found"));
    let lost = lost.into_iter().flatten().flatten().map(|one| one.path());
    let late = lost
        .chain([world.path("late")])
        .next()
        .expect("one of them");
    check(&late, 9, 90_001);
}

fn attribute(path: &Path, name: &str) -> Vec<u8> {
    let mut value = vec![0; 1024];
    let count = rustix::fs::getxattr(path, name, &mut value[..]).expect("it has one");
    value.truncate(count);
    value
}

fn damage_record(stub: &Path) {
    let mut record = attribute(stub, "trusted.rushes.layout");
    record[4] ^= 0xff;
    setxattr(stub, "trusted.rushes.layout", &record, XattrFlags::empty()).expect("root");
}

#[test]
fn a_mount_that_is_killed_while_it_stripes_leaves_nothing_that_cannot_be_mended() {
    // A fast writer leaves each member more than 64 MiB: a stripe leaves out one that has less.
    let Some(mut world) = PoolWorld::build(&[(EXT4, 400), (EXT4, 406), (EXT4, 400)]) else {
        return;
    };
    wish(&world.path(""), "striped unit=64KiB");
    let mut random = Random(11);
    let mut whole: Vec<(u64, usize)> = Vec::new();
    let mut striped = 0;
    for round in 0..6u64 {
        let folder = world.path("");
        let mut next = random.clone();
        let put_count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&put_count);
        let writer = std::thread::spawn(move || {
            let mut done = Vec::new();
            for number in 0.. {
                let (seed, length) = (round * 100 + number, next.below(2 << 20) as usize);
                let path = folder.join(format!("f{seed}"));
                // Remove every other file at once: a kill finds a removal as often as a file.
                if put(&path, seed, length).is_err() {
                    return (done, seed);
                }
                counted.fetch_add(1, Ordering::Relaxed);
                if number % 2 == 1 {
                    if fs::remove_file(&path).is_err() {
                        return (done, seed);
                    }
                } else {
                    done.push((seed, length));
                }
            }
            unreachable!("it ends with the mount")
        });
        // Kill after three files at least, however slow the machine is.
        while put_count.load(Ordering::Relaxed) < 3 && !writer.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(random.below(350)));
        world.kill();
        let (done, broken) = writer.join().expect("it ends with the mount");
        striped += usize::from(done.len() > 1);
        whole.extend(done);
        let (report, code) = world.json(&["fsck", "--repair"], &[]);
        assert_eq!(code, Some(0), "round {round}: {report}");
        world.assert_sound("mended");
        let dead = Command::new("umount")
            .arg("--lazy")
            .arg(world.path(""))
            .status();
        assert!(dead.expect("umount starts").success());
        world.start();
        for &(seed, length) in &whole {
            check(&world.path(format!("f{seed}")), seed, length);
            if length > 0 {
                let shape = (String::from("striped"), 3);
                assert_eq!(world.shapes_of(&format!("f{seed}")), [shape]);
            }
        }
        // Make room for the next round.
        for (seed, _) in whole.drain(..) {
            fs::remove_file(world.path(format!("f{seed}"))).expect("removed");
        }
        let _ = fs::remove_file(world.path(format!("f{broken}")));
        let _ = fs::remove_dir_all(world.path("lost+found"));
        let left = fs::read_dir(world.path("")).expect("listed").count();
        assert_eq!(left, 0, "round {round}");
    }
    assert!(striped > 2, "hardly anything was written");
}
