// SPDX-License-Identifier: Apache-2.0
//! One place in a file that is being read, and where it is going.
//!
//! A forward cursor knows the bytes that were asked for without a hole, `base..front`, and, because
//! pipelining clients ask out of order, up to eight islands beyond them. A hole is filled by a late
//! read, or given up as skipped when sixteen later reads have passed it: sixteen is how many reads
//! a client may have outstanding before its order means something here.
//!
//! A stepping cursor, reverse or strided, knows the stretch it is in, such as a frame that is read
//! forward in pieces, and by how much stretch follows stretch.

use super::ahead::{AheadIter, Course, Down, Steps, Up};
use super::stretches::Stepping;
use crate::units::*;

/// Reads that may be outstanding, and so arrive in any order.
pub(super) const REORDER_COUNT: u64 = 16;

/// Sixteen reads in any order leave at most eight islands beyond the first hole.
pub(super) const ISLAND_COUNT_MAX: usize = 8;

/// A hole this old that [`SKIP_READ_COUNT`] later reads have passed is a skip, not a late read.
const SKIP_AGE: Duration = Duration::from_ms(500);
const SKIP_READ_COUNT: u8 = 4;

const SCORE_MAX: i8 = 24;
const SCORE_JOINED: i8 = 3;
/// From here on a cursor is read in order.
const SCORE_SEQUENTIAL: i8 = 2;
/// The benefit of the doubt for a file read from its first byte: survives eight reads out of order.
const SCORE_PRESUMED: i8 = SCORE_SEQUENTIAL + 8;

/// How something is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// Too early to say; nothing is predicted.
    #[default]
    Unknown,
    /// Forward without holes.
    Sequential,
    /// Backwards without holes, as a whole; each frame may be read forward in pieces.
    Reverse,
    /// A stretch at every `stride` bytes, backwards when negative. Units: bytes from start to
    /// start.
    Strided {
        /// Never 0.
        stride: i64,
    },
    /// No order; nothing is predicted.
    Random,
}

/// `start..end`, never empty where it is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// How well a read fits a cursor, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fit {
    /// Where a stepping cursor was expected.
    Stepped,
    /// Touches bytes that were asked for.
    Joined,
    /// Near, but touches nothing. Units of the distance: bytes.
    Loose(u64),
    /// Asked again.
    Again(u64),
}

/// A place where a file is being read.
#[derive(Clone, Debug)]
pub struct Cursor {
    /// Forward: asked without a hole. Stepping: the current stretch.
    base: u64,
    front: u64,
    /// Forward only: asked beyond `front`; ascending, disjoint, not touching.
    islands: [Span; ISLAND_COUNT_MAX],
    island_count: usize,
    stepping: Option<Stepping>,
    /// Reverse only: the stretch before the current one; the bytes between are the rest of this
    /// frame.
    ceiling: u64,
    score: i8,
    /// It was read upwards from where it began.
    grew: bool,
    /// The handle as a whole is read at random.
    random: bool,
    read_bytes: u64,
    largest_bytes: u64,
    read_count: u32,
    /// Reads beyond `front` since it last moved, and when the first of them came.
    stalled_count: u8,
    stalled_since: Instant,
}

impl Cursor {
    pub(super) fn begin(now: Instant, range: ByteRange, presumed: bool) -> Cursor {
        Cursor {
            base: range.start.0,
            front: range.end(),
            islands: [Span::default(); ISLAND_COUNT_MAX],
            island_count: 0,
            stepping: None,
            ceiling: range.end(),
            score: if presumed { SCORE_PRESUMED } else { 0 },
            grew: false,
            random: false,
            read_bytes: range.length.0,
            largest_bytes: range.length.0,
            read_count: 1,
            stalled_count: 0,
            stalled_since: now,
        }
    }

    /// How it is read, as far as can be told now.
    pub fn pattern(&self) -> Pattern {
        match self.stepping {
            Some(stepping) => stepping.pattern(),
            None if self.is_sequential() => Pattern::Sequential,
            None if self.random => Pattern::Random,
            None => Pattern::Unknown,
        }
    }

