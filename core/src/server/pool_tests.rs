// SPDX-License-Identifier: Apache-2.0
//! Files of a pool: sequences are one stream over several devices and sessions, striped files one
//! stream for each part.

use super::tests::{Bench, disk, facts};
use super::*;
use alloc::format;

const POOL: PoolNumber = PoolNumber(7);
const SIZE: u64 = 3_000_000;

/// Members of a pool, each a device, and a session of the pool's door for each.
struct Pool {
    bench: Bench,
    members: u32,
    /// Where frame `n` lies; None: there is none.
    place: fn(u32) -> Option<u16>,
    request: u64,
}

fn number_of(path: &str) -> u32 {
    let digits = path.rsplit('.').nth(1);
    digits
        .and_then(|digits| digits.parse().ok())
        .expect("a frame's path")
}

impl Pool {
    fn new(members: u32, place: fn(u32) -> Option<u16>) -> Pool {
        let mut bench = Bench::new(512);
        for member in 1..=members {
            // Bench has made the first.
            if member > 1 {
                bench.step(Event::DeviceAdded {
                    device: DeviceId(member as u16),
                    model: disk(),
                });
            }
            bench.session(member);
            bench.step(Event::SessionOfPool {
                session: SessionId(member),
                pool: POOL,
            });
        }
        Pool {
            bench,
            members,
            place,
            request: 0,
        }
    }

    fn frame(&self, folder: u32, number: u32) -> Option<FileFacts> {
        let device = DeviceId((self.place)(number)?);
        let hint = RateHint::FramesPerKilosecond(24_000, RateSource::Rule);
        Some(FileFacts {
            device,
            hint: Some(hint),
            ..facts(1000 * folder + number, SIZE)
        })
    }

    /// The door answers all questions, and devices end their requests, as long as time goes on.
    fn settle(&mut self, span: Duration) {
        let until = self.bench.now + span;
        while self.bench.now < until {
            for (pool, path) in core::mem::take(&mut self.bench.asked) {
                assert_eq!(pool, POOL);
                let folder = path
                    .split('/')
                    .next()
                    .and_then(|name| name[4..].parse().ok());
                let facts = self
                    .frame(folder.expect("a folder"), number_of(&path))
                    .ok_or(Errno(2));
                self.bench.step(Event::PoolFileOpened { pool, path, facts });
            }
            // Each device has ended one request of each turn, and those that go on from it, a chunk
            // at most.
            let mut busy: Vec<DeviceId> = Vec::new();
            for io in &self.bench.flights {
                if !busy.contains(&io.device) {
                    busy.push(io.device);
                }
            }
            self.bench.now = self.bench.now + Duration::from_ms(20);
            for device in busy {
                self.end_requests(device);
            }
            self.bench.step(Event::Timer);
        }
    }

    fn end_requests(&mut self, device: DeviceId) {
        let mut left = self.bench.server.limits.chunk_bytes_max;
        let mut head = None;
        while left > 0 {
            let mut flights = self.bench.flights.iter();
            let next = flights.position(|io| {
                let at = (io.file, io.range.start.0);
                io.device == device && head.is_none_or(|head| head == at)
            });
            let Some(next) = next else {
                return;
            };
            let io = self.bench.flights.remove(next);
            head = Some((io.file, io.range.end()));
            left = left.saturating_sub(io.range.length.0);
            self.bench.step(Event::IoDone {
                io: io.io,
                result: Ok(io.range.length),
            });
        }
    }

    /// A player opens a frame where it lies, reads it whole, and closes it. None: not answered
    /// within a frame's time.
    fn play(&mut self, folder: u32, number: u32) -> Option<u64> {
        let facts = self.frame(folder, number).expect("a frame");
        let session = u32::from(facts.device.0);
        let handle = 1000 * folder + number;
        self.bench.open(
            session,
            handle,
            &format!("shot{folder}/a.{number:04}.dpx"),
            facts,
        );
        self.request += 1;
        let request = self.request;
        self.bench.read(session, handle, request, 0, SIZE);
        let at_once = self.bench.length(request);
        self.settle(Duration::from_ms(40));
        if self.bench.outcome(request).is_some() {
            self.bench.end(session, request);
        }
        self.bench.step(Event::Closed {
            session: SessionId(session),
            handle: HandleId(handle),
        });
        at_once
    }

    fn streams(&self) -> Vec<StreamRecord> {
        let streams = self.bench.server.streams(self.bench.now);
        streams
            .into_iter()
            .filter(|stream| stream.reads.read_count > 0)
            .collect()
    }

