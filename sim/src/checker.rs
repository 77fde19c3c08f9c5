// SPDX-License-Identifier: Apache-2.0
//! Watches the seam from outside: the promises of its text must hold in every run.
//!
//! It keeps its own books of slots, requests and device I/O from the events and actions alone, and
//! compares with the true content of the files. Lateness is not its subject, but
//! [`crate::judge`]'s, by the players' own measure.
//!
//! These rules must hold:
//! - an answer holds the right bytes of the right file, none older than an acknowledged change;
//! - no slot is refilled while a client reads it or a device writes into it;
//! - every request gets exactly one answer, a dead client gets none, and no client waits for ever;
//! - the rules of [`crate::written`] for bytes that are written through lanes;
//! - no bound of `Limits` is exceeded; forgotten files are not used; requests have the agreed form.

use crate::files::{FileIndex, Files};
use crate::written::Written;
use rushes_core::format::REPLY_SLOTS_MAX;
use rushes_core::server::{
    Action, Actions, Errno, Event, FileFacts, IoRead, Limits, Outcome, PAGE_BYTES, SlotRun,
    WriteWay,
};
use rushes_core::units::*;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Violations reported in full; the others are counted.
const TOLD_MAX: usize = 20;

/// Hashes one integer well and quickly; the same in every run.
#[derive(Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

type IdMap<T> = HashMap<u64, T, BuildHasherDefault<IdHasher>>;

/// Pages of one slot, half open.
type Pages = (u16, u16);

fn meet(one: Pages, two: Pages) -> bool {
    one.0 < two.1 && two.0 < one.1
}

/// The contents of a slot.
#[derive(Default)]
struct Slot {
    /// The file and its block.
    owner: Option<(FileIndex, u64)>,
    /// Pages that were read, with the file's serial at that time. Ascending, apart.
    valid: Vec<(Pages, u64)>,
    /// Pages that clients read.
    pins: Vec<Pages>,
    /// Pages into which a device writes.
    fills: Vec<Pages>,
}

impl Slot {
    fn invalidate(&mut self, pages: Pages) {
        if !self.valid.iter().any(|(valid, _)| meet(*valid, pages)) {
            return;
        }
        let mut tails = [None; 1];
        for (valid, serial) in &mut self.valid {
            if !meet(*valid, pages) {
                continue;
            }
            if valid.0 < pages.0 && valid.1 > pages.1 {
                tails[0] = Some(((pages.1, valid.1), *serial));
            }
            if valid.0 < pages.0 {
                valid.1 = pages.0;
            } else {
                valid.0 = pages.1.min(valid.1);
            }
        }
        self.valid.retain(|(valid, _)| valid.0 < valid.1);
        self.valid.extend(tails.into_iter().flatten());
        self.valid.sort_unstable();
    }

    fn validate(&mut self, pages: Pages, serial: u64) {
        self.invalidate(pages);
        if let Some(last) = self.valid.last_mut()
            && last.0.1 == pages.0
            && last.1 == serial
        {
            last.0.1 = pages.1;
            return;
        }
        self.valid.push((pages, serial));
        self.valid.sort_unstable();
    }
}

#[derive(Clone, Copy)]
enum Asked {
    Read {
        handle: HandleId,
        range: ByteRange,
        /// The last write through a lane by then.
        write: u64,
    },
    /// Pages of a lane for a write.
    Begin { handle: HandleId, range: ByteRange },
    /// The acknowledgement of a write.
    End,
    /// Stable storage for all writes up to this one.
    Sync { handle: HandleId, write: u64 },
    /// A hold, to change a file on the client's own descriptor.
    Hold { file: FileIndex, write: u64 },
    /// Such a change of a file that is written through lanes, and the number of that write.
    Told {
        file: FileIndex,
        range: ByteRange,
        write: u64,
    },
    /// A change to `file`; its serial after the change.
    Change {
        file: FileIndex,
        range: ByteRange,
        serial: u64,
        size_too: bool,
    },
}

#[derive(Clone, Copy)]
struct Request {
    id: RequestId,
    asked: Asked,
    at: Instant,
    /// Slots that the client has, once the answer has data.
    slots: [u32; REPLY_SLOTS_MAX],
    slot_count: u8,
    answered: bool,
    bytes: u64,
    /// Pages pinned in the first and the last slot.
    first_page: u16,
    end_page: u16,
}

#[derive(Default)]
struct Session {
    open: bool,
    requests: Vec<Request>,
    handles: Vec<(HandleId, Option<FileIndex>)>,
    pinned_bytes: u64,
}

struct Flight {
    file: FileIndex,
    range: ByteRange,
    slots: Vec<u32>,
    /// The file's serial when the device read.
    serial: u64,
}

/// Acknowledged changes of a file.
#[derive(Default)]
struct Acknowledged {
    changes: Vec<(ByteRange, u64)>,
    /// The serial whose size every client must see.
    size_serial: u64,
    /// Changes by strangers that no client reports, and the instant from which they must be seen: a
    /// client that asked before may see the file as it was then.
    seen: Vec<(ByteRange, u64, Instant)>,
    /// The same for sizes: instant and serial, each later than the one before.
    seen_sizes: Vec<(Instant, u64)>,
}

