// SPDX-License-Identifier: Apache-2.0
//! The report of a run: one JSON object whose field names are promised, and a table for people.

use crate::clients::copies::Tally;
use crate::clients::player::Playback;
use crate::clients::storm;
use crate::experiments::fill::FillReport;
use crate::experiments::tidy::TidyReport;
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::reports::written::WriteReport;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::Write as _;

/// The object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// For each disk the number of players whose files have bytes on it; null for layouts other
    /// than pools and mergerfs.
    #[serde(default)]
    pub streams_per_disk: Option<Vec<u64>>,
    /// Players.
    pub streams: u64,
    /// Players under contract from their first read on; with Rushes alone.
    pub streams_admitted: u64,
    /// Frames that all players had to play.
    pub frames: u64,
    /// Frames past their deadline, or that never came, of all players.
    pub late_frames: u64,
    /// Late frames of admitted streams; those of a stream with a later contract are in
    /// `late_frames` alone.
    pub late_frames_admitted: u64,
    /// Players with a late frame.
    pub late_streams: u64,
    /// The worst of all frames; negative when every frame was early.
    pub worst_lateness_ms: f64,
    /// Longest wait from the request to open to the first frame.
    pub first_frame_ms_max: f64,
    /// Bytes that copiers received while players played.
    pub copy_bytes: u64,
    /// CPU time of smbd and daemon while players played.
    pub server_cpu_s: f64,
    /// Bytes that players and copiers got and that differ from those written, or that were missing
    /// in a player's frame.
    pub bytes_wrong: u64,
    /// `staggered` or `together`.
    pub start: String,
    /// Memory that the server may use for cached data.
    pub cache_bytes_max: u64,
    /// Units: ms.
    pub stagger_ms: f64,
    /// Units: bits a second.
    pub bitrate: u64,
    /// Units: s.
    pub seconds: f64,
    /// Units: ms.
    pub preroll_ms: f64,
    /// One file a frame.
    pub sequence: bool,
    /// Frames a second.
    pub frames_per_s: f64,
    /// Copiers.
    pub copies: u64,
    /// The time for which copiers' bytes count.
    pub copy_seconds: f64,
    /// Rate of all copiers together.
    pub copy_mb_per_s: f64,
    /// Whole files that they copied.
    pub copy_files: u64,
    /// Copies that failed, each with its reason.
    pub copy_failures: Vec<String>,
    /// Bytes that players received.
    pub stream_bytes: u64,
    /// From the first start to the last frame.
    pub wall_s: f64,
    /// CPU time of all players: must be small, or the lab measures itself.
    pub players_cpu_s: f64,
    /// CPU time of the whole machine meanwhile: server, clients, modelled disk, and the kernel's
    /// own work for them.
    pub machine_cpu_s: f64,
    /// CPU time that its host gave to others meanwhile: figures of a run with much of it are worth
    /// little.
    pub stolen_cpu_s: f64,
    /// Longest open.
    pub open_ms_max: f64,
    /// The most memory that smbd and daemon held together, cache included.
    pub server_memory_bytes_peak: u64,
    /// The most memory that the daemon held beside its cache.
    pub daemon_bytes_beside_cache_max: Option<u64>,
    /// The most bytes that the daemon's cache held, by its status.
    pub cache_bytes_peak: Option<u64>,
    /// Rushes with pattern analyser.
    pub analyser: bool,
    /// Errors of players.
    pub errors: Vec<String>,
    /// One row a player.
    pub per_stream: Vec<StreamRow>,
    /// The results of storm clients.
    pub storm: Vec<storm::Done>,
    /// Storm clients' look-ups a second each, as wanted.
    pub storm_rate: Option<f64>,
    /// Metadata was warm when the storm began.
    pub storm_warm: bool,
    /// Names, inodes and extents of the footage were as cold as the footage.
    pub cold_metadata: bool,
    /// Settings that distinguish the server.
    pub settings: Value,
    /// The model of the device that Rushes had.
    pub device_model: Value,
    /// The counts of the slow disk during the run.
    pub disk_statistics: Value,
    /// Last status of the daemon.
    pub status: Value,
    /// Machine and revision.
    pub environment: Value,
    /// In a mixed run the report of the recorders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Box<WriteReport>>,
    /// In `fill` the report of the clients that filled the disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filling: Option<Box<FillReport>>,
    /// In a run in which the pool tidied itself the report of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tidying: Option<Box<TidyReport>>,
    /// Lateness of each frame of each player, with `--timeline`. Units: ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Vec<Timeline>>,
}

