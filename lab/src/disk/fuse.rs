// SPDX-License-Identifier: Apache-2.0
//! The interface to the kernel: a FUSE file system of one big file, its control file and its log
//! of stamps.
//!
//! Only this file uses the crate `fuser`, behind [`OneFile`], since its API breaks between
//! releases. It decides nothing: replies travel with the requests, and any thread may answer.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};

/// Longest request that the kernel sends; the default of `fs.fuse.max_pages_limit`. Units: bytes.
///
/// Larger ones would need that system-wide limit raised and save little: at 170 MB/s there are 170
/// requests a second, some 50 µs each.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Threads that take requests from the kernel. They store or copy the bytes of writes and queue
/// requests; they serve only requests that need not wait.
const THREAD_COUNT: usize = 2;

/// Requests that the kernel may have under way: more than the loop device's queue depth of 128, so
/// that we decide their order.
const UNDER_WAY_MAX: u16 = 512;

/// Names in the mounted folder.
pub(super) const DISK_NAME: &str = "disk";
pub(super) const CONTROL_NAME: &str = "control";
pub(super) const STAMPS_NAME: &str = "stamps";

const ROOT: u64 = 1;
const DISK: u64 = 2;
const CONTROL: u64 = 3;
const STAMPS: u64 = 4;
/// Attributes never change; the size of the two text files is always 0.
const FOR_EVER: Duration = Duration::from_secs(86_400);

/// The file behind the interface.
pub(super) trait OneFile: Send + Sync + 'static {
    /// Size of the file. Units: bytes.
    fn size(&self) -> u64;
    /// A read.
    fn read(&self, offset: u64, length: u32, reply: BytesReply);
    /// A write; `bytes` is valid only until this returns.
    fn write(&self, offset: u64, bytes: &[u8], reply: WrittenReply);
    /// These bytes read as zero from now on.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;
    /// A flush.
    fn sync(&self, reply: SyncedReply);
    /// The text of the control file.
    fn describe(&self) -> Vec<u8>;
    /// The text of the file of stamps.
    fn arrivals(&self) -> Vec<u8>;
    /// Lines written to the control file.
    fn command(&self, text: &str) -> Result<(), String>;
}

/// Answer to a read; may leave from any thread.
#[derive(Debug)]
pub(super) struct BytesReply(ReplyData);

impl BytesReply {
    pub(super) fn bytes(self, bytes: &[u8]) {
        self.0.data(bytes);
    }

    pub(super) fn error(self, error: &io::Error) {
        self.0.error(errno(error));
    }
}

/// Answer to a write; may leave from any thread.
#[derive(Debug)]
pub(super) struct WrittenReply(ReplyWrite);

impl WrittenReply {
    pub(super) fn written(self, length: u32) {
        self.0.written(length);
    }

    pub(super) fn error(self, error: &io::Error) {
        self.0.error(errno(error));
    }
}

/// Answer to a flush; may leave from any thread.
#[derive(Debug)]
pub(super) struct SyncedReply(ReplyEmpty);

impl SyncedReply {
    pub(super) fn synced(self) {
        self.0.ok();
    }

    pub(super) fn error(self, error: &io::Error) {
        self.0.error(errno(error));
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(5))
}

/// A mounted file system; dropping it unmounts.
pub(super) struct Mounted(fuser::BackgroundSession);

impl Mounted {
    /// Waits until it is unmounted.
    pub(super) fn wait(self) -> io::Result<()> {
        self.0.join()
    }
}

/// Mounts `file` in `folder`.
pub(super) fn mount(file: Arc<dyn OneFile>, folder: &Path) -> io::Result<Mounted> {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::CUSTOM(format!("max_read={REQUEST_BYTES_MAX}")),
        MountOption::NoExec,
        MountOption::NoSuid,
        MountOption::NoDev,
    ];
    config.n_threads = Some(THREAD_COUNT);
    let door = Door {
        file,
        snapshots: Mutex::default(),
    };
    let session = fuser::Session::new(door, folder, &config)?;
    session.spawn().map(Mounted)
}

struct Door {
    file: Arc<dyn OneFile>,
    /// The text of a text file at the time of its open, for each open handle.
    snapshots: Mutex<Snapshots>,
}

#[derive(Default)]
struct Snapshots {
    next: u64,
    texts: HashMap<u64, Vec<u8>>,
}

impl Door {
    fn attributes(&self, inode: u64) -> FileAttr {
        let (kind, size, perm) = match inode {
            DISK => (FileType::RegularFile, self.file.size(), 0o600),
            CONTROL => (FileType::RegularFile, 0, 0o600),
            STAMPS => (FileType::RegularFile, 0, 0o400),
            _ => (FileType::Directory, 0, 0o700),
        };
        FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Door {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without asynchronous direct I/O the loop device would send one request at a time, and
        // the layers above would decide the order.
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| {
                io::Error::other(
                    "this kernel's FUSE has no asynchronous direct I/O (Linux 3.10 has)",
                )
            })?;
        // Both setters fail only on values out of range, and these are constants within it.
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(UNDER_WAY_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str() {
            Some(DISK_NAME) if parent.0 == ROOT => DISK,
            Some(CONTROL_NAME) if parent.0 == ROOT => CONTROL,
            Some(STAMPS_NAME) if parent.0 == ROOT => STAMPS,
            _ => return reply.error(Errno::ENOENT),
        };
        reply.entry(&FOR_EVER, &self.attributes(inode), Generation(0));
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        reply.attr(&FOR_EVER, &self.attributes(inode.0));
    }

    /// Changes nothing, but succeeds: a shell truncates the control file before it writes.
    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&FOR_EVER, &self.attributes(inode.0));
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Direct for every program that opens it: the page cache must not hide the disk's timing.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        let text = match inode.0 {
            CONTROL => self.file.describe(),
            STAMPS => self.file.arrivals(),
            _ => return reply.opened(FileHandle(0), flags),
        };
        let mut snapshots = self.lock();
        snapshots.next += 1;
        let handle = snapshots.next;
        snapshots.texts.insert(handle, text);
        reply.opened(FileHandle(handle), flags);
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.lock().texts.remove(&handle.0);
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if inode.0 == DISK {
            return self.file.read(offset, length, BytesReply(reply));
        }
        let snapshots = self.lock();
        let text = snapshots.texts.get(&handle.0).map_or(&[][..], |t| t);
        let start = (offset as usize).min(text.len());
        let end = start.saturating_add(length as usize).min(text.len());
        reply.data(&text[start..end]);
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if inode.0 == DISK {
            return self.file.write(offset, bytes, WrittenReply(reply));
        }
        if inode.0 == STAMPS {
            return reply.error(Errno::EPERM);
        }
        match self.file.command(&String::from_utf8_lossy(bytes)) {
            Ok(()) => reply.written(bytes.len() as u32),
            Err(_) => reply.error(Errno::EINVAL),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        if inode.0 == DISK {
            return self.file.sync(SyncedReply(reply));
        }
        reply.ok();
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        use rustix::fs::FallocateFlags;
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let zeroing = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if inode.0 != DISK || !mode.intersects(zeroing) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.file.discard(offset, length) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (ROOT, FileType::Directory, "."),
            (ROOT, FileType::Directory, ".."),
            (DISK, FileType::RegularFile, DISK_NAME),
            (CONTROL, FileType::RegularFile, CONTROL_NAME),
            (STAMPS, FileType::RegularFile, STAMPS_NAME),
        ];
        for (index, (inode, kind, name)) in entries.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*inode), index as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

impl Door {
    fn lock(&self) -> std::sync::MutexGuard<'_, Snapshots> {
        self.snapshots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
