// SPDX-License-Identifier: Apache-2.0
//! How long the event loop makes others wait.

use hdrhistogram::Histogram;
use rushes_core::units::Duration;

/// A turn longer than this is counted as this. Units: µs.
const LONGEST_US: u64 = 60_000_000;

/// Lengths of turns since the start.
pub(crate) struct Lag {
    /// None only if the bounds above were wrong; then nothing is counted.
    histogram: Option<Histogram<u64>>,
    turn_count: u64,
}

impl Lag {
    pub(crate) fn new() -> Lag {
        Lag {
            histogram: Histogram::new_with_bounds(1, LONGEST_US, 2).ok(),
            turn_count: 0,
        }
    }

    pub(crate) fn record(&mut self, turn: Duration) {
        self.turn_count += 1;
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record((turn.0 / 1000).clamp(1, LONGEST_US));
        }
    }

    pub(crate) fn turn_count(&self) -> u64 {
        self.turn_count
    }

    /// Units: µs. `part` of all turns were at most this long.
    pub(crate) fn quantile_us(&self, part: f64) -> u64 {
        self.histogram
            .as_ref()
            .map_or(0, |histogram| histogram.value_at_quantile(part))
    }

    pub(crate) fn max_us(&self) -> u64 {
        self.histogram
            .as_ref()
            .map_or(0, |histogram| histogram.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rare_long_turn_is_not_averaged_away() {
        let mut lag = Lag::new();
        for _ in 0..999 {
            lag.record(Duration::from_us(10));
        }
        lag.record(Duration::from_ms(50));
        lag.record(Duration(0));
        assert_eq!(lag.turn_count(), 1001);
        assert_eq!(lag.quantile_us(0.5), 10);
        assert!(
            (49_000..=51_000).contains(&lag.max_us()),
            "{}",
            lag.max_us()
        );
    }
}
