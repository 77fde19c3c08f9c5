// SPDX-License-Identifier: Apache-2.0
//! Faults: daemons, clients and machines that die, disks that fail, hang and fill up, and strangers
//! that write beside the clients.
//!
//! Two faults are left out, as they may end badly and the documents say so
//! ([0036](../../../docs/decisions/0036-what-must-be-true-before-an-answer.md)): a daemon that dies
//! while the kernel has lost bytes of which only that daemon had a copy, and a stranger that
//! overwrites bytes of ours that are not on the disk yet, or that the kernel has lost.

use super::file::{Cell, GARBAGE, OneFile};
use super::hands::{Client, Doing, Hand, Kind};
use super::world::{Io, LaneMemory, What, World};
use crate::prng::Prng;
use rushes_core::server::*;
use rushes_core::units::*;
use std::collections::BTreeMap;

/// A disk as its driver sees it.
pub(super) struct Disk {
    /// The mean time of a request.
    pub(super) service: Duration,
    pub(super) takes_flushes: bool,
    /// Blocks that no file has.
    pub(super) free: u64,
    /// Blocks that a stranger has for a time.
    stolen: u64,
    pub(super) fails_writes_until: Instant,
    pub(super) fails_reads_until: Instant,
    pub(super) hangs_until: Instant,
    /// So many of a thousand requests fail then.
    pub(super) fails_permille: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Kill,
    PowerCut,
    ClientDies,
    WritesFail,
    ReadsFail,
    Hangs,
    Fills,
    Writes,
    Cuts,
    Policy,
    LetGo,
    ForeignLoad,
    Crowded,
}

const TROUBLES: [(Trouble, u64); 13] = [
    (Trouble::Kill, 12),
    (Trouble::PowerCut, 6),
    (Trouble::ClientDies, 12),
    (Trouble::WritesFail, 8),
    (Trouble::ReadsFail, 5),
    (Trouble::Hangs, 5),
    (Trouble::Fills, 6),
    (Trouble::Writes, 40),
    (Trouble::Cuts, 10),
    (Trouble::Policy, 5),
    (Trouble::LetGo, 6),
    (Trouble::ForeignLoad, 3),
    (Trouble::Crowded, 8),
];

/// The value that changes in secret, to see whether the checks find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flip {
    /// A byte of a file, where the kernel shows it.
    Shown,
    /// A byte of it on the disk.
    Disk,
    /// A byte that was synced, on the medium.
    Medium,
    /// A byte of an acknowledged write, in its lane.
    Lane,
    /// A byte of a buffer that a client reads.
    Buffer,
}

/// The value of a cell after that.
pub(super) const FLIPPED: Cell = 1;

/// A drawn round.
pub(super) struct Plan {
    pub(super) length: Duration,
    pub(super) trouble_every: Duration,
    troubles: Vec<(Trouble, u64)>,
    pub(super) dies_in_steps: bool,
    /// A daemon dies in the middle of one of so many steps.
    pub(super) steps_to_death: u64,
    pub(super) limits: Limits,
    pub(super) policy: Policy,
    pub(super) lane_pages: u32,
    pub(super) record_count: u32,
    pub(super) think: Duration,
    /// The longest file. Units: bytes.
    pub(super) most: u64,
    disks: u64,
    files: u64,
    clients: u64,
    pub(super) flip: Option<Flip>,
}

impl Plan {
    pub(super) fn drawn(random: &mut Prng) -> Plan {
        let slot_count = random.between(8, 24) as u32;
        let pages = random.between(40, 150);
        let limits = Limits {
            slot_count,
            slot_bytes: 64 << 10,
            chunk_bytes_max: random.between(8, 48) << 10,
            write_buffer_bytes: pages * PAGE_BYTES,
            write_bytes_max: 100_000,
            write_part_count_max: random.between(4, 40) as u32,
            // There are six files at most: half of all rounds have no bound.
            file_count_max: random.below(12) as u32,
            ..Limits::default()
        };
        let policy = Policy {
            write_age: Duration::from_ms(random.between(200, 4000)),
            coalesce: !random.chance(200),
            ..Policy::default()
        };
        // Not each of them in each round, and some much more often than others.
        let mut troubles: Vec<(Trouble, u64)> = Vec::new();
        for (trouble, weight) in TROUBLES {
            if random.chance(650) {
                troubles.push((trouble, weight * random.between(1, 4)));
            }
        }
        Plan {
            length: Duration::from_s(random.between(60, 900)),
            trouble_every: Duration::from_ms(random.log_between(150.0, 6000.0) as u64),
            troubles,
            dies_in_steps: random.chance(600),
            steps_to_death: random.log_between(300.0, 20_000.0) as u64,
            limits,
            policy,
            lane_pages: random.between(24, 64) as u32,
            record_count: random.between(12, 64) as u32,
            think: Duration::from_us(random.log_between(20_000.0, 4_000_000.0) as u64),
            most: random.log_between(24_000.0, 260_000.0) as u64 / PAGE_BYTES * PAGE_BYTES,
            disks: random.between(1, 3),
            files: random.between(1, 6),
            clients: random.between(1, 5),
            flip: None,
        }
    }
}

