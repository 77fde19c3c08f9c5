// SPDX-License-Identifier: Apache-2.0
//! The log of names on members: written behind a door's back, read by rescue.
//!
//! A door reports changes; once a second a thread of it appends them to the newest log on each of
//! two members, on two devices where there are two. A new log follows one that has grown long, or
//! whose member went away: a checkpoint of the whole tree, under a name that is not a log's until
//! it is whole. core/pool/names has the meaning of these facts, and the reason why they may be read
//! while names change.
//!
//! It keeps no descriptor of a member, so that it can be unmounted.

use crate::error::PoolError;
use crate::member::{Member, MemberState, NAMES};
use crate::pool::Pool;
use crate::refusal::{WorkRefusal, refused};
use crate::walk::walk;
use crate::xattr::{HIDDEN_PREFIX, LAYOUT_ATTRIBUTE};
pub use rushes_core::pool::names::Inode;
use rushes_core::pool::names::{Fact, Head, PREFIX_BYTES, ROOT, fact_bytes, fact_of};
use rushes_core::pool::{Layout, MemberNumber};
use rushes_core::units::ByteCount;
use rushes_sys::handle::Handle;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, fdatasync, fstat, fstatvfs, fsync, ftruncate, getxattr,
    listxattr, openat, readlinkat, renameat, unlinkat,
};
use rustix::io::Errno;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Up-to-date logs of one pool.
const COPY_COUNT: usize = 2;
/// How often appended facts become durable: after a power cut and a lost catalogue at once the log
/// may be so much behind.
const DURABLE_EVERY: Duration = Duration::from_secs(30);
/// Facts behind the checkpoint before another one is made; at least, and as a multiple of the
/// checkpoint. Units: bytes.
const GROWTH_BYTES: u64 = 64 << 20;
/// Written at a time of a checkpoint. Units: bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// How often the log gets changes while a checkpoint is made.
const LAG: Duration = Duration::from_secs(1);
/// Between two tries of a checkpoint: after the first that failed, after one that a rename spoilt,
/// and at most.
const RETRY: Duration = Duration::from_secs(10);
const RETRY_MOVED: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(600);
/// Tries of a checkpoint that a caller wants at once, each spoilt by a rename.
const TRIES_MAX: usize = 20;
/// A member with less comes after others, however short the log is. Units: bytes.
const ROOM_LEAST: ByteCount = ByteCount::from_mib(16);
/// Facts that wait to be written while a member's disk does not answer: beyond this the pool drops
/// them, and a checkpoint is due. Units: bytes.
const PENDING_BYTES_MAX: usize = 16 << 20;
/// Longest name or value of an attribute. Units: bytes.
const VALUE_BYTES_MAX: usize = 65_536;

/// Unsettled files kept for [`NameLog::take_unsettled`]; those beyond come with a later checkpoint.
const UNSETTLED_MAX: usize = 65_536;

/// An unsettled file that a checkpoint has found, see [`Layout::is_unsettled`].
#[derive(Clone, Debug)]
pub struct FoundUnsettled {
    /// Inode number of its stub.
    pub inode: u64,
    /// The handle that leads to that.
    pub handle: Handle,
    /// Its layout then.
    pub layout: Layout,
}

/// The facts that wait to be written, and where they go.
#[derive(Debug, Default)]
pub struct NameLog {
    /// The files that the checkpoints have found.
    unsettled: Mutex<Vec<FoundUnsettled>>,
    pending: Mutex<Vec<u8>>,
    /// Counts moves of folders, and dropped facts: while it changes, the facts for a checkpoint may
    /// be incomplete.
    moves: AtomicU64,
    /// Facts were dropped.
    has_gap: AtomicBool,
    writer: Mutex<Writer>,
}

