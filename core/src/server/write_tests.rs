// SPDX-License-Identifier: Apache-2.0
//! Writes, with bytes: a driver with real lanes, slots and files, whose requests end when chance
//! says so, and that may die.

use super::*;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

#[path = "piece_tests.rs"]
mod pieces;

const DISK: DeviceId = DeviceId(1);
const FILE: FileId = FileId(7);
const KEY: FileKey = FileKey {
    device: 1,
    inode: 70,
};
const HANDLE: HandleId = HandleId(1);
const SLOT: usize = 64 << 10;
const LANE_PAGES: u32 = 64;
const RECORDS: u32 = 24;
const PART_COUNT_MAX: usize = 6;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0 >> 11) * u128::from(end)) >> 53) as u64
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A lane as it lies in memory: it survives the server.
#[derive(Default)]
struct LaneMemory {
    bytes: Vec<u8>,
    records: BTreeMap<u32, (u64, ByteRange, Runs)>,
}

enum Io {
    /// With the file as it was when this was sent, if the device read it then.
    Read(IoRead, Vec<SlotIndex>, Option<Vec<u8>>),
    /// With its bytes as they were when it was sent.
    Write(IoWrite, Vec<WritePart>, Vec<u8>),
}

/// The state of a client.
enum Doing {
    Nothing,
    Reading {
        request: u64,
        range: ByteRange,
        /// The file when it began, and the bytes written since.
        then: Vec<u8>,
        since: Vec<(u64, Vec<u8>)>,
        lengths: Vec<u64>,
    },
    /// Waits for a grant; the bytes it will write.
    Writing {
        request: u64,
        range: ByteRange,
        bytes: Vec<u8>,
    },
    /// Has its grant, and has not committed.
    Granted {
        request: u64,
        range: ByteRange,
        bytes: Vec<u8>,
    },
    Syncing {
        request: u64,
        /// As for reading: by then the medium has this, or newer.
        then: Vec<u8>,
        since: Vec<(u64, Vec<u8>)>,
        lengths: Vec<u64>,
    },
    Holding {
        request: u64,
    },
}

struct World {
    random: Random,
    server: Server,
    now: Instant,
    wake: Instant,
    next_request: u64,
    next_lane: u32,
    published: u64,
    lanes: BTreeMap<LaneId, LaneMemory>,
    slots: Vec<u8>,
    /// The bytes that the file system shows.
    native: Vec<u8>,
    /// The part of that which the device has, and the ranges of the rest that the kernel has not
    /// tried to write yet.
    device: Vec<u8>,
    unwritten: Vec<ByteRange>,
    /// It has tried and failed, and has not reported that yet.
    has_lost: bool,
    /// The part of that which the kernel has not reported to the server, and the part which it has,
    /// until a sync ends well.
    untold: Vec<ByteRange>,
    told: Vec<ByteRange>,
    /// So has the descriptor that writes past it.
    has_lost_past: bool,
    /// A write past its cache goes into it instead, as after any failure, once.
    falls_back: bool,
    /// And is on the device only when the kernel has written it by itself.
    falls_back_lazily: bool,
    /// A failing sync is mostly taken for one that no disk need be to blame for.
    doubts: bool,
    seed: u64,
    version: u64,
    /// The bytes that the file has by the answers to clients, and the commit that each byte is
    /// from.
    flat: Vec<u8>,
    from: Vec<u64>,
    commits: u64,
    ios: Vec<Io>,
    reserves: Vec<u64>,
    reserved_end: u64,
    /// The file as it was at the request for each sync or write-out that the driver has: more of it
    /// need not be on the medium when the driver answers.
    syncs: Vec<Vec<u8>>,
    /// The bytes that the medium has for sure.
    durable: Vec<u8>,
    stats: u32,
    settles: u32,
    clients: Vec<(SessionId, LaneId, Doing)>,
    /// Those of them that have closed the file.
    closed: Vec<SessionId>,
    file_count_max: u32,
    next_session: u32,
    /// The device fails to write now and then, and space is short.
    failing: bool,
    /// Clients may get that error.
    has_failed: bool,
    way: WriteWay,
    is_exclusive: bool,
    /// Small writes here and there, over a file that is read much.
    is_scattered: bool,
    /// Writes of a few bytes, many to a page.
    is_tiny: bool,
    /// The file system takes nothing past the kernel's cache.
    refuses_direct: bool,
    is_booting: bool,
    /// No chance makes it die.
    is_immortal: bool,
    /// Doors know that bytes may be in the kernel's cache alone.
    is_marked_loose: bool,
    /// For the books of the test itself.
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    reads: u64,
    writes: u64,
    plain: u64,
    refused: u64,
    syncs: u64,
    syncs_refused: u64,
    holds: u64,
    holds_refused: u64,
    crashes: u64,
    recovered: u64,
    died_booting: u64,
    device_writes: u64,
    bridged_writes: u64,
    /// From several pieces of memory.
    joined_writes: u64,
    /// Pages of which more than one piece had a part.
    copied_pages: u64,
    strange: u64,
    spent: u64,
    given_back: u64,
    lost: u64,
    fallbacks: u64,
    syncs_failed: u64,
    syncs_doubted: u64,
    syncs_plain: u64,
    forgotten: u64,
}

fn limits() -> Limits {
    Limits {
        slot_count: 12,
        slot_bytes: SLOT as u32,
        chunk_bytes_max: 48 << 10,
        write_buffer_bytes: 60 * PAGE_BYTES,
        write_bytes_max: 100_000,
        write_part_count_max: PART_COUNT_MAX as u32,
        ..Limits::default()
    }
}

