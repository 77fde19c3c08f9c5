// SPDX-License-Identifier: Apache-2.0
//! Which gaps are bridged, one rule at a time. The random test in `write_tests` checks that no byte
//! is lost by it.

use super::*;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

const SESSION: SessionId = SessionId(1);
const HANDLE: HandleId = HandleId(1);
const FILE: FileId = FileId(7);
const KEY: FileKey = FileKey {
    device: 1,
    inode: 7,
};
const DISK: DeviceId = DeviceId(1);
const FILE_BYTES: u64 = 8 << 20;
const KIB: u64 = 1 << 10;

/// A file of 8 MiB, and a device that answers when the test says so.
struct Bench {
    server: Server,
    now: Instant,
    next: u64,
    reads: Vec<IoRead>,
    writes: Vec<(IoWrite, Vec<WritePart>)>,
    /// Buffers that get bytes of a lane.
    filled: Vec<SlotIndex>,
    extents: Vec<Extent>,
}

/// How a test differs from a share of our own on a disk that positions.
struct Terms {
    coalesce: bool,
    exclusive: bool,
    fixed: Duration,
    /// Where the second half of the file lies. Units: bytes.
    second_half: u64,
}

const FIRST_HALF: u64 = 1 << 30;
const USUAL: Terms = Terms {
    coalesce: true,
    exclusive: true,
    fixed: Duration::from_ms(6),
    second_half: FIRST_HALF + FILE_BYTES / 2,
};

impl Bench {
    fn new(terms: &Terms) -> Bench {
        let row = ServiceModel {
            fixed: terms.fixed,
            span: Duration::ZERO,
            rate: BytesPerSecond(150_000_000),
        };
        let policy = Policy {
            coalesce: terms.coalesce,
            ..Policy::default()
        };
        let half = |logical: u64, physical: u64| Extent {
            logical: ByteOffset(logical),
            physical: ByteOffset(physical),
            length: ByteCount(FILE_BYTES / 2),
        };
        let mut bench = Bench {
            server: Server::new(Limits::default(), policy),
            now: Instant(1),
            next: 1,
            reads: Vec::new(),
            writes: Vec::new(),
            filled: Vec::new(),
            extents: vec![half(0, FIRST_HALF), half(FILE_BYTES / 2, terms.second_half)],
        };
        bench.step(Event::DeviceAdded {
            device: DISK,
            model: DeviceModel {
                read: ServiceModel {
                    fixed: Duration::from_ms(6),
                    ..row
                },
                write: row,
                size: ByteCount(40 << 30),
            },
        });
        bench.join(SESSION, true);
        let extents = bench.extents.clone();
        bench.step(Event::Opening {
            session: SESSION,
            handle: HANDLE,
            path: "grade.db".to_string(),
            part: FilePart::WHOLE,
        });
        bench.step(Event::Opened {
            session: SESSION,
            handle: HANDLE,
            facts: Ok(FileFacts {
                file: FILE,
                key: KEY,
                device: DISK,
                size: ByteCount(FILE_BYTES),
                version: 1,
                extents,
                hint: None,
                is_header_unread: false,
                way: Some(WriteWay::Extents),
                is_exclusive: terms.exclusive,
                has_unwritten: true,
                is_fresh: false,
            }),
        });
        bench
    }

    fn join(&mut self, session: SessionId, has_lane: bool) {
        self.step(Event::SessionOpened {
            session,
            label: SessionLabel::default(),
        });
        if has_lane {
            self.step(Event::LaneAdded {
                lane: LaneId(session.0),
                session: Some(session),
                page_count: 1 << 14,
                record_count: 1024,
            });
        }
    }

    fn step(&mut self, event: Event) {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        for action in core::mem::take(&mut actions.list) {
            match action {
                Action::Submit(io) => self.reads.push(io),
                Action::Sync { file } | Action::WriteOut { file } => self.step(Event::Synced {
                    file,
                    result: Ok(()),
                }),
                Action::Reserve { file, .. } => self.step(Event::Reserved {
                    file,
                    result: Ok(self.extents.clone()),
                }),
                Action::SubmitWrite(io) => {
                    let parts = actions.parts_of(io.parts).to_vec();
                    self.writes.push((io, parts));
                }
                Action::Fill { slot, .. } => self.filled.push(slot),
                _ => {}
            }
        }
    }

