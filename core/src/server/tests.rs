// SPDX-License-Identifier: Apache-2.0
//! Behaviours of the whole machine, event by event.

use super::*;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

const MIB: u64 = 1 << 20;
const DISK: DeviceId = DeviceId(1);

/// A driver with one disk, on which requests end when the test says so.
pub(super) struct Bench {
    pub(super) server: Server,
    pub(super) now: Instant,
    actions: Actions,
    replies: Vec<(u32, u64, Outcome)>,
    pub(super) flights: Vec<IoRead>,
    pub(super) stats: Vec<FileId>,
    pub(super) neighbours: Vec<(FileId, alloc::string::String)>,
    /// Files of a pool that its door was asked for.
    pub(super) asked: Vec<(PoolNumber, alloc::string::String)>,
    pub(super) forgotten: Vec<FileId>,
    /// The files whose headers the driver was asked for, and how long they are.
    pub(super) looked: Vec<(FileId, u64)>,
    /// Where the device's last request ended.
    head: Option<(FileId, u64)>,
    /// When the server wants its timer.
    wake: Instant,
}

pub(super) fn disk() -> DeviceModel {
    let model = ServiceModel {
        fixed: Duration::from_us(6_080),
        span: Duration::from_us(17_176),
        rate: BytesPerSecond(172_000_000),
    };
    DeviceModel {
        read: model,
        write: model,
        size: ByteCount(40 << 30),
    }
}

pub(super) fn facts(file: u32, size: u64) -> FileFacts {
    FileFacts {
        file: FileId(file),
        key: FileKey {
            device: 1,
            inode: u64::from(file),
        },
        device: DISK,
        size: ByteCount(size),
        version: 1,
        extents: vec![Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(u64::from(file) << 30),
            length: ByteCount(size.div_ceil(PAGE_BYTES) * PAGE_BYTES),
        }],
        hint: None,
        is_header_unread: false,
        way: Some(WriteWay::Through),
        is_exclusive: false,
        has_unwritten: size > 0,
        is_fresh: false,
    }
}

impl Bench {
    pub(super) fn new(slot_count: u32) -> Bench {
        let limits = Limits {
            slot_count,
            ..Limits::default()
        };
        let mut bench = Bench {
            server: Server::new(limits, Policy::default()),
            now: Instant(NS_PER_S),
            actions: Actions::default(),
            replies: vec![],
            flights: vec![],
            stats: vec![],
            neighbours: vec![],
            asked: vec![],
            forgotten: vec![],
            looked: vec![],
            head: None,
            wake: Instant::NEVER,
        };
        bench.step(Event::DeviceAdded {
            device: DISK,
            model: disk(),
        });
        bench
    }

    pub(super) fn step(&mut self, event: Event) {
        let mut actions = core::mem::take(&mut self.actions);
        actions.clear();
        self.server.step(self.now, event, &mut actions);
        let odd = self.server.check();
        assert!(
            odd.is_empty(),
            "the server's state contradicts itself: {odd:#?}"
        );
        for action in &actions.list {
            match action {
                Action::Reply {
                    session,
                    request,
                    outcome,
                } => {
                    self.replies.push((session.0, request.0, *outcome));
                }
                Action::Submit(io) => self.flights.push(*io),
                Action::Stat { file } => self.stats.push(*file),
                Action::ReadHeader { file, size } => self.looked.push((*file, size.0)),
                Action::OpenNeighbour { beside, name } => {
                    self.neighbours.push((*beside, name.clone()))
                }
                Action::AskPool { pool, path } => self.asked.push((*pool, path.clone())),
                Action::Forget { file } => self.forgotten.push(*file),
                Action::Wake { at } => self.wake = *at,
                other => panic!("{other:?}, but nobody has a lane"),
            }
        }
        self.actions = actions;
    }

    pub(super) fn session(&mut self, session: u32) {
        self.step(Event::SessionOpened {
            session: SessionId(session),
            label: SessionLabel::default(),
        });
    }

    pub(super) fn open(&mut self, session: u32, handle: u32, path: &str, facts: FileFacts) {
        let (session, handle) = (SessionId(session), HandleId(handle));
        self.step(Event::Opening {
            session,
            handle,
            path: path.to_string(),
            part: FilePart::WHOLE,
        });
        self.step(Event::Opened {
            session,
            handle,
            facts: Ok(facts),
        });
    }

    pub(super) fn read(
        &mut self,
        session: u32,
        handle: u32,
        request: u64,
        start: u64,
        length: u64,
    ) {
        self.step(Event::Read {
            session: SessionId(session),
            handle: HandleId(handle),
            request: RequestId(request),
            range: ByteRange::new(start, length),
            sent: self.now,
        });
    }

    pub(super) fn end(&mut self, session: u32, request: u64) {
        self.step(Event::ReadEnd {
            session: SessionId(session),
            request: RequestId(request),
        });
    }

    /// Let the device finish its requests, and those that follow, at most `count`. One that goes on
    /// where the last one ended counts, and takes time, as the part of a chunk that it is.
    pub(super) fn run(&mut self, count: usize) -> usize {
        let chunk = self.server.limits.chunk_bytes_max;
        let all = count as u64 * chunk;
        let mut done = 0;
        while done < all && self.is_busy() {
            let io = self.flights.remove(0);
            let goes_on = self.head == Some((io.file, io.range.start.0));
            let part = match goes_on {
                true => io.range.length.0.min(chunk),
                false => chunk,
            };
            self.head = Some((io.file, io.range.end()));
            self.now = self.now + Duration(Duration::from_ms(25).0 * part / chunk);
            self.step(Event::IoDone {
                io: io.io,
                result: Ok(io.range.length),
            });
            done += part;
        }
        (done.div_ceil(chunk) as usize).min(count)
    }

