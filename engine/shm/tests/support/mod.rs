// SPDX-License-Identifier: Apache-2.0
//! The smallest server there can be: one thread, `pread` into the segment, no cache, no plan.
//!
//! It keeps to the protocol in every respect, so doors can be tried on it before there is a daemon
//! and the client library be tested without one. It serves every file that it gets and vets none.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Each test and example uses a part.

use rushes_core::format::lane::Head;
use rushes_core::server::{Errno, Runs};
use rushes_core::units::*;
use rushes_core::write::Lane;
use rushes_shm::PeerError;
use rushes_shm::facts::FactsTable;
use rushes_shm::lane::LaneFile;
use rushes_shm::server::{
    ClientEvent, LaneTerms, Listener, Newcomer, ReplyBody, ServerSession, SessionTerms,
};
use rushes_sys::{Segment, SegmentHome, bell};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// How large an [`Echo`] is.
#[derive(Clone, Copy, Debug)]
pub struct EchoSize {
    pub slot_count: u32,
    pub slot_bytes: u32,
    pub read_bytes_max: u64,
    pub sweeps: bool,
    pub home: SegmentHome<'static>,
    /// 0: no session has a lane.
    pub lane_pages: u32,
}

impl Default for EchoSize {
    fn default() -> EchoSize {
        EchoSize {
            slot_count: 64,
            slot_bytes: 1 << 20,
            read_bytes_max: 8 << 20,
            sweeps: false,
            home: SegmentHome::Anonymous,
            lane_pages: 0,
        }
    }
}

struct EchoSession {
    session: ServerSession,
    files: HashMap<HandleId, OwnedFd>,
    /// Slots of answered reads that have not ended.
    pinned: HashMap<RequestId, Vec<SlotIndex>>,
    /// Reads that wait for slots.
    waiting: VecDeque<(RequestId, HandleId, ByteRange)>,
    lane: Option<(LaneFile, Lane)>,
    granted: HashMap<RequestId, (HandleId, ByteRange, Runs)>,
}

/// The server.
pub struct Echo {
    listener: Listener,
    segment: Segment,
    size: EchoSize,
    newcomers: Vec<Newcomer>,
    sessions: Vec<EchoSession>,
    free: Vec<SlotIndex>,
    session_last: u32,
    /// Requests answered, for tests to look at.
    pub read_count: u64,
    /// Errors that ended sessions, other than a close.
    pub faults: Vec<PeerError>,
    /// The files that CHANGED, GONE and HOLD named.
    pub notices: Vec<(u64, u64)>,
    /// Those of CHANGED that had no bytes.
    pub resized_count: usize,
    folder: PathBuf,
    facts: FactsTable,
    /// Writes granted, given up, and all requested, of which each seventh gets Plain.
    pub write_counts: [u64; 3],
    /// Its answer to questions about writes to an earlier daemon.
    pub committed: Vec<RequestId>,
    /// It does its work and does not answer any more.
    pub mute: bool,
}

