// SPDX-License-Identifier: Apache-2.0
//! A sync is for everything that was committed before it, or for the bytes written over that. And a
//! read has it all, whichever program else changes the file.

use super::*;

/// Bytes that wait for their page to be free are written over: neither they nor the newer ones are
/// on the device yet.
#[test]
fn a_sync_waits_for_what_was_written_over_what_it_is_for() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 100));
    world.sync(0);
    assert_eq!(world.ios.len(), 1, "its page is busy");
    world.write(1, ByteRange::new(100, 100));
    world.sync(1);
    world.write(2, ByteRange::new(100, 100));
    world.write_back(Ok(()));
    world.end_sync();
    assert_eq!(world.counts.syncs, 1, "the first alone");
    world.settle();
    assert_eq!(world.counts.syncs, 2);
}

/// And the newer ones, on their way to the device, are written over in turn: the sync is still for
/// them.
#[test]
fn a_sync_waits_for_what_is_on_its_way_and_was_written_over_twice() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 100));
    world.sync(0);
    world.write(1, ByteRange::new(100, 100));
    world.sync(1);
    world.write(2, ByteRange::new(100, 100));
    world.write_back(Ok(()));
    assert_eq!(world.ios.len(), 1, "the newer ones");
    world.write(2, ByteRange::new(100, 100));
    world.end_sync();
    assert_eq!((world.counts.syncs, world.syncs.len()), (1, 0));
    world.settle();
    assert_eq!(world.counts.syncs, 2);
}

/// Bytes that are written over on their way do not get there: the file system takes them by way of
/// the kernel's cache alone.
#[test]
fn a_sync_waits_for_what_was_written_over_what_was_refused_on_its_way() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 4096));
    world.sync(0);
    assert_eq!(world.ios.len(), 1, "it is on its way");
    world.write(1, ByteRange::new(0, 4096));
    world.write_back(Err(Errno::INVALID));
    assert_eq!((world.counts.syncs, world.syncs.len()), (0, 0));
    world.settle();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 0));
}

/// A client that leaves while it waits for a sync leaves the driver with one that is older than the
/// bytes written next.
#[test]
fn a_sync_is_not_answered_by_one_that_was_asked_for_before() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 4096));
    world.sync(0);
    world.write_back(Ok(()));
    assert_eq!(world.syncs.len(), 1, "it is with the driver");
    let (session, ..) = world.clients.remove(0);
    world.step(Event::SessionClosed { session });
    world.write(0, ByteRange::new(4096, 100));
    world.sync(0);
    world.write_back(Ok(()));
    world.end_sync();
    assert_eq!(world.counts.syncs, 0, "its own is still to come");
    world.end_sync();
    assert_eq!(world.counts.syncs, 1);
}

/// A client that waits for a look at a file that another program changes all the time is left to
/// the kernel in the end: not to one that lacks the bytes.
#[test]
fn nobody_is_left_to_a_kernel_that_has_not_what_was_written() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 4096));
    world.step(Event::ForeignChange { key: KEY });
    let read = Event::Read {
        session: world.clients[1].0,
        handle: HANDLE,
        request: RequestId(900),
        range: ByteRange::new(0, 100),
        sent: world.now,
    };
    world.clients[1].2 = Doing::Reading {
        request: 900,
        range: ByteRange::new(0, 100),
        then: world.flat.clone(),
        since: Vec::new(),
        lengths: alloc::vec![4096],
    };
    world.step(read);
    for _ in 0..20 {
        world.step(Event::ForeignChange { key: KEY });
    }
    assert_eq!((world.counts.plain, world.counts.reads), (0, 0));
    world.settle();
    assert_eq!(world.counts.reads, 1);
}
