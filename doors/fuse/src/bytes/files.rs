// SPDX-License-Identifier: Apache-2.0
//! Open files: the stub, its layout, and the objects that hold the bytes.
//!
//! All opens of an inode share one [`OpenFile`]. Many threads read its layout at once, one alone
//! changes it; the size is the stub's, which grows after the bytes are in their object. Lock order:
//! `Node::file`, `OpenFile::state`, `ways`, then `size`, `objects` or `stored`.

use crate::bytes::descriptors::{Opener, Share};
use crate::bytes::passthrough::{OpenReply, Way, Ways};
use crate::bytes::spare::{Asked, Spare};
use crate::bytes::stored::Stored;
use crate::daemon::{Changed, Held, LOOSE_PATIENCE, Sessions, only_object};
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::kernel::protocol::Backing;
use crate::kernel::table::{KnownOpen, Place, Unique};
use crate::lock::locked;
use crate::tree::attributes::by_descriptor;
use crate::tree::nodes::{Node, TRIES_MAX, status};
use parking_lot::lock_api::ArcRwLockReadGuard;
use parking_lot::{RawRwLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rushes_core::stream::FrameName;
use rushes_core::units::FilePart;
use rushes_pool::{
    Access, ByteCount, ByteOffset, ByteRange, Layout, Object, PoolError, Readers, Segment, Shape,
    SpillReason,
};
use rushes_sys::SysError;
use rustix::fs::{Mode, OFlags, fdatasync, fsync, ftruncate, open, readlink};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// After so many writes in a row that the daemon left to the door, the door asks it about one write
/// in [`ASK_EVERY`] only.
const PLAIN_RUN_MAX: u32 = 8;
const ASK_EVERY: u32 = 64;
/// Between two tries to hold objects whose bytes the daemon is writing again.
const TRY_EVERY: Duration = Duration::from_millis(50);
/// A multiple of the kernel's pages, on any machine. Units: bytes.
const PAGE_MULTIPLE: u64 = 65536;

/// Whether an inode's file is open, and how.
#[derive(Debug, Default)]
pub(crate) struct FileSlot {
    /// Opens by the kernel and by the door itself.
    open_count: u64,
    /// The kernel's opens by file handle: the way of each, and its place in the table for the next
    /// process. A close that comes a second time finds none.
    handles: HashMap<u64, (Way, Option<Place>)>,
    /// The number of failures in [`OpenFile::sync_failed`] that each open has got; a missing entry
    /// means none.
    heard: HashMap<u64, u64>,
    open: Option<Arc<OpenFile>>,
    /// The flag of [`OpenFile`] at the last close: a program that opens the file again to go on
    /// writing does not wait for the disk.
    tail_is_clean: bool,
    /// The object in [`Ways`] at the last close: a mapping outlives the close of its file. The
    /// kernel does not forget an inode that is mapped.
    mapped: Option<Mapped>,
    /// Its last name in the tree is gone; the stub lies among the removed ones.
    pub(crate) nameless: bool,
    /// The instant of that, if this process saw it.
    pub(crate) nameless_since: Option<Instant>,
}

/// An object that the kernel read by passthrough, of a file that is not open.
#[derive(Debug)]
struct Mapped {
    object: Object,
    stored: Option<Stored>,
}

impl FileSlot {
    /// Whether a program may store to it without the door.
    pub(crate) fn may_be_stored(&mut self) -> bool {
        self.with_stored(|_| ()).is_some()
    }

    /// None: no program may do that.
    pub(crate) fn with_stored<T>(&mut self, act: impl FnOnce(&mut Stored) -> T) -> Option<T> {
        match &self.open {
            Some(file) => locked(&file.stored).as_mut().map(act),
            None => self.mapped.as_mut()?.stored.as_mut().map(act),
        }
    }

    /// The open stub.
    pub(crate) fn stub(&self) -> Option<Arc<OwnedFd>> {
        self.open.as_ref().map(|file| Arc::clone(&file.stub))
    }

    /// The state that its opens share.
    pub(crate) fn open_file(&self) -> Option<Arc<OpenFile>> {
        self.open.clone()
    }

    /// Whether the file is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open_count > 0
    }

    /// The number of its opens.
    pub(crate) fn open_count(&self) -> u64 {
        self.open_count
    }
}

/// One open inode.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) stub: Arc<OwnedFd>,
    state: Arc<RwLock<State>>,
    /// Units: bytes.
    size: Mutex<u64>,
    /// No object reaches past the size. A crash may have left bytes there that were never
    /// acknowledged.
    tail_is_clean: AtomicBool,
    /// Writes in a row that the daemon left to the door.
    plain_run: AtomicU32,
    /// The [`Pool::generation`](rushes_pool::Pool::generation) at which the door last tried to
    /// stripe the file over more members.
    seen_generation: AtomicU64,
    /// Changes of the layout. A file just opened counts as changed, since an earlier process may
    /// have changed it.
    layout_changes: AtomicU64,
    /// So many of these changes are surely durable.
    layout_changes_durable: AtomicU64,
    sync_failures: Arc<SyncFailures>,
    /// The kernel's opens. A thread that waits for a disk may hold this lock.
    pub(crate) ways: Mutex<Ways>,
    /// The ways have an object.
    is_passed: AtomicBool,
    /// A program may store to that object without the door.
    pub(crate) stored: Mutex<Option<Stored>>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) layout: Option<Layout>,
    stub: Arc<OwnedFd>,
    objects: Mutex<HashMap<Object, OpenObject>>,
    /// Its descriptors: the stub's, and that of one object.
    _share: Share,
    own: Weak<RwLock<State>>,
    sync_failures: Arc<SyncFailures>,
}

