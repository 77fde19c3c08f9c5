// SPDX-License-Identifier: Apache-2.0
//! Was a change reported by the process that made it?
//!
//! A process with a session reports its changes of a file, and waits for the answer; but only
//! changes through a share that we serve. If it changes the same file another way, such as by a
//! second Samba share on the same folder without the module, or has no session left to report with,
//! only the kernel's notice tells us. So a notice of a change by such a process waits a while for
//! the report; without one the change counts as a stranger's.

use rushes_core::server::FileKey;
use rushes_core::units::{Duration, Instant};
use std::collections::HashMap;

/// A notice and its report belong together if they come at most so long after each other, in either
/// order. A report that comes later costs a file its cached blocks, no more.
const TOGETHER: Duration = Duration::from_ms(250);
/// So long a notice waits for its report.
const PATIENCE: Duration = Duration::from_s(1);
/// The core gets a stranger's first change of a file at once, and further ones at most so often:
/// each drops the file's cached blocks, and a stranger that writes all the time would leave its
/// readers none.
const STRANGE_PACE: Duration = Duration::from_ms(500);
/// Reports to remember; beyond that, those older than [`TOGETHER`] are forgotten.
const REPORT_COUNT_MAX: usize = 4096;

/// Notices and reports.
#[derive(Default)]
pub(crate) struct Reports {
    reported: HashMap<(i32, FileKey), Instant>,
    noticed: HashMap<(i32, FileKey), Instant>,
    strange: HashMap<FileKey, Strange>,
    next: Option<Instant>,
}

/// The changes of strangers to a file.
struct Strange {
    /// When the core last got one.
    told: Instant,
    /// There was another since.
    again: bool,
}

impl Reports {
    /// A session of process `pid` reports a change.
    pub(crate) fn reported(&mut self, now: Instant, pid: i32, key: FileKey) {
        if self.reported.len() >= REPORT_COUNT_MAX {
            self.reported.retain(|_, at| now.since(*at) <= TOGETHER);
        }
        self.reported.insert((pid, key), now);
        if let Some(at) = self.noticed.get(&(pid, key))
            && now.since(*at) <= TOGETHER
        {
            self.noticed.remove(&(pid, key));
        }
    }

    /// The kernel reports a change by process `pid`, which has a session.
    pub(crate) fn noticed(&mut self, now: Instant, pid: i32, key: FileKey) {
        let reported = self.reported.get(&(pid, key));
        if reported.is_some_and(|at| now.since(*at) <= TOGETHER) {
            return;
        }
        self.noticed.entry((pid, key)).or_insert(now);
        self.look_at(now + PATIENCE);
    }

    /// The kernel reports a change by a process without a session. True: the core gets it now.
    pub(crate) fn strange(&mut self, now: Instant, key: FileKey) -> bool {
        if let Some(known) = self.strange.get_mut(&key)
            && now.since(known.told) < STRANGE_PACE
        {
            known.again = true;
            let at = known.told + STRANGE_PACE;
            self.look_at(at);
            return false;
        }
        if self.strange.len() >= REPORT_COUNT_MAX {
            self.strange
                .retain(|_, known| known.again || now.since(known.told) < STRANGE_PACE);
        }
        let told = Strange {
            told: now,
            again: false,
        };
        self.strange.insert(key, told);
        true
    }

    fn look_at(&mut self, at: Instant) {
        self.next = Some(self.next().min(at));
    }

    /// When a notice may be overdue.
    pub(crate) fn next(&self) -> Instant {
        self.next.unwrap_or(Instant::NEVER)
    }

    /// Files that were changed without a report, or by strangers again.
    pub(crate) fn overdue(&mut self, now: Instant) -> Vec<FileKey> {
        if now < self.next() {
            return Vec::new();
        }
        let is_overdue = |at: Instant| now.since(at) >= PATIENCE;
        let found = self.noticed.iter().filter(|(_, at)| is_overdue(**at));
        let mut keys: Vec<FileKey> = found.map(|((_, key), _)| *key).collect();
        self.noticed.retain(|_, at| !is_overdue(*at));
        for (key, known) in &mut self.strange {
            if known.again && now.since(known.told) >= STRANGE_PACE {
                keys.push(*key);
                known.told = now;
                known.again = false;
            }
        }
        keys.sort_unstable();
        keys.dedup();
        let unreported = self.noticed.values().map(|at| *at + PATIENCE);
        let again = self.strange.values().filter(|known| known.again);
        self.next = unreported
            .chain(again.map(|known| known.told + STRANGE_PACE))
            .min();
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMBD: i32 = 100;
    const FILE: FileKey = FileKey {
        device: 1,
        inode: 2,
    };

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_ms(10_000 + ms)
    }

    #[test]
    fn a_change_that_is_reported_before_or_after_its_notice_is_nobody_elses() {
        let mut reports = Reports::default();
        reports.reported(at(0), SMBD, FILE);
        reports.noticed(at(2), SMBD, FILE);
        reports.noticed(at(500), SMBD, FILE);
        reports.reported(at(510), SMBD, FILE);
        assert!(reports.overdue(at(5000)).is_empty());
        assert_eq!(reports.next(), Instant::NEVER);
    }

    #[test]
    fn who_writes_all_the_time_is_told_of_at_once_and_then_every_half_second_to_the_end() {
        let mut reports = Reports::default();
        let mut told = Vec::new();
        for ms in (0..2000).step_by(5) {
            if reports.strange(at(ms), FILE) {
                told.push(ms);
            }
            if !reports.overdue(at(ms)).is_empty() {
                told.push(ms);
            }
        }
        assert_eq!(told, [0, 500, 1000, 1500]);
        // The core also gets the last of its changes, and nothing after it.
        assert_eq!(reports.next(), at(2000));
        assert_eq!(reports.overdue(at(2000)), [FILE]);
        assert_eq!(reports.next(), Instant::NEVER);
        assert!(reports.strange(at(2600), FILE));
    }

    #[test]
    fn a_change_that_nobody_reports_is_told_after_a_while_and_once() {
        let mut reports = Reports::default();
        reports.reported(at(0), SMBD, FILE);
        reports.noticed(at(300), SMBD, FILE);
        assert!(reports.overdue(at(1299)).is_empty());
        assert_eq!(reports.next(), at(1300));
        assert_eq!(reports.overdue(at(1300)), [FILE]);
        assert!(reports.overdue(at(9000)).is_empty());
        // A report of another file, or of another process, does not count.
        reports.noticed(at(9000), SMBD, FILE);
        reports.reported(at(9001), SMBD + 1, FILE);
        reports.reported(
            at(9001),
            SMBD,
            FileKey {
                device: 1,
                inode: 3,
            },
        );
        // Nor does a report that comes too late.
        reports.reported(at(9500), SMBD, FILE);
        assert_eq!(reports.overdue(at(10_000)), [FILE]);
    }
}
