// SPDX-License-Identifier: Apache-2.0
//! The attributes that hold layouts and marks, read and written by descriptor.

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// Attributes that begin so are Rushes's own: doors neither show nor take them.
pub const HIDDEN_PREFIX: &str = "trusted.rushes.";
/// The layout of a stub.
pub const LAYOUT_ATTRIBUTE: &str = "trusted.rushes.layout";
/// The pool's id, little-endian, on anything in the tree but files and folders: a door answers for
/// it by number.
pub const INODE_ATTRIBUTE: &str = "trusted.rushes.inode";
/// The back-pointer of an object.
pub const OBJECT_ATTRIBUTE: &str = "trusted.rushes.object";
/// The largest value that Linux takes. Units: bytes.
const VALUE_BYTES_MAX: usize = 65_536;

/// The value; None: it has no such attribute.
pub(crate) fn get(fd: BorrowedFd<'_>, name: &str) -> Result<Option<Vec<u8>>, Errno> {
    // Nearly all values are short.
    let mut value = vec![0; 256];
    loop {
        match fgetxattr(fd, name, value.as_mut_slice()) {
            Ok(count) => {
                value.truncate(count);
                return Ok(Some(value));
            }
            Err(Errno::NODATA) => return Ok(None),
            Err(Errno::RANGE) if value.len() < VALUE_BYTES_MAX => {
                value.resize(VALUE_BYTES_MAX, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Make or replace it, whole.
pub(crate) fn set(fd: BorrowedFd<'_>, name: &str, value: &[u8]) -> Result<(), Errno> {
    fsetxattr(fd, name, value, XattrFlags::empty())
}
