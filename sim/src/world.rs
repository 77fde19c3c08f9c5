// SPDX-License-Identifier: Apache-2.0
//! The world around a [`Machine`]: it does what the daemon does, on a clock of its own.
//!
//! One queue of coming events; the world executes the server's actions with the delays of
//! [`Latency`]. The checker judges; this does not.

mod lanes;

use crate::checker::Checker;
use crate::client::{Answer, Client, FIRST_HANDLE, Kind, Latency, Message, Scene};
use crate::digest::Digest;
use crate::disk::volatile::{MemoryPlan, Volatile, Wake};
use crate::disk::{Disk, Done, Faults, Job, Owner};
use crate::files::{FileIndex, Files};
use crate::machine::Machine;
use crate::player::SlackLog;
use crate::prng::Prng;
use crate::queue::Queue;
use crate::space::Space;
use rushes_core::server::{
    Action, Actions, DeviceModel, Errno, Event, FileFacts, IoClass, Limits, Outcome, SessionLabel,
};
use rushes_core::units::*;

/// So long after a change that no client reports, no read may give the bytes from before it.
const PROMISE: Duration = Duration::from_s(1);
/// The length of one read of a header. Units: bytes.
const HEADER_BYTES: u64 = 16 << 10;
/// Time between two looks of a driver at others' use of a device.
const SAMPLE: Duration = Duration::from_ms(500);

/// A coming event.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are said by their types")]
pub enum What {
    /// The driver looks at a disk's counters.
    Sample { disk: DeviceId },
    /// A client's alarm.
    Client { client: u32, life: u32 },
    /// A client's message reaches the server.
    Arrive {
        client: u32,
        life: u32,
        message: Message,
    },
    /// The driver looks at a file that a client opened; the server learns of it later.
    Opening {
        client: u32,
        life: u32,
        handle: HandleId,
        file: FileIndex,
        told_at: Instant,
    },
    /// The driver's findings about a file.
    Opened {
        client: u32,
        life: u32,
        handle: HandleId,
        look: Look,
    },
    /// An answer has reached a client and its bytes are copied.
    Answered {
        client: u32,
        life: u32,
        request: RequestId,
        answer: Answer,
    },
    /// A request reaches a disk.
    Job { disk: DeviceId, job: Job },
    /// The request in service ends.
    DiskDone { disk: DeviceId },
    /// The server gets the completion.
    IoDone {
        io: IoId,
        result: Result<ByteCount, Errno>,
    },
    /// The pool's door has looked for a file.
    PoolFile { pool: PoolNumber, path: String },
    /// The opening of a neighbour has succeeded or failed.
    Neighbour { beside: FileId, name: String },
    /// The driver looks at a file; the server learns of it later.
    Stat { file: FileId, told_at: Instant },
    /// The result of its look.
    StatTold { file: FileId, look: Look },
    /// The server learns that a stranger changed a file.
    ForeignChange { file: FileIndex },
    /// A stranger's bytes are there, and no client reports it.
    Silent { file: FileIndex, change: Silent },
    /// Every client must see by now the changes up to that serial.
    Known { file: FileIndex, serial: u64 },
    /// A small read or write by another program.
    Storm { disk: DeviceId },
    /// A worker has done the server's request.
    Worked { file: FileId, work: Work },
    /// A drive with a memory goes on.
    Drive { disk: DeviceId, wake: Wake },
    /// The server gets an event.
    Told(Box<Event>),
}

/// The work of a worker on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are said by their types")]
pub enum Work {
    /// Blocks for these bytes.
    Reserve { needed: ByteRange, wished_end: u64 },
    /// Frees blocks past the end.
    Trim { size: ByteCount },
    /// Sets its times.
    Settle,
    /// The kernel has written its pages to the drive, which must bring all of them to the medium.
    Sync,
    /// The kernel has written its pages to the drive.
    WriteOut,
}

