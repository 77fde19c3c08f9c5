// SPDX-License-Identifier: Apache-2.0
//! Why a member is not drained or removed, and why a pool is not destroyed. A member that is
//! missing or full is no refusal.

use super::policy::LackedClass;
use crate::error::PoolError;
use rushes_core::pool::{Class, MemberNumber};
use std::fmt;
use std::path::PathBuf;

/// Why a member is not drained or removed, and why a pool is not destroyed.
#[derive(Debug)]
pub enum MemberRefusal {
    /// The pool has no member of this number.
    Unknown {
        /// It.
        number: MemberNumber,
        /// The members that the pool has.
        known: Vec<MemberNumber>,
    },
    /// The member is being removed.
    Leaving {
        /// It.
        number: MemberNumber,
    },
    /// No other member takes bytes, so that this one cannot be drained.
    NoTaker {
        /// It.
        number: MemberNumber,
        /// It takes bytes itself.
        is_taking: bool,
        /// Clauses about the other ones.
        others: String,
        /// A clause about the remedy.
        remedy: String,
    },
    /// The pool has no other member.
    Only {
        /// It.
        number: MemberNumber,
        /// A clause about the remedy.
        remedy: String,
    },
    /// No other member takes bytes, so that this one cannot be removed.
    LastTaker {
        /// It.
        number: MemberNumber,
        /// Clauses about the other ones.
        others: String,
        /// A clause about the remedy.
        remedy: String,
    },
    /// A file is bound to a class that no other member has.
    Bound {
        /// The class.
        class: Class,
    },
    /// Without the member no member would have a class that a policy needs.
    Lacks {
        /// The member.
        number: MemberNumber,
        /// The class.
        lacked: LackedClass,
    },
    /// A member is drained, and the log of names is not written.
    LogAfterDrain(NoLog),
    /// The member has the only log of names.
    OnlyLog(NoLog),
    /// A file cannot be examined.
    File {
        /// Its path.
        path: PathBuf,
        /// The error with it.
        trouble: Box<PoolError>,
    },
    /// The member that is to be given up is there.
    IsThere {
        /// It.
        number: MemberNumber,
        /// Its folder.
        path: PathBuf,
    },
    /// The member is missing, and files of the pool are in use.
    MissingInUse {
        /// It.
        number: MemberNumber,
    },
    /// Files have bytes on the member.
    HasFiles {
        /// It.
        number: MemberNumber,
        /// How many files.
        count: u64,
    },
    /// Objects that belong to no file are on the member.
    HasObjects {
        /// It.
        number: MemberNumber,
        /// How many objects.
        count: u64,
    },
    /// A mount is inside of a folder of a pool that is to be destroyed.
    MountInside {
        /// The mount.
        mount: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// An add to a pool that is to be destroyed was interrupted.
    AddInterrupted,
    /// A member of a pool that is to be destroyed is missing.
    Missing {
        /// It.
        number: MemberNumber,
        /// Its folder.
        path: PathBuf,
        /// A clause that says what was found there instead.
        why: String,
        /// The pool's catalogue.
        catalogue: PathBuf,
        /// All other members are missing, too.
        is_all: bool,
    },
    /// A pool that is to be destroyed has files.
    PoolHasFiles {
        /// Its catalogue.
        catalogue: PathBuf,
    },
}

/// Why no other member than one took the log of names.
#[derive(Debug)]
pub struct NoLog {
    /// That one.
    pub number: MemberNumber,
    /// A clause about the cause.
    pub cause: String,
    /// A clause about the remedy. None: none is known.
    pub remedy: Option<String>,
}

impl NoLog {
    /// The steps before the command is repeated.
    fn first(&self) -> String {
        let remedy = self.remedy.as_ref();
        remedy.map_or_else(String::new, |remedy| format!("{remedy}, then "))
    }
}

impl fmt::Display for MemberRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemberRefusal::Unknown { number, known } => {
                let known: Vec<String> = known.iter().map(|one| one.0.to_string()).collect();
                write!(
                    f,
                    "the pool has no member {}; expected one of {}; `rushes pool ls` shows them",
                    number.0,
                    known.join(", ")
                )
            }
            MemberRefusal::Leaving { number } => write!(
                f,
                "member {} is being removed; expected a member that stays; repeat `rushes pool remove`",
                number.0
            ),
            MemberRefusal::NoTaker {
                number,
                is_taking,
                others,
                remedy,
            } => {
                let number = number.0;
                if *is_taking {
                    write!(f, "member {number} is the last one that takes bytes, and ")?;
                }
                write!(
                    f,
                    "no other member would take the bytes of member {number}: {others}; expected one that takes bytes; {remedy}, then drain member {number}"
                )
            }
            MemberRefusal::Only { number, remedy } => write!(
                f,
                "member {} is the only one of the pool; expected another one that takes bytes; {remedy}, then repeat this",
                number.0
            ),
            MemberRefusal::LastTaker {
                number,
                others,
                remedy,
            } => write!(
                f,
                "member {} is the last one that takes bytes: {others}; expected another one that takes bytes; {remedy}, then repeat this",
                number.0
            ),
            MemberRefusal::Bound { class } => write!(
                f,
                "the file is bound to members of the class {0}, and no other one that takes bytes is of it; expected another one; give a member that class (`rushes pool policy CATALOGUE --class NUMBER={0}`), or change what the file wants (`rushes pool policy FILE --set WORDS`)",
                class.name()
            ),
            MemberRefusal::Lacks { number, lacked } => write!(
                f,
                "without member {}: {lacked}, or take away the rule or the wish that asks for it",
                number.0
            ),
            MemberRefusal::LogAfterDrain(log) => write!(
                f,
                "all bytes that could be moved off member {0} were moved, but the log of names could not be written: {1}; expected that another member has it; {2}repeat the drain. Until then member {0} takes nothing new, unless `rushes pool drain --cancel` lets it",
                log.number.0,
                log.cause,
                log.first()
            ),
            MemberRefusal::OnlyLog(log) => write!(
                f,
                "no other member than {} has the log of names, and it could not be written: {}; expected that another member has it; {}repeat this",
                log.number.0,
                log.cause,
                log.first()
            ),
            MemberRefusal::File { path, trouble } => write!(
                f,
                "{}: {trouble}; expected a record that can be read; look through the pool with `rushes pool fsck`",
                path.display()
            ),
            MemberRefusal::IsThere { number, path } => write!(
                f,
                "member {} ({}) is there, and its bytes would be lost; expected one that is missing; empty it with `rushes pool drain`, then remove it without --lost. To give it up all the same, unmount its disk first, by `umount -l` where it hangs",
                number.0,
                path.display()
            ),
            MemberRefusal::MissingInUse { number } => write!(
                f,
                "member {} is missing, and while the pool is in use it cannot be proved that no file is on it; expected a pool that is not mounted; unmount it and repeat this, or give the member up with all that it has, by --lost",
                number.0
            ),
            MemberRefusal::HasFiles { number, count } => write!(
                f,
                "bytes of {} are on member {}; expected none; move them with `rushes pool drain`",
                match count {
                    1 => String::from("one file"),
                    _ => format!("{count} files"),
                },
                number.0
            ),
            MemberRefusal::HasObjects { number, count } => write!(
                f,
                "on member {} there are objects that no file names, {count} in all; expected none; find out with `rushes pool fsck --repair` whose they are",
                number.0
            ),
            MemberRefusal::MountInside { mount, folder } => write!(
                f,
                "a file system is mounted on {}, inside of {}; expected none there; unmount it first",
                mount.display(),
                folder.display()
            ),
            MemberRefusal::AddInterrupted => write!(
                f,
                "an add was interrupted; expected that all folders of the pool are known; repeat the add first"
            ),
            MemberRefusal::Missing {
                number,
                path,
                why,
                catalogue,
                is_all,
            } => {
                write!(
                    f,
                    "member {} is missing: {} {why}; expected it there; mount it. If its disk is dead, ",
                    number.0,
                    path.display()
                )?;
                let catalogue = catalogue.display();
                match is_all {
                    true => write!(
                        f,
                        "and those of all others, only names are left of this pool: delete the catalogue by `rm -r {catalogue}`"
                    ),
                    false => write!(
                        f,
                        "give it up first: rushes pool remove --lost --yes {catalogue} {}",
                        number.0
                    ),
                }
            }
            MemberRefusal::PoolHasFiles { catalogue } => write!(
                f,
                "{} has files, which would be lost for good; expected an empty pool; move them elsewhere first, or say --with-files",
                catalogue.display()
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<MemberRefusal> {
    let path = || PathBuf::from("/mnt/a");
    let text = || String::from("member 1 is missing");
    let class = || Class::of("ssd").unwrap();
    let number = MemberNumber(3);
    let no_taker = |is_taking| MemberRefusal::NoTaker {
        number,
        is_taking,
        others: text(),
        remedy: text(),
    };
    let no_log = |remedy| NoLog {
        number,
        cause: text(),
        remedy,
    };
    let missing = |is_all| MemberRefusal::Missing {
        number,
        path: path(),
        why: String::from("is not there"),
        catalogue: path(),
        is_all,
    };
    vec![
        MemberRefusal::Unknown {
            number,
            known: vec![MemberNumber(0), MemberNumber(1)],
        },
        MemberRefusal::Leaving { number },
        no_taker(false),
        no_taker(true),
        MemberRefusal::Only {
            number,
            remedy: text(),
        },
        MemberRefusal::LastTaker {
            number,
            others: text(),
            remedy: text(),
        },
        MemberRefusal::Bound { class: class() },
        MemberRefusal::Lacks {
            number,
            lacked: LackedClass {
                class: class(),
                known: Vec::new(),
                rule: None,
            },
        },
        MemberRefusal::LogAfterDrain(no_log(None)),
        MemberRefusal::LogAfterDrain(no_log(Some(text()))),
        MemberRefusal::OnlyLog(no_log(None)),
        MemberRefusal::File {
            path: path(),
            trouble: Box::new(PoolError::NoRoom),
        },
        MemberRefusal::IsThere {
            number,
            path: path(),
        },
        MemberRefusal::MissingInUse { number },
        MemberRefusal::HasFiles { number, count: 2 },
        MemberRefusal::HasObjects { number, count: 2 },
        MemberRefusal::MountInside {
            mount: path(),
            folder: path(),
        },
        MemberRefusal::AddInterrupted,
        missing(false),
        missing(true),
        MemberRefusal::PoolHasFiles { catalogue: path() },
    ]
}
