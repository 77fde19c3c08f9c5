// SPDX-License-Identifier: Apache-2.0
//! Why no new catalogue is made of members. Faults that any folder of a pool can have are not here.

use super::folder::PoolFolder;
use crate::format::FORMAT_FILE;
use rushes_core::pool::MemberNumber;
use std::fmt;
use std::path::PathBuf;

/// Why no new catalogue is made of members.
#[derive(Debug)]
pub enum RescueRefusal {
    /// No folder of a member is given.
    NoMember,
    /// A folder is no member.
    NotMember {
        /// It.
        path: PathBuf,
    },
    /// A folder is a member of another pool than the first one.
    OtherPool {
        /// It.
        path: PathBuf,
        /// The first one.
        first: PathBuf,
    },
    /// Two folders are the same member.
    Copies {
        /// Both.
        paths: [PathBuf; 2],
        /// The member.
        number: MemberNumber,
    },
    /// The pool has given the member up.
    GivenUp {
        /// Its folder.
        path: PathBuf,
        /// The member.
        number: MemberNumber,
    },
    /// The folder for the catalogue is in a pool.
    InPool {
        /// It.
        folder: PoolFolder,
    },
    /// The folder for the catalogue has a plan that is not of this pool.
    OtherPlan {
        /// It.
        folder: PoolFolder,
        /// The plan's name.
        plan: &'static str,
    },
    /// The folder for the catalogue is not empty.
    NotEmpty {
        /// It.
        folder: PoolFolder,
        /// A name in it.
        name: std::ffi::OsString,
    },
    /// The pool's old catalogue is not lost.
    CatalogueThere {
        /// It.
        catalogue: PathBuf,
    },
    /// The log of names is of a newer version.
    NewerLog {
        /// The member that has it.
        number: MemberNumber,
    },
    /// The log of names does not list the members.
    NoMembersInLog,
}

impl fmt::Display for RescueRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RescueRefusal::NoMember => write!(
                f,
                "no member is given; expected one at least; give the folders of all members that are left"
            ),
            RescueRefusal::NotMember { path } => write!(
                f,
                "{} is no member of a pool; expected a folder with the file {FORMAT_FILE} of one; leave this folder out",
                path.display()
            ),
            RescueRefusal::OtherPool { path, first } => write!(
                f,
                "{} is a member of another pool than {}; expected the members of one pool; leave out those of the other",
                path.display(),
                first.display()
            ),
            RescueRefusal::Copies {
                paths: [one, other],
                number,
            } => write!(
                f,
                "{} and {} are both member {}; expected each member once; leave out the one that is a copy",
                one.display(),
                other.display(),
                number.0
            ),
            RescueRefusal::GivenUp { path, number } => write!(
                f,
                "{} has the bytes that member {} had when it was given up, and the pool has gone on without them; expected members that the pool still has; leave this folder out",
                path.display(),
                number.0
            ),
            RescueRefusal::InPool { folder } => write!(
                f,
                "{folder} is in a pool already; expected an empty folder; give one, or look through a catalogue that is there with `rushes pool fsck`"
            ),
            RescueRefusal::OtherPlan { folder, plan } => write!(
                f,
                "{folder} has a {plan} that is not of this pool; expected an empty folder; give one"
            ),
            RescueRefusal::NotEmpty { folder, name } => write!(
                f,
                "{folder} is not empty: it has {name:?}; expected an empty folder; give one"
            ),
            RescueRefusal::CatalogueThere { catalogue } => write!(
                f,
                "the catalogue of this pool is there: {}; expected that it is lost, since two would give the same room twice; look through it with `rushes pool fsck`, or move it away",
                catalogue.display()
            ),
            RescueRefusal::NewerLog { number } => write!(
                f,
                "the log of names of member {} is of a newer version; expected one that this Rushes knows; use a newer Rushes",
                number.0
            ),
            RescueRefusal::NoMembersInLog => write!(
                f,
                "the log of names does not list the members of the pool; expected that list; use a newer Rushes"
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<RescueRefusal> {
    let path = || PathBuf::from("/mnt/a");
    let folder = || PoolFolder {
        path: path(),
        role: super::Role::Catalogue,
    };
    let number = MemberNumber(3);
    vec![
        RescueRefusal::NoMember,
        RescueRefusal::NotMember { path: path() },
        RescueRefusal::OtherPool {
            path: path(),
            first: path(),
        },
        RescueRefusal::Copies {
            paths: [path(), path()],
            number,
        },
        RescueRefusal::GivenUp {
            path: path(),
            number,
        },
        RescueRefusal::InPool { folder: folder() },
        RescueRefusal::OtherPlan {
            folder: folder(),
            plan: "rushes-pool.plan",
        },
        RescueRefusal::NotEmpty {
            folder: folder(),
            name: "clip.mov".into(),
        },
        RescueRefusal::CatalogueThere { catalogue: path() },
        RescueRefusal::NewerLog { number },
        RescueRefusal::NoMembersInLog,
    ]
}
