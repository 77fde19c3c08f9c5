// SPDX-License-Identifier: Apache-2.0
//! How long the slow disk takes: its mechanics, its queue and its read-ahead, on any clock.
//!
//! Nothing here sleeps, reads a clock or knows FUSE: instants come in as arguments, so that the
//! same code runs on a virtual clock in the tests and on the monotonic clock in [`super::server`].
//!
//! The trick is that the head has a place *and an instant*, [`Mechanics::head_at`]. A queued
//! request starts at the instant at which the last one ended, not when the sleeping thread woke:
//! oversleep does not add up. A contiguous read that comes later starts there as well, since the
//! drive went on reading into its own memory: the idle gap is its credit, bounded by the size of
//! that memory.

use rushes_core::units::{ByteCount, BytesPerSecond, Duration, Instant};
use serde::{Deserialize, Serialize};

/// The direction of a request: reads and writes take different times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// The cost of one direction: `k · positioning + size / rate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectionTiming {
    /// Mean positioning of a random request. Units: ms.
    pub positioning_ms: f64,
    /// Transfer. Units: bytes/s.
    pub bytes_per_second: u64,
    /// How `k` depends on the distance.
    pub seek: Seek,
}

/// `k = min(most, shortest + span · dᵖ)`, where *d* is the distance as a part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seek {
    /// *k* at the shortest distance that is not contiguous.
    pub shortest: f64,
    /// The addition to *k* for the distance of the whole disk.
    pub span: f64,
    /// *p*.
    pub power: f64,
    /// *k* at any distance is at most this.
    pub most: f64,
}

impl Seek {
    /// The square-root law of an arm that accelerates for half of the distance.
    const ARM: Seek = Seek {
        shortest: 0.4,
        span: 1.13,
        power: 0.5,
        most: 1.53,
    };
    /// No arm.
    const NONE: Seek = Seek {
        shortest: 1.0,
        span: 0.0,
        power: 1.0,
        most: 1.0,
    };
}

/// The parameters of a slow disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskTiming {
    /// Reads.
    pub read: DirectionTiming,
    /// Writes.
    pub write: DirectionTiming,
    /// The drive's memory for read-ahead, which it fills while it is idle. Units: bytes.
    pub read_ahead_bytes: u64,
    /// The drive's volatile write cache; 0: none. Units: bytes.
    pub write_cache_bytes: u64,
    /// A request that has waited so long goes first. Units: ms.
    pub patience_ms: u64,
}

impl DiskTiming {
    /// The disk array of rt-Samba's Table 5, as fitted in this project's notes.
    pub const TABLE5: DiskTiming = DiskTiming {
        read: DirectionTiming {
            positioning_ms: 15.2,
            bytes_per_second: 172_000_000,
            seek: Seek::ARM,
        },
        write: DirectionTiming {
            positioning_ms: 8.0,
            bytes_per_second: 145_000_000,
            seek: Seek::ARM,
        },
        read_ahead_bytes: 8_000_000,
        write_cache_bytes: 0,
        patience_ms: 100,
    };

    /// The same array with the write cache that its row of writes shows: of the many writes that
    /// wait in it, destaged in order of position, the next is near, and a short distance takes
    /// little time.
    pub const TABLE5_WRITE_BACK: DiskTiming = DiskTiming {
        write: DirectionTiming {
            positioning_ms: 14.0,
            bytes_per_second: 145_000_000,
            seek: Seek {
                shortest: 0.0,
                span: 193.0,
                power: 0.8,
                most: 1.0,
            },
        },
        write_cache_bytes: 256_000_000,
        ..DiskTiming::TABLE5
    };

    /// A drive without moving parts behind a serial link: positioning takes the same short time
    /// everywhere.
    pub const SSD: DiskTiming = DiskTiming {
        read: DirectionTiming {
            positioning_ms: 0.1,
            bytes_per_second: 520_000_000,
            seek: Seek::NONE,
        },
        write: DirectionTiming {
            positioning_ms: 0.05,
            bytes_per_second: 450_000_000,
            seek: Seek::NONE,
        },
        ..DiskTiming::TABLE5
    };

    /// The same disk with every transfer rate times `factor`; positioning stays.
    pub fn with_rates_times(mut self, factor: f64) -> DiskTiming {
        for direction in [&mut self.read, &mut self.write] {
            direction.bytes_per_second = (direction.bytes_per_second as f64 * factor) as u64;
        }
        self
    }

    /// The same disk with every positioning times `factor`; rates stay.
    pub fn with_positioning_times(mut self, factor: f64) -> DiskTiming {
        for direction in [&mut self.read, &mut self.write] {
            direction.positioning_ms *= factor;
        }
        self
    }

