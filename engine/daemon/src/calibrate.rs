// SPDX-License-Identifier: Apache-2.0
//! `rushes calibrate`: the model of a device, measured.
//!
//! Direct requests of the seven sizes of rt-Samba's Table 5, one at a time, in random order of
//! sizes and places: never contiguous, a third of them near the one before, the rest anywhere. Each
//! is a sample of time, size and distance; least squares make the model of them ([`fit`]). Writes
//! go to a scratch file only; a small read elsewhere before each moves the head to a known
//! distance.
//!
//! It does not know of the daemon's requests to the device: requests that others disturb lose
//! their weight in the fit, but a busy device is better measured when it is idle.

mod fit;
mod ground;
mod store;

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rushes_core::server::DeviceModel;
use rushes_core::units::ByteCount;
use serde::{Deserialize, Serialize};

use fit::{Sample, Terms};
use ground::{Aligned, BLOCK_BYTES, Ground, Random, Scratch};

pub use fit::Fit;
pub use ground::Source;
pub use store::{Identity, identity_of};

/// Sizes of requests: those of Table 5. Units: bytes.
pub const SIZES: [u64; 7] = [
    64 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
];

/// The device to measure, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A folder on the device, or a file in one.
    pub path: PathBuf,
    /// Within 8 s instead of a minute, and rougher.
    pub quick: bool,
    /// Measure writes too, on a scratch file; otherwise their model is that of the reads.
    pub writes: bool,
}

impl Options {
    fn budget(&self) -> Budget {
        match self.quick {
            true => Budget {
                read: Duration::from_millis(3800),
                write: Duration::from_millis(1900),
                sample_count_max: 60,
                scratch_bytes: 64 << 20,
            },
            false => Budget {
                read: Duration::from_secs(34),
                write: Duration::from_secs(17),
                sample_count_max: 400,
                scratch_bytes: 512 << 20,
            },
        }
    }
}

/// The time that a measurement may take.
#[derive(Clone, Copy, Debug)]
struct Budget {
    read: Duration,
    write: Duration,
    /// Of each size.
    sample_count_max: usize,
    scratch_bytes: u64,
}

/// The stages of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Writing the scratch file.
    Preparing,
    /// Timing reads.
    Reading,
    /// Timing writes.
    Writing,
}

/// How far a calibration is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The stage at work.
    pub stage: Stage,
    /// Part of that stage: 0 to 1, never less than before.
    pub part: f64,
}

/// One column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Size of the requests.
    pub bytes: u64,
    /// How many.
    pub count: u32,
    /// Throughput of one after the other at random places. Units: Mb/s (10⁶ bits).
    pub megabits_per_second: f64,
    /// Mean time of one. Units: ms.
    pub mean_ms: f64,
    /// Shortest. Units: ms.
    pub min_ms: f64,
    /// Longest. Units: ms.
    pub max_ms: f64,
}

/// A measured device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Of the file format.
    pub version: u32,
    /// Which device.
    pub identity: Identity,
    /// When, RFC 3339 in UTC.
    pub measured_at: String,
    /// True: the quick way.
    pub quick: bool,
    /// The source of the reads.
    pub source: Source,
    /// Why the requested measurement of writes failed, a sentence. None: they were measured, or
    /// not requested.
    #[serde(default)]
    pub writes_missing: Option<String>,
    /// The backing file, if the device is a loop device without direct I/O: the figures then
    /// include this machine's memory. None for all other devices.
    #[serde(default)]
    pub buffered_file: Option<String>,
    /// The model of reads.
    pub read: Fit,
    /// The model of writes.
    pub write: Fit,
    /// Random reads by size, ascending.
    pub read_table: Vec<Row>,
    /// Random writes by size, ascending; empty when they were not measured.
    pub write_table: Vec<Row>,
}

/// Why a device could not be measured.
#[derive(Debug)]
pub enum CalibrateError {
    /// The path is on a file system in memory, which has no device.
    NoDevice {
        /// The path that was asked for.
        path: PathBuf,
    },
    /// A program serves that file system.
    Program {
        /// The path that was asked for.
        path: PathBuf,
        /// The kind of mount, as the kernel calls it.
        kind: String,
    },
    /// Neither the block device nor a scratch file could be used.
    NoGround {
        /// The path that was asked for.
        path: PathBuf,
        /// The error of the scratch file.
        source: io::Error,
    },
    /// Too few requests succeeded for a model.
    TooFew {
        /// Those that did.
        sample_count: usize,
        /// Those that failed.
        failed_count: usize,
        /// The last failure.
        last: Option<io::Error>,
    },
    /// A step failed.
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A kept calibration makes no sense.
    Nonsense {
        /// The file.
        path: PathBuf,
        /// The text that was read, and the one expected.
        reason: String,
    },
}

