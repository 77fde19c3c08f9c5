// SPDX-License-Identifier: Apache-2.0
//! The stage of a run: a disk with a file system on it, and footage laid out evenly over that.
//!
//! The place of a file decides how long seeks take, so the lab does not leave it to chance: it
//! fills the free space with filler files, reads their physical positions, removes the fillers at
//! the right place and writes a file into the hole. FIEMAP must then confirm the place, or the lab
//! refuses the stage.
//!
//! A folder of the user's own, `--disk PATH`, is used as it is: its file system chooses the places.
//! Several disks are an [`Array`], whose file systems choose them, too.

pub mod array;
pub mod blocks;
pub mod footage;
pub mod ground;
pub mod room;
pub mod take;

use crate::disk::{Arrival, DiskSpec, FileSystem, SlowDisk};
use crate::servers::smbd::USER;
use crate::stage::array::{Array, native_name};
use crate::stage::blocks::BlockStatistics;
use crate::stage::footage::{Clip, mix};
use crate::stage::ground::{Ground, Layout, Place};
use crate::stage::room::{Room, go_on};
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rushes_core::units::ByteCount;
use rushes_kit::mounts::sync_below;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Size of the modelled disk; its file is sparse and takes memory for written bytes only.
const DISK_BYTES: ByteCount = ByteCount(40 << 30);
const PLAN: &str = "plan.json";
const FILLER_BYTES: u64 = 64 << 20;
/// Memory beside the footage for servers with 1 GiB of cache, clients and the machine. Units:
/// bytes.
const MEMORY_BESIDE_BYTES: u64 = 3 << 30;
/// Fillers leave smaller pieces of free space: no frame of a sequence fits in them. Units: bytes.
const PLUG_BYTES_MIN: u64 = 64 << 10;
const WRITE_BYTES: usize = 4 << 20;
/// Folder below the share for files beside footage and copies: not laid out evenly, and no rule
/// matches them.
pub const MATERIAL: &str = "material";
/// Clip numbers of files for copiers begin here.
const COPY_CLIP_BASE: u64 = 1 << 20;
const DIRECT_ALIGN: usize = 4096;

/// The files on the disk. Two plans that are equal make the same bytes in the same places.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Seed of all footage.
    pub seed: u64,
    /// Files, or folders of frames, that clients play.
    pub stream_count: u64,
    /// Bits a second of each.
    pub bitrate: u64,
    /// Frames of each in 1000 s of play.
    pub frames_per_kilosecond: u64,
    /// Frames of each.
    pub frame_count: u64,
    /// Each frame is a file.
    pub sequence: bool,
    /// Files for copiers.
    pub copy_count: u64,
    /// Size of each of those. Units: bytes.
    pub copy_bytes: u64,
    /// Empty files in one folder that clients list.
    pub entry_count: u64,
}

impl Plan {
    /// Size of a frame. Units: bytes.
    pub fn frame_bytes(&self) -> u64 {
        (u128::from(self.bitrate) * 1000 / 8 / u128::from(self.frames_per_kilosecond.max(1))) as u64
    }

    /// Time between frames.
    pub fn period(&self) -> Duration {
        Duration::from_nanos(1_000_000_000_000 / self.frames_per_kilosecond.max(1))
    }

    /// Where frame `frame` begins in its clip; no two frames of a sequence share a page.
    pub fn frame_offset(&self, frame: u64) -> u64 {
        if self.sequence {
            frame * self.frame_bytes().next_multiple_of(DIRECT_ALIGN as u64)
        } else {
            frame * self.frame_bytes()
        }
    }

    /// The path that a stream reads, below the share: a file, or the folder of a sequence.
    pub fn stream_path(&self, stream: u64) -> String {
        if self.sequence {
            format!("footage/stream{stream:02}")
        } else {
            format!("footage/stream{stream:02}/clip.mov")
        }
    }

    /// Path of one frame of a sequence, below the share.
    pub fn frame_path(&self, stream: u64, frame: u64) -> String {
        format!("footage/stream{stream:02}/shot.{:04}.dpx", frame + 1)
    }

    /// Path of a file for copiers, below the share.
    pub fn copy_path(copy: u64) -> String {
        format!("copies/reel{copy:02}.mxf")
    }

    /// Content of a stream.
    pub fn stream_clip(&self, stream: u64) -> Clip {
        Clip {
            seed: self.seed,
            number: stream,
        }
    }

    /// Content of a file for copiers.
    pub fn copy_clip(&self, copy: u64) -> Clip {
        Clip {
            seed: self.seed,
            number: COPY_CLIP_BASE + copy,
        }
    }

    /// Path of an entry of the listed folder, below the share.
    pub fn entry_path(entry: u64) -> String {
        format!("archive/take{entry:06}")
    }

    /// The prepared streams that play when only `count` do: they too lie evenly over the disk.
    pub fn chosen_streams(&self, count: u64) -> Vec<u64> {
        (0..count)
            .map(|index| index * self.stream_count / count.max(1))
            .collect()
    }

    /// True when a stage made for this plan can serve `wanted` as well.
    pub fn covers(&self, wanted: &Plan) -> bool {
        let same_kind = Plan {
            stream_count: wanted.stream_count,
            frame_count: wanted.frame_count,
            copy_count: wanted.copy_count,
            entry_count: wanted.entry_count,
            ..self.clone()
        };
        same_kind == *wanted
            && self.stream_count >= wanted.stream_count
            && self.frame_count >= wanted.frame_count
            && self.copy_count >= wanted.copy_count
            && self.entry_count >= wanted.entry_count
    }

    fn stream_bytes(&self) -> u64 {
        self.frame_offset(self.frame_count)
    }

    /// All files with bytes, in their order on the disk: copies between streams.
    fn pieces(&self) -> Vec<Piece> {
        let mut keyed: Vec<(u64, Piece)> = (0..self.stream_count)
            .map(|n| ((2 * n + 1) * self.copy_count.max(1), Piece::Stream(n)))
            .chain(
                (0..self.copy_count)
                    .map(|n| ((2 * n + 1) * self.stream_count.max(1), Piece::Copy(n))),
            )
            .collect();
        keyed.sort();
        keyed.into_iter().map(|(_, piece)| piece).collect()
    }

