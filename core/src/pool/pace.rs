// SPDX-License-Identifier: Apache-2.0
//! How fast files are moved between members while others play and record.

use crate::units::{ByteCount, Duration};

/// Moving may use one part in so many of a device's bandwidth that no contract has. The rest is for
/// clients without a contract, and for the costs of a contract beyond its rate.
const SHARE: u64 = 4;
/// It goes on at this pace regardless of contracts, or a pool that is always busy would never be
/// mended. Units: bytes per second.
const LEAST_BYTES_PER_S: u64 = 1 << 20;
/// A move goes step by step. The cost of a step beside its bytes, as bytes: a few positionings.
const STEP_COST_BYTES: u64 = 256 << 10;
/// Longest rest where nothing is known.
const REST_MAX: Duration = Duration::from_s(2);
/// A move for which no command waits works beside others one part of the time in so many: clients
/// without a contract would notice more.
const PART_BESIDE: u64 = 8;
/// And rests no longer after a step, however slow the disk was.
const REST_BESIDE_MAX: Duration = Duration::from_s(20);

/// How long to rest after a step.
///
/// Units    unpromised: bytes per second without a contract of the busier device that had a part in
///          it; None: not known
/// Returns  so long that the copied bytes are that device's share for the whole time; where nothing
///          is known, as long as it took: half of the time is others'
pub fn rest(copied: ByteCount, took: Duration, unpromised: Option<u64>) -> Duration {
    let Some(unpromised) = unpromised else {
        return took.min(REST_MAX);
    };
    let bytes_per_s = (unpromised / SHARE).max(LEAST_BYTES_PER_S);
    let bytes = copied.0.saturating_add(STEP_COST_BYTES);
    let due_ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s);
    Duration(
        u64::try_from(due_ns)
            .unwrap_or(u64::MAX)
            .saturating_sub(took.0),
    )
}

/// The same where no command asked for the move, and others want bytes.
///
/// `worked`  the part of `took` in which its requests were not the last in line
pub fn rest_beside(
    copied: ByteCount,
    (took, worked): (Duration, Duration),
    unpromised: Option<u64>,
) -> Duration {
    let part = worked.0.saturating_mul(PART_BESIDE - 1);
    let part = Duration(part).min(REST_BESIDE_MAX);
    rest(copied, took, unpromised).max(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: ByteCount = ByteCount::from_mib(4);

    /// Bytes per second over working and resting.
    fn pace(step: ByteCount, took: Duration, unpromised: Option<u64>) -> u64 {
        let whole = took.0 + rest(step, took, unpromised).0;
        (u128::from(step.0) * 1_000_000_000 / u128::from(whole)) as u64
    }

    #[test]
    fn no_more_than_its_share_of_what_is_not_promised_is_used() {
        for unpromised in [8 << 20, 40 << 20, 170_000_000, 3_000_000_000] {
            for step_mib in [1, 4] {
                for took_ms in [1, 20, 90] {
                    let step = ByteCount::from_mib(step_mib);
                    let used = pace(step, Duration::from_ms(took_ms), Some(unpromised));
                    assert!(used <= unpromised / SHARE, "{used} of {unpromised}");
                    // And about that, where the disk allows it.
                    let able = step.0 * 1000 / took_ms;
                    assert!(
                        used >= (unpromised / SHARE).min(able) / 2,
                        "{used} of {unpromised}"
                    );
                }
            }
        }
    }

    #[test]
    fn it_goes_on_where_everything_is_promised() {
        let used = pace(STEP, Duration::from_ms(100), Some(0));
        assert!(
            (LEAST_BYTES_PER_S / 2..=LEAST_BYTES_PER_S).contains(&used),
            "{used}"
        );
        let small = rest(ByteCount(0), Duration::from_ms(30), Some(0));
        assert!(small < Duration::from_ms(300), "{small:?}");
    }

    #[test]
    fn a_device_that_was_slow_has_had_its_rest() {
        assert_eq!(
            rest(STEP, Duration::from_s(60), Some(100 << 20)),
            Duration::ZERO
        );
    }

    #[test]
    fn for_nobody_and_beside_others_it_works_an_eighth_of_the_time_and_within_its_share() {
        let took = Duration::from_ms(100);
        for unpromised in [None, Some(0), Some(43_000_000), Some(3_000_000_000)] {
            let beside = rest_beside(STEP, (took, took), unpromised);
            assert!(beside >= Duration::from_ms(700), "{unpromised:?}");
            assert!(beside >= rest(STEP, took, unpromised), "{unpromised:?}");
        }
        let minute = Duration::from_s(60);
        let slow = rest_beside(STEP, (minute, minute), Some(43_000_000));
        assert_eq!(slow, REST_BESIDE_MAX);
        // It waited for all others: that was their time.
        let waited = rest_beside(STEP, (minute, took), Some(43_000_000));
        assert_eq!(waited, Duration::from_ms(700));
    }

    #[test]
    fn where_nothing_is_known_half_of_the_time_is_others_and_no_rest_is_long() {
        let took = Duration::from_ms(80);
        assert_eq!(rest(STEP, took, None), took);
        assert_eq!(rest(STEP, Duration::from_s(30), None), REST_MAX);
    }
}
