// SPDX-License-Identifier: Apache-2.0
//! The ledger counts as the editor sees it: by the clock of the player, promised or not.

use super::tests::{Bench, facts, ruled};
use super::*;

const MIB: u64 = 1 << 20;
const FRAME: u64 = 500_000;
const TICK: Duration = Duration::from_ms(40);
const RATE: u64 = 12_500_000;

/// A client of session `1` with a clip of 100 Mb/s under handle `1`, on a device with room for it
/// or without.
fn editor(is_full: bool) -> Bench {
    let mut bench = Bench::new(1024);
    bench.session(1);
    let rate = if is_full { 100 * RATE } else { RATE };
    let facts = FileFacts {
        hint: Some(RateHint::Rate(BytesPerSecond(rate), RateSource::Header)),
        ..facts(1, 2000 * MIB)
    };
    bench.open(1, 1, "clip", facts);
    bench
}

/// Read a frame, which is answered after so long: none of it is in the cache.
fn frame(bench: &mut Bench, frame: u64, bytes: u64, takes: Duration) {
    bench.server.drop_blocks(FileId(1), 0, 4000 * MIB);
    bench.read(1, 1, frame + 1, frame * bytes, bytes);
    bench.now = bench.now + takes;
    bench.answer_looks();
    bench.serve_all();
    bench.end(1, frame + 1);
}

fn line(bench: &Bench) -> StreamRecord {
    let mut lines = bench.server.streams(bench.now);
    assert_eq!(lines.len(), 1);
    lines.remove(0)
}

#[test]
fn line_of_a_single_read_has_the_rate_that_is_known_of_its_file() {
    let mut bench = editor(false);
    frame(&mut bench, 1000, FRAME, TICK);
    let rate = Some((BytesPerSecond(RATE), RateSource::Header));
    assert_eq!(line(&bench).rate, rate);
    bench.step(Event::Closed {
        session: SessionId(1),
        handle: HandleId(1),
    });
    assert_eq!(line(&bench).rate, rate, "as its last line");
}

#[test]
fn reads_of_somebody_who_was_refused_are_due_and_late_and_break_no_promise() {
    let mut bench = editor(true);
    // 4 ms of 1.25 GB/s.
    let bytes = 5 * MIB;
    for at in 0..10 {
        frame(&mut bench, at, bytes, TICK);
    }
    let refused = line(&bench);
    assert_eq!(refused.standing, Standing::Refused);
    assert!(refused.refusal.is_some());
    assert_eq!((refused.reads.due_count, refused.reads.late_count), (10, 0));
    frame(&mut bench, 10, bytes, Duration::from_ms(700));
    // The player asks at once, is behind, and stays so until it has caught up.
    for at in 11..14 {
        frame(&mut bench, at, bytes, TICK);
    }
    let record = line(&bench);
    assert_eq!((record.reads.due_count, record.reads.late_count), (14, 4));
    assert_eq!(
        (
            record.reads.promised_count,
            record.reads.promised_late_count
        ),
        (0, 0)
    );
    assert_eq!(record.reads.guilty.iter().sum::<u64>(), 4);
    assert!(
        record.reads.worst_lateness > Duration::from_ms(150),
        "{record:?}"
    );
}

#[test]
fn read_that_waits_still_is_late_as_soon_as_it_is_due() {
    let mut bench = editor(false);
    for at in 0..10 {
        frame(&mut bench, at, FRAME, TICK);
    }
    assert_eq!(line(&bench).reads.late_count, 0);
    // Far away, where nothing was fetched.
    bench.read(1, 1, 100, 1500 * MIB, FRAME);
    bench.now = bench.now + Duration::from_s(2);
    let record = line(&bench);
    assert_eq!(record.reads.late_count, 1, "{record:?}");
    assert!(record.reads.worst_lateness > Duration::from_s(1));
    bench.serve_all();
    let record = line(&bench);
    assert_eq!((record.reads.due_count, record.reads.late_count), (11, 1));
}

