// SPDX-License-Identifier: Apache-2.0
//! Replaces the file behind a descriptor number.

use rustix::fs::fstat;
use rustix::io::{DupFlags, Errno, dup3};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Makes the descriptor `number`, which a library has for `socket`, one of `file`, close-on-exec. A
/// call that has begun on it stays with the socket (dup3(2)).
///
/// Assumes  the library keeps it open; `socket` is another descriptor of the same
/// Errors   EBADF: the number is not of that socket
pub fn replace(number: RawFd, socket: impl AsFd, file: impl AsFd) -> io::Result<()> {
    // SAFETY: fstat alone uses it; a number that is not open gives EBADF.
    let found = fstat(unsafe { BorrowedFd::borrow_raw(number) })?;
    let expected = fstat(socket)?;
    if (found.st_dev, found.st_ino) != (expected.st_dev, expected.st_ino) {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the number is the library's, which keeps it open, as it was asked to; it is not
    // closed here, since this is never dropped as an owned descriptor, and dup3 leaves the number
    // open whether it succeeds or not.
    let mut owned = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup3(file, &mut owned, DupFlags::CLOEXEC)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write, pipe};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_number_reads_from_the_new_file_and_the_old_one_is_closed() {
        let (mut first, mut into_first) = pipe().unwrap();
        let (second, mut into_second) = pipe().unwrap();
        let number = first.as_raw_fd();
        assert!(
            replace(number, &second, &second).is_err(),
            "it is another pipe"
        );
        let same = first.try_clone().unwrap();
        replace(number, &same, second).unwrap();
        drop(same);
        into_second.write_all(b"second").unwrap();
        let mut read = [0; 6];
        first.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"second");
        assert!(into_first.write_all(b"nobody").is_err());
    }
}
