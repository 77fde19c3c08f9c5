// SPDX-License-Identifier: Apache-2.0
//! The loop's part for files: findings of the workers, and changes by other programs.

use crate::event_loop::Daemon;
use crate::files::{Chore, TIME_IS_SET, Written};
use crate::jobs::{Done, Job, Looked, OpenedFile, is_container};
use crate::lanes::Lanes;
use crate::sessions::IsFound;
use crate::share::Share;
use crate::worker::Urgency;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_sys::clock;
use rushes_sys::file::{FileStatus, Unserved};
use rushes_sys::watch::Change;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Longer than any file; no sum of it overflows.
const SIZE_UNKNOWN: ByteCount = ByteCount(1 << 60);

impl Daemon {
    // ---- Findings of workers ----

    pub(super) fn jobs_done(&mut self) {
        while let Some(done) = self.workers.pop() {
            match done {
                Done::Opened {
                    session,
                    handle,
                    opening,
                    path,
                    moved,
                    result,
                } => {
                    if let Some(moved) = moved {
                        self.share_is_at(*moved);
                    }
                    self.opened(session, handle, opening, &path, result);
                }
                Done::Chore {
                    file,
                    generation,
                    key,
                    chore,
                    result,
                    taken_before,
                    version,
                } => {
                    if let (Chore::Reserve { .. }, Some(lanes)) = (chore, &mut self.lanes) {
                        lanes
                            .facts
                            .set_taken_before(key.device, key.inode, taken_before);
                    }
                    self.chore_done((file, generation), key, chore, result, version);
                }
                Done::OpenedToWrite {
                    file,
                    generation,
                    result,
                } => self.opened_to_write(file, generation, result),
                Done::FoundAgain(found) => self.found_again(found),
                Done::Synced {
                    file,
                    generation,
                    result,
                } => self.synced(file, generation, result),
                Done::Flushed { device, result } => self.flushed(device, result),
                Done::Neighbour {
                    beside,
                    path,
                    name,
                    share,
                    result,
                } => {
                    let facts = result.map(|found| self.adopt(found, &share, &path, None));
                    self.feed(Event::NeighbourOpened {
                        beside,
                        name,
                        facts,
                    });
                }
                Done::PoolFile {
                    pool,
                    path,
                    share,
                    moved,
                    result,
                } => {
                    let share = moved.map_or(share, |moved| self.share_is_at(*moved));
                    let facts = result.map(|found| self.adopt(found, &share, &path, None));
                    self.feed(Event::PoolFileOpened { pool, path, facts });
                }
                Done::Stat {
                    file,
                    generation,
                    result,
                } => self.stat_done(file, generation, result),
                Done::Links { key, link_count } => {
                    if link_count == 0 {
                        self.feed(Event::Unlinked { key });
                    }
                }
                Done::Probed {
                    file,
                    generation,
                    key,
                    version,
                    hint,
                } => {
                    self.headers.ended_count += 1;
                    self.headers.put(key, version, hint);
                    if self.files.same_mut(file, generation).is_some() {
                        self.feed(Event::Hint { file, hint });
                    }
                }
                Done::GaveBack(attempts) => self.given_back(attempts),
                Done::Looked { share, result } => self.looked(share, result),
                Done::Reloaded(result) => self.reloaded(result),
                Done::RunsLoaded(result) => self.runs_loaded(result),
                Done::RunsSaved { changes, result } => self.runs_saved(changes, result),
            }
        }
        // A worker has ended a job, so there is room.
        for file in std::mem::take(&mut self.deferred_stats) {
            self.stat(file);
        }
        for (file, size) in std::mem::take(&mut self.deferred_headers) {
            self.read_header(file, size);
        }
        self.push_deferred_chores();
    }

