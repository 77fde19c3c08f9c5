// SPDX-License-Identifier: Apache-2.0
//! The server's memory: sessions, handles, files, reads, devices. Plain records; the verbs are in
//! the files beside this one.

use super::api::*;
use super::clock::PlayClock;
use super::frames::Frames;
use super::glances::{Glances, Row};
use super::headers::UnreadHeaders;
use crate::sched::{RefinedModel, admission};
use crate::stream::{Cadence, CursorIndex, Recogniser};
use crate::units::*;
use crate::write::{DirtyMap, Lane, Pace, PieceKey, Runs, Span};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

/// After a device failed to write.
const TRY_AGAIN: Duration = Duration::from_s(1);
/// A lane that nobody was granted pages of for so long is not written to.
const LANE_IDLE: Duration = Duration::from_s(10);

/// A client connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    pub label: SessionLabel,
    /// Bytes of slots in its hands.
    pub pinned_bytes: u64,
    pub handle_count: u32,
    /// Reads that wait for it to release pins, oldest first.
    pub parked: VecDeque<u32>,
    /// Where it writes; None: it has no lane, and writes on its own descriptors.
    pub lane: Option<LaneId>,
    /// Of which pool's door it is one.
    pub pool: Option<PoolNumber>,
    /// How much was read at one place before it cut to another, in the mean; None: it has never
    /// cut. Units: bytes.
    pub run_bytes: Option<u64>,
    /// It has played: a reader of it waited for its clock and not for us.
    pub has_played: bool,
    /// The clock of the run that was read last, in any file.
    pub clock: Option<PlayClock>,
    /// Places that it left at once.
    pub glances: Glances,
    /// Reads that were served as the beginning of playing, and nothing has come of it yet.
    pub look_count: u8,
    /// Nothing came of such reads: until then they are served as any others.
    pub presumed_wrongly_until: Instant,
}

/// The thing that a handle stands for.
#[derive(Clone, Debug)]
pub(super) enum HandleState {
    /// The driver is finding out about the file; requests that came meanwhile.
    Opening(Waiting),
    /// A file that is served.
    Ready(FileId),
    /// Not served: every read is answered [`Outcome::Plain`].
    Plain,
}

/// Requests that came before their file was known.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiting {
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
    pub syncs: Vec<RequestId>,
}

/// A file as one client has it open.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub state: HandleState,
    pub path: String,
    /// Which part of the file of that path it is.
    pub part: FilePart,
    /// `change_count` of the server when the driver was asked about its file.
    pub asked: u64,
    /// When that was.
    pub asked_at: Instant,
    pub recogniser: Recogniser,
    pub cadence: Cadence,
    /// The ledger's line for this handle.
    pub stream: Option<StreamId>,
    /// The user and client at the handle's other end, where its session does not say it.
    pub station: Option<Station>,
    /// Rate it should be read at, once known.
    pub hint: Option<RateHint>,
}

impl Handle {
    /// It goes on being read as no frame is, and nobody has said that it is one.
    pub(super) fn is_clip(&self) -> bool {
        let ruled = matches!(self.hint, Some(RateHint::FramesPerKilosecond(..)));
        !ruled && self.cadence.is_long()
    }

    /// Its header decides at what it is read: no rule does.
    pub(super) fn is_unruled(&self) -> bool {
        matches!(
            self.hint,
            None | Some(RateHint::Rate(_, RateSource::Header))
        )
    }

    /// The part of a file's hint that holds for this part of the file. None: a part is no frame.
    pub(super) fn part_of(&self, hint: RateHint) -> Option<RateHint> {
        match hint {
            RateHint::Rate(rate, source) => Some(RateHint::Rate(self.part.of(rate), source)),
            RateHint::FramesPerKilosecond(..) => self.part.is_whole().then_some(hint),
        }
    }
}

/// A device that had nothing to do within so long keeps up.
const KEEPS_UP: Duration = Duration::from_s(2);

/// A file the driver holds open.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub key: FileKey,
    pub device: DeviceId,
    pub size: u64,
    /// Size must be asked for before anybody is told where the file ends.
    pub size_stale: bool,
    /// A Stat is on its way.
    pub stat: Option<Asked>,
    /// `change_count` of the server at the file's last change: an older answer says nothing of its
    /// end.
    pub changed: u64,
    pub version: u64,
    pub looks: Looks,
    pub extents: Vec<Extent>,
    pub blocks: BTreeMap<u64, SlotIndex>,
    /// Reads that wait for bytes of it.
    pub waiting: Vec<u32>,
    /// Handles, sequences and device requests that need it open.
    pub use_count: u32,
    /// Number of the use that was the last, if that is over.
    pub unused_since: u64,
    /// No name leads to it any more, its key was taken over, or it is let go of: forget it with its
    /// last use.
    pub gone: bool,
    /// How it may be written.
    pub way: WriteWay,
    /// Nobody but clients of ours writes to it, as far as anybody has said or shown.
    pub is_exclusive: bool,
    pub header: Looked,
    /// That was never read, and is to be.
    pub is_header_wanted: bool,
    pub writing: Writing,
}

