// SPDX-License-Identifier: Apache-2.0
//! Blocks of objects that no byte is in and that nobody reserves any more: what a move that was interrupted had asked for and did not get to.
//!
//! Where the record leads elsewhere nobody writes but a move, and where a block has no data nothing is lost with it. What is led to stays as it is:
//! whoever writes the file may have reserved it, behind its end, too. What is not done here: giving back bytes, which fsck compares first.

use crate::error::PoolError;
use crate::member::{Access, data_ranges};
use crate::pool::{Pool, punch};
use rushes_core::pool::led::{Led, outside};
use rushes_core::pool::{Layout, Object};
use rushes_core::units::{ByteCount, ByteRange};
use rushes_sys::extents;
use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, fstat, ftruncate, futimens};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// An object in more extents is left as it is.
const EXTENT_COUNT_MAX: usize = 1 << 20;

/// What an object has reserved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reserved {
    /// How long the object is. Units: bytes.
    size: u64,
    /// What may go within that, in order: whole blocks.
    within: Vec<ByteRange>,
    /// And behind it.
    behind: Vec<ByteRange>,
    /// Where what is to stay ends that is reserved behind the object's end; else the object's length. Units: bytes.
    stays_until: u64,
}

impl Reserved {
    /// What may go of an object. None: nothing, or nobody can say.
    ///
    /// `length`  the object's as the file's has it: what is reserved behind that may go, too. None: as much as the record leads to stays
    pub(crate) fn of(
        fd: &OwnedFd,
        led: &Led,
        length: Option<ByteCount>,
    ) -> Result<Option<Reserved>, Errno> {
        let status = fstat(fd)?;
        let (size, block) = (status.st_size as u64, status.st_blksize.max(1) as u64);
        if status.st_blocks == 0 {
            return Ok(None);
        }
        let Ok(map) = extents::of(fd, EXTENT_COUNT_MAX) else {
            return Ok(None);
        };
        if !map.complete {
            return Ok(None);
        }
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
        let data = data_ranges(fd)?;
        let mut found = Reserved {
            size,
            stays_until: size,
            ..Reserved::default()
        };
        // The block that the object ends in is neither.
        let (block_within, block_behind) = (size / block * block, size.next_multiple_of(block));
        for extent in map.extents {
            let extent = ByteRange::new(extent.logical.0, extent.length.0);
            for one in &kept {
                let end = one.end().min(extent.end());
                if end > block_behind && one.start.0.max(extent.start.0) < end {
                    found.stays_until = found.stays_until.max(end);
                }
            }
            for part in outside(extent, near(&data, extent)) {
                for part in outside(part, &kept) {
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

    /// They are nobody's any more. May be interrupted anywhere and repeated.
    ///
    /// Assumes  nobody writes to the object since [`Reserved::of`]
    pub(crate) fn give_back(&self, fd: &OwnedFd) -> Result<(), Errno> {
        let status = fstat(fd)?;
        self.within.iter().try_for_each(|one| punch(fd, *one))?;
        if !self.behind.is_empty() {
            // Behind an object's end nothing can be made a hole (ext4 does nothing there); what is to be cut there goes with its end, also with the same
            // one. Where something in between is to stay the object becomes so long first, by zeroes that it is read as anyway.
            if self.stays_until > self.size {
                ftruncate(fd, self.stays_until)?;
                self.behind.iter().try_for_each(|one| punch(fd, *one))?;
            }
            ftruncate(fd, self.stays_until.max(self.size))?;
        }
        // A rescue tells by this time what was cut off before the file was changed.
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
    /// Blocks that a move had reserved in objects of a file, where its record does not lead to them. Objects that cannot be opened have none.
    ///
    /// Units    bytes
    pub fn reserved_bytes(&self, layout: &Layout) -> u64 {
        let found = self.reserved(layout, Access::Read);
        found.iter().map(|(_, reserved)| reserved.bytes()).sum()
    }

    /// Give them back.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]; objects have all that is acknowledged
    /// Errors   the kernel's; those that were not come to are given back the next time
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
        // To the only object of a file that is not striped the record leads everywhere.
        let objects = layout.objects();
        let is_one = objects.len() < 2;
        let all = objects.into_iter().filter(|_| !is_one);
        let of = |object: Object| {
            let led = Led::of(layout, object)?;
            let fd = self.open_object(layout, object, access).ok()?;
            let found = Reserved::of(&fd, &led, None).ok()??;
            // Somebody may write the file here: then its end is not ours to set.
            let is_ours = found.behind.is_empty() || found.stays_until == found.size;
            is_ours.then_some((fd, found))
        };
        all.filter_map(of).collect()
    }
}

/// Those of `ranges` that touch this one: a sparse file has as many of them as extents.
///
/// Assumes  they are in order, without overlap
fn near(ranges: &[ByteRange], range: ByteRange) -> &[ByteRange] {
    let first = ranges.partition_point(|one| one.end() <= range.start.0);
    let behind = ranges.partition_point(|one| one.start.0 < range.end());
    ranges.get(first..behind).unwrap_or(&[])
}
