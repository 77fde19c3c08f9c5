// SPDX-License-Identifier: Apache-2.0
//! The handshake, seen from the door.

use crate::facts::FactsView;
use crate::layout::{
    Connect, PACKET_BYTES_MAX, PeerError, broken, read_head, read_refused, read_welcome,
    write_connect,
};
use crate::rings::RingMemory;
use rushes_core::format::{RING_ENTRIES, WelcomeMessage, facts, message, ring};
use rushes_core::server::PAGE_BYTES;
use rushes_core::units::{Duration, Instant};
use rushes_sys::{Access, Mapping, clock, socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, stat};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Longest that [`super::Client::connect`] takes.
pub const CONNECT_PATIENCE: Duration = Duration::from_ms(50);
/// How often a client that waits for an answer looks whether another daemon listens by now.
const LOOK: Duration = Duration::from_ms(10);
/// How often a client that finds a daemon's queue full tries again.
const QUEUE_LOOK: std::time::Duration = std::time::Duration::from_millis(5);

/// Why there is no session.
#[derive(Debug)]
pub enum ConnectError {
    /// No daemon listens there.
    NoDaemon(io::Error),
    /// It did not answer in time: [`CONNECT_PATIENCE`] unless the caller gave another.
    Silent,
    /// It speaks another version.
    Version {
        /// Its version.
        theirs: u32,
    },
    /// It refuses this client.
    Refused {
        /// Why, as a number.
        errno: u32,
        /// Why, as a sentence.
        reason: String,
    },
    /// Its answer is invalid.
    Broken(PeerError),
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::NoDaemon(error) => write!(f, "no daemon listens there: {error}"),
            ConnectError::Silent => write!(f, "the daemon did not answer in time"),
            ConnectError::Version { theirs } => PeerError::Version { theirs: *theirs }.fmt(f),
            ConnectError::Refused { reason, .. } => write!(f, "the daemon refused: {reason}"),
            ConnectError::Broken(error) => write!(f, "the daemon's answer is invalid: {error}"),
        }
    }
}

impl std::error::Error for ConnectError {}

impl From<PeerError> for ConnectError {
    fn from(error: PeerError) -> ConnectError {
        match error {
            PeerError::Version { theirs } => ConnectError::Version { theirs },
            other => ConnectError::Broken(other),
        }
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> ConnectError {
        ConnectError::Broken(PeerError::from(error))
    }
}

/// The session that the daemon gave us.
pub(super) struct Session {
    pub(super) welcome: WelcomeMessage,
    pub(super) socket: OwnedFd,
    pub(super) memory: RingMemory,
    pub(super) data: Mapping,
    pub(super) server_bell: OwnedFd,
    pub(super) own_bell: OwnedFd,
    /// None: the daemon takes no writes.
    pub(super) lane: Option<Lane>,
}

/// Where to write, and the facts of files that are written.
pub(super) struct Lane {
    pub(super) number: u32,
    pub(super) secret: u64,
    pub(super) bytes: Mapping,
    pub(super) facts: FactsView,
    /// Its file, which loses its name once all its pieces are in their files.
    pub(super) file: OwnedFd,
}

impl Lane {
    /// Nothing more of it will be written now, nor of any other lane: a daemon that came and went
    /// since may have left something, too.
    pub(super) fn is_done(&self) -> bool {
        let is_removed = || fstat(&self.file).is_ok_and(|found| found.st_nlink == 0);
        self.facts.is_left() || is_removed() && self.facts.is_empty()
    }
}

pub(super) fn connect(
    path: &Path,
    who: &Connect,
    patience: Duration,
) -> Result<Session, ConnectError> {
    let mut buffer = [0; PACKET_BYTES_MAX];
    // Each daemon gets that patience.
    let (socket, packet) = loop {
        if let Some(answered) = greet(path, who, clock::now() + patience, &mut buffer)? {
            break answered;
        }
    };
    let Some(bytes) = buffer.get(..packet.bytes).filter(|bytes| !bytes.is_empty()) else {
        return Err(PeerError::Closed.into());
    };
    if read_head(bytes)? == message::REFUSED {
        let (errno, reason) = read_refused(bytes)?;
        return Err(ConnectError::Refused { errno, reason });
    }
    let welcome = read_welcome(bytes)?;
    let data_bytes = check_welcome(&welcome)?;
    let count = packet.fds.len();
    let expected = if welcome.lane_pages == 0 { 4 } else { 6 };
    let mut fds = packet.fds.into_iter();
    let (Some(data), Some(rings), Some(server_bell), Some(own_bell), true) = (
        fds.next(),
        fds.next(),
        fds.next(),
        fds.next(),
        count == expected,
    ) else {
        return Err(broken(format!(
            "read a WELCOME with {count} descriptors; expected {expected}"
        ))
        .into());
    };
    let lane = match (fds.next(), fds.next()) {
        (Some(bytes), Some(known)) => {
            let length = u64::from(welcome.lane_pages) * PAGE_BYTES;
            check_file(&bytes, length, false, "lane")?;
            check_file(&known, facts::BYTES as u64, false, "table of facts")?;
            // Fits: it is the size of a file that exists.
            Some(Lane {
                number: welcome.lane,
                secret: welcome.secret,
                bytes: Mapping::shared(&bytes, length as usize, Access::ReadWrite)?,
                facts: FactsView::map(&known)?,
                file: bytes,
            })
        }
        _ => None,
    };
    check_file(&data, data_bytes, false, "data segment")?;
    check_file(&rings, ring::BYTES as u64, true, "ring segment")?;
    let memory = RingMemory::map(&rings)?;
    // Fits: it is the size of a file that exists.
    let data = Mapping::shared(&data, data_bytes as usize, Access::Read)?;
    data.advise_huge();
    Ok(Session {
        welcome,
        socket,
        memory,
        data,
        server_bell,
        own_bell,
        lane,
    })
}

/// The daemon that listens there, and its answer. None: another has taken its place meanwhile. The
/// kernel keeps the socket of a dead daemon until it has undone its last requests, and lets doors
/// connect to it: do not wait there. The next daemon may itself wait for the door that asks, see
/// `NoPlainChanges`.
fn greet(
    path: &Path,
    who: &Connect,
    deadline: Instant,
    buffer: &mut [u8],
) -> Result<Option<(OwnedFd, socket::Packet)>, ConnectError> {
    let place = place_of(path);
    let socket = loop {
        match socket::connect_to(path) {
            // Its queue is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && clock::now() < deadline => {
                std::thread::sleep(QUEUE_LOOK);
            }
            connected => break connected.map_err(ConnectError::NoDaemon)?,
        }
    };
    socket::send(&socket, &[&write_connect(who)], &[])?;
    loop {
        if let Some(packet) = socket::receive(&socket, buffer)? {
            return Ok(Some((socket, packet)));
        }
        if wait_readable(&socket, deadline.min(clock::now() + LOOK))? {
            continue;
        }
        if place_of(path) != place {
            return Ok(None);
        }
        if socket::peer_has_ended(&socket) {
            let refused =
                io::Error::from_raw_os_error(rustix::io::Errno::CONNREFUSED.raw_os_error());
            return Err(ConnectError::NoDaemon(refused));
        }
        if clock::now() >= deadline {
            return Err(ConnectError::Silent);
        }
    }
}

