// SPDX-License-Identifier: Apache-2.0
//! Tells a player from a copy by when its reads come, and measures the player's rate.
//!
//! A copy asks again as soon as it is answered: its rate is ours. A player asks when its clock says
//! so: between two of its requests there is a pause in which it waits for nothing, and that pause
//! shrinks when an answer took longer, because it keeps the *period*. So reads are grouped into
//! bursts, which have no such pause within, and a rate is given only when
//!
//! 1. there are enough bursts, reads and seconds of them,
//! 2. the client waits for nothing during a good part of the time,
//! 3. the bytes asked for stay close to a straight line over time,
//! 4. the periods are steadier than the pauses: the client follows a clock and not our answers.

use super::places::Places;
use crate::units::*;

/// Bursts remembered; the oldest is forgotten.
const BURST_COUNT_MAX: usize = 32;

/// Bursts needed before a rate is given.
const BURST_COUNT_MIN: usize = 6;

/// So many bursts at the beginning may be a player filling its buffers.
const FILL_COUNT_MAX: u64 = 4;

/// Reads needed before a rate is given.
const READ_COUNT_MIN: u64 = 25;

/// Shortest observation on which a rate is given.
const SPAN_MIN: Duration = Duration::from_s(1);

/// Shortest pause that ends a burst. A copying client's turn-around, for the network and a write to
/// its own disk, is below it; a player at 100 frames a second that asks once a frame is above.
const PAUSE_MIN: Duration = Duration::from_ms(4);

/// A silence this long is a stopped player: reads before it say nothing of those that come after.
const SILENCE: Duration = Duration::from_s(5);

/// No frame is read for so long, and in pieces with pauses between them. The bytes keep small files
/// out.
const LONG_SPAN: Duration = Duration::from_s(3);
const LONG_BYTES: u64 = 4 << 20;

/// The least span over which a client's recent reads are judged; the last one and the one under way
/// count.
const LATELY: Duration = Duration::from_s(1);

/// A client's recent reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lately {
    /// The part of the time in which it waited for nothing, in thousandths.
    pub idle_permille: u64,
    /// The bytes that it asked for, by the time that took.
    pub rate: BytesPerSecond,
}

/// A part of the time.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: Instant,
    idle: Duration,
    bytes: u64,
}

