// SPDX-License-Identifier: Apache-2.0
//! Power cuts: the content of disks when the power goes at any instant, compared with the promises.
//!
//! Lanes of random [`script`]s work on a real file system, through a daemon ([`served`]) or by
//! themselves ([`writer`]), or on the mount of a pool ([`pooled`]), while the disks are
//! [`record`]ed. Each point is a [`cut`] of those logs: images that the kernel mounts and recovers
//! ([`mounted`], [`recovery`]). [`check`] compares them, byte by byte, with the states that the
//! scripts allow ([`history`]), since every [`sector`] names its file. Absent: time; the disks are
//! as fast as memory.

pub mod chance;
pub mod check;
pub mod cut;
pub mod history;
pub mod mounted;
pub mod pooled;
pub mod record;
pub mod recovery;
pub mod report;
pub mod script;
pub mod sector;
pub mod served;
pub mod writer;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use self::chance::Chance;
use self::check::Node;
use self::cut::{Cut, Lie};
use self::mounted::{How, Place, name_of};
use self::pooled::PoolGround;
use self::record::{Recording, Studio, make_lane_folders};
use self::recovery::{Looking, Scratch};
use self::report::{PowerReport, REPORT_VERSION, Violation};
use self::served::House;
use self::writer::{Host, Nobody};
use crate::disk::FileSystem;
use crate::disk::log::Change;
use crate::servers::daemon::find_rushes;
use crate::stage::room::{self, Room};

/// Points of one recording: many, since a recording takes time; few enough that 100 points see
/// several workloads.
const POINTS_OF_RECORDING: u64 = 25;

/// Small, because each point copies the disk; large enough for XFS with a log. Units: MiB.
const DISK_MIB: u64 = 48;

/// The file system's own checker runs at every so many points.
const FSCK_EVERY: u64 = 10;

/// After so many violations the run stops: more would only be more to read.
const VIOLATIONS_MAX: u64 = 20;

/// The server through which the lanes write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Server {
    /// A daemon of ours.
    #[default]
    Rushes,
    /// No server: the workloads make system calls on the file system.
    None,
}

/// The ground on which the lanes work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// A file system.
    #[default]
    Plain,
    /// The mount of a pool: a catalogue and three members, each on a disk of its own.
    Pool,
}

/// The plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The file system; of a pool that of most members.
    pub file_system: FileSystem,
    /// One file system, or a pool.
    pub layout: Layout,
    /// The server.
    pub server: Server,
    /// Decides everything but the kernel's own timing.
    pub seed: u64,
    /// Number of points.
    pub points: u64,
    /// This point only.
    pub point: Option<u64>,
    /// How the disk or the door lies.
    pub lie: Lie,
    /// Mount options beside the usual ones, in mount's syntax; empty for none.
    pub mount_options: String,
    /// Folder in which the run keeps recordings with violations.
    pub keep: Option<PathBuf>,
    /// Folder with kept recordings, to take instead of new ones.
    pub from: Option<PathBuf>,
    /// The `rushes-lab` binary; `None`: the one beside the running program.
    pub program: Option<PathBuf>,
}

impl Server {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Server::Rushes => "rushes",
            Server::None => "none",
        }
    }
}

impl Layout {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Plain => "plain",
            Layout::Pool => "pool",
        }
    }
}

impl Plan {
    /// So many points with an honest disk.
    pub fn new(file_system: FileSystem, seed: u64, points: u64) -> Plan {
        Plan {
            file_system,
            layout: Layout::default(),
            server: Server::default(),
            seed,
            points,
            point: None,
            lie: Lie::None,
            mount_options: String::new(),
            keep: None,
            from: None,
            program: None,
        }
    }

    fn recording_name(&self, recording: u64) -> String {
        let layout = match self.layout {
            Layout::Plain => String::new(),
            Layout::Pool => String::from("pool-"),
        };
        let server = self.server.name();
        format!(
            "{layout}{server}-{}-{}-{recording}",
            name_of(self.file_system),
            self.seed
        )
    }

