// SPDX-License-Identifier: Apache-2.0
//! Contracts: their cost in buffers, admission, refusal, and the withdrawal of one when its device
//! became too slow. `seats` moves them, `kept` keeps those whose handles are closed.

use super::flow::SAFETY;
use super::frames::Frames;
use super::state::*;
use super::*;
use crate::sched::admission::{self, Player};
use alloc::vec::Vec;

/// Parts of a file whose last reads are further apart than this are not read together.
const READ_TOGETHER: Duration = Duration::from_s(5);
/// Largest buffers of one stream: more of them save no positioning worth having.
const CAP_BYTES_MAX: u64 = 72 << 20;
/// How often the server checks whether a device became too slow, and how long it must have been so.
const CAPACITY_CHECK: Duration = Duration::from_ms(250);
const OVERLOAD_PATIENCE: Duration = Duration::from_s(1);
/// How often refused streams ask again.
const ASK_AGAIN: Duration = Duration::from_ms(500);
/// The same where one of them has only begun at a bad moment: while others start, a device has less
/// time than once they have their first bytes ahead. Not for long: a stream that asks often enough
/// finds a moment in which a full device seems to have room.
const START_AGAIN: Duration = Duration::from_ms(100);
const STARTS_FOR: Duration = Duration::from_s(1);

impl Server {
    /// The buffers that a stream of `rate` may keep when all contracts together are `promised`:
    /// those that it needs at least, and by its rate a share of the rest. Units: bytes.
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

    /// Buffers that contracts may have; the rest is for best effort. Units: bytes.
    fn buffers_to_promise(&self) -> u64 {
        let slots = u64::from(self.limits.slot_count);
        let reserve = (slots / 8).max(8).min(slots / 2);
        (slots - reserve) * self.slot_bytes()
    }

    /// The least buffers that serve a stream of `rate`: two requests, and its edges. Requests of a
    /// slow stream are short. Units: bytes.
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

    /// The sum of all contracts with `count` more streams of `rate`.
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

    /// Ask admission for a contract for the stream; enter the stream where it then belongs.
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
        // Check first: no retry may give a contract and take it away again.
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

    /// The other parts of a striped file that its door reads and whose reads have a cursor.
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
        // The reader of a file that went on over other disks is in one stripe at a time.
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

    /// Those with a contract lose it: another part of their file has none.
    fn give_up_all(&mut self, all: &[StreamId], refusal: Refusal) {
        for id in self.only(all, Standing::Contract) {
            self.give_up(id, refusal);
        }
    }

    /// Refuse a part of a file, though its own device may have room: it asks again there.
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