impl Echo {
    pub fn new(path: &Path, size: EchoSize) -> io::Result<Echo> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = path.with_extension(format!("lanes{number}"));
        let (segment, _) = Segment::create(size.home, size.slot_count, size.slot_bytes)
            .map_err(|error| error.source)?;
        Ok(Echo {
            listener: Listener::bind(path)?,
            segment,
            size,
            newcomers: Vec::new(),
            sessions: Vec::new(),
            free: (0..size.slot_count).rev().map(SlotIndex).collect(),
            session_last: 0,
            read_count: 0,
            faults: Vec::new(),
            notices: Vec::new(),
            resized_count: 0,
            facts: {
                std::fs::create_dir_all(&folder)?;
                FactsTable::open(&folder).map_err(|error| error.source)?
            },
            folder,
            write_counts: [0; 3],
            committed: Vec::new(),
            mute: false,
        })
    }

    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// End all sessions at once, as if killed.
    pub fn kill_sessions(&mut self) {
        self.newcomers.clear();
        while !self.sessions.is_empty() {
            self.end(0);
        }
    }

    /// Wait for something at most so long, and do it.
    pub fn turn(&mut self, at_most_ms: i64) -> io::Result<()> {
        let ready = self.wait(at_most_ms)?;
        if ready.listener {
            while let Some(newcomer) = self.listener.accept()? {
                self.newcomers.push(newcomer);
            }
        }
        for mut newcomer in std::mem::take(&mut self.newcomers) {
            match newcomer.receive() {
                Ok(None) => self.newcomers.push(newcomer),
                Ok(Some(_)) => self.welcome(newcomer),
                Err(PeerError::Closed) => {}
                Err(fault) => self.faults.push(fault),
            }
        }
        let mut index = 0;
        while index < self.sessions.len() {
            let state = &mut self.sessions[index];
            if ready.sockets.get(index).copied().unwrap_or(true) {
                state.session.socket_ready();
            }
            let _ = bell::silence(&**state.session.doorbell());
            match self.serve(index) {
                Ok(()) => index += 1,
                Err(fault) => {
                    if !matches!(fault, PeerError::Closed) {
                        self.faults.push(fault);
                    }
                    self.end(index);
                }
            }
        }
        Ok(())
    }

    fn wait(&self, at_most_ms: i64) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(&**self.listener.fd(), PollFlags::IN)];
        for newcomer in &self.newcomers {
            fds.push(PollFd::new(&**newcomer.fd(), PollFlags::IN));
        }
        for state in &self.sessions {
            fds.push(PollFd::new(&**state.session.socket(), PollFlags::IN));
            fds.push(PollFd::new(&**state.session.doorbell(), PollFlags::IN));
        }
        // As promised by `sweeps`.
        let pinned = self.sessions.iter().any(|state| !state.pinned.is_empty());
        let at_most_ms = if self.size.sweeps && pinned {
            at_most_ms.min(5)
        } else {
            at_most_ms
        };
        let span = Timespec {
            tv_sec: at_most_ms / 1000,
            tv_nsec: at_most_ms % 1000 * 1_000_000,
        };
        match poll(&mut fds, Some(&span)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let sockets = fds[1 + self.newcomers.len()..]
            .chunks(2)
            .map(|pair| !pair[0].revents().is_empty())
            .collect();
        Ok(Ready {
            listener: !fds[0].revents().is_empty(),
            sockets,
        })
    }

    fn welcome(&mut self, newcomer: Newcomer) {
        self.session_last += 1;
        let terms = SessionTerms {
            session: SessionId(self.session_last),
            read_bytes_max: self.size.read_bytes_max,
            write_bytes_max: 8 << 20,
            handle_count_max: 1024,
            sweeps: self.size.sweeps,
        };
        let lane = (self.size.lane_pages > 0).then(|| {
            std::fs::create_dir_all(&self.folder).unwrap();
            let head = Head {
                lane: self.session_last,
                page_count: self.size.lane_pages,
                epoch: 1,
                secret: 5,
            };
            let pages = Lane::new(head.page_count);
            (LaneFile::create(&self.folder, head).unwrap(), pages)
        });
        let lane_terms = lane.as_ref().map(|(file, _)| LaneTerms {
            head: file.head(),
            bytes: file.bytes_fd(),
            facts: self.facts.session_fd(),
        });
        match newcomer.welcome(terms, &self.segment, lane_terms) {
            Ok(session) => self.sessions.push(EchoSession {
                session,
                files: HashMap::new(),
                pinned: HashMap::new(),
                waiting: VecDeque::new(),
                lane,
                granted: HashMap::new(),
            }),
            Err(PeerError::Closed) => {}
            Err(fault) => self.faults.push(fault),
        }
    }

    fn serve(&mut self, index: usize) -> Result<(), PeerError> {
        while let Some(event) = self.sessions[index].session.next_event()? {
            let state = &mut self.sessions[index];
            match event {
                ClientEvent::Open { handle, file, .. } => {
                    state.files.insert(handle, file);
                }
                ClientEvent::Close { handle } => {
                    state.files.remove(&handle);
                }
                ClientEvent::Station { .. } | ClientEvent::Found { .. } | ClientEvent::NoRoom => {}
                ClientEvent::Read {
                    request,
                    handle,
                    range,
                    ..
                } => {
                    state.waiting.push_back((request, handle, range));
                }
                ClientEvent::ReadEnd { request } => {
                    self.free
                        .extend(state.pinned.remove(&request).unwrap_or_default());
                }
                ClientEvent::Sync { request, .. } | ClientEvent::Timed { request, .. } => {
                    state.session.reply(request, ReplyBody::Done)?;
                }
                ClientEvent::WriteBegin {
                    request,
                    handle,
                    range,
                    ..
                } => {
                    if self.mute {
                        continue;
                    }
                    self.write_counts[2] += 1;
                    let (_, pages) = state.lane.as_mut().unwrap();
                    let into = range.start.0 % 4096;
                    let count = (into + range.length.0).div_ceil(4096);
                    let taken = pages.take(count as u32, u32::MAX);
                    let body = match taken {
                        Some(runs) if !self.write_counts[2].is_multiple_of(7) => {
                            state.granted.insert(request, (handle, range, runs));
                            ReplyBody::Granted {
                                runs,
                                first_offset: into as u32,
                                length: range.length,
                            }
                        }
                        Some(runs) => {
                            pages.give(&runs);
                            ReplyBody::Plain
                        }
                        None => ReplyBody::Failed(Errno::NO_SPACE),
                    };
                    state.session.reply(request, body)?;
                }
                ClientEvent::WriteEnd { request } => {
                    self.write_counts[0] += 1;
                    let (handle, range, runs) = state.granted.remove(&request).unwrap();
                    let (lane, pages) = state.lane.as_mut().unwrap();
                    let mut at = range.start.0;
                    while at < range.end() {
                        let into = at % 4096;
                        let index = at / 4096 - range.start.0 / 4096;
                        let (page, _) = runs.place(index as u32).unwrap();
                        let mut bytes = vec![0; (4096 - into).min(range.end() - at) as usize];
                        let place = u64::from(page) * 4096 + into;
                        lane.copy_out(place, &mut bytes).unwrap();
                        let file = File::from(state.files[&handle].try_clone()?);
                        file.write_all_at(&bytes, at)?;
                        at += bytes.len() as u64;
                    }
                    pages.give(&runs);
                    self.committed.push(request);
                    if !self.mute {
                        state.session.reply(request, ReplyBody::Done)?;
                    }
                }
                ClientEvent::WriteAbort { request } => {
                    self.write_counts[1] += 1;
                    let (_, _, runs) = state.granted.remove(&request).unwrap();
                    state.lane.as_mut().unwrap().1.give(&runs);
                }
                ClientEvent::WasCommitted { request, then, .. } => {
                    let body = if self.committed.contains(&then) {
                        ReplyBody::Done
                    } else {
                        ReplyBody::Plain
                    };
                    state.session.reply(request, body)?;
                }
                ClientEvent::Changed {
                    request,
                    key,
                    has_bytes,
                    ..
                } => {
                    self.resized_count += usize::from(!has_bytes);
                    self.notices.push((key.device, key.inode));
                    state.session.reply(request, ReplyBody::Done)?;
                }
                ClientEvent::Gone { request, key } | ClientEvent::Hold { request, key } => {
                    self.notices.push((key.device, key.inode));
                    state.session.reply(request, ReplyBody::Done)?;
                }
            }
            self.answer(index)?;
        }
        self.answer(index)?;
        self.sessions[index].session.flush();
        Ok(())
    }

    /// Answer the reads for which there are slots, in order.
    fn answer(&mut self, index: usize) -> Result<(), PeerError> {
        let slot_bytes = u64::from(self.size.slot_bytes);
        let state = &mut self.sessions[index];
        while let Some((request, handle, range)) = state.waiting.front().copied() {
            let first_offset = range.start.0 % slot_bytes;
            let wanted = (first_offset + range.length.0).div_ceil(slot_bytes) as usize;
            if wanted > self.free.len() && wanted <= self.size.slot_count as usize {
                return Ok(());
            }
            state.waiting.pop_front();
            self.read_count += 1;
            let Some(file) = state.files.get(&handle) else {
                state.session.reply(request, ReplyBody::Plain)?;
                continue;
            };
            let mut slots = self
                .free
                .split_off(self.free.len() - wanted.min(self.free.len()));
            let read = read(&self.segment, file, range, &slots);
            let body = match &read {
                Ok(0) => ReplyBody::Data {
                    slots: &[],
                    first_offset: 0,
                    length: ByteCount(0),
                },
                Ok(length) => {
                    let used = (first_offset + length).div_ceil(slot_bytes) as usize;
                    self.free.extend(slots.drain(used..));
                    ReplyBody::Data {
                        slots: &slots,
                        first_offset: first_offset as u32,
                        length: ByteCount(*length),
                    }
                }
                Err(error) => ReplyBody::Failed(Errno(error.raw_os_error().unwrap_or(5) as u32)),
            };
            state.session.reply(request, body)?;
            if matches!(read, Ok(1..)) {
                state.pinned.insert(request, slots);
            } else {
                self.free.append(&mut slots);
            }
        }
        Ok(())
    }

    fn end(&mut self, index: usize) {
        let state = self.sessions.swap_remove(index);
        for slots in state.pinned.into_values() {
            self.free.extend(slots);
        }
    }
}

