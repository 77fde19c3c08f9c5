// SPDX-License-Identifier: Apache-2.0
//! Byte layouts that two programs must agree on: the session socket and the rings.
//!
//! All integers are little endian, which is host order on every machine we run on; `engine/shm`
//! asserts that. A layout never changes within a version; [`VERSION`] is compared at the handshake
//! and a mismatch means plain I/O, never a guess.
//!
//! History: 1 first layout; 2 writes: lanes, facts, WRITE_BEGIN to HOLD, the user's ids in OPEN; 3
//! TIMED; 4 pools: their number in CONNECT, WANTED and FOUND; 5 the part of a striped file in OPEN;
//! 6 a key in the facts; 7 STATION; 8 RESIZED.

pub mod facts;
pub mod lane;
pub mod reserved;

/// Version of every layout in this file.
pub const VERSION: u32 = 8;

/// First four bytes of every message on the session socket: "RSH1".
pub const MAGIC: u32 = 0x3148_5352;

/// Entries in each ring of a session. A power of two.
pub const RING_ENTRIES: u32 = 256;

/// Slots that one read reply can name; bounds the length of one read.
pub const REPLY_SLOTS_MAX: usize = 16;

/// Longest path in an [`OpenMessage`]. Units: bytes.
pub const PATH_BYTES_MAX: usize = 4096;

/// Longest share, user or client name in a [`ConnectMessage`]. Units: bytes.
pub const NAME_BYTES_MAX: usize = 64;

// ---- Session socket (seqpacket): one message a packet, descriptors by SCM_RIGHTS ----

/// The kinds of message on the session socket.
pub mod message {
    /// Client → daemon: [`super::ConnectMessage`], no descriptor.
    pub const CONNECT: u32 = 1;
    /// Daemon → client: [`super::WelcomeMessage`] with, in this order, the data segment
    /// (read-only), the ring segment, the eventfd that wakes the daemon, the one that wakes the
    /// client; and, if it has a lane, the lane's bytes (to be mapped for writing) and the facts
    /// ([`super::facts`], read-only).
    pub const WELCOME: u32 = 2;
    /// Daemon → client: [`super::RefusedMessage`]; the daemon then closes.
    pub const REFUSED: u32 = 3;
    /// Client → daemon: [`super::OpenMessage`] followed by the path, with the client's own
    /// descriptor. Not answered: a read on the handle shows whether it was taken.
    pub const OPEN: u32 = 4;
    /// Daemon → client, in sessions of a pool's door: [`super::WantedMessage`] followed by a path
    /// in the pool's tree, no descriptor. The door answers with [`FOUND`], in any of its sessions;
    /// the daemon does not wait for a door that does not answer.
    pub const WANTED: u32 = 5;
    /// Client → daemon: [`super::FoundMessage`], with a descriptor of the file if there is one.
    pub const FOUND: u32 = 6;
    /// Client → daemon: [`super::StationMessage`], no descriptor. At any time after OPEN, and
    /// again; not answered.
    pub const STATION: u32 = 7;
}

/// Offset · size · meaning: 0·4 magic, 4·4 version, 8·4 message, 12·4 zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MessageHead {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// One of [`message`].
    pub message: u32,
    /// Zero.
    pub reserved: u32,
}

/// 0·16 head, 16·4 door, 20·4 zero, 24·64 share, 88·64 user, 152·64 client, 216·8 pool; names end
/// at the first NUL.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ConnectMessage {
    /// [`message::CONNECT`].
    pub head: MessageHead,
    /// One of [`door`].
    pub door: u32,
    /// Zero.
    pub reserved: u32,
    /// The share's name, as the configuration knows it.
    pub share: [u8; NAME_BYTES_MAX],
    /// The user that is connected.
    pub user: [u8; NAME_BYTES_MAX],
    /// Where the user is: an address or a machine's name.
    pub client: [u8; NAME_BYTES_MAX],
    /// Of a pool's door the same number in each of its sessions, drawn when it starts; paths are
    /// then those of the pool's tree. 0: it is no pool's door.
    pub pool: u64,
}

/// The kind of door that a session serves.
pub mod door {
    /// Samba's VFS module.
    pub const SMB: u32 = 1;
    /// The mount.
    pub const FUSE: u32 = 2;
    /// A local program linked with the client library.
    pub const LOCAL: u32 = 3;
}

/// 0·16 head, 16·4 session, 20·4 slot count, 24·4 bytes a slot, 28·4 ring entries, 32·8 longest
/// read, 40·8 longest write, 48·8 the lane's secret, 56·4 lane, 60·4 pages of the lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WelcomeMessage {
    /// [`message::WELCOME`].
    pub head: MessageHead,
    /// The session's number, for logs.
    pub session: u32,
    /// Slots in the data segment.
    pub slot_count: u32,
    /// Size of a slot.
    pub slot_bytes: u32,
    /// [`RING_ENTRIES`] of the daemon.
    pub ring_entries: u32,
    /// Longest read in one request; the client cuts longer ones.
    pub read_bytes_max: u64,
    /// Longest write in one request; longer ones are written by the client itself.
    pub write_bytes_max: u64,
    /// The number that a door must know to ask another daemon about this lane.
    pub secret: u64,
    /// Number of the session's lane.
    pub lane: u32,
    /// Pages of it; 0: there is none, and all writes are the client's own.
    pub lane_pages: u32,
}

