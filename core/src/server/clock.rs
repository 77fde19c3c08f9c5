// SPDX-License-Identifier: Apache-2.0
//! A player's clock: the ledger measures lateness by it, promised or not.
//!
//! A run begins with its first read, and from then on each byte is due a preroll after the player's
//! clock comes to it. The schedule of a contract is another one (see `flow.rs`): it begins when the
//! contract is given, and again when it is given back after a withdrawal. Here only the reader
//! moves the clock, by a pause; our own lateness never does.

use crate::stream::CursorIndex;
use crate::units::{ByteCount, BytesPerSecond, Duration, Instant};

/// The time that the wire and a client's own machine take between our answer and the next read.
const WIRE: Duration = Duration::from_ms(5);

/// A run as its player's clock has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlayClock {
    /// The cursor of the run's reads; None: it is a sequence's run.
    pub cursor: Option<CursorIndex>,
    /// Where its first read began. Units: bytes of the file.
    pub origin: u64,
    /// Bytes of the run before the place from which the stream counts.
    pub before: u64,
    /// When its first byte was asked for, or would have been if the reader had not paused.
    anchor: Instant,
    /// When the first byte behind those read so far is asked for, at the rate at which it is
    /// played.
    next: Instant,
    /// So long after our answer to its last read the reader may ask without having paused.
    wire: Duration,
    /// Whether the last answer was late, and when that was.
    was_late: bool,
    answered: Instant,
}

impl PlayClock {
    pub(super) fn new(cursor: Option<CursorIndex>, origin: u64, arrived: Instant) -> PlayClock {
        PlayClock {
            cursor,
            origin,
            before: 0,
            anchor: arrived,
            next: arrived,
            wire: Duration::ZERO,
            was_late: false,
            answered: arrived,
        }
    }

    /// The clock of a run to which the reader of this one has cut. The reader plays on: the delay
    /// that we had caused when it left carries over.
    ///
    /// `run_min`  a reader that read less at one place did not play it, and its clock begins anew
    pub(super) fn cut(
        &self,
        (cursor, origin): (CursorIndex, u64),
        arrived: Instant,
        is_alone: bool,
        (preroll, run_min): (Duration, Duration),
    ) -> PlayClock {
        let new = PlayClock::new(Some(cursor), origin, arrived);
        if self.next.since(self.anchor) < run_min {
            return new;
        }
        let behind = arrived.since(self.next);
        let own = self.own(behind, arrived, is_alone, preroll);
        if own >= behind {
            return new;
        }
        let anchor = arrived.before(behind - own);
        PlayClock {
            anchor,
            next: anchor,
            was_late: self.was_late,
            answered: self.answered,
            ..new
        }
    }

    /// How much of a reader's delay is its own doing.
    fn own(
        &self,
        behind: Duration,
        arrived: Instant,
        is_alone: bool,
        preroll: Duration,
    ) -> Duration {
        let idle = match is_alone {
            true => arrived.since(self.answered),
            false => Duration::ZERO,
        };
        match (idle > preroll, self.was_late) {
            (true, _) => behind,
            (false, false) if idle > self.wire => behind.min(idle),
            (false, _) => Duration::ZERO,
        }
    }

    /// When a read is due.
    ///
    /// `at`        bytes of the run before it
    /// `length`    of the read. Units: bytes
    /// `is_alone`  its reader waits for nothing else
    ///
    /// The delay of a reader that comes later than its clock says has two parts. The time that it
    /// waited for us never moves the clock. The time that it let pass before it asked moves the
    /// clock by that much: its rate is a mean, and it may pause. A reader that is behind through us
    /// asks at once, or nearly, and its clock stands: the wire and the reader's own machine take
    /// less than a quarter of the time that it plays in a read, or, where reads are small, no more
    /// than [`WIRE`] and than that time. Once we were late, only a reader that takes a preroll's
    /// time to ask has paused, and begins anew.
    pub(super) fn due(
        &mut self,
        (at, length): (u64, u64),
        rate: BytesPerSecond,
        arrived: Instant,
        is_alone: bool,
        preroll: Duration,
    ) -> Instant {
        let scheduled = self.anchor + rate.time_for(ByteCount(at));
        let behind = arrived.since(scheduled);
        let (quarter, whole) = (ByteCount(length / 4), ByteCount(length));
        self.wire = rate.time_for(quarter).max(rate.time_for(whole).min(WIRE));
        let end = scheduled + rate.time_for(whole);
        let own = match is_alone && self.next.since(end) > Duration(preroll.0 / 2) {
            // The reader goes back to bytes that it has read. Of several reads at once the furthest
            // may come first.
            true => behind,
            false => self.own(behind, arrived, is_alone, preroll),
        };
        self.anchor = self.anchor + own;
        let next = self.anchor + rate.time_for(ByteCount(at.saturating_add(length)));
        self.next = self.next.max(next);
        scheduled + own + preroll
    }

