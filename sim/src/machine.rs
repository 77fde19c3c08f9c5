// SPDX-License-Identifier: Apache-2.0
//! The server that the world drives: the real one, or a naive one, for comparison and as a test of
//! the checkers.
//!
//! The naive one has no pattern, no deadline and hardly a cache: every read goes to the disk as it
//! comes. It can make mistakes on purpose, each of which a checker must find.

use rushes_core::server::*;
use rushes_core::units::*;
use std::collections::{BTreeMap, VecDeque};

/// A machine that answers events.
pub trait Machine {
    /// As [`Server::step`].
    fn step(&mut self, now: Instant, event: Event, actions: &mut Actions);
    /// As [`Server::streams`].
    fn streams(&self, now: Instant) -> Vec<StreamRecord>;
    /// As [`Server::seats`].
    fn seats(&self, _now: Instant) -> Vec<SeatRecord> {
        Vec::new()
    }
    /// As [`Server::devices`].
    fn devices(&self) -> Vec<DeviceRecord>;
    /// As [`Server::cache`].
    fn cache(&self) -> CacheRecord;
    /// As [`Server::writes`].
    fn writes(&self) -> WriteRecord {
        WriteRecord::default()
    }
    /// As [`Server::check`].
    fn check(&self) -> Vec<String>;
    /// As [`Server::could_admit`].
    fn could_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
    ) -> Verdict;
}

impl Machine for Server {
    fn step(&mut self, now: Instant, event: Event, actions: &mut Actions) {
        Server::step(self, now, event, actions);
    }
    fn streams(&self, now: Instant) -> Vec<StreamRecord> {
        Server::streams(self, now)
    }
    fn seats(&self, now: Instant) -> Vec<SeatRecord> {
        Server::seats(self, now)
    }
    fn devices(&self) -> Vec<DeviceRecord> {
        Server::devices(self)
    }
    fn cache(&self) -> CacheRecord {
        Server::cache(self)
    }
    fn writes(&self) -> WriteRecord {
        Server::writes(self)
    }
    fn check(&self) -> Vec<String> {
        Server::check(self)
    }
    fn could_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
    ) -> Verdict {
        Server::could_admit(self, now, device, rate, count)
    }
}

/// A mistake that a [`Naive`] server makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None.
    None,
    /// Forgets every hundredth read.
    LosesRead,
    /// Answers every hundredth read twice.
    AnswersTwice,
    /// Names slots with other bytes.
    WrongSlots,
    /// Refills slots that a client still has.
    RefillsPinned,
    /// Answers before the disk does.
    AnswersEarly,
    /// Acknowledges a change and serves bytes from before it.
    ServesOld,
    /// Answers a client that is gone.
    AnswersTheDead,
    /// Claims a contract with every client.
    PromisesAll,
    /// Has books that contradict themselves.
    ContradictsItself,
}

#[derive(Clone, Copy)]
struct Wanted {
    session: SessionId,
    request: RequestId,
    file: FileId,
    range: ByteRange,
}

#[derive(Clone)]
struct Running {
    wanted: Wanted,
    length: ByteCount,
    slots: Vec<SlotIndex>,
    void: bool,
    stale: bool,
}

/// A server without a plan.
pub struct Naive {
    limits: Limits,
    mistake: Mistake,
    files: BTreeMap<FileId, FileFacts>,
    handles: BTreeMap<(SessionId, HandleId), Option<FileId>>,
    labels: BTreeMap<SessionId, SessionLabel>,
    early: Vec<(SessionId, HandleId, RequestId, ByteRange)>,
    waiting: VecDeque<Wanted>,
    changes: Vec<(SessionId, RequestId, FileId)>,
    running: BTreeMap<IoId, Running>,
    pinned: BTreeMap<(SessionId, RequestId), Vec<SlotIndex>>,
    free: VecDeque<SlotIndex>,
    streams: Vec<StreamRecord>,
    next_io: u64,
    read_count: u64,
}

