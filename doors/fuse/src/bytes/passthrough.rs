// SPDX-License-Identifier: Apache-2.0
//! How the kernel reads and writes each open of a file: through its cache, past it, or straight
//! from the object (passthrough).
//!
//! The door does not see reads straight from the object. So they are for a program that opens a
//! file only to read it, while no program writes to it, no daemon serves its reads, and all its
//! bytes are in one object, byte for byte. As long as there is such an open, or a mapping that such
//! an open left behind, the object stays where it is and as long as the file is. The kernel reports
//! the close, not the end of a mapping. Decision: docs/decisions/0033.
//!
//! The kernel (fs/fuse/iomode.c) lets an inode be open through its cache or by passthrough, not
//! both. While there are opens by passthrough, each further open is one, too, if need be for its
//! mappings alone.

use crate::bytes::files::{OpenFile, State};
use crate::bytes::lines::Line;
use crate::bytes::stored::Stored;
use crate::daemon::Changed;
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::kernel::protocol::Backing;
use crate::lock::locked;
use crate::tree::nodes::Node;
use rushes_pool::{Access, ByteOffset, MemberNumber, Object, PoolError};
use rushes_sys::lease;
use rustix::fs::{OFlags, fstat, ftruncate};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How the kernel does reads and writes of one open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Through its cache.
    Cached,
    /// Past it. Only for writing: without a write cache, the kernel's cache would cost a copy.
    Direct,
    /// By passthrough; or for mappings alone, while reads and writes come to the door.
    Passed { writes: bool },
}

/// The answer to the kernel about an open.
pub(crate) struct OpenReply {
    pub(crate) way: Way,
    /// For passthrough: the object's registration with the kernel, and whether reads and writes
    /// also bypass the door, beside mappings.
    pub(crate) backing: Option<(Arc<Backing>, bool)>,
}

impl OpenReply {
    /// The way of all opens where the mount outlives the process.
    pub(crate) fn cached() -> OpenReply {
        OpenReply {
            way: Way::Cached,
            backing: None,
        }
    }
}

/// The kernel's opens of a file.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    cached: u64,
    direct: u64,
    passed: u64,
    /// The object of passthrough. It may still be mapped when no such open is left.
    object: Option<Object>,
    /// That object's registration with the kernel, while there are such opens.
    backing: Option<Arc<Backing>>,
}

impl Ways {
    /// For a file that is not open; its last close left an object that may be mapped.
    pub(crate) fn of_mapped(object: Option<Object>) -> Ways {
        Ways {
            object,
            ..Ways::default()
        }
    }

    /// The object that programs may read without the door.
    pub(crate) fn object(&self) -> Option<Object> {
        self.object
    }

    /// See [`OpenFile::pass`].
    pub(crate) fn set_object(&mut self, object: Option<Object>) {
        self.object = object;
    }

    /// Whether no such open is left, but perhaps a mapping.
    fn is_mapped_at_most(&self) -> bool {
        self.object.is_some() && self.passed == 0
    }

    fn add(&mut self, way: Way) -> Way {
        *self.count(way) += 1;
        way
    }

    fn count(&mut self, way: Way) -> &mut u64 {
        match way {
            Way::Cached => &mut self.cached,
            Way::Direct => &mut self.direct,
            Way::Passed { .. } => &mut self.passed,
        }
    }
}

impl Door {
    /// Does work that may look at the object with the first byte of a file; each open does, where
    /// passthrough is possible. The work goes into the member's line if many threads wait for its
    /// disk, and into the file's while a thread changes the file.
    pub(crate) fn at_home(&self, number: u64, act: impl FnOnce() + Send + 'static) {
        if self.is_changing(number) {
            return self.lines.put(Line::File(number), act);
        }
        let member = match self.can_pass.load(Ordering::Acquire) {
            true => self.home(number),
            false => None,
        };
        let Some(member) = member.filter(|number| !self.pool.is_lost(*number)) else {
            return act();
        };
        match self.lines.enter(member) {
            Some(_inside) => act(),
            None => self.lines.put(Line::Disk(member), act),
        }
    }

    fn is_changing(&self, number: u64) -> bool {
        let file = self.nodes.get(number).ok();
        let file = file.and_then(|node| locked(&node.file).open_file());
        file.is_some_and(|file| file.shared_state_now().is_none())
    }

    /// The member of the file's first byte, by its layout.
    fn home(&self, number: u64) -> Option<MemberNumber> {
        let node = self.nodes.get(number).ok()?;
        let fd = self.nodes.descriptor(&node).ok()?;
        let layout = self.layout_by_path(&fd)?;
        Some(layout.locate(ByteOffset(0))?.object.member)
    }

