// SPDX-License-Identifier: Apache-2.0
//! The turns of the requests outside the read-ahead of contracts: demands of clients that wait,
//! bytes fetched ahead for streams without a contract, and writes that nothing promises. A demand
//! may be under contract.

use super::fetch::Run;
use super::shares::User;
use super::state::*;
use super::writeback::NextWrite;
use super::*;
use crate::sched::BestEffortClaim;

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
/// A demand that has waited this long gets every second request without a contract, regardless of
/// the use of its session: where contracts leave little of a device, a second of its share takes
/// minutes. Clients give a request up after about a minute.
const PATIENCE_MAX: Duration = Duration::from_s(10);
/// Demands looked at for the nearest.
pub(super) const DEMANDS_WEIGHED: usize = 64;
/// A turn of writers or of readers, when nothing is promised to either and both want the device.
const BEST_EFFORT_TURN: Duration = Duration::from_ms(200);

/// The next request outside the read-ahead of contracts. A demand may be under contract: a hole
/// that its contract will not fetch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// Index into the device's demands.
    Demand(usize),
    Background(StreamId),
    Write(NextWrite),
}

impl Server {
    /// The next turn of the requests without a contract.
    pub(super) fn best_effort_turn(&self, id: DeviceId, device: &Device) -> Option<Turn> {
        let reads = if device.queue.starved {
            None
        } else {
            self.reads_turn(id, device)
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

    /// The next turn of the reads without a contract. A session that has used less than its share
    /// goes first. Bytes that are fetched ahead for it go before waiting reads of heavier sessions;
    /// otherwise each of its short reads would wait behind their long ones.
    fn reads_turn(&self, id: DeviceId, device: &Device) -> Option<Turn> {
        if let Some(index) = self.waited_long(device) {
            return Some(Turn::Demand(index));
        }
        // A stream that is fetched ahead gets a visit of its own: it waits for the end of
        // another's, or both would be visited in pieces.
        let visited = self.visited_in_background(id, device);
        let demand = self.pick_demand(device, visited);
        let first = demand.and_then(|index| device.queue.demands.get(index));
        let shares = &device.shares;
        let ahead = first
            .filter(|demand| demand.due == Instant::NEVER)
            .and_then(|demand| {
                let all = device.visits.background.iter().copied();
                let mut before = all.filter(|stream| {
                    self.user_of(*stream)
                        .is_some_and(|user| shares.goes_first(self.now, user, demand.user))
                });
                before.find(|stream| self.background_wants(id, device, *stream))
            });
        ahead
            .map(Turn::Background)
            .or(demand.map(Turn::Demand))
            .or(visited.map(Turn::Background))
            .or_else(|| self.pick_background(id, device).map(Turn::Background))
    }

    fn user_of(&self, id: StreamId) -> Option<User> {
        self.streams.get(id.0).map(|stream| User::of(id, stream))
    }

    pub(super) fn best_effort_claim(&mut self, id: DeviceId) -> Option<BestEffortClaim> {
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
                        let next = self.next_of_frame(stream, id, chunk)?;
                        (next.range.start.0, chunk, next.file)
                    }
                    _ => {
                        let start = stream.origin.saturating_add(stream.fetched);
                        (start, chunk, stream.file)
                    }
                }
            }
        };
        let physical = self.files.get(&file)?.place(range_start).physical;
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

    /// The oldest demand, if it has waited for long, nothing promised waits, and the request before
    /// was of the usual order: a queue that is as long as that must not stop light readers.
    fn waited_long(&self, device: &Device) -> Option<usize> {
        let demands = &device.queue.demands;
        let is_promised = |demand: &Demand| demand.due != Instant::NEVER;
        let (index, oldest) =
            (demands.iter().enumerate()).min_by_key(|(_, demand)| demand.since)?;
        let is_due = oldest.has_waited_long(self.now) && !device.visits.is_out_of_order;
        (is_due && !demands.iter().any(is_promised)).then_some(index)
    }

    /// The demand to serve in the usual order: one under contract, else of those whose sessions go
    /// first one whose patience is over, else the nearest ahead. While a stream is visited, demands
    /// of the other streams with visits wait.
    fn pick_demand(&self, device: &Device, visited: Option<StreamId>) -> Option<usize> {
        let promised = device.queue.demands.iter().map(|demand| demand.due).min()?;
        if promised != Instant::NEVER {
            return device
                .queue
                .demands
                .iter()
                .position(|demand| demand.due == promised);
        }
        let shares = &device.shares;
        let demands = &device.queue.demands;
        let goes_first = |one: User, other: User| shares.goes_first(self.now, one, other);
        let visited = visited.and_then(|id| Some((id, self.user_of(id)?)));
        let breaks_in =
            |demand: &Demand| visited.is_some_and(|(_, visited)| goes_first(demand.user, visited));
        let is_broken = demands.iter().any(breaks_in);
        // Of no account while a stream is visited.
        let all_heavy = visited.is_none()
            && demands
                .iter()
                .all(|demand| shares.is_heavy(self.now, demand.user));
        let may = |(_, demand): &(usize, &Demand)| match (visited, demand.stream) {
            _ if is_broken => breaks_in(demand),
            (Some((id, _)), Some(stream)) if id == stream => true,
            // Nobody breaks into the visit of a reader that goes first.
            (Some((_, visited)), _) if goes_first(visited, demand.user) => false,
            (Some(_), Some(stream)) => {
                !device.visits.background.contains(&stream)
                    || self.now.since(demand.since) > VISIT_PATIENCE
            }
            (Some(_), None) => true,
            (None, _) => all_heavy || !shares.is_heavy(self.now, demand.user),
        };
        let mut allowed = demands.iter().enumerate().filter(may);
        let (index, first) = allowed.next()?;
        let ahead = |demand: &Demand| {
            let file = self.files.get(&demand.file);
            let physical = file.map_or(0, |file| file.place(demand.range.start.0).physical);
            physical.wrapping_sub(device.queue.head)
        };
        let picked = if self.now.since(first.since) > DEMAND_PATIENCE {
            (index, first)
        } else {
            core::iter::once((index, first))
                .chain(allowed)
                .take(DEMANDS_WEIGHED)
                .min_by_key(|(_, demand)| ahead(demand))?
        };
        // Another stream of that session may have used less of the session's share.
        let of_session = |user: User| user.session == picked.1.user.session;
        let before = demands
            .iter()
            .position(|demand| of_session(demand.user) && goes_first(demand.user, picked.1.user));
        Some(before.unwrap_or(picked.0))
    }

    /// The best-effort stream whose visit goes on and that wants more.
    fn visited_in_background(&self, device_id: DeviceId, device: &Device) -> Option<StreamId> {
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
            && self.next_place(stream, device_id, file).left > 0
    }

    /// Read-ahead without a contract never takes the last buffers.
    pub(super) fn has_buffers_to_spare(&self) -> bool {
        self.cache.takeable_count() > self.limits.slot_count / 32
    }

    /// Send a request for this reader, and charge it if it is without a contract.
    fn fetch_for(
        &mut self,
        (device, user): (DeviceId, User),
        (file, range): (FileId, ByteRange),
        due: Instant,
        actions: &mut Actions,
    ) -> Run {
        let class = match due {
            Instant::NEVER => IoClass::BestEffort,
            _ => IoClass::RealTime,
        };
        let cost_of = |server: &Server| {
            let device = server.devices.get(&device);
            device.map_or(Duration::ZERO, |device| device.queue.flight_cost)
        };
        let before = cost_of(self);
        let run = self.fetch_run(file, range, class, due, None, actions);
        let cost = cost_of(self) - before;
        if class == IoClass::BestEffort
            && let Some(device) = self.devices.get_mut(&device)
        {
            device.shares.charge(self.now, user, cost);
        }
        run
    }

    pub(super) fn fetch_best_effort(&mut self, id: DeviceId, actions: &mut Actions) -> bool {
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
            let is_out_of_order = self.waited_long(device) == Some(index);
            let together = self.with_those_behind(device, &demand);
            Some((demand, together, is_out_of_order))
        });
        let Some((demand, (range, bridged), is_out_of_order)) = found else {
            return false;
        };
        let chunk = self.limits.chunk_bytes_max;
        let run_range = ByteRange::new(range.start.0, range.length.0.min(chunk));
        let (who, what) = ((id, demand.user), (demand.file, run_range));
        let run = self.fetch_for(who, what, demand.due, actions);
        let Some(device) = self.devices.get_mut(&id) else {
            return false;
        };
        device.visits.visitor = None;
        device.queue.is_awaited |= device.queue.is_at_ease && matches!(run, Run::Sent(_));
        match run {
            Run::Covered(end) | Run::Sent(end) => {
                device.visits.best_effort_served = now;
                device.visits.is_out_of_order = is_out_of_order;
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
        let user = User::of(stream_id, stream);
        let next = self.next_fetch(stream, id, bytes.min(self.limits.chunk_bytes_max));
        let run = next.map_or(Run::Busy, |next| {
            self.fetch_for((id, user), (next.file, next.range), Instant::NEVER, actions)
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
        let Some(NextFetch { range, worth, .. }) = next else {
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
                device.visits.is_out_of_order = false;
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

    /// A waiting read lacks these bytes. Unless its contract is about to fetch them, ask the
    /// device.
    pub(super) fn demand(&mut self, key: u32, id: FileId, missing: ByteRange) {
        let (Some(read), Some(file)) = (self.reads.get(key), self.files.get(&id)) else {
            return;
        };
        let device_id = file.device;
        if let Some(stream) = read.stream.and_then(|stream| self.streams.get(stream.0))
            && stream.standing == Standing::Contract
            && self.will_fetch(stream, id, missing)
        {
            return self.touch(device_id);
        }
        let (due, since) = (read.due.at_device, read.arrived);
        let user = User {
            session: read.session,
            stream: read.stream,
        };
        let Some(device) = self.devices.get_mut(&device_id) else {
            return;
        };
        let stream = user
            .stream
            .filter(|stream| device.visits.background.contains(stream));
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
                user,
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
        if self.next_place(stream, device, file).left == 0 {
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
}

impl Demand {
    /// Whether it may go before all others without a contract.
    fn has_waited_long(&self, now: Instant) -> bool {
        now.since(self.since) > PATIENCE_MAX
    }
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
pub(super) fn run_is_progress(run: &Run, moved: u64) -> bool {
    matches!(run, Run::Sent(_)) || moved > 0
}
