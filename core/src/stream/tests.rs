// SPDX-License-Identifier: Apache-2.0
//! The recogniser before readers of every kind, each with a prefetcher that believes every word.
//!
//! [`Prefetcher`] takes all predictions and keeps the books: bytes that were predicted, bytes that
//! were asked for, bytes that were predicted in vain.

use super::*;
use crate::units::*;
use alloc::vec;
use alloc::vec::Vec;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// SplitMix64: a seed lives for years.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Disjoint ascending ranges.
#[derive(Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn add(&mut self, range: ByteRange) {
        let (mut start, mut end) = (range.start.0, range.end());
        self.0.retain(|&(s, e)| {
            let apart = e < start || end < s;
            if !apart {
                start = start.min(s);
                end = end.max(e);
            }
            apart
        });
        let at = self.0.partition_point(|&(s, _)| s < start);
        self.0.insert(at, (start, end));
    }

    /// Bytes of `range` that are here.
    fn common(&self, range: ByteRange) -> u64 {
        let shared = |&(s, e): &(u64, u64)| e.min(range.end()).saturating_sub(s.max(range.start.0));
        self.0.iter().map(shared).sum()
    }
}

struct Prefetcher {
    recogniser: Recogniser,
    now: Instant,
    file_size: u64,
    ahead_bytes: u64,
    from: [Option<u64>; CURSOR_COUNT_MAX],
    predicted: Ranges,
    asked: Ranges,
    predicted_bytes: u64,
    /// Predicted although it had been predicted before, or asked for.
    twice_bytes: u64,
    jumps: Vec<(CursorIndex, CursorIndex)>,
    begun_count: u32,
}

struct Seen {
    cursor: CursorIndex,
    pattern: Pattern,
    moved: Moved,
    /// Bytes of the read that had been predicted.
    hit_bytes: u64,
}

impl Prefetcher {
    fn new(file_size: u64, ahead_bytes: u64) -> Prefetcher {
        Prefetcher {
            recogniser: Recogniser::new(),
            now: Instant(1_000_000_000),
            file_size,
            ahead_bytes,
            from: [None; CURSOR_COUNT_MAX],
            predicted: Ranges::default(),
            asked: Ranges::default(),
            predicted_bytes: 0,
            twice_bytes: 0,
            jumps: vec![],
            begun_count: 0,
        }
    }

    fn read(&mut self, wait: Duration, start: u64, length: u64) -> Seen {
        self.now = self.now + wait;
        let range = ByteRange::new(start, length);
        let hit_bytes = self.predicted.common(range);
        self.asked.add(range);
        let seen = self.recogniser.observe(self.now, range);
        let slot = usize::from(seen.cursor.0);
        match seen.moved {
            Moved::Began => {
                self.from[slot] = None;
                self.begun_count += 1;
            }
            Moved::Continued => {}
            Moved::Jumped { from } => self.jumps.push((from, seen.cursor)),
        }
        self.believe(seen.cursor);
        Seen {
            cursor: seen.cursor,
            pattern: seen.pattern,
            moved: seen.moved,
            hit_bytes,
        }
    }

    fn believe(&mut self, index: CursorIndex) {
        let cursor = self.recogniser.cursor(index).unwrap().clone();
        let from = self.from[usize::from(index.0)].unwrap_or(cursor.position());
        let backwards = match cursor.pattern() {
            Pattern::Reverse => true,
            Pattern::Strided { stride } => stride < 0,
            _ => false,
        };
        let distance = if backwards {
            cursor.position().saturating_sub(from)
        } else {
            from.saturating_sub(cursor.position())
        };
        let reached = match cursor.pattern() {
            // A frame a stride lies in between.
            Pattern::Strided { stride } => distance / stride.unsigned_abs() * cursor.read_bytes(),
            _ => distance,
        };
        if reached >= self.ahead_bytes {
            return;
        }
        for range in cursor.ahead(from, self.ahead_bytes - reached, self.file_size) {
            assert!(range.length.0 > 0 && range.end() <= self.file_size);
            self.twice_bytes += self.predicted.common(range) + self.asked.common(range);
            self.predicted.add(range);
            self.predicted_bytes += range.length.0;
            let edge = if backwards {
                range.start.0
            } else {
                range.end()
            };
            self.from[usize::from(index.0)] = Some(edge);
        }
    }
}

const BURST: Duration = Duration::from_us(50);
const FRAME: Duration = Duration::from_ms(40);

