// SPDX-License-Identifier: Apache-2.0
//! The mount as the kernel has it: a descriptor of /dev/fuse, a place in the tree, and its end.
//!
//! No program must see the folder under a mount that is being replaced: the new mount would hide
//! files that the program wrote there. So the new one is put beneath the dead one (Linux 6.5),
//! which is then unmounted. On older kernels the two steps follow each other at once. An operator
//! who wants no gap, and no writes there while the pool is not mounted at all, has the folder made
//! immutable ([`protect`]).
//!
//! fuser could do both. But when its connection ends it unmounts any mount on the folder, also when
//! ours went by `umount` and the next process already serves the folder (0.18.0 takes the mark of
//! an ended connection for that of a running one). So fuser gets a descriptor, and knows no folder.

use rustix::fs::{CWD, IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags, open, statfs};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};
use rustix::process::{getgid, getuid};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Its type in the table of mounts is `fuse.` and this.
const SUBTYPE: &str = "rushes";

/// Dropping it unmounts, if it is still mounted.
#[derive(Debug)]
pub(crate) struct Mounting {
    source: PathBuf,
    folder: PathBuf,
}

impl Mounting {
    /// Mounts on `folder`; the kernel's first request waits at the returned descriptor.
    ///
    /// `source`     the catalogue, which is its name in the table of mounts
    /// `read_bytes` the longest read that the kernel may request
    /// Assumes      the pool's lock is held as long as this lives: no other mount has this name
    pub(crate) fn new(
        source: &Path,
        folder: &Path,
        read_bytes: u32,
    ) -> io::Result<(Mounting, OwnedFd)> {
        let (source, folder) = (source.to_path_buf(), folder.canonicalize()?);
        let dead = dead_mount_on(&folder).map_err(|error| named("look at the folder", error))?;
        if dead.is_none() {
            warn_of_hidden(&folder);
        }
        let fd = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| named("open /dev/fuse (is the kernel's module fuse there?)", error))?;
        let mount = detached(&source, &fd, read_bytes).map_err(|error| named("mount", error))?;
        put_in_place(&mount, dead.as_ref(), &folder).map_err(|error| named("mount", error))?;
        Ok((Mounting { source, folder }, fd))
    }

    /// Leaves the unmounting to another process.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }

    /// Whether it is still mounted.
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

/// The folder on which the pool of this catalogue is mounted; `folder`, if there are several
/// (`mount --bind`). Looks at names alone: it asks no mount, since one may hang.
///
/// Assumes  one process has the pool by its lock: no other mount has this name
pub(crate) fn mounts_of(catalogue: &Path, folder: &Path) -> Option<PathBuf> {
    let mut all = rushes_pool::mounts_of(catalogue).ok()?;
    let at = all.iter().position(|mount| mount == folder).unwrap_or(0);
    (at < all.len()).then(|| all.swap_remove(at))
}

/// Programs that have files open keep them; the mount ends with the last.
pub(crate) fn unmount_lazily(folder: &Path) {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    match unmount(folder, flags) {
        // Another process was first.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(error) => tracing::warn!("{}: cannot unmount: {error}", folder.display()),
    }
}

/// A mount that has no place in the tree yet.
fn detached(source: &Path, device: &OwnedFd, read_bytes: u32) -> Result<OwnedFd, Errno> {
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "source", source)?;
    let texts = [
        ("fd", device.as_raw_fd().to_string()),
        // A directory; the kernel asks for the rest.
        ("rootmode", String::from("40000")),
        ("user_id", getuid().as_raw().to_string()),
        ("group_id", getgid().as_raw().to_string()),
        ("subtype", SUBTYPE.to_owned()),
        ("max_read", read_bytes.to_string()),
    ];
    for (key, text) in texts {
        fsconfig_set_string(context.as_fd(), key, text)?;
    }
    for flag in ["default_permissions", "allow_other"] {
        fsconfig_set_flag(context.as_fd(), flag)?;
    }
    fsconfig_create(context.as_fd())?;
    fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
    )
}

/// Puts it on the folder; in the place of a dead one, if there is one.
fn put_in_place(mount: &OwnedFd, dead: Option<&OwnedFd>, folder: &Path) -> Result<(), Errno> {
    let put = |how| {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | how;
        move_mount(mount.as_fd(), "", CWD, folder, flags)
    };
    let Some(dead) = dead else {
        return put(MoveMountFlags::empty());
    };
    let is_beneath = put(MoveMountFlags::MOVE_MOUNT_BENEATH);
    // By its descriptor: the folder may have another mount by now.
    let dead = format!("/proc/self/fd/{}", dead.as_raw_fd());
    match unmount(&dead, UnmountFlags::DETACH) {
        // Another process was first.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    match is_beneath {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::debug!("cannot mount beneath the dead mount: {error}");
            put(MoveMountFlags::empty())
        }
    }
}

/// A mount whose process was killed returns this, and is of no other use. The kernel may still know
/// its attributes.
fn dead_mount_on(folder: &Path) -> Result<Option<OwnedFd>, Errno> {
    if !statfs(folder).is_err_and(|error| error == Errno::NOTCONN) {
        return Ok(None);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(folder, flags, Mode::empty()).map(Some)
}

/// Warns of files that a program has written to the folder itself.
fn warn_of_hidden(folder: &Path) {
    let is_empty = std::fs::read_dir(folder).map_or(true, |mut all| all.next().is_none());
    if !is_empty {
        tracing::warn!(
            "{}: the folder below the mount is not empty, and its files are hidden while the pool is mounted. Unmount the pool, look at them, and move them \
             into the pool",
            folder.display()
        );
    }
}

/// Keeps all programs, also root's, from creating files in the folder while no pool is mounted
/// there. Does not change a folder that a dead mount covers.
///
/// Errors   a sentence: its file system does not support that, for example
pub(crate) fn protect(folder: &Path) -> Result<(), String> {
    let said = |error: Errno| {
        format!(
            "{}: the folder cannot be made immutable ({error}); the mount will hide files that are \
             written to it while the pool is not mounted. Its file system does not support that, \
             or the process may not do it (CAP_LINUX_IMMUTABLE)",
            folder.display()
        )
    };
    if dead_mount_on(folder).map_err(said)?.is_some() {
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = open(folder, flags, Mode::empty()).map_err(said)?;
    let had = ioctl_getflags(&fd).map_err(said)?;
    match had.contains(IFlags::IMMUTABLE) {
        true => Ok(()),
        false => ioctl_setflags(&fd, had | IFlags::IMMUTABLE).map_err(said),
    }
}

fn named(what: &str, error: Errno) -> io::Error {
    let error = io::Error::from(error);
    io::Error::new(error.kind(), format!("cannot {what}: {error}"))
}
