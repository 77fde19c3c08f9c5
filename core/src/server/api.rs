// SPDX-License-Identifier: Apache-2.0
//! The seam: events that may happen ([`Event`]) and actions that may be asked for ([`Action`]).

use super::RememberedRun;
pub use crate::sched::admission::Refusal;
pub use crate::sched::{DeviceModel, ServiceModel};
use crate::units::*;
pub use crate::write::{PageRun, Runs};
use alloc::string::String;
use alloc::vec::Vec;

/// Page of the cache: granularity of validity inside a slot and alignment of device reads. Units:
/// bytes.
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
    /// Files that the server knows at once; the driver holds them open. Above this number the
    /// server forgets files that nothing uses.
    pub file_count_max: u32,
    /// Frames of a sequence opened ahead of the player.
    pub sequence_ahead_max: u32,
    /// Bytes of lanes in use at once: those granted, and those acknowledged and not on their device
    /// yet.
    pub write_buffer_bytes: u64,
    /// Longest write in one request.
    pub write_bytes_max: u64,
    /// The most pieces of memory from which a device write may be put together. A write that is no
    /// longer than a page may have more: its sender copies parts of less than a page together.
    pub write_part_count_max: u32,
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
            file_count_max: u32::MAX,
            sequence_ahead_max: 128,
            write_buffer_bytes: 256 << 20,
            write_bytes_max: 8 << 20,
            write_part_count_max: 1024,
        }
    }
}

/// The settings that an operator may change while the server runs.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct Policy {
    /// Start-up time that a contract assumes of a player: byte *x* is due at first read + this + x
    /// / rate.
    pub preroll: Duration,
    /// How long after its last read a seat keeps a contract whose handle is closed.
    pub pause: Duration,
    /// Part of every device kept free by admission, in thousandths.
    pub margin_permille: u32,
    /// False, for ablation runs: the server recognises no pattern, fetches nothing ahead and makes
    /// no contract.
    pub analyser: bool,
    /// Make contracts for streams whose rate comes from their cadence alone, without a rule or a
    /// header.
    pub contracts_from_cadence: bool,
    /// Make contracts from the rate in a container's header.
    pub contracts_from_header: bool,
    /// The longest time from the acknowledgement of a byte until its device has it, if the device
    /// keeps up. Zero: the driver ends as soon as the devices have all bytes.
    pub write_age: Duration,
    /// False, for ablation runs: the server bridges no gap, neither reading nor writing.
    pub coalesce: bool,
    /// Remember which run followed which, and read ahead across such cuts.
    pub rehearsal: bool,
}

impl Policy {
    /// The driver ends, and waits only until no byte is in its memory alone.
    pub(super) fn ends(&self) -> bool {
        self.write_age == Duration::ZERO
    }
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            preroll: Duration::from_ms(500),
            pause: Duration::from_s(30),
            margin_permille: 30,
            analyser: true,
            contracts_from_cadence: true,
            contracts_from_header: true,
            write_age: Duration::from_s(4),
            coalesce: true,
            rehearsal: true,
        }
    }
}

impl Policy {
    /// The server reads headers for their rates.
    pub(super) fn reads_headers(&self) -> bool {
        self.analyser && self.contracts_from_header
    }
}

/// So many errors in a row count where a write past the kernel's cache succeeds and the kernel then
/// reports bytes of the file that it could not keep. That need be no disk's fault: it reports the
/// same when a program writes to a page of the range through its cache at that moment, and a sync
/// under way may get the error instead. With fewer errors the server writes the bytes once more,
/// asks for the sync again, and no client gets an error.
pub const LOST_IN_A_ROW: u8 = 3;

/// A run of a file that is contiguous on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Offset in the file.
    pub logical: ByteOffset,
    /// Offset on the device.
    pub physical: ByteOffset,
    /// How long.
    pub length: ByteCount,
}