/// A player's frames.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// The player's stream.
    pub stream: u64,
    /// Its start after the first player's. Units: s.
    pub start_s: f64,
    /// Units: ms.
    pub lateness_ms: Vec<f32>,
}

/// A player in numbers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StreamRow {
    /// Stream of the stage.
    pub stream: u64,
    /// Under contract from its first read on: every read was due. A contract withdrawn later counts
    /// all the same.
    pub admitted: bool,
    /// Its standing in the daemon's last status that had it.
    pub standing: Option<String>,
    /// Frames that it had to play.
    pub frames: u64,
    /// Frames past their deadline, or that never came.
    pub late_frames: u64,
    /// Units: ms.
    pub worst_lateness_ms: f64,
    /// The median lateness of its frames; negative: early.
    pub lateness_ms_p50: f64,
    /// The 99th percentile.
    pub lateness_ms_p99: f64,
    /// Units: ms.
    pub open_ms: f64,
    /// Units: ms.
    pub first_frame_ms: f64,
    /// Units: bytes.
    pub bytes_wrong: u64,
    /// First error.
    pub error: Option<String>,
}

/// The results of one player after a run.
#[derive(Clone, Debug)]
pub struct Played {
    /// Its own result.
    pub playback: Playback,
    /// Its standings by the daemon, in order of time.
    pub standings: Vec<String>,
    /// It was under contract from its first read on.
    pub admitted: bool,
}

impl StreamRow {
    /// A row from a player's results.
    ///
    /// Units    limit_ms: lateness of frames that never came
    pub fn new(played: &Played, frame_count: u64, limit_ms: f64) -> StreamRow {
        let playback = &played.playback;
        let missing = frame_count.saturating_sub(playback.lateness_ms.len() as u64);
        let late = playback.lateness_ms.iter().filter(|ms| **ms > 0.0).count() as u64;
        let mut sorted: Vec<f64> = playback
            .lateness_ms
            .iter()
            .map(|ms| f64::from(*ms))
            .collect();
        sorted.extend((0..missing).map(|_| limit_ms));
        sorted.sort_by(f64::total_cmp);
        let share = |permille: usize| {
            let index = (sorted.len() * permille / 1000).min(sorted.len().saturating_sub(1));
            sorted.get(index).copied().unwrap_or(limit_ms)
        };
        StreamRow {
            stream: playback.stream,
            admitted: played.admitted,
            standing: played.standings.last().cloned(),
            frames: frame_count,
            late_frames: late + missing,
            worst_lateness_ms: share(1000),
            lateness_ms_p50: share(500),
            lateness_ms_p99: share(990),
            open_ms: playback.open_ms,
            first_frame_ms: if playback.lateness_ms.is_empty() {
                limit_ms
            } else {
                playback.first_frame_ms
            },
            bytes_wrong: playback.bytes_wrong,
            error: playback.error.clone(),
        }
    }
}

impl Report {
    /// Take the rows of the players, and compute the figures over all players.
    pub fn add_streams(&mut self, rows: Vec<StreamRow>) {
        let worst = |f: fn(&StreamRow) -> f64| rows.iter().map(f).fold(f64::NEG_INFINITY, f64::max);
        self.worst_lateness_ms = worst(|row| row.worst_lateness_ms);
        self.first_frame_ms_max = worst(|row| row.first_frame_ms);
        self.open_ms_max = worst(|row| row.open_ms);
        self.streams = rows.len() as u64;
        self.frames = rows.iter().map(|row| row.frames).sum();
        self.late_frames = rows.iter().map(|row| row.late_frames).sum();
        self.late_streams = rows.iter().filter(|row| row.late_frames > 0).count() as u64;
        let admitted = rows.iter().filter(|row| row.admitted);
        self.streams_admitted = admitted.clone().count() as u64;
        self.late_frames_admitted = admitted.map(|row| row.late_frames).sum();
        self.bytes_wrong += rows.iter().map(|row| row.bytes_wrong).sum::<u64>();
        self.errors.extend(rows.iter().filter_map(|row| {
            let error = row.error.as_ref()?;
            Some(format!("stream {}: {error}", row.stream))
        }));
        self.per_stream = rows;
    }

