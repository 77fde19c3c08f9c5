// SPDX-License-Identifier: Apache-2.0
//! The next claim on a device.
//!
//! A request in service cannot be called back, and moving between streams costs positioning, so the
//! device is given out in *visits*: a stream keeps it chunk by chunk until it is full or until
//! another one's deadline says stop. The next stream is the nearest by position among those whose
//! going first leaves every earlier deadline feasible; when none does, the earliest deadline goes.
//! Visits never shrink because things are late: on a device with positioning costs, smaller
//! requests are how lateness becomes collapse.

use super::RefinedModel;
use crate::units::*;
use alloc::vec::Vec;

/// One stream's claim on the device: a reader's, or a writer's, which is the same mirrored. A
/// reader's buffers are emptied by its player and filled by the device, a writer's are filled by
/// its client and emptied by the device; a full buffer of the one is an empty one of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// It writes.
    pub writes: bool,
    /// When the first byte not yet asked of the device must be there; of a writer, the oldest not
    /// yet given to it.
    pub deadline: Instant,
    /// How fast it is consumed, or written.
    pub rate: BytesPerSecond,
    /// Where that byte lies on the device.
    pub physical: u64,
    /// How much more its buffers can take now; of a writer: its dirty bytes. Units: bytes.
    pub room: u64,
    /// How much its buffers can take in all; of a writer: the bytes that may be dirty. Units:
    /// bytes.
    pub cap: u64,
    /// How much it still has to read or write. Units: bytes.
    pub left: u64,
    /// A client waits for the first of these bytes: they go before the device is left idle, however
    /// few they are.
    pub is_awaited: bool,
}

/// Everything the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    /// The device.
    pub model: &'a RefinedModel,
    /// When it will have done all that was sent to it; at least now.
    pub free_at: Instant,
    /// Where its last request ends.
    pub head: u64,
    /// Streams under contract, and writers.
    pub claims: &'a [Claim],
    /// The claim whose visit is going on: index into `claims`.
    pub visiting: Option<usize>,
    /// The bytes that it got in this visit so far. Units: bytes.
    pub visit_given: u64,
    /// Longest single request. Units: bytes.
    pub chunk: u64,
    /// Best effort wants the device: the cost of its next request, and how long it has not been
    /// served.
    pub best_effort: Option<BestEffortClaim>,
}

impl Load<'_> {
    /// The time that the transfer of a second of all claims takes.
    pub fn promised_a_second(&self) -> Duration {
        let rates = self.claims.iter();
        let needed = rates.map(|claim| self.model.transfer_of(claim.writes, claim.rate.0).0);
        Duration(needed.fold(0, u64::saturating_add))
    }
}

/// The claim of best effort.
#[derive(Clone, Copy, Debug)]
pub struct BestEffortClaim {
    /// Cost of its next request.
    pub cost: Duration,
    /// Since its last one.
    pub waited: Duration,
    /// True when that request follows on its last one without positioning.
    pub continues: bool,
    /// It can wait without harm: it is only asked because the device might have nothing else to do.
    pub can_rest: bool,
}

/// The claim that goes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The stream of this claim, one chunk.
    Stream(usize),
    /// One request outside the read-ahead of contracts: best effort, or a hole in it.
    BestEffort,
    /// None: all are full, or best effort must wait.
    Nobody,
}

/// Memory for [`choose`], so that it allocates nothing once warm.
#[derive(Clone, Debug, Default)]
pub struct Order {
    /// Claims by deadline.
    by_deadline: Vec<u32>,
    /// For each place in `by_deadline`: by how much all up to here could be delayed.
    slack: Vec<i64>,
    /// The claims with writers' deadlines put off.
    relaxed: Vec<Claim>,
}

/// Best effort gets a request through at least this often, when no deadline forbids it.
const BEST_EFFORT_PATIENCE: Duration = Duration::from_s(1);

/// And at least this often when deadlines forbid even that for long: some thousandths of the
/// device's time.
const BEST_EFFORT_LAST: Duration = Duration::from_ms(1500);

