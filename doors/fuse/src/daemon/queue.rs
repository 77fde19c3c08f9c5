// SPDX-License-Identifier: Apache-2.0
//! Between the threads that answer the kernel and the one that has a member's session.

use crate::lock::locked;
use rushes_core::units::FilePart;
use rushes_pool::ObjectId;
use rushes_shm::client::Lent;
use rushes_sys::bell;
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The daemon's answer to a read.
pub(crate) enum Served {
    /// Fewer than asked at the object's end only.
    Bytes(Vec<u8>),
    /// The daemon read nothing, or got an error: read the object itself, which gives the right
    /// result.
    Plain,
    /// The object lacks bytes that the daemon has, and cannot give now.
    Failed(Errno),
}

/// The caller that waits for a read. It gets one answer; `Plain`, if this is dropped before.
pub(crate) struct Waiter(Option<Box<dyn FnOnce(Served) + Send>>);

impl Waiter {
    /// `told` is called by a member's thread: it must not wait for anything.
    pub(crate) fn new(told: impl FnOnce(Served) + Send + 'static) -> Waiter {
        Waiter(Some(Box::new(told)))
    }

    pub(super) fn tell(mut self, served: Served) {
        if let Some(told) = self.0.take() {
            told(served);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(told) = self.0.take() {
            told(Served::Plain);
        }
    }
}

/// The daemon's answer to a write or a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// The daemon did all of it.
    Whole,
    /// The daemon did nothing: do it on the object.
    Plain,
    /// The daemon did nothing, and will not.
    Failed(Errno),
}

/// The answer to a request for a hold.
pub(super) enum Hold {
    /// No operation on it is under way before CHANGED. If the daemon dies meanwhile, none begins to
    /// serve as long as this lives.
    Held(Grip),
    /// There is no daemon, and none begins to serve as long as this lives.
    Alone(Plain),
    Failed(Errno),
}

/// The part of an object that the door changed on its own descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// These bytes, all of them written.
    Bytes { offset: u64, length: u64 },
    /// Anything from there on: bytes, length and blocks.
    From { offset: u64 },
    /// Length or blocks alone: no byte of it waits in the kernel's cache.
    Size,
}

impl Changed {
    /// Nothing at all.
    pub(crate) const NOTHING: Changed = Changed::Bytes {
        offset: 0,
        length: 0,
    };
}

pub(super) enum Job {
    Read {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        length: usize,
        offset: u64,
        waiter: Waiter,
    },
    Write {
        object: ObjectId,
        /// Open for writing.
        fd: Arc<OwnedFd>,
        /// The caller's own buffer: the caller waits for the answer.
        bytes: Lent,
        offset: u64,
        answer: SyncSender<Done>,
    },
    Sync {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        answer: SyncSender<Done>,
    },
    Hold {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        answer: SyncSender<Hold>,
    },
    Changed {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        what: Changed,
        answer: SyncSender<()>,
    },
    /// Its last name is gone.
    Gone {
        object: ObjectId,
        fd: Arc<OwnedFd>,
    },
    /// A program has opened its file to read it. Nobody asks the daemon for bytes in the kernel's
    /// cache.
    Opened {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        /// Entered as long as the object is open; when this job runs it may be closed.
        name: Option<(PathBuf, FilePart)>,
    },
    Closed(ObjectId),
    /// The user and the client of its file became known or changed.
    Stationed(ObjectId),
    /// The result for a file that the daemon has asked for.
    Found {
        number: u64,
        file: Result<OwnedFd, Errno>,
    },
}

/// The requests for one member's thread.
pub(super) struct Queue {
    jobs: Mutex<Vec<Job>>,
    pub(super) bell: OwnedFd,
    /// There is a session; without one no thread asks.
    serves: AtomicBool,
    /// There was one.
    has_served: AtomicBool,
    /// The session takes writes.
    pub(super) takes_writes: AtomicBool,
    /// The session looks for another daemon.
    pub(super) is_lost: AtomicBool,
    closing: AtomicBool,
    gate: Arc<Gate>,
}

impl Queue {
    pub(super) fn new() -> io::Result<Queue> {
        Ok(Queue {
            jobs: Mutex::default(),
            bell: bell::new()?,
            serves: AtomicBool::new(false),
            has_served: AtomicBool::new(false),
            takes_writes: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            // No thread has looked for a daemon yet, and one that runs may have parts of objects in
            // its cache.
            gate: Arc::new(Gate {
                state: Mutex::new(GateState {
                    is_shut: true,
                    plain_count: 0,
                }),
                left: Condvar::new(),
            }),
        })
    }

    /// Queues a job that is answered. Returns the end on which the answer comes; an error on it
    /// means that the job was dropped.
    pub(super) fn ask<T>(&self, job: impl FnOnce(SyncSender<T>) -> Job) -> Receiver<T> {
        let (answer, answered) = sync_channel(1);
        self.push(job(answer));
        answered
    }

    pub(super) fn push(&self, job: Job) {
        let mut jobs = locked(&self.jobs);
        // Its member left, and no thread takes jobs: dropping the job tells a waiting caller.
        if self.is_closing() {
            drop(jobs);
            return;
        }
        let was_empty = jobs.is_empty();
        jobs.push(job);
        drop(jobs);
        if was_empty {
            // Fails only for a wrong descriptor; the thread looks by itself each second.
            let _ = bell::ring(&self.bell);
        }
    }

    pub(super) fn take(&self) -> Vec<Job> {
        std::mem::take(&mut locked(&self.jobs))
    }

    /// Whether jobs wait.
    pub(super) fn has_jobs(&self) -> bool {
        !locked(&self.jobs).is_empty()
    }