/// The identity of a file under any name: device and inode, as stat has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileKey {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RateSource {
    /// A rule of the configuration matched the path.
    Rule,
    /// The container's own header.
    Header,
    /// The server watched the reads.
    Cadence,
}

/// The rate at which a file should be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RateHint {
    /// Bytes a second through the file.
    Rate(BytesPerSecond, RateSource),
    /// One file is one frame, so many thousandths of a frame a second.
    FramesPerKilosecond(u32, RateSource),
}

/// How a file may be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WriteWay {
    /// By the client on its own descriptor; its door reports the write afterwards
    /// ([`Event::Changed`]).
    #[default]
    Through,
    /// By extents, through a lane: its blocks can be reserved, and stay where they are when they
    /// are written.
    Extents,
}

/// The facts that the driver found out about a file when it was opened.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct FileFacts {
    /// The driver's name for it: the same until the file is forgotten ([`Action::Forget`]).
    pub file: FileId,
    /// Its device and inode.
    pub key: FileKey,
    /// Where it lies.
    pub device: DeviceId,
    /// Its length.
    pub size: ByteCount,
    /// The ctime: it moves with each change of the file, also one past us.
    pub version: u64,
    /// The version was set just before the driver looked: another change may have the same version,
    /// or this one may not be over.
    pub is_fresh: bool,
    /// Where its bytes are; ascending, may have holes, empty when unknown.
    pub extents: Vec<Extent>,
    /// From a rule or its header.
    pub hint: Option<RateHint>,
    /// It may have a header with its rate, and the driver has not read that
    /// ([`Action::ReadHeader`]).
    pub is_header_unread: bool,
    /// How it may be written. None: the driver has not looked; the way found before counts.
    pub way: Option<WriteWay>,
    /// Only clients of ours write to it: no other program does, through no other door.
    pub is_exclusive: bool,
    /// Others may have written bytes to it that its device does not have yet. False for a file
    /// without blocks, even if it has a length.
    pub has_unwritten: bool,
}

/// The client behind a session, for the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct SessionLabel {
    /// Share.
    pub share: String,
    /// User.
    pub user: String,
    /// Address or machine.
    pub client: String,
}

/// The user at the other end of one handle, where the session itself does not name one: a pool's
/// mount has one session for all clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Station {
    /// User.
    pub user: String,
    /// Address, or the program.
    pub client: String,
}

/// An errno, as Linux numbers them; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub u32);

impl Errno {
    /// Input/output error.
    pub const IO: Errno = Errno(5);
    /// Now is a bad moment.
    pub const AGAIN: Errno = Errno(11);
    /// Bad handle.
    pub const BAD_HANDLE: Errno = Errno(9);
    /// Argument out of range.
    pub const INVALID: Errno = Errno(22);
    /// No space left on the device.
    pub const NO_SPACE: Errno = Errno(28);
    /// The operation is not supported.
    pub const NOT_SUPPORTED: Errno = Errno(95);
    /// No space left for this user.
    pub const QUOTA: Errno = Errno(122);

    /// There is no room, for this user or for all.
    pub fn is_full(self) -> bool {
        self == Errno::NO_SPACE || self == Errno::QUOTA
    }

    /// The error of a file system that does not take such a request past the kernel's cache: its
    /// blocks may be larger than our pages.
    pub fn refuses_direct(self) -> bool {
        self == Errno::INVALID || self == Errno::NOT_SUPPORTED
    }
}

