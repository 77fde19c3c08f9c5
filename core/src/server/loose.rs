// SPDX-License-Identifier: Apache-2.0
//! Bytes that went through the kernel's cache, until it is known that the device has them.
//!
//! A kernel that cannot write a page of its cache reports that once, to each descriptor, and takes
//! the page for written from then on: a second sync succeeds. So a piece's pages are *loose* when
//! they have gone into that cache: on their device as far as the kernel has reported, in no table
//! any more, and yet kept, until a sync without an error covers them. After one with an error all
//! loose bytes are dirty again, have a record again ([`Action::Publish`] without a request), are
//! written again, and the next sync gets the result. The driver syncs and writes on one and the
//! same descriptor as long as anything is loose, since its file is not forgotten, so no other
//! descriptor gets an error in its place.
//!
//! When no client syncs the server asks by itself, after the kernel has written on its own: that
//! costs the device nothing. Bytes of direct I/O are loose only where the kernel took them into its
//! cache all the same ([`Event::FellBack`]): else their errors are those of their own requests. A
//! daemon that dies loses the copy of bytes on which the kernel has not reported, not the bytes.
//!
//! A program that changes the file beside us may have done so where bytes are loose. Bytes that it
//! cut off are not written again: the server looks at the file's length first. Bytes that it wrote
//! to the very range that is written again are overwritten by ours: the kernel does not report
//! which bytes it lost, so the program's bytes cannot be told from those that a disk has had there
//! all along, and without ours a client would lose acknowledged bytes.

use super::state::*;
use super::*;
use crate::write::{Released, Span};
use alloc::vec::Vec;

/// By then the kernel has written its cached bytes, which it does after 30 s, with a look every 5
/// s, and to ask about them makes no work.
const LOOSE_AGE: Duration = Duration::from_s(36);
/// Files that may have loose bytes; beyond that the oldest are written out at once.
const LOOSE_FILES_MAX: usize = 1024;
/// Pages that may be loose, as a part of the write buffer.
const LOOSE_PART: u64 = 16;
/// Files of one device that are written out at the same time while no client waits for it. A device
/// that gives no answer holds up no other.
const WRITING_OUT_MAX: usize = 2;

impl Server {
    /// A span has gone into the kernel's cache, and nothing newer came in its place meanwhile.
    pub(super) fn loosen(&mut self, id: FileId, span: Span, actions: &mut Actions) {
        let (Some(old), Some(file)) = (self.pieces.get(span.piece.0), self.files.get_mut(&id))
        else {
            unreachable!("a span of a write that has just ended has its piece and its file");
        };
        self.loose_count += 1;
        let piece = Piece {
            loose: span.range.length.0,
            loosened: self.loose_count,
            ..old.part(&span)
        };
        let lane = self.lanes.get_mut(&piece.lane);
        let lane = lane.expect("a lane with a piece is not done");
        lane.pages.hold(&piece.runs);
        let is_left = lane.session.is_none();
        let key = PieceKey(self.pieces.insert(piece));
        let mut released = Vec::new();
        file.writing.loose.commit(span.range, key, &mut released);
        if !file.writing.is_loose {
            file.writing.is_loose = true;
            file.use_count += 1;
            self.loose_files.push_back((self.now, id));
            actions.list.push(Action::Loose {
                file: id,
                is_loose: true,
            });
        }
        if is_left {
            self.hurry_loose(|_, other, _| other == id);
        }
        self.settle_loose(id, released, actions);
    }

    /// Newer bytes have come in the place of the loose ones, or nothing needs those any more.
    pub(super) fn discard_loose(&mut self, id: FileId, range: ByteRange, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        if !file.writing.loose.is_empty() {
            let mut released = Vec::new();
            file.writing.loose.discard(range, &mut released);
            self.settle_loose(id, released, actions);
        }
    }