/// Whether the cache has the bytes that the file has. A change need not be told of: a program that
/// stores into a mapping tells nobody, nor does one that hands a write to the kernel without
/// waiting for it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    /// Its version was asked for then: its cached bytes were right, and later ones were right when
    /// they came.
    pub at: Instant,
    /// The facts found then, or by the last open of it, came at this time.
    pub came: Instant,
    /// `File::changed` when it was last looked at.
    pub told: u64,
    pub doubt: Doubt,
}

/// Whether what came since a file's version became so may be older than that. In any doubt it is
/// dropped when the version is no longer fresh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Doubt {
    #[default]
    None,
    /// No more than that.
    Last,
    /// Clients of ours made it that version, by themselves perhaps: it is dropped, too, once they
    /// are quiet from one look to the next. A reader that follows a recording keeps its bytes as
    /// long as the recording goes on.
    Ours,
    /// It was so when the file became known, and nobody knows the writer that made it so: it is
    /// dropped at each look, too, until a client of ours writes it.
    Unknown,
    /// A stranger did, or nobody has told of it: it is dropped at each look, too.
    Foreign,
}

/// The state of a file when it was looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version {
    pub version: u64,
    /// See [`FileFacts::is_fresh`].
    pub is_fresh: bool,
}

/// When its header was last looked at, and what the file was then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Looked {
    pub at: Instant,
    /// Not again before so long has passed.
    pub wait: Duration,
    /// As [`File::likeness`] has it.
    pub likeness: (u64, u64, u64, bool),
}

/// Bytes of a file on their way from clients to its device.
#[derive(Clone, Debug, Default)]
pub(super) struct Writing {
    /// Its length as the file system has it; `File::size` is what was acknowledged.
    pub native_size: u64,
    pub dirty: DirtyMap,
    /// Commits in order, with those that nobody needs any more between them: the first that is
    /// alive is the oldest.
    pub commits: VecDeque<(u64, PieceKey)>,
    /// From where to where those reach at most: a writer that goes on behind them hides none, and
    /// need not look at each. Start, end.
    pub reach: (u64, u64),
    /// Writes that wait for a grant, oldest first.
    pub waiting: Vec<u32>,
    /// Ranges granted and not committed.
    pub grant_count: u32,
    /// Bytes that went through the kernel's cache and are not known to have got to the device: see
    /// `loose`. Nothing of it is dirty.
    pub loose: DirtyMap,
    /// It has a use of the file for that.
    pub is_loose: bool,
    /// Its latest sync covers what had become loose up to this one, in the count of the server.
    pub synced_loose: u64,
    /// Syncs that ended with an error. Bytes that were on their way into the kernel's cache
    /// meanwhile are written again.
    pub failed_syncs: u64,
    /// Its last write past the kernel's cache went into it.
    pub falls_back: bool,
    /// So many of them, one behind the other, were told of something that the kernel could not keep
    /// (see [`LOST_IN_A_ROW`]).
    pub lost_count: u8,
    /// Bytes are to be written again that somebody may have cut off: none is before its length was
    /// looked at.
    pub is_cut_doubted: bool,
    /// The sync that the driver has is one for nobody but us.
    pub is_writing_out: bool,
    /// Ranges on their way to the device.
    pub flights: Vec<ByteRange>,
    /// A reservation is on its way, for these bytes.
    pub reserving: Option<ByteRange>,
    /// It is one ahead of need, up to here: nobody waits for it, and it uses the file.
    pub reserving_ahead_to: Option<u64>,
    /// The file was changed beside us since: blocks that the reservation found may be gone again.
    pub is_reservation_void: bool,
    /// From here on its extents may have been given back since we saw them.
    pub mapped_end: u64,
    /// Reserved blocks lie behind its end, perhaps.
    pub is_reserved: bool,
    /// A session that had it open ended without closing it: its client may write to it by itself.
    /// The reserved blocks are not ours to cut off then.
    pub is_open_elsewhere: bool,
    /// Blocks asked for ahead of need were not to be had.
    pub is_short: bool,
    /// Another writer meets a full disk: blocks reserved here are given back as soon as the file's
    /// bytes are written.
    pub gives_room: bool,
    /// Requests that wait for stable storage, and the last commit that each waits for.
    pub syncs: VecDeque<SyncWaiter>,
    /// A sync is with the driver. Its answer says nothing of what was written after it was asked
    /// for, so that it is one at a time.
    pub is_syncing: bool,
    /// An error that the driver was told of meanwhile, which that sync will not tell of.
    pub not_kept: Option<Errno>,
    /// So many, one behind the other, covered nothing for that (see [`LOST_IN_A_ROW`]).
    pub uncovered_syncs: u8,
    /// How often others have written to it by themselves, as far as we know: so far; before the
    /// sync under way was asked for; and before the last one that ended well.
    pub others_changed: u64,
    pub others_syncing: u64,
    pub others_synced: u64,
    /// For so many of `syncs`; fewer than it was asked for, when some of them have left or been
    /// told of a failure.
    pub syncing: usize,
    /// Sessions that change it on their own descriptors, or wait to do so with the request to be
    /// answered.
    pub holds: Vec<(SessionId, Option<RequestId>)>,
    /// Its device has failed to write; not to be tried again before.
    pub failed: Option<(Errno, Instant)>,
    /// The bytes that it was granted without a claim, counted from where its device was then.
    /// Units: bytes.
    pub progress: u64,
    /// Its device has failed since it last had everything that was committed until then: each
    /// client that syncs is told so, until it has.
    pub failing: Option<Errno>,
    /// The last commit before that.
    pub failing_since: u64,
    /// The next client that writes is to be told that it has begun to fail.
    pub refuses: bool,
    /// It is in its device's list of writers.
    pub is_listed: bool,
    /// A request over a gap has failed: each goes by itself then, and says itself what it lacks.
    pub is_unbridgeable: bool,
    /// Its file system has refused a request of whole pages that goes past the kernel's cache: all
    /// go through it then.
    pub is_direct_refused: bool,
    /// We have written to it since we knew its version: another one says nothing of others.
    pub is_unsettled: bool,
    /// Requests under way that change its times and blocks after we wrote.
    pub settling: u32,
    /// A piece of which nothing but its record is left, so that a later server sees to its time,
    /// should this one die before that is set.
    pub remembered: Option<PieceKey>,
    /// How fast it is being written.
    pub pace: Pace,
}

