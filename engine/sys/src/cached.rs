// SPDX-License-Identifier: Apache-2.0
//! The parts of a file that are in the kernel's cache.

use rushes_core::units::ByteRange;
use rustix::param::page_size;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Pages of a range that the kernel has in its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedPages {
    /// All of them.
    pub count: u64,
    /// Those that are dirty or under write-back.
    pub unwritten_count: u64,
}

/// cachestat(2) (Linux 6.5), which libc lacks on some machines; its number is the same on all but
/// Alpha.
const CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    in_writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Ask the kernel. Waits for nothing. Microseconds at most for the megabytes of a request.
///
/// Errors   ENOSYS before Linux 6.5; EPERM for another user's file, without privileges
pub fn cached_pages(file: impl AsFd, range: ByteRange) -> io::Result<CachedPages> {
    let range = CachestatRange {
        offset: range.start.0,
        length: range.length.0,
    };
    if range.length == 0 {
        // The kernel takes a length of 0 for all up to the end.
        return Ok(CachedPages::default());
    }
    let mut found = Cachestat::default();
    let number = file.as_fd().as_raw_fd();
    // SAFETY: both are laid out as the kernel has them (uapi/linux/mman.h), and live until it has
    // returned.
    let done = unsafe {
        libc::syscall(
            CACHESTAT,
            number,
            &raw const range,
            &raw mut found,
            0 as libc::c_uint,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(CachedPages {
        count: found.cached,
        unwritten_count: found.dirty + found.in_writeback,
    })
}

impl CachedPages {
    /// The kernel has all of the range, as far as the file goes.
    pub fn is_all_of(&self, range: ByteRange, size: u64) -> bool {
        let page = page_size() as u64;
        let end = range.end().min(size).div_ceil(page);
        let pages = end.saturating_sub(range.start.0 / page);
        pages > 0 && self.count >= pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags, open};
    use std::os::unix::fs::FileExt;

    #[test]
    fn pages_are_seen_dirty_then_clean_then_gone() {
        // Not on tmpfs, where all of a file is cache.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = open(env!("CARGO_MANIFEST_DIR"), flags, Mode::RWXU).expect("a file");
        let file = std::fs::File::from(file);
        file.set_len(1 << 20).expect("long");
        let range = ByteRange::new(0, 1 << 20);
        let found = match cached_pages(&file, range) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                return crate::skip("cachestat(2) needs Linux 6.5");
            }
            found => found.expect("it is ours"),
        };
        assert_eq!(found, CachedPages::default());
        file.write_at(&[1; 8192], 4096).expect("written");
        let found = cached_pages(&file, range).expect("asked");
        assert_eq!((found.count, found.unwritten_count), (2, 2));
        assert!(!found.is_all_of(range, 1 << 20));
        let part = ByteRange::new(4096, 8192);
        let found = cached_pages(&file, part).expect("asked");
        assert!(found.is_all_of(part, 1 << 20));
        file.sync_all().expect("written");
        let found = cached_pages(&file, range).expect("asked");
        assert_eq!((found.count, found.unwritten_count), (2, 0));
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("dropped");
        let found = cached_pages(&file, range).expect("asked");
        assert_eq!(found, CachedPages::default());
        assert_eq!(
            cached_pages(&file, ByteRange::new(0, 0)).expect("nothing"),
            CachedPages::default()
        );
    }

    #[test]
    fn all_is_what_the_file_has_of_it() {
        let two = CachedPages {
            count: 2,
            unwritten_count: 0,
        };
        assert!(two.is_all_of(ByteRange::new(4096, 1 << 20), 4096 + 5000));
        assert!(!two.is_all_of(ByteRange::new(4096, 1 << 20), 4096 + 8193));
        assert!(two.is_all_of(ByteRange::new(4000, 200), 1 << 20));
        assert!(
            !two.is_all_of(ByteRange::new(8192, 100), 4096),
            "past the end"
        );
        assert!(!CachedPages::default().is_all_of(ByteRange::new(0, 100), 0));
    }
}
