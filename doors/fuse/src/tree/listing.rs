// SPDX-License-Identifier: Apache-2.0
//! Listing directories: entries and offsets are the native file system's own.
//!
//! Its offsets keep a listing right while names come and go, also for NFS clients that return with
//! one after a restart. An answer to the kernel has room for fewer names than one read of the
//! directory brings: the door keeps the others for the next answer, as libc does for a program. It
//! keeps those of the last answer, too: a reader with less room than the kernel asked for returns
//! to them.

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

/// Names of a large directory, `.` and `..` among them, for which the door sends attributes before
/// it knows whether the program uses them.
const TRIED_COUNT: u32 = 4;

/// An open directory.
pub(crate) struct Listing {
    reader: Mutex<Reader>,
    number: u64,
    /// Its first answer is a small part of it.
    is_large: bool,
    _share: Share,
}

/// The position in the directory.
struct Reader {
    directory: OwnedFd,
    /// The entries as the directory brought them, from those of the last answer on.
    entries: Vec<u8>,
    /// The offset of the first of them; the descriptor's position, if there are none.
    begin: u64,
    /// So many bytes of them were sent.
    told: usize,
    /// The offset behind the sent ones.
    offset: u64,
    /// Where among them the last answer began, and its offset.
    answer: (usize, u64),
    /// A moment ago there was nothing behind them.
    is_end: bool,
}

impl Reader {
    /// Continues from here. Offset 0 reads the names again, as rewinddir(3) promises.
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

    /// Returns whether the offset is that of the first name not sent yet, or of one of the last
    /// answer
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

    /// Reads on.
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

    /// Finds a name that was not sent yet; reads on if there is none. Returns whether there is one.
    fn find_next(&mut self) -> Answer<bool> {
        if self.told < self.entries.len() {
            return Ok(true);
        }
        Ok(!std::mem::take(&mut self.is_end) && self.read_on()?)
    }
}

/// One name, and the offset behind it.
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

    /// Passes names from `offset` on, until `take` returns false.
    pub(crate) fn list(
        &self,
        listing: &Listing,
        offset: u64,
        mut take: impl FnMut(Listed<'_>) -> Answer<bool>,
    ) -> Answer<()> {
        let mut reader = locked(&listing.reader);
        reader.go_to(offset)?;
        while reader.find_next()? {
            let Some((entry, length)) = first_entry(&reader.entries[reader.told..]) else {
                break;
            };
            let number = if entry.name == c".." && listing.number == ROOT {
                // The tree ends here for all programs on the mount.
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

    /// How many of the names from `offset` on get their attributes. The kernel asks for attributes
    /// at each beginning, and later if the program used them.
    pub(crate) fn worth_looking_at(&self, listing: &Listing, offset: u64) -> u32 {
        match offset {
            0 if listing.is_large => TRIED_COUNT,
            _ => u32::MAX,
        }
    }

    /// The answer is with the kernel: while the program works through it, this reads the names for
    /// the next answer.
    pub(crate) fn read_ahead(&self, listing: &Listing) {
        let mut reader = locked(&listing.reader);
        let answered = reader.told - reader.answer.0;
        if answered == 0 || reader.entries.len() - reader.told >= answered {
            return;
        }
        // On an error: a caller that needs the names sees it.
        reader.is_end = reader.read_on().is_ok_and(|more| !more);
    }

    /// The inode of a listed name. None: it was removed meanwhile.
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
