// SPDX-License-Identifier: Apache-2.0
//! The loop's part for writes: it publishes pieces, writes them to devices, and does the work that
//! files need besides their bytes.

use crate::event_loop::{AGAIN, Daemon, InFlight};
use crate::files::{Chore, TIME_IS_SET};
use crate::jobs::{Job, SyncTo};
use crate::lanes::Lanes;
use crate::worker::Urgency;
use rushes_core::format::facts::known_generation;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_core::write::Runs;
use rushes_shm::PeerError;
use rushes_shm::facts::FileFact;
use rushes_shm::server::{LaneTerms, Newcomer, ReplyBody, ServerSession, SessionTerms};
use rushes_sys::handle::generation_of;
use rushes_sys::{FileWrite, clock, errno_of, space};
use rustix::io::Errno as Code;
use std::sync::Arc;

/// How often the log repeats an error of a file that cannot be written.
const SAY_AGAIN: Duration = Duration::from_s(60);

/// A write that the ring has no room for waits with its parts.
pub(super) type WaitingWrite = (IoWrite, Vec<WritePart>);

impl Daemon {
    // ---- Lanes of sessions ----

    /// Take a session in, with a lane if the daemon takes writes.
    pub(super) fn welcome_with_lane(
        &mut self,
        newcomer: Newcomer,
        terms: SessionTerms,
    ) -> Result<(ServerSession, Option<LaneId>), PeerError> {
        let takes_writes = |lanes: &&mut Lanes| lanes.take_writes();
        let lanes = self.lanes.as_mut().filter(takes_writes);
        let made = lanes.and_then(|lanes| match lanes.create() {
            Ok(lane) => Some(lane),
            Err(error) => {
                tracing::warn!("a session got no lane, so its writes go past the daemon: {error}");
                None
            }
        });
        let lane_terms = made.and_then(|lane| {
            let lanes = self.lanes.as_ref()?;
            let file = lanes.file(lane)?;
            Some(LaneTerms {
                head: file.head(),
                bytes: file.bytes_fd(),
                facts: lanes.facts.session_fd(),
            })
        });
        let served = newcomer.welcome(terms, &self.segment, lane_terms);
        if let (Err(_), Some(lane), Some(lanes)) = (&served, made, &mut self.lanes) {
            lanes.done(lane);
        }
        served.map(|served| (served, made))
    }

    /// Give the core a session's lane.
    pub(super) fn lane_opened(&mut self, session: SessionId, lane: Option<LaneId>) {
        let pages = lane.and_then(|lane| Some(self.lanes.as_ref()?.file(lane)?.head().page_count));
        if let (Some(lane), Some(page_count)) = (lane, pages) {
            if let Some(door) = self.sessions.doors.get_mut(&session) {
                door.lane = Some(lane);
            }
            self.feed(Event::LaneAdded {
                lane,
                session: Some(session),
                page_count,
                record_count: Lanes::record_count(),
            });
        }
    }