    /// A client or a program has changed a file on its own descriptor, or has cut it.
    pub(super) fn changed_loose(&mut self, key: FileKey, range: ByteRange, actions: &mut Actions) {
        let Some(&id) = self.keys.get(&key) else {
            return;
        };
        if range.end() == u64::MAX {
            // The report does not say which bytes. The server asks for the file's length, and then
            // drops the loose bytes behind it.
            self.hurry_loose(|_, other, _| other == id);
        } else {
            self.discard_loose(id, range, actions);
        }
    }

    fn settle_loose(&mut self, id: FileId, released: Vec<Released>, actions: &mut Actions) {
        for gone in released {
            let piece = self.pieces.get_mut(gone.piece.0);
            let piece = piece.expect("loose bytes have their piece");
            piece.loose -= gone.bytes;
            self.strike_if_done(gone.piece, actions);
        }
        self.tight_if_none(id, actions);
    }

    fn tight_if_none(&mut self, id: FileId, actions: &mut Actions) {
        if let Some(file) = self.files.get_mut(&id)
            && file.writing.is_loose
            && file.writing.loose.is_empty()
        {
            file.writing.is_loose = false;
            self.loose_files.retain(|(_, other)| *other != id);
            actions.list.push(Action::Loose {
                file: id,
                is_loose: false,
            });
            if self.policy.ends() {
                self.settle_clean(id, actions);
            }
            self.release(id, actions);
        }
    }

    /// A sync has succeeded, which covers the pieces that were loose when it was asked for.
    pub(super) fn loose_synced(&mut self, id: FileId, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let until = file.writing.synced_loose;
        let pieces = &self.pieces;
        let is_covered = |span: &Span| {
            let piece = pieces.get(span.piece.0);
            piece.is_some_and(|piece| piece.loosened <= until)
        };
        let all = file.writing.loose.spans(ByteRange::new(0, u64::MAX));
        let covered: Vec<ByteRange> = all.filter(is_covered).map(|span| span.range).collect();
        let mut released = Vec::new();
        for range in covered {
            file.writing.loose.discard(range, &mut released);
        }
        self.settle_loose(id, released, actions);
        self.look_again_at_loose(id);
    }

    /// A file that is still loose waits for its turn like any other.
    fn look_again_at_loose(&mut self, id: FileId) {
        if self.is_unseen(id) {
            self.loose_files.push_back((self.now, id));
            self.hurry_loose(|server, other, file| other == id && server.is_left_loose(file));
        }
    }

    /// Loose bytes of it lie in a lane without a session, which goes when it is empty.
    pub(super) fn is_left_loose(&self, file: &File) -> bool {
        let mut spans = file.writing.loose.spans(ByteRange::new(0, u64::MAX));
        spans.any(|span| {
            let piece = self.pieces.get(span.piece.0);
            let lane = piece.and_then(|piece| self.lanes.get(&piece.lane));
            lane.is_some_and(|lane| lane.session.is_none())
        })
    }

    /// The driver could not try it now.
    pub(super) fn try_loose_again(&mut self, id: FileId) {
        if self.is_unseen(id) {
            let soon = self.now + LOOK_AGAIN;
            let since = Instant(soon.0.saturating_sub(LOOSE_AGE.0).max(1));
            self.loose_files.push_front((since, id));
        }
    }

    /// It has loose bytes, and waits in no list for its turn.
    fn is_unseen(&self, id: FileId) -> bool {
        let file = self.files.get(&id);
        file.is_some_and(|file| file.writing.is_loose)
            && !self.loose_files.iter().any(|(_, other)| *other == id)
    }

    /// The kernel has reported an error to the driver that no sync will get any more. No client
    /// gets it: all loose bytes are written again, and each sync gets the result of that.
    pub(super) fn not_kept(&mut self, id: FileId, errno: Errno, actions: &mut Actions) {
        if let Some(file) = self.files.get_mut(&id)
            && file.writing.is_syncing
        {
            file.writing.not_kept = Some(errno);
        }
        self.write_again(id, None, actions);
    }

