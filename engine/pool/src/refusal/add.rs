// SPDX-License-Identifier: Apache-2.0
//! Why folders are not taken into a pool. Faults that any folder of a pool can have are not here.

use super::spaced;
use crate::create::MEMBER_COUNT_MAX;
use rushes_core::pool::{Class, MemberNumber};
use std::fmt;
use std::path::PathBuf;

/// Why folders are not taken into a pool.
#[derive(Debug)]
pub enum AddRefusal {
    /// An add was interrupted, and it has to be finished first.
    Interrupted {
        /// Its plan.
        plan: PathBuf,
    },
    /// The plan of an add cannot be used.
    Plan {
        /// Its file.
        plan: PathBuf,
    },
    /// An add of other members was interrupted.
    OtherMembers {
        /// Their folders.
        members: Vec<PathBuf>,
        /// Its plan.
        plan: PathBuf,
    },
    /// An add with another class was interrupted.
    OtherClass {
        /// A folder of that add.
        path: PathBuf,
        /// The class of that add.
        class: Option<Class>,
    },
    /// The folder is where a member of the pool is expected that is not there.
    TakenPlace {
        /// The folder.
        path: PathBuf,
        /// The member.
        number: MemberNumber,
    },
    /// The folder has a member that the pool has given up.
    GivenUp {
        /// The folder.
        path: PathBuf,
        /// The member.
        number: MemberNumber,
    },
    /// The folder is a member of this pool, at another place than its own.
    Displaced {
        /// The folder.
        path: PathBuf,
        /// The member.
        number: MemberNumber,
        /// Its own place.
        place: PathBuf,
    },
    /// The pool would have too many members.
    TooMany,
    /// Every number of a member has been given.
    NoNumber,
}

impl fmt::Display for AddRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddRefusal::Interrupted { plan } => write!(
                f,
                "an add was interrupted; expected that it is finished; repeat it first, or remove {} if the folders of that add are gone",
                plan.display()
            ),
            AddRefusal::Plan { plan } => write!(
                f,
                "{} cannot be used; expected the plan of an interrupted add to this pool; remove the file, and look through the pool with `rushes pool fsck`",
                plan.display()
            ),
            AddRefusal::OtherMembers { members, plan } => write!(
                f,
                "an add of other members was interrupted; expected the same folders; repeat that add: {}. If those folders are gone for good, remove {}",
                spaced(members),
                plan.display()
            ),
            AddRefusal::OtherClass { path, class } => {
                let path = path.display();
                match class {
                    Some(class) => write!(f, "an add of {path} of the class {}", class.name()),
                    None => write!(f, "an add of {path} of no class"),
                }?;
                f.write_str(
                    " was interrupted; expected the same class; repeat that add, and change the class afterwards (`rushes pool policy CATALOGUE --class NUMBER=CLASS`)",
                )
            }
            AddRefusal::TakenPlace { path, number } => write!(
                f,
                "{} is the place of member {}, whose disk is not there; expected another folder; give the new disk a mount point of its own",
                path.display(),
                number.0
            ),
            AddRefusal::GivenUp { path, number } => write!(
                f,
                "{} has the bytes that member {} had when it was given up, and the pool has gone on without them; expected an empty folder; make a new file system on that disk, or give another folder of it",
                path.display(),
                number.0
            ),
            AddRefusal::Displaced {
                path,
                number,
                place,
            } => write!(
                f,
                "{} is member {} of this very pool; expected that member at {}; mount its file system there, nothing else is needed",
                path.display(),
                number.0,
                place.display()
            ),
            AddRefusal::TooMany => write!(
                f,
                "the pool would have more than {MEMBER_COUNT_MAX} members; expected {MEMBER_COUNT_MAX} at most; add fewer, or make a second pool"
            ),
            AddRefusal::NoNumber => write!(
                f,
                "the pool has given all numbers of members; expected one that is free; make a second pool"
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<AddRefusal> {
    let path = || PathBuf::from("/mnt/a");
    let plan = || PathBuf::from("/mnt/c/rushes-pool.plan");
    let number = MemberNumber(3);
    vec![
        AddRefusal::Interrupted { plan: plan() },
        AddRefusal::Plan { plan: plan() },
        AddRefusal::OtherMembers {
            members: vec![path(), path()],
            plan: plan(),
        },
        AddRefusal::OtherClass {
            path: path(),
            class: Class::of("ssd"),
        },
        AddRefusal::OtherClass {
            path: path(),
            class: None,
        },
        AddRefusal::TakenPlace {
            path: path(),
            number,
        },
        AddRefusal::GivenUp {
            path: path(),
            number,
        },
        AddRefusal::Displaced {
            path: path(),
            number,
            place: path(),
        },
        AddRefusal::TooMany,
        AddRefusal::NoNumber,
    ]
}
