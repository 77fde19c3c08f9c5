// SPDX-License-Identifier: Apache-2.0
//! When headers are read: not while a client waits for their disk, and never too late for a player.

use super::tests::{Bench, facts};
use super::*;
use alloc::vec;

const MIB: u64 = 1 << 20;

fn unread(file: u32) -> FileFacts {
    FileFacts {
        is_header_unread: true,
        ..facts(file, 100 * MIB)
    }
}

/// The disk has no requests, for so long.
fn pass(bench: &mut Bench, time: Duration) {
    bench.now = bench.now + time;
    bench.step(Event::Timer);
}

fn answer(bench: &mut Bench, file: u32) {
    bench.step(Event::Hint {
        file: FileId(file),
        hint: None,
    });
}

/// A clip that is looked at for a moment is forgotten with its handle, and its header gets no
/// answer.
#[test]
fn a_file_that_is_forgotten_holds_no_other_header_up() {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.open(1, 1, "a.mxf", unread(1));
    pass(&mut bench, Duration::from_ms(20));
    assert_eq!(bench.looked.len(), 1);
    bench.open(1, 2, "b.mxf", unread(2));
    bench.step(Event::Closed {
        session: SessionId(1),
        handle: HandleId(1),
    });
    pass(&mut bench, Duration::from_ms(20));
    assert_eq!(
        bench.looked.len(),
        2,
        "the first was closed, and is forgotten"
    );
}

#[test]
fn a_clip_in_several_files_is_read_before_their_headers_one_after_the_other() {
    let mut bench = Bench::new(256);
    bench.session(1);
    for file in 1..=4 {
        bench.open(1, file, "a.mxf", unread(file));
        bench.read(1, file, u64::from(file), 10 * MIB, 65_536);
        bench.run(1);
        bench.serve_all();
        assert!(bench.length(u64::from(file)).is_some());
        pass(&mut bench, Duration::from_ms(5));
        bench.serve_all();
    }
    assert_eq!(bench.looked, vec![]);
    // The player has all bytes for a frame.
    pass(&mut bench, Duration::from_ms(20));
    let size = 100 * MIB;
    assert_eq!(bench.looked, [(FileId(1), size)]);
    pass(&mut bench, Duration::from_ms(200));
    assert_eq!(bench.looked, [(FileId(1), size)], "one at a time");
    for file in 1..=3 {
        answer(&mut bench, file);
        assert_eq!(bench.looked.len() as u32, file + 1);
    }
    answer(&mut bench, 4);
    pass(&mut bench, Duration::from_s(2));
    assert_eq!(bench.looked.len(), 4);
}

#[test]
fn who_goes_on_reading_does_not_wait_for_a_disk_without_work() {
    let mut bench = Bench::new(256);
    for session in 1..=2 {
        bench.session(session);
    }
    bench.open(1, 1, "a.mov", unread(1));
    bench.open(2, 1, "other", facts(2, 900 * MIB));
    // The disk always has something to do for another client.
    let mut other = 0;
    let mut keep_busy = |bench: &mut Bench| {
        other += 1;
        bench.read(2, 1, 1000 + other, other * 37 % 900 * MIB, MIB);
        bench.now = bench.now + Duration::from_ms(10);
    };
    for nth in 0..4 {
        keep_busy(&mut bench);
        bench.read(1, 1, nth, nth * 500_000, 500_000);
        assert_eq!(bench.looked, vec![], "read {nth}");
        bench.run(1);
    }
    for nth in 4..12 {
        keep_busy(&mut bench);
        bench.read(1, 1, nth, nth * 500_000, 500_000);
        bench.run(1);
    }
    assert_eq!(bench.looked, [(FileId(1), 100 * MIB)]);
}

#[test]
fn nobody_needs_the_header_of_a_file_that_is_closed_again() {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.open(1, 1, "a.mov", unread(1));
    bench.read(1, 1, 1, 0, 65_536);
    bench.run(1);
    bench.end(1, 1);
    bench.step(Event::Closed {
        session: SessionId(1),
        handle: HandleId(1),
    });
    bench.serve_all();
    pass(&mut bench, Duration::from_s(1));
    assert_eq!(bench.looked, vec![]);
    // The next client that opens it asks for it again.
    bench.open(1, 2, "a.mov", unread(1));
    pass(&mut bench, Duration::from_ms(20));
    assert_eq!(bench.looked.len(), 1);
}

#[test]
fn flash_reads_headers_at_once() {
    let mut bench = Bench::new(256);
    let mut model = super::tests::disk();
    model.read.fixed = Duration::from_us(80);
    model.read.span = Duration::ZERO;
    bench.step(Event::DeviceAdded {
        device: DeviceId(1),
        model,
    });
    bench.session(1);
    bench.open(1, 1, "a.mov", unread(1));
    bench.open(1, 2, "b.mov", unread(2));
    assert_eq!(bench.looked.len(), 2);
}

#[test]
fn a_driver_that_does_not_answer_is_asked_for_others_after_a_second() {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.open(1, 1, "a.mov", unread(1));
    bench.open(1, 2, "b.mov", unread(2));
    pass(&mut bench, Duration::from_ms(20));
    assert_eq!(bench.looked.len(), 1);
    pass(&mut bench, Duration::from_ms(900));
    assert_eq!(bench.looked.len(), 1);
    pass(&mut bench, Duration::from_ms(200));
    assert_eq!(bench.looked.len(), 2);
}
