// SPDX-License-Identifier: Apache-2.0
//! The report of writing: one JSON object whose field names are promised, and a table for people.

use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::Write as _;

/// The object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WriteReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// The modelled disk had its volatile write cache; null on other disks.
    pub write_back: Option<bool>,
    /// Writer processes.
    pub writers: u64,
    /// Files that each wrote.
    pub files_per_writer: u64,
    /// Size of each file. Units: bytes.
    pub file_bytes: u64,
    /// Size of one write. Units: bytes.
    pub frame_bytes: u64,
    /// Rate of each writer; null: as fast as possible. Units: bits a second.
    pub bitrate: Option<u64>,
    /// Frames a second of each writer; null without pacing.
    pub frames_per_s: Option<f64>,
    /// How long each recorded; null without pacing. Units: s.
    pub seconds: Option<f64>,
    /// Units: ms.
    pub preroll_ms: f64,
    /// `staggered` or `together`.
    pub start: String,
    /// Units: ms.
    pub stagger_ms: f64,
    /// How writers extended files before they wrote them: `none`, `one-byte`, `set-eof`.
    pub extend: String,
    /// Writers flushed each file before they closed it.
    pub flush: bool,
    /// Frames of all writers.
    pub frames: u64,
    /// Frames acknowledged past their deadline, or never; without pacing only the latter.
    pub late_frames: u64,
    /// Writers with a late frame.
    pub late_writers: u64,
    /// The worst of all frames; null without pacing.
    pub worst_lateness_ms: Option<f64>,
    /// Bytes that were acknowledged.
    pub bytes: u64,
    /// From the first open to the last close.
    pub wall_s: f64,
    /// The final sync, from its start until the disk had everything. It starts right after the last
    /// close; in a mixed run when players are done, too.
    pub final_sync_s: f64,
    /// Acknowledged bytes by `wall_s`.
    pub mb_per_s: f64,
    /// Acknowledged bytes by `wall_s` and `final_sync_s`.
    pub mb_per_s_synced: f64,
    /// Age from which a block is late on the device. Units: s.
    pub device_late_limit_s: f64,
    /// Blocks of 4 KiB that the device got later than that after their acknowledgement; null where
    /// the disk takes no notes.
    pub device_late_blocks: Option<u64>,
    /// Acknowledged bytes in them.
    pub device_late_bytes: Option<u64>,
    /// Those of them that the device never got.
    pub device_missing_blocks: Option<u64>,
    /// Longest time from an acknowledgement until the device had the bytes.
    pub device_worst_age_s: Option<f64>,
    /// Most fragments of a file, as filefrag counts.
    pub fragments_max: u64,
    /// Fragments of all files together.
    pub fragments: u64,
    /// Bytes that differ from those written, or are missing, read cold from the file system below.
    pub bytes_wrong: u64,
    /// CPU time of smbd and daemon while writers wrote and until the disk had everything.
    pub server_cpu_s: f64,
    /// CPU time of all writers: must be small, or the lab measures itself.
    pub writers_cpu_s: f64,
    /// CPU time of the whole machine meanwhile: server, writers, modelled disk, and the kernel's
    /// own work for them.
    pub machine_cpu_s: f64,
    /// CPU time that its host gave to others meanwhile: figures of a run with much of it are worth
    /// little.
    pub stolen_cpu_s: f64,
    /// The most memory that smbd and daemon held together, cache included.
    pub server_memory_bytes_peak: u64,
    /// Memory that the server may use for cached data.
    pub cache_bytes_max: u64,
    /// Longest open.
    pub open_ms_max: f64,
    /// Errors of writers.
    pub errors: Vec<String>,
    /// One row a file.
    pub per_file: Vec<FileRow>,
    /// Settings that distinguish the server.
    pub settings: Value,
    /// The model of the device that Rushes had.
    pub device_model: Value,
    /// The counts of the slow disk during the run.
    pub disk_statistics: Value,
    /// The kernel's counts of the block device during the run.
    pub block_statistics: Value,
    /// Last status of the daemon.
    pub status: Value,
    /// Machine and revision.
    pub environment: Value,
}

