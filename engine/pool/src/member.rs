// SPDX-License-Identifier: Apache-2.0
//! A member: a folder of objects on one native file system.
//!
//! It keeps no descriptor: each use enters by its path and checks that the format file there is the
//! one that was found right before. So a member can be unmounted while it is not in use, and one
//! that comes back is simply there.

use crate::catalogue_room::reserve_of;
use crate::create::OBJECTS;
use crate::data::has_data;
use crate::error::{ObjectFault, PoolError};
use crate::failing::{Failing, is_of_device, is_of_process};
use crate::format::{
    self, CatalogueFormat, CatalogueIdentity, CatalogueOrder, Duty, FORMAT_FILE, Format,
    FormatFault, MemberEntry, MemberFormat, MemberId,
};
use crate::refusal::{CatalogueRefusal, OtherCatalogue, refused};
use crate::xattr::{self, OBJECT_ATTRIBUTE};
use rushes_core::pool::check::{FoundObject, Mark};
use rushes_core::pool::{
    BackPointer, Class, FileIdentity, MemberNumber, Object, ObjectId, Part, PoolId,
};
use rushes_core::units::ByteCount;
use rushes_sys::SysError;
use rushes_sys::lease::open_waiting;
use rustix::fs::{
    Advice, AtFlags, Dir, FileType, Mode, OFlags, StatVfsMountFlags, StatxFlags, Timespec,
    Timestamps, UTIME_NOW, fadvise, fstat, fstatfs, fstatvfs, fsync, futimens, makedev, mkdirat,
    open, openat, statx, syncfs, unlinkat,
};
use rustix::io::{Errno, pread, pwrite};
use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Below a member: logs of names.
pub(crate) const NAMES: &str = "names";
/// Ids drawn before giving up: two alike among 2^64 are no accident, so something else is wrong.
const DRAWS_MAX: usize = 8;
/// Of linux/stat.h.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// The purpose for which an object is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

/// Whether a member can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It can.
    Present,
    /// For reading.
    ReadOnly,
    /// Not at all; a clause says what was found at its path.
    Missing(String),
}

/// A member as it is now.
#[derive(Clone, Debug)]
pub struct MemberStatus {
    /// Can it be used?
    pub state: MemberState,
    /// Equal for members on one device. None: it is missing.
    pub device: Option<u64>,
    /// Of its file system.
    pub bytes_total: ByteCount,
    /// Its free room for users other than root.
    pub bytes_free: ByteCount,
    /// The same with the reserve for root, to whom a pool's objects belong.
    pub bytes_unused: ByteCount,
    /// Free and in neither of these: it stays free for the catalogue, which is on the same file
    /// system. 0: it is on another one.
    pub bytes_kept: ByteCount,
}

/// Where an object lies below its member: `objects/3f/3f0c…`.
#[derive(Clone, Debug)]
pub struct ObjectName(String);

impl ObjectName {
    /// Of this object.
    pub fn of(id: ObjectId) -> ObjectName {
        ObjectName(format!("objects/{:02x}/{:016x}", id.0 >> 56, id.0))
    }

    /// The path below the member's folder.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The folder it lies in.
    fn folder(&self) -> &str {
        &self.0[.."objects/00".len()]
    }
}

/// An entry of a member's folders of objects.
pub(crate) enum Listed {
    /// An object.
    Object {
        found: FoundObject,
        /// Units: bytes.
        size: u64,
    },
    /// Something that Rushes did not put there.
    Stranger(PathBuf),
    /// An object by its name, and the disk does not return it.
    Unreadable(PathBuf, Errno),
}

/// A disk that does not return one file may return the next one: bad blocks, or damage that the
/// file system has found, EBADMSG and EUCLEAN, "structure needs cleaning".
fn is_of_file(error: Errno) -> bool {
    matches!(error, Errno::IO | Errno::BADMSG | Errno::UCLEAN)
}

/// The format file that was last found to be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    file: FormatFile,
    shared_device: u64,
}

/// The marks by which a format file differs from any other that may come to its place. Device and
/// inode are not enough: the next mounted file system may get the number of the device that went,
/// and the format files of all members that were made alike have the same inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FormatFile {
    device: u64,
    inode: u64,
    changed: (i64, u32),
    /// 0: the kernel, before Linux 5.8, does not say. Unique since Linux 6.8.
    mount: u64,
}

