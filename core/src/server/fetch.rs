// SPDX-License-Identifier: Apache-2.0
//! The requests to the devices: the next one of each, whenever it can take one.

use super::state::*;
use super::writeback::NextWrite;
use super::*;
use crate::cache::{Block, PageSet};
use crate::sched::{BestEffortClaim, Choice, Load, Order, choose, spare};
use alloc::vec::Vec;

/// Best-effort read-ahead of one stream, least and most. Units: bytes.
const AHEAD_BYTES: core::ops::RangeInclusive<u64> = 2 << 20..=32 << 20;
/// The bytes that a best-effort stream gets in one visit before the next one's turn, least and
/// most. Units: bytes.
const BACKGROUND_VISIT: core::ops::RangeInclusive<u64> = 4 << 20..=16 << 20;
/// The time in which each best-effort stream of a device is visited once, if visits of the least
/// length allow it.
const BACKGROUND_ROUND: Duration = Duration::from_s(2);
/// The next stream breaks into another's visit when it has waited this long: where most of a device
/// is promised, a visit takes seconds.
const VISIT_PATIENCE: Duration = Duration::from_s(2);
/// A demand that has waited this long goes before nearer ones.
const DEMAND_PATIENCE: Duration = Duration::from_ms(200);
/// Demands looked at for the nearest.
pub(super) const DEMANDS_WEIGHED: usize = 64;

/// A turn of writers or of readers, when nothing is promised to either and both want the device.
const BEST_EFFORT_TURN: Duration = Duration::from_ms(200);

/// A device is at ease where a reader cuts or a client without a contract waits, if all deadlines
/// can wait for so many chunks and at most so much of each second is promised. First frames then go
/// before bytes that are fetched ahead, and a request is one part in so many of a chunk, so that a
/// reader that cuts does not wait. Each way back to the interrupted stream, and each request that
/// gets in between two others, costs positioning, which is too dear where more is promised.
const EASE_CHUNKS: u64 = 4;
const EASE_PROMISED: Duration = Duration::from_ms(500);
const EASE_PART: u64 = 4;