impl CalibrateError {
    fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CalibrateError {
        let path = path.to_owned();
        move |source| CalibrateError::Io {
            operation,
            path,
            source,
        }
    }

    fn nonsense(path: &Path, reason: String) -> CalibrateError {
        CalibrateError::Nonsense {
            path: path.to_owned(),
            reason,
        }
    }
}

impl fmt::Display for CalibrateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CalibrateError::NoDevice { path } => write!(
                f,
                "{} is on a file system in memory: it has no device to measure. Give a folder on a disk.",
                path.display()
            ),
            CalibrateError::Program { path, kind } => write!(
                f,
                "{} is on a mount of kind {kind:?}, which a program serves (FUSE): the result \
                 would show that program and this machine's memory, not a disk. Give a folder on \
                 each of the disks below; for a pool, the folder of each member (`rushes pool ls \
                 CATALOGUE` lists them).",
                path.display()
            ),
            CalibrateError::NoGround { path, source } => write!(
                f,
                "the device under {} cannot be measured: its block device cannot be read (this \
                 takes root, and on flash 512 MiB of files), and no scratch file can be created \
                 there: {source}",
                path.display()
            ),
            CalibrateError::TooFew {
                sample_count,
                failed_count,
                last,
            } => {
                write!(
                    f,
                    "the device cannot be measured: only {sample_count} requests succeeded and \
                     {failed_count} failed"
                )?;
                last.as_ref()
                    .map_or(Ok(()), |error| write!(f, ", the last with: {error}"))
            }
            CalibrateError::Io {
                operation,
                path,
                source,
            } => write!(f, "cannot {operation} {}: {source}", path.display()),
            CalibrateError::Nonsense { path, reason } => write!(
                f,
                "{} is not a calibration: {reason}. Remove it or calibrate again.",
                path.display()
            ),
        }
    }
}

impl std::error::Error for CalibrateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CalibrateError::NoGround { source, .. } | CalibrateError::Io { source, .. } => {
                Some(source)
            }
            CalibrateError::TooFew { last, .. } => {
                last.as_ref().map(|error| error as &dyn std::error::Error)
            }
            _ => None,
        }
    }
}

/// `f_type` of tmpfs and ramfs (linux/magic.h).
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// `f_type` of FUSE (linux/magic.h).
const FUSE: u64 = 0x6573_5546;