impl FormatFile {
    fn at(root: &OwnedFd) -> Result<FormatFile, Errno> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
        let wanted = wanted | StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
        let found = statx(root, FORMAT_FILE, AtFlags::SYMLINK_NOFOLLOW, wanted)?;
        Ok(FormatFile {
            device: makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            changed: (found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec),
            mount: found.stx_mnt_id,
        })
    }
}

/// Why a catalogue has nothing to do with a member any more.
pub(crate) const OF_A_LATER_CATALOGUE: &str =
    "belongs to a later catalogue of this pool, which `rushes pool rescue` has made";
/// Why a catalogue has nothing to do with a member of the same pool.
pub(crate) const OF_ANOTHER_CATALOGUE: &str =
    "belongs to another catalogue of this pool, which another `rushes pool rescue` has made";

/// One member of an open pool.
#[derive(Debug)]
pub struct Member {
    number: MemberNumber,
    id: MemberId,
    pool: PoolId,
    /// The one that knows it.
    catalogue: CatalogueIdentity,
    /// The catalogue's own. None: not known.
    catalogue_device: Option<u64>,
    path: PathBuf,
    duty: Duty,
    class: Option<Class>,
    seen: Mutex<Option<Seen>>,
    failing: Failing,
}

impl Member {
    /// As this catalogue knows it.
    pub(crate) fn new(
        entry: &MemberEntry,
        catalogue: &CatalogueFormat,
        catalogue_device: Option<u64>,
    ) -> Member {
        Member {
            number: entry.number,
            id: entry.id,
            pool: catalogue.pool,
            catalogue: catalogue.catalogue,
            catalogue_device,
            path: entry.path.clone(),
            duty: entry.duty,
            class: entry.class.clone(),
            seen: Mutex::new(None),
            failing: Failing::default(),
        }
    }

    /// It is this one, with nothing changed.
    pub(crate) fn is(&self, entry: &MemberEntry) -> bool {
        (self.number, self.id, self.duty) == (entry.number, entry.id, entry.duty)
            && self.path == entry.path
            && self.class == entry.class
    }

    /// The member's duty.
    pub fn duty(&self) -> Duty {
        self.duty
    }

    /// Its kind, as the operator calls it.
    pub fn class(&self) -> Option<&Class> {
        self.class.as_ref()
    }

    /// New bytes may go there.
    pub(crate) fn takes_bytes(&self) -> bool {
        self.duty == Duty::Full
    }

    /// Its number in layouts.
    pub fn number(&self) -> MemberNumber {
        self.number
    }

    /// Where it is expected.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuse a member that is missing.
    pub(crate) fn check_there(&self) -> Result<(), PoolError> {
        match self.status().state {
            MemberState::Missing(why) => Err(self.missing(why)),
            _ => Ok(()),
        }
    }

