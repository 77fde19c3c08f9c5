// SPDX-License-Identifier: Apache-2.0
//! The data segment: the cache's bytes, one file, cut into slots, shared read-only with sessions.
//!
//! The daemon never reads the bytes itself: the kernel writes them (io_uring, `pread`) and clients
//! read them. So this type hands out no reference to them; [`Segment::copy_out`] copies the few
//! that a caller needs by `pread` from the file.
//!
//! **Huge pages.** Mapping a gigabyte in 4 KiB pages costs each session 80 ms of CPU, page by page
//! as it first touches them: a quarter of the whole cost of serving that gigabyte. A memfd gets
//! huge pages only if the administrator allows them for all shared memory (`shmem_enabled`, off by
//! default), but a tmpfs has a mount option of its own. So [`SegmentHome::Anonymous`] makes a tmpfs
//! that is mounted nowhere and dies with its last descriptor.

use crate::{Access, Mapping, MemoryPart, SysError};
use rushes_core::units::SlotIndex;
use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fallocate,
    fcntl_add_seals, flock, ftruncate, memfd_create, open, openat,
};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, open_tree,
};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where a segment lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentHome<'a> {
    /// Anonymous memory in huge pages; freed with its last descriptor. Where that is not possible,
    /// for lack of the right to mount or before Linux 5.2, as [`SegmentHome::Memfd`].
    Anonymous,
    /// Anonymous memory; freed with its last descriptor. Sealed: it can neither shrink nor grow,
    /// and no other process can write to it.
    Memfd,
    /// A file on tmpfs in a folder that only root can enter; its old contents are discarded. Locked
    /// (flock) as long as this process lives, so that two daemons cannot share one.
    File(&'a Path),
}

