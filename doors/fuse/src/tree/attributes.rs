// SPDX-License-Identifier: Apache-2.0
//! Owner, mode, times, extended attributes and ACLs: those of the stub's own inode, so that they
//! touch the catalogue only.
//!
//! The kernel has checked the caller's rights (`default_permissions`), and knows the caller's
//! groups; the door does everything as root. The door neither shows nor sets Rushes' own
//! attributes, `trusted.rushes.*`: a client that could set a layout could read any object.

use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::kernel::table::Unique;
use crate::lock::locked;
use crate::tree::nodes::{Node, S_IFMT, S_IFREG, status};
use rustix::fs::{
    AtFlags, Mode, Statx, Timestamps, XattrFlags, chmodat, chownat, getxattr, getxattr_query,
    listxattr, listxattr_query, makedev, removexattr, setxattr, utimensat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Attributes of this name are Rushes' own.
const OURS: &[u8] = b"trusted.rushes.";
/// The ACL that a folder passes on to files and folders made in it.
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The answer of stat(2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) number: u64,
    pub(crate) size: u64,
    /// Units: 512 bytes.
    pub(crate) blocks: u64,
    pub(crate) accessed: SystemTime,
    pub(crate) modified: SystemTime,
    pub(crate) changed: SystemTime,
    /// Type and permissions.
    pub(crate) mode: u32,
    pub(crate) link_count: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
    /// For a device node, in the form of makedev(3).
    pub(crate) device: u64,
    /// Units: bytes.
    pub(crate) block_bytes: u32,
    /// A program may store to the file without the door: its times may change at any moment.
    pub(crate) may_be_stored: bool,
}

impl Attributes {
    /// A stub has no blocks of its own; a file's blocks are computed from its length. Its real
    /// blocks are on the members, and a listing that asked for them would wake every disk.
    pub(crate) fn of(number: u64, found: &Statx) -> Attributes {
        let mode = u32::from(found.stx_mode);
        let blocks = if mode & S_IFMT == S_IFREG {
            found.stx_size.div_ceil(512)
        } else {
            found.stx_blocks
        };
        Attributes {
            number,
            size: found.stx_size,
            blocks,
            accessed: time(found.stx_atime.tv_sec, found.stx_atime.tv_nsec),
            modified: time(found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
            changed: time(found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec),
            mode,
            link_count: found.stx_nlink,
            user: found.stx_uid,
            group: found.stx_gid,
            device: makedev(found.stx_rdev_major, found.stx_rdev_minor),
            block_bytes: found.stx_blksize,
            may_be_stored: false,
        }
    }
}

fn time(seconds: i64, nanoseconds: u32) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds < 0 {
        UNIX_EPOCH.checked_sub(whole)
    } else {
        UNIX_EPOCH.checked_add(whole)
    };
    base.unwrap_or(UNIX_EPOCH) + Duration::from_nanos(u64::from(nanoseconds))
}

/// The changes of a setattr; None leaves the value as it is.
#[derive(Debug)]
pub(crate) struct Changes {
    pub(crate) mode: Option<u32>,
    pub(crate) user: Option<u32>,
    pub(crate) group: Option<u32>,
    pub(crate) size: Option<u64>,
    /// Access and modification, if the request sets either.
    pub(crate) times: Option<Timestamps>,
    /// The caller is not root: set-id bits fall when it changes the length.
    pub(crate) by_user: bool,
}

