// SPDX-License-Identifier: Apache-2.0
//! Streams: how the server follows a reader, and what it promises.
//!
//! A stream's place is counted in `v`: bytes in the order they are read, zero where the stream (or
//! its last jump) began. Byte `v` is asked for at `anchor + v / rate` by a reader that keeps its
//! rate, and is due a preroll later. Anything else that the reader does only ever moves the anchor:
//! a pause or a jump starts a new schedule, a late answer of ours does not.

use super::clock::Due;
use super::frames::Frames;
use super::seats::FIRST_FRAME;
use super::state::*;
use super::*;
use crate::sched::admission::{self, Player};
use crate::stream::{CursorIndex, Moved, Observation, Pattern};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Kept between a deadline that the device is given and the one the reader has: turns of the event
/// loop, the copy, the wire.
pub(super) const SAFETY: Duration = Duration::from_ms(60);
/// Parts of a file that are read so far apart are not read together.
const READ_TOGETHER: Duration = Duration::from_s(5);
/// Largest buffers of one stream: more of them save no positioning worth having.
const CAP_BYTES_MAX: u64 = 72 << 20;
/// Reads in a row at another place before the stream follows there.
const STRAYS: u32 = 2;
/// How often a device is looked at for having become too slow, and how long it must have been.
const CAPACITY_CHECK: Duration = Duration::from_ms(250);
const OVERLOAD_PATIENCE: Duration = Duration::from_s(1);
/// How often streams that were refused ask again.
const ASK_AGAIN: Duration = Duration::from_ms(500);

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
        let seen = entry.recogniser.observe(self.now, range);
        // A frame that is stepped to may be read in several pieces.
        let run_bytes = entry
            .recogniser
            .cursor(seen.cursor)
            .map_or(range.length.0, |cursor| cursor.run_bytes());
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
            self.is_no_sequence(id, actions);
            match self.stream_of(session, handle, file) {
                Some(own) => id = own,
                None => return (None, Due::NEVER),
            }
        }
        let hops = self.note_place(id, &seen, range);
        self.need_header(id);
        self.begin_clock(id, &seen, range, arrived);
        self.move_promise(id, &seen, range.length.0);
        self.follow(id, &seen, (run_bytes, hops), (range, arrived), actions);
        self.settle_rate(id);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return (None, Due::NEVER);
        };
        stream.last_read = self.now;
        if stream.cursor != Some(seen.cursor) {
            let promised = self.look_away_due(id, arrived);
            let wanted = match promised {
                Instant::NEVER => self.presumed_due(id, arrived),
                promised => promised.min(arrived + FIRST_FRAME),
            };
            let played = self.begun_due(id, &seen, range, arrived);
            return (
                Some(id),
                Due {
                    wanted,
                    promised,
                    played,
                },
            );
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
        (run_bytes, hops): (u64, bool),
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
                piece: run_bytes.max(range.length.0).min(chunk),
            }),
            Pattern::Unknown | Pattern::Random => None,
        };
        self.look_at_presumption(id, seen, flow.is_some());
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        stream.read_bytes = stream.read_bytes.max(range.length.0.min(8 << 20));
        stream.scattered = pattern == Pattern::Random && stream.frames.is_none();
        match stream.cursor {
            Some(own) if own == cursor => {
                stream.stray_count = 0;
                match flow {
                    Some(flow)
                        if hops || moved != Moved::Continued || !stream.flow.same_kind(flow) =>
                    {
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
                // A reader with a promise plays where it reads.
                let plays = stream.standing == Standing::Contract && pattern != Pattern::Random;
                let presumed = plays.then_some(Flow::Forward);
                if let Some(flow) = flow.or(presumed) {
                    stream.is_presumed = pattern == Pattern::Unknown;
                    self.restart(id, cursor, flow, (range, arrived), actions);
                }
            }
            Some(own) => {
                stream.stray_count += 1;
                let cuts = stream.standing == Standing::Contract && moved == Moved::Began;
                let jumps = moved == Moved::Jumped { from: own };
                let followed = cuts || jumps || stream.stray_count >= STRAYS;
                if let Some(flow) = flow
                    && followed
                {
                    self.restart(id, cursor, flow, (range, arrived), actions);
                }
            }
        }
    }

    /// The stream begins (again) at a read.
    fn restart(
        &mut self,
        id: StreamId,
        cursor: CursorIndex,
        flow: Flow,
        (range, arrived): (ByteRange, Instant),
        actions: &mut Actions,
    ) {
        self.end_run(id);
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
        self.enlist_background(id);
        self.touch(device);
        if was_contract {
            // A jump is a move: the promise goes with the reader. Reads that wait at the place that
            // was left are looked at again.
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
            device.background.retain(|&other| other != id);
            device.refused.retain(|&other| other != id);
        }
        self.retry_waiting(file, actions);
    }

    /// Count a read of the followed cursor; when it is due.
    fn advance(&mut self, id: StreamId, range: ByteRange, arrived: Instant) -> Due {
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
            Flow::Strided { stride, piece } => {
                let way = range.start.0.abs_diff(stream.origin);
                let steps = way / stride.unsigned_abs().max(1);
                (steps * piece, (steps + 1) * piece)
            }
        };
        stream.consumed = stream.consumed.max(end);
        let played = stream.played((start, range.length.0), arrived, preroll);
        let due = Due::of_stream(stream.due(start, arrived, preroll), played);
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

    /// Learn what the stream should be read at, and ask for its contract once.
    fn settle_rate(&mut self, id: StreamId) {
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
            // A twentieth on top: a promise must not run behind the reader it was learned from.
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

    /// A header says another rate than the stream has, or none any more: at its next read it asks
    /// for that.
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

    /// It asks for no contract, and has none. Others may have what it had.
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

    /// The buffers that a stream of `rate` may keep when `promised` is promised in all: those that
    /// it cannot do without, and by its rate a share of the rest. Units: bytes.
    pub(super) fn cap_for(&self, rate: u64, promised: Promised) -> u64 {
        let least = self.least_buffers(rate);
        let spare = self
            .buffers_to_promise()
            .saturating_sub(promised.least_bytes.max(least));
        let share =
            u128::from(spare) * u128::from(rate) / u128::from(promised.rate.max(rate).max(1));
        let share = u64::try_from(share).unwrap_or(u64::MAX);
        (least + share)
            .min(CAP_BYTES_MAX)
            .saturating_sub(self.edge_bytes())
    }

    /// Buffers that may be promised; the rest is for what is read by best effort. Units: bytes.
    fn buffers_to_promise(&self) -> u64 {
        let slots = u64::from(self.limits.slot_count);
        let reserve = (slots / 8).max(8).min(slots / 2);
        (slots - reserve) * self.slot_bytes()
    }

    /// Buffers without which a stream of `rate` cannot be served: two requests, and its edges. A
    /// slow one's requests are short. Units: bytes.
    pub(super) fn least_buffers(&self, rate: u64) -> u64 {
        let request = self
            .limits
            .chunk_bytes_max
            .min(rate / 2 + self.slot_bytes());
        2 * request + self.edge_bytes()
    }

    /// The waste in the first and the last slot of a stream. Units: bytes.
    fn edge_bytes(&self) -> u64 {
        2 * self.slot_bytes()
    }

    /// The promises with `count` more streams of `rate`.
    fn promised_with(&self, rate: u64, count: u64) -> Promised {
        let least = self.least_buffers(rate).saturating_mul(count);
        Promised {
            rate: self
                .promised
                .rate
                .saturating_add(rate.saturating_mul(count)),
            least_bytes: self.promised.least_bytes.saturating_add(least),
        }
    }

    /// Ask whether the stream can be promised its rate; enter it where it then belongs.
    ///
    /// The parts of a striped file have contracts all together or not at all: when one asks, its
    /// refused parts ask with it, and if any is refused, those with a contract lose it.
    pub(super) fn ask_admission(&mut self, id: StreamId) {
        if let Some(device) = self.streams.get(id.0).map(|stream| stream.device) {
            self.give_back_left(device);
        }
        let siblings = self.siblings(id);
        let refused = self.only(&siblings, Standing::Refused);
        for one in &refused {
            if let Some(stream) = self.streams.get_mut(one.0) {
                stream.reanchor(self.now);
            }
        }
        // Looked at first: a contract is not to be given and taken away again at each try.
        let no = refused.iter().find_map(|&one| {
            self.admission_of(one, None)
                .err()
                .map(|(_, refusal)| refusal)
        });
        if let Some(refusal) = no {
            self.give_up(id, refusal);
            return self.give_up_all(&siblings, refusal);
        }
        self.ask_alone(id);
        let mut asked = id;
        for one in refused {
            if self.refusal_of(asked).is_some() {
                break;
            }
            self.ask_alone(one);
            asked = one;
        }
        if let Some(refusal) = self.refusal_of(asked) {
            if asked != id {
                self.give_up(id, refusal);
            }
            self.give_up_all(&siblings, refusal);
        }
    }

    /// The other parts of a striped file, as its door reads them; those that can be followed.
    pub(super) fn siblings(&self, id: StreamId) -> Vec<StreamId> {
        let pool_of = |stream: &Stream| self.sessions.get(&stream.session)?.pool;
        let Some(stream) = self.streams.get(id.0).filter(|one| !one.part.is_whole()) else {
            return Vec::new();
        };
        let Some(pool) = pool_of(stream) else {
            return Vec::new();
        };
        let is_sibling = |other: &Stream| {
            other.part.count() == stream.part.count()
                && other.part != stream.part
                && other.cursor.is_some()
                && other.path == stream.path
                && pool_of(other) == Some(pool)
        };
        let all = || self.streams.iter().filter(|(_, other)| is_sibling(other));
        // Of a file that went on over other disks the reader is in one stripe at a time.
        let newest = all()
            .map(|(_, other)| other.last_read)
            .max()
            .map_or(stream.last_read, |last| last.max(stream.last_read));
        all()
            .filter(|(_, other)| newest.since(other.last_read) <= READ_TOGETHER)
            .map(|(key, _)| StreamId(key))
            .collect()
    }

    fn only(&self, all: &[StreamId], standing: Standing) -> Vec<StreamId> {
        let stands = |id: &&StreamId| {
            let stream = self.streams.get(id.0);
            stream.is_some_and(|stream| stream.standing == standing)
        };
        all.iter().filter(stands).copied().collect()
    }

    /// Why it has no contract, if it was refused one.
    fn refusal_of(&self, id: StreamId) -> Option<Refusal> {
        let stream = self.streams.get(id.0)?;
        stream
            .refusal
            .filter(|_| stream.standing == Standing::Refused)
    }

    /// Those of them that have a contract have none any more: another part of their file has none.
    fn give_up_all(&mut self, all: &[StreamId], refusal: Refusal) {
        for id in self.only(all, Standing::Contract) {
            self.give_up(id, refusal);
        }
    }

    /// No contract for a part of a file, though its own device may have room: it asks again there.
    fn give_up(&mut self, id: StreamId, refusal: Refusal) {
        let Some(device) = self.streams.get(id.0).map(|stream| stream.device) else {
            return;
        };
        if let Some(device) = self.devices.get_mut(&device) {
            device.refused.retain(|&other| other != id);
            device.refused_asked = self.now;
        }
        self.refuse(id, device, refusal);
    }

    /// The one place that grants a contract. A contract is not asked for again: it would be
    /// reckoned twice. Refusals are in `refuse`, which runs at each retry as well, twice a second:
    /// an event to be counted is the change of `standing`.
    fn ask_alone(&mut self, id: StreamId) {
        let has_one = |stream: &Stream| stream.standing == Standing::Contract;
        if self.streams.get(id.0).is_none_or(has_one) {
            return;
        }
        let fetched = self.begin_at_reader(id);
        let replaced = self.kept_below(id);
        let verdict = self.admission_of(id, replaced);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        if verdict.is_err() {
            stream.fetched = fetched;
        }
        let Some((rate, _)) = stream.rate else {
            return;
        };
        if verdict.is_ok() {
            stream.standing = Standing::Contract;
            stream.refusal = None;
        }
        for at in 0.. {
            let Some(device_id) = self.device_of(id, at) else {
                break;
            };
            let Some(device) = self.devices.get_mut(&device_id) else {
                continue;
            };
            device.refused.retain(|&other| other != id);
            if verdict.is_ok() {
                device.promise(id);
                self.touch(device_id);
            }
        }
        match verdict {
            Ok(()) => {
                self.promised = self.promised_with(rate.0, 1);
                if let Some(kept) = replaced {
                    self.end_kept(kept);
                }
            }
            Err((device, refusal)) => self.refuse(id, device, refusal),
        }
    }

    /// The device cannot promise the stream its part: it has no contract (any more), and asks
    /// again.
    fn refuse(&mut self, id: StreamId, device: DeviceId, refusal: Refusal) {
        self.resign(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.standing = Standing::Refused;
            stream.refusal = Some(refusal);
        }
        if let Some(device) = self.devices.get_mut(&device) {
            device.refused.push(id);
        }
        self.block(device);
    }

    /// Frames of a sequence lie on a device from which it was not fetched before. Under contract
    /// the device is asked for its part: a sequence is promised as a whole, or not at all.
    pub(super) fn comes_to(&mut self, id: StreamId, device: DeviceId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        match stream.standing {
            Standing::Contract => {}
            Standing::BestEffort => return self.enlist_background(id),
            Standing::Refused => {
                // Its demand on one device is less now.
                self.enlist_background(id);
                return self.ask_admission(id);
            }
        }
        if let Some(device) = self.devices.get_mut(&device) {
            device.promise(id);
        }
        self.part_grows(id, device);
    }

    /// A stream under contract needs more of a device than that was asked for.
    pub(super) fn part_grows(&mut self, id: StreamId, device: DeviceId) {
        if let Err(refusal) = self.admission_on(id, device, self.promised, None) {
            self.refuse(id, device, refusal);
        }
        self.touch(device);
    }

    /// A sequence has no frames on this device any more.
    pub(super) fn goes_from(&mut self, id: StreamId, device: DeviceId) {
        let Some(entry) = self.devices.get_mut(&device) else {
            return;
        };
        entry.forget(id);
        // It asks where it is now.
        let was_refused = entry.refused.contains(&id);
        entry.refused.retain(|&other| other != id);
        self.retry_refused(device);
        let is_refused = |stream: &Stream| stream.standing == Standing::Refused;
        if was_refused && self.streams.get(id.0).is_some_and(is_refused) {
            self.ask_admission(id);
        }
    }

    /// The devices that a stream is fetched from, one after the other.
    pub(super) fn device_of(&self, id: StreamId, at: usize) -> Option<DeviceId> {
        self.streams.get(id.0)?.device_at(at)
    }

    /// Nobody holds bytes that were fetched ahead without a contract: many may be gone again, and
    /// each hole would be a promised read that goes at once, by itself. A contract begins where the
    /// reader is; bytes that are still there are passed over and held. Returns up to where it had
    /// been fetched.
    fn begin_at_reader(&mut self, id: StreamId) -> u64 {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return 0;
        };
        let fetched = stream.fetched;
        if stream.standing != Standing::Contract && stream.frames.is_none() {
            // Pieces are counted whole, and so are bytes that the reader has asked for: those are
            // on their way to it.
            stream.fetched = stream.consumed.min(fetched);
        }
        fetched
    }

    /// Whether each device that it is fetched from can promise its part, in place of a promise that
    /// its seat keeps; else which cannot.
    fn admission_of(
        &self,
        id: StreamId,
        replaced: Option<StreamId>,
    ) -> Result<(), (DeviceId, Refusal)> {
        let refused = Refusal::Capacity { needed_permille: 0 };
        let Some(stream) = self.streams.get(id.0) else {
            return Err((DeviceId::default(), refused));
        };
        let Some((rate, _)) = stream.rate else {
            return Err((stream.device, refused));
        };
        let mut promised = self.promised_with(rate.0, 1);
        if let Some(kept) = replaced.and_then(|kept| self.streams.get(kept.0)) {
            let rate = kept.rate_or_none().0;
            promised = promised.less(rate, self.least_buffers(rate));
        }
        for at in 0.. {
            let Some(device) = stream.device_at(at) else {
                break;
            };
            self.admission_on(id, device, promised, replaced)
                .map_err(|refusal| (device, refusal))?;
        }
        Ok(())
    }

    fn admission_on(
        &self,
        id: StreamId,
        device: DeviceId,
        promised: Promised,
        replaced: Option<StreamId>,
    ) -> Result<(), Refusal> {
        let but: Vec<StreamId> = replaced.into_iter().chain([id]).collect();
        let mut players = self.players(device, promised, &but);
        players.extend(self.player(id, device, promised));
        players.extend(self.writing_players(device));
        self.dry_run(self.now, device, promised, &players)
    }

    pub(super) fn players(
        &self,
        device: DeviceId,
        promised: Promised,
        but: &[StreamId],
    ) -> Vec<Player> {
        let Some(entry) = self.devices.get(&device) else {
            return Vec::new();
        };
        let streams = || {
            entry
                .contracts
                .iter()
                .filter(|id| !but.contains(id))
                .filter_map(|&id| Some((id, self.streams.get(id.0)?)))
        };
        let playing = streams()
            .filter_map(|(id, _)| self.player(id, device, promised))
            .filter(|player| player.claim.left > 0);
        let kept = streams()
            .map(|(_, stream)| stream)
            .filter(|one| one.is_kept);
        let kept = (0..)
            .zip(kept)
            .map(|(nth, stream)| self.kept_player(stream, promised, nth));
        playing.chain(kept).collect()
    }

    /// A stream as the dry run of a device sees it.
    fn player(&self, id: StreamId, device: DeviceId, promised: Promised) -> Option<Player> {
        let stream = self.streams.get(id.0)?;
        let mut claim = self.claim(stream, device, promised)?;
        if stream
            .frames
            .as_ref()
            .is_some_and(Frames::goes_on_elsewhere)
        {
            // Nobody knows yet how much of it lies here behind the frames that are open: it goes
            // on.
            claim.left = u64::MAX;
        }
        let fetched = stream.fetched_on(device);
        let anchor = stream.anchor + stream.pause(self.now, self.policy.preroll);
        let asked = anchor + stream.rate_or_none().time_for(ByteCount(fetched));
        Some(Player {
            lead: claim.deadline.since(asked),
            first_read: ByteCount(stream.read_bytes.saturating_sub(fetched)),
            run: self.run_bytes(stream).map(ByteCount),
            claim,
        })
    }

    fn dry_run(
        &self,
        now: Instant,
        device: DeviceId,
        promised: Promised,
        players: &[Player],
    ) -> Result<(), Refusal> {
        let Some(entry) = self.devices.get(&device) else {
            return Err(Refusal::Capacity { needed_permille: 0 });
        };
        if promised.least_bytes > self.buffers_to_promise() {
            return Err(Refusal::Buffers {
                needed: ByteCount(promised.least_bytes),
            });
        }
        let described = entry.described(now, &self.limits, &self.policy);
        admission::dry_run(&described, now, players, &mut Order::default())
    }

    /// A stream turns away from where it was fetching: reads that rely on it are looked at again.
    pub(super) fn unsettle(&mut self, id: StreamId) {
        let waits = |stream: &Stream| stream.waiting_count > 0;
        if self.streams.get(id.0).is_some_and(waits) {
            let relying = self
                .reads
                .iter()
                .filter(|(_, read)| read.stream == Some(id));
            self.unsettled.extend(relying.map(|(key, _)| key));
        }
    }

    /// Give up the contract; the stream is best effort until it asks again.
    pub(super) fn resign(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        if stream.standing != Standing::Contract {
            return;
        }
        stream.standing = Standing::BestEffort;
        self.unsettle(id);
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let rate = stream.rate.map_or(0, |(rate, _)| rate.0);
        for at in 0.. {
            let Some(device) = self.device_of(id, at) else {
                break;
            };
            if let Some(device) = self.devices.get_mut(&device) {
                device.break_promise(id);
            }
        }
        self.promised = self.promised.less(rate, self.least_buffers(rate));
        self.enlist_background(id);
    }

    /// A device that has become too slow for what was promised on it keeps most promises by
    /// breaking one: the newest goes back to best effort, and is told so.
    pub(super) fn shed(&mut self, id: DeviceId) {
        let now = self.now;
        let Some(device) = self.devices.get(&id) else {
            return;
        };
        if now.since(device.capacity_checked) < CAPACITY_CHECK {
            return;
        }
        self.give_back_left(id);
        // Kept promises cost the device nothing now.
        let kept = self.kept.clone();
        let players = self.players(id, self.promised, &kept);
        let Some(device) = self.devices.get(&id) else {
            return;
        };
        let needed = admission::needed_permille(&device.model, &players);
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        device.capacity_checked = now;
        if needed <= 1000 {
            device.overloaded_since = Instant::NEVER;
            return;
        }
        device.overloaded_since = device.overloaded_since.min(now);
        if now.since(device.overloaded_since) < OVERLOAD_PATIENCE {
            return;
        }
        // Buffered bytes may outlast the slowness. A promise is broken when another would be, not
        // before.
        let described = device.described(now, &self.limits, &self.policy);
        if admission::in_time(&described, now, &players, &mut Order::default()) {
            return;
        }
        device.overloaded_since = Instant::NEVER;
        let newest_on = |server: &Server| server.devices.get(&id)?.contracts.last().copied();
        while let Some(newest) = newest_on(self)
            && kept.contains(&newest)
        {
            self.end_kept(newest);
        }
        let Some(newest) = newest_on(self) else {
            return;
        };
        self.resign(newest);
        if let Some(stream) = self.streams.get_mut(newest.0) {
            stream.standing = Standing::Refused;
            stream.refusal = Some(Refusal::Capacity {
                needed_permille: needed,
            });
        }
        if let Some(device) = self.devices.get_mut(&id) {
            device.refused.push(newest);
            device.refused_asked = now;
        }
        if let Some(refusal) = self.refusal_of(newest) {
            let siblings = self.siblings(newest);
            self.give_up_all(&siblings, refusal);
        }
        self.block(id);
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
                && !device.background.contains(&id)
            {
                device.background.push_back(id);
            }
        }
    }

    /// Streams that were refused on a device ask again, the oldest first.
    pub(super) fn retry_refused(&mut self, device: DeviceId) {
        let Some(entry) = self.devices.get_mut(&device) else {
            return;
        };
        if entry.refused.is_empty() {
            return;
        }
        if self.now.since(entry.refused_asked) < ASK_AGAIN {
            return self.block(device);
        }
        entry.refused_asked = self.now;
        if let Some(&id) = entry.refused.first() {
            if let Some(stream) = self.streams.get_mut(id.0) {
                stream.reanchor(self.now);
            }
            self.ask_admission(id);
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
        // Its number will be another stream's: nobody keeps it.
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
        let has_line = |record: &StreamRecord| record.read_count > 0 || stream.waiting_count > 0;
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
            self.keep_promise(id);
            self.remove_stream(id, record, actions);
        }
    }

    /// Whether `count` more streams of `rate` could be promised on `device`.
    pub fn could_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
    ) -> Verdict {
        let now = self.now.max(now);
        let Some(entry) = self.devices.get(&device) else {
            return Verdict {
                admitted: false,
                reason: alloc::string::String::from("no such device is served"),
                more_count: 0,
                left: BytesPerSecond(0),
            };
        };
        let contracts = entry.contracts.len();
        let size = entry.model.base.size.0;
        let result = self.would_admit(now, device, rate, count, size);
        let (mut low, mut high) = if result.is_ok() {
            (count, count.saturating_add(1000))
        } else {
            (0, count)
        };
        // `low` fits, `high` does not (or is where we stop counting).
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if self.would_admit(now, device, rate, middle, size).is_ok() {
                low = middle;
            } else {
                high = middle;
            }
        }
        let more_count = if result.is_ok() { low - count } else { low };
        let fits = low;
        let reason = match result {
            Ok(()) => alloc::format!(
                "{contracts} streams are under contract here; {count} more fit, and {more_count} after them"
            ),
            Err(refusal) => alloc::format!(
                "{contracts} streams are under contract here; {}; {fits} would fit now",
                refusal.sentence()
            ),
        };
        Verdict {
            admitted: result.is_ok(),
            reason,
            more_count,
            left: BytesPerSecond(rate.0.saturating_mul(u64::from(low))),
        }
    }

    fn would_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
        size: u64,
    ) -> Result<(), Refusal> {
        let count = u64::from(count.max(1));
        let promised = self.promised_with(rate.0, count);
        let mut players = self.players(device, promised, &[]);
        let cap = self.cap_for(rate.0, promised);
        players.extend(self.writing_players(device));
        // Questions are about streams that start one after another, as people do, a second apart.
        for nth in 0..count {
            let start = now + Duration::from_s(nth);
            let lead = self.policy.preroll - SAFETY;
            players.push(Player {
                claim: Claim {
                    writes: false,
                    deadline: start + lead,
                    rate,
                    physical: size / count * nth,
                    room: cap,
                    cap,
                    left: u64::MAX,
                    is_awaited: false,
                },
                lead,
                // A frame.
                first_read: rate.bytes_in(Duration::from_ms(40)),
                run: None,
            });
        }
        self.dry_run(now, device, promised, &players)
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
        let (offset, left) = self.next_place(stream, device, file);
        // Buffers are kept for what the reader comes to next, wherever it lies.
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
            rate: BytesPerSecond(stream.part_of(device, rate.0).max(1)),
            physical: offset,
            room: room.min(left),
            cap: stream.part_of(device, cap).max(1),
            left,
            is_awaited: stream.waiting_count > 0 && stream.fetched < stream.consumed,
        })
    }

    /// Where the next byte to be fetched lies on the device, and how many are left to fetch from
    /// there.
    pub(super) fn next_place(&self, stream: &Stream, device: DeviceId, file: &File) -> (u64, u64) {
        match stream.flow {
            Flow::Forward => {
                let offset = stream.origin.saturating_add(stream.fetched);
                (file.place(offset).0, file.size.saturating_sub(offset))
            }
            Flow::Reverse => {
                let offset = stream.origin.saturating_sub(stream.fetched);
                (file.place(offset.saturating_sub(1)).0, offset)
            }
            Flow::Strided { stride, piece } => {
                let steps = stream.fetched / piece.max(1);
                let Some(offset) = strided_offset(stream.origin, stride, steps) else {
                    return (0, 0);
                };
                let way = if stride < 0 {
                    offset
                } else {
                    file.size.saturating_sub(offset)
                };
                let left = way
                    .div_ceil(stride.unsigned_abs().max(1))
                    .saturating_mul(piece);
                (file.place(offset).0, left)
            }
            Flow::Frames => self.frame_place(stream, device),
        }
    }
}

