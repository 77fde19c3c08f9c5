// SPDX-License-Identifier: Apache-2.0
//! Sorts the reads of one open file into cursors.
//!
//! A read goes to the cursor that it fits best, else it begins one. Nothing is called a jump at
//! first sight: players probe headers and tails, and audio lies beside video. A new cursor that is
//! read on three times, while an established one has not been read since, is where that one jumped
//! to. The place that was left stays known; a reader that returns there exactly is recognised, and
//! one that keeps going to and fro is two readers.

use super::cursor::{Cursor, Fit, Pattern, Span};
use super::stretches::{Stepping, StretchChange, Stretches};
use crate::units::*;

/// Positions followed in one open file.
pub const CURSOR_COUNT_MAX: usize = 8;

/// Reads before a file may be called randomly read.
const RANDOM_READ_COUNT_MIN: u32 = 16;

/// Of the last 32 reads so many at most touch bytes asked for before when reads are random.
const RANDOM_JOINED_COUNT_MAX: u32 = 6;

/// A cursor that was not read for so many reads of the file has no reads on their way.
const DESERTED_READ_COUNT: u64 = 64;

/// A cursor that was not read for so many reads of the file gives way to a new one first.
const STALE_READ_COUNT: u64 = 256;

/// Which cursor of a [`Recogniser`]; stays the same as long as the cursor lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CursorIndex(pub u8);

/// The meaning of a read for its cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved<Index = CursorIndex> {
    /// The cursor is new: any that had this index before is gone.
    Began,
    /// The cursor was read on; also one that was left, where it was left.
    Continued,
    /// The cursor, begun some reads ago, is where the reader of `from` is now: the contract of
    /// `from` belongs here. `from` stays known, as a place to return to.
    Jumped {
        /// The cursor that was left.
        from: Index,
    },
}

/// The lesson of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The cursor of the read.
    pub cursor: CursorIndex,
    /// How that cursor is read, this read included.
    pub pattern: Pattern,
    /// The meaning of the read.
    pub moved: Moved,
}

#[derive(Clone, Debug)]
struct Place {
    cursor: Cursor,
    /// Number of the read that began it, and of the last one it took.
    began: u64,
    touched: u64,
    /// Its reader jumped from here.
    left: bool,
    /// Times it was left and read again.
    return_count: u8,
    /// It has taken a jump, or it was settled without one: the question is answered.
    answered: bool,
    /// A jump brought its reader here.
    heir: bool,
}

/// The pattern analyser of one open file. Bounded; allocates nothing.
#[derive(Clone, Debug)]
pub struct Recogniser {
    places: [Option<Place>; CURSOR_COUNT_MAX],
    stretches: Stretches,
    read_count: u64,
    /// One bit a read, the newest lowest: it touched bytes that were asked for before.
    joined_bits: u32,
    /// The last read, if its bytes had been asked for before.
    again: Option<Span>,
    last: CursorIndex,
}

impl Default for Recogniser {
    fn default() -> Recogniser {
        Recogniser::new()
    }
}

impl Recogniser {
    /// Nothing was read yet.
    pub const fn new() -> Recogniser {
        Recogniser {
            places: [const { None }; CURSOR_COUNT_MAX],
            stretches: Stretches::new(),
            read_count: 0,
            joined_bits: 0,
            again: None,
            last: CursorIndex(0),
        }
    }

    /// A read arrived, in any order in which its pipelining client's reads arrive. An empty read
    /// says nothing of the pattern.
    pub fn observe(&mut self, now: Instant, range: ByteRange) -> Observation {
        self.observe_start(now, range, false)
    }

    /// The read goes on right where the last one ended.
    pub fn goes_on(&self, range: ByteRange) -> bool {
        self.cursor(self.last)
            .is_some_and(|cursor| cursor.ends_at(range.start.0))
    }

