// SPDX-License-Identifier: Apache-2.0
//! Why a path leads to no pool, or to a catalogue that cannot be used. The damage inside of a
//! catalogue's tree is not here.

use crate::find::Mounted;
use crate::format::{CatalogueIdentity, FormatFault, hex};
use crate::member::{OF_A_LATER_CATALOGUE, OF_ANOTHER_CATALOGUE};
use rushes_core::pool::{MemberNumber, PoolId};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a path leads to no pool, or to a catalogue that cannot be used.
#[derive(Debug)]
pub enum CatalogueRefusal {
    /// The folder cannot be entered.
    NotEntered {
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The user may not open a folder of the pool.
    Denied {
        /// Its path.
        path: PathBuf,
    },
    /// The folder is a mount of a pool.
    IsMount {
        /// Its path.
        path: PathBuf,
        /// The pool's catalogue.
        catalogue: PathBuf,
    },
    /// The folder is a member.
    IsMember {
        /// Its path.
        path: PathBuf,
    },
    /// The folder is no folder of a pool.
    IsNone {
        /// Its path.
        path: PathBuf,
    },
    /// The format file cannot be used.
    Format {
        /// Its path.
        file: PathBuf,
        /// The fault of it.
        fault: FormatFault,
    },
    /// A name in the tree is no regular file.
    NotRegular {
        /// Below the tree.
        path: PathBuf,
    },
    /// The file for the number of the next file has none.
    Number {
        /// Its path.
        file: PathBuf,
        /// Its content.
        text: String,
    },
    /// The number of the next file is higher than any.
    NumbersUsedUp {
        /// The file with that number.
        file: PathBuf,
        /// It.
        number: u64,
    },
    /// The lock that this process was given is not this catalogue's.
    OtherLock {
        /// The catalogue's.
        file: PathBuf,
    },
    /// A rescue has made a later catalogue, to which a member belongs.
    Superseded {
        /// The member.
        number: MemberNumber,
        /// Its folder.
        path: PathBuf,
        /// This catalogue.
        catalogue: PathBuf,
    },
    /// A member belongs to a catalogue that another rescue has made.
    Beside(OtherCatalogue),
    /// The path cannot be reached.
    Unreached {
        /// It.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The path is reached through a mount of the pool, and is not below that mount.
    OutsideMount {
        /// It.
        path: PathBuf,
        /// The mount.
        mount: PathBuf,
    },
    /// The path is in a member's folder.
    InMember {
        /// It.
        path: PathBuf,
        /// The member's folder.
        folder: PathBuf,
        /// The member.
        number: MemberNumber,
        /// The member's pool.
        pool: PoolId,
        /// A mount of that pool.
        mounted: Option<Mounted>,
    },
    /// The user may not look into a folder that may be a pool's.
    Shut {
        /// The path that the user gave.
        path: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// The user may not look into the catalogue of a mount.
    ShutMount {
        /// The catalogue.
        catalogue: PathBuf,
        /// The mount.
        mount: PathBuf,
    },
    /// The path is in no pool.
    InNoPool {
        /// It.
        path: PathBuf,
    },
}

/// A member that belongs to a catalogue of the same pool that another rescue has made.
#[derive(Debug)]
pub struct OtherCatalogue {
    pub(crate) number: MemberNumber,
    pub(crate) path: PathBuf,
    pub(crate) its: CatalogueIdentity,
    pub(crate) catalogue: PathBuf,
    pub(crate) own: CatalogueIdentity,
}

impl fmt::Display for CatalogueRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CatalogueRefusal::NotEntered { path, error } => write!(
                f,
                "{} cannot be entered: {error}; expected the catalogue of a pool; check the path",
                path.display()
            ),
            CatalogueRefusal::Denied { path } => write!(
                f,
                "{} may not be opened: permission denied; expected root, the owner of a pool's folders; run this as root (sudo)",
                path.display()
            ),
            CatalogueRefusal::IsMount { path, catalogue } => write!(
                f,
                "{} is where the pool of {1} is mounted; expected its catalogue, {1}; give that path",
                path.display(),
                catalogue.display()
            ),
            CatalogueRefusal::IsMember { path } => write!(
                f,
                "{} is a member of a pool, not its catalogue; expected a folder that `rushes pool create` made; give the path of the catalogue",
                path.display()
            ),
            CatalogueRefusal::IsNone { path } => write!(
                f,
                "{} is not the catalogue of a pool; expected a folder that `rushes pool create` made; give the path of the catalogue",
                path.display()
            ),
            CatalogueRefusal::Format { file, fault } => write!(f, "{} {fault}", file.display()),
            CatalogueRefusal::NotRegular { path } => write!(
                f,
                "{} is no regular file; expected one, since no other file has bytes on members; give a regular file",
                path.display()
            ),
            CatalogueRefusal::Number { file, text } => write!(
                f,
                "{} has the text {text:?}; expected a number above 0; mend the file with `rushes pool fsck --repair`",
                file.display()
            ),
            CatalogueRefusal::NumbersUsedUp { file, number } => write!(
                f,
                "{} has the number {number}, which is beyond all numbers of files; expected a smaller one; remove the file, and make it anew with `rushes pool fsck --repair`",
                file.display()
            ),
            CatalogueRefusal::OtherLock { file } => write!(
                f,
                "{} is another file than the one that is locked; expected the catalogue that was mounted; unmount the pool and mount it again",
                file.display()
            ),
            CatalogueRefusal::Superseded {
                number,
                path,
                catalogue,
            } => write!(
                f,
                "member {} in {} {OF_A_LATER_CATALOGUE}; expected that {} is the pool's catalogue, and it is not any more; use the one that the rescue made. When all files are there, delete {} by `rm -r`",
                number.0,
                path.display(),
                catalogue.display(),
                catalogue.display()
            ),
            CatalogueRefusal::Beside(other) => write!(
                f,
                "member {} in {} {OF_ANOTHER_CATALOGUE} ({}); expected {} ({}); use the member with its own catalogue. To have one pool again, end both mounts, move both catalogues away, and run `rushes pool rescue` with an empty folder and all members of both",
                other.number.0,
                other.path.display(),
                other.its,
                other.catalogue.display(),
                other.own
            ),
            CatalogueRefusal::Unreached { path, error } => write!(
                f,
                "{} cannot be reached: {error}; expected a path in a pool; check the path",
                path.display()
            ),
            CatalogueRefusal::OutsideMount { path, mount } => write!(
                f,
                "{} is not below its mount {1}; expected a path below that one; ask inside of {1}",
                path.display(),
                mount.display()
            ),
            CatalogueRefusal::InMember {
                path,
                folder,
                number,
                pool,
                mounted,
            } => {
                let (path, folder) = (path.display(), folder.display());
                write!(
                    f,
                    "{path} is in {folder}, member {} of the pool {}",
                    number.0,
                    hex(pool.0)
                )?;
                match mounted {
                    Some(one) => write!(
                        f,
                        ", whose catalogue is {}; expected that catalogue, or a path below {}; give one of them",
                        one.catalogue.display(),
                        one.mount.display()
                    ),
                    None => f.write_str(
                        ", which is not mounted here; expected the catalogue of that pool; give its path",
                    ),
                }
            }
            CatalogueRefusal::Shut { path, folder } => write!(
                f,
                "you are not allowed to look into {}, which may be the catalogue of {}; expected root; run this as root (sudo)",
                folder.display(),
                path.display()
            ),
            CatalogueRefusal::ShutMount { catalogue, mount } => write!(
                f,
                "you are not allowed to look into {}, the catalogue of the pool on {}; expected root; run this as root (sudo)",
                catalogue.display(),
                mount.display()
            ),
            CatalogueRefusal::InNoPool { path } => write!(
                f,
                "{} is in no pool that is mounted here, and in no catalogue's tree; expected a path in one of them; mount the pool, or give another path",
                path.display()
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<CatalogueRefusal> {
    let path = || PathBuf::from("/mnt/a");
    let error = || io::Error::from(io::ErrorKind::NotFound);
    let number = MemberNumber(3);
    let in_member = |mounted| CatalogueRefusal::InMember {
        path: path(),
        folder: path(),
        number,
        pool: PoolId(7),
        mounted,
    };
    vec![
        CatalogueRefusal::NotEntered {
            path: path(),
            error: error(),
        },
        CatalogueRefusal::Denied { path: path() },
        CatalogueRefusal::IsMount {
            path: path(),
            catalogue: path(),
        },
        CatalogueRefusal::IsMember { path: path() },
        CatalogueRefusal::IsNone { path: path() },
        CatalogueRefusal::Format {
            file: path(),
            fault: FormatFault::Failed(error()),
        },
        CatalogueRefusal::NotRegular { path: path() },
        CatalogueRefusal::Number {
            file: path(),
            text: String::from("seven"),
        },
        CatalogueRefusal::NumbersUsedUp {
            file: path(),
            number: u64::MAX,
        },
        CatalogueRefusal::OtherLock { file: path() },
        CatalogueRefusal::Superseded {
            number,
            path: path(),
            catalogue: path(),
        },
        CatalogueRefusal::Beside(OtherCatalogue {
            number,
            path: path(),
            its: CatalogueIdentity::default(),
            catalogue: path(),
            own: CatalogueIdentity::default(),
        }),
        CatalogueRefusal::Unreached {
            path: path(),
            error: error(),
        },
        CatalogueRefusal::OutsideMount {
            path: path(),
            mount: path(),
        },
        in_member(None),
        in_member(Some(Mounted {
            catalogue: path(),
            mount: path(),
        })),
        CatalogueRefusal::Shut {
            path: path(),
            folder: path(),
        },
        CatalogueRefusal::ShutMount {
            catalogue: path(),
            mount: path(),
        },
        CatalogueRefusal::InNoPool { path: path() },
    ]
}
