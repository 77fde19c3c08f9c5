// SPDX-License-Identifier: Apache-2.0
//! The daemon's end of sessions.
//!
//! ```text
//! Listener ── accept ──▶ Newcomer ── receive, welcome ──▶ ServerSession ── next_event, reply, flush
//! ```
//!
//! Everything returns at once; the descriptors to wait for are [`Listener::fd`], [`Newcomer::fd`]
//! and a session's [`ServerSession::socket`] and [`ServerSession::doorbell`]. A client that breaks
//! a rule causes a [`PeerError`], after which the driver drops the session: that closes its socket,
//! which the client sees.
//!
//! A driver's turn for a session:
//!
//! 1. the socket was readable: [`ServerSession::socket_ready`]; the doorbell rang: silence it,
//!    unless a ring with `bell_add` has done so;
//! 2. [`ServerSession::next_event`] until None. For fairness the driver may stop earlier, but then
//!    no bell will ring for the rest: it must come back unasked;
//! 3. [`ServerSession::reply`] as answers come, and [`ServerSession::flush`] once after them.

use crate::layout::{
    self, Connect, PACKET_BYTES_MAX, PeerError, Writer, broken, path_is_plain, read_connect,
    read_found, read_head, read_open, read_station, write_refused, write_wanted, write_welcome,
};
use crate::rings::{RingMemory, Which};
use rushes_core::format::lane::Head;
use rushes_core::format::{
    PATH_BYTES_MAX, PLAIN, REPLY_SLOTS_MAX, RING_ENTRIES, Reply, Request, WelcomeMessage, message,
    op, ring, server_flag,
};
use rushes_core::server::{Errno, FileKey, Runs};
use rushes_core::units::*;
use rushes_sys::socket::{self, Packet, Peer};
use rushes_sys::{Segment, bell, memory_file};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Too many open files.
const NO_DESCRIPTOR: Errno = Errno(24);

/// Where clients connect. Its drop deletes its file.
#[derive(Debug)]
pub struct Listener {
    socket: Arc<OwnedFd>,
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Listen at `path`, mode 0600: only root can connect. Replaces a socket left there.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        let socket = Arc::new(socket::listen_at(path)?);
        let inode = std::fs::symlink_metadata(path)?.ino();
        Ok(Listener {
            socket,
            path: path.to_owned(),
            inode,
        })
    }

    /// Readable when a client waits.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// The next client that waits.
    ///
    /// Errors   EMFILE and the like: accept again later, not at once.
    pub fn accept(&self) -> io::Result<Option<Newcomer>> {
        let Some(socket) = socket::accept(&*self.socket)? else {
            return Ok(None);
        };
        let peer = socket::peer(&socket)?;
        Ok(Some(Newcomer {
            socket: Arc::new(socket),
            peer,
        }))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another daemon may have taken the place meanwhile.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A client that is connected, and has not sent its CONNECT. Bound the number and the patience of
/// these.
#[derive(Debug)]
pub struct Newcomer {
    socket: Arc<OwnedFd>,
    peer: Peer,
}

/// The terms of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionTerms {
    /// Its number.
    pub session: SessionId,
    /// Longest read in one request.
    pub read_bytes_max: u64,
    /// Handles it may have open; requests for files beyond that get [`ReplyBody::Plain`].
    pub handle_count_max: u32,
    /// Longest write in one request.
    pub write_bytes_max: u64,
    /// The driver promises to call [`ServerSession::next_event`] every few milliseconds while
    /// [`ServerSession::pinned_count`] is not zero; the client then need not ring for READ_END.
    pub sweeps: bool,
}

/// The further terms of a session that may write.
#[derive(Clone, Copy, Debug)]
pub struct LaneTerms<'a> {
    /// Its number, pages and secret.
    pub head: Head,
    /// Its bytes.
    pub bytes: &'a OwnedFd,
    /// The table of facts.
    pub facts: &'a OwnedFd,
}

