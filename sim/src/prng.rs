// SPDX-License-Identifier: Apache-2.0
//! Random numbers from a seed: xoshiro256++ seeded by splitmix64.
//!
//! Own code on purpose: a library may change its algorithm with a version, and then every kept seed
//! would give another run.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Prng {
    state: [u64; 4],
}

/// One step of splitmix64: a bijection that leaves no pattern.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Prng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Prng {
        let mut s = seed;
        Prng {
            state: [
                splitmix(&mut s),
                splitmix(&mut s),
                splitmix(&mut s),
                splitmix(&mut s),
            ],
        }
    }

    /// An independent stream for the part of the world with this `tag`, so that one part's draws
    /// never shift another's.
    pub fn fork(seed: u64, tag: u64) -> Prng {
        let mut s = tag.wrapping_mul(0xD1B5_4A32_D192_ED03);
        Prng::new(seed ^ splitmix(&mut s))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// True so many times in a thousand.
    pub fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// From 0 up to but not including 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From `low` to `high`, every order of magnitude equally likely.
    pub fn log_between(&mut self, low: f64, high: f64) -> f64 {
        // No ln/exp: they may differ in the last bit between machines. Halving is exact.
        let mut scale = low;
        let mut octaves = 0u64;
        while scale * 2.0 <= high {
            scale *= 2.0;
            octaves += 1;
        }
        let mut base = low;
        for _ in 0..self.below(octaves + 1) {
            base *= 2.0;
        }
        (base * (1.0 + self.unit())).min(high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_tells_the_same_story_for_years() {
        // Seed expansion as published with splitmix64 (first value for seed 0).
        let mut s = 0;
        assert_eq!(splitmix(&mut s), 0xE220_A839_7B1D_CDAF);
        let mut one = Prng::new(42);
        let mut two = Prng::new(42);
        let first: Vec<u64> = (0..4).map(|_| one.bits()).collect();
        assert_eq!(first, (0..4).map(|_| two.bits()).collect::<Vec<_>>());
        assert_eq!(first[0], 0xD076_4D4F_4476_689F);
    }

    #[test]
    fn bounds_are_kept() {
        let mut prng = Prng::new(7);
        for _ in 0..10_000 {
            assert!(prng.below(3) < 3);
            assert!((5..=9).contains(&prng.between(5, 9)));
            assert!((5.0..=500.0).contains(&prng.log_between(5.0, 500.0)));
        }
        assert_eq!(prng.below(0), 0);
    }
}
