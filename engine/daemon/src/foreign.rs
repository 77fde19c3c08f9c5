// SPDX-License-Identifier: Apache-2.0
//! What others do on a device: metadata that the kernel fetches for people who browse, other programs.
//!
//! The kernel counts every read of a disk (`/sys/dev/block/M:m/stat`, Documentation/block/stat.rst). Without
//! reads of ours in a sample all of them are theirs. Otherwise the trick is to use nothing but the kernel's
//! own two counters, which move together when a piece is done: ours are cut into pieces of one size, so bytes
//! over that size is how many of the requests were ours. The size is learned; while it is
//! learned beside others it comes out too small, and with it what they are charged, never too large.

use rushes_core::units::{BytesPerSecond, Duration, NS_PER_S};

/// How often the counters are looked at.
pub(crate) const SAMPLE: Duration = Duration::from_ms(500);

/// Block layer sectors. Units: bytes.
const SECTOR_BYTES: u64 = 512;
/// Bytes in a sample from which the size of our pieces is learned.
const LEARN_BYTES: u64 = 16 << 20;

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
    /// Largest mean size of a request seen while we read. Units: bytes; 0: not learned yet.
    piece_bytes: u64,
}

/// Others' small requests in thousandths a second, and bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) requests_per_kilosecond: u64,
    pub(crate) rate: BytesPerSecond,
}

impl Foreign {
    /// The counters now, and how many bytes of ours were sent to the disk since the start. `busy`: some are still
    /// on their way.
    pub(crate) fn sample(
        &mut self,
        now: Counters,
        own_bytes: u64,
        busy: bool,
        span: Duration,
    ) -> Load {
        let idle = own_bytes == self.own_before && !busy;
        self.own_before = own_bytes;
        let Some(before) = self.before.replace(now) else {
            return Load::default();
        };
        let requests = now.requests.saturating_sub(before.requests);
        let bytes = now.bytes.saturating_sub(before.bytes);
        if requests == 0 {
            return Load::default();
        }
        let per = |count: u64, scale: u64| {
            (u128::from(count) * u128::from(NS_PER_S) * u128::from(scale)
                / u128::from(span.0.max(1))) as u64
        };
        if idle {
            return Load {
                requests_per_kilosecond: per(requests, 1000),
                rate: BytesPerSecond(per(bytes, 1)),
            };
        }
        if bytes >= LEARN_BYTES {
            self.piece_bytes = self.piece_bytes.max(bytes / requests);
        }
        if self.piece_bytes == 0 {
            return Load::default();
        }
        let theirs = requests.saturating_sub(bytes.div_ceil(self.piece_bytes));
        Load {
            requests_per_kilosecond: per(theirs, 1000),
            rate: BytesPerSecond(0),
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
        foreign.sample(counters(10, 4096), 0, false, SAMPLE);
        let load = foreign.sample(counters(15, 4096 * 6), 0, false, SAMPLE);
        assert_eq!(load.requests_per_kilosecond, 10_000);
        assert_eq!(load.rate, BytesPerSecond(2 * 5 * 4096));
    }

    #[test]
    fn our_own_reads_are_not_foreign_however_the_kernel_cuts_them() {
        for pieces in [1, 3, 8] {
            let mut foreign = Foreign::default();
            for nth in 0..10u64 {
                let own = nth * (96 << 20);
                let load = foreign.sample(counters(nth * 96 * pieces, own), own, true, SAMPLE);
                assert_eq!(load, Load::default());
            }
        }
    }

    #[test]
    fn small_requests_between_ours_are_counted_whatever_is_still_on_its_way() {
        let mut foreign = Foreign::default();
        let own = 96u64 << 20;
        foreign.sample(counters(0, 0), 0, false, SAMPLE);
        foreign.sample(counters(192, own), own + (8 << 20), true, SAMPLE);
        let bytes = 2 * own + 20 * 4096;
        let load = foreign.sample(counters(2 * 192 + 20, bytes), 2 * own, true, SAMPLE);
        // Their own bytes count as a piece of ours at most.
        assert!(
            (38_000..=40_000).contains(&load.requests_per_kilosecond),
            "{load:?}"
        );
    }
}
