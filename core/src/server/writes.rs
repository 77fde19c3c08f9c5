// SPDX-License-Identifier: Apache-2.0
//! A client's write, from its arrival to its acknowledgement, and the requests that wait for
//! acknowledged bytes.
//!
//! A write is granted pages of its session's lane when nobody changes the file beside us, its
//! blocks are the file's already, and there is room. It is acknowledged in the step in which its
//! piece is published: [`Action::Publish`] stands before the reply. The way of pieces afterwards is
//! in `writeback`.

use super::state::*;
use super::*;
use crate::write::{Lane, PieceKey, Released, Runs, Span};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// A reservation that nobody announced: the write alone until a file has so much, then this.
const RESERVE_FROM: u64 = 1 << 20;
const RESERVE_FIRST: u64 = 64 << 20;
/// From so much on in pieces of a gigabyte, so that files that are written side by side have a few
/// extents each.
const RESERVE_LARGE_FROM: u64 = 32 << 20;
const RESERVE_LARGE: u64 = 1 << 30;
/// So long ahead of a writer, and at least so much.
const RESERVE_AHEAD: Duration = Duration::from_s(3);
const RESERVE_AHEAD_MIN: u64 = 16 << 20;
/// Memory that lanes give back at once when another one needs it. Units: pages.
const SHRINK_PAGES: u32 = 2048;
/// A writer without a claim waits for writers that got so much less. Units: bytes.
const AHEAD_BYTES: u64 = 2 << 20;
/// A single byte so far past the end announces how long a file will be.
const ANNOUNCED_STEP: core::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;

/// A write's place among those that wait for one device: its file's progress, then the order of
/// asking.
type Place = (u64, u64);

/// Where a write that wants pages stands in its lane.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InLine {
    First,
    /// Another write to the same device comes first.
    BehindItsOwn,
    /// A write to another device comes first, and has waited for room longer.
    BehindAnother,
}

/// Whether a write can have its pages now.
enum Turn {
    /// Here they are.
    Granted(Grant),
    /// On the client's own descriptor.
    Plain,
    Failed(Errno),
    /// Something has to happen first; the code that makes it happen looks again.
    Wait,
}

impl Server {
    pub(super) fn lane_added(
        &mut self,
        lane: LaneId,
        session: Option<SessionId>,
        page_count: u32,
        record_count: u32,
    ) {
        if let Some(owner) = session.and_then(|session| self.sessions.get_mut(&session)) {
            owner.lane = Some(lane);
        }
        self.is_recovering |= session.is_none();
        self.lanes.insert(
            lane,
            LaneState {
                pages: Lane::new(page_count),
                session,
                records: (0..record_count).rev().collect(),
                kept: BTreeSet::new(),
                record_count,
                waiting: Default::default(),
                granted: self.now,
            },
        );
    }

    /// The session is gone: its grants are void, its committed pieces stay.
    pub(super) fn lane_left(&mut self, session: SessionId, actions: &mut Actions) {
        let writes: Vec<u32> = self
            .writes
            .iter()
            .filter(|(_, write)| write.session == session)
            .map(|(key, _)| key)
            .collect();
        for write in writes {
            self.drop_write(write, actions);
        }
        let grants: Vec<RequestId> = self
            .grants
            .range((session, RequestId(0))..=(session, RequestId(u64::MAX)))
            .map(|((_, request), _)| *request)
            .collect();
        for request in grants {
            if let Some(grant) = self.grants.remove(&(session, request)) {
                self.void_grant(&grant, actions);
            }
        }
        self.holds_of_unknown
            .retain(|(_, holder)| *holder != session);
        // Each sync that the session waited for was a use of the file, and perhaps its last.
        let left: Vec<(FileId, usize, bool)> = self
            .files
            .iter_mut()
            .filter_map(|(id, file)| {
                let writing = &mut file.writing;
                // Those with the driver are the first; of them, too, some are gone.
                let with_driver = writing.syncs.iter().take(writing.syncing);
                let leaving = |waiter: &&SyncWaiter| waiter.session == session;
                writing.syncing -= with_driver.filter(leaving).count();
                let waiters = writing.syncs.len();
                writing.syncs.retain(|waiter| waiter.session != session);
                let uses = waiters - writing.syncs.len();
                let before = writing.holds.len();
                writing.holds.retain(|(holder, _)| *holder != session);
                let has_held = writing.holds.len() < before;
                (uses > 0 || has_held).then_some((*id, uses, has_held))
            })
            .collect();
        for (file, uses, has_held) in left {
            if has_held {
                self.hold_released(file, actions);
            }
            for _ in 0..uses {
                self.release(file, actions);
            }
        }
        if let Some(lane) = self.sessions.get(&session).and_then(|owner| owner.lane) {
            if let Some(state) = self.lanes.get_mut(&lane) {
                state.session = None;
            }
            self.hurry_loose(|server, _, file| server.is_left_loose(file));
            self.lane_emptied(lane, actions);
        }
    }

    /// Everything that a former daemon left is known.
    pub(super) fn recovery_ended(&mut self, actions: &mut Actions) {
        self.is_recovering = false;
        let lanes: Vec<LaneId> = self.lanes.keys().copied().collect();
        for lane in lanes {
            self.lane_emptied(lane, actions);
        }
        let files: Vec<FileId> = self.files.keys().copied().collect();
        for file in files {
            self.settle_clean(file, actions);
            self.forget_if_unused(file, actions);
        }
        let devices: Vec<DeviceId> = self.devices.keys().copied().collect();
        for device in devices {
            self.touch(device);
        }
    }

    /// A lane that nobody writes to and that holds nothing is done; but not while its pieces are
    /// still being told.
    fn lane_emptied(&mut self, lane: LaneId, actions: &mut Actions) {
        if self.is_recovering {
            return;
        }
        let done = self
            .lanes
            .get(&lane)
            .is_some_and(|state| state.session.is_none() && state.is_empty());
        if done {
            self.lanes.remove(&lane);
            actions.list.push(Action::LaneDone { lane });
        }
    }