    /// The bandwidth that each member's device has promised.
    fn promised(&self) -> Vec<u64> {
        let devices = self.bench.server.devices();
        devices.iter().map(|device| device.promised.0).collect()
    }
}

#[test]
fn frames_that_lie_on_several_members_are_one_stream_with_one_contract() {
    let mut pool = Pool::new(4, |number| Some(1 + (number % 4) as u16));
    let mut hits = 0;
    for number in 1..=60 {
        hits += u32::from(pool.play(1, number) == Some(SIZE));
    }
    let streams = pool.streams();
    assert_eq!(streams.len(), 1, "{streams:?}");
    let stream = &streams[0];
    assert_eq!(stream.path, "shot1/a.0001.dpx");
    assert!(stream.sequence);
    assert_eq!(stream.standing, Standing::Contract);
    assert_eq!(stream.reads.late_count, 0);
    assert!(
        hits >= 58,
        "{hits} of 60 frames were there when they were opened"
    );
    // Each device is charged its part, and all of them the whole.
    let rate = SIZE * 24;
    for part in pool.promised() {
        assert!(part.abs_diff(rate / 4) <= rate / 50, "{part} of {rate}");
    }
    let held = pool.bench.server.cache().held_count;
    pool.bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    for session in 2..=pool.members {
        assert!(held > 0);
        pool.bench.step(Event::SessionClosed {
            session: SessionId(session),
        });
    }
    assert_eq!(pool.bench.server.cache().held_count, 0);
    assert_eq!(pool.promised(), [0; 4]);
    assert!(pool.bench.server.folders.is_empty());
}

#[test]
fn sequence_on_one_member_is_charged_to_that_one_alone() {
    let mut pool = Pool::new(2, |_| Some(2));
    for number in 1..=20 {
        pool.play(1, number);
    }
    assert_eq!(pool.promised(), [0, SIZE * 24]);
    assert_eq!(pool.bench.server.devices()[0].request_count, [0, 0]);
}

#[test]
fn sequence_that_goes_on_elsewhere_takes_its_promise_with_it() {
    // A member was full after frame 40.
    let mut pool = Pool::new(2, |number| Some(if number <= 40 { 1 } else { 2 }));
    for number in 1..=40 {
        pool.play(1, number);
    }
    let mut late = 0;
    for number in 41..=120 {
        late += u32::from(pool.play(1, number).is_none());
    }
    assert_eq!(late, 0, "frames that were not there");
    let streams = pool.streams();
    assert_eq!(streams.len(), 1, "{streams:?}");
    assert_eq!(streams[0].reads.late_count, 0);
    assert_eq!(pool.promised(), [0, SIZE * 24]);
}

#[test]
fn faster_than_one_member_is_promised_over_all() {
    // 72 MB/s a stream; one disk of 172 MB/s carries two, four of them ten.
    let play = |members: u32, place: fn(u32) -> Option<u16>| {
        let mut pool = Pool::new(members, place);
        for number in 1..=150 {
            for folder in 1..=6 {
                let facts = pool.frame(folder, number).expect("a frame");
                let session = u32::from(facts.device.0);
                let handle = 1000 * folder + number;
                let path = format!("shot{folder}/a.{number:04}.dpx");
                pool.bench.open(session, handle, &path, facts);
                pool.request += 1;
                pool.bench.read(session, handle, pool.request, 0, SIZE);
            }
            pool.settle(Duration::from_ms(40));
            for folder in 1..=6 {
                let request = pool.request + u64::from(folder) - 6;
                let handle = 1000 * folder + number;
                let session = u32::from(pool.frame(folder, number).expect("a frame").device.0);
                if pool.bench.outcome(request).is_some() {
                    pool.bench.end(session, request);
                }
                pool.bench.step(Event::Closed {
                    session: SessionId(session),
                    handle: HandleId(handle),
                });
            }
        }
        let streams = pool.streams();
        let promised = |stream: &&StreamRecord| stream.standing == Standing::Contract;
        streams.iter().filter(promised).count()
    };
    let alone = play(1, |_| Some(1));
    assert!((1..=2).contains(&alone), "{alone}");
    let spread = play(4, |number| Some(1 + (number % 4) as u16));
    assert_eq!(spread, 6);
}

