// SPDX-License-Identifier: Apache-2.0
//! Writers at work against one server, and four questions: acknowledged in time, on the disk in
//! time, in few fragments, with the right bytes?
//!
//! A run has four parts. Writers write. Then `syncfs` on the file system below brings all bytes to
//! the disk; that is the final sync. Then the lab stops the server, reads each file cold, past
//! every cache, and compares it. At last [`crate::reports::arrival`] compares the acknowledgements
//! with the disk's notes.

use crate::clients::client::{Client, Crowd};
use crate::clients::player::{now_ns, sleep_until_ns};
use crate::clients::writer::{self, Extend, Recorded, Target};
use crate::disk::Arrival;
use crate::experiments::play::Start;
use crate::reports::arrival::{self, Arrived, Told};
use crate::reports::head::Head;
use crate::reports::report::{self, Report};
use crate::reports::written::{FileRow, WriteReport, lateness_ms};
use crate::servers::server::{self, Kind, Server, Way};
use crate::stage::blocks::BlockStatistics;
use crate::stage::footage::mix;
use crate::stage::room::{Room, go_on, pause};
use crate::stage::take::Take;
use crate::stage::{Stage, fragments};
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU64;
use std::sync::mpsc;
use std::time::Duration;

/// Acknowledged bytes that are not on the device after so long are late.
const DEVICE_LATE: Duration = Duration::from_secs(5);
/// How long we wait for blocks that a sync did not bring to the disk.
const MISSING_MAX: Duration = Duration::from_secs(60);
/// Short, since the final sync may begin so much too late.
const WATCH_EVERY: Duration = Duration::from_millis(20);
/// Pause between two searches for missing blocks, each with a sync.
const MISSING_EVERY: Duration = Duration::from_millis(250);
const SYNC_WATCH_EVERY: Duration = Duration::from_millis(50);
const BEGIN_IN: Duration = Duration::from_millis(300);
const READ_BYTES: usize = 4 << 20;
/// Rate of all writers together below which a run without pacing fails. Units: bytes a second.
const SLOWEST: u64 = 2_000_000;

/// How fast writers write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// So many frames a second, each when it is due.
    Frames {
        /// Units: bits a second.
        bitrate: u64,
        /// Frames in 1000 s.
        frames_per_kilosecond: u64,
    },
    /// One write after the other.
    Max {
        /// Size of one write. Units: bytes.
        write_bytes: u64,
    },
}

/// Writers.
#[derive(Clone, Debug)]
pub struct Record {
    /// `record` or `copy-in`.
    pub experiment: &'static str,
    /// Number of processes.
    pub writer_count: u64,
    /// Each writes so many files, one after the other.
    pub files_per_writer: u64,
    /// Size of each. Units: bytes.
    pub file_bytes: u64,
    /// How fast they write.
    pub pace: Pace,
    /// Time between open and the first deadline.
    pub preroll: Duration,
    /// When writers start.
    pub start: Start,
    /// Time between two starts.
    pub stagger: Duration,
    /// How long a collapsed run goes on.
    pub grace: Duration,
    /// How writers extend a file before they write it.
    pub extend: Extend,
    /// Writers flush each file before they close it.
    pub flush: bool,
    /// Keep the lateness of every frame in the report.
    pub timeline: bool,
    /// Seed of the content.
    pub seed: u64,
}

/// The beginning of the writers, and the disks' counts then.
#[derive(Debug)]
pub struct Begun {
    at_ns: u64,
    blocks: BlockStatistics,
}

/// The results when the disk has everything and the server still runs.
#[derive(Debug)]
pub struct Performed {
    writers: Vec<writer::Done>,
    begun_ns: u64,
    asked_ns: u64,
    synced_ns: u64,
    arrivals: Option<Vec<Arrival>>,
    report: WriteReport,
}

impl Performed {
    /// Take the server's figures of a mixed run, which count for all clients together.
    pub fn share(&mut self, all: &Report) {
        self.report.server_cpu_s = all.server_cpu_s;
        self.report.machine_cpu_s = all.machine_cpu_s;
        self.report.stolen_cpu_s = all.stolen_cpu_s;
        self.report.server_memory_bytes_peak = all.server_memory_bytes_peak;
    }
}