    /// Ends its thread.
    pub(super) fn close(&self) {
        let jobs = locked(&self.jobs);
        self.closing.store(true, Ordering::Release);
        drop(jobs);
        let _ = bell::ring(&self.bell);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether a session takes the jobs.
    pub(super) fn serves(&self) -> bool {
        self.serves.load(Ordering::Acquire)
    }

    /// Whether one does, or has done so.
    pub(super) fn has_served(&self) -> bool {
        self.has_served.load(Ordering::Acquire)
    }

    /// Begins a session as soon as no thread changes objects without it.
    pub(super) fn begin_to_serve(&self) {
        self.has_served.store(true, Ordering::Release);
        self.gate.shut();
        self.serves.store(true, Ordering::Release);
    }

    pub(super) fn end_serving(&self) {
        self.serves.store(false, Ordering::Release);
        self.gate.open();
    }

    /// There is no daemon for this member: threads may change objects without one.
    pub(super) fn allow_plain(&self) {
        self.gate.open();
    }

    /// Allows the caller to change objects while there is no session. None: there is one, or one
    /// begins, or no thread has looked for one yet. Does not wait for it.
    pub(super) fn begin_plain(&self) -> Option<Plain> {
        let mut state = self.gate.locked();
        (!state.is_shut).then(|| Gate::enter(&self.gate, &mut state))
    }

    /// The same beside a session, called by its thread.
    pub(super) fn give_plain(&self) -> Plain {
        Gate::enter(&self.gate, &mut self.gate.locked())
    }

    /// Whether no thread changes objects without the daemon.
    pub(super) fn is_untouched(&self) -> bool {
        self.gate.locked().plain_count == 0
    }
}

/// Counts the threads that change objects without the daemon's knowledge; while one does, no
/// session begins.
///
/// Otherwise a daemon could begin to serve, read a part of an object that is being changed, and
/// write that back beside bytes of its own.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    is_shut: bool,
    plain_count: usize,
}

impl Gate {
    fn locked(&self) -> std::sync::MutexGuard<'_, GateState> {
        locked(&self.state)
    }

    fn enter(gate: &Arc<Gate>, state: &mut GateState) -> Plain {
        state.plain_count += 1;
        Plain(Arc::clone(gate))
    }

    /// Closes the gate, and waits for the threads that are inside.
    fn shut(&self) {
        let mut state = self.locked();
        state.is_shut = true;
        while state.plain_count > 0 {
            state = self
                .left
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn open(&self) {
        self.locked().is_shut = false;
    }
}

/// Allows changes of a member's objects without the daemon as long as this lives.
#[derive(Debug)]
pub(super) struct Plain(Arc<Gate>);

impl Drop for Plain {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        state.plain_count -= 1;
        // It is a system call, also if no thread waits, and only the thread that shuts the gate
        // waits.
        if state.plain_count == 0 && state.is_shut {
            self.0.left.notify_all();
        }
    }
}

/// A hold that the daemon has given. If the thread that asked has left, the hold ends with this.
pub(super) struct Grip {
    queue: Arc<Queue>,
    object: ObjectId,
    fd: Arc<OwnedFd>,
    plain: Option<Plain>,
}

impl Grip {
    /// If the daemon dies meanwhile, none begins to serve before this ends.
    pub(super) fn new(queue: &Arc<Queue>, object: ObjectId, fd: Arc<OwnedFd>) -> Grip {
        Grip {
            queue: Arc::clone(queue),
            object,
            fd,
            plain: Some(queue.give_plain()),
        }
    }

    /// From now on the caller ends the hold.
    pub(super) fn take(mut self) -> Option<Plain> {
        self.plain.take()
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        if self.plain.take().is_none() {
            return;
        }
        // No thread waits for the answer; nothing was changed.
        let (answer, _) = std::sync::mpsc::sync_channel(1);
        self.queue.push(Job::Changed {
            object: self.object,
            fd: Arc::clone(&self.fd),
            what: Changed::NOTHING,
            answer,
        });
    }
}

/// Names of open objects for people and rules: the paths of their files in the tree, and the part
/// of its file that each object has.
#[derive(Debug, Default)]
pub(super) struct Names(Mutex<HashMap<ObjectId, (PathBuf, FilePart)>>);

impl Names {
    pub(super) fn set(&self, object: ObjectId, name: (PathBuf, FilePart)) {
        locked(&self.0).insert(object, name);
    }

    pub(super) fn of(&self, object: ObjectId) -> Option<(PathBuf, FilePart)> {
        locked(&self.0).get(&object).cloned()
    }

    pub(super) fn forget(&self, object: ObjectId) {
        locked(&self.0).remove(&object);
    }
}

/// Between two tries of a request that could not begin yet.
pub(super) const TRY_EVERY: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_begins_when_nobody_changes_objects_without_it() {
        let queue = Arc::new(Queue::new().expect("an eventfd"));
        assert!(queue.begin_plain().is_none(), "there may be a daemon");
        queue.allow_plain();
        let plain = queue.begin_plain().expect("there is no session");
        let other = queue.begin_plain().expect("nor beside another");
        let begins = Arc::clone(&queue);
        let session = std::thread::spawn(move || begins.begin_to_serve());
        while queue.begin_plain().is_some() {
            std::thread::yield_now();
        }
        assert!(!queue.serves(), "two go on");
        drop(plain);
        assert!(!queue.serves() && !queue.is_untouched());
        drop(other);
        session.join().expect("no panic");
        assert!(queue.serves() && queue.is_untouched());
        assert!(queue.begin_plain().is_none(), "it is to be asked");
        let given = queue.give_plain();
        assert!(!queue.is_untouched());
        drop(given);
        queue.end_serving();
        assert!(queue.begin_plain().is_some());
    }
}