impl Span {
    const fn at(start: Instant) -> Span {
        Span {
            start,
            idle: Duration::ZERO,
            bytes: 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    start: Instant,
    bytes: u64,
    reads: u32,
    /// How long the client had been idle when it began.
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
    /// Bursts since the beginning, forgotten ones included.
    begun_count: u64,
    outstanding_count: u32,
    last_arrived: Instant,
    last_answered: Instant,
    /// The time since the first read: all of it, the last span, and the time since that.
    all: Span,
    span: Span,
    now: Span,
    /// The places that it has read in that time, and the time up to its last read of a new one.
    places: Places,
    anew: Span,
    anew_until: Instant,
}

impl Default for Cadence {
    fn default() -> Cadence {
        Cadence::new()
    }
}

impl Cadence {
    /// No reads yet.
    pub const fn new() -> Cadence {
        Cadence {
            bursts: [Burst::NONE; BURST_COUNT_MAX],
            first: 0,
            count: 0,
            begun_count: 0,
            outstanding_count: 0,
            last_arrived: Instant::ZERO,
            last_answered: Instant::ZERO,
            all: Span::at(Instant::ZERO),
            span: Span::at(Instant::ZERO),
            now: Span::at(Instant::ZERO),
            places: Places::new(),
            anew: Span::at(Instant::ZERO),
            anew_until: Instant::ZERO,
        }
    }

    /// The client asked for `range` of the one file that this is about, at `now`.
    pub fn read_arrived_at(&mut self, now: Instant, range: ByteRange) {
        self.read_arrived(now, range.length);
        let anew = self.places.read(range).0;
        if anew > 0 {
            self.anew = Span {
                start: self.all.start,
                idle: self.all.idle,
                bytes: self.anew.bytes.saturating_add(anew),
            };
            self.anew_until = now;
        }
    }

    /// The client asked for `bytes` at `now`.
    pub fn read_arrived(&mut self, now: Instant, bytes: ByteCount) {
        if self.count > 0 && now.since(self.last_event()) > SILENCE {
            *self = Cadence::new();
        }
        let pause = self.pause_at(now);
        self.remember(now, pause, bytes.0);
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

    /// One of its reads was answered at `now`, in any order.
    pub fn read_answered(&mut self, now: Instant) {
        self.outstanding_count = self.outstanding_count.saturating_sub(1);
        self.last_answered = now;
    }

    /// When a read was last answered.
    pub fn last_answered(&self) -> Instant {
        self.last_answered
    }

    /// The client's reads in the last second or two. None: it has not read for so long.
    pub fn lately(&self) -> Option<Lately> {
        let span = self.last_arrived.since(self.span.start);
        if span < LATELY {
            return None;
        }
        let of = |whole: u64, part: u64| u128::from(part) * 1000 / u128::from(whole.max(1));
        let idle = self.span.idle + self.now.idle;
        // Bytes that it has just asked for it has not had yet.
        let bytes = u128::from(self.span.bytes.saturating_add(self.now.bytes));
        let rate = bytes * u128::from(NS_PER_S) / u128::from(span.0);
        Some(Lately {
            idle_permille: of(span.0, idle.0.min(span.0)) as u64,
            rate: BytesPerSecond(u64::try_from(rate).unwrap_or(u64::MAX)),
        })
    }

    /// The client goes on in this one file at its own leisure: megabytes that it had not read
    /// before, for seconds, or steadily for one, and not because we are slow. A client that stands
    /// still at a frame reads it again and again.
    pub fn is_long(&self) -> bool {
        let span = self.anew_until.since(self.anew.start);
        let is_idle = self.anew.idle.0.saturating_mul(4) >= span.0;
        let goes_on = self.anew.bytes >= LONG_BYTES && is_idle;
        goes_on && (span >= LONG_SPAN || span >= SPAN_MIN && self.rate().is_some())
    }

    /// All `size` bytes of the file were read, one after another and at once: as a frame is.
    pub fn is_of_a_frame(&self, size: ByteCount) -> bool {
        let span = self.anew_until.since(self.anew.start);
        self.count > 0 && span < SPAN_MIN && self.anew.bytes >= size.0
    }

    /// Anything was asked for.
    pub fn is_known(&self) -> bool {
        self.count > 0
    }

    fn remember(&mut self, now: Instant, pause: Duration, bytes: u64) {
        if self.count == 0 {
            self.all = Span::at(now);
            self.span = Span::at(now);
            self.now = Span::at(now);
        }
        if now.since(self.now.start) >= LATELY {
            self.span = self.now;
            self.now = Span::at(now);
            // The pause that ends here belongs to the span before.
            self.span.idle += idle(pause);
        } else {
            self.now.idle += idle(pause);
        }
        self.now.bytes = self.now.bytes.saturating_add(bytes);
        self.all.bytes = self.all.bytes.saturating_add(bytes);
        self.all.idle += idle(pause);
    }

    /// The rate that the client keeps of its own; None while it is unknown, irregular or ours.
    pub fn rate(&self) -> Option<BytesPerSecond> {
        let window = self.window()?;
        let rate = window.mean_rate()?;
        (window.is_idle_enough() && window.follows_line(rate) && window.follows_a_clock())
            .then_some(rate)
    }

    /// The bursts that can be judged. None: too few.
    fn window(&self) -> Option<Window<'_>> {
        // The newest burst may still grow: it serves as the end of the one before.
        let newest = self.count.checked_sub(1)?;
        let first = self.fill_count(newest);
        let window = Window {
            cadence: self,
            first,
            count: newest - first,
            span: self.burst(newest).start.since(self.burst(first).start),
        };
        let enough = window.count >= BURST_COUNT_MIN
            && window.span >= SPAN_MIN
            && window.bursts().map(|b| u64::from(b.reads)).sum::<u64>() >= READ_COUNT_MIN;
        enough.then_some(window)
    }

    /// How many of the remembered bursts are a player filling its buffers: the first few of all,
    /// when they are much larger than the later ones.
    fn fill_count(&self, newest: usize) -> usize {
        let forgotten = self.begun_count - self.count as u64;
        let suspect_count = FILL_COUNT_MAX.saturating_sub(forgotten) as usize;
        let suspects = (0..suspect_count.min(newest)).rev();
        let is_fill = |i: &usize| {
            let later: u128 = (i + 1..newest)
                .map(|n| u128::from(self.burst(n).bytes))
                .sum();
            let count = (newest - i - 1) as u128;
            count >= BURST_COUNT_MIN as u128 && u128::from(self.burst(*i).bytes) * count > later * 2
        };
        suspects.into_iter().find(is_fill).map_or(0, |i| i + 1)
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
        self.begun_count += 1;
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

/// A pause that counts as one.
fn idle(pause: Duration) -> Duration {
    match pause >= PAUSE_MIN {
        true => pause,
        false => Duration::ZERO,
    }
}

/// The complete bursts that are judged.
struct Window<'a> {
    cadence: &'a Cadence,
    first: usize,
    /// At least [`BURST_COUNT_MIN`].
    count: usize,
    span: Duration,
}

impl Window<'_> {
    fn burst(&self, i: usize) -> &Burst {
        self.cadence.burst(self.first + i)
    }

    fn bursts(&self) -> impl Iterator<Item = &Burst> {
        (0..self.count).map(|i| self.burst(i))
    }

    fn mean_rate(&self) -> Option<BytesPerSecond> {
        let bytes: u128 = self.bursts().map(|burst| u128::from(burst.bytes)).sum();
        let rate = bytes.checked_mul(u128::from(NS_PER_S))? / u128::from(self.span.0.max(1));
        let rate = u64::try_from(rate).ok()?;
        (rate > 0).then_some(BytesPerSecond(rate))
    }

    /// The client waits for nothing during at least a quarter of the time.
    fn is_idle_enough(&self) -> bool {
        let idle: u128 = self.pauses().map(u128::from).sum();
        idle * 4 >= u128::from(self.span.0)
    }

    /// Bytes asked for never stray far from `rate` times the time.
    fn follows_line(&self, rate: BytesPerSecond) -> bool {
        let begin = self.burst(0).start;
        let largest = self.bursts().map(|burst| burst.bytes).max().unwrap_or(0);
        let total = self
            .bursts()
            .fold(0, |sum, burst| burst.bytes.saturating_add(sum));
        let tolerance = (largest / 2)
            .saturating_add(largest)
            .saturating_add(total / 10);
        let mut asked = 0u64;
        (0..=self.count).all(|i| {
            let line = rate.bytes_in(self.burst(i).start.since(begin)).0;
            let near = asked.abs_diff(line) <= tolerance;
            asked = asked.saturating_add(self.burst(i).bytes);
            near
        })
    }

    /// Periods vary less than pauses would if they were the client's own, or hardly vary at all.
    fn follows_a_clock(&self) -> bool {
        let period_mean = self.span.0 / self.count as u64;
        let period_spread = mean_deviation(self.periods(), self.count as u64);
        let pause_spread = mean_deviation(self.pauses(), self.count as u64);
        // Answers that take always the same time leave both steady: a clock, as far as can be told.
        let steady = period_mean / 20;
        period_spread <= steady.max((pause_spread / 2).saturating_add(pause_spread))
            && period_spread <= period_mean / 2
    }

    /// From the start of each burst to the start of the next. Units: ns.
    fn periods(&self) -> impl Iterator<Item = u64> + Clone {
        (0..self.count).map(|i| self.burst(i + 1).start.since(self.burst(i).start).0)
    }

    /// Before each burst but the first. Units: ns.
    fn pauses(&self) -> impl Iterator<Item = u64> + Clone {
        (0..self.count).map(|i| self.burst(i + 1).pause.0)
    }
}

fn mean_deviation(values: impl Iterator<Item = u64> + Clone, count: u64) -> u64 {
    let sum = |values: &mut dyn Iterator<Item = u64>| values.fold(0, u64::saturating_add);
    let mean = sum(&mut values.clone()) / count.max(1);
    sum(&mut values.map(|value| value.abs_diff(mean))) / count.max(1)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Random;
    use super::*;
    use alloc::vec::Vec;

    /// The shape of one request of a client.
    struct Request {
        wait: Duration,
        pieces: u32,
        piece_bytes: u64,
        service: Duration,
    }

    /// Plays requests: each arrives `wait` after the clock of the one before, as a player's, or
    /// after its last answer, as a copy's.
    fn play(paced: bool, requests: impl Iterator<Item = Request>) -> Vec<Option<BytesPerSecond>> {
        let mut cadence = Cadence::new();
        let mut clock = Instant(1_000_000_000);
        let mut answered = clock;
        let mut rates = Vec::new();
        for request in requests {
            clock = if paced {
                clock + request.wait
            } else {
                answered + request.wait
            };
            let arrival = clock.max(answered);
            for _ in 0..request.pieces {
                cadence.read_arrived(arrival, ByteCount(request.piece_bytes));
            }
            rates.push(cadence.rate());
            answered = arrival;
            for _ in 0..request.pieces {
                answered = answered + request.service;
                cadence.read_answered(answered);
            }
        }
        rates
    }

    fn near(rate: Option<BytesPerSecond>, expect: u64, percent: u64) -> bool {
        rate.is_some_and(|rate| rate.0.abs_diff(expect) * 100 <= expect * percent)
    }

    fn between_ms(random: &mut Random, low: u64, high: u64) -> Duration {
        Duration::from_us(random.between(low * 1000, high * 1000))
    }

    #[test]
    fn a_player_that_reads_a_frame_at_a_time_has_its_rate() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let pieces = random.between(1, 8) as u32;
            let slowest = random.between(1, 25);
            let rates = play(
                true,
                (0..240).map(|_| Request {
                    wait: Duration::from_us(41_667),
                    pieces,
                    piece_bytes: 480_000 / u64::from(pieces),
                    service: Duration(between_ms(&mut random, 0, slowest).0 / u64::from(pieces)),
                }),
            );
            assert!(rates[..24].iter().all(Option::is_none), "seed {seed}");
            let count = rates[30..]
                .iter()
                .filter(|rate| near(**rate, 11_520_000, 3))
                .count();
            assert!(count >= 200, "seed {seed}: {count} of 210, {:?}", rates[60]);
        }
    }