/// An event.
#[expect(
    missing_docs,
    reason = "each variant says what its fields are; their types name them"
)]
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum Event {
    /// A device exists; comes before any file on it. For a known device: it was measured anew, and
    /// the corrections learned of it are void.
    DeviceAdded {
        device: DeviceId,
        model: DeviceModel,
    },
    /// These settings changed; limits stay.
    PolicyChanged(Policy),
    /// The driver stops, and ends its sessions itself. A client that has not noticed that yet goes
    /// on copying the bytes of its answers, so the server never uses the buffers in the hands of
    /// such a session again.
    Stopping,
    /// A client connected.
    SessionOpened {
        session: SessionId,
        label: SessionLabel,
    },
    /// The session is one of several of a pool's door: the names in it are of files of the pool's
    /// one tree, on any member, so that a reader of a sequence reads it in all of them.
    SessionOfPool {
        session: SessionId,
        pool: PoolNumber,
    },
    /// The session ended, by itself or by the driver: its handles, pins and waiting reads are void,
    /// but for the pins after [`Event::Stopping`]. In-flight I/O is not.
    SessionClosed { session: SessionId },
    /// A client named a file, or the object that has a part of it; the driver is finding out about
    /// it. Reads may follow at once.
    Opening {
        session: SessionId,
        handle: HandleId,
        path: String,
        part: FilePart,
    },
    /// The driver found out. Err: this file is not served; the client does its own I/O.
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
    /// Memory that a session may write to; without a session, memory that a former daemon left.
    LaneAdded {
        lane: LaneId,
        session: Option<SessionId>,
        page_count: u32,
        /// Records that its table has room for.
        record_count: u32,
    },
    /// A record that a former daemon published in a lane's table, in order of publication. Its
    /// piece is not written yet; or it has no pages any more, after [`Action::Spent`], and no runs.
    Recovered {
        lane: LaneId,
        record: u32,
        facts: FileFacts,
        range: ByteRange,
        runs: Runs,
    },
    /// The driver has passed on all records that were left: lanes that hold none of them can go.
    RecoveryEnded,
    /// The driver will pass on more records of a former daemon, of files that it could not open
    /// before: an [`Event::Recovered`] for each piece, then [`Event::RecoveryEnded`]. Until then
    /// the server writes nothing to a device.
    RecoveryBegun,
    /// The client wants to write.
    WriteBegin {
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// The client has put the bytes into its grant; it waits for the reply.
    WriteEnd {
        session: SessionId,
        request: RequestId,
    },
    /// The client will not write: its grant is void.
    WriteAbort {
        session: SessionId,
        request: RequestId,
    },
    /// The client waits until all acknowledged bytes of the file are on stable storage.
    Sync {
        session: SessionId,
        handle: HandleId,
        request: RequestId,
    },
    /// A client is about to change a file on its own descriptor, past the bytes in lanes: by a
    /// truncate, or a copy on the server. It waits until the file has all its bytes, and the server
    /// grants none of the file until the client's [`Event::Changed`].
    Hold {
        session: SessionId,
        request: RequestId,
        key: FileKey,
    },
    /// The driver passes on this record of a former server's lane only later, in an
    /// [`Event::Recovered`]: it cannot open the file yet. Comes after the lane's
    /// [`Event::LaneAdded`].
    RecordKept { lane: LaneId, record: u32 },
    /// Answer to [`Action::Reserve`]: where all of the file's bytes are now.
    Reserved {
        file: FileId,
        result: Result<Vec<Extent>, Errno>,
    },
    /// A former server, or this one when it knew the file before, reserved blocks for this file and
    /// did not give them back; an unknown client may have it open. Comes after the file's
    /// [`Event::Opened`].
    ReserveFound { file: FileId },
    /// An [`Action::Fill`] of this slot failed: its bytes are no file's. Comes right after the step
    /// that asked for it; the driver has failed all that the step made of the slot.
    Unfilled { slot: SlotIndex },
    /// Answer to [`Action::Clean`] and to [`Action::Trim`]: the file's times are right, and our own
    /// changes to it have made it this version.
    Settled { file: FileId, version: u64 },
    /// Answer to [`Action::Sync`] and [`Action::WriteOut`]; [`Errno::AGAIN`]: the driver did not
    /// try.
    Synced {
        file: FileId,
        result: Result<(), Errno>,
    },
    /// In place of [`Event::Synced`]: the sync failed, which may be no disk's fault, since a write
    /// past the kernel's cache met pages of the file there meanwhile (see [`LOST_IN_A_ROW`]). The
    /// kernel does not report that error again.
    SyncDoubted { file: FileId, errno: Errno },
    /// Answer to [`Action::Flush`].
    Flushed { device: DeviceId, outcome: Flushed },
    /// A client changed bytes of a file beside the cache, and waits for the reply. It wrote all of
    /// the range, so that the file is as long at least; with a range to the end of all files it may
    /// have changed the length and blocks as well.
    Changed {
        session: SessionId,
        request: RequestId,
        key: FileKey,
        range: ByteRange,
        /// Bytes of the range may wait in the kernel's cache. False if only the length or blocks of
        /// the file changed.
        has_bytes: bool,
    },
    /// A file has lost its last name, or is about to; the client waits for the reply.
    Gone {
        session: SessionId,
        request: RequestId,
        key: FileKey,
    },
    /// A program past our doors changed a file (fanotify).
    ForeignChange { key: FileKey },
    /// A file has lost its last name beside all doors.
    Unlinked {
        /// Which one.
        key: FileKey,
    },
    /// The driver wants to close the descriptor of a file: the server forgets the file with its
    /// last use, after its bytes are written, and does not keep it for its cached bytes.
    LetGo {
        /// Which one.
        key: FileKey,
    },
    /// Answer to [`Action::Stat`].
    Stat {
        file: FileId,
        size: ByteCount,
        version: u64,
        /// See [`FileFacts::is_fresh`].
        is_fresh: bool,
    },
    /// Answer to [`Action::OpenNeighbour`].
    NeighbourOpened {
        beside: FileId,
        name: String,
        facts: Result<FileFacts, Errno>,
    },
    /// Answer to [`Action::AskPool`]. Err: there is no such file, or it cannot be fetched ahead.
    PoolFileOpened {
        pool: PoolNumber,
        path: String,
        facts: Result<FileFacts, Errno>,
    },
    /// The load of others on a device lately, beside this server, such as metadata and other
    /// programs: small requests in thousandths a second, and bytes a second.
    ForeignLoad {
        device: DeviceId,
        requests_per_kilosecond: u64,
        rate: BytesPerSecond,
    },
    /// A file's rate became known after it was opened: the driver read its header, or read it again
    /// ([`Action::ReadHeader`]). None: the header has no rate, or has none any more.
    Hint {
        file: FileId,
        hint: Option<RateHint>,
    },
    /// A device request ended. Ok: its bytes, fewer than asked for at the end of the file.
    IoDone {
        io: IoId,
        result: Result<ByteCount, Errno>,
    },
    /// The kernel took, or may have taken, this write into its cache, although the request was to
    /// go past it. Comes right before its [`Event::IoDone`]. Some: and the kernel failed to write
    /// bytes of the file from there, since the driver last asked.
    FellBack { io: IoId, lost: Option<Errno> },
    /// The kernel could not write bytes of a file from its cache, and has reported that to the
    /// driver, which it does only once. The driver asks behind each read of a file with such bytes,
    /// before its [`Event::IoDone`]: the kernel may have dropped bytes that it could not write, and
    /// returned older ones of the device.
    NotKept { file: FileId, errno: Errno },
    /// The instant asked for by [`Action::Wake`] has come. A timer at any other does no harm.
    Timer,
    /// The user of a handle became known, or is another now; for the ledger alone.
    Stationed {
        session: SessionId,
        handle: HandleId,
        station: Station,
    },
    /// The driver could not open a file, or accept a client, since it has too many descriptors
    /// open: the server forgets some of the files that nothing uses.
    Crowded,
    /// The driver has more files open than it should: the server forgets so many that nothing uses.
    Overfull { count: u32 },
    /// The bytes of a device request that is about to end came out of pages of the kernel's cache
    /// that the file system has not written yet. Right before its [`Event::IoDone`]. A program that
    /// has such a page mapped for writing may change it without moving the file's version: the
    /// kernel notices the first store into a page only, until the page is written.
    MayChange { io: IoId },
    /// Runs that an earlier server remembered ([`Server::remembered`]), oldest first; the driver
    /// has them from a file, so they may be anything. The runs that this server remembers are
    /// newer.
    Remembered(Vec<RememberedRun>),
}

/// A run of slots in [`Actions::slots`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotRun {
    /// Index of the first in [`Actions::slots`].
    pub start: u32,
    /// How many.
    pub count: u32,
}

