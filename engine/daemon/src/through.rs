// SPDX-License-Identifier: Apache-2.0
//! Reads of what the kernel has in its cache.
//!
//! Files are read past the kernel's cache. What others than we wrote may be there and nowhere else: a disk that refuses a write loses the page, and the
//! kernel goes on showing it to everybody who reads as usual, whoever wrote it and whoever was told of the error. And to read past the cache has the
//! kernel write first what it has not written: on a disk that fails our read would be what loses it. So a range of which the kernel has all is
//! read from there, which takes no disk either; and one with anything that is not written yet; and, on a disk that has failed, or where
//! it is little, one of which the kernel has anything at all. (More of it would be read by and by, in the kernel's small pieces.)

use crate::event_loop::Daemon;
use crate::files::File;
use rushes_core::server::IoRead;
use rushes_core::units::FileId;
use rushes_sys::cached::cached_pages;
use rushes_sys::file::through_the_cache;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// So much the kernel reads in no time longer in its pieces than we do at once. Units: bytes.
const LITTLE: u64 = 1 << 20;

impl Daemon {
    /// By which descriptor a read goes. None: the file is not open.
    pub(super) fn reads_by(&mut self, read: &IoRead) -> Option<Arc<OwnedFd>> {
        let file = self.files.get(read.file)?;
        if !read.buffered && !self.is_in_the_cache(file, read) {
            return Some(Arc::clone(&file.fd));
        }
        if let Some(fd) = file.through() {
            return Some(Arc::clone(fd));
        }
        let fd = match through_the_cache(&*file.fd) {
            Some(fd) => Arc::new(fd),
            // Served that way all the time; or we have no descriptor left, and the disk is asked.
            None => return Some(Arc::clone(&file.fd)),
        };
        let file = self.files.get_mut(read.file)?;
        file.through = Some(Arc::clone(&fd));
        self.files.count_again(read.file);
        Some(fd)
    }

    fn is_in_the_cache(&self, file: &File, read: &IoRead) -> bool {
        let has_failed = self.failed_disks.contains(&file.key.device);
        let Ok(found) = cached_pages(&*file.fd, read.range) else {
            // Linux before 6.5 does not say.
            return has_failed;
        };
        let is_little = has_failed || read.range.length.0 <= LITTLE;
        found.unwritten_count > 0
            || found.is_all_of(read.range, file.size)
            || (is_little && found.count > 0)
    }

    /// A request to a file's disk failed.
    pub(super) fn disk_failed(&mut self, file: FileId) {
        if let Some(file) = self.files.get(file) {
            self.failed_disks.insert(file.key.device);
        }
    }
}
