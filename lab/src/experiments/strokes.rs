// SPDX-License-Identifier: Apache-2.0
//! The time of one call: frames and small writes of one program, one after the other, in some
//! folders, in turn.
//!
//! No other program works there, and disks should be fast, so that the measurement shows the way to
//! them: kernel crossings, copies, turns. Each round measures all folders, another one first each
//! time, so that other work of the machine affects all of them alike.

use crate::experiments::metadata::LabelledFolder;
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::stage::room::go_on;
use anyhow::{Context, Result, ensure};
use rustix::fs::{Advice, OFlags, fadvise};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The alignment of memory and lengths that direct I/O requires. Units: bytes.
const DIRECT_BYTES: usize = 4096;
/// Frames a second of a program that records with pacing.
const PACE: u32 = 24;

/// The measured ways, in this order: a way that reads needs the frames of the way before it.
const WAYS: [Way; 7] = [
    Way::WriteDirect,
    Way::ReadDirect,
    Way::WriteBuffered,
    Way::ReadBuffered,
    Way::Paced,
    Way::Small("write 4 B", 4),
    Way::Small("write 1 B", 1),
];

/// One kind of stroke: for a frame open, one call and close; for a small write the call alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    WriteDirect,
    ReadDirect,
    WriteBuffered,
    ReadBuffered,
    /// A write with O_DIRECT each 24th of a second.
    Paced,
    /// Sequential writes of so many bytes into a file that is open for reading, too.
    Small(&'static str, usize),
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::WriteDirect => "write direct",
            Way::ReadDirect => "read direct",
            Way::WriteBuffered => "write buffered",
            Way::ReadBuffered => "read buffered",
            Way::Paced => "write at 24/s",
            Way::Small(name, _) => name,
        }
    }

    /// True if no later way needs the frames.
    fn is_last_of_frames(self) -> bool {
        matches!(self, Way::ReadDirect | Way::ReadBuffered | Way::Paced)
    }
}

/// The load.
#[derive(Clone, Debug)]
pub struct Strokes {
    /// The folders to measure.
    pub places: Vec<LabelledFolder>,
    /// Frames in each round.
    pub frame_count: u64,
    /// Size of a frame, a multiple of 4096. Units: bytes.
    pub frame_bytes: u64,
    /// Small writes in each round.
    pub small_count: u64,
    /// Number of repetitions.
    pub round_count: u64,
}

/// One JSON object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Serialize)]
pub struct StrokesReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// Frames in a round.
    pub frames: u64,
    /// Size of a frame. Units: bytes.
    pub frame_bytes: u64,
    /// Small writes in a round.
    pub small: u64,
    /// A row for each folder and way.
    pub rows: Vec<StrokeRow>,
}

/// The time of one way in one folder.
#[derive(Clone, Debug, Serialize)]
pub struct StrokeRow {
    /// Label of the folder.
    pub label: String,
    /// Of frames: `write direct`, `read direct`, `write buffered`, `read buffered`, `write at
    /// 24/s`; of calls: `write 4 B`, `write 1 B`.
    pub way: String,
    /// The mean of each round. Units: µs.
    pub mean_us: Vec<f64>,
    /// The median of these. Units: µs.
    pub median_us: f64,
    /// The worst of all rounds. Units: µs.
    pub worst_us: f64,
}

impl Strokes {
    /// Measure all folders.
    ///
    /// Errors   a folder cannot be written to, or has files of a former run; its file system has no
    /// direct I/O
    pub fn run(&self) -> Result<StrokesReport> {
        let mut rows: Vec<StrokeRow> = Vec::new();
        let mut memory = Memory::new(self.frame_bytes as usize);
        for round in 0..self.round_count as usize {
            for way in WAYS {
                for turn in 0..self.places.len() {
                    let place = &self.places[(round + turn) % self.places.len()];
                    go_on()?;
                    let took = self
                        .measure(&place.path, way, memory.bytes())
                        .with_context(|| format!("{}, in {}", way.name(), place.path.display()))?;
                    note(&mut rows, &place.label, way, &took);
                }
            }
        }
        for row in &mut rows {
            let mut sorted = row.mean_us.clone();
            sorted.sort_by(f64::total_cmp);
            row.median_us = sorted[sorted.len() / 2];
        }
        Ok(StrokesReport {
            head: Head::of("strokes"),
            frames: self.frame_count,
            frame_bytes: self.frame_bytes,
            small: self.small_count,
            rows,
        })
    }

