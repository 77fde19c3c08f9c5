// SPDX-License-Identifier: Apache-2.0
//! Leases of files (fcntl(2)): while we hold one, no other program has the file open or mapped.

use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// `F_SETSIG` of fcntl(2), which the libc crate lacks.
const F_SETSIG: libc::c_int = 10;

/// Take a lease: no other program has the file open, and a program that opens it waits until we
/// have closed it; with O_NONBLOCK it gets EWOULDBLOCK.
///
/// Assumes  the caller owns the file, or has CAP_LEASE
/// Errors   EAGAIN: a program has it open, or mapped; EINVAL: the file system knows no leases
pub(crate) fn take(file: impl AsFd) -> io::Result<()> {
    // The kernel signals us when a program waits. The usual signal, SIGIO, would end us; the
    // default action of SIGURG is to ignore it.
    control(&file, F_SETSIG, libc::SIGURG)?;
    control(&file, libc::F_SETLEASE, libc::F_WRLCK)
}

/// Open a name that may be a FIFO or a file under a lease. Does not wait for a FIFO's other end,
/// but waits for the end of a lease, as every program does: the kernel ends it. A daemon that frees
/// reserved blocks has a lease for a moment. `open`: opens with these flags added.
///
/// Errors   those of `open`; never EAGAIN for a lease
pub fn open_waiting(
    open: impl Fn(OFlags) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<OwnedFd> {
    match open(OFlags::NONBLOCK) {
        // Only a regular file gives this.
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

/// Whether another open file description, or a mapping of one, is of the same inode. Descriptors
/// with O_PATH do not count.
///
/// Errors   as [`take`], without EAGAIN
pub fn is_open_elsewhere(file: impl AsFd) -> io::Result<bool> {
    match take(&file) {
        // Fails only if the kernel has ended the lease meanwhile.
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