    /// Files that are looked at have not changed. Returns how many there were.
    pub(super) fn answer_looks(&mut self) -> usize {
        let asked = core::mem::take(&mut self.stats);
        for &file in &asked {
            if let Some(known) = self.server.files.get(&file) {
                let (size, version) = (ByteCount(known.size), known.version);
                self.step(Event::Stat {
                    file,
                    size,
                    version,
                    is_fresh: false,
                });
            }
        }
        asked.len()
    }

    /// Let the device finish all its requests, in no time.
    pub(super) fn serve_all(&mut self) {
        while self.is_busy() {
            let io = self.flights.remove(0);
            self.step(Event::IoDone {
                io: io.io,
                result: Ok(io.range.length),
            });
        }
    }

    /// The device has requests, at once or behind a gap that is left before them.
    pub(super) fn is_busy(&mut self) -> bool {
        let is_gap = |server: &Server| {
            let mut devices = server.devices.values();
            devices.any(|device| device.gaps.is_open())
        };
        while self.flights.is_empty() && self.wake != Instant::NEVER && is_gap(&self.server) {
            self.now = self
                .now
                .max(core::mem::replace(&mut self.wake, Instant::NEVER));
            self.step(Event::Timer);
        }
        !self.flights.is_empty()
    }

    pub(super) fn outcome(&self, request: u64) -> Option<Outcome> {
        let mut of = self
            .replies
            .iter()
            .filter(|(_, known, _)| *known == request);
        let first = of.next().map(|(_, _, outcome)| *outcome);
        assert!(of.next().is_none(), "request {request} was answered twice");
        first
    }

    pub(super) fn length(&self, request: u64) -> Option<u64> {
        match self.outcome(request) {
            Some(Outcome::Data { length, .. }) => Some(length.0),
            _ => None,
        }
    }

    /// Buffers kept for streams.
    pub(super) fn held_count(&self) -> usize {
        let held = self.server.streams.iter().map(|(_, s)| s.held.len());
        held.sum()
    }

    fn standing(&self) -> Standing {
        self.server.streams(self.now)[0].standing
    }
}

pub(super) fn ruled(file: u32, size: u64, bits: u64) -> FileFacts {
    let rate = BytesPerSecond::from_bits(bits);
    FileFacts {
        hint: Some(RateHint::Rate(rate, RateSource::Rule)),
        ..facts(file, size)
    }
}

#[test]
fn hit_is_answered_in_the_same_step_and_asks_no_device() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 100 * MIB));
    bench.read(1, 1, 1, 0, 500_000);
    assert_eq!(bench.outcome(1), None);
    bench.run(64);
    assert_eq!(bench.length(1), Some(500_000));
    bench.end(1, 1);
    // Reading ahead comes a moment later.
    bench.now = bench.now + Duration::from_ms(10);
    bench.step(Event::Timer);
    bench.run(64);
    let submitted = bench.server.devices()[0].request_count;
    bench.read(1, 1, 2, 100, 4096);
    assert_eq!(bench.length(2), Some(4096));
    assert_eq!(bench.server.devices()[0].request_count, submitted);
}

#[test]
fn read_that_comes_before_the_file_is_known_waits_for_it() {
    let mut bench = Bench::new(64);
    bench.session(1);
    let (session, handle) = (SessionId(1), HandleId(7));
    bench.step(Event::Opening {
        session,
        handle,
        path: "a".to_string(),
        part: FilePart::WHOLE,
    });
    bench.read(1, 7, 1, 0, 10);
    assert_eq!(bench.outcome(1), None);
    bench.step(Event::Opened {
        session,
        handle,
        facts: Ok(facts(1, MIB)),
    });
    bench.run(8);
    assert_eq!(bench.length(1), Some(10));
}

#[test]
fn file_that_is_not_served_is_plain_for_waiting_and_later_reads() {
    let mut bench = Bench::new(64);
    bench.session(1);
    let (session, handle) = (SessionId(1), HandleId(7));
    bench.step(Event::Opening {
        session,
        handle,
        path: "a".to_string(),
        part: FilePart::WHOLE,
    });
    bench.read(1, 7, 1, 0, 10);
    bench.step(Event::Opened {
        session,
        handle,
        facts: Err(Errno(95)),
    });
    bench.read(1, 7, 2, 0, 10);
    assert_eq!(bench.outcome(1), Some(Outcome::Plain));
    assert_eq!(bench.outcome(2), Some(Outcome::Plain));
}

#[test]
fn bad_sector_fails_only_the_read_that_needs_it() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", ruled(1, 100 * MIB, 100_000_000));
    let bad = ByteRange::new(3 * MIB, 4096);
    let mut failed = 0;
    for frame in 0..16u64 {
        bench.read(1, 1, frame, frame * 500_000, 500_000);
        for _ in 0..200 {
            if bench.outcome(frame).is_some() || !bench.is_busy() {
                break;
            }
            let io = bench.flights.remove(0);
            let result = if io.range.overlaps(bad) {
                Err(Errno::IO)
            } else {
                Ok(io.range.length)
            };
            bench.step(Event::IoDone { io: io.io, result });
        }
        match bench.outcome(frame) {
            Some(Outcome::Failed(Errno::IO)) => failed += 1,
            Some(Outcome::Data { .. }) => bench.end(1, frame),
            other => panic!("frame {frame}: {other:?}"),
        }
    }
    // 3 MiB lies in frame 6 (3,000,000 .. 3,500,000).
    assert_eq!(failed, 1);
    assert!(matches!(bench.outcome(6), Some(Outcome::Failed(_))));
}

