// SPDX-License-Identifier: Apache-2.0
//! Moments that are left to the small reads of the kernel.
//!
//! Promised requests go in the real-time class, and a scheduler of classes, such as mq-deadline,
//! sends nothing of a lower class beside them, nor within a moment after the last one. While the
//! server fills windows it sends the next one within that moment. A client that opens a file of
//! which no cache has anything needs a few small reads of the kernel's, each behind the one before,
//! and would wait until all windows are full. So where no player loses a frame by it, the server
//! leaves a gap behind a promised request now and then. Programs on its machine that read without a
//! pause use such gaps as well: others that have taken much time in gaps get no more for a while.
//! Where the scheduler lets others in between two promised requests anyway, which their times show,
//! the server leaves no gap.

use super::state::Device;
use super::*;
use crate::sched::{Load, Order, spare};

/// The length of a gap: a scheduler of classes turns to others within it.
const GAP: Duration = Duration::from_ms(1);
/// The length of one behind a gap that others have used: a client that opens a file reads a few
/// places in turn.
const LONG_GAP: Duration = Duration::from_ms(20);
/// Others used a gap if the request behind it took so much longer than expected, and longer by one
/// part in so many.
const USED: Duration = Duration::from_ms(2);
const USED_PART: u64 = 3;
/// The least time from one gap to the next: behind an unused one, and behind one that others used.
const EVERY: Duration = Duration::from_ms(100);
const EVERY_USED: Duration = Duration::from_ms(20);
/// A client that used a gap goes on with the bytes that it read there, and comes again.
const COMES_AGAIN: Duration = Duration::from_ms(300);
/// All contracts can wait so long.
const EASE: Duration = Duration::from_ms(600);
/// Where others were served between promised requests without a gap, twice within the first time,
/// the server leaves none for the second.
const NOT_NEEDED_TWICE: Duration = Duration::from_s(1);
const NOT_NEEDED: Duration = Duration::from_s(10);
/// At most so much of each second of the device is promised.
const PROMISED_MAX: Duration = Duration::from_ms(500);
/// The time that others may have taken in gaps; the cost of each is known only afterwards.
const TAKEN_MAX: Duration = Duration::from_ms(500);
/// Of that, one part in so many of the time that passes is given back.
const GIVEN_BACK: u64 = 20;

/// The gaps of one device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gaps {
    /// The last request sent was of the real-time class.
    is_behind_promised: bool,
    /// When the request ended behind which the last gap was left.
    began: Instant,
    /// Nothing has been sent since.
    is_open: bool,
    /// The cost of the requests with the device.
    expected: Duration,
    /// They were sent behind a gap.
    is_measured: bool,
    /// The time that others took in gaps, less the part given back until then.
    taken: Duration,
    counted: Instant,
    /// Others have used the last one, and the next one is long.
    is_used: bool,
    /// The last one was long.
    was_long: bool,
    /// When one was used, last.
    used_at: Instant,
    /// The requests with the device were sent as soon as a promised one had ended.
    is_close: bool,
    /// When one of them took so long that others were served before it, last.
    slow_at: Instant,
    /// When two of them did.
    not_needed_at: Instant,
}

impl Gaps {
    /// A request goes to the device.
    ///
    /// `is_close`  the one before it has ended just now; None: others are with the device
    pub(super) fn sent(&mut self, class: IoClass, cost: Duration, is_close: Option<bool>) {
        let is_promised = class == IoClass::RealTime;
        self.is_close = is_promised
            && match is_close {
                Some(is_close) => is_close && self.is_behind_promised,
                None => self.is_close,
            };
        self.is_behind_promised = is_promised;
        self.expected += cost;
        self.is_measured |= core::mem::take(&mut self.is_open);
    }

    /// A gap is open now.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// A gap is left behind a request that ended then.
    pub(super) fn begin(&mut self, ended: Instant) {
        self.began = ended;
        self.is_open = true;
        self.was_long = self.is_used;
    }

    /// All requests with the device have ended, and took so long together. Returns whether that
    /// says nothing of its speed: a drive reads on by itself in a long gap.
    ///
    /// `disturbed`  others than the kernel may have made them longer: the drive, which writes the
    ///              bytes in its memory, or the driver, which reads a header
    pub(super) fn ended(&mut self, now: Instant, taken: Duration, disturbed: bool) -> bool {
        let expected = core::mem::take(&mut self.expected);
        let is_close = core::mem::take(&mut self.is_close);
        let is_measured = core::mem::take(&mut self.is_measured);
        let longer = taken - expected;
        let is_used = !disturbed && longer >= USED && longer.times(USED_PART) >= expected;
        if is_measured {
            self.is_used = is_used;
        }
        if is_measured && is_used {
            let gap = match self.was_long {
                true => LONG_GAP,
                false => GAP,
            };
            // Where a request hung for a minute, gaps are not left for seconds, and not for longer.
            self.taken = (self.taken(now) + gap + longer).min(TAKEN_MAX.times(2));
            self.counted = now;
            self.used_at = now;
        } else if is_close && is_used {
            if is_lately(now, self.slow_at, NOT_NEEDED_TWICE) {
                self.not_needed_at = now;
            }
            self.slow_at = now;
        }
        is_measured && self.was_long
    }

    /// The time that others took, less the part that was given back.
    fn taken(&self, now: Instant) -> Duration {
        self.taken - Duration(now.since(self.counted).0 / GIVEN_BACK)
    }

    fn length(&self) -> Duration {
        match self.is_used {
            true => LONG_GAP,
            false => GAP,
        }
    }

