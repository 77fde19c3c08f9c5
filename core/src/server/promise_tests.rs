// SPDX-License-Identifier: Apache-2.0
//! Which streams get contracts: files that grow under their readers, copies, clips that look like
//! frames, frames that cannot be fetched ahead.

use super::state::Stream;
use super::tests::{Bench, facts};
use super::*;
use crate::stream::Lately;
use alloc::format;
use alloc::string::String;

const MIB: u64 = 1 << 20;
/// 100 Mb/s, and a frame of it.
const RATE: u64 = 12_500_000;
const FRAME: u64 = 500_000;
const TICK: Duration = Duration::from_ms(40);

fn headed(file: u32, size: u64, rate: u64) -> FileFacts {
    let rate = RateHint::Rate(BytesPerSecond(rate), RateSource::Header);
    FileFacts {
        hint: Some(rate),
        ..facts(file, size)
    }
}

/// One client, and the contracts of the device.
struct Promise {
    bench: Bench,
    request: u64,
}

impl Promise {
    fn new() -> Promise {
        let mut bench = Bench::new(1024);
        bench.session(1);
        Promise { bench, request: 0 }
    }

    fn promised(&self) -> u64 {
        self.bench.server.devices()[0].promised.0
    }

    fn contracts(&self) -> u32 {
        self.bench.server.devices()[0].contract_count
    }

    /// Ask, and wait for the answer.
    fn read(&mut self, handle: u32, start: u64, length: u64) {
        self.request += 1;
        self.bench.read(1, handle, self.request, start, length);
        self.wait(self.request);
    }

    fn wait(&mut self, request: u64) {
        for _ in 0..1000 {
            if self.bench.outcome(request).is_some() {
                break;
            }
            if self.bench.answer_looks() == 0 {
                assert_eq!(self.bench.run(1), 1, "nobody works for request {request}");
            }
        }
        self.bench.end(1, request);
    }

    /// A frame each 40 ms, from `first` on.
    fn play(&mut self, handle: u32, first: u64, count: u64) {
        for frame in first..first + count {
            let next = self.bench.now + TICK;
            self.read(handle, frame * FRAME, FRAME);
            while self.bench.now + TICK < next && self.bench.run(1) == 1 {}
            self.bench.now = self.bench.now.max(next);
        }
    }

    /// Two reads of 8 MiB in flight, as smbclient copies.
    fn copy(&mut self, handle: u32, first: u64, count: u64) {
        let ask = |promise: &mut Promise, piece: u64| {
            promise.request += 1;
            let range = (piece * 8 * MIB, 8 * MIB);
            promise
                .bench
                .read(1, handle, promise.request, range.0, range.1);
        };
        ask(self, first);
        for piece in first + 1..first + count {
            ask(self, piece);
            self.wait(self.request - 1);
        }
        self.wait(self.request);
    }
}

#[test]
fn rate_that_a_header_says_later_is_promised_instead() {
    let mut promise = Promise::new();
    promise
        .bench
        .open(1, 1, "clip.mxf", headed(1, 100 * MIB, 2_000_000));
    promise.play(1, 0, 10);
    assert_eq!((promise.promised(), promise.contracts()), (2_000_000, 1));
    assert_eq!(promise.bench.looked, [], "it is as it was");
    promise.play(1, 10, 50);
    assert_eq!(promise.bench.looked, []);
    let key = facts(1, 0).key;
    promise.bench.step(Event::Changed {
        session: SessionId(1),
        request: RequestId(1 << 40),
        key,
        range: ByteRange::new(100 * MIB, MIB),
        has_bytes: true,
    });
    promise.play(1, 60, 1);
    assert_eq!(promise.bench.looked, [(FileId(1), 101 * MIB)]);
    promise.play(1, 61, 50);
    assert_eq!(promise.bench.looked.len(), 1, "it was looked at");
    let said = |rate| Event::Hint {
        file: FileId(1),
        hint: Some(RateHint::Rate(BytesPerSecond(rate), RateSource::Header)),
    };
    promise.bench.step(said(15_000_000));
    promise.play(1, 111, 10);
    assert_eq!((promise.promised(), promise.contracts()), (15_000_000, 1));
    // More than the device can do, and then a rate that it can.
    promise.bench.step(said(900_000_000));
    promise.play(1, 121, 2);
    assert_eq!((promise.promised(), promise.contracts()), (0, 0));
    promise.bench.step(said(RATE));
    promise.play(1, 123, 2);
    assert_eq!((promise.promised(), promise.contracts()), (RATE, 1));
    // The header has no rate any more: the observed one counts.
    promise.bench.step(Event::Hint {
        file: FileId(1),
        hint: None,
    });
    assert_eq!((promise.promised(), promise.contracts()), (0, 0));
    promise.play(1, 125, 60);
    let observed = promise.promised();
    assert!((RATE..RATE + RATE / 5).contains(&observed), "{observed}");
}

