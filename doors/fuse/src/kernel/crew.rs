// SPDX-License-Identifier: Apache-2.0
//! Threads that take requests, few of them at a time.
//!
//! The kernel gives each request to the thread that has waited longest. If all threads waited, each
//! request would come to another thread's buffer, which is in no processor cache any more, and all
//! of these buffers would take memory. So a thread that is done stays at home while enough others
//! wait, and one leaves home when too few do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// When fewer wait for a request, one more leaves home.
const WAITING_MIN: usize = 2;
/// When more do, a thread that is done stays at home. If both were the same, threads would come and
/// go with each request of many clients.
const WAITING_MAX: usize = 6;

/// See the module.
#[derive(Debug)]
pub(crate) struct Crew {
    /// How many wait for a request in the kernel, or are on their way there.
    waiting: AtomicUsize,
    home: Mutex<Home>,
    called: Condvar,
}

#[derive(Debug, Default)]
struct Home {
    /// How many threads are at home.
    count: usize,
    /// How many others have been called to leave; they count as waiting already.
    call_count: usize,
    /// No thread stays any more.
    is_closed: bool,
}

/// A thread has a request. Dropped when it is answered, or passed to another thread: by then this
/// thread may stay at home for long.
#[derive(Debug)]
pub(crate) struct AtWork<'a> {
    crew: &'a Crew,
    /// More parts of its request will come: the thread does not go home.
    stays: bool,
}

impl Crew {
    /// So many threads start, all of them by waiting.
    pub(crate) fn new(count: usize) -> Arc<Crew> {
        Arc::new(Crew {
            waiting: AtomicUsize::new(count),
            home: Mutex::default(),
            called: Condvar::new(),
        })
    }

    /// This thread has got a request.
    pub(crate) fn at_work(&self) -> AtWork<'_> {
        self.begins();
        AtWork {
            crew: self,
            stays: false,
        }
    }

    /// The same for a part of a request: FORGET comes in batches of inodes.
    pub(crate) fn at_one_of_many(&self) -> AtWork<'_> {
        self.begins();
        AtWork {
            crew: self,
            stays: true,
        }
    }

    fn begins(&self) {
        let waiting = self.waiting.fetch_sub(1, Ordering::SeqCst) - 1;
        if waiting < WAITING_MIN {
            let mut home = self.home();
            if home.count > 0 {
                home.count -= 1;
                home.call_count += 1;
                self.waiting.fetch_add(1, Ordering::SeqCst);
                drop(home);
                self.called.notify_one();
            }
        }
    }

    fn done(&self) {
        let waiting = self.waiting.fetch_add(1, Ordering::SeqCst) + 1;
        if waiting <= WAITING_MAX {
            return;
        }
        let mut home = self.home();
        let waiting = self.waiting.fetch_sub(1, Ordering::SeqCst) - 1;
        // A thread that got a request meanwhile found no other thread at home.
        if waiting < WAITING_MIN || home.is_closed {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            return;
        }
        home.count += 1;
        while home.call_count == 0 && !home.is_closed {
            let woken = self.called.wait(home);
            home = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if home.call_count > 0 {
            home.call_count -= 1;
        } else {
            home.count -= 1;
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// All threads leave and stay away, to learn that the mount has ended.
    pub(crate) fn close(&self) {
        self.home().is_closed = true;
        self.called.notify_all();
    }

    fn home(&self) -> MutexGuard<'_, Home> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        // A thread that panics takes no further request.
        if std::thread::panicking() {
            return;
        }
        match self.stays {
            true => drop(self.crew.waiting.fetch_add(1, Ordering::SeqCst)),
            false => self.crew.done(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    /// Threads take turns at one queue, as at the kernel's: the one that has waited longest gets
    /// the next request.
    #[test]
    fn few_wait_and_as_many_as_there_is_work_for_do_it() {
        const COUNT: usize = 32;
        let crew = Crew::new(COUNT);
        let (give, take) = channel::<Receiver<()>>();
        let take = Arc::new(Mutex::new(take));
        let threads: Vec<_> = (0..COUNT)
            .map(|_| {
                let (crew, take) = (Arc::clone(&crew), Arc::clone(&take));
                std::thread::spawn(move || {
                    loop {
                        let taken = take.lock().expect("sound").recv();
                        let Ok(until) = taken else {
                            return;
                        };
                        let _work = crew.at_work();
                        let _ = until.recv();
                    }
                })
            })
            .collect();
        let until = |is_so: &dyn Fn(usize, usize) -> bool| {
            let end = Instant::now() + Duration::from_secs(20);
            loop {
                let home = crew.home().count;
                let waiting = crew.waiting.load(Ordering::SeqCst);
                if is_so(waiting, home) {
                    return;
                }
                assert!(Instant::now() < end, "{waiting} wait, {home} are at home");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for _ in 0..3 {
            // All are busy at once, though most were at home.
            let ends: Vec<_> = (0..COUNT)
                .map(|_| {
                    let (end, until) = channel();
                    give.send(until).expect("somebody takes it");
                    end
                })
                .collect();
            until(&|waiting, home| waiting == 0 && home == 0);
            drop(ends);
            until(&|waiting, home| {
                (WAITING_MIN..=WAITING_MAX).contains(&waiting) && waiting + home == COUNT
            });
        }
        drop(give);
        crew.close();
        for thread in threads {
            thread.join().expect("ended");
        }
        assert_eq!(crew.home().count, 0);
    }
}
