// SPDX-License-Identifier: Apache-2.0
//! The door's end of a session: reads through the daemon's cache, copied out of shared memory here.
//!
//! A [`Client`] belongs to one thread and lives in another program's process, so: no call waits
//! without a bound for a daemon that is gone, none panics, prints, raises SIGPIPE or leaves a
//! descriptor open across exec. When the daemon dies every outstanding and later read ends as
//! [`ReadError::Plain`], which tells the caller to read on its own descriptor. Asynchronous reads
//! of a file with a fact are the exception: they wait for the next daemon, see `lost.rs`.
//!
//! **Parts.** The client cuts a read that is longer than one request may be into parts, each a
//! request of its own, and joins the replies, which come in any order. Parts that do not fit the
//! ring wait here and follow as others end.
//!
//! **Room.** Every read that gets buffers owes the ring a READ_END. A read is sent only if the ring
//! holds, besides it, an END for each read under way: then an END always finds room and is never
//! lost.
//!
//! **Fork.** A child made by fork(2) has a copy of this that it must not use: the copy is dead, all
//! its reads are Plain, and it touches nothing shared. The session ends when the last copy of the
//! socket closes, so a child that lives long should exec, as all descriptors are close-on-exec, or
//! disconnect.

mod connect;
mod lent;
mod lost;
mod owned;
mod receiving;
mod sending;
mod spin;
#[cfg(test)]
mod tests;
mod waiting;
mod wanted;
mod write;

pub use connect::{CONNECT_PATIENCE, ConnectError};
pub use lent::{Lent, lend};
pub use owned::{OwnedClient, OwnedDone};
use spin::Spin;
pub use wanted::WantedFile;

use crate::facts::FileFact;
use crate::layout::{
    Connect, PACKET_BYTES_MAX, PeerError, Writer, broken, path_is_plain, write_open,
};
use crate::rings::{RingMemory, Which};
use connect::{Lane, timespec};
use receiving::error_of;
use rushes_core::format::{
    PATH_BYTES_MAX, PLAIN, REPLY_SLOTS_MAX, RING_ENTRIES, Reply, Request, op, server_flag,
};
use rushes_core::server::{PAGE_BYTES, PageRun, Runs};
use rushes_core::units::{Duration, FilePart, Instant, NS_PER_S};
use rushes_sys::{ForkGuard, Mapping, bell, clock, socket};
use rustix::event::{PollFd, PollFlags, poll};
use slotmap::{Key, KeyData, SlotMap, new_key_type};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr::NonNull;

/// A waiting call that gets nothing for so long, not even a heartbeat, takes the daemon for hung
/// and ends the session.
pub const HUNG_PATIENCE: Duration = Duration(30 * NS_PER_S);
/// A daemon that lives and does not answer for so long has lost the request. Clients do not wait
/// that long themselves.
pub const LOST_PATIENCE: Duration = Duration(120 * NS_PER_S);

/// Why a read gave no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// Do it on your own descriptor.
    Plain,
    /// The file's own error, as errno.
    Errno(u32),
}

/// A file of a session; its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileHandle(u32);

/// A read under way. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// As a number, for C.
    pub fn number(self) -> u64 {
        self.0
    }

    /// From [`Ticket::number`]; any other number is a ticket that does not exist.
    pub fn from_number(number: u64) -> Ticket {
        Ticket(number)
    }
}

/// A read that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which.
    pub ticket: Ticket,
    /// As given with it.
    pub private_data: usize,
    /// Bytes that are in the buffer; short only at the end of the file.
    pub result: Result<usize, ReadError>,
}

/// Bytes of the cache, pinned until [`Client::lease_end`].
#[derive(Debug)]
pub struct Lease {
    /// For [`Client::lease_end`].
    pub id: u64,
    /// How many bytes; short at the end of the file or of what one lease can span.
    pub length: usize,
    /// Where they are, in order. Valid until the lease or the client ends.
    pub pieces: Vec<(NonNull<u8>, usize)>,
}

new_key_type! {
    struct TicketKey;
    struct PartKey;
}

/// One session with the daemon.
pub struct Client {
    socket: OwnedFd,
    memory: RingMemory,
    data: Mapping,
    server_bell: OwnedFd,
    own_bell: OwnedFd,
    guard: ForkGuard,
    slot_count: u32,
    slot_bytes: u32,
    read_bytes_max: u64,
    write_bytes_max: u64,
    /// Where to write, if the daemon takes writes, and the facts of files that are written.
    lane: Option<Lane>,
    alive: bool,
    /// The daemon is gone, and writes that it has or may have acknowledged wait for another.
    lost: bool,
    /// Why it ended, when it did.
    end: Option<PeerError>,