fn model(service: Duration) -> DeviceModel {
    let model = ServiceModel {
        fixed: service,
        span: Duration(service.0 * 2),
        rate: BytesPerSecond(172_000_000),
    };
    DeviceModel {
        read: model,
        write: model,
        size: ByteCount(40 << 30),
    }
}

impl World {
    // ---- The population ----

    pub(super) fn populate(&mut self) {
        for _ in 0..self.plan.disks {
            let service = self.random.log_between(100_000.0, 16_000_000.0) as u64;
            let disk = Disk {
                service: Duration(service),
                takes_flushes: !self.random.chance(200),
                free: self.random.between(300, 2000),
                stolen: 0,
                fails_writes_until: Instant::ZERO,
                fails_reads_until: Instant::ZERO,
                hangs_until: Instant::ZERO,
                fails_permille: 0,
            };
            self.disks.push(disk);
        }
        for index in 0..self.plan.files as usize {
            let device = self.random.below(self.plan.disks) as usize;
            let length = self.random.below(self.plan.most);
            let mut file = OneFile::new(index, device, length);
            file.is_exclusive = self.random.chance(600);
            file.refuses_direct = self.random.chance(120);
            if self.random.chance(100) {
                file.way = WriteWay::Through;
            }
            if self.random.chance(400) {
                let rate = BytesPerSecond(self.random.between(50_000, 2_000_000));
                file.hint = Some(RateHint::Rate(rate, RateSource::Header));
            }
            self.files.push(file);
            self.disks[device].free += length.div_ceil(PAGE_BYTES);
            self.map(index, 0..length.div_ceil(PAGE_BYTES));
        }
        for client in 0..self.plan.clients as usize {
            self.clients.push(Client {
                session: SessionId(0),
                lane: None,
            });
            for _ in 0..self.random.between(1, 3) {
                let file = self.random.below(self.plan.files) as usize;
                let kind = Kind::drawn(&mut self.random);
                self.hands.push(Hand::new(client, file, kind));
            }
        }
    }

    // ---- Daemons ----

    /// A server starts over the bytes that the last one left.
    pub(super) fn boot(&mut self) {
        if self.server.is_some() {
            return;
        }
        self.life += 1;
        self.server = Some(Server::new(self.limits.clone(), self.policy.clone()));
        self.slots.fill(GARBAGE);
        self.is_booting = true;
        self.well_since = self.now;
        for disk in 0..self.disks.len() {
            let model = model(self.disks[disk].service);
            let device = DeviceId(disk as u16 + 1);
            self.step_to(Event::DeviceAdded { device, model }, usize::MAX);
        }
        // Files that cannot be opened just now: the server learns later of the bytes left of them.
        for at in 0..self.files.len() {
            self.files[at].is_kept = !self.is_quiet && self.random.chance(120);
        }
        let mut is_told_later = false;
        for memory in self.lanes.values_mut() {
            for record in memory.records.values_mut() {
                record.is_kept = self.files[record.file].is_kept;
                is_told_later |= record.is_kept;
            }
            memory.is_told = false;
        }
        if is_told_later {
            let delay = Duration::from_ms(self.random.between(50, 8000));
            self.later(delay, What::TellKept(self.life));
        } else {
            for file in &mut self.files {
                file.is_kept = false;
            }
        }
        let left = self.left(|is_kept| !is_kept);
        self.counts.recovered += left.len() as u64;
        if !self.tell_left(left, true) {
            self.counts.kills_booting += 1;
            return;
        }
        for client in 0..self.clients.len() {
            let delay = Duration::from_ms(self.random.below(300));
            self.later(delay, What::Join(self.life, client));
        }
    }

