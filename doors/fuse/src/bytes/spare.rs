// SPDX-License-Identifier: Apache-2.0
//! Descriptors of a file's objects beside its first: the door keeps them only to be quick, and
//! closes some when there are too many.
//!
//! A file in twenty objects may cost 21 descriptors, of which the door counts two when it opens the
//! file (descriptors.rs). The others have the part of the budget that the counted ones leave: a
//! thread that opens one more closes those that have gone unused for longest, of files that no
//! thread uses at the moment. The door opens them again when it needs them.
//!
//! The kernel reports write errors by a descriptor that was written. So a thread asks for them
//! before it closes the descriptor. Since a disk may take long for that, or hang, it does so in the
//! line of that member, for one object at a time, and a thread that opened something does not wait
//! for it. If far too many are open all the same, a request that needs one more waits as long as
//! disks answer; if none does, that request alone gets the error that there are too many.

use crate::bytes::files::State;
use crate::bytes::lines::{Line, Lines};
use crate::daemon::Sessions;
use crate::lock::locked;
use parking_lot::RwLock;
use rushes_pool::{MemberNumber, Object, Pool};
use rustix::fs::fdatasync;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Closed beyond the number needed, so that not each open has to look for one.
const AT_ONCE_MAX: u64 = 8;
/// Closed when the process has no descriptor left.
const LET_GO_COUNT: u64 = 64;
/// With so many entries, those of closed files are removed.
const ENTRY_COUNT_MIN: usize = 256;
/// A thread that opens one more looks at so many entries, plus some for each that it has to close;
/// the next thread goes on from there.
const LOOKED_AT_MIN: u64 = 64;
const LOOKED_AT_FOR_ONE: u64 = 4;
/// Written ones that wait in the line of one member.
const WRITTEN_COUNT_MAX: usize = 8;
/// A request that needs a descriptor stops waiting when no disk has answered for so long.
const DISK_PATIENCE: Duration = Duration::from_secs(2);
/// And after so long in any case.
const PATIENCE: Duration = Duration::from_secs(10);

/// An object of an open file.
#[derive(Debug)]
struct Entry {
    state: Weak<RwLock<State>>,
    object: Object,
}

/// The parts of the door that help to close them.
#[derive(Debug)]
struct Helpers {
    pool: Weak<Pool>,
    lines: Weak<Lines>,
    /// It may have such descriptors, too.
    sessions: Weak<Sessions>,
}

/// All descriptors beside the first of each file.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    count: Arc<AtomicU64>,
    /// Those unused for longest first, by the looks so far. Some are of closed files.
    ring: Mutex<VecDeque<Entry>>,
    /// The length of the ring at which entries of closed files are removed.
    looked_at: AtomicUsize,
    /// Written ones that have to be closed; meanwhile they are not in the ring. A member is in the
    /// map as long as a thread in its line takes them.
    written: Mutex<HashMap<MemberNumber, VecDeque<Entry>>>,
    /// With so many open, no written one needs to be closed.
    enough: AtomicU64,
    answers: Mutex<Answers>,
    /// There is another answer.
    answered: Condvar,
    helpers: OnceLock<Helpers>,
}

/// Answers of disks that were asked for write errors.
#[derive(Debug, Default)]
struct Answers {
    count: u64,
    /// A thread has waited for one since.
    awaited_since: Option<Instant>,
}

/// One that is open, until this is dropped.
#[derive(Debug)]
pub(crate) struct Spare(Arc<AtomicU64>);

impl Drop for Spare {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The result of an attempt to close one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It was closed.
    Closed,
    /// There is none: it was closed before.
    None,
    /// It is in use, or was used since the last attempt.
    Stays,
    /// It could be closed; but first a thread must ask the kernel for its write errors.
    Written,
}

/// How hard a thread looks for descriptors to close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// One that was used since the last look stays.
    Some,
    /// There is no other way: the thread looks at each twice.
    Great,
}

impl Spares {
    /// Sets the pool, the lines in which threads wait for disks, and the sessions with the daemon,
    /// which learns of each one that is closed.
    pub(crate) fn set_helpers(
        &self,
        pool: &Arc<Pool>,
        lines: &Arc<Lines>,
        sessions: &Arc<Sessions>,
    ) {
        // Once, when the door is made.
        let _ = self.helpers.set(Helpers {
            pool: Arc::downgrade(pool),
            lines: Arc::downgrade(lines),
            sessions: Arc::downgrade(sessions),
        });
    }

