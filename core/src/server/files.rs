// SPDX-License-Identifier: Apache-2.0
//! Sessions, handles and files: opening and closing; and how a change of a file ends the validity
//! of its cached bytes.

use super::gaps::Gaps;
use super::rehearsal::ShareUser;
use super::state::*;
use super::*;
use crate::cache::PageSet;
use crate::sched::RefinedModel;
use crate::stream::{Cadence, Recogniser};
use alloc::string::String;
use alloc::vec::Vec;

/// A read waits out so many changes by other programs.
const VOIDED_MAX: u8 = 4;
/// The same where bytes of the file are loose.
const LOOSE_VOIDED_MAX: u8 = 60;

impl Server {
    pub(super) fn device_added(&mut self, id: DeviceId, model: DeviceModel) {
        let Some(device) = self.devices.get_mut(&id) else {
            self.devices.insert(id, Device::new(model));
            return;
        };
        device.model = RefinedModel::new(model);
        device.gaps = Gaps::default();
        // Contracts stay: a stream that this model cannot keep shows in the device's own times.
        // There may be room for others.
        device.refused_asked = Instant::ZERO;
        self.retry_refused(id);
        self.touch(id);
    }

    pub(super) fn session_opened(
        &mut self,
        session: SessionId,
        label: SessionLabel,
        actions: &mut Actions,
    ) {
        // A driver that reuses a number has lost the end of the former session: end it now.
        self.session_closed(session, actions);
        self.sessions.insert(
            session,
            Session {
                login: ShareUser {
                    share: label.share.clone(),
                    user: label.user.clone(),
                },
                label,
                ..Session::default()
            },
        );
    }

    pub(super) fn session_of_pool(&mut self, session: SessionId, pool: PoolNumber) {
        if let Some(entry) = self.sessions.get_mut(&session) {
            entry.pool = Some(pool);
        }
    }

