// SPDX-License-Identifier: Apache-2.0
//! Writing for clients: our own descriptors of a file that a client may write, blocks for it on the
//! client's account, its times.

mod xfs;

use crate::error::errno_of;
use crate::extents;
use crate::file::status;
use crate::lease;
use crate::watch::{HANDLE_BYTES_MAX, RawHandle};
use rushes_core::server::{Extent, FileKey};
use rushes_core::units::ByteRange;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, Timespec, Timestamps, fallocate, fcntl_getfl, fdatasync,
    fstat, fstatfs, fsync, ftruncate, futimens, open, openat, unlinkat,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// The access that a descriptor allows, by the kernel's table of descriptors alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allows {
    /// Reading.
    pub read: bool,
    /// Writing.
    pub write: bool,
}

impl Allows {
    /// The access that `fd` allows.
    pub fn of(fd: impl AsFd) -> Allows {
        let Ok(flags) = fcntl_getfl(fd) else {
            return Allows::default();
        };
        let is = |mode: &[OFlags]| {
            !flags.contains(OFlags::PATH) && mode.contains(&(flags & OFlags::RWMODE))
        };
        Allows {
            read: is(&[OFlags::RDONLY, OFlags::RDWR]),
            write: is(&[OFlags::WRONLY, OFlags::RDWR]),
        }
    }
}

/// A file that we write to.
#[derive(Clone, Debug)]
pub struct WriteFile {
    /// O_DIRECT.
    pub direct: Arc<OwnedFd>,
    /// Through the kernel's cache, for bytes that fill no whole page.
    pub buffered: Arc<OwnedFd>,
}

/// `f_type` of file systems that write to a new place each time: btrfs (linux/magic.h) and
/// bcachefs.
const NEW_PLACES: [u64; 2] = [0x9123_683e, 0xca45_1a4e];

/// Why clients write a file past the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOurs {
    /// Its file system writes to a new place each time: reserved blocks serve the first write
    /// alone, and not even that after a snapshot.
    NewPlaces,
    /// Its bytes are shared with another file, compressed or in its inode: a write moves them.
    Moves,
    /// A write by its user would clear a set-id bit.
    SetId,
    /// It has no direct I/O.
    Buffered,
}

/// Open a file that its client may write for ourselves. `file`: vetted before, as `reopen_vetted`
/// does.
///
/// Errors   the outer: the file system; the inner: the client should write it past the daemon
pub fn open_writing(file: impl AsFd, key: FileKey) -> io::Result<Result<WriteFile, NotOurs>> {
    let found = fstat(&file)?;
    if found.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
        return Ok(Err(NotOurs::SetId));
    }
    if NEW_PLACES.contains(&(fstatfs(&file)?.f_type as u64)) {
        return Ok(Err(NotOurs::NewPlaces));
    }
    if extents::moves(&file)? {
        return Ok(Err(NotOurs::Moves));
    }
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    let direct = match open(path.as_str(), flags | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::INVAL) => return Ok(Err(NotOurs::Buffered)),
        Err(error) => return Err(error.into()),
    };
    let buffered = open(path.as_str(), flags, Mode::empty())?;
    if status(&direct)?.key != key {
        return Err(io::Error::from_raw_os_error(libc::ESTALE));
    }
    // An older error must not count against our first write.
    let _ = untold_error(&direct);
    Ok(Ok(WriteFile {
        direct: Arc::new(direct),
        buffered: Arc::new(buffered),
    }))
}

/// Whether a file system reserves blocks before the bytes that go into them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserves {
    /// It reserves them (fallocate), and its FIEMAP shows their places.
    Extents,
    /// It does not; the reason.
    Never(&'static str),
    /// The trial found no room; the kernel's error.
    Full(String),
    /// The trial failed; the kernel's error.
    Untried(String),
}

impl Reserves {
    /// Try it in a file without a name in `folder`. Waits for the file system.
    ///
    /// Uses the same calls as for a written file, and the kernel's fallocate(2): the C library's
    /// posix_fallocate writes zeros where the kernel refuses, so it would succeed everywhere.
    pub fn of(folder: impl AsFd) -> Reserves {
        match unnamed(&folder) {
            Ok(file) => try_reserving(&file),
            Err(error) => Reserves::untried(&error),
        }
    }

