// SPDX-License-Identifier: Apache-2.0
//! The daemon is killed again and again under a pool that is used through all its doors at once:
//! SMB, NFS, an iSCSI disk and programs on the mount play, record, paint in one file together and
//! do anything at random. They read the written bytes, get no error, and in the end the members
//! have all bytes, without the daemon.
//!
//! [`rushes_tests::kills`] measures and prints waits, and does not judge them. The mount itself
//! lives on: pool_nfs.rs and pool_iscsi.rs test its death. `RUSHES_TEST_KILLS` is the count of
//! kills.

use rushes_tests::daemon::Daemon;
use rushes_tests::export::{Export, ISCSI, NFS};
use rushes_tests::fsx::{self, Plan};
use rushes_tests::initiator::{Blocks, Disk};
use rushes_tests::kills::{self, Finally, OnPanic, Painter, Stage, Stroke};
use rushes_tests::needs;
use rushes_tests::nfs4::{Handle as NfsHandle, Nfs4, Open, Status};
use rushes_tests::pattern;
use rushes_tests::pool::{self, PoolWorld};
use rushes_tests::smb2::{self, Connection, Disposition, Handle};
use rushes_tests::smbd::{SHARE, Smbd};
use rushes_tests::stand::Stand;
use rushes_tests::words::explained;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BLOCK: usize = 65_536;
/// Length of footage that is played.
const CLIP_BYTES: u64 = 12_000_001;
/// Length of a take that is recorded.
const TAKE_BYTES: u64 = 3_000_001;
/// Length of the file that is painted. Neither it nor a stripe ends with a page, so that painters
/// at different doors share pages.
const GRADE_BYTES: u64 = 3_000_017;
const STRIPE_BYTES: u64 = 30_011;
/// Doors that paint.
const PAINTERS: u64 = 3;
/// Blocks of the iSCSI disk.
const DISK_BLOCKS: u64 = (64 << 20) / BLOCK as u64;
/// Steps that each client ends between two kills.
const STEPS_BETWEEN: u64 = 3;
/// The kernel's cache is dropped at this interval, so that reads come to the daemon.
const FORGET_EVERY: Duration = Duration::from_millis(50);

/// One file at a time through one door; each call is a request or a few.
trait Door {
    /// Make a file that is not there.
    fn make(&mut self, name: &str) -> Result<(), String>;
    /// Open a file that is there.
    fn open(&mut self, name: &str) -> Result<(), String>;
    /// Read that much.
    fn read(&mut self, at: u64, length: usize) -> Result<Vec<u8>, String>;
    /// Write all of it.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), String>;
    /// Bring the file to stable storage.
    fn sync(&mut self) -> Result<(), String>;
    /// Close the file.
    fn close(&mut self) -> Result<(), String>;
    /// Give a file another name.
    fn rename(&mut self, from: &str, to: &str) -> Result<(), String>;
    /// Remove a name.
    fn remove(&mut self, name: &str) -> Result<(), String>;
}

struct BySmb {
    client: Connection,
    file: Option<Handle>,
}

impl BySmb {
    fn file(&self) -> Handle {
        self.file.expect("it is open")
    }
}

fn smb<T>(done: Result<T, smb2::Status>) -> Result<T, String> {
    done.map_err(|status| format!("{:#010x}", status.0))
}

impl Door for BySmb {
    fn make(&mut self, name: &str) -> Result<(), String> {
        let made = smb(self.client.open(name, Disposition::OverwriteIf))?;
        self.file = Some(made.0);
        Ok(())
    }

    fn open(&mut self, name: &str) -> Result<(), String> {
        let opened = smb(self.client.open(name, Disposition::Open))?;
        self.file = Some(opened.0);
        Ok(())
    }

    fn read(&mut self, at: u64, length: usize) -> Result<Vec<u8>, String> {
        smb(self.client.read(self.file(), at, length))
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), String> {
        smb(self.client.write(self.file(), at, bytes))
    }