impl Record {
    /// Size of a recording of this length. Units: bytes.
    pub fn recording_bytes(bitrate: u64, frames_per_kilosecond: u64, seconds: f64) -> u64 {
        let frames = (seconds * frames_per_kilosecond as f64 / 1000.0).round() as u64;
        frames * frame_bytes(bitrate, frames_per_kilosecond)
    }

    /// Bytes that all writers write. Units: bytes.
    pub fn bytes(&self) -> u64 {
        self.writer_count * self.files_per_writer * self.file_bytes
    }

    fn frame_bytes(&self) -> u64 {
        match self.pace {
            Pace::Frames {
                bitrate,
                frames_per_kilosecond,
            } => frame_bytes(bitrate, frames_per_kilosecond),
            Pace::Max { write_bytes } => write_bytes,
        }
        .max(1)
    }

    fn frame_count(&self) -> u64 {
        self.file_bytes.div_ceil(self.frame_bytes())
    }

    /// Time between frames; 0 without pacing. Units: ns.
    fn period_ns(&self) -> u64 {
        match self.pace {
            Pace::Frames {
                frames_per_kilosecond,
                ..
            } => 1_000_000_000_000 / frames_per_kilosecond.max(1),
            Pace::Max { .. } => 0,
        }
    }

    /// How long writers take when all goes well; unknown without pacing.
    fn length(&self) -> Option<Duration> {
        let period_ns = self.period_ns();
        (period_ns > 0).then(|| Duration::from_nanos(self.frame_count() * period_ns))
    }

    /// A writer gives up so long after its beginning.
    fn limit(&self) -> Duration {
        match self.length() {
            Some(length) => length * self.files_per_writer as u32 + self.preroll + self.grace,
            None => Duration::from_secs(60 + self.bytes() / SLOWEST),
        }
    }

    /// Key of the stamps: the same for the same seed, never 0.
    fn key(&self) -> NonZeroU64 {
        NonZeroU64::MIN.saturating_add(mix(self.seed) >> 1)
    }

    fn targets(&self, writer: u64) -> Vec<Target> {
        (0..self.files_per_writer)
            .map(|file| Target {
                number: writer * self.files_per_writer + file,
                path: if self.files_per_writer == 1 {
                    format!("{}/clip.mov", folder(writer))
                } else {
                    format!("{}/clip{file:03}.mov", folder(writer))
                },
            })
            .collect()
    }

    /// Write and judge. The stage needs room for [`Record::bytes`].
    ///
    /// Errors   the setup failed; bad results of the server are not errors but figures
    pub fn run(
        &self,
        room: &Room,
        stage: &mut Stage,
        spec: &server::Spec,
        quiet: bool,
    ) -> Result<WriteReport> {
        stage.timing(false)?;
        stage.cool()?;
        self.prepare(stage, spec)?;
        let server = Server::start(room, "server", stage, spec)?;
        let performed = self.perform(stage, &server, quiet);
        let performed = server.stop_after(stage, spec.kind, performed)?;
        let mut report = self.judge(stage, spec, performed, quiet)?;
        report.environment = report::environment();
        Ok(report)
    }

    /// Make the writers' folders.
    pub fn prepare(&self, stage: &Stage, spec: &server::Spec) -> Result<()> {
        ensure!(
            spec.way == Way::Smb || spec.kind == Kind::Stock || stage.is_pool(),
            "through the daemon's own door the lab only reads; use --door smb"
        );
        for writer in 0..self.writer_count {
            stage.make_folder_anew(&folder(writer))?;
            stage.use_folder(&folder(writer))?;
        }
        Ok(())
    }