    /// A sync has ended with an error, which the kernel will not report again: loose bytes are
    /// dirty as before they were written.
    ///
    /// `told`  the error for clients that write or sync before the device has the bytes
    pub(super) fn write_again(&mut self, id: FileId, told: Option<Errno>, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        // The error may have been that of bytes on their way into the kernel's cache.
        file.writing.failed_syncs += 1;
        let loose = core::mem::take(&mut file.writing.loose);
        if loose.is_empty() {
            return;
        }
        let mut released = Vec::new();
        for span in loose.spans(ByteRange::new(0, u64::MAX)) {
            let old = self.pieces.get(span.piece.0);
            let old = old.expect("loose bytes have their piece");
            let lane = self.lanes.get_mut(&old.lane);
            let lane = lane.expect("a lane with a piece is not done");
            // From now on these bytes count as being nowhere else: the next server has to write
            // them. Without a free record only this server knows of them.
            let piece = Piece {
                record: lane.records.pop().unwrap_or(NO_RECORD),
                live: span.range.length.0,
                ..old.part(&span)
            };
            lane.pages.hold(&piece.runs);
            if piece.record != NO_RECORD {
                actions.list.push(Action::Publish {
                    lane: piece.lane,
                    record: piece.record,
                    file: id,
                    range: piece.range,
                    runs: piece.runs,
                    request: None,
                });
            }
            let commit = piece.commit;
            let key = PieceKey(self.pieces.insert(piece));
            file.writing.reach_for(span.range);
            let commits = &mut file.writing.commits;
            let place = commits.partition_point(|(other, _)| *other <= commit);
            commits.insert(place, (commit, key));
            let again = Span {
                piece: key,
                at: 0,
                ..span
            };
            file.writing.dirty.put(&again, &mut released);
        }
        assert!(
            released.is_empty(),
            "bytes are loose that newer ones have come in the place of"
        );
        if !file.writing.is_listed {
            file.writing.is_listed = true;
            file.use_count += 1;
            if let Some(device) = self.devices.get_mut(&file.device) {
                device.writers.push_back(id);
            }
        }
        file.writing.is_cut_doubted |= file.size_stale;
        if let Some(errno) = told {
            let commits = self.commit_count;
            file.writing.failed_to_write(errno, self.now, commits);
        }
        self.change_count += 1;
        file.changed = self.change_count;
        let device = file.device;
        for span in loose.spans(ByteRange::new(0, u64::MAX)) {
            self.drop_blocks(id, span.range.start.0, span.range.end());
            let old = self.pieces.get_mut(span.piece.0);
            let old = old.expect("loose bytes have their piece");
            old.loose -= span.range.length.0;
            self.strike_if_done(span.piece, actions);
        }
        self.make_known(id, actions);
        self.touch(device);
        self.tight_if_none(id, actions);
        self.retry_waiting(id, actions);
    }

    /// The file ends at `end`, and another program may have cut it: drop bytes behind that which
    /// had to be written again. Bytes committed since lengthen the file, as they would have done
    /// then. True: the cut was in doubt.
    pub(super) fn drop_what_was_cut(
        &mut self,
        id: FileId,
        end: u64,
        actions: &mut Actions,
    ) -> bool {
        let Some(file) = self.files.get_mut(&id) else {
            return false;
        };
        if !core::mem::take(&mut file.writing.is_cut_doubted) {
            return false;
        }
        let pieces = &self.pieces;
        let is_again = |span: &Span| {
            let piece = pieces.get(span.piece.0);
            piece.is_some_and(|piece| piece.loosened > 0)
        };
        let beyond = ByteRange::new(end, u64::MAX - end);
        let spans = file.writing.dirty.spans(beyond).filter(is_again);
        let cut: Vec<ByteRange> = spans.map(|span| span.range).collect();
        let mut released = Vec::new();
        for range in cut {
            file.writing.dirty.discard(range, &mut released);
        }
        let device = file.device;
        self.settle_released(&mut released, actions);
        self.touch(device);
        true
    }

