// SPDX-License-Identifier: Apache-2.0
//! The server's memory: sessions, handles, files, writes and reads that wait. Devices, streams and
//! pieces have files of their own. Plain records; the code that acts on them is in the files beside
//! this one.

use super::api::*;
use super::clock::{Due, PlayClock};
pub(super) use super::device::*;
use super::glances::Glances;
pub(super) use super::pieces::*;
use super::rehearsal::{RunPlace, ShareUser};
use super::shares::User;
pub(super) use super::stream::*;
use super::ways::Foresight;
use crate::stream::{Cadence, CursorIndex, Recogniser};
use crate::units::*;
use crate::write::{DirtyMap, Pace, PieceKey, Runs};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

/// How long after a failed write the server retries.
const TRY_AGAIN: Duration = Duration::from_s(1);

/// A client connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    pub label: SessionLabel,
    /// Whose runs are remembered.
    pub login: ShareUser,
    /// Bytes of slots in its hands.
    pub pinned_bytes: u64,
    pub handle_count: u32,
    /// Reads that wait for it to release pins, oldest first.
    pub parked: VecDeque<u32>,
    /// Its lane; None: it has none, and its client writes on its own descriptors.
    pub lane: Option<LaneId>,
    /// The pool whose door it is a session of.
    pub pool: Option<PoolNumber>,
    /// How much was read at one place before it cut to another, in the mean; None: it has never
    /// cut. Units: bytes.
    pub run_bytes: Option<u64>,
    /// It has played: a reader of it waited for its clock and not for us.
    pub has_played: bool,
    /// The clock of the run that was read last, in any file.
    pub clock: Option<PlayClock>,
    /// The stream of its last read that was due and is answered, and when that was.
    pub last_answer: Option<(StreamId, Instant)>,
    /// Places that it left at once.
    pub glances: Glances,
    /// Reads that were served as the beginning of a play, which has not followed yet.
    pub look_count: u8,
    /// No play followed such reads: until then they are served as any others.
    pub presumed_wrongly_until: Instant,
    /// The run in a file that it has closed, if no other has begun since.
    pub left_run: Option<RunPlace>,
    /// Whether it cuts as it did before.
    pub foresight: Foresight,
    /// Known places, one after the other, that were presumed to be played from their first read on.
    pub presumed_starts: u8,
    /// Fetched ahead of it, and left unread.
    pub unread_bytes: u64,
}

impl Session {
    /// One client has it. A session of a pool's door has all clients of its mount.
    pub(super) fn is_seat(&self) -> bool {
        self.pool.is_none()
    }
}

/// The file behind a handle, as far as it is known.
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
    /// The part of the file of that path.
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
    /// Its reads are not like a frame's, and no rule says that it is one.
    pub(super) fn is_clip(&self) -> bool {
        let ruled = matches!(self.hint, Some(RateHint::FramesPerKilosecond(..)));
        !ruled && self.cadence.is_long()
    }

    /// Its header decides its rate: no rule does.
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

/// A file the driver holds open.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub key: FileKey,
    pub device: DeviceId,
    pub size: u64,
    /// The size must be asked for before a client learns where the file ends.
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
    /// Those of `blocks` that a program may change without moving the version
    /// ([`Event::MayChange`]): each look drops them.
    pub changeable: BTreeSet<u64>,
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
    /// Only clients of ours write to it, as far as has been reported or seen.
    pub is_exclusive: bool,
    pub header: Looked,
    /// The header was never read, and waits for the driver.
    pub is_header_wanted: bool,
    pub writing: Writing,
}

/// Whether the cached bytes are those of the file. Not every change is reported: not one by a
/// program that stores into a mapping, nor by one that hands a write to the kernel without waiting
/// for it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    /// When the server last asked for its version: its cached bytes were right then, and later ones
    /// when they came.
    pub at: Instant,
    /// The facts found then, or by the last open of it, came at this time.
    pub came: Instant,
    /// `File::changed` when it was last looked at.
    pub told: u64,
    pub doubt: Doubt,
}

/// Whether bytes that came since the file got its version may be older than that version. In any
/// doubt they are dropped when the version is no longer fresh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Doubt {
    #[default]
    None,
    /// No more than that.
    Last,
    /// Clients of ours made that version, perhaps on their own descriptors: the bytes are dropped,
    /// too, once these clients are quiet from one look to the next. A reader that follows a
    /// recording keeps its bytes as long as the recording goes on.
    Ours,
    /// The file had the version when it became known, and the writer that made it is not known: the
    /// bytes are dropped at each look, too, until a client of ours writes it.
    Unknown,
    /// Another program made it, or the change was not reported: the bytes are dropped at each look,
    /// too.
    Foreign,
}

/// The state of a file when it was looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version {
    pub version: u64,
    /// See [`FileFacts::is_fresh`].
    pub is_fresh: bool,
}