    fn lie_name(&self) -> &'static str {
        match self.lie {
            Lie::None => "none",
            Lie::Flush => "flush",
            Lie::Flushes => "flushes",
            Lie::Superblock => "superblock",
            Lie::Misdirect => "misdirect",
            Lie::Door => "door",
        }
    }

    fn replay(&self, point: u64) -> String {
        let mut command = format!(
            "rushes lab power-cuts --fs {} --seed {} --point {point}",
            name_of(self.file_system),
            self.seed
        );
        if self.layout != Layout::default() {
            command.push_str(&format!(" --layout {}", self.layout.name()));
        }
        if self.server != Server::default() {
            command.push_str(&format!(" --server {}", self.server.name()));
        }
        if self.lie != Lie::None {
            command.push_str(&format!(" --lie {}", self.lie_name()));
        }
        if !self.mount_options.is_empty() {
            command.push_str(&format!(" --mount-options {}", self.mount_options));
        }
        if let Some(folder) = self.keep.as_ref().or(self.from.as_ref()) {
            command.push_str(&format!(" --from {}", folder.display()));
        }
        command
    }

    /// Numbers of the points, in order.
    fn points(&self) -> std::ops::Range<u64> {
        match self.point {
            Some(point) => point..point + 1,
            None => 0..self.points,
        }
    }

    fn empty_report(&self) -> PowerReport {
        PowerReport {
            report_version: REPORT_VERSION,
            file_system: name_of(self.file_system),
            layout: self.layout.name(),
            seed: self.seed,
            mount_options: self.mount_options.clone(),
            lie: self.lie_name(),
            served: self.server == Server::Rushes,
            writes_served: 0,
            writes_plain: 0,
            files_in_pieces: 0,
            files_striped: 0,
            disturbances: 0,
            points: 0,
            recordings: 0,
            log_records: 0,
            log_bytes: 0,
            flushes: 0,
            writes_kept: 0,
            writes_torn: 0,
            writes_lost: 0,
            files_read: 0,
            bytes_read: 0,
            fsck_points: 0,
            findings_mended: 0,
            orphans: 0,
            violations: Vec::new(),
            violation_count: 0,
            wall_s: 0.0,
            points_per_s: 0.0,
            environment: crate::reports::report::environment(),
        }
    }
}

/// Runs all points; calls `progress` after each with the number of points done.
///
/// Errors   the disk, a file system or a tool is missing or fails; violations are not an error but
/// the answer
pub fn cut_power(plan: &Plan, progress: &mut dyn FnMut(u64)) -> Result<PowerReport> {
    ensure!(
        plan.lie != Lie::Door || plan.server == Server::Rushes,
        "read --lie door with --server none; expected --server rushes: without a daemon there is no door that could forget it"
    );
    ensure!(
        plan.lie != Lie::Door || plan.layout == Layout::Plain,
        "read --lie door with --layout pool; expected --layout plain: the door of a pool is the mount itself"
    );
    let room = Room::in_memory()?;
    let begun = Instant::now();
    let ground = Ground::new(plan, &room)?;
    let mut run = Run {
        plan,
        scratch: Scratch::new(&room),
        source: match &plan.from {
            Some(folder) => Source::Kept(folder.clone()),
            None => {
                let furnish = || ground.furnish();
                let program = plan.program.as_deref();
                Source::Studio(Studio::open(&ground.places, program, &furnish)?)
            }
        },
        ground,
        house: match plan.server {
            Server::Rushes if plan.from.is_none() => {
                Some(House::new(&room, plan.lie == Lie::Door)?)
            }
            _ => None,
        },
        recording: None,
        images: Vec::new(),
        report: plan.empty_report(),
    };
    for point in plan.points() {
        room::go_on()?;
        run.point(point)?;
        progress(run.report.points);
        if run.report.violation_count >= VIOLATIONS_MAX {
            break;
        }
    }
    let Run {
        source, mut report, ..
    } = run;
    if let Source::Studio(studio) = source {
        studio.close()?;
    }
    report.wall_s = begun.elapsed().as_secs_f64();
    report.points_per_s = report.points as f64 / report.wall_s.max(1e-3);
    Ok(report)
}