/// Measures the device under `options.path`. Takes at most about 8 s when quick, a minute
/// otherwise, more only on a device that needs longer for two requests of each size.
///
/// Writes nothing but a nameless scratch file in that folder.
/// Errors   no device, no right to use it, or too many failing requests
pub fn calibrate(
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<Calibration, CalibrateError> {
    let folder = folder_of(&options.path)?;
    let status = rustix::fs::statfs(&folder)
        .map_err(|error| CalibrateError::io("stat", &folder)(error.into()))?;
    if MEMORY_FILE_SYSTEMS.contains(&(status.f_type as u64)) {
        return Err(CalibrateError::NoDevice { path: folder });
    }
    let under = store::under(&folder)?;
    // A mount of kind `fuseblk` has a disk, which can be measured.
    if status.f_type as u64 == FUSE && under.facts.is_none() {
        let kind = store::file_system_of(&folder).unwrap_or_else(|| String::from("fuse"));
        return Err(CalibrateError::Program { path: folder, kind });
    }
    let budget = options.budget();
    let mut random = Random::new(seed());
    let mut ground = Ground::device(&folder, &under);
    let needs_scratch = ground.as_ref().is_none_or(|ground| {
        ground.source == Source::DataOnDevice && ground.readable() < DATA_BYTES_MIN
    });
    let partition_offset = under.facts.as_ref().map_or(0, |f| f.partition_offset);
    let scratch = if options.writes || needs_scratch {
        scratch_bytes(&folder, budget.scratch_bytes).and_then(|bytes| {
            let mut tell = |part| {
                progress(Progress {
                    stage: Stage::Preparing,
                    part,
                });
            };
            Scratch::create(&folder, bytes, partition_offset, &mut random, &mut tell)
        })
    } else {
        Err(io::ErrorKind::Unsupported.into())
    };
    if needs_scratch {
        match (&mut ground, &scratch) {
            (Some(ground), Ok(scratch)) if scratch.is_placed() => ground.add(scratch.regions()),
            (_, Ok(scratch)) => {
                let made = Ground::scratch(scratch, under.identity.bytes);
                ground = Some(made.map_err(CalibrateError::io("open", &folder))?);
            }
            (_, Err(_)) => ground = None,
        }
    }
    let Some(ground) = ground else {
        let source = scratch.err().unwrap_or(io::ErrorKind::NotFound.into());
        return Err(CalibrateError::NoGround {
            path: folder,
            source,
        });
    };
    let mut meter = Meter {
        ground: &ground,
        random,
        buffer: Aligned::new(SIZES[SIZES.len() - 1]),
        last_end: 0,
        failed_count: 0,
        last_error: None,
    };
    let reads = meter.reads(&budget, progress);
    let distances = match ground.source {
        Source::ScratchFile => Terms::NoSpan,
        _ => Terms::All,
    };
    let read = fit_of(&reads, distances).ok_or_else(|| meter.too_few(reads.len()))?;
    let (write, writes, writes_missing) = match scratch {
        Ok(scratch) if options.writes => {
            let writes = meter.writes(&scratch, &budget, progress);
            let write = write_fit(&writes, &ground, &scratch, &read);
            let missing = (write.is_none()).then(|| meter.too_few(writes.len()).to_string());
            (write, writes, missing)
        }
        Err(error) if options.writes => {
            let why = format!(
                "cannot create a scratch file in {}: {error}",
                folder.display()
            );
            (None, Vec::new(), Some(why))
        }
        Ok(_) | Err(_) => (None, Vec::new(), None),
    };
    let mut read = read;
    read.span_estimated = distances == Terms::NoSpan;
    Ok(Calibration {
        version: store::VERSION,
        identity: under.identity,
        measured_at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        quick: options.quick,
        source: ground.source,
        writes_missing,
        buffered_file: under
            .facts
            .as_ref()
            .and_then(|facts| facts.buffered_file.clone()),
        read,
        write: write.unwrap_or(Fit {
            estimated: true,
            span_estimated: true,
            sample_count: 0,
            ..read
        }),
        read_table: table_of(&reads),
        write_table: table_of(&writes),
    })
}

/// Less data than this on flash is read from the drive's own memory. Units: bytes.
const DATA_BYTES_MIN: u64 = 512 << 20;

fn folder_of(path: &Path) -> Result<PathBuf, CalibrateError> {
    let path = path
        .canonicalize()
        .map_err(CalibrateError::io("find", path))?;
    match path.parent() {
        Some(parent) if !path.is_dir() => Ok(parent.to_owned()),
        _ => Ok(path),
    }
}

fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |span| span.as_nanos() as u64) ^ u64::from(std::process::id()) << 40
}

/// The wanted size, but at most a tenth of the free space. Units: bytes.
///
/// Errors   StorageFull: that tenth is less than two of the largest requests
fn scratch_bytes(folder: &Path, wanted: u64) -> io::Result<u64> {
    let space = rustix::fs::statvfs(folder)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let bytes = wanted.min(free / 10) / BLOCK_BYTES * BLOCK_BYTES;
    if bytes < 2 * SIZES[SIZES.len() - 1] {
        let needed = (20 * SIZES[SIZES.len() - 1]) >> 20;
        let reason = format!(
            "{} MiB are free, and a measurement uses at most a tenth of that; expected {needed} \
             MiB free. Free space and measure again",
            free >> 20
        );
        return Err(io::Error::new(io::ErrorKind::StorageFull, reason));
    }
    Ok(bytes)
}

/// A sample, and whether it was a near request: those do not belong to the table.
#[derive(Clone, Copy, Debug)]
struct Timed {
    sample: Sample,
    near: bool,
}

/// Times one request after the other.
struct Meter<'a> {
    ground: &'a Ground,
    random: Random,
    buffer: Aligned,
    /// Where the head is, as far as we moved it. Units: bytes from the start of the ground.
    last_end: u64,
    failed_count: usize,
    last_error: Option<io::Error>,
}

