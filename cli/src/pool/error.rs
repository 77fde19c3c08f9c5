// SPDX-License-Identifier: Apache-2.0
//! Errors whose sentences several of the pool's commands have.

use rushes_fuse::Unwritten;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// An error of a command.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// Of a file or folder.
    At {
        /// Its path.
        path: PathBuf,
        /// The finding, as a clause.
        fault: String,
    },
    /// Objects of the pool lack acknowledged bytes.
    NotWritten {
        /// None: it is lost.
        catalogue: Option<PathBuf>,
        /// The daemon that has the bytes.
        unwritten: Unwritten,
    },
    /// This program cannot take signals.
    Signals(io::Error),
}

impl CommandError {
    pub(crate) fn at(path: &Path, fault: impl fmt::Display) -> CommandError {
        CommandError::At {
            path: path.to_path_buf(),
            fault: fault.to_string(),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::At { path, fault } => write!(f, "{}: {fault}", path.display()),
            CommandError::NotWritten {
                catalogue,
                unwritten,
            } => {
                if let Some(catalogue) = catalogue {
                    write!(f, "{}: ", catalogue.display())?;
                }
                write!(
                    f,
                    "{unwritten}; expected all of them in their objects: {}, then repeat this",
                    how_to_write(unwritten)
                )
            }
            CommandError::Signals(error) => write!(f, "cannot take signals: {error}"),
        }
    }
}

/// As `main` prints it.
impl From<CommandError> for String {
    fn from(error: CommandError) -> String {
        error.to_string()
    }
}

/// How to get the bytes into their objects.
fn how_to_write(unwritten: &Unwritten) -> &'static str {
    match unwritten.is_daemon_there {
        true => {
            "see the log of that daemon, or of the `rushes recover` that runs there (`journalctl -u \
             rushes`)"
        }
        false => {
            "start that daemon (`systemctl start rushes`), or write them with `rushes recover`"
        }
    }
}
