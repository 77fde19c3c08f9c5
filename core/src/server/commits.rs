// SPDX-License-Identifier: Apache-2.0
//! A write is committed: its piece is published and acknowledged. Pieces end, and their records are
//! struck, when the device has their bytes; pieces that a former server left are taken up here.

use super::state::*;
use super::*;
use crate::write::{PieceKey, Released, Span};
use alloc::vec::Vec;

impl Server {
    pub(super) fn write_end(
        &mut self,
        session: SessionId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        let Some(grant) = self.grants.remove(&(session, request)) else {
            if self.sessions.contains_key(&session) {
                actions.list.push(Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Failed(Errno::INVALID),
                });
            }
            return;
        };
        let id = grant.file;
        actions.list.push(Action::Publish {
            lane: grant.lane,
            record: grant.record,
            file: id,
            range: grant.range,
            runs: grant.runs,
            request: Some(request),
        });
        if let Some(file) = self.files.get_mut(&id) {
            file.writing.grant_count -= 1;
        }
        self.commit(&grant, actions);
        actions.list.push(Action::Reply {
            session,
            request,
            outcome: Outcome::Done,
        });
        // The grant's use of the file; the dirty bytes have one of their own.
        self.release(id, actions);
    }

    /// The client gives its grant up.
    pub(super) fn write_abort(
        &mut self,
        session: SessionId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        if let Some(grant) = self.grants.remove(&(session, request)) {
            self.void_grant(&grant, actions);
        }
    }

    /// A former daemon has published this record; the driver passes it on later.
    pub(super) fn record_kept(&mut self, lane: LaneId, record: u32) {
        if let Some(state) = self.lanes.get_mut(&lane)
            && state.records.contains(&record)
        {
            state.records.retain(|&free| free != record);
            state.kept.insert(record);
        }
    }

    /// A former daemon has published this record.
    pub(super) fn recovered(
        &mut self,
        lane: LaneId,
        record: u32,
        facts: FileFacts,
        (range, runs): (ByteRange, Runs),
        actions: &mut Actions,
    ) {
        let is_spent = runs.as_slice().is_empty();
        let id = self.adopt(facts, (self.change_count, None), actions);
        let page_count = range.end().div_ceil(PAGE_BYTES) - range.start.0 / PAGE_BYTES;
        let fits = (is_spent || u64::from(runs.page_count()) == page_count) && range.length.0 > 0;
        let mut shares_pages = false;
        let claimed = fits
            && self.lanes.get_mut(&lane).is_some_and(|state| {
                let known = state.records.contains(&record) || state.kept.contains(&record);
                let is_alone = known && state.pages.claim(&runs);
                // Two parts of one former piece may lie in one page.
                shares_pages = known && !is_alone && state.pages.claim_beside(&runs);
                let claimed = is_alone || shares_pages;
                self.unclaimed_count += u64::from(!claimed);
                state.records.retain(|&free| free != record);
                // A piece that cannot be claimed stays where it is: no other piece gets its record.
                if claimed {
                    state.kept.remove(&record);
                } else if known {
                    state.kept.insert(record);
                }
                claimed
            });
        if claimed {
            let grant = Grant {
                file: id,
                range,
                lane,
                record,
                runs,
                shares_pages,
            };
            if let Some(file) = self.files.get_mut(&id) {
                file.writing.is_reserved = true;
            }
            if is_spent {
                self.recover_spent(&grant, actions);
            } else {
                self.commit(&grant, actions);
            }
        }
        self.release(id, actions);
    }

    /// The device has the bytes of this record: older pieces must not write over them.
    fn recover_spent(&mut self, grant: &Grant, actions: &mut Actions) {
        self.commit_count += 1;
        let piece = PieceKey(self.pieces.insert(Piece {
            file: grant.file,
            lane: grant.lane,
            record: grant.record,
            runs: Runs::default(),
            shares_pages: false,
            range: grant.range,
            commit: self.commit_count,
            since: self.commit_count,
            committed: self.now,
            live: 0,
            flights: 0,
            loose: 0,
            loosened: 0,
            hides: 0,
            hidden_by: Vec::new(),
            is_announcement: false,
        }));
        let mut released = core::mem::take(&mut self.released);
        if let Some(file) = self.files.get_mut(&grant.file) {
            note_hidden(&mut self.pieces, &self.write_flights, &file.writing, piece);
            file.writing.dirty.discard(grant.range, &mut released);
        }
        // Its time may not be set yet.
        self.list_writer(grant.file);
        self.discard_loose(grant.file, grant.range, actions);
        if self
            .pieces
            .get(piece.0)
            .is_some_and(|piece| piece.hides == 0)
        {
            self.strike_or_remember(piece, actions);
        }
        self.settle_released(&mut released, actions);
        self.released = released;
        self.settle_clean(grant.file, actions);
    }

    /// The bytes of a grant are the file's from now on.
    fn commit(&mut self, grant: &Grant, actions: &mut Actions) {
        let (id, range) = (grant.file, grant.range);
        let is_announcement = self
            .files
            .get(&id)
            .is_some_and(|file| file.is_announcement(range));
        self.commit_count += 1;
        let commit = self.commit_count;
        let piece = PieceKey(self.pieces.insert(Piece {
            file: id,
            lane: grant.lane,
            record: grant.record,
            runs: grant.runs,
            shares_pages: grant.shares_pages,
            range,
            commit,
            since: commit,
            committed: self.now,
            live: range.length.0,
            flights: 0,
            loose: 0,
            loosened: 0,
            hides: 0,
            hidden_by: Vec::new(),
            is_announcement,
        }));
        self.drop_blocks(id, range.start.0, range.end());
        let mut released = core::mem::take(&mut self.released);
        self.list_writer(id);
        let file = self.files.get_mut(&id);
        let file = file.expect(
            "a file is known as long as somebody may write to it: these bytes are published",
        );
        note_hidden(&mut self.pieces, &self.write_flights, &file.writing, piece);
        file.writing.dirty.commit(range, piece, &mut released);
        file.writing.reach_for(range);
        file.writing.commits.push_back((commit, piece));
        file.writing.pace.committed(self.now, range);
        self.change_count += 1;
        file.changed = self.change_count;
        let device = file.device;
        if range.end() > file.size {
            self.resize(id, range.end());
        }
        // Also when the file does not grow: its time of change moves.
        self.make_known(id, actions);
        // Not before: without the new bytes, a file with nothing else left would count as clean.
        self.discard_loose(id, range, actions);
        self.settle_released(&mut released, actions);
        self.released = released;
        self.touch(device);
        self.retry_waiting(id, actions);
    }

    /// Enter the file in its device's list of writers, which counts as a use. While the driver
    /// passes on the pieces of a former daemon a listed file may have nothing dirty for a moment.
    fn list_writer(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(&id)
            && !file.writing.is_listed
            && let Some(device) = self.devices.get_mut(&file.device)
        {
            file.writing.is_listed = true;
            file.use_count += 1;
            device.writers.push_back(id);
        }
    }

    /// Report the length of a file with dirty bytes to the doors. Also while the server is still
    /// asking for its length: doors must always know that the file has bytes which the file system
    /// lacks.
    pub(super) fn make_known(&mut self, id: FileId, actions: &mut Actions) {
        let now = self.now;
        if let Some(file) = self.files.get_mut(&id)
            && !file.writing.dirty.is_empty()
        {
            let size = ByteCount(file.size.max(file.writing.dirty.end()));
            actions.list.push(Action::Known { file: id, size });
            if file.size_stale && file.stat.is_none() {
                file.stat = Some(Asked::since(now));
                actions.list.push(Action::Stat { file: id });
            }
        }
    }

    pub(super) fn void_grant(&mut self, grant: &Grant, actions: &mut Actions) {
        if let Some(file) = self.files.get_mut(&grant.file) {
            file.writing.grant_count -= 1;
        }
        if let Some(state) = self.lanes.get_mut(&grant.lane) {
            state.pages.give(&grant.runs);
            state.records.push(grant.record);
        }
        self.roomier();
        self.lane_emptied(grant.lane, actions);
        self.settle_waiters(grant.file, actions);
        self.trim_if_left(grant.file, actions);
        self.release(grant.file, actions);
    }

    /// The map has released bytes: strike the pieces that nothing needs any more.
    pub(super) fn settle_released(&mut self, released: &mut Vec<Released>, actions: &mut Actions) {
        for gone in released.drain(..) {
            let piece = self.pieces.get_mut(gone.piece.0);
            let piece = piece.expect("bytes that a map lets go of have their piece");
            assert!(
                gone.bytes <= piece.live,
                "a map lets go of {} bytes of a piece that has {}",
                gone.bytes,
                piece.live
            );
            piece.live -= gone.bytes;
            self.strike_if_done(gone.piece, actions);
        }
    }

    /// Give back the pages of a piece that nothing needs; and its record, unless a later server
    /// would need to know that the piece came after an older one.
    pub(super) fn strike_if_done(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.get_mut(key.0) else {
            return;
        };
        if !piece.is_spent() || piece.runs.as_slice().is_empty() {
            return;
        }
        let (lane, record) = (piece.lane, piece.record);
        let runs = core::mem::take(&mut piece.runs);
        let hidden_by = core::mem::take(&mut piece.hidden_by);
        let hides = piece.hides;
        let shares_pages = piece.shares_pages;
        let state = self.lanes.get_mut(&lane);
        let state = state.expect("a lane with a piece is not done");
        match shares_pages {
            true => state.pages.let_go(&runs),
            false => state.pages.give(&runs),
        }
        if record == NO_RECORD {
            self.pieces.remove(key.0);
            self.roomier();
            return self.lane_emptied(lane, actions);
        }
        if hides > 0 {
            actions.list.push(Action::Spent { lane, record });
        } else {
            self.strike_or_remember(key, actions);
        }
        for newer in hidden_by {
            let piece = self.pieces.get_mut(newer.0);
            let piece = piece.expect("a piece has its record as long as it hides another");
            assert!(piece.hides > 0, "a piece hides more than it counted");
            piece.hides -= 1;
            if piece.hides == 0 && piece.runs.as_slice().is_empty() {
                self.strike_or_remember(newer, actions);
            }
        }
        self.roomier();
    }

    /// Strike the piece's record too, unless a later server learns from it that the file's time is
    /// not set yet.
    fn strike_or_remember(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.get(key.0) else {
            return;
        };
        let (lane, record) = (piece.lane, piece.record);
        match self.files.get_mut(&piece.file) {
            Some(file) if file.writing.is_listed && file.writing.remembered.is_none() => {
                file.writing.remembered = Some(key);
                actions.list.push(Action::Spent { lane, record });
            }
            _ => self.strike(key, actions),
        }
    }

    /// The file system has the file's time: the record kept for it goes.
    pub(super) fn strike_remembered(&mut self, id: FileId, actions: &mut Actions) {
        let file = self.files.get_mut(&id);
        if let Some(key) = file.and_then(|file| file.writing.remembered.take()) {
            self.strike(key, actions);
        }
    }

    /// Strike the piece's record too.
    fn strike(&mut self, key: PieceKey, actions: &mut Actions) {
        let Some(piece) = self.pieces.remove(key.0) else {
            return;
        };
        let (lane, record) = (piece.lane, piece.record);
        actions.list.push(Action::Strike { lane, record });
        if let Some(state) = self.lanes.get_mut(&lane) {
            state.records.push(record);
        }
        self.lane_emptied(lane, actions);
    }
}

