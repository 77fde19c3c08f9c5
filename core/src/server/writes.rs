// SPDX-License-Identifier: Apache-2.0
//! A client's write, from its arrival to the pages that it is granted. Its acknowledgement is in
//! `commits`, the syncs that wait for its bytes are in `syncs`.
//!
//! A write gets pages of its session's lane when no client changes the file beside us, the file has
//! its blocks already, and there is room. It is acknowledged in the step in which its piece is
//! published: [`Action::Publish`] stands before the reply. The way of pieces afterwards is in
//! `writeback`.

use super::line::InLine;
use super::state::*;
use super::*;
use crate::write::{Lane, Runs};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// A reservation for a file of unannounced length: the write alone until it has so much, then this.
const RESERVE_FROM: u64 = 1 << 20;
const RESERVE_FIRST: u64 = 64 << 20;
/// From so much on the server reserves a gibibyte at a time, so that files that are written side by
/// side have a few extents each.
const RESERVE_LARGE_FROM: u64 = 32 << 20;
const RESERVE_LARGE: u64 = 1 << 30;
/// How far ahead of a writer: by its rate for so long, and at least so much.
const RESERVE_AHEAD: Duration = Duration::from_s(3);
const RESERVE_AHEAD_MIN: u64 = 16 << 20;
/// Memory that lanes give back at once when another one needs it. Units: pages.
const SHRINK_PAGES: u32 = 2048;
/// A single byte so far past the end announces how long a file will be.
const ANNOUNCED_STEP: core::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;

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
                // The first are those of the sync with the driver; some of these leave, too.
                let with_driver = writing.syncs.iter().take(writing.syncing);
                let leaving = |waiter: &&SyncWaiter| waiter.session == session;
                writing.syncing -= with_driver.filter(leaving).count();
                let waiters = writing.syncs.len();
                writing.syncs.retain(|waiter| waiter.session != session);
                let uses = waiters - writing.syncs.len();
                let before = writing.holds.len();
                // A door with an answer may be changing the file, and has not reported that.
                let is_changing =
                    |hold: &(SessionId, Option<RequestId>)| hold.0 == session && hold.1.is_none();
                writing.is_open_elsewhere |= writing.holds.iter().any(is_changing);
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

    /// The driver has passed on everything that a former daemon left.
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

    /// An empty lane without a session is done; but not while the driver still passes on pieces of
    /// a recovery.
    pub(super) fn lane_emptied(&mut self, lane: LaneId, actions: &mut Actions) {
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
            // The client's door takes a hold first.
            return Turn::Plain;
        }
        if file.size_stale {
            // The file was changed: a write that ends in it or goes past its end must find the end
            // where it is.
            if file.stat.is_none() {
                file.stat = Some(Asked::since(self.now));
                actions.list.push(Action::Stat { file: id });
            }
            return Turn::Wait;
        }
        if let Some(errno) = writing.failing {
            // The writer gets the error, once; its earlier bytes stay and are retried, and later
            // ones with them. When the oldest of those should have been written by now the writer
            // gets it each time: else it would wait for as long as the device does not take them.
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
            // The client's door takes a hold first, and gets the error if its own file is the one
            // that fails.
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
            // This write may come first without more room, as when one before it goes, or begins to
            // wait for something else.
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
    /// busy file system takes longer to reserve them than a frame may wait.
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
        // From the end of this write. `reserved` counts from the end of this range how far ahead
        // the disk has let the writer go.
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

    /// Whether a lane may use so many bytes more: no more than twice the free bytes, so that there
    /// is always room for the next client, and a writer that is faster than its device is slowed by
    /// its own backlog alone.
    fn may_grow(&self, lane: LaneId, bytes: u64, has_claim: bool) -> bool {
        let own = self.lanes.get(&lane).map_or(0, LaneState::used_bytes);
        let free = self.free_bytes();
        fits(bytes, own, free, has_claim)
    }

    /// Files that their device does not take hold so much that this write finds no room, even when
    /// all others are written: it could wait for ever.
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

    /// All memory in use is held by files that their device does not take: no write-back gives any
    /// back.
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
        // Its memory may reach this page: together with the other lanes' memory that is the write
        // buffer.
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

    /// Make other lanes give back memory that they do not use, so much that this one can have
    /// pages, and little more. False: there is no use in it.
    ///
    /// Memory that changes hands is given to the kernel and faulted in again, which costs about as
    /// much as the copy into it. So a lane that is written to keeps its share of the buffer for
    /// good: the rest of its memory is for others, up to theirs. Only a writer with a claim, or one
    /// that has nothing under way, takes all there is: a single write may be longer than a share.
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

    /// The free part of the write buffer. Units: bytes.
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

    /// Blocks behind the file's end were left reserved. The server forgets the file with the last
    /// of its handles, so that the driver can give them back.
    pub(super) fn mark_reserved(&mut self, id: FileId) {
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
                    // Reserved, and yet not there: this file system does not report its blocks.
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
            // They are looked at again when others have given back blocks that they do not need.
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
}

/// Whether a lane that has `own` bytes may have so many more, with `free` bytes unused.
fn fits(bytes: u64, own: u64, free: u64, has_claim: bool) -> bool {
    // A lane may always have one write at a time: it may be longer than the rule gives. And a
    // writer with a rate of its own takes all there is: its backlog is the device's doing, and if
    // held back it would be taken for a copy.
    bytes <= free && (has_claim || own == 0 || own + bytes <= 2 * (free - bytes))
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
            // A client has announced how long it will be.
            self.size
        } else {
            end.saturating_add(RESERVE_LARGE)
        };
        (range, wished_end)
    }

    /// Windows, before it copies into a file, makes it as long as it will be: a byte at a time, an
    /// allocation unit further each. The bytes between will be written, too.
    pub(super) fn is_announcement(&self, range: ByteRange) -> bool {
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
