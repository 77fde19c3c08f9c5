// SPDX-License-Identifier: Apache-2.0
//! When a doorbell must be rung, and when that can be spared.
//!
//! A system call for every message would cost more than the message. So a consumer that is about to
//! sleep sets a flag ("ring me"), and a producer rings only when it finds the flag set.
//!
//! ```text
//! producer                         consumer
//!   entry, tail := tail + 1          flag := 1
//!   fence (SeqCst)                   fence (SeqCst)
//!   if flag == 1 and                 if tail moved: flag := 0, go on
//!      swap(flag, 0) == 1: ring      else: sleep until rung
//! ```
//!
//! Each side writes its own word and then reads the other's. Without the fences both reads may be
//! served before both writes are seen (x86 keeps stores in a buffer), the consumer sleeps and the
//! producer does not ring. With them at least one side sees the other's write. The swap makes it one
//! ring for each sleep, whoever resets the flag. `tests::nobody_oversleeps` checks all of it under
//! every interleaving and reordering that the memory model allows (loom).

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A shared 32-bit word; a trait so that the model checker's words can stand in.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
    fn fence(order: Ordering);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }
    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::swap(self, value, order)
    }
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// Producer, after its tail is published: true when it must ring.
pub(crate) fn must_ring<W: Word>(flag: &W) -> bool {
    W::fence(Ordering::SeqCst);
    // Looked at before it is swapped: the flag's line stays shared while the consumer is awake.
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

/// Consumer, before its last look at the tail: from here on the producer rings.
pub(crate) fn arm<W: Word>(flag: &W) {
    flag.store(1, Ordering::Relaxed);
    W::fence(Ordering::SeqCst);
}

/// Consumer, awake again: true when the producer took the flag, so that a ring has come or is on its way.
pub(crate) fn disarm<W: Word>(flag: &W) -> bool {
    flag.swap(0, Ordering::Relaxed) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::Notify;
    use loom::sync::atomic::AtomicU32 as LoomU32;
    use std::sync::Arc;

    impl Word for LoomU32 {
        fn load(&self, order: Ordering) -> u32 {
            LoomU32::load(self, order)
        }
        fn store(&self, value: u32, order: Ordering) {
            LoomU32::store(self, value, order);
        }
        fn swap(&self, value: u32, order: Ordering) -> u32 {
            LoomU32::swap(self, value, order)
        }
        fn fence(order: Ordering) {
            loom::sync::atomic::fence(order);
        }
    }

    struct Shared {
        entries: [LoomU32; 2],
        tail: LoomU32,
        flag: LoomU32,
        bell: Notify,
    }

    /// One producer, one consumer, two messages: all arrive, in order, whole; a lost wake-up is a
    /// deadlock, which loom reports.
    #[test]
    fn nobody_oversleeps() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                entries: [LoomU32::new(0), LoomU32::new(0)],
                tail: LoomU32::new(0),
                flag: LoomU32::new(0),
                bell: Notify::new(),
            });
            let theirs = Arc::clone(&shared);
            let producer = loom::thread::spawn(move || {
                for n in 0..2u32 {
                    theirs.entries[n as usize].store(n + 1, Ordering::Relaxed);
                    theirs.tail.store(n + 1, Ordering::Release);
                    if must_ring(&theirs.flag) {
                        theirs.bell.notify();
                    }
                }
            });
            let mut head = 0;
            while head < 2 {
                let tail = shared.tail.load(Ordering::Acquire);
                if head != tail {
                    let entry = shared.entries[head as usize].load(Ordering::Relaxed);
                    assert_eq!(entry, head + 1);
                    head += 1;
                    continue;
                }
                arm(&shared.flag);
                if shared.tail.load(Ordering::Acquire) != head {
                    if disarm(&shared.flag) {
                        // Rung as well, or about to be: as an eventfd, it stays rung until silenced.
                        shared.bell.wait();
                    }
                    continue;
                }
                shared.bell.wait();
            }
            producer.join().unwrap();
        });
    }
}