    fn untried(error: &io::Error) -> Reserves {
        if errno_of(error).is_full() {
            Reserves::Full(error.to_string())
        } else {
            Reserves::Untried(error.to_string())
        }
    }
}

/// The length of a trial. Units: bytes.
const TRIAL_BYTES: u64 = 1 << 16;

fn try_reserving(file: &OwnedFd) -> Reserves {
    let untried = |error: io::Error| Reserves::untried(&error);
    let key = match status(file) {
        Ok(found) => found.key,
        Err(error) => return untried(error),
    };
    match open_writing(file, key) {
        Ok(Ok(_)) => {}
        Ok(Err(NotOurs::Buffered)) => return Reserves::Never("it has no direct I/O"),
        Ok(Err(NotOurs::NewPlaces)) => {
            return Reserves::Never("it writes to new places each time");
        }
        Ok(Err(NotOurs::Moves | NotOurs::SetId)) => {
            return Reserves::Never("bytes move when they are written");
        }
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            return Reserves::Never("it does not tell where blocks are");
        }
        Err(error) => return untried(error),
    }
    match fallocate(file, FallocateFlags::KEEP_SIZE, 0, TRIAL_BYTES) {
        Ok(()) => {}
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            return Reserves::Never("it has no fallocate");
        }
        Err(error) => return untried(error.into()),
    }
    let mapped: u64 = match extents::of(file, usize::MAX) {
        Ok(map) => map.extents.iter().map(|extent| extent.length.0).sum(),
        Err(_) => 0,
    };
    if mapped < TRIAL_BYTES {
        return Reserves::Never("it does not tell where blocks are");
    }
    match crate::watch::handle_of(file) {
        Ok(_) => Reserves::Extents,
        Err(_) => Reserves::Never("it cannot find a file again by its handle"),
    }
}

/// Make the file system look for free blocks near `folder`, for which it reads its maps page by
/// page when a file needs some: by a reservation in a file without a name, which is deleted at
/// once. Waits for the file system.
///
/// Errors   no block is free, or the file system has no files without names
pub fn look_for_blocks(folder: impl AsFd) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
    let file = openat(&folder, ".", flags, Mode::RUSR | Mode::WUSR)?;
    Ok(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, TRIAL_BYTES)?)
}