    request_tail: u32,
    reply_head: u32,
    /// We set our flag, so the daemon will ring.
    armed: bool,
    /// A ring has come, or is on its way, that was not silenced.
    owed: bool,
    /// Requests were published without waking the daemon.
    unrung: bool,
    /// A caller waits for one of them.
    urgent: bool,
    /// Requests whose reply is to come.
    unanswered: u32,
    /// A reply was taken since the caller last went back to its event loop.
    found: bool,
    /// Reads that got, or may yet get, buffers: each will need room for a READ_END.
    end_count: u32,

    tickets: SlotMap<TicketKey, TicketState>,
    parts: SlotMap<PartKey, Part>,
    /// Tickets with parts that are not sent.
    unsent: VecDeque<TicketKey>,
    ready: VecDeque<Finished>,
    files: HashMap<u32, FileState>,
    handle_last: u32,
    /// Number of the last write or sync that was begun.
    ticket_last: u64,
    /// Files whose CLOSE is not sent yet.
    closing: VecDeque<u32>,
    /// It is a session of a pool's door, which the daemon may ask for files.
    is_of_pool: bool,
    wanted: VecDeque<WantedFile>,
    spin: Spin,
}

/// The purpose of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    /// From the buffer.
    Write,
    /// No bytes.
    Sync,
    /// No bytes either.
    Hold,
}

struct TicketState {
    kind: Kind,
    handle: u32,
    buffer: *mut u8,
    offset: u64,
    length: usize,
    private_data: usize,
    /// A call waits for it; [`Client::poll`] does not report it.
    waited_for: bool,
    /// How far parts of a read were sent.
    sent: usize,
    /// The one part of a write, sync or hold was sent.
    is_sent: bool,
    /// Its place among writes and syncs.
    order: u64,
    /// Request, lane and secret by which it was given over to a daemon that died before its answer.
    given: Option<(u64, u32, u64)>,
    part_count: u32,
    /// How far the bytes go: the first short part's end.
    end: usize,
    error: Option<ReadError>,
    done: bool,
}

impl TicketState {
    fn all_sent(&self) -> bool {
        match self.kind {
            Kind::Read => self.sent == self.length || self.end < self.sent || self.error.is_some(),
            Kind::Write | Kind::Sync | Kind::Hold => self.is_sent,
        }
    }

    /// Count it as not sent at all.
    fn begin_again(&mut self) {
        self.sent = 0;
        self.is_sent = false;
        self.part_count = 0;
        self.end = self.length;
        self.error = None;
    }

    fn result(&self) -> Result<usize, ReadError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.end),
        }
    }
}

/// A caller's request.
struct Ask {
    kind: Kind,
    buffer: *mut u8,
    length: usize,
    offset: u64,
    private_data: usize,
    waited_for: bool,
}

impl Ask {
    fn without_bytes(kind: Kind) -> Ask {
        Ask {
            kind,
            buffer: std::ptr::null_mut(),
            length: 0,
            offset: 0,
            private_data: 0,
            waited_for: false,
        }
    }
}

/// A request under way.
struct Part {
    handle: u32,
    length: u64,
    use_: PartUse,
}

#[derive(Clone, Copy)]
enum PartUse {
    /// Of a read, for the bytes from `start` of its buffer.
    Read { ticket: TicketKey, start: usize },
    /// Of a read, sync, hold or query that the caller has cancelled.
    Forgotten,
    /// A write that waits for its grant.
    WriteBegin { ticket: TicketKey, offset: u64 },
    /// The same, cancelled.
    WriteForgotten { offset: u64 },
    /// A cancelled write that waits for its acknowledgement.
    EndForgotten,
    /// A write whose bytes are in the lane, and that waits for its acknowledgement.
    WriteEnd { ticket: TicketKey },
    /// SYNC or HOLD.
    NoBytes { ticket: TicketKey },
    /// Was the write committed by the daemon before?
    Query { ticket: TicketKey },
    /// A lease that a call waits for.
    LeaseWanted,
    /// Its reply, which that call has not taken yet.
    LeaseGiven(Reply),
    /// Given out.
    Leased,
    /// CHANGED, RESIZED, GONE, HOLD or TIMED.
    Notice,
    /// Its errno.
    NoticeDone(u32),
}

struct FileState {
    part_count: u32,
    closed: bool,
    /// The caller's, open until it closes the file: to name it to another daemon.
    fd: RawFd,
    path: Box<[u8]>,
    part: FilePart,
    writer: Writer,
    /// Device and inode: by then the descriptor's number may be another file's.
    identity: (u64, u64),
}

