// SPDX-License-Identifier: Apache-2.0
//! The loop: turns everything that happens into an event for the core, and carries out the core's
//! actions.
//!
//! One thread, one ring, no waiting but in `submit_and_wait`. It decides nothing about reads,
//! caches or deadlines: that is `rushes_core::server`. Work that may wait for a disk is a job for
//! the workers; questions of a person come through the desk.
//!
//! A turn: wait → turn completions into events → read the rings that had more requests → answer and
//! ring → set the timer. Events that arise while actions are carried out queue in `pending`, so
//! that [`Server::step`] is never entered twice.

use crate::config::Config;
use crate::desk::{Desk, Question, unmeasured};
use crate::device::Devices;
use crate::files::{Chore, Files, Headers};
use crate::foreign::{self, Counters, Foreign};
use crate::jobs::{Done, Job};
use crate::kept::KeptFile;
use crate::lag::Lag;
use crate::lanes::Lanes;
use crate::moves::{Moves, trouble_of};
use crate::recovery::VAIN_MAX;
use crate::remembered::Keeper;
use crate::reports::Reports;
use crate::sessions::Sessions;
use crate::share::{ServedShare, Share};
use crate::signals::Signals;
use crate::visitors::Crowd;
use crate::wanted::Wants;
use crate::warm::{self, Idleness};
use crate::worker::{Urgency, Workers};
use crate::writing::WaitingWrite;
use rushes_control::Answer;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_shm::PeerError;
use rushes_shm::server::{Listener, ReplyBody};
use rushes_sys::watch::ChangeWatch;
use rushes_sys::{Completion, PollId, Ring, Segment, SlotRead, SysError, clock};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

/// How often the loop reads the rings of sessions with pinned slots, so that a door need not ring
/// to unpin them.
const SWEEP: Duration = Duration::from_ms(5);
/// How often doors get a sign of life.
const BEAT: Duration = Duration::from_s(1);
/// A longer standstill has another cause than a busy machine. Less than RUSHES_SILENT_MS of
/// doors/smb: whenever a door may have taken us for hung, we must know it.
const STALL: Duration = Duration::from_s(3);
/// EAGAIN: no room now; a retry may succeed.
pub(super) const AGAIN: Errno = Errno(11);
/// Reasons for not serving a file that are logged once each; more are only counted.
const SAID_COUNT_MAX: usize = 256;

/// Tags of descriptors that the ring watches: the kind in the upper byte, a number below.
pub(super) mod tag {
    pub(crate) const LISTENER: u64 = 1 << 56;
    pub(crate) const GUEST: u64 = 2 << 56;
    pub(crate) const SOCKET: u64 = 3 << 56;
    pub(crate) const BELL: u64 = 4 << 56;
    pub(crate) const WORKERS: u64 = 5 << 56;
    pub(crate) const DESK: u64 = 6 << 56;
    pub(crate) const SIGNALS: u64 = 7 << 56;
    pub(crate) const CHANGES: u64 = 8 << 56;
    pub(crate) const KIND: u64 = 0xff << 56;
}

