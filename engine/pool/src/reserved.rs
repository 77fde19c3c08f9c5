// SPDX-License-Identifier: Apache-2.0
//! Blocks of objects without a byte that are no client's reservation any more: those that an
//! interrupted move had reserved and did not get to, those taken for a reservation that did not
//! fit, and those that a client had reserved behind the end of a file that it then truncated.
//!
//! Where the layout leads elsewhere only a move writes, and a block without data loses nothing.
//! Blocks to which the layout leads stay as they are: a program that writes the file may have
//! reserved them, behind its end, too. This module does not free bytes, which fsck compares first.

use crate::data::data_ranges;
use crate::error::PoolError;
use crate::member::Access;
use crate::pool::{Pool, may_take, punch};
use rushes_core::pool::led::{Led, outside};
use rushes_core::pool::{Layout, MemberNumber, Object};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rushes_sys::extents;
use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, fstat, ftruncate, futimens};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

/// An object in more extents is left as it is.
const EXTENT_COUNT_MAX: usize = 1 << 20;

/// The reservations of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reserved {
    /// How long the object is. Units: bytes.
    size: u64,
    /// The ranges within that length that may go, in order: whole blocks.
    within: Vec<ByteRange>,
    /// Those behind it.
    behind: Vec<ByteRange>,
    /// The end of the reservations behind the object's end that stay; without any, the object's
    /// length. Units: bytes.
    stays_until: u64,
}

impl Reserved {
    /// The blocks of an object that may go. None: nothing, or the file system cannot say.
    ///
    /// `length`  the object's, by the file's length: blocks reserved behind that may go, too. None:
    ///           all to which the layout leads stays
    pub(crate) fn of(
        fd: &OwnedFd,
        led: &Led,
        length: Option<ByteCount>,
    ) -> Result<Option<Reserved>, Errno> {
        let kept: Vec<ByteRange> = match length {
            None => led.ranges.clone(),
            Some(length) => {
                let in_file = |one: &ByteRange| {
                    let end = one.end().min(length.0);
                    ByteRange::new(one.start.0, end.saturating_sub(one.start.0))
                };
                led.ranges.iter().map(in_file).collect()
            }
        };
        Reserved::outside_of(fd, &kept)
    }

    /// The same, of all blocks in none of these ranges.
    fn outside_of(fd: &OwnedFd, kept: &[ByteRange]) -> Result<Option<Reserved>, Errno> {
        let status = fstat(fd)?;
        let (size, block) = (status.st_size as u64, status.st_blksize.max(1) as u64);
        if status.st_blocks == 0 {
            return Ok(None);
        }
        let Some(extents) = allocated(fd) else {
            return Ok(None);
        };
        let data = data_ranges(fd)?;
        let mut found = Reserved {
            size,
            stays_until: size,
            ..Reserved::default()
        };
        // The block that the object ends in is neither.
        let (block_within, block_behind) = (size / block * block, size.next_multiple_of(block));
        for extent in extents {
            let kept = near(kept, extent);
            for one in kept {
                let end = one.end().min(extent.end());
                if end > block_behind && one.start.0.max(extent.start.0) < end {
                    found.stays_until = found.stays_until.max(end);
                }
            }
            for part in outside(extent, near(&data, extent)) {
                for part in outside(part, kept) {
                    let start = part.start.0.next_multiple_of(block);
                    let end = part.end() / block * block;
                    let within = end.min(block_within).saturating_sub(start);
                    if within > 0 {
                        found.within.push(ByteRange::new(start, within));
                    }
                    let start = start.max(block_behind);
                    if start < end {
                        found.behind.push(ByteRange::new(start, end - start));
                    }
                }
            }
        }
        Ok(Some(found).filter(|one| one.bytes() > 0))
    }

    /// Units    bytes
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.within.iter().chain(&self.behind);
        all.map(|one| one.length.0).sum()
    }

    /// Free them. May be interrupted anywhere and repeated.
    ///
    /// Assumes  no write to the object since [`Reserved::of`]
    pub(crate) fn give_back(&self, fd: &OwnedFd) -> Result<(), Errno> {
        let status = fstat(fd)?;
        self.within.iter().try_for_each(|one| punch(fd, *one))?;
        if !self.behind.is_empty() {
            // Behind an object's end no hole can be made: ext4 does nothing there. A truncate frees
            // the blocks there, even one to the same length. Where some in between are to stay the
            // object first becomes so long, by zeroes, as which it reads anyway.
            if self.stays_until > self.size {
                ftruncate(fd, self.stays_until)?;
                self.behind.iter().try_for_each(|one| punch(fd, *one))?;
            }
            ftruncate(fd, self.stays_until.max(self.size))?;
        }
        // Keep the time: a rescue tells by it which bytes were cut off before the file changed.
        let omitted = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        };
        let times = Timestamps {
            last_access: omitted,
            last_modification: Timespec {
                tv_sec: status.st_mtime,
                tv_nsec: status.st_mtime_nsec as i64,
            },
        };
        futimens(fd, &times)
    }
}

