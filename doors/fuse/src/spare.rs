// SPDX-License-Identifier: Apache-2.0
//! Descriptors of a file's objects beside its first: kept only to be quick, and closed when there are too many.
//!
//! A file in twenty objects may cost 21 descriptors, of which two are counted when it is opened (descriptors.rs). The others have what those who have files
//! open leave of the budget: whoever opens one more closes those that were not used for longest, whose files nobody uses at this moment. They
//! are opened again when they are needed. By one that was written the kernel says what it could not write: that is asked before it goes.

use crate::engine::Engine;
use crate::files::State;
use crate::nodes::locked;
use parking_lot::RwLock;
use rushes_pool::Object;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Closed beyond what is asked for, so that not each open has to look for one.
const AT_ONCE_MAX: u64 = 8;
/// Closed where the process has none left at all.
const LET_GO_COUNT: u64 = 64;
/// Entries of files that were closed are looked for when there are so many of all.
const ENTRY_COUNT_MIN: usize = 256;

/// An object of an open file.
#[derive(Debug)]
struct Entry {
    state: Weak<RwLock<State>>,
    object: Object,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    count: Arc<AtomicU64>,
    /// Those not used for longest first, as far as anybody has looked. Some are of files that were closed.
    ring: Mutex<VecDeque<Entry>>,
    /// So many entries are looked through for those.
    looked_at: AtomicUsize,
    /// Who may have such descriptors as well.
    engine: OnceLock<Weak<Engine>>,
}

/// One that is open, until this is dropped.
#[derive(Debug)]
pub(crate) struct Spare(Arc<AtomicU64>);

impl Drop for Spare {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What became of one that should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It was closed.
    Closed,
    /// There is none: it was closed before.
    None,
    /// It is in use, or was used since it was last asked for.
    Stays,
}

impl Spares {
    /// Who is to hear of those that go.
    pub(crate) fn set_engine(&self, engine: &Arc<Engine>) {
        // (Once, when the door is made.)
        let _ = self.engine.set(Arc::downgrade(engine));
    }

    /// One more is open: counted until the answer is dropped. It is to be named by [`Spares::keep`].
    pub(crate) fn one_more(&self) -> Spare {
        self.count.fetch_add(1, Ordering::AcqRel);
        Spare(Arc::clone(&self.count))
    }

    /// It is this one, and may go when it is not used.
    pub(crate) fn keep(&self, state: Weak<RwLock<State>>, object: Object) {
        let mut ring = locked(&self.ring);
        ring.push_back(Entry { state, object });
        if ring.len() > self.looked_at.load(Ordering::Relaxed).max(ENTRY_COUNT_MIN) {
            ring.retain(|entry| entry.state.strong_count() > 0);
            self.looked_at.store(2 * ring.len(), Ordering::Relaxed);
        }
    }

    /// So many may be open.
    ///
    /// Assumes  the lock of no file but the caller's own is held
    pub(crate) fn keep_within(&self, most: u64) {
        let count = self.count.load(Ordering::Acquire);
        if count > most {
            self.close(count - most + AT_ONCE_MAX.min(most / 2));
        }
    }

    /// There are none left to be opened, for whatever. Returns  whether some were closed
    pub(crate) fn let_go(&self) -> bool {
        self.close(LET_GO_COUNT) > 0
    }

    /// Returns  how many were
    fn close(&self, wanted: u64) -> u64 {
        let mut closed = 0;
        // Twice round: what was used since it was last asked for is asked for once more.
        let mut left = 2 * locked(&self.ring).len();
        while closed < wanted && left > 0 {
            left -= 1;
            let Some(entry) = locked(&self.ring).pop_front() else {
                break;
            };
            let Some(state) = entry.state.upgrade() else {
                continue;
            };
            // (Who reads or writes the file has the lock, and so has the caller that of his.)
            let asked = match state.try_write() {
                Some(state) => state.close_spare(entry.object, self.engine.get()),
                None => Asked::Stays,
            };
            match asked {
                Asked::Closed => closed += 1,
                Asked::None => {}
                Asked::Stays => locked(&self.ring).push_back(entry),
            }
        }
        closed
    }
}
