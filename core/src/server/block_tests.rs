// SPDX-License-Identifier: Apache-2.0
//! A disk that is full but for reserved blocks: which writer gives back, which one keeps, and that
//! no write waits for ever.

use super::*;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

const DISK: DeviceId = DeviceId(1);
const OTHER: DeviceId = DeviceId(2);
const MEGA: u64 = 1 << 20;

/// The file system's numbers for a file. Units: bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Native {
    size: u64,
    /// The bytes that are safe in the write buffer as clients were told, or more.
    acknowledged: u64,
    reserved: u64,
    is_open: bool,
}

/// A server whose files have one session each, on a disk of so many bytes.
struct World {
    server: Server,
    now: Instant,
    room: u64,
    files: Vec<Native>,
    next: u64,
    /// Requests to the disk that are not answered yet.
    writes: Vec<IoWrite>,
    is_failing: bool,
    settles: Vec<FileId>,
    reserves: Vec<(FileId, ByteRange, u64)>,
    /// How each request ended: true if granted, and committed at once.
    ended: BTreeMap<u64, Result<(), Errno>>,
    trims: u32,
    /// So many of the last files lie on the other disk.
    others: usize,
    write_outs: Vec<FileId>,
}

fn session(file: usize) -> SessionId {
    SessionId(file as u32 + 1)
}

fn id(file: usize) -> FileId {
    FileId(file as u32 + 1)
}

impl World {
    fn new(room: u64, files: usize) -> World {
        World::on_two_disks(room, files, 0)
    }

    fn on_two_disks(room: u64, files: usize, others: usize) -> World {
        let row = ServiceModel {
            fixed: Duration::from_ms(6),
            span: Duration::from_ms(17),
            rate: BytesPerSecond(150_000_000),
        };
        let mut world = World {
            server: Server::new(Limits::default(), Policy::default()),
            now: Instant(1),
            room,
            files: vec![Native::default(); files],
            next: 0,
            writes: Vec::new(),
            is_failing: false,
            settles: Vec::new(),
            reserves: Vec::new(),
            ended: BTreeMap::new(),
            trims: 0,
            others,
            write_outs: Vec::new(),
        };
        for device in [DISK, OTHER] {
            world.step(Event::DeviceAdded {
                device,
                model: DeviceModel {
                    read: row,
                    write: row,
                    size: ByteCount(40 << 30),
                },
            });
        }
        for file in 0..files {
            world.step(Event::SessionOpened {
                session: session(file),
                label: SessionLabel::default(),
            });
            world.step(Event::LaneAdded {
                lane: LaneId(file as u32 + 1),
                session: Some(session(file)),
                page_count: 1 << 14,
                record_count: 1024,
            });
            world.open(file);
        }
        world
    }

    fn device(&self, file: usize) -> DeviceId {
        match file + self.others >= self.files.len() {
            true => OTHER,
            false => DISK,
        }
    }

    fn open(&mut self, file: usize) {
        let device = self.device(file);
        let native = &mut self.files[file];
        native.is_open = true;
        let (size, extents) = (native.acknowledged, extents(file, native));
        self.step(Event::Opening {
            session: session(file),
            handle: HandleId(1),
            path: format!("take-{file}.mov"),
            part: FilePart::WHOLE,
        });
        self.step(Event::Opened {
            session: session(file),
            handle: HandleId(1),
            facts: Ok(FileFacts {
                file: id(file),
                key: FileKey {
                    device: u64::from(device.0),
                    inode: file as u64 + 1,
                },
                device,
                size: ByteCount(size),
                version: 1,
                extents,
                hint: None,
                is_header_unread: false,
                way: Some(WriteWay::Extents),
                is_exclusive: false,
                has_unwritten: true,
                is_fresh: false,
            }),
        });
    }

    fn close(&mut self, file: usize) {
        self.files[file].is_open = false;
        self.step(Event::Closed {
            session: session(file),
            handle: HandleId(1),
        });
    }

    fn step(&mut self, event: Event) {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        for action in actions.list {
            match action {
                Action::Reserve {
                    file,
                    needed,
                    wished_end,
                } => self.reserves.push((file, needed, wished_end)),
                Action::Reply {
                    session: from,
                    request,
                    outcome: Outcome::Granted { .. },
                } => {
                    self.ended.insert(request.0, Ok(()));
                    self.step(Event::WriteEnd {
                        session: from,
                        request,
                    });
                }
                Action::Reply {
                    request,
                    outcome: Outcome::Failed(errno),
                    ..
                } => {
                    self.ended.insert(request.0, Err(errno));
                }
                Action::Known { file, size } => {
                    let native = &mut self.files[file.0 as usize - 1];
                    native.acknowledged = native.acknowledged.max(size.0);
                }
                Action::SubmitWrite(io) => self.writes.push(io),
                Action::Clean { file } => self.settles.push(file),
                Action::WriteOut { file } => self.write_outs.push(file),
                Action::Trim { file, size } => {
                    let native = &mut self.files[file.0 as usize - 1];
                    assert_eq!(size.0, native.acknowledged, "cut to another length");
                    assert_eq!(size.0, native.size, "cut before its bytes were written");
                    let kept = native
                        .size
                        .next_multiple_of(PAGE_BYTES)
                        .min(native.reserved);
                    self.room += native.reserved - kept;
                    native.reserved = kept;
                    self.trims += 1;
                    self.settles.push(file);
                }
                _ => {}
            }
        }
    }