impl Acknowledged {
    /// The serial whose size a client must see that asked at that instant.
    fn size_serial_of(&self, asked: Instant) -> u64 {
        let count = self.seen_sizes.partition_point(|(at, _)| *at <= asked);
        let seen = self.seen_sizes[..count]
            .last()
            .map_or(0, |(_, serial)| *serial);
        self.size_serial.max(seen)
    }

    /// The ends of reported changes.
    fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        self.changes.iter().map(|(range, _)| range.end())
    }

    /// A change of these bytes later than `serial` that a client must see that asked at that
    /// instant.
    fn newer(&self, serial: u64, bytes: ByteRange, asked: Instant) -> Option<(ByteRange, u64)> {
        let seen = self.seen.iter().filter(|(.., at)| *at <= asked);
        let seen = seen.map(|&(range, at, _)| (range, at));
        let mut all = self.changes.iter().copied().chain(seen);
        all.find(|(range, newer)| *newer > serial && range.overlaps(bytes))
    }
}

/// The books.
pub struct Checker {
    limits: Limits,
    /// The longest wait for an answer.
    pub patience: Duration,
    slots: Vec<Slot>,
    sessions: Vec<Session>,
    ids: Vec<Option<FileIndex>>,
    flights: IdMap<Flight>,
    spare: Vec<Vec<u32>>,
    acknowledged: BTreeMap<FileIndex, Acknowledged>,
    /// Files that are written through lanes.
    pub written: Written,
    handle_count: u64,
    /// Violations reported.
    pub told: Vec<String>,
    /// All violations.
    pub violation_count: u64,
    /// Requests answered.
    pub answered_count: u64,
    /// Requests without an answer.
    pub waiting_count: u64,
    /// Longest wait of an answered read.
    pub longest_wait: Duration,
    /// Most device requests in flight at once.
    pub flight_count_max: usize,
}

/// Blocks of `slot_bytes` that a range touches.
fn block_count(range: ByteRange, slot_bytes: u64) -> u64 {
    if range.length.0 == 0 {
        return 0;
    }
    range.end().div_ceil(slot_bytes) - range.start.0 / slot_bytes
}

impl Checker {
    /// Empty books for a server with `limits`.
    pub fn new(limits: Limits) -> Checker {
        let mut slots = Vec::new();
        slots.resize_with(limits.slot_count as usize, Slot::default);
        Checker {
            written: Written::new(&limits),
            limits,
            patience: Duration::from_s(60),
            slots,
            sessions: Vec::new(),
            ids: Vec::new(),
            flights: IdMap::default(),
            spare: Vec::new(),
            acknowledged: BTreeMap::new(),
            handle_count: 0,
            told: Vec::new(),
            violation_count: 0,
            answered_count: 0,
            waiting_count: 0,
            longest_wait: Duration::ZERO,
            flight_count_max: 0,
        }
    }

    /// Reports a violation.
    pub fn wrong(&mut self, now: Instant, what: impl FnOnce() -> String) {
        self.violation_count += 1;
        if self.told.len() < TOLD_MAX {
            let at = now.0 as f64 / 1e9;
            self.told.push(format!("at {at:.6} s: {}", what()));
        }
    }

    fn session(&mut self, session: SessionId) -> &mut Session {
        let index = session.0 as usize;
        if self.sessions.len() <= index {
            self.sessions.resize_with(index + 1, Session::default);
        }
        &mut self.sessions[index]
    }

    fn pages_of(&self, range: ByteRange, block: u64) -> Pages {
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let start = block * slot_bytes;
        let from = range.start.0.max(start) - start;
        let to = range.end().min(start + slot_bytes) - start;
        ((from / PAGE_BYTES) as u16, to.div_ceil(PAGE_BYTES) as u16)
    }

    /// A file was changed, and every client must see that from now on; also a foreign change that
    /// was reported.
    pub fn acknowledge(&mut self, file: FileIndex, range: ByteRange, serial: u64, size_too: bool) {
        let books = self.acknowledged.entry(file).or_default();
        // A later change of the same bytes replaces an earlier one.
        let says_more = |old: ByteRange, at: u64| {
            old.start.0 < range.start.0 || old.end() > range.end() || at > serial
        };
        books.changes.retain(|&(old, at)| says_more(old, at));
        books.seen.retain(|&(old, at, _)| says_more(old, at));
        books.changes.push((range, serial));
        if size_too {
            books.size_serial = books.size_serial.max(serial);
        }
    }

    /// A client that asks from now on must see a change that no client reports.
    pub fn seen(&mut self, now: Instant, file: FileIndex, range: ByteRange, serial: u64) {
        let books = self.acknowledged.entry(file).or_default();
        books.seen.push((range, serial, now));
        self.size_seen(now, file, serial);
    }

    /// A client that asks from now on must see the size of `file` as of `serial`.
    pub fn size_seen(&mut self, now: Instant, file: FileIndex, serial: u64) {
        let books = self.acknowledged.entry(file).or_default();
        let last = books.seen_sizes.last().map_or(0, |(_, serial)| *serial);
        if serial > last {
            books.seen_sizes.push((now, serial));
        }
    }