#[test]
fn gap_and_end_are_passed_over() {
    let mut pool = Pool::new(3, |number| match number {
        30..=32 => None,
        61.. => None,
        _ => Some(1 + (number % 3) as u16),
    });
    for number in (1..=29).chain(33..=60) {
        pool.play(1, number);
    }
    let streams = pool.streams();
    assert_eq!(streams.len(), 1, "{streams:?}");
    assert_eq!(streams[0].standing, Standing::Contract);
    assert_eq!(streams[0].reads.read_count, 57);
    // The frames behind the end are asked for again only when the reader moves on.
    pool.settle(Duration::from_ms(500));
    assert!(pool.bench.asked.is_empty());
}

#[test]
fn session_of_a_member_that_ends_takes_no_other_members_with_it() {
    let mut pool = Pool::new(2, |number| Some(1 + (number % 2) as u16));
    for number in 1..=21 {
        pool.play(1, number);
    }
    // Frame 21 was on the second.
    pool.bench.step(Event::SessionClosed {
        session: SessionId(1),
    });
    let streams = pool.streams();
    assert_eq!(streams[0].standing, Standing::Contract);
    assert!(streams[0].open);
    pool.bench.step(Event::SessionClosed {
        session: SessionId(2),
    });
    assert!(!pool.streams()[0].open);
    assert_eq!(pool.bench.held_count(), 0);
}

#[test]
fn silence_ends_it_on_all_devices() {
    let mut pool = Pool::new(3, |number| Some(1 + (number % 3) as u16));
    for number in 1..=20 {
        pool.play(1, number);
    }
    pool.settle(Duration::from_s(12));
    assert_eq!(pool.promised(), [0; 3]);
    assert_eq!(pool.bench.server.cache().held_count, 0);
}

#[test]
fn a_dozen_sequences_in_one_folder_are_followed() {
    let mut pool = Pool::new(4, |number| Some(1 + (number % 4) as u16));
    for number in 1..=12 {
        for shot in 0..12 {
            let facts = FileFacts {
                file: FileId(1000 * shot + number),
                key: FileKey {
                    device: 1,
                    inode: u64::from(1000 * shot + number),
                },
                ..pool.frame(1, number).expect("a frame")
            };
            let session = u32::from(facts.device.0);
            let handle = 1000 * shot + number;
            let path = format!("day1/shot{shot}.{number:04}.dpx");
            pool.bench.open(session, handle, &path, facts);
            pool.request += 1;
            pool.bench.read(session, handle, pool.request, 0, 4096);
        }
        pool.bench.asked.clear();
        pool.settle(Duration::from_ms(20));
    }
    let streams = pool.bench.server.streams(pool.bench.now);
    let open = streams
        .iter()
        .filter(|stream| stream.sequence && stream.open);
    assert_eq!(open.count(), 12);
}

const MIB: u64 = 1 << 20;
/// Of a file of 100 Mb/s.
const RATE: u64 = 12_500_000;

/// Part `index` of `count` of a striped file, which lies on the member after its index, as the
/// file's rule says.
fn part_of(file: u32, index: u32) -> FileFacts {
    FileFacts {
        device: DeviceId(index as u16 + 1),
        hint: Some(RateHint::Rate(BytesPerSecond(RATE), RateSource::Rule)),
        ..facts(file * 100 + index, 400 * MIB)
    }
}

impl Pool {
    /// The door names an object in the session of its member.
    fn open_part(&mut self, path: &str, file: u32, part: FilePart, facts: FileFacts) {
        let session = SessionId(u32::from(facts.device.0));
        let handle = HandleId(file * 100 + part.index());
        self.bench.step(Event::Opening {
            session,
            handle,
            path: path.into(),
            part,
        });
        self.bench.step(Event::Opened {
            session,
            handle,
            facts: Ok(facts),
        });
    }

    fn read_part(&mut self, file: u32, index: u32, start: u64, length: u64) -> u64 {
        self.request += 1;
        let handle = file * 100 + index;
        let (session, request) = (index + 1, self.request);
        self.bench.read(session, handle, request, start, length);
        request
    }

    /// A whole file is opened on its four members, and its first units are read.
    fn begin_striped(&mut self, path: &str, file: u32, count: u32) {
        for index in 0..count {
            let part = FilePart::new(index, count).expect("a part");
            self.open_part(path, file, part, part_of(file, index));
            self.read_part(file, index, 0, 65_536);
        }
    }

    fn close_part(&mut self, file: u32, index: u32) {
        self.bench.step(Event::Closed {
            session: SessionId(index + 1),
            handle: HandleId(file * 100 + index),
        });
    }

    fn standings(&self, path: &str) -> Vec<(u32, Standing)> {
        let streams = self.bench.server.streams(self.bench.now);
        let open = streams.iter().filter(|one| one.open && one.path == path);
        let mut all: Vec<_> = open.map(|one| (one.part.index(), one.standing)).collect();
        all.sort_by_key(|(index, _)| *index);
        all
    }
}

