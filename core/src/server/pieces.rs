// SPDX-License-Identifier: Apache-2.0
//! Acknowledged bytes on their way to a device: pieces, the lanes that hold them, and the requests
//! that write them. `commits` makes and ends pieces, `writeback` sends them.

use super::*;
use crate::write::{Lane, Runs, Span};

/// A lane without a grant for so long is not written to.
const LANE_IDLE: Duration = Duration::from_s(10);

/// A committed write. It has its pages as long as the map points to it or a request reads from it.
/// It has its record longer if it hides part of an older piece that still has pages: a later
/// server, which finds that one, must not write it over newer bytes.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub file: FileId,
    pub lane: LaneId,
    /// [`NO_RECORD`]: it is loose, or was and there was no record for it.
    pub record: u32,
    pub runs: Runs,
    /// It is, or was, a part of another piece: it holds its pages and has not taken them.
    pub shares_pages: bool,
    pub range: ByteRange,
    /// Number of its commit.
    pub commit: u64,
    /// The oldest commit of which bytes reach the device through this one alone: they were written
    /// over before they were on their way. A sync of the older bytes waits for the bytes that are
    /// there now.
    pub since: u64,
    pub committed: Instant,
    /// Bytes of it that the file's map points to.
    pub live: u64,
    /// Device requests that read from it.
    pub flights: u32,
    /// Bytes of it that are loose.
    pub loose: u64,
    /// Its number among all that became loose; 0: it never did.
    pub loosened: u64,
    /// Older pieces with pages of which it hides a part.
    pub hides: u32,
    /// Newer ones that hide a part of it.
    pub hidden_by: Vec<PieceKey>,
    /// A byte that says how long the file will be: the next bytes written will hide it.
    pub is_announcement: bool,
}

/// The piece of a commit, if it still exists: its key may be another's by now.
pub(super) fn piece_of<'a>(
    pieces: &'a super::slab::Slab<Piece>,
    &(commit, key): &(u64, PieceKey),
) -> Option<&'a Piece> {
    pieces.get(key.0).filter(|piece| piece.commit == commit)
}

impl Piece {
    /// The oldest commit of which the device lacks something as long as this is under way.
    pub(super) fn owed(&self) -> Option<u64> {
        // Also when it is written over on its way: the newer one counts on its getting there.
        (self.live > 0 || self.flights > 0).then_some(self.since)
    }

    /// These bytes of it, as a piece of their own, in the pages where they lie: no map points to it
    /// yet, and no table has its record.
    pub(super) fn part(&self, span: &Span) -> Piece {
        let from = self.range.start.0 % PAGE_BYTES + span.at;
        let first = from / PAGE_BYTES;
        let count = (from + span.range.length.0).div_ceil(PAGE_BYTES) - first;
        Piece {
            record: NO_RECORD,
            runs: self.runs.part(first as u32, count as u32),
            shares_pages: true,
            range: span.range,
            live: 0,
            flights: 0,
            loose: 0,
            hides: 0,
            hidden_by: Vec::new(),
            ..*self
        }
    }

    /// Nothing needs its pages any more.
    pub(super) fn is_spent(&self) -> bool {
        self.live == 0 && self.flights == 0 && self.loose == 0
    }
}

/// A lane: memory that a session writes to.
#[derive(Clone, Debug)]
pub(super) struct LaneState {
    pub pages: Lane,
    /// The session that writes to it; None: it has ended.
    pub session: Option<SessionId>,
    /// Records of its table that are free.
    pub records: Vec<u32>,
    /// Records of a former server that the driver passes on later, or that could not be claimed.
    pub kept: BTreeSet<u32>,
    pub record_count: u32,
    /// Writes that wait for room in it.
    pub waiting: VecDeque<u32>,
    /// When pages of it were last granted.
    pub granted: Instant,
}

impl LaneState {
    /// Units: bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        u64::from(self.pages.page_count() - self.pages.free_count()) * PAGE_BYTES
    }

    /// Of those, the bytes that are loose and nothing else. Units: bytes.
    pub(super) fn loose_bytes(&self) -> u64 {
        u64::from(self.pages.held_alone_count()) * PAGE_BYTES
    }

    /// The size of its memory. Units: bytes.
    pub(super) fn touched_bytes(&self) -> u64 {
        u64::from(self.pages.touched_count()) * PAGE_BYTES
    }

    /// Take a record of its table for a write that is granted. Any other would be another write's.
    pub(super) fn take_record(&mut self) -> u32 {
        let record = self.records.pop();
        let record = record.expect("pages are taken for a write when its lane has a record for it");
        assert!(
            record < self.record_count,
            "a lane was to give a record that it does not have"
        );
        record
    }

    pub(super) fn is_empty(&self) -> bool {
        (self.records.len() + self.kept.len()) as u32 == self.record_count
            && self.pages.held_count() == 0
    }

    /// A session writes to it and will want its memory again.
    pub(super) fn is_written_to(&self, now: Instant) -> bool {
        self.session.is_some() && (!self.waiting.is_empty() || now.since(self.granted) < LANE_IDLE)
    }
}

/// A write request in flight.
#[derive(Clone, Debug)]
pub(super) struct WriteFlight {
    /// Tells this entry from former ones under the same number.
    pub generation: u32,
    pub device: DeviceId,
    pub file: FileId,
    pub range: ByteRange,
    /// Through the kernel's cache.
    pub buffered: bool,
    /// Failed syncs of its file when it was sent.
    pub failed_syncs: u64,
    /// The kernel may have taken it into its cache, and has reported bytes that it could not write.
    pub lost: Option<Errno>,
    /// The kernel took it into its cache for the first time: the server writes it past that once
    /// more, and the record stays meanwhile.
    pub is_again: bool,
    pub spans: Vec<Span>,
    /// Buffers that it writes from.
    pub pins: Vec<SlotIndex>,
    pub cost: Duration,
    pub deadline: Instant,
    pub calibrated: Duration,
}
