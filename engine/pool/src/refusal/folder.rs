// SPDX-License-Identifier: Apache-2.0
//! Why a folder cannot become a part of a pool, or a mount of one.

use super::spaced;
use crate::create::MEMBER_COUNT_MAX;
use crate::format::{FormatFault, hex};
use rushes_core::pool::{MemberNumber, Policy, PoolId};
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The part that a folder has in a pool, or is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The catalogue.
    Catalogue,
    /// The member of this number.
    Member(MemberNumber),
    /// A member that has no number yet.
    NewMember,
    /// A member whose number is not read yet.
    SomeMember,
}

/// A folder and its part in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolFolder {
    /// The folder.
    pub path: PathBuf,
    /// Its part.
    pub role: Role,
}

/// The part that a folder has in a pool that has nothing to do with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// The catalogue of this pool.
    Catalogue(PoolId),
    /// A member of this pool.
    Member(MemberNumber, PoolId),
    /// Its format file cannot be understood.
    Unknown,
}

/// How a mount point lies to a folder of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// It is that folder.
    Is,
    /// That folder is in it.
    Contains,
    /// It is in that folder.
    IsInside,
}

/// Why a folder cannot become a part of a pool, or a mount of one.
#[derive(Debug)]
pub enum FolderRefusal {
    /// A pool of so many members cannot be made.
    MemberCount {
        /// How many.
        count: usize,
    },
    /// A folder is given twice.
    Twice {
        /// It.
        path: PathBuf,
        /// Its two parts.
        roles: [Role; 2],
    },
    /// A folder is in another one of the same pool.
    Nested {
        /// It.
        inner: PoolFolder,
        /// The other one.
        outer: PoolFolder,
    },
    /// A create of other members or with another policy was interrupted.
    OtherCreate {
        /// The catalogue.
        catalogue: PathBuf,
        /// The folders of that create.
        members: Vec<PathBuf>,
        /// The policy of that create.
        policy: Policy,
    },
    /// It cannot be entered.
    NotEntered {
        /// It.
        folder: PoolFolder,
        /// The kernel's error.
        error: io::Error,
    },
    /// Its format file, or its plan, cannot be used.
    Format {
        /// That file.
        file: PathBuf,
        /// The part of its folder, where the sentence needs it.
        role: Option<Role>,
        /// The fault of the file.
        fault: FormatFault,
    },
    /// Another process makes it part of a pool.
    Locked {
        /// It.
        folder: PoolFolder,
    },
    /// Its plan is a member's.
    MembersPlan {
        /// The file.
        plan: PathBuf,
    },
    /// It is a catalogue.
    IsCatalogue {
        /// It.
        folder: PoolFolder,
        /// Its pool.
        pool: PoolId,
    },
    /// It is a member.
    IsMember {
        /// It.
        folder: PoolFolder,
        /// Its number.
        number: MemberNumber,
        /// Its pool.
        pool: PoolId,
    },
    /// It is not empty.
    NotEmpty {
        /// It.
        folder: PoolFolder,
        /// A name in it.
        name: OsString,
    },
    /// Something lies in a folder that an interrupted create made.
    Strange {
        /// The folder of the pool.
        folder: PoolFolder,
        /// The folder below it that the create made.
        below: PathBuf,
        /// The name in that.
        name: OsString,
    },
    /// It is in a folder of a pool.
    InPool {
        /// It.
        folder: PoolFolder,
        /// The folder of a pool.
        outer: PathBuf,
        /// The part of that folder.
        occupant: Occupant,
    },
    /// Its file system keeps no attributes.
    NoAttributes {
        /// It.
        folder: PoolFolder,
    },
    /// This user cannot write to it.
    NotWritable {
        /// It.
        folder: PoolFolder,
    },
    /// It is mounted read-only.
    ReadOnly {
        /// It.
        folder: PoolFolder,
    },
    /// A pool cannot be mounted over its own folders.
    Covers {
        /// The mount point.
        folder: PathBuf,
        /// How it lies to the folder of the pool.
        overlap: Overlap,
        /// The folder of the pool.
        covered: PoolFolder,
    },
    /// A pool cannot be mounted in a folder of another one.
    MountInPool {
        /// The mount point.
        folder: PathBuf,
        /// How it lies to the folder of that pool.
        overlap: Overlap,
        /// That folder.
        outer: PathBuf,
        /// The part of that folder.
        occupant: Occupant,
    },
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Catalogue => f.write_str("the catalogue"),
            Role::Member(number) => write!(f, "member {}", number.0),
            Role::NewMember => f.write_str("a new member"),
            Role::SomeMember => f.write_str("a member"),
        }
    }
}

impl fmt::Display for PoolFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path.display(), self.role)
    }
}

impl fmt::Display for Occupant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Occupant::Catalogue(pool) => write!(f, "the catalogue of the pool {}", hex(pool.0)),
            Occupant::Member(number, pool) => {
                write!(f, "member {} of the pool {}", number.0, hex(pool.0))
            }
            Occupant::Unknown => f.write_str("a folder of a pool"),
        }
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Overlap::Is => "is",
            Overlap::Contains => "contains",
            Overlap::IsInside => "is inside",
        })
    }
}

const BESIDE: &str = "expected a folder beside those of the pool, since a mount hides all that lies below it; give another folder";