    // ---- Grant ----

    pub(super) fn write_begin(
        &mut self,
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        actions: &mut Actions,
    ) {
        let refuse = |outcome: Outcome, actions: &mut Actions| {
            actions.list.push(Action::Reply {
                session,
                request,
                outcome,
            });
        };
        let Some(owner) = self.sessions.get(&session) else {
            return;
        };
        if range.length.0 == 0
            || range.length.0 > self.limits.write_bytes_max
            || range.end() > i64::MAX as u64
            || self.grants.contains_key(&(session, request))
        {
            return refuse(Outcome::Failed(Errno::INVALID), actions);
        }
        let has_lane = owner.lane.is_some();
        let Some(entry) = self.handles.get_mut(&(session, handle)) else {
            return refuse(Outcome::Failed(Errno::BAD_HANDLE), actions);
        };
        if !has_lane || matches!(entry.state, HandleState::Plain) {
            self.plain_write_count += 1;
            return refuse(Outcome::Plain, actions);
        }
        self.asked_count += 1;
        let key = self.writes.insert(Write {
            asked: self.asked_count,
            session,
            handle,
            request,
            range,
            file: None,
            waits_for: WaitsFor::Other,
        });
        if let HandleState::Opening(waiting) = &mut entry.state {
            waiting.writes.push(key);
            return;
        }
        self.begin_write(key, actions);
    }

    /// Its file is known.
    pub(super) fn begin_write(&mut self, key: u32, actions: &mut Actions) {
        let Some(write) = self.writes.get_mut(key) else {
            return;
        };
        let place = (write.session, write.handle);
        let Some(HandleState::Ready(id)) = self.handles.get(&place).map(|entry| &entry.state)
        else {
            return self.finish_write(key, Outcome::Failed(Errno::BAD_HANDLE), actions);
        };
        let id = *id;
        write.file = Some(id);
        if let Some(file) = self.files.get_mut(&id) {
            file.use_count += 1;
            file.writing.waiting.push(key);
        }
        self.advance_write(key, actions);
    }

    /// Grant it if it can be; else see to it that it will be.
    pub(super) fn advance_write(&mut self, key: u32, actions: &mut Actions) {
        match self.turn_of(key, actions) {
            Turn::Wait => {}
            Turn::Plain => {
                self.plain_write_count += 1;
                self.finish_write(key, Outcome::Plain, actions);
            }
            Turn::Failed(errno) => self.finish_write(key, Outcome::Failed(errno), actions),
            Turn::Granted(grant) => {
                let Some(write) = self.writes.get(key) else {
                    return;
                };
                let place = (write.session, write.request);
                let outcome = Outcome::Granted {
                    runs: grant.runs,
                    first_offset: (write.range.start.0 % PAGE_BYTES) as u32,
                    length: write.range.length,
                    record: grant.record,
                };
                self.grants.insert(place, grant);
                if let Some(file) = self.files.get_mut(&grant.file) {
                    file.use_count += 1;
                    file.writing.grant_count += 1;
                }
                self.finish_write(key, outcome, actions);
            }
        }
    }

    fn turn_of(&mut self, key: u32, actions: &mut Actions) -> Turn {
        let Some(write) = self.writes.get_mut(key) else {
            return Turn::Wait;
        };
        write.waits_for = WaitsFor::Other;
        let write = *write;
        let Some(id) = write.file else {
            return Turn::Wait;
        };
        let is_failing = |file: &File| file.writing.failing.is_some();
        let is_failing_for_long = self.files.get(&id).is_some_and(is_failing) && self.is_aged(id);
        let Some(file) = self.files.get_mut(&id) else {
            return Turn::Failed(Errno::BAD_HANDLE);
        };
        let writing = &file.writing;
        let held = |(holder, _): &(SessionId, Option<RequestId>)| *holder != write.session;
        if writing.holds.iter().any(held) {
            return Turn::Wait;
        }
        if file.way == WriteWay::Through {
            // The client asks for a hold first.
            return Turn::Plain;
        }
        if file.size_stale {
            // Somebody has changed it: a write that ends in it or goes past its end is to find the
            // end where it is.
            if file.stat.is_none() {
                file.stat = Some(Asked::since(self.now));
                actions.list.push(Action::Stat { file: id });
            }
            return Turn::Wait;
        }
        if let Some(errno) = writing.failing {
            // The writer is told, once; its earlier bytes stay and are tried again, and later ones
            // with them. When the oldest of those should have been written by now the writer is
            // told each time: it would wait for as long as the device does not take them.
            let told = core::mem::take(&mut file.writing.refuses);
            if told || is_failing_for_long {
                return Turn::Failed(errno);
            }
        }
        if !file.is_mapped(write.range) {
            if file.writing.reserving.is_none() && !self.reserved_blocks.is_wanting(id) {
                let (needed, wished_end) = file.to_reserve(write.range);
                file.writing.reserving = Some(needed);
                file.writing.is_reservation_void = false;
                file.writing.is_reserved = true;
                actions.list.push(Action::Reserve {
                    file: id,
                    needed,
                    wished_end,
                });
            }
            return Turn::Wait;
        }
        let first_page = write.range.start.0 / PAGE_BYTES;
        let page_count = write.range.end().div_ceil(PAGE_BYTES) - first_page;
        let Some(lane) = self
            .sessions
            .get(&write.session)
            .and_then(|owner| owner.lane)
        else {
            return Turn::Plain;
        };
        let bytes = page_count * PAGE_BYTES;
        let has_claim = self.files.get(&id).is_some_and(|file| self.has_claim(file));
        let Some(state) = self.lanes.get(&lane) else {
            return Turn::Plain;
        };
        if page_count > u64::from(state.pages.page_count())
            || page_count * PAGE_BYTES > self.limits.write_buffer_bytes
        {
            return Turn::Plain;
        }
        if self.never_fits(lane, bytes, has_claim) {
            // The client asks for a hold first, and is told if it is its own file that is not
            // taken.
            return Turn::Plain;
        }
        let Some(state) = self.lanes.get(&lane) else {
            return Turn::Plain;
        };
        let place = match has_claim {
            true => InLine::First,
            false => self.place_in_lane(state, key),
        };
        let waits_for_itself = !has_claim && (self.is_aged(id) || self.is_ahead(key));
        let waits_for_device = place == InLine::BehindItsOwn || self.is_behind(id, bytes);
        let may = place == InLine::First
            && !state.records.is_empty()
            && !waits_for_itself
            && !waits_for_device;
        let mut granted = None;
        if may {
            granted = self.take_pages(lane, page_count as u32, has_claim);
        }
        let pages = (lane, page_count as u32);
        if may && granted.is_none() && self.shrink_others(pages, has_claim, actions) {
            granted = self.take_pages(lane, page_count as u32, has_claim);
        }
        let Some(state) = self.lanes.get_mut(&lane) else {
            return Turn::Plain;
        };
        let Some(runs) = granted else {
            if may && self.is_held_by_failing(lane) {
                // The free pages lie in too many places.
                return Turn::Plain;
            }
            let Some(state) = self.lanes.get_mut(&lane) else {
                return Turn::Plain;
            };
            if !state.waiting.contains(&key) {
                state.waiting.push_back(key);
            }
            if let Some(write) = self.writes.get_mut(key) {
                write.waits_for = match (waits_for_itself, waits_for_device) {
                    (true, _) => WaitsFor::Itself,
                    (false, true) => WaitsFor::Device,
                    (false, false) => WaitsFor::Room,
                };
            }
            if let Some(file) = self.files.get_mut(&id) {
                file.writing.pace.held_back(self.now);
            }
            // This write may come first without anybody giving room, as when one before it goes, or
            // begins to wait for something else.
            if let Some(device) = self.files.get(&id).map(|file| file.device) {
                self.block(device);
            }
            // This write may wait for bytes that another device has to write.
            for (&device, state) in &self.devices {
                if !state.writers.is_empty() && !self.touched.contains(&device) {
                    self.touched.push(device);
                }
            }
            return Turn::Wait;
        };
        let record = state.take_record();
        state.granted = self.now;
        if !has_claim {
            self.progressed(id, bytes);
        }
        self.reserve_ahead(id, write.range, actions);
        Turn::Granted(Grant {
            file: id,
            range: write.range,
            lane,
            record,
            runs,
            shares_pages: false,
        })
    }

