// SPDX-License-Identifier: Apache-2.0
//! Ways: a stream under contract is read ahead across the cuts that its user has rehearsed.
//!
//! When a run begins whose place is remembered, the runs behind it are, too: together they are the
//! stream's way. Its `v` goes on counting beyond the cut, where its bytes lie in another file, so
//! that window, claim, deadlines and held buffers are those of a stream that plays on. At the cut
//! the stream there takes over the bytes that are fetched already. A reader that goes elsewhere, or
//! plays on beyond the cut, leaves its way: the bytes of the way are given back.

use super::clock::PlayClock;
use super::glances::RUN_MIN;
use super::rehearsal::{RunPlace, ShareUser};
use super::seats::{AWAY, LEFT};
use super::state::*;
use super::*;
use crate::stream::CursorIndex;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// The most runs of a way.
const LEG_COUNT_MAX: usize = 8;
/// So many wrong cuts in a row, and the seat's ways are not followed until so many were right.
const CUTS_IN_A_ROW: u8 = 2;
/// So many known places, one after the other, are presumed to be played from their first read on
/// though their reader did not go on there.
const PRESUMED_MAX: u8 = 2;
/// The first read of a run may come behind so many others.
const OVERTAKEN_MAX: u64 = 4;
/// A run of another rate ends the way: a part of this rate makes it another.
const OTHER_RATE: u64 = 20;
/// A reader that is followed from its second or third read on has begun at most so much before.
const INTO_MAX: Duration = Duration::from_s(1);

/// A run that lies ahead of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub file: FileId,
    pub place: RunPlace,
    /// The stream's `v` at its first byte.
    pub v: u64,
    /// Units: bytes.
    pub length: u64,
}

/// Where the bytes of a stream lie from some `v` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    pub file: FileId,
    pub offset: u64,
    /// The bytes up to the next cut, or the end of the way. None: as far as the file goes.
    pub left: Option<u64>,
}

/// The fetched bytes of a way, which pass from the stream that its reader leaves to the one where
/// it goes on.
#[derive(Clone, Debug)]
pub(super) struct Legacy {
    legs: Vec<Leg>,
    held: VecDeque<HeldSlot>,
    fetched: u64,
}

impl Legacy {
    pub(super) fn into_parts(self) -> (Vec<Leg>, VecDeque<HeldSlot>, u64) {
        (self.legs, self.held, self.fetched)
    }
}

/// The run that a reader is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct PresentRun {
    place: RunPlace,
    /// The run before it; looks in between do not count.
    before: Option<RunPlace>,
    /// Whether the cut to it is entered in the memory. A cut to another place than last time may be
    /// to a look, which does not count.
    is_settled: bool,
}

/// How often a seat cut as it had before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Foresight {
    /// Cuts out of runs that were remembered.
    pub cut_count: u64,
    /// Those of them that went where the last one had gone.
    pub right_count: u64,
    /// In a row, the last ones; at most [`CUTS_IN_A_ROW`].
    wrong: u8,
    /// Since that many were wrong.
    right: u8,
}

impl Foresight {
    /// A cut out of a run that was remembered.
    fn cut(&mut self, is_right: bool) {
        self.cut_count += 1;
        self.right_count += u64::from(is_right);
        if !is_right {
            self.wrong = (self.wrong + 1).min(CUTS_IN_A_ROW);
            self.right = 0;
            return;
        }
        self.right = (self.right + 1).min(CUTS_IN_A_ROW);
        if self.is_followed() || self.right == CUTS_IN_A_ROW {
            self.wrong = 0;
        }
    }

    /// The seat's ways are followed.
    fn is_followed(&self) -> bool {
        self.wrong < CUTS_IN_A_ROW
    }

    /// Nothing speaks against the seat's ways: admission counts on them.
    fn is_trusted(&self) -> bool {
        self.wrong == 0
    }
}

impl Stream {
    /// Where its bytes lie from `v` on, read forward.
    pub(super) fn spot(&self, v: u64) -> Spot {
        let own = |left| Spot {
            file: self.file,
            offset: self.origin.saturating_add(v),
            left,
        };
        let Some(first) = self.way.first() else {
            return own(None);
        };
        if v < first.v {
            return own(Some(first.v - v));
        }
        let leg = self
            .way
            .iter()
            .rev()
            .find(|leg| leg.v <= v)
            .unwrap_or(first);
        let into = v - leg.v;
        Spot {
            file: leg.file,
            offset: leg.place.start.saturating_add(into),
            left: Some(leg.length.saturating_sub(into)),
        }
    }

