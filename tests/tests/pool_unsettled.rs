// SPDX-License-Identifier: Apache-2.0
//! Files that nobody has synced: making them waits for no disk, and a power cut that takes their objects alone takes nothing that was promised.

use rushes_tests::disk::run;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LENGTH: usize = 1 << 20;
const EIO: i32 = 5;
/// Of /sys/dev/block/…/stat: flushes that were asked of the device.
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

/// The objects of the one member, as they lie there.
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

/// What a power cut may leave, by hand: the record, and no object.
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
    // It is a file as any other from then on.
    drop(make(&world, "never", 3));
    pattern::check(3, 0, &read(&world, "never").expect("there"), "never");

    // Whoever ends the mount in order has settled all.
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report}");
    lose_objects(&world, &[]);
    world.start();
    for name in ["never", "synced"] {
        let error = read(&world, name).expect_err("it is lost");
        assert_eq!(error.raw_os_error(), Some(EIO), "{name}");
    }
}

#[test]
fn making_files_flushes_no_disk_and_syncing_them_does() {
    let Some(world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    run(Command::new("sync").arg("-f").arg(world.member(0)));
    let before = flush_count(&world.member(0));
    let files: Vec<File> = (0..20)
        .map(|seed| make(&world, &format!("f{seed}"), seed))
        .collect();
    let made = flush_count(&world.member(0)) - before;
    // (The file system commits its journal by itself now and then.)
    assert!(made < 10, "{made} flushes");
    for file in &files {
        file.sync_all().expect("synced");
    }
    let synced = flush_count(&world.member(0)) - before - made;
    assert!(synced >= 20, "{synced} flushes");
}
