// SPDX-License-Identifier: Apache-2.0
//! Bytes, offsets, instants, rates and ids as types, so that none is passed for another.
//!
//! Arithmetic saturates: a nonsensical size from a lying peer must not wrap into a plausible one.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};

/// Nanoseconds in a second.
pub const NS_PER_S: u64 = 1_000_000_000;

/// A point on the server's monotonic clock. Units: ns since an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A span of time. Units: ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration(pub u64);

impl Instant {
    /// Later than every instant that happens; means "no deadline".
    pub const NEVER: Instant = Instant(u64::MAX);
    /// The origin of the clock.
    pub const ZERO: Instant = Instant(0);

    /// Time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }

    /// `self - span`, at least the clock's origin.
    pub const fn before(self, span: Duration) -> Instant {
        Instant(self.0.saturating_sub(span.0))
    }
}

impl Duration {
    /// No time at all.
    pub const ZERO: Duration = Duration(0);
    /// Longer than any span that happens.
    pub const MAX: Duration = Duration(u64::MAX);

    /// `ms` milliseconds.
    pub const fn from_ms(ms: u64) -> Duration {
        Duration(ms.saturating_mul(1_000_000))
    }

    /// `us` microseconds.
    pub const fn from_us(us: u64) -> Duration {
        Duration(us.saturating_mul(1_000))
    }

    /// `s` seconds.
    pub const fn from_s(s: u64) -> Duration {
        Duration(s.saturating_mul(NS_PER_S))
    }

    /// Whole milliseconds, rounded down.
    pub const fn ms(self) -> u64 {
        self.0 / 1_000_000
    }

    /// `self` times `factor`, saturating.
    pub const fn times(self, factor: u64) -> Duration {
        Duration(self.0.saturating_mul(factor))
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, span: Duration) -> Instant {
        Instant(self.0.saturating_add(span.0))
    }
}

impl Add for Duration {
    type Output = Duration;
    fn add(self, other: Duration) -> Duration {
        Duration(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Duration {
    fn add_assign(&mut self, other: Duration) {
        *self = *self + other;
    }
}

impl Sub for Duration {
    type Output = Duration;
    fn sub(self, other: Duration) -> Duration {
        Duration(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03} ms", self.0 / 1_000_000, self.0 / 1_000 % 1_000)
    }
}

/// How many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteCount(pub u64);

/// Where in a file or on a device. Units: bytes from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteOffset(pub u64);

impl ByteCount {
    /// `n` binary megabytes.
    pub const fn from_mib(n: u64) -> ByteCount {
        ByteCount(n << 20)
    }
}

impl Add for ByteCount {
    type Output = ByteCount;
    fn add(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_add(other.0))
    }
}

impl AddAssign for ByteCount {
    fn add_assign(&mut self, other: ByteCount) {
        *self = *self + other;
    }
}

impl Sub for ByteCount {
    type Output = ByteCount;
    fn sub(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_sub(other.0))
    }
}

impl Add<ByteCount> for ByteOffset {
    type Output = ByteOffset;
    fn add(self, count: ByteCount) -> ByteOffset {
        ByteOffset(self.0.saturating_add(count.0))
    }
}

/// A half-open run of bytes `start .. start + length` in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub start: ByteOffset,
    /// How many.
    pub length: ByteCount,
}

impl ByteRange {
    /// The run of `length` bytes from `start`.
    pub const fn new(start: u64, length: u64) -> ByteRange {
        ByteRange {
            start: ByteOffset(start),
            length: ByteCount(length),
        }
    }

    /// First byte past the run, saturating.
    pub const fn end(self) -> u64 {
        self.start.0.saturating_add(self.length.0)
    }

    /// True when the two share a byte.
    pub const fn overlaps(self, other: ByteRange) -> bool {
        self.start.0 < other.end() && other.start.0 < self.end()
    }
}

/// How fast bytes flow. Units: bytes/s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BytesPerSecond(pub u64);

