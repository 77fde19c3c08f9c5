// SPDX-License-Identifier: Apache-2.0
//! The data segment: the cache's bytes, one file, cut into slots, shared read-only with sessions.
//!
//! The daemon never touches the bytes itself: the kernel writes them (io_uring, `pread`) and clients
//! read them. So this type hands out no reference to them; the few bytes that the daemon wants (a
//! container's header) are copied by `pread` from the file.

use crate::{Access, Mapping, SysError};
use rushes_core::units::SlotIndex;
use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fallocate,
    fcntl_add_seals, flock, ftruncate, memfd_create, open,
};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// Where a segment lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentHome<'a> {
    /// Anonymous memory; gone with its last holder. Sealed: it can neither shrink nor grow.
    Memfd,
    /// A file on tmpfs in a folder only root can enter; its old contents are discarded. Locked
    /// (flock) as long as this process lives, so that two daemons cannot share one.
    File(&'a Path),
}

/// What is not as it should be, though the segment works.
#[derive(Debug)]
pub enum SegmentWarning {
    /// mlock was refused: under memory pressure the cache may be swapped out, and reads be late.
    NotLocked(io::Error),
    /// No huge pages for shared memory here: a few per cent more CPU for copying.
    NoHugePages,
}

impl fmt::Display for SegmentWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SegmentWarning::NotLocked(error) => write!(
                f,
                "the cache could not be locked in memory ({error}); under memory pressure reads may \
                 be late. Raise LimitMEMLOCK of the service or run it as root"
            ),
            SegmentWarning::NoHugePages => write!(
                f,
                "no huge pages for shared memory; for a little less CPU write \"advise\" to \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            ),
        }
    }
}

/// The mapped, zeroed data segment.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    mapping: Mapping,
    slot_count: u32,
    slot_bytes: u32,
}

