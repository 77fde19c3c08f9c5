// SPDX-License-Identifier: Apache-2.0
//! Seats: one client at its work, and the contract that goes with it.
//!
//! A contract belongs to the client and not to a handle. An editor that plays a timeline cuts every
//! few seconds to another place in another file, and keeps the files open: the contract moves with
//! it. A cut is a move and not a new question, so the server does not ask admission; the place that
//! was left has no claim and holds no buffers. Several places that are read at the same time, such
//! as layers, are several times the rate, and the server asks for each of them once.
//!
//! A seat is a session here: smbd has one for each connection to a share. Sessions of a pool's door
//! are left out, since all clients of a mount are one session: there each stream is a seat of its
//! own.

use super::glances::RUN_MIN;
use super::state::*;
use super::*;
use crate::stream::{Observation, Pattern};
use alloc::vec::Vec;

/// A place that was not read for so long is one that a reader can come back to.
pub(super) const AWAY: Duration = Duration::from_s(1);
/// A contract that its reader has left, for another place, is given back after so long.
pub(super) const LEFT: Duration = Duration::from_s(3);
/// Read-ahead never falls below the bytes that are played in this time.
const WINDOW_MIN: Duration = Duration::from_ms(750);
/// A client that was presumed to play, and did not, is not presumed to play again for so long.
const PRESUMED_AGAIN: Duration = Duration::from_s(10);
/// A cut's first frame should be there within this time.
pub(super) const FIRST_FRAME: Duration = Duration::from_ms(100);
/// A reader under contract reads elsewhere at most so often at the contract's cost.
const LOOK_AWAY: Duration = Duration::from_ms(500);
/// Shorter reads of a file of unknown rate do not count as playing. Units: bytes.
pub(super) const PLAYED_MIN: u64 = 128 << 10;
/// A clip's sound has less than such a part of its picture's rate.
const SOUND: u64 = 8;
/// So many reads of a place show whether it is played.
const LOOKS: u8 = 2;

/// A client that has got the first of several files asks for the next one within it.
pub(super) const REST: Duration = Duration::from_ms(4);

impl Server {
    /// The stream that has the seat's contract, if this read, of a stream without one, shows that
    /// its reader has gone here.
    ///
    /// A place without a read since this one was last read was left. Two that are read in turn are
    /// two layers.
    fn left_place(&self, id: StreamId, is_first: bool, length: u64) -> Option<StreamId> {
        let stream = self.streams.get(id.0)?;
        let is_seat = self.sessions.get(&stream.session)?.is_seat();
        // A copy takes all that it gets, and leaves the contract with the player.
        if !is_seat || stream.is_copy || stream.frames.is_some() || !stream.part.is_whole() {
            return None;
        }
        let own = self.told_rate(stream);
        let device = self.devices.get(&stream.device)?;
        // Where there is time for all, sound of unknown rate does without its picture's contract,
        // which would be far too much for it.
        let is_any = own.is_some() || !device.keeps_up(self.now);
        let is_like = |other: &Stream| is_any || other.row.is_read_like(length);
        let kept = self.kept_for(stream, is_like);
        if kept.is_some() {
            return kept;
        }
        let (left, place) = device
            .contracts
            .iter()
            .filter_map(|&other| Some((other, self.streams.get(other.0)?)))
            .filter(|(_, other)| other.session == stream.session && other.frames.is_none())
            .filter(|(_, other)| !other.is_kept)
            .filter(|(_, other)| suits(other.rate_or_none(), own))
            .filter(|(_, other)| is_like(other))
            .min_by_key(|(_, other)| other.last_read)?;
        let was_away = is_first || self.now.since(stream.last_read) > AWAY;
        (was_away || place.last_read <= stream.last_read).then_some(left)
    }

    /// The rate at which a stream is read, or will be when it asks for a contract.
    pub(super) fn told_rate(&self, stream: &Stream) -> Option<(BytesPerSecond, RateSource)> {
        let from_header = self.policy.contracts_from_header;
        stream.rate.or(match self.hint_of(stream)? {
            RateHint::Rate(_, RateSource::Header) if !from_header => None,
            RateHint::Rate(rate, source) if rate.0 > 0 => Some((rate, source)),
            RateHint::Rate(..) | RateHint::FramesPerKilosecond(..) => None,
        })
    }