fn model() -> DeviceModel {
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

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let length = random.below(200_000) as usize;
        let native: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        let failing = random.one_in(4);
        let is_exclusive = !random.one_in(4);
        let is_scattered = random.one_in(2);
        let is_tiny = random.one_in(4);
        let refuses_direct = random.one_in(8);
        let falls_back_lazily = random.one_in(2);
        let doubts = random.one_in(2);
        let file_count_max = random.below(3) as u32;
        let mut world = World {
            server: Server::new(limits(), Policy::default()),
            closed: Vec::new(),
            file_count_max,
            now: Instant(1),
            wake: Instant::NEVER,
            next_request: 1,
            next_lane: 1,
            published: 0,
            lanes: BTreeMap::new(),
            slots: vec![0xEE; SLOT * 12],
            flat: native.clone(),
            from: vec![0; native.len()],
            durable: native.clone(),
            device: native.clone(),
            unwritten: Vec::new(),
            has_lost: false,
            untold: Vec::new(),
            told: Vec::new(),
            has_lost_past: false,
            falls_back: false,
            falls_back_lazily,
            doubts,
            seed,
            native,
            version: 1,
            commits: 0,
            ios: Vec::new(),
            reserves: Vec::new(),
            reserved_end: 0,
            syncs: Vec::new(),
            stats: 0,
            settles: 0,
            clients: Vec::new(),
            next_session: 1,
            failing,
            has_failed: failing,
            way: WriteWay::Extents,
            is_exclusive,
            is_scattered,
            is_tiny,
            refuses_direct,
            is_booting: false,
            is_immortal: false,
            is_marked_loose: false,
            counts: Counts::default(),
            random,
        };
        world.boot();
        world
    }

    fn facts(&self) -> FileFacts {
        FileFacts {
            file: FILE,
            key: KEY,
            device: DISK,
            size: ByteCount(self.native.len() as u64),
            version: self.version,
            extents: self.extents(),
            hint: None,
            is_header_unread: false,
            way: Some(self.way),
            is_exclusive: self.is_exclusive,
            has_unwritten: true,
            is_fresh: false,
        }
    }

    fn extents(&self) -> Vec<Extent> {
        let end = (self.native.len() as u64)
            .div_ceil(PAGE_BYTES)
            .saturating_mul(PAGE_BYTES)
            .max(self.reserved_end);
        vec![Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(1 << 30),
            length: ByteCount(end),
        }]
    }

    /// A server comes up over the last one's data.
    fn boot(&mut self) {
        let limits = Limits {
            file_count_max: self.file_count_max,
            ..limits()
        };
        self.server = Server::new(limits, Policy::default());
        self.is_marked_loose = false;
        self.is_booting = true;
        self.wake = Instant::NEVER;
        self.reserves.clear();
        self.reserved_end = 0;
        self.syncs.clear();
        self.stats = 0;
        self.settles = 0;
        self.step(Event::DeviceAdded {
            device: DISK,
            model: model(),
        });
        let mut left: Vec<(u64, LaneId, u32, ByteRange, Runs)> = Vec::new();
        for (lane, memory) in &self.lanes {
            for (record, (order, range, runs)) in &memory.records {
                left.push((*order, *lane, *record, *range, *runs));
            }
        }
        left.sort_unstable_by_key(|record| record.0);
        let lanes: Vec<LaneId> = self.lanes.keys().copied().collect();
        for lane in lanes {
            self.step(Event::LaneAdded {
                lane,
                session: None,
                page_count: LANE_PAGES,
                record_count: RECORDS,
            });
        }
        // One in four dies while it comes up, and one in four of those that come then.
        let dies_at = match self.random.one_in(4) {
            true => self.random.below(left.len() as u64 + 2),
            false => u64::MAX,
        };
        let events = left.into_iter().map(|(_, lane, record, range, runs)| {
            let facts = self.facts();
            Event::Recovered {
                lane,
                record,
                facts,
                range,
                runs,
            }
        });
        let mut events: Vec<Event> = events.collect();
        self.counts.recovered += events.len() as u64;
        events.push(Event::RecoveryEnded);
        for (index, event) in events.into_iter().enumerate() {
            self.is_booting = !matches!(event, Event::RecoveryEnded);
            let dies_after = match index as u64 == dies_at {
                true => self.random.below(8) as usize,
                false => usize::MAX,
            };
            if !self.step_to(event, dies_after) || index as u64 == dies_at {
                self.counts.died_booting += 1;
                return self.crash();
            }
        }
        self.clients.clear();
        for _ in 0..3 {
            self.join();
        }
    }

    /// False: the driver died in the middle of the actions.
    fn step(&mut self, event: Event) -> bool {
        self.step_to(event, usize::MAX)
    }

    fn step_to(&mut self, event: Event, dies_after: usize) -> bool {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        let odd = self.server.check();
        assert!(
            odd.is_empty(),
            "the server's state contradicts itself: {odd:#?}"
        );
        let list = core::mem::take(&mut actions.list);
        for (index, action) in list.into_iter().enumerate() {
            if index >= dies_after {
                return false;
            }
            self.act(action, &actions);
        }
        true
    }

    fn lane_bytes(&self, part: &LanePart) -> &[u8] {
        let memory = self.lanes.get(&part.lane).expect("a lane that is there");
        &memory.bytes[part.offset as usize..(part.offset + part.length) as usize]
    }

    fn bytes_of(&self, parts: &[WritePart]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend_from_slice(match *part {
                WritePart::Lane(part) => self.lane_bytes(&part),
                WritePart::Slot {
                    slot,
                    offset,
                    length,
                } => {
                    let at = slot.0 as usize * SLOT + offset as usize;
                    &self.slots[at..at + length as usize]
                }
            });
        }
        bytes
    }

    /// A write over a gap has the bytes that the file has there by now, and goes only where no
    /// other program can have written.
    fn check_gaps(&mut self, io: &IoWrite, parts: &[WritePart], bytes: &[u8]) {
        let mut at = io.range.start.0;
        let mut is_bridged = false;
        for part in parts {
            let end = at + part.bytes();
            if let WritePart::Slot { .. } = part {
                is_bridged = true;
                assert!(self.is_exclusive, "a gap in a file that others write to");
                assert!(!io.buffered && end <= self.native.len() as u64);
                let into = (at - io.range.start.0) as usize..(end - io.range.start.0) as usize;
                assert!(
                    bytes[into] == self.flat[at as usize..end as usize],
                    "{at}..{end} is not what the file has there"
                );
            }
            at = end;
        }
        self.counts.bridged_writes += u64::from(is_bridged);
    }

    fn act(&mut self, action: Action, actions: &Actions) {
        match action {
            Action::Reply {
                session,
                request,
                outcome,
            } => self.reply(session, request.0, outcome, actions),
            Action::Submit(io) => {
                let slots = actions.slots_of(io.slots).to_vec();
                // The device may read at once, and report that late.
                let early = self.random.one_in(2).then(|| self.seen_by(&io));
                self.ios.push(Io::Read(io, slots, early));
            }
            Action::SubmitWrite(io) => {
                let parts = actions.parts_of(io.parts).to_vec();
                let total: u64 = parts.iter().map(WritePart::bytes).sum();
                assert_eq!(total, io.range.length.0, "as many bytes as the range has");
                let bytes = self.bytes_of(&parts);
                self.check_gaps(&io, &parts, &bytes);
                let (pieces, copied) = pieces::memory_of(&io, &parts);
                self.counts.joined_writes += u64::from(pieces > 2);
                self.counts.copied_pages += copied;
                let whole = io.range.start.0.is_multiple_of(PAGE_BYTES)
                    && io.range.end().is_multiple_of(PAGE_BYTES);
                assert!(whole || io.buffered, "{io:?}");
                for other in &self.ios {
                    if let Io::Write(other, ..) = other {
                        let page = |range: ByteRange| {
                            let start = range.start.0 / PAGE_BYTES * PAGE_BYTES;
                            ByteRange::new(start, range.end().next_multiple_of(PAGE_BYTES) - start)
                        };
                        assert!(
                            !page(other.range).overlaps(page(io.range)),
                            "two writes of one page: {other:?} {io:?}"
                        );
                    }
                }
                self.counts.device_writes += 1;
                self.ios.push(Io::Write(io, parts, bytes));
            }
            Action::Fill { slot, offset, from } => {
                let bytes = self.lane_bytes(&from).to_vec();
                let at = slot.0 as usize * SLOT + offset as usize;
                self.slots[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            Action::Zero {
                slot,
                offset,
                length,
            } => {
                let at = slot.0 as usize * SLOT + offset as usize;
                self.slots[at..at + length as usize].fill(0);
            }
            Action::Publish {
                lane,
                record,
                range,
                runs,
                ..
            } => {
                self.published += 1;
                let order = self.published;
                let memory = self.lanes.get_mut(&lane).expect("a lane that is there");
                let former = memory.records.insert(record, (order, range, runs));
                assert!(former.is_none(), "a record published twice");
            }
            Action::Strike { lane, record } => {
                let memory = self.lanes.get_mut(&lane).expect("a lane that is there");
                assert!(memory.records.remove(&record).is_some());
            }
            Action::Spent { lane, record } => {
                let memory = self.lanes.get_mut(&lane).expect("a lane that is there");
                let found = memory.records.get_mut(&record).expect("a record");
                found.2 = Runs::default();
                self.counts.spent += 1;
            }
            // This device has no memory.
            Action::Flush { .. } => unreachable!("it takes writes as it takes reads"),
            Action::GiveMemoryBack { lane, run } => {
                let memory = self.lanes.get_mut(&lane).expect("a lane that is there");
                let start = run.first as usize * PAGE_BYTES as usize;
                let end = start + run.count as usize * PAGE_BYTES as usize;
                memory.bytes[start..end].fill(0);
                self.counts.given_back += 1;
            }
            Action::LaneDone { lane } => {
                let memory = self.lanes.remove(&lane).expect("a lane that is there");
                assert!(memory.records.is_empty());
            }
            Action::Reserve {
                needed, wished_end, ..
            } => {
                assert!(wished_end >= needed.end());
                self.reserves.push(wished_end);
            }
            Action::Sync { .. } | Action::WriteOut { .. } => self.syncs.push(self.native.clone()),
            Action::Stat { .. } => self.stats += 1,
            Action::Trim { .. } => {
                assert!(!self.is_booting, "cut while pieces of it are still told");
                self.reserved_end = 0;
                self.settles += 1;
            }
            Action::Wake { at } => self.wake = at,
            // A server that comes up does not know yet all that was left, nor the length while it
            // asks for it.
            Action::Known { size, .. } if !self.is_booting && self.stats == 0 => {
                assert_eq!(size.0, self.flat.len() as u64, "not as long as was told");
            }
            Action::Loose { is_loose, .. } => {
                assert_ne!(self.is_marked_loose, is_loose, "told twice");
                self.is_marked_loose = is_loose;
            }
            Action::Clean { .. } => {
                assert!(!self.is_booting, "clean while pieces of it are still told");
                assert_eq!(self.native.len(), self.flat.len(), "clean, but not as long");
                self.settles += 1;
            }
            Action::Forget { .. } => {
                assert!(
                    !self.is_booting,
                    "forgotten while pieces of it are still told"
                );
                self.forget();
            }
            Action::Known { .. }
            | Action::OpenNeighbour { .. }
            | Action::AskPool { .. }
            | Action::ReadHeader { .. } => {}
        }
    }

    fn reply(&mut self, session: SessionId, request: u64, outcome: Outcome, actions: &Actions) {
        let Some(index) = self.clients.iter().position(|client| client.0 == session) else {
            return;
        };
        let doing = core::mem::replace(&mut self.clients[index].2, Doing::Nothing);
        let next = match (doing, outcome) {
            (
                Doing::Reading {
                    request: own,
                    range,
                    then,
                    since,
                    lengths,
                },
                outcome,
            ) if own == request => {
                match outcome {
                    Outcome::Data {
                        slots,
                        first_offset,
                        length,
                    } => {
                        let mut got = Vec::new();
                        for (place, slot) in actions.slots_of(slots).iter().enumerate() {
                            let skip = if place == 0 { first_offset as usize } else { 0 };
                            let base = slot.0 as usize * SLOT;
                            got.extend_from_slice(&self.slots[base + skip..base + SLOT]);
                        }
                        got.truncate(length.0 as usize);
                        assert_eq!(got.len() as u64, length.0);
                        self.check_read(range, &got, &then, &since, &lengths);
                        self.step(Event::ReadEnd {
                            session,
                            request: RequestId(request),
                        });
                    }
                    Outcome::Plain if self.is_marked_loose => {
                        // The door asks for a hold before it reads.
                        self.counts.plain += 1;
                    }
                    Outcome::Plain => {
                        self.counts.plain += 1;
                        let native = self.seen_plainly();
                        let end = range.end().min(native.len() as u64).max(range.start.0);
                        let got = native.get(range.start.0 as usize..end as usize);
                        let got = got.unwrap_or(&[]).to_vec();
                        self.check_read(range, &got, &then, &since, &lengths);
                    }
                    other => panic!("a read was answered {other:?}"),
                }
                self.counts.reads += 1;
                Doing::Nothing
            }
            (
                Doing::Writing {
                    request: own,
                    range,
                    bytes,
                },
                outcome,
            ) if own == request => match outcome {
                Outcome::Granted {
                    runs, first_offset, ..
                } => {
                    let lane = self.clients[index].1;
                    let memory = self.lanes.get_mut(&lane).expect("its lane");
                    for (at, &byte) in (u64::from(first_offset)..).zip(&bytes) {
                        let (page, _) = runs.place((at / PAGE_BYTES) as u32).expect("room");
                        let place = u64::from(page) * PAGE_BYTES + at % PAGE_BYTES;
                        memory.bytes[place as usize] = byte;
                    }
                    Doing::Granted {
                        request,
                        range,
                        bytes,
                    }
                }
                Outcome::Failed(errno) => {
                    assert!(self.has_failed, "{errno:?}");
                    self.counts.refused += 1;
                    Doing::Nothing
                }
                // The client would hold the file first, and get its error.
                Outcome::Plain if self.has_failed => Doing::Nothing,
                other => panic!("a write was answered {other:?}"),
            },
            (
                Doing::Granted {
                    request: own,
                    range,
                    bytes,
                },
                Outcome::Done,
            ) if own == request => {
                // Counted when it was sent, see `committed`.
                let _ = (range, bytes);
                self.counts.writes += 1;
                Doing::Nothing
            }
            (
                Doing::Syncing {
                    request: own,
                    then,
                    since,
                    lengths,
                },
                outcome,
            ) if own == request => {
                match outcome {
                    Outcome::Done => {
                        self.counts.syncs += 1;
                        self.check_synced(&then, &since, &lengths);
                    }
                    Outcome::Failed(_) => {
                        assert!(self.has_failed);
                        self.counts.syncs_refused += 1;
                    }
                    Outcome::Plain => self.sync_by_himself(&then, &since, &lengths),
                    other => panic!("a sync was answered {other:?}"),
                }
                Doing::Nothing
            }
            (Doing::Holding { request: own }, Outcome::Failed(_)) if own == request => {
                assert!(self.has_failed);
                self.counts.holds_refused += 1;
                Doing::Nothing
            }
            (Doing::Holding { request: own }, Outcome::Done) if own == request => {
                self.counts.holds += 1;
                let wrong =
                    (0..self.flat.len()).find(|&at| self.native.get(at) != self.flat.get(at));
                assert!(
                    self.native == self.flat,
                    "all of it is written by then: {} of {} bytes, {wrong:?} is wrong, of commit {:?} of {}",
                    self.native.len(),
                    self.flat.len(),
                    wrong.and_then(|at| self.from.get(at)),
                    self.commits,
                );
                assert!(
                    self.device == self.native,
                    "the kernel is done with it, too"
                );
                let length = self.random.below(220_000) as usize;
                let from = length.min(self.native.len()) as u64;
                self.native.resize(length, 0);
                self.device.resize(length, 0);
                self.settle_medium();
                self.flat.resize(length, 0);
                self.commits += 1;
                self.from.resize(length, self.commits);
                self.version += 1;
                for client in &mut self.clients {
                    if let Doing::Reading { since, lengths, .. }
                    | Doing::Syncing { since, lengths, .. } = &mut client.2
                    {
                        since.push((from, vec![0; 400_000]));
                        lengths.push(length as u64);
                    }
                }
                let request = RequestId(self.next_request);
                self.next_request += 1;
                self.step(Event::Changed {
                    session,
                    request,
                    key: KEY,
                    range: ByteRange::new(from, u64::MAX - from),
                    has_bytes: true,
                });
                Doing::Nothing
            }
            (doing, _) => doing,
        };
        self.clients[index].2 = next;
    }

    fn check_read(
        &self,
        range: ByteRange,
        got: &[u8],
        then: &[u8],
        since: &[(u64, Vec<u8>)],
        lengths: &[u64],
    ) {
        let full = |length: u64| {
            length
                .min(range.end())
                .saturating_sub(range.start.0)
                .min(range.length.0)
        };
        assert!(
            lengths
                .iter()
                .any(|&length| full(length) == got.len() as u64),
            "{} bytes of {range:?}, with lengths {lengths:?}",
            got.len()
        );
        for (step, &byte) in got.iter().enumerate() {
            let at = range.start.0 + step as u64;
            let allowed =
                then.get(at as usize).copied().unwrap_or(0) == byte || was_written(since, at, byte);
            assert!(allowed, "byte {at} of {range:?} reads {byte}");
        }
    }

    fn check_synced(&self, then: &[u8], since: &[(u64, Vec<u8>)], lengths: &[u64]) {
        for (at, &byte) in then.iter().enumerate() {
            let allowed = match self.durable.get(at) {
                Some(&found) => found == byte || was_written(since, at as u64, found),
                None => lengths.iter().any(|&length| length <= at as u64),
            };
            assert!(allowed, "byte {at} was synced");
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    fn range(&mut self, end: u64, most: u64) -> ByteRange {
        let start = self.random.below(end);
        let start = if self.random.one_in(3) {
            start / PAGE_BYTES * PAGE_BYTES
        } else {
            start
        };
        ByteRange::new(start, 1 + self.random.below(most))
    }

    /// Whole pages mostly, as databases write.
    fn pages(&mut self) -> ByteRange {
        if self.random.one_in(5) {
            return self.range(200_000, 6_000);
        }
        let start = self.random.below(50) * PAGE_BYTES;
        ByteRange::new(start, (1 + self.random.below(2)) * PAGE_BYTES)
    }

    /// One client does something.
    fn act_client(&mut self) {
        let index = self.random.below(self.clients.len() as u64) as usize;
        let session = self.clients[index].0;
        let request = self.fresh();
        self.open_or_close(session);
        match &mut self.clients[index].2 {
            Doing::Nothing if self.closed.contains(&session) => return,
            Doing::Nothing => {}
            Doing::Granted {
                request,
                range,
                bytes,
            } => {
                let (request, range, bytes) = (*request, *range, bytes.clone());
                return self.commit(session, request, range, &bytes);
            }
            _ => return,
        }
        match self.random.below(12) {
            0..=4 => {
                let range = if self.is_tiny {
                    self.range(20_000, 2_000)
                } else if self.is_scattered && !self.random.one_in(8) {
                    self.pages()
                } else if self.random.one_in(2) {
                    ByteRange::new(self.flat.len() as u64, 1 + self.random.below(60_000))
                } else {
                    self.range(200_000, 30_000)
                };
                if range.end() > 400_000 {
                    return;
                }
                let seed = self.random.below(256) as u8;
                let bytes: Vec<u8> = (0..range.length.0)
                    .map(|at| seed.wrapping_add((at % 253) as u8))
                    .collect();
                self.ask_write(index, request, range, bytes);
            }
            5..=9 => {
                let range = self.range(220_000, 90_000);
                self.ask_read(index, request, range);
            }
            10 => {
                self.ask_sync(index, request);
            }
            _ if self.random.one_in(4) => {
                self.clients[index].2 = Doing::Holding { request };
                self.step(Event::Hold {
                    session,
                    request: RequestId(request),
                    key: KEY,
                });
            }
            _ => {}
        }
    }

    fn ask_write(&mut self, index: usize, request: u64, range: ByteRange, bytes: Vec<u8>) {
        let session = self.clients[index].0;
        self.clients[index].2 = Doing::Writing {
            request,
            range,
            bytes,
        };
        self.step(Event::WriteBegin {
            session,
            handle: HANDLE,
            request: RequestId(request),
            range,
            sent: self.now,
        });
    }

    fn ask_sync(&mut self, index: usize, request: u64) {
        let session = self.clients[index].0;
        self.clients[index].2 = Doing::Syncing {
            request,
            then: self.flat.clone(),
            since: Vec::new(),
            lengths: Vec::new(),
        };
        self.step(Event::Sync {
            session,
            handle: HANDLE,
            request: RequestId(request),
        });
    }

    fn commit(&mut self, session: SessionId, request: u64, range: ByteRange, bytes: &[u8]) {
        // Before the step: its own actions may already answer readers with the new bytes.
        let before = self.published;
        let dies_after = self.death();
        let start = range.start.0 as usize;
        let old = (self.flat.clone(), self.from.clone());
        if self.flat.len() < range.end() as usize {
            self.flat.resize(range.end() as usize, 0);
            self.from.resize(range.end() as usize, self.commits + 1);
        }
        self.commits += 1;
        self.flat[start..start + bytes.len()].copy_from_slice(bytes);
        self.from[start..start + bytes.len()].fill(self.commits);
        let length = self.flat.len() as u64;
        for client in &mut self.clients {
            if let Doing::Reading { since, lengths, .. } | Doing::Syncing { since, lengths, .. } =
                &mut client.2
            {
                since.push((range.start.0, bytes.to_vec()));
                lengths.push(length);
            }
        }
        let lives = self.step_to(
            Event::WriteEnd {
                session,
                request: RequestId(request),
            },
            dies_after,
        );
        if !lives {
            if self.published == before {
                // Not published: no client got an answer, and it never was.
                (self.flat, self.from) = old;
            }
            self.crash();
        }
    }

    /// One device request ends.
    fn end_io(&mut self) {
        if self.ios.is_empty() {
            return;
        }
        let index = self.random.below(self.ios.len() as u64) as usize;
        let io = self.ios.swap_remove(index);
        let (id, result) = match &io {
            Io::Read(io, slots, early) => {
                let seen = early.clone().unwrap_or_else(|| self.seen_by(io));
                (io.io, Ok(ByteCount(self.do_read(io, slots, &seen))))
            }
            Io::Write(io, ..) if self.refuses_direct && !io.buffered => {
                (io.io, Err(Errno::INVALID))
            }
            Io::Write(io, ..) if self.failing && self.random.one_in(6) => (io.io, Err(Errno::IO)),
            Io::Write(io, parts, bytes) => {
                self.do_write(io, parts, bytes);
                self.tell_of_fallback(io);
                (io.io, Ok(io.range.length))
            }
        };
        let dies_after = self.death();
        if !self.step_to(Event::IoDone { io: id, result }, dies_after) {
            self.crash();
        }
    }

    /// The writes of others are none of our syncs' business: they count as on the medium.
    fn settle_medium(&mut self) {
        self.durable.clone_from(&self.native);
        for asked in &mut self.syncs {
            asked.clone_from(&self.native);
        }
    }

    /// The driver has reserved, or could not.
    fn end_reserve(&mut self) {
        if self.reserves.is_empty() {
            return;
        }
        let end = self.reserves.remove(0);
        let result = if self.failing && self.random.one_in(4) {
            Err(Errno::NO_SPACE)
        } else {
            self.reserved_end = self.reserved_end.max(end.next_multiple_of(PAGE_BYTES));
            Ok(self.extents())
        };
        self.step(Event::Reserved { file: FILE, result });
    }

    /// After how many actions of a step the driver dies; mostly not at all.
    fn death(&mut self) -> usize {
        if !self.is_immortal && self.random.one_in(60) {
            self.random.below(8) as usize
        } else {
            usize::MAX
        }
    }

    fn do_read(&mut self, io: &IoRead, slots: &[SlotIndex], native: &[u8]) -> u64 {
        let mut at = io.range.start.0;
        for slot in slots {
            let base = at / SLOT as u64 * SLOT as u64;
            let stop = io.range.end().min(base + SLOT as u64);
            for byte in at..stop {
                let place = slot.0 as usize * SLOT + (byte - base) as usize;
                // Past the end the device gives any bytes.
                self.slots[place] = native.get(byte as usize).copied().unwrap_or(0xAA);
            }
            at = stop;
        }
        (native.len() as u64)
            .min(io.range.end())
            .saturating_sub(io.range.start.0)
    }

    fn do_write(&mut self, io: &IoWrite, parts: &[WritePart], bytes: &[u8]) {
        assert!(
            self.bytes_of(parts) == bytes,
            "bytes that the device reads were changed: {io:?}"
        );
        let at = io.range.start.0 as usize;
        if self.native.len() < at + bytes.len() {
            self.native.resize(at + bytes.len(), 0);
        }
        self.device.resize(self.native.len(), 0);
        self.native[at..at + bytes.len()].copy_from_slice(bytes);
        self.is_given_again(io.range);
        if io.buffered || self.falls_back() {
            self.unwritten.push(io.range);
        } else {
            self.device[at..at + bytes.len()].copy_from_slice(bytes);
        }
        self.version += 1;
    }

    /// Another program writes where none of our writes is on its way.
    fn write_strangely(&mut self) {
        let range = self.range(200_000, 9_000);
        let is_ours = |own: ByteRange| own.overlaps(range);
        let busy = self.ios.iter().any(|io| match io {
            Io::Read(..) => false,
            Io::Write(io, ..) => is_ours(io.range),
        });
        let doing = self.clients.iter().any(|client| match &client.2 {
            Doing::Writing { range, .. } | Doing::Granted { range, .. } => is_ours(*range),
            _ => false,
        });
        let mut records = self.lanes.values().flat_map(|lane| lane.records.values());
        let file = self.server.files.get(&FILE);
        let dirty = file.is_some_and(|file| file.writing.dirty.spans(range).next().is_some());
        // Our bytes that the kernel could not write are written again over bytes that another
        // program wrote there meanwhile: the later of the two cannot be told (decision 0036).
        let loose = file.is_some_and(|file| file.writing.is_loose) && self.failing;
        if busy || doing || dirty || loose || records.any(|record| is_ours(record.1)) {
            return;
        }
        if self.is_exclusive || range.end() > self.native.len() as u64 {
            return;
        }
        let seed = self.random.below(256) as u8;
        let bytes = vec![seed; range.length.0 as usize];
        let place = range.start.0 as usize..range.end() as usize;
        self.native[place.clone()].copy_from_slice(&bytes);
        self.device[place.clone()].copy_from_slice(&bytes);
        self.flat[place].copy_from_slice(&bytes);
        self.keep_what_is_lost();
        self.settle_medium();
        self.version += 1;
        self.counts.strange += 1;
        for client in &mut self.clients {
            if let Doing::Reading { since, .. } | Doing::Syncing { since, .. } = &mut client.2 {
                since.push((range.start.0, bytes.clone()));
            }
        }
        self.step(Event::ForeignChange { key: KEY });
    }

    /// The daemon and every client die. Work under way may have been done, in any order.
    fn crash(&mut self) {
        self.counts.crashes += 1;
        self.keep_what_is_untold();
        let mut ios = core::mem::take(&mut self.ios);
        while !ios.is_empty() {
            let io = ios.swap_remove(self.random.below(ios.len() as u64) as usize);
            if let Io::Write(io, parts, bytes) = &io
                && self.random.one_in(2)
                && (io.buffered || !self.refuses_direct)
            {
                self.do_write(io, parts, bytes);
            }
        }
        self.boot();
    }

    fn turn(&mut self) {
        self.now = self.now + Duration::from_us(self.random.below(40_000));
        if self.now >= self.wake {
            self.wake = Instant::NEVER;
            self.step(Event::Timer);
        }
        // A crash may leave bytes anywhere.
        let touched = self.server.lanes.values().map(LaneState::touched_bytes);
        let memory: u64 = touched.sum();
        assert!(self.counts.crashes > 0 || memory <= limits().write_buffer_bytes);
        match self.random.below(40) {
            0..=15 => self.act_client(),
            // A device that is behind, so that dirty bytes gather.
            16..=31 if self.is_scattered && self.random.one_in(2) => {}
            16..=31 => self.end_io(),
            34 | 35 => self.end_reserve(),
            36 => self.end_sync(),
            37 | 38 if self.stats > 0 => {
                self.answer_stat();
            }
            33 if self.settles > 0 => {
                self.settles -= 1;
                let version = self.version;
                self.step(Event::Settled {
                    file: FILE,
                    version,
                });
            }
            32 if self.random.one_in(4) => self.write_strangely(),
            32 => self.write_from_cache(),
            39 if self.random.one_in(30) => self.crash(),
            39 if self.random.one_in(10) => self.leave(),
            39 if self.random.one_in(6) => self.close_all(),
            39 if self.random.one_in(3) => {
                self.step(Event::Crowded);
            }
            _ => {}
        }
    }

    /// Let everything come to an end.
    fn settle(&mut self) {
        self.failing = false;
        for _ in 0..8000 {
            let idle = self
                .clients
                .iter()
                .all(|client| matches!(client.2, Doing::Nothing));
            let written = self.lanes.values().all(|lane| lane.records.is_empty());
            let loose = !self.server.loose_files.is_empty() || !self.syncs.is_empty();
            if idle && written && self.ios.is_empty() && !loose && !self.is_dirty() {
                break;
            }
            for index in 0..self.clients.len() {
                if let (
                    session,
                    _,
                    Doing::Granted {
                        request,
                        range,
                        bytes,
                    },
                ) = &self.clients[index]
                {
                    let (session, request, range, bytes) =
                        (*session, *request, *range, bytes.clone());
                    self.commit(session, request, range, &bytes);
                    break;
                }
            }
            self.server.hurry_loose(|_, _, _| true);
            self.now = self.now + Duration::from_ms(20);
            self.step(Event::Timer);
            self.end_io();
            self.end_reserve();
            if self.settles > 0 {
                self.settles -= 1;
                let version = self.version;
                self.step(Event::Settled {
                    file: FILE,
                    version,
                });
            }
            self.end_sync();
            if self.stats > 0 {
                self.answer_stat();
            }
        }
        for (session, _, doing) in &self.clients {
            assert!(
                matches!(doing, Doing::Nothing),
                "{session:?} still waits, {}",
                match doing {
                    Doing::Reading { range, .. } => alloc::format!("to read {range:?}"),
                    Doing::Writing { range, .. } => alloc::format!("to write {range:?}"),
                    Doing::Granted { .. } => "granted".to_string(),
                    Doing::Syncing { .. } => "to sync".to_string(),
                    Doing::Holding { .. } => "to hold".to_string(),
                    Doing::Nothing => "for nothing".to_string(),
                }
            );
        }
        for (lane, memory) in &self.lanes {
            assert!(memory.records.is_empty(), "{lane:?}: {:?}", memory.records);
        }
        let wrong = (0..self.flat.len().min(self.native.len()))
            .find(|&at| self.flat[at] != self.native[at]);
        assert!(
            self.native == self.flat,
            "all that was acknowledged is there (seed {}): {} of {} bytes, first wrong {wrong:?} of commit {:?} of {}",
            self.seed,
            self.native.len(),
            self.flat.len(),
            wrong.and_then(|at| self.from.get(at)),
            self.commits
        );
        assert!(self.device == self.flat, "and on the device");
        let held = |lane: &LaneState| lane.pages.held_count();
        assert_eq!(self.server.lanes.values().map(held).sum::<u32>(), 0);
    }
}

#[test]
fn random_writes_reads_syncs_truncates_and_crashes_agree_with_a_flat_file() {
    let mut sum = Counts::default();
    for seed in 0..400 {
        let mut world = World::new(seed);
        for _ in 0..1500 {
            world.turn();
        }
        world.settle();
        sum.reads += world.counts.reads;
        sum.writes += world.counts.writes;
        sum.syncs += world.counts.syncs;
        sum.holds += world.counts.holds;
        sum.holds_refused += world.counts.holds_refused;
        sum.crashes += world.counts.crashes;
        sum.recovered += world.counts.recovered;
        sum.died_booting += world.counts.died_booting;
        sum.device_writes += world.counts.device_writes;
        sum.spent += world.counts.spent;
        sum.given_back += world.counts.given_back;
        sum.bridged_writes += world.counts.bridged_writes;
        sum.joined_writes += world.counts.joined_writes;
        sum.copied_pages += world.counts.copied_pages;
        sum.strange += world.counts.strange;
        sum.refused += world.counts.refused;
        sum.syncs_refused += world.counts.syncs_refused;
        sum.lost += world.counts.lost;
        sum.fallbacks += world.counts.fallbacks;
        sum.syncs_failed += world.counts.syncs_failed;
        sum.syncs_doubted += world.counts.syncs_doubted;
        sum.syncs_plain += world.counts.syncs_plain;
        sum.forgotten += world.counts.forgotten;
    }
    // The test does as its name says.
    assert!(sum.reads > 300 && sum.writes > 300, "{sum:?}");
    assert!(sum.syncs > 30 && sum.holds > 10, "{sum:?}");
    assert!(sum.crashes > 30 && sum.recovered > 30, "{sum:?}");
    assert!(sum.died_booting > 20, "{sum:?}");
    assert!(sum.spent > 20 && sum.given_back > 20, "{sum:?}");
    assert!(sum.bridged_writes > 60 && sum.strange > 20, "{sum:?}");
    assert!(sum.joined_writes > 20 && sum.copied_pages > 100, "{sum:?}");
    assert!(sum.refused > 10 && sum.syncs_refused > 10, "{sum:?}");
    assert!(sum.holds_refused > 3, "{sum:?}");
    assert!(sum.lost > 100 && sum.syncs_failed > 50, "{sum:?}");
    assert!(sum.syncs_doubted > 20, "{sum:?}");
    assert!(sum.fallbacks > 50, "{sum:?}");
    assert!(sum.syncs_plain > 30 && sum.forgotten > 60, "{sum:?}");
}

/// Whether one of these writes put that byte there.
fn was_written(writes: &[(u64, Vec<u8>)], at: u64, byte: u8) -> bool {
    writes.iter().any(|(start, bytes)| {
        at.checked_sub(*start)
            .and_then(|into| bytes.get(into as usize))
            .is_some_and(|&written| written == byte)
    })
}

/// A server over an empty file, with clients that do nothing by themselves.
fn quiet() -> World {
    emptied(World::new(3))
}

/// The same, of a world of its own.
fn emptied(mut world: World) -> World {
    world.doubts = false;
    world.crash();
    world.lanes.clear();
    world.ios.clear();
    (world.native, world.flat, world.from) = (vec![1; 8192], vec![1; 8192], vec![0; 8192]);
    world.durable = world.native.clone();
    world.keep_what_is_lost();
    world.boot();
    world
}

impl World {
    /// Client `index` asks to write, and commits if it may.
    fn write(&mut self, index: usize, range: ByteRange) {
        let (session, request) = (self.clients[index].0, self.fresh());
        let bytes = vec![9 + index as u8; range.length.0 as usize];
        self.ask_write(index, request, range, bytes.clone());
        self.end_reserve();
        if matches!(self.clients[index].2, Doing::Granted { .. }) {
            self.commit(session, request, range, &bytes);
        }
    }

    fn sync(&mut self, index: usize) {
        let request = self.fresh();
        self.ask_sync(index, request);
    }

    fn hold(&mut self, index: usize) {
        let request = self.fresh();
        self.clients[index].2 = Doing::Holding { request };
        self.step(Event::Hold {
            session: self.clients[index].0,
            request: RequestId(request),
            key: KEY,
        });
    }

    /// Time goes by until the device gets a write; it takes that, or fails.
    fn write_back(&mut self, result: Result<(), Errno>) {
        while self.ios.is_empty() {
            self.now = self.now + Duration::from_ms(20);
            self.step(Event::Timer);
        }
        for io in core::mem::take(&mut self.ios) {
            let Io::Write(io, parts, bytes) = io else {
                panic!("nobody reads");
            };
            if result.is_ok() {
                self.do_write(&io, &parts, &bytes);
            }
            let result = result.map(|()| io.range.length);
            self.step(Event::IoDone { io: io.io, result });
        }
    }
}

#[test]
fn a_device_that_fails_refuses_one_write_and_every_sync_until_it_has_everything() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(0, 4096));
    world.write_back(Err(Errno::IO));
    world.write(1, ByteRange::new(4096, 100));
    assert_eq!(world.counts.refused, 1);
    for turn in 1..4 {
        world.write(1, ByteRange::new(4096, 100));
        world.sync(0);
        assert_eq!((world.counts.refused, world.counts.writes), (1, 1 + turn));
        assert_eq!(world.counts.syncs_refused, turn);
        world.write_back(Err(Errno::IO));
    }
    world.settle();
    world.sync(0);
    world.write(1, ByteRange::new(4096, 100));
    world.settle();
    assert_eq!((world.counts.syncs_plain, world.counts.writes), (1, 5));
}

/// It never has everything of a file that is written to without a pause.
#[test]
fn a_device_that_has_what_it_failed_with_fails_no_more_while_more_is_written() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(0, 4096));
    world.write_back(Err(Errno::IO));
    world.write(1, ByteRange::new(PAGE_BYTES, 4096));
    assert_eq!(world.counts.refused, 1);
    for page in 20..24 {
        while world.ios.is_empty() {
            world.now = world.now + Duration::from_ms(20);
            world.step(Event::Timer);
        }
        // It rests: the rest of its page may come yet.
        world.write(1, ByteRange::new(page * PAGE_BYTES, 100));
        world.write_back(Ok(()));
        assert!(world.is_dirty());
    }
    world.sync(0);
    world.settle();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 0));
}