    /// The device has read for `io` now; the file's serial is `serial`.
    pub fn device_read(&mut self, io: IoId, serial: u64) {
        if let Some(flight) = self.flights.get_mut(&io.0) {
            flight.serial = serial;
            self.written.device_read(io, flight.file, flight.range);
        }
    }

    /// A client that wrote `range` of a file on its own descriptor asks for the acknowledgement.
    pub fn native_asked(
        &mut self,
        now: Instant,
        session: SessionId,
        request: RequestId,
        (file, range): (FileIndex, ByteRange),
        write: u64,
    ) {
        self.ask(now, session, request, Asked::Told { file, range, write });
    }

    /// A client asks for the acknowledgement of a change: `serial` is the file's after the change.
    /// It does not publish a size that another program changed before without the server's
    /// knowledge.
    pub fn change_asked(
        &mut self,
        now: Instant,
        session: SessionId,
        request: RequestId,
        (file, range): (FileIndex, ByteRange),
        serial: u64,
        files: &Files,
    ) {
        let known = files.get(file);
        let is_size = |serial: u64| known.sizes.iter().any(|&(at, _)| at == serial);
        let mut untold = known.untold.iter().map(|(_, at)| *at);
        let is_hidden = untold.any(|at| at < serial && is_size(at));
        let asked = Asked::Change {
            file,
            range,
            serial,
            // A removed name says nothing about other programs' changes of its file.
            size_too: range.length.0 > 0 && is_size(serial) && !is_hidden,
        };
        self.ask(now, session, request, asked);
    }

    fn ask(&mut self, now: Instant, session: SessionId, id: RequestId, asked: Asked) {
        self.waiting_count += 1;
        self.session(session).requests.push(Request {
            id,
            asked,
            at: now,
            slots: [0; REPLY_SLOTS_MAX],
            slot_count: 0,
            answered: false,
            bytes: 0,
            first_page: 0,
            end_page: 0,
        });
    }

    /// Called before a step.
    pub fn event(&mut self, now: Instant, event: &Event) {
        match event {
            Event::SessionOpened { session, .. } => self.session(*session).open = true,
            Event::SessionClosed { session } => {
                self.close_session(*session);
                self.written.session_closed(*session);
            }
            Event::Opening {
                session, handle, ..
            } => {
                self.handle_count += 1;
                self.session(*session).handles.push((*handle, None));
            }
            Event::Opened {
                session,
                handle,
                facts: Ok(facts),
            } => {
                let file = self.learn(facts);
                for entry in &mut self.session(*session).handles {
                    if entry.0 == *handle {
                        entry.1 = Some(file);
                    }
                }
            }
            Event::NeighbourOpened {
                facts: Ok(facts), ..
            }
            | Event::PoolFileOpened {
                facts: Ok(facts), ..
            } => {
                self.learn(facts);
            }
            Event::Closed { session, handle } => {
                let handles = &mut self.session(*session).handles;
                if let Some(at) = handles.iter().position(|(h, _)| h == handle) {
                    handles.swap_remove(at);
                    self.handle_count -= 1;
                }
            }
            Event::Read {
                session,
                handle,
                request,
                range,
                ..
            } => {
                let asked = Asked::Read {
                    handle: *handle,
                    range: *range,
                    write: self.written.last(),
                };
                self.ask(now, *session, *request, asked);
            }
            Event::ReadEnd { session, request } => self.release(*session, *request),
            Event::IoDone { io, result } => {
                if !self.written.write_done(*io, *result) {
                    self.io_done(now, *io, *result);
                }
            }
            Event::LaneAdded { lane, session, .. } => self.written.lane_added(*lane, *session),
            Event::WriteAbort { session, request } => self.written.aborted(*session, *request),
            Event::WriteBegin { .. }
            | Event::WriteEnd { .. }
            | Event::Sync { .. }
            | Event::Hold { .. } => self.write_event(now, event),
            Event::Recovered { .. }
            | Event::Reserved { .. }
            | Event::ReserveFound { .. }
            | Event::Unfilled { .. }
            | Event::RecoveryEnded
            | Event::RecoveryBegun
            | Event::Settled { .. }
            | Event::Synced { .. }
            | Event::SyncDoubted { .. }
            | Event::FellBack { .. }
            | Event::NotKept { .. }
            | Event::RecordKept { .. }
            | Event::Flushed { .. }
            | Event::DeviceAdded { .. }
            | Event::Stationed { .. }
            | Event::PolicyChanged(_)
            | Event::Opened { .. }
            | Event::NeighbourOpened { .. }
            | Event::SessionOfPool { .. }
            | Event::Stopping
            | Event::MayChange { .. }
            | Event::Remembered(_)
            | Event::PoolFileOpened { .. }
            | Event::Changed { .. }
            | Event::Gone { .. }
            | Event::ForeignChange { .. }
            | Event::Unlinked { .. }
            | Event::LetGo { .. }
            | Event::Crowded
            | Event::Overfull { .. }
            | Event::Stat { .. }
            | Event::Hint { .. }
            | Event::ForeignLoad { .. }
            | Event::Timer => {}
        }
    }

