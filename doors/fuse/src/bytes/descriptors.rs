// SPDX-License-Identifier: Apache-2.0
//! Descriptors of the mount's process, and the share of each process and user in them.
//!
//! A file that is open through the mount costs a descriptor for its stub and one for an object; a
//! process has 20,000 on many machines. Descriptors of a file's further objects are closed when
//! there are too many: spare.rs. So the door counts each file once, however often it is open, for
//! the process that opened it first, and for its user. The kernel reports a thread's number as that
//! of the process. A process that opens more than its share gets ENFILE. A file that is open
//! already always has the descriptors that it needs: there is a reserve, and the door closes
//! descriptors that it keeps only to be quick (nodes.rs) before any process gets an error.
//!
//! A share is as much as would be left for others. So one process has half at most, the next one
//! half of the rest, and a newcomer may open its first file. A user of several processes has two
//! thirds; but not root, which stands for all users of NFS.

use crate::bytes::spare::Spares;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use rushes_sys::limits::descriptor_count_max;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The process's own descriptors, beside those for files: one of the device for each thread,
/// members, sessions, sockets.
const OWN_COUNT: u64 = 256;
/// For descriptors that are opened while the door answers requests; one half of them for objects of
/// files that are in use at the moment.
const RESERVE_COUNT_MAX: u64 = 1024;
/// Kept for nodes that are used often.
const KEPT_COUNT_MAX: u64 = 4096;
/// A mount with a tiny limit can still open a few files.
const FILES_COUNT_MIN: u64 = 16;
/// A file: its stub, and an object.
const OF_A_FILE: u64 = 2;
/// No opener is refused below this part of the budget, as long as any of it is left.
const LEAST_PART: u64 = 16;
/// Openers that are remembered although they have nothing open.
const IDLE_COUNT_MAX: usize = 1024;

/// The user and the process that open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Opener {
    pub(crate) user: u32,
    pub(crate) process: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Process(u32),
    User(u32),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Descriptors {
    /// For all opened files together.
    budget: u64,
    reserve: u64,
    /// For nodes that are used often.
    pub(crate) kept_count_max: usize,
    /// They have the part of the budget that open files leave.
    pub(crate) spares: Arc<Spares>,
    all: Arc<AtomicU64>,
    holders: Mutex<HashMap<Holder, Arc<AtomicU64>>>,
}

/// Descriptors that count for an opener until this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    counts: Vec<Arc<AtomicU64>>,
    count: u64,
}

impl Share {
    fn of(counts: Vec<Arc<AtomicU64>>, count: u64) -> Share {
        for one in &counts {
            one.fetch_add(count, Ordering::AcqRel);
        }
        Share { counts, count }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        for one in &self.counts {
            one.fetch_sub(self.count, Ordering::AcqRel);
        }
    }
}

impl Descriptors {
    /// For a process with the descriptor limit of this one.
    pub(crate) fn new() -> Descriptors {
        Descriptors::within(descriptor_count_max())
    }

    fn within(limit: u64) -> Descriptors {
        let part = |most: u64| (limit / 8).clamp(32, most);
        let (reserve, kept) = (part(RESERVE_COUNT_MAX), part(KEPT_COUNT_MAX));
        let budget = limit.saturating_sub(OWN_COUNT + reserve + kept);
        Descriptors {
            budget: budget.max(FILES_COUNT_MIN * OF_A_FILE),
            reserve,
            kept_count_max: kept as usize,
            spares: Arc::default(),
            all: Arc::default(),
            holders: Mutex::default(),
        }
    }

    /// For a file that the mount opens for itself, or that was open before this process began.
    pub(crate) fn take(&self) -> Share {
        let share = Share::of(vec![Arc::clone(&self.all)], OF_A_FILE);
        self.close_spares();
        share
    }

    /// Closes descriptors of further objects until there are no more of them than there is room
    /// for.
    pub(crate) fn close_spares(&self) {
        self.spares.keep_within(self.spare_count_max());
    }

    /// Call it before opening one more of those; it may wait until others are closed. False: there
    /// is no descriptor for the caller.
    pub(crate) fn wait_for_spare(&self) -> bool {
        self.spares
            .wait_for_room(self.spare_count_max() + self.reserve / 4)
    }