    /// The one place that grants a contract. A stream with a contract does not ask again: it would
    /// count twice. Refusals are in `refuse`, which runs at each retry as well, twice a second:
    /// count changes of `standing`, not its calls.
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
                self.lay_way(id);
                if let Some(kept) = replaced {
                    self.end_kept(kept);
                }
            }
            Err((device, refusal)) => self.refuse(id, device, refusal),
        }
    }

    /// The device cannot promise the stream its portion: the stream loses a contract that it has,
    /// and asks again.
    fn refuse(&mut self, id: StreamId, device: DeviceId, refusal: Refusal) {
        self.resign(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            if stream.standing != Standing::Refused {
                stream.refused_at = self.now;
            }
            stream.standing = Standing::Refused;
            stream.refusal = Some(refusal);
        }
        if let Some(device) = self.devices.get_mut(&device) {
            device.refused.push(id);
        }
        self.block(device);
    }

    /// Frames of a sequence lie on a device from which it was not fetched before. Under contract
    /// the server asks that device for its portion: a sequence is promised as a whole, or not at
    /// all.
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
        self.portion_grows(id, device);
    }

    /// A stream under contract needs more of a device than it asked for.
    pub(super) fn portion_grows(&mut self, id: StreamId, device: DeviceId) {
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
        // It asks on the devices where it is now.
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

    /// Begin a contract where the reader is. No stream holds bytes that were fetched ahead without
    /// a contract: many may be evicted, and each hole would be a promised read that goes at once,
    /// by itself. Bytes that are still there are passed over and held. Returns up to where the
    /// stream had been fetched.
    fn begin_at_reader(&mut self, id: StreamId) -> u64 {
        let awaited = self.awaited_from(id);
        let Some(stream) = self.streams.get_mut(id.0) else {
            return 0;
        };
        let fetched = stream.fetched;
        if stream.standing != Standing::Contract && stream.frames.is_none() {
            // The count has whole stretches, and bytes that the reader has asked for: those are on
            // their way to it.
            stream.fetched = stream.consumed.min(fetched);
            if let (Flow::Forward, Some(awaited)) = (stream.flow, awaited) {
                // Reads that were served one by one do not move it: their bytes are the reader's.
                stream.fetched = stream.fetched.max(awaited);
            }
        }
        fetched
    }

    /// `v` of the first byte that the reader of a stream that is read forward waits for; the end of
    /// those that it has got if it waits for none.
    fn awaited_from(&self, id: StreamId) -> Option<u64> {
        let stream = self.streams.get(id.0)?;
        let awaited = self
            .reads
            .iter()
            .filter(|(_, read)| read.stream == Some(id) && read.file == Some(stream.file))
            .map(|(_, read)| read.range.start.0.saturating_sub(stream.origin));
        let first = awaited.min().unwrap_or(stream.consumed);
        Some(first.min(stream.consumed))
    }

    /// Whether each device that the stream is fetched from can promise its portion, in place of the
    /// kept contract `replaced`; else the device that cannot.
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
        let frames = stream.frames.as_ref();
        if frames.is_some_and(Frames::goes_on_elsewhere) || !stream.way.is_empty() {
            // How much of it lies here behind the open frames, or behind its way, is not known yet:
            // it goes on.
            claim.left = u64::MAX;
        }
        let fetched = stream.fetched_on(device);
        let anchor = stream.anchor + stream.pause(self.now, self.policy.preroll);
        let asked = anchor + stream.rate_or_none().time_for(ByteCount(fetched));
        Some(Player {
            lead: claim.deadline.since(asked),
            first_read: ByteCount(stream.read_bytes.saturating_sub(fetched)),
            run: self.run_bytes(stream).map(ByteCount),
            is_rehearsed: self.is_rehearsed(stream),
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

    /// A stream stops fetching where it was: the server looks again at the reads that rely on it.
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
        self.leave_way(id);
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

    /// A device that became too slow for its contracts keeps most of them if the server withdraws
    /// one: the newest stream goes back to best effort, as refused.
    pub(super) fn shed(&mut self, id: DeviceId) {
        let now = self.now;
        let Some(device) = self.devices.get(&id) else {
            return;
        };
        if now.since(device.capacity_checked) < CAPACITY_CHECK {
            return;
        }
        self.give_back_left(id);
        // Kept contracts cost the device nothing now.
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
        device.needed_permille = needed;
        if needed <= 1000 {
            device.overloaded_since = Instant::NEVER;
            return;
        }
        device.overloaded_since = device.overloaded_since.min(now);
        if now.since(device.overloaded_since) < OVERLOAD_PATIENCE {
            return;
        }
        // Buffered bytes may outlast the slowness. Withdraw a contract when another would be late,
        // not before.
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

    /// Streams that were refused on a device ask again, the oldest first.
    pub(super) fn retry_refused(&mut self, device: DeviceId) {
        let now = self.now;
        let Some(entry) = self.devices.get_mut(&device) else {
            return;
        };
        if entry.refused.is_empty() {
            return;
        }
        let starts = entry.refused.iter().any(|id| {
            let stream = self.streams.get(id.0);
            stream.is_some_and(|stream| now.since(stream.refused_at) < STARTS_FOR)
        });
        let wait = if starts { START_AGAIN } else { ASK_AGAIN };
        if now.since(entry.refused_asked) < wait {
            return self.block(device);
        }
        entry.refused_asked = now;
        self.forget_left(device);
        let mut session = None;
        // The layers of a cut ask together.
        while let Some(&id) = (self.devices.get(&device)).and_then(|entry| entry.refused.first()) {
            let own = self.streams.get(id.0).map(|stream| stream.session);
            if session.is_some() && session != own {
                // The next seat asks at a later turn, when the one that has begun just now has its
                // first bytes: many that start together would all find room in the same moment.
                if let Some(entry) = self.devices.get_mut(&device) {
                    entry.refused_asked = now + (ASK_AGAIN - START_AGAIN);
                }
                return self.block(device);
            }
            session = own;
            if let Some(stream) = self.streams.get_mut(id.0) {
                stream.reanchor(self.now);
            }
            self.ask_admission(id);
            let stream = self.streams.get(id.0);
            if stream.is_none_or(|stream| stream.standing != Standing::Contract) {
                return;
            }
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
        // `low` fits. `high` does not, or is where the count stops.
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
        // Questions are about streams that start one after another, a second apart, as people start
        // them.
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
                is_rehearsed: false,
            });
        }
        self.dry_run(now, device, promised, &players)
    }
}

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
