// SPDX-License-Identifier: Apache-2.0
//! The report of an edit: one JSON object of all runs whose field names are promised, and a table
//! for people.
//!
//! Counts of several runs become a median with the lowest and the highest; a percentile is taken
//! over the waits of all runs together. Percentiles are never averaged.

use super::editor::Edited;
use super::passes::{self, ClientPass, KindPass, MedianPass, RunPass};
use super::script::{Pace, Script};
use crate::experiments::compare::spread;
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;

/// The object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EditReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// Files of footage that cut lists use.
    pub files: u64,
    /// Size of each. Units: bytes.
    pub file_bytes: u64,
    /// Units: bits a second.
    pub bitrate: u64,
    /// Frames a second.
    pub frames_per_s: f64,
    /// How long each client works; where it repeats its list, in one pass. Units: s.
    pub seconds: f64,
    /// Passes over each cut list.
    pub passes: u64,
    /// From the last frame of a pass to the first of the next. Units: ms.
    pub rest_ms: f64,
    /// A frame that comes so long after its time is late.
    pub late_ms: f64,
    /// Time between the starts of two clients. Units: ms.
    pub stagger_ms: f64,
    /// Seed of content and cut lists.
    pub seed: u64,
    /// Memory that the server may use for cached data; the most of all runs.
    pub cache_bytes_max: u64,
    /// Wrong or missing bytes of all runs.
    pub bytes_wrong: u64,
    /// CPU time that the machine's host gave to others, of all runs.
    pub stolen_cpu_s: f64,
    /// CPU time of the whole machine, of all runs.
    pub machine_cpu_s: f64,
    /// One row for all runs of a server with one mix and kind of client.
    pub medians: Vec<MedianRow>,
    /// All runs in order of time.
    pub runs: Vec<EditRun>,
    /// Machine and revision.
    pub environment: Value,
}

/// One run against one server.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EditRun {
    /// As on the command line.
    pub server: String,
    /// The clients, such as `timeline=8`.
    pub mix: String,
    /// Which repetition, from 1 on.
    pub round: u64,
    /// Clients, those that copy or read the disk themselves included.
    pub clients: u64,
    /// Frames with a time, of all clients.
    pub frames: u64,
    /// Frames past their deadline, or that never came.
    pub late_frames: u64,
    /// Bytes that differ from those written, or are missing.
    pub bytes_wrong: u64,
    /// Memory that the server may use for cached data.
    pub cache_bytes_max: u64,
    /// Bytes that all clients read in one pass over their lists, each counted once; null without
    /// `--again`.
    pub list_bytes: Option<u64>,
    /// The disk in each pass; empty without `--again`.
    pub passes: Vec<RunPass>,
    /// Each kind of client by itself.
    pub kinds: Vec<KindRow>,
    /// Each client by itself.
    pub per_client: Vec<ClientRow>,
    /// From the first start to the last end. Units: s.
    pub wall_s: f64,
    /// CPU time of smbd and daemon meanwhile.
    pub server_cpu_s: f64,
    /// CPU time of the clients: must be small, or the lab measures itself.
    pub clients_cpu_s: f64,
    /// CPU time of the whole machine meanwhile.
    pub machine_cpu_s: f64,
    /// CPU time that its host gave to others meanwhile.
    pub stolen_cpu_s: f64,
    /// The most memory that the server held, cache included. Units: bytes.
    pub server_memory_bytes_peak: u64,
    /// Errors of clients and of the daemon.
    pub errors: Vec<String>,
    /// Settings that distinguish the server.
    pub settings: Value,
    /// The counts of the slow disk.
    pub disk_statistics: Value,
    /// The kernel's counts of the block devices.
    pub block_statistics: Value,
    /// The model of the device that Rushes had.
    pub device_model: Value,
    /// The last `rushes status` while clients worked.
    pub status: Value,
}