/// A change by a stranger that no client reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silent {
    /// These bytes change.
    Write(ByteRange),
    /// The file gets this length.
    Cut(u64),
}

/// A file at the time of the driver's look. Much may happen before the server learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    file: FileIndex,
    size: ByteCount,
    version: u64,
    is_fresh: bool,
    /// Number of its last change at that time.
    serial: u64,
}

/// The events in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorldCount {
    /// Steps of the server.
    pub step_count: u64,
    /// Events of the world.
    pub event_count: u64,
    /// Timer steps.
    pub timer_count: u64,
}

/// The world.
pub struct World {
    /// Now.
    pub now: Instant,
    /// The machine under test.
    pub server: Box<dyn Machine>,
    /// The clients that read.
    pub clients: Vec<Client>,
    /// The disks.
    pub disks: Vec<Disk>,
    /// The files.
    pub files: Files,
    /// The clients' sessions are those of one pool's door.
    pub is_pool: bool,
    /// Pages of the lane that each session has; 0: it has none.
    pub lane_pages: u32,
    /// By disk: the blocks that no file has.
    pub spaces: Vec<Space>,
    /// Most of the write buffer that was in use at once. Units: bytes.
    pub lane_bytes_max: u64,
    /// When a device last wrote for the server.
    pub wrote_at: Instant,
    /// The latencies.
    pub latency: Latency,
    /// Names, by folder, that were looked up in vain.
    absent: std::collections::BTreeSet<(String, String)>,
    /// The events so far.
    pub count: WorldCount,
    /// Slack of all players.
    pub slack: SlackLog,
    /// Watches the seam.
    pub checker: Checker,
    /// Fingerprint of the whole run.
    pub digest: Digest,
    /// Print every event and action.
    pub trace: bool,
    /// Stop after the server took a client's first read, so that the caller can look at the ledger
    /// right then.
    pub stop_at_first_reads: bool,
    /// Clients whose first read was taken since the last look.
    pub first_reads: Vec<u32>,
    queue: Queue<What>,
    actions: Actions,
    wake_at: Option<Instant>,
    sessions: Vec<Option<u32>>,
    free_sessions: Vec<u32>,
    lane_count: u32,
    seed: u64,
    prng: Prng,
}

/// Whether to check the server's own state after this step: after each at first, then after one in
/// so many, and in worlds of millions of steps seldom. A check takes as long as the whole state of
/// the server needs, a step much less. The numbers are primes, so that no rhythm of clients stays
/// hidden.
pub(crate) fn is_checked(step: u64) -> bool {
    match step {
        0..=300 => true,
        301..=500_000 => step.is_multiple_of(499),
        _ => step.is_multiple_of(50_021),
    }
}

impl World {
    /// An empty world.
    pub fn new(seed: u64, server: Box<dyn Machine>, limits: Limits, latency: Latency) -> World {
        World {
            now: Instant::ZERO,
            server,
            clients: Vec::new(),
            disks: Vec::new(),
            files: Files::default(),
            is_pool: false,
            lane_pages: 0,
            spaces: Vec::new(),
            lane_bytes_max: 0,
            wrote_at: Instant::ZERO,
            latency,
            absent: std::collections::BTreeSet::new(),
            count: WorldCount::default(),
            slack: SlackLog::default(),
            checker: Checker::new(limits),
            digest: Digest::default(),
            trace: false,
            stop_at_first_reads: false,
            first_reads: Vec::new(),
            queue: Queue::default(),
            actions: Actions::default(),
            wake_at: None,
            sessions: Vec::new(),
            free_sessions: Vec::new(),
            lane_count: 0,
            seed,
            prng: Prng::fork(seed, 1),
        }
    }