/// How often a sync of the file failed, and the error of the last failure.
#[derive(Debug)]
pub(crate) struct SyncFailures {
    known: Mutex<(u64, Errno)>,
    /// A thread that asks the kernel for write errors holds it for reading until the answer is
    /// entered.
    pub(crate) asking: RwLock<()>,
}

impl SyncFailures {
    fn none() -> SyncFailures {
        SyncFailures {
            known: Mutex::new((0, Errno::IO)),
            asking: RwLock::default(),
        }
    }

    pub(crate) fn one_more(&self, error: Errno) {
        let mut known = locked(&self.known);
        *known = (known.0 + 1, error);
    }
}

/// An object that is, or was, open.
#[derive(Debug)]
struct OpenObject {
    access: Access,
    /// None: it was closed.
    fd: Option<Arc<OwnedFd>>,
    /// Its descriptor counts with the file.
    is_first: bool,
    /// For each object but the first, as long as it is open.
    spare: Option<Spare>,
    /// It is in the list of those to close ([`Spares::keep`](crate::bytes::spare::Spares::keep)).
    is_named: bool,
    /// It was used since the last look for descriptors to close.
    is_recent: bool,
    /// A program may have written by its descriptor.
    was_written: bool,
    /// And since then no thread asked the kernel for its write errors. A descriptor that is opened
    /// at once also gets an error that no descriptor has got yet.
    is_unasked: bool,
    /// The door changed it by its descriptor, past the daemon, and has not synced it since.
    owes_sync: bool,
}

impl OpenObject {
    fn closed(is_first: bool) -> OpenObject {
        OpenObject {
            access: Access::Read,
            fd: None,
            is_first,
            spare: None,
            is_named: false,
            is_recent: false,
            was_written: false,
            is_unasked: false,
            owes_sync: false,
        }
    }

    /// Its descriptor, if that allows the access.
    fn open_for(&self, access: Access) -> Option<&Arc<OwnedFd>> {
        let fits = self.access == Access::Write || access == Access::Read;
        self.fd.as_ref().filter(|_| fits)
    }
}

impl State {
    /// Its descriptor, if it is open.
    pub(crate) fn known(&self, object: Object) -> Option<Arc<OwnedFd>> {
        let mut objects = locked(&self.objects);
        let open = objects.get_mut(&object)?;
        open.is_recent = true;
        open.fd.clone()
    }

    /// Closes its descriptor, if it is not the first and was not used since the last call. Waits
    /// for no disk.
    ///
    /// `is_asked`  the caller asked the kernel for write errors, unless it was used since
    ///
    /// Assumes  this state: locked alone
    pub(crate) fn close_spare(
        &self,
        object: Object,
        sessions: Option<&Weak<Sessions>>,
        is_asked: bool,
    ) -> Asked {
        let fd = {
            let mut objects = locked(&self.objects);
            let Some(open) = objects.get_mut(&object) else {
                return Asked::None;
            };
            if open.spare.is_none() {
                open.is_named = false;
                return Asked::None;
            }
            if std::mem::take(&mut open.is_recent) {
                return Asked::Stays;
            }
            if open.is_unasked && !is_asked {
                return Asked::Written;
            }
            open.is_unasked = false;
            open.is_named = false;
            open.spare = None;
            open.fd.take()
        };
        drop(fd);
        if let Some(sessions) = sessions.and_then(Weak::upgrade) {
            sessions.closed(object);
        }
        Asked::Closed
    }

    /// The descriptor by which the caller asks the kernel for write errors before that, and the
    /// failures to which the answer is added. None: it was used since [`State::close_spare`]
    /// returned `Written`.
    ///
    /// Assumes  this state: locked alone
    pub(crate) fn written_spare(
        &self,
        object: Object,
    ) -> Option<(Arc<OwnedFd>, Arc<SyncFailures>)> {
        let objects = locked(&self.objects);
        let open = objects.get(&object)?;
        let may_go = open.spare.is_some() && open.is_unasked && !open.is_recent;
        let fd = open.fd.as_ref().filter(|_| may_go)?;
        Some((Arc::clone(fd), Arc::clone(&self.sync_failures)))
    }

    /// The door changes it by its descriptor, past the daemon: the daemon does not know those
    /// bytes, and cannot write them again if the kernel loses them.
    pub(crate) fn note_owed_sync(&self, object: Object) {
        if let Some(open) = locked(&self.objects).get_mut(&object) {
            open.owes_sync = true;
        }
    }

