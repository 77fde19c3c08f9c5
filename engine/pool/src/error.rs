// SPDX-License-Identifier: Apache-2.0
//! The errors of a pool, in words on which the person at the rack can act.

use crate::member::ObjectName;
use crate::refusal::Refusal;
use rushes_core::pool::{Class, FileIdentity, LayoutFault, MemberNumber, Object};
use rushes_sys::SysError;
use std::fmt;
use std::path::PathBuf;

/// Why an object cannot be used although its member is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectFault {
    /// There is none of this name.
    Absent,
    /// It says that it belongs to another pool.
    OtherPool,
    /// It says that it belongs to another file.
    OtherFile(FileIdentity),
    /// Its mark, which says so, cannot be read.
    Mark(LayoutFault),
    /// It says nothing of itself.
    NoMark,
    /// It is no regular file.
    NotRegular,
}

/// An error: kind, subject and finding.
#[derive(Debug)]
pub enum PoolError {
    /// A member is not there.
    Missing {
        /// Which.
        member: MemberNumber,
        /// Where it should be.
        path: PathBuf,
        /// A clause that says what was found instead.
        why: String,
    },
    /// A member was given up with its bytes.
    Lost {
        /// Which.
        member: MemberNumber,
    },
    /// A member cannot be written to.
    ReadOnly {
        /// Which.
        member: MemberNumber,
        /// Where it is.
        path: PathBuf,
    },
    /// A member's device fails.
    Failing {
        /// Which.
        member: MemberNumber,
        /// The device's answer.
        source: SysError,
    },
    /// No member has room.
    NoRoom,
    /// The file is bound to a class of which no member has room.
    ClassFull {
        /// Which.
        class: Class,
    },
    /// Members have room, and a quota is used up.
    OverQuota,
    /// A layout that cannot be used.
    Layout(LayoutFault),
    /// A stub with a size and without a layout.
    NoLayout {
        /// Its size. Units: bytes.
        size: u64,
    },
    /// No other member has room, and the rest of this one's stays free for the catalogue.
    KeptForCatalogue {
        /// Which.
        member: MemberNumber,
        /// Where it is.
        path: PathBuf,
    },
    /// The catalogue's file system has no room for a name or a layout.
    CatalogueFull {
        /// The catalogue.
        path: PathBuf,
    },
    /// The catalogue's file system has no room for a layout of so many segments.
    LayoutTooLong {
        /// How many.
        segment_count: usize,
    },
    /// An object that cannot be used.
    Object {
        /// Which.
        object: Object,
        /// Its member's folder.
        path: PathBuf,
        /// Why.
        fault: ObjectFault,
    },
    /// The request is refused. In a box, since every result here carries room for an error.
    Refused(Box<Refusal>),
    /// A mount has the pool, or a command that changes it.
    Served {
        /// The catalogue.
        catalogue: PathBuf,
        /// The words of its lock file about the holder.
        holder: String,
    },
    /// The kernel's.
    System(SysError),
}

impl PoolError {
    /// As a number of errno(3), for doors. The only place where a pool's errors become numbers.
    pub fn errno(&self) -> rustix::io::Errno {
        use rustix::io::Errno;
        match self {
            PoolError::Missing { .. }
            | PoolError::Lost { .. }
            | PoolError::Layout(_)
            | PoolError::NoLayout { .. }
            | PoolError::Object { .. } => Errno::IO,
            PoolError::ReadOnly { .. } => Errno::ROFS,
            PoolError::NoRoom
            | PoolError::ClassFull { .. }
            | PoolError::KeptForCatalogue { .. }
            | PoolError::CatalogueFull { .. }
            | PoolError::LayoutTooLong { .. } => Errno::NOSPC,
            PoolError::OverQuota => Errno::DQUOT,
            PoolError::Refused(_) => Errno::INVAL,
            PoolError::Served { .. } => Errno::BUSY,
            PoolError::System(error) | PoolError::Failing { source: error, .. } => {
                Errno::from_io_error(&error.source).unwrap_or(Errno::IO)
            }
        }
    }