/// The daemon while it runs.
pub(crate) struct Daemon {
    pub(super) config: Arc<Config>,
    pub(super) limits: Limits,
    pub(super) server: Server,
    pub(super) segment: Arc<Segment>,
    pub(super) ring: Ring,
    /// None: it only recovers.
    pub(super) listener: Option<Listener>,
    pub(super) desk: Desk,
    pub(super) signals: Signals,
    pub(super) workers: Workers<Job, Done>,
    pub(super) changes: Option<ChangeWatch>,
    pub(super) shares: Vec<Arc<ServedShare>>,
    pub(super) moves: Moves,
    pub(super) devices: Devices,
    pub(super) files: Files,
    pub(super) headers: Headers,
    pub(super) sessions: Sessions,
    pub(super) wants: Wants,
    pub(super) lag: Lag,
    pub(super) counts: Counts,
    pub(super) started: Instant,
    /// In words, for status.
    pub(super) priority: String,
    /// For status: notes for the operator.
    pub(super) notes: Vec<String>,
    pub(super) locked: bool,
    pub(super) pending: VecDeque<Event>,
    actions: Actions,
    /// Reads that the ring had no room for.
    backlog: VecDeque<(IoRead, Vec<SlotIndex>)>,
    pub(super) in_flight: HashMap<IoId, InFlight>,
    /// None: there is no write buffer; doors write past the daemon.
    pub(super) lanes: Option<Lanes>,
    /// Writes that the ring had no room for.
    pub(super) write_backlog: VecDeque<WaitingWrite>,
    /// The lock of a former daemon's ring, until it is ours: no write is sent before.
    pub(super) ring_lock: Option<File>,
    pub(super) ring_lock_kept: Option<OwnedFd>,
    pub(super) ring_look_at: Instant,
    /// Files of a former daemon that cannot be written yet, by the number of the oldest write of
    /// each.
    pub(super) kept: BTreeMap<u64, KeptFile>,
    /// When to look for them again.
    pub(super) look_at: Instant,
    pub(super) is_looking: bool,
    pub(super) looks_at_end: bool,
    /// When a stop no longer waits for data that is not on disk yet.
    pub(super) drain_end: Instant,
    /// While it stops: the smallest amount that was left to write, and since when. Units: bytes and
    /// files.
    pub(super) drain_left: u64,
    pub(super) drain_moved: Instant,
    /// When a request last failed.
    pub(super) failed_at: Instant,
    /// Device numbers of file systems on which a request failed.
    pub(super) failed_disks: HashSet<u64>,
    /// It only writes the data of an earlier daemon and then ends.
    pub(super) only_recovers: bool,
    /// When to try to free blocks that an earlier use left reserved.
    pub(super) give_back_at: Instant,
    pub(super) is_giving_back: bool,
    pub(super) gives_back_at_end: bool,
    /// Chores that the workers had no room for.
    pub(super) deferred_chores: Vec<(FileId, Chore)>,
    pub(super) to_expel: Vec<(SessionId, PeerError)>,
    pub(super) to_flush: Vec<SessionId>,
    pub(super) to_hear: Vec<SessionId>,
    core_wake: Instant,
    sweep_at: Instant,
    /// The latest time of the next turn.
    due: Instant,
    /// Load of others on each device, and the time of the next sample.
    foreign: HashMap<DeviceId, Foreign>,
    sample_at: Instant,
    /// When doors get the next sign of life.
    beat_at: Instant,
    /// When the listener is watched again.
    pub(super) accept_at: Instant,
    pub(super) crowd: Crowd,
    /// None: the listener is not watched now.
    pub(super) listener_poll: Option<PollId>,
    /// For the threads that read names and extents in idle time.
    idleness: Arc<Idleness>,
    /// Files whose stat found no room at the workers; queued again when a job ends.
    pub(super) deferred_stats: Vec<FileId>,
    /// The same for reads of headers.
    pub(super) deferred_headers: Vec<(FileId, ByteCount)>,
    pub(super) reports: Reports,
    /// For the file of rehearsal.
    pub(super) keeper: Keeper,
    /// Reasons for not serving a file that were logged.
    pub(super) said: HashSet<String>,
    /// Askers that wait for the end of a reload.
    pub(super) reload_askers: Vec<SyncSender<Answer>>,
    pub(super) reloading: bool,
    /// Why the last reload failed.
    pub(super) reload_error: Option<String>,
    pub(super) stopping: bool,
    /// Slots that the current step could not fill.
    pub(super) unfilled: Vec<SlotIndex>,
}

/// A request that the ring has.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) file: FileId,
    pub(super) range: ByteRange,
    /// For a write past the kernel's cache: its descriptor.
    pub(super) writes_by: Option<Arc<OwnedFd>>,
    /// For a read through the kernel's cache: a page of the range was dirty.
    pub(super) is_unwritten: bool,
}

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) refused: u64,
    pub(crate) expelled: u64,
    pub(crate) plain: u64,
    /// Writes that were granted pages of a lane, but for which there was no memory.
    pub(crate) ungranted: u64,
}

