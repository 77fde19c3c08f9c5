// SPDX-License-Identifier: Apache-2.0
//! The drive's write cache: volatile, destaged in order of position.
//!
//! Bytes that lie here are acknowledged and not on the medium. A flush divides the writes before it
//! from those after it, see [`WriteCache::close_epoch`]; it ends when no earlier bytes are left. At
//! a power cut any part of the cache may have reached the medium, in any order, see
//! [`WriteCache::lose`]: a page is there whole or not at all, and nothing else is promised.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The unit that a medium writes whole or not at all. Units: bytes.
pub const ATOM_BYTES: u64 = 4096;

/// Written bytes.
#[derive(Clone, Debug)]
pub struct Bytes {
    whole: Arc<[u8]>,
    start: usize,
    length: usize,
}

impl Bytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.whole[self.start..self.start + self.length]
    }

    fn part(&self, start: usize, end: usize) -> Bytes {
        Bytes {
            whole: self.whole.clone(),
            start: self.start + start,
            length: end - start,
        }
    }
}

impl From<Arc<[u8]>> for Bytes {
    fn from(whole: Arc<[u8]>) -> Bytes {
        let length = whole.len();
        Bytes {
            whole,
            start: 0,
            length,
        }
    }
}

#[derive(Clone, Debug)]
struct Piece {
    bytes: Bytes,
    epoch: u64,
}

impl Piece {
    fn len(&self) -> u64 {
        self.bytes.length as u64
    }
}

/// Writes that the medium does not have yet. Newer ones hide older ones.
#[derive(Clone, Debug)]
pub struct WriteCache {
    capacity: u64,
    /// By offset; they do not overlap.
    pieces: BTreeMap<u64, Piece>,
    bytes: u64,
    epoch: u64,
    /// Bytes of each epoch that still has some.
    epochs: BTreeMap<u64, u64>,
}

impl WriteCache {
    /// A cache of so many bytes; 0: none, every write goes to the medium.
    pub fn new(capacity: u64) -> WriteCache {
        WriteCache {
            capacity,
            pieces: BTreeMap::new(),
            bytes: 0,
            epoch: 1,
            epochs: BTreeMap::new(),
        }
    }

    /// Units: bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True when the medium has everything.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// True when it is so full that the head must begin to destage, even if requests wait.
    pub fn is_pressing(&self) -> bool {
        self.bytes >= self.capacity / 4 * 3 && self.bytes > 0
    }

    /// True if it has room for a write of `length` now. A write larger than the whole cache fits
    /// when the cache is empty.
    pub fn fits(&self, length: u64) -> bool {
        self.capacity > 0 && (self.bytes + length <= self.capacity || self.is_empty())
    }

    /// Take a write.
    pub fn put(&mut self, offset: u64, bytes: Bytes) {
        let end = offset + bytes.length as u64;
        let hidden = self.remove(offset, bytes.length as u64);
        let mut from = offset;
        let mut put = |cache: &mut WriteCache, to: u64, epoch: u64| {
            if from < to {
                let bytes = bytes.part((from - offset) as usize, (to - offset) as usize);
                cache.insert(from, Piece { bytes, epoch });
            }
            from = to;
        };
        for (at, old) in hidden {
            put(self, at, self.epoch);
            // A flush that waits for the old bytes goes on waiting: the medium has neither version
            // yet.
            put(self, at + old.len(), old.epoch);
        }
        put(self, end, self.epoch);
    }

    /// Copy its bytes over `buffer`, which has the medium's bytes from `offset`.
    pub fn overlay(&self, offset: u64, buffer: &mut [u8]) {
        let end = offset + buffer.len() as u64;
        for (&at, piece) in self.touching(offset, end) {
            let from = at.max(offset);
            let to = (at + piece.len()).min(end);
            buffer[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&piece.bytes.as_slice()[(from - at) as usize..(to - at) as usize]);
        }
    }

    /// Drop these bytes: they were discarded, or written to the medium directly.
    pub fn forget(&mut self, offset: u64, length: u64) {
        self.remove(offset, length);
    }