    fn perform(&self, stage: &Stage, server: &Server, quiet: bool) -> Result<Performed> {
        let mut writers = self.start_writers(server)?;
        stage.timing(true)?;
        stage.reset_statistics()?;
        let begun_ns = now_ns() + BEGIN_IN.as_nanos() as u64;
        let begun = self.begin(stage, &mut writers, begun_ns, 0)?;
        sleep_until_ns(begun_ns);
        let cpu_before = server.cpu()?;
        let machine_before = report::Processors::now();
        let crowd = Crowd::<writer::Done>::gather(writers);
        self.wait(&crowd, server, quiet)?;
        let mut performed = self.settle(stage, crowd.results()?, begun)?;
        let report = &mut performed.report;
        report.server_cpu_s = (server.cpu()? - cpu_before).as_secs_f64();
        let machine = report::Processors::now().since(machine_before);
        (report.machine_cpu_s, report.stolen_cpu_s) = (machine.busy_s, machine.stolen_s);
        report.server_memory_bytes_peak = server.memory_bytes_peak()?;
        report.settings = server.settings().clone();
        report.device_model = server
            .daemon()
            .map_or(Value::Null, |daemon| daemon.model().clone());
        report.status = server
            .daemon()
            .and_then(|daemon| daemon.status().ok())
            .unwrap_or(Value::Null);
        Ok(performed)
    }

    /// Start the processes; they are connected and wait for their beginning.
    pub fn start_writers(&self, server: &Server) -> Result<Vec<Client>> {
        let mut writers = Vec::new();
        for writer in 0..self.writer_count {
            let job = writer::Job {
                address: server.address().clone(),
                key: self.key().get(),
                files: self.targets(writer),
                file_bytes: self.file_bytes,
                frame_bytes: self.frame_bytes(),
                period_ns: self.period_ns(),
                extend: self.extend,
                flush: self.flush,
                limit_ns: self.limit().as_nanos() as u64,
            };
            writers.push(Client::start("writer", server, &job)?);
        }
        for writer in &mut writers {
            writer.wait_ready()?;
        }
        Ok(writers)
    }

    /// Send the writers the instants of their beginnings, the first `index` starts after `t0_ns`;
    /// the disk begins to note stamped pages.
    pub fn begin(
        &self,
        stage: &Stage,
        writers: &mut [Client],
        t0_ns: u64,
        index: u64,
    ) -> Result<Begun> {
        let begun = Begun {
            at_ns: t0_ns,
            blocks: stage.block_statistics()?,
        };
        stage.watch_stamps(Some(self.key()))?;
        for (writer, index) in writers.iter_mut().zip(index..) {
            let delay = match self.start {
                Start::Together => 0,
                Start::Staggered => index * self.stagger.as_nanos() as u64,
            };
            writer.begin(t0_ns + delay)?;
        }
        Ok(begun)
    }

