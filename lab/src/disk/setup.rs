// SPDX-License-Identifier: Apache-2.0
//! Puts a slow disk up and takes it down: server process, FUSE mount, loop device, file systems on
//! it.
//!
//! Nothing may stay behind, however a run ends. So each disk has a folder below [`ROOT`] with a
//! record of its parts, and three parties can take it down: the owner by `close` or drop, the
//! server itself when its standard input ends because the owner was killed, and `rushes-lab disk
//! clean` when both are gone. They find mounts and loop devices in the kernel's own tables,
//! `/sys/block` and mountinfo, not in the record.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rushes_core::units::ByteCount;
use rushes_kit::mounts::{is_mounted, mounts};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::control::{self, Fault, Statistics};
use super::fuse::{CONTROL_NAME, DISK_NAME, STAMPS_NAME};
use super::stamps::Arrival;
use super::timing::DiskTiming;

/// The folder of all disks, with a folder for each.
const ROOT: &str = "/run/rushes-lab/disks";

/// How long we retry a plain unmount of a busy file system, and wait for a server to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a folder may be without a record before it counts as left behind.
const RECORD_PATIENCE: Duration = Duration::from_secs(30);

/// The kind of a slow disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// Its name; made up when empty.
    pub name: String,
    /// Its size; whole 4 KiB pages.
    pub bytes: u64,
    /// Folder for the sparse file behind it: `/dev/shm`, in memory, or one on a real disk.
    pub folder: PathBuf,
    /// Its timing.
    pub timing: DiskTiming,
    /// The `rushes-lab` binary; `None`: the one beside the running program.
    pub program: Option<PathBuf>,
}

impl DiskSpec {
    /// The disk array of Table 5, with a size of `size`.
    pub fn table5(size: ByteCount) -> DiskSpec {
        DiskSpec {
            name: String::new(),
            bytes: size.0,
            folder: PathBuf::from("/dev/shm"),
            timing: DiskTiming::TABLE5,
            program: None,
        }
    }
}

/// An error of a slow disk: the step, its object, the reason.
#[derive(Debug)]
pub struct DiskError {
    step: &'static str,
    on: String,
    source: io::Error,
}

impl DiskError {
    pub(super) fn new(
        step: &'static str,
        on: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> DiskError {
        failed(step, on)(io::Error::other(source))
    }
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slow disk: {} {}: {}", self.step, self.on, self.source)
    }
}

impl std::error::Error for DiskError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Adds the step and its object to an I/O error.
fn failed<E: Into<io::Error>>(
    step: &'static str,
    on: impl AsRef<OsStr>,
) -> impl FnOnce(E) -> DiskError {
    move |source| DiskError {
        step,
        on: on.as_ref().to_string_lossy().into_owned(),
        source: source.into(),
    }
}

/// A process, told apart from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    started: u64,
}

impl Process {
    fn of(pid: u32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain anything, spaces too.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
        Some(Process {
            pid,
            started: started.parse().ok()?,
        })
    }

    fn lives(self) -> bool {
        Process::of(self.pid) == Some(self) && !is_zombie(self.pid)
    }

    fn signal(self, signal: Signal) {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        if let (true, Some(pid)) = (self.lives(), pid) {
            // If it has ended meanwhile, that is as good.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

fn is_zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('Z')))
        .unwrap_or(true)
}

/// The parts of a disk, as noted in its folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) spec: DiskSpec,
    /// The file behind it.
    pub(super) backing: PathBuf,
    /// The process that takes it down; `None`: `disk down` does. While a disk is put up, the
    /// process that puts it up.
    owner: Option<Process>,
    server: Option<Process>,
}

/// The folder of a disk.
#[derive(Clone, Debug)]
pub(super) struct Room {
    folder: PathBuf,
}

impl Room {
    pub(super) fn named(name: &str) -> Result<Room, DiskError> {
        if name.is_empty() || name.contains('/') || name.starts_with('.') {
            let reason = "expected a name without slash that does not start with a dot";
            return Err(failed("name", name)(io::Error::other(reason)));
        }
        Ok(Room {
            folder: Path::new(ROOT).join(name),
        })
    }

    /// The folders of all disks.
    pub(super) fn all() -> Vec<Room> {
        let entries = fs::read_dir(ROOT).into_iter().flatten().flatten();
        entries
            .map(|entry| Room {
                folder: entry.path(),
            })
            .collect()
    }

