// SPDX-License-Identifier: Apache-2.0
//! A lane as it lies in its folder: the bytes that a session writes, and the daemon's table of
//! them.
//!
//! ```text
//! FOLDER/00000017.bytes   mapped for writing by its session
//! FOLDER/00000017.table   the daemon's alone: `rushes_core::format::lane`
//! ```
//!
//! Both are files on tmpfs in a folder that only root can enter: they outlive daemon and session,
//! and nothing else does. The daemon never touches the bytes through its mapping, as a session that
//! truncated its file would kill it by SIGBUS: the kernel reads them for the device, and copies go
//! through `pread`. So do reads of parts of the table that may be holes: an access through a
//! mapping takes memory, and raises SIGBUS where there is none.

use rushes_core::format::lane::*;
use rushes_core::units::LaneId;
use rushes_sys::{Access, Mapping, SysError};
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, ftruncate, open, unlink};
use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

/// Records that get their memory in one step.
const READY_STEP: u32 = 256;
/// Page of a lane. Units: bytes.
const PAGE_BYTES: u64 = 4096;

/// A lane and its table.
#[derive(Debug)]
pub struct LaneFile {
    head: Head,
    folder: PathBuf,
    bytes: OwnedFd,
    /// For the kernel to read from; see above.
    mapping: Arc<Mapping>,
    table: Mapping,
    table_fd: OwnedFd,
    /// Records of pieces, and of files, that have their memory.
    ready_count: Cell<u32>,
}

/// The fault of a lane that cannot be used.
#[derive(Debug)]
pub enum LaneFault {
    /// A call failed.
    Sys(SysError),
    /// The table is not one that we can read.
    Head(HeadFault),
    /// A record is damaged.
    Record {
        /// "piece" or "file".
        what: &'static str,
        /// Which.
        record: u32,
        /// How.
        damage: Damage,
    },
}

impl From<SysError> for LaneFault {
    fn from(error: SysError) -> LaneFault {
        LaneFault::Sys(error)
    }
}

pub(crate) fn bytes_path(folder: &Path, lane: LaneId) -> PathBuf {
    folder.join(format!("{:08}.bytes", lane.0))
}

/// Where a lane's table is.
pub fn table_path(folder: &Path, lane: LaneId) -> PathBuf {
    folder.join(format!("{:08}.table", lane.0))
}

/// Lanes that lie in a folder, in order; also those that were never finished.
pub fn lanes_in(folder: &Path) -> io::Result<Vec<LaneId>> {
    let mut lanes = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.split_once('.'))
            .filter(|(_, kind)| matches!(*kind, "bytes" | "table"))
            .and_then(|(number, _)| number.parse().ok());
        lanes.extend(number.map(LaneId));
    }
    lanes.sort_unstable();
    lanes.dedup();
    Ok(lanes)
}

impl LaneFile {
    /// Make a lane. Its pages take memory as they are written.
    ///
    /// Errors   EEXIST when there is one of that number; ENOSPC and the like.
    pub fn create(folder: &Path, head: Head) -> Result<LaneFile, SysError> {
        let lane = LaneId(head.lane);
        let about = || table_path(folder, lane).display().to_string();
        let made = |error: io::Error| SysError::new("make a lane", about(), error);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let table = open(table_path(folder, lane), flags, mode).map_err(|e| made(e.into()))?;
        let size = u64::from(head.page_count) * PAGE_BYTES;
        let filled = || {
            let bytes = open(bytes_path(folder, lane), flags, mode)?;
            ftruncate(&table, place::BYTES as u64)?;
            ftruncate(&bytes, size)?;
            fallocate(&table, FallocateFlags::empty(), 0, place::FILES as u64)?;
            Ok(bytes)
        };
        let bytes = filled().map_err(|error: rustix::io::Errno| {
            // It is no lane yet, and no session has it.
            remove(folder, lane);
            made(error.into())
        })?;
        let lane = LaneFile::map(folder, head, bytes, table)?;
        // Last: without a head it is no lane.
        lane.store_all(place::HEAD, &head_words(&head));
        Ok(lane)
    }

