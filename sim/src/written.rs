// SPDX-License-Identifier: Apache-2.0
//! The checker's books of written bytes: the acknowledged ones, and those in lanes, buffers,
//! devices and their media.
//!
//! Each acknowledged write has a number. The books track every byte of a file that is written
//! through lanes from the lane to buffers, the device and its medium, by events and actions alone.
//! The driver reports the instant and the result of a device's work ([`Written::device_wrote`] and
//! its neighbours).
//!
//! These rules must hold:
//! - a piece is published, on blocks that were reserved for it, before its client gets the answer;
//! - it is struck when the server has learned that the device has its bytes or newer ones, or when
//!   a newer piece hides it, and not before;
//! - pages of a lane belong to one write at a time, and a device writes the bytes that the client
//!   put there;
//! - a read gives each byte as it was acknowledged when the read came, or newer;
//! - a sync is answered when the medium has all bytes acknowledged before its request;
//! - at the end every acknowledged byte is on its device, and blocks past the end are free.

use crate::contents::{Contents, Origin, Part, compare};
use crate::files::{FileIndex, Files};
use crate::space::is_mapped;
use rushes_core::server::*;
use rushes_core::units::*;
use std::collections::BTreeMap;

/// Acknowledged bytes that a device lacks are late after this time.
const DEVICE_LATE: Duration = Duration::from_s(5);

/// An acknowledged write.
#[derive(Clone, Copy)]
struct Write {
    range: ByteRange,
    number: u64,
    at: Instant,
}

/// A file that is written through lanes.
#[derive(Default)]
struct Book {
    /// Length as acknowledged.
    size: u64,
    /// Length before the first write.
    original: u64,
    /// Length on the device.
    device_size: u64,
    /// Each byte as acknowledged last.
    known: Contents,
    /// The bytes that a read of the device gives.
    device: Contents,
    /// Those of them of which the server knows.
    told: Contents,
    /// The bytes that survive a power cut.
    medium: Contents,
    /// Ascending by number.
    writes: Vec<Write>,
    /// Lengths and the writes that made them, ascending.
    sizes: Vec<(u64, u64)>,
    /// Pieces in tables of lanes.
    pieces: u64,
    /// All writes up to this number were found on the medium.
    synced: u64,
    /// Clients are changing it on their own descriptors.
    natives: u64,
    /// Bytes that the device got late, and the greatest age of one.
    late_bytes: u64,
    worst_age: Duration,
}

/// A piece in the table of a lane.
struct Piece {
    file: FileIndex,
    range: ByteRange,
    runs: Runs,
    parts: Vec<Part>,
}

/// A lane.
struct Lane {
    session: Option<SessionId>,
    contents: Contents,
    pieces: BTreeMap<u32, Piece>,
    /// Pages that belong to a grant or a piece: first and end of each run.
    taken: BTreeMap<u32, u32>,
}

/// The pages of a grant.
struct Grant {
    lane: LaneId,
    file: FileIndex,
    range: ByteRange,
    runs: Runs,
    record: u32,
    /// The client has put its bytes there.
    is_filled: bool,
    is_published: bool,
}

/// A request that writes.
struct Flight {
    io: IoWrite,
    file: FileIndex,
    parts: Vec<Part>,
    lane_parts: Vec<LanePart>,
}

/// A drive with a volatile memory.
#[derive(Default)]
struct Drive {
    /// By place on the device.
    memory: Contents,
    destaging: Vec<Part>,
}

/// The delays of a device, for one file.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceLate {
    /// Bytes that reached the device more than 5 s after their acknowledgement.
    pub bytes: u64,
    /// The longest of those times.
    pub worst: Duration,
}

/// The books.
#[derive(Default)]
pub struct Written {
    /// Sentences about violations since the last look.
    pub found: Vec<String>,
    /// Memory of lanes that was freed. Units: bytes.
    pub given_back_bytes: u64,
    slot_bytes: u64,
    is_used: bool,
    files: BTreeMap<FileIndex, Book>,
    lanes: BTreeMap<LaneId, Lane>,
    grants: BTreeMap<(SessionId, RequestId), Grant>,
    slots: BTreeMap<u32, Contents>,
    reads: BTreeMap<IoId, Vec<Part>>,
    flights: BTreeMap<IoId, Flight>,
    drives: BTreeMap<DeviceId, Drive>,
    last: u64,
}

fn range_of(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end.saturating_sub(start))
}

