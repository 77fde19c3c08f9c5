// SPDX-License-Identifier: Apache-2.0
//! Holes in objects in place of bytes that have moved away.
//!
//! A hole that begins or ends inside a block leaves that block, zeroed. If a file continues
//! elsewhere in the middle of a block, each segment that moves ends inside one, and would leave a
//! block of zeroes that is no copy of anything: once no layout names the object, nothing tells them
//! from bytes. So a hole takes such a block with it. The caller says which bytes have moved.

use crate::pool::punch;
use rushes_core::pool::led::{Led, outside};
use rushes_core::pool::{Layout, Object};
use rushes_core::units::ByteRange;
use rustix::fs::fstat;
use rustix::io::{Errno, pread};
use std::os::fd::OwnedFd;

/// With larger blocks only the range itself becomes a hole. Units: bytes.
const BLOCK_BYTES_MAX: u64 = 1 << 16;

/// Make a hole in an object where the layout leads elsewhere by now, and in the rest of the blocks
/// at its ends if that is zeroes to which the layout does not lead.
///
/// `layout`  as it is now
/// `range`   of the object; the layout leads to none of it
pub(crate) fn vacate(
    fd: &OwnedFd,
    layout: &Layout,
    object: Object,
    range: ByteRange,
) -> Result<(), Errno> {
    match Led::of(layout, object) {
        Some(led) => vacate_beside(fd, &led, range),
        None => punch(fd, range),
    }
}

/// The same, if the caller knows the ranges to which the layout leads.
pub(crate) fn vacate_beside(fd: &OwnedFd, led: &Led, range: ByteRange) -> Result<(), Errno> {
    let status = fstat(fd)?;
    let (size, block) = (status.st_size as u64, status.st_blksize.max(1) as u64);
    let end = range.end().min(size);
    if range.start.0 >= end || block > BLOCK_BYTES_MAX {
        return punch(fd, range);
    }
    let (first, last) = (range.start.0 / block * block, end.next_multiple_of(block));
    let before = ByteRange::new(first, range.start.0 - first);
    let behind = ByteRange::new(end, last.min(size) - end);
    let start = match is_nothing(fd, led, before)? {
        true => first,
        false => range.start.0,
    };
    let end = match is_nothing(fd, led, behind)? {
        // A hole up to the end of the object leaves its last block.
        true => last,
        false => end,
    };
    punch_to(fd, start, end)
}

fn punch_to(fd: &OwnedFd, start: u64, end: u64) -> Result<(), Errno> {
    use rustix::fs::{FallocateFlags, fallocate};
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, start, end - start)
}

/// Zeroes to which the layout does not lead.
fn is_nothing(fd: &OwnedFd, led: &Led, part: ByteRange) -> Result<bool, Errno> {
    if part.length.0 > 0 && outside(part, &led.ranges) != [part] {
        return Ok(false);
    }
    let mut bytes = vec![0; part.length.0 as usize];
    let count = pread(fd, &mut bytes, part.start.0)?;
    Ok(bytes[..count].iter().all(|byte| *byte == 0))
}