    /// Adds a disk that behaves like `truth`; the server gets the model `told`.
    pub fn add_disk(&mut self, told: DeviceModel, truth: DeviceModel, faults: Faults) -> DeviceId {
        let device = DeviceId(self.disks.len() as u16);
        let prng = Prng::fork(self.seed, 1_000_000 + u64::from(device.0));
        if faults.storm_per_second > 0 {
            let at = Instant::ZERO + Duration::from_ms(faults.storm_from_ms);
            self.queue.push(at, What::Storm { disk: device });
        }
        self.disks.push(Disk::new(truth, faults, prng));
        self.spaces.push(Space::default());
        self.step(Event::DeviceAdded {
            device,
            model: told,
        });
        device
    }

    /// Gives a disk a memory of its own.
    pub fn add_memory(&mut self, disk: DeviceId, plan: MemoryPlan) {
        self.disks[disk.0 as usize].volatile = Some(Volatile::new(plan));
        self.drive_goes_on(disk, None);
    }

    /// Adds a client that begins at `begin`.
    pub fn add_client(&mut self, kind: Kind, begin: Instant, end: Instant) -> u32 {
        let index = self.clients.len() as u32;
        let prng = Prng::fork(self.seed, 2_000_000 + u64::from(index));
        self.clients
            .push(Client::new(index, kind, begin, end, prng));
        self.queue.push(
            begin,
            What::Client {
                client: index,
                life: 0,
            },
        );
        index
    }

    /// Runs the world until `end`, or until a first read if the caller wants that.
    pub fn run_until(&mut self, end: Instant) {
        loop {
            let queued = self.queue.next_at();
            let due = [queued, self.wake_at].into_iter().flatten().min();
            let Some(at) = due.filter(|at| *at <= end) else {
                self.now = self.now.max(end);
                return;
            };
            self.now = self.now.max(at);
            self.count.event_count += 1;
            if queued.is_some_and(|queued| queued <= at) {
                if let Some((_, what)) = self.queue.pop() {
                    self.happen(what);
                }
            } else {
                self.wake_at = None;
                self.count.timer_count += 1;
                self.step(Event::Timer);
            }
            if self.stop_at_first_reads && !self.first_reads.is_empty() {
                return;
            }
        }
    }