impl Naive {
    /// A server that makes `mistake`.
    pub fn new(limits: Limits, mistake: Mistake) -> Naive {
        let free = (0..limits.slot_count).map(SlotIndex).collect();
        Naive {
            limits,
            mistake,
            files: BTreeMap::new(),
            handles: BTreeMap::new(),
            labels: BTreeMap::new(),
            early: Vec::new(),
            waiting: VecDeque::new(),
            changes: Vec::new(),
            running: BTreeMap::new(),
            pinned: BTreeMap::new(),
            free,
            streams: Vec::new(),
            next_io: 1,
            read_count: 0,
        }
    }

    fn read(&mut self, wanted: Wanted) {
        self.read_count += 1;
        if self.mistake == Mistake::LosesRead && self.read_count.is_multiple_of(100) {
            return;
        }
        self.waiting.push_back(wanted);
    }

    fn pump(&mut self, actions: &mut Actions) {
        while let Some(wanted) = self.waiting.front().copied() {
            let Some(facts) = self.files.get(&wanted.file) else {
                self.waiting.pop_front();
                reply(actions, &wanted, Outcome::Plain);
                continue;
            };
            let there = facts.size.0.saturating_sub(wanted.range.start.0);
            let length = there.min(wanted.range.length.0);
            if length == 0 {
                self.waiting.pop_front();
                let outcome = Outcome::Data {
                    slots: SlotRun::default(),
                    first_offset: 0,
                    length: ByteCount(0),
                };
                reply(actions, &wanted, outcome);
                continue;
            }
            let slot_bytes = u64::from(self.limits.slot_bytes);
            let start = wanted.range.start.0 & !(PAGE_BYTES - 1);
            let end = (wanted.range.start.0 + length).next_multiple_of(PAGE_BYTES);
            let need = (end.div_ceil(slot_bytes) - start / slot_bytes) as usize;
            if self.free.len() < need {
                return;
            }
            self.waiting.pop_front();
            let slots: Vec<SlotIndex> = self.free.drain(..need).collect();
            let io = IoId(self.next_io);
            self.next_io += 1;
            let run = put(actions, &slots);
            actions.list.push(Action::Submit(IoRead {
                io,
                file: wanted.file,
                device: facts.device,
                range: ByteRange::new(start, end - start),
                slots: run,
                buffered: false,
                class: IoClass::BestEffort,
                deadline: Instant::NEVER,
            }));
            let device_length = ByteCount(length);
            let early = self.mistake == Mistake::AnswersEarly && io.0.is_multiple_of(100);
            if early {
                self.data(&wanted, device_length, &slots, actions);
            }
            self.running.insert(
                io,
                Running {
                    wanted,
                    length: device_length,
                    slots,
                    void: early,
                    stale: false,
                },
            );
        }
    }

    fn data(
        &mut self,
        wanted: &Wanted,
        length: ByteCount,
        slots: &[SlotIndex],
        actions: &mut Actions,
    ) {
        let slot_bytes = u64::from(self.limits.slot_bytes);
        let mut slots = slots.to_vec();
        if self.mistake == Mistake::WrongSlots && self.read_count.is_multiple_of(100) {
            for slot in &mut slots {
                slot.0 = (slot.0 + 7) % self.limits.slot_count;
            }
        }
        let run = put(actions, &slots);
        let outcome = Outcome::Data {
            slots: run,
            first_offset: (wanted.range.start.0 % slot_bytes) as u32,
            length,
        };
        reply(actions, wanted, outcome);
        if self.mistake == Mistake::AnswersTwice && self.read_count.is_multiple_of(100) {
            reply(actions, wanted, outcome);
        }
        if self.mistake == Mistake::RefillsPinned && self.read_count.is_multiple_of(10) {
            for slot in &slots {
                self.free.push_front(*slot);
            }
            slots.clear();
        }
        self.pinned.insert((wanted.session, wanted.request), slots);
        if let Some(stream) = self
            .streams
            .iter_mut()
            .find(|s| s.session == wanted.session)
        {
            stream.reads.read_count += 1;
            stream.reads.bytes += length;
        }
    }