/// All clients of one kind in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KindRow {
    /// The workload, with its role where it has several; `copy`: whole files by smbclient.
    pub kind: String,
    /// How many.
    pub clients: u64,
    /// Frames with a time; 0: these clients have no clock.
    pub frames: u64,
    /// Frames past their deadline, or that never came.
    pub late_frames: u64,
    /// Frames that came.
    pub frames_done: u64,
    /// Clients with a late frame.
    pub late_clients: u64,
    /// How long after its deadline the latest of all frames with a time came; negative when all
    /// were early. Units: ms. Null: no frame with a time came.
    pub worst_lateness_ms: Option<f64>,
    /// First frames that came, of runs from one cut to the next.
    pub cuts: u64,
    /// From the request for the first frame of a run to its arrival, an open included: the median.
    /// Units: ms. Null: there was none.
    pub first_frame_ms_p50: Option<f64>,
    /// The 95th percentile of these waits.
    pub first_frame_ms_p95: Option<f64>,
    /// The longest of these waits.
    pub first_frame_ms_max: Option<f64>,
    /// Frames that came, a second and client.
    pub frames_per_s_each: f64,
    /// Bytes read and written a second, of all clients together. Units: 10⁶ bytes.
    pub mb_per_s: f64,
    /// Bytes received.
    pub bytes_read: u64,
    /// Bytes acknowledged.
    pub bytes_written: u64,
    /// The longest open. Units: ms.
    pub open_ms_max: f64,
    /// Bytes that differ from those written, or are missing.
    pub bytes_wrong: u64,
    /// Each pass by itself; empty where a list is played once.
    pub passes: Vec<KindPass>,
}

/// One client in one run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClientRow {
    /// Its number.
    pub client: u64,
    /// As in the row of its kind.
    pub kind: String,
    /// Its start, after that of the first client. Units: s.
    pub start_s: f64,
    /// Frames with a time.
    pub frames: u64,
    /// Frames past their deadline, or that never came.
    pub late_frames: u64,
    /// Frames that came.
    pub frames_done: u64,
    /// As in the row of its kind. Units: ms.
    pub worst_lateness_ms: Option<f64>,
    /// Each run from cut to cut: when it began after the client's start, and how long its first
    /// frame took. Units: ms, ms.
    pub first_frame_ms: Vec<(f32, f32)>,
    /// With `--timeline`, each frame: its time after the client's start, and how long after its
    /// deadline it came. Units: ms, ms.
    pub lateness_ms: Option<Vec<(f32, f32)>>,
    /// Bytes that differ, or are missing.
    pub bytes_wrong: u64,
    /// Each pass by itself; empty where a list is played once.
    pub passes: Vec<ClientPass>,
    /// The client's first error.
    pub error: Option<String>,
}

/// All runs of one server with one mix, one kind of client.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MedianRow {
    /// As on the command line.
    pub server: String,
    /// The clients, as on the command line.
    pub mix: String,
    /// The kind of client that this row is about.
    pub kind: String,
    /// How many runs.
    pub runs: u64,
    /// Frames with a time, of one run.
    pub frames: u64,
    /// Lowest, median, highest.
    pub late_frames: (f64, f64, f64),
    /// The worst of all runs. Units: ms.
    pub worst_lateness_ms: Option<f64>,
    /// The median wait over the cuts of all runs. Units: ms.
    pub first_frame_ms_p50: Option<f64>,
    /// The 95th percentile of these waits.
    pub first_frame_ms_p95: Option<f64>,
    /// The longest of these waits.
    pub first_frame_ms_max: Option<f64>,
    /// Lowest, median, highest.
    pub frames_per_s_each: (f64, f64, f64),
    /// Lowest, median, highest. Units: 10⁶ bytes a second.
    pub mb_per_s: (f64, f64, f64),
    /// Wrong or missing bytes of all runs.
    pub bytes_wrong: u64,
    /// Each pass by itself; empty where a list is played once.
    pub passes: Vec<MedianPass>,
}

/// The least value that so many hundredths of all values do not exceed; `None` if there are none.
pub fn percentile(values: impl IntoIterator<Item = f64>, hundredths: u64) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as u64 * hundredths).div_ceil(100).max(1);
    values.get(rank as usize - 1).copied()
}