/// The I/O priority of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoClass {
    /// Belongs to a contract.
    RealTime,
    /// Does not.
    BestEffort,
    /// Only when no other request wants the device.
    Idle,
}

/// Bytes of a file to be read into slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Through the kernel's cache, which may have bytes that it could not write and has not
    /// reported yet.
    pub buffered: bool,
    /// Priority.
    pub class: IoClass,
    /// When it must have ended.
    pub deadline: Instant,
}

/// In [`LanePart::record`]: none.
pub const NO_RECORD: u32 = u32::MAX;

/// Bytes of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LanePart {
    /// The lane.
    pub lane: LaneId,
    /// The record that they belong to; [`NO_RECORD`]: they were on their device once, as far as was
    /// known, and the table has had no free record for them since.
    pub record: u32,
    /// Where they begin. Units: bytes from the start of the lane.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// Bytes of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WritePart {
    /// Bytes that the device does not have yet.
    Lane(LanePart),
    /// Bytes of a gap, out of a buffer: the device has them already.
    Slot {
        /// The buffer. Its bytes do not change until the write has ended.
        slot: SlotIndex,
        /// Where the bytes begin in it. Units: bytes.
        offset: u32,
        /// How many.
        length: u32,
    },
}

impl WritePart {
    /// Units: bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            WritePart::Lane(part) => part.length,
            WritePart::Slot { length, .. } => u64::from(*length),
        }
    }
}