/// The places of a write's bytes in its lane: start and length of each run.
fn places(runs: &Runs, range: ByteRange) -> Vec<(u64, u64)> {
    let mut skip = range.start.0 % PAGE_BYTES;
    let mut left = range.length.0;
    let mut places = Vec::new();
    for run in runs.as_slice() {
        let room = u64::from(run.count) * PAGE_BYTES - skip;
        let bytes = left.min(room);
        places.push((u64::from(run.first) * PAGE_BYTES + skip, bytes));
        left -= bytes;
        skip = 0;
    }
    places
}

impl Lane {
    fn take(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            self.taken.insert(run.first, run.first + run.count);
        }
    }

    fn free(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            self.taken.remove(&run.first);
        }
    }

    fn is_taken(&self, run: PageRun) -> bool {
        let before = self.taken.range(..run.first + run.count).next_back();
        before.is_some_and(|(_, end)| *end > run.first)
    }
}

impl Book {
    fn new(file: FileIndex, size: u64) -> Book {
        let mut before = Contents::default();
        let origin = Origin::Of {
            file,
            at: 0,
            write: 0,
        };
        before.put(range_of(0, size), origin);
        Book {
            size,
            original: size,
            device_size: size,
            known: before.clone(),
            device: before.clone(),
            told: before.clone(),
            medium: before,
            sizes: vec![(0, size)],
            ..Book::default()
        }
    }

    fn write(&mut self, now: Instant, file: FileIndex, range: ByteRange, number: u64) {
        self.known
            .put(range_of(self.size, range.start.0), Origin::Zero);
        let origin = Origin::Of {
            file,
            at: range.start.0,
            write: number,
        };
        self.known.put(range, origin);
        if range.end() > self.size {
            self.size = range.end();
            self.sizes.push((number, self.size));
        }
        let at = self.writes.partition_point(|write| write.number < number);
        let write = Write {
            range,
            number,
            at: now,
        };
        self.writes.insert(at, write);
    }

    /// The bytes of a range at the time when write `number` was the last one.
    fn as_of(&self, file: FileIndex, range: ByteRange, number: u64) -> Contents {
        let mut then = Contents::default();
        then.put(range, Origin::Zero);
        let at = range.start.0;
        let origin = Origin::Of { file, at, write: 0 };
        then.put(range_of(at, self.original.min(range.end())), origin);
        let end = self.writes.partition_point(|write| write.number <= number);
        for write in &self.writes[..end] {
            let start = write.range.start.0.max(at);
            let origin = Origin::Of {
                file,
                at: start,
                write: write.number,
            };
            then.put(range_of(start, write.range.end().min(range.end())), origin);
        }
        then
    }

    /// The first byte of `parts`, which begin at `start`, that is older than at the time when write
    /// `number` was the last, or that is not of this file.
    fn stale(&self, file: FileIndex, start: u64, parts: &[Part], number: u64) -> Option<String> {
        let bytes = parts.iter().map(|(bytes, _)| bytes).sum();
        let range = ByteRange::new(start, bytes);
        let known = self.known.parts(range);
        if known == parts {
            return None;
        }
        let then = self.as_of(file, range, number).parts(range);
        let mut found = None;
        compare(start, parts, &then, |at, bytes, got, least| {
            let least = least.write_at(file, at).unwrap_or(0);
            let is_right = got.write_at(file, at).is_some_and(|write| {
                write >= least && (write > 0 || at >= self.original || got != Origin::Zero)
            });
            if !is_right && found.is_none() {
                found = Some(format!(
                    "{bytes} bytes at {at} are {got:?}, but write {least} was acknowledged"
                ));
            }
        });
        found
    }

    /// The first byte of a piece that the server may not consider written: it does not know that
    /// the device has it, and no newer piece hides it.
    fn owed(&self, piece: &Piece) -> Option<String> {
        let start = piece.range.start.0;
        let told = self.told.parts(piece.range);
        let known = self.known.parts(piece.range);
        let mut hidden = Vec::new();
        compare(start, &piece.parts, &known, |_, bytes, own, newest| {
            let number = |origin| match origin {
                Origin::Of { write, .. } => write,
                Origin::Zero | Origin::Garbage => 0,
            };
            // Hidden bytes need not be written.
            let owed = if number(newest) > number(own) {
                Origin::Zero
            } else {
                own
            };
            hidden.push((bytes, owed));
        });
        let mut found = None;
        compare(start, &hidden, &told, |at, bytes, own, told| {
            let own = own.write_at(piece.file, at).unwrap_or(0);
            if told.write_at(piece.file, at).unwrap_or(0) < own && found.is_none() {
                found = Some(format!("{bytes} bytes at {at} of write {own}"));
            }
        });
        found
    }
}

