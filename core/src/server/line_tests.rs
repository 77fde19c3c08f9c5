// SPDX-License-Identifier: Apache-2.0
//! Writers as fast as the server lets them, to more than one device, or to one that does not take a
//! file: no write waits for the trouble of another. `rushes-sim record --copies-in` shows how even
//! they are on one device.

use super::*;
use alloc::format;
use alloc::vec::Vec;

const MEGA: u64 = 1 << 20;
/// Each file is there with all of its blocks.
const FILE_BYTES: u64 = 8 << 30;
/// The requests that a client has under way of one file.
const UNDER_WAY: usize = 4;

/// A device that takes one request after the other.
struct Disk {
    bytes_per_s: u64,
    free_at: Instant,
}

/// A client that writes one file from front to back.
struct Writer {
    session: SessionId,
    handle: HandleId,
    disk: usize,
    next: u64,
    written: u64,
    under_way: usize,
    /// How many of its writes were refused.
    refused: usize,
    /// How many its client had to write on its own descriptor.
    plain: usize,
    /// The device answers each write of this file with an error.
    is_refused: bool,
}

struct World {
    server: Server,
    now: Instant,
    wake: Instant,
    disks: Vec<Disk>,
    writers: Vec<Writer>,
    requests: BTreeMap<u64, usize>,
    next: u64,
    ios: Vec<(Instant, IoId, FileId, ByteCount)>,
    settles: Vec<FileId>,
}

impl World {
    /// `sessions[n]` says of each file of one session on which of the disks it lies.
    fn new(disks: &[u64], sessions: &[&[usize]]) -> World {
        World::with_records(disks, sessions, 4096)
    }

    fn with_records(disks: &[u64], sessions: &[&[usize]], record_count: u32) -> World {
        let limits = Limits {
            write_buffer_bytes: 512 << 20,
            ..Limits::default()
        };
        let mut world = World {
            server: Server::new(limits, Policy::default()),
            now: Instant(1),
            wake: Instant::NEVER,
            disks: Vec::new(),
            writers: Vec::new(),
            requests: BTreeMap::new(),
            next: 0,
            ios: Vec::new(),
            settles: Vec::new(),
        };
        for (disk, &bytes_per_s) in disks.iter().enumerate() {
            let row = ServiceModel {
                fixed: Duration::from_ms(1),
                span: Duration::from_ms(1),
                rate: BytesPerSecond(bytes_per_s),
            };
            let model = DeviceModel {
                read: row,
                write: row,
                size: ByteCount(1 << 40),
            };
            let device = DeviceId(disk as u16 + 1);
            world.step(Event::DeviceAdded { device, model });
            world.disks.push(Disk {
                bytes_per_s,
                free_at: Instant(1),
            });
        }
        for (number, files) in sessions.iter().enumerate() {
            let session = SessionId(number as u32 + 1);
            let label = SessionLabel::default();
            world.step(Event::SessionOpened { session, label });
            world.step(Event::LaneAdded {
                lane: LaneId(number as u32 + 1),
                session: Some(session),
                page_count: 1 << 16,
                record_count,
            });
            for (number, &disk) in files.iter().enumerate() {
                let handle = HandleId(number as u32 + 1);
                world.open(session, handle, disk);
            }
        }
        world
    }

