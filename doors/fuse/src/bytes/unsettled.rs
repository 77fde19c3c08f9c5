// SPDX-License-Identifier: Apache-2.0
//! Files whose first objects are not durable yet ([`Layout::is_unsettled`]). The first fsync makes
//! them durable, else a sync of the whole member after they have waited for a while.
//!
//! The door knows such a file by its handle: by then the kernel may have forgotten its node, or
//! never have had one. Files that an earlier mount left are found by the checkpoint of names with
//! which a mount begins.

use crate::bytes::files::OpenFile;
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::Node;
use rushes_pool::{Layout, MemberNumber, Object, Pool};
use rushes_sys::handle::Handle;
use rustix::fs::{Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// By then file systems have written most of their bytes by themselves.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// A look waits so long for syncs. A later look sees the result of a sync that takes longer.
const SYNC_PATIENCE: Duration = Duration::from_secs(1);
/// The same when the door closes: the next mount finds the files that are unsettled then.
const LAST_PATIENCE: Duration = Duration::from_secs(15);
/// Between two looks then.
const LAST_PAUSE: Duration = Duration::from_millis(10);
/// Between two tries to settle a file after one has failed: at first, and at most.
const RETRY: Duration = Duration::from_secs(60);
const RETRY_MAX: Duration = Duration::from_secs(3600);

/// The unsettled files by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    files: Mutex<HashMap<u64, Noted>>,
    syncs: Arc<Syncs>,
}

/// One of them.
#[derive(Clone, Debug)]
struct Noted {
    handle: Handle,
    objects: Vec<Object>,
    /// The objects existed by then: a sync that began later has made them durable.
    since: Instant,
    /// A try has failed: the earliest time of the next one, and how long the wait was.
    postponed: Option<(Instant, Duration)>,
}

/// The result of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
    /// It is settled, or gone.
    Done,
    /// Another thread uses it.
    Later,
    /// The file cannot be opened, or an object is missing.
    Failed,
}

impl Unsettled {
    /// Enters a file if it is unsettled.
    pub(crate) fn note(&self, node: &Node, layout: &Layout) {
        self.note_inode(node.number, node.handle(), layout);
    }

    /// The same by its number and handle.
    fn note_inode(&self, number: u64, handle: &Handle, layout: &Layout) {
        if !layout.is_unsettled() {
            return;
        }
        let objects = layout.objects();
        let mut files = locked(&self.files);
        // A file that is opened again and again has waited since the first time.
        let is_known = |noted: &Noted| noted.handle == *handle && noted.objects == objects;
        if !files.get(&number).is_some_and(is_known) {
            let noted = Noted {
                handle: handle.clone(),
                objects,
                since: Instant::now(),
                postponed: None,
            };
            files.insert(number, noted);
        }
    }

    /// Enters a file that a checkpoint found some time ago: an entry that is here is newer.
    fn note_found(&self, number: u64, handle: &Handle, layout: &Layout) {
        let is_known = |noted: &Noted| noted.handle == *handle;
        if !locked(&self.files).get(&number).is_some_and(is_known) {
            self.note_inode(number, handle, layout);
        }
    }

    /// The files that have waited for at least `age`; all of them if that is zero.
    fn older_than(&self, age: Duration) -> Vec<(u64, Noted)> {
        let files = locked(&self.files);
        let now = Instant::now();
        let is_due = |noted: &Noted| {
            let is_put_off = noted.postponed.is_some_and(|(until, _)| until > now);
            noted.since.elapsed() >= age && (age.is_zero() || !is_put_off)
        };
        let due = files.iter().filter(|(_, noted)| is_due(noted));
        due.map(|(&number, noted)| (number, noted.clone()))
            .collect()
    }

    /// Removes this entry, unless the file has got other objects meanwhile.
    fn forget(&self, number: u64, of: &Noted) {
        let mut files = locked(&self.files);
        let is_it = |noted: &Noted| noted.handle == of.handle && noted.objects == of.objects;
        if files.get(&number).is_some_and(is_it) {
            files.remove(&number);
        }
    }

    /// Removes a file that is settled.
    fn settled(&self, node: &Node) {
        let mut files = locked(&self.files);
        if files
            .get(&node.number)
            .is_some_and(|noted| noted.handle == *node.handle())
        {
            files.remove(&node.number);
        }
    }

    /// A try failed: each further wait is longer.
    fn postpone(&self, number: u64) {
        if let Some(noted) = locked(&self.files).get_mut(&number) {
            let wait = match noted.postponed {
                Some((_, before)) => (2 * before).min(RETRY_MAX),
                None => RETRY,
            };
            noted.postponed = Some((Instant::now() + wait, wait));
        }
    }
}

