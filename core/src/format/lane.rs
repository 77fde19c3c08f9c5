// SPDX-License-Identifier: Apache-2.0
//! The table beside a session's lane: the records of the lane's bytes. The daemon alone maps it;
//! the next daemon reads it.
//!
//! ```text
//! 0       head, one page
//! 4096    done: for each place, the id of the last request of that place that was committed
//! 8192    records of files, 256 bytes each
//! …       records of pieces, 128 bytes each
//! ```
//!
//! A record is words of eight bytes. The first holds its state and a checksum over the others, and
//! is stored last: so a record is whole or not there, and each later change of its state is one
//! store. A wrong checksum in a record that is there by its state is damage, never guessed at.

use crate::units::ByteRange;
use crate::write::{PageRun, RUNS_MAX, Runs};

/// First eight bytes of a table: "RSHLANE1".
pub const MAGIC: u64 = 0x3145_4e41_4c48_5352;
/// Version of everything in this file.
pub const VERSION: u32 = 1;
/// Places for ids of committed requests; more than a session can have outstanding.
pub const DONE_PLACES: usize = 512;
/// Files that the pieces of one lane can belong to: each could be of another.
pub const FILE_COUNT: u32 = PIECE_COUNT;
/// Pieces of one lane. Records take memory only as they are used, the first ones first.
pub const PIECE_COUNT: u32 = 16_384;
/// Longest kernel file handle: MAX_HANDLE_SZ of Linux. Units: bytes.
pub const HANDLE_BYTES_MAX: usize = 128;

/// Words of a record of a piece.
pub const PIECE_WORDS: usize = 16;
/// The word of a piece with the time when it was written.
const CHANGED_WORD: usize = 6 + RUNS_MAX;
/// Words of a record of a file.
pub const FILE_WORDS: usize = 32;
/// Words of the head.
pub const HEAD_WORDS: usize = 8;
/// The word of the head with the epoch.
pub const EPOCH_WORD: usize = 4;

/// Byte offsets in a table.
pub mod place {
    use super::*;
    /// The head.
    pub const HEAD: usize = 0;
    /// Ids of committed requests.
    pub const DONE: usize = 4096;
    /// Records of files.
    pub const FILES: usize = DONE + DONE_PLACES * 8;
    /// Records of pieces.
    pub const PIECES: usize = FILES + FILE_COUNT as usize * FILE_WORDS * 8;
    /// Size of the whole.
    pub const BYTES: usize = PIECES + PIECE_COUNT as usize * PIECE_WORDS * 8;
}

/// Where the record of a piece begins. Units: bytes.
pub fn piece_place(record: u32) -> usize {
    place::PIECES + record as usize * PIECE_WORDS * 8
}

/// Where the record of a file begins. Units: bytes.
pub fn file_place(record: u32) -> usize {
    place::FILES + record as usize * FILE_WORDS * 8
}

/// The state of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Nothing.
    Free = 0,
    /// Its bytes are not written yet.
    Committed = 1,
    /// They were sent to the device by the daemon of this table's epoch.
    Submitted = 2,
    /// They are on the device, or newer ones are, and its pages may be another's; it still hides
    /// older pieces.
    Spent = 3,
}

impl State {
    fn of(value: u32) -> Option<State> {
        Some(match value {
            0 => State::Free,
            1 => State::Committed,
            2 => State::Submitted,
            3 => State::Spent,
            _ => return None,
        })
    }
}

/// Why a record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// There is no such state.
    State(u32),
    /// Its checksum is that of other words.
    Checksum,
    /// Its fields contradict each other or this version's bounds.
    Fields,
}

impl core::fmt::Display for Damage {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Damage::State(state) => write!(f, "its state is {state}, expected 0 to 3"),
            Damage::Checksum => f.write_str("its checksum is that of other words"),
            Damage::Fields => f.write_str("its fields contradict each other or the lane"),
        }
    }
}

/// The head of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Number of the lane.
    pub lane: u32,
    /// Pages that it has.
    pub page_count: u32,
    /// Rises with each daemon, and with each recovery without one.
    pub epoch: u64,
    /// The number that a door must know to take the lane over after its daemon died.
    pub secret: u64,
}

/// A committed write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRecord {
    /// Its place among all commits of all lanes.
    pub order: u64,
    /// The request that was acknowledged with it. 0: none, it is published again.
    pub request: u64,
    /// The bytes of the file.
    pub range: ByteRange,
    /// Record of the file in the same table.
    pub file: u32,
    /// Where its bytes are, or were ([`State::Spent`]).
    pub runs: Runs,
    /// When its client wrote it. Units: ns since 1970.
    pub changed_ns: i64,
}

/// A file that pieces of the lane belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Of the file system it is on.
    pub file_system: [u8; 16],
    /// As `name_to_handle_at` gives it.
    pub handle_kind: i32,
    /// Bytes of the handle.
    pub handle: [u8; HANDLE_BYTES_MAX],
    /// How many of them are used.
    pub handle_bytes: u32,
    /// `st_dev`, as it was.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// The user whose quota and rights count.
    pub uid: u32,
    /// The same.
    pub gid: u32,
}

