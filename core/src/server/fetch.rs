// SPDX-License-Identifier: Apache-2.0
//! The requests to the devices: the next one of each, whenever it can take one.

use super::state::*;
use super::turns::{Turn, run_is_progress};
use super::writeback::NextWrite;
use super::*;
use crate::cache::{Block, PageSet};
use crate::sched::{Choice, Load, Order, choose, spare};
use alloc::vec::Vec;

/// A device is at ease where a reader cuts or a client without a contract waits, if all deadlines
/// can wait for so many chunks and at most so much of each second is promised. First frames then go
/// before bytes that are fetched ahead, and a request is one part in so many of a chunk, so that a
/// reader that cuts does not wait. Each way back to the interrupted stream, and each request that
/// gets in between two others, costs positioning, which is too dear where more is promised.
const EASE_CHUNKS: u64 = 4;
const EASE_PROMISED: Duration = Duration::from_ms(500);
const EASE_PART: u64 = 4;

/// A reader is behind its clock if its read is due by that clock within this time. It goes first if
/// all others can wait for a request like its own.
const BEHIND: Duration = Duration::from_ms(250);
/// Contracts need at most so many thousandths of the device's time then: the way there and back
/// costs positioning.
const BEHIND_PERMILLE: u64 = 850;

/// Requests at once with a device that does not position.
const DEPTH_MAX: u32 = 64;
/// The same with one that does, where they are so short that together they are not a chunk: each of
/// them costs positioning, and a search of the bytes that wait.
const BATCH_COUNT_MAX: u32 = 256;

/// The holder of a claim; a writer with its next write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Claimant {
    Reader(StreamId),
    Writer(NextWrite),
}

impl Claimant {
    fn is(&self, visitor: Visitor) -> bool {
        match (self, visitor) {
            (Claimant::Reader(own), Visitor::Reader(id)) => *own == id,
            (Claimant::Writer(own), Visitor::Writer(id)) => own.file == id,
            _ => false,
        }
    }
}

/// In an [`IoId`]: it names a write.
pub(super) const WRITE_FLIGHT: u64 = 1 << 31;

/// The outcome of an attempt to fetch a run of bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// Covered up to here without a request: all of it was there or on its way.
    Covered(u64),
    /// A request was sent; covered up to here.
    Sent(u64),
    /// No buffer is free.
    Starved,
    /// Old bytes are still on their way into the very pages: wait for them.
    Busy,
}

impl Server {
    /// Send the device its next requests.
    pub(super) fn pump(&mut self, id: DeviceId, actions: &mut Actions) {
        let before = self.devices.get(&id).map(Device::sent_count);
        self.send_all(id, actions);
        self.read_next_header(id, actions);
        if let Some(device) = self.devices.get_mut(&id)
            && before != Some(device.sent_count())
        {
            device.counts.batch_count += 1;
        }
    }

    fn send_all(&mut self, id: DeviceId, actions: &mut Actions) {
        self.shed(id);
        // Every turn sends a request or moves a stream or a demand on, so this bound is never met;
        // it is here because a loop without a bound is a hung server.
        for _ in 0..1024 {
            let Some(device) = self.devices.get(&id) else {
                return;
            };
            if device.queue.starved && device.writers.is_empty() {
                return;
            }
            if device.is_waited_for(self.now) && self.may_wait(id, device, device.medium.free_at) {
                return self.block(id);
            }
            if !self.has_room(device) {
                // Requests with the device may become late, and hold nothing back then, without any
                // event.
                if !device.positions()
                    && device.queue.flight_bytes < 2 * self.limits.chunk_bytes_max
                {
                    self.block(id);
                }
                return;
            }
            let choice = self.choose_on(id);
            if self.flushes_before(id, choice) {
                if let Some(device) = self.devices.get_mut(&id) {
                    device.begin_flush(self.now);
                    actions.list.push(Action::Flush { device: id });
                }
                return self.block(id);
            }
            let progressed = match choice {
                Choice::Stream(index) => match self.claimants.get(index).copied() {
                    Some(Claimant::Reader(stream)) => self.fetch_stream(id, stream, actions),
                    Some(Claimant::Writer(write)) => {
                        self.send_write(id, &write, true, actions);
                        true
                    }
                    None => false,
                },
                Choice::BestEffort => self.fetch_best_effort(id, actions),
                Choice::Nobody => {
                    let waiting = self.devices.get(&id).is_some_and(|device| {
                        !device.queue.demands.is_empty()
                            || !device.visits.background.is_empty()
                            || !device.writers.is_empty()
                    });
                    if waiting {
                        self.block(id);
                    }
                    false
                }
            };
            if !progressed {
                return;
            }
        }
    }