/// Syncs of members, each in a thread of its own: one that hangs delays no other.
#[derive(Debug, Default)]
struct Syncs {
    members: Mutex<BTreeMap<MemberNumber, Synced>>,
    ended: Condvar,
}

/// The state of a member's syncs.
#[derive(Clone, Copy, Debug, Default)]
struct Synced {
    is_under_way: bool,
    /// The start of the last sync that succeeded.
    began: Option<Instant>,
}

impl Synced {
    /// Whether all that existed at that time is durable.
    fn covers(self, since: Instant) -> bool {
        self.began.is_some_and(|began| began >= since)
    }
}

impl Syncs {
    /// Makes durable the objects that each of these members had at its time. A member that is
    /// missing, fails, or takes longer than `patience`, stays as it is.
    fn make_durable(
        self: &Arc<Self>,
        pool: &Pool,
        wanted: &BTreeMap<MemberNumber, Instant>,
        patience: Duration,
    ) {
        let end = Instant::now() + patience;
        let mut tried = BTreeSet::new();
        let mut known = locked(&self.members);
        loop {
            for (&member, &since) in wanted {
                let state = known.entry(member).or_default();
                // A sync that is under way may have begun before.
                if !state.is_under_way && !state.covers(since) && tried.insert(member) {
                    state.is_under_way = self.start(pool, member);
                }
            }
            let is_waited_for = |member| known.get(member).is_some_and(|one| one.is_under_way);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !wanted.keys().any(is_waited_for) {
                return;
            }
            let waited = self.ended.wait_timeout(known, left);
            known = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns  false: the thread did not start
    fn start(self: &Arc<Self>, pool: &Pool, number: MemberNumber) -> bool {
        let Some(member) = pool.member(number) else {
            return false;
        };
        let syncs = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name(format!("sync {}", number.0))
            .spawn(move || {
                let began = Instant::now();
                let done = member.sync();
                let mut known = locked(&syncs.members);
                let state = known.entry(number).or_default();
                state.is_under_way = false;
                match done {
                    Ok(()) => state.began = Some(began),
                    Err(error) => tracing::debug!("{error}"),
                }
                drop(known);
                syncs.ended.notify_all();
            });
        if let Err(error) = &started {
            tracing::warn!(
                "cannot sync member {} now: {error}; retried later",
                number.0
            );
        }
        started.is_ok()
    }

    fn is_durable(&self, pool: &Pool, noted: &Noted) -> bool {
        let known = locked(&self.members);
        let of = |object: &Object| known.get(&object.member).copied().unwrap_or_default();
        let mut objects = noted.objects.iter();
        objects.all(|object| pool.is_lost(object.member) || of(object).covers(noted.since))
    }
}

impl Door {
    /// A program asked for an fsync.
    pub(crate) fn make_durable(&self, node: &Arc<Node>, file: &OpenFile) -> Answer<()> {
        let mut state = file.change();
        let Some(mut layout) = state.layout.clone() else {
            return Ok(());
        };
        let settled = self.pool.settle(file.stub.as_fd(), &mut layout);
        settled.map_err(|error| self.trouble(node, &error))?;
        file.set_layout(&mut state, layout);
        self.unsettled.settled(node);
        // Members that took it for unsettled would treat a lost object as one that never was.
        self.changed(node);
        Ok(())
    }

    /// Looks whether a power cut, or a mount that died, left the file unsettled.
    ///
    /// Errors   ESTALE: it was removed, and its objects are being removed
    pub(crate) fn look_for_unsettled(
        &self,
        node: &Node,
        stub: &OwnedFd,
        layout: &mut Layout,
    ) -> Answer<()> {
        match self.pool.look_for_unsettled(stub.as_fd(), layout) {
            Ok(false) => {}
            Ok(true) if self.removed_inodes()?.contains(&node.number) => {
                return Err(Errno::STALE);
            }
            Ok(true) => {
                tracing::warn!(
                    "{}: the power failed while it was being created, and it was never synced; it reads as zeros. `rushes pool fsck` puts its remaining bytes into lost+found",
                    self.name_of(node)
                );
                if let Ok(node) = self.nodes.get(node.number) {
                    self.changed(&node);
                }
            }
            // A program that needs that object gets the error.
            Err(error) => tracing::debug!("file {}: {error}", node.number),
        }
        self.unsettled.note(node, layout);
        Ok(())
    }

    /// Settles files until the door closes, and then once more.
    pub(crate) fn settle_now_and_then(&self) {
        while !self.closing.load(Ordering::Acquire) {
            self.settle_older_than(SETTLED_AFTER, SYNC_PATIENCE);
            std::thread::park_timeout(LOOK_EVERY);
        }
        let end = Instant::now() + LAST_PATIENCE;
        let left = || end.saturating_duration_since(Instant::now());
        while self.settle_older_than(Duration::ZERO, left()) && !left().is_zero() {
            std::thread::park_timeout(LAST_PAUSE);
        }
    }

    /// Returns whether some of them need another look: a thread uses them, or they have other
    /// objects by now
    fn settle_older_than(&self, age: Duration, patience: Duration) -> bool {
        for found in self.names.take_unsettled() {
            let number = self.nodes.number_of(found.inode);
            self.unsettled
                .note_found(number, &found.handle, &found.layout);
        }
        let due = self.unsettled.older_than(age);
        let mut wanted: BTreeMap<MemberNumber, Instant> = BTreeMap::new();
        for (_, noted) in &due {
            // An object that was given up with its member waits for no disk.
            let kept = noted.objects.iter();
            for object in kept.filter(|object| !self.pool.is_lost(object.member)) {
                let since = wanted.entry(object.member).or_insert(noted.since);
                *since = noted.since.max(*since);
            }
        }
        let syncs = &self.unsettled.syncs;
        syncs.make_durable(&self.pool, &wanted, patience);
        let durable = due
            .into_iter()
            .filter(|(_, noted)| syncs.is_durable(&self.pool, noted))
            .collect::<Vec<_>>();
        if durable.is_empty() {
            return false;
        }
        // A removed file whose burial is half done lacks objects that are not lost.
        let burying = match self.burying.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
            // When the door closes there is no later look; closing waits for the last burial in any
            // case.
            Err(TryLockError::WouldBlock) if age.is_zero() => Some(locked(&self.burying)),
            Err(TryLockError::WouldBlock) => None,
        };
        let removed = burying.as_ref().and_then(|_| self.removed_inodes().ok());
        let mut is_left = false;
        for (number, noted) in durable {
            match self.settle_by_itself(&noted, removed.as_ref()) {
                Tried::Done => self.unsettled.forget(number, &noted),
                Tried::Later => is_left = true,
                Tried::Failed => self.unsettled.postpone(number),
            }
        }
        is_left
    }

    /// Inode numbers of stubs that wait for their burial.
    fn removed_inodes(&self) -> Answer<BTreeSet<u64>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(self.pool.catalogue().removed(), c".", flags, Mode::empty())?;
        let mut room = Vec::with_capacity(8192);
        let mut entries = RawDir::new(folder, room.spare_capacity_mut());
        let mut found = BTreeSet::new();
        while let Some(entry) = entries.next() {
            found.insert(entry?.ino());
        }
        Ok(found)
    }