#[derive(Debug, Default)]
struct Writer {
    /// Of the newest log; 0: there is none yet.
    serial: u64,
    /// The members that have it.
    members: Vec<MemberNumber>,
    /// Length of its checkpoint and of the facts behind it. Units: bytes.
    checkpoint_bytes: u64,
    tail_bytes: u64,
    durable: Durable,
    /// A checkpoint is due: the log is on too few members, or may lack facts.
    is_due: bool,
    /// When a checkpoint was last tried in vain, and how long to wait before the next try.
    tried: Option<Instant>,
    wait: Duration,
    /// [`NameLog::moves`] when the last checkpoint was whole, until the next look.
    moves_then: Option<u64>,
}

/// When appended facts become durable.
#[derive(Debug, Default)]
struct Durable {
    /// When it last was; None: never.
    at: Option<Instant>,
    /// Something was appended since.
    is_behind: bool,
}

impl Durable {
    fn at(now: Instant) -> Durable {
        Durable {
            at: Some(now),
            is_behind: false,
        }
    }

    /// Whether it is time.
    ///
    /// `has_more`  something is about to be appended
    /// `is_last`   nothing follows
    fn is_due(&self, has_more: bool, is_last: bool, now: Instant) -> bool {
        let is_time = |at| now.saturating_duration_since(at) >= DURABLE_EVERY;
        (has_more || self.is_behind) && (is_last || self.at.is_none_or(is_time))
    }
}

/// Why there is no new checkpoint.
enum Without {
    /// A folder was renamed meanwhile.
    Moved,
    Failed(PoolError),
}

impl From<PoolError> for Without {
    fn from(error: PoolError) -> Without {
        Without::Failed(error)
    }
}

fn log_name(serial: u64) -> String {
    format!("{serial:016x}.log")
}

/// A log that is there.
pub(crate) struct Found {
    pub(crate) serial: u64,
    pub(crate) member: MemberNumber,
}

/// All logs on members that are there, by their names.
pub(crate) fn logs(pool: &Pool) -> Vec<Found> {
    named(pool, ".log")
}

fn named(pool: &Pool, end: &str) -> Vec<Found> {
    let mut found = Vec::new();
    for member in pool.members().iter() {
        let Ok(folder) = member.names_folder() else {
            continue;
        };
        let Ok(entries) = Dir::read_from(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            let serial = entry
                .file_name()
                .to_str()
                .ok()
                .and_then(|name| name.strip_suffix(end))
                .and_then(|digits| u64::from_str_radix(digits, 16).ok());
            found.extend(serial.map(|serial| Found {
                serial,
                member: member.number(),
            }));
        }
    }
    found
}

fn temporary_name(serial: u64) -> String {
    format!("{serial:016x}.new")
}

/// Serial of the newest log of names that a member has, and which members have it. None: there is
/// none.
pub fn newest_log(pool: &Pool) -> Option<(u64, Vec<MemberNumber>)> {
    let found = logs(pool);
    let serial = found.iter().map(|log| log.serial).max()?;
    let newest = found.iter().filter(|log| log.serial == serial);
    Some((serial, newest.map(|log| log.member).collect()))
}

fn failed_log(member: &Member, serial: u64, error: std::io::Error) -> PoolError {
    let about = member.path().join(NAMES).join(log_name(serial));
    PoolError::system("read", about.display().to_string(), error)
}

fn open_log(member: &Member, serial: u64) -> Result<File, PoolError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = log_name(serial);
    openat(member.names_folder()?, name.as_str(), flags, Mode::empty())
        .map(File::from)
        .map_err(|error| failed_log(member, serial, error.into()))
}

/// A log's bytes.
pub(crate) fn read(member: &Member, serial: u64) -> Result<Vec<u8>, PoolError> {
    let mut bytes = Vec::new();
    open_log(member, serial)?
        .read_to_end(&mut bytes)
        .map_err(|error| failed_log(member, serial, error))?;
    Ok(bytes)
}

