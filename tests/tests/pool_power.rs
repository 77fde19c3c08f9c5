// SPDX-License-Identifier: Apache-2.0
//! The disks of a pool when the power goes at a chosen instant: a copy of all that the kernel has
//! sent to a disk until then is mounted beside it.
//!
//! lab/tests/pool_power.rs cuts the power of all disks at random instants; it found the faults that
//! these tests keep away.

use rushes_tests::disk::{attach, run, said};
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS, check, put};
use rustix::fs::{Mode, OFlags, XattrFlags, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const UNIT: usize = 64 << 10;

/// Mounts a copy of the disk of this name as it is at this instant.
fn cut(world: &PoolWorld, name: &str, kind: &str) -> PathBuf {
    let image = world.scratch.path().join(format!("{name}.cut"));
    run(Command::new("cp")
        .args(["--sparse=always", "--reflink=auto"])
        .arg(world.scratch.path().join(format!("{name}.img")))
        .arg(&image));
    let folder = world.scratch.folder(&format!("{name}-cut"));
    if kind == "btrfs" {
        mount_second_btrfs(&image, &folder);
        return folder.join("pool");
    }
    let options = if kind == "xfs" { "loop,nouuid" } else { "loop" };
    run(Command::new("mount")
        .args(["-t", kind, "-o", options])
        .arg(&image)
        .arg(&folder));
    folder.join("pool")
}

/// The kernel takes a second btrfs of one identity for another file system, unless it remembers
/// the loop device from an earlier btrfs: then the mount fails with "File exists".
fn mount_second_btrfs(image: &Path, folder: &Path) {
    let device = attach(image, &[]).expect("a loop device");
    // It fails when nothing is remembered.
    Command::new("btrfs")
        .args(["device", "scan", "--forget", &device])
        .output()
        .expect("btrfs starts");
    let mounted = Command::new("mount").arg(&device).arg(folder).output();
    // The device goes with its mount, or at once.
    run(Command::new("losetup").args(["--detach", &device]));
    let mounted = mounted.expect("mount starts");
    assert!(mounted.status.success(), "{}", said(&mounted));
}

fn objects(world: &PoolWorld, file: &Path) -> Vec<String> {
    let output = Command::new(rushes_tests::needs::path_of("rushes"))
        .args(["pool", "where", "--json"])
        .arg(file)
        .output()
        .expect("rushes starts");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let segments = report[0]["segments"].as_array().expect("a list").clone();
    let objects = segments
        .iter()
        .flat_map(|segment| segment["objects"].as_array().expect("a list").clone());
    let prefix = world.scratch.path().display().to_string();
    objects
        .map(|object| object["path"].as_str().expect("text").replace(&prefix, ""))
        .collect()
}

#[test]
fn fdatasync_makes_the_first_place_of_a_file_durable_that_had_its_length_before() {
    let Some(world) = PoolWorld::build(&[(EXT4, 100)]) else {
        return;
    };
    // As clients copy: the length first, then the bytes.
    let path = world.path("copied");
    let file = File::create(&path).expect("made");
    file.set_len(1 << 20).expect("made longer");
    file.sync_all().expect("synced");
    file.write_all_at(&pattern::bytes(3, 0, 8192), 0)
        .expect("room");
    file.sync_data().expect("synced");
    let catalogue = cut(&world, "catalogue", "ext4");
    let found = objects(&world, &catalogue.join("tree/copied"));
    assert_eq!(found, objects(&world, &path));
    assert_eq!(found.len(), 1);
}

/// Writes to a file that is opened with these flags are durable when they return: bytes, length and
/// the layout that leads to them.
fn written_is_durable(flags: OFlags) {
    let Some(world) = PoolWorld::build(&[(EXT4, 100)]) else {
        return;
    };
    let path = world.path("log");
    let file = rustix::fs::open(&path, OFlags::CREATE | flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.expect("made"));
    // Aligned, as O_DIRECT requires.
    let mut memory = vec![0; 3 * 4096];
    let start = memory.as_ptr().align_offset(4096);
    let bytes = &mut memory[start..start + 8192];
    bytes.copy_from_slice(&pattern::bytes(3, 0, 8192));
    file.write_all_at(&bytes[..4096], 0).expect("room");
    file.write_all_at(&bytes[4096..], 4096).expect("room");
    let catalogue = cut(&world, "catalogue", "ext4");
    let member = cut(&world, "m0", "ext4");
    let stub = catalogue.join("tree/log");
    assert_eq!(fs::metadata(&stub).expect("it is there").len(), 8192);
    let found = objects(&world, &stub);
    assert_eq!(found, objects(&world, &path), "{flags:?}");
    let below = found[0].strip_prefix("/m0/pool/").expect("on the member");
    check(&member.join(below), 3, 8192);
}

#[test]
fn write_through_an_open_for_writing_alone_is_durable_when_it_is_answered() {
    for flags in [OFlags::SYNC, OFlags::DSYNC, OFlags::DSYNC | OFlags::DIRECT] {
        written_is_durable(OFlags::WRONLY | flags);
    }
}

#[test]
fn write_through_an_open_for_both_is_durable_when_it_is_answered() {
    for flags in [OFlags::SYNC, OFlags::DSYNC, OFlags::DSYNC | OFlags::DIRECT] {
        written_is_durable(OFlags::RDWR | flags);
    }
}

#[test]
fn direct_write_that_is_sent_by_aio_is_durable_when_it_is_answered() {
    let Some(world) = PoolWorld::build(&[(EXT4, 100)]) else {
        return;
    };
    let path = world.path("database");
    let length = 256 << 10;
    put(&path, 7, length).expect("room");
    File::open(&path)
        .and_then(|file| file.sync_all())
        .expect("synced");
    // Reads among the writes: else fio opens for writing alone.
    let fio = [
        "--name=aio",
        "--ioengine=libaio",
        "--iodepth=8",
        "--direct=1",
        "--sync=dsync",
    ];
    run(Command::new("fio")
        .args(fio)
        .args([
            "--rw=randrw",
            "--rwmixwrite=90",
            "--bs=4k",
            "--refill_buffers",
        ])
        .arg(format!("--size={length}"))
        .arg(format!("--filename={}", path.display()))
        .current_dir(world.scratch.path()));
    let member = cut(&world, "m0", "ext4");
    let found = objects(&world, &path);
    let below = found[0].strip_prefix("/m0/pool/").expect("on the member");
    let kept = fs::read(member.join(below)).expect("read");
    assert!(kept == fs::read(&path).expect("read"), "not all is there");
}

/// A stub goes when its objects are gone for good: no power cut brings back an object without a
/// stub.
fn removed_objects_stay_removed(made: Made, kind: &str) {
    let Some(world) = PoolWorld::build(&[made]) else {
        return;
    };
    // Several, so that they lie in several folders.
    let names: Vec<String> = (0..8).map(|number| format!("f{number}")).collect();
    for name in &names {
        put(&world.path(name), 5, 100_000).expect("room");
    }
    let member = world.member(0);
    rustix::fs::syncfs(File::open(&member).expect("it is mounted")).expect("synced");
    let known: Vec<String> = names
        .iter()
        .flat_map(|name| objects(&world, &world.path(name)))
        .collect();
    assert_eq!(known.len(), 8);
    for name in &names {
        fs::remove_file(world.path(name)).expect("removed");
    }
    let removed = world.catalogue().join("removed");
    let end = Instant::now() + Duration::from_secs(20);
    while fs::read_dir(&removed).expect("listed").next().is_some() {
        assert!(Instant::now() < end, "they are not buried");
        std::thread::sleep(Duration::from_millis(5));
    }
    let cut = cut(&world, "m0", kind);
    for object in known {
        let below = object.strip_prefix("/m0/pool/").expect("on the member");
        assert!(!cut.join(below).exists(), "{kind}: {object} is back");
    }
}

#[test]
fn removed_file_takes_its_objects_with_it_for_good_on_ext4() {
    removed_objects_stay_removed((EXT4, 100), "ext4");
}

#[test]
fn removed_file_takes_its_objects_with_it_for_good_on_xfs() {
    removed_objects_stay_removed((XFS, 300), "xfs");
}

#[test]
fn removed_file_takes_its_objects_with_it_for_good_on_btrfs() {
    removed_objects_stay_removed((BTRFS, 200), "btrfs");
}

/// A power cut has left a part of a stripe and not its file: the part gets a name, with its bytes
/// at their places in the file.
#[test]
fn stripe_that_is_not_whole_is_put_aside_with_its_bytes_where_they_were() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let words = b"striped=3 unit=64KiB";
    setxattr(
        world.path(""),
        "user.rushes.policy",
        words,
        XattrFlags::empty(),
    )
    .expect("a wish");
    let length = 7 * UNIT + 100;
    put(&world.path("gone"), 4, length).expect("room");
    put(&world.path("kept"), 6, length).expect("room");
    let known = objects(&world, &world.path("gone"));
    assert_eq!(known.len(), 3);
    world.end();
    fs::remove_file(world.catalogue().join("tree/gone")).expect("ours");
    let second = world.scratch.path().join(&known[1][1..]);
    fs::remove_file(second).expect("ours");
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!((code, &report["findings"]), (Some(0), &json!([])));
    world.start();
    check(&world.path("kept"), 6, length);
    let lost = fs::read_dir(world.path("lost+found")).expect("it is there");
    let lost: Vec<PathBuf> = lost.flatten().map(|entry| entry.path()).collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    let found = fs::read(&lost[0]).expect("it can be read");
    assert!(found.len() <= length, "{}", found.len());
    for (number, unit) in found.chunks(UNIT).enumerate() {
        match number % 3 {
            1 => assert!(unit.iter().all(|&byte| byte == 0), "unit {number}"),
            _ => pattern::check(4, (number * UNIT) as u64, unit, "aside"),
        }
    }
    assert!(found.len() > 6 * UNIT);
    // It can be removed as any other file.
    fs::remove_file(&lost[0]).expect("removed");
    world.end();
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!((code, &report["object_count"]), (Some(0), &json!(3)));
}
