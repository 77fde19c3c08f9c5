// SPDX-License-Identifier: Apache-2.0
//! The folder of the sockets, and the lock that keeps two daemons out of one.

use crate::error::ServeError;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Pid;
use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process may hold the lock without its purpose in the file.
const NAME_PATIENCE: Duration = Duration::from_secs(1);
/// Between two attempts to take the folder.
const LOOK: Duration = Duration::from_millis(50);

/// The purpose of a process with the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To serve, once it has started.
    Start,
    /// To serve.
    Serve,
    /// Only to write the data of a former daemon.
    Recover,
}

impl Purpose {
    fn mark(self) -> &'static str {
        match self {
            Purpose::Start => " starts",
            Purpose::Serve => "",
            Purpose::Recover => " recovers",
        }
    }

    fn of_mark(mark: &str) -> Option<Purpose> {
        [Purpose::Start, Purpose::Serve, Purpose::Recover]
            .into_iter()
            .find(|purpose| purpose.mark() == mark)
    }
}

/// The folder, ours as long as this lives.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    path: PathBuf,
    lock: File,
}

impl RuntimeDir {
    /// As [`RuntimeDir::take`], to serve from it: waits for a process that only writes the data of
    /// a former daemon.
    pub(crate) fn take_to_serve(path: &Path) -> Result<RuntimeDir, ServeError> {
        let begun = Instant::now();
        let mut is_told = false;
        loop {
            match RuntimeDir::take(path, Purpose::Start) {
                Err(ServeError::Recovering { pid, .. }) => {
                    if !is_told && begun.elapsed() >= NAME_PATIENCE {
                        tracing::info!(
                            "pid {pid} is writing the data that an earlier daemon left; waiting \
                             for it"
                        );
                        is_told = true;
                    }
                }
                Err(running @ ServeError::Running { .. }) => {
                    let is_waited_for = match RuntimeDir::holder(path) {
                        Some((_, Purpose::Start | Purpose::Serve)) => false,
                        Some((_, Purpose::Recover)) => true,
                        // Its purpose is not in the file yet.
                        None => begun.elapsed() < NAME_PATIENCE,
                    };
                    if !is_waited_for {
                        return Err(running);
                    }
                }
                taken => return taken,
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Make the folder if need be, and take it.
    ///
    /// Errors   Running: another daemon has it; Recovering: a process is writing the data that a
    /// daemon left; RuntimeDir: it cannot be made, or other users could write to it
    pub(crate) fn take(path: &Path, purpose: Purpose) -> Result<RuntimeDir, ServeError> {
        let fail = |source: io::Error| ServeError::RuntimeDir {
            dir: path.to_path_buf(),
            source,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
            .map_err(fail)?;
        let found = std::fs::metadata(path).map_err(fail)?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0 {
            return Err(fail(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "it belongs to user {} with mode {:o}",
                    found.uid(),
                    found.mode() & 0o7777
                ),
            )));
        }
        let lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.join("lock"))
            .map_err(fail)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder = match RuntimeDir::holder(path) {
                Some((pid, Purpose::Start | Purpose::Serve)) => {
                    format!("its lock is held by pid {}", pid.as_raw_nonzero())
                }
                Some((pid, Purpose::Recover)) => {
                    return Err(ServeError::Recovering {
                        dir: path.to_path_buf(),
                        pid: pid.as_raw_nonzero().get(),
                    });
                }
                None => String::from("its lock is held"),
            };
            return Err(ServeError::Running {
                dir: path.to_path_buf(),
                holder,
            });
        }
        let taken = RuntimeDir {
            path: path.to_path_buf(),
            lock,
        };
        taken.say(purpose).map_err(fail)?;
        Ok(taken)
    }

    /// Writes in place: on a full file system, a truncated file may get no room again.
    fn say(&self, purpose: Purpose) -> io::Result<()> {
        let line = format!("{}{}\n", std::process::id(), purpose.mark());
        self.lock.write_all_at(line.as_bytes(), 0)?;
        self.lock.set_len(line.len() as u64)
    }

