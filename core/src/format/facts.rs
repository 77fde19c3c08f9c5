// SPDX-License-Identifier: Apache-2.0
//! What doors must know of files whose bytes the file system does not have yet: one table, written by the daemon,
//! mapped for reading by every session.
//!
//! ```text
//! bucket = hash(device, inode) % BUCKETS
//! each bucket: WAYS entries of 64 bytes
//! 0·8 sequence, 8·8 device, 16·8 inode (0: nothing here), 24·8 size, 32·8 time of change in ns since 1970, 40·8 generation, 48·16 zero
//! ```
//!
//! An entry is a seqlock: its sequence is odd while it is being changed. A file keeps its entry from its first dirty byte to its last,
//! so a door that finds none looks at the file system. The generation tells it from another that gets the inode number when this one
//! has lost its last name and no daemon holds it open. Entries under [`reserved_mark`] are of another kind.

/// Buckets. A power of two.
pub const BUCKETS: usize = 2048;
/// Entries of a bucket.
pub const WAYS: usize = 32;
/// Words of eight bytes of an entry.
pub const ENTRY_WORDS: usize = 8;
/// Size of the table.
pub const BYTES: usize = BUCKETS * WAYS * ENTRY_WORDS * 8;

/// Words of an entry.
pub mod word {
    /// Odd while the others change.
    pub const SEQUENCE: usize = 0;
    /// `st_dev`.
    pub const DEVICE: usize = 1;
    /// `st_ino`; 0: the entry is free.
    pub const INODE: usize = 2;
    /// Units: bytes.
    pub const SIZE: usize = 3;
    /// Units: ns since 1970, signed.
    pub const CHANGED: usize = 4;
    /// As [`super::known_generation`] gives it; 0: not known.
    pub const GENERATION: usize = 5;
}

/// Byte offset of the table's own word, where entries have nothing: 1 when whoever set these facts has ended and could not write all of it, so
/// that nobody is at it any more. Who waits for the others' files need not wait; a file with a fact lacks bytes as before.
pub const LEFT_AT: usize = 6 * 8;

/// In the place of a file's device: says nothing of its bytes, but that blocks of it lie behind its end because we put
/// them there. Its size is what the file took on its disk before that, in bytes; 0: not known yet. (No `st_dev` of Linux has this bit.) Such an entry has a life of its own.
pub fn reserved_mark(device: u64) -> u64 {
    device | 1 << 63
}

/// A generation as it stands in an entry: never 0.
pub fn known_generation(generation: u32) -> u64 {
    u64::from(generation) | 1 << 32
}

/// Byte offset of the first entry of a file's bucket.
pub fn bucket_of(device: u64, inode: u64) -> usize {
    let mut hash = inode ^ device.rotate_left(32);
    hash ^= hash >> 31;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bucket = (hash >> 40) as usize % BUCKETS;
    bucket * WAYS * ENTRY_WORDS * 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_file_system_spread_over_the_buckets() {
        let mut counts = alloc::vec![0u32; BUCKETS];
        for inode in 1..=20_000u64 {
            counts[bucket_of(0x801, inode) / (WAYS * ENTRY_WORDS * 8)] += 1;
        }
        let most = counts.iter().max().copied();
        assert!(most.is_some_and(|most| most < WAYS as u32), "{most:?}");
    }
}