    /// The hint of a rule or header for the file that a stream reads.
    pub(super) fn hint_of(&self, stream: &Stream) -> Option<RateHint> {
        let handle = (stream.session, stream.handle?);
        self.handles.get(&handle)?.hint
    }

    /// Whether a read may begin a play: of a clip whose rate is known it may, of another file if it
    /// is large. A contract does not go to a project's database because an editor looks something
    /// up there.
    fn may_play(&self, stream: &Stream, seen: &Observation, length: u64) -> bool {
        let hint = self.hint_of(stream);
        let is_known = stream.rate.is_some() || matches!(hint, Some(RateHint::Rate(..)));
        seen.pattern != Pattern::Random && (is_known || length >= PLAYED_MIN)
    }

    /// Move the seat's contract here, if its reader has gone here.
    pub(super) fn move_promise(&mut self, id: StreamId, seen: &Observation, length: u64) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if !self.may_play(stream, seen, length) || self.is_glanced_at(stream) {
            return;
        }
        let is_first = stream.reads.read_count == 0 && stream.waiting_count == 0;
        if stream.standing == Standing::Contract {
            return;
        }
        let Some(from) = self.left_place(id, is_first, length) else {
            return;
        };
        self.end_run(from);
        let came_from = self.leave_run(from);
        // A place that was only looked at has none of its own.
        let looked_from = (self.streams.get_mut(from.0)).and_then(|stream| stream.came_from.take());
        let came_from = came_from.or(looked_from);
        let left_ahead = self.streams.get(from.0).map_or(0, Stream::ahead_bytes);
        let legacy = self.take_way(from);
        self.release_held(from, u64::MAX);
        self.unsettle(from);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.came_from = came_from;
            stream.legacy = legacy;
            stream.left_ahead = left_ahead;
        }
        let Some(left) = self.streams.get_mut(from.0) else {
            return;
        };
        left.standing = Standing::BestEffort;
        // Nothing is held for it any more: if it is read on, it is fetched from its reader on.
        left.fetched = left.fetched.min(left.consumed);
        let (rate, device) = (left.rate, left.device);
        let told = (self.streams.get(id.0)).and_then(|stream| self.told_rate(stream));
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let own = told.or(rate);
        stream.rate = own;
        stream.standing = Standing::Contract;
        stream.was_cut_to = true;
        // Its run begins with this read, also where it goes on behind bytes that were read before.
        stream.cursor = None;
        stream.refusal = None;
        stream.late_before = false;
        // No stream held the bytes that were fetched ahead at the last visit; those that are still
        // there are passed over.
        stream.fetched = stream.consumed.min(stream.fetched);
        stream.reanchor(self.now);
        if let Some(device) = self.devices.get_mut(&device) {
            device.move_promise(from, id);
        }
        let per_second =
            |rate: Option<(BytesPerSecond, RateSource)>| rate.map_or(0, |(rate, _)| rate.0);
        let (before, after) = (per_second(rate), per_second(own));
        let least_bytes = (self.promised.least_bytes)
            .saturating_sub(self.least_buffers(before))
            .saturating_add(self.least_buffers(after));
        let rate = (self.promised.rate)
            .saturating_sub(before)
            .saturating_add(after);
        self.promised = Promised { rate, least_bytes };
        self.forget_kept(from);
        self.touch(device);
    }

    /// When a read is due that a client under contract makes elsewhere in its material: it may be
    /// the first after a cut, which only the next one shows. A client that reads elsewhere more
    /// often than people cut gets best effort in between: each such read costs the device
    /// positioning that admission has not counted.
    pub(super) fn look_away_due(&mut self, id: StreamId, arrived: Instant) -> Instant {
        let (now, preroll) = (self.now, self.policy.preroll);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return Instant::NEVER;
        };
        let is_promised = stream.standing == Standing::Contract && stream.frames.is_none();
        if !is_promised || stream.looked_away + LOOK_AWAY > now {
            return Instant::NEVER;
        }
        stream.looked_away = now;
        arrived + preroll
    }

    /// When a read is due for which no stream is followed: the first reads of a clip of known rate
    /// are presumed to begin its play, at any place in it. Not for a client for which that was
    /// wrong lately, nor where a stream was refused: there is no room for another, and a stream
    /// under contract would be late.
    pub(super) fn presumed_due(&mut self, id: StreamId, arrived: Instant) -> Instant {
        let (now, preroll) = (self.now, self.policy.preroll);
        let Some(stream) = self.streams.get(id.0) else {
            return Instant::NEVER;
        };
        let hint = self.hint_of(stream);
        let is_clip = matches!(hint, Some(RateHint::Rate(rate, _)) if rate.0 > 0);
        if self.glances_about(stream) {
            return Instant::NEVER;
        }
        let is_full = |device: &Device| !device.refused.is_empty();
        if self.devices.get(&stream.device).is_none_or(is_full) {
            return Instant::NEVER;
        }
        let Some(session) = self.sessions.get_mut(&stream.session) else {
            return Instant::NEVER;
        };
        if !is_clip || stream.cursor.is_some() || now < session.presumed_wrongly_until {
            return Instant::NEVER;
        }
        // A client that waits for several places at once does not begin to play.
        let elsewhere = self.reads.iter().any(|(_, read)| {
            read.session == stream.session && read.stream.is_some_and(|other| other != id)
        });
        if elsewhere {
            return Instant::NEVER;
        }
        if session.look_count >= LOOKS {
            session.look_count = 0;
            session.presumed_wrongly_until = now + PRESUMED_AGAIN;
            return Instant::NEVER;
        }
        session.look_count += 1;
        arrived + preroll
    }

    /// Whether the reader goes on at the place where it was presumed to play. If it strays, the
    /// stream will follow it to where it reads now.
    pub(super) fn look_at_presumption(
        &mut self,
        id: StreamId,
        seen: &Observation,
        is_followed: bool,
    ) {
        let Some(stream) = self
            .streams
            .get_mut(id.0)
            .filter(|stream| stream.is_presumed)
        else {
            return;
        };
        let goes_on = stream.cursor == Some(seen.cursor) && is_followed;
        let strays = stream.cursor.is_some_and(|own| own != seen.cursor);
        if goes_on {
            stream.is_presumed = false;
        }
        if strays {
            // The reader looks about in its clip.
            stream.is_presumed = false;
            self.end_run(id);
            self.forget_cursor(id);
        }
    }

    fn forget_cursor(&mut self, id: StreamId) {
        self.leave_way(id);
        self.release_held(id, u64::MAX);
        self.unsettle(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.cursor = None;
        }
    }

    /// The reader of a stream has left where it was: how long a run that was.
    pub(super) fn end_run(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let (session, run) = (stream.session, stream.consumed);
        // A stream without a rate is not played.
        let is_look = stream.rate.is_none() || run < stream.rate_or_none().bytes_in(RUN_MIN).0;
        if is_look {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&session) {
            let mean = session.run_bytes.unwrap_or(run);
            session.run_bytes = Some(mean - mean / 4 + run / 4);
        }
    }

    /// How long the run will be that a stream is in, as its seat's were; None: not known.
    pub(super) fn run_bytes(&self, stream: &Stream) -> Option<u64> {
        let session = self.sessions.get(&stream.session)?;
        let mean = session.run_bytes.filter(|_| session.is_seat())?;
        Some(mean.max(stream.consumed.saturating_mul(2)))
    }

    /// How far ahead of its reader a stream is read. Units: bytes; at most `cap`.
    ///
    /// A visit costs positioning, and bytes that were fetched when the reader cuts away are lost,
    /// half a window in the mean. For a run of `r` bytes read in windows of `w`, with positioning
    /// as dear as `p` bytes, that is `p·r/w + w/2`: least at `w = √(2·p·r)`.
    pub(super) fn window(&self, stream: &Stream, device: DeviceId, cap: u64) -> u64 {
        let chunk = self.limits.chunk_bytes_max;
        let session = self.sessions.get(&stream.session);
        let is_new = session.is_some_and(|session| session.run_bytes.is_none());
        if stream.is_presumed && is_new {
            // It may be a single look. One request brings its bytes and shows whether it is read
            // on.
            return cap.min(chunk.max(stream.read_bytes));
        }
        let (Some(run), Some(device)) = (self.run_bytes(stream), self.devices.get(&device)) else {
            return cap;
        };
        if !stream.way.is_empty() {
            // It is read on along its way, and nothing is lost.
            return cap;
        }
        let step = device.model.typical_positioning(device.contracts.len());
        let positioning = device.model.base.read.rate.bytes_in(step).0;
        let best = u128::from(positioning) * u128::from(run) * 2;
        let least = stream.rate_or_none().bytes_in(WINDOW_MIN).0;
        let least = least.max(2 * chunk);
        (best.isqrt() as u64).max(least).min(cap)
    }

    /// The first frame behind a cut is wanted long before it is due: the editor looks at the old
    /// one until then. Not for a reader that glances about.
    pub(super) fn first_frame_wanted(&self, stream: &Stream) -> Instant {
        match stream.awaits_first_frame() && !self.glances_about(stream) {
            true => stream.anchor + FIRST_FRAME,
            false => Instant::NEVER,
        }
    }

    /// Until when nothing is fetched ahead behind a first read from which its reader has not gone
    /// on. None: read-ahead need not wait.
    pub(super) fn rests_until(&self, stream: &Stream) -> Option<Instant> {
        if !stream.row.is_one() || stream.frames.is_some() {
            return None;
        }
        if stream.waiting_count > 0 {
            // When that request ends the device is looked at again. The reader may also wait for
            // bytes that are not under way: they were dropped, and are fetched anew.
            let is_on_its_way = stream.fetched >= stream.consumed
                && self.devices.get(&stream.device)?.queue.flight_count > 0;
            return is_on_its_way.then_some(Instant::NEVER);
        }
        let handle = (stream.session, stream.handle?);
        let answered = self.handles.get(&handle)?.cadence.last_answered();
        Some(answered + REST).filter(|until| *until > self.now)
    }

    /// Streams that were refused on a device, and that their seat has left for another place since,
    /// ask no more: each of them would take the turn of the place that is played. They ask anew
    /// when they are read again.
    pub(super) fn forget_left(&mut self, device: DeviceId) {
        let Some(entry) = self.devices.get(&device) else {
            return;
        };
        let read = |id: &StreamId| {
            let stream = self.streams.get(id.0)?;
            let session = self.sessions.get(&stream.session)?;
            let is_one = session.is_seat() && stream.frames.is_none();
            is_one.then_some((stream.session, stream.last_read))
        };
        let is_left = |id: &&StreamId| {
            let Some((session, last_read)) = read(id).filter(|(_, at)| self.now.since(*at) > LEFT)
            else {
                return false;
            };
            let mut others = entry
                .refused
                .iter()
                .chain(&entry.contracts)
                .filter_map(read);
            others.any(|(other, at)| other == session && at.since(last_read) > LEFT)
        };
        let left: Vec<StreamId> = entry.refused.iter().filter(is_left).copied().collect();
        for id in left {
            if let Some(stream) = self.streams.get_mut(id.0) {
                stream.standing = Standing::BestEffort;
            }
            if let Some(entry) = self.devices.get_mut(&device) {
                entry.refused.retain(|&other| other != id);
            }
        }
    }

    /// Give back a contract on a device that its reader has left for another place under contract.
    pub(super) fn give_back_left(&mut self, device: DeviceId) {
        let Some(entry) = self.devices.get(&device) else {
            return;
        };
        let streams = || {
            entry
                .contracts
                .iter()
                .filter_map(|id| Some((*id, self.streams.get(id.0)?)))
        };
        let newest = |session: SessionId| {
            let of_seat = streams().filter(|(_, other)| other.session == session);
            of_seat.map(|(_, other)| other.last_read).max()
        };
        let left = streams().find(|(_, stream)| {
            let is_seat = self
                .sessions
                .get(&stream.session)
                .is_some_and(|session| session.is_seat());
            is_seat
                && stream.frames.is_none()
                && self.now.since(stream.last_read) > LEFT
                && (stream.is_presumed
                    || newest(stream.session)
                        .is_some_and(|last| last.since(stream.last_read) > LEFT))
        });
        if let Some((id, _)) = left {
            self.give_back_promise(id);
        }
    }
}

/// Whether a contract suits a place of that rate: enough for it, and not so much more that sound
/// would take the picture's.
pub(super) fn suits(promised: BytesPerSecond, own: Option<(BytesPerSecond, RateSource)>) -> bool {
    own.is_none_or(|(own, _)| {
        own.0 <= promised.0.saturating_add(promised.0 / 20) && own.0 >= promised.0 / SOUND
    })
}

impl Stream {
    /// Its reader has cut to its present place, has got nothing yet, and waits. Admission does not
    /// count the preference that it gets then, so a start, which admission has looked at, gets
    /// none.
    pub(super) fn awaits_first_frame(&self) -> bool {
        self.was_cut_to && self.fetched == 0 && self.waiting_count > 0
    }
}
