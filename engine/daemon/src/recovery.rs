// SPDX-License-Identifier: Apache-2.0
//! What a daemon that died has left in lanes: read, matched with files, and given to the core.
//!
//! Nothing is guessed. A table that another version wrote, or that is damaged, keeps the daemon from starting, with the ways out; a lane of a file
//! system that is not served now is left as it is until it is.

use crate::error::ServeError;
use crate::event_loop::Daemon;
use crate::files::Durable;
use crate::jobs::{Found, Looked};
use crate::lanes::{Lanes, Left, LeftPiece};
use crate::share::{ServedShare, Share};
use rushes_core::format::facts::reserved_mark;
use rushes_core::format::lane::{FileRecord, HeadFault, State};
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_core::write::Runs;
use rushes_shm::Writer;
use rushes_shm::lane::LaneFault;
use rushes_sys::file::{PrivateFile, status};
use rushes_sys::{SysError, clock, extents, space};
use rustix::fs::{FlockOperation, flock};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// How often the lock of a former daemon's ring is tried.
pub(super) const RING_LOOK: Duration = Duration::from_ms(10);
/// A daemon that is told to stop writes for so long at most what it has; the rest is left for the next.
pub(super) const DRAIN_MAX: Duration = Duration::from_s(80);

/// A sentence about a lane that cannot be used, with the ways out.
pub(crate) fn lane_error(folder: &Path, lane: LaneId, fault: LaneFault) -> ServeError {
    let what = match fault {
        LaneFault::Sys(error) => return ServeError::System(error),
        LaneFault::Head(HeadFault::Version(version)) => format!(
            "its table is of version {version}; expected {}: start the release that wrote it, which writes what it holds",
            rushes_core::format::lane::VERSION
        ),
        LaneFault::Head(HeadFault::Magic(magic)) => {
            format!("its table begins with {magic:#018x}, which none of ours does")
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

/// By what file systems are known again, with an open folder on each.
struct FileSystems(Vec<([u8; 16], OwnedFd, usize)>);

impl FileSystems {
    fn of(shares: &[Arc<ServedShare>]) -> FileSystems {
        let known = shares.iter().enumerate().filter_map(|(index, served)| {
            let root = served.share.readable_root().ok()?;
            let id = space::file_system_id(&root).ok()?;
            Some((id, root, index))
        });
        FileSystems(known.collect())
    }

    fn find(&self, file: &FileRecord) -> Option<&([u8; 16], OwnedFd, usize)> {
        self.0.iter().find(|(id, _, _)| *id == file.file_system)
    }
}

impl Daemon {
    /// Give the core what lanes hold. Before anybody is let in.
    ///
    /// Errors   a lane that cannot be read.
    pub(crate) fn recover(&mut self) -> Result<(), ServeError> {
        let Some(lanes) = &mut self.lanes else {
            return Ok(());
        };
        let left = lanes.take_over()?;
        let systems = FileSystems::of(&self.shares);
        let mut pieces: Vec<(LaneId, LeftPiece)> = Vec::new();
        for lane in left {
            pieces.extend(self.recover_lane(lane, &systems));
        }
        pieces.sort_unstable_by_key(|(_, piece)| piece.piece.order);
        let started = clock::now();
        let (mut bytes, count) = (0, pieces.len());
        let mut files: HashMap<(u64, u64), Option<FileFacts>> = HashMap::new();
        let mut found: Vec<(LaneId, LeftPiece, FileFacts)> = Vec::with_capacity(count);
        for (lane, left) in pieces {
            let identity = (left.file.device, left.file.inode);
            let facts = files
                .entry(identity)
                .or_insert_with(|| self.find_again(&left.file, &systems))
                .clone();
            let Some(facts) = facts else {
                // Nobody can read it any more: it had no name, and who had it open is gone.
                if let Some(lanes) = &mut self.lanes {
                    lanes.discard(lane, left.record);
                }
                continue;
            };
            bytes += left.piece.range.length.0;
            self.claim_piece(lane, &left, facts.file);
            found.push((lane, left, facts));
        }
        // Only now: a piece that is struck at once must not take the name of a file from those that follow.
        for (lane, left, facts) in found {
            self.recover_piece(lane, &left, facts);
        }
        self.feed(Event::RecoveryEnded);
        let unclaimed = self.server.writes().unclaimed_count;
        if unclaimed > 0 {
            let note = format!(
                "{unclaimed} writes that a former daemon left contradict others: they are left where they are; \
                 look at them with: rushes recover --list"
            );
            tracing::error!("{note}");
            self.notes.push(note);
        }
        let dirty: HashSet<(u64, u64)> = files
            .iter()
            .filter(|(_, facts)| facts.is_some())
            .map(|(file, _)| *file)
            .collect();
        if let Some(lanes) = &mut self.lanes {
            let mark = |key: FileKey| (reserved_mark(key.device), key.inode);
            let marks = lanes.reserved.keys().map(mark);
            lanes
                .facts
                .keep_only(&dirty.iter().copied().chain(marks).collect());
            for &(device, inode) in &dirty {
                // Given back when all of it is written, and nobody has it open through us.
                lanes.reserved.resume(FileKey { device, inode });
            }
        }
        self.give_left_back(started);
        if count > 0 {
            tracing::warn!(
                "a daemon that ended left {count} writes of {} files, {} MB, in lanes; they are being written ({} ms)",
                files.len(),
                bytes / 1_000_000,
                clock::now().since(started).ms()
            );
        }
        Ok(())
    }

    /// Tell the core of a lane. Its pieces; none when its files are on a file system that is not served now.
    fn recover_lane(&mut self, lane: Left, systems: &FileSystems) -> Vec<(LaneId, LeftPiece)> {
        let strange = lane
            .pieces
            .iter()
            .find(|left| systems.find(&left.file).is_none());
        if let Some(strange) = strange {
            let note = format!(
                "lane {} holds {} writes for a file system that no share is on now (it was device {}:{}): they are kept; \
                 mount it and restart; or stop the daemon and throw them away with: rushes recover --give-up {} --yes",
                lane.lane.0,
                lane.pieces.len(),
                rustix::fs::major(strange.file.device),
                rustix::fs::minor(strange.file.device),
                lane.lane.0
            );
            tracing::error!("{note}");
            self.notes.push(note);
            if let Some(lanes) = &mut self.lanes {
                lanes.set_aside(lane.lane);
            }
            return Vec::new();
        }
        self.feed(Event::LaneAdded {
            lane: lane.lane,
            session: None,
            page_count: lane.page_count,
            record_count: Lanes::record_count(),
        });
        lane.pieces
            .into_iter()
            .map(|piece| (lane.lane, piece))
            .collect()
    }

    fn claim_piece(&mut self, lane: LaneId, left: &LeftPiece, id: FileId) {
        if let Some(written) = self
            .files
            .get_mut(id)
            .and_then(|file| file.written.as_mut())
        {
            written.changed_ns = written.changed_ns.max(left.piece.changed_ns);
        }
        if let Some(lanes) = &mut self.lanes {
            lanes.recovered(lane, left.record, left.piece.file, id);
        }
    }

    fn recover_piece(&mut self, lane: LaneId, left: &LeftPiece, facts: FileFacts) {
        let runs = match left.state {
            State::Spent => Runs::default(),
            _ => left.piece.runs,
        };
        self.feed(Event::Recovered {
            lane,
            record: left.record,
            facts,
            range: left.piece.range,
            runs,
        });
    }

    /// The file that a record names. None: there is none any more.
    fn find_again(&mut self, record: &FileRecord, systems: &FileSystems) -> Option<FileFacts> {
        let (_, root, index) = systems.find(record)?;
        let handle = record.handle.get(..record.handle_bytes as usize)?;
        let opened = space::open_by_handle(root, record.handle_kind, handle);
        let (fd, written) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!(
                    "inode {} of device {} is gone with what was written to it: {error}",
                    record.inode,
                    record.device
                );
                return None;
            }
        };
        let found = status(&*fd).ok()?;
        let durable = Durable {
            key: found.key,
            file_system: record.file_system,
            handle_kind: record.handle_kind,
            handle: handle.into(),
            writer: Writer {
                uid: record.uid,
                gid: record.gid,
            },
        };
        let share = self.shares.get(*index)?.share.clone();
        let path = path_below(&share, &fd);
        let places = extents::of(&*fd, usize::MAX)
            .map(|map| map.extents)
            .unwrap_or_default();
        let found = Found {
            looked: Looked::Writable(Box::new((written, durable))),
            file: PrivateFile {
                fd,
                direct: true,
                status: found,
            },
            extents: places,
        };
        Some(self.adopt(found, &share, &path, None))
    }

    // ---- The former daemon's ring ----

    /// Try the lock that a former daemon's ring holds until the kernel is done with its last request.
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
                tracing::error!("the ring cannot hold its lock: {error}");
                // Then we hold it ourselves: requests of ours that outlive us are not seen by who comes next.
                self.ring_lock_kept = Some(file);
            }
        }
    }

    // ---- Stopping ----

    /// True when nothing that was acknowledged is ours alone any more.
    pub(super) fn is_drained(&self) -> bool {
        self.lanes
            .as_ref()
            .is_none_or(|lanes| lanes.is_empty() && lanes.facts.count() == 0)
            && !self.is_giving_back
    }

    /// Put everybody out and write what there is.
    pub(super) fn start_draining(&mut self) {
        self.drain_end = clock::now() + DRAIN_MAX;
        // Who comes now is told that nobody is here, and not kept waiting.
        self.listener = None;
        if self.is_drained() {
            return;
        }
        let policy = Policy {
            write_age: Duration::ZERO,
            ..self.config.policy.clone()
        };
        self.feed(Event::PolicyChanged(policy));
        let sessions: Vec<SessionId> = self.sessions.seats.keys().copied().collect();
        for session in sessions {
            self.end_session(session, &rushes_shm::PeerError::Closed);
        }
    }
}

/// Below a share's root, as far as the kernel says.
fn path_below(share: &Share, fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let Ok(path) = link else {
        return String::new();
    };
    path.strip_prefix(&share.real)
        .unwrap_or(&path)
        .to_string_lossy()
        .into_owned()
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