fn all_of(standing: Standing) -> Vec<(u32, Standing)> {
    (0..4).map(|index| (index, standing)).collect()
}

#[test]
fn each_part_of_a_striped_file_has_its_share_of_the_rate_from_its_first_read() {
    let mut pool = Pool::new(4, |_| None);
    pool.begin_striped("reels/a.mov", 1, 4);
    assert_eq!(pool.standings("reels/a.mov"), all_of(Standing::Contract));
    for stream in pool.bench.server.streams(pool.bench.now) {
        assert_eq!(
            stream.rate,
            Some((BytesPerSecond(RATE / 4), RateSource::Rule))
        );
        assert_eq!(
            alloc::format!("{}", stream.part).split('/').nth(1),
            Some("4")
        );
    }
    assert_eq!(pool.promised(), [RATE / 4; 4]);
    pool.settle(Duration::from_s(1));
    for stream in pool.streams() {
        assert_eq!((stream.reads.due_count, stream.reads.late_count), (1, 0));
    }
    for session in 1..=4 {
        pool.bench.step(Event::SessionClosed {
            session: SessionId(session),
        });
    }
    assert_eq!(pool.promised(), [0; 4]);
    assert_eq!(pool.bench.server.cache().held_count, 0);
}

#[test]
fn unread_bytes_of_a_door_are_of_none_of_its_seats() {
    let mut pool = Pool::new(1, |_| None);
    for (file, path) in [(1, "a.mov"), (2, "b.mov")] {
        pool.open_part(path, file, FilePart::WHOLE, part_of(file, 0));
        pool.read_part(file, 0, 0, 65_536);
    }
    pool.settle(Duration::from_s(1));
    pool.close_part(1, 0);
    let device = &pool.bench.server.devices()[0];
    assert!(device.unread.0 > 0, "nothing was fetched ahead");
    let seats = pool.bench.server.seats(pool.bench.now);
    let unread: Vec<u64> = seats.iter().map(|seat| seat.unread.0).collect();
    assert_eq!(unread, [0]);
}

#[test]
fn shares_of_a_rate_that_does_not_divide_are_enough_for_all_of_it() {
    let part = FilePart::new(2, 3).expect("a part");
    assert_eq!(part.of(BytesPerSecond(10)), BytesPerSecond(4));
    assert_eq!(part.of(BytesPerSecond(0)), BytesPerSecond(0));
    assert_eq!(FilePart::WHOLE.of(BytesPerSecond(10)), BytesPerSecond(10));
    assert_eq!(
        FilePart::new(FilePart::COUNT_MAX, FilePart::COUNT_MAX),
        None
    );
    assert_eq!(FilePart::new(0, FilePart::COUNT_MAX + 1), None);
    assert_eq!(FilePart::new(0, 0), None);
}

#[test]
fn rate_from_a_header_that_is_read_later_is_divided_too() {
    let mut pool = Pool::new(2, |_| None);
    for index in 0..2 {
        let facts = FileFacts {
            hint: None,
            ..part_of(1, index)
        };
        pool.open_part("a.mov", 1, FilePart::new(index, 2).expect("a part"), facts);
        pool.bench.step(Event::Hint {
            file: FileId(100 + index),
            hint: Some(RateHint::Rate(BytesPerSecond(RATE), RateSource::Header)),
        });
        pool.read_part(1, index, 0, 65_536);
    }
    assert_eq!(pool.promised(), [RATE / 2; 2]);
}

#[test]
fn part_is_never_a_frame() {
    let mut pool = Pool::new(4, |_| None);
    for number in 1..=20 {
        for index in 0..4 {
            let facts = FileFacts {
                hint: Some(RateHint::FramesPerKilosecond(24_000, RateSource::Rule)),
                ..part_of(number, index)
            };
            let path = format!("shot/a.{number:04}.dpx");
            let part = FilePart::new(index, 4).expect("a part");
            pool.open_part(&path, number, part, facts);
            pool.read_part(number, index, 0, 65_536);
        }
        pool.settle(Duration::from_ms(40));
        (0..4).for_each(|index| pool.close_part(number, index));
    }
    let streams = pool.streams();
    assert_eq!(streams.len(), 80);
    assert!(streams.iter().all(|stream| !stream.sequence));
    assert!(pool.bench.server.folders.is_empty());
    assert!(pool.bench.asked.is_empty());
    assert_eq!(pool.promised(), [0; 4]);
}