    /// The contents of lanes, in the order of their publication.
    fn left(&self, which: impl Fn(bool) -> bool) -> Vec<(u64, LaneId, u32)> {
        let mut left = Vec::new();
        for (lane, memory) in &self.lanes {
            for (record, found) in &memory.records {
                if which(found.is_kept) {
                    left.push((found.order, *lane, *record));
                }
            }
        }
        left.sort_unstable();
        left
    }

    /// Tells the server of the bytes left. False: the daemon died meanwhile.
    fn tell_left(&mut self, left: Vec<(u64, LaneId, u32)>, is_all: bool) -> bool {
        self.is_booting = true;
        let lanes: Vec<LaneId> = self.lanes.keys().copied().collect();
        for lane in lanes {
            let is_of = |&(_, other, _): &(u64, LaneId, u32)| other == lane;
            let memory = self.lanes.get_mut(&lane);
            let memory = memory.expect("a lane that was there a moment ago");
            let is_empty = is_all && memory.records.is_empty();
            if memory.is_told || !(is_empty || left.iter().any(is_of)) {
                continue;
            }
            memory.is_told = true;
            let event = Event::LaneAdded {
                lane,
                session: None,
                page_count: self.lane_pages,
                record_count: self.record_count,
            };
            self.step_to(event, usize::MAX);
            let records = self.lanes.get(&lane).map(|memory| &memory.records);
            let kept = records.into_iter().flatten();
            let kept = kept.filter(|(_, found)| found.is_kept);
            let kept: Vec<u32> = kept.map(|(record, _)| *record).collect();
            for record in kept {
                self.step_to(Event::RecordKept { lane, record }, usize::MAX);
            }
        }
        // One in six dies while it starts, and one in six of those that follow.
        let dies_at = match !self.is_quiet && self.plan.dies_in_steps && self.random.chance(160) {
            true => self.random.below(left.len() as u64 + 2),
            false => u64::MAX,
        };
        let count = left.len() as u64;
        for (index, (_, lane, record)) in left.into_iter().enumerate() {
            let memory = self.lanes.get_mut(&lane);
            let found = memory.and_then(|memory| memory.records.get_mut(&record));
            let Some(found) = found else {
                self.violate(format!(
                    "record {record} of {lane:?} went while it was told"
                ));
                return false;
            };
            found.is_kept = false;
            let found = found.clone();
            let id = self.id_of(found.file);
            let event = Event::Recovered {
                lane,
                record,
                facts: self.facts(found.file, id),
                range: found.range,
                runs: found.runs,
            };
            if !self.step_or_die(event, index as u64 == dies_at) {
                return false;
            }
        }
        self.is_booting = false;
        self.step_or_die(Event::RecoveryEnded, count == dies_at)
    }

    fn step_or_die(&mut self, event: Event, dies: bool) -> bool {
        let dies_after = match dies {
            true => self.random.below(8) as usize,
            false => usize::MAX,
        };
        let lives = self.step_to(event, dies_after);
        if lives && dies {
            self.kill();
        }
        lives && !dies
    }

    /// Files that could not be opened can be opened.
    pub(super) fn tell_kept(&mut self) {
        if !self.files.iter().any(|file| file.is_kept) {
            return;
        }
        for file in &mut self.files {
            file.is_kept = false;
        }
        let left = self.left(|is_kept| is_kept);
        self.counts.told_later += left.len() as u64;
        self.step_to(Event::RecoveryBegun, usize::MAX);
        self.tell_left(left, false);
    }

    /// The daemon dies; lanes and clients stay. Work under way may have been done, in any order and
    /// in part.
    pub(super) fn kill(&mut self) {
        if self.server.take().is_none() {
            return;
        }
        self.counts.kills += 1;
        for file in &mut self.files {
            file.keep_what_is_untold();
        }
        self.end_under_way();
        self.forget_all();
        let delay = Duration::from_ms(self.random.log_between(20.0, 4000.0) as u64);
        self.later(delay, What::Boot);
    }

    fn end_under_way(&mut self) {
        let mut ios: Vec<Io> = std::mem::take(&mut self.ios).into_values().collect();
        while !ios.is_empty() {
            let io = ios.swap_remove(self.random.below(ios.len() as u64) as usize);
            let Io::Write(io, _, cells) = io else {
                continue;
            };
            let at = self.by_id.get(&io.file).copied();
            let Some(at) = at.filter(|&at| io.buffered || !self.files[at].refuses_direct) else {
                continue;
            };
            let part = match self.random.below(3) {
                0 => 0,
                1 => self.random.below(io.range.length.0 / 512 + 1) * 512,
                _ => io.range.length.0,
            };
            if self.map(at, OneFile::pages(io.range)) {
                self.put(at, &io, &cells[..part as usize]);
            }
        }
    }