/// A request that waits for stable storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyncWaiter {
    pub session: SessionId,
    pub request: RequestId,
    /// Number of the last commit before it.
    pub commit: u64,
}

impl Writing {
    /// Bytes that others have written by themselves may not be on its device, as far as any sync of
    /// ours says. Nobody can write those again that the kernel loses. A session that holds the file
    /// may be writing.
    pub(super) fn may_have_bytes_of_others(&self) -> bool {
        self.others_changed > self.others_synced || !self.holds.is_empty()
    }

    /// Its device has what it lacked: nobody is told any more.
    pub(super) fn fails_no_more(&mut self) {
        self.failing = None;
        self.refuses = false;
    }

    /// Its device did not take something of the bytes committed so far: they are kept and tried
    /// again, and clients that write or sync are told.
    pub(super) fn failed_to_write(&mut self, errno: Errno, now: Instant, commit: u64) {
        self.failed = Some((errno, now + TRY_AGAIN));
        self.refuses |= self.failing.is_none();
        self.failing = Some(errno);
        self.failing_since = commit;
    }
}

/// A write that has no grant yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    /// Counts up: the order in which writes were asked for.
    pub asked: u64,
    pub session: SessionId,
    pub handle: HandleId,
    pub request: RequestId,
    pub range: ByteRange,
    /// Set once its handle is ready.
    pub file: Option<FileId>,
    /// The thing that it waits for, as of the last look.
    pub waits_for: WaitsFor,
}

/// The thing that a write in the line of its lane waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// Blocks, a length, a hold: nobody waits for it meanwhile.
    Other,
    /// Room in the write buffer: those behind it in its lane wait, too.
    Room,
    /// Its device, which has as much to write as it can in time, or others that write to that
    /// device: those behind it in its lane that write to the same one wait, too.
    Device,
    /// Its own file: that its older bytes are written, or that others get as far as it is.
    Itself,
}

/// Pages of a lane in a client's hands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    pub file: FileId,
    pub range: ByteRange,
    pub lane: LaneId,
    pub record: u32,
    pub runs: Runs,
    /// See [`Piece::shares_pages`].
    pub shares_pages: bool,
}

/// A committed write. It has its pages as long as the map points to it or a request reads from it;
/// its record it has longer, if it hides part of an older one that still has pages: a later server,
/// which finds that one, must not write it over what came after.
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
    /// The oldest commit that nothing but this one brings to the device: bytes of it were written
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
    /// The how manieth of all that became loose; 0: it never did.
    pub loosened: u64,
    /// Older pieces that it hides a part of and that have pages.
    pub hides: u32,
    /// Newer ones that hide a part of it.
    pub hidden_by: Vec<PieceKey>,
    /// A byte that says how long the file will be: the next bytes written will hide it.
    pub is_announcement: bool,
}

/// The piece of a commit, if that is not done with: its place may be another's by now.
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

    /// These bytes of it, as a piece that is a part of this one, in the pages that they lie in:
    /// nobody's bytes yet, and nothing in a table.
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

    /// Nobody needs its pages any more.
    pub(super) fn is_spent(&self) -> bool {
        self.live == 0 && self.flights == 0 && self.loose == 0
    }
}

/// A lane: memory that a session writes to.
#[derive(Clone, Debug)]
pub(super) struct LaneState {
    pub pages: Lane,
    /// The session that writes to it; None: nobody writes any more.
    pub session: Option<SessionId>,
    /// Records of its table that are free.
    pub records: Vec<u32>,
    /// Those of what a former server left and is told later.
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

    /// Of those, what is loose and nothing else. Units: bytes.
    pub(super) fn loose_bytes(&self) -> u64 {
        u64::from(self.pages.held_alone_count()) * PAGE_BYTES
    }

    /// The size of its memory. Units: bytes.
    pub(super) fn touched_bytes(&self) -> u64 {
        u64::from(self.pages.touched_count()) * PAGE_BYTES
    }

    /// A record of its table, for a write that is granted. Any other would be another write's.
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

