// SPDX-License-Identifier: Apache-2.0
//! The seam: events that may happen ([`Event`]) and actions that may be asked for ([`Action`]).

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
    /// Files that are known at once, which the driver holds open: beyond that none is kept that
    /// nobody uses.
    pub file_count_max: u32,
    /// Frames of a sequence opened ahead of the player.
    pub sequence_ahead_max: u32,
    /// Bytes of lanes in use at once: those granted, and those acknowledged and not on their device
    /// yet.
    pub write_buffer_bytes: u64,
    /// Longest write in one request.
    pub write_bytes_max: u64,
    /// Pieces of memory that a device write may be put together from. A write that is no longer
    /// than a page may have more: its sender copies parts of less than a page together.
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
    /// A seat that has nothing open keeps its promise for so long behind its last read.
    pub pause: Duration,
    /// Part of every device kept free by admission, in thousandths.
    pub margin_permille: u32,
    /// False: no pattern is recognised, nothing is fetched ahead, no contract is made (for
    /// ablation).
    pub analyser: bool,
    /// Make contracts for streams whose rate was only observed (no rule, no header).
    pub contracts_from_cadence: bool,
    /// Make contracts from what a container's header says.
    pub contracts_from_header: bool,
    /// An acknowledged byte is on its device so long after at the latest, when the device can.
    /// Zero: the driver ends as soon as it is.
    pub write_age: Duration,
    /// False: no gap is bridged, neither reading nor writing (for ablation).
    pub coalesce: bool,
    /// A file that is read and may be changed by others is looked at so often: not every change is
    /// told of.
    pub look_every: Duration,
    /// A read is not answered from the cache when the last look is older than this, and than the
    /// read.
    pub look_age: Duration,
}

impl Policy {
    /// The driver ends, and waits only until nothing is its alone.
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
            look_every: Duration::from_ms(400),
            look_age: Duration::from_ms(750),
        }
    }
}

impl Policy {
    /// Headers are read for their rates.
    pub(super) fn reads_headers(&self) -> bool {
        self.analyser && self.contracts_from_header
    }
}

/// A write past the kernel's cache ends well, and the kernel then tells of something that it could
/// not keep. That need be no disk's fault: it says the same when somebody writes to a page of the
/// range through its cache at that moment; and a sync that is under way may be told instead. The
/// bytes are written once more, the sync is asked for again, and nobody is told, unless it is so
/// for so many in a row.
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
    /// By the client on its own descriptor; the server is told afterwards ([`Event::Changed`]).
    #[default]
    Through,
    /// Through a lane: its blocks can be reserved, and stay where they are when they are written.
    Cached,
}

/// The facts that the driver found out about a file when it was opened.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct FileFacts {
    /// The driver's name for it: the same as long as the file is not forgotten
    /// ([`Action::Forget`]).
    pub file: FileId,
    /// Its device and inode.
    pub key: FileKey,
    /// Where it lies.
    pub device: DeviceId,
    /// Its length.
    pub size: ByteCount,
    /// Changes whenever the file changed without us (ctime).
    pub version: u64,
    /// It became so just before it was looked at: another change may have the same version, or this
    /// one may not be over.
    pub is_fresh: bool,
    /// Where its bytes are; ascending, may have holes, empty when unknown.
    pub extents: Vec<Extent>,
    /// From a rule or its header.
    pub hint: Option<RateHint>,
    /// It may have a header that says it, and nobody has read that ([`Action::ReadHeader`]).
    pub is_header_unread: bool,
    /// How it may be written. None: nobody has looked; the way found before counts.
    pub way: Option<WriteWay>,
    /// Nobody writes to it but clients of ours: no other program, through no other door.
    pub is_exclusive: bool,
    /// Others may have written bytes to it that its device does not have yet. Not so when it has a
    /// length at most, and no blocks.
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

