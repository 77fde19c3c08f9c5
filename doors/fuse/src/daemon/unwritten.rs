// SPDX-License-Identifier: Apache-2.0
//! Bytes of a pool's objects that a daemon has and the objects lack, for tools that read objects
//! while the pool is not mounted.
//!
//! A mount leaves in the catalogue the path of its daemon's sockets; the facts lie beside them.

use crate::daemon::DaemonPlace;
use rushes_pool::Pool;
use rushes_shm::facts::FactsView;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// In the catalogue: the runtime folder of the daemon that a mount uses.
const PLACE: &str = "rushes-pool.daemon";
/// For the daemon that the pool used before.
const OTHER_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Longest wait for bytes in the kernel's cache alone. Other files on the same disk may have such
/// bytes for as long as they are recorded.
const LOOSE_PATIENCE: Duration = Duration::from_secs(5);
/// A daemon that writes the last bytes of a mount is mostly done within this time, and no message
/// is needed.
const SILENT: Duration = Duration::from_millis(300);

/// Objects whose bytes only a daemon has, or may have.
#[derive(Debug)]
pub struct Unwritten {
    /// Their number, or the error that hides it.
    pub object_count: io::Result<usize>,
    /// The folder with that daemon's sockets; if that could not be read, the file that names it.
    pub runtime_dir: PathBuf,
    /// A daemon, or `rushes recover`, holds that folder, and may write them. Also true if that is
    /// unknown.
    pub is_daemon_there: bool,
}

impl fmt::Display for Unwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dir = self.runtime_dir.display();
        let objects = |count: &usize| match count {
            1 => String::from("one object that are not on its disk"),
            _ => format!("{count} objects that are not on their disks"),
        };
        match &self.object_count {
            Ok(count) if self.is_daemon_there => write!(
                f,
                "the daemon of {dir} has acknowledged bytes of {}",
                objects(count)
            ),
            Ok(count) => write!(
                f,
                "no daemon seems to run in {dir}, and the last one has left acknowledged bytes of {}",
                objects(count)
            ),
            Err(error) => write!(
                f,
                "it cannot be read in {dir} whether a daemon has acknowledged bytes that are not \
                 on their disks: {error}"
            ),
        }
    }
}

/// Writes the place of this mount's daemon into the catalogue.
pub(crate) fn leave_place(pool: &Pool, place: &DaemonPlace) -> io::Result<()> {
    let runtime_dir = place.runtime_dir.as_os_str().as_bytes();
    let catalogue = pool.catalogue().path();
    let new = catalogue.join(format!("{PLACE}.new"));
    fs::write(&new, runtime_dir)?;
    fs::rename(new, catalogue.join(PLACE))
}

/// Waits until the last daemon has written its bytes, if the next mount uses another one, which
/// would not see them.
///
/// Errors   the last daemon has bytes that the members lack
pub(crate) fn wait_for_last_daemon(pool: &Pool, next: &DaemonPlace) -> io::Result<()> {
    match place(pool.catalogue().path())? {
        Some(last) if last != next.runtime_dir => {
            let say = |unwritten: &Unwritten| {
                tracing::info!("{unwritten}; waiting until they are written")
            };
            wait_until_written(pool, OTHER_PATIENCE, &say).map_err(|unwritten| {
                io::Error::other(format!(
                    "{unwritten}; expected none before this pool uses the daemon of {}: start the \
                     former daemon, or write them with `rushes recover`",
                    next.runtime_dir.display()
                ))
            })
        }
        _ => Ok(()),
    }
}

