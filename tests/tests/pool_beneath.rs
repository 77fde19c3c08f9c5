// SPDX-License-Identifier: Apache-2.0
//! The folder that a pool is mounted on: no program writes to it while a mount replaces a killed
//! one, nor, with `--protect`, while the pool is not mounted at all. Bytes written there would be
//! hidden, on the system's own disk.

use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{EXT4, PoolWorld};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn mounts_on(folder: &Path) -> usize {
    let folder = folder.to_str().expect("text");
    let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let is_on = |line: &&str| line.split(' ').nth(4) == Some(folder);
    table.lines().filter(is_on).count()
}

/// Two threads create files there all the time during `act`. Returns the count of files made.
fn beside_creators(folder: &Path, act: impl FnOnce()) -> u64 {
    let (ended, made) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (ended, made) = (&ended, &made);
            scope.spawn(move || {
                for number in 0.. {
                    if ended.load(Ordering::Acquire) {
                        return;
                    }
                    let name = format!("made{thread}.{}", number % 50);
                    if File::create(folder.join(name)).is_ok() {
                        made.fetch_add(1, Ordering::AcqRel);
                    }
                }
            });
        }
        act();
        // They also create files on the new mount.
        let before = made.load(Ordering::Acquire);
        while made.load(Ordering::Acquire) < before + 100 {
            std::thread::yield_now();
        }
        ended.store(true, Ordering::Release);
    });
    made.into_inner()
}

#[test]
fn nobody_writes_below_a_mount_that_is_replaced() {
    for is_kept in [false, true] {
        let members = [(EXT4, 64)];
        let world = match is_kept {
            true => PoolWorld::kept(&members),
            false => PoolWorld::build(&members),
        };
        let Some(mut world) = world else {
            return;
        };
        let folder = world.path("");
        let folder = folder.parent().expect("the scratch folder").join("mnt");
        let made = beside_creators(&folder, || {
            for _ in 0..3 {
                world.kill();
                world.start();
                assert_eq!(mounts_on(&folder), 1, "the dead one is gone");
            }
        });
        world.end();
        assert_eq!(mounts_on(&folder), 0);
        let below: Vec<_> = fs::read_dir(&folder).expect("there").collect();
        assert!(below.is_empty(), "of {made}: {below:?}");
        assert!(
            !world.log().contains("below the mount is not empty"),
            "{}",
            world.log()
        );
    }
}

#[test]
fn what_was_written_below_is_told_of() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    world.end();
    fs::write(world.path("hidden"), "below").expect("no pool is mounted");
    world.start();
    assert!(!world.path("hidden").exists());
    let log = world.log();
    assert!(
        log.contains("the folder below the mount is not empty"),
        "{log}"
    );
}

#[test]
fn nobody_writes_to_a_protected_folder_while_the_pool_is_not_mounted() {
    if !needs::all_there(&[Need::Root]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    world.end();
    world.mount_options.push("--protect");
    for _ in 0..2 {
        world.start();
        fs::write(world.path("file"), "in the pool").expect("it is mounted");
        world.end();
        let folder = File::open(world.path("")).expect("there");
        match ioctl_getflags(&folder) {
            Ok(flags) if flags.contains(IFlags::IMMUTABLE) => {
                let error = File::create(world.path("below")).expect_err("it is protected");
                assert_eq!(error.kind(), ErrorKind::PermissionDenied);
            }
            // This file system has no immutable flag.
            known => {
                let log = world.log();
                assert!(log.contains("cannot be made immutable"), "{known:?}: {log}");
            }
        }
    }
    let folder = File::open(world.path("")).expect("there");
    if let Ok(flags) = ioctl_getflags(&folder) {
        ioctl_setflags(&folder, flags - IFlags::IMMUTABLE).expect("as it was");
    }
}
