// SPDX-License-Identifier: Apache-2.0
//! Errors of an export.

use crate::refusal::Refusal;
use std::fmt;
use std::io;
use std::path::Path;

/// Why an export did not start, or ended.
#[derive(Debug)]
pub enum ExportError {
    /// The request cannot be served.
    Refused(Box<Refusal>),
    /// A server of the distribution misbehaved.
    Server {
        /// Its program.
        program: &'static str,
        /// The event, in words.
        what: String,
    },
    /// A system call failed.
    System {
        /// The work that failed.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl ExportError {
    pub(crate) fn at(doing: &str, path: &Path, error: impl Into<io::Error>) -> ExportError {
        ExportError::System {
            what: format!("{doing} {}", path.display()),
            source: error.into(),
        }
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::Refused(refusal) => refusal.fmt(f),
            ExportError::Server { program, what } => {
                write!(f, "{program} {what}; its output stands above")
            }
            ExportError::System { what, source } => write!(f, "cannot {what}: {source}"),
        }
    }
}

impl std::error::Error for ExportError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ExportError::System { source, .. } => Some(source),
            _ => None,
        }
    }
}