    /// Whether a gap may begin behind a request that ended then.
    fn may_begin(&self, now: Instant, ended: Instant) -> bool {
        let every = match is_lately(now, self.used_at, COMES_AGAIN) {
            true => EVERY_USED,
            false => EVERY,
        };
        self.is_behind_promised
            && !is_lately(now, self.not_needed_at, NOT_NEEDED)
            && self.taken(now) < TAKEN_MAX
            && ended.since(self.began) >= every
    }
}

impl Device {
    /// Whether a promised request that could go to the device has to wait, since there is a gap.
    ///
    /// `load`   its claims as they are due
    /// Returns  until when
    pub(super) fn leaves_gap(
        &self,
        now: Instant,
        load: &Load<'_>,
        order: &mut Order,
    ) -> Option<Instant> {
        let ended = self.queue.service_started;
        // A reader that waits for bytes waits no longer than that.
        let is_awaited = load.claims.iter().any(|claim| claim.is_awaited);
        let length = match is_awaited || !self.queue.demands.is_empty() {
            true => GAP,
            false => self.gaps.length(),
        };
        let until = ended + length;
        if !self.positions() || self.queue.flight_count > 0 || now >= until {
            return None;
        }
        let is_open = self.gaps.is_open && self.gaps.began == ended;
        let mut begins = || self.gaps.may_begin(now, ended) && has_time_for_gap(load, order);
        (is_open || begins()).then_some(until)
    }
}

fn is_lately(now: Instant, at: Instant, span: Duration) -> bool {
    at != Instant::ZERO && now.since(at) < span
}

/// Whether there is time on a device for a gap.
fn has_time_for_gap(load: &Load<'_>, order: &mut Order) -> bool {
    load.promised_a_second() <= PROMISED_MAX && spare(load, order) >= EASE
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Duration = Duration::from_ms(25);
    const WITH_OTHERS: Duration = Duration::from_ms(125);

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    /// A promised request, sent as soon as another had ended, or behind a gap.
    fn request(gaps: &mut Gaps, ended: Instant, taken: Duration, is_behind_gap: bool) -> bool {
        if is_behind_gap {
            gaps.begin(gaps.began);
        }
        gaps.sent(IoClass::RealTime, EXPECTED, Some(!is_behind_gap));
        gaps.ended(ended, taken, false)
    }

    #[test]
    fn a_gap_is_left_behind_promised_requests_alone_and_not_too_often() {
        let mut gaps = Gaps::default();
        gaps.sent(IoClass::BestEffort, EXPECTED, Some(false));
        gaps.ended(at(100), EXPECTED, false);
        assert!(!gaps.may_begin(at(100), at(100)));
        request(&mut gaps, at(100), EXPECTED, false);
        assert!(gaps.may_begin(at(100), at(100)));
        gaps.begin(at(100));
        assert!(!gaps.may_begin(at(199), at(199)));
        assert!(gaps.may_begin(at(200), at(200)));
        gaps.used_at = at(110);
        assert!(!gaps.may_begin(at(119), at(119)));
        assert!(gaps.may_begin(at(120), at(120)), "somebody comes again");
    }

    #[test]
    fn others_that_take_much_get_no_more_gaps_until_time_has_passed() {
        let mut gaps = Gaps::default();
        let mut now = at(1000);
        assert!(!request(&mut gaps, now, WITH_OTHERS, true));
        assert_eq!(gaps.length(), LONG_GAP);
        for _ in 0..4 {
            assert!(request(&mut gaps, now, WITH_OTHERS, true), "a long one");
        }
        assert!(!gaps.may_begin(now, now), "581 ms were taken");
        now = now + Duration::from_s(1);
        assert!(!gaps.may_begin(now, now), "531 ms are");
        now = now + Duration::from_s(1);
        assert!(gaps.may_begin(now, now));
        // A request that hung for a minute.
        request(&mut gaps, now, Duration::from_s(60), true);
        assert!(!gaps.may_begin(now, now));
        now = now + Duration::from_s(11);
        assert!(gaps.may_begin(now, now));
        request(&mut gaps, now, EXPECTED, true);
        assert_eq!(gaps.length(), GAP, "nobody used it");
    }

    #[test]
    fn no_gap_is_left_where_others_get_in_without_one() {
        let mut gaps = Gaps::default();
        for ms in [1000, 1025, 1050] {
            request(&mut gaps, at(ms), EXPECTED, false);
        }
        // One alone says nothing, nor do two far apart.
        for ms in [2000, 4000] {
            request(&mut gaps, at(ms), WITH_OTHERS, false);
            assert!(gaps.may_begin(at(ms), at(ms)));
        }
        request(&mut gaps, at(4500), WITH_OTHERS, false);
        assert!(!gaps.may_begin(at(14_499), at(14_499)));
        assert!(gaps.may_begin(at(14_500), at(14_500)));
    }

    #[test]
    fn a_write_of_ours_or_of_the_drive_is_nobody_in_a_gap() {
        let mut gaps = Gaps::default();
        for ms in [1000, 1100] {
            // With the read goes a write: both are expected.
            gaps.begin(gaps.began);
            gaps.sent(IoClass::RealTime, EXPECTED, Some(false));
            gaps.sent(IoClass::BestEffort, EXPECTED, None);
            gaps.ended(at(ms), EXPECTED.times(2), false);
            assert!(
                !gaps.is_used && !gaps.may_begin(at(ms), at(ms)),
                "behind a write"
            );
            // The drive writes the bytes in its memory.
            for is_behind_gap in [true, false] {
                if is_behind_gap {
                    gaps.begin(gaps.began);
                }
                gaps.sent(IoClass::RealTime, EXPECTED, Some(true));
                gaps.ended(at(ms), WITH_OTHERS, true);
            }
            assert!(!gaps.is_used && gaps.may_begin(at(ms), at(ms)));
        }
        assert_eq!(gaps.taken(at(1100)), Duration::ZERO);
    }
}