/// Positioning takes at most this part of an efficient visit, as one in so many.
const POSITIONING_PART: u64 = 10;

/// Visits are halved at most so often while many start at once.
const HALVINGS_MAX: u32 = 5;

/// A round has six fifths of the time that it needs.
const ROUND_FIFTHS: u128 = 6;

/// A visit gives at most so many tenths of a stream's buffers.
const VISIT_TENTHS: u64 = 7;

/// With best effort waiting a visit gives at least this part of them, as one in so many: visits are
/// rarer then, and leave it more.
const RARE_VISIT_PART: u64 = 2;

/// A visit is counted with no more time than this.
const VISIT_TIME_MAX: Duration = Duration::from_s(3600);

/// In a crowd of writers one is visited when it has this part of its buffers to write, as one in so
/// many, or enough for an efficient visit.
const RIPE_PART: u64 = 2;

/// The slack that is the reserve of all claims: this part of a round, as one in so many, or the
/// time of so many chunks if that is less.
const SLACK_RESERVE_PART: u64 = 4;
const SLACK_RESERVE_CHUNKS: u64 = 4;

/// Claims with deadlines within this part of a round, as one in so many, are as badly off as the
/// worst.
const EVEN_PART: u64 = 2;

/// With slack for fewer chunks than this the first claim goes, however short its visit.
const URGENT_CHUNKS: i64 = 2;

/// Best effort whose patience is over gets in where the slack is so many times its cost and this
/// part of a round, as one in so many: that is the reserve of the others, not given away for
/// patience's sake.
const PATIENCE_COSTS: u64 = 4;
const PATIENCE_PART: u64 = 2;

/// Share of a stream's buffers that stays filled before best effort is served, in hundredths.
const RESERVE_PERCENT: u64 = 40;

/// Writers need most of a device from so much of its time on, in thousandths.
const CROWD_PERMILLE: u64 = 600;

/// Only writers want the device, and these need most of it. Then all positioning counts: the writer
/// that is due first is visited until it has nothing left. The bytes that a drive with a memory
/// really writes in a second are not known so well that the time of a round would say how long a
/// visit must be.
fn is_crowd_of_writers(load: &Load<'_>) -> bool {
    let only_writers = load.best_effort.is_none_or(|asked| asked.can_rest)
        && load.claims.iter().all(|claim| claim.writes);
    let needed = load
        .claims
        .iter()
        .map(|claim| load.model.transfer_of(true, claim.rate.0).0);
    only_writers && needed.fold(0, u64::saturating_add) >= NS_PER_S / 1000 * CROWD_PERMILLE
}

/// The time of a round of all `claims` in which each visit gives the bytes that its stream consumes
/// in a round, so that they could go round for ever; with a fifth to spare.
fn round_time(load: &Load<'_>) -> Duration {
    let count = load.claims.len();
    let writers = load.claims.iter().filter(|claim| claim.writes).count();
    let positioning = load
        .model
        .step_of(false, count)
        .times((count - writers) as u64)
        + load.model.step_of(true, count).times(writers as u64);
    let per_second: u64 = load
        .claims
        .iter()
        .map(|claim| load.model.transfer_of(claim.writes, claim.rate.0).0)
        .fold(0, u64::saturating_add);
    let idle = NS_PER_S.saturating_sub(per_second);
    if idle == 0 {
        return Duration::MAX;
    }
    let ns = u128::from(positioning.0) * u128::from(NS_PER_S) / u128::from(idle) * ROUND_FIFTHS / 5;
    Duration(ns.min(u128::from(u64::MAX)) as u64)
}

/// By how much writers' deadlines are put off, when not all claims can be in time: the first that
/// is enough, or the last. Contracts of readers are kept regardless of writers; and among
/// themselves writers keep their order.
const RELAXATIONS: [Duration; 7] = [
    Duration::from_ms(500),
    Duration::from_s(1),
    Duration::from_s(2),
    Duration::from_s(4),
    Duration::from_s(8),
    Duration::from_s(30),
    Duration::from_s(3600),
];