/// A near request is at least so far from the last, since a drive reads ahead a little, and at most
/// twice so far. Units: bytes.
const NEAR_BYTES: u64 = 32 << 20;
/// After more failed requests than this the measurement ends.
const FAILED_COUNT_MAX: usize = 32;
/// One request in so many is near.
const NEAR_EVERY: usize = 3;

impl Meter<'_> {
    fn too_few(&mut self, sample_count: usize) -> CalibrateError {
        CalibrateError::TooFew {
            sample_count,
            failed_count: self.failed_count,
            last: self.last_error.take(),
        }
    }

    /// Reads all sizes until the time is over or there are enough.
    fn reads(&mut self, budget: &Budget, progress: &mut dyn FnMut(Progress)) -> Vec<Timed> {
        // The first request only brings the head to a known place.
        self.go_somewhere(false);
        self.rounds(
            Stage::Reading,
            budget.read,
            budget.sample_count_max,
            progress,
            |meter, bytes, near| {
                let at = meter.pick(bytes, near)?;
                let distance = meter.distance(at);
                let result = meter
                    .ground
                    .read(at, &mut meter.buffer.bytes()[..bytes as usize]);
                meter.last_end = at + bytes;
                meter.sample(result, bytes, distance)
            },
        )
    }

    /// Writes all sizes to the scratch file until the time is over or there are enough.
    fn writes(
        &mut self,
        scratch: &Scratch,
        budget: &Budget,
        progress: &mut dyn FnMut(Progress),
    ) -> Vec<Timed> {
        self.failed_count = 0;
        self.buffer.scramble(&mut self.random);
        let on_device = self.ground.source != Source::ScratchFile && scratch.is_placed();
        self.rounds(
            Stage::Writing,
            budget.write,
            budget.sample_count_max,
            progress,
            |meter, bytes, near| {
                let blocks = (scratch.bytes.checked_sub(bytes)?) / BLOCK_BYTES + 1;
                let at = meter.random.below(blocks) * BLOCK_BYTES;
                let mut distance = 0.0;
                if on_device {
                    // A write in two pieces would be two requests: leave it out.
                    let physical = scratch.physical(at, bytes)?;
                    if near {
                        meter.last_end = physical;
                    }
                    meter.go_somewhere(near);
                    distance = meter.distance(physical);
                }
                let result = scratch.write(at, &meter.buffer.bytes()[..bytes as usize]);
                meter.sample(result, bytes, distance)
            },
        )
    }

    /// Rounds over all sizes, shuffled in each, until the time is over (but at least two) or every
    /// size has its samples. `one` gives `None` when there is no place for that size or the request
    /// failed.
    fn rounds(
        &mut self,
        stage: Stage,
        time: Duration,
        sample_count_max: usize,
        progress: &mut dyn FnMut(Progress),
        mut one: impl FnMut(&mut Self, u64, bool) -> Option<Sample>,
    ) -> Vec<Timed> {
        let start = Instant::now();
        let mut timed: Vec<Timed> = Vec::new();
        let mut sizes = SIZES;
        for round in 0..sample_count_max {
            self.shuffle(&mut sizes);
            for (index, bytes) in sizes.into_iter().enumerate() {
                let spent = start.elapsed();
                if (round >= 2 && spent > time) || self.failed_count > FAILED_COUNT_MAX {
                    return timed;
                }
                let near = (round + index) % NEAR_EVERY == 0;
                if let Some(sample) = one(self, bytes, near) {
                    timed.push(Timed { sample, near });
                }
                let by_time = start.elapsed().as_secs_f64() / time.as_secs_f64();
                let by_count = round as f64 / sample_count_max as f64;
                progress(Progress {
                    stage,
                    part: by_time.max(by_count).min(1.0),
                });
            }
        }
        timed
    }

    fn shuffle(&mut self, sizes: &mut [u64]) {
        for index in (1..sizes.len()).rev() {
            let other = self.random.below(index as u64 + 1) as usize;
            sizes.swap(index, other);
        }
    }

    /// A small read that moves the head to a near place or to any.
    fn go_somewhere(&mut self, near: bool) {
        if let Some(at) = self.pick(BLOCK_BYTES, near) {
            let result = self
                .ground
                .read(at, &mut self.buffer.bytes()[..BLOCK_BYTES as usize]);
            self.last_end = at + BLOCK_BYTES;
            self.sample(result, BLOCK_BYTES, 0.0);
        }
    }

    /// A place for the next request: never where the last ended, where a drive may have read ahead.
    fn pick(&mut self, bytes: u64, near: bool) -> Option<u64> {
        if near {
            let step = NEAR_BYTES + self.random.below(NEAR_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
            let behind = self.last_end.checked_sub(step + bytes);
            let ahead = Some(self.last_end + step);
            // Backwards first: the drive may have read the bytes ahead into its cache.
            let block = |at: u64| at / BLOCK_BYTES * BLOCK_BYTES;
            let place = [behind, ahead]
                .into_iter()
                .flatten()
                .map(block)
                .find(|&at| self.ground.contains(at, bytes));
            if place.is_some() {
                return place;
            }
        }
        let mut place = None;
        for _ in 0..8 {
            place = self.ground.place(&mut self.random, bytes);
            if place.is_some_and(|at| at.abs_diff(self.last_end) >= NEAR_BYTES) {
                break;
            }
        }
        place
    }

    fn distance(&self, at: u64) -> f64 {
        (at.abs_diff(self.last_end) as f64 / self.ground.bytes.max(1) as f64).min(1.0)
    }

    fn sample(&mut self, result: io::Result<f64>, bytes: u64, distance: f64) -> Option<Sample> {
        match result {
            Ok(seconds) => Some(Sample {
                distance,
                bytes,
                seconds,
            }),
            Err(error) => {
                self.failed_count += 1;
                self.last_error = Some(error);
                None
            }
        }
    }
}

