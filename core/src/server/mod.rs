// SPDX-License-Identifier: Apache-2.0
//! All of the server as one machine: an event in, actions out.
//!
//! [`Server::step`] is total: every event in every state has an answer, it never blocks and never
//! reads a clock. A failure outside arrives as an event. Two drivers exist, the daemon and the
//! simulator; a run is replayed by giving the same events at the same instants.
//!
//! Where to look: [`api`] is the seam.
//!
//! - *Memory:* `state` sessions, handles, files, requests that wait; `device`, `stream`, `pieces`.
//! - *Reads:* `reads` a client's read from arrival to answer; `files` opening, closing, change;
//!   `unused` those that nothing uses; `headers` when the header of a file is read; `flow` how
//!   streams follow their reader; `frames` sequences of one file a frame; `copies` readers that
//!   play nothing; `glances` single frames; `fetch` the requests to the devices; `turns` those
//!   without a contract, `shares` whose turn it is; `gaps` the moments left to others behind them.
//! - *Contracts:* `contracts` admission and refusal; `seats` where contracts go; `layers` files
//!   that are cut together; `kept` those of seats that have nothing open; `clock` when a read is
//!   due.
//! - *Writes:* `writes` a client's write until its grant; `blocks` a full disk; `line` writes that
//!   wait for room; `commits` acknowledgement and the end of pieces; `writeback` their way to the
//!   device, `bridge` over which gaps; `syncs` flushes; `loose` bytes that went through the
//!   kernel's cache.
//! - *Records:* `ledger` for people; `check` whether all of it agrees.

mod api;
#[cfg(test)]
mod block_tests;
mod blocks;
mod bridge;
#[cfg(test)]
mod bridge_tests;
mod check;
#[cfg(test)]
mod check_tests;
mod clock;
mod commits;
mod contracts;
mod copies;
mod device;
mod fetch;
mod files;
mod flow;
mod frames;
mod gaps;
#[cfg(test)]
mod glance_tests;
mod glances;
#[cfg(test)]
mod handout_tests;
#[cfg(test)]
mod header_tests;
mod headers;
mod kept;
#[cfg(test)]
mod kept_tests;
#[cfg(test)]
mod layer_tests;
mod layers;
mod ledger;
#[cfg(test)]
mod ledger_tests;
mod line;
#[cfg(test)]
mod line_tests;
#[cfg(test)]
mod look_tests;
mod loose;
mod pieces;
#[cfg(test)]
mod pool_tests;
#[cfg(test)]
mod promise_tests;
mod reads;
mod rehearsal;
#[cfg(test)]
mod reserve_tests;
#[cfg(test)]
mod seat_tests;
mod seats;
#[cfg(test)]
mod share_tests;
mod shares;
mod slab;
mod state;
mod stream;
mod syncs;
#[cfg(test)]
mod tests;
mod turns;
mod unused;
#[cfg(test)]
mod way_tests;
mod ways;
#[cfg(test)]
mod write_tests;
mod writeback;
mod writes;

pub use api::*;
pub use rehearsal::{RememberedRun, RunPlace, ShareUser};

use crate::cache::Cache;
use crate::sched::{Claim, Order};
use crate::units::*;
use crate::write::{PieceKey, Released};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;
use blocks::ReservedBlocks;
use fetch::Claimant;
use frames::{Folder, Owner, Place};
use rehearsal::Rehearsal;
use slab::Slab;
use state::*;
use writeback::NextWrite;

/// How often the server looks again at devices that could not serve a request.
const LOOK_AGAIN: Duration = Duration::from_ms(20);

