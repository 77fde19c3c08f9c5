// SPDX-License-Identifier: Apache-2.0
//! Load of others on a device: metadata that the kernel reads for clients that browse, and reads of
//! other programs.
//!
//! The kernel counts every read of a disk (`/sys/block/NAME/stat`, Documentation/block/stat.rst).
//! In a sample without a read of ours, all of them are theirs, exactly. A sample with a read of
//! ours gives no figure: the kernel cuts our requests into pieces of its own making, and a few per
//! cent of error in that is more than a storm of metadata. The core then sees the load of others in
//! the time that our own requests take.

use rushes_core::units::{BytesPerSecond, Duration, NS_PER_S};

/// How often the counters are read.
pub(crate) const SAMPLE: Duration = Duration::from_ms(500);

/// Block layer sectors. Units: bytes.
const SECTOR_BYTES: u64 = 512;
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

/// The load of others on one disk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Foreign {
    before: Option<Counters>,
    own_before: u64,
}

/// Others' small requests in thousandths a second, and bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) requests_per_kilosecond: u64,
    pub(crate) rate: BytesPerSecond,
}

impl Foreign {
    /// The counters now, and how many bytes of ours were sent to the disk since the start. `busy`:
    /// some are still on their way. None: we read, so the sample tells nothing.
    pub(crate) fn sample(
        &mut self,
        now: Counters,
        own_bytes: u64,
        busy: bool,
        span: Duration,
    ) -> Option<Load> {
        let idle = own_bytes == self.own_before && !busy;
        self.own_before = own_bytes;
        let before = self.before.replace(now)?;
        if !idle {
            return None;
        }
        let per = |count: u64, scale: u64| {
            (u128::from(count) * u128::from(NS_PER_S) * u128::from(scale)
                / u128::from(span.0.max(1))) as u64
        };
        Some(Load {
            requests_per_kilosecond: per(now.requests.saturating_sub(before.requests), 1000),
            rate: BytesPerSecond(per(now.bytes.saturating_sub(before.bytes), 1)),
        })
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
        assert_eq!(
            Counters::parse(text),
            Some(counters(446_216, 9_550_688 * 512))
        );
        assert_eq!(Counters::parse("nothing"), None);
        assert_eq!(Counters::parse("1 2"), None);
    }

    #[test]
    fn without_reads_of_ours_all_are_theirs() {
        let mut foreign = Foreign::default();
        assert_eq!(foreign.sample(counters(10, 4096), 0, false, SAMPLE), None);
        let load = foreign.sample(counters(15, 4096 * 6), 0, false, SAMPLE);
        let expected = Load {
            requests_per_kilosecond: 10_000,
            rate: BytesPerSecond(2 * 5 * 4096),
        };
        assert_eq!(load, Some(expected));
    }

    #[test]
    fn while_we_read_nothing_is_said() {
        let mut foreign = Foreign::default();
        foreign.sample(counters(0, 0), 0, false, SAMPLE);
        let own = 96u64 << 20;
        assert_eq!(
            foreign.sample(counters(192, own / 2), own, true, SAMPLE),
            None
        );
        assert_eq!(foreign.sample(counters(384, own), own, true, SAMPLE), None);
        // The reads under way have arrived; from now on the rest is theirs.
        assert_eq!(
            foreign.sample(counters(385, own), own, false, SAMPLE),
            Some(Load {
                requests_per_kilosecond: 2_000,
                rate: BytesPerSecond(0),
            })
        );
    }
}
