// SPDX-License-Identifier: Apache-2.0
//! The protocol: requests of the kernel in, the door's answers out. All code that knows the crate
//! `fuser` is here.
//!
//! Its API breaks between releases. This file avoids two of its faults (0.18.0): it never asks for
//! SETXATTR_EXT, and [`Mounting`] does the mount itself. It undoes a third: the form of times
//! before 1970.

use crate::bytes::descriptors::Opener;
use crate::bytes::passthrough::{Opened, Way};
use crate::door::{Door, raise_read_ahead};
use crate::kernel::answer::Answer;
use crate::kernel::crew::Crew;
use crate::kernel::keeper::is_unmounted;
use crate::kernel::kept::{self, Latch};
use crate::kernel::mounting::Mounting;
use crate::kernel::table::{Table, Unique};
use crate::lock::locked;
use crate::tree::attributes::{Attributes, Changes};
use crate::tree::listing::Listing;
use crate::tree::names::{Entry, Maker};
use crate::tree::nodes::{S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use crate::upkeep::control;
use fuser::{
    AccessFlags, BsdFileFlags, Config, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType,
    Filesystem, FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, SessionACL, TimeOrNow, WriteFlags,
};
use rushes_sys::descriptor::replace;
use rushes_sys::thread::Identity;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, major, makedev, minor};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest request that the kernel sends; the default of `fs.fuse.max_pages_limit`. Units: bytes.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Threads that take requests. None of them waits for a read through the daemon (reads.rs), and few
/// for a member's disk (lines.rs); a program that writes faster than its disk occupies one.
const THREAD_COUNT: usize = 128;

/// Background requests that the kernel may have under way: all its read-ahead. Beyond this number
/// it holds back requests of all readers, so that waiting readers, with eight requests each, would
/// keep others from their contracts.
const BACKGROUND_MAX: u16 = 4096;

/// How long the kernel may use names: only this mount changes the tree while it is mounted.
const NAMES_LIVE: Duration = Duration::from_secs(3600);

/// How long it may use attributes. A program's stores through a mapping change them without its
/// knowledge.
const ATTRIBUTES_LIVE: Duration = Duration::from_secs(1);

/// An object's registration with the kernel, which reads it itself. Dropped when no open needs it
/// any more.
#[derive(Debug)]
pub(crate) struct Backing(fuser::BackingId);

/// Messages that the door sends to the kernel unasked.
pub(crate) struct Notices(fuser::Notifier);

impl Notices {
    /// Makes the kernel forget the inode's attributes.
    pub(crate) fn forget_attributes(&self, number: u64) {
        // An error: it has none.
        let _ = self.0.inval_inode(INodeNo(number), -1, 0);
    }
}

/// The node of requests that do not come from the kernel: see [`take_over`].
const NOBODY: u64 = u64::MAX;

/// A mounted pool; dropping it unmounts.
pub struct Mounted {
    session: fuser::BackgroundSession,
    /// None: the mount outlives this process.
    mounting: Option<Mounting>,
    door: Arc<Door>,
    /// Threads that work in the background until the door closes.
    helpers: Vec<JoinHandle<()>>,
}

