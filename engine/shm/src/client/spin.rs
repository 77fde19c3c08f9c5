// SPDX-License-Identifier: Apache-2.0
//! Before sleeping: a look at the ring, which costs less than a wake-up. Where it does not pay, the
//! client mostly skips it.

use super::*;

/// Longest look at the ring before sleeping: about what a sleep and a wake-up cost together.
const SPIN: Duration = Duration::from_us(20);

impl Client {
    /// Before the caller sleeps: look for a reply a moment longer, as long as that pays. Meanwhile
    /// the daemon need not ring.
    ///
    /// Returns  true: one came, or `else_` returned true: call [`Client::poll`], or no bell rings
    ///          for the next
    pub fn linger(&mut self, mut else_: impl FnMut() -> bool) -> bool {
        if !self.usable() || self.unanswered == 0 || !self.ready.is_empty() {
            return false;
        }
        self.wake();
        let memory = &self.memory;
        let head = self.reply_head;
        let came = self
            .spin
            .until(|| !matches!(memory.waiting(Which::Replies, head), Ok(0)) || else_());
        if !came {
            self.rest();
        }
        came
    }

    pub(super) fn spin_for_reply(&mut self) -> bool {
        let memory = &self.memory;
        let head = self.reply_head;
        // The call that takes the replies finds an error again, and ends the session.
        self.spin
            .until(|| !matches!(memory.waiting(Which::Replies, head), Ok(0)))
    }
}

/// Looks for a reply before sleeping, as long as that pays.
pub(super) struct Spin {
    possible: bool,
    /// Above zero while recent spins found something.
    worth: i32,
}

impl Spin {
    pub(super) fn new() -> Spin {
        // The processors that this process may run on.
        let processors = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
        Spin {
            possible: processors > 1,
            worth: 1,
        }
    }

    pub(super) fn until(&mut self, mut found: impl FnMut() -> bool) -> bool {
        if !self.possible {
            return false;
        }
        // A reader of cold files pays for a look in sixteen, not for each.
        self.worth += 1;
        if self.worth <= 0 {
            return false;
        }
        let deadline = clock::now() + SPIN;
        loop {
            for _ in 0..16 {
                if found() {
                    self.worth = 1;
                    return true;
                }
                std::hint::spin_loop();
            }
            if clock::now() >= deadline {
                self.worth = -16;
                return false;
            }
        }
    }
}