impl Newcomer {
    /// Its process and user, as the kernel says. Data sessions are for uid 0 only; the caller
    /// checks that.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Readable when it has sent a packet, or is gone.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// Its own description of itself, once it has sent one.
    pub fn receive(&mut self) -> Result<Option<Connect>, PeerError> {
        let mut buffer = [0; PACKET_BYTES_MAX];
        let Some(packet) = socket::receive(&*self.socket, &mut buffer)? else {
            return Ok(None);
        };
        let bytes = checked_packet(&buffer, packet.bytes)?;
        let connect = read_connect(bytes)?;
        if !packet.fds.is_empty() || packet.fds_cut {
            return Err(broken(format!(
                "read a CONNECT message with {} descriptors; expected none",
                packet.fds.len()
            )));
        }
        Ok(Some(connect))
    }

    /// Refuse it. `reason` is a sentence for the door's log.
    pub fn refuse(self, errno: Errno, reason: &str) {
        // A client that does not take even this will see the closed socket.
        let _ = socket::send(&*self.socket, &[&write_refused(errno.0, reason)], &[]);
    }

    /// Accept it: make rings and doorbells, and send them with the segment, and its lane if it has
    /// one.
    pub fn welcome(
        self,
        terms: SessionTerms,
        segment: &Segment,
        lane: Option<LaneTerms<'_>>,
    ) -> Result<ServerSession, PeerError> {
        let ring_file = memory_file("rushes-ring", ring::BYTES as u64)?;
        let memory = RingMemory::map(&ring_file)?;
        if terms.sweeps {
            memory.set_server_flags(server_flag::SWEEPS);
        }
        let data = segment.session_fd()?;
        let request_bell = Arc::new(bell::new()?);
        let reply_bell = bell::new()?;
        let head = lane.map(|lane| lane.head);
        let message = write_welcome(&WelcomeMessage {
            lane: head.map_or(0, |head| head.lane),
            lane_pages: head.map_or(0, |head| head.page_count),
            secret: head.map_or(0, |head| head.secret),
            write_bytes_max: terms.write_bytes_max,
            session: terms.session.0,
            slot_count: segment.slot_count(),
            slot_bytes: segment.slot_bytes(),
            ring_entries: RING_ENTRIES,
            read_bytes_max: terms.read_bytes_max,
            ..WelcomeMessage::default()
        });
        let mut fds = vec![
            data.as_fd(),
            ring_file.as_fd(),
            request_bell.as_fd(),
            reply_bell.as_fd(),
        ];
        if let Some(lane) = &lane {
            fds.extend([lane.bytes.as_fd(), lane.facts.as_fd()]);
        }
        socket::send(&*self.socket, &[&message], &fds)?;
        let mut session = ServerSession {
            socket: self.socket,
            peer: self.peer,
            terms,
            slot_count: segment.slot_count(),
            slot_bytes: segment.slot_bytes(),
            memory,
            request_bell,
            reply_bell,
            request_head: 0,
            reply_tail: 0,
            unpublished_bell: false,
            has_lane: lane.is_some(),
            handles: HashSet::new(),
            live: HashMap::with_capacity(RING_ENTRIES as usize),
            pinned_count: 0,
            socket_ready: true,
            held: None,
        };
        // The first request finds its bell armed.
        session.sleep()?;
        Ok(session)
    }
}