// ---- Forward ----

#[test]
fn the_first_read_from_the_first_byte_is_presumed_sequential() {
    let mut recogniser = Recogniser::new();
    let seen = recogniser.observe(Instant(1), ByteRange::new(0, MIB));
    assert_eq!(seen.pattern, Pattern::Sequential);
    assert_eq!(seen.moved, Moved::Began);
    let cursor = recogniser.cursor(seen.cursor).unwrap();
    assert!(!cursor.is_confirmed());
    let ahead: Vec<_> = cursor.ahead(cursor.position(), 4 * MIB, GIB).collect();
    assert_eq!(ahead, [ByteRange::new(MIB, 4 * MIB)]);
}

#[test]
fn a_first_read_elsewhere_predicts_nothing_until_it_is_read_on() {
    let mut p = Prefetcher::new(GIB, 8 * MIB);
    assert_eq!(p.read(BURST, 100 * MIB, MIB).pattern, Pattern::Unknown);
    assert_eq!(p.predicted_bytes, 0);
    assert_eq!(p.read(BURST, 101 * MIB, MIB).pattern, Pattern::Sequential);
    assert_eq!(p.predicted_bytes, 8 * MIB);
}

#[test]
fn predictions_end_with_the_file() {
    let mut recogniser = Recogniser::new();
    let seen = recogniser.observe(Instant(1), ByteRange::new(0, MIB));
    let cursor = recogniser.cursor(seen.cursor).unwrap();
    let ahead = |size: u64| cursor.ahead(0, 64 * MIB, size).collect::<Vec<_>>();
    assert_eq!(ahead(MIB), []);
    assert_eq!(ahead(100), []);
    assert_eq!(ahead(0), []);
    assert_eq!(ahead(MIB + 5), [ByteRange::new(MIB, 5)]);
}

/// Orders in which `count` reads of a client with at most 16 outstanding can arrive.
fn pipelined_order(random: &mut Random, kind: u64, count: usize) -> Vec<usize> {
    let mut order = vec![];
    match kind {
        // A window that slides with its oldest read.
        0 => {
            let mut waiting: Vec<usize> = (0..count.min(16)).collect();
            let mut sent = waiting.len();
            while !waiting.is_empty() {
                let able = waiting.iter().filter(|&&i| i < waiting[0] + 16).count();
                order.push(waiting.remove(random.below(able as u64) as usize));
                if sent < count {
                    waiting.push(sent);
                    sent += 1;
                }
            }
        }
        kind => {
            let mut start = 0;
            while start < count {
                let end = (start + random.between(1, 16) as usize).min(count);
                let mut volley: Vec<usize> = (start..end).collect();
                match kind {
                    1 => random.shuffle(&mut volley),
                    2 => volley.reverse(),
                    _ => volley.sort_by_key(|i| (i % 2, *i)),
                }
                order.extend(volley);
                start = end;
            }
        }
    }
    order
}

#[test]
fn pipelined_order_keeps_within_its_window() {
    let mut random = Random(7);
    for _ in 0..200 {
        let kind = random.below(4);
        let order = pipelined_order(&mut random, kind, 100);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..100));
        let place = |i: usize| order.iter().position(|&other| other == i).unwrap();
        assert!((0..84).all(|i| place(i) < place(i + 16)));
    }
}

#[test]
fn any_order_within_sixteen_outstanding_reads_is_sequential_and_predicted_once() {
    for seed in 0..2000 {
        let mut random = Random(seed);
        let alike = random.below(2) == 0;
        let read_bytes = *random.pick(&[4 * KIB, 64 * KIB, MIB, 8 * MIB]);
        let from_zero = random.below(2) == 0;
        let base = if from_zero { 0 } else { random.below(GIB) };
        let mut ranges = vec![];
        let mut at = base;
        for _ in 0..160 {
            let length = if alike {
                read_bytes
            } else {
                random.between(read_bytes / 2, read_bytes)
            };
            ranges.push((at, length));
            at += length;
        }
        let mut p = Prefetcher::new(at + GIB, 32 * read_bytes);
        let kind = random.below(4);
        // Reads that are sent at once come at once; a window slides as fast as its reads are
        // answered.
        let slow = kind == 0 && random.below(2) == 0;
        let order = pipelined_order(&mut random, kind, ranges.len());
        for (n, i) in order.into_iter().enumerate() {
            let (start, length) = ranges[i];
            let wait = if slow && n >= 16 {
                Duration::from_ms(15)
            } else {
                BURST
            };
            let seen = p.read(wait, start, length);
            let context = alloc::format!("seed {seed}, arrival {n}, read {i}");
            // The read that came first may have been any of the first sixteen.
            if n >= 32 {
                assert_eq!(seen.pattern, Pattern::Sequential, "{context}");
                assert_eq!(seen.moved, Moved::Continued, "{context}");
                assert_eq!(seen.hit_bytes, length, "{context}");
            }
            if from_zero && i == 0 && n == 0 {
                assert_eq!(seen.pattern, Pattern::Sequential, "{context}");
            }
        }
        assert_eq!(p.twice_bytes, 0, "seed {seed}");
        assert!(p.jumps.is_empty(), "seed {seed}");
        let cursor = p.recogniser.cursors().next().unwrap().1;
        assert_eq!(cursor.position(), at, "seed {seed}");
    }
}

