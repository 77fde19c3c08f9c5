// SPDX-License-Identifier: Apache-2.0
//! Everything between a client's hand and the disk: a disk, a daemon, a private smbd with our
//! module.
//!
//! Fields end in the order in which they stand, so the disk goes last.

use crate::daemon::{Daemon, DaemonSpec};
use crate::disk::{Disk, make_cold, mount_tmpfs, said};
use crate::needs::{Need, all_there, path_of, skip};
use crate::pattern;
use crate::scratch::Scratch;
use crate::smbd::{self, SHARE, Smbd, SmbdSpec};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Which file system is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// ext4 over a loop device.
    Ext4,
    /// The file system that this command makes, small, over a loop device.
    Small(&'static [&'static str]),
    /// ext4 on the lab's slow disk, which fails and stalls when it is told.
    Slow,
    /// XFS on the same.
    SlowXfs,
    /// ext4 on it, with a volatile write cache and its timing on: it can lose its power.
    Volatile,
    /// XFS on a disk of blocks that are larger than our pages.
    LargeBlocks,
    /// No direct I/O.
    Tmpfs,
}

impl Backing {
    /// Whether it does what it is told ([`Disk::tell`]).
    pub fn is_lab_disk(self) -> bool {
        matches!(self, Backing::Slow | Backing::SlowXfs | Backing::Volatile)
    }
}

/// The settings that differ between tests; start from [`Setup::default`].
#[derive(Clone, Debug)]
pub struct Setup {
    /// File system.
    pub backing: Backing,
    /// `vfs objects` of the share.
    pub modules: String,
    /// Further lines of the share.
    pub share: Vec<String>,
    /// Further lines of smb.conf's `[global]`.
    pub global: Vec<String>,
    /// Size of the cache, small so that recycling happens.
    pub cache: String,
    /// The bytes that may be written and not on the disk yet; None: as the environment says.
    pub write_buffer: Option<&'static str>,
    /// Further lines of `[server]` in rushes.toml.
    pub server: String,
    /// Further text of rushes.toml.
    pub more: String,
    /// Whether a daemon runs.
    pub daemon: bool,
    /// A second share, of this name, shows the same folder without our module.
    pub plain_share: Option<&'static str>,
    /// A folder of the share on which a small tmpfs is mounted before anything is started.
    pub tmpfs_on: Option<&'static str>,
    /// The daemon's runtime folder is a tmpfs of its own, of so many bytes.
    pub runtime_bytes: Option<u64>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            backing: Backing::Ext4,
            modules: String::from("rushes"),
            share: Vec::new(),
            global: Vec::new(),
            cache: String::from("64MiB"),
            write_buffer: None,
            server: String::new(),
            more: String::new(),
            daemon: true,
            plain_share: None,
            tmpfs_on: None,
            runtime_bytes: None,
        }
    }
}

/// A server with everything behind it.
#[derive(Debug)]
pub struct World {
    /// The door's host.
    pub smbd: Smbd,
    /// The daemon, unless the test runs without.
    pub daemon: Option<Daemon>,
    /// The disk that is served.
    pub disk: Disk,
    /// Where everything lives.
    pub scratch: Scratch,
}