#[test]
fn read_that_had_a_short_answer_still_tries_its_own_pages() {
    let mut bench = Bench::new(64);
    for session in 1..=3 {
        bench.session(session);
        bench.open(session, 1, "a", facts(1, 100 * MIB));
    }
    // The third read lies across the requests of two others, of which one ends short and one fails.
    bench.read(1, 1, 1, 3 * MIB, MIB);
    bench.read(2, 1, 2, 4 * MIB, MIB);
    bench.read(3, 1, 3, 4 * MIB - 50_000, 100_000);
    for (at, result) in [(3, Ok(ByteCount(0))), (4, Err(Errno::IO))] {
        let io = bench.flights.remove(0);
        assert_eq!(io.range, ByteRange::new(at * MIB, MIB));
        bench.step(Event::IoDone { io: io.io, result });
        for file in core::mem::take(&mut bench.stats) {
            bench.step(Event::Stat {
                file,
                size: ByteCount(100 * MIB),
                version: 1,
                is_fresh: false,
            });
        }
        assert_eq!(bench.outcome(3), None);
    }
    bench.run(8);
    assert_eq!(bench.length(3), Some(100_000));
}

#[test]
fn end_of_file_is_asked_for_before_it_is_told() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 10_000));
    bench.read(1, 1, 1, 8_000, 4_000);
    assert_eq!(bench.stats, vec![FileId(1)]);
    assert_eq!(bench.outcome(1), None);
    // It has grown meanwhile: the page that held the old end is read anew.
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(11_000),
        version: 2,
        is_fresh: false,
    });
    bench.run(8);
    assert_eq!(bench.length(1), Some(3_000));
}

#[test]
fn truncated_file_gives_what_is_left_of_it() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 8 * MIB));
    bench.read(1, 1, 1, 0, MIB);
    let io = bench.flights.remove(0);
    bench.step(Event::IoDone {
        io: io.io,
        result: Ok(ByteCount(5_000)),
    });
    assert_eq!(
        bench.outcome(1),
        None,
        "nobody is told an end that was only guessed"
    );
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(5_000),
        version: 2,
        is_fresh: false,
    });
    bench.run(8);
    assert_eq!(bench.length(1), Some(5_000));
}

#[test]
fn device_that_keeps_giving_less_fails_the_read_in_the_end() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 8 * MIB));
    bench.read(1, 1, 1, 0, MIB);
    for _ in 0..32 {
        if bench.outcome(1).is_some() {
            break;
        }
        if let Some(io) = (!bench.flights.is_empty()).then(|| bench.flights.remove(0)) {
            bench.step(Event::IoDone {
                io: io.io,
                result: Ok(ByteCount(0)),
            });
        }
        bench.step(Event::Stat {
            file: FileId(1),
            size: ByteCount(8 * MIB),
            version: 1,
            is_fresh: false,
        });
    }
    assert_eq!(bench.outcome(1), Some(Outcome::Failed(Errno::IO)));
}

#[test]
fn changed_bytes_are_read_again_also_when_they_were_on_their_way() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, MIB));
    bench.read(1, 1, 1, 0, 4096);
    let old = bench.flights.remove(0);
    let key = FileKey {
        device: 1,
        inode: 1,
    };
    bench.step(Event::Changed {
        session: SessionId(1),
        request: RequestId(2),
        key,
        range: ByteRange::new(0, 10),
        has_bytes: true,
    });
    assert_eq!(bench.outcome(2), Some(Outcome::Done));
    bench.step(Event::IoDone {
        io: old.io,
        result: Ok(old.range.length),
    });
    assert_eq!(
        bench.outcome(1),
        None,
        "what was on its way is older than the change"
    );
    assert!(bench.run(8) > 0);
    assert_eq!(bench.length(1), Some(4096));
}

#[test]
fn change_under_a_reader_leaves_his_bytes_alone() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, MIB));
    bench.read(1, 1, 1, 0, 4096);
    bench.run(8);
    assert_eq!(bench.length(1), Some(4096));
    bench.step(Event::ForeignChange {
        key: FileKey {
            device: 1,
            inode: 1,
        },
    });
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(MIB),
        version: 2,
        is_fresh: false,
    });
    bench.read(1, 1, 3, 0, 4096);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(MIB),
        version: 2,
        is_fresh: false,
    });
    bench.run(8);
    let slots: Vec<_> = bench
        .server
        .pins
        .values()
        .map(|pinned| pinned.slots[0])
        .collect();
    assert_eq!(slots.len(), 2);
    assert_ne!(
        slots[0], slots[1],
        "new bytes went over those a client was copying"
    );
}

#[test]
fn client_that_keeps_all_its_pins_waits_and_others_do_not() {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.session(2);
    bench.open(1, 1, "a", facts(1, 1000 * MIB));
    bench.open(2, 1, "b", facts(2, 1000 * MIB));
    let limit = bench.server.limits.session_pin_bytes_max / (8 * MIB);
    for request in 0..=limit {
        bench.read(1, 1, request, request * 8 * MIB, 8 * MIB);
        bench.run(64);
    }
    assert_eq!(bench.length(limit - 1), Some(8 * MIB));
    assert_eq!(bench.outcome(limit), None, "over its limit");
    bench.read(2, 1, 1000, 0, 8 * MIB);
    bench.run(64);
    assert_eq!(bench.length(1000), Some(8 * MIB));
    bench.end(1, 0);
    bench.run(64);
    assert_eq!(bench.length(limit), Some(8 * MIB));
}