/// Choose the next one. Total: any claims, in any state.
///
/// Cost: O(n log n) in the number of claims; allocates only while `order` grows.
pub fn choose(load: &Load<'_>, order: &mut Order) -> Choice {
    if !load.claims.iter().any(|claim| claim.writes) {
        return choose_among(load, false, order);
    }
    let is_crowd = is_crowd_of_writers(load);
    let load = &Load {
        best_effort: load.best_effort.filter(|_| !is_crowd),
        ..*load
    };
    if slack_of_all(load, order) >= 0 {
        return choose_among(load, is_crowd, order);
    }
    let mut relaxed = core::mem::take(&mut order.relaxed);
    for relaxation in RELAXATIONS {
        relaxed.clear();
        relaxed.extend(load.claims.iter().map(|claim| Claim {
            deadline: if claim.writes {
                claim.deadline + relaxation
            } else {
                claim.deadline
            },
            // Put off for other claims, not for an idle device: overdue it goes before the device
            // rests.
            is_awaited: claim.is_awaited || claim.writes && claim.deadline < load.free_at,
            ..*claim
        }));
        let load = Load {
            claims: &relaxed,
            ..*load
        };
        if slack_of_all(&load, order) >= 0 {
            break;
        }
    }
    // Nothing is spare then; best effort gets only enough to go on at all.
    let load = Load {
        claims: &relaxed,
        best_effort: load
            .best_effort
            .filter(|asked| asked.waited >= BEST_EFFORT_LAST),
        ..*load
    };
    let choice = choose_among(&load, is_crowd, order);
    order.relaxed = relaxed;
    choice
}

/// By how much all claims could be delayed, with visits by which they can go round for ever.
/// Negative: not all will be in time.
fn slack_of_all(load: &Load<'_>, order: &mut Order) -> i64 {
    let lengths = VisitLengths::of(load);
    sort_by_deadline(load.claims, order);
    lengths.fill_slack(load, 0, order)
}

/// By how much all claims could be delayed beyond their reserve: time for requests without a
/// deadline. Zero: there is none.
pub fn spare(load: &Load<'_>, order: &mut Order) -> Duration {
    let kept = slack_reserve(round_time(load), load.model.transfer(load.chunk));
    let kept = i64::try_from(kept).unwrap_or(i64::MAX);
    let spare = slack_of_all(load, order).saturating_sub(kept);
    Duration(u64::try_from(spare).unwrap_or(0))
}

/// Slack that is the reserve of all claims. Units: nanoseconds.
fn slack_reserve(round: Duration, chunk_time: Duration) -> u64 {
    (round.0 / SLACK_RESERVE_PART).min(SLACK_RESERVE_CHUNKS * chunk_time.0)
}

fn sort_by_deadline(claims: &[Claim], order: &mut Order) {
    order.by_deadline.clear();
    order.by_deadline.extend(0..claims.len() as u32);
    order
        .by_deadline
        .sort_unstable_by_key(|&index| (claims[index as usize].deadline, index));
}

/// The most that a visit gives in the long run.
fn visit_bytes_max(claim: &Claim) -> u64 {
    claim.cap * VISIT_TENTHS / 10
}

/// How long visits are.
#[derive(Clone, Copy, Debug)]
struct VisitLengths {
    /// One round of all of them, in the long run.
    round: Duration,
    count: usize,
    chunk: u64,
}

impl VisitLengths {
    fn of(load: &Load<'_>) -> VisitLengths {
        VisitLengths {
            round: round_time(load),
            count: load.claims.len(),
            chunk: load.chunk,
        }
    }

    /// The bytes that a visit must give so that all of them can go round for ever.
    fn needed_bytes(&self, claim: &Claim) -> u64 {
        let round_bytes = claim.rate.bytes_in(self.round).0.max(self.chunk);
        let most = visit_bytes_max(claim).min(claim.left);
        round_bytes.min(most).max(1)
    }

    /// The bytes that a visit gives while many start at once: a part of those needed in the long
    /// run.
    fn visit_bytes(&self, claim: &Claim, halvings: u32) -> u64 {
        let needed = self.needed_bytes(claim);
        (needed >> halvings).max(self.chunk.min(needed))
    }

