// SPDX-License-Identifier: Apache-2.0
//! When a producer must ring a doorbell, and when it need not.
//!
//! A system call for every message would cost more than the message. So a consumer that is about to
//! sleep sets a flag, "ring me", and a producer rings only when it finds the flag set.
//!
//! ```text
//! producer                         consumer
//!   entry, tail := tail + 1          flag := 1
//!   fence (SeqCst)                   fence (SeqCst)
//!   if flag == 1 and                 if tail moved: flag := 0, go on
//!      swap(flag, 0) == 1: ring      else: sleep until rung
//! ```
//!
//! Each side writes its own word and then reads the other's. Without the fences both reads may
//! happen before either write is visible, as x86 keeps stores in a buffer: the consumer sleeps and
//! the producer does not ring. With them at least one side sees the other's write. The swap makes
//! it one ring for each sleep, whichever side resets the flag. The tests check it with loom, under
//! the memory model's reorderings and interleavings of up to three preemptions.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// A shared 32-bit word; a trait so that the model checker's words can stand in.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn swap(&self, value: u32, order: Ordering) -> u32;
    fn fence(order: Ordering);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
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
    // Load before the swap: the flag's cache line stays shared while the consumer is awake.
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

/// Consumer, before its last look at the tail: from here on the producer rings.
pub(crate) fn arm<W: Word>(flag: &W) {
    // A plain store would do. The model checker, though, keeps a total order of one word's changes
    // only among read-modify-writes, and a proof is worth these nanoseconds before a sleep.
    flag.swap(1, Ordering::Relaxed);
    W::fence(Ordering::SeqCst);
}

/// Consumer, awake again: true when the producer took the flag, so that a ring has come or is on
/// its way.
pub(crate) fn disarm<W: Word>(flag: &W) -> bool {
    flag.swap(0, Ordering::Relaxed) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU32 as LoomU32;
    use loom::sync::{Arc, Condvar, Mutex};

    impl Word for LoomU32 {
        fn load(&self, order: Ordering) -> u32 {
            LoomU32::load(self, order)
        }
        fn swap(&self, value: u32, order: Ordering) -> u32 {
            LoomU32::swap(self, value, order)
        }
        fn fence(order: Ordering) {
            loom::sync::atomic::fence(order);
        }
    }

    const COUNT: u32 = 2;

    struct Shared {
        entries: [LoomU32; COUNT as usize],
        tail: LoomU32,
        flag: LoomU32,
        bell: EventFd,
    }

    /// As far as it matters here: stays rung until silenced.
    struct EventFd {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl EventFd {
        fn ring(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_one();
        }
        fn silence(&self) -> bool {
            std::mem::take(&mut *self.rung.lock().unwrap())
        }
        fn poll(&self) {
            let mut rung = self.rung.lock().unwrap();
            while !*rung {
                rung = self.changed.wait(rung).unwrap();
            }
        }
    }

    /// One producer, one consumer: all messages arrive, in order and whole. A lost wake-up is a
    /// deadlock, which loom reports.
    fn check(consume: impl Fn(&Shared) + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        // All interleavings take a minute; those with up to three preemptions, a second.
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Arc::new(Shared {
                entries: std::array::from_fn(|_| LoomU32::new(0)),
                tail: LoomU32::new(0),
                flag: LoomU32::new(0),
                bell: EventFd {
                    rung: Mutex::new(false),
                    changed: Condvar::new(),
                },
            });
            let theirs = Arc::clone(&shared);
            let producer = loom::thread::spawn(move || {
                for n in 0..COUNT {
                    theirs.entries[n as usize].store(n + 1, Ordering::Relaxed);
                    theirs.tail.store(n + 1, Ordering::Release);
                    if must_ring(&theirs.flag) {
                        theirs.bell.ring();
                    }
                }
            });
            consume(&shared);
            producer.join().unwrap();
        });
    }

    fn take_all(shared: &Shared, head: &mut u32) {
        let tail = shared.tail.load(Ordering::Acquire);
        while *head != tail {
            let entry = shared.entries[*head as usize].load(Ordering::Relaxed);
            assert_eq!(entry, *head + 1);
            *head += 1;
        }
    }

    /// The daemon's manner: always silences, looks, arms, looks again.
    #[test]
    fn daemon_does_not_oversleep() {
        check(|shared| {
            let mut head = 0;
            loop {
                take_all(shared, &mut head);
                if head == COUNT {
                    return;
                }
                arm(&shared.flag);
                if shared.tail.load(Ordering::Acquire) != head {
                    disarm(&shared.flag);
                    continue;
                }
                shared.bell.poll();
                shared.bell.silence();
            }
        });
    }

    /// The client's manner: silences only when a ring is owed, to spare the system call.
    #[test]
    fn client_does_not_oversleep_nor_wake_for_ever() {
        check(|shared| {
            let (mut head, mut armed, mut owed) = (0, false, false);
            let mut wake_count = 0;
            loop {
                if std::mem::take(&mut armed) && disarm(&shared.flag) {
                    owed = true;
                }
                if owed && shared.bell.silence() {
                    owed = false;
                }
                take_all(shared, &mut head);
                if head == COUNT {
                    return;
                }
                arm(&shared.flag);
                armed = true;
                if shared.tail.load(Ordering::Acquire) != head {
                    continue;
                }
                shared.bell.poll();
                wake_count += 1;
                // One ring a message, at most one of them in vain.
                assert!(wake_count <= 2 * COUNT);
            }
        });
    }
}