#[test]
fn full_cache_is_waited_for_and_a_dead_client_gives_its_buffers_back() {
    let mut bench = Bench::new(64);
    bench.server.limits.session_pin_bytes_max = 64 * MIB;
    bench.session(1);
    bench.session(2);
    bench.open(1, 1, "a", facts(1, 1000 * MIB));
    bench.open(2, 1, "b", facts(2, 1000 * MIB));
    for request in 0..8 {
        bench.read(1, 1, request, request * 8 * MIB, 8 * MIB);
        bench.run(64);
        assert_eq!(bench.length(request), Some(8 * MIB));
    }
    bench.read(2, 1, 100, 0, MIB);
    bench.run(64);
    assert_eq!(bench.outcome(100), None);
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    bench.run(64);
    assert_eq!(bench.length(100), Some(MIB));
}

#[test]
fn client_that_dies_in_a_read_is_not_answered_and_its_request_ends_quietly() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, MIB));
    bench.read(1, 1, 1, 0, 4096);
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    bench.run(8);
    assert_eq!(bench.outcome(1), None);
    let cache = bench.server.cache();
    assert_eq!((cache.pinned_count, cache.held_count), (0, 0));
}

#[test]
fn file_is_forgotten_with_its_last_use_once_nothing_of_it_is_cached() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, MIB));
    bench.read(1, 1, 1, 0, 4096);
    bench.run(8);
    bench.end(1, 1);
    bench.step(Event::Closed {
        session: SessionId(1),
        handle: HandleId(1),
    });
    assert!(
        bench.forgotten.is_empty(),
        "cached bytes are worth a descriptor"
    );
    bench.step(Event::Gone {
        session: SessionId(1),
        request: RequestId(9),
        key: FileKey {
            device: 1,
            inode: 1,
        },
    });
    assert_eq!(bench.forgotten, vec![FileId(1)]);
}

#[test]
fn stream_too_many_is_refused_and_admitted_when_another_leaves() {
    let mut bench = Bench::new(1024);
    for nth in 1..=14u32 {
        bench.session(nth);
        bench.open(nth, 1, "clip", ruled(nth, 1000 * MIB, 100_000_000));
        bench.read(nth, 1, u64::from(nth) * 1000, 0, 500_000);
        // A quarter of a second of the device between one and the next.
        bench.run(10);
    }
    let standing = |bench: &Bench, nth: u32| {
        bench
            .server
            .streams(bench.now)
            .iter()
            .find(|record| record.session == SessionId(nth))
            .map(|record| record.standing)
    };
    let kept = (1..=14)
        .filter(|&nth| standing(&bench, nth) == Some(Standing::Contract))
        .count();
    assert!((11..=13).contains(&kept), "{kept} of 14 under contract");
    assert_eq!(standing(&bench, 14), Some(Standing::Refused));
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    bench.step(Event::SessionClosed {
        session: SessionId(2),
    });
    for _ in 0..400 {
        bench.run(1);
        bench.now = bench.now + Duration::from_ms(10);
        bench.step(Event::Timer);
    }
    assert_eq!(standing(&bench, 14), Some(Standing::Contract));
}

#[test]
fn question_changes_nothing_and_agrees_with_what_happens() {
    let mut bench = Bench::new(1024);
    let rate = BytesPerSecond::from_bits(100_000_000);
    let verdict = bench.server.could_admit(bench.now, DISK, rate, 2);
    assert!(verdict.admitted, "{}", verdict.reason);
    assert!(
        (10..=12).contains(&(verdict.more_count + 2)),
        "{}",
        verdict.reason
    );
    assert!(!bench.server.could_admit(bench.now, DISK, rate, 14).admitted);
    assert!(
        !bench
            .server
            .could_admit(bench.now, DeviceId(9), rate, 1)
            .admitted
    );
    bench.session(1);
    bench.open(1, 1, "clip", ruled(1, 1000 * MIB, 100_000_000));
    bench.read(1, 1, 1, 0, 500_000);
    assert_eq!(bench.standing(), Standing::Contract);
}

#[test]
fn without_the_analyser_nothing_is_promised_or_fetched_ahead() {
    let mut bench = Bench::new(64);
    bench.step(Event::PolicyChanged(Policy {
        analyser: false,
        ..Policy::default()
    }));
    bench.session(1);
    bench.open(1, 1, "clip", ruled(1, 1000 * MIB, 100_000_000));
    for frame in 0..4 {
        bench.read(1, 1, frame, frame * 500_000, 500_000);
        bench.run(8);
        assert_eq!(bench.length(frame), Some(500_000));
        bench.end(1, frame);
    }
    assert_eq!(bench.standing(), Standing::BestEffort);
    let device = &bench.server.devices()[0];
    assert!(device.bytes[1].0 < 3 * MIB, "{:?}", device.bytes);
}

#[test]
fn jump_is_followed_and_fetched_ahead_at_its_new_place() {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.open(1, 1, "clip", ruled(1, 1000 * MIB, 100_000_000));
    for frame in 0..8 {
        bench.read(1, 1, frame, frame * 500_000, 500_000);
        bench.run(2);
        bench.end(1, frame);
    }
    for frame in 0..8u64 {
        bench.read(1, 1, 100 + frame, 600 * MIB + frame * 500_000, 500_000);
        bench.run(3);
        bench.end(1, 100 + frame);
    }
    bench.run(8);
    let before = bench.server.cache().hit_count;
    bench.read(1, 1, 200, 600 * MIB + 8 * 500_000, 500_000);
    assert_eq!(bench.server.cache().hit_count, before + 1);
    assert_eq!(bench.standing(), Standing::Contract);
}

fn frame(number: u32) -> FileFacts {
    let hint = RateHint::FramesPerKilosecond(24_000, RateSource::Rule);
    FileFacts {
        hint: Some(hint),
        ..facts(100 + number, 520_000)
    }
}

