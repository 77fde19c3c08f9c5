// SPDX-License-Identifier: Apache-2.0
//! Follows sequences in which every frame is a file of its own.
//!
//! One tracker watches the opens of one folder by one session. It sorts them by sequence, which is
//! prefix and suffix, and by reader, which is a place in a sequence, learns direction and step from
//! the last numbers in any order, and names the frames that come next. That a file of such a name
//! exists is not its business.
//!
//! The name alone does not show which of its digits are the frame's number: the last ones are where
//! nothing speaks against them. A name that differs from one opened before in other digits and in
//! these alone, as `shot_1001_v002` and `shot_1002_v002` do, is the beginning of a guess; a third
//! one makes it a sequence.

use super::frame_name::{FrameName, frame_file_name};
use super::recogniser::Moved;
use crate::units::*;
use alloc::string::String;
use alloc::vec::Vec;

/// Readers followed in one folder, unless said otherwise.
pub const READER_COUNT_MAX: usize = 8;

/// Numbers remembered of a reader.
const RECENT_COUNT_MAX: usize = 8;

/// Gaps looked at to find the step.
const GAP_COUNT: usize = 5;

/// How many steps from its place a reader may go on.
const WINDOW_STEP_COUNT: u64 = 16;

/// How many frames away the second frame of a reader may be.
const STEP_MAX: u64 = 64;

/// So many different numbers make a sequence. Frames have three digits or more, or zeros in front;
/// `f0.bin` and `f1.bin` are more often two files than two frames, so that of such names more are
/// asked for. A player that needs those is past them in a sixth of a second.
const NUMBERS_LEAST: usize = 2;
const NUMBERS_LEAST_OF_FEW_DIGITS: usize = 4;
/// The same, where they are not the last digits of the name: two cameras side by side differ once
/// in theirs.
pub const NUMBERS_LEAST_OF_OTHERS: usize = 3;
/// So many contradictions end such a guess.
const DOUBTS_LEAST: u32 = 2;

/// Fewer digits than this, without zeros in front, are few.
const DIGITS_OF_FRAMES: u8 = 3;

/// A player opens frames no slower than this while it plays; after it the next open is a start.
const SILENCE: Duration = Duration::from_s(10);

/// Which reader of a [`SequenceTracker`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReaderIndex(pub u8);

/// The lesson of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceObservation {
    /// The reader of the open.
    pub reader: ReaderIndex,
    /// Its meaning.
    pub moved: Moved<ReaderIndex>,
    /// Frames from one to the next, negative backwards; None while nothing is known.
    pub step: Option<i64>,
    /// Number of the frame that was opened.
    pub frame: u64,
    /// That it is a frame of this sequence may be an accident: the next opens show it.
    pub is_guess: bool,
}

/// Watches the opens of one folder.
#[derive(Clone, Debug)]
pub struct SequenceTracker {
    readers: Vec<Reader>,
    reader_count_max: usize,
    open_count: u64,
}

impl Default for SequenceTracker {
    fn default() -> SequenceTracker {
        SequenceTracker::new()
    }
}

#[derive(Clone, Debug)]
struct Reader {
    prefix: String,
    suffix: String,
    /// Fewest digits seen, so that `img9` is found from `img10`.
    width: u8,
    padded: bool,
    /// The last different numbers, the newest last.
    recent: [u64; RECENT_COUNT_MAX],
    recent_count: usize,
    step: Option<i64>,
    frame_bytes: ByteCount,
    began: u64,
    touched: u64,
    last_open: Instant,
    left: bool,
    answered: bool,
    /// Its name, as long as it is the only one.
    only: String,
    /// Its number is not the last digits: the reader of the name that was this one's first frame,
    /// for which they are the number.
    other_than: Option<ReaderIndex>,
    /// How often that was contradicted.
    doubt_count: u32,
}

impl SequenceTracker {
    /// Nothing was opened yet.
    pub fn new() -> SequenceTracker {
        SequenceTracker::of_readers(READER_COUNT_MAX)
    }

