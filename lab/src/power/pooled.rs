// SPDX-License-Identifier: Apache-2.0
//! A pool under power cuts: lanes work on its mount, with a daemon or without one, while all of its
//! disks are recorded; after a cut our own tools read and mend the pool.
//!
//! Meanwhile a thread disturbs it: it fills members, so that files continue on others, drains them,
//! rebalances and defrags files, and interrupts these commands. Folders have different policies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::fs::{Advice, FallocateFlags};
use serde_json::Value;

use super::chance::Chance;
use super::check::{Finding, Node, Rule, Tree};
use super::mounted::{How, Place, read_tree, run};
use super::record::make_lane_folders;
use super::recovery::{Recovered, unreadable};
use super::script::{LANE_COUNT, Step, lane_folder};
use super::served::{House, NAP_EVERY, WRITE_AGE};
use super::writer::{Host, Plain, Told, Writer};
use crate::disk::FileSystem;
use crate::servers::daemon::{Daemon, find_rushes};
use crate::stage::array::UnionMount;
use crate::stage::room::{self, Room};

/// Enough for names and a journal, each once. Units: MiB.
const CATALOGUE_MIB: u64 = 24;

/// One member holds all files of the lanes while another is full and the third is drained; and so
/// much that files are striped: core/src/pool/place.rs takes members with less than 64 MiB free
/// last. Units: MiB.
const MEMBER_MIB: u64 = 84;

const MEMBER_COUNT: usize = 3;

/// Folder of the pool on each file system.
const BRANCH: &str = "pool";

/// Mount point of the pool.
const UNION: &str = "union";

/// The file that fills a member.
const BALLAST: &str = "ballast";

/// Policies of lanes' folders, drawn for each.
const WISHES: [&str; 5] = [
    "single",
    "single choose=round_robin",
    "striped=2 unit=4KiB",
    "striped unit=16KiB",
    "striped=2 unit=64KiB",
];

/// A lane rests at each step that drops pages: else the recording would end before a disturbance.
const REST: Duration = Duration::from_millis(60);

/// A command of ours that takes longer on so small a pool hangs. Units: s.
const COMMAND_S_MAX: &str = "60";

/// The mount points of a pool and of its file systems.
#[derive(Debug)]
pub struct PoolGround {
    folder: PathBuf,
    rushes: PathBuf,
    /// The room of an ended run, made again since its paths are in the pool.
    _room: Option<Room>,
}

impl PoolGround {
    /// Makes it below this room.
    pub fn new(room: &Room) -> Result<PoolGround> {
        Ok(PoolGround {
            folder: room.path().to_owned(),
            rushes: find_rushes()?,
            _room: None,
        })
    }

    /// Makes it at the place of its recording.
    pub fn again(folder: &Path) -> Result<PoolGround> {
        Ok(PoolGround {
            folder: folder.to_owned(),
            rushes: find_rushes()?,
            _room: Some(Room::again(folder)?),
        })
    }

    /// The folder whose paths are in the recording.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The catalogue's disk, which has ext4, and those of the members, which have `kind`, but for
    /// one with ext4.
    pub fn places(&self, kind: FileSystem, options: &str) -> Result<Vec<Place>> {
        let place = |point: PathBuf, kind, mib| -> Result<Place> {
            fs::create_dir_all(&point)?;
            let options = options.to_owned();
            let how = How { kind, options };
            Ok(Place { how, point, mib })
        };
        fs::create_dir_all(self.folder.join(UNION))?;
        let mut places = vec![place(
            self.folder.join("names"),
            FileSystem::Ext4,
            CATALOGUE_MIB,
        )?];
        for number in 0..MEMBER_COUNT {
            let kind = if number == 1 { FileSystem::Ext4 } else { kind };
            places.push(place(self.member_disk(number), kind, MEMBER_MIB)?);
        }
        Ok(places)
    }

    fn catalogue(&self) -> PathBuf {
        self.folder.join("names").join(BRANCH)
    }

    fn member_disk(&self, number: usize) -> PathBuf {
        self.folder.join(format!("m{number}"))
    }

    fn member(&self, number: usize) -> PathBuf {
        self.member_disk(number).join(BRANCH)
    }

    fn tree(&self) -> PathBuf {
        self.folder.join(UNION)
    }