/// A client that would change the file on its own descriptor gets the error as well, and does not
/// keep the next one waiting.
#[test]
fn nobody_waits_for_bytes_that_a_device_does_not_take() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(0, 4096));
    world.hold(1);
    assert_eq!((world.counts.holds, world.counts.holds_refused), (0, 0));
    world.write_back(Err(Errno::IO));
    assert_eq!((world.counts.holds, world.counts.holds_refused), (0, 1));
    world.hold(1);
    assert_eq!((world.counts.holds, world.counts.holds_refused), (0, 2));
    world.settle();
    world.write(0, ByteRange::new(4096, 100));
    assert_eq!(world.counts.writes, 2);
    world.settle();
    world.hold(1);
    assert_eq!((world.counts.holds, world.counts.holds_refused), (1, 2));
}

/// A client that only reads a file has not looked whether it may be written: the earlier finding
/// counts.
#[test]
fn an_open_that_looks_at_nothing_changes_no_way() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 4096));
    world.settle();
    let way = |world: &World| world.server.files.get(&FILE).map(|file| file.way);
    for (found, then) in [
        (None, WriteWay::Extents),
        (Some(WriteWay::Through), WriteWay::Through),
        (None, WriteWay::Through),
        (Some(WriteWay::Extents), WriteWay::Extents),
    ] {
        world.open_again(found);
        assert_eq!(way(&world), Some(then));
    }
}