    pub(super) fn opened(
        &mut self,
        session: SessionId,
        handle: HandleId,
        opening: u64,
        path: &str,
        result: Result<OpenedFile, Unserved>,
    ) {
        let Some(door) = self.sessions.doors.get_mut(&session) else {
            return;
        };
        let opened = door.handles.get_mut(&handle);
        let Some(opened) = opened.filter(|opened| opened.opening == opening) else {
            // Another opening has this handle by now; the core has forgotten this one.
            return;
        };
        let is_closed = opened.found == IsFound::NotYetAndClosed;
        opened.found = IsFound::Yes;
        let part = opened.part;
        // No object of a stripe has a header that continues from the object's start.
        let may_have_header = part.is_whole() && is_container(path);
        let served = door.share.clone();
        let share = served.share.clone();
        let facts = match result {
            Ok(found) => {
                // First the bytes that a former daemon left of it: a client that opens the file
                // must see them, and its writes must come after them.
                self.find_kept(&found, &share, path);
                let rule = self.config.rule_for(&share.config.name, path);
                let mut facts = self.adopt(found, &share, path, rule);
                if facts.hint.is_none() && may_have_header {
                    match self.headers.get(facts.key, facts.version) {
                        Some(said) => facts.hint = said,
                        None => facts.is_header_unread = true,
                    }
                }
                Ok(facts)
            }
            Err(unserved) => {
                if matches!(unserved, Unserved::OtherMount(_)) {
                    self.look_after_stranger(&served, clock::now());
                }
                self.counts.plain += 1;
                let what = format!(
                    "share {:?}: a file is not served, its client does plain I/O: {unserved}",
                    share.config.name
                );
                self.say_once(what);
                tracing::debug!("{path:?} is not served: {unserved}");
                self.crowded_if(unserved.errno());
                Err(unserved.errno())
            }
        };
        let opened = facts.as_ref().ok().map(|facts| facts.file);
        self.feed(Event::Opened {
            session,
            handle,
            facts,
        });
        if let Some(file) = opened {
            self.resume_reserve(file);
        }
        if is_closed {
            if let Some(door) = self.sessions.doors.get_mut(&session) {
                door.handles.remove(&handle);
            }
            self.feed(Event::Closed { session, handle });
        }
    }

    /// Read a file's header, if it has one. `size`: the length that clients see, part of which may
    /// not be on the device yet.
    pub(super) fn read_header(&mut self, id: FileId, size: ByteCount) {
        let policy = &self.config.policy;
        let Some(file) = self.files.get(id) else {
            return;
        };
        if !policy.analyser || !policy.contracts_from_header || !is_container(&file.path) {
            return;
        }
        let job = Job::Probe {
            file: id,
            generation: file.generation,
            key: file.key,
            fd: file.fd.clone(),
            size: size.0,
        };
        match self.workers.push(Urgency::Later, job) {
            Ok(()) => self.headers.begun_count += 1,
            Err(_) => self.deferred_headers.push((id, size)),
        }
    }

    /// Take in a file that a worker opened. Returns the facts that the core needs.
    pub(super) fn adopt(
        &mut self,
        found: OpenedFile,
        share: &Arc<Share>,
        path: &str,
        hint: Option<RateHint>,
    ) -> FileFacts {
        let status = found.file.status;
        if share.direct_io && !found.file.direct {
            self.say_once(format!(
                "share {:?} ({}): a file has no direct I/O and is served buffered",
                share.config.name, share.file_system
            ));
        }
        let (device, offset) = self.place(status.key.device, share);
        let fd = found.file.fd;
        let (file, has_moved) = self.files.adopt(status.key, fd, status.size.0, share, path);
        let way = self.note_way(file, found.looked, has_moved);
        self.watch(file);
        if status.link_count == 0 {
            // It has no name already, so no change of its link count will follow. The worker's
            // answer comes after the core has learned of the file.
            self.look_for_names(status.key);
        }
        let mut extents = found.extents;
        for extent in &mut extents {
            extent.physical = extent.physical + ByteCount(offset);
        }
        FileFacts {
            file,
            key: status.key,
            device,
            size: status.size,
            version: status.version,
            is_fresh: status.is_fresh,
            extents,
            hint,
            is_header_unread: false,
            way,
            is_exclusive: share.config.exclusive,
            has_unwritten: status.block_count > 0,
        }
    }