/// A file in numbers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FileRow {
    /// Number of the file; in a recording that of the writer.
    pub number: u64,
    /// Number of the writer.
    pub writer: u64,
    /// Its path below the share.
    pub path: String,
    /// Frames that it should have.
    pub frames: u64,
    /// Frames acknowledged past their deadline, or never.
    pub late_frames: u64,
    /// Null without pacing. Units: ms.
    pub worst_lateness_ms: Option<f64>,
    /// The median lateness of its frames; negative: early. Null without pacing.
    pub lateness_ms_p50: Option<f64>,
    /// The 99th percentile. Null without pacing.
    pub lateness_ms_p99: Option<f64>,
    /// Units: ms.
    pub open_ms: f64,
    /// Time to extend it before the first frame. Units: ms.
    pub extend_ms: f64,
    /// Time to flush it before its close. Units: ms.
    pub flush_ms: f64,
    /// Acknowledged bytes.
    pub bytes: u64,
    /// The rate from its open to its close.
    pub mb_per_s: f64,
    /// As filefrag counts.
    pub fragments: u64,
    /// Units: bytes.
    pub bytes_wrong: u64,
    /// Null where the disk takes no notes.
    pub device_late_blocks: Option<u64>,
    /// Null where the disk takes no notes. Units: s.
    pub device_worst_age_s: Option<f64>,
    /// Lateness of each frame, with `--timeline`. Units: ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lateness_ms: Option<Vec<f32>>,
}

/// How long after its deadline a frame was acknowledged; negative: before. Units: ns, but the
/// result ms.
pub fn lateness_ms(
    start_ns: u64,
    preroll_ns: u64,
    period_ns: u64,
    frame: u64,
    acknowledged_ns: u64,
) -> f64 {
    let due = start_ns + preroll_ns + frame * period_ns;
    (acknowledged_ns as f64 - due as f64) / 1e6
}

impl FileRow {
    /// Compute the counts and percentiles of lateness; frames never acknowledged are late by
    /// `limit_ms`.
    pub fn add_lateness(&mut self, lateness: &[f64], limit_ms: f64) {
        let missing = self.frames.saturating_sub(lateness.len() as u64);
        let mut sorted = lateness.to_vec();
        sorted.extend((0..missing).map(|_| limit_ms));
        sorted.sort_by(f64::total_cmp);
        let share = |permille: usize| {
            let index = (sorted.len() * permille / 1000).min(sorted.len().saturating_sub(1));
            sorted.get(index).copied()
        };
        self.late_frames = lateness.iter().filter(|ms| **ms > 0.0).count() as u64 + missing;
        self.worst_lateness_ms = share(1000);
        self.lateness_ms_p50 = share(500);
        self.lateness_ms_p99 = share(990);
    }
}

impl WriteReport {
    /// Take the rows of the files, and compute the figures over all files.
    pub fn add_files(&mut self, rows: Vec<FileRow>) {
        let worst = rows.iter().filter_map(|row| row.worst_lateness_ms);
        self.worst_lateness_ms = worst.reduce(f64::max);
        self.frames = rows.iter().map(|row| row.frames).sum();
        self.late_frames = rows.iter().map(|row| row.late_frames).sum();
        let late = rows.iter().filter(|row| row.late_frames > 0);
        let late: std::collections::BTreeSet<u64> = late.map(|row| row.writer).collect();
        self.late_writers = late.len() as u64;
        self.open_ms_max = rows.iter().map(|row| row.open_ms).fold(0.0, f64::max);
        self.bytes = rows.iter().map(|row| row.bytes).sum();
        self.mb_per_s = self.bytes as f64 / 1e6 / self.wall_s.max(1e-9);
        self.mb_per_s_synced =
            self.bytes as f64 / 1e6 / (self.wall_s + self.final_sync_s).max(1e-9);
        self.fragments = rows.iter().map(|row| row.fragments).sum();
        self.fragments_max = rows.iter().map(|row| row.fragments).max().unwrap_or(0);
        self.bytes_wrong = rows.iter().map(|row| row.bytes_wrong).sum();
        self.per_file = rows;
    }