    /// A device has at most a chunk, and runs dry before the next: in that instant requests of
    /// others get in, such as those for the metadata of a file that a client opens. Behind an
    /// unbroken run of sequential requests they would wait until the kernel's scheduler loses
    /// patience, with mq-deadline for 500 ms. It costs a turn of the event loop a chunk. A device
    /// without positioning needs depth instead.
    fn has_room(&self, device: &Device) -> bool {
        if !device.positions() {
            let chunk = self.limits.chunk_bytes_max;
            return device.queue.flight_count < DEPTH_MAX
                && device.queue.flight_bytes < 2 * chunk
                && device.may_be_overtaken(self.now, chunk);
        }
        let is_kept_free = device.queue.is_awaited && device.writers.is_empty();
        device.queue.flight_count == 0
            || (!is_kept_free
                && device.queue.flight_count < BATCH_COUNT_MAX
                && device.queue.batch_bytes < self.request_bytes_max(device))
    }

    /// The longest request now.
    fn request_bytes_max(&self, device: &Device) -> u64 {
        let chunk = self.limits.chunk_bytes_max;
        match device.queue.is_at_ease {
            true => (chunk / EASE_PART).max(self.slot_bytes()).min(chunk),
            false => chunk,
        }
    }

    /// Whether to flush the drive before it serves this choice.
    fn flushes_before(&self, id: DeviceId, choice: Choice) -> bool {
        let Some(device) = self.devices.get(&id) else {
            return false;
        };
        let reads = match choice {
            Choice::Stream(index) => {
                matches!(self.claimants.get(index), Some(Claimant::Reader(_)))
            }
            Choice::BestEffort => {
                !matches!(self.best_effort_turn(id, device), Some(Turn::Write(_)))
            }
            Choice::Nobody => false,
        };
        reads && device.is_to_flush() && self.may_wait(id, device, device.medium.free_at)
    }

    /// Whether the device can be left alone until then without making a reader late that can still
    /// be in time.
    fn may_wait(&self, device_id: DeviceId, device: &Device, until: Instant) -> bool {
        let one = device.model.read(u64::MAX, self.limits.chunk_bytes_max);
        // Others may be due as soon.
        let needed = until.max(self.now) + one.times(4);
        let is_saved_now = |deadline: Instant| deadline >= self.now && deadline < needed;
        let promised = device
            .queue
            .demands
            .iter()
            .any(|demand| demand.due != Instant::NEVER);
        let urgent = device.contracts.iter().any(|&id| {
            let stream = self.streams.get(id.0);
            let claim = stream.and_then(|stream| self.claim(stream, device_id, self.promised));
            claim.is_some_and(|claim| {
                claim.left > 0 && claim.room > 0 && is_saved_now(claim.deadline)
            })
        });
        !promised && !urgent
    }

    pub(super) fn flushed(&mut self, id: DeviceId, outcome: Flushed) {
        let now = self.now;
        if let Some(device) = self.devices.get_mut(&id) {
            device.end_flush(now, outcome);
            self.touch(id);
        }
    }