    /// A client writes behind the end of its file. Returns the request.
    fn write(&mut self, file: usize, bytes: u64) -> u64 {
        self.next += 1;
        let start = self.files[file].acknowledged;
        self.step(Event::WriteBegin {
            session: session(file),
            handle: HandleId(1),
            request: RequestId(self.next),
            range: ByteRange::new(start, bytes),
            sent: self.now,
        });
        self.next
    }

    /// The driver has looked for blocks once: it reserves as far as wished if there is so much,
    /// else as much as needed, else none.
    fn reserve(&mut self) {
        if self.reserves.is_empty() {
            return;
        }
        let (file, needed, wished_end) = self.reserves.remove(0);
        let index = file.0 as usize - 1;
        let native = &mut self.files[index];
        let more = |end: u64| {
            end.next_multiple_of(PAGE_BYTES)
                .saturating_sub(native.reserved)
        };
        let fitting = [wished_end, needed.end()]
            .into_iter()
            .map(more)
            .find(|&bytes| bytes <= self.room);
        let result = match fitting {
            Some(bytes) => {
                self.room -= bytes;
                native.reserved += bytes;
                Ok(extents(index, native))
            }
            None => Err(Errno::NO_SPACE),
        };
        self.step(Event::Reserved { file, result });
    }

    fn write_back(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let io = self.writes.remove(0);
        let result = if self.is_failing {
            Err(Errno::IO)
        } else {
            let native = &mut self.files[io.file.0 as usize - 1];
            assert!(
                io.range.start.0 < native.reserved,
                "written where nothing is reserved"
            );
            native.size = native.size.max(io.range.end()).min(native.acknowledged);
            Ok(io.range.length)
        };
        self.step(Event::IoDone { io: io.io, result });
    }

    fn settle(&mut self) {
        if let Some(file) = self.settles.pop() {
            self.step(Event::Settled { file, version: 2 });
        }
    }

    /// All that the disk and the driver still have to do, and time.
    fn rest(&mut self) {
        for _ in 0..200 {
            self.reserve();
            self.write_back();
            self.settle();
            self.now = self.now + Duration::from_ms(50);
            self.step(Event::Timer);
        }
    }

    /// A recording of so many bytes that is not closed.
    fn record(&mut self, file: usize, bytes: u64) {
        let request = self.write(file, bytes);
        self.reserve();
        assert_eq!(self.ended.get(&request), Some(&Ok(())));
    }
}

fn extents(file: usize, native: &Native) -> Vec<Extent> {
    if native.reserved == 0 {
        return Vec::new();
    }
    vec![Extent {
        logical: ByteOffset(0),
        physical: ByteOffset((file as u64 + 1) << 33),
        length: ByteCount(native.reserved),
    }]
}

#[test]
fn what_is_reserved_for_who_does_not_write_is_given_to_who_does() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA);
    world.rest();
    assert_eq!(world.room, 0, "all of it is reserved for the first");
    let request = world.write(1, 4 * MEGA);
    world.rest();
    assert_eq!(world.ended.get(&request), Some(&Ok(())));
    assert_eq!(world.trims, 1);
    // And the writer that gave goes on as long as there is room.
    let request = world.write(0, MEGA);
    world.rest();
    assert_eq!(world.ended.get(&request), Some(&Ok(())));
}

#[test]
fn bytes_that_are_not_written_keep_their_blocks_and_are_written_at_once() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA);
    let request = world.write(1, 4 * MEGA);
    world.reserve();
    assert_eq!(world.trims, 0, "they are in the write buffer alone");
    assert!(!world.ended.contains_key(&request));
    assert!(!world.writes.is_empty(), "and they are wanted now");
    while !world.writes.is_empty() {
        world.write_back();
    }
    assert_eq!(world.trims, 1);
    world.rest();
    assert_eq!(world.ended.get(&request), Some(&Ok(())));
}

#[test]
fn a_full_disk_is_told_at_once_where_nobody_has_anything_to_give() {
    let mut world = World::new(5 * MEGA, 2);
    world.record(0, 5 * MEGA);
    let request = world.write(1, MEGA);
    while !world.reserves.is_empty() {
        world.reserve();
    }
    assert_eq!(world.ended.get(&request), Some(&Err(Errno::NO_SPACE)));
}