struct Ready {
    listener: bool,
    /// By session.
    sockets: Vec<bool>,
}

fn read(
    segment: &Segment,
    file: &OwnedFd,
    range: ByteRange,
    slots: &[SlotIndex],
) -> io::Result<u64> {
    let slot_bytes = u64::from(segment.slot_bytes());
    let mut done = 0;
    for slot in slots {
        let position = range.start.0 + done;
        let offset = position % slot_bytes;
        let wanted = (slot_bytes - offset).min(range.length.0 - done);
        if wanted == 0 {
            break;
        }
        let count =
            segment.read_into(file.as_fd(), position, *slot, offset as u32, wanted as u32)? as u64;
        done += count;
        if count < wanted {
            break;
        }
    }
    Ok(done)
}

// ---- For tests ----

/// Small enough that everything is cut in parts.
pub const SMALL: EchoSize = EchoSize {
    slot_count: 64,
    slot_bytes: 4096,
    read_bytes_max: 40_000,
    sweeps: false,
    home: SegmentHome::Memfd,
    lane_pages: 0,
};

/// A sequence of numbers that follow from a seed.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A folder of the test's own, removed in the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("rushes-shm-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("session.sock")
    }

    /// A file whose bytes depend on their offsets.
    pub fn footage(&self, name: &str, length: usize) -> (File, Vec<u8>) {
        let mut state = length as u64 | 1;
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let path = self.0.join(name);
        std::fs::write(&path, &bytes).unwrap();
        (File::open(path).unwrap(), bytes)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server in a thread of its own; `stop` returns it.
pub struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Echo>>,
}

impl Running {
    pub fn start(path: &Path, size: EchoSize) -> Running {
        Running::resume(Echo::new(path, size).unwrap())
    }

    /// Go on with a server that the test has driven by hand.
    pub fn resume(mut echo: Echo) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                echo.turn(5).unwrap();
            }
            echo
        });
        Running {
            stop,
            thread: Some(thread),
        }
    }

    pub fn stop(mut self) -> Echo {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}
