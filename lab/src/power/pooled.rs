// SPDX-License-Identifier: Apache-2.0
//! A pool under power cuts: lanes work on its mount, with a daemon or without one, while all of its
//! disks are recorded; after a cut our own tools look at what is left.
//!
//! Meanwhile somebody disturbs it: members are filled, so that files go on elsewhere, and emptied,
//! files are moved and brought together, and the command that does that is interrupted. Folders
//! differ in how their files are spread.

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

/// Enough for names, a journal and a copy of neither. Units: MiB.
const CATALOGUE_MIB: u64 = 24;

/// Enough for all that lanes have at once on one of them while another is full and a third is
/// emptied, and so much that files are striped over them (core/src/pool/place.rs asks those with
/// less than 64 MiB last). Units: MiB.
const MEMBER_MIB: u64 = 84;

const MEMBER_COUNT: usize = 3;

/// Folder of the pool on each file system.
const BRANCH: &str = "pool";

/// Where the kernel has the pool's tree.
const UNION: &str = "union";

/// The file that takes a member's room.
const BALLAST: &str = "ballast";

/// How files of a lane may be spread.
const WISHES: [&str; 5] = [
    "single",
    "single choose=round_robin",
    "striped=2 unit=4KiB",
    "striped unit=16KiB",
    "striped=2 unit=64KiB",
];

/// A program that lets go of a file rests, or all would be over before anybody disturbed it.
const REST: Duration = Duration::from_millis(60);

/// No command of ours takes longer on a pool that small, or something hangs. Units: s.
const COMMAND_S_MAX: &str = "60";

/// Where a pool's file systems are mounted, and its tree.
#[derive(Debug)]
pub struct PoolGround {
    folder: PathBuf,
    rushes: PathBuf,
    /// The room of a run that is over: its paths are in the pool.
    _room: Option<Room>,
}

impl PoolGround {
    /// Below this room.
    pub fn new(room: &Room) -> Result<PoolGround> {
        Ok(PoolGround {
            folder: room.path().to_owned(),
            rushes: find_rushes()?,
            _room: None,
        })
    }

    /// Where it was when it was recorded.
    pub fn again(folder: &Path) -> Result<PoolGround> {
        Ok(PoolGround {
            folder: folder.to_owned(),
            rushes: find_rushes()?,
            _room: Some(Room::again(folder)?),
        })
    }

    /// Its paths are in what is recorded.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The catalogue's disk, which is ext4, and those of the members: of `kind`, but for one that
    /// is ext4.
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

    /// A command of ours that is killed if it takes too long.
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

    /// The mount, for one recording; with a daemon of that house.
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

    /// The recovery by our tools after a cut. `mend_first`: fsck is what an operator does first;
    /// else the mount is.
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

    /// Mends it, and looks whether it is mended.
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
            // A fault that the first look could not mend, the second one finds.
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

/// The mount of a pool, as long as one recording lasts.
#[derive(Debug)]
pub struct PoolHost {
    tree: PathBuf,
    /// `rushes pool where`, without files.
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

    /// How many files are in pieces, and how many are striped.
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

/// System calls on the mount, by a program that comes and goes.
#[derive(Debug)]
struct PoolLane<'a> {
    plain: Plain,
    root: &'a Path,
    /// By a daemon: bytes that nobody syncs get old enough to be under way.
    served: bool,
    /// Of each file that has one.
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

    /// A FUSE mount has no syncfs: a lane that wants everything synced syncs each.
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

/// Fills, empties and tidies members while lanes work.
struct Disturber {
    ground: PoolGround,
    stop: Arc<AtomicBool>,
    chance: Chance,
    /// Members that were filled, and emptied.
    full: Option<usize>,
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

    /// The kernel's work after 30 s: bytes of a member's objects are on their way to its disk, and
    /// nobody waits for them.
    fn write_back(&mut self) -> Result<()> {
        let number = self.chance.below(MEMBER_COUNT as u64) as usize;
        let folders = fs::read_dir(self.ground.member(number).join("objects"))?;
        for folder in folders.flatten() {
            for object in fs::read_dir(folder.path())?.flatten() {
                // One that has gone meanwhile has nothing to write.
                if let Ok(object) = File::open(object.path()) {
                    rustix::fs::fadvise(&object, 0, None, Advice::DontNeed)?;
                }
            }
        }
        Ok(())
    }

    /// And after 5 s: one of the file systems makes durable what it knows, whatever the others
    /// have.
    fn commit(&mut self) -> Result<()> {
        let number = self.chance.below(MEMBER_COUNT as u64 + 1) as usize;
        let folder = match number {
            MEMBER_COUNT => self.ground.catalogue(),
            number => self.ground.member(number),
        };
        Ok(rustix::fs::syncfs(File::open(folder)?)?)
    }

    /// One member has no room, or has it again.
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
        // Others take room meanwhile: then as much as there is.
        for taken in [taken, taken / 8 * 7, taken / 2] {
            let flags = FallocateFlags::empty();
            if rustix::fs::fallocate(&ballast, flags, 0, taken.max(1)).is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// A member is emptied for a while, or takes bytes again.
    fn empty(&mut self, span: Duration) -> Result<()> {
        if let Some(number) = self.emptied.take() {
            return self.tell(&["drain", "--cancel"], Some(number), Duration::MAX);
        }
        let number = self.chance.below(MEMBER_COUNT as u64) as usize;
        self.emptied = Some(number);
        self.tell(&["drain"], Some(number), span)
    }

    /// Gives a command that is interrupted after a while. Its account of its work is nobody's
    /// affair here.
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
