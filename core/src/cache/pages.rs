// SPDX-License-Identifier: Apache-2.0
//! A set of pages of one slot, as bits.

/// Pages that a slot can have.
pub const PAGES_MAX: u32 = 256;

/// Which pages of a slot. Page numbers are below [`PAGES_MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSet([u64; 4]);

impl PageSet {
    /// No page.
    pub const EMPTY: PageSet = PageSet([0; 4]);

    /// Pages `first .. end`; empty when they are in the wrong order.
    pub fn run(first: u32, end: u32) -> PageSet {
        let mut words = [0u64; 4];
        let end = end.min(PAGES_MAX);
        for (index, word) in words.iter_mut().enumerate() {
            let low = index as u32 * 64;
            let from = first.max(low).min(low + 64) - low;
            let to = end.max(low).min(low + 64) - low;
            if from < to {
                let upto = |n: u32| if n == 64 { u64::MAX } else { (1u64 << n) - 1 };
                *word = upto(to) & !upto(from);
            }
        }
        PageSet(words)
    }

    /// True when no page is in it.
    pub fn is_empty(self) -> bool {
        self.0 == [0; 4]
    }

    /// True when every page of `other` is in it.
    pub fn contains(self, other: PageSet) -> bool {
        self.and(other) == other
    }

    /// Pages in either.
    pub fn or(self, other: PageSet) -> PageSet {
        self.zip(other, |a, b| a | b)
    }

    /// Pages in both.
    pub fn and(self, other: PageSet) -> PageSet {
        self.zip(other, |a, b| a & b)
    }

    /// Pages of `self` that are not in `other`.
    pub fn without(self, other: PageSet) -> PageSet {
        self.zip(other, |a, b| a & !b)
    }

    /// The first run of pages in it: first page and the one past its last.
    pub fn first_run(self) -> Option<(u32, u32)> {
        let first = (0..PAGES_MAX).find(|&page| self.has(page))?;
        let end = (first..PAGES_MAX)
            .find(|&page| !self.has(page))
            .unwrap_or(PAGES_MAX);
        Some((first, end))
    }

    fn has(self, page: u32) -> bool {
        self.0
            .get(page as usize / 64)
            .is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    fn zip(self, other: PageSet, f: impl Fn(u64, u64) -> u64) -> PageSet {
        let (a, b) = (self.0, other.0);
        PageSet([f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cross_words_and_end_where_they_should() {
        for (first, end) in [
            (0, 256),
            (0, 1),
            (63, 65),
            (64, 128),
            (200, 256),
            (5, 5),
            (9, 3),
        ] {
            let set = PageSet::run(first, end);
            for page in 0..256 {
                assert_eq!(
                    set.has(page),
                    page >= first && page < end,
                    "{first}..{end} page {page}"
                );
            }
            assert_eq!(set.first_run(), (first < end).then_some((first, end)));
        }
    }

    #[test]
    fn difference_leaves_the_first_gap() {
        let gap = PageSet::run(0, 256).without(PageSet::run(0, 70).or(PageSet::run(90, 256)));
        assert_eq!(gap.first_run(), Some((70, 90)));
        assert!(PageSet::run(0, 256).contains(gap));
        assert!(!gap.contains(PageSet::run(69, 71)));
    }
}