    /// Somebody writes to it and will want again the memory that it has.
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
    /// The kernel may have taken it into its cache, and could not write something of that.
    pub lost: Option<Errno>,
    /// It took it there, for the first time: past it once more, and the record stays meanwhile.
    pub is_again: bool,
    pub spans: Vec<Span>,
    /// Buffers that it writes from.
    pub pins: Vec<SlotIndex>,
    pub cost: Duration,
    pub deadline: Instant,
    pub calibrated: Duration,
}

/// Changes of a file since its size was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// When it was asked for.
    pub at: Instant,
    /// It has at least this length.
    pub length: u64,
    /// Nobody knows where it ends now: the answer is worth nothing.
    pub is_void: bool,
}

impl Asked {
    pub(super) fn since(at: Instant) -> Asked {
        Asked {
            at,
            ..Asked::default()
        }
    }
}

impl File {
    /// How much of it the device can give. Bytes past the end that the file system knows are ours
    /// alone. Units: bytes.
    pub(super) fn device_size(&self) -> u64 {
        self.size.min(self.writing.native_size)
    }

    /// Nobody has used it since that use.
    pub(super) fn is_unused_since(&self, since: u64) -> bool {
        self.use_count == 0 && self.unused_since == since
    }

    /// Its version was asked for at `asked`, and was this. True: its cached bytes may be old.
    /// `strictly`: also when clients of ours have told of the change that made it so, or made it.
    pub(super) fn looked_at(
        &mut self,
        found: Version,
        (asked, now): (Instant, Instant),
        strictly: bool,
    ) -> bool {
        let is_ours = self.is_written_by_us(now);
        let moved = self.version != found.version;
        let is_quiet = self.changed == self.looks.told && !is_ours;
        if moved && is_quiet {
            self.writing.others_changed += 1;
        }
        let looks = &mut self.looks;
        looks.doubt = match looks.doubt {
            Doubt::Foreign => Doubt::Foreign,
            _ if moved && is_quiet => Doubt::Foreign,
            _ if moved => Doubt::Ours,
            Doubt::Unknown if !is_quiet => Doubt::Ours,
            doubt => doubt,
        };
        let is_over = !found.is_fresh && !is_ours;
        let is_old = match looks.doubt {
            Doubt::None => false,
            Doubt::Last => is_over,
            Doubt::Ours => is_over || is_quiet || (moved && strictly && !is_ours),
            Doubt::Unknown | Doubt::Foreign => true,
        };
        looks.doubt = match looks.doubt {
            _ if is_over => Doubt::None,
            Doubt::Ours if is_quiet => Doubt::Last,
            doubt => doubt,
        };
        looks.told = self.changed;
        looks.at = looks.at.max(asked);
        looks.came = now;
        self.version = found.version;
        is_old
    }

    /// A change of ours may move its version, now or before long.
    fn is_written_by_us(&self, now: Instant) -> bool {
        let writing = &self.writing;
        let is_about_to = !writing.waiting.is_empty() || writing.reserving.is_some();
        let goes_on = !writing.is_clean() || writing.pace.rate(now).0 > 0;
        writing.is_unsettled || writing.settling > 0 || is_about_to || goes_on
    }

    /// Whether it is to be looked at before a read that arrived at `arrived` is answered from the
    /// cache.
    pub(super) fn must_be_looked_at(&self, now: Instant, arrived: Instant, age: Duration) -> bool {
        !self.is_exclusive && arrived > self.looks.at && now.since(self.looks.at) >= age
    }

    /// Of a file that has another one than before the header may say something else.
    pub(super) fn likeness(&self) -> (u64, u64, u64, bool) {
        let is_dirty = !self.writing.dirty.is_empty() || !self.writing.flights.is_empty();
        (self.size, self.changed, self.version, is_dirty)
    }

    /// Where a byte lies on its device, and how many follow it there without a gap; unknown
    /// extents count as one run from the start of the device.
    pub(super) fn place(&self, offset: u64) -> (u64, u64) {
        let after = self
            .extents
            .partition_point(|extent| extent.logical.0 <= offset);
        let Some(extent) = after.checked_sub(1).and_then(|at| self.extents.get(at)) else {
            return (offset, u64::MAX - offset);
        };
        let into = offset - extent.logical.0;
        let left = extent.length.0.saturating_sub(into);
        if left == 0 {
            // A hole, or past what was mapped: up to the next extent it costs no positioning.
            let next = self
                .extents
                .get(after)
                .map_or(u64::MAX, |next| next.logical.0);
            return (extent.physical.0 + extent.length.0, next - offset);
        }
        (extent.physical.0 + into, left)
    }
}