    fn bytes(&self, piece: Piece) -> u64 {
        match piece {
            Piece::Stream(_) => self.stream_bytes(),
            Piece::Copy(_) => self.copy_bytes,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    Stream(u64),
    Copy(u64),
}

/// Writes the file of a stream from real footage.
pub type Author<'a> = &'a mut dyn FnMut(u64, &Path) -> Result<()>;

/// A disk with footage on it.
#[derive(Debug)]
pub struct Stage {
    plan: Plan,
    place: Place,
    ground: Ground,
    root: PathBuf,
    disk: Option<SlowDisk>,
    array: Option<Array>,
    shelf: Option<Shelf>,
}

impl Stage {
    /// Make a stage, or take a kept one whose plan covers this.
    ///
    /// Errors   no room, no FUSE, no loop device, or the file system put the footage elsewhere
    pub fn prepare(
        room: &Room,
        place: &Place,
        plan: &Plan,
        ground: Ground,
        keep: Option<&Path>,
        quiet: bool,
    ) -> Result<Stage> {
        if keep.is_none() {
            return Stage::prepare_to_write(room, place, plan, ground, quiet);
        }
        match place {
            Place::Folder(folder) => Stage::in_folder(folder, plan, ground.room_bytes, None, quiet),
            Place::Table5(1) if !needs_array(place, &ground) => {
                Stage::on_slow_disk(room, plan, ground, keep, None, quiet)
            }
            Place::Table5(_) | Place::Ssd | Place::Memory => {
                bail!("--keep is for one disk, `--disk table5`; leave it out")
            }
        }
    }

    /// The same for runs that write: on this ground, and never kept, since a disk with other writes
    /// no longer matches its plan.
    pub fn prepare_to_write(
        room: &Room,
        place: &Place,
        plan: &Plan,
        ground: Ground,
        quiet: bool,
    ) -> Result<Stage> {
        match place {
            Place::Folder(_) if ground.folder.is_some() => {
                bail!(
                    "--disk-folder is for the bytes of the modelled disk; leave out --disk-folder \
                     or --disk"
                )
            }
            _ if needs_array(place, &ground) => Stage::on_array(place, plan, ground, quiet),
            Place::Folder(folder) => Stage::in_folder(folder, plan, ground.room_bytes, None, quiet),
            Place::Table5(_) | Place::Ssd | Place::Memory => {
                Stage::on_slow_disk(room, plan, ground, None, None, quiet)
            }
        }
    }

    /// The same with real footage: `author` writes each stream's file, of about the planned size.
    pub fn prepare_real(
        room: &Room,
        place: &Place,
        plan: &Plan,
        author: Author<'_>,
    ) -> Result<Stage> {
        match place {
            Place::Folder(folder) => Stage::in_folder(folder, plan, 0, Some(author), false),
            Place::Table5(1) => {
                Stage::on_slow_disk(room, plan, Ground::default(), None, Some(author), false)
            }
            Place::Table5(_) | Place::Ssd | Place::Memory => {
                bail!("`{place}` cannot have real footage; expected `table5` or a folder")
            }
        }
    }

    fn in_folder(
        folder: &Path,
        plan: &Plan,
        room_bytes: u64,
        mut author: Option<Author<'_>>,
        quiet: bool,
    ) -> Result<Stage> {
        ensure_space(folder, plan, room_bytes, "--disk")?;
        let root = folder.join("rushes-lab-stage");
        let stage = Stage {
            plan: plan.clone(),
            place: Place::Folder(folder.to_owned()),
            ground: Ground::default(),
            root,
            disk: None,
            array: None,
            shelf: None,
        };
        fs::create_dir_all(&stage.root)
            .with_context(|| format!("{} cannot be written to", folder.display()))?;
        stage.make_folders()?;
        let bar = progress(stage.total_bytes(), quiet);
        for piece in plan.pieces() {
            stage.write_piece(piece, &mut author, &bar)?;
        }
        stage.own_everything()?;
        bar.finish_and_clear();
        Ok(stage)
    }

    fn on_slow_disk(
        room: &Room,
        plan: &Plan,
        ground: Ground,
        keep: Option<&Path>,
        mut author: Option<Author<'_>>,
        quiet: bool,
    ) -> Result<Stage> {
        let shelf = keep.map(Shelf::open).transpose()?;
        let (disk, reuse) = match &shelf {
            Some(shelf) => shelf.disk(plan)?,
            None => {
                match &ground.folder {
                    Some(folder) => ensure_space(folder, plan, ground.room_bytes, "--disk-folder")?,
                    None => ensure_memory(plan, ground.room_bytes)?,
                }
                (
                    SlowDisk::create(&ground.disk_spec(DISK_BYTES, &Place::Table5(1)))?,
                    None,
                )
            }
        };
        disk.timing(false)?;
        let stage = Stage {
            plan: reuse.clone().unwrap_or_else(|| plan.clone()),
            place: Place::Table5(1),
            ground,
            root: room.folder("stage")?,
            disk: Some(disk),
            array: None,
            shelf,
        };
        if reuse.is_some() {
            stage.mount()?;
            return Ok(stage);
        }
        stage.make_file_system()?;
        stage.mount()?;
        stage.lay_out(&mut author, quiet)?;
        stage.unmount()?;
        stage.mount()?;
        if let Some(shelf) = &stage.shelf {
            shelf.note(plan)?;
        }
        Ok(stage)
    }

    fn on_array(place: &Place, plan: &Plan, ground: Ground, quiet: bool) -> Result<Stage> {
        let files: Vec<u64> = plan
            .pieces()
            .iter()
            .map(|piece| plan.bytes(*piece))
            .collect();
        ensure!(
            ground.added_count < ground.disk_count,
            "--added {} of --disks {} leaves no member to begin with; give fewer",
            ground.added_count,
            ground.disk_count
        );
        let first_count = ground.disk_count - ground.added_count;
        let bytes = array::disk_bytes(first_count, &files, ground.room_bytes);
        let all_bytes: u64 = ground.sizes.iter().sum();
        match (&ground.folder, place) {
            // Disks of given sizes will be full at the end.
            (folder, _) if !ground.sizes.is_empty() => {
                let more = all_bytes.saturating_sub(footage_bytes(plan));
                match folder {
                    Some(folder) => ensure_space(folder, plan, more, "--disk-folder")?,
                    None => ensure_memory(plan, more)?,
                }
            }
            (Some(folder), _) => ensure_space(folder, plan, ground.room_bytes, "--disk-folder")?,
            // A disk in memory allocates its whole size at the beginning.
            (None, Place::Memory) => {
                let more = (bytes * ground.disk_count).saturating_sub(footage_bytes(plan));
                ensure_memory(plan, more)?;
            }
            (None, _) => ensure_memory(plan, ground.room_bytes)?,
        }
        let array = Array::create(place, &ground, bytes)?;
        let stage = Stage {
            plan: plan.clone(),
            place: place.clone(),
            root: array.root(),
            ground,
            disk: None,
            array: Some(array),
            shelf: None,
        };
        stage.make_folders()?;
        let bar = progress(stage.total_bytes(), quiet);
        for piece in plan.pieces() {
            stage.write_piece(piece, &mut None, &bar)?;
        }
        stage.own_everything()?;
        stage.sync()?;
        bar.finish_and_clear();
        stage.check_evenness()?;
        Ok(stage)
    }

    /// Checks that all disks have equally many files, give or take one, where the layout chose.
    fn check_evenness(&self) -> Result<()> {
        let (Some(array), None, 0) = (&self.array, &self.ground.wish, self.plan.copy_count) else {
            return Ok(());
        };
        if self.plan.sequence || !self.ground.sizes.is_empty() {
            return Ok(());
        }
        let paths: Vec<String> = (0..self.plan.stream_count)
            .map(|stream| self.plan.stream_path(stream))
            .collect();
        let mut counts = array.files_per_disk(&paths)?.unwrap_or_default();
        counts.truncate(counts.len() - self.ground.added_count as usize);
        let (least, most) = (counts.iter().min(), counts.iter().max());
        ensure!(
            most.zip(least)
                .is_none_or(|(most, least)| most - least <= 1),
            "disks have {counts:?} of the {} files; expected as many on each, since runs cannot be \
             compared otherwise",
            paths.len()
        );
        Ok(())
    }

    /// Its disks, unless it is a folder or one disk that the lab lays out on purpose.
    pub fn array(&self) -> Option<&Array> {
        self.array.as_ref()
    }

    /// True for a pool of ours.
    pub fn is_pool(&self) -> bool {
        self.ground.layout.is_pool()
    }

    /// The layer that makes one place of its disks.
    pub fn layout(&self) -> Layout {
        self.ground.layout
    }

    /// Number of disks.
    pub fn disk_count(&self) -> u64 {
        self.ground.disk_count
    }

    /// The prepared streams that play when only `count` do.
    pub fn chosen_streams(&self, count: u64) -> Vec<u64> {
        match self.array {
            // The first ones lie on the disks in turn; others could all lie on one.
            Some(_) => (0..count).collect(),
            None => self.plan.chosen_streams(count),
        }
    }

    /// The files with a file's bytes in the file systems of the disks.
    pub fn native(&self, path: &str) -> Result<Vec<PathBuf>> {
        match &self.array {
            Some(array) => array.native(path),
            None => Ok(vec![self.root.join(path)]),
        }
    }

    /// The daemon's names for these files.
    pub fn served_names(&self, paths: &[String]) -> Result<Vec<Vec<String>>> {
        match &self.array {
            Some(array) if self.is_pool() => array.served_names(paths),
            _ => Ok(paths.iter().map(|path| vec![path.clone()]).collect()),
        }
    }

    /// For each disk the number of these files of which it has bytes; `None`: the layout is neither
    /// a pool nor mergerfs.
    pub fn files_per_disk(&self, paths: &[String]) -> Result<Option<Vec<u64>>> {
        match &self.array {
            Some(array) => array.files_per_disk(paths),
            None => Ok(None),
        }
    }

    /// A folder on each file system that must be synced for all bytes to be on disks.
    pub fn folders_to_sync(&self) -> Result<Vec<PathBuf>> {
        match &self.array {
            Some(array) => array.folders_to_sync(),
            None => Ok(vec![self.root.clone()]),
        }
    }

    /// The plan of its files.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The folder to share.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The kind of its disks.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Switch the slow disks' timing; does nothing on other disks.
    pub fn timing(&self, on: bool) -> Result<()> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(disk.timing(on)?),
            (None, Some(array)) => array.timing(on),
            (None, None) => Ok(()),
        }
    }