/// Something a client did.
#[derive(Debug)]
pub enum ClientEvent {
    /// It named a file: its own descriptor, not vetted in any way.
    Open {
        /// Its name for it from now on.
        handle: HandleId,
        /// Below the share's root; relative, no "..", not otherwise checked.
        path: PathBuf,
        /// Which part of the file of that path; not otherwise checked.
        part: FilePart,
        /// The file that it sent, unvetted: see `rushes_sys::file::reopen_vetted`.
        file: OwnedFd,
        /// The user that writes, if one does.
        writer: Writer,
    },
    /// It named a file, and this process has no descriptor left for it: requests for that file get
    /// [`ReplyBody::Plain`].
    NoRoom,
    /// Its answer to [`ServerSession::want`], perhaps to that of another of its sessions; the
    /// number is not checked.
    Found {
        /// The number of the request, as it says.
        number: u64,
        /// Its descriptor, not vetted in any way; or the error by which there is none.
        file: Result<OwnedFd, Errno>,
    },
    /// The user and client of a handle, not checked. The handle may be closed by now.
    Station {
        /// As in [`ClientEvent::Open`].
        handle: HandleId,
        /// User.
        user: String,
        /// Address, or the program.
        client: String,
    },
    /// It wants bytes. Needs an answer.
    Read {
        /// To answer by.
        request: RequestId,
        /// Of which open file; open at this moment.
        handle: HandleId,
        /// Which bytes: at least one, at most `read_bytes_max`.
        range: ByteRange,
        /// When its door got the request; at most now.
        sent: Instant,
    },
    /// It has copied the bytes of that read.
    ReadEnd {
        /// The read.
        request: RequestId,
    },
    /// It closed a file.
    Close {
        /// Which.
        handle: HandleId,
    },
    /// It changed bytes of a file past the cache. Needs [`ReplyBody::Done`].
    Changed {
        /// To answer by.
        request: RequestId,
        /// Which file.
        key: FileKey,
        /// Which bytes.
        range: ByteRange,
        /// Bytes may have been written; false if only length or blocks were changed.
        has_bytes: bool,
    },
    /// A file lost a name. Needs [`ReplyBody::Done`].
    Gone {
        /// To answer by.
        request: RequestId,
        /// Which file.
        key: FileKey,
    },
    /// It wants to write. Needs an answer, [`ReplyBody::Granted`] if all is well.
    WriteBegin {
        /// To answer by.
        request: RequestId,
        /// To which open file.
        handle: HandleId,
        /// Which bytes: at least one, at most `write_bytes_max`.
        range: ByteRange,
        /// When its door got the request; at most now.
        sent: Instant,
    },
    /// It has copied its bytes to the granted pages. Needs an answer.
    WriteEnd {
        /// As in WriteBegin.
        request: RequestId,
    },
    /// It will not write to the granted pages.
    WriteAbort {
        /// As in WriteBegin.
        request: RequestId,
    },
    /// It wants the acknowledged bytes of a file on stable storage. Needs an answer.
    Sync {
        /// To answer by.
        request: RequestId,
        /// Of which open file.
        handle: HandleId,
    },
    /// Did a daemon that died commit a write that it gave over? Needs an answer:
    /// [`ReplyBody::Done`] yes, [`ReplyBody::Plain`] no.
    WasCommitted {
        /// To answer by.
        request: RequestId,
        /// Which lane it had.
        lane: LaneId,
        /// The secret of that lane.
        secret: u64,
        /// The number under which it gave the write over.
        then: RequestId,
    },
    /// It is about to set the time of change of a file. Needs an answer.
    Timed {
        /// To answer by.
        request: RequestId,
        /// Which file.
        key: FileKey,
        /// To this. Units: ns since 1970.
        changed_ns: i64,
    },
    /// It is about to change a file past the daemon. Needs an answer.
    Hold {
        /// To answer by.
        request: RequestId,
        /// Which file.
        key: FileKey,
    },
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyBody<'a> {
    /// Bytes, pinned until [`ClientEvent::ReadEnd`]. No slots: the end of the file, nothing pinned.
    Data {
        /// At most `REPLY_SLOTS_MAX`.
        slots: &'a [SlotIndex],
        /// Where the bytes start in the first; they go on at the start of each next.
        first_offset: u32,
        /// How many.
        length: ByteCount,
    },
    /// Pages of the session's lane, the first byte at `first_offset` in the first.
    Granted {
        /// Which.
        runs: Runs,
        /// Units: bytes.
        first_offset: u32,
        /// As many bytes as were asked for.
        length: ByteCount,
    },
    /// Changed, Gone, WriteEnd, Sync, Hold: done.
    Done,
    /// An error for the application.
    Failed(Errno),
    /// Do it on your own descriptor.
    Plain,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Live {
    /// Needs an answer.
    Waiting,
    /// Answered with slots.
    Pinned,
    /// Answered with pages of the lane.
    Granted,
}

/// One client's session.
pub struct ServerSession {
    socket: Arc<OwnedFd>,
    peer: Peer,
    terms: SessionTerms,
    slot_count: u32,
    slot_bytes: u32,
    memory: RingMemory,
    request_bell: Arc<OwnedFd>,
    reply_bell: OwnedFd,
    request_head: u32,
    reply_tail: u32,
    /// Replies went out since the last look at the client's bell.
    unpublished_bell: bool,
    has_lane: bool,
    handles: HashSet<u32>,
    live: HashMap<u64, Live>,
    pinned_count: u32,
    socket_ready: bool,
    /// A request whose file may still wait in the socket.
    held: Option<Request>,
}

impl ServerSession {
    /// Readable when it has sent a packet, as for an open file, or is gone: then call
    /// [`ServerSession::socket_ready`].
    pub fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// The eventfd that it rings. The driver silences it.
    pub fn doorbell(&self) -> &Arc<OwnedFd> {
        &self.request_bell
    }