    fn forget_all(&mut self) {
        self.life += 1;
        self.is_booting = false;
        self.by_id.clear();
        self.well_since = self.now;
        for file in &mut self.files {
            let size = file.size();
            file.id = None;
            file.chores.clear();
            file.is_busy = false;
            file.looks = 0;
            file.syncs = 0;
            file.untold.clear();
            file.is_length_unsure = false;
            file.is_left_reserved = file
                .mapped
                .range(size.div_ceil(PAGE_BYTES)..)
                .next()
                .is_some();
            file.prune(u64::MAX);
        }
        for hand in &mut self.hands {
            hand.left();
        }
        for client in &mut self.clients {
            client.session = SessionId(0);
            client.lane = None;
        }
    }

    /// The machine loses its power, and with it the lanes and all volatile memory.
    fn power_cut(&mut self) {
        self.counts.power_cuts += 1;
        self.server = None;
        self.end_under_way();
        self.forget_all();
        self.lanes.clear();
        let mut wrong = Vec::new();
        for at in 0..self.files.len() {
            let random = &mut self.random;
            let file = &mut self.files[at];
            file.power_cut(|| random.chance(500));
            if let Some(lost) = file.not_durable(&file.medium) {
                wrong.push(format!("after a power cut, of {}: {lost}", file.path));
            }
            file.floor = file.medium.clone();
            file.is_left_reserved = false;
            self.unmap_beyond(at);
            // A length that came with the journal, and blocks that did not.
            let pages = self.files[at].size().div_ceil(PAGE_BYTES);
            self.map(at, 0..pages);
        }
        for sentence in wrong {
            self.violate(sentence);
        }
        let delay = Duration::from_ms(self.random.between(100, 5000));
        self.later(delay, What::Boot);
    }

    // ---- Clients ----

    /// A client comes, with a lane of its own.
    pub(super) fn join(&mut self, client: usize) {
        let session = SessionId(self.number() as _);
        let lane = LaneId(self.number() as _);
        self.lanes.insert(
            lane,
            LaneMemory {
                cells: vec![GARBAGE; self.lane_pages as usize * PAGE_BYTES as usize],
                records: BTreeMap::new(),
                is_told: true,
            },
        );
        self.clients[client].session = session;
        self.clients[client].lane = Some(lane);
        let label = SessionLabel {
            client: format!("client{client}"),
            ..SessionLabel::default()
        };
        self.step(Event::SessionOpened { session, label });
        self.step(Event::LaneAdded {
            lane,
            session: Some(session),
            page_count: self.lane_pages,
            record_count: self.record_count,
        });
        for hand in 0..self.hands.len() {
            if self.hands[hand].client == client {
                let delay = self.pause(Duration::from_ms(20));
                let epoch = self.hands[hand].epoch;
                self.later(delay, What::Think(hand, epoch));
            }
        }
    }

    fn client_dies(&mut self) {
        let client = self.random.below(self.clients.len() as u64) as usize;
        let session = self.clients[client].session;
        if session == SessionId(0) || self.server.is_none() {
            return;
        }
        self.counts.client_deaths += 1;
        self.clients[client].session = SessionId(0);
        self.clients[client].lane = None;
        for index in 0..self.hands.len() {
            if self.hands[index].client != client {
                continue;
            }
            // A change that it made and did not report was noticed, and is reported after a while.
            if let Doing::Changed { .. } = self.hands[index].doing {
                let delay = Duration::from_ms(self.random.between(1, 2000));
                self.later(delay, What::Foreign(self.life, self.hands[index].file));
            }
            self.hands[index].left();
        }
        let life = self.life;
        self.step(Event::SessionClosed { session });
        let delay = Duration::from_ms(self.random.between(1, 800));
        self.later(delay, What::Join(life, client));
    }

    // ---- The kernel and the disks ----

    /// The kernel writes some pages of its cache by itself.
    pub(super) fn kernel(&mut self) {
        for at in 0..self.files.len() {
            if self.disks[self.files[at].device].hangs_until > self.now {
                continue;
            }
            let pages: Vec<u64> = self.files[at].dirty.iter().copied().collect();
            for page in pages {
                if self.random.chance(150) {
                    self.write_page_out(at, page);
                }
            }
        }
        let delay = self.pause(Duration::from_ms(1500));
        self.later(delay, What::Kernel);
    }

