// SPDX-License-Identifier: Apache-2.0
//! Sequences of a pool: one stream over several devices and sessions.

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
            // (Bench has made the first.)
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

    /// The door answers what it was asked for, and devices end what they have, as long as time goes on.
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
            // Each device has ended one request of each turn.
            let mut ended: Vec<IoId> = Vec::new();
            let mut busy: Vec<DeviceId> = Vec::new();
            for io in &self.bench.flights {
                if !busy.contains(&io.device) {
                    busy.push(io.device);
                    ended.push(io.io);
                }
            }
            self.bench.now = self.bench.now + Duration::from_ms(20);
            for io in ended {
                let at = self.bench.flights.iter().position(|other| other.io == io);
                let flight = self.bench.flights.remove(at.expect("it is under way"));
                self.bench.step(Event::IoDone {
                    io,
                    result: Ok(flight.range.length),
                });
            }
            self.bench.step(Event::Timer);
        }
    }

    /// A player opens a frame where it lies, reads it whole, and closes it. None: not answered within a frame's time.
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
            .filter(|stream| stream.read_count > 0)
            .collect()
    }

    /// What each member's device has promised.
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
    assert_eq!(stream.late_count, 0);
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
    assert_eq!(streams[0].late_count, 0);
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
    assert_eq!(streams[0].read_count, 57);
    // What is behind the end is asked for again only when the reader moves on.
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
    assert_eq!(streams.iter().filter(|stream| stream.sequence).count(), 12);
}
