// SPDX-License-Identifier: Apache-2.0
//! Several disks as one place for files: a pool of ours, btrfs, or mergerfs; also one file system
//! on a device in memory.
//!
//! The file systems choose the place of a file on its disk. So that files lie all over the disk, as
//! on one modelled disk, which the stage lays out on purpose, disks are only a little larger than
//! the files of a run.
//!
//! Everything is in a room of its own in memory, the pool's catalogue too: a catalogue belongs on
//! an SSD, and takes no time here.

use crate::disk::{Arrival, FileSystem, SlowDisk};
use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::find_rushes;
use crate::stage::blocks::BlockStatistics;
use crate::stage::ground::{Ground, Layout, Place};
use crate::stage::room::{Room, go_on};
use crate::stage::run;
use anyhow::{Context, Result, bail, ensure};
use rushes_core::units::ByteCount;
use rushes_kit::mounts::is_mounted;
use rustix::fs::FallocateFlags;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fs::{self, File};
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Catalogue of a pool: names only. Units: bytes.
const CATALOGUE_BYTES: u64 = 256 << 20;
/// Space that a file system of any size needs for itself. Units: bytes.
const DISK_BYTES_BESIDE: u64 = 384 << 20;
/// Sizes of disks are multiples of this. Units: bytes.
const DISK_BYTES_STEP: u64 = 64 << 20;
const READY_MAX: Duration = Duration::from_secs(30);
const END_MAX: Duration = Duration::from_secs(60);
/// The name of the layer over several disks.
const UNION: &str = "files";
/// Folder of a branch of mergerfs, and of a member of a pool, on its file system.
const BRANCH: &str = "files";

/// Size of each of `disk_count` disks that hold files of these sizes, in turn, and `more` bytes
/// together.
///
/// Units    bytes
pub fn disk_bytes(disk_count: u64, files: &[u64], more: u64) -> u64 {
    let largest = files.iter().max().copied().unwrap_or(0);
    let most_files = (files.len() as u64).div_ceil(disk_count);
    let whole = files.iter().sum::<u64>() + more;
    let each = whole
        .div_ceil(disk_count)
        .max(most_files * largest + more.div_ceil(disk_count));
    (each * 5 / 4 + DISK_BYTES_BESIDE).next_multiple_of(DISK_BYTES_STEP)
}

#[derive(Debug)]
enum Disk {
    Slow(SlowDisk),
    /// A loop device over a file in the room; the room detaches it.
    Memory(PathBuf),
}

impl Disk {
    fn device(&self) -> &Path {
        match self {
            Disk::Slow(disk) => disk.block_device(),
            Disk::Memory(device) => device,
        }
    }
}

/// The disks, and the layer over them.
#[derive(Debug)]
pub struct Array {
    layout: Layout,
    file_system: FileSystem,
    media_format: bool,
    disks: Vec<Disk>,
    catalogue: Option<PathBuf>,
    /// So many disks, the last ones, are not members yet.
    added_count: usize,
    idles_soon: bool,
    /// The mount that serves the files while no server runs.
    setup: RefCell<Option<UnionMount>>,
    /// Dropped last: it unmounts file systems and detaches loop devices that are left in it.
    room: Room,
}

impl Array {
    /// Put everything up, empty and mounted.
    ///
    /// Units    disk_bytes: of each
    /// Errors   a tool that is not installed, no memory, a layout that does not go with so many
    /// disks
    pub fn create(place: &Place, ground: &Ground, disk_bytes: u64) -> Result<Array> {
        ensure!(
            ground.layout != Layout::Plain || ground.disk_count == 1,
            "--disks {} needs --layout, which makes one place of them; give it as well",
            ground.disk_count
        );
        let room = Room::in_memory()?;
        room.folder(UNION)?;
        let mut array = Array {
            layout: ground.layout,
            file_system: ground.file_system,
            media_format: ground.media_format,
            disks: Vec::new(),
            catalogue: None,
            added_count: ground.added_count as usize,
            idles_soon: ground.idles_soon,
            setup: RefCell::new(None),
            room,
        };
        for number in 0..ground.disk_count {
            let disk_bytes = ground
                .sizes
                .get(number as usize)
                .copied()
                .unwrap_or(disk_bytes);
            let disk = match place {
                Place::Table5(_) | Place::Ssd => Disk::Slow(SlowDisk::create(
                    &ground.disk_spec(ByteCount(disk_bytes), place),
                )?),
                Place::Memory => {
                    Disk::Memory(memory_disk(&array.room, &format!("d{number}"), disk_bytes)?)
                }
                Place::Folder(_) => bail!("a folder is one disk; leave out --disks and --layout"),
            };
            array.disks.push(disk);
        }
        array.timing(false)?;
        array.format()?;
        array.mount_disks()?;
        if ground.layout.is_pool() {
            array.make_pool(ground.wish.as_deref())?;
        }
        if ground.layout == Layout::Mergerfs {
            for branch in array.branches() {
                fs::create_dir(branch)?;
            }
        }
        array.open()?;
        Ok(array)
    }