/// A read that is not answered yet.
#[derive(Clone, Debug)]
pub(super) struct Read {
    pub session: SessionId,
    pub handle: HandleId,
    pub request: RequestId,
    pub range: ByteRange,
    pub arrived: Instant,
    pub sent: Instant,
    pub stream: Option<StreamId>,
    /// That stream has ended meanwhile: its line in the ledger.
    pub line: Option<u32>,
    /// Set once its handle is ready.
    pub file: Option<FileId>,
    /// When it is wanted of the device; NEVER for best effort.
    pub due: Instant,
    /// When it was promised, as things were when it arrived; NEVER: it was not.
    pub promised: Instant,
    /// When it is due by its player's clock; NEVER: the reader has none.
    pub played: Instant,
    /// When its handle was ready for it.
    pub begun: Instant,
    /// When its bytes were first asked of the device; NEVER: not yet.
    pub asked: Instant,
    /// It waited because no buffer was free.
    pub starved: bool,
    /// The file's size was asked for after it arrived.
    pub size_checked: bool,
    /// Device errors it has seen on requests larger than itself.
    pub retry_count: u8,
    /// Strangers that changed the file while it waited: bytes that came for it were old before it
    /// could be answered.
    pub voided_count: u8,
}

/// Slots in a client's hands.
#[derive(Clone, Debug)]
pub(super) struct Pinned {
    pub slots: [SlotIndex; crate::format::REPLY_SLOTS_MAX],
    pub count: u8,
    pub bytes: u64,
}

/// A device request in flight.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    /// Tells this entry from former ones under the same number.
    pub generation: u32,
    pub device: DeviceId,
    pub file: FileId,
    pub range: ByteRange,
    /// How long the file was on the device when this was sent, as far as we knew. Units: bytes.
    pub known_size: u64,
    pub slots: Vec<SlotIndex>,
    pub cost: Duration,
    /// When it is wanted; NEVER: by nobody under contract.
    pub deadline: Instant,
    /// Cost by the calibration alone.
    pub calibrated: Duration,
}

/// Bytes that a waiting read needs and no stream will fetch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub file: FileId,
    pub range: ByteRange,
    pub due: Instant,
    pub since: Instant,
    /// Of a reader with a stream that is fetched ahead.
    pub stream: Option<StreamId>,
}

/// How a stream goes through its bytes. `v` counts bytes in the order they are read, from where the
/// stream began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// File offset = origin + v.
    Forward,
    /// File offset = origin − v, each piece read forward.
    Reverse,
    /// Pieces of `piece` bytes, `stride` apart (from start to start; negative: towards the start of
    /// the file).
    Strided { stride: i64, piece: u64 },
    /// One file a frame.
    Frames,
}

/// The promises of all contracts together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Promised {
    /// Units: bytes a second.
    pub rate: u64,
    /// Buffers that they cannot do without. Units: bytes.
    pub least_bytes: u64,
}

impl Promised {
    /// Without a stream of that rate, which needs so many buffers at least.
    pub(super) fn less(self, rate: u64, least_bytes: u64) -> Promised {
        Promised {
            rate: self.rate.saturating_sub(rate),
            least_bytes: self.least_bytes.saturating_sub(least_bytes),
        }
    }
}

/// A slot kept for a stream until it has passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldSlot {
    pub slot: SlotIndex,
    /// The stream's `v` at the end of what it wants of it.
    pub end: u64,
}

/// A run of related reads, and its line in the ledger.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// As in [`StreamRecord::number`].
    pub number: u32,
    pub session: SessionId,
    /// Of the handle that it was last read by.
    pub station: Option<Station>,
    /// None once the handle is closed (a sequence lives between handles).
    pub handle: Option<HandleId>,
    /// File that is being fetched (of a sequence: the one the player is in).
    pub file: FileId,
    /// Where that lies. A sequence of a pool is fetched from others as well, see
    /// [`Stream::device_at`].
    pub device: DeviceId,
    pub path: String,
    /// Which part of the file of that path it is.
    pub part: FilePart,
    pub standing: Standing,
    pub rate: Option<(BytesPerSecond, RateSource)>,
    /// Why it was refused a contract, when that last happened.
    pub refusal: Option<Refusal>,
    /// It is a promise that its seat keeps, and nothing else: see `kept`. Its `origin` is where its
    /// place ended on the device.
    pub is_kept: bool,
    /// Its reader copies: it takes all that it is given, and needs no promise.
    pub is_copy: bool,
    /// How often the reader was taken for one.
    pub copied_count: u32,
    /// By how much of its rate the reader is ahead of a clock that runs with it. Units: ns.
    pub ahead_ns: i64,
    /// When that was reckoned.
    pub ahead_at: Instant,
    pub flow: Flow,
    pub frames: Option<Frames>,
    pub cursor: Option<CursorIndex>,
    /// Its reader jumps about, and nothing can be fetched before it is asked for.
    pub scattered: bool,
    /// Reads in a row that belonged to another cursor.
    pub stray_count: u32,
    /// The last reads of it in a row, and places that were left at once if no session tells its
    /// readers apart.
    pub row: Row,
    pub glances: Glances,
    /// Its reader cut to where it is now, and took the promise along.
    pub was_cut_to: bool,
    /// It is followed from a first read on, and nothing has shown yet that it is read on.
    pub is_presumed: bool,
    pub origin: u64,
    /// `v` of the next byte the player will ask for.
    pub consumed: u64,
    /// `v` up to which the device was asked. Of a sequence over several devices all that lies
    /// before: see [`Frames`].
    pub fetched: u64,
    /// When the player asked for v = 0 (or would have, at its rate).
    pub anchor: Instant,
    pub read_bytes: u64,
    pub held: VecDeque<HeldSlot>,
    pub last_read: Instant,
    /// The clock of the run that it follows, and of one that has begun elsewhere.
    pub clock: Option<PlayClock>,
    pub begun: Option<PlayClock>,
    // The ledger.
    pub read_count: u64,
    pub due_count: u64,
    pub late_count: u64,
    pub promised_count: u64,
    pub promised_late_count: u64,
    /// Its last read was answered late: by us, so the schedule stands.
    pub late_before: bool,
    /// The last read elsewhere that was served as part of what it is promised.
    pub looked_away: Instant,
    /// Reads of it that are not answered yet.
    pub waiting_count: u32,
    pub worst_lateness: Duration,
    pub guilty: [u64; Stage::COUNT],
    pub bytes: u64,
    pub hit_count: u64,
}

