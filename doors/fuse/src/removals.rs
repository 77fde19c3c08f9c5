// SPDX-License-Identifier: Apache-2.0
//! What happens to a file whose last name goes: its stub is moved aside, and its objects go when nobody has it open.
//!
//! The stub waits among the catalogue's removed ones, so that a crash forgets neither it nor its objects. They go in the background,
//! after the removal itself is durable: an object that went before its name could leave a name without bytes.

use crate::answer::Answer;
use crate::door::Door;
use crate::nodes::{Node, S_IFMT, S_IFREG, locked, status};
use rustix::fs::{
    AtFlags, Mode, OFlags, RawDir, RenameFlags, linkat, openat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Between two looks at what was removed.
const PAUSE: Duration = Duration::from_millis(500);
/// Between two burials: each has members write out what they have in their memories, which recorders beside it feel. Unless somebody
/// finds no room.
const REST: Duration = Duration::from_secs(5);

impl Door {
    /// The objects of this inode must outlive its name: whether that is its last, and it has or may get some.
    fn needs_burial(&self, victim: &OwnedFd, node: Option<&Arc<Node>>) -> Answer<bool> {
        let found = status(victim)?;
        let is_last = u32::from(found.stx_mode) & S_IFMT == S_IFREG && found.stx_nlink == 1;
        let is_open = node.is_some_and(|node| locked(&node.file).is_open());
        Ok(is_last && (is_open || found.stx_size > 0 || self.may_have_objects(victim)))
    }

    fn aside(&self, mut put: impl FnMut(&str) -> Answer<()>) -> Answer<String> {
        loop {
            let serial = self.removed_serial.fetch_add(1, Ordering::Relaxed);
            let name = format!("{:x}.{serial}", std::process::id());
            match put(&name) {
                Err(Errno::EXIST) => {}
                done => return done.map(|()| name),
            }
        }
    }

    /// unlink(2). Links of one file are made and removed one at a time, so that the last is seen as such.
    pub(crate) fn remove_name(
        &self,
        folder: &OwnedFd,
        name: &OsStr,
        victim: &OwnedFd,
    ) -> Answer<()> {
        let _links = locked(&self.links);
        let node = self.nodes.find(victim)?;
        if !self.needs_burial(victim, node.as_ref())? {
            return unlinkat(folder, name, AtFlags::empty());
        }
        let removed = self.pool.catalogue().removed();
        self.aside(|aside| renameat_with(folder, name, removed, aside, RenameFlags::NOREPLACE))?;
        self.nameless(node);
        Ok(())
    }

    /// `replace` puts something else under the victim's name.
    pub(crate) fn replace_name(
        &self,
        victim: &OwnedFd,
        replace: impl FnOnce() -> Answer<()>,
    ) -> Answer<()> {
        let _links = locked(&self.links);
        let node = self.nodes.find(victim)?;
        if !self.needs_burial(victim, node.as_ref())? {
            return replace();
        }
        let removed = self.pool.catalogue().removed();
        let aside = self.aside(|aside| linkat(victim, c"", removed, aside, AtFlags::EMPTY_PATH))?;
        let done = replace();
        if done.is_err() || status(victim)?.stx_nlink > 1 {
            // It kept its name, for instance as another name of what was moved onto it.
            unlinkat(removed, aside.as_str(), AtFlags::empty())?;
            return done;
        }
        self.nameless(node);
        Ok(())
    }

    /// Files that are open since processes before this one, and have lost their last name. One that still has a name was about to be replaced.
    ///
    /// Assumes  nobody asks us yet
    pub(crate) fn know_nameless(&self) -> Answer<()> {
        let removed = self.pool.catalogue().removed();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(removed, c".", flags, Mode::empty())?;
        let mut room = Vec::with_capacity(8192);
        let mut names = Vec::new();
        let mut entries = RawDir::new(folder, room.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            if self.has_open(entry.ino()) {
                names.push(entry.file_name().to_owned());
            }
        }
        for name in names {
            let found = statat(removed, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if found.st_nlink > 1 {
                unlinkat(removed, &name, AtFlags::empty())?;
            } else if let Ok(node) = self.nodes.get(self.nodes.number_of(found.st_ino)) {
                locked(&node.file).nameless = true;
            }
        }
        Ok(())
    }

    /// Whether the file is open whose stub has this inode number.
    pub(crate) fn has_open(&self, inode: u64) -> bool {
        let node = self.nodes.get(self.nodes.number_of(inode));
        node.is_ok_and(|node| locked(&node.file).is_open())
    }

    fn nameless(&self, node: Option<Arc<Node>>) {
        if let Some(node) = node {
            locked(&node.file).nameless = true;
        }
        self.something_removed();
    }

    /// The thread that buries has something to do.
    pub(crate) fn something_removed(&self) {
        self.removed_waits.store(true, Ordering::Release);
    }

    /// Until the door closes.
    pub(crate) fn bury_now_and_then(&self) {
        let mut last: Option<Instant> = None;
        while !self.closing.load(Ordering::Acquire) {
            std::thread::park_timeout(PAUSE);
            let has_rested = last.is_none_or(|last| last.elapsed() >= REST);
            let is_wanted = self.room_is_wanted.swap(false, Ordering::AcqRel);
            if !has_rested && !is_wanted {
                continue;
            }
            if self.removed_waits.swap(false, Ordering::AcqRel) {
                self.bury();
                last = Some(Instant::now());
            }
        }
        self.bury();
    }

    /// Not beside the opening of a file by its stub: that one has a name, or is known to be open.
    pub(crate) fn bury(&self) {
        let _burying = locked(&self.burying);
        let links = || locked(&self.links);
        match self.pool.bury(|inode| self.has_open(inode), links) {
            Ok(buried) => {
                if buried.left_count > 0 {
                    self.something_removed();
                }
                for error in buried.kept {
                    tracing::warn!("a removed file keeps its place for now: {error}");
                }
            }
            Err(error) => tracing::warn!("{error}"),
        }
    }
}