fn fit_of(timed: &[Timed], terms: Terms) -> Option<Fit> {
    let samples: Vec<Sample> = timed.iter().map(|timed| timed.sample).collect();
    fit::fit(&samples, terms)
}

/// The model of writes; its span is that of reads in proportion where distances are not known.
fn write_fit(writes: &[Timed], ground: &Ground, scratch: &Scratch, read: &Fit) -> Option<Fit> {
    if ground.source != Source::ScratchFile && scratch.is_placed() {
        return fit_of(writes, Terms::All);
    }
    let mut fit = fit_of(writes, Terms::NoSpan)?;
    let part = (fit.fixed_ns as f64 / read.fixed_ns.max(1) as f64).min(1.0);
    fit.span_ns = (read.span_ns as f64 * part) as u64;
    fit.span_estimated = true;
    Some(fit)
}

fn table_of(timed: &[Timed]) -> Vec<Row> {
    SIZES
        .iter()
        .filter_map(|&bytes| {
            let times: Vec<f64> = timed
                .iter()
                .filter(|timed| timed.sample.bytes == bytes && !timed.near)
                .map(|timed| timed.sample.seconds)
                .collect();
            if times.is_empty() {
                return None;
            }
            let mean = times.iter().sum::<f64>() / times.len() as f64;
            Some(Row {
                bytes,
                count: u32::try_from(times.len()).unwrap_or(u32::MAX),
                megabits_per_second: rounded(bytes as f64 * 8.0 / mean / 1e6),
                mean_ms: rounded(mean * 1e3),
                min_ms: rounded(times.iter().copied().fold(f64::INFINITY, f64::min) * 1e3),
                max_ms: rounded(times.iter().copied().fold(0.0, f64::max) * 1e3),
            })
        })
        .collect()
}

/// To four places: the clock's resolution, and read back from a file exactly.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

impl Calibration {
    /// The model in the server's units.
    pub fn model(&self) -> DeviceModel {
        DeviceModel {
            read: self.read.model(),
            write: self.write.model(),
            size: ByteCount(self.identity.bytes),
        }
    }

