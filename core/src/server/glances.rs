// SPDX-License-Identifier: Apache-2.0
//! Glances: single reads here and there, from which the reader does not read on.
//!
//! A hand on the mouse, a conform, thumbnails: each wants one frame, and then one elsewhere. It
//! does not want the bytes behind such a frame, and fetching them delays the next one. So the
//! server watches a seat's reads: a place that is left before half a second of it was played was
//! glanced at. After two such places in a row the seat looks about, until it plays again. Then
//!
//! - nothing is fetched ahead of a first read, and of others twice as much as was read on from
//!   there;
//! - a first read elsewhere neither begins to play nor takes the contract along: the second one
//!   does;
//! - no contract is asked for before half a second was played.
//!
//! All of that is per session. In a pool's door, by which all clients of a mount come, it is per
//! stream.

use super::seats::PLAYED_MIN;
use super::state::*;
use super::*;
use crate::stream::{Observation, Pattern};

/// A seat looks about after so many places that it left at once.
const GLANCES_ABOUT: u8 = 2;
/// After so long without a glance the server has forgotten those of a seat.
const FORGOTTEN: Duration = Duration::from_s(10);
/// A place that is played for less than that is glanced at.
pub(super) const RUN_MIN: Duration = Duration::from_ms(500);
/// The same where the rate is not known. Units: bytes.
const RUN_MIN_BYTES: u64 = 4 << 20;
/// Reads of one run may be so far apart, by the rate of the file: a player at eight times its speed
/// leaves seven frames of eight out.
const APART: Duration = Duration::from_ms(320);
/// And so many reads, and twice the most of them that waited at once, since requests overtake each
/// other.
const APART_READS: u64 = 2;

/// Places that a seat has left at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Glances {
    count: u8,
    last: Instant,
}

/// The reads of a stream that go on from each other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    last: ByteRange,
    /// Units: bytes.
    bytes: u64,
    /// Of those, the bytes of reads that touch the one before or the one behind. Both count only
    /// recent reads. Units: bytes.
    touched: u64,
    /// The last one did.
    is_touching: bool,
    /// Most reads that waited at once.
    deepest: u32,
    /// The last read of any length, and how many went on from each other up to it.
    latest: ByteRange,
    count: u32,
}

impl Row {
    /// True when a read goes on from the last one, forwards or backwards.
    fn goes_on(&self, range: ByteRange, apart_bytes: u64) -> bool {
        let last = self.last;
        let reads = APART_READS + 2 * u64::from(self.deepest);
        let longest = range.length.0.max(last.length.0);
        let apart = apart_bytes.max(reads.saturating_mul(longest));
        range.start.0.abs_diff(last.end()) <= apart || range.end().abs_diff(last.start.0) <= apart
    }

    /// True when a read touches the last one, but for parts that a reader may leave out of a clip,
    /// such as its sound, and for reads that overtake each other. A hand that moves a few frames on
    /// does not touch: it wants the bytes behind only by chance.
    fn touches(&self, range: ByteRange) -> bool {
        let last = self.last;
        let longest = range.length.0.max(last.length.0);
        let overtaking = 2 * u64::from(self.deepest.saturating_sub(1));
        let apart = (longest / 2).saturating_add(overtaking.saturating_mul(longest));
        range.start.0.abs_diff(last.end()) <= apart || range.end().abs_diff(last.start.0) <= apart
    }

    /// True when the reader is likely to read on behind its last read: most of its reads did.
    fn is_read_on(&self) -> bool {
        self.touched > 0 && self.touched >= self.bytes / 2
    }

    /// The reader has not read on from the first place of its last run.
    pub(super) fn is_one(&self) -> bool {
        self.count <= 1
    }

    /// How much was read in a row: bytes, without small reads of unknown rate, and reads.
    pub(super) fn read_in_a_row(&self) -> (u64, u32) {
        (self.bytes, self.count)
    }

    /// A read of so many bytes may be of the same kind: picture is asked for in larger pieces than
    /// sound.
    pub(super) fn is_read_like(&self, length: u64) -> bool {
        let own = self.latest.length.0;
        own == 0 || length.saturating_mul(2) >= own && own.saturating_mul(2) >= length
    }

