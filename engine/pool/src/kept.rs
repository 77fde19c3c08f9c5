// SPDX-License-Identifier: Apache-2.0
//! Room that a client has reserved within its file and not written yet: the client keeps it where
//! the file goes.
//!
//! An object that moves has such blocks at its new place, too, or does not move. Room that is
//! reserved behind a file's end does not move along: no client asked a move for it, and the daemon
//! reserves there for recording clients. On a file system that does not tell, as tmpfs, nothing
//! counts as reserved.

use crate::data::data_within;
use crate::pool::Source;
use rushes_core::pool::Shape;
use rushes_core::pool::led::{Led, outside};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rushes_sys::extents;
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Looked through at once of a stripe, which is cut in units. Units: bytes of the file.
const SPAN_BYTES: u64 = 1 << 30;

/// How long a file is, by its stub.
pub(crate) fn length_of(stub: BorrowedFd<'_>) -> Result<ByteCount, Errno> {
    Ok(ByteCount(fstat(stub)?.st_size as u64))
}

/// The part of a range that is in front of this length.
pub(crate) fn in_front(range: ByteRange, length: ByteCount) -> ByteRange {
    let end = range.end().min(length.0);
    ByteRange::new(range.start.0, end.saturating_sub(range.start.0))
}

/// Blocks of an object within a range that were reserved and have no byte.
pub(crate) fn kept(fd: &OwnedFd, range: ByteRange) -> Result<Vec<ByteRange>, Errno> {
    let Ok(found) = extents::unwritten(fd, range) else {
        return Ok(Vec::new());
    };
    let mut parts = Vec::new();
    for one in found {
        parts.extend(outside(one, &data_within(fd, one)?));
    }
    Ok(parts)
}

/// The room that an object has in a range, with or without bytes. Units: bytes.
pub(crate) fn held(fd: &OwnedFd, range: ByteRange) -> Result<u64, Errno> {
    let all = data_within(fd, range)?.into_iter().chain(kept(fd, range)?);
    Ok(all.map(|one| one.length.0).sum())
}

/// Reserve the same in another object, at the same offsets.
pub(crate) fn keep(from: &OwnedFd, to: &OwnedFd, range: ByteRange) -> Result<(), Errno> {
    kept(from, range)?
        .into_iter()
        .try_for_each(|part| reserve(to.as_fd(), part))
}

impl Source {
    /// The part of a range of the file to move at once, in view of the reservations there.
    pub(crate) fn span(&self, range: ByteRange, length: ByteCount) -> Result<ByteRange, Errno> {
        let inside = in_front(range, length);
        let is_long = self.segment.shape != Shape::Single && inside.length.0 > SPAN_BYTES;
        match is_long && !self.kept(inside)?.is_empty() {
            true => Ok(ByteRange::new(range.start.0, SPAN_BYTES)),
            false => Ok(range),
        }
    }

    /// Parts of a range of the file that are reserved and have no byte.
    fn kept(&self, range: ByteRange) -> Result<Vec<ByteRange>, Errno> {
        let (shape, origin) = (self.segment.shape, self.segment.origin);
        let mut parts = Vec::new();
        for (index, fd) in self.objects.iter().enumerate() {
            let Some(fd) = fd else { continue };
            let place = Led {
                shape,
                origin,
                index,
                ranges: Vec::new(),
            };
            for part in kept(fd, share(shape, origin, index, range))? {
                parts.extend(place.in_file(part).into_iter().map(|(_, there)| there));
            }
        }
        Ok(joined(parts))
    }

    /// Reserve the same in objects of another shape.
    pub(crate) fn keep(
        &self,
        (shape, origin, objects): (Shape, ByteOffset, &[OwnedFd]),
        range: ByteRange,
    ) -> Result<(), Errno> {
        for part in self.kept(range)? {
            for (index, fd) in objects.iter().enumerate() {
                let part = share(shape, origin, index, part);
                if part.length.0 > 0 {
                    reserve(fd.as_fd(), part)?;
                }
            }
        }
        Ok(())
    }
}

fn share(shape: Shape, origin: ByteOffset, index: usize, range: ByteRange) -> ByteRange {
    let start = shape.share(index, range.start.0 - origin.0);
    let end = shape.share(index, range.end() - origin.0);
    ByteRange::new(start, end - start)
}

/// In order, those that touch as one.
fn joined(mut parts: Vec<ByteRange>) -> Vec<ByteRange> {
    parts.sort_unstable_by_key(|part| part.start);
    let mut all: Vec<ByteRange> = Vec::new();
    for part in parts {
        match all.last_mut() {
            Some(last) if last.end() >= part.start.0 => {
                let end = last.end().max(part.end());
                *last = ByteRange::new(last.start.0, end - last.start.0);
            }
            _ => all.push(part),
        }
    }
    all
}

fn reserve(fd: BorrowedFd<'_>, part: ByteRange) -> Result<(), Errno> {
    match fallocate(fd, FallocateFlags::KEEP_SIZE, part.start.0, part.length.0) {
        // That file system has no reservations.
        Err(Errno::OPNOTSUPP) => Ok(()),
        done => done,
    }
}