/// None: no mount of it ever used a daemon.
fn place(catalogue: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read(catalogue.join(PLACE)) {
        Ok(bytes) => Ok(Some(PathBuf::from(OsStr::from_bytes(&bytes)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a daemon, or `rushes recover`, holds that folder by its lock. For messages alone: the
/// table does not list locks of another container, and may have another number for the device than
/// stat(2). An attempt to take the lock would keep out a daemon that starts at this moment.
fn is_daemon_there(runtime_dir: &Path) -> bool {
    let inode = match fs::metadata(runtime_dir.join("lock")) {
        Ok(lock) => lock.ino(),
        Err(error) => return error.kind() != io::ErrorKind::NotFound,
    };
    let Ok(locks) = fs::read_to_string("/proc/locks") else {
        return true;
    };
    let file = format!(":{inode}");
    let is_its =
        |line: &str| line.contains(" FLOCK ") && line.split(' ').any(|word| word.ends_with(&file));
    locks.lines().any(is_its)
}

/// Waits until the members' objects have all acknowledged bytes, at most so long. A running daemon
/// needs some seconds, one that is starting some more. Calls `say` once, when the wait becomes
/// noticeable.
///
/// Assumes  the pool is not mounted
/// Errors   the bytes that are still missing
pub fn wait_until_written(
    pool: &Pool,
    patience: Duration,
    say: &dyn Fn(&Unwritten),
) -> Result<(), Unwritten> {
    let catalogue = pool.catalogue().path();
    let runtime_dir = match place(catalogue) {
        Ok(Some(runtime_dir)) => runtime_dir,
        Ok(None) => return Ok(()),
        Err(error) => {
            return Err(Unwritten {
                object_count: Err(error),
                runtime_dir: catalogue.join(PLACE),
                is_daemon_there: true,
            });
        }
    };
    let devices: Vec<u64> = pool
        .members()
        .iter()
        .filter_map(|member| member.status().device)
        .collect();
    wait_for(&devices, runtime_dir, patience, say)
}

/// The same for a pool whose catalogue is lost, and with it the daemon's place: uses the daemon
/// with its sockets in `runtime_dir`. Folders that cannot be read count for nothing.
pub fn wait_until_members_have_all(
    members: &[PathBuf],
    runtime_dir: &Path,
    patience: Duration,
    say: &dyn Fn(&Unwritten),
) -> Result<(), Unwritten> {
    let device = |member: &PathBuf| Some(fs::metadata(member).ok()?.dev());
    let devices: Vec<u64> = members.iter().filter_map(device).collect();
    wait_for(&devices, runtime_dir.to_path_buf(), patience, say)
}

fn wait_for(
    devices: &[u64],
    runtime_dir: PathBuf,
    patience: Duration,
    say: &dyn Fn(&Unwritten),
) -> Result<(), Unwritten> {
    let begun = Instant::now();
    let mut is_said = false;
    loop {
        // Look them up each time: a daemon that ends in order removes them.
        let facts = FactsView::find(&runtime_dir);
        let count = |facts: FactsView| {
            // Bytes in the kernel's cache alone may be lost, and only a running daemon has a copy
            // of them. It syncs those of ended sessions at once.
            let loose = match begun.elapsed() < LOOSE_PATIENCE {
                true => facts.loose_count_on(devices),
                false => 0,
            };
            let is_awaited = loose > 0 && is_daemon_there(&runtime_dir);
            facts.count_on(devices) + if is_awaited { loose } else { 0 }
        };
        let object_count = facts.map(|facts| facts.map_or(0, count));
        if matches!(object_count, Ok(0)) {
            return Ok(());
        }
        let now = Instant::now();
        let unwritten = Unwritten {
            object_count,
            runtime_dir: runtime_dir.clone(),
            is_daemon_there: is_daemon_there(&runtime_dir),
        };
        if now >= begun + patience {
            return Err(unwritten);
        }
        if !is_said && now >= begun + SILENT {
            say(&unwritten);
            is_said = true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FlockOperation, flock};

    #[test]
    fn members_whose_catalogue_is_lost_are_looked_for_in_the_facts_all_the_same() {
        let folder = std::env::temp_dir().join(format!("rushes-unwritten-{}", std::process::id()));
        let lanes = folder.join("lanes");
        fs::create_dir_all(&lanes).expect("a folder for the test");
        let look = || {
            let members = [folder.clone(), folder.join("nowhere")];
            wait_until_members_have_all(&members, &folder, Duration::ZERO, &|_| {})
        };
        look().expect("there never was a daemon");
        std::os::unix::fs::symlink("nowhere", lanes.join("facts")).expect("it is made");
        let unwritten = look().expect_err("nobody knows what it has").to_string();
        assert!(unwritten.contains("cannot be read"), "{unwritten}");
        fs::remove_dir_all(folder).expect("it goes");
    }

    #[test]
    fn a_wait_says_whether_a_daemon_is_there() {
        let folder = std::env::temp_dir().join(format!("rushes-nobody-{}", std::process::id()));
        let lanes = folder.join("lanes");
        fs::create_dir_all(&lanes).expect("a folder for the test");
        std::os::unix::fs::symlink("nowhere", lanes.join("facts")).expect("it is made");
        let look = || {
            let said = std::cell::RefCell::new(Vec::new());
            let say = |unwritten: &Unwritten| said.borrow_mut().push(unwritten.is_daemon_there);
            let found = wait_until_members_have_all(&[], &folder, SILENT * 2, &say);
            let unwritten = found.expect_err("nobody knows what it has");
            (unwritten.is_daemon_there, said.take())
        };
        assert_eq!(look(), (false, vec![false]));
        let lock = fs::File::create(folder.join("lock")).expect("it is made");
        flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("nobody has it");
        assert_eq!(look(), (true, vec![true]));
        fs::remove_dir_all(folder).expect("it goes");
    }

    #[test]
    fn whether_a_daemon_runs_is_said() {
        let mut unwritten = Unwritten {
            object_count: Ok(3),
            runtime_dir: PathBuf::from("/run/rushes"),
            is_daemon_there: false,
        };
        assert!(
            unwritten
                .to_string()
                .starts_with("no daemon seems to run in /run/rushes")
        );
        unwritten.is_daemon_there = true;
        assert!(
            unwritten
                .to_string()
                .starts_with("the daemon of /run/rushes has")
        );
    }
}