#[test]
fn smbclient_with_two_reads_of_8_mib_in_either_order() {
    let mut p = Prefetcher::new(10 * GIB, 64 * MIB);
    for pair in 0..40 {
        let (a, b) = (2 * pair * 8 * MIB, (2 * pair + 1) * 8 * MIB);
        let second = p.read(BURST, b, 8 * MIB);
        let first = p.read(BURST, a, 8 * MIB);
        assert_eq!(first.pattern, Pattern::Sequential);
        assert!(pair < 1 || second.hit_bytes + first.hit_bytes == 16 * MIB);
    }
    assert_eq!(p.twice_bytes, 0);
    assert_eq!(p.recogniser.cursors().count(), 1);
}

#[test]
fn skipped_bytes_do_not_hold_the_position_back() {
    // Picture without sound: 900 KiB are read, 100 KiB left out.
    let mut p = Prefetcher::new(GIB, 8 * MIB);
    for frame in 0..100 {
        let seen = p.read(FRAME, frame * 1000 * KIB, 900 * KIB);
        assert_ne!(seen.pattern, Pattern::Random);
        if frame > 20 {
            assert_eq!(seen.hit_bytes, 900 * KIB, "frame {frame}");
        }
    }
    assert_eq!(p.recogniser.cursors().count(), 1);
    let cursor = p.recogniser.cursors().next().unwrap().1;
    assert!(
        cursor.position() >= 98 * 1000 * KIB,
        "{}",
        cursor.position()
    );
}

// ---- Shuttle ----

struct Shuttle {
    /// Start and length of every frame.
    frames: Vec<(u64, u64)>,
    pieces: u64,
    shuffled: bool,
}

impl Shuttle {
    fn random(random: &mut Random) -> Shuttle {
        let frame_bytes = random.between(100 * KIB, 4 * MIB);
        let spread = *random.pick(&[0, 0, 10]);
        let mut at = random.below(MIB);
        let mut frames = vec![];
        for _ in 0..400 {
            let most = frame_bytes * spread / 100;
            let length = frame_bytes - most + random.below(2 * most + 1);
            frames.push((at, length));
            at += length;
        }
        Shuttle {
            frames,
            pieces: random.between(1, 8),
            shuffled: false,
        }
    }

    fn is_even(&self) -> bool {
        self.frames.windows(2).all(|pair| pair[0].1 == pair[1].1)
    }

    fn file_size(&self) -> u64 {
        self.frames
            .last()
            .map_or(0, |(start, length)| start + length)
    }

    /// Reads one frame; returns the pattern after its last piece, and how much of the frame was
    /// predicted.
    fn read(&self, random: &mut Random, p: &mut Prefetcher, frame: usize) -> (Pattern, u64) {
        let (start, length) = self.frames[frame];
        let piece_bytes = length.div_ceil(self.pieces);
        let mut pieces: Vec<u64> = (0..length.div_ceil(piece_bytes)).collect();
        if self.shuffled {
            random.shuffle(&mut pieces);
        }
        let mut pattern = Pattern::Unknown;
        let mut hit_bytes = 0;
        for (n, piece) in pieces.into_iter().enumerate() {
            let from = piece * piece_bytes;
            let wait = if n == 0 { FRAME } else { BURST };
            let seen = p.read(wait, start + from, piece_bytes.min(length - from));
            pattern = seen.pattern;
            hit_bytes += seen.hit_bytes;
        }
        (pattern, hit_bytes)
    }
}