/// Else a facility would stand still for two seconds, until no client can be expected to go on with
/// that page, whenever a daemon has left such parts all over its lanes.
#[test]
fn whoever_waits_for_memory_does_not_wait_for_the_rest_of_a_page() {
    let mut world = quiet();
    world.crash();
    let length = 80 * PAGE_BYTES as usize;
    (world.native, world.flat, world.from) = (vec![1; length], vec![1; length], vec![0; length]);
    world.durable = world.native.clone();
    world.keep_what_is_lost();
    world.boot();
    for first in [0, 20] {
        world.write(0, ByteRange::new(first * PAGE_BYTES, 20 * PAGE_BYTES));
    }
    // Where it lies is behind all that.
    world.write(0, ByteRange::new(41 * PAGE_BYTES, 100));
    let begun = world.now;
    while world.server.free_bytes() < limits().write_buffer_bytes - PAGE_BYTES {
        world.write_back(Ok(()));
    }
    world.write(1, ByteRange::new(45 * PAGE_BYTES, 24 * PAGE_BYTES));
    assert_eq!((world.counts.writes, world.ios.len()), (3, 1));
    world.write_back(Ok(()));
    // It went through the kernel's cache: its page is free when the device has it.
    world.end_sync();
    assert!(matches!(world.clients[1].2, Doing::Granted { .. }));
    assert!(world.now < begun + Duration::from_s(1));
}

#[path = "left_tests.rs"]
mod left_tests;
#[path = "loose_tests.rs"]
mod loose_tests;
#[path = "short_tests.rs"]
mod short_tests;
#[path = "sync_tests.rs"]
mod sync_tests;
#[path = "visit_tests.rs"]
mod visit_tests;