    /// How long each stroke took.
    fn measure(&self, folder: &Path, way: Way, bytes: &mut [u8]) -> Result<Vec<Duration>> {
        if let Way::Small(_, length) = way {
            return self.small(&folder.join("stroke.small"), length);
        }
        let begun = Instant::now();
        let mut took = Vec::new();
        for number in 0..self.frame_count {
            if way == Way::Paced {
                let due = begun + Duration::from_secs(1) * number as u32 / PACE;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            let path = self.frame(folder, number);
            let began = Instant::now();
            match way {
                Way::WriteDirect | Way::Paced => write_frame(&path, OFlags::DIRECT, bytes)?,
                Way::WriteBuffered => write_frame(&path, OFlags::empty(), bytes)?,
                Way::ReadDirect => read_frame(&path, OFlags::DIRECT, bytes)?,
                Way::ReadBuffered | Way::Small(..) => read_frame(&path, OFlags::empty(), bytes)?,
            }
            took.push(began.elapsed());
        }
        for number in 0..self.frame_count {
            let path = self.frame(folder, number);
            if way.is_last_of_frames() {
                fs::remove_file(path)?;
            } else if way == Way::WriteBuffered {
                // The kernel must not have these bytes in its cache for the reads that follow.
                let file = File::open(path)?;
                file.sync_all()?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
            }
        }
        Ok(took)
    }

    fn small(&self, path: &Path, length: usize) -> Result<Vec<Duration>> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        let mut took = Vec::with_capacity(self.small_count as usize);
        for _ in 0..self.small_count {
            let began = Instant::now();
            file.write_all(&[7; 4][..length])?;
            took.push(began.elapsed());
        }
        drop(file);
        fs::remove_file(path)?;
        Ok(took)
    }

    fn frame(&self, folder: &Path, number: u64) -> PathBuf {
        folder.join(format!("stroke{number:05}.dpx"))
    }
}

fn note(rows: &mut Vec<StrokeRow>, label: &str, way: Way, took: &[Duration]) {
    let us = |one: &Duration| one.as_secs_f64() * 1e6;
    let mean = took.iter().map(us).sum::<f64>() / took.len() as f64;
    let worst = took.iter().map(us).fold(0.0, f64::max);
    let known = rows
        .iter_mut()
        .find(|row| row.label == label && row.way == way.name());
    match known {
        Some(row) => {
            row.mean_us.push(mean);
            row.worst_us = row.worst_us.max(worst);
        }
        None => rows.push(StrokeRow {
            label: label.to_owned(),
            way: way.name().to_owned(),
            mean_us: vec![mean],
            median_us: 0.0,
            worst_us: worst,
        }),
    }
}

fn write_frame(path: &Path, flags: OFlags, bytes: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    file.write_all(bytes)?;
    Ok(())
}

fn read_frame(path: &Path, flags: OFlags, bytes: &mut [u8]) -> Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    // So that the check below does not take the last frame's bytes for this one's.
    bytes[0] = 0;
    file.read_exact(bytes)?;
    ensure!(
        bytes.first() == Some(&FILLED) && bytes.last() == Some(&FILLED),
        "{} has other bytes than were written",
        path.display()
    );
    Ok(())
}

/// The byte that fills all frames.
const FILLED: u8 = 0x5a;

/// A frame's bytes, aligned for direct I/O.
struct Memory {
    all: Vec<u8>,
    start: usize,
    length: usize,
}

impl Memory {
    fn new(length: usize) -> Memory {
        let all = vec![FILLED; length + DIRECT_BYTES];
        let start = all.as_ptr().align_offset(DIRECT_BYTES);
        Memory { all, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.all[self.start..][..self.length]
    }
}

impl Outcome for StrokesReport {
    fn table(&self) -> Result<String> {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{:<16} {:<16} {:>12} {:>12}",
            "what", "folder", "µs", "worst µs"
        );
        for way in WAYS {
            for row in self.rows.iter().filter(|row| row.way == way.name()) {
                let _ = writeln!(
                    out,
                    "{:<16} {:<16} {:>12.1} {:>12.1}",
                    row.way, row.label, row.median_us, row.worst_us
                );
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_measured_in_each_round_and_nothing_is_left() {
        // On a disk: a tmpfs has no direct I/O before Linux 6.6.
        let folder = Path::new("/var/tmp").join(format!("rushes-strokes-{}", std::process::id()));
        fs::create_dir(&folder).expect("a temporary folder");
        let load = Strokes {
            places: vec![LabelledFolder {
                label: String::from("here"),
                path: folder.clone(),
            }],
            frame_count: 2,
            frame_bytes: 2 * DIRECT_BYTES as u64,
            small_count: 3,
            round_count: 2,
        };
        let report = load.run().expect("it is ours");
        assert_eq!(report.rows.len(), WAYS.len());
        for row in &report.rows {
            assert_eq!(row.mean_us.len(), 2);
            assert!(row.median_us > 0.0 && row.worst_us >= row.median_us);
        }
        assert_eq!(report.table().unwrap().lines().count(), 1 + WAYS.len());
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 0);
        fs::write(folder.join("stroke00000.dpx"), "a former run's").expect("made");
        let said = format!("{:#}", load.run().expect_err("a former run is there"));
        assert!(said.contains(&folder.display().to_string()), "{said}");
        fs::remove_dir_all(&folder).expect("ours");
    }
}