/// The user at the other end of one handle, where the session itself does not say it: a pool's
/// mount has one session for everybody.
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

    /// There is no room, for this user or for anybody.
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
    /// A device exists; before any file on it. Once more: it was measured anew, and what was
    /// learned of it is void.
    DeviceAdded {
        device: DeviceId,
        model: DeviceModel,
    },
    /// Limits stay; these changed.
    PolicyChanged(Policy),
    /// The driver stops, and puts out its sessions itself. A client that has not noticed that yet
    /// goes on copying the bytes that it was answered: buffers in the hands of such a session are
    /// used for nothing else any more.
    Stopping,
    /// A client connected.
    SessionOpened {
        session: SessionId,
        label: SessionLabel,
    },
    /// It is one of several of the door of a pool: the names in it are of files of the pool's one
    /// tree, on any member, so that a reader of a sequence reads it in all of them.
    SessionOfPool {
        session: SessionId,
        pool: PoolNumber,
    },
    /// It went, or was put out: its handles, pins and waiting reads are void, but for the pins
    /// after [`Event::Stopping`]. In-flight I/O is not.
    SessionClosed { session: SessionId },
    /// A client named a file, or the object that has a part of it; the driver is finding out about
    /// it. Reads may follow at once.
    Opening {
        session: SessionId,
        handle: HandleId,
        path: String,
        part: FilePart,
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
    /// Memory that a session may write to, or that a former daemon left (no session then).
    LaneAdded {
        lane: LaneId,
        session: Option<SessionId>,
        page_count: u32,
        /// Records that its table has room for.
        record_count: u32,
    },
    /// A record that a former daemon published in a lane's table, in order of publication: its
    /// piece is still to be written, or has no pages any more ([`Action::Spent`]; no runs then).
    Recovered {
        lane: LaneId,
        record: u32,
        facts: FileFacts,
        range: ByteRange,
        runs: Runs,
    },
    /// All that was left has been told: lanes that hold nothing of it can go.
    RecoveryEnded,
    /// More of what a former daemon left will be told, of files that could not be had before:
    /// [`Event::Recovered`] of each piece, then [`Event::RecoveryEnded`]. Until then nothing is
    /// sent to a device.
    RecoveryBegun,
    /// The client wants to write.
    WriteBegin {
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// It has put the bytes where it was told; it waits for the reply.
    WriteEnd {
        session: SessionId,
        request: RequestId,
    },
    /// It will not: its grant is void.
    WriteAbort {
        session: SessionId,
        request: RequestId,
    },
    /// The client waits until all that was acknowledged of the file is on stable storage.
    Sync {
        session: SessionId,
        handle: HandleId,
        request: RequestId,
    },
    /// A client is about to change a file on its own descriptor, in a way that leads past its bytes
    /// (truncate, copy on the server). It waits until the file has everything, and nothing is
    /// granted until its [`Event::Changed`].
    Hold {
        session: SessionId,
        request: RequestId,
        key: FileKey,
    },
    /// This record of a lane that a former server left is told later ([`Event::Recovered`]): its
    /// file cannot be had yet. After the lane's [`Event::LaneAdded`].
    RecordKept { lane: LaneId, record: u32 },
    /// Answer to [`Action::Reserve`]: where all of the file's bytes are now.
    Reserved {
        file: FileId,
        result: Result<Vec<Extent>, Errno>,
    },
    /// Blocks were reserved for this file by a former server, or when it was known before, and not
    /// given back; a client that is not known may have it open. After its [`Event::Opened`].
    HasReserve { file: FileId },
    /// An [`Action::Fill`] of this slot failed: its bytes are nobody's. Right after the step that
    /// asked for it; the driver has failed all that the step made of the slot.
    Unfilled { slot: SlotIndex },
    /// Answer to [`Action::Clean`] and to [`Action::Trim`]: the file's times are right, and our own
    /// changes to it have made it this version.
    Settled { file: FileId, version: u64 },
    /// Answer to [`Action::Sync`] and [`Action::WriteOut`]; [`Errno::AGAIN`]: it was not tried.
    Synced {
        file: FileId,
        result: Result<(), Errno>,
    },
    /// The same in its place: it has failed, which may be no disk's fault, since a write past the
    /// kernel's cache met the file there meanwhile (see [`LOST_IN_A_ROW`]). Nobody will be told of
    /// that error again.
    SyncDoubted { file: FileId, errno: Errno },
    /// Answer to [`Action::Flush`].
    Flushed { device: DeviceId, outcome: Flushed },
    /// Bytes of a file were changed beside the cache, by a client that waits for the reply. All of
    /// the range was written, so that the file is as long at least; one to the end of all files may
    /// have changed its length and blocks as well.
    Changed {
        session: SessionId,
        request: RequestId,
        key: FileKey,
        range: ByteRange,
        /// Bytes of it may wait in the kernel's cache. Not so when its length or blocks alone were
        /// changed.
        has_bytes: bool,
    },
    /// A file has lost its last name, or is about to; the client waits for the reply.
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
    /// The descriptor of a file is to be closed: the file goes with its last use, after its bytes,
    /// and is not kept for its cached bytes.
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
    /// Answer to [`Action::AskPool`]. Err: there is no such file, or it is none that could be
    /// fetched ahead.
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
    /// A file's rate became known after it was opened: its header was read, or read again
    /// ([`Action::ReadHeader`]). None: it does not say, or not any more.
    Hint {
        file: FileId,
        hint: Option<RateHint>,
    },
    /// A device request ended; Ok is how many bytes it gave (short at the end of the file).
    IoDone {
        io: IoId,
        result: Result<ByteCount, Errno>,
    },
    /// The kernel took, or may have taken, this write into its cache, although past it was asked.
    /// Right before its [`Event::IoDone`]. Some: and there it could not write something of the
    /// file, since that was last asked.
    FellBack { io: IoId, lost: Option<Errno> },
    /// The kernel could not write something of a file that it had in its cache, and has told the
    /// driver, which it will not tell again. Asked behind each read of a file with such bytes,
    /// before its [`Event::IoDone`]: the kernel may have let go of bytes that it could not write,
    /// and shown older ones of the device.
    NotKept { file: FileId, errno: Errno },
    /// The instant asked for by [`Action::Wake`] has come. Any other does no harm.
    Timer,
    /// The user of a handle became known, or is another by now; for the ledger alone.
    Stationed {
        session: SessionId,
        handle: HandleId,
        station: Station,
    },
    /// The driver could not open a file, or let anybody in, since it has too many open: some that
    /// nobody uses are forgotten.
    Crowded,
    /// It has more open than it should: so many that nobody uses are forgotten.
    Overfull { count: u32 },
    /// The bytes of a device request that is about to end came out of pages of the kernel's cache
    /// that the file system has not written yet. Right before its [`Event::IoDone`]. A program that
    /// has such a page mapped for writing may change it without moving the file's version: the
    /// kernel notices the first store into a page only, until the page is written.
    MayChange { io: IoId },
}

/// A run of slots in [`Actions::slots`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotRun {
    /// Index of the first in [`Actions::slots`].
    pub start: u32,
    /// How many.
    pub count: u32,
}