#[test]
fn reverse_play_is_recognised_within_five_frames_and_predicted() {
    for seed in 0..500 {
        let mut random = Random(seed);
        let shuttle = Shuttle::random(&mut random);
        let mut p = Prefetcher::new(shuttle.file_size(), 16 * MIB);
        for (n, frame) in (300..399).rev().enumerate() {
            let (pattern, hit_bytes) = shuttle.read(&mut random, &mut p, frame);
            if n == 4 {
                p.twice_bytes = 0;
            }
            if n >= 5 {
                assert_eq!(pattern, Pattern::Reverse, "seed {seed}, frame {n}");
                assert_eq!(hit_bytes, shuttle.frames[frame].1, "seed {seed}, frame {n}");
            }
        }
        assert_eq!(p.twice_bytes, 0, "seed {seed}");
    }
}

#[test]
fn reverse_play_whose_pieces_arrive_in_any_order_is_recognised() {
    for seed in 0..500 {
        let mut random = Random(seed);
        let shuttle = Shuttle {
            shuffled: true,
            ..Shuttle::random(&mut random)
        };
        let mut p = Prefetcher::new(shuttle.file_size(), 16 * MIB);
        let mut hit_count = 0;
        for frame in (300..399).rev() {
            let (_, hit_bytes) = shuttle.read(&mut random, &mut p, frame);
            hit_count += u32::from(hit_bytes == shuttle.frames[frame].1);
        }
        assert!(hit_count >= 80, "seed {seed}: {hit_count} of 99 frames");
    }
}

#[test]
fn reverse_after_forward_after_reverse() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let shuttle = Shuttle::random(&mut random);
        let mut p = Prefetcher::new(shuttle.file_size(), 8 * MIB);
        let mut check = |frames: &mut dyn Iterator<Item = usize>, expect: Pattern| {
            for (n, frame) in frames.enumerate() {
                let (pattern, _) = shuttle.read(&mut random, &mut p, frame);
                if n >= 6 {
                    assert_eq!(pattern, expect, "seed {seed}, frame {n} ({frame})");
                }
            }
        };
        check(&mut (0..200), Pattern::Sequential);
        check(&mut (100..199).rev(), Pattern::Reverse);
        check(&mut (101..250), Pattern::Sequential);
        check(&mut (50..249).rev(), Pattern::Reverse);
    }
}

#[test]
fn fast_forward_by_every_nth_frame_is_strided() {
    let (mut uneven_bytes, mut uneven_hits) = (0, 0);
    for seed in 0..500 {
        let mut random = Random(seed);
        let shuttle = Shuttle::random(&mut random);
        let step = random.between(2, 10) as usize;
        let backwards = random.below(2) == 0;
        let mut p = Prefetcher::new(shuttle.file_size(), 32 * MIB);
        let mut frames: Vec<usize> = (0..400).step_by(step).collect();
        if backwards {
            frames.reverse();
        }
        let (mut frame_bytes, mut hits) = (0, 0);
        for (n, &frame) in frames.iter().enumerate() {
            let (pattern, hit_bytes) = shuttle.read(&mut random, &mut p, frame);
            if n >= 9 {
                let right =
                    matches!(pattern, Pattern::Strided { stride } if (stride < 0) == backwards);
                assert!(right, "seed {seed}, frame {n}: {pattern:?}");
            }
            if n >= 10 {
                frame_bytes += shuttle.frames[frame].1;
                hits += hit_bytes;
            }
        }
        if shuttle.is_even() {
            assert_eq!(hits, frame_bytes, "seed {seed}");
        } else {
            uneven_bytes += frame_bytes;
            uneven_hits += hits;
        }
    }
    // Where frames differ in size, the place of those farther off is a guess.
    assert!(
        uneven_hits * 100 >= uneven_bytes * 90,
        "{uneven_hits} of {uneven_bytes}"
    );
}

#[test]
fn fast_forward_that_changes_its_speed_is_followed() {
    let mut p = Prefetcher::new(100 * GIB, 64 * MIB);
    let mut at = 0;
    for step in [4, 8, 2, 16] {
        for n in 0..30 {
            at += step * 500 * KIB;
            let seen = p.read(FRAME, at, 500 * KIB);
            if n > 12 {
                let stride = (step * 500 * KIB) as i64;
                assert_eq!(
                    seen.pattern,
                    Pattern::Strided { stride },
                    "step {step}, frame {n}"
                );
                assert_eq!(seen.hit_bytes, 500 * KIB);
            }
        }
    }
}