/// The next request outside the read-ahead of contracts. A demand may be under contract: a hole
/// that its contract will not fetch.
#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Index into the device's demands.
    Demand(usize),
    Background(StreamId),
    Write(NextWrite),
}

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
enum Run {
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
            return device.queue.flight_count < 64
                && device.queue.flight_bytes < 2 * chunk
                && device.may_be_overtaken(self.now, chunk);
        }
        let is_kept_free = device.queue.is_awaited && device.writers.is_empty();
        device.queue.flight_count == 0
            || (!is_kept_free && device.queue.batch_bytes < self.piece_bytes(device))
    }

    /// The longest request now.
    fn piece_bytes(&self, device: &Device) -> u64 {
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
                && has_time(&due, &mut order);
            if is_at_ease {
                first = self.first_frame(device, &claims, &claimants);
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

    /// Fetch a stream's next piece. True: something changed, ask again.
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
            false => self.piece_bytes(device),
        };
        let Some((file, range, pieces_end)) =
            self.next_piece(stream, device_id, bytes.min(room.max(1)))
        else {
            return false;
        };
        let run = self.fetch_run(file, range, IoClass::RealTime, deadline, Some(id), actions);
        if let Some(device) = self.devices.get_mut(&device_id)
            && device.visits.visitor != Some(Visitor::Reader(id))
        {
            device.visits.visitor = Some(Visitor::Reader(id));
            device.visits.given = 0;
        }
        let Some(stream) = self.streams.get_mut(id.0) else {
            return false;
        };
        match run {
            Run::Covered(end) | Run::Sent(end) => {
                let done = match stream.flow {
                    _ if end >= range.end() => pieces_end,
                    Flow::Forward | Flow::Frames => end.saturating_sub(range.start.0),
                    // A piece read downward or a step counts when it is covered whole.
                    Flow::Reverse | Flow::Strided { .. } => 0,
                };
                stream.count_fetched(device_id, done);
                let bridged = stream.read_over(range, done);
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

    /// The next piece of a stream on a device: file, range of it, and by how much `v` it advances
    /// the stream.
    fn next_piece(
        &self,
        stream: &Stream,
        device: DeviceId,
        bytes: u64,
    ) -> Option<(FileId, ByteRange, u64)> {
        let file = self.files.get(&stream.file)?;
        let slot_bytes = self.slot_bytes();
        match stream.flow {
            Flow::Forward => {
                let start = stream.origin.saturating_add(stream.fetched);
                // Requests end where slots do, so that the next one starts a slot; never longer
                // than asked.
                let asked = start.saturating_add(bytes);
                let wanted = stream.origin.saturating_add(stream.consumed);
                let end = match asked / slot_bytes * slot_bytes {
                    whole if whole > start && asked > wanted => whole,
                    _ => asked,
                };
                let end = end
                    .min(file.size)
                    .min(start.saturating_add(file.place(start).1));
                (start < end)
                    .then(|| (stream.file, ByteRange::new(start, end - start), end - start))
            }
            Flow::Reverse => {
                let end = stream.origin.saturating_sub(stream.fetched).min(file.size);
                let start = end.saturating_sub(bytes).div_ceil(slot_bytes) * slot_bytes;
                let start = if start >= end {
                    (end.saturating_sub(1) / slot_bytes * slot_bytes).max(end.saturating_sub(bytes))
                } else {
                    start
                };
                (start < end)
                    .then(|| (stream.file, ByteRange::new(start, end - start), end - start))
            }
            Flow::Strided { stride, piece } => {
                let steps = stream.fetched / piece.max(1);
                let start = strided_offset(stream.origin, stride, steps)?;
                let there = file.place(start).1.min(file.size.saturating_sub(start));
                let at_once = self.strides_at_once(file, stride, piece, bytes.min(there));
                let way = stride.unsigned_abs().saturating_mul(at_once - 1);
                let end = start.saturating_add(way + piece).min(file.size);
                let worth = piece * at_once;
                (start < end).then(|| (stream.file, ByteRange::new(start, end - start), worth))
            }
            Flow::Frames => self.frame_piece(stream, device, bytes),
        }
    }

    fn starve(&mut self, id: DeviceId) {
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
            if let Some(read) = self.reads.get_mut(key) {
                read.starved = true;
            }
        }
    }

    // ---- Demands, and best effort ----

    /// A waiting read lacks these bytes. Unless its contract is about to fetch them, ask the
    /// device.
    pub(super) fn demand(&mut self, key: u32, id: FileId, missing: ByteRange) {
        let Some(read) = self.reads.get(key) else {
            return;
        };
        let Some(file) = self.files.get(&id) else {
            return;
        };
        let device_id = file.device;
        if let Some(stream) = read.stream.and_then(|stream| self.streams.get(stream.0))
            && stream.standing == Standing::Contract
            && self.will_fetch(stream, id, missing)
        {
            return self.touch(device_id);
        }
        let (due, since) = (read.due, read.arrived);
        let stream = read.stream;
        let Some(device) = self.devices.get_mut(&device_id) else {
            return;
        };
        let stream = stream.filter(|stream| device.visits.background.contains(stream));
        // Round the range out as far as that costs next to nothing against positioning.
        let model = &device.model.base.read;
        let worth = model.rate.bytes_in(Duration(model.fixed.0 / 16)).0;
        let grain = PAGE_BYTES
            .max(1 << worth.max(1).ilog2())
            .min(u64::from(self.limits.slot_bytes));
        let start = missing.start.0 / grain * grain;
        let end = (missing.end().div_ceil(grain) * grain)
            .min(file.size.div_ceil(PAGE_BYTES) * PAGE_BYTES);
        let range = ByteRange::new(start, end.saturating_sub(start));
        let known = device
            .queue
            .demands
            .iter_mut()
            .find(|demand| demand.file == id && demand.range.start == range.start);
        match known {
            Some(demand) => {
                demand.range.length = demand.range.length.max(range.length);
                demand.due = demand.due.min(due);
            }
            None => device.queue.demands.push_back(Demand {
                file: id,
                range,
                due,
                since,
                stream,
            }),
        }
        self.touch(device_id);
    }

    /// True when the stream's own fetching is about to come to the first of these bytes: they lie
    /// between the end of its fetched bytes and the end of those that its reader has asked for, so
    /// its buffers have room for them, and it has something left to fetch. A read that relies on it
    /// is looked at again when the stream turns away (`unsettle`).
    fn will_fetch(&self, stream: &Stream, id: FileId, missing: ByteRange) -> bool {
        let Some(file) = self.files.get(&stream.file) else {
            return false;
        };
        let device = self
            .files
            .get(&id)
            .map_or(stream.device, |file| file.device);
        if self.next_place(stream, device, file).1 == 0 {
            return false;
        }
        let fetched = stream.fetched_on(device);
        // All that its reader has asked for was fetched, and is gone again: dropped after a change
        // of the file, or evicted. The stream does not come back to it.
        if fetched >= stream.consumed {
            return false;
        }
        // The missing bytes start a page; fetched ones may end within it, and go on there.
        let at = missing.start.0;
        let is_ahead = |origin: u64| {
            at + PAGE_BYTES > origin.saturating_add(fetched)
                && at < origin.saturating_add(stream.consumed)
        };
        match stream.flow {
            Flow::Forward => stream.file == id && is_ahead(stream.origin),
            Flow::Reverse => {
                stream.file == id
                    && at < stream.origin.saturating_sub(fetched)
                    && at + PAGE_BYTES > stream.origin.saturating_sub(stream.consumed)
            }
            Flow::Strided { .. } => false,
            Flow::Frames => {
                let at = |start: u64| at.saturating_add(start);
                self.frame_to_fetch(stream, id).is_some_and(|start| {
                    at(start) + PAGE_BYTES > fetched && at(start) < stream.consumed
                })
            }
        }
    }

    /// The next turn of the requests without a contract.
    fn best_effort_turn(&self, id: DeviceId, device: &Device) -> Option<Turn> {
        let reads = if device.queue.starved {
            None
        } else {
            // A stream that is fetched ahead gets a visit of its own: it waits for the end of
            // another's, or both would be visited in pieces.
            let visited = self.visited(id, device);
            self.pick_demand(device, visited)
                .map(Turn::Demand)
                .or(visited.map(Turn::Background))
                .or_else(|| self.pick_background(id, device).map(Turn::Background))
        };
        let promised = matches!(reads, Some(Turn::Demand(index))
            if device.queue.demands.get(index).is_some_and(|demand| demand.due != Instant::NEVER));
        match (reads, self.next_write) {
            (Some(reads), _) if promised => Some(reads),
            (Some(reads), Some(write)) if write.is_wanted => {
                // Both want the device: each gets it for so long that positioning costs little.
                let over = device.visits.turn_given >= BEST_EFFORT_TURN;
                let writes = device.visits.writers_turn != over;
                Some(if writes { Turn::Write(write) } else { reads })
            }
            (None, Some(write)) => Some(Turn::Write(write)),
            (reads, _) => reads,
        }
    }

    fn best_effort_claim(&mut self, id: DeviceId) -> Option<BestEffortClaim> {
        let device = self.devices.get(&id)?;
        let waited = self.now.since(device.visits.best_effort_served);
        // A reader without a contract waits until the medium has the writes that the drive only
        // seems to have done.
        let owed = match device.medium.can_flush {
            true => Duration::ZERO,
            false => device.owes(self.now),
        };
        let (range_start, bytes, file) = match self.best_effort_turn(id, device)? {
            Turn::Write(write) => {
                let distance = write.physical.abs_diff(device.queue.head);
                return Some(BestEffortClaim {
                    cost: device.model.write(distance, write.range.length.0),
                    // A write that goes only because the device is idle has no patience to lose.
                    waited: if write.is_wanted {
                        waited
                    } else {
                        Duration::ZERO
                    },
                    continues: distance == 0,
                    can_rest: !write.is_wanted,
                });
            }
            Turn::Demand(index) => {
                let demand = device.queue.demands.get(index)?;
                let range = self.with_those_behind(device, demand).0;
                (range.start.0, range.length.0, demand.file)
            }
            Turn::Background(stream) => {
                let stream = self.streams.get(stream.0)?;
                let chunk = self.limits.chunk_bytes_max;
                match stream.flow {
                    Flow::Frames => {
                        let (file, range, _) = self.frame_piece(stream, id, chunk)?;
                        (range.start.0, chunk, file)
                    }
                    _ => {
                        let start = stream.origin.saturating_add(stream.fetched);
                        (start, chunk, stream.file)
                    }
                }
            }
        };
        let physical = self.files.get(&file)?.place(range_start).0;
        let distance = physical.abs_diff(device.queue.head);
        let cost = device
            .model
            .read(distance, bytes.min(self.limits.chunk_bytes_max));
        Some(BestEffortClaim {
            cost: cost + owed,
            waited,
            continues: distance == 0,
            can_rest: false,
        })
    }

    /// The demand to serve: one under contract, else one whose patience is over, else the nearest
    /// ahead. While a stream is visited, demands of the other streams with visits wait.
    fn pick_demand(&self, device: &Device, visited: Option<StreamId>) -> Option<usize> {
        let promised = device.queue.demands.iter().map(|demand| demand.due).min()?;
        if promised != Instant::NEVER {
            return device
                .queue
                .demands
                .iter()
                .position(|demand| demand.due == promised);
        }
        let may = |(_, demand): &(usize, &Demand)| match (visited, demand.stream) {
            (Some(visited), Some(stream)) => {
                stream == visited
                    || !device.visits.background.contains(&stream)
                    || self.now.since(demand.since) > VISIT_PATIENCE
            }
            _ => true,
        };
        let mut demands = device.queue.demands.iter().enumerate().filter(may);
        let (index, first) = demands.next()?;
        if self.now.since(first.since) > DEMAND_PATIENCE || device.queue.demands.len() == 1 {
            return Some(index);
        }
        let ahead = |demand: &Demand| {
            let physical = self
                .files
                .get(&demand.file)
                .map_or(0, |file| file.place(demand.range.start.0).0);
            physical.wrapping_sub(device.queue.head)
        };
        core::iter::once((index, first))
            .chain(demands)
            .take(DEMANDS_WEIGHED)
            .min_by_key(|(_, demand)| ahead(demand))
            .map(|(index, _)| index)
    }

    /// The best-effort stream whose visit goes on and that wants more.
    fn visited(&self, device_id: DeviceId, device: &Device) -> Option<StreamId> {
        let front = *device.visits.background.front()?;
        let wants =
            device.visits.background_given > 0 && self.background_wants(device_id, device, front);
        wants.then_some(front)
    }

    /// The best-effort stream whose turn it is and that wants bytes.
    fn pick_background(&self, device_id: DeviceId, device: &Device) -> Option<StreamId> {
        device
            .visits
            .background
            .iter()
            .copied()
            .find(|&id| self.background_wants(device_id, device, id))
    }

    fn background_wants(&self, device_id: DeviceId, device: &Device, id: StreamId) -> bool {
        let Some(stream) = self.streams.get(id.0) else {
            return false;
        };
        let Some(file) = self.files.get(&stream.file) else {
            return false;
        };
        let share = u64::from(self.cache.takeable_count()) * self.slot_bytes()
            / (2 * device.visits.background.len().max(1) as u64);
        let window = share
            .min((stream.consumed.saturating_mul(2)).max(*AHEAD_BYTES.start()))
            .clamp(*AHEAD_BYTES.start(), *AHEAD_BYTES.end());
        let window = match self.glance_ahead(stream) {
            Some(ahead) => window.min(ahead),
            None => window,
        };
        let level = stream.fetched_on(device_id).saturating_sub(stream.consumed);
        // In the middle of a visit up to the window's end; a new visit once half of it is used up.
        let wanted = if device.visits.background.front() == Some(&id)
            && device.visits.background_given > 0
        {
            level < window
        } else {
            level < window / 2
        };
        let rests = device.queue.is_at_ease && self.rests_until(stream).is_some();
        wanted
            && !rests
            && self.has_buffers_to_spare()
            && self.next_place(stream, device_id, file).1 > 0
    }

    /// Read-ahead without a contract never takes the last buffers.
    pub(super) fn has_buffers_to_spare(&self) -> bool {
        self.cache.takeable_count() > self.limits.slot_count / 32
    }

    fn fetch_best_effort(&mut self, id: DeviceId, actions: &mut Actions) -> bool {
        let Some(device) = self.devices.get(&id) else {
            return false;
        };
        let turn = self.best_effort_turn(id, device);
        match turn {
            Some(Turn::Write(write)) => {
                self.send_write(id, &write, false, actions);
                true
            }
            Some(Turn::Demand(index)) => self.fetch_demand(id, index, actions),
            Some(Turn::Background(stream)) => self.fetch_background(id, stream, actions),
            None => false,
        }
    }

    fn fetch_demand(&mut self, id: DeviceId, index: usize, actions: &mut Actions) -> bool {
        let now = self.now;
        let found = self.devices.get(&id).and_then(|device| {
            let demand = device.queue.demands.get(index).copied()?;
            Some((demand, self.with_those_behind(device, &demand)))
        });
        let Some((demand, (range, bridged))) = found else {
            return false;
        };
        let class = if demand.due == Instant::NEVER {
            IoClass::BestEffort
        } else {
            IoClass::RealTime
        };
        let chunk = self.limits.chunk_bytes_max;
        let run_range = ByteRange::new(range.start.0, range.length.0.min(chunk));
        let run = self.fetch_run(demand.file, run_range, class, demand.due, None, actions);
        let Some(device) = self.devices.get_mut(&id) else {
            return false;
        };
        device.visits.visitor = None;
        device.queue.is_awaited |= device.queue.is_at_ease && matches!(run, Run::Sent(_));
        match run {
            Run::Covered(end) | Run::Sent(end) => {
                device.visits.best_effort_served = now;
                if end >= range.end() {
                    device.counts.read_bridged += bridged;
                }
                let is_done = |other: &Demand| {
                    let inside = other.range.start >= range.start && other.range.end() <= end;
                    other.file == demand.file && inside && end > demand.range.end()
                };
                if end >= demand.range.end() {
                    device.queue.demands.remove(index);
                } else if let Some(rest) = device.queue.demands.get_mut(index) {
                    rest.range = ByteRange::new(end, demand.range.end() - end);
                }
                device.queue.demands.retain(|other| !is_done(other));
                if let Some(stream) = demand.stream
                    && demand.due == Instant::NEVER
                    && device.visits.background.contains(&stream)
                {
                    // The head is where the stream goes on.
                    device.visit(stream, end - range.start.0);
                }
                true
            }
            Run::Starved => {
                self.starve(id);
                false
            }
            // A read that waits for these bytes is looked at again when that request ends.
            Run::Busy => {
                device.queue.demands.remove(index);
                true
            }
        }
    }

    fn fetch_background(
        &mut self,
        id: DeviceId,
        stream_id: StreamId,
        actions: &mut Actions,
    ) -> bool {
        let now = self.now;
        let Some(stream) = self.streams.get(stream_id.0) else {
            return false;
        };
        let level = stream.fetched_on(id).saturating_sub(stream.consumed);
        let bytes = match self.glance_ahead(stream) {
            Some(ahead) => ahead.saturating_sub(level),
            None => u64::MAX,
        };
        let piece = self.next_piece(stream, id, bytes.min(self.limits.chunk_bytes_max));
        let run = piece.map_or(Run::Busy, |(file, range, _)| {
            let (class, due) = (IoClass::BestEffort, Instant::NEVER);
            self.fetch_run(file, range, class, due, None, actions)
        });
        let (Some(device), Some(stream)) =
            (self.devices.get_mut(&id), self.streams.get_mut(stream_id.0))
        else {
            return false;
        };
        device.visits.visitor = None;
        let before = device.visits.background_given;
        // Zero until the stream has got bytes: a stream that does not advance must not hold up
        // another's turn.
        device.visits.background_given = 0;
        let Some((_, range, worth)) = piece else {
            return false;
        };
        match run {
            Run::Covered(end) | Run::Sent(end) => {
                let done = match stream.flow {
                    _ if end >= range.end() => worth,
                    Flow::Forward | Flow::Frames => end.saturating_sub(range.start.0),
                    Flow::Reverse | Flow::Strided { .. } => 0,
                };
                stream.count_fetched(id, done);
                device.counts.read_bridged += stream.read_over(range, done);
                device.visits.best_effort_served = now;
                if done > 0 {
                    device.visits.background_given = before;
                    device.visit(stream_id, done);
                }
                run_is_progress(&run, done)
            }
            Run::Starved => {
                self.starve(id);
                false
            }
            Run::Busy => false,
        }
    }

    // ---- Requests ----

    /// Bring `range` of a file into the cache: skip bytes that are there or on their way, and send
    /// one request for the first run that is not, as far as it is contiguous on its device and a
    /// chunk allows.
    fn fetch_run(
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
                    .map_or(0, |file| file.place(run_start).1);
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
            Flow::Forward => stop.saturating_sub(stream.origin),
            Flow::Frames => stream.frame_end(file),
            // Until the reader has come to the last piece that begins in it.
            Flow::Strided { stride, piece } if stride > 0 => {
                let way = stop.saturating_sub(stream.origin).saturating_sub(1);
                let last = way / stride.unsigned_abs() * piece;
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
        let physical = file.place(range.start.0).0;
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
            read.retry_count = read.retry_count.saturating_add(1);
            if read.retry_count > 3 {
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

/// Whether a device has time for requests without a deadline.
fn has_time(load: &Load<'_>, order: &mut Order) -> bool {
    load.promised_a_second() <= EASE_PROMISED
        && spare(load, order) >= load.model.transfer(load.chunk).times(EASE_CHUNKS)
}

impl Device {
    /// A best-effort stream got bytes: its visit goes on until it has had its share.
    fn visit(&mut self, id: StreamId, given: u64) {
        if self.visits.background.front() != Some(&id) {
            self.visits.background.retain(|&other| other != id);
            self.visits.background.push_front(id);
            self.visits.background_given = 0;
        }
        self.visits.background_given += given;
        let rate = self.model.base.read.rate;
        let share = rate.bytes_in(BACKGROUND_ROUND).0 / self.visits.background.len() as u64;
        if self.visits.background_given
            >= share.clamp(*BACKGROUND_VISIT.start(), *BACKGROUND_VISIT.end())
        {
            self.visits.background.rotate_left(1);
            self.visits.background_given = 0;
        }
    }
}

/// Whether the pump should go on: a request was sent, or the stream moved over bytes that were
/// there.
fn run_is_progress(run: &Run, moved: u64) -> bool {
    matches!(run, Run::Sent(_)) || moved > 0
}