    /// Among random reads two that touch are chance.
    fn is_sequential(&self) -> bool {
        let doubt = if self.random { SCORE_JOINED } else { 0 };
        self.score >= SCORE_SEQUENTIAL + doubt
    }

    /// True when the pattern was seen, false when it is presumed of a first read.
    pub fn is_confirmed(&self) -> bool {
        self.stepping.is_some() || (self.read_count >= 3 && self.score > SCORE_SEQUENTIAL)
    }

    /// First byte not yet asked for, in reading direction: backwards it is the end, exclusive, of
    /// the bytes that come next. Units: bytes from the start of the file.
    pub fn position(&self) -> u64 {
        match self.stepping {
            Some(stepping) if stepping.is_reverse() => self.base,
            _ => self.front,
        }
    }

    /// Typical length of a read. Units: bytes.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// How much is read at each step of a reverse or strided pattern: a frame, in however many
    /// reads. The typical read otherwise. Units: bytes.
    pub fn stretch_bytes(&self) -> u64 {
        match self.stepping {
            Some(stepping) => stepping.stretch_bytes.max(self.front - self.base),
            None => self.read_bytes,
        }
    }

    /// Reads so far.
    pub fn read_count(&self) -> u32 {
        self.read_count
    }

    /// The next ranges, in reading order, none of which was asked for, clipped to the file,
    /// together at most `bytes` long. Nothing for an unknown or random pattern.
    ///
    /// `from` is how far an earlier prediction was taken: the end of its last range when reading
    /// forward, the start of its last range when reading backwards; [`Cursor::position`] when there
    /// was none. A `from` that the reader has passed is taken for its position.
    pub fn ahead(&self, from: u64, bytes: u64, file_size: u64) -> AheadIter {
        let course = match self.stepping {
            Some(stepping) if stepping.is_reverse() => Course::Down(Down::new(
                from,
                self.base,
                self.rest_of_frame(),
                stepping.stretch_bytes,
            )),
            Some(stepping) => Course::Steps(Steps::new(from, self.base, self.front, stepping)),
            None if self.is_sequential() => Course::Up(Up::new(
                from.max(self.front),
                self.islands,
                self.island_count,
            )),
            None => Course::Nowhere,
        };
        AheadIter::new(course, bytes, file_size)
    }

    /// Reverse: the bytes between the read part of the frame in hand and the frame before it.
    fn rest_of_frame(&self) -> Span {
        Span {
            start: self.front,
            end: self.ceiling,
        }
    }

    /// The first byte that its reads have asked for.
    pub(crate) fn start(&self) -> u64 {
        self.base
    }

    // ---- For the recogniser: changes ----

    /// The bytes that were asked for here without a hole end there.
    pub(super) fn ends_at(&self, offset: u64) -> bool {
        self.front == offset
    }

    /// How well a read fits, None when it belongs elsewhere.
    pub(super) fn fit(&self, range: ByteRange) -> Option<Fit> {
        if let Some(stepping) = self.stepping {
            return self.fit_stepping(stepping, range);
        }
        let (start, end) = (range.start.0, range.end());
        if start <= self.front && end > self.front {
            return Some(Fit::Joined);
        }
        if self
            .islands()
            .iter()
            .any(|i| start <= i.end && i.start <= end)
        {
            return Some(Fit::Joined);
        }
        let window = self.window(range);
        if start > self.front {
            let distance = start - self.front;
            return (distance < window).then_some(Fit::Loose(distance));
        }
        if end <= self.base {
            // The first reads of a pipelining client, the first byte not being the first to come.
            let young = self.is_young();
            let distance = self.base - end;
            return match distance {
                0 if young => Some(Fit::Joined),
                _ if young && distance < window => Some(Fit::Loose(distance)),
                _ => None,
            };
        }
        let distance = self.front - start;
        (distance <= window).then_some(Fit::Again(distance))
    }