impl fmt::Display for FolderRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FolderRefusal::MemberCount { count } => write!(
                f,
                "{count} members are given; expected 1 to {MEMBER_COUNT_MAX}; give a folder for each"
            ),
            FolderRefusal::Twice {
                path,
                roles: [one, other],
            } => write!(
                f,
                "{} is {one} and {other} at once; expected a folder of its own for each; give another one",
                path.display()
            ),
            FolderRefusal::Nested { inner, outer } => write!(
                f,
                "{inner} is inside {outer}; expected folders beside each other; give another one"
            ),
            FolderRefusal::OtherCreate {
                catalogue,
                members,
                policy,
            } => write!(
                f,
                "{} has an interrupted create of other members or with another policy; expected the same ones; repeat that create: {} with --policy {}",
                catalogue.display(),
                spaced(members),
                policy.name()
            ),
            FolderRefusal::NotEntered { folder, error } => write!(
                f,
                "{folder} cannot be entered: {error}; expected a folder that is there; check the path, or make the folder"
            ),
            FolderRefusal::Format { file, role, fault } => match role {
                Some(role) => write!(f, "{} ({role}) {fault}", file.display()),
                None => write!(f, "{} {fault}", file.display()),
            },
            FolderRefusal::Locked { folder } => write!(
                f,
                "{folder} is being made part of a pool by another process; expected a folder that no other process has; wait until that process has ended"
            ),
            FolderRefusal::MembersPlan { plan } => write!(
                f,
                "{} describes a member; expected the plan of a catalogue; remove the file",
                plan.display()
            ),
            FolderRefusal::IsCatalogue { folder, pool } => write!(
                f,
                "{folder} is the catalogue of the pool {} already; expected a folder of no pool; give another one",
                hex(pool.0)
            ),
            FolderRefusal::IsMember {
                folder,
                number,
                pool,
            } => write!(
                f,
                "{folder} is member {} of the pool {} already; expected a folder of no pool; give another one. If that pool is gone, or has given the member up, and nothing in the folder is wanted, make a new file system on its disk",
                number.0,
                hex(pool.0)
            ),
            FolderRefusal::NotEmpty { folder, name } => write!(
                f,
                "{folder} is not empty: it has {name:?}; expected an empty folder; make one, which may lie beside other folders"
            ),
            FolderRefusal::Strange {
                folder,
                below,
                name,
            } => write!(
                f,
                "{folder} has {} from an interrupted create, and in it {name:?}, which that create did not make; expected nothing in it; move {name:?} elsewhere, and repeat this",
                below.display()
            ),
            FolderRefusal::InPool {
                folder,
                outer,
                occupant,
            } => write!(
                f,
                "{folder} is inside {}, which is {occupant}; expected a folder outside of every pool; give another one",
                outer.display()
            ),
            FolderRefusal::NoAttributes { folder } => write!(
                f,
                "the file system of {folder} keeps no extended attributes (trusted.*), which a pool's records live in; expected ext4, XFS, btrfs or the like; give a folder of such a file system"
            ),
            FolderRefusal::NotWritable { folder } => write!(
                f,
                "{folder} cannot be written to as a pool needs it; expected root; run this as root (sudo)"
            ),
            FolderRefusal::ReadOnly { folder } => write!(
                f,
                "{folder} is mounted read-only; expected a file system that takes writes; remount it for writing"
            ),
            FolderRefusal::Covers {
                folder,
                overlap,
                covered,
            } => write!(
                f,
                "{} {overlap} {covered}, and the pool cannot be mounted on it; {BESIDE}",
                folder.display()
            ),
            FolderRefusal::MountInPool {
                folder,
                overlap,
                outer,
                occupant,
            } => write!(
                f,
                "{} {overlap} {}, which is {occupant}, and the pool cannot be mounted on it; {BESIDE}",
                folder.display(),
                outer.display()
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<FolderRefusal> {
    let path = || PathBuf::from("/mnt/a");
    let folder = || PoolFolder {
        path: path(),
        role: Role::NewMember,
    };
    let error = || io::Error::from(io::ErrorKind::NotFound);
    let (number, pool) = (MemberNumber(3), PoolId(7));
    let format = |role| FolderRefusal::Format {
        file: path(),
        role,
        fault: FormatFault::Failed(error()),
    };
    let in_pool = |occupant| FolderRefusal::InPool {
        folder: folder(),
        outer: path(),
        occupant,
    };
    vec![
        FolderRefusal::MemberCount { count: 2000 },
        FolderRefusal::Twice {
            path: path(),
            roles: [Role::Catalogue, Role::Member(number)],
        },
        FolderRefusal::Nested {
            inner: folder(),
            outer: folder(),
        },
        FolderRefusal::OtherCreate {
            catalogue: path(),
            members: vec![path(), path()],
            policy: Policy::default(),
        },
        FolderRefusal::NotEntered {
            folder: folder(),
            error: error(),
        },
        format(None),
        format(Some(Role::SomeMember)),
        FolderRefusal::Locked { folder: folder() },
        FolderRefusal::MembersPlan { plan: path() },
        FolderRefusal::IsCatalogue {
            folder: folder(),
            pool,
        },
        FolderRefusal::IsMember {
            folder: folder(),
            number,
            pool,
        },
        FolderRefusal::NotEmpty {
            folder: folder(),
            name: OsString::from("clip.mov"),
        },
        FolderRefusal::Strange {
            folder: folder(),
            below: PathBuf::from("objects"),
            name: OsString::from("clip.mov"),
        },
        in_pool(Occupant::Catalogue(pool)),
        in_pool(Occupant::Member(number, pool)),
        in_pool(Occupant::Unknown),
        FolderRefusal::NoAttributes { folder: folder() },
        FolderRefusal::NotWritable { folder: folder() },
        FolderRefusal::ReadOnly { folder: folder() },
        FolderRefusal::Covers {
            folder: path(),
            overlap: Overlap::Contains,
            covered: folder(),
        },
        FolderRefusal::MountInPool {
            folder: path(),
            overlap: Overlap::IsInside,
            outer: path(),
            occupant: Occupant::Unknown,
        },
    ]
}
