// SPDX-License-Identifier: Apache-2.0
//! The door's end of a session: reads through the daemon's cache, copied out of shared memory here.
//!
//! A [`Client`] belongs to one thread and lives in somebody else's process, so: no call waits
//! without a bound for a daemon that is gone, none panics, prints, raises SIGPIPE or leaves a
//! descriptor open across exec. When the daemon dies every outstanding and later read ends as
//! [`ReadError::Plain`], which tells the caller to read on its own descriptor. Asynchronous reads of
//! a file with a fact are the exception: they wait for the next daemon (`lost.rs`).
//!
//! **Parts.** A read longer than one request may be is cut into parts, each a request of its own;
//! they come back in any order and are joined. Parts that do not fit the ring wait here and follow
//! as others end.
//!
//! **Room.** Every read that gets buffers owes the ring a READ_END. A read is sent only if the ring
//! holds, besides it, an END for each read under way: then an END always finds room and is never
//! lost.
//!
//! **Fork.** A child made by fork(2) has a copy of this that it must not use: it finds itself dead
//! (all reads Plain) and touches nothing shared. The session ends when the last copy of the socket
//! closes, so a child that lives long should exec (all descriptors are close-on-exec) or
//! disconnect.

mod connect;
mod lent;
mod lost;
mod owned;
mod spin;
#[cfg(test)]
mod tests;
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

/// A waiting call that hears nothing for so long, not even a heartbeat, takes the daemon for hung
/// and ends the session.
pub const HUNG_PATIENCE: Duration = Duration(30 * NS_PER_S);
/// A daemon that lives and gives no answer for so long has lost it. Clients do not wait that long
/// themselves.
pub const LOST_PATIENCE: Duration = Duration(120 * NS_PER_S);

