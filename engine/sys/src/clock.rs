// SPDX-License-Identifier: Apache-2.0
//! The one clock of the server: CLOCK_MONOTONIC, the same in every process of the machine. And the
//! time of day, for work that an operator wants done at night and for times of files.

use rushes_core::units::{Duration, Instant, NS_PER_S};
use rustix::time::{ClockId, clock_gettime};

/// Now. Units: ns of CLOCK_MONOTONIC, so doors and daemon can compare theirs.
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither part is negative on this clock.
    Instant((time.tv_sec as u64).saturating_mul(NS_PER_S) + time.tv_nsec as u64)
}

/// Whether a time that a file system set, by the time of day, is less than `span` from now. Use it
/// for extra care alone: it is wrong after the clock was set.
///
/// Units    seconds and ns since 1970
pub(crate) fn is_fresh(seconds: i64, nanoseconds: u32, span: Duration) -> bool {
    let now = clock_gettime(ClockId::Realtime);
    let ns =
        |seconds: i64, more: i64| i128::from(seconds) * i128::from(NS_PER_S) + i128::from(more);
    let age = ns(now.tv_sec, now.tv_nsec) - ns(seconds, nanoseconds.into());
    age.unsigned_abs() < u128::from(span.0)
}

unsafe extern "C" {
    /// tzset(3), which the libc crate lacks.
    fn tzset();
}

/// The local time of day, also after the operator has changed the machine's time zone. Use it only
/// for settings that an operator gives as times of day: it may go backwards.
///
/// Units    minutes after midnight, below 1440
pub fn minute_of_day() -> u16 {
    let seconds: libc::time_t = clock_gettime(ClockId::Realtime).tv_sec;
    // Unlike localtime(3), localtime_r(3) reads the time zone once in a process, and a mount
    // outlives changes of it: so tzset(3). SAFETY: all zeroes are a `tm`, which localtime_r(3)
    // fills from `seconds`; both live through the call. tzset(3) takes libc's own lock, and reads
    // the environment, which no thread of ours changes.
    let local = unsafe {
        tzset();
        let mut local: libc::tm = std::mem::zeroed();
        libc::localtime_r(&raw const seconds, &raw mut local);
        local
    };
    let minute = local.tm_hour.clamp(0, 23) * 60 + local.tm_min.clamp(0, 59);
    u16::try_from(minute).unwrap_or(0)
}

/// A span as the kernel writes it.
pub(crate) fn timespec(span: Duration) -> rustix::time::Timespec {
    rustix::time::Timespec {
        tv_sec: (span.0 / NS_PER_S) as i64,
        tv_nsec: (span.0 % NS_PER_S) as _,
    }
}