    /// Add the results of copiers in so many seconds.
    pub fn add_copies(&mut self, tally: Tally, seconds: f64) {
        self.copy_bytes = tally.bytes;
        self.copy_seconds = seconds;
        self.copy_mb_per_s = tally.bytes as f64 / 1e6 / seconds.max(1e-9);
        self.copy_files = tally.file_count;
        self.copy_failures = tally.failures;
        self.bytes_wrong += tally.bytes_wrong;
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{}{}: {} streams of {:.0} Mb/s, {:.0} s, preroll {:.0} ms, {}{}",
            self.head.words(),
            match self.head.layout() {
                "" | "plain" => String::new(),
                layout => format!(", {layout} of {}", self.head.disks.unwrap_or(1)),
            },
            self.streams,
            self.bitrate as f64 / 1e6,
            self.seconds,
            self.preroll_ms,
            self.start,
            if self.sequence {
                ", one file a frame"
            } else {
                ""
            }
        )?;
        writeln!(
            out,
            "  {:>6} {:>10} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "stream", "standing", "late", "worst ms", "p99 ms", "p50 ms", "open ms", "first ms"
        )?;
        for row in &self.per_stream {
            writeln!(
                out,
                "  {:>6} {:>10} {:>7} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                row.stream,
                row.standing.as_deref().unwrap_or("-"),
                row.late_frames,
                row.worst_lateness_ms,
                row.lateness_ms_p99,
                row.lateness_ms_p50,
                row.open_ms,
                row.first_frame_ms
            )?;
        }
        writeln!(
            out,
            "  late frames {} of {} in {} of {} streams; admitted {} with {} late; worst {:.1} ms; first frame {:.1} ms",
            self.late_frames,
            self.frames,
            self.late_streams,
            self.streams,
            self.streams_admitted,
            self.late_frames_admitted,
            self.worst_lateness_ms,
            self.first_frame_ms_max
        )?;
        if self.copies > 0 {
            writeln!(
                out,
                "  copies {}: {:.1} MB/s together, {} whole files, {} failed",
                self.copies,
                self.copy_mb_per_s,
                self.copy_files,
                self.copy_failures.len()
            )?;
        }
        for storm in &self.storm {
            writeln!(
                out,
                "  storm client: {} look-ups (worst {:.0} ms), {} listings (worst {:.0} ms)",
                storm.stat_count, storm.stat_ms_max, storm.list_count, storm.list_ms_max
            )?;
        }
        writeln!(
            out,
            "  wrong bytes {}; server CPU {:.2} s, players' {:.2} s, machine's {:.2} s, stolen {:.2} s; server memory at most {} MiB",
            self.bytes_wrong,
            self.server_cpu_s,
            self.players_cpu_s,
            self.machine_cpu_s,
            self.stolen_cpu_s,
            self.server_memory_bytes_peak >> 20
        )?;
        for error in self.errors.iter().chain(&self.copy_failures) {
            writeln!(out, "  {error}")?;
        }
        if let Some(filling) = &self.filling {
            write!(out, "{}", filling.table())?;
        }
        if let Some(tidying) = &self.tidying {
            write!(out, "{}", tidying.text())?;
        }
        if let Some(recording) = &self.recording {
            recording.write_table(out)?;
        }
        Ok(())
    }
}

impl Outcome for Report {
    fn table(&self) -> Result<String> {
        let mut out = String::new();
        self.write_table(&mut out)?;
        Ok(out)
    }

    /// A server that returns wrong bytes or breaks off a copy has failed, however early its frames
    /// come.
    ///
    /// Errors   the server has failed
    fn check(&self) -> Result<()> {
        ensure!(
            self.bytes_wrong == 0 && self.copy_failures.is_empty(),
            "{} wrong bytes and {} failed copies, expected none; the report above has them",
            self.bytes_wrong,
            self.copy_failures.len()
        );
        self.filling
            .as_ref()
            .map_or(Ok(()), |filling| filling.check())?;
        self.tidying
            .as_ref()
            .map_or(Ok(()), |tidying| tidying.check())?;
        self.recording
            .as_ref()
            .map_or(Ok(()), |recording| recording.check())
    }
}