    fn visit_time(&self, load: &Load<'_>, claim: &Claim, halvings: u32) -> Duration {
        let bytes = self
            .visit_bytes(claim, halvings)
            .min(claim.room.max(self.chunk));
        load.model.step_of(claim.writes, self.count) + load.model.transfer_of(claim.writes, bytes)
    }

    /// The bytes that a visit should give: positioning is then a small part of it.
    fn efficient_bytes(&self, load: &Load<'_>, claim: &Claim) -> u64 {
        let time = load
            .model
            .step_of(claim.writes, self.count)
            .times(POSITIONING_PART - 1);
        let model = match claim.writes {
            true => &load.model.base.write,
            false => &load.model.base.read,
        };
        model.rate.bytes_in(time).0.max(self.chunk)
    }

    /// How often visits are halved where not all claims will be in time: as seldom as is enough for
    /// that, while many start at once. If no number is enough, not at all: short visits would only
    /// cost more. Leaves the slack of visits that are halved so often in `order`.
    fn halvings(&self, load: &Load<'_>, order: &mut Order) -> u32 {
        let enough =
            (1..=HALVINGS_MAX).find(|&halvings| self.fill_slack(load, halvings, order) >= 0);
        enough.unwrap_or_else(|| {
            self.fill_slack(load, 0, order);
            0
        })
    }

    /// By how much the claims could be delayed, each place with those before it; the least of all.
    fn fill_slack(&self, load: &Load<'_>, halvings: u32, order: &mut Order) -> i64 {
        order.slack.clear();
        let mut start = load.free_at;
        let mut least = i64::MAX;
        for &index in &order.by_deadline {
            let claim = &load.claims[index as usize];
            // A stream without room, its buffers full or its reader idle, asks nothing of the
            // device, and nothing done here could serve it.
            if claim.room > 0 {
                let first = self.chunk.min(claim.room);
                let needed = start
                    + load.model.step_of(claim.writes, self.count)
                    + load.model.transfer_of(claim.writes, first);
                least = least.min(signed(claim.deadline, needed));
                start = start + self.visit_time(load, claim, halvings).min(VISIT_TIME_MAX);
            }
            order.slack.push(least);
        }
        least
    }
}

fn choose_among(load: &Load<'_>, is_crowd: bool, order: &mut Order) -> Choice {
    if load.claims.is_empty() {
        return match load.best_effort {
            Some(_) => Choice::BestEffort,
            None => Choice::Nobody,
        };
    }
    let lengths = VisitLengths::of(load);
    sort_by_deadline(load.claims, order);
    if is_best_effort_pressing(load, &lengths, order) {
        return Choice::BestEffort;
    }
    let slack_of_all = lengths.fill_slack(load, 0, order);
    let halvings = match slack_of_all < 0 {
        true => lengths.halvings(load, order),
        false => 0,
    };
    let outlook = Outlook {
        load,
        lengths,
        is_crowd,
        chunk_time: load.model.transfer(load.chunk),
        slack_of_all,
        halvings,
        order,
    };
    if let Some(index) = outlook.visiting() {
        return Choice::Stream(index);
    }
    if let Some(best_effort) = load.best_effort
        && best_effort_may_go(load, best_effort, slack_of_all, lengths.round)
    {
        return Choice::BestEffort;
    }
    let next = match is_crowd {
        true => outlook.first_of_crowd(),
        false => outlook.nearest().or_else(|| outlook.first_urgent()),
    };
    next.map_or(Choice::Nobody, Choice::Stream)
}

/// Best effort that has waited for very long gets in when one request of each of the others is in
/// time. Leaves the slack of the shortest visits in `order`.
fn is_best_effort_pressing(load: &Load<'_>, lengths: &VisitLengths, order: &mut Order) -> bool {
    let chunk_time = load.model.transfer(load.chunk);
    load.best_effort
        .filter(|asked| asked.waited >= BEST_EFFORT_LAST)
        .is_some_and(|asked| {
            lengths.fill_slack(load, HALVINGS_MAX, order) >= (asked.cost + chunk_time).0 as i64
        })
}