/// The holder of a claim on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visitor {
    /// A reader under contract.
    Reader(StreamId),
    /// A file that is written at a rate of its own.
    Writer(FileId),
}

/// A device and its queue.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub model: RefinedModel,
    pub head: u64,
    /// When the request now in service started.
    pub service_started: Instant,
    pub flight_count: u32,
    pub flight_bytes: u64,
    /// Sent since it last had nothing to do.
    pub batch_bytes: u64,
    /// Little of it is promised, and everybody can wait a while.
    pub is_at_ease: bool,
    /// At ease it was sent a read that somebody without a promise waits for: nothing else before
    /// that client has it, nor for a moment after.
    pub is_awaited: bool,
    pub rests_until: Instant,
    pub gaps: super::gaps::Gaps,
    /// When nobody wanted anything of it, last (see [`Device::keeps_up`]).
    pub satisfied_at: Instant,
    pub flight_cost: Duration,
    /// When each request with it is wanted.
    pub flight_deadlines: Vec<Instant>,
    /// Of what ended since it last had nothing to do: cost by the calibration alone, and time
    /// taken.
    pub batch_calibrated: Duration,
    pub batch_taken: Duration,
    pub contracts: Vec<StreamId>,
    /// The claimant with the visit that goes on.
    pub visiting: Option<Visitor>,
    /// The bytes that it got in this visit.
    pub visit_given: u64,
    /// Best-effort streams that fetch ahead.
    pub background: VecDeque<StreamId>,
    /// Bytes the first of `background` got in this visit.
    pub background_given: u64,
    pub demands: VecDeque<Demand>,
    pub headers: UnreadHeaders,
    pub best_effort_served: Instant,
    /// Streams that know their rate and were refused.
    pub refused: Vec<StreamId>,
    pub refused_asked: Instant,
    pub capacity_checked: Instant,
    /// Since when it cannot do what was promised; NEVER: it can.
    pub overloaded_since: Instant,
    /// Somebody wants the device and could not have it: look again without being asked.
    pub blocked: bool,
    /// It could not get buffers.
    pub starved: bool,
    /// Files with bytes that it does not have yet.
    pub writers: VecDeque<FileId>,
    /// Where the write that goes on ended: file and offset.
    pub write_goes_on: Option<(FileId, u64)>,
    /// As far as all writers to it without a claim have come. Units: bytes, counted up.
    pub progress: u64,
    /// The rates that writers keep to although they were held back, all together. Units: bytes a
    /// second.
    pub kept_rate: u64,
    /// Written in this visit. Units: bytes.
    pub write_given: u64,
    /// Of those without a promise, writers have their turn now, and so much of it they or the
    /// readers had.
    pub writers_turn: bool,
    pub turn_given: Duration,
    /// Requests are learned from together until then, since some of them write; those that ended,
    /// by the calibration and in truth.
    pub mixed_until: Instant,
    pub mixed_calibrated: Duration,
    pub mixed_taken: Duration,
    pub mixed_count: u32,
    /// Time that it was quicker than it can be: bytes in its memory, that it will write beside what
    /// comes.
    pub mixed_owed: Duration,
    /// Of a drive with a memory of its own: the bytes that it took since it was last told to flush.
    /// Units: bytes.
    pub unflushed: u64,
    /// When the medium will have that, as far as can be known.
    pub medium_free_at: Instant,
    /// It is told to, since then.
    pub flushing_since: Option<Instant>,
    /// Nothing else was asked of it meanwhile.
    pub flushes_alone: bool,
    /// It can be told to.
    pub can_flush: bool,
    // For the ledger.
    pub request_count: [u64; 2],
    pub bytes: [u64; 2],
    /// Requests that wrote, and their bytes.
    pub write_count: u64,
    pub write_bytes: u64,
    /// The parts of `bytes`, of both kinds, and of `write_bytes` that lay between wanted bytes.
    pub read_bridged: u64,
    pub write_bridged: u64,
    /// Turns in which it was sent something.
    pub batch_count: u64,
    /// How often it was told to flush.
    pub flush_count: u64,
    pub busy: Duration,
}

