// SPDX-License-Identifier: Apache-2.0
//! A recording: a small disk with a fresh file system, and the log of everything that it was told while lanes worked on it.
//!
//! The disk is written full before the file system is made, with sectors that are nobody's: whatever shows a block that it
//! has not written shows them.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rushes_core::units::ByteCount;
use rustix::fs::OFlags;

use super::chance::Chance;
use super::history::History;
use super::mounted::{How, Mounted, run};
use super::script::{LANE_COUNT, Step, lane_folder, steps};
use super::sector::{NOBODY, content};
use super::writer::{Host, Writer};
use crate::disk::log::{Change, Log};
use crate::disk::{DiskSpec, FileSystem, Marker, SlowDisk};

/// Small, because each point of a power cut is a copy of it; large enough for XFS with a log. Units: MiB.
const DISK_MIB: u64 = 48;

/// How long we wait for others to let go of the disk between two recordings.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whoever lets lanes at the file system that is mounted there.
pub type Door<'a> = &'a dyn Fn(&Path) -> Result<Box<dyn Host>>;

/// What was recorded.
#[derive(Debug)]
pub struct Recording {
    /// What is on the disk.
    pub file_system: FileSystem,
    /// The disk before.
    pub base: Arc<Vec<u8>>,
    /// What it was told then.
    pub log: Log,
    /// What each lane did.
    pub lanes: Vec<History>,
    /// Writes that a server took, and those that it left to the lanes; none are known of one that was kept.
    pub writes: (u64, u64),
}

/// The number of a mark: this step of this lane was acknowledged.
fn mark_of(lane: u64, step: usize) -> u64 {
    (lane << 32) | step as u64
}

/// The lane and the step that a mark is of.
pub fn lane_and_step(mark: u64) -> (usize, usize) {
    ((mark >> 32) as usize, (mark & 0xffff_ffff) as usize)
}

/// The histories of all lanes, as the seed decides them.
fn histories(seed: u64) -> Vec<History> {
    (0..LANE_COUNT)
        .map(|lane| History::of(&lane_folder(lane), &steps(seed, lane)))
        .collect()
}

impl Recording {
    /// From what a run kept.
    pub fn load(
        folder: &Path,
        name: &str,
        file_system: FileSystem,
        seed: u64,
    ) -> Result<Recording> {
        let base = folder.join(format!("{name}.base"));
        let base = fs::read(&base).with_context(|| format!("{} cannot be read", base.display()))?;
        let log = Log::read(&folder.join(format!("{name}.log")))?;
        Recording::new(file_system, Arc::new(base), log, seed)
    }

    /// Keeps it for [`Recording::load`].
    pub fn keep(&self, folder: &Path, name: &str) -> Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join(format!("{name}.base")), &*self.base)?;
        fs::write(folder.join(format!("{name}.log")), self.log.as_bytes())?;
        Ok(())
    }

    fn new(file_system: FileSystem, base: Arc<Vec<u8>>, log: Log, seed: u64) -> Result<Recording> {
        ensure!(
            log.disk_bytes() == base.len() as u64,
            "the log is of a disk of another size than the one recorded"
        );
        let lanes = histories(seed);
        for change in log.iter() {
            if let Change::Mark { number } = change {
                let (lane, _) = lane_and_step(number);
                ensure!(lane < lanes.len(), "the log has a mark of an unknown lane");
            }
        }
        Ok(Recording {
            file_system,
            base,
            log,
            lanes,
            writes: (0, 0),
        })
    }
}

/// A disk to record on, with a fresh file system that comes back for each recording.
#[derive(Debug)]
pub struct Studio {
    disk: SlowDisk,
    how: How,
    mount: PathBuf,
    base: Arc<Vec<u8>>,
}