impl Mounted {
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// Waits until it is unmounted.
    pub fn wait(self) -> io::Result<()> {
        let ended = match self.session.join() {
            // A thread had just taken a request when the connection ended.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::CONNABORTED.raw_os_error()) =>
            {
                Ok(())
            }
            ended => ended,
        };
        drop(self.mounting);
        self.door.closing.store(true, Ordering::Release);
        for helper in &self.helpers {
            helper.thread().unpark();
        }
        self.door.follow_all_at_last();
        // Before waiting for threads that a disk may block; and once more afterwards, with the
        // files that they settled.
        self.door.log_names_at_last();
        for helper in self.helpers {
            let _ = helper.join();
        }
        self.door.log_names_at_last();
        ended
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(THREAD_COUNT);
    config
}

/// Mounts it on `folder`; threads of its own answer requests.
pub(crate) fn mount(door: Arc<Door>, folder: &Path) -> io::Result<Mounted> {
    let mut config = config();
    config.clone_fd = true;
    let (mounting, connection) = mounting(&door, folder)?;
    let filesystem = KernelSession::new(&door);
    let crew = Arc::clone(&filesystem.crew);
    let session = fuser::Session::from_fd(filesystem, connection, config.acl, config)?;
    let device = session.as_fd().try_clone_to_owned()?;
    let session = session.spawn()?;
    raise_read_ahead_on(folder);
    served(door, session, (crew, device), Some(mounting))
}

fn mounting(door: &Door, folder: &Path) -> io::Result<(Mounting, OwnedFd)> {
    // The source by which `rushes pool where` finds the pool of a mount.
    let source = door.pool.catalogue().path().canonicalize()?;
    Mounting::new(&source, folder, REQUEST_BYTES_MAX)
}

fn raise_read_ahead_on(folder: &Path) {
    if let Err(error) = raise_read_ahead(folder) {
        tracing::warn!("cannot raise the kernel's read-ahead: {error}");
    }
}

/// Like [`mount`], in a process that the keeper replaces by another one when it dies.
///
/// Returns  the mount, and whether the kernel can send again the requests that a dying process has
/// not answered (Linux 6.9)
pub(crate) fn mount_kept(door: Arc<Door>, folder: &Path) -> io::Result<(Mounted, OwnedFd, bool)> {
    let (mounting, device) = mounting(&door, folder)?;
    let (mounted, asks_again) = begin(door, &device, folder)?;
    // From now on it outlives this process.
    mounting.leave();
    Ok((mounted, device, asks_again))
}

fn begin(door: Arc<Door>, device: &OwnedFd, folder: &Path) -> io::Result<(Mounted, bool)> {
    let init = kept::read_init(device)?;
    let (session, answer) = handshake(&door, &init)?;
    let crew = Arc::clone(&session.crew);
    // In this order: each later process knows the agreement with the kernel.
    table(&door)?.agree(&init, &answer)?;
    let (session, asks_again) = take_over(session, device, || {
        rustix::io::write(device, &answer)?;
        kept::ask_again(device)
    })?;
    raise_read_ahead_on(folder);
    let mounted = served(door, session, (crew, device.try_clone()?), None)?;
    Ok((mounted, asks_again))
}

/// Goes on where a process died.
///
/// Does not look at the place of the mount: by now that may be another folder, or the look would be
/// a request that this process would have to answer.
/// Errors   InvalidData if the kernel has agreed to other terms than this version needs
pub(crate) fn go_on(door: Arc<Door>, device: &OwnedFd) -> io::Result<Mounted> {
    let Some((init, agreed)) = table(&door)?.agreed()? else {
        return Err(io::Error::other(
            "the former process died before it had mounted the pool; expected a mount to continue: \
             mount the pool again",
        ));
    };
    let (session, answer) = handshake(&door, &init)?;
    if answer != agreed {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "this version needs other kernel features than the version that mounted the pool; \
             expected the same. Unmount the pool and mount it again",
        ));
    }
    let crew = Arc::clone(&session.crew);
    let (session, _) = take_over(session, device, || kept::ask_again(device))?;
    served(door, session, (crew, device.try_clone()?), None)
}

fn table(door: &Door) -> io::Result<&Table> {
    let table = door.table.as_deref();
    table.ok_or_else(|| io::Error::other("a mount that is kept has a table"))
}

/// A session that has answered this INIT, over a socket instead of the device: fuser begins each
/// session with one, the kernel each mount.
fn handshake(door: &Arc<Door>, init: &[u8]) -> io::Result<(Handshaken, Vec<u8>)> {
    let (ours, its) = kept::socket_pair(REQUEST_BYTES_MAX as usize + HEAD_BYTES)?;
    rustix::io::write(&ours, init)?;
    let session = KernelSession::new(door);
    let (latch, crew) = (Arc::clone(&session.latch), Arc::clone(&session.crew));
    let session = fuser::Session::from_fd(session, its, SessionACL::All, config())?;
    let mut answer = vec![0; 512];
    let length = rustix::io::read(&ours, &mut answer)?;
    answer.truncate(length);
    Ok((
        Handshaken {
            session,
            latch,
            crew,
            ours,
        },
        answer,
    ))
}

struct Handshaken {
    session: fuser::Session<KernelSession>,
    latch: Arc<Latch>,
    crew: Arc<Crew>,
    ours: OwnedFd,
}

/// Longer than the head before the bytes of any request. Units: bytes.
const HEAD_BYTES: usize = 8192;