    fn sync(&mut self) -> Result<(), String> {
        smb(self.client.flush(self.file()))
    }

    fn close(&mut self) -> Result<(), String> {
        let file = self.file.take().expect("it is open");
        smb(self.client.close(file))
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), String> {
        let (file, _) = smb(self.client.open(from, Disposition::Open))?;
        smb(self.client.rename(file, to))?;
        smb(self.client.close(file))
    }

    fn remove(&mut self, name: &str) -> Result<(), String> {
        let (file, _) = smb(self.client.open(name, Disposition::Open))?;
        smb(self.client.delete_on_close(file))?;
        smb(self.client.close(file))
    }
}

struct OnMount {
    folder: PathBuf,
    file: Option<File>,
}

impl OnMount {
    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open")
    }

    fn opened(&mut self, name: &str, make: bool) -> Result<(), String> {
        let opened = File::options()
            .read(true)
            .write(true)
            .create(make)
            .truncate(make)
            .open(self.folder.join(name));
        self.file = Some(local(opened)?);
        Ok(())
    }
}

fn local<T>(done: std::io::Result<T>) -> Result<T, String> {
    done.map_err(|error| error.to_string())
}

impl Door for OnMount {
    fn make(&mut self, name: &str) -> Result<(), String> {
        self.opened(name, true)
    }

    fn open(&mut self, name: &str) -> Result<(), String> {
        self.opened(name, false)
    }

    fn read(&mut self, at: u64, length: usize) -> Result<Vec<u8>, String> {
        let mut found = vec![0; length];
        local(self.file().read_exact_at(&mut found, at)).map(|()| found)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), String> {
        local(self.file().write_all_at(bytes, at))
    }

    fn sync(&mut self) -> Result<(), String> {
        local(self.file().sync_all())
    }

    fn close(&mut self) -> Result<(), String> {
        drop(self.file.take());
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), String> {
        local(fs::rename(self.folder.join(from), self.folder.join(to)))
    }

    fn remove(&mut self, name: &str) -> Result<(), String> {
        local(fs::remove_file(self.folder.join(name)))
    }
}

struct ByNfs {
    nfs: Nfs4,
    root: NfsHandle,
    file: Option<Open>,
}

fn nfs<T>(done: Result<T, Status>) -> Result<T, String> {
    done.map_err(|Status(status)| format!("NFS status {status}"))
}

impl ByNfs {
    fn opened(&mut self, name: &str, make: bool) -> Result<(), String> {
        let opened = self.nfs.open(&self.root, name.as_bytes(), make);
        self.file = Some(nfs(opened)?);
        Ok(())
    }
}

impl Door for ByNfs {
    fn make(&mut self, name: &str) -> Result<(), String> {
        self.opened(name, true)
    }

    fn open(&mut self, name: &str) -> Result<(), String> {
        self.opened(name, false)
    }

    fn read(&mut self, at: u64, length: usize) -> Result<Vec<u8>, String> {
        let file = self.file.as_ref().expect("it is open");
        let mut found = Vec::new();
        while found.len() < length {
            let left = (length - found.len()) as u32;
            let more = nfs(self.nfs.read(file, at + found.len() as u64, left))?;
            if more.is_empty() {
                break;
            }
            found.extend(more);
        }
        Ok(found)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), String> {
        let file = self.file.as_ref().expect("it is open");
        nfs(self.nfs.write(file, at, bytes))
    }

    /// Each write was durable when it was answered.
    fn sync(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        let file = self.file.take().expect("it is open");
        nfs(self.nfs.close(file))
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), String> {
        nfs(self.nfs.rename(&self.root, from.as_bytes(), to.as_bytes()))
    }

    fn remove(&mut self, name: &str) -> Result<(), String> {
        nfs(self.nfs.remove(&self.root, name.as_bytes()))
    }
}

/// A client at work, and the count of its steps.
struct Worker<'a> {
    stage: &'a Stage,
    name: String,
    steps: &'a AtomicU64,
    door: Box<dyn Door + Send>,
}