impl ClientRow {
    /// A client's row from its script and its result.
    pub fn new(client: u64, kind: &str, script: &Script, edited: &Edited, t0: u64) -> ClientRow {
        let frames = match script.pace {
            Pace::Clock => script.frame_count() * script.passes.count,
            Pace::Hand | Pace::Free => 0,
        };
        let came_late = edited.lateness_ms.iter().filter(|(_, late)| *late > 0.0);
        let never_came = frames - (edited.lateness_ms.len() as u64).min(frames);
        let worst = edited.lateness_ms.iter().map(|(_, late)| f64::from(*late));
        ClientRow {
            client,
            kind: kind.to_owned(),
            start_s: edited.begin_ns.saturating_sub(t0) as f64 / 1e9,
            frames,
            late_frames: came_late.count() as u64 + never_came,
            frames_done: edited.frame_count,
            worst_lateness_ms: worst.reduce(f64::max),
            first_frame_ms: edited.first_frame_ms.clone(),
            lateness_ms: Some(edited.lateness_ms.clone()),
            bytes_wrong: edited.bytes_wrong,
            passes: passes::of_client(script, edited),
            error: edited.error.clone(),
        }
    }
}

/// Waits for first frames. Units: ms.
fn waits(rows: &[&ClientRow]) -> impl Iterator<Item = f64> + Clone {
    rows.iter()
        .flat_map(|row| row.first_frame_ms.iter())
        .map(|(_, wait)| f64::from(*wait))
        .collect::<Vec<_>>()
        .into_iter()
}

impl KindRow {
    /// A row from the clients of one kind, each with its result.
    pub fn new(kind: &str, clients: &[(&ClientRow, &Edited)]) -> KindRow {
        let rows: Vec<&ClientRow> = clients.iter().map(|(row, _)| *row).collect();
        let sum = |of: fn(&ClientRow) -> u64| rows.iter().map(|row| of(row)).sum::<u64>();
        let done = |of: fn(&Edited) -> u64| clients.iter().map(|(_, done)| of(done)).sum::<u64>();
        let seconds = |edited: &Edited| edited.end_ns.saturating_sub(edited.begin_ns) as f64 / 1e9;
        let rates = clients
            .iter()
            .map(|(_, edited)| edited.frame_count as f64 / seconds(edited).max(1e-9));
        let bytes = clients.iter().map(|(_, edited)| {
            (edited.bytes_read + edited.bytes_written) as f64 / seconds(edited).max(1e-9)
        });
        let waits = waits(&rows);
        KindRow {
            kind: kind.to_owned(),
            clients: clients.len() as u64,
            frames: sum(|row| row.frames),
            late_frames: sum(|row| row.late_frames),
            frames_done: sum(|row| row.frames_done),
            late_clients: rows.iter().filter(|row| row.late_frames > 0).count() as u64,
            worst_lateness_ms: rows
                .iter()
                .filter_map(|row| row.worst_lateness_ms)
                .reduce(f64::max),
            cuts: waits.clone().count() as u64,
            first_frame_ms_p50: percentile(waits.clone(), 50),
            first_frame_ms_p95: percentile(waits.clone(), 95),
            first_frame_ms_max: percentile(waits, 100),
            frames_per_s_each: rates.sum::<f64>() / (clients.len() as f64).max(1.0),
            mb_per_s: bytes.sum::<f64>() / 1e6,
            bytes_read: done(|edited| edited.bytes_read),
            bytes_written: done(|edited| edited.bytes_written),
            open_ms_max: clients
                .iter()
                .map(|(_, edited)| edited.open_ms_max)
                .fold(0.0, f64::max),
            bytes_wrong: sum(|row| row.bytes_wrong),
            passes: passes::of_kind(&rows),
        }
    }
}

impl EditRun {
    /// The run in one line.
    pub fn line(&self) -> String {
        let kinds: Vec<String> = self.kinds.iter().map(KindRow::words).collect();
        format!(
            "{:>11}, {}, run {}: {}{}; CPU {:.1} s, wrong bytes {}{}",
            self.server,
            self.mix,
            self.round,
            kinds.join("; "),
            self.words_on_passes(),
            self.server_cpu_s,
            self.bytes_wrong,
            match self.errors.first() {
                Some(error) => format!(", {} ERRORS: {error}", self.errors.len()),
                None => String::new(),
            }
        )
    }
}

impl KindRow {
    fn words(&self) -> String {
        let mut words = format!("{} {}", self.clients, self.kind);
        if self.frames > 0 {
            let worst = self.worst_lateness_ms.unwrap_or(f64::NAN);
            let _ = write!(
                words,
                ": {} of {} frames late (worst {worst:.0} ms)",
                self.late_frames, self.frames
            );
        } else {
            let _ = write!(
                words,
                ": {:.1} frames/s each, {:.1} MB/s",
                self.frames_per_s_each, self.mb_per_s
            );
        }
        if let (Some(p50), Some(p95), Some(max)) = (
            self.first_frame_ms_p50,
            self.first_frame_ms_p95,
            self.first_frame_ms_max,
        ) {
            let _ = write!(words, ", first frame {p50:.0}/{p95:.0}/{max:.0} ms");
        }
        words
    }
}