    fn fit_stepping(&self, stepping: Stepping, range: ByteRange) -> Option<Fit> {
        let (start, end) = (range.start.0, range.end());
        if start >= self.base && start <= self.front && end > self.front {
            return Some(Fit::Joined);
        }
        if self.begins_next_stretch(stepping, range) {
            return Some(Fit::Stepped);
        }
        let stretch_end = self.base.saturating_add(stepping.stretch_bytes);
        (start >= self.base && start < stretch_end.max(self.front))
            .then(|| Fit::Again(start.abs_diff(self.front)))
    }

    /// True when a read begins a stretch where the stepping leads: up to four steps on, since a
    /// player that is late leaves frames out.
    fn begins_next_stretch(&self, stepping: Stepping, range: ByteRange) -> bool {
        let slack = stepping.slack();
        (1..=4).any(|step| {
            let offset = stepping.stride.saturating_mul(step);
            let expected = self.base.saturating_add_signed(offset);
            range.start.0.abs_diff(expected) <= slack
        })
    }

    /// Take a read that fits.
    pub(super) fn take(&mut self, now: Instant, range: ByteRange, fit: Fit) {
        self.read_count = self.read_count.saturating_add(1);
        self.learn_read_bytes(range.length.0);
        match (self.stepping, fit) {
            (Some(stepping), Fit::Stepped) => self.step_to(stepping, range),
            (Some(stepping), _) => self.grow_stretch(stepping, range),
            (None, _) => self.take_forward(now, range, fit),
        }
    }

    fn take_forward(&mut self, now: Instant, range: ByteRange, fit: Fit) {
        let (start, end) = (range.start.0, range.end());
        let front = self.front;
        if start > self.front {
            self.add_island(Span { start, end });
        } else if end <= self.base {
            self.prepend(Span { start, end });
        } else {
            self.front = self.front.max(end);
            self.absorb_islands();
            self.grew = true;
        }
        if self.front != front || self.island_count == 0 {
            self.stalled_count = 0;
        } else if start > front {
            self.stall(now);
        }
        let change = match fit {
            Fit::Stepped | Fit::Joined => SCORE_JOINED,
            Fit::Loose(_) | Fit::Again(_) => -1,
        };
        self.score = (self.score + change).clamp(-SCORE_MAX, SCORE_MAX);
    }

    fn stall(&mut self, now: Instant) {
        if self.stalled_count == 0 {
            self.stalled_since = now;
        }
        self.stalled_count = self.stalled_count.saturating_add(1);
        let passed = u64::from(self.stalled_count) >= REORDER_COUNT;
        let old = now.since(self.stalled_since) >= SKIP_AGE;
        if passed || (old && self.stalled_count >= SKIP_READ_COUNT) {
            self.skip_hole();
        }
    }

    /// The hole before the first island will not be filled.
    fn skip_hole(&mut self) {
        if self.island_count > 0 {
            self.front = self.islands[0].end;
            self.absorb_islands();
        }
        self.stalled_count = 0;
    }

    fn add_island(&mut self, mut span: Span) {
        let mut kept = 0;
        for i in 0..self.island_count {
            let island = self.islands[i];
            if island.start <= span.end && span.start <= island.end {
                span.start = span.start.min(island.start);
                span.end = span.end.max(island.end);
            } else {
                self.islands[kept] = island;
                kept += 1;
            }
        }
        self.island_count = kept;
        if self.island_count == ISLAND_COUNT_MAX {
            self.skip_hole();
            if span.start <= self.front {
                self.front = self.front.max(span.end);
                return;
            }
        }
        let at = self.islands().partition_point(|i| i.start < span.start);
        self.islands.copy_within(at..self.island_count, at + 1);
        self.islands[at] = span;
        self.island_count += 1;
    }

    fn absorb_islands(&mut self) {
        let mut gone = 0;
        while gone < self.island_count && self.islands[gone].start <= self.front {
            self.front = self.front.max(self.islands[gone].end);
            gone += 1;
        }
        self.islands.copy_within(gone..self.island_count, 0);
        self.island_count -= gone;
    }

