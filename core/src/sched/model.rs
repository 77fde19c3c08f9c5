// SPDX-License-Identifier: Apache-2.0
//! How long a device will take: `t(n, d) = fixed + span·√d + n / rate`, times the factor by which
//! it was lately off.

use crate::units::*;

/// Observed over predicted time, in thousandths, within which the calibration is taken to be right.
const TRUSTED_PERMILLE: core::ops::RangeInclusive<u64> = 900..=1050;

/// How long a device takes: `t(n, d) = fixed + span·√d + n / rate`, where *d* is the distance from
/// the end of the previous request as a fraction of the device, and positioning is nothing when d
/// is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceModel {
    /// Positioning at the shortest distance.
    pub fixed: Duration,
    /// The time that the longest distance adds to it.
    pub span: Duration,
    /// Transfer rate.
    pub rate: BytesPerSecond,
}

/// The server's knowledge of a device before it has served anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceModel {
    /// Reads.
    pub read: ServiceModel,
    /// Writes.
    pub write: ServiceModel,
    /// Size of the device, for distances.
    pub size: ByteCount,
}

impl ServiceModel {
    /// Time to get to bytes that lie `distance` away on a device of `size`; nothing when they
    /// follow on.
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

/// A device model, corrected by its completed requests.
#[derive(Clone, Copy, Debug)]
pub struct RefinedModel {
    /// As calibrated.
    pub base: DeviceModel,
    /// The measured times of writes, even if they are those of the drive's memory.
    measured_write: ServiceModel,
    /// Observed over predicted, in millionths; smoothed over about 64 requests.
    scale_ppm: u64,
    /// Part of the device's time that others take, in thousandths.
    foreign_permille: u64,
    /// The time seen of them, smoothed; millionths.
    foreign_average: u64,
    /// The last request that ended, not yet learned from: predicted, taken.
    pending: Option<(Duration, Duration)>,
    /// Files were opened since.
    opened: bool,
    /// How many more requests may be left out for the sake of opens.
    excuses: u32,
}

/// Requests that may be left out in a row. Each that is learned from allows for one more: on a
/// device where files are opened all the time half of them count, so it still is seen to be slow.
const EXCUSES_MAX: u32 = 16;

/// The part that others may take without being charged: files are opened on every device, and the
/// margin is for that.
const FOREIGN_PERMILLE_FREE: u64 = 60;

/// Most of a device that others are believed to take: the rest must stay more than nothing.
const FOREIGN_PERMILLE_MAX: u64 = 900;

impl RefinedModel {
    /// The calibrated model, nothing learned.
    pub fn new(base: DeviceModel) -> RefinedModel {
        // A drive that seems to write much faster than it reads was measured into its volatile
        // cache: that measurement did not see its speed in the long run, and reading is the better
        // guess.
        let is_memory = base.write.rate.0 / 5 * 4 > base.read.rate.0;
        let write = if is_memory { base.read } else { base.write };
        let measured_write = base.write;
        let base = DeviceModel { write, ..base };
        RefinedModel {
            base,
            measured_write,
            scale_ppm: 1_000_000,
            foreign_permille: 0,
            foreign_average: 0,
            pending: None,
            opened: false,
            excuses: EXCUSES_MAX,
        }
    }

    /// The drive takes writes into a volatile cache.
    pub fn has_memory(&self) -> bool {
        self.measured_write != self.base.write
    }

    /// Time a read will take: to get `distance` away and move `count` bytes.
    pub fn read(&self, distance: u64, count: u64) -> Duration {
        self.scaled(self.calibrated_read(distance, count))
    }

    /// The same by the calibration alone: the prediction for [`RefinedModel::observed`].
    pub fn calibrated_read(&self, distance: u64, count: u64) -> Duration {
        let model = &self.base.read;
        model.positioning(distance, self.base.size) + model.transfer(count)
    }

    /// Time a write will take: to get `distance` away and move `count` bytes.
    pub fn write(&self, distance: u64, count: u64) -> Duration {
        self.scaled(self.calibrated_write(distance, count))
    }