    /// A writer that goes on at a rate of its own finds its blocks reserved when it gets there: a
    /// file system that is busy takes longer for that than a frame may wait.
    fn reserve_ahead(&mut self, id: FileId, range: ByteRange, actions: &mut Actions) {
        let now = self.now;
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &file.writing;
        let ahead = writing.pace.rate(now).bytes_in(RESERVE_AHEAD).0;
        let soon = range.end() + ahead.clamp(RESERVE_AHEAD_MIN, RESERVE_FIRST);
        let grows = range.end() >= file.size.max(RESERVE_FROM / 4) && writing.pace.is_paced();
        let waits = writing.reserving.is_some() || self.reserved_blocks.is_wanting(id);
        if !grows || writing.is_short || waits {
            return;
        }
        let mapped_to = file.mapped_to();
        if mapped_to >= soon || mapped_to < range.end() {
            return;
        }
        // From where the file ends: the distance that a disk lets the writer go ahead is counted
        // from there.
        let needed = ByteRange::new(range.end(), mapped_to + PAGE_BYTES - range.end());
        let wished_end = if soon < RESERVE_LARGE_FROM {
            soon.next_multiple_of(RESERVE_FIRST)
        } else {
            mapped_to.saturating_add(RESERVE_LARGE)
        };
        file.writing.reserving = Some(needed);
        file.writing.reserving_ahead_to = Some(wished_end);
        file.use_count += 1;
        file.writing.is_reservation_void = false;
        file.writing.is_reserved = true;
        actions.list.push(Action::Reserve {
            file: id,
            needed,
            wished_end,
        });
    }

    /// Whether a lane may use so many bytes more: no more than twice the bytes that nobody uses, so
    /// that there is always room for the next client, and a writer that is faster than its device
    /// is slowed by its own backlog alone.
    fn may_grow(&self, lane: LaneId, bytes: u64, has_claim: bool) -> bool {
        let own = self.lanes.get(&lane).map_or(0, LaneState::used_bytes);
        let free = self.free_bytes();
        fits(bytes, own, free, has_claim)
    }

    /// Files that their device does not take hold so much that no room is left for this write, even
    /// with all others written: a write that waited for it could wait for ever.
    fn never_fits(&self, lane: LaneId, bytes: u64, has_claim: bool) -> bool {
        let Some(state) = self.lanes.get(&lane) else {
            return false;
        };
        let (all, own, records) = self.held_by_failing(lane);
        let free = self.limits.write_buffer_bytes.saturating_sub(all);
        records >= u64::from(state.record_count)
            || own + bytes > u64::from(state.pages.page_count()) * PAGE_BYTES
            || !fits(bytes, own, free, has_claim)
    }

    /// Nothing that anybody holds will be given back by being written.
    fn is_held_by_failing(&self, lane: LaneId) -> bool {
        let used: u64 = self.lanes.values().map(LaneState::used_bytes).sum();
        self.held_by_failing(lane).0 >= used
    }

