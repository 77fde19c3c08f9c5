// SPDX-License-Identifier: Apache-2.0
//! The readable records of a lane's table, even of a damaged one: for the operator's decision about
//! it.
//!
//! Each record has a checksum of its own, so a damaged one says nothing against the others. The
//! survey reads the table as a file and does not map it: it changes nothing, and a table that is
//! too short does no harm. It does not interpret a table of another version.

use crate::lane::{LaneFault, bytes_path, table_path};
use rushes_core::format::lane::*;
use rushes_core::units::LaneId;
use rushes_sys::SysError;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Reads of a record that looks damaged: a daemon may be changing it meanwhile.
const LOOKS: u32 = 5;
/// Page of a lane. Units: bytes.
const PAGE_BYTES: u64 = 4096;

/// The contents of a table.
#[derive(Debug)]
pub struct Survey {
    /// Its head, or the head's fault.
    pub head: Result<Head, HeadFault>,
    /// Memory that the lane's bytes take. Units: bytes.
    pub memory_bytes: u64,
    /// Pieces that can be read, in order of commit.
    pub pieces: Vec<SurveyedPiece>,
    /// Records that cannot.
    pub damage: Vec<DamagedRecord>,
}

/// A piece that can be read.
#[derive(Debug)]
pub struct SurveyedPiece {
    /// Whether its bytes are still to be written.
    pub state: State,
    /// Its record.
    pub piece: PieceRecord,
    /// The file that it belongs to. None: that record is damaged, or not there.
    pub file: Option<FileRecord>,
}

/// A record that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedRecord {
    /// "piece" or "file".
    pub what: &'static str,
    /// Which.
    pub record: u32,
    /// Where it begins in the table. Units: bytes.
    pub table_offset: u64,
    /// How.
    pub damage: Damage,
}

/// Survey a lane. None: it was never finished, and holds nothing.
///
/// Errors   the files cannot be read.
pub fn survey(folder: &Path, lane: LaneId) -> Result<Option<Survey>, LaneFault> {
    let path = table_path(folder, lane);
    let failed =
        |error: io::Error| LaneFault::Sys(SysError::new("read", path.display().to_string(), error));
    let open = |path: &Path| match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    };
    let (Some(table), Some(bytes)) = (open(&path)?, open(&bytes_path(folder, lane))?) else {
        return Ok(None);
    };
    let table = Table(table);
    let length = table.0.metadata().map_err(failed)?.len();
    let words: [u64; HEAD_WORDS] = table.words(place::HEAD).map_err(failed)?;
    if length == 0 || length >= place::BYTES as u64 && words == [0; HEAD_WORDS] {
        return Ok(None);
    }
    let mut head = head_of(words);
    if head.is_ok_and(|head| head.lane != lane.0 || head.page_count == 0)
        || head.is_ok() && length < place::BYTES as u64
    {
        head = Err(HeadFault::Damaged);
    }
    let found = bytes.metadata().map_err(failed)?;
    let mut survey = Survey {
        head,
        memory_bytes: found.blocks() * 512,
        pieces: Vec::new(),
        damage: Vec::new(),
    };
    if !matches!(survey.head, Err(HeadFault::Version(_))) {
        survey.read_records(&table, found.len()).map_err(failed)?;
    }
    Ok(Some(survey))
}

impl Survey {
    fn read_records(&mut self, table: &Table, lane_bytes: u64) -> io::Result<()> {
        for record in 0..PIECE_COUNT {
            let at = piece_place(record);
            let found = match table.record(at, piece_of)? {
                Ok(None) => continue,
                Ok(Some((state, piece))) if lacks_bytes(state, &piece, lane_bytes) => {
                    Err(Damage::Fields)
                }
                Ok(Some(found)) => Ok(found),
                Err(damage) => Err(damage),
            };
            match found {
                Ok((state, piece)) => {
                    let file = self.file_of(table, piece.file)?;
                    self.pieces.push(SurveyedPiece { state, piece, file });
                }
                Err(damage) => self.note("piece", record, at, damage),
            }
        }
        self.pieces.sort_unstable_by_key(|found| found.piece.order);
        Ok(())
    }

