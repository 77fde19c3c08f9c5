// SPDX-License-Identifier: Apache-2.0
//! The free blocks of a disk, and a file system's allocation of them.
//!
//! A small allocator: a file continues behind its last block as long as that is free, otherwise
//! where the whole reservation fits, otherwise anywhere.

use crate::files::WorldFile;
use rushes_core::server::{Extent, PAGE_BYTES};
use rushes_core::units::*;

/// The free blocks of a disk: start and end of each gap, ascending, apart.
#[derive(Clone, Debug, Default)]
pub struct Space {
    gaps: Vec<(u64, u64)>,
}

impl Space {
    /// One gap.
    pub fn new(start: u64, end: u64) -> Space {
        let page = |at: u64| at / PAGE_BYTES * PAGE_BYTES;
        Space {
            gaps: vec![(start.next_multiple_of(PAGE_BYTES), page(end))],
        }
    }

    /// No file ever gets these blocks.
    pub fn withhold(&mut self, start: u64, bytes: u64) {
        let (from, to) = (start / PAGE_BYTES * PAGE_BYTES, start + bytes);
        let to = to.next_multiple_of(PAGE_BYTES);
        let gaps = std::mem::take(&mut self.gaps);
        let both = gaps
            .into_iter()
            .flat_map(|(start, end)| [(start, end.min(from)), (start.max(to), end)]);
        self.gaps = both.filter(|(start, end)| start < end).collect();
    }

    /// Gives blocks to a file: all of `needed`, and onward to `wished_end` as far as at least half
    /// of the rest stays free. False: there are too few, and the file has all that there were.
    pub fn reserve(&mut self, file: &mut WorldFile, needed: ByteRange, wished_end: u64) -> bool {
        let start = needed.start.0 / PAGE_BYTES * PAGE_BYTES;
        let end = needed.end().next_multiple_of(PAGE_BYTES);
        let free: u64 = self.gaps.iter().map(|(from, to)| to - from).sum();
        let onward = free.saturating_sub(end - start) / 2 / PAGE_BYTES * PAGE_BYTES;
        let wished = wished_end.next_multiple_of(PAGE_BYTES).min(end + onward);
        self.map(file, start, wished.max(end)) >= end
    }

    /// Maps a file from `start` on. Returns the end of its mapped range.
    fn map(&mut self, file: &mut WorldFile, start: u64, end: u64) -> u64 {
        let mut at = start;
        while at < end {
            let after = file
                .extents
                .partition_point(|extent| extent.logical.0 <= at);
            let before = after.checked_sub(1).map(|index| file.extents[index]);
            let mapped = before.map_or(0, |last| last.logical.0 + last.length.0);
            if mapped > at {
                at = mapped;
                continue;
            }
            let next = file.extents.get(after);
            let stop = next.map_or(end, |next| next.logical.0.min(end));
            let goal = before.map(|last| last.physical.0 + last.length.0);
            let Some((physical, bytes)) = self.take(goal, stop - at) else {
                return at;
            };
            let joins = before.is_some_and(|last| {
                last.physical.0 + last.length.0 == physical && last.logical.0 + last.length.0 == at
            });
            if joins {
                file.extents[after - 1].length.0 += bytes;
            } else {
                let extent = Extent {
                    logical: ByteOffset(at),
                    physical: ByteOffset(physical),
                    length: ByteCount(bytes),
                };
                file.extents.insert(after, extent);
            }
            at += bytes;
        }
        at
    }

    /// Start and length of at most `bytes` blocks, at `goal` if that is free.
    fn take(&mut self, goal: Option<u64>, bytes: u64) -> Option<(u64, u64)> {
        let first = |least: u64| self.gaps.iter().position(|(from, to)| to - from >= least);
        let here = goal.and_then(|goal| self.gaps.iter().position(|(from, _)| *from == goal));
        let index = here.or_else(|| first(bytes)).or_else(|| first(1))?;
        let (from, to) = self.gaps[index];
        let bytes = bytes.min(to - from);
        self.gaps[index].0 += bytes;
        self.gaps.retain(|(from, to)| from < to);
        Some((from, bytes))
    }

    /// Takes back the blocks of a file from `size` on.
    pub fn trim(&mut self, file: &mut WorldFile, size: u64) {
        let end = size.next_multiple_of(PAGE_BYTES);
        for extent in &mut file.extents {
            let kept = end.saturating_sub(extent.logical.0).min(extent.length.0);
            let from = extent.physical.0 + kept;
            let to = extent.physical.0 + extent.length.0;
            if from < to {
                self.gaps.push((from, to));
            }
            extent.length.0 = kept;
        }
        file.extents.retain(|extent| extent.length.0 > 0);
        self.gaps.sort_unstable();
        self.gaps.dedup_by(|next, gap| {
            let touches = gap.1 == next.0;
            if touches {
                gap.1 = next.1;
            }
            touches
        });
    }
}

/// Whether the file has all blocks of a range.
pub fn is_mapped(extents: &[Extent], range: ByteRange) -> bool {
    let mut at = range.start.0;
    for extent in extents {
        if extent.logical.0 <= at {
            at = at.max(extent.logical.0 + extent.length.0);
        }
    }
    at >= range.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::contiguous;

    const MIB: u64 = 1 << 20;

    fn empty() -> WorldFile {
        let mut file = contiguous("a", "b", DeviceId(0), 0, 0, None);
        file.extents.clear();
        file
    }

    #[test]
    fn a_file_goes_on_where_it_ends() {
        let mut space = Space::new(0, 64 * MIB);
        let (mut one, mut two) = (empty(), empty());
        assert!(space.reserve(&mut one, ByteRange::new(0, MIB), 4 * MIB));
        assert!(space.reserve(&mut two, ByteRange::new(0, MIB), MIB));
        assert!(is_mapped(&one.extents, ByteRange::new(0, 4 * MIB)));
        assert!(!is_mapped(&one.extents, ByteRange::new(0, 4 * MIB + 1)));
        space.trim(&mut one, 2 * MIB);
        assert!(space.reserve(&mut one, ByteRange::new(2 * MIB, MIB), 0));
        assert_eq!(one.extents.len(), 1, "{:?}", one.extents);
        assert!(space.reserve(&mut one, ByteRange::new(3 * MIB, 2 * MIB), 0));
        assert_eq!(one.extents.len(), 2, "{:?}", one.extents);
    }

    #[test]
    fn withheld_blocks_are_given_to_nobody() {
        let mut space = Space::new(0, 9 * MIB);
        space.withhold(4 * MIB, MIB);
        assert_eq!(space.gaps, [(0, 4 * MIB), (5 * MIB, 9 * MIB)]);
        space.withhold(8 * MIB, 2 * MIB);
        assert_eq!(space.gaps, [(0, 4 * MIB), (5 * MIB, 8 * MIB)]);
    }

    #[test]
    fn a_wish_leaves_half_of_the_rest_and_a_need_takes_all() {
        let mut space = Space::new(0, 9 * MIB);
        let (mut one, mut two) = (empty(), empty());
        assert!(space.reserve(&mut one, ByteRange::new(0, MIB), 100 * MIB));
        assert!(is_mapped(&one.extents, ByteRange::new(0, 5 * MIB)));
        assert!(space.reserve(&mut two, ByteRange::new(0, 4 * MIB), 0));
        assert!(!space.reserve(&mut two, ByteRange::new(4 * MIB, 4096), 0));
        space.trim(&mut one, 0);
        space.trim(&mut two, 0);
        assert_eq!(space.gaps, [(0, 9 * MIB)]);
    }
}