#[test]
fn header_of_a_file_that_goes_on_growing_is_looked_at_less_and_less_often() {
    let mut promise = Promise::new();
    promise.bench.open(1, 1, "clip.mxf", facts(1, 100 * MIB));
    for second in 0..40 {
        promise.bench.step(Event::Changed {
            session: SessionId(1),
            request: RequestId((1 << 40) + second),
            key: facts(1, 0).key,
            range: ByteRange::new((100 + second) * MIB, MIB),
            has_bytes: true,
        });
        promise.play(1, second, 25);
    }
    let count = promise.bench.looked.len();
    assert!((4..=9).contains(&count), "{count}");
    // A rule stands against any header.
    let mut promise = Promise::new();
    let rule = RateHint::Rate(BytesPerSecond(RATE), RateSource::Rule);
    let ruled = FileFacts {
        hint: Some(rule),
        ..facts(1, 100 * MIB)
    };
    promise.bench.open(1, 1, "clip.mxf", ruled);
    promise.bench.step(Event::Changed {
        session: SessionId(1),
        request: RequestId(1 << 40),
        key: facts(1, 0).key,
        range: ByteRange::new(100 * MIB, MIB),
        has_bytes: true,
    });
    promise.play(1, 0, 60);
    assert_eq!(promise.bench.looked, []);
    promise.bench.step(Event::Hint {
        file: FileId(1),
        hint: Some(RateHint::Rate(BytesPerSecond(1000), RateSource::Header)),
    });
    assert_eq!(promise.promised(), RATE);
}

/// Another client wants more than the device has.
fn refuse_somebody(promise: &mut Promise) {
    promise.bench.session(2);
    let file = headed(2, 9000 * MIB, 100 * RATE);
    promise.bench.open(2, 2, "larger", file);
    promise.bench.read(2, 2, 1 << 40, 0, FRAME);
    promise.wait(1 << 40);
    promise.bench.end(2, 1 << 40);
}

/// A client with a contract gets half a second ahead, and waits for us all the time. Returns
/// whether it is taken for a copy.
fn is_copy_half_a_second_ahead(promise: &mut Promise) -> bool {
    let server = &mut promise.bench.server;
    let mut streams = server.streams.iter_mut();
    let of_client = |stream: &Stream| stream.session == SessionId(1);
    let (key, stream) = streams.find(|(_, stream)| of_client(stream)).expect("one");
    assert_eq!(stream.standing, Standing::Contract);
    (stream.ahead_ns, stream.ahead_at) = (NS_PER_S as i64 / 2, server.now);
    drop(streams);
    let lately = Lately {
        idle_permille: 10,
        rate: BytesPerSecond(2 * RATE),
    };
    server.tell_copy(StreamId(key), ByteCount(0), Some(lately));
    server.streams.get(key).expect("it reads").is_copy
}

#[test]
fn copy_is_told_sooner_where_another_client_was_refused() {
    for (plays, refused, is_copy) in [
        (0, false, false),
        (0, true, true),
        // A client that has played fills its buffers again after a cut.
        (100, true, false),
    ] {
        let mut promise = Promise::new();
        let file = headed(1, 9000 * MIB, RATE);
        promise.bench.open(1, 1, "clip", file);
        promise.read(1, 0, FRAME);
        promise.read(1, FRAME, FRAME);
        promise.play(1, 2, plays);
        if refused {
            refuse_somebody(&mut promise);
        }
        let told = is_copy_half_a_second_ahead(&mut promise);
        assert_eq!(told, is_copy, "played {plays}, refused {refused}");
    }
}

#[test]
fn copy_of_a_file_whose_rate_is_known_loses_its_contract_and_gets_no_other() {
    let mut promise = Promise::new();
    promise
        .bench
        .open(1, 1, "clip", headed(1, 9000 * MIB, RATE));
    let began = promise.bench.now;
    let mut first = 0;
    while promise.contracts() > 0 || first == 0 {
        promise.copy(1, first, 4);
        first += 4;
        let passed = promise.bench.now.since(began);
        assert!(passed < Duration::from_s(3), "{passed:?}");
    }
    for _ in 0..100 {
        promise.copy(1, first, 8);
        first += 8;
        assert_eq!(promise.contracts(), 0);
    }
}

