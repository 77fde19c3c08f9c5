// SPDX-License-Identifier: Apache-2.0
//! The pieces that a daemon that died has left in lanes: read, matched with files, and given to the
//! core.
//!
//! Nothing is guessed. A table that another version wrote, or that is damaged, keeps the daemon
//! from starting, with the ways out. Pieces that cannot be written yet are kept: see
//! [`crate::kept`].

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
/// A daemon that is told to stop writes for so long at most what it has; the rest is left for the
/// next.
pub(super) const DRAIN_MAX: Duration = Duration::from_s(80);

/// The same, where nothing that it tries is taken: somebody has to do something about those files,
/// or their disk.
pub(super) const VAIN_MAX: Duration = Duration::from_s(20);

/// A sentence about a lane that cannot be used, with the ways out.
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
    /// Give the core what lanes hold, as far as its files can be had. Before anybody is let in.
    ///
    /// Errors   a lane that cannot be read.
    pub(crate) fn recover(&mut self) -> Result<(), ServeError> {
        let Some(lanes) = &mut self.lanes else {
            return Ok(());
        };
        let left = lanes.take_over()?;
        self.kept = by_file(left);
        let started = clock::now();
        let (count, bytes, file_count) = self.kept_sums();
        for (device, inode) in self.kept_keys() {
            // Nothing is cut off behind the end of a file that is to have bytes there.
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
                // Then we hold it ourselves: requests of ours that outlive us are not seen by the
                // next daemon.
                self.ring_lock_kept = Some(file);
            }
        }
    }

    // ---- Stopping ----

    /// True when nothing that was acknowledged is ours alone any more.
    pub(super) fn is_drained(&self) -> bool {
        self.lanes.as_ref().is_none_or(|lanes| {
            lanes.is_empty() && lanes.facts.count_without(&self.kept_keys()) == 0
        }) && !self.is_giving_back
    }

    /// Put everybody out and write what there is.
    pub(super) fn start_draining(&mut self) {
        self.drain_moved = clock::now();
        self.drain_end = self.drain_moved + DRAIN_MAX;
        // A client that comes now is told that nobody is here, and not kept waiting.
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
        // Also if nothing is to be written: a session that stays would write on while others, who
        // are told that nobody is here, read its files plainly.
        let sessions: Vec<SessionId> = self.sessions.doors.keys().copied().collect();
        for session in sessions {
            self.end_session(session, &rushes_shm::PeerError::Closed);
        }
    }
}

/// The file whose lock says that some ring still has requests under way.
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