    pub(super) fn name(&self) -> String {
        let name = self.folder.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn mount(&self) -> PathBuf {
        self.folder.join("mnt")
    }

    fn record_path(&self) -> PathBuf {
        self.folder.join("record.json")
    }

    pub(super) fn record(&self) -> Result<Record, DiskError> {
        let path = self.record_path();
        let text = fs::read(&path).map_err(failed("read", &path))?;
        serde_json::from_slice(&text).map_err(failed("understand", &path))
    }

    fn write_record(&self, record: &Record) -> Result<(), DiskError> {
        let path = self.record_path();
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record).map_err(failed("describe", &path))?;
        fs::write(&new, text).map_err(failed("write", &new))?;
        fs::rename(&new, &path).map_err(failed("write", &path))
    }

    /// Loop devices over this disk's file.
    fn loop_devices(&self) -> Vec<PathBuf> {
        let disk = self.mount().join(DISK_NAME);
        let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
        entries
            .filter(|entry| {
                fs::read_to_string(entry.path().join("loop/backing_file"))
                    // The kernel adds this to a file whose mount is gone.
                    .is_ok_and(|path| Path::new(path.trim().trim_end_matches(" (deleted)")) == disk)
            })
            .map(|entry| Path::new("/dev").join(entry.file_name()))
            .collect()
    }

    fn control(&self) -> PathBuf {
        self.mount().join(CONTROL_NAME)
    }

    /// Sends commands to the server.
    pub(super) fn command(&self, commands: &[control::Command]) -> Result<(), DiskError> {
        let text: Vec<String> = commands.iter().map(ToString::to_string).collect();
        let path = self.control();
        let mut file = fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(failed("open", &path))?;
        file.write_all(text.join("\n").as_bytes())
            .map_err(failed("command", &path))
    }

    pub(super) fn statistics(&self) -> Result<Statistics, DiskError> {
        let path = self.control();
        let text = fs::read(&path).map_err(failed("read", &path))?;
        serde_json::from_slice(&text).map_err(failed("understand", &path))
    }

    fn arrivals(&self) -> Result<Vec<Arrival>, DiskError> {
        let path = self.mount().join(STAMPS_NAME);
        let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
        text.lines()
            .map(str::parse)
            .collect::<Result<_, String>>()
            .map_err(|reason| failed("understand", &path)(io::Error::other(reason)))
    }

    /// True while its owner lives; of a disk without an owner, while its server lives.
    fn is_kept(&self) -> bool {
        match self.record() {
            Ok(Record {
                owner: Some(owner), ..
            }) => owner.lives(),
            Ok(record) => record.server.is_some_and(Process::lives),
            // Another process may be about to write the record.
            Err(_) => fs::metadata(&self.folder)
                .and_then(|meta| meta.modified())
                .is_ok_and(|at| at.elapsed().is_ok_and(|age| age < RECORD_PATIENCE)),
        }
    }

    /// Unmounts file systems on the disk, detaches the loop device, unmounts the disk, ends its
    /// server, removes its files; goes on after an error and returns the first.
    ///
    /// `inside` is true in the server itself, which must outlive its mount.
    pub(super) fn take_down(&self, inside: bool) -> Result<(), DiskError> {
        let record = self.record().ok();
        let server = record.as_ref().and_then(|record| record.server);
        let mut first = Ok(());
        let mut note = |result: Result<(), DiskError>| {
            if first.is_ok() {
                first = result;
            }
        };
        if server.is_some_and(Process::lives) {
            // So that the kernel writes remaining bytes fast. A server that is about to end may
            // refuse.
            let _ = self.command(&[control::Command::Clear, control::Command::Timing(false)]);
        }
        for device in self.loop_devices() {
            for mount in mounts_of(&device) {
                note(unmount(&mount));
            }
            let detached = detach(&device);
            // Another process may have detached it before.
            if self.loop_devices().contains(&device) {
                note(detached);
            }
        }
        if is_mounted(&self.mount()) {
            note(unmount(&self.mount()));
        }
        if let (false, Some(server)) = (inside, server) {
            server.signal(Signal::TERM);
            if !wait_until(PATIENCE, || !server.lives()) {
                server.signal(Signal::KILL);
                wait_until(PATIENCE, || !server.lives());
            }
        }
        if let Some(record) = record {
            for file in [log_beside(&record.backing), record.backing] {
                note(remove(fs::remove_file(&file), &file));
            }
        }
        if !is_mounted(&self.mount()) {
            note(remove(fs::remove_dir_all(&self.folder), &self.folder));
        }
        first
    }
}

