// SPDX-License-Identifier: Apache-2.0
//! A pool over file systems of several kinds and sizes, and its mount, for a test.

use crate::daemon::{Daemon, DaemonSpec, limited};
use crate::disk::{Disk, run};
use crate::needs;
use crate::patience::until;
use crate::pattern;
use crate::scratch::Scratch;
use rushes_kit::mounts::sync_below;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// The make of a member: the command for its file system, and its size in MiB.
pub type Made = (&'static [&'static str], u64);

/// ext4 with all of it for files.
pub const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F", "-m", "0"];
/// XFS, of 300 MiB at least.
pub const XFS: &[&str] = &["mkfs.xfs", "-q", "-f"];
/// btrfs, of 120 MiB at least.
pub const BTRFS: &[&str] = &["mkfs.btrfs", "-q", "-f"];

const ENOSPC: i32 = 28;
/// Of what is written at once. Units: bytes.
const PIECE_BYTES: usize = 1 << 20;

/// A pool, mounted.
#[derive(Debug)]
pub struct PoolWorld {
    mount: Option<Child>,
    /// Options for `rushes pool mount` besides.
    pub mount_options: Vec<&'static str>,
    /// Descriptors that its process may have. None: as many as this one.
    pub descriptor_limit: Option<u32>,
    members: Vec<Made>,
    is_kept: bool,
    /// One more member's disk, which stalls when it is told.
    slow: Option<Disk>,
    /// Goes last: it unmounts what is in it.
    pub scratch: Scratch,
}

/// A test that kills serving processes lets each live so long. A keeper counts deaths that come
/// sooner after a process began to serve, and gives the mount up after ten of them in a row.
///
/// How soon is a private constant of the product, because no user sets it: `QUICK` in
/// doors/fuse/src/kernel/keeper.rs. A test below holds this one above it.
pub const SERVES_AT_LEAST: Duration = Duration::from_millis(300);

/// A mount that is busy, for instance because the test itself has a file open, never ends.
const END_PATIENCE: Duration = Duration::from_secs(300);

impl PoolWorld {
    /// Has everything written that its mount, its members and its catalogue have not written yet.
    pub fn sync(&self) {
        sync_below(self.scratch.path()).expect("synced");
    }

    /// Made and mounted: a catalogue on an ext4 of its own, members as asked. None: the machine
    /// lacks something, which was said.
    pub fn build(members: &[Made]) -> Option<PoolWorld> {
        PoolWorld::build_with(members, false)
    }

    /// The same, with a keeper of the mount.
    pub fn kept(members: &[Made]) -> Option<PoolWorld> {
        PoolWorld::build_with(members, true)
    }

    /// One more member, on the lab's slow disk, so large. Units: bytes.
    ///
    /// Assumes  the program `rushes-lab` is there
    pub fn add_slow_disk(&mut self, bytes: u64) {
        let disk = Disk::slow(&self.scratch, bytes);
        let folder = disk.path().join("pool");
        self.slow = Some(disk);
        fs::create_dir(&folder).expect("our own disk");
        let (report, code) = self.json(&["add"], &[folder]);
        assert_eq!(code, Some(0), "{report}");
    }

    /// Where the file systems of all members are mounted, a slow disk's behind the others.
    pub fn file_systems(&self) -> Vec<PathBuf> {
        let slow = self.slow.iter().map(|disk| disk.path().to_path_buf());
        let made = (0..self.members.len()).map(|number| self.member(number));
        made.chain(slow).collect()
    }

    /// The disk that [`PoolWorld::add_slow_disk`] has put up, if it has.
    pub fn obedient_disk(&self) -> Option<&Disk> {
        self.slow.as_ref()
    }

    /// The disk that [`PoolWorld::add_slow_disk`] has put up.
    pub fn slow_disk(&self) -> &Disk {
        self.slow.as_ref().expect("one was added")
    }