    /// For people: the table as in the paper, then the models.
    pub fn print_table(&self, out: &mut dyn Write) -> io::Result<()> {
        let identity = &self.identity;
        let disk = match identity.disk.as_str() {
            "" => "device",
            disk => disk,
        };
        writeln!(
            out,
            "{disk} ({}), {:.1} GB, file system {}, measured {}{}",
            identity.device,
            identity.bytes as f64 / 1e9,
            identity.uuid.as_deref().unwrap_or("without UUID"),
            self.measured_at,
            if self.quick { ", quickly" } else { "" },
        )?;
        let how = match self.source {
            Source::WholeDevice => "anywhere on the block device",
            Source::DataOnDevice => "where data lies on the block device",
            Source::ScratchFile => "in a scratch file; distances are not known",
        };
        writeln!(out, "Reads {how}; one request at a time.\n")?;
        write!(out, "{:<20}", "Request size")?;
        for bytes in SIZES {
            write!(out, "{:>9}", size_name(bytes))?;
        }
        writeln!(out)?;
        for (name, table) in [
            ("Random read, Mb/s", &self.read_table),
            ("Random write, Mb/s", &self.write_table),
        ] {
            write!(out, "{name:<20}")?;
            for bytes in SIZES {
                match table.iter().find(|row| row.bytes == bytes) {
                    Some(row) => write!(out, "{:>9.1}", row.megabits_per_second)?,
                    None => write!(out, "{:>9}", "-")?,
                }
            }
            writeln!(out)?;
        }
        writeln!(out)?;
        for (name, fit) in [("read ", &self.read), ("write", &self.write)] {
            write!(
                out,
                "{name} = {} + {}·√distance + bytes / ({:.1} MB/s)",
                time_name(fit.fixed_ns),
                time_name(fit.span_ns),
                fit.bytes_per_second as f64 / 1e6,
            )?;
            if fit.estimated {
                writeln!(out, "   (not measured: taken from the reads)")?;
                continue;
            }
            writeln!(
                out,
                "   {} requests, half within {:.1} %, 95 % within {:.1} %{}",
                fit.sample_count,
                fit.residual_percent_median,
                fit.residual_percent_p95,
                if fit.span_estimated {
                    "; the effect of distance is not measured"
                } else {
                    ""
                },
            )?;
        }
        if let Some(why) = &self.writes_missing {
            writeln!(out, "\nWrites were not measured: {why}.")?;
        }
        if self.is_doubtful() {
            writeln!(
                out,
                "\nThe times scatter widely: something else used the device or the machine. Measure again \
                 when it is quiet."
            )?;
        }
        Ok(())
    }

    /// True when half of the requests were off by more than a quarter: a model of chance. The
    /// turning of a disk alone scatters small requests by a fifth.
    pub fn is_doubtful(&self) -> bool {
        [self.read, self.write]
            .iter()
            .any(|fit| !fit.estimated && fit.residual_percent_median > DOUBTFUL_PERCENT)
    }
}

/// A model with a larger median residual is doubtful. Units: percent.
const DOUBTFUL_PERCENT: f64 = 25.0;

fn size_name(bytes: u64) -> String {
    if bytes < 1 << 20 {
        format!("{} KiB", bytes >> 10)
    } else {
        format!("{} MiB", bytes >> 20)
    }
}