    /// Append the table to `out`.
    pub fn write_table(&self, out: &mut String) -> std::fmt::Result {
        let pace = match self.bitrate {
            Some(bitrate) => format!("{:.0} Mb/s each", bitrate as f64 / 1e6),
            None => "as fast as it goes".to_owned(),
        };
        let cache = match self.write_back {
            Some(true) => ", write cache",
            _ => "",
        };
        writeln!(
            out,
            "{}: {} ({}{cache}): {} writers, {} files of {:.0} MB, {pace}, extended {}",
            self.head.experiment.as_deref().unwrap_or_default(),
            self.head.words(),
            self.head.file_system(),
            self.writers,
            self.writers * self.files_per_writer,
            self.file_bytes as f64 / 1e6,
            self.extend
        )?;
        writeln!(
            out,
            "  {:>4} {:>6} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9} {:>9} {:>7}",
            "file",
            "late",
            "worst ms",
            "p99 ms",
            "open ms",
            "MB/s",
            "fragments",
            "dev late",
            "oldest s",
            "wrong"
        )?;
        for row in &self.per_file {
            writeln!(
                out,
                "  {:>4} {:>6} {:>9} {:>9} {:>9.1} {:>8.1} {:>9} {:>9} {:>9} {:>7}",
                row.number,
                row.late_frames,
                shown(row.worst_lateness_ms),
                shown(row.lateness_ms_p99),
                row.open_ms,
                row.mb_per_s,
                row.fragments,
                row.device_late_blocks
                    .map_or("-".to_owned(), |count| count.to_string()),
                shown(row.device_worst_age_s),
                row.bytes_wrong
            )?;
        }
        writeln!(
            out,
            "  late frames {} of {} in {} of {} writers; worst {} ms; {:.1} MB/s, with the final sync of {:.2} s {:.1} MB/s",
            self.late_frames,
            self.frames,
            self.late_writers,
            self.writers,
            shown(self.worst_lateness_ms),
            self.mb_per_s,
            self.final_sync_s,
            self.mb_per_s_synced
        )?;
        if let (Some(late), Some(missing)) = (self.device_late_blocks, self.device_missing_blocks) {
            writeln!(
                out,
                "  on the device more than {:.0} s after their acknowledgement: {late} blocks ({missing} never); oldest {} s",
                self.device_late_limit_s,
                shown(self.device_worst_age_s)
            )?;
        }
        writeln!(
            out,
            "  fragments at most {}; wrong bytes {}; server CPU {:.2} s, writers' {:.2} s, machine's {:.2} s, stolen {:.2} s; \
             server memory at most {} MiB",
            self.fragments_max,
            self.bytes_wrong,
            self.server_cpu_s,
            self.writers_cpu_s,
            self.machine_cpu_s,
            self.stolen_cpu_s,
            self.server_memory_bytes_peak >> 20
        )?;
        for error in &self.errors {
            writeln!(out, "  {error}")?;
        }
        Ok(())
    }
}

impl Outcome for WriteReport {
    fn table(&self) -> Result<String> {
        let mut out = String::new();
        self.write_table(&mut out)?;
        Ok(out)
    }

    /// A server that loses or spoils bytes or fails a write has failed, however early its
    /// acknowledgements come.
    ///
    /// Errors   the server has failed
    fn check(&self) -> Result<()> {
        ensure!(
            self.bytes_wrong == 0 && self.errors.is_empty(),
            "{} wrong bytes and {} writers that failed, expected none; the report above has them",
            self.bytes_wrong,
            self.errors.len()
        );
        Ok(())
    }
}

fn shown(number: Option<f64>) -> String {
    number.map_or("-".to_owned(), |number| format!("{number:.1}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn an_acknowledgement_is_late_past_preroll_and_its_place_in_the_file() {
        // Open returned at 100 ms; frame 3 of 25 a second, preroll 500 ms: due at 720 ms.
        let late = |at_ms: u64| lateness_ms(100 * MS, 500 * MS, 40 * MS, 3, at_ms * MS);
        assert_eq!(late(720), 0.0);
        assert_eq!(late(725), 5.0);
        assert_eq!(late(220), -500.0);
    }

    #[test]
    fn frames_that_were_never_acknowledged_are_late() {
        let mut row = FileRow {
            frames: 10,
            ..FileRow::default()
        };
        row.add_lateness(&[-400.0, 5.0, -1.0], 9000.0);
        assert_eq!(row.late_frames, 8);
        assert_eq!(row.worst_lateness_ms, Some(9000.0));
        row.frames = 3;
        row.add_lateness(&[-400.0, 5.0, 0.0], 9000.0);
        assert_eq!((row.late_frames, row.worst_lateness_ms), (1, Some(5.0)));
    }

    #[test]
    fn a_report_sums_its_files() {
        let row = |writer, late_frames, fragments| FileRow {
            writer,
            late_frames,
            fragments,
            frames: 100,
            bytes: 50_000_000,
            worst_lateness_ms: Some(late_frames as f64),
            ..FileRow::default()
        };
        let mut report = WriteReport {
            wall_s: 8.0,
            final_sync_s: 2.0,
            ..WriteReport::default()
        };
        report.add_files(vec![row(0, 0, 1), row(1, 2, 7), row(1, 3, 2)]);
        assert_eq!((report.late_frames, report.late_writers), (5, 1));
        assert_eq!((report.fragments, report.fragments_max), (10, 7));
        assert_eq!(report.worst_lateness_ms, Some(3.0));
        assert_eq!((report.mb_per_s, report.mb_per_s_synced), (18.75, 15.0));
        assert!(report.check().is_ok());
        report.bytes_wrong = 1;
        assert!(report.check().is_err());
    }
}
