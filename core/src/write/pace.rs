// SPDX-License-Identifier: Apache-2.0
//! How a file is being written: how fast, whether from front to back, and whether its writer was
//! held back.
//!
//! Not why: a camera that sends its recording and a copy that sends as fast as it may look alike
//! for as long as there is room. A copy shows itself by having waited for room; then its rate only
//! shows how much it was granted. Unless it keeps to the rate that it had before: a camera whose
//! disk was slow for a while has written no more than that when it catches up, a copy goes on as
//! fast as it may.

use crate::units::*;

/// Commits are counted so long before they give a rate.
const SPAN: Duration = Duration::from_s(1);
/// Nothing for so long: later writes are another recording.
const SILENCE: Duration = Duration::from_s(2);
/// How long a writer that waited for room is taken to be one that would write as fast as it may.
const HELD_BACK: Duration = Duration::from_s(5);
/// The part of recent commits that went on where the one before ended, from which on it is a
/// stream. Thousandths.
const STREAM_PERMILLE: u64 = 500;
/// A client that has several writes under way sends them in any order; so far from where the last
/// one ended is still the same place.
const NEAR_BYTES: u64 = 8 << 20;

/// Bytes that may have gathered on the way to us.
const OWN_SLACK: Duration = Duration::from_s(2);

/// The knowledge of a file's writer.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Of the span that is being counted.
    began: Instant,
    bytes: u64,
    /// The span before; 0: there was none.
    rate: u64,
    last: Instant,
    last_end: u64,
    in_order_permille: u64,
    held_back_until: Instant,
    /// The rate that the writer had before it was ever held back; 0: not known. Units: bytes a
    /// second.
    own_rate: u64,
    own_began: Instant,
    /// Written since then.
    own_bytes: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            began: Instant::NEVER,
            bytes: 0,
            rate: 0,
            last: Instant::ZERO,
            last_end: 0,
            in_order_permille: 1000,
            held_back_until: Instant::ZERO,
            own_rate: 0,
            own_began: Instant::NEVER,
            own_bytes: 0,
        }
    }
}

impl Pace {
    /// A write was acknowledged.
    pub fn committed(&mut self, now: Instant, range: ByteRange) {
        if self.began == Instant::NEVER || now.since(self.last) >= SILENCE {
            let former = *self;
            *self = Pace {
                began: now,
                last_end: range.start.0,
                held_back_until: former.held_back_until,
                own_began: now,
                ..Pace::default()
            };
            if former.waits() {
                // The writer was not silent, it was held back.
                self.own_rate = former.own_rate;
                self.own_began = former.own_began;
                self.own_bytes = former.own_bytes;
            }
        }
        let near = range.start.0.abs_diff(self.last_end) <= NEAR_BYTES;
        let in_order = if near { 1000 } else { 0 };
        self.in_order_permille = (self.in_order_permille * 7 + in_order) / 8;
        self.last = now;
        self.last_end = range.end();
        self.bytes += range.length.0;
        self.own_bytes = self.own_bytes.saturating_add(range.length.0);
        let counted = now.since(self.began);
        if counted >= SPAN {
            let rate = per_second(self.bytes, counted);
            if self.own_rate == 0 && !self.waits() {
                self.own_rate = rate;
            }
            self.rate = if self.rate == 0 {
                rate
            } else {
                self.rate / 2 + rate / 2
            };
            self.began = now;
            self.bytes = 0;
        }
    }

    /// A write of it waits for room.
    pub fn held_back(&mut self, now: Instant) {
        self.held_back_until = now + HELD_BACK;
    }

    /// Bytes a second; zero when no write came lately.
    pub fn rate(&self, now: Instant) -> BytesPerSecond {
        if self.began == Instant::NEVER || now.since(self.last) >= SILENCE {
            return BytesPerSecond(0);
        }
        if self.rate > 0 {
            return BytesPerSecond(self.rate);
        }
        BytesPerSecond(per_second(
            self.bytes,
            now.since(self.began).max(Duration(SPAN.0 / 4)),
        ))
    }

    /// So much was seen of it that its rate can be counted on.
    pub fn is_known(&self, now: Instant) -> bool {
        self.rate > 0 && now.since(self.last) < SILENCE
    }

    /// It is written from front to back, at a rate of its own. Of a writer from which nothing came
    /// since it was held back, nothing new is known.
    pub fn is_paced(&self) -> bool {
        self.in_order_permille >= STREAM_PERMILLE && !self.waits()
    }

    /// The rate that the writer had before it was held back, if all its writes since fit it, from
    /// front to back. None: they do not, or it is not known.
    pub fn own_rate(&self) -> Option<BytesPerSecond> {
        let rate = BytesPerSecond(self.own_rate);
        let time = self.last.since(self.own_began) + OWN_SLACK;
        let most = rate.bytes_in(time).0 / 20 * 21;
        let keeps = self.own_rate > 0
            && self.in_order_permille >= STREAM_PERMILLE
            && self.own_bytes <= most;
        keeps.then_some(rate)
    }

    /// The writer was held back, and its rate without that is not known.
    fn waits(&self) -> bool {
        self.last < self.held_back_until
    }
}

fn per_second(bytes: u64, time: Duration) -> u64 {
    let rate = u128::from(bytes) * u128::from(NS_PER_S) / u128::from(time.0.max(1));
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(1) + Duration::from_ms(ms)
    }

    #[test]
    fn a_camera_is_known_by_its_rate_and_ends_with_its_last_frame() {
        let mut pace = Pace::default();
        for frame in 0..100 {
            pace.committed(at(40 * frame), ByteRange::new(500_000 * frame, 500_000));
        }
        let now = at(4000);
        let rate = pace.rate(now).0;
        assert!(rate.abs_diff(12_500_000) < 600_000, "{rate}");
        assert!(pace.is_paced() && pace.is_known(now));
        assert_eq!(pace.rate(at(6500)).0, 0);
        assert!(!pace.is_known(at(6500)));
    }

    #[test]
    fn who_was_held_back_or_writes_anywhere_has_no_pace_of_his_own() {
        let mut pace = Pace::default();
        pace.committed(at(0), ByteRange::new(0, 1 << 20));
        assert!(pace.is_paced());
        pace.held_back(at(10));
        pace.committed(at(1000), ByteRange::new(1 << 20, 1 << 20));
        assert!(!pace.is_paced());
        pace.committed(at(6000), ByteRange::new(2 << 20, 1 << 20));
        assert!(pace.is_paced());
        for step in 0..20 {
            pace.committed(
                at(6000 + step),
                ByteRange::new(((step * 37) % 97) << 25, 4096),
            );
        }
        assert!(!pace.is_paced());
    }

    #[test]
    fn a_camera_that_was_held_back_keeps_its_rate_and_a_copy_has_none() {
        let rate_after = |frames_a_second: u64, caught_up: u64| {
            let mut pace = Pace::default();
            for frame in 0..3 * frames_a_second {
                let range = ByteRange::new(500_000 * frame, 500_000);
                pace.committed(at(1000 * frame / frames_a_second), range);
            }
            pace.held_back(at(3000));
            // Four seconds without a grant, then much at once.
            for frame in 0..caught_up {
                let place = 500_000 * (3 * frames_a_second + frame);
                pace.committed(at(7000 + frame), ByteRange::new(place, 500_000));
            }
            assert!(!pace.is_paced());
            pace.own_rate().map(|rate| rate.0 / 1_000_000)
        };
        assert_eq!(rate_after(25, 150), Some(13));
        assert_eq!(rate_after(25, 400), None);
    }
}