/// Streams that ended and are still told about.
const CLOSED_COUNT_MAX: usize = 256;

impl Refusal {
    /// The reason that decides, for people.
    pub fn sentence(&self) -> alloc::string::String {
        match self {
            Refusal::Capacity { needed_permille } => alloc::format!(
                "together they would need {}.{} % of the device's time",
                needed_permille / 10,
                needed_permille % 10
            ),
            Refusal::Start { late_by } => alloc::format!(
                "while they start, somebody would be late by {} ms",
                late_by.ms()
            ),
            Refusal::Buffers { needed } => alloc::format!(
                "the cache is too small: together they would need {} MiB of buffers at least",
                needed.0.div_ceil(1 << 20)
            ),
        }
    }
}

impl Flow {
    fn same_kind(self, other: Flow) -> bool {
        match (self, other) {
            (Flow::Strided { stride: a, .. }, Flow::Strided { stride: b, .. }) => a == b,
            (a, b) => core::mem::discriminant(&a) == core::mem::discriminant(&b),
        }
    }
}

impl Stream {
    pub(super) fn new(
        session: SessionId,
        handle: HandleId,
        file: FileId,
        device: DeviceId,
        (path, part): (alloc::string::String, FilePart),
        now: Instant,
    ) -> Stream {
        Stream {
            number: 0,
            session,
            station: None,
            handle: Some(handle),
            file,
            device,
            path,
            part,
            standing: Standing::BestEffort,
            rate: None,
            refusal: None,
            is_kept: false,
            is_copy: false,
            copied_count: 0,
            ahead_ns: 0,
            ahead_at: now,
            flow: Flow::Forward,
            frames: None,
            cursor: None,
            scattered: false,
            stray_count: 0,
            row: Default::default(),
            glances: Default::default(),
            was_cut_to: false,
            is_presumed: false,
            origin: 0,
            consumed: 0,
            fetched: 0,
            anchor: now,
            read_bytes: 0,
            held: VecDeque::new(),
            last_read: now,
            read_count: 0,
            due_count: 0,
            late_count: 0,
            promised_count: 0,
            promised_late_count: 0,
            clock: None,
            begun: None,
            late_before: false,
            looked_away: Instant::ZERO,
            waiting_count: 0,
            worst_lateness: Duration::ZERO,
            guilty: [0; Stage::COUNT],
            bytes: 0,
            hit_count: 0,
        }
    }