    /// Counts one more until the answer is dropped. The caller then names it by [`Spares::keep`].
    pub(crate) fn one_more(&self) -> Spare {
        self.count.fetch_add(1, Ordering::AcqRel);
        Spare(Arc::clone(&self.count))
    }

    /// Names it; it may be closed when it is not used. Call it once, until it is found closed.
    pub(crate) fn keep(&self, state: Weak<RwLock<State>>, object: Object) {
        let mut ring = locked(&self.ring);
        ring.push_back(Entry { state, object });
        if ring.len() > self.looked_at.load(Ordering::Relaxed).max(ENTRY_COUNT_MIN) {
            ring.retain(|entry| entry.state.strong_count() > 0);
            self.looked_at.store(2 * ring.len(), Ordering::Relaxed);
        }
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Closes them down to this number. Waits for no disk.
    ///
    /// Assumes  the lock of no file but the caller's own is held
    pub(crate) fn keep_within(self: &Arc<Self>, most: u64) {
        let count = self.count();
        if count > most {
            let more = AT_ONCE_MAX.min(most / 2);
            self.enough.store(most - more, Ordering::Release);
            self.close(count - most + more, Need::Some);
        }
    }

    /// Call it before opening one more: makes room below this number, or finds that none of them
    /// waits for a disk. May wait for that.
    ///
    /// Returns  false: there are too many, and the disks do not answer
    pub(crate) fn wait_for_room(self: &Arc<Self>, most: u64) -> bool {
        let count = self.count();
        if count < most {
            return true;
        }
        let wanted = count - most + 1;
        self.enough.store(count - wanted, Ordering::Release);
        self.close(wanted, Need::Great) >= wanted
            || self.wait_until(|_| self.count() < most)
            || locked(&self.written).is_empty()
    }

    /// The process has no descriptor left for any use. May wait for disks. Returns whether some
    /// were closed
    pub(crate) fn let_go(self: &Arc<Self>) -> bool {
        let answered = locked(&self.answers).count;
        let enough = self.count().saturating_sub(LET_GO_COUNT);
        self.enough.store(enough, Ordering::Release);
        self.close(LET_GO_COUNT, Need::Great) > 0 || self.wait_until(|count| count != answered)
    }

    /// Returns how many it closed. Written ones are queued for the rest
    fn close(self: &Arc<Self>, wanted: u64, need: Need) -> u64 {
        let mut closed = 0;
        let all = locked(&self.ring).len();
        let mut left = match need {
            Need::Some => {
                let part = LOOKED_AT_MIN.max(wanted.saturating_mul(LOOKED_AT_FOR_ONE));
                all.min(usize::try_from(part).unwrap_or(all))
            }
            Need::Great => 2 * all,
        };
        let mut written = Vec::new();
        while closed < wanted && left > 0 {
            left -= 1;
            let Some(entry) = locked(&self.ring).pop_front() else {
                break;
            };
            match self.close_one(&entry, false) {
                Asked::Closed => closed += 1,
                Asked::None => {}
                Asked::Stays => locked(&self.ring).push_back(entry),
                Asked::Written => written.push(entry),
            }
        }
        if !written.is_empty() {
            self.hand_over(written, wanted - closed);
        }
        closed
    }

    /// `is_asked`  the caller asked the kernel for write errors since the last use
    fn close_one(&self, entry: &Entry, is_asked: bool) -> Asked {
        let Some(state) = entry.state.upgrade() else {
            return Asked::None;
        };
        let sessions = self.helpers.get().map(|helpers| &helpers.sessions);
        // A thread that reads or writes the file holds the lock; so does the caller, for its own
        // file.
        match state.try_write() {
            Some(state) => state.close_spare(entry.object, sessions, is_asked),
            None => Asked::Stays,
        }
    }

    /// Queues so many written ones in the lines of their members, as far as these have room; the
    /// others stay.
    fn hand_over(self: &Arc<Self>, entries: Vec<Entry>, wanted: u64) {
        let helpers = self.helpers.get();
        let pool = helpers.and_then(|helpers| helpers.pool.upgrade());
        let lines = helpers.and_then(|helpers| helpers.lines.upgrade());
        let (mut left, mut stay, mut begun) = (wanted, Vec::new(), Vec::new());
        let mut written = locked(&self.written);
        for entry in entries {
            let number = entry.object.member;
            // A failing member's answer is known; the door asks it when it works again.
            let member = pool.as_ref().and_then(|pool| pool.member(number));
            let fails = member.is_some_and(|member| member.failing().is_some());
            let is_full = written
                .get(&number)
                .is_some_and(|line| line.len() >= WRITTEN_COUNT_MAX);
            if left == 0 || fails || is_full || lines.is_none() {
                stay.push(entry);
                continue;
            }
            left -= 1;
            let line = written.entry(number).or_insert_with(|| {
                begun.push(number);
                VecDeque::new()
            });
            line.push_back(entry);
        }
        drop(written);
        // Put those that stay at the end: otherwise those of a disk that hangs would stop each look
        // before the others.
        locked(&self.ring).extend(stay);
        for member in begun {
            if let Some(lines) = &lines {
                let spares = Arc::clone(self);
                lines.put(Line::Disk(member), move || spares.close_written(member));
            }
        }
    }

    /// Closes those of one member, one after another.
    fn close_written(&self, member: MemberNumber) {
        loop {
            let mut written = locked(&self.written);
            let Some(entry) = written.get_mut(&member).and_then(VecDeque::pop_front) else {
                written.remove(&member);
                break;
            };
            drop(written);
            let asked = match self.count() > self.enough.load(Ordering::Acquire) {
                true => self.ask_and_close(&entry),
                false => Asked::Stays,
            };
            if matches!(asked, Asked::Stays | Asked::Written) {
                locked(&self.ring).push_back(entry);
            }
            self.answer();
        }
        // Perhaps nothing is queued any more. Under the lock, so that no thread that is about to
        // wait misses it.
        let answers = locked(&self.answers);
        self.answered.notify_all();
        drop(answers);
    }

    /// Passes the kernel's write errors to the programs that had the file open then. Locks the file
    /// only before and afterwards.
    fn ask_and_close(&self, entry: &Entry) -> Asked {
        let Some(state) = entry.state.upgrade() else {
            return Asked::None;
        };
        let written = match state.try_write() {
            Some(state) => state.written_spare(entry.object),
            None => None,
        };
        // A program that closes it meanwhile need not wait.
        drop(state);
        let Some((fd, failures)) = written else {
            return Asked::Stays;
        };
        let pool = self.helpers.get().and_then(|one| one.pool.upgrade());
        let number = entry.object.member;
        // A member that was given up has no answer; each open gets that error when it syncs.
        if !pool.as_ref().is_some_and(|pool| pool.is_lost(number)) {
            let Some(asking) = failures.asking.try_read() else {
                return Asked::Stays;
            };
            if let Err(error) = fdatasync(&*fd) {
                failures.one_more(error);
                if let Some(member) = pool.and_then(|pool| pool.member(number)) {
                    member.note_failure("make an object durable", error);
                }
            }
            drop(asking);
        }
        drop(fd);
        self.close_one(entry, true)
    }

    fn answer(&self) {
        let mut answers = locked(&self.answers);
        answers.count += 1;
        answers.awaited_since = None;
        drop(answers);
        self.answered.notify_all();
    }

    /// Waits until `is_so`, called with the number of answers, or until no disk answers. A request
    /// that comes when none has answered for long does not wait at all.
    ///
    /// Returns  the value of `is_so`
    fn wait_until(&self, is_so: impl Fn(u64) -> bool) -> bool {
        let end = Instant::now() + PATIENCE;
        let mut answers = locked(&self.answers);
        loop {
            if is_so(answers.count) {
                return true;
            }
            if locked(&self.written).is_empty() {
                return false;
            }
            let since = *answers.awaited_since.get_or_insert_with(Instant::now);
            let until = end.min(since + DISK_PATIENCE);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let (again, _) = self
                .answered
                .wait_timeout(answers, left)
                .unwrap_or_else(PoisonError::into_inner);
            answers = again;
        }
    }
}