impl Pool {
    /// Blocks that a move had reserved in objects of a file, where its layout does not lead to
    /// them. Objects that cannot be opened count as without.
    ///
    /// Units    bytes
    pub fn reserved_bytes(&self, layout: &Layout) -> u64 {
        let found = self.reserved(layout, Access::Read);
        found.iter().map(|(_, reserved)| reserved.bytes()).sum()
    }

    /// Free them.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]; objects have all acknowledged bytes
    /// Errors   the kernel's; the next call frees the rest
    pub fn give_back(&self, layout: &Layout) -> Result<u64, PoolError> {
        let mut bytes = 0;
        for (fd, reserved) in self.reserved(layout, Access::Write) {
            let given = reserved.give_back(&fd);
            given.map_err(|error| PoolError::system("give back blocks of an object", "", error))?;
            bytes += reserved.bytes();
        }
        Ok(bytes)
    }

    fn reserved(&self, layout: &Layout, access: Access) -> Vec<(OwnedFd, Reserved)> {
        // The layout leads everywhere in the only object of a file that is not striped.
        let objects = layout.objects();
        let is_one = objects.len() < 2;
        let all = objects.into_iter().filter(|_| !is_one);
        let of = |object: Object| {
            let led = Led::of(layout, object)?;
            let fd = self.open_object(layout, object, access).ok()?;
            let found = Reserved::of(&fd, &led, None).ok()??;
            // A program may write the file here: then its end is not ours to set.
            let is_ours = found.behind.is_empty() || found.stays_until == found.size;
            is_ours.then_some((fd, found))
        };
        all.filter_map(of).collect()
    }
}

/// Where an object has blocks, in order. None: the file system cannot say.
fn allocated(fd: &OwnedFd) -> Option<Vec<ByteRange>> {
    let map = extents::of(fd, EXTENT_COUNT_MAX).ok()?;
    let ranges = map.extents.iter();
    map.complete.then(|| {
        ranges
            .map(|one| ByteRange::new(one.logical.0, one.length.0))
            .collect()
    })
}

/// Whether an object has a block for this byte. False where the file system cannot say.
pub(crate) fn has_blocks_at(fd: &OwnedFd, at: ByteOffset) -> bool {
    let all = allocated(fd).unwrap_or_default();
    all.iter()
        .any(|one| one.start.0 <= at.0 && at.0 < one.end())
}

/// Which part of its object a range of the file is, for each object that has some of it.
fn parts_of(layout: &Layout, range: ByteRange) -> BTreeMap<Object, Vec<ByteRange>> {
    let mut parts: BTreeMap<Object, Vec<ByteRange>> = BTreeMap::new();
    for (at, segment) in layout.segments().iter().enumerate() {
        let whole = layout.range_of(at);
        let start = range.start.0.max(whole.start.0);
        let end = range.end().min(whole.end());
        if start >= end {
            continue;
        }
        for (index, object) in segment.objects.iter().enumerate() {
            let share = |at: u64| segment.shape.share(index, at - segment.origin.0);
            let part = ByteRange::new(share(start), share(end) - share(start));
            parts.entry(*object).or_default().push(part);
        }
    }
    parts
}

/// A part of an object with the rest of the blocks that it begins and ends in, where no other byte
/// of the file is in them: a segment may begin inside a block, as where a member was full.
fn with_whole_blocks(part: ByteRange, others: &[ByteRange], block: u64) -> ByteRange {
    let is_free = |start: u64, end: u64| {
        let rest = ByteRange::new(start, end - start);
        start == end || !others.iter().any(|other| other.overlaps(rest))
    };
    let (mut start, mut end) = (part.start.0, part.end());
    let first = start / block * block;
    if is_free(first, start) {
        start = first;
    }
    let last = end.checked_next_multiple_of(block).unwrap_or(end);
    if is_free(end, last) {
        end = last;
    }
    ByteRange::new(start, end - start)
}