    /// The memory of files that their device does not take, of all lanes and of this one, and the
    /// number of its records that they hold. Units: bytes, twice.
    fn held_by_failing(&self, lane: LaneId) -> (u64, u64, u64) {
        let (mut all, mut own, mut records) = (0, 0, 0);
        let writers = self.devices.values().flat_map(|device| &device.writers);
        let failing = writers
            .filter_map(|id| self.files.get(id))
            .filter(|file| file.writing.failing.is_some());
        let commits = failing.flat_map(|file| &file.writing.commits);
        for piece in commits.filter_map(|entry| piece_of(&self.pieces, entry)) {
            let held = u64::from(piece.runs.page_count()) * PAGE_BYTES;
            all += held;
            if piece.lane == lane {
                own += held;
                records += 1;
            }
        }
        (all, own, records)
    }

    /// Pages of a lane for a write, if it may have them.
    fn take_pages(&mut self, lane: LaneId, count: u32, has_claim: bool) -> Option<Runs> {
        if !self.may_grow(lane, u64::from(count) * PAGE_BYTES, has_claim) {
            return None;
        }
        // Its memory may go so far: with what the others have that is the write buffer.
        let others: u64 = self
            .lanes
            .iter()
            .filter(|(id, _)| **id != lane)
            .map(|(_, state)| state.touched_bytes())
            .sum();
        let end = self.limits.write_buffer_bytes.saturating_sub(others) / PAGE_BYTES;
        let state = self.lanes.get_mut(&lane)?;
        let end = u32::try_from(end).unwrap_or(u32::MAX);
        state
            .pages
            .take(count, end.max(state.pages.touched_count()))
    }

    /// Other lanes give back memory that they do not use, so much that this one can have pages, and
    /// little more. False: there is no use in it.
    ///
    /// Memory that changes hands is given to the kernel and faulted in again, which costs about as
    /// much as the copy into it. So a lane that is written to keeps its share of the buffer for
    /// good: the rest of its memory is for others, up to theirs. Only a writer with a claim, or one
    /// that has nothing under way, takes what there is: a single write may be longer than a share.
    fn shrink_others(
        &mut self,
        (lane, count): (LaneId, u32),
        has_claim: bool,
        actions: &mut Actions,
    ) -> bool {
        if !self.may_grow(lane, u64::from(count) * PAGE_BYTES, has_claim) {
            return false;
        }
        let Some(own) = self.lanes.get(&lane) else {
            return false;
        };
        let share = self.fair_share(lane);
        let must = has_claim || own.used_bytes() == 0;
        let has_share = own.pages.touched_count().saturating_add(count) > share;
        let kept = if has_share { u32::MAX } else { share };
        let all = count.max(SHRINK_PAGES);
        let mut given = self.shrink_to(lane, all, kept, actions);
        if must {
            given += self.shrink_to(lane, all - given, 0, actions);
        }
        given > 0
    }

    /// Lanes but `lane` give back memory behind the last page that they use, the lane with most of
    /// it first; those that are written to keep `kept` pages.
    ///
    /// Returns  how many pages were given back, at most `wanted`
    fn shrink_to(&mut self, lane: LaneId, wanted: u32, kept: u32, actions: &mut Actions) -> u32 {
        let now = self.now;
        let spare = |state: &LaneState| {
            let kept = if state.is_written_to(now) { kept } else { 0 };
            let beyond = state.pages.touched_count().saturating_sub(kept);
            state.pages.spare_count().min(beyond)
        };
        let mut given = 0;
        while given < wanted {
            let most = self
                .lanes
                .iter_mut()
                .filter(|(id, _)| **id != lane)
                .map(|(&id, state)| (spare(state), id, state))
                .max_by_key(|(spare, ..)| *spare);
            let Some((spare, id, state)) = most else {
                break;
            };
            let Some(run) = state.pages.shrink(spare.min(wanted - given)) else {
                break;
            };
            given += run.count;
            actions.list.push(Action::GiveMemoryBack { lane: id, run });
        }
        given
    }

    /// The share of the write buffer that each lane that is written to can have, `lane` counted
    /// among them. Units: pages.
    fn fair_share(&self, lane: LaneId) -> u32 {
        let is_one =
            |&(id, state): &(&LaneId, &LaneState)| *id == lane || state.is_written_to(self.now);
        let count = self.lanes.iter().filter(is_one).count().max(1) as u64;
        let share = self.limits.write_buffer_bytes / count / PAGE_BYTES;
        u32::try_from(share).unwrap_or(u32::MAX)
    }

    /// The part of the write buffer that nobody uses. Units: bytes.
    pub(super) fn free_bytes(&self) -> u64 {
        let used: u64 = self.lanes.values().map(LaneState::used_bytes).sum();
        self.limits.write_buffer_bytes.saturating_sub(used)
    }

    /// Answer a write and forget it.
    pub(super) fn finish_write(&mut self, key: u32, outcome: Outcome, actions: &mut Actions) {
        let Some(write) = self.writes.get(key) else {
            return;
        };
        actions.list.push(Action::Reply {
            session: write.session,
            request: write.request,
            outcome,
        });
        self.drop_write(key, actions);
    }

    fn drop_write(&mut self, key: u32, actions: &mut Actions) {
        let Some(write) = self.writes.remove(key) else {
            return;
        };
        if let Some(entry) = self.handles.get_mut(&(write.session, write.handle))
            && let HandleState::Opening(waiting) = &mut entry.state
        {
            waiting.writes.retain(|&waiting| waiting != key);
        }
        let lane = self
            .sessions
            .get(&write.session)
            .and_then(|owner| owner.lane);
        if let Some(state) = lane.and_then(|lane| self.lanes.get_mut(&lane)) {
            state.waiting.retain(|&waiting| waiting != key);
        }
        if let Some(id) = write.file {
            if let Some(file) = self.files.get_mut(&id) {
                file.writing.waiting.retain(|&waiting| waiting != key);
            }
            self.release(id, actions);
        }
    }

    /// It is forgotten with the last of its handles, so that the driver can give back what lies
    /// behind its end.
    pub(super) fn has_reserve(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(&id) {
            file.writing.is_reserved = true;
            file.writing.is_open_elsewhere = true;
        }
    }