    fn format(&mut self) -> Result<()> {
        if self.layout.is_btrfs() {
            // The defaults of mkfs.btrfs(8) for metadata: two copies. Data by the layout.
            let metadata = if self.disks.len() > 1 { "raid1" } else { "dup" };
            return run(Command::new("mkfs.btrfs")
                .args(["-q", "-f", "-K", "-d", self.layout.name(), "-m", metadata])
                .args(self.disks.iter().map(Disk::device)));
        }
        for disk in &self.disks {
            format(disk.device(), self.file_system, self.media_format)?;
        }
        if self.layout.is_pool() {
            let device = memory_disk(&self.room, "catalogue", CATALOGUE_BYTES)?;
            format(&device, FileSystem::Ext4, false)?;
            self.catalogue = Some(device);
        }
        Ok(())
    }

    fn mount_disks(&self) -> Result<()> {
        if self.layout.is_btrfs() {
            // Name all devices, so that no program must have scanned for them.
            let devices: Vec<String> = self
                .disks
                .iter()
                .map(|disk| format!("device={}", disk.device().display()))
                .collect();
            let options = format!("noatime,{}", devices.join(","));
            return run(Command::new("mount")
                .args(["-t", "btrfs", "-o", &options])
                .arg(self.disks[0].device())
                .arg(self.root()));
        }
        for (number, disk) in self.disks.iter().enumerate() {
            let folder = self.member(number)?;
            mount(disk.device(), &folder, self.file_system, self.media_format)?;
        }
        if let Some(catalogue) = &self.catalogue {
            mount(catalogue, &self.folder("names")?, FileSystem::Ext4, false)?;
        }
        Ok(())
    }

    /// Unmount everything, which drops all caches of the files.
    pub fn unmount(&self) -> Result<()> {
        self.shut();
        if self.layout.is_btrfs() {
            return unmount(&self.root());
        }
        for number in 0..self.disks.len() {
            unmount(&self.member(number)?)?;
        }
        match &self.catalogue {
            Some(_) => unmount(&self.folder("names")?),
            None => Ok(()),
        }
    }

    /// Mount everything again.
    pub fn mount(&self) -> Result<()> {
        self.mount_disks()?;
        self.open()
    }

    fn make_pool(&self, wish: Option<&str>) -> Result<()> {
        let binary = find_rushes()?;
        let branches = self.branches();
        for branch in &branches {
            fs::create_dir(branch)?;
        }
        let catalogue = self.catalogue_folder();
        fs::create_dir(&catalogue)?;
        run(Command::new(&binary)
            .args(["pool", "create"])
            .arg(&catalogue)
            .args(&branches[..branches.len() - self.added_count]))?;
        let striped = (self.layout == Layout::PoolStriped).then_some("striped");
        let wish: Vec<&str> = striped.into_iter().chain(wish).collect();
        if wish.is_empty() {
            return Ok(());
        }
        run(Command::new(&binary)
            .args(["pool", "policy"])
            .arg(&catalogue)
            .args(["--set", &wish.join(" ")]))
    }

    /// Add the disks that were left out as members.
    pub fn add_members(&self) -> Result<()> {
        let branches = self.branches();
        let new = &branches[branches.len() - self.added_count..];
        if new.is_empty() {
            return Ok(());
        }
        run(Command::new(find_rushes()?)
            .args(["pool", "add"])
            .arg(self.catalogue_folder())
            .args(new))
    }

    /// Set when the pool tidies itself, in the words of `rushes pool policy`.
    pub fn tidy(&self, schedule: &str) -> Result<()> {
        run(Command::new(find_rushes()?)
            .args(["pool", "policy"])
            .arg(self.catalogue_folder())
            .args(["--tidy", schedule]))
    }

