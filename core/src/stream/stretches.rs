// SPDX-License-Identifier: Apache-2.0
//! The last stretches of reads, in the order in which they began, and whether they step.
//!
//! A stretch is a range that is read forward without a hole: a frame in one read or in eight
//! pieces. Players that shuttle leave a trail of stretches. Downwards and touching, it is reverse
//! play; at equal distances, it is fast forward or rewind by every n-th frame. Earlier reads do not
//! matter here: reverse play usually goes over ground that was played forward.
//!
//! The run of a seat, from a cut to the next, is another thing: one run in reverse has hundreds of
//! stretches.

use super::cursor::{Pattern, REORDER_COUNT, Span};
use crate::units::*;

/// Enough to see one step more than sixteen reads in any order can make.
const STRETCH_COUNT_MAX: usize = 18;

/// Equal steps that are enough when no reordering can be the cause: they are too far apart in the
/// file, or in time.
const STEP_COUNT_MIN: usize = 3;

/// While one read is missing, the fifteen after it make at most eight equal steps that leave holes,
/// the first from the read before it, and at most fifteen downwards that leave none.
const STEP_COUNT_SURE: usize = 9;
const DOWN_COUNT_SURE: usize = 16;

/// Reads of one pipeline arrive within this.
const PIPELINE_SPAN: Duration = Duration::from_ms(500);

/// Reads that a client sent at once arrive within this, in any order.
const VOLLEY_SPAN: Duration = Duration::from_ms(20);

/// By how much stretch follows stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stepping {
    /// Start to start; negative backwards; never 0. Units: bytes.
    pub(super) stride: i64,
    /// Length of a stretch. Units: bytes.
    pub(super) stretch_bytes: u64,
    /// Stretches touch: the pattern is [`Pattern::Reverse`].
    contiguous: bool,
    /// How far steps were from the stride lately. Units: bytes.
    deviation: u64,
    beyond_doubt: bool,
}

impl Stepping {
    pub(super) fn pattern(&self) -> Pattern {
        if self.is_reverse() {
            Pattern::Reverse
        } else {
            Pattern::Strided {
                stride: self.stride,
            }
        }
    }

    pub(super) fn is_reverse(&self) -> bool {
        self.contiguous && self.stride < 0
    }

    /// No reordering within a pipeline can have made these steps.
    pub(super) fn is_beyond_doubt(&self) -> bool {
        self.beyond_doubt
    }

    /// How far the start of the `step`-th stretch from here is uncertain: chance adds up as a root,
    /// the error of the mean as it is.
    pub(super) fn error(&self, step: u64) -> u64 {
        let root = step.saturating_mul(64).isqrt();
        self.deviation.saturating_mul(root.saturating_add(step)) / 8
    }

    /// True when the other is another speed or direction.
    pub(super) fn differs(&self, other: Stepping) -> bool {
        self.stride.abs_diff(other.stride) > self.slack()
    }

    /// How far from its expected place a stretch may begin.
    pub(super) fn slack(&self) -> u64 {
        (self.stride.unsigned_abs() / 4).max(self.deviation)
    }

    /// A stretch was complete at `stretch_bytes`, and the next began at `to`.
    pub(super) fn refine(&mut self, from: u64, to: u64, stretch_bytes: u64) {
        let Ok(step) = i64::try_from(i128::from(to) - i128::from(from)) else {
            return;
        };
        let count = nearest_multiple(step, self.stride);
        let expected = self.stride.saturating_mul(count);
        let offset = step.saturating_sub(expected) / count;
        self.stride = self.stride.saturating_add(offset / 8);
        let calmer = self.deviation - self.deviation.div_ceil(8);
        self.deviation = calmer.max(offset.unsigned_abs());
        self.stretch_bytes = stretch_bytes.max(self.stretch_bytes - self.stretch_bytes / 8);
    }
}

fn nearest_multiple(step: i64, stride: i64) -> i64 {
    (1..=4)
        .min_by_key(|&count| step.abs_diff(stride.saturating_mul(count)))
        .unwrap_or(1)
}

#[derive(Clone, Copy, Debug)]
struct Stretch {
    span: Span,
    began: Instant,
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub(super) struct Stretches {
    /// The oldest first.
    stretches: [Stretch; STRETCH_COUNT_MAX],
    count: usize,
}

/// The effect of a read on the stretches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StretchChange {
    Grew,
    Began,
}

impl Stretches {
    pub(super) const fn new() -> Stretches {
        Stretches {
            stretches: [Stretch {
                span: Span { start: 0, end: 0 },
                began: Instant::ZERO,
            }; STRETCH_COUNT_MAX],
            count: 0,
        }
    }

    pub(super) fn add(&mut self, now: Instant, range: ByteRange) -> StretchChange {
        let (start, end) = (range.start.0, range.end());
        let grown = self.stretches[..self.count]
            .iter()
            .rposition(|stretch| stretch.span.end == start);
        match grown {
            Some(at) => {
                self.stretches[at].span.end = end;
                self.merge_from(at);
                StretchChange::Grew
            }
            None => {
                self.push(Stretch {
                    span: Span { start, end },
                    began: now,
                });
                StretchChange::Began
            }
        }
    }

    /// A stretch that grew up to one that began after it is one stretch with it: the later one was
    /// early. Backwards the one below begins after, and they stay apart.
    fn merge_from(&mut self, at: usize) {
        while let Some(next) = (at + 1..self.count)
            .find(|&i| self.stretches[i].span.start == self.stretches[at].span.end)
        {
            self.stretches[at].span.end = self.stretches[next].span.end;
            self.stretches.copy_within(next + 1..self.count, next);
            self.count -= 1;
        }
    }

