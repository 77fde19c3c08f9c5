// SPDX-License-Identifier: Apache-2.0
//! The torture's world: the daemon's part around one server, with real lanes, buffers and files.
//!
//! Steps that the daemon takes at once happen here at once; the work of a worker, a device or a
//! door takes its time. No action is answered in its own step. Lanes outlive the server, as files
//! in a runtime folder do, and are lost with the power.

use super::file::{Cell, Chore, GARBAGE, OneFile};
use super::hands::{Client, Doing, Hand};
use super::trouble::{Disk, Plan};
use crate::digest::Digest;
use crate::prng::Prng;
use crate::queue::Queue;
use rushes_core::server::*;
use rushes_core::units::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Errors that a worker may find.
pub(super) const NO_SUCH_FILE: Errno = Errno(2);
/// The longest wait that no fault explains.
const PATIENCE: Duration = Duration::from_s(120);
/// By then everything must be on its device after the last fault.
const SETTLED_BY: Duration = Duration::from_s(400);

/// Time between two writes to a file after which the kernel reports an error that no disk caused.
const MEETS_EVERY: Duration = Duration::from_s(1);

/// The server's own state is checked after each of so many steps, and then after one of so many.
const CHECKED_STEPS: u64 = 3000;
const CHECKED_EVERY: u64 = 5;

/// The events, in numbers.
#[expect(missing_docs, reason = "each is a count of what its name says")]
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    pub steps: u64,
    pub reads: u64,
    pub plain_reads: u64,
    pub writes: u64,
    pub plain_writes: u64,
    pub cuts: u64,
    pub syncs: u64,
    pub holds: u64,
    pub refused: u64,
    pub kills: u64,
    pub kills_in_steps: u64,
    pub kills_booting: u64,
    pub recovered: u64,
    pub told_later: u64,
    pub power_cuts: u64,
    pub client_deaths: u64,
    pub disk_troubles: u64,
    pub io_errors: u64,
    pub sync_errors: u64,
    pub no_space: u64,
    pub lost_pages: u64,
    /// Of those, pages that the kernel dropped before a sync; errors that a read found.
    pub let_go: u64,
    pub not_kept: u64,
    /// Writes past the kernel's cache that went through it.
    pub fallbacks: u64,
    /// Reads of pages that a program may change unseen.
    pub changeable: u64,
    /// Writes past the cache after which the kernel could not make room there, without a fault of
    /// the disk; syncs that were repeated for that.
    pub met: u64,
    pub doubted_syncs: u64,
    pub strange_writes: u64,
    pub strange_cuts: u64,
    pub device_reads: u64,
    pub device_writes: u64,
    pub bridged_writes: u64,
    pub joined_writes: u64,
    pub forgotten: u64,
}

impl Counts {
    /// Each of its numbers by name.
    pub fn named(&self) -> BTreeMap<String, u64> {
        let value = serde_json::to_value(self).unwrap_or_default();
        let object = value.as_object().cloned().unwrap_or_default();
        object
            .into_iter()
            .map(|(name, count)| (name, count.as_u64().unwrap_or(0)))
            .collect()
    }

    /// Adds another world's counts.
    pub fn add(&mut self, other: &Counts) {
        let mut sum = self.named();
        for (name, count) in other.named() {
            *sum.entry(name).or_default() += count;
        }
        let value = serde_json::to_value(sum).unwrap_or_default();
        *self = serde_json::from_value(value).unwrap_or_else(|_| self.clone());
    }
}

/// A record in a lane's table.
#[derive(Clone)]
pub(super) struct Record {
    pub(super) order: u64,
    pub(super) file: usize,
    pub(super) range: ByteRange,
    pub(super) runs: Runs,
    /// The present server does not know yet the piece that was left there.
    pub(super) is_kept: bool,
}

/// A lane in memory.
pub(super) struct LaneMemory {
    pub(super) cells: Vec<Cell>,
    pub(super) records: BTreeMap<u32, Record>,
    /// The server knows it.
    pub(super) is_told: bool,
}

pub(super) enum Io {
    Read(IoRead, Vec<SlotIndex>),
    /// With its bytes at the time when it was sent.
    Write(IoWrite, Vec<WritePart>, Vec<Cell>),
}

/// A coming event. Events of a dead daemon are void: they carry its life.
pub(super) enum What {
    /// From a client, for its session.
    FromClient(u64, SessionId, Box<Event>),
    /// From a worker or a device.
    ToServer(u64, Box<Event>),
    /// A client has put its bytes into its lane.
    Commit(u64, usize, u64),
    Timer(u64, Instant),
    Io(u64, IoId),
    Chore(u64, usize, FileId, Chore),
    ChoreDone(u64, usize, FileId, Box<Event>),
    Look(u64, usize, FileId),
    Looked(u64, usize, Box<Event>),
    Sync(u64, usize, FileId, bool),
    Synced(u64, usize, Box<Event>),
    Flush(u64, usize),
    OpenLook(u64, usize, HandleId),
    Opened(u64, usize, HandleId, Box<FileFacts>),
    Think(usize, u64),
    /// A client continues its work.
    GoOn(usize, u64),
    /// A stranger's change is reported.
    Foreign(u64, usize),
    Boot,
    Join(u64, usize),
    TellKept(u64),
    Trouble,
    Kernel,
    DiskIsWell(usize),
    Quiet,
}

