// SPDX-License-Identifier: Apache-2.0
//! From timed requests to a model: least squares of `t = fixed + span·√d + n / rate`.
//!
//! Residuals are weighed by the time itself, so that a device of microseconds and one of
//! milliseconds, a small request and a large one, count alike. Outliers, such as requests that
//! another program delayed, lose weight step by step (Huber). Nothing here touches a device.

use rushes_core::server::ServiceModel;
use rushes_core::units::{BytesPerSecond, Duration};
use serde::{Deserialize, Serialize};

/// One timed request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// From the end of the request before, as a part of the device: 0..=1.
    pub(super) distance: f64,
    /// Its size. Units: bytes.
    pub(super) bytes: u64,
    /// How long it took. Units: s.
    pub(super) seconds: f64,
}

/// A service model and how well it fits the measured requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Positioning at the shortest distance. Units: ns.
    pub fixed_ns: u64,
    /// The time that the longest distance adds. Units: ns.
    pub span_ns: u64,
    /// Transfer.
    pub bytes_per_second: u64,
    /// Requests that were fitted.
    pub sample_count: u32,
    /// Half of the requests were off by less than this part of their predicted time. Units:
    /// percent.
    pub residual_percent_median: f64,
    /// Nineteen of twenty were. Units: percent.
    pub residual_percent_p95: f64,
    /// True: nothing of it was measured; all of it is taken from the model of reads.
    pub estimated: bool,
    /// True: `span_ns` was not measured. For writes it is derived from that of reads.
    pub span_estimated: bool,
}

impl Fit {
    /// The model in the server's units.
    pub fn model(&self) -> ServiceModel {
        ServiceModel {
            fixed: Duration(self.fixed_ns),
            span: Duration(self.span_ns),
            rate: BytesPerSecond(self.bytes_per_second),
        }
    }

    /// Predicted time. Units: s.
    pub(super) fn seconds(&self, distance: f64, bytes: u64) -> f64 {
        self.fixed_ns as f64 / 1e9
            + self.span_ns as f64 / 1e9 * distance.sqrt()
            + bytes as f64 / self.bytes_per_second.max(1) as f64
    }
}

/// Shortest plausible positioning; shorter times are within the clock's error. Units: s.
const FIXED_MIN: f64 = 1e-6;
/// Rounds of reweighting; it settles in fewer.
const ROUNDS: usize = 12;
/// Residuals past so many typical ones lose weight.
const HUBER: f64 = 1.5;

/// Which of the three terms are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Terms {
    /// All three.
    All,
    /// No span: distances are unknown or the same.
    NoSpan,
}

/// Fits the model.
///
/// Assumes  times are positive
/// Returns  None when the samples cannot tell (fewer than six, or all of one size)
pub(super) fn fit(samples: &[Sample], terms: Terms) -> Option<Fit> {
    let usable: Vec<Sample> = samples.iter().copied().filter(usable).collect();
    let smallest = usable.iter().map(|sample| sample.bytes).min()?;
    let largest = usable.iter().map(|sample| sample.bytes).max()?;
    if usable.len() < 6 || smallest == largest {
        return None;
    }
    let mut free = [true, terms == Terms::All, true];
    let solution = loop {
        let solution = reweighted(&usable, free)?;
        // A negative term is dropped, and the others are fitted again without it.
        match (0..2).find(|&term| free[term] && solution[term] < 0.0) {
            Some(term) => free[term] = false,
            None => break solution,
        }
    };
    let [fixed, span, per_byte] = solution;
    // No measurable time per byte: take the rate of the fastest request.
    let best = usable
        .iter()
        .map(|sample| sample.bytes as f64 / sample.seconds)
        .fold(1.0, f64::max);
    let rate = if per_byte > 0.0 {
        (1.0 / per_byte).min(best * 10.0)
    } else {
        best
    };
    let mut fit = Fit {
        fixed_ns: (fixed.max(FIXED_MIN) * 1e9) as u64,
        span_ns: (span * 1e9) as u64,
        bytes_per_second: rate as u64,
        sample_count: u32::try_from(usable.len()).unwrap_or(u32::MAX),
        residual_percent_median: 0.0,
        residual_percent_p95: 0.0,
        estimated: false,
        span_estimated: false,
    };
    let mut off: Vec<f64> = usable
        .iter()
        .map(|sample| {
            let predicted = fit.seconds(sample.distance, sample.bytes);
            (sample.seconds / predicted - 1.0).abs() * 100.0
        })
        .collect();
    off.sort_by(f64::total_cmp);
    fit.residual_percent_median = super::rounded(off[off.len() / 2]);
    fit.residual_percent_p95 = super::rounded(off[(off.len() * 95 / 100).min(off.len() - 1)]);
    Some(fit)
}