    /// Its reader waited until then for our answer to a read of another run.
    pub(super) fn waited_until(&mut self, at: Instant) {
        self.answered = self.answered.max(at);
    }

    /// A read that was due then is answered.
    pub(super) fn answered(&mut self, now: Instant, due: Instant) {
        self.was_late = is_late(due, now);
        self.answered = now;
    }
}

/// When a read is due; NEVER: it is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    /// At the device: by a contract, or since the read is presumed to begin a play. NEVER: best
    /// effort.
    pub at_device: Instant,
    /// By its contract.
    pub by_contract: Instant,
    /// By its player's clock. NEVER: it is not known to be played, or its rate is not known.
    pub by_clock: Instant,
}

impl Due {
    pub(super) const NEVER: Due = Due {
        at_device: Instant::NEVER,
        by_contract: Instant::NEVER,
        by_clock: Instant::NEVER,
    };

    /// By a contract's schedule, NEVER without one, and by its player's clock.
    pub(super) fn of_stream(by_contract: Instant, by_clock: Instant) -> Due {
        Due {
            at_device: by_contract,
            by_contract,
            by_clock,
        }
    }
}

/// How late an answer at `now` is for a read that was due at `due`; zero: it is in time. None: the
/// read is not due at all. Nothing is added to the due time, which contains the preroll.
pub(super) fn lateness(due: Instant, now: Instant) -> Option<Duration> {
    (due != Instant::NEVER).then(|| now.since(due))
}