/// So long after a write requests are learned from together, and so many of them.
const MIXED_FOR: Duration = Duration::from_s(2);
const MIXED_SPAN: Duration = Duration::from_s(2);
/// The time of such a lot that is carried over to the next at most.
const MIXED_OWED: Duration = Duration::from_s(4);
/// The time of writes that the medium is believed to have before it at most, and the part of it
/// that counts when the next request is chosen.
const OWED_MAX: Duration = Duration::from_s(10);
const OWED_COUNTED: Duration = Duration::from_s(2);
/// Longer than that nobody waits for a flush.
const FLUSH_WAIT: Duration = Duration::from_s(2);
/// Less than that is not worth a flush. Units: bytes.
const FLUSH_BYTES: u64 = 4 << 20;

impl Device {
    pub(super) fn new(model: DeviceModel) -> Device {
        Device {
            model: RefinedModel::new(model),
            head: 0,
            service_started: Instant::ZERO,
            flight_count: 0,
            flight_bytes: 0,
            batch_bytes: 0,
            is_at_ease: false,
            is_awaited: false,
            rests_until: Instant::ZERO,
            gaps: super::gaps::Gaps::default(),
            satisfied_at: Instant::ZERO,
            flight_cost: Duration::ZERO,
            flight_deadlines: Vec::new(),
            batch_calibrated: Duration::ZERO,
            batch_taken: Duration::ZERO,
            contracts: Vec::new(),
            visiting: None,
            visit_given: 0,
            background: VecDeque::new(),
            background_given: 0,
            demands: VecDeque::new(),
            headers: UnreadHeaders::default(),
            best_effort_served: Instant::ZERO,
            refused: Vec::new(),
            refused_asked: Instant::ZERO,
            capacity_checked: Instant::ZERO,
            overloaded_since: Instant::NEVER,
            blocked: false,
            starved: false,
            writers: VecDeque::new(),
            write_goes_on: None,
            progress: 0,
            kept_rate: 0,
            write_given: 0,
            writers_turn: false,
            turn_given: Duration::ZERO,
            mixed_until: Instant::ZERO,
            mixed_calibrated: Duration::ZERO,
            mixed_taken: Duration::ZERO,
            mixed_count: 0,
            mixed_owed: Duration::ZERO,
            unflushed: 0,
            medium_free_at: Instant::ZERO,
            flushing_since: None,
            flushes_alone: false,
            can_flush: true,
            request_count: [0; 2],
            bytes: [0; 2],
            write_count: 0,
            write_bytes: 0,
            read_bridged: 0,
            write_bridged: 0,
            batch_count: 0,
            flush_count: 0,
            busy: Duration::ZERO,
        }
    }

    /// False: it is flash, where order costs nothing.
    pub(super) fn positions(&self) -> bool {
        self.model.base.read.fixed >= Duration::from_ms(1)
    }

    /// Requests so far.
    pub(super) fn sent_count(&self) -> u64 {
        self.request_count.iter().sum::<u64>() + self.write_count
    }