    /// Whether that happened since the last call.
    pub(crate) fn take_owed_sync(&self, object: Object) -> bool {
        let mut objects = locked(&self.objects);
        let open = objects.get_mut(&object);
        open.is_some_and(|open| std::mem::take(&mut open.owes_sync))
    }

    /// Forgets an object whose member was given up. Returns whether a program may have written by
    /// its descriptor.
    pub(crate) fn forget_written(&self, object: Object) -> bool {
        let had = locked(&self.objects).remove(&object);
        had.is_some_and(|open| open.was_written)
    }

    /// Closes an object's descriptor. All else that is known of it stays, since the door opens it
    /// again at once.
    pub(crate) fn forget(&self, object: Object) {
        if let Some(open) = locked(&self.objects).get_mut(&object) {
            open.fd = None;
            open.spare = None;
        }
    }
}

/// The fate of room that is reserved behind the end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// It is for the bytes that come next.
    Stays,
    /// It is freed.
    Goes,
}

/// The lock on a file's state, for reading; other threads read it meanwhile.
pub(crate) type SharedState = ArcRwLockReadGuard<RawRwLock, State>;

impl OpenFile {
    /// A write behind the end failed, and may have left bytes there.
    pub(crate) fn tail_is_unclean(&self) {
        self.tail_is_clean.store(false, Ordering::Release);
    }

    /// Whether the door asks the daemon to take a write. If the daemon has left the writes of a
    /// file to the door again and again, for example where it can reserve nothing, the door asks
    /// only now and then.
    pub(crate) fn asks_daemon(&self) -> bool {
        let run = self.plain_run.load(Ordering::Relaxed);
        run < PLAIN_RUN_MAX || run.is_multiple_of(ASK_EVERY)
    }

    /// A program may read its object without the door.
    pub(crate) fn may_be_passed(&self) -> bool {
        self.is_passed.load(Ordering::Acquire)
    }

    /// From now on programs may read this object without the door. None: no program reads it so.
    pub(crate) fn pass(&self, ways: &mut Ways, object: Option<Object>) {
        ways.set_object(object);
        self.is_passed.store(object.is_some(), Ordering::Release);
    }

    /// Counts whether the daemon took the write.
    pub(crate) fn was_taken(&self, taken: bool) {
        if taken {
            self.plain_run.store(0, Ordering::Relaxed);
        } else {
            self.plain_run.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read()
    }

    /// The same, for another thread to release.
    pub(crate) fn shared_state(&self) -> SharedState {
        self.state.read_arc()
    }

    /// The same, if no thread changes it or waits to change it.
    pub(crate) fn shared_state_now(&self) -> Option<SharedState> {
        self.state.try_read_arc()
    }

    /// Sets the new layout.
    ///
    /// Assumes  `state`: locked alone, and the stub has the layout already
    pub(crate) fn set_layout(&self, state: &mut State, layout: Layout) {
        state.layout = Some(layout);
        self.layout_changes.fetch_add(1, Ordering::Release);
    }

    /// Makes the stub durable, and with it a layout that was changed under the lock of `state`,
    /// which this releases first.
    ///
    /// `data_only`  times may wait. fdatasync(2) of ext4 lets every attribute wait as long as the
    /// length is the same, so it is used only if the layout is durable already.
    pub(crate) fn sync_stub(
        &self,
        state: RwLockReadGuard<'_, State>,
        data_only: bool,
    ) -> Answer<()> {
        let changes = self.layout_changes.load(Ordering::Acquire);
        drop(state);
        if data_only && self.layout_changes_durable.load(Ordering::Acquire) >= changes {
            return fdatasync(&*self.stub);
        }
        fsync(&*self.stub)?;
        self.layout_changes_durable
            .fetch_max(changes, Ordering::AcqRel);
        Ok(())
    }

    /// Waits for the thread that asks the kernel for write errors before it closes one of the
    /// file's objects: spare.rs. By then that thread has passed on its error: the kernel reports an
    /// error once, and perhaps only to that thread.
    pub(crate) fn wait_for_who_asks(&self) {
        drop(self.sync_failures.asking.write());
    }

    /// The written bytes may not be on their disk.
    pub(crate) fn sync_failed(&self, error: Errno) {
        self.sync_failures.one_more(error);
    }

    /// The state, locked alone.
    pub(crate) fn change(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }

    /// The same, if no thread reads or changes it.
    pub(crate) fn change_now(&self) -> Option<RwLockWriteGuard<'_, State>> {
        self.state.try_write()
    }

    pub(crate) fn size(&self) -> u64 {
        *locked(&self.size)
    }

