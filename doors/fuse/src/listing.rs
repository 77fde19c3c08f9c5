// SPDX-License-Identifier: Apache-2.0
//! Listing directories: entries and offsets are the native file system's own.
//!
//! Its offsets are what keeps a listing right while names come and go, also for NFS clients that come back with one after a restart.

use crate::answer::{Answer, errno};
use crate::attributes::Attributes;
use crate::door::Door;
use crate::nodes::{Node, ROOT, locked};
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom, fsync, openat, seek};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex};

/// Read from a directory at once. Units: bytes.
const CHUNK_BYTES: usize = 32 * 1024;

/// An open directory. Its lock covers the position, which the kernel keeps in the descriptor.
pub(crate) struct Listing {
    directory: Mutex<OwnedFd>,
    number: u64,
}

/// One name, and where the listing goes on behind it.
pub(crate) struct Listed<'a> {
    pub(crate) number: u64,
    pub(crate) name: &'a OsStr,
    pub(crate) kind: FileType,
    pub(crate) next: u64,
}

impl Door {
    pub(crate) fn open_listing(&self, number: u64) -> Answer<Listing> {
        let fd = self.nodes.descriptor(&self.nodes.get(number)?)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Listing {
            directory: Mutex::new(openat(&fd, c".", flags, Mode::empty())?),
            number,
        })
    }

    /// Names from `offset` on, until `take` says that it has enough.
    pub(crate) fn list(
        &self,
        listing: &Listing,
        offset: u64,
        mut take: impl FnMut(Listed<'_>) -> Answer<bool>,
    ) -> Answer<()> {
        let directory = locked(&listing.directory);
        seek(&*directory, SeekFrom::Start(offset))?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        let mut entries = RawDir::new(&*directory, chunk.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let number = if name == ".." && listing.number == ROOT {
                // The tree ends here for all who look through the mount.
                ROOT
            } else {
                self.nodes.number_of(entry.ino())
            };
            let listed = Listed {
                number,
                name,
                kind: entry.file_type(),
                next: entry.next_entry_cookie(),
            };
            if !take(listed)? {
                break;
            }
        }
        Ok(())
    }

    /// The inode of a listed name. None: it went away meanwhile.
    pub(crate) fn look_at_listed(
        &self,
        parent: u64,
        name: &OsStr,
    ) -> Option<(Arc<Node>, Attributes)> {
        let entry = self.lookup(parent, name).ok()?;
        Some((entry.node, entry.attributes))
    }

    pub(crate) fn sync_listing(&self, listing: &Listing) -> Answer<()> {
        let directory = locked(&listing.directory).try_clone().map_err(errno)?;
        fsync(directory)
    }
}
