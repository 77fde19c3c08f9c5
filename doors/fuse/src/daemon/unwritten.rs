// SPDX-License-Identifier: Apache-2.0
//! Bytes of a pool's objects that a daemon has and the objects have not, for tools that look at
//! objects while nobody has the pool mounted.
//!
//! A mount leaves in the catalogue where its daemon has its sockets; beside them are the facts.

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

/// In the catalogue: the runtime folder of the daemon that a mount goes by.
const PLACE: &str = "rushes-pool.daemon";
/// For the daemon that the pool went by before.
const OTHER_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Longest wait for bytes in the kernel's cache alone. Files beside the pool's on the same disk may
/// have some for as long as they are recorded.
const LOOSE_PATIENCE: Duration = Duration::from_secs(5);
/// A daemon that writes the last bytes of a mount is mostly done within this, and nothing needs to
/// be said.
const SILENT: Duration = Duration::from_millis(300);

/// Objects whose bytes only a daemon has, or may have.
#[derive(Debug)]
pub struct Unwritten {
    /// How many there are, or why that cannot be told.
    pub object_count: io::Result<usize>,
    /// Where that daemon has, or had, its sockets; if that could not be read, where it is written.
    pub runtime_dir: PathBuf,
    /// A daemon, or `rushes recover`, has that folder, and may write them. True, too: it cannot be
    /// told.
    pub is_daemon_there: bool,
}

impl fmt::Display for Unwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dir = self.runtime_dir.display();
        match &self.object_count {
            Ok(count) if self.is_daemon_there => write!(
                f,
                "the daemon of {dir} has acknowledged bytes of {count} objects that are not on their disks"
            ),
            Ok(count) => write!(
                f,
                "no daemon seems to run in {dir}, and the last one has left acknowledged bytes of {count} objects that are not on their disks"
            ),
            Err(error) => write!(
                f,
                "it cannot be read in {dir} whether a daemon has acknowledged bytes that are not \
                 on their disks: {error}"
            ),
        }
    }
}

/// Leave word of the daemon that this mount goes by.
pub(crate) fn leave_place(pool: &Pool, place: &DaemonPlace) -> io::Result<()> {
    let runtime_dir = place.runtime_dir.as_os_str().as_bytes();
    let catalogue = pool.catalogue().path();
    let new = catalogue.join(format!("{PLACE}.new"));
    fs::write(&new, runtime_dir)?;
    fs::rename(new, catalogue.join(PLACE))
}

/// A mount by way of another daemon than the last one would not see what that one has.
///
/// Errors   the last one's has bytes of the members that they have not
pub(crate) fn may_go_by(pool: &Pool, next: &DaemonPlace) -> io::Result<()> {
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

/// None: no mount of it ever went by a daemon.
fn place(catalogue: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read(catalogue.join(PLACE)) {
        Ok(bytes) => Ok(Some(PathBuf::from(OsStr::from_bytes(&bytes)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a daemon has that folder, or `rushes recover`: they hold its lock. For words alone: the
/// table does not name locks of another container, and may know the device by another number than
/// stat(2). (To try the lock would keep out a daemon that starts at this moment.)
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

/// Wait until the members' objects have all that was acknowledged, at most so long. A daemon that
/// lives needs some seconds, and one that is being started some more. `say` is called once, when
/// the wait begins to be felt.
///
/// Assumes  nobody has the pool mounted
/// Errors   what is still missing
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

/// The same of a pool whose catalogue is lost, and with it what that said of the daemon: of the one
/// that has its sockets there. Folders that cannot be looked at count for nothing.
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
        // Each time anew: a daemon that ended well takes them with it.
        let facts = FactsView::find(&runtime_dir);
        let count = |facts: FactsView| {
            // Bytes in the kernel's cache alone may be lost, and only a living daemon has a copy of
            // them. It asks the kernel at once about those of sessions that have ended.
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