#[test]
fn player_who_fills_his_buffers_first_is_no_copy_for_long() {
    for preloaded in [25, 50, 250, 1000] {
        let mut promise = Promise::new();
        promise
            .bench
            .open(1, 1, "clip", headed(1, 9000 * MIB, RATE));
        for frame in 0..preloaded {
            promise.read(1, frame * FRAME, FRAME);
        }
        promise.play(1, preloaded, 75);
        assert_eq!(promise.contracts(), 1, "{preloaded}");
        // Nor when we have kept the player waiting, and it catches up.
        for stall in [1, 4, 8] {
            promise.request += 1;
            let (request, at) = (promise.request, preloaded + 75 + 500 * stall);
            promise.bench.read(1, 1, request, at * FRAME, FRAME);
            promise.bench.now = promise.bench.now + Duration::from_s(stall);
            promise.wait(request);
            for frame in at + 1..at + 25 * stall {
                promise.read(1, frame * FRAME, FRAME);
            }
            promise.play(1, at + 25 * stall, 60);
            assert_eq!(promise.contracts(), 1, "{preloaded} {stall}");
        }
    }
}

#[test]
fn numbered_clips_of_an_unknown_kind_are_clips_once_they_are_played() {
    let mut promise = Promise::new();
    for (file, handle) in [(1, 1), (2, 2), (3, 3)] {
        let name = format!("card/take_{file:04}.xyz");
        promise.bench.open(1, handle, &name, facts(file, 900 * MIB));
        promise.play(handle, 0, 150);
        let streams = promise.bench.server.streams(promise.bench.now);
        let own = streams.iter().find(|one| one.path == name && one.open);
        let own = own.expect("its line");
        assert_eq!(own.standing, Standing::Contract, "{name}");
        assert!(!own.sequence, "{name}");
        let closed = Event::Closed {
            session: SessionId(1),
            handle: HandleId(handle),
        };
        promise.bench.step(closed);
    }
    // The contract of each of them is the seat's, which keeps it for the next.
    assert_eq!(promise.contracts(), 1);
}

/// A sequence.
struct Shot {
    name: fn(u32) -> String,
    /// The size of each frame.
    size: u64,
    period: Duration,
    ruled: bool,
    /// Neighbours can be opened.
    visible: bool,
}

impl Shot {
    fn facts(&self, number: u32) -> FileFacts {
        let rule = RateHint::FramesPerKilosecond(24_000, RateSource::Rule);
        FileFacts {
            hint: self.ruled.then_some(rule),
            ..facts(100 + number, self.size)
        }
    }

    fn enter(&self, promise: &mut Promise, number: u32) {
        let path = format!("shot/{}", (self.name)(number));
        promise.bench.open(1, number, &path, self.facts(number));
    }

    fn read(&self, promise: &mut Promise, number: u32) {
        let mut at = 0;
        while at < self.size {
            let length = MIB.min(self.size - at);
            promise.read(number, at, length);
            at += length;
        }
    }

    fn leave(&self, promise: &mut Promise, number: u32) {
        promise.bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(number),
        });
    }

    /// One frame a period. Returns hits.
    fn play(&self, promise: &mut Promise, numbers: core::ops::Range<u32>) -> u64 {
        let before = promise.bench.server.cache().hit_count;
        let all = numbers.clone();
        for number in numbers {
            let next = promise.bench.now + self.period;
            self.enter(promise, number);
            self.read(promise, number);
            for _ in 0..64 {
                for (beside, asked) in core::mem::take(&mut promise.bench.neighbours) {
                    let is_it = |&n: &u32| self.visible && (self.name)(n) == asked;
                    let there = (all.start..all.end + 100).find(is_it);
                    let facts = there.map(|n| self.facts(n)).ok_or(Errno(40));
                    promise.bench.step(Event::NeighbourOpened {
                        beside,
                        name: asked,
                        facts,
                    });
                }
                // A copy waits for nothing else.
                if self.period > Duration::ZERO {
                    promise.bench.run(1);
                }
            }
            self.leave(promise, number);
            promise.bench.now = promise.bench.now.max(next);
        }
        promise.bench.server.cache().hit_count - before
    }
}

/// 24 frames a second of `name`, as a rule says; neighbours are there if `visible`. Returns hits.
fn play_frames(
    promise: &mut Promise,
    name: fn(u32) -> String,
    numbers: core::ops::Range<u32>,
    visible: bool,
) -> u64 {
    let shot = Shot {
        name,
        size: FRAME,
        period: Duration::from_us(41_667),
        ruled: true,
        visible,
    };
    shot.play(promise, numbers)
}

#[test]
fn frames_whose_number_is_not_the_last_are_one_sequence() {
    for name in [
        (|n| format!("shot_{n}_v002.exr")) as fn(u32) -> String,
        |n| format!("scan_{n:06}_4k.dpx"),
    ] {
        let mut promise = Promise::new();
        let hits = play_frames(&mut promise, name, 1001..1031, true);
        assert!(hits >= 26, "{hits} of 30");
        assert_eq!((promise.contracts(), promise.promised()), (1, 24 * FRAME));
    }
}

