// SPDX-License-Identifier: Apache-2.0
//! When acknowledged bytes were on the disk: the writers' acknowledgements compared with the disk's
//! notes.
//!
//! Bytes of a page that two frames share have two acknowledgements: the first frame's part is there
//! when the page's head has come, the second's when its end has, see [`crate::stage::take`]. The
//! last page of a file seldom has an end: its head alone counts, and a page shorter than a head
//! does not count.

use crate::disk::Arrival;
use crate::stage::footage::PAGE_BYTES;
use crate::stage::take::HEAD_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const PAGE: u64 = PAGE_BYTES as u64;
const NEVER: u64 = u64::MAX;

/// The acknowledgements that one writer got for one file.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Number of the file.
    pub number: u64,
    /// Units: bytes.
    pub frame_bytes: u64,
    /// Size of the whole file. Units: bytes.
    pub file_bytes: u64,
    /// When the server acknowledged each frame. Units: ns, CLOCK_MONOTONIC.
    pub acknowledged_ns: Vec<u64>,
}

impl Told {
    /// Acknowledged bytes.
    pub fn bytes(&self) -> u64 {
        (self.acknowledged_ns.len() as u64 * self.frame_bytes).min(self.file_bytes)
    }

    /// When a byte was acknowledged. Units: ns, CLOCK_MONOTONIC.
    fn told_at(&self, byte: u64) -> u64 {
        let frame = (byte / self.frame_bytes.max(1)) as usize;
        self.acknowledged_ns.get(frame).copied().unwrap_or(NEVER)
    }
}

/// How long after their acknowledgement bytes were on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ages {
    /// Pages that came later than the limit, or never.
    pub late_blocks: u64,
    /// Acknowledged bytes in them.
    pub late_bytes: u64,
    /// Those of them that never came.
    pub missing_blocks: u64,
    /// The highest age; a page that never came ages to the end of the run. Units: s.
    pub worst_s: f64,
}

/// When each page of one file came.
#[derive(Clone, Debug, Default)]
struct Pages {
    head_ns: Vec<u64>,
    whole_ns: Vec<u64>,
}

/// The pages that the disk saw, by file.
#[derive(Clone, Debug, Default)]
pub struct Arrived(BTreeMap<u64, Pages>);

impl Arrived {
    /// Sort the disk's log by file and page.
    pub fn new(log: &[Arrival]) -> Arrived {
        let mut files: BTreeMap<u64, Pages> = BTreeMap::new();
        for arrival in log {
            let pages = files.entry(arrival.number).or_default();
            let end = (arrival.page + arrival.count) as usize;
            if pages.head_ns.len() < end {
                pages.head_ns.resize(end, NEVER);
                pages.whole_ns.resize(end, NEVER);
            }
            for page in arrival.page as usize..end {
                // The first arrival counts: after it the page is safe, and later writes repeat it.
                pages.head_ns[page] = pages.head_ns[page].min(arrival.at_ns);
                if arrival.whole {
                    pages.whole_ns[page] = pages.whole_ns[page].min(arrival.at_ns);
                }
            }
        }
        Arrived(files)
    }

    /// Compare with a writer's acknowledgements.
    ///
    /// Units    limit_ns: age above which a page is late · end_ns: instant up to which a missing
    /// page ages
    pub fn ages(&self, told: &Told, limit_ns: u64, end_ns: u64) -> Ages {
        let mut ages = Ages::default();
        let mut worst_ns = 0;
        let bytes = told.bytes();
        for page in 0..bytes.div_ceil(PAGE) {
            let start = page * PAGE;
            let end = (start + PAGE).min(bytes);
            if end - start < HEAD_BYTES as u64 {
                continue;
            }
            let is_whole = end - start == PAGE;
            let (head_ns, whole_ns) = self.at(told.number, page);
            let head_age = age(head_ns, told.told_at(start), end_ns);
            let (last_ns, last_age) = if is_whole {
                (whole_ns, age(whole_ns, told.told_at(end - 1), end_ns))
            } else {
                (head_ns, head_age)
            };
            let oldest = head_age.max(last_age);
            worst_ns = worst_ns.max(oldest);
            if last_ns == NEVER {
                ages.missing_blocks += 1;
            }
            if oldest > limit_ns || last_ns == NEVER {
                ages.late_blocks += 1;
                ages.late_bytes += end - start;
            }
        }
        ages.worst_s = worst_ns as f64 / 1e9;
        ages
    }