    /// The file system has no room, or a quota, to which btrfs holds root, too: another member may
    /// have some.
    pub(crate) fn is_full(&self) -> bool {
        is_full(self.errno())
    }

    /// The kernel's answer to `operation` on `about`.
    pub(crate) fn system(
        operation: &'static str,
        about: impl Into<String>,
        source: impl Into<std::io::Error>,
    ) -> PoolError {
        PoolError::System(SysError::new(operation, about, source))
    }
}

/// As [`PoolError::is_full`].
pub(crate) fn is_full(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::NOSPC | Errno::DQUOT)
}

impl fmt::Display for ObjectFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObjectFault::Absent => write!(f, "there is none"),
            ObjectFault::OtherPool => write!(f, "it belongs to another pool"),
            ObjectFault::OtherFile(file) => write!(
                f,
                "it belongs to another file, number {} generation {}",
                file.number, file.generation
            ),
            ObjectFault::Mark(fault) => {
                write!(f, "the mark that says whose it is cannot be used: {fault}")
            }
            ObjectFault::NoMark => write!(f, "it has no mark that says whose it is"),
            ObjectFault::NotRegular => write!(f, "it is not a regular file"),
        }
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::Missing { member, path, why } => write!(
                f,
                "member {} is missing: {} {why}; mount it there, nothing else is needed",
                member.0,
                path.display()
            ),
            PoolError::Lost { member } => write!(
                f,
                "member {} was given up with what it had of this file; put the file back from your backup",
                member.0
            ),
            PoolError::ReadOnly { member, path } => write!(
                f,
                "member {} ({}) is mounted read-only; remount it for writing",
                member.0,
                path.display()
            ),
            PoolError::Failing { member, source } => {
                write!(f, "member {} fails: {source}", member.0)
            }
            PoolError::NoRoom => write!(
                f,
                "no member that is there and takes new bytes has room left"
            ),
            PoolError::ClassFull { class } => write!(
                f,
                "no member of the class {0} that is there has room left, and the file is bound to that class, whatever room others have; give another member that class (`rushes pool policy CATALOGUE --class NUMBER={0}`), add one (`rushes pool add CATALOGUE FOLDER --class {0}`), or change what the file wants (`rushes pool policy FILE --set WORDS`)",
                class.name()
            ),
            PoolError::OverQuota => write!(
                f,
                "members have room left, and a quota of their file systems is used up"
            ),
            PoolError::Layout(fault) => write!(
                f,
                "the layout record cannot be used: {fault}; the file is not touched"
            ),
            PoolError::NoLayout { size } => write!(
                f,
                "the layout record is not there although the file has {size} bytes; the file is not touched"
            ),
            PoolError::KeptForCatalogue { member, path } => write!(
                f,
                "no other member that may take the bytes has room left, and the rest of member {} ({}) stays free for the catalogue, which is on the same file system; delete files, or add a member (`rushes pool add CATALOGUE FOLDER`)",
                member.0,
                path.display()
            ),
            PoolError::CatalogueFull { path } => write!(
                f,
                "the file system of the catalogue {0} is full, whatever room members have: it has no room or no inodes left, or a quota is used up (`df -h {0}; df -i {0}`); delete there what is not the pool's, or make that file system larger",
                path.display()
            ),
            PoolError::LayoutTooLong { segment_count } => write!(
                f,
                "the file would have {segment_count} segments, and the catalogue has no room for a record of so many; remove large extended attributes of it (`getfattr -d -m - FILE`), if it has some, or copy it"
            ),
            PoolError::Object {
                object,
                path,
                fault,
            } => write!(
                f,
                "the object {} of member {} cannot be used: {fault}",
                path.join(ObjectName::of(object.id).as_str()).display(),
                object.member.0
            ),
            PoolError::Refused(refusal) => refusal.fmt(f),
            PoolError::Served { catalogue, holder } => write!(
                f,
                "the pool {} is served already ({holder}); unmount it, or wait until that command has ended: one pool has one mount, or one command that changes it, at a time",
                catalogue.display()
            ),
            PoolError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            PoolError::System(error) | PoolError::Failing { source: error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<SysError> for PoolError {
    fn from(error: SysError) -> PoolError {
        PoolError::System(error)
    }
}