    fn io_done(&mut self, io: IoId, result: Result<ByteCount, Errno>, actions: &mut Actions) {
        let Some(run) = self.running.remove(&io) else {
            return;
        };
        if run.void {
            if self.mistake != Mistake::AnswersEarly {
                self.free.extend(run.slots);
            }
            return;
        }
        if run.stale {
            // Read before a change that is acknowledged by now: read again.
            self.free.extend(run.slots);
            self.waiting.push_front(run.wanted);
            return;
        }
        match result {
            Ok(_) => self.data(&run.wanted, run.length, &run.slots, actions),
            Err(errno) => {
                self.free.extend(run.slots);
                reply(actions, &run.wanted, Outcome::Failed(errno));
            }
        }
    }

    fn close_session(&mut self, session: SessionId) {
        self.waiting.retain(|w| w.session != session);
        self.early.retain(|e| e.0 != session);
        self.changes.retain(|c| c.0 != session);
        if self.mistake != Mistake::AnswersTheDead {
            for run in self.running.values_mut() {
                run.void |= run.wanted.session == session;
            }
        }
        let gone: Vec<_> = self
            .pinned
            .range((session, RequestId(0))..=(session, RequestId(u64::MAX)))
            .map(|(key, _)| *key)
            .collect();
        for key in gone {
            self.free
                .extend(self.pinned.remove(&key).unwrap_or_default());
        }
        self.handles.retain(|key, _| key.0 != session);
        for stream in &mut self.streams {
            stream.open &= stream.session != session;
        }
    }

    fn opened(&mut self, session: SessionId, handle: HandleId, facts: Result<FileFacts, Errno>) {
        let file = facts.ok().map(|facts| {
            let file = facts.file;
            self.files.insert(file, facts);
            file
        });
        if let Some(entry) = self.handles.get_mut(&(session, handle)) {
            *entry = file;
        }
        let mut index = 0;
        while index < self.early.len() {
            let (s, h, request, range) = self.early[index];
            if (s, h) != (session, handle) {
                index += 1;
                continue;
            }
            self.early.remove(index);
            let wanted = Wanted {
                session,
                request,
                file: file.unwrap_or(FileId(u32::MAX)),
                range,
            };
            self.read(wanted);
        }
    }

    fn changed(&mut self, key: FileKey) {
        if self.mistake == Mistake::ServesOld {
            return;
        }
        for run in self.running.values_mut() {
            let same = self.files.get(&run.wanted.file).map(|f| f.key) == Some(key);
            run.stale |= same;
        }
    }

    fn note_stream(&mut self, session: SessionId, path: String, part: FilePart) {
        self.streams.push(StreamRecord {
            stream: StreamId(self.streams.len() as u32),
            number: self.streams.len() as u32,
            session,
            label: self.labels.get(&session).cloned().unwrap_or_default(),
            path,
            part,
            sequence: false,
            devices: vec![DeviceId(0)],
            standing: if self.mistake == Mistake::PromisesAll {
                Standing::Contract
            } else {
                Standing::BestEffort
            },
            rate: None,
            refusal: None,
            reads: Default::default(),
            ahead: Duration::ZERO,
            open: true,
        });
    }
}

fn put(actions: &mut Actions, slots: &[SlotIndex]) -> SlotRun {
    let run = SlotRun {
        start: actions.slots.len() as u32,
        count: slots.len() as u32,
    };
    actions.slots.extend_from_slice(slots);
    run
}

fn reply(actions: &mut Actions, wanted: &Wanted, outcome: Outcome) {
    actions.list.push(Action::Reply {
        session: wanted.session,
        request: wanted.request,
        outcome,
    });
}