    /// A read below all others of a young cursor: the former base becomes an island.
    fn prepend(&mut self, span: Span) {
        if span.end < self.base {
            let old = Span {
                start: self.base,
                end: self.front,
            };
            self.front = span.end;
            self.base = span.start;
            self.add_island(old);
        }
        self.base = self.base.min(span.start);
    }

    fn learn_read_bytes(&mut self, length: u64) {
        self.read_bytes = if self.read_count == 2 {
            self.read_bytes.max(length)
        } else {
            // An eighth of the way each time; exact once reads are all alike.
            let step = length.abs_diff(self.read_bytes).div_ceil(8);
            if length > self.read_bytes {
                self.read_bytes + step
            } else {
                self.read_bytes - step
            }
        };
        self.largest_bytes = length.max(self.largest_bytes - self.largest_bytes / 64);
    }

    /// How far from the front a read of the same pipeline can be. Half as much again, and twice for
    /// a young cursor, as the longest reads may be still to come.
    fn window(&self, range: ByteRange) -> u64 {
        let length = self.largest_bytes.max(range.length.0);
        let halves = if self.is_young() { 4 } else { 3 };
        length.saturating_mul(REORDER_COUNT * halves / 2)
    }

    // ---- Stepping ----

    /// Stretches were seen to follow one another: from now on a stepping cursor, at `stretch`.
    pub(super) fn begin_stepping(&mut self, stepping: Stepping, stretch: Span, ceiling: u64) {
        self.stepping = Some(stepping);
        self.base = stretch.start;
        self.front = stretch.end;
        self.ceiling = ceiling.max(stretch.end);
        self.island_count = 0;
        self.stalled_count = 0;
    }

    fn step_to(&mut self, mut stepping: Stepping, range: ByteRange) {
        stepping.refine(self.base, range.start.0, self.front - self.base);
        self.stepping = Some(stepping);
        // Only reverse play owes the bytes up to the frame before.
        self.ceiling = self.base;
        self.base = range.start.0;
        self.front = range.end();
    }

    fn grow_stretch(&mut self, stepping: Stepping, range: ByteRange) {
        self.front = self.front.max(range.end());
        let stretch = self.front - self.base;
        let turned = if stepping.is_reverse() {
            self.front > self.ceiling.saturating_add(self.read_bytes)
        } else {
            stretch
                > stepping
                    .stretch_bytes
                    .saturating_mul(2)
                    .saturating_add(range.length.0)
        };
        if turned {
            // Playing forward again from here.
            self.stepping = None;
            self.score = SCORE_PRESUMED;
        }
    }

    // ---- For the recogniser: questions ----

    pub(super) fn islands(&self) -> &[Span] {
        &self.islands[..self.island_count]
    }

    pub(super) fn is_settled(&self) -> bool {
        self.read_count >= 3
    }

    /// A read in order beyond every doubt.
    pub(super) fn is_established(&self) -> bool {
        self.stepping.is_some() || (self.read_count >= 8 && self.score >= SCORE_PRESUMED)
    }

    /// True for a read that may only be out of order: others of the same pipeline are still to
    /// come.
    pub(super) fn may_be_out_of_order(&self, range: ByteRange) -> bool {
        let ahead = self.score >= SCORE_SEQUENTIAL
            && range.start.0 >= self.front
            && u64::from(self.stalled_count) < REORDER_COUNT;
        let late = self.grew && range.end() == self.base;
        let disorder = self.is_young() && (self.island_count > 0 || late);
        self.stepping.is_none() && (ahead || disorder)
    }

    /// True when it is stepping already, and at this pace.
    pub(super) fn steps_like(&self, stepping: Stepping) -> bool {
        self.stepping.is_some_and(|own| !own.differs(stepping))
    }

    /// The first byte to be read may still be to come.
    fn is_young(&self) -> bool {
        u64::from(self.read_count) < REORDER_COUNT
    }

    pub(super) fn covers(&self, offset: u64) -> bool {
        (self.base..self.front).contains(&offset)
            || self
                .islands()
                .iter()
                .any(|i| (i.start..i.end).contains(&offset))
    }

    pub(super) fn call_random(&mut self, random: bool) {
        self.random = random;
    }
}
