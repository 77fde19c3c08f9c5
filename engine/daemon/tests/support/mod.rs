// SPDX-License-Identifier: Apache-2.0
//! A daemon in this process, in a folder of its own, and helpers to talk to it.
// Each test program uses a part of this.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod ext4;
pub(crate) mod fuse;
pub(crate) mod raw;

use rushes_control::{Answer, Ask, Client as ControlClient, Status};
use rushes_daemon::config::Config;
use rushes_shm::Connect;
use rushes_shm::client::{Client, ConnectError, FileHandle};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A folder of this test's own below `base`, removed at the end.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn below(base: &Path) -> Folder {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("rushes-daemon-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running daemon. Stopped and joined at the end.
pub(crate) struct Daemon {
    pub(crate) folder: Folder,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    /// Serve `share` as "media", with `more` in the configuration (sections and keys of its own).
    pub(crate) fn start(share: &Path, more: &str) -> Daemon {
        let folder = Folder::below(&std::env::temp_dir());
        Daemon::start_in(folder, share, more)
    }

    pub(crate) fn start_in(folder: Folder, share: &Path, more: &str) -> Daemon {
        let file = folder.0.join("rushes.toml");
        std::fs::write(&file, configuration(&folder.0, share, more)).unwrap();
        Daemon::start_written(folder)
    }

    /// Serve by the `rushes.toml` in the folder.
    pub(crate) fn start_written(folder: Folder) -> Daemon {
        let file = folder.0.join("rushes.toml");
        let config = Config::load(&file).unwrap_or_else(|error| panic!("{error}"));
        let thread = std::thread::spawn(move || {
            rushes_daemon::serve(config).unwrap_or_else(|error| panic!("{error}"));
        });
        let daemon = Daemon {
            folder,
            thread: Some(thread),
        };
        daemon.wait_ready();
        daemon
    }

    fn wait_ready(&self) {
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            if let Some(thread) = &self.thread
                && thread.is_finished()
            {
                panic!("the daemon did not start; see above");
            }
            if let Ok(mut client) =
                ControlClient::connect(&self.control_socket(), Duration::from_secs(5))
                && matches!(client.ask(&Ask::Status {}), Ok(Answer::Status(_)))
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the daemon is not ready after 20 s");
    }

    pub(crate) fn config_file(&self) -> PathBuf {
        self.folder.0.join("rushes.toml")
    }

    pub(crate) fn session_socket(&self) -> PathBuf {
        self.folder.0.join("run/session.sock")
    }

    pub(crate) fn control_socket(&self) -> PathBuf {
        self.folder.0.join("run/control.sock")
    }

    pub(crate) fn metrics_socket(&self) -> PathBuf {
        self.folder.0.join("run/metrics.sock")
    }

    pub(crate) fn ask(&self, ask: &Ask) -> Answer {
        ControlClient::connect(&self.control_socket(), Duration::from_secs(10))
            .unwrap()
            .ask(ask)
            .unwrap()
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Ask::Status {}) {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// The first status for which `wanted` is true; panics after some seconds.
    pub(crate) fn status_when(
        &self,
        what: &str,
        mut wanted: impl FnMut(&Status) -> bool,
    ) -> Status {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "never {what}: {status:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Retries as a door does: the daemon may be late on a busy machine.
    pub(crate) fn connect(&self) -> Client {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            match Client::connect(&self.session_socket(), &who("media")) {
                Err(ConnectError::Silent) if Instant::now() < end => {}
                result => return result.unwrap_or_else(|error| panic!("{error:?}")),
            }
        }
    }

    pub(crate) fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let asked = ControlClient::connect(&self.control_socket(), Duration::from_secs(5))
                .and_then(|mut client| client.ask(&Ask::Stop {}));
            let joined = thread.join();
            if !std::thread::panicking() {
                asked.unwrap();
                joined.unwrap();
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The text of a configuration.
pub(crate) fn configuration(folder: &Path, share: &Path, more: &str) -> String {
    let cache = if more.contains("[cache]") {
        ""
    } else {
        "[cache]\nbytes = \"64MiB\"\n"
    };
    format!(
        "{cache}[server]\nruntime_dir = {:?}\nstate_dir = {:?}\n\
         [[share]]\nname = \"media\"\npath = {share:?}\n{more}",
        folder.join("run"),
        folder.join("state"),
    )
}

pub(crate) fn who(share: &str) -> Connect {
    Connect {
        door: rushes_core::format::door::LOCAL,
        share: share.to_string(),
        user: String::from("tester"),
        client: String::from("here"),
        ..Connect::default()
    }
}

/// Bytes that are different at every place and for every seed.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Make a file in a share and open it through the daemon.
pub(crate) fn open(client: &mut Client, share: &Path, name: &str) -> (File, FileHandle) {
    let file = File::open(share.join(name)).unwrap();
    // The socket to a busy daemon may be full for a moment; a door would read plainly then.
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(handle) = client.open(&file, name.as_bytes()) {
            return (file, handle);
        }
        assert!(Instant::now() < end, "{name}: {:?}", client.end());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Read a range whole.
pub(crate) fn read(client: &mut Client, file: FileHandle, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        let at = offset + done as u64;
        let count = match client.read(file, &mut bytes[done..], at) {
            Ok(count) => count,
            Err(error) => panic!("{error:?} at {at}; the session: {:?}", client.end()),
        };
        if count == 0 {
            break;
        }
        done += count;
    }
    bytes.truncate(done);
    bytes
}

/// Whether tests that need root can run; says so when not. Under `make test` they must.
pub(crate) fn is_root(what: &str) -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    assert!(
        std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
        "{what} needs root"
    );
    eprintln!("SKIPPED: {what} needs root");
    false
}