    fn choose_on(&mut self, id: DeviceId) -> Choice {
        self.claims.clear();
        self.claimants.clear();
        let mut claims = core::mem::take(&mut self.claims);
        let mut claimants = core::mem::take(&mut self.claimants);
        let mut order = core::mem::take(&mut self.order);
        self.weigh_writers(id, &mut claims, &mut claimants);
        let writer_count = claims.len();
        let best_effort = self.best_effort_claim(id);
        // A promised read that its stream's fetching will not come to goes at once: a hole that was
        // evicted, changed, or failed once. There are few of them. Without a buffer nothing can be
        // read, and writers go on.
        let promised = self.devices.get(&id).is_some_and(|device| {
            !device.queue.starved
                && device
                    .queue
                    .demands
                    .iter()
                    .any(|demand| demand.due != Instant::NEVER)
        });
        let mut choice = Choice::Nobody;
        let mut is_at_ease = false;
        let mut rests_until = Instant::NEVER;
        let mut gap = None;
        if let Some(device) = self.devices.get(&id) {
            let starved = device.queue.starved;
            for &stream_id in device.contracts.iter().filter(|_| !starved) {
                if let Some(stream) = self.streams.get(stream_id.0)
                    && let Some(claim) = self.claim(stream, id, self.promised)
                    && claim.left > 0
                {
                    claims.push(claim);
                    claimants.push(Claimant::Reader(stream_id));
                }
            }
            // Among equals readers are first; without writers the order is unchanged.
            claims.rotate_left(writer_count);
            claimants.rotate_left(writer_count);
            let load = Load {
                model: &device.model,
                free_at: device.turns_at(self.now),
                head: device.queue.head,
                claims: &[],
                visiting: device
                    .visits
                    .visitor
                    .and_then(|visiting| claimants.iter().position(|who| who.is(visiting))),
                visit_given: device.visits.given,
                chunk: self.limits.chunk_bytes_max,
                best_effort,
            };
            let due = Load {
                claims: &claims,
                ..load
            };
            // Sequences live on positioning, whose time `leaves_gap` does not count.
            if !self.has_sequence(&claimants) {
                gap = device.leaves_gap(self.now, &due, &mut order);
            }
            let mut first = None;
            let keeps_up = device.keeps_up(self.now);
            let is_demanded = keeps_up && !starved && self.is_little_demanded(id, device);
            let rests = self.background_rests_until(device);
            let rests = rests.or(Some(device.queue.rests_until).filter(|until| *until > self.now));
            let rests = rests.filter(|_| keeps_up);
            is_at_ease = device.positions()
                && (is_demanded || rests.is_some() || self.is_cut_to(&claimants))
                && can_be_at_ease(&due, &mut order);
            if device.positions()
                && device.needed_permille <= BEHIND_PERMILLE
                && let Some(behind) = self.behind(&claims, &claimants)
            {
                let step = device.model.typical_positioning(claims.len());
                let cost = step.times(2) + device.model.transfer(self.limits.chunk_bytes_max);
                // Twice, since each request ends somebody's visit: 18 streams that began together
                // used all of a disk's time up, each request for itself affordable.
                first = Some(behind).filter(|_| spare(&due, &mut order) >= cost.times(2));
            }
            if is_at_ease {
                first = first.or_else(|| self.first_frame(device, &claims, &claimants));
                if keeps_up {
                    rests_until = self.let_rest(rests, &mut claims, &claimants);
                }
            }
            for (claim, claimant) in claims.iter_mut().zip(&claimants) {
                if let Claimant::Reader(id) = claimant
                    && let Some(stream) = self.streams.get(id.0)
                {
                    claim.deadline = claim.deadline.min(self.first_frame_wanted(stream));
                }
            }
            let wanted = Load {
                claims: &claims,
                ..load
            };
            choice = match first {
                _ if promised => Choice::BestEffort,
                Some(first) => Choice::Stream(first),
                // A read that a client waits for goes before bytes that no client waits for yet.
                None if is_at_ease && is_demanded => Choice::BestEffort,
                None => choose(&wanted, &mut order),
            };
        }
        if let Some(device) = self.devices.get_mut(&id) {
            device.queue.is_at_ease = is_at_ease;
            if let Some(until) = gap
                && matches!(choice, Choice::Stream(_))
            {
                device.gaps.begin(device.queue.service_started);
                rests_until = rests_until.min(until);
                choice = Choice::Nobody;
            }
        }
        self.claims = claims;
        self.claimants = claimants;
        self.order = order;
        if choice != Choice::Nobody {
            return choice;
        }
        if rests_until < Instant::NEVER {
            self.rest_wake = self.rest_wake.min(rests_until);
            self.block(id);
        } else if let Some(device) = self.devices.get_mut(&id) {
            device.satisfied_at = self.now;
        }
        choice
    }

    /// The next request without a contract is a short one, and its reader does not copy.
    fn is_little_demanded(&self, id: DeviceId, device: &Device) -> bool {
        let Some(Turn::Demand(index)) = self.best_effort_turn(id, device) else {
            return false;
        };
        let demand = device.queue.demands.get(index);
        demand.is_some_and(|demand| {
            let stream = demand.stream.and_then(|id| self.streams.get(id.0));
            let copies = stream.is_some_and(|stream| stream.is_copy);
            !copies && demand.range.length.0 <= self.limits.chunk_bytes_max / EASE_PART
        })
    }

    /// Fetch nothing ahead for a moment after the first read behind a cut: a client asks for the
    /// files of a clip one after the other, and the next would wait for a chunk ahead of each.
    /// Returns the earliest end of such a moment; NEVER if there is none.
    fn let_rest(
        &self,
        background: Option<Instant>,
        claims: &mut [Claim],
        claimants: &[Claimant],
    ) -> Instant {
        let stream_of = |claimant: &Claimant| match claimant {
            Claimant::Reader(id) => self.streams.get(id.0).filter(|stream| stream.was_cut_to),
            Claimant::Writer(_) => None,
        };
        let streams = claimants.iter().filter_map(stream_of);
        let rests = streams.filter_map(|stream| self.rests_until(stream));
        let Some(until) = rests.chain(background).min() else {
            return Instant::NEVER;
        };
        for claim in claims.iter_mut() {
            if !claim.is_awaited && !claim.writes {
                claim.room = 0;
            }
        }
        until
    }

    /// The same for streams without a contract.
    fn background_rests_until(&self, device: &Device) -> Option<Instant> {
        let streams = device.visits.background.iter();
        let rests = streams.filter_map(|id| self.rests_until(self.streams.get(id.0)?));
        rests.min()
    }