#[test]
fn fast_forward_that_ends_in_play_is_sequential_again() {
    let mut p = Prefetcher::new(GIB, 16 * MIB);
    for frame in (0..100).step_by(5) {
        p.read(FRAME, frame * 500 * KIB, 500 * KIB);
    }
    let mut last = Pattern::Unknown;
    for frame in 96..106 {
        last = p.read(FRAME, frame * 500 * KIB, 500 * KIB).pattern;
    }
    assert_eq!(last, Pattern::Sequential);
}

// ---- Several places ----

#[test]
fn a_movie_player_that_probes_the_tail_keeps_its_cursor() {
    let size = 4 * GIB;
    let mut p = Prefetcher::new(size, 8 * MIB);
    let first = p.read(BURST, 0, 64 * KIB);
    // The moov atom, in pieces; then where it says the media begins.
    for piece in 0..6 {
        let seen = p.read(BURST, size - 384 * KIB + piece * 64 * KIB, 64 * KIB);
        assert_ne!(seen.cursor, first.cursor);
    }
    for piece in 1..100 {
        let seen = p.read(FRAME, piece * 64 * KIB, 64 * KIB);
        assert_eq!(seen.cursor, first.cursor);
        assert_eq!(seen.moved, Moved::Continued);
        assert_eq!(seen.pattern, Pattern::Sequential);
        assert_eq!(seen.hit_bytes, 64 * KIB);
    }
    assert_eq!(p.jumps, []);
}

#[test]
fn a_look_at_the_tail_during_play_is_no_jump() {
    let size = 4 * GIB;
    let mut p = Prefetcher::new(size, 8 * MIB);
    for frame in 0..200 {
        if frame % 50 == 20 {
            p.read(BURST, size - MIB - frame * 4 * KIB, 16 * KIB);
            p.read(BURST, size - 16 * KIB, 16 * KIB);
        }
        let seen = p.read(FRAME, frame * 512 * KIB, 512 * KIB);
        assert_eq!(seen.cursor, CursorIndex(0));
        assert_eq!(
            seen.moved,
            if frame == 0 {
                Moved::Began
            } else {
                Moved::Continued
            }
        );
    }
    assert_eq!(p.jumps, []);
}

#[test]
fn a_seek_predicts_at_its_first_read_and_is_a_jump_at_its_third() {
    let mut p = Prefetcher::new(4 * GIB, 8 * MIB);
    for frame in 0..50 {
        p.read(FRAME, frame * 512 * KIB, 512 * KIB);
    }
    let first = p.read(FRAME, 2 * GIB, 512 * KIB);
    assert_eq!(first.moved, Moved::Began);
    assert_eq!(first.pattern, Pattern::Sequential);
    assert_eq!(
        p.read(FRAME, 2 * GIB + 512 * KIB, 512 * KIB).moved,
        Moved::Continued
    );
    let third = p.read(FRAME, 2 * GIB + MIB, 512 * KIB);
    let from = CursorIndex(0);
    assert_eq!(third.moved, Moved::Jumped { from });
    assert_eq!(third.cursor, first.cursor);
    assert_eq!(third.hit_bytes, 512 * KIB);
}

#[test]
fn a_player_that_seeks_often_is_followed_everywhere() {
    let mut random = Random(11);
    let mut p = Prefetcher::new(100 * GIB, 8 * MIB);
    let seeks = 200;
    for _ in 0..seeks {
        let base = random.below(90 * GIB);
        for frame in 0..random.between(10, 40) {
            p.read(FRAME, base + frame * 512 * KIB, 512 * KIB);
        }
    }
    assert_eq!(p.jumps.len(), seeks - 1);
    // Each jump leads on from where the one before led to.
    assert!(p.jumps.windows(2).all(|pair| pair[0].1 == pair[1].0));
}

#[test]
fn who_goes_back_a_little_and_plays_again_is_followed() {
    let mut p = Prefetcher::new(4 * GIB, 8 * MIB);
    let mut at = 0;
    for _ in 0..20 {
        for n in 0..40 {
            let seen = p.read(FRAME, at, 512 * KIB);
            assert!(n < 4 || seen.pattern == Pattern::Sequential);
            let cursor = p.recogniser.cursor(seen.cursor).unwrap();
            assert!(
                n < 2 || cursor.position() == at + 512 * KIB,
                "read {n} from {at}"
            );
            at += 512 * KIB;
        }
        at -= 15 * 512 * KIB;
    }
    assert_eq!(p.jumps.len(), 19);
}