/// The parts that [`Daemon::new`] is made of.
pub(crate) struct Parts {
    pub(crate) config: Config,
    pub(crate) limits: Limits,
    pub(crate) segment: Arc<Segment>,
    pub(crate) ring: Ring,
    pub(crate) desk: Desk,
    pub(crate) signals: Signals,
    pub(crate) workers: Workers<Job, Done>,
    pub(crate) changes: Option<ChangeWatch>,
    pub(crate) priority: String,
    pub(crate) notes: Vec<String>,
    pub(crate) locked: bool,
    pub(crate) lanes: Option<Lanes>,
    pub(crate) ring_lock: Option<File>,
    pub(crate) only_recovers: bool,
}

impl Daemon {
    pub(crate) fn new(parts: Parts) -> Daemon {
        let has_ring_lock = parts.ring_lock.is_some();
        Daemon {
            server: Server::new(parts.limits.clone(), parts.config.policy.clone()),
            config: Arc::new(parts.config),
            limits: parts.limits,
            segment: parts.segment,
            ring: parts.ring,
            listener: None,
            desk: parts.desk,
            signals: parts.signals,
            workers: parts.workers,
            changes: parts.changes,
            shares: Vec::new(),
            moves: Moves::new(),
            devices: Devices::default(),
            files: Files::default(),
            headers: Headers::default(),
            sessions: Sessions::default(),
            wants: Wants::default(),
            lag: Lag::new(),
            counts: Counts::default(),
            started: clock::now(),
            priority: parts.priority,
            notes: parts.notes,
            locked: parts.locked,
            pending: VecDeque::new(),
            actions: Actions::default(),
            backlog: VecDeque::new(),
            in_flight: HashMap::new(),
            lanes: parts.lanes,
            write_backlog: VecDeque::new(),
            deferred_chores: Vec::new(),
            give_back_at: Instant::ZERO,
            is_giving_back: false,
            gives_back_at_end: true,
            ring_lock: parts.ring_lock,
            ring_lock_kept: None,
            ring_look_at: match has_ring_lock {
                true => Instant::ZERO,
                false => Instant::NEVER,
            },
            kept: BTreeMap::new(),
            look_at: Instant::NEVER,
            is_looking: false,
            looks_at_end: true,
            drain_end: Instant::NEVER,
            drain_left: u64::MAX,
            drain_moved: Instant::ZERO,
            failed_at: Instant::ZERO,
            failed_disks: HashSet::new(),
            only_recovers: parts.only_recovers,
            to_expel: Vec::new(),
            to_flush: Vec::new(),
            to_hear: Vec::new(),
            core_wake: Instant::NEVER,
            sweep_at: Instant::NEVER,
            due: Instant::NEVER,
            foreign: HashMap::new(),
            sample_at: Instant::ZERO,
            beat_at: Instant::NEVER,
            accept_at: Instant::ZERO,
            crowd: Crowd::default(),
            listener_poll: None,
            idleness: Arc::default(),
            deferred_stats: Vec::new(),
            deferred_headers: Vec::new(),
            reports: Reports::default(),
            keeper: Keeper::default(),
            said: HashSet::new(),
            reload_askers: Vec::new(),
            reloading: false,
            reload_error: None,
            stopping: false,
            unfilled: Vec::new(),
        }
    }

    /// The device of a share; a new one goes to the core and into the log.
    pub(super) fn device_of(&mut self, share: &Share, model: Option<DeviceModel>) -> DeviceId {
        let (device, new) = self.devices.add(share, |_| model);
        if new && let Some(known) = self.devices.get(device) {
            tracing::info!(
                "device {}: {}, positioning {}, {} MB/s",
                known.name,
                known.source.text(),
                known.model.read.fixed,
                known.model.read.rate.0 / 1_000_000
            );
            if known.source.is_guess() && !self.only_recovers {
                tracing::warn!("{}", unmeasured(&known.name, &share.config.path.display()));
            }
            let model = known.model;
            self.feed(Event::DeviceAdded { device, model });
        }
        device
    }

