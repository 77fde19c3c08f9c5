// SPDX-License-Identifier: Apache-2.0
//! Doors that are connected: sessions, and sockets whose CONNECT has not come yet.

use crate::share::ServedShare;
use rushes_core::format::door;
use rushes_core::units::{FilePart, HandleId, Instant, LaneId, PoolNumber, SessionId};
use rushes_shm::server::{Newcomer, ServerSession};
use rushes_sys::PollId;
use rushes_sys::space::Allows;
use std::collections::HashMap;
use std::sync::Arc;

/// Sockets without a CONNECT that may be open at a time.
pub(crate) const NEWCOMER_COUNT_MAX: usize = 64;

/// An open handle of a door.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenHandle {
    /// Number of its opening.
    pub(crate) opening: u64,
    pub(crate) found: IsFound,
    /// The part of its file that it is.
    pub(crate) part: FilePart,
    /// The access that the client's own descriptor allows.
    pub(crate) allows: Allows,
}

/// Whether the file of a handle is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IsFound {
    Yes,
    NotYet,
    /// The door has closed it meanwhile. The core still gets its opening, and then its close: of
    /// frames in the kernel's cache it gets nothing else.
    NotYetAndClosed,
}

/// A connected door.
pub(crate) struct DoorSession {
    pub(crate) session: ServerSession,
    pub(crate) share: Arc<ServedShare>,
    pub(crate) user: String,
    pub(crate) client: String,
    pub(crate) door: u32,
    /// It is a pool's door, in one of its sessions.
    pub(crate) pool: Option<PoolNumber>,
    pub(crate) polls: [PollId; 2],
    /// Open handles.
    pub(crate) handles: HashMap<HandleId, OpenHandle>,
    /// The lane for its writes.
    pub(crate) lane: Option<LaneId>,
    /// It has got answers since they were last flushed.
    pub(crate) to_flush: bool,
    /// Its ring had more requests than one turn reads.
    pub(crate) to_hear: bool,
}

impl DoorSession {
    pub(crate) fn door_name(&self) -> &'static str {
        match self.door {
            door::SMB => "smb",
            door::FUSE => "fuse",
            door::LOCAL => "local",
            _ => "unknown",
        }
    }
}

/// A socket without a CONNECT.
pub(crate) struct Guest {
    pub(crate) newcomer: Newcomer,
    pub(crate) poll: PollId,
    pub(crate) leave_at: Instant,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Sessions {
    pub(crate) doors: HashMap<SessionId, DoorSession>,
    pub(crate) guests: HashMap<u32, Guest>,
    next_session: u32,
    next_guest: u32,
    next_opening: u64,
}

impl Sessions {
    /// A number that no session has and none had lately.
    pub(crate) fn unused(&mut self) -> SessionId {
        loop {
            self.next_session = self.next_session.wrapping_add(1);
            let id = SessionId(self.next_session);
            if !self.doors.contains_key(&id) {
                return id;
            }
        }
    }

    pub(crate) fn unused_guest(&mut self) -> u32 {
        loop {
            self.next_guest = self.next_guest.wrapping_add(1) & 0x00ff_ffff;
            if !self.guests.contains_key(&self.next_guest) {
                return self.next_guest;
            }
        }
    }

    /// A number for one opening of one handle.
    pub(crate) fn opening(&mut self) -> u64 {
        self.next_opening += 1;
        self.next_opening
    }

    /// Whether a process has a session, and so reports its own changes.
    pub(crate) fn has_process(&self, pid: i32) -> bool {
        self.doors
            .values()
            .any(|door| door.session.peer().pid == pid)
    }

    /// When the patience with the next guest ends.
    pub(crate) fn next_leave(&self) -> Instant {
        self.guests
            .values()
            .map(|guest| guest.leave_at)
            .min()
            .unwrap_or(Instant::NEVER)
    }
}
