// SPDX-License-Identifier: Apache-2.0
//! Seeded chance by splitmix64: our own code, so that a seed means the same for years.

/// A stream of numbers that its seed decides.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// A stream of a seed, by its number.
    pub fn new(seed: u64, stream: u64) -> Chance {
        let mut chance = Chance(seed);
        let mixed = chance.number() ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
        Chance(mixed)
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of `0..end`; 0 when that is empty.
    pub fn below(&mut self, end: u64) -> u64 {
        // The bias of a remainder does not matter at these sizes.
        if end == 0 { 0 } else { self.number() % end }
    }

    /// True so many times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// An index, with a likelihood in proportion to its weight.
    pub fn weighted(&mut self, weights: &[u64]) -> usize {
        let mut left = self.below(weights.iter().sum());
        for (index, &weight) in weights.iter().enumerate() {
            if left < weight {
                return index;
            }
            left -= weight;
        }
        0
    }
}