    /// The bytes up to `end` are written: makes the file at least that long.
    ///
    /// Returns  false when it was that long before
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
    /// The errno for an error of the pool. The error is logged, since an errno says little.
    pub(crate) fn trouble(&self, node: &Node, error: &PoolError) -> Errno {
        let answer = error.errno();
        match error {
            // The log has one line on that member (failing.rs).
            PoolError::Failing { .. } | PoolError::Missing { .. } | PoolError::ReadOnly { .. } => {
                tracing::debug!("{}: {error}", self.name_of(node));
            }
            // Members outside the class may have room, so the cause would be hard to find.
            PoolError::ClassFull { class } => {
                if locked(&self.full_classes).insert(class.clone()) {
                    tracing::warn!("{}: {error}", self.name_of(node));
                }
            }
            PoolError::KeptForCatalogue { .. } | PoolError::CatalogueFull { .. } => {
                self.say_once(error.to_string());
            }
            PoolError::LayoutTooLong { .. } => {
                self.say_once(format!("{}: {error}", self.name_of(node)));
            }
            _ if matches!(answer, Errno::NOSPC | Errno::DQUOT) => {}
            _ => tracing::warn!("{}: {error}", self.name_of(node)),
        }
        answer
    }

    /// The name of a file in the log: its path if that can be found, in quotes, since a name may
    /// have any byte in it.
    pub(crate) fn name_of(&self, node: &Node) -> String {
        let fd = self.nodes.descriptor_now(node);
        match fd.and_then(|fd| self.path_of(&fd)) {
            Some(path) if path != Path::new("") => format!("{path:?}"),
            _ => format!("file {} (which has no name)", node.number),
        }
    }

    /// The kernel opens the file: counts one more open. `register` registers an object with the
    /// kernel, which may then read it itself.
    ///
    /// Returns  the file handle, and how the file is opened
    pub(crate) fn open(
        &self,
        number: u64,
        flags: i32,
        (asked, opener): (Unique, Opener),
        register: impl FnOnce(&OwnedFd) -> io::Result<Backing>,
    ) -> Answer<(u64, OpenReply)> {
        let node = self.nodes.get(number)?;
        let share = || self.descriptors.take_for(opener);
        let open = || self.open_file_with(&node, share);
        let (handle, opened) = self.open_for_kernel(&node, flags, (asked, register), open)?;
        self.sessions.opened_by(number, handle, opener);
        Ok((handle, opened))
    }

    /// `open` counts one more open of the file, which gets a file handle.
    pub(crate) fn open_for_kernel(
        &self,
        node: &Arc<Node>,
        flags: i32,
        (asked, register): (Unique, impl FnOnce(&OwnedFd) -> io::Result<Backing>),
        open: impl FnOnce() -> Answer<Arc<OpenFile>>,
    ) -> Answer<(u64, OpenReply)> {
        let table = self.table.as_deref();
        if let Some(handle) = table.and_then(|table| table.opened_before(asked, node.number)) {
            return Ok((handle, OpenReply::cached()));
        }
        let file = open()?;
        let opened = match self.way(node, &file, flags, register) {
            Ok(opened) => opened,
            Err(error) => {
                self.close(node);
                return Err(error);
            }
        };
        let handle = self.new_handle();
        let noted = table.map(|table| table.opened(node.number, handle, asked));
        match noted.transpose() {
            Ok(place) => {
                let (failures, _) = *locked(&file.sync_failures.known);
                let slot = &mut locked(&node.file);
                slot.handles.insert(handle, (opened.way, place));
                if failures > 0 {
                    slot.heard.insert(handle, failures);
                }
                Ok((handle, opened))
            }
            Err(error) => {
                self.way_ends(node, &file, opened.way);
                self.close(node);
                Err(error)
            }
        }
    }

    /// Enters the files that the kernel has kept open since earlier processes of this mount.
    pub(crate) fn know_opens(&self, opens: Vec<KnownOpen>) {
        for open in opens {
            match self.nodes.get(open.number) {
                Ok(node) => {
                    let mut slot = locked(&node.file);
                    slot.open_count += 1;
                    let known = (Way::Cached, Some(open.place));
                    slot.handles.insert(open.handle, known);
                }
                Err(error) => {
                    tracing::warn!(
                        "a file that a program opened before this mount (number {}, its name is not known) cannot be found: {error}; \
                         the program has to open it again",
                        open.number
                    );
                }
            }
        }
    }

    pub(crate) fn open_file(&self, node: &Arc<Node>) -> Answer<Arc<OpenFile>> {
        self.open_file_with(node, || Ok(self.descriptors.take()))
    }

    /// `share`  takes descriptors; called if the file is not open yet
    fn open_file_with(
        &self,
        node: &Arc<Node>,
        share: impl FnOnce() -> Answer<Share>,
    ) -> Answer<Arc<OpenFile>> {
        let fd = self.nodes.descriptor(node)?;
        let mut slot = locked(&node.file);
        // Count first: a burial reads the count after it has announced itself.
        slot.open_count += 1;
        let file = match self.burials.has_closed_off(node.number) {
            true => Err(Errno::STALE),
            false => self.stub_of(node, &fd, &mut slot, share),
        };
        if file.is_err() {
            slot.open_count -= 1;
        }
        file
    }