    /// The same as [`Recogniser::observe`].
    ///
    /// `is_start`  a run is known that begins with this read: unless the read may be one of its
    ///             pipeline's that comes early, its reader is there now, also over old ground
    pub fn observe_start(&mut self, now: Instant, range: ByteRange, is_start: bool) -> Observation {
        if range.length.0 == 0 && self.cursor(self.last).is_some() {
            return self.report(self.last, Moved::Continued);
        }
        self.read_count += 1;
        let change = self.stretches.add(now, range);
        let best = self.best_fit(range);
        let joined = matches!(best, Some((_, Fit::Joined | Fit::Stepped)));
        self.joined_bits = self.joined_bits << 1 | u32::from(joined);
        if change == StretchChange::Began
            && let Some(stepping) = self.stretches.stepping(now)
            && !self.is_in_order(range, best, stepping)
        {
            return self.begin_stepping(now, range, stepping);
        }
        let again = core::mem::take(&mut self.again);
        let is_in_pipeline = |index: CursorIndex| {
            let cursor = self.cursor(index);
            cursor.is_some_and(|cursor| cursor.may_be_out_of_order(range))
        };
        match best {
            Some((index, Fit::Again(_) | Fit::Loose(_))) if is_start && !is_in_pipeline(index) => {
                self.begin(now, range, true)
            }
            Some((_, Fit::Again(_))) if again.is_some_and(|span| span.end == range.start.0) => {
                // Two reads in order over old ground: the reader went back to play it again.
                let start = again.map_or(range.start.0, |span| span.start);
                self.begin(now, ByteRange::new(start, range.end() - start), true)
            }
            Some((index, fit)) => {
                self.again = matches!(fit, Fit::Again(_)).then_some(Span {
                    start: range.start.0,
                    end: range.end(),
                });
                self.continue_at(now, index, range, fit)
            }
            None => {
                let presumed = range.start.0 == 0 || self.looks_like_a_seek();
                self.begin(now, range, presumed)
            }
        }
    }

    /// A cursor, None when there is none of that index.
    pub fn cursor(&self, index: CursorIndex) -> Option<&Cursor> {
        self.place(index).map(|place| &place.cursor)
    }

    /// All cursors.
    pub fn cursors(&self) -> impl Iterator<Item = (CursorIndex, &Cursor)> {
        (0..).zip(&self.places).filter_map(|(index, place)| {
            let cursor = &place.as_ref()?.cursor;
            Some((CursorIndex(index), cursor))
        })
    }

    /// True when the last reads had no order at all.
    pub fn is_random(&self) -> bool {
        self.read_count >= u64::from(RANDOM_READ_COUNT_MIN)
            && self.joined_bits.count_ones()
                <= RANDOM_JOINED_COUNT_MAX * self.read_count.min(32) as u32 / 32
    }

    fn place(&self, index: CursorIndex) -> Option<&Place> {
        self.places.get(usize::from(index.0))?.as_ref()
    }

    fn place_mut(&mut self, index: CursorIndex) -> Option<&mut Place> {
        self.places.get_mut(usize::from(index.0))?.as_mut()
    }

    fn best_fit(&self, range: ByteRange) -> Option<(CursorIndex, Fit)> {
        // A read that goes on right where the last one ended is its cursor's: that another one
        // might step here, give or take, is chance. Two that step alike would take the pieces of
        // each frame in turn.
        let goes_on = |index: CursorIndex, fit: Fit, place: &Place| {
            index == self.last && fit == Fit::Joined && place.cursor.ends_at(range.start.0)
        };
        self.occupied()
            .filter_map(|(index, place)| Some((index, place.fit(range, self.read_count)?, place)))
            .min_by_key(|&(index, fit, place)| {
                (!goes_on(index, fit, place), fit, u64::MAX - place.touched)
            })
            .map(|(index, fit, _)| (index, fit))
    }

    /// True when a read that looks like a step is only the read that its cursor expects.
    fn is_in_order(
        &self,
        range: ByteRange,
        best: Option<(CursorIndex, Fit)>,
        stepping: Stepping,
    ) -> bool {
        let Some((index, fit)) = best else {
            return false;
        };
        let cursor = self.cursor(index);
        let disorder = || cursor.is_some_and(|c| c.may_be_out_of_order(range));
        match fit {
            Fit::Stepped => cursor.is_some_and(|c| c.steps_like(stepping)),
            Fit::Joined => disorder(),
            Fit::Loose(_) | Fit::Again(_) => disorder() && !stepping.is_beyond_doubt(),
        }
    }

    fn report(&mut self, index: CursorIndex, moved: Moved) -> Observation {
        self.last = index;
        let pattern = self.cursor(index).map(Cursor::pattern);
        Observation {
            cursor: index,
            pattern: pattern.unwrap_or_default(),
            moved,
        }
    }

    // ---- Continue ----

    fn continue_at(
        &mut self,
        now: Instant,
        index: CursorIndex,
        range: ByteRange,
        fit: Fit,
    ) -> Observation {
        let (read_count, random) = (self.read_count, self.is_random());
        if let Some(place) = self.place_mut(index) {
            // Any reader may go over old ground.
            if place.left && !matches!(fit, Fit::Again(_)) {
                place.come_back(read_count);
            }
            place.cursor.take(now, range, fit);
            place.cursor.call_random(random);
            place.touched = read_count;
        }
        let moved = match self.jumped_from(index) {
            Some(from) => Moved::Jumped { from },
            None => Moved::Continued,
        };
        self.report(index, moved)
    }