    /// Open a lane that another daemon left. None: it never was a lane; its files are deleted.
    ///
    /// Errors   also that one of its files is there and does not open: too few descriptors are no
    /// reason to lose it.
    pub fn open(folder: &Path, lane: LaneId) -> Result<Option<LaneFile>, LaneFault> {
        let about = || table_path(folder, lane).display().to_string();
        let failed = |error: io::Error| SysError::new("open a lane", about(), error);
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open_at = |path: PathBuf| open(path, flags, Mode::empty());
        let found = (
            open_at(table_path(folder, lane)),
            open_at(bytes_path(folder, lane)),
        );
        let (table, bytes) = match found {
            (Ok(table), Ok(bytes)) => (table, bytes),
            (Err(rustix::io::Errno::NOENT), _) | (_, Err(rustix::io::Errno::NOENT)) => {
                remove(folder, lane);
                return Ok(None);
            }
            (Err(error), _) | (_, Err(error)) => return Err(failed(error.into()).into()),
        };
        let length = rustix::fs::fstat(&table)
            .map_err(|e| failed(e.into()))?
            .st_size as u64;
        if length < place::BYTES as u64 {
            if length == 0 {
                remove(folder, lane);
                return Ok(None);
            }
            return Err(LaneFault::Head(HeadFault::Damaged));
        }
        let unread = Head {
            lane: lane.0,
            page_count: 1,
            epoch: 0,
            secret: 0,
        };
        let mut file = LaneFile::map(folder, unread, bytes, table)?;
        let words: [u64; HEAD_WORDS] = file.read(place::HEAD).map_err(failed)?;
        if words == [0; HEAD_WORDS] {
            remove(folder, lane);
            return Ok(None);
        }
        let head = head_of(words).map_err(LaneFault::Head)?;
        if head.lane != lane.0 || head.page_count == 0 {
            return Err(LaneFault::Head(HeadFault::Damaged));
        }
        let size = u64::from(head.page_count) * PAGE_BYTES;
        let mapping = Mapping::shared(&file.bytes, size as usize, Access::Read).map_err(failed)?;
        file.mapping = Arc::new(mapping);
        file.head = head;
        Ok(Some(file))
    }

    fn map(
        folder: &Path,
        head: Head,
        bytes: OwnedFd,
        table_fd: OwnedFd,
    ) -> Result<LaneFile, SysError> {
        let about = || folder.display().to_string();
        let size = u64::from(head.page_count) * PAGE_BYTES;
        let mapped = |error| SysError::new("map a lane", about(), error);
        let mapping = Mapping::shared(&bytes, size as usize, Access::Read).map_err(mapped)?;
        let table = Mapping::shared(&table_fd, place::BYTES, Access::ReadWrite).map_err(mapped)?;
        Ok(LaneFile {
            head,
            folder: folder.to_owned(),
            bytes,
            mapping: Arc::new(mapping),
            table,
            table_fd,
            ready_count: Cell::new(0),
        })
    }

    /// The contents of its head.
    pub fn head(&self) -> Head {
        self.head
    }

    /// Its bytes, for the session to map for writing.
    pub fn bytes_fd(&self) -> &OwnedFd {
        &self.bytes
    }

    /// Its bytes' mapping here, for the kernel to read from. The daemon itself never reads it.
    pub fn bytes(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Copy bytes out, for the cache or for a page combined of several sources. Returns how many
    /// there were.
    pub fn copy_out(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        rushes_sys::file::read_full(&self.bytes, to, offset)
    }

    /// Free the memory of unused pages.
    pub fn give_memory_back(&self, first_page: u32, page_count: u32) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let start = u64::from(first_page) * PAGE_BYTES;
        Ok(fallocate(
            &self.bytes,
            flags,
            start,
            u64::from(page_count) * PAGE_BYTES,
        )?)
    }

    /// Take the memory of the first `count` records of pieces and files, so that no store to them
    /// can fail: on a full tmpfs it would raise SIGBUS.
    pub fn make_ready(&self, count: u32) -> io::Result<()> {
        if count <= self.ready_count.get() {
            return Ok(());
        }
        let count = count.next_multiple_of(READY_STEP).min(PIECE_COUNT);
        for (start, words) in [(place::FILES, FILE_WORDS), (place::PIECES, PIECE_WORDS)] {
            let bytes = count as u64 * words as u64 * 8;
            fallocate(&self.table_fd, FallocateFlags::empty(), start as u64, bytes)?;
        }
        self.ready_count.set(count);
        Ok(())
    }

    /// Take it over, for a new daemon or a recovery.
    pub fn take_over(&mut self, epoch: u64) {
        self.head.epoch = epoch;
        self.table
            .word64(place::HEAD + EPOCH_WORD * 8)
            .store(epoch, Release);
    }

    /// The epoch as it is in the table: another's, when the lane was taken over.
    pub fn epoch(&self) -> u64 {
        self.table
            .word64(place::HEAD + EPOCH_WORD * 8)
            .load(Acquire)
    }

    /// Make a piece's bytes acknowledged: from here on they will be written, whichever process
    /// dies.
    pub fn publish(&self, record: u32, piece: &PieceRecord) {
        let words = piece_words(State::Committed, piece);
        self.store_last_first(piece_place(record), &words);
        if piece.request != 0 {
            let done = place::DONE + (piece.request as usize % DONE_PLACES) * 8;
            self.table.word64(done).store(piece.request, Release);
        }
    }