    /// Chooses the way of this open. `register` registers an object with the kernel.
    ///
    /// Assumes  `file` was opened for it
    pub(crate) fn way(
        &self,
        node: &Node,
        file: &OpenFile,
        flags: i32,
        register: impl FnOnce(&OwnedFd) -> io::Result<Backing>,
    ) -> Answer<OpenReply> {
        let flags = OFlags::from_bits_retain(flags as u32);
        let access = flags & OFlags::ACCMODE;
        let is_mapped_at_most = locked(&file.ways).is_mapped_at_most();
        if is_mapped_at_most {
            // Perhaps the last mapping is gone.
            self.check_passed(node, file, &file.change());
        }
        // A thread that changes the layout locks the state alone: it comes before this, or sees it.
        let state = file.state();
        let mut ways = locked(&file.ways);
        let is_first = ways.object.is_none();
        if is_first {
            let object = match access == OFlags::RDONLY && !flags.contains(OFlags::DIRECT) {
                true if ways.cached + ways.direct == 0 => self.passable_object(node, file, &state),
                _ => None,
            };
            file.pass(&mut ways, object);
        }
        let Some(object) = ways.object else {
            let is_direct = access == OFlags::WRONLY && self.can_pass.load(Ordering::Acquire);
            let way = ways.add(if is_direct { Way::Direct } else { Way::Cached });
            return Ok(OpenReply { way, backing: None });
        };
        let is_lost = self.pool.is_lost(object.member);
        if is_lost && access != OFlags::WRONLY {
            // As long as the file is open the kernel would direct each mapping of it to the lost
            // object.
            return Err(Errno::IO);
        }
        let mut is_away = false;
        let backing = match &ways.backing {
            Some(backing) => Ok(Arc::clone(backing)),
            None => self
                .object(node, &state, object, Access::Read)
                .map_err(|error| {
                    is_away = matches!(error, PoolError::Missing { .. } | PoolError::Lost { .. });
                    self.trouble(node, &error)
                })
                .and_then(|fd| {
                    register(&fd).map(Arc::new).map_err(|error| {
                        // A member that is stacked on another file system gets this at each open.
                        tracing::debug!("file {}: no passthrough: {error}", node.number);
                        Errno::IO
                    })
                }),
        };
        let backing = match backing {
            Ok(backing) => backing,
            Err(_) if is_first => {
                file.pass(&mut ways, None);
                let way = ways.add(Way::Cached);
                return Ok(OpenReply { way, backing: None });
            }
            // A program may have it mapped still, and no call answers that. A program that opens it
            // now gets the same errors as for any file there, and bytes that it adds get a place on
            // another member.
            Err(_) if is_away && ways.passed == 0 => {
                let way = ways.add(Way::Cached);
                return Ok(OpenReply { way, backing: None });
            }
            Err(error) => return Err(error),
        };
        let is_whole =
            access == OFlags::RDONLY && self.whole_object(node, file, &state) == Some(object);
        let writes = access != OFlags::RDONLY;
        if writes && !is_lost {
            self.begin_stores(node, file, &state, object)?;
        }
        ways.backing = Some(Arc::clone(&backing));
        let way = ways.add(Way::Passed { writes });
        self.tidying.passed_begins();
        Ok(OpenReply {
            way,
            backing: Some((backing, is_whole)),
        })
    }

    /// Begins to follow stores: the opener may map the object and store there.
    fn begin_stores(
        &self,
        node: &Node,
        file: &OpenFile,
        state: &State,
        object: Object,
    ) -> Answer<()> {
        let mut stored = locked(&file.stored);
        if stored.is_none() {
            let fd = self.object(node, state, object, Access::Read);
            let fd = fd.map_err(|error| self.trouble(node, &error))?;
            *stored = Some(Stored::begin(&fd)?);
            // For a while the kernel would go on using the times that it got of the file.
            if let Some(notices) = self.notices.get() {
                notices.forget_attributes(node.number);
            }
        }
        Ok(())
    }

    /// The kernel closes an open of this way.
    pub(crate) fn way_ends(&self, node: &Arc<Node>, file: &OpenFile, way: Way) {
        if way == (Way::Passed { writes: true }) {
            self.follow_stores_open(node, file);
        }
        let mut ways = locked(&file.ways);
        let count = ways.count(way);
        *count = count.saturating_sub(1);
        if matches!(way, Way::Passed { .. }) {
            self.tidying.passed_ends();
        }
        let last = match ways.passed {
            0 => ways.backing.take(),
            _ => None,
        };
        drop(ways);
        // The kernel is called with no lock held.
        drop(last);
    }