impl BytesPerSecond {
    /// A video bitrate: `bits` a second, eight to the byte, rounded up.
    pub const fn from_bits(bits: u64) -> BytesPerSecond {
        BytesPerSecond(bits.div_ceil(8))
    }

    /// How long `count` takes at this rate, rounded up; [`Duration::MAX`] at rate zero.
    pub const fn time_for(self, count: ByteCount) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let ns = (count.0 as u128 * NS_PER_S as u128).div_ceil(self.0 as u128);
        if ns > u64::MAX as u128 {
            Duration::MAX
        } else {
            Duration(ns as u64)
        }
    }

    /// How many whole bytes flow in `span`, saturating.
    pub const fn bytes_in(self, span: Duration) -> ByteCount {
        let bytes = self.0 as u128 * span.0 as u128 / NS_PER_S as u128;
        if bytes > u64::MAX as u128 {
            ByteCount(u64::MAX)
        } else {
            ByteCount(bytes as u64)
        }
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);
    };
}

id!(/// One client connection to the daemon (an smbd process, a mount).
    SessionId(u32));
id!(/// A file as one open within a session names it; chosen by the client, unique in its session.
    HandleId(u32));
id!(/// A file that the server knows, once for all that have it open.
    FileId(u32));
id!(/// A run of related reads that may hold a contract.
    StreamId(u32));
id!(/// A block device that is scheduled as one queue.
    DeviceId(u16));
id!(/// A buffer of the cache segment, counted from zero.
    SlotIndex(u32));
id!(/// A request by a client; chosen by it, unique in its session while outstanding.
    RequestId(u64));
id!(/// A device request in flight.
    IoId(u64));
id!(/// Memory that one session writes to; its number is used once.
    LaneId(u32));
id!(/// A pool as its door calls it, the same in each of its sessions; never 0.
    PoolNumber(u64));

/// The part of its file's bytes that an object has: of a stripe over `count` objects the one with
/// this index, of two stages group by group. All have equal shares, in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FilePart {
    index: u32,
    count: u32,
}

impl FilePart {
    /// Most parts of a file: 255 groups of 255 members, as a pool's record has room for.
    pub const COUNT_MAX: u32 = 255 * 255;
    /// All of it.
    pub const WHOLE: FilePart = FilePart { index: 0, count: 1 };

    /// None: there is no such part.
    pub fn new(index: u32, count: u32) -> Option<FilePart> {
        (index < count && count <= FilePart::COUNT_MAX).then_some(FilePart { index, count })
    }

    /// Which, counted from 0.
    pub fn index(self) -> u32 {
        self.index
    }

    /// Of how many.
    pub fn count(self) -> u32 {
        self.count
    }

    /// The object has all of its file's bytes.
    pub fn is_whole(self) -> bool {
        self.count == 1
    }

    /// This part's share of a file's rate.
    pub fn of(self, rate: BytesPerSecond) -> BytesPerSecond {
        // No part has a count of 0: `new` refuses it.
        BytesPerSecond(rate.0.div_ceil(u64::from(self.count.max(1))))
    }
}

impl Default for FilePart {
    fn default() -> FilePart {
        FilePart::WHOLE
    }
}

/// For people, counted from 1: `2/4`.
impl fmt::Display for FilePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hundred_megabits_is_twelve_and_a_half_megabytes() {
        let rate = BytesPerSecond::from_bits(100_000_000);
        assert_eq!(rate.0, 12_500_000);
        assert_eq!(rate.time_for(ByteCount(500_000)), Duration::from_ms(40));
        assert_eq!(rate.bytes_in(Duration::from_ms(40)), ByteCount(500_000));
    }

    #[test]
    fn nonsense_saturates_instead_of_wrapping() {
        let range = ByteRange::new(u64::MAX - 1, 100);
        assert_eq!(range.end(), u64::MAX);
        assert_eq!(
            BytesPerSecond(1).time_for(ByteCount(u64::MAX)),
            Duration::MAX
        );
        assert_eq!(Instant(5).since(Instant(9)), Duration::ZERO);
    }
}
