// SPDX-License-Identifier: Apache-2.0
//! Which bytes of one file a reader has asked for, as far as needed to tell new places from old
//! ones.
//!
//! A few spans of bytes are remembered. Where a read begins one more than that, the two that are
//! nearest to each other become one, with the bytes between them: bytes that were read once are
//! never taken for new again, and a reader that leaves much out is believed to have come less far
//! than it has.

use super::cursor::Span;
use crate::units::*;

/// A header, a tail, and a few places in between; one more for the read that comes.
const SPAN_COUNT_MAX: usize = 8;

/// The bytes of one file that were asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// In order; none touches the next.
    spans: [Span; SPAN_COUNT_MAX],
    count: usize,
}

impl Places {
    pub(super) const fn new() -> Places {
        Places {
            spans: [Span { start: 0, end: 0 }; SPAN_COUNT_MAX],
            count: 0,
        }
    }

    /// A read; how much of it had not been asked for before.
    pub(super) fn read(&mut self, range: ByteRange) -> ByteCount {
        let mut joined = Span {
            start: range.start.0,
            end: range.end(),
        };
        let mut anew = joined.end.saturating_sub(joined.start);
        if anew == 0 {
            return ByteCount(0);
        }
        let mut kept = [Span::default(); SPAN_COUNT_MAX + 1];
        let mut count = 0;
        let mut before = 0;
        for &span in self.spans.iter().take(self.count) {
            if span.end < joined.start || span.start > joined.end {
                before += usize::from(span.end < joined.start);
                kept[count] = span;
                count += 1;
                continue;
            }
            let (start, end) = (span.start.max(range.start.0), span.end.min(range.end()));
            anew = anew.saturating_sub(end.saturating_sub(start));
            joined.start = joined.start.min(span.start);
            joined.end = joined.end.max(span.end);
        }
        kept.copy_within(before..count, before + 1);
        kept[before] = joined;
        count += 1;
        if count > SPAN_COUNT_MAX {
            let gap = |&at: &usize| kept[at + 1].start - kept[at].end;
            let nearest = (0..count - 1).min_by_key(gap).unwrap_or(0);
            kept[nearest].end = kept[nearest + 1].end;
            kept.copy_within(nearest + 2..count, nearest + 1);
            count -= 1;
        }
        self.spans.copy_from_slice(&kept[..SPAN_COUNT_MAX]);
        self.count = count;
        ByteCount(anew)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Random;
    use super::*;
    use alloc::vec;

    fn read(places: &mut Places, start: u64, length: u64) -> u64 {
        places.read(ByteRange::new(start, length)).0
    }

    #[test]
    fn bytes_are_new_once() {
        let mut places = Places::new();
        let asked = [
            (0, 100, 100),
            (0, 100, 0),
            (50, 100, 50),
            (1000, 10, 10),
            (400, 100, 100),
            (140, 900, 780),
            (0, 2000, 960),
            (7, 0, 0),
        ];
        for (start, length, anew) in asked {
            assert_eq!(read(&mut places, start, length), anew, "{start}");
        }
    }

    #[test]
    fn more_places_than_are_remembered_are_never_new_twice() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let mut places = Places::new();
            let mut known = vec![false; 1000];
            for _ in 0..200 {
                let (start, length) = (random.below(900), random.below(100));
                let lies = start as usize..(start + length) as usize;
                let anew = known[lies.clone()].iter().filter(|known| !**known).count();
                assert!(read(&mut places, start, length) <= anew as u64, "{seed}");
                known[lies].fill(true);
            }
            assert!(places.spans[..places.count].is_sorted_by(|a, b| a.end < b.start));
        }
        let mut places = Places::new();
        read(&mut places, u64::MAX - 5, 100);
        read(&mut places, 0, u64::MAX);
        assert_eq!(read(&mut places, 0, u64::MAX), 0);
    }
}