    fn spare_count_max(&self) -> u64 {
        let left = self.budget.saturating_sub(self.all.load(Ordering::Acquire));
        left.max(self.reserve / 2)
    }

    /// Takes the descriptors for a file or a folder that a program opens.
    ///
    /// Errors   ENFILE: the opener has its share
    pub(crate) fn take_for(&self, opener: Opener) -> Answer<Share> {
        let mut holders = locked(&self.holders);
        if holders.len() > IDLE_COUNT_MAX {
            holders.retain(|_, count| Arc::strong_count(count) > 1);
        }
        let process = Arc::clone(holders.entry(Holder::Process(opener.process)).or_default());
        let user = Arc::clone(holders.entry(Holder::User(opener.user)).or_default());
        let count = |of: &Arc<AtomicU64>| of.load(Ordering::Acquire);
        let of_user = match opener.user {
            0 => 0,
            _ => count(&user),
        };
        if !may_have(self.budget, count(&self.all), (count(&process), of_user)) {
            return Err(Errno::NFILE);
        }
        // Under the lock: no other opener gets in by the same numbers.
        let counts = vec![Arc::clone(&self.all), process, user];
        let share = Share::of(counts, OF_A_FILE);
        drop(holders);
        self.close_spares();
        Ok(share)
    }
}

/// Whether an opener that has so many descriptors, as a process and as a user, may open one more
/// file.
fn may_have(budget: u64, all: u64, (of_process, of_user): (u64, u64)) -> bool {
    let left = budget.saturating_sub(all);
    let most = left.max(budget / LEAST_PART);
    left >= OF_A_FILE
        && of_process + OF_A_FILE <= most
        && of_user + OF_A_FILE <= most.saturating_mul(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opens(descriptors: &Descriptors, user: u32, process: u32) -> Vec<Share> {
        let opener = Opener { user, process };
        std::iter::from_fn(|| descriptors.take_for(opener).ok()).collect()
    }

    #[test]
    fn one_has_half_and_the_next_one_half_of_the_rest() {
        let descriptors = Descriptors::within(20_000);
        let files = descriptors.budget as usize / 2;
        assert!(files > 8000, "{files}");
        let first = opens(&descriptors, 1000, 1);
        assert!(first.len().abs_diff(files / 2) <= 1, "{}", first.len());
        let second = opens(&descriptors, 1001, 2);
        assert!(second.len().abs_diff(files / 4) <= 1, "{}", second.len());
        // The same user as the first.
        let third = opens(&descriptors, 1000, 3);
        assert!(third.len() < second.len());
        let others: Vec<_> = (10..12)
            .flat_map(|one| opens(&descriptors, one, one))
            .collect();
        assert!(!others.is_empty(), "somebody new is let in");
        drop((first, second, third, others));
        assert_eq!(descriptors.all.load(Ordering::Acquire), 0);
        assert!(!opens(&descriptors, 1000, 1).is_empty());
    }

    #[test]
    fn however_many_ask_there_are_never_more_than_all() {
        for limit in [64, 450, 1024, 20_000, 65_536] {
            let descriptors = Descriptors::within(limit);
            let all: Vec<_> = (0..5000)
                .flat_map(|one| opens(&descriptors, one, one))
                .collect();
            let count = descriptors.all.load(Ordering::Acquire);
            assert_eq!(count, 2 * all.len() as u64);
            assert!(count <= descriptors.budget, "{limit}");
            let kept = descriptors.kept_count_max as u64;
            assert!(limit < 450 || OWN_COUNT + count + kept < limit, "{limit}");
            // A file that is open has the descriptors that it needs.
            let most = count + kept + descriptors.spare_count_max();
            assert!(descriptors.spare_count_max() > 0);
            assert!(limit < 450 || OWN_COUNT + most < limit, "{limit}");
        }
    }

    #[test]
    fn who_has_nothing_open_is_forgotten() {
        let descriptors = Descriptors::within(20_000);
        for process in 0..3000 {
            let opener = Opener { user: 0, process };
            drop(descriptors.take_for(opener).expect("it is the only one"));
        }
        assert!(locked(&descriptors.holders).len() <= IDLE_COUNT_MAX + 2);
    }
}