#[test]
fn promise_that_is_given_later_forgives_nothing() {
    let mut bench = editor(true);
    let bytes = 5 * MIB;
    frame(&mut bench, 0, bytes, TICK);
    frame(&mut bench, 1, bytes, Duration::from_s(1));
    frame(&mut bench, 2, bytes, TICK);
    assert_eq!(line(&bench).standing, Standing::Refused);
    let late = line(&bench).reads.late_count;
    assert_eq!(late, 2, "a read that comes at once is late as well");
    // Its header says less after all.
    bench.step(Event::Hint {
        file: FileId(1),
        hint: Some(RateHint::Rate(BytesPerSecond(RATE), RateSource::Header)),
    });
    frame(&mut bench, 3, bytes, TICK);
    frame(&mut bench, 4, bytes, TICK);
    let record = line(&bench);
    assert_eq!(record.standing, Standing::Contract, "{record:?}");
    assert_eq!(record.refusal, None);
    assert!(record.reads.promised_count > 0);
    assert_eq!(record.reads.promised_late_count, 0);
    assert!(record.reads.late_count >= late);
}

#[test]
fn read_that_waits_for_its_file_to_be_opened_is_late_by_the_open() {
    let mut bench = Bench::new(64);
    bench.session(1);
    let (session, handle) = (SessionId(1), HandleId(1));
    bench.step(Event::Opening {
        session,
        handle,
        path: alloc::string::String::from("clip"),
        part: FilePart::WHOLE,
    });
    bench.read(1, 1, 1, 0, FRAME);
    bench.now = bench.now + Duration::from_s(2);
    bench.step(Event::Opened {
        session,
        handle,
        facts: Ok(ruled(1, 100 * MIB, RATE * 8)),
    });
    bench.serve_all();
    let record = line(&bench);
    assert_eq!(
        (record.reads.due_count, record.reads.late_count),
        (1, 1),
        "{record:?}"
    );
    assert_eq!(record.reads.guilty[Stage::Open as usize], 1);
}

#[test]
fn no_two_lines_of_the_ledger_have_the_same_number() {
    let mut bench = Bench::new(1024);
    bench.session(1);
    for round in 0..4 {
        let handle = round + 1;
        bench.open(1, handle, "clip", facts(1, 2000 * MIB));
        bench.read(1, handle, u64::from(handle), 0, FRAME);
        bench.serve_all();
        bench.end(1, u64::from(handle));
        if round < 3 {
            bench.step(Event::Closed {
                session: SessionId(1),
                handle: HandleId(handle),
            });
        }
    }
    let lines = bench.server.streams(bench.now);
    let mut numbers: Vec<u32> = lines.iter().map(|line| line.number).collect();
    let slots: Vec<u32> = lines.iter().map(|line| line.stream.0).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3, 4]);
    assert!(
        slots.iter().all(|slot| *slot == slots[0]),
        "it is used again: {slots:?}"
    );
}

fn stationed(bench: &mut Bench, handle: u32, user: &str, client: &str) {
    bench.step(Event::Stationed {
        session: SessionId(1),
        handle: HandleId(handle),
        station: Station {
            user: user.into(),
            client: client.into(),
        },
    });
}

#[test]
fn line_has_the_station_of_its_handle_whenever_that_becomes_known() {
    let mut bench = editor(false);
    frame(&mut bench, 0, FRAME, TICK);
    assert_eq!(line(&bench).label, SessionLabel::default());
    stationed(&mut bench, 1, "anna", "10.0.0.5");
    assert_eq!(line(&bench).label.user, "anna");
    // Another file, known before its first read; and a handle that is closed already.
    stationed(&mut bench, 9, "nobody", "nowhere");
    bench.open(1, 2, "other", facts(2, 2000 * MIB));
    stationed(&mut bench, 2, "ben", "10.0.0.6");
    bench.read(1, 2, 100, 0, FRAME);
    bench.serve_all();
    let close = |handle| Event::Closed {
        session: SessionId(1),
        handle: HandleId(handle),
    };
    bench.step(close(1));
    let lines = bench.server.streams(bench.now).into_iter();
    let mut users: Vec<(String, bool)> = lines.map(|line| (line.label.user, line.open)).collect();
    users.sort();
    assert_eq!(users, [("anna".into(), false), ("ben".into(), true)]);
}

