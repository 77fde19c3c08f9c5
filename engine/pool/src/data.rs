// SPDX-License-Identifier: Apache-2.0
//! Where an object has bytes.
//!
//! On ext4 and XFS SEEK_DATA also reports reserved blocks that a program has only read, as their
//! zeroes are in the page cache. Taken for bytes they would look like a forgotten copy, or a
//! client's reserved room would be neither its room nor its bytes. So of blocks that FIEMAP calls
//! unwritten only pages with a byte count: one on its way to the disk, or one that the kernel could
//! not write and still has in its cache. Whether zeroes were written does not matter: a read
//! returns them in either case.

use rushes_core::units::ByteRange;
use rushes_sys::extents;
use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};
use std::os::fd::OwnedFd;

/// Looked through at once. Units: bytes.
const SPAN_BYTES: u64 = 1 << 30;
const PAGE_BYTES: u64 = 4096;

/// Where a file has bytes, in order.
pub(crate) fn data_ranges(fd: &OwnedFd) -> Result<Vec<ByteRange>, Errno> {
    data_within(fd, ByteRange::new(0, u64::MAX))
}

/// The same within a range.
pub(crate) fn data_within(fd: &OwnedFd, range: ByteRange) -> Result<Vec<ByteRange>, Errno> {
    let mut parts: Vec<ByteRange> = Vec::new();
    let mut at = range.start.0;
    while let Some(run) = next_run(fd, ByteRange::new(at, range.end() - at))? {
        at = run.end();
        match parts.last_mut() {
            Some(last) if last.end() == run.start.0 => last.length += run.length,
            _ => parts.push(run),
        }
    }
    Ok(parts)
}

pub(crate) fn has_data(fd: &OwnedFd) -> Result<bool, Errno> {
    Ok(next_run(fd, ByteRange::new(0, u64::MAX))?.is_some())
}

/// The first bytes within a range; those behind them may be bytes, too.
pub(crate) fn next_run(fd: &OwnedFd, range: ByteRange) -> Result<Option<ByteRange>, Errno> {
    let mut at = range.start.0;
    while at < range.end() {
        let start = match seek(fd, SeekFrom::Data(at)) {
            Ok(start) if start < range.end() => start,
            Ok(_) | Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error),
        };
        let end = seek(fd, SeekFrom::Hole(start))?
            .min(range.end())
            .min(start + SPAN_BYTES);
        let run = ByteRange::new(start, end - start);
        // Where the file system cannot say, it is data.
        let unwritten = extents::unwritten(fd, run).unwrap_or_default();
        let Some(first) = unwritten.first() else {
            return Ok(Some(run));
        };
        if first.start.0 > start {
            return Ok(Some(ByteRange::new(start, first.start.0 - start)));
        }
        let found = first_bytes(fd, *first)?;
        if found.is_some() {
            return Ok(found);
        }
        at = first.end();
    }
    Ok(None)
}

/// The first pages within a range, one behind the other, that have a byte each which is not zero.
fn first_bytes(fd: &OwnedFd, range: ByteRange) -> Result<Option<ByteRange>, Errno> {
    let mut page = [0; PAGE_BYTES as usize];
    let mut found: Option<ByteRange> = None;
    let mut at = range.start.0;
    while at < range.end() {
        let end = ((at / PAGE_BYTES + 1) * PAGE_BYTES).min(range.end());
        let wanted = &mut page[..(end - at) as usize];
        let count = match pread(fd, &mut *wanted, at) {
            Err(Errno::INTR) => continue,
            read => read?,
        };
        let is_some = wanted[..count].iter().any(|byte| *byte != 0);
        let part = ByteRange::new(at, end - at);
        match (&mut found, is_some) {
            (None, true) => found = Some(part),
            (Some(run), true) => run.length += part.length,
            (Some(_), false) => break,
            (None, false) => {}
        }
        at = end;
    }
    Ok(found)
}