    /// The core granted pages: see that they have memory. If not, the grant is void and the answer
    /// is `Plain`.
    pub(super) fn grant<'a>(
        &mut self,
        session: SessionId,
        request: RequestId,
        record: u32,
        (runs, first_offset, length): (Runs, u32, ByteCount),
    ) -> ReplyBody<'a> {
        let lane = self.sessions.doors.get(&session).and_then(|door| door.lane);
        let ready = match (&mut self.lanes, lane) {
            (Some(lanes), Some(lane)) => lanes.granted(lane, record, &runs),
            _ => Err(std::io::ErrorKind::NotFound.into()),
        };
        match ready {
            Ok(()) => ReplyBody::Granted {
                runs,
                first_offset,
                length,
            },
            Err(error) => {
                self.say_once(format!(
                    "a client writes past the daemon, because the lanes' folder has no room: \
                     {error}"
                ));
                self.counts.ungranted += 1;
                self.pending
                    .push_back(Event::WriteAbort { session, request });
                ReplyBody::Plain
            }
        }
    }

    pub(super) fn grant_ended(&mut self, session: SessionId) {
        let lane = self.sessions.doors.get(&session).and_then(|door| door.lane);
        if let (Some(lanes), Some(lane)) = (&mut self.lanes, lane) {
            lanes.grant_ended(lane);
        }
    }

    // ---- Actions of the core ----

    pub(super) fn publish(
        &mut self,
        (lane, record): (LaneId, u32),
        file: FileId,
        (range, runs): (ByteRange, Runs),
        request: Option<RequestId>,
    ) {
        let written = self
            .files
            .get_mut(file)
            .and_then(|file| file.written.as_mut());
        // The next answer tells the client that the bytes are safe, so they must be published.
        let (Some(lanes), Some(written)) = (&mut self.lanes, written) else {
            panic!(
                "cannot publish a piece of file {}, which has no writer",
                file.0
            );
        };
        // A repeated write changes nothing for clients.
        if request.is_some() {
            written.changed_ns = space::wall_ns();
            // Before the piece is published: a later daemon takes the last time among the facts for
            // the file's own, and a time that was set before this write is not.
            let FileKey { device, inode } = written.durable.key;
            lanes.facts.set_time(device, inode, written.changed_ns);
        }
        let is_published = lanes.publish(lane, record, (file, written), (range, runs), request);
        assert!(
            is_published,
            "cannot publish a piece in lane {}, which does not exist",
            lane.0
        );
    }

    /// Sets the file's fact, so that all doors see the length and time that its clients see.
    pub(super) fn make_known(&mut self, id: FileId, size: u64) {
        let Some(file) = self.files.get(id) else {
            return;
        };
        let (Some(lanes), Some(written)) = (&mut self.lanes, &file.written) else {
            return;
        };
        let fact = FileFact {
            size,
            changed_ns: written.changed_ns,
            generation: known_generation(generation_of(&written.durable.handle)),
        };
        if !lanes.facts.set(file.key.device, file.key.inode, fact) {
            // A place is kept for each file that is written through a lane; only a daemon of
            // version 1 of the table may have left one that never had any.
            tracing::error!(
                "cannot tell doors the length of {:?}, to which an earlier daemon left acknowledged writes: its bucket of the facts is full; \
                 expected a place for each file with bytes in a lane. Clients that read or change the file before these bytes are \
                 written do not see them",
                file.path
            );
        }
    }

    /// Marks whether the file has loose bytes. While it has, a door asks us before it reads the
    /// file on a descriptor of its own.
    pub(super) fn make_loose_known(&mut self, id: FileId, is_loose: bool) {
        let key = self.files.get(id).map(|file| file.key);
        if let (Some(key), Some(lanes)) = (key, &mut self.lanes) {
            lanes.facts.set_loose(key.device, key.inode, is_loose);
        }
    }

    /// A client sets the time of a file that may have bytes in a lane: the file gets this time when
    /// they are written.
    pub(super) fn timed(&mut self, key: FileKey, changed_ns: i64) {
        let is_kept = self.is_kept(key);
        let id = self.files.id_of(key);
        let file = id.and_then(|id| self.files.get_mut(id));
        let written = file.and_then(|file| file.written.as_mut());
        let Some(lanes) = &mut self.lanes else {
            return;
        };
        if let Some(written) = written {
            written.changed_ns = changed_ns;
            lanes.facts.set_time(key.device, key.inode, changed_ns);
        } else if is_kept {
            // The last time that was set counts.
            lanes.facts.set_time(key.device, key.inode, changed_ns);
        }
    }

    pub(super) fn chore(&mut self, id: FileId, chore: Chore) {
        let Some(written) = self
            .files
            .get_mut(id)
            .and_then(|file| file.written.as_mut())
        else {
            tracing::error!(
                "the core asked for {chore:?} of file {}, which has no writer; expected one",
                id.0
            );
            self.pending.push_back(match chore {
                Chore::Reserve { .. } => Event::Reserved {
                    file: id,
                    result: Err(Errno::BAD_HANDLE),
                },
                Chore::Trim { .. } | Chore::Settle { .. } => Event::Settled {
                    file: id,
                    version: 0,
                },
            });
            return;
        };
        if let (Chore::Reserve { needed, wished_end }, Some(lanes)) = (chore, &mut self.lanes) {
            if let Err(error) = lanes.reserved.begin(&written.durable) {
                // Not worth refusing a write for.
                tracing::debug!(
                    "blocks reserved for a file will stay reserved after a crash: {error}"
                );
            }
            // No mark for a small file: it has no blocks of ours behind its end, so clients see
            // only blocks that they asked for.
            if wished_end > needed.end() {
                let FileKey { device, inode } = written.durable.key;
                lanes.facts.set_reserved(device, inode);
            }
        }
        written.chores.push_back(chore);
        self.next_chore(id);
    }

    /// The file system has all bytes of it: now set its time of change as well.
    pub(super) fn settle(&mut self, id: FileId) {
        let changed_ns = self
            .files
            .get(id)
            .and_then(|file| file.written.as_ref())
            .map_or(TIME_IS_SET, |written| written.changed_ns);
        self.chore(id, Chore::Settle { changed_ns });
    }

    fn next_chore(&mut self, id: FileId) {
        let Some(file) = self.files.get_mut(id) else {
            return;
        };
        let generation = file.generation;
        let Some(written) = &mut file.written else {
            return;
        };
        if written.is_busy {
            return;
        }
        let Some(chore) = written.chores.pop_front() else {
            return;
        };
        // Times and blocks alone do not wait until the file can be opened for writing.
        let fd = match (&written.file, chore) {
            (Ok(opened), _) => opened.buffered.clone(),
            (Err(errno), Chore::Reserve { .. }) => {
                let result = Err(*errno);
                self.pending.push_back(Event::Reserved { file: id, result });
                self.open_to_write(id);
                return self.next_chore(id);
            }
            (Err(_), _) => file.fd.clone(),
        };
        written.is_busy = true;
        let job = Job::Chore {
            file: id,
            generation,
            fd,
            writer: written.durable.writer,
            chore,
        };
        if self.workers.push(Urgency::Now, job).is_err() {
            self.deferred_chores.push((id, chore));
        }
    }

    /// Chores that the workers had no room for.
    pub(super) fn push_deferred_chores(&mut self) {
        for (id, chore) in std::mem::take(&mut self.deferred_chores) {
            if let Some(written) = self
                .files
                .get_mut(id)
                .and_then(|file| file.written.as_mut())
            {
                written.is_busy = false;
                written.chores.push_front(chore);
            }
            self.next_chore(id);
        }
    }

    pub(super) fn chore_done(
        &mut self,
        (id, generation): (FileId, u64),
        key: FileKey,
        chore: Chore,
        result: std::io::Result<Vec<Extent>>,
        version: u64,
    ) {
        // Whether reservations still wait, and whether other chores do.
        let (mut reserves_again, mut goes_on) = (false, false);
        let known = match self.files.same_mut(id, generation) {
            Some(file) => {
                if let Some(written) = &mut file.written {
                    written.is_busy = false;
                    reserves_again = written
                        .chores
                        .iter()
                        .any(|next| matches!(next, Chore::Reserve { .. }));
                    goes_on = written
                        .chores
                        .iter()
                        .any(|next| !matches!(next, Chore::Reserve { .. }));
                }
                true
            }
            None => false,
        };
        match chore {
            Chore::Reserve { .. } if known => {
                let start = self.device_start(id);
                let result = result.map_err(|error| errno_of(&error)).map(|mut extents| {
                    for extent in &mut extents {
                        extent.physical = extent.physical + ByteCount(start);
                    }
                    extents
                });
                self.feed(Event::Reserved { file: id, result });
            }
            Chore::Settle { changed_ns } if self.was_timed(id, generation, changed_ns) => {
                // A client has set another time meanwhile, and ours has replaced it.
                self.settle(id);
            }
            Chore::Settle { .. } => {
                if let Err(error) = result {
                    tracing::warn!("cannot set the modification time of a written file: {error}");
                }
                self.clear_fact(key, goes_on);
                if known {
                    self.feed(Event::Settled { file: id, version });
                }
            }
            Chore::Trim { .. } => {
                match (result, &mut self.lanes) {
                    (Ok(_), Some(lanes)) if !reserves_again => lanes.reserve_ended(key),
                    (Ok(_), _) => {}
                    // Its record stays: the blocks are freed when no program has the file open.
                    (Err(error), _) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    (Err(error), _) => {
                        tracing::warn!("cannot free the blocks reserved for a file: {error}")
                    }
                }
                self.clear_fact(key, goes_on);
                if known {
                    self.feed(Event::Settled { file: id, version });
                }
            }
            Chore::Reserve { .. } => {}
        }
        self.next_chore(id);
    }

    /// True: the file has another time by now, and no write that would set it follows.
    fn was_timed(&self, id: FileId, generation: u64, changed_ns: i64) -> bool {
        let file = self.files.get(id);
        let file = file.filter(|file| file.generation == generation);
        let written = file.and_then(|file| file.written.as_ref());
        written.is_some_and(|written| written.changed_ns != changed_ns) && !self.server.is_dirty(id)
    }

    /// Delete the fact: doors may trust the file system again. Not if the file was written to
    /// meanwhile, perhaps under another number; nor if a trim or another chore waits: a client that
    /// has no session and finds no fact may lengthen the file at any moment.
    fn clear_fact(&mut self, key: FileKey, goes_on: bool) {
        let is_dirty = self
            .files
            .id_of(key)
            .is_some_and(|id| self.server.is_dirty(id));
        if let (false, Some(lanes)) = (is_dirty || goes_on, &mut self.lanes) {
            lanes.facts.clear(key.device, key.inode);
        }
    }

    fn device_start(&self, id: FileId) -> u64 {
        self.files
            .get(id)
            .map_or(0, |file| self.place(file.key.device, &file.share).1)
    }

    /// Sync on the descriptor that writes through the kernel's cache, which stays open as long as
    /// the file is known: the kernel reports a failed write-back once to each descriptor, and only
    /// to those that were open at that time.
    pub(super) fn sync_file(&mut self, id: FileId) {
        self.sync_to(id, SyncTo::Medium);
    }

    pub(super) fn write_out(&mut self, id: FileId) {
        self.sync_to(id, SyncTo::Device);
    }

    fn sync_to(&mut self, id: FileId, to: SyncTo) {
        let Some(file) = self.files.get_mut(id) else {
            return;
        };
        if let Some(written) = &mut file.written {
            written.told_past_before = file.told_past_count;
        }
        let (key, share) = (file.key, Arc::clone(&file.share));
        let DeviceId(device) = self.place(key.device, &share).0;
        let Some(file) = self.files.get(id) else {
            return;
        };
        let opened = file.written.as_ref().and_then(|w| w.file.as_ref().ok());
        let fd = opened.map_or_else(|| file.fd.clone(), |opened| opened.buffered.clone());
        let job = Job::Sync {
            file: id,
            generation: file.generation,
            fd,
            to,
        };
        if self.workers.push_sync(device.into(), job).is_err() {
            let result = Err(AGAIN);
            self.pending.push_back(Event::Synced { file: id, result });
        }
    }

    /// Flush a drive's cache by syncing a file without dirty pages, so that the drive has nothing
    /// else to write.
    pub(super) fn flush(&mut self, device: DeviceId) {
        let share = self.shares.iter().filter(|served| served.device == device);
        let fd = share.filter_map(|served| served.share.flush_with()).next();
        let outcome = match fd {
            None => Flushed::Never,
            Some(fd) => match self
                .workers
                .push_sync(device.0.into(), Job::Flush { device, fd })
            {
                Ok(()) => return,
                Err(_) => Flushed::Later,
            },
        };
        self.pending.push_back(Event::Flushed { device, outcome });
    }

    pub(super) fn flushed(&mut self, device: DeviceId, result: std::io::Result<()>) {
        let outcome = match result {
            Ok(()) => Flushed::Done,
            Err(error) => {
                let name = self
                    .devices
                    .get(device)
                    .map_or("a device", |known| &known.name);
                tracing::warn!("cannot flush the cache of {name}: {error}");
                Flushed::Never
            }
        };
        self.feed(Event::Flushed { device, outcome });
    }

    pub(super) fn synced(&mut self, id: FileId, generation: u64, result: std::io::Result<()>) {
        if self.files.same_mut(id, generation).is_none() {
            return;
        }
        let Err(error) = result else {
            let file = self.files.get_mut(id);
            if let Some(written) = file.and_then(|file| file.written.as_mut()) {
                written.doubted_sync_count = 0;
            }
            let result = Ok(());
            return self.feed(Event::Synced { file: id, result });
        };
        let errno = errno_of(&error);
        // Takes the error from the other descriptor; a write under way is repeated as well.
        let is_told_past = self.hear_it_past_the_cache(id).is_some();
        let is_doubtful = self.files.get_mut(id).is_some_and(|file| {
            let count = file.told_past_count;
            let written = file.written.as_mut();
            written.is_some_and(|written| written.doubt_sync(errno, is_told_past, count))
        });
        if is_doubtful {
            if let Some(file) = self.files.get_mut(id) {
                tracing::info!(
                    "{:?}: a sync got {error}, perhaps not from a disk",
                    file.path
                );
            }
            self.doubt(id);
            if self.server.may_have_bytes_of_others(id) {
                self.say_doubted(id, &error);
            }
            return self.feed(Event::SyncDoubted { file: id, errno });
        }
        self.note_lost_pages(id, &error);
        let result = Err(errno);
        self.feed(Event::Synced { file: id, result });
    }

    /// Log that a client's flush fails, perhaps without a fault of the disk; at most once per
    /// [`SAY_AGAIN`] for a file.
    fn say_doubted(&mut self, id: FileId, error: &std::io::Error) {
        let Some(file) = self.files.get_mut(id) else {
            return;
        };
        let Some(written) = file.written.as_mut() else {
            return;
        };
        let Some(unsaid) = written.doubted_flush.say(clock::now(), SAY_AGAIN) else {
            return;
        };
        tracing::warn!(
            "{:?}: a flush fails with an error that may not come from a disk ({error}), because a \
             direct write met a cached page. Other programs have written to the file since its \
             last sync, and the kernel does not say whether it lost any of their bytes{}",
            file.path,
            more_like_it(unsaid)
        );
    }

    /// The kernel reported that it could not write cached pages of a file.
    pub(super) fn note_lost_pages(&mut self, id: FileId, error: &std::io::Error) {
        self.failed_at = clock::now();
        self.disk_failed(id);
        self.hear_it_past_the_cache(id);
        self.say_at_times(id, errno_of(error), |path| {
            format!(
                "{path:?} could not be flushed: {error}; the bytes that went through the kernel's \
                 cache since the last flush are written again"
            )
        });
    }

    // ---- Cache and device ----

    /// Bytes of a lane that the device does not have yet, for readers.
    pub(super) fn fill(&mut self, slot: SlotIndex, offset: u32, from: &LanePart) {
        let lane = self.lanes.as_ref().and_then(|lanes| lanes.file(from.lane));
        let lane = lane.expect("bytes to be read lie in a lane that is there");
        let length = u32::try_from(from.length).unwrap_or(u32::MAX);
        let read = self
            .segment
            .read_into(lane.bytes_fd(), from.offset, slot, offset, length);
        match read {
            Ok(count) if count as u64 == from.length => {}
            // Its session has truncated its own lane; the bytes that it wrote there are gone.
            other => {
                tracing::error!(
                    "cannot read bytes of a lane that are not on their disk yet: {other:?}, \
                     expected {length} bytes; their readers get an error. Check the file system of \
                     the runtime folder"
                );
                // The buffer's former bytes may be another client's.
                self.zero(slot, offset, length);
                self.unfilled.push(slot);
            }
        }
    }

    pub(super) fn zero(&mut self, slot: SlotIndex, offset: u32, length: u32) {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut done = 0;
        while done < length {
            let bytes = (length - done).min(ZEROS.len() as u32);
            let zeros = ZEROS.get(..bytes as usize).unwrap_or(&ZEROS);
            // The slot's former bytes may be another client's.
            self.segment
                .copy_in(slot, offset + done, zeros)
                .expect("what is to be cleared of a buffer lies within it");
            done += bytes;
        }
    }

    pub(super) fn submit_write(&mut self, write: IoWrite, parts: &[WritePart]) {
        let is_unfilled = |part: &WritePart| matches!(part, WritePart::Slot { slot, .. } if self.unfilled.contains(slot));
        if parts.iter().any(is_unfilled) {
            self.say_why(
                write.file,
                write.range,
                Errno::IO,
                "bytes between could not be read from their lane",
            );
            return self.fail_io(write.io, Errno::IO);
        }
        let waits = self.ring_lock.is_some() || !self.write_backlog.is_empty();
        if waits || !self.try_write(&write, parts) {
            self.write_backlog.push_back((write, parts.to_vec()));
        }
    }

    /// False: the ring is full.
    fn try_write(&mut self, write: &IoWrite, parts: &[WritePart]) -> bool {
        let file = self.files.get(write.file);
        let written = file.and_then(|file| file.written.as_ref());
        let (Some(written), Some(lanes)) = (written, &mut self.lanes) else {
            tracing::error!(
                "the core asked for a write to file {}, which has no writer; expected one",
                write.file.0
            );
            self.fail_io(write.io, Errno::BAD_HANDLE);
            return true;
        };
        let fd = match (&written.file, write.buffered) {
            (Ok(opened), true) => Arc::clone(&opened.buffered),
            (Ok(opened), false) => Arc::clone(&opened.direct),
            (Err(errno), _) => {
                // The core retries it in a moment; perhaps the file can be opened by then.
                let errno = *errno;
                self.fail_io(write.io, errno);
                self.open_to_write(write.file);
                return true;
            }
        };
        let memory = match lanes.memory_of(&self.segment, parts, write.buffered) {
            Ok(memory) => memory,
            Err(error) => {
                let why = format!("it could not be put together: {error}");
                self.say_why(write.file, write.range, Errno::IO, &why);
                self.fail_io(write.io, Errno::IO);
                return true;
            }
        };
        lanes.submitted(parts);
        let sent = self.ring.write(FileWrite {
            file: Arc::clone(&fd),
            offset: write.range.start.0,
            parts: memory,
            class: write.class,
            user_data: write.io.0,
        });
        match sent {
            Ok(()) => {
                let about = InFlight {
                    file: write.file,
                    range: write.range,
                    writes_by: (!write.buffered).then_some(fd),
                    is_unwritten: false,
                };
                self.in_flight.insert(write.io, about);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => false,
            Err(error) => {
                let why = format!("it could not be sent: {error}");
                self.say_why(write.file, write.range, Errno::INVALID, &why);
                self.fail_io(write.io, Errno::INVALID);
                true
            }
        }
    }

    pub(super) fn send_write_backlog(&mut self) {
        if self.ring_lock.is_some() {
            // Writes of a former daemon may still reach the disk; ours must come after them.
            return;
        }
        while let Some((write, parts)) = self.write_backlog.pop_front() {
            if !self.try_write(&write, &parts) {
                self.write_backlog.push_front((write, parts));
                return;
            }
        }
    }

    pub(super) fn write_done(&mut self, io: IoId, result: Result<ByteCount, Errno>) {
        match (result, self.in_flight.remove(&io)) {
            (Ok(_), Some(about)) => self.look_for_fallback(io, &about),
            (Err(errno), Some(about)) => self.write_failed(about.file, about.range, errno),
            (_, None) => {}
        }
        self.feed(Event::IoDone { io, result });
    }

    /// The disk has failed a write of ours.
    pub(super) fn write_failed(&mut self, file: FileId, range: ByteRange, errno: Errno) {
        self.failed_at = clock::now();
        self.disk_failed(file);
        let error = std::io::Error::from_raw_os_error(errno.0 as i32);
        let why = match remedy(errno) {
            Some(remedy) => format!("{error} ({remedy})"),
            None => error.to_string(),
        };
        self.say_why(file, range, errno, &why);
    }

    /// Why a file is not written, if that was logged lately: while it lasts the log repeats it.
    pub(super) fn why_not(&self, id: FileId) -> Option<Errno> {
        let (errno, when) = self.files.get(id)?.written.as_ref()?.said?;
        (clock::now() < when + SAY_AGAIN + SAY_AGAIN).then_some(errno)
    }

    /// Log that a write failed and is retried each second.
    fn say_why(&mut self, id: FileId, range: ByteRange, errno: Errno, why: &str) {
        let (length, at) = (range.length.0, range.start.0);
        self.say_at_times(id, errno, |path| {
            format!(
                "writing {length} bytes at {at} of {path:?} failed: {why}; they are kept and \
                 retried each second"
            )
        });
    }

    /// Log it if the error is a new one, and otherwise once per [`SAY_AGAIN`].
    fn say_at_times(&mut self, id: FileId, errno: Errno, sentence: impl FnOnce(&str) -> String) {
        let now = clock::now();
        let Some(file) = self.files.get_mut(id) else {
            return;
        };
        let path = file.path.clone();
        let said = file.written.as_mut().map(|written| &mut written.said);
        if let Some(said) = said {
            if said.is_some_and(|(what, when)| what == errno && now < when + SAY_AGAIN) {
                return;
            }
            *said = Some((errno, now));
        }
        tracing::error!("{}", sentence(&path));
    }
}