/// The file that a name stands for now. An inode's number may be reused at once; its time of change
/// tells the files apart.
fn place_of(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let found = stat(path).ok()?;
    let changed_ns = i64::try_from(found.st_ctime_nsec).unwrap_or_default();
    Some((found.st_dev, found.st_ino, found.st_ctime, changed_ns))
}

/// The size of the data segment. Units: bytes.
fn check_welcome(welcome: &WelcomeMessage) -> Result<u64, PeerError> {
    let sensible = welcome.slot_count > 0
        && welcome.slot_bytes.is_power_of_two()
        && welcome.slot_bytes >= 4096
        && welcome.read_bytes_max > 0
        && welcome.ring_entries == RING_ENTRIES;
    if !sensible {
        return Err(broken(format!(
            "read a WELCOME with {} buffers of {} bytes, reads of at most {}, rings of {}; expected a power \
             of two from 4096 on for a buffer and rings of {RING_ENTRIES}",
            welcome.slot_count, welcome.slot_bytes, welcome.read_bytes_max, welcome.ring_entries
        )));
    }
    Ok(u64::from(welcome.slot_count) * u64::from(welcome.slot_bytes))
}

/// A mapped file must be as large as its mapping: an access beyond its end raises SIGBUS in the
/// door's process.
fn check_file(fd: &OwnedFd, bytes: u64, sealed: bool, what: &str) -> Result<(), PeerError> {
    let found = fstat(fd).map_err(io::Error::from)?.st_size as u64;
    if found < bytes {
        return Err(broken(format!(
            "read a {what} of {found} bytes; expected {bytes}"
        )));
    }
    if sealed {
        let seals = fcntl_get_seals(fd).map_err(io::Error::from)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(broken(format!(
                "read a {what} that is not sealed against shrinking"
            )));
        }
    }
    Ok(())
}

fn wait_readable(socket: &OwnedFd, deadline: Instant) -> io::Result<bool> {
    let left = deadline.since(clock::now());
    if left == Duration::ZERO {
        return Ok(false);
    }
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    match poll(&mut fds, Some(&timespec(left))) {
        Ok(0) => Ok(false),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn timespec(span: Duration) -> Timespec {
    Timespec {
        tv_sec: (span.0 / 1_000_000_000) as i64,
        tv_nsec: (span.0 % 1_000_000_000) as _,
    }
}
