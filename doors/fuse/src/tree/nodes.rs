// SPDX-License-Identifier: Apache-2.0
//! Node ids: the numbers by which the kernel names inodes of this mount.
//!
//! A node id is the inode number in the catalogue (1 for the root of the tree), so that stat(2),
//! readdir(3) and NFS handles agree, also after restarts. For each the table has the inode's
//! persistent handle, which costs no descriptor, since a process has 20,000 at most and root cannot
//! raise that on many machines. A few thousand O_PATH descriptors are kept for nodes that are used
//! often. Native file systems use numbers again; the generation, folded from the handle, tells the
//! kernel.
//!
//! Lock order: a shard of the table, then `Nodes::ring`, then `Node::descriptor`; take `Node::file`
//! with none of them held.

use crate::bytes::descriptors::Descriptors;
use crate::bytes::files::FileSlot;
use crate::bytes::spare::Spares;
use crate::kernel::answer::{Answer, errno};
use crate::kernel::table::{KnownNode, Place, Table};
use crate::lock::locked;
use rushes_sys::handle::Handle;
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, openat, statx};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// The root's node id, by the protocol.
pub(crate) const ROOT: u64 = 1;

/// Parts of the table, so that threads seldom meet at one lock.
const SHARD_COUNT: usize = 16;

/// Steps from a directory to the root after which a cycle is assumed; PATH_MAX allows half as many.
const DEPTH_MAX: usize = 4096;

/// A call that needs a descriptor is tried so often if there is none: another thread may take the
/// one that was closed for it.
pub(crate) const TRIES_MAX: usize = 4;

/// One inode that the kernel knows.
#[derive(Debug)]
pub(crate) struct Node {
    /// Node id and inode number.
    pub(crate) number: u64,
    /// Tells two inodes of one number apart.
    pub(crate) generation: u32,
    handle: Handle,
    descriptor: Mutex<Option<Arc<OwnedFd>>>,
    /// Used since the last pass over the ring of descriptors.
    recent: AtomicBool,
    /// It is queued for the log of names.
    pub(crate) is_told: AtomicBool,
    /// For a regular file: whether and how it is open.
    pub(crate) file: Mutex<FileSlot>,
}

struct Known {
    node: Arc<Node>,
    /// How often the kernel got it and has not forgotten it since.
    lookups: u64,
    /// Of its record for the next process.
    place: Option<Place>,
}

/// All nodes, and the descriptors kept for some.
pub(crate) struct Nodes {
    tree: Arc<OwnedFd>,
    /// An ordinary descriptor of the same directory: O_PATH ones cannot open handles.
    within: OwnedFd,
    root: Arc<Node>,
    tree_number: u64,
    device: (u32, u32),
    shards: [Mutex<HashMap<u64, Known>>; SHARD_COUNT],
    ring: Mutex<VecDeque<Weak<Node>>>,
    /// Descriptors kept open for nodes that are used often.
    kept_count_max: usize,
    spares: Arc<Spares>,
    /// None: there is no next process.
    table: Option<Arc<Table>>,
}