    /// The devices that it is fetched from, one after the other.
    pub(super) fn device_at(&self, at: usize) -> Option<DeviceId> {
        match &self.frames {
            Some(frames) => frames.devices().get(at).copied(),
            None => (at == 0).then_some(self.device),
        }
    }

    /// `v` of the next byte to be fetched from a device.
    pub(super) fn fetched_on(&self, device: DeviceId) -> u64 {
        let next = self.frames.as_ref().and_then(|frames| frames.next(device));
        next.unwrap_or(self.fetched)
    }

    /// A device's part of `whole`.
    pub(super) fn part_of(&self, device: DeviceId, whole: u64) -> u64 {
        match &self.frames {
            Some(frames) => frames.part_of(device, whole),
            None => whole,
        }
    }

    /// So many bytes more were asked of a device.
    pub(super) fn count_fetched(&mut self, device: DeviceId, bytes: u64) {
        match &mut self.frames {
            Some(frames) => {
                frames.count_fetched(device, bytes);
                self.fetched = frames.fetched();
            }
            None => self.fetched += bytes,
        }
    }

    /// Bytes from `v` on are asked of devices again.
    pub(super) fn fetch_again(&mut self, v: u64) {
        match &mut self.frames {
            Some(frames) => {
                frames.fetch_again(v);
                self.fetched = frames.fetched();
            }
            None => self.fetched = self.fetched.min(v),
        }
    }