    /// Whether a reader under contract has cut to its present place.
    fn is_cut_to(&self, claimants: &[Claimant]) -> bool {
        claimants.iter().any(|claimant| match claimant {
            Claimant::Reader(id) => {
                let stream = self.streams.get(id.0);
                stream.is_some_and(|stream| stream.was_cut_to)
            }
            Claimant::Writer(_) => false,
        })
    }

    fn has_sequence(&self, claimants: &[Claimant]) -> bool {
        claimants.iter().any(|claimant| match claimant {
            Claimant::Reader(id) => {
                let stream = self.streams.get(id.0);
                stream.is_some_and(|stream| stream.frames.is_some())
            }
            Claimant::Writer(_) => false,
        })
    }

    /// The claim whose reader waits and is the furthest behind its own clock, though its contract
    /// is kept: the contract began later than the reader, or it is one of several layers, and each
    /// wait is added to the next. Index into `claims`.
    fn behind(&self, claims: &[Claim], claimants: &[Claimant]) -> Option<usize> {
        let all = claims.iter().zip(claimants).enumerate();
        all.filter_map(|(index, (claim, claimant))| {
            let Claimant::Reader(id) = claimant else {
                return None;
            };
            let stream = self.streams.get(id.0)?;
            let waits = stream.waiting_count > 0 && stream.fetched < stream.consumed;
            let due = stream.clock_due;
            let is_behind = due < claim.deadline && due < self.now + BEHIND;
            (waits && is_behind && claim.room > 0).then_some((due, index))
        })
        .min()
        .map(|(_, index)| index)
    }

    /// The claim whose first frame is served before anything else on a device at ease: the nearest.
    /// Index into `claims`.
    fn first_frame(
        &self,
        device: &Device,
        claims: &[Claim],
        claimants: &[Claimant],
    ) -> Option<usize> {
        let awaited = claims.iter().zip(claimants).enumerate();
        awaited
            .filter_map(|(index, (claim, claimant))| {
                let Claimant::Reader(id) = claimant else {
                    return None;
                };
                let stream = self.streams.get(id.0)?;
                let is_wanted = self.first_frame_wanted(stream) != Instant::NEVER;
                let distance = claim.physical.abs_diff(device.queue.head);
                (is_wanted && claim.room > 0).then_some((distance, index))
            })
            .min()
            .map(|(_, index)| index)
    }

    // ---- Contracts ----

    /// Fetch the next bytes of a stream. True: something changed, ask again.
    fn fetch_stream(&mut self, device_id: DeviceId, id: StreamId, actions: &mut Actions) -> bool {
        let chunk = self.limits.chunk_bytes_max;
        let preroll = self.policy.preroll;
        let (Some(stream), Some(device)) = (self.streams.get(id.0), self.devices.get(&device_id))
        else {
            return false;
        };
        let room = match self.claim(stream, device_id, self.promised) {
            Some(claim) => claim.room,
            None => return false,
        };
        let deadline = stream.deadline(stream.fetched_on(device_id), self.now, preroll);
        // The first frame comes sooner without the bytes behind it.
        let asked = stream.consumed.saturating_sub(stream.fetched);
        let bytes = match stream.awaits_first_frame() && asked > 0 {
            true => asked.min(chunk),
            false => self.request_bytes_max(device),
        };
        let Some(next) = self.next_fetch(stream, device_id, bytes.min(room.max(1))) else {
            return false;
        };
        let run = self.fetch_run(
            next.file,
            next.range,
            IoClass::RealTime,
            deadline,
            Some(id),
            actions,
        );
        if let Some(device) = self.devices.get_mut(&device_id) {
            device.visits.begin(Visitor::Reader(id));
        }
        let Some(stream) = self.streams.get_mut(id.0) else {
            return false;
        };
        match run {
            Run::Covered(end) | Run::Sent(end) => {
                let done = match stream.flow {
                    _ if end >= next.range.end() => next.worth,
                    Flow::Forward | Flow::Frames => end.saturating_sub(next.range.start.0),
                    // Bytes read downward, or a step, count when they are covered whole.
                    Flow::Reverse | Flow::Strided { .. } => 0,
                };
                stream.count_fetched(device_id, done);
                let bridged = stream.read_over(next.range, done);
                if let Some(device) = self.devices.get_mut(&device_id) {
                    device.counts.read_bridged += bridged;
                    device.visits.given += done;
                }
                run_is_progress(&run, done)
            }
            Run::Starved => {
                self.starve(device_id);
                false
            }
            Run::Busy => false,
        }
    }

