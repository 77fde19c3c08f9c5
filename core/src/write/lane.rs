// SPDX-License-Identifier: Apache-2.0
//! Which pages of a session's lane are in use.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Runs of pages that one write may lie in.
pub const RUNS_MAX: usize = 8;

/// Pages `first .. first + count` of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// Where a write lies: its bytes go through these runs in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Runs {
    list: [PageRun; RUNS_MAX],
    used: u8,
}

impl Runs {
    /// In order.
    pub fn as_slice(&self) -> &[PageRun] {
        &self.list[..usize::from(self.used)]
    }

    /// How many pages they have together.
    pub fn page_count(&self) -> u32 {
        self.as_slice().iter().map(|run| run.count).sum()
    }

    /// The page of the lane that page `index` of the write is, and how many follow it there without
    /// a gap, itself included. None past the end.
    pub fn place(&self, index: u32) -> Option<(u32, u32)> {
        let mut before = 0;
        for run in self.as_slice() {
            if index < before + run.count {
                let into = index - before;
                return Some((run.first + into, run.count - into));
            }
            before += run.count;
        }
        None
    }

    /// From another's records: as many runs as fit, none empty.
    pub fn from_runs(runs: &[PageRun]) -> Option<Runs> {
        if runs.len() > RUNS_MAX || runs.iter().any(|run| run.count == 0) {
            return None;
        }
        let mut made = Runs::default();
        for &run in runs {
            made.push(run);
        }
        Some(made)
    }

    /// Where pages `first .. first + count` of the write are.
    pub fn part(&self, first: u32, count: u32) -> Runs {
        let mut part = Runs::default();
        let (mut index, end) = (first, first + count);
        while index < end {
            let place = self.place(index);
            let (first, run) = place.expect("a part lies within the whole");
            let count = run.min(end - index);
            part.push(PageRun { first, count });
            index += count;
        }
        part
    }

    fn push(&mut self, run: PageRun) {
        if let Some(place) = self.list.get_mut(usize::from(self.used)) {
            *place = run;
            self.used += 1;
        }
    }
}

/// The pages of a lane.
#[derive(Clone, Debug)]
pub struct Lane {
    /// A bit a page; 1: in use. Bits past the end are 1.
    words: Vec<u64>,
    page_count: u32,
    free: u32,
    /// Pages up to here have memory, or may have: one of them or one behind it was in use since the
    /// lane last shrank.
    touched: u32,
    /// Pages that others need besides the piece that took them.
    held: BTreeMap<u32, HeldPage>,
}

/// A page that is held.
#[derive(Clone, Copy, Debug, Default)]
struct HeldPage {
    /// By how many.
    count: u32,
    /// The piece that took it has given it back.
    is_given: bool,
}

impl Lane {
    /// All free.
    pub fn new(page_count: u32) -> Lane {
        let mut words = alloc::vec![0; page_count.div_ceil(64) as usize];
        if let Some(last) = words.last_mut()
            && !page_count.is_multiple_of(64)
        {
            *last = u64::MAX << (page_count % 64);
        }
        Lane {
            words,
            page_count,
            free: page_count,
            touched: 0,
            held: BTreeMap::new(),
        }
    }

    /// Pages in all.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Free pages.
    pub fn free_count(&self) -> u32 {
        self.free
    }

    /// Pages that have memory. A page keeps it when it is given back, until [`Lane::shrink`].
    pub fn touched_count(&self) -> u32 {
        self.touched
    }

    /// Take `count` pages: in one run when there is one, else in as few as there are. None, and
    /// nothing is taken, when [`RUNS_MAX`] runs do not suffice. The first that fit, so that a lane
    /// has no more memory than it once needed at a time; and none from page `end` on.
    pub fn take(&mut self, count: u32, end: u32) -> Option<Runs> {
        if count == 0 || count > self.free {
            return None;
        }
        let whole = self.find_run(count).filter(|first| first + count <= end);
        let runs = match whole {
            Some(first) => Runs::from_runs(&[PageRun { first, count }])?,
            None => self.longest_runs(count, end)?,
        };
        for run in runs.as_slice() {
            self.mark(*run, true);
        }
        self.free -= count;
        Some(runs)
    }

