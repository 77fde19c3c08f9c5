// SPDX-License-Identifier: Apache-2.0
//! The door as a whole: one pool, its nodes, and its background threads.

use crate::bytes::data::Full;
use crate::bytes::descriptors::Descriptors;
use crate::bytes::lines::Lines;
use crate::bytes::reads::Finishers;
use crate::bytes::unsettled::Unsettled;
use crate::daemon::{DaemonPlace, Sessions};
use crate::kernel::answer::Answer;
use crate::kernel::protocol::Notices;
use crate::kernel::table::{Left, Table};
use crate::lock::locked;
use crate::tree::nodes::{Node, Nodes};
use crate::tree::removals::Burials;
use crate::upkeep::care::Care;
use crate::upkeep::tidying::Tidying;
use rushes_pool::{Class, Inode, NameLog, Pool};
use rustix::fs::{FileType, fstat, fstatvfs};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The kernel's read-ahead; its default of 128 KiB is too little for media. Units: KiB.
const READ_AHEAD_KIB: u32 = 4096;

/// How far the members' log of names may be behind.
const NAMES_LAG: Duration = Duration::from_secs(1);
/// Under load the log of names is behind for seconds, and catches up without a message.
const TOLD_AFTER: Duration = Duration::from_secs(60);

/// Serves one pool.
pub(crate) struct Door {
    pub(crate) pool: Arc<Pool>,
    pub(crate) nodes: Nodes,
    pub(crate) descriptors: Descriptors,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) finishers: Finishers,
    pub(crate) lines: Arc<Lines>,
    /// The state for the next process. None: there will be none.
    pub(crate) table: Option<Arc<Table>>,
    /// Used without a table.
    pub(crate) next_handle: AtomicU64,
    /// The kernel can read objects itself.
    pub(crate) can_pass: AtomicBool,
    /// None: no process serves the mount yet.
    pub(crate) notices: OnceLock<Notices>,
    /// The folder with the daemon's sockets.
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Why the last text was no valid policy, so that the log has it once.
    pub(crate) wish_fault: Mutex<String>,
    /// Classes that had no room for a file bound to them, and have had none since, as far as is
    /// known: each is in the log once.
    pub(crate) full_classes: Mutex<BTreeSet<Class>>,
    /// Held while a link is made or removed.
    pub(crate) links: Mutex<()>,
    pub(crate) removed_serial: AtomicU64,
    pub(crate) burials: Burials,
    pub(crate) closing: AtomicBool,
    /// Held while removed files are deleted for good.
    pub(crate) burying: Mutex<()>,
    /// Work on the pool as a whole: one job at a time.
    pub(crate) care: Care,
    pub(crate) tidying: Tidying,
    pub(crate) full: Full,
    /// The pool is idle if no program has asked for bytes for so long.
    pub(crate) tidy_after: Duration,
    pub(crate) names: NameLog,
    pub(crate) unsettled: Unsettled,
    /// Inodes whose present state is not in the log of names.
    changed: Mutex<Vec<Arc<Node>>>,
}

/// For statfs(2).
pub(crate) struct Statistics {
    pub(crate) blocks: u64,
    pub(crate) blocks_free: u64,
    pub(crate) blocks_available: u64,
    pub(crate) files: u64,
    pub(crate) files_free: u64,
    /// Units: bytes.
    pub(crate) block_bytes: u32,
    pub(crate) name_bytes_max: u32,
}

impl Door {
    /// `tidy_after`: as in [`crate::mount`]. `kept`: the table that passes from one process to the
    /// next, and the state that the former process left.
    pub(crate) fn new(
        pool: Pool,
        place: Option<&DaemonPlace>,
        tidy_after: Duration,
        kept: Option<(Table, Left)>,
    ) -> io::Result<Door> {
        let pool = Arc::new(pool);
        let (table, left) = kept.unzip();
        let table = table.map(Arc::new);
        let descriptors = Descriptors::new();
        let nodes = Nodes::new(pool.catalogue().tree(), table.clone(), &descriptors)?;
        if let Some(place) = place {
            crate::daemon::unwritten::wait_for_last_daemon(&pool, place)?;
            if let Err(error) = crate::daemon::unwritten::leave_place(&pool, place) {
                tracing::warn!(
                    "{}: commands will not find this mount's daemon: {error}",
                    pool.catalogue().path().display()
                );
            }
        }
        let sessions = Arc::new(Sessions::start(&pool, place)?);
        let lines = Arc::<Lines>::default();
        descriptors.spares.set_helpers(&pool, &lines, &sessions);
        let door = Door {
            table,
            next_handle: AtomicU64::new(1),
            names: NameLog::open(&pool),
            unsettled: Unsettled::default(),
            changed: Mutex::default(),
            nodes,
            descriptors,
            sessions,
            finishers: Finishers::start()?,
            lines,
            can_pass: AtomicBool::new(false),
            notices: OnceLock::new(),
            runtime_dir: place.map(|place| place.runtime_dir.clone()),
            wish_fault: Mutex::default(),
            full_classes: Mutex::default(),
            pool,
            links: Mutex::default(),
            removed_serial: AtomicU64::new(0),
            burials: Burials::default(),
            closing: AtomicBool::new(false),
            burying: Mutex::default(),
            care: Care::default(),
            tidying: Tidying::default(),
            full: Full::default(),
            tidy_after,
        };
        // Removed files that an earlier door left.
        door.something_removed();
        if let Some(left) = left {
            door.nodes.know(left.nodes);
            door.know_opens(left.opens);
            door.know_nameless()?;
        }
        Ok(door)
    }

