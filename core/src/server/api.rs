// SPDX-License-Identifier: Apache-2.0
//! The seam: what may happen ([`Event`]) and what may be asked for ([`Action`]).

pub use crate::sched::admission::Refusal;
pub use crate::sched::{DeviceModel, ServiceModel};
use crate::units::*;
use alloc::string::String;
use alloc::vec::Vec;

/// Page of the cache: granularity of validity inside a slot and alignment of device reads. Units: bytes.
pub const PAGE_BYTES: u64 = 4096;

/// Bounds fixed at start. Every queue and pool of the server has one of these.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Buffers in the cache segment.
    pub slot_count: u32,
    /// Size of each buffer; a power of two, at least 64 KiB, at most 1 MiB. Units: bytes.
    pub slot_bytes: u32,
    /// Sessions at once.
    pub session_count_max: u32,
    /// Open handles a session may have.
    pub handle_count_max: u32,
    /// Bytes that one session may have pinned; further reads of it wait.
    pub session_pin_bytes_max: u64,
    /// Longest read in one request.
    pub read_bytes_max: u64,
    /// Longest single device request; longer fetches go down in such chunks.
    pub chunk_bytes_max: u64,
    /// Frames of a sequence opened ahead of the player.
    pub sequence_ahead_max: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            slot_count: 1024,
            slot_bytes: 1 << 20,
            session_count_max: 4096,
            handle_count_max: 65_536,
            session_pin_bytes_max: 64 << 20,
            read_bytes_max: 8 << 20,
            chunk_bytes_max: 4 << 20,
            sequence_ahead_max: 128,
        }
    }
}

/// What an operator may change while the server runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Start-up time that a contract assumes of a player: byte *x* is due at first read + this + x / rate.
    pub preroll: Duration,
    /// Part of every device kept free by admission, in thousandths.
    pub margin_permille: u32,
    /// False: no pattern is recognised, nothing is fetched ahead, no contract is made (for ablation).
    pub analyser: bool,
    /// Make contracts for streams whose rate was only observed (no rule, no header).
    pub contracts_from_cadence: bool,
    /// Make contracts from what a container's header says.
    pub contracts_from_header: bool,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            preroll: Duration::from_ms(500),
            margin_permille: 30,
            analyser: true,
            contracts_from_cadence: true,
            contracts_from_header: true,
        }
    }
}

/// A run of a file that is contiguous on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file.
    pub logical: ByteOffset,
    /// Offset on the device.
    pub physical: ByteOffset,
    /// How long.
    pub length: ByteCount,
}

/// Which file, whatever it is called: what stat says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKey {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateSource {
    /// A rule of the configuration matched the path.
    Rule,
    /// The container's own header.
    Header,
    /// The server watched the reads.
    Cadence,
}

/// What a file should be read at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateHint {
    /// Bytes a second through the file.
    Rate(BytesPerSecond, RateSource),
    /// One file is one frame, so many thousandths of a frame a second.
    FramesPerKilosecond(u32, RateSource),
}

/// What the driver found out about a file when it was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct FileFacts {
    /// The driver's name for it: the same as long as the file is not forgotten ([`Action::Forget`]).
    pub file: FileId,
    /// What it is.
    pub key: FileKey,
    /// Where it lies.
    pub device: DeviceId,
    /// Its length.
    pub size: ByteCount,
    /// Changes whenever the file changed without us (ctime).
    pub version: u64,
    /// Where its bytes are; ascending, may have holes, empty when unknown.
    pub extents: Vec<Extent>,
    /// From a rule or its header.
    pub hint: Option<RateHint>,
}

/// Who is behind a session, for the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionLabel {
    /// Share.
    pub share: String,
    /// User.
    pub user: String,
    /// Address or machine.
    pub client: String,
}

/// An errno, as Linux numbers them; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub u32);

impl Errno {
    /// Input/output error.
    pub const IO: Errno = Errno(5);
    /// Bad handle.
    pub const BAD_HANDLE: Errno = Errno(9);
    /// Argument out of range.
    pub const INVALID: Errno = Errno(22);
}

