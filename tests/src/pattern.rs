// SPDX-License-Identifier: Apache-2.0
//! Bytes that tell where they belong: file contents that a test can check at any offset.
//!
//! Each aligned word of eight bytes is a mix of its position and a seed, so that a page of another
//! place, another file or another version never passes for the right one.

/// The bytes `offset .. offset + length` of the file with this seed.
pub fn bytes(seed: u64, offset: u64, length: usize) -> Vec<u8> {
    let first_word = offset / 8;
    let skip = (offset % 8) as usize;
    let words = (skip + length).div_ceil(8) as u64;
    (first_word..first_word + words)
        .flat_map(|word| mix(seed ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes())
        .skip(skip)
        .take(length)
        .collect()
}

/// Says where `found` first differs from what belongs at `offset`.
///
/// Panics   when it differs
pub fn check(seed: u64, offset: u64, found: &[u8], context: &str) {
    let expected = bytes(seed, offset, found.len());
    if let Some(at) = (0..found.len()).find(|&i| found[i] != expected[i]) {
        let wrong = (at..found.len())
            .filter(|&i| found[i] != expected[i])
            .count();
        panic!(
            "{context}: byte {} of the file is {:#04x}, expected {:#04x}; {wrong} bytes of {} are wrong",
            offset + at as u64,
            found[at],
            expected[at],
            found.len()
        );
    }
}

/// SplitMix64's finisher.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_piece_is_the_same_as_that_piece_of_the_whole() {
        let whole = bytes(7, 0, 1000);
        for (offset, length) in [(0, 1000), (1, 10), (8, 8), (13, 100), (999, 1)] {
            assert_eq!(
                bytes(7, offset as u64, length),
                &whole[offset..offset + length]
            );
        }
        assert_ne!(bytes(8, 0, 1000), whole);
    }

    #[test]
    #[should_panic(expected = "byte 4100 of the file")]
    fn a_wrong_byte_is_found() {
        let mut found = bytes(1, 4096, 100);
        found[4] ^= 1;
        check(1, 4096, &found, "test");
    }
}