impl Worker<'_> {
    fn must<T>(
        &mut self,
        what: &str,
        request: impl FnOnce(&mut dyn Door) -> Result<T, String>,
    ) -> T {
        let begun = self.stage.begin();
        let result = request(self.door.as_mut());
        self.stage.took(begun, &self.name, what);
        self.steps.fetch_add(1, Ordering::Relaxed);
        result.unwrap_or_else(|error| panic!("{}: {what}: {error}", self.name))
    }

    /// Reads all of a file and compares it. False: the stage has ended, and so has this.
    fn check(&mut self, name: &str, seed: u64, bytes: u64) -> bool {
        self.must("open", |door| door.open(name));
        for at in (0..bytes).step_by(BLOCK) {
            if !self.stage.goes_on() {
                break;
            }
            let length = BLOCK.min((bytes - at) as usize);
            let found = self.must("read", |door| door.read(at, length));
            assert_eq!(found.len(), length, "{}: {name} at {at}", self.name);
            pattern::check(seed, at, &found, &format!("{}: {name}", self.name));
        }
        self.must("close", |door| door.close());
        self.stage.goes_on()
    }
}

/// The files that must be there in the end: each one's seed and length.
type Left = BTreeMap<String, (u64, u64)>;

fn play(worker: &mut Worker, name: &str, seed: u64) {
    while worker.check(name, seed, CLIP_BYTES) {}
}

/// Records take after take under a passing name, checks it, and removes the one before.
fn record(worker: &mut Worker, number: u64) -> Left {
    let mut left = Left::new();
    for turn in 0_u64.. {
        let seed = 1000 * (number + 1) + turn;
        let (passing, name) = (
            format!("take-{number}.tmp"),
            format!("take-{number}-{turn}.mov"),
        );
        worker.must("make", |door| door.make(&passing));
        for at in (0..TAKE_BYTES).step_by(BLOCK) {
            let bytes = pattern::bytes(seed, at, BLOCK.min((TAKE_BYTES - at) as usize));
            worker.must("append", |door| door.write(at, &bytes));
        }
        if turn % 3 == 2 {
            worker.must("sync", |door| door.sync());
        }
        worker.must("close", |door| door.close());
        worker.must("rename", |door| door.rename(&passing, &name));
        left.insert(name.clone(), (seed, TAKE_BYTES));
        if !worker.check(&name, seed, TAKE_BYTES) {
            break;
        }
        for old in left.keys().filter(|old| **old != name) {
            worker.must("remove", |door| door.remove(old));
        }
        left.retain(|old, _| *old == name);
    }
    left
}

/// Writes over parts of stripes of its own and reads them, while others have the stripes beside.
/// Returns  the bytes that its stripes must have
fn paint(worker: &mut Worker, painter: u64, name: &str, seed: u64) -> Vec<(u64, Vec<u8>)> {
    worker.must("open", |door| door.open(name));
    let mut all = Painter::new(painter, PAINTERS, GRADE_BYTES, STRIPE_BYTES, seed);
    let context = format!("{}: {name}", worker.name);
    while worker.stage.goes_on() {
        all.stroke(&context, |stroke| match stroke {
            Stroke::Write(at, bytes) => {
                worker.must("overwrite", |door| door.write(at, bytes));
                Vec::new()
            }
            Stroke::Read(at, length) => worker.must("read", |door| door.read(at, length)),
        });
    }
    worker.must("close", |door| door.close());
    all.stripes()
}

/// Writes and reads blocks of the disk, each filled with one byte. Returns  these bytes
fn use_disk(stage: &Stage, steps: &AtomicU64, url: &str) -> Vec<u8> {
    let mut disk = Disk::log_in(url);
    let mut blocks = Blocks::new(3, DISK_BLOCKS, BLOCK);
    while stage.goes_on() {
        let command = blocks.command();
        let begun = stage.begin();
        let done = disk.ask(&command);
        stage.took(begun, "disk", &command);
        steps.fetch_add(1, Ordering::Relaxed);
        done.unwrap_or_else(|said| panic!("disk: {command}: {said}"));
    }
    disk.ask("flush").expect("flushed");
    blocks.into_bytes()
}