    /// The established cursor whose reader is at `index` now, if that question is due.
    fn jumped_from(&mut self, index: CursorIndex) -> Option<CursorIndex> {
        let place = self.place(index)?;
        let due = !place.answered && place.reads_here(self.read_count) && place.cursor.is_settled();
        if !due {
            return None;
        }
        let (began, return_count) = (place.began, place.return_count);
        let from = self
            .occupied()
            .filter(|&(other, p)| other != index && p.may_have_left(began, return_count))
            .max_by_key(|(_, p)| p.touched)
            .map(|(other, _)| other);
        let here = self.place_mut(index)?;
        here.answered = true;
        here.heir = from.is_some();
        let left = self.place_mut(from?)?;
        left.left = true;
        left.heir = false;
        from
    }

    fn occupied(&self) -> impl Iterator<Item = (CursorIndex, &Place)> {
        (0..)
            .zip(&self.places)
            .filter_map(|(index, place)| Some((CursorIndex(index), place.as_ref()?)))
    }

    // ---- Begin ----

    fn begin(&mut self, now: Instant, range: ByteRange, presumed: bool) -> Observation {
        let mut cursor = Cursor::begin(now, range, presumed);
        cursor.call_random(self.is_random());
        let index = self.free_index();
        self.places[usize::from(index.0)] = Some(Place::begin(cursor, self.read_count));
        self.report(index, Moved::Began)
    }

    /// A reader that read in order until now reads elsewhere: it will go on there.
    fn looks_like_a_seek(&self) -> bool {
        let recent = (self.joined_bits >> 1) & 0xff;
        recent.count_ones() >= 6 && self.cursors().any(|(_, c)| c.is_established())
    }

    fn free_index(&self) -> CursorIndex {
        let by_use = |place: &Option<Place>| match place {
            None => (0, 0),
            Some(p) if self.read_count - p.touched > STALE_READ_COUNT => (1, p.touched),
            Some(p) if !p.cursor.is_settled() => (2, p.touched),
            Some(p) => (3, p.touched),
        };
        let places = (0..).zip(&self.places);
        let least = places.min_by_key(|(_, place)| by_use(place));
        CursorIndex(least.map_or(0, |(index, _)| index))
    }

    // ---- Stepping ----

    /// The last stretches step. The cursor of the stretch before this one goes on as a stepping
    /// one, of several the one read last; cursors that were only single stretches of the trail are
    /// forgotten.
    fn begin_stepping(
        &mut self,
        now: Instant,
        range: ByteRange,
        stepping: Stepping,
    ) -> Observation {
        let Some((stretch, before)) = self.stretches.last_two() else {
            return self.begin(now, range, false);
        };
        let holder = self
            .occupied()
            .filter(|(_, p)| p.cursor.covers(before.start))
            .max_by_key(|(_, p)| p.touched)
            .map(|(index, _)| index);
        let Some(index) = holder else {
            return self.begin(now, range, false);
        };
        let read_count = self.read_count;
        if let Some(place) = self.place_mut(index) {
            place.cursor.begin_stepping(stepping, stretch, before.start);
            place.touched = read_count;
            place.left = false;
        }
        self.forget_trail(index);
        self.report(index, Moved::Continued)
    }

    fn forget_trail(&mut self, keep: CursorIndex) {
        for at in 0..CURSOR_COUNT_MAX {
            let single = self.places[at].as_ref().is_some_and(|p| {
                !p.cursor.is_settled()
                    && self
                        .stretches
                        .spans()
                        .any(|stretch| p.cursor.covers(stretch.start))
            });
            if single && at != usize::from(keep.0) {
                self.places[at] = None;
            }
        }
        self.stretches.forget();
    }
}

impl Place {
    fn begin(cursor: Cursor, read_count: u64) -> Place {
        Place {
            cursor,
            began: read_count,
            touched: read_count,
            left: false,
            return_count: 0,
            answered: false,
            heir: false,
        }
    }

    /// A read that touches nothing is early only at a place that is being read now.
    fn fit(&self, range: ByteRange, read_count: u64) -> Option<Fit> {
        let deserted = self.left || read_count - self.touched > DESERTED_READ_COUNT;
        let fit = self.cursor.fit(range)?;
        (!deserted || !matches!(fit, Fit::Loose(_))).then_some(fit)
    }

    fn come_back(&mut self, read_count: u64) {
        self.left = false;
        self.answered = false;
        self.began = read_count;
        self.return_count = self.return_count.saturating_add(1);
    }

    fn reads_here(&self, read_count: u64) -> bool {
        read_count >= self.began + 2
    }

    /// True when the reader of this place may be the one that began reading elsewhere at `began`.
    fn may_have_left(&self, began: u64, return_count: u8) -> bool {
        let silent = self.touched < began;
        let known = self.heir || self.cursor.is_established();
        let two_readers = return_count > 0 && self.return_count > 0;
        silent && known && !self.left && !two_readers
    }
}
