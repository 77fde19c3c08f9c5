// SPDX-License-Identifier: Apache-2.0
//! Reads of a pool's disks for names and attributes: the catalogue's disk has them all, members are
//! for bytes.
//!
//! The kernel counts the requests of our own loop devices. The mount examines a member now and
//! then, and may read there at that moment; so one quiet try counts. A look that needs a member's
//! disk never has one.

use rushes_tests::pool::{EXT4, PoolWorld, put};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde_json::json;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Read requests of the device below a folder, so far.
fn read_count(folder: &Path) -> u64 {
    let device = fs::metadata(folder).expect("mounted").dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let first = text.split_whitespace().next().expect("a row of numbers");
    first.parse().expect("a number")
}

/// Read requests during `work`: of the catalogue's disk, and of the members' together.
fn reads_of(world: &PoolWorld, work: impl FnOnce()) -> (u64, u64) {
    let catalogue = world.catalogue();
    let members = || {
        (0..2)
            .map(|number| read_count(&world.member(number)))
            .sum::<u64>()
    };
    let before = (read_count(&catalogue), members());
    work();
    let after = (read_count(&catalogue), members());
    (after.0 - before.0, after.1 - before.1)
}

/// Drops the pool's names, attributes and bytes from memory, as far as the kernel does that.
fn forget(world: &PoolWorld) {
    world.sync();
    // Once for entries of the mount, whose process then releases its own; once for entries that it
    // held on the catalogue.
    for _ in 0..2 {
        rushes_tests::caches::drop("3");
    }
}

/// Asks the mount for a file's attributes, also where the kernel has them.
fn look(path: &Path) {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    let found = statx(CWD, path, flags, StatxFlags::BASIC_STATS).expect("it is there");
    assert_eq!(found.stx_size, 1 << 20);
}

/// Repeats a look until its reads are as expected.
fn until(what: &str, mut look: impl FnMut() -> (bool, (u64, u64))) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let (is_it, reads) = look();
        if is_it {
            return;
        }
        assert!(
            Instant::now() < end,
            "{what}: {} reads of the catalogue's disk and {} of the members'",
            reads.0,
            reads.1
        );
    }
}

#[test]
fn a_look_at_a_cached_file_reads_no_disk_and_at_a_cold_one_the_catalogues_alone() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    // So many files that not two of them lie in one block with everything else.
    let folder = world.path("reels/day1");
    fs::create_dir_all(&folder).expect("made");
    for seed in 0..8 {
        put(&folder.join(format!("f{seed}")), seed, 1 << 20).expect("there is room");
    }
    let file = folder.join("f3");
    // Wait for the log of names; from here on nothing changes.
    until("the log of names", || {
        let status = world.json(&["status"], &[]).0;
        (status[0]["log_members"] == json!([0, 1]), (0, 0))
    });

    until("a cold look", || {
        forget(&world);
        let reads = reads_of(&world, || look(&file));
        (reads.0 > 0 && reads.1 == 0, reads)
    });
    until("a look at what was looked at", || {
        look(&file);
        let reads = reads_of(&world, || look(&file));
        (reads == (0, 0), reads)
    });
    until("a listing with sizes", || {
        forget(&world);
        let reads = reads_of(&world, || {
            let entries = fs::read_dir(&folder).expect("listed").flatten();
            let sizes = entries.map(|entry| entry.metadata().expect("known").len());
            assert_eq!(sizes.sum::<u64>(), 8 << 20);
        });
        (reads.0 > 0 && reads.1 == 0, reads)
    });
    // A read of bytes does read a member: reads above would have been seen.
    forget(&world);
    let reads = reads_of(&world, || {
        assert_eq!(fs::read(&file).expect("read").len(), 1 << 20);
    });
    assert!(reads.1 > 0, "{reads:?}");
}