    /// The pool's own status.
    pub fn pool_status(&self) -> Result<Value> {
        let out = Command::new(find_rushes()?)
            .args(["pool", "status", "--json"])
            .arg(self.catalogue_folder())
            .output()?;
        let mut all: Vec<Value> = serde_json::from_slice(&out.stdout).with_context(|| {
            format!(
                "rushes pool status printed no JSON: {}",
                String::from_utf8_lossy(&out.stderr)
            )
        })?;
        all.pop().context("rushes pool status named no pool")
    }

    fn folder(&self, name: &str) -> Result<PathBuf> {
        self.room.folder(name)
    }

    /// Mount point of a disk's own file system.
    fn member(&self, number: usize) -> Result<PathBuf> {
        self.folder(&format!("m{number}"))
    }

    fn catalogue_folder(&self) -> PathBuf {
        self.room.path().join("names").join(BRANCH)
    }

    /// Members of the pool, branches of mergerfs.
    pub fn branches(&self) -> Vec<PathBuf> {
        (0..self.disks.len())
            .map(|number| self.room.path().join(format!("m{number}")).join(BRANCH))
            .collect()
    }

    /// The folder that all its mounts are in.
    pub fn all_mounts(&self) -> &Path {
        self.room.path()
    }

    /// The folder with all files.
    pub fn root(&self) -> PathBuf {
        let name = match self.layout {
            Layout::Plain => "m0",
            _ => UNION,
        };
        self.room.path().join(name)
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Number of disks.
    pub fn disk_count(&self) -> u64 {
        self.disks.len() as u64
    }

    /// True if a process of its own makes one place of the disks; it belongs to the server.
    fn is_served(&self) -> bool {
        self.layout.is_pool() || self.layout == Layout::Mergerfs
    }

    /// Make the files reachable while there is no server.
    fn open(&self) -> Result<()> {
        if self.is_served() {
            let nobody = self.room.path().join("no-daemon");
            *self.setup.borrow_mut() = Some(self.union_mount(&nobody, None)?);
        }
        Ok(())
    }

    fn shut(&self) {
        drop(self.setup.borrow_mut().take());
    }

    /// Make the files reachable by a process in the server's control group, in place of ours, until
    /// [`Array::unmount`]. `None`: this layout needs no process.
    ///
    /// `runtime`: the folder of the daemon's sockets, if there is a daemon.
    pub fn serve(&self, runtime: &Path, cgroup: &Cgroup) -> Result<Option<UnionMount>> {
        if !self.is_served() {
            return Ok(None);
        }
        self.shut();
        self.union_mount(runtime, Some(cgroup)).map(Some)
    }

    fn union_mount(&self, runtime: &Path, cgroup: Option<&Cgroup>) -> Result<UnionMount> {
        let command = |program: &Path| match cgroup {
            Some(cgroup) => cgroup.command(program),
            None => Command::new(program),
        };
        let root = self.root();
        let command = match self.layout {
            Layout::Mergerfs => {
                let branches: Vec<String> = self
                    .branches()
                    .iter()
                    .map(|branch| branch.display().to_string())
                    .collect();
                let mut command = command(Path::new("mergerfs"));
                // The options in its manual for files larger than memory and for programs that map
                // files.
                command.args(["-f", "-o"]).arg(
                    "allow_other,cache.files=partial,dropcacheonclose=true,category.create=mfs,minfreespace=64M",
                );
                command.arg(branches.join(":")).arg(&root);
                command
            }
            _ => {
                let mut command = command(&find_rushes()?);
                command
                    .args(["pool", "mount"])
                    .arg(self.catalogue_folder())
                    .arg(&root)
                    .arg("--runtime-dir")
                    .arg(runtime)
                    .args(self.idles_soon.then_some("--tidy-after=1"));
                command
            }
        };
        UnionMount::start(command, root, self.room.path().join("union.log"))
    }

    /// The files with a file's bytes in the file systems of the disks; one where a disk has it all.
    pub fn native(&self, path: &str) -> Result<Vec<PathBuf>> {
        Ok(self.native_of(&[path.to_owned()])?.remove(0))
    }

    /// The same for many files, in the order given; for a folder, which is a sequence, the files of
    /// all frames together.
    pub fn native_of(&self, paths: &[String]) -> Result<Vec<Vec<PathBuf>>> {
        let root = self.root();
        match self.layout {
            Layout::Pool | Layout::PoolStriped if paths.is_empty() => Ok(Vec::new()),
            Layout::Pool | Layout::PoolStriped => {
                let mut files: Vec<(usize, PathBuf)> = Vec::new();
                for (number, path) in paths.iter().enumerate() {
                    let path = root.join(path);
                    if path.is_dir() {
                        for entry in std::fs::read_dir(&path)? {
                            files.push((number, entry?.path()));
                        }
                    } else {
                        files.push((number, path));
                    }
                }
                let out = Command::new(find_rushes()?)
                    .args(["pool", "where", "--json"])
                    .args(files.iter().map(|(_, path)| path))
                    .output()?;
                let reports: Value = serde_json::from_slice(&out.stdout).with_context(|| {
                    format!(
                        "rushes pool where printed no JSON: {}",
                        String::from_utf8_lossy(&out.stderr)
                    )
                })?;
                let reports = reports.as_array().context("no list of files")?;
                ensure!(
                    reports.len() == files.len(),
                    "rushes pool where named {} of {} files",
                    reports.len(),
                    files.len()
                );
                let mut found = vec![Vec::new(); paths.len()];
                for ((number, _), report) in files.iter().zip(reports) {
                    found[*number].extend(objects(report));
                }
                Ok(found)
            }
            Layout::Mergerfs => {
                let on = |path: &String| -> Vec<PathBuf> {
                    let places = self.branches().into_iter().map(|branch| branch.join(path));
                    places.filter(|place| place.exists()).collect()
                };
                Ok(paths.iter().map(on).collect())
            }
            Layout::Plain | Layout::Raid0 | Layout::Single => {
                Ok(paths.iter().map(|path| vec![root.join(path)]).collect())
            }
        }
    }

    /// For each disk the number of these files of which it has bytes; `None`: the layout is neither
    /// a pool nor mergerfs.
    pub fn files_per_disk(&self, paths: &[String]) -> Result<Option<Vec<u64>>> {
        if !self.is_served() {
            return Ok(None);
        }
        let mut counts = vec![0; self.disks.len()];
        for places in self.native_of(paths)? {
            for (branch, count) in self.branches().iter().zip(&mut counts) {
                *count += u64::from(places.iter().any(|place| place.starts_with(branch)));
            }
        }
        Ok(Some(counts))
    }

    /// The daemon's names for files of a pool: their paths in the tree; for a striped file one name
    /// for each object, with its part.
    pub fn served_names(&self, paths: &[String]) -> Result<Vec<Vec<String>>> {
        let native = self.native_of(paths)?;
        let names = |(path, places): (&String, &Vec<PathBuf>)| match places.len() {
            1 => vec![path.clone()],
            // A sequence is one stream, even with frames on several disks.
            _ if self.root().join(path).is_dir() => vec![path.clone()],
            count => (1..=count)
                .map(|part| format!("{path} {part}/{count}"))
                .collect(),
        };
        Ok(paths.iter().zip(&native).map(names).collect())
    }

    /// Folders whose names, inodes and extents the lab reads to have them cached.
    pub fn folders_to_know(&self) -> Result<Vec<PathBuf>> {
        if !self.layout.is_pool() {
            return Ok(vec![self.root()]);
        }
        let mut folders = self.branches();
        folders.push(self.catalogue_folder());
        Ok(folders)
    }

    /// A folder on each file system that must be synced for all bytes to be on disks, the topmost
    /// first.
    pub fn folders_to_sync(&self) -> Result<Vec<PathBuf>> {
        let mut folders = vec![self.root()];
        if !self.layout.is_btrfs() {
            for number in 0..self.disks.len() {
                folders.push(self.member(number)?);
            }
        }
        if self.catalogue.is_some() {
            folders.push(self.folder("names")?);
        }
        Ok(folders)
    }

    /// Block devices of the disks.
    pub fn devices(&self) -> Vec<PathBuf> {
        let devices = self.disks.iter().map(Disk::device);
        devices.map(Path::to_owned).collect()
    }

    /// Set the read-ahead of the layer over the disks. Units: KiB.
    pub fn set_read_ahead(&self, kib: u64) -> Result<()> {
        let knob = match self.layout {
            Layout::Raid0 | Layout::Single => btrfs_knob(&self.root())?,
            Layout::Plain => return Ok(()),
            _ => {
                let device = fs::metadata(self.root())?.dev();
                PathBuf::from(format!(
                    "/sys/class/bdi/{}:{}/read_ahead_kb",
                    rustix::fs::major(device),
                    rustix::fs::minor(device)
                ))
            }
        };
        fs::write(&knob, kib.to_string()).with_context(|| format!("{} = {kib}", knob.display()))
    }

    fn slow(&self) -> impl Iterator<Item = &SlowDisk> {
        self.disks.iter().filter_map(|disk| match disk {
            Disk::Slow(disk) => Some(disk),
            Disk::Memory(_) => None,
        })
    }

    /// Switch the timing of all slow disks.
    pub fn timing(&self, on: bool) -> Result<()> {
        for disk in self.slow() {
            disk.timing(on)?;
        }
        Ok(())
    }

    /// Set the counts of all slow disks to zero.
    pub fn reset_statistics(&self) -> Result<()> {
        for disk in self.slow() {
            disk.reset_statistics()?;
        }
        Ok(())
    }

    /// The counts of each slow disk, and the sums of two of them.
    pub fn statistics(&self) -> Result<Value> {
        let mut all = Vec::new();
        for disk in self.slow() {
            all.push(serde_json::to_value(disk.statistics()?)?);
        }
        let sum = |name: &str| all.iter().filter_map(|one| one[name].as_f64()).sum::<f64>();
        Ok(json!({
            "cpu_ms": sum("cpu_ms"),
            "stamps_lost_count": sum("stamps_lost_count") as u64,
            "disks": all,
        }))
    }

    /// Let all slow disks note when pages with these stamps come; `None`: no more.
    pub fn watch_stamps(&self, key: Option<NonZeroU64>) -> Result<()> {
        for disk in self.slow() {
            disk.watch_stamps(key)?;
        }
        Ok(())
    }

    /// The notes of all slow disks; `None`: there is no slow disk.
    pub fn arrivals(&self) -> Result<Option<Vec<Arrival>>> {
        let mut all = None;
        for disk in self.slow() {
            all.get_or_insert_with(Vec::new).extend(disk.arrivals()?);
        }
        Ok(all)
    }

    /// The sum of the kernel's counts of all disks.
    pub fn block_statistics(&self) -> Result<BlockStatistics> {
        let mut all = BlockStatistics::default();
        for disk in &self.disks {
            let name = disk.device().file_name().context("a nameless device")?;
            all.add(&BlockStatistics::read(Path::new(name))?);
        }
        Ok(all)
    }

    /// `pool of 4 ext4`, for instance.
    pub fn file_system_name(&self) -> String {
        let native = native_name(self.file_system, self.media_format);
        let count = self.disks.len();
        match self.layout {
            Layout::Plain => native.to_owned(),
            Layout::Raid0 | Layout::Single => format!("btrfs {} of {count}", self.layout.name()),
            _ => format!("{} of {count} {native}", self.layout.name()),
        }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        let _ = self.timing(false);
        if let Err(error) = self.unmount() {
            eprintln!("{error:#}");
        }
        for disk in self.disks.drain(..) {
            if let Disk::Slow(disk) = disk
                && let Err(error) = disk.close()
            {
                eprintln!("a slow disk did not go away cleanly: {error}");
            }
        }
    }
}

/// The objects in one report of `rushes pool where`.
fn objects(report: &Value) -> Vec<PathBuf> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    list(&report["segments"])
        .iter()
        .flat_map(|segment| list(&segment["objects"]))
        .filter_map(|object| object["path"].as_str().map(PathBuf::from))
        .collect()
}