/// All other operations of SMB clients, at random, compared with a model.
fn anything(stage: &Stage, port: u16, folder: &Path, steps: &Arc<AtomicU64>) {
    for seed in 0.. {
        if !stage.goes_on() {
            return;
        }
        let plan = Plan {
            daemon_dies: true,
            steps: Arc::clone(steps),
            ..Plan::new(seed, 200)
        };
        if let Err(divergence) = fsx::run(port, folder, &plan) {
            panic!("{divergence}");
        }
        // The next round uses the same names.
        for name in names(folder).filter(|name| name.starts_with('w')) {
            fs::remove_file(folder.join(name)).expect("removed");
        }
    }
}

fn names(folder: &Path) -> impl Iterator<Item = String> {
    let all = fs::read_dir(folder).expect("our own mount").flatten();
    all.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Drops all files from the kernel's cache, as the kernel does when memory is short.
fn forget(folder: &Path) {
    for name in names(folder) {
        // The file may be gone, or have another name.
        if let Ok(file) = File::open(folder.join(name)) {
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}

/// The pool behind all its doors. They end in this order.
struct Doors {
    smbd: Smbd,
    nfs: Export,
    disk: Export,
    daemon: Daemon,
    world: PoolWorld,
}

impl Doors {
    fn open() -> Option<Doors> {
        if ![NFS, ISCSI].into_iter().all(needs::all_there) {
            return None;
        }
        let Stand::Pool(smbd, daemon, world) = Stand::pool()? else {
            return None;
        };
        let disk = Export::iscsi(&world, "edit.disk", &["--size", "64MiB"]);
        // Ganesha drops clients that are silent for half of this time; ours may have to wait.
        let nfs = Export::nfs_with(&world, &["--grace", "120"]);
        Some(Doors {
            smbd,
            nfs,
            disk,
            daemon,
            world,
        })
    }

    fn by_smb(&self) -> Box<dyn Door + Send> {
        let client = Connection::connect(self.smbd.port(), SHARE);
        Box::new(BySmb {
            client: client.expect("smbd lets guests in"),
            file: None,
        })
    }

    fn on_mount(&self) -> Box<dyn Door + Send> {
        Box::new(OnMount {
            folder: self.world.path(""),
            file: None,
        })
    }

    fn by_nfs(&self, name: &str) -> Box<dyn Door + Send> {
        let mut nfs = Nfs4::connect(self.nfs.port, name, 1);
        let root = nfs.root("media").expect("exported");
        Box::new(ByNfs {
            nfs,
            root,
            file: None,
        })
    }
}

const CLIENTS: usize = 9;

/// Whether the mount has found this daemon, and has read through it.
fn serves(daemon: &Daemon) -> bool {
    let status = daemon.status();
    let of = |name: &str| status["cache"][name].as_u64().unwrap_or(0);
    let sessions = status["sessions"].as_array().map_or(0, Vec::len);
    sessions == 2 && of("hit_count") + of("miss_count") > 0
}

const USAGE: &str = "\
The daemon is killed again and again under a pool that is used over SMB, NFS, iSCSI and on its mount at once.
Takes no options. Needs root and the built release programs.

RUSHES_TEST_KILLS   how often; 50

Exit code: 0 when nothing was lost (or something is missing here, which it says), 101 otherwise.";

fn main() {
    if explained(USAGE) {
        return;
    }
    let Some(doors) = Doors::open() else {
        return;
    };
    for (name, seed, bytes) in [("clip.mov", 1, CLIP_BYTES), ("grade.mov", 2, GRADE_BYTES)] {
        let path = doors.world.path(name);
        pool::put(&path, seed, bytes as usize).expect("there is room");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    }
    let stage = Stage::default();
    let steps: [Arc<AtomicU64>; CLIENTS] = Default::default();
    let (mut left, mut graded) = (Left::new(), pattern::bytes(2, 0, GRADE_BYTES as usize));
    let mut blocks = Vec::new();
    // A thread of its own starts the daemon again.
    let Doors {
        smbd,
        nfs,
        disk,
        mut daemon,
        mut world,
    } = std::thread::scope(|scope| {
        let (stage, steps) = (&stage, &steps);
        let worker = |number: usize, name: &str, door| Worker {
            stage,
            name: name.to_owned(),
            steps: &steps[number],
            door,
        };
        let mut player = worker(0, "player by SMB", doors.by_smb());
        let recorders = [
            worker(1, "recorder by SMB", doors.by_smb()),
            worker(2, "recorder on the mount", doors.on_mount()),
            worker(3, "recorder by NFS", doors.by_nfs("recorder")),
        ];
        let painters = [
            worker(4, "painter by SMB", doors.by_smb()),
            worker(5, "painter on the mount", doors.on_mount()),
            worker(6, "painter by NFS", doors.by_nfs("painter")),
        ];
        let (port, url) = (doors.smbd.port(), doors.disk.disk("edit.disk"));
        let folder = doors.world.path("");
        let mut doors = doors;
        scope.spawn(move || {
            let _all = Finally(stage);
            play(&mut player, "clip.mov", 1);
        });
        let mut numbers = 0..;
        let recorders = recorders.map(|mut worker| {
            let number = numbers.next().expect("endless");
            scope.spawn(move || {
                let _all = Finally(stage);
                record(&mut worker, number)
            })
        });
        let mut numbers = 0..;
        let painters = painters.map(|mut worker| {
            let number = numbers.next().expect("endless");
            scope.spawn(move || {
                let _all = Finally(stage);
                paint(&mut worker, number, "grade.mov", 2)
            })
        });
        let disk = scope.spawn(move || {
            let _all = Finally(stage);
            use_disk(stage, &steps[7], &url)
        });
        let everything = folder.clone();
        scope.spawn(move || {
            let _all = Finally(stage);
            anything(stage, port, &everything, &steps[8]);
        });
        scope.spawn(move || {
            let _all = OnPanic(stage);
            while stage.goes_on() {
                forget(&folder);
                std::thread::sleep(FORGET_EVERY);
            }
        });
        {
            let _all = Finally(stage);
            let now = || steps.each_ref().map(|s| s.load(Ordering::Relaxed));
            let count = kills::wanted();
            kills::kill(&mut doors.daemon, stage, serves, now, STEPS_BETWEEN, count);
        }
        for recorder in recorders {
            left.extend(recorder.join().expect("a recorder"));
        }
        for painter in painters {
            for (at, bytes) in painter.join().expect("a painter") {
                graded[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
        }
        blocks = disk.join().expect("the disk");
        doors
    });
    let sum: u64 = steps.iter().map(|s| s.load(Ordering::Relaxed)).sum();
    println!("{}", stage.summary(CLIENTS, sum));
    drop(smbd);
    nfs.end();
    disk.end();
    daemon.wait_for("nothing is left to be written", |status| {
        status["write"]["used_bytes"] == 0
    });
    // All bytes are on the members: read them without the memory of daemon or mount.
    world.end();
    daemon.end();
    world.start();
    let read = |name: &str| fs::read(world.path(name)).expect("it is there");
    pool::check(&world.path("clip.mov"), 1, CLIP_BYTES as usize);
    assert!(
        read("grade.mov") == graded,
        "grade.mov is not what its painters were told"
    );
    assert!(left.len() >= 3, "each recorder leaves a take: {left:?}");
    for (name, (seed, bytes)) in left {
        pool::check(&world.path(&name), seed, bytes as usize);
    }
    for (block, found) in read("edit.disk").chunks(BLOCK).enumerate() {
        let byte = blocks[block];
        assert!(
            found.iter().all(|one| *one == byte),
            "block {block} of the disk is not all {byte}"
        );
    }
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{report:#}");
}
