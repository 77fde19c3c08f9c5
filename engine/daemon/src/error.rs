// SPDX-License-Identifier: Apache-2.0
//! Why the daemon does not start, or had to stop.

use crate::config::ConfigError;
use crate::config::amount::show_size;
use rushes_sys::SysError;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The kind of error, its subject, and the kernel's error.
#[derive(Debug)]
pub enum ServeError {
    /// The configuration.
    Config(ConfigError),
    /// The cache does not fit the machine.
    Memory {
        /// `cache.bytes` and `write.buffer_bytes`.
        want: u64,
        /// The machine's memory. Units: bytes.
        total: u64,
    },
    /// The folder of the sockets cannot be made or entered.
    RuntimeDir {
        /// Which.
        dir: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another daemon is there.
    Running {
        /// In which folder.
        dir: PathBuf,
        /// The text of its lock file.
        holder: String,
    },
    /// A process that does nothing else is writing the data that a daemon left.
    Recovering {
        /// In which folder.
        dir: PathBuf,
        /// Its process.
        pid: i32,
    },
    /// There is no such lane.
    NoLane {
        /// In this folder.
        folder: PathBuf,
        /// Its number.
        lane: u32,
    },
    /// A share's folder cannot be opened.
    Share {
        /// The share.
        name: String,
        /// Its folder.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A socket cannot be made.
    Listen {
        /// Where.
        address: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The lanes that a former daemon left cannot be read.
    Lane {
        /// Where it lies.
        folder: PathBuf,
        /// Which lane.
        lane: u32,
        /// Its fault, as a clause.
        what: String,
    },
    /// It has ended, and left acknowledged writes that no disk has.
    Left {
        /// The files and the reasons.
        sentences: Vec<String>,
    },
    /// The machine refuses something the daemon cannot do without.
    System(SysError),
}

/// Whether this process may do everything.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The remedy for a runtime folder that cannot be used.
fn folder_expected(is_root: bool) -> &'static str {
    match is_root {
        true => {
            "expected a folder that only root can write to: correct its owner and mode, or set server.runtime_dir"
        }
        false => {
            "this is an ordinary user, and the daemon needs root: it opens the files of all users, locks its cache in memory and runs before other \
             programs. Start it with `sudo systemctl start rushes`; to try it as this user, set server.runtime_dir and server.state_dir to folders of \
             this user"
        }
    }
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServeError::Config(error) => error.fmt(f),
            ServeError::Memory { want, total } => write!(
                f,
                "cache.bytes and write.buffer_bytes are {} together, the machine has {} in all; set them to at most half of that",
                show_size(*want),
                show_size(*total >> 20 << 20)
            ),
            ServeError::RuntimeDir { dir, source } => write!(
                f,
                "the runtime folder {} cannot be used: {source}; {}",
                dir.display(),
                folder_expected(is_root())
            ),
            ServeError::Running { dir, holder } => write!(
                f,
                "another daemon serves from {} ({holder}); stop it (`systemctl stop rushes`), or \
                 give this one another server.runtime_dir",
                dir.display()
            ),
            ServeError::Recovering { dir, pid } => write!(
                f,
                "`rushes recover` (pid {pid}) is writing the data that an earlier daemon left in \
                 {}: wait until it ends",
                dir.display()
            ),
            ServeError::Share { name, path, source } => write!(
                f,
                "the folder {} of share {name:?} cannot be opened: {source}; mount it first, or \
                 correct [[share]] path",
                path.display()
            ),
            ServeError::Listen { address, source } => write!(
                f,
                "cannot listen on {address}: {source}; does another program listen there, or is \
                 the path too long for a socket (107 bytes)?"
            ),
            ServeError::Lane { folder, lane, what } => write!(
                f,
                "lane {lane} in {} cannot be read: {what}. It may hold data that clients wrote and \
                 disks do not have; list it with `rushes recover --list`; if nobody needs it, give \
                 it up with `rushes recover --give-up {lane}`",
                folder.display()
            ),
            ServeError::NoLane { folder, lane } => write!(
                f,
                "there is no lane {lane} in {}; `rushes recover --list` shows the lanes that have \
                 data",
                folder.display()
            ),
            ServeError::Left { sentences } => write!(
                f,
                "some acknowledged data could not be written; it is left for the next daemon or \
                 `rushes recover`, and `rushes recover --list` shows it: {}",
                sentences.join("; ")
            ),
            ServeError::System(error) if error.source.kind() == std::io::ErrorKind::StorageFull => {
                write!(
                    f,
                    "{error}; free space in its folder, or make the file system larger (a tmpfs: \
                     mount -o remount,size=SIZE)"
                )
            }
            ServeError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ServeError::Config(source) => Some(source),
            ServeError::RuntimeDir { source, .. }
            | ServeError::Share { source, .. }
            | ServeError::Listen { source, .. } => Some(source),
            ServeError::Running { .. }
            | ServeError::Recovering { .. }
            | ServeError::NoLane { .. }
            | ServeError::Memory { .. }
            | ServeError::Lane { .. }
            | ServeError::Left { .. } => None,
            ServeError::System(source) => Some(source),
        }
    }
}

impl From<ConfigError> for ServeError {
    fn from(error: ConfigError) -> ServeError {
        ServeError::Config(error)
    }
}

impl From<SysError> for ServeError {
    fn from(error: SysError) -> ServeError {
        ServeError::System(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_user_is_told_that_the_daemon_needs_root() {
        assert!(folder_expected(false).contains("the daemon needs root"));
        assert!(!folder_expected(true).contains("ordinary user"));
    }
}