    /// The same by the calibration alone.
    pub fn calibrated_write(&self, distance: u64, count: u64) -> Duration {
        let model = &self.base.write;
        model.positioning(distance, self.base.size) + model.transfer(count)
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

    /// Positioning of a typical step of a reader, or of a writer, among `count` of them.
    pub fn step_of(&self, writes: bool, count: usize) -> Duration {
        if !writes {
            return self.typical_positioning(count);
        }
        let step = self.base.size.0 / (count as u64).max(2);
        self.scaled(self.base.write.positioning(step.max(1), self.base.size))
    }

    /// Time that `count` bytes take once there, read or written.
    pub fn transfer_of(&self, writes: bool, count: u64) -> Duration {
        if writes {
            self.scaled(self.base.write.transfer(count))
        } else {
            self.transfer(count)
        }
    }

    /// The cost of one request more, a gap away from the one before, its bytes left out.
    ///
    /// A drive that takes writes into a memory orders them there: the way to the next is short, and
    /// mostly the bytes between pass below the head meanwhile. The remaining cost is to hand the
    /// request over, and that was measured.
    pub fn another(&self, writes: bool, gap: u64) -> Duration {
        let model = match writes {
            true => &self.measured_write,
            false => &self.base.read,
        };
        self.scaled(model.positioning(gap, self.base.size))
    }

    /// Time of a request: to get `distance` away and move `count` bytes.
    pub fn request_of(&self, writes: bool, distance: u64, count: u64) -> Duration {
        if writes {
            self.write(distance, count)
        } else {
            self.read(distance, count)
        }
    }

    /// A request ended: by the calibration it should take `predicted`, and it took `taken`.
    pub fn observed(&mut self, predicted: Duration, taken: Duration) {
        // Short requests teach nothing but the noise of clocks.
        if predicted < Duration::from_us(500) {
            return;
        }
        // While the server reads, the requests of others are not counted: earlier counts fade, and
        // the times that are seen here take their place.
        self.foreign_average -= self.foreign_average / 256;
        self.charge_foreign();
        let opened = core::mem::take(&mut self.opened);
        let former = self.pending.take();
        if let Some((predicted, taken)) = former
            && !(opened && self.excused(predicted, taken))
        {
            self.excuses = (self.excuses + 1).min(EXCUSES_MAX);
            self.learn(predicted, taken);
        }
        if !(opened && self.excused(predicted, taken)) {
            self.pending = Some((predicted, taken));
        }
    }

    /// Whether a request beside an open took so long that one of others must have come between: to
    /// it and back at the least. A device that is slow all the time is not excused by that.
    fn excused(&mut self, predicted: Duration, taken: Duration) -> bool {
        let expected = u128::from(predicted.0) * u128::from(self.scale_ppm) / 1_000_000;
        let there_and_back = 2 * self.base.read.fixed.0;
        let interrupted = u128::from(taken.0) > expected + u128::from(there_and_back);
        if !interrupted || self.excuses == 0 {
            return false;
        }
        self.excuses -= 1;
        true
    }

    /// A file is being opened on the device, or was: the kernel reads its names, inode and extents
    /// between our requests. The margin is for that; the requests around it say nothing of the
    /// device.
    pub fn file_opened(&mut self) {
        self.opened = true;
    }

    fn learn(&mut self, predicted: Duration, taken: Duration) {
        let now_ppm = (taken.0.saturating_mul(1_000_000) / predicted.0).clamp(500_000, 4_000_000);
        // One request that one of others delayed says little of the next: it counts as twice as
        // slow at most.
        let now_ppm = now_ppm.min(2 * self.scale_ppm);
        self.scale_ppm = (self.scale_ppm * 63 + now_ppm) / 64;
    }

    /// Others were seen to send so many small requests, in thousandths a second, and bytes a
    /// second. Each of theirs between ours costs positioning twice: to it, and back.
    pub fn foreign_load(&mut self, requests_per_kilosecond: u64, rate: BytesPerSecond) {
        let positioning = self
            .base
            .read
            .positioning(self.base.size.0 / 3, self.base.size);
        let requests_ns =
            u128::from(positioning.0) * 2 * u128::from(requests_per_kilosecond) / 1000;
        let bytes_ns = u128::from(self.base.read.transfer(rate.0).0);
        let permille = ((requests_ns + bytes_ns) / (u128::from(NS_PER_S) / 1000)) as u64;
        let permille = permille.min(FOREIGN_PERMILLE_MAX);
        let seen = permille * 1000;
        let weight = if seen > self.foreign_average { 2 } else { 8 };
        self.foreign_average = (self.foreign_average * (weight - 1) + seen) / weight;
        self.charge_foreign();
    }

    fn charge_foreign(&mut self) {
        self.foreign_permille = match self.foreign_average / 1000 {
            0..FOREIGN_PERMILLE_FREE => 0,
            charged => charged,
        };
    }

    /// Part of the device's time that others take, in thousandths.
    pub fn foreign_permille(&self) -> u64 {
        self.foreign_permille
    }

    /// The time that our requests take lately, in thousandths of that of the calibrated model: the
    /// slower of the times seen and the time that others leave.
    pub fn scale_permille(&self) -> u64 {
        let seen = match self.scale_ppm / 1000 {
            seen if TRUSTED_PERMILLE.contains(&seen) => 1000,
            seen => seen,
        };
        seen.max(1_000_000 / (1000 - self.foreign_permille))
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
    fn a_drive_that_was_measured_into_its_memory_writes_as_it_reads() {
        let mut quick = table5();
        quick.write = ServiceModel {
            fixed: Duration::from_us(130),
            span: Duration::ZERO,
            rate: BytesPerSecond(2_600_000_000),
        };
        let model = RefinedModel::new(quick);
        assert_eq!(model.write(1 << 30, 4 << 20), model.read(1 << 30, 4 << 20));
        // But to hand it one more costs the measured time, and no positioning.
        assert_eq!(model.another(true, 1 << 20), Duration::from_us(130));
        assert!(model.another(false, 1 << 20) > Duration::from_ms(6));
        quick.write.rate = BytesPerSecond(145_000_000);
        assert_eq!(RefinedModel::new(quick).base.write, quick.write);
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
    fn opens_beside_requests_are_not_taken_for_slowness() {
        let mut model = RefinedModel::new(table5());
        let predicted = Duration::from_ms(24);
        // Every ninth request waits for the metadata of a file that is opened then.
        for nth in 0..400 {
            let disturbed = nth % 9 == 0;
            if nth % 9 == 1 {
                model.file_opened();
            }
            let taken = if disturbed { 70 } else { 24 };
            model.observed(predicted, Duration::from_ms(taken));
        }
        assert_eq!(model.scale_permille(), 1000);
        // When that never ends it is slowness.
        for _ in 0..1000 {
            model.file_opened();
            model.observed(predicted, Duration::from_ms(60));
        }
        assert!(model.scale_permille() > 1900);
    }

    #[test]
    fn a_hiccup_is_no_slowness() {
        let mut model = RefinedModel::new(table5());
        let predicted = Duration::from_ms(24);
        for nth in 0..64 {
            let taken = if nth % 25 == 0 { 90 } else { 24 };
            model.observed(predicted, Duration::from_ms(taken));
            assert_eq!(model.scale_permille(), 1000, "after {nth}");
        }
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
