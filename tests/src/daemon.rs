// SPDX-License-Identifier: Apache-2.0
//! `rushes serve` as a child process, and questions to it over its control socket.

use crate::needs;
use crate::scratch::Scratch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A running daemon; ended when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    config: PathBuf,
    runtime: PathBuf,
    log: PathBuf,
    /// Descriptors that it may have when it is started again. None: as many as this process.
    pub descriptor_limit: Option<u32>,
}

/// The settings that differ between tests.
#[derive(Clone, Debug)]
pub struct DaemonSpec {
    /// Folder of the share.
    pub share: PathBuf,
    /// `cache.bytes`.
    pub cache: String,
    /// `write.buffer_bytes`; None: as the environment says.
    pub write_buffer: Option<&'static str>,
    /// Further lines of its `[server]`.
    pub server: String,
    /// Further text of the configuration, such as rules.
    pub more: String,
}

impl DaemonSpec {
    /// Members of a pool, by their folders: each is a share. With a write buffer.
    pub fn of_members(members: impl IntoIterator<Item = PathBuf>) -> DaemonSpec {
        let mut members = members.into_iter();
        let first = members.next().expect("a pool has a member");
        let others = (1..)
            .zip(members)
            .map(|(number, path)| format!("[[share]]\nname = \"m{number}\"\npath = {path:?}\n"));
        DaemonSpec {
            share: first,
            cache: String::from("64MiB"),
            write_buffer: Some("64MiB"),
            server: String::new(),
            more: others.collect(),
        }
    }
}

impl Daemon {
    /// Until the mount of a pool has a session for each of so many members.
    pub fn wait_for_members(&self, count: usize) {
        self.wait_for("a session for each member", |status| {
            let sessions = status["sessions"].as_array();
            sessions.is_some_and(|all| all.len() == count)
        });
    }

    /// Start it and wait until it answers questions.
    pub fn start(scratch: &Scratch, spec: &DaemonSpec) -> Daemon {
        let runtime = scratch.folder("run");
        let state = scratch.folder("state");
        let config = scratch.path().join("rushes.toml");
        // Every test of the doors must hold either way.
        let bytes = spec
            .write_buffer
            .map(String::from)
            .or_else(|| std::env::var("RUSHES_TEST_WRITE_BUFFER").ok());
        let write = bytes.map_or(String::new(), |bytes| {
            format!("[write]\nbuffer_bytes = {bytes:?}\n")
        });
        let text = format!(
            "[cache]\nbytes = \"{}\"\n{}[server]\nruntime_dir = {:?}\nstate_dir = {:?}\n{}\n\
             [[share]]\nname = \"{}\"\npath = {:?}\n{}\n",
            spec.cache,
            write,
            runtime,
            state,
            spec.server,
            crate::smbd::SHARE,
            spec.share,
            spec.more
        );
        fs::write(&config, text).expect("scratch is writable");
        let mut daemon = Daemon {
            child: spawn(scratch.path(), &config, None),
            config,
            runtime,
            log: scratch.path().join("daemon.log"),
            descriptor_limit: None,
        };
        daemon.wait_until_ready();
        daemon
    }

    /// Where doors connect.
    pub fn session_socket(runtime_of: &Scratch) -> PathBuf {
        runtime_of.folder("run").join("session.sock")
    }

    /// Kill it (SIGKILL), as the kernel would, and wait until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child");
    }

    /// End it (SIGTERM), as its service manager would, and wait until it is gone.
    pub fn end(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.child.wait().expect("it is our child")
    }

    /// Stop it (SIGSTOP): it is there and does nothing.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Let it go on after [`Daemon::stop`].
    pub fn go_on(&mut self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it is our child");
    }

    /// Start it again with the same configuration, after [`Daemon::kill`].
    pub fn start_again(&mut self) {
        let folder = self.log.parent().expect("the log is in the scratch folder");
        self.child = spawn(folder, &self.config, self.descriptor_limit);
        self.wait_until_ready();
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its output.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until its log has these words.
    ///
    /// Panics   when it does not within 20 s
    pub fn wait_for_log(&self, words: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.log().contains(words) {
            assert!(Instant::now() < end, "{words}: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether it is still there.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// `{"ask":"status"}`.
    pub fn status(&self) -> Value {
        self.ask("{\"ask\":\"status\"}")
            .unwrap_or_else(|error| panic!("status: {error}\n{}", self.log()))
    }

    /// A question, as docs/reference/control.md has it.
    pub fn ask(&self, question: &str) -> Result<Value, String> {
        let said = |error: std::io::Error| error.to_string();
        let mut stream = UnixStream::connect(self.runtime.join("control.sock")).map_err(said)?;
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .map_err(said)?;
        writeln!(stream, "{question}").map_err(said)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).map_err(said)?;
        serde_json::from_str(&line).map_err(|error| format!("{error} in {line:?}"))
    }

    /// Ask for status until `what` holds of it.
    ///
    /// Panics   when it does not within 10 s
    pub fn wait_for(&self, sentence: &str, mut what: impl FnMut(&Value) -> bool) -> Value {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let status = self.status();
            if what(&status) {
                return status;
            }
            assert!(
                Instant::now() < end,
                "not within 10 s: {sentence}; the last status was {status:#}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait_until_ready(&mut self) {
        // Longer than it waits for a program that writes what a former daemon left, which answers
        // such questions, too.
        let end = Instant::now() + Duration::from_secs(60);
        let pid = u64::from(self.pid());
        let is_its = |status: Value| status["daemon"]["pid"].as_u64() == Some(pid);
        while !self.ask("{\"ask\":\"status\"}").is_ok_and(is_its) {
            let ended = self.child.try_wait().expect("it is our child");
            assert!(
                ended.is_none(),
                "rushes serve ended ({ended:?}):\n{}",
                self.log()
            );
            assert!(
                Instant::now() < end,
                "rushes serve did not answer within a minute:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(folder: &Path, config: &Path, descriptor_limit: Option<u32>) -> Child {
    let log = File::options()
        .append(true)
        .create(true)
        .open(folder.join("daemon.log"))
        .expect("scratch is writable");
    limited(needs::path_of("rushes"), descriptor_limit)
        .arg("serve")
        .arg("--config")
        .arg(config)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a descriptor can be duplicated"))
        .stderr(log)
        .spawn()
        .expect("rushes was built")
}

/// A program that may have so many descriptors, if that is said.
pub(crate) fn limited(program: PathBuf, descriptor_limit: Option<u32>) -> Command {
    let Some(limit) = descriptor_limit else {
        return Command::new(program);
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -n {limit} && exec \"$0\" \"$@\"")]);
    shell.arg(program);
    shell
}