fn time_name(ns: u64) -> String {
    if ns < 1_000_000 {
        format!("{:.1} µs", ns as f64 / 1e3)
    } else {
        format!("{:.2} ms", ns as f64 / 1e6)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn example() -> Calibration {
        let fit = Fit {
            fixed_ns: 6_080_000,
            span_ns: 17_176_000,
            bytes_per_second: 172_000_000,
            sample_count: 91,
            residual_percent_median: 0.4,
            residual_percent_p95: 2.1,
            estimated: false,
            span_estimated: false,
        };
        let timed: Vec<Timed> = SIZES
            .iter()
            .flat_map(|&bytes| {
                let sample = Sample {
                    distance: 0.25,
                    bytes,
                    seconds: fit.seconds(0.25, bytes),
                };
                let late = Sample {
                    seconds: 10.0,
                    ..sample
                };
                [
                    Timed {
                        sample,
                        near: false,
                    },
                    Timed {
                        sample: late,
                        near: true,
                    },
                ]
            })
            .collect();
        Calibration {
            version: store::VERSION,
            identity: Identity {
                uuid: Some("0123-4567".into()),
                device: "8:1".into(),
                disk: "sda".into(),
                bytes: 40 << 30,
            },
            measured_at: "2026-11-21T10:00:00Z".into(),
            quick: true,
            source: Source::WholeDevice,
            writes_missing: None,
            buffered_file: None,
            read: fit,
            write: Fit {
                estimated: true,
                ..fit
            },
            read_table: table_of(&timed),
            write_table: Vec::new(),
        }
    }

    fn scratch_folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("rushes-calibrate-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn table_has_random_requests_only() {
        let table = example().read_table;
        assert_eq!(table.len(), SIZES.len());
        // 1 MiB at a quarter of the device: 6.08 + 8.588 + 6.096 ms.
        let row = table[2];
        assert_eq!((row.bytes, row.count), (1 << 20, 1));
        assert!((row.mean_ms - 20.764).abs() < 0.01, "{row:?}");
        assert!((row.megabits_per_second - 404.0).abs() < 0.5, "{row:?}");
    }

    #[test]
    fn printed_table_tells_sizes_models_and_what_is_guessed() {
        let mut out = Vec::new();
        example().print_table(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for expect in [
            "sda (8:1), 42.9 GB, file system 0123-4567",
            "64 KiB  512 KiB    1 MiB",
            "404.0",
            "read  = 6.08 ms + 17.18 ms·√distance + bytes / (172.0 MB/s)",
            "91 requests, half within 0.4 %, 95 % within 2.1 %",
            "not measured: taken from the reads",
        ] {
            assert!(text.contains(expect), "{expect} is not in:\n{text}");
        }
    }

    #[test]
    fn writes_that_are_missing_are_said_with_the_reason() {
        let error = scratch_bytes(Path::new("/proc"), 64 << 20).unwrap_err();
        let mut calibration = example();
        calibration.writes_missing = Some(error.to_string());
        let mut out = Vec::new();
        calibration.print_table(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expect = "Writes were not measured: 0 MiB are free, and a measurement uses at most a tenth of that; expected 320 MiB free.";
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn model_of_scattered_times_is_doubted_aloud() {
        let mut calibration = example();
        assert!(!calibration.is_doubtful());
        calibration.read.residual_percent_median = 60.0;
        let mut out = Vec::new();
        calibration.print_table(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("Measure again when it is quiet"), "{text}");
    }

    #[test]
    fn kept_calibration_comes_back_for_its_device_only() {
        let state = scratch_folder("kept");
        let calibration = example();
        let file = calibration.save(&state).unwrap();
        let mut identity = calibration.identity.clone();
        identity.device = "8:33".into();
        let back = Calibration::load_for(&state, &identity).unwrap();
        assert_eq!(back, Some(calibration));
        identity.bytes += 1;
        assert_eq!(Calibration::load_for(&state, &identity).unwrap(), None);
        identity.uuid = Some("other".into());
        assert_eq!(Calibration::load_for(&state, &identity).unwrap(), None);
        std::fs::remove_file(file).unwrap();
        std::fs::remove_dir(state).unwrap();
    }

    #[test]
    fn spoiled_calibration_is_refused_with_the_reason() {
        let state = scratch_folder("spoiled");
        let calibration = example();
        let check = |spoil: &dyn Fn(&mut Calibration), expect: &str| {
            let mut spoiled = calibration.clone();
            spoil(&mut spoiled);
            spoiled.save(&state).unwrap();
            let error = Calibration::load_for(&state, &calibration.identity).unwrap_err();
            assert!(error.to_string().contains(expect), "{error}");
        };
        check(&|c| c.version = 9, "version 9, expected 1");
        check(&|c| c.read.bytes_per_second = 0, "read.bytes_per_second 0");
        check(&|c| c.write.span_ns = u64::MAX, "less than an hour");
        let file = calibration.save(&state).unwrap();
        std::fs::write(&file, "{ not json").unwrap();
        let error = Calibration::load_for(&state, &calibration.identity).unwrap_err();
        assert!(
            error.to_string().contains("is not a calibration"),
            "{error}"
        );
        std::fs::remove_dir_all(state).unwrap();
    }

    #[test]
    fn memory_has_no_device_and_says_so() {
        let options = Options {
            path: "/dev/shm".into(),
            quick: true,
            writes: true,
        };
        let error = calibrate(&options, &mut |_| {}).unwrap_err();
        assert!(matches!(error, CalibrateError::NoDevice { .. }), "{error}");
        assert!(error.to_string().contains("Give a folder on a disk"));
    }

    #[test]
    fn model_is_what_the_server_wants() {
        let model = example().model();
        assert_eq!(model.read.fixed.0, 6_080_000);
        assert_eq!(model.read.rate.0, 172_000_000);
        assert_eq!(model.size.0, 40 << 30);
    }
}