/// Path of a disk's log: beside the backing file, so in memory as a rule.
fn log_beside(backing: &Path) -> PathBuf {
    backing.with_extension("log")
}

fn remove(result: io::Result<()>, path: &Path) -> Result<(), DiskError> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

fn wait_until(span: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + span;
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Where a block device is mounted, newest first.
fn mounts_of(device: &Path) -> Vec<PathBuf> {
    let Ok(meta) = fs::metadata(device) else {
        return Vec::new();
    };
    let number = format!(
        "{}:{}",
        rustix::fs::major(meta.rdev()),
        rustix::fs::minor(meta.rdev())
    );
    let mut points: Vec<PathBuf> = mounts()
        .into_iter()
        .filter(|(device, _)| *device == number)
        .map(|(_, point)| point)
        .collect();
    points.reverse();
    points
}

/// Unmounts; if the file system stays busy, lazily, so that a forgotten program cannot hold us up.
fn unmount(point: &Path) -> Result<(), DiskError> {
    let polite = wait_until(PATIENCE, || {
        !matches!(
            rustix::mount::unmount(point, UnmountFlags::empty()),
            Err(rustix::io::Errno::BUSY)
        )
    });
    if polite && !is_mounted(point) {
        return Ok(());
    }
    rustix::mount::unmount(point, UnmountFlags::DETACH).map_err(failed("unmount", point))
}

fn detach(device: &Path) -> Result<(), DiskError> {
    run(Command::new("losetup").arg("--detach").arg(device)).map(drop)
}

/// Runs a tool to its end. Returns its standard output; the error has its standard error.
fn run(command: &mut Command) -> Result<String, DiskError> {
    let name = command.get_program().to_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(failed("run", &name))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let complaint = format!("{} ({complaint})", output.status);
        return Err(failed("run", &name)(io::Error::other(complaint)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The `rushes-lab` binary: this one, or the one that was built beside it.
fn program(spec: &DiskSpec) -> Result<PathBuf, DiskError> {
    if let Some(program) = &spec.program {
        return Ok(program.clone());
    }
    let this = std::env::current_exe().map_err(failed("find", "the running program"))?;
    if this.file_name() == Some(OsStr::new("rushes-lab")) {
        return Ok(this);
    }
    // Tests run in `deps/`, one folder below.
    let candidates = this.ancestors().skip(1).take(2);
    for folder in candidates {
        let candidate = folder.join("rushes-lab");
        if candidate.is_file() {
            return Ok(candidate);
        }
    }
    let reason = "not found beside the running program: build it (cargo build -p rushes-lab)";
    Err(failed("find", "rushes-lab")(io::Error::other(reason)))
}

/// A command that runs `program` in the real-time class where that is allowed: a real disk needs no
/// processor to answer in time, and on a busy machine even a process at nice −20 waits 15 ms now
/// and then.
fn in_time(program: &Path) -> Command {
    let real_time = ["--fifo", "10"];
    let mut probe = Command::new("chrt");
    if run(probe.args(real_time).arg("true")).is_err() {
        return Command::new(program);
    }
    // chrt executes the program in its own place: the process number is the same.
    let mut command = Command::new("chrt");
    command.args(real_time).arg(program);
    command
}

/// File systems for a slow disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FileSystem {
    /// ext4.
    #[default]
    Ext4,
    /// xfs.
    Xfs,
}

/// A slow disk that is up. Dropping it takes it down.
#[derive(Debug)]
pub struct SlowDisk {
    room: Room,
    device: PathBuf,
    server_pid: u32,
    /// The server and the pipe whose end tells it that we are gone; `None`: the disk is detached.
    owned: Option<(Child, ChildStdin)>,
}

impl SlowDisk {
    /// Puts up a disk that is taken down when it is dropped, or when this process dies.
    ///
    /// Errors   no root, no losetup, no `/dev/fuse`, or no memory
    pub fn create(spec: &DiskSpec) -> Result<SlowDisk, DiskError> {
        SlowDisk::put_up(spec, true)
    }

    /// Puts up a disk that stays until `rushes-lab disk down NAME`.
    pub fn create_detached(spec: &DiskSpec) -> Result<SlowDisk, DiskError> {
        SlowDisk::put_up(spec, false)
    }

    fn put_up(spec: &DiskSpec, owned: bool) -> Result<SlowDisk, DiskError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mut spec = spec.clone();
        if spec.name.is_empty() {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            spec.name = format!("{}-{number}", std::process::id());
        }
        spec.timing
            .check()
            .map_err(|reason| failed("configure", &spec.name)(io::Error::other(reason)))?;
        if spec.bytes == 0 || !spec.bytes.is_multiple_of(4096) {
            let reason = format!("{} bytes; expected a multiple of 4096", spec.bytes);
            return Err(failed("configure", &spec.name)(io::Error::other(reason)));
        }
        let program = program(&spec)?;
        let room = Room::named(&spec.name)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(ROOT)
            .map_err(failed("create", ROOT))?;
        // Not recursive: a disk of that name that is already up is an error.
        fs::create_dir(&room.folder).map_err(failed("create", &room.folder))?;
        let result = SlowDisk::fill(&room, spec, &program, owned);
        if result.is_err() {
            // The caller gets the first error.
            let _ = room.take_down(false);
        }
        result
    }

    fn fill(
        room: &Room,
        spec: DiskSpec,
        program: &Path,
        owned: bool,
    ) -> Result<SlowDisk, DiskError> {
        let mount = room.mount();
        fs::create_dir(&mount).map_err(failed("create", &mount))?;
        let backing = spec.folder.join(format!("rushes-disk-{}.img", spec.name));
        let mut record = Record {
            spec,
            backing,
            owner: Process::of(std::process::id()),
            server: None,
        };
        room.write_record(&record)?;
        let mut command = in_time(program);
        command.arg("disk").arg("serve").arg(room.name());
        if !owned {
            command.arg("--detached");
        }
        // A server that outlives us must not keep our caller's pipe open.
        let last_words = if owned {
            Stdio::inherit()
        } else {
            let log = room.folder.join("log");
            Stdio::from(fs::File::create(&log).map_err(failed("create", &log))?)
        };
        let mut child = command
            .stdin(if owned { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(last_words)
            .spawn()
            .map_err(failed("start", program))?;
        let pipe = child.stdin.take();
        record.server = Process::of(child.id());
        room.write_record(&record)?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output)
                .read_line(&mut line)
                .map_err(failed("hear from", program))?;
        }
        let device = line.trim().strip_prefix(READY).map(PathBuf::from);
        let disk = SlowDisk {
            room: room.clone(),
            device: device.unwrap_or_default(),
            server_pid: child.id(),
            owned: pipe.map(|pipe| (child, pipe)),
        };
        if disk.device.as_os_str().is_empty() {
            let reason = "it ended before its disk was ready; its output stands above";
            return Err(failed("start", program)(io::Error::other(reason)));
        }
        if !owned {
            record.owner = None;
            room.write_record(&record)?;
        }
        Ok(disk)
    }

    /// Finds a disk that is up.
    pub fn find(name: &str) -> Result<SlowDisk, DiskError> {
        let room = Room::named(name)?;
        let record = room.record()?;
        let device = room.loop_devices().into_iter().next().ok_or_else(|| {
            let reason = "it has no loop device; take it down (rushes-lab disk down)";
            failed("find", name)(io::Error::other(reason))
        })?;
        Ok(SlowDisk {
            room,
            device,
            server_pid: record.server.map_or(0, |server| server.pid),
            owned: None,
        })
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.room.name()
    }

    /// Its block device, `/dev/loopN`.
    pub fn block_device(&self) -> &Path {
        &self.device
    }

    /// The sparse file behind it: the bytes on the medium, without those in caches.
    pub fn backing(&self) -> Result<PathBuf, DiskError> {
        Ok(self.room.record()?.backing)
    }

    /// The process that serves it, for its processor time.
    pub fn server_pid(&self) -> u32 {
        self.server_pid
    }

    /// Switches the timing on or off; off for setup.
    pub fn timing(&self, on: bool) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Timing(on)])
    }

    /// The statistics since it was put up or since [`SlowDisk::reset_statistics`].
    pub fn statistics(&self) -> Result<Statistics, DiskError> {
        self.room.statistics()
    }

    /// Counts from zero again.
    pub fn reset_statistics(&self) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Reset])
    }

    /// Notes from now on when pages come that `crate::stage::take` stamped with this key; `None`:
    /// no more. A new key deletes earlier notes.
    pub fn watch_stamps(&self, key: Option<NonZeroU64>) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Stamps(key)])
    }

    /// The notes, in order of time.
    pub fn arrivals(&self) -> Result<Vec<Arrival>, DiskError> {
        self.room.arrivals()
    }

    /// Injects a fault.
    pub fn inject(&self, fault: Fault) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Inject(fault)])
    }

    /// Ends all injected faults.
    pub fn clear_faults(&self) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Clear])
    }

    /// Cuts its power: it loses pages of the write cache that `seed` chooses, and every request
    /// fails.
    pub fn power_off(&self, seed: u64) -> Result<(), DiskError> {
        self.room.command(&[control::Command::PowerOff(seed)])
    }

    /// Switches its power on again.
    pub fn power_on(&self) -> Result<(), DiskError> {
        self.room.command(&[control::Command::PowerOn])
    }

    /// Begins a [`super::log`] of every change; replaces an earlier one.
    ///
    /// Errors   the disk has a write cache
    pub fn record(&self) -> Result<(), DiskError> {
        self.room.command(&[control::Command::Record(true)])
    }

    /// Ends the log. Returns its path, valid until the next one begins or the disk is taken down.
    ///
    /// Errors   the log is incomplete: memory ran out, or it reached its greatest size
    pub fn end_record(&self) -> Result<PathBuf, DiskError> {
        self.room.command(&[control::Command::Record(false)])?;
        Ok(log_beside(&self.backing()?))
    }

    /// A writer of marks in the log.
    pub fn marker(&self) -> Result<Marker, DiskError> {
        let path = self.room.control();
        let file = fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(failed("open", &path))?;
        Ok(Marker { file })
    }

    /// Makes a file system on it, with the timing off meanwhile.
    pub fn format(&self, kind: FileSystem) -> Result<(), DiskError> {
        let on = self.statistics()?.timing;
        self.timing(false)?;
        let mut command = match kind {
            FileSystem::Ext4 => {
                let mut command = Command::new("mkfs.ext4");
                // Initialise inode tables and journal now: a kernel thread would otherwise do it
                // during the measurement.
                command.args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
                command
            }
            FileSystem::Xfs => {
                let mut command = Command::new("mkfs.xfs");
                command.args(["-q", "-f"]);
                command
            }
        };
        run(command.arg(&self.device))?;
        self.timing(on)
    }

    /// Mounts its file system in `folder`; taking down the disk unmounts it.
    pub fn mount(&self, folder: &Path, options: &str) -> Result<(), DiskError> {
        let mut command = Command::new("mount");
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        run(command.arg(&self.device).arg(folder)).map(drop)
    }

    /// Takes it down: unmounts, detaches, ends the server, removes the files.
    pub fn close(mut self) -> Result<(), DiskError> {
        match self.owned.take() {
            Some(owned) => self.end(owned),
            None => self.room.take_down(false),
        }
    }

    fn end(&mut self, (mut child, pipe): (Child, ChildStdin)) -> Result<(), DiskError> {
        let result = self.room.take_down(false);
        drop(pipe);
        // The server has ended already; this reaps it.
        let _ = child.wait();
        result
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        if let Some(owned) = self.owned.take()
            && let Err(error) = self.end(owned)
        {
            eprintln!("{error}");
        }
    }
}

