// SPDX-License-Identifier: Apache-2.0
//! The ledger: counts due and late reads, says by how much and through which stage, and makes the
//! records of streams, seats, devices and the cache for `status`. When a read is due: `clock.rs`.

use super::clock::{Due, PlayClock, is_late, lateness};
use super::glances::RUN_MIN;
use super::state::*;
use super::*;
use crate::stream::{CursorIndex, Moved, Observation};
use alloc::vec::Vec;

impl Server {
    /// Enter an answered read.
    pub(super) fn account(&mut self, read: &Read, outcome: &Outcome) {
        let now = self.now;
        // A read that never waited for a device was a hit, also when its file was still being
        // opened.
        let hit = read.asked == Instant::NEVER;
        match outcome {
            Outcome::Data { .. } if hit => self.hit_count += 1,
            Outcome::Data { .. } => self.miss_count += 1,
            _ => {}
        }
        let entry = Entry {
            read_count: 1,
            bytes: match outcome {
                Outcome::Data { length, .. } => length.0,
                _ => 0,
            },
            hit_count: u64::from(hit && matches!(outcome, Outcome::Data { .. })),
            // A contract at the time of the read's arrival counts, also when it was withdrawn
            // meanwhile.
            promised: lateness(read.due.by_contract, now),
            ..Entry::due(read, now)
        };
        let Some(stream) = read.stream.and_then(|id| self.streams.get_mut(id.0)) else {
            // Its stream has ended: a sequence went on elsewhere, or the handle was closed.
            let line = read.line.and_then(|line| self.closed_line(line));
            return line.map_or((), |line| line.reads.enter(&entry));
        };
        if let Some(lateness) = lateness(read.due.at_device, now) {
            stream.late_before = lateness > Duration::ZERO;
        }
        if read.due.by_clock != Instant::NEVER {
            for clock in [&mut stream.clock, &mut stream.begun].into_iter().flatten() {
                clock.answered(now, read.due.by_clock);
            }
            if let Some(session) = self.sessions.get_mut(&read.session) {
                session.last_answer = read.stream.map(|id| (id, now));
                if let Some(clock) = &mut session.clock {
                    clock.answered(now, read.due.by_clock);
                }
            }
        }
        stream.reads.enter(&entry);
    }

    /// Enter a read that is never answered, since its client has gone: late, if it was due before
    /// that.
    pub(super) fn account_unanswered(&mut self, key: u32) {
        let now = self.now;
        let late = |read: &&Read| is_late(read.due.by_clock, now);
        let Some(read) = self.reads.get(key).filter(late) else {
            return;
        };
        let (entry, stream, line) = (Entry::due(read, now), read.stream, read.line);
        if let Some(stream) = stream.and_then(|id| self.streams.get_mut(id.0)) {
            stream.reads.enter(&entry);
        } else if let Some(line) = line.and_then(|line| self.closed_line(line)) {
            line.reads.enter(&entry);
        }
    }

    fn closed_line(&mut self, number: u32) -> Option<&mut StreamRecord> {
        let mut lines = self.closed.iter_mut().rev();
        lines.find(|line| line.number == number)
    }

    /// A run that begins, or goes on where no stream followed it, has a clock of its own from its
    /// first read on.
    pub(super) fn begin_clock(
        &mut self,
        id: StreamId,
        seen: &Observation,
        range: ByteRange,
        arrived: Instant,
    ) {
        if seen.moved != Moved::Began {
            return;
        }
        let preroll = self.policy.preroll;
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let session = self.sessions.get(&stream.session);
        // A session of a pool's door has all clients of its mount.
        let seat = session.filter(|session| session.is_seat());
        let place = (seen.cursor, range.start.0);
        stream.begun = Some(match seat.and_then(|seat| seat.clock) {
            Some(clock) => {
                let (from, mut reads) = (stream.session, self.reads.iter());
                let waits =
                    |read: &Read| read.session == from && read.due.by_clock != Instant::NEVER;
                let is_alone = !reads.any(|(_, read)| waits(read));
                clock.cut(place, arrived, is_alone, (preroll, RUN_MIN))
            }
            None => PlayClock::new(Some(place.0), place.1, arrived),
        });
    }

