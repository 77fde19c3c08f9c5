// SPDX-License-Identifier: Apache-2.0
//! What others do on a device: metadata that the kernel fetches for people who browse, other programs.
//!
//! The kernel counts every read of a disk (`/sys/dev/block/M:m/stat`, Documentation/block/stat.rst); ours
//! are known, so the rest is theirs. Bytes are counted exactly. Requests are not: a large one of ours is cut by
//! the block layer into a number that depends on the device, so that number is learned while nobody
//! else reads.

use rushes_core::units::{BytesPerSecond, Duration, NS_PER_S};

/// How often the counters are looked at.
pub(crate) const SAMPLE: Duration = Duration::from_ms(500);

/// Block layer sectors. Units: bytes.
const SECTOR_BYTES: u64 = 512;
/// Others' bytes in a sample that are still taken for none (the tail of a request of ours).
const NOISE_BYTES: u64 = 64 << 10;

/// The kernel's counters of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    requests: u64,
    bytes: u64,
}

impl Counters {
    /// From the text of a `stat` file. None: it is not one.
    pub(crate) fn parse(text: &str) -> Option<Counters> {
        let mut fields = text.split_ascii_whitespace().map(str::parse::<u64>);
        let requests = fields.next()?.ok()?;
        let _merges = fields.next()?.ok()?;
        let bytes = fields.next()?.ok()? * SECTOR_BYTES;
        Some(Counters { requests, bytes })
    }
}

/// What others do on one disk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Foreign {
    before: Option<Counters>,
    own_before: u64,
    /// Requests that the kernel makes of a mebibyte of ours, in thousandths; 0: not learned yet.
    requests_per_mib_milli: u64,
}

/// Others' small requests in thousandths a second, and bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) requests_per_kilosecond: u64,
    pub(crate) rate: BytesPerSecond,
}

impl Foreign {
    /// The counters now, and how many bytes of ours the disk has delivered since the start.
    pub(crate) fn sample(&mut self, now: Counters, own_bytes: u64, span: Duration) -> Load {
        let own = own_bytes.saturating_sub(self.own_before);
        self.own_before = own_bytes;
        let Some(before) = self.before.replace(now) else {
            return Load::default();
        };
        let requests = now.requests.saturating_sub(before.requests);
        let others = now.bytes.saturating_sub(before.bytes).saturating_sub(own);
        if others <= NOISE_BYTES {
            if own >= 4 << 20 {
                self.requests_per_mib_milli = requests * 1000 / (own >> 20);
            }
            return Load::default();
        }
        let ours = (own >> 20) * self.requests_per_mib_milli.max(1000) / 1000;
        // At least what their bytes need in the largest requests there are, at most a block each.
        let theirs = requests.saturating_sub(ours).clamp(others.div_ceil(1 << 20), others.div_ceil(4096));
        let per = |count: u64, scale: u64| {
            (u128::from(count) * u128::from(NS_PER_S) * u128::from(scale) / u128::from(span.0.max(1))) as u64
        };
        Load {
            requests_per_kilosecond: per(theirs, 1000),
            rate: BytesPerSecond(per(others, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(requests: u64, bytes: u64) -> Counters {
        Counters { requests, bytes }
    }

    #[test]
    fn stat_file_is_read_and_anything_else_is_not() {
        let text = "   446216   784926  9550688  4382310 480436 1 2 3 0 5 6\n";
        assert_eq!(Counters::parse(text), Some(counters(446_216, 9_550_688 * 512)));
        assert_eq!(Counters::parse("nothing"), None);
        assert_eq!(Counters::parse("1 2"), None);
    }

    #[test]
    fn our_own_reads_are_not_foreign_however_the_kernel_cuts_them() {
        let mut foreign = Foreign::default();
        for second in 0..10u64 {
            let own = second * (150 << 20);
            let load = foreign.sample(counters(second * 150 * 3, own), own, Duration::from_s(1));
            assert_eq!(load, Load::default());
        }
    }

    #[test]
    fn small_requests_between_ours_are_counted() {
        let mut foreign = Foreign::default();
        let own = 100u64 << 20;
        foreign.sample(counters(0, 0), 0, Duration::from_s(1));
        foreign.sample(counters(300, own), own, Duration::from_s(1));
        let load = foreign.sample(counters(640, 2 * own + 40 * 4096), 2 * own, Duration::from_s(1));
        assert_eq!(load.requests_per_kilosecond, 40_000);
        assert_eq!(load.rate, BytesPerSecond(40 * 4096));
    }
}