/// A log's head, and how much of it is sound. Keeps one fact in memory at a time.
fn scan(member: &Member, serial: u64) -> Result<(Option<Head>, u64), PoolError> {
    let mut log = BufReader::with_capacity(CHUNK_BYTES, open_log(member, serial)?);
    let (mut head, mut sound_bytes) = (None, 0);
    let mut prefix = [0; PREFIX_BYTES];
    let mut payload = Vec::new();
    loop {
        let fact = log.read_exact(&mut prefix).and_then(|()| {
            let Some(length) = fact_bytes(&prefix) else {
                return Ok(None);
            };
            payload.resize(length, 0);
            log.read_exact(&mut payload)?;
            Ok(fact_of(&prefix, &payload))
        });
        match fact {
            Ok(Some(Fact::Head(found))) if head.is_none() => head = Some(found),
            Ok(Some(Fact::Name { .. } | Fact::Inode(_))) if head.is_some() => {}
            Ok(_) => return Ok((head, sound_bytes)),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Ok((head, sound_bytes));
            }
            Err(error) => return Err(failed_log(member, serial, error)),
        }
        sound_bytes += (PREFIX_BYTES + payload.len()) as u64;
    }
}

/// The root for which a log's inode numbers are good: file system, inode and generation of the
/// tree's root. Empty: the file system cannot say.
fn root_of(pool: &Pool) -> Vec<u8> {
    let tree = pool.catalogue().tree();
    let (Ok(space), Ok(status), Ok(handle)) = (fstatvfs(tree), fstat(tree), Handle::of(tree))
    else {
        return Vec::new();
    };
    let mut root = space.f_fsid.to_le_bytes().to_vec();
    root.extend(status.st_ino.to_le_bytes());
    root.extend(handle.generation().to_le_bytes());
    root
}

/// A checkpoint of a pool without a door, at once.
pub(crate) fn checkpoint_now(pool: &Pool) -> Result<(), PoolError> {
    NameLog::open(pool).checkpoint_now(pool, Vec::new)
}

impl NameLog {
    /// Go on with the newest log until there is a checkpoint, which is due: the door before may
    /// have left facts unwritten. A log of another catalogue, of which this one is a copy or a
    /// rescue, stays as it is until then: its inodes have other numbers.
    pub fn open(pool: &Pool) -> NameLog {
        let mut writer = Writer {
            is_due: true,
            ..Writer::default()
        };
        let (found, root) = (logs(pool), root_of(pool));
        writer.serial = found.iter().map(|log| log.serial).max().unwrap_or(0);
        // An earlier door was killed in the middle of a checkpoint.
        for half in named(pool, ".new") {
            remove(pool, half.member, &temporary_name(half.serial));
        }
        for log in found.iter().filter(|log| log.serial == writer.serial) {
            let Some(member) = pool.member(log.member) else {
                continue;
            };
            let Ok((Some(head), sound_bytes)) = scan(&member, log.serial) else {
                continue;
            };
            if head.pool != pool.id() || head.root.is_empty() || head.root != root {
                continue;
            }
            // Cut off a torn frame: a reader would never get to facts behind it.
            let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let cut = member.names_folder().is_ok_and(|folder| {
                openat(folder, log_name(log.serial).as_str(), flags, Mode::empty())
                    .is_ok_and(|fd| ftruncate(fd, sound_bytes).is_ok())
            });
            writer.checkpoint_bytes = writer.checkpoint_bytes.max(sound_bytes);
            if cut {
                writer.members.push(log.member);
            }
        }
        NameLog {
            unsettled: Mutex::default(),
            pending: Mutex::default(),
            moves: AtomicU64::new(0),
            has_gap: AtomicBool::new(false),
            writer: Mutex::new(writer),
        }
    }

    /// A name leads to this inode now; 0: it is gone. Costs a copy in memory.
    ///
    /// Assumes  for one name, called in the order of its changes
    pub fn name(&self, folder: u64, name: &[u8], inode: u64) {
        let name = name.to_vec();
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.len() > PENDING_BYTES_MAX {
            *pending = Vec::new();
            self.has_gap.store(true, Ordering::Release);
            self.moves.fetch_add(1, Ordering::AcqRel);
        }
        Fact::Name {
            folder,
            name,
            inode,
        }
        .encode(&mut pending);
    }

    /// A folder has another name or place now. Call it for each, or a checkpoint in the making may
    /// lack its contents.
    pub fn folder_moved(&self) {
        self.moves.fetch_add(1, Ordering::AcqRel);
    }

