// SPDX-License-Identifier: Apache-2.0
//! The one clock of the server: CLOCK_MONOTONIC, the same in every process of the machine.

use rushes_core::units::{Duration, Instant, NS_PER_S};
use rustix::time::{ClockId, clock_gettime};

/// Now. Units: ns of CLOCK_MONOTONIC, so doors and daemon can compare theirs.
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither part is negative on this clock.
    Instant((time.tv_sec as u64).saturating_mul(NS_PER_S) + time.tv_nsec as u64)
}

/// A span as the kernel writes it.
pub(crate) fn timespec(span: Duration) -> rustix::time::Timespec {
    rustix::time::Timespec {
        tv_sec: (span.0 / NS_PER_S) as i64,
        tv_nsec: (span.0 % NS_PER_S) as _,
    }
}