/// 0·16 head, 16·4 errno, 20·4 zero, 24·232 a sentence.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RefusedMessage {
    /// [`message::REFUSED`].
    pub head: MessageHead,
    /// Why, as errno.
    pub errno: u32,
    /// Zero.
    pub reserved: u32,
    /// Why, as a sentence ending at the first NUL.
    pub reason: [u8; 232],
}

/// 0·16 head, 16·4 handle, 20·4 path bytes, 24·4 user, 28·4 group, 32·4 part, 36·4 part count, 40·…
/// path below the share's root, no leading slash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OpenMessage {
    /// [`message::OPEN`].
    pub head: MessageHead,
    /// Chosen by the client; not in use in this session.
    pub handle: u32,
    /// Length of the path that follows.
    pub path_bytes: u32,
    /// The user whose quota and rights count when it is written.
    pub uid: u32,
    /// The same.
    pub gid: u32,
    /// Which part of the file that the path names the descriptor's bytes are; below `part_count`.
    pub part: u32,
    /// So many objects have the file's bytes in turn, each the same share of them, as in a stripe
    /// of a pool; 1: the descriptor has all of them. At most [`crate::units::FilePart::COUNT_MAX`];
    /// in sessions that are no pool's 1.
    pub part_count: u32,
}

/// 0·16 head, 16·8 number, 24·4 path bytes, 28·4 zero, 32·… path below the root of the pool's tree,
/// no leading slash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WantedMessage {
    /// [`message::WANTED`].
    pub head: MessageHead,
    /// To answer by; the daemon uses it once.
    pub number: u64,
    /// Length of the path that follows.
    pub path_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

/// 0·16 head, 16·8 number, 24·4 errno, 28·4 zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FoundMessage {
    /// [`message::FOUND`].
    pub head: MessageHead,
    /// Of the [`WantedMessage`].
    pub number: u64,
    /// 0: the file's descriptor comes with it. Else why there is none.
    pub errno: u32,
    /// Zero.
    pub reserved: u32,
}

/// 0·16 head, 16·4 handle, 20·4 zero, 24·64 user, 88·64 client; names end at the first NUL.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StationMessage {
    /// [`message::STATION`].
    pub head: MessageHead,
    /// As in [`OpenMessage`]. A handle that is closed by now is no fault: the two come by different
    /// ways.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
    /// The user, in place of the one that CONNECT names.
    pub user: [u8; NAME_BYTES_MAX],
    /// From where, or which program.
    pub client: [u8; NAME_BYTES_MAX],
}

// ---- Rings: single producer, single consumer, in one sealed memory file a session ----

/// Byte offsets in the ring segment. Head and tail are free-running u32 counters, each on its own
/// cache line; the producer publishes entries by a release store of the tail.
pub mod ring {
    use super::{RING_ENTRIES, Reply, Request};
    /// Next request that the daemon takes; the daemon writes it.
    pub const REQUEST_HEAD: usize = 0;
    /// Next request that the client fills; the client writes it.
    pub const REQUEST_TAIL: usize = 64;
    /// Next reply that the client takes; the client writes it.
    pub const REPLY_HEAD: usize = 128;
    /// Next reply that the daemon fills; the daemon writes it.
    pub const REPLY_TAIL: usize = 192;
    /// 1 while the daemon sleeps and wants its doorbell rung for a request; the side that swaps it
    /// to 0 rings.
    pub const REQUEST_BELL: usize = 256;
    /// 1 while the client sleeps and wants its doorbell rung for a reply; the side that swaps it to
    /// 0 rings.
    pub const REPLY_BELL: usize = 320;
    /// Bits of [`super::server_flag`]; the daemon writes them.
    pub const SERVER_FLAGS: usize = 384;
    /// A number that the daemon changes each second or oftener: it is not hung, however long a read
    /// takes.
    pub const HEARTBEAT: usize = 448;
    /// First request entry.
    pub const REQUESTS: usize = 4096;
    /// First reply entry.
    pub const REPLIES: usize = REQUESTS + RING_ENTRIES as usize * size_of::<Request>();
    /// Size of the whole segment.
    pub const BYTES: usize = REPLIES + RING_ENTRIES as usize * size_of::<Reply>();
}

/// The daemon's declarations in [`ring::SERVER_FLAGS`].
pub mod server_flag {
    /// It looks at the request ring by itself every few milliseconds while slots are pinned, so
    /// that READ_END needs no doorbell.
    pub const SWEEPS: u32 = 1;
}