    /// Its folder is not there, or is another member's. One whose disk returns an error is there.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self.enter(), Err(PoolError::Missing { .. }))
    }

    fn missing(&self, why: impl Into<String>) -> PoolError {
        let (member, path, why) = (self.number, self.path.clone(), why.into());
        PoolError::Missing { member, path, why }
    }

    pub(crate) fn failed(&self, operation: &'static str, below: &str, error: Errno) -> PoolError {
        self.fault(operation, below, error, false)
    }

    /// The error of an operation on one object that is there, alone.
    fn failed_with_one(
        &self,
        operation: &'static str,
        name: &ObjectName,
        error: Errno,
    ) -> PoolError {
        self.fault(operation, name.as_str(), error, true)
    }

    fn fault(
        &self,
        operation: &'static str,
        below: &str,
        error: Errno,
        is_of_one: bool,
    ) -> PoolError {
        match error {
            Errno::ROFS => PoolError::ReadOnly {
                member: self.number,
                path: self.path.clone(),
            },
            _ => {
                let about = self.path.join(below).display().to_string();
                let source = SysError::new(operation, about, error);
                if !is_of_device(error) {
                    return PoolError::System(source);
                }
                self.failing
                    .note(Instant::now(), is_of_one, || source.to_string());
                PoolError::Failing {
                    member: self.number,
                    source,
                }
            }
        }
    }

    /// Note the error of a door's operation on one of its objects.
    ///
    /// Returns  whether that is a fault of the device; then the member remembers it
    pub fn note_failure(&self, operation: &'static str, error: Errno) -> bool {
        let failed = self.failed(operation, "objects", error);
        matches!(failed, PoolError::Failing { .. })
    }

    /// Why the pool asks it last for new bytes: the error of its device. None: it works, as far as
    /// is known.
    pub fn failing(&self) -> Option<String> {
        self.failing.sentence()
    }

    /// Its device has not failed, or works again.
    pub(crate) fn is_well(&self) -> bool {
        self.failing.is_well()
    }

    /// If it failed, and not for some seconds, try whether it works again. May wait for its disk.
    pub fn try_again(&self) {
        if self.failing.may_be_tried(Instant::now()) && self.try_out().is_ok() {
            self.failing.clear();
        }
    }

    /// Write a block to the disk and read it back, in a file without a name: an interruption leaves
    /// nothing.
    fn try_out(&self) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mut block = [0x5a; 4096];
        let tried = openat(&root, "objects", flags, Mode::RUSR | Mode::WUSR).and_then(|fd| {
            pwrite(&fd, &block, 0)?;
            fsync(&fd)?;
            fadvise(&fd, 0, None, Advice::DontNeed)?;
            pread(&fd, &mut block, 0).map(drop)
        });
        match tried {
            // A full disk is no fault.
            Ok(()) | Err(Errno::NOSPC | Errno::DQUOT | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(self.failed("try the disk", "objects", error)),
        }
    }

    /// Its folder, after a look that it is this member's.
    fn enter(&self) -> Result<(OwnedFd, Seen), PoolError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A file system that is mounted there and fails is not away: the kernel may have bytes for
        // it in memory, for which a program waits.
        let root = open(&self.path, flags, Mode::empty()).map_err(|error| match error {
            error if is_of_device(error) || is_of_process(error) => self.failed("enter", "", error),
            error => self.missing(format!("cannot be entered ({error})")),
        })?;
        let found = FormatFile::at(&root).map_err(|error| match error {
            Errno::NOENT => self.missing("is not a member of a pool; is its file system mounted?"),
            error if is_of_device(error) || is_of_process(error) => {
                self.failed("look at", FORMAT_FILE, error)
            }
            error => self.missing(format!("cannot be looked at ({error})")),
        })?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = *seen
            && before.file == found
        {
            return Ok((root, before));
        }
        match format::read(root.as_fd(), FORMAT_FILE) {
            Ok(Some(Format::Member(format)))
                if (format.pool, format.id, format.number) == (self.pool, self.id, self.number) =>
            {
                match self.catalogue.order_of(format.catalogue) {
                    CatalogueOrder::Same | CatalogueOrder::Earlier => {}
                    CatalogueOrder::Later => return Err(self.missing(OF_A_LATER_CATALOGUE)),
                    CatalogueOrder::Beside => return Err(self.missing(OF_ANOTHER_CATALOGUE)),
                }
            }
            Ok(Some(Format::Member(format))) if format.pool == self.pool => {
                return Err(self.missing(format!("has member {} of this pool", format.number.0)));
            }
            Ok(_) => return Err(self.missing("belongs to another pool")),
            Err(FormatFault::Failed(error))
                if Errno::from_io_error(&error)
                    .is_some_and(|error| is_of_device(error) || is_of_process(error)) =>
            {
                let error = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return Err(self.failed("read", FORMAT_FILE, error));
            }
            Err(fault) => {
                return Err(self.missing(format!("has a {FORMAT_FILE} that {fault}")));
            }
        }
        let now = Seen {
            file: found,
            shared_device: shared_device(root.as_fd(), found.device),
        };
        *seen = Some(now);
        Ok((root, now))
    }

    /// Refuse a member of another catalogue, which a rescue has made. It may be away.
    ///
    /// Errors   [`PoolError::Refused`]: it belongs to a later one, and this catalogue is no pool's
    ///          any more; or to one beside it, and neither may have the other's members
    pub(crate) fn belongs(&self, catalogue: &Path) -> Result<(), PoolError> {
        let Some((_, format)) = self.own_format() else {
            return Ok(());
        };
        let (number, path) = (self.number, self.path.clone());
        let catalogue = catalogue.to_path_buf();
        match self.catalogue.order_of(format.catalogue) {
            CatalogueOrder::Same | CatalogueOrder::Earlier => Ok(()),
            CatalogueOrder::Later => refused(CatalogueRefusal::Superseded {
                number,
                path,
                catalogue,
            }),
            CatalogueOrder::Beside => refused(CatalogueRefusal::Beside(OtherCatalogue {
                number,
                path,
                its: format.catalogue,
                catalogue,
                own: self.catalogue,
            })),
        }
    }

    /// Make it belong to this catalogue, if it belonged to an earlier one: it was away during the
    /// rescue, or the rescue is just done.
    ///
    /// Assumes  the catalogue is whole, and this process's alone
    /// Errors   its format file cannot be written
    pub(crate) fn take_over(&self) -> Result<(), PoolError> {
        match self.own_format() {
            Some((root, mut format))
                if self.catalogue.order_of(format.catalogue) == CatalogueOrder::Earlier =>
            {
                format.catalogue = self.catalogue;
                let format = Format::Member(format);
                format::write(root.as_fd(), &self.path, FORMAT_FILE, &format)
            }
            _ => Ok(()),
        }
    }

    /// The member that its folder names. None: it is away, or another one is there.
    fn own_format(&self) -> Option<(OwnedFd, MemberFormat)> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&self.path, flags, Mode::empty()).ok()?;
        let format = format::read(root.as_fd(), FORMAT_FILE).ok()?;
        match format {
            Some(Format::Member(of))
                if (of.pool, of.id, of.number) == (self.pool, self.id, self.number) =>
            {
                Some((root, of))
            }
            _ => None,
        }
    }

    /// Its folder, when that is this member's.
    pub(crate) fn root(&self) -> Result<OwnedFd, PoolError> {
        self.enter().map(|(root, _)| root)
    }

    /// How it is now. Asks its file system.
    pub fn status(&self) -> MemberStatus {
        let absent = |why| MemberStatus {
            state: MemberState::Missing(why),
            device: None,
            bytes_total: ByteCount(0),
            bytes_free: ByteCount(0),
            bytes_unused: ByteCount(0),
            bytes_kept: ByteCount(0),
        };
        match self.look() {
            Ok(status) => status,
            Err(PoolError::Missing { why, .. }) => absent(why),
            Err(error) => absent(error.to_string()),
        }
    }

    /// The same, or the error that prevents it.
    pub(crate) fn look(&self) -> Result<MemberStatus, PoolError> {
        let (root, seen) = self.enter()?;
        let space = fstatvfs(&root)
            .map_err(|error| self.missing(format!("does not say how full it is ({error})")))?;
        let state = if space.f_flag.contains(StatVfsMountFlags::RDONLY) {
            MemberState::ReadOnly
        } else {
            MemberState::Present
        };
        let bytes_total = ByteCount(space.f_blocks.saturating_mul(space.f_frsize));
        let kept = match self.catalogue_device == Some(seen.shared_device) {
            true => reserve_of(bytes_total),
            false => ByteCount(0),
        };
        let without = |blocks: u64| {
            let bytes = blocks.saturating_mul(space.f_frsize);
            ByteCount(bytes.saturating_sub(kept.0))
        };
        Ok(MemberStatus {
            state,
            device: Some(seen.shared_device),
            bytes_total,
            bytes_free: without(space.f_bavail),
            bytes_unused: without(space.f_bfree),
            bytes_kept: kept,
        })
    }

    /// Its free room where a part of that is kept for the catalogue. None: the catalogue is on
    /// another file system, or the member cannot be asked.
    pub(crate) fn room_beside_catalogue(&self) -> Option<ByteCount> {
        let its = self.catalogue_device?;
        // Runs at each write behind the end of a file: most members need no look.
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_some_and(|seen| seen.shared_device != its) {
            return None;
        }
        let status = self.look().ok()?;
        (status.bytes_kept.0 > 0).then_some(status.bytes_free)
    }

    /// The error where the rest of its room is the catalogue's.
    pub(crate) fn room_is_kept(&self) -> PoolError {
        PoolError::KeptForCatalogue {
            member: self.number,
            path: self.path.clone(),
        }
    }

    /// Make an object of this file with its mark, durably if the caller asks for that.
    pub(crate) fn create_object(
        &self,
        file: FileIdentity,
        part: Part,
        durably: bool,
    ) -> Result<(Object, OwnedFd), PoolError> {
        let (root, _) = self.enter()?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        for _ in 0..DRAWS_MAX {
            let id = ObjectId(random()?);
            let name = ObjectName::of(id);
            let fd = match openat(&root, name.as_str(), flags, Mode::RUSR | Mode::WUSR) {
                Ok(fd) => fd,
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(self.failed("make an object", name.as_str(), error)),
            };
            let mark = BackPointer {
                pool: self.pool,
                file,
                part,
            };
            let object = Object {
                member: self.number,
                id,
            };
            let durable =
                xattr::set(fd.as_fd(), OBJECT_ATTRIBUTE, &mark.encode()).and_then(
                    |()| match durably {
                        true => fsync(&fd).and_then(|()| sync_folder(&root, &name)),
                        false => Ok(()),
                    },
                );
            if let Err(error) = durable {
                // No layout names it yet; if it stays, none ever will.
                let _ = unlinkat(&root, name.as_str(), AtFlags::empty());
                return Err(self.failed("make an object", name.as_str(), error));
            }
            return Ok((object, fd));
        }
        Err(self.failed("find a free name for an object", "objects", Errno::EXIST))
    }

    /// Make the name of an object durable.
    pub(crate) fn sync_name(&self, id: ObjectId) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        let name = ObjectName::of(id);
        sync_folder(&root, &name).map_err(|error| self.failed("make durable", name.as_str(), error))
    }

    /// Make everything that was written to its file system durable.
    pub fn sync(&self) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        syncfs(&root).map_err(|error| self.failed("make durable", "objects", error))
    }

    /// Open an object and check that it is this file's.
    pub(crate) fn open_object(
        &self,
        file: FileIdentity,
        id: ObjectId,
        access: Access,
    ) -> Result<OwnedFd, PoolError> {
        let (root, _) = self.enter()?;
        let name = ObjectName::of(id);
        let fault = |fault| PoolError::Object {
            object: Object {
                member: self.number,
                id,
            },
            path: self.path.clone(),
            fault,
        };
        let mode = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        let flags = mode | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = open_waiting(|more| openat(&root, name.as_str(), flags | more, Mode::empty()));
        let fd = opened.map_err(|error| match error {
            Errno::NOENT => fault(ObjectFault::Absent),
            Errno::LOOP => fault(ObjectFault::NotRegular),
            error => self.failed_with_one("open an object", &name, error),
        })?;
        let failed = |error| self.failed_with_one("look at an object", &name, error);
        if FileType::from_raw_mode(fstat(&fd).map_err(failed)?.st_mode) != FileType::RegularFile {
            return Err(fault(ObjectFault::NotRegular));
        }
        let mark = xattr::get(fd.as_fd(), OBJECT_ATTRIBUTE)
            .map_err(failed)?
            .ok_or_else(|| fault(ObjectFault::NoMark))?;
        let mark = BackPointer::decode(&mark).map_err(|found| fault(ObjectFault::Mark(found)))?;
        if mark.pool != self.pool {
            return Err(fault(ObjectFault::OtherPool));
        }
        if mark.file != file {
            return Err(fault(ObjectFault::OtherFile(mark.file)));
        }
        Ok(fd)
    }

    /// Its folder for logs of names, if there is one.
    pub(crate) fn names_folder(&self) -> Result<OwnedFd, PoolError> {
        let (root, _) = self.enter()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(&root, NAMES, flags, Mode::empty())
            .map_err(|error| self.failed("enter", NAMES, error))
    }

    /// The same, for a caller that is about to write one.
    pub(crate) fn make_names_folder(&self) -> Result<OwnedFd, PoolError> {
        let (root, _) = self.enter()?;
        match mkdirat(&root, NAMES, Mode::RWXU) {
            Ok(()) => fsync(&root).map_err(|error| self.failed("make a folder", NAMES, error))?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(self.failed("make a folder", NAMES, error)),
        }
        self.names_folder()
    }

    /// Every object that is there, and every name among them that is no object's.
    pub(crate) fn list(
        &self,
        mut each: impl FnMut(Listed) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        self.names_among_objects(|folder, below, name| {
            let failed = |error| self.failed("look through", below, error);
            let id = name.to_str().ok().and_then(|text| {
                let id = ObjectId(u64::from_str_radix(text, 16).ok()?);
                let whole = ObjectName::of(id);
                (whole.folder() == below && whole.0.ends_with(&format!("/{text}"))).then_some(id)
            });
            let stranger = || {
                let name = OsStr::from_bytes(name.to_bytes());
                Listed::Stranger(self.path.join(below).join(name))
            };
            let Some(id) = id else {
                return each(stranger());
            };
            let unreadable = |error| {
                let path = self.path.join(ObjectName::of(id).as_str());
                Listed::Unreadable(path, error)
            };
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = match open_waiting(|more| openat(folder, name, flags | more, Mode::empty())) {
                Ok(fd) => fd,
                Err(Errno::NOENT) => return Ok(()),
                Err(Errno::LOOP | Errno::NXIO) => return each(stranger()),
                Err(error) if is_of_file(error) => return each(unreadable(error)),
                Err(error) => return Err(failed(error)),
            };
            let status = fstat(&fd).map_err(failed)?;
            if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
                return each(stranger());
            }
            let object = Object {
                member: self.number,
                id,
            };
            match mark_of(&fd).and_then(|mark| Ok((mark, has_data(&fd)?))) {
                Ok((mark, has_data)) => each(Listed::Object {
                    found: FoundObject {
                        object,
                        mark,
                        has_data,
                    },
                    size: status.st_size as u64,
                }),
                Err(error) if is_of_file(error) => each(unreadable(error)),
                Err(error) => Err(failed(error)),
            }
        })?;
        let strays = self.strays()?.into_iter();
        strays.map(Listed::Stranger).try_for_each(each)
    }

    /// Files and folders beside the folders of objects that are none of these.
    pub(crate) fn strays(&self) -> Result<Vec<PathBuf>, PoolError> {
        let (root, _) = self.enter()?;
        let failed = |error| self.failed("look through", OBJECTS, error);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match openat(&root, OBJECTS, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut found = Vec::new();
        for entry in Dir::read_from(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
            let is_ours = name == c"."
                || name == c".."
                || name.count_bytes() == 2 && name.to_bytes().iter().all(is_digit);
            if !is_ours {
                let name = OsStr::from_bytes(name.to_bytes());
                found.push(self.path.join(OBJECTS).join(name));
            }
        }
        found.sort();
        Ok(found)
    }

    /// How many names there are among its objects. Opens none of them.
    pub fn object_count(&self) -> Result<u64, PoolError> {
        let mut count = 0;
        self.names_among_objects(|_, _, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }

    /// Every name in the folders of objects: the folder, where that is below the member, and the
    /// name.
    fn names_among_objects(
        &self,
        mut each: impl FnMut(&OwnedFd, &str, &CStr) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        for first in 0..=u8::MAX {
            let below = format!("objects/{first:02x}");
            let failed = |error| self.failed("look through", &below, error);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let folder = match openat(&root, below.as_str(), flags, Mode::empty()) {
                Ok(folder) => folder,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed(error)),
            };
            for entry in Dir::read_from(&folder).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let name = entry.file_name();
                if name != c"." && name != c".." {
                    each(&folder, &below, name)?;
                }
            }
        }
        Ok(())
    }

    /// Whether its device has to move a head; None: it does not say.
    pub fn is_rotational(&self) -> Option<bool> {
        let facts = rushes_sys::device::facts(self.status().device?).ok()?;
        Some(facts.rotational)
    }

    /// Open an object, of any file or pool.
    pub(crate) fn open_any(&self, id: ObjectId, access: Access) -> Result<OwnedFd, PoolError> {
        let (root, _) = self.enter()?;
        let mode = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        let name = ObjectName::of(id);
        let flags = mode | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        open_waiting(|more| openat(&root, name.as_str(), flags | more, Mode::empty()))
            .map_err(|error| self.failed_with_one("open an object", &name, error))
    }

    /// Write an object's mark anew, durably.
    pub(crate) fn write_mark(
        &self,
        id: ObjectId,
        file: FileIdentity,
        part: Part,
    ) -> Result<(), PoolError> {
        let fd = self.open_any(id, Access::Write)?;
        let mark = BackPointer {
            pool: self.pool,
            file,
            part,
        };
        xattr::set(fd.as_fd(), OBJECT_ATTRIBUTE, &mark.encode())
            .and_then(|()| fsync(&fd))
            .map_err(|error| self.failed("mark an object", ObjectName::of(id).as_str(), error))
    }

    /// Remove an object, of any file or pool.
    pub(crate) fn unlink(&self, id: ObjectId) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        let name = ObjectName::of(id);
        match unlinkat(&root, name.as_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failed("remove an object", name.as_str(), error)),
        }
    }

    /// Make the removal of these objects durable.
    pub(crate) fn sync_removed(&self, objects: &BTreeSet<Object>) -> Result<(), PoolError> {
        let (root, _) = self.enter()?;
        let open = |folder: &str| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(&root, folder, flags, Mode::empty())
        };
        let durable = fstatfs(&root).and_then(|found| {
            if IN_ORDER.contains(&(found.f_type as u64)) {
                // One more change, behind those: an fsync of an unchanged folder would wait for
                // nothing.
                let folder = open("objects")?;
                return futimens(&folder, &NOW).and_then(|()| fsync(&folder));
            }
            let names: Vec<ObjectName> = objects.iter().map(|one| ObjectName::of(one.id)).collect();
            let folders: BTreeSet<&str> = names.iter().map(ObjectName::folder).collect();
            folders
                .into_iter()
                .try_for_each(|folder| fsync(open(folder)?))
        });
        durable.map_err(|error| self.failed("make a removal durable", "objects", error))
    }

    /// Remove an object of this file. One that is not there counts as removed.
    pub(crate) fn remove_object(&self, file: FileIdentity, id: ObjectId) -> Result<(), PoolError> {
        match self.open_object(file, id, Access::Read) {
            Ok(_) => {}
            Err(PoolError::Object {
                fault: ObjectFault::Absent,
                ..
            }) => return Ok(()),
            Err(error) => return Err(error),
        }
        self.unlink(id)
    }

    /// The same for one that this file's layout names: a power cut may have left it without its
    /// mark.
    pub(crate) fn remove_named(&self, file: FileIdentity, id: ObjectId) -> Result<(), PoolError> {
        match self.remove_object(file, id) {
            Err(PoolError::Object {
                fault: ObjectFault::NoMark,
                ..
            }) => self.unlink(id),
            done => done,
        }
    }
}

