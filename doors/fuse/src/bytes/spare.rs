// SPDX-License-Identifier: Apache-2.0
//! Descriptors of a file's objects beside its first: kept only to be quick, and closed when there
//! are too many.
//!
//! A file in twenty objects may cost 21 descriptors, of which two are counted when it is opened
//! (descriptors.rs). The others have the part of the budget that the counted ones leave: a thread
//! that opens one more closes those that were not used for longest, whose files nobody uses at this
//! moment. They are opened again when they are needed.
//!
//! By a descriptor that was written the kernel tells its write errors: it is asked for them before
//! the descriptor goes. Since a disk may take long for that, or hang, it is asked in the line of
//! its own member, of one object at a time, and a thread that opened something does not wait for
//! it. Where far too many are open all the same, a request that needs one more waits as long as
//! disks answer; if none does, it alone gets the error that there are too many.

use crate::bytes::files::State;
use crate::bytes::lines::{Line, Lines};
use crate::daemon::Engine;
use crate::lock::locked;
use parking_lot::RwLock;
use rushes_pool::{MemberNumber, Object, Pool};
use rustix::fs::fdatasync;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Closed beyond what is asked for, so that not each open has to look for one.
const AT_ONCE_MAX: u64 = 8;
/// Closed where the process has none left at all.
const LET_GO_COUNT: u64 = 64;
/// Entries of files that were closed are looked for when there are so many of all.
const ENTRY_COUNT_MIN: usize = 256;
/// So many are looked at by a thread that opens one more, and some for each that is to be closed:
/// others go on from there.
const LOOKED_AT_MIN: u64 = 64;
const LOOKED_AT_FOR_ONE: u64 = 4;
/// Written ones that stand in the line of one member.
const WRITTEN_COUNT_MAX: usize = 8;
/// A request that needs a descriptor waits no longer when no disk has answered for so long.
const DISK_PATIENCE: Duration = Duration::from_secs(2);
/// And not for ever where they do.
const PATIENCE: Duration = Duration::from_secs(10);

/// An object of an open file.
#[derive(Debug)]
struct Entry {
    state: Weak<RwLock<State>>,
    object: Object,
}

/// The helpers that close them.
#[derive(Debug)]
struct Helpers {
    pool: Weak<Pool>,
    lines: Weak<Lines>,
    /// It may have such descriptors as well.
    engine: Weak<Engine>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    count: Arc<AtomicU64>,
    /// Those not used for longest first, as far as anybody has looked. Some are of files that were
    /// closed.
    ring: Mutex<VecDeque<Entry>>,
    /// So many entries are looked through for those.
    looked_at: AtomicUsize,
    /// Written ones that are to be closed, in no ring meanwhile. A member is in it as long as
    /// somebody in its line takes them.
    written: Mutex<HashMap<MemberNumber, VecDeque<Entry>>>,
    /// With so many open no written one needs to go.
    enough: AtomicU64,
    answers: Mutex<Answers>,
    /// There is another answer.
    answered: Condvar,
    helpers: OnceLock<Helpers>,
}

/// Of disks that were asked about written ones.
#[derive(Debug, Default)]
struct Answers {
    count: u64,
    /// Somebody has waited for one since.
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

/// The outcome for one that should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It was closed.
    Closed,
    /// There is none: it was closed before.
    None,
    /// It is in use, or was used since it was last asked for.
    Stays,
    /// It could go; but the kernel is to be asked first what it could not write.
    Written,
}

/// How hard somebody looks for those that may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// One that was used since the last look stays.
    Some,
    /// There is no other way: all are looked at twice.
    Great,
}

impl Spares {
    /// Those that are to learn of the ones that go, and the lines in which threads wait for disks.
    pub(crate) fn set_helpers(&self, pool: &Arc<Pool>, lines: &Arc<Lines>, engine: &Arc<Engine>) {
        // Once, when the door is made.
        let _ = self.helpers.set(Helpers {
            pool: Arc::downgrade(pool),
            lines: Arc::downgrade(lines),
            engine: Arc::downgrade(engine),
        });
    }

    /// One more is open: counted until the answer is dropped. It is to be named by
    /// [`Spares::keep`].
    pub(crate) fn one_more(&self) -> Spare {
        self.count.fetch_add(1, Ordering::AcqRel);
        Spare(Arc::clone(&self.count))
    }

    /// It is this one, and may go when it is not used. (Once, until it is found closed.)
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

    /// So many may be open. Waits for no disk.
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

    /// Before one more is opened: there are fewer than so many, or none of them waits for a disk.
    /// May wait for that.
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

    /// There are none left to be opened, for whatever. May wait for disks. Returns  whether some
    /// were closed
    pub(crate) fn let_go(self: &Arc<Self>) -> bool {
        let answered = locked(&self.answers).count;
        let enough = self.count().saturating_sub(LET_GO_COUNT);
        self.enough.store(enough, Ordering::Release);
        self.close(LET_GO_COUNT, Need::Great) > 0 || self.wait_until(|count| count != answered)
    }

    /// Returns  how many were. Written ones are on their way for the rest
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

    /// `is_asked`  the kernel was, since it was used last, unless it is used again
    fn close_one(&self, entry: &Entry, is_asked: bool) -> Asked {
        let Some(state) = entry.state.upgrade() else {
            return Asked::None;
        };
        let engine = self.helpers.get().map(|helpers| &helpers.engine);
        // A thread that reads or writes the file has the lock, and so has the caller that of its
        // own.
        match state.try_write() {
            Some(state) => state.close_spare(entry.object, engine, is_asked),
            None => Asked::Stays,
        }
    }

    /// So many written ones are put in the lines of their members, as far as these have room for
    /// them; the others stay.
    fn hand_over(self: &Arc<Self>, entries: Vec<Entry>, wanted: u64) {
        let helpers = self.helpers.get();
        let pool = helpers.and_then(|helpers| helpers.pool.upgrade());
        let lines = helpers.and_then(|helpers| helpers.lines.upgrade());
        let (mut left, mut stay, mut begun) = (wanted, Vec::new(), Vec::new());
        let mut written = locked(&self.written);
        for entry in entries {
            let number = entry.object.member;
            // The answer of one that fails is known; it is asked when it works again.
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
        // Behind the others: those of a disk that hangs would keep a thread that looks from all
        // others.
        locked(&self.ring).extend(stay);
        for member in begun {
            if let Some(lines) = &lines {
                let spares = Arc::clone(self);
                lines.put(Line::Disk(member), move || spares.close_written(member));
            }
        }
    }

    /// Those of one member, one after another.
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
        // Nothing is on its way any more, perhaps; with the lock, so that no thread that is about
        // to wait misses it.
        let answers = locked(&self.answers);
        self.answered.notify_all();
        drop(answers);
    }

    /// The kernel's write errors go to the programs that had the file open then. The file is locked
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
        // Of one that was given up nothing comes; each open gets that error when it asks.
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

    /// Until something is so, told how many answers there were, or no disk answers. A request that
    /// comes when none has answered for long does not wait at all.
    ///
    /// Returns  whether it is
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