/// The blocks that objects of a file had of a range before a caller takes room for it; the caller
/// may have to give that back.
#[derive(Debug)]
pub struct RoomBefore {
    range: ByteRange,
    /// Where they had blocks. None: the file system cannot say.
    had: BTreeMap<Object, Option<Vec<ByteRange>>>,
    /// Units: bytes.
    lacking: u64,
}

impl RoomBefore {
    /// How many bytes of the range have no blocks; fewer where file systems cannot say.
    ///
    /// Units    bytes
    pub fn lacking(&self) -> u64 {
        self.lacking
    }
}

impl Pool {
    /// For [`Pool::give_back_since`].
    pub fn room_before(&self, layout: Option<&Layout>, range: ByteRange) -> RoomBefore {
        let Some(layout) = layout.filter(|layout| !layout.segments().is_empty()) else {
            return RoomBefore {
                range,
                had: BTreeMap::new(),
                lacking: range.length.0,
            };
        };
        let had: BTreeMap<Object, Option<Vec<ByteRange>>> = layout
            .objects()
            .into_iter()
            .map(|object| {
                let opened = self.open_object(layout, object, Access::Read).ok();
                (object, opened.and_then(|fd| allocated(&fd)))
            })
            .collect();
        let lacking = |(object, parts): (Object, Vec<ByteRange>)| {
            let Some(Some(had)) = had.get(&object) else {
                return 0;
            };
            let missing = parts.into_iter().flat_map(|part| gaps(part, had));
            missing.map(|one| one.length.0).sum::<u64>()
        };
        let lacking = parts_of(layout, range).into_iter().map(lacking).sum();
        RoomBefore {
            range,
            had,
            lacking,
        }
    }

    /// Free room that was taken for a range and that no byte came into: blocks of objects that had
    /// none there before, and objects that were made for bytes behind the end of the file.
    ///
    /// `is_used_beside`  another process sees how long an object is, and may store to it: then no
    ///                   object becomes longer, and blocks within stay
    /// Assumes  exclusive, as [`Pool::set_layout`]; objects have all acknowledged bytes; `size`:
    ///          the file's
    pub fn give_back_since(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        size: ByteCount,
        before: &RoomBefore,
        is_used_beside: bool,
    ) -> Result<(), PoolError> {
        let failed = |error| PoolError::system("give back blocks of an object", "", error);
        let places = parts_of(layout, ByteRange::new(0, u64::MAX));
        for (object, parts) in parts_of(layout, before.range) {
            let had = match before.had.get(&object) {
                None => &[],
                Some(Some(had)) => had.as_slice(),
                Some(None) => continue,
            };
            let others: Vec<ByteRange> = places
                .get(&object)
                .into_iter()
                .flatten()
                .flat_map(|place| outside(*place, &parts))
                .collect();
            let Ok(fd) = self.open_object(layout, object, Access::Write) else {
                continue;
            };
            let block = fstat(&fd).map_err(failed)?.st_blksize.max(1) as u64;
            let taken: Vec<ByteRange> = parts
                .iter()
                .flat_map(|part| gaps(with_whole_blocks(*part, &others, block), had))
                .collect();
            let kept = gaps(ByteRange::new(0, u64::MAX), &taken);
            let Some(mut reserved) = Reserved::outside_of(&fd, &kept).map_err(failed)? else {
                continue;
            };
            if is_used_beside {
                reserved.within.clear();
                if reserved.stays_until > reserved.size {
                    reserved.behind.clear();
                }
            }
            reserved.give_back(&fd).map_err(failed)?;
        }
        let mut next = layout.clone();
        while let Some(last) = next.segments().last()
            && last.start.0 >= size.0
            && last.objects.iter().all(|object| {
                let is_empty = || {
                    let fd = self.open_object(layout, *object, Access::Read).ok()?;
                    let is_short = fstat(&fd).ok()?.st_size == 0;
                    Some(is_short && allocated(&fd)?.is_empty())
                };
                !before.had.contains_key(object) && is_empty() == Some(true)
            })
        {
            let start = ByteCount(last.start.0);
            next.cut(start);
        }
        self.shorten(stub, layout, next)
    }