    /// As the dry run of admission sees it.
    pub(super) fn described(
        &self,
        now: Instant,
        limits: &Limits,
        policy: &Policy,
    ) -> admission::Device<'_> {
        admission::Device {
            model: &self.model,
            free_at: self.free_at(now),
            head: self.head,
            chunk: limits.chunk_bytes_max,
            margin_permille: policy.margin_permille,
        }
    }

    /// The stream has a claim on it.
    pub(super) fn promise(&mut self, id: StreamId) {
        self.background.retain(|&other| other != id);
        if !self.contracts.contains(&id) {
            self.contracts.push(id);
        }
    }

    /// It had nothing to do a moment ago: it is fast enough for all its readers, whether promised
    /// or not.
    pub(super) fn keeps_up(&self, now: Instant) -> bool {
        now.since(self.satisfied_at) <= KEEPS_UP
    }

    /// A promise goes from one stream to another, and is as old as it was.
    pub(super) fn move_promise(&mut self, from: StreamId, to: StreamId) {
        self.background
            .retain(|&other| other != from && other != to);
        self.refused.retain(|&other| other != to);
        for id in &mut self.contracts {
            if *id == from {
                *id = to;
            }
        }
        if self.visiting == Some(Visitor::Reader(from)) {
            self.visiting = None;
        }
    }

    /// It has none any more.
    pub(super) fn break_promise(&mut self, id: StreamId) {
        self.contracts.retain(|&other| other != id);
        if self.visiting == Some(Visitor::Reader(id)) {
            self.visiting = None;
        }
    }

    /// The stream is not fetched from here any more.
    pub(super) fn forget(&mut self, id: StreamId) {
        self.break_promise(id);
        self.background.retain(|&other| other != id);
    }

    /// A claim was served; as long as it is the same one, that is one visit.
    pub(super) fn visited(&mut self, who: Visitor, bytes: u64) {
        if self.visiting != Some(who) {
            self.visiting = Some(who);
            self.visit_given = 0;
        }
        self.visit_given += bytes;
    }

    /// A client without a promise was sent a request.
    pub(super) fn turn_taken(&mut self, writes: bool, cost: Duration) {
        if self.writers_turn != writes {
            self.writers_turn = writes;
            self.turn_given = Duration::ZERO;
        }
        self.turn_given += cost;
    }

    /// A request took its time, or a few together. A drive that writes into a memory of its own
    /// first is quick then and slow afterwards, when it brings that to the medium beside somebody
    /// else's requests: only together they tell its speed. A drive that seems quicker than its
    /// calibration is not: it still has to write the bytes in that memory.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        calibrated: Duration,
        taken: Duration,
        wrote: bool,
    ) {
        if wrote {
            self.mixed_until = now + MIXED_FOR;
        }
        if now >= self.mixed_until {
            self.mixed_count = 0;
            self.mixed_calibrated = Duration::ZERO;
            self.mixed_taken = Duration::ZERO;
            self.mixed_owed = Duration::ZERO;
            return self.model.observed(calibrated, taken);
        }
        self.mixed_calibrated += calibrated;
        self.mixed_taken += taken;
        self.mixed_count += 1;
        if self.mixed_calibrated < MIXED_SPAN {
            return;
        }
        let count = u64::from(core::mem::take(&mut self.mixed_count));
        let calibrated = core::mem::take(&mut self.mixed_calibrated);
        let taken = core::mem::take(&mut self.mixed_taken);
        // The time that it saved it still owes.
        let owed = (self.mixed_owed + calibrated) - taken;
        let taken = (taken - self.mixed_owed).max(calibrated);
        self.mixed_owed = owed.min(MIXED_OWED);
        for _ in 0..count {
            self.model
                .observed(Duration(calibrated.0 / count), Duration(taken.0 / count));
        }
    }

    /// It takes writes into a memory of its own and brings them to the medium later, beside what is
    /// read then.
    pub(super) fn defers_writes(&self) -> bool {
        self.positions() && self.model.has_memory()
    }

    /// Time that the medium still needs for bytes that the drive has taken: a reader loses it.
    pub(super) fn owes(&self, now: Instant) -> Duration {
        self.medium_free_at.since(now)
    }

    /// Before it is read from: it would go back and forth between what is read and what it has
    /// still to write, at times of its own choosing. Told to write all that first it does so in one
    /// go.
    pub(super) fn is_to_flush(&self) -> bool {
        self.can_flush && self.flushing_since.is_none() && self.unflushed >= FLUSH_BYTES
    }

    /// A request took its time; `cost` was expected.
    pub(super) fn count_for_medium(
        &mut self,
        now: Instant,
        flight: &super::fetch::Served,
        taken: Duration,
    ) {
        if !self.defers_writes() {
            return;
        }
        let began = now.before(taken);
        if flight.wrote {
            let done = self.medium_free_at.max(began) + flight.cost;
            self.medium_free_at = done.min(now + OWED_MAX);
            self.unflushed += flight.bytes;
        } else if self.medium_free_at > began {
            self.medium_free_at = (self.medium_free_at + taken).min(now + OWED_MAX);
        }
    }

    /// A flush is under way, and not for so long that it had better be forgotten.
    pub(super) fn is_waited_for(&self, now: Instant) -> bool {
        self.flushing_since
            .is_some_and(|since| now.since(since) < FLUSH_WAIT)
    }

    pub(super) fn begin_flush(&mut self, now: Instant) {
        self.unflushed = 0;
        self.flush_count += 1;
        self.flushing_since = Some(now);
        self.flushes_alone = self.flight_count == 0;
    }

    pub(super) fn end_flush(&mut self, now: Instant, outcome: Flushed) {
        let taken = self
            .flushing_since
            .take()
            .map_or(Duration::ZERO, |since| now.since(since));
        match outcome {
            Flushed::Done => {}
            Flushed::Later => return,
            Flushed::Never => {
                self.can_flush = false;
                return;
            }
        }
        // It may still have bytes that were sent meanwhile.
        if self.flushes_alone {
            self.medium_free_at = now;
            self.busy += taken;
            if now < self.mixed_until + MIXED_SPAN {
                self.mixed_taken += taken;
            }
        }
    }

    /// Whether the requests with it would be in time if one more of `bytes` went before all of
    /// them: a device orders its queue by position, and a request that waits in it is overtaken for
    /// as long as others come. A request that is late already is not waited for.
    pub(super) fn may_be_overtaken(&self, now: Instant, bytes: u64) -> bool {
        let done = self.free_at(now);
        let overtaken = done + self.model.read(u64::MAX, bytes);
        !self
            .flight_deadlines
            .iter()
            .any(|&deadline| deadline >= done && deadline < overtaken)
    }

    /// When it can turn to something else: where somebody reads, with all on the medium that it has
    /// taken.
    pub(super) fn turns_at(&self, now: Instant) -> Instant {
        let free_at = self.free_at(now);
        let is_read =
            !self.contracts.is_empty() || !self.demands.is_empty() || !self.background.is_empty();
        match self.can_flush && is_read {
            true => free_at.max(self.medium_free_at.min(now + OWED_COUNTED)),
            false => free_at,
        }
    }

    /// When everything sent to it will be done, at least now.
    pub(super) fn free_at(&self, now: Instant) -> Instant {
        (self.service_started + self.flight_cost).max(now)
    }
}

/// Where the piece after `steps` of a strided flow starts; None before the file's start.
pub(super) fn strided_offset(origin: u64, stride: i64, steps: u64) -> Option<u64> {
    let way = i64::try_from(steps).ok()?.checked_mul(stride)?;
    origin.checked_add_signed(way)
}