    /// A command of ours; `timeout` kills it if it takes too long.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg(COMMAND_S_MAX).arg(&self.rushes).args(words);
        command
    }

    fn mount(&self, runtime: &Path) -> Result<UnionMount> {
        let mut command = Command::new(&self.rushes);
        command
            .args(["pool", "mount"])
            .arg(self.catalogue())
            .arg(self.tree())
            .arg("--runtime-dir")
            .arg(runtime);
        UnionMount::start(command, self.tree(), self.folder.join("union.log"))
    }

    fn nobody(&self) -> PathBuf {
        self.folder.join("no-daemon")
    }

    /// Makes the pool on its fresh file systems, with the folders of all lanes.
    pub fn furnish(&self) -> Result<()> {
        let members: Vec<PathBuf> = (0..MEMBER_COUNT)
            .map(|number| self.member(number))
            .collect();
        for folder in members.iter().chain([&self.catalogue()]) {
            fs::create_dir(folder)?;
        }
        run(self
            .command(&["pool", "create"])
            .arg(self.catalogue())
            .args(&members))?;
        let mount = self.mount(&self.nobody())?;
        make_lane_folders(&self.tree())?;
        drop(mount);
        Ok(())
    }

    /// Mounts the pool for one recording, with a daemon of `house` if there is one.
    pub fn open(&self, seed: u64, house: Option<&House>) -> Result<PoolHost> {
        let shares: Vec<(String, PathBuf)> = (0..MEMBER_COUNT)
            .map(|number| (format!("member{number}"), self.member(number)))
            .collect();
        let daemon = house.map(|house| house.daemon(&shares)).transpose()?;
        let runtime = house.map_or_else(|| self.nobody(), House::runtime);
        let mount = self.mount(&runtime)?;
        if let Some(daemon) = &daemon {
            daemon.wait_for_doors(MEMBER_COUNT as u64, &|| mount.log_tail())?;
        }
        let mut chance = Chance::new(seed, LANE_COUNT);
        for lane in 0..LANE_COUNT {
            let wish = chance.pick(&WISHES);
            run(self
                .command(&["pool", "policy"])
                .arg(self.tree().join(lane_folder(lane)))
                .args(["--set", wish]))?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ground = PoolGround {
            folder: self.folder.clone(),
            rushes: self.rushes.clone(),
            _room: None,
        };
        let disturber = Disturber {
            ground,
            stop: Arc::clone(&stop),
            chance,
            full: None,
            emptied: None,
            count: 0,
        };
        let thread = std::thread::Builder::new()
            .name(String::from("disturber"))
            .spawn(move || disturber.disturb())?;
        Ok(PoolHost {
            tree: self.tree(),
            listing: self.command(&["pool", "where", "--json"]),
            stop,
            disturber: Some(thread),
            mount: Some(mount),
            daemon,
        })
    }

    /// Reads the pool after a cut. `mend_first`: fsck repairs it before the first mount; else the
    /// mount comes first.
    pub fn recover(&self, mend_first: bool) -> Result<Recovered> {
        let mut recovered = Recovered::default();
        if !mend_first {
            self.read(&mut recovered)?;
        }
        let known = recovered.mended;
        self.fsck(&mut recovered)?;
        if mend_first || recovered.mended > known {
            self.read(&mut recovered)?;
        }
        Ok(recovered)
    }

    fn read(&self, recovered: &mut Recovered) -> Result<()> {
        let mount = match self.mount(&self.nobody()) {
            Ok(mount) => mount,
            Err(error) => {
                room::go_on()?;
                let finding = unreadable("a pool that mounts", &error);
                recovered.complaints.push(finding);
                return Ok(());
            }
        };
        let (orphans, tree): (Tree, Tree) = read_tree(&self.tree())
            .into_iter()
            .partition(|(path, _)| path.starts_with("lost+found/"));
        drop(mount);
        recovered.trees.push(tree);
        recovered.orphans = orphans;
        Ok(())
    }

    /// Runs fsck twice: to mend, and to find faults that are left.
    fn fsck(&self, recovered: &mut Recovered) -> Result<()> {
        for repair in [true, false] {
            let report = match self.look_through(repair) {
                Ok(report) => report,
                Err(error) => {
                    room::go_on()?;
                    let finding = unreadable("a pool that can be looked through", &error);
                    recovered.complaints.push(finding);
                    return Ok(());
                }
            };
            let findings = report["findings"].as_array().context("no findings")?;
            if repair {
                recovered.mended += findings
                    .iter()
                    .filter(|finding| finding["state"] == "mended")
                    .count() as u64;
            }
            // The second run finds the faults that the first could not mend.
            let left = findings.iter().filter(|_| !repair);
            recovered.complaints.extend(left.map(|finding| Finding {
                rule: Rule::Inconsistent,
                path: finding["file"].as_str().unwrap_or("/").to_owned(),
                file: 0,
                expected: String::from("nothing that `rushes pool fsck` finds after --repair"),
                read: format!("{}: {}", finding["kind"], finding["sentence"]),
            }));
        }
        Ok(())
    }

    fn look_through(&self, repair: bool) -> Result<Value> {
        let output = self
            .command(&["pool", "fsck", "--json"])
            .args(repair.then_some("--repair"))
            .arg(self.catalogue())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            matches!(output.status.code(), Some(0 | 1)),
            "rushes pool fsck: {}: {said}",
            output.status
        );
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("rushes pool fsck printed no JSON: {said}"))
    }
}