    /// Take the models that `rushes calibrate` has saved since a device was added.
    pub(super) fn devices_measured(
        &mut self,
        measured: Vec<(Arc<Share>, DeviceModel)>,
    ) -> Vec<String> {
        let mut notes = Vec::new();
        // If a disk has several file systems, the first share's measurement counts, as at start.
        let mut done = Vec::new();
        for (share, model) in measured {
            let served = self.shares.iter();
            let mut served = served.filter(|served| Arc::ptr_eq(&served.share, &share));
            let Some(device) = served.next().map(|served| served.device) else {
                continue;
            };
            if done.contains(&device) {
                continue;
            }
            done.push(device);
            if !self.devices.measured(device, model) {
                continue;
            }
            let name = self.device_name(device);
            notes.push(format!(
                "device {name} was measured: positioning {}, {} MB/s; contracts rest on this from \
                 now on",
                model.read.fixed,
                model.read.rate.0 / 1_000_000
            ));
            self.feed(Event::DeviceAdded { device, model });
        }
        notes
    }

    /// Serve a share from now on.
    pub(crate) fn add_share(&mut self, share: Share, model: Option<DeviceModel>) -> Arc<Share> {
        let device = self.device_of(&share, model);
        self.share_is_there(&share.config.name);
        if !share.direct_io {
            let note = format!(
                "share {:?} ({}) lies on {}, which has no direct I/O: it is served buffered",
                share.config.name,
                share.config.path.display(),
                share.file_system
            );
            tracing::warn!("{note}");
            self.notes.push(note);
        }
        tracing::info!(
            "share {:?}: {} ({}, device {})",
            share.config.name,
            share.config.path.display(),
            share.file_system,
            self.devices.get(device).map_or("?", |known| &known.name)
        );
        let (way, reason) = share.way(self.config.write_buffer_bytes);
        tracing::info!("share {:?}: {}", share.config.name, way.sentence(&reason));
        let name = self.device_name(device);
        let home = (share.mount_point.clone(), name.clone());
        let (trouble, home) = trouble_of(&share, &name, &home);
        if let Some(trouble) = &trouble {
            tracing::warn!("{trouble}");
        }
        let share = Arc::new(share);
        self.warm(&share);
        self.shares.push(Arc::new(ServedShare {
            share: share.clone(),
            device,
            trouble,
            is_nowhere: false,
            home,
        }));
        self.look_for_kept_soon();
        share
    }

    /// Start a thread that reads the share's names and extents in idle time.
    pub(super) fn warm(&self, share: &Arc<Share>) {
        if self.config.warm_metadata
            && let Err(error) = warm::start(
                share.clone(),
                self.idleness.clone(),
                self.config.write_buffer_bytes > 0,
            )
        {
            tracing::warn!(
                "cannot start a thread that reads the names of share {:?} ahead: {error}",
                share.config.name
            );
        }
    }

    /// Accept doors from now on.
    pub(crate) fn listen(&mut self, listener: Listener) {
        self.listener = Some(listener);
    }