    /// The members are others now: a new checkpoint is due, which says so and may be on others.
    pub fn members_changed(&self) {
        self.has_gap.store(true, Ordering::Release);
    }

    /// A checkpoint at once, on members that take bytes as the pool is now; `changed` as for
    /// [`NameLog::write`].
    ///
    /// Errors   no member takes it; or folders are renamed all the time
    pub fn checkpoint_now(
        &self,
        pool: &Pool,
        mut changed: impl FnMut() -> Vec<Inode>,
    ) -> Result<(), PoolError> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..TRIES_MAX {
            match self.checkpoint(pool, &mut writer, &mut changed) {
                Ok(()) => return Ok(()),
                Err(Without::Failed(error)) => return Err(error),
                Err(Without::Moved) => {}
            }
        }
        refused(WorkRefusal::Renaming)
    }

    /// Write the reported changes, and the inodes of `changed`; a checkpoint if one is due. For a
    /// thread of its own, once a second.
    ///
    /// Returns  false: fewer members than there should be have all of it; the next call tries again
    pub fn write(&self, pool: &Pool, changed: impl FnMut() -> Vec<Inode>) -> bool {
        self.write_all(pool, changed, false)
    }

    /// The same for the last time: all of it is durable then.
    pub fn write_last(&self, pool: &Pool, changed: impl FnMut() -> Vec<Inode>) -> bool {
        self.write_all(pool, changed, true)
    }

    /// Unsettled files that checkpoints have found since the last call.
    pub fn take_unsettled(&self) -> Vec<FoundUnsettled> {
        std::mem::take(&mut *self.found_unsettled())
    }

    fn found_unsettled(&self) -> MutexGuard<'_, Vec<FoundUnsettled>> {
        self.unsettled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(
        &self,
        pool: &Pool,
        mut changed: impl FnMut() -> Vec<Inode>,
        is_last: bool,
    ) -> bool {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.take(&mut changed);
        writer.append(pool, &bytes, is_last);
        writer.is_due |= writer.tail_bytes > GROWTH_BYTES.max(2 * writer.checkpoint_bytes);
        // Look for a member that came back only when there is something to write: less must wake no
        // disk.
        writer.is_due |= writer.members.len() < COPY_COUNT
            && !bytes.is_empty()
            && choose(pool, writer.checkpoint_bytes).len() > writer.members.len();
        writer.is_due |= self.has_gap.swap(false, Ordering::AcqRel);
        // A folder may have been renamed during the walk, and reported only now.
        if let Some(then) = writer.moves_then.take() {
            writer.is_due |= self.moves.load(Ordering::Acquire) != then;
        }
        let may_try = writer
            .tried
            .is_none_or(|tried| tried.elapsed() >= writer.wait);
        if writer.is_due && may_try {
            let least = match self.checkpoint(pool, &mut writer, &mut changed) {
                Ok(()) if !writer.is_due => return true,
                Err(Without::Moved) => RETRY_MOVED,
                Ok(()) | Err(Without::Failed(_)) => RETRY,
            };
            writer.is_due = true;
            writer.wait = (2 * writer.wait).clamp(least, RETRY_MAX);
            writer.tried = Some(Instant::now());
        }
        !writer.is_due
    }

    fn take(&self, changed: &mut impl FnMut() -> Vec<Inode>) -> Vec<u8> {
        let mut bytes =
            std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        for inode in changed() {
            Fact::Inode(inode).encode(&mut bytes);
        }
        bytes
    }

    fn checkpoint(
        &self,
        pool: &Pool,
        writer: &mut Writer,
        changed: &mut impl FnMut() -> Vec<Inode>,
    ) -> Result<(), Without> {
        let serial = writer.serial + 1;
        let moves = self.moves.load(Ordering::Acquire);
        let mut log = Making {
            pool,
            temporary: temporary_name(serial),
            members: choose(pool, writer.checkpoint_bytes),
            failed: None,
            length: 0,
        };
        let followed = self.fill(pool, writer, changed, &mut log);
        let is_spoilt = self.moves.load(Ordering::Acquire) != moves;
        let tail_bytes = match followed {
            Ok(followed) if !is_spoilt => followed,
            // The former log has all facts.
            Ok(_) => {
                log.drop();
                return Err(Without::Moved);
            }
            Err(error) => {
                log.drop();
                return Err(error.into());
            }
        };
        let length = log.length;
        let members = log.finish(serial)?;
        let is_due = log.failed.is_some();
        *writer = Writer {
            serial,
            members,
            checkpoint_bytes: length - tail_bytes,
            tail_bytes,
            durable: Durable::at(Instant::now()),
            is_due,
            tried: None,
            wait: if is_due { writer.wait } else { Duration::ZERO },
            moves_then: Some(moves),
        };
        Ok(())
    }

    /// Write the tree as the walk finds it, and the changes meanwhile: each reported fact behind
    /// those that were read before its report, so that none replaces a newer one for good.
    ///
    /// Returns  the length of the reported changes. Units: bytes
    fn fill(
        &self,
        pool: &Pool,
        writer: &mut Writer,
        changed: &mut impl FnMut() -> Vec<Inode>,
        log: &mut Making<'_>,
    ) -> Result<u64, PoolError> {
        let head = Fact::Head(Head {
            serial: writer.serial + 1,
            pool: pool.id(),
            catalogue: pool.catalogue().path().as_os_str().as_bytes().to_vec(),
            format: pool.format_text()?.into_bytes(),
            root: root_of(pool),
        });
        let mut bytes = Vec::new();
        head.encode(&mut bytes);
        log.begin(&bytes)?;
        let mut followed = 0;
        let mut told_at: Option<Instant> = None;
        let tree = pool.catalogue().tree();
        bytes.clear();
        let root = inode(ROOT, tree).map_err(|error| failed_at("the tree", error))?;
        Fact::Inode(root).encode(&mut bytes);
        let root = fstat(tree).map_err(|error| failed_at("the tree", error))?;
        walk(pool.catalogue(), |named| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            // Take its own number: another inode may have the name by now.
            let found = openat(named.folder, named.name, flags, Mode::empty()).and_then(|fd| {
                let status = fstat(&fd)?;
                if status.st_dev != root.st_dev {
                    return Err(Errno::NOENT);
                }
                Ok((inode(status.st_ino, fd.as_fd())?, fd))
            });
            match found {
                Ok((inode, fd)) => {
                    self.look_for_unsettled(&inode, &fd);
                    let folder = match named.folder_inode {
                        inode if inode == root.st_ino => ROOT,
                        inode => inode,
                    };
                    Fact::Name {
                        folder,
                        name: named.name.as_bytes().to_vec(),
                        inode: inode.number,
                    }
                    .encode(&mut bytes);
                    Fact::Inode(inode).encode(&mut bytes);
                }
                Err(Errno::NOENT) => {}
                Err(error) => return Err(failed_at(named.path.display().to_string(), error)),
            }
            let is_time = told_at.is_none_or(|at| at.elapsed() > LAG);
            if is_time || bytes.len() > CHUNK_BYTES {
                log.append(&bytes)?;
                bytes.clear();
            }
            if is_time {
                let told = self.take(changed);
                writer.append(pool, &told, false);
                log.append(&told)?;
                followed += told.len() as u64;
                told_at = Some(Instant::now());
            }
            Ok(())
        })?;
        log.append(&bytes)?;
        let told = self.take(changed);
        writer.append(pool, &told, false);
        log.append(&told)?;
        Ok(followed + told.len() as u64)
    }

    fn look_for_unsettled(&self, inode: &Inode, fd: &OwnedFd) {
        let layout = Layout::decode(&inode.record).ok();
        let Some(layout) = layout.filter(Layout::is_unsettled) else {
            return;
        };
        let mut found = self.found_unsettled();
        if let Ok(handle) = Handle::of(fd)
            && found.len() < UNSETTLED_MAX
        {
            found.push(FoundUnsettled {
                inode: inode.number,
                handle,
                layout,
            });
        }
    }
}