    /// The bytes to fetch next for a stream from a device, at most so many.
    pub(super) fn next_fetch(
        &self,
        stream: &Stream,
        device: DeviceId,
        bytes: u64,
    ) -> Option<NextFetch> {
        let file = self.files.get(&stream.file)?;
        let slot_bytes = self.slot_bytes();
        match stream.flow {
            Flow::Forward => {
                let (spot, file, left) = self.next_spot(stream)?;
                let start = spot.offset;
                // Requests end where slots do, so that the next one starts a slot; never longer
                // than asked.
                let asked = start.saturating_add(bytes);
                let wanted = start.saturating_add(stream.consumed.saturating_sub(stream.fetched));
                let end = match asked / slot_bytes * slot_bytes {
                    whole if whole > start && asked > wanted => whole,
                    _ => asked,
                };
                let end = end
                    .min(start.saturating_add(left))
                    .min(start.saturating_add(file.place(start).contiguous));
                next_of(spot.file, start, end, end.saturating_sub(start))
            }
            Flow::Reverse => {
                let end = stream.origin.saturating_sub(stream.fetched).min(file.size);
                let start = end.saturating_sub(bytes).div_ceil(slot_bytes) * slot_bytes;
                let start = if start >= end {
                    (end.saturating_sub(1) / slot_bytes * slot_bytes).max(end.saturating_sub(bytes))
                } else {
                    start
                };
                next_of(stream.file, start, end, end - start)
            }
            Flow::Strided {
                stride,
                stretch_bytes,
            } => {
                let steps = stream.fetched / stretch_bytes.max(1);
                let start = strided_offset(stream.origin, stride, steps)?;
                let there = file
                    .place(start)
                    .contiguous
                    .min(file.size.saturating_sub(start));
                let at_once = self.strides_at_once(file, stride, stretch_bytes, bytes.min(there));
                let way = stride.unsigned_abs().saturating_mul(at_once - 1);
                let end = start.saturating_add(way + stretch_bytes).min(file.size);
                let worth = stretch_bytes * at_once;
                next_of(stream.file, start, end, worth)
            }
            Flow::Frames => self.next_of_frame(stream, device, bytes),
        }
    }

    pub(super) fn starve(&mut self, id: DeviceId) {
        if let Some(device) = self.devices.get_mut(&id)
            && !device.queue.starved
        {
            device.queue.starved = true;
            self.starved.push(id);
        }
        let waiting: Vec<u32> = self
            .files
            .values()
            .filter(|file| file.device == id)
            .flat_map(|file| file.waiting.iter().copied())
            .collect();
        for key in waiting {
            // The bytes of some are on their way.
            if let Some(read) = self.reads.get_mut(key)
                && read.asked == Instant::NEVER
            {
                read.starved = true;
            }
        }
    }

    // ---- Requests ----

    /// Bring `range` of a file into the cache: skip bytes that are there or on their way, and send
    /// one request for the first run that is not, as far as it is contiguous on its device and a
    /// chunk allows.
    pub(super) fn fetch_run(
        &mut self,
        id: FileId,
        range: ByteRange,
        class: IoClass,
        deadline: Instant,
        holder: Option<StreamId>,
        actions: &mut Actions,
    ) -> Run {
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get(&id) else {
            return Run::Covered(range.end());
        };
        let device = file.device;
        if !file.writing.dirty.is_empty() && !self.compose(id, range, holder, actions) {
            return Run::Starved;
        }
        let chunk = self.limits.chunk_bytes_max / PAGE_BYTES * PAGE_BYTES;
        let end = range.end();
        // Where the request must end, once it has begun.
        let mut limit = u64::MAX;
        let mut slots: Vec<SlotIndex> = Vec::new();
        let mut io_start = 0;
        let mut io_end = 0;
        let mut at = range.start.0;
        while at < end {
            let number = at / slot_bytes;
            let base = number * slot_bytes;
            let stop = end.min(base + slot_bytes);
            let wanted = PageSet::run(
                ((at - base) / PAGE_BYTES) as u32,
                (stop - base).div_ceil(PAGE_BYTES) as u32,
            );
            let known = self
                .files
                .get(&id)
                .and_then(|file| file.blocks.get(&number).copied());
            let missing = match known {
                Some(slot) => wanted
                    .without(self.cache.valid(slot))
                    .without(self.cache.coming(slot)),
                None => wanted,
            };
            let Some((first, last)) = missing.first_run() else {
                if !slots.is_empty() {
                    break;
                }
                if let Some(slot) = known {
                    self.cache.touch(slot);
                    self.hold_for(holder, id, slot, stop);
                }
                at = stop;
                continue;
            };
            let run_start = base + u64::from(first) * PAGE_BYTES;
            if slots.is_empty() {
                let contiguous = self
                    .files
                    .get(&id)
                    .map_or(0, |file| file.place(run_start).contiguous);
                limit = run_start
                    .saturating_add(contiguous.min(chunk))
                    .max(run_start + 1)
                    .div_ceil(PAGE_BYTES)
                    * PAGE_BYTES;
            } else if run_start != io_end || run_start >= limit {
                break;
            }
            let last = last.min((limit.min(base + slot_bytes) - base).div_ceil(PAGE_BYTES) as u32);
            // Pages whose old bytes are still on their way cannot be filled again yet.
            if let Some(slot) = known
                && !self
                    .cache
                    .filling(slot)
                    .and(PageSet::run(first, last))
                    .is_empty()
            {
                if slots.is_empty() {
                    return Run::Busy;
                }
                break;
            }
            let slot = match known {
                Some(slot) => slot,
                None => match self.take_slot(Block { file: id, number }, holder, actions) {
                    Some(slot) => slot,
                    None if slots.is_empty() => return Run::Starved,
                    None => break,
                },
            };
            self.cache.fill_begins(slot, PageSet::run(first, last));
            self.hold_for(holder, id, slot, stop);
            if slots.is_empty() {
                io_start = run_start;
            }
            slots.push(slot);
            io_end = base + u64::from(last) * PAGE_BYTES;
            at = stop.min(io_end.max(at));
            if io_end < stop {
                break;
            }
        }
        if slots.is_empty() {
            return Run::Covered(end);
        }
        let io_range = ByteRange::new(io_start, io_end - io_start);
        self.send(device, id, io_range, slots, class, deadline, actions);
        Run::Sent(at.min(end))
    }

