// SPDX-License-Identifier: Apache-2.0
//! Why work on a whole pool is not done, or not to its end. `failed.rs` counts files that the work
//! had to leave as they are.

use crate::error::PoolError;
use crate::request::WorkKind;
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why work on a whole pool is not done, or not to its end.
#[derive(Debug)]
pub enum WorkRefusal {
    /// The mount ended, or closed the connection.
    MountGone {
        /// The kernel's error.
        error: io::Error,
    },
    /// The request cannot be encoded for mounts.
    Unsaid {
        /// The fault of it.
        error: io::Error,
    },
    /// The answer of the mount cannot be understood.
    Misunderstood {
        /// It.
        answer: String,
        /// The fault of it.
        error: serde_json::Error,
    },
    /// The mount refused it.
    ByMount {
        /// Its sentence.
        sentence: String,
    },
    /// The mount does other work.
    Busy {
        /// Of this kind.
        kind: WorkKind,
        /// About this member.
        member: Option<u16>,
    },
    /// The mount stops other work.
    Stopping {
        /// Of this kind.
        kind: WorkKind,
        /// About this member.
        member: Option<u16>,
    },
    /// The mount does other work, and takes no new settings until it has ended.
    Unsettable {
        /// Of this kind.
        kind: WorkKind,
    },
    /// A text is no schedule.
    NoSchedule {
        /// It.
        text: String,
    },
    /// A text is no name of a class.
    NoClass {
        /// It.
        text: String,
    },
    /// The daemon cannot write the bytes of a file that it has in memory.
    Unwritten {
        /// The kernel's error.
        error: Errno,
    },
    /// A file cannot be opened.
    Unopened {
        /// The kernel's error.
        error: Errno,
    },
    /// The kernel reads a file straight from its member.
    Passed {
        /// It.
        path: PathBuf,
    },
    /// The pool is being unmounted.
    Unmounting,
    /// The program that asked for the work is gone.
    Unwanted,
    /// Files were moved, and the log of names is not written.
    LogUnwritten {
        /// Why.
        trouble: Box<PoolError>,
    },
    /// Clients rename folders all the time, so that the log of names is not written.
    Renaming,
}

/// "`rushes pool drain` of member 3"
fn command(kind: WorkKind, member: Option<u16>) -> String {
    let of = member.map_or(String::new(), |number| format!(" of member {number}"));
    format!("`rushes pool {}`{of}", kind.name())
}

impl fmt::Display for WorkRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WorkRefusal::MountGone { error } => write!(
                f,
                "the mount that has the pool does not answer any more ({error}); expected its answer; mount the pool and repeat this: work that is done stays done"
            ),
            WorkRefusal::Unsaid { error } => write!(
                f,
                "this cannot be asked of a mount: {error}; expected paths in UTF-8; unmount the pool and repeat this"
            ),
            WorkRefusal::Misunderstood { answer, error } => write!(
                f,
                "the mount that has the pool answered {answer:?}, which this program does not understand ({error}); expected a mount of the same version; reload the pool's service (systemctl reload rushes-pool@NAME), or unmount the pool and mount it with this version"
            ),
            WorkRefusal::ByMount { sentence } => f.write_str(sentence),
            WorkRefusal::Busy { kind, member } => write!(
                f,
                "the mount is busy with {}; expected no other command; wait for it, or interrupt that command",
                command(*kind, *member)
            ),
            WorkRefusal::Stopping { kind, member } => write!(
                f,
                "the mount is busy with {}; expected no other command; repeat this in a moment: that command has ended, and the mount stops after its current step",
                command(*kind, *member)
            ),
            WorkRefusal::Unsettable { kind } => write!(
                f,
                "the mount is busy with {}; expected no other command; repeat this when it is done",
                command(*kind, None)
            ),
            WorkRefusal::NoSchedule { text } => write!(
                f,
                "{text:?} is no schedule; expected off, idle, always or a time such as 02:00-06:00; give one of these"
            ),
            WorkRefusal::NoClass { text } => write!(
                f,
                "{text:?} is no name of a class of members; expected 1 to 16 small letters, digits, - or _; give such a name"
            ),
            WorkRefusal::Unwritten { error } => write!(
                f,
                "the daemon cannot write the bytes of it that are in memory ({error}); expected all of them in its objects; repeat this when they are"
            ),
            WorkRefusal::Unopened { error } => write!(
                f,
                "the file cannot be opened ({error}); expected a file that can be read; look through the pool with `rushes pool fsck`"
            ),
            WorkRefusal::Passed { path } => write!(
                f,
                "{} is open, and the kernel reads it straight from this member, so it cannot be moved; expected that its reader closes it; find the reader with `fuser` or `lsof` on the mount, and repeat this when it has closed the file. Every other file is moved",
                path.display()
            ),
            WorkRefusal::Unmounting => write!(
                f,
                "the pool is being unmounted; expected that it stays mounted; mount it and repeat this to go on: bytes that were moved stay moved"
            ),
            WorkRefusal::Unwanted => write!(
                f,
                "the command that asked for this has ended; expected that it waits; repeat it to go on"
            ),
            WorkRefusal::LogUnwritten { trouble } => write!(
                f,
                "files were moved, but the log of names could not be written: {trouble}; expected room for it; repeat this when there is some"
            ),
            WorkRefusal::Renaming => write!(
                f,
                "folders were renamed each time that the log of names was written; expected a moment without that; repeat this when no client renames folders"
            ),
        }
    }
}

#[cfg(test)]
pub(super) fn examples() -> Vec<WorkRefusal> {
    let error = || serde_json::from_str::<u8>("x").unwrap_err();
    let text = || String::from("whenever");
    let (kind, member) = (WorkKind::Drain, Some(3));
    vec![
        WorkRefusal::MountGone {
            error: io::ErrorKind::UnexpectedEof.into(),
        },
        WorkRefusal::Unsaid {
            error: error().into(),
        },
        WorkRefusal::Misunderstood {
            answer: text(),
            error: error(),
        },
        WorkRefusal::ByMount { sentence: text() },
        WorkRefusal::Busy { kind, member },
        WorkRefusal::Stopping { kind, member },
        WorkRefusal::Unsettable { kind },
        WorkRefusal::NoSchedule { text: text() },
        WorkRefusal::NoClass { text: text() },
        WorkRefusal::Unwritten { error: Errno::IO },
        WorkRefusal::Unopened { error: Errno::IO },
        WorkRefusal::Passed {
            path: PathBuf::from("a.mov"),
        },
        WorkRefusal::Unmounting,
        WorkRefusal::Unwanted,
        WorkRefusal::LogUnwritten {
            trouble: Box::new(PoolError::NoRoom),
        },
        WorkRefusal::Renaming,
    ]
}
