// SPDX-License-Identifier: Apache-2.0
//! The ranges that will be read next, given out one by one in reading order.

use super::cursor::{ISLAND_COUNT_MAX, Span};
use super::stretches::Stepping;
use crate::units::*;

/// Ranges given at most: a reader of single bytes here and there is not predicted far.
const RANGE_COUNT_MAX: u32 = 256;

/// The ranges that come next; see [`super::Cursor::ahead`].
#[derive(Clone, Debug)]
pub struct AheadIter {
    course: Course,
    bytes_left: u64,
    file_size: u64,
    ranges_left: u32,
}

/// Where a cursor is going.
#[derive(Clone, Debug)]
pub(super) enum Course {
    Nowhere,
    Up(Up),
    Down(Down),
    Steps(Steps),
}

impl AheadIter {
    pub(super) fn new(course: Course, bytes: u64, file_size: u64) -> AheadIter {
        AheadIter {
            course,
            bytes_left: bytes,
            file_size,
            ranges_left: RANGE_COUNT_MAX,
        }
    }
}

impl Iterator for AheadIter {
    type Item = ByteRange;

    fn next(&mut self) -> Option<ByteRange> {
        self.ranges_left = self.ranges_left.checked_sub(1)?;
        let (most, file_size) = (self.bytes_left, self.file_size);
        let span = match &mut self.course {
            Course::Nowhere => None,
            Course::Up(up) => up.next(most, file_size),
            Course::Down(down) => down.next(most, file_size),
            Course::Steps(steps) => steps.next(most, file_size),
        };
        let span = span.filter(|span| span.start < span.end)?;
        let length = span.end - span.start;
        self.bytes_left -= length;
        Some(ByteRange::new(span.start, length))
    }
}

/// Upwards, around bytes that were asked for already.
#[derive(Clone, Debug)]
pub(super) struct Up {
    at: u64,
    islands: [Span; ISLAND_COUNT_MAX],
    island_count: usize,
    next_island: usize,
}

impl Up {
    pub(super) fn new(at: u64, islands: [Span; ISLAND_COUNT_MAX], island_count: usize) -> Up {
        Up {
            at,
            islands,
            island_count,
            next_island: 0,
        }
    }

    fn next(&mut self, most: u64, file_size: u64) -> Option<Span> {
        while let Some(island) = self.islands[..self.island_count].get(self.next_island) {
            let start = self.at;
            if start < island.start {
                self.at = start.saturating_add(most).min(island.start);
                return clipped(start, self.at, file_size);
            }
            self.at = self.at.max(island.end);
            self.next_island += 1;
        }
        let start = self.at;
        self.at = start.saturating_add(most).min(file_size);
        clipped(start, self.at, file_size)
    }
}

/// The rest of the frame in hand, then downwards without holes, frame by frame.
#[derive(Clone, Debug)]
pub(super) struct Down {
    rest: Span,
    /// Everything from here up was asked or given.
    at: u64,
    stretch_bytes: u64,
}

impl Down {
    pub(super) fn new(from: u64, base: u64, mut rest: Span, stretch_bytes: u64) -> Down {
        // An earlier prediction that went below this frame gave its rest as well.
        if from < base {
            rest.end = rest.start;
        }
        rest.start = rest.start.max(from.min(rest.end));
        Down {
            rest,
            at: from.min(base),
            stretch_bytes: stretch_bytes.max(1),
        }
    }

    fn next(&mut self, most: u64, file_size: u64) -> Option<Span> {
        let start = self.rest.start;
        if start < self.rest.end.min(file_size) {
            self.rest.start = start.saturating_add(most).min(self.rest.end);
            return clipped(start, self.rest.start, file_size);
        }
        let end = self.at.min(file_size);
        self.at = end.saturating_sub(self.stretch_bytes.min(most));
        clipped(self.at, end, file_size)
    }
}

/// The rest of the stretch in hand, then a stretch at every stride.
///
/// Where frames differ in size the stride is a mean, and the place of a stretch is the less sure
/// the farther off it is: ranges widen, and the prediction ends where they would be mostly doubt.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    rest: Span,
    /// Start of the stretch in hand.
    anchor: u64,
    stepping: Stepping,
    /// Steps from the anchor to the range last given.
    step: u64,
    /// Everything on the near side of this was given: below it, or backwards from it up.
    limit: u64,
}

impl Steps {
    pub(super) fn new(from: u64, base: u64, front: u64, stepping: Stepping) -> Steps {
        let stretch_end = base.saturating_add(stepping.stretch_bytes);
        let forward = stepping.stride > 0;
        let limit = if forward {
            from.max(front)
        } else {
            from.min(base)
        };
        let rest_given = if forward { from } else { front };
        let rest = Span {
            start: if !forward && from < base {
                stretch_end
            } else {
                front.max(rest_given)
            },
            end: stretch_end,
        };
        let given = base.abs_diff(limit) / stepping.stride.unsigned_abs();
        Steps {
            rest,
            anchor: base,
            stepping,
            step: given.saturating_sub(2),
            limit,
        }
    }

    fn next(&mut self, most: u64, file_size: u64) -> Option<Span> {
        let start = self.rest.start;
        if start < self.rest.end.min(file_size) {
            self.rest.start = start.saturating_add(most).min(self.rest.end);
            if self.stepping.stride > 0 {
                self.limit = self.limit.max(self.rest.start);
            }
            return clipped(start, self.rest.start, file_size);
        }
        // Of the first few steps all may have been given.
        for _ in 0..8 {
            let expected = self.expected_stretch(file_size)?;
            let new = self.new_part(expected);
            // A sliver beside given bytes only shows that the error has grown.
            if new.end - new.start > self.stepping.error(self.step).saturating_mul(2) {
                return self.give(new, most);
            }
        }
        None
    }

    fn expected_stretch(&mut self, file_size: u64) -> Option<Span> {
        self.step += 1;
        let stride = self.stepping.stride;
        let distance = stride.unsigned_abs().checked_mul(self.step)?;
        let error = self.stepping.error(self.step);
        let stretch_bytes = self.stepping.stretch_bytes.max(1);
        let width = stretch_bytes.saturating_add(error.saturating_mul(2));
        if self.step > 2 && (error > stretch_bytes / 2 || width >= stride.unsigned_abs()) {
            return None;
        }
        let start = if stride > 0 {
            self.anchor.checked_add(distance)
        } else {
            self.anchor.checked_sub(distance)
        }?;
        let span = Span {
            start: start.saturating_sub(error),
            end: start
                .saturating_add(stretch_bytes)
                .saturating_add(error)
                .min(file_size),
        };
        (span.start < span.end).then_some(span)
    }

    /// The part that was not given yet; may be empty.
    fn new_part(&self, stretch: Span) -> Span {
        if self.stepping.stride > 0 {
            let start = stretch.start.max(self.limit).min(stretch.end);
            Span { start, ..stretch }
        } else {
            let end = stretch.end.min(self.limit).max(stretch.start);
            Span { end, ..stretch }
        }
    }

    /// Cut so that the next prediction can go on from the limit.
    fn give(&mut self, mut span: Span, most: u64) -> Option<Span> {
        if self.stepping.stride > 0 {
            span.end = span.end.min(span.start.saturating_add(most));
            self.limit = span.end;
        } else {
            span.start = span.start.max(span.end.saturating_sub(most));
            self.limit = span.start;
        }
        Some(span)
    }
}

fn clipped(start: u64, end: u64, file_size: u64) -> Option<Span> {
    let end = end.min(file_size);
    (start < end).then_some(Span { start, end })
}