/// When its header was last looked at, and the state of the file then.
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
    /// Its length as the file system has it; `File::size` is the acknowledged one.
    pub native_size: u64,
    pub dirty: DirtyMap,
    /// Commits in order, with spent ones between them: the first that is alive is the oldest.
    pub commits: VecDeque<(u64, PieceKey)>,
    /// The range in which those lie, start and end: a write behind it hides none, and need not look
    /// at each.
    pub reach: (u64, u64),
    /// Writes that wait for a grant, oldest first.
    pub waiting: Vec<u32>,
    /// Ranges granted and not committed.
    pub grant_count: u32,
    /// Bytes that went through the kernel's cache and are not known to have got to the device: see
    /// `loose`. None of them is dirty.
    pub loose: DirtyMap,
    /// The loose bytes count as a use of the file.
    pub is_loose: bool,
    /// Its latest sync covers the pieces that had become loose up to this number of the server's
    /// count.
    pub synced_loose: u64,
    /// Syncs that ended with an error. Bytes that were on their way into the kernel's cache
    /// meanwhile are written again.
    pub failed_syncs: u64,
    /// Its last write past the kernel's cache went into it.
    pub falls_back: bool,
    /// So many of them in a row came with a report of bytes that the kernel could not keep (see
    /// [`LOST_IN_A_ROW`]).
    pub lost_count: u8,
    /// Another program may have cut off bytes that have to be written again: the server writes none
    /// before it has looked at the file's length.
    pub is_cut_doubted: bool,
    /// The sync with the driver is the server's own, and no client waits for it.
    pub is_writing_out: bool,
    /// Ranges on their way to the device.
    pub flights: Vec<ByteRange>,
    /// A reservation is on its way, for these bytes.
    pub reserving: Option<ByteRange>,
    /// That one is ahead of need, up to here: no write waits for it, and it counts as a use of the
    /// file.
    pub reserving_ahead_to: Option<u64>,
    /// The file was changed beside us since: the blocks that the reservation finds may be gone
    /// again.
    pub is_reservation_void: bool,
    /// From here on its extents may have been given back since we saw them.
    pub mapped_end: u64,
    /// Reserved blocks lie behind its end, perhaps.
    pub is_reserved: bool,
    /// A session that had it open ended without closing it: its client may write to it by itself.
    /// The reserved blocks are not ours to cut off then.
    pub is_open_elsewhere: bool,
    /// The disk did not give the blocks asked for ahead of need.
    pub is_short: bool,
    /// Another writer meets a full disk: this file gives its reserved blocks back as soon as its
    /// bytes are written.
    pub gives_room: bool,
    /// Requests that wait for stable storage, and the last commit that each waits for.
    pub syncs: VecDeque<SyncWaiter>,
    /// A sync is with the driver. Its answer does not cover bytes that were written after it was
    /// asked for, so there is one at a time.
    pub is_syncing: bool,
    /// An error that the kernel has reported to the driver meanwhile, and will not report to that
    /// sync.
    pub not_kept: Option<Errno>,
    /// Syncs in a row that covered nothing because of that (see [`LOST_IN_A_ROW`]).
    pub uncovered_syncs: u8,
    /// How often others have written to it past us, as far as we know: so far; before the sync
    /// under way was asked for; and before the last one that ended well.
    pub others_changed: u64,
    pub others_syncing: u64,
    pub others_synced: u64,
    /// That sync is for so many of `syncs`; fewer than at first, when some of them have left or got
    /// an error.
    pub syncing: usize,
    /// Sessions that change it on their own descriptors; with a request, they wait for its answer
    /// to do so.
    pub holds: Vec<(SessionId, Option<RequestId>)>,
    /// The error with which its device failed to write, and the earliest retry.
    pub failed: Option<(Errno, Instant)>,
    /// The bytes that it was granted without a claim, counted on from its device's `progress` then.
    /// Units: bytes.
    pub progress: u64,
    /// Its device has failed, and does not have all bytes yet that were committed until then: each
    /// client that syncs gets this error until it has.
    pub failing: Option<Errno>,
    /// The last commit at that failure.
    pub failing_since: u64,
    /// The next client that writes gets the error, since the file has begun to fail.
    pub refuses: bool,
    /// It is in its device's list of writers.
    pub is_listed: bool,
    /// A request over a gap has failed: each run goes by itself then, with its own result.
    pub is_unbridgeable: bool,
    /// Its file system has refused a request of whole pages that goes past the kernel's cache: all
    /// go through that cache then.
    pub is_direct_refused: bool,
    /// We have written to it since we knew its version: a new one does not show a change by others.
    pub is_unsettled: bool,
    /// Requests under way that change its times and blocks after we wrote.
    pub settling: u32,
    /// A piece of which only the record is left, so that a later server sets the file's time if
    /// this one dies before it is set.
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
    /// Its device may lack bytes that others have written past us: no sync of ours has covered
    /// them. The server cannot write them again if the kernel loses them. A session that holds the
    /// file may be writing.
    pub(super) fn may_have_bytes_of_others(&self) -> bool {
        self.others_changed > self.others_synced || !self.holds.is_empty()
    }

    /// Its device has the bytes that it lacked: clients get the error no more.
    pub(super) fn fails_no_more(&mut self) {
        self.failing = None;
        self.refuses = false;
    }

    /// Its device did not take some of the bytes committed so far: the server keeps and retries
    /// them, and clients that write or sync get the error.
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
    /// The reason for its wait, as of the last look.
    pub waits_for: WaitsFor,
}