/// A run of parts in [`Actions::parts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartRun {
    /// Index of the first in [`Actions::parts`].
    pub start: u32,
    /// How many.
    pub count: u32,
}

/// Bytes of a file to be written to its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoWrite {
    /// Comes back in [`Event::IoDone`].
    pub io: IoId,
    /// To which file.
    pub file: FileId,
    /// On which device.
    pub device: DeviceId,
    /// Which bytes. Starts and ends on a page, unless `buffered`.
    pub range: ByteRange,
    /// The bytes, one part behind the other, as many as the range has.
    pub parts: PartRun,
    /// Less than a page at its start or end: through the kernel's cache, which knows the rest of
    /// the page.
    pub buffered: bool,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Bytes of the cache, pinned until ReadEnd; short only at the end of the file. Zero slots: end
    /// of file.
    Data {
        slots: SlotRun,
        first_offset: u32,
        length: ByteCount,
    },
    /// Changed, Gone, WriteEnd, Sync, Hold: done.
    Done,
    /// WriteBegin: put the bytes here, the first at `first_offset` in the first page; then
    /// [`Event::WriteEnd`].
    Granted {
        runs: Runs,
        first_offset: u32,
        length: ByteCount,
        /// The record of its lane that the piece will have when it is published.
        record: u32,
    },
    /// An error for the application.
    Failed(Errno),
    /// Do it on your own descriptor.
    Plain,
}

/// The outcome of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flushed {
    /// The medium has all that was in the drive's memory.
    Done,
    /// Not now: the server may ask again.
    Later,
    /// This device cannot be asked to flush.
    Never,
}