fn usable(sample: &Sample) -> bool {
    sample.seconds.is_finite()
        && sample.seconds > 0.0
        && (0.0..=1.0).contains(&sample.distance)
        && sample.bytes > 0
}

/// The factors of the three unknowns. Units: the third is per byte.
fn row(sample: &Sample) -> [f64; 3] {
    [1.0, sample.distance.sqrt(), sample.bytes as f64]
}

fn predicted(solution: &[f64; 3], sample: &Sample) -> f64 {
    let row = row(sample);
    (0..3).map(|term| solution[term] * row[term]).sum()
}

fn reweighted(samples: &[Sample], free: [bool; 3]) -> Option<[f64; 3]> {
    let mut weights: Vec<f64> = samples.iter().map(|s| s.seconds.powi(-2)).collect();
    let mut solution = solve(samples, &weights, free)?;
    for _ in 0..ROUNDS {
        let scale: Vec<f64> = samples
            .iter()
            .map(|sample| predicted(&solution, sample).max(sample.seconds * 0.1))
            .collect();
        let off: Vec<f64> = samples
            .iter()
            .zip(&scale)
            .map(|(sample, scale)| ((sample.seconds - predicted(&solution, sample)) / scale).abs())
            .collect();
        let mut sorted = off.clone();
        sorted.sort_by(f64::total_cmp);
        // 1.4826 · median is the standard deviation where errors are normal.
        let limit = (HUBER * 1.4826 * sorted[sorted.len() / 2]).max(1e-9);
        for ((weight, off), scale) in weights.iter_mut().zip(&off).zip(&scale) {
            *weight = (limit / off.max(limit)) / (scale * scale);
        }
        solution = solve(samples, &weights, free)?;
    }
    Some(solution)
}

/// Weighted normal equations, by elimination; unknowns that are not free are 0.
fn solve(samples: &[Sample], weights: &[f64], free: [bool; 3]) -> Option<[f64; 3]> {
    // Scale each column to 1: bytes are many orders of magnitude larger than seconds.
    let mut size = [0.0f64; 3];
    for sample in samples {
        for (size, value) in size.iter_mut().zip(row(sample)) {
            *size = size.max(value);
        }
    }
    let mut matrix = [[0.0f64; 4]; 3];
    for (sample, weight) in samples.iter().zip(weights) {
        let row = row(sample);
        for i in 0..3 {
            for j in 0..3 {
                matrix[i][j] +=
                    weight * row[i] / size[i].max(1e-300) * row[j] / size[j].max(1e-300);
            }
            matrix[i][3] += weight * row[i] / size[i].max(1e-300) * sample.seconds;
        }
    }
    for i in 0..3 {
        if !free[i] || size[i] == 0.0 {
            for row in &mut matrix {
                row[i] = 0.0;
            }
            matrix[i] = [0.0; 4];
            matrix[i][i] = 1.0;
        }
    }
    let scaled = eliminate(matrix)?;
    let mut solution = [0.0; 3];
    for i in 0..3 {
        if size[i] > 0.0 {
            solution[i] = scaled[i] / size[i];
        }
    }
    Some(solution)
}

fn eliminate(mut matrix: [[f64; 4]; 3]) -> Option<[f64; 3]> {
    for column in 0..3 {
        let pivot = (column..3)
            .max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))?;
        matrix.swap(column, pivot);
        let head = matrix[column];
        if head[column].abs() < 1e-12 * matrix_size(&matrix) {
            return None;
        }
        for (index, row) in matrix.iter_mut().enumerate() {
            if index != column {
                let factor = row[column] / head[column];
                for (value, head) in row.iter_mut().zip(head) {
                    *value -= factor * head;
                }
            }
        }
    }
    Some([0, 1, 2].map(|i| matrix[i][3] / matrix[i][i]))
}

