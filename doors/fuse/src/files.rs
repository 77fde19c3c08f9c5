// SPDX-License-Identifier: Apache-2.0
//! Open files: the stub, its layout, and the objects that hold the bytes.
//!
//! All opens of an inode share one [`OpenFile`]. Its layout is read by many at once and changed by one alone; the size is the
//! stub's, grown after the bytes are in their object. Lock order: `Node::file`, `OpenFile::state`, then `size` or `objects`.

use crate::answer::Answer;
use crate::door::Door;
use crate::nodes::{Node, locked, status};
use rushes_pool::{
    Access, ByteCount, ByteOffset, ByteRange, Layout, Object, PoolError, SpillReason,
};
use rustix::fs::{Mode, OFlags, ftruncate, open};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Whether an inode's file is open, and how.
#[derive(Debug, Default)]
pub(crate) struct FileSlot {
    open_count: u64,
    open: Option<Arc<OpenFile>>,
    /// Its last name in the tree is gone; the stub waits among the removed ones.
    pub(crate) nameless: bool,
}

impl FileSlot {
    /// The open stub.
    pub(crate) fn stub(&self) -> Option<Arc<OwnedFd>> {
        self.open.as_ref().map(|file| Arc::clone(&file.stub))
    }

    /// Somebody has it open.
    pub(crate) fn is_open(&self) -> bool {
        self.open_count > 0
    }
}

/// One open inode.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) stub: Arc<OwnedFd>,
    state: RwLock<State>,
    /// Units: bytes.
    size: Mutex<u64>,
    /// No object reaches past the size: a crash may have left bytes there that were never acknowledged.
    tail_is_clean: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) layout: Option<Layout>,
    objects: Mutex<HashMap<Object, (Access, Arc<OwnedFd>)>>,
}

impl OpenFile {
    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn size(&self) -> u64 {
        *locked(&self.size)
    }

    /// Bytes up to `end` are written: the file is that long at least.
    ///
    /// Returns  false when it was before
    pub(crate) fn grow(&self, end: u64) -> Answer<bool> {
        let mut size = locked(&self.size);
        if end <= *size {
            return Ok(false);
        }
        ftruncate(&*self.stub, end)?;
        *size = end;
        Ok(true)
    }
}

impl Door {
    /// What a pool's trouble is answered; it is logged, since an errno says little.
    pub(crate) fn trouble(&self, node: &Node, error: &PoolError) -> Errno {
        let answer = error.errno();
        if answer != Errno::NOSPC {
            tracing::warn!("file {}: {error}", node.number);
        }
        answer
    }

    /// The kernel opens the file: one more open of it.
    pub(crate) fn open(&self, number: u64) -> Answer<()> {
        let node = self.nodes.get(number)?;
        self.open_file(&node).map(drop)
    }

    pub(crate) fn open_file(&self, node: &Arc<Node>) -> Answer<Arc<OpenFile>> {
        let fd = self.nodes.descriptor(node)?;
        let mut slot = locked(&node.file);
        if slot.open.is_none() {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
            let stub = match open(path.as_str(), flags | OFlags::RDWR, Mode::empty()) {
                Err(Errno::ROFS) => open(path.as_str(), flags | OFlags::RDONLY, Mode::empty()),
                opened => opened,
            }?;
            slot.open = Some(self.opened(node, stub)?);
        }
        slot.open_count += 1;
        slot.open.clone().ok_or(Errno::IO)
    }

    /// A file that was just made, with its descriptor.
    pub(crate) fn open_new_file(&self, node: &Arc<Node>, stub: OwnedFd) -> Answer<()> {
        let mut slot = locked(&node.file);
        if slot.open.is_none() {
            slot.open = Some(self.opened(node, stub)?);
        }
        slot.open_count += 1;
        Ok(())
    }

    fn opened(&self, node: &Node, stub: OwnedFd) -> Answer<Arc<OpenFile>> {
        let layout = self.pool.layout(stub.as_fd());
        let layout = layout.map_err(|error| self.trouble(node, &error))?;
        let size = status(&stub)?.stx_size;
        Ok(Arc::new(OpenFile {
            stub: Arc::new(stub),
            tail_is_clean: AtomicBool::new(layout.is_none()),
            state: RwLock::new(State {
                layout,
                objects: Mutex::default(),
            }),
            size: Mutex::new(size),
        }))
    }

    /// The kernel closes one open of it.
    pub(crate) fn release(&self, number: u64) -> Answer<()> {
        let node = self.nodes.get(number)?;
        let mut slot = locked(&node.file);
        slot.open_count = slot.open_count.saturating_sub(1);
        let last = if slot.open_count == 0 {
            slot.open.take()
        } else {
            None
        };
        let nameless = slot.nameless;
        drop(slot);
        if let Some(file) = &last {
            let state = file.state();
            if nameless {
                self.all_gone(&node, &state);
            }
            for object in locked(&state.objects).keys() {
                self.engine.closed(*object);
            }
        }
        if last.is_some() && nameless {
            self.something_removed();
        }
        Ok(())
    }

    /// The open file behind a request on it.
    pub(crate) fn file(&self, node: &Node) -> Answer<Arc<OpenFile>> {
        locked(&node.file).open.clone().ok_or(Errno::BADF)
    }