/// Writes marks into the log of a recorded disk.
#[derive(Debug)]
pub struct Marker {
    file: fs::File,
}

impl Marker {
    /// When this returns, the mark stands after every change that the disk answered before the
    /// call.
    pub fn mark(&mut self, number: u64) -> io::Result<()> {
        let line = control::Command::Mark(number).to_string();
        // One write is one command.
        self.file.write_all(line.as_bytes())
    }
}

/// Takes down disks that killed runs left behind; with `all`, disks in use too. Returns the names.
pub fn clean(all: bool) -> Result<Vec<String>, DiskError> {
    let mut names = Vec::new();
    for room in Room::all() {
        if all || !room.is_kept() {
            room.take_down(false)?;
            names.push(room.name());
        }
    }
    Ok(names)
}

/// The word that the server prints before the name of the device when the device is ready.
const READY: &str = "ready ";

/// Puts a loop device over the file and gives it the queue of a rotating disk. Returns the device.
fn attach(room: &Room) -> Result<PathBuf, DiskError> {
    let file = room.mount().join(DISK_NAME);
    let device = run(Command::new("losetup")
        .args(["--find", "--show", "--direct-io=on"])
        .arg(&file))?;
    let device = PathBuf::from(device);
    let name = device.file_name().unwrap_or_default();
    let queue = Path::new("/sys/block").join(name).join("queue");
    for (setting, value) in [
        ("scheduler", "mq-deadline"),
        ("rotational", "1"),
        ("add_random", "0"),
    ] {
        let path = queue.join(setting);
        fs::write(&path, value).map_err(failed("set", &path))?;
    }
    Ok(device)
}