/// Answer the streams that asked for neighbours of a sequence that has frames up to `last`.
///
/// Returns  those that it lacks
fn tell_neighbours(bench: &mut Bench, last: u32) -> Vec<u32> {
    let mut absent = Vec::new();
    for (beside, name) in core::mem::take(&mut bench.neighbours) {
        let digits: u32 = name[5..9].parse().expect("a frame name");
        let facts = match digits <= last {
            true => Ok(frame(digits)),
            false => {
                absent.push(digits);
                Err(Errno(2))
            }
        };
        bench.step(Event::NeighbourOpened {
            beside,
            name,
            facts,
        });
    }
    absent
}

#[test]
fn next_frames_are_fetched_before_they_are_opened_and_served_only_to_an_open() {
    let mut bench = Bench::new(256);
    bench.session(1);
    for number in 1..=4u32 {
        let path = alloc::format!("shot/shot.{number:04}.dpx");
        bench.open(1, number, &path, frame(number));
        bench.read(1, number, u64::from(number), 0, 520_000);
        for _ in 0..64 {
            tell_neighbours(&mut bench, u32::MAX);
            bench.run(1);
        }
        assert_eq!(
            bench.length(u64::from(number)),
            Some(520_000),
            "frame {number}"
        );
        bench.end(1, u64::from(number));
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(number),
        });
    }
    assert_eq!(
        bench.server.cache().hit_count,
        3,
        "every frame but the first was there"
    );
    assert_eq!(bench.standing(), Standing::Contract);
    // A client that opened nothing gets nothing, even if it is cached.
    bench.session(2);
    bench.read(2, 5, 99, 0, 520_000);
    assert_eq!(bench.outcome(99), Some(Outcome::Failed(Errno::BAD_HANDLE)));
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    assert_eq!(bench.server.cache().held_count, 0);
}

#[test]
fn frames_that_are_answered_before_those_in_front_of_them_are_let_go_in_the_end() {
    let mut bench = Bench::new(256);
    bench.session(1);
    let open = |bench: &mut Bench, number: u32| {
        let path = alloc::format!("shot/shot.{number:04}.dpx");
        bench.open(1, number, &path, frame(number));
        bench.read(1, number, u64::from(number), 0, 520_000);
        for _ in 0..16 {
            bench.run(1);
        }
        bench.end(1, u64::from(number));
    };
    for number in 1..=2 {
        open(&mut bench, number);
    }
    let asked = core::mem::take(&mut bench.neighbours);
    assert!(asked.len() > 3, "{asked:?}");
    let (first, rest): (Vec<_>, Vec<_>) = asked
        .into_iter()
        .partition(|(_, name)| name.contains("0003"));
    bench.neighbours = rest;
    tell_neighbours(&mut bench, u32::MAX);
    for number in 3..=5 {
        open(&mut bench, number);
    }
    bench.neighbours.extend(first);
    tell_neighbours(&mut bench, u32::MAX);
    for number in 6..=9 {
        open(&mut bench, number);
    }
    for number in 1..=9 {
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(number),
        });
    }
    bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    tell_neighbours(&mut bench, 0);
    for _ in 0..16 {
        bench.run(8);
    }
    let used = bench
        .server
        .files
        .values()
        .filter(|file| file.use_count > 0);
    assert_eq!(used.count(), 0);
}

/// The driver looks for a name that does not exist in the folder's blocks on the disk: sixteen of
/// them with each frame held ten players up for a second, two seconds before each of their
/// sequences ended. One that is being written is followed all the same.
#[test]
fn sequence_is_asked_beyond_its_end_one_name_at_a_time() {
    let mut bench = Bench::new(256);
    bench.session(1);
    let mut last = 40;
    let mut absent = Vec::new();
    for number in 1..=60u32 {
        // It was rendered on, meanwhile.
        if number == 38 {
            last = 60;
        }
        bench.now = bench.now + Duration::from_ms(41);
        let path = alloc::format!("shot/shot.{number:04}.dpx");
        bench.open(1, number, &path, frame(number));
        bench.read(1, number, u64::from(number), 0, 520_000);
        for _ in 0..64 {
            let lacked = tell_neighbours(&mut bench, last);
            absent.extend(lacked.into_iter().map(|digits| (number, digits)));
            bench.run(1);
        }
        assert_eq!(bench.length(u64::from(number)), Some(520_000), "{number}");
        bench.end(1, u64::from(number));
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(number),
        });
    }
    // The first time that the end is not known, several may have been asked for at once.
    let first = absent[0].0;
    let at_first = absent.iter().filter(|(at, _)| *at == first).count();
    assert!(at_first <= 16, "{absent:?}");
    for number in first + 1..=60 {
        let asked = absent.iter().filter(|(at, _)| *at == number).count();
        assert!(asked <= 1 || number == 38, "{number}: {absent:?}");
    }
    assert_eq!(
        bench.server.cache().hit_count,
        59,
        "every frame but the first was there"
    );
}

