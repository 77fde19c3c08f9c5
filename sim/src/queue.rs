// SPDX-License-Identifier: Apache-2.0
//! What will happen, in order of time; at one instant, in the order it was put in.
//!
//! A binary heap that keeps its memory: nothing is allocated once it has reached its greatest size.

use rushes_core::units::Instant;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

struct Entry<T> {
    at: Instant,
    order: u64,
    what: T,
}

impl<T> Ord for Entry<T> {
    // Reversed, since the heap gives its greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}
impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl<T> Eq for Entry<T> {}

/// The queue.
pub struct Queue<T> {
    heap: BinaryHeap<Entry<T>>,
    order: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue {
            heap: BinaryHeap::new(),
            order: 0,
        }
    }
}

impl<T> Queue<T> {
    /// `what` is to happen at `at`.
    pub fn push(&mut self, at: Instant, what: T) {
        self.order += 1;
        let order = self.order;
        self.heap.push(Entry { at, order, what });
    }

    /// The next thing to happen.
    pub fn pop(&mut self) -> Option<(Instant, T)> {
        self.heap.pop().map(|entry| (entry.at, entry.what))
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Instant> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// How many things are to happen.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// True when nothing is to happen.
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
