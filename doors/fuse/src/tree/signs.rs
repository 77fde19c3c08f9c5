// SPDX-License-Identifier: Apache-2.0
//! Marks on inodes of the catalogue that they are of this pool's tree: the check of an NFS handle
//! that no lookup has returned yet.
//!
//! A handle is a number that a client could make up, and the catalogue's file system has other
//! inodes: Rushes' own, and maybe another program's. Directories are followed up to the tree's
//! root. A regular file has its layout from the moment it is made; every other inode has an
//! attribute with the pool's id.

use crate::door::Door;
use crate::kernel::answer::Answer;
use rushes_pool::{INODE_ATTRIBUTE, LAYOUT_ATTRIBUTE, Layout};
use rustix::fs::{
    Mode, OFlags, RawDir, XattrFlags, fsetxattr, getxattr, getxattr_query, openat, setxattr,
};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// Layouts and marks are shorter; longer layouts are of files in many segments. Units: bytes.
const RECORD_BYTES: usize = 256;

fn by_descriptor(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

impl Door {
    /// Marks a new file, open or by O_PATH: with its identity, in a layout without bytes.
    pub(crate) fn sign_stub(&self, fd: &OwnedFd) -> Answer<()> {
        let identity = self.pool.new_file().map_err(|error| error.errno())?;
        let record = Layout::new(identity).encode();
        let set = match fsetxattr(fd, LAYOUT_ATTRIBUTE, &record, XattrFlags::CREATE) {
            Err(Errno::BADF) => setxattr(
                by_descriptor(fd),
                LAYOUT_ATTRIBUTE,
                &record,
                XattrFlags::CREATE,
            ),
            set => set,
        };
        match set {
            // Another program has opened it already, and the door gave it a layout then.
            Err(Errno::EXIST) => Ok(()),
            set => set,
        }
    }

    /// Marks a new inode that is neither a file nor a directory.
    pub(crate) fn mark(&self, fd: &OwnedFd) -> Answer<()> {
        let id = self.pool.id().0.to_le_bytes();
        setxattr(by_descriptor(fd), INODE_ATTRIBUTE, &id, XattrFlags::empty())
    }

    pub(crate) fn is_marked(&self, fd: &OwnedFd) -> bool {
        let mut found = [0; 16];
        let length = getxattr(by_descriptor(fd), INODE_ATTRIBUTE, &mut found[..]);
        length == Ok(found.len()) && found == self.pool.id().0.to_le_bytes()
    }

    /// Whether this is a stub, by its layout.
    pub(crate) fn is_stub(&self, fd: &OwnedFd) -> bool {
        getxattr_query(by_descriptor(fd), LAYOUT_ATTRIBUTE).is_ok()
    }

    /// False for a stub that never got a byte, and for an inode that is no stub.
    pub(crate) fn may_have_objects(&self, fd: &OwnedFd) -> bool {
        let mut record = [0; RECORD_BYTES];
        match getxattr(by_descriptor(fd), LAYOUT_ATTRIBUTE, &mut record[..]) {
            Ok(length) => {
                !Layout::decode(&record[..length]).is_ok_and(|layout| layout.segments().is_empty())
            }
            Err(Errno::NODATA) => false,
            Err(_) => true,
        }
    }

    /// The layout of a file that need not be open, if it is short and valid.
    pub(crate) fn layout_by_path(&self, fd: &OwnedFd) -> Option<Layout> {
        let mut record = [0; RECORD_BYTES];
        let length = getxattr(by_descriptor(fd), LAYOUT_ATTRIBUTE, &mut record[..]).ok()?;
        Layout::decode(&record[..length]).ok()
    }

    /// Whether the inode of this number is among the removed ones.
    pub(crate) fn is_removed(&self, number: u64) -> Answer<bool> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(self.pool.catalogue().removed(), c".", flags, Mode::empty())?;
        let mut room = Vec::with_capacity(8192);
        let mut entries = RawDir::new(folder, room.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            if entry?.ino() == number {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
