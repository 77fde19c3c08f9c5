// SPDX-License-Identifier: Apache-2.0
//! Content that identifies itself: each sector of a file carries the file, its place and its
//! generation.
//!
//! Layout, little-endian, version 1:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 8 | `RUSHSEC` and the version |
//! | 8 | 8 | file |
//! | 16 | 8 | sector of the file, from 0 |
//! | 24 | 8 | generation: the step that wrote it, from 1 |
//! | 32 | 472 | filler that these three decide |
//! | 504 | 8 | xxh3 of all before it |

use xxhash_rust::xxh3::xxh3_64;

use super::chance::Chance;

/// The unit that a disk writes whole or not at all.
pub const SECTOR_BYTES: usize = 512;

/// The owner of the sectors that filled the disk before the file system was made: no file may ever
/// show them.
pub const NOBODY: u64 = u64::MAX;

const MAGIC: [u8; 8] = *b"RUSHSEC\x01";
const FILLER: usize = 32;
const CHECKSUM: usize = SECTOR_BYTES - 8;

/// The stamp of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Number of its file.
    pub file: u64,
    /// Its sector in the file, from 0.
    pub index: u64,
    /// The step that wrote it, from 1.
    pub generation: u64,
}

impl Stamp {
    /// The sector with this stamp.
    pub fn sector(&self) -> [u8; SECTOR_BYTES] {
        let mut sector = [0; SECTOR_BYTES];
        sector[..8].copy_from_slice(&MAGIC);
        for (at, number) in [(8, self.file), (16, self.index), (24, self.generation)] {
            sector[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        let stream = self.index.wrapping_mul(0x1_0000_0001) ^ self.generation;
        let mut chance = Chance::new(self.file, stream);
        for word in sector[FILLER..CHECKSUM].chunks_exact_mut(8) {
            word.copy_from_slice(&chance.number().to_le_bytes());
        }
        let sum = xxh3_64(&sector[..CHECKSUM]);
        sector[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        sector
    }

    /// The stamp of a sector that is whole; `None` for anything else.
    pub fn of(sector: &[u8]) -> Option<Stamp> {
        if sector.len() != SECTOR_BYTES || sector[..8] != MAGIC {
            return None;
        }
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&sector[at..at + 8]);
            u64::from_le_bytes(number)
        };
        (number(CHECKSUM) == xxh3_64(&sector[..CHECKSUM])).then(|| Stamp {
            file: number(8),
            index: number(16),
            generation: number(24),
        })
    }
}

/// The bytes of a file in a range, all of it written by one generation.
pub fn content(file: u64, generation: u64, offset: u64, length: u64) -> Vec<u8> {
    let size = SECTOR_BYTES as u64;
    let (first, end) = (offset / size, (offset + length).div_ceil(size));
    let mut bytes = Vec::with_capacity(((end - first) * size) as usize);
    for index in first..end {
        let stamp = Stamp {
            file,
            index,
            generation,
        };
        bytes.extend_from_slice(&stamp.sector());
    }
    let start = (offset - first * size) as usize;
    bytes.drain(..start);
    bytes.truncate(length as usize);
    bytes
}

/// A sector in words, for the report of a violation.
pub fn describe(sector: &[u8]) -> String {
    match Stamp::of(sector) {
        Some(Stamp { file: NOBODY, .. }) => {
            String::from("what was on the disk before there was a file system")
        }
        Some(stamp) => format!(
            "sector {} of file {:#x}, generation {}",
            stamp.index, stamp.file, stamp.generation
        ),
        None if sector.iter().all(|&byte| byte == 0) => format!("{} zeros", sector.len()),
        None => {
            let first: Vec<String> = sector.iter().take(16).map(|b| format!("{b:02x}")).collect();
            format!("{} other bytes: {} …", sector.len(), first.join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sector_is_known_by_its_stamp_and_a_torn_one_by_nothing() {
        let stamp = Stamp {
            file: 3,
            index: 9,
            generation: 40,
        };
        let mut sector = stamp.sector();
        assert_eq!(Stamp::of(&sector), Some(stamp));
        sector[300] ^= 1;
        assert_eq!(Stamp::of(&sector), None);
    }

    #[test]
    fn content_of_a_range_is_cut_out_of_its_sectors() {
        let whole = content(1, 2, 0, 4096);
        assert_eq!(content(1, 2, 700, 900), whole[700..1600]);
        assert_eq!(content(1, 2, 512, 512), whole[512..1024]);
        assert!(content(1, 2, 512, 0).is_empty());
    }
}