    /// Set the counts of the slow disks to zero.
    pub fn reset_statistics(&self) -> Result<()> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(disk.reset_statistics()?),
            (None, Some(array)) => array.reset_statistics(),
            (None, None) => Ok(()),
        }
    }

    /// The counts of the slow disks since [`Stage::reset_statistics`].
    pub fn statistics(&self) -> Result<serde_json::Value> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(serde_json::to_value(disk.statistics()?)?),
            (None, Some(array)) => array.statistics(),
            (None, None) => Ok(serde_json::Value::Null),
        }
    }

    /// Let the slow disks note when pages with these stamps come, and delete earlier notes; `None`:
    /// no more. Does nothing on other disks.
    pub fn watch_stamps(&self, key: Option<NonZeroU64>) -> Result<()> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(disk.watch_stamps(key)?),
            (None, Some(array)) => array.watch_stamps(key),
            (None, None) => Ok(()),
        }
    }

    /// The notes of the slow disks; `None`: there is no slow disk.
    pub fn arrivals(&self) -> Result<Option<Vec<Arrival>>> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(Some(disk.arrivals()?)),
            (None, Some(array)) => array.arrivals(),
            (None, None) => Ok(None),
        }
    }

    /// The kernel's counts of the block devices so far; empty where there is none.
    pub fn block_statistics(&self) -> Result<BlockStatistics> {
        if let Some(array) = &self.array {
            return array.block_statistics();
        }
        match self.device() {
            Ok(device) => {
                BlockStatistics::read(Path::new(device.file_name().context("a nameless device")?))
            }
            // A folder on tmpfs or a network.
            Err(_) => Ok(BlockStatistics::default()),
        }
    }

    /// The name of its file system, such as `ext4`.
    pub fn file_system_name(&self) -> String {
        match (&self.disk, &self.array) {
            (Some(_), _) => {
                native_name(self.ground.file_system, self.ground.media_format).to_owned()
            }
            (None, Some(array)) => array.file_system_name(),
            (None, None) => find_mount(&self.root, "FSTYPE").unwrap_or_default(),
        }
    }

    /// True if the modelled disk has its write cache; `None`: it is another kind of disk.
    pub fn write_back(&self) -> Option<bool> {
        matches!(self.place, Place::Table5(_)).then_some(self.ground.write_back)
    }

    /// Make an empty folder below the share to which clients may write.
    pub fn make_folder_anew(&self, path: &str) -> Result<()> {
        let path = self.root.join(path);
        let cannot = || format!("{} cannot be made", path.display());
        if path.exists() {
            fs::remove_dir_all(&path).with_context(cannot)?;
        }
        fs::create_dir_all(&path).with_context(cannot)?;
        chown_to_user(&path)
    }

    /// Write made-up content into a file below the share, wherever the file system puts it.
    pub fn write_material(&self, path: &str, clip: Clip, bytes: u64) -> Result<()> {
        let path = self.root.join(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("{} cannot be made", folder.display()))?;
        }
        write_file(self.layout(), &path, clip, 0, bytes, &ProgressBar::hidden())
    }

    /// Write a file in a folder and remove it, as on a disk in use: the file system has then found
    /// free blocks there, for all servers alike.
    pub fn use_folder(&self, path: &str) -> Result<()> {
        let path = self.root.join(path).join(".used");
        let cannot = || format!("{} cannot be written", path.display());
        fs::write(&path, vec![1; 1 << 20]).with_context(cannot)?;
        let file = fs::File::options().append(true).open(&path);
        file.and_then(|file| file.sync_all()).with_context(cannot)?;
        fs::remove_file(&path).with_context(cannot)
    }

    /// Have everything written that its file systems have not written yet.
    pub fn sync(&self) -> Result<()> {
        let folder = self.array.as_ref().map(Array::all_mounts);
        sync_below(folder.unwrap_or(&self.root))
    }

    /// Drop all caches of it.
    pub fn cool(&mut self) -> Result<()> {
        self.sync()?;
        if let Some(array) = &self.array {
            array.unmount()?;
            return array.mount();
        }
        if self.disk.is_some() {
            // An unmount drops pages, inodes and names of this file system, and of no other.
            self.unmount()?;
            return self.mount();
        }
        fs::write("/proc/sys/vm/drop_caches", "3").context("caches cannot be dropped (not root?)")
    }

    /// Read names, inodes and extents of all files, so that they are cached, as after an editor
    /// browsed before playing.
    pub fn look_through(&self) -> Result<()> {
        if let Some(array) = &self.array {
            for folder in array.folders_to_know()? {
                look_through(&folder)?;
            }
            return Ok(());
        }
        for folder in ["footage", "copies", MATERIAL] {
            let path = self.root.join(folder);
            if path.is_dir() {
                look_through(&path)?;
            }
        }
        Ok(())
    }

    /// Set the read-ahead of the block devices and of the layer over them. Returns the former one
    /// of the first device. Units: KiB.
    pub fn set_read_ahead(&self, kib: u64) -> Result<u64> {
        let before = self
            .read_ahead()
            .context("the disk's read-ahead is unknown")?;
        for device in self.devices()? {
            let knob = queue_knob(&device, "read_ahead_kb")?;
            fs::write(&knob, kib.to_string())
                .with_context(|| format!("{} = {kib}", knob.display()))?;
        }
        if let Some(array) = &self.array {
            array.set_read_ahead(kib)?;
        }
        Ok(before)
    }

    /// The read-ahead of the first device now. Units: KiB.
    pub fn read_ahead(&self) -> Option<u64> {
        let knob = queue_knob(&self.device().ok()?, "read_ahead_kb").ok()?;
        fs::read_to_string(knob).ok()?.trim().parse().ok()
    }

    fn devices(&self) -> Result<Vec<PathBuf>> {
        match &self.array {
            Some(array) => Ok(array.devices()),
            None => Ok(vec![self.device()?]),
        }
    }

    /// The block device; of several the first.
    fn device(&self) -> Result<PathBuf> {
        match (&self.disk, &self.array) {
            (Some(disk), _) => Ok(disk.block_device().to_owned()),
            (None, Some(array)) => array.devices().into_iter().next().context("no disk"),
            (None, None) => device_of(&self.root),
        }
    }

    /// Restore the first content of the files for copiers, in their places.
    pub fn rewrite_copies(&self) -> Result<()> {
        let bar = ProgressBar::hidden();
        for copy in 0..self.plan.copy_count {
            self.write_piece(Piece::Copy(copy), &mut None, &bar)?;
            chown_to_user(&self.root.join(Plan::copy_path(copy)))?;
        }
        Ok(())
    }

    fn make_file_system(&self) -> Result<()> {
        let disk = self
            .disk
            .as_ref()
            .context("only slow disks are formatted")?;
        array::format(
            disk.block_device(),
            self.ground.file_system,
            self.ground.media_format,
        )
    }

    fn mount(&self) -> Result<()> {
        let disk = self.disk.as_ref().context("only slow disks are mounted")?;
        array::mount(
            disk.block_device(),
            &self.root,
            self.ground.file_system,
            self.ground.media_format,
        )
    }

    fn unmount(&self) -> Result<()> {
        array::unmount(&self.root)
    }

    fn total_bytes(&self) -> u64 {
        let pieces = self.plan.pieces();
        pieces.iter().map(|piece| self.plan.bytes(*piece)).sum()
    }

    fn make_folders(&self) -> Result<()> {
        for stream in 0..self.plan.stream_count {
            fs::create_dir_all(self.root.join(format!("footage/stream{stream:02}")))?;
        }
        fs::create_dir_all(self.root.join("copies"))?;
        fs::create_dir_all(self.root.join("archive"))?;
        for entry in 0..self.plan.entry_count {
            File::create(self.root.join(Plan::entry_path(entry)))?;
        }
        Ok(())
    }

    /// Let plain users read and write it.
    pub fn own_everything(&self) -> Result<()> {
        chown_to_user(&self.root)
    }

    fn lay_out(&self, author: &mut Option<Author<'_>>, quiet: bool) -> Result<()> {
        self.make_folders()?;
        let bar = progress(self.total_bytes(), quiet);
        match self.ground.file_system {
            FileSystem::Ext4 if !self.plan.pieces().is_empty() => {
                self.lay_out_evenly(author, &bar)?;
            }
            // Fillers do not steer XFS. By itself it puts each folder into the next quarter of the
            // disk, which is even enough beside writers, whose places the lab does not choose
            // either.
            FileSystem::Ext4 | FileSystem::Xfs => {
                for piece in self.plan.pieces() {
                    self.write_piece(piece, author, &bar)?;
                }
            }
        }
        self.own_everything()?;
        self.sync()?;
        bar.finish_and_clear();
        Ok(())
    }

    fn lay_out_evenly(&self, author: &mut Option<Author<'_>>, bar: &ProgressBar) -> Result<()> {
        self.give_up_reserve()?;
        let mut fillers = Fillers::soak(&self.root)?;
        let pieces = self.plan.pieces();
        for (index, piece) in pieces.iter().enumerate() {
            let bytes = self.plan.bytes(*piece);
            let wanted = fillers.open_hole(index, pieces.len(), bytes)?;
            self.write_piece(*piece, author, bar)?;
            fillers.plug()?;
            self.check_place(*piece, wanted, fillers.span)?;
        }
        fillers.remove()
    }

    /// ext4 reserves up to 16 MiB for its own blocks; left free, they would lie in the last hole
    /// and attract small files there. The next mount reserves them again.
    fn give_up_reserve(&self) -> Result<()> {
        let disk = self.disk.as_ref().context("only slow disks are filled")?;
        let name = disk
            .block_device()
            .file_name()
            .context("a device without name")?;
        let knob = Path::new("/sys/fs/ext4")
            .join(name)
            .join("reserved_clusters");
        fs::write(&knob, "0").with_context(|| format!("{} = 0", knob.display()))
    }

    fn write_piece(
        &self,
        piece: Piece,
        author: &mut Option<Author<'_>>,
        bar: &ProgressBar,
    ) -> Result<()> {
        match piece {
            Piece::Stream(stream) if author.is_some() => {
                bar.inc(self.plan.bytes(piece));
                author.as_mut().map_or(Ok(()), |author| {
                    author(stream, &self.root.join(self.plan.stream_path(stream)))
                })
            }
            Piece::Copy(copy) => write_file(
                self.layout(),
                &self.root.join(Plan::copy_path(copy)),
                self.plan.copy_clip(copy),
                0,
                self.plan.copy_bytes,
                bar,
            ),
            Piece::Stream(stream) if self.plan.sequence => {
                for frame in 0..self.plan.frame_count {
                    write_file(
                        self.layout(),
                        &self.root.join(self.plan.frame_path(stream, frame)),
                        self.plan.stream_clip(stream),
                        self.plan.frame_offset(frame),
                        self.plan.frame_bytes(),
                        bar,
                    )?;
                }
                Ok(())
            }
            Piece::Stream(stream) => write_file(
                self.layout(),
                &self.root.join(self.plan.stream_path(stream)),
                self.plan.stream_clip(stream),
                0,
                self.plan.stream_bytes(),
                bar,
            ),
        }
    }

    /// Checks that the piece lies where it should, and in few extents.
    fn check_place(&self, piece: Piece, wanted: u64, span: u64) -> Result<()> {
        let path = match piece {
            Piece::Copy(copy) => self.root.join(Plan::copy_path(copy)),
            Piece::Stream(stream) if self.plan.sequence => {
                self.root.join(self.plan.frame_path(stream, 0))
            }
            Piece::Stream(stream) => self.root.join(self.plan.stream_path(stream)),
        };
        let extents = extents(&path)?;
        let first = extents.first().map(|extent| extent.0);
        let off = first.map_or(u64::MAX, |first| first.abs_diff(wanted));
        let tolerance = span / 50 + 4 * FILLER_BYTES;
        ensure!(
            off <= tolerance,
            "{} should lie near byte {wanted} of the disk, but begins at {first:?}; \
             the stage would not be laid out evenly",
            path.display()
        );
        let size = extents.iter().map(|extent| extent.1).sum::<u64>();
        // ext4 has no extent longer than a block group, 128 MiB.
        let runs_max = 8 + 3 * size / (128 << 20);
        ensure!(
            extents.len() as u64 <= runs_max,
            "{} lies in {} pieces; more than {runs_max} would distort the measurement",
            path.display(),
            extents.len()
        );
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(disk) = self.disk.take() {
            let _ = disk.timing(false);
            if let Err(error) = self.unmount() {
                eprintln!("{error:#}");
            }
            if self.shelf.is_some() {
                return;
            }
            if let Err(error) = disk.close() {
                eprintln!("the slow disk did not go away cleanly: {error}");
            }
        } else if self.array.is_none() {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

/// The folder with a kept disk's bytes and its plan; the disk itself stays up between runs.
#[derive(Debug)]
struct Shelf {
    folder: PathBuf,
    _lock: File,
}

impl Shelf {
    fn open(folder: &Path) -> Result<Shelf> {
        let describe = || format!("{} (--keep) cannot be used", folder.display());
        fs::create_dir_all(folder).with_context(describe)?;
        let folder = fs::canonicalize(folder).with_context(describe)?;
        let lock = File::create(folder.join("lock")).with_context(describe)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("{} is in use by another run", folder.display()))?;
        Ok(Shelf {
            folder,
            _lock: lock,
        })
    }

    fn disk_name(&self) -> String {
        let mut key = 0u64;
        for byte in self.folder.as_os_str().as_encoded_bytes() {
            key = mix(key ^ u64::from(*byte));
        }
        format!("kept-{key:016x}")
    }

    /// The kept disk, if it is up and its plan covers this one; else a new one in its place.
    fn disk(&self, plan: &Plan) -> Result<(SlowDisk, Option<Plan>)> {
        let name = self.disk_name();
        let noted = fs::read(self.folder.join(PLAN))
            .ok()
            .and_then(|text| serde_json::from_slice::<Plan>(&text).ok());
        let found = SlowDisk::find(&name).ok();
        match (found, noted) {
            (Some(disk), Some(noted)) if noted.covers(plan) && disk.timing(false).is_ok() => {
                return Ok((disk, Some(noted)));
            }
            (Some(disk), _) => disk.close()?,
            // Remove the remains of a crash or a restart.
            (None, _) => drop(crate::disk::clean(false)),
        }
        // No later run may take a half-made stage for a whole one.
        let _ = fs::remove_file(self.folder.join(PLAN));
        let spec = DiskSpec {
            name,
            folder: self.folder.clone(),
            ..DiskSpec::table5(DISK_BYTES)
        };
        let _ = fs::remove_file(spec.folder.join(format!("rushes-disk-{}.img", spec.name)));
        ensure_memory(plan, 0)?;
        Ok((SlowDisk::create_detached(&spec)?, None))
    }

    fn note(&self, plan: &Plan) -> Result<()> {
        let path = self.folder.join(PLAN);
        fs::write(&path, serde_json::to_vec_pretty(plan)?)
            .with_context(|| format!("{} cannot be written", path.display()))
    }
}

/// Refuse a run whose modelled disk does not fit into memory: a machine without memory kills any
/// process.
fn ensure_memory(plan: &Plan, room_bytes: u64) -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let available = text
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?
                .trim()
                .strip_suffix(" kB")
        })
        .and_then(|kib| kib.parse::<u64>().ok())
        .context("/proc/meminfo has no MemAvailable")?
        * 1024;
    let footage = footage_bytes(plan) + room_bytes;
    ensure!(
        footage + MEMORY_BESIDE_BYTES <= available,
        "the footage of this run takes {} MiB of memory, the run itself {} MiB, and {} MiB are available; \
         prepare or write fewer streams, seconds or copies, or take a kept disk down \
         (rushes lab disk stat, rushes lab clean --kept DIR)",
        footage >> 20,
        MEMORY_BESIDE_BYTES >> 20,
        available >> 20
    );
    Ok(())
}