    /// The same, for another number of readers (1 to 255) than [`READER_COUNT_MAX`].
    pub fn of_readers(reader_count_max: usize) -> SequenceTracker {
        SequenceTracker {
            readers: Vec::new(),
            reader_count_max: reader_count_max.clamp(1, 255),
            open_count: 0,
        }
    }

    /// The session opened the file `name` of `size` in this folder. None: it is no frame, since its
    /// name has no number, or it is a whole clip.
    pub fn opened(
        &mut self,
        now: Instant,
        name: &str,
        size: ByteCount,
    ) -> Option<SequenceObservation> {
        let frame = FrameName::parse(name)?;
        if frame.is_clip() || frame.with_number(frame.number()).is_none() {
            return None;
        }
        self.open_count += 1;
        let usual = self.nearest(now, &frame);
        let goes_on = usual
            .and_then(|index| self.reader(index))
            .is_some_and(|r| r.step.is_some() || !r.recent().contains(&frame.number()));
        if !goes_on && let Some(seen) = self.opened_by_others(now, name, size, true) {
            if usual.is_none() {
                self.remember(now, name, &frame, size);
            }
            return Some(seen);
        }
        let (reader, moved) = match usual {
            Some(reader) => {
                let doubted = self.doubt(reader, &frame);
                let moved = self.continue_at(now, reader, &frame, size);
                let moved = doubted.map_or(moved, |from| Moved::Jumped { from });
                (reader, moved)
            }
            None => match self.opened_by_others(now, name, size, false) {
                Some(seen) => {
                    self.remember(now, name, &frame, size);
                    return Some(seen);
                }
                None => (self.begin(now, name, &frame, size), Moved::Began),
            },
        };
        Some(SequenceObservation {
            reader,
            moved,
            step: self.reader(reader)?.step,
            frame: frame.number(),
            is_guess: false,
        })
    }

    /// The same, where other digits than the last of the name are the number. `known`: of a
    /// sequence that is one; else of one that may become one.
    fn opened_by_others(
        &mut self,
        now: Instant,
        name: &str,
        size: ByteCount,
        known: bool,
    ) -> Option<SequenceObservation> {
        let readings = || FrameName::others(name).filter(|f| f.with_number(f.number()).is_some());
        let begun = readings().find_map(|frame| {
            let (index, _) = self
                .occupied()
                .filter(|(_, r)| r.other_than.is_some() && r.step.is_some() == known)
                .filter(|(_, r)| !r.left)
                .filter(|(_, r)| r.is_of(&frame) && now.since(r.last_open) <= SILENCE)
                .filter_map(|(index, r)| Some((index, r.distance(frame.number())?)))
                .min_by_key(|&(_, distance)| distance)?;
            Some((index, frame))
        });
        let (reader, frame, mut moved) = match begun {
            Some((index, frame)) => {
                let moved = self.continue_at(now, index, &frame, size);
                (index, frame, moved)
            }
            None if known => return None,
            None => {
                let (from, first, frame) = readings().find_map(|frame| {
                    let (from, first) = self.single_like(now, &frame)?;
                    Some((from, first, frame))
                })?;
                let mut reader = Reader::begin(now, self.open_count, "", &frame, size, None);
                reader.recent[0] = first;
                reader.other_than = Some(from);
                reader.take(now, self.open_count, &frame, size);
                (self.enter(reader), frame, Moved::Began)
            }
        };
        let entry = self.readers.get_mut(usize::from(reader.0))?;
        let step = entry.step;
        if step.is_some() && !known {
            // The reader of the first frame is this one: the last digits of its name were no
            // frame's number.
            entry.answered = true;
            let from = entry.other_than.filter(|from| *from != reader);
            if let Some(from) = from
                && let Some(single) = self.readers.get_mut(usize::from(from.0))
                && single.recent_count == 1
                && !single.left
            {
                single.left = true;
                moved = Moved::Jumped { from };
            }
        }
        Some(SequenceObservation {
            reader,
            moved,
            step,
            frame: frame.number(),
            is_guess: step.is_none(),
        })
    }