impl Written {
    /// Empty books.
    pub fn new(limits: &Limits) -> Written {
        Written {
            slot_bytes: u64::from(limits.slot_bytes),
            ..Written::default()
        }
    }

    /// The number of the last write so far.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// True for a file that is written through lanes.
    pub fn has(&self, file: FileIndex) -> bool {
        self.files.contains_key(&file)
    }

    /// True when a session has or had a lane.
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// True while acknowledged bytes are in lanes alone.
    pub fn is_dirty(&self) -> bool {
        self.files.values().any(|book| book.pieces > 0)
    }

    /// Requests that write and are under way.
    pub fn flight_count(&self) -> usize {
        self.flights.len()
    }

    /// The delays of a file's device.
    pub fn late(&self, file: FileIndex) -> DeviceLate {
        self.files
            .get(&file)
            .map_or(DeviceLate::default(), |book| DeviceLate {
                bytes: book.late_bytes,
                worst: book.worst_age,
            })
    }

    /// Acknowledged bytes of a file that its device lacks.
    pub fn missing(&self, file: FileIndex) -> u64 {
        let Some(book) = self.files.get(&file) else {
            return 0;
        };
        let mut missing = 0;
        let all = range_of(0, book.size);
        book.known
            .compare(&book.device, all, |_, bytes, known, device| {
                let is_hole = known == Origin::Zero && device == Origin::Garbage;
                missing += if known == device || is_hole { 0 } else { bytes };
            });
        missing
    }

    fn wrong(&mut self, sentence: String) {
        self.found.push(sentence);
    }

    // ---- Events ----

    /// A file is written through lanes.
    pub fn learn(&mut self, file: FileIndex, size: u64) {
        self.files
            .entry(file)
            .or_insert_with(|| Book::new(file, size));
    }

    /// A session has a lane.
    pub fn lane_added(&mut self, lane: LaneId, session: Option<SessionId>) {
        let memory = Lane {
            session,
            contents: Contents::default(),
            pieces: BTreeMap::new(),
            taken: BTreeMap::new(),
        };
        self.lanes.insert(lane, memory);
        self.is_used = true;
    }

    /// A client has put its bytes into its pages.
    pub fn filled(&mut self, session: SessionId, request: RequestId) {
        if let Some(grant) = self.grants.get_mut(&(session, request)) {
            grant.is_filled = true;
        }
    }

    /// A client returns its pages unused.
    pub fn aborted(&mut self, session: SessionId, request: RequestId) {
        if let Some(grant) = self.grants.remove(&(session, request))
            && let Some(lane) = self.lanes.get_mut(&grant.lane)
        {
            lane.free(&grant.runs);
        }
    }

    /// A session is gone, and its grants with it.
    pub fn session_closed(&mut self, session: SessionId) {
        let of = (session, RequestId(0))..=(session, RequestId(u64::MAX));
        let requests: Vec<RequestId> = self.grants.range(of).map(|(key, _)| key.1).collect();
        for request in requests {
            self.aborted(session, request);
        }
        for lane in self.lanes.values_mut() {
            lane.session = lane.session.filter(|owner| *owner != session);
        }
    }

    // ---- Devices ----

    /// A device has read for `io`: its bytes as they are now.
    pub fn device_read(&mut self, io: IoId, file: FileIndex, range: ByteRange) {
        if let Some(book) = self.files.get(&file) {
            self.reads.insert(io, book.device.parts(range));
        }
    }

    /// A device has written the bytes of `io`. `is_volatile`: to a memory, not to its medium.
    pub fn device_wrote(&mut self, now: Instant, io: IoId, is_volatile: bool) {
        let Some(flight) = self.flights.get(&io) else {
            return self.wrong(format!(
                "the world ended write {} that was never begun",
                io.0
            ));
        };
        let (file, range) = (flight.file, flight.io.range);
        let Some(book) = self.files.get_mut(&file) else {
            return;
        };
        let start = range.start.0;
        let mut older = None;
        let there = book.device.parts(range);
        let (mut late, mut worst) = (0, Duration::ZERO);
        compare(start, &flight.parts, &there, |at, bytes, new, old| {
            let (new, old) = (new.write_at(file, at), old.write_at(file, at).unwrap_or(0));
            let new = new.unwrap_or(0);
            if new < old {
                older = Some(format!(
                    "{bytes} bytes at {at} of write {new} come over write {old}"
                ));
            }
            let known = book.writes.binary_search_by_key(&new, |write| write.number);
            if let (true, Ok(index)) = (new > old, known) {
                let age = now.since(book.writes[index].at);
                worst = worst.max(age);
                late += if age > DEVICE_LATE { bytes } else { 0 };
            }
        });
        book.late_bytes += late;
        book.worst_age = book.worst_age.max(worst);
        book.device
            .put(range_of(book.device_size, start), Origin::Zero);
        book.device_size = book.device_size.max(range.end());
        book.device.put_parts(start, &flight.parts);
        if !is_volatile {
            book.medium.put_parts(start, &flight.parts);
        }
        if let Some(sentence) = older {
            self.wrong(format!("on the device of {file:?} {sentence}"));
        }
    }

