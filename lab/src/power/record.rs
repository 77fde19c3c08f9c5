// SPDX-License-Identifier: Apache-2.0
//! A recording: small disks, one or those of a pool, each with a fresh file system, and the log of
//! all requests to each while lanes worked on them.
//!
//! Before the file system is made, the disk is filled with sectors of [`NOBODY`]: a file system
//! that shows a block that it has not written shows them. Changes of several disks have one order,
//! that of time: a disk notes a change before it answers, so that a change on any disk that follows
//! from the answer is noted later.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rushes_core::units::ByteCount;
use rustix::fs::OFlags;

use super::chance::Chance;
use super::history::History;
use super::mounted::{Mounted, Place, run, unmount_all};
use super::script::{LANE_COUNT, Step, lane_folder, steps};
use super::sector::{NOBODY, content};
use super::writer::{Host, Told, Writer};
use crate::disk::log::{Change, Log};
use crate::disk::{DiskSpec, FileSystem, Marker, SlowDisk};

/// How long we wait between two recordings until no mount has the disk.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes the host between lanes and the mounted file systems; the seed decides its choices.
pub type Door<'a> = &'a dyn Fn(u64) -> Result<Box<dyn Host>>;

/// One disk of a recording.
#[derive(Debug)]
pub struct RecordedDisk {
    /// The file system on it.
    pub file_system: FileSystem,
    /// The content of the disk before the recording.
    pub base: Arc<Vec<u8>>,
    /// The requests to it during the recording.
    pub log: Log,
}

/// The result of a recording.
#[derive(Debug)]
pub struct Recording {
    /// All disks. Marks are in the log of the first.
    pub disks: Vec<RecordedDisk>,
    /// Disk and record, of all logs, in order of time.
    order: Vec<(usize, usize)>,
    /// The work of each lane.
    pub lanes: Vec<History>,
    /// The host's counts; zero for a recording that was kept.
    pub told: Told,
}

/// The number of the mark for an acknowledged step of a lane.
fn mark_of(lane: u64, step: usize) -> u64 {
    (lane << 32) | step as u64
}

/// The lane and the step of a mark.
pub fn lane_and_step(mark: u64) -> (usize, usize) {
    ((mark >> 32) as usize, (mark & 0xffff_ffff) as usize)
}

/// The histories of all lanes, by the seed. Several disks are a pool.
fn histories(seed: u64, disks: usize) -> Vec<History> {
    let history = |lane| {
        let history = History::of(&lane_folder(lane), &steps(seed, lane));
        match disks {
            1 => history,
            _ => history.parted(),
        }
    };
    (0..LANE_COUNT).map(history).collect()
}

impl Recording {
    /// Reads a recording that a run kept, with these file systems on its disks.
    pub fn load(
        folder: &Path,
        name: &str,
        file_systems: &[FileSystem],
        seed: u64,
    ) -> Result<Recording> {
        let load = |(number, &file_system): (usize, &FileSystem)| {
            let base = folder.join(format!("{name}.{number}.base"));
            let base =
                fs::read(&base).with_context(|| format!("{} cannot be read", base.display()))?;
            let log = Log::read(&folder.join(format!("{name}.{number}.log")))?;
            Ok(RecordedDisk {
                file_system,
                base: Arc::new(base),
                log,
            })
        };
        let disks = file_systems.iter().enumerate().map(load);
        Recording::new(disks.collect::<Result<_>>()?, seed)
    }

    /// Keeps it for [`Recording::load`].
    pub fn keep(&self, folder: &Path, name: &str) -> Result<()> {
        fs::create_dir_all(folder)?;
        for (number, disk) in self.disks.iter().enumerate() {
            fs::write(folder.join(format!("{name}.{number}.base")), &*disk.base)?;
            fs::write(
                folder.join(format!("{name}.{number}.log")),
                disk.log.as_bytes(),
            )?;
        }
        Ok(())
    }

    /// A recording of these disks, with the lanes of this seed.
    ///
    /// Errors   a log is of another disk, or of other lanes
    pub fn new(disks: Vec<RecordedDisk>, seed: u64) -> Result<Recording> {
        let lanes = histories(seed, disks.len());
        let recording = Recording::of(disks, lanes);
        for disk in &recording.disks {
            ensure!(
                disk.log.disk_bytes() == disk.base.len() as u64,
                "the log is of a disk of another size than the one recorded"
            );
            for change in disk.log.iter() {
                if let Change::Mark { number } = change {
                    let (lane, _) = lane_and_step(number);
                    let known = lane < recording.lanes.len();
                    ensure!(known, "the log has a mark of an unknown lane");
                }
            }
        }
        Ok(recording)
    }