fn footage_bytes(plan: &Plan) -> u64 {
    plan.pieces().iter().map(|piece| plan.bytes(*piece)).sum()
}

/// Free space that the lab leaves on a user's file system. Units: bytes.
const LEFT_BYTES: u64 = 64 << 20;

/// Refuse a run whose bytes do not fit on the real disk of `folder`, which `option` chose.
fn ensure_space(folder: &Path, plan: &Plan, room_bytes: u64, option: &str) -> Result<()> {
    let found = rustix::fs::statvfs(folder)
        .with_context(|| format!("{} cannot be looked at", folder.display()))?;
    let (footage, free) = (
        footage_bytes(plan) + room_bytes,
        found.f_bavail * found.f_frsize,
    );
    ensure!(
        footage + LEFT_BYTES <= free,
        "the files of this run take {} MiB, {} MiB are to stay free, and {} has {} MiB; take fewer streams, seconds or copies, or name another \
         folder with {option}",
        footage >> 20,
        LEFT_BYTES >> 20,
        folder.display(),
        free >> 20
    );
    Ok(())
}

/// False for a folder and for one disk that the lab lays out on purpose.
fn needs_array(place: &Place, ground: &Ground) -> bool {
    let is_one = ground.layout == Layout::Plain && ground.disk_count == 1;
    !is_one || !matches!(place, Place::Table5(1) | Place::Folder(_))
}