    /// The file of a piece. Notes an unreadable record as damage, once.
    fn file_of(&mut self, table: &Table, record: u32) -> io::Result<Option<FileRecord>> {
        let at = file_place(record);
        let damage = match table.record(at, file_of)? {
            Ok(Some(file)) => return Ok(Some(file)),
            Ok(None) => Damage::Fields,
            Err(damage) => damage,
        };
        self.note("file", record, at, damage);
        Ok(None)
    }

    fn note(&mut self, what: &'static str, record: u32, at: usize, damage: Damage) {
        let found = DamagedRecord {
            what,
            record,
            table_offset: at as u64,
            damage,
        };
        if !self.damage.contains(&found) {
            self.damage.push(found);
        }
    }
}

/// A piece needs its bytes: a lane that was cut short may lack them. The bytes of a spent one are
/// on the disk, and its pages may be another's by now.
fn lacks_bytes(state: State, piece: &PieceRecord, lane_bytes: u64) -> bool {
    let end = |run: &rushes_core::write::PageRun| u64::from(run.first) + u64::from(run.count);
    let mut runs = piece.runs.as_slice().iter();
    state != State::Spent && runs.any(|run| end(run) * PAGE_BYTES > lane_bytes)
}

struct Table(File);

impl Table {
    /// A record; read again while it looks damaged.
    fn record<const N: usize, T>(
        &self,
        at: usize,
        read: impl Fn(&[u64; N]) -> Result<T, Damage>,
    ) -> io::Result<Result<T, Damage>> {
        let mut found = read(&self.words(at)?);
        for _ in 1..LOOKS {
            if found.is_ok() {
                break;
            }
            found = read(&self.words(at)?);
        }
        Ok(found)
    }

