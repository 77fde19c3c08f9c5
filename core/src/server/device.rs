// SPDX-License-Identifier: Apache-2.0
//! A device as the server knows it: its queue, the time that it takes, its volatile cache, and the
//! streams and writers that are served there.

use super::headers::UnreadHeaders;
use super::shares::Shares;
use super::state::*;
use super::*;
use crate::sched::{RefinedModel, admission};

/// A device that had nothing to do within this time keeps up.
const KEEPS_UP: Duration = Duration::from_s(2);

/// The holder of a claim on a device, by which a visit is known. Requests in a row for the same
/// holder are one visit; the one whose visit goes on is *the visitor*. A [`Claimant`] is the same
/// holder at one choice, a writer with its next write.
///
/// [`Claimant`]: super::fetch::Claimant
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
    /// When it last had nothing to do (see [`Device::keeps_up`]).
    pub satisfied_at: Instant,
    pub contracts: Vec<StreamId>,
    /// Streams that know their rate and were refused.
    pub refused: Vec<StreamId>,
    pub refused_asked: Instant,
    /// The part of its time that contracts needed when that was last looked at, in thousandths.
    pub needed_permille: u64,
    pub capacity_checked: Instant,
    /// Since when it is too slow for its contracts; NEVER: it is not.
    pub overloaded_since: Instant,
    /// Files with bytes that it does not have yet.
    pub writers: VecDeque<FileId>,
    /// The progress that all waiting writers to it without a claim have reached. Units: bytes,
    /// counted up.
    pub progress: u64,
    /// The rates that held-back writers keep to, all together. Units: bytes a second.
    pub kept_rate: u64,
    pub queue: Queue,
    pub visits: Visits,
    pub shares: Shares,
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
    /// At most half of its time is promised, and all deadlines can wait a while.
    pub is_at_ease: bool,
    /// At ease it was sent a read that a client without a contract waits for: nothing else goes to
    /// it before that client has its bytes, nor for a moment after.
    pub is_awaited: bool,
    pub rests_until: Instant,
    pub flight_cost: Duration,
    /// The deadline of each request with it.
    pub flight_deadlines: Vec<Instant>,
    pub demands: VecDeque<Demand>,
    pub headers: UnreadHeaders,
    /// A request could not go to the device: the timer looks at it again.
    pub blocked: bool,
    /// It could not get buffers.
    pub starved: bool,
}

/// The end of a write that was sent to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WriteEnd {
    pub file: FileId,
    pub offset: u64,
}

/// The visits to a device, of holders of claims and of others, and whose turn it is.
/// [`choose`](crate::sched::choose) says how long they may be.
#[derive(Clone, Debug, Default)]
pub(super) struct Visits {
    /// None: the last request was for best effort, or the visitor lost its claim.
    pub visitor: Option<Visitor>,
    /// The bytes that it got in this visit.
    pub given: u64,
    /// Best-effort streams that fetch ahead.
    pub background: VecDeque<StreamId>,
    /// Bytes the first of `background` got in this visit.
    pub background_given: u64,
    pub best_effort_served: Instant,
    /// The last read without a contract was served since it had waited for long.
    pub is_out_of_order: bool,
    /// Where the last write ended: the next one goes on there, or begins another visit.
    pub write_end: Option<WriteEnd>,
    /// Written in this visit. Units: bytes.
    pub write_given: u64,
    /// Whether the turn of requests without a contract or claim is the writers' now, or the
    /// readers'; and the time that it has had.
    pub writers_turn: bool,
    pub turn_given: Duration,
}

impl Visits {
    /// The next request is for this holder of a claim: its visit goes on, or begins.
    pub(super) fn begin(&mut self, visitor: Visitor) {
        if self.visitor != Some(visitor) {
            self.visitor = Some(visitor);
            self.given = 0;
        }
    }

    /// The visitor, if it is this one, has lost its claim.
    fn end(&mut self, visitor: Visitor) {
        self.visitor = self.visitor.filter(|&other| other != visitor);
    }
}

/// Requests that ended since the model was last corrected.
#[derive(Clone, Debug, Default)]
pub(super) struct Learning {
    /// Of the requests that ended since it last had nothing to do: cost by the calibration alone,
    /// and time taken.
    pub batch_calibrated: Duration,
    pub batch_taken: Duration,
    /// Until then the model learns from requests in lots, since some of them write. Of those that
    /// ended: their time by the calibration, and the time taken.
    pub mixed_until: Instant,
    pub mixed_calibrated: Duration,
    pub mixed_taken: Duration,
    pub mixed_count: u32,
    /// Time that it seems to have saved and still owes: bytes in its memory, which it will write
    /// beside later requests.
    pub mixed_owed: Duration,
}

