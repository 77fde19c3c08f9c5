// SPDX-License-Identifier: Apache-2.0
//! A device as the server knows it: its queue, the time that it takes, its volatile cache, and the
//! streams and writers that are served there.

use super::headers::UnreadHeaders;
use super::state::*;
use super::*;
use crate::sched::{RefinedModel, admission};

/// A device that had nothing to do within so long keeps up.
const KEEPS_UP: Duration = Duration::from_s(2);

/// The holder of a claim on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visitor {
    /// A reader under contract.
    Reader(StreamId),
    /// A file that is written at a rate of its own.
    Writer(FileId),
}

/// A device and its queue.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub model: RefinedModel,
    pub gaps: super::gaps::Gaps,
    /// When nobody wanted anything of it, last (see [`Device::keeps_up`]).
    pub satisfied_at: Instant,
    pub contracts: Vec<StreamId>,
    /// Streams that know their rate and were refused.
    pub refused: Vec<StreamId>,
    pub refused_asked: Instant,
    pub capacity_checked: Instant,
    /// Since when it cannot do what was promised; NEVER: it can.
    pub overloaded_since: Instant,
    /// Files with bytes that it does not have yet.
    pub writers: VecDeque<FileId>,
    /// As far as all writers to it without a claim have come. Units: bytes, counted up.
    pub progress: u64,
    /// The rates that writers keep to although they were held back, all together. Units: bytes a
    /// second.
    pub kept_rate: u64,
    pub queue: Queue,
    pub visits: Visits,
    pub learning: Learning,
    pub medium: Medium,
    pub counts: Counts,
}

/// Requests at a device, and those that wait for it.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub head: u64,
    /// When the request now in service started.
    pub service_started: Instant,
    pub flight_count: u32,
    pub flight_bytes: u64,
    /// Sent since it last had nothing to do.
    pub batch_bytes: u64,
    /// Little of it is promised, and everybody can wait a while.
    pub is_at_ease: bool,
    /// At ease it was sent a read that somebody without a promise waits for: nothing else before
    /// that client has it, nor for a moment after.
    pub is_awaited: bool,
    pub rests_until: Instant,
    pub flight_cost: Duration,
    /// When each request with it is wanted.
    pub flight_deadlines: Vec<Instant>,
    pub demands: VecDeque<Demand>,
    pub headers: UnreadHeaders,
    /// Somebody wants the device and could not have it: look again without being asked.
    pub blocked: bool,
    /// It could not get buffers.
    pub starved: bool,
}

/// The turns of those that are served at a device.
#[derive(Clone, Debug, Default)]
pub(super) struct Visits {
    /// The claimant with the visit that goes on.
    pub visitor: Option<Visitor>,
    /// The bytes that it got in this visit.
    pub given: u64,
    /// Best-effort streams that fetch ahead.
    pub background: VecDeque<StreamId>,
    /// Bytes the first of `background` got in this visit.
    pub background_given: u64,
    pub best_effort_served: Instant,
    /// Where the write that goes on ended: file and offset.
    pub write_goes_on: Option<(FileId, u64)>,
    /// Written in this visit. Units: bytes.
    pub write_given: u64,
    /// Of those without a promise, writers have their turn now, and so much of it they or the
    /// readers had.
    pub writers_turn: bool,
    pub turn_given: Duration,
}

/// Requests that ended since the model was last corrected.
#[derive(Clone, Debug, Default)]
pub(super) struct Learning {
    /// Of what ended since it last had nothing to do: cost by the calibration alone, and time
    /// taken.
    pub batch_calibrated: Duration,
    pub batch_taken: Duration,
    /// Requests are learned from together until then, since some of them write; those that ended,
    /// by the calibration and in truth.
    pub mixed_until: Instant,
    pub mixed_calibrated: Duration,
    pub mixed_taken: Duration,
    pub mixed_count: u32,
    /// Time that it was quicker than it can be: bytes in its memory, that it will write beside what
    /// comes.
    pub mixed_owed: Duration,
}

/// The volatile cache of a drive, as far as it can be known.
#[derive(Clone, Debug)]
pub(super) struct Medium {
    /// Of a drive with a memory of its own: the bytes that it took since it was last told to flush.
    /// Units: bytes.
    pub unflushed: u64,
    /// When the medium will have that, as far as can be known.
    pub free_at: Instant,
    /// It is told to, since then.
    pub flushing_since: Option<Instant>,
    /// Nothing else was asked of it meanwhile.
    pub flushes_alone: bool,
    /// It can be told to.
    pub can_flush: bool,
}

/// For the ledger.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub request_count: [u64; 2],
    pub bytes: [u64; 2],
    /// Requests that wrote, and their bytes.
    pub write_count: u64,
    pub write_bytes: u64,
    /// The parts of `bytes`, of both kinds, and of `write_bytes` that lay between wanted bytes.
    pub read_bridged: u64,
    pub write_bridged: u64,
    /// Turns in which it was sent something.
    pub batch_count: u64,
    /// How often it was told to flush.
    pub flush_count: u64,
    pub busy: Duration,
}