    /// Its process and user.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Its number.
    pub fn id(&self) -> SessionId {
        self.terms.session
    }

    /// Requests that need an answer.
    pub fn waiting_count(&self) -> u32 {
        let waiting = |live: &&Live| **live == Live::Waiting;
        self.live.values().filter(waiting).count() as u32
    }

    /// Reads answered with slots that the client has not given back.
    pub fn pinned_count(&self) -> u32 {
        self.pinned_count
    }

    /// The socket became readable.
    pub fn socket_ready(&mut self) {
        self.socket_ready = true;
    }

    /// The next thing the client did. None: nothing more, and from now on it rings for the next.
    ///
    /// Errors   the session is over: drop it.
    pub fn next_event(&mut self) -> Result<Option<ClientEvent>, PeerError> {
        loop {
            if self.socket_ready {
                if let Some(event) = self.receive_packet()? {
                    return Ok(Some(event));
                }
                self.socket_ready = false;
            }
            let (request, held) = match self.held.take() {
                Some(request) => (request, true),
                None => match self.pop()? {
                    Some(request) => (request, false),
                    None if self.sleep()? => return Ok(None),
                    None => continue,
                },
            };
            let names_file = matches!(
                request.op,
                op::READ | op::CLOSE | op::WRITE_BEGIN | op::SYNC
            );
            if names_file && !held && !self.handles.contains(&request.handle) {
                // The client sent the file before this request, but on the socket.
                self.held = Some(request);
                self.socket_ready = true;
                continue;
            }
            if let Some(event) = self.accept(&request)? {
                return Ok(Some(event));
            }
        }
    }

    /// Answer a request. The client sees it at once if it is awake, else after
    /// [`ServerSession::flush`].
    ///
    /// Errors   Broken: the client's indices are invalid; or, by our own fault, no such request
    ///          waits or the slots do not hold the bytes. The session is over in any case.
    pub fn reply(&mut self, request: RequestId, body: ReplyBody<'_>) -> Result<(), PeerError> {
        if self.live.get(&request.0) != Some(&Live::Waiting) {
            return Err(broken(format!(
                "answered request {}, which does not wait",
                request.0
            )));
        }
        let mut reply = Reply {
            id: request.0,
            ..Reply::default()
        };
        match body {
            ReplyBody::Done => {}
            ReplyBody::Failed(errno) => reply.errno = errno.0,
            ReplyBody::Plain => reply.errno = PLAIN,
            ReplyBody::Granted {
                runs,
                first_offset,
                length,
            } => {
                let runs = runs.as_slice();
                reply.slot_count = 2 * runs.len() as u32;
                reply.length = length.0;
                reply.first_offset = first_offset;
                for (pair, run) in reply.slots.chunks_exact_mut(2).zip(runs) {
                    pair.copy_from_slice(&[run.first, run.count]);
                }
            }
            ReplyBody::Data {
                slots,
                first_offset,
                length,
            } => {
                self.check_data(slots, first_offset, length)?;
                reply.slot_count = slots.len() as u32;
                reply.length = length.0;
                reply.first_offset = first_offset;
                for (place, slot) in reply.slots.iter_mut().zip(slots) {
                    *place = slot.0;
                }
            }
        }
        if self.memory.untaken(Which::Replies, self.reply_tail)? == RING_ENTRIES {
            return Err(broken(format!(
                "found {RING_ENTRIES} replies not taken; expected the client to take one for each request"
            )));
        }
        self.memory.write_reply(self.reply_tail, &reply);
        self.reply_tail = self.reply_tail.wrapping_add(1);
        self.memory.publish_tail(Which::Replies, self.reply_tail);
        self.unpublished_bell = true;
        let next = match body {
            ReplyBody::Granted { .. } => Some(Live::Granted),
            _ if reply.slot_count > 0 => {
                self.pinned_count += 1;
                Some(Live::Pinned)
            }
            _ => None,
        };
        match next {
            Some(next) => self.live.insert(request.0, next),
            None => self.live.remove(&request.0),
        };
        Ok(())
    }