/// `ext4 for media`, for instance.
pub fn native_name(file_system: FileSystem, media_format: bool) -> &'static str {
    match file_system {
        FileSystem::Ext4 if media_format => "ext4 for media",
        FileSystem::Ext4 => "ext4",
        FileSystem::Xfs => "xfs",
    }
}

/// A new file system on a device.
pub fn format(device: &Path, file_system: FileSystem, media_format: bool) -> Result<()> {
    // Nothing lazy: no thread of the file system may write while streams play.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
    let mut command = match file_system {
        FileSystem::Ext4 => {
            let mut command = Command::new("mkfs.ext4");
            // Blocks as large as pages: on a small device mkfs would make smaller ones, and a
            // stamped page would not lie in one block.
            command.args(["-q", "-F", "-m", "0", "-b", "4096"]);
            match media_format {
                true => command
                    .args(["-T", "largefile", "-G", "8192", "-O", "sparse_super2", "-E"])
                    .arg(format!("packed_meta_blocks=1,{options}")),
                false => command.args(["-E", options]),
            };
            command
        }
        FileSystem::Xfs => {
            let mut command = Command::new("mkfs.xfs");
            command.args(["-q", "-f", "-K"]);
            command
        }
    };
    run(command.arg(device))
}

/// Mount a file system that [`format`] made.
pub fn mount(
    device: &Path,
    folder: &Path,
    file_system: FileSystem,
    media_format: bool,
) -> Result<()> {
    // ext4 must not prefetch all bitmaps either, as it would in the first seconds after a mount.
    let (kind, options) = match file_system {
        FileSystem::Ext4 if media_format => ("ext4", "noatime,no_prefetch_block_bitmaps,commit=30"),
        FileSystem::Ext4 => ("ext4", "noatime,no_prefetch_block_bitmaps"),
        FileSystem::Xfs => ("xfs", "noatime"),
    };
    run(Command::new("mount")
        .args(["-t", kind, "-o", options])
        .arg(device)
        .arg(folder))
}

