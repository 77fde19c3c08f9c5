// SPDX-License-Identifier: Apache-2.0
//! Errors of a member's device: the pool asks such a member last for new bytes until it works
//! again.
//!
//! It is in no new stripe either, and nothing moves there. Reads, writes and syncs of its bytes go
//! on, and the caller gets the error of the device.

use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time without a failure before the next trial.
const QUIET_FOR: Duration = Duration::from_secs(5);

/// The error of a failing device, or of a file system that has found it failing. Not: full,
/// read-only, not there.
pub(crate) fn is_of_device(error: Errno) -> bool {
    matches!(
        error,
        Errno::IO
            | Errno::NODATA
            | Errno::REMOTEIO
            | Errno::ILSEQ
            | Errno::TIMEDOUT
            | Errno::NOLINK
            | Errno::BADMSG
            | Errno::UCLEAN
    )
}

/// A lack of the process: it says nothing of the device, nor of what is there.
pub(crate) fn is_of_process(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

/// Whether a device fails: why, and when last. None: it is well.
#[derive(Debug, Default)]
pub(crate) struct Failing(Mutex<Option<Found>>);

#[derive(Debug)]
struct Found {
    /// The first sentence: the others follow from it.
    sentence: String,
    last: Instant,
}

impl Failing {
    fn found(&self) -> std::sync::MutexGuard<'_, Option<Found>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `is_of_one`: it may be that object alone, which a program may read again and again, so this
    /// puts no trial off.
    pub(crate) fn note(&self, now: Instant, is_of_one: bool, sentence: impl FnOnce() -> String) {
        let mut found = self.found();
        match &mut *found {
            Some(_) if is_of_one => {}
            Some(found) => found.last = now,
            none => {
                *none = Some(Found {
                    sentence: sentence(),
                    last: now,
                });
            }
        }
    }

    /// Why; None: it is well.
    pub(crate) fn sentence(&self) -> Option<String> {
        self.found().as_ref().map(|found| found.sentence.clone())
    }

    pub(crate) fn is_well(&self) -> bool {
        self.found().is_none()
    }

    /// It failed, and not for a while: it may be tried.
    pub(crate) fn may_be_tried(&self, now: Instant) -> bool {
        let found = self.found();
        found
            .as_ref()
            .is_some_and(|found| now.saturating_duration_since(found.last) >= QUIET_FOR)
    }

    /// It works again.
    pub(crate) fn clear(&self) {
        *self.found() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays_and_it_is_tried_when_nothing_has_failed_for_a_while() {
        let failing = Failing::default();
        let now = Instant::now();
        assert!(failing.is_well() && !failing.may_be_tried(now + 2 * QUIET_FOR));
        failing.note(now, false, || String::from("first"));
        failing.note(now + QUIET_FOR / 2, false, || String::from("second"));
        failing.note(now + QUIET_FOR, true, || String::from("third"));
        assert_eq!(failing.sentence().as_deref(), Some("first"));
        assert!(!failing.may_be_tried(now + QUIET_FOR));
        assert!(failing.may_be_tried(now + 2 * QUIET_FOR));
        failing.clear();
        assert!(failing.is_well() && failing.sentence().is_none());
    }

    #[test]
    fn full_read_only_and_away_are_no_faults_of_a_device() {
        for error in [Errno::NOSPC, Errno::DQUOT, Errno::ROFS, Errno::NOENT] {
            assert!(!is_of_device(error));
        }
        assert!(is_of_device(Errno::IO));
    }
}