/// The mount of a pool for one recording.
#[derive(Debug)]
pub struct PoolHost {
    tree: PathBuf,
    /// `rushes pool where`, still without paths of files.
    listing: Command,
    stop: Arc<AtomicBool>,
    disturber: Option<JoinHandle<Result<u64>>>,
    mount: Option<UnionMount>,
    daemon: Option<Daemon>,
}

impl PoolHost {
    fn calm(&mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.disturber.take() else {
            return Ok(0);
        };
        let ended = thread.join();
        ended.unwrap_or_else(|_| Err(anyhow!("the thread that disturbs the pool panicked")))
    }

    /// Numbers of files with several segments, and of striped files.
    fn count(&mut self) -> Result<(u64, u64)> {
        let files: Vec<PathBuf> = read_tree(&self.tree)
            .into_iter()
            .filter(|(_, node)| matches!(node, Node::File(_)))
            .map(|(path, _)| self.tree.join(path))
            .collect();
        if files.is_empty() {
            return Ok((0, 0));
        }
        let said = run(self.listing.args(files))?;
        let reports: Vec<Value> = serde_json::from_str(&said)?;
        let segments = |report: &Value| report["segments"].as_array().cloned().unwrap_or_default();
        let all: Vec<Vec<Value>> = reports.iter().map(segments).collect();
        let is_striped = |one: &&Vec<Value>| one.iter().any(|one| one["shape"] != "single");
        Ok((
            all.iter().filter(|one| one.len() > 1).count() as u64,
            all.iter().filter(is_striped).count() as u64,
        ))
    }
}

impl Host for PoolHost {
    fn writer(&self) -> Result<Box<dyn Writer + '_>> {
        Ok(Box::new(PoolLane {
            plain: Plain::new(self.tree.clone()),
            root: &self.tree,
            served: self.daemon.is_some(),
            names: BTreeMap::new(),
            folders: BTreeSet::new(),
        }))
    }

    fn close(mut self: Box<Self>) -> Result<Told> {
        let disturbances = self.calm()?;
        let (files_in_pieces, files_striped) = self.count()?;
        let writes_served = match &self.daemon {
            Some(daemon) => daemon.status()?["write"]["write_count"].as_u64(),
            None => None,
        };
        drop(self.mount.take());
        self.daemon.take().map_or(Ok(()), Daemon::stop)?;
        Ok(Told {
            writes_served: writes_served.unwrap_or(0),
            writes_plain: 0,
            files_in_pieces,
            files_striped,
            disturbances,
        })
    }
}

impl Drop for PoolHost {
    fn drop(&mut self) {
        if let Err(error) = self.calm() {
            eprintln!("{error:#}");
        }
    }
}

/// A lane that makes system calls on the mount, and opens files again now and then.
#[derive(Debug)]
struct PoolLane<'a> {
    plain: Plain,
    root: &'a Path,
    /// A daemon serves it: some steps wait past the write age, so that it writes unsynced bytes.
    served: bool,
    /// Name of each file that has one.
    names: BTreeMap<u64, String>,
    folders: BTreeSet<String>,
}

impl PoolLane<'_> {
    fn know(&mut self, step: &Step) {
        match step {
            Step::MakeFolder { path } => {
                self.folders.insert(path.clone());
            }
            Step::Create { file, path } | Step::Rename { file, to: path, .. } => {
                self.names.retain(|_, name| name != path);
                self.names.insert(*file, path.clone());
                let folder = super::script::folder_of(path);
                self.folders.insert(folder.to_owned());
            }
            Step::Unlink { file, .. } => {
                self.names.remove(file);
            }
            _ => {}
        }
    }

    /// A FUSE mount has no syncfs: syncs each file and folder.
    fn sync_all(&mut self, number: usize) -> io::Result<()> {
        for &file in self.names.keys() {
            let data_only = false;
            self.plain.act(number, &Step::Sync { file, data_only })?;
        }
        for folder in &self.folders {
            File::open(self.root.join(folder))?.sync_all()?;
        }
        Ok(())
    }

    fn let_go(&mut self, number: usize, file: u64) -> io::Result<()> {
        std::thread::sleep(match self.served && number.is_multiple_of(NAP_EVERY) {
            true => WRITE_AGE + WRITE_AGE / 4,
            false => REST,
        });
        if number.is_multiple_of(2) {
            return self.plain.open_again(file);
        }
        self.plain.act(number, &Step::LetGo { file })
    }
}