    /// Remember how a file is written; the latest writer's account counts.
    ///
    /// A file without a place among the facts is written past the daemon: all doors must know of
    /// acknowledged bytes. A file of which a former daemon left bytes keeps its place until its
    /// last byte is written.
    fn note_way(&mut self, id: FileId, looked: Looked, has_moved: bool) -> Option<WriteWay> {
        let key = self.files.get(id)?.key;
        let is_written = matches!(looked, Looked::Writable(_));
        let keeps = |lanes: &mut Lanes| lanes.facts.keep(key.device, key.inode);
        let has_place = !is_written || self.lanes.as_mut().is_none_or(keeps);
        if !has_place {
            self.say_once(String::from(
                "clients write a file past the daemon, because its bucket of the facts is full: \
                 many files are being written",
            ));
        }
        let file = self.files.get_mut(id)?;
        let written = match looked {
            Looked::Not => return None,
            // Bytes of it that are in lanes are written all the same.
            Looked::Refused => return Some(WriteWay::Through),
            Looked::Writable(written) => *written,
        };
        match (&mut file.written, written) {
            (Some(known), (opened, durable)) => {
                known.durable.writer = durable.writer;
                match opened {
                    opened if known.file.is_err() => known.file = opened,
                    Ok(opened) if has_moved => {
                        let generation = file.generation;
                        self.write_through_other(id, generation, opened);
                    }
                    // Keep a descriptor that can write: this result is of no more use.
                    Ok(_) | Err(_) => {}
                }
            }
            (known @ None, (opened, durable)) => {
                *known = Some(Written {
                    file: opened,
                    durable,
                    changed_ns: TIME_IS_SET,
                    chores: Default::default(),
                    is_busy: false,
                    told_past_before: 0,
                    doubted_sync_count: 0,
                    said: None,
                    doubted_flush: Default::default(),
                });
            }
        }
        self.files.count_again(id);
        Some(match has_place {
            true => WriteWay::Extents,
            false => WriteWay::Through,
        })
    }

    /// The device, and where the file system starts on it; a subvolume has the place of its share.
    pub(super) fn place(&self, st_dev: u64, share: &Share) -> (DeviceId, u64) {
        self.devices
            .place(st_dev)
            .or_else(|| self.devices.place(share.st_dev))
            .unwrap_or((DeviceId(u16::MAX), 0))
    }

    pub(super) fn watch(&mut self, id: FileId) {
        let (Some(changes), Some(file)) = (&mut self.changes, self.files.get_mut(id)) else {
            return;
        };
        if file.watched {
            return;
        }
        match changes.watch(&*file.fd, file.key) {
            Ok(()) => file.watched = true,
            Err(error) => {
                file.share.unwatchable.store(true, Ordering::Relaxed);
                let what = format!(
                    "share {:?} ({}): changes by others are noticed within a second, by polling: \
                     {error}",
                    file.share.config.name, file.share.file_system
                );
                self.say_once(what);
            }
        }
    }

    pub(super) fn stat_done(&mut self, id: FileId, generation: u64, result: Option<FileStatus>) {
        let Some(file) = self.files.same_mut(id, generation) else {
            return;
        };
        // A file whose length cannot be read gets a length that no read reaches: the device returns
        // its end, or an error.
        let (size, version, is_fresh) = result.map_or((SIZE_UNKNOWN, 0, true), |status| {
            (status.size, status.version, status.is_fresh)
        });
        if result.is_some() {
            file.size = size.0;
        }
        self.feed(Event::Stat {
            file: id,
            size,
            version,
            is_fresh,
        });
    }

    /// Changes by processes with a session that they have not reported.
    pub(super) fn changed_without_report(&mut self, now: Instant) {
        for key in self.reports.overdue(now) {
            self.feed(Event::ForeignChange { key });
        }
    }

    /// The attributes of a file have changed: does it still have a name? We hold it open, and
    /// without a name it would keep its space for as long as any of its bytes are cached.
    fn look_for_names(&mut self, key: FileKey) {
        let Some(file) = self.files.by_key(key) else {
            return;
        };
        let job = Job::Links {
            key,
            fd: file.fd.clone(),
        };
        // If the workers have no room, its space is freed once its cached blocks are reused.
        let _ = self.workers.push(Urgency::Later, job);
    }

    pub(super) fn changed_by_others(&mut self) {
        let mut seen: Vec<Change> = Vec::new();
        let read = match &mut self.changes {
            Some(changes) => changes.read(|change| seen.push(change)),
            None => return,
        };
        if let Err(error) = read {
            self.say_once(format!("cannot read changes by others: {error}"));
        }
        for change in seen {
            match change {
                // Doors report their own changes, and wait for the answer.
                Change::Modified { pid, key } if self.sessions.has_process(pid) => {
                    self.reports.noticed(clock::now(), pid, key);
                }
                Change::Modified { key, .. } => {
                    if self.reports.strange(clock::now(), key) {
                        self.feed(Event::ForeignChange { key });
                    }
                }
                Change::Attributes { key } => self.look_for_names(key),
                Change::Overflow => self.everything_may_have_changed(),
            }
        }
    }

    pub(super) fn everything_may_have_changed(&mut self) {
        for key in self.files.keys() {
            self.feed(Event::ForeignChange { key });
        }
    }
}