/// The session's threads go on with the device in place of the socket. First each of them gets one
/// message as long as the longest request, so that its buffer is in memory: if a process is killed
/// while the kernel copies a request to a page that is not there yet, that request ends with EIO.
///
/// `ready`: called while no thread takes requests yet
fn take_over<T>(
    handshaken: Handshaken,
    device: &OwnedFd,
    ready: impl FnOnce() -> io::Result<T>,
) -> io::Result<(fuser::BackgroundSession, T)> {
    let Handshaken {
        session,
        latch,
        ours,
        ..
    } = handshaken;
    let (number, socket) = {
        let its = session.as_fd();
        (its.as_raw_fd(), its.try_clone_to_owned()?)
    };
    let session = session.spawn()?;
    let length = REQUEST_BYTES_MAX as usize + HEAD_BYTES;
    kept::send_nothing(&ours, NOBODY, THREAD_COUNT, length)?;
    latch.wait_for(THREAD_COUNT)?;
    replace(number, &socket, device)?;
    let done = ready()?;
    latch.open();
    Ok((session, done))
}

/// Time between two looks whether the mount has ended. Units: ms.
const LOOK_MS: u64 = 50;

/// Tells threads at home that the mount has ended, which those that wait for a request learn from
/// the kernel.
fn close_at_end(crew: &Crew, device: &OwnedFd, closing: &AtomicBool) {
    let has_ended = || is_unmounted(device, Duration::ZERO).unwrap_or(false);
    while !closing.load(Ordering::Acquire) && !has_ended() {
        // Each request would wake a thread that waits for the end in poll(2).
        std::thread::park_timeout(Duration::from_millis(LOOK_MS));
    }
    crew.close();
}

/// With the background threads.
fn served(
    door: Arc<Door>,
    session: fuser::BackgroundSession,
    (crew, device): (Arc<Crew>, OwnedFd),
    mounting: Option<Mounting>,
) -> io::Result<Mounted> {
    let _ = door.notices.set(Notices(session.notifier()));
    let helper = |name: &str, work: fn(&Door)| {
        let door = Arc::clone(&door);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&door))
    };
    let mut helpers = vec![
        helper("burier", Door::bury_now_and_then)?,
        helper("names", Door::log_names_now_and_then)?,
        helper("loads", Door::ask_loads_now_and_then)?,
        helper("tidier", Door::tidy_now_and_then)?,
        helper("settler", Door::settle_now_and_then)?,
        helper("failing", Door::look_after_failing)?,
    ];
    helpers.extend(control::start(&door));
    helpers.push({
        let door = Arc::clone(&door);
        std::thread::Builder::new()
            .name(String::from("crew"))
            .spawn(move || close_at_end(&crew, &device, &door.closing))?
    });
    Ok(Mounted {
        session,
        mounting,
        helpers,
        door,
    })
}

struct KernelSession {
    door: Arc<Door>,
    listings: Mutex<HashMap<u64, Arc<Listing>>>,
    /// Threads that may not take requests yet wait here.
    latch: Arc<Latch>,
    crew: Arc<Crew>,
}