/// The state of all claims at one choice.
struct Outlook<'a> {
    load: &'a Load<'a>,
    lengths: VisitLengths,
    is_crowd: bool,
    chunk_time: Duration,
    /// By how much all claims could be delayed, with visits that are not halved.
    slack_of_all: i64,
    /// How often visits are halved now.
    halvings: u32,
    /// The claims by deadline, with the slack of visits that are halved so often.
    order: &'a Order,
}

impl Outlook<'_> {
    /// The claims by deadline, each with its index.
    fn by_deadline(&self) -> impl Iterator<Item = (usize, &Claim)> {
        let order = self.order.by_deadline.iter();
        order.map(|&index| (index as usize, &self.load.claims[index as usize]))
    }

    /// By how much the claims before this place could be delayed.
    fn slack_before(&self, place: usize) -> i64 {
        match place {
            0 => i64::MAX,
            _ => self.order.slack[place - 1],
        }
    }

    /// The bytes that a visit should give now. Those beyond the need come out of slack.
    ///
    /// With best effort waiting, rarer and larger visits leave it more. Only a wish: the need with
    /// which each claim is counted stays the same, so that the dry run of admission holds
    /// regardless of best effort.
    fn wished_bytes(&self, claim: &Claim) -> u64 {
        if self.is_crowd {
            return claim.cap.min(claim.left);
        }
        let reserve = slack_reserve(self.lengths.round, self.chunk_time);
        if self.slack_of_all < reserve as i64 {
            return self.lengths.visit_bytes(claim, self.halvings);
        }
        let efficient = self.lengths.efficient_bytes(self.load, claim);
        let wished = match self.load.best_effort {
            Some(_) => efficient.max(claim.cap / RARE_VISIT_PART),
            None => efficient,
        };
        self.lengths
            .needed_bytes(claim)
            .max(wished.min(visit_bytes_max(claim)).min(claim.left))
    }

    /// The stream that has the device keeps it while all claims with earlier deadlines can wait a
    /// chunk.
    fn visiting(&self) -> Option<usize> {
        let load = self.load;
        let index = load.visiting?;
        let claim = load.claims.get(index)?;
        if claim.room < load.chunk.min(claim.left).max(1)
            || load.visit_given >= self.wished_bytes(claim)
        {
            return None;
        }
        let place = self.by_deadline().position(|(at, _)| at == index);
        let before = self.slack_before(place.unwrap_or(0));
        // A claim that is lost already is not saved by shorter visits; one that can still be saved
        // is.
        let is_lost =
            before < 0 && load.visit_given < self.lengths.visit_bytes(claim, self.halvings);
        (before >= self.chunk_time.0 as i64 || is_lost).then_some(index)
    }

    /// In a crowd of writers: the one that is due first, with all it has.
    fn first_of_crowd(&self) -> Option<usize> {
        let goes = |claim: &Claim| {
            let ripe = self.lengths.efficient_bytes(self.load, claim);
            let ripe = ripe.min(claim.cap / RIPE_PART);
            claim.room > 0 && (claim.room >= ripe.min(claim.left) || self.is_urgent(claim))
        };
        let first = self.by_deadline().find(|(_, claim)| goes(claim));
        first.map(|(index, _)| index)
    }

    /// Nearest by position among those whose whole visit leaves the earlier deadlines feasible, and
    /// which are not much better off than the worst: buffers are filled evenly, so that a newcomer
    /// finds slack in all.
    fn nearest(&self) -> Option<usize> {
        let round = self.lengths.round;
        let even = self
            .by_deadline()
            .find(|(_, claim)| claim.room >= self.wished_bytes(claim))
            .map_or(Instant::NEVER, |(_, claim)| {
                claim.deadline + Duration(round.0 / EVEN_PART)
            });
        let mut nearest: Option<(u64, usize)> = None;
        for (place, (index, claim)) in self.by_deadline().enumerate() {
            if claim.room < self.wished_bytes(claim) || claim.deadline > even {
                continue;
            }
            let time = self.lengths.visit_time(self.load, claim, self.halvings);
            if self.slack_before(place) < time.0 as i64 {
                continue;
            }
            let distance = claim.physical.abs_diff(self.load.head);
            if nearest.is_none_or(|(best, _)| distance < best) {
                nearest = Some((distance, index));
            }
        }
        nearest.map(|(_, index)| index)
    }

    /// The earliest deadline goes although its visit is short when waiting for a longer one would
    /// break it.
    fn first_urgent(&self) -> Option<usize> {
        let goes = |claim: &Claim| claim.room > 0 && (claim.is_awaited || self.is_urgent(claim));
        let first = self.by_deadline().find(|(_, claim)| goes(claim));
        first.map(|(index, _)| index)
    }

    /// Whether a stream goes although its visit would be smaller than an efficient one.
    fn is_urgent(&self, claim: &Claim) -> bool {
        let soon = claim.deadline.since(self.load.free_at) < reserve_time(claim);
        soon || self.slack_of_all < URGENT_CHUNKS * self.chunk_time.0 as i64
    }
}