#[test]
fn reads_that_outlive_their_stream_are_in_its_line() {
    let mut bench = editor(false);
    for at in 0..10 {
        frame(&mut bench, at, FRAME, TICK);
    }
    // Far away, where nothing was fetched; the handle is closed before they are answered.
    bench.read(1, 1, 100, 1500 * MIB, FRAME);
    bench.read(1, 1, 101, 1500 * MIB + FRAME, FRAME);
    bench.step(Event::Closed {
        session: SessionId(1),
        handle: HandleId(1),
    });
    let closed = line(&bench);
    assert_eq!((closed.open, closed.reads.read_count), (false, 10));
    let due = closed.reads.due_count;
    bench.now = bench.now + Duration::from_s(2);
    assert!(line(&bench).reads.late_count > 0, "as soon as they are due");
    bench.answer_looks();
    bench.serve_all();
    let record = line(&bench);
    assert_eq!(record.reads.read_count, 12, "{record:?}");
    assert_eq!(
        (record.reads.due_count, record.reads.late_count),
        (due + 2, 2)
    );
    assert_eq!(record.reads.on_time_count(), due);
    assert_eq!(record.reads.bytes.0, 12 * FRAME);
}

#[test]
fn read_of_a_client_that_goes_is_late_if_it_was_due() {
    let mut bench = editor(false);
    for at in 0..10 {
        frame(&mut bench, at, FRAME, TICK);
    }
    bench.read(1, 1, 100, 1500 * MIB, FRAME);
    bench.now = bench.now + Duration::from_s(2);
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    let record = line(&bench);
    assert_eq!(
        (record.reads.read_count, record.reads.late_count),
        (10, 1),
        "{record:?}"
    );
}

#[test]
fn a_first_read_whose_client_goes_before_its_answer_has_a_line() {
    let mut bench = editor(false);
    bench.read(1, 1, 100, 0, FRAME);
    bench.now = bench.now + Duration::from_s(2);
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    let reads = line(&bench).reads;
    assert_eq!(
        (reads.read_count, reads.due_count, reads.late_count),
        (0, 1, 1)
    );
}

/// Other clients hold all buffers; the reads that came before that, and while it lasts, are late.
#[test]
fn the_cache_is_guilty_only_of_reads_that_wait_for_a_buffer() {
    let mut bench = Bench::new(16);
    for session in 1..=4 {
        bench.session(session);
        let facts = match session {
            1 => facts(1, 100 * MIB),
            other => ruled(other, 100 * MIB, RATE * 8),
        };
        bench.open(session, session, "clip", facts);
    }
    // A file that is read here and there has nothing read ahead; its client keeps 14 buffers.
    for nth in 0..14 {
        bench.read(1, 1, nth + 1, (nth * 37 % 90) * MIB, MIB);
        bench.serve_all();
    }
    // This one's bytes are on their way when the next comes, which gets no buffer; so does a third.
    bench.read(2, 2, 102, 0, 2 * MIB);
    bench.read(3, 3, 103, 0, 2 * MIB);
    bench.read(4, 4, 104, 0, 2 * MIB);
    bench.now = bench.now + Duration::from_s(3);
    bench.serve_all();
    for request in 1..=14 {
        bench.end(1, request);
    }
    for (session, request) in [(2, 102), (3, 103), (4, 104)] {
        bench.serve_all();
        bench.answer_looks();
        bench.serve_all();
        assert!(bench.outcome(request).is_some(), "{request}");
        bench.end(session, request);
    }
    let guilty = |session: u32| {
        let lines = bench.server.streams(bench.now);
        let mut own = lines
            .iter()
            .filter(|line| line.session == SessionId(session));
        let reads = own.next().expect("it has a line").reads.clone();
        assert_eq!(reads.late_count, 1, "session {session}: {reads:?}");
        [Stage::Device, Stage::Cache].map(|stage| reads.guilty[stage as usize])
    };
    assert_eq!([2, 3, 4].map(guilty), [[1, 0], [0, 1], [0, 1]]);
}