/// The server's whole state.
pub struct Server {
    limits: Limits,
    policy: Policy,
    now: Instant,
    cache: Cache,
    sessions: BTreeMap<SessionId, Session>,
    handles: BTreeMap<(SessionId, HandleId), Handle>,
    files: BTreeMap<FileId, File>,
    /// Files that nothing uses, by the number of the use that was their last. Some are used again,
    /// or gone.
    unused: VecDeque<(u64, FileId)>,
    /// Last uses so far.
    unused_count: u64,
    keys: BTreeMap<FileKey, FileId>,
    /// Sessions that are about to change files that the server does not know yet: once it does, it
    /// grants nothing of them before the change is done.
    holds_of_unknown: Vec<(FileKey, SessionId)>,
    devices: BTreeMap<DeviceId, Device>,
    streams: Slab<Stream>,
    reads: Slab<Read>,
    pins: BTreeMap<(SessionId, RequestId), Pinned>,
    /// Sequences, by owner and folder.
    folders: BTreeMap<(Owner, String), Folder>,
    /// Streams that are sequences.
    sequences: BTreeSet<u32>,
    /// Neighbours the driver was asked for, and by which streams, for which frame.
    neighbours: BTreeMap<(Place, String), Vec<(StreamId, u64)>>,
    flights: Slab<Flight>,
    flight_generation: u32,
    lanes: BTreeMap<LaneId, LaneState>,
    /// Writes that wait for a grant.
    writes: Slab<Write>,
    grants: BTreeMap<(SessionId, RequestId), Grant>,
    pieces: Slab<Piece>,
    write_flights: Slab<WriteFlight>,
    /// Commits so far, of all files.
    commit_count: u64,
    asked_count: u64,
    /// Writes left to the client.
    plain_write_count: u64,
    /// Pieces that a former daemon left and that made no sense.
    unclaimed_count: u64,
    /// The driver is passing on pieces of a former daemon.
    is_recovering: bool,
    /// Writers that met a full disk.
    reserved_blocks: ReservedBlocks,
    /// The next write of the device that is being looked at.
    next_write: Option<NextWrite>,
    /// There is more room in the write buffer: this step looks at the writes that wait for it
    /// before it ends.
    is_roomier: bool,
    /// Changes so far, of all files.
    change_count: u64,
    /// Files with loose bytes and since when, in the order of their turns to be written out;
    /// without those that are being written out.
    loose_files: VecDeque<(Instant, FileId)>,
    /// Pieces that became loose so far.
    loose_count: u64,
    /// Files that are being written out.
    writing_out: Vec<FileId>,
    /// Streams that ended, newest last.
    closed: VecDeque<StreamRecord>,
    /// Streams so far.
    stream_count: u32,
    /// Which run followed which.
    rehearsal: Rehearsal,
    /// Contracts that seats keep after the close of their handles.
    kept: Vec<StreamId>,
    /// When the time of one of them may be over.
    kept_wake: Instant,
    /// When a resting device goes on: it rests because a client that was just served may ask for
    /// something else.
    rest_wake: Instant,
    /// The driver stops: clients of sessions that end may not know it.
    is_stopping: bool,
    /// The sum of all contracts.
    promised: Promised,
    hit_count: u64,
    miss_count: u64,
    /// Devices to look at before this step ends.
    touched: Vec<DeviceId>,
    /// Devices that the timer looks at again.
    blocked: Vec<DeviceId>,
    /// Devices that could not get a buffer.
    starved: Vec<DeviceId>,
    /// Reads whose stream may no longer fetch the bytes that they lack: to look at before this step
    /// ends.
    unsettled: Vec<u32>,
    wake_at: Instant,
    // Memory used again from step to step.
    claims: Vec<Claim>,
    claimants: Vec<Claimant>,
    order: Order,
    released: Vec<Released>,
}

impl Server {
    /// A server with empty cache and no devices.
    pub fn new(limits: Limits, policy: Policy) -> Server {
        Server {
            cache: Cache::new(limits.slot_count),
            limits,
            policy,
            now: Instant::ZERO,
            sessions: BTreeMap::new(),
            handles: BTreeMap::new(),
            files: BTreeMap::new(),
            unused: VecDeque::new(),
            unused_count: 0,
            keys: BTreeMap::new(),
            holds_of_unknown: Vec::new(),
            devices: BTreeMap::new(),
            streams: Slab::new(),
            reads: Slab::new(),
            pins: BTreeMap::new(),
            folders: BTreeMap::new(),
            sequences: BTreeSet::new(),
            neighbours: BTreeMap::new(),
            flights: Slab::new(),
            flight_generation: 0,
            lanes: BTreeMap::new(),
            writes: Slab::new(),
            grants: BTreeMap::new(),
            pieces: Slab::new(),
            write_flights: Slab::new(),
            commit_count: 0,
            asked_count: 0,
            plain_write_count: 0,
            unclaimed_count: 0,
            is_recovering: false,
            reserved_blocks: ReservedBlocks::default(),
            next_write: None,
            is_roomier: false,
            change_count: 0,
            loose_files: VecDeque::new(),
            loose_count: 0,
            writing_out: Vec::new(),
            closed: VecDeque::new(),
            stream_count: 0,
            rehearsal: Rehearsal::default(),
            kept: Vec::new(),
            kept_wake: Instant::NEVER,
            rest_wake: Instant::NEVER,
            is_stopping: false,
            promised: Promised::default(),
            hit_count: 0,
            miss_count: 0,
            touched: Vec::new(),
            blocked: Vec::new(),
            starved: Vec::new(),
            unsettled: Vec::new(),
            wake_at: Instant::NEVER,
            claims: Vec::new(),
            claimants: Vec::new(),
            order: Order::default(),
            released: Vec::new(),
        }
    }

