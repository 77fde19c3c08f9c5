// SPDX-License-Identifier: Apache-2.0
//! Chance that comes again: numbers that follow from a seed.

/// A generator, by its seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number less than `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}
