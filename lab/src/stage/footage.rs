// SPDX-License-Identifier: Apache-2.0
//! Footage that need not be stored: every byte follows from seed, clip and offset.
//!
//! It does not compress, no two clips share a page, and a reader can check at any offset whether it
//! got the written bytes. The trick: a page is a counter run through splitmix64's finaliser with a
//! key mixed from seed, clip and page number; that makes several gigabytes a second on one core, so
//! a check of every byte of a dozen streams takes a few percent of one.

/// The unit of content. Units: bytes.
pub const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A clip of made-up footage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clip {
    /// The same for a whole stage.
    pub seed: u64,
    /// Different for each file.
    pub number: u64,
}

impl Clip {
    /// Write the clip's content from `offset` on into `buffer`.
    pub fn fill(self, offset: u64, buffer: &mut [u8]) {
        let mut words = [0u64; PAGE_WORDS];
        self.pages(offset, buffer.len(), &mut words, |at, bytes| {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Number of bytes of `buffer` that differ from the clip's content from `offset` on.
    pub fn wrong_bytes(self, offset: u64, buffer: &[u8]) -> u64 {
        let mut words = [0u64; PAGE_WORDS];
        let mut wrong_count = 0;
        self.pages(offset, buffer.len(), &mut words, |at, bytes| {
            let read = &buffer[at..at + bytes.len()];
            if read != bytes {
                wrong_count += read.iter().zip(bytes).filter(|(a, b)| a != b).count() as u64;
            }
        });
        wrong_count
    }

    /// Calls `visit(position, content)` for each piece of `length` bytes from `offset` on that lies
    /// in one page.
    fn pages(
        self,
        offset: u64,
        length: usize,
        words: &mut [u64; PAGE_WORDS],
        mut visit: impl FnMut(usize, &[u8]),
    ) {
        let mut bytes = [0u8; PAGE_BYTES];
        let mut done = 0;
        while done < length {
            let position = offset + done as u64;
            let inside = (position % PAGE_BYTES as u64) as usize;
            let piece = (PAGE_BYTES - inside).min(length - done);
            self.page(position / PAGE_BYTES as u64, words);
            for (eight, word) in bytes.chunks_exact_mut(8).zip(words.iter()) {
                eight.copy_from_slice(&word.to_le_bytes());
            }
            visit(done, &bytes[inside..inside + piece]);
            done += piece;
        }
    }

    fn page(self, page: u64, words: &mut [u64; PAGE_WORDS]) {
        let key = mix(self.seed ^ mix(self.number.wrapping_mul(GAMMA) ^ mix(page)));
        let mut counter = key;
        for word in words {
            counter = counter.wrapping_add(GAMMA);
            *word = mix(counter);
        }
    }
}

/// The finaliser of splitmix64.
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A small repeatable random generator: splitmix64.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A generator that throws the same numbers for the same seed.
    pub fn new(seed: u64) -> Dice {
        Dice(mix(seed ^ GAMMA))
    }

    /// The next number.
    pub fn throw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// A number below `bound`; 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.throw()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIP: Clip = Clip { seed: 7, number: 3 };

    #[test]
    fn any_piece_is_the_same_as_in_the_whole() {
        let mut whole = vec![0; 3 * PAGE_BYTES + 100];
        CLIP.fill(0, &mut whole);
        let mut piece = vec![0; 5000];
        CLIP.fill(1234, &mut piece);
        assert_eq!(piece, whole[1234..6234]);
        assert_eq!(CLIP.wrong_bytes(1234, &piece), 0);
    }

    #[test]
    fn one_changed_byte_is_found() {
        let mut piece = vec![0; 500_000];
        CLIP.fill(500_000, &mut piece);
        piece[77_777] ^= 1;
        assert_eq!(CLIP.wrong_bytes(500_000, &piece), 1);
    }

    #[test]
    fn other_clips_pages_and_seeds_share_no_page() {
        let page = |clip: Clip, offset| {
            let mut bytes = vec![0; PAGE_BYTES];
            clip.fill(offset, &mut bytes);
            bytes
        };
        let first = page(CLIP, 0);
        assert_ne!(first, page(CLIP, PAGE_BYTES as u64));
        assert_ne!(first, page(Clip { number: 4, ..CLIP }, 0));
        assert_ne!(first, page(Clip { seed: 8, ..CLIP }, 0));
    }

    #[test]
    fn bytes_are_spread_evenly() {
        let mut bytes = vec![0; 1 << 20];
        CLIP.fill(0, &mut bytes);
        let mut counts = [0u32; 256];
        bytes.iter().for_each(|byte| counts[*byte as usize] += 1);
        // 4096 of each are expected; five standard deviations are 320.
        assert!(counts.iter().all(|count| (3776..4416).contains(count)));
    }
}