impl Segment {
    /// Make a segment of `slot_count` slots of `slot_bytes`, zeroed and locked in memory.
    ///
    /// Errors   InvalidInput for sizes that make no sense; ENOSPC when the tmpfs is too small;
    ///          EWOULDBLOCK when another process holds the file.
    pub fn create(
        home: SegmentHome<'_>,
        slot_count: u32,
        slot_bytes: u32,
    ) -> Result<(Segment, Vec<SegmentWarning>), SysError> {
        let about = || format!("{slot_count} buffers of {slot_bytes} bytes");
        let bytes = u64::from(slot_count) * u64::from(slot_bytes);
        if slot_count == 0 || !slot_bytes.is_power_of_two() || slot_bytes < 4096 {
            let sizes = io::Error::new(
                io::ErrorKind::InvalidInput,
                "expected at least one buffer, and a power of two of at least 4096 for its size",
            );
            return Err(SysError::new("make the cache", about(), sizes));
        }
        let fd = match home {
            SegmentHome::Memfd => memory_file_unsealed("rushes-cache", bytes),
            SegmentHome::File(path) => tmpfs_file(path, bytes),
        }
        .map_err(|error| SysError::new("make the cache", about(), error))?;
        let map_bytes = usize::try_from(bytes)
            .map_err(|_| SysError::new("map the cache", about(), io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping::shared(&fd, map_bytes, Access::ReadWrite)
            .map_err(|error| SysError::new("map the cache", about(), error))?;
        if home == SegmentHome::Memfd {
            seal_for_readers(&fd)
                .map_err(|error| SysError::new("seal the cache", about(), error))?;
        }

        let mut warnings = Vec::new();
        // Advice first: locking faults the pages in, in whatever size they then have.
        if !(huge_pages_for_shared_memory() && mapping.advise_huge()) {
            warnings.push(SegmentWarning::NoHugePages);
        }
        if let Err(error) = mapping.lock() {
            warnings.push(SegmentWarning::NotLocked(error));
        }
        let segment = Segment {
            fd,
            mapping,
            slot_count,
            slot_bytes,
        };
        Ok((segment, warnings))
    }

    /// How many slots.
    pub fn slot_count(&self) -> u32 {
        self.slot_count
    }

    /// Size of one. Units: bytes.
    pub fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// A new read-only descriptor of the segment, for a session.
    ///
    /// Opened anew rather than duplicated: its own open file description, without the write access
    /// that a duplicate would carry.
    pub fn session_fd(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Copy bytes of one slot, from `offset` in it; fewer at its end.
    pub fn copy_out(&self, slot: SlotIndex, offset: u32, buffer: &mut [u8]) -> io::Result<usize> {
        let room = self.room(slot, offset)?;
        let length = buffer.len().min(room as usize);
        Ok(rustix::io::pread(
            &self.fd,
            &mut buffer[..length],
            self.position(slot, offset),
        )?)
    }

    /// Copy bytes into one slot, from `offset` in it; fewer at its end. For tests and small servers;
    /// the daemon's reads go straight from the device.
    pub fn copy_in(&self, slot: SlotIndex, offset: u32, bytes: &[u8]) -> io::Result<usize> {
        let room = self.room(slot, offset)?;
        let length = bytes.len().min(room as usize);
        // SAFETY: slot, offset and length were checked against the mapping; nobody holds a Rust
        // reference to its bytes. Readers in other processes may see a mix, as with any device.
        unsafe {
            self.pointer(slot, offset)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), length);
        }
        Ok(length)
    }

    /// Read `length` bytes of a file at `file_offset` into a slot from `offset` in it, waiting. Short
    /// at the end of the file.
    pub fn read_into(
        &self,
        file: impl AsFd,
        file_offset: u64,
        slot: SlotIndex,
        offset: u32,
        length: u32,
    ) -> io::Result<usize> {
        let length = self.room(slot, offset)?.min(length);
        let file = file.as_fd();
        let file_offset = i64::try_from(file_offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: slot, offset and length were checked against the mapping, which lives as long as
        // `self`; only the kernel writes there, no Rust reference to the bytes exists.
        let count = unsafe {
            libc::pread(
                file.as_raw_fd(),
                self.pointer(slot, offset).as_ptr().cast(),
                length as usize,
                file_offset,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Where a slot's byte `offset` is mapped. Slot and offset were checked by the caller.
    pub(crate) fn pointer(&self, slot: SlotIndex, offset: u32) -> NonNull<u8> {
        debug_assert!(slot.0 < self.slot_count && offset < self.slot_bytes);
        let position = slot.0 as usize * self.slot_bytes as usize + offset as usize;
        assert!(position < self.mapping.bytes());
        // SAFETY: inside the mapping (asserted).
        unsafe { self.mapping.start().add(position) }
    }

    /// All of it.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn room(&self, slot: SlotIndex, offset: u32) -> io::Result<u32> {
        if slot.0 >= self.slot_count || offset >= self.slot_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "buffer {} offset {offset}: the cache has {} of {} bytes",
                    slot.0, self.slot_count, self.slot_bytes
                ),
            ));
        }
        Ok(self.slot_bytes - offset)
    }

    fn position(&self, slot: SlotIndex, offset: u32) -> u64 {
        u64::from(slot.0) * u64::from(self.slot_bytes) + u64::from(offset)
    }
}

/// A zeroed memory file of `bytes` that can neither shrink nor grow (nor be sealed further).
pub fn memory_file(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let fd = memory_file_unsealed(name, bytes)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

fn memory_file_unsealed(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, bytes)?;
    Ok(fd)
}

/// Nobody else may ever write to it, not even root through /proc; the mapping made before stays
/// writable. FUTURE_WRITE came with Linux 5.1.
fn seal_for_readers(fd: &OwnedFd) -> io::Result<()> {
    let size = SealFlags::SHRINK | SealFlags::GROW;
    fcntl_add_seals(fd, size | SealFlags::FUTURE_WRITE).or_else(|_| fcntl_add_seals(fd, size))?;
    Ok(fcntl_add_seals(fd, SealFlags::SEAL)?)
}

fn tmpfs_file(path: &Path, bytes: u64) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = open(path, flags, Mode::RUSR | Mode::WUSR)?;
    flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
    // To nothing and up again: all zero, whoever used it before.
    ftruncate(&fd, 0)?;
    ftruncate(&fd, bytes)?;
    // Taken now, or a full tmpfs would be a SIGBUS later.
    fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
    Ok(fd)
}

/// True unless the kernel never gives huge pages to shared memory (the brackets mark the choice).
fn huge_pages_for_shared_memory() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .is_ok_and(|text| !text.contains("[never]") && !text.contains("[deny]"))
}