impl Studio {
    /// Puts the disk up; `mount` is an empty folder.
    pub fn open(how: How, mount: PathBuf, program: Option<&Path>) -> Result<Studio> {
        let spec = DiskSpec {
            program: program.map(Path::to_owned),
            ..DiskSpec::table5(ByteCount::from_mib(DISK_MIB))
        };
        let disk = SlowDisk::create(&spec)?;
        disk.timing(false)?;
        let device = disk.block_device();
        write_whole(device, &content(NOBODY, 1, 0, spec.bytes))?;
        make_file_system(how.kind, device)?;
        let mounted = Mounted::new(&how, device, &mount, false)?;
        for lane in 0..LANE_COUNT {
            fs::create_dir(mount.join(lane_folder(lane)))?;
        }
        mounted.unmount()?;
        let base = Arc::new(fs::read(disk.backing()?)?);
        Ok(Studio {
            disk,
            how,
            mount,
            base,
        })
    }

    /// Lets all lanes do what the seed decides.
    pub fn record(&self, seed: u64, door: Door) -> Result<Recording> {
        let device = self.disk.block_device();
        write_whole(device, &self.base)?;
        self.disk.record()?;
        let mounted = Mounted::new(&self.how, device, &self.mount, false)?;
        let host = door(&self.mount)?;
        let played = self.play(seed, &*host);
        let writes = host.writes();
        // What it writes out then is part of the recording.
        let closed = host.close();
        let path = self.disk.end_record()?;
        mounted.unmount()?;
        played.and(closed)?;
        let log = Log::read(&path)?;
        let recording = Recording::new(self.how.kind, self.base.clone(), log, seed)?;
        Ok(Recording {
            writes,
            ..recording
        })
    }

    fn play(&self, seed: u64, host: &dyn Host) -> Result<()> {
        let lanes = (0..LANE_COUNT)
            .map(|lane| {
                Ok(Lane {
                    lane,
                    seed,
                    marker: self.disk.marker()?,
                })
            })
            .collect::<Result<Vec<Lane>>>()?;
        play_all(lanes, host)
    }

    /// Takes the disk down.
    pub fn close(self) -> Result<()> {
        Ok(self.disk.close()?)
    }
}

struct Lane {
    lane: u64,
    seed: u64,
    marker: Marker,
}

impl Lane {
    fn play(mut self, host: &dyn Host) -> Result<()> {
        let mut writer = host.writer()?;
        let mut chance = Chance::new(self.seed, u64::MAX - self.lane);
        for (number, step) in steps(self.seed, self.lane).iter().enumerate() {
            crate::room::go_on()?;
            self.act(&mut *writer, number, step)
                .with_context(|| format!("lane {}, step {number}: {step:?}", self.lane))?;
            // Not in step with each other, whatever one processor makes of three threads.
            if chance.percent(20) {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn act(&mut self, writer: &mut dyn Writer, number: usize, step: &Step) -> Result<()> {
        writer.act(number, step)?;
        Ok(self.marker.mark(mark_of(self.lane, number))?)
    }
}

fn play_all(lanes: Vec<Lane>, host: &dyn Host) -> Result<()> {
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .into_iter()
            .map(|lane| scope.spawn(|| lane.play(host)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(anyhow!("a lane panicked")))
            })
            .collect()
    });
    results.into_iter().collect()
}

/// Exclusively, so that it fails as long as the device is mounted anywhere, a copied mount namespace included: what that file
/// system remembers must not get into the next recording.
fn write_whole(device: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let file: File = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::EXCL.bits() as i32)
            .open(device)?;
        file.write_all_at(bytes, 0)?;
        file.sync_all()
    };
    let end = Instant::now() + PATIENCE;
    loop {
        match write() {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => {
                return result.with_context(|| format!("{} cannot be written", device.display()));
            }
        }
    }
}

/// With 512-byte sectors, since that is what a cut tears; and without discarding what is nobody's.
fn make_file_system(kind: FileSystem, device: &Path) -> Result<()> {
    let mut command = match kind {
        FileSystem::Ext4 => {
            let mut command = Command::new("mkfs.ext4");
            let now = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
            command.args(["-q", "-F", "-b", "4096", "-J", "size=4", "-E", now]);
            command
        }
        FileSystem::Xfs => {
            let mut command = Command::new("mkfs.xfs");
            // Not supported below 300 MB, says mkfs, and means people; XFS's own tests do it all the time.
            let small = ["--unsupported", "-d", "agcount=2", "-s", "size=512"];
            command.args(["-q", "-f", "-K"]).args(small);
            command
        }
    };
    run(command.arg(device)).map(drop)
}
