// SPDX-License-Identifier: Apache-2.0
//! A failed system call: the operation, its subject, and the kernel's answer.

use rushes_core::server::Errno;
use std::fmt;
use std::io;

/// A system call that failed, with enough detail to act on it.
#[derive(Debug)]
pub struct SysError {
    /// The operation, as a verb: "lock the cache in memory".
    pub operation: &'static str,
    /// Its subject: a path, a size, a session. May be empty.
    pub about: String,
    /// The kernel's answer.
    pub source: io::Error,
}

impl SysError {
    /// `operation` on `about` gave `source`.
    pub fn new(
        operation: &'static str,
        about: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> SysError {
        SysError {
            operation,
            about: about.into(),
            source: source.into(),
        }
    }

    /// The kernel's answer as a number; [`Errno::IO`] when it was not one.
    pub fn errno(&self) -> Errno {
        errno_of(&self.source)
    }
}

/// The number in an [`io::Error`]; [`Errno::IO`] when it has none.
pub fn errno_of(error: &io::Error) -> Errno {
    match error.raw_os_error().and_then(|n| u32::try_from(n).ok()) {
        Some(n) if n != 0 => Errno(n),
        _ => Errno::IO,
    }
}

impl fmt::Display for SysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.about.is_empty() {
            write!(f, "cannot {}: {}", self.operation, self.source)
        } else {
            write!(
                f,
                "cannot {} ({}): {}",
                self.operation, self.about, self.source
            )
        }
    }
}

impl std::error::Error for SysError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