/// Every event in every state has an answer: no panic, no request answered twice, no slot given
/// away while in use, which the cache itself asserts.
#[test]
fn any_events_in_any_order_are_survived() {
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut draw = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    for _ in 0..20 {
        let mut bench = Bench::new(64);
        let mut request = 0u64;
        for _ in 0..4_000 {
            bench.now = bench.now + Duration::from_us(draw(3_000));
            let session = SessionId(draw(3) as u32);
            let handle = HandleId(draw(4) as u32);
            let file = draw(5) as u32;
            let key = FileKey {
                device: 1,
                inode: u64::from(file),
            };
            let start = if draw(20) == 0 {
                u64::MAX - draw(9)
            } else {
                draw(30 * MIB)
            };
            let range = ByteRange::new(
                start,
                [0, 1, 4096, 500_000, 8 * MIB, 9 * MIB][draw(6) as usize],
            );
            request += 1;
            let event = match draw(16) {
                0 => Event::SessionOpened {
                    session,
                    label: SessionLabel::default(),
                },
                1 => Event::SessionClosed { session },
                2 => Event::Opening {
                    session,
                    handle,
                    path: alloc::format!("d/f.{file:04}.dpx"),
                    part: FilePart::new(draw(3) as u32, 3).unwrap_or_default(),
                },
                3 => {
                    let mut known = ruled(file, draw(40 * MIB), 1 + draw(400_000_000));
                    known.version = draw(3);
                    known.device = DeviceId(1 + (draw(30) == 0) as u16);
                    Event::Opened {
                        session,
                        handle,
                        facts: Ok(known),
                    }
                }
                4 => Event::Closed { session, handle },
                5..=8 => Event::Read {
                    session,
                    handle,
                    request: RequestId(request),
                    range,
                    sent: bench.now,
                },
                9 => Event::ReadEnd {
                    session,
                    request: RequestId(1 + draw(request)),
                },
                10 => Event::Changed {
                    session,
                    request: RequestId(request),
                    key,
                    range,
                    has_bytes: true,
                },
                11 => Event::Gone {
                    session,
                    request: RequestId(request),
                    key,
                },
                12 => Event::ForeignChange { key },
                13 => Event::Stat {
                    file: FileId(file),
                    size: ByteCount(draw(40 * MIB)),
                    version: draw(3),
                    is_fresh: false,
                },
                14 => match bench.neighbours.pop() {
                    Some((beside, name)) => Event::NeighbourOpened {
                        beside,
                        name,
                        facts: Ok(facts(draw(5) as u32, draw(MIB))),
                    },
                    None => Event::Timer,
                },
                _ => match (!bench.flights.is_empty()).then(|| bench.flights.remove(0)) {
                    Some(io) => {
                        let count = io.range.length.0;
                        let result = match draw(8) {
                            0 => Err(Errno::IO),
                            1 => Ok(ByteCount(draw(count + 1))),
                            _ => Ok(ByteCount(count)),
                        };
                        Event::IoDone { io: io.io, result }
                    }
                    None => Event::IoDone {
                        io: IoId(draw(99)),
                        result: Ok(ByteCount(1)),
                    },
                },
            };
            bench.step(event);
        }
        let mut answered: Vec<u64> = bench
            .replies
            .iter()
            .map(|(_, request, _)| *request)
            .collect();
        let count = answered.len();
        answered.sort_unstable();
        answered.dedup();
        assert_eq!(answered.len(), count, "a request was answered twice");
    }
}

#[test]
fn jump_in_a_sequence_takes_its_contract_along() {
    let mut bench = Bench::new(256);
    bench.session(1);
    let numbers = (1..=6u32).chain(500..=506);
    for (handle, number) in numbers.enumerate() {
        let handle = handle as u32 + 1;
        let path = alloc::format!("shot/shot.{number:04}.dpx");
        bench.open(1, handle, &path, frame(number));
        bench.read(1, handle, u64::from(handle), 0, 520_000);
        for _ in 0..64 {
            tell_neighbours(&mut bench, u32::MAX);
            bench.run(1);
        }
        assert_eq!(
            bench.length(u64::from(handle)),
            Some(520_000),
            "frame {number}"
        );
        bench.end(1, u64::from(handle));
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(handle),
        });
    }
    let open = bench.server.streams(bench.now);
    let contracts = open
        .iter()
        .filter(|record| record.open && record.standing == Standing::Contract)
        .count();
    assert_eq!(contracts, 1, "{open:?}");
    assert_eq!(bench.server.devices()[0].contract_count, 1);
}

#[test]
fn stat_that_tells_of_a_change_drops_what_was_cached_before_it() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 10_000));
    bench.read(1, 1, 1, 0, 4096);
    bench.run(8);
    bench.end(1, 1);
    bench.read(1, 1, 2, 8_000, 4_000);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(10_000),
        version: 2,
        is_fresh: false,
    });
    bench.run(8);
    bench.end(1, 2);
    let before = bench.server.cache().miss_count;
    bench.read(1, 1, 3, 4096, 1000);
    bench.run(8);
    assert_eq!(bench.length(3), Some(1000));
    assert!(bench.server.cache().miss_count >= before);
    // The whole file was fetched anew after the change was seen.
    assert!(bench.server.devices()[0].request_count.iter().sum::<u64>() >= 2);
}

#[test]
fn scattered_reads_are_left_to_the_kernel_until_something_is_promised_beside_them() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "project.db", facts(1, 900 * MIB));
    let mut request = 0;
    for nth in 0..40u64 {
        request += 1;
        let place = if nth == 0 { 700 } else { nth * 7919 % 899 };
        bench.read(1, 1, request, place * MIB, 8192);
        bench.run(100);
        bench.end(1, request);
    }
    assert_eq!(bench.outcome(request), Some(Outcome::Plain));
    let asked = bench.server.devices()[0].request_count;
    // Cached bytes are served from the cache, with any pattern.
    bench.read(1, 1, 100, 700 * MIB, 4096);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(900 * MIB),
        version: 1,
        is_fresh: false,
    });
    assert_eq!(bench.length(100), Some(4096));
    // With a contract beside them they are the scheduler's again.
    bench.open(1, 2, "clip.mov", ruled(2, 900 * MIB, 100_000_000));
    bench.read(1, 2, 200, 0, MIB);
    bench.run(1000);
    bench.read(1, 1, 201, 450 * MIB, 8192);
    bench.run(1000);
    assert_eq!(bench.length(201), Some(8192));
    assert_ne!(bench.outcome(201), Some(Outcome::Plain));
    assert!(bench.server.devices()[0].request_count[1] > asked[1]);
}

