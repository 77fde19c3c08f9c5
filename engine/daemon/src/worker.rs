// SPDX-License-Identifier: Apache-2.0
//! The threads that may wait for a disk, so that the loop never does.
//!
//! A bounded queue for each kind of job ([`Urgency`]), from jobs that a client waits for to jobs
//! that can wait, such as reads of headers. A full queue refuses at once: the door then does plain
//! I/O, and no client waits for another's hung file system.

use rushes_sys::bell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads. Each kind of job has at most [`Urgency::most`] of them. So some are left for opens
/// while slow disks flush, and for flushes while all opens on a hung share wait.
const THREAD_COUNT: usize = 32;
/// Syncs of the same disk that may run at once: a disk that hangs leaves threads for the others.
const SYNC_COUNT_OF_ONE: usize = 8;
/// Jobs that wait, of each kind.
const QUEUE_COUNT_MAX: usize = 4096;
/// A worker's deepest call is a read of a header.
const STACK_BYTES: usize = 256 << 10;

/// The queue of a job; earlier ones go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// A client waits.
    Now,
    /// A client waits for a sync, which may take seconds, and several run at a time.
    Sync,
    /// A file that a client will soon open is opened ahead of it. May wait for a disk, too.
    Ahead,
    /// No client waits.
    Later,
}

impl Urgency {
    const ALL: [Urgency; 4] = [Urgency::Now, Urgency::Sync, Urgency::Ahead, Urgency::Later];

    /// The most threads that do such jobs at a time.
    const fn most(self) -> usize {
        match self {
            Urgency::Now => 12,
            Urgency::Sync => 24,
            Urgency::Ahead => 4,
            Urgency::Later => 1,
        }
    }
}

/// A number that tells one disk from another.
type Disk = u64;