/// An action for the driver.
#[expect(
    missing_docs,
    reason = "each variant says what its fields are; their types name them"
)]
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum Action {
    /// Answer a client.
    Reply {
        session: SessionId,
        request: RequestId,
        outcome: Outcome,
    },
    /// Read the header of a file, if it has one: the driver has not read it yet, or the file is
    /// another than when it did. Answer with [`Event::Hint`]. `size`: the acknowledged length, even
    /// if the file system has another.
    ReadHeader { file: FileId, size: ByteCount },
    /// Read from a device.
    Submit(IoRead),
    /// Write to a device.
    SubmitWrite(IoWrite),
    /// Copy bytes of a lane into a slot, at once; [`Event::Unfilled`] if they cannot be read.
    Fill {
        slot: SlotIndex,
        offset: u32,
        from: LanePart,
    },
    /// Make bytes of a slot zero, at once.
    Zero {
        slot: SlotIndex,
        offset: u32,
        length: u32,
    },
    /// Publish a piece in the table of its lane, before anything that follows: from now on it will
    /// be written, even if a process dies. `request`: the write that it belongs to; None: no client
    /// waits for it, its device seemed to have it already.
    Publish {
        lane: LaneId,
        record: u32,
        file: FileId,
        range: ByteRange,
        runs: Runs,
        request: Option<RequestId>,
    },
    /// A piece needs its pages no more, but its record stays: it hides part of an older piece that
    /// is not written yet, or tells a later server that the file's time is not set yet.
    Spent { lane: LaneId, record: u32 },
    /// Strike a piece from the table of its lane: its device has it, or nothing needs it any more.
    Strike { lane: LaneId, record: u32 },
    /// These pages of a lane are not in use and need no memory.
    GiveMemoryBack { lane: LaneId, run: PageRun },
    /// The session that a lane belonged to is gone, and so is everything in it.
    LaneDone { lane: LaneId },
    /// The file has bytes that the file system does not have: doors show this length, and that it
    /// changed now.
    Known { file: FileId, size: ByteCount },
    /// The file has no such bytes any more: the file system knows its length. Set its times, then
    /// [`Event::Settled`].
    Clean { file: FileId },
    /// Reserve blocks for `needed`, and as far as `wished_end` if that is easy.
    Reserve {
        file: FileId,
        needed: ByteRange,
        wished_end: u64,
    },
    /// Make all written bytes of the file durable.
    Sync { file: FileId },
    /// Make the kernel write its cached pages of the file, and do no more, on the descriptor that
    /// [`Action::Sync`] has; then [`Event::Synced`].
    WriteOut { file: FileId },
    /// Flush the drive's volatile cache; then [`Event::Flushed`].
    Flush { device: DeviceId },
    /// No client is writing to the file: give back the blocks that were reserved past its end,
    /// which is here; then [`Event::Settled`].
    Trim { file: FileId, size: ByteCount },
    /// Open the regular file `name` in the folder of `beside`: beneath it, on the same mount,
    /// without symlinks.
    OpenNeighbour { beside: FileId, name: String },
    /// Ask the door of a pool for the file of this path in its tree, on any member.
    AskPool { pool: PoolNumber, path: String },
    /// Report the length and the version of the file now.
    Stat { file: FileId },
    /// The server has forgotten the file: close it. Its id may be reused.
    Forget { file: FileId },
    /// Send [`Event::Timer`] at this instant, in place of the one asked for before.
    Wake { at: Instant },
    /// Bytes of the file may be in the kernel's cache alone, which may have to give them up; or
    /// none are any more. The driver tells the doors, so that no client reads it past us meanwhile.
    Loose { file: FileId, is_loose: bool },
}

/// The actions of one [`super::Server::step`], in order. Reused from step to step.
#[derive(Clone, Debug, Default, PartialEq, Hash)]
pub struct Actions {
    /// In order.
    pub list: Vec<Action>,
    /// The target of [`SlotRun`]s.
    pub slots: Vec<SlotIndex>,
    /// The target of [`PartRun`]s.
    pub parts: Vec<WritePart>,
}

impl Actions {
    /// Forget everything, keep the memory.
    pub fn clear(&mut self) {
        self.list.clear();
        self.slots.clear();
        self.parts.clear();
    }

    /// The parts of a run.
    pub fn parts_of(&self, run: PartRun) -> &[WritePart] {
        let start = run.start as usize;
        self.parts
            .get(start..start.saturating_add(run.count as usize))
            .expect("a run of parts that were put together in the same step")
    }