/// One row for each server, mix and kind, in order of first appearance, mix after mix.
pub fn medians(runs: &[EditRun]) -> Vec<MedianRow> {
    let mut keys: Vec<(&str, &str, &str)> = Vec::new();
    for run in runs {
        for row in &run.kinds {
            let key = (run.server.as_str(), run.mix.as_str(), row.kind.as_str());
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    // Servers beside each other, mix after mix.
    let mixes: Vec<&str> = runs.iter().map(|run| run.mix.as_str()).collect();
    let order = |mix: &str| mixes.iter().position(|known| *known == mix);
    keys.sort_by_key(|(_, mix, _)| order(mix));
    keys.into_iter()
        .map(|(server, mix, kind)| median_of(runs, server, mix, kind))
        .collect()
}

fn median_of(runs: &[EditRun], server: &str, mix: &str, kind: &str) -> MedianRow {
    let mine: Vec<&EditRun> = runs
        .iter()
        .filter(|run| run.server == server && run.mix == mix)
        .collect();
    let clients: Vec<&ClientRow> = mine
        .iter()
        .flat_map(|run| &run.per_client)
        .filter(|row| row.kind == kind)
        .collect();
    let rows: Vec<&KindRow> = mine
        .iter()
        .flat_map(|run| &run.kinds)
        .filter(|row| row.kind == kind)
        .collect();
    let waits = waits(&clients);
    MedianRow {
        server: server.to_owned(),
        mix: mix.to_owned(),
        kind: kind.to_owned(),
        runs: rows.len() as u64,
        frames: rows.first().map_or(0, |row| row.frames),
        late_frames: spread(rows.iter().map(|row| row.late_frames as f64)),
        worst_lateness_ms: rows
            .iter()
            .filter_map(|row| row.worst_lateness_ms)
            .reduce(f64::max),
        first_frame_ms_p50: percentile(waits.clone(), 50),
        first_frame_ms_p95: percentile(waits.clone(), 95),
        first_frame_ms_max: percentile(waits, 100),
        frames_per_s_each: spread(rows.iter().map(|row| row.frames_per_s_each)),
        mb_per_s: spread(rows.iter().map(|row| row.mb_per_s)),
        bytes_wrong: rows.iter().map(|row| row.bytes_wrong).sum(),
        passes: passes::of_runs(&clients, &rows, &mine),
    }
}

impl Outcome for EditReport {
    /// A table for people, in Markdown.
    fn table(&self) -> Result<String> {
        let mut out = format!(
            "{} of {} MB over {} ({}); {:.0} Mb/s, {} frames/s, {:.0} s{}, late past {:.0} ms, starts {:.0} ms apart\n\n",
            match self.files {
                1 => "1 file".to_owned(),
                count => format!("{count} files"),
            },
            self.file_bytes / 1_000_000,
            self.head.words_on_disks(),
            self.head.file_system(),
            self.bitrate as f64 / 1e6,
            self.frames_per_s,
            self.seconds,
            match self.passes {
                0 | 1 => String::new(),
                count => format!(" × {count} passes"),
            },
            self.late_ms,
            self.stagger_ms,
        );
        out += "| mix | server | kind | runs | late frames | of | worst ms | first frame p50 | p95 | worst ms | frames/s each | MB/s | wrong bytes |\n";
        out += "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
        for row in &self.medians {
            let number = |value: Option<f64>| value.map_or("—".to_owned(), |v| format!("{v:.0}"));
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                row.mix,
                row.server,
                row.kind,
                row.runs,
                match row.frames {
                    0 => "—".to_owned(),
                    _ => shown(row.late_frames, 0),
                },
                match row.frames {
                    0 => "—".to_owned(),
                    frames => frames.to_string(),
                },
                number(row.worst_lateness_ms),
                number(row.first_frame_ms_p50),
                number(row.first_frame_ms_p95),
                number(row.first_frame_ms_max),
                shown(row.frames_per_s_each, 1),
                shown(row.mb_per_s, 1),
                row.bytes_wrong
            );
        }
        Ok(out + &passes::table(&self.medians))
    }

    /// Wrong bytes and errors of clients are failures, however early frames come; late frames are
    /// figures.
    ///
    /// Errors   there were wrong bytes or errors
    fn check(&self) -> Result<()> {
        let errors: usize = self.runs.iter().map(|run| run.errors.len()).sum();
        ensure!(
            self.bytes_wrong == 0 && errors == 0,
            "{} wrong bytes and {errors} errors of clients, expected none; the report above has them",
            self.bytes_wrong
        );
        Ok(())
    }
}

/// The median, and the lowest and the highest where they differ.
pub fn shown((low, median, high): (f64, f64, f64), digits: usize) -> String {
    match low == high {
        true => format!("{median:.digits$}"),
        false => format!("{median:.digits$} ({low:.digits$}–{high:.digits$})"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::script::{Head, Run};
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_there() {
        let values = || (1..=20).map(f64::from);
        assert_eq!(percentile(values(), 50), Some(10.0));
        assert_eq!(percentile(values(), 95), Some(19.0));
        assert_eq!(percentile(values(), 100), Some(20.0));
        assert_eq!(percentile([7.0], 1), Some(7.0));
        assert_eq!(percentile([], 50), None);
    }

    fn script(pace: Pace, frame_count: u64) -> Script {
        let head = Head {
            file: 0,
            from: 0,
            stride: 1,
            bytes: 1,
            every: 1,
            writes: false,
        };
        Script {
            pace,
            runs: vec![Run {
                heads: vec![head],
                frame_count,
                period_ns: 1,
            }],
            ..Script::default()
        }
    }

    fn edited(lateness: &[f32], waits: &[f32]) -> Edited {
        Edited {
            begin_ns: 5_000_000_000,
            end_ns: 7_000_000_000,
            frame_count: lateness.len() as u64,
            lateness_ms: lateness.iter().map(|late| (0.0, *late)).collect(),
            first_frame_ms: waits.iter().map(|wait| (0.0, *wait)).collect(),
            bytes_read: 4_000_000,
            ..Edited::default()
        }
    }

    #[test]
    fn frames_that_never_came_are_late_where_there_is_a_clock() {
        let seen = edited(&[-400.0, 3.0, -1.0], &[20.0]);
        let row = ClientRow::new(0, "timeline", &script(Pace::Clock, 5), &seen, 4_000_000_000);
        assert_eq!((row.frames, row.late_frames, row.frames_done), (5, 3, 3));
        assert_eq!(row.worst_lateness_ms, Some(3.0));
        assert_eq!(row.start_s, 1.0);
        let hand = ClientRow::new(0, "scrub", &script(Pace::Hand, 5), &edited(&[], &[1.0]), 0);
        assert_eq!((hand.frames, hand.late_frames), (0, 0));
        assert_eq!(hand.worst_lateness_ms, None);
    }

    #[test]
    fn kinds_are_told_apart_and_percentiles_are_of_all_runs() {
        let run = |round, waits: &[f32], lateness: &[f32]| {
            let seen = edited(lateness, waits);
            let row = ClientRow::new(0, "timeline", &script(Pace::Clock, 2), &seen, 0);
            let kinds = vec![KindRow::new("timeline", &[(&row, &seen)])];
            assert_eq!(kinds[0].frames_per_s_each, 1.0);
            assert_eq!(kinds[0].mb_per_s, 2.0);
            EditRun {
                server: "stock".to_owned(),
                mix: "timeline=1".to_owned(),
                round,
                kinds,
                per_client: vec![row],
                ..EditRun::default()
            }
        };
        let runs = [
            run(1, &[10.0, 20.0], &[-1.0, -2.0]),
            run(2, &[30.0, 900.0], &[1.0, 2.0]),
        ];
        let rows = medians(&runs);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].late_frames, (0.0, 1.0, 2.0));
        assert_eq!(rows[0].first_frame_ms_p50, Some(20.0));
        assert_eq!(rows[0].first_frame_ms_max, Some(900.0));
        assert_eq!(rows[0].worst_lateness_ms, Some(2.0));
        assert_eq!((rows[0].runs, rows[0].frames), (2, 2));
    }
}