    fn request(&mut self) -> RequestId {
        self.next += 1;
        RequestId(self.next)
    }

    /// All of the file is in the cache.
    fn read_all(&mut self) {
        for start in (0..FILE_BYTES).step_by(1 << 20) {
            self.read(start, 1 << 20);
        }
    }

    fn read(&mut self, start: u64, length: u64) {
        let request = self.request();
        self.step(Event::Read {
            session: SESSION,
            handle: HANDLE,
            request,
            range: ByteRange::new(start, length),
            sent: self.now,
        });
        self.end_reads();
        self.step(Event::ReadEnd {
            session: SESSION,
            request,
        });
        // The bytes read ahead come a moment later.
        self.now = self.now + Duration::from_ms(10);
        self.step(Event::Timer);
        self.end_reads();
    }

    fn end_reads(&mut self) {
        while let Some(io) = self.reads.pop() {
            self.end(io.io, Ok(io.range.length));
        }
    }

    fn end(&mut self, io: IoId, result: Result<ByteCount, Errno>) {
        self.now = self.now + Duration::from_ms(1);
        self.step(Event::IoDone { io, result });
    }

    fn write(&mut self, start: u64, length: u64) {
        let request = self.request();
        self.step(Event::WriteBegin {
            session: SESSION,
            handle: HANDLE,
            request,
            range: ByteRange::new(start, length),
            sent: self.now,
        });
        self.step(Event::WriteEnd {
            session: SESSION,
            request,
        });
    }

    /// A client waits for all of it. Returns the writes that go to the device at once: where, how
    /// much, and how much of that it had already.
    fn sync(&mut self) -> Vec<(u64, u64, u64)> {
        let request = self.request();
        self.step(Event::Sync {
            session: SESSION,
            handle: HANDLE,
            request,
        });
        self.sent()
    }

    fn sent(&self) -> Vec<(u64, u64, u64)> {
        let gaps = |parts: &[WritePart]| -> u64 {
            let slots = parts
                .iter()
                .filter(|part| matches!(part, WritePart::Slot { .. }));
            slots.map(WritePart::bytes).sum()
        };
        let mut sent: Vec<(u64, u64, u64)> = self
            .writes
            .iter()
            .map(|(io, parts)| {
                (
                    io.range.start.0 / KIB,
                    io.range.length.0 / KIB,
                    gaps(parts) / KIB,
                )
            })
            .collect();
        sent.sort_unstable();
        sent
    }

    /// Three runs of 8 KiB, with gaps of 56 KiB.
    fn three_runs(&mut self) -> Vec<(u64, u64, u64)> {
        for nth in 0..3 {
            self.write(nth * 64 * KIB, 8 * KIB);
        }
        self.sync()
    }

    fn bridged_bytes(&self) -> u64 {
        self.server.devices()[0].write_bridged.0
    }
}

/// In KiB: start, length, and the part that the device had.
const ONE: [(u64, u64, u64); 1] = [(0, 136, 112)];
const EACH: [(u64, u64, u64); 3] = [(0, 8, 0), (64, 8, 0), (128, 8, 0)];

fn check(terms: &Terms, is_read: bool, expected: &[(u64, u64, u64)]) {
    let mut bench = Bench::new(terms);
    if is_read {
        bench.read_all();
    }
    assert_eq!(bench.three_runs(), expected);
    let device = &bench.server.devices()[0];
    assert_eq!(device.write_count, expected.len() as u64);
    assert_eq!(
        device.write_bridged.0 / KIB,
        expected.iter().map(|one| one.2).sum::<u64>()
    );
}

#[test]
fn runs_with_known_gaps_become_one_request() {
    check(&USUAL, true, &ONE);
}

