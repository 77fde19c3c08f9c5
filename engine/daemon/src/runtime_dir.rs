// SPDX-License-Identifier: Apache-2.0
//! The folder of the sockets, and the lock that keeps two daemons out of one.

use crate::error::ServeError;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Pid;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process may hold the lock and not have said what for.
const NAME_PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// What somebody does with the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Everything.
    Serve,
    /// Only what a former daemon left.
    Recover,
}

impl Purpose {
    fn mark(self) -> &'static str {
        match self {
            Purpose::Serve => "",
            Purpose::Recover => " recovers",
        }
    }
}

/// The folder, ours as long as this lives.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    path: PathBuf,
    _lock: File,
}

impl RuntimeDir {
    /// As [`RuntimeDir::take`], to serve from it: whoever only writes what a former daemon left is waited for.
    pub(crate) fn take_to_serve(path: &Path) -> Result<RuntimeDir, ServeError> {
        let begun = Instant::now();
        let mut is_told = false;
        loop {
            match RuntimeDir::take(path, Purpose::Serve) {
                Err(ServeError::Recovering { pid, .. }) => {
                    if !is_told && begun.elapsed() >= NAME_PATIENCE {
                        tracing::info!(
                            "pid {pid} is writing what an earlier daemon left; waiting for it"
                        );
                        is_told = true;
                    }
                }
                Err(running @ ServeError::Running { .. }) => {
                    let is_waited_for = match RuntimeDir::holder(path) {
                        Some((_, Purpose::Serve)) => false,
                        Some((_, Purpose::Recover)) => true,
                        // It has not said yet what it is.
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
    /// Errors   Running: another daemon has it; Recovering: what a daemon left is being written; RuntimeDir: it cannot be made, or others could put
    ///          things into it.
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
        let mut lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.join("lock"))
            .map_err(fail)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder = match RuntimeDir::holder(path) {
                Some((pid, Purpose::Serve)) => {
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
        lock.set_len(0)
            .and_then(|()| lock.rewind())
            .and_then(|()| writeln!(lock, "{}{}", std::process::id(), purpose.mark()))
            .map_err(fail)?;
        Ok(RuntimeDir {
            path: path.to_path_buf(),
            _lock: lock,
        })
    }

    /// Somebody serves from it, or recovers.
    pub(crate) fn is_held(path: &Path) -> bool {
        let lock = File::open(path.join("lock"));
        lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
    }

    /// The process whose this folder is, or was last.
    pub(crate) fn holder(path: &Path) -> Option<(Pid, Purpose)> {
        let mut holder = String::new();
        let lock = File::open(path.join("lock")).ok()?;
        lock.take(64).read_to_string(&mut holder).ok()?;
        let (pid, purpose) = match holder.strip_suffix(" recovers\n") {
            Some(pid) => (pid, Purpose::Recover),
            None => (holder.strip_suffix('\n')?, Purpose::Serve),
        };
        Some((Pid::from_raw(pid.parse().ok()?)?, purpose))
    }

    pub(crate) fn session_socket(&self) -> PathBuf {
        self.path.join("session.sock")
    }

    /// Where lanes lie; not removed with the rest, as another daemon may need what is in them.
    pub(crate) fn lanes(&self) -> PathBuf {
        self.path.join("lanes")
    }

    /// Whoever finds this folder without a daemon knows by which configuration what that left is written: see [`config_of`].
    fn config_name(path: &Path) -> PathBuf {
        path.join("config")
    }

    pub(crate) fn name_config(&self, config: &Path) {
        let name = std::path::absolute(config).unwrap_or_else(|_| config.to_path_buf());
        // (A folder without room: then it is the usual one, or the one that is named.)
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

/// The configuration of the daemon that serves from a runtime folder, or did last. None: nobody has said.
pub fn config_of(path: &Path) -> Option<PathBuf> {
    let name = std::fs::read(RuntimeDir::config_name(path)).ok()?;
    let name = PathBuf::from(std::ffi::OsString::from_vec(name));
    name.is_absolute().then_some(name)
}

impl Drop for RuntimeDir {
    /// The sockets go while the lock is still held, so that they cannot be a successor's.
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
    fn a_folder_belongs_to_one_daemon_and_to_nobody_else() {
        let path = std::env::temp_dir().join(format!("rushes-run-{}", std::process::id()));
        // A program that another test starts has our lock until it has closed what it inherited.
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
        let second = RuntimeDir::take_to_serve(&path).unwrap_err().to_string();
        assert!(
            second.contains(&format!("pid {}", std::process::id())) && second.contains("stop it"),
            "{second}"
        );
        drop(first);
        drop(free(Purpose::Serve));
        // Who only recovers is waited for.
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