/// A file without a name; where the file system has no O_TMPFILE, one whose name is deleted at
/// once.
pub fn unnamed(folder: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let private = Mode::RUSR | Mode::WUSR;
    match openat(&folder, ".", flags | OFlags::TMPFILE, private) {
        Ok(file) => return Ok(file),
        // EISDIR: a kernel module that does not know the flag.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let name = format!(".rushes-trial-{}", std::process::id());
    let made = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let file = openat(&folder, name.as_str(), made, private)?;
    unlinkat(&folder, name.as_str(), AtFlags::empty())?;
    Ok(file)
}

/// Open a file by its kernel handle, to read it past the kernel's cache. `mount`: any open
/// descriptor of its file system.
///
/// Errors   ESTALE: the file is deleted, if [`prove_gone`] confirms it; else it could not
/// be read
pub fn open_by_handle(mount: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<Arc<OwnedFd>> {
    let flags = libc::O_RDONLY | libc::O_DIRECT;
    open_raw(mount, (kind, handle), flags).map(Arc::new)
}

/// The same for writing.
///
/// Errors   as [`open_by_handle`]; EROFS, EPERM, ETXTBSY and the like: it exists, and cannot be
/// written now
pub fn open_writing_by_handle(mount: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<WriteFile> {
    let open = |flags: i32| open_raw(&mount, (kind, handle), flags).map(Arc::new);
    Ok(WriteFile {
        direct: open(libc::O_RDWR | libc::O_DIRECT)?,
        buffered: open(libc::O_RDWR)?,
    })
}

/// Of statfs(2).
const XFS_MAGIC: u64 = 0x5846_5342;
/// Also of ext2 and ext3, which the same driver serves; another driver has no count of errors below
/// /sys/fs/ext4.
const EXT4_MAGIC: u64 = 0xef53;

/// Whether a file whose handle is stale on this file system is deleted. `root`: a folder of it,
/// open for reading.
///
/// The kernel also answers ESTALE when it could not read the inode (exportfs turns each error but
/// ENOMEM into that). So ESTALE counts only where a file can be made, and where ext4 has counted no
/// errors of its own since its last check: a failed read of an inode counts as one. XFS counts
/// none, so we ask it for the inode by number, which tells a free one from one that cannot be read.
/// Other file systems, and an ext4 whose count cannot be read, prove nothing.
///
/// Errors   it is not proved, with the reason
pub fn prove_gone(root: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<()> {
    let found = rustix::fs::fstatvfs(&root)?;
    if found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        return Err(rustix::io::Errno::ROFS.into());
    }
    match unnamed(&root) {
        Ok(_) => {}
        // It is writable, and full.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {}
        Err(error) => return Err(error),
    }
    match rustix::fs::fstatfs(&root)?.f_type as u64 {
        XFS_MAGIC => xfs::prove_gone(root, kind, handle),
        EXT4_MAGIC => check_no_faults(faults_counted(&root)),
        _ => Err(io::Error::other(
            "this file system does not tell a file that is gone from one that it cannot read; ext4 and XFS do",
        )),
    }
}

/// Judges ext4's count of its errors. A count that could not be read is no count of 0.
fn check_no_faults(counted: io::Result<u64>) -> io::Result<()> {
    match counted {
        Ok(0) => Ok(()),
        Ok(count) => Err(io::Error::other(format!(
            "the file system has found {count} faults in itself since it was checked last"
        ))),
        Err(error) => Err(io::Error::other(format!(
            "the file system's count of its own faults could not be read below /sys/fs/ext4: {error}"
        ))),
    }
}

/// The count of errors in ext4's superblock.
fn faults_counted(root: impl AsFd) -> io::Result<u64> {
    let device = fstat(root)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let disk = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))?;
    let name = disk.file_name().ok_or(io::ErrorKind::NotFound)?;
    let counted = PathBuf::from("/sys/fs/ext4").join(name);
    let text = std::fs::read_to_string(counted.join("errors_count"))?;
    text.trim()
        .parse()
        .map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The path of a file, by its kernel handle; one of several. `mount`: any open descriptor of its
/// file system.
///
/// Errors   ESTALE: as [`open_by_handle`]; ENOENT: the kernel knows no name of it
pub fn name_by_handle(mount: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<PathBuf> {
    let file = open_raw(&mount, (kind, handle), libc::O_PATH)?;
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // A file that was not looked up since the start of the machine has no place in the kernel's
    // tree: its path is a slash alone.
    let named = std::fs::symlink_metadata(&path)?;
    let known = fstat(&file)?;
    if (named.dev(), named.ino()) == (known.st_dev, known.st_ino) {
        Ok(path)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

fn open_raw(mount: impl AsFd, (kind, handle): (i32, &[u8]), flags: i32) -> io::Result<OwnedFd> {
    let mut raw = RawHandle {
        bytes: u32::try_from(handle.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        kind,
        handle: [0; HANDLE_BYTES_MAX],
    };
    raw.handle
        .get_mut(..handle.len())
        .ok_or(io::ErrorKind::InvalidInput)?
        .copy_from_slice(handle);
    // SAFETY: the kernel reads `bytes` bytes behind the head of `raw`, which are there.
    let fd = unsafe {
        libc::open_by_handle_at(
            mount.as_fd().as_raw_fd(),
            (&raw mut raw).cast(),
            flags | libc::O_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The result of an attempt to free the blocks behind a file's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// The file has no block behind its end any more.
    Done,
    /// The file is deleted, and that is proved ([`prove_gone`]).
    Gone,
    /// A program has it open, and might be writing to it.
    Busy,
}

/// Free the blocks behind the end of a file that no program has open, by its kernel handle.
/// `root`: a folder of its file system, open for reading.
///
/// Only a lease makes that safe: to free them is to truncate, and a program that lengthens the file
/// at the same moment would lose bytes. While we hold the lease, a program that opens the file
/// waits.
///
/// Errors   those of the file system; EINVAL: it knows no leases; the handle is stale, and the file
/// is not proved to be deleted, with the reason
pub fn give_back(root: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<GivenBack> {
    let file = match open_raw(&root, (kind, handle), libc::O_RDWR | libc::O_NONBLOCK) {
        Ok(file) => file,
        Err(error) => {
            return match error.raw_os_error() {
                Some(libc::ESTALE) => prove_gone(root, kind, handle).map(|()| GivenBack::Gone),
                Some(libc::EAGAIN | libc::ETXTBSY) => Ok(GivenBack::Busy),
                _ => Err(error),
            };
        }
    };
    let owner = fstat(&file)?;
    // Only a file's owner, or CAP_LEASE, may take a lease.
    match as_user(owner.st_uid, owner.st_gid, || lease::take(&file))? {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => return Ok(GivenBack::Busy),
        Err(error) => return Err(error),
    }
    // Read the length now: before the lease a program could write. The lease ends with the
    // descriptor.
    trim(&file, fstat(&file)?.st_size as u64)?;
    Ok(GivenBack::Done)
}

/// Run `work` on another user's account: that user's quota counts, and neither the reserve for
/// root nor root's exemption from quotas applies. Only this thread changes, and changes back.
///
/// Errors   EPERM: this process may not act for that user; or its capabilities cannot be changed.
/// `work` then does not run. Or they cannot be restored after it
fn as_user<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> io::Result<T> {
    let before = capabilities(None)?;
    let mut without = before;
    without.effective.remove(CapabilitySet::SYS_RESOURCE);
    // SAFETY: these calls change two numbers of the calling thread and touch no memory.
    let (former_gid, former_uid) = unsafe { (libc::setfsgid(gid), libc::setfsuid(uid)) };
    // Both return the former number, also when they changed nothing. -1 is no number: it changes
    // nothing, and so returns the number in force.
    // SAFETY: as above.
    let in_force = unsafe { (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX)) };
    let result = if in_force != (gid as i32, uid as i32) {
        Err(rustix::io::Errno::PERM.into())
    } else {
        set_capabilities(None, without)
            .map(|()| work())
            .map_err(io::Error::from)
    };
    // SAFETY: as above.
    unsafe {
        libc::setfsuid(former_uid as u32);
        libc::setfsgid(former_gid as u32);
    }
    // setfsuid from 0 removes the file capabilities from the effective set, and restores them on
    // the return to 0; we restore the one that we removed ourselves.
    set_capabilities(None, before)?;
    result
}

/// Reserve blocks for `needed`, on this user's account, and on to `wished_end` within a 16th of the
/// free space, if the file system grants that. Returns the extents of the whole file; none if it
/// shares some with another file, such as a copy by reflink, since a write to those takes blocks
/// that are not reserved.
///
/// Errors   ENOSPC, EDQUOT: no room even for `needed`; EOPNOTSUPP: this file system reserves no
/// blocks
pub fn reserve(
    file: impl AsFd,
    needed: ByteRange,
    wished_end: u64,
    (uid, gid): (u32, u32),
    extent_count_max: usize,
) -> io::Result<Vec<Extent>> {
    let ask = |end: u64| {
        let start = needed.start.0;
        let flags = FallocateFlags::KEEP_SIZE;
        rustix::io::retry_on_intr(|| fallocate(&file, flags, start, end - start))
    };
    let needed_end = needed.end();
    as_user(uid, gid, || {
        let most = needed.start.0.saturating_add(spare(&file)?);
        let wished = wished_end.max(needed_end).min(most);
        if wished > needed_end {
            match ask(wished) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::OPNOTSUPP) => {
                    return Err(rustix::io::Errno::OPNOTSUPP.into());
                }
                // Then `needed` alone: the disk may be fuller than it was, or the quota near.
                Err(_) => {}
            }
        }
        Ok::<(), io::Error>(ask(needed_end)?)
    })??;
    if extents::moves(&file)? {
        return Ok(Vec::new());
    }
    Ok(extents::of(&file, extent_count_max)?.extents)
}

/// The blocks of a file on its disk; 0 when its status cannot be read. Units: bytes.
pub fn taken(file: impl AsFd) -> u64 {
    fstat(file).map_or(0, |found| found.st_blocks as u64 * 512)
}

/// The space that may be reserved ahead: a 16th of the free space of the file system. Units: bytes.
fn spare(file: impl AsFd) -> io::Result<u64> {
    let found = rustix::fs::fstatvfs(file)?;
    Ok(found.f_bavail / 16 * found.f_frsize)
}

/// Free the blocks that were reserved past the end of a file that is `size` long, and keep its time
/// of modification.
///
/// Errors   WouldBlock: it has another length by now, since a program writes to it; its blocks are
/// unchanged. Others: the file system
pub fn trim(file: impl AsFd, size: u64) -> io::Result<()> {
    let before = fstat(&file)?;
    if before.st_size as u64 != size {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let rounded = size.next_multiple_of(before.st_blksize.max(1) as u64);
    if (before.st_blocks as u64) * 512 <= rounded {
        return Ok(());
    }
    // No call frees the blocks behind the end and nothing else. If a program lengthens the file in
    // the microseconds between the check above and this call, its bytes are lost; but the file was
    // just recorded.
    ftruncate(&file, size)?;
    set_modification(file, before.st_mtime, before.st_mtime_nsec as _)
}

/// Set when a file was modified. Units: ns since 1970.
pub fn set_modified(file: impl AsFd, at_ns: i64) -> io::Result<()> {
    let nanoseconds = at_ns.rem_euclid(1_000_000_000);
    set_modification(file, at_ns.div_euclid(1_000_000_000), nanoseconds as _)
}

fn set_modification(file: impl AsFd, seconds: i64, nanoseconds: i64) -> io::Result<()> {
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: libc::UTIME_OMIT as _,
        },
        last_modification: Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds as _,
        },
    };
    Ok(futimens(&file, &times)?)
}

/// Make all of a file durable, also its length and place. Waits for the device.
pub fn sync(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| fsync(&file))?)
}

/// The same for its bytes and the metadata that finds them. For a file without dirty pages it makes
/// the drive flush its cache.
pub fn sync_data(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| fdatasync(&file))?)
}