    /// Make the kernel write the loose bytes, and report whether it could. No more than that: a
    /// client that wants stable storage asks for it.
    pub(super) fn write_out(&mut self, id: FileId, actions: &mut Actions) {
        self.loose_files.retain(|(_, other)| *other != id);
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &mut file.writing;
        // A sync under way looks after the rest when it has ended.
        if !writing.is_loose || writing.is_syncing {
            return;
        }
        writing.is_syncing = true;
        writing.is_writing_out = true;
        writing.syncing = 0;
        writing.synced_loose = self.loose_count;
        self.writing_out.push(id);
        actions.list.push(Action::WriteOut { file: id });
    }

    /// A device fails, or a program changes a file beside us: write these files out first, so that
    /// the fate of their loose bytes is known soon.
    pub(super) fn hurry_loose(&mut self, which: impl Fn(&Server, FileId, &File) -> bool) {
        let is_meant = |id: &FileId| {
            let file = self.files.get(id);
            file.is_some_and(|file| which(self, *id, file))
        };
        let meant = self.loose_files.iter().map(|(_, id)| *id).filter(is_meant);
        let meant: Vec<FileId> = meant.collect();
        self.loose_files.retain(|(_, id)| !meant.contains(id));
        for id in meant {
            self.loose_files.push_front((Instant::ZERO, id));
        }
    }

    /// Write out loose bytes that no sync has covered for so long, or whose memory a write needs.
    pub(super) fn write_out_due(&mut self, actions: &mut Actions) {
        while let Some((since, id)) = self.next_to_write_out()
            && self.now >= self.loose_due(since)
        {
            self.write_out(id, actions);
        }
    }

    /// The first file whose device has few enough under way.
    fn next_to_write_out(&self) -> Option<(Instant, FileId)> {
        let device_of = |id: &FileId| self.files.get(id).map(|file| file.device);
        let mut busy: Vec<Option<DeviceId>> = self.writing_out.iter().map(device_of).collect();
        busy.sort_unstable();
        // A device is full where its last place of so many is one of its first, too.
        let is_full = |device: Option<DeviceId>| {
            let first = busy.partition_point(|other| *other < device);
            busy.get(first + WRITING_OUT_MAX - 1) == Some(&device)
        };
        let may_be = |(_, id): &&(Instant, FileId)| busy.is_empty() || !is_full(device_of(id));
        self.loose_files.iter().find(may_be).copied()
    }

    fn loose_due(&self, since: Instant) -> Instant {
        let held = |lane: &LaneState| u64::from(lane.pages.held_count()) * PAGE_BYTES;
        let is_much = || {
            let all: u64 = self.lanes.values().map(held).sum();
            all > self.limits.write_buffer_bytes / LOOSE_PART
        };
        let is_wanted = || self.lanes.values().any(|lane| !lane.waiting.is_empty());
        let is_hurried = since == Instant::ZERO;
        if is_hurried
            || self.policy.ends()
            || self.loose_files.len() > LOOSE_FILES_MAX
            || is_much()
            || is_wanted()
        {
            return self.now;
        }
        since + LOOSE_AGE
    }

    /// When the next loose bytes are due to be written out.
    pub(super) fn loose_wake(&self) -> Instant {
        let next = self.next_to_write_out();
        next.map_or(Instant::NEVER, |(since, _)| self.loose_due(since))
    }

    /// A lane in which no page is in use, loose or otherwise: its memory is of no use.
    pub fn is_lane_unused(&self, lane: LaneId) -> bool {
        self.lanes
            .get(&lane)
            .is_some_and(|state| state.pages.free_count() == state.pages.page_count())
    }
}