    /// Its stub, which this opens if need be.
    fn stub_of(
        &self,
        node: &Node,
        fd: &OwnedFd,
        slot: &mut FileSlot,
        share: impl FnOnce() -> Answer<Share>,
    ) -> Answer<Arc<OpenFile>> {
        if let Some(file) = &slot.open {
            return Ok(Arc::clone(file));
        }
        let share = share()?;
        let path = by_descriptor(fd);
        let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = |access| open(path.as_str(), flags | access, Mode::empty());
        let stub = self.nodes.with_room(|| match open(OFlags::RDWR) {
            Err(Errno::ROFS) => open(OFlags::RDONLY),
            opened => opened,
        })?;
        // Its objects were removed before its stub.
        if status(&stub)?.stx_nlink == 0 {
            return Err(Errno::STALE);
        }
        let file = self.opened(node, stub, slot, share)?;
        slot.open = Some(Arc::clone(&file));
        Ok(file)
    }

    /// Opens a new file, whose descriptor the caller has.
    pub(crate) fn open_new_file(
        &self,
        node: &Arc<Node>,
        stub: OwnedFd,
        share: Share,
    ) -> Answer<Arc<OpenFile>> {
        let mut slot = locked(&node.file);
        if slot.open.is_none() {
            slot.open = Some(self.opened(node, stub, &mut slot, share)?);
        }
        slot.open_count += 1;
        slot.open.clone().ok_or(Errno::IO)
    }

    fn opened(
        &self,
        node: &Node,
        stub: OwnedFd,
        slot: &mut FileSlot,
        share: Share,
    ) -> Answer<Arc<OpenFile>> {
        let layout = self.pool.layout(stub.as_fd());
        let mut layout = layout.map_err(|error| self.trouble(node, &error))?;
        if let Some(layout) = &mut layout {
            self.look_for_unsettled(node, &stub, layout)?;
        }
        let size = status(&stub)?.stx_size;
        let stub = Arc::new(stub);
        let sync_failures = Arc::new(SyncFailures::none());
        let (object, stored) = match slot.mapped.take() {
            Some(mapped) => (Some(mapped.object), mapped.stored),
            None => (None, None),
        };
        Ok(Arc::new(OpenFile {
            stub: Arc::clone(&stub),
            tail_is_clean: AtomicBool::new(slot.tail_is_clean || layout.is_none()),
            state: Arc::new_cyclic(|own| {
                RwLock::new(State {
                    layout,
                    stub,
                    objects: Mutex::default(),
                    _share: share,
                    own: Weak::clone(own),
                    sync_failures: Arc::clone(&sync_failures),
                })
            }),
            size: Mutex::new(size),
            plain_run: AtomicU32::new(0),
            seen_generation: AtomicU64::new(u64::MAX),
            layout_changes: AtomicU64::new(1),
            layout_changes_durable: AtomicU64::new(0),
            sync_failures,
            ways: Mutex::new(Ways::of_mapped(object)),
            is_passed: AtomicBool::new(object.is_some()),
            stored: Mutex::new(stored),
        }))
    }

    /// The kernel closes one open. One that a dead process closed already is not in the list any
    /// more.
    pub(crate) fn release(&self, number: u64, handle: u64) -> Answer<()> {
        let node = self.nodes.get(number)?;
        let (known, file) = {
            let mut slot = locked(&node.file);
            slot.heard.remove(&handle);
            (slot.handles.remove(&handle), slot.open.clone())
        };
        let Some((way, place)) = known else {
            return Ok(());
        };
        self.sessions.left(number, handle);
        if let (Some(table), Some(place)) = (&self.table, place) {
            table.free(place);
        }
        if let Some(file) = file {
            self.way_ends(&node, &file, way);
        }
        self.close(&node);
        Ok(())
    }

    /// Returns the error of a failed sync that this open has not got yet.
    pub(crate) fn hear_of_sync(&self, node: &Node, file: &OpenFile, handle: u64) -> Answer<()> {
        let (failures, error) = *locked(&file.sync_failures.known);
        if failures == 0 {
            return Ok(());
        }
        let heard = locked(&node.file).heard.insert(handle, failures);
        match heard.unwrap_or(0) < failures {
            true => Err(error),
            false => Ok(()),
        }
    }

    /// Whether the kernel reads and writes this open through its cache.
    pub(crate) fn is_cached(&self, number: u64, handle: u64) -> Answer<bool> {
        let node = self.nodes.get(number)?;
        let slot = locked(&node.file);
        let known = slot.handles.get(&handle);
        Ok(known.is_some_and(|(way, _)| *way == Way::Cached))
    }

