// SPDX-License-Identifier: Apache-2.0
//! The mount as the kernel has it: mount(2) on a descriptor of /dev/fuse, and its end.
//!
//! fuser could do both. But when its session ends it unmounts whatever is on the folder then, also when ours went by `umount` and the
//! next process has the folder already (0.18.0 takes the mark of an ended connection for that of a living one). So it is given a
//! descriptor, and knows of no folder.

use rustix::fs::{Mode, OFlags, open, stat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{getgid, getuid};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Its type in the table of mounts is `fuse.` and this.
const SUBTYPE: &str = "rushes";

/// Dropping it unmounts, if nobody has.
#[derive(Debug)]
pub(crate) struct Mounting {
    source: PathBuf,
    folder: PathBuf,
}

impl Mounting {
    /// Mount on `folder`; the kernel's first request waits at the descriptor that is returned.
    ///
    /// `source`     the catalogue, which is its name in the table of mounts
    /// `read_bytes` the longest read that the kernel is to ask for
    /// Assumes      the pool's lock is held as long as this lives: no other mount has this name
    pub(crate) fn new(
        source: &Path,
        folder: &Path,
        read_bytes: u32,
    ) -> io::Result<(Mounting, OwnedFd)> {
        let (source, folder) = (source.to_path_buf(), folder.canonicalize()?);
        let fd = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| named("open /dev/fuse (is the kernel's module fuse there?)", error))?;
        let options = format!(
            "fd={},rootmode={:o},user_id={},group_id={},subtype={SUBTYPE},max_read={read_bytes},default_permissions,allow_other",
            fd.as_raw_fd(),
            stat(&folder)?.st_mode,
            getuid().as_raw(),
            getgid().as_raw(),
        );
        let options = CString::new(options)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount(&source, &folder, "fuse", flags, options.as_c_str())
            .map_err(|error| named("mount", error))?;
        Ok((Mounting { source, folder }, fd))
    }

    /// Somebody else sees to its end.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }

    /// Nobody has unmounted it.
    fn stands(&self) -> bool {
        let is_it =
            |one: &rushes_pool::Mounted| one.catalogue == self.source && one.mount == self.folder;
        rushes_pool::mounted().is_ok_and(|all| all.iter().any(is_it))
    }
}

impl Drop for Mounting {
    fn drop(&mut self) {
        if self.stands() {
            unmount_lazily(&self.folder);
        }
    }
}

/// Where the pool of this catalogue is mounted; on this folder, if it is in several places (`mount --bind`). By names alone: a mount that does not answer
/// is not asked.
///
/// Assumes  one process has the pool by its lock: no other mount has this name
pub(crate) fn mounts_of(catalogue: &Path, folder: &Path) -> Option<PathBuf> {
    let mut all = rushes_pool::mounts_of(catalogue).ok()?;
    let at = all.iter().position(|mount| mount == folder).unwrap_or(0);
    (at < all.len()).then(|| all.swap_remove(at))
}

/// Who has files open keeps them; the mount ends with the last.
pub(crate) fn unmount_lazily(folder: &Path) {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    match unmount(folder, flags) {
        // Somebody was first.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(error) => tracing::warn!("{}: it cannot be unmounted: {error}", folder.display()),
    }
}

fn named(what: &str, error: Errno) -> io::Error {
    let error = io::Error::from(error);
    io::Error::new(error.kind(), format!("cannot {what}: {error}"))
}
