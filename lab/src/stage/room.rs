// SPDX-License-Identifier: Apache-2.0
//! The folder of a run, and the order in which everything in it is taken down.
//!
//! A room is locked while its run lives. A program that finds one unlocked, such as `rushes lab
//! clean`, may kill the processes in its control groups, unmount the file systems below it, detach
//! loop devices over files in it, and remove it.

use anyhow::{Context, Result};
use rushes_kit::mounts::mounts_below;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PREFIX: &str = "rushes-lab.";
const CGROUPS: &str = "cgroups";
const MEMORY: &str = "/dev/shm";

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// Catch Ctrl-C and termination: from now on [`interrupted`] returns true after one, and the run
/// unwinds on its own.
pub fn catch_interrupts() -> Result<()> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            // At the second signal end at once; `rushes lab clean` does the rest.
            std::process::exit(130);
        }
    })
    .context("cannot install a handler for Ctrl-C")
}

/// True once the user wants us to stop.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Fails once the user wants us to stop.
pub fn go_on() -> Result<()> {
    anyhow::ensure!(
        !interrupted(),
        "interrupted; the files, mounts and disks of this run are removed"
    );
    Ok(())
}

/// Sleep; fails at an interrupt.
pub fn pause(span: Duration) -> Result<()> {
    let end = Instant::now() + span;
    loop {
        go_on()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}

/// A locked temporary folder; removed when dropped.
#[derive(Debug)]
pub struct Room {
    path: PathBuf,
    _lock: File,
}

impl Room {
    /// A new room in the system's temporary folder.
    pub fn create() -> Result<Room> {
        Room::below(&std::env::temp_dir())
    }

    /// A new room in memory, for files that runs write and delete all the time.
    pub fn in_memory() -> Result<Room> {
        Room::below(Path::new(MEMORY))
    }

    fn below(folder: &Path) -> Result<Room> {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{serial}", std::process::id());
        Room::again(&folder.join(name))
    }

    /// A room at the path of a former one, for files that hold its paths.
    ///
    /// Errors   a living run has it
    pub fn again(path: &Path) -> Result<Room> {
        if path.exists() {
            let lock = File::open(path.join("lock"));
            if let Ok(lock) = lock {
                flock(&lock, FlockOperation::NonBlockingLockExclusive)
                    .context("the run's folder belongs to another run")?;
            }
            sweep(path);
        }
        fs::create_dir(path).with_context(|| format!("{} could not be created", path.display()))?;
        let lock = File::create(path.join("lock"))
            .context("the lock file of the run's folder cannot be created")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .context("another process holds the lock of the run's folder")?;
        Ok(Room {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder in it, made if it is missing.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path)
            .with_context(|| format!("{} could not be created", path.display()))?;
        Ok(path)
    }

    /// Note control groups, so that a later sweep finds the processes in them.
    pub fn remember_cgroup(&self, folders: &[PathBuf]) -> Result<()> {
        use std::io::Write;
        let mut file = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.path.join(CGROUPS))
            .context("the list of control groups of the run cannot be written")?;
        for folder in folders {
            writeln!(file, "{}", folder.display()).context("the list of control groups")?;
        }
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        sweep(&self.path);
    }
}

/// Remove every room whose run is gone. Returns their paths.
pub fn clean() -> Result<Vec<PathBuf>> {
    let mut removed = clean_below(&std::env::temp_dir())?;
    removed.extend(clean_below(Path::new(MEMORY))?);
    Ok(removed)
}

fn clean_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("{} cannot be listed", folder.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) || !path.is_dir() {
            continue;
        }
        if let Ok(lock) = File::open(path.join("lock"))
            && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            continue;
        }
        sweep(&path);
        removed.push(path);
    }
    Ok(removed)
}

/// Best effort by design: it runs on the way out and after crashes, where each step is worth trying
/// even if the one before failed.
fn sweep(folder: &Path) {
    for group in fs::read_to_string(folder.join(CGROUPS))
        .unwrap_or_default()
        .lines()
    {
        crate::servers::cgroup::empty_and_remove(Path::new(group));
    }
    for mount in mounts_below(folder) {
        if rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::empty()).is_err() {
            let _ = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH);
        }
    }
    if let Ok(list) = Command::new("losetup")
        .args([
            "--list",
            "--noheadings",
            "--raw",
            "--output",
            "NAME,BACK-FILE",
        ])
        .output()
    {
        for line in String::from_utf8_lossy(&list.stdout).lines() {
            if let Some((name, file)) = line.split_once(' ')
                && Path::new(file).starts_with(folder)
            {
                let _ = Command::new("losetup").args(["-d", name]).status();
            }
        }
    }
    // The content of a mount that is still there must not be deleted.
    if mounts_below(folder).is_empty() {
        let _ = fs::remove_dir_all(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_goes_when_it_is_dropped() {
        let room = Room::create().unwrap();
        let path = room.path().to_owned();
        fs::write(path.join("x"), "y").unwrap();
        drop(room);
        assert!(!path.exists());
    }
    #[test]
    fn an_smbd_of_another_lets_go_of_the_mounts_in_it() {
        let room = Room::create().unwrap();
        let disk = room.path().join("disk");
        let line = format!("36 35 7:0 / {} rw - ext4 /dev/loop0 rw\n", disk.display());
        let others = |keep: &Path| rushes_kit::mounts::others(&line, &[keep]).unwrap();
        assert_eq!(others(Path::new("/mnt")), [&*disk]);
        assert!(others(room.path()).is_empty(), "its own keeps them");
    }
}
