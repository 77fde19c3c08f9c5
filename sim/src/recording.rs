// SPDX-License-Identifier: Apache-2.0
//! Recordings on the lab's disk, in the simulator: `rushes lab record` and `mixed` without Samba and without waiting.
//!
//! A small world of its own, beside [`crate::world`]: it has lanes and a file system that gives blocks, and no faults and no
//! bytes (that every byte comes where it belongs is for the random test in `core/src/server/write_tests.rs`). Readers play, writers
//! record at a rate, copies read and copies write as fast as they are let, scatterers write here and there in one file that they have read. The disk is rt-Samba's Table 5, 14 ms for a write's
//! positioning.

use crate::disk;
use crate::drive_memory::DriveMemory;
use crate::prng::Prng;
use crate::queue::Queue;
use crate::world::is_checked;
use clap::Args;
use rushes_core::server::*;
use rushes_core::units::*;
use serde::Serialize;
use std::collections::BTreeMap;

const DISK: DeviceId = DeviceId(1);
/// Of a request's number: whose it is. The rest counts that client's requests.
const CLIENT_BITS: u32 = 16;
const PREROLL: Duration = Duration::from_ms(500);
/// From here on acknowledged bytes that the disk lacks are late.
const DEVICE_LATE: Duration = Duration::from_s(5);
/// A turn of the daemon and of the door, each way.
const TURN: Duration = Duration::from_us(150);
/// A worker that asks the file system for blocks.
const RESERVING: Duration = Duration::from_ms(3);
const RECORDS: u32 = 16_384;
const COPY_BYTES: u64 = 1 << 20;
/// A drive that nobody wants for so long begins to empty its memory.
const IDLE: Duration = Duration::from_ms(100);
/// A request that has waited so long goes first.
const IMPATIENCE: Duration = Duration::from_ms(100);
/// ext4 commits its journal so often: what was written before is brought to the medium, then a few blocks of the journal.
/// Meanwhile the drive takes nothing, as one that is told by SATA's FLUSH CACHE, or through a loop device.
const COMMITS: Duration = Duration::from_s(5);
/// A commit, in the middle of the disk. Units: bytes.
const JOURNAL_BYTES: u64 = 64 << 10;
/// Calibration's view of writes that go to a drive's memory.
const INTO_MEMORY: ServiceModel = ServiceModel {
    fixed: Duration::from_us(150),
    span: Duration::ZERO,
    rate: BytesPerSecond(1_900_000_000),
};
/// The most that scatterers write at once; whole pages.
const SCATTER_PAGES_MAX: u64 = 16;

/// The clients of a run.
#[derive(Clone, Debug, Args)]
pub struct Recording {
    /// Players under contract.
    #[arg(long, default_value_t = 0)]
    pub readers: u64,
    /// Writers at that rate.
    #[arg(long, default_value_t = 11)]
    pub writers: u64,
    /// Writers that begin when half of the time is over.
    #[arg(long, default_value_t = 0)]
    pub late_writers: u64,
    /// Clients that read as fast as they are let.
    #[arg(long, default_value_t = 0)]
    pub copies: u64,
    /// Clients that write a file as fast as they are let.
    #[arg(long, default_value_t = 0)]
    pub copies_in: u64,
    /// They say first how long a file will be, a byte a MiB, as Windows does.
    #[arg(long)]
    pub announce: bool,
    /// Size of their files. Units: MiB.
    #[arg(long, default_value_t = 1024)]
    pub copy_in_mib: u64,
    /// They all come by one session, as the clients of a pool's mount do.
    #[arg(long)]
    pub one_session: bool,
    /// The disk moves so many times fewer bytes a second, and positions as quickly.
    #[arg(long, default_value_t = 1)]
    pub slower: u64,
    /// Clients that write up to 64 KiB anywhere in one file, as much together as it is long, when they have read it.
    #[arg(long, default_value_t = 0)]
    pub scatterers: u64,
    /// Size of that file. Units: MiB.
    #[arg(long, default_value_t = 256)]
    pub scatter_mib: u64,
    /// The server goes over no gap.
    #[arg(long)]
    pub no_coalesce: bool,
    /// How long players play and writers write.
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Units: Mb/s.
    #[arg(long, default_value_t = 100)]
    pub bitrate: u64,
    /// Write buffer. Units: MiB.
    #[arg(long, default_value_t = 1024)]
    pub buffer: u64,
    /// True times of the disk, in hundredths of what the server is told.
    #[arg(long, default_value_t = 100)]
    pub truth_percent: u64,
    /// Players do not begin before this.
    #[arg(long, default_value_t = 0)]
    pub readers_from: u64,
    /// The disk takes writes into a memory of its own of this size and brings them to the medium later, as the lab's does
    /// with 256. Units: MB.
    #[arg(long, default_value_t = 0)]
    pub memory: u64,
    /// It cannot be told to bring that to the medium.
    #[arg(long)]
    pub no_flush: bool,
    /// It is told, and never says that it has.
    #[arg(long)]
    pub flush_hangs: bool,
}

impl Default for Recording {
    fn default() -> Recording {
        Recording {
            readers: 0,
            writers: 0,
            late_writers: 0,
            copies: 0,
            copies_in: 0,
            announce: false,
            copy_in_mib: 1024,
            one_session: false,
            slower: 1,
            scatterers: 0,
            scatter_mib: 256,
            no_coalesce: false,
            seconds: 60,
            bitrate: 100,
            buffer: 1024,
            truth_percent: 100,
            readers_from: 0,
            memory: 0,
            no_flush: false,
            flush_hangs: false,
        }
    }
}