impl World {
    /// Put it up, or say what is missing and return None.
    pub fn build(setup: &Setup) -> Option<World> {
        let mut needs = vec![
            Need::Root,
            Need::Program("smbd"),
            Need::Program("pdbedit"),
            Need::Program("mkfs.ext4"),
        ];
        if setup.daemon {
            needs.push(Need::Program("rushes"));
        }
        if setup.modules.contains("rushes") {
            needs.push(Need::Module);
        }
        if let Backing::Small(mkfs) = setup.backing {
            needs.push(Need::Program(mkfs[0]));
        }
        if matches!(setup.backing, Backing::LargeBlocks | Backing::SlowXfs) {
            needs.push(Need::Program("mkfs.xfs"));
        }
        if setup.backing.is_lab_disk() {
            needs.push(Need::Program("rushes-lab"));
            needs.push(Need::Program("filefrag"));
        }
        if !all_there(&needs) {
            return None;
        }
        let scratch = Scratch::new();
        let disk = match setup.backing {
            Backing::Ext4 => Disk::ext4(&scratch, 1 << 30),
            Backing::Small(mkfs) => Disk::made(&scratch, mkfs, 320 << 20),
            Backing::Slow => Disk::slow(&scratch, 1 << 30),
            Backing::SlowXfs => Disk::slow_xfs(&scratch, 1 << 30),
            Backing::Volatile => Disk::volatile(&scratch, 512 << 20),
            Backing::LargeBlocks => match Disk::large_blocks(&scratch, 400 << 20) {
                Some(disk) => disk,
                None => {
                    skip("this test needs a kernel that has disks of large blocks (Linux 6.12)");
                    return None;
                }
            },
            Backing::Tmpfs => Disk::tmpfs(&scratch, 256 << 20),
        };
        fs::set_permissions(disk.path(), fs::Permissions::from_mode(0o777)).expect("our own mount");
        if let Some(folder) = setup.tmpfs_on {
            disk.mount_tmpfs(folder, 64 << 20);
        }
        if let Some(bytes) = setup.runtime_bytes {
            // It goes with the scratch folder.
            let run = scratch.folder("run");
            mount_tmpfs(&run, bytes);
            fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).expect("our own mount");
        }
        let daemon = setup.daemon.then(|| {
            Daemon::start(
                &scratch,
                &DaemonSpec {
                    share: disk.path().to_path_buf(),
                    cache: setup.cache.clone(),
                    write_buffer: setup.write_buffer,
                    server: setup.server.clone(),
                    more: setup.more.clone(),
                },
            )
        });
        let mut share = setup.share.clone();
        if !setup.modules.is_empty() {
            share.push(format!("vfs objects = {}", setup.modules));
        }
        share.push(format!(
            "rushes:socket = {}",
            Daemon::session_socket(&scratch).display()
        ));
        if !share
            .iter()
            .any(|line| line.starts_with("rushes:recover ="))
        {
            share.push(format!(
                "rushes:recover = {} recover --config {} --hung-after 2s",
                path_of("rushes").display(),
                scratch.path().join("rushes.toml").display()
            ));
        }
        if let Some(name) = setup.plain_share {
            share.extend([format!("[{name}]"), format!("copy = {SHARE}")]);
            share.push(String::from("vfs objects ="));
        }
        let smbd = smbd::start(
            &scratch,
            &SmbdSpec {
                path: disk.path().to_path_buf(),
                share,
                global: setup.global.clone(),
            },
        );
        Some(World {
            smbd,
            daemon,
            disk,
            scratch,
        })
    }

    /// Wait until a file on the disk has these bytes: what was written through a lane gets there by
    /// and by.
    pub fn wait_for_file(&self, name: &str, bytes: &[u8]) {
        let end = Instant::now() + Duration::from_secs(15);
        loop {
            let found = fs::read(self.path(name)).expect("the file is there");
            if found == bytes {
                return;
            }
            let wrong = found.iter().zip(bytes).position(|(a, b)| a != b);
            assert!(
                Instant::now() < end,
                "{name} has {} bytes, expected {}; the first wrong one is {wrong:?}",
                found.len(),
                bytes.len()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Wait until disks have all that clients were told is written.
    pub fn everything_is_written(&mut self) {
        self.daemon()
            .wait_for("nothing is left to be written", |status| {
                status["write"]["used_bytes"] == 0
            });
    }

    /// The running daemon.
    pub fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("this test runs with a daemon")
    }

    /// `rushes` with these arguments, of this world's configuration.
    pub fn rushes(&self, args: &[&str]) -> Command {
        let mut command = Command::new(path_of("rushes"));
        command
            .args(args)
            .arg("--config")
            .arg(self.scratch.path().join("rushes.toml"))
            .current_dir(self.scratch.path())
            .stdin(Stdio::null());
        command
    }

    /// The number of writes that `rushes recover --list` says are left. Units: writes.
    pub fn left_count(&self) -> u64 {
        let output = self.rushes(&["recover", "--list", "--json"]).output();
        let text = output.expect("rushes was built").stdout;
        let lanes: Vec<serde_json::Value> = serde_json::from_slice(&text).expect("JSON");
        let counts = lanes.iter().map(|lane| lane["write_count"].as_u64());
        counts.flatten().sum()
    }

    /// `rushes recover` writes all that is left.
    pub fn recover_works(&self) {
        let output = self.rushes(&["recover"]).output();
        let output = output.expect("rushes was built");
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(self.left_count(), 0);
    }

    /// `rushes recover`, started by way of a program with its arguments if there is one, says these
    /// words and fails.
    pub fn recover_fails(&self, by_way_of: &[&str], words: &[&str]) {
        let recover = self.rushes(&["recover"]);
        let mut command = Command::new(by_way_of.first().copied().unwrap_or("env"));
        let output = command
            .args(by_way_of.iter().skip(1))
            .arg(recover.get_program())
            .args(recover.get_args())
            .current_dir(self.scratch.path())
            .stdin(Stdio::null())
            .output()
            .expect("coreutils, or what the test has asked for");
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} in {text}");
        }
    }

    /// Path of a file of the share, seen from the server.
    pub fn path(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// Put a file into the share beside every door, cold.
    pub fn put(&self, name: &str, seed: u64, length: usize) {
        self.write(name, seed, length);
        make_cold(&self.path(name));
    }

    /// Put a file into the share beside every door; the kernel may still have it in memory.
    pub fn write(&self, name: &str, seed: u64, length: usize) {
        let path = self.path(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).expect("our own disk");
        }
        fs::write(&path, pattern::bytes(seed, 0, length)).expect("the disk has room");
        // The share's user may write it, too.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("our own disk");
    }

    /// Overwrite part of a file on the server, beside every door.
    pub fn overwrite(&self, name: &str, offset: u64, bytes: &[u8]) {
        OpenOptions::new()
            .write(true)
            .open(self.path(name))
            .and_then(|file| file.write_all_at(bytes, offset))
            .expect("our own disk");
    }
}