    fn build_with(members: &[Made], is_kept: bool) -> Option<PoolWorld> {
        let programs = members
            .iter()
            .map(|(mkfs, _)| needs::Need::Program(mkfs[0]));
        let mut wanted: Vec<needs::Need<'_>> = programs.collect();
        wanted.push(needs::Need::Root);
        wanted.push(needs::Need::Program("mkfs.ext4"));
        wanted.push(needs::Need::Program("rushes"));
        if !needs::all_there(&wanted) {
            return None;
        }
        let scratch = Scratch::new();
        file_system(&scratch, "catalogue", (EXT4, 64));
        for (number, &made) in members.iter().enumerate() {
            file_system(&scratch, &format!("m{number}"), made);
        }
        let mut world = PoolWorld {
            mount: None,
            mount_options: Vec::new(),
            descriptor_limit: None,
            members: members.to_vec(),
            is_kept,
            slow: None,
            scratch,
        };
        let made = world.create(&[]);
        assert!(made.status.success(), "{made:?}");
        world.start();
        Some(world)
    }

    /// `rushes pool create` over what there is.
    pub fn create(&self, options: &[&str]) -> Output {
        let members = (0..self.members.len()).map(|number| self.member(number).join("pool"));
        Command::new(needs::path_of("rushes"))
            .args(["pool", "create"])
            .args(options)
            .arg(self.catalogue())
            .args(members)
            .output()
            .expect("rushes starts")
    }

    /// Its catalogue.
    pub fn catalogue(&self) -> PathBuf {
        self.scratch.path().join("catalogue/pool")
    }

    /// Where the file system of a member is mounted.
    pub fn member(&self, number: usize) -> PathBuf {
        self.scratch.path().join(format!("m{number}"))
    }