    /// Watch everything, then serve until told to stop.
    pub(crate) fn run(&mut self) -> Result<(), SysError> {
        let watch = |source| SysError::new("watch descriptors", "event loop", source);
        self.look_out(clock::now());
        self.ring
            .bell_add(self.workers.bell().clone(), tag::WORKERS)
            .map_err(watch)?;
        self.ring
            .bell_add(self.desk.bell().clone(), tag::DESK)
            .map_err(watch)?;
        let signals = self.signals.fd().map_err(watch)?;
        self.ring.poll_add(signals, tag::SIGNALS).map_err(watch)?;
        if let Some(changes) = &self.changes {
            self.ring
                .poll_add(changes.fd().clone(), tag::CHANGES)
                .map_err(watch)?;
        }
        self.stopping |= self.only_recovers;
        // Events of the recovery wait for a timer that is not set yet.
        self.set_timer(clock::now());
        while !self.stopping || !self.drain() {
            if self.to_hear.is_empty() {
                self.ring.submit_and_wait()?;
            } else {
                self.ring.submit()?;
            }
            let start = clock::now();
            self.turn(start);
            self.lag.record(clock::now().since(start));
        }
        self.idleness.stop.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A step of a daemon that stops. True: nothing is left to write, or it has taken too long.
    fn drain(&mut self) -> bool {
        if self.drain_end == Instant::NEVER {
            self.start_draining();
        }
        // The last save goes on beside the rest.
        let is_saving = self.save_at_end();
        if self.is_drained() && !self.look_at_end() && !self.give_back_at_end() && !is_saving {
            return true;
        }
        let now = clock::now();
        // A request in flight may still succeed.
        let writes = self.server.writes();
        let left = writes.used_bytes.0 + u64::from(writes.dirty_file_count);
        if left < self.drain_left {
            (self.drain_left, self.drain_moved) = (left, now);
        }
        let has_failed = self.failed_at > self.drain_moved;
        let is_vain = has_failed && self.in_flight.is_empty() && now >= self.drain_moved + VAIN_MAX;
        let late = now >= self.drain_end || is_vain;
        if late {
            tracing::error!(
                "some acknowledged writes could not be written to their disks; they stay in the \
                 lanes, and the next daemon or `rushes recover` writes them"
            );
        }
        late
    }

    fn turn(&mut self, start: Instant) {
        let late = start.since(self.due);
        if late > STALL {
            self.stood_still(late);
        }
        while let Some(completion) = self.ring.next_completion() {
            self.complete(completion);
        }
        for session in std::mem::take(&mut self.to_hear) {
            if let Some(door) = self.sessions.doors.get_mut(&session) {
                door.to_hear = false;
            }
            self.hear(session);
        }
        if start >= self.sweep_at {
            self.sweep();
        }
        if start >= self.beat_at {
            self.beat_at = Instant::NEVER;
            for door in self.sessions.doors.values() {
                door.session.beat();
            }
            if let Some(lanes) = &mut self.lanes {
                let server = &self.server;
                lanes.give_memory_back(|lane| server.is_lane_unused(lane));
            }
        }
        if start >= self.reports.next() {
            self.changed_without_report(start);
        }
        self.end_late_wants(start);
        if start >= self.sample_at {
            self.sample_at = start + foreign::SAMPLE;
            self.sample_foreign();
            self.look_at_mounts(start);
            self.keep_rehearsal(start);
        }
        self.look_for_ring(start);
        self.give_left_back(start);
        self.look_for_kept(start);
        self.send_backlog();
        self.expel_all();
        for session in std::mem::take(&mut self.to_flush) {
            if let Some(door) = self.sessions.doors.get_mut(&session) {
                door.to_flush = false;
                door.session.flush();
            }
        }
        self.guests_leave(start);
        self.close_unused();
        self.look_out(start);
        self.set_timer(start);
    }

    /// We were stopped, or starved. A door that got no sign of life may have taken us for hung and
    /// changed any file by itself.
    fn stood_still(&mut self, span: Duration) {
        let note = format!(
            "the daemon stood still for {} ms; it reads its cached data again",
            span.ms()
        );
        tracing::error!("{note}");
        self.everything_may_have_changed();
    }

    fn complete(&mut self, completion: Completion) {
        match completion {
            Completion::Read { user_data, result } => self.read_done(IoId(user_data), result),
            Completion::Written { user_data, result } => self.write_done(IoId(user_data), result),
            Completion::Timer => {
                if clock::now() >= self.core_wake {
                    self.core_wake = Instant::NEVER;
                    self.feed(Event::Timer);
                }
            }
            Completion::Bell { user_data } | Completion::Ready { user_data, .. } => {
                let number = user_data & !tag::KIND;
                match user_data & tag::KIND {
                    tag::LISTENER => self.accept(),
                    tag::GUEST => self.guest_speaks(number as u32),
                    tag::SOCKET => {
                        let session = SessionId(number as u32);
                        if let Some(door) = self.sessions.doors.get_mut(&session) {
                            door.session.socket_ready();
                        }
                        self.hear(session);
                    }
                    tag::BELL => self.hear(SessionId(number as u32)),
                    tag::WORKERS => self.jobs_done(),
                    tag::DESK => self.questions(),
                    tag::SIGNALS => self.signalled(),
                    tag::CHANGES => self.changed_by_others(),
                    _ => {}
                }
            }
        }
    }

    // ---- The core ----

    /// Give the core an event, and the events that arise from it, and carry out its actions.
    pub(super) fn feed(&mut self, event: Event) {
        self.pending.push_back(event);
        let mut actions = std::mem::take(&mut self.actions);
        while let Some(event) = self.pending.pop_front() {
            actions.clear();
            self.server.step(clock::now(), event, &mut actions);
            for action in &actions.list {
                self.carry_out(action, &actions);
            }
            for slot in self.unfilled.drain(..) {
                self.pending.push_front(Event::Unfilled { slot });
            }
        }
        self.actions = actions;
    }

    fn carry_out(&mut self, action: &Action, actions: &Actions) {
        match action {
            Action::Reply {
                session,
                request,
                outcome,
            } => self.reply(*session, *request, *outcome, actions),
            Action::Submit(read) => self.submit(*read, actions.slots_of(read.slots)),
            Action::OpenNeighbour { beside, name } => self.open_neighbour(*beside, name),
            Action::AskPool { pool, path } => self.ask_pool(*pool, path),
            Action::Stat { file } => self.stat(*file),
            Action::ReadHeader { file, size } => self.read_header(*file, *size),
            Action::Forget { file } => self.forget(*file),
            Action::Wake { at } => self.core_wake = *at,
            Action::SubmitWrite(write) => {
                self.submit_write(*write, actions.parts_of(write.parts));
            }
            Action::Fill { slot, offset, from } => self.fill(*slot, *offset, from),
            Action::Zero {
                slot,
                offset,
                length,
            } => self.zero(*slot, *offset, *length),
            Action::Publish {
                lane,
                record,
                file,
                range,
                runs,
                request,
            } => self.publish((*lane, *record), *file, (*range, *runs), *request),
            Action::Spent { lane, record } => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.spent(*lane, *record);
                }
            }
            Action::Strike { lane, record } => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.strike(*lane, *record);
                }
            }
            Action::GiveMemoryBack { lane, run } => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.give_back(*lane, *run);
                }
            }
            Action::LaneDone { lane } => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.done(*lane);
                }
            }
            Action::Known { file, size } => self.make_known(*file, size.0),
            Action::Clean { file } => self.settle(*file),
            Action::Loose { file, is_loose } => self.make_loose_known(*file, *is_loose),
            Action::Reserve {
                file,
                needed,
                wished_end,
            } => self.chore(
                *file,
                Chore::Reserve {
                    needed: *needed,
                    wished_end: *wished_end,
                },
            ),
            Action::Sync { file } => self.sync_file(*file),
            Action::WriteOut { file } => self.write_out(*file),
            Action::Flush { device } => self.flush(*device),
            Action::Trim { file, size } => self.chore(*file, Chore::Trim { size: size.0 }),
        }
    }

    /// True: in the current step some of these slots could not be filled.
    fn has_unfilled(&self, slots: &[SlotIndex]) -> bool {
        slots.iter().any(|slot| self.unfilled.contains(slot))
    }

    fn reply(&mut self, id: SessionId, request: RequestId, outcome: Outcome, actions: &Actions) {
        if !self.sessions.doors.contains_key(&id) {
            return;
        }
        let body = match outcome {
            Outcome::Data { slots, .. } if self.has_unfilled(actions.slots_of(slots)) => {
                // The core has pinned them for a client that does not get them.
                self.pending.push_back(Event::ReadEnd {
                    session: id,
                    request,
                });
                ReplyBody::Failed(Errno::IO)
            }
            Outcome::Data {
                slots,
                first_offset,
                length,
            } => ReplyBody::Data {
                slots: actions.slots_of(slots),
                first_offset,
                length,
            },
            Outcome::Done => ReplyBody::Done,
            Outcome::Failed(errno) => ReplyBody::Failed(errno),
            Outcome::Plain => ReplyBody::Plain,
            Outcome::Granted {
                runs,
                first_offset,
                length,
                record,
            } => self.grant(id, request, record, (runs, first_offset, length)),
        };
        let Some(door) = self.sessions.doors.get_mut(&id) else {
            return;
        };
        match door.session.reply(request, body) {
            Ok(()) if !door.to_flush => {
                door.to_flush = true;
                self.to_flush.push(id);
            }
            Ok(()) => {}
            // Expel it later: the core is in the middle of a step.
            Err(error) => self.to_expel.push((id, error)),
        }
    }

    fn submit(&mut self, read: IoRead, slots: &[SlotIndex]) {
        self.idleness.busy.store(true, Ordering::Relaxed);
        if !self.backlog.is_empty() {
            self.backlog.push_back((read, slots.to_vec()));
            return;
        }
        if !self.try_submit(&read, slots) {
            self.backlog.push_back((read, slots.to_vec()));
        }
    }

    /// False: the ring is full.
    fn try_submit(&mut self, read: &IoRead, slots: &[SlotIndex]) -> bool {
        let (Some((fd, is_unwritten)), Some(file)) =
            (self.reads_by(read), self.files.get(read.file))
        else {
            tracing::error!(
                "the core asked for a read of file {}, which is not open; expected an open file",
                read.file.0
            );
            self.fail_io(read.io, Errno::BAD_HANDLE);
            return true;
        };
        let expected = file
            .size
            .saturating_sub(read.range.start.0)
            .min(read.range.length.0);
        let sent = self.ring.read(&SlotRead {
            file: &fd,
            range: read.range,
            expected: ByteCount(expected),
            slots,
            class: read.class,
            user_data: read.io.0,
        });
        match sent {
            Ok(()) => {
                let about = InFlight {
                    file: read.file,
                    range: read.range,
                    writes_by: None,
                    is_unwritten,
                };
                self.in_flight.insert(read.io, about);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::error!("cannot submit a read of {:?}: {error}", file.path);
                self.fail_io(read.io, Errno::INVALID);
                true
            }
        }
    }

    pub(super) fn fail_io(&mut self, io: IoId, errno: Errno) {
        self.failed_at = clock::now();
        self.pending.push_back(Event::IoDone {
            io,
            result: Err(errno),
        });
    }

    fn send_backlog(&mut self) {
        while let Some((read, slots)) = self.backlog.pop_front() {
            if !self.try_submit(&read, &slots) {
                self.backlog.push_front((read, slots));
                break;
            }
        }
        self.send_write_backlog();
        self.feed_pending();
    }

    /// Events that arose outside of [`Daemon::feed`].
    fn feed_pending(&mut self) {
        if let Some(event) = self.pending.pop_front() {
            self.feed(event);
        }
    }

    fn read_done(&mut self, io: IoId, result: Result<ByteCount, Errno>) {
        let about = self.in_flight.remove(&io);
        if let (Err(errno), Some(InFlight { file, range, .. })) = (result, &about) {
            let file = *file;
            self.disk_failed(file);
            tracing::warn!(
                "a read of {} bytes at {} of {:?} failed: {}",
                range.length.0,
                range.start.0,
                self.files
                    .get(file)
                    .map_or("a closed file", |file| &file.path),
                std::io::Error::from_raw_os_error(errno.0 as i32)
            );
        } else if let Some(about) = about {
            self.look_for_loss(about.file);
            if about.is_unwritten {
                self.feed(Event::MayChange { io });
            }
        }
        self.feed(Event::IoDone { io, result });
    }

    fn open_neighbour(&mut self, beside: FileId, name: &str) {
        let refused = |errno| Event::NeighbourOpened {
            beside,
            name: name.to_string(),
            facts: Err(errno),
        };
        let Some(file) = self.files.get(beside) else {
            self.pending.push_back(refused(Errno::BAD_HANDLE));
            return;
        };
        let job = Job::Neighbour {
            beside,
            share: file.share.clone(),
            path: file.path.clone(),
            key: file.key,
            name: name.to_string(),
        };
        if self.workers.push(Urgency::Ahead, job).is_err() {
            self.pending.push_back(refused(AGAIN));
        }
    }

    pub(super) fn stat(&mut self, id: FileId) {
        let Some(file) = self.files.get(id) else {
            return;
        };
        let job = Job::Stat {
            file: id,
            generation: file.generation,
            fd: file.fd.clone(),
        };
        if self.workers.push(Urgency::Now, job).is_err() {
            self.deferred_stats.push(id);
        }
    }

    fn forget(&mut self, id: FileId) {
        let forgotten = self.files.forget(id);
        if let Some(written) = forgotten.as_ref().and_then(|file| file.written.as_ref())
            && let Some(lanes) = &mut self.lanes
        {
            let FileKey { device, inode } = written.durable.key;
            lanes.facts.let_go(device, inode);
            if lanes.reserved.leave(&written.durable) {
                self.give_left_back_soon();
            }
        }
        if let Some(file) = forgotten
            && file.watched
            && let Some(changes) = &mut self.changes
        {
            changes.unwatch(&*file.fd, file.key);
        }
    }

    fn set_timer(&mut self, now: Instant) {
        if self.sweep_at == Instant::NEVER
            && self
                .sessions
                .doors
                .values()
                .any(|door| door.session.pinned_count() > 0)
        {
            self.sweep_at = now + SWEEP;
        }
        if self.beat_at == Instant::NEVER && !self.sessions.doors.is_empty() {
            self.beat_at = now + BEAT;
        }
        let at = self
            .core_wake
            .min(self.sweep_at)
            .min(self.sample_at)
            .min(self.beat_at)
            .min(self.accept_at)
            .min(self.reports.next())
            .min(self.wants.next())
            .min(self.ring_look_at)
            .min(self.give_back_at)
            .min(self.next_look())
            .min(self.drain_end)
            .min(self.sessions.next_leave());
        self.due = at.max(now);
        self.ring.wake_at(at);
    }

    /// Give the core the load of others on each device since the last sample. Reads of sysfs do not
    /// wait.
    fn sample_foreign(&mut self) {
        let promised = |record: &DeviceRecord| record.contract_count > 0;
        let busy = !self.in_flight.is_empty() || self.server.devices().iter().any(promised);
        self.idleness.busy.store(busy, Ordering::Relaxed);
        // Reads of our own warming threads do not count as others' load: they stop when clients
        // read.
        let walking = !busy && self.idleness.walking_count.load(Ordering::Relaxed) > 0;
        let own: HashMap<DeviceId, u64> = self
            .server
            .devices()
            .iter()
            .map(|record| {
                (
                    record.device,
                    record.bytes.iter().map(|bytes| bytes.0).sum(),
                )
            })
            .collect();
        let mut loads = Vec::new();
        for device in self.devices.all() {
            let Some(facts) = &device.facts else {
                continue;
            };
            let path = format!("/sys/block/{}/stat", facts.disk);
            let counters = std::fs::read_to_string(path).ok();
            let Some(counters) = counters.as_deref().and_then(Counters::parse) else {
                continue;
            };
            // Reads of headers are ours, too. Their bytes are not counted: any change of the sum
            // marks the sample as one with reads of ours.
            let headers = self.headers.begun_count + self.headers.ended_count;
            let own_bytes = own.get(&device.id).copied().unwrap_or(0) + headers;
            let is_reading = self.headers.begun_count > self.headers.ended_count;
            let busy = !self.in_flight.is_empty() || is_reading;
            let load = self.foreign.entry(device.id).or_default().sample(
                counters,
                own_bytes,
                busy,
                foreign::SAMPLE,
            );
            loads.extend(load.filter(|_| !walking).map(|load| (device.id, load)));
        }
        for (device, load) in loads {
            self.feed(Event::ForeignLoad {
                device,
                requests_per_kilosecond: load.requests_per_kilosecond,
                rate: load.rate,
            });
        }
    }

    /// Read the rings of sessions with pinned slots: they may have unpinned some without ringing.
    fn sweep(&mut self) {
        self.sweep_at = Instant::NEVER;
        let holders: Vec<SessionId> = self
            .sessions
            .doors
            .iter()
            .filter(|(_, door)| door.session.pinned_count() > 0)
            .map(|(id, _)| *id)
            .collect();
        for session in holders {
            self.hear(session);
        }
    }

    // ---- Requests of the control socket ----

    fn signalled(&mut self) {
        let wanted = self.signals.take();
        if wanted.reload {
            self.start_reload();
        }
        if wanted.stop {
            tracing::info!("signal to stop received");
            self.stopping = true;
        }
    }

    fn questions(&mut self) {
        while let Some(question) = self.desk.next() {
            self.question(question);
        }
    }

    fn question(&mut self, question: Question) {
        if let Some(answer) = self.answer(question.ask, &question.answer) {
            // The asker may have given up waiting.
            let _ = question.answer.try_send(answer);
        }
    }

    /// Log a warning that would otherwise fill the log.
    pub(super) fn say_once(&mut self, what: String) {
        if self.said.len() < SAID_COUNT_MAX && self.said.insert(what.clone()) {
            tracing::warn!("{what} (said once)");
        }
    }
}