/// Whether an answer at `now` is late for a read that was due at `due`.
pub(super) fn is_late(due: Instant, now: Instant) -> bool {
    lateness(due, now).is_some_and(|lateness| lateness > Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: BytesPerSecond = BytesPerSecond(10_000_000);
    const PREROLL: Duration = Duration::from_ms(500);
    const SECOND: u64 = 10_000_000;

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_ms(ms)
    }

    fn due(clock: &mut PlayClock, seconds: u64, arrived: u64) -> Instant {
        clock.due((seconds * SECOND, SECOND), RATE, at(arrived), true, PREROLL)
    }

    #[test]
    fn reader_who_is_served_late_keeps_his_clock() {
        let mut clock = PlayClock::new(None, 0, at(1000));
        assert_eq!(due(&mut clock, 0, 1000), at(1500));
        // Two seconds late, and the reader asks for the next at once, and again.
        clock.answered(at(3500), at(1500));
        assert_eq!(due(&mut clock, 1, 3500), at(2500));
        clock.answered(at(4000), at(2500));
        assert_eq!(due(&mut clock, 2, 4000), at(3500));
        // The reader has caught up.
        clock.answered(at(3600), at(4500));
        assert_eq!(due(&mut clock, 3, 3900), at(4500));
    }

    #[test]
    fn reader_who_pauses_begins_anew() {
        let mut clock = PlayClock::new(None, 0, at(0));
        clock.answered(at(100), at(500));
        assert_eq!(due(&mut clock, 1, 9000), at(9500));
        assert_eq!(due(&mut clock, 2, 10_000), at(10_500));
        // Late, and then the reader thinks for a while.
        clock.answered(at(11_000), at(10_500));
        assert_eq!(due(&mut clock, 3, 20_000), at(20_500));
    }

    #[test]
    fn reader_who_comes_a_little_later_has_his_preroll() {
        let mut clock = PlayClock::new(None, 0, at(0));
        clock.answered(at(100), at(500));
        assert_eq!(due(&mut clock, 1, 1400), at(1900));
        clock.answered(at(1500), at(1900));
        assert_eq!(due(&mut clock, 2, 2000), at(2900));
    }

    /// As an editor's program does with layers: it asks for the second one's frame when it has that
    /// of the first.
    #[test]
    fn reader_that_waited_for_another_run_was_not_idle() {
        let mut clock = PlayClock::new(None, 0, at(0));
        clock.answered(at(100), at(500));
        clock.waited_until(at(1399));
        assert_eq!(due(&mut clock, 1, 1400), at(1500));
    }

    #[test]
    fn reader_whom_each_answer_keeps_a_little_longer_is_late_in_the_end() {
        let mut clock = PlayClock::new(None, 0, at(0));
        // 1.2 s for a second of play, and 100 ms of the reader's own.
        let mut now = 0;
        for second in 0..10 {
            let due = due(&mut clock, second, now);
            now += 1200;
            clock.answered(at(now), due);
            assert!(due < at(now), "{second}");
            now += 100;
        }
    }

    /// Reads of 6.6 ms, and 3 ms from each answer to the next. Swarm, seed 538.
    #[test]
    fn reader_of_small_pieces_far_away_is_not_forgiven_our_lateness() {
        let mut clock = PlayClock::new(None, 0, at(0));
        let (mut now, mut late) = (Duration::ZERO, 0);
        for piece in 0..400 {
            let place = (piece * 66_000, 66_000);
            let due = clock.due(place, RATE, Instant::ZERO + now, true, PREROLL);
            // Eight for 6.6 ms of play.
            now += Duration::from_ms(5);
            clock.answered(Instant::ZERO + now, due);
            late += u32::from(Instant::ZERO + now > due);
            now += Duration::from_ms(3);
        }
        assert!(late > 10, "{late}");
    }

    #[test]
    fn reader_who_goes_back_to_what_he_has_read_begins_anew() {
        let mut clock = PlayClock::new(None, 0, at(0));
        for second in 0..4 {
            let due = due(&mut clock, second, second * 1000);
            clock.answered(at(second * 1000 + 900), due);
        }
        // The reader goes back to second 1: the clock begins anew there.
        assert_eq!(due(&mut clock, 1, 4000), at(4500));
        clock.answered(at(4900), at(4500));
        assert_eq!(due(&mut clock, 2, 5000), at(5500));
    }

    #[test]
    fn reader_who_cuts_while_he_is_behind_is_behind_there() {
        let cut = |clock: &PlayClock, arrived: u64| {
            let place = (CursorIndex::default(), 0);
            let (preroll, run_min) = (PREROLL, Duration::from_ms(500));
            let mut there = clock.cut(place, at(arrived), true, (preroll, run_min));
            let mut small = there;
            let first = due(&mut there, 0, arrived);
            let piece = (0, SECOND / 1000 * 80);
            assert_eq!(small.due(piece, RATE, at(arrived), true, PREROLL), first);
            first
        };
        let mut clock = PlayClock::new(None, 0, at(0));
        // The reader has read a second, and waited 1.4 s for it: 400 ms of its preroll are gone.
        due(&mut clock, 0, 0);
        clock.answered(at(1400), at(1500));
        assert_eq!(cut(&clock, 1401), at(1500));
        // In time, or after a pause, it begins anew.
        assert_eq!(cut(&clock, 9000), at(9500));
        clock.answered(at(600), at(1500));
        assert_eq!(cut(&clock, 1000), at(1500));
        assert_eq!(cut(&clock, 1200), at(1700));
        // A reader that has hardly read does not play.
        let mut look = PlayClock::new(None, 0, at(0));
        look.due((0, SECOND / 25), RATE, at(0), true, PREROLL);
        look.answered(at(400), at(500));
        assert_eq!(cut(&look, 401), at(901));
    }

    #[test]
    fn reader_whose_threads_come_in_any_order_has_not_gone_back() {
        let mut clock = PlayClock::new(None, 0, at(0));
        for second in [0, 2, 1] {
            clock.due((second * SECOND, SECOND), RATE, at(0), false, PREROLL);
        }
        let rest = (SECOND / 2, SECOND / 2);
        assert_eq!(clock.due(rest, RATE, at(1900), false, PREROLL), at(1000));
    }

    #[test]
    fn reader_who_still_waits_has_not_paused() {
        let mut clock = PlayClock::new(None, 0, at(0));
        clock.answered(at(600), at(500));
        let second = clock.due((SECOND, SECOND), RATE, at(9000), false, PREROLL);
        assert_eq!(second, at(1500));
    }
}