    pub(super) fn disk_is_well(&mut self, disk: usize) {
        let disk = &mut self.disks[disk];
        disk.free += std::mem::take(&mut disk.stolen);
    }

    fn disk_troubled(&mut self, trouble: Trouble) {
        self.counts.disk_troubles += 1;
        let at = self.random.below(self.disks.len() as u64) as usize;
        let most = if trouble == Trouble::Hangs {
            8000.0
        } else {
            20_000.0
        };
        let time = Duration::from_ms(self.random.log_between(50.0, most) as u64);
        let until = self.now + time;
        let permille = self.random.between(100, 1000);
        let disk = &mut self.disks[at];
        match trouble {
            Trouble::WritesFail => disk.fails_writes_until = until,
            Trouble::ReadsFail => disk.fails_reads_until = until,
            Trouble::Hangs => disk.hangs_until = until,
            _ => {
                disk.stolen += disk.free;
                disk.free = 0;
            }
        }
        disk.fails_permille = permille;
        self.well_since = self.well_since.max(until);
        self.later(time, What::DiskIsWell(at));
    }

    // ---- Strangers ----

    /// Bytes of ours, or of a client that is writing them, that a stranger could overwrite in
    /// between.
    fn is_ours(&self, at: usize, range: ByteRange) -> bool {
        let is_under_way = self.ios.values().any(|io| match io {
            Io::Read(..) => false,
            Io::Write(io, ..) => self.by_id.get(&io.file) == Some(&at) && io.range.overlaps(range),
        });
        let is_left = self.lanes.values().any(|memory| {
            let mut records = memory.records.values();
            records.any(|record| record.file == at && record.range.overlaps(range))
        });
        let is_written = self
            .hands
            .iter()
            .any(|hand| hand.file == at && hand.writes(range));
        // If the kernel cannot write a page of the file, all pages that may be lost are written
        // again, over a stranger's later bytes: nothing tells which were later.
        let file = &self.files[at];
        let is_loose = |page: u64| {
            let sets = [
                &file.lost,
                &file.dirty,
                &file.loose,
                &file.covered,
                &file.again,
            ];
            sets.iter().any(|pages| pages.contains(&page))
        };
        let is_loose = OneFile::pages(range).any(is_loose);
        is_under_way || is_left || is_written || is_loose
    }

    fn is_strange(&mut self) -> Option<usize> {
        let at = self.random.below(self.files.len() as u64) as usize;
        (!self.files[at].is_exclusive).then_some(at)
    }

    fn strangers_change(&mut self, at: usize) {
        if self.server.is_some() {
            let index = self.files[at].log_end() - 1;
            self.files[at].untold.push(index);
            let delay = Duration::from_us(self.random.log_between(100.0, 40_000.0) as u64);
            self.later(delay, What::Foreign(self.life, at));
        }
    }

    fn write_strangely(&mut self) {
        let Some(at) = self.is_strange() else {
            return;
        };
        let size = self.files[at].size();
        let start = self.random.below(size.max(1));
        let length = (1 + self.random.below(9000)).min(size.saturating_sub(start));
        let range = ByteRange::new(start, length);
        if length == 0 || self.is_ours(at, range) {
            return;
        }
        if !self.map(at, OneFile::pages(range)) {
            return;
        }
        let now = self.now;
        let file = &mut self.files[at];
        let change = file.change();
        file.happens(change);
        let cells: Vec<Cell> = file.cells(change, range);
        file.write_direct(start, &cells, now);
        file.told(start, cells, true);
        self.counts.strange_writes += 1;
        self.strangers_change(at);
    }

    fn cut_strangely(&mut self) {
        let Some(at) = self.is_strange() else {
            return;
        };
        let is_held = self.hands.iter().any(|hand| hand.changes(at));
        if is_held || self.is_ours(at, ByteRange::new(0, 1 << 24)) {
            return;
        }
        let length = self.random.below(self.plan.most);
        let now = self.now;
        let file = &mut self.files[at];
        file.truncate(length, now);
        file.told_cut(length);
        file.is_length_unsure = true;
        self.unmap_beyond(at);
        self.counts.strange_cuts += 1;
        self.strangers_change(at);
    }

