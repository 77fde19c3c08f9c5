// SPDX-License-Identifier: Apache-2.0
//! The requests to a disk, in order: every write with its bytes, every flush and discard, and marks
//! that the workload sets.
//!
//! From it [`crate::power`] makes any state that a power cut may leave. It knows nothing of the
//! meaning of the bytes. Each record has its time by a clock that all disks of a machine share, so
//! that the logs of several have one order.
//!
//! The file, all numbers little-endian, version 2:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 8 | `RUSHLOG` and the version |
//! | 8 | 8 | size of the disk in bytes |
//!
//! then records, each a head of 32 bytes:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 8 | kind: 1 write, 2 zeros written, 3 discard, 4 flush, 5 mark |
//! | 8 | 8 | offset on the disk; of a mark its number |
//! | 16 | 8 | length in bytes; 0 for flush and mark |
//! | 24 | 8 | time of the change, before its answer: ns of the monotonic clock, never decreasing |
//!
//! and after the head of a write its bytes. Zeros have none, since file systems write many of them.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use rushes_core::units::Instant;

const MAGIC: [u8; 8] = *b"RUSHLOG\x02";
const HEAD_BYTES: usize = 16;
const RECORD_BYTES: usize = 32;

/// The recorder stops at this size, since the log lies in memory. Units: bytes.
const LOG_BYTES_MAX: u64 = 1 << 30;

/// A change of a disk, a flush that makes changes durable, or a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// A write.
    Write {
        /// Offset on the disk. Units: bytes.
        offset: u64,
        /// Its bytes.
        bytes: &'a [u8],
    },
    /// A write of zeros.
    Zeros {
        /// Offset on the disk. Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
    },
    /// These bytes read as zero from now on.
    Discard {
        /// Offset on the disk. Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
    },
    /// A flush: all earlier changes survive a power cut.
    Flush,
    /// A mark of the workload.
    Mark {
        /// The number of the mark.
        number: u64,
    },
}

impl Change<'_> {
    /// Kind, offset and length, the first fields of a record's head.
    fn head(&self) -> [u64; 3] {
        match *self {
            Change::Write { offset, bytes } => [1, offset, bytes.len() as u64],
            Change::Zeros { offset, length } => [2, offset, length],
            Change::Discard { offset, length } => [3, offset, length],
            Change::Flush => [4, 0, 0],
            Change::Mark { number } => [5, number, 0],
        }
    }
}

/// Writes a log.
pub(super) struct Recorder {
    out: BufWriter<File>,
    bytes: u64,
    /// Why the log is incomplete.
    complaint: Option<String>,
}

impl Recorder {
    pub(super) fn create(path: &Path, disk_bytes: u64) -> io::Result<Recorder> {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(&MAGIC)?;
        out.write_all(&disk_bytes.to_le_bytes())?;
        Ok(Recorder {
            out,
            bytes: HEAD_BYTES as u64,
            complaint: None,
        })
    }

    /// Notes a change that was made at `now`. [`Recorder::complaint`] returns an error: the request
    /// itself did not fail.
    pub(super) fn note(&mut self, change: Change, now: Instant) {
        if self.complaint.is_some() {
            return;
        }
        let change = match change {
            Change::Write { offset, bytes } if bytes.iter().all(|&byte| byte == 0) => {
                let length = bytes.len() as u64;
                Change::Zeros { offset, length }
            }
            other => other,
        };
        if let Err(error) = self.write(&change, now) {
            self.complaint = Some(format!("the log is incomplete: {error}"));
        } else if self.bytes > LOG_BYTES_MAX {
            self.complaint = Some(format!("the log is larger than {LOG_BYTES_MAX} bytes"));
        }
    }

    fn write(&mut self, change: &Change, now: Instant) -> io::Result<()> {
        for number in change.head() {
            self.out.write_all(&number.to_le_bytes())?;
        }
        self.out.write_all(&now.0.to_le_bytes())?;
        self.bytes += RECORD_BYTES as u64;
        if let Change::Write { bytes, .. } = change {
            self.out.write_all(bytes)?;
            self.bytes += bytes.len() as u64;
        }
        Ok(())
    }

    pub(super) fn complaint(&self) -> Option<String> {
        self.complaint.clone()
    }

    pub(super) fn finish(mut self) -> Result<(), String> {
        self.out
            .flush()
            .map_err(|error| format!("the log is incomplete: {error}"))?;
        self.complaint.map_or(Ok(()), Err)
    }
}

/// A log in memory.
#[derive(Clone, Debug)]
pub struct Log {
    bytes: Vec<u8>,
    disk_bytes: u64,
    /// Where each record begins.
    starts: Vec<usize>,
}

impl Log {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Log, LogError> {
        Log::parse(std::fs::read(path).map_err(LogError::Unreadable)?)
    }