/// Take down the disk kept in a folder and forget its footage.
pub fn drop_kept(folder: &Path) -> Result<()> {
    let shelf = Shelf::open(folder)?;
    if let Ok(disk) = SlowDisk::find(&shelf.disk_name()) {
        disk.close()?;
    }
    let _ = fs::remove_file(shelf.folder.join(PLAN));
    Ok(())
}

/// Files that occupy all free space, by physical position.
struct Fillers {
    folder: PathBuf,
    /// Physical start and path, ascending; `None`: removed for a hole.
    by_position: Vec<(u64, Option<PathBuf>)>,
    serial: u64,
    span: u64,
}

impl Fillers {
    fn soak(root: &Path) -> Result<Fillers> {
        let folder = root.join("fillers");
        fs::create_dir_all(&folder)?;
        let mut fillers = Fillers {
            folder,
            by_position: Vec::new(),
            serial: 0,
            span: 0,
        };
        fillers.plug()?;
        let whole: Vec<PathBuf> = fs::read_dir(&fillers.folder)?
            .flatten()
            .filter(|entry| entry.metadata().is_ok_and(|m| m.len() == FILLER_BYTES))
            .map(|entry| entry.path())
            .collect();
        for (path, extents) in whole.iter().zip(extents_of(&whole)?) {
            // Not a filler of remaining free space here and there: its hole would be in all these
            // places.
            let is_one_place = |first: u64| {
                let near = |(at, _): &(u64, u64)| at.abs_diff(first) <= 4 * FILLER_BYTES;
                extents.iter().all(near)
            };
            if let Some((physical, _)) = extents.first()
                && is_one_place(*physical)
            {
                fillers.by_position.push((*physical, Some(path.clone())));
            }
        }
        fillers.by_position.sort();
        let last = fillers.by_position.last().context("the disk is full")?;
        fillers.span = last.0 + FILLER_BYTES;
        Ok(fillers)
    }

