// SPDX-License-Identifier: Apache-2.0
//! Power cuts: what is on a disk when the power goes at any instant, and whether that is what was promised.
//!
//! Lanes of random [`script`]s work on a real file system, through a daemon ([`served`]) or by themselves ([`writer`]), while its disk is [`record`]ed. Each point is a [`cut`] of that log:
//! an image that the kernel mounts and recovers ([`mounted`]), read whole and compared ([`check`]) with what the
//! scripts allow ([`history`]), byte by byte, since every [`sector`] says whose it is. Nothing here takes its time: timing is for other experiments.

pub mod chance;
pub mod check;
pub mod cut;
pub mod history;
pub mod mounted;
pub mod record;
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
use self::check::{Finding, Node, Rule, Tree};
use self::cut::{Cut, Lie};
use self::mounted::{How, Mounted, name_of, read_tree, run};
use self::record::{Recording, Studio};
use self::report::{PowerReport, REPORT_VERSION, Violation};
use self::served::House;
use self::writer::{Host, Nobody};
use crate::daemon::find_rushes;
use crate::disk::FileSystem;
use crate::disk::log::Change;
use crate::room::{self, Room};

/// Points of one recording: enough to be quick, few enough that 100 points see several workloads.
const POINTS_OF_RECORDING: u64 = 25;

/// Every so many points the file system's own checker has a look.
const FSCK_EVERY: u64 = 10;

/// After so many violations it is clear, and each is a page to read.
const VIOLATIONS_MAX: u64 = 20;

/// Through whom the lanes write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Server {
    /// A daemon of ours.
    #[default]
    Rushes,
    /// Nobody: they make the file system's own calls.
    None,
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// On which file system.
    pub file_system: FileSystem,
    /// Through whom.
    pub server: Server,
    /// Decides everything but the kernel's own timing.
    pub seed: u64,
    /// How many points.
    pub points: u64,
    /// This one only.
    pub point: Option<u64>,
    /// How the disk lies, or the door.
    pub lie: Lie,
    /// Mount options beside the usual ones, as mount takes them; empty for none.
    pub mount_options: String,
    /// Recordings with violations are kept here.
    pub keep: Option<PathBuf>,
    /// Recordings that were kept here are taken instead of new ones.
    pub from: Option<PathBuf>,
    /// The `rushes-lab` binary; looked for beside the running one when `None`.
    pub program: Option<PathBuf>,
}

impl Server {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Server::Rushes => "rushes",
            Server::None => "none",
        }
    }
}