    /// Set a piece's state, in one store.
    pub fn set_state(&self, record: u32, state: State) {
        let words: [u64; PIECE_WORDS] = self.load(piece_place(record));
        let first = match state {
            State::Free => 0,
            _ => first_word(state, &words[1..]),
        };
        self.table.word64(piece_place(record)).store(first, Release);
    }

    /// True when this request was committed.
    pub fn is_done(&self, request: u64) -> bool {
        let done = place::DONE + (request as usize % DONE_PLACES) * 8;
        request != 0 && self.table.word64(done).load(Acquire) == request
    }

    /// Ids of the last committed requests.
    pub fn done(&self) -> Vec<u64> {
        (0..DONE_PLACES)
            .map(|place| self.table.word64(place::DONE + place * 8).load(Acquire))
            .filter(|&request| request != 0)
            .collect()
    }

    /// Enter the file to which pieces with this number belong; before the first of them.
    pub fn name_file(&self, record: u32, file: &FileRecord) {
        self.store_last_first(file_place(record), &file_words(file));
    }

    /// No piece has this number any more.
    pub fn forget_file(&self, record: u32) {
        self.table.word64(file_place(record)).store(0, Release);
    }

    /// The file of that record.
    pub fn file(&self, record: u32) -> Result<Option<FileRecord>, LaneFault> {
        if record >= FILE_COUNT {
            return Ok(None);
        }
        let words = self.read(file_place(record));
        let failed = |error| SysError::new("read", self.folder.display().to_string(), error);
        file_of(&words.map_err(failed)?).map_err(|damage| LaneFault::Record {
            what: "file",
            record,
            damage,
        })
    }

    /// Its pieces, in order of commit.
    pub fn pieces(&self) -> Result<Vec<(u32, State, PieceRecord)>, LaneFault> {
        let mut pieces = Vec::new();
        let mut table = vec![0; PIECE_COUNT as usize * PIECE_WORDS * 8];
        let failed = |error| SysError::new("read", self.folder.display().to_string(), error);
        self.read_exact(place::PIECES, &mut table).map_err(failed)?;
        for (record, words) in (0..).zip(table.as_chunks::<{ PIECE_WORDS * 8 }>().0) {
            let words: [u64; PIECE_WORDS] = words_of(words);
            match piece_of(&words) {
                Ok(None) => {}
                Ok(Some((state, piece))) => pieces.push((record, state, piece)),
                Err(damage) => {
                    return Err(LaneFault::Record {
                        what: "piece",
                        record,
                        damage,
                    });
                }
            }
        }
        pieces.sort_unstable_by_key(|(_, _, piece)| piece.order);
        Ok(pieces)
    }

    /// Delete the files of a lane that is empty and that no session writes to.
    pub fn remove(self) {
        remove(&self.folder, LaneId(self.head.lane));
    }

    /// Words of the table, which may lie in a hole, at a time when nothing else changes them.
    fn read<const N: usize>(&self, start: usize) -> io::Result<[u64; N]> {
        let mut bytes = vec![0; N * 8];
        self.read_exact(start, &mut bytes)?;
        Ok(words_of(&bytes))
    }