    /// A name goes on with its last digits from the only name known of a reader, which had been
    /// taken for a frame by other digits: shots that are read side by side look like that. At the
    /// second such name the guess is given up.
    fn doubt(&mut self, usual: ReaderIndex, frame: &FrameName<'_>) -> Option<ReaderIndex> {
        let reader = self.reader(usual)?;
        if reader.recent_count > 1 || reader.recent().contains(&frame.number()) {
            return None;
        }
        let only = reader.only.clone();
        let taken = |r: &Reader| FrameName::others(&only).any(|f| r.is_of(&f));
        let guesses = (0..).zip(self.readers.iter_mut());
        for (index, guess) in guesses {
            if guess.other_than.is_some() && !guess.left && taken(guess) {
                guess.doubt_count += 1;
                guess.left = guess.doubt_count >= DOUBTS_LEAST;
                if guess.left {
                    guess.step = None;
                    return Some(ReaderIndex(index));
                }
            }
        }
        None
    }

    /// A reader of which one frame alone is known, with a name that differs in nothing but this
    /// number; and the number there.
    fn single_like(&self, now: Instant, frame: &FrameName<'_>) -> Option<(ReaderIndex, u64)> {
        self.occupied()
            .filter(|(_, r)| r.recent_count == 1 && !r.left && r.other_than.is_none())
            .filter(|(_, r)| now.since(r.last_open) <= SILENCE)
            .filter_map(|(index, r)| {
                let first = FrameName::behind(&r.only, frame.prefix())?;
                let distance = first.number().abs_diff(frame.number());
                let near = (1..=STEP_MAX).contains(&distance) && first.same_sequence(frame);
                near.then_some((index, first.number(), distance))
            })
            .min_by_key(|&(_, _, distance)| distance)
            .map(|(index, first, _)| (index, first))
    }

    /// Know this name as that of a frame whose number are the last digits, if there is room: the
    /// guess may be wrong.
    fn remember(&mut self, now: Instant, name: &str, frame: &FrameName<'_>, size: ByteCount) {
        if self.readers.len() < self.reader_count_max {
            let reader = Reader::begin(now, self.open_count, name, frame, size, None);
            self.readers.push(reader);
        }
    }