    /// Words at a place; behind the end they are zero.
    fn words<const N: usize>(&self, at: usize) -> io::Result<[u64; N]> {
        let mut bytes = vec![0; N * 8];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.0.read_at(rest, (at + done) as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::LaneFile;
    use crate::test_folder::Folder;
    use rushes_core::units::ByteRange;
    use rushes_core::write::{PageRun, Runs};
    use std::path::PathBuf;

    /// Where pieces begin and of which inode they are, and which records are damaged.
    type Told = (Vec<(u64, Option<u64>)>, Vec<(&'static str, u32)>);

    impl Folder {
        /// A lane with two files, two pieces of the first and one of the second.
        fn lane(&self) -> LaneId {
            let head = Head {
                lane: 3,
                page_count: 64,
                epoch: 1,
                secret: 5,
            };
            let lane = LaneFile::create(&self.0, head).unwrap();
            for (name, inode) in [(0, 10), (1, 20)] {
                lane.name_file(
                    name,
                    &FileRecord {
                        file_system: [1; 16],
                        handle_kind: 1,
                        handle: [0; HANDLE_BYTES_MAX],
                        handle_bytes: 8,
                        device: 7,
                        inode,
                        uid: 0,
                        gid: 0,
                    },
                );
            }
            for (record, file, start) in [(0, 0, 0), (1, 0, 9000), (2, 1, 500)] {
                let run = PageRun {
                    first: record * 3,
                    count: 3,
                };
                lane.publish(
                    record,
                    &PieceRecord {
                        order: u64::from(record) + 1,
                        request: 9,
                        range: ByteRange::new(start, 8000),
                        file,
                        runs: Runs::from_runs(&[run]).expect("one run"),
                        changed_ns: 0,
                    },
                );
            }
            LaneId(3)
        }

        fn change(&self, lane: LaneId, at: usize) {
            let path = table_path(&self.0, lane);
            let table = File::options().read(true).write(true).open(path).unwrap();
            let mut byte = [0];
            table.read_exact_at(&mut byte, at as u64).unwrap();
            table.write_all_at(&[byte[0] ^ 0x40], at as u64).unwrap();
        }

        fn told(&self, lane: LaneId) -> Told {
            let survey = survey(&self.0, lane).unwrap().expect("it is there");
            let pieces = survey.pieces.iter().map(|found| {
                let inode = found.file.map(|file| file.inode);
                (found.piece.range.start.0, inode)
            });
            let damage = survey.damage.iter().map(|found| (found.what, found.record));
            (pieces.collect(), damage.collect())
        }
    }

    #[test]
    fn one_damaged_record_says_nothing_against_the_others() {
        let folder = Folder::new();
        let lane = folder.lane();
        let all = [(0, Some(10)), (9000, Some(10)), (500, Some(20))];
        assert_eq!(folder.told(lane), (all.to_vec(), vec![]));
        folder.change(lane, piece_place(1) + 30);
        assert_eq!(
            folder.told(lane),
            (vec![all[0], all[2]], vec![("piece", 1)])
        );
        folder.change(lane, file_place(1) + 60);
        let (pieces, damage) = folder.told(lane);
        assert_eq!(pieces, [all[0], (500, None)]);
        assert_eq!(damage, [("piece", 1), ("file", 1)]);
        // Damage of the head changes nothing of the pieces.
        folder.change(lane, place::HEAD + 20);
        assert_eq!(folder.told(lane).0, pieces);
        let head = survey(&folder.0, lane).unwrap().expect("there").head;
        assert_eq!(head, Err(HeadFault::Damaged));
    }

    #[test]
    fn another_versions_records_are_not_guessed_at() {
        let folder = Folder::new();
        let lane = folder.lane();
        folder.change(lane, place::HEAD + 8);
        assert_eq!(folder.told(lane), (vec![], vec![]));
        let head = survey(&folder.0, lane).unwrap().expect("there").head;
        assert_eq!(head, Err(HeadFault::Version(VERSION ^ 0x40)));
    }

    #[test]
    fn spent_piece_needs_no_bytes() {
        let folder = Folder::new();
        let lane = folder.lane();
        let file = LaneFile::open(&folder.0, lane).unwrap().expect("a lane");
        file.set_state(2, State::Spent);
        drop(file);
        let bytes = File::options()
            .write(true)
            .open(bytes_path(&folder.0, lane));
        bytes.unwrap().set_len(6 * 4096).unwrap();
        let all = [(0, Some(10)), (9000, Some(10)), (500, Some(20))];
        assert_eq!(folder.told(lane), (all.to_vec(), vec![]));
        let survey = survey(&folder.0, lane).unwrap().expect("it is there");
        assert_eq!(survey.pieces[2].state, State::Spent);
    }

    #[test]
    fn what_was_cut_short_is_damage_and_what_is_left_is_told() {
        let folder = Folder::new();
        let lane = folder.lane();
        let cut = |path: PathBuf, bytes: u64| {
            let file = File::options().write(true).open(path).unwrap();
            file.set_len(bytes).unwrap();
        };
        cut(bytes_path(&folder.0, lane), 5 * 4096);
        let (pieces, damage) = folder.told(lane);
        assert_eq!(pieces, [(0, Some(10))]);
        assert_eq!(damage, [("piece", 1), ("piece", 2)]);
        cut(table_path(&folder.0, lane), piece_place(1) as u64);
        let (pieces, damage) = folder.told(lane);
        assert_eq!((pieces.len(), damage.len()), (1, 0));
        let head = survey(&folder.0, lane).unwrap().expect("there").head;
        assert_eq!(head, Err(HeadFault::Damaged));
        cut(table_path(&folder.0, lane), 0);
        assert!(survey(&folder.0, lane).unwrap().is_none());
    }
}