    /// When a read is due of a run that no stream follows yet.
    pub(super) fn begun_due(
        &mut self,
        id: StreamId,
        seen: &Observation,
        range: ByteRange,
        arrived: Instant,
    ) -> Instant {
        let (from_header, preroll) = (self.policy.contracts_from_header, self.policy.preroll);
        let hint = (self.streams.get(id.0)).and_then(|stream| self.hint_of(stream));
        let Some(stream) = self.streams.get_mut(id.0) else {
            return Instant::NEVER;
        };
        let told = match hint {
            Some(RateHint::Rate(_, RateSource::Header)) if !from_header => None,
            Some(RateHint::Rate(rate, _)) => Some(rate),
            _ => None,
        };
        let rate = stream.rate.map(|(rate, _)| rate).or(told);
        let (Some(rate), false) = (rate.filter(|rate| rate.0 > 0), stream.is_copy) else {
            return Instant::NEVER;
        };
        let is_alone = stream.waiting_count == 0;
        let cursor = Some(seen.cursor);
        let Some(clock) = stream.begun.as_mut().filter(|begun| begun.cursor == cursor) else {
            return Instant::NEVER;
        };
        let at = range.start.0.abs_diff(clock.origin);
        let due = clock.due((at, range.length.0), rate, arrived, is_alone, preroll);
        let (session, clock) = (stream.session, *clock);
        self.keep_clock(session, clock);
        due
    }

    /// A read of a stream that is followed goes by the stream's clock.
    pub(super) fn keep_clock_of(&mut self, id: StreamId, due: &Due) {
        let stream = self
            .streams
            .get(id.0)
            .filter(|_| due.by_clock != Instant::NEVER);
        if let Some((session, clock)) =
            stream.and_then(|stream| Some((stream.session, stream.clock?)))
        {
            self.keep_clock(session, clock);
        }
    }

    /// A read goes by this clock, the last one of its seat.
    fn keep_clock(&mut self, session: SessionId, clock: PlayClock) {
        if let Some(seat) = self.sessions.get_mut(&session) {
            seat.clock = Some(clock);
        }
    }

    /// The ledger: open streams, then the most recent closed ones.
    pub fn streams(&self, now: Instant) -> Vec<StreamRecord> {
        let mut records: Vec<StreamRecord> = self
            .streams
            .iter()
            .filter(|(_, stream)| !stream.is_kept)
            .filter_map(|(key, _)| self.record_of(StreamId(key), true))
            .collect();
        records.extend(self.closed.iter().rev().cloned());
        self.add_waiting_late(now, &mut records);
        records
    }

    /// Reads that are due and still wait are late, whenever they are answered.
    fn add_waiting_late(&self, now: Instant, records: &mut [StreamRecord]) {
        let reads = self.reads.iter().map(|(_, read)| read);
        for read in reads.filter(|read| is_late(read.due.by_clock, now)) {
            let record = records.iter_mut().find(|record| match read.stream {
                Some(stream) => record.open && record.stream == stream,
                None => Some(record.number) == read.line,
            });
            if let Some(record) = record {
                record.reads.enter(&Entry::due(read, now));
            }
        }
    }

    pub(super) fn record_of(&self, id: StreamId, open: bool) -> Option<StreamRecord> {
        let stream = self.streams.get(id.0)?;
        let ahead = match stream.rate {
            Some((rate, _)) => {
                rate.time_for(ByteCount(stream.fetched.saturating_sub(stream.consumed)))
            }
            None => Duration::ZERO,
        };
        // Without the analyser nothing is due at any rate.
        let rate = match self.policy.analyser {
            true => self.told_rate(stream),
            false => stream.rate,
        };
        Some(StreamRecord {
            stream: id,
            number: stream.number,
            session: stream.session,
            label: self.label_of(stream),
            path: stream.path.clone(),
            part: stream.part,
            sequence: stream.frames.is_some(),
            devices: (0..).map_while(|at| stream.device_at(at)).collect(),
            standing: stream.standing,
            rate,
            refusal: stream.refusal,
            reads: stream.reads.clone(),
            ahead,
            open,
        })
    }

    fn label_of(&self, stream: &Stream) -> SessionLabel {
        let session = self.sessions.get(&stream.session);
        let mut label = session.map_or_else(SessionLabel::default, |session| session.label.clone());
        if let Some(station) = &stream.station {
            label.user.clone_from(&station.user);
            label.client.clone_from(&station.client);
        }
        label
    }

    /// Seats with something open, or with a contract that they keep; by session.
    pub fn seats(&self, now: Instant) -> Vec<SeatRecord> {
        let now = self.now.max(now);
        // All clients of a pool's mount are in its door's sessions together.
        let number_of = |key: u32, stream: &Stream| {
            let session = self.sessions.get(&stream.session);
            let is_seat = session.is_some_and(|session| session.is_seat());
            (stream.session, if is_seat { 0 } else { key + 1 })
        };
        let mut seats: BTreeMap<(SessionId, u32), SeatRecord> = BTreeMap::new();
        for (key, stream) in self.streams.iter() {
            let session = self.sessions.get(&stream.session);
            let seat = seats
                .entry(number_of(key, stream))
                .or_insert_with(|| SeatRecord {
                    session: stream.session,
                    label: self.label_of(stream),
                    state: SeatState::Away,
                    promised: BytesPerSecond(0),
                    silent: Duration(u64::MAX),
                    run: session.and_then(|session| session.run_bytes).map(ByteCount),
                    rehearsed_cuts: session.map_or(0, |session| session.foresight.cut_count),
                    foreseen_cuts: session.map_or(0, |session| session.foresight.right_count),
                    unread: ByteCount(match session.filter(|session| session.is_seat()) {
                        Some(session) => session.unread_bytes,
                        // It is the sum of all seats of a pool's door.
                        None => 0,
                    }),
                    playheads: Vec::new(),
                    kept: Vec::new(),
                    streams: Vec::new(),
                });
            self.add_to_seat(seat, stream, now);
        }
        seats.into_values().collect()
    }