impl KernelSession {
    fn new(door: &Arc<Door>) -> KernelSession {
        KernelSession {
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

fn unique(request: &Request) -> Unique {
    Unique::of(request.unique().0)
}

fn opener(request: &Request) -> Opener {
    Opener {
        user: request.uid(),
        process: request.pid(),
    }
}

fn number(error: rustix::io::Errno) -> Errno {
    match error {
        // It is not the caller that has too many open.
        rustix::io::Errno::MFILE => Errno::ENFILE,
        error => Errno::from_i32(error.raw_os_error()),
    }
}

fn file_type(mode: u32) -> FileType {
    match mode & S_IFMT {
        S_IFDIR => FileType::Directory,
        S_IFREG => FileType::RegularFile,
        S_IFLNK => FileType::Symlink,
        0o020_000 => FileType::CharDevice,
        0o060_000 => FileType::BlockDevice,
        0o010_000 => FileType::NamedPipe,
        _ => FileType::Socket,
    }
}

/// Device numbers in the form of the protocol: the kernel's new_encode_dev().
fn encoded(device: u64) -> u32 {
    let (major, minor) = (major(device), minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

fn decoded(device: u32) -> u64 {
    makedev(
        (device >> 8) & 0xfff,
        (device & 0xff) | ((device >> 12) & 0xfff00),
    )
}

/// How long the kernel may use these attributes.
fn live(attributes: &Attributes) -> &'static Duration {
    match attributes.may_be_stored {
        true => &Duration::ZERO,
        false => &ATTRIBUTES_LIVE,
    }
}

fn translated(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: attributes.accessed,
        mtime: attributes.modified,
        ctime: attributes.changed,
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.mode),
        perm: (attributes.mode & 0o7777) as u16,
        nlink: attributes.link_count,
        uid: attributes.user,
        gid: attributes.group,
        rdev: encoded(attributes.device),
        blksize: attributes.block_bytes,
        flags: 0,
    }
}

fn timestamp(time: Option<TimeOrNow>) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(TimeOrNow::Now) => (0, UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => (after.as_secs() as i64, i64::from(after.subsec_nanos())),
            // fuser takes both seconds and nanoseconds off for a time before 1970, whereas the
            // kernel's nanoseconds always count up.
            Err(before) => {
                let before = before.duration();
                (-(before.as_secs() as i64), i64::from(before.subsec_nanos()))
            }
        },
    };
    Timespec { tv_sec, tv_nsec }
}

fn maker(request: &Request, umask: u32) -> Maker {
    Maker {
        identity: Identity {
            user: request.uid(),
            group: request.gid(),
        },
        umask,
    }
}

fn reply_entry(reply: ReplyEntry, entry: Answer<Entry>) {
    match entry {
        Ok(entry) => reply.entry_with_ttls(
            live(&entry.attributes),
            &NAMES_LIVE,
            &translated(&entry.attributes),
            Generation(u64::from(entry.node.generation)),
        ),
        Err(error) => reply.error(number(error)),
    }
}

fn reply_empty(reply: ReplyEmpty, done: Answer<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(number(error)),
    }
}

fn reply_attributes(reply: ReplyAttr, attributes: Answer<Attributes>) {
    match attributes {
        Ok(attributes) => reply.attr(live(&attributes), &translated(&attributes)),
        Err(error) => reply.error(number(error)),
    }
}

fn reply_data(reply: ReplyData, data: Answer<Vec<u8>>) {
    match data {
        Ok(data) => reply.data(&data),
        Err(error) => reply.error(number(error)),
    }
}

fn reply_written(reply: ReplyWrite, written: Answer<usize>) {
    match written {
        Ok(written) => reply.written(written as u32),
        Err(error) => reply.error(number(error)),
    }
}

/// Replies with the length of a value, or with the value within `room`.
fn reply_value(reply: ReplyXattr, room: u32, value: Answer<(usize, Vec<u8>)>) {
    match value {
        Ok((length, _)) if room == 0 => reply.size(length as u32),
        Ok((length, _)) if length > room as usize => reply.error(Errno::ERANGE),
        Ok((_, value)) => reply.data(&value),
        Err(error) => reply.error(number(error)),
    }
}

/// Data stays in the kernel's cache between opens, since it changes only through this mount. At a
/// close no data waits for a write, so close(2) need not send a request.
const CACHED: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE.union(FopenFlags::FOPEN_NOFLUSH);

/// While a file is open by passthrough, the kernel's cache has none of it, and must have none.
const PASSED: FopenFlags = FopenFlags::FOPEN_NOFLUSH;

fn flags(opened: &Opened) -> FopenFlags {
    match (opened.way, &opened.backing) {
        (Way::Direct, _) => CACHED | FopenFlags::FOPEN_DIRECT_IO,
        (_, None) => CACHED,
        (_, Some((_, true))) => PASSED,
        (_, Some((_, false))) => PASSED | FopenFlags::FOPEN_DIRECT_IO,
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

impl Filesystem for KernelSession {
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
            let to_tell = door.is_opened_to_be_read(ino.0, open_flags.0);
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

/// `.` and `..`: the kernel takes the number and counts no lookup.
fn add_plain(reply: &mut ReplyDirectoryPlus, number: u64, next: u64, name: &OsStr) -> bool {
    let attributes = FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    };
    reply.add(
        INodeNo(number),
        next,
        name,
        &Duration::ZERO,
        &attributes,
        Generation(0),
    )
}