/// The machine, the kernel and the revision of the measured programs.
pub fn environment() -> Value {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let revision = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()
        .filter(|out| out.status.success())
        .map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    serde_json::json!({
        "lab_version": env!("CARGO_PKG_VERSION"),
        "git_revision": revision,
        "kernel": numbers_of(&release),
        "cpu": cpu,
        "core_count": std::thread::available_parallelism().map(usize::from).unwrap_or(0),
        "memory_bytes": rustix::system::sysinfo().totalram as u64,
    })
}

/// Processor time of the whole machine since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Processors {
    /// Time that the processors worked. Units: s.
    pub busy_s: f64,
    /// Time in which the machine had work and its host gave the processor to others. Units: s.
    pub stolen_s: f64,
}

impl Processors {
    /// The times until now; 0 where the kernel does not count them.
    pub fn now() -> Processors {
        Processors::of(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn of(stat: &str) -> Processors {
        /// `USER_HZ`.
        const TICKS_PER_S: f64 = 100.0;
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<f64> = line
            .split_whitespace()
            .skip(1)
            .map_while(|word| word.parse().ok())
            .collect();
        let at = |index: usize| ticks.get(index).copied().unwrap_or(0.0) / TICKS_PER_S;
        // user, nice, system, idle, iowait, irq, softirq, steal: proc_stat(5).
        Processors {
            busy_s: at(0) + at(1) + at(2) + at(5) + at(6),
            stolen_s: at(7),
        }
    }

    /// The times from `then` to these.
    pub fn since(self, then: Processors) -> Processors {
        Processors {
            busy_s: self.busy_s - then.busy_s,
            stolen_s: self.stolen_s - then.stolen_s,
        }
    }
}

/// The numbers of a kernel's release, without the suffix that names its builder and sometimes its
/// host.
fn numbers_of(release: &str) -> &str {
    let end = release.find(|c: char| c != '.' && !c.is_ascii_digit());
    &release[..end.unwrap_or(release.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_what_the_kernel_says() {
        let stat = "cpu  100 200 300 4000 500 60 70 800 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let spent = Processors::of(stat);
        assert_eq!((spent.busy_s, spent.stolen_s), (7.3, 8.0));
        assert_eq!(spent.since(spent), Processors::default());
        assert_eq!(Processors::of(""), Processors::default());
    }

    #[test]
    fn of_a_kernel_only_its_numbers_are_told() {
        for release in ["6.1.44", "6.1.44-13-amd64", "6.1.44+deb12"] {
            assert_eq!(numbers_of(release), "6.1.44");
        }
    }

    fn played(lateness: &[f32], standings: &[&str]) -> Played {
        Played {
            playback: Playback {
                lateness_ms: lateness.to_vec(),
                first_frame_ms: 20.0,
                ..Playback::default()
            },
            standings: standings.iter().map(|s| (*s).to_owned()).collect(),
            admitted: standings.first() == Some(&"contract"),
        }
    }

    #[test]
    fn frames_that_never_came_are_late() {
        let row = StreamRow::new(&played(&[-400.0, 5.0], &[]), 10, 9000.0);
        assert_eq!(row.late_frames, 9);
        assert_eq!(row.worst_lateness_ms, 9000.0);
        assert!(!row.admitted);
    }

    #[test]
    fn late_frames_of_admitted_streams_are_counted_apart() {
        let rows = vec![
            StreamRow::new(&played(&[-1.0, 3.0], &["refused"]), 2, 0.0),
            StreamRow::new(&played(&[-1.0, -3.0], &["contract", "best_effort"]), 2, 0.0),
        ];
        let mut report = Report::default();
        report.add_streams(rows);
        assert_eq!((report.late_frames, report.late_frames_admitted), (1, 0));
        assert_eq!((report.late_streams, report.streams_admitted), (1, 1));
        assert_eq!(report.worst_lateness_ms, 3.0);
    }

    #[test]
    fn wrong_bytes_and_failed_copies_are_failures_and_late_frames_are_not() {
        let late = Report {
            late_frames: 9,
            ..Report::default()
        };
        assert!(late.check().is_ok());
        let wrong = Report {
            bytes_wrong: 1,
            ..Report::default()
        };
        assert!(wrong.check().is_err());
        let broken_off = Report {
            copy_failures: vec![String::from("0 bytes of 5 came")],
            ..Report::default()
        };
        assert!(broken_off.check().is_err());
    }
}
