// SPDX-License-Identifier: Apache-2.0
//! Reads through the kernel's cache, and writes that the kernel puts there although they should go
//! past it.
//!
//! The daemon reads files past the kernel's cache. But bytes of other writers may be there and
//! nowhere else: if a disk refuses a write, the disk lacks the page, and the kernel still shows it
//! to all readers of the cache, whichever program wrote it and whichever got the error. And before
//! a read past the cache the kernel writes the dirty pages of the range: on a failing disk our read
//! would lose them. So the daemon reads through the cache if the cache has all of the range, which
//! takes no disk either; if it has a dirty page of it; and, on a disk that has failed or for a
//! short range, if it has any page of it. A long range with few pages would be read slowly, in the
//! kernel's small pieces.
//!
//! The daemon writes files past that cache, too. But Linux nevertheless writes through it when it
//! cannot drop a page of the range (the page is in use, or the file has a write error that was not
//! reported yet: iomap's ENOTBLK), or always, where a file system has no direct I/O for this file
//! and does not say so (ext4 with data=journal). Such a request succeeds, so the daemon checks
//! after each write. If the range has dirty pages, it repeats the write once, and then keeps the
//! bytes as loose ones. An error that the kernel has not reported on this descriptor yet may be
//! this request's, or no disk's: Linux also reports EIO when it could not drop a page of the range
//! after such a write, since a program was just writing to that page. The kernel's log then says
//! "Page cache invalidation failure on direct I/O". The page may have older bytes than ours and be
//! written over them, so the daemon writes ours once more.

use crate::event_loop::{Daemon, InFlight};
use crate::files::File;
use rushes_core::server::{Errno, Event, IoRead, LOST_IN_A_ROW};
use rushes_core::units::{FileId, IoId};
use rushes_sys::cached::{CachedPages, cached_pages};
use rushes_sys::file::through_the_cache;
use rushes_sys::{errno_of, space};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The kernel reads so much in its small pieces about as fast as we do at once. Units: bytes.
const LITTLE: u64 = 1 << 20;

impl Daemon {
    /// The descriptor for a read, and whether the read goes through the kernel's cache and meets
    /// dirty pages there. None: the file is not open.
    ///
    /// A read past the cache would write such pages, and write-protect them: the next store into a
    /// mapping of one then gives the file a new version. A read through the cache does not.
    pub(super) fn reads_by(&mut self, read: &IoRead) -> Option<(Arc<OwnedFd>, bool)> {
        let file = self.files.get(read.file)?;
        let cached = cached_pages(&*file.fd, read.range).ok();
        if !read.buffered && !self.is_in_the_cache(file, read, cached) {
            return Some((Arc::clone(&file.fd), false));
        }
        // Linux before 6.5 does not say.
        let is_unwritten = cached.is_none_or(|found| found.unwritten_count > 0);
        if let Some(fd) = file.through() {
            return Some((Arc::clone(fd), is_unwritten));
        }
        let fd = match through_the_cache(&*file.fd) {
            Some(fd) => Arc::new(fd),
            // All its reads go through the cache; or we have no descriptor left, and the read goes
            // to the disk.
            None => return Some((Arc::clone(&file.fd), is_unwritten)),
        };
        let file = self.files.get_mut(read.file)?;
        file.through = Some(Arc::clone(&fd));
        self.files.count_again(read.file);
        Some((fd, is_unwritten))
    }

    fn is_in_the_cache(&self, file: &File, read: &IoRead, cached: Option<CachedPages>) -> bool {
        let has_failed = self.has_failed(file);
        let Some(found) = cached else {
            // Linux before 6.5 does not say.
            return has_failed;
        };
        let is_little = has_failed || read.range.length.0 <= LITTLE;
        found.unwritten_count > 0
            || found.is_all_of(read.range, file.size)
            || (is_little && found.count > 0)
    }

