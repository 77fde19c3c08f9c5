// SPDX-License-Identifier: Apache-2.0
//! When pages stamped by `crate::stage::take` came to the disk: a log that grows from `stamps on`.
//!
//! A page has come when the disk has acknowledged its write. The log does not follow it from the
//! disk's write cache to the medium. One entry stands for pages that follow one another in a file
//! and came in one request.

use std::fmt;
use std::str::FromStr;

use rushes_core::units::Instant;

use super::cache::ATOM_BYTES;
use crate::stage::take::read_stamp;

/// Entries of a log at most, 40 bytes each. Twelve recordings of 100 Mb/s make some ten thousand a
/// minute.
const ENTRIES_MAX: usize = 2 << 20;

/// A run of pages in one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    number: u64,
    page: u64,
    count: u64,
    whole: bool,
}

/// When a run of pages came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Units: ns, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// Number of the file.
    pub number: u64,
    /// First page.
    pub page: u64,
    /// Number of pages.
    pub count: u64,
    /// The pages were complete up to their ends.
    pub whole: bool,
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent = if self.whole { "whole" } else { "head" };
        write!(
            f,
            "{} {} {} {} {extent}",
            self.at_ns, self.number, self.page, self.count
        )
    }
}

impl FromStr for Arrival {
    type Err = String;

    fn from_str(line: &str) -> Result<Arrival, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words.get(index)?.parse::<u64>().ok();
        let whole = match words.get(4) {
            Some(&"whole") => Some(true),
            Some(&"head") => Some(false),
            _ => None,
        };
        (|| {
            Some(Arrival {
                at_ns: number(0)?,
                number: number(1)?,
                page: number(2)?,
                count: number(3)?,
                whole: whole?,
            })
        })()
        .ok_or_else(|| {
            format!("read \"{line}\": expected a time, a file, a page, a count, whole|head")
        })
    }
}

/// The stamped pages of a write of `bytes` at `offset` of the disk.
pub(super) fn scan(key: u64, offset: u64, bytes: &[u8]) -> Vec<Seen> {
    let mut seen: Vec<Seen> = Vec::new();
    let skip = (offset.next_multiple_of(ATOM_BYTES) - offset) as usize;
    // Whole pages suffice: a file system whose blocks are pages writes nothing else.
    for page in bytes
        .get(skip..)
        .unwrap_or_default()
        .chunks_exact(ATOM_BYTES as usize)
    {
        let Some(stamp) = read_stamp(key, page) else {
            continue;
        };
        match seen.last_mut() {
            Some(last)
                if last.number == stamp.number
                    && last.whole == stamp.whole
                    && last.page + last.count == stamp.page =>
            {
                last.count += 1;
            }
            _ => seen.push(Seen {
                number: stamp.number,
                page: stamp.page,
                count: 1,
                whole: stamp.whole,
            }),
        }
    }
    seen
}

/// The pages that came since the key was set.
#[derive(Debug, Default)]
pub(super) struct Log {
    arrivals: Vec<Arrival>,
    lost_count: u64,
}

impl Log {
    pub(super) fn note(&mut self, seen: &[Seen], at: Instant) {
        for run in seen {
            if self.arrivals.len() == ENTRIES_MAX {
                self.lost_count += 1;
                continue;
            }
            self.arrivals.push(Arrival {
                at_ns: at.0,
                number: run.number,
                page: run.page,
                count: run.count,
                whole: run.whole,
            });
        }
    }

    /// Entries that found no room.
    pub(super) fn lost_count(&self) -> u64 {
        self.lost_count
    }

    pub(super) fn text(&self) -> Vec<u8> {
        let mut text = String::with_capacity(self.arrivals.len() * 40);
        for arrival in &self.arrivals {
            text += &arrival.to_string();
            text.push('\n');
        }
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::take::Take;

    const KEY: u64 = 77;

    #[test]
    fn pages_that_follow_one_another_are_one_entry() {
        let mut bytes = vec![0u8; 6 * ATOM_BYTES as usize];
        let (first, rest) = bytes.split_at_mut(2 * ATOM_BYTES as usize);
        let take = |number| Take { key: KEY, number };
        take(1).fill(40 * ATOM_BYTES, first);
        take(2).fill(0, &mut rest[..ATOM_BYTES as usize]);
        // A page whose end has not come yet.
        take(2).fill(ATOM_BYTES, &mut rest[ATOM_BYTES as usize..][..1000]);
        let run = |number, page, count, whole| Seen {
            number,
            page,
            count,
            whole,
        };
        let wanted = [run(1, 40, 2, true), run(2, 0, 1, true), run(2, 1, 1, false)];
        assert_eq!(scan(KEY, 8 * ATOM_BYTES, &bytes), wanted);
        assert_eq!(scan(KEY + 1, 8 * ATOM_BYTES, &bytes), []);
        // A request that begins within a page: the scan looks at whole pages of the disk alone.
        assert_eq!(scan(KEY, 8 * ATOM_BYTES - 512, &bytes[..100]), []);
    }

    #[test]
    fn entries_read_back_as_they_were_written() {
        let mut log = Log::default();
        let mut page = vec![0u8; ATOM_BYTES as usize];
        let take = Take {
            key: KEY,
            number: 3,
        };
        take.fill(5 * ATOM_BYTES, &mut page);
        log.note(&scan(KEY, 0, &page), Instant(1234));
        let text = String::from_utf8(log.text()).unwrap();
        assert_eq!(text, "1234 3 5 1 whole\n");
        let arrival: Arrival = text.parse().unwrap();
        assert_eq!(arrival.to_string() + "\n", text);
        assert!("1234 3 5 whole".parse::<Arrival>().is_err());
    }
}
