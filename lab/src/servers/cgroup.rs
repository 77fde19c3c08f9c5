// SPDX-License-Identifier: Apache-2.0
//! A control group around a server: a limit on its memory, page cache included, and its CPU time.
//!
//! It knows both hierarchies: version 1, where memory and cpuacct are folders of their own, and
//! version 2.

use crate::stage::room::Room;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const ROOT: &str = "/sys/fs/cgroup";

/// The hierarchy of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A group of processes with one limit of memory. Dropping it kills all of them.
#[derive(Debug)]
pub struct Cgroup {
    version: Version,
    /// Version 1: memory, then cpuacct. Version 2: the one folder.
    folders: Vec<PathBuf>,
}

impl Cgroup {
    /// A new empty group.
    ///
    /// Units    memory_bytes_max: bytes, page cache and shared memory included
    /// Errors   no memory controller is mounted, or we may not use it
    pub fn create(room: &Room, name: &str, memory_bytes_max: u64) -> Result<Cgroup> {
        let tail = room
            .path()
            .file_name()
            .context("the run's folder has no name")?
            .to_string_lossy();
        let name = format!("{tail}-{name}");
        let root = Path::new(ROOT);
        let (version, folders) = if root.join("memory/memory.limit_in_bytes").exists() {
            let folders = vec![
                root.join("memory").join(&name),
                root.join("cpuacct").join(&name),
            ];
            (Version::One, folders)
        } else {
            enable_memory_controller(root)?;
            (Version::Two, vec![root.join(&name)])
        };
        for folder in &folders {
            fs::create_dir(folder)
                .with_context(|| format!("control group {} cannot be made", folder.display()))?;
        }
        let group = Cgroup { version, folders };
        room.remember_cgroup(&group.folders)?;
        let knob = match version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        group.write(knob, &memory_bytes_max.to_string())?;
        Ok(group)
    }

    /// A command that runs in the group from its first instruction on.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("/bin/sh");
        let joins: String = self
            .folders
            .iter()
            .map(|folder| format!("echo $$ > {}/cgroup.procs && ", folder.display()))
            .collect();
        command
            .arg("-c")
            .arg(format!("{joins} exec \"$@\""))
            .arg("sh")
            .arg(program);
        command
    }

    /// CPU time of all processes that ever ran in it.
    pub fn cpu(&self) -> Result<Duration> {
        match self.version {
            Version::One => {
                let ns: u64 = self.read(1, "cpuacct.usage")?.trim().parse()?;
                Ok(Duration::from_nanos(ns))
            }
            Version::Two => {
                let text = self.read(0, "cpu.stat")?;
                let us: u64 = field(&text, "usage_usec").context("cpu.stat has no usage_usec")?;
                Ok(Duration::from_micros(us))
            }
        }
    }

    /// The most memory it ever held. Units: bytes.
    pub fn memory_bytes_peak(&self) -> Result<u64> {
        let text = match self.version {
            Version::One => self.read(0, "memory.max_usage_in_bytes")?,
            // In Linux 5.19 and later.
            Version::Two => self.read(0, "memory.peak")?,
        };
        Ok(text.trim().parse()?)
    }

    fn write(&self, knob: &str, value: &str) -> Result<()> {
        let path = self.folders[0].join(knob);
        fs::write(&path, value).with_context(|| format!("{} = {value}", path.display()))
    }

    fn read(&self, folder_index: usize, knob: &str) -> Result<String> {
        let path = self.folders[folder_index].join(knob);
        fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for folder in &self.folders {
            empty_and_remove(folder);
        }
    }
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(' ')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}

fn enable_memory_controller(root: &Path) -> Result<()> {
    let offered = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    ensure!(
        offered.split_whitespace().any(|name| name == "memory"),
        "neither {ROOT}/memory (version 1) nor the memory controller of version 2 was found; \
         servers cannot be given equal memory without one"
    );
    let knob = root.join("cgroup.subtree_control");
    let on = fs::read_to_string(&knob).unwrap_or_default();
    if on.split_whitespace().any(|name| name == "memory") {
        return Ok(());
    }
    fs::write(&knob, "+memory").with_context(|| {
        format!(
            "the memory controller cannot be switched on in {}",
            knob.display()
        )
    })
}

/// Kill the processes in a group and remove it; it runs on the way out and in sweeps, so it returns
/// no error.
pub(crate) fn empty_and_remove(folder: &Path) {
    let end = Instant::now() + Duration::from_secs(5);
    while folder.exists() && Instant::now() < end {
        for pid in fs::read_to_string(folder.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.trim().parse::<i32>().ok())
        {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if fs::remove_dir(folder).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "usage_usec 12\nuser_usec 7\n";
        assert_eq!(field(text, "user_usec"), Some(7));
        assert_eq!(field(text, "usec"), None);
    }
}
