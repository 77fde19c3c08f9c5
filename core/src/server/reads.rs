// SPDX-License-Identifier: Apache-2.0
//! A client's read, from its arrival to its answer.
//!
//! A read is answered in the step in which its last page becomes valid, at once when it is a hit.
//! While it waits, every page of it is valid, on its way, demanded of the device, or about to be
//! fetched by the contract it belongs to: `pursue` looks at that again whenever anything changed.

use super::clock::Due;
use super::state::*;
use super::*;
use crate::cache::PageSet;
use crate::format::REPLY_SLOTS_MAX;
use alloc::vec::Vec;

/// How often the server looks at the version of a file that is read and that others may change: not
/// every change is reported.
const LOOK_EVERY: Duration = Duration::from_ms(400);
/// The server does not answer a read from the cache when its last look at the file is older than
/// this, and older than the read.
const LOOK_AGE: Duration = Duration::from_ms(750);

/// The bytes that are missing before a read can be answered.
enum Lack {
    Nothing,
    /// Everything is on its way.
    Arrival,
    /// First run of bytes that is neither there nor on its way.
    Bytes(ByteRange),
}

impl Server {
    pub(super) fn read(
        &mut self,
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
        actions: &mut Actions,
    ) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        let refuse = |outcome: Outcome, actions: &mut Actions| {
            actions.list.push(Action::Reply {
                session,
                request,
                outcome,
            });
        };
        let slot_bytes = self.slot_bytes();
        let spans = range
            .end()
            .div_ceil(slot_bytes)
            .saturating_sub(range.start.0 / slot_bytes);
        if range.length.0 > self.limits.read_bytes_max
            || spans > REPLY_SLOTS_MAX as u64
            || range.end() > i64::MAX as u64
            || self.pins.contains_key(&(session, request))
        {
            return refuse(Outcome::Failed(Errno::INVALID), actions);
        }
        let Some(entry) = self.handles.get(&(session, handle)) else {
            return refuse(Outcome::Failed(Errno::BAD_HANDLE), actions);
        };
        if matches!(entry.state, HandleState::Plain) {
            return refuse(Outcome::Plain, actions);
        }
        let key = self.reads.insert(Read {
            session,
            handle,
            request,
            range,
            arrived: self.now,
            sent: sent.min(self.now),
            stream: None,
            line: None,
            file: None,
            due: Due::NEVER,
            begun: Instant::NEVER,
            asked: Instant::NEVER,
            starved: false,
            size_checked: false,
            retry_count: 0,
            short_count: 0,
            voided_count: 0,
        });
        if let Some(entry) = self.handles.get_mut(&(session, handle))
            && let HandleState::Opening(waiting) = &mut entry.state
        {
            waiting.reads.push(key);
            return;
        }
        self.begin_read(key, actions);
    }

    /// The file is known: let the stream see the read, then serve it.
    pub(super) fn begin_read(&mut self, key: u32, actions: &mut Actions) {
        let Some(read) = self.reads.get(key) else {
            return;
        };
        let (session, handle, range, arrived) =
            (read.session, read.handle, read.range, read.arrived);
        let Some(HandleState::Ready(file)) = self
            .handles
            .get(&(session, handle))
            .map(|entry| &entry.state)
        else {
            return self.finish_read(key, Outcome::Failed(Errno::BAD_HANDLE), actions);
        };
        let file = *file;
        let (stream, due) = self.observe(session, handle, file, range, arrived, actions);
        if let Some(stream) = stream.and_then(|id| self.streams.get_mut(id.0)) {
            stream.waiting_count += 1;
        }
        if let Some(read) = self.reads.get_mut(key) {
            read.stream = stream;
            read.due = due;
            read.begun = self.now;
            read.file = Some(file);
        }
        if let Some(file) = self.files.get_mut(&file) {
            file.use_count += 1;
            file.waiting.push(key);
        }
        self.pursue(key, actions);
    }

    /// Answer the read if it can be; else make sure that the missing bytes will come.
    pub(super) fn pursue(&mut self, key: u32, actions: &mut Actions) {
        let Some(read) = self.reads.get(key) else {
            return;
        };
        let (session, request) = (read.session, read.request);
        let Some(id) = read.file else {
            return;
        };
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        // No answer may rest on a size that may be old, nor on bytes that were last known to be
        // right long ago.
        let now = self.now;
        let is_overdue = file.must_be_looked_at(now, read.arrived, LOOK_AGE);
        let is_unknown = file.size_stale || (read.range.end() > file.size && !read.size_checked);
        let is_due = file.must_be_looked_at(now, read.arrived, LOOK_EVERY);
        if (is_overdue || is_unknown || is_due) && file.stat.is_none() {
            file.stat = Some(Asked::since(now));
            actions.list.push(Action::Stat { file: id });
        }
        if is_overdue || is_unknown {
            return;
        }
        let start = read.range.start.0;
        let end = read.range.end().min(file.size);
        if start >= end {
            let outcome = Outcome::Data {
                slots: SlotRun::default(),
                first_offset: 0,
                length: ByteCount(0),
            };
            return self.finish_read(key, outcome, actions);
        }
        let range = ByteRange::new(start, end - start);
        if !file.writing.dirty.is_empty() && !self.compose(id, range, None, actions) {
            // No buffer is free: the device gets the demand when one is.
            return self.demand(key, id, range);
        }
        match self.lack(id, range) {
            Lack::Nothing => {
                if !self.may_pin(session, range) {
                    if let Some(owner) = self.sessions.get_mut(&session)
                        && !owner.parked.contains(&key)
                    {
                        owner.parked.push_back(key);
                    }
                    return;
                }
                let outcome = self.pin(session, request, id, range, actions);
                self.finish_read(key, outcome, actions);
            }
            Lack::Arrival => {
                let now = self.now;
                if let Some(read) = self.reads.get_mut(key) {
                    read.asked = read.asked.min(now);
                }
            }
            // Not while we have bytes of it that the kernel does not have, or may lose.
            Lack::Bytes(_) if self.left_to_the_kernel(key, id) => {
                self.finish_read(key, Outcome::Plain, actions);
            }
            Lack::Bytes(missing) => self.demand(key, id, missing),
        }
    }

    /// Scattered reads where nothing is promised: the kernel's cache keeps small pieces better than
    /// buffers of a mebibyte do, and no contract needs to be protected from them. Not where that
    /// cache may have to give up bytes that it could not write: only we have them then.
    fn left_to_the_kernel(&self, key: u32, id: FileId) -> bool {
        let scattered = self
            .reads
            .get(key)
            .and_then(|read| self.streams.get(read.stream?.0))
            .is_some_and(|stream| stream.scattered && stream.standing != Standing::Contract);
        scattered
            && self
                .files
                .get(&id)
                .filter(|file| file.writing.is_with_the_kernel())
                .and_then(|file| self.devices.get(&file.device))
                .is_some_and(|device| device.contracts.is_empty())
    }

    /// Look again at all reads that wait for a file.
    pub(super) fn retry_waiting(&mut self, id: FileId, actions: &mut Actions) {
        let Some(file) = self.files.get(&id) else {
            return;
        };
        if file.waiting.is_empty() {
            return;
        }
        let waiting = file.waiting.clone();
        for key in waiting {
            self.pursue(key, actions);
        }
    }

    fn lack(&self, id: FileId, range: ByteRange) -> Lack {
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get(&id) else {
            return Lack::Nothing;
        };
        let mut arrival = false;
        let mut at = range.start.0;
        while at < range.end() {
            let number = at / slot_bytes;
            let base = number * slot_bytes;
            let end = range.end().min(base + slot_bytes);
            let wanted = PageSet::run(
                ((at - base) / PAGE_BYTES) as u32,
                (end - base).div_ceil(PAGE_BYTES) as u32,
            );
            let missing = match file.blocks.get(&number) {
                Some(&slot) => {
                    let absent = wanted.without(self.cache.valid(slot));
                    arrival |= !absent.is_empty();
                    absent.without(self.cache.coming(slot))
                }
                None => wanted,
            };
            if let Some((first, _)) = missing.first_run() {
                let start = base + u64::from(first) * PAGE_BYTES;
                return Lack::Bytes(ByteRange::new(start, range.end().saturating_sub(start)));
            }
            at = end;
        }
        if arrival {
            Lack::Arrival
        } else {
            Lack::Nothing
        }
    }

    fn may_pin(&self, session: SessionId, range: ByteRange) -> bool {
        let slot_bytes = self.slot_bytes();
        let slots = range.end().div_ceil(slot_bytes) - range.start.0 / slot_bytes;
        self.sessions.get(&session).is_some_and(|owner| {
            owner.pinned_bytes == 0
                || owner.pinned_bytes + slots * slot_bytes <= self.limits.session_pin_bytes_max
        })
    }

    /// Pin the buffers of these bytes for a client's answer. The client reads the bytes in the
    /// buffers, so this asserts that they are the file's, regardless of earlier checks.
    pub(super) fn pin(
        &mut self,
        session: SessionId,
        request: RequestId,
        id: FileId,
        range: ByteRange,
        actions: &mut Actions,
    ) -> Outcome {
        let slot_bytes = self.slot_bytes();
        let mut pinned = Pinned {
            slots: [SlotIndex(0); REPLY_SLOTS_MAX],
            count: 0,
            bytes: 0,
        };
        let start = actions.slots.len() as u32;
        let numbers = range.start.0 / slot_bytes..range.end().div_ceil(slot_bytes);
        for number in numbers {
            let file = self.files.get(&id);
            let slot = file.and_then(|file| file.blocks.get(&number));
            let &slot =
                slot.expect("a read that lacks nothing has a buffer for each of its blocks");
            let base = number * slot_bytes;
            let first = range.start.0.saturating_sub(base) / PAGE_BYTES;
            let last = (range.end() - base).min(slot_bytes).div_ceil(PAGE_BYTES);
            assert!(
                self.cache
                    .valid(slot)
                    .contains(PageSet::run(first as u32, last as u32)),
                "a read was to be answered with bytes that are not there"
            );
            self.cache.pin(slot);
            pinned.slots[usize::from(pinned.count)] = slot;
            pinned.count += 1;
            pinned.bytes += slot_bytes;
            actions.slots.push(slot);
        }
        if let Some(owner) = self.sessions.get_mut(&session) {
            owner.pinned_bytes += pinned.bytes;
        }
        let count = u32::from(pinned.count);
        self.pins.insert((session, request), pinned);
        Outcome::Data {
            slots: SlotRun { start, count },
            first_offset: (range.start.0 % slot_bytes) as u32,
            length: range.length,
        }
    }

    pub(super) fn read_end(
        &mut self,
        session: SessionId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        self.unpin(session, request);
        let parked = match self.sessions.get_mut(&session) {
            Some(owner) if !owner.parked.is_empty() => core::mem::take(&mut owner.parked),
            _ => return,
        };
        for key in parked {
            self.pursue(key, actions);
        }
    }

    pub(super) fn unpin(&mut self, session: SessionId, request: RequestId) {
        let Some(pinned) = self.pins.remove(&(session, request)) else {
            return;
        };
        for &slot in &pinned.slots[..usize::from(pinned.count)] {
            self.cache.unpin(slot);
        }
        if let Some(owner) = self.sessions.get_mut(&session) {
            owner.pinned_bytes = owner.pinned_bytes.saturating_sub(pinned.bytes);
        }
    }

    /// Answer a read and forget it.
    pub(super) fn finish_read(&mut self, key: u32, outcome: Outcome, actions: &mut Actions) {
        let Some(read) = self.reads.get(key).cloned() else {
            return;
        };
        self.account(&read, &outcome);
        actions.list.push(Action::Reply {
            session: read.session,
            request: read.request,
            outcome,
        });
        if let Some(entry) = self.handles.get_mut(&(read.session, read.handle)) {
            entry.cadence.read_answered(self.now);
        }
        if let Some(stream) = read.stream {
            self.frame_answered(stream);
        }
        self.drop_read(key, actions);
    }

    /// Forget a read without an answer.
    pub(super) fn drop_read(&mut self, key: u32, actions: &mut Actions) {
        let Some(read) = self.reads.remove(key) else {
            return;
        };
        if let Some(stream) = read.stream.and_then(|id| self.streams.get_mut(id.0)) {
            stream.waiting_count = stream.waiting_count.saturating_sub(1);
        }
        if let Some(owner) = self.sessions.get_mut(&read.session) {
            owner.parked.retain(|&parked| parked != key);
        }
        if let Some(entry) = self.handles.get_mut(&(read.session, read.handle))
            && let HandleState::Opening(waiting) = &mut entry.state
        {
            waiting.reads.retain(|&waiting| waiting != key);
        }
        if let Some(id) = read.file {
            if let Some(file) = self.files.get_mut(&id) {
                file.waiting.retain(|&waiting| waiting != key);
            }
            self.release(id, actions);
        }
    }

    /// The device could not read `failed` of a file. A read that is hit for the first time by a
    /// request larger than itself tries its own pages once more: one bad sector must not fail its
    /// neighbours.
    pub(super) fn fail_waiting(
        &mut self,
        id: FileId,
        failed: ByteRange,
        errno: Errno,
        actions: &mut Actions,
    ) {
        let Some(file) = self.files.get(&id) else {
            return;
        };
        let hit: Vec<u32> = file
            .waiting
            .iter()
            .copied()
            .filter(|&key| {
                self.reads
                    .get(key)
                    .is_some_and(|read| read.range.overlaps(failed))
            })
            .collect();
        for key in hit {
            let Some(read) = self.reads.get_mut(key) else {
                continue;
            };
            let own = failed.start.0 + PAGE_BYTES > read.range.start.0
                && failed.end() < read.range.end() + PAGE_BYTES;
            if own || read.retry_count > 0 {
                self.finish_read(key, Outcome::Failed(errno), actions);
            } else {
                read.retry_count += 1;
            }
        }
    }
}
