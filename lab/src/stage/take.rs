// SPDX-License-Identifier: Apache-2.0
//! Footage of recordings: every page of it names its file and its place, so that a disk that sees
//! only blocks can identify it.
//!
//! A page is a [`Clip`]'s page with a stamp over its first 32 and its last 8 bytes. Two places,
//! because frames do not end on pages: a page that two frames share goes to the disk once with the
//! first frame's part, and again when the second has come. Its head alone proves the first, head
//! and tail together prove both.
//!
//! | offset | size | meaning, little-endian |
//! |---|---|---|
//! | 0 | 8 | the run's key, mixed |
//! | 8 | 8 | number of the file |
//! | 16 | 8 | page of the file |
//! | 24 | 8 | check over these three |
//! | 4088 | 8 | the check, mixed again |

use crate::stage::footage::{Clip, PAGE_BYTES, mix};

/// Units: bytes.
pub const HEAD_BYTES: usize = 32;
const TAIL_BYTES: usize = 8;
const TAIL_AT: usize = PAGE_BYTES - TAIL_BYTES;
const PAGE: u64 = PAGE_BYTES as u64;
/// Makes other words than any other use of a seed.
const KEY_SALT: u64 = 0x7374_616d_7065_6421;

/// A recorded file of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// The key of the run, which no other run has.
    pub key: u64,
    /// Different for each file.
    pub number: u64,
}

/// The stamp that a page carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Number of the take.
    pub number: u64,
    /// Page of its file.
    pub page: u64,
    /// The page is there up to its end.
    pub whole: bool,
}

impl Take {
    /// Write its content from `offset` on into `buffer`.
    pub fn fill(self, offset: u64, buffer: &mut [u8]) {
        let clip = Clip {
            seed: self.key,
            number: self.number,
        };
        clip.fill(offset, buffer);
        let end = offset + buffer.len() as u64;
        for page in offset / PAGE..end.div_ceil(PAGE) {
            let words = words(self.key, self.number, page);
            for (index, word) in words.iter().enumerate() {
                lay_over(buffer, offset, page * PAGE + index as u64 * 8, *word);
            }
            lay_over(buffer, offset, page * PAGE + TAIL_AT as u64, tail(words));
        }
    }

    /// Number of bytes of `buffer` that differ from its content from `offset` on.
    pub fn wrong_bytes(self, offset: u64, buffer: &[u8]) -> u64 {
        let mut wanted = vec![0; buffer.len()];
        self.fill(offset, &mut wanted);
        if wanted == buffer {
            return 0;
        }
        wanted.iter().zip(buffer).filter(|(a, b)| a != b).count() as u64
    }
}

/// The stamp of this page of a disk; `None`: no recording with this key wrote it.
pub fn read_stamp(key: u64, page: &[u8]) -> Option<Stamp> {
    let word = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
    // Nearly all pages return here.
    if word(0)? != mix(key ^ KEY_SALT) {
        return None;
    }
    let (number, index) = (word(8)?, word(16)?);
    let words = words(key, number, index);
    (word(24)? == words[3]).then(|| Stamp {
        number,
        page: index,
        whole: word(TAIL_AT) == Some(tail(words)),
    })
}

fn words(key: u64, number: u64, page: u64) -> [u64; 4] {
    let first = mix(key ^ KEY_SALT);
    [first, number, page, mix(first ^ mix(number ^ mix(page)))]
}

fn tail(words: [u64; 4]) -> u64 {
    mix(words[3] ^ KEY_SALT)
}

/// Write a word that belongs at `at` of the file into `buffer`, which is the file from `offset` on.
fn lay_over(buffer: &mut [u8], offset: u64, at: u64, word: u64) {
    for (index, byte) in word.to_le_bytes().into_iter().enumerate() {
        let place = (at + index as u64).checked_sub(offset);
        if let Some(slot) = place.and_then(|place| buffer.get_mut(place as usize)) {
            *slot = byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAKE: Take = Take { key: 9, number: 4 };

    #[test]
    fn frames_put_together_are_the_whole() {
        let mut whole = vec![0; 5 * PAGE_BYTES];
        TAKE.fill(0, &mut whole);
        let mut pieced = vec![0; whole.len()];
        for (index, frame) in pieced.chunks_mut(1237).enumerate() {
            TAKE.fill(index as u64 * 1237, frame);
        }
        assert!(pieced == whole);
        assert_eq!(TAKE.wrong_bytes(700, &whole[700..9000]), 0);
        whole[4097] ^= 1;
        assert_eq!(TAKE.wrong_bytes(700, &whole[700..9000]), 1);
    }

    #[test]
    fn a_page_says_whose_it_is_and_whether_it_is_all_there() {
        let mut pages = vec![0; 2 * PAGE_BYTES];
        TAKE.fill(7 * PAGE, &mut pages);
        let second = &mut pages[PAGE_BYTES..];
        let stamp = |whole| Stamp {
            number: 4,
            page: 8,
            whole,
        };
        assert_eq!(read_stamp(9, second), Some(stamp(true)));
        second[TAIL_AT..].fill(0);
        assert_eq!(read_stamp(9, second), Some(stamp(false)));
        second[HEAD_BYTES - 1] ^= 1;
        assert_eq!(read_stamp(9, second), None);
    }

    #[test]
    fn pages_of_other_runs_and_of_nobody_are_passed_over() {
        let mut page = vec![0; PAGE_BYTES];
        assert_eq!(read_stamp(9, &page), None);
        TAKE.fill(0, &mut page);
        assert_eq!(read_stamp(8, &page), None);
        assert_eq!(read_stamp(9, &page[..16]), None);
    }
}