    /// Checks all parameters.
    ///
    /// Errors   a sentence with the wrong parameter and the value expected
    pub fn check(&self) -> Result<(), String> {
        for (name, direction) in [("read", self.read), ("write", self.write)] {
            if direction.bytes_per_second == 0 {
                return Err(format!(
                    "{name}.bytes_per_second is 0, so no request would ever end: give at least 1"
                ));
            }
            if !direction.positioning_ms.is_finite() || direction.positioning_ms < 0.0 {
                return Err(format!(
                    "{name}.positioning_ms is {}: expected a time of 0 ms or more",
                    direction.positioning_ms
                ));
            }
            let seek = direction.seek;
            let parts = [seek.shortest, seek.span, seek.power, seek.most];
            if !parts.iter().all(|part| part.is_finite() && *part >= 0.0) {
                return Err(format!(
                    "{name}.seek is {seek:?}: expected four numbers of 0 or more"
                ));
            }
        }
        Ok(())
    }

    fn of(&self, direction: Direction) -> DirectionTiming {
        match direction {
            Direction::Read => self.read,
            Direction::Write => self.write,
        }
    }

    /// Time to move the head over `distance` bytes of a disk of `size` bytes and wait for the
    /// platter; nothing for a distance of 0.
    pub fn positioning(&self, direction: Direction, distance: u64, size: ByteCount) -> Duration {
        if distance == 0 {
            return Duration::ZERO;
        }
        let part = (distance as f64 / size.0.max(1) as f64).min(1.0);
        let timing = self.of(direction);
        let seek = timing.seek;
        let k = (seek.shortest + seek.span * part.powf(seek.power)).min(seek.most);
        Duration((k * timing.positioning_ms * 1e6) as u64)
    }

    /// Time to move `length` bytes under the head.
    pub fn transfer(&self, direction: Direction, length: ByteCount) -> Duration {
        BytesPerSecond(self.of(direction).bytes_per_second).time_for(length)
    }

    /// How long the drive reads ahead until its memory is full.
    fn read_ahead_time(&self) -> Duration {
        self.transfer(Direction::Read, ByteCount(self.read_ahead_bytes))
    }

    /// How long a request waits before it goes out of turn.
    pub fn patience(&self) -> Duration {
        Duration::from_ms(self.patience_ms)
    }
}

/// A request as the mechanics see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Read or write.
    pub direction: Direction,
    /// Offset on the disk. Units: bytes.
    pub offset: u64,
    /// Its length.
    pub length: ByteCount,
    /// When it came.
    pub arrived: Instant,
}

impl Request {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length.0)
    }
}

/// The work of the mechanics on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// When its bytes are there, never before its arrival.
    pub done: Instant,
    /// How long the disk worked for it alone, its read-ahead in the idle gap included.
    pub busy: Duration,
    /// The head had to move.
    pub positioned: bool,
}

/// The head: one request at a time.
#[derive(Clone, Debug)]
pub struct Mechanics {
    timing: DiskTiming,
    size: ByteCount,
    /// Where the last request ended.
    head: u64,
    /// When it ended, by the model.
    head_at: Instant,
    /// The direction of that request: the drive reads ahead after reads alone.
    last: Option<Direction>,
}

impl Mechanics {
    /// A disk of `size` bytes, its head at the start.
    pub fn new(timing: DiskTiming, size: ByteCount) -> Mechanics {
        Mechanics {
            timing,
            size,
            head: 0,
            head_at: Instant::ZERO,
            last: None,
        }
    }

    /// The place of the head. Units: bytes from the start of the disk.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Serves `request` after all earlier ones have ended; `slow` multiplies its time.
    ///
    /// Assumes  the caller serves requests in the order of these calls, and each has arrived
    /// Errors   none
    pub fn serve(&mut self, request: &Request, slow: f64) -> Service {
        let contiguous = self.last.is_some() && request.offset == self.head;
        let read_ahead = contiguous
            && request.direction == Direction::Read
            && self.last == Some(Direction::Read);
        let earliest = if read_ahead {
            request.arrived.before(self.timing.read_ahead_time())
        } else {
            request.arrived
        };
        let start = self.head_at.max(earliest);
        let distance = if contiguous {
            0
        } else {
            // A first request at the place of the head still pays the shortest positioning: only a
            // request that continues the last one pays none.
            request.offset.abs_diff(self.head).max(1)
        };
        let positioning = self
            .timing
            .positioning(request.direction, distance, self.size);
        let transfer = self.timing.transfer(request.direction, request.length);
        let busy = Duration(((positioning + transfer).0 as f64 * slow) as u64);
        self.head = request.end();
        self.head_at = start + busy;
        self.last = Some(request.direction);
        Service {
            done: self.head_at.max(request.arrived),
            busy,
            positioned: !contiguous,
        }
    }

