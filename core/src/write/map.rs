// SPDX-License-Identifier: Apache-2.0
//! Which bytes of a file lie in which piece.

use crate::units::ByteRange;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A piece, by the server's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceKey(pub u32);

/// Bytes of a file that lie in one piece without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which bytes of the file.
    pub range: ByteRange,
    /// In which piece.
    pub piece: PieceKey,
    /// Where in the piece they begin. Units: bytes.
    pub at: u64,
}

/// Bytes of a piece that the map does not point to any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released {
    /// Of which piece.
    pub piece: PieceKey,
    /// How many.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Stored {
    end: u64,
    piece: PieceKey,
    at: u64,
}

/// The dirty bytes of a file. Newer ones have replaced older ones; spans do not overlap.
#[derive(Clone, Debug, Default)]
pub struct DirtyMap {
    /// By start.
    spans: BTreeMap<u64, Stored>,
    /// The same bytes without gaps, start to end: a client that writes a byte at a time makes many
    /// spans of one run, and a search for bytes that can go to the device looks at each write.
    runs: BTreeMap<u64, u64>,
    bytes: u64,
}

impl DirtyMap {
    /// Nothing is dirty.
    pub fn new() -> DirtyMap {
        DirtyMap::default()
    }

    /// How many bytes are dirty.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True when none is.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// A piece was committed: all of `range` lies in it from its start on. Spans that it replaces
    /// go to `released`.
    pub fn commit(&mut self, range: ByteRange, piece: PieceKey, released: &mut Vec<Released>) {
        let at = 0;
        self.put(&Span { range, piece, at }, released);
    }

    /// The bytes of a span lie where it says. Spans that it replaces go to `released`.
    pub fn put(&mut self, span: &Span, released: &mut Vec<Released>) {
        let range = span.range;
        self.discard(range, released);
        if range.length.0 == 0 {
            return;
        }
        self.bytes += range.length.0;
        self.spans.insert(
            range.start.0,
            Stored {
                end: range.end(),
                piece: span.piece,
                at: span.at,
            },
        );
        self.join(range.start.0, range.end());
    }

    /// These bytes are dirty, and none of them was.
    fn join(&mut self, mut start: u64, mut end: u64) {
        if let Some((&before, &its_end)) = self.runs.range(..start).next_back()
            && its_end == start
        {
            start = before;
        }
        if let Some(its_end) = self.runs.remove(&end) {
            end = its_end;
        }
        self.runs.insert(start, end);
    }

    /// None of these bytes is dirty any more.
    fn cut(&mut self, start: u64, end: u64) {
        while let Some((&run_start, &run_end)) = self.runs.range(..end).next_back()
            && run_end > start
        {
            self.runs.remove(&run_start);
            if run_end > end {
                self.runs.insert(end, run_end);
            }
            if run_start < start {
                self.runs.insert(run_start, start);
                return;
            }
        }
    }

    /// Bytes of `range` are of no more interest: cut off, or written otherwise.
    pub fn discard(&mut self, range: ByteRange, released: &mut Vec<Released>) {
        let (start, end) = (range.start.0, range.end());
        if start >= end {
            return;
        }
        let touched: Vec<u64> = self.touching(start, end).map(|(at, _)| at).collect();
        if !touched.is_empty() {
            self.cut(start, end);
        }
        for at in touched {
            let Some(stored) = self.spans.remove(&at) else {
                continue;
            };
            if at < start {
                self.spans.insert(
                    at,
                    Stored {
                        end: start,
                        ..stored
                    },
                );
            }
            if end < stored.end {
                self.spans.insert(
                    end,
                    Stored {
                        at: stored.at + (end - at),
                        ..stored
                    },
                );
            }
            let gone = stored.end.min(end) - at.max(start);
            self.bytes -= gone;
            released.push(Released {
                piece: stored.piece,
                bytes: gone,
            });
        }
    }

    /// A span has reached its device: the parts of it that were not replaced meanwhile are clean.
    pub fn written(&mut self, span: &Span, released: &mut Vec<Released>) {
        let still: Vec<Span> = self.current(span).collect();
        for now in still {
            self.discard(now.range, released);
        }
    }

    /// The parts of a span that were not replaced meanwhile.
    pub fn current<'a>(&'a self, span: &'a Span) -> impl Iterator<Item = Span> + 'a {
        self.spans(span.range).filter(|now| {
            let moved = now.range.start.0 - span.range.start.0;
            now.piece == span.piece && now.at == span.at + moved
        })
    }