fn checksum(words: &[u64]) -> u32 {
    let mut sum = 0x9e37_79b9_7f4a_7c15u64;
    for &word in words {
        sum = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        sum ^= sum >> 32;
    }
    (sum >> 16) as u32
}

/// The first word of a record whose other words are these.
pub fn first_word(state: State, rest: &[u64]) -> u64 {
    u64::from(state as u32) | u64::from(checksum(rest)) << 32
}

/// The state of a record, by all its words.
pub fn state_of(words: &[u64]) -> Result<State, Damage> {
    let Some((&first, rest)) = words.split_first() else {
        return Err(Damage::Fields);
    };
    let state = State::of(first as u32).ok_or(Damage::State(first as u32))?;
    if state != State::Free && checksum(rest) != (first >> 32) as u32 {
        return Err(Damage::Checksum);
    }
    Ok(state)
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Words of a head; those that are not set are zero.
pub fn head_words(head: &Head) -> [u64; HEAD_WORDS] {
    let mut words = [0; HEAD_WORDS];
    words[0] = MAGIC;
    words[1] = pair(VERSION, head.lane);
    words[2] = pair(head.page_count, PIECE_COUNT);
    words[3] = pair(FILE_COUNT, DONE_PLACES as u32);
    words[5] = head.secret;
    words[6] = u64::from(checksum(&words[..6]));
    // Not in the checksum: the process that takes a lane over changes it by one store.
    words[EPOCH_WORD] = head.epoch;
    words
}

/// The fault of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadFault {
    /// Not a table of ours.
    Magic(u64),
    /// Of another version.
    Version(u32),
    /// Damaged.
    Damaged,
}

/// A head from its words.
pub fn head_of(words: [u64; HEAD_WORDS]) -> Result<Head, HeadFault> {
    if words[0] != MAGIC {
        return Err(HeadFault::Magic(words[0]));
    }
    if words[1] as u32 != VERSION {
        return Err(HeadFault::Version(words[1] as u32));
    }
    let head = Head {
        lane: (words[1] >> 32) as u32,
        page_count: words[2] as u32,
        epoch: words[EPOCH_WORD],
        secret: words[5],
    };
    if head_words(&head) != words {
        return Err(HeadFault::Damaged);
    }
    Ok(head)
}

/// Words of a piece, in this state.
pub fn piece_words(state: State, piece: &PieceRecord) -> [u64; PIECE_WORDS] {
    let mut words = [0; PIECE_WORDS];
    words[1] = piece.order;
    words[2] = piece.request;
    words[3] = piece.range.start.0;
    words[4] = piece.range.length.0;
    let runs = piece.runs.as_slice();
    words[5] = pair(piece.file, runs.len() as u32);
    for (word, run) in words[6..6 + RUNS_MAX].iter_mut().zip(runs) {
        *word = pair(run.first, run.count);
    }
    words[CHANGED_WORD] = piece.changed_ns as u64;
    words[0] = first_word(state, &words[1..]);
    words
}

/// A piece from its words; None: the record is free.
pub fn piece_of(words: &[u64; PIECE_WORDS]) -> Result<Option<(State, PieceRecord)>, Damage> {
    let state = state_of(words)?;
    if state == State::Free {
        return Ok(None);
    }
    let count = (words[5] >> 32) as usize;
    let mut runs = [PageRun::default(); RUNS_MAX];
    let runs = runs.get_mut(..count).ok_or(Damage::Fields)?;
    for (run, word) in runs.iter_mut().zip(&words[6..]) {
        *run = PageRun {
            first: *word as u32,
            count: (*word >> 32) as u32,
        };
    }
    let piece = PieceRecord {
        order: words[1],
        request: words[2],
        range: ByteRange::new(words[3], words[4]),
        file: words[5] as u32,
        runs: Runs::from_runs(runs).ok_or(Damage::Fields)?,
        changed_ns: words[CHANGED_WORD] as i64,
    };
    if piece.file >= FILE_COUNT || runs.is_empty() || piece.range.length.0 == 0 {
        return Err(Damage::Fields);
    }
    Ok(Some((state, piece)))
}

/// Words of a file.
pub fn file_words(file: &FileRecord) -> [u64; FILE_WORDS] {
    let mut words = [0; FILE_WORDS];
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(bytes) {
            *to = *from;
        }
        u64::from_le_bytes(word)
    };
    words[1] = word(&file.file_system[..8]);
    words[2] = word(&file.file_system[8..]);
    words[3] = pair(file.handle_kind as u32, file.handle_bytes);
    words[4] = file.device;
    words[5] = file.inode;
    words[6] = pair(file.uid, file.gid);
    for (to, from) in words[8..].iter_mut().zip(file.handle.chunks(8)) {
        *to = word(from);
    }
    words[0] = first_word(State::Committed, &words[1..]);
    words
}