#[test]
fn gap_that_nobody_has_read_is_not_bridged() {
    check(&USUAL, false, &EACH);
}

#[test]
fn gap_that_costs_more_than_a_request_is_not_bridged() {
    // 56 KiB take 0.38 ms.
    let terms = |us| Terms {
        fixed: Duration::from_us(us),
        ..USUAL
    };
    check(&terms(370), true, &EACH);
    check(&terms(390), true, &ONE);
}

#[test]
fn switched_off_or_beside_other_writers_each_run_goes_by_itself() {
    let terms = Terms {
        coalesce: false,
        ..USUAL
    };
    check(&terms, true, &EACH);
    let terms = Terms {
        exclusive: false,
        ..USUAL
    };
    check(&terms, true, &EACH);
}

#[test]
fn remainders_go_down_as_one_batch() {
    let mut bench = Bench::new(&USUAL);
    let before = bench.server.devices()[0].batch_count;
    bench.three_runs();
    assert_eq!(bench.writes.len(), 3);
    assert_eq!(bench.server.devices()[0].batch_count, before + 1);
}

#[test]
fn who_writes_by_himself_ends_it() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    bench.join(SessionId(2), false);
    assert_eq!(bench.three_runs(), EACH);

    // Another program writes to it: also when everything has been read again since.
    let mut bench = Bench::new(&USUAL);
    bench.step(Event::ForeignChange { key: KEY });
    bench.step(Event::Stat {
        file: FILE,
        size: ByteCount(FILE_BYTES),
        version: 2,
        is_fresh: false,
    });
    bench.read_all();
    assert_eq!(bench.three_runs(), EACH);
}

#[test]
fn who_holds_the_file_is_not_written_over() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    bench.write(0, 8 * KIB);
    bench.write(64 * KIB, 8 * KIB);
    let request = bench.request();
    bench.step(Event::Hold {
        session: SESSION,
        request,
        key: KEY,
    });
    // The holder waits for that.
    assert_eq!(bench.sent(), [(0, 72, 56)]);
    let (io, _) = bench.writes.remove(0);
    bench.end(io.io, Ok(io.range.length));
    bench.step(Event::Settled {
        file: FILE,
        version: 2,
    });
    // Now the holder may change anything, and a writer through a lane is the holder itself.
    assert_eq!(bench.three_runs(), EACH);
}

#[test]
fn nothing_is_bridged_from_one_extent_to_the_next_nor_past_the_end() {
    let mut bench = Bench::new(&Terms {
        second_half: FIRST_HALF + (1 << 30),
        ..USUAL
    });
    bench.read_all();
    let half = FILE_BYTES / 2;
    bench.write(half - 64 * KIB, 8 * KIB);
    bench.write(half - 16 * KIB, 8 * KIB);
    bench.write(half + 8 * KIB, 8 * KIB);
    let at = half / KIB;
    assert_eq!(bench.sync(), [(at - 64, 56, 40), (at + 8, 8, 0)]);
}

#[test]
fn request_over_gaps_is_no_longer_than_a_chunk() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    for start in (0..FILE_BYTES).step_by(256 << 10) {
        bench.write(start, 8 * KIB);
    }
    let chunk = Limits::default().chunk_bytes_max / KIB;
    for (_, length, _) in bench.sync() {
        assert!(length <= chunk, "{length} KiB");
    }
    assert!(bench.bridged_bytes() > 0);
}

#[test]
fn page_that_is_dirty_in_part_goes_along_and_is_clean_then() {
    let mut bench = Bench::new(&USUAL);
    bench.write(16 * KIB + 100, 50);
    // Read afterwards: a commit drops the page.
    bench.read_all();
    bench.write(0, 8 * KIB);
    bench.write(64 * KIB, 8 * KIB);
    assert_eq!(bench.sync(), [(0, 72, 56)]);
    let (io, _) = bench.writes[0];
    bench.end(io.io, Ok(io.range.length));
    assert_eq!(bench.server.writes().dirty_file_count, 0);
    assert_eq!(bench.writes.len(), 1);
}