pub(super) struct World {
    pub(super) random: Prng,
    pub(super) now: Instant,
    pub(super) queue: Queue<What>,
    pub(super) server: Option<Server>,
    /// The number of daemons so far.
    pub(super) life: u64,
    pub(super) limits: Limits,
    pub(super) policy: Policy,
    pub(super) plan: Plan,
    wake: Instant,
    pub(super) lanes: BTreeMap<LaneId, LaneMemory>,
    pub(super) lane_pages: u32,
    pub(super) record_count: u32,
    pub(super) slots: Vec<Cell>,
    pub(super) disks: Vec<Disk>,
    pub(super) files: Vec<OneFile>,
    pub(super) by_id: BTreeMap<FileId, usize>,
    pub(super) clients: Vec<Client>,
    pub(super) hands: Vec<Hand>,
    pub(super) ios: BTreeMap<IoId, Io>,
    pub(super) published: u64,
    next_number: u64,
    pub(super) is_booting: bool,
    pub(super) is_quiet: bool,
    /// The instant since which there has been no fault.
    pub(super) well_since: Instant,
    pub(super) digest: Digest,
    pub(super) trace: bool,
    pub(super) violations: Vec<String>,
    pub(super) counts: Counts,
}

impl World {
    pub(super) fn new(random: Prng, plan: Plan, trace: bool) -> World {
        let (limits, policy) = (plan.limits.clone(), plan.policy.clone());
        let slot_cells = limits.slot_bytes as usize * limits.slot_count as usize;
        let mut world = World {
            random,
            now: Instant(1),
            queue: Queue::default(),
            server: None,
            life: 0,
            wake: Instant::NEVER,
            lanes: BTreeMap::new(),
            lane_pages: plan.lane_pages,
            record_count: plan.record_count,
            slots: vec![GARBAGE; slot_cells],
            disks: Vec::new(),
            files: Vec::new(),
            by_id: BTreeMap::new(),
            clients: Vec::new(),
            hands: Vec::new(),
            ios: BTreeMap::new(),
            published: 0,
            next_number: 1,
            is_booting: false,
            is_quiet: false,
            well_since: Instant(1),
            digest: Digest::default(),
            trace,
            violations: Vec::new(),
            counts: Counts::default(),
            limits,
            policy,
            plan,
        };
        world.populate();
        world
    }

    // ---- Time ----

    /// Plays the round. Returns its virtual duration.
    pub(super) fn play(&mut self) -> Duration {
        self.queue.push(self.now, What::Boot);
        self.queue.push(self.now, What::Kernel);
        self.queue.push(Instant(self.plan.length.0), What::Quiet);
        let first = self.pause(self.plan.trouble_every);
        self.later(first, What::Trouble);
        let end = Instant(self.plan.length.0) + SETTLED_BY;
        while self.violations.is_empty() {
            let Some((at, what)) = self.queue.pop() else {
                break;
            };
            self.now = at;
            self.happen(what);
            if self.is_quiet && self.is_settled() {
                break;
            }
            if self.now > end {
                break;
            }
        }
        if self.violations.is_empty() {
            self.judge();
        }
        self.now.since(Instant(0))
    }

    pub(super) fn later(&mut self, delay: Duration, what: What) {
        self.queue.push(self.now + delay, what);
    }

    /// About so long.
    pub(super) fn pause(&mut self, mean: Duration) -> Duration {
        Duration(1 + self.random.below(mean.0.saturating_mul(2)))
    }

    /// A message between programs, or a turn of one of them.
    pub(super) fn turn(&mut self) -> Duration {
        match self.random.below(40) {
            0 => Duration::from_us(self.random.below(20_000)),
            _ => Duration::from_us(20 + self.random.below(300)),
        }
    }