    pub(super) fn take_slot(
        &mut self,
        block: Block,
        holder: Option<StreamId>,
        actions: &mut Actions,
    ) -> Option<SlotIndex> {
        let (slot, evicted) = match self.cache.take(block) {
            Some(taken) => taken,
            None if self.give_back(holder) => self.cache.take(block)?,
            None => return None,
        };
        if let Some(former) = evicted {
            if let Some(file) = self.files.get_mut(&former.file) {
                file.blocks.remove(&former.number);
            }
            if former.file != block.file {
                self.forget_if_unused(former.file, actions);
            }
        }
        if let Some(file) = self.files.get_mut(&block.file) {
            file.blocks.insert(block.number, slot);
        }
        Some(slot)
    }

    /// Keep a slot for the stream until it has passed `stop` in its file.
    fn hold_for(&mut self, holder: Option<StreamId>, file: FileId, slot: SlotIndex, stop: u64) {
        let Some(stream) = holder.and_then(|id| self.streams.get_mut(id.0)) else {
            return;
        };
        let end = match stream.flow {
            Flow::Forward => stream.v_of(file, stop),
            Flow::Frames => stream.frame_end(file),
            // Until the reader has come to the last stretch that begins in it.
            Flow::Strided {
                stride,
                stretch_bytes,
            } if stride > 0 => {
                let way = stop.saturating_sub(stream.origin).saturating_sub(1);
                let last = way / stride.unsigned_abs() * stretch_bytes;
                last.max(stream.fetched).saturating_add(1)
            }
            Flow::Reverse | Flow::Strided { .. } => stream.fetched.saturating_add(1),
        };
        if end <= stream.consumed.saturating_sub(stream.read_bytes) {
            // A hole far behind the reader: its slot would stay held until the reader reads on.
            return;
        }
        if stream.frames.is_none() && stream.held.back().is_some_and(|held| held.slot == slot) {
            if let Some(held) = stream.held.back_mut() {
                held.end = held.end.max(end);
            }
            return;
        }
        // In the order in which they are passed, whichever device was quicker.
        let place = stream.held.partition_point(|held| held.end <= end);
        let is_known = |held: &HeldSlot| held.end == end && held.slot == slot;
        if place > 0 && stream.held.get(place - 1).is_some_and(is_known) {
            return;
        }
        match stream.frames {
            Some(_) => stream.held.insert(place, HeldSlot { slot, end }),
            None => stream.held.push_back(HeldSlot { slot, end }),
        }
        self.cache.hold(slot);
    }

