// SPDX-License-Identifier: Apache-2.0
//! How the server follows a reader with a stream. Its contract is given in `contracts`.
//!
//! A stream's place is counted in `v`: bytes in the order they are read, zero where the stream, or
//! its last jump, began. A reader that keeps its rate asks for byte `v` at `anchor + v / rate`, and
//! the byte is due a preroll later. Anything else that the reader does only ever moves the anchor:
//! a pause or a jump starts a new schedule, a late answer of ours does not.

use super::clock::Due;
use super::seats::FIRST_FRAME;
use super::state::*;
use super::*;
use crate::stream::{CursorIndex, Moved, Observation, Pattern};
use alloc::vec::Vec;

/// The time between the deadline of a request to the device and that of its reader: turns of the
/// event loop, the copy, the wire.
pub(super) const SAFETY: Duration = Duration::from_ms(60);
/// Reads in a row at another place before the stream follows there.
const STRAYS: u32 = 2;

impl Server {
    /// A read arrived: which stream it belongs to and when it is due.
    pub(super) fn observe(
        &mut self,
        session: SessionId,
        handle: HandleId,
        file: FileId,
        range: ByteRange,
        arrived: Instant,
        actions: &mut Actions,
    ) -> (Option<StreamId>, Due) {
        let Some(entry) = self.handles.get_mut(&(session, handle)) else {
            return (None, Due::NEVER);
        };
        entry.cadence.read_arrived_at(self.now, range);
        let lately = entry.cadence.lately();
        let is_clip = entry.is_clip();
        self.reread_header((session, handle), file, actions);
        let Some(entry) = self.handles.get_mut(&(session, handle)) else {
            return (None, Due::NEVER);
        };
        if !self.policy.analyser {
            let id = self.stream_of(session, handle, file);
            return (id, Due::NEVER);
        }
        let goes_on = entry.recogniser.goes_on(range);
        let is_start = !goes_on && self.is_known_start(session, file, range);
        let Some(entry) = self.handles.get_mut(&(session, handle)) else {
            return (None, Due::NEVER);
        };
        let seen = (entry.recogniser).observe_start(self.now, range, is_start);
        // A frame that is stepped to may be read in several pieces.
        let stretch_bytes = entry
            .recogniser
            .cursor(seen.cursor)
            .map_or(range.length.0, |cursor| cursor.stretch_bytes());
        let Some(mut id) = self.stream_of(session, handle, file) else {
            return (None, Due::NEVER);
        };
        if self
            .streams
            .get(id.0)
            .is_some_and(|stream| stream.frames.is_some())
        {
            if !is_clip {
                return (Some(id), self.frame_read(id, file, range, arrived));
            }
            self.drop_sequence(id, actions);
            match self.stream_of(session, handle, file) {
                Some(own) => id = own,
                None => return (None, Due::NEVER),
            }
        }
        let hops = self.note_place(id, &seen, range);
        self.note_turn(id, arrived);
        self.need_header(id);
        self.begin_clock(id, &seen, range, arrived);
        self.move_promise(id, &seen, range.length.0);
        let first = self
            .streams
            .get_mut(id.0)
            .and_then(|stream| stream.first_read.take());
        let at = (range, arrived);
        self.follow(id, &seen, (stretch_bytes, hops), is_start, at, actions);
        self.leave_legacy(id);
        self.settle_rate(id);
        let stream = self.streams.get_mut(id.0);
        let is_followed = stream.is_some_and(|stream| {
            stream.first_read = (seen.moved == Moved::Began).then_some(FirstRead {
                cursor: seen.cursor,
                range,
                arrived,
            });
            stream.cursor == Some(seen.cursor)
        });
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.last_read = self.now;
        }
        if let Some(first) = first.filter(|first| first.cursor == seen.cursor && is_followed) {
            self.follow_layers(id, first.arrived, actions);
        }
        let Some(stream) = self.streams.get_mut(id.0) else {
            return (None, Due::NEVER);
        };
        if stream.cursor != Some(seen.cursor) {
            let by_contract = self.look_away_due(id, arrived);
            let at_device = match by_contract {
                Instant::NEVER => self.presumed_due(id, arrived),
                due => due.min(arrived + FIRST_FRAME),
            };
            let by_clock = self.begun_due(id, &seen, range, arrived);
            let due = Due {
                at_device,
                by_contract,
                by_clock,
            };
            return (Some(id), due);
        }
        let due = self.advance(id, range, arrived);
        self.tell_copy(id, range.length, lately);
        (Some(id), due)
    }

    /// The handle's line in the ledger, new with its first read.
    fn stream_of(
        &mut self,
        session: SessionId,
        handle: HandleId,
        file: FileId,
    ) -> Option<StreamId> {
        let entry = self.handles.get_mut(&(session, handle))?;
        if let Some(id) = entry.stream {
            return Some(id);
        }
        let path = (entry.path.clone(), entry.part);
        let device = self.files.get(&file)?.device;
        let station = entry.station.clone();
        let mut stream = Stream::new(session, handle, file, device, path, self.now);
        stream.station = station;
        let id = self.add_stream(stream);
        self.handles.get_mut(&(session, handle))?.stream = Some(id);
        Some(id)
    }

    /// A new line in the ledger.
    pub(super) fn add_stream(&mut self, mut stream: Stream) -> StreamId {
        self.stream_count = self.stream_count.wrapping_add(1);
        stream.number = self.stream_count;
        StreamId(self.streams.insert(stream))
    }

    /// Let the stream follow the cursor that the reader moved.
    fn follow(
        &mut self,
        id: StreamId,
        seen: &Observation,
        (stretch_bytes, hops): (u64, bool),
        is_start: bool,
        (range, arrived): (ByteRange, Instant),
        actions: &mut Actions,
    ) {
        let (cursor, pattern, moved) = (seen.cursor, seen.pattern, seen.moved);
        let chunk = self.limits.chunk_bytes_max;
        let flow = match pattern {
            Pattern::Sequential => Some(Flow::Forward),
            Pattern::Reverse => Some(Flow::Reverse),
            Pattern::Strided { stride } => Some(Flow::Strided {
                stride,
                stretch_bytes: stretch_bytes.max(range.length.0).min(chunk),
            }),
            Pattern::Unknown | Pattern::Random => None,
        };
        self.look_at_presumption(id, seen, flow.is_some());
        let stream = self.streams.get(id.0);
        let is_known = is_start
            && moved == Moved::Began
            && stream.is_some_and(|stream| !self.glances_about(stream));
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        stream.read_bytes = stream.read_bytes.max(range.length.0.min(8 << 20));
        stream.scattered = pattern == Pattern::Random && stream.frames.is_none();
        match stream.cursor {
            Some(own) if own == cursor => {
                stream.stray_count = 0;
                match flow {
                    // The stream that has followed a reader to a place since its first read there
                    // does not begin again when that shows to be a jump.
                    Some(flow) if hops || moved == Moved::Began || !stream.flow.same_kind(flow) => {
                        self.restart(id, cursor, flow, (range, arrived), actions);
                    }
                    None if pattern == Pattern::Random => self.leave_cursor(id, actions),
                    None if hops => {
                        stream.is_presumed = true;
                        self.restart(id, cursor, Flow::Forward, (range, arrived), actions);
                    }
                    _ => {}
                }
            }
            None => {
                // A reader under contract plays where it reads.
                let plays = stream.standing == Standing::Contract || is_known;
                let plays = plays && pattern != Pattern::Random;
                let presumed = plays.then_some(Flow::Forward);
                if let Some(flow) = flow.or(presumed) {
                    stream.is_presumed = pattern == Pattern::Unknown;
                    if is_known && stream.standing != Standing::Contract {
                        self.presume_start(id);
                    }
                    self.restart(id, cursor, flow, (range, arrived), actions);
                }
            }
            Some(own) => {
                stream.stray_count += 1;
                let cuts = stream.standing == Standing::Contract && moved == Moved::Began;
                let jumps = moved == Moved::Jumped { from: own };
                let followed = cuts || jumps || is_known || stream.stray_count >= STRAYS;
                let presumed = is_known.then_some(Flow::Forward);
                if let Some(flow) = flow.or(presumed)
                    && followed
                {
                    stream.is_presumed |= is_known;
                    if is_known && stream.standing != Standing::Contract {
                        self.presume_start(id);
                    }
                    self.restart(id, cursor, flow, (range, arrived), actions);
                }
            }
        }
    }

    /// The stream begins at a read, for the first time or again.
    pub(super) fn restart(
        &mut self,
        id: StreamId,
        cursor: CursorIndex,
        flow: Flow,
        (range, arrived): (ByteRange, Instant),
        actions: &mut Actions,
    ) {
        self.end_run(id);
        let goes_on = self.is_in_run(id, cursor);
        let before = match goes_on {
            true => None,
            false => self.leave_run(id),
        };
        let given = (self.streams.get_mut(id.0)).and_then(|stream| stream.legacy.take());
        let left_ahead = self.streams.get(id.0).map_or(0, Stream::ahead_bytes);
        let legacy = given.or_else(|| self.take_way(id));
        self.release_held(id, u64::MAX);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        stream.cursor = Some(cursor);
        stream.stray_count = 0;
        stream.flow = flow;
        stream.origin = match flow {
            Flow::Reverse => range.end(),
            _ => range.start.0,
        };
        stream.consumed = 0;
        stream.fetched = 0;
        stream.anchor = arrived;
        stream.take_clock(cursor, range, arrived);
        let (file, device) = (stream.file, stream.device);
        let was_contract = stream.standing == Standing::Contract;
        stream.was_cut_to = was_contract;
        if let Some(session) = self.sessions.get_mut(&stream.session) {
            session.look_count = 0;
        }
        self.inherit(id, legacy, left_ahead);
        match goes_on {
            true => self.lay_way(id),
            false => self.begin_run(id, before),
        }
        self.enlist_background(id);
        self.touch(device);
        if was_contract {
            // A jump is a move: the contract goes with the reader. The server looks again at reads
            // that wait at the place that was left.
            self.unsettle(id);
            self.retry_waiting(file, actions);
        }
    }

    /// The reader jumps about: nothing to follow.
    fn leave_cursor(&mut self, id: StreamId, actions: &mut Actions) {
        self.release_held(id, u64::MAX);
        self.resign(id);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        stream.cursor = None;
        if stream.standing == Standing::Refused {
            // The reader asks anew when it plays again.
            stream.standing = Standing::BestEffort;
        }
        let (file, device) = (stream.file, stream.device);
        if let Some(device) = self.devices.get_mut(&device) {
            device.visits.background.retain(|&other| other != id);
            device.refused.retain(|&other| other != id);
        }
        self.retry_waiting(file, actions);
    }

    /// Count a read of the followed cursor; when it is due.
    pub(super) fn advance(&mut self, id: StreamId, range: ByteRange, arrived: Instant) -> Due {
        let preroll = self.policy.preroll;
        let Some(stream) = self.streams.get_mut(id.0) else {
            return Due::NEVER;
        };
        let (start, end) = match stream.flow {
            Flow::Forward | Flow::Frames => (
                range.start.0.saturating_sub(stream.origin),
                range.end().saturating_sub(stream.origin),
            ),
            Flow::Reverse => (
                stream.origin.saturating_sub(range.end()),
                stream.origin.saturating_sub(range.start.0),
            ),
            Flow::Strided {
                stride,
                stretch_bytes,
            } => {
                let way = range.start.0.abs_diff(stream.origin);
                let steps = way / stride.unsigned_abs().max(1);
                (steps * stretch_bytes, (steps + 1) * stretch_bytes)
            }
        };
        stream.consumed = stream.consumed.max(end);
        let cut = stream.way.first().map_or(u64::MAX, |leg| leg.v);
        if stream.consumed > cut {
            self.leave_way(id);
        }
        self.settle_cut(id);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return Due::NEVER;
        };
        let by_clock = stream.due_by_clock((start, range.length.0), arrived, preroll);
        let due = Due::of_stream(stream.due(start, arrived, preroll), by_clock);
        stream.clock_due = by_clock;
        let (device, passed) = (
            stream.device,
            stream.consumed.saturating_sub(stream.read_bytes),
        );
        self.keep_clock_of(id, &due);
        self.release_held(id, passed);
        self.touch(device);
        due
    }

    /// Let go of slots that end at or before `passed`.
    pub(super) fn release_held(&mut self, id: StreamId, passed: u64) {
        while let Some(stream) = self.streams.get_mut(id.0) {
            match stream.held.front() {
                Some(held) if held.end <= passed => {
                    let slot = held.slot;
                    stream.held.pop_front();
                    self.cache.unhold(slot);
                }
                _ => break,
            }
        }
    }

    /// No buffer can be taken: streams that hold more than their share of buffers give back, the
    /// stream with the largest excess first, the buffers that their readers need last. A share may
    /// have become smaller, or a reader goes back and forth in bytes that it has passed. True: one
    /// can be taken now.
    pub(super) fn give_back(&mut self, but: Option<StreamId>) -> bool {
        while self.cache.takeable_count() == 0 {
            let richest = self
                .streams
                .iter()
                .filter(|(key, stream)| !stream.held.is_empty() && but != Some(StreamId(*key)))
                .filter_map(|(key, stream)| {
                    let rate = stream.rate.map_or(0, |(rate, _)| rate.0);
                    let held = stream.held.len() as u64 * self.slot_bytes();
                    let excess = held.checked_sub(self.cap_for(rate, self.promised) + 1)?;
                    Some((excess, key))
                })
                .max();
            let Some(stream) = richest.and_then(|(_, key)| self.streams.get_mut(key)) else {
                return false;
            };
            let Some(last) = stream.held.back().copied() else {
                return false;
            };
            if last.end <= stream.consumed {
                // Nothing but bytes that the reader has asked for already.
                if let Some(passed) = stream.held.pop_front() {
                    self.cache.unhold(passed.slot);
                }
                continue;
            }
            while let Some(held) = stream.held.back().copied()
                && held.end == last.end
            {
                stream.held.pop_back();
                self.cache.unhold(held.slot);
            }
            let start = match stream.flow {
                Flow::Forward | Flow::Frames => stream.held.back().map_or(0, |held| held.end),
                Flow::Reverse | Flow::Strided { .. } => last.end - 1,
            };
            stream.fetch_again(start.max(stream.consumed));
        }
        true
    }

    /// Find the stream's rate, and ask for its contract once.
    pub(super) fn settle_rate(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if stream.cursor.is_none() {
            return;
        }
        // It asks when it plays.
        if self.glances_about(stream) && stream.standing != Standing::Contract {
            return;
        }
        if stream.rate.is_some() {
            // A reader that jumped about, and lost its contract by it, plays again.
            if stream.standing == Standing::BestEffort && !stream.is_copy {
                self.ask_admission(id);
            }
            return;
        }
        let Some(entry) = stream
            .handle
            .and_then(|handle| self.handles.get(&(stream.session, handle)))
        else {
            return;
        };
        let known = match entry.hint {
            Some(RateHint::Rate(_, RateSource::Header)) if !self.policy.contracts_from_header => {
                None
            }
            Some(RateHint::Rate(rate, source)) => Some((rate, source)),
            Some(RateHint::FramesPerKilosecond(..)) | None => None,
        };
        let known = known.or_else(|| {
            // A twentieth on top: a contract must not run behind the reader whose cadence gave its
            // rate.
            let observed = entry
                .cadence
                .rate()
                .filter(|_| self.policy.contracts_from_cadence)?;
            Some((
                BytesPerSecond(observed.0 + observed.0 / 20),
                RateSource::Cadence,
            ))
        });
        if let Some((rate, _)) = known
            && rate.0 == 0
        {
            return;
        }
        if known.is_some() {
            if let Some(stream) = self.streams.get_mut(id.0) {
                stream.rate = known;
                stream.reanchor(self.now);
            }
            self.ask_admission(id);
        }
    }

    /// A header says another rate than the stream has, or none any more: the stream asks for that
    /// rate at its next read.
    pub(super) fn rate_told(&mut self, id: StreamId, hint: Option<RateHint>) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let told = match hint {
            Some(RateHint::Rate(rate, source)) if rate.0 > 0 => Some((rate, source)),
            _ => None,
        };
        let from_header = matches!(stream.rate, Some((_, RateSource::Header)));
        let is_asked_for = told.is_some() && self.policy.contracts_from_header;
        if stream.frames.is_some()
            || stream.rate.is_none()
            || told == stream.rate
            || !(is_asked_for || from_header)
        {
            return;
        }
        self.ask_no_more(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.rate = None;
            stream.ahead_ns = 0;
        }
    }

    /// The stream gives up its contract, and asks for none. Others may have its room.
    pub(super) fn ask_no_more(&mut self, id: StreamId) {
        self.resign(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.standing = Standing::BestEffort;
        }
        for at in 0.. {
            let Some(device_id) = self.device_of(id, at) else {
                break;
            };
            if let Some(device) = self.devices.get_mut(&device_id) {
                device.refused.retain(|&other| other != id);
                device.refused_asked = Instant::ZERO;
            }
            self.retry_refused(device_id);
            self.touch(device_id);
        }
    }

    /// A best-effort stream that is followed fetches ahead in the background.
    pub(super) fn enlist_background(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if stream.standing == Standing::Contract {
            return;
        }
        for at in 0.. {
            let Some(device) = self.device_of(id, at) else {
                break;
            };
            if let Some(device) = self.devices.get_mut(&device)
                && !device.visits.background.contains(&id)
            {
                device.visits.background.push_back(id);
            }
        }
    }

    /// Remove a stream; its line stays among the closed ones.
    pub(super) fn end_stream(&mut self, id: StreamId, actions: &mut Actions) {
        let record = self.record_of(id, false);
        self.remove_stream(id, record, actions);
    }

    fn remove_stream(&mut self, id: StreamId, record: Option<StreamRecord>, actions: &mut Actions) {
        self.release_held(id, u64::MAX);
        self.resign(id);
        let Some(stream) = self.streams.remove(id.0) else {
            return;
        };
        // Another stream will get its number: no read keeps it.
        if stream.waiting_count > 0 {
            for (_, read) in self.reads.iter_mut() {
                if read.stream == Some(id) {
                    read.stream = None;
                    read.line = Some(stream.number);
                }
            }
        }
        if stream.frames.is_some() {
            // Handles of a pool's sequence may be in any of its sessions.
            for handle in self.handles.values_mut() {
                if handle.stream == Some(id) {
                    handle.stream = None;
                }
            }
        }
        let has_line = |record: &StreamRecord| {
            // A read that was due may never have been answered.
            let has_reads = record.reads.read_count > 0 || record.reads.due_count > 0;
            has_reads || stream.waiting_count > 0
        };
        if let Some(record) = record.filter(has_line) {
            if self.closed.len() >= CLOSED_COUNT_MAX {
                self.closed.pop_front();
            }
            self.closed.push_back(record);
        }
        for at in 0.. {
            let Some(device_id) = stream.device_at(at) else {
                break;
            };
            if let Some(device) = self.devices.get_mut(&device_id) {
                device.forget(id);
                device.refused.retain(|&other| other != id);
                // Room may have come for a stream that was refused.
                device.refused_asked = Instant::ZERO;
            }
            self.retry_refused(device_id);
            self.touch(device_id);
        }
        if let Some(frames) = stream.frames {
            self.sequences.remove(&id.0);
            self.leave_folder(id, &frames);
            let files: Vec<FileId> = frames.files().collect();
            for file in files {
                self.release(file, actions);
            }
        }
    }

    /// The handle of a stream was closed.
    pub(super) fn handle_left(
        &mut self,
        id: StreamId,
        (session, handle): (SessionId, HandleId),
        record: Option<StreamRecord>,
        actions: &mut Actions,
    ) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        if stream.frames.is_some() {
            // The sequence goes on with the next frame.
            if stream.session == session && stream.handle == Some(handle) {
                stream.handle = None;
            }
        } else {
            self.leave_run_of_closed(id);
            self.keep_promise(id);
            // The bytes of a way have gone with the kept contract.
            if let Some(stream) = self.streams.get_mut(id.0) {
                let ahead = stream.ahead_bytes();
                stream.fetched = stream.fetched.min(stream.consumed);
                stream.way.clear();
                self.count_unread(id, ahead);
            }
            self.remove_stream(id, record, actions);
        }
    }

    /// The claim of a stream under contract on a device now.
    pub(super) fn claim(
        &self,
        stream: &Stream,
        device: DeviceId,
        promised: Promised,
    ) -> Option<Claim> {
        let (rate, _) = stream.rate.filter(|_| !stream.is_kept)?;
        let file = self.files.get(&stream.file)?;
        let cap = self
            .window(stream, device, self.cap_for(rate.0, promised))
            .saturating_mul(self.packing(stream))
            / 1000;
        let NextPlace { physical, left } = self.next_place(stream, device, file);
        // Buffers go to the bytes that the reader comes to next, on any device.
        let room = match &stream.frames {
            Some(frames) => frames
                .lacking_before(device, stream.consumed.saturating_add(cap))
                .min(cap),
            None => match self.glance_ahead(stream) {
                Some(ahead) => {
                    (stream.consumed.saturating_add(ahead.min(cap))).saturating_sub(stream.fetched)
                }
                None => cap.saturating_sub(stream.fetched.saturating_sub(stream.consumed)),
            },
        };
        Some(Claim {
            writes: false,
            deadline: stream.deadline(stream.fetched_on(device), self.now, self.policy.preroll),
            rate: BytesPerSecond(stream.portion_of(device, rate.0).max(1)),
            physical,
            room: room.min(left),
            cap: stream.portion_of(device, cap).max(1),
            left,
            is_awaited: stream.waiting_count > 0 && stream.fetched < stream.consumed,
        })
    }

    /// The next byte to be fetched for a stream from a device.
    pub(super) fn next_place(&self, stream: &Stream, device: DeviceId, file: &File) -> NextPlace {
        let (offset, left) = match stream.flow {
            Flow::Forward => {
                let Some((spot, file, left)) = self.next_spot(stream) else {
                    return NextPlace::default();
                };
                let physical = file.place(spot.offset).physical;
                return NextPlace { physical, left };
            }
            Flow::Reverse => {
                let offset = stream.origin.saturating_sub(stream.fetched);
                (offset.saturating_sub(1), offset)
            }
            Flow::Strided {
                stride,
                stretch_bytes,
            } => {
                let steps = stream.fetched / stretch_bytes.max(1);
                let Some(offset) = strided_offset(stream.origin, stride, steps) else {
                    return NextPlace::default();
                };
                let way = if stride < 0 {
                    offset
                } else {
                    file.size.saturating_sub(offset)
                };
                let left = way
                    .div_ceil(stride.unsigned_abs().max(1))
                    .saturating_mul(stretch_bytes);
                (offset, left)
            }
            Flow::Frames => return self.frame_place(stream, device),
        };
        NextPlace {
            physical: file.place(offset).physical,
            left,
        }
    }
}

/// Streams that ended and are still in the ledger.
const CLOSED_COUNT_MAX: usize = 256;