    fn push(&mut self, stretch: Stretch) {
        if self.count == STRETCH_COUNT_MAX {
            self.stretches.copy_within(1.., 0);
            self.count -= 1;
        }
        self.stretches[self.count] = stretch;
        self.count += 1;
    }

    pub(super) fn forget(&mut self) {
        self.count = 0;
    }

    fn all(&self) -> &[Stretch] {
        &self.stretches[..self.count]
    }

    /// The last stretches, the newest first.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.all().iter().rev().map(|stretch| stretch.span)
    }

    /// The newest stretch and the one that began before it.
    pub(super) fn last_two(&self) -> Option<(Span, Span)> {
        let [.., before, newest] = self.all() else {
            return None;
        };
        Some((newest.span, before.span))
    }

    /// Whether the last stretches step, the newest having just begun at `now`.
    pub(super) fn stepping(&self, now: Instant) -> Option<Stepping> {
        self.reverse(now).or_else(|| self.strided(now))
    }

    /// Stretches each of which began below the one before it and, once complete, touches it: three
    /// such steps over some time, or sixteen at once.
    fn reverse(&self, now: Instant) -> Option<Stepping> {
        let stretches = self.all();
        let down = |pair: &&[Stretch]| {
            let (above, below) = (pair[0].span, pair[1].span);
            below.start < above.start && touches(below, above)
        };
        // The newest stretch has just begun: it may end anywhere.
        let [complete @ .., newest] = stretches else {
            return None;
        };
        let last = complete.last()?.span;
        let steps = 1 + complete.windows(2).rev().take_while(down).count();
        let trail = complete.get(complete.len().checked_sub(steps)?..)?;
        let stretch_bytes = longest(trail);
        let next = last.start.checked_sub(newest.span.start)?;
        let slow =
            now.since(trail[trail.len().saturating_sub(STEP_COUNT_MIN)].began) >= VOLLEY_SPAN;
        let sure = steps >= DOWN_COUNT_SURE || (steps >= STEP_COUNT_MIN && slow);
        (sure && next > 0 && next <= stretch_bytes.saturating_mul(2)).then_some(Stepping {
            stride: -(i64::try_from(stretch_bytes).ok()?),
            stretch_bytes,
            contiguous: true,
            deviation: stretch_bytes / 2,
            beyond_doubt: false,
        })
    }

    fn strided(&self, now: Instant) -> Option<Stepping> {
        let steps = self.equal_steps()?;
        let trail = &self.all()[self.count - 1 - steps.count..];
        let stretch_bytes = longest(&trail[..steps.count]);
        let distance = steps.mean.unsigned_abs();
        let far = is_far(steps.mean, stretch_bytes) && steps.count > STEP_COUNT_MIN;
        let slow = now.since(trail[0].began) >= PIPELINE_SPAN;
        let sure = steps.count >= STEP_COUNT_SURE || far || slow;
        // Stretches that reach into one another are not steps.
        (sure && distance > stretch_bytes).then_some(Stepping {
            stride: steps.mean,
            stretch_bytes,
            contiguous: false,
            deviation: steps.deviation,
            beyond_doubt: true,
        })
    }

    /// The last steps, as far back as they are like the newest: within a fifth, or less where it is
    /// far.
    fn equal_steps(&self) -> Option<Steps> {
        let newest = self.count.checked_sub(1).filter(|&i| i > 0)?;
        let last = self.step_to(newest)?;
        let stretch_bytes = longest(&self.all()[newest - 1..newest]);
        // Frames may differ in size; over many of them that evens out.
        let part = if is_far(last, stretch_bytes) { 16 } else { 5 };
        let alike = |step: &i64| {
            let shorter = last.unsigned_abs().min(step.unsigned_abs());
            step.signum() == last.signum() && step.abs_diff(last) <= shorter / part
        };
        let steps = || {
            (1..=newest)
                .rev()
                .map_while(|i| self.step_to(i))
                .take_while(alike)
        };
        let count = steps().count();
        if last == 0 || count < STEP_COUNT_MIN {
            return None;
        }
        let mean = i64::try_from(steps().map(i128::from).sum::<i128>() / count as i128).ok()?;
        Some(Steps {
            mean,
            deviation: steps().map(|step| step.abs_diff(mean)).max()?,
            count,
        })
    }

    /// From the stretch before stretch `i` to it. None: there is none before it, or it is absurdly
    /// far.
    fn step_to(&self, i: usize) -> Option<i64> {
        let from = self.stretches[i.checked_sub(1)?].span.start;
        i64::try_from(i128::from(self.stretches[i].span.start) - i128::from(from)).ok()
    }
}

/// Farther than reads of one pipeline can lie apart.
fn is_far(step: i64, stretch_bytes: u64) -> bool {
    step.unsigned_abs() >= stretch_bytes.saturating_mul(REORDER_COUNT)
}

struct Steps {
    mean: i64,
    deviation: u64,
    count: usize,
}

fn longest(stretches: &[Stretch]) -> u64 {
    let lengths = stretches
        .iter()
        .map(|stretch| stretch.span.end - stretch.span.start);
    lengths.max().unwrap_or(0)
}

/// `below` ends where `above` starts, give or take a quarter of it: audio lies between frames.
fn touches(below: Span, above: Span) -> bool {
    let length = below.end - below.start;
    below.end.abs_diff(above.start) <= length / 4
}
