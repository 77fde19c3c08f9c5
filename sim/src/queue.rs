// SPDX-License-Identifier: Apache-2.0
//! Coming events, in order of time; at one instant, in the order of their arrival.
//!
//! A binary heap of small keys over a slab; nothing is allocated once both have reached their
//! greatest size.

use rushes_core::units::Instant;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bits of a key that name the place in the slab; the others are the order. So 2^24 events may wait
/// at once, and 2^40 in a run.
const PLACE_BITS: u32 = 24;

/// The queue.
pub struct Queue<T> {
    heap: BinaryHeap<Reverse<(u64, u64)>>,
    slab: Vec<Option<T>>,
    free: Vec<u32>,
    order: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue {
            heap: BinaryHeap::new(),
            slab: Vec::new(),
            free: Vec::new(),
            order: 0,
        }
    }
}

impl<T> Queue<T> {
    /// `what` will happen at `at`.
    pub fn push(&mut self, at: Instant, what: T) {
        let place = match self.free.pop() {
            Some(place) => {
                self.slab[place as usize] = Some(what);
                place
            }
            None => {
                self.slab.push(Some(what));
                self.slab.len() as u32 - 1
            }
        };
        assert!(place >> PLACE_BITS == 0, "too much is to happen at once");
        self.order += 1;
        let key = self.order << PLACE_BITS | u64::from(place);
        self.heap.push(Reverse((at.0, key)));
    }

    /// The next event.
    pub fn pop(&mut self) -> Option<(Instant, T)> {
        let Reverse((at, key)) = self.heap.pop()?;
        let place = (key & ((1 << PLACE_BITS) - 1)) as u32;
        let what = self.slab[place as usize].take()?;
        self.free.push(place);
        Some((Instant(at), what))
    }

    /// The instant of the next event.
    pub fn next_at(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| Instant(*at))
    }

    /// The number of coming events.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// True when no event is left.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_comes_first_and_ties_keep_their_order() {
        let mut queue = Queue::default();
        queue.push(Instant(5), 'b');
        queue.push(Instant(1), 'a');
        queue.push(Instant(5), 'c');
        let order: String = std::iter::from_fn(|| queue.pop()).map(|e| e.1).collect();
        assert_eq!(order, "abc");
    }
}