    /// The next `count` frames of a reader, in the order in which it will open them. None while its
    /// step is unknown.
    pub fn ahead(&self, reader: ReaderIndex, count: u32) -> AheadFrames<'_> {
        let reader = self.reader(reader);
        AheadFrames {
            reader,
            at: reader.map_or(0, Reader::front),
            left: count,
        }
    }

    /// The file name of frame `number` of a reader's sequence.
    pub fn name(&self, reader: ReaderIndex, number: u64) -> Option<String> {
        let reader = self.reader(reader)?;
        frame_file_name(&reader.prefix, number, reader.width, &reader.suffix)
    }

    /// Size of the last frame that was not empty.
    pub fn frame_bytes(&self, reader: ReaderIndex) -> Option<ByteCount> {
        Some(self.reader(reader)?.frame_bytes)
    }

    fn reader(&self, index: ReaderIndex) -> Option<&Reader> {
        self.readers.get(usize::from(index.0))
    }

    fn occupied(&self) -> impl Iterator<Item = (ReaderIndex, &Reader)> {
        (0..)
            .zip(&self.readers)
            .map(|(index, reader)| (ReaderIndex(index), reader))
    }

    /// The reader that may have come to this frame; of several the nearest.
    fn nearest(&self, now: Instant, frame: &FrameName<'_>) -> Option<ReaderIndex> {
        self.occupied()
            .filter(|(_, r)| r.other_than.is_none() || r.step.is_some())
            .filter(|(_, r)| r.is_of(frame) && now.since(r.last_open) <= SILENCE)
            .filter_map(|(index, r)| Some((index, r.distance(frame.number())?)))
            .min_by_key(|&(_, distance)| distance)
            .map(|(index, _)| index)
    }

    fn continue_at(
        &mut self,
        now: Instant,
        index: ReaderIndex,
        frame: &FrameName<'_>,
        size: ByteCount,
    ) -> Moved<ReaderIndex> {
        let open_count = self.open_count;
        let Some(reader) = self.readers.get_mut(usize::from(index.0)) else {
            return Moved::Continued;
        };
        let returned = core::mem::take(&mut reader.left);
        reader.take(now, open_count, frame, size);
        match self.jumped_from(index) {
            Some(from) => Moved::Jumped { from },
            None if returned => Moved::Began,
            None => Moved::Continued,
        }
    }

    /// The playing reader of the same sequence that fell silent when this one began.
    fn jumped_from(&mut self, index: ReaderIndex) -> Option<ReaderIndex> {
        let here = self.reader(index)?;
        if here.answered || here.step.is_none() || here.recent_count < 2 {
            return None;
        }
        let from = self
            .occupied()
            .filter(|&(other, r)| other != index && r.prefix == here.prefix)
            .filter(|(_, r)| r.suffix == here.suffix && r.step.is_some())
            .filter(|(_, r)| !r.left && r.touched < here.began)
            .max_by_key(|(_, r)| r.touched)
            .map(|(other, _)| other);
        if let Some(here) = self.readers.get_mut(usize::from(index.0)) {
            here.answered = true;
        }
        if let Some(left) = self.readers.get_mut(usize::from(from?.0)) {
            left.left = true;
        }
        from
    }

    fn begin(
        &mut self,
        now: Instant,
        name: &str,
        frame: &FrameName<'_>,
        size: ByteCount,
    ) -> ReaderIndex {
        let step = self.step_of_a_seek(now, frame);
        let reader = Reader::begin(now, self.open_count, name, frame, size, step);
        self.enter(reader)
    }

    /// Enter a reader, in the place of the one longest silent if there is no other.
    fn enter(&mut self, reader: Reader) -> ReaderIndex {
        if self.readers.len() < self.reader_count_max {
            self.readers.push(reader);
            return ReaderIndex((self.readers.len() - 1) as u8);
        }
        let index = (0..).zip(&self.readers).min_by_key(|(_, r)| r.touched);
        let index = index.map_or(0, |(index, _)| index);
        if let Some(longest_silent) = self.readers.get_mut(usize::from(index)) {
            *longest_silent = reader;
        }
        ReaderIndex(index)
    }

    /// A reader that played this sequence a moment ago goes on elsewhere as it did.
    fn step_of_a_seek(&self, now: Instant, frame: &FrameName<'_>) -> Option<i64> {
        self.occupied()
            .filter(|(_, r)| r.is_of(frame) && now.since(r.last_open) <= SILENCE)
            .max_by_key(|(_, r)| r.touched)
            .filter(|(_, r)| r.recent_count >= RECENT_COUNT_MAX / 2)
            .and_then(|(_, r)| r.step)
    }
}

impl Reader {
    fn begin(
        now: Instant,
        open_count: u64,
        name: &str,
        frame: &FrameName<'_>,
        size: ByteCount,
        step: Option<i64>,
    ) -> Reader {
        let mut recent = [0; RECENT_COUNT_MAX];
        recent[0] = frame.number();
        Reader {
            prefix: frame.prefix().into(),
            suffix: frame.suffix().into(),
            width: frame.width(),
            padded: frame.padded(),
            recent,
            recent_count: 1,
            step,
            frame_bytes: size,
            began: open_count,
            touched: open_count,
            last_open: now,
            left: false,
            answered: false,
            only: name.into(),
            other_than: None,
            doubt_count: 0,
        }
    }

    fn is_of(&self, frame: &FrameName<'_>) -> bool {
        self.prefix == frame.prefix() && self.suffix == frame.suffix() && self.counts_like(frame)
    }

    /// Widths agree as in [`FrameName::same_sequence`].
    fn counts_like(&self, frame: &FrameName<'_>) -> bool {
        frame.width() == self.width
            || (frame.width() > self.width && !frame.padded())
            || (frame.width() < self.width && !self.padded)
    }

    fn take(&mut self, now: Instant, open_count: u64, frame: &FrameName<'_>, size: ByteCount) {
        self.width = self.width.min(frame.width());
        self.padded |= frame.padded();
        self.touched = open_count;
        self.last_open = now;
        if size.0 > 0 {
            self.frame_bytes = size;
        }
        self.remember(frame.number());
        if self.recent_count > 1 {
            self.only = String::new();
        }
        self.step = self.judge().or(self.step);
    }