    pub(super) fn reserved(
        &mut self,
        id: FileId,
        result: Result<Vec<Extent>, Errno>,
        actions: &mut Actions,
    ) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let asked = file.writing.reserving.take();
        let is_void = core::mem::take(&mut file.writing.is_reservation_void);
        let ahead_to = file.writing.reserving_ahead_to.take();
        let mut failed = match result {
            Ok(_) if is_void => None,
            Ok(extents) => {
                file.extents = extents;
                file.writing.mapped_end = u64::MAX;
                if asked.is_some_and(|range| !file.is_mapped(range)) {
                    // Reserved, and yet not there: this file system does not tell where blocks are.
                    file.way = WriteWay::Through;
                }
                // A disk that gives so little ahead of need would be asked again at each write.
                let mapped_to = file.mapped_to();
                let had = asked.map_or(0, |range| range.end());
                file.writing.is_short |= ahead_to
                    .is_some_and(|end| mapped_to < end && mapped_to < had + RESERVE_AHEAD_MIN);
                None
            }
            Err(errno) => {
                file.writing.is_short = true;
                Some(errno)
            }
        };
        let waiting = file.writing.waiting.clone();
        let lacks = |server: &Server, key: u32| {
            server.writes.get(key).is_some_and(|write| {
                let mapped = |file: &File| file.is_mapped(write.range);
                let is_meant = asked.is_some_and(|asked| asked.overlaps(write.range));
                is_meant && !server.files.get(&id).is_some_and(mapped)
            })
        };
        if failed.is_some_and(Errno::is_full)
            && waiting.iter().any(|&key| lacks(self, key))
            && self.make_room(id, actions)
        {
            // They are looked at again when others have given back what they do not need.
            failed = None;
        }
        for key in waiting {
            let lacks = lacks(self, key);
            match failed {
                // A write that lacks no block does not need the blocks that could not be had.
                Some(errno) if lacks => {
                    self.finish_write(key, Outcome::Failed(errno), actions);
                }
                _ => self.advance_write(key, actions),
            }
        }
        self.trim_if_left(id, actions);
        if ahead_to.is_some() {
            self.release(id, actions);
        }
    }

    // ---- Commit ----

    pub(super) fn write_end(
        &mut self,
        session: SessionId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        let Some(grant) = self.grants.remove(&(session, request)) else {
            if self.sessions.contains_key(&session) {
                actions.list.push(Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Failed(Errno::INVALID),
                });
            }
            return;
        };
        let id = grant.file;
        actions.list.push(Action::Publish {
            lane: grant.lane,
            record: grant.record,
            file: id,
            range: grant.range,
            runs: grant.runs,
            request: Some(request),
        });
        if let Some(file) = self.files.get_mut(&id) {
            file.writing.grant_count -= 1;
        }
        self.commit(&grant, actions);
        actions.list.push(Action::Reply {
            session,
            request,
            outcome: Outcome::Done,
        });
        // The grant's use of the file; the dirty bytes have one of their own.
        self.release(id, actions);
    }

    /// The client has thought better of it.
    pub(super) fn write_abort(
        &mut self,
        session: SessionId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        if let Some(grant) = self.grants.remove(&(session, request)) {
            self.void_grant(&grant, actions);
        }
    }

    /// A former daemon has published it, and it is told later.
    pub(super) fn record_kept(&mut self, lane: LaneId, record: u32) {
        if let Some(state) = self.lanes.get_mut(&lane)
            && state.records.contains(&record)
        {
            state.records.retain(|&free| free != record);
            state.kept.insert(record);
        }
    }

    /// A former daemon has published it.
    pub(super) fn recovered(
        &mut self,
        lane: LaneId,
        record: u32,
        facts: FileFacts,
        (range, runs): (ByteRange, Runs),
        actions: &mut Actions,
    ) {
        let is_spent = runs.as_slice().is_empty();
        let id = self.adopt(facts, (self.change_count, None), actions);
        let page_count = range.end().div_ceil(PAGE_BYTES) - range.start.0 / PAGE_BYTES;
        let fits = (is_spent || u64::from(runs.page_count()) == page_count) && range.length.0 > 0;
        let mut shares_pages = false;
        let claimed = fits
            && self.lanes.get_mut(&lane).is_some_and(|state| {
                let known = state.records.contains(&record) || state.kept.contains(&record);
                let is_alone = known && state.pages.claim(&runs);
                // Two parts of one former piece may lie in one page.
                shares_pages = known && !is_alone && state.pages.claim_beside(&runs);
                let claimed = is_alone || shares_pages;
                self.unclaimed_count += u64::from(!claimed);
                state.records.retain(|&free| free != record);
                // A piece that cannot be claimed stays where it is: its record is nobody else's.
                if claimed {
                    state.kept.remove(&record);
                } else if known {
                    state.kept.insert(record);
                }
                claimed
            });
        if claimed {
            let grant = Grant {
                file: id,
                range,
                lane,
                record,
                runs,
                shares_pages,
            };
            if let Some(file) = self.files.get_mut(&id) {
                file.writing.is_reserved = true;
            }
            if is_spent {
                self.recover_spent(&grant, actions);
            } else {
                self.commit(&grant, actions);
            }
        }
        self.release(id, actions);
    }

    /// The bytes of this record are on the device: older pieces have no say there.
    fn recover_spent(&mut self, grant: &Grant, actions: &mut Actions) {
        self.commit_count += 1;
        let piece = PieceKey(self.pieces.insert(Piece {
            file: grant.file,
            lane: grant.lane,
            record: grant.record,
            runs: Runs::default(),
            shares_pages: false,
            range: grant.range,
            commit: self.commit_count,
            since: self.commit_count,
            committed: self.now,
            live: 0,
            flights: 0,
            loose: 0,
            loosened: 0,
            hides: 0,
            hidden_by: Vec::new(),
            is_announcement: false,
        }));
        let mut released = core::mem::take(&mut self.released);
        if let Some(file) = self.files.get_mut(&grant.file) {
            note_hidden(&mut self.pieces, &self.write_flights, &file.writing, piece);
            file.writing.dirty.discard(grant.range, &mut released);
        }
        // Its time may not be set yet.
        self.list_writer(grant.file);
        self.discard_loose(grant.file, grant.range, actions);
        if self
            .pieces
            .get(piece.0)
            .is_some_and(|piece| piece.hides == 0)
        {
            self.strike_or_remember(piece, actions);
        }
        self.settle_released(&mut released, actions);
        self.released = released;
        self.settle_clean(grant.file, actions);
    }

    /// The bytes of a grant are the file's from now on.
    fn commit(&mut self, grant: &Grant, actions: &mut Actions) {
        let (id, range) = (grant.file, grant.range);
        let is_announcement = self
            .files
            .get(&id)
            .is_some_and(|file| file.is_announcement(range));
        self.commit_count += 1;
        let commit = self.commit_count;
        let piece = PieceKey(self.pieces.insert(Piece {
            file: id,
            lane: grant.lane,
            record: grant.record,
            runs: grant.runs,
            shares_pages: grant.shares_pages,
            range,
            commit,
            since: commit,
            committed: self.now,
            live: range.length.0,
            flights: 0,
            loose: 0,
            loosened: 0,
            hides: 0,
            hidden_by: Vec::new(),
            is_announcement,
        }));
        self.drop_blocks(id, range.start.0, range.end());
        let mut released = core::mem::take(&mut self.released);
        self.list_writer(id);
        let file = self.files.get_mut(&id);
        let file = file.expect(
            "a file is known as long as somebody may write to it: these bytes are published",
        );
        note_hidden(&mut self.pieces, &self.write_flights, &file.writing, piece);
        file.writing.dirty.commit(range, piece, &mut released);
        file.writing.reach_for(range);
        file.writing.commits.push_back((commit, piece));
        file.writing.pace.committed(self.now, range);
        self.change_count += 1;
        file.changed = self.change_count;
        let device = file.device;
        if range.end() > file.size {
            self.resize(id, range.end());
        }
        // Also when it does not grow: its time of change does.
        self.make_known(id, actions);
        // Not before: a file of which nothing else is left would be taken for clean.
        self.discard_loose(id, range, actions);
        self.settle_released(&mut released, actions);
        self.released = released;
        self.touch(device);
        self.retry_waiting(id, actions);
    }

    /// Its device has, or had, something of it to write; that uses it. While the pieces that a
    /// former daemon left are told it may be listed and have nothing dirty for a moment.
    fn list_writer(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(&id)
            && !file.writing.is_listed
            && let Some(device) = self.devices.get_mut(&file.device)
        {
            file.writing.is_listed = true;
            file.use_count += 1;
            device.writers.push_back(id);
        }
    }

    /// Tell observers what a file with dirty bytes looks like. Also while its length is being found
    /// out: that it has bytes which the file system has not must never be unknown.
    pub(super) fn make_known(&mut self, id: FileId, actions: &mut Actions) {
        let now = self.now;
        if let Some(file) = self.files.get_mut(&id)
            && !file.writing.dirty.is_empty()
        {
            let size = ByteCount(file.size.max(file.writing.dirty.end()));
            actions.list.push(Action::Known { file: id, size });
            if file.size_stale && file.stat.is_none() {
                file.stat = Some(Asked::since(now));
                actions.list.push(Action::Stat { file: id });
            }
        }
    }

    fn void_grant(&mut self, grant: &Grant, actions: &mut Actions) {
        if let Some(file) = self.files.get_mut(&grant.file) {
            file.writing.grant_count -= 1;
        }
        if let Some(state) = self.lanes.get_mut(&grant.lane) {
            state.pages.give(&grant.runs);
            state.records.push(grant.record);
        }
        self.roomier();
        self.lane_emptied(grant.lane, actions);
        self.settle_waiters(grant.file, actions);
        self.trim_if_left(grant.file, actions);
        self.release(grant.file, actions);
    }

    /// There is more room in the write buffer: writes that wait for it are looked at again before
    /// the step ends.
    pub(super) fn roomier(&mut self) {
        self.is_roomier = true;
    }

    /// Writes that wait for room in the write buffer are looked at again: first those of the device
    /// with the longest waiting one, and those of one device in their order. A write that waits for
    /// its own file, or for blocks of it, keeps nobody.
    pub(super) fn give_room(&mut self, actions: &mut Actions) {
        if !core::mem::take(&mut self.is_roomier) {
            return;
        }
        let mut line: Vec<(u64, DeviceId, Place, LaneId, u32)> = Vec::new();
        for (&lane, state) in &self.lanes {
            let placed = |&key: &u32| {
                let (device, place) = self.place_in_line(key)?;
                Some((0, device, place, lane, key))
            };
            line.extend(state.waiting.iter().filter_map(placed));
        }
        let mut longest: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for &(_, device, (_, asked), ..) in &line {
            let first = longest.entry(device).or_insert(asked);
            *first = asked.min(*first);
        }
        for (first, device, ..) in &mut line {
            *first = longest.get(device).copied().unwrap_or(0);
        }
        line.sort_unstable();
        let mut blocked: Vec<(LaneId, DeviceId)> = Vec::new();
        for (_, device, _, lane, key) in line {
            if blocked.contains(&(lane, device)) {
                // Were it still said to wait for room, it could keep writes to other devices behind
                // one that comes before it.
                if let Some(write) = self.writes.get_mut(key)
                    && write.waits_for == WaitsFor::Room
                {
                    write.waits_for = WaitsFor::Device;
                }
                continue;
            }
            self.advance_write(key, actions);
            if let Some(WaitsFor::Room | WaitsFor::Device) = self.waits_for(key) {
                blocked.push((lane, device));
            }
        }
    }

    // Of writers without a claim none gets far ahead of another one that waits (start-time fair
    // queueing, Goyal et al. 1996).

    /// Where a write stands among those that wait, and for which device: how far files are is
    /// counted by devices, and says nothing of a file on another one.
    fn place_in_line(&self, key: u32) -> Option<(DeviceId, Place)> {
        let write = self.writes.get(key)?;
        let file = write.file?;
        let device = self.files.get(&file)?.device;
        Some((device, (self.progress_of(file), write.asked)))
    }

    /// How far a file is, as its device counts. A writer that was silent for a while does not have
    /// that coming. Units: bytes.
    fn progress_of(&self, id: FileId) -> u64 {
        let Some(file) = self.files.get(&id) else {
            return 0;
        };
        let others = self.devices.get(&file.device).map(|device| device.progress);
        file.writing.progress.max(others.unwrap_or(0))
    }

    fn waits_for(&self, key: u32) -> Option<WaitsFor> {
        self.writes.get(key).map(|write| write.waits_for)
    }

    /// The place of a write in its lane: of those that wait for one device the least far comes
    /// first; between devices the one whose writes have waited for room longest. At most one for
    /// each device waits for room, so these orders make no circle.
    fn place_in_lane(&self, lane: &LaneState, key: u32) -> InLine {
        let Some((device, own)) = self.place_in_line(key) else {
            return InLine::First;
        };
        let mut place = InLine::First;
        for &other in lane.waiting.iter().filter(|&&other| other != key) {
            let Some((elsewhere, theirs)) = self.place_in_line(other) else {
                continue;
            };
            let waits_for = self.waits_for(other);
            if elsewhere == device {
                let is_in_line = matches!(waits_for, Some(WaitsFor::Room | WaitsFor::Device));
                if is_in_line && theirs < own {
                    return InLine::BehindItsOwn;
                }
            } else if waits_for == Some(WaitsFor::Room) && theirs.1 < own.1 {
                place = InLine::BehindAnother;
            }
        }
        place
    }

    /// The progress of the last of the files that wait for room on a device, or for their earlier
    /// bytes. A write that waits for its lane's turn, which is another device's, or for a file that
    /// its device does not take, keeps nobody of other lanes. Units: bytes.
    fn least_progress(&self, id: DeviceId) -> Option<u64> {
        let of_lane = |state: &LaneState| -> Option<u64> {
            let mut least: Option<u64> = None;
            let mut is_shared = false;
            for write in state.waiting.iter().filter_map(|&key| self.writes.get(key)) {
                let Some((file, known)) = write
                    .file
                    .and_then(|file| Some((file, self.files.get(&file)?)))
                else {
                    continue;
                };
                if known.device != id {
                    is_shared |= write.waits_for == WaitsFor::Room;
                } else if write.waits_for != WaitsFor::Other && known.writing.failing.is_none() {
                    let progress = self.progress_of(file);
                    least = Some(least.map_or(progress, |least| least.min(progress)));
                }
            }
            least.filter(|_| !is_shared)
        };
        self.lanes.values().filter_map(of_lane).min()
    }

    /// Its file has got so much more than another one that waits that it waits, too.
    fn is_ahead(&self, key: u32) -> bool {
        let Some(id) = self.writes.get(key).and_then(|write| write.file) else {
            return false;
        };
        let device = self.files.get(&id).map(|file| file.device);
        device
            .and_then(|device| self.least_progress(device))
            .is_some_and(|least| self.progress_of(id) > least.saturating_add(AHEAD_BYTES))
    }

    fn progressed(&mut self, id: FileId, bytes: u64) {
        let progress = self.progress_of(id);
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        file.writing.progress = progress.saturating_add(bytes);
        let device = file.device;
        let least = self
            .least_progress(device)
            .unwrap_or(progress)
            .min(progress);
        if let Some(device) = self.devices.get_mut(&device) {
            device.progress = device.progress.max(least);
        }
    }

    /// The map has let go of bytes: pieces that nobody needs any more are struck.
    pub(super) fn settle_released(&mut self, released: &mut Vec<Released>, actions: &mut Actions) {
        for gone in released.drain(..) {
            let piece = self.pieces.get_mut(gone.piece.0);
            let piece = piece.expect("bytes that a map lets go of have their piece");
            assert!(
                gone.bytes <= piece.live,
                "a map lets go of {} bytes of a piece that has {}",
                gone.bytes,
                piece.live
            );
            piece.live -= gone.bytes;
            self.strike_if_done(gone.piece, actions);
        }
    }

    /// A piece that nobody needs gives its pages back; and its record, unless a later server would
    /// need to know that it came after an older one.
    pub(super) fn strike_if_done(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.get_mut(key.0) else {
            return;
        };
        if !piece.is_spent() || piece.runs.as_slice().is_empty() {
            return;
        }
        let (lane, record) = (piece.lane, piece.record);
        let runs = core::mem::take(&mut piece.runs);
        let hidden_by = core::mem::take(&mut piece.hidden_by);
        let hides = piece.hides;
        let shares_pages = piece.shares_pages;
        let state = self.lanes.get_mut(&lane);
        let state = state.expect("a lane with a piece is not done");
        match shares_pages {
            true => state.pages.let_go(&runs),
            false => state.pages.give(&runs),
        }
        if record == NO_RECORD {
            self.pieces.remove(key.0);
            self.roomier();
            return self.lane_emptied(lane, actions);
        }
        if hides > 0 {
            actions.list.push(Action::Spent { lane, record });
        } else {
            self.strike_or_remember(key, actions);
        }
        for newer in hidden_by {
            let piece = self.pieces.get_mut(newer.0);
            let piece = piece.expect("a piece has its record as long as it hides another");
            assert!(piece.hides > 0, "a piece hides more than it counted");
            piece.hides -= 1;
            if piece.hides == 0 && piece.runs.as_slice().is_empty() {
                self.strike_or_remember(newer, actions);
            }
        }
        self.roomier();
    }

    /// Its record goes too, unless it is the one by which a later server knows that the file's time
    /// is still to be set.
    fn strike_or_remember(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.get(key.0) else {
            return;
        };
        let (lane, record) = (piece.lane, piece.record);
        match self.files.get_mut(&piece.file) {
            Some(file) if file.writing.is_listed && file.writing.remembered.is_none() => {
                file.writing.remembered = Some(key);
                actions.list.push(Action::Spent { lane, record });
            }
            _ => self.strike(key, actions),
        }
    }

    /// The file system has the file's time.
    pub(super) fn strike_remembered(&mut self, id: FileId, actions: &mut Actions) {
        let file = self.files.get_mut(&id);
        if let Some(key) = file.and_then(|file| file.writing.remembered.take()) {
            self.strike(key, actions);
        }
    }

    /// Its record goes too.
    fn strike(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.remove(key.0) else {
            return;
        };
        let (lane, record) = (piece.lane, piece.record);
        actions.list.push(Action::Strike { lane, record });
        if let Some(state) = self.lanes.get_mut(&lane) {
            state.records.push(record);
        }
        self.lane_emptied(lane, actions);
    }
}

