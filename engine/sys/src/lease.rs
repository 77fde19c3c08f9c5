// SPDX-License-Identifier: Apache-2.0
//! Leases of files, as fcntl(2) has them: a file that nobody else has open, or mapped, for as long
//! as need be.

use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// `F_SETSIG` of fcntl(2), which the libc crate lacks.
const F_SETSIG: libc::c_int = 10;

/// Have a file for ourselves: nobody else has it open, and a program that opens it waits until we
/// have closed it; with O_NONBLOCK it gets EWOULDBLOCK.
///
/// Assumes  the caller owns the file, or has CAP_LEASE
/// Errors   EAGAIN: somebody has it open, or mapped; EINVAL: the file system knows no leases
pub(crate) fn take(file: impl AsFd) -> io::Result<()> {
    // The kernel tells us by a signal of a program that waits, and the usual one, SIGIO, would end
    // us. This one is ignored.
    control(&file, F_SETSIG, libc::SIGURG)?;
    control(&file, libc::F_SETLEASE, libc::F_WRLCK)
}

/// Open what may be a FIFO that somebody put there, which nobody waits for, or a file of which
/// somebody has a lease (a daemon that gives blocks back has one for a moment), which is waited for
/// as by every program: the kernel ends it. `open`: with these flags, and nothing else changed.
///
/// Errors   those of `open`; never EAGAIN for a lease
pub fn open_waiting(
    open: impl Fn(OFlags) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<OwnedFd> {
    match open(OFlags::NONBLOCK) {
        // Said of regular files alone.
        Err(rustix::io::Errno::AGAIN) => open(OFlags::empty()),
        result => result,
    }
}

fn control(file: impl AsFd, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: these calls take numbers and change the descriptor alone.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Whether another open file description, or a mapping of one, is of the same inode. O_PATH ones do
/// not count.
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
    fn who_opens_what_somebody_has_a_lease_of_waits_for_its_end() {
        let path = std::env::temp_dir().join(format!("rushes-waiting-{}", std::process::id()));
        fs::write(&path, [7; 4096]).expect("the folder is writable");
        let file = File::open(&path).expect("it is there");
        if is_open_elsewhere(&file).is_err() {
            fs::remove_file(&path).expect("ours");
            return crate::skip("the temporary folder's file system knows no leases");
        }
        take(&file).expect("it was known before");
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| {
                open_waiting(|flags| {
                    rustix::fs::open(&path, OFlags::RDWR | flags, rustix::fs::Mode::empty())
                })
            });
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(
                !opener.is_finished(),
                "it was opened beside a lease, or refused"
            );
            drop(file);
            opener
                .join()
                .expect("no panic")
                .expect("the lease has ended");
        });
        fs::remove_file(&path).expect("ours");
    }

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