/// A defect of a segment that still works.
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
    /// A read-only view of the file system it lies in, for sessions.
    readers: Option<OwnedFd>,
    mapping: Arc<Mapping>,
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
        let made = |error| SysError::new("make the cache", about(), error);
        let (fd, readers, sealed, huge) = match home {
            SegmentHome::Anonymous => match huge_file(bytes) {
                Ok((fd, readers)) => (fd, readers, false, true),
                Err(_) => (
                    memory_file_unsealed(NAME, bytes).map_err(made)?,
                    None,
                    true,
                    false,
                ),
            },
            SegmentHome::Memfd => (
                memory_file_unsealed(NAME, bytes).map_err(made)?,
                None,
                true,
                false,
            ),
            SegmentHome::File(path) => (tmpfs_file(path, bytes).map_err(made)?, None, false, false),
        };
        let map_bytes = usize::try_from(bytes)
            .map_err(|_| SysError::new("map the cache", about(), io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping::shared(&fd, map_bytes, Access::ReadWrite)
            .map(Arc::new)
            .map_err(|error| SysError::new("map the cache", about(), error))?;
        if sealed {
            seal_for_readers(&fd)
                .map_err(|error| SysError::new("seal the cache", about(), error))?;
        }

        let mut warnings = Vec::new();
        // Advice first: locking faults the pages in, and their size is fixed then.
        let advised = mapping.advise_huge() && huge_pages_for_shared_memory();
        if !huge && !advised {
            warnings.push(SegmentWarning::NoHugePages);
        }
        if let Err(error) = mapping.lock() {
            warnings.push(SegmentWarning::NotLocked(error));
            // Fault the pages in all the same, or a lack of memory would raise SIGBUS later.
            mapping
                .populate()
                .map_err(|error| SysError::new("fill the cache", about(), error))?;
        }
        let segment = Segment {
            fd,
            readers,
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
    /// Opened again rather than duplicated: its own open file description, without the write access
    /// that a duplicate would carry. On a tmpfs of our own it is opened through a read-only mount,
    /// so that root cannot get that access back through /proc either. A memfd is sealed instead.
    pub fn session_fd(&self) -> io::Result<OwnedFd> {
        if let Some(readers) = &self.readers {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            return Ok(openat(readers, NAME, flags, Mode::empty())?);
        }
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

    /// Copy bytes into one slot, from `offset` in it; fewer at its end. For tests and small
    /// servers; the daemon's reads go straight from the device.
    pub fn copy_in(&self, slot: SlotIndex, offset: u32, bytes: &[u8]) -> io::Result<usize> {
        let room = self.room(slot, offset)?;
        let length = bytes.len().min(room as usize);
        // SAFETY: slot, offset and length were checked against the mapping; no Rust reference to
        // its bytes exists. Readers in other processes may see a mix, as with any device.
        unsafe {
            self.pointer(slot, offset)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), length);
        }
        Ok(length)
    }

    /// Read `length` bytes of a file at `file_offset` into a slot from `offset` in it, waiting.
    /// Short at the end of the file.
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

    /// Bytes of a slot, for a write out of it. They must not change until it has ended.
    ///
    /// Errors   InvalidInput: the slot has no such bytes.
    pub fn part(&self, slot: SlotIndex, offset: u32, bytes: u32) -> io::Result<MemoryPart> {
        if self.room(slot, offset)? < bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(MemoryPart {
            memory: Arc::clone(&self.mapping),
            offset: slot.0 as usize * self.slot_bytes as usize + offset as usize,
            bytes: bytes as usize,
        })
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

/// Name of its file.
const NAME: &str = "rushes-cache";

/// A file in huge pages on a new tmpfs that is mounted nowhere, and a read-only view of that file
/// system where the kernel makes one (Linux 6.15).
fn huge_file(bytes: u64) -> io::Result<(OwnedFd, Option<OwnedFd>)> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let context = context.as_fd();
    fsconfig_set_string(context, "huge", "always")?;
    // No limit, instead of the default of half of the memory: the file's size bounds it.
    fsconfig_set_string(context, "size", "0")?;
    fsconfig_set_string(context, "mode", "0700")?;
    // Linux 6.4. Before that, locking in memory has the same effect.
    let _ = fsconfig_set_flag(context, "noswap");
    fsconfig_create(context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = openat(&root, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    // Not fallocate(2): it allocates the pages without zeroing them, so that each is zeroed later.
    ftruncate(&fd, bytes)?;
    Ok((fd, read_only_view(&root).ok()))
}

fn read_only_view(root: &OwnedFd) -> io::Result<OwnedFd> {
    /// `struct mount_attr` of linux/mount.h.
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let view = open_tree(root, "", flags)?;
    let attributes = MountAttributes {
        set: u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits()),
        clear: 0,
        propagation: 0,
        user_namespace: 0,
    };
    // SAFETY: an empty path means the descriptor itself; the kernel reads `attributes`, whose size
    // is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            view.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(view)
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

/// Seal the file: no other process can write to it, not even root through /proc; the mapping made
/// before stays writable. FUTURE_WRITE came with Linux 5.1; before that only the size is sealed.
fn seal_for_readers(fd: &OwnedFd) -> io::Result<()> {
    let size = SealFlags::SHRINK | SealFlags::GROW;
    fcntl_add_seals(fd, size | SealFlags::FUTURE_WRITE).or_else(|_| fcntl_add_seals(fd, size))?;
    Ok(fcntl_add_seals(fd, SealFlags::SEAL)?)
}

fn tmpfs_file(path: &Path, bytes: u64) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = open(path, flags, Mode::RUSR | Mode::WUSR)?;
    flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
    // Truncate to 0 and extend: all bytes are zero, also after another process used the file.
    ftruncate(&fd, 0)?;
    ftruncate(&fd, bytes)?;
    // Allocate the pages now, or a full tmpfs would raise SIGBUS later.
    fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
    Ok(fd)
}

/// True unless the kernel never gives huge pages to shared memory. Brackets mark the setting.
fn huge_pages_for_shared_memory() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .is_ok_and(|text| !text.contains("[never]") && !text.contains("[deny]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn check(home: SegmentHome<'_>) -> Segment {
        let (segment, warnings) = Segment::create(home, 4, 1 << 20).unwrap();
        for warning in &warnings {
            eprintln!("{home:?}: {warning}");
        }
        let mut bytes = vec![1; 1 << 20];
        for slot in 0..4 {
            assert_eq!(
                segment.copy_out(SlotIndex(slot), 0, &mut bytes).unwrap(),
                1 << 20
            );
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
        assert_eq!(
            segment
                .copy_in(SlotIndex(2), (1 << 20) - 3, b"abcdef")
                .unwrap(),
            3
        );
        let session = segment.session_fd().unwrap();
        let mut seen = [0; 4];
        assert_eq!(
            rustix::io::pread(&session, &mut seen, (3 << 20) - 3).unwrap(),
            4
        );
        assert_eq!(&seen, b"abc\0");
        assert!(Mapping::shared(&session, 4096, Access::Read).is_ok());
        assert!(Mapping::shared(&session, 4096, Access::ReadWrite).is_err());
        assert!(rustix::io::pwrite(&session, b"x", 0).is_err());
        assert!(ftruncate(&session, 0).is_err());
        assert!(segment.copy_out(SlotIndex(4), 0, &mut bytes).is_err());
        assert!(segment.copy_in(SlotIndex(0), 1 << 20, b"x").is_err());
        segment
    }

    /// A process with the session's descriptor cannot write, not even by opening it again as root.
    fn check_reopened(segment: &Segment) {
        let session = segment.session_fd().unwrap();
        let path = format!("/proc/self/fd/{}", session.as_raw_fd());
        if let Ok(anew) = std::fs::File::options().write(true).open(path) {
            assert!(anew.write_at(b"x", 0).is_err());
            assert!(anew.set_len(0).is_err());
        }
    }

    #[test]
    fn memfd_is_zeroed_and_sealed_for_readers() {
        check_reopened(&check(SegmentHome::Memfd));
    }

    #[test]
    fn anonymous_segment_is_zeroed_and_read_only_for_readers() {
        let segment = check(SegmentHome::Anonymous);
        if segment.readers.is_none()
            && rustix::fs::fcntl_get_seals(&segment.fd)
                .is_ok_and(|seals| !seals.contains(SealFlags::SHRINK))
        {
            eprintln!("skipped in part: this kernel makes no read-only view (Linux 6.15)");
            return;
        }
        check_reopened(&segment);
    }

    #[test]
    fn file_is_zeroed_again_and_not_shared_with_another_daemon() {
        let path = format!("/dev/shm/rushes-segment-{}", std::process::id());
        std::fs::write(&path, vec![7; 10 << 20]).unwrap();
        let first = check(SegmentHome::File(Path::new(&path)));
        let second = Segment::create(SegmentHome::File(Path::new(&path)), 4, 1 << 20);
        std::fs::remove_file(&path).unwrap();
        let error = second.unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::WouldBlock, "{error}");
        assert_eq!(first.copy_out(SlotIndex(0), 0, &mut [0; 8]).unwrap(), 8);
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        for (count, bytes) in [(0, 4096), (4, 0), (4, 5000), (4, 2048)] {
            let error = Segment::create(SegmentHome::Memfd, count, bytes).unwrap_err();
            assert_eq!(error.source.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
