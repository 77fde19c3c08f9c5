// SPDX-License-Identifier: Apache-2.0
//! Tells a player from a copy by when its reads come, and measures the player's rate.
//!
//! A copy asks again as soon as it is answered: its rate is ours. A player asks when its clock says
//! so: between two of its requests there is a pause in which it waits for nothing, and that pause
//! shrinks when an answer took longer, because the *period* is what it keeps. So reads are grouped
//! into bursts (all that is asked without such a pause), and a rate is given only when
//!
//! 1. there are enough bursts, reads and seconds of them,
//! 2. the client waits for nothing during a good part of the time,
//! 3. the bytes asked for stay close to a straight line over time,
//! 4. the periods are steadier than the pauses: the client follows a clock and not our answers.

use crate::units::*;

/// Bursts remembered; the oldest is forgotten.
const BURST_COUNT_MAX: usize = 32;

/// Bursts needed before anything is said.
const BURST_COUNT_MIN: usize = 6;

/// Reads needed before anything is said.
const READ_COUNT_MIN: u64 = 25;

/// Shortest observation on which a rate is given.
const SPAN_MIN: Duration = Duration::from_s(1);

/// Shortest pause that ends a burst. A copying client's turn-around (network, its own disk's
/// write) is below it; a player at 100 frames a second that asks once a frame is above.
const PAUSE_MIN: Duration = Duration::from_ms(4);

/// A silence this long is a stopped player: what was before it says nothing of what comes after.
const SILENCE: Duration = Duration::from_s(5);

#[derive(Clone, Copy, Debug)]
struct Burst {
    start: Instant,
    bytes: u64,
    reads: u32,
    /// How long the client had waited for nothing when it began.
    pause: Duration,
}

impl Burst {
    const NONE: Burst = Burst {
        start: Instant::ZERO,
        bytes: 0,
        reads: 0,
        pause: Duration::ZERO,
    };
}

/// The rhythm of one client's reads of one file.
#[derive(Clone, Debug)]
pub struct Cadence {
    /// Ring: the newest is at `(first + count - 1) % BURST_COUNT_MAX`.
    bursts: [Burst; BURST_COUNT_MAX],
    first: usize,
    count: usize,
    outstanding_count: u32,
    last_arrived: Instant,
    last_answered: Instant,
}

impl Default for Cadence {
    fn default() -> Cadence {
        Cadence::new()
    }
}

impl Cadence {
    /// Nothing heard yet.
    pub const fn new() -> Cadence {
        Cadence {
            bursts: [Burst::NONE; BURST_COUNT_MAX],
            first: 0,
            count: 0,
            outstanding_count: 0,
            last_arrived: Instant::ZERO,
            last_answered: Instant::ZERO,
        }
    }

    /// The client asked for `bytes` at `now`.
    pub fn read_arrived(&mut self, now: Instant, bytes: ByteCount) {
        if self.count > 0 && now.since(self.last_event()) > SILENCE {
            *self = Cadence::new();
        }
        let pause = self.pause_at(now);
        if self.count == 0 || pause >= PAUSE_MIN {
            self.begin_burst(now, pause);
        }
        let newest = self.newest_index();
        let burst = &mut self.bursts[newest];
        burst.bytes = burst.bytes.saturating_add(bytes.0);
        burst.reads = burst.reads.saturating_add(1);
        self.outstanding_count = self.outstanding_count.saturating_add(1);
        self.last_arrived = now;
    }

    /// One of its reads was answered at `now` (in whatever order).
    pub fn read_answered(&mut self, now: Instant) {
        self.outstanding_count = self.outstanding_count.saturating_sub(1);
        self.last_answered = now;
    }

    /// The rate that the client keeps of its own; None while it is unknown, irregular or ours.
    pub fn rate(&self) -> Option<BytesPerSecond> {
        // The newest burst may still grow: it serves as the end of the one before.
        let complete = self.count.checked_sub(1)?;
        if complete < BURST_COUNT_MIN {
            return None;
        }
        let begin = self.burst(0).start;
        let span = self.burst(complete).start.since(begin);
        let reads: u64 = (0..complete).map(|i| u64::from(self.burst(i).reads)).sum();
        if span < SPAN_MIN || reads < READ_COUNT_MIN {
            return None;
        }
        let rate = self.mean_rate(complete, span)?;
        (self.is_idle_enough(complete, span)
            && self.follows_line(complete, rate)
            && self.follows_a_clock(complete, span))
        .then_some(rate)
    }