    /// Fill all free space with ever smaller files.
    fn plug(&mut self) -> Result<()> {
        let mut size = FILLER_BYTES;
        while size >= PLUG_BYTES_MIN {
            go_on()?;
            let path = self.folder.join(format!("filler{:05}", self.serial));
            self.serial += 1;
            let file = match File::create(&path) {
                Ok(file) => file,
                // Not even a block for the name: the disk is full.
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error).context("the disk cannot be filled"),
            };
            match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
                Ok(()) => {}
                // The file keeps the space that it got: freed, that would be available only after
                // the journal's next commit, in the middle of the next file.
                Err(rustix::io::Errno::NOSPC) => size /= 2,
                Err(error) => {
                    return Err(error).context("space cannot be reserved on this file system");
                }
            }
        }
        Ok(())
    }

    /// Free the room for piece `index` of `count`; returns where it begins.
    fn open_hole(&mut self, index: usize, count: usize, bytes: u64) -> Result<u64> {
        let total = self.by_position.len();
        // One filler more, for the file system's own blocks.
        let needed = bytes.div_ceil(FILLER_BYTES) as usize + 1;
        let first = index * total / count;
        let Some(hole) = self.by_position.get_mut(first..first + needed) else {
            bail!("the disk is too small for {count} such files");
        };
        ensure!(
            hole.iter().all(|(_, path)| path.is_some()),
            "the disk is too small for {count} such files laid out evenly"
        );
        let start = hole[0].0;
        for (_, path) in hole {
            if let Some(path) = path.take() {
                fs::remove_file(path)?;
            }
        }
        // ext4 frees blocks only when the journal has committed.
        rustix::fs::syncfs(File::open(&self.folder)?)?;
        Ok(start)
    }

    fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.folder)?;
        Ok(())
    }
}

