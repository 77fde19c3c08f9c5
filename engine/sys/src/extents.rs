// SPDX-License-Identifier: Apache-2.0
//! Where a file's bytes lie on its device (FIEMAP).

use rushes_core::server::Extent;
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The extents of a file, up to a number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentMap {
    /// Ascending by offset in the file; without holes and bytes that have no place yet.
    pub extents: Vec<Extent>,
    /// False: there are more than that number.
    pub complete: bool,
}

/// Extents asked of the kernel in one call.
const BATCH: usize = 128;
/// `_IOWR('f', 11, struct fiemap)` of linux/fs.h.
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
const LAST: u32 = 0x1;
/// UNKNOWN, DELALLOC, ENCODED, DATA_INLINE, DATA_TAIL: no place, or not one that bytes can be read
/// from.
const PLACELESS: u32 = 0x2 | 0x4 | 0x8 | 0x200 | 0x400;

/// Allocated, and read as zeroes.
const UNWRITTEN: u32 = 0x800;

/// `struct fiemap_extent` of linux/fiemap.h.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for one batch.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

const _: () = assert!(size_of::<RawExtent>() == 56 && size_of::<Request>() == 32 + 56 * BATCH);

/// ENCODED, DATA_INLINE, DATA_TAIL, SHARED: a write to such bytes goes to another place.
const MOVING: u32 = 0x8 | 0x200 | 0x400 | 0x2000;

/// True when a file shares blocks with another one, or has bytes that are compressed or in its
/// inode: to write them takes new blocks.
///
/// Errors   EOPNOTSUPP where the file system has no FIEMAP
pub fn moves(fd: impl AsFd) -> io::Result<bool> {
    let mut start = 0;
    loop {
        let (raw, count) = ask(fd.as_fd(), start)?;
        for extent in &raw[..count] {
            if extent.flags & MOVING != 0 {
                return Ok(true);
            }
            start = extent.logical.saturating_add(extent.length);
            if extent.flags & LAST != 0 {
                return Ok(false);
            }
        }
        if count < BATCH {
            return Ok(false);
        }
    }
}

fn ask(fd: BorrowedFd<'_>, start: u64) -> io::Result<([RawExtent; BATCH], usize)> {
    let mut request = Request {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped_extents: 0,
        extent_count: BATCH as u32,
        reserved: 0,
        extents: [RawExtent::default(); BATCH],
    };
    // SAFETY: the kernel reads the head and writes at most `extent_count` extents behind it, for
    // which `request` has room.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut request) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let count = (request.mapped_extents as usize).min(BATCH);
    Ok((request.extents, count))
}

/// The first extents of a file, at most `count_max`. Adjacent ones are joined.
///
/// Does not flush: bytes that were written and have no place yet are left out.
/// Errors   EOPNOTSUPP where the file system has no FIEMAP (tmpfs)
pub fn of(fd: impl AsFd, count_max: usize) -> io::Result<ExtentMap> {
    let mut map = ExtentMap::default();
    let mut start = 0;
    loop {
        let (found, count) = ask(fd.as_fd(), start)?;
        for raw in &found[..count] {
            if raw.flags & PLACELESS == 0 && !add(&mut map, raw, count_max) {
                return Ok(map);
            }
            start = raw.logical.saturating_add(raw.length);
            if raw.flags & LAST != 0 {
                map.complete = true;
                return Ok(map);
            }
        }
        if count < BATCH {
            map.complete = true;
            return Ok(map);
        }
    }
}

/// Blocks within a range of a file that were reserved and not written yet, in order; writes to them
/// may be under way.
///
/// Errors   EOPNOTSUPP where the file system has no FIEMAP (tmpfs)
pub fn unwritten(fd: impl AsFd, range: ByteRange) -> io::Result<Vec<ByteRange>> {
    let mut parts = Vec::new();
    let mut start = range.start.0;
    while start < range.end() {
        let (found, count) = ask(fd.as_fd(), start)?;
        for raw in &found[..count] {
            let end = raw.logical.saturating_add(raw.length);
            let (from, to) = (raw.logical.max(range.start.0), end.min(range.end()));
            if raw.flags & (UNWRITTEN | PLACELESS) == UNWRITTEN && from < to {
                parts.push(ByteRange::new(from, to - from));
            }
            start = end;
            if raw.flags & LAST != 0 || raw.logical >= range.end() {
                return Ok(parts);
            }
        }
        if count < BATCH {
            break;
        }
    }
    Ok(parts)
}

/// Join or append; false when there is no room.
fn add(map: &mut ExtentMap, raw: &RawExtent, count_max: usize) -> bool {
    if let Some(last) = map.extents.last_mut()
        && last.logical + last.length == ByteOffset(raw.logical)
        && last.physical + last.length == ByteOffset(raw.physical)
    {
        last.length += ByteCount(raw.length);
        return true;
    }
    if map.extents.len() >= count_max {
        return false;
    }
    map.extents.push(Extent {
        logical: ByteOffset(raw.logical),
        physical: ByteOffset(raw.physical),
        length: ByteCount(raw.length),
    });
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};

    #[test]
    fn file_with_a_hole_has_its_extents_on_both_sides() {
        // Beside this program: the temporary folder may be memory, which has no extents.
        let program = std::env::current_exe().unwrap();
        let path = program.with_file_name(format!("rushes-extents-{}", std::process::id()));
        let mut file = std::fs::File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        file.write_all(&[1; 65536]).unwrap();
        file.seek(SeekFrom::Start(10 << 20)).unwrap();
        file.write_all(&[2; 65536]).unwrap();
        file.sync_all().unwrap();
        let result = of(&file, 100);
        let bounded = of(&file, 1);
        std::fs::remove_file(path).unwrap();
        let Ok(map) = result else {
            crate::skip(
                "the file system of the build has no FIEMAP: set CARGO_TARGET_DIR to one on ext4 or XFS",
            );
            return;
        };
        assert!(map.complete);
        assert_eq!(map.extents.first().unwrap().logical, ByteOffset(0));
        let total: u64 = map.extents.iter().map(|extent| extent.length.0).sum();
        assert_eq!(total, 2 * 65536);
        let bounded = bounded.unwrap();
        assert_eq!((bounded.extents.len(), bounded.complete), (1, false));
    }
}