    /// A write succeeded: did it go past the kernel's cache? If not, tell the core.
    pub(super) fn look_for_fallback(&mut self, io: IoId, about: &InFlight) {
        let Some(fd) = &about.writes_by else {
            return;
        };
        // First look for dirty pages: if their write-back fails a moment later, the next sync
        // reports it.
        let is_cached = match cached_pages(&**fd, about.range) {
            Ok(found) => found.unwritten_count > 0,
            // Linux before 6.5 does not say. If no request has failed, it drops the pages.
            Err(_) => {
                let file = self.files.get(about.file);
                file.is_some_and(|file| self.has_failed(file))
            }
        };
        if is_cached {
            return self.feed(Event::FellBack { io, lost: None });
        }
        let told = space::untold_error(&**fd);
        let count = match (&told, self.files.get_mut(about.file)) {
            (Err(_), Some(file)) => {
                file.lost_count = file.lost_count.saturating_add(1);
                file.lost_count
            }
            (_, Some(file)) => {
                file.lost_count = 0;
                0
            }
            (_, None) => 0,
        };
        if let Err(error) = told {
            let errno = errno_of(&error);
            if count >= LOST_IN_A_ROW {
                self.write_failed(about.file, about.range, errno);
            }
            let lost = Some(errno);
            self.feed(Event::FellBack { io, lost });
            if count < LOST_IN_A_ROW {
                self.hear_it_where_it_syncs(about.file, errno);
            }
        }
    }

    /// After a read: the kernel marks pages that it failed to write as clean, and drops them when
    /// it needs the memory, or when a program writes past its cache next to them. Then the read has
    /// returned the older bytes of the disk. Asks both descriptors: a sync under way may have taken
    /// the error from the one that syncs.
    pub(super) fn look_for_loss(&mut self, id: FileId) {
        if !self.server.is_cached_alone(id) {
            return;
        }
        let past = self.hear_it_past_the_cache(id);
        let error = match (self.told_where_it_syncs(id), past) {
            (Some(error), _) => {
                self.note_lost_pages(id, &error);
                error
            }
            (None, Some(error)) => {
                self.note_told_past(id);
                self.doubt(id);
                error
            }
            (None, None) => return,
        };
        let errno = errno_of(&error);
        self.feed(Event::NotKept { file: id, errno });
    }

    fn note_told_past(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(id) {
            file.told_past_count += 1;
        }
    }

    /// From now on prefer the bytes in the kernel's cache to the disk's.
    pub(super) fn doubt(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(id) {
            file.is_doubted = true;
        }
    }

    /// The core repeats a write past the kernel's cache, since its descriptor got an error that may
    /// not come from a disk. Take the same error from the descriptor that syncs, or the next client
    /// that flushes would get it. The error may also be about bytes that only the kernel's cache
    /// has: the core writes those again as well.
    fn hear_it_where_it_syncs(&mut self, id: FileId, errno: Errno) {
        // No error there: a sync has got it already.
        if self.told_where_it_syncs(id).is_none() {
            self.note_told_past(id);
        }
        self.doubt(id);
        if self.server.is_cached_alone(id) {
            self.feed(Event::NotKept { file: id, errno });
        }
    }

    fn told_where_it_syncs(&self, id: FileId) -> Option<std::io::Error> {
        let file = self.files.get(id)?;
        let opened = file.written.as_ref()?.file.as_ref().ok()?;
        space::untold_error(&*opened.buffered).err()
    }

    /// The descriptor that syncs has got an error. Take the same error from the descriptor that
    /// writes past the cache, or it would count against the next write, which has nothing to do
    /// with it. If such a write is under way, the error may be its own, and the core gets it.
    ///
    /// Returns  the error
    pub(super) fn hear_it_past_the_cache(&mut self, id: FileId) -> Option<std::io::Error> {
        let file = self.files.get(id)?;
        let opened = file.written.as_ref()?.file.as_ref().ok()?;
        let error = space::untold_error(&*opened.direct).err()?;
        let mut all = self.in_flight.iter();
        let past = all.find(|(_, about)| about.file == id && about.writes_by.is_some());
        if let Some((&io, _)) = past {
            let lost = Some(errno_of(&error));
            self.feed(Event::FellBack { io, lost });
        }
        Some(error)
    }

    /// True: a request to its disk has failed since we started, or may have.
    fn has_failed(&self, file: &File) -> bool {
        file.is_doubted || self.failed_disks.contains(&file.key.device)
    }

    /// A request to a file's disk failed.
    pub(super) fn disk_failed(&mut self, file: FileId) {
        if let Some(file) = self.files.get(file) {
            self.failed_disks.insert(file.key.device);
        }
    }
}