#[test]
fn a_striped_file_is_promised_on_all_its_members_or_on_none() {
    let mut pool = Pool::new(4, |_| None);
    // The third member has no room for more: single files are played from it.
    let mut singles = 0;
    while pool.bench.server.devices()[2].promised.0 == u64::from(singles) * RATE / 4 {
        singles += 1;
        let facts = FileFacts {
            file: FileId(9_000 + singles),
            key: FileKey {
                device: 1,
                inode: u64::from(9_000 + singles),
            },
            hint: Some(RateHint::Rate(BytesPerSecond(RATE / 4), RateSource::Rule)),
            ..part_of(1, 2)
        };
        let path = format!("single{singles}.mov");
        pool.open_part(&path, 50 + singles, FilePart::WHOLE, facts);
        pool.bench.read(
            3,
            (50 + singles) * 100,
            u64::from(9_000 + singles),
            0,
            65_536,
        );
    }
    let before = pool.promised();
    pool.begin_striped("reels/a.mov", 1, 4);
    assert_eq!(pool.standings("reels/a.mov"), all_of(Standing::Refused));
    assert_eq!(pool.promised(), before, "what two had is given back");
    for stream in pool.bench.server.streams(pool.bench.now) {
        let is_full = matches!(stream.refusal, Some(Refusal::Buffers { .. }));
        assert!(!is_full, "it is the member that has no room: {stream:?}");
    }
    // They ask again, each on its member; all get the same outcome.
    for _ in 0..30 {
        pool.settle(Duration::from_ms(20));
        let now = pool.standings("reels/a.mov");
        assert!(
            now == all_of(Standing::Refused) || now == all_of(Standing::Contract),
            "{now:?}"
        );
    }
    // The others end.
    for single in 1..=singles {
        pool.bench.step(Event::Closed {
            session: SessionId(3),
            handle: HandleId((50 + single) * 100),
        });
    }
    pool.settle(Duration::from_s(3));
    assert_eq!(pool.standings("reels/a.mov"), all_of(Standing::Contract));
    assert_eq!(pool.promised(), [RATE / 4; 4]);
}

#[test]
fn whatever_parts_do_nothing_stays_promised_when_they_are_gone() {
    let mut seed = 0x5eed_u64;
    let mut draw = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for _ in 0..10 {
        let mut pool = Pool::new(3, |_| None);
        let mut places = [[0u64; 3]; 4];
        for _ in 0..600 {
            let (file, index) = (draw(4) as u32, draw(3) as u32);
            match draw(12) {
                0 | 1 => {
                    // A door that lies may name any part.
                    let count = 2 + draw(3) as u32;
                    let part = FilePart::new(index.min(count - 1), count).expect("a part");
                    let rate = BytesPerSecond(RATE * (1 + draw(40)));
                    let facts = FileFacts {
                        hint: Some(RateHint::Rate(rate, RateSource::Rule)),
                        ..part_of(file, index)
                    };
                    let session = SessionId(index + 1);
                    let handle = HandleId(file * 100 + index);
                    let path = format!("reels/{}.mov", draw(2));
                    pool.bench.step(Event::Opening {
                        session,
                        handle,
                        path,
                        part,
                    });
                    pool.bench.step(Event::Opened {
                        session,
                        handle,
                        facts: Ok(facts),
                    });
                    places[file as usize][index as usize] = 0;
                }
                2 => pool.close_part(file, index),
                3 => pool.settle(Duration::from_ms(20 * draw(40))),
                4 => {
                    pool.read_part(file, index, draw(300) * MIB, 65_536);
                }
                5 if draw(20) == 0 => {
                    let session = SessionId(index + 1);
                    pool.bench.step(Event::SessionClosed { session });
                    pool.bench.session(index + 1);
                    pool.bench.step(Event::SessionOfPool {
                        session,
                        pool: POOL,
                    });
                }
                _ => {
                    let place = &mut places[file as usize][index as usize];
                    *place += 65_536;
                    let start = *place;
                    let request = pool.read_part(file, index, start, 65_536);
                    pool.bench.end(index + 1, request);
                }
            }
        }
        for session in 1..=3 {
            pool.bench.step(Event::SessionClosed {
                session: SessionId(session),
            });
        }
        assert_eq!(pool.promised(), [0; 3]);
        assert_eq!(pool.bench.server.promised.rate, 0);
        assert_eq!(pool.bench.server.cache().held_count, 0);
        let devices = pool.bench.server.devices();
        assert!(devices.iter().all(|device| device.contract_count == 0));
    }
}