fn matrix_size(matrix: &[[f64; 4]; 3]) -> f64 {
    matrix
        .iter()
        .flat_map(|row| &row[..3])
        .fold(f64::MIN_POSITIVE, |most, value| most.max(value.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u64; 7] = [
        1 << 16,
        1 << 19,
        1 << 20,
        2 << 20,
        4 << 20,
        8 << 20,
        16 << 20,
    ];

    /// Requests of all sizes at distances over the whole device, timed by `time`; with noise
    /// between 0 and 1.
    fn measured(count: usize, mut time: impl FnMut(f64, u64, f64) -> f64) -> Vec<Sample> {
        let mut state = 88_172_645_463_325_252u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        (0..count)
            .map(|index| {
                let bytes = SIZES[index % SIZES.len()];
                let distance = (random() - random()).abs();
                Sample {
                    distance,
                    bytes,
                    seconds: time(distance, bytes, random()),
                }
            })
            .collect()
    }

    fn close(got: f64, expect: f64, part: f64) {
        assert!(
            (got / expect - 1.0).abs() < part,
            "read {got}, expected {expect}"
        );
    }

    #[test]
    fn moving_head_is_recognised() {
        let samples = measured(70, |distance, bytes, noise| {
            0.0152 * (0.4 + 1.13 * distance.sqrt()) + bytes as f64 / 172e6 + 0.0004 * noise
        });
        let fit = fit(&samples, Terms::All).unwrap();
        close(fit.fixed_ns as f64, 0.4 * 15.2e6, 0.06);
        close(fit.span_ns as f64, 1.13 * 15.2e6, 0.03);
        close(fit.bytes_per_second as f64, 172e6, 0.01);
        assert!(fit.residual_percent_p95 < 3.0, "{fit:?}");
    }

    #[test]
    fn rotational_latency_is_scatter_not_bias() {
        let samples = measured(210, |distance, bytes, noise| {
            0.002 + 0.012 * distance.sqrt() + 0.0083 * noise + bytes as f64 / 200e6
        });
        let fit = fit(&samples, Terms::All).unwrap();
        close(fit.fixed_ns as f64, 2e6 + 4.15e6, 0.2);
        close(fit.bytes_per_second as f64, 200e6, 0.03);
        assert!(fit.residual_percent_p95 > 10.0);
    }

    #[test]
    fn flash_has_no_span() {
        let samples = measured(140, |_, bytes, noise| {
            90e-6 + bytes as f64 / 3.2e9 + 10e-6 * noise
        });
        let fit = fit(&samples, Terms::All).unwrap();
        close(fit.fixed_ns as f64, 95e3, 0.15);
        close(fit.bytes_per_second as f64, 3.2e9, 0.03);
        assert!(fit.span_ns < 10_000, "{fit:?}");
    }

    #[test]
    fn one_disturbed_request_in_ten_does_not_bend_the_model() {
        let mut samples = measured(140, |distance, bytes, noise| {
            0.006 + 0.017 * distance.sqrt() + bytes as f64 / 172e6 + 0.0002 * noise
        });
        for sample in samples.iter_mut().step_by(10) {
            sample.seconds += 0.25;
        }
        let fit = fit(&samples, Terms::All).unwrap();
        close(fit.fixed_ns as f64, 6.1e6, 0.1);
        close(fit.span_ns as f64, 17e6, 0.05);
        close(fit.bytes_per_second as f64, 172e6, 0.03);
    }

    #[test]
    fn without_distances_the_span_goes_into_the_fixed_part() {
        let samples: Vec<Sample> = measured(70, |_, bytes, _| 0.01 + bytes as f64 / 100e6)
            .into_iter()
            .map(|sample| Sample {
                distance: 0.0,
                ..sample
            })
            .collect();
        let fit = fit(&samples, Terms::NoSpan).unwrap();
        close(fit.fixed_ns as f64, 10e6, 0.001);
        assert_eq!(fit.span_ns, 0);
    }

    #[test]
    fn too_little_to_tell_is_said() {
        assert_eq!(fit(&[], Terms::All), None);
        let same = measured(1, |_, _, _| 0.01);
        assert_eq!(fit(&vec![same[0]; 50], Terms::All), None);
        let nonsense = Sample {
            distance: f64::NAN,
            bytes: 0,
            seconds: -1.0,
        };
        assert_eq!(fit(&[nonsense; 50], Terms::All), None);
    }

    #[test]
    fn equal_times_for_all_sizes_give_a_finite_rate() {
        let samples = measured(70, |_, _, _| 0.001);
        let fit = fit(&samples, Terms::All).unwrap();
        assert!(
            fit.bytes_per_second >= (16 << 20) * 1000 * 9 / 10,
            "{fit:?}"
        );
    }
}