impl Machine for Naive {
    fn step(&mut self, _now: Instant, event: Event, actions: &mut Actions) {
        match event {
            Event::SessionOpened { session, label } => {
                self.labels.insert(session, label);
            }
            Event::SessionClosed { session } => self.close_session(session),
            Event::Opening {
                session,
                handle,
                path,
                part,
            } => {
                self.handles.insert((session, handle), None);
                self.note_stream(session, path, part);
            }
            Event::Opened {
                session,
                handle,
                facts,
            } => self.opened(session, handle, facts),
            Event::Closed { session, handle } => {
                self.handles.remove(&(session, handle));
            }
            Event::Read {
                session,
                handle,
                request,
                range,
                ..
            } => match self.handles.get(&(session, handle)) {
                Some(Some(file)) => {
                    let file = *file;
                    let wanted = Wanted {
                        session,
                        request,
                        file,
                        range,
                    };
                    self.read(wanted);
                }
                Some(None) => self.early.push((session, handle, request, range)),
                None => {
                    let wanted = Wanted {
                        session,
                        request,
                        file: FileId(u32::MAX),
                        range,
                    };
                    reply(actions, &wanted, Outcome::Failed(Errno::BAD_HANDLE));
                }
            },
            Event::ReadEnd { session, request } => {
                if let Some(slots) = self.pinned.remove(&(session, request)) {
                    self.free.extend(slots);
                }
            }
            Event::Changed {
                session,
                request,
                key,
                ..
            }
            | Event::Gone {
                session,
                request,
                key,
            } => {
                self.changed(key);
                // Done when all clients see the new size as well.
                match self.files.values().find(|facts| facts.key == key) {
                    Some(facts) => {
                        let file = facts.file;
                        self.changes.push((session, request, file));
                        actions.list.push(Action::Stat { file });
                    }
                    None => actions.list.push(Action::Reply {
                        session,
                        request,
                        outcome: Outcome::Done,
                    }),
                }
            }
            Event::Unlinked { .. }
            | Event::LetGo { .. }
            | Event::Crowded
            | Event::Overfull { .. } => {}
            Event::ForeignChange { key } => {
                self.changed(key);
                for (file, facts) in &self.files {
                    if facts.key == key {
                        actions.list.push(Action::Stat { file: *file });
                    }
                }
            }
            Event::Stat {
                file,
                size,
                version,
                ..
            } => {
                if let Some(facts) = self.files.get_mut(&file) {
                    facts.size = size;
                    facts.version = version;
                }
                for run in self.running.values_mut() {
                    run.stale |= run.wanted.file == file && self.mistake != Mistake::ServesOld;
                }
                self.changes.retain(|(session, request, of)| {
                    if *of == file {
                        actions.list.push(Action::Reply {
                            session: *session,
                            request: *request,
                            outcome: Outcome::Done,
                        });
                    }
                    *of != file
                });
            }
            Event::IoDone { io, result } => self.io_done(io, result, actions),
            Event::LaneAdded { .. }
            | Event::Recovered { .. }
            | Event::WriteBegin { .. }
            | Event::WriteEnd { .. }
            | Event::Sync { .. }
            | Event::Hold { .. }
            | Event::Reserved { .. }
            | Event::ReserveFound { .. }
            | Event::Unfilled { .. }
            | Event::RecoveryEnded
            | Event::RecoveryBegun
            | Event::WriteAbort { .. }
            | Event::Settled { .. }
            | Event::Synced { .. }
            | Event::SyncDoubted { .. }
            | Event::FellBack { .. }
            | Event::NotKept { .. }
            | Event::RecordKept { .. }
            | Event::Flushed { .. }
            | Event::DeviceAdded { .. }
            | Event::Stationed { .. }
            | Event::PolicyChanged(_)
            | Event::NeighbourOpened { .. }
            | Event::SessionOfPool { .. }
            | Event::Stopping
            | Event::MayChange { .. }
            | Event::Remembered(_)
            | Event::PoolFileOpened { .. }
            | Event::Hint { .. }
            | Event::ForeignLoad { .. }
            | Event::Timer => {}
        }
        self.pump(actions);
    }

    fn streams(&self, _now: Instant) -> Vec<StreamRecord> {
        self.streams.clone()
    }

    fn devices(&self) -> Vec<DeviceRecord> {
        Vec::new()
    }

    fn cache(&self) -> CacheRecord {
        CacheRecord {
            slot_count: self.limits.slot_count,
            free_count: self.free.len() as u32,
            ..CacheRecord::default()
        }
    }

    fn check(&self) -> Vec<String> {
        match self.mistake {
            Mistake::ContradictsItself => vec!["it counts more than there is".to_owned()],
            _ => Vec::new(),
        }
    }

    fn could_admit(&self, _: Instant, _: DeviceId, _: BytesPerSecond, _: u32) -> Verdict {
        Verdict {
            admitted: false,
            reason: "a naive server promises nothing".to_owned(),
            more_count: 0,
            left: BytesPerSecond(0),
        }
    }
}