    /// Marks the layout as settled, now that these objects are durable.
    fn settle_by_itself(&self, noted: &Noted, removed: Option<&BTreeSet<u64>>) -> Tried {
        // Enter a node as if the kernel had looked the file up: a program that opens it meanwhile
        // shares the open file.
        let node = match self.nodes.enter_again(&noted.handle) {
            Ok(node) => node,
            Err(Errno::STALE | Errno::NOENT) => return Tried::Done,
            Err(_) => return Tried::Failed,
        };
        let is_open = locked(&node.file).is_open();
        let tried = match removed {
            _ if is_open => self.settle_node(&node, noted),
            None => Tried::Later,
            Some(removed) if removed.contains(&node.number) => Tried::Done,
            Some(_) => self.settle_node(&node, noted),
        };
        self.forget(node.number, 1);
        tried
    }

    fn settle_node(&self, node: &Arc<Node>, noted: &Noted) -> Tried {
        let file = match self.open_file(node) {
            Ok(file) => file,
            Err(Errno::STALE) => return Tried::Done,
            Err(_) => return Tried::Failed,
        };
        let tried = self.settle_open(node, &file, noted);
        drop(file);
        self.close(node);
        tried
    }

    fn settle_open(&self, node: &Arc<Node>, file: &OpenFile, noted: &Noted) -> Tried {
        let Some(mut state) = file.change_now() else {
            return Tried::Later;
        };
        let Some(mut layout) = state.layout.clone().filter(Layout::is_unsettled) else {
            return Tried::Done;
        };
        let named = layout.objects();
        if !noted.objects.iter().all(|object| named.contains(object)) {
            // It was moved, or cut and written again: its present objects have not waited yet.
            self.unsettled.note(node, &layout);
            return Tried::Later;
        }
        if let Err(error) = self.pool.settled(file.stub.as_fd(), &mut layout) {
            tracing::debug!("file {}: {error}", node.number);
            return Tried::Failed;
        }
        file.set_layout(&mut state, layout);
        self.changed(node);
        Tried::Done
    }
}