    pub(super) fn session_closed(&mut self, session: SessionId, actions: &mut Actions) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        let handles: Vec<HandleId> = self
            .handles
            .range((session, HandleId(0))..=(session, HandleId(u32::MAX)))
            .map(|((_, handle), _)| *handle)
            .collect();
        // Reads first: no client waits for them any more.
        let reads: Vec<u32> = self
            .reads
            .iter()
            .filter(|(_, read)| read.session == session)
            .map(|(key, _)| key)
            .collect();
        for read in reads {
            self.account_unanswered(read);
            self.drop_read(read, actions);
        }
        for handle in handles {
            if let Some(entry) = self.handles.get(&(session, handle))
                && let HandleState::Ready(file) = entry.state
                && let Some(file) = self.files.get_mut(&file)
            {
                file.writing.is_open_elsewhere = true;
            }
            self.handle_closed(session, handle, actions);
        }
        self.end_session_sequences(session, actions);
        self.lane_left(session, actions);
        let pinned: Vec<RequestId> = self
            .pins
            .range((session, RequestId(0))..=(session, RequestId(u64::MAX)))
            .map(|((_, request), _)| *request)
            .collect();
        // When the driver stops, the client may still copy from these buffers: it does not know
        // that its session has ended.
        if !self.is_stopping {
            for request in pinned {
                self.unpin(session, request);
            }
        }
        self.end_kept_of(session);
        self.sessions.remove(&session);
    }

    pub(super) fn opening(
        &mut self,
        session: SessionId,
        handle: HandleId,
        (path, part): (String, FilePart),
        actions: &mut Actions,
    ) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        // The client chooses handles; one still in use means it has forgotten the former.
        self.handle_closed(session, handle, actions);
        let Some(owner) = self.sessions.get_mut(&session) else {
            return;
        };
        let state = if owner.handle_count < self.limits.handle_count_max {
            HandleState::Opening(Waiting::default())
        } else {
            HandleState::Plain
        };
        owner.handle_count += 1;
        let entry = Handle {
            state,
            path,
            part,
            asked: self.change_count,
            asked_at: self.now,
            recogniser: Recogniser::new(),
            cadence: Cadence::new(),
            stream: None,
            station: None,
            hint: None,
        };
        self.handles.insert((session, handle), entry);
    }

    /// It may come after the handle's first read, and again when others have the file open.
    pub(super) fn stationed(&mut self, session: SessionId, handle: HandleId, station: Station) {
        let Some(entry) = self.handles.get_mut(&(session, handle)) else {
            return;
        };
        if let Some(stream) = entry.stream.and_then(|id| self.streams.get_mut(id.0)) {
            stream.station = Some(station.clone());
        }
        entry.station = Some(station);
    }

    pub(super) fn opened(
        &mut self,
        session: SessionId,
        handle: HandleId,
        facts: Result<FileFacts, Errno>,
        actions: &mut Actions,
    ) {
        let waiting = match self.handles.get_mut(&(session, handle)) {
            Some(entry) => match &mut entry.state {
                HandleState::Opening(waiting) => {
                    let asked = (entry.asked, Some(entry.asked_at));
                    Some((core::mem::take(waiting), asked))
                }
                HandleState::Ready(_) | HandleState::Plain => None,
            },
            None => None,
        };
        let Some((waiting, asked)) = waiting else {
            // Closed, or given up, while the driver was looking.
            if let Ok(facts) = facts {
                let file = self.adopt(facts, (0, None), actions);
                self.release(file, actions);
            }
            return;
        };
        let mut is_header_unread = false;
        let (state, hint) = match facts {
            Ok(facts) if self.devices.contains_key(&facts.device) => {
                let hint = facts.hint;
                is_header_unread = facts.is_header_unread;
                (HandleState::Ready(self.adopt(facts, asked, actions)), hint)
            }
            Ok(facts) => {
                let file = self.adopt(facts, asked, actions);
                self.release(file, actions);
                (HandleState::Plain, None)
            }
            Err(_) => (HandleState::Plain, None),
        };
        if let HandleState::Ready(file) = state
            && let Some(file) = self.files.get(&file)
            && let Some(device) = self.devices.get_mut(&file.device)
        {
            device.model.file_opened();
        }
        if let HandleState::Ready(file) = state
            && is_header_unread
        {
            self.want_header(file);
        }
        let ready = matches!(state, HandleState::Ready(_));
        if let Some(entry) = self.handles.get_mut(&(session, handle)) {
            entry.state = state;
            entry.hint = hint.and_then(|hint| entry.part_of(hint));
        }
        if ready {
            self.frame_opened(session, handle, actions);
        }
        for read in waiting.reads {
            if ready {
                self.begin_read(read, actions);
            } else {
                self.finish_read(read, Outcome::Plain, actions);
            }
        }
        for write in waiting.writes {
            if ready {
                self.begin_write(write, actions);
            } else {
                self.finish_write(write, Outcome::Plain, actions);
            }
        }
        for sync in waiting.syncs {
            self.sync(session, handle, sync, actions);
        }
    }

    pub(super) fn handle_closed(
        &mut self,
        session: SessionId,
        handle: HandleId,
        actions: &mut Actions,
    ) {
        // The handle has the rate of a rule or a header, so the record comes first.
        let stream = self.handles.get(&(session, handle));
        let stream = stream.and_then(|entry| entry.stream);
        let record = stream.and_then(|id| self.record_of(id, false));
        let Some(entry) = self.handles.remove(&(session, handle)) else {
            return;
        };
        if let Some(owner) = self.sessions.get_mut(&session) {
            owner.handle_count = owner.handle_count.saturating_sub(1);
        }
        if let Some(stream) = stream {
            self.handle_left(stream, (session, handle), record, actions);
        }
        match entry.state {
            HandleState::Opening(waiting) => {
                for read in waiting.reads {
                    self.finish_read(read, Outcome::Failed(Errno::BAD_HANDLE), actions);
                }
                for write in waiting.writes {
                    self.finish_write(write, Outcome::Failed(Errno::BAD_HANDLE), actions);
                }
                actions
                    .list
                    .extend(waiting.syncs.into_iter().map(|request| Action::Reply {
                        session,
                        request,
                        outcome: Outcome::Failed(Errno::BAD_HANDLE),
                    }));
            }
            HandleState::Ready(file) => {
                if let Some(stream) = entry.stream {
                    self.frame_closed(stream, file, actions);
                }
                self.frame_left(session, (&entry.path, &entry.cadence), file);
                self.trim_if_left(file, actions);
                self.release(file, actions);
            }
            HandleState::Plain => {}
        }
    }

    /// Enter a file, or update it, from the facts that the driver found, and count one more use of
    /// it. The driver began to look when `change_count` was `asked`, at `asked_at`.
    pub(super) fn adopt(
        &mut self,
        facts: FileFacts,
        (asked, asked_at): (u64, Option<Instant>),
        actions: &mut Actions,
    ) -> FileId {
        let id = facts.file;
        if let Some(former) = self.keys.insert(facts.key, id)
            && former != id
            && let Some(file) = self.files.get_mut(&former)
        {
            file.gone = true;
        }
        let found = Version {
            version: facts.version,
            is_fresh: facts.is_fresh,
        };
        // Of two looks at the same time either may have seen the newer state: it need not be the
        // second to come.
        let may_be_older = self.files.get(&id).is_some_and(|file| {
            let differs = found.version != file.version || facts.size.0 != file.writing.native_size;
            differs && asked_at.is_none_or(|at| at < file.looks.came)
        });
        let changed = match self.files.get_mut(&id) {
            // Not every caller knows when the driver was asked: without that it is no look.
            Some(file) => file.looked_at(found, (asked_at.unwrap_or_default(), self.now), true),
            None => false,
        };
        if changed {
            self.drop_blocks(id, 0, u64::MAX);
        }
        let is_new = !self.files.contains_key(&id);
        let holds = match is_new {
            true => self.holds_of(facts.key),
            false => Vec::new(),
        };
        let file = self.files.entry(id).or_insert_with(|| File {
            key: facts.key,
            device: facts.device,
            size: facts.size.0,
            size_stale: false,
            stat: None,
            changed: 0,
            version: facts.version,
            // Nothing of it is cached, so nothing can be old.
            looks: Looks {
                at: self.now,
                came: self.now,
                told: 0,
                // The writer that made the version is not known, nor whether it is done.
                doubt: match facts.is_fresh {
                    true if facts.is_exclusive => Doubt::Last,
                    true => Doubt::Unknown,
                    false => Doubt::None,
                },
            },
            extents: Vec::new(),
            blocks: Default::default(),
            changeable: Default::default(),
            waiting: Vec::new(),
            use_count: 0,
            unused_since: 0,
            gone: false,
            way: facts.way.unwrap_or(WriteWay::Through),
            is_exclusive: facts.is_exclusive,
            header: Looked {
                at: self.now,
                wait: super::headers::REREAD,
                likeness: Default::default(),
            },
            is_header_wanted: false,
            writing: Writing {
                native_size: facts.size.0,
                // The facts may lack bytes that others write while the file is being opened.
                others_changed: u64::from(facts.has_unwritten || self.change_count > asked),
                mapped_end: u64::MAX,
                holds,
                ..Writing::default()
            },
        });
        file.use_count += 1;
        if changed || file.extents.is_empty() {
            file.extents = facts.extents;
            if file.changed <= asked {
                file.writing.mapped_end = u64::MAX;
            }
        }
        // The answer to an earlier question may be older than this size.
        if let Some(asked) = &mut file.stat {
            asked.is_void |= changed || file.size != facts.size.0;
        }
        if let Some(way) = facts.way {
            file.way = way;
        }
        // Once another program has written to it, it stays so as long as the file is known.
        file.is_exclusive &= facts.is_exclusive;
        // Bytes that were acknowledged and are not written yet lie past the end that the file
        // system knows.
        let length = facts.size.0.max(file.writing.dirty.end());
        let writes = !self.lanes.is_empty();
        if may_be_older || file.changed > asked || (is_new && writes && self.change_count > asked) {
            // A change that we have acknowledged meanwhile may have moved its end: look again. If
            // the file was forgotten meanwhile, perhaps after it was written back, the count does
            // not show whether the change was to this one.
            file.size_stale = true;
            if is_new || may_be_older {
                // Nor whether it still has the blocks that the driver found.
                file.writing.mapped_end = 0;
            }
        } else {
            file.writing.native_size = facts.size.0;
            if file.size != length {
                self.resize(id, length);
            }
        }
        if let Some(file) = self.files.get_mut(&id)
            && file.changed <= asked
        {
            // The driver that found this out looks at its header, too.
            file.header.likeness = file.likeness();
        }
        if changed {
            self.retry_waiting(id, actions);
        }
        id
    }

    /// One use of a file less; the last one of a file without cached blocks lets it be closed.
    pub(super) fn release(&mut self, id: FileId, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        assert!(file.use_count > 0, "a use of a file was given back twice");
        file.use_count -= 1;
        if file.use_count == 0 && file.gone {
            self.drop_blocks(id, 0, u64::MAX);
        }
        self.forget_if_unused(id, actions);
        self.note_unused(id);
    }

    pub(super) fn forget_if_unused(&mut self, id: FileId, actions: &mut Actions) {
        let Some(file) = self.files.get(&id) else {
            return;
        };
        if file.use_count > 0 || !file.blocks.is_empty() || !file.waiting.is_empty() {
            return;
        }
        // A client that is about to change it waits for the work on it to end, and others wait for
        // that client.
        if !file.writing.holds.is_empty() || file.writing.settling > 0 {
            return;
        }
        if self.is_recovering {
            // The next piece of the recovery may be of it. See recovery_ended.
            return;
        }
        let (key, device) = (file.key, file.device);
        assert!(
            !file.writing.is_listed && file.writing.grant_count == 0,
            "a file is to be forgotten that has bytes on their way"
        );
        self.writing_out.retain(|other| *other != id);
        self.files.remove(&id);
        // The readers of its bytes are gone; their demands would stand before the others for ever.
        if let Some(device) = self.devices.get_mut(&device) {
            device.queue.demands.retain(|demand| demand.file != id);
            device.queue.headers.ended(id);
        }
        if self.keys.get(&key) == Some(&id) {
            self.keys.remove(&key);
        }
        actions.list.push(Action::Forget { file: id });
    }

    /// A client or another program changed bytes of a file on its own descriptor.
    pub(super) fn changed(
        &mut self,
        key: FileKey,
        range: ByteRange,
        has_bytes: bool,
        actions: &mut Actions,
    ) {
        // Also for an unknown file: the driver may be opening it now.
        self.change_count += 1;
        let Some(&id) = self.keys.get(&key) else {
            return;
        };
        self.drop_blocks(id, range.start.0, range.end());
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        file.changed = self.change_count;
        if range.end() == u64::MAX {
            file.size_stale = true;
            // It may have been cut: blocks that it had, or was about to have, may be another
            // file's.
            file.writing.mapped_end = file.writing.mapped_end.min(range.start.0);
            file.writing.is_reservation_void = file.writing.reserving.is_some();
        }
        if let Some(asked) = &mut file.stat {
            match range.end() {
                u64::MAX => asked.is_void = true,
                end => asked.length = asked.length.max(end),
            }
        }
        if has_bytes && range.length.0 > 0 {
            file.writing.others_changed += 1;
        }
        if range.end() < u64::MAX {
            file.writing.native_size = file.writing.native_size.max(range.end());
        }
        if range.end() > file.size && range.end() < u64::MAX {
            self.resize(id, range.end());
        }
        self.retry_waiting(id, actions);
    }

    /// The file keeps its name, and may have readers later: its loose bytes are written first.
    pub(super) fn let_go_of(&mut self, key: FileKey, actions: &mut Actions) {
        let Some(&id) = self.keys.get(&key) else {
            return;
        };
        if let Some(file) = self.files.get_mut(&id) {
            file.gone = true;
            if file.use_count == 0 {
                self.drop_blocks(id, 0, u64::MAX);
                return self.forget_if_unused(id, actions);
            }
            self.hurry_loose(|_, other, _| other == id);
        }
    }

    pub(super) fn gone(&mut self, key: FileKey, actions: &mut Actions) {
        let Some(&id) = self.keys.get(&key) else {
            return;
        };
        if let Some(file) = self.files.get_mut(&id) {
            file.gone = true;
            if file.use_count == 1 && file.writing.is_loose {
                // The file has no readers any more: its loose bytes go, so that its blocks are
                // freed.
                return self.discard_loose(id, ByteRange::new(0, u64::MAX), actions);
            }
            if file.use_count == 0 {
                self.drop_blocks(id, 0, u64::MAX);
                self.forget_if_unused(id, actions);
            }
        }
    }

    /// Another program changed it: any byte may differ, its length too. A program that does so
    /// again and again must not keep a reader waiting for ever for an answer that is still true
    /// when it comes: the kernel's cache has one.
    pub(super) fn foreign_change(&mut self, key: FileKey, actions: &mut Actions) {
        let known = self.keys.get(&key).and_then(|id| self.files.get(id));
        let waiting = known.map(|file| file.waiting.clone()).unwrap_or_default();
        // The kernel's cache lacks bytes that are not written yet: its file may even end before
        // them. The kernel may have to give up loose bytes; a reader that has waited too long is
        // left to it all the same, and its door holds the file first.
        let is_clean = known.is_some_and(|file| file.writing.is_clean());
        let has_all = known.is_some_and(|file| file.writing.is_with_the_kernel());
        for read in waiting {
            let Some(entry) = self.reads.get_mut(read) else {
                continue;
            };
            entry.voided_count = entry.voided_count.saturating_add(1);
            let may_be_left = match has_all {
                true => entry.voided_count > VOIDED_MAX,
                false => entry.voided_count > LOOSE_VOIDED_MAX && is_clean,
            };
            if may_be_left {
                self.finish_read(read, Outcome::Plain, actions);
            }
        }
        if let Some(file) = self.keys.get(&key).and_then(|id| self.files.get_mut(id)) {
            file.is_exclusive = false;
            file.looks.doubt = Doubt::Foreign;
        }
        let all = ByteRange::new(0, u64::MAX);
        self.changed(key, all, true, actions);
        self.changed_loose(key, all, actions);
        if let Some(&id) = self.keys.get(&key) {
            self.forget_if_unused(id, actions);
        }
    }

    pub(super) fn stat(&mut self, id: FileId, size: u64, found: Version, actions: &mut Actions) {
        let size_told = size;
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        // Changes that we acknowledged since the question count as much as the driver's answer, and
        // so do acknowledged bytes that are not written yet.
        let asked = file.stat.take().unwrap_or_default();
        let was_doubted =
            !asked.is_void && self.drop_what_was_cut(id, size_told.max(asked.length), actions);
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let size = size.max(file.writing.dirty.end()).max(asked.length);
        file.writing.native_size = size_told.max(asked.length);
        file.size_stale = asked.is_void;
        // While a client of ours writes the file, that is why its pages are not written yet.
        let is_quiet = file.is_quiet(self.now);
        // A version we did not know: the file was changed, and the change is perhaps not reported
        // yet.
        if file.looked_at(found, (asked.at, self.now), false) {
            self.drop_blocks(id, 0, u64::MAX);
        } else if is_quiet {
            self.drop_changeable(id);
        }
        if asked.is_void {
            // The server asks once more; until then this size is nearer to the truth than the one
            // before.
            if self.files.get(&id).is_some_and(|file| file.size != size) {
                self.resize(id, size);
            }
            self.make_known(id, actions);
            self.retry_waiting(id, actions);
            self.advance_writes(id, actions);
            return self.forget_if_unused(id, actions);
        }
        // Bytes that were written of it before lie within it, unless another program has cut it.
        let native_end = size_told.max(asked.length);
        let cut = ByteRange::new(native_end, u64::MAX - native_end);
        self.discard_loose(id, cut, actions);
        let Some(file) = self.files.get(&id) else {
            return;
        };
        if file.size != size {
            self.resize(id, size);
        }
        let waiting = self
            .files
            .get(&id)
            .map(|file| file.waiting.clone())
            .unwrap_or_default();
        for key in waiting {
            if let Some(read) = self.reads.get_mut(key) {
                read.size_checked = true;
            }
        }
        self.make_known(id, actions);
        if was_doubted {
            self.settle_clean(id, actions);
            self.settle_waiters(id, actions);
        }
        self.advance_writes(id, actions);
        self.retry_waiting(id, actions);
        self.forget_if_unused(id, actions);
    }

    /// The file has another length. Cached bytes past the shorter end are not the file's: of the
    /// page that the old end lay in, only the part before it ever came from the device.
    pub(super) fn resize(&mut self, id: FileId, size: u64) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let shorter = file.size.min(size);
        file.size = size;
        self.drop_blocks(id, shorter / PAGE_BYTES * PAGE_BYTES, u64::MAX);
    }

    /// Forget cached bytes that a program may have changed since, unseen.
    fn drop_changeable(&mut self, id: FileId) {
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        for number in core::mem::take(&mut file.changeable) {
            let start = number * slot_bytes;
            self.drop_blocks(id, start, start + slot_bytes);
        }
    }

    /// Forget cached bytes `start .. end` of a file, whole pages. Slots in a client's hands become
    /// orphans.
    pub(super) fn drop_blocks(&mut self, id: FileId, start: u64, end: u64) {
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        if start >= end {
            return;
        }
        let touched: Vec<(u64, SlotIndex)> = file
            .blocks
            .range(start / slot_bytes..=(end - 1) / slot_bytes)
            .map(|(number, slot)| (*number, *slot))
            .collect();
        for (number, slot) in touched {
            let base = number * slot_bytes;
            let first = start.saturating_sub(base) / PAGE_BYTES;
            let last = (end - base).min(slot_bytes).div_ceil(PAGE_BYTES);
            let whole = first == 0 && last * PAGE_BYTES >= slot_bytes;
            if whole || self.cache.is_pinned(slot) {
                if let Some(file) = self.files.get_mut(&id) {
                    file.blocks.remove(&number);
                    file.changeable.remove(&number);
                }
                self.cache.orphan(slot);
            } else {
                self.cache
                    .invalidate(slot, PageSet::run(first as u32, last as u32));
            }
        }
    }
}