    #[expect(clippy::too_many_arguments, reason = "one request, as it goes out")]
    fn send(
        &mut self,
        device_id: DeviceId,
        id: FileId,
        range: ByteRange,
        slots: Vec<SlotIndex>,
        class: IoClass,
        deadline: Instant,
        actions: &mut Actions,
    ) {
        let now = self.now;
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        file.use_count += 1;
        let physical = file.place(range.start.0).physical;
        let Some(device) = self.devices.get_mut(&device_id) else {
            return;
        };
        let cost = device
            .model
            .read(physical.abs_diff(device.queue.head), range.length.0);
        let calibrated = device
            .model
            .calibrated_read(physical.abs_diff(device.queue.head), range.length.0);
        let is_first = device.queue.flight_count == 0;
        let is_close = is_first.then_some(device.queue.service_started == now);
        if device.queue.flight_count == 0 {
            device.queue.service_started = now;
            device.queue.batch_bytes = 0;
        }
        device.medium.flushes_alone = false;
        device.queue.batch_bytes += range.length.0;
        device.queue.head = physical.saturating_add(range.length.0);
        device.queue.flight_count += 1;
        device.queue.flight_bytes += range.length.0;
        device.queue.flight_cost += cost;
        device.queue.flight_deadlines.push(deadline);
        device.gaps.sent(class, cost, is_close);
        let kind = usize::from(class != IoClass::RealTime);
        if kind == 1 {
            device.turn_taken(false, cost);
        } else {
            device.shares.leave_out(cost);
        }
        device.counts.request_count[kind] += 1;
        device.counts.bytes[kind] += range.length.0;

        let start = actions.slots.len() as u32;
        actions.slots.extend_from_slice(&slots);
        let run = SlotRun {
            start,
            count: slots.len() as u32,
        };
        self.flight_generation = self.flight_generation.wrapping_add(1);
        let generation = self.flight_generation;
        let file = self.files.get(&id);
        let known_size = file.map_or(0, File::device_size);
        let buffered = file.is_some_and(|file| file.writing.loose.spans(range).next().is_some());
        let key = self.flights.insert(Flight {
            generation,
            device: device_id,
            file: id,
            range,
            known_size,
            slots,
            cost,
            deadline,
            calibrated,
            may_change: false,
        });
        actions.list.push(Action::Submit(IoRead {
            io: IoId(u64::from(generation) << 32 | u64::from(key)),
            file: id,
            device: device_id,
            range,
            slots: run,
            buffered,
            class,
            deadline,
        }));
        // A read that waits for these bytes now waits for the device.
        let waiting = self
            .files
            .get(&id)
            .map(|file| file.waiting.as_slice())
            .unwrap_or(&[]);
        for &key in waiting {
            if let Some(read) = self.reads.get_mut(key)
                && read.range.overlaps(range)
            {
                read.asked = read.asked.min(now);
            }
        }
    }

    /// The bytes of a request may change unseen.
    pub(super) fn may_change(&mut self, io: IoId) {
        let key = self.flight_of(io);
        if let Some(flight) = key.and_then(|key| self.flights.get_mut(key)) {
            flight.may_change = true;
        }
    }

    /// The key of a request in flight; None: it has ended.
    fn flight_of(&self, io: IoId) -> Option<u32> {
        let key = io.0 as u32;
        let flight = self.flights.get(key)?;
        (u64::from(flight.generation) == io.0 >> 32).then_some(key)
    }

    pub(super) fn io_done(
        &mut self,
        io: IoId,
        result: Result<ByteCount, Errno>,
        actions: &mut Actions,
    ) {
        if io.0 & WRITE_FLIGHT != 0 {
            return self.write_done(io, result, actions);
        }
        let key = self.flight_of(io);
        let Some(flight) = key.and_then(|key| self.flights.remove(key)) else {
            return;
        };
        self.device_done(&flight);
        let size = self.files.get(&flight.file).map_or(0, File::device_size);
        let moved = result.map_or(0, |count| count.0.min(flight.range.length.0));
        let arrived_end = flight.range.start.0 + moved;
        let slot_bytes = self.slot_bytes();
        let mut at = flight.range.start.0;
        for &slot in &flight.slots {
            let base = at / slot_bytes * slot_bytes;
            let stop = flight.range.end().min(base + slot_bytes);
            let first = ((at - base) / PAGE_BYTES) as u32;
            let pages = PageSet::run(first, ((stop - base) / PAGE_BYTES) as u32);
            // A page that was cut short is whole only where the file ends.
            let upto = arrived_end.clamp(base, stop) - base;
            let whole = if base + upto >= size {
                upto.div_ceil(PAGE_BYTES)
            } else {
                upto / PAGE_BYTES
            };
            let stale = self
                .files
                .get(&flight.file)
                .is_some_and(|file| file.size_stale && !file.writing.dirty.is_empty());
            // Where the device's bytes end and ours begin is not known just now.
            let whole = if stale { 0 } else { whole };
            let arrived = PageSet::run(first, whole as u32);
            self.overlay(flight.file, slot, base, arrived, actions);
            self.cache.fill_ends(slot, pages, arrived);
            at = stop;
        }
        self.empty_blocks(&flight);
        if flight.may_change
            && let Some(file) = self.files.get_mut(&flight.file)
        {
            let numbers =
                flight.range.start.0 / slot_bytes..flight.range.end().div_ceil(slot_bytes);
            file.changeable
                .extend(numbers.filter(|number| file.blocks.contains_key(number)));
        }
        match result {
            // The request need not have seen bytes that were written while it read.
            Ok(_) if arrived_end < flight.range.end().min(size).min(flight.known_size) => {
                // The file is shorter than we thought: ask for its size before a client gets an
                // answer.
                let expected = self
                    .files
                    .get_mut(&flight.file)
                    .is_some_and(|file| core::mem::replace(&mut file.size_stale, true));
                if !expected {
                    self.short_read(&flight, arrived_end, actions);
                }
            }
            Ok(_) => {}
            Err(errno) => self.fail_waiting(flight.file, flight.range, errno, actions),
        }
        self.retry_waiting(flight.file, actions);
        self.release(flight.file, actions);
        self.touch(flight.device);
    }