/// The thing that a call waits for.
#[derive(Clone, Copy)]
enum Wanted {
    Ticket(TicketKey),
    Part(PartKey),
    /// Room in the ring.
    Room,
}

impl Client {
    /// Connect to the daemon, waiting at most [`CONNECT_PATIENCE`].
    pub fn connect(path: &Path, who: &Connect) -> Result<Client, ConnectError> {
        Client::connect_within(path, who, CONNECT_PATIENCE)
    }

    /// Connect to the daemon, waiting at most so long for its answer.
    pub fn connect_within(
        path: &Path,
        who: &Connect,
        patience: Duration,
    ) -> Result<Client, ConnectError> {
        let session = connect::connect(path, who, patience)?;
        Ok(Client {
            guard: ForkGuard::new()?,
            slot_count: session.welcome.slot_count,
            slot_bytes: session.welcome.slot_bytes,
            read_bytes_max: session.welcome.read_bytes_max,
            write_bytes_max: session.welcome.write_bytes_max,
            lane: session.lane,
            socket: session.socket,
            memory: session.memory,
            data: session.data,
            server_bell: session.server_bell,
            own_bell: session.own_bell,
            alive: true,
            lost: false,
            end: None,
            request_tail: 0,
            reply_head: 0,
            armed: false,
            owed: false,
            unrung: false,
            urgent: false,
            unanswered: 0,
            found: false,
            end_count: 0,
            tickets: SlotMap::with_key(),
            parts: SlotMap::with_capacity_and_key(RING_ENTRIES as usize),
            unsent: VecDeque::new(),
            ready: VecDeque::new(),
            files: HashMap::new(),
            handle_last: 0,
            ticket_last: 0,
            closing: VecDeque::new(),
            is_of_pool: who.pool != 0,
            wanted: VecDeque::new(),
            spin: Spin::new(),
        })
    }

    /// False once the daemon is known to be gone, and in a forked child.
    pub fn alive(&self) -> bool {
        self.alive && self.guard.same_process()
    }

    /// Another number each second while the daemon lives.
    pub fn heartbeat(&self) -> u32 {
        self.memory.heartbeat()
    }

    /// Why the session ended, when it did.
    pub fn end(&self) -> Option<&PeerError> {
        self.end.as_ref()
    }