    fn open(&mut self, session: SessionId, handle: HandleId, disk: usize) {
        let file = self.writers.len() as u64 + 1;
        let device = DeviceId(disk as u16 + 1);
        let path = format!("copy-{file}.mov");
        self.step(Event::Opening {
            session,
            handle,
            path,
            part: FilePart::WHOLE,
        });
        let whole = Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(file << 33),
            length: ByteCount(FILE_BYTES),
        };
        self.step(Event::Opened {
            session,
            handle,
            facts: Ok(FileFacts {
                file: FileId(file as u32),
                key: FileKey {
                    device: u64::from(device.0),
                    inode: file,
                },
                device,
                size: ByteCount(FILE_BYTES),
                version: 1,
                extents: alloc::vec![whole],
                hint: None,
                is_header_unread: false,
                way: Some(WriteWay::Extents),
                is_exclusive: false,
                has_unwritten: true,
                is_fresh: false,
            }),
        });
        self.writers.push(Writer {
            session,
            handle,
            disk,
            next: 0,
            written: 0,
            under_way: 0,
            refused: 0,
            plain: 0,
            is_refused: false,
        });
    }

    fn step(&mut self, event: Event) {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        for action in actions.list {
            match action {
                Action::Reply {
                    session,
                    request,
                    outcome,
                } => self.answered(session, request, outcome),
                Action::SubmitWrite(io) => {
                    let writer = &self.writers[io.file.0 as usize - 1];
                    let disk = &mut self.disks[writer.disk];
                    let ns = io.range.length.0 * NS_PER_S / disk.bytes_per_s;
                    disk.free_at = disk.free_at.max(self.now) + Duration(ns);
                    self.ios
                        .push((disk.free_at, io.io, io.file, io.range.length));
                }
                Action::Clean { file } => self.settles.push(file),
                Action::Wake { at } => self.wake = at,
                _ => {}
            }
        }
    }

    fn answered(&mut self, session: SessionId, request: RequestId, outcome: Outcome) {
        let Some(&writer) = self.requests.get(&request.0) else {
            return;
        };
        if matches!(outcome, Outcome::Granted { .. }) {
            self.step(Event::WriteEnd { session, request });
            return;
        }
        self.requests.remove(&request.0);
        let writer = &mut self.writers[writer];
        writer.under_way -= 1;
        if matches!(outcome, Outcome::Done) {
            writer.written += MEGA;
        } else if matches!(outcome, Outcome::Plain) {
            writer.plain += 1;
        } else {
            writer.refused += 1;
        }
    }

    /// Each writer writes as fast as the server lets it.
    fn run(&mut self, seconds: u64) {
        let end = self.now + Duration::from_s(seconds);
        while self.now < end {
            for number in 0..self.writers.len() {
                if self.writers[number].under_way < UNDER_WAY {
                    self.ask(number);
                }
            }
            while let Some(file) = self.settles.pop() {
                self.step(Event::Settled { file, version: 1 });
            }
            let first = self.ios.iter().map(|(at, ..)| *at).min();
            let next = first.unwrap_or(Instant::NEVER).min(self.wake);
            // A client takes a moment for the next one.
            let soon = self.now + Duration::from_us(500);
            self.now = self.now.max(next.min(soon));
            if self.now >= self.wake {
                self.wake = Instant::NEVER;
                self.step(Event::Timer);
            }
            let Some(at) = self.ios.iter().position(|(at, ..)| *at <= self.now) else {
                continue;
            };
            let (_, io, file, length) = self.ios.swap_remove(at);
            let result = match self.writers[file.0 as usize - 1].is_refused {
                true => Err(Errno::IO),
                false => Ok(length),
            };
            self.step(Event::IoDone { io, result });
        }
    }

    fn ask(&mut self, number: usize) {
        self.next += 1;
        self.requests.insert(self.next, number);
        let writer = &mut self.writers[number];
        writer.under_way += 1;
        let range = ByteRange::new(writer.next % (FILE_BYTES / 2), MEGA);
        writer.next += MEGA;
        let (session, handle) = (writer.session, writer.handle);
        self.step(Event::WriteBegin {
            session,
            handle,
            request: RequestId(self.next),
            range,
            sent: self.now,
        });
    }

    fn mega_per_s(&self, writer: usize, seconds: u64) -> u64 {
        self.writers[writer].written / MEGA / seconds
    }
}

#[test]
fn a_copy_to_a_quick_disk_does_not_stand_behind_one_to_a_slow_disk() {
    let mut world = World::new(&[25_000_000, 200_000_000], &[&[0, 1]]);
    world.run(20);
    let quick = world.mega_per_s(1, 20);
    assert!(quick >= 120, "{quick} MiB/s of some 190");
    // And those of other sessions do not wait for the one whose lane is full of bytes for the slow
    // one.
    let mut world = World::new(&[25_000_000, 200_000_000], &[&[0, 1], &[1]]);
    world.run(20);
    let both = world.mega_per_s(1, 20) + world.mega_per_s(2, 20);
    assert!(both >= 120, "{both} MiB/s of some 190");
}

#[test]
fn a_file_that_its_disk_does_not_take_keeps_nobody_from_his() {
    let mut world = World::new(&[100_000_000], &[&[0], &[0]]);
    world.run(2);
    world.writers[0].is_refused = true;
    world.run(5);
    let before = world.writers[1].written;
    world.run(20);
    let other = (world.writers[1].written - before) / MEGA / 20;
    // And its writer gets an error each time, once its bytes should have been on the disk: no
    // client waits for a disk that fails.
    assert!(world.writers[0].refused > 1000);
    assert!(other >= 60, "{other} MiB/s of some 95");
}

/// The writer would wait for as long as that one is not written, which may be for ever.
#[test]
fn a_file_that_is_never_written_keeps_nobody_of_its_session_from_his() {
    // Its bytes fill the lane: its memory, or its records.
    for record_count in [4096, 64] {
        let disks = [2_000_000_000, 100_000_000];
        let mut world = World::with_records(&disks, &[&[0, 1]], record_count);
        world.writers[0].is_refused = true;
        world.run(10);
        let (before, plain) = (world.writers[1].written, world.writers[1].plain);
        world.run(10);
        let lane = (world.writers[1].written - before) / MEGA;
        assert!(world.writers[0].refused > 0);
        assert!(
            lane > 100 || world.writers[1].plain > plain + 100,
            "{record_count} records: {lane} MiB"
        );
    }
}

#[test]
fn those_of_one_disk_get_on_alike_whatever_their_sessions() {
    let sessions: &[&[usize]] = &[&[0; 12], &[0], &[0; 3]];
    let mut world = World::new(&[100_000_000], sessions);
    world.run(60);
    let written: Vec<u64> = world.writers.iter().map(|one| one.written / MEGA).collect();
    let (least, sum) = (written.iter().min(), written.iter().sum::<u64>());
    assert!(least.unwrap() * 16 * 10 >= sum * 8, "{written:?}");
    assert!(sum >= 60 * 70, "{written:?}");
}