/// The kinds of request.
pub mod op {
    /// `handle`, `offset`, `length` → slots, pinned until [`READ_END`]. rt-Samba's READ0.
    pub const READ: u32 = 1;
    /// `id` of the read whose slots are released. No reply. rt-Samba's READ1.
    pub const READ_END: u32 = 2;
    /// `handle` is closed. No reply.
    pub const CLOSE: u32 = 3;
    /// The client has changed the bytes `offset .. offset+length` of the file named by `device` and
    /// `inode`, by a write, truncate or punch; `length` = u64::MAX: to the end. The reply comes
    /// when no reader will see older ones.
    pub const CHANGED: u32 = 4;
    /// The file named by `device` and `inode` lost a name, by an unlink or a rename over it. Reply
    /// as CHANGED.
    pub const GONE: u32 = 5;
    /// `handle`, `offset`, `length` → pages of the session's lane, in the reply's slots as pairs of
    /// first page and count; the first byte goes to `first_offset` in the first of them. rt-Samba's
    /// WRITE0.
    pub const WRITE_BEGIN: u32 = 6;
    /// `id` of the write whose bytes are there now. The reply comes when they are acknowledged.
    /// rt-Samba's WRITE1.
    pub const WRITE_END: u32 = 7;
    /// `id` of a write that was granted and will not be. No reply.
    pub const WRITE_ABORT: u32 = 8;
    /// `handle` → when all that was acknowledged of its file is on stable storage.
    pub const SYNC: u32 = 9;
    /// The client is about to change the file named by `device` and `inode` past the bytes in
    /// lanes: by a truncate, or a copy on the server. The reply comes when the file has all its
    /// bytes; the daemon grants none of it until the session's CHANGED.
    pub const HOLD: u32 = 10;
    /// Was request `offset` of the lane `device` with the secret `inode`, which the client had with
    /// a daemon that died, committed? An empty reply: it was. [`super::PLAIN`]: no.
    pub const WAS_COMMITTED: u32 = 11;
    /// The client is about to set the time of change of the file named by `device` and `inode` to
    /// `offset`, ns since 1970 as i64 in two's complement. The reply, empty, comes when no other
    /// time will be set, but for writes that come after it.
    pub const TIMED: u32 = 12;
    /// As [`CHANGED`] to the end of the file, but no byte was written: the length or blocks from
    /// `offset` on have changed, and the kernel's cache has nothing of that for a disk. Not for a
    /// cut within a page, which writes zeros behind the new end.
    pub const RESIZED: u32 = 13;
}

/// 0·8 id, 8·4 op, 12·4 handle, 16·8 offset, 24·8 length, 32·8 device, 40·8 inode, 48·8 sent, 56·8
/// zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    /// Chosen by the client, unique while outstanding.
    pub id: u64,
    /// One of [`op`].
    pub op: u32,
    /// As in [`OpenMessage`].
    pub handle: u32,
    /// Units: bytes from the start of the file.
    pub offset: u64,
    /// Units: bytes.
    pub length: u64,
    /// `st_dev` of the file changed.
    pub device: u64,
    /// `st_ino` of the file changed.
    pub inode: u64,
    /// When the door received it, on CLOCK_MONOTONIC; ns. For the ledger only.
    pub sent_ns: u64,
    /// Zero.
    pub reserved: u64,
}

/// 0·8 id, 8·4 errno, 12·4 slot count, 16·8 length, 24·4 offset in the first slot, 28·4 zero,
/// 32·64 slots, 96·32 zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Reply {
    /// The request's.
    pub id: u64,
    /// 0, an errno for the application, or [`PLAIN`].
    pub errno: u32,
    /// How many of `slots` are used.
    pub slot_count: u32,
    /// Bytes answered; short only at the end of the file. Of a grant: all that was asked for.
    pub length: u64,
    /// Where the answer starts in `slots[0]`; it continues at the start of each next slot.
    pub first_offset: u32,
    /// Zero.
    pub reserved: u32,
    /// Indices into the data segment, or runs of pages of the lane.
    pub slots: [u32; REPLY_SLOTS_MAX],
    /// Zero.
    pub padding: [u64; 4],
}

/// In [`Reply::errno`]: the daemon does not serve this file, or not now; do the I/O on your own
/// descriptor. Above every errno.
pub const PLAIN: u32 = 0x1_0000;

const _: () = {
    assert!(RING_ENTRIES.is_power_of_two());
    assert!(size_of::<MessageHead>() == 16);
    assert!(size_of::<ConnectMessage>() == 224);
    assert!(size_of::<WantedMessage>() == 32);
    assert!(size_of::<FoundMessage>() == 32);
    assert!(size_of::<StationMessage>() == 152);
    assert!(size_of::<WelcomeMessage>() == 64);
    assert!(size_of::<RefusedMessage>() == 256);
    assert!(size_of::<OpenMessage>() == 40);
    assert!(size_of::<Request>() == 64);
    assert!(size_of::<Reply>() == 128);
    assert!(2 * crate::write::RUNS_MAX <= REPLY_SLOTS_MAX);
    assert!(ring::BYTES == 4096 + 256 * 64 + 256 * 128);
};