    pub(super) fn tell_of_stranger(&mut self, life: u64, at: usize) {
        if self.life == life && self.server.is_some() {
            self.files[at].untold.clear();
            let key = self.files[at].key;
            self.step(Event::ForeignChange { key });
        }
    }

    // ---- Timing ----

    /// A fault occurs.
    pub(super) fn trouble(&mut self) {
        let waits = |hand: &&Hand| !hand.is_idle() && self.is_patience_over(hand.begun);
        if let Some(hand) = self.hands.iter().find(waits) {
            let sentence = format!("somebody waits, and nothing is wrong: {hand:?}");
            return self.violate(sentence);
        }
        let delay = self.pause(self.plan.trouble_every);
        self.later(delay, What::Trouble);
        if self.is_quiet {
            return;
        }
        let sum: u64 = self.plan.troubles.iter().map(|(_, weight)| weight).sum();
        let mut drawn = self.random.below(sum);
        let mut which = None;
        for &(trouble, weight) in &self.plan.troubles {
            if drawn < weight {
                which = Some(trouble);
                break;
            }
            drawn -= weight;
        }
        let Some(trouble) = which else {
            return;
        };
        match trouble {
            Trouble::Kill => self.kill(),
            Trouble::PowerCut => {
                if self.server.is_some() {
                    self.power_cut();
                }
            }
            Trouble::ClientDies => self.client_dies(),
            Trouble::WritesFail | Trouble::ReadsFail | Trouble::Hangs | Trouble::Fills => {
                self.disk_troubled(trouble);
            }
            Trouble::Writes => self.write_strangely(),
            Trouble::Cuts => self.cut_strangely(),
            Trouble::Policy => {
                self.policy.coalesce = self.random.chance(700);
                self.policy.write_age = Duration::from_ms(self.random.between(100, 5000));
                self.step(Event::PolicyChanged(self.policy.clone()));
            }
            Trouble::LetGo => {
                let at = self.random.below(self.files.len() as u64) as usize;
                let key = self.files[at].key;
                self.step(Event::LetGo { key });
            }
            Trouble::Crowded => {
                self.step(Event::Crowded);
            }
            Trouble::ForeignLoad => {
                let disk = self.random.below(self.disks.len() as u64) as u16;
                let rate = BytesPerSecond(self.random.below(100_000_000));
                let requests_per_kilosecond = self.random.below(50_000);
                self.step(Event::ForeignLoad {
                    device: DeviceId(disk + 1),
                    requests_per_kilosecond,
                    rate,
                });
            }
        }
    }

    /// No more faults, and no new work; the rest is written.
    pub(super) fn quiet(&mut self) {
        self.is_quiet = true;
        self.well_since = self.now;
        for at in 0..self.disks.len() {
            self.disk_is_well(at);
            let disk = &mut self.disks[at];
            disk.fails_writes_until = Instant::ZERO;
            disk.fails_reads_until = Instant::ZERO;
            disk.hangs_until = Instant::ZERO;
        }
        self.flip();
        if self.server.is_some() {
            self.tell_kept();
        }
        self.policy.write_age = Duration::ZERO;
        self.step(Event::PolicyChanged(self.policy.clone()));
    }

    /// Changes a byte in secret.
    fn flip(&mut self) {
        let Some(flip) = self.plan.flip else {
            return;
        };
        let files = self.files.iter_mut().filter(|file| !file.flat.is_empty());
        match flip {
            Flip::Shown => files.take(1).for_each(|file| {
                if let Some(cell) = file.native.first_mut() {
                    *cell = FLIPPED;
                }
            }),
            Flip::Disk => files.take(1).for_each(|file| {
                if let Some(cell) = file.disk.last_mut() {
                    *cell = FLIPPED;
                }
            }),
            Flip::Medium => files.take(1).for_each(|file| {
                let place = file.floor.iter().position(|floor| *floor != 0);
                if let Some(place) = place {
                    file.volatile.clear();
                    file.medium[place] = 0;
                }
            }),
            Flip::Lane => {
                let pieces = self.lanes.values_mut().filter_map(|memory| {
                    let record = memory.records.values().find(|r| r.runs.page_count() > 0)?;
                    let (page, _) = record.runs.place(0)?;
                    let into = u64::from(page) * PAGE_BYTES + record.range.start.0 % PAGE_BYTES;
                    memory.cells.get_mut(into as usize)
                });
                pieces.for_each(|cell| *cell = FLIPPED);
            }
            // Done when a client has a buffer.
            Flip::Buffer => {}
        }
    }
}
