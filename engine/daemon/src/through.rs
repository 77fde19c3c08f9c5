// SPDX-License-Identifier: Apache-2.0
//! Reads of what the kernel has in its cache, and writes that it takes into it unasked.
//!
//! Files are read past the kernel's cache. Bytes that others than we wrote may be there and nowhere
//! else: a disk that refuses a write loses the page, and the kernel goes on showing it to everybody
//! who reads as usual, no matter which program wrote it and which was told of the error. And to
//! read past the cache has the kernel write first what it has not written: on a disk that fails our
//! read would be what loses it. So a range of which the kernel has all is read from there, which
//! takes no disk either; and one with anything that is not written yet; and, on a disk that has
//! failed, or where it is little, one of which the kernel has anything at all. More of it would be
//! read by and by, in the kernel's small pieces.
//!
//! Files are written past that cache, too. But Linux writes through it nevertheless when it cannot
//! make room there (a page of the range is in use, or anything of the file could not be written
//! since somebody last looked: iomap's ENOTBLK), or always, where a file system has no direct I/O
//! for this file and does not say so (ext4 with data=journal). Such a request ends well. Its
//! outcome is found out behind each: one with pages that are not written yet is tried once more,
//! then its bytes are kept as all that goes through the cache; and an error that the kernel has not
//! told this descriptor may be this request's. Or it is nobody's: Linux tells EIO, too, when it
//! could not take a page of the range out of its cache behind such a write, since somebody was just
//! writing to that. Its log says "Page cache invalidation failure on direct I/O" then. The page may
//! have older bytes than we wrote and be written over them: ours are written once more.

use crate::event_loop::{Daemon, InFlight};
use crate::files::File;
use rushes_core::server::{Errno, Event, IoRead, LOST_IN_A_ROW};
use rushes_core::units::{FileId, IoId};
use rushes_sys::cached::{CachedPages, cached_pages};
use rushes_sys::file::through_the_cache;
use rushes_sys::{errno_of, space};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// So much the kernel reads in no time longer in its pieces than we do at once. Units: bytes.
const LITTLE: u64 = 1 << 20;

impl Daemon {
    /// By which descriptor a read goes, and whether it goes through the kernel's cache where that
    /// has pages that are not written yet. None: the file is not open.
    ///
    /// To read past the cache would write such pages, and protect them: the next store into a
    /// mapping of one then gives the file a new version. To read through it does not.
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
            // Served that way all the time; or we have no descriptor left, and the disk is asked.
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

    /// A write has ended well: was it one past the kernel's cache? If not, the core has to know.
    pub(super) fn look_for_fallback(&mut self, io: IoId, about: &InFlight) {
        let Some(fd) = &about.writes_by else {
            return;
        };
        // First what is there: what cannot be written a moment later is told by the next sync.
        let is_cached = match cached_pages(&**fd, about.range) {
            Ok(found) => found.unwritten_count > 0,
            // Linux before 6.5 does not say. Where nothing has failed it makes room.
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

    /// Behind a read: bytes that the kernel has not been able to write it takes for written, and
    /// lets go as soon as it needs the room, or when somebody writes past its cache beside it. Then
    /// the read has shown what the disk had before. Both descriptors are asked: a sync that is
    /// under way may have been told on the one that syncs.
    pub(super) fn look_for_loss(&mut self, id: FileId) {
        if !self.server.is_cached_alone(id) {
            return;
        }
        let past = self.hear_it_past_the_cache(id);
        let error = match (self.told_where_it_syncs(id), past) {
            (Some(error), _) => {
                self.was_not_kept(id, &error);
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

    /// Bytes that the kernel has of it in its cache are read from there.
    pub(super) fn doubt(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(id) {
            file.is_doubted = true;
        }
    }

    /// A write past the kernel's cache is done once more, since its descriptor has told of an error
    /// that may be no disk's. The one that syncs would tell of the same to the next client that
    /// flushes. The error may be about bytes that are in the kernel's cache alone: those are
    /// written again as well.
    fn hear_it_where_it_syncs(&mut self, id: FileId, errno: Errno) {
        // Told once, and heard now; or by a sync.
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

    /// The descriptor that syncs has told of a failure. The other one, that writes past the cache,
    /// would tell of the same behind the next write, which has nothing to do with it; unless that
    /// is under way.
    ///
    /// Returns  what it tells
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

    /// A request to its disk has failed since we began, or may have.
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