    /// The run that a head at `head` should write next: the nearest ahead, else the first of the
    /// disk, up to the next gap, at most `most` bytes. Returns offset and length.
    pub fn next_run(&self, head: u64, most: u64) -> Option<(u64, u64)> {
        // If the head is inside a run, the run begins at the head.
        let ahead = self
            .touching(head, head + 1)
            .next()
            .map(|_| head)
            .or_else(|| self.pieces.range(head..).next().map(|(&at, _)| at));
        let start = match ahead {
            Some(at) => at,
            None => *self.pieces.first_key_value()?.0,
        };
        let mut end = start;
        for (&at, piece) in self.touching(start, u64::MAX) {
            if at > end || end - start >= most {
                break;
            }
            end = at + piece.len();
        }
        Some((start, (end - start).min(most)))
    }

    /// Remove a range; returns its bytes in order of offset.
    pub fn take(&mut self, offset: u64, length: u64) -> Vec<(u64, Bytes)> {
        let pieces = self.remove(offset, length);
        pieces
            .into_iter()
            .map(|(at, piece)| (at, piece.bytes))
            .collect()
    }

    fn remove(&mut self, offset: u64, length: u64) -> Vec<(u64, Piece)> {
        let end = offset.saturating_add(length);
        let touched: Vec<u64> = self.touching(offset, end).map(|(&at, _)| at).collect();
        let mut taken = Vec::with_capacity(touched.len());
        for at in touched {
            let Some(piece) = self.pieces.remove(&at) else {
                continue;
            };
            self.count(piece.epoch, -(piece.len() as i64));
            let stop = at + piece.len();
            let (from, to) = (at.max(offset), stop.min(end));
            let cut = |from: u64, to: u64| Piece {
                bytes: piece.bytes.part((from - at) as usize, (to - at) as usize),
                epoch: piece.epoch,
            };
            if at < from {
                self.insert(at, cut(at, from));
            }
            if to < stop {
                self.insert(to, cut(to, stop));
            }
            taken.push((from, cut(from, to)));
        }
        taken
    }

    /// End the epoch: later writes belong to the next. Returns the ended one; when nothing of it or
    /// of an earlier one is left, all earlier writes are on the medium.
    pub fn close_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// True when nothing of this epoch or an earlier one is left.
    pub fn is_past(&self, epoch: u64) -> bool {
        self.epochs
            .first_key_value()
            .is_none_or(|(&oldest, _)| oldest > epoch)
    }

    /// Lose the content at a power cut. Returns the pages that reached the medium all the same:
    /// those for which `keeps` says true.
    pub fn lose(&mut self, mut keeps: impl FnMut() -> bool) -> Vec<(u64, Bytes)> {
        let mut kept = Vec::new();
        for (at, piece) in std::mem::take(&mut self.pieces) {
            let end = at + piece.len();
            let mut from = at;
            while from < end {
                let to = ((from / ATOM_BYTES + 1) * ATOM_BYTES).min(end);
                if keeps() {
                    let part = piece.bytes.part((from - at) as usize, (to - at) as usize);
                    kept.push((from, part));
                }
                from = to;
            }
        }
        self.bytes = 0;
        self.epochs.clear();
        kept
    }

    fn insert(&mut self, offset: u64, piece: Piece) {
        self.count(piece.epoch, piece.len() as i64);
        self.pieces.insert(offset, piece);
    }

    fn count(&mut self, epoch: u64, change: i64) {
        self.bytes = self.bytes.saturating_add_signed(change);
        let left = self.epochs.entry(epoch).or_default();
        *left = left.saturating_add_signed(change);
        if *left == 0 {
            self.epochs.remove(&epoch);
        }
    }