    /// When the byte `fetched` must be there, the first not yet asked of the device. The last byte
    /// of a read is due with its first, so one read's length is taken off. A reader that asks for
    /// nothing although its next bytes would have been due has paused: they are due a preroll after
    /// it comes back, not before now.
    pub(super) fn deadline(&self, fetched: u64, now: Instant, preroll: Duration) -> Instant {
        let anchor = self.anchor + self.pause(now, preroll);
        let whole = fetched.saturating_sub(self.read_bytes);
        (anchor + self.rate_or_none().time_for(ByteCount(whole)) + preroll).before(SAFETY)
    }

    /// By how much a reader that has paused is behind its schedule.
    pub(super) fn pause(&self, now: Instant, preroll: Duration) -> Duration {
        let expected = self.anchor + self.rate_or_none().time_for(ByteCount(self.consumed));
        if self.waiting_count > 0 || self.late_before || now <= expected + preroll {
            return Duration::ZERO;
        }
        now.since(expected)
    }

    pub(super) fn rate_or_none(&self) -> BytesPerSecond {
        self.rate.map_or(BytesPerSecond(0), |(rate, _)| rate)
    }

    /// The reader's schedule starts anew from its present place.
    pub(super) fn reanchor(&mut self, now: Instant) {
        let rate = self.rate_or_none();
        let at = self.consumed.saturating_sub(self.read_bytes);
        self.anchor = now.before(rate.time_for(ByteCount(at)));
    }

    /// When a read that starts at `start` is due. A reader that comes later than its bytes were
    /// due, and not because we were late before, has paused: its schedule moves.
    pub(super) fn due(&mut self, start: u64, arrived: Instant, preroll: Duration) -> Instant {
        if self.standing != Standing::Contract {
            return Instant::NEVER;
        }
        let rate = self.rate_or_none();
        let scheduled = self.anchor + rate.time_for(ByteCount(start));
        if arrived > scheduled + preroll && !self.late_before {
            self.anchor = arrived.before(rate.time_for(ByteCount(start)));
            return arrived + preroll;
        }
        scheduled + preroll
    }
}