fn best_effort_may_go(
    load: &Load<'_>,
    asked: BestEffortClaim,
    slack_of_all: i64,
    round: Duration,
) -> bool {
    if slack_of_all < asked.cost.0 as i64 {
        return false;
    }
    let reserved = load
        .claims
        .iter()
        .filter(|claim| claim.room > 0)
        .all(|claim| claim.deadline.since(load.free_at + asked.cost) >= reserve_time(claim));
    let spare = (PATIENCE_COSTS * asked.cost.0).max(round.0 / PATIENCE_PART);
    let spare = spare.min(i64::MAX as u64) as i64;
    let patience_over = asked.waited >= BEST_EFFORT_PATIENCE && slack_of_all >= spare;
    reserved || patience_over
}

/// The time for which the part of a stream's buffers lasts that stays filled before best effort.
fn reserve_time(claim: &Claim) -> Duration {
    let reserve = ByteCount(claim.cap * RESERVE_PERCENT / 100);
    claim.rate.time_for(reserve)
}

fn signed(later: Instant, earlier: Instant) -> i64 {
    let span = i128::from(later.0) - i128::from(earlier.0);
    span.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::{DeviceModel, ServiceModel};
    use alloc::vec;

    const NOW: Instant = Instant(1_000_000_000_000);
    const RATE: BytesPerSecond = BytesPerSecond(12_500_000);

    fn model() -> RefinedModel {
        let row = |ms: u64, rate: u64| ServiceModel {
            fixed: Duration::from_us(ms * 400),
            span: Duration::from_us(ms * 1130),
            rate: BytesPerSecond(rate),
        };
        RefinedModel::new(DeviceModel {
            read: row(15, 172_000_000),
            write: row(14, 145_000_000),
            size: ByteCount(40_000_000_000),
        })
    }

    fn reader(due_ms: u64, room: u64) -> Claim {
        Claim {
            writes: false,
            deadline: NOW + Duration::from_ms(due_ms),
            rate: RATE,
            physical: 1 << 30,
            room,
            cap: 64 << 20,
            is_awaited: false,
            left: u64::MAX,
        }
    }

    fn writer(due_ms: u64, room: u64) -> Claim {
        Claim {
            writes: true,
            physical: 20 << 30,
            cap: 50_000_000,
            ..reader(due_ms, room)
        }
    }

    fn chosen(claims: &[Claim], best_effort: Option<BestEffortClaim>) -> Choice {
        let model = model();
        let load = Load {
            model: &model,
            free_at: NOW,
            head: 0,
            claims,
            visiting: None,
            visit_given: 0,
            chunk: 4 << 20,
            best_effort,
        };
        choose(&load, &mut Order::default())
    }

    #[test]
    fn whoever_waits_for_a_little_goes_before_nobody_does() {
        let little = Claim {
            cap: 9 << 20,
            ..reader(440, 500_000)
        };
        assert_eq!(chosen(&[little], None), Choice::Nobody);
        let awaited = Claim {
            is_awaited: true,
            ..little
        };
        assert_eq!(chosen(&[awaited], None), Choice::Stream(0));
    }

    #[test]
    fn a_little_that_was_to_be_written_long_ago_goes_before_nobody_does() {
        // Bytes that a failing disk did not take for a while are such: a writer that goes on must
        // not have them wait for an hour.
        for late in [1, 3, 29, 31, 174, 3599, 3601, 100_000] {
            let mut little = writer(0, 4_000);
            little.deadline = NOW.before(Duration::from_s(late));
            little.cap = 136_000;
            let chosen_one = chosen(&[little], None);
            assert_eq!(chosen_one, Choice::Stream(0), "{late} s late");
            // A reader that is about to be late is first.
            let both = [reader(80, 40 << 20), little];
            assert_eq!(chosen(&both, None), Choice::Stream(0), "{late} s late");
        }
    }

    #[test]
    fn who_is_due_first_goes_first_whether_he_reads_or_writes() {
        let visit = 40 << 20;
        let claims = [reader(3000, visit), writer(500, visit)];
        assert_eq!(chosen(&claims, None), Choice::Stream(1));
        let claims = [reader(500, visit), writer(3000, visit)];
        assert_eq!(chosen(&claims, None), Choice::Stream(0));
    }

    #[test]
    fn a_writer_that_is_late_already_takes_nothing_from_a_contract() {
        // As it stands the writer is the first, and with its visit the reader would be late.
        let mut late = writer(0, 40 << 20);
        late.deadline = NOW.before(Duration::from_s(3));
        assert_eq!(
            chosen(&[reader(80, 40 << 20), late], None),
            Choice::Stream(0)
        );
        // When the reader can wait for the writer, the writer goes.
        assert_eq!(
            chosen(&[reader(5000, 1 << 20), late], None),
            Choice::Stream(1)
        );
    }

    #[test]
    fn a_crowd_of_writers_is_visited_by_who_is_due_first_until_he_has_nothing_left() {
        let mut claims: Vec<Claim> = (0..11)
            .map(|at| writer(1500 + 200 * at, 30 << 20))
            .collect();
        claims.reverse();
        assert_eq!(chosen(&claims, None), Choice::Stream(10));
        // A write that goes only because the device is idle waits.
        let rests = BestEffortClaim {
            cost: Duration::from_ms(40),
            waited: Duration::ZERO,
            continues: true,
            can_rest: true,
        };
        assert_eq!(chosen(&claims, Some(rests)), Choice::Stream(10));
        // A stream that is visited keeps the device beyond the need of one round, though others are
        // due before it by now.
        claims[10].deadline = NOW + Duration::from_s(4);
        claims[10].room = 8 << 20;
        let model = model();
        let mut load = Load {
            model: &model,
            free_at: NOW,
            head: 0,
            claims: &claims,
            visiting: Some(10),
            visit_given: 45_000_000,
            chunk: 4 << 20,
            best_effort: None,
        };
        let mut order = Order::default();
        assert_eq!(choose(&load, &mut order), Choice::Stream(10));
        // A reader ends that.
        let mut mixed = claims[..10].to_vec();
        mixed.extend([reader(300, 40 << 20), claims[10]]);
        load.claims = &mixed;
        load.visiting = Some(11);
        assert_ne!(choose(&load, &mut order), Choice::Stream(11));
    }

    #[test]
    fn while_writers_are_late_best_effort_gets_only_what_keeps_it_alive() {
        let mut claims = vec![reader(4000, 8 << 20)];
        let mut late = writer(0, 40 << 20);
        late.deadline = NOW.before(Duration::from_s(1));
        claims.push(late);
        let asked = |waited| BestEffortClaim {
            cost: Duration::from_ms(30),
            waited,
            continues: false,
            can_rest: false,
        };
        assert_eq!(
            chosen(&claims, Some(asked(Duration::from_ms(1200)))),
            Choice::Stream(1)
        );
        assert_eq!(
            chosen(&claims, Some(asked(Duration::from_ms(1600)))),
            Choice::BestEffort
        );
    }
}