    /// The descriptors to watch for reading while reads are outstanding: doorbell and socket. When
    /// either is readable, call [`Client::poll`]. Once [`Client::alive`] is false the socket stays
    /// readable: stop watching.
    pub fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.own_bell.as_fd(), self.socket.as_fd()]
    }

    /// Name an open file to the daemon. `path` is below the share's root. None: read it plainly.
    pub fn open(&mut self, fd: impl AsFd, path: &[u8]) -> Option<FileHandle> {
        self.open_for(fd, path, Writer::default(), FilePart::WHOLE)
    }

    /// The same, for a file whose writes go on this user's account, or an object that has a part of
    /// a file's bytes.
    pub fn open_for(
        &mut self,
        fd: impl AsFd,
        path: &[u8],
        writer: Writer,
        part: FilePart,
    ) -> Option<FileHandle> {
        let usable = self.usable() || self.is_lost();
        if !usable || path.len() > PATH_BYTES_MAX || !path_is_plain(path) {
            return None;
        }
        let handle = self.new_handle()?;
        let state = FileState {
            part_count: 0,
            closed: false,
            fd: fd.as_fd().as_raw_fd(),
            path: path.into(),
            part,
            writer,
            identity: lost::identity_of(fd.as_fd()).unwrap_or_default(),
        };
        if self.is_lost() {
            // `reconnect` names it to the next daemon.
            self.files.insert(handle, state);
            return Some(FileHandle(handle));
        }
        let head = write_open(handle, path.len(), writer, part);
        match socket::send(&self.socket, &[&head, path], &[fd.as_fd()]) {
            Ok(()) => {
                self.files.insert(handle, state);
                Some(FileHandle(handle))
            }
            Err(error) => {
                // A full socket is only a busy daemon: read this file plainly, but not the others.
                if !matches!(error.kind(), std::io::ErrorKind::WouldBlock) {
                    self.die(error.into());
                }
                None
            }
        }
    }

    /// Use this descriptor from now on to name the file to the next daemon: the caller may close
    /// the former one. This daemon keeps its own.
    ///
    /// Returns  false: it is another file's, or the file is closed; nothing has changed
    pub fn renew(&mut self, file: FileHandle, fd: impl AsFd) -> bool {
        let identity = lost::identity_of(fd.as_fd());
        let open = self.files.get_mut(&file.0);
        let open = open.filter(|state| !state.closed && identity == Some(state.identity));
        if let Some(state) = open {
            state.fd = fd.as_fd().as_raw_fd();
            return true;
        }
        false
    }

    /// Forget a file; reads of it that are under way are cancelled.
    pub fn close(&mut self, file: FileHandle) {
        let usable = self.usable();
        let Some(state) = self.files.get_mut(&file.0) else {
            return;
        };
        state.closed = true;
        let idle = state.part_count == 0;
        let under_way: Vec<TicketKey> = self
            .tickets
            .iter()
            .filter(|(_, ticket)| ticket.handle == file.0)
            .map(|(key, _)| key)
            .collect();
        for key in under_way {
            self.forget(key);
        }
        if idle {
            self.files.remove(&file.0);
            self.closing.push_back(file.0);
        }
        if usable {
            self.send_closes();
            self.rest();
        }
    }

    /// Start a read into `buffer`; [`Client::poll`] reports its end. None: not taken, read plainly.
    ///
    /// # Safety
    /// `buffer` is valid for writing `length` bytes, and not otherwise used, until the read is
    /// reported or cancelled, its file closed, or the client dropped.
    pub unsafe fn read_send(
        &mut self,
        file: FileHandle,
        buffer: *mut u8,
        length: usize,
        offset: u64,
        private_data: usize,
    ) -> Option<Ticket> {
        let ask = Ask {
            kind: Kind::Read,
            buffer,
            length,
            offset,
            private_data,
            waited_for: false,
        };
        self.send_or_wait(file, &ask)
    }

    /// Sends a request, or lets it wait for the next daemon. None: not taken.
    fn send_or_wait(&mut self, file: FileHandle, ask: &Ask) -> Option<Ticket> {
        if self.waits(file) {
            return self.wait_for_another(file, ask);
        }
        if !self.usable() {
            return None;
        }
        self.send(file, ask)
    }

    fn send(&mut self, file: FileHandle, ask: &Ask) -> Option<Ticket> {
        let key = self.begin(file, ask)?;
        self.tell_server();
        // If the session ends in here, `poll` reports it as Plain like any other.
        self.rest();
        Some(Ticket(key.data().as_ffi()))
    }

    fn ask_and_wait(&mut self, file: FileHandle, ask: &Ask) -> Result<usize, ReadError> {
        // A ring full of requests without answers, as many closes at once, empties in a moment.
        if !self.room_for_read() {
            self.wait_for(Wanted::Room);
        }
        let key = self.begin(file, ask).ok_or(ReadError::Plain)?;
        self.tell_server();
        self.wait_for(Wanted::Ticket(key));
        let result = match self.tickets.get(key) {
            Some(ticket) if ticket.done => ticket.result(),
            _ => Err(ReadError::Plain),
        };
        self.forget(key);
        self.rest();
        result
    }

    /// The buffer is going away: forget the read, write or sync. It will not be reported.
    pub fn cancel_request(&mut self, ticket: Ticket) {
        self.ready.retain(|finished| finished.ticket != ticket);
        self.forget(TicketKey::from(KeyData::from_ffi(ticket.0)));
    }

    /// Collect a request that ended; the bytes of a read are in its buffer. Never waits. None: no
    /// more at present.
    ///
    /// Call until None: only then will the doorbell ring for the next.
    pub fn poll(&mut self) -> Option<Finished> {
        if let Some(finished) = self.ready.pop_front() {
            return Some(finished);
        }
        self.collect();
        let finished = self.ready.pop_front();
        if finished.is_none() {
            self.rest();
        }
        finished
    }

    /// A caller of [`Client::poll`] stops before None: make the doorbell ring for the rest.
    pub fn poll_pause(&mut self) {
        self.rest();
    }

    /// Read and wait. Bytes read; short only at the end of the file.
    pub fn read(
        &mut self,
        file: FileHandle,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<usize, ReadError> {
        // SAFETY: the buffer is borrowed until this returns, and the read has ended by then.
        unsafe { self.read_raw(file, buffer.as_mut_ptr(), buffer.len(), offset) }
    }

    /// As [`Client::read`].
    ///
    /// # Safety
    /// `buffer` is valid for writing `length` bytes.
    pub unsafe fn read_raw(
        &mut self,
        file: FileHandle,
        buffer: *mut u8,
        length: usize,
        offset: u64,
    ) -> Result<usize, ReadError> {
        if length == 0 {
            return Ok(0);
        }
        if !self.usable() {
            return Err(ReadError::Plain);
        }
        let ask = Ask {
            kind: Kind::Read,
            buffer,
            length,
            offset,
            private_data: 0,
            waited_for: true,
        };
        self.ask_and_wait(file, &ask)
    }

    /// Pin bytes of the cache and wait until they are there. `length` is cut to what one lease
    /// spans.
    pub fn lease(
        &mut self,
        file: FileHandle,
        length: usize,
        offset: u64,
    ) -> Result<Lease, ReadError> {
        let nothing = Lease {
            id: 0,
            length: 0,
            pieces: Vec::new(),
        };
        if length == 0 {
            return Ok(nothing);
        }
        if !self.usable() || !self.is_open(file) {
            return Err(ReadError::Plain);
        }
        let length = self.part_length(offset, length).ok_or(ReadError::Plain)?;
        if !self.room_for_read() {
            self.wait_for(Wanted::Room);
        }
        let key = self
            .send_part(
                op::READ,
                file.0,
                offset,
                length as u64,
                PartUse::LeaseWanted,
            )
            .ok_or(ReadError::Plain)?;
        self.tell_server();
        self.wait_for(Wanted::Part(key));
        let result = match self.parts.get_mut(key) {
            Some(part) => match part.use_ {
                PartUse::LeaseGiven(reply) => {
                    part.use_ = PartUse::Leased;
                    Ok(reply)
                }
                _ => Err(ReadError::Plain),
            },
            None => Err(ReadError::Plain),
        };
        self.rest();
        let reply = result?;
        if let Some(error) = error_of(&reply) {
            self.end_part(key, false);
            return Err(error);
        }
        if reply.slot_count == 0 {
            self.end_part(key, false);
            return Ok(nothing);
        }
        let mut lease = Lease {
            id: key.data().as_ffi(),
            length: reply.length as usize,
            pieces: Vec::with_capacity(reply.slot_count as usize),
        };
        self.pieces(&reply, |piece, bytes| lease.pieces.push((piece, bytes)));
        Ok(lease)
    }

    /// Give a lease's bytes back.
    pub fn lease_end(&mut self, id: u64) {
        let key = PartKey::from(KeyData::from_ffi(id));
        let leased = self
            .parts
            .get(key)
            .is_some_and(|part| matches!(part.use_, PartUse::Leased));
        if leased && self.usable() {
            self.end_part(key, true);
            self.send_parts();
            self.send_closes();
            self.rest();
        }
    }

    /// Bytes of a file were changed on its own descriptor: wait until no reader sees older ones.
    /// `length` u64::MAX: to the end of the file. Returns at once when the daemon is gone.
    pub fn changed(&mut self, device: u64, inode: u64, offset: u64, length: u64) {
        self.notice(Request {
            op: op::CHANGED,
            device,
            inode,
            offset,
            length,
            ..Request::default()
        });
    }

    /// As [`Client::changed`] to the end of the file, where nothing was written: only its length or
    /// blocks changed from `offset` on.
    pub fn resized(&mut self, device: u64, inode: u64, offset: u64) {
        self.notice(Request {
            op: op::RESIZED,
            device,
            inode,
            offset,
            length: u64::MAX,
            ..Request::default()
        });
    }

    /// The caller is about to change a file on its own descriptor by something else than a write:
    /// wait until the file has all acknowledged bytes. The daemon grants nothing of it until
    /// [`Client::changed`] or [`Client::resized`].
    ///
    /// Errors   Plain: the daemon is gone. Errno: it cannot write acknowledged bytes, and holds
    /// nothing.
    pub fn hold(&mut self, device: u64, inode: u64) -> Result<(), ReadError> {
        match self.notice(Request {
            op: op::HOLD,
            device,
            inode,
            ..Request::default()
        }) {
            Some(0) if self.alive => Ok(()),
            Some(0 | PLAIN) | None => Err(ReadError::Plain),
            Some(errno) => Err(ReadError::Errno(errno)),
        }
    }

    /// The caller is about to set a file's time of change to this, on its own descriptor: the
    /// daemon must not set an older one. Units: ns since 1970. False: the daemon is gone.
    pub fn timed(&mut self, device: u64, inode: u64, changed_ns: i64) -> bool {
        self.notice(Request {
            op: op::TIMED,
            device,
            inode,
            offset: changed_ns as u64,
            ..Request::default()
        })
        .is_some()
            && self.alive
    }

    /// As [`Client::changed`], for a file that lost a name.
    pub fn gone(&mut self, device: u64, inode: u64) {
        self.notice(Request {
            op: op::GONE,
            device,
            inode,
            ..Request::default()
        });
    }
}
