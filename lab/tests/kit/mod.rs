// SPDX-License-Identifier: Apache-2.0
//! Shared by tests of whole runs: the check that this machine can make them, their rooms, and the
//! check that nothing of them is left.

// Each test program uses only a part of this file.
#![allow(dead_code)]

use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rushes-lab");

/// False, with a message, where these runs are impossible; under `make test` that is a failure.
pub(crate) fn possible(test: &str) -> bool {
    let programs = ["/usr/sbin/smbd", "/usr/bin/pdbedit", "/usr/sbin/filefrag"];
    let possible = rustix::process::geteuid().is_root()
        && File::open("/dev/fuse").is_ok()
        && programs.iter().all(|program| Path::new(program).exists());
    if !possible {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "{test} needs root, /dev/fuse, Samba and e2fsprogs"
        );
        eprintln!("SKIPPED {test}: it needs root, /dev/fuse, Samba and e2fsprogs");
    }
    possible
}

/// The folder for the rooms of one test's runs; empty again when all runs have ended.
pub(crate) struct Rooms(PathBuf);

impl Rooms {
    /// An empty folder, named after `test`.
    pub(crate) fn new(test: &str) -> Rooms {
        let name = format!("rushes-lab-test-{test}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a folder can be made");
        Rooms(path)
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Starts `rushes-lab ARGUMENTS --json`.
    pub(crate) fn start(&self, arguments: &str) -> Child {
        Command::new(PROGRAM)
            .args(arguments.split_whitespace())
            .arg("--json")
            .env("TMPDIR", &self.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("rushes-lab starts")
    }

    /// Runs it to its end, checks that it succeeds and leaves nothing behind, and returns its
    /// report.
    pub(crate) fn run(&self, arguments: &str) -> Value {
        let child = self.start(arguments);
        let pid = child.id();
        let output = child.wait_with_output().expect("it ends");
        assert!(
            output.status.success(),
            "{arguments}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        self.check_tidy(arguments, pid);
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments}: {error} in {text}"))
    }

    /// Checks that no room, mount, loop device or disk of that run is left.
    pub(crate) fn check_tidy(&self, arguments: &str, pid: u32) {
        let left: Vec<_> = fs::read_dir(&self.0)
            .expect("it is there")
            .flatten()
            .collect();
        assert!(left.is_empty(), "{arguments}: {left:?}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc is there");
        let room = self.0.display().to_string();
        assert!(!mounts.contains(&room), "{arguments}: {mounts}");
        let disk = format!("/run/rushes-lab/disks/{pid}-0");
        assert!(!Path::new(&disk).exists(), "{arguments}: {disk}");
        // Rooms in memory are not below TMPDIR.
        let own = format!("rushes-lab.{pid}-");
        let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let left: Vec<_> = names
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with(&own))
            .collect();
        assert!(left.is_empty(), "{arguments}: {left:?}");
        assert!(!mounts.contains(&own), "{arguments}: {mounts}");
        // A test beside this one may have just copied all mounts into a namespace, and let go of
        // them a moment later: the kernel keeps the device for so long.
        let end = Instant::now() + Duration::from_secs(10);
        while let Some(file) = loop_over(&own) {
            assert!(Instant::now() < end, "{arguments}: {file}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A file with this in its path that a loop device has.
fn loop_over(part: &str) -> Option<String> {
    let loops = fs::read_dir("/sys/block").expect("sysfs is there");
    loops.flatten().find_map(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        file.contains(part).then_some(file)
    })
}

impl Drop for Rooms {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A field that is a whole number.
pub(crate) fn count(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} is {} in {report:#}", report[name]))
}

/// A field that is a number.
pub(crate) fn number(report: &Value, name: &str) -> f64 {
    report[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} is {} in {report:#}", report[name]))
}

/// The same for runs that need a built daemon and module.
pub(crate) fn possible_with_rushes(test: &str) -> bool {
    let there = rushes_lab::servers::daemon::find_rushes().is_ok()
        && rushes_lab::servers::server::find_module(None).is_ok();
    assert!(
        there || std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
        "{test} needs make build"
    );
    if !there {
        eprintln!("SKIPPED {test}: it needs the daemon and the module (make build)");
    }
    there && possible(test)
}