    /// The most room for bytes of a file: that of all members that may take some, or have some of
    /// it, with the file systems' reserve for root.
    ///
    /// Units    bytes
    pub fn room_at_most(&self, stub: BorrowedFd<'_>, layout: Option<&Layout>) -> u64 {
        let wish = self.wish_of(stub);
        let named: Vec<MemberNumber> = layout
            .iter()
            .flat_map(|layout| layout.objects())
            .map(|object| object.member)
            .collect();
        let mut devices = Vec::new();
        let mut room = 0u64;
        for member in self.members().iter() {
            let takes = may_take(member, None, wish.class.as_ref());
            if !takes && !named.contains(&member.number()) {
                continue;
            }
            let status = member.status();
            if let Some(device) = status.device
                && !devices.contains(&device)
            {
                devices.push(device);
                room = room.saturating_add(status.bytes_unused.0);
            }
        }
        room
    }

    /// The bytes that objects have reserved behind the end of their file.
    ///
    /// Units    bytes
    pub fn reserved_behind(&self, layout: &Layout, size: ByteCount) -> u64 {
        let found = self.behind(layout, size, Access::Read);
        found.iter().map(|(_, reserved)| reserved.bytes()).sum()
    }

    /// Free them.
    ///
    /// Assumes  as [`Pool::give_back`]
    pub fn give_back_behind(&self, layout: &Layout, size: ByteCount) -> Result<(), PoolError> {
        for (fd, reserved) in self.behind(layout, size, Access::Write) {
            let given = reserved.give_back(&fd);
            given.map_err(|error| PoolError::system("give back blocks of an object", "", error))?;
        }
        Ok(())
    }

    fn behind(&self, layout: &Layout, size: ByteCount, access: Access) -> Vec<(OwnedFd, Reserved)> {
        let of = |(object, length): (Object, u64)| {
            let led = Led::of(layout, object)?;
            let fd = self.open_object(layout, object, access).ok()?;
            let found = Reserved::of(&fd, &led, Some(ByteCount(length))).ok()??;
            Some((fd, found))
        };
        layout.lengths(size).into_iter().filter_map(of).collect()
    }
}

/// The parts of a range that are in none of the others, of which there may be many.
///
/// Assumes  as [`near`]
fn gaps(range: ByteRange, others: &[ByteRange]) -> Vec<ByteRange> {
    let mut at = range.start.0;
    let mut found = Vec::new();
    for one in near(others, range) {
        if one.start.0 > at {
            found.push(ByteRange::new(at, one.start.0 - at));
        }
        at = at.max(one.end());
    }
    if at < range.end() {
        found.push(ByteRange::new(at, range.end() - at));
    }
    found
}

/// Those of `ranges` that touch this one: a sparse file has as many of them as extents.
///
/// Assumes  they are in order, without overlap
fn near(ranges: &[ByteRange], range: ByteRange) -> &[ByteRange] {
    let first = ranges.partition_point(|one| one.end() <= range.start.0);
    let behind = ranges.partition_point(|one| one.start.0 < range.end());
    ranges.get(first..behind).unwrap_or(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_a_part_begins_or_ends_in_are_its_own_where_nothing_else_is_in_them() {
        let part = ByteRange::new(5000, 5000);
        let whole = |others: &[(u64, u64)]| {
            let others = others.iter().map(|one| ByteRange::new(one.0, one.1));
            let found = with_whole_blocks(part, &others.collect::<Vec<_>>(), 4096);
            (found.start.0, found.end())
        };
        assert_eq!(whole(&[]), (4096, 12_288));
        assert_eq!(whole(&[(0, 4096), (12_288, 1)]), (4096, 12_288));
        assert_eq!(whole(&[(0, 5000)]), (5000, 12_288));
        assert_eq!(whole(&[(10_000, 1)]), (4096, 10_000));
        assert_eq!(
            whole(&[(0, 5000), (10_000, u64::MAX - 10_000)]),
            (5000, 10_000)
        );
        let end = ByteRange::new(5000, u64::MAX - 5000);
        assert_eq!(with_whole_blocks(end, &[], 4096).end(), u64::MAX);
    }

    #[test]
    fn gaps_are_what_is_outside() {
        let others = [(3, 4), (7, 1), (12, 3), (40, 5)];
        let others = others.map(|(start, length)| ByteRange::new(start, length));
        for (start, length) in [(0, 50), (4, 2), (5, 8), (22, 30), (50, 5), (0, u64::MAX)] {
            let range = ByteRange::new(start, length);
            assert_eq!(gaps(range, &others), outside(range, &others), "{range:?}");
        }
        assert_eq!(gaps(ByteRange::new(4, 2), &[]), [ByteRange::new(4, 2)]);
    }
}