    /// A client asks for pages, or waits for the acknowledgement of a write.
    fn write_event(&mut self, now: Instant, event: &Event) {
        let write = self.written.last();
        match *event {
            Event::WriteBegin {
                session,
                handle,
                request,
                range,
                ..
            } => self.ask(now, session, request, Asked::Begin { handle, range }),
            Event::WriteEnd { session, request } => {
                self.written.filled(session, request);
                self.ask(now, session, request, Asked::End);
            }
            Event::Sync {
                session,
                handle,
                request,
            } => self.ask(now, session, request, Asked::Sync { handle, write }),
            Event::Hold {
                session,
                request,
                key,
            } => {
                let file = FileIndex::of(key);
                self.ask(now, session, request, Asked::Hold { file, write });
            }
            _ => {}
        }
    }

    fn learn(&mut self, facts: &FileFacts) -> FileIndex {
        let file = FileIndex::of(facts.key);
        if facts.way == Some(WriteWay::Extents) {
            self.written.learn(file, facts.size.0);
        }
        let index = facts.file.0 as usize;
        if self.ids.len() <= index {
            self.ids.resize(index + 1, None);
        }
        self.ids[index] = Some(file);
        file
    }

    fn close_session(&mut self, session: SessionId) {
        let it = self.session(session);
        it.open = false;
        it.pinned_bytes = 0;
        let closed = it.handles.len() as u64;
        it.handles.clear();
        self.handle_count -= closed;
        let mut requests = std::mem::take(&mut self.session(session).requests);
        for request in requests.drain(..) {
            if !request.answered {
                self.waiting_count -= 1;
            }
            self.unpin(&request);
        }
        self.session(session).requests = requests;
    }

    fn release(&mut self, session: SessionId, id: RequestId) {
        let it = self.session(session);
        let Some(at) = it.requests.iter().position(|r| r.id == id && r.answered) else {
            return;
        };
        let request = it.requests.swap_remove(at);
        it.pinned_bytes -= request.bytes;
        self.unpin(&request);
    }

    fn unpin(&mut self, request: &Request) {
        let count = usize::from(request.slot_count);
        for (index, slot) in request.slots[..count].iter().enumerate() {
            let pages = request.pages(index, self.limits.slot_bytes);
            if let Some(slot) = self.slots.get_mut(*slot as usize)
                && let Some(at) = slot.pins.iter().position(|p| *p == pages)
            {
                slot.pins.swap_remove(at);
            }
        }
    }

    fn io_done(&mut self, now: Instant, io: IoId, result: Result<ByteCount, Errno>) {
        let Some(flight) = self.flights.remove(&io.0) else {
            self.wrong(now, || {
                format!("the world ended I/O {} that was never begun", io.0)
            });
            return;
        };
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let first = flight.range.start.0 / slot_bytes;
        let got = result.map_or(0, |bytes| bytes.0);
        for (index, slot) in flight.slots.iter().enumerate() {
            let block = first + index as u64;
            let pages = self.pages_of(flight.range, block);
            let filled = ByteRange::new(flight.range.start.0, got);
            let valid = (filled.end() > block * slot_bytes && got > 0)
                .then(|| self.pages_of(filled, block));
            let slot = &mut self.slots[*slot as usize];
            if let Some(at) = slot.fills.iter().position(|fill| *fill == pages) {
                slot.fills.swap_remove(at);
            }
            if let Some(valid) = valid {
                slot.validate(valid, flight.serial);
            }
            let start = filled.start.0.max(block * slot_bytes);
            let end = filled.end().min((block + 1) * slot_bytes);
            if start < end {
                let into = ByteRange::new(start - filled.start.0, end - start);
                let place = flight.slots[index];
                self.written.read_done(io, place, start % slot_bytes, into);
            }
        }
        self.written.read_over(io);
        self.spare.push(flight.slots);
    }

    /// Called after a step.
    pub fn actions(&mut self, now: Instant, actions: &Actions, files: &Files) {
        for action in &actions.list {
            match action {
                Action::Reply {
                    session,
                    request,
                    outcome,
                } => self.reply(now, actions, files, *session, *request, *outcome),
                Action::Submit(read) => self.submit(now, actions, files, read),
                Action::OpenNeighbour { beside, name } => {
                    if self.file_of(*beside).is_none() {
                        self.wrong(now, || {
                            format!("{name} is to be opened beside {beside:?}, which is forgotten")
                        });
                    }
                }
                Action::AskPool { .. } => {}
                Action::Stat { file } => {
                    if self.file_of(*file).is_none() {
                        self.wrong(now, || format!("stat of {file:?}, which is forgotten"));
                    }
                }
                Action::ReadHeader { file, .. } => {
                    if self.file_of(*file).is_none() {
                        self.wrong(now, || {
                            format!("the header of {file:?} is to be looked at, which is forgotten")
                        });
                    }
                }
                Action::Forget { file } => self.forget(now, *file),
                Action::Wake { .. } => {}
                Action::Fill { slot, offset, from } => {
                    let owner = self.written.block_of(from);
                    let range = ByteRange::new(u64::from(*offset), from.length);
                    self.overlay(now, *slot, range, owner);
                    self.write_action(now, action, actions, None, files);
                }
                Action::Zero {
                    slot,
                    offset,
                    length,
                } => {
                    let range = ByteRange::new(u64::from(*offset), u64::from(*length));
                    self.overlay(now, *slot, range, None);
                    self.write_action(now, action, actions, None, files);
                }
                Action::SubmitWrite(io) => {
                    self.write_action(now, action, actions, Some(io.file), files);
                }
                Action::Publish { file, .. }
                | Action::Known { file, .. }
                | Action::Clean { file }
                | Action::Loose { file, .. }
                | Action::Reserve { file, .. }
                | Action::Sync { file }
                | Action::WriteOut { file }
                | Action::Trim { file, .. } => {
                    self.write_action(now, action, actions, Some(*file), files);
                }
                Action::Spent { .. }
                | Action::Strike { .. }
                | Action::GiveMemoryBack { .. }
                | Action::LaneDone { .. }
                | Action::Flush { .. } => self.write_action(now, action, actions, None, files),
            }
        }
        self.tell_of_writes(now);
    }