    /// True while a client has work.
    pub fn is_busy(&self) -> bool {
        self.clients.iter().any(Client::is_busy)
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Client { client, life } => {
                if self.clients[client as usize].hand.life == life {
                    self.with_client(client, |client, scene| client.wake(scene));
                }
            }
            What::Arrive {
                client,
                life,
                message,
            } => {
                if self.clients[client as usize].hand.life == life {
                    self.arrive(client, life, message);
                }
            }
            What::Opening {
                client,
                life,
                handle,
                file,
                told_at,
            } => {
                let look = self.look(file);
                let opened = What::Opened {
                    client,
                    life,
                    handle,
                    look,
                };
                self.queue.push(told_at, opened);
            }
            What::Opened {
                client,
                life,
                handle,
                look,
            } => {
                if self.clients[client as usize].hand.life == life
                    && let Some(session) = self.clients[client as usize].hand.session
                {
                    let facts = Ok(self.facts(look));
                    if handle == FIRST_HANDLE {
                        self.taken(client);
                    }
                    self.step(Event::Opened {
                        session,
                        handle,
                        facts,
                    });
                }
            }
            What::Answered {
                client,
                life,
                request,
                answer,
            } => {
                if self.clients[client as usize].hand.life == life {
                    self.client_answered(client, life, request, answer);
                }
            }
            // Other programs' writes stay in the page cache and are dropped here while a disk is
            // overloaded: otherwise a world could write for ever more than its disk can take.
            What::Job { disk, job }
                if job.write
                    && !matches!(job.owner, Owner::Server(_))
                    && self.disks[disk.0 as usize].depth() >= 64 => {}
            What::Job { disk, job } => self.submit(disk, job),
            What::DiskDone { disk } => self.disk_done(disk),
            What::IoDone { io, result } => self.step(Event::IoDone { io, result }),
            What::Neighbour { beside, name } => self.neighbour(beside, name),
            What::PoolFile { pool, path } => self.pool_file(pool, path),
            What::Stat { file, told_at } => {
                if let Some(index) = self.files.by_id(file) {
                    let look = self.look(index);
                    self.queue.push(told_at, What::StatTold { file, look });
                }
            }
            What::StatTold { file, look } => {
                if self.files.by_id(file) == Some(look.file) {
                    // The server learns the size; it does not learn the bytes of a newer version
                    // until the file is opened or a second has passed.
                    self.checker.size_seen(self.now, look.file, look.serial);
                    self.step(Event::Stat {
                        file,
                        size: look.size,
                        version: look.version,
                        is_fresh: look.is_fresh,
                    });
                }
            }
            What::ForeignChange { file } => {
                for (range, serial) in self.files.take_untold(file, u64::MAX) {
                    self.checker.acknowledge(file, range, serial, false);
                }
                let key = self.files.get(file).key;
                self.step(Event::ForeignChange { key });
            }
            What::Silent { file, change } => {
                match change {
                    Silent::Write(range) => self.files.write(file, range),
                    Silent::Cut(size) => self.files.truncate(file, size),
                };
                let serial = self.files.serial(file);
                self.queue
                    .push(self.now + PROMISE, What::Known { file, serial });
            }
            What::Known { file, serial } => {
                let at = self.files.seen_by(file, self.now);
                if at > self.now {
                    self.queue.push(at, What::Known { file, serial });
                    return;
                }
                for (range, serial) in self.files.take_untold(file, serial) {
                    self.checker.seen(self.now, file, range, serial);
                }
            }
            What::Storm { disk } => self.storm(disk),
            What::Worked { file, work } => self.worked(file, work),
            What::Drive { disk, wake } => self.drive_wakes(disk, wake),
            What::Told(event) => self.step(*event),
            What::Sample { disk } => self.sample(disk),
        }
    }

    /// A client's first read counts as taken when both the read and the result of the look at its
    /// file have come.
    fn taken(&mut self, client: u32) {
        let hand = &mut self.clients[client as usize].hand;
        if hand.half_taken {
            self.first_reads.push(client);
        }
        hand.half_taken = true;
    }

    fn look(&self, file: FileIndex) -> Look {
        let it = self.files.get(file);
        Look {
            file,
            size: ByteCount(it.size),
            version: it.version,
            is_fresh: self.files.is_fresh(file, self.now),
            serial: self.files.serial(file),
        }
    }

    /// A file was opened: its version shows all changes up to the look, so no client may see older
    /// bytes or sizes now.
    fn facts(&mut self, look: Look) -> FileFacts {
        if self.files.seen_by(look.file, self.now) == self.now {
            for (range, serial) in self.files.take_untold(look.file, look.serial) {
                self.checker.seen(self.now, look.file, range, serial);
            }
            self.checker.size_seen(self.now, look.file, look.serial);
        }
        FileFacts {
            size: look.size,
            version: look.version,
            is_fresh: look.is_fresh,
            ..self.files.facts(look.file)
        }
    }

    fn with_client(&mut self, client: u32, act: impl FnOnce(&mut Client, &mut Scene<'_>)) {
        let mut scene = Scene {
            now: self.now,
            queue: &mut self.queue,
            latency: &self.latency,
            files: &mut self.files,
            slack: &mut self.slack,
        };
        act(&mut self.clients[client as usize], &mut scene);
    }

    fn arrive(&mut self, client: u32, life: u32, message: Message) {
        if message == Message::Hello {
            return self.hello(client);
        }
        let Some(session) = self.clients[client as usize].hand.session else {
            return;
        };
        let event = match message {
            Message::Hello => return,
            Message::Bye => {
                self.clients[client as usize].hand.life += 1;
                self.clients[client as usize].hand.session = None;
                self.sessions[session.0 as usize] = None;
                self.free_sessions.push(session.0);
                Event::SessionClosed { session }
            }
            Message::Open { handle, file } => {
                let (device, left) = (self.files.get(file).device, self.latency.open_reads);
                self.find_out(
                    device,
                    Owner::Open {
                        client,
                        life,
                        handle,
                        file,
                        left,
                    },
                );
                let file = self.files.get(file);
                Event::Opening {
                    session,
                    handle,
                    path: format!("{}/{}", file.folder, file.name),
                    part: FilePart::WHOLE,
                }
            }
            Message::Close { handle } => Event::Closed { session, handle },
            Message::Read {
                handle,
                request,
                range,
                sent,
            } => {
                if !std::mem::replace(&mut self.clients[client as usize].hand.has_read, true) {
                    self.taken(client);
                }
                Event::Read {
                    session,
                    handle,
                    request,
                    range,
                    sent,
                }
            }
            Message::ReadEnd { request } => Event::ReadEnd { session, request },
            Message::Changed {
                request,
                file,
                range,
                serial,
            } => {
                let key = self.files.get(file).key;
                let change = (file, range);
                self.checker
                    .change_asked(self.now, session, request, change, serial, &self.files);
                Event::Changed {
                    session,
                    request,
                    key,
                    range,
                    has_bytes: true,
                }
            }
            Message::Gone { request, file } => {
                let key = self.files.get(file).key;
                let serial = self.files.serial(file);
                let change = (file, ByteRange::default());
                self.checker
                    .change_asked(self.now, session, request, change, serial, &self.files);
                Event::Gone {
                    session,
                    request,
                    key,
                }
            }
            Message::WriteBegin { .. }
            | Message::WriteEnd { .. }
            | Message::Sync { .. }
            | Message::Hold { .. }
            | Message::Wrote { .. } => self.write_event(session, message),
        };
        self.step(event);
    }

    fn hello(&mut self, client: u32) {
        let id = self.free_sessions.pop().unwrap_or_else(|| {
            self.sessions.push(None);
            self.sessions.len() as u32 - 1
        });
        self.sessions[id as usize] = Some(client);
        let session = SessionId(id);
        self.step(Event::SessionOpened {
            session,
            label: SessionLabel {
                share: "media".to_owned(),
                user: match self.clients[client as usize].hand.login.as_str() {
                    "" => format!("user{client}"),
                    login => login.to_owned(),
                },
                client: format!("client{client}"),
            },
        });
        if self.is_pool {
            let pool = PoolNumber(1);
            self.step(Event::SessionOfPool { session, pool });
        }
        self.add_lane(session);
        self.with_client(client, |client, scene| client.welcome(session, scene));
    }

    fn client_answered(&mut self, client: u32, life: u32, request: RequestId, answer: Answer) {
        if self.write_goes_on(client, life, request, answer) {
            return;
        }
        match answer {
            Answer::Data(_) => {
                let hold = self.clients[client as usize].hand.hold;
                let at = self.now + self.latency.door + hold;
                self.queue.push(
                    at,
                    What::Arrive {
                        client,
                        life,
                        message: Message::ReadEnd { request },
                    },
                );
            }
            Answer::Plain => {
                let found = &self.clients[client as usize].hand.waiting;
                if let Some(waiting) = found.iter().find(|w| w.request == request).copied() {
                    let disk = self.files.get(waiting.file).device;
                    let job = Job {
                        owner: Owner::Client {
                            client,
                            life,
                            serial: request.0,
                        },
                        file: Some(waiting.file),
                        range: waiting.range,
                        write: false,
                        class: IoClass::BestEffort,
                        arrived: self.now,
                    };
                    self.submit(disk, job);
                }
            }
            Answer::Done | Answer::Failed(_) | Answer::Granted(_) => {}
        }
        self.with_client(client, |client, scene| {
            client.answered(request, answer, scene);
        });
    }

    fn submit(&mut self, disk: DeviceId, job: Job) {
        let job = Job {
            arrived: self.now,
            ..job
        };
        let it = &mut self.disks[disk.0 as usize];
        if matches!(job.owner, Owner::Server(_) | Owner::Header { .. }) {
            it.served = true;
        } else {
            it.others.0 += 1;
            it.others.1 = it.others.1.saturating_add(job.range.length.0);
            if !it.sampled {
                it.sampled = true;
                self.queue.push(self.now + SAMPLE, What::Sample { disk });
            }
        }
        let next = it.submit(self.now, job, &self.files);
        self.drive_goes_on(disk, next);
    }

    fn disk_done(&mut self, disk: DeviceId) {
        let (done, next) = self.disks[disk.0 as usize].finish(self.now, &self.files);
        self.drive_goes_on(disk, next);
        if let Some(done) = done {
            self.ended(disk, &done);
        }
    }

    /// A disk has ended a request.
    fn ended(&mut self, disk: DeviceId, done: &Done) {
        match done.job.owner {
            Owner::Server(io) if done.job.write => self.wrote(io, done),
            Owner::Server(io) => {
                self.checker.device_read(io, done.serial);
                let size = done.job.file.map_or(0, |file| self.files.get(file).size);
                let range = done.job.range;
                let there = size.saturating_sub(range.start.0).min(range.length.0);
                let result = if done.failed {
                    Err(Errno::IO)
                } else {
                    Ok(ByteCount(there))
                };
                let at = self.now + self.latency.complete;
                self.queue.push(at, What::IoDone { io, result });
            }
            Owner::Client {
                client,
                life,
                serial,
            } => {
                if self.clients[client as usize].hand.life == life {
                    let answer = if done.failed {
                        Answer::Failed(Errno::IO)
                    } else {
                        Answer::Data(done.job.range.length.0)
                    };
                    self.with_client(client, |client, scene| {
                        client.answered(RequestId(serial), answer, scene);
                    });
                }
            }
            Owner::Open { .. } => self.find_out(disk, done.job.owner),
            Owner::Header { left } => {
                if let Some(file) = done.job.file {
                    self.read_header(file, left);
                }
            }
            Owner::Storm => {}
        }
    }

    /// The next place at which the header is read, or its result.
    fn read_header(&mut self, file: FileIndex, left: u32) {
        let it = self.files.get_mut(file);
        let Some((hint, count)) = it.header else {
            return;
        };
        if left > 0 {
            // The first is the file's beginning, the second its end, the others are between.
            let at = match count - left {
                0 => 0,
                place => (it.size / u64::from(place)).saturating_sub(HEADER_BYTES),
            };
            let job = Job {
                owner: Owner::Header { left: left - 1 },
                file: Some(file),
                range: ByteRange::new(at & !4095, HEADER_BYTES.min(it.size)),
                write: false,
                class: IoClass::BestEffort,
                arrived: self.now,
            };
            let disk = it.device;
            return self.submit(disk, job);
        }
        it.header = None;
        it.hint = hint;
        if let Some(id) = it.id {
            self.step(Event::Hint { file: id, hint });
        }
    }

    /// A file is being opened: the next small read for it, or the end of that.
    fn find_out(&mut self, disk: DeviceId, owner: Owner) {
        let Owner::Open {
            client,
            life,
            handle,
            file,
            left,
        } = owner
        else {
            return;
        };
        if left == 0 {
            let span = self.latency.open.0 / 2 + self.prng.below(self.latency.open.0 + 1);
            let opening = What::Opening {
                client,
                life,
                handle,
                file,
                told_at: self.now + Duration(span),
            };
            return self.queue.push(self.now + Duration(span / 2), opening);
        }
        let owner = Owner::Open {
            client,
            life,
            handle,
            file,
            left: left - 1,
        };
        self.small_read(disk, owner);
    }

    /// A page of metadata, anywhere on the disk.
    fn small_read(&mut self, disk: DeviceId, owner: Owner) {
        let size = self.disks[disk.0 as usize].truth.size.0;
        let job = Job {
            owner,
            file: None,
            range: ByteRange::new(self.prng.below(size) & !4095, 4096),
            write: false,
            class: IoClass::BestEffort,
            arrived: self.now,
        };
        self.submit(disk, job);
    }

    fn neighbour(&mut self, beside: FileId, name: String) {
        let found = self.files.by_id(beside).and_then(|index| {
            let folder = self.files.get(index).folder.clone();
            self.files.named(&folder, &name)
        });
        let facts = match found {
            Some(index) => Ok(self.facts(self.look(index))),
            None => {
                self.look_in_vain(beside, &name);
                Err(Errno(2))
            }
        };
        self.step(Event::NeighbourOpened {
            beside,
            name,
            facts,
        });
    }

    /// Reads the folder's blocks that would have the name; they are in memory afterwards.
    fn look_in_vain(&mut self, beside: FileId, name: &str) {
        let Some(index) = self.files.by_id(beside) else {
            return;
        };
        let (folder, disk) = {
            let file = self.files.get(index);
            (file.folder.clone(), file.device)
        };
        if self.absent.insert((folder, name.to_owned())) {
            for _ in 0..self.latency.absent_reads {
                self.small_read(disk, Owner::Storm);
            }
        }
    }

    fn pool_file(&mut self, pool: PoolNumber, path: String) {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let facts = match self.files.named(folder, name) {
            Some(index) => Ok(self.facts(self.look(index))),
            None => Err(Errno(2)),
        };
        self.step(Event::PoolFileOpened { pool, path, facts });
    }

    /// A driver's look at the kernel's counters: other programs' requests since its last look.
    fn sample(&mut self, device: DeviceId) {
        let it = &mut self.disks[device.0 as usize];
        // As in the daemon: only a sample without a read by the server shows the others' use.
        let idle = !std::mem::take(&mut it.served);
        let (count, bytes) = std::mem::take(&mut it.others);
        let per_second = NS_PER_S / SAMPLE.0;
        it.sampled = count > 0;
        if it.sampled {
            self.queue
                .push(self.now + SAMPLE, What::Sample { disk: device });
        }
        if idle {
            self.step(Event::ForeignLoad {
                device,
                requests_per_kilosecond: count.saturating_mul(per_second * 1000),
                rate: BytesPerSecond(bytes.saturating_mul(per_second)),
            });
        }
    }

    fn storm(&mut self, disk: DeviceId) {
        let it = &self.disks[disk.0 as usize];
        let faults = &it.faults;
        let over = faults.storm_to_ms > 0 && self.now.0 >= faults.storm_to_ms * 1_000_000;
        if over {
            return;
        }
        let gap = NS_PER_S / faults.storm_per_second.max(1);
        let full = it.depth() >= 64;
        let at = self.now + Duration(self.prng.between(gap / 2, gap + gap / 2));
        self.queue.push(at, What::Storm { disk });
        // A crowd of metadata readers waits for its own answers, so the queue is bounded.
        if !full {
            self.small_read(disk, Owner::Storm);
        }
    }

    /// One step of the server, and all its actions.
    fn step(&mut self, event: Event) {
        self.count.step_count += 1;
        let mut actions = std::mem::take(&mut self.actions);
        actions.clear();
        self.digest.event(self.now, &event);
        self.checker.event(self.now, &event);
        if self.trace {
            println!("{:.6} {event:?}", self.now.0 as f64 / 1e9);
        }
        self.server.step(self.now, event, &mut actions);
        if self.trace {
            for action in &actions.list {
                println!("    {action:?}");
            }
        }
        self.digest.actions(&actions);
        self.checker.actions(self.now, &actions, &self.files);
        for action in &actions.list {
            self.perform(action);
        }
        self.actions = actions;
        if self.lane_pages > 0 {
            let used = self.server.writes().used_bytes.0;
            self.lane_bytes_max = self.lane_bytes_max.max(used);
        }
        if is_checked(self.count.step_count) {
            self.check_server();
        }
    }

    /// Checks that the server's books agree with themselves.
    pub fn check_server(&mut self) {
        for odd in self.server.check() {
            let what = || format!("the server's state contradicts itself: {odd}");
            self.checker.wrong(self.now, what);
        }
    }

    fn perform(&mut self, action: &Action) {
        match action {
            Action::Reply {
                session,
                request,
                outcome,
            } => self.reply(*session, *request, *outcome),
            Action::Submit(read) => {
                let Some(file) = self.files.by_id(read.file) else {
                    return;
                };
                let job = Job {
                    owner: Owner::Server(read.io),
                    file: Some(file),
                    range: read.range,
                    write: false,
                    class: read.class,
                    arrived: self.now,
                };
                let disk = read.device;
                let at = self.now + self.latency.submit;
                self.queue.push(at, What::Job { disk, job });
            }
            Action::OpenNeighbour { beside, name } => {
                let span = self.latency.open.0;
                let at = self.now + Duration(span / 2 + self.prng.below(span + 1));
                self.queue.push(
                    at,
                    What::Neighbour {
                        beside: *beside,
                        name: name.clone(),
                    },
                );
            }
            Action::AskPool { pool, path } => {
                // There and back, and two opens.
                let span = 2 * self.latency.open.0;
                let at = self.now + Duration(span / 2 + self.prng.below(span + 1));
                let path = path.clone();
                self.queue.push(at, What::PoolFile { pool: *pool, path });
            }
            Action::Stat { file } => {
                let (file, span) = (*file, self.latency.open);
                let told_at = self.now + span;
                let at = self.now + Duration(span.0 / 2);
                self.queue.push(at, What::Stat { file, told_at });
            }
            Action::Forget { file } => {
                self.give_back(*file);
                self.files.forget(*file);
            }
            Action::ReadHeader { file, .. } => {
                if let Some(file) = self.files.by_id(*file)
                    && let Some((_, count)) = self.files.get(file).header
                {
                    self.read_header(file, count);
                }
            }
            Action::Wake { at } => {
                let earliest = self.now + self.latency.timer;
                self.wake_at = Some((*at).max(earliest));
            }
            Action::SubmitWrite(_)
            | Action::Clean { .. }
            | Action::Reserve { .. }
            | Action::Sync { .. }
            | Action::WriteOut { .. }
            | Action::Flush { .. }
            | Action::Trim { .. } => self.perform_write(action),
            // The checker follows lanes, slots and doors.
            Action::Fill { .. }
            | Action::Zero { .. }
            | Action::Publish { .. }
            | Action::Spent { .. }
            | Action::Strike { .. }
            | Action::GiveMemoryBack { .. }
            | Action::LaneDone { .. }
            | Action::Known { .. }
            | Action::Loose { .. } => {}
        }
    }

    fn reply(&mut self, session: SessionId, request: RequestId, outcome: Outcome) {
        let owner = self.sessions.get(session.0 as usize).copied().flatten();
        let Some(client) = owner else {
            return;
        };
        let answer = Answer::from(outcome);
        let copying = match answer {
            Answer::Data(bytes) | Answer::Granted(bytes) => {
                self.latency.copy_rate.time_for(ByteCount(bytes))
            }
            Answer::Done | Answer::Failed(_) | Answer::Plain => Duration::ZERO,
        };
        let at = self.now + self.latency.door + copying;
        let life = self.clients[client as usize].hand.life;
        self.queue.push(
            at,
            What::Answered {
                client,
                life,
                request,
                answer,
            },
        );
    }
}
