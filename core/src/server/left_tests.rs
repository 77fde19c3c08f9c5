// SPDX-License-Identifier: Apache-2.0
//! The data that a dead daemon has left, as the next one gets it.

use super::*;

/// Daemons that are killed again and again before anything has rested long enough would leave more
/// and more lanes.
#[test]
fn what_a_dead_daemon_left_is_written_at_once() {
    let mut world = quiet();
    world.write(0, ByteRange::new(100, 50));
    world.crash();
    assert_eq!(world.ios.len(), 1, "a part of a page");
    world.write_back(Ok(()));
    assert_eq!(world.native[100..150], world.flat[100..150]);
}

/// In a recovery no door may write to a file that may have bytes to be written again: they would go
/// over the door's.
#[test]
fn nothing_is_clean_that_the_kernel_may_have_lost_where_the_server_ends() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(100, 50));
    world.crash();
    let policy = Policy {
        write_age: Duration::ZERO,
        ..Policy::default()
    };
    world.step(Event::PolicyChanged(policy));
    for turn in 0..3 {
        world.write_back(Ok(()));
        assert!(!world.is_dirty());
        assert_eq!(
            world.settles, 0,
            "turn {turn}: nobody knows whether it is there"
        );
        world.lose();
        world.end_sync();
        assert!(world.is_dirty());
    }
    world.write_back(Ok(()));
    world.end_sync();
    assert_eq!(world.settles, 1);
    assert_eq!(world.device[100..150], world.flat[100..150]);
}

/// Two writes were under way to the device in one request when the daemon died; the newer one's
/// record says that the device has it.
#[test]
fn nothing_is_written_before_all_that_was_left_is_known() {
    let mut world = World::new(3);
    world.crash();
    world.lanes.clear();
    let length = 40 * PAGE_BYTES;
    let newer = ByteRange::new(10_000, 61);
    world.native = vec![2; length as usize];
    world.native[10_000..10_061].fill(4);
    world.keep_what_is_lost();
    world.flat = world.native.clone();
    world.from = vec![0; length as usize];
    let run = PageRun {
        first: 0,
        count: 40,
    };
    // More than half of the write buffer: waiting is no use.
    let older = Runs::from_runs(&[run]).expect("one run");
    let records = BTreeMap::from([
        (0, (1, ByteRange::new(0, length), older)),
        (1, (2, newer, Runs::default())),
    ]);
    let bytes = vec![2; (u64::from(LANE_PAGES) * PAGE_BYTES) as usize];
    let memory = LaneMemory { bytes, records };
    world.lanes.insert(LaneId(900), memory);
    world.ios.clear();
    world.boot();
    world.settle();
    assert_eq!(world.native, world.flat);
}

/// The same of a file that the driver could not open when the server came up, and passes on beside
/// clients.
#[test]
fn nothing_is_written_before_all_that_is_told_later_is_known() {
    let mut world = World::new(3);
    world.crash();
    world.lanes.clear();
    let length = 40 * PAGE_BYTES;
    let newer = ByteRange::new(10_000, 61);
    world.native = vec![2; length as usize];
    world.native[10_000..10_061].fill(4);
    world.flat = world.native.clone();
    world.device = world.native.clone();
    world.from = vec![0; length as usize];
    world.ios.clear();
    world.boot();
    let run = PageRun {
        first: 0,
        count: 40,
    };
    let older = Runs::from_runs(&[run]).expect("one run");
    let records = BTreeMap::from([
        (0, (1, ByteRange::new(0, length), older)),
        (1, (2, newer, Runs::default())),
    ]);
    let bytes = vec![2; (u64::from(LANE_PAGES) * PAGE_BYTES) as usize];
    let told = records.clone();
    let lane = LaneId(900);
    world.lanes.insert(lane, LaneMemory { bytes, records });
    world.is_booting = true;
    world.step(Event::RecoveryBegun);
    world.step(Event::LaneAdded {
        lane,
        session: None,
        page_count: LANE_PAGES,
        record_count: RECORDS,
    });
    for (record, (_, range, runs)) in told {
        assert_eq!(world.ios.len(), 0, "not all of it is told");
        let facts = world.facts();
        world.step(Event::Recovered {
            lane,
            record,
            facts,
            range,
            runs,
        });
    }
    world.is_booting = false;
    world.step(Event::RecoveryEnded);
    world.settle();
    assert_eq!(world.native, world.flat);
}

/// A daemon that dies between a file's last byte and its time leaves a record that shows it to the
/// next one.
#[test]
fn a_record_stays_until_the_time_of_its_file_is_set() {
    let mut world = quiet();
    for first in [0, 8] {
        world.write(0, ByteRange::new(first * PAGE_BYTES, PAGE_BYTES));
    }
    while world.settles == 0 {
        world.write_back(Ok(()));
    }
    let left = |world: &World| {
        let records = world.lanes.values().flat_map(|lane| lane.records.values());
        records
            .map(|(_, _, runs)| runs.page_count())
            .collect::<Vec<u32>>()
    };
    for _ in 0..2 {
        assert_eq!(left(&world), [0], "no bytes, and not nothing");
        world.crash();
        assert!(world.settles > 0, "its time is to be set");
    }
    for _ in 0..core::mem::take(&mut world.settles) {
        let version = world.version;
        world.step(Event::Settled {
            file: FILE,
            version,
        });
    }
    assert_eq!(left(&world), [0; 0]);
}

/// A piece was being written when the one over it was overwritten, too: of the middle one only its
/// record is left. In this order the file is clean for a moment.
#[test]
fn a_file_that_is_clean_for_a_moment_of_recovery_is_not_forgotten() {
    let mut world = World::new(3);
    world.crash();
    world.lanes.clear();
    world.native.resize(8192, 1);
    world.keep_what_is_lost();
    world.flat = vec![4; 8192];
    world.from = vec![0; 8192];
    let lane = LaneId(900);
    let range = ByteRange::new(0, 8192);
    let pages = |first| Runs::from_runs(&[PageRun { first, count: 2 }]).expect("one run");
    let records = BTreeMap::from([
        (0, (1, range, pages(0))),
        (1, (2, range, Runs::default())),
        (2, (3, range, pages(2))),
    ]);
    let mut bytes = vec![2; (u64::from(LANE_PAGES) * PAGE_BYTES) as usize];
    bytes[8192..16384].fill(4);
    world.lanes.insert(lane, LaneMemory { bytes, records });
    world.ios.clear();
    world.boot();
    world.settle();
    assert_eq!(world.native, vec![4; 8192]);
}