    /// Sentences from the books of writes are violations like any other.
    fn tell_of_writes(&mut self, now: Instant) {
        for sentence in std::mem::take(&mut self.written.found) {
            self.wrong(now, || sentence);
        }
    }

    fn write_action(
        &mut self,
        now: Instant,
        action: &Action,
        actions: &Actions,
        file: Option<FileId>,
        files: &Files,
    ) {
        if !self.written.is_used() {
            return self.wrong(now, || format!("{action:?}, but nobody has a lane"));
        }
        let file = file.and_then(|id| self.file_of(id));
        self.written.action(now, action, actions, file, files);
    }

    /// Bytes of a slot change at once. `owner`: the block of the file to which they belong.
    fn overlay(
        &mut self,
        now: Instant,
        slot: SlotIndex,
        range: ByteRange,
        owner: Option<(FileIndex, u64)>,
    ) {
        let pages = self.pages_of(range, 0);
        let Some(it) = self.slots.get_mut(slot.0 as usize) else {
            return self.wrong(now, || format!("{slot:?} does not exist"));
        };
        let same = owner.is_none() || it.owner == owner;
        let is_touched = |others: &[Pages]| others.iter().any(|other| !same || meet(*other, pages));
        let trouble = if is_touched(&it.pins) {
            Some("in a client's hands")
        } else if is_touched(&it.fills) {
            Some("being written by a device")
        } else {
            None
        };
        if !same {
            it.owner = owner;
            it.valid.clear();
        }
        if let Some(trouble) = trouble {
            self.wrong(now, || {
                format!("{range:?} of {slot:?} is changed while it is {trouble}")
            });
        }
    }

    fn file_of(&self, id: FileId) -> Option<FileIndex> {
        self.ids.get(id.0 as usize).copied().flatten()
    }

    fn forget(&mut self, now: Instant, id: FileId) {
        let Some(file) = self.file_of(id) else {
            self.wrong(now, || format!("{id:?} is forgotten twice"));
            return;
        };
        self.ids[id.0 as usize] = None;
        if self.flights.values().any(|flight| flight.file == file) {
            self.wrong(now, || {
                format!("{id:?} is forgotten with device requests in flight")
            });
        }
    }

    fn submit(&mut self, now: Instant, actions: &Actions, files: &Files, read: &IoRead) {
        let Some(file) = self.file_of(read.file) else {
            return self.wrong(now, || format!("read of a forgotten file: {read:?}"));
        };
        let slots = actions.slots_of(read.slots);
        if let Some(reason) = self.form(read, slots, files, file) {
            return self.wrong(now, || format!("{reason}: {read:?}"));
        }
        if read.range.length.0 > self.limits.chunk_bytes_max {
            self.wrong(now, || {
                format!("a request is longer than the longest chunk: {read:?}")
            });
        }
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let first = read.range.start.0 / slot_bytes;
        for (index, slot) in slots.iter().enumerate() {
            let block = first + index as u64;
            let pages = self.pages_of(read.range, block);
            let it = &mut self.slots[slot.0 as usize];
            let same = it.owner == Some((file, block));
            let trouble = if it.pins.iter().any(|pin| !same || meet(*pin, pages)) {
                Some("refilled while in a client's hands")
            } else if it.fills.iter().any(|fill| !same || meet(*fill, pages)) {
                Some("refilled while a device writes into it")
            } else {
                None
            };
            if !same {
                it.owner = Some((file, block));
                it.valid.clear();
            }
            it.invalidate(pages);
            it.fills.push(pages);
            let lost = ByteRange::new(
                u64::from(pages.0) * PAGE_BYTES,
                u64::from(pages.1 - pages.0) * PAGE_BYTES,
            );
            self.written.slot_lost(slot.0, lost);
            if let Some(trouble) = trouble {
                self.wrong(now, || format!("slot {} is {trouble}: {read:?}", slot.0));
            }
        }
        let mut list = self.spare.pop().unwrap_or_default();
        list.clear();
        list.extend(slots.iter().map(|slot| slot.0));
        let flight = Flight {
            file,
            range: read.range,
            slots: list,
            serial: 0,
        };
        if self.flights.insert(read.io.0, flight).is_some() {
            self.wrong(now, || format!("{:?} is in flight already", read.io));
        }
        self.flight_count_max = self.flight_count_max.max(self.flights.len());
    }

