// SPDX-License-Identifier: Apache-2.0
//! Contracts whose handles are closed, and which their seats keep.
//!
//! Many players close a clip before they open the next one, at each cut. So a contract does not end
//! with its handle: the seat keeps it for a pause's time, counted from the last read, and its next
//! read takes it up. A kept contract is a line among the streams that has no handle and no file,
//! and is never fetched for; admission counts it as a player that may begin at any moment. It has
//! no buffers but those that were fetched along a way (see `ways`), and these only for as long as a
//! player that cuts takes to open the next clip.
//!
//! They end with the session: a client that disconnects has left.
//!
//! A reader that pauses with its handle open keeps its contract as long as that is open.

use super::state::*;
use super::ways::Legacy;
use super::*;
use crate::sched::admission::Player;

/// Contracts kept at once, of one session and of all; more end with their handles.
const KEPT_OF_SESSION_MAX: usize = 64;
const KEPT_MAX: usize = 1024;
/// So long a kept contract has the buffers of its way.
const WAY_KEPT: Duration = Duration::from_s(1);
/// The dry run lets so many others come back one after another, a second apart; the rest come with
/// the last.
const COME_BACK_MAX: u64 = 8;

impl Server {
    /// The handle of a stream is closed: its seat keeps the contract, if there is one and the
    /// reader has played.
    pub(super) fn keep_promise(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let session = stream.session;
        let is_seat = (self.sessions.get(&session)).is_some_and(|session| session.is_seat());
        let is_place = stream.frames.is_none() && stream.part.is_whole();
        // A look at the head of a clip is no play.
        let played = stream.consumed >= stream.rate_or_none().bytes_in(glances::RUN_MIN).0;
        let is_promised = stream.standing == Standing::Contract && !stream.is_copy;
        let has_time = self.kept_until(stream) > self.now;
        let of_session = self.kept_of(session).count();
        let has_room = of_session < KEPT_OF_SESSION_MAX && self.kept.len() < KEPT_MAX;
        if !(is_seat && is_place && is_promised && has_time && has_room)
            || !(played || stream.was_cut_to)
        {
            return;
        }
        let device = stream.device;
        let file = self.files.get(&stream.file);
        let physical = file.map_or(0, |file| self.next_place(stream, device, file).physical);
        let consumed = stream.consumed;
        self.release_held(id, consumed);
        let legacy = self.take_way(id);
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let has_way = legacy.is_some();
        let (way, held, fetched) = legacy.map_or_else(Default::default, Legacy::into_parts);
        let until = match way.is_empty() {
            true => Instant::NEVER,
            false => self.now + WAY_KEPT,
        };
        let kept = Stream {
            way,
            held,
            fetched,
            is_kept: true,
            standing: Standing::Contract,
            rate: stream.rate,
            consumed: stream.consumed,
            read_bytes: stream.read_bytes,
            last_read: stream.last_read,
            origin: physical,
            handle: None,
            ..Stream::new(
                session,
                HandleId(0),
                stream.file,
                device,
                (stream.path.clone(), stream.part),
                self.now,
            )
        };
        self.kept_wake = self.kept_wake.min(self.kept_until(&kept)).min(until);
        let to = StreamId(self.streams.insert(kept));
        self.kept.push(to);
        self.unsettle(id);
        if let Some(device) = self.devices.get_mut(&device) {
            device.move_promise(id, to);
        }
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.standing = Standing::BestEffort;
            if has_way {
                stream.fetched = stream.fetched.min(stream.consumed);
            }
        }
    }

    pub(super) fn kept_until(&self, stream: &Stream) -> Instant {
        stream.last_read + self.policy.pause
    }

    /// The contracts that a session keeps.
    pub(super) fn kept_of(&self, session: SessionId) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.kept
            .iter()
            .filter_map(|&id| Some((id, self.streams.get(id.0)?)))
            .filter(move |(_, stream)| stream.session == session)
    }

    /// The kept contract of its seat that a stream may take up: the least that is enough, and not
    /// far more than that. A clip's sound and picture each find their own.
    pub(super) fn kept_for(
        &self,
        stream: &Stream,
        is_like: impl Fn(&Stream) -> bool,
    ) -> Option<StreamId> {
        let own = self.told_rate(stream);
        self.kept_of(stream.session)
            .filter(|(_, kept)| kept.device == stream.device)
            .filter(|(_, kept)| is_like(kept))
            .map(|(id, kept)| (kept.rate_or_none(), id))
            .filter(|&(rate, _)| seats::suits(rate, own))
            .min()
            .map(|(_, id)| id)
    }

    /// The kept contract of its seat in place of which a stream of a higher rate asks.
    pub(super) fn kept_below(&self, id: StreamId) -> Option<StreamId> {
        let stream = self.streams.get(id.0).filter(|stream| !stream.is_kept)?;
        let own = stream.rate_or_none().0;
        self.kept_of(stream.session)
            .filter(|(_, kept)| kept.device == stream.device)
            .map(|(id, kept)| (kept.rate_or_none().0, id))
            .filter(|&(rate, _)| rate < own)
            .max()
            .map(|(_, id)| id)
    }

    /// A kept contract is over. Refused streams ask soon, and not from here: contracts end while
    /// another stream asks, which may be the first of those.
    pub(super) fn end_kept(&mut self, id: StreamId) {
        self.kept.retain(|&kept| kept != id);
        self.end_kept_way(id);
        self.resign(id);
        let Some(stream) = self.streams.remove(id.0) else {
            return;
        };
        if let Some(device) = self.devices.get_mut(&stream.device) {
            device.forget(id);
            // Room may have come for a stream that was refused.
            device.refused_asked = Instant::ZERO;
            if !device.refused.is_empty() {
                self.block(stream.device);
            }
        }
        self.touch(stream.device);
    }

    /// Give back the buffers of a kept contract's way.
    fn end_kept_way(&mut self, id: StreamId) {
        self.leave_way(id);
        self.release_held(id, u64::MAX);
    }

    /// A kept contract has gone to a place that is read.
    pub(super) fn forget_kept(&mut self, id: StreamId) {
        if self.streams.get(id.0).is_some_and(|stream| stream.is_kept) {
            self.kept.retain(|&kept| kept != id);
            self.streams.remove(id.0);
        }
    }

    /// Give back contracts whose time is over.
    pub(super) fn end_kept_over(&mut self) {
        if self.now < self.kept_wake {
            return;
        }
        let over: Vec<StreamId> = self
            .kept
            .iter()
            .filter(|kept| {
                let stream = self.streams.get(kept.0);
                stream.is_none_or(|stream| self.kept_until(stream) <= self.now)
            })
            .copied()
            .collect();
        for id in over {
            self.end_kept(id);
        }
        let now = self.now;
        let way_until = |stream: &Stream| match stream.way.is_empty() {
            true => Instant::NEVER,
            false => stream.anchor + WAY_KEPT,
        };
        let is_over = |id: &&StreamId| {
            let stream = self.streams.get(id.0);
            stream.is_some_and(|stream| way_until(stream) <= now)
        };
        let ways: Vec<StreamId> = self.kept.iter().filter(is_over).copied().collect();
        for id in ways {
            self.end_kept_way(id);
        }
        let next = self.kept.iter().filter_map(|kept| {
            let stream = self.streams.get(kept.0)?;
            Some(self.kept_until(stream).min(way_until(stream)))
        });
        self.kept_wake = next.min().unwrap_or(Instant::NEVER);
    }

    /// A session has ended: its client has left, as far as can be known.
    pub(super) fn end_kept_of(&mut self, session: SessionId) {
        let own: Vec<StreamId> = self.kept_of(session).map(|(id, _)| id).collect();
        for id in own {
            self.end_kept(id);
        }
    }

    /// A kept contract as the dry run of a device sees it: its seat may play on at any moment, the
    /// `nth` of them behind the others.
    pub(super) fn kept_player(&self, stream: &Stream, promised: Promised, nth: u64) -> Player {
        let rate = stream.rate_or_none();
        let device = stream.device;
        let cap = self.window(stream, device, self.cap_for(rate.0, promised));
        let lead = self.policy.preroll - flow::SAFETY;
        Player {
            claim: Claim {
                writes: false,
                deadline: self.now + Duration::from_s(nth.min(COME_BACK_MAX)) + lead,
                rate,
                physical: stream.origin,
                room: cap,
                cap: cap.max(1),
                left: u64::MAX,
                is_awaited: false,
            },
            lead,
            first_read: ByteCount(stream.read_bytes),
            run: self.run_bytes(stream).map(ByteCount),
            is_rehearsed: false,
        }
    }

    /// Take a stream's contract and buffers; its reader asks anew when it comes back.
    pub(super) fn give_back_promise(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if stream.is_kept {
            return self.end_kept(id);
        }
        let device = stream.device;
        self.resign(id);
        self.release_held(id, u64::MAX);
        if let Some(device) = self.devices.get_mut(&device) {
            device.visits.background.retain(|&other| other != id);
        }
    }
}

impl Stream {
    /// Until when its reader has enough to play of the bytes that it has read.
    pub(super) fn played_until(&self) -> Instant {
        let played = self.rate_or_none().time_for(ByteCount(self.consumed));
        self.last_read.max(self.anchor + played)
    }
}