#[test]
fn frames_that_cannot_be_opened_ahead_are_promised_nothing() {
    let name: fn(u32) -> String = |n| format!("shot.{n:04}.dpx");
    let mut promise = Promise::new();
    play_frames(&mut promise, name, 1..30, false);
    assert_eq!(promise.contracts(), 0);
    // From there on they are there.
    play_frames(&mut promise, name, 30..60, true);
    assert_eq!(promise.contracts(), 1);
}

/// Frames without a rule.
const UNRULED: [Shot; 2] = [
    Shot {
        name: |n| format!("shot.{n:04}.dpx"),
        size: FRAME,
        period: Duration::from_us(41_667),
        ruled: false,
        visible: true,
    },
    // Larger than the bytes that are read of a clip before it counts as one.
    Shot {
        name: |n| format!("shot.{n:04}.dpx"),
        size: 8 * MIB,
        period: Duration::from_ms(125),
        ruled: false,
        visible: true,
    },
];

#[test]
fn frame_at_which_a_player_stands_still_is_a_frame_however_often_it_is_read_again() {
    for shot in UNRULED {
        let size = shot.size;
        let mut promise = Promise::new();
        shot.play(&mut promise, 1..41);
        shot.enter(&mut promise, 41);
        shot.read(&mut promise, 41);
        for again in 0..250 {
            promise.bench.now = promise.bench.now + TICK;
            let length = size.min(MIB);
            promise.read(41, again * length % size, length.min(size));
        }
        let is_sequence = |promise: &Promise| {
            let streams = promise.bench.server.streams(promise.bench.now);
            streams.iter().any(|one| one.sequence && one.open)
        };
        assert!(is_sequence(&promise), "{size}");
        shot.leave(&mut promise, 41);
        // Some were fetched ahead before the player stood still.
        shot.play(&mut promise, 42..112);
        let hits = shot.play(&mut promise, 112..142);
        let least = 28 * size.div_ceil(MIB);
        assert!(
            hits >= least,
            "{size}: {hits} of {}",
            30 * size.div_ceil(MIB)
        );
        shot.enter(&mut promise, 142);
        assert!(is_sequence(&promise), "{size}");
    }
}

#[test]
fn frames_that_were_taken_for_clips_are_frames_when_they_are_played_as_such() {
    for shot in UNRULED {
        let size = shot.size;
        let mut promise = Promise::new();
        shot.play(&mut promise, 1..11);
        // The client looks at one of them for long, or at a larger one.
        let large = FileFacts {
            ..facts(900, 100 * MIB)
        };
        promise.bench.open(1, 11, "shot/shot.0011.dpx", large);
        promise.play(11, 0, 150);
        shot.leave(&mut promise, 11);
        let is_sequence = |promise: &Promise| {
            let streams = promise.bench.server.streams(promise.bench.now);
            streams.iter().any(|one| one.sequence && one.open)
        };
        shot.enter(&mut promise, 12);
        assert!(!is_sequence(&promise), "{size}");
        shot.leave(&mut promise, 12);
        shot.play(&mut promise, 13..30);
        let hits = shot.play(&mut promise, 30..60);
        let least = 28 * size.div_ceil(MIB);
        assert!(
            hits >= least,
            "{size}: {hits} of {}",
            30 * size.div_ceil(MIB)
        );
    }
}

#[test]
fn copy_of_ruled_frames_has_no_contract_and_a_player_of_them_keeps_his() {
    let name: fn(u32) -> String = |n| format!("shot.{n:04}.dpx");
    let copied = Shot {
        name,
        size: 4 * MIB,
        period: Duration::ZERO,
        ruled: true,
        visible: true,
    };
    let mut promise = Promise::new();
    let began = promise.bench.now;
    let mut number = 1;
    while promise.contracts() > 0 || number == 1 {
        copied.play(&mut promise, number..number + 4);
        number += 4;
        let passed = promise.bench.now.since(began);
        assert!(passed < Duration::from_s(5), "{passed:?} {number}");
    }
    for _ in 0..50 {
        copied.play(&mut promise, number..number + 8);
        number += 8;
        assert_eq!(promise.contracts(), 0, "{number}");
    }
    // A client that plays them for longer than the others took.
    let played = Shot {
        period: Duration::from_us(41_667),
        ..copied
    };
    let mut promise = Promise::new();
    for first in (1..500).step_by(50) {
        played.play(&mut promise, first..first + 50);
        assert_eq!(promise.contracts(), 1, "{first}");
    }
}