/// The volatile cache of a drive, as far as it can be known.
#[derive(Clone, Debug)]
pub(super) struct Medium {
    /// Bytes that a drive with a volatile cache took since its last flush. Units: bytes.
    pub unflushed: u64,
    /// When the medium will have those bytes, as far as can be known.
    pub free_at: Instant,
    /// Since when a flush is under way.
    pub flushing_since: Option<Instant>,
    /// No other request was with it meanwhile.
    pub flushes_alone: bool,
    /// It can flush.
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
    /// The bytes of `bytes`, of both classes, and of `write_bytes` that lay in gaps between wanted
    /// bytes.
    pub read_bridged: u64,
    /// Fetched ahead of readers that have left these bytes unread.
    pub unread_bytes: u64,
    pub write_bridged: u64,
    /// Turns in which it was sent something.
    pub batch_count: u64,
    /// Flushes of its volatile cache.
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

/// How long after a write the model learns from requests in lots, and the time of a lot by the
/// calibration.
const MIXED_FOR: Duration = Duration::from_s(2);
const MIXED_SPAN: Duration = Duration::from_s(2);
/// The most of a lot's time that is carried over to the next.
const MIXED_OWED: Duration = Duration::from_s(4);
/// The most time of writes that the medium is believed to owe, and the most of it that counts when
/// the server chooses the next request.
const OWED_MAX: Duration = Duration::from_s(10);
const OWED_COUNTED: Duration = Duration::from_s(2);
/// Requests wait for a flush no longer than this.
const FLUSH_WAIT: Duration = Duration::from_s(2);
/// Fewer bytes are not worth a flush. Units: bytes.
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
            needed_permille: 0,
            capacity_checked: Instant::ZERO,
            overloaded_since: Instant::NEVER,
            writers: VecDeque::new(),
            progress: 0,
            kept_rate: 0,
            queue: Queue::default(),
            visits: Visits::default(),
            shares: Shares::default(),
            learning: Learning::default(),
            medium: Medium::default(),
            counts: Counts::default(),
        }
    }

    /// Whether it positions. False: it is flash, where order costs nothing.
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

    /// It had nothing to do a moment ago: it is fast enough for all its readers, with contracts or
    /// without.
    pub(super) fn keeps_up(&self, now: Instant) -> bool {
        now.since(self.satisfied_at) <= KEEPS_UP
    }

    /// Move a contract from one stream to another; it keeps its age.
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
        self.visits.end(Visitor::Reader(from));
    }

    /// End a stream's contract.
    pub(super) fn break_promise(&mut self, id: StreamId) {
        self.contracts.retain(|&other| other != id);
        self.visits.end(Visitor::Reader(id));
    }

    /// The server fetches nothing for the stream from here any more.
    pub(super) fn forget(&mut self, id: StreamId) {
        self.break_promise(id);
        self.visits.background.retain(|&other| other != id);
    }

    /// A request without a contract or claim was sent.
    pub(super) fn turn_taken(&mut self, writes: bool, cost: Duration) {
        if self.visits.writers_turn != writes {
            self.visits.writers_turn = writes;
            self.visits.turn_given = Duration::ZERO;
        }
        self.visits.turn_given += cost;
    }

    /// Learn from the time that a request took, or a few together. A drive with a volatile cache is
    /// quick at a write and slow afterwards, when it writes those bytes to the medium beside other
    /// requests: only all of them together show its speed. A drive that seems quicker than its
    /// calibration is not: it still has to write the bytes in its cache.
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
        // It still owes the time that it saved.
        let owed = (self.learning.mixed_owed + calibrated) - taken;
        let taken = (taken - self.learning.mixed_owed).max(calibrated);
        self.learning.mixed_owed = owed.min(MIXED_OWED);
        for _ in 0..count {
            self.model
                .observed(Duration(calibrated.0 / count), Duration(taken.0 / count));
        }
    }

    /// It takes writes into its volatile cache and writes them to the medium later, beside the
    /// reads of that time.
    pub(super) fn defers_writes(&self) -> bool {
        self.positions() && self.model.has_memory()
    }

    /// Time that the medium still needs for bytes that the drive has taken: readers lose it.
    pub(super) fn owes(&self, now: Instant) -> Duration {
        self.medium.free_at.since(now)
    }

    /// Whether to flush the drive before a read. Else it would go back and forth between the reads
    /// and the bytes that it still has to write, at times of its own choosing; a flush writes them
    /// all in one go.
    pub(super) fn is_to_flush(&self) -> bool {
        self.medium.can_flush
            && self.medium.flushing_since.is_none()
            && self.medium.unflushed >= FLUSH_BYTES
    }

    /// Reckon the medium's backlog after a request; its `cost` was expected.
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

    /// Requests wait for a flush: one is under way, and not for so long that it is better
    /// forgotten.
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
        // The cache may still have bytes that were sent meanwhile.
        if self.medium.flushes_alone {
            self.medium.free_at = now;
            self.counts.busy += taken;
            if now < self.learning.mixed_until + MIXED_SPAN {
                self.learning.mixed_taken += taken;
            }
        }
    }

    /// Whether the requests with it would be in time if one more of `bytes` went before all of
    /// them: a device orders its queue by position, and others overtake a request that waits in it
    /// for as long as they come. A request that is late already does not count.
    pub(super) fn may_be_overtaken(&self, now: Instant, bytes: u64) -> bool {
        let done = self.free_at(now);
        let overtaken = done + self.model.read(u64::MAX, bytes);
        !self
            .queue
            .flight_deadlines
            .iter()
            .any(|&deadline| deadline >= done && deadline < overtaken)
    }

    /// When it can turn to another request: if it has readers, not before the medium has the bytes
    /// that the drive took.
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

    /// When all requests sent to it will be done, at least now.
    pub(super) fn free_at(&self, now: Instant) -> Instant {
        (self.queue.service_started + self.queue.flight_cost).max(now)
    }
}
