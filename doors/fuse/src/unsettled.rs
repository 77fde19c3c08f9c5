// SPDX-License-Identifier: Apache-2.0
//! Files whose first objects are not durable yet ([`Layout::is_unsettled`]): they are made so by the first fsync, else all of a member's
//! together when they have waited for a while.

use crate::answer::Answer;
use crate::door::Door;
use crate::files::OpenFile;
use crate::nodes::{Node, locked};
use rushes_pool::{Layout, MemberNumber, Object};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// By then file systems have written most of it by themselves.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Such files, by their nodes: their objects, and since when.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    files: Mutex<HashMap<u64, (Vec<Object>, Instant)>>,
}

impl Unsettled {
    /// It may be one.
    pub(crate) fn note(&self, number: u64, layout: &Layout) {
        if layout.is_unsettled() {
            let noted = (layout.objects(), Instant::now());
            locked(&self.files).insert(number, noted);
        }
    }

    /// Those that have waited for so long.
    fn older_than(&self, age: Duration) -> Vec<(u64, Vec<Object>)> {
        let files = locked(&self.files);
        let old = files
            .iter()
            .filter(|(_, (_, since))| since.elapsed() >= age);
        old.map(|(&number, (objects, _))| (number, objects.clone()))
            .collect()
    }

    /// Not that one any more, unless it has got other objects meanwhile.
    fn forget(&self, number: u64, objects: &[Object]) {
        let mut files = locked(&self.files);
        if files
            .get(&number)
            .is_some_and(|(noted, _)| noted == objects)
        {
            files.remove(&number);
        }
    }
}

impl Door {
    /// Somebody wants it to be durable.
    pub(crate) fn make_durable(&self, node: &Node, file: &OpenFile) -> Answer<()> {
        let mut state = file.change();
        let Some(mut layout) = state.layout.clone() else {
            return Ok(());
        };
        let settled = self.pool.settle(file.stub.as_fd(), &mut layout);
        file.set_layout(&mut state, layout);
        settled.map_err(|error| self.trouble(node, &error))
    }

    /// A power cut, or a mount that died, may have left it so.
    pub(crate) fn look_for_unsettled(&self, node: &Node, stub: &OwnedFd, layout: &mut Layout) {
        match self.pool.look_for_unsettled(stub.as_fd(), layout) {
            Ok(false) => {}
            Ok(true) => tracing::warn!(
                "file {}: it was being made when the power went and was never synced; it reads as zeroes",
                node.number
            ),
            // Whoever needs that object is told.
            Err(error) => tracing::debug!("file {}: {error}", node.number),
        }
        self.unsettled.note(node.number, layout);
    }

    /// Until the door closes, and then once more.
    pub(crate) fn settle_now_and_then(&self) {
        while !self.closing.load(Ordering::Acquire) {
            self.settle_older_than(SETTLED_AFTER);
            std::thread::park_timeout(LOOK_EVERY);
        }
        self.settle_older_than(Duration::ZERO);
    }

    fn settle_older_than(&self, age: Duration) {
        let old = self.unsettled.older_than(age);
        let members = old.iter().flat_map(|(_, objects)| objects);
        let members: BTreeSet<MemberNumber> = members.map(|object| object.member).collect();
        // One that is away, or fails, keeps its files as they are. At once, since each has to write what its drive has in memory.
        let durable: BTreeSet<MemberNumber> = std::thread::scope(|scope| {
            let sync = |member| scope.spawn(move || self.pool.sync_member(member).map(|()| member));
            let all: Vec<_> = members.into_iter().map(sync).collect();
            let done = all.into_iter().filter_map(|one| one.join().ok());
            done.flatten().collect()
        });
        for (number, objects) in old {
            let is_durable = objects
                .iter()
                .all(|object| durable.contains(&object.member));
            if is_durable && self.settle_by_itself(number, &objects) {
                self.unsettled.forget(number, &objects);
            }
        }
    }

    /// Its record says so, now that these objects are durable.
    ///
    /// Returns  false: somebody is at it; later
    fn settle_by_itself(&self, number: u64, objects: &[Object]) -> bool {
        let Ok(node) = self.nodes.get(number) else {
            // Gone, or asked for again by its number: then it is looked at when it is opened.
            return true;
        };
        let Ok(file) = self.open_file(&node) else {
            return true;
        };
        let done = file.change_now().is_some_and(|mut state| {
            let Some(mut layout) = state.layout.clone() else {
                return true;
            };
            let named = layout.objects();
            // (It may have been cut, and have got others.)
            if !layout.is_unsettled() || !objects.iter().all(|object| named.contains(object)) {
                return true;
            }
            let settled = self.pool.settled(file.stub.as_fd(), &mut layout);
            file.set_layout(&mut state, layout);
            settled.is_ok()
        });
        drop(file);
        self.close(&node);
        done
    }
}