    /// The time of a worker on a file of that disk: not before the disk has recovered.
    fn work(&mut self, disk: usize) -> Duration {
        let hangs = self.disks[disk].hangs_until.since(self.now);
        hangs + Duration::from_us(50 + self.random.below(4000))
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(super) fn violate(&mut self, sentence: String) {
        if self.trace {
            eprintln!("{} VIOLATION {sentence}", self.now.0);
        }
        self.violations
            .push(format!("at {} ms: {sentence}", self.now.0 / 1_000_000));
    }

    fn is_alive(&self, life: u64) -> bool {
        self.life == life && self.server.is_some()
    }

    fn happen(&mut self, what: What) {
        match what {
            What::FromClient(life, session, event) => {
                let is_there = self.clients.iter().any(|client| client.session == session);
                if self.is_alive(life) && is_there {
                    if let Event::Changed { request, .. } = &*event {
                        self.tell_of_change(*request);
                    }
                    self.step(*event);
                }
            }
            What::ToServer(life, event) => {
                if self.is_alive(life) {
                    if let Event::IoDone { io, result } = &*event {
                        // In each fifth read a page may be mapped, and not written yet.
                        if matches!(self.ios.get(io), Some(Io::Read(..))) && (io.0 >> 32) % 5 == 0 {
                            self.counts.changeable += 1;
                            self.step(Event::MayChange { io: *io });
                        }
                        self.io_done(*io, result.is_ok());
                    }
                    self.step(*event);
                }
            }
            What::Commit(life, hand, epoch) => {
                if self.is_alive(life) {
                    self.commit(hand, epoch);
                }
            }
            What::Timer(life, at) => {
                if self.is_alive(life) && self.wake == at {
                    self.wake = Instant::NEVER;
                    self.step(Event::Timer);
                }
            }
            What::Io(life, io) => {
                if self.is_alive(life) {
                    self.serve(io);
                }
            }
            What::Chore(life, file, id, chore) => self.do_chore(life, file, id, chore),
            What::ChoreDone(life, file, id, event) => {
                if self.is_alive(life) && self.files[file].id == Some(id) {
                    self.files[file].is_busy = false;
                    self.next_chore(file);
                    self.step(*event);
                }
            }
            What::Look(life, file, id) => self.look(life, file, id),
            What::Looked(life, file, event) => {
                if self.is_alive(life) {
                    let one = &mut self.files[file];
                    if matches!(&*event, Event::Stat { file, .. } if one.id == Some(*file)) {
                        one.looks = one.looks.saturating_sub(1);
                    }
                    self.step(*event);
                }
            }
            What::Sync(life, file, id, to_medium) => self.do_sync(life, file, id, to_medium),
            What::Synced(life, file, event) => {
                if self.is_alive(life) {
                    let one = &mut self.files[file];
                    one.syncs = one.syncs.saturating_sub(1);
                    match &*event {
                        Event::Synced { result: Ok(()), .. } => one.covered.clear(),
                        Event::Synced {
                            result: Err(Errno::AGAIN),
                            ..
                        } => {}
                        _ => one.again.extend(one.covered.iter().chain(&one.loose)),
                    }
                    let has_failed = matches!(
                        &*event,
                        Event::Synced { result: Err(errno), .. } if *errno != Errno::AGAIN
                    );
                    let event = self.sync_heard(file, *event);
                    self.step(event);
                    // Not if it died in the middle of that.
                    if has_failed && self.is_alive(life) {
                        let has_records = self.has_records();
                        let one = &mut self.files[file];
                        let telling = match has_records {
                            true => std::mem::take(&mut one.telling),
                            false => BTreeSet::new(),
                        };
                        one.tell(&telling, has_records);
                    }
                }
            }
            What::Flush(life, disk) => self.flush(life, disk),
            What::OpenLook(life, hand, handle) => self.look_to_open(life, hand, handle),
            What::Opened(life, hand, handle, facts) => self.opened(life, hand, handle, *facts),
            What::Think(hand, epoch) => self.think(hand, epoch),
            What::GoOn(hand, epoch) => self.go_on(hand, epoch),
            What::Foreign(life, file) => self.tell_of_stranger(life, file),
            What::Boot => self.boot(),
            What::Join(life, client) => {
                if self.is_alive(life) {
                    self.join(client);
                }
            }
            What::TellKept(life) => {
                if self.is_alive(life) {
                    self.tell_kept();
                }
            }
            What::Trouble => self.trouble(),
            What::Kernel => self.kernel(),
            What::DiskIsWell(disk) => self.disk_is_well(disk),
            What::Quiet => self.quiet(),
        }
    }

    // ---- Steps ----

    /// One step of the server; the daemon may die in the middle of its actions.
    pub(super) fn step(&mut self, event: Event) -> bool {
        let dies_after = self.death();
        self.step_to(event, dies_after)
    }

    /// The number of actions of a step after which the daemon dies.
    pub(super) fn death(&mut self) -> usize {
        let dies = !self.is_quiet
            && self.plan.dies_in_steps
            && self.random.below(self.plan.steps_to_death) == 0;
        match dies {
            true => self.random.below(8) as usize,
            false => usize::MAX,
        }
    }

    /// False: the daemon died in the middle of the actions.
    pub(super) fn step_to(&mut self, event: Event, dies_after: usize) -> bool {
        let Some(server) = &mut self.server else {
            return false;
        };
        self.counts.steps += 1;
        self.digest.event(self.now, &event);
        if self.trace {
            println!("{} {event:?}", self.now.0);
        }
        let mut actions = Actions::default();
        server.step(self.now, event, &mut actions);
        self.digest.actions(&actions);
        // The check takes longer than all the rest.
        if self.counts.steps < CHECKED_STEPS || self.counts.steps.is_multiple_of(CHECKED_EVERY) {
            for odd in server.check() {
                self.violate(format!("the server's state contradicts itself: {odd}"));
            }
        }
        let list = std::mem::take(&mut actions.list);
        for (index, action) in list.into_iter().enumerate() {
            if index >= dies_after {
                self.counts.kills_in_steps += 1;
                self.kill();
                return false;
            }
            if self.trace {
                println!("{}   {action:?}", self.now.0);
            }
            self.act(action, &actions);
        }
        true
    }

    fn act(&mut self, action: Action, actions: &Actions) {
        match action {
            Action::Reply {
                session,
                request,
                outcome,
            } => self.reply(session, request, outcome, actions),
            Action::Submit(io) => {
                let slots = actions.slots_of(io.slots).to_vec();
                self.counts.device_reads += 1;
                self.send(io.io, io.file, Io::Read(io, slots));
            }
            Action::SubmitWrite(io) => self.submit_write(io, actions.parts_of(io.parts).to_vec()),
            Action::Fill { slot, offset, from } => {
                let cells = self.lane_cells(&from).to_vec();
                let at = self.slot_place(slot, offset);
                self.slots[at..at + cells.len()].copy_from_slice(&cells);
            }
            Action::Zero {
                slot,
                offset,
                length,
            } => {
                let at = self.slot_place(slot, offset);
                self.slots[at..at + length as usize].fill(0);
            }
            Action::Publish {
                lane,
                record,
                file,
                range,
                runs,
                ..
            } => self.publish((lane, record), file, range, runs),
            Action::Strike { lane, record } => {
                let found = self.lanes.get_mut(&lane);
                if found.is_none_or(|memory| memory.records.remove(&record).is_none()) {
                    self.violate(format!("{lane:?} has no record {record} to strike"));
                }
            }
            Action::Spent { lane, record } => {
                let found = self.lanes.get_mut(&lane);
                match found.and_then(|memory| memory.records.get_mut(&record)) {
                    Some(found) => found.runs = Runs::default(),
                    None => self.violate(format!("{lane:?} has no record {record} to be spent")),
                }
            }
            Action::GiveMemoryBack { lane, run } => {
                if let Some(memory) = self.lanes.get_mut(&lane)
                    && !memory.records.values().any(|record| record.is_kept)
                {
                    let start = run.first as usize * PAGE_BYTES as usize;
                    let end = start + run.count as usize * PAGE_BYTES as usize;
                    memory.cells[start..end].fill(GARBAGE);
                }
            }
            Action::LaneDone { lane } => self.lane_done(lane),
            Action::Known { file, size } => self.known(file, size.0),
            Action::Loose { file, is_loose } => {
                if let Some(&at) = self.by_id.get(&file) {
                    self.files[at].is_marked_loose = is_loose;
                }
            }
            Action::Clean { file } => {
                if let Some(&at) = self.by_id.get(&file) {
                    self.files[at].again.clear();
                    self.clean(at);
                    self.chore(at, Chore::Settle);
                }
            }
            Action::Reserve {
                file,
                needed,
                wished_end,
            } => {
                if wished_end < needed.end() {
                    self.violate(format!(
                        "{needed:?} is needed and up to {wished_end} wished"
                    ));
                }
                if let Some(&at) = self.by_id.get(&file) {
                    self.chore(at, Chore::Reserve { needed, wished_end });
                }
            }
            Action::Trim { file, .. } => {
                if self.is_booting {
                    self.violate("a file is cut while pieces of it are still told".into());
                }
                if let Some(&at) = self.by_id.get(&file) {
                    self.chore(at, Chore::Trim);
                }
            }
            Action::Sync { file } => self.sync(file, true),
            Action::WriteOut { file } => self.sync(file, false),
            Action::Flush { device } => {
                let disk = device.0 as usize - 1;
                let delay = self.work(disk);
                self.later(delay, What::Flush(self.life, disk));
            }
            Action::Stat { file } => {
                if let Some(&at) = self.by_id.get(&file) {
                    self.files[at].looks += 1;
                    let delay = self.work(self.files[at].device);
                    self.later(delay, What::Look(self.life, at, file));
                }
            }
            Action::OpenNeighbour { beside, name } => {
                let facts = Err(NO_SUCH_FILE);
                self.answer(Event::NeighbourOpened {
                    beside,
                    name,
                    facts,
                });
            }
            Action::AskPool { pool, path } => {
                let facts = Err(NO_SUCH_FILE);
                self.answer(Event::PoolFileOpened { pool, path, facts });
            }
            Action::ReadHeader { file, .. } => {
                if let Some(&at) = self.by_id.get(&file) {
                    let hint = self.files[at].hint;
                    self.answer(Event::Hint { file, hint });
                }
            }
            Action::Forget { file } => self.forget(file),
            Action::Wake { at } => {
                self.wake = at;
                let when = at.max(self.now);
                self.queue.push(when, What::Timer(self.life, at));
            }
        }
    }

    /// Sends it after a turn of the daemon.
    pub(super) fn answer(&mut self, event: Event) {
        let delay = self.turn();
        self.later(delay, What::ToServer(self.life, Box::new(event)));
    }

    // ---- Files ----

    pub(super) fn facts(&self, at: usize, id: FileId) -> FileFacts {
        let file = &self.files[at];
        FileFacts {
            file: id,
            key: file.key,
            device: DeviceId(file.device as u16 + 1),
            size: ByteCount(file.size()),
            version: file.version,
            is_fresh: file.is_fresh(self.now),
            extents: file.extents(),
            hint: file.hint,
            is_header_unread: false,
            way: Some(file.way),
            is_exclusive: file.is_exclusive,
            has_unwritten: !file.mapped.is_empty(),
        }
    }

    /// The daemon's number for a file.
    pub(super) fn id_of(&mut self, at: usize) -> FileId {
        if let Some(id) = self.files[at].id {
            return id;
        }
        let id = FileId(self.number() as _);
        self.files[at].id = Some(id);
        self.by_id.insert(id, at);
        id
    }

    fn forget(&mut self, id: FileId) {
        if self.is_booting {
            self.violate("a file is forgotten while pieces of it are still told".into());
        }
        let Some(at) = self.by_id.remove(&id) else {
            return;
        };
        self.counts.forgotten += 1;
        let file = &mut self.files[at];
        file.id = None;
        file.chores.clear();
        file.is_busy = false;
        file.looks = 0;
        file.syncs = 0;
        // The driver frees the blocks that it left reserved.
        file.is_left_reserved = false;
        self.unmap_beyond(at);
    }

    /// Frees blocks behind the end.
    pub(super) fn unmap_beyond(&mut self, at: usize) {
        let file = &mut self.files[at];
        let first = file.size().div_ceil(PAGE_BYTES);
        let freed = file.mapped.split_off(&first);
        self.disks[file.device].free += freed.len() as u64;
    }

    /// Allocates blocks for those pages. False: there are too few.
    pub(super) fn map(&mut self, at: usize, pages: std::ops::Range<u64>) -> bool {
        let file = &mut self.files[at];
        let disk = &mut self.disks[file.device];
        let lacking: Vec<u64> = pages.filter(|page| !file.mapped.contains(page)).collect();
        if lacking.len() as u64 > disk.free {
            file.reasons.full = self.now;
            self.counts.no_space += 1;
            return false;
        }
        disk.free -= lacking.len() as u64;
        file.mapped.extend(lacking);
        true
    }

    fn clean(&mut self, at: usize) {
        if self.is_booting {
            self.violate("a file is clean while pieces of it are still told".into());
        }
        let file = &self.files[at];
        if file.untold.is_empty() && file.native.len() != file.flat.len() {
            let (has, told) = (file.native.len(), file.flat.len());
            self.violate(format!("{} is clean with {has} of {told} bytes", file.path));
        }
    }

    fn known(&mut self, id: FileId, size: u64) {
        let Some(&at) = self.by_id.get(&id) else {
            return;
        };
        let file = &self.files[at];
        // A starting server does not know yet all that was left; nor does the length count while a
        // look for it is under way.
        let is_sure =
            !self.is_booting && file.looks == 0 && file.untold.is_empty() && !file.is_length_unsure;
        let is_held = self.hands.iter().any(|hand| hand.changes(at));
        if is_sure && !is_held && size != file.flat.len() as u64 {
            let told = file.flat.len();
            self.violate(format!(
                "{} is told to have {size} bytes of {told}",
                file.path
            ));
        }
    }

    fn look(&mut self, life: u64, at: usize, id: FileId) {
        if !self.is_alive(life) || self.files[at].id != Some(id) {
            return;
        }
        self.files[at].is_length_unsure = false;
        let file = &self.files[at];
        let event = Event::Stat {
            file: id,
            size: ByteCount(file.size()),
            version: file.version,
            is_fresh: file.is_fresh(self.now),
        };
        let delay = self.turn();
        self.later(delay, What::Looked(life, at, Box::new(event)));
    }

    fn chore(&mut self, at: usize, chore: Chore) {
        self.files[at].chores.push_back(chore);
        self.next_chore(at);
    }

    fn next_chore(&mut self, at: usize) {
        let file = &mut self.files[at];
        let (false, Some(id)) = (file.is_busy, file.id) else {
            return;
        };
        if let Some(chore) = file.chores.pop_front() {
            file.is_busy = true;
            let delay = self.work(self.files[at].device);
            self.later(delay, What::Chore(self.life, at, id, chore));
        }
    }

    fn do_chore(&mut self, life: u64, at: usize, id: FileId, chore: Chore) {
        if !self.is_alive(life) || self.files[at].id != Some(id) {
            return;
        }
        let event = match chore {
            Chore::Reserve { needed, wished_end } => {
                let result = match self.map(at, OneFile::pages(needed)) {
                    true => {
                        // Onward if that is easy: never more than a part of the free blocks.
                        let easy = self.disks[self.files[at].device].free / 4;
                        let first = needed.end().div_ceil(PAGE_BYTES);
                        let last = wished_end.div_ceil(PAGE_BYTES).min(first + easy);
                        self.map(at, first..last.max(first));
                        Ok(self.files[at].extents())
                    }
                    false => Err(Errno::NO_SPACE),
                };
                // An allocation is a change like any other.
                self.files[at].touched(self.now);
                Event::Reserved { file: id, result }
            }
            Chore::Trim => {
                self.unmap_beyond(at);
                self.files[at].touched(self.now);
                let version = self.files[at].version;
                Event::Settled { file: id, version }
            }
            Chore::Settle => {
                self.files[at].touched(self.now);
                let version = self.files[at].version;
                Event::Settled { file: id, version }
            }
        };
        let delay = self.turn();
        self.later(delay, What::ChoreDone(life, at, id, Box::new(event)));
    }

    fn sync(&mut self, id: FileId, to_medium: bool) {
        if let Some(&at) = self.by_id.get(&id) {
            let file = &mut self.files[at];
            file.syncs += 1;
            file.told_past_before = file.told_past_count;
            // Bytes that come into the cache from here on are not covered, as far as the daemon
            // knows.
            file.covered.append(&mut file.loose);
            let device = file.device;
            let delay = self.work(device);
            self.later(delay, What::Sync(self.life, at, id, to_medium));
        }
    }

    fn do_sync(&mut self, life: u64, at: usize, id: FileId, to_medium: bool) {
        if !self.is_alive(life) || self.files[at].id != Some(id) {
            return;
        }
        let hangs = self.disks[self.files[at].device].hangs_until;
        if hangs > self.now {
            return self.queue.push(hangs, What::Sync(life, at, id, to_medium));
        }
        let result = match self.random.below(60) {
            0 if !self.is_quiet => Err(Errno::AGAIN),
            _ => self.write_out(at),
        };
        if result.is_ok() && to_medium {
            self.files[at].flush();
        }
        let file = &mut self.files[at];
        if result.is_ok() {
            file.has_failed = false;
        } else {
            self.counts.sync_errors += 1;
        }
        if file.has_failed || result == Err(Errno::AGAIN) {
            file.reasons.write = self.now;
        }
        let delay = self.work(self.files[at].device);
        let event = Box::new(Event::Synced { file: id, result });
        self.later(delay, What::Synced(life, at, event));
    }

    /// The daemon's reading of the result of a sync.
    fn sync_heard(&mut self, at: usize, event: Event) -> Event {
        let Event::Synced { file: id, result } = event else {
            return event;
        };
        let errno = match result {
            Err(errno) if errno != Errno::AGAIN => errno,
            Err(_) => return event,
            Ok(()) => {
                self.files[at].doubted_syncs = 0;
                return event;
            }
        };
        let told_past = self.hear_past(at, id);
        let file = &mut self.files[at];
        let is_told_past = told_past || file.told_past_count > file.told_past_before;
        file.doubted_syncs += 1;
        let is_doubtful = is_told_past && file.doubted_syncs < LOST_IN_A_ROW;
        if !is_doubtful {
            file.doubted_syncs = 0;
        }
        if !is_doubtful {
            return event;
        }
        self.counts.doubted_syncs += 1;
        self.note_error_of_others(at, id);
        Event::SyncDoubted { file: id, errno }
    }

    /// An error that may be about other programs' bytes is reported, though no disk is to blame.
    fn note_error_of_others(&mut self, at: usize, id: FileId) {
        let server = self.server.as_ref();
        if server.is_some_and(|server| server.may_have_bytes_of_others(id)) {
            self.files[at].reasons.write = self.now;
        }
    }

    /// The kernel writes all pages of a file in its cache, and reports a failure once.
    pub(super) fn write_out(&mut self, at: usize) -> Result<(), Errno> {
        let pages: Vec<u64> = self.files[at].dirty.iter().copied().collect();
        for page in pages {
            self.write_page_out(at, page);
        }
        self.files[at].falls_back = false;
        match std::mem::take(&mut self.files[at].has_error) {
            true => {
                let file = &mut self.files[at];
                file.telling = file.lost.clone();
                Err(Errno::IO)
            }
            false => Ok(()),
        }
    }

    pub(super) fn write_page_out(&mut self, at: usize, page: u64) {
        let disk = &self.disks[self.files[at].device];
        let fails = disk.fails_writes_until > self.now && self.random.chance(disk.fails_permille);
        self.counts.lost_pages += u64::from(fails);
        self.files[at].write_page_out(page, fails);
    }

    fn flush(&mut self, life: u64, disk: usize) {
        if !self.is_alive(life) {
            return;
        }
        let outcome = match (self.disks[disk].takes_flushes, self.random.below(10)) {
            (false, _) => Flushed::Never,
            (true, 0) => Flushed::Later,
            _ => Flushed::Done,
        };
        if outcome == Flushed::Done {
            // Lengths are the file system's: they come with its journal.
            for file in self.files.iter_mut().filter(|file| file.device == disk) {
                file.flush();
            }
        }
        let device = DeviceId(disk as u16 + 1);
        self.answer(Event::Flushed { device, outcome });
    }

    // ---- Lanes and buffers ----

    pub(super) fn slot_place(&self, slot: SlotIndex, offset: u32) -> usize {
        slot.0 as usize * self.limits.slot_bytes as usize + offset as usize
    }

    fn lane_cells(&self, part: &LanePart) -> &[Cell] {
        let memory = self.lanes.get(&part.lane);
        let memory = memory.expect("bytes to be read lie in a lane that is there");
        &memory.cells[part.offset as usize..(part.offset + part.length) as usize]
    }

    fn cells_of(&self, parts: &[WritePart]) -> Vec<Cell> {
        let mut cells = Vec::new();
        for part in parts {
            cells.extend_from_slice(match *part {
                WritePart::Lane(part) => self.lane_cells(&part),
                WritePart::Slot {
                    slot,
                    offset,
                    length,
                } => {
                    let at = self.slot_place(slot, offset);
                    &self.slots[at..at + length as usize]
                }
            });
        }
        cells
    }

    fn publish(&mut self, (lane, record): (LaneId, u32), id: FileId, range: ByteRange, runs: Runs) {
        self.published += 1;
        let order = self.published;
        let Some(&file) = self.by_id.get(&id) else {
            return self.violate(format!(
                "a piece of {id:?} is published, which is forgotten"
            ));
        };
        let Some(memory) = self.lanes.get_mut(&lane) else {
            return self.violate(format!("a piece is published in {lane:?}, which is gone"));
        };
        let former = memory.records.insert(
            record,
            Record {
                order,
                file,
                range,
                runs,
                is_kept: false,
            },
        );
        if former.is_some() {
            self.violate(format!("record {record} of {lane:?} is published twice"));
        }
    }

    fn lane_done(&mut self, lane: LaneId) {
        let Some(memory) = self.lanes.get_mut(&lane) else {
            return self.violate(format!("{lane:?} is done, and was before"));
        };
        if memory.records.values().any(|record| !record.is_kept) {
            self.violate(format!("{lane:?} is done with pieces in it"));
        } else if memory.records.is_empty() {
            self.lanes.remove(&lane);
        } else {
            memory.is_told = false;
        }
    }

    // ---- Devices ----

    fn send(&mut self, io: IoId, file: FileId, what: Io) {
        let Some(&at) = self.by_id.get(&file) else {
            return self.violate(format!("I/O to {file:?}, which is forgotten"));
        };
        let disk = &self.disks[self.files[at].device];
        let time = disk.service.0 / 4 + self.random.below(disk.service.0 * 2);
        self.ios.insert(io, what);
        self.later(Duration(time), What::Io(self.life, io));
    }

    fn submit_write(&mut self, io: IoWrite, parts: Vec<WritePart>) {
        self.counts.device_writes += 1;
        self.counts.joined_writes += u64::from(parts.len() > 2);
        let total: u64 = parts.iter().map(WritePart::bytes).sum();
        if total != io.range.length.0 {
            return self.violate(format!("{total} bytes for {io:?}"));
        }
        let cells = self.cells_of(&parts);
        self.check_gaps(&io, &parts, &cells);
        let is_page = |at: u64| at.is_multiple_of(PAGE_BYTES);
        let is_whole = is_page(io.range.start.0) && is_page(io.range.end());
        if !is_whole && !io.buffered {
            self.violate(format!("not whole pages past the kernel's cache: {io:?}"));
        }
        let whole = |range: ByteRange| {
            let pages = OneFile::pages(range);
            ByteRange::new(
                pages.start * PAGE_BYTES,
                (pages.end - pages.start) * PAGE_BYTES,
            )
        };
        let both = self.ios.values().find(|other| match other {
            Io::Write(other, ..) => {
                other.file == io.file && whole(other.range).overlaps(whole(io.range))
            }
            Io::Read(..) => false,
        });
        if let Some(Io::Write(other, ..)) = both {
            let sentence = format!("two writes of one page: {other:?} {io:?}");
            self.violate(sentence);
        }
        self.send(io.io, io.file, Io::Write(io, parts, cells));
    }

    /// Bytes that are written over a gap must be those that the file has there by now; and only
    /// where no other program can have written.
    fn check_gaps(&mut self, io: &IoWrite, parts: &[WritePart], cells: &[Cell]) {
        let Some(&file) = self.by_id.get(&io.file) else {
            return;
        };
        let file = &self.files[file];
        let mut wrong = None;
        let mut is_bridged = false;
        let mut at = io.range.start.0;
        for part in parts {
            let end = at + part.bytes();
            if let WritePart::Slot { .. } = part {
                is_bridged = true;
                let into = (at - io.range.start.0) as usize..(end - io.range.start.0) as usize;
                let is_right = end <= file.size()
                    && file.flat.get(at as usize..end as usize) == Some(&cells[into]);
                if !file.is_exclusive || io.buffered || !is_right {
                    wrong = Some(format!("{at}..{end} of {} is bridged wrongly", file.path));
                }
            }
            at = end;
        }
        self.counts.bridged_writes += u64::from(is_bridged);
        if let Some(sentence) = wrong {
            self.violate(sentence);
        }
    }

    /// A device does its request, or fails.
    fn serve(&mut self, io: IoId) {
        let Some(what) = self.ios.get(&io) else {
            return;
        };
        let (Io::Read(IoRead { file, .. }, _) | Io::Write(IoWrite { file, .. }, ..)) = what;
        let Some(&at) = self.by_id.get(file) else {
            return;
        };
        let disk = &self.disks[self.files[at].device];
        if disk.hangs_until > self.now {
            return self.queue.push(disk.hangs_until, What::Io(self.life, io));
        }
        let is_read = matches!(what, Io::Read(..));
        let until = match is_read {
            true => disk.fails_reads_until,
            false => disk.fails_writes_until,
        };
        let fails = until > self.now && self.random.chance(disk.fails_permille);
        let result = match is_read {
            true if fails => {
                self.files[at].reasons.read = self.now;
                Err(Errno::IO)
            }
            true => Ok(ByteCount(self.read_from(at, io))),
            false => self.write_to(at, io, fails),
        };
        self.counts.io_errors += u64::from(result.is_err());
        let event = Event::IoDone { io, result };
        if self.files[at].meets_from == self.now + MEETS_EVERY {
            // A sync may get that error before the daemon looks.
            let delay = self.work(self.files[at].device);
            return self.later(delay, What::ToServer(self.life, Box::new(event)));
        }
        self.answer(event);
    }

    /// The daemon's question after each write past the kernel's cache; bytes that go through the
    /// cache are loose.
    fn io_done(&mut self, io: IoId, is_well: bool) {
        let write = match self.ios.remove(&io) {
            Some(Io::Write(write, ..)) => write,
            Some(Io::Read(read, ..)) if is_well => return self.look_for_loss(read.file),
            _ => return,
        };
        let Some(&at) = self.by_id.get(&write.file) else {
            return;
        };
        let (file, pages) = (&mut self.files[at], OneFile::pages(write.range));
        if write.buffered {
            return file.loose.extend(pages);
        }
        let is_cached = file.dirty.range(pages.clone()).next().is_some();
        let has_error = is_well && !is_cached && std::mem::take(&mut file.has_error_past);
        let lost = has_error.then_some(Errno::IO);
        if is_well && (is_cached || has_error) {
            file.told_past_count += u64::from(has_error && !file.has_error);
            if is_cached {
                file.loose.extend(pages);
            }
            self.step(Event::FellBack { io, lost });
            if has_error {
                self.files[at].has_error = false;
                if self.is_cached_alone(write.file) {
                    self.not_kept(at, write.file);
                }
            }
        }
    }

    /// The daemon's question after each read.
    fn look_for_loss(&mut self, id: FileId) {
        let (true, Some(&at)) = (self.is_cached_alone(id), self.by_id.get(&id)) else {
            return;
        };
        let told = std::mem::take(&mut self.files[at].has_error);
        let told_past = self.hear_past(at, id);
        self.files[at].told_past_count += u64::from(told_past && !told);
        if told || told_past {
            self.not_kept(at, id);
        }
    }

    /// The error from the descriptor past the cache may be about any write of the file that is
    /// under way past it.
    fn hear_past(&mut self, at: usize, id: FileId) -> bool {
        let is_told = std::mem::take(&mut self.files[at].has_error_past);
        let is_past =
            |io: &Io| matches!(io, Io::Write(write, ..) if write.file == id && !write.buffered);
        let past = self.ios.iter().find(|(_, io)| is_past(io));
        if let (true, Some((&io, _))) = (is_told, past) {
            let lost = Some(Errno::IO);
            self.step(Event::FellBack { io, lost });
        }
        is_told
    }

    fn is_cached_alone(&self, id: FileId) -> bool {
        let server = self.server.as_ref();
        server.is_some_and(|server| server.is_cached_alone(id))
    }

    fn not_kept(&mut self, at: usize, id: FileId) {
        self.counts.not_kept += 1;
        let (life, file) = (self.life, &mut self.files[at]);
        if file.has_failed {
            file.reasons.write = self.now;
        }
        self.note_error_of_others(at, id);
        let file = &mut self.files[at];
        file.again.extend(file.covered.iter().chain(&file.loose));
        let telling = file.lost.clone();
        let errno = Errno::IO;
        self.step(Event::NotKept { file: id, errno });
        if self.is_alive(life) {
            let has_records = self.has_records();
            self.files[at].tell(&telling, has_records);
        }
    }

    /// Whether there is a record for each part that must be written again. A grant holds one that
    /// is not in its lane yet.
    fn has_records(&self) -> bool {
        let is_full = |(lane, memory): (&LaneId, &LaneMemory)| {
            let is_granted = |hand: &&Hand| {
                self.clients[hand.client].lane == Some(*lane)
                    && matches!(hand.doing, Doing::Granted { .. })
            };
            let granted = self.hands.iter().filter(is_granted).count();
            (memory.records.len() + granted) as u32 >= self.record_count
        };
        !self.lanes.iter().any(is_full)
    }

    /// The kernel drops pages that it could not write, at any time.
    pub(super) fn let_some_go(&mut self, at: usize, pages: Range<u64>) {
        let lost = self.files[at].lost.range(pages).copied();
        for page in lost.collect::<Vec<u64>>() {
            if self.random.below(4) == 0 {
                self.files[at].let_go.insert(page);
                self.counts.let_go += 1;
            }
        }
    }

    fn read_from(&mut self, at: usize, io: IoId) -> u64 {
        let Some(Io::Read(io, slots)) = self.ios.get(&io) else {
            return 0;
        };
        let (io, slots) = (*io, slots.clone());
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let pages = OneFile::pages(io.range);
        if !io.buffered {
            // The kernel writes its pages there first.
            let dirty = self.files[at].dirty.range(pages.clone());
            for page in dirty.copied().collect::<Vec<u64>>() {
                self.write_page_out(at, page);
            }
        }
        self.let_some_go(at, pages.clone());
        let file = &self.files[at];
        let native = file.seen(pages, |page| {
            io.buffered || file.lost_before.contains(&page)
        });
        let mut from = io.range.start.0;
        for slot in slots {
            let base = from / slot_bytes * slot_bytes;
            let stop = io.range.end().min(base + slot_bytes);
            let place = slot.0 as usize * slot_bytes as usize + (from - base) as usize;
            let into = &mut self.slots[place..place + (stop - from) as usize];
            // Past the end the device gives any old bytes.
            into.fill(GARBAGE);
            let end = (stop as usize).min(native.len());
            if let Some(found) = native.get(from as usize..end) {
                into[..found.len()].copy_from_slice(found);
            }
            from = stop;
        }
        (native.len() as u64)
            .min(io.range.end())
            .saturating_sub(io.range.start.0)
    }

    fn write_to(&mut self, at: usize, io: IoId, fails: bool) -> Result<ByteCount, Errno> {
        let Some(Io::Write(io, parts, cells)) = self.ios.get(&io) else {
            return Err(Errno::IO);
        };
        let (io, cells) = (*io, cells.clone());
        if self.cells_of(parts) != cells {
            self.violate(format!("bytes that the device reads were changed: {io:?}"));
        }
        if self.files[at].refuses_direct && !io.buffered {
            return Err(Errno::INVALID);
        }
        if !self.map(at, OneFile::pages(io.range)) {
            self.files[at].reasons.write = self.now;
            return Err(Errno::NO_SPACE);
        }
        if !fails {
            if !io.buffered && self.falls_back(at, io.range) {
                self.write_by_the_cache(at, &io, &cells);
            } else {
                self.put(at, &io, &cells);
                self.meet(at, &io);
            }
            return Ok(io.range.length);
        }
        self.files[at].reasons.write = self.now;
        // A part of it may be there.
        let unit = match io.buffered {
            true => 1,
            false => 512,
        };
        let part = self.random.below(io.range.length.0 / unit + 1) * unit;
        self.put(at, &io, &cells[..part as usize]);
        match self.random.below(3) {
            0 if part < io.range.length.0 => Ok(ByteCount(part)),
            _ => Err(Errno::IO),
        }
    }

    /// A program was just writing to a page of the range: Linux cannot take that page out of its
    /// cache after a write past it, and reports an error.
    fn meet(&mut self, at: usize, io: &IoWrite) {
        let meets = self.random.below(8) == 0;
        let file = &mut self.files[at];
        if io.buffered || !meets || file.meets_from > self.now {
            return;
        }
        file.meets_from = self.now + MEETS_EVERY;
        file.has_error = true;
        file.has_error_past = true;
        self.counts.met += 1;
    }

    /// Linux makes room in its cache for a write that goes past it. If that fails, the write goes
    /// through the cache, and succeeds.
    fn falls_back(&mut self, at: usize, range: ByteRange) -> bool {
        let dirty = self.files[at].dirty.range(OneFile::pages(range));
        for page in dirty.copied().collect::<Vec<u64>>() {
            self.write_page_out(at, page);
        }
        std::mem::take(&mut self.files[at].falls_back)
    }

    fn write_by_the_cache(&mut self, at: usize, io: &IoWrite, cells: &[Cell]) {
        self.counts.fallbacks += 1;
        self.files[at].write_buffered(io.range.start.0, cells, self.now);
        if !self.files[at].falls_back_lazily {
            for page in OneFile::pages(io.range) {
                self.write_page_out(at, page);
            }
        }
    }

    pub(super) fn put(&mut self, at: usize, io: &IoWrite, cells: &[Cell]) {
        let (file, start) = (&mut self.files[at], io.range.start.0);
        if cells.is_empty() {
            return;
        }
        match io.buffered {
            true => file.write_buffered(start, cells, self.now),
            false => file.write_direct(start, cells, self.now),
        }
    }

    // ---- The end ----

    /// Whether no work is left.
    pub(super) fn is_settled(&self) -> bool {
        let Some(server) = &self.server else {
            return false;
        };
        let is_idle = self.hands.iter().all(Hand::is_idle);
        let is_done = |(id, lane): (&LaneId, &LaneMemory)| {
            lane.records.is_empty() && server.is_lane_unused(*id)
        };
        is_idle
            && self.ios.is_empty()
            && self.lanes.iter().all(is_done)
            && server.writes().dirty_file_count == 0
            && self
                .files
                .iter()
                .all(|file| file.chores.is_empty() && !file.is_busy && file.untold.is_empty())
    }

    /// All acknowledged bytes are on their devices, and no client waits.
    fn judge(&mut self) {
        let mut wrong: Vec<String> = Vec::new();
        for hand in self.hands.iter().filter(|hand| !hand.is_idle()) {
            wrong.push(format!("somebody still waits at the end: {hand:?}"));
        }
        for (lane, memory) in &self.lanes {
            let ranges: Vec<_> = memory.records.values().map(|left| left.range).collect();
            if !ranges.is_empty() {
                wrong.push(format!("{lane:?} still has pieces: {ranges:?}"));
            }
            let server = self.server.as_ref();
            if server.is_some_and(|server| !server.is_lane_unused(*lane)) {
                wrong.push(format!("pages of {lane:?} are still in use"));
            }
        }
        for file in &self.files {
            for (have, what) in [
                (&file.native, "the kernel shows"),
                (&file.disk, "the disk has"),
            ] {
                if let Some(differs) = file.differs(have) {
                    wrong.push(format!("at the end {what} of {}: {differs}", file.path));
                }
            }
            if let Some(lost) = file.not_durable(&file.medium) {
                wrong.push(format!("at the end, of {}: {lost}", file.path));
            }
        }
        if !self.is_settled() && wrong.is_empty() {
            wrong.push(format!(
                "it does not come to an end: {:?}, {} requests under way",
                self.server.as_ref().map(Server::writes),
                self.ios.len()
            ));
        }
        for client in 0..self.clients.len() {
            let session = self.clients[client].session;
            self.step(Event::SessionClosed { session });
        }
        if wrong.is_empty() && !self.lanes.is_empty() {
            let lanes: Vec<_> = self.lanes.keys().collect();
            wrong.push(format!("lanes that nobody has are not done: {lanes:?}"));
        }
        for sentence in wrong {
            self.violate(sentence);
        }
    }

    /// Whether a client has waited too long without a fault.
    pub(super) fn is_patience_over(&self, since: Instant) -> bool {
        let since = since.max(self.well_since);
        self.server.is_some() && self.now > since + PATIENCE
    }
}