    /// A file handle that the kernel does not have.
    pub(crate) fn new_handle(&self) -> u64 {
        match &self.table {
            Some(table) => table.new_handle(),
            None => self.next_handle.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The name now leads to this node; None: it is gone. Called while the kernel holds the
    /// folder's lock, so in order.
    pub(crate) fn name_changed(&self, folder: u64, name: &OsStr, node: Option<&Arc<Node>>) {
        self.tell_name(folder, name, node.map_or(0, |node| node.number));
        if let Some(node) = node {
            self.changed(node);
        }
    }

    /// An inode is about to be renamed: a checkpoint of names that ends before the log has the
    /// rename is invalid.
    pub(crate) fn moves(&self, number: u64) {
        if number != 0 && self.may_be_folder(number) {
            self.names.folder_moved();
        }
    }

    /// Like [`Door::name_changed`] for a rename, by the inode's number; 0: nowhere.
    pub(crate) fn name_leads_to(&self, folder: u64, name: &OsStr, number: u64) {
        self.moves(number);
        self.tell_name(folder, name, number);
    }

    fn tell_name(&self, folder: u64, name: &OsStr, number: u64) {
        self.names.name(folder, name.as_bytes(), number);
        // The folder's times.
        if let Ok(folder) = self.nodes.get(folder) {
            self.changed(&folder);
        }
    }

    fn may_be_folder(&self, number: u64) -> bool {
        let node = self.nodes.get(number);
        let found = node.and_then(|node| fstat(self.nodes.descriptor(&node)?));
        found.map_or(true, |found| {
            FileType::from_raw_mode(found.st_mode) == FileType::Directory
        })
    }

    /// Some value of stat(2) or an attribute has changed.
    pub(crate) fn changed(&self, node: &Arc<Node>) {
        if !node.is_told.swap(true, Ordering::AcqRel) {
            locked(&self.changed).push(Arc::clone(node));
        }
    }

    pub(crate) fn take_changed(&self) -> Vec<Inode> {
        let nodes = std::mem::take(&mut *locked(&self.changed));
        let as_it_is = |node: &Arc<Node>| {
            // First, so that a later change enters the node again.
            node.is_told.store(false, Ordering::Release);
            let fd = self.nodes.descriptor(node).ok()?;
            rushes_pool::inode(node.number, fd.as_fd()).ok()
        };
        nodes.iter().filter_map(as_it_is).collect()
    }

    /// Runs until the door closes: members know the catalogue as it was a second ago.
    pub(crate) fn log_names_now_and_then(&self) {
        let mut lag = Lag::default();
        while !self.closing.load(Ordering::Acquire) {
            let is_well = self.names.write(&self.pool, || self.take_changed());
            if lag.note(Instant::now(), is_well) {
                tracing::warn!(
                    "the log of names has been late, or on fewer members than it should be, for {} s; a lost catalogue cannot be rebuilt without it",
                    TOLD_AFTER.as_secs()
                );
            }
            std::thread::park_timeout(NAMES_LAG);
        }
    }

    /// Call it when nothing changes any more.
    pub(crate) fn log_names_at_last(&self) {
        self.names.write_last(&self.pool, || self.take_changed());
    }

    /// Bytes are those of the members, files those of the catalogue.
    pub(crate) fn statistics(&self) -> Answer<Statistics> {
        const BLOCK_BYTES: u64 = 4096;
        let usage = self.pool.usage();
        let names = fstatvfs(&**self.nodes.tree())?;
        let free = usage.bytes_free.0 / BLOCK_BYTES;
        Ok(Statistics {
            blocks: usage.bytes_total.0 / BLOCK_BYTES,
            blocks_free: free,
            blocks_available: free,
            files: names.f_files,
            files_free: names.f_ffree,
            block_bytes: BLOCK_BYTES as u32,
            name_bytes_max: names.f_namemax as u32,
        })
    }
}

/// How long a state has been bad.
#[derive(Debug, Default)]
struct Lag {
    since: Option<Instant>,
    is_told: bool,
}

impl Lag {
    /// Notes the present state. Returns whether to tell of it: once for each bad period.
    fn note(&mut self, now: Instant, is_well: bool) -> bool {
        if is_well {
            *self = Lag::default();
            return false;
        }
        let lasts = now.duration_since(*self.since.get_or_insert(now)) >= TOLD_AFTER;
        lasts && !std::mem::replace(&mut self.is_told, lasts)
    }
}

/// Raises the kernel's read-ahead on this mount.
pub(crate) fn raise_read_ahead(folder: &Path) -> io::Result<()> {
    let found = rustix::fs::stat(folder)?;
    let (major, minor) = (
        rustix::fs::major(found.st_dev),
        rustix::fs::minor(found.st_dev),
    );
    std::fs::write(
        format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"),
        READ_AHEAD_KIB.to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_is_told_once_it_lasts_and_once_each_time() {
        let begin = Instant::now();
        let mut lag = Lag::default();
        let mut told =
            |second: u64, is_well: bool| lag.note(begin + Duration::from_secs(second), is_well);
        // Ordinary load: behind for a while, again and again.
        let ordinary = (0..600).filter(|second| told(*second, second % 40 == 0));
        assert_eq!(ordinary.count(), 0);
        let first = (600..800).filter(|second| told(*second, false));
        assert_eq!(first.collect::<Vec<_>>(), [621], "well at 560");
        assert!(!told(800, true));
        let second = (801..1000).filter(|second| told(*second, false));
        assert_eq!(second.collect::<Vec<_>>(), [861]);
    }
}