/// Physical extents of a file, position on its device and length, in file order. Units: bytes.
pub fn extents(path: &Path) -> Result<Vec<(u64, u64)>> {
    Ok(extents_of(&[path.to_owned()])?.remove(0))
}

/// The same for many files, in the order given.
fn extents_of(paths: &[PathBuf]) -> Result<Vec<Vec<(u64, u64)>>> {
    let out = Command::new("filefrag")
        .args(["-s", "-v", "-e", "-b4096"])
        .args(paths)
        .output()
        .context("filefrag (package e2fsprogs) cannot be run")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let found: Vec<_> = text
        .split("File size of ")
        .skip(1)
        .map(parse_filefrag)
        .collect();
    ensure!(
        out.status.success() && found.len() == paths.len(),
        "filefrag named {} of {} files: {}",
        found.len(),
        paths.len(),
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(found)
}

/// Number of fragments of a file, as filefrag counts: extents that follow one another on the disk
/// are one.
pub fn fragments(path: &Path) -> Result<u64> {
    let out = Command::new("filefrag")
        .arg(path)
        .output()
        .context("filefrag (package e2fsprogs) cannot be run")?;
    let text = String::from_utf8_lossy(&out.stdout);
    parse_fragments(&text).with_context(|| {
        format!(
            "filefrag did not count {}: {}{text}",
            path.display(),
            String::from_utf8_lossy(&out.stderr)
        )
    })
}

/// A line such as `clip.mov: 3 extents found`.
fn parse_fragments(text: &str) -> Option<u64> {
    let (before, _) = text.trim_end().rsplit_once(" extent")?;
    before.rsplit_once(' ')?.1.parse().ok()
}

/// Lines such as `   0:        0..   32767:      34816..     67583:  32768:             unwritten`.
fn parse_filefrag(text: &str) -> Vec<(u64, u64)> {
    text.lines()
        .filter_map(|line| {
            let mut parts = line.split(':');
            parts.next()?.trim().parse::<u64>().ok()?;
            let physical = parts
                .nth(1)?
                .split("..")
                .next()?
                .trim()
                .parse::<u64>()
                .ok()?;
            let length = parts.next()?.trim().parse::<u64>().ok()?;
            Some((physical * 4096, length * 4096))
        })
        .collect()
}

/// Write made-up footage past the page cache where the file system lets us.
fn write_file(
    layout: Layout,
    path: &Path,
    clip: Clip,
    from: u64,
    bytes: u64,
    bar: &ProgressBar,
) -> Result<()> {
    let describe = || format!("{} cannot be written", path.display());
    // No truncation: existing blocks stay where they are.
    let flags = OFlags::WRONLY | OFlags::CREATE;
    let mode = Mode::from_raw_mode(0o644);
    let past_cache = match layout {
        // mergerfs opens files with O_DIRECT and then refuses the writes.
        Layout::Mergerfs => OFlags::empty(),
        _ => OFlags::DIRECT,
    };
    let (file, direct) = match rustix::fs::open(path, flags | past_cache, mode) {
        Ok(file) => (File::from(file), !past_cache.is_empty()),
        // tmpfs before Linux 6.6, for instance.
        Err(rustix::io::Errno::INVAL) => {
            let file = rustix::fs::open(path, flags, mode).with_context(describe)?;
            (File::from(file), false)
        }
        Err(error) => return Err(error).with_context(describe),
    };
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error).with_context(describe),
    }
    let mut memory = vec![0u8; WRITE_BYTES.min(bytes as usize + DIRECT_ALIGN) + 2 * DIRECT_ALIGN];
    let start = memory.as_ptr().align_offset(DIRECT_ALIGN);
    let buffer = &mut memory[start..];
    let mut done = 0;
    while done < bytes {
        go_on()?;
        let piece = (WRITE_BYTES as u64).min(bytes - done) as usize;
        // Direct writes end on a block; `set_len` below cuts off the excess.
        let whole = if direct {
            piece.next_multiple_of(DIRECT_ALIGN)
        } else {
            piece
        };
        clip.fill(from + done, &mut buffer[..whole]);
        file.write_all_at(&buffer[..whole], done)
            .with_context(describe)?;
        done += piece as u64;
        bar.inc(piece as u64);
    }
    file.set_len(bytes).with_context(describe)?;
    Ok(())
}