    /// The daemon has started: from now on it counts as hung if it gives no answer.
    ///
    /// Errors   RuntimeDir: the folder has no room
    pub(crate) fn say_started(&self) -> Result<(), ServeError> {
        self.say(Purpose::Serve)
            .map_err(|source| ServeError::RuntimeDir {
                dir: self.path.clone(),
                source,
            })
    }

    /// True: a process serves from the folder, or recovers.
    pub(crate) fn is_held(path: &Path) -> bool {
        let lock = File::open(path.join("lock"));
        lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
    }

    /// The process that has this folder, or had it last.
    pub(crate) fn holder(path: &Path) -> Option<(Pid, Purpose)> {
        let mut holder = String::new();
        let lock = File::open(path.join("lock")).ok()?;
        lock.take(64).read_to_string(&mut holder).ok()?;
        let holder = holder.strip_suffix('\n')?;
        let (pid, mark) = holder.split_at(holder.find(' ').unwrap_or(holder.len()));
        Some((Pid::from_raw(pid.parse().ok()?)?, Purpose::of_mark(mark)?))
    }

    pub(crate) fn session_socket(&self) -> PathBuf {
        self.path.join("session.sock")
    }

    /// The folder of lanes; it is not removed, since another daemon may need their data.
    pub(crate) fn lanes(&self) -> PathBuf {
        self.path.join("lanes")
    }

    /// The file that names the daemon's configuration, for a process that writes the data left in
    /// this folder: see [`config_of`].
    fn config_name(path: &Path) -> PathBuf {
        path.join("config")
    }

    pub(crate) fn name_config(&self, config: &Path) {
        let name = std::path::absolute(config).unwrap_or_else(|_| config.to_path_buf());
        // In a full folder this fails; then `rushes recover` takes the usual configuration, or the
        // one that its command line names.
        let _ = std::fs::write(
            RuntimeDir::config_name(&self.path),
            name.as_os_str().as_bytes(),
        );
    }

    pub(crate) fn control_socket(&self) -> PathBuf {
        self.path.join("control.sock")
    }

    pub(crate) fn metrics_socket(&self) -> PathBuf {
        self.path.join("metrics.sock")
    }
}

/// The configuration of the daemon that serves from a runtime folder, or did last. None: the folder
/// names none.
pub fn config_of(path: &Path) -> Option<PathBuf> {
    let name = std::fs::read(RuntimeDir::config_name(path)).ok()?;
    let name = PathBuf::from(std::ffi::OsString::from_vec(name));
    name.is_absolute().then_some(name)
}

/// A daemon that runs on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// The folder with its sockets.
    pub dir: PathBuf,
    /// The configuration that it was started with.
    pub config: PathBuf,
}

impl Running {
    /// True: it was started with this configuration, perhaps by another path to it.
    pub fn is_of(&self, config: &Path) -> bool {
        let whole = |path: &Path| {
            let whole = path.canonicalize().or_else(|_| std::path::absolute(path));
            whole.unwrap_or_else(|_| path.to_path_buf())
        };
        whole(&self.config) == whole(config)
    }
}

/// Every daemon of this machine that serves from another folder, by the kernel's table of sockets.
/// A socket without a configuration beside it is no daemon's.
pub fn running_elsewhere(than: &Path) -> Vec<Running> {
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    let here = than.canonicalize().unwrap_or_else(|_| than.to_path_buf());
    let mut found: Vec<Running> = folders_of(&table)
        .filter(|dir| *dir != here && *dir != than && is_trusted(dir) && RuntimeDir::is_held(dir))
        .filter_map(|dir| {
            Some(Running {
                config: config_of(&dir)?,
                dir,
            })
        })
        .collect();
    found.sort_by(|one, other| one.dir.cmp(&other.dir));
    found.dedup();
    found
}

/// True: only root, or our user, can have made the files in this folder. The table names sockets of
/// all users, and a file of another user may be a pipe without a writer.
fn is_trusted(dir: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_own = |of: &std::fs::Metadata| [0, own].contains(&of.uid()) && of.mode() & 0o022 == 0;
    let is_folder = |of: &std::fs::Metadata| of.is_dir() && is_own(of);
    dir.symlink_metadata().is_ok_and(|of| is_folder(&of))
        && ["lock", "config"].iter().all(|name| {
            let of = dir.join(name).symlink_metadata();
            of.is_ok_and(|of| of.is_file() && is_own(&of))
        })
}