    /// The `v` up to which it may hold a slot that ends at this byte of a file.
    pub(super) fn v_of(&self, file: FileId, stop: u64) -> u64 {
        let spot = self.spot(self.fetched);
        match spot.file == file && !self.way.is_empty() {
            true => (self.fetched + stop).saturating_sub(spot.offset),
            false => stop.saturating_sub(self.origin),
        }
    }
}

/// The `v` from which on a former way and the present one are not the same. None: the present one
/// only goes further.
fn parting(former: &[Leg], present: &[Leg]) -> Option<u64> {
    let Some(first) = present.first() else {
        return former.first().map(|leg| leg.v);
    };
    if former.is_empty() {
        return Some(first.v);
    }
    for (at, old) in former.iter().enumerate() {
        let Some(new) = present.get(at) else {
            return Some(old.v);
        };
        if old.v != new.v || old.place != new.place || old.file != new.file {
            return Some(old.v.min(new.v));
        }
        let is_last = at + 1 == former.len() || at + 1 == present.len();
        if is_last && old.length != new.length {
            return Some(old.v + old.length.min(new.length));
        }
    }
    None
}

impl Server {
    /// The bytes that a stream that is read forward wants next: where, and how many there are.
    pub(super) fn next_spot(&self, stream: &Stream) -> Option<(Spot, &File, u64)> {
        let spot = stream.spot(stream.fetched);
        let file = self.files.get(&spot.file)?;
        let is_own = spot.file == stream.file;
        let is_known = |leg: &Leg| leg.file == spot.file && leg.place.file == file.key;
        if !is_own && !stream.way.iter().any(is_known) {
            // The file was forgotten, and another one has its number.
            return None;
        }
        let left = file.size.saturating_sub(spot.offset);
        Some((spot, file, spot.left.unwrap_or(u64::MAX).min(left)))
    }

    /// The user whose runs a stream's are. None: its runs are not remembered.
    fn rehearsing_user(&self, stream: &Stream) -> Option<ShareUser> {
        let session = self.sessions.get(&stream.session)?;
        let is_remembered = self.policy.rehearsal
            && session.is_seat()
            && stream.frames.is_none()
            && stream.part.is_whole()
            && stream.flow == Flow::Forward
            && !stream.is_copy
            && !stream.is_kept;
        is_remembered.then(|| session.login.clone())
    }

    /// The reader of a stream leaves its run: remember it. Returns the run that a next one follows:
    /// this one, or the one before if this was only a look.
    pub(super) fn leave_run(&mut self, id: StreamId) -> Option<RunPlace> {
        let stream = self.streams.get_mut(id.0)?;
        let run = stream.run.take()?;
        let end = stream.origin.saturating_add(stream.consumed);
        let length = end.saturating_sub(run.place.start);
        let stream = self.streams.get(id.0)?;
        let rate = stream.rate.or(self.told_rate(stream));
        let rate = rate.map_or(BytesPerSecond(0), |(rate, _)| rate);
        let is_look = rate.0 == 0 || length < rate.bytes_in(RUN_MIN).0;
        let user = self.rehearsing_user(stream).filter(|_| !is_look);
        let Some(user) = user else {
            return run.before;
        };
        self.rehearsal.ends(&user, run.place, length, rate);
        Some(run.place)
    }

    /// A reader's handle is closed: its next run follows this one.
    pub(super) fn leave_run_of_closed(&mut self, id: StreamId) {
        let left = self.leave_run(id);
        let session = self.streams.get(id.0).map(|stream| stream.session);
        if let Some(session) = session.and_then(|session| self.sessions.get_mut(&session)) {
            session.left_run = left.or(session.left_run);
        }
    }