/// The reason for which a write in the line of its lane waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// Blocks, a length, a hold: no other write waits behind it meanwhile.
    Other,
    /// Room in the write buffer: those behind it in its lane wait, too.
    Room,
    /// Its device, which has as much to write as it can in time, or other writers to that device:
    /// writes behind it in its lane that go to the same device wait, too.
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

/// Changes of a file since its size was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// When it was asked for.
    pub at: Instant,
    /// It has at least this length.
    pub length: u64,
    /// A change has moved its end: the answer is worth nothing.
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

/// Where a byte of a file lies on its device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapped {
    pub physical: u64,
    /// The bytes from there on that lie, or would lie, one behind the other.
    pub contiguous: u64,
}

impl File {
    /// How much of it the device can give. Bytes past the end that the file system knows are ours
    /// alone. Units: bytes.
    pub(super) fn device_size(&self) -> u64 {
        self.size.min(self.writing.native_size)
    }

    /// It was not used since that use.
    pub(super) fn is_unused_since(&self, since: u64) -> bool {
        self.use_count == 0 && self.unused_since == since
    }

    /// Take in a look: the version that was asked for at `asked` is `found`. True: its cached bytes
    /// may be old. `strictly`: also when clients of ours have reported the change that made the
    /// version, or made it.
    pub(super) fn looked_at(
        &mut self,
        found: Version,
        (asked, now): (Instant, Instant),
        strictly: bool,
    ) -> bool {
        let is_ours = self.is_written_by_us(now);
        let moved = self.version != found.version;
        let is_quiet = self.is_quiet(now);
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

    /// No change was reported since the last look, and no change of ours is under way.
    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        self.changed == self.looks.told && !self.is_written_by_us(now)
    }

    /// A change of ours may move its version, now or before long.
    fn is_written_by_us(&self, now: Instant) -> bool {
        let writing = &self.writing;
        let is_about_to = !writing.waiting.is_empty() || writing.reserving.is_some();
        let goes_on = !writing.is_clean() || writing.pace.rate(now).0 > 0;
        writing.is_unsettled || writing.settling > 0 || is_about_to || goes_on
    }

    /// Whether the server has to look at it before it answers a read that arrived at `arrived` from
    /// the cache.
    pub(super) fn must_be_looked_at(&self, now: Instant, arrived: Instant, age: Duration) -> bool {
        !self.is_exclusive && arrived > self.looks.at && now.since(self.looks.at) >= age
    }

    /// The state of the file for its header: if it differs from before, the header may say
    /// something else.
    pub(super) fn likeness(&self) -> (u64, u64, u64, bool) {
        let is_dirty = !self.writing.dirty.is_empty() || !self.writing.flights.is_empty();
        (self.size, self.changed, self.version, is_dirty)
    }

    /// Where a byte lies on its device. Unknown extents count as one run from the start of the
    /// device.
    pub(super) fn place(&self, offset: u64) -> Mapped {
        let after = self
            .extents
            .partition_point(|extent| extent.logical.0 <= offset);
        let Some(extent) = after.checked_sub(1).and_then(|at| self.extents.get(at)) else {
            return Mapped {
                physical: offset,
                contiguous: u64::MAX - offset,
            };
        };
        let into = offset - extent.logical.0;
        let left = extent.length.0.saturating_sub(into);
        if left == 0 {
            // A hole, or past the mapped part: up to the next extent it costs no positioning.
            let next = self
                .extents
                .get(after)
                .map_or(u64::MAX, |next| next.logical.0);
            return Mapped {
                physical: extent.physical.0 + extent.length.0,
                contiguous: next - offset,
            };
        }
        Mapped {
            physical: extent.physical.0 + into,
            contiguous: left,
        }
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
    /// As things were when it arrived.
    pub due: Due,
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
    /// Requests that should have brought bytes of it and ended before them.
    pub short_count: u8,
    /// Changes by other programs while it waited: bytes that came for it were old before it could
    /// be answered.
    pub voided_count: u8,
}

/// A read that begins a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstRead {
    pub cursor: CursorIndex,
    pub range: ByteRange,
    pub arrived: Instant,
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
    /// Its deadline; NEVER: it is under no contract.
    pub deadline: Instant,
    /// It came out of pages that are not written yet ([`Event::MayChange`]).
    pub may_change: bool,
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
    /// Its reader.
    pub user: User,
    /// The reader's stream, if it is fetched ahead.
    pub stream: Option<StreamId>,
}
