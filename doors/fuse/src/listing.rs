// SPDX-License-Identifier: Apache-2.0
//! Listing directories: entries and offsets are the native file system's own.
//!
//! Its offsets are what keeps a listing right while names come and go, also for NFS clients that come back with one after a restart. An answer to
//! the kernel has room for fewer names than a look into the directory brings: the others are kept for the next one, as libc keeps them for a program.

use crate::answer::{Answer, errno};
use crate::attributes::Attributes;
use crate::door::Door;
use crate::nodes::{Node, ROOT, locked};
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom, fsync, openat, seek};
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex};

/// Read from a directory at once. Units: bytes.
const CHUNK_BYTES: usize = 32 * 1024;

/// An open directory.
pub(crate) struct Listing {
    reader: Mutex<Reader>,
    number: u64,
}

/// How far it is read.
struct Reader {
    directory: OwnedFd,
    /// The offset of the first name of `ahead`; without one, where the descriptor is.
    offset: u64,
    /// Names that were read and not told yet.
    ahead: VecDeque<Entry>,
}

struct Entry {
    inode: u64,
    name: Box<[u8]>,
    kind: FileType,
    next: u64,
}

impl Reader {
    /// Names are told from here on. From the start they are read anew, as rewinddir(3) promises.
    fn go_to(&mut self, offset: u64) -> Answer<()> {
        if offset != self.offset || offset == 0 {
            self.ahead.clear();
            seek(&self.directory, SeekFrom::Start(offset))?;
            self.offset = offset;
        }
        Ok(())
    }

    /// The next name, not taken yet. None: there are no more.
    fn first(&mut self, chunk: &mut Vec<u8>) -> Answer<Option<&Entry>> {
        if self.ahead.is_empty() {
            chunk.clear();
            chunk.reserve(CHUNK_BYTES);
            let mut entries = RawDir::new(&self.directory, chunk.spare_capacity_mut());
            while let Some(entry) = entries.next() {
                let entry = entry?;
                self.ahead.push_back(Entry {
                    inode: entry.ino(),
                    name: entry.file_name().to_bytes().into(),
                    kind: entry.file_type(),
                    next: entry.next_entry_cookie(),
                });
                if entries.is_buffer_empty() {
                    break;
                }
            }
        }
        Ok(self.ahead.front())
    }

    fn take(&mut self) {
        if let Some(entry) = self.ahead.pop_front() {
            self.offset = entry.next;
        }
    }
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
            reader: Mutex::new(Reader {
                directory: openat(&fd, c".", flags, Mode::empty())?,
                offset: 0,
                ahead: VecDeque::new(),
            }),
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
        let mut reader = locked(&listing.reader);
        let mut chunk = Vec::new();
        reader.go_to(offset)?;
        while let Some(entry) = reader.first(&mut chunk)? {
            let name = OsStr::from_bytes(&entry.name);
            let number = if name == ".." && listing.number == ROOT {
                // The tree ends here for all who look through the mount.
                ROOT
            } else {
                self.nodes.number_of(entry.inode)
            };
            let listed = Listed {
                number,
                name,
                kind: entry.kind,
                next: entry.next,
            };
            if !take(listed)? {
                break;
            }
            reader.take();
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
        let directory = locked(&listing.reader)
            .directory
            .try_clone()
            .map_err(errno)?;
        fsync(directory)
    }
}