    /// Counts one open less.
    pub(crate) fn close(&self, node: &Arc<Node>) {
        let mut slot = locked(&node.file);
        slot.open_count = slot.open_count.saturating_sub(1);
        let is_last = slot.open_count == 0;
        let last = if slot.open_count == 0 {
            slot.open.take()
        } else {
            None
        };
        if let Some(file) = &last {
            slot.tail_is_clean = file.tail_is_clean.load(Ordering::Acquire);
            let object = locked(&file.ways).object();
            let stored = locked(&file.stored).take();
            slot.mapped = object.map(|object| Mapped { object, stored });
        }
        let nameless = slot.nameless;
        drop(slot);
        if let Some(file) = &last {
            let state = file.state();
            if nameless {
                self.all_gone(node, &state);
            }
            for object in locked(&state.objects).keys() {
                self.sessions.closed(*object);
            }
        }
        if is_last && nameless {
            self.something_removed();
        }
    }

    /// The open file behind a request on it.
    pub(crate) fn file(&self, node: &Arc<Node>) -> Answer<Arc<OpenFile>> {
        let is_open = {
            let slot = locked(&node.file);
            if let Some(file) = &slot.open {
                return Ok(Arc::clone(file));
            }
            slot.is_open()
        };
        if !is_open {
            return Err(Errno::BADF);
        }
        // It has been open since an earlier process.
        let fd = self.nodes.descriptor(node)?;
        let share = || Ok(self.descriptors.take());
        self.stub_of(node, &fd, &mut locked(&node.file), share)
    }

    /// An object's descriptor, good for the access.
    pub(crate) fn object(
        &self,
        node: &Node,
        state: &State,
        object: Object,
        access: Access,
    ) -> Result<Arc<OwnedFd>, PoolError> {
        let is_lost = self.pool.is_lost(object.member);
        let is_one_more = {
            let mut objects = locked(&state.objects);
            let is_empty = objects.is_empty();
            match objects.get_mut(&object) {
                Some(open) => {
                    if let Some(fd) = open.open_for(access).filter(|_| !is_lost) {
                        let fd = Arc::clone(fd);
                        open.is_recent = true;
                        return Ok(fd);
                    }
                    !open.is_first && open.spare.is_none()
                }
                None => !is_empty,
            }
        };
        if is_one_more && !self.descriptors.wait_for_spare() {
            let error = SysError::new("open an object", "", Errno::MFILE);
            return Err(PoolError::System(error));
        }
        let layout = state.layout.as_ref().ok_or(PoolError::NoRoom)?;
        let fd = self.with_descriptors(|| self.pool.open_object(layout, object, access))?;
        let fd = Arc::new(fd);
        // Before other threads find it: the first to ask for it makes the daemon learn its name.
        self.sessions.opened(node.number, object, || {
            let part = part_of(layout, object)?;
            let path = self.path_of(&state.stub)?;
            // The daemon would see a frame in each object of a frame that lies in several; but not
            // in a part.
            let is_told = !part.is_whole() || only_object(layout).is_some() || !is_frame(&path);
            is_told.then_some((path, part))
        });
        let spares = &self.descriptors.spares;
        let mut objects = locked(&state.objects);
        let is_first = objects.is_empty();
        let open = objects
            .entry(object)
            .or_insert_with(|| OpenObject::closed(is_first));
        open.is_recent = true;
        // Another thread may have opened it meanwhile. Do not close a written one before asking the
        // kernel for its errors.
        if let Some(other) = open.open_for(access).filter(|_| !is_lost) {
            return Ok(Arc::clone(other));
        }
        open.access = access;
        let former = open.fd.replace(Arc::clone(&fd));
        open.was_written |= access == Access::Write;
        open.is_unasked |= access == Access::Write;
        let is_one_more = !open.is_first && open.spare.is_none();
        if is_one_more {
            open.spare = Some(spares.one_more());
        }
        let is_new = is_one_more && !std::mem::replace(&mut open.is_named, true);
        drop(objects);
        drop(former);
        if is_new {
            spares.keep(Weak::clone(&state.own), object);
        }
        if is_one_more {
            self.descriptors.close_spares();
        }
        Ok(fd)
    }

