// SPDX-License-Identifier: Apache-2.0
//! The threads that may wait for a disk, so that the loop never does.
//!
//! Two queues, both bounded: what a client waits for, and what can be done later (a file's header).
//! A full queue is answered at once: the client does its own I/O, nobody waits for a hung file system.

use rushes_sys::bell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads. So many that a share that hangs leaves some for the others, and drives that are told to flush as well.
const THREAD_COUNT: usize = 8;
/// Jobs that wait, of each kind.
const QUEUE_COUNT_MAX: usize = 4096;
/// At most so many threads are busy with what is looked for ahead of clients.
const AHEAD_COUNT_MAX: usize = THREAD_COUNT / 2;
/// At most so many are busy with what nobody waits for.
const LATER_COUNT_MAX: usize = 1;
/// A worker's deepest call is a read of a header.
const STACK_BYTES: usize = 256 << 10;

/// Which queue a job waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// A client waits.
    Now,
    /// A client will come to it: what is looked for ahead of him. It may wait long for a disk, several of them at once, and takes at most
    /// half of the threads.
    Ahead,
    /// Nobody does.
    Later,
}

struct Queues<J, R> {
    now: VecDeque<J>,
    ahead: VecDeque<J>,
    later: VecDeque<J>,
    done: VecDeque<R>,
    /// Those that are being done, of the last two.
    ahead_count: usize,
    later_count: usize,
    stopping: bool,
}

struct Shared<J, R> {
    queues: Mutex<Queues<J, R>>,
    work: Condvar,
    bell: Arc<OwnedFd>,
}

/// The pool: jobs in, results out, a doorbell when there are some.
pub(crate) struct Workers<J, R> {
    shared: Arc<Shared<J, R>>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static, R: Send + 'static> Workers<J, R> {
    /// Start the threads. `work` is done in any of them.
    pub(crate) fn start(
        work: impl Fn(J) -> R + Send + Sync + 'static,
    ) -> std::io::Result<Workers<J, R>> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues {
                now: VecDeque::new(),
                ahead: VecDeque::new(),
                later: VecDeque::new(),
                done: VecDeque::new(),
                ahead_count: 0,
                later_count: 0,
                stopping: false,
            }),
            work: Condvar::new(),
            bell: Arc::new(bell::new()?),
        });
        let work = Arc::new(work);
        let mut threads = Vec::new();
        for index in 0..THREAD_COUNT {
            let (shared, work) = (shared.clone(), work.clone());
            let thread = std::thread::Builder::new()
                .name(format!("rushes-work{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    while let Some((urgency, job)) = shared.next() {
                        shared.finish(urgency, work(job));
                    }
                })?;
            threads.push(thread);
        }
        Ok(Workers { shared, threads })
    }

    /// Rung when results wait.
    pub(crate) fn bell(&self) -> &Arc<OwnedFd> {
        &self.shared.bell
    }

    /// Hand over a job; it comes back when the queue is full.
    pub(crate) fn push(&self, urgency: Urgency, job: J) -> Result<(), J> {
        let mut queues = self.shared.lock();
        let queue = match urgency {
            Urgency::Now => &mut queues.now,
            Urgency::Ahead => &mut queues.ahead,
            Urgency::Later => &mut queues.later,
        };
        if queue.len() >= QUEUE_COUNT_MAX {
            return Err(job);
        }
        queue.push_back(job);
        drop(queues);
        self.shared.work.notify_one();
        Ok(())
    }

    /// The next result, if there is one.
    pub(crate) fn pop(&self) -> Option<R> {
        self.shared.lock().done.pop_front()
    }

    /// Jobs that wait.
    pub(crate) fn queue_count(&self) -> usize {
        let queues = self.shared.lock();
        queues.now.len() + queues.ahead.len() + queues.later.len()
    }
}

impl<J, R> Shared<J, R> {
    fn lock(&self) -> MutexGuard<'_, Queues<J, R>> {
        // A worker that panicked left the queues whole: nothing in here is changed in two steps.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(Urgency, J)> {
        let mut queues = self.lock();
        loop {
            if queues.stopping {
                return None;
            }
            if let Some(job) = queues.now.pop_front() {
                return Some((Urgency::Now, job));
            }
            if queues.ahead_count < AHEAD_COUNT_MAX
                && let Some(job) = queues.ahead.pop_front()
            {
                queues.ahead_count += 1;
                return Some((Urgency::Ahead, job));
            }
            if queues.later_count < LATER_COUNT_MAX
                && let Some(job) = queues.later.pop_front()
            {
                queues.later_count += 1;
                return Some((Urgency::Later, job));
            }
            queues = self
                .work
                .wait(queues)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, urgency: Urgency, result: R) {
        let mut queues = self.lock();
        queues.done.push_back(result);
        match urgency {
            Urgency::Now => {}
            Urgency::Ahead => queues.ahead_count -= 1,
            Urgency::Later => queues.later_count -= 1,
        }
        drop(queues);
        // Fails only for a descriptor that is none; the loop would then see it at its next turn.
        let _ = bell::ring(&*self.bell);
    }
}

impl<J, R> Drop for Workers<J, R> {
    /// Idle threads end; one that hangs in a dead file system is left to the process's end.
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.work.notify_all();
        let end = std::time::Instant::now() + std::time::Duration::from_millis(500);
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && std::time::Instant::now() < end {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn what_is_looked_for_ahead_holds_no_client_up_however_long_it_takes() {
        let (release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let workers = Workers::start(move |job: u32| {
            if job == 0 {
                let _ = gate.lock().unwrap().recv();
            }
            job
        })
        .unwrap();
        for _ in 0..2 * THREAD_COUNT {
            workers.push(Urgency::Ahead, 0).unwrap();
        }
        workers.push(Urgency::Now, 1).unwrap();
        let result = loop {
            match workers.pop() {
                Some(result) => break result,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(result, 1);
        drop(release);
        let mut count = 0;
        while count < 2 * THREAD_COUNT {
            match workers.pop() {
                Some(_) => count += 1,
                None => std::thread::yield_now(),
            }
        }
    }

    #[test]
    fn what_a_client_waits_for_goes_first_and_a_full_queue_says_so() {
        let (release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let workers = Workers::start(move |job: u32| {
            if job == 0 {
                let _ = gate.lock().unwrap().recv();
            }
            job
        })
        .unwrap();
        // Every thread is held, so that the queues fill.
        for _ in 0..THREAD_COUNT {
            workers.push(Urgency::Now, 0).unwrap();
        }
        while workers.queue_count() > 0 {
            std::thread::yield_now();
        }
        for _ in 0..QUEUE_COUNT_MAX {
            workers.push(Urgency::Later, 2).unwrap();
        }
        assert_eq!(workers.push(Urgency::Later, 3), Err(3));
        workers.push(Urgency::Now, 1).unwrap();
        drop(release);
        let mut results = Vec::new();
        while results.len() < THREAD_COUNT + QUEUE_COUNT_MAX + 1 {
            match workers.pop() {
                Some(result) => results.push(result),
                None => std::thread::yield_now(),
            }
        }
        let first = results.iter().position(|r| *r == 1).unwrap();
        assert!(first < 3 * THREAD_COUNT, "done as number {first}");
        assert!(results.iter().filter(|r| **r == 2).count() == QUEUE_COUNT_MAX);
        assert!(bell::silence(&**workers.bell()).unwrap());
    }
}