/// The results.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Recorded {
    /// Players with a contract from their first read on.
    pub readers_admitted: u64,
    /// Frames of theirs that came late.
    pub late_reads: u64,
    /// Of those with a contract.
    pub late_reads_admitted: u64,
    /// Frames that were acknowledged late.
    pub late_writes: u64,
    /// The worst of both. Units: ms.
    pub worst_ms: f64,
    /// Longest wait for a first frame under contract. Units: ms.
    pub first_frame_ms: f64,
    /// Bytes that reached the disk more than 5 s after their acknowledgement.
    pub device_late_bytes: u64,
    /// The longest of those times.
    pub device_worst_s: f64,
    /// Most that was dirty at once. Units: bytes.
    pub dirty_bytes_max: u64,
    /// From the last acknowledgement until the disk had everything.
    pub final_sync_s: f64,
    /// Rates of the reads and the writes of copies, while there was work. Units: MB/s.
    pub copy_mb_per_s: f64,
    /// Units: MB/s.
    pub copy_in_mb_per_s: f64,
    /// The slowest of those who write beside the mean of them, from when the last one has begun until the end; 1 without them.
    pub copy_in_even: f64,
    /// Rate of scatterers' bytes to the disk, from their first write until it had all. Units: MB/s.
    pub scatter_mb_per_s: f64,
    /// Of what was written, what the disk had already. Units: bytes.
    pub bridged_bytes: u64,
    /// The longest that a copy stood still. Units: ms.
    pub copy_wait_ms: f64,
    /// Most extents of a file.
    pub fragments_max: u64,
    /// Requests to the disk, and their mean size. Units: MB.
    pub writes: u64,
    /// Units: MB.
    pub write_mb_mean: f64,
    /// Part of the time that the disk positioned.
    pub positioning: f64,
    /// Part of the time that it had something to do.
    pub busy: f64,
    /// Writes that were left to their clients.
    pub plain: u64,
    /// How often it was told to bring what it had in its memory to the medium.
    pub flushes: u64,
    /// Bytes acknowledged that the disk never got.
    pub missing_bytes: u64,
    /// Memory of the write buffer that went from one lane to another. Units: bytes.
    pub moved_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Read,
    Write,
    Copy,
    CopyIn,
    Scatter,
}

struct Client {
    role: Role,
    session: SessionId,
    handle: HandleId,
    file: FileId,
    begin: Instant,
    period: Duration,
    frame_bytes: u64,
    frame_count: u64,
    next: u64,
    /// Bytes that it still writes to announce its length.
    to_announce: u64,
    /// Requests of its that only read, before it writes.
    to_read: u64,
    /// When each frame was answered.
    answered: Vec<Instant>,
    late: u64,
    last_answer: Instant,
}

#[derive(Clone, Debug, Default)]
struct OneFile {
    extents: Vec<Extent>,
    written: u64,
    size: u64,
}

enum What {
    Begin(usize),
    Frame(usize),
    Commit(usize),
    Event(Box<Event>),
    Served,
    Timer,
    /// A write is in the drive's memory.
    Taken(IoWrite),
    /// A run of it is on the medium.
    Destaged,
    /// The file system commits its journal: what is in the memory has to go to the medium.
    Flush,
    /// Nobody may have wanted the disk for a while.
    Idle,
}

enum Job {
    Read(IoRead),
    Write(IoWrite),
}

struct World {
    now: Instant,
    queue: Queue<What>,
    server: Server,
    steps: u64,
    random: Prng,
    scattered: u64,
    scatter_begins: Instant,
    lane_pages: u32,
    rate: BytesPerSecond,
    clients: Vec<Client>,
    files: BTreeMap<FileId, OneFile>,
    /// Gaps of the disk that nobody has: start and end.
    free: Vec<(u64, u64)>,
    /// The jobs that wait for the disk, and since when.
    pending: Vec<(Job, Instant)>,
    serving: Option<Job>,
    memory: DriveMemory,
    /// The server waits for that flush.
    asked: Option<u64>,
    /// A commit of the journal waits for that flush; true: the journal itself is written then.
    commits: Option<(u64, bool)>,
    /// A run of the memory is being written to the medium.
    destages: bool,
    /// When a read last wanted the head.
    wanted: Instant,
    no_flush: bool,
    flush_hangs: bool,
    head: u64,
    truth_percent: u64,
    slower: u64,
    wake: Instant,
    positioning: Duration,
    busy: Duration,
    out: Recorded,
    written: u64,
    worst: Duration,
    device_worst: Duration,
    last_ack: Instant,
    last_written: Instant,
    ends: Instant,
}

fn model(slower: u64) -> DeviceModel {
    let read = disk::table5().read;
    DeviceModel {
        read: ServiceModel {
            rate: BytesPerSecond(read.rate.0 / slower),
            ..read
        },
        write: ServiceModel {
            fixed: Duration(14_000_000 * 40 / 100),
            span: Duration(14_000_000 * 113 / 100),
            rate: BytesPerSecond(145_000_000 / slower),
        },
        size: disk::table5().size,
    }
}

/// A client's request.
fn request_of(index: usize, nth: u64) -> RequestId {
    RequestId(nth << CLIENT_BITS | index as u64)
}

impl Recording {
    /// Plays it.
    pub fn run(&self) -> Recorded {
        let mut world = self.build();
        let end = world.ends + Duration::from_s(600);
        while world.now < end {
            let Some((at, what)) = world.queue.pop() else {
                break;
            };
            world.now = at;
            world.happen(what);
            let used = world.server.writes().used_bytes.0;
            world.out.dirty_bytes_max = world.out.dirty_bytes_max.max(used);
            if world.is_over() {
                break;
            }
        }
        world.judge(self)
    }

    /// Plays it and prints what came of it.
    pub fn print(&self) {
        let result = self.run();
        println!(
            "{}",
            serde_json::to_string_pretty(&result).unwrap_or_default()
        );
    }