impl Plan {
    /// So many points with an honest disk.
    pub fn new(file_system: FileSystem, seed: u64, points: u64) -> Plan {
        Plan {
            file_system,
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

    fn how(&self) -> How {
        How {
            kind: self.file_system,
            options: self.mount_options.clone(),
        }
    }

    fn recording_name(&self, recording: u64) -> String {
        let server = self.server.name();
        format!(
            "{server}-{}-{}-{recording}",
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
            seed: self.seed,
            mount_options: self.mount_options.clone(),
            lie: self.lie_name(),
            served: self.server == Server::Rushes,
            writes_served: 0,
            writes_plain: 0,
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
            violations: Vec::new(),
            violation_count: 0,
            wall_s: 0.0,
            points_per_s: 0.0,
            environment: crate::report::environment(),
        }
    }
}

/// Does it; `progress` is told after each point how many are done.
///
/// Errors   the disk, a file system or a tool is missing or fails; violations are no error, they are the answer
pub fn cut_power(plan: &Plan, progress: &mut dyn FnMut(u64)) -> Result<PowerReport> {
    ensure!(
        plan.lie != Lie::Door || plan.server == Server::Rushes,
        "read --lie door with --server none; expected --server rushes: without a daemon there is no door that could forget it"
    );
    let room = Room::in_memory()?;
    let begun = Instant::now();
    let mut run = Run {
        plan,
        scratch: Scratch::new(&room, plan.how())?,
        source: match &plan.from {
            Some(folder) => Source::Kept(folder.clone()),
            None => {
                let mount = room.folder("stage")?;
                let program = plan.program.as_deref();
                Source::Studio(Studio::open(plan.how(), mount, program)?)
            }
        },
        house: match plan.server {
            Server::Rushes if plan.from.is_none() => {
                Some(House::new(&room, plan.lie == Lie::Door)?)
            }
            _ => None,
        },
        recording: None,
        image: Vec::new(),
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

/// Where recordings come from.
enum Source {
    /// They are made.
    Studio(Studio),
    /// They were kept.
    Kept(PathBuf),
}

struct Run<'a> {
    plan: &'a Plan,
    scratch: Scratch,
    source: Source,
    /// Where daemons live.
    house: Option<House<'a>>,
    /// The one at work, and its number.
    recording: Option<(u64, Recording)>,
    image: Vec<u8>,
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
        let cut = Cut::random(Chance::new(self.plan.seed, point).number(), &recording.log);
        let fate = cut.image(recording, self.plan.lie, &mut self.image);
        let fsck = point.is_multiple_of(FSCK_EVERY) || self.plan.point.is_some();
        let recovered = self.scratch.recover(&self.image, fsck)?;
        let steps_done = cut.done(&recording.log);
        let mut findings = recovered.complaints;
        if let Some(tree) = &recovered.tree {
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
        self.report.points += 1;
        self.report.writes_kept += fate.kept;
        self.report.writes_torn += fate.torn;
        self.report.writes_lost += fate.lost;
        self.report.fsck_points += u64::from(fsck);
        if let (false, Some(folder)) = (findings.is_empty(), &self.plan.keep) {
            recording.keep(folder, &self.plan.recording_name(number))?;
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

    fn host(&self, root: &Path) -> Result<Box<dyn Host>> {
        Ok(match &self.house {
            Some(house) => Box::new(house.open(root)?),
            None => Box::new(Nobody(root.to_owned())),
        })
    }

    /// The recording of that number.
    fn take(&mut self, number: u64) -> Result<Recording> {
        let seed = Chance::new(self.plan.seed, !number).number();
        let recording = match &self.source {
            Source::Studio(studio) => studio.record(seed, &|root| self.host(root)),
            Source::Kept(folder) => {
                let name = self.plan.recording_name(number);
                Recording::load(folder, &name, self.plan.file_system, seed)
            }
        }
        .with_context(|| format!("recording {number} of seed {}", self.plan.seed))?;
        self.report.writes_served += recording.writes.0;
        self.report.writes_plain += recording.writes.1;
        let flushes = recording.log.iter().filter(|c| *c == Change::Flush).count();
        self.report.recordings += 1;
        self.report.log_records += recording.log.len() as u64;
        self.report.log_bytes += recording.log.as_bytes().len() as u64;
        self.report.flushes += flushes as u64;
        Ok(recording)
    }
}

/// What came back after a cut.
struct Recovered {
    /// `None`: it could not be mounted.
    tree: Option<Tree>,
    complaints: Vec<Finding>,
}

/// Where images are made and mounted.
///
/// Each is a file of its own: mount may take a loop device again that somebody has kept open over the same file, and nothing that
/// the kernel remembers of one point may reach the next.
struct Scratch {
    how: How,
    folder: PathBuf,
    mount: PathBuf,
    count: u64,
}

impl Scratch {
    fn new(room: &Room, how: How) -> Result<Scratch> {
        Ok(Scratch {
            how,
            folder: room.path().to_owned(),
            mount: room.folder("cut")?,
            count: 0,
        })
    }

    /// Lets the kernel recover an image, reads all of it, and asks the file system's own checker too.
    fn recover(&mut self, image: &[u8], fsck: bool) -> Result<Recovered> {
        self.count += 1;
        let path = self.folder.join(format!("cut-{}.img", self.count));
        fs::write(&path, image).with_context(|| format!("{} cannot be written", path.display()))?;
        let recovered = self.look_at(&path, fsck)?;
        fs::remove_file(&path)?;
        Ok(recovered)
    }

    fn look_at(&self, image: &Path, fsck: bool) -> Result<Recovered> {
        let mut recovered = Recovered {
            tree: None,
            complaints: Vec::new(),
        };
        match Mounted::new(&self.how, image, &self.mount, true) {
            Ok(mounted) => {
                recovered.tree = Some(read_tree(&self.mount));
                mounted.unmount()?;
            }
            Err(error) => recovered.complaints.push(Finding {
                rule: Rule::Unreadable,
                path: String::from("/"),
                file: 0,
                expected: String::from("a file system that mounts"),
                read: format!("{error:#}"),
            }),
        }
        if fsck && recovered.tree.is_some() {
            recovered.complaints.extend(self.fsck(image));
        }
        Ok(recovered)
    }

    fn fsck(&self, image: &Path) -> Option<Finding> {
        let mut command = match self.how.kind {
            FileSystem::Ext4 => {
                let mut command = Command::new("e2fsck");
                command.arg("-fn");
                command
            }
            FileSystem::Xfs => {
                let mut command = Command::new("xfs_repair");
                command.args(["-n", "-f"]);
                command
            }
        };
        let error = run(command.arg(image)).err()?;
        Some(Finding {
            rule: Rule::Inconsistent,
            path: String::from("/"),
            file: 0,
            expected: String::from("nothing to repair after recovery"),
            read: format!("{error:#}"),
        })
    }
}

/// What is needed and not there.
pub fn missing(file_system: FileSystem, server: Server) -> Option<String> {
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
        .or_else(|| match server {
            Server::Rushes => find_rushes().err().map(|error| error.to_string()),
            Server::None => None,
        })
}