    /// Ask a pool's door for a file of its tree. It answers with [`ClientEvent::Found`], in any of
    /// its sessions, or never.
    ///
    /// Returns  false: not asked; its socket takes nothing, or this is no path
    pub fn want(&mut self, number: u64, path: &[u8]) -> bool {
        if path.len() > PATH_BYTES_MAX || !path_is_plain(path) {
            return false;
        }
        let head = write_wanted(number, path.len());
        socket::send(&*self.socket, &[&head, path], &[]).is_ok()
    }

    /// Tell the client that we live; once a second.
    pub fn beat(&self) {
        self.memory.beat();
    }

    /// Wake the client if it sleeps and there are replies for it.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unpublished_bell) && self.memory.must_ring(Which::Replies) {
            // A ring of our eventfd fails only without memory; the client then sees it late.
            let _ = bell::ring(&self.reply_bell);
        }
    }

    fn check_data(
        &self,
        slots: &[SlotIndex],
        first_offset: u32,
        length: ByteCount,
    ) -> Result<(), PeerError> {
        let room = (slots.len() as u64) * u64::from(self.slot_bytes);
        let fits = slots.len() <= REPLY_SLOTS_MAX
            && slots.iter().all(|slot| slot.0 < self.slot_count)
            && u64::from(first_offset).saturating_add(length.0) <= room
            && (first_offset < self.slot_bytes);
        if fits {
            return Ok(());
        }
        Err(broken(format!(
            "answered with {} bytes from offset {first_offset} of {} buffers; expected them to fit",
            length.0,
            slots.len()
        )))
    }

    fn pop(&mut self) -> Result<Option<Request>, PeerError> {
        if self.memory.waiting(Which::Requests, self.request_head)? == 0 {
            return Ok(None);
        }
        let request = self.memory.read_request(self.request_head);
        self.request_head = self.request_head.wrapping_add(1);
        self.memory.publish_head(Which::Requests, self.request_head);
        Ok(Some(request))
    }

    /// Arm the doorbell. False: a request came in the meantime.
    fn sleep(&mut self) -> Result<bool, PeerError> {
        self.memory.arm(Which::Requests);
        if self.memory.waiting(Which::Requests, self.request_head)? == 0 {
            return Ok(true);
        }
        // A ring that comes all the same wakes us once for nothing.
        self.memory.disarm(Which::Requests);
        Ok(false)
    }

    fn receive_packet(&mut self) -> Result<Option<ClientEvent>, PeerError> {
        let mut buffer = [0; PACKET_BYTES_MAX];
        loop {
            let Some(mut packet) = socket::receive(&*self.socket, &mut buffer)? else {
                return Ok(None);
            };
            let bytes = checked_packet(&buffer, packet.bytes)?;
            if read_head(bytes)? == message::FOUND {
                let (number, errno) = read_found(bytes)?;
                let expected = usize::from(errno == 0);
                if expected == 1 && is_without_room(&packet) {
                    let file = Err(NO_DESCRIPTOR);
                    return Ok(Some(ClientEvent::Found { number, file }));
                }
                if packet.fds.len() != expected || packet.fds_cut {
                    return Err(broken(format!(
                        "read a FOUND message with errno {errno} and {} descriptors; expected {expected}",
                        packet.fds.len()
                    )));
                }
                let file = packet.fds.pop().ok_or(Errno(errno));
                return Ok(Some(ClientEvent::Found { number, file }));
            }
            if read_head(bytes)? == message::STATION {
                let (handle, user, client) = read_station(bytes)?;
                let handle = HandleId(handle);
                return Ok(Some(ClientEvent::Station {
                    handle,
                    user,
                    client,
                }));
            }
            let (handle, writer, part, path) = read_open(bytes)?;
            if is_without_room(&packet) && !self.handles.contains(&handle) {
                // Not registered, as below.
                return Ok(Some(ClientEvent::NoRoom));
            }
            if packet.fds.len() != 1 || packet.fds_cut {
                return Err(broken(format!(
                    "read an OPEN message with {}{} descriptors; expected one",
                    if packet.fds_cut { "more than " } else { "" },
                    packet.fds.len()
                )));
            }
            if self.handles.contains(&handle) {
                return Err(broken(format!(
                    "read an OPEN message for handle {handle}, which is open already"
                )));
            }
            let Some(file) = packet.fds.pop() else {
                continue;
            };
            if self.handles.len() >= self.terms.handle_count_max as usize {
                // Not registered, so that its reads get Plain.
                continue;
            }
            self.handles.insert(handle);
            return Ok(Some(ClientEvent::Open {
                handle: HandleId(handle),
                path: OsString::from_vec(path.to_vec()).into(),
                part,
                file,
                writer,
            }));
        }
    }

    /// Check a request and return its event. None: it needs no more.
    fn accept(&mut self, request: &Request) -> Result<Option<ClientEvent>, PeerError> {
        if request.reserved != 0 {
            return Err(broken(format!(
                "read {:#x} in the reserved word of a request; expected zero",
                request.reserved
            )));
        }
        let id = RequestId(request.id);
        let key = FileKey {
            device: request.device,
            inode: request.inode,
        };
        let range = ByteRange::new(request.offset, request.length);
        let event = match request.op {
            op::READ => {
                self.check_range(request, self.terms.read_bytes_max)?;
                self.begin(request.id)?;
                if !self.handles.contains(&request.handle) {
                    self.reply(id, ReplyBody::Plain)?;
                    self.flush();
                    return Ok(None);
                }
                ClientEvent::Read {
                    request: id,
                    handle: HandleId(request.handle),
                    range,
                    sent: Instant(request.sent_ns).min(rushes_sys::clock::now()),
                }
            }
            op::READ_END => {
                if self.live.get(&request.id) != Some(&Live::Pinned) {
                    return Err(broken(format!(
                        "read READ_END for request {}, which holds no buffers",
                        request.id
                    )));
                }
                self.live.remove(&request.id);
                self.pinned_count -= 1;
                ClientEvent::ReadEnd { request: id }
            }
            op::CLOSE => {
                if !self.handles.remove(&request.handle) {
                    // One of those beyond handle_count_max.
                    return Ok(None);
                }
                ClientEvent::Close {
                    handle: HandleId(request.handle),
                }
            }
            op::CHANGED => {
                if range.end() > i64::MAX as u64 && request.length != u64::MAX {
                    return Err(broken(format!(
                        "read a change of {} bytes at {}; expected it to end within a file, or to be {} long",
                        request.length,
                        request.offset,
                        u64::MAX
                    )));
                }
                self.begin(request.id)?;
                ClientEvent::Changed {
                    request: id,
                    key,
                    range,
                    has_bytes: true,
                }
            }
            op::RESIZED => {
                self.begin(request.id)?;
                ClientEvent::Changed {
                    request: id,
                    key,
                    range: ByteRange::new(request.offset, u64::MAX - request.offset),
                    has_bytes: false,
                }
            }
            op::GONE => {
                self.begin(request.id)?;
                ClientEvent::Gone { request: id, key }
            }
            op::WRITE_BEGIN => {
                self.check_range(request, self.terms.write_bytes_max)?;
                self.begin(request.id)?;
                if !self.has_lane || !self.handles.contains(&request.handle) {
                    self.reply(id, ReplyBody::Plain)?;
                    self.flush();
                    return Ok(None);
                }
                ClientEvent::WriteBegin {
                    request: id,
                    handle: HandleId(request.handle),
                    range,
                    sent: Instant(request.sent_ns).min(rushes_sys::clock::now()),
                }
            }
            op::WRITE_END => {
                self.check_granted(request, "WRITE_END")?;
                self.live.insert(request.id, Live::Waiting);
                ClientEvent::WriteEnd { request: id }
            }
            op::WRITE_ABORT => {
                self.check_granted(request, "WRITE_ABORT")?;
                self.live.remove(&request.id);
                ClientEvent::WriteAbort { request: id }
            }
            op::SYNC => {
                self.begin(request.id)?;
                if !self.handles.contains(&request.handle) {
                    self.reply(id, ReplyBody::Plain)?;
                    self.flush();
                    return Ok(None);
                }
                ClientEvent::Sync {
                    request: id,
                    handle: HandleId(request.handle),
                }
            }
            op::HOLD => {
                self.begin(request.id)?;
                ClientEvent::Hold { request: id, key }
            }
            op::TIMED => {
                self.begin(request.id)?;
                ClientEvent::Timed {
                    request: id,
                    key,
                    changed_ns: request.offset as i64,
                }
            }
            op::WAS_COMMITTED => {
                let lane = u32::try_from(request.device).map_err(|_| {
                    broken(format!("read lane {}; expected 32 bits", request.device))
                })?;
                self.begin(request.id)?;
                ClientEvent::WasCommitted {
                    request: id,
                    lane: LaneId(lane),
                    secret: request.inode,
                    then: RequestId(request.offset),
                }
            }
            other => {
                return Err(broken(format!(
                    "read operation {other} in a request; expected {} to {}",
                    op::READ,
                    op::TIMED
                )));
            }
        };
        Ok(Some(event))
    }

    fn check_granted(&self, request: &Request, what: &str) -> Result<(), PeerError> {
        if self.live.get(&request.id) == Some(&Live::Granted) {
            return Ok(());
        }
        Err(broken(format!(
            "read {what} for request {}, which was granted nothing",
            request.id
        )))
    }

    fn check_range(&self, request: &Request, most: u64) -> Result<(), PeerError> {
        let end = request.offset.checked_add(request.length);
        let fits = request.length > 0
            && request.length <= most
            && end.is_some_and(|end| i64::try_from(end).is_ok());
        if fits {
            return Ok(());
        }
        Err(broken(format!(
            "read a request for {} bytes at {}; expected 1 to {} bytes below 2^63",
            request.length, request.offset, most
        )))
    }

    /// Register a request that needs an answer. Honest clients keep them few enough for the reply
    /// ring.
    fn begin(&mut self, id: u64) -> Result<(), PeerError> {
        if self.live.len() >= RING_ENTRIES as usize {
            return Err(broken(format!(
                "read a request while {} are under way; expected at most {RING_ENTRIES}",
                self.live.len()
            )));
        }
        match self.live.insert(id, Live::Waiting) {
            None => Ok(()),
            Some(_) => Err(broken(format!("read request {id} twice"))),
        }
    }
}

/// The packet had descriptors, and the kernel could give us none: this process is at its limit. Had
/// it brought more than a packet may bring, we would have the first.
fn is_without_room(packet: &Packet) -> bool {
    packet.fds.is_empty() && packet.fds_cut
}

/// The packet's bytes. An empty packet is the end; one longer than the buffer was cut off, which is
/// an error.
fn checked_packet(buffer: &[u8], bytes: usize) -> Result<&[u8], PeerError> {
    if bytes == 0 {
        return Err(PeerError::Closed);
    }
    buffer.get(..bytes).ok_or_else(|| {
        layout::broken(format!(
            "read a packet of {bytes} bytes; expected at most {PACKET_BYTES_MAX}"
        ))
    })
}

#[cfg(test)]
mod tests;