    /// Lets the head stand still until `at`.
    pub fn hold_until(&mut self, at: Instant) {
        self.head_at = self.head_at.max(at);
    }

    /// Forgets when the last request ended: after the timing or the power was off, and when faults
    /// are cleared.
    pub fn rest_at(&mut self, now: Instant) {
        self.head_at = now;
        self.last = None;
    }
}

/// The requests that wait for the head; it chooses the next.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: Vec<(Request, T)>,
}

impl<T> Default for Queue<T> {
    fn default() -> Queue<T> {
        Queue {
            waiting: Vec::new(),
        }
    }
}

impl<T> Queue<T> {
    /// Adds a request with its payload.
    pub fn push(&mut self, request: Request, payload: T) {
        self.waiting.push((request, payload));
    }

    /// Number of requests that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True when none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the next request: of those that have waited for `patience` the one that has waited
    /// longest, else the nearest ahead of the head, else the nearest to the start of the disk.
    pub fn take_next(
        &mut self,
        head: u64,
        now: Instant,
        patience: Duration,
    ) -> Option<(Request, T)> {
        let index = match self.overdue(now, patience) {
            Some(index) => index,
            None => self.nearest(head)?,
        };
        // Not `swap_remove`: the order of arrival breaks ties.
        Some(self.waiting.remove(index))
    }

    /// True when the next request of this queue goes before a destaging at `offset`.
    pub fn goes_before(&self, offset: u64, head: u64, now: Instant, patience: Duration) -> bool {
        if self.overdue(now, patience).is_some() {
            return true;
        }
        let Some((request, _)) = self.nearest(head).and_then(|at| self.waiting.get(at)) else {
            return false;
        };
        (request.offset < head, request.offset) <= (offset < head, offset)
    }

    fn overdue(&self, now: Instant, patience: Duration) -> Option<usize> {
        self.waiting
            .iter()
            .enumerate()
            .filter(|(_, (request, _))| now.since(request.arrived) >= patience)
            .min_by_key(|(_, (request, _))| request.arrived)
            .map(|(index, _)| index)
    }

