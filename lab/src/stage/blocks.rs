// SPDX-License-Identifier: Apache-2.0
//! The kernel's counts of a block device in `/sys/class/block/*/stat`, for disks that count nothing
//! themselves.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The device's counters at one instant. Fields by number: Documentation/block/stat.rst of the
/// kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockStatistics(Vec<u64>);

const READ_COUNT: usize = 0;
const READ_SECTORS: usize = 2;
const WRITE_COUNT: usize = 4;
const WRITE_MERGES: usize = 5;
const WRITE_SECTORS: usize = 6;
/// In Linux 5.5 and later.
const FLUSH_COUNT: usize = 15;
/// The unit of these counts for devices with sectors of any size.
const SECTOR_BYTES: u64 = 512;

impl BlockStatistics {
    /// The counters of the block device `name`.
    pub fn read(name: &Path) -> Result<BlockStatistics> {
        let path = Path::new("/sys/class/block").join(name).join("stat");
        let text = fs::read_to_string(&path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        Ok(BlockStatistics::parse(&text))
    }

    /// Add the counters of another device.
    pub fn add(&mut self, other: &BlockStatistics) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        for (sum, count) in self.0.iter_mut().zip(&other.0) {
            *sum += count;
        }
    }

    fn parse(text: &str) -> BlockStatistics {
        let words = text.split_whitespace();
        BlockStatistics(words.map_while(|word| word.parse().ok()).collect())
    }

    /// The device's work from these counters to `later`.
    pub fn until(&self, later: &BlockStatistics) -> Value {
        let passed = |field: usize| {
            let at = |counters: &BlockStatistics| counters.0.get(field).copied();
            Some(at(later)?.saturating_sub(at(self)?))
        };
        json!({
            "read_count": passed(READ_COUNT),
            "read_bytes": passed(READ_SECTORS).map(|count| count * SECTOR_BYTES),
            "write_count": passed(WRITE_COUNT),
            "write_merges": passed(WRITE_MERGES),
            "write_bytes": passed(WRITE_SECTORS).map(|count| count * SECTOR_BYTES),
            "flush_count": passed(FLUSH_COUNT),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_between_two_instants_are_counted() {
        let before = BlockStatistics::parse(" 10 0 80 5 100 7 2048 9 0 1 2\n");
        let after = BlockStatistics::parse(" 11 0 88 5 150 9 4096 9 0 1 2\n");
        let passed = before.until(&after);
        assert_eq!(
            (&passed["read_count"], &passed["write_count"]),
            (&json!(1), &json!(50))
        );
        assert_eq!(passed["write_bytes"], json!(1 << 20));
        assert_eq!(passed["flush_count"], Value::Null);
        let mut both = BlockStatistics::default();
        both.add(&before);
        both.add(&after);
        assert_eq!(before.until(&both)["read_count"], json!(11));
    }
}