/// What happened.
#[expect(
    missing_docs,
    reason = "each variant says what its fields are; their types name them"
)]
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A device exists; before any file on it.
    DeviceAdded {
        device: DeviceId,
        model: DeviceModel,
    },
    /// Limits stay; these changed.
    PolicyChanged(Policy),
    /// A client connected.
    SessionOpened {
        session: SessionId,
        label: SessionLabel,
    },
    /// It went, or was put out: its handles, pins and waiting reads are void. In-flight I/O is not.
    SessionClosed { session: SessionId },
    /// A client named a file; the driver is finding out about it. Reads may follow at once.
    Opening {
        session: SessionId,
        handle: HandleId,
        path: String,
    },
    /// It found out. Err: this file is not served; the client does its own I/O.
    Opened {
        session: SessionId,
        handle: HandleId,
        facts: Result<FileFacts, Errno>,
    },
    /// The client closed it.
    Closed {
        session: SessionId,
        handle: HandleId,
    },
    /// The client wants bytes. `sent`: when its door got the request.
    Read {
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// It has copied them.
    ReadEnd {
        session: SessionId,
        request: RequestId,
    },
    /// Bytes of a file were changed beside the cache, by a client who waits for the reply.
    Changed {
        session: SessionId,
        request: RequestId,
        key: FileKey,
        range: ByteRange,
    },
    /// A file lost a name; the client waits for the reply.
    Gone {
        session: SessionId,
        request: RequestId,
        key: FileKey,
    },
    /// Somebody else changed a file (fanotify).
    ForeignChange { key: FileKey },
    /// A file has lost its last name beside all doors.
    Unlinked {
        /// Which one.
        key: FileKey,
    },
    /// Answer to [`Action::Stat`].
    Stat {
        file: FileId,
        size: ByteCount,
        version: u64,
    },
    /// Answer to [`Action::OpenNeighbour`].
    NeighbourOpened {
        beside: FileId,
        name: String,
        facts: Result<FileFacts, Errno>,
    },
    /// What others did on a device lately, beside this server (metadata, other programs): small requests in
    /// thousandths a second, and bytes a second.
    ForeignLoad {
        device: DeviceId,
        requests_per_kilosecond: u64,
        rate: BytesPerSecond,
    },
    /// What a file should be read at became known after it was opened (its header was read).
    Hint { file: FileId, hint: RateHint },
    /// A device request ended; Ok is how many bytes it gave (short at the end of the file).
    IoDone {
        io: IoId,
        result: Result<ByteCount, Errno>,
    },
    /// The instant asked for by [`Action::Wake`] has come (or any other: it does no harm).
    Timer,
}

/// A run of slots in [`Actions::slots`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotRun {
    /// Index of the first in [`Actions::slots`].
    pub start: u32,
    /// How many.
    pub count: u32,
}

/// How a request is to be treated below us (the I/O priority).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoClass {
    /// Belongs to a contract.
    RealTime,
    /// Does not.
    BestEffort,
    /// Only when nobody else wants the device.
    Idle,
}

/// Bytes of a file to be read into slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRead {
    /// Comes back in [`Event::IoDone`].
    pub io: IoId,
    /// From which file.
    pub file: FileId,
    /// On which device.
    pub device: DeviceId,
    /// Which bytes: starts and ends on a page; may end past the file's end.
    pub range: ByteRange,
    /// Where to: the first byte goes to `range.start % slot_bytes` of the first slot.
    pub slots: SlotRun,
    /// Priority.
    pub class: IoClass,
    /// When it must have ended.
    pub deadline: Instant,
}

/// How a request ended.
#[expect(
    missing_docs,
    reason = "each variant says what its fields are; their types name them"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Bytes of the cache, pinned until ReadEnd; short only at the end of the file. Zero slots: end of file.
    Data {
        slots: SlotRun,
        first_offset: u32,
        length: ByteCount,
    },
    /// Changed, Gone: done.
    Done,
    /// An error for the application.
    Failed(Errno),
    /// Do it on your own descriptor.
    Plain,
}

/// What to do.
#[expect(
    missing_docs,
    reason = "each variant says what its fields are; their types name them"
)]
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Answer a client.
    Reply {
        session: SessionId,
        request: RequestId,
        outcome: Outcome,
    },
    /// Read from a device.
    Submit(IoRead),
    /// Open the regular file `name` in the folder of `beside` (beneath it, same mount, no symlinks).
    OpenNeighbour { beside: FileId, name: String },
    /// Say how long the file is now.
    Stat { file: FileId },
    /// The server has forgotten the file: close it. Its id may be reused.
    Forget { file: FileId },
    /// Send [`Event::Timer`] at this instant; replaces what was asked before.
    Wake { at: Instant },
}