/// So many bytes more beside what the same lane has, of what is free.
fn fits(bytes: u64, own: u64, free: u64, has_claim: bool) -> bool {
    // One write at a time always: it may be longer than the rule gives. And a writer with a rate of
    // its own takes all there is: its backlog is the device's doing, and held back it would be
    // taken for a copy.
    bytes <= free && (has_claim || own == 0 || own + bytes <= 2 * (free - bytes))
}

/// Pieces of a file that have pages and share bytes with `newer` are hidden by it; also where they
/// are on the device already: a later server knows nothing of that.
fn note_hidden(
    pieces: &mut slab::Slab<Piece>,
    write_flights: &slab::Slab<WriteFlight>,
    writing: &Writing,
    newer: PieceKey,
) {
    let Some((range, mut since)) = pieces.get(newer.0).map(|piece| (piece.range, piece.since))
    else {
        return;
    };
    let (reach_start, reach_end) = writing.reach;
    if range.start.0 >= reach_end || range.end() <= reach_start {
        return;
    }
    let mut hides = 0;
    for (commit, key) in &writing.commits {
        if let Some(older) = pieces.get_mut(key.0)
            && older.commit == *commit
            && older.range.overlaps(range)
            && !older.runs.as_slice().is_empty()
        {
            // A later server does not learn of one without a record.
            if older.record != NO_RECORD {
                older.hidden_by.push(newer);
                hides += 1;
            }
            // Bytes on their way get there, or their file is one that fails.
            let first = older.range.start.0.max(range.start.0);
            let end = older.range.end().min(range.end());
            let has = |span: &Span| {
                span.piece == *key && span.range.start.0 <= first && span.range.end() >= end
            };
            let is_on_its_way = older.flights > 0
                && write_flights
                    .iter()
                    .any(|(_, flight)| flight.spans.iter().any(has));
            if older.live > 0 && !is_on_its_way {
                since = since.min(older.since);
            }
        }
    }
    if let Some(piece) = pieces.get_mut(newer.0) {
        piece.hides = hides;
        piece.since = since;
    }
}

