// SPDX-License-Identifier: Apache-2.0
//! The facts that doors must know of files with bytes that the file system does not have yet: one
//! table, written by the daemon, mapped for reading by every session.
//!
//! ```text
//! bucket = hash(key, device, inode) % BUCKETS
//! each bucket: WAYS entries of 64 bytes
//! 0·8 sequence, 8·8 device, 16·8 inode (0: nothing here), 24·8 size, 32·8 time of change in ns since 1970, 40·8 generation, 48·16 zero
//! in the very first entry, beside its own words: 48·16 the key; zero: hash as version 1 had it
//! in the second entry, beside its own words: 48·8 LEFT_AT
//! ```
//!
//! The key is random and the table's for good: a client that does not know it cannot choose files
//! that meet in one bucket. A bucket can be full all the same, as the table can: clients write a
//! file without an entry on their own descriptors, so the daemon keeps an entry for a file before
//! it lets any client write to it.
//!
//! History: 1 without a key; 2 with one, since session version 6. A table of version 1 is one whose
//! key is zero. It is good as it is, and gets a key from the first daemon that finds nothing in it.
//!
//! An entry is a seqlock: its sequence is odd while it is being changed. A file keeps its entry
//! from its first dirty byte to its last, so a door that finds none looks at the file system. The
//! generation tells it from another that gets the inode number when this one has lost its last name
//! and no daemon holds it open. Entries under [`reserved_mark`] and [`loose_mark`] are of another
//! kind.

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

/// Byte offset of a word of the table's own, in the second entry, where entries have nothing: 1
/// when the process that set these facts has ended and could not write all of their bytes, so that
/// no process works on them any more. A process that waits for the others' files need not wait; a
/// file with a fact lacks bytes as before.
pub const LEFT_AT: usize = (ENTRY_WORDS + 6) * 8;

/// In the place of a file's device: says nothing of its bytes, but that blocks of it lie behind its
/// end because we put them there. Its size is the space that the file took on its disk before that,
/// in bytes; 0: not known yet. No `st_dev` of Linux has this bit. Such an entry has a life of its
/// own.
pub fn reserved_mark(device: u64) -> u64 {
    device | 1 << 63
}

/// In the place of a file's device: the kernel has all of the file's bytes, but may have been
/// unable to write some that only the daemon has besides, and let them go. A door that reads the
/// file on its own descriptor asks the daemon to hold it first. Good as long as the daemon that set
/// it lives. To a door that does not know this mark it is one of reserved blocks, of no file.
pub fn loose_mark(device: u64) -> u64 {
    device | 3 << 62
}

/// A generation as it stands in an entry: never 0.
pub fn known_generation(generation: u32) -> u64 {
    u64::from(generation) | 1 << 32
}

/// Where the key stands. Units: bytes from the start of the table.
pub const KEY: [usize; 2] = [48, 56];

/// The numbers that the places of files in one table depend on besides the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key(pub [u64; 2]);

impl Key {
    /// Byte offset of the first entry of a file's bucket.
    pub fn bucket_of(self, device: u64, inode: u64) -> usize {
        let hash = if self == Key::default() {
            unkeyed(device, inode)
        } else {
            siphash(self.0, [device, inode])
        };
        let bucket = (hash >> 40) as usize % BUCKETS;
        bucket * WAYS * ENTRY_WORDS * 8
    }
}

/// As version 1 had it: any client can choose files that meet.
fn unkeyed(device: u64, inode: u64) -> u64 {
    let mut hash = inode ^ device.rotate_left(32);
    hash ^= hash >> 31;
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// SipHash-2-4 of sixteen bytes (Aumasson and Bernstein 2012).
fn siphash(key: [u64; 2], words: [u64; 2]) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    let length = (words.len() as u64 * 8) << 56;
    for word in words.into_iter().chain([length]) {
        v[3] ^= word;
        (0..2).for_each(|_| sip_round(&mut v));
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| sip_round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn sip_round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most_in_a_bucket(key: Key, inodes: impl Iterator<Item = u64>) -> u32 {
        let mut counts = alloc::vec![0u32; BUCKETS];
        for inode in inodes {
            counts[key.bucket_of(0x801, inode) / (WAYS * ENTRY_WORDS * 8)] += 1;
        }
        counts.iter().max().copied().unwrap()
    }

    #[test]
    fn files_of_one_file_system_spread_over_the_buckets() {
        for key in [Key::default(), Key([1, 2]), Key([u64::MAX, 0])] {
            let most = most_in_a_bucket(key, 1..=20_000);
            assert!(most < WAYS as u32, "{key:?}: {most}");
        }
    }

    #[test]
    fn files_that_meet_under_one_key_part_under_another() {
        let met = |key: Key| {
            let bucket = key.bucket_of(0x801, 1);
            (1..).filter(move |&inode| key.bucket_of(0x801, inode) == bucket)
        };
        for key in [Key::default(), Key([3, 4])] {
            let chosen = || met(key).take(2 * WAYS);
            assert_eq!(most_in_a_bucket(key, chosen()), 2 * WAYS as u32);
            let most = most_in_a_bucket(Key([5, 6]), chosen());
            assert!(most <= 4, "{key:?}: {most}");
        }
    }

    #[test]
    fn the_hash_is_siphash() {
        // The vectors of its authors: the key is 00 01 … 0f; the message 00 01 … 0f.
        let words = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(words, words), 0x3f2a_cc7f_57c2_9bdb);
    }
}