fn failed_at(about: impl Into<String>, error: Errno) -> PoolError {
    PoolError::system("look at", about, error)
}

impl Writer {
    /// A member that does not take it has no part in this log any more. `is_last`: nothing follows,
    /// so all of it must be durable.
    fn append(&mut self, pool: &Pool, bytes: &[u8], is_last: bool) {
        // A flush makes the drive write all its cached bytes of other programs first: seconds,
        // beside recorders.
        let (now, has_more) = (Instant::now(), !bytes.is_empty());
        let durably = self.durable.is_due(has_more, is_last, now);
        if !has_more && !durably {
            return;
        }
        match durably {
            true => self.durable = Durable::at(now),
            false => self.durable.is_behind = true,
        }
        let name = log_name(self.serial);
        let before = self.members.len();
        self.members
            .retain(|&number| append(pool, number, &name, bytes, OFlags::empty(), durably).is_ok());
        self.is_due |= self.members.len() < before;
        self.tail_bytes += bytes.len() as u64;
    }
}

/// A checkpoint that is being written.
struct Making<'a> {
    pool: &'a Pool,
    temporary: String,
    members: Vec<MemberNumber>,
    failed: Option<PoolError>,
    length: u64,
}

impl Making<'_> {
    fn begin(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        self.write(bytes, OFlags::CREATE | OFlags::TRUNC)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.write(bytes, OFlags::empty())
    }

    /// Give it up.
    fn drop(self) {
        for &number in &self.members {
            remove(self.pool, number, &self.temporary);
        }
    }

    /// Errors   no member takes it any more
    fn write(&mut self, bytes: &[u8], flags: OFlags) -> Result<(), PoolError> {
        let (pool, name) = (self.pool, &self.temporary);
        self.members.retain(
            |&number| match append(pool, number, name, bytes, flags, true) {
                Ok(()) => true,
                Err(error) => {
                    remove(pool, number, name);
                    self.failed = Some(error);
                    false
                }
            },
        );
        self.length += bytes.len() as u64;
        match self.members.is_empty() {
            true => Err(self.failed.take().unwrap_or(PoolError::NoRoom)),
            false => Ok(()),
        }
    }

    /// Make it a log, and delete older ones beside it.
    fn finish(&mut self, serial: u64) -> Result<Vec<MemberNumber>, PoolError> {
        let named = |number: MemberNumber| -> Result<(), PoolError> {
            let member = self.pool.known(number)?;
            let folder = member.names_folder()?;
            let name = log_name(serial);
            renameat(&folder, self.temporary.as_str(), &folder, name.as_str())
                .and_then(|()| fsync(&folder))
                .map_err(|error| member.failed("name", NAMES, error))
        };
        let (mut members, mut failed) = (self.members.clone(), None);
        members.retain(|&number| match named(number) {
            Ok(()) => true,
            Err(error) => {
                remove(self.pool, number, &self.temporary);
                failed = Some(error);
                false
            }
        });
        self.failed = failed.or(self.failed.take());
        if members.is_empty() {
            return Err(self.failed.take().unwrap_or(PoolError::NoRoom));
        }
        for old in logs(self.pool) {
            // The last whole logs stay until there are as many new ones.
            let is_replaced = members.contains(&old.member) || members.len() >= COPY_COUNT;
            if old.serial < serial && is_replaced {
                remove(self.pool, old.member, &log_name(old.serial));
            }
        }
        Ok(members)
    }
}

