// SPDX-License-Identifier: Apache-2.0
//! Listing directories: entries and offsets are the native file system's own.
//!
//! Its offsets are what keeps a listing right while names come and go, also for NFS clients that
//! come back with one after a restart. An answer to the kernel has room for fewer names than a look
//! into the directory brings: the others are kept for the next one, as libc keeps them for a
//! program. Those of the last answer are kept, too: a reader with less room than the kernel asked
//! for comes back to them.

use crate::bytes::descriptors::Share;
use crate::door::Door;
use crate::kernel::answer::{Answer, errno};
use crate::lock::locked;
use crate::tree::attributes::Attributes;
use crate::tree::nodes::{Node, ROOT, status};
use rushes_sys::entries::{first_entry, read_entries};
use rustix::fs::{Mode, OFlags, SeekFrom, fsync, openat, seek};
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex};

/// Read from a directory at once. Units: bytes.
const CHUNK_BYTES: usize = 32 * 1024;

/// A directory of this size has some two thousand names. Units: bytes.
const LARGE_BYTES: u64 = 64 * 1024;

/// Names of a large directory, `.` and `..` among them, whose attributes are told before it is
/// known that somebody looks at them.
const TRIED_COUNT: u32 = 4;

/// An open directory.
pub(crate) struct Listing {
    reader: Mutex<Reader>,
    number: u64,
    /// Its beginning is a small part of it.
    is_large: bool,
    _share: Share,
}

/// How far it is read.
struct Reader {
    directory: OwnedFd,
    /// As the directory brought them, from the last answer's on.
    entries: Vec<u8>,
    /// The offset of the first of them; without any, where the descriptor is.
    begin: u64,
    /// So many bytes of them were told.
    told: usize,
    /// The offset behind these.
    offset: u64,
    /// Where among them the last answer began, and its offset.
    answer: (usize, u64),
    /// Behind them there was nothing a moment ago.
    is_end: bool,
}

impl Reader {
    /// Names are told from here on. From the start they are read anew, as rewinddir(3) promises.
    fn go_to(&mut self, offset: u64) -> Answer<()> {
        if offset == 0 || !self.go_back_to(offset) {
            seek(&self.directory, SeekFrom::Start(offset))?;
            self.entries.clear();
            (self.begin, self.told, self.offset) = (offset, 0, offset);
            self.is_end = false;
        }
        self.answer = (self.told, self.offset);
        Ok(())
    }

    /// Returns  whether the offset is that of the first name not told yet, or of one that was told
    /// last
    fn go_back_to(&mut self, offset: u64) -> bool {
        let (mut at, mut here) = (0, self.begin);
        while offset != self.offset && here != offset && at < self.told {
            let Some((entry, length)) = first_entry(&self.entries[at..]) else {
                break;
            };
            (at, here) = (at + length, entry.next);
        }
        if offset != self.offset && here == offset {
            (self.told, self.offset) = (at, offset);
        }
        offset == self.offset
    }

    /// Read on.
    ///
    /// Returns  whether there was more
    fn read_on(&mut self) -> Answer<bool> {
        let (answer_at, answer_offset) = self.answer;
        self.entries.drain(..answer_at);
        self.told -= answer_at;
        self.begin = answer_offset;
        self.answer.0 = 0;
        let read = read_entries(&self.directory, CHUNK_BYTES, &mut self.entries)?;
        Ok(read > 0)
    }

    /// Whether a name is there that was not told yet.
    fn has_next(&mut self) -> Answer<bool> {
        if self.told < self.entries.len() {
            return Ok(true);
        }
        Ok(!std::mem::take(&mut self.is_end) && self.read_on()?)
    }
}

/// One name, and where the listing goes on behind it.
pub(crate) struct Listed<'a> {
    pub(crate) folder: BorrowedFd<'a>,
    pub(crate) number: u64,
    pub(crate) name: &'a CStr,
    /// Type bits of its mode.
    pub(crate) mode: u32,
    pub(crate) next: u64,
}

impl Listed<'_> {
    pub(crate) fn text(&self) -> &OsStr {
        OsStr::from_bytes(self.name.to_bytes())
    }

    /// `.` or `..`
    pub(crate) fn is_dots(&self) -> bool {
        self.name == c"." || self.name == c".."
    }
}

impl Door {
    pub(crate) fn open_listing(&self, number: u64, share: Share) -> Answer<Listing> {
        let fd = self.nodes.descriptor(&self.nodes.get(number)?)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || openat(&fd, c".", flags, Mode::empty());
        let directory = self.nodes.with_room(open)?;
        Ok(Listing {
            is_large: status(&directory)?.stx_size >= LARGE_BYTES,
            reader: Mutex::new(Reader {
                directory,
                entries: Vec::new(),
                begin: 0,
                told: 0,
                offset: 0,
                answer: (0, 0),
                is_end: false,
            }),
            number,
            _share: share,
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
        reader.go_to(offset)?;
        while reader.has_next()? {
            let Some((entry, length)) = first_entry(&reader.entries[reader.told..]) else {
                break;
            };
            let number = if entry.name == c".." && listing.number == ROOT {
                // The tree ends here for all who look through the mount.
                ROOT
            } else {
                self.nodes.number_of(entry.inode)
            };
            let next = entry.next;
            let listed = Listed {
                folder: reader.directory.as_fd(),
                number,
                name: entry.name,
                mode: entry.mode,
                next,
            };
            if !take(listed)? {
                break;
            }
            reader.told += length;
            reader.offset = next;
        }
        Ok(())
    }

    /// How many names are to be told with their attributes, of those that the kernel asks for from
    /// `offset` on. It asks for them at each beginning, and further on where somebody looked at
    /// those.
    pub(crate) fn worth_looking_at(&self, listing: &Listing, offset: u64) -> u32 {
        match offset {
            0 if listing.is_large => TRIED_COUNT,
            _ => u32::MAX,
        }
    }

    /// The answer is with the kernel: while it goes through that, the names for the next one are
    /// read.
    pub(crate) fn read_ahead(&self, listing: &Listing) {
        let mut reader = locked(&listing.reader);
        let answered = reader.told - reader.answer.0;
        if answered == 0 || reader.entries.len() - reader.told >= answered {
            return;
        }
        // An error: a caller that needs them sees it.
        reader.is_end = reader.read_on().is_ok_and(|more| !more);
    }

    /// The inode of a listed name. None: it went away meanwhile.
    pub(crate) fn look_at_listed(&self, listed: &Listed<'_>) -> Option<(Arc<Node>, Attributes)> {
        let entry = self
            .entry_listed(listed.folder, listed.name, listed.mode)
            .ok()?;
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
