// SPDX-License-Identifier: Apache-2.0
//! Never handed out, in any case: bytes that are not the file's, and a record of a lane that is
//! another write's. To go on would show or lose a client's bytes, so the server ends instead.

use super::tests::{Bench, facts};
use super::*;
use crate::cache::PageSet;
use alloc::vec::Vec;

const MIB: u64 = 1 << 20;

/// A client, and a file of which one buffer has the first pages.
fn begun() -> Bench {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 100 * MIB));
    bench.read(1, 1, 1, 0, 8192);
    bench.run(64);
    assert_eq!(bench.length(1), Some(8192));
    bench.end(1, 1);
    bench
}

/// The buffers that this client has in its hands.
fn in_hands(bench: &Bench, session: u32) -> Vec<SlotIndex> {
    let pins = bench.server.pins.iter();
    let own = pins.filter(|((owner, _), _)| *owner == SessionId(session));
    own.flat_map(|(_, pinned)| pinned.slots[..usize::from(pinned.count)].to_vec())
        .collect()
}

/// A daemon that stops ends its sessions and goes on writing. A client that has not noticed copies
/// the bytes of its answers meanwhile. Torture, seed 21300 round 10: it read a page of another
/// place.
#[test]
fn buffers_of_a_client_that_was_put_out_at_the_stop_are_used_for_nothing_else() {
    for is_stopping in [false, true] {
        let mut bench = begun();
        bench.session(2);
        bench.open(2, 2, "b", facts(2, 1000 * MIB));
        bench.read(1, 1, 2, 0, 8192);
        let given = in_hands(&bench, 1);
        assert_eq!(given.len(), 1);
        if is_stopping {
            bench.step(Event::Stopping);
        }
        let session = SessionId(1);
        bench.step(Event::SessionClosed { session });
        let mut reused = false;
        for request in 0..200 {
            bench.read(2, 2, 10 + request, request * MIB, MIB);
            bench.run(64);
            reused |= in_hands(&bench, 2).contains(&given[0]);
            bench.end(2, 10 + request);
        }
        assert_eq!(reused, !is_stopping, "stopping: {is_stopping}");
    }
}

/// Answer as if these bytes were there.
fn answer(bench: &mut Bench, start: u64, length: u64) -> Outcome {
    let mut actions = Actions::default();
    let range = ByteRange::new(start, length);
    let (session, request) = (SessionId(1), RequestId(2));
    bench
        .server
        .pin(session, request, FileId(1), range, &mut actions)
}

#[test]
fn bytes_that_are_there_are_handed_out() {
    let mut bench = begun();
    let given = answer(&mut bench, 0, 8192);
    let Outcome::Data { slots, length, .. } = given else {
        panic!("{given:?}");
    };
    assert_eq!((slots.count, length.0), (1, 8192));
}

#[test]
#[should_panic(expected = "a buffer for each of its blocks")]
fn a_block_without_a_buffer_is_never_handed_out() {
    answer(&mut begun(), 90 * MIB, 4096);
}

#[test]
#[should_panic(expected = "bytes that are not there")]
fn a_buffer_that_has_lost_a_page_is_never_handed_out() {
    let mut bench = begun();
    let slot = bench.server.files[&FileId(1)].blocks[&0];
    bench.server.cache.invalidate(slot, PageSet::run(1, 2));
    answer(&mut bench, 0, 8192);
}

#[test]
#[should_panic(expected = "bytes that are not there")]
fn an_answer_of_which_the_last_byte_is_not_there_is_never_handed_out() {
    let mut bench = begun();
    let slot = bench.server.files[&FileId(1)].blocks[&0];
    bench.server.cache.invalidate(slot, PageSet::run(1, 2));
    answer(&mut bench, 4000, 97);
}

/// A lane of two records, of which so many are free.
fn lane(bench: &mut Bench, free: &[u32]) {
    let (lane, session) = (LaneId(1), Some(SessionId(1)));
    let mut actions = Actions::default();
    let event = Event::LaneAdded {
        lane,
        session,
        page_count: 64,
        record_count: 2,
    };
    bench.server.step(bench.now, event, &mut actions);
    let state = bench.server.lanes.get_mut(&lane).expect("just added");
    state.records = free.to_vec();
}

fn take(bench: &mut Bench) -> u32 {
    let state = bench.server.lanes.get_mut(&LaneId(1)).expect("added");
    state.take_record()
}

#[test]
fn each_record_is_given_once() {
    let mut bench = begun();
    lane(&mut bench, &[0, 1]);
    assert_eq!((take(&mut bench), take(&mut bench)), (1, 0));
}

#[test]
#[should_panic(expected = "when its lane has a record for it")]
fn a_lane_without_a_free_record_gives_none_of_somebody_else() {
    let mut bench = begun();
    lane(&mut bench, &[]);
    take(&mut bench);
}

#[test]
#[should_panic(expected = "a record that it does not have")]
fn a_lane_gives_no_record_that_its_table_has_not() {
    let mut bench = begun();
    lane(&mut bench, &[7]);
    take(&mut bench);
}

/// The same by the way that a write goes: a write that finds no record waits.
#[test]
fn a_write_waits_for_a_record() {
    let mut bench = begun();
    let cached = FileFacts {
        way: Some(WriteWay::Extents),
        ..facts(2, MIB)
    };
    bench.open(1, 2, "b", cached);
    lane(&mut bench, &[]);
    let mut begin = |request: u64| {
        let event = Event::WriteBegin {
            session: SessionId(1),
            handle: HandleId(2),
            request: RequestId(request),
            range: ByteRange::new(0, 4096),
            sent: bench.now,
        };
        let mut actions = Actions::default();
        bench.server.step(bench.now, event, &mut actions);
        let is_answer = |action: &&Action| matches!(action, Action::Reply { .. });
        actions.list.iter().filter(is_answer).count()
    };
    assert_eq!(begin(5), 0);
}