/// The folders in which a socket has the name of a daemon's control socket.
fn folders_of(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let start = line.iter().position(|byte| *byte == b'/')?;
        let folder = line[start..].strip_suffix(b"/control.sock")?;
        let folder = PathBuf::from(std::ffi::OsStr::from_bytes(folder));
        folder.is_absolute().then_some(folder)
    })
}

impl Drop for RuntimeDir {
    /// Removes the sockets while the lock is still held, so that they cannot be a successor's.
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.control_socket());
        let _ = std::fs::remove_file(self.metrics_socket());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folders_of_daemons_are_in_the_table_of_sockets() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 17 /run/a b/control.sock\n\
             0000000000000000: 00000002 00000000 00010000 0005 01 18 /run/a b/session.sock\n\
             0000000000000000: 00000003 00000000 00000000 0001 03 19\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 20 @/control.sock/x\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 21 run/control.sock\n\
             0000000000000000: 00000002 00000000 00010000 0001 01 22 /control.sock\n";
        let folders: Vec<PathBuf> = folders_of(table.as_bytes()).collect();
        assert_eq!(folders, [PathBuf::from("/run/a b")]);
    }

    #[test]
    fn a_folder_that_others_may_have_filled_is_not_looked_into() {
        let dir = std::env::temp_dir().join(format!("rushes-trust-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(&dir, 0o755);
        for name in ["lock", "config"] {
            assert!(!is_trusted(&dir), "without {name}");
            std::fs::write(dir.join(name), "").unwrap();
            mode(&dir.join(name), 0o644);
        }
        assert!(is_trusted(&dir));
        for path in [dir.clone(), dir.join("lock")] {
            mode(&path, 0o777);
            assert!(!is_trusted(&dir), "everybody writes to {}", path.display());
            mode(&path, 0o755);
        }
        assert!(is_trusted(&dir));
        // A link to endless bytes, and a pipe without a writer.
        std::fs::remove_file(dir.join("config")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.join("config")).unwrap();
        assert!(!is_trusted(&dir));
        std::fs::remove_file(dir.join("lock")).unwrap();
        let pipe = std::process::Command::new("mkfifo")
            .arg(dir.join("lock"))
            .status();
        assert!(pipe.unwrap().success());
        assert!(!is_trusted(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_folder_belongs_to_one_daemon_and_to_nobody_else() {
        let path = std::env::temp_dir().join(format!("rushes-run-{}", std::process::id()));
        // A program that another test starts holds our lock until it has closed inherited
        // descriptors.
        let free = |purpose| {
            let end = Instant::now() + Duration::from_secs(5);
            loop {
                match RuntimeDir::take(&path, purpose) {
                    Ok(taken) => return taken,
                    Err(error) => assert!(Instant::now() < end, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let first = RuntimeDir::take_to_serve(&path).unwrap();
        let purpose = || RuntimeDir::holder(&path).map(|(_, purpose)| purpose);
        assert_eq!(purpose(), Some(Purpose::Start));
        first.say_started().unwrap();
        assert_eq!(purpose(), Some(Purpose::Serve));
        let second = RuntimeDir::take_to_serve(&path).unwrap_err().to_string();
        assert!(
            second.contains(&format!("pid {}", std::process::id())) && second.contains("stop it"),
            "{second}"
        );
        drop(first);
        drop(free(Purpose::Serve));
        // A daemon waits for a process that only recovers.
        let recovers = free(Purpose::Recover);
        let found =
            RuntimeDir::holder(&path).map(|(pid, purpose)| (pid.as_raw_nonzero().get(), purpose));
        assert_eq!(found, Some((std::process::id() as i32, Purpose::Recover)));
        let waiting = path.clone();
        let thread = std::thread::spawn(move || RuntimeDir::take_to_serve(&waiting).map(drop));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!thread.is_finished());
        drop(recovers);
        thread.join().unwrap().unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        let open = RuntimeDir::take_to_serve(&path).unwrap_err().to_string();
        assert!(open.contains("mode 777"), "{open}");
        std::fs::remove_dir_all(&path).unwrap();
    }
}