    /// The reader of a stream begins a run.
    ///
    /// `before`  the run that it was in in the same stream
    pub(super) fn begin_run(&mut self, id: StreamId, before: Option<RunPlace>) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let before = before.or(stream.came_from.take());
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let (Some(user), Some(clock)) = (self.rehearsing_user(stream), stream.clock) else {
            // A reader that steps here and there looks about: its next run follows the one before.
            if let Some(stream) = self.streams.get_mut(id.0) {
                stream.came_from = before;
            }
            return;
        };
        let Some(file) = self.files.get(&stream.file) else {
            return;
        };
        let start = self.run_start(stream, clock.origin);
        let (session, place) = (
            stream.session,
            RunPlace {
                file: file.key,
                start,
            },
        );
        let before = before
            .or_else(|| self.leave_run_before(id))
            .or_else(|| self.sessions.get_mut(&session)?.left_run.take());
        let foreseen = before.and_then(|before| self.rehearsal.run_at(&user, before)?.next);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.run = Some(PresentRun {
                place,
                before,
                is_settled: false,
            });
        }
        if foreseen == Some(place) {
            self.enter_cut(id);
        }
        self.lay_way(id);
    }

    /// The first byte of the run that a stream is in: a read over old ground, or one that overtook
    /// the first, shows only later where it began.
    fn run_start(&self, stream: &Stream, from: u64) -> u64 {
        let handle = stream.handle.map(|handle| (stream.session, handle));
        let handle = handle.and_then(|handle| self.handles.get(&handle));
        let cursor = stream.cursor.zip(handle);
        let cursor = cursor.and_then(|(cursor, handle)| handle.recogniser.cursor(cursor));
        let start = cursor.map_or(from, |cursor| cursor.start().min(from));
        let most = stream.read_bytes.saturating_mul(OVERTAKEN_MAX);
        if from - start <= most { start } else { from }
    }

    /// A run has lasted for so long that it is no look: the cut to it counts.
    pub(super) fn settle_cut(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let Some(run) = stream.run.filter(|run| !run.is_settled) else {
            return;
        };
        let end = stream.origin.saturating_add(stream.consumed);
        let length = end.saturating_sub(run.place.start);
        let rate = stream.rate_or_none();
        if rate.0 == 0 || length < rate.bytes_in(RUN_MIN).0 {
            return;
        }
        let start = self.run_start(stream, run.place.start);
        let stream = self.streams.get_mut(id.0);
        if let Some(run) = stream.and_then(|stream| stream.run.as_mut()) {
            run.place.start = start;
        }
        self.enter_cut(id);
        // The cut may be part of the way ahead, as in a loop.
        self.lay_way(id);
    }

    fn enter_cut(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let Some(run) = &mut stream.run else {
            return;
        };
        run.is_settled = true;
        let run = *run;
        let Some(session) = self.sessions.get_mut(&stream.session) else {
            return;
        };
        session.presumed_starts = 0;
        let Some(before) = run.before else {
            return;
        };
        let former = self.rehearsal.run_at(&session.login, before);
        if let Some(next) = former.and_then(|former| former.next) {
            session.foresight.cut(next == run.place);
        }
        (self.rehearsal).goes_on(&session.login, before, run.place);
    }

    /// The run of the seat that a stream without a contract goes on from: of those that are not
    /// over, the one that was read least lately, and not in turn with this stream. Not one that is
    /// played under contract, nor one that was left long ago.
    fn leave_run_before(&mut self, id: StreamId) -> Option<RunPlace> {
        let stream = self.streams.get(id.0)?;
        let is_before = |key: u32, other: &Stream| {
            StreamId(key) != id
                && other.session == stream.session
                && other.run.is_some()
                && other.last_read <= stream.last_read
                && self.now.since(other.last_read) <= LEFT
                && (other.standing != Standing::Contract || self.now.since(other.last_read) > AWAY)
        };
        let all = self.streams.iter();
        let (key, _) = all
            .filter(|&(key, other)| is_before(key, other))
            .min_by_key(|(_, other)| other.last_read)?;
        self.leave_run(StreamId(key))
    }

    /// A read begins where a run began that its user has played, and its reader may have cut there:
    /// it does not play elsewhere under contract, or its way leads here, or the run that it plays
    /// is at its end. Else the next read shows whether this was a header or a thumbnail. One that
    /// was wrong twice, one presumption after the other, waits for the next read, too.
    pub(super) fn is_known_start(&self, seat: SessionId, file: FileId, range: ByteRange) -> bool {
        let (Some(session), Some(file)) = (self.sessions.get(&seat), self.files.get(&file)) else {
            return false;
        };
        let place = RunPlace {
            file: file.key,
            start: range.start.0,
        };
        let is_known = self.policy.rehearsal
            && session.is_seat()
            && session.presumed_starts < PRESUMED_MAX
            && self.rehearsal.run_at(&session.login, place).is_some();
        let Some(device) = self.devices.get(&file.device).filter(|_| is_known) else {
            return false;
        };
        let mut playing = device
            .contracts
            .iter()
            .filter_map(|id| self.streams.get(id.0))
            .filter(|stream| stream.session == seat && !stream.is_kept)
            .filter(|stream| self.now.since(stream.last_read) <= AWAY)
            .peekable();
        let leads_here = |stream: &Stream| {
            let is_named = stream.way.iter().any(|leg| leg.place == place);
            is_named || self.is_at_end(&session.login, stream)
        };
        playing.peek().is_none() || playing.any(leads_here)
    }

    /// The reader of a stream is where its run ended last time.
    fn is_at_end(&self, login: &ShareUser, stream: &Stream) -> bool {
        let Some(run) = stream.run else {
            return false;
        };
        let known = self.rehearsal.run_at(login, run.place);
        let end = stream.origin.saturating_add(stream.consumed);
        known.is_some_and(|known| end >= run.place.start.saturating_add(known.length))
    }

    /// A stream without a contract begins at a known place with its first read there.
    pub(super) fn presume_start(&mut self, id: StreamId) {
        let session = self.streams.get(id.0).map(|stream| stream.session);
        if let Some(session) = session.and_then(|session| self.sessions.get_mut(&session)) {
            session.presumed_starts = session.presumed_starts.saturating_add(1);
        }
    }

    /// Which run followed which, of all users, in the order in which the runs were played, oldest
    /// first: the driver keeps it for [`Event::Remembered`].
    pub fn remembered(&self) -> Vec<RememberedRun> {
        self.rehearsal.remembered()
    }

    /// Another number with each change of [`Server::remembered`].
    pub fn rehearsal_changes(&self) -> u64 {
        self.rehearsal.change_count()
    }

    /// Lay a stream's way along the runs that followed last time. Of the bytes that were fetched
    /// along a former way those stay that lie on this one.
    pub(super) fn lay_way(&mut self, id: StreamId) {
        let way = self.way_ahead(id);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let former = core::mem::replace(&mut stream.way, way);
        if let Some(v) = parting(&former, &stream.way) {
            self.give_back_from(id, v);
        }
    }

    /// The way of a stream as the memory has it; empty: there is none, or it is not to be followed.
    fn way_ahead(&self, id: StreamId) -> Vec<Leg> {
        let mut way = Vec::new();
        let Some(stream) = self.streams.get(id.0) else {
            return way;
        };
        let is_followed = |session: &Session| session.foresight.is_followed();
        if stream.standing != Standing::Contract
            || !self.sessions.get(&stream.session).is_some_and(is_followed)
        {
            return way;
        }
        let (Some(user), Some(run)) = (self.rehearsing_user(stream), stream.run) else {
            return way;
        };
        while way.len() < LEG_COUNT_MAX
            && let Some(leg) = self.next_leg(stream, &user, run.place, way.last())
        {
            way.push(leg);
        }
        way
    }

    /// The leg behind another one, or behind the run that begins at `run`.
    fn next_leg(
        &self,
        stream: &Stream,
        user: &ShareUser,
        run: RunPlace,
        last: Option<&Leg>,
    ) -> Option<Leg> {
        let rate = stream.rate_or_none().0;
        let is_its = |other: BytesPerSecond| other.0.abs_diff(rate) <= rate / OTHER_RATE;
        let (at, v) = match last {
            Some(leg) => (leg.place, leg.v.checked_add(leg.length)?),
            None => {
                let length = self.rehearsal.run_at(user, run)?.length;
                let end = run.start.saturating_add(length);
                (run, end.checked_sub(stream.origin)?)
            }
        };
        if v < stream.consumed {
            // Its reader has played on.
            return None;
        }
        let place = self.rehearsal.run_at(user, at)?.next?;
        let next = self.rehearsal.run_at(user, place)?;
        let id = *self.keys.get(&place.file)?;
        let file = self.files.get(&id)?;
        let length = next.length.min(file.size.saturating_sub(place.start));
        let is_there = file.device == stream.device && is_its(next.rate) && length > 0;
        is_there.then_some(Leg {
            file: id,
            place,
            v,
            length,
        })
    }

    /// Take a stream's way and the bytes fetched along it.
    pub(super) fn take_way(&mut self, id: StreamId) -> Option<Legacy> {
        let stream = self.streams.get_mut(id.0)?;
        let legs = core::mem::take(&mut stream.way);
        (!legs.is_empty()).then(|| Legacy {
            legs,
            held: core::mem::take(&mut stream.held),
            fetched: stream.fetched,
        })
    }

    /// A stream begins where a way leads: it goes on along it, and keeps the bytes that are
    /// fetched. Else they are given back.
    ///
    /// `left_ahead`  bytes that were fetched ahead at the place that its reader has left
    pub(super) fn inherit(&mut self, id: StreamId, legacy: Option<Legacy>, left_ahead: u64) {
        self.take_over(id, legacy);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let left_ahead = left_ahead + core::mem::take(&mut stream.left_ahead);
        let unread = left_ahead.saturating_sub(stream.fetched);
        self.count_unread(id, unread);
    }

    fn take_over(&mut self, id: StreamId, legacy: Option<Legacy>) {
        let (Some(legacy), Some(stream)) = (legacy, self.streams.get_mut(id.0)) else {
            return;
        };
        let into_max = stream.rate_or_none().bytes_in(INTO_MAX).0;
        let into = |leg: &Leg| {
            let into = stream.origin.checked_sub(leg.place.start)?;
            let is_here = leg.file == stream.file && into < leg.length && into <= into_max;
            is_here.then_some(into)
        };
        let is_read_on = stream.flow == Flow::Forward && stream.standing == Standing::Contract;
        let found = legacy.legs.iter().enumerate();
        let found = found
            .filter(|_| is_read_on)
            .find_map(|(at, leg)| Some((at, leg.v + into(leg)?)));
        let Some((at, base)) = found else {
            for held in legacy.held {
                self.cache.unhold(held.slot);
            }
            return;
        };
        stream.fetched = legacy.fetched.saturating_sub(base);
        let behind = legacy.legs.get(at + 1..).unwrap_or(&[]);
        stream.way = behind
            .iter()
            .map(|leg| Leg {
                v: leg.v - base,
                ..*leg
            })
            .collect();
        for held in legacy.held {
            match held.end > base {
                true => stream.held.push_back(HeldSlot {
                    end: held.end - base,
                    ..held
                }),
                false => self.cache.unhold(held.slot),
            }
        }
    }

    /// No stream has taken over the way and the buffers that came with the contract.
    pub(super) fn leave_legacy(&mut self, id: StreamId) {
        let legacy = (self.streams.get_mut(id.0)).and_then(|stream| stream.legacy.take());
        for held in legacy.into_iter().flat_map(|legacy| legacy.held) {
            self.cache.unhold(held.slot);
        }
    }

    /// The cursor is that of the run that its reader is in already: another restart of it.
    pub(super) fn is_in_run(&self, id: StreamId, cursor: CursorIndex) -> bool {
        let Some(stream) = self.streams.get(id.0) else {
            return false;
        };
        let is_its = |clock: &PlayClock| clock.cursor == Some(cursor);
        let is_in = stream.clock.as_ref().is_some_and(is_its);
        is_in && !stream.begun.as_ref().is_some_and(is_its) && stream.run.is_some()
    }

    /// The reader of a stream has left so many bytes unread that were fetched ahead of it.
    pub(super) fn count_unread(&mut self, id: StreamId, bytes: u64) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let (session, device) = (stream.session, stream.device);
        if let Some(session) = self.sessions.get_mut(&session) {
            session.unread_bytes += bytes;
        }
        if let Some(device) = self.devices.get_mut(&device) {
            device.counts.unread_bytes += bytes;
        }
    }

    /// A stream leaves its way: its reader plays on beyond the cut, or it has lost its contract.
    pub(super) fn leave_way(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let way = core::mem::take(&mut stream.way);
        if let Some(first) = way.first() {
            self.give_back_from(id, first.v);
        }
    }

    /// Rehearsal was switched off.
    pub(super) fn leave_all_ways(&mut self) {
        let all = self.streams.iter();
        let on_ways = all.filter(|(_, stream)| !stream.way.is_empty());
        let on_ways: Vec<StreamId> = on_ways.map(|(key, _)| StreamId(key)).collect();
        for id in on_ways {
            self.leave_way(id);
            if let Some(device) = self.streams.get(id.0).map(|stream| stream.device) {
                self.touch(device);
            }
        }
    }

    /// Give back the bytes that a stream has fetched from `v` on.
    fn give_back_from(&mut self, id: StreamId, v: u64) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let unread = stream.fetched.saturating_sub(v.max(stream.consumed));
        stream.fetched = stream.fetched.min(v);
        while let Some(held) = stream.held.back().copied()
            && held.end > v
        {
            stream.held.pop_back();
            self.cache.unhold(held.slot);
        }
        self.count_unread(id, unread);
    }

    /// The seat of a stream plays along a way, and nothing speaks against that: it loses no bytes
    /// at its cuts. So does one that has no contract yet, if it would have a way.
    pub(super) fn is_rehearsed(&self, stream: &Stream) -> bool {
        let session = self.sessions.get(&stream.session);
        let is_trusted = session.is_some_and(|session| session.foresight.is_trusted());
        is_trusted && (!stream.way.is_empty() || self.has_way_ahead(stream))
    }

    fn has_way_ahead(&self, stream: &Stream) -> bool {
        let (Some(run), Standing::BestEffort | Standing::Refused) = (stream.run, stream.standing)
        else {
            return false;
        };
        let user = self.rehearsing_user(stream);
        user.is_some_and(|user| self.next_leg(stream, &user, run.place, None).is_some())
    }
}
