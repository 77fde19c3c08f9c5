// SPDX-License-Identifier: Apache-2.0
//! Files without a sync: making them waits for no disk, and a power cut that takes their objects
//! alone takes no byte that was promised.

use rushes_tests::disk::run;
use rushes_tests::needs::{self, Need};
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LENGTH: usize = 1 << 20;
const EIO: i32 = 5;
/// Within this time a mount settles files without a sync by itself, also on a slow machine.
const SETTLED_BY: Duration = Duration::from_secs(110);
/// Offset of the flags in a layout; flag 1 marks an unsettled file.
const FLAGS: usize = 22;
/// Field of /sys/dev/block/…/stat: flush requests of the device.
const FLUSHES: usize = 15;

fn make(world: &PoolWorld, name: &str, seed: u64) -> File {
    let mut file = File::create(world.path(name)).expect("made");
    file.write_all(&pattern::bytes(seed, 0, LENGTH))
        .expect("there is room");
    file
}

fn read(world: &PoolWorld, name: &str) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(world.path(name))?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Paths of all objects on member 0.
fn objects(world: &PoolWorld) -> Vec<PathBuf> {
    let folders = fs::read_dir(world.member(0).join("pool/objects")).expect("listed");
    let names =
        folders.flat_map(|folder| fs::read_dir(folder.expect("read").path()).expect("listed"));
    names.map(|name| name.expect("read").path()).collect()
}

fn flush_count(folder: &Path) -> u64 {
    let device = fs::metadata(folder).expect("mounted").dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"));
    let stat = stat.expect("the kernel counts");
    let count = stat.split_whitespace().nth(FLUSHES).expect("flushes, too");
    count.parse().expect("a number")
}

/// Removes objects by hand, as a power cut would, and keeps the layouts.
fn lose_objects(world: &PoolWorld, but: &[PathBuf]) {
    for object in objects(world) {
        if !but.contains(&object) {
            fs::remove_file(object).expect("ours");
        }
    }
}

#[test]
fn what_nobody_synced_reads_as_zeroes_when_its_object_is_gone_and_what_was_synced_is_missed() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    make(&world, "synced", 1).sync_all().expect("synced");
    let kept = objects(&world);
    drop(make(&world, "never", 2));
    world.kill();
    lose_objects(&world, &kept);
    world.start();
    assert_eq!(read(&world, "never").expect("no loss"), vec![0; LENGTH]);
    pattern::check(1, 0, &read(&world, "synced").expect("there"), "synced");
    assert!(world.log().contains("never synced"), "{}", world.log());
    // From then on it is a file as any other.
    drop(make(&world, "never", 3));
    pattern::check(3, 0, &read(&world, "never").expect("there"), "never");

    // A clean end of the mount settles all files.
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
    lose_objects(&world, &[]);
    world.start();
    for name in ["never", "synced"] {
        let told = read(&world, name).map(|bytes| bytes.len());
        let code = told.as_ref().err().and_then(std::io::Error::raw_os_error);
        assert_eq!(code, Some(EIO), "{name} is lost: {told:?}");
    }
}

#[test]
fn making_files_flushes_no_disk_and_syncing_them_does() {
    let Some(world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    run(Command::new("sync").arg("-f").arg(world.member(0)));
    let count = 120;
    let before = flush_count(&world.member(0));
    let start = Instant::now();
    let files: Vec<File> = (0..count)
        .map(|seed| make(&world, &format!("f{seed}"), seed))
        .collect();
    let made = flush_count(&world.member(0)) - before;
    // The file system commits its journal and the log of names is synced by time, not by file.
    let by_time = (3 * start.elapsed().as_secs()).min(count / 3);
    assert!(made < count / 2 + by_time, "{made} flushes");
    for file in &files {
        file.sync_all().expect("synced");
    }
    let synced = flush_count(&world.member(0)) - before - made;
    assert!(synced >= count, "{synced} flushes");
}

/// The flag in the layout of a file now.
fn is_unsettled(world: &PoolWorld, name: &str) -> bool {
    let path = world.catalogue().join("tree").join(name);
    let mut record = [0; 256];
    let length = rustix::fs::getxattr(path, "trusted.rushes.layout", &mut record[..]);
    assert!(length.expect("it has one") > FLAGS);
    record[FLAGS] & 1 == 1
}

fn wait_until_settled(world: &PoolWorld, name: &str) {
    let end = Instant::now() + SETTLED_BY;
    while is_unsettled(world, name) {
        assert!(Instant::now() < end, "{name}: {}", world.log());
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The flag in the newest log of names, in the last entry of the only file.
fn is_unsettled_in_the_log(world: &PoolWorld) -> bool {
    let folder = world.member(0).join("pool/names");
    let logs = fs::read_dir(folder).expect("it has logs");
    let newest = logs.map(|log| log.expect("read").path()).max();
    let bytes = fs::read(newest.expect("there is one")).expect("read");
    let last = bytes.windows(3).rposition(|part| part == b"RSL");
    bytes[last.expect("of a file") + FLAGS] & 1 == 1
}

#[test]
fn members_are_told_that_a_file_is_settled() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    let file = make(&world, "f", 1);
    // The log is a second behind.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(is_unsettled_in_the_log(&world), "that was told before");
    file.sync_all().expect("synced");
    assert!(!is_unsettled(&world, "f"));
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!is_unsettled_in_the_log(&world));
    world.kill();
}

#[test]
fn what_a_killed_mount_left_unsettled_is_settled_by_the_next_one_though_nobody_opens_it() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    drop(make(&world, "f", 1));
    world.kill();
    assert!(is_unsettled(&world, "f"));
    world.start();
    wait_until_settled(&world, "f");
    pattern::check(1, 0, &read(&world, "f").expect("there"), "f");
    // The member's log of names says so, too.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!is_unsettled_in_the_log(&world));
}