/// The flushes that the log left out, as the end of a sentence.
fn more_like_it(unsaid: u64) -> String {
    match unsaid {
        0 => String::new(),
        1 => String::from(". One more flush of it failed so since this was last said"),
        more => format!(". {more} more flushes of it failed so since this was last said"),
    }
}

/// The operator's remedy for a file that its file system does not let us write any more.
pub(crate) fn remedy(errno: Errno) -> Option<&'static str> {
    match Code::from_raw_os_error(i32::try_from(errno.0).ok()?) {
        Code::PERM => {
            Some("somebody has made the file immutable: see lsattr; chattr -i lets it be written")
        }
        Code::TXTBSY => Some("somebody uses the file as swap: swapoff lets it be written"),
        Code::ROFS => {
            Some("its file system is read-only: see dmesg; mount -o remount,rw lets it be written")
        }
        Code::FBIG => Some(
            "the limit of this process, see /proc/PID/limits, is less: prlimit --fsize=unlimited lifts it",
        ),
        Code::NOSPC | Code::DQUOT => Some("make room, or raise the quota"),
        Code::IO | Code::NXIO | Code::NODEV => Some("see dmesg for what its disk says"),
        Code::ACCESS => Some("the daemon lacks a right: start it by rushes.service"),
        Code::NOMEM => Some("free some memory"),
        Code::NFILE => Some("raise fs.file-max (sysctl)"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Repeated;

    #[test]
    fn what_comes_again_and_again_is_said_once_a_minute_with_its_count() {
        let at = |s| rushes_core::units::Instant::ZERO + Duration::from_s(s);
        let mut repeated = Repeated::default();
        assert_eq!(repeated.say(at(5), SAY_AGAIN), Some(0));
        assert_eq!(repeated.say(at(6), SAY_AGAIN), None);
        assert_eq!(repeated.say(at(64), SAY_AGAIN), None);
        let unsaid = repeated.say(at(65), SAY_AGAIN);
        assert_eq!(unsaid, Some(2));
        assert!(more_like_it(2).starts_with(". 2 more flushes"));
        assert_eq!(more_like_it(0), "");
        assert_eq!(repeated.say(at(66), SAY_AGAIN), None);
    }

    #[test]
    fn what_keeps_a_file_from_being_written_has_a_way_out() {
        for code in [
            Code::PERM,
            Code::ROFS,
            Code::TXTBSY,
            Code::FBIG,
            Code::DQUOT,
            Code::ACCESS,
            Code::NOMEM,
            Code::NFILE,
        ] {
            let errno = Errno(code.raw_os_error() as u32);
            assert!(remedy(errno).is_some(), "{code}");
        }
        assert_eq!(remedy(Errno::INVALID), None);
    }
}