    /// Take exactly these, as a former daemon's records have them. False, and nothing is taken,
    /// when one of them is in use or out of range, or named twice.
    pub fn claim(&mut self, runs: &Runs) -> bool {
        for (index, run) in runs.as_slice().iter().enumerate() {
            let end = run.first.checked_add(run.count);
            let fits = end.is_some_and(|end| end <= self.page_count)
                && (run.first..run.first + run.count).all(|page| !self.is_used(page));
            if !fits {
                for taken in &runs.as_slice()[..index] {
                    self.mark(*taken, false);
                    self.free += taken.count;
                }
                return false;
            }
            self.mark(*run, true);
            self.free -= run.count;
        }
        true
    }

    /// Take these although others have some of them: all of them are held, and become free when no
    /// holder is left and the piece that took them has given them back. False, and nothing is done,
    /// when one of them is out of range or named twice.
    pub fn claim_beside(&mut self, runs: &Runs) -> bool {
        let all = runs.as_slice();
        let is_within = |run: &PageRun| {
            let end = run.first.checked_add(run.count);
            end.is_some_and(|end| end <= self.page_count)
        };
        let meet =
            |a: &PageRun, b: &PageRun| a.first < b.first + b.count && b.first < a.first + a.count;
        let mut others = (1..).zip(all);
        if !all.iter().all(is_within)
            || others.any(|(next, run)| all[next..].iter().any(|other| meet(run, other)))
        {
            return false;
        }
        for run in all {
            for page in run.first..run.first + run.count {
                let is_new = !self.is_used(page);
                if is_new {
                    self.mark(
                        PageRun {
                            first: page,
                            count: 1,
                        },
                        true,
                    );
                    self.free -= 1;
                }
                let held = self.held.entry(page).or_default();
                held.count += 1;
                held.is_given |= is_new;
            }
        }
        true
    }