/// The source of recordings.
enum Source {
    /// The run makes them.
    Studio(Studio),
    /// A former run kept them in this folder.
    Kept(PathBuf),
}

/// The disks on which lanes work, and the pool over them.
struct Ground {
    places: Vec<Place>,
    pool: Option<PoolGround>,
}

impl Ground {
    fn new(plan: &Plan, room: &Room) -> Result<Ground> {
        match plan.layout {
            Layout::Plain => Ok(Ground {
                places: vec![Place {
                    how: How {
                        kind: plan.file_system,
                        options: plan.mount_options.clone(),
                    },
                    point: room.folder("stage")?,
                    mib: DISK_MIB,
                }],
                pool: None,
            }),
            Layout::Pool => Ground::of_pool(plan, PoolGround::new(room)?),
        }
    }

    fn of_pool(plan: &Plan, pool: PoolGround) -> Result<Ground> {
        Ok(Ground {
            places: pool.places(plan.file_system, &plan.mount_options)?,
            pool: Some(pool),
        })
    }

    fn furnish(&self) -> Result<()> {
        match &self.pool {
            Some(pool) => pool.furnish(),
            None => make_lane_folders(&self.places[0].point),
        }
    }

    fn file_systems(&self) -> Vec<FileSystem> {
        self.places.iter().map(|place| place.how.kind).collect()
    }
}

struct Run<'a> {
    plan: &'a Plan,
    scratch: Scratch,
    source: Source,
    ground: Ground,
    /// The house of daemons, if lanes write through one.
    house: Option<House<'a>>,
    /// The current recording, and its number.
    recording: Option<(u64, Recording)>,
    images: Vec<Vec<u8>>,
    report: PowerReport,
}