impl Default for Medium {
    fn default() -> Medium {
        Medium {
            unflushed: 0,
            free_at: Instant::ZERO,
            flushing_since: None,
            flushes_alone: false,
            can_flush: true,
        }
    }
}

/// So long after a write requests are learned from together, and so many of them.
const MIXED_FOR: Duration = Duration::from_s(2);
const MIXED_SPAN: Duration = Duration::from_s(2);
/// The time of such a lot that is carried over to the next at most.
const MIXED_OWED: Duration = Duration::from_s(4);
/// The time of writes that the medium is believed to have before it at most, and the part of it
/// that counts when the next request is chosen.
const OWED_MAX: Duration = Duration::from_s(10);
const OWED_COUNTED: Duration = Duration::from_s(2);
/// Longer than that nobody waits for a flush.
const FLUSH_WAIT: Duration = Duration::from_s(2);
/// Less than that is not worth a flush. Units: bytes.
const FLUSH_BYTES: u64 = 4 << 20;

impl Device {
    pub(super) fn new(model: DeviceModel) -> Device {
        Device {
            model: RefinedModel::new(model),
            gaps: super::gaps::Gaps::default(),
            satisfied_at: Instant::ZERO,
            contracts: Vec::new(),
            refused: Vec::new(),
            refused_asked: Instant::ZERO,
            capacity_checked: Instant::ZERO,
            overloaded_since: Instant::NEVER,
            writers: VecDeque::new(),
            progress: 0,
            kept_rate: 0,
            queue: Queue::default(),
            visits: Visits::default(),
            learning: Learning::default(),
            medium: Medium::default(),
            counts: Counts::default(),
        }
    }

    /// False: it is flash, where order costs nothing.
    pub(super) fn positions(&self) -> bool {
        self.model.base.read.fixed >= Duration::from_ms(1)
    }

    /// Requests so far.
    pub(super) fn sent_count(&self) -> u64 {
        self.counts.request_count.iter().sum::<u64>() + self.counts.write_count
    }