    fn read_exact(&self, start: usize, to: &mut [u8]) -> io::Result<()> {
        match rushes_sys::file::read_full(&self.table_fd, to, start as u64)? {
            count if count < to.len() => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    fn load<const N: usize>(&self, start: usize) -> [u64; N] {
        let first = self.table.word64(start).load(Acquire);
        std::array::from_fn(|n| match n {
            0 => first,
            _ => self.table.word64(start + n * 8).load(Relaxed),
        })
    }

    /// Fill a free record.
    fn store_last_first(&self, start: usize, words: &[u64]) {
        // A reader sees the old entry gone before it sees anything of the new one.
        self.table.word64(start).store(0, Relaxed);
        fence(Release);
        self.store_all(start, words);
    }

    fn store_all(&self, start: usize, words: &[u64]) {
        for (n, word) in words.iter().enumerate().skip(1) {
            self.table.word64(start + n * 8).store(*word, Relaxed);
        }
        if let Some(first) = words.first() {
            self.table.word64(start).store(*first, Release);
        }
    }
}

/// The words of a record. Words beyond the end of the bytes are zero.
fn words_of<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

/// Delete a lane with its bytes.
pub fn remove_lane(folder: &Path, lane: LaneId) {
    remove(folder, lane);
}

fn remove(folder: &Path, lane: LaneId) {
    // Bytes first: a table without them is no lane.
    let _ = unlink(bytes_path(folder, lane));
    let _ = unlink(table_path(folder, lane));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::Folder;
    use rushes_core::units::ByteRange;
    use rushes_core::write::{PageRun, Runs};

    fn head(lane: u32) -> Head {
        Head {
            lane,
            page_count: 64,
            epoch: 3,
            secret: 77,
        }
    }

    fn piece(order: u64, request: u64) -> PieceRecord {
        let run = PageRun { first: 2, count: 3 };
        PieceRecord {
            order,
            request,
            range: ByteRange::new(order * 100, 9000),
            file: 1,
            runs: Runs::from_runs(&[run]).expect("one run"),
            changed_ns: 5,
        }
    }

    #[test]
    fn what_cannot_be_opened_is_not_taken_for_nothing() {
        let folder = Folder::new();
        drop(LaneFile::create(&folder.0, head(5)).unwrap());
        let (path, away) = (bytes_path(&folder.0, LaneId(5)), folder.0.join("away"));
        std::fs::rename(&path, &away).unwrap();
        std::os::unix::fs::symlink(&away, &path).unwrap();
        assert!(matches!(
            LaneFile::open(&folder.0, LaneId(5)),
            Err(LaneFault::Sys(_))
        ));
        std::fs::rename(&away, &path).unwrap();
        assert!(LaneFile::open(&folder.0, LaneId(5)).unwrap().is_some());
        // Without its bytes it never was one.
        std::fs::remove_file(&path).unwrap();
        assert!(LaneFile::open(&folder.0, LaneId(5)).unwrap().is_none());
        assert!(!table_path(&folder.0, LaneId(5)).exists());
    }

    #[test]
    fn what_was_published_is_found_by_who_comes_next() {
        let folder = Folder::new();
        let lane = LaneFile::create(&folder.0, head(5)).unwrap();
        rustix::io::pwrite(lane.bytes_fd(), b"footage", 2 * 4096).unwrap();
        lane.publish(9, &piece(2, 600));
        lane.publish(4, &piece(1, 601));
        lane.publish(7, &piece(3, 602));
        lane.set_state(9, State::Submitted);
        lane.set_state(7, State::Free);
        drop(lane);
        assert_eq!(lanes_in(&folder.0).unwrap(), [LaneId(5)]);
        let mut lane = LaneFile::open(&folder.0, LaneId(5))
            .unwrap()
            .expect("it is there");
        assert_eq!(lane.head(), head(5));
        assert_eq!(
            lane.pieces().unwrap(),
            [
                (4, State::Committed, piece(1, 601)),
                (9, State::Submitted, piece(2, 600))
            ]
        );
        assert!(lane.is_done(600) && lane.is_done(602));
        assert!(!lane.is_done(600 + 512) && !lane.is_done(0));
        let mut bytes = [0; 7];
        assert_eq!(lane.copy_out(2 * 4096, &mut bytes).unwrap(), 7);
        assert_eq!(&bytes, b"footage");
        lane.take_over(4);
        lane.set_state(9, State::Spent);
        drop(lane);
        let lane = LaneFile::open(&folder.0, LaneId(5))
            .unwrap()
            .expect("it is there");
        assert_eq!((lane.head().epoch, lane.epoch()), (4, 4));
        assert_eq!(lane.pieces().unwrap()[1].1, State::Spent);
        lane.remove();
        assert!(lanes_in(&folder.0).unwrap().is_empty());
    }

    #[test]
    fn lane_that_was_never_finished_is_removed_and_a_damaged_one_is_not() {
        let folder = Folder::new();
        std::fs::write(table_path(&folder.0, LaneId(1)), b"").unwrap();
        std::fs::write(bytes_path(&folder.0, LaneId(2)), b"").unwrap();
        for lane in [1, 2] {
            assert!(LaneFile::open(&folder.0, LaneId(lane)).unwrap().is_none());
        }
        assert!(lanes_in(&folder.0).unwrap().is_empty());
        let lane = LaneFile::create(&folder.0, head(3)).unwrap();
        lane.publish(1, &piece(1, 1));
        lane.table.word64(piece_place(1) + 24).fetch_xor(1, Relaxed);
        assert!(matches!(
            lane.pieces(),
            Err(LaneFault::Record {
                what: "piece",
                record: 1,
                damage: Damage::Checksum
            })
        ));
        lane.table.word64(place::HEAD + 8).store(99, Relaxed);
        drop(lane);
        let fault = LaneFile::open(&folder.0, LaneId(3)).unwrap_err();
        assert!(
            matches!(fault, LaneFault::Head(HeadFault::Version(99))),
            "{fault:?}"
        );
        assert_eq!(lanes_in(&folder.0).unwrap(), [LaneId(3)], "it is kept");
    }

    #[test]
    fn session_that_cuts_its_bytes_short_harms_itself_alone() {
        let folder = Folder::new();
        let lane = LaneFile::create(&folder.0, head(6)).unwrap();
        ftruncate(lane.bytes_fd(), 4096).unwrap();
        let mut bytes = [1; 8192];
        assert_eq!(lane.copy_out(0, &mut bytes).unwrap(), 4096);
        assert_eq!(lane.copy_out(8192, &mut bytes).unwrap(), 0);
    }
}