    /// Parses the content of a file.
    pub fn parse(bytes: Vec<u8>) -> Result<Log, LogError> {
        if bytes.len() < HEAD_BYTES || bytes[..8] != MAGIC {
            return Err(LogError::NoLog);
        }
        let mut log = Log {
            disk_bytes: number_at(&bytes, 8),
            bytes,
            starts: Vec::new(),
        };
        let mut at = HEAD_BYTES;
        let mut time = 0;
        while at < log.bytes.len() {
            if at + RECORD_BYTES > log.bytes.len() {
                return Err(LogError::Damaged { at });
            }
            let kind = number_at(&log.bytes, at);
            let (offset, length) = (
                number_at(&log.bytes, at + 8),
                number_at(&log.bytes, at + 16),
            );
            let inside = match kind {
                1..=3 => offset
                    .checked_add(length)
                    .is_some_and(|end| end <= log.disk_bytes),
                4 | 5 => length == 0,
                _ => false,
            };
            let next = at
                + RECORD_BYTES
                + if kind == 1 && inside {
                    length as usize
                } else {
                    0
                };
            let before = std::mem::replace(&mut time, number_at(&log.bytes, at + 24));
            if !inside || next > log.bytes.len() || time < before {
                return Err(LogError::Damaged { at });
            }
            log.starts.push(at);
            at = next;
        }
        Ok(log)
    }

    /// The bytes of the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Size of the disk. Units: bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// True when nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// One record.
    pub fn get(&self, index: usize) -> Change<'_> {
        let at = self.starts[index];
        let (offset, length) = (
            number_at(&self.bytes, at + 8),
            number_at(&self.bytes, at + 16),
        );
        let start = at + RECORD_BYTES;
        match number_at(&self.bytes, at) {
            1 => Change::Write {
                offset,
                bytes: &self.bytes[start..start + length as usize],
            },
            2 => Change::Zeros { offset, length },
            3 => Change::Discard { offset, length },
            4 => Change::Flush,
            _ => Change::Mark { number: offset },
        }
    }

    /// When that change was made, by the clock of the machine that recorded it.
    pub fn when(&self, index: usize) -> Instant {
        Instant(number_at(&self.bytes, self.starts[index] + 24))
    }

    /// All records, in order.
    pub fn iter(&self) -> impl Iterator<Item = Change<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Why a file is not a log.
#[derive(Debug)]
pub enum LogError {
    /// The file could not be read.
    Unreadable(io::Error),
    /// It has another beginning, or is of another version.
    NoLog,
    /// A record is invalid.
    Damaged {
        /// Where in the file the record begins. Units: bytes.
        at: usize,
    },
}

impl std::fmt::Display for LogError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LogError::Unreadable(error) => write!(f, "the log cannot be read: {error}"),
            LogError::NoLog => {
                f.write_str("this is not the log of a disk, or it is of another version")
            }
            LogError::Damaged { at } => write!(f, "the log is damaged at byte {at}"),
        }
    }
}

impl std::error::Error for LogError {}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGES: [Change; 6] = [
        Change::Mark { number: 7 },
        Change::Write {
            offset: 512,
            bytes: &[1, 2, 3],
        },
        Change::Flush,
        Change::Write {
            offset: 0,
            bytes: &[0; 4096],
        },
        Change::Discard {
            offset: 4096,
            length: 8192,
        },
        Change::Mark { number: u64::MAX },
    ];

    fn recorded(test: &str, changes: &[Change]) -> Vec<u8> {
        let name = format!("rushes-log-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut recorder = Recorder::create(&path, 1 << 20).unwrap();
        for (&change, at) in changes.iter().zip(7..) {
            recorder.note(change, Instant(at));
        }
        recorder.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        bytes
    }

    #[test]
    fn log_reads_back_as_it_was_written_and_zeros_take_no_room() {
        let bytes = recorded("whole", &CHANGES);
        assert_eq!(bytes.len(), HEAD_BYTES + 6 * RECORD_BYTES + 3);
        let log = Log::parse(bytes).unwrap();
        let mut expect = CHANGES.to_vec();
        expect[3] = Change::Zeros {
            offset: 0,
            length: 4096,
        };
        assert_eq!(log.iter().collect::<Vec<_>>(), expect);
        assert_eq!(log.disk_bytes(), 1 << 20);
        let times = (0..6).map(|index| log.when(index).0);
        assert!(times.eq(7..13));
    }

    #[test]
    fn damaged_log_is_refused_and_never_read_past_its_end() {
        let whole = recorded("damaged", &CHANGES);
        for end in 0..whole.len() {
            // A file cut between two records is a valid, shorter log.
            if let Ok(log) = Log::parse(whole[..end].to_vec()) {
                assert!(log.len() < CHANGES.len());
            }
        }
        for (at, value) in [
            (0, 0),
            (HEAD_BYTES, 9),
            (HEAD_BYTES + RECORD_BYTES + 15, 255),
            // A time before that of the record before.
            (HEAD_BYTES + RECORD_BYTES + 24, 1),
        ] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            assert!(Log::parse(bytes).is_err(), "byte {at}");
        }
    }
}