impl Writing {
    /// A piece with these bytes is about to be among the commits.
    pub(super) fn reach_for(&mut self, range: ByteRange) {
        let (start, end) = match self.commits.is_empty() {
            true => (u64::MAX, 0),
            false => self.reach,
        };
        self.reach = (start.min(range.start.0), end.max(range.end()));
    }
}

impl File {
    /// Blocks from `end` on are not the file's any more.
    pub(super) fn unmap_from(&mut self, end: u64) {
        self.extents.retain(|extent| extent.logical.0 < end);
        if let Some(last) = self.extents.last_mut() {
            last.length.0 = last.length.0.min(end - last.logical.0);
        }
    }

    /// The range to reserve for a write: the bytes that it needs, and up to where more is expected.
    fn to_reserve(&self, range: ByteRange) -> (ByteRange, u64) {
        let end = range.end();
        if self.is_announcement(range) {
            let start = self.mapped_to();
            let needed = ByteRange::new(start, end.saturating_sub(start));
            return (needed, end.saturating_add(RESERVE_LARGE));
        }
        let wished_end = if end < RESERVE_FROM {
            end
        } else if end < RESERVE_LARGE_FROM {
            end.next_multiple_of(RESERVE_FIRST)
        } else if self.size > end {
            // Somebody has said how long it will be.
            self.size
        } else {
            end.saturating_add(RESERVE_LARGE)
        };
        (range, wished_end)
    }