#[test]
fn rate_that_is_known_only_after_large_first_reads_makes_a_contract() {
    let mut bench = Bench::new(1024);
    bench.session(1);
    bench.open(1, 1, "clip.mov", facts(1, 900 * MIB));
    // Two reads of 8 MiB in flight, as smbclient has them; the header is understood meanwhile.
    bench.read(1, 1, 1, 0, 8 * MIB);
    bench.read(1, 1, 2, 8 * MIB, 8 * MIB);
    let rate = BytesPerSecond::from_bits(39_300_000);
    bench.step(Event::Hint {
        file: FileId(1),
        hint: Some(RateHint::Rate(rate, RateSource::Header)),
    });
    bench.run(8);
    bench.read(1, 1, 3, 16 * MIB, 8 * MIB);
    bench.run(8);
    assert_eq!(
        bench.standing(),
        Standing::Contract,
        "{:?}",
        bench.server.streams(bench.now)[0].refusal
    );
}

#[test]
fn request_whose_deadline_is_near_is_given_no_company_that_could_overtake_it() {
    let mut bench = Bench::new(512);
    let flash = DeviceId(2);
    let model = ServiceModel {
        fixed: Duration::from_us(100),
        span: Duration::ZERO,
        rate: BytesPerSecond(200_000_000),
    };
    bench.step(Event::DeviceAdded {
        device: flash,
        model: DeviceModel {
            read: model,
            write: model,
            size: ByteCount(40 << 30),
        },
    });
    bench.session(1);
    for handle in 1..=2 {
        let facts = FileFacts {
            device: flash,
            ..ruled(handle, 500 * MIB, 80_000_000)
        };
        bench.open(1, handle, "a", facts);
        bench.read(1, handle, u64::from(handle), 0, 400_000);
    }
    // Time enough for the requests under way and another chunk before them: two chunks are kept
    // under way.
    let under_way: u64 = bench.flights.iter().map(|io| io.range.length.0).sum();
    assert!(under_way > 4 * MIB, "{under_way}");
    // One whose time has nearly run out: nothing is sent that the device might take first.
    let first = bench.flights[0];
    bench.now = first.deadline.before(Duration::from_ms(30));
    while bench.flights.len() > 1 {
        let io = bench.flights.remove(1);
        bench.step(Event::IoDone {
            io: io.io,
            result: Ok(io.range.length),
        });
        let newer = &bench.flights[1..];
        assert!(newer.is_empty(), "{newer:?}");
    }
    // It is stuck: no request waits for one that is late already.
    bench.now = first.deadline + Duration::from_ms(1);
    bench.step(Event::Timer);
    assert!(bench.flights.len() > 1, "{:?}", bench.flights);
}

#[test]
fn size_that_was_found_out_before_a_change_is_not_told_after_it() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 3 * MIB));
    let key = facts(1, 0).key;
    let changed = |request, range| Event::Changed {
        session: SessionId(1),
        request: RequestId(request),
        key,
        range,
        has_bytes: true,
    };
    let stat = |size| Event::Stat {
        file: FileId(1),
        size: ByteCount(size),
        version: 1,
        is_fresh: false,
    };
    // At the end the server asks for the size; before the answer is here, another has written on.
    bench.read(1, 1, 1, 3 * MIB, MIB);
    assert_eq!(bench.stats.len(), 1);
    bench.step(changed(50, ByteRange::new(3 * MIB, 2 * MIB)));
    bench.step(stat(3 * MIB));
    bench.run(64);
    assert_eq!(bench.length(1), Some(MIB), "acknowledged bytes");
    // Cut off meanwhile: the answer is worth nothing, and the server asks again.
    bench.read(1, 1, 2, 5 * MIB, MIB);
    assert_eq!(bench.stats.len(), 2);
    bench.step(changed(51, ByteRange::new(MIB, u64::MAX)));
    bench.step(stat(5 * MIB));
    assert_eq!(bench.outcome(2), None);
    assert_eq!(bench.stats.len(), 3);
    bench.step(stat(MIB));
    assert_eq!(bench.length(2), Some(0));
    // An opener's look from before a change does not take it back from a read that waits for these
    // very bytes.
    bench.session(2);
    bench.step(Event::Opening {
        session: SessionId(2),
        handle: HandleId(1),
        path: "a".to_string(),
        part: FilePart::WHOLE,
    });
    bench.read(1, 1, 3, 2 * MIB, MIB);
    bench.step(changed(52, ByteRange::new(MIB, 2 * MIB)));
    bench.step(stat(3 * MIB));
    assert_eq!(bench.outcome(3), None, "they are on their way");
    bench.step(Event::Opened {
        session: SessionId(2),
        handle: HandleId(1),
        facts: Ok(facts(1, MIB)),
    });
    assert_eq!(bench.outcome(3), None);
    bench.step(stat(3 * MIB));
    bench.run(64);
    assert_eq!(bench.length(3), Some(MIB));
}

#[test]
fn size_that_an_opener_found_out_voids_what_was_asked_for_before() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, MIB));
    // The driver has looked (1 MiB) and not answered yet; another program writes on, and an opener
    // sees it.
    bench.read(1, 1, 1, MIB, MIB);
    assert_eq!(bench.stats.len(), 1);
    bench.session(2);
    let grown = FileFacts {
        version: 2,
        ..facts(1, 2 * MIB)
    };
    bench.open(2, 1, "a", grown);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(MIB),
        version: 1,
        is_fresh: false,
    });
    assert_eq!(bench.outcome(1), None);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(2 * MIB),
        version: 2,
        is_fresh: false,
    });
    bench.run(64);
    assert_eq!(bench.length(1), Some(MIB));
}