/// Write the dirty pages of a file, and wait until the device has taken them: no journal, no flush.
/// It costs next to nothing when the kernel has written them by itself.
///
/// Errors   the device's error, also of earlier writes since this descriptor last reported one
pub fn write_out(file: impl AsFd) -> io::Result<()> {
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    loop {
        // SAFETY: a call on a descriptor that is open, without memory.
        let result = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, how) };
        let error = io::Error::last_os_error();
        match result {
            0 => return Ok(()),
            _ if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

/// Takes the error of the kernel's write-back of a file that this descriptor has not reported yet;
/// the kernel reports each once. Waits for nothing, as it asks about a place behind the end of any
/// file.
///
/// Errors   the device's error
pub fn untold_error(file: impl AsFd) -> io::Result<()> {
    let (place, length) = (i64::MAX & !0xffff, 0xffff);
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE;
    // SAFETY: a call on a descriptor that is open, without memory.
    let result = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), place, length, how) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A sandbox or a file system without the call: then no error is known.
        Some(libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::ESPIPE) => Ok(()),
        _ => Err(error),
    }
}

/// `_IOR(0x15, 0, struct fsuuid2)` of linux/fs.h (Linux 6.9).
const FS_IOC_GETFSUUID: libc::c_ulong = 0x8011_1500;