    /// Something in the pool.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.scratch.path().join("mnt").join(name)
    }

    /// Mount it, in a process of its own, and wait until it is there.
    pub fn start(&mut self) {
        let folder = self.scratch.path().join("mnt");
        // One that was killed leaves a folder that nobody can look at.
        let _ = fs::create_dir(&folder);
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.scratch.path().join("daemon.log"))
            .expect("the scratch folder is writable");
        let recover = format!(
            "{} recover --config {}",
            needs::path_of("rushes").display(),
            self.scratch.path().join("rushes.toml").display()
        );
        let mut command = limited(needs::path_of("rushes"), self.descriptor_limit);
        let mut child = command
            .args(["pool", "mount"])
            .arg(self.catalogue())
            .arg(&folder)
            .arg("--runtime-dir")
            .arg(self.scratch.path().join("run"))
            .args(["--recover", &recover, "--recover-after", "1"])
            .args(&self.mount_options)
            .args(self.is_kept.then_some("--keeper"))
            .current_dir(self.scratch.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("rushes starts");
        // One that was killed looks mounted, too: only the new process knows when it is there.
        let mut said = String::new();
        let output = child.stdout.as_mut().expect("it is piped");
        let read = BufReader::new(output).read_line(&mut said);
        assert!(
            read.is_ok() && said.contains(" is mounted on "),
            "{said} {}",
            self.log()
        );
        self.mount = Some(child);
    }

    /// The log of the mount.
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("daemon.log")).unwrap_or_default()
    }

    /// How much the mount's process has read so far, of whatever: what a program reads through it
    /// is in it, what the kernel does by passthrough is not. Units: bytes.
    pub fn read_by_mount(&self) -> u64 {
        let pid = self.mount.as_ref().expect("it is mounted").id();
        let text = fs::read_to_string(format!("/proc/{pid}/io")).expect("ours");
        let line = text.lines().find_map(|line| line.strip_prefix("rchar: "));
        line.expect("the kernel counts").parse().expect("a number")
    }

    /// A daemon that serves its members, so many, with a session of the mount for each. `rules`:
    /// more of its configuration.
    pub fn served(&self, member_count: usize, rules: &str) -> Daemon {
        let daemon = self.serve(member_count, rules);
        daemon.wait_for_members(member_count);
        daemon
    }

    /// The same where the pool may not be mounted yet.
    pub fn serve(&self, member_count: usize, rules: &str) -> Daemon {
        let members = (0..member_count).map(|number| self.member(number).join("pool"));
        let mut spec = DaemonSpec::of_members(members);
        spec.cache = String::from("128MiB");
        spec.more += rules;
        Daemon::start(&self.scratch, &spec)
    }

    /// SIGKILL to the process that was started to mount it, and, where that is a keeper, with it to
    /// the one that serves: the mount is dead.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.mount.take() {
            let serving = child_of(child.id());
            let _ = child.kill();
            let _ = child.wait();
            serving.into_iter().for_each(until_ended);
        }
    }

    /// The process that was started to mount it.
    pub fn keeper(&self) -> u32 {
        self.mount.as_ref().expect("it is mounted").id()
    }

    /// Until that has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let mut child = self.mount.take().expect("it is mounted");
        child.wait().expect("it is ours")
    }

    /// The process that was started to mount it is the caller's from now on; another one may be
    /// started.
    pub fn take(&mut self) -> Child {
        self.mount.take().expect("it is mounted")
    }

    /// The process that serves the mount now. None: the keeper has not started the next one yet.
    pub fn serving(&self) -> Option<u32> {
        child_of(self.keeper())
    }

    /// SIGKILL to the process that serves the mount; its keeper lives.
    pub fn kill_serving(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        let killed = loop {
            // It may end by itself before it is killed.
            if let Some(serving) = self.serving()
                && kill(serving)
            {
                break serving;
            }
            assert!(Instant::now() < end, "nobody serves: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        };
        until_ended(killed);
    }

    /// SIGKILL to the process that serves the mount. Returns the time until the next one answers.
    pub fn measure_kill(&self) -> Duration {
        let killed = Instant::now();
        self.kill_serving();
        fs::metadata(self.path("nobody")).expect_err("not there, and said by the next one");
        killed.elapsed()
    }

    /// SIGTERM to the mount's process, which is to end when it can.
    pub fn tell_to_end(&self) {
        run(Command::new("kill").arg(self.keeper().to_string()));
    }

    /// Whether that process is there. It must not have been waited for.
    pub fn is_there(&mut self) -> bool {
        let child = self.mount.as_mut().expect("nobody has waited for it");
        child.try_wait().expect("it is ours").is_none()
    }

    /// SIGTERM to the mount's process, which is to end well.
    pub fn end(&mut self) {
        if self.mount.is_none() {
            return;
        }
        self.tell_to_end();
        until("its mount has ended", END_PATIENCE, || !self.is_there());
        let status = self.wait();
        assert!(status.success(), "{status}: {}", self.log());
    }

    /// Ends the mount, or kills its processes, and mounts it anew.
    pub fn start_again(&mut self, is_killed: bool) {
        if is_killed {
            self.kill();
        } else {
            self.end();
        }
        self.start();
    }

    /// `rushes pool WORDS…` with the catalogue behind the first word.
    pub fn command(&self, words: &[&str], paths: &[PathBuf]) -> Command {
        let mut command = Command::new(needs::path_of("rushes"));
        command
            .args(["pool", words[0]])
            .arg(self.catalogue())
            .args(&words[1..])
            .args(paths);
        command
    }

    /// The output of such a command with `--json`, and its exit code.
    pub fn json(&self, words: &[&str], paths: &[PathBuf]) -> (Value, Option<i32>) {
        let output = self
            .command(words, paths)
            .arg("--json")
            .output()
            .expect("rushes starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{error}: {text} {output:?}"));
        (value, output.status.code())
    }

    /// `rushes pool fsck` finds nothing.
    pub fn assert_sound(&self, context: &str) {
        let (report, code) = self.json(&["fsck"], &[]);
        assert_eq!(code, Some(0), "{context}: {report}");
        assert_eq!(report["findings"], json!([]), "{context}");
    }

    /// [`PoolWorld::end`], after which the pool is sound.
    pub fn end_and_assert_sound(&mut self) {
        self.end();
        self.assert_sound("after the mount has ended");
    }

    /// The catalogue's file system is a new one, with an empty folder.
    pub fn lose_catalogue(&self) {
        run(Command::new("umount").arg(self.scratch.path().join("catalogue")));
        file_system(&self.scratch, "catalogue", (EXT4, 64));
    }

    /// One more file system with an empty folder `pool`, which is no member yet.
    pub fn disk(&self, name: &str, made: Made) -> PathBuf {
        file_system(&self.scratch, name, made);
        self.scratch.path().join(name).join("pool")
    }

    /// Unmount a member's file system, or mount it again.
    pub fn unplug(&self, number: usize) {
        // Names may be logged on it at this moment.
        let end = Instant::now() + Duration::from_secs(10);
        let unmounted = || {
            let done = Command::new("umount").arg(self.member(number)).status();
            done.is_ok_and(|status| status.success())
        };
        while !unmounted() {
            assert!(Instant::now() < end, "member {number} stays busy");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// As it was before [`PoolWorld::unplug`].
    pub fn plug(&self, number: usize, options: &str) {
        let image = self.scratch.path().join(format!("m{number}.img"));
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            run(Command::new("mount")
                .args(["-o", options])
                .arg(&image)
                .arg(self.member(number)));
            let found = rustix::fs::statvfs(self.member(number)).expect("mounted");
            let is_read_only = found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY);
            if is_read_only == options.contains("ro") {
                return;
            }
            // A loop device that was read-only goes a moment after its mount, and is used again
            // until then.
            assert!(Instant::now() < end, "member {number} stays read-only");
            self.unplug(number);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// `rushes pool where FILE --json`, its one report.
    pub fn where_is(&self, name: &str) -> Value {
        let output = Command::new(needs::path_of("rushes"))
            .args(["pool", "where", "--json"])
            .arg(self.path(name))
            .output()
            .expect("rushes starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let all: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{error}: {text} {output:?}"));
        all[0].clone()
    }

    /// Where the first object of a segment lies, as [`PoolWorld::where_is`] tells of it.
    pub fn object_of(&self, segment: &Value) -> PathBuf {
        let object = &segment["objects"][0];
        let number = object["member"].as_u64().expect("a number") as usize;
        let below = object["path"].as_str().expect("text");
        self.member(number).join("pool").join(below)
    }

    /// Write a pattern to a new file until there is no room for more, at most `most` bytes.
    ///
    /// Returns  the file, and its length
    pub fn fill(&self, name: &str, seed: u64, most: u64) -> (File, u64) {
        let mut file = File::create(self.path(name)).expect("made");
        let mut length = 0;
        let error = loop {
            match file.write(&pattern::bytes(seed, length, PIECE_BYTES)) {
                Ok(count) => length += count as u64,
                Err(error) => break error,
            }
            assert!(length < most, "it never fills");
        };
        assert_eq!(error.raw_os_error(), Some(ENOSPC));
        (file, length)
    }

    /// Room in use on a member's file system. Units: bytes.
    pub fn used(&self, number: usize) -> u64 {
        let found = rustix::fs::statvfs(self.member(number)).expect("mounted");
        (found.f_blocks - found.f_bfree) * found.f_frsize
    }

    /// Hardly a block is left on a member.
    pub fn must_be_full(&self, number: usize) {
        let found = rustix::fs::statvfs(self.member(number)).expect("mounted");
        assert!(
            found.f_bavail * 50 < found.f_blocks,
            "member {number} has {} blocks left",
            found.f_bavail
        );
    }

    /// Shape of each segment of a file, and the count of its objects.
    pub fn shapes_of(&self, name: &str) -> Vec<(String, usize)> {
        let report = self.where_is(name);
        let segments = report["segments"].as_array().expect("a list");
        let shape = |segment: &Value| {
            let objects = segment["objects"].as_array().expect("a list");
            let shape = segment["shape"].as_str().expect("text").to_owned();
            (shape, objects.len())
        };
        segments.iter().map(shape).collect()
    }

    /// Numbers of the members that have bytes of a file.
    pub fn members_of(&self, name: &str) -> Vec<u64> {
        let report = self.where_is(name);
        let segments = report["segments"].as_array().expect("a list");
        let objects = segments.iter().filter_map(|one| one["objects"].as_array());
        let mut found: Vec<u64> = objects
            .flatten()
            .filter_map(|object| object["member"].as_u64())
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// The process that this one has started, unless that has ended and waits to be waited for.
fn child_of(parent: u32) -> Option<u32> {
    let all = fs::read_dir("/proc").expect("it is mounted");
    let numbers = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter(|number| {
            status_of(*number).is_some_and(|(state, its)| its == parent && state != 'Z')
        })
        .max()
}

/// Its state, and whose child it is. None: there is no such process.
fn status_of(process: u32) -> Option<(char, u32)> {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Behind the name, which may have anything in it.
    let mut words = status.rsplit_once(')')?.1.split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// SIGKILL. Whether there was such a process.
fn kill(process: u32) -> bool {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    process.is_some_and(|process| kill_process(process, Signal::KILL).is_ok())
}

fn until_ended(process: u32) {
    let end = Instant::now() + Duration::from_secs(60);
    // Its first thread may be dead before the others, which still have its files.
    let lives = || {
        let threads = fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
        threads > 1 || status_of(process).is_some_and(|(state, _)| state != 'Z')
    };
    while lives() {
        assert!(Instant::now() < end, "process {process} does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for PoolWorld {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Count of removed objects that a process has open.
pub fn nameless_open(pid: u32) -> usize {
    let all = fs::read_dir(format!("/proc/{pid}/fd")).expect("it is there");
    all.flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter(|to| to.to_string_lossy().contains("/objects/"))
        .filter(|to| to.to_string_lossy().ends_with(" (deleted)"))
        .count()
}

/// A file of a pattern that its seed and every offset tell apart, on stable storage.
pub fn put(path: &Path, seed: u64, length: usize) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    for at in (0..length).step_by(PIECE_BYTES) {
        let length = PIECE_BYTES.min(length - at);
        file.write_all(&pattern::bytes(seed, at as u64, length))?;
    }
    file.sync_all()
}

/// It is as [`put`] made it.
pub fn check(path: &Path, seed: u64, length: usize) {
    let name = path.display().to_string();
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(bytes.len(), length, "{name}");
    pattern::check(seed, 0, &bytes, &name);
}

/// Run it, and kill it as it enters its `count`-th call of this name.
///
/// Returns  whether it was killed; else it succeeded
pub fn killed_at(command: &Command, call: &str, count: usize) -> bool {
    let output = Command::new(needs::path_of("strace"))
        .args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .arg(format!("trace={call}"))
        .arg("-e")
        .arg(format!("inject={call}:signal=SIGKILL:when={count}"))
        // With it the loader opens dozens of files first, under cargo and nowhere else.
        .env_remove("LD_LIBRARY_PATH")
        .arg(command.get_program())
        .args(command.get_args())
        .output()
        .expect("strace starts");
    match output.status.code() {
        None => true,
        Some(code) => {
            assert_eq!(code, 0, "{call} {count}: {output:?}");
            false
        }
    }
}

fn file_system(scratch: &Scratch, name: &str, (mkfs, mib): Made) {
    let image = scratch.path().join(format!("{name}.img"));
    // A new file: a program that has copied the mounts of this machine still has the former one
    // mounted.
    let _ = fs::remove_file(&image);
    File::create(&image)
        .and_then(|file| file.set_len(mib << 20))
        .expect("the temporary folder takes a sparse image");
    run(Command::new(needs::path_of(mkfs[0]))
        .args(&mkfs[1..])
        .arg(&image));
    let folder = scratch.folder(name);
    run(Command::new("mount")
        .args(["-o", "loop"])
        .arg(&image)
        .arg(&folder));
    fs::create_dir(folder.join("pool")).expect("our own file system");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serving_process_of_a_test_lives_longer_than_a_quick_death() {
        let path = crate::tree::root().join("doors/fuse/src/kernel/keeper.rs");
        let source = fs::read_to_string(&path).expect("the keeper's source");
        let quick: u64 = source
            .split_once("const QUICK: Duration = Duration::from_millis(")
            .and_then(|(_, rest)| rest.split_once(");"))
            .and_then(|(number, _)| number.replace('_', "").parse().ok())
            .expect("QUICK in milliseconds; without it, say anew how long a test has to wait");
        // Half as long again: the test counts from a little before the process serves.
        let least = Duration::from_millis(quick + quick / 2);
        assert!(SERVES_AT_LEAST >= least, "{SERVES_AT_LEAST:?} {least:?}");
    }
}