fn append(
    pool: &Pool,
    number: MemberNumber,
    name: &str,
    bytes: &[u8],
    flags: OFlags,
    durably: bool,
) -> Result<(), PoolError> {
    let member = pool.known(number)?;
    let failed = |error: std::io::Error| PoolError::system("write the log of names", name, error);
    let flags = flags | OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match flags.contains(OFlags::CREATE) {
        true => member.make_names_folder()?,
        false => member.names_folder()?,
    };
    let fd = openat(folder, name, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|error| failed(error.into()))?;
    let mut file = File::from(fd);
    file.write_all(bytes).map_err(failed)?;
    match durably {
        true => fdatasync(&file).map_err(|error| failed(error.into())),
        false => Ok(()),
    }
}

/// Delete a log. If that fails, only room is not regained.
fn remove(pool: &Pool, number: MemberNumber, name: &str) {
    if let Ok(folder) = pool.known(number).and_then(|one| one.names_folder()) {
        let _ = unlinkat(folder, name, AtFlags::empty());
    }
}

/// The members that get the next log: those that can be written to, of different devices; first
/// those with room for two logs of this length, then those with most.
fn choose(pool: &Pool, log_bytes: u64) -> Vec<MemberNumber> {
    let wanted = ByteCount(log_bytes.saturating_mul(2)).max(ROOM_LEAST);
    let mut found: Vec<_> = pool
        .members()
        .iter()
        .filter(|member| member.takes_bytes())
        .map(|member| (member.number(), member.status()))
        .filter(|(_, status)| status.state == MemberState::Present)
        .collect();
    found.sort_by_key(|(number, status)| match status.bytes_free > wanted {
        true => (false, Reverse(ByteCount(0)), *number),
        false => (true, Reverse(status.bytes_free), *number),
    });
    let mut devices = BTreeSet::new();
    found.retain(|(_, status)| devices.insert(status.device));
    found.truncate(COPY_COUNT);
    found.into_iter().map(|(number, _)| number).collect()
}