    fn add_to_seat(&self, seat: &mut SeatRecord, stream: &Stream, now: Instant) {
        let is_promised = stream.standing == Standing::Contract;
        if is_promised {
            seat.promised.0 += stream.rate_or_none().0;
        }
        seat.silent = seat.silent.min(now.since(stream.last_read));
        if stream.is_kept {
            seat.kept.push(KeptRecord {
                device: stream.device,
                rate: stream.rate_or_none(),
                path: stream.path.clone(),
                left: self.kept_until(stream).since(now),
            });
            return;
        }
        seat.streams.push(stream.number);
        let rests_from = stream.played_until() + self.policy.preroll;
        let is_read = stream.waiting_count > 0 || now <= rests_from;
        if is_read {
            seat.state = SeatState::Plays;
        } else if seat.state == SeatState::Away {
            seat.state = SeatState::Paused;
        }
        let is_played = is_read && stream.rate.is_some() && !stream.is_copy;
        if is_promised || is_played {
            seat.playheads.push(PlayheadRecord {
                stream: stream.number,
                position: ByteOffset(match stream.flow {
                    Flow::Forward => stream.origin.saturating_add(stream.consumed),
                    Flow::Reverse => stream.origin.saturating_sub(stream.consumed),
                    Flow::Strided {
                        stride,
                        stretch_bytes,
                    } => {
                        let steps = stream.consumed / stretch_bytes.max(1);
                        strided_offset(stream.origin, stride, steps).unwrap_or(0)
                    }
                    Flow::Frames => stream.consumed,
                }),
                standing: stream.standing,
            });
        }
    }

    /// True when a file has bytes that its device does not have.
    pub fn is_dirty(&self, id: FileId) -> bool {
        self.files
            .get(&id)
            .is_some_and(|file| !file.writing.dirty.is_empty() || !file.writing.flights.is_empty())
    }

    /// Bytes of it are not written yet, or were and may still fail: the kernel reports that on the
    /// descriptor on which they are written.
    pub fn is_unsettled(&self, id: FileId) -> bool {
        let is_loose = |file: &File| file.writing.is_loose;
        self.is_dirty(id) || self.files.get(&id).is_some_and(is_loose)
    }

    /// The error of its device as long as the device lacks bytes of it; None once it has them.
    pub fn failing(&self, id: FileId) -> Option<Errno> {
        self.files.get(&id)?.writing.failing
    }

    /// Bytes of it may be in the kernel's cache alone: an error of a sync may be about them.
    pub fn is_cached_alone(&self, id: FileId) -> bool {
        let is_loose = |file: &File| file.writing.is_loose;
        let mut flights = self.write_flights.iter();
        self.files.get(&id).is_some_and(is_loose)
            || flights.any(|(_, flight)| flight.file == id && flight.buffered)
    }

    /// So may bytes that others wrote to it past us: an error may be about those.
    pub fn may_have_bytes_of_others(&self, id: FileId) -> bool {
        let file = self.files.get(&id);
        file.is_some_and(|file| file.writing.may_have_bytes_of_others())
    }

    /// Clients' writes in numbers.
    pub fn writes(&self) -> WriteRecord {
        WriteRecord {
            used_bytes: ByteCount(
                self.lanes
                    .values()
                    .map(|lane| lane.used_bytes() - lane.loose_bytes())
                    .sum(),
            ),
            dirty_file_count: self
                .files
                .values()
                .filter(|file| !file.writing.dirty.is_empty())
                .count() as u32,
            waiting_count: self.writes.iter().count() as u32,
            write_count: self.commit_count,
            plain_count: self.plain_write_count,
            unclaimed_count: self.unclaimed_count,
        }
    }