    fn at(&self, number: u64, page: u64) -> (u64, u64) {
        let found = self.0.get(&number).and_then(|pages| {
            Some((
                *pages.head_ns.get(page as usize)?,
                *pages.whole_ns.get(page as usize)?,
            ))
        });
        found.unwrap_or((NEVER, NEVER))
    }
}

/// How long after their acknowledgement bytes came; 0 if they came before it.
fn age(came_ns: u64, told_ns: u64, end_ns: u64) -> u64 {
    came_ns.min(end_ns).saturating_sub(told_ns)
}

/// The ages of all files together.
pub fn together(all: impl Iterator<Item = Ages>) -> Ages {
    all.fold(Ages::default(), |sum, one| Ages {
        late_blocks: sum.late_blocks + one.late_blocks,
        late_bytes: sum.late_bytes + one.late_bytes,
        missing_blocks: sum.missing_blocks + one.missing_blocks,
        worst_s: sum.worst_s.max(one.worst_s),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const LIMIT: u64 = 5 * S;

    fn came(at_s: u64, page: u64, count: u64, whole: bool) -> Arrival {
        Arrival {
            at_ns: at_s * S,
            number: 1,
            page,
            count,
            whole,
        }
    }

    /// Two frames of a page and a half: pages 0 and 2 are of one frame each, page 1 of both.
    fn told() -> Told {
        Told {
            number: 1,
            frame_bytes: PAGE * 3 / 2,
            file_bytes: PAGE * 3,
            acknowledged_ns: vec![10 * S, 20 * S],
        }
    }

    #[test]
    fn pages_that_came_in_time_have_an_age_and_no_complaint() {
        let arrived = Arrived::new(&[
            came(12, 0, 1, true),
            came(13, 1, 1, false),
            came(24, 1, 2, true),
        ]);
        let wanted = Ages {
            worst_s: 4.0,
            ..Ages::default()
        };
        assert_eq!(arrived.ages(&told(), LIMIT, 60 * S), wanted);
    }

    #[test]
    fn each_part_of_a_shared_page_has_its_own_acknowledgement() {
        // The first frame's half of page 1 came with the second's half, 14 s after its
        // acknowledgement.
        let arrived = Arrived::new(&[came(11, 0, 1, true), came(24, 1, 2, true)]);
        let wanted = Ages {
            late_blocks: 1,
            late_bytes: PAGE,
            missing_blocks: 0,
            worst_s: 14.0,
        };
        assert_eq!(arrived.ages(&told(), LIMIT, 60 * S), wanted);
    }

    #[test]
    fn what_never_came_ages_to_the_end() {
        let arrived = Arrived::new(&[came(11, 0, 2, true), came(11, 2, 1, false)]);
        let wanted = Ages {
            late_blocks: 1,
            late_bytes: PAGE,
            missing_blocks: 1,
            worst_s: 40.0,
        };
        assert_eq!(arrived.ages(&told(), LIMIT, 60 * S), wanted);
    }

    #[test]
    fn the_first_arrival_counts_and_direct_writes_have_no_age() {
        let arrived = Arrived::new(&[came(9, 0, 3, true), came(50, 0, 3, true)]);
        assert_eq!(arrived.ages(&told(), LIMIT, 60 * S), Ages::default());
    }

    #[test]
    fn a_last_page_without_an_end_is_judged_by_its_head() {
        let mut short = Told {
            file_bytes: PAGE * 2 + 100,
            frame_bytes: PAGE * 2 + 100,
            acknowledged_ns: vec![10 * S],
            ..told()
        };
        let arrived = Arrived::new(&[came(11, 0, 2, true), came(17, 2, 1, false)]);
        let ages = arrived.ages(&short, LIMIT, 60 * S);
        assert_eq!((ages.late_blocks, ages.late_bytes), (1, 100));
        assert_eq!(ages.missing_blocks, 0);
        // So few bytes have no stamp.
        short.file_bytes = PAGE * 2 + 31;
        assert_eq!(arrived.ages(&short, LIMIT, 60 * S).late_blocks, 0);
    }

    #[test]
    fn frames_nobody_acknowledged_are_not_waited_for() {
        let cut = Told {
            acknowledged_ns: vec![10 * S],
            ..told()
        };
        assert_eq!(cut.bytes(), PAGE * 3 / 2);
        let arrived = Arrived::new(&[came(11, 0, 2, false), came(11, 0, 1, true)]);
        assert_eq!(
            arrived.ages(&cut, LIMIT, 60 * S),
            Ages::default().with_worst(1.0)
        );
    }

    impl Ages {
        fn with_worst(self, worst_s: f64) -> Ages {
            Ages { worst_s, ..self }
        }
    }
}