    fn wait(&self, crowd: &Crowd<writer::Done>, server: &Server, quiet: bool) -> Result<()> {
        let target = if quiet {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let length = self.length().map(|length| {
            let stagger = match self.start {
                Start::Together => Duration::ZERO,
                Start::Staggered => self.stagger * self.writer_count as u32,
            };
            (length * self.files_per_writer as u32 + stagger).as_millis() as u64
        });
        let bar = ProgressBar::with_draw_target(length, target);
        let template = match length {
            Some(_) => "{msg} {wide_bar} {elapsed}",
            None => "{msg} {spinner} {elapsed}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let kind = server.settings()["server"].as_str().unwrap_or_default();
        bar.set_message(format!("{kind}: {} writers", self.writer_count));
        while !crowd.is_done() {
            pause(WATCH_EVERY)?;
            bar.inc(WATCH_EVERY.as_millis() as u64);
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Bring all bytes to the disk and collect its notes.
    pub fn settle(
        &self,
        stage: &Stage,
        writers: Vec<writer::Done>,
        begun: Begun,
    ) -> Result<Performed> {
        let asked_ns = now_ns();
        sync(stage)?;
        let mut synced_ns = now_ns();
        let mut arrivals = stage.arrivals()?;
        // A server may keep acknowledged bytes in memory that a sync of the file system does not
        // reach; it must write them all the same.
        while let Some(log) = &arrivals
            && now_ns() - asked_ns < MISSING_MAX.as_nanos() as u64
            && self.missing(&Arrived::new(log), &writers, synced_ns) > 0
        {
            pause(MISSING_EVERY)?;
            sync(stage)?;
            synced_ns = now_ns();
            arrivals = stage.arrivals()?;
        }
        stage.watch_stamps(None)?;
        Ok(Performed {
            writers,
            begun_ns: begun.at_ns,
            asked_ns,
            synced_ns,
            arrivals,
            report: WriteReport {
                disk_statistics: stage.statistics()?,
                block_statistics: begun.blocks.until(&stage.block_statistics()?),
                ..WriteReport::default()
            },
        })
    }

    fn missing(&self, arrived: &Arrived, writers: &[writer::Done], end_ns: u64) -> u64 {
        let files = writers.iter().flat_map(|writer| &writer.files);
        files
            .map(|file| arrived.ages(&self.told(file), u64::MAX, end_ns))
            .map(|ages| ages.missing_blocks)
            .sum()
    }

    fn told(&self, file: &Recorded) -> Told {
        Told {
            number: file.number,
            frame_bytes: self.frame_bytes(),
            file_bytes: self.file_bytes,
            acknowledged_ns: file.acknowledged_ns.clone(),
        }
    }

    /// Read everything back, past all caches, when the server is gone; make the report.
    pub fn judge(
        &self,
        stage: &mut Stage,
        spec: &server::Spec,
        performed: Performed,
        quiet: bool,
    ) -> Result<WriteReport> {
        let mut report = performed.report;
        report.head = Head::of(self.experiment)
            .on(stage)
            .by(spec.way)
            .with_server(spec.kind.name());
        report.cache_bytes_max = spec.data_bytes();
        let closed_ns = performed
            .writers
            .iter()
            .flat_map(|writer| &writer.files)
            .map(|file| {
                let last = file.acknowledged_ns.last().copied().unwrap_or_default();
                file.closed_ns.max(last)
            })
            .max()
            .unwrap_or(performed.begun_ns);
        self.describe(&mut report, stage);
        let opened = performed.writers.iter().flat_map(|writer| &writer.files);
        let begun_ns = opened.map(|file| file.start_ns).min();
        let wall_ns = closed_ns.saturating_sub(begun_ns.unwrap_or(performed.begun_ns));
        report.wall_s = wall_ns as f64 / 1e9;
        report.final_sync_s = (performed.synced_ns - performed.asked_ns) as f64 / 1e9;
        report.writers_cpu_s = performed.writers.iter().map(|writer| writer.cpu_s).sum();
        report.errors = performed
            .writers
            .iter()
            .filter_map(|writer| writer.error.clone())
            .collect();
        let lost = report.disk_statistics["stamps_lost_count"].as_u64();
        ensure!(
            lost.unwrap_or(0) == 0,
            "the disk's log of arrivals was too small: {} runs of pages are not in it",
            lost.unwrap_or(0)
        );
        let arrived = performed.arrivals.as_deref().map(Arrived::new);
        stage.cool()?;
        let bar = read_progress(self.bytes(), quiet);
        let mut rows = Vec::new();
        let mut ages = Vec::new();
        for writer in 0..self.writer_count {
            let done = performed.writers.get(writer as usize);
            for (index, target) in self.targets(writer).into_iter().enumerate() {
                let nothing = Recorded {
                    number: target.number,
                    ..Recorded::default()
                };
                let file = done
                    .and_then(|done| done.files.get(index))
                    .unwrap_or(&nothing);
                let mut row = self.row(writer, &target, file);
                if file.start_ns > 0 {
                    let path = stage.root().join(&target.path);
                    for native in stage.native(&target.path)? {
                        row.fragments += fragments(&native)?;
                    }
                    row.bytes_wrong = self.wrong_bytes(&path, file, &bar)?;
                }
                if let Some(arrived) = &arrived {
                    let limit = DEVICE_LATE.as_nanos() as u64;
                    let age = arrived.ages(&self.told(file), limit, performed.synced_ns);
                    row.device_late_blocks = Some(age.late_blocks);
                    row.device_worst_age_s = Some(age.worst_s);
                    ages.push(age);
                }
                rows.push(row);
            }
        }
        bar.finish_and_clear();
        if arrived.is_some() {
            let all = arrival::together(ages.into_iter());
            report.device_late_blocks = Some(all.late_blocks);
            report.device_late_bytes = Some(all.late_bytes);
            report.device_missing_blocks = Some(all.missing_blocks);
            report.device_worst_age_s = Some(all.worst_s);
        }
        report.add_files(rows);
        Ok(report)
    }

    fn describe(&self, report: &mut WriteReport, stage: &Stage) {
        report.write_back = stage.write_back();
        report.writers = self.writer_count;
        report.files_per_writer = self.files_per_writer;
        report.file_bytes = self.file_bytes;
        report.frame_bytes = self.frame_bytes();
        if let Pace::Frames {
            bitrate,
            frames_per_kilosecond,
        } = self.pace
        {
            report.bitrate = Some(bitrate);
            report.frames_per_s = Some(frames_per_kilosecond as f64 / 1e3);
            report.seconds = self.length().map(|length| length.as_secs_f64());
        }
        report.preroll_ms = self.preroll.as_secs_f64() * 1e3;
        report.start = match self.start {
            Start::Staggered => "staggered".to_owned(),
            Start::Together => "together".to_owned(),
        };
        report.stagger_ms = self.stagger.as_secs_f64() * 1e3;
        report.extend = match self.extend {
            Extend::None => "none".to_owned(),
            Extend::OneByte(_) => "one-byte".to_owned(),
            Extend::SetEof => "set-eof".to_owned(),
        };
        report.flush = self.flush;
        report.device_late_limit_s = DEVICE_LATE.as_secs_f64();
    }

    fn row(&self, writer: u64, target: &Target, file: &Recorded) -> FileRow {
        let mut row = FileRow {
            number: target.number,
            writer,
            path: target.path.clone(),
            frames: self.frame_count(),
            open_ms: file.open_ms,
            extend_ms: file.extend_ms,
            flush_ms: file.flush_ms,
            bytes: self.told(file).bytes(),
            ..FileRow::default()
        };
        let end_ns = file
            .closed_ns
            .max(file.acknowledged_ns.last().copied().unwrap_or_default());
        let wall_s = end_ns.saturating_sub(file.start_ns) as f64 / 1e9;
        row.mb_per_s = row.bytes as f64 / 1e6 / wall_s.max(1e-9);
        if self.period_ns() == 0 {
            row.late_frames = row.frames - file.acknowledged_ns.len() as u64;
            return row;
        }
        let lateness: Vec<f64> = (0..)
            .zip(&file.acknowledged_ns)
            .map(|(frame, at_ns)| {
                let preroll_ns = self.preroll.as_nanos() as u64;
                lateness_ms(file.start_ns, preroll_ns, self.period_ns(), frame, *at_ns)
            })
            .collect();
        row.add_lateness(&lateness, self.limit().as_secs_f64() * 1e3);
        row.lateness_ms = self
            .timeline
            .then(|| lateness.iter().map(|ms| *ms as f32).collect());
        row
    }

    /// Wrong bytes among the acknowledged ones; a file that is longer or shorter than it should be
    /// is wrong by the difference.
    fn wrong_bytes(
        &self,
        path: &std::path::Path,
        file: &Recorded,
        bar: &ProgressBar,
    ) -> Result<u64> {
        let cannot = || format!("{} cannot be read", path.display());
        let take = Take {
            key: self.key().get(),
            number: file.number,
        };
        let wanted = self.told(file).bytes();
        let mut native = File::open(path).with_context(cannot)?;
        let length = native.metadata().with_context(cannot)?.len();
        let mut buffer = vec![0; READ_BYTES];
        let (mut done, mut wrong) = (0, 0);
        while done < wanted {
            go_on()?;
            let most = (wanted - done).min(READ_BYTES as u64) as usize;
            let got = native.read(&mut buffer[..most]).with_context(cannot)?;
            if got == 0 {
                break;
            }
            wrong += take.wrong_bytes(done, &buffer[..got]);
            done += got as u64;
            bar.inc(got as u64);
        }
        // The right length of a file is unknown if its writer broke off.
        let excess = if wanted == self.file_bytes {
            length.saturating_sub(wanted)
        } else {
            0
        };
        Ok(wrong + (wanted - done) + excess)
    }
}

fn frame_bytes(bitrate: u64, frames_per_kilosecond: u64) -> u64 {
    (u128::from(bitrate) * 1000 / 8 / u128::from(frames_per_kilosecond.max(1))) as u64
}

/// A writer's folder below the share: in that of the footage, so that its rules apply.
fn folder(writer: u64) -> String {
    format!("footage/take{writer:02}")
}

/// Sync the file systems below; give up at an interrupt.
pub fn sync(stage: &Stage) -> Result<()> {
    let (told, done) = mpsc::channel();
    let roots: Result<Vec<File>, std::io::Error> =
        stage.folders_to_sync()?.iter().map(File::open).collect();
    let roots = roots?;
    std::thread::spawn(move || {
        let result = roots.iter().try_for_each(rustix::fs::syncfs);
        // Close the folders before the stage unmounts.
        drop(roots);
        let _ = told.send(result);
    });
    loop {
        match done.recv_timeout(SYNC_WATCH_EVERY) {
            Ok(result) => return result.context("the file system cannot be synced"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                bail!("the thread that syncs is gone")
            }
        }
        if let Err(error) = go_on() {
            // The file system is in use until the sync ends; without timing that is soon.
            stage.timing(false)?;
            let _ = done.recv_timeout(MISSING_MAX);
            return Err(error);
        }
    }
}

/// The progress bar of reading back.
pub fn read_progress(bytes: u64, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let bar = ProgressBar::with_draw_target(Some(bytes), target);
    if let Ok(style) = ProgressStyle::with_template(
        "reading back {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
    ) {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(pace: Pace) -> Record {
        Record {
            experiment: "record",
            writer_count: 3,
            files_per_writer: 2,
            file_bytes: 1_250_000,
            pace,
            preroll: Duration::from_millis(500),
            start: Start::Staggered,
            stagger: Duration::from_millis(250),
            grace: Duration::from_secs(10),
            extend: Extend::None,
            flush: false,
            timeline: false,
            seed: 1,
        }
    }

    #[test]
    fn a_hundred_megabits_are_frames_of_500_kb_every_40_ms() {
        assert_eq!(
            Record::recording_bytes(100_000_000, 25_000, 60.0),
            750_000_000
        );
        let paced = record(Pace::Frames {
            bitrate: 100_000_000,
            frames_per_kilosecond: 25_000,
        });
        assert_eq!(
            (paced.frame_bytes(), paced.period_ns()),
            (500_000, 40_000_000)
        );
        // The last frame of a file may be shorter.
        assert_eq!(paced.frame_count(), 3);
        assert_eq!(paced.bytes(), 7_500_000);
    }

    #[test]
    fn files_of_all_writers_have_numbers_of_their_own() {
        let record = record(Pace::Max {
            write_bytes: 1 << 20,
        });
        let numbers: Vec<u64> = (0..3)
            .flat_map(|writer| record.targets(writer))
            .map(|target| target.number)
            .collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        assert_eq!(record.length(), None);
    }

    #[test]
    fn without_pacing_only_what_was_never_acknowledged_is_late() {
        let record = record(Pace::Max {
            write_bytes: 1 << 20,
        });
        let target = &record.targets(0)[0];
        let file = Recorded {
            start_ns: 1,
            acknowledged_ns: vec![90_000_000_000],
            ..Recorded::default()
        };
        let row = record.row(0, target, &file);
        assert_eq!((row.frames, row.late_frames, row.bytes), (2, 1, 1 << 20));
        assert_eq!(row.worst_lateness_ms, None);
    }
}