    /// The slots of a run.
    pub fn slots_of(&self, run: SlotRun) -> &[SlotIndex] {
        let start = run.start as usize;
        self.slots
            .get(start..start.saturating_add(run.count as usize))
            .expect("a run of slots that were named in the same step")
    }
}

// ---- Reports of the server about itself ----

/// The claim of a stream on its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Its rate is promised.
    Contract,
    /// It has no contract: it asked for one, and a device cannot promise it now.
    Refused,
    /// It has no contract and asks for none: its rate is not known, or it need not be promised.
    BestEffort,
}

/// The part of the path that cost a late read most of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Between the client's door and us.
    Door,
    /// Its file was still being opened.
    Open,
    /// No buffer was free.
    Cache,
    /// Waiting for its turn.
    Queue,
    /// The device took longer than its model.
    Device,
}

impl Stage {
    /// So many there are.
    pub const COUNT: usize = 5;
}

/// The reads of a stream in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Reads so far.
    pub read_count: u64,
    /// Reads that were due by the player's clock, promised or not: a player at a known rate has one
    /// from the first read of a run on. They include reads that still wait or were never answered,
    /// so they may be more than `read_count`.
    pub due_count: u64,
    /// Of those, answered late, or not answered yet though they are due.
    pub late_count: u64,
    /// Reads under contract.
    pub promised_count: u64,
    /// Of those, answered later than was promised.
    pub promised_late_count: u64,
    /// How far the latest of `late_count` was behind its due time.
    pub worst_lateness: Duration,
    /// Late reads by guilty stage, in the order of [`Stage`].
    pub guilty: [u64; Stage::COUNT],
    /// Bytes answered.
    pub bytes: ByteCount,
    /// Reads answered without waiting for a device.
    pub hit_count: u64,
}

impl ReadCounts {
    /// Reads that were due and answered in time.
    pub fn on_time_count(&self) -> u64 {
        self.due_count - self.late_count
    }
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamRecord {
    /// Its slot in the server. A later stream gets the same one; `number` is unique.
    pub stream: StreamId,
    /// Number of ledger lines so far, this one included: no two have the same.
    pub number: u32,
    /// The session that it belongs to.
    pub session: SessionId,
    /// Share, user, client.
    pub label: SessionLabel,
    /// Path as it was opened; of a sequence, that of its first frame.
    pub path: String,
    /// The part of that file.
    pub part: FilePart,
    /// True for one file a frame.
    pub sequence: bool,
    /// Its devices: one, but for a sequence of a pool.
    pub devices: Vec<DeviceId>,
    /// Whether it has a contract.
    pub standing: Standing,
    /// Rate and where it comes from, when known.
    pub rate: Option<(BytesPerSecond, RateSource)>,
    /// Why the device refused it a contract; None: it did not, or the stream has one now.
    pub refusal: Option<Refusal>,
    /// Its reads in numbers.
    pub reads: ReadCounts,
    /// How long its bytes in the cache will last.
    pub ahead: Duration,
    /// True while a client holds it open.
    pub open: bool,
}

/// The activity of a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeatState {
    /// The client reads.
    Plays,
    /// Something is open, and the client does not read: its last read is more than a preroll ago,
    /// and it has played the bytes that it read.
    Paused,
    /// Nothing is open, and the seat keeps its contracts.
    Away,
}

/// A place that a seat plays at, or plays on from when it has paused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlayheadRecord {
    /// [`StreamRecord::number`].
    pub stream: u32,
    /// Where the next read will be. Units: bytes of the file; of a sequence, of all frames since it
    /// began.
    pub position: ByteOffset,
    /// Contract or not.
    pub standing: Standing,
}

/// A contract that a seat keeps after the close of its handle.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptRecord {
    /// On this device.
    pub device: DeviceId,
    /// Its rate.
    pub rate: BytesPerSecond,
    /// The path that was played last.
    pub path: String,
    /// How long the seat still keeps it, if the client does not play.
    pub left: Duration,
}

