// SPDX-License-Identifier: Apache-2.0
//! The requests of the kernel, one function each.

use super::replies::{
    ATTRIBUTES_LIVE, add_plain, decoded, file_type, flags, live, maker, number, opener,
    reply_attributes, reply_data, reply_empty, reply_entry, reply_value, reply_written, timestamp,
    translated, unique,
};
use super::{BACKGROUND_MAX, Backing, NOBODY, REQUEST_BYTES_MAX, THREAD_COUNT};
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::kernel::crew::Crew;
use crate::kernel::kept::Latch;
use crate::lock::locked;
use crate::tree::attributes::Changes;
use crate::tree::listing::Listing;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::Timestamps;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// Answers the requests of the kernel.
pub(super) struct Requests {
    door: Arc<Door>,
    listings: Mutex<HashMap<u64, Arc<Listing>>>,
    /// Threads that may not take requests yet wait here.
    pub(super) latch: Arc<Latch>,
    pub(super) crew: Arc<Crew>,
}

impl Requests {
    pub(super) fn new(door: &Arc<Door>) -> Requests {
        Requests {
            door: Arc::clone(door),
            listings: Mutex::default(),
            latch: Arc::default(),
            crew: Crew::new(THREAD_COUNT),
        }
    }

    fn listing(&self, handle: FileHandle, number: INodeNo) -> Answer<Arc<Listing>> {
        if let Some(listing) = locked(&self.listings).get(&handle.0) {
            return Ok(Arc::clone(listing));
        }
        if self.door.table.is_none() {
            return Err(rustix::io::Errno::BADF);
        }
        // Open since an earlier process. Each request brings its position.
        let share = self.door.descriptors.take();
        let listing = Arc::new(self.door.open_listing(number.0, share)?);
        let mut listings = locked(&self.listings);
        Ok(Arc::clone(listings.entry(handle.0).or_insert(listing)))
    }
}

/// The flags that this door asks of the kernel beside the crate's own.
const WANTED: [InitFlags; 8] = [
    InitFlags::FUSE_DONT_MASK,
    InitFlags::FUSE_POSIX_ACL,
    InitFlags::FUSE_EXPORT_SUPPORT,
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_CACHE_SYMLINKS,
];

