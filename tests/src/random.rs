// SPDX-License-Identifier: Apache-2.0
//! Chance that comes again: numbers that follow from a seed.

/// A generator, by its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// One that follows from several numbers, and is unlike that of others.
    pub fn of(numbers: &[u64]) -> Random {
        let mixed = numbers.iter().fold(0_u64, |all, &number| {
            let all = (all ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (all ^ (all >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (all >> 27)
        });
        Random(mixed)
    }

    /// One of these.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// Whether this time, which is once in so many.
    pub fn once_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// A number less than `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}