    /// A device that keeps returning less than the file's size would be asked for ever: a read that
    /// counts more than three of those fails.
    fn short_read(&mut self, flight: &Flight, arrived_end: u64, actions: &mut Actions) {
        let missing = ByteRange::new(arrived_end, flight.range.end() - arrived_end);
        let Some(file) = self.files.get(&flight.file) else {
            return;
        };
        let hit: Vec<u32> = file
            .waiting
            .iter()
            .copied()
            .filter(|&key| {
                self.reads
                    .get(key)
                    .is_some_and(|read| read.range.overlaps(missing))
            })
            .collect();
        for key in hit {
            let Some(read) = self.reads.get_mut(key) else {
                continue;
            };
            read.short_count = read.short_count.saturating_add(1);
            if read.short_count > 3 {
                self.finish_read(key, Outcome::Failed(Errno::IO), actions);
            }
        }
    }

    /// Give back at once the slots that a failed request left without a single page.
    fn empty_blocks(&mut self, flight: &Flight) {
        let slot_bytes = self.slot_bytes();
        let first = flight.range.start.0 / slot_bytes;
        for (number, &slot) in (first..).zip(&flight.slots) {
            if self.cache.valid(slot).is_empty() && self.cache.filling(slot).is_empty() {
                let owned = self.files.get_mut(&flight.file).and_then(|file| {
                    match file.blocks.get(&number) {
                        Some(&own) if own == slot => file.blocks.remove(&number),
                        _ => None,
                    }
                });
                if owned.is_some() {
                    self.cache.orphan(slot);
                }
            }
        }
    }

    fn device_done(&mut self, flight: &Flight) {
        let served = Served {
            bytes: flight.range.length.0,
            cost: flight.cost,
            calibrated: flight.calibrated,
            deadline: flight.deadline,
            wrote: false,
        };
        self.device_served(flight.device, &served);
    }

    /// A device has ended a request, well or not.
    pub(super) fn device_served(&mut self, id: DeviceId, flight: &Served) {
        let now = self.now;
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let taken = now.since(device.queue.service_started);
        device.counts.busy += taken;
        device.queue.service_started = now;
        device.queue.flight_count = device.queue.flight_count.saturating_sub(1);
        device.queue.flight_bytes = device.queue.flight_bytes.saturating_sub(flight.bytes);
        device.queue.flight_cost = device.queue.flight_cost - flight.cost;
        let deadlines = &mut device.queue.flight_deadlines;
        if let Some(place) = deadlines.iter().position(|&at| at == flight.deadline) {
            deadlines.swap_remove(place);
        }
        // A device that positions takes the nearest of several requests first: the time of each by
        // itself says nothing, only that of all together.
        let wrote = flight.wrote;
        device.count_for_medium(now, flight, taken);
        device.learning.batch_calibrated += flight.calibrated;
        device.learning.batch_taken += taken;
        if device.queue.flight_count == 0 && core::mem::take(&mut device.queue.is_awaited) {
            device.queue.rests_until = now + seats::REST;
        }
        if device.queue.flight_count == 0 || !device.positions() {
            let taken = core::mem::take(&mut device.learning.batch_taken);
            let calibrated = core::mem::take(&mut device.learning.batch_calibrated);
            let owes = device.owes(now.before(taken)) > Duration::ZERO;
            // The time that headers took of it says nothing of the device's speed.
            let disturbed = device.queue.headers.disturbed(now);
            let is_behind_gap = device.gaps.ended(now, taken, disturbed || owes);
            if !disturbed && !is_behind_gap {
                device.learn(now, calibrated, taken, wrote);
            }
        }
    }
}

/// The expected cost of a request that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    pub bytes: u64,
    pub cost: Duration,
    pub calibrated: Duration,
    pub deadline: Instant,
    pub wrote: bool,
}

/// None: the range is empty.
fn next_of(file: FileId, start: u64, end: u64, worth: u64) -> Option<NextFetch> {
    (start < end).then(|| NextFetch {
        file,
        range: ByteRange::new(start, end - start),
        worth,
    })
}

/// Whether a device has time for requests without a deadline.
fn can_be_at_ease(load: &Load<'_>, order: &mut Order) -> bool {
    load.promised_a_second() <= EASE_PROMISED
        && spare(load, order) >= load.model.transfer(load.chunk).times(EASE_CHUNKS)
}