    /// Every device.
    pub fn devices(&self) -> Vec<DeviceRecord> {
        self.devices
            .iter()
            .map(|(&id, device)| DeviceRecord {
                device: id,
                model: device.model.base,
                contract_count: device.contracts.len() as u32,
                promised: BytesPerSecond(
                    device
                        .contracts
                        .iter()
                        .filter_map(|stream| {
                            let stream = self.streams.get(stream.0)?;
                            Some(stream.portion_of(id, stream.rate?.0.0))
                        })
                        .sum(),
                ),
                request_count: device.counts.request_count,
                bytes: device.counts.bytes.map(ByteCount),
                write_count: device.counts.write_count,
                written: ByteCount(device.counts.write_bytes),
                write_bridged: ByteCount(device.counts.write_bridged),
                read_bridged: ByteCount(device.counts.read_bridged),
                unread: ByteCount(device.counts.unread_bytes),
                batch_count: device.counts.batch_count,
                flush_count: device.counts.flush_count,
                busy: device.counts.busy,
                foreign_permille: device.model.foreign_permille() as u32,
                slowness_permille: device.model.scale_permille() as u32,
            })
            .collect()
    }

    /// The cache.
    pub fn cache(&self) -> CacheRecord {
        CacheRecord {
            slot_count: self.limits.slot_count,
            free_count: self.cache.free_count(),
            held_count: self.cache.held_count(),
            pinned_count: self.cache.pinned_count(),
            hit_count: self.hit_count,
            miss_count: self.miss_count,
        }
    }
}

impl Stream {
    /// It follows a cursor from here on: the clock of that run goes on, if it is known.
    pub(super) fn take_clock(&mut self, cursor: CursorIndex, range: ByteRange, arrived: Instant) {
        let is_its = |clock: &PlayClock| clock.cursor == Some(cursor);
        let counts_bytes = matches!(self.flow, Flow::Forward | Flow::Reverse);
        let known = self.begun.take_if(|clock| is_its(clock));
        let known = known.or(self.clock.filter(is_its)).filter(|_| counts_bytes);
        let mut clock = known.unwrap_or(PlayClock::new(Some(cursor), range.start.0, arrived));
        clock.before = range.start.0.abs_diff(clock.origin);
        self.clock = Some(clock);
    }

    /// When a read of the run that it follows is due by its player's clock.
    ///
    /// `at`      the stream's `v` where the read starts
    /// `length`  of the read. Units: bytes
    pub(super) fn due_by_clock(
        &mut self,
        (at, length): (u64, u64),
        arrived: Instant,
        preroll: Duration,
    ) -> Instant {
        let rate = match self.rate {
            // A twentieth was put on top.
            Some((rate, RateSource::Cadence)) => BytesPerSecond(rate.0 - rate.0 / 21),
            Some((rate, _)) => rate,
            None => BytesPerSecond(0),
        };
        if rate.0 == 0 || self.is_copy {
            return Instant::NEVER;
        }
        let is_alone = self.waiting_count == 0;
        let clock = self.clock.get_or_insert_with(|| {
            PlayClock::new(None, 0, arrived.before(rate.time_for(ByteCount(at))))
        });
        let place = (clock.before + at, length);
        clock.due(place, rate, arrived, is_alone, preroll)
    }
}

/// The part of one read in the line of its stream.
#[derive(Clone, Copy, Default)]
struct Entry {
    read_count: u64,
    bytes: u64,
    hit_count: u64,
    /// How late it was by its contract, zero: in time. None: it had none.
    promised: Option<Duration>,
    /// The same by its player's clock, and where it spent its time.
    due: Option<(Duration, Stage)>,
}

impl Entry {
    fn due(read: &Read, now: Instant) -> Entry {
        Entry {
            due: lateness(read.due.by_clock, now)
                .map(|lateness| (lateness, guilty_stage(read, now))),
            ..Entry::default()
        }
    }
}

impl ReadCounts {
    fn enter(&mut self, entry: &Entry) {
        self.read_count += entry.read_count;
        self.bytes.0 += entry.bytes;
        self.hit_count += entry.hit_count;
        if let Some(lateness) = entry.promised {
            self.promised_count += 1;
            self.promised_late_count += u64::from(lateness > Duration::ZERO);
        }
        if let Some((lateness, stage)) = entry.due {
            self.due_count += 1;
            if lateness > Duration::ZERO {
                self.late_count += 1;
                self.worst_lateness = self.worst_lateness.max(lateness);
                self.guilty[stage as usize] += 1;
            }
        }
    }
}

/// Where a late read spent most of its time.
fn guilty_stage(read: &Read, now: Instant) -> Stage {
    let door = read.arrived.since(read.sent);
    let begun = read.begun.min(now);
    let open = begun.since(read.arrived);
    let queue = read.asked.min(now).since(begun);
    let device = now.since(read.asked.max(begun));
    if door >= open && door >= queue && door >= device {
        Stage::Door
    } else if open >= queue && open >= device {
        Stage::Open
    } else if queue >= device {
        if read.starved {
            Stage::Cache
        } else {
            Stage::Queue
        }
    } else {
        Stage::Device
    }
}