    fn nearest(&self, head: u64) -> Option<usize> {
        self.waiting
            .iter()
            .enumerate()
            .min_by_key(|(_, (request, _))| (request.offset < head, request.offset))
            .map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: ByteCount = ByteCount(40_000_000_000);

    fn read(offset: u64, length: u64, arrived: Instant) -> Request {
        Request {
            direction: Direction::Read,
            offset,
            length: ByteCount(length),
            arrived,
        }
    }

    fn ms(instant: Instant) -> f64 {
        instant.0 as f64 / 1e6
    }

    #[test]
    fn positioning_grows_with_the_root_of_the_distance() {
        let timing = DiskTiming::TABLE5;
        let check = |distance: u64, expect_ms: f64| {
            let got = timing.positioning(Direction::Read, distance, SIZE).0 as f64 / 1e6;
            assert!((got - expect_ms).abs() < 0.01, "{distance}: {got} ms");
        };
        check(0, 0.0);
        check(1, 0.4 * 15.2);
        check(SIZE.0 / 4, (0.4 + 1.13 * 0.5) * 15.2);
        check(SIZE.0, (0.4 + 1.13) * 15.2);
        check(SIZE.0 * 9, (0.4 + 1.13) * 15.2);
    }

    #[test]
    fn queued_requests_start_when_the_last_ended_however_late_they_are_taken() {
        let mut disk = Mechanics::new(DiskTiming::TABLE5, SIZE);
        let arrived = Instant::ZERO + Duration::from_ms(5);
        let mut expect = 5.0;
        for index in 0..10u64 {
            let offset = (index * 7 % 10) * 1_000_000_000;
            let distance = offset.abs_diff(disk.head()).max(1);
            let service = disk.serve(&read(offset, 1 << 20, arrived), 1.0);
            expect += (0.4 + 1.13 * (distance as f64 / SIZE.0 as f64).sqrt()) * 15.2;
            expect += (1u64 << 20) as f64 / 172e3;
            assert!((ms(service.done) - expect).abs() < 0.01);
        }
    }

    #[test]
    fn contiguous_reads_pay_transfer_only() {
        let mut disk = Mechanics::new(DiskTiming::TABLE5, SIZE);
        disk.serve(&read(0, 1 << 20, Instant::ZERO), 1.0);
        let before = disk.head_at;
        let service = disk.serve(&read(1 << 20, 1 << 20, Instant::ZERO), 1.0);
        assert!(!service.positioned);
        assert!((ms(service.done) - ms(before) - 6.096).abs() < 0.01);
    }

    #[test]
    fn idle_gap_gives_a_contiguous_read_at_most_the_drives_memory() {
        let mut disk = Mechanics::new(DiskTiming::TABLE5, SIZE);
        let first = disk.serve(&read(0, 1 << 20, Instant::ZERO), 1.0);
        // 3 idle ms are 3 ms of read-ahead.
        let short = disk.serve(
            &read(1 << 20, 1 << 20, first.done + Duration::from_ms(3)),
            1.0,
        );
        assert!((ms(short.done) - ms(first.done) - 6.096).abs() < 0.01);
        // An idle second is 8 MB of read-ahead: eight requests come at once, since 8.39 MB less
        // 8 MB remain to be read.
        let later = short.done + Duration::from_s(1);
        let mut done = later;
        for index in 0..8u64 {
            done = disk
                .serve(&read((2 + index) << 20, 1 << 20, later), 1.0)
                .done;
        }
        assert!(done.since(later) <= Duration::from_ms(3), "{done:?}");
        let next = disk.serve(&read(10 << 20, 1 << 20, later), 1.0).done;
        assert!(next.since(later) > Duration::from_ms(7), "{next:?}");
    }

    #[test]
    fn writes_get_no_read_ahead_and_spoil_it() {
        let mut disk = Mechanics::new(DiskTiming::TABLE5, SIZE);
        let later = Instant::ZERO + Duration::from_s(1);
        let write = |offset: u64, arrived: Instant| Request {
            direction: Direction::Write,
            ..read(offset, 1 << 20, arrived)
        };
        disk.serve(&write(0, Instant::ZERO), 1.0);
        let second = disk.serve(&write(1 << 20, later), 1.0);
        assert!((ms(second.done) - 1000.0 - 7.231).abs() < 0.01);
        let after = disk.serve(&read(2 << 20, 1 << 20, later + Duration::from_s(1)), 1.0);
        assert!((ms(after.done) - 2000.0 - 6.096).abs() < 0.01);
    }

    #[test]
    fn slow_factor_multiplies_the_whole_service() {
        let mut plain = Mechanics::new(DiskTiming::TABLE5, SIZE);
        let mut slow = plain.clone();
        let request = read(1_000_000_000, 1 << 20, Instant::ZERO);
        let expect = plain.serve(&request, 1.0).busy.0 * 3;
        assert!(slow.serve(&request, 3.0).busy.0.abs_diff(expect) <= 3);
    }

    fn order(offsets: &[(u64, u64)], head: u64, now_ms: u64) -> Vec<u64> {
        let mut queue = Queue::default();
        for &(offset, arrived_ms) in offsets {
            let arrived = Instant::ZERO + Duration::from_ms(arrived_ms);
            queue.push(read(offset, 10, arrived), ());
        }
        let now = Instant::ZERO + Duration::from_ms(now_ms);
        let mut head = head;
        let mut taken = Vec::new();
        while let Some((request, ())) = queue.take_next(head, now, Duration::from_ms(100)) {
            head = request.end();
            taken.push(request.offset);
        }
        taken
    }

    #[test]
    fn nearest_ahead_goes_first_then_the_sweep_starts_over() {
        let waiting = [(900, 0), (100, 0), (500, 0), (400, 0)];
        assert_eq!(order(&waiting, 450, 0), [500, 900, 100, 400]);
    }

    #[test]
    fn request_that_waited_100_ms_goes_first() {
        let waiting = [(500, 95), (900, 0), (100, 1), (600, 95)];
        assert_eq!(order(&waiting, 450, 99), [500, 600, 900, 100]);
        assert_eq!(
            order(&waiting, 450, 100),
            [900, 500, 600, 100][..1]
                .iter()
                .copied()
                .chain([100, 500, 600])
                .collect::<Vec<_>>()
        );
        assert_eq!(order(&waiting, 450, 101), [900, 100, 500, 600]);
    }

    #[test]
    fn requests_at_one_place_keep_their_order() {
        let mut queue = Queue::default();
        for label in ["first", "second", "third"] {
            queue.push(read(700, 10, Instant::ZERO), label);
        }
        let mut take = || {
            queue
                .take_next(0, Instant::ZERO, Duration::from_ms(100))
                .map(|t| t.1)
        };
        assert_eq!(
            [take(), take(), take(), take()],
            [Some("first"), Some("second"), Some("third"), None]
        );
    }
}
