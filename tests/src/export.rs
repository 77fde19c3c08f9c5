// SPDX-License-Identifier: Apache-2.0
//! `rushes pool export` of a test's pool, with the distribution's servers behind it, on ports of
//! its own.

use crate::disk::run;
use crate::needs;
use crate::pool::PoolWorld;
use rushes_kit::free_port;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// The needs of an NFS test.
pub const NFS: &[needs::Need<'static>] = &[
    needs::Need::Program("ganesha.nfsd"),
    needs::Need::Program("nfs-ls"),
];

/// The needs of an iSCSI test.
pub const ISCSI: &[needs::Need<'static>] = &[
    needs::Need::Program("tgtd"),
    needs::Need::Program("iscsi-ls"),
    needs::Need::Program("iscsi-test-cu"),
    needs::Need::Program("qemu-io"),
];

/// Between a restart and the end of what clients may claim. Units: seconds.
pub const GRACE_S: u64 = 4;

/// A served export.
#[derive(Debug)]
pub struct Export {
    child: Child,
    output: BufReader<ChildStdout>,
    log: PathBuf,
    /// On 127.0.0.1.
    pub port: u16,
}

/// `rushes pool export WORDS`, to its end.
pub fn export(world: &PoolWorld, words: &[&str]) -> Output {
    Command::new(needs::path_of("rushes"))
        .args(["pool", "export"])
        .args(words)
        .current_dir(world.scratch.path())
        .output()
        .expect("rushes starts")
}

impl Export {
    /// The whole mount by NFS, as `/media`, for root of this machine.
    pub fn nfs(world: &PoolWorld) -> Export {
        Export::nfs_with(world, &[])
    }

    /// The same with further options.
    pub fn nfs_with(world: &PoolWorld, more: &[&str]) -> Export {
        let folder = world.path("").display().to_string();
        let (runtime, state) = (
            world.scratch.folder("nfs"),
            world.scratch.folder("nfs-state"),
        );
        let grace = GRACE_S.to_string();
        let (runtime, state) = (runtime.display().to_string(), state.display().to_string());
        let mut words = vec!["nfs", &folder, "--name", "/media"];
        if !more.contains(&"--squash") {
            words.extend(["--squash", "none"]);
        }
        if !more.contains(&"--grace") {
            words.extend(["--grace", &grace]);
        }
        words.extend(["--runtime-dir", &runtime, "--state-dir", &state]);
        words.extend(more);
        Export::start(world, "nfs.log", &words)
    }

    /// A file as a disk.
    pub fn iscsi(world: &PoolWorld, file: &str, more: &[&str]) -> Export {
        let runtime = world
            .scratch
            .folder(&format!("i-{file}"))
            .display()
            .to_string();
        let path = world.path(file).display().to_string();
        let mut words = vec!["iscsi", &path, "--runtime-dir", &runtime];
        if !more.contains(&"--client") && !more.contains(&"--initiator") {
            words.extend(["--client", "127.0.0.1"]);
        }
        words.extend(more);
        Export::start(world, &format!("{file}.log"), &words)
    }

    fn start(world: &PoolWorld, log: &str, words: &[&str]) -> Export {
        let log = world.scratch.path().join(log);
        for _ in 0..3 {
            // A program that takes it meanwhile makes a start fail, which is then tried again.
            let port = free_port().expect("loopback has a free port");
            let to = File::options()
                .create(true)
                .append(true)
                .open(&log)
                .expect("the scratch folder is writable");
            let mut child = Command::new(needs::path_of("rushes"))
                .args(["pool", "export"])
                .args(words)
                .args(["--port", &port.to_string(), "--json"])
                .current_dir(world.scratch.path())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(to)
                .spawn()
                .expect("rushes starts");
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            let mut export = Export {
                child,
                output,
                log: log.clone(),
                port,
            };
            if export.says("serving") {
                return export;
            }
        }
        panic!(
            "it does not serve: {}",
            fs::read_to_string(log).unwrap_or_default()
        );
    }

    /// Waits for its next line, which says this of its state. False: it said another, or ended.
    pub fn says(&mut self, state: &str) -> bool {
        let mut line = String::new();
        let read = self.output.read_line(&mut line);
        read.is_ok() && line.contains(&format!("\"state\":\"{state}\""))
    }

    /// The log of it and its server.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The process of the server that it started.
    pub fn server(&self) -> u32 {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let text = fs::read_to_string(path).unwrap_or_default();
        let first = text.split(' ').next().and_then(|pid| pid.parse().ok());
        first.expect("it has a server")
    }

    /// SIGTERM, after which it ends well and its server with it.
    pub fn end(mut self) {
        let server = self.server();
        run(Command::new("kill").arg(self.child.id().to_string()));
        let status = self.child.wait().expect("it is ours");
        assert!(status.success(), "{status}: {}", self.log());
        assert!(
            !PathBuf::from(format!("/proc/{server}")).exists(),
            "its server is left"
        );
    }

    /// SIGKILL to it; its server gets to know by the kernel.
    pub fn kill(&mut self) -> Option<std::process::ExitStatus> {
        let _ = self.child.kill();
        self.child.wait().ok()
    }

    /// Waits until it ended by itself.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().expect("it is ours")
    }

    /// `nfs://127.0.0.1/media/NAME…` for the tools of libnfs.
    pub fn url(&self, name: &str) -> String {
        format!(
            "nfs://127.0.0.1/media{name}?version=4&nfsport={}",
            self.port
        )
    }

    /// Of the disk of this file, for the tools of libiscsi.
    pub fn disk(&self, file: &str) -> String {
        format!(
            "iscsi://127.0.0.1:{}/iqn.2026-01.local.rushes:{file}/1",
            self.port
        )
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Its server has the mount open, and must be gone before that goes.
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let servers = fs::read_to_string(path).unwrap_or_default();
        let _ = self.kill();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        for server in servers.split_whitespace() {
            while PathBuf::from(format!("/proc/{server}")).exists() {
                if std::time::Instant::now() > end {
                    let _ = Command::new("kill").args(["-KILL", server]).status();
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
    }
}
