// SPDX-License-Identifier: Apache-2.0
//! Doors that are connected: those that have said who they are, and those that have not yet.

use crate::share::ServedShare;
use rushes_core::format::door;
use rushes_core::units::{FilePart, HandleId, Instant, LaneId, PoolNumber, SessionId};
use rushes_shm::server::{Newcomer, ServerSession};
use rushes_sys::PollId;
use rushes_sys::space::Allows;
use std::collections::HashMap;
use std::sync::Arc;

/// Doors that may be silent at once before they have said who they are.
pub(crate) const NEWCOMER_COUNT_MAX: usize = 64;

/// An open handle of a door.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenHandle {
    /// Number of its opening.
    pub(crate) opening: u64,
    pub(crate) found: IsFound,
    /// Which part of its file it has.
    pub(crate) part: FilePart,
    /// The access that the client's own descriptor allows.
    pub(crate) allows: Allows,
}

/// Whether it is known what file a handle is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IsFound {
    Yes,
    NotYet,
    /// Nor is it when the door closes it. That it was opened is heard of all the same, and then
    /// that it is closed: of frames that the kernel has in its cache nothing else is.
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
    /// Where it writes.
    pub(crate) lane: Option<LaneId>,
    /// Answers were given since its bell was last thought of.
    pub(crate) to_flush: bool,
    /// It had more to say than one turn hears.
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

/// Somebody at the socket who has not spoken.
pub(crate) struct Guest {
    pub(crate) newcomer: Newcomer,
    pub(crate) poll: PollId,
    pub(crate) leave_at: Instant,
}

/// Everybody.
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

    /// When the next guest has been silent too long.
    pub(crate) fn next_leave(&self) -> Instant {
        self.guests
            .values()
            .map(|guest| guest.leave_at)
            .min()
            .unwrap_or(Instant::NEVER)
    }
}