/// How a request is to be treated below us (the I/O priority).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoClass {
    /// Belongs to a contract.
    RealTime,
    /// Does not.
    BestEffort,
    /// Only when nobody else wants the device.
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
    /// Through the kernel's cache, which may have bytes that it could not write and has told nobody
    /// of yet.
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
    /// Which lane.
    pub lane: LaneId,
    /// Which of its records they belong to; [`NO_RECORD`]: they were on their device once, as far
    /// as was known, and its table has had no free record for them since.
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
    /// Bytes that lie between, out of a buffer: the device has them already.
    Slot {
        /// Which buffer. Nobody changes it until the write has ended.
        slot: SlotIndex,
        /// Where in it they begin. Units: bytes.
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
        /// Of its lane, that it will have when it is published.
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
    /// All that was in the drive's memory is on its medium.
    Done,
    /// Not now: it may be asked again.
    Later,
    /// Nothing of the kind can be asked of this device.
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
    /// Read the header of a file, if it has one: nobody has yet, or it is another than when that
    /// was done. Answer with [`Event::Hint`]. `size`: as it was acknowledged, even if the file
    /// system has another.
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
    /// be written, even if a process dies. `request`: the write that it belongs to; None: nobody
    /// waits for it, it seemed to be on its device already.
    Publish {
        lane: LaneId,
        record: u32,
        file: FileId,
        range: ByteRange,
        runs: Runs,
        request: Option<RequestId>,
    },
    /// A piece needs its pages no more, but its record stays: it hides part of an older one that is
    /// still to be written.
    Spent { lane: LaneId, record: u32 },
    /// Strike a piece from the table of its lane: it is on its device, or nobody wants it any more.
    Strike { lane: LaneId, record: u32 },
    /// These pages of a lane are not in use and need no memory.
    GiveMemoryBack { lane: LaneId, run: PageRun },
    /// The session that a lane belonged to is gone, and so is everything in it.
    LaneDone { lane: LaneId },
    /// The file has bytes that the file system does not have: to observers behind doors it is so
    /// long, and changed now.
    Known { file: FileId, size: ByteCount },
    /// It has none any more: the file system knows its length. Set its times, then
    /// [`Event::Settled`].
    Clean { file: FileId },
    /// Reserve blocks for `needed`, and onward to `wished_end` if that is easy.
    Reserve {
        file: FileId,
        needed: ByteRange,
        wished_end: u64,
    },
    /// Put all that was written of the file on stable storage.
    Sync { file: FileId },
    /// Have the kernel write what it has of the file in its cache, and no more, on the descriptor
    /// that [`Action::Sync`] has; then [`Event::Synced`].
    WriteOut { file: FileId },
    /// The drive shall bring what it took into a memory of its own to the medium; then
    /// [`Event::Flushed`].
    Flush { device: DeviceId },
    /// Nobody is writing to the file: give back what was reserved past its end, which is here; then
    /// [`Event::Settled`].
    Trim { file: FileId, size: ByteCount },
    /// Open the regular file `name` in the folder of `beside` (beneath it, same mount, no
    /// symlinks).
    OpenNeighbour { beside: FileId, name: String },
    /// Ask the door of a pool for the file of this path in its tree, on whichever member it lies.
    AskPool { pool: PoolNumber, path: String },
    /// Say how long the file is now, and of which version.
    Stat { file: FileId },
    /// The server has forgotten the file: close it. Its id may be reused.
    Forget { file: FileId },
    /// Send [`Event::Timer`] at this instant; replaces what was asked before.
    Wake { at: Instant },
    /// Bytes of the file may be in the kernel's cache alone, which may have to give them up; or
    /// none are any more. Doors are told, so that nobody reads it past us until then.
    Loose { file: FileId, is_loose: bool },
}

