// SPDX-License-Identifier: Apache-2.0
//! Tidies the pool while no program uses it: first makes members equally full and stripes wider,
//! then brings files together.
//!
//! core/pool/tidy says when; care.rs does it step by step, as for the commands. It asks again at
//! each step. Files that a program has open stay as they are. Decision: docs/decisions/0031.

use crate::door::Door;
use crate::lock::locked;
use crate::upkeep::care::Busy;
use rushes_core::pool::tidy::{Seen, Tidier, Wait};
use rushes_core::pool::vain::Vain;
use rushes_core::units;
use rushes_pool::{Failed, PoolError, Schedule, Tidied, Told, WorkKind, WorkRefusal, set_schedule};
use rushes_sys::clock::{minute_of_day, now};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Between two looks whether it may begin.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The state of tidying, as far as it is known.
#[derive(Debug, Default)]
pub(crate) struct Tidying {
    /// Requests for bytes so far, from any program.
    asked_count: AtomicU64,
    /// Opens whose reads the door does not see: the kernel's passthrough.
    passed_count: AtomicU64,
    /// Streams have contracts on a member's device, by the daemon's last report.
    is_promised: AtomicBool,
    /// Programs want bytes while tidying runs.
    is_beside_others: AtomicBool,
    /// Moves tried in vain: tidying does not try them again by itself, nor a command twice.
    pub(crate) vain: Mutex<Vain>,
    /// Why tidying is not under way; None: it is.
    wait: Mutex<Option<Wait>>,
}

impl Tidying {
    /// A program wants bytes, or is about to.
    pub(crate) fn asked(&self) {
        self.asked_count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn passed_begins(&self) {
        self.passed_count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn passed_ends(&self) {
        self.passed_count.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn is_beside_others(&self) -> bool {
        self.is_beside_others.load(Ordering::Relaxed)
    }

    /// Opens that the kernel reads by itself.
    pub(crate) fn passed(&self) -> u64 {
        self.passed_count.load(Ordering::Relaxed)
    }

    pub(crate) fn set_promised(&self, is_promised: bool) {
        self.is_promised.store(is_promised, Ordering::Relaxed);
    }

    /// Why tidying is not under way, as a word.
    pub(crate) fn waits(&self) -> Option<String> {
        locked(&self.wait).map(|wait| wait.name().to_owned())
    }
}

impl Door {
    /// Runs until the door closes.
    pub(crate) fn tidy_now_and_then(&self) {
        let quiet = units::Duration::from_s(self.tidy_after.as_secs());
        let mut tidier = Tidier::new(now(), quiet);
        while !self.closing.load(Ordering::Acquire) {
            let may = |has_command| tidier.decide_to_begin(now(), self.seen(has_command));
            match self.care.begin_tidying(WorkKind::Rebalance, may) {
                Ok(busy) => self.tidy(&busy, &mut tidier),
                Err(wait) => *locked(&self.tidying.wait) = Some(wait),
            }
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Does not call `care`, which may be about to begin.
    fn seen(&self, has_command: bool) -> Seen {
        Seen {
            schedule: self.pool.schedule(),
            minute: minute_of_day(),
            asked_count: self.tidying.asked_count.load(Ordering::Relaxed),
            has_unseen: self.tidying.passed_count.load(Ordering::Relaxed) > 0,
            is_promised: self.tidying.is_promised.load(Ordering::Relaxed),
            has_command,
            members: self.pool.member_set(),
        }
    }

    /// Does both kinds, as long as no program wants bytes.
    fn tidy(&self, busy: &Busy<'_>, tidier: &mut Tidier) {
        *locked(&self.tidying.wait) = None;
        let members = self.pool.member_set();
        let mut all = Tidied::default();
        let mut failed = Failed::default();
        let mut ended = None;
        for kind in [WorkKind::Rebalance, WorkKind::Defrag] {
            let mut wants_it = |told: &Told| {
                if let Told::Moved { now: so_far } = told {
                    match kind {
                        WorkKind::Rebalance => all.rebalanced = *so_far,
                        _ => all.gathered = *so_far,
                    }
                }
                let seen = self.seen(self.care.has_command());
                ended = tidier.decide_to_go_on(now(), seen).err();
                let is_beside_others = tidier.is_beside_others(now());
                let told = &self.tidying.is_beside_others;
                told.store(is_beside_others, Ordering::Relaxed);
                ended.is_none()
            };
            let done = self.tidy_by(busy, kind, &mut failed, &mut wants_it);
            match done {
                Ok(Told::Done {
                    all: moved,
                    defragged,
                    ..
                }) => match kind {
                    WorkKind::Rebalance => all.rebalanced = moved,
                    _ => (all.gathered, all.defragged) = (moved, defragged),
                },
                // A program wants bytes, or the door closes.
                _ if ended.is_some() || self.closing.load(Ordering::Acquire) => break,
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!("the pool cannot be tidied: {error}");
                    all.trouble = Some(error.to_string());
                }
            }
        }
        if failed.count > 0 {
            tracing::warn!(
                "{} could not be read or moved to tidy the pool",
                match failed.count {
                    1 => String::from("one file"),
                    count => format!("{count} files"),
                }
            );
        }
        all.failed = failed;
        all.is_whole = ended.is_none() && !self.closing.load(Ordering::Acquire);
        if all.is_whole {
            tidier.passed(now(), members);
            locked(&self.tidying.vain).looked();
        }
        if (all.is_whole || all.rebalanced.moved_bytes + all.gathered.moved_bytes > 0)
            && let Err(error) = self.pool.set_tidied(&all)
        {
            tracing::warn!("cannot save the result of tidying: {error}");
        }
        *locked(&self.tidying.wait) = ended.or(Some(Wait::Done));
    }

    /// Sets when the pool may tidy itself from now on.
    pub(crate) fn set_schedule(&self, schedule: &str) -> Result<Told, PoolError> {
        let Some(schedule) = Schedule::of(schedule) else {
            return Err(WorkRefusal::NoSchedule {
                text: schedule.to_owned(),
            }
            .into());
        };
        self.care.change(|| set_schedule(&self.pool, schedule))?;
        Ok(Told::Status {
            work: None,
            tidying_waits: None,
            mount: None,
            failing: Vec::new(),
        })
    }
}