/// Count `newer` as hiding the older pieces of its file that have pages and share bytes with it.
/// Also pieces that are on the device already: a later server does not know that.
fn note_hidden(
    pieces: &mut slab::Slab<Piece>,
    write_flights: &slab::Slab<WriteFlight>,
    writing: &Writing,
    newer: PieceKey,
) {
    let Some((range, mut since)) = pieces.get(newer.0).map(|piece| (piece.range, piece.since))
    else {
        return;
    };
    let (reach_start, reach_end) = writing.reach;
    if range.start.0 >= reach_end || range.end() <= reach_start {
        return;
    }
    let mut hides = 0;
    for (commit, key) in &writing.commits {
        if let Some(older) = pieces.get_mut(key.0)
            && older.commit == *commit
            && older.range.overlaps(range)
            && !older.runs.as_slice().is_empty()
        {
            // A later server does not learn of a piece without a record.
            if older.record != NO_RECORD {
                older.hidden_by.push(newer);
                hides += 1;
            }
            // Bytes on their way reach the device, or their file fails.
            let first = older.range.start.0.max(range.start.0);
            let end = older.range.end().min(range.end());
            let has = |span: &Span| {
                span.piece == *key && span.range.start.0 <= first && span.range.end() >= end
            };
            let is_on_its_way = older.flights > 0
                && write_flights
                    .iter()
                    .any(|(_, flight)| flight.spans.iter().any(has));
            if older.live > 0 && !is_on_its_way {
                since = since.min(older.since);
            }
        }
    }
    if let Some(piece) = pieces.get_mut(newer.0) {
        piece.hides = hides;
        piece.since = since;
    }
}

impl Writing {
    /// A piece with these bytes is about to be among the commits.
    pub(super) fn reach_for(&mut self, range: ByteRange) {
        let (start, end) = match self.commits.is_empty() {
            true => (u64::MAX, 0),
            false => self.reach,
        };
        self.reach = (start.min(range.start.0), end.max(range.end()));
    }
}