#[test]
fn who_waits_for_blocks_himself_gives_none() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA);
    world.rest();
    for _ in 0..14 {
        world.record(0, 4 * MEGA);
        world.rest();
    }
    // This writer is about to go past its reserved blocks: there are none for that.
    let first = world.write(0, 8 * MEGA);
    let second = world.write(1, 3 * MEGA);
    assert_eq!(world.reserves.len(), 2);
    world.reserves.swap(0, 1);
    world.reserve();
    assert_eq!(world.ended.get(&second), Some(&Err(Errno::NO_SPACE)));
    assert_eq!(world.trims, 0);
    world.rest();
    assert_eq!(world.ended.get(&first), Some(&Err(Errno::NO_SPACE)));
}

#[test]
fn nobody_waits_for_a_file_that_cannot_be_written() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA);
    world.is_failing = true;
    let request = world.write(1, 4 * MEGA);
    world.reserve();
    assert!(!world.writes.is_empty());
    while !world.writes.is_empty() {
        world.write_back();
    }
    world.reserve();
    assert_eq!(world.ended.get(&request), Some(&Err(Errno::NO_SPACE)));
    assert_eq!(world.trims, 0);
}

#[test]
fn a_file_that_is_closed_meanwhile_gives_back_as_ever() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA);
    let request = world.write(1, 4 * MEGA);
    world.reserve();
    world.close(0);
    world.rest();
    assert_eq!(world.ended.get(&request), Some(&Ok(())));
    assert_eq!(world.files[0].reserved, 4 * MEGA);
}

/// The writer's page is there already, and the cut is not: bytes that came into it in between would
/// be cut off, too.
#[test]
fn who_goes_on_in_his_last_page_comes_behind_the_cut() {
    let mut world = World::new(64 * MEGA, 2);
    world.record(0, 4 * MEGA + 100);
    world.rest();
    let waits = world.write(1, 4 * MEGA);
    world.reserve();
    assert_eq!(world.trims, 1);
    let goes_on = world.write(0, 500);
    assert!(!world.ended.contains_key(&goes_on), "before it was cut");
    // A writer that waits for the blocks that are being cut off is not refused because the other
    // needs blocks again.
    assert!(!world.ended.contains_key(&waits));
    assert!(world.reserves.iter().all(|asked| asked.0 == id(0)));
    world.rest();
    assert_eq!(world.ended.get(&goes_on), Some(&Ok(())));
    assert_eq!(world.ended.get(&waits), Some(&Ok(())));
}

/// Writers that come and go on disks that are too small: the driver's asserts hold at each step,
/// and each write ends.
#[test]
fn every_write_ends_whoever_comes_and_goes() {
    for seed in 1..400u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut below = |limit: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % limit
        };
        let mut world = World::new((16 + below(200)) * MEGA, 3);
        let mut asked = Vec::new();
        for _ in 0..120 {
            let file = below(3) as usize;
            match below(9) {
                0..=2 if world.files[file].is_open => {
                    // One at a time: the model's end is the acknowledged one.
                    let all = asked
                        .iter()
                        .all(|request| world.ended.contains_key(request));
                    if all {
                        let bytes = (1 + below(12)) * MEGA / 2 + below(3);
                        asked.push(world.write(file, bytes));
                    }
                }
                3 | 4 => world.reserve(),
                5 | 6 => world.write_back(),
                7 => world.settle(),
                8 if below(4) == 0 => {
                    if world.files[file].is_open {
                        world.close(file);
                    } else {
                        world.open(file);
                    }
                }
                _ => {
                    world.now = world.now + Duration::from_ms(below(300));
                    world.step(Event::Timer);
                }
            }
        }
        world.rest();
        world.rest();
        for request in asked {
            assert!(
                world.ended.contains_key(&request),
                "seed {seed}: {request} waits"
            );
        }
    }
}

/// A player behind a recorder begins a few seconds back, and needs no read from the disk that has
/// just got those bytes. A copy takes no room from others.
#[test]
fn what_is_recorded_stays_for_whoever_plays_behind() {
    for is_recorder in [true, false] {
        let mut world = World::new(256 * MEGA, 1);
        for _ in 0..100 {
            world.record(0, 500_000);
            if is_recorder {
                world.now = world.now + Duration::from_ms(40);
                world.step(Event::Timer);
                world.write_back();
            }
        }
        world.rest();
        assert_eq!(world.files[0].size, world.files[0].acknowledged);
        let number = 40_000_000 / world.server.slot_bytes();
        let is_there = world.server.files[&id(0)].blocks.contains_key(&number);
        assert_eq!(is_there, is_recorder);
    }
}

/// Pieces of less than a page go through the kernel's cache, and no client asks for a sync.
#[test]
fn a_disk_that_gives_no_answer_keeps_nobody_from_asking_another_what_it_has() {
    let mut world = World::on_two_disks(64 * MEGA, 4, 1);
    for file in 0..4 {
        world.record(file, 1000);
        world.rest();
    }
    for _ in 0..5 {
        world.rest();
    }
    assert_eq!(world.write_outs, [id(0), id(1), id(3)]);
    world.step(Event::Synced {
        file: id(0),
        result: Ok(()),
    });
    assert_eq!(world.write_outs[3..], [id(2)]);
}