#[test]
fn failed_request_over_gaps_is_no_error_and_its_runs_go_one_by_one() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    assert_eq!(bench.three_runs(), ONE);
    let (io, _) = bench.writes.remove(0);
    bench.end(io.io, Err(Errno::IO));
    assert_eq!(bench.sent(), EACH);
}

#[test]
fn file_that_is_written_here_and_there_stays_known() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    assert_eq!(bench.three_runs(), ONE);
    let (io, _) = bench.writes.remove(0);
    bench.end(io.io, Ok(io.range.length));
    // The bytes written then are a gap now.
    bench.write(56 * KIB, 8 * KIB);
    bench.write(72 * KIB, 8 * KIB);
    assert_eq!(bench.sync(), [(56, 24, 8)]);
}

#[test]
fn buffers_under_way_are_given_to_nobody() {
    let mut bench = Bench::new(&USUAL);
    bench.read_all();
    bench.three_runs();
    let pinned = bench.server.cache().pinned_count;
    assert!(pinned > 0);
    // New bytes in the gap wait for it.
    bench.write(32 * KIB, 4 * KIB);
    assert_eq!(bench.sync(), ONE);
    let (io, _) = bench.writes.remove(0);
    bench.end(io.io, Ok(io.range.length));
    assert_eq!(bench.sent(), [(32, 4, 0)]);
    assert_eq!(bench.server.cache().pinned_count, 0);
}

#[test]
fn buffer_that_did_not_get_its_bytes_is_put_together_anew_for_the_next() {
    let mut bench = Bench::new(&USUAL);
    bench.write(0, 8 * KIB);
    let read = |bench: &mut Bench| {
        let request = bench.request();
        bench.step(Event::Read {
            session: SESSION,
            handle: HANDLE,
            request,
            range: ByteRange::new(0, 8 * KIB),
            sent: bench.now,
        });
        let filled = core::mem::take(&mut bench.filled);
        // As if the answer came in the same step, before anything else.
        (request, filled)
    };
    let (request, filled) = read(&mut bench);
    assert!(!filled.is_empty());
    let slot = filled[0];
    bench.step(Event::Unfilled { slot });
    bench.step(Event::ReadEnd {
        session: SESSION,
        request,
    });
    assert_eq!(bench.server.cache().pinned_count, 0);
    let (request, filled) = read(&mut bench);
    assert!(
        !filled.is_empty(),
        "what is in no buffer is read as if it were"
    );
    bench.step(Event::ReadEnd {
        session: SESSION,
        request,
    });
    // One that has its bytes is not filled twice.
    assert_eq!(read(&mut bench).1, []);
}

#[test]
fn what_somebody_follows_stays_in_the_cache_when_it_is_written() {
    let mut bench = Bench::new(&USUAL);
    let record = |bench: &mut Bench, start: u64| {
        bench.write(start, 1 << 20);
        bench.sync();
        while !bench.writes.is_empty() {
            let (io, _) = bench.writes.remove(0);
            bench.end(io.io, Ok(io.range.length));
        }
        assert!(!bench.server.is_dirty(FILE));
    };
    // Without a reader nothing is copied.
    record(&mut bench, 2 << 20);
    assert!(bench.filled.is_empty());
    bench.read(0, 256 * KIB);
    record(&mut bench, 4 << 20);
    assert!(!bench.filled.is_empty(), "somebody is behind it");
    let hits = bench.server.cache().hit_count;
    bench.read(4 << 20, 256 * KIB);
    assert_eq!(
        bench.server.cache().hit_count,
        hits + 1,
        "no device is asked for it"
    );
    // The player has gone past it, or has not read for long.
    bench.filled.clear();
    record(&mut bench, 1 << 20);
    assert!(bench.filled.is_empty(), "nobody will come to it");
    bench.now = bench.now + Duration::from_s(11);
    record(&mut bench, 6 << 20);
    assert!(bench.filled.is_empty(), "the writer has stopped");
}