/// The identity of a file system: its UUID, or where the kernel does not tell that, the number that
/// statfs(2) gives.
pub fn file_system_id(file: impl AsFd) -> io::Result<[u8; 16]> {
    // struct fsuuid2: length, then sixteen bytes.
    let mut uuid = [0u8; 17];
    // SAFETY: the kernel writes at most these seventeen bytes.
    let told = unsafe {
        libc::ioctl(
            file.as_fd().as_raw_fd(),
            FS_IOC_GETFSUUID as _,
            uuid.as_mut_ptr(),
        )
    };
    let mut id = [0; 16];
    if told == 0 && uuid[0] == 16 {
        id.copy_from_slice(&uuid[1..]);
        return Ok(id);
    }
    let found = rustix::fs::fstatvfs(file)?;
    id[..8].copy_from_slice(&found.f_fsid.to_ne_bytes());
    Ok(id)
}

/// The wall clock. Units: ns since 1970.
pub fn wall_ns() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    now.tv_sec
        .saturating_mul(1_000_000_000)
        .saturating_add(now.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    fn file(name: &str) -> (std::path::PathBuf, std::fs::File) {
        let path = std::env::temp_dir().join(format!("rushes-space-{name}-{}", std::process::id()));
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        (path, file)
    }

    #[test]
    fn descriptors_say_what_they_allow() {
        let (path, file) = file("allows");
        let both = Allows {
            read: true,
            write: true,
        };
        assert_eq!(Allows::of(&file), both);
        let read = std::fs::File::open(&path).unwrap();
        assert_eq!(
            Allows::of(&read),
            Allows {
                write: false,
                ..both
            }
        );
        let write = std::fs::File::options().write(true).open(&path).unwrap();
        assert_eq!(
            Allows::of(&write),
            Allows {
                read: false,
                ..both
            }
        );
        let name = open(&path, OFlags::PATH, Mode::empty()).unwrap();
        assert_eq!(Allows::of(&name), Allows::default());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn reservations_are_seen_trimmed_and_leave_size_and_times_alone() {
        let (path, mut file) = file("reserve");
        let needed = ByteRange::new(0, 5000);
        let extents = match reserve(&file, needed, 1 << 20, (0, 0), 100) {
            Ok(extents) => extents,
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                crate::skip("the temporary folder's file system has no fallocate or no extents");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let mapped: u64 = extents.iter().map(|extent| extent.length.0).sum();
        assert!(mapped >= 1 << 20, "{extents:?}");
        assert_eq!(file.metadata().unwrap().len(), 0);
        file.write_all(&[7; 5000]).unwrap();
        set_modified(&file, 1_234_567_890_123_456_789).unwrap();
        let other = trim(&file, 4000).unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::WouldBlock);
        assert!(file.metadata().unwrap().blocks() * 512 >= 1 << 20);
        trim(&file, 5000).unwrap();
        let left = file.metadata().unwrap();
        assert!(left.blocks() * 512 <= 8192, "{}", left.blocks());
        assert_eq!(left.len(), 5000);
        assert_eq!(
            (left.mtime(), left.mtime_nsec()),
            (1_234_567_890, 123_456_789)
        );
        assert!(std::fs::read(&path).unwrap() == vec![7; 5000]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_is_found_again_by_its_handle_whatever_it_is_called() {
        let (path, mut file) = file("handle");
        file.write_all(b"take one").unwrap();
        let handle = crate::watch::handle_of(&file).unwrap();
        let (kind, bytes) = handle.split_first_chunk::<4>().unwrap();
        let other = path.with_extension("renamed");
        std::fs::rename(&path, &other).unwrap();
        let folder = std::fs::File::open(std::env::temp_dir()).unwrap();
        let kind = i32::from_ne_bytes(*kind);
        let named = name_by_handle(&folder, kind, bytes).unwrap();
        assert_eq!(named.file_name(), other.file_name());
        let written = match open_writing_by_handle(&folder, kind, bytes) {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                std::fs::remove_file(other).unwrap();
                crate::skip("the temporary folder's file system has no direct I/O");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let read = open_by_handle(&folder, kind, bytes).unwrap();
        let key = status(&file).unwrap().key;
        for fd in [&read, &written.direct, &written.buffered] {
            assert_eq!(status(&**fd).unwrap().key, key);
        }
        drop((read, written, file));
        std::fs::remove_file(other).unwrap();
        let gone = open_by_handle(&folder, kind, bytes).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESTALE));
        let told = prove_gone(&folder, kind, bytes);
        let found = rustix::fs::fstatfs(&folder).unwrap().f_type as u64;
        assert_eq!(
            told.is_ok(),
            [XFS_MAGIC, EXT4_MAGIC].contains(&found),
            "{told:?}"
        );
        assert!(name_by_handle(&folder, kind, bytes).is_err());
    }

    #[test]
    fn nothing_is_gone_where_faults_are_not_counted_or_cannot_be_read() {
        check_no_faults(Ok(0)).unwrap();
        let told = check_no_faults(Ok(3)).unwrap_err();
        assert!(told.to_string().contains("3 faults"), "{told}");
        let told = check_no_faults(Err(io::ErrorKind::PermissionDenied.into())).unwrap_err();
        assert!(told.to_string().contains("could not be read"), "{told}");
        // A tmpfs has no device, and so no count; and is neither of the two that give a proof.
        let Ok(root) = std::fs::File::open("/dev/shm") else {
            crate::skip("there is no /dev/shm");
            return;
        };
        let found = rustix::fs::fstatfs(&root).unwrap().f_type as u64;
        if [XFS_MAGIC, EXT4_MAGIC].contains(&found) {
            crate::skip("/dev/shm is no tmpfs");
            return;
        }
        faults_counted(&root).unwrap_err();
        let told = prove_gone(&root, 1, &[0; 8]).unwrap_err();
        assert!(told.to_string().contains("does not tell"), "{told}");
    }

    #[test]
    fn blocks_behind_the_end_are_given_back_when_nobody_has_the_file_open() {
        let (path, mut file) = file("give-back");
        file.write_all(&[7; 5000]).unwrap();
        if fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20).is_err() {
            crate::skip("the temporary folder's file system has no fallocate");
            return;
        }
        let blocks = || std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!(blocks() >= 1 << 20);
        let handle = crate::watch::handle_of(&file).unwrap();
        let (kind, bytes) = handle.split_first_chunk::<4>().unwrap();
        let kind = i32::from_ne_bytes(*kind);
        let folder = std::fs::File::open(std::env::temp_dir()).unwrap();
        let attempt = || give_back(&folder, kind, bytes);
        match attempt() {
            Ok(found) => assert_eq!(found, GivenBack::Busy, "we have it open"),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                std::fs::remove_file(path).unwrap();
                crate::skip("the temporary folder's file system has no leases");
                return;
            }
            Err(error) => panic!("{error}"),
        }
        drop(file);
        let reader = std::fs::File::open(&path).unwrap();
        assert_eq!(attempt().unwrap(), GivenBack::Busy, "somebody reads it");
        drop(reader);
        assert!(blocks() >= 1 << 20);
        assert_eq!(attempt().unwrap(), GivenBack::Done);
        assert!(blocks() <= 8192, "{}", blocks());
        assert!(std::fs::read(&path).unwrap() == vec![7; 5000]);
        std::fs::remove_file(&path).unwrap();
        match prove_gone(&folder, kind, bytes) {
            Ok(()) => assert_eq!(attempt().unwrap(), GivenBack::Gone),
            Err(_) => drop(attempt().unwrap_err()),
        }
    }

    #[test]
    fn blocks_of_a_file_that_is_not_proved_to_be_deleted_are_not_given_up() {
        let path = PathBuf::from(format!("/dev/shm/rushes-space-gone-{}", std::process::id()));
        let Ok(file) = std::fs::File::create(&path) else {
            crate::skip("there is no /dev/shm");
            return;
        };
        let handle = crate::watch::handle_of(&file).unwrap();
        let (kind, bytes) = handle.split_first_chunk::<4>().unwrap();
        std::fs::remove_file(&path).unwrap();
        drop(file);
        let root = std::fs::File::open("/dev/shm").unwrap();
        let found = rustix::fs::fstatfs(&root).unwrap().f_type as u64;
        if [XFS_MAGIC, EXT4_MAGIC].contains(&found) {
            crate::skip("/dev/shm is no tmpfs");
            return;
        }
        let told = give_back(&root, i32::from_ne_bytes(*kind), bytes).unwrap_err();
        assert!(told.to_string().contains("does not tell"), "{told}");
    }

    #[test]
    fn who_opens_a_file_under_a_lease_waits_and_its_holder_lives() {
        let (path, file) = file("lease");
        let file = OwnedFd::from(file);
        if let Err(error) = lease::take(&file) {
            std::fs::remove_file(path).unwrap();
            crate::skip(&format!(
                "the temporary folder's file system has no leases: {error}"
            ));
            return;
        }
        let opened = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| {
                let file = std::fs::File::open(&path).unwrap();
                opened.store(true, std::sync::atomic::Ordering::SeqCst);
                drop(file);
            });
            let nonblocking = open(&path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
            assert_eq!(nonblocking.err(), Some(rustix::io::Errno::AGAIN));
            assert!(!opened.load(std::sync::atomic::Ordering::SeqCst));
            drop(file);
            opener.join().unwrap();
        });
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn another_account_is_left_again() {
        let before = capabilities(None).unwrap();
        let who = as_user(1234, 5678, || {
            // SAFETY: as in `as_user`: -1 changes nothing and returns the present value.
            let ids = unsafe { (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX)) };
            let now = capabilities(None).unwrap();
            (ids, now.effective.contains(CapabilitySet::SYS_RESOURCE))
        });
        let Ok((ids, keeps)) = who else {
            crate::skip("this process may not change its file system user");
            return;
        };
        assert_eq!(ids, (1234, 5678));
        assert!(!keeps);
        assert_eq!(capabilities(None).unwrap(), before);
        // SAFETY: as above.
        let now = unsafe { libc::setfsuid(u32::MAX) };
        assert_eq!(now, rustix::process::geteuid().as_raw() as i32);
    }

    #[test]
    fn nothing_is_done_as_root_for_a_user_that_cannot_be_taken_on() {
        for lacked in [CapabilitySet::SETUID, CapabilitySet::SETGID] {
            // Capabilities belong to a thread.
            let attempt = move || {
                let mut sets = capabilities(None).unwrap();
                sets.effective -= lacked;
                set_capabilities(None, sets).unwrap();
                let result = as_user(1234, 5678, || panic!("it runs on another account"));
                assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
                assert_eq!(capabilities(None).unwrap(), sets);
                // SAFETY: as in `as_user`.
                let ids = unsafe { (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX)) };
                let own = (
                    rustix::process::getegid().as_raw() as i32,
                    rustix::process::geteuid().as_raw() as i32,
                );
                assert_eq!(ids, own);
            };
            std::thread::spawn(attempt).join().unwrap();
        }
    }

    #[test]
    fn what_a_file_system_reserves_is_found_out_without_a_trace() {
        let path = PathBuf::from(format!(
            "/dev/shm/rushes-space-trial-{}",
            std::process::id()
        ));
        std::fs::create_dir(&path).unwrap();
        let folder = std::fs::File::open(&path).unwrap();
        // tmpfs has fallocate, but no FIEMAP; older ones have no direct I/O either.
        assert!(matches!(Reserves::of(&folder), Reserves::Never(_)));
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        std::fs::remove_dir(&path).unwrap();
        let nowhere = std::fs::File::open("/proc/self").unwrap();
        assert!(matches!(Reserves::of(&nowhere), Reserves::Untried(_)));
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        assert!(matches!(Reserves::untried(&full), Reserves::Full(_)));
    }

    #[test]
    fn files_with_set_id_bits_are_left_to_their_clients() {
        let (path, file) = file("set-id");
        let key = status(&file).unwrap().key;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o6755)).unwrap();
        assert_eq!(
            open_writing(&file, key).unwrap().err(),
            Some(NotOurs::SetId)
        );
        std::fs::remove_file(path).unwrap();
    }
}
