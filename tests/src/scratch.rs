// SPDX-License-Identifier: Apache-2.0
//! A folder for one test, and the order in which everything in it goes away again.
//!
//! Its name carries our process id; a later run sweeps what a killed one left: processes whose
//! working folder it was, mounts and loop devices below it, the folder itself.

use rushes_kit::mounts::mounts_below;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

const PREFIX: &str = "rushes-tests.";
static SERIAL: AtomicU32 = AtomicU32::new(0);
static SWEEP: Once = Once::new();

/// A folder that goes with everything mounted in it when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A fresh one in the system's temporary folder.
    pub fn new() -> Scratch {
        SWEEP.call_once(sweep_the_dead);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{PREFIX}{}.{serial}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder is writable");
        Scratch { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder in it, made if need be.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        fs::create_dir_all(&path).expect("the scratch folder is writable");
        path
    }
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() || std::env::var_os("RUSHES_TEST_KEEP").is_some() {
            keep_logs(&self.path);
        }
        put_away(&self.path);
    }
}

/// Print the ends of the logs of a failed test, since the folder is about to go.
fn keep_logs(folder: &Path) {
    for name in ["daemon.log", "smbd/log/log.smbd", "smbd/log/stderr"] {
        let Ok(text) = fs::read_to_string(folder.join(name)) else {
            continue;
        };
        let lines: Vec<&str> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(40)..];
        if !tail.is_empty() {
            eprintln!("---- end of {name}\n{}", tail.join("\n"));
        }
    }
}

/// Folders of test processes that are gone.
fn sweep_the_dead() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('.').next());
        let Some(owner) = owner else { continue };
        if !Path::new("/proc").join(owner).exists() {
            end_processes_of(&entry.path());
            put_away(&entry.path());
        }
    }
}

/// Processes that were started with this scratch folder as working folder (all that we start are).
fn end_processes_of(folder: &Path) {
    let Ok(entries) = fs::read_dir("/proc") else {
        return;
    };
    for entry in entries.flatten() {
        let started_there =
            fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
        if started_there {
            let pid = entry.file_name();
            let _ = quiet(Command::new("kill").arg("-KILL").arg(pid));
        }
    }
}

/// Unmount, detach, remove. Best effort: the next step is worth trying whatever became of this one.
fn put_away(folder: &Path) {
    for mount in mounts_below(folder) {
        if !quiet(Command::new("umount").arg(&mount)) {
            let _ = quiet(Command::new("umount").arg("--lazy").arg(&mount));
        }
    }
    // Something mounted would be emptied by the removal.
    if mounts_below(folder).is_empty() {
        let _ = fs::remove_dir_all(folder);
    }
}

fn quiet(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_when_dropped_and_leaves_others_alone() {
        let (one, other) = (Scratch::new(), Scratch::new());
        let path = one.path().to_path_buf();
        fs::write(one.folder("a").join("b"), "c").unwrap();
        drop(one);
        assert!(!path.exists());
        assert!(other.path().exists());
    }
    #[test]
    fn an_smbd_of_another_lets_go_of_the_mounts_in_it() {
        let scratch = Scratch::new();
        let disk = scratch.path().join("disk");
        let line = format!("36 35 7:0 / {} rw - ext4 /dev/loop0 rw\n", disk.display());
        let others = |keep: &Path| rushes_kit::mounts::others(&line, &[keep]).unwrap();
        assert_eq!(others(Path::new("/mnt")), [&*disk]);
        assert!(others(scratch.path()).is_empty(), "its own keeps them");
    }
}