    /// A drive has taken the bytes of `io` into its memory, as these runs on the device.
    pub fn drive_took(&mut self, disk: DeviceId, io: IoId, pieces: &[(u64, u64)]) {
        let Some(flight) = self.flights.get(&io) else {
            return;
        };
        let mut whole = Contents::default();
        whole.put_parts(0, &flight.parts);
        let drive = self.drives.entry(disk).or_default();
        let mut at = 0;
        for &(start, bytes) in pieces {
            let parts = whole.parts(ByteRange::new(at, bytes));
            drive.memory.put_parts(start, &parts);
            at += bytes;
        }
    }

    /// A drive begins to destage a run of its memory.
    pub fn destage_begins(&mut self, disk: DeviceId, run: ByteRange) {
        let drive = self.drives.entry(disk).or_default();
        drive.destaging = drive.memory.parts(run);
        drive.memory.clear(run);
    }

    /// The run is on the medium.
    pub fn destage_ends(&mut self, disk: DeviceId) {
        let Some(drive) = self.drives.get_mut(&disk) else {
            return;
        };
        for (bytes, origin) in std::mem::take(&mut drive.destaging) {
            let Origin::Of { file, at, .. } = origin else {
                continue;
            };
            if let Some(book) = self.files.get_mut(&file) {
                book.medium.put(ByteRange::new(at, bytes), origin);
            }
        }
    }

    /// The server gets the completion of `io`. False: it is no request that writes.
    pub fn write_done(&mut self, io: IoId, result: Result<ByteCount, Errno>) -> bool {
        let Some(flight) = self.flights.remove(&io) else {
            return false;
        };
        if let (Ok(_), Some(book)) = (result, self.files.get_mut(&flight.file)) {
            book.told.put_parts(flight.io.range.start.0, &flight.parts);
        }
        true
    }

    /// The server gets the completion of a read into `slot`, from `offset` on; `into`: the part of
    /// the read's bytes that goes there.
    pub fn read_done(&mut self, io: IoId, slot: u32, offset: u64, into: ByteRange) {
        if let Some(parts) = self.reads.get(&io) {
            let mut whole = Contents::default();
            whole.put_parts(0, parts);
            let slot = self.slots.entry(slot).or_default();
            slot.put_parts(offset, &whole.parts(into));
        }
    }

    /// All of the read is in its places.
    pub fn read_over(&mut self, io: IoId) {
        self.reads.remove(&io);
    }