    fn remember(&mut self, number: u64) {
        let known = self.recent().iter().position(|&other| other == number);
        let full = (self.recent_count == RECENT_COUNT_MAX).then_some(0);
        if let Some(gone) = known.or(full) {
            self.recent.copy_within(gone + 1..self.recent_count, gone);
            self.recent_count -= 1;
        }
        self.recent[self.recent_count] = number;
        self.recent_count += 1;
    }

    fn recent(&self) -> &[u64] {
        &self.recent[..self.recent_count]
    }

    /// The last `count` numbers at most.
    fn latest(&self, count: usize) -> &[u64] {
        &self.recent()[self.recent_count.saturating_sub(count)..]
    }

    fn numbers_least(&self) -> usize {
        match self.width < DIGITS_OF_FRAMES && !self.padded {
            true => NUMBERS_LEAST_OF_FEW_DIGITS,
            false if self.other_than.is_some() => NUMBERS_LEAST_OF_OTHERS,
            false => NUMBERS_LEAST,
        }
    }

    /// The distance of neighbours among the latest numbers, signed by where they go.
    fn judge(&self) -> Option<i64> {
        if self.recent_count < self.numbers_least() {
            return None;
        }
        let gap = i64::try_from(self.gap()?).ok()?;
        match self.direction() {
            core::cmp::Ordering::Greater => Some(gap),
            core::cmp::Ordering::Less => Some(-gap),
            core::cmp::Ordering::Equal => None,
        }
    }

    /// A known step is kept until all distances are larger or most are smaller: frames are dropped
    /// now and then.
    fn gap(&self) -> Option<u64> {
        let (gap, count) = common_gap(self.latest(GAP_COUNT + 1))?;
        match self.step {
            Some(step) if gap > step.unsigned_abs() && count < GAP_COUNT => {
                Some(step.unsigned_abs())
            }
            _ => Some(gap),
        }
    }

    /// Upwards or downwards. A known direction turns when four numbers in a row go the other way,
    /// as threads that open a few frames at once do not keep order.
    fn direction(&self) -> core::cmp::Ordering {
        let latest = self.latest(4);
        let half = latest.len() / 2;
        let sum = |numbers: &[u64]| numbers.iter().map(|&n| u128::from(n)).sum::<u128>();
        let trend = sum(&latest[latest.len() - half..]).cmp(&sum(&latest[..half]));
        let turned = latest.len() == 4 && latest.windows(2).all(|w| w[1].cmp(&w[0]) == trend);
        match self.step {
            Some(step) if !turned => step.cmp(&0),
            _ => trend,
        }
    }

    /// The frame farthest in the reader's direction.
    fn front(&self) -> u64 {
        let latest = self.latest(4).iter().copied();
        let front = match self.step {
            Some(..0) => latest.min(),
            _ => latest.max(),
        };
        front.unwrap_or(0)
    }

    /// How far a frame is from the one that this reader opens next. None: it is too far.
    fn distance(&self, number: u64) -> Option<u64> {
        let window = match self.step {
            Some(step) => step.unsigned_abs().saturating_mul(WINDOW_STEP_COUNT),
            None => STEP_MAX,
        };
        let next = self.front().saturating_add_signed(self.step.unwrap_or(1));
        let distance = next.abs_diff(number);
        (distance <= window).then_some(distance)
    }
}

/// The most common gap between numbers that are neighbours in size, of equally common ones the
/// smallest; and how common it is. None when there are fewer than three numbers and they do not
/// follow each other.
fn common_gap(numbers: &[u64]) -> Option<(u64, usize)> {
    let mut sorted = [0u64; RECENT_COUNT_MAX];
    let sorted = sorted.get_mut(..numbers.len())?;
    sorted.copy_from_slice(numbers);
    sorted.sort_unstable();
    let gaps = || sorted.windows(2).map(|w| w[1] - w[0]);
    let count_of = |gap: u64| gaps().filter(|&other| other == gap).count();
    let gap = gaps().max_by_key(|&gap| (count_of(gap), u64::MAX - gap))?;
    let count = count_of(gap);
    let enough = count * 2 >= gaps().count() && (gap == 1 || count >= 2);
    enough.then_some((gap, count))
}