/// One client at its work: a session; of a pool's door each stream.
#[derive(Clone, Debug, PartialEq)]
pub struct SeatRecord {
    /// The session that it belongs to.
    pub session: SessionId,
    /// Share, user, client.
    pub label: SessionLabel,
    /// Its activity.
    pub state: SeatState,
    /// The rate of all its contracts together.
    pub promised: BytesPerSecond,
    /// How long the client has not read.
    pub silent: Duration,
    /// How much it reads at one place before it cuts to another, in the mean; None: it has not cut
    /// yet.
    pub run: Option<ByteCount>,
    /// Its cuts from runs that its user had played before, and how many of those went where the
    /// last one had gone.
    pub rehearsed_cuts: u64,
    /// See there.
    pub foreseen_cuts: u64,
    /// Bytes fetched ahead of it that it has left unread; of a pool's door 0.
    pub unread: ByteCount,
    /// Where it plays: all places with a contract, and those without one that it reads at a known
    /// rate.
    pub playheads: Vec<PlayheadRecord>,
    /// Contracts that it keeps after the close of their handles.
    pub kept: Vec<KeptRecord>,
    /// Its lines in the ledger that are open, by number.
    pub streams: Vec<u32>,
}

/// The activity of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRecord {
    /// The device.
    pub device: DeviceId,
    /// Its model as refined so far.
    pub model: DeviceModel,
    /// Streams under contract.
    pub contract_count: u32,
    /// The rate that they were promised.
    pub promised: BytesPerSecond,
    /// Requests sent, by class: real time, best effort.
    pub request_count: [u64; 2],
    /// Bytes moved, by class.
    pub bytes: [ByteCount; 2],
    /// Requests that wrote.
    pub write_count: u64,
    /// Their bytes.
    pub written: ByteCount,
    /// Of `written`, the bytes that the device had already: they lay in gaps between the others.
    pub write_bridged: ByteCount,
    /// Of `bytes`, those that no client had asked for: they lay in gaps between the others.
    pub read_bridged: ByteCount,
    /// Bytes fetched ahead of readers that these have left unread.
    pub unread: ByteCount,
    /// Turns in which it was sent something, one request or several at once.
    pub batch_count: u64,
    /// Flushes of its volatile cache.
    pub flush_count: u64,
    /// Time it was busy.
    pub busy: Duration,
    /// Part of its time that others take, in thousandths, as admission counts it.
    pub foreign_permille: u32,
    /// The time that its requests take, in thousandths of the time by its model.
    pub slowness_permille: u32,
}

/// Clients' writes, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteRecord {
    /// Pages of lanes in use: granted, or acknowledged and not on their device yet.
    pub used_bytes: ByteCount,
    /// Files with bytes that their device does not have.
    pub dirty_file_count: u32,
    /// Writes that wait for room or for blocks.
    pub waiting_count: u32,
    /// Writes acknowledged.
    pub write_count: u64,
    /// Writes left to the client.
    pub plain_count: u64,
    /// Pieces of a former daemon that contradict each other; they stay where they are.
    pub unclaimed_count: u64,
}

/// The cache in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheRecord {
    /// All slots.
    pub slot_count: u32,
    /// Never used or given back.
    pub free_count: u32,
    /// Held for streams: filled ahead of the player, or being filled.
    pub held_count: u32,
    /// In the hands of clients now.
    pub pinned_count: u32,
    /// Reads answered at once.
    pub hit_count: u64,
    /// Reads that were not.
    pub miss_count: u64,
}

/// Answer to "can I add two more?".
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// All of them.
    pub admitted: bool,
    /// A sentence with the reason that decides.
    pub reason: String,
    /// How many more of that rate could be added; if not admitted, how many in all. At most 1000.
    pub more_count: u32,
    /// Bytes a second left for contracts at that rate's request size.
    pub left: BytesPerSecond,
}
