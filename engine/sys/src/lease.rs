// SPDX-License-Identifier: Apache-2.0
//! Leases of files, as fcntl(2) has them: a file that nobody else has open, or mapped, for as long as need be.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `F_SETSIG` of fcntl(2), which the libc crate lacks.
const F_SETSIG: libc::c_int = 10;

/// Have a file for ourselves: nobody else has it open, and who opens it waits until we have closed it (with O_NONBLOCK he hears EWOULDBLOCK).
///
/// Assumes  the caller owns the file, or has CAP_LEASE
/// Errors   EAGAIN: somebody has it open, or mapped; EINVAL: the file system knows no leases
pub(crate) fn take(file: impl AsFd) -> io::Result<()> {
    // Who waits is told to us by a signal, and the usual one, SIGIO, would end us. This one is ignored.
    control(&file, F_SETSIG, libc::SIGURG)?;
    control(&file, libc::F_SETLEASE, libc::F_WRLCK)
}

fn control(file: impl AsFd, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: these calls take numbers and change the descriptor alone.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Whether another open file description, or a mapping of one, is of the same inode. O_PATH ones do not count.
///
/// Errors   as [`take`], without EAGAIN
pub fn is_open_elsewhere(file: impl AsFd) -> io::Result<bool> {
    match take(&file) {
        // One that was broken meanwhile is gone already.
        Ok(()) => {
            let _ = control(&file, libc::F_SETLEASE, libc::F_UNLCK);
            Ok(false)
        }
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Mapping};
    use std::fs::{self, File};

    #[test]
    fn opens_and_mappings_of_others_are_seen() {
        let path = std::env::temp_dir().join(format!("rushes-lease-{}", std::process::id()));
        fs::write(&path, [7; 8192]).expect("the folder is writable");
        let file = File::open(&path).expect("it is there");
        if is_open_elsewhere(&file).is_err() {
            fs::remove_file(&path).expect("ours");
            return crate::skip("the temporary folder's file system knows no leases");
        }
        let is_elsewhere = || is_open_elsewhere(&file).expect("it was known before");
        assert!(!is_elsewhere(), "ours alone");
        let other = File::options().read(true).write(true).open(&path);
        let other = other.expect("it is there");
        assert!(is_elsewhere(), "a writer");
        let mapping = Mapping::shared(&other, 8192, Access::Read).expect("mapped");
        drop(other);
        assert!(is_elsewhere(), "a mapping of a file that was closed");
        drop(mapping);
        assert!(!is_elsewhere(), "nobody any more");
        fs::remove_file(&path).expect("ours");
    }
}