struct Queues<J, R> {
    /// Each with its disk, where that matters.
    waiting: [VecDeque<(Disk, J)>; Urgency::ALL.len()],
    /// The disk of each [`Urgency::Sync`] job under way.
    syncing: Vec<Disk>,
    /// Jobs under way, of each kind.
    busy: [usize; Urgency::ALL.len()],
    done: VecDeque<R>,
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
    /// Start the threads. Any of them calls `work`.
    pub(crate) fn start(
        work: impl Fn(J) -> R + Send + Sync + 'static,
    ) -> std::io::Result<Workers<J, R>> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues {
                waiting: std::array::from_fn(|_| VecDeque::new()),
                syncing: Vec::new(),
                busy: [0; Urgency::ALL.len()],
                done: VecDeque::new(),
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
                    while let Some((urgency, disk, job)) = shared.next() {
                        shared.finish(urgency, disk, work(job));
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

    /// Queue a job; returns it when the queue is full.
    pub(crate) fn push(&self, urgency: Urgency, job: J) -> Result<(), J> {
        self.push_for(urgency, 0, job)
    }

    /// The same for a job that waits for a disk ([`Urgency::Sync`]).
    pub(crate) fn push_sync(&self, disk: Disk, job: J) -> Result<(), J> {
        self.push_for(Urgency::Sync, disk, job)
    }

    fn push_for(&self, urgency: Urgency, disk: Disk, job: J) -> Result<(), J> {
        let mut queues = self.shared.lock();
        let queue = &mut queues.waiting[urgency as usize];
        if queue.len() >= QUEUE_COUNT_MAX {
            return Err(job);
        }
        queue.push_back((disk, job));
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
        queues.waiting.iter().map(VecDeque::len).sum()
    }
}

impl<J, R> Queues<J, R> {
    /// The first job that may have a thread.
    fn take(&mut self, urgency: Urgency) -> Option<(Disk, J)> {
        if self.busy[urgency as usize] >= urgency.most() {
            return None;
        }
        let waiting = &mut self.waiting[urgency as usize];
        let taken = match urgency {
            Urgency::Sync => {
                let busy = |disk| self.syncing.iter().filter(|other| **other == disk).count();
                let may = |(disk, _): &(Disk, J)| busy(*disk) < SYNC_COUNT_OF_ONE;
                let place = waiting.iter().position(may)?;
                waiting.remove(place)
            }
            _ => waiting.pop_front(),
        }?;
        self.busy[urgency as usize] += 1;
        if urgency == Urgency::Sync {
            self.syncing.push(taken.0);
        }
        Some(taken)
    }
}

impl<J, R> Shared<J, R> {
    fn lock(&self) -> MutexGuard<'_, Queues<J, R>> {
        // A worker that panicked left the queues consistent: no change takes two steps.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(Urgency, Disk, J)> {
        let mut queues = self.lock();
        loop {
            if queues.stopping {
                return None;
            }
            for urgency in Urgency::ALL {
                if let Some((disk, job)) = queues.take(urgency) {
                    return Some((urgency, disk, job));
                }
            }
            queues = self
                .work
                .wait(queues)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, urgency: Urgency, disk: Disk, result: R) {
        let mut queues = self.lock();
        queues.done.push_back(result);
        queues.busy[urgency as usize] -= 1;
        let waited = queues.syncing.iter().position(|other| *other == disk);
        if let (Urgency::Sync, Some(place)) = (urgency, waited) {
            queues.syncing.swap_remove(place);
        }
        drop(queues);
        // Fails only for an invalid descriptor; the loop takes the result with the next ring.
        let _ = bell::ring(&*self.bell);
    }
}

impl<J, R> Drop for Workers<J, R> {
    /// Idle threads end; a thread that hangs in a dead file system stays until the process ends.
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

    /// Threads that hold a job 0 until the returned sender is dropped.
    fn held() -> (Workers<u32, u32>, mpsc::Sender<()>) {
        let (release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let workers = Workers::start(move |job: u32| {
            if job == 0 {
                let _ = gate.lock().unwrap().recv();
            }
            job
        })
        .unwrap();
        (workers, release)
    }

    /// The next result; panics when none comes.
    fn pop(workers: &Workers<u32, u32>) -> u32 {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            match workers.pop() {
                Some(result) => break result,
                None => assert!(std::time::Instant::now() < end, "nothing is done"),
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_takes_long_holds_no_client_up_who_opens_a_file() {
        let (workers, release) = held();
        let slow = [Urgency::Sync, Urgency::Ahead, Urgency::Later];
        for disk in 0..THREAD_COUNT as u64 {
            for urgency in slow {
                workers.push_for(urgency, disk, 0).unwrap();
            }
        }
        workers.push(Urgency::Now, 1).unwrap();
        assert_eq!(pop(&workers), 1);
        drop(release);
        for _ in 0..slow.len() * THREAD_COUNT {
            assert_eq!(pop(&workers), 0);
        }
    }

    #[test]
    fn opens_on_a_share_that_hangs_leave_threads_for_flushes() {
        let (workers, release) = held();
        for _ in 0..THREAD_COUNT {
            workers.push(Urgency::Now, 0).unwrap();
        }
        workers.push_sync(1, 1).unwrap();
        assert_eq!(pop(&workers), 1);
        drop(release);
    }

    #[test]
    fn flushes_on_disks_that_hang_leave_threads_for_those_on_another() {
        let (workers, release) = held();
        for disk in [1, 2] {
            for _ in 0..THREAD_COUNT {
                workers.push_sync(disk, 0).unwrap();
            }
        }
        workers.push_sync(3, 1).unwrap();
        assert_eq!(pop(&workers), 1);
        drop(release);
        for _ in 0..2 * THREAD_COUNT {
            assert_eq!(pop(&workers), 0);
        }
        assert!(workers.shared.lock().syncing.is_empty());
    }

    #[test]
    fn what_a_client_waits_for_goes_first_and_a_full_queue_says_so() {
        let (workers, release) = held();
        // Every thread is held, so that the queues fill.
        for index in 0..THREAD_COUNT {
            let urgency = match index < Urgency::Now.most() {
                true => Urgency::Now,
                false => Urgency::Sync,
            };
            workers.push_for(urgency, index as u64, 0).unwrap();
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
        let count = THREAD_COUNT + QUEUE_COUNT_MAX + 1;
        let results: Vec<u32> = (0..count).map(|_| pop(&workers)).collect();
        let first = results.iter().position(|r| *r == 1).unwrap();
        assert!(first < 3 * THREAD_COUNT, "done as number {first}");
        assert!(results.iter().filter(|r| **r == 2).count() == QUEUE_COUNT_MAX);
        assert!(bell::silence(&**workers.bell()).unwrap());
    }
}