#[test]
fn a_loop_is_read_in_order_however_short() {
    for length in [3, 10, 24, 200] {
        let mut p = Prefetcher::new(4 * GIB, 8 * MIB);
        for n in 0..20 * length {
            let seen = p.read(FRAME, GIB + n % length * 512 * KIB, 512 * KIB);
            if n > 2 * length && n % length > 1 {
                assert_eq!(
                    seen.pattern,
                    Pattern::Sequential,
                    "loop of {length}, read {n}"
                );
            }
        }
    }
}

#[test]
fn two_players_of_one_handle_have_a_cursor_each() {
    let mut random = Random(3);
    let mut p = Prefetcher::new(100 * GIB, 8 * MIB);
    let mut at = [0, 50 * GIB];
    let mut cursors = [None, None];
    for n in 0..1000 {
        let player = random.below(2) as usize;
        let seen = p.read(FRAME, at[player], 512 * KIB);
        at[player] += 512 * KIB;
        if n > 20 {
            assert_eq!(seen.pattern, Pattern::Sequential);
            assert_eq!(seen.hit_bytes, 512 * KIB);
            let cursor = *cursors[player].get_or_insert(seen.cursor);
            assert_eq!(seen.cursor, cursor);
        }
    }
    assert_ne!(cursors[0], cursors[1]);
    assert!(p.jumps.len() <= 2, "{:?}", p.jumps);
}

#[test]
fn sound_and_picture_read_in_turns_of_any_length_end_as_two_readers() {
    for turn in 1..10 {
        let mut p = Prefetcher::new(100 * GIB, 8 * MIB);
        let mut at = [0, 50 * GIB];
        for n in 0..400 {
            let which = (n / turn) % 2;
            p.read(Duration::from_ms(20), at[which], 256 * KIB);
            at[which] += 256 * KIB;
        }
        assert!(p.jumps.len() <= 3, "turns of {turn}: {:?}", p.jumps);
        assert_eq!(p.twice_bytes, 0);
    }
}

#[test]
fn more_readers_than_cursors_are_survived() {
    let mut p = Prefetcher::new(100 * GIB, MIB);
    let mut at: Vec<u64> = (0..20).map(|reader| reader * 4 * GIB).collect();
    for n in 0..2000 {
        let reader = n % 20;
        p.read(BURST, at[reader], 256 * KIB);
        at[reader] += 256 * KIB;
        assert!(p.recogniser.cursors().count() <= CURSOR_COUNT_MAX);
    }
}

#[test]
fn strays_do_not_drive_a_stream_out() {
    let mut random = Random(5);
    let mut p = Prefetcher::new(1000 * GIB, 8 * MIB);
    for frame in 0..300 {
        let seen = p.read(FRAME, frame * 512 * KIB, 512 * KIB);
        assert_eq!(seen.cursor, CursorIndex(0));
        let strays = if frame < 3 { 0 } else { random.below(20) };
        for _ in 0..strays {
            p.read(BURST, GIB + random.below(900 * GIB), 4 * KIB);
        }
    }
}

// ---- No order ----

#[test]
fn random_reads_are_never_sequential_for_long() {
    for seed in 0..50 {
        let mut random = Random(seed);
        let read_bytes = *random.pick(&[4 * KIB, 64 * KIB, MIB]);
        let file_size = read_bytes * random.between(2000, 1_000_000);
        let mut p = Prefetcher::new(file_size, 8 * read_bytes);
        let (mut sequential, mut longest, mut run, mut called_random) = (0, 0, 0, 0);
        let count = 2000;
        for _ in 0..count {
            let start = random.below(file_size / read_bytes) * read_bytes;
            let seen = p.read(Duration::from_ms(5), start, read_bytes);
            run = if seen.pattern == Pattern::Sequential {
                run + 1
            } else {
                0
            };
            longest = longest.max(run);
            sequential += u32::from(run > 0);
            called_random += u32::from(seen.pattern == Pattern::Random);
        }
        assert!(longest <= 8, "seed {seed}: {longest} in a row");
        assert!(
            sequential * 20 <= count,
            "seed {seed}: {sequential} sequential"
        );
        assert!(
            called_random * 10 >= count * 9,
            "seed {seed}: {called_random} random"
        );
    }
}