/// Unmount, with retries: a process that has just ended may still use the file system.
pub(crate) fn unmount(folder: &Path) -> Result<()> {
    let end = Instant::now() + END_MAX;
    loop {
        match run(Command::new("umount").arg(folder)) {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            result => return result,
        }
    }
}

fn memory_disk(room: &Room, name: &str, bytes: u64) -> Result<PathBuf> {
    let image = room.path().join(format!("{name}.img"));
    let file = File::create(&image)?;
    // Allocate all of it now: pages that a server's writes allocate count as the server's memory.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("no memory for a disk of {} MiB", bytes >> 20))?;
    let out = Command::new("losetup")
        .args(["--find", "--show"])
        .arg(&image)
        .output()
        .context("losetup (package mount) cannot be run")?;
    ensure!(
        out.status.success(),
        "losetup failed ({}): {}",
        out.status,
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(PathBuf::from(
        String::from_utf8_lossy(&out.stdout).trim().to_owned(),
    ))
}

/// The file in which btrfs has its read-ahead.
fn btrfs_knob(root: &Path) -> Result<PathBuf> {
    let out = Command::new("findmnt")
        .args(["--noheadings", "--output", "UUID", "--target"])
        .arg(root)
        .output()
        .context("findmnt (package util-linux) cannot be run")?;
    let id = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    Ok(Path::new("/sys/fs/btrfs")
        .join(id)
        .join("bdi/read_ahead_kb"))
}

/// A process that serves a folder by FUSE; ended, and the folder unmounted, when dropped.
#[derive(Debug)]
pub struct UnionMount {
    child: Child,
    folder: PathBuf,
    log: PathBuf,
}

impl UnionMount {
    /// Start it by this command, and wait for the mount.
    ///
    /// Errors   the process ended, or its mount did not come within 30 s
    pub fn start(mut command: Command, folder: PathBuf, log: PathBuf) -> Result<UnionMount> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{command:?} cannot be started"))?;
        let mut mount = UnionMount { child, folder, log };
        mount.wait_until_ready()?;
        Ok(mount)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        while !is_mounted(&self.folder) {
            go_on()?;
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "what should serve {} ended at once ({status}):\n{}",
                    self.folder.display(),
                    self.log_tail()
                );
            }
            ensure!(
                Instant::now() < end,
                "{} was not mounted within {READY_MAX:?}:\n{}",
                self.folder.display(),
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// End the process by an unmount, so that it writes everything to its disks first.
    fn end(&mut self) {
        if is_mounted(&self.folder)
            && let Err(error) = unmount(&self.folder)
        {
            eprintln!("{error:#}");
        }
        let end = Instant::now() + END_MAX;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                eprintln!("what served {} is killed", self.folder.display());
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.wait();
    }
}

impl Drop for UnionMount {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn disks_have_room_for_files_in_turn_and_little_more() {
        for (disks, files, more, least) in [
            (1, vec![GIB; 3], 0, 3 * GIB),
            (4, vec![GIB; 8], 0, 2 * GIB),
            // One of the two disks has two files.
            (2, vec![GIB; 3], 0, 2 * GIB),
            (2, vec![GIB; 2], 4 * GIB, 3 * GIB),
            (8, vec![], 0, 0),
        ] {
            let each = disk_bytes(disks, &files, more);
            assert!(each > least && each < least * 5 / 4 + 512 * (1 << 20));
            assert_eq!(each % DISK_BYTES_STEP, 0);
        }
    }

    #[test]
    fn objects_of_a_file_are_read_from_what_the_pool_says() {
        let report = json!({"segments": [
            {"objects": [{"path": "/a/objects/3f/3f0c"}, {"path": "/b/objects/00/0012"}]},
            {"objects": [{"path": null}]},
        ]});
        let expected = ["/a/objects/3f/3f0c", "/b/objects/00/0012"].map(PathBuf::from);
        assert_eq!(objects(&report), expected);
        assert!(objects(&json!({"segments": []})).is_empty());
    }
}
