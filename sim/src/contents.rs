// SPDX-License-Identifier: Apache-2.0
//! The origins of a memory's bytes: the write and the file of each byte.
//!
//! It keeps no byte itself. A copied byte keeps its origin, so that a misplaced byte, an old byte
//! and a byte of another file differ from the right one on every path.

use crate::files::FileIndex;
use rushes_core::units::ByteRange;
use std::collections::BTreeMap;

/// The origin of contiguous bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No file's bytes: any old content.
    Garbage,
    /// Zeros.
    Zero,
    /// Bytes of a file.
    Of {
        /// The file.
        file: FileIndex,
        /// The place of the first of them in the file.
        at: u64,
        /// The write that made them; 0: they existed before the run began.
        write: u64,
    },
}

impl Origin {
    /// The origin of the byte that is `bytes` behind the first.
    fn skip(self, bytes: u64) -> Origin {
        match self {
            Origin::Of { file, at, write } => Origin::Of {
                file,
                at: at + bytes,
                write,
            },
            same => same,
        }
    }

    /// The write that made the bytes, if they are bytes of `file` that belong at `at`. Zeros belong
    /// anywhere and are older than every write.
    pub fn write_at(self, expected: FileIndex, place: u64) -> Option<u64> {
        match self {
            Origin::Of { file, at, write } => (file == expected && at == place).then_some(write),
            Origin::Zero => Some(0),
            Origin::Garbage => None,
        }
    }
}

/// A number of bytes of one origin.
pub type Part = (u64, Origin);

/// A memory: of a file, a buffer, a lane or a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// By first byte: the end, and the origin of the first byte. Runs do not overlap; bytes between
    /// them are garbage.
    runs: BTreeMap<u64, (u64, Origin)>,
}

impl Contents {
    /// Puts bytes of one origin here.
    pub fn put(&mut self, range: ByteRange, origin: Origin) {
        let (start, end) = (range.start.0, range.end());
        if start >= end {
            return;
        }
        self.clear(range);
        if origin != Origin::Garbage {
            self.runs.insert(start, (end, origin));
        }
    }

    /// Puts bytes of several origins here, one part after the other.
    pub fn put_parts(&mut self, start: u64, parts: &[Part]) {
        let mut at = start;
        for &(bytes, origin) in parts {
            self.put(ByteRange::new(at, bytes), origin);
            at += bytes;
        }
    }

    /// Makes the content unknown.
    pub fn clear(&mut self, range: ByteRange) {
        let (start, end) = (range.start.0, range.end());
        let before = self.runs.range(..start).next_back();
        if let Some((&from, &(to, origin))) = before
            && to > start
        {
            self.runs.insert(from, (start, origin));
            if to > end {
                self.runs.insert(end, (to, origin.skip(end - from)));
            }
        }
        while let Some((&from, &(to, origin))) = self.runs.range(start..end).next() {
            self.runs.remove(&from);
            if to > end {
                self.runs.insert(end, (to, origin.skip(end - from)));
            }
        }
    }

    /// The origins of all bytes of a range, in order.
    pub fn parts(&self, range: ByteRange) -> Vec<Part> {
        let (start, end) = (range.start.0, range.end());
        let mut parts = Vec::new();
        let mut at = start;
        let first = self.runs.range(..start).next_back().map(|(&from, _)| from);
        for (&from, &(to, origin)) in self.runs.range(first.unwrap_or(start)..end) {
            let (cut_from, cut_to) = (from.max(start), to.min(end));
            if cut_from >= cut_to {
                continue;
            }
            if at < cut_from {
                parts.push((cut_from - at, Origin::Garbage));
            }
            parts.push((cut_to - cut_from, origin.skip(cut_from - from)));
            at = cut_to;
        }
        if at < end {
            parts.push((end - at, Origin::Garbage));
        }
        parts
    }

    /// Calls `visit` with the start, the length and both origins of each stretch of `range` in
    /// which both memories have one origin each.
    pub fn compare(
        &self,
        other: &Contents,
        range: ByteRange,
        visit: impl FnMut(u64, u64, Origin, Origin),
    ) {
        compare(
            range.start.0,
            &self.parts(range),
            &other.parts(range),
            visit,
        );
    }
}

/// The same for two equally long lists of parts that begin at `start`.
pub fn compare(
    start: u64,
    one: &[Part],
    two: &[Part],
    mut visit: impl FnMut(u64, u64, Origin, Origin),
) {
    let (mut one, mut two) = (one.iter().copied(), two.iter().copied());
    let (mut left, mut right) = (one.next(), two.next());
    let mut at = start;
    while let (Some((left_bytes, left_origin)), Some((right_bytes, right_origin))) = (left, right) {
        let bytes = left_bytes.min(right_bytes);
        visit(at, bytes, left_origin, right_origin);
        at += bytes;
        left = match left_bytes - bytes {
            0 => one.next(),
            rest => Some((rest, left_origin.skip(bytes))),
        };
        right = match right_bytes - bytes {
            0 => two.next(),
            rest => Some((rest, right_origin.skip(bytes))),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(at: u64, write: u64) -> Origin {
        let file = FileIndex(1);
        Origin::Of { file, at, write }
    }

    #[test]
    fn bytes_keep_their_origin_when_others_come_between() {
        let mut memory = Contents::default();
        memory.put(ByteRange::new(100, 100), of(1000, 1));
        memory.put(ByteRange::new(140, 20), of(0, 2));
        let parts = memory.parts(ByteRange::new(90, 120));
        let garbage = |bytes| (bytes, Origin::Garbage);
        let expected = [
            garbage(10),
            (40, of(1000, 1)),
            (20, of(0, 2)),
            (40, of(1060, 1)),
            garbage(10),
        ];
        assert_eq!(parts, expected);
        memory.clear(ByteRange::new(0, 170));
        let parts = memory.parts(ByteRange::new(150, 50));
        assert_eq!(parts, [garbage(20), (30, of(1070, 1))]);
    }

    #[test]
    fn parts_that_are_copied_are_the_same_elsewhere() {
        let mut from = Contents::default();
        from.put(ByteRange::new(0, 50), of(0, 1));
        from.put(ByteRange::new(60, 50), Origin::Zero);
        let range = ByteRange::new(10, 90);
        let mut to = Contents::default();
        to.put(ByteRange::new(500, 90), of(7, 7));
        to.put_parts(500, &from.parts(range));
        assert_eq!(to.parts(ByteRange::new(500, 90)), from.parts(range));
    }

    #[test]
    fn two_memories_are_compared_stretch_by_stretch() {
        let (mut one, mut two) = (Contents::default(), Contents::default());
        one.put(ByteRange::new(0, 10), of(0, 1));
        two.put(ByteRange::new(0, 4), of(0, 1));
        two.put(ByteRange::new(4, 6), of(4, 2));
        let mut seen = Vec::new();
        one.compare(&two, ByteRange::new(2, 8), |at, bytes, left, right| {
            seen.push((at, bytes, left == right));
        });
        assert_eq!(seen, [(2, 2, true), (4, 6, false)]);
    }

    #[test]
    fn a_byte_belongs_at_one_place_of_one_file() {
        assert_eq!(of(5, 3).write_at(FileIndex(1), 5), Some(3));
        assert_eq!(of(5, 3).write_at(FileIndex(1), 6), None);
        assert_eq!(of(5, 3).write_at(FileIndex(2), 5), None);
        assert_eq!(Origin::Zero.write_at(FileIndex(2), 5), Some(0));
        assert_eq!(Origin::Garbage.write_at(FileIndex(1), 0), None);
    }
}