fn chown_to_user(path: &Path) -> Result<()> {
    run(Command::new("chown")
        .arg("-R")
        .arg(format!("{USER}:"))
        .arg(path))
}

fn device_of(path: &Path) -> Result<PathBuf> {
    let source = find_mount(path, "SOURCE")?;
    ensure!(
        source.starts_with("/dev/"),
        "{} lies on `{source}`, which is not a block device",
        path.display()
    );
    Ok(fs::canonicalize(source)?)
}

fn queue_knob(device: &Path, name: &str) -> Result<PathBuf> {
    let block = device.file_name().context("the device has no name")?;
    let folder = fs::canonicalize(Path::new("/sys/class/block").join(block))?;
    let own = folder.join("queue").join(name);
    // A partition has no queue; its disk does.
    let parent = folder.join("../queue").join(name);
    Ok(if own.exists() { own } else { parent })
}

fn find_mount(path: &Path, column: &str) -> Result<String> {
    let out = Command::new("findmnt")
        .args(["--noheadings", "--output", column, "--target"])
        .arg(path)
        .output()
        .context("findmnt (package util-linux) cannot be run")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

fn progress(bytes: u64, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let bar = ProgressBar::with_draw_target(Some(bytes), target);
    if let Ok(style) =
        ProgressStyle::with_template("footage {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
    {
        bar.set_style(style);
    }
    bar
}

/// Run a command to its end; the error has its standard error.
pub fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command
        .output()
        .with_context(|| format!("{name} cannot be run"))?;
    ensure!(
        out.status.success(),
        "{name} failed ({}): {}",
        out.status,
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(())
}

fn look_through(folder: &Path) -> Result<()> {
    let cannot = || format!("{} cannot be looked through", folder.display());
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        let kind = entry.file_type().with_context(cannot)?;
        if kind.is_dir() {
            look_through(&entry.path())?;
        }
        // The others are sockets, which cannot be opened.
        if !kind.is_file() {
            continue;
        }
        // A seek to the first hole reads the extents.
        let file = fs::File::open(entry.path()).with_context(cannot)?;
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)) {
            // NXIO: an empty file, such as an object of a stripe longer than its file.
            Ok(_) | Err(rustix::io::Errno::NXIO) => {}
            Err(error) => return Err(error).with_context(cannot),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            seed: 1,
            stream_count: 12,
            bitrate: 100_000_000,
            frames_per_kilosecond: 25_000,
            frame_count: 1500,
            sequence: false,
            copy_count: 4,
            copy_bytes: 1 << 30,
            entry_count: 0,
        }
    }

    #[test]
    fn disk_that_is_too_small_is_told_before_anything_is_written() {
        let folder = std::env::temp_dir().join(format!("rushes-lab-full-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the test");
        let found = rustix::fs::statvfs(&folder).expect("it can be looked at");
        let free = found.f_bavail * found.f_frsize;
        let plan = |bytes| Plan {
            stream_count: 0,
            copy_count: 1,
            copy_bytes: bytes,
            ..plan()
        };
        // A file that fits, and leaves less free than it must.
        let Err(told) = Stage::in_folder(&folder, &plan(free - (32 << 20)), 0, None, true) else {
            panic!("it does not fit");
        };
        let told = format!("{told:#}");
        for expect in ["64 MiB are to stay free", "name another folder with --disk"] {
            assert!(told.contains(expect), "{told}");
        }
        assert_eq!(fs::read_dir(&folder).expect("it is there").count(), 0);
        // The bytes that runs write count as well.
        let room = ensure_space(&folder, &plan(1 << 20), free, "--disk");
        assert!(room.is_err());
        assert!(ensure_space(&folder, &plan(1 << 20), 0, "--disk").is_ok() || free < 70 << 20);
        fs::remove_dir(folder).expect("it is empty");
    }

    #[test]
    fn a_hundred_megabits_at_25_frames_is_500_kb_every_40_ms() {
        assert_eq!(plan().frame_bytes(), 500_000);
        assert_eq!(plan().period(), Duration::from_millis(40));
        assert_eq!(plan().stream_bytes(), 750_000_000);
    }

    #[test]
    fn fewer_streams_than_prepared_lie_evenly_all_the_same() {
        assert_eq!(plan().chosen_streams(4), [0, 3, 6, 9]);
        assert_eq!(plan().chosen_streams(12), (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn a_kept_stage_serves_smaller_plans_of_the_same_kind_only() {
        let smaller = Plan {
            stream_count: 3,
            copy_count: 0,
            frame_count: 100,
            ..plan()
        };
        assert!(plan().covers(&smaller));
        assert!(!smaller.covers(&plan()));
        assert!(!plan().covers(&Plan {
            seed: 2,
            ..smaller.clone()
        }));
        assert!(!plan().covers(&Plan {
            sequence: true,
            ..smaller
        }));
    }

    #[test]
    fn copies_lie_between_streams() {
        let pieces = plan().pieces();
        assert_eq!(pieces.len(), 16);
        let first = pieces.iter().position(|p| matches!(p, Piece::Copy(_)));
        assert!(first.is_some_and(|first| (1..4).contains(&first)));
    }

    #[test]
    fn fragments_are_counted_as_filefrag_says() {
        assert_eq!(parse_fragments("/a b/clip.mov: 1 extent found\n"), Some(1));
        assert_eq!(
            parse_fragments("/x/3 extents: 12 extents found\n"),
            Some(12)
        );
        assert_eq!(parse_fragments("clip.mov: FIBMAP unsupported\n"), None);
    }

    #[test]
    fn filefrag_is_read() {
        let text = "Filesystem type is: ef53\n\
            File size of x is 750000000 (183106 blocks of 4096 bytes)\n \
            ext:     logical_offset:        physical_offset: length:   expected: flags:\n   \
            0:        0..   32767:      34816..     67583:  32768:             unwritten\n   \
            1:    32768..   40000:     100000..    107232:   7233:      67584: last,eof\n";
        assert_eq!(
            parse_filefrag(text),
            [(34816 * 4096, 32768 * 4096), (100000 * 4096, 7233 * 4096)]
        );
    }
}