    #[test]
    fn frames_of_different_size_and_a_trembling_clock_have_their_mean_rate() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let mut tremble = Duration::ZERO;
            let mut steps = Random(seed + 1000);
            let rates = play(
                true,
                (0..500).map(|_| {
                    let next = between_ms(&mut steps, 0, 5);
                    let wait = Duration::from_ms(40) + next - tremble;
                    tremble = next;
                    Request {
                        wait,
                        pieces: 1,
                        piece_bytes: random.between(350_000, 650_000),
                        service: between_ms(&mut random, 0, 15),
                    }
                }),
            );
            let count = rates[50..]
                .iter()
                .filter(|rate| near(**rate, 12_500_000, 12))
                .count();
            assert!(count >= 400, "seed {seed}: {count} of 450");
        }
    }

    #[test]
    fn a_player_that_fetches_a_second_at_a_time_has_its_rate() {
        let rates = play(
            true,
            (0..60).map(|_| Request {
                wait: Duration::from_s(1),
                pieces: 12,
                piece_bytes: 1 << 20,
                service: Duration::from_ms(15),
            }),
        );
        assert!(near(rates[59], 12 << 20, 1), "{:?}", rates[59]);
    }

    #[test]
    fn what_a_player_fills_its_buffers_with_is_not_its_rate() {
        let mut random = Random(3);
        let rates = play(
            true,
            (0..200).map(|n| Request {
                wait: Duration::from_ms(40),
                pieces: if n == 0 { 25 } else { 1 },
                piece_bytes: 500_000,
                service: if n == 0 {
                    Duration::from_ms(1)
                } else {
                    between_ms(&mut random, 1, 20)
                },
            }),
        );
        assert!(
            rates.iter().flatten().all(|rate| rate.0 < 14_000_000),
            "{rates:?}"
        );
        assert!(near(rates[60], 12_500_000, 5), "{:?}", rates[60]);
    }

    #[test]
    fn a_copy_has_no_rate() {
        for seed in 0..300 {
            let mut random = Random(seed);
            let pieces = random.between(1, 4) as u32;
            let turnaround = random.between(0, 12);
            let slowest = random.between(5, 60);
            let rates = play(
                false,
                (0..400).map(|_| Request {
                    wait: between_ms(&mut random, turnaround / 2, turnaround + 1),
                    pieces,
                    piece_bytes: 1 << 20,
                    service: between_ms(&mut random, 1, slowest),
                }),
            );
            let wrong = rates.iter().flatten().count();
            assert!(wrong * 50 <= rates.len(), "seed {seed}: {wrong} of 400");
        }
    }

    #[test]
    fn a_copy_that_keeps_two_reads_in_flight_has_no_rate() {
        let mut cadence = Cadence::new();
        let mut now = Instant(1);
        cadence.read_arrived(now, ByteCount(8 << 20));
        cadence.read_arrived(now, ByteCount(8 << 20));
        for _ in 0..1000 {
            now = now + Duration::from_ms(70);
            cadence.read_answered(now);
            cadence.read_arrived(now + Duration::from_us(300), ByteCount(8 << 20));
            assert_eq!(cadence.rate(), None);
        }
    }

    #[test]
    fn what_a_client_did_lately_tells_a_copy_from_a_player() {
        let mut copy = Cadence::new();
        let mut player = Cadence::new();
        let mut now = Instant(1);
        copy.read_arrived(now, ByteCount(8 << 20));
        for n in 0..200u64 {
            copy.read_arrived(now, ByteCount(8 << 20));
            player.read_arrived(now, ByteCount(500_000));
            player.read_answered(now + Duration::from_ms(6));
            now = now + Duration::from_ms(40);
            copy.read_answered(now);
            if n < 24 {
                assert_eq!((copy.lately(), player.lately()), (None, None));
            }
        }
        let (copying, playing) = (copy.lately().unwrap(), player.lately().unwrap());
        assert_eq!(copying.idle_permille, 0);
        assert!(
            copying.rate.0.abs_diff(25 * (8 << 20)) < 12 << 20,
            "{copying:?}"
        );
        assert!((800..=860).contains(&playing.idle_permille), "{playing:?}");
        assert!(
            playing.rate.0.abs_diff(12_500_000) < 1_000_000,
            "{playing:?}"
        );
        // The player has stopped: its earlier reads say nothing any more.
        player.read_arrived(now + Duration::from_s(30), ByteCount(500_000));
        assert_eq!(player.lately(), None);
    }

    #[test]
    fn whoever_reads_the_same_again_does_not_go_on() {
        let ask = |cadence: &mut Cadence, n: u64, at: u64, service: Duration| {
            let now = Instant(1) + Duration::from_ms(40 * n);
            cadence.read_arrived_at(now, ByteRange::new(at * 500_000, 500_000));
            cadence.read_answered(now + service);
        };
        let quick = Duration::from_ms(6);
        let mut player = Cadence::new();
        let mut copy = Cadence::new();
        for n in 0..200 {
            ask(&mut player, n, n, quick);
            ask(&mut copy, n, n, Duration::from_ms(39));
            assert!(n >= 24 || !player.is_long(), "{n}");
        }
        assert!(player.is_long() && !copy.is_long());
        // The player has stopped: its earlier reads say nothing any more.
        ask(&mut player, 1000, 200, quick);
        assert!(!player.is_long());
        // A frame of any size, read at once or as slowly as we answer, and again and again.
        for (places, service) in [(1, quick), (24, quick), (50, Duration::from_ms(39))] {
            let mut paused = Cadence::new();
            for n in 0..1000 {
                let service = if n < places { service } else { quick };
                let burst = if n < places && places == 24 { 0 } else { n };
                ask(&mut paused, burst, n % places, service);
                assert!(!paused.is_long(), "{places} {n}");
            }
        }
    }

    /// A thumbnailer looks here and there; it has read nothing between.
    #[test]
    fn a_frame_is_read_whole() {
        const MIB: u64 = 1 << 20;
        let read = |places: &mut dyn Iterator<Item = u64>, length: u64| {
            let mut cadence = Cadence::new();
            for (n, place) in (0..).zip(places) {
                let now = Instant(1) + Duration::from_ms(n);
                cadence.read_arrived_at(now, ByteRange::new(place, length));
                cadence.read_answered(now);
            }
            cadence.is_of_a_frame(ByteCount(100 * MIB))
        };
        assert!(read(&mut (0..100).map(|n| n * MIB), MIB));
        // Every other one, and in the end those between the last of them.
        let looks = (0..50)
            .map(|n| 2 * n)
            .chain((80..100).filter(|n| n % 2 > 0));
        assert!(!read(&mut looks.map(|n| n * MIB), MIB));
    }

    #[test]
    fn reads_at_any_time_of_any_length_have_no_rate() {
        let mut wrong = 0;
        for seed in 0..100 {
            let mut random = Random(seed);
            let rates = play(
                true,
                (0..300).map(|_| Request {
                    wait: Duration::from_us(1 << random.between(8, 19)),
                    pieces: 1,
                    piece_bytes: 1 << random.between(12, 18),
                    service: between_ms(&mut random, 1, 10),
                }),
            );
            wrong += rates.iter().flatten().count();
        }
        assert!(wrong < 300, "{wrong} of 30000");
    }

    #[test]
    fn a_pause_forgets_the_rate_and_play_finds_it_again() {
        let frames = |first: Duration| {
            (0..100).map(move |n| Request {
                wait: if n == 0 { first } else { Duration::from_ms(40) },
                pieces: 1,
                piece_bytes: 500_000,
                service: Duration::from_ms(3),
            })
        };
        let rates = play(
            true,
            frames(Duration::ZERO).chain(frames(Duration::from_s(60))),
        );
        assert!(near(rates[99], 12_500_000, 1));
        assert_eq!(rates[100], None);
        assert_eq!(rates[120], None);
        assert!(near(rates[199], 12_500_000, 1));
    }

    #[test]
    fn answers_that_were_never_asked_for_and_clocks_that_jump_do_no_harm() {
        let mut random = Random(1);
        let mut cadence = Cadence::new();
        for _ in 0..10_000 {
            let now = Instant(random.next() >> random.below(64));
            if random.below(2) == 0 {
                cadence.read_arrived(now, ByteCount(random.next() >> random.below(64)));
            } else {
                cadence.read_answered(now);
            }
            let _ = cadence.rate();
        }
    }
}
