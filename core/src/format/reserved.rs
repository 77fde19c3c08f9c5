// SPDX-License-Identifier: Apache-2.0
//! The table beside the lanes: the files for which blocks were reserved, until these are given
//! back. The next daemon reads it.
//!
//! ```text
//! 0       head: magic, version
//! 4096    records, 256 bytes each: the records of files of [`super::lane`], little-endian; one that begins with eight zeros is free
//! ```
//!
//! A record is written by one call, before the first reservation of its file. A damaged one costs
//! the blocks of one file and no bytes, so unlike a damaged lane it keeps no daemon from starting.

use super::lane::{Damage, FILE_WORDS, FileRecord, HeadFault, file_of, file_words};

/// First eight bytes: "RSHRSRV1".
pub const MAGIC: u64 = 0x3156_5253_5248_5352;
/// Version of everything in this file.
pub const VERSION: u32 = 1;
/// Files that can be in it. Of more than so many at once a crash leaves some with their blocks.
pub const RECORD_COUNT_MAX: u32 = 16_384;
/// Bytes of a record.
pub const RECORD_BYTES: usize = FILE_WORDS * 8;
/// Bytes of the head that are used.
pub const HEAD_BYTES: usize = 16;
/// Where the first record is.
const RECORDS_AT: u64 = 4096;

/// Byte offset of a record.
pub fn place_of(record: u32) -> u64 {
    RECORDS_AT + u64::from(record) * RECORD_BYTES as u64
}

/// The head.
pub fn head() -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Whether records of ours follow this head.
pub fn check_head(bytes: &[u8; HEAD_BYTES]) -> Result<(), HeadFault> {
    let (magic, rest) = bytes.split_at(8);
    let magic = magic.try_into().map_or(0, u64::from_le_bytes);
    let version = rest[..4].try_into().map_or(0, u32::from_le_bytes);
    match (magic, version) {
        (MAGIC, VERSION) if *bytes == head() => Ok(()),
        (MAGIC, VERSION) => Err(HeadFault::Damaged),
        (MAGIC, _) => Err(HeadFault::Version(version)),
        _ => Err(HeadFault::Magic(magic)),
    }
}

/// A record of this file.
pub fn record_of(file: &FileRecord) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(file_words(file)) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The file of a record; None: it is free.
pub fn file_in(bytes: &[u8; RECORD_BYTES]) -> Result<Option<FileRecord>, Damage> {
    let mut words = [0; FILE_WORDS];
    for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = from.try_into().map_or(0, u64::from_le_bytes);
    }
    file_of(&words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileRecord {
        FileRecord {
            file_system: [9; 16],
            handle_kind: 129,
            handle: core::array::from_fn(|at| at as u8),
            handle_bytes: 12,
            device: 0x801,
            inode: 77,
            uid: 1,
            gid: 2,
        }
    }

    #[test]
    fn records_read_back_as_they_were_written_and_zeros_are_none() {
        assert_eq!(file_in(&record_of(&file())), Ok(Some(file())));
        assert_eq!(file_in(&[0; RECORD_BYTES]), Ok(None));
        // Cleared by its first eight bytes alone.
        let mut cleared = record_of(&file());
        cleared[..8].fill(0);
        assert_eq!(file_in(&cleared), Ok(None));
        assert_eq!(place_of(2) - place_of(1), RECORD_BYTES as u64);
        assert!(place_of(0) >= HEAD_BYTES as u64);
    }

    #[test]
    fn no_changed_bit_of_a_record_goes_unseen() {
        let whole = record_of(&file());
        for at in 0..RECORD_BYTES * 8 {
            let mut changed = whole;
            changed[at / 8] ^= 1 << (at % 8);
            let read = file_in(&changed);
            assert!(read.is_err() || read == Ok(None), "bit {at}: {read:?}");
        }
    }

    #[test]
    fn heads_of_others_are_refused_with_what_was_read() {
        assert_eq!(check_head(&head()), Ok(()));
        let with = |at: usize, byte: u8| {
            let mut bytes = head();
            bytes[at] = byte;
            check_head(&bytes)
        };
        assert_eq!(with(8, 2), Err(HeadFault::Version(2)));
        assert_eq!(with(15, 1), Err(HeadFault::Damaged));
        assert_eq!(check_head(&[0; HEAD_BYTES]), Err(HeadFault::Magic(0)));
    }
}
