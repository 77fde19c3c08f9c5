// SPDX-License-Identifier: Apache-2.0
//! Promised reads that have time let others on the server go first.
//!
//! Linux' mq-deadline sends nothing of the best-effort class while a request of the real-time class is with the disk or waits
//! for it. Read-ahead that follows on read-ahead left nobody a gap: whoever opened a file that no cache knew of waited for four small
//! reads of the kernel's until all windows were full, seconds. So only what is due soon goes in the real-time class.

use super::state::Device;
use crate::units::*;

/// What is due later than this has time. mq-deadline has nobody wait much longer than half a second behind others of
/// the same class.
const TIME: Duration = Duration::from_ms(600);

/// Beyond what somebody's opens take, a request that had time and took so much longer than it should tells of a load that
/// does not end by itself: nobody lets it go first for a while.
const FLOOD: Duration = Duration::from_ms(150);
const FLOODED_FOR: Duration = Duration::from_s(5);

/// Of one device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Yields {
    /// One of the requests that it has now lets others go first.
    is_yielding: bool,
    flooded_until: Instant,
}

impl Device {
    /// Whether a promised read that is due then, and costs that, lets others go first.
    pub(super) fn yields(&self, now: Instant, deadline: Instant, cost: Duration) -> bool {
        now >= self.yields.flooded_until && deadline >= now + cost + TIME
    }

    /// A request was sent to it that lets others go first.
    pub(super) fn has_yielded(&mut self) {
        self.yields.is_yielding = true;
    }

    /// All that it had has ended, by the calibration after `calibrated`, in truth after `taken`.
    pub(super) fn yielding_ended(&mut self, now: Instant, calibrated: Duration, taken: Duration) {
        if !core::mem::take(&mut self.yields.is_yielding) {
            return;
        }
        if taken > self.model.scaled(calibrated) + FLOOD {
            self.yields.flooded_until = now + FLOODED_FOR;
        }
    }
}