#[test]
fn no_read_however_absurd_breaks_it() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let mut recogniser = Recogniser::new();
        let mut now = Instant(random.next());
        for _ in 0..400 {
            let length = random.next() >> random.below(64);
            let start = match random.below(4) {
                0 => random.next() >> random.below(64),
                1 => u64::MAX - (random.next() >> random.below(64)),
                2 => 0,
                _ => recogniser.cursors().last().map_or(0, |(_, c)| c.position()),
            };
            now = if random.below(20) == 0 {
                Instant(random.next())
            } else {
                now + Duration(random.next() >> random.below(64))
            };
            let seen = recogniser.observe(now, ByteRange::new(start, length));
            let cursor = recogniser.cursor(seen.cursor).unwrap();
            let (from, size) = (
                random.next() >> random.below(64),
                random.next() >> random.below(64),
            );
            let bytes = random.next() >> random.below(64);
            let mut sum = 0u64;
            for (n, range) in cursor.ahead(from, bytes, size).enumerate() {
                assert!(n < 1024 && range.length.0 > 0 && range.end() <= size);
                sum += range.length.0;
            }
            assert!(sum <= bytes);
        }
    }
}

#[test]
fn a_reader_of_single_bytes_gets_a_bounded_prediction() {
    let mut p = Prefetcher::new(GIB, 1000);
    for n in 0..200 {
        p.read(FRAME, n * 3, 1);
    }
    let (_, cursor) = p.recogniser.cursors().next().unwrap();
    assert!(cursor.ahead(0, GIB, GIB).count() <= 1024);
}

#[test]
fn an_empty_read_says_nothing() {
    let mut recogniser = Recogniser::new();
    recogniser.observe(Instant(1), ByteRange::new(0, 0));
    recogniser.observe(Instant(2), ByteRange::new(0, MIB));
    let seen = recogniser.observe(Instant(3), ByteRange::new(GIB, 0));
    assert_eq!(seen.moved, Moved::Continued);
    assert_eq!(recogniser.cursors().count(), 1);
}

#[test]
fn what_an_open_file_costs_is_bounded() {
    assert!(
        size_of::<Recogniser>() <= 3 * 1024,
        "{}",
        size_of::<Recogniser>()
    );
    assert!(size_of::<Cadence>() <= 1536, "{}", size_of::<Cadence>());
}

/// Backwards, each frame in pieces, of which the first reads came in any order, as those of a pool
/// of threads: it is one reader as soon as they are in order. Swarm, seed 1760: two cursors took
/// pieces of each frame in turn, for good.
#[test]
fn reverse_in_pieces_that_began_in_disorder_is_one_reader() {
    let mut split = Vec::new();
    for seed in 0..400 {
        let mut random = Random(seed);
        let piece = *random.pick(&[128 * KIB, 421 * KIB, MIB]);
        let frame = piece * random.between(2, 5) + random.below(piece);
        let depth = random.between(2, 10) as usize;
        let (disorder, frames) = (random.between(3, 12), 60);
        let mut reads: Vec<ByteRange> = Vec::new();
        for nth in 0..frames {
            let base = (frames - 1 - nth) * frame;
            let pieces = (0..frame).step_by(piece as usize);
            let pieces = pieces.map(|at| ByteRange::new(base + at, piece.min(frame - at)));
            reads.extend(pieces);
        }
        let in_disorder = (disorder * frame.div_ceil(piece)) as usize;
        for volley in reads[..in_disorder].chunks_mut(depth) {
            random.shuffle(volley);
        }
        let mut recogniser = Recogniser::new();
        let mut now = Instant::ZERO;
        let last = reads.len() - 20 * frame.div_ceil(piece) as usize;
        let mut cursors: Vec<(CursorIndex, Pattern)> = Vec::new();
        for (nth, range) in reads.into_iter().enumerate() {
            now = now + Duration::from_ms(random.between(1, 20));
            let seen = recogniser.observe(now, range);
            if nth >= last && !cursors.contains(&(seen.cursor, seen.pattern)) {
                cursors.push((seen.cursor, seen.pattern));
            }
        }
        if !matches!(cursors.as_slice(), [(_, Pattern::Reverse)]) {
            split.push((seed, cursors));
        }
    }
    assert!(
        split.is_empty(),
        "{} of 400: {:?}",
        split.len(),
        &split[..split.len().min(5)]
    );
}