    fn follow_stores_open(&self, node: &Arc<Node>, file: &OpenFile) {
        if let Some(stored) = &mut *locked(&file.stored) {
            self.follow_stores(node, &*file.stub, stored);
        }
    }

    /// The object that has all bytes of the file, byte for byte, and no more.
    fn whole_object(&self, node: &Node, file: &OpenFile, state: &State) -> Option<Object> {
        let [segment] = state.layout.as_ref()?.segments() else {
            return None;
        };
        let [object] = segment.objects[..] else {
            return None;
        };
        let fd = self.object(node, state, object, Access::Read).ok()?;
        let length = fstat(&*fd).ok()?.st_size as u64;
        (segment.origin.0 == 0 && length == file.size()).then_some(object)
    }

    /// The object that the kernel may read itself. None: the door must see the reads.
    fn passable_object(&self, node: &Node, file: &OpenFile, state: &State) -> Option<Object> {
        if !self.can_pass.load(Ordering::Acquire) || file.size() == 0 {
            return None;
        }
        let object = self.whole_object(node, file, state)?;
        let fd = self.object(node, state, object, Access::Read).ok()?;
        // A move of bytes off a draining member would have to wait for their readers.
        let stays = self.pool.takes_bytes(object.member);
        (stays && self.sessions.may_pass(object, &fd)).then_some(object)
    }

    /// Checks whether a program may read the file's object without the door. When no such open is
    /// left, this asks the kernel for mappings and remembers the answer.
    ///
    /// Assumes  `state`: locked alone
    pub(crate) fn check_passed(&self, node: &Node, file: &OpenFile, state: &State) -> bool {
        let mut ways = locked(&file.ways);
        let Some(object) = ways.object else {
            return false;
        };
        if ways.passed > 0 {
            // Its member was given up: a program that has it open keeps the rest of the object, and
            // the file goes on without it.
            return !self.pool.is_lost(object.member);
        }
        // No thread uses our own descriptors now; the kernel would take them for another program's.
        state.forget(object);
        let is_elsewhere = match self.object(node, state, object, Access::Read) {
            Ok(fd) => lease::is_open_elsewhere(&fd).unwrap_or(true),
            // A program that has it mapped keeps the rest of it.
            Err(PoolError::Object { .. } | PoolError::NoRoom | PoolError::Lost { .. }) => false,
            Err(_) => true,
        };
        if !is_elsewhere {
            if let Ok(node) = self.nodes.get(node.number) {
                self.follow_stores_open(&node, file);
            }
            *locked(&file.stored) = None;
            file.pass(&mut ways, None);
        }
        is_elsewhere
    }

    /// Extends an object that is read without the door to the file's end: for such readers the
    /// object's end is the file's end.
    ///
    /// Assumes  `state`: locked alone
    pub(crate) fn stretch(
        &self,
        node: &Node,
        file: &OpenFile,
        state: &State,
        size: u64,
    ) -> Answer<()> {
        let Some(last) = size.checked_sub(1) else {
            return Ok(());
        };
        if !self.check_passed(node, file, state) {
            return Ok(());
        }
        let passed = locked(&file.ways).object;
        let located = state
            .layout
            .as_ref()
            .and_then(|layout| layout.locate(ByteOffset(last)));
        let Some(located) = located.filter(|located| Some(located.object) == passed) else {
            return Ok(());
        };
        let fd = self.object(node, state, located.object, Access::Write);
        let fd = fd.map_err(|error| self.trouble(node, &error))?;
        let length = fstat(&*fd)?.st_size as u64;
        if length < size {
            let mut held = self
                .sessions
                .hold(vec![(located.object, Arc::clone(&fd))])?;
            ftruncate(&*fd, size)?;
            held.what = Changed::Bytes {
                offset: length,
                length: size - length,
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_passed_may_be_mapped_until_the_kernel_says_otherwise() {
        let object = Object {
            member: rushes_pool::MemberNumber(1),
            id: rushes_pool::ObjectId(2),
        };
        let mut ways = Ways::of_mapped(Some(object));
        assert!(ways.is_mapped_at_most());
        ways.add(Way::Passed { writes: true });
        assert!(!ways.is_mapped_at_most(), "it is open");
        *ways.count(Way::Passed { writes: false }) -= 1;
        assert!(ways.is_mapped_at_most());
        assert!(!Ways::of_mapped(None).is_mapped_at_most());
    }
}