#[test]
fn a_disk_that_stalls_keeps_no_file_of_another_unsettled() {
    if !needs::all_there(&[Need::Program("rushes-lab")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    world.add_slow_disk(120 << 20);
    drop(make(&world, "one", 1));
    // Give the other disk more room.
    let mut filler = File::create(world.path("filler")).expect("made");
    filler
        .write_all(&vec![1; 130 * LENGTH])
        .and_then(|()| filler.sync_all())
        .expect("there is room");
    drop(make(&world, "other", 2));
    let (quick, slow) = match world.members_of("one")[..] {
        [0] => ("one", "other"),
        _ => ("other", "one"),
    };
    assert_eq!(world.members_of(quick), [0]);
    assert_eq!(world.members_of(slow), [1]);
    world.slow_disk().tell("timing on");
    world.slow_disk().tell("stall 150000");
    wait_until_settled(&world, quick);
    assert!(is_unsettled(&world, slow));
    world.slow_disk().tell("clear");
    world.slow_disk().tell("timing off");
    wait_until_settled(&world, slow);
}

/// As Samba opens: it first opens a file with O_PATH, and then by that descriptor. A file that has
/// taken the name meanwhile is another file. Torture seed 12100, round 64, read zeroes.
#[test]
fn a_replaced_file_is_opened_whole_by_a_program_that_has_it_as_a_path() {
    let Some(world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    make(&world, "clip.mov", 1);
    let path = rustix::fs::open(world.path("clip.mov"), OFlags::PATH, Mode::empty());
    let path = path.expect("there");
    make(&world, "new.mov", 2);
    fs::rename(world.path("new.mov"), world.path("clip.mov")).expect("renamed");
    make(&world, "removed.mov", 3);
    fs::remove_file(world.path("removed.mov")).expect("removed");
    // The mount deletes removed files within half a second, or five after the last ones.
    let until = |count: usize| {
        let end = Instant::now() + Duration::from_secs(30);
        while objects(&world).len() != count {
            assert!(Instant::now() < end, "{:?}, not {count}", objects(&world));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    until(2);
    std::thread::sleep(Duration::from_secs(6));
    let whole = |name: &str, seed: u64| {
        let mut bytes = Vec::new();
        let opened = File::open(name).and_then(|mut file| file.read_to_end(&mut bytes));
        assert_eq!(opened.expect("as on any file system"), LENGTH, "{name}");
        pattern::check(seed, 0, &bytes, name);
    };
    whole(&format!("/proc/self/fd/{}", path.as_raw_fd()), 1);
    drop(path);
    until(1);
    whole(&world.path("clip.mov").display().to_string(), 2);
    assert!(!world.log().contains("zero"), "{}", world.log());
}

/// A write needs its room while a member that has a part of it is away: the rest is no file any
/// more.
#[test]
fn a_removed_file_of_which_a_part_has_gone_is_opened_by_nobody() {
    const STALE: i32 = 116;
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let (file, _) = world.fill("all.mov", 4, 200 << 20);
    drop(file);
    assert_eq!(world.members_of("all.mov"), [0, 1]);
    let path = rustix::fs::open(world.path("all.mov"), OFlags::PATH, Mode::empty());
    let path = path.expect("there");
    let open = || File::open(format!("/proc/self/fd/{}", path.as_raw_fd()));
    open().expect("it has a name");
    fs::remove_file(world.path("all.mov")).expect("removed");
    open().expect("as on any file system");
    world.unplug(1);
    make(&world, "next.mov", 5);
    let nobody_opens_it = || {
        let error = open().expect_err("the first member has nothing of it any more");
        assert_eq!(error.raw_os_error(), Some(STALE), "{error}");
    };
    nobody_opens_it();
    world.plug(1, "rw");
    // The kernel still knows the file, and no write needs its room any more: that takes a minute.
    until("its room is free", Duration::from_secs(180), || {
        nobody_opens_it();
        world.used(1) <= 20 << 20
    });
    nobody_opens_it();
    // This descriptor keeps the mount busy.
    drop(path);
    world.end();
}
