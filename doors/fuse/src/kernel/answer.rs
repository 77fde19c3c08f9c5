// SPDX-License-Identifier: Apache-2.0
//! The answer to a request: a value or an errno, in one type for the whole door.

use rustix::io::Errno;
use std::io;

/// A value, or the errno that the caller's system call returns.
pub(crate) type Answer<T> = Result<T, Errno>;

/// The number in an error; EIO when it has none.
pub(crate) fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