/// A file from its words; None: the record is free.
pub fn file_of(words: &[u64; FILE_WORDS]) -> Result<Option<FileRecord>, Damage> {
    match state_of(words)? {
        State::Free => return Ok(None),
        State::Committed => {}
        State::Submitted | State::Spent => return Err(Damage::Fields),
    }
    let mut file_system = [0; 16];
    file_system[..8].copy_from_slice(&words[1].to_le_bytes());
    file_system[8..].copy_from_slice(&words[2].to_le_bytes());
    let mut handle = [0; HANDLE_BYTES_MAX];
    for (to, from) in handle.chunks_mut(8).zip(&words[8..]) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    let handle_bytes = (words[3] >> 32) as u32;
    if handle_bytes as usize > HANDLE_BYTES_MAX {
        return Err(Damage::Fields);
    }
    Ok(Some(FileRecord {
        file_system,
        handle_kind: words[3] as u32 as i32,
        handle,
        handle_bytes,
        device: words[4],
        inode: words[5],
        uid: words[6] as u32,
        gid: (words[6] >> 32) as u32,
    }))
}

const _: () = {
    assert!(8 + HANDLE_BYTES_MAX / 8 <= FILE_WORDS);
    assert!(CHANGED_WORD < PIECE_WORDS);
    assert!(DONE_PLACES >= 2 * super::RING_ENTRIES as usize);
    assert!(place::FILES == 8192 && place::BYTES == 8192 + 16_384 * (256 + 128));
};

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(runs: &[(u32, u32)]) -> PieceRecord {
        let runs: alloc::vec::Vec<PageRun> = runs
            .iter()
            .map(|&(first, count)| PageRun { first, count })
            .collect();
        PieceRecord {
            order: 7,
            request: 1 << 40,
            range: ByteRange::new(4_095, 9_000),
            file: 3,
            runs: Runs::from_runs(&runs).expect("few runs"),
            changed_ns: -77,
        }
    }

    fn file() -> FileRecord {
        FileRecord {
            file_system: core::array::from_fn(|at| at as u8),
            handle_kind: -3,
            handle: core::array::from_fn(|at| at as u8),
            handle_bytes: 20,
            device: 1 << 33,
            inode: 99,
            uid: 1000,
            gid: 1001,
        }
    }

    #[test]
    fn records_read_back_as_they_were_written() {
        for (state, runs) in [
            (State::Committed, [(5, 2), (90, 1)].as_slice()),
            (State::Submitted, [(0, 1); 8].as_slice()),
            (State::Spent, [(9, 1)].as_slice()),
        ] {
            let record = piece(runs);
            let words = piece_words(state, &record);
            assert_eq!(piece_of(&words), Ok(Some((state, record))));
        }
        assert_eq!(file_of(&file_words(&file())), Ok(Some(file())));
        let head = Head {
            lane: 4,
            page_count: 9,
            epoch: 5,
            secret: u64::MAX,
        };
        assert_eq!(head_of(head_words(&head)), Ok(head));
        assert_eq!(piece_of(&[0; PIECE_WORDS]), Ok(None));
        assert_eq!(file_of(&[0; FILE_WORDS]), Ok(None));
    }

    #[test]
    fn no_changed_bit_of_a_record_goes_unseen() {
        let words = piece_words(State::Committed, &piece(&[(5, 3)]));
        for word in 0..PIECE_WORDS {
            for bit in 0..64 {
                let mut changed = words;
                changed[word] ^= 1 << bit;
                let read = piece_of(&changed);
                // A changed state may be another state: then the rest contradicts it, or it is
                // free.
                assert!(
                    read.is_err() || read == Ok(None) || word == 0 && bit < 32,
                    "word {word}, bit {bit}: {read:?}"
                );
            }
        }
    }

    #[test]
    fn heads_of_others_are_refused_with_what_was_read() {
        let head = Head {
            lane: 4,
            page_count: 9,
            epoch: 5,
            secret: 6,
        };
        let words = head_words(&head);
        let with = |at: usize, word: u64| {
            let mut words = words;
            words[at] = word;
            head_of(words)
        };
        assert_eq!(with(0, 1), Err(HeadFault::Magic(1)));
        assert_eq!(with(1, pair(9, 4)), Err(HeadFault::Version(9)));
        assert_eq!(with(2, pair(9, 1)), Err(HeadFault::Damaged));
        assert_eq!(with(5, 7), Err(HeadFault::Damaged));
        assert_eq!(with(EPOCH_WORD, 6), Ok(Head { epoch: 6, ..head }));
    }

    #[test]
    fn records_that_contradict_themselves_are_refused() {
        let mut record = piece(&[(5, 3)]);
        record.runs = Runs::default();
        assert_eq!(
            piece_of(&piece_words(State::Committed, &record)),
            Err(Damage::Fields)
        );
        record = piece(&[(5, 3)]);
        record.file = FILE_COUNT;
        assert_eq!(
            piece_of(&piece_words(State::Committed, &record)),
            Err(Damage::Fields)
        );
        let mut words = piece_words(State::Committed, &piece(&[(5, 3)]));
        words[5] = pair(0, 9);
        words[0] = first_word(State::Committed, &words[1..]);
        assert_eq!(piece_of(&words), Err(Damage::Fields));
        words[0] = 77;
        assert_eq!(piece_of(&words), Err(Damage::State(77)));
    }
}