/// Where [`super::Server::step`] puts what is to be done, in order. Reused from step to step.
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

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamRecord {
    /// Which stream. When it has ended another one gets this number.
    pub stream: StreamId,
    /// How many lines the ledger had with this one: no two have the same.
    pub number: u32,
    /// The session that it belongs to.
    pub session: SessionId,
    /// Share, user, client.
    pub label: SessionLabel,
    /// Path as it was opened (a sequence: of its first frame).
    pub path: String,
    /// Which part of that file.
    pub part: FilePart,
    /// True for one file a frame.
    pub sequence: bool,
    /// On which devices: one, but for a sequence of a pool.
    pub devices: Vec<DeviceId>,
    /// Contract or not.
    pub standing: Standing,
    /// Rate and where it comes from, when known.
    pub rate: Option<(BytesPerSecond, RateSource)>,
    /// Why it has no contract, if it was refused one; None: it was not, or has got one.
    pub refusal: Option<Refusal>,
    /// Reads of it so far.
    pub read_count: u64,
    /// Reads that were due by the player's clock, promised or not: a player at a known rate has one
    /// from the first read of a run on. Reads that still wait or were never answered are among
    /// them, so that they may be more than `read_count`.
    pub due_count: u64,
    /// Of those, answered in time.
    pub on_time_count: u64,
    /// Of those, answered late.
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
    /// How long what is in the cache will last.
    pub ahead: Duration,
    /// True while a client holds it open.
    pub open: bool,
}

/// The activity of a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeatState {
    /// Somebody reads.
    Plays,
    /// Something is open, and nobody reads: longer than a preroll behind the last read, and what
    /// was read is played.
    Paused,
    /// Nothing is open, and the seat keeps what it was promised.
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

/// A promise that a seat has no place for now.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptRecord {
    /// Where.
    pub device: DeviceId,
    /// Of how much.
    pub rate: BytesPerSecond,
    /// The path that was played last.
    pub path: String,
    /// How long it is kept, if nobody plays.
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
    /// The rate that it is promised, all together.
    pub promised: BytesPerSecond,
    /// How long nobody has read.
    pub silent: Duration,
    /// How much it reads at one place before it cuts to another, in the mean; None: it has not cut
    /// yet.
    pub run: Option<ByteCount>,
    /// Where it plays: all places with a contract, and those without that are being read at a known
    /// rate.
    pub playheads: Vec<PlayheadRecord>,
    /// Promises that it has no place for.
    pub kept: Vec<KeptRecord>,
    /// Its lines in the ledger that are open, by number.
    pub streams: Vec<u32>,
}

/// The activity of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRecord {
    /// Which.
    pub device: DeviceId,
    /// Its model as refined so far.
    pub model: DeviceModel,
    /// Streams under contract.
    pub contract_count: u32,
    /// The rate that they were promised.
    pub promised: BytesPerSecond,
    /// Requests sent, bytes moved, by class (real time, best effort).
    pub request_count: [u64; 2],
    /// Bytes.
    pub bytes: [ByteCount; 2],
    /// Requests that wrote.
    pub write_count: u64,
    /// Their bytes.
    pub written: ByteCount,
    /// Of `written`, what the device had already: it lay between what was to be written.
    pub write_bridged: ByteCount,
    /// Of `bytes`, what nobody had asked for: it lay between what was wanted.
    pub read_bridged: ByteCount,
    /// How often it was sent something, one request or several at once.
    pub batch_count: u64,
    /// How often it was told to write out what it had in a memory of its own.
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
    /// Pieces of a former daemon that contradict each other, and are left where they are.
    pub unclaimed_count: u64,
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
    /// A sentence with the reason that decides.
    pub reason: String,
    /// How many more of that rate could be added (when not admitted: how many in all; at most
    /// 1000).
    pub more_count: u32,
    /// Bytes a second left for contracts at that rate's request size.
    pub left: BytesPerSecond,
}