impl Filesystem for Requests {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in WANTED {
            config.add_capabilities(flag).map_err(|_| {
                io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("the kernel's FUSE lacks {flag:?}; Linux 5.12 or later has it"),
                )
            })?;
        }
        // Never FUSE_ASYNC_DIO: after a write past its cache for which a program does not wait
        // (AIO, io_uring) the kernel does not drop data that others have read into the cache
        // meanwhile, and would show it for ever (docs/decisions/0039).
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        // Linux 6.9 or later. Such a kernel also updates its cache when a program writes past it.
        // Not if the mount outlives this process: the next process would not know the objects that
        // the kernel reads itself.
        let can_pass = self.door.table.is_none()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        self.door.can_pass.store(can_pass, Ordering::Release);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _work = self.crew.at_work();
        reply_entry(reply, self.door.lookup(parent.0, name));
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        if ino.0 == NOBODY {
            return self.latch.pass();
        }
        let _work = self.crew.at_one_of_many();
        self.door.forget(ino.0, nlookup);
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let _work = self.crew.at_work();
        reply_attributes(reply, self.door.attributes(ino.0));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let times = (atime.is_some() || mtime.is_some()).then(|| Timestamps {
            last_access: timestamp(atime),
            last_modification: timestamp(mtime),
        });
        let changes = Changes {
            mode,
            user: uid,
            group: gid,
            size,
            times,
            by_user: request.uid() != 0,
        };
        reply_attributes(reply, self.door.change(ino.0, &changes));
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let _work = self.crew.at_work();
        reply_data(reply, self.door.read_link(ino.0));
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _work = self.crew.at_work();
        let made = self.door.make_node(
            parent.0,
            name,
            mode,
            decoded(rdev),
            (maker(request, umask), unique(request)),
        );
        reply_entry(reply, made);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let _work = self.crew.at_work();
        reply_entry(
            reply,
            self.door.make_directory(
                parent.0,
                name,
                mode,
                (maker(request, umask), unique(request)),
            ),
        );
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _work = self.crew.at_work();
        reply_empty(reply, self.door.unlink(parent.0, name, unique(request)));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _work = self.crew.at_work();
        let done = self.door.remove_directory(parent.0, name, unique(request));
        reply_empty(reply, done);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let _work = self.crew.at_work();
        reply_entry(
            reply,
            self.door.make_symlink(
                parent.0,
                link_name,
                target,
                (maker(request, 0), unique(request)),
            ),
        );
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        let (from, to) = ((parent.0, name), (newparent.0, newname));
        let done = self.door.rename(from, to, flags.bits(), unique(request));
        reply_empty(reply, done);
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let _work = self.crew.at_work();
        let linked = self.door.link(ino.0, newparent.0, newname, unique(request));
        reply_entry(reply, linked);
    }

    fn open(&self, request: &Request, ino: INodeNo, open_flags: OpenFlags, reply: ReplyOpen) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let door = Arc::clone(&self.door);
        let asked = (unique(request), opener(request));
        self.door.at_home(ino.0, move || {
            let register = |fd: &OwnedFd| reply.open_backing(fd).map(Backing);
            let opened = door.open(ino.0, open_flags.0, asked, register);
            let (handle, opened) = match opened {
                Ok((handle, opened)) => (FileHandle(handle), opened),
                Err(error) => return reply.error(number(error)),
            };
            let to_tell = door.opened_to_read(ino.0, open_flags.0);
            match &opened.backing {
                Some((backing, _)) => reply.opened_passthrough(handle, flags(&opened), &backing.0),
                None => reply.opened(handle, flags(&opened)),
            }
            if let Some(to_tell) = to_tell {
                door.tell_of_open(to_tell);
            }
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        open_flags: i32,
        reply: ReplyCreate,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let register = |fd: &OwnedFd| reply.open_backing(fd).map(Backing);
        let maker = (maker(request, umask), unique(request), opener(request));
        let created = self
            .door
            .create(parent.0, name, mode, open_flags, maker, register);
        let (entry, handle, opened) = match created {
            Ok((entry, handle, opened)) => (entry, FileHandle(handle), opened),
            Err(error) => return reply.error(number(error)),
        };
        let attributes = translated(&entry.attributes);
        let generation = Generation(u64::from(entry.node.generation));
        let flags = flags(&opened);
        match &opened.backing {
            Some((backing, _)) => reply.created_passthrough(
                &ATTRIBUTES_LIVE,
                &attributes,
                generation,
                handle,
                flags,
                &backing.0,
            ),
            None => reply.created(&ATTRIBUTES_LIVE, &attributes, generation, handle, flags),
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let length = size.min(REQUEST_BYTES_MAX) as usize;
        let reply = Box::new(|bytes| reply_data(reply, bytes));
        self.door.read(ino.0, offset, length, reply);
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let drop_set_id = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let written = self.door.write(ino.0, offset, data, drop_set_id);
        let done = written.and_then(|count| {
            self.door.sync_if_asked(ino.0, fh.0, flags.0)?;
            Ok(count)
        });
        reply_written(reply, done);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        reply_empty(reply, self.door.release(ino.0, fh.0));
    }

    fn fsync(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        datasync: bool,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        reply_empty(reply, self.door.sync(ino.0, fh.0, datasync));
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _work = self.crew.at_work();
        let share = self.door.descriptors.take_for(opener(request));
        match share.and_then(|share| self.door.open_listing(ino.0, share)) {
            Ok(listing) => {
                let handle = self.door.new_handle();
                locked(&self.listings).insert(handle, Arc::new(listing));
                reply.opened(FileHandle(handle), FopenFlags::empty());
            }
            Err(error) => reply.error(number(error)),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let _work = self.crew.at_work();
        let listing = match self.listing(fh, ino) {
            Ok(listing) => listing,
            Err(error) => return reply.error(number(error)),
        };
        let done = self.door.list(&listing, offset, |listed| {
            Ok(!reply.add(
                INodeNo(listed.number),
                listed.next,
                file_type(listed.mode),
                listed.text(),
            ))
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => return reply.error(number(error)),
        }
        self.door.read_ahead(&listing);
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _work = self.crew.at_work();
        let listing = match self.listing(fh, ino) {
            Ok(listing) => listing,
            Err(error) => return reply.error(number(error)),
        };
        let mut left = self.door.worth_looking_at(&listing, offset);
        let done = self.door.list(&listing, offset, |listed| {
            if left == 0 {
                return Ok(false);
            }
            left -= 1;
            if listed.is_dots() {
                return Ok(!add_plain(
                    &mut reply,
                    listed.number,
                    listed.next,
                    listed.text(),
                ));
            }
            let Some((node, attributes)) = self.door.look_at_listed(&listed) else {
                return Ok(true);
            };
            let full = reply.add(
                INodeNo(node.number),
                listed.next,
                listed.text(),
                live(&attributes),
                &translated(&attributes),
                Generation(u64::from(node.generation)),
            );
            if full {
                // The kernel did not get this entry.
                self.door.forget(node.number, 1);
            }
            Ok(!full)
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => return reply.error(number(error)),
        }
        self.door.read_ahead(&listing);
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let closed = locked(&self.listings).remove(&fh.0);
        drop(closed);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        let done = self
            .listing(fh, ino)
            .and_then(|listing| self.door.sync_listing(&listing));
        reply_empty(reply, done);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let _work = self.crew.at_work();
        match self.door.statistics() {
            Ok(room) => reply.statfs(
                room.blocks,
                room.blocks_free,
                room.blocks_available,
                room.files,
                room.files_free,
                room.block_bytes,
                room.name_bytes_max,
                room.block_bytes,
            ),
            Err(error) => reply.error(number(error)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        reply_empty(
            reply,
            self.door
                .set_attribute(ino.0, name, value, flags as u32, unique(request)),
        );
    }

    fn getxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let _work = self.crew.at_work();
        reply_value(reply, size, self.door.attribute(ino.0, name, size as usize));
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _work = self.crew.at_work();
        let names = self.door.attribute_names(ino.0);
        reply_value(reply, size, names.map(|names| (names.len(), names)));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _work = self.crew.at_work();
        let done = self.door.remove_attribute(ino.0, name, unique(request));
        reply_empty(reply, done);
    }

    /// Never called under `default_permissions`, and never a way around them.
    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    /// The door knows no ioctl and passes none on: a shutdown ioctl would end a member.
    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let by_user = request.uid() != 0;
        reply_empty(
            reply,
            self.door
                .allocate(ino.0, offset, length, mode as u32, by_user),
        );
    }

    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let _work = self.crew.at_work();
        match self.door.seek(ino.0, offset, whence) {
            Ok(at) => reply.offset(at),
            Err(error) => reply.error(number(error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _work = self.crew.at_work();
        self.door.tidying.asked();
        let by_user = request.uid() != 0;
        let copied = self
            .door
            .copy((ino_in.0, offset_in), (ino_out.0, offset_out), len, by_user);
        reply_written(reply, copied);
    }
}