/// Where [`super::Server::step`] puts what is to be done, in order. Reused from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Actions {
    /// In order.
    pub list: Vec<Action>,
    /// What [`SlotRun`]s point into.
    pub slots: Vec<SlotIndex>,
}

impl Actions {
    /// Forget everything, keep the memory.
    pub fn clear(&mut self) {
        self.list.clear();
        self.slots.clear();
    }

    /// The slots of a run.
    pub fn slots_of(&self, run: SlotRun) -> &[SlotIndex] {
        let start = run.start as usize;
        self.slots
            .get(start..start.saturating_add(run.count as usize))
            .unwrap_or(&[])
    }
}

// ---- What the server tells about itself ----

/// Why a stream has the standing it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Its rate is promised.
    Contract,
    /// Its rate is known but the device cannot promise it now.
    Refused,
    /// Nothing is promised: no rate known.
    BestEffort,
}

/// The part of the path that cost a late read most of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Between the client's door and us.
    Door,
    /// No buffer was free.
    Cache,
    /// Waiting for its turn.
    Queue,
    /// The device took longer than its model.
    Device,
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamRecord {
    /// Which stream.
    pub stream: StreamId,
    /// Whose.
    pub session: SessionId,
    /// Share, user, client.
    pub label: SessionLabel,
    /// Path as it was opened (a sequence: of its first frame).
    pub path: String,
    /// True for one file a frame.
    pub sequence: bool,
    /// On which device.
    pub device: DeviceId,
    /// Contract or not.
    pub standing: Standing,
    /// Rate and where it comes from, when known.
    pub rate: Option<(BytesPerSecond, RateSource)>,
    /// Why it was refused its contract when that last happened, also when it got one later; None: it never was.
    pub refusal: Option<Refusal>,
    /// Reads of it so far, and those answered after they were due (only counted under contract).
    pub read_count: u64,
    /// Of those, under contract.
    pub due_count: u64,
    /// Answered in time.
    pub on_time_count: u64,
    /// Answered late.
    pub late_count: u64,
    /// The worst of those.
    pub worst_lateness: Duration,
    /// Late reads by guilty stage, in the order of [`Stage`].
    pub guilty: [u64; 4],
    /// Bytes answered.
    pub bytes: ByteCount,
    /// Reads answered without waiting for a device.
    pub hit_count: u64,
    /// How long what is in the cache will last.
    pub ahead: Duration,
    /// True while a client holds it open.
    pub open: bool,
}

/// What a device is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRecord {
    /// Which.
    pub device: DeviceId,
    /// Its model as refined so far.
    pub model: DeviceModel,
    /// Streams under contract.
    pub contract_count: u32,
    /// What they were promised.
    pub promised: BytesPerSecond,
    /// Requests sent, bytes moved, by class (real time, best effort).
    pub request_count: [u64; 2],
    /// Bytes.
    pub bytes: [ByteCount; 2],
    /// Time it was busy.
    pub busy: Duration,
    /// Part of its time that others take, in thousandths, as admission counts it.
    pub foreign_permille: u32,
    /// What its requests take, in thousandths of what its model says.
    pub slowness_permille: u32,
}

/// The cache in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheRecord {
    /// All slots.
    pub slot_count: u32,
    /// Never used or given back.
    pub free_count: u32,
    /// Promised to streams (filled ahead of the player, or being filled).
    pub held_count: u32,
    /// In some client's hands now.
    pub pinned_count: u32,
    /// Reads answered at once, and not.
    pub hit_count: u64,
    /// Not.
    pub miss_count: u64,
}

/// Answer to "can I add two more?".
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// All of them.
    pub admitted: bool,
    /// A sentence: what decides.
    pub reason: String,
    /// How many more of that rate could be added (when not admitted: how many in all; at most 1000).
    pub more_count: u32,
    /// Bytes a second left for contracts at that rate's request size.
    pub left: BytesPerSecond,
}