    /// Calls the pool for an open file. If the process has no descriptor left, it closes those that
    /// it keeps only to be quick.
    fn with_descriptors<T>(
        &self,
        mut act: impl FnMut() -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match act() {
                Err(error)
                    if error.errno() == Errno::MFILE
                        && tries < TRIES_MAX
                        && self.nodes.let_go() => {}
                done => return done,
            }
        }
    }

    /// The path of a file in the tree. None: it has no name there.
    pub(crate) fn path_of(&self, stub: &OwnedFd) -> Option<PathBuf> {
        let path = readlink(by_descriptor(stub), Vec::new()).ok()?;
        let tree = readlink(by_descriptor(&**self.nodes.tree()), Vec::new()).ok()?;
        let path = PathBuf::from(OsString::from_vec(path.into_bytes()));
        let tree = PathBuf::from(OsString::from_vec(tree.into_bytes()));
        path.strip_prefix(tree).map(Path::to_path_buf).ok()
    }

    /// Makes a place for the byte: the first one, or another if the member of the first is full or
    /// missing.
    pub(crate) fn make_place(
        &self,
        node: &Node,
        file: &OpenFile,
        wanted: ByteRange,
        why: Option<(Object, SpillReason)>,
    ) -> Answer<()> {
        let mut state = file.change();
        let mut layout = self.with_record(node, file, &mut state)?;
        let now = layout.locate(wanted.start);
        // No program has written behind the end of the file, so the objects there stay untouched;
        // unless a write broke off.
        let is_clean = file.tail_is_clean.load(Ordering::Acquire);
        let left = match (why, &now) {
            // Another thread moved it meanwhile: try the new place first.
            (Some((object, _)), now) if now.as_ref().map(|now| now.object) != Some(object) => {
                return Ok(());
            }
            (Some(_), Some(now)) if is_clean && wanted.start.0 >= file.size() => {
                layout.segments()[now.segment_index].objects.clone()
            }
            // Another thread has written behind it meanwhile, so there may be bytes that cannot be
            // read now.
            (Some((_, SpillReason::Unwritable | SpillReason::Failing)), _)
                if wanted.start.0 < file.size() =>
            {
                return Err(Errno::IO);
            }
            _ => Vec::new(),
        };
        let mut held = self.hold(node, &state, |object| !left.contains(object))?;
        if why.is_none() {
            held.what = Changed::Size;
        }
        let readers = match self.check_passed(node, file, &state) {
            true => Readers::Passthrough,
            false => Readers::None,
        };
        let stub = file.stub.as_fd();
        let done = self.with_descriptors(|| match why {
            Some((_, reason)) => self
                .pool
                .spill_beside(stub, &mut layout, wanted, reason, readers),
            None => self.pool.place(stub, &mut layout, wanted),
        });
        self.let_go(&state, &layout);
        self.unsettled.note(node, &layout);
        file.set_layout(&mut state, layout);
        drop(held);
        done.map(drop).map_err(|error| self.trouble(node, &error))
    }

    /// Call it before bytes go behind the end: if the pool has new members, a stripe continues over
    /// more of them. If that fails, the stripe stays as narrow as it was and takes the bytes: the
    /// writer gets no error.
    pub(crate) fn widen(&self, node: &Node, file: &OpenFile) {
        let generation = self.pool.generation();
        if file.seen_generation.load(Ordering::Relaxed) == generation {
            return;
        }
        file.seen_generation.store(generation, Ordering::Relaxed);
        let is_striped = |state: &State| {
            let last = state.layout.as_ref().and_then(|one| one.segments().last());
            last.is_some_and(|last| last.shape != Shape::Single)
        };
        if !is_striped(&file.state()) {
            return;
        }
        let mut state = file.change();
        let Some(mut layout) = state.layout.clone() else {
            return;
        };
        let mut held = match self.hold(node, &state, |_| true) {
            Ok(held) => held,
            Err(error) => {
                tracing::warn!("{}", stays_narrow(&self.name_of(node), &error));
                return;
            }
        };
        held.what = Changed::Size;
        let size = ByteCount(file.size());
        let done = self.pool.widen(file.stub.as_fd(), &mut layout, size);
        self.let_go(&state, &layout);
        file.set_layout(&mut state, layout);
        drop(held);
        if let Err(error) = done {
            tracing::warn!("{}", stays_narrow(&self.name_of(node), &error));
        }
    }

    /// Takes a hold before objects of the file are changed otherwise than by a write.
    ///
    /// Assumes  `state`: locked alone
    /// Errors   the daemon has bytes of one, and cannot write them
    pub(crate) fn hold(
        &self,
        node: &Node,
        state: &State,
        which: impl Fn(&Object) -> bool,
    ) -> Answer<Held<'_>> {
        let mut objects = Vec::new();
        let all = state.layout.iter().flat_map(Layout::objects);
        for object in all.filter(which) {
            match self.object(node, state, object, Access::Read) {
                Ok(fd) => objects.push((object, fd)),
                // Bytes of it that the daemon may have wait for its member.
                Err(
                    PoolError::Missing { .. } | PoolError::Lost { .. } | PoolError::Failing { .. },
                ) => {}
                Err(error) => return Err(self.trouble(node, &error)),
            }
        }
        self.sessions.hold(objects)
    }

    /// Returns when the objects have all acknowledged bytes, for a reader that looks at the
    /// objects.
    pub(crate) fn settle(&self, node: &Node, file: &OpenFile) -> Answer<()> {
        let is_known = |state: &State| {
            let objects = state.layout.iter().flat_map(Layout::objects);
            objects
                .filter_map(|object| self.object(node, state, object, Access::Read).ok())
                .any(|fd| !self.sessions.is_whole(&fd))
        };
        if is_known(&file.state()) {
            let state = file.change();
            let until = Instant::now() + LOOSE_PATIENCE;
            loop {
                match self.hold(node, &state, |_| true) {
                    // Nothing is changed.
                    Ok(mut held) => {
                        held.what = Changed::NOTHING;
                        break;
                    }
                    // The daemon writes the bytes again that the kernel could not write.
                    Err(_) if Instant::now() < until => std::thread::sleep(TRY_EVERY),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// All its objects will be removed. Tells the daemon, which may know some from an earlier open.
    fn all_gone(&self, node: &Node, state: &State) {
        for object in state.layout.iter().flat_map(Layout::objects) {
            if let Ok(fd) = self.object(node, state, object, Access::Read) {
                self.sessions.gone(object, &fd);
            }
        }
    }

    /// Removes the objects that the layout no longer names, even if they are open.
    pub(crate) fn let_go(&self, state: &State, layout: &Layout) {
        let named = layout.objects();
        locked(&state.objects).retain(|object, open| {
            let is_named = named.contains(object);
            if !is_named {
                if let Some(fd) = &open.fd {
                    self.sessions.gone(*object, fd);
                }
                self.sessions.closed(*object);
            }
            is_named
        });
    }

    /// Returns the layout. A new one is written to the stub before the file gets a size.
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
        file.set_layout(state, layout.clone());
        Ok(layout)
    }

    /// Call it before bytes between the end and a place behind it become part of the file: they
    /// must read as zero.
    pub(crate) fn clean_tail(&self, node: &Node, file: &OpenFile) -> Answer<()> {
        if file.tail_is_clean.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut state = file.change();
        let size = file.size();
        self.cut(node, file, &mut state, size, Behind::Stays)?;
        file.tail_is_clean.store(true, Ordering::Release);
        Ok(())
    }

    fn cut(
        &self,
        node: &Node,
        file: &OpenFile,
        state: &mut State,
        size: u64,
        behind: Behind,
    ) -> Answer<()> {
        let Some(mut layout) = state.layout.clone() else {
            return Ok(());
        };
        // By their descriptors the daemon learns also of objects that go and that it may know from
        // an earlier open.
        let mut held = self.hold(node, state, |_| true)?;
        // An object that is cut within a page gets zeros behind its end, through the kernel's
        // cache: they are bytes of the file as soon as it grows again. Units of a stripe are
        // multiples of this.
        if size.is_multiple_of(PAGE_MULTIPLE) {
            held.what = Changed::Size;
        }
        // A program that reads the object without the door must see that no bytes are left, and
        // later the bytes that come next.
        let is_passed = self.check_passed(node, file, state);
        let kept = ByteCount(size.max(u64::from(is_passed)));
        let done = self.pool.cut(file.stub.as_fd(), &mut layout, kept);
        if done.is_ok()
            && behind == Behind::Goes
            && let Err(error) = self.pool.give_back_behind(&layout, ByteCount(size))
        {
            tracing::warn!(
                "{}: cannot free the space reserved behind its end: {error}; it stays allocated until the file is deleted",
                self.name_of(node)
            );
        }
        self.let_go(state, &layout);
        let objects = layout.objects();
        file.set_layout(state, layout);
        let done = done.map_err(|error| self.trouble(node, &error));
        if done.is_ok() && is_passed && size == 0 {
            for object in objects {
                let fd = self.object(node, state, object, Access::Write);
                ftruncate(&*fd.map_err(|error| self.trouble(node, &error))?, 0)?;
            }
        }
        drop(held);
        done
    }

    /// truncate(2). Objects come first, so that a crash in between leaves zeros at the end and
    /// never old bytes behind it.
    pub(crate) fn set_length(&self, node: &Arc<Node>, size: u64) -> Answer<()> {
        let file = self.open_file(node)?;
        let done = self.set_length_open(node, &file, size);
        self.close(node);
        done
    }

    fn set_length_open(&self, node: &Node, file: &OpenFile, size: u64) -> Answer<()> {
        let before = file.size();
        if size > before {
            self.clean_tail(node, file)?;
        }
        let mut state = file.change();
        // As truncate(2) does on any file system, also to the length that the file has.
        let has_behind = || {
            let mut layout = state.layout.iter();
            layout.any(|layout| self.pool.reserved_behind(layout, ByteCount(size)) > 0)
        };
        if size < before || size == before && has_behind() {
            self.cut(node, file, &mut state, size, Behind::Goes)?;
        } else if size > before {
            self.with_record(node, file, &mut state)?;
            self.stretch(node, file, &state, size)?;
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

/// The part of its file that an object has: its place in the stripe. A single object has all the
/// bytes at its place.
fn part_of(layout: &Layout, object: Object) -> Option<FilePart> {
    let of = |segment: &Segment| {
        let place = segment.objects.iter().position(|one| *one == object)?;
        FilePart::new(place as u32, segment.objects.len() as u32)
    };
    layout.segments().iter().find_map(of)
}

/// Whether its name looks like one of a frame sequence.
fn is_frame(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(FrameName::parse)
        .is_some_and(|name| !name.is_clip())
}

/// For the log: new members do not get a part of this file.
fn stays_narrow(name: &str, error: &dyn fmt::Display) -> String {
    format!("{name}: it stays striped over its present members: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_stays_striped_as_it_was_is_named() {
        let told = stays_narrow("\"day 1/A001.mxf\"", &Errno::IO);
        assert!(told.starts_with("\"day 1/A001.mxf\": it stays"), "{told}");
    }
}