    /// A copying Windows makes a file as long as it will be before it writes to it: a byte at a
    /// time, an allocation unit further each. The bytes between will be written, too.
    fn is_announcement(&self, range: ByteRange) -> bool {
        let ahead = range.start.0.saturating_sub(self.size);
        range.length.0 == 1 && range.start.0 >= self.size && ANNOUNCED_STEP.contains(&(ahead + 1))
    }

    /// The first byte that has no block.
    fn mapped_to(&self) -> u64 {
        let mut at = 0;
        for extent in &self.extents {
            if extent.logical.0 > at {
                break;
            }
            at = at.max(extent.logical.0 + extent.length.0);
        }
        at.min(self.writing.mapped_end)
    }

    /// True when every byte of `range` has a block.
    pub(super) fn is_mapped(&self, range: ByteRange) -> bool {
        if range.end() > self.writing.mapped_end {
            return false;
        }
        let mut at = range.start.0;
        let from = self
            .extents
            .partition_point(|extent| extent.logical.0 + extent.length.0 <= at);
        for extent in self.extents.get(from..).unwrap_or(&[]) {
            if extent.logical.0 > at {
                return false;
            }
            at = extent.logical.0 + extent.length.0;
            if at >= range.end() {
                return true;
            }
        }
        false
    }
}