/// The name under which calls without a descriptor variant reach an inode that is open with O_PATH.
pub(crate) fn by_descriptor(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

impl Door {
    pub(crate) fn attributes(&self, number: u64) -> Answer<Attributes> {
        let node = self.nodes.get(number)?;
        self.attributes_of(&node)
    }

    pub(crate) fn attributes_of(&self, node: &Arc<Node>) -> Answer<Attributes> {
        let fd = self.nodes.descriptor(node)?;
        let mut slot = locked(&node.file);
        let may_be_stored = self.follow_stores_of(node, &fd, &mut slot);
        let mut attributes = Attributes::of(node.number, &status(fd)?);
        attributes.may_be_stored = may_be_stored;
        if slot.nameless {
            // The stub's name among the removed ones does not count.
            attributes.link_count = 0;
        }
        Ok(attributes)
    }

    /// Owner before mode: chown clears set-id bits, and a chmod in the same call may set them.
    pub(crate) fn change(&self, number: u64, changes: &Changes) -> Answer<Attributes> {
        let node = self.nodes.get(number)?;
        let done = self.change_node(&node, changes);
        self.changed(&node);
        done
    }

    fn change_node(&self, node: &Arc<Node>, changes: &Changes) -> Answer<Attributes> {
        let fd = self.nodes.descriptor(node)?;
        if changes.user.is_some() || changes.group.is_some() {
            let (user, group) = (
                changes.user.map(Uid::from_raw),
                changes.group.map(Gid::from_raw),
            );
            chownat(&fd, c"", user, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = changes.mode {
            set_mode(&fd, mode)?;
        }
        if let Some(size) = changes.size {
            self.set_length(node, size)?;
            if changes.by_user {
                self.drop_set_id(node)?;
            }
        }
        if let Some(times) = &changes.times {
            // A write that reaches the stub later must not undo the times.
            let mut slot = locked(&node.file);
            // Nor may an earlier store.
            self.follow_stores_of(node, &fd, &mut slot);
            utimensat(&fd, c"", times, AtFlags::EMPTY_PATH)?;
        }
        self.attributes_of(node)
    }

    /// As write(2) and truncate(2) do to files of other users than root: setuid falls, and setgid
    /// if the group may execute.
    pub(crate) fn drop_set_id(&self, node: &Arc<Node>) -> Answer<()> {
        let fd = self.nodes.descriptor(node)?;
        let mode = u32::from(status(&fd)?.stx_mode) & 0o7777;
        let setgid = if mode & 0o010 != 0 { 0o2000 } else { 0 };
        let kept = mode & !(0o4000 | setgid);
        if kept == mode {
            return Ok(());
        }
        set_mode(&fd, kept)?;
        // After a write the kernel asks again for size and times, but not for the mode. So the door
        // makes it forget them before it answers the write.
        if let Some(notices) = self.notices.get() {
            notices.forget_attributes(node.number);
        }
        Ok(())
    }

    pub(crate) fn set_attribute(
        &self,
        number: u64,
        name: &OsStr,
        value: &[u8],
        flags: u32,
        asked: Unique,
    ) -> Answer<()> {
        if is_ours(name) {
            return Err(Errno::PERM);
        }
        self.check_wish(name, value)?;
        let node = self.nodes.get(number)?;
        let fd = self.nodes.descriptor(&node)?;
        let path = by_descriptor(&fd);
        let flags = XattrFlags::from_bits_retain(flags);
        // Only an exclusive set fails when it is repeated.
        let is_set = flags.contains(XattrFlags::CREATE) && self.was_given(asked, &path, name)?;
        if !is_set {
            self.check_layout_room(&node, &fd, &path, (name, value.len()))?;
            setxattr(&path, name, value, flags)?;
        }
        self.changed(&node);
        Ok(())
    }

    /// ENOSPC, as if there were no room for an attribute at all, for one that would leave the
    /// file's layout no room to grow.
    fn check_layout_room(
        &self,
        node: &Node,
        fd: &OwnedFd,
        path: &str,
        (name, length): (&OsStr, usize),
    ) -> Answer<()> {
        let leaves = match u32::from(status(fd)?.stx_mode) & S_IFMT {
            S_IFREG => self
                .pool
                .leaves_layout_room(path, name.as_bytes(), length)
                .map_err(|error| self.trouble(node, &error))?,
            // Files that are made there have it from the start.
            _ if name == DEFAULT_ACL => self.pool.leaves_layout_room_below(length),
            _ => true,
        };
        match leaves {
            true => Ok(()),
            false => Err(Errno::NOSPC),
        }
    }

    /// The value with its length; the value is empty if `room` is 0, which asks for the length
    /// alone.
    pub(crate) fn attribute(
        &self,
        number: u64,
        name: &OsStr,
        room: usize,
    ) -> Answer<(usize, Vec<u8>)> {
        if is_ours(name) {
            return Err(Errno::NODATA);
        }
        let fd = self.nodes.descriptor(&self.nodes.get(number)?)?;
        let path = by_descriptor(&fd);
        if room == 0 {
            return Ok((getxattr_query(path, name)?, Vec::new()));
        }
        let mut value = Vec::with_capacity(room);
        let length = getxattr(path, name, rustix::buffer::spare_capacity(&mut value))?;
        Ok((length, value))
    }

    /// Names, each with its NUL.
    pub(crate) fn attribute_names(&self, number: u64) -> Answer<Vec<u8>> {
        let fd = self.nodes.descriptor(&self.nodes.get(number)?)?;
        let path = by_descriptor(&fd);
        loop {
            let length = listxattr_query(&path)?;
            // More room than for the present names, so that growth of the list meanwhile shows.
            let mut names: Vec<u8> = Vec::with_capacity(length + 256);
            match listxattr(&path, rustix::buffer::spare_capacity(&mut names)) {
                Err(Errno::RANGE) => continue,
                Err(error) => return Err(error),
                Ok(_) => {}
            }
            let shown = names
                .split_inclusive(|byte| *byte == 0)
                .filter(|name| !name.starts_with(OURS));
            return Ok(shown.flatten().copied().collect());
        }
    }

    pub(crate) fn remove_attribute(&self, number: u64, name: &OsStr, asked: Unique) -> Answer<()> {
        if is_ours(name) {
            return Err(Errno::PERM);
        }
        let node = self.nodes.get(number)?;
        let fd = self.nodes.descriptor(&node)?;
        let path = by_descriptor(&fd);
        if !self.was_given(asked, &path, name)? {
            removexattr(&path, name)?;
        }
        self.changed(&node);
        Ok(())
    }

    /// [`Door::was_done`] for an attribute that is set or removed.
    fn was_given(&self, asked: Unique, path: &str, name: &OsStr) -> Answer<bool> {
        let is_there = || u64::from(getxattr_query(path, name).is_ok());
        let done = self.was_done(asked, || Ok([is_there(), 0]))?;
        Ok(done.is_some())
    }
}

fn is_ours(name: &OsStr) -> bool {
    name.as_bytes().starts_with(OURS)
}

fn set_mode(fd: impl AsFd, mode: u32) -> Answer<()> {
    chmodat(
        rustix::fs::CWD,
        by_descriptor(fd),
        Mode::from_raw_mode(mode & 0o7777),
        AtFlags::empty(),
    )
}