    fn build(&self) -> World {
        let limits = Limits {
            write_buffer_bytes: self.buffer << 20,
            ..Limits::default()
        };
        let mut world = World {
            now: Instant(1),
            queue: Queue::default(),
            lane_pages: (limits.write_buffer_bytes / PAGE_BYTES) as u32,
            rate: BytesPerSecond::from_bits(self.bitrate * 1_000_000),
            server: Server::new(
                limits,
                Policy {
                    coalesce: !self.no_coalesce,
                    ..Policy::default()
                },
            ),
            steps: 0,
            random: Prng::new(1),
            scattered: 0,
            scatter_begins: Instant::NEVER,
            clients: Vec::new(),
            files: BTreeMap::new(),
            free: Vec::new(),
            pending: Vec::new(),
            serving: None,
            memory: DriveMemory::new(self.memory * 1_000_000),
            asked: None,
            commits: None,
            destages: false,
            wanted: Instant::ZERO,
            no_flush: self.no_flush,
            flush_hangs: self.flush_hangs,
            head: 0,
            truth_percent: self.truth_percent,
            slower: self.slower,
            wake: Instant::NEVER,
            positioning: Duration::ZERO,
            busy: Duration::ZERO,
            out: Recorded::default(),
            written: 0,
            worst: Duration::ZERO,
            device_worst: Duration::ZERO,
            last_ack: Instant(1),
            last_written: Instant(1),
            ends: Instant(1) + Duration::from_s(self.seconds),
        };
        let mut told = model(self.slower);
        if self.memory > 0 {
            told.write = INTO_MEMORY;
            world.queue.push(world.now + COMMITS, What::Flush);
        }
        world.step(Event::DeviceAdded {
            device: DISK,
            model: told,
        });
        let roles = [
            (Role::Read, self.readers),
            (Role::Write, self.writers + self.late_writers),
            (Role::Copy, self.copies),
            (Role::CopyIn, self.copies_in),
            (Role::Scatter, self.scatterers),
        ];
        let played = self.readers + self.copies;
        let size = disk::table5().size.0;
        // Files that are read lie in the first half, evenly; files that are written take the rest.
        let gap = size / 2 / played.max(1);
        world
            .free
            .push((if played > 0 { size / 2 } else { 0 }, size));
        for (role, count) in roles {
            for nth in 0..count {
                self.add(&mut world, role, nth, gap);
            }
        }
        world
    }

    fn add(&self, world: &mut World, role: Role, nth: u64, gap: u64) {
        let index = world.clients.len();
        let rate = BytesPerSecond::from_bits(self.bitrate * 1_000_000);
        let period = Duration::from_ms(40);
        let paced = matches!(role, Role::Read | Role::Write);
        let frame_bytes = if paced {
            rate.bytes_in(period).0
        } else {
            COPY_BYTES
        };
        let shared = match role {
            Role::Scatter => nth,
            _ => 0,
        };
        let file = FileId((index as u64 - shared) as u32 + 1);
        let mut one = OneFile::default();
        let mut delay = match role {
            Role::Scatter => Duration::ZERO,
            _ => Duration::from_ms(250 * nth),
        };
        let mut to_read = 0;
        let frame_count = match role {
            Role::Read | Role::Copy => {
                one.size = gap / frame_bytes * frame_bytes;
                one.extents.push(Extent {
                    logical: ByteOffset(0),
                    physical: ByteOffset(index as u64 * gap),
                    length: ByteCount(one.size.next_multiple_of(PAGE_BYTES)),
                });
                if role == Role::Read {
                    delay += Duration::from_s(self.readers_from);
                    (self.seconds - self.readers_from) * NS_PER_S / period.0
                } else {
                    one.size / frame_bytes
                }
            }
            Role::Write => {
                let mut seconds = self.seconds;
                if nth >= self.writers {
                    delay += Duration::from_s(self.seconds / 2);
                    seconds /= 2;
                }
                seconds * NS_PER_S / period.0
            }
            Role::CopyIn => (self.copy_in_mib << 20) / frame_bytes,
            Role::Scatter => {
                // All read it, each its own part.
                to_read = (self.scatter_mib << 20) / COPY_BYTES / self.scatterers;
                let mean = (SCATTER_PAGES_MAX + 1) * PAGE_BYTES / 2;
                one.size = to_read * COPY_BYTES * self.scatterers;
                to_read + one.size / self.scatterers / mean
            }
        };
        if role == Role::Scatter && nth == 0 {
            let (start, _) = world.free[0];
            one.extents.push(Extent {
                logical: ByteOffset(0),
                physical: ByteOffset(start),
                length: ByteCount(one.size),
            });
            world.free[0].0 += one.size;
        }
        if shared == 0 {
            world.files.insert(file, one);
        }
        let begin = world.now + delay;
        let owner = match role {
            Role::CopyIn if self.one_session => index - nth as usize,
            _ => index,
        };
        world.clients.push(Client {
            role,
            session: SessionId(owner as u32 + 1),
            handle: HandleId(index as u32 + 1),
            file,
            begin,
            period: if paced { period } else { Duration::ZERO },
            frame_bytes,
            frame_count,
            next: 0,
            to_announce: if role == Role::CopyIn && self.announce {
                frame_count
            } else {
                0
            },
            to_read,
            answered: Vec::new(),
            late: 0,
            last_answer: begin,
        });
        world.queue.push(begin, What::Begin(index));
    }
}

impl World {
    fn step(&mut self, event: Event) {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        self.steps += 1;
        if is_checked(self.steps) {
            let odd = self.server.check();
            assert!(
                odd.is_empty(),
                "the server's state contradicts itself: {odd:#?}"
            );
        }
        let list = std::mem::take(&mut actions.list);
        for action in list {
            self.act(action);
        }
        self.serve();
    }

