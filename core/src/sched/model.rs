// SPDX-License-Identifier: Apache-2.0
//! How long a device will take: `t(n, d) = fixed + span·√d + n / rate`, times what it was lately off.

use crate::units::*;

/// Observed over predicted time, in thousandths, within which the calibration is taken to be right.
const TRUSTED_PERMILLE: core::ops::RangeInclusive<u64> = 900..=1050;

/// How long a device takes: `t(n, d) = fixed + span·√d + n / rate`, where *d* is the distance from the end
/// of the previous request as a fraction of the device, and positioning is nothing when d is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceModel {
    /// Positioning at the shortest distance.
    pub fixed: Duration,
    /// What the longest distance adds to it.
    pub span: Duration,
    /// Transfer rate.
    pub rate: BytesPerSecond,
}

/// What the server knows of a device before it has served anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceModel {
    /// Reads.
    pub read: ServiceModel,
    /// Writes.
    pub write: ServiceModel,
    /// Size of the device, for distances.
    pub size: ByteCount,
}

impl ServiceModel {
    /// Time to get to bytes that lie `distance` away on a device of `size`; nothing when they follow on.
    ///
    /// Units: bytes. Assumes nothing; a distance past the size counts as the size.
    pub fn positioning(&self, distance: u64, size: ByteCount) -> Duration {
        if distance == 0 {
            return Duration::ZERO;
        }
        let size = size.0.max(1) as u128;
        let fraction = (u128::from(distance).min(size) << 32) / size;
        let root_16 = fraction.isqrt() as u64; // √d · 2¹⁶
        self.fixed + Duration(((u128::from(self.span.0) * u128::from(root_16)) >> 16) as u64)
    }

    /// Time to move `count` bytes once there.
    pub fn transfer(&self, count: u64) -> Duration {
        self.rate.time_for(ByteCount(count))
    }
}

/// A device model with what its completed requests taught.
#[derive(Clone, Copy, Debug)]
pub struct RefinedModel {
    /// As calibrated.
    pub base: DeviceModel,
    /// Observed over predicted, in thousandths; smoothed over about 64 requests.
    scale_permille: u64,
}

impl RefinedModel {
    /// The calibrated model, nothing learned.
    pub fn new(base: DeviceModel) -> RefinedModel {
        RefinedModel {
            base,
            scale_permille: 1000,
        }
    }

    /// Time a read will take: to get `distance` away and move `count` bytes.
    pub fn read(&self, distance: u64, count: u64) -> Duration {
        let model = &self.base.read;
        self.scaled(model.positioning(distance, self.base.size) + model.transfer(count))
    }

    /// Positioning of a typical step among `count` streams that are visited in order of position:
    /// about 1/count of the device, at least the shortest.
    pub fn typical_positioning(&self, count: usize) -> Duration {
        let step = self.base.size.0 / (count as u64).max(2);
        self.scaled(self.base.read.positioning(step.max(1), self.base.size))
    }

    /// Time that `count` bytes take once there.
    pub fn transfer(&self, count: u64) -> Duration {
        self.scaled(self.base.read.transfer(count))
    }

    /// A busy period of the device ended: it was predicted to take this, and took that.
    pub fn observed(&mut self, predicted: Duration, taken: Duration) {
        // Short requests teach nothing but the noise of clocks.
        if predicted < Duration::from_us(500) {
            return;
        }
        let now_permille = (taken.0.saturating_mul(1000) / predicted.0).clamp(500, 4000);
        self.scale_permille = (self.scale_permille * 63 + now_permille).div_ceil(64);
    }

    /// What the device was off its calibration lately, in thousandths; 1000 is right.
    pub fn scale_permille(&self) -> u64 {
        if TRUSTED_PERMILLE.contains(&self.scale_permille) {
            1000
        } else {
            self.scale_permille
        }
    }

    fn scaled(&self, time: Duration) -> Duration {
        match self.scale_permille() {
            1000 => time,
            scale => Duration((u128::from(time.0) * u128::from(scale) / 1000) as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The array of rt-Samba's Table 5: k·15.2 ms, k = 0.4 + 1.13·√d, 172 MB/s.
    pub(crate) fn table5() -> DeviceModel {
        let read = ServiceModel {
            fixed: Duration::from_us(6_080),
            span: Duration::from_us(17_176),
            rate: BytesPerSecond(172_000_000),
        };
        DeviceModel {
            read,
            write: read,
            size: ByteCount(40 << 30),
        }
    }

    #[test]
    fn positioning_grows_with_the_root_of_the_distance() {
        let model = RefinedModel::new(table5());
        assert_eq!(model.read(0, 172_000_000), Duration::from_s(1));
        let quarter = model.read(10 << 30, 0);
        assert!(quarter.0.abs_diff(14_668_000) < 1_000, "{quarter}");
        let whole = model.read(u64::MAX, 0);
        assert!(whole.0.abs_diff(23_256_000) < 1_000, "{whole}");
    }

    #[test]
    fn slower_device_is_learned_and_noise_is_not() {
        let mut model = RefinedModel::new(table5());
        let predicted = Duration::from_ms(24);
        for _ in 0..200 {
            model.observed(predicted, Duration::from_ms(25));
        }
        assert_eq!(model.scale_permille(), 1000);
        for _ in 0..300 {
            model.observed(predicted, Duration::from_ms(48));
        }
        assert!(model.scale_permille() > 1900);
    }
}