impl Run<'_> {
    fn point(&mut self, point: u64) -> Result<()> {
        let number = point / POINTS_OF_RECORDING;
        if self.recording.as_ref().is_none_or(|(at, _)| *at != number) {
            let recording = self.take(number)?;
            self.recording = Some((number, recording));
        }
        let Some((_, recording)) = &self.recording else {
            return Ok(());
        };
        let cut = Cut::random(Chance::new(self.plan.seed, point).number(), recording);
        let fate = cut.images(recording, self.plan.lie, &mut self.images);
        let fsck = point.is_multiple_of(FSCK_EVERY) || self.plan.point.is_some();
        let looking = Looking {
            places: &self.ground.places,
            pool: self.ground.pool.as_ref(),
            mend_first: point.is_multiple_of(2),
            fsck,
        };
        let recovered = self.scratch.recover(&self.images, looking)?;
        let steps_done = cut.done(recording);
        let mut findings = recovered.complaints;
        findings.extend(check::orphans(&recording.lanes, &recovered.orphans));
        for tree in &recovered.trees {
            for (lane, &done) in recording.lanes.iter().zip(&steps_done) {
                findings.extend(check::check(lane, done, tree));
            }
            findings.extend(check::strangers(&recording.lanes, tree));
            let sizes = tree.values().filter_map(|node| match node {
                Node::File(bytes) => Some(bytes.len() as u64),
                _ => None,
            });
            let (files, bytes) =
                sizes.fold((0, 0), |(files, bytes), size| (files + 1, bytes + size));
            self.report.files_read += files;
            self.report.bytes_read += bytes;
        }
        self.report.findings_mended += recovered.mended;
        self.report.orphans += recovered.orphans.len() as u64;
        self.report.points += 1;
        self.report.writes_kept += fate.kept;
        self.report.writes_torn += fate.torn;
        self.report.writes_lost += fate.lost;
        self.report.fsck_points += u64::from(fsck);
        if let (false, Some(folder)) = (findings.is_empty(), &self.plan.keep) {
            let name = self.plan.recording_name(number);
            recording.keep(folder, &name)?;
            if let Some(pool) = &self.ground.pool {
                fs::write(
                    place_file(folder, &name),
                    pool.folder().to_string_lossy().as_bytes(),
                )?;
            }
        }
        for finding in findings {
            self.report.violation_count += 1;
            if (self.report.violations.len() as u64) < VIOLATIONS_MAX {
                self.report.violations.push(Violation {
                    point,
                    record: cut.record,
                    steps_done: steps_done.clone(),
                    finding,
                    replay: self.plan.replay(point),
                });
            }
        }
        Ok(())
    }

    fn host(&self, seed: u64) -> Result<Box<dyn Host>> {
        let house = self.house.as_ref();
        let root = &self.ground.places[0].point;
        Ok(match (&self.ground.pool, house) {
            (Some(pool), house) => Box::new(pool.open(seed, house)?),
            (None, Some(house)) => Box::new(house.open(root)?),
            (None, None) => Box::new(Nobody(root.clone())),
        })
    }

    /// The recording of that number.
    fn take(&mut self, number: u64) -> Result<Recording> {
        let seed = Chance::new(self.plan.seed, !number).number();
        let name = self.plan.recording_name(number);
        if let (Source::Kept(folder), Some(_)) = (&self.source, &self.ground.pool) {
            let place = place_file(folder, &name);
            let place = fs::read_to_string(&place)
                .with_context(|| format!("{} cannot be read", place.display()))?;
            // Drop the former ground first: it holds its room, which may be the same folder.
            self.ground.pool = None;
            self.ground = Ground::of_pool(self.plan, PoolGround::again(Path::new(&place))?)?;
        }
        let recording = match &self.source {
            Source::Studio(studio) => studio.record(seed, &|seed| self.host(seed)),
            Source::Kept(folder) => {
                Recording::load(folder, &name, &self.ground.file_systems(), seed)
            }
        }
        .with_context(|| format!("recording {number} of seed {}", self.plan.seed))?;
        let changes = (0..recording.len()).map(|at| recording.get(at).1);
        let report = &mut self.report;
        report.flushes += changes.filter(|c| *c == Change::Flush).count() as u64;
        report.recordings += 1;
        report.log_records += recording.len() as u64;
        let logs = recording.disks.iter().map(|disk| disk.log.as_bytes().len());
        report.log_bytes += logs.sum::<usize>() as u64;
        report.writes_served += recording.told.writes_served;
        report.writes_plain += recording.told.writes_plain;
        report.files_in_pieces += recording.told.files_in_pieces;
        report.files_striped += recording.told.files_striped;
        report.disturbances += recording.told.disturbances;
        Ok(recording)
    }
}

/// The file with the folder in which a pool was recorded.
fn place_file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.place"))
}

/// The first tool, device or program that a run needs and this machine lacks.
pub fn missing(file_system: FileSystem, layout: Layout, server: Server) -> Option<String> {
    let tools = match file_system {
        FileSystem::Ext4 => ["mkfs.ext4", "e2fsck"],
        FileSystem::Xfs => ["mkfs.xfs", "xfs_repair"],
    };
    tools
        .iter()
        .find(|tool| Command::new(tool).arg("-V").output().is_err())
        .map(|tool| format!("{tool} is missing"))
        .or_else(|| {
            (!Path::new("/dev/fuse").exists()).then(|| String::from("/dev/fuse is missing"))
        })
        .or_else(|| match (layout, server) {
            (Layout::Plain, Server::None) => None,
            _ => find_rushes().err().map(|error| error.to_string()),
        })
}
