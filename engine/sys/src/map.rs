// SPDX-License-Identifier: Apache-2.0
//! A range of memory shared with other processes.
//!
//! It gives no `&[u8]` of its bytes: another process may change them at any time. Control words are
//! atomics; callers copy bulk bytes out, or the kernel writes them.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// The access that a mapping allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading; a store would be a fault, so [`Mapping::word32`] must only be loaded from.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// A shared mapping of a whole file, undone on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain address space of the process, tied to no thread; every access goes
// through atomics or raw copies, never through references to plain memory.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map the first `bytes` of `fd`, shared.
    ///
    /// Assumes  the file has at least `bytes` and cannot shrink (sealed, or in a folder that only
    ///          root can enter): a shrunk file raises SIGBUS on touch.
    /// Errors   as mmap(2); EINVAL for zero bytes
    pub fn shared(fd: impl AsFd, bytes: usize, access: Access) -> io::Result<Mapping> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a null hint lets the kernel choose unused address space, so no existing memory
        // is replaced; the result is owned by the value made below alone.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { start, bytes };
        mapping.advise_random();
        Ok(mapping)
    }

    /// Keep the kernel from reading around a page that is faulted in. Where the file lies on a disk
    /// it would read as much as the disk's read-ahead, and zero as much where the file has holes: a
    /// session took 50 ms to set up with 8 MiB of it.
    fn advise_random(&self) {
        let advised = self.advise(Advice::Random);
        debug_assert!(advised.is_ok(), "every kernel has this advice");
    }

    /// Advise the kernel about all of it. `advice`: one that changes no contents.
    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is ours, and its contents stay as they are.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, advice) }
    }

    /// Private memory, zeroed, aligned to a page.
    pub fn private(bytes: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `shared`.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, bytes })
    }

    /// Read bytes of a file into it (pread(2)). Returns how many; fewer at the file's end.
    ///
    /// Errors   InvalidInput: they do not fit
    pub fn read_at(
        &self,
        file: impl AsFd,
        position: u64,
        offset: usize,
        bytes: usize,
    ) -> io::Result<usize> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = file.as_fd().as_raw_fd();
        let position = libc::off_t::try_from(position).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the target lies in the mapping (checked), and no reference into it exists.
        let count = unsafe {
            let target = self.start.as_ptr().add(offset);
            libc::pread(fd, target.cast(), bytes, position)
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Length. Units: bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte, for calls that hand memory to the kernel or to C. Valid while `self` lives.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The 32-bit word at `offset` (bytes; a multiple of 4 inside the mapping: asserted).
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= self.bytes)
        );
        // SAFETY: in bounds and aligned (asserted; mmap gives page alignment); the memory lives as
        // long as `self`; other processes change it only as atomics do, and any bit pattern is
        // valid.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// The 64-bit word at `offset` (bytes; a multiple of 8 inside the mapping: asserted).
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset.checked_add(8).is_some_and(|end| end <= self.bytes)
        );
        // SAFETY: as for `word32`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// Ask for huge pages. False when the kernel has none for this memory.
    pub fn advise_huge(&self) -> bool {
        self.advise(Advice::LinuxHugepage).is_ok()
    }

    /// Fault all of it in, so that a lack of memory shows now. Does nothing before Linux 5.14.
    pub fn populate(&self) -> io::Result<()> {
        match self.advise(Advice::LinuxPopulateWrite) {
            Err(rustix::io::Errno::INVAL) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Fault a part of it in for writing, so that a store there finds its memory: without memory it
    /// would raise SIGBUS.
    ///
    /// Errors   EFAULT: there is no memory; EINVAL: a kernel before Linux 5.14; InvalidInput: a
    /// part that is not of this mapping
    pub fn populate_part(&self, offset: usize, bytes: usize) -> io::Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range is ours (checked); this touches pages without changing contents.
        let result = unsafe {
            rustix::mm::madvise(
                self.start.as_ptr().add(offset).cast(),
                bytes,
                Advice::LinuxPopulateWrite,
            )
        };
        Ok(result?)
    }

    /// Fault all of it in and keep it in memory (mlock(2)).
    pub fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is ours; locking changes no contents.
        Ok(unsafe { rustix::mm::mlock(self.start.as_ptr().cast(), self.bytes) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of our own mapping; no reference into it outlives
        // `self` (the words borrow it). A caller that hands `start` to the kernel keeps `self`
        // alive.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