    /// The dirty spans of `range`, in order, cut to it.
    pub fn spans(&self, range: ByteRange) -> impl Iterator<Item = Span> + '_ {
        let (start, end) = (range.start.0, range.end());
        let all = self.touching(start, end).filter(move |_| start < end);
        all.map(move |(at, stored)| {
            let from = at.max(start);
            Span {
                range: ByteRange::new(from, stored.end.min(end) - from),
                piece: stored.piece,
                at: stored.at + (from - at),
            }
        })
    }

    /// The first run of dirty bytes without a gap that ends after `offset`.
    pub fn next_run(&self, offset: u64) -> Option<ByteRange> {
        // Bytes before `offset` in the same run belong to it.
        let before = self.runs.range(..offset).next_back();
        let (&start, &end) = before
            .filter(|(_, end)| **end > offset)
            .or_else(|| self.runs.range(offset..).next())?;
        Some(ByteRange::new(start, end - start))
    }

    /// One past the last dirty byte; 0 when none is.
    pub fn end(&self) -> u64 {
        self.spans
            .last_key_value()
            .map_or(0, |(_, stored)| stored.end)
    }

    /// True when every byte of `range` is dirty.
    pub fn covers(&self, range: ByteRange) -> bool {
        let mut at = range.start.0;
        for span in self.spans(range) {
            if span.range.start.0 != at {
                return false;
            }
            at = span.range.end();
        }
        at >= range.end()
    }

    fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Stored)> + '_ {
        let before = self
            .spans
            .range(..start)
            .next_back()
            .filter(|(_, stored)| stored.end > start);
        before
            .into_iter()
            .chain(self.spans.range(start..end.max(start)))
            .map(|(at, stored)| (*at, *stored))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const A: PieceKey = PieceKey(1);
    const B: PieceKey = PieceKey(2);

    fn span(start: u64, length: u64, piece: PieceKey, at: u64) -> Span {
        Span {
            range: ByteRange::new(start, length),
            piece,
            at,
        }
    }

    fn all(map: &DirtyMap) -> Vec<Span> {
        map.spans(ByteRange::new(0, u64::MAX)).collect()
    }

    #[test]
    fn newer_piece_cuts_the_map_and_releases_what_it_hides() {
        let mut map = DirtyMap::new();
        let mut released = Vec::new();
        map.commit(ByteRange::new(100, 50), A, &mut released);
        map.commit(ByteRange::new(120, 10), B, &mut released);
        assert_eq!(
            all(&map),
            [
                span(100, 20, A, 0),
                span(120, 10, B, 0),
                span(130, 20, A, 30)
            ]
        );
        assert_eq!(
            released,
            [Released {
                piece: A,
                bytes: 10
            }]
        );
        assert_eq!(map.bytes(), 50);
        assert!(map.covers(ByteRange::new(100, 50)));
        assert!(!map.covers(ByteRange::new(99, 2)));
        assert_eq!(map.next_run(125), Some(ByteRange::new(100, 50)));
        assert_eq!(map.next_run(150), None);
    }

    #[test]
    fn what_was_replaced_while_it_was_written_stays_dirty() {
        let mut map = DirtyMap::new();
        let mut released = Vec::new();
        map.commit(ByteRange::new(0, 100), A, &mut released);
        let on_its_way = span(0, 100, A, 0);
        map.commit(ByteRange::new(40, 20), B, &mut released);
        released.clear();
        map.written(&on_its_way, &mut released);
        assert_eq!(all(&map), [span(40, 20, B, 0)]);
        assert_eq!(released.iter().map(|gone| gone.bytes).sum::<u64>(), 80);
    }

    #[test]
    fn piece_committed_again_at_another_place_is_not_taken_for_written() {
        let mut map = DirtyMap::new();
        let mut released = Vec::new();
        map.commit(ByteRange::new(0, 10), A, &mut released);
        map.written(&span(2, 4, A, 0), &mut released);
        assert_eq!(map.bytes(), 10);
        map.written(&span(2, 4, A, 2), &mut released);
        assert_eq!(all(&map), [span(0, 2, A, 0), span(6, 4, A, 6)]);
    }

    /// The first run that ends after `offset`, byte by byte.
    fn run_of(flat: &[Option<(u32, u64)>], offset: u64) -> Option<ByteRange> {
        let is_dirty = |byte: &usize| flat[*byte].is_some();
        let first = (offset as usize..flat.len()).find(is_dirty)?;
        let start = (0..first).rev().find(|byte| !is_dirty(byte));
        let start = start.map_or(0, |byte| byte + 1);
        let end = (first..flat.len()).find(|byte| !is_dirty(byte));
        let end = end.unwrap_or(flat.len());
        Some(ByteRange::new(start as u64, (end - start) as u64))
    }

    #[test]
    fn random_commits_agree_with_a_flat_file() {
        let mut state = 3u64;
        let mut random = |end: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % end
        };
        let mut map = DirtyMap::new();
        // Of each byte: in which piece, where there; and how many bytes of each piece are in use.
        let mut flat: Vec<Option<(u32, u64)>> = vec![None; 400];
        let mut live: BTreeMap<u32, i64> = BTreeMap::new();
        let mut released = Vec::new();
        for number in 0..20_000u32 {
            let start = random(400);
            let length = random(60).min(400 - start);
            let range = ByteRange::new(start, length);
            let piece = PieceKey(number);
            match random(4) {
                0 => {
                    map.discard(range, &mut released);
                    flat[start as usize..(start + length) as usize].fill(None);
                }
                1 => {
                    let spans: Vec<Span> = map.spans(range).collect();
                    for span in &spans {
                        map.written(span, &mut released);
                    }
                    flat[start as usize..(start + length) as usize].fill(None);
                }
                _ => {
                    map.commit(range, piece, &mut released);
                    for byte in start..start + length {
                        flat[byte as usize] = Some((number, byte - start));
                    }
                    live.insert(number, length as i64);
                }
            }
            for gone in released.drain(..) {
                *live.entry(gone.piece.0).or_default() -= gone.bytes as i64;
            }
            let mut seen: Vec<Option<(u32, u64)>> = vec![None; 400];
            for span in all(&map) {
                for step in 0..span.range.length.0 {
                    let byte = (span.range.start.0 + step) as usize;
                    assert_eq!(seen[byte], None);
                    seen[byte] = Some((span.piece.0, span.at + step));
                }
            }
            assert_eq!(seen, flat, "step {number}");
            let offset = random(400);
            assert_eq!(map.next_run(offset), run_of(&flat, offset), "step {number}");
            let dirty = flat.iter().flatten().count();
            assert_eq!(map.bytes(), dirty as u64);
            assert_eq!(live.values().sum::<i64>(), dirty as i64);
            assert!(live.values().all(|&left| left >= 0));
            live.retain(|_, left| *left > 0);
        }
    }
}