/// How often a waiting call looks whether the daemon lives.
const LOOK_FOR_BEAT: Duration = Duration(5 * NS_PER_S);

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
    /// Where to write, if the daemon takes writes, and what to know of files that are written.
    lane: Option<Lane>,
    alive: bool,
    /// The daemon is gone, and what it acknowledged or may have acknowledged waits for another.
    lost: bool,
    /// Why it ended, when it did.
    end: Option<PeerError>,

    request_tail: u32,
    reply_head: u32,
    /// We set our flag, so the daemon will ring.
    armed: bool,
    /// A ring has come, or is on its way, that was not silenced.
    owed: bool,
    /// Requests were published that the daemon was not woken for.
    unrung: bool,
    /// Among them is one that somebody waits for.
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
    /// Files whose CLOSE is to be sent.
    closing: VecDeque<u32>,
    /// It is one of a pool's door, which may be asked for files.
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
    /// Somebody waits for it; it is not to be reported.
    waited_for: bool,
    /// How far parts of a read were sent.
    sent: usize,
    /// The one part of what is not a read was sent.
    is_sent: bool,
    /// Its place among writes and syncs.
    order: u64,
    /// Request and lane by which it was given over to a daemon that died before it answered.
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

    /// Nothing of it has been sent.
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
    /// Of a read or sync that nobody wants any more.
    Forgotten,
    /// A write that waits for its grant.
    WriteBegin { ticket: TicketKey, offset: u64 },
    /// The same, and nobody wants it any more.
    WriteForgotten { offset: u64 },
    /// The acknowledgement of a write that nobody wants any more.
    EndForgotten,
    /// Its bytes are where they belong.
    WriteEnd { ticket: TicketKey },
    /// SYNC or HOLD.
    NoBytes { ticket: TicketKey },
    /// Was the write committed by the daemon before?
    Query { ticket: TicketKey },
    /// A lease that somebody waits for.
    LeaseWanted,
    /// The answer to the wait for it.
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
    /// Its identity: by then the number may be another file's.
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

    /// False once the daemon is known to be gone (or in a forked child).
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

    /// The same, for a file that is written on this user's account, or an object that has a part of
    /// its bytes.
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
            // The next daemon will be told.
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
                // A full socket is only a busy daemon: this file is read plainly, others are not.
                if !matches!(error.kind(), std::io::ErrorKind::WouldBlock) {
                    self.die(error.into());
                }
                None
            }
        }
    }

    /// The file is open by this descriptor from now on, by which the next daemon will hear of it:
    /// the former one may be closed. This daemon keeps its own.
    ///
    /// Returns  false: it is another file, or forgotten, and all is as it was
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
        if self.waits(file) {
            return self.wait_for_another(file, &ask);
        }
        if !self.usable() {
            return None;
        }
        self.send(file, &ask)
    }

    fn send(&mut self, file: FileHandle, ask: &Ask) -> Option<Ticket> {
        let key = self.begin(file, ask)?;
        self.tell_server();
        // Should the session end in here, it is reported as Plain like any other.
        self.rest();
        Some(Ticket(key.data().as_ffi()))
    }

    fn ask_and_wait(&mut self, file: FileHandle, ask: &Ask) -> Result<usize, ReadError> {
        // A ring full of what needs no answer (many files closed at once) is emptied in a moment.
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

    /// The buffer is going away: forget the read. It will not be reported.
    pub fn read_cancel(&mut self, ticket: Ticket) {
        self.ready.retain(|finished| finished.ticket != ticket);
        self.forget(TicketKey::from(KeyData::from_ffi(ticket.0)));
    }

    /// Collect a read that ended; its bytes are in its buffer. Never waits. None: no more at
    /// present.
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

    /// As [`Client::changed`] to the end of the file, where nothing was written: its length or
    /// blocks alone are others from `offset` on.
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

    /// A file is about to be changed on its own descriptor in a way that leads past its bytes: wait
    /// until it has everything that was acknowledged. Nothing is granted of it until
    /// [`Client::changed`] or [`Client::resized`].
    ///
    /// Errors   Plain: the daemon is gone. Errno: what was acknowledged cannot be written; nothing
    /// is held.
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

    /// The time of change of a file is about to be set to this, on its own descriptor: nobody is to
    /// set an older one. Units: ns since
    /// 1970. False: the daemon is gone.
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

    /// The same for a file that lost a name.
    pub fn gone(&mut self, device: u64, inode: u64) {
        self.notice(Request {
            op: op::GONE,
            device,
            inode,
            ..Request::default()
        });
    }

    // ---- Sending ----

    fn begin(&mut self, file: FileHandle, ask: &Ask) -> Option<TicketKey> {
        let length = ask.length;
        let end = ask.offset.checked_add(length as u64)?;
        if !self.is_open(file) || i64::try_from(end).is_err() {
            return None;
        }
        let key = self.new_ticket(file, ask);
        self.unsent.push_back(key);
        self.send_parts();
        let Some(ticket) = self.tickets.get(key) else {
            // The daemon's memory made no sense, and all reads were ended; this one was not taken.
            self.ready
                .retain(|finished| finished.ticket.0 != key.data().as_ffi());
            return None;
        };
        if length == 0 && ask.kind == Kind::Read {
            self.finish(key);
        } else if ticket.part_count == 0 && self.unanswered == 0 {
            // Nothing is under way that would bring us back to it.
            self.forget(key);
            return None;
        }
        Some(key)
    }

    fn new_ticket(&mut self, file: FileHandle, ask: &Ask) -> TicketKey {
        self.ticket_last += 1;
        self.tickets.insert(TicketState {
            kind: ask.kind,
            handle: file.0,
            buffer: ask.buffer,
            offset: ask.offset,
            length: ask.length,
            private_data: ask.private_data,
            waited_for: ask.waited_for,
            sent: 0,
            is_sent: false,
            order: self.ticket_last,
            given: None,
            part_count: 0,
            end: ask.length,
            error: None,
            done: false,
        })
    }

    /// Send what fits of the reads that wait.
    fn send_parts(&mut self) {
        while let Some(&key) = self.unsent.front() {
            let Some(ticket) = self.tickets.get(key) else {
                self.unsent.pop_front();
                continue;
            };
            if ticket.all_sent() {
                self.unsent.pop_front();
                continue;
            }
            let (handle, start) = (ticket.handle, ticket.sent);
            if let Some(given) = ticket.given {
                if !self.send_query(key, given) {
                    return;
                }
                if let Some(ticket) = self.tickets.get_mut(key) {
                    ticket.is_sent = true;
                    ticket.part_count += 1;
                }
                continue;
            }
            if ticket.kind != Kind::Read {
                let (offset, length) = (ticket.offset, ticket.length as u64);
                let (op, use_) = match ticket.kind {
                    Kind::Write => {
                        let begin = PartUse::WriteBegin {
                            ticket: key,
                            offset,
                        };
                        (op::WRITE_BEGIN, begin)
                    }
                    Kind::Hold => (op::HOLD, PartUse::NoBytes { ticket: key }),
                    _ => (op::SYNC, PartUse::NoBytes { ticket: key }),
                };
                if self.send_part(op, handle, offset, length, use_).is_none() {
                    return;
                }
                if let Some(ticket) = self.tickets.get_mut(key) {
                    ticket.is_sent = true;
                    ticket.part_count += 1;
                }
                continue;
            }
            let offset = ticket.offset + start as u64;
            let Some(length) = self.part_length(offset, ticket.length - start) else {
                return;
            };
            let use_ = PartUse::Read { ticket: key, start };
            if self
                .send_part(op::READ, handle, offset, length as u64, use_)
                .is_none()
            {
                return;
            }
            if let Some(ticket) = self.tickets.get_mut(key) {
                ticket.sent += length;
                ticket.part_count += 1;
            }
        }
    }

    /// How much of a read at `offset` one request can ask: the daemon's limit, and what the slots
    /// of one reply hold when the first is entered in its middle.
    fn part_length(&self, offset: u64, length: usize) -> Option<usize> {
        let slot_bytes = u64::from(self.slot_bytes);
        let spanned = slot_bytes * REPLY_SLOTS_MAX as u64 - offset % slot_bytes;
        let most = spanned.min(self.read_bytes_max).min(length as u64);
        usize::try_from(most).ok().filter(|&most| most > 0)
    }

    fn send_part(
        &mut self,
        op: u32,
        handle: u32,
        offset: u64,
        length: u64,
        use_: PartUse,
    ) -> Option<PartKey> {
        if !self.room_for_read() {
            return None;
        }
        let key = self.parts.insert(Part {
            handle,
            length,
            use_,
        });
        self.end_count += 1;
        self.unanswered += 1;
        // A hold is of the file, by whichever name.
        let (mut device, mut inode) = (0, 0);
        if let Some(file) = self.files.get_mut(&handle) {
            file.part_count += 1;
            if op == op::HOLD {
                (device, inode) = file.identity;
            }
        }
        self.push(&Request {
            id: key.data().as_ffi(),
            op,
            handle: if op == op::HOLD { 0 } else { handle },
            offset,
            length,
            device,
            inode,
            sent_ns: clock::now().0,
            ..Request::default()
        });
        self.urgent = true;
        Some(key)
    }

    /// Room for a read and for its END, besides an END for every other read. See the file's head.
    fn room_for_read(&mut self) -> bool {
        self.room_for(2)
    }

    fn room_for(&mut self, entries: u32) -> bool {
        if !self.alive || self.parts.len() >= RING_ENTRIES as usize {
            return false;
        }
        match self.memory.untaken(Which::Requests, self.request_tail) {
            Ok(untaken) => untaken + self.end_count + entries <= RING_ENTRIES,
            Err(error) => {
                self.die(error);
                false
            }
        }
    }

    /// Publish a request for which there is room.
    fn push(&mut self, request: &Request) {
        self.memory.write_request(self.request_tail, request);
        self.request_tail = self.request_tail.wrapping_add(1);
        self.memory.publish_tail(Which::Requests, self.request_tail);
        self.unrung = true;
    }

    /// The daemon shall look at what was published.
    fn tell_server(&mut self) {
        self.urgent = false;
        if std::mem::take(&mut self.unrung) && self.memory.must_ring(Which::Requests) {
            let _ = bell::ring(&self.server_bell);
        }
    }

    /// Closes ring: unlike buffers that are given back nobody looks for them, and what was promised
    /// to a file is free for others when they are heard.
    fn send_closes(&mut self) {
        let mut told = false;
        while let Some(&handle) = self.closing.front()
            && self.room_for(1)
        {
            self.closing.pop_front();
            self.push(&Request {
                op: op::CLOSE,
                handle,
                ..Request::default()
            });
            told = true;
        }
        if told {
            self.tell_server();
        }
    }

    /// False: the daemon is gone.
    /// The answer's errno, 0 for none. None: there is no answer.
    fn notice(&mut self, request: Request) -> Option<u32> {
        if !self.usable() {
            return None;
        }
        if !self.room_for(1) {
            self.wait_for(Wanted::Room);
        }
        if !self.room_for(1) {
            return None;
        }
        let key = self.parts.insert(Part {
            handle: 0,
            length: 0,
            use_: PartUse::Notice,
        });
        self.unanswered += 1;
        self.push(&Request {
            id: key.data().as_ffi(),
            sent_ns: clock::now().0,
            ..request
        });
        self.tell_server();
        self.wait_for(Wanted::Part(key));
        let part = self.parts.remove(key);
        self.rest();
        match part.map(|part| part.use_) {
            Some(PartUse::NoticeDone(errno)) => Some(errno),
            _ => None,
        }
    }

    /// Whether the daemon was told of this file: after [`Client::reconnect`] it may not have been.
    pub fn is_open(&self, file: FileHandle) -> bool {
        self.files.get(&file.0).is_some_and(|state| !state.closed)
    }

    fn new_handle(&mut self) -> Option<u32> {
        // After 2^32 opens numbers come again; skip those still in use.
        for _ in 0..=self.files.len() + self.closing.len() {
            self.handle_last = self.handle_last.wrapping_add(1);
            let handle = self.handle_last;
            if !self.files.contains_key(&handle) && !self.closing.contains(&handle) {
                return Some(handle);
            }
        }
        None
    }

    // ---- Receiving ----

    /// Take what the daemon has answered, copy it, and send what was waiting for that.
    fn collect(&mut self) {
        if !self.usable() {
            return;
        }
        self.wake();
        if self.take_replies() > 0 {
            self.found = true;
        } else if !self.found {
            // Woken, and not by a reply.
            self.look_at_socket();
        }
        self.send_parts();
        self.send_closes();
        if self.urgent {
            self.tell_server();
        }
    }

    /// Awake: the daemon need not ring any more; silence the ring that came.
    fn wake(&mut self) {
        if std::mem::take(&mut self.armed) && self.memory.disarm(Which::Replies) {
            self.owed = true;
        }
        if self.owed && bell::silence(&self.own_bell).unwrap_or(true) {
            // Not there yet: it is on its way, and will wake us once for nothing.
            self.owed = false;
        }
    }

    fn take_replies(&mut self) -> u32 {
        let mut taken = 0;
        loop {
            match self.memory.waiting(Which::Replies, self.reply_head) {
                Ok(0) => return taken,
                Ok(_) => {}
                Err(error) => {
                    self.die(error);
                    return taken;
                }
            }
            let reply = self.memory.read_reply(self.reply_head);
            self.reply_head = self.reply_head.wrapping_add(1);
            self.memory.publish_head(Which::Replies, self.reply_head);
            taken += 1;
            if let Err(error) = self.take_reply(&reply) {
                self.die(error);
                return taken;
            }
        }
    }

    fn take_reply(&mut self, reply: &Reply) -> Result<(), PeerError> {
        let key = PartKey::from(KeyData::from_ffi(reply.id));
        let Some(part) = self.parts.get_mut(key) else {
            return Err(broken(format!(
                "read a reply to request {}, which is not under way",
                reply.id
            )));
        };
        let length = part.length;
        let use_ = part.use_;
        if !matches!(
            use_,
            PartUse::WriteBegin { .. } | PartUse::WriteForgotten { .. }
        ) {
            check_reply(reply, length, self.slot_count, self.slot_bytes)?;
        }
        match use_ {
            PartUse::WriteBegin { offset, .. } | PartUse::WriteForgotten { offset } => {
                let runs = self.check_grant(reply, offset, length)?;
                self.take_grant(key, use_, reply, runs);
            }
            PartUse::WriteEnd { ticket } | PartUse::NoBytes { ticket } => {
                if reply.slot_count > 0 {
                    return Err(broken(format!(
                        "read buffers in the reply to request {}, which asked for none",
                        reply.id
                    )));
                }
                let owes_end = matches!(use_, PartUse::NoBytes { .. });
                self.drop_part(key, owes_end);
                self.end_ticket(ticket, reply);
            }
            PartUse::Notice => part.use_ = PartUse::NoticeDone(reply.errno),
            PartUse::LeaseWanted => part.use_ = PartUse::LeaseGiven(*reply),
            PartUse::Read { ticket, start } => {
                self.take_part(ticket, start, length as usize, reply);
                self.end_part(key, reply.slot_count > 0);
            }
            PartUse::Query { ticket } => {
                self.drop_part(key, true);
                self.queried(ticket, reply);
            }
            PartUse::Forgotten => self.end_part(key, reply.slot_count > 0),
            // Its room for an end is used already.
            PartUse::EndForgotten => {
                self.drop_part(key, false);
            }
            PartUse::LeaseGiven(_) | PartUse::Leased | PartUse::NoticeDone(_) => {
                return Err(broken(format!(
                    "read a second reply to request {}",
                    reply.id
                )));
            }
        }
        self.unanswered -= 1;
        Ok(())
    }

    /// A ticket of one part has ended.
    fn end_ticket(&mut self, key: TicketKey, reply: &Reply) {
        if let Some(ticket) = self.tickets.get_mut(key) {
            ticket.part_count -= 1;
            ticket.error = error_of(reply);
            self.finish(key);
        }
    }

    /// A part of a read has come.
    fn take_part(&mut self, key: TicketKey, start: usize, length: usize, reply: &Reply) {
        let Some(ticket) = self.tickets.get_mut(key) else {
            return;
        };
        ticket.part_count -= 1;
        match error_of(reply) {
            // Plain goes before an error: the caller's own read will find that again, if it is one.
            Some(ReadError::Plain) => ticket.error = Some(ReadError::Plain),
            Some(error) => {
                ticket.error.get_or_insert(error);
            }
            None => {
                let bytes = reply.length as usize;
                if bytes < length {
                    ticket.end = ticket.end.min(start + bytes);
                }
                if ticket.error.is_none() && start < ticket.end {
                    // `start + bytes` is inside the buffer: the part is, and bytes <= length.
                    let mut target = ticket.buffer.wrapping_add(start);
                    self.pieces(reply, |source, bytes| {
                        // SAFETY: the source lies in the mapping (`check_reply`); the target is the
                        // caller's buffer, valid until the read is reported or cancelled
                        // (`read_send`), and this read is in our table, so neither has happened.
                        // They do not overlap: the mapping is ours and read-only.
                        unsafe { source.as_ptr().copy_to_nonoverlapping(target, bytes) };
                        target = target.wrapping_add(bytes);
                    });
                }
            }
        }
        let Some(ticket) = self.tickets.get(key) else {
            return;
        };
        if ticket.part_count == 0 && ticket.all_sent() {
            self.finish(key);
        }
    }

    fn finish(&mut self, key: TicketKey) {
        let Some(ticket) = self.tickets.get_mut(key) else {
            return;
        };
        ticket.done = true;
        if ticket.waited_for {
            return;
        }
        self.ready.push_back(Finished {
            ticket: Ticket(key.data().as_ffi()),
            private_data: ticket.private_data,
            result: ticket.result(),
        });
        self.tickets.remove(key);
    }

    /// A request has ended; give its buffers back if it got any.
    fn end_part(&mut self, key: PartKey, give_back: bool) {
        if !self.drop_part(key, true) {
            return;
        }
        if give_back {
            // Room is certain: see the file's head.
            self.push(&Request {
                id: key.data().as_ffi(),
                op: op::READ_END,
                ..Request::default()
            });
        }
    }

    /// A request is over. `owes_end`: room was kept for a request that ends it.
    fn drop_part(&mut self, key: PartKey, owes_end: bool) -> bool {
        let Some(part) = self.parts.remove(key) else {
            return false;
        };
        if owes_end {
            self.end_count -= 1;
        }
        if let Some(file) = self.files.get_mut(&part.handle) {
            file.part_count -= 1;
            if file.part_count == 0 && file.closed {
                self.files.remove(&part.handle);
                self.closing.push_back(part.handle);
            }
        }
        true
    }

    /// Where the bytes of a checked reply are.
    fn pieces(&self, reply: &Reply, mut take: impl FnMut(NonNull<u8>, usize)) {
        let slot_bytes = self.slot_bytes as usize;
        let mut offset = reply.first_offset as usize;
        let mut left = reply.length as usize;
        for &slot in reply.slots.iter().take(reply.slot_count as usize) {
            let bytes = left.min(slot_bytes - offset);
            if bytes == 0 {
                return;
            }
            // SAFETY: `check_reply` saw slot < slot_count and offset < slot_bytes, and the mapping
            // is slot_count × slot_bytes long.
            let piece = unsafe { self.data.start().add(slot as usize * slot_bytes + offset) };
            take(piece, bytes);
            left -= bytes;
            offset = 0;
        }
    }

    /// Forget a read: its parts' replies will be thrown away.
    fn forget(&mut self, key: TicketKey) {
        if self
            .tickets
            .remove(key)
            .is_none_or(|ticket| ticket.part_count == 0)
        {
            return;
        }
        for part in self.parts.values_mut() {
            match part.use_ {
                PartUse::Read { ticket, .. }
                | PartUse::NoBytes { ticket }
                | PartUse::Query { ticket }
                    if ticket == key =>
                {
                    part.use_ = PartUse::Forgotten;
                }
                PartUse::WriteBegin { ticket, offset } if ticket == key => {
                    part.use_ = PartUse::WriteForgotten { offset };
                }
                PartUse::WriteEnd { ticket } if ticket == key => {
                    part.use_ = PartUse::EndForgotten;
                }
                _ => {}
            }
        }
    }

    // ---- Waiting ----

    fn has(&mut self, wanted: Wanted) -> bool {
        match wanted {
            Wanted::Ticket(key) => self.tickets.get(key).is_none_or(|ticket| ticket.done),
            Wanted::Part(key) => self.parts.get(key).is_none_or(|part| {
                matches!(part.use_, PartUse::LeaseGiven(_) | PartUse::NoticeDone(_))
            }),
            Wanted::Room => self.room_for_read(),
        }
    }

    /// Wait until it is there or the session has ended.
    fn wait_for(&mut self, wanted: Wanted) {
        let begun = clock::now();
        let mut beat = (self.heartbeat(), begun);
        loop {
            self.collect_in_wait();
            if !self.alive || self.has(wanted) {
                return;
            }
            // The buffers that are given back here may be all that the daemon waits for.
            self.tell_server();
            if self.spin_for_reply() {
                continue;
            }
            let now = clock::now();
            if beat.0 != self.heartbeat() {
                beat = (self.heartbeat(), now);
            }
            let patience = (beat.1 + HUNG_PATIENCE).min(begun + LOST_PATIENCE);
            if now >= patience {
                let waited_s = now.since(begun).0 / NS_PER_S;
                self.die(broken(format!(
                    "heard nothing from the daemon for {waited_s} s"
                )));
                return;
            }
            self.sleep(wanted, patience.since(now).min(LOOK_FOR_BEAT));
        }
    }

    fn collect_in_wait(&mut self) {
        self.wake();
        self.take_replies();
        self.send_parts();
        self.send_closes();
    }

    fn sleep(&mut self, wanted: Wanted, at_most: Duration) {
        self.memory.arm(Which::Replies);
        self.armed = true;
        match self.memory.waiting(Which::Replies, self.reply_head) {
            Ok(0) => {}
            Ok(_) => return,
            Err(error) => return self.die(error),
        }
        // No bell rings for room in the request ring, which is a matter of microseconds.
        let at_most = match wanted {
            Wanted::Room => at_most.min(Duration::from_us(200)),
            _ => at_most,
        };
        let mut fds = [
            PollFd::new(&self.own_bell, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let ended = match poll(&mut fds, Some(&timespec(at_most))) {
            Ok(_) => !fds[1].revents().is_empty(),
            Err(_) => false,
        };
        if ended {
            // Replies that came before the end are taken first.
            self.collect_in_wait();
            if self.alive {
                self.look_at_socket();
            }
        }
    }

    /// The caller goes back to its event loop: see that it will be woken, and that the daemon is.
    fn rest(&mut self) {
        self.found = false;
        if !self.usable() {
            if !self.ready.is_empty() && self.guard.same_process() {
                self.ring_ourselves();
            }
            return;
        }
        if self.unrung && self.memory.server_flags() & server_flag::SWEEPS == 0 {
            self.tell_server();
        }
        if !self.armed && self.unanswered > 0 {
            self.memory.arm(Which::Replies);
            self.armed = true;
            match self.memory.waiting(Which::Replies, self.reply_head) {
                Ok(0) => {}
                Ok(_) => self.ring_ourselves(),
                Err(error) => self.die(error),
            }
        }
        if !self.ready.is_empty() {
            self.ring_ourselves();
        }
    }

    fn ring_ourselves(&mut self) {
        if !self.owed {
            self.owed = bell::ring(&self.own_bell).is_ok();
        }
    }

    /// The daemon says nothing on the socket after its welcome, but what it wants of a pool's door:
    /// what is to be read is that, or its end.
    fn look_at_socket(&mut self) {
        let mut buffer = [0; PACKET_BYTES_MAX];
        match socket::receive(&self.socket, &mut buffer) {
            Ok(None) => {}
            Ok(Some(packet)) if packet.bytes == 0 => self.die(PeerError::Closed),
            Ok(Some(packet)) if self.is_of_pool => {
                self.hear_wanted(buffer.get(..packet.bytes).unwrap_or_default());
            }
            Ok(Some(packet)) => self.die(broken(format!(
                "read a packet of {} bytes from the daemon; expected none after its welcome",
                packet.bytes
            ))),
            Err(error) => self.die(error.into()),
        }
    }

    fn usable(&mut self) -> bool {
        if self.alive && !self.guard.same_process() {
            self.die(broken("this is a forked copy of the session's process"));
        }
        self.alive
    }

    /// The daemon is hung, as a caller who does not wait has found: take it for dead.
    pub fn lose(&mut self) {
        self.die(broken("the daemon was taken for hung"));
    }

    /// The session is over: requests that are under way end Plain, unless another daemon may know
    /// of the file or of the write.
    fn die(&mut self, why: PeerError) {
        if !self.alive {
            return;
        }
        self.alive = false;
        self.end = Some(why);
        self.lost = self.lane.is_some() && self.guard.same_process();
        self.unanswered = 0;
        if self.guard.same_process() {
            // One that was only hung must not take what we have published for a session's any more.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
        if self.lost {
            self.keep_what_was_given();
        }
        self.parts
            .retain(|_, part| matches!(part.use_, PartUse::Leased));
        self.unsent.clear();
        self.closing.clear();
        self.wanted.clear();
        let keys: Vec<TicketKey> = self.tickets.keys().collect();
        for key in keys {
            if let Some(ticket) = self.tickets.get_mut(key) {
                let identity = self.files.get(&ticket.handle).map(|file| file.identity);
                let kept = ticket.kind != Kind::Read
                    || identity.is_some_and(|(device, inode)| {
                        let lane = self.lane.as_ref();
                        lane.is_some_and(|lane| lane.facts.of(device, inode).is_some())
                    });
                if self.lost && kept && !ticket.waited_for && !ticket.done {
                    ticket.begin_again();
                    continue;
                }
                ticket.error = Some(ReadError::Plain);
            }
            self.finish(key);
        }
    }
}

fn error_of(reply: &Reply) -> Option<ReadError> {
    match reply.errno {
        0 => None,
        PLAIN => Some(ReadError::Plain),
        errno => Some(ReadError::Errno(errno)),
    }
}

/// A reply to a read of `length` bytes, before any of it is believed.
fn check_reply(
    reply: &Reply,
    length: u64,
    slot_count: u32,
    slot_bytes: u32,
) -> Result<(), PeerError> {
    let slots = reply.slots.get(..reply.slot_count as usize);
    let fits = slots.is_some_and(|slots| {
        let room = slots.len() as u64 * u64::from(slot_bytes);
        slots.iter().all(|&slot| slot < slot_count)
            && reply.length <= length
            && reply.first_offset < slot_bytes
            && (u64::from(reply.first_offset) + reply.length <= room || reply.length == 0)
            && (reply.errno == 0 || slots.is_empty())
            && (reply.errno <= 4095 || reply.errno == PLAIN)
    });
    if fits {
        return Ok(());
    }
    Err(broken(format!(
        "read a reply of {} bytes from offset {} of {} buffers, errno {}; expected at most {length} bytes in at \
         most {REPLY_SLOTS_MAX} of {slot_count} buffers of {slot_bytes}",
        reply.length, reply.first_offset, reply.slot_count, reply.errno
    )))
}