    pub(super) fn of(disks: Vec<RecordedDisk>, lanes: Vec<History>) -> Recording {
        let all = disks.iter().enumerate();
        let mut order: Vec<(usize, usize)> = all
            .flat_map(|(disk, one)| (0..one.log.len()).map(move |record| (disk, record)))
            .collect();
        // A stable sort: changes that one disk noted at one instant keep their order.
        order.sort_by_key(|&(disk, record)| disks[disk].log.when(record));
        Recording {
            disks,
            order,
            lanes,
            told: Told::default(),
        }
    }

    /// Records of all logs.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// True when nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// One record: its disk, and its change.
    pub fn get(&self, at: usize) -> (usize, Change<'_>) {
        let (disk, record) = self.order[at];
        (disk, self.disks[disk].log.get(record))
    }
}

/// Disks to record on, whose fresh file systems are restored for each recording.
#[derive(Debug)]
pub struct Studio {
    stands: Vec<Stand>,
}

#[derive(Debug)]
struct Stand {
    disk: SlowDisk,
    place: Place,
    base: Arc<Vec<u8>>,
}

impl Studio {
    /// Puts the disks up. `furnish` makes the files and folders on the mounted file systems that
    /// exist before each recording.
    pub fn open(
        places: &[Place],
        program: Option<&Path>,
        furnish: &dyn Fn() -> Result<()>,
    ) -> Result<Studio> {
        let mut stands = Vec::new();
        for place in places {
            let spec = DiskSpec {
                program: program.map(Path::to_owned),
                ..DiskSpec::table5(ByteCount::from_mib(place.mib))
            };
            let disk = SlowDisk::create(&spec)?;
            disk.timing(false)?;
            let device = disk.block_device();
            write_whole(device, &content(NOBODY, 1, 0, spec.bytes))?;
            make_file_system(place.how.kind, device)?;
            stands.push(Stand {
                disk,
                place: place.clone(),
                base: Arc::default(),
            });
        }
        let mut studio = Studio { stands };
        let mounted = studio.mount()?;
        furnish()?;
        unmount_all(mounted)?;
        for stand in &mut studio.stands {
            stand.base = Arc::new(fs::read(stand.disk.backing()?)?);
        }
        Ok(studio)
    }

    fn mount(&self) -> Result<Vec<Mounted>> {
        let mount = |stand: &Stand| stand.place.mount(stand.disk.block_device(), false);
        self.stands.iter().map(mount).collect()
    }

    /// Records all lanes with the steps of this seed.
    pub fn record(&self, seed: u64, door: Door) -> Result<Recording> {
        for stand in &self.stands {
            write_whole(stand.disk.block_device(), &stand.base)?;
            stand.disk.record()?;
        }
        let mounted = self.mount()?;
        let host = door(seed)?;
        let played = self.play(seed, &*host);
        // The bytes that it writes now are part of the recording.
        let told = host.close();
        let mut disks = Vec::new();
        for stand in &self.stands {
            let path = stand.disk.end_record()?;
            disks.push(RecordedDisk {
                file_system: stand.place.how.kind,
                base: stand.base.clone(),
                log: Log::read(&path)?,
            });
        }
        unmount_all(mounted)?;
        played?;
        Ok(Recording {
            told: told?,
            ..Recording::new(disks, seed)?
        })
    }

    fn play(&self, seed: u64, host: &dyn Host) -> Result<()> {
        let lanes = (0..LANE_COUNT)
            .map(|lane| {
                Ok(Lane {
                    lane,
                    seed,
                    marker: self.stands[0].disk.marker()?,
                })
            })
            .collect::<Result<Vec<Lane>>>()?;
        play_all(lanes, host)
    }

    /// Takes the disks down.
    pub fn close(self) -> Result<()> {
        for stand in self.stands {
            stand.disk.close()?;
        }
        Ok(())
    }
}

/// Makes the folders of all lanes, below `root`.
pub fn make_lane_folders(root: &Path) -> Result<()> {
    for lane in 0..LANE_COUNT {
        fs::create_dir(root.join(lane_folder(lane)))?;
    }
    Ok(())
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
            crate::stage::room::go_on()?;
            self.act(&mut *writer, number, step)
                .with_context(|| format!("lane {}, step {number}: {step:?}", self.lane))?;
            // Keep the lanes out of step with each other, even on a single processor.
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

/// Writes a device from end to end. O_EXCL fails as long as the device is mounted anywhere, even in
/// a copied mount namespace: that file system's cache must not get into the next recording.
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

/// Makes a file system: XFS with 512-byte sectors, the unit that a cut tears; neither discards the
/// sectors of [`NOBODY`].
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
            // mkfs.xfs supports no size below 300 MB for users; XFS's own tests use such sizes all
            // the time.
            let small = ["--unsupported", "-d", "agcount=2", "-s", "size=512"];
            command.args(["-q", "-f", "-K"]).args(small);
            command
        }
    };
    run(command.arg(device)).map(drop)
}