/// File systems whose journal keeps the order of changes, ext4 and XFS: a step that makes one of
/// them durable makes all before it durable.
const IN_ORDER: [u64; 2] = [0xef53, 0x5846_5342];

/// For both times of something.
const NOW: Timestamps = {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    Timestamps {
        last_access: now,
        last_modification: now,
    }
};

/// Make the names in an object's folder durable.
fn sync_folder(root: &OwnedFd, name: &ObjectName) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    fsync(openat(root, name.folder(), flags, Mode::empty())?)
}

/// The content of an object's mark.
pub(crate) fn mark_of(fd: &OwnedFd) -> Result<Mark, Errno> {
    Ok(match xattr::get(fd.as_fd(), OBJECT_ATTRIBUTE)? {
        None => Mark::Absent,
        Some(bytes) => match BackPointer::decode(&bytes) {
            Ok(mark) => Mark::Sound(mark),
            Err(fault) => Mark::Faulty(fault),
        },
    })
}

/// The number that tells devices apart: btrfs gives each subvolume a number of its own, so the
/// mount's device goes first.
pub(crate) fn shared_device(folder: std::os::fd::BorrowedFd<'_>, st_dev: u64) -> u64 {
    rushes_sys::file::FdInfo::of(folder)
        .and_then(|info| rushes_sys::device::st_dev_of_mount(info.mount))
        .ok()
        .flatten()
        .unwrap_or(st_dev)
}

/// 64 random bits, never 0.
pub(crate) fn random() -> Result<u64, PoolError> {
    let mut bytes = [0; 8];
    let count =
        rustix::rand::getrandom(bytes.as_mut_slice(), rustix::rand::GetRandomFlags::empty())
            .map_err(|error| PoolError::system("draw a random number", "", error))?;
    assert!(
        count == bytes.len(),
        "getrandom(2) gives up to 256 bytes whole"
    );
    Ok(u64::from_le_bytes(bytes).max(1))
}