    /// Give pages back that were taken. Those that are held stay in use until no holder is left.
    pub fn give(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            let end = run.first + run.count;
            let mut first = run.first;
            while first < end {
                let next = self.held.range_mut(first..end).next();
                let stop = next.as_ref().map_or(end, |(page, _)| **page);
                if let Some((_, held)) = next {
                    assert!(!held.is_given, "a page was given back twice");
                    held.is_given = true;
                }
                if first < stop {
                    self.free_up(PageRun {
                        first,
                        count: stop - first,
                    });
                }
                first = stop + 1;
            }
        }
    }

    fn free_up(&mut self, run: PageRun) {
        self.mark(run, false);
        self.free += run.count;
    }

    /// One more holder needs these pages, which are in use.
    pub fn hold(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            for page in run.first..run.first + run.count {
                assert!(self.is_used(page), "a page is held that nobody uses");
                self.held.entry(page).or_default().count += 1;
            }
        }
    }

    /// A holder needs them no more.
    pub fn let_go(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            for page in run.first..run.first + run.count {
                let held = self.held.get_mut(&page);
                let held = held.expect("a page is let go of that somebody holds");
                held.count -= 1;
                if held.count > 0 {
                    continue;
                }
                let is_given = held.is_given;
                self.held.remove(&page);
                if is_given {
                    self.free_up(PageRun {
                        first: page,
                        count: 1,
                    });
                }
            }
        }
    }

    /// Pages that are in use for no other reason than that they are held.
    pub fn held_alone_count(&self) -> u32 {
        self.held.values().filter(|held| held.is_given).count() as u32
    }

    /// Pages that are held.
    pub fn held_count(&self) -> u32 {
        self.held.len() as u32
    }

    /// How many pages that have memory lie behind the last one in use.
    pub fn spare_count(&self) -> u32 {
        let mut index = self.touched.div_ceil(64);
        while index > 0 {
            index -= 1;
            let bits = (self.touched - index * 64).min(64);
            let word = self.words[index as usize];
            let used = word & (u64::MAX >> (64 - bits));
            if used != 0 {
                return self.touched - (index * 64 + 64 - used.leading_zeros());
            }
        }
        self.touched
    }

    /// The last pages behind those in use, `most` at most, which need no memory. From now on they
    /// count as having none.
    pub fn shrink(&mut self, most: u32) -> Option<PageRun> {
        let count = self.spare_count().min(most);
        self.touched -= count;
        let first = self.touched;
        (count > 0).then_some(PageRun { first, count })
    }

    fn is_used(&self, page: u32) -> bool {
        self.words
            .get((page / 64) as usize)
            .is_none_or(|word| word >> (page % 64) & 1 == 1)
    }

    fn mark(&mut self, run: PageRun, used: bool) {
        let end = run.first + run.count;
        if used {
            self.touched = self.touched.max(end);
        }
        let mut page = run.first;
        while page < end {
            let bit = page % 64;
            let bits = (64 - bit).min(end - page);
            let mask = if bits == 64 {
                u64::MAX
            } else {
                ((1 << bits) - 1) << bit
            };
            let word = &mut self.words[(page / 64) as usize];
            // Else one page would serve two writes, and have the bytes of either.
            let is_right = *word & mask == if used { 0 } else { mask };
            assert!(
                is_right,
                "a page is taken that is in use, or given back that is not"
            );
            *word ^= mask;
            page += bits;
        }
    }

    /// The next free run at or after `page`: first and length, at most `most`.
    fn free_run(&self, page: u32, most: u32) -> Option<(u32, u32)> {
        let first = self.next_bit(page, false)?;
        let end = self.next_bit(first, true).unwrap_or(self.page_count);
        Some((first, (end - first).min(most)))
    }

    /// The first page at or after `page` that is used, or is not.
    fn next_bit(&self, page: u32, used: bool) -> Option<u32> {
        let mut index = (page / 64) as usize;
        let mut skip = page % 64;
        while let Some(&word) = self.words.get(index) {
            let wanted = if used { word } else { !word } & (u64::MAX << skip);
            if wanted != 0 {
                let found = index as u32 * 64 + wanted.trailing_zeros();
                return (found < self.page_count).then_some(found);
            }
            index += 1;
            skip = 0;
        }
        None
    }

    fn find_run(&self, count: u32) -> Option<u32> {
        let mut page = 0;
        while let Some((first, length)) = self.free_run(page, count) {
            if length >= count {
                return Some(first);
            }
            page = first + length;
        }
        None
    }

    fn longest_runs(&self, count: u32, end: u32) -> Option<Runs> {
        let mut longest: Vec<PageRun> = Vec::with_capacity(RUNS_MAX + 1);
        let mut page = 0;
        while let Some((first, length)) = self.free_run(page, u32::MAX)
            && first < end
        {
            page = first + length;
            longest.push(PageRun {
                first,
                count: length.min(end - first),
            });
            if longest.len() > RUNS_MAX {
                let shortest = (0..longest.len()).min_by_key(|&at| longest[at].count);
                longest.swap_remove(shortest.unwrap_or(0));
            }
        }
        longest.sort_unstable_by_key(|run| core::cmp::Reverse(run.count));
        let mut left = count;
        let mut runs = Runs::default();
        for run in longest {
            if left == 0 {
                break;
            }
            let part = run.count.min(left);
            runs.push(PageRun {
                first: run.first,
                count: part,
            });
            left -= part;
        }
        (left == 0).then_some(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn run(first: u32, count: u32) -> PageRun {
        PageRun { first, count }
    }

    #[test]
    fn a_page_that_is_held_is_free_when_it_was_given_back_and_let_go_by_all() {
        let mut lane = Lane::new(100);
        let all = lane.take(10, 100).unwrap();
        let (middle, last) = (all.part(4, 2), all.part(9, 1));
        lane.hold(&middle);
        lane.hold(&middle);
        lane.hold(&last);
        assert_eq!((lane.free_count(), lane.held_count()), (90, 3));
        lane.let_go(&last);
        lane.give(&all);
        assert_eq!((lane.free_count(), lane.held_count()), (98, 2));
        assert_eq!(lane.held_alone_count(), 2);
        lane.let_go(&middle);
        assert_eq!(lane.free_count(), 98);
        // Pages that are taken meanwhile are others.
        let others = lane.take(98, 100).unwrap();
        assert_eq!(lane.take(1, 100), None);
        lane.let_go(&middle);
        assert_eq!((lane.free_count(), lane.held_count()), (2, 0));
        assert_eq!(lane.take(2, 100), Some(middle));
        lane.give(&middle);
        lane.give(&others);
        assert_eq!(lane.free_count(), 100);
    }

    #[test]
    fn pages_that_records_share_are_free_when_all_of_them_are_done() {
        let runs = |list: &[PageRun]| Runs::from_runs(list).expect("few");
        let mut lane = Lane::new(100);
        let (both, alone) = (runs(&[run(3, 2)]), runs(&[run(4, 2)]));
        // In either order.
        assert!(lane.claim(&both) && !lane.claim(&alone));
        assert!(lane.claim_beside(&alone));
        assert_eq!((lane.free_count(), lane.held_alone_count()), (97, 1));
        lane.give(&both);
        assert_eq!((lane.free_count(), lane.held_alone_count()), (98, 2));
        assert!(lane.claim_beside(&both));
        lane.let_go(&alone);
        assert_eq!((lane.free_count(), lane.held_count()), (98, 2));
        lane.let_go(&both);
        assert_eq!((lane.free_count(), lane.held_count()), (100, 0));
        for wrong in [
            &[run(99, 2)][..],
            &[run(u32::MAX, 2)],
            &[run(1, 3), run(3, 1)],
        ] {
            assert!(!lane.claim_beside(&runs(wrong)));
        }
        assert_eq!((lane.free_count(), lane.held_count()), (100, 0));
    }

    #[test]
    fn writes_of_a_stream_lie_behind_each_other_as_low_as_they_can() {
        let mut lane = Lane::new(100);
        let first = lane.take(40, u32::MAX).expect("pages");
        let second = lane.take(40, u32::MAX).expect("pages");
        assert_eq!(first.as_slice(), [run(0, 40)]);
        assert_eq!(second.as_slice(), [run(40, 40)]);
        assert_eq!(lane.take(21, u32::MAX), None);
        lane.give(&first);
        assert_eq!(
            lane.take(20, u32::MAX).expect("pages").as_slice(),
            [run(0, 20)]
        );
        assert_eq!(
            lane.take(20, u32::MAX).expect("pages").as_slice(),
            [run(20, 20)]
        );
        assert_eq!(
            lane.take(20, u32::MAX).expect("pages").as_slice(),
            [run(80, 20)]
        );
        assert_eq!(lane.free_count(), 0);
        assert_eq!(lane.take(0, u32::MAX), None);
        assert_eq!(lane.touched_count(), 100);
    }

    #[test]
    fn lane_takes_nothing_beyond_and_gives_the_memory_at_its_end_back() {
        let mut lane = Lane::new(100);
        let first = lane.take(30, 64).expect("pages");
        let second = lane.take(30, 64).expect("pages");
        assert_eq!(lane.take(10, 64), None);
        lane.give(&first);
        // In one run there is none below the end, in two there is.
        let split = lane.take(34, 64).expect("pages");
        assert_eq!(split.as_slice(), [run(0, 30), run(60, 4)]);
        lane.give(&second);
        assert_eq!(lane.shrink(u32::MAX), None);
        lane.give(&split);
        // Empty, and with all its memory until it shrinks.
        assert_eq!(lane.touched_count(), 64);
        assert_eq!(lane.shrink(u32::MAX), Some(run(0, 64)));
        let third = lane.take(5, 64).expect("pages");
        assert_eq!(lane.touched_count(), 5);
        lane.give(&third);
        let low = lane.take(40, 64).expect("pages");
        let high = lane.take(20, 64).expect("pages");
        lane.give(&high);
        assert_eq!(lane.shrink(u32::MAX), Some(run(40, 20)));
        assert_eq!((lane.touched_count(), lane.shrink(u32::MAX)), (40, None));
        lane.give(&low);
    }

    #[test]
    fn lane_gives_back_the_end_of_what_it_does_not_need_and_no_more_than_is_wanted() {
        let mut lane = Lane::new(100);
        let runs = lane.take(60, 100);
        assert_eq!(lane.spare_count(), 0);
        lane.give(&runs.unwrap());
        assert_eq!(lane.spare_count(), 60);
        assert_eq!(lane.shrink(16), Some(run(44, 16)));
        assert_eq!((lane.touched_count(), lane.spare_count()), (44, 44));
        assert_eq!(lane.shrink(0), None);
    }

    #[test]
    fn torn_lane_gives_its_longest_runs_or_nothing() {
        let mut lane = Lane::new(64);
        let singles: Vec<Runs> = (0..64).filter_map(|_| lane.take(1, u32::MAX)).collect();
        // Free: 0, 2, 4, … and a run of four.
        for (index, single) in singles.iter().enumerate() {
            if index % 2 == 0 || (33..36).contains(&index) {
                lane.give(single);
            }
        }
        let free = lane.free_count();
        let torn = lane.take(12, u32::MAX).expect("eight runs suffice");
        assert_eq!(torn.as_slice()[0], run(32, 5));
        assert_eq!(torn.as_slice().len(), 8);
        assert_eq!(torn.page_count(), 12);
        lane.give(&torn);
        assert_eq!(lane.take(13, u32::MAX), None);
        assert_eq!(lane.free_count(), free);
    }

    #[test]
    fn place_follows_the_runs() {
        let runs = Runs::from_runs(&[run(10, 2), run(50, 3)]).expect("two runs");
        let places: Vec<Option<(u32, u32)>> = (0..6).map(|page| runs.place(page)).collect();
        assert_eq!(
            places,
            [
                Some((10, 2)),
                Some((11, 1)),
                Some((50, 3)),
                Some((51, 2)),
                Some((52, 1)),
                None
            ]
        );
    }

    #[test]
    fn claims_that_overlap_or_lie_outside_are_refused_whole() {
        let mut lane = Lane::new(70);
        let claim = |lane: &mut Lane, runs: &[PageRun]| {
            lane.claim(&Runs::from_runs(runs).expect("not too many"))
        };
        assert!(claim(&mut lane, &[run(3, 2), run(68, 2)]));
        assert!(!claim(&mut lane, &[run(0, 2), run(4, 1)]));
        assert!(!claim(&mut lane, &[run(69, 2)]));
        assert!(!claim(&mut lane, &[run(u32::MAX, 2)]));
        assert!(!claim(&mut lane, &[run(10, 5), run(14, 1)]));
        assert_eq!(lane.free_count(), 66);
        assert!(claim(&mut lane, &[run(0, 3)]));
        assert_eq!(Runs::from_runs(&[run(0, 0)]), None);
        assert_eq!(Runs::from_runs(&[run(0, 1); RUNS_MAX + 1]), None);
    }

    #[test]
    fn random_taking_and_giving_keeps_the_books() {
        let mut state = 7u64;
        let mut random = |end: u32| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 33) % u64::from(end)) as u32
        };
        let mut lane = Lane::new(1000);
        let mut owner = vec![0u32; 1000];
        let mut out: Vec<(u32, Runs)> = Vec::new();
        for number in 1..20_000u32 {
            if random(2) == 0 && !out.is_empty() {
                let (number, runs) = out.swap_remove(random(out.len() as u32) as usize);
                for run in runs.as_slice() {
                    for page in run.first..run.first + run.count {
                        assert_eq!(owner[page as usize], number);
                        owner[page as usize] = 0;
                    }
                }
                lane.give(&runs);
            } else if let Some(runs) = {
                let count = random(60) + 1;
                let runs = lane.take(count, u32::MAX);
                assert!(runs.is_none_or(|runs| runs.page_count() == count));
                runs
            } {
                for run in runs.as_slice() {
                    for page in run.first..run.first + run.count {
                        assert_eq!(owner[page as usize], 0, "given twice");
                        owner[page as usize] = number;
                    }
                }
                out.push((number, runs));
            }
            let used = owner.iter().filter(|&&owner| owner != 0).count() as u32;
            assert_eq!(lane.free_count(), 1000 - used);
        }
    }
}