    /// Take one event at `now` and append the actions that it calls for. An instant before the last
    /// one counts as the last one.
    pub fn step(&mut self, now: Instant, event: Event, actions: &mut Actions) {
        self.now = self.now.max(now);
        match event {
            Event::DeviceAdded { device, model } => self.device_added(device, model),
            Event::PolicyChanged(policy) => {
                self.policy = policy;
                if !self.policy.rehearsal {
                    self.leave_all_ways();
                }
                // Kept contracts may be kept for less long now.
                self.kept_wake = self.now;
                self.end_kept_over();
            }
            Event::Stopping => self.is_stopping = true,
            Event::SessionOpened { session, label } => self.session_opened(session, label, actions),
            Event::SessionOfPool { session, pool } => self.session_of_pool(session, pool),
            Event::SessionClosed { session } => self.session_closed(session, actions),
            Event::Opening {
                session,
                handle,
                path,
                part,
            } => self.opening(session, handle, (path, part), actions),
            Event::Opened {
                session,
                handle,
                facts,
            } => self.opened(session, handle, facts, actions),
            Event::Closed { session, handle } => self.handle_closed(session, handle, actions),
            Event::Stationed {
                session,
                handle,
                station,
            } => self.stationed(session, handle, station),
            Event::Read {
                session,
                handle,
                request,
                range,
                sent,
            } => {
                self.read(session, handle, request, range, sent, actions);
            }
            Event::ReadEnd { session, request } => self.read_end(session, request, actions),
            Event::LaneAdded {
                lane,
                session,
                page_count,
                record_count,
            } => self.lane_added(lane, session, page_count, record_count),
            Event::Recovered {
                lane,
                record,
                facts,
                range,
                runs,
            } => self.recovered(lane, record, facts, (range, runs), actions),
            Event::WriteBegin {
                session,
                handle,
                request,
                range,
                sent: _,
            } => self.write_begin(session, handle, request, range, actions),
            Event::WriteEnd { session, request } => self.write_end(session, request, actions),
            Event::Sync {
                session,
                handle,
                request,
            } => self.sync(session, handle, request, actions),
            Event::Hold {
                session,
                request,
                key,
            } => self.hold(session, request, key, actions),
            Event::Reserved { file, result } => self.reserved(file, result, actions),
            Event::ReserveFound { file } => self.mark_reserved(file),
            // And do no more in this step: a new fetch of those bytes would fail again, without an
            // end.
            Event::Unfilled { slot } => return self.unfilled(slot),
            Event::RecoveryEnded => self.recovery_ended(actions),
            Event::RecordKept { lane, record } => self.record_kept(lane, record),
            Event::RecoveryBegun => self.is_recovering = true,
            Event::WriteAbort { session, request } => self.write_abort(session, request, actions),
            Event::Settled { file, version } => self.settled(file, version, actions),
            Event::Synced { file, result } => self.synced(file, result, actions),
            Event::SyncDoubted { file, errno } => self.sync_doubted(file, errno, actions),
            Event::FellBack { io, lost } => self.fell_back(io, lost),
            Event::NotKept { file, errno } => self.not_kept(file, errno, actions),
            Event::Flushed { device, outcome } => self.flushed(device, outcome),
            Event::Changed {
                session,
                request,
                key,
                range,
                has_bytes,
            } => {
                self.changed(key, range, has_bytes, actions);
                self.changed_loose(key, range, actions);
                self.end_hold(session, key, actions);
                actions.list.push(Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Done,
                });
            }
            Event::Gone {
                session,
                request,
                key,
            } => {
                self.gone(key, actions);
                actions.list.push(Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Done,
                });
            }
            Event::ForeignChange { key } => self.foreign_change(key, actions),
            Event::Unlinked { key } => self.gone(key, actions),
            Event::LetGo { key } => self.let_go_of(key, actions),
            Event::Crowded => self.crowded(actions),
            Event::Overfull { count } => self.let_go_of_some(count as usize, actions),
            Event::Stat {
                file,
                size,
                version,
                is_fresh,
            } => self.stat(file, size.0, Version { version, is_fresh }, actions),
            Event::NeighbourOpened {
                beside,
                name,
                facts,
            } => self.neighbour_opened((Place::Beside(beside), name), facts, actions),
            Event::PoolFileOpened { pool, path, facts } => {
                self.neighbour_opened((Place::Pool(pool), path), facts, actions);
            }
            Event::Hint { file, hint } => self.hinted(file, hint),
            Event::ForeignLoad {
                device,
                requests_per_kilosecond,
                rate,
            } => {
                if let Some(entry) = self.devices.get_mut(&device) {
                    entry.model.foreign_load(requests_per_kilosecond, rate);
                }
            }
            Event::IoDone { io, result } => self.io_done(io, result, actions),
            Event::Timer => self.timer(actions),
            Event::MayChange { io } => self.may_change(io),
            Event::Remembered(runs) => self.rehearsal.recall(runs),
        }
        self.let_go_of_unused(actions);
        self.give_room(actions);
        self.look_for_room(actions);
        self.write_out_due(actions);
        self.serve_devices(actions);
    }

    fn timer(&mut self, actions: &mut Actions) {
        self.wake_at = Instant::NEVER;
        self.rest_wake = Instant::NEVER;
        self.is_roomier = true;
        self.end_kept_over();
        for device in core::mem::take(&mut self.blocked) {
            if let Some(entry) = self.devices.get_mut(&device) {
                entry.queue.blocked = false;
            }
            self.retry_refused(device);
            self.end_silent_sequences(device, actions);
            self.touch(device);
        }
    }

    /// Look at a device before the step ends.
    fn touch(&mut self, device: DeviceId) {
        if !self.touched.contains(&device) {
            self.touched.push(device);
        }
    }

    /// Look at all devices that a stream is fetched from before the step ends.
    fn touch_devices_of(&mut self, id: StreamId) {
        let device_at = |server: &Server, at| server.streams.get(id.0)?.device_at(at);
        for at in 0.. {
            let Some(device) = device_at(self, at) else {
                return;
            };
            self.touch(device);
        }
    }

    /// Have the timer look at a device again.
    fn block(&mut self, device: DeviceId) {
        if let Some(entry) = self.devices.get_mut(&device)
            && !entry.queue.blocked
        {
            entry.queue.blocked = true;
            self.blocked.push(device);
        }
    }

    fn serve_devices(&mut self, actions: &mut Actions) {
        if !self.starved.is_empty() && self.give_back(None) {
            while let Some(device) = self.starved.pop() {
                if let Some(entry) = self.devices.get_mut(&device) {
                    entry.queue.starved = false;
                }
                self.touch(device);
            }
        }
        loop {
            while let Some(key) = self.unsettled.pop() {
                self.pursue(key, actions);
            }
            self.give_room(actions);
            let Some(device) = self.touched.pop() else {
                break;
            };
            self.pump(device, actions);
        }
        let blocked = match self.blocked.is_empty() {
            false => (self.now + LOOK_AGAIN).min(self.rest_wake),
            true => Instant::NEVER,
        };
        let wake_at = blocked.min(self.loose_wake()).min(self.kept_wake);
        if wake_at < self.wake_at {
            self.wake_at = wake_at;
            actions.list.push(Action::Wake { at: self.wake_at });
        }
    }

    fn slot_bytes(&self) -> u64 {
        u64::from(self.limits.slot_bytes)
    }
}