/// The server process: serves the disk called `name` until it is unmounted.
///
/// Unless `detached`, it takes the disk down when its standard input ends.
pub(super) fn serve(name: &str, detached: bool) -> Result<(), DiskError> {
    let room = Room::named(name)?;
    let record = room.record()?;
    // A session of its own: Ctrl-C in the owner's terminal must not reach the disk before the
    // owner. It fails for a group leader, as when started by hand, where it does not matter.
    let _ = rustix::process::setsid();
    // A real disk needs no processor to be in time. Not fatal: the statistics show the oversleep.
    let _ = rustix::process::setpriority_process(None, -20);
    // When we allocate memory, the kernel must not reclaim it by writing to the disk that we serve.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let backing = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&record.backing)
        .map_err(failed("create", &record.backing))?;
    backing
        .set_len(record.spec.bytes)
        .map_err(failed("size", &record.backing))?;
    let mounted = super::server::mount(
        backing,
        ByteCount(record.spec.bytes),
        record.spec.timing,
        &room.mount(),
        log_beside(&record.backing),
    )
    .map_err(|error| {
        // A process that took the disk down meanwhile may have done so before this file existed.
        let _ = fs::remove_file(&record.backing);
        failed("mount", room.mount())(error)
    })?;
    // The server attaches the loop device, not the owner: if the owner were killed meanwhile, its
    // losetup would go on and attach to a file that was taken down.
    match attach(&room) {
        // The write fails if the owner is gone; the end of our standard input shows that below.
        Ok(device) => drop(writeln!(io::stdout(), "{READY}{}", device.display())),
        Err(error) => {
            let _ = room.take_down(true);
            return Err(error);
        }
    }
    // Held while we take the disk down: the unmount ends `mounted.wait` before all files are
    // removed.
    let ending = Arc::new(Mutex::new(()));
    let (guard, guarded) = (ending.clone(), room.clone());
    std::thread::spawn(move || {
        wait_for_the_end(detached);
        let _ending = guard.lock();
        if let Err(error) = guarded.take_down(true) {
            // Not eprintln, which panics if standard error is closed.
            let _ = writeln!(io::stderr(), "{error}");
        }
    });
    let result = mounted.wait().map_err(failed("serve", room.mount()));
    let _ended = ending.lock();
    result
}

/// Returns when the owner is gone, or at SIGTERM or SIGINT.
fn wait_for_the_end(detached: bool) {
    let (told, end) = std::sync::mpsc::channel();
    if !detached {
        let told = told.clone();
        std::thread::spawn(move || {
            // Only the end of the input matters.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            let _ = told.send(());
        });
    }
    if let Ok(mut signals) = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGINT,
    ]) {
        std::thread::spawn(move || {
            if signals.forever().next().is_some() {
                let _ = told.send(());
            }
        });
    }
    let _ = end.recv();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_told_from_a_later_one_with_its_number() {
        let this = Process::of(std::process::id()).unwrap();
        assert!(this.lives());
        let other = Process {
            started: this.started + 1,
            ..this
        };
        assert!(!other.lives());
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["", "..", ".x", "a/b"] {
            assert!(Room::named(name).is_err(), "{name}");
        }
    }
}