    /// As the dry run of admission sees it.
    pub(super) fn described(
        &self,
        now: Instant,
        limits: &Limits,
        policy: &Policy,
    ) -> admission::Device<'_> {
        admission::Device {
            model: &self.model,
            free_at: self.free_at(now),
            head: self.queue.head,
            chunk: limits.chunk_bytes_max,
            margin_permille: policy.margin_permille,
        }
    }

    /// The stream has a claim on it.
    pub(super) fn promise(&mut self, id: StreamId) {
        self.visits.background.retain(|&other| other != id);
        if !self.contracts.contains(&id) {
            self.contracts.push(id);
        }
    }

    /// It had nothing to do a moment ago: it is fast enough for all its readers, whether promised
    /// or not.
    pub(super) fn keeps_up(&self, now: Instant) -> bool {
        now.since(self.satisfied_at) <= KEEPS_UP
    }

    /// A promise goes from one stream to another, and is as old as it was.
    pub(super) fn move_promise(&mut self, from: StreamId, to: StreamId) {
        self.visits
            .background
            .retain(|&other| other != from && other != to);
        self.refused.retain(|&other| other != to);
        for id in &mut self.contracts {
            if *id == from {
                *id = to;
            }
        }
        if self.visits.visitor == Some(Visitor::Reader(from)) {
            self.visits.visitor = None;
        }
    }

    /// It has none any more.
    pub(super) fn break_promise(&mut self, id: StreamId) {
        self.contracts.retain(|&other| other != id);
        if self.visits.visitor == Some(Visitor::Reader(id)) {
            self.visits.visitor = None;
        }
    }

    /// The stream is not fetched from here any more.
    pub(super) fn forget(&mut self, id: StreamId) {
        self.break_promise(id);
        self.visits.background.retain(|&other| other != id);
    }

    /// A claim was served; as long as it is the same one, that is one visit.
    pub(super) fn visited(&mut self, who: Visitor, bytes: u64) {
        if self.visits.visitor != Some(who) {
            self.visits.visitor = Some(who);
            self.visits.given = 0;
        }
        self.visits.given += bytes;
    }

    /// A client without a promise was sent a request.
    pub(super) fn turn_taken(&mut self, writes: bool, cost: Duration) {
        if self.visits.writers_turn != writes {
            self.visits.writers_turn = writes;
            self.visits.turn_given = Duration::ZERO;
        }
        self.visits.turn_given += cost;
    }

    /// A request took its time, or a few together. A drive that writes into a memory of its own
    /// first is quick then and slow afterwards, when it brings that to the medium beside somebody
    /// else's requests: only together they tell its speed. A drive that seems quicker than its
    /// calibration is not: it still has to write the bytes in that memory.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        calibrated: Duration,
        taken: Duration,
        wrote: bool,
    ) {
        if wrote {
            self.learning.mixed_until = now + MIXED_FOR;
        }
        if now >= self.learning.mixed_until {
            self.learning.mixed_count = 0;
            self.learning.mixed_calibrated = Duration::ZERO;
            self.learning.mixed_taken = Duration::ZERO;
            self.learning.mixed_owed = Duration::ZERO;
            return self.model.observed(calibrated, taken);
        }
        self.learning.mixed_calibrated += calibrated;
        self.learning.mixed_taken += taken;
        self.learning.mixed_count += 1;
        if self.learning.mixed_calibrated < MIXED_SPAN {
            return;
        }
        let count = u64::from(core::mem::take(&mut self.learning.mixed_count));
        let calibrated = core::mem::take(&mut self.learning.mixed_calibrated);
        let taken = core::mem::take(&mut self.learning.mixed_taken);
        // The time that it saved it still owes.
        let owed = (self.learning.mixed_owed + calibrated) - taken;
        let taken = (taken - self.learning.mixed_owed).max(calibrated);
        self.learning.mixed_owed = owed.min(MIXED_OWED);
        for _ in 0..count {
            self.model
                .observed(Duration(calibrated.0 / count), Duration(taken.0 / count));
        }
    }

    /// It takes writes into a memory of its own and brings them to the medium later, beside what is
    /// read then.
    pub(super) fn defers_writes(&self) -> bool {
        self.positions() && self.model.has_memory()
    }

    /// Time that the medium still needs for bytes that the drive has taken: a reader loses it.
    pub(super) fn owes(&self, now: Instant) -> Duration {
        self.medium.free_at.since(now)
    }

    /// Before it is read from: it would go back and forth between what is read and what it has
    /// still to write, at times of its own choosing. Told to write all that first it does so in one
    /// go.
    pub(super) fn is_to_flush(&self) -> bool {
        self.medium.can_flush
            && self.medium.flushing_since.is_none()
            && self.medium.unflushed >= FLUSH_BYTES
    }

    /// A request took its time; `cost` was expected.
    pub(super) fn count_for_medium(
        &mut self,
        now: Instant,
        flight: &super::fetch::Served,
        taken: Duration,
    ) {
        if !self.defers_writes() {
            return;
        }
        let began = now.before(taken);
        if flight.wrote {
            let done = self.medium.free_at.max(began) + flight.cost;
            self.medium.free_at = done.min(now + OWED_MAX);
            self.medium.unflushed += flight.bytes;
        } else if self.medium.free_at > began {
            self.medium.free_at = (self.medium.free_at + taken).min(now + OWED_MAX);
        }
    }

    /// A flush is under way, and not for so long that it had better be forgotten.
    pub(super) fn is_waited_for(&self, now: Instant) -> bool {
        self.medium
            .flushing_since
            .is_some_and(|since| now.since(since) < FLUSH_WAIT)
    }

    pub(super) fn begin_flush(&mut self, now: Instant) {
        self.medium.unflushed = 0;
        self.counts.flush_count += 1;
        self.medium.flushing_since = Some(now);
        self.medium.flushes_alone = self.queue.flight_count == 0;
    }

    pub(super) fn end_flush(&mut self, now: Instant, outcome: Flushed) {
        let taken = self
            .medium
            .flushing_since
            .take()
            .map_or(Duration::ZERO, |since| now.since(since));
        match outcome {
            Flushed::Done => {}
            Flushed::Later => return,
            Flushed::Never => {
                self.medium.can_flush = false;
                return;
            }
        }
        // It may still have bytes that were sent meanwhile.
        if self.medium.flushes_alone {
            self.medium.free_at = now;
            self.counts.busy += taken;
            if now < self.learning.mixed_until + MIXED_SPAN {
                self.learning.mixed_taken += taken;
            }
        }
    }

    /// Whether the requests with it would be in time if one more of `bytes` went before all of
    /// them: a device orders its queue by position, and a request that waits in it is overtaken for
    /// as long as others come. A request that is late already is not waited for.
    pub(super) fn may_be_overtaken(&self, now: Instant, bytes: u64) -> bool {
        let done = self.free_at(now);
        let overtaken = done + self.model.read(u64::MAX, bytes);
        !self
            .queue
            .flight_deadlines
            .iter()
            .any(|&deadline| deadline >= done && deadline < overtaken)
    }

    /// When it can turn to something else: where somebody reads, with all on the medium that it has
    /// taken.
    pub(super) fn turns_at(&self, now: Instant) -> Instant {
        let free_at = self.free_at(now);
        let is_read = !self.contracts.is_empty()
            || !self.queue.demands.is_empty()
            || !self.visits.background.is_empty();
        match self.medium.can_flush && is_read {
            true => free_at.max(self.medium.free_at.min(now + OWED_COUNTED)),
            false => free_at,
        }
    }

    /// When everything sent to it will be done, at least now.
    pub(super) fn free_at(&self, now: Instant) -> Instant {
        (self.queue.service_started + self.queue.flight_cost).max(now)
    }
}