impl Writer for PoolLane<'_> {
    fn act(&mut self, number: usize, step: &Step) -> io::Result<()> {
        match step {
            Step::SyncAll => self.sync_all(number),
            &Step::LetGo { file } => self.let_go(number, file),
            step => {
                self.plain.act(number, step)?;
                self.know(step);
                Ok(())
            }
        }
    }
}

/// Fills, drains and tidies members while lanes work.
struct Disturber {
    ground: PoolGround,
    stop: Arc<AtomicBool>,
    chance: Chance,
    /// The member that it has filled.
    full: Option<usize>,
    /// The member that it has begun to drain.
    emptied: Option<usize>,
    count: u64,
}

impl Disturber {
    fn disturb(mut self) -> Result<u64> {
        while !self.stop.load(Ordering::Relaxed) {
            let span = Duration::from_millis(5 + self.chance.below(200));
            match self.chance.below(20) {
                0 => self.fill(),
                1..=3 if self.full.is_none() => self.fill(),
                4..=6 => self.empty(span),
                7 => self.tell(&["rebalance"], None, span),
                8 => self.tell(&["defrag"], None, span),
                9..=11 => self.commit(),
                _ => self.write_back(),
            }?;
            let rest = Duration::from_millis(self.chance.below(15));
            self.pause(rest);
        }
        Ok(self.count)
    }

    fn pause(&self, span: Duration) {
        let end = Instant::now() + span;
        while Instant::now() < end && !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The kernel's work after 30 s: starts the write-back of a member's objects, and does not wait
    /// for it.
    fn write_back(&mut self) -> Result<()> {
        let number = self.chance.below(MEMBER_COUNT as u64) as usize;
        let folders = fs::read_dir(self.ground.member(number).join("objects"))?;
        for folder in folders.flatten() {
            for object in fs::read_dir(folder.path())?.flatten() {
                // An object deleted meanwhile has nothing to write.
                if let Ok(object) = File::open(object.path()) {
                    rustix::fs::fadvise(&object, 0, None, Advice::DontNeed)?;
                }
            }
        }
        Ok(())
    }

    /// The kernel's work after 5 s: one of the file systems commits, independently of the others.
    fn commit(&mut self) -> Result<()> {
        let number = self.chance.below(MEMBER_COUNT as u64 + 1) as usize;
        let folder = match number {
            MEMBER_COUNT => self.ground.catalogue(),
            number => self.ground.member(number),
        };
        Ok(rustix::fs::syncfs(File::open(folder)?)?)
    }

    /// Fills a member, or frees the room of the one that is full.
    fn fill(&mut self) -> Result<()> {
        self.count += 1;
        if let Some(full) = self.full.take() {
            fs::remove_file(self.ground.member_disk(full).join(BALLAST))?;
            return Ok(());
        }
        let number = self.chance.below(MEMBER_COUNT as u64) as usize;
        let disk = self.ground.member_disk(number);
        self.full = Some(number);
        let ballast = File::create(disk.join(BALLAST))?;
        let room = rustix::fs::statvfs(&disk)?;
        let free = room.f_bfree * room.f_frsize;
        let left = self.chance.pick(&[0, 16 << 10, 64 << 10, 256 << 10]);
        let taken = free.saturating_sub(left);
        // Lanes may have taken room meanwhile: try smaller sizes.
        for taken in [taken, taken / 8 * 7, taken / 2] {
            let flags = FallocateFlags::empty();
            if rustix::fs::fallocate(&ballast, flags, 0, taken.max(1)).is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// Drains a member for a while, or cancels the drain.
    fn empty(&mut self, span: Duration) -> Result<()> {
        if let Some(number) = self.emptied.take() {
            return self.tell(&["drain", "--cancel"], Some(number), Duration::MAX);
        }
        let number = self.chance.below(MEMBER_COUNT as u64) as usize;
        self.emptied = Some(number);
        self.tell(&["drain"], Some(number), span)
    }

    /// Runs a command of `rushes pool` and interrupts it after `span`. Its output and exit status
    /// do not matter here.
    fn tell(&mut self, words: &[&str], member: Option<usize>, span: Duration) -> Result<()> {
        self.count += 1;
        let mut child = Command::new(&self.ground.rushes)
            .arg("pool")
            .args(words)
            .arg(self.ground.catalogue())
            .args(member.map(|number| number.to_string()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let begun = Instant::now();
        while child.try_wait()?.is_none() {
            let is_over = span != Duration::MAX
                && (begun.elapsed() > span || self.stop.load(Ordering::Relaxed));
            if is_over {
                let pid = rustix::process::Pid::from_raw(child.id() as i32);
                if let Some(pid) = pid {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
                }
                child.wait()?;
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}