/// Numbers of the frames that come next; see [`SequenceTracker::ahead`].
#[derive(Clone, Debug)]
pub struct AheadFrames<'a> {
    reader: Option<&'a Reader>,
    at: u64,
    left: u32,
}

impl Iterator for AheadFrames<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let reader = self.reader?;
        self.left = self.left.checked_sub(1)?;
        self.at = self.at.checked_add_signed(reader.step?)?;
        Some(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Random;
    use super::*;
    use alloc::format;

    const FRAME: Duration = Duration::from_ms(42);
    const BYTES: ByteCount = ByteCount(12_000_000);

    struct Folder {
        tracker: SequenceTracker,
        now: Instant,
    }

    impl Folder {
        fn new() -> Folder {
            Folder {
                tracker: SequenceTracker::new(),
                now: Instant(1_000_000_000),
            }
        }

        fn open(&mut self, name: &str) -> Option<SequenceObservation> {
            self.now = self.now + FRAME;
            self.tracker.opened(self.now, name, BYTES)
        }

        fn frame(&mut self, number: u64) -> SequenceObservation {
            self.open(&format!("shot.{number:04}.dpx")).unwrap()
        }

        fn ahead(&self, reader: ReaderIndex, count: u32) -> Vec<u64> {
            self.tracker.ahead(reader, count).collect()
        }
    }

    #[test]
    fn two_frames_in_a_row_are_play() {
        let mut folder = Folder::new();
        let first = folder.frame(1);
        assert_eq!((first.moved, first.step), (Moved::Began, None));
        assert_eq!(folder.ahead(first.reader, 3), []);
        let second = folder.frame(2);
        assert_eq!((second.moved, second.step), (Moved::Continued, Some(1)));
        assert_eq!(folder.ahead(second.reader, 3), [3, 4, 5]);
        let name = folder.tracker.name(second.reader, 10_000);
        assert_eq!(name.as_deref(), Some("shot.10000.dpx"));
        assert_eq!(folder.tracker.frame_bytes(second.reader), Some(BYTES));
    }

    #[test]
    fn the_digits_that_change_from_file_to_file_are_the_frame() {
        let names: [fn(u64) -> String; 3] = [
            |n| format!("shot_{n}_v002.exr"),
            |n| format!("scan_{n:06}_4k.dpx"),
            |n| format!("{n:04}.left.2k.tif"),
        ];
        for name in names {
            let mut folder = Folder::new();
            let mut from = 1001;
            let first = folder.open(&name(from)).unwrap();
            assert_eq!((first.step, first.is_guess), (None, false));
            let second = folder.open(&name(from + 1)).unwrap();
            assert_eq!((second.step, second.is_guess), (None, true));
            let third = folder.open(&name(from + 2)).unwrap();
            assert_eq!((third.step, third.is_guess), (Some(1), false));
            // The reader has one contract, and takes it along.
            assert_eq!(third.moved, Moved::Jumped { from: first.reader });
            from += 3;
            for number in from..from + 200 {
                let seen = folder.open(&name(number)).unwrap();
                assert_eq!((seen.reader, seen.frame), (third.reader, number));
                assert_eq!((seen.step, seen.moved), (Some(1), Moved::Continued));
                let next = folder.tracker.name(seen.reader, number + 1);
                assert_eq!(next, Some(name(number + 1)));
            }
        }
    }

    #[test]
    fn cameras_side_by_side_are_sequences_of_their_own() {
        for count in [2, 3, 6] {
            let mut folder = Folder::new();
            for number in 1..100u64 {
                for camera in 1..=count {
                    let name = |number| format!("cam{camera:02}_{number:04}.dpx");
                    let seen = folder.open(&name(number)).unwrap();
                    if number > 4 {
                        assert_eq!((seen.frame, seen.step), (number, Some(1)), "{camera}");
                        let next = folder.tracker.name(seen.reader, number + 1);
                        assert_eq!(next, Some(name(number + 1)));
                    }
                }
            }
        }
    }

    #[test]
    fn versions_of_one_frame_are_no_reason_to_leave_a_sequence() {
        let mut folder = Folder::new();
        for number in 1001..1010 {
            folder.open(&format!("s_{number}_v002.exr"));
        }
        let other = folder.open("s_1009_v003.exr").unwrap();
        assert!(other.step.is_none());
        let seen = folder.open("s_1010_v002.exr").unwrap();
        assert_eq!((seen.frame, seen.step), (1010, Some(1)));
    }

    #[test]
    fn a_look_at_single_frames_predicts_nothing() {
        let mut folder = Folder::new();
        for number in [10, 500, 1000, 1500] {
            let seen = folder.frame(number);
            assert_eq!(folder.ahead(seen.reader, 5), []);
        }
    }

    #[test]
    fn play_survives_dropped_and_reopened_frames() {
        for seed in 0..300 {
            let mut random = Random(seed);
            let mut folder = Folder::new();
            let mut number = 100;
            for n in 0..300 {
                let seen = folder.frame(number);
                if random.below(4) == 0 {
                    folder.frame(number);
                }
                if n > 8 {
                    assert_eq!(seen.step, Some(1), "seed {seed}, open {n}");
                    assert_eq!(seen.moved, Moved::Continued);
                    assert_eq!(folder.ahead(seen.reader, 2), [number + 1, number + 2]);
                }
                number += if random.below(8) == 0 {
                    random.between(2, 3)
                } else {
                    1
                };
            }
        }
    }

    #[test]
    fn frames_opened_in_any_order_by_a_few_threads_are_play() {
        for seed in 0..300 {
            let mut random = Random(seed);
            let mut folder = Folder::new();
            let mut waiting: Vec<u64> = (1001..1005).collect();
            let (mut known, mut newest) = (0, 0);
            for n in 0..200 {
                // No thread is overtaken by more than six frames.
                let starving = waiting[0] + 6 < 1005 + n;
                let which = if starving {
                    0
                } else {
                    random.below(3) as usize
                };
                let number = waiting.remove(which);
                waiting.push(1005 + n);
                newest = newest.max(number);
                let seen = folder.frame(number);
                if n > 8 {
                    assert_eq!(seen.moved, Moved::Continued, "seed {seed}, open {n}");
                    let ahead = folder.ahead(seen.reader, 16);
                    let next = waiting
                        .iter()
                        .all(|next| ahead.contains(next) || *next < newest);
                    known += u32::from(seen.step == Some(1) && next);
                }
            }
            assert!(known >= 150, "seed {seed}: {known} of 191");
        }
    }

    #[test]
    fn backwards_and_every_nth_frame() {
        for step in [-1i64, 2, -2, 5, -7, 25] {
            let mut folder = Folder::new();
            let mut number = 4000u64;
            for n in 0..30 {
                let seen = folder.frame(number);
                if n >= 3 {
                    assert_eq!(seen.step, Some(step), "frame {n}");
                    let next = number.checked_add_signed(step).unwrap();
                    assert_eq!(folder.ahead(seen.reader, 1), [next]);
                }
                number = number.checked_add_signed(step).unwrap();
            }
        }
    }

    #[test]
    fn a_shuttle_that_turns_round_is_followed_within_four_frames() {
        let mut folder = Folder::new();
        for number in 100..150 {
            folder.frame(number);
        }
        for number in (100..149).rev() {
            let seen = folder.frame(number);
            assert_eq!(seen.moved, Moved::Continued);
            if number <= 146 {
                assert_eq!(seen.step, Some(-1), "{number}");
                assert_eq!(folder.ahead(seen.reader, 2), [number - 1, number - 2]);
            }
        }
    }

    #[test]
    fn prediction_ends_at_frame_zero() {
        let mut folder = Folder::new();
        folder.frame(3);
        folder.frame(2);
        let seen = folder.frame(1);
        assert_eq!(folder.ahead(seen.reader, 10), [0]);
    }

    #[test]
    fn unpadded_numbers_are_found_from_both_sides_of_ten() {
        let mut folder = Folder::new();
        for number in (8..13).rev() {
            folder.open(&format!("img{number}.exr"));
        }
        let name = |folder: &Folder, n: u64| folder.tracker.name(ReaderIndex(0), n);
        assert_eq!(name(&folder, 7).as_deref(), Some("img7.exr"));
        assert_eq!(name(&folder, 100).as_deref(), Some("img100.exr"));
    }

    #[test]
    fn a_jump_is_predicted_at_once_and_told_at_its_second_frame() {
        let mut folder = Folder::new();
        let mut before = folder.frame(1);
        for number in 2..30 {
            before = folder.frame(number);
        }
        let first = folder.frame(2000);
        assert_eq!(first.moved, Moved::Began);
        assert_eq!(folder.ahead(first.reader, 2), [2001, 2002]);
        let second = folder.frame(2001);
        let from = before.reader;
        assert_eq!(second.moved, Moved::Jumped { from });
        assert_eq!(second.reader, first.reader);
    }

    #[test]
    fn several_readers_and_sequences_of_one_folder_are_kept_apart() {
        let mut folder = Folder::new();
        let mut readers = Vec::new();
        for n in 0..100 {
            let names = [
                format!("a.{:04}.dpx", 100 + n),
                format!("a.{:04}.dpx", 5000 + n),
                format!("b.{:04}.dpx", 100 + n),
                format!("a.{:04}.exr", 900 - n),
            ];
            let seen: Vec<_> = names
                .iter()
                .map(|name| folder.open(name).unwrap())
                .collect();
            if n > 4 {
                assert!(seen.iter().all(|s| s.moved == Moved::Continued));
                let now: Vec<_> = seen.iter().map(|s| (s.reader, s.step)).collect();
                if readers.is_empty() {
                    readers = now.clone();
                }
                assert_eq!(now, readers);
            }
        }
        let steps: Vec<_> = readers.iter().map(|(_, step)| step.unwrap()).collect();
        assert_eq!(steps, [1, 1, 1, -1]);
    }

    #[test]
    fn few_digits_are_frames_when_four_follow_each_other() {
        let steps = |names: &[&str]| {
            let mut folder = Folder::new();
            let seen = names.iter().map(|name| folder.open(name).unwrap().step);
            seen.collect::<Vec<_>>()
        };
        let of_few = [None, None, None, Some(1), Some(1)];
        assert_eq!(steps(&["f0.bin", "f1.bin"]), [None, None]);
        assert_eq!(
            steps(&["f0.bin", "f1.bin", "f2.bin", "f3.bin", "f4.bin"]),
            of_few
        );
        // The same ones again are no more.
        assert_eq!(
            steps(&["f0.bin", "f1.bin", "f0.bin", "f1.bin", "f0.bin"]),
            [None; 5]
        );
        let real = ["img_12.tif", "img_13.tif", "img_14.tif", "img_15.tif"];
        assert_eq!(steps(&real), of_few[..4]);
        let across = ["s8.exr", "s9.exr", "s10.exr", "s11.exr", "s12.exr"];
        assert_eq!(steps(&across), of_few);
        for pair in [
            ["A001_0001.dpx", "A001_0002.dpx"],
            ["frame.0001.exr", "frame.0002.exr"],
            ["img_01.tif", "img_02.tif"],
            ["img_100.tif", "img_101.tif"],
        ] {
            assert_eq!(steps(&pair), [None, Some(1)], "{pair:?}");
        }
    }

    #[test]
    fn clips_and_names_without_number_are_nothing() {
        let mut folder = Folder::new();
        for name in ["A001_C003.mov", "readme.txt", "", "take 7.wav"] {
            assert_eq!(folder.open(name), None, "{name}");
        }
        let long = format!("{}1.dpx", "x".repeat(300));
        assert_eq!(folder.open(&long), None);
    }

    #[test]
    fn more_readers_than_there_is_room_for_are_survived() {
        let mut random = Random(9);
        let mut folder = Folder::new();
        for _ in 0..5000 {
            let name = format!(
                "{}.{}.dpx",
                random.below(30),
                random.next() >> random.below(64)
            );
            if let Some(seen) = folder.open(&name) {
                assert!(usize::from(seen.reader.0) < READER_COUNT_MAX);
                assert!(folder.ahead(seen.reader, 100).len() <= 100);
            }
        }
    }
}