    fn count(&mut self, range: ByteRange) {
        let apart = range
            .length
            .0
            .max(self.latest.length.0)
            .saturating_mul(APART_READS);
        let is_near = |one: ByteRange, other: ByteRange| one.start.0.abs_diff(other.end()) <= apart;
        let goes_on = is_near(range, self.latest) || is_near(self.latest, range);
        self.count = match goes_on && self.count > 0 {
            true => self.count.saturating_add(1),
            false => 1,
        };
        self.latest = range;
    }

    /// How far ahead of a reader that looks about it is worth to read. Units: bytes.
    fn ahead(&self) -> u64 {
        match self.is_read_on() {
            true => self.touched.saturating_mul(2),
            false => 0,
        }
    }
}

impl Glances {
    fn add(&mut self, now: Instant) {
        if now.since(self.last) > FORGOTTEN {
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        self.last = now;
    }

    fn is_about(&self, now: Instant) -> bool {
        self.count >= GLANCES_ABOUT && now.since(self.last) <= FORGOTTEN
    }
}

impl Server {
    /// Note a read of a stream: whether it goes on from the last one, and whether its seat plays or
    /// glances. True: it was a hop to another place.
    pub(super) fn note_place(
        &mut self,
        id: StreamId,
        seen: &Observation,
        range: ByteRange,
    ) -> bool {
        let now = self.now;
        let Some(stream) = self.streams.get(id.0) else {
            return false;
        };
        let rate = match (stream.rate, self.hint_of(stream)) {
            (Some((rate, _)), _) | (None, Some(RateHint::Rate(rate, _))) => Some(rate),
            _ => None,
        };
        let played = rate.map_or(RUN_MIN_BYTES, |rate| rate.bytes_in(RUN_MIN).0);
        let apart_bytes = rate.map_or(0, |rate| rate.bytes_in(APART).0);
        let is_small = rate.is_none() && range.length.0 < PLAYED_MIN;
        let Some(stream) = self.streams.get_mut(id.0) else {
            return false;
        };
        stream.row.count(range);
        if stream.frames.is_some() || range.length.0 == 0 || is_small {
            return false;
        }
        let steps = matches!(seen.pattern, Pattern::Reverse | Pattern::Strided { .. });
        let row = &mut stream.row;
        // This one will wait as well.
        row.deepest = row.deepest.max(stream.waiting_count.saturating_add(1));
        let (is_first, before) = (row.bytes == 0, row.bytes);
        let goes_on = !is_first && (steps || row.goes_on(range, apart_bytes));
        let touches = goes_on && (steps || row.touches(range));
        let touched_before = match row.is_touching {
            true => 0,
            false => row.last.length.0,
        };
        row.touched = match (goes_on, touches) {
            (true, true) => (row.touched)
                .saturating_add(touched_before)
                .saturating_add(range.length.0),
            (true, false) => row.touched,
            (false, _) => 0,
        };
        row.is_touching = touches;
        row.last = range;
        row.bytes = match goes_on {
            true => before.saturating_add(range.length.0),
            false => range.length.0,
        };
        // Reads of a second ago say little of reads now.
        if row.bytes > played.saturating_mul(2) {
            (row.bytes, row.touched) = (row.bytes / 2, row.touched / 2);
        }
        // One long read is half a second of playing, too.
        let (is_long, plays) = (row.bytes >= played, row.is_read_on() || !goes_on);
        let session = stream.session;
        let glances = match self.sessions.get_mut(&session) {
            Some(session) if session.is_seat() => &mut session.glances,
            _ => &mut stream.glances,
        };
        let hops = !is_first && !goes_on;
        if is_long && plays {
            *glances = Glances::default();
        } else if is_long || hops && before < played {
            glances.add(now);
        }
        hops
    }

    /// Whether the seat of a stream looks here and there instead of playing.
    pub(super) fn glances_about(&self, stream: &Stream) -> bool {
        let glances = match self.sessions.get(&stream.session) {
            Some(session) if session.is_seat() => session.glances,
            _ => stream.glances,
        };
        glances.is_about(self.now)
    }

    /// How far the server reads ahead of a reader that looks about; None: it plays. Units: bytes.
    pub(super) fn glance_ahead(&self, stream: &Stream) -> Option<u64> {
        self.glances_about(stream).then(|| stream.row.ahead())
    }

    /// Whether a reader that glances about has not read on yet where a stream is.
    pub(super) fn is_glanced_at(&self, stream: &Stream) -> bool {
        self.glances_about(stream) && !stream.row.is_read_on()
    }
}