/// The facts of an inode of the catalogue, with its attributes; `number` is the one that the log
/// has for it. `fd` may be opened with O_PATH.
pub fn inode(number: u64, fd: BorrowedFd<'_>) -> Result<Inode, Errno> {
    let status = fstat(fd)?;
    let kind = FileType::from_raw_mode(status.st_mode);
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = match kind {
        FileType::Symlink => readlinkat(fd, c"", Vec::new())?.into_bytes(),
        _ => Vec::new(),
    };
    let mut found = Inode {
        number,
        mode: status.st_mode,
        user: status.st_uid,
        group: status.st_gid,
        device: status.st_rdev,
        size: status.st_size as u64,
        modified: (status.st_mtime, status.st_mtime_nsec as u32),
        record: Vec::new(),
        target,
        attributes: Vec::new(),
    };
    let mut names = Vec::with_capacity(VALUE_BYTES_MAX);
    match listxattr(path.as_str(), rustix::buffer::spare_capacity(&mut names)) {
        Ok(_) => {}
        Err(Errno::OPNOTSUPP) => return Ok(found),
        // More names than the kernel lists at once, as XFS and btrfs take: the program that set
        // them keeps no inode out of the log, not even this one, only its attributes.
        Err(Errno::TOOBIG) => names.extend_from_slice(LAYOUT_ATTRIBUTE.as_bytes()),
        Err(error) => return Err(error),
    }
    let names = names
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty());
    for name in names {
        let is_record = name == LAYOUT_ATTRIBUTE.as_bytes();
        if name.starts_with(HIDDEN_PREFIX.as_bytes()) && !is_record {
            continue;
        }
        let mut value = Vec::with_capacity(VALUE_BYTES_MAX);
        match getxattr(
            path.as_str(),
            name,
            rustix::buffer::spare_capacity(&mut value),
        ) {
            Ok(_) if is_record => found.record = value,
            Ok(_) => found.attributes.push((name.to_vec(), value)),
            // The attribute went away meanwhile.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_appended_is_made_durable_in_time_also_when_nothing_follows() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut durable = Durable::default();
        assert!(durable.is_due(true, false, start), "nobody knows");
        durable = Durable::at(start);
        assert!(!durable.is_due(false, false, after(60)), "no disk is woken");
        assert!(!durable.is_due(false, true, after(1)), "nor at the end");
        assert!(!durable.is_due(true, false, after(1)));
        durable.is_behind = true;
        assert!(!durable.is_due(false, false, after(29)));
        assert!(durable.is_due(false, false, after(30)));
        assert!(durable.is_due(false, true, after(2)), "nothing follows");
    }
}