    /// A device writes into a slot: its content is unknown meanwhile.
    pub fn slot_lost(&mut self, slot: u32, range: ByteRange) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.clear(range);
        }
    }

    // ---- Clients that write on their own descriptors ----

    /// A client writes on its own descriptor. Returns the number of that write, which is reported
    /// later.
    pub fn native_write(&mut self, file: FileIndex, range: ByteRange) -> u64 {
        self.last += 1;
        let number = self.last;
        if let Some(book) = self.files.get_mut(&file) {
            let origin = Origin::Of {
                file,
                at: range.start.0,
                write: number,
            };
            book.natives += 1;
            let gap = range_of(book.device_size, range.start.0);
            for device in [&mut book.device, &mut book.told] {
                device.put(gap, Origin::Zero);
                device.put(range, origin);
            }
            book.device_size = book.device_size.max(range.end());
        }
        number
    }

    /// The server has acknowledged its report of that write.
    pub fn native_told(&mut self, now: Instant, file: FileIndex, range: ByteRange, number: u64) {
        if let Some(book) = self.files.get_mut(&file) {
            book.natives -= 1;
            book.write(now, file, range, number);
        }
    }

    // ---- Answers ----

    /// A write gets these pages.
    pub fn granted(
        &mut self,
        (session, request): (SessionId, RequestId),
        file: FileIndex,
        range: ByteRange,
        outcome: Outcome,
    ) {
        let Outcome::Granted {
            runs,
            first_offset,
            length,
            record,
        } = outcome
        else {
            return;
        };
        let mut lanes = self.lanes.iter_mut();
        let found = lanes.find(|(_, lane)| lane.session == Some(session));
        let Some((&id, lane)) = found else {
            return self.wrong(format!("{session:?} has no lane, and is granted {runs:?}"));
        };
        let pages = range.end().div_ceil(PAGE_BYTES) - range.start.0 / PAGE_BYTES;
        let mut trouble = Vec::new();
        if u64::from(first_offset) != range.start.0 % PAGE_BYTES
            || length != range.length
            || u64::from(runs.page_count()) != pages
        {
            trouble.push(format!("{outcome:?} is granted for {range:?}"));
        }
        let under_way = self.flights.values().flat_map(|flight| &flight.lane_parts);
        let under_way: Vec<&LanePart> = under_way.filter(|part| part.lane == id).collect();
        for &run in runs.as_slice() {
            if lane.is_taken(run) || under_way.iter().any(|part| is_within(part, run)) {
                trouble.push(format!("{run:?} of {id:?} is granted and still in use"));
            }
        }
        if lane.pieces.contains_key(&record) {
            trouble.push(format!("record {record} of {id:?} is granted and in use"));
        }
        lane.take(&runs);
        let grant = Grant {
            lane: id,
            file,
            range,
            runs,
            record,
            is_filled: false,
            is_published: false,
        };
        if self.grants.insert((session, request), grant).is_some() {
            trouble.push(format!("{request:?} of {session:?} is granted twice"));
        }
        self.found.extend(trouble);
    }

    /// A write is acknowledged.
    pub fn acknowledged(&mut self, session: SessionId, request: RequestId) {
        let grant = self.grants.remove(&(session, request));
        if !grant.is_some_and(|grant| grant.is_published) {
            self.wrong(format!(
                "{request:?} of {session:?} is acknowledged before its piece is published"
            ));
        }
    }

    /// A sync is answered whose request came when write `number` was the last.
    pub fn synced(&mut self, file: FileIndex, number: u64) {
        let Some(book) = self.files.get_mut(&file) else {
            return;
        };
        let synced = book.synced;
        let asked = |write: &&Write| write.number > synced && write.number <= number;
        let mut lacking = None;
        for write in book.writes.iter().filter(asked) {
            let mut at = write.range.start.0;
            for (bytes, origin) in book.medium.parts(write.range) {
                if origin.write_at(file, at).unwrap_or(0) < write.number {
                    lacking = Some(format!("{bytes} bytes at {at} of write {}", write.number));
                }
                at += bytes;
            }
        }
        book.synced = book.synced.max(number);
        if let Some(lacking) = lacking {
            self.wrong(format!(
                "a sync of {file:?} is answered, and the medium lacks {lacking}"
            ));
        }
    }

    /// Clients do a request themselves that came when write `number` was the last: the device must
    /// have all its bytes.
    pub fn left_to_client(&mut self, what: &str, file: FileIndex, range: ByteRange, number: u64) {
        let Some(book) = self.files.get(&file) else {
            return;
        };
        let end = range.end().min(book.size);
        let range = range_of(range.start.0, end);
        let parts = with_holes(book.device.parts(range));
        let stale = book.stale(file, range.start.0, &parts, number);
        if let Some(stale) = stale {
            self.wrong(format!("{what} of {file:?} is left to its client: {stale}"));
        }
    }

    /// The fault in an answer of `length` bytes at `range` of a file, out of these slots, to a read
    /// that came when write `number` was the last.
    pub fn misread(
        &self,
        file: FileIndex,
        range: ByteRange,
        length: u64,
        slots: &[SlotIndex],
        number: u64,
    ) -> Option<String> {
        let book = self.files.get(&file)?;
        let before = book.sizes.partition_point(|(write, _)| *write <= number);
        let mut sizes = book.sizes[before.saturating_sub(1)..].iter();
        let is_it = |size: u64| size.saturating_sub(range.start.0).min(range.length.0) == length;
        let is_native = book.natives > 0 && is_it(book.device_size);
        if !sizes.any(|(_, size)| is_it(*size)) && !is_native {
            return Some(format!("the file has {} bytes", book.size));
        }
        let mut parts = Vec::new();
        let mut at = range.start.0;
        for slot in slots {
            let offset = at % self.slot_bytes;
            let end = (at - offset + self.slot_bytes).min(range.start.0 + length);
            let here = ByteRange::new(offset, end - at);
            match self.slots.get(&slot.0) {
                Some(slot) => parts.extend(slot.parts(here)),
                None => parts.push((end - at, Origin::Garbage)),
            }
            at = end;
        }
        book.stale(file, range.start.0, &parts, number)
    }

    // ---- Actions ----

    /// An action about writes. `file`: the file that it names, if it names one.
    pub fn action(
        &mut self,
        now: Instant,
        action: &Action,
        actions: &Actions,
        file: Option<FileIndex>,
        files: &Files,
    ) {
        match action {
            Action::Publish { .. }
            | Action::SubmitWrite(_)
            | Action::Known { .. }
            | Action::Clean { .. }
            | Action::Loose { .. }
            | Action::Reserve { .. }
            | Action::Sync { .. }
            | Action::WriteOut { .. }
            | Action::Trim { .. }
                if !file.is_some_and(|file| self.has(file)) =>
            {
                self.wrong(format!("{action:?} of a file that is not written so"));
            }
            Action::Publish { .. } => self.publish(now, action, file, files),
            Action::SubmitWrite(io) => {
                if let Some(file) = file {
                    self.submit(*io, file, actions.parts_of(io.parts), files);
                }
            }
            Action::Fill { slot, offset, from } => self.fill(*slot, *offset, from),
            Action::Zero {
                slot,
                offset,
                length,
            } => {
                let range = ByteRange::new(u64::from(*offset), u64::from(*length));
                let slot = self.slots.entry(slot.0).or_default();
                slot.put(range, Origin::Zero);
            }
            Action::Spent { lane, record } => self.struck(*lane, *record, true),
            Action::Strike { lane, record } => self.struck(*lane, *record, false),
            Action::GiveMemoryBack { lane, run } => self.given_back(*lane, *run),
            Action::LaneDone { lane } => self.lane_done(*lane),
            Action::Known { size, .. } | Action::Trim { size, .. } => {
                let book = file.and_then(|file| self.files.get(&file));
                if let Some(book) = book.filter(|book| book.natives == 0 && book.size != size.0) {
                    self.wrong(format!("{action:?}, but the file has {} bytes", book.size));
                }
            }
            Action::Clean { .. } => {
                let is_owed = |file: &FileIndex| self.owes(*file);
                if let Some(file) = file.filter(is_owed) {
                    self.wrong(format!(
                        "{file:?} is clean, and its device lacks bytes of it"
                    ));
                }
            }
            Action::Reserve {
                needed, wished_end, ..
            } if *wished_end < needed.end() => {
                self.wrong(format!("{action:?} wishes for less than it needs"));
            }
            _ => {}
        }
    }

    /// Whether the server does not know yet that the device has all of the file.
    fn owes(&self, file: FileIndex) -> bool {
        let Some(book) = self.files.get(&file).filter(|book| book.natives == 0) else {
            return false;
        };
        let mut owes = false;
        let all = range_of(0, book.size);
        book.known.compare(&book.told, all, |_, _, known, told| {
            owes |= known != told && known != Origin::Zero;
        });
        owes
    }

    fn publish(&mut self, now: Instant, action: &Action, file: Option<FileIndex>, files: &Files) {
        let (
            &Action::Publish {
                lane: id,
                record,
                range,
                runs,
                request,
                ..
            },
            Some(file),
        ) = (action, file)
        else {
            return;
        };
        if !is_mapped(&files.get(file).extents, range) {
            self.wrong(format!("{action:?} on blocks that were not reserved"));
        }
        let Some(lane) = self.lanes.get_mut(&id) else {
            return self.wrong(format!("{action:?} in a lane that is gone"));
        };
        if let Some(request) = request {
            let session = lane.session.unwrap_or_default();
            let grant = self.grants.get_mut(&(session, request));
            let is_as_granted = |grant: &&mut Grant| {
                (grant.lane, grant.record, grant.file) == (id, record, file)
                    && (grant.range, grant.runs) == (range, runs)
                    && grant.is_filled
            };
            let Some(grant) = grant.filter(is_as_granted) else {
                return self.wrong(format!("{action:?} was not granted so, or not filled"));
            };
            grant.is_published = true;
            self.last += 1;
            let mut at = range.start.0;
            for (start, bytes) in places(&runs, range) {
                let origin = Origin::Of {
                    file,
                    at,
                    write: self.last,
                };
                lane.contents.put(ByteRange::new(start, bytes), origin);
                at += bytes;
            }
            if let Some(book) = self.files.get_mut(&file) {
                book.write(now, file, range, self.last);
            }
        }
        lane.take(&runs);
        let mut parts = Vec::new();
        for (start, bytes) in places(&runs, range) {
            parts.extend(lane.contents.parts(ByteRange::new(start, bytes)));
        }
        let piece = Piece {
            file,
            range,
            runs,
            parts,
        };
        let misplaced = misplaced(file, range.start.0, &piece.parts);
        let is_twice = lane.pieces.insert(record, piece).is_some();
        if let Some(book) = self.files.get_mut(&file) {
            book.pieces += 1;
        }
        if is_twice {
            self.wrong(format!("{action:?}, but the record is in use"));
        }
        if let Some(misplaced) = misplaced {
            self.wrong(format!("{action:?}: {misplaced}"));
        }
    }

    fn struck(&mut self, id: LaneId, record: u32, stays: bool) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return self.wrong(format!("record {record} of {id:?} is struck: no such lane"));
        };
        let Some(piece) = lane.pieces.remove(&record) else {
            return self.wrong(format!(
                "record {record} of {id:?} is struck: no such piece"
            ));
        };
        lane.free(&piece.runs);
        let Some(book) = self.files.get_mut(&piece.file) else {
            return;
        };
        let owed = book.owed(&piece);
        if stays {
            let spent = Piece {
                runs: Runs::default(),
                range: range_of(0, 0),
                parts: Vec::new(),
                ..piece
            };
            lane.pieces.insert(record, spent);
        } else {
            book.pieces -= 1;
        }
        if let Some(owed) = owed {
            self.wrong(format!(
                "record {record} of {id:?} is struck before its device has {owed}"
            ));
        }
    }

    fn submit(&mut self, io: IoWrite, file: FileIndex, parts: &[WritePart], files: &Files) {
        let known = files.get(file);
        let is_page = |at: u64| at.is_multiple_of(PAGE_BYTES);
        let total: u64 = parts.iter().map(WritePart::bytes).sum();
        let mut trouble = Vec::new();
        if total != io.range.length.0 || total == 0 {
            trouble.push("has not as many bytes as its range");
        }
        let is_whole = is_page(io.range.start.0) && is_page(io.range.end());
        if !io.buffered && !is_whole {
            trouble.push("is not of whole pages, past the kernel's cache");
        }
        if io.device != known.device {
            trouble.push("goes to a device that the file is not on");
        }
        if !is_mapped(&known.extents, io.range) {
            trouble.push("goes to blocks that were not reserved");
        }
        let whole = |range: ByteRange| {
            let start = range.start.0 / PAGE_BYTES * PAGE_BYTES;
            range_of(start, range.end().next_multiple_of(PAGE_BYTES))
        };
        let meets =
            |other: &&Flight| other.file == file && whole(other.io.range).overlaps(whole(io.range));
        if self.flights.values().any(|other| meets(&other)) {
            trouble.push("writes a page that another request writes");
        }
        let origins = self.origins(parts);
        let lane_parts = parts.iter().filter_map(|part| match part {
            WritePart::Lane(part) => Some(*part),
            WritePart::Slot { .. } => None,
        });
        let is_bridged = parts.iter().any(|p| matches!(p, WritePart::Slot { .. }));
        if is_bridged && (io.buffered || !known.is_exclusive) {
            trouble.push("goes over a gap where others may write");
        }
        let misplaced = misplaced(file, io.range.start.0, &origins);
        // A gap has the newest bytes: the server writes none over it that a newer piece hides.
        let book = self.files.get(&file);
        let stale = book
            .filter(|_| is_bridged)
            .and_then(|book| book.stale(file, io.range.start.0, &origins, self.last));
        let flight = Flight {
            io,
            file,
            parts: origins,
            lane_parts: lane_parts.collect(),
        };
        if self.flights.insert(io.io, flight).is_some() {
            trouble.push("is in flight already");
        }
        let told = trouble.into_iter().map(str::to_owned);
        for trouble in told.chain(misplaced).chain(stale) {
            self.found.push(format!("a request {trouble}: {io:?}"));
        }
    }

    /// The origins of a request's bytes.
    fn origins(&self, parts: &[WritePart]) -> Vec<Part> {
        let mut origins = Vec::new();
        for part in parts {
            let (contents, start) = match part {
                WritePart::Lane(part) => {
                    let lane = self.lanes.get(&part.lane);
                    (lane.map(|lane| &lane.contents), part.offset)
                }
                WritePart::Slot { slot, offset, .. } => {
                    (self.slots.get(&slot.0), u64::from(*offset))
                }
            };
            let range = ByteRange::new(start, part.bytes());
            match contents {
                Some(contents) => origins.extend(contents.parts(range)),
                None => origins.push((part.bytes(), Origin::Garbage)),
            }
        }
        origins
    }

    fn fill(&mut self, slot: SlotIndex, offset: u32, from: &LanePart) {
        let Some(lane) = self.lanes.get(&from.lane) else {
            return self.wrong(format!("{slot:?} is filled from {from:?}: no such lane"));
        };
        let parts = lane
            .contents
            .parts(ByteRange::new(from.offset, from.length));
        let slot = self.slots.entry(slot.0).or_default();
        slot.put_parts(u64::from(offset), &parts);
    }

    /// The block of a file to which bytes of a lane belong.
    pub fn block_of(&self, from: &LanePart) -> Option<(FileIndex, u64)> {
        let lane = self.lanes.get(&from.lane)?;
        let parts = lane.contents.parts(ByteRange::new(from.offset, 1));
        match parts.first() {
            Some(&(_, Origin::Of { file, at, .. })) => Some((file, at / self.slot_bytes)),
            _ => None,
        }
    }

    fn given_back(&mut self, id: LaneId, run: PageRun) {
        let under_way = self.flights.values().flat_map(|flight| &flight.lane_parts);
        let is_used = under_way
            .filter(|part| part.lane == id)
            .any(|part| is_within(part, run));
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        let is_used = is_used || lane.is_taken(run);
        let bytes = u64::from(run.count) * PAGE_BYTES;
        let start = u64::from(run.first) * PAGE_BYTES;
        lane.contents.clear(ByteRange::new(start, bytes));
        self.given_back_bytes += bytes;
        if is_used {
            self.wrong(format!("{run:?} of {id:?} is given back and still in use"));
        }
    }

    fn lane_done(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.remove(&id) else {
            return self.wrong(format!("{id:?} is done, and was before"));
        };
        if lane.session.is_some() || !lane.pieces.is_empty() {
            let count = lane.pieces.len();
            self.wrong(format!(
                "{id:?} of {:?} is done with {count} pieces in it",
                lane.session
            ));
        }
    }

    // ---- The end ----

    /// When all had time: no acknowledged byte is missing. `is_excused`: the device of that file
    /// never recovers.
    pub fn finish(&mut self, files: &Files, is_excused: impl Fn(FileIndex) -> bool) {
        let all: Vec<FileIndex> = self.files.keys().copied().collect();
        for file in all.into_iter().filter(|file| !is_excused(*file)) {
            let missing = self.missing(file);
            let book = &self.files[&file];
            let (pieces, size) = (book.pieces, book.size.max(book.device_size));
            let room = files.get(file).room();
            if missing > 0 {
                self.wrong(format!(
                    "{missing} acknowledged bytes of {file:?} are not on its device"
                ));
            }
            if pieces > 0 {
                self.wrong(format!("{pieces} pieces of {file:?} were never struck"));
            }
            if room > size.next_multiple_of(PAGE_BYTES) {
                self.wrong(format!(
                    "{file:?} has {size} bytes and keeps blocks up to {room}"
                ));
            }
        }
    }
}

/// Whether some of a lane's bytes lie in these pages.
fn is_within(part: &LanePart, run: PageRun) -> bool {
    let start = u64::from(run.first) * PAGE_BYTES;
    let end = start + u64::from(run.count) * PAGE_BYTES;
    part.offset < end && part.offset + part.length > start
}

/// Bytes that no write put there are zeros to the file system.
fn with_holes(parts: Vec<Part>) -> Vec<Part> {
    let hole = |origin| match origin {
        Origin::Garbage => Origin::Zero,
        same => same,
    };
    parts
        .into_iter()
        .map(|(bytes, origin)| (bytes, hole(origin)))
        .collect()
}

/// The first of these bytes that does not belong there.
fn misplaced(file: FileIndex, start: u64, parts: &[Part]) -> Option<String> {
    let mut at = start;
    for &(bytes, origin) in parts {
        if origin.write_at(file, at).is_none() {
            return Some(format!("has {bytes} bytes for {at} that are {origin:?}"));
        }
        at += bytes;
    }
    None
}