    /// An object's descriptor, for what is asked of it.
    pub(crate) fn object(
        &self,
        node: &Node,
        state: &State,
        object: Object,
        access: Access,
    ) -> Result<Arc<OwnedFd>, PoolError> {
        let _ = node;
        if let Some((had, fd)) = locked(&state.objects).get(&object)
            && (*had == Access::Write || access == Access::Read)
        {
            return Ok(Arc::clone(fd));
        }
        let layout = state.layout.as_ref().ok_or(PoolError::NoRoom)?;
        let fd = Arc::new(self.pool.open_object(layout, object, access)?);
        locked(&state.objects).insert(object, (access, Arc::clone(&fd)));
        Ok(fd)
    }

    /// See to it that the byte has a place: the first one, or another when where it was said "full" or is not there.
    pub(crate) fn make_place(
        &self,
        node: &Node,
        file: &OpenFile,
        wanted: ByteRange,
        why: Option<(Object, SpillReason)>,
    ) -> Answer<()> {
        let mut state = file.change();
        let mut layout = self.with_record(node, file, &mut state)?;
        let now = layout.locate(wanted.start).map(|located| located.object);
        let done = match why {
            // Somebody else moved it meanwhile: try there first.
            Some((object, _)) if now != Some(object) => return Ok(()),
            // Somebody has written behind it meanwhile, so that bytes may be there that cannot be had now.
            Some((_, SpillReason::Unwritable)) if wanted.start.0 < file.size() => {
                return Err(Errno::IO);
            }
            Some((_, reason)) => self
                .pool
                .spill(file.stub.as_fd(), &mut layout, wanted, reason),
            None => self.pool.place(file.stub.as_fd(), &mut layout, wanted),
        };
        self.let_go(&state, &layout);
        state.layout = Some(layout);
        self.all_changed(node, &state);
        done.map(drop).map_err(|error| self.trouble(node, &error))
    }

    /// Any byte of its objects may be another.
    fn all_changed(&self, node: &Node, state: &State) {
        for object in state.layout.iter().flat_map(Layout::objects) {
            // One that cannot be opened now, for want of descriptors perhaps, will be read later.
            let fd = self.object(node, state, object, Access::Read).ok();
            self.engine.changed(object, fd.as_ref(), 0, u64::MAX);
        }
    }

    /// All of its objects will be removed, also those that the daemon knows of an earlier open.
    fn all_gone(&self, node: &Node, state: &State) {
        for object in state.layout.iter().flat_map(Layout::objects) {
            if let Ok(fd) = self.object(node, state, object, Access::Read) {
                self.engine.gone(object, &fd);
            }
        }
    }

    /// Objects that the layout names no longer are removed, whoever has them open.
    fn let_go(&self, state: &State, layout: &Layout) {
        let named = layout.objects();
        locked(&state.objects).retain(|object, (_, fd)| {
            let is_named = named.contains(object);
            if !is_named {
                self.engine.gone(*object, fd);
                self.engine.closed(*object);
            }
            is_named
        });
    }

    /// The layout; a new one is written down before the file gets a size.
    fn with_record(&self, node: &Node, file: &OpenFile, state: &mut State) -> Answer<Layout> {
        if let Some(layout) = &state.layout {
            return Ok(layout.clone());
        }
        let made = self.pool.new_file().and_then(|identity| {
            let layout = Layout::new(identity);
            self.pool.set_layout(file.stub.as_fd(), &layout)?;
            Ok(layout)
        });
        let layout = made.map_err(|error| self.trouble(node, &error))?;
        state.layout = Some(layout.clone());
        Ok(layout)
    }

    /// Before bytes between the end and a place behind it become part of the file: they must read as zero.
    pub(crate) fn clean_tail(&self, node: &Node, file: &OpenFile) -> Answer<()> {
        if file.tail_is_clean.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut state = file.change();
        let size = file.size();
        self.cut(node, file, &mut state, size)?;
        file.tail_is_clean.store(true, Ordering::Release);
        Ok(())
    }

    fn cut(&self, node: &Node, file: &OpenFile, state: &mut State, size: u64) -> Answer<()> {
        let Some(mut layout) = state.layout.clone() else {
            return Ok(());
        };
        // By their descriptors those that go are told to the daemon, who may know them of an earlier open.
        for object in layout.clone().cut(ByteCount(size)) {
            let _ = self.object(node, state, object, Access::Read);
        }
        let done = self
            .pool
            .cut(file.stub.as_fd(), &mut layout, ByteCount(size));
        self.let_go(state, &layout);
        state.layout = Some(layout);
        self.all_changed(node, state);
        done.map_err(|error| self.trouble(node, &error))
    }

    /// truncate(2): objects first, so that a crash in between leaves zeros at the end and never old bytes behind it.
    pub(crate) fn set_length(&self, node: &Arc<Node>, size: u64) -> Answer<()> {
        let file = self.open_file(node)?;
        let done = self.set_length_open(node, &file, size);
        self.release(node.number)?;
        done
    }

    fn set_length_open(&self, node: &Node, file: &OpenFile, size: u64) -> Answer<()> {
        let before = file.size();
        if size > before {
            self.clean_tail(node, file)?;
        }
        let mut state = file.change();
        if size < before {
            self.cut(node, file, &mut state, size)?;
        } else if size > before {
            self.with_record(node, file, &mut state)?;
        }
        let mut length = locked(&file.size);
        ftruncate(&*file.stub, size)?;
        *length = size;
        Ok(())
    }
}

/// A range, from plain numbers.
pub(crate) fn range(start: u64, length: u64) -> ByteRange {
    ByteRange {
        start: ByteOffset(start),
        length: ByteCount(length),
    }
}
