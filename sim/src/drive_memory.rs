// SPDX-License-Identifier: Apache-2.0
//! The volatile memory of a drive: bytes that the drive has taken and not yet brought to its
//! medium.
//!
//! A drive answers a write as soon as its memory has the bytes, and destages them later in the
//! order of their positions. A flush is a line in time: it has ended when no byte that came before
//! the line is left in the memory. The memory knows positions only; clocks and heads belong to the
//! disk.

use std::collections::BTreeMap;

/// The longest run that a drive destages at once. Units: bytes.
pub const DESTAGE_BYTES: u64 = 4 << 20;

/// Contiguous bytes of the medium that came between the same two flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    bytes: u64,
    /// The number of flushes requested before these bytes came.
    flushes: u64,
}

/// The memory.
#[derive(Clone, Debug, Default)]
pub struct DriveMemory {
    /// Size; 0: the drive has none. Units: bytes.
    pub capacity: u64,
    /// Bytes in it.
    pub bytes: u64,
    /// By position on the medium. Runs do not overlap.
    runs: BTreeMap<u64, Run>,
    /// Flushes requested so far.
    flushes: u64,
}

impl DriveMemory {
    /// An empty memory of that size.
    pub fn new(capacity: u64) -> DriveMemory {
        DriveMemory {
            capacity,
            ..DriveMemory::default()
        }
    }

    /// True when a write of `bytes` has to wait. A write longer than the memory fits when it is
    /// empty.
    pub fn is_full_for(&self, bytes: u64) -> bool {
        self.bytes > 0 && self.bytes + bytes > self.capacity
    }

    /// True when the drive destages although a read waits: little room is left, or a flush waits.
    pub fn is_pressing(&self) -> bool {
        self.bytes >= self.capacity / 4 * 3 || self.has_of(self.flushes)
    }

    /// Draws a line: the flush with the returned number covers all bytes that are here now.
    pub fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// True while the memory has bytes that the flush with this number covers.
    pub fn has_of(&self, flush: u64) -> bool {
        self.runs.values().any(|run| run.flushes < flush)
    }

    /// Takes bytes; they replace those at the same place.
    pub fn put(&mut self, start: u64, bytes: u64) {
        self.remove(start, bytes);
        let flushes = self.flushes;
        self.runs.insert(start, Run { bytes, flushes });
        self.bytes += bytes;
    }

    /// Forgets bytes: the medium gets them now, or other bytes replace them.
    pub fn remove(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        let touched: Vec<(u64, Run)> = self
            .runs
            .range(..end)
            .rev()
            .take_while(|&(&at, run)| at + run.bytes > start)
            .map(|(&at, &run)| (at, run))
            .collect();
        for (at, run) in touched {
            self.runs.remove(&at);
            self.bytes -= run.bytes;
            for (from, to) in [(at, start), (end, at + run.bytes)] {
                if from < to {
                    let bytes = to - from;
                    self.runs.insert(from, Run { bytes, ..run });
                    self.bytes += bytes;
                }
            }
        }
    }

    /// Start and length of the next bytes to destage: ahead of the head, or else the first of the
    /// disk.
    pub fn next_run(&self, head: u64) -> Option<(u64, u64)> {
        let ahead = self.runs.range(head..).next();
        let (&start, _) = ahead.or_else(|| self.runs.first_key_value())?;
        let mut end = start;
        for (&at, run) in self.runs.range(start..) {
            if at > end || end - start >= DESTAGE_BYTES {
                break;
            }
            end = at + run.bytes;
        }
        Some((start, (end - start).min(DESTAGE_BYTES)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_at_the_same_place_are_there_once() {
        let mut memory = DriveMemory::new(1000);
        memory.put(100, 100);
        memory.put(150, 100);
        assert_eq!(memory.bytes, 150);
        memory.remove(120, 10);
        assert_eq!(memory.bytes, 140);
        assert_eq!(memory.next_run(0), Some((100, 20)));
        assert_eq!(memory.next_run(101), Some((130, 120)));
    }

    #[test]
    fn a_flush_covers_what_came_before_it() {
        let mut memory = DriveMemory::new(1000);
        memory.put(0, 10);
        let first = memory.begin_flush();
        memory.put(20, 10);
        assert!(memory.has_of(first) && memory.is_pressing());
        memory.remove(0, 10);
        assert!(!memory.has_of(first) && !memory.is_pressing());
        let second = memory.begin_flush();
        assert!(memory.has_of(second));
        // Bytes that replace others are younger than the flush.
        memory.put(20, 10);
        assert!(!memory.has_of(second));
    }

    #[test]
    fn the_head_goes_on_and_begins_again_at_the_start() {
        let mut memory = DriveMemory::new(64 << 20);
        memory.put(0, 3 << 20);
        memory.put(3 << 20, 3 << 20);
        memory.put(40 << 20, 1 << 20);
        assert_eq!(memory.next_run(0), Some((0, DESTAGE_BYTES)));
        assert_eq!(memory.next_run(8 << 20), Some((40 << 20, 1 << 20)));
        assert_eq!(memory.next_run(50 << 20), Some((0, DESTAGE_BYTES)));
        assert_eq!(DriveMemory::new(1).next_run(0), None);
    }

    #[test]
    fn a_full_memory_lets_writes_wait_and_an_empty_one_takes_any() {
        let mut memory = DriveMemory::new(100);
        assert!(!memory.is_full_for(1000));
        memory.put(0, 80);
        assert!(memory.is_full_for(21) && !memory.is_full_for(20));
        assert!(memory.is_pressing());
    }
}