    /// The fault in the form of a request.
    fn form(
        &self,
        read: &IoRead,
        slots: &[SlotIndex],
        files: &Files,
        file: FileIndex,
    ) -> Option<&'static str> {
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let known = files.get(file);
        if !read.range.start.0.is_multiple_of(PAGE_BYTES)
            || !read.range.length.0.is_multiple_of(PAGE_BYTES)
        {
            return Some("a request does not start and end on a page");
        }
        if read.range.length.0 == 0 {
            return Some("a request is empty");
        }
        if read.device != known.device {
            return Some("a request goes to a device that the file is not on");
        }
        if slots.len() as u64 != block_count(read.range, slot_bytes) {
            return Some("a request has not one slot a block");
        }
        if slots.iter().any(|slot| slot.0 >= self.limits.slot_count) {
            return Some("a request names a slot that does not exist");
        }
        let twice = |(index, slot): (usize, &SlotIndex)| slots[..index].contains(slot);
        if slots.iter().enumerate().any(twice) {
            return Some("a request names a slot twice");
        }
        None
    }

    fn reply(
        &mut self,
        now: Instant,
        actions: &Actions,
        files: &Files,
        session: SessionId,
        id: RequestId,
        outcome: Outcome,
    ) {
        let it = self.session(session);
        if !it.open {
            return self.wrong(now, || {
                format!("{id:?} of {session:?} is answered, but the session is closed")
            });
        }
        let found = it.requests.iter().position(|r| r.id == id && !r.answered);
        let Some(at) = found else {
            return self.wrong(now, || {
                format!("{id:?} of {session:?} is answered, but not asked or answered before")
            });
        };
        let request = it.requests[at];
        self.waiting_count -= 1;
        self.answered_count += 1;
        match request.asked {
            Asked::Change {
                file,
                range,
                serial,
                size_too,
            } => {
                self.session(session).requests.swap_remove(at);
                if outcome == Outcome::Done {
                    self.acknowledge(file, range, serial, size_too);
                } else {
                    self.wrong(now, || format!("a change is answered by {outcome:?}"));
                }
            }
            Asked::Begin { handle, range } => {
                self.session(session).requests.swap_remove(at);
                self.begun(now, (session, id), (handle, range), outcome);
            }
            Asked::End => {
                self.session(session).requests.swap_remove(at);
                match outcome {
                    Outcome::Done => self.written.acknowledged(session, id),
                    other => {
                        self.wrong(now, || format!("a written write is answered by {other:?}"))
                    }
                }
            }
            Asked::Sync { handle, write } => {
                self.session(session).requests.swap_remove(at);
                self.synced(now, (session, handle), write, outcome);
            }
            Asked::Hold { file, write } => {
                self.session(session).requests.swap_remove(at);
                if outcome == Outcome::Done {
                    let all = ByteRange::new(0, u64::MAX);
                    self.written.left_to_client("a change", file, all, write);
                }
            }
            Asked::Told { file, range, write } => {
                self.session(session).requests.swap_remove(at);
                self.written.native_told(now, file, range, write);
                if outcome != Outcome::Done {
                    self.wrong(now, || format!("a change is answered by {outcome:?}"));
                }
            }
            Asked::Read {
                handle,
                range,
                write,
            } => {
                self.longest_wait = self.longest_wait.max(now.since(request.at));
                let Outcome::Data {
                    slots,
                    first_offset,
                    length,
                } = outcome
                else {
                    self.session(session).requests.swap_remove(at);
                    if outcome == Outcome::Done {
                        self.wrong(now, || {
                            format!("{id:?} of {session:?} is done without data")
                        });
                    }
                    if let (Outcome::Plain, Some(file)) = (outcome, self.open_file(session, handle))
                    {
                        self.written.left_to_client("a read", file, range, write);
                    }
                    return;
                };
                let data = (slots, first_offset, length.0);
                let asked = (handle, range, write);
                self.data(now, actions, files, (session, at), asked, data);
            }
        }
    }

    /// The file that a session has open under a handle.
    fn open_file(&self, session: SessionId, handle: HandleId) -> Option<FileIndex> {
        let handles = &self.sessions.get(session.0 as usize)?.handles;
        handles.iter().find(|(known, _)| *known == handle)?.1
    }

    /// A client that asked for pages gets its answer.
    fn begun(
        &mut self,
        now: Instant,
        (session, id): (SessionId, RequestId),
        (handle, range): (HandleId, ByteRange),
        outcome: Outcome,
    ) {
        match (outcome, self.open_file(session, handle)) {
            (Outcome::Granted { .. }, Some(file)) => {
                self.written.granted((session, id), file, range, outcome);
            }
            (Outcome::Plain | Outcome::Failed(_), _) => {}
            (other, file) => self.wrong(now, || {
                format!(
                    "{id:?} of {session:?} wants to write to {file:?} and is answered by {other:?}"
                )
            }),
        }
    }

    /// A client that waits for stable storage gets its answer.
    fn synced(
        &mut self,
        now: Instant,
        (session, handle): (SessionId, HandleId),
        write: u64,
        outcome: Outcome,
    ) {
        match (outcome, self.open_file(session, handle)) {
            (Outcome::Done, Some(file)) => self.written.synced(file, write),
            (Outcome::Plain, Some(file)) => {
                let all = ByteRange::new(0, u64::MAX);
                self.written.left_to_client("a sync", file, all, write);
            }
            (Outcome::Failed(_) | Outcome::Plain, _) => {}
            (other, _) => self.wrong(now, || format!("a sync is answered by {other:?}")),
        }
    }

    fn data(
        &mut self,
        now: Instant,
        actions: &Actions,
        files: &Files,
        (session, at): (SessionId, usize),
        (handle, range, write): (HandleId, ByteRange, u64),
        (run, first_offset, length): (SlotRun, u32, u64),
    ) {
        let slots = actions.slots_of(run);
        let asked = self.sessions[session.0 as usize].requests[at].at;
        let Some(file) = self.open_file(session, handle) else {
            self.sessions[session.0 as usize].requests.swap_remove(at);
            return self.wrong(now, || {
                format!("{session:?} {handle:?} gets bytes of a file it has not open")
            });
        };
        let told = match self.written.has(file) {
            true => self.written_contents((file, range), write, length, first_offset, slots),
            false => self.contents(files, (file, range), asked, length, first_offset, slots),
        };
        if let Some(told) = told {
            self.wrong(now, || {
                format!("{session:?} {handle:?} asked for {range:?} of {file:?}, got {length} bytes: {told}")
            });
        }
        let slot_bytes = self.limits.slot_bytes;
        let pin_max = self.limits.session_pin_bytes_max;
        let it = &mut self.sessions[session.0 as usize];
        it.pinned_bytes += length;
        let pinned = it.pinned_bytes;
        let request = &mut it.requests[at];
        request.answered = true;
        request.bytes = length;
        request.slot_count = slots.len().min(REPLY_SLOTS_MAX) as u8;
        request.first_page = (u64::from(first_offset) / PAGE_BYTES) as u16;
        let end = u64::from(first_offset) + length;
        let last = end - end.saturating_sub(1) / u64::from(slot_bytes) * u64::from(slot_bytes);
        request.end_page = last.div_ceil(PAGE_BYTES) as u16;
        for (index, slot) in slots.iter().take(REPLY_SLOTS_MAX).enumerate() {
            request.slots[index] = slot.0;
        }
        let request = *request;
        for (index, slot) in slots.iter().take(REPLY_SLOTS_MAX).enumerate() {
            let pages = request.pages(index, slot_bytes);
            if let Some(slot) = self.slots.get_mut(slot.0 as usize) {
                slot.pins.push(pages);
            }
        }
        if pinned > pin_max {
            self.wrong(now, || format!("{session:?} has {pinned} bytes pinned"));
        }
    }

    /// The fault in the bytes of an answer.
    fn contents(
        &self,
        files: &Files,
        (file, range): (FileIndex, ByteRange),
        asked: Instant,
        length: u64,
        first_offset: u32,
        slots: &[SlotIndex],
    ) -> Option<String> {
        let slot_bytes = u64::from(self.limits.slot_bytes);
        if slots.len() > REPLY_SLOTS_MAX {
            return Some(format!("{} slots do not fit a reply", slots.len()));
        }
        let known = files.get(file);
        let books = self.acknowledged.get(&file);
        // A stranger's change that no client reports cannot be seen yet: no client has asked.
        let asked = match files.seen_by(file, asked) > asked {
            true => Instant::ZERO,
            false => asked,
        };
        let oldest = books.map_or(0, |books| books.size_serial_of(asked));
        let is_it = |size: u64| size.saturating_sub(range.start.0).min(range.length.0) == length;
        // A client's write makes the file as long as the server knew it, without an earlier
        // stranger's change.
        let mut ends = books.into_iter().flat_map(Acknowledged::ends);
        if !known.lengths_since(oldest, range).any(|l| l == length)
            && (known.untold.is_empty() || !ends.any(is_it))
        {
            return Some(format!("the file has {} bytes", known.size));
        }
        if length == 0 {
            return (!slots.is_empty()).then(|| "slots for no bytes".to_owned());
        }
        let got = ByteRange::new(range.start.0, length);
        if u64::from(first_offset) != range.start.0 % slot_bytes {
            return Some(format!("they start at {first_offset} in the first slot"));
        }
        if slots.len() as u64 != block_count(got, slot_bytes) {
            return Some(format!("in {} slots", slots.len()));
        }
        for (index, slot) in slots.iter().enumerate() {
            let block = range.start.0 / slot_bytes + index as u64;
            let Some(it) = self.slots.get(slot.0 as usize) else {
                return Some(format!("slot {} does not exist", slot.0));
            };
            if it.owner != Some((file, block)) {
                let owner = it.owner;
                return Some(format!(
                    "slot {} should hold block {block} and holds {owner:?}",
                    slot.0
                ));
            }
            let pages = self.pages_of(got, block);
            if it.fills.iter().any(|fill| meet(*fill, pages)) {
                return Some(format!("a device still writes into slot {}", slot.0));
            }
            if let Some(told) = self.fresh(it, pages, block, books, asked) {
                return Some(format!("slot {}, block {block}: {told}", slot.0));
            }
        }
        None
    }

    /// The same for a file that is written through lanes.
    fn written_contents(
        &self,
        (file, range): (FileIndex, ByteRange),
        write: u64,
        length: u64,
        first_offset: u32,
        slots: &[SlotIndex],
    ) -> Option<String> {
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let got = ByteRange::new(range.start.0, length);
        if slots.len() > REPLY_SLOTS_MAX || slots.len() as u64 != block_count(got, slot_bytes) {
            return Some(format!("in {} slots", slots.len()));
        }
        if length > 0 && u64::from(first_offset) != range.start.0 % slot_bytes {
            return Some(format!("they start at {first_offset} in the first slot"));
        }
        for (index, slot) in slots.iter().enumerate() {
            let pages = self.pages_of(got, range.start.0 / slot_bytes + index as u64);
            let it = self.slots.get(slot.0 as usize);
            if it.is_none_or(|it| it.fills.iter().any(|fill| meet(*fill, pages))) {
                return Some(format!("a device still writes into slot {}", slot.0));
            }
        }
        self.written.misread(file, range, length, slots, write)
    }

    /// The pages of a slot that are missing or too old.
    fn fresh(
        &self,
        slot: &Slot,
        pages: Pages,
        block: u64,
        books: Option<&Acknowledged>,
        asked: Instant,
    ) -> Option<String> {
        let mut next = pages.0;
        for (valid, serial) in &slot.valid {
            if valid.1 <= next {
                continue;
            }
            if valid.0 > next || next >= pages.1 {
                break;
            }
            let until = valid.1.min(pages.1);
            let start = block * u64::from(self.limits.slot_bytes) + u64::from(next) * PAGE_BYTES;
            let bytes = ByteRange::new(start, u64::from(until - next) * PAGE_BYTES);
            if let Some((range, newer)) = books.and_then(|books| books.newer(*serial, bytes, asked))
            {
                return Some(format!(
                    "pages {next}..{until} are as of change {serial}, but change {newer} of {range:?} was acknowledged"
                ));
            }
            next = until;
        }
        (next < pages.1).then(|| format!("page {next} was never read"))
    }

    /// Called now and then: no client waits for ever, and the server holds no more files than it
    /// may.
    pub fn audit(&mut self, now: Instant, files: &Files) {
        let patience = self.patience;
        let mut told = None;
        for (session, it) in self.sessions.iter_mut().enumerate() {
            for request in &mut it.requests {
                if !request.answered && now.since(request.at) > patience {
                    told = Some((session, request.id, now.since(request.at)));
                    // One report is enough.
                    request.at = Instant::NEVER;
                }
            }
        }
        if let Some((session, id, wait)) = told {
            self.wrong(now, || {
                format!("{id:?} of session {session} has waited {wait} for an answer")
            });
        }
        let sessions = self.sessions.iter().filter(|s| s.open).count() as u64;
        let most = u64::from(self.limits.slot_count)
            + self.handle_count
            + (sessions + 1) * u64::from(self.limits.sequence_ahead_max);
        if files.held_count() as u64 > most {
            let held = files.held_count();
            self.wrong(now, || {
                format!("{held} files are held open, {most} expected at most")
            });
        }
    }

    /// Device requests in flight.
    pub fn flight_count(&self) -> usize {
        self.flights.len() + self.written.flight_count()
    }

    /// At the end, when all had time: nothing is in flight, no client waits, and no acknowledged
    /// byte is missing. `is_excused`: the device of that file never recovers.
    pub fn finish(&mut self, now: Instant, files: &Files, is_excused: impl Fn(FileIndex) -> bool) {
        self.written.finish(files, is_excused);
        self.tell_of_writes(now);
        if self.waiting_count > 0 {
            let count = self.waiting_count;
            let first = self.sessions.iter().enumerate().find_map(|(s, it)| {
                let waiting = it.requests.iter().find(|r| !r.answered)?;
                Some((s, waiting.id))
            });
            self.wrong(now, || {
                format!(
                    "{count} requests were never answered; the first (session, request): {first:?}"
                )
            });
        }
        if !self.flights.is_empty() {
            let count = self.flights.len();
            self.wrong(now, || format!("{count} device requests never ended"));
        }
    }
}

impl Request {
    /// Pages pinned in its `index`-th slot.
    fn pages(&self, index: usize, slot_bytes: u32) -> Pages {
        let from = if index == 0 { self.first_page } else { 0 };
        let to = if index + 1 == usize::from(self.slot_count) {
            self.end_page
        } else {
            (u64::from(slot_bytes) / PAGE_BYTES) as u16
        };
        (from, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_knows_which_pages_are_of_when() {
        let mut slot = Slot::default();
        slot.validate((0, 100), 1);
        slot.validate((100, 200), 1);
        assert_eq!(slot.valid, [((0, 200), 1)]);
        slot.validate((50, 60), 2);
        assert_eq!(slot.valid, [((0, 50), 1), ((50, 60), 2), ((60, 200), 1)]);
        slot.invalidate((40, 70));
        assert_eq!(slot.valid, [((0, 40), 1), ((70, 200), 1)]);
    }
}