    /// Pieces that have bytes in `start .. end`.
    fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (&u64, &Piece)> {
        let before = self
            .pieces
            .range(..start)
            .next_back()
            .filter(|(at, piece)| **at + piece.len() > start);
        before.into_iter().chain(self.pieces.range(start..end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(value: u8, length: usize) -> Bytes {
        Bytes::from(Arc::<[u8]>::from(vec![value; length]))
    }

    fn seen(cache: &WriteCache, offset: u64, length: usize) -> Vec<u8> {
        let mut buffer = vec![0; length];
        cache.overlay(offset, &mut buffer);
        buffer
    }

    #[test]
    fn newer_writes_hide_older_ones_and_the_rest_stays() {
        let mut cache = WriteCache::new(1 << 20);
        cache.put(10, bytes(1, 10));
        cache.put(14, bytes(2, 2));
        assert_eq!(cache.bytes(), 10);
        assert_eq!(
            seen(&cache, 8, 14),
            [0, 0, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 0, 0]
        );
        cache.forget(0, 15);
        assert_eq!(seen(&cache, 12, 6), [0, 0, 0, 2, 1, 1]);
        assert_eq!(cache.bytes(), 5);
    }

    #[test]
    fn random_writes_read_back_as_a_flat_disk_has_them() {
        let mut cache = WriteCache::new(1 << 20);
        let mut flat = vec![0u8; 512];
        let mut medium = flat.clone();
        let mut state = 1u64;
        let mut random = |end: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % end
        };
        for step in 0..20_000u32 {
            let at = random(512) as usize;
            let length = (random(40) as usize).min(512 - at);
            if random(4) == 0 {
                for (offset, bytes) in cache.take(at as u64, length as u64) {
                    let offset = offset as usize;
                    medium[offset..offset + bytes.length].copy_from_slice(bytes.as_slice());
                }
            } else {
                let value = step as u8;
                flat[at..at + length].fill(value);
                cache.put(at as u64, bytes(value, length));
            }
            let mut now = medium.clone();
            cache.overlay(0, &mut now);
            assert_eq!(now, flat, "step {step}");
            let total: u64 = cache.pieces.values().map(Piece::len).sum();
            assert_eq!(cache.bytes(), total);
            assert_eq!(cache.epochs.values().sum::<u64>(), total);
        }
    }

    #[test]
    fn runs_are_written_nearest_ahead_first_and_without_gaps() {
        let mut cache = WriteCache::new(1 << 20);
        cache.put(100, bytes(1, 50));
        cache.put(150, bytes(2, 50));
        cache.put(400, bytes(3, 10));
        assert_eq!(cache.next_run(0, 1000), Some((100, 100)));
        assert_eq!(cache.next_run(0, 70), Some((100, 70)));
        assert_eq!(cache.next_run(120, 1000), Some((120, 80)));
        assert_eq!(cache.next_run(200, 1000), Some((400, 10)));
        assert_eq!(cache.next_run(500, 1000), Some((100, 100)));
        assert_eq!(WriteCache::new(9).next_run(0, 1), None);
    }

    #[test]
    fn flush_waits_for_what_came_before_it_and_for_nothing_else() {
        let mut cache = WriteCache::new(1 << 20);
        cache.put(0, bytes(1, 8));
        let line = cache.close_epoch();
        cache.put(4, bytes(2, 8));
        assert!(!cache.is_past(line));
        cache.take(0, 4);
        // The other half was overwritten, but the medium has no version of it yet.
        assert!(!cache.is_past(line));
        cache.take(4, 4);
        assert!(cache.is_past(line));
        assert_eq!(cache.bytes(), 4);
    }

    #[test]
    fn lost_power_leaves_any_pages_of_what_was_not_flushed() {
        let mut cache = WriteCache::new(1 << 20);
        cache.put(ATOM_BYTES / 2, bytes(7, 3 * ATOM_BYTES as usize));
        let mut turn = false;
        let kept = cache.lose(|| {
            turn = !turn;
            turn
        });
        let places: Vec<(u64, usize)> = kept.iter().map(|(at, part)| (*at, part.length)).collect();
        assert_eq!(places, [(2048, 2048), (8192, 4096)]);
        assert!(cache.is_empty() && cache.is_past(u64::MAX));
    }
}