#[test]
fn read_of_a_file_that_a_stranger_writes_to_all_the_time_is_answered_all_the_same() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", facts(1, 64 * MIB));
    let key = facts(1, 0).key;
    bench.read(1, 1, 1, 0, MIB);
    let mut changes = 0;
    // Every 5 ms, and neither the disk nor the driver's look at the length is ever faster.
    while bench.outcome(1).is_none() && changes < 100 {
        bench.now = bench.now + Duration::from_ms(5);
        bench.step(Event::ForeignChange { key });
        changes += 1;
    }
    assert_eq!(bench.outcome(1), Some(Outcome::Plain));
    assert!(changes < 10, "{changes} changes");
    // Once the other program is done it is served as ever.
    bench.read(1, 1, 2, 0, MIB);
    for _ in 0..2 {
        bench.step(Event::Stat {
            file: FileId(1),
            size: ByteCount(64 * MIB),
            version: 9,
            is_fresh: false,
        });
    }
    bench.run(8);
    assert_eq!(bench.length(2), Some(MIB));
}

/// A client plays a file of this rate, jumps about, and plays again: the stream stands as before,
/// and meanwhile as any without a contract.
fn plays_jumps_and_plays(bits_per_s: u64, standing: Standing) {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", ruled(1, 200 * MIB, bits_per_s));
    let found = |bench: &Bench| bench.server.streams(bench.now)[0].standing;
    let mut request = 0;
    let mut read = |bench: &mut Bench, at: u64, length: u64| {
        request += 1;
        bench.read(1, 1, request, at, length);
        bench.run(64);
        bench.end(1, request);
    };
    for piece in 0..4 {
        read(&mut bench, piece * MIB, MIB);
    }
    assert_eq!(found(&bench), standing);
    for jump in 0..40 {
        read(&mut bench, (jump * 37 % 61) * MIB + jump * 4096, 4096);
    }
    assert_eq!(found(&bench), Standing::BestEffort);
    // It asks again when it has played for half a second.
    for piece in 0..80 {
        read(&mut bench, (20 + piece) * MIB, MIB);
    }
    assert_eq!(found(&bench), standing);
}

#[test]
fn who_jumps_about_and_then_plays_again_is_under_contract_again() {
    plays_jumps_and_plays(100_000_000, Standing::Contract);
}

#[test]
fn who_was_refused_and_jumps_about_asks_again_when_he_plays() {
    // More than the device has.
    plays_jumps_and_plays(1_500_000_000, Standing::Refused);
}

#[test]
fn folders_that_somebody_looks_through_are_not_all_remembered() {
    let mut bench = Bench::new(64);
    bench.session(1);
    for folder in 0..1000 {
        let path = alloc::format!("shots/{folder:04}/frame.00001.dpx");
        bench.open(1, 1, &path, facts(folder, MIB));
        bench.read(1, 1, u64::from(folder), 0, 4096);
        bench.run(8);
        bench.end(1, u64::from(folder));
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(1),
        });
    }
    let folders = bench.server.folders.len();
    assert!((1..=64).contains(&folders), "{folders}");
}

#[test]
fn what_is_fetched_behind_an_eager_reader_is_not_held_for_him() {
    let mut bench = Bench::new(64);
    bench.session(1);
    bench.open(1, 1, "a", ruled(1, 500 * MIB, 80_000_000));
    // The player asks for far more at once than its buffers take, and then for nothing.
    for request in 0..56 {
        bench.read(1, 1, request, request * MIB, MIB);
    }
    for _ in 0..200 {
        bench.run(1);
        for (session, request, _) in core::mem::take(&mut bench.replies) {
            bench.end(session, request);
        }
    }
    // Buffers that it has passed can be had by others.
    let held: usize = bench.held_count();
    assert!(held <= 40, "{held} of 64 buffers");
    bench.session(2);
    bench.open(2, 1, "b", facts(2, 100 * MIB));
    for request in 100..130 {
        bench.read(2, 1, request, (request - 100) * MIB, MIB);
        bench.run(4);
        assert_eq!(bench.length(request), Some(MIB), "request {request}");
    }
}

#[test]
fn device_that_was_measured_anew_keeps_its_promises_and_has_room_by_the_new_model() {
    let mut bench = Bench::new(1024);
    // The second wants more than the disk has.
    for (session, rate) in [(1, 100_000_000), (2, 2_000_000_000)] {
        bench.session(session);
        bench.open(session, 1, "a", ruled(session, 500 * MIB, rate));
        for read in 0..4 {
            bench.read(session, 1, read + 1, read * 500_000, 500_000);
            bench.serve_all();
            bench.end(session, read + 1);
            bench.now = bench.now + Duration::from_ms(40);
        }
    }
    let standing = |bench: &Bench, of: usize| bench.server.streams(bench.now)[of].standing;
    assert_eq!(standing(&bench, 0), Standing::Contract);
    assert_eq!(standing(&bench, 1), Standing::Refused);
    let promised = bench.server.devices()[0].promised;
    let quick = ServiceModel {
        fixed: Duration::from_us(100),
        span: Duration::ZERO,
        rate: BytesPerSecond(2_000_000_000),
    };
    bench.now = bench.now + Duration::from_s(1);
    bench.step(Event::DeviceAdded {
        device: DISK,
        model: DeviceModel {
            read: quick,
            write: quick,
            ..disk()
        },
    });
    let device = &bench.server.devices()[0];
    assert_eq!(device.model.read, quick);
    assert!(device.promised >= promised);
    assert_eq!(standing(&bench, 0), Standing::Contract);
    assert_eq!(standing(&bench, 1), Standing::Contract);
}