/// The status of an inode by the catalogue's file system.
pub(crate) fn status(fd: impl AsFd) -> Answer<Statx> {
    statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

impl Nodes {
    /// For the tree whose root directory this is.
    ///
    /// Errors   EOPNOTSUPP where the catalogue's file system has no persistent handles; EOVERFLOW
    /// where they are too long for the table
    pub(crate) fn new(
        tree: BorrowedFd<'_>,
        table: Option<Arc<Table>>,
        descriptors: &Descriptors,
    ) -> Answer<Nodes> {
        let open = |flags| {
            openat(
                tree,
                c".",
                flags | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
        };
        let (path, within) = (Arc::new(open(OFlags::PATH)?), open(OFlags::RDONLY)?);
        let handle = Handle::of(&path).map_err(errno)?;
        if table.is_some() && !crate::kernel::table::has_room(&handle) {
            return Err(Errno::OVERFLOW);
        }
        let found = status(&path)?;
        Ok(Nodes {
            root: Arc::new(Node::new(ROOT, handle, Some(Arc::clone(&path)))),
            tree: path,
            within,
            tree_number: found.stx_ino,
            device: (found.stx_dev_major, found.stx_dev_minor),
            shards: std::array::from_fn(|_| Mutex::default()),
            ring: Mutex::default(),
            kept_count_max: descriptors.kept_count_max,
            spares: Arc::clone(&descriptors.spares),
            table,
        })
    }

    /// Enters the inodes that the kernel got from earlier processes.
    pub(crate) fn know(&self, nodes: Vec<KnownNode>) {
        for node in nodes {
            let known = Known {
                node: Arc::new(Node::new(node.number, node.handle, None)),
                lookups: node.lookups,
                place: Some(node.place),
            };
            self.shard(node.number).insert(node.number, known);
        }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, HashMap<u64, Known>> {
        locked(&self.shards[(number % SHARD_COUNT as u64) as usize])
    }

    /// The number that the kernel gets for an inode of the catalogue.
    pub(crate) fn number_of(&self, inode: u64) -> u64 {
        if inode == self.tree_number {
            ROOT
        } else {
            inode
        }
    }

    /// The node with this number.
    ///
    /// Errors   ESTALE when it was forgotten, or never known
    pub(crate) fn get(&self, number: u64) -> Answer<Arc<Node>> {
        if number == ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let known = self.shard(number);
        known
            .get(&number)
            .map(|known| Arc::clone(&known.node))
            .ok_or(Errno::STALE)
    }

    /// Enters an inode that the kernel gets: one more lookup of it.
    ///
    /// Errors   EXDEV for an inode on another file system: something is mounted in the catalogue
    pub(crate) fn enter(&self, fd: OwnedFd) -> Answer<(Arc<Node>, Statx)> {
        let found = status(&fd)?;
        let node = self.enter_found(&found, || Handle::of(&fd))?;
        if node.number != ROOT {
            self.keep(&node, Arc::new(fd));
        }
        Ok((node, found))
    }

    /// The same for a name in a directory whose names stay as they are meanwhile, without opening
    /// it: most listed names are not used.
    pub(crate) fn enter_name(
        &self,
        folder: BorrowedFd<'_>,
        name: &CStr,
    ) -> Answer<(Arc<Node>, Statx)> {
        let found = statx(
            folder,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
            StatxFlags::BASIC_STATS,
        )?;
        let node = self.enter_found(&found, || Handle::at(folder, name))?;
        Ok((node, found))
    }

    fn enter_found(
        &self,
        found: &Statx,
        handle: impl FnOnce() -> io::Result<Handle>,
    ) -> Answer<Arc<Node>> {
        if (found.stx_dev_major, found.stx_dev_minor) != self.device {
            return Err(Errno::XDEV);
        }
        let number = self.number_of(found.stx_ino);
        if number == ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let handle = handle().map_err(errno)?;
        let mut shard = self.shard(number);
        let known = shard.entry(number).or_insert_with(|| Known {
            node: Arc::new(Node::new(number, handle.clone(), None)),
            lookups: 0,
            place: None,
        });
        if known.node.handle != handle {
            // The number now belongs to another inode. Lookups of the old one that the kernel
            // forgets count under the same number, so its lookups stay.
            known.node = Arc::new(Node::new(number, handle, None));
        }
        known.lookups += 1;
        if let Err(error) = self.write_down(known) {
            // A lookup that fails does not count.
            known.lookups -= 1;
            if known.lookups == 0 {
                shard.remove(&number);
            }
            return Err(error);
        }
        Ok(Arc::clone(&known.node))
    }

    /// Call it before the kernel gets the node.
    fn write_down(&self, known: &mut Known) -> Answer<()> {
        if let Some(table) = &self.table {
            let node = &known.node;
            let place = table.knows(known.place, node.number, &node.handle, known.lookups)?;
            known.place = Some(place);
        }
        Ok(())
    }

    /// The node of an inode, if the kernel knows it.
    pub(crate) fn find(&self, fd: impl AsFd) -> Answer<Option<Arc<Node>>> {
        let number = self.number_of(status(&fd)?.stx_ino);
        let handle = Handle::of(&fd).map_err(errno)?;
        let node = self.get(number).ok();
        Ok(node.filter(|node| node.handle == handle))
    }

    /// The same by its handle, if it still exists. The caller forgets it once, as if the kernel had
    /// got it.
    ///
    /// Errors   ESTALE when the inode is gone
    pub(crate) fn enter_again(&self, handle: &Handle) -> Answer<Arc<Node>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let fd = handle.open(self.within.as_fd(), flags).map_err(errno)?;
        self.enter(fd).map(|(node, _)| node)
    }

    /// All nodes that the kernel knows.
    pub(crate) fn all(&self) -> Vec<Arc<Node>> {
        let shards = self.shards.iter();
        shards
            .flat_map(|shard| {
                let shard = locked(shard);
                let nodes = shard.values().map(|known| Arc::clone(&known.node));
                nodes.collect::<Vec<_>>()
            })
            .collect()
    }

    /// The kernel has forgotten so many lookups.
    pub(crate) fn forget(&self, number: u64, lookups: u64) {
        let mut shard = self.shard(number);
        let gone = shard.get_mut(&number).is_some_and(|known| {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups > 0 {
                // On an error the next process keeps it for longer.
                let _ = self.write_down(known);
            }
            known.lookups == 0
        });
        let dropped = if gone { shard.remove(&number) } else { None };
        if let (Some(table), Some(place)) =
            (&self.table, dropped.as_ref().and_then(|known| known.place))
        {
            table.free(place);
        }
        drop(shard);
        // Closing its descriptor may free an inode, which takes a while: with no lock held.
        drop(dropped);
    }

    /// An O_PATH descriptor of the node.
    ///
    /// Errors   ESTALE when the inode is gone
    pub(crate) fn descriptor(&self, node: &Arc<Node>) -> Answer<Arc<OwnedFd>> {
        if let Some(fd) = &*locked(&node.descriptor) {
            node.recent.store(true, Ordering::Relaxed);
            return Ok(Arc::clone(fd));
        }
        let open = || {
            let flags = OFlags::PATH | OFlags::NOFOLLOW;
            node.handle.open(self.within.as_fd(), flags).map_err(errno)
        };
        let fd = match self.with_room(open) {
            Ok(fd) => Arc::new(fd),
            // Open and without a name: only its own descriptor leads to it.
            Err(Errno::STALE) => return locked(&node.file).stub().ok_or(Errno::STALE),
            Err(error) => return Err(error),
        };
        self.keep(node, Arc::clone(&fd));
        Ok(fd)
    }

    /// A descriptor of the node, for a message about it: does not wait, and keeps none. None: it
    /// cannot be had so.
    pub(crate) fn descriptor_now(&self, node: &Node) -> Option<Arc<OwnedFd>> {
        let known = node.descriptor.try_lock().ok().and_then(|fd| fd.clone());
        known.or_else(|| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW;
            node.handle
                .open(self.within.as_fd(), flags)
                .ok()
                .map(Arc::new)
        })
    }

    /// Keeps a descriptor for later, and closes one that has gone unused for longest.
    fn keep(&self, node: &Arc<Node>, fd: Arc<OwnedFd>) {
        let before = locked(&node.descriptor).replace(fd);
        if before.is_some() {
            return;
        }
        let mut ring = locked(&self.ring);
        ring.push_back(Arc::downgrade(node));
        let mut closed = Vec::new();
        while ring.len() > self.kept_count_max {
            let Some(oldest) = ring.pop_front() else {
                break;
            };
            let Some(node) = oldest.upgrade() else {
                continue;
            };
            if node.recent.swap(false, Ordering::Relaxed) {
                ring.push_back(oldest);
            } else {
                closed.push(locked(&node.descriptor).take());
            }
        }
        drop(ring);
        drop(closed);
    }

    /// The process has no descriptor left: closes those that are kept for later, or else some of
    /// objects.
    ///
    /// Returns  whether there were any
    pub(crate) fn let_go(&self) -> bool {
        let nodes = std::mem::take(&mut *locked(&self.ring));
        let closed: Vec<_> = nodes
            .iter()
            .filter_map(|node| locked(&node.upgrade()?.descriptor).take())
            .collect();
        !closed.is_empty() || self.spares.let_go()
    }

    /// Calls `open`, and closes such descriptors before it tries again.
    pub(crate) fn with_room<T>(&self, mut open: impl FnMut() -> Answer<T>) -> Answer<T> {
        let mut tries = 0;
        loop {
            tries += 1;
            match open() {
                Err(Errno::MFILE) if tries < TRIES_MAX && self.let_go() => {}
                opened => return opened,
            }
        }
    }

    /// Opens the inode of a node id that this process never gave the kernel: an NFS client returns
    /// after a restart.
    ///
    /// It may be any inode of the catalogue's file system, by O_PATH: the caller checks whether it
    /// is of the tree.
    /// Errors   ESTALE when there is none, or the file system cannot look it up
    pub(crate) fn open_cold(&self, number: u64) -> Answer<OwnedFd> {
        let handle = Handle::of_number(&self.root.handle, number).ok_or(Errno::STALE)?;
        handle
            .open(self.within.as_fd(), OFlags::PATH | OFlags::NOFOLLOW)
            .map_err(|_| Errno::STALE)
    }

    pub(crate) fn is_below_tree(&self, directory: &OwnedFd) -> Answer<bool> {
        let mut here = directory.try_clone().map_err(errno)?;
        let mut number = status(&here)?.stx_ino;
        for _ in 0..DEPTH_MAX {
            if number == self.tree_number {
                return Ok(true);
            }
            here = openat(&here, c"..", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            let above = status(&here)?.stx_ino;
            if above == number {
                break;
            }
            number = above;
        }
        Ok(false)
    }

    /// The tree's root directory.
    pub(crate) fn tree(&self) -> &Arc<OwnedFd> {
        &self.tree
    }
}

pub(crate) const S_IFMT: u32 = 0o170_000;
pub(crate) const S_IFREG: u32 = 0o100_000;
pub(crate) const S_IFDIR: u32 = 0o040_000;
pub(crate) const S_IFLNK: u32 = 0o120_000;

impl Node {
    fn new(number: u64, handle: Handle, descriptor: Option<Arc<OwnedFd>>) -> Node {
        Node {
            number,
            generation: handle.generation(),
            handle,
            descriptor: Mutex::new(descriptor),
            recent: AtomicBool::new(false),
            is_told: AtomicBool::new(false),
            file: Mutex::default(),
        }
    }

    /// The handle that leads to its inode, also if no program has it open.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}
