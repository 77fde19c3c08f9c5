// SPDX-License-Identifier: Apache-2.0
//! Reads the pieces that a dead daemon left in lanes, matches them with files, and gives them to
//! the core.
//!
//! It guesses nothing. If a table is damaged or of another version, the daemon does not start, and
//! its error names the remedies. Pieces that cannot be written yet are kept: see [`crate::kept`].

use crate::doctor::counted;
use crate::error::ServeError;
use crate::event_loop::Daemon;
use crate::kept::by_file;
use rushes_core::format::facts::reserved_mark;
use rushes_core::format::lane::HeadFault;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_shm::lane::LaneFault;
use rushes_sys::{SysError, clock};
use rustix::fs::{FlockOperation, flock};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// How often the lock of a former daemon's ring is tried.
pub(super) const RING_LOOK: Duration = Duration::from_ms(10);
/// A daemon that stops writes the data in its lanes for so long at most, and leaves the rest for
/// the next one.
pub(super) const DRAIN_MAX: Duration = Duration::from_s(80);

/// The same bound if all its writes fail: an operator has to repair those files, or their disk.
pub(super) const VAIN_MAX: Duration = Duration::from_s(20);

/// A sentence about a lane that cannot be used, with the remedies.
pub(crate) fn lane_error(folder: &Path, lane: LaneId, fault: LaneFault) -> ServeError {
    let what = match fault {
        LaneFault::Sys(error) => return ServeError::System(error),
        LaneFault::Head(HeadFault::Version(version)) => format!(
            "its table is of version {version}; expected {}: start the release that wrote it, \
             which then writes its data",
            rushes_core::format::lane::VERSION
        ),
        LaneFault::Head(HeadFault::Magic(magic)) => {
            format!("its table begins with {magic:#018x}, which no release of Rushes writes")
        }
        LaneFault::Head(HeadFault::Damaged) => String::from("the head of its table is damaged"),
        LaneFault::Record {
            what,
            record,
            damage,
        } => format!("record {record} of a {what} is damaged: {damage}"),
    };
    ServeError::Lane {
        folder: folder.to_path_buf(),
        lane: lane.0,
        what,
    }
}

impl Daemon {
    /// Give the core the pieces in lanes whose files can be opened. Runs before any session.
    ///
    /// Errors   a lane cannot be read
    pub(crate) fn recover(&mut self) -> Result<(), ServeError> {
        let Some(lanes) = &mut self.lanes else {
            return Ok(());
        };
        let left = lanes.take_over()?;
        self.kept = by_file(left);
        let started = clock::now();
        let (count, bytes, file_count) = self.kept_sums();
        for (device, inode) in self.kept_keys() {
            // Keep the blocks behind the end of a file to which kept bytes may be written.
            if let Some(lanes) = &mut self.lanes {
                lanes.reserved.resume(FileKey { device, inode });
            }
        }
        self.find_kept_first();
        let keys = |file: FileKey| (file.device, file.inode);
        let kept = self.kept_keys();
        let found = self.files.keys().into_iter().map(keys);
        let dirty: HashSet<(u64, u64)> = found.chain(kept).collect();
        if let Some(lanes) = &mut self.lanes {
            let mark = |key: FileKey| (reserved_mark(key.device), key.inode);
            let marks = lanes.reserved.keys().map(mark);
            lanes
                .facts
                .keep_only(&dirty.into_iter().chain(marks).collect());
        }
        self.give_left_back(started);
        if count > 0 {
            tracing::warn!(
                "an earlier daemon left {} of {}, {} MB; they are being written ({} ms)",
                counted(count as usize, "acknowledged write"),
                counted(file_count, "file"),
                bytes / 1_000_000,
                clock::now().since(started).ms()
            );
        }
        for sentence in self.kept_sentences() {
            tracing::error!("{sentence}");
        }
        if self.server.writes().unclaimed_count > 0 {
            tracing::error!("{}", self.unclaimed_sentence());
        }
        Ok(())
    }

    // ---- The former daemon's ring ----

    /// Try the lock that a former daemon's ring holds until the kernel is done with its last
    /// request.
    pub(super) fn look_for_ring(&mut self, now: Instant) {
        let Some(file) = &self.ring_lock else {
            return;
        };
        if now < self.ring_look_at {
            return;
        }
        self.ring_look_at = now + RING_LOOK;
        if flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        self.ring_look_at = Instant::NEVER;
        if let Some(file) = self.ring_lock.take() {
            let file = OwnedFd::from(file);
            if let Err(error) = self.ring.hold(&file) {
                tracing::error!("cannot lock the ring: {error}");
                // Then this process holds the lock: the next daemon does not see those of our
                // requests that outlive us.
                self.ring_lock_kept = Some(file);
            }
        }
    }

    // ---- Stopping ----

    /// True when all acknowledged bytes that can be written are on disk, and no attempt to free
    /// reserved blocks is under way.
    pub(super) fn is_drained(&self) -> bool {
        self.lanes.as_ref().is_none_or(|lanes| {
            lanes.is_empty() && lanes.facts.count_without(&self.kept_keys()) == 0
        }) && !self.is_giving_back
    }

    /// End all sessions and write the data in lanes.
    pub(super) fn start_draining(&mut self) {
        self.drain_moved = clock::now();
        self.drain_end = self.drain_moved + DRAIN_MAX;
        // A door that connects now gets an error at once instead of waiting.
        self.listener = None;
        for (_, guest) in self.sessions.guests.drain() {
            self.ring.poll_remove(guest.poll);
        }
        let policy = Policy {
            write_age: Duration::ZERO,
            ..self.config.policy.clone()
        };
        self.feed(Event::PolicyChanged(policy));
        self.feed(Event::Stopping);
        // Also if there is nothing to write: a session that stays would go on writing while other
        // doors, which find no daemon, do plain I/O on its files.
        let sessions: Vec<SessionId> = self.sessions.doors.keys().copied().collect();
        for session in sessions {
            self.end_session(session, &rushes_shm::PeerError::Closed);
        }
    }
}

/// The file that is locked while some ring still has requests under way.
pub(crate) fn ring_lock(folder: &Path) -> Result<File, SysError> {
    let path = folder.join("ring.lock");
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|error: io::Error| SysError::new("open", path.display().to_string(), error))
}