    fn later(&mut self, delay: Duration, event: Event) {
        self.queue
            .push(self.now + delay, What::Event(Box::new(event)));
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Begin(index) => self.begin(index),
            What::Frame(index) => self.frame(index),
            What::Commit(index) => {
                let client = &self.clients[index];
                let (session, request) = (client.session, request_of(index, client.next));
                self.step(Event::WriteEnd { session, request });
            }
            What::Event(event) => self.step(*event),
            What::Served => self.served(),
            What::Taken(io) => self.taken(&io),
            What::Destaged => {
                self.destages = false;
                self.committed();
                self.serve();
                self.flushed();
            }
            What::Flush => {
                self.commits = Some((self.memory.begin_flush(), true));
                self.queue.push(self.now + COMMITS, What::Flush);
                self.committed();
                self.serve();
            }
            What::Idle => self.serve(),
            What::Timer => {
                if self.now >= self.wake {
                    self.wake = Instant::NEVER;
                    self.step(Event::Timer);
                }
            }
        }
    }

    fn begin(&mut self, index: usize) {
        let (session, handle, file, role) = {
            let client = &self.clients[index];
            (client.session, client.handle, client.file, client.role)
        };
        if session.0 as usize == index + 1 {
            let label = SessionLabel {
                client: format!("client{index}"),
                ..SessionLabel::default()
            };
            self.step(Event::SessionOpened { session, label });
            self.step(Event::LaneAdded {
                lane: LaneId(session.0),
                session: Some(session),
                page_count: self.lane_pages,
                record_count: RECORDS,
            });
        }
        self.step(Event::Opening {
            session,
            handle,
            path: format!("f{index}.mov"),
            part: FilePart::WHOLE,
        });
        let one = &self.files[&file];
        let facts = FileFacts {
            file,
            key: FileKey {
                device: 1,
                inode: u64::from(file.0),
            },
            device: DISK,
            size: ByteCount(one.size),
            version: 1,
            extents: one.extents.clone(),
            hint: (role == Role::Read).then_some(RateHint::Rate(self.rate, RateSource::Rule)),
            is_header_unread: false,
            way: Some(WriteWay::Cached),
            is_exclusive: role == Role::Scatter,
            has_unwritten: one.size > 0,
            is_fresh: false,
        };
        self.step(Event::Opened {
            session,
            handle,
            facts: Ok(facts),
        });
        self.queue.push(self.now, What::Frame(index));
    }

    /// A client's next frame.
    fn frame(&mut self, index: usize) {
        let client = &self.clients[index];
        if client.next >= client.frame_count {
            return;
        }
        let range = match client.to_announce {
            0 => ByteRange::new(client.next * client.frame_bytes, client.frame_bytes),
            left => ByteRange::new((client.frame_count - left + 1) * client.frame_bytes - 1, 1),
        };
        let (session, handle) = (client.session, client.handle);
        let (request, sent) = (request_of(index, client.next), self.now);
        let (role, reads) = (client.role, client.next < client.to_read);
        let range = match role {
            Role::Scatter if reads => {
                let part = u64::from(session.0 - client.file.0) * client.to_read;
                ByteRange::new((part + client.next) * COPY_BYTES, COPY_BYTES)
            }
            Role::Scatter => self.anywhere(index),
            _ => range,
        };
        let event = match role {
            Role::Scatter if reads => Event::Read {
                session,
                handle,
                request,
                range,
                sent,
            },
            Role::Read | Role::Copy => Event::Read {
                session,
                handle,
                request,
                range,
                sent,
            },
            Role::Write | Role::CopyIn | Role::Scatter => Event::WriteBegin {
                session,
                handle,
                request,
                range,
                sent,
            },
        };
        self.step(event);
    }

    /// A few pages of a scatterer's file.
    fn anywhere(&mut self, index: usize) -> ByteRange {
        let pages = self.files[&self.clients[index].file].size / PAGE_BYTES;
        let count = 1 + self.random.below(SCATTER_PAGES_MAX);
        let first = self.random.below(pages - count + 1);
        self.scattered += count * PAGE_BYTES;
        self.scatter_begins = self.scatter_begins.min(self.now);
        ByteRange::new(first * PAGE_BYTES, count * PAGE_BYTES)
    }

    fn answered(&mut self, index: usize) {
        let (now, ends) = (self.now, self.ends);
        let client = &mut self.clients[index];
        if client.to_announce > 0 {
            client.to_announce -= 1;
            self.queue.push(now + TURN, What::Frame(index));
            return;
        }
        let due = client.begin + PREROLL + client.period.times(client.next);
        if client.period > Duration::ZERO && now > due {
            client.late += 1;
            self.worst = self.worst.max(now.since(due));
        }
        if matches!(client.role, Role::Copy | Role::CopyIn) && client.answered.len() > 8 {
            let wait = now.since(client.last_answer).0 as f64 / 1e6;
            self.out.copy_wait_ms = self.out.copy_wait_ms.max(wait);
        }
        if client.next == 0 && client.role == Role::Read {
            let first = now.since(client.begin).0 as f64 / 1e6;
            self.out.first_frame_ms = self.out.first_frame_ms.max(first);
        }
        client.last_answer = now;
        client.answered.push(now);
        client.next += 1;
        if matches!(client.role, Role::Write | Role::CopyIn | Role::Scatter) {
            self.last_ack = now;
        }
        if client.role == Role::Copy && now >= ends {
            client.frame_count = client.next;
        }
        let next = (client.begin + client.period.times(client.next)).max(now + TURN);
        if client.next < client.frame_count {
            self.queue.push(next, What::Frame(index));
        } else {
            let (session, handle) = (client.session, client.handle);
            self.later(TURN, Event::Closed { session, handle });
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Reply {
                session,
                request,
                outcome,
            } => {
                let index = (request.0 & ((1 << CLIENT_BITS) - 1)) as usize;
                match outcome {
                    Outcome::Data { .. } => {
                        self.later(TURN, Event::ReadEnd { session, request });
                        self.answered(index);
                    }
                    Outcome::Granted { .. } => {
                        self.queue.push(self.now + TURN, What::Commit(index));
                    }
                    Outcome::Done => self.answered(index),
                    Outcome::Plain | Outcome::Failed(_) => {
                        self.out.plain += 1;
                        self.answered(index);
                    }
                }
            }
            Action::Submit(io) => self.pending.push((Job::Read(io), self.now)),
            Action::GiveMemoryBack { run, .. } => {
                self.out.moved_bytes += u64::from(run.count) * PAGE_BYTES;
            }
            Action::SubmitWrite(io) => self.pending.push((Job::Write(io), self.now)),
            Action::Reserve {
                file,
                needed,
                wished_end,
            } => {
                let result = Ok(self.reserve(file, needed, wished_end));
                self.later(RESERVING, Event::Reserved { file, result });
            }
            Action::Clean { file } => self.later(TURN, Event::Settled { file, version: 1 }),
            Action::Trim { file, size } => {
                self.trim(file, size.0);
                self.later(TURN, Event::Settled { file, version: 1 });
            }
            Action::Sync { file } | Action::WriteOut { file } => {
                let result = Ok(());
                self.later(TURN, Event::Synced { file, result });
            }
            Action::Flush { .. } if self.no_flush => {
                self.out.flushes += 1;
                let (device, outcome) = (DISK, Flushed::Never);
                self.later(TURN, Event::Flushed { device, outcome });
            }
            Action::Flush { .. } => {
                self.out.flushes += 1;
                self.asked = Some(self.memory.begin_flush());
                self.serve();
                self.flushed();
            }
            Action::Stat { file } => {
                let size = ByteCount(self.files[&file].size);
                let version = 1;
                self.later(
                    TURN,
                    Event::Stat {
                        file,
                        size,
                        version,
                        is_fresh: false,
                    },
                );
            }
            Action::Wake { at } => {
                self.wake = at;
                self.queue.push(at, What::Timer);
            }
            _ => {}
        }
    }

    // ---- The file system ----

    /// Blocks up to `wished_end`: behind the file's last ones as far as they are free, else where there is most room.
    fn reserve(&mut self, file: FileId, needed: ByteRange, wished_end: u64) -> Vec<Extent> {
        let Some(one) = self.files.get_mut(&file) else {
            return Vec::new();
        };
        let end = wished_end.max(needed.end()).next_multiple_of(PAGE_BYTES);
        let mut at = needed.start.0 / PAGE_BYTES * PAGE_BYTES;
        while at < end {
            let after = one.extents.partition_point(|extent| extent.logical.0 <= at);
            let before = after.checked_sub(1).map(|index| one.extents[index]);
            let mapped = before.map_or(0, |last| last.logical.0 + last.length.0);
            if mapped > at {
                at = mapped;
                continue;
            }
            let stop = one
                .extents
                .get(after)
                .map_or(end, |next| next.logical.0.min(end));
            let goal = before.map(|last| last.physical.0 + last.length.0);
            let here = goal.and_then(|goal| self.free.iter().position(|free| free.0 == goal));
            let first = |least: u64| self.free.iter().position(|free| free.1 - free.0 >= least);
            let Some(index) = here.or_else(|| first(stop - at)).or_else(|| first(1)) else {
                break;
            };
            let (from, to) = self.free[index];
            let length = (stop - at).min(to - from);
            let joins = before.is_some_and(|last| {
                last.physical.0 + last.length.0 == from && last.logical.0 + last.length.0 == at
            });
            if joins {
                one.extents[after - 1].length.0 += length;
            } else {
                one.extents.insert(
                    after,
                    Extent {
                        logical: ByteOffset(at),
                        physical: ByteOffset(from),
                        length: ByteCount(length),
                    },
                );
            }
            self.free[index].0 += length;
            self.free.retain(|free| free.0 < free.1);
            at += length;
        }
        one.extents.clone()
    }

    fn trim(&mut self, file: FileId, size: u64) {
        let end = size.next_multiple_of(PAGE_BYTES);
        if let Some(one) = self.files.get_mut(&file) {
            one.extents.retain(|extent| extent.logical.0 < end);
            if let Some(last) = one.extents.last_mut() {
                last.length.0 = last.length.0.min(end - last.logical.0);
            }
        }
    }

    fn place(&self, file: FileId, offset: u64) -> u64 {
        let extents = &self.files[&file].extents;
        let after = extents.partition_point(|extent| extent.logical.0 <= offset);
        after
            .checked_sub(1)
            .and_then(|at| extents.get(at))
            .map_or(offset, |extent| {
                extent.physical.0 + (offset - extent.logical.0)
            })
    }

    // ---- The disk ----

    /// It takes the nearest ahead.
    fn serve(&mut self) {
        self.take_into_memory();
        if self.serving.is_some() || self.destages {
            return;
        }
        let head = self.head;
        // A write that waits for room in the memory is not for the head.
        let waits = |job: &Job| self.memory.capacity > 0 && matches!(job, Job::Write(_));
        let nearest = (0..self.pending.len())
            .filter(|&at| !waits(&self.pending[at].0))
            .map(|at| (self.place_of(&self.pending[at].0), at))
            .min_by_key(|&(place, at)| {
                let patient = self.now.since(self.pending[at].1) < IMPATIENCE;
                (patient, place.wrapping_sub(head))
            });
        if let Some((start, bytes)) = self.memory.next_run(head) {
            let is_idle = self.now >= self.wanted + IDLE;
            let is_nearer = nearest.is_none_or(|(place, at)| {
                let patient = self.now.since(self.pending[at].1) < IMPATIENCE;
                patient && start.wrapping_sub(head) < place.wrapping_sub(head)
            });
            let stalls = self.pending.iter().any(|(job, _)| waits(job));
            if (is_idle && nearest.is_none())
                || (is_nearer && (stalls || self.memory.is_pressing()))
            {
                return self.destage(start, bytes);
            }
            if nearest.is_none() {
                self.queue.push(self.wanted + IDLE, What::Idle);
            }
        }
        let Some((at, nearest)) = nearest else {
            return;
        };
        let (job, _) = self.pending.remove(nearest);
        let (model, bytes) = match &job {
            Job::Read(io) => (model(self.slower).read, io.range.length.0),
            Job::Write(io) => (model(self.slower).write, io.range.length.0),
        };
        let distance = at.abs_diff(self.head);
        let positioning = model.positioning(distance, disk::table5().size);
        self.positioning += positioning;
        let time = positioning + model.transfer(bytes);
        self.head = at + bytes;
        self.serving = Some(job);
        let time = Duration(time.0 / 100 * self.truth_percent);
        self.busy += time;
        self.queue.push(self.now + time, What::Served);
    }

    fn place_of(&self, job: &Job) -> u64 {
        match job {
            Job::Read(io) => self.place(io.file, io.range.start.0),
            Job::Write(io) => self.place(io.file, io.range.start.0),
        }
    }

    /// Writes that fit are as good as done.
    fn take_into_memory(&mut self) {
        if self.memory.capacity == 0 {
            return;
        }
        let mut index = 0;
        while let Some((job, _)) = self.pending.get(index) {
            let Job::Write(io) = job else {
                self.wanted = self.now;
                index += 1;
                continue;
            };
            let bytes = io.range.length.0;
            if self.memory.is_full_for(bytes) || self.commits.is_some() {
                break;
            }
            let io = *io;
            self.pending.remove(index);
            let start = self.place(io.file, io.range.start.0);
            self.memory.put(start, bytes);
            let time = INTO_MEMORY.fixed + INTO_MEMORY.transfer(bytes);
            self.queue.push(self.now + time, What::Taken(io));
        }
    }

    fn taken(&mut self, io: &IoWrite) {
        self.arrived(io);
        let (io, length) = (io.io, io.range.length);
        let result = Ok(length);
        self.later(TURN, Event::IoDone { io, result });
        self.serve();
        self.flushed();
    }

    /// Go on with a commit when what it waits for is on the medium.
    fn committed(&mut self) {
        let Some((flush, journal)) = self.commits else {
            return;
        };
        if self.memory.has_of(flush) || self.destages {
            return;
        }
        self.commits = None;
        if journal {
            self.memory.put(disk::table5().size.0 / 2, JOURNAL_BYTES);
            self.commits = Some((self.memory.begin_flush(), false));
        }
    }

    /// The server is told when all is on the medium that was there when it asked.
    fn flushed(&mut self) {
        let Some(asked) = self.asked else {
            return;
        };
        if !self.flush_hangs && !self.memory.has_of(asked) && !self.destages {
            self.asked = None;
            let (device, outcome) = (DISK, Flushed::Done);
            self.later(TURN, Event::Flushed { device, outcome });
        }
    }

    fn destage(&mut self, start: u64, bytes: u64) {
        let model = model(self.slower).write;
        // Among the many that wait there the next is near, and a short way costs little: the law of the lab's disk.
        let way = start.abs_diff(self.head) as f64 / disk::table5().size.0 as f64;
        let part = (193.0 * way.powf(0.8)).min(1.0);
        let positioning = Duration((14_000_000.0 * part) as u64);
        self.positioning += positioning;
        self.memory.remove(start, bytes);
        self.destages = true;
        self.head = start + bytes;
        let time = positioning + model.transfer(bytes);
        let time = Duration(time.0 / 100 * self.truth_percent);
        self.busy += time;
        self.queue.push(self.now + time, What::Destaged);
    }

    fn served(&mut self) {
        let Some(job) = self.serving.take() else {
            return;
        };
        let (io, length) = match &job {
            Job::Read(io) => (io.io, io.range.length),
            Job::Write(io) => {
                self.arrived(io);
                (io.io, io.range.length)
            }
        };
        // The event loop's turn: the disk has nothing to do meanwhile.
        self.later(
            TURN,
            Event::IoDone {
                io,
                result: Ok(length),
            },
        );
        self.serve();
    }

    fn arrived(&mut self, io: &IoWrite) {
        self.out.writes += 1;
        self.written += io.range.length.0;
        self.last_written = self.now;
        if let Some(one) = self.files.get_mut(&io.file) {
            one.written += io.range.length.0;
            one.size = one.size.max(io.range.end());
        }
        let client = &self.clients[io.file.0 as usize - 1];
        if client.role == Role::Scatter {
            return;
        }
        let frames =
            io.range.start.0 / client.frame_bytes..io.range.end().div_ceil(client.frame_bytes);
        for frame in frames {
            let Some(&acknowledged) = client.answered.get(frame as usize) else {
                continue;
            };
            let age = self.now.since(acknowledged);
            self.device_worst = self.device_worst.max(age);
            if age > DEVICE_LATE && client.role == Role::Write {
                self.out.device_late_bytes += client.frame_bytes;
            }
        }
    }

    fn is_over(&self) -> bool {
        let done = self
            .clients
            .iter()
            .all(|client| client.next >= client.frame_count);
        done && self.serving.is_none()
            && self.pending.is_empty()
            && self.server.writes().dirty_file_count == 0
    }

    fn copy_in_even(&self) -> f64 {
        let writers = || {
            self.clients
                .iter()
                .filter(|client| client.role == Role::CopyIn)
        };
        let from = writers().map(|client| client.begin).max();
        let from = from.unwrap_or(Instant(0));
        let within = |client: &Client| {
            let is_in = |at: &&Instant| (from..=self.ends).contains(*at);
            client.answered.iter().filter(is_in).count() as f64
        };
        let sum: f64 = writers().map(within).sum();
        let least = writers().map(within).reduce(f64::min);
        least.map_or(1.0, |least| least * writers().count() as f64 / sum.max(1.0))
    }

    fn judge(mut self, asked: &Recording) -> Recorded {
        let records = self.server.streams(self.now);
        let seconds = self.now.since(Instant(1)).0 as f64 / 1e9;
        for (index, client) in self.clients.iter().enumerate() {
            let bytes = (client.answered.len() as u64 * client.frame_bytes) as f64 / 1e6;
            let missing = client.frame_count - client.next;
            match client.role {
                Role::Read => {
                    let label = format!("client{index}");
                    let admitted = records.iter().any(|record| {
                        record.label.client == label
                            && record.promised_count > 0
                            // Two reads may come before it can be known that somebody plays.
                            && record.promised_count + 2 >= record.read_count
                    });
                    self.out.readers_admitted += u64::from(admitted);
                    self.out.late_reads += client.late + missing;
                    if admitted {
                        self.out.late_reads_admitted += client.late + missing;
                    }
                }
                Role::Write => self.out.late_writes += client.late + missing,
                Role::Copy => self.out.copy_mb_per_s += bytes / asked.seconds as f64,
                Role::CopyIn => self.out.copy_in_mb_per_s += bytes / seconds,
                Role::Scatter => self.out.missing_bytes += missing,
            }
            if matches!(client.role, Role::Write | Role::CopyIn) {
                let one = &self.files[&client.file];
                self.out.fragments_max = self.out.fragments_max.max(one.extents.len() as u64);
                let wrote = client.answered.len() as u64 * client.frame_bytes;
                self.out.missing_bytes += wrote.saturating_sub(one.written);
            }
        }
        if self.scattered > 0 {
            let took = self.last_written.since(self.scatter_begins).0 as f64 / 1e9;
            self.out.scatter_mb_per_s = self.scattered as f64 / 1e6 / took;
        }
        self.out.copy_in_even = self.copy_in_even();
        let devices = self.server.devices();
        self.out.bridged_bytes = devices.iter().map(|device| device.write_bridged.0).sum();
        self.out.worst_ms = self.worst.0 as f64 / 1e6;
        self.out.device_worst_s = self.device_worst.0 as f64 / 1e9;
        self.out.final_sync_s = self.last_written.since(self.last_ack).0 as f64 / 1e9;
        self.out.write_mb_mean = self.written as f64 / 1e6 / self.out.writes.max(1) as f64;
        self.out.busy = self.busy.0 as f64 / 1e9 / seconds;
        self.out.positioning = self.positioning.0 as f64 / 1e9 / seconds;
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_gigabyte_side_by_side_have_two_fragments_each() {
        for announce in [false, true] {
            let out = Recording {
                writers: 0,
                copies_in: 12,
                announce,
                seconds: 60,
                ..Recording::default()
            }
            .run();
            assert!(out.fragments_max <= 2, "{out:?}");
            assert!(out.copy_in_mb_per_s > 130.0, "{out:?}");
            assert_eq!((out.plain, out.missing_bytes), (0, 0), "{out:?}");
        }
    }

    #[test]
    fn lanes_that_are_written_to_keep_their_memory() {
        let out = Recording {
            writers: 0,
            copies_in: 12,
            memory: 256,
            seconds: 100,
            ..Recording::default()
        }
        .run();
        // The bytes of the first have to move: it had most of the buffer. Without shares 3.8 GB do.
        assert!(out.moved_bytes < 1200 << 20, "{out:?}");
        assert_eq!((out.plain, out.missing_bytes), (0, 0), "{out:?}");
    }

    #[test]
    fn those_who_write_as_fast_as_they_are_let_get_on_alike() {
        for (one_session, memory) in [(false, 0), (true, 0), (false, 256), (true, 256)] {
            let out = Recording {
                copies_in: 16,
                copy_in_mib: 1024,
                one_session,
                memory,
                slower: 4,
                buffer: 512,
                ..Recording::default()
            }
            .run();
            assert!(out.copy_in_even > 0.85, "{out:?}");
            assert!(out.copy_in_mb_per_s > 35.0, "{out:?}");
            assert_eq!((out.plain, out.missing_bytes), (0, 0), "{out:?}");
        }
    }

    #[test]
    fn small_writes_over_a_cached_file_become_few_requests() {
        let scattered = |no_coalesce| {
            Recording {
                writers: 0,
                scatterers: 8,
                no_coalesce,
                ..Recording::default()
            }
            .run()
        };
        let (with, without) = (scattered(false), scattered(true));
        assert_eq!((with.plain, with.missing_bytes), (0, 0), "{with:?}");
        assert_eq!(without.bridged_bytes, 0, "{without:?}");
        assert!(with.writes * 4 <= without.writes, "{with:?} {without:?}");
        assert!(
            with.scatter_mb_per_s >= 1.38 * without.scatter_mb_per_s,
            "{with:?} {without:?}"
        );
    }

    #[test]
    fn gaps_that_are_bridged_make_no_promise_late() {
        let out = Recording {
            readers: 6,
            writers: 2,
            scatterers: 4,
            // As much of it stays in the cache beside what is played and recorded that there are gaps to go over.
            scatter_mib: 192,
            seconds: 60,
            ..Recording::default()
        }
        .run();
        assert!(out.bridged_bytes > 0, "{out:?}");
        assert_eq!(out.readers_admitted, 6, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        assert_eq!(out.device_late_bytes, 0, "{out:?}");
    }

    #[test]
    fn copies_in_and_out_slow_each_other_and_nobody_else() {
        let out = Recording {
            readers: 6,
            writers: 3,
            copies: 1,
            copies_in: 2,
            copy_in_mib: 512,
            seconds: 60,
            ..Recording::default()
        }
        .run();
        assert_eq!(out.readers_admitted, 6, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        assert_eq!(out.device_late_bytes, 0, "{out:?}");
        assert!(
            out.copy_mb_per_s > 5.0 && out.copy_in_mb_per_s > 5.0,
            "{out:?}"
        );
    }

    #[test]
    fn a_drive_with_a_memory_is_told_to_write_that_out_before_it_is_read_from() {
        let out = Recording {
            readers: 6,
            writers: 5,
            copies: 1,
            memory: 256,
            ..Recording::default()
        }
        .run();
        assert_eq!(out.readers_admitted, 6, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        assert_eq!(out.device_late_bytes, 0, "{out:?}");
        assert!(out.copy_mb_per_s > 2.0, "{out:?}");
        assert!((30..600).contains(&out.flushes), "{out:?}");
    }

    #[test]
    fn a_drive_without_a_memory_or_without_readers_is_not_told_so() {
        for (readers, memory) in [(6, 0), (0, 256)] {
            let out = Recording {
                readers,
                writers: 5,
                memory,
                ..Recording::default()
            }
            .run();
            assert_eq!(out.flushes, 0, "{out:?}");
            assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        }
    }

    #[test]
    fn a_flush_that_never_ends_stops_nobody() {
        let out = Recording {
            readers: 4,
            writers: 3,
            copies: 1,
            memory: 256,
            flush_hangs: true,
            ..Recording::default()
        }
        .run();
        assert_eq!(out.flushes, 1, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        assert_eq!(out.missing_bytes, 0, "{out:?}");
    }

    #[test]
    fn a_drive_that_was_idle_meanwhile_answers_too() {
        // Nobody reads for a while: what was written is on the medium long before somebody does.
        let out = Recording {
            readers: 4,
            writers: 0,
            late_writers: 0,
            copies_in: 1,
            copy_in_mib: 64,
            readers_from: 5,
            memory: 256,
            seconds: 10,
            ..Recording::default()
        }
        .run();
        assert_eq!((out.late_reads, out.missing_bytes), (0, 0), "{out:?}");
    }

    #[test]
    fn a_copy_beside_recordings_is_not_held_up_by_what_a_memory_owes() {
        let out = |memory| {
            Recording {
                writers: 5,
                copies_in: 1,
                memory,
                ..Recording::default()
            }
            .run()
        };
        let (with, without) = (out(256), out(0));
        assert_eq!(
            (with.late_writes, with.device_late_bytes),
            (0, 0),
            "{with:?}"
        );
        assert!(
            with.copy_in_mb_per_s >= 0.9 * without.copy_in_mb_per_s,
            "{with:?} {without:?}"
        );
    }

    #[test]
    fn small_writes_gather_for_a_drive_that_orders_them_itself() {
        let scattered = |no_coalesce| {
            Recording {
                writers: 0,
                scatterers: 8,
                memory: 256,
                no_coalesce,
                ..Recording::default()
            }
            .run()
        };
        let (with, without) = (scattered(false), scattered(true));
        assert_eq!((with.plain, with.missing_bytes), (0, 0), "{with:?}");
        assert!(
            with.writes * 5 <= without.writes * 4,
            "{with:?} {without:?}"
        );
    }

    #[test]
    fn a_drive_that_cannot_be_told_so_is_asked_once() {
        let out = Recording {
            readers: 4,
            writers: 3,
            memory: 256,
            no_flush: true,
            ..Recording::default()
        }
        .run();
        assert_eq!(out.flushes, 1, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
    }

    #[test]
    fn writers_that_come_later_hurt_no_contract() {
        let out = Recording {
            readers: 8,
            writers: 0,
            late_writers: 8,
            seconds: 60,
            ..Recording::default()
        }
        .run();
        assert_eq!((out.readers_admitted, out.late_reads), (8, 0), "{out:?}");
        assert!(out.late_writes > 0, "somebody has to wait: {out:?}");
        assert_eq!(out.missing_bytes, 0, "{out:?}");
    }

    #[test]
    fn readers_are_not_promised_what_writers_take() {
        let out = Recording {
            readers: 8,
            writers: 8,
            readers_from: 10,
            seconds: 60,
            ..Recording::default()
        }
        .run();
        assert!((2..8).contains(&out.readers_admitted), "{out:?}");
        assert_eq!(
            (out.late_reads_admitted, out.late_writes),
            (0, 0),
            "{out:?}"
        );
        assert_eq!(out.device_late_bytes, 0, "{out:?}");
    }

    #[test]
    fn eleven_recordings_are_in_time_on_the_disk_too() {
        let out = Recording {
            writers: 11,
            seconds: 180,
            ..Recording::default()
        }
        .run();
        assert_eq!((out.late_writes, out.device_late_bytes), (0, 0), "{out:?}");
        assert!(out.dirty_bytes_max <= 1 << 30, "{out:?}");
        assert_eq!((out.plain, out.missing_bytes), (0, 0), "{out:?}");
        assert!(out.final_sync_s < 5.0, "{out:?}");
    }

    #[test]
    fn players_recordings_and_a_copy_share_a_disk() {
        let out = Recording {
            readers: 6,
            writers: 5,
            copies: 1,
            seconds: 60,
            ..Recording::default()
        }
        .run();
        assert_eq!(out.readers_admitted, 6, "{out:?}");
        assert_eq!((out.late_reads, out.late_writes), (0, 0), "{out:?}");
        assert_eq!(out.device_late_bytes, 0, "{out:?}");
        assert!(out.copy_mb_per_s > 1.0, "{out:?}");
    }
}
