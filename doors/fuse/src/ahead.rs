// SPDX-License-Identifier: Apache-2.0
//! Reading ahead on a member, where the door reads objects itself.
//!
//! The kernel reads ahead on the mount, and sends what it wants in pieces that reach the object from several threads in any order: to the member's
//! file system that is no reader from front to back, and its disk positions for each piece. So it is told in time what comes.

use crate::nodes::locked;
use rushes_pool::Object;
use rustix::fs::{Advice, fadvise};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

/// Shorter requests are nobody's who reads from front to back: the kernel would have asked for more. Units: bytes.
const REQUEST_BYTES_MIN: u64 = 128 << 10;
/// Requests come in any order within as much as the kernel reads ahead. Units: bytes.
const DISORDER_BYTES: u64 = 4 << 20;
/// So many requests are not enough to be a reader from front to back.
const COUNT_MIN: u64 = 2;
/// Asked for ahead of the furthest request, and again when half of it is left. Units: bytes.
const AHEAD_BYTES: u64 = 8 << 20;

/// Who reads each object of a file from front to back.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<HashMap<Object, Run>>);

impl Ahead {
    /// Before so many bytes of the object are read: those that come after them are on their way.
    pub(crate) fn reads(&self, object: Object, fd: &OwnedFd, start: u64, length: u64) {
        let next = locked(&self.0)
            .entry(object)
            .or_default()
            .next(start, length);
        if let Some((start, length)) = next {
            // Who is not heard waits for the disk as before.
            let _ = fadvise(fd, start, NonZeroU64::new(length), Advice::WillNeed);
        }
    }
}

/// One reader of an object. Two who are far from each other are none. Units: bytes.
#[derive(Debug, Default)]
struct Run {
    reached: u64,
    asked: u64,
    /// Requests that followed each other.
    count: u64,
}

impl Run {
    /// What to ask for.
    fn next(&mut self, start: u64, length: u64) -> Option<(u64, u64)> {
        let end = start.saturating_add(length);
        if length < REQUEST_BYTES_MIN {
            return None;
        }
        let follows = start <= self.reached.saturating_add(DISORDER_BYTES)
            && end.saturating_add(DISORDER_BYTES) > self.reached;
        if !follows {
            // He may go on from here.
            *self = Run {
                reached: end,
                asked: end,
                count: 1,
            };
            return None;
        }
        self.reached = self.reached.max(end);
        self.count += 1;
        let from = self.asked.max(self.reached);
        // Who only looks at the beginning goes no further.
        if self.count <= COUNT_MIN || from - self.reached >= AHEAD_BYTES / 2 {
            return None;
        }
        self.asked = self.reached.saturating_add(AHEAD_BYTES);
        Some((from, self.asked - from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn who_reads_from_front_to_back_finds_everything_asked_for_once() {
        let mut run = Run::default();
        let mut asked = 0;
        // As the kernel's requests come: two and two the wrong way round.
        for at in (0..64).map(|at: u64| at ^ 1) {
            if let Some((start, length)) = run.next(at * MIB, MIB) {
                assert!(start >= asked, "{start} was asked for before");
                assert!(
                    length >= AHEAD_BYTES / 2,
                    "in pieces that are worth a positioning"
                );
                asked = start + length;
            }
            let is_begun = at >= COUNT_MIN;
            assert!(!is_begun || asked >= (at + 4) * MIB, "{at}: {asked}");
        }
    }

    #[test]
    fn nothing_is_asked_for_who_reads_here_and_there() {
        let mut run = Run::default();
        for at in 1..100 {
            assert_eq!(run.next(at * 7 % 100 * 50 * MIB, MIB), None, "{at}");
        }
        for at in 0..100 {
            assert_eq!(run.next(at * 4096, 4096), None, "less than he would read");
        }
    }
}