    fn mean_rate(&self, complete: usize, span: Duration) -> Option<BytesPerSecond> {
        let bytes: u128 = (0..complete).map(|i| u128::from(self.burst(i).bytes)).sum();
        let rate = bytes.checked_mul(u128::from(NS_PER_S))? / u128::from(span.0.max(1));
        let rate = u64::try_from(rate).ok()?;
        (rate > 0).then_some(BytesPerSecond(rate))
    }

    /// The client waits for nothing during at least a quarter of the time.
    fn is_idle_enough(&self, complete: usize, span: Duration) -> bool {
        let idle: u128 = self.pauses(complete).map(u128::from).sum();
        idle * 4 >= u128::from(span.0)
    }

    /// Bytes asked for never stray far from `rate` times the time.
    fn follows_line(&self, complete: usize, rate: BytesPerSecond) -> bool {
        let begin = self.burst(0).start;
        let largest = (0..complete)
            .map(|i| self.burst(i).bytes)
            .max()
            .unwrap_or(0);
        let total: u64 = (0..complete).fold(0, |sum, i| self.burst(i).bytes.saturating_add(sum));
        let tolerance = largest.saturating_mul(3) / 2 + total / 10;
        let mut asked = 0u64;
        (0..=complete).all(|i| {
            let line = rate.bytes_in(self.burst(i).start.since(begin)).0;
            let near = asked.abs_diff(line) <= tolerance;
            asked = asked.saturating_add(self.burst(i).bytes);
            near
        })
    }

    /// Periods vary less than pauses would if they were the client's own, or hardly vary at all.
    fn follows_a_clock(&self, complete: usize, span: Duration) -> bool {
        let count = complete as u64;
        let period_mean = span.0 / count;
        let pause_mean = self.pauses(complete).fold(0u64, u64::saturating_add) / count;
        let mut period_spread = 0u64;
        let mut pause_spread = 0u64;
        for i in 0..complete {
            let period = self.burst(i + 1).start.since(self.burst(i).start).0;
            period_spread = period_spread.saturating_add(period.abs_diff(period_mean));
            let pause = self.burst(i + 1).pause.0;
            pause_spread = pause_spread.saturating_add(pause.abs_diff(pause_mean));
        }
        let (period_spread, pause_spread) = (period_spread / count, pause_spread / count);
        // Answers that take always the same time leave both steady: a clock, as far as can be told.
        let steady = period_mean / 20;
        period_spread <= steady.max(pause_spread.saturating_mul(3) / 2)
            && period_spread <= period_mean / 2
    }

    fn pauses(&self, complete: usize) -> impl Iterator<Item = u64> + '_ {
        (1..=complete).map(|i| self.burst(i).pause.0)
    }

    fn pause_at(&self, now: Instant) -> Duration {
        if self.outstanding_count > 0 || self.count == 0 {
            return Duration::ZERO;
        }
        now.since(self.last_event())
    }

    fn last_event(&self) -> Instant {
        self.last_arrived.max(self.last_answered)
    }

    fn begin_burst(&mut self, now: Instant, pause: Duration) {
        if self.count == BURST_COUNT_MAX {
            self.first = (self.first + 1) % BURST_COUNT_MAX;
        } else {
            self.count += 1;
        }
        let newest = self.newest_index();
        self.bursts[newest] = Burst {
            start: now,
            pause,
            ..Burst::NONE
        };
    }

    fn newest_index(&self) -> usize {
        (self.first + self.count.max(1) - 1) % BURST_COUNT_MAX
    }

    /// The `age`-th remembered burst, the oldest first.
    fn burst(&self, age: usize) -> &Burst {
        &self.bursts[(self.first + age) % BURST_COUNT_MAX]
    }
}
