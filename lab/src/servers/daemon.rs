// SPDX-License-Identifier: Apache-2.0
//! A private `rushes serve`: configuration, folders and sockets of its own, controlled from outside
//! as a user would.
//!
//! The lab links nothing of the daemon. It runs `rushes status --json` and reads field names that
//! docs/reference promises.

use crate::servers::cgroup::Cgroup;
use crate::servers::server::{Spec, ancestors_of_binary};
use crate::servers::smbd::SHARE;
use crate::stage::ground::Layout;
use crate::stage::room::{Room, go_on};
use crate::stage::{Stage, run};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Type of a tmpfs in statfs(2).
pub(crate) const TMPFS_MAGIC: u64 = 0x0102_1994;
const READY_MAX: Duration = Duration::from_secs(30);

/// A running daemon; ended when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    binary: PathBuf,
    config: PathBuf,
    config_text: String,
    runtime: PathBuf,
    log: PathBuf,
    model: Value,
}

/// The folder of the sockets of the daemon called `name`.
pub fn runtime_folder(room: &Room, name: &str) -> PathBuf {
    room.path().join(format!("{name}-run"))
}

/// The command that recovers the lanes of the daemon called `name` if it dies.
pub fn recover_command(room: &Room, name: &str) -> String {
    let config = config_file(room, name);
    format!("rushes recover --config {}", config.display())
}

fn config_file(room: &Room, name: &str) -> PathBuf {
    room.path().join(format!("{name}.toml"))
}

impl Daemon {
    /// Configure, calibrate unless a model is given, start, and wait until it answers.
    ///
    /// Errors   `rushes` is not built, refuses its configuration, or did not come up within 30 s
    pub fn start(
        room: &Room,
        name: &str,
        stage: &Stage,
        spec: &Spec,
        cgroup: &Cgroup,
    ) -> Result<Daemon> {
        let binary = find_rushes()?;
        let runtime = runtime_folder(room, name);
        // The calibration belongs to the stage, not to one run on it. All other state of a daemon
        // belongs to its run: the next daemon begins like the first.
        let measured = room.folder("state")?;
        let state = room.path().join(format!("{name}-state"));
        if state.exists() {
            fs::remove_dir_all(&state)?;
        }
        copy_files(&measured, &state)?;
        fs::create_dir_all(&runtime)?;
        in_memory(&runtime)?;
        let config_text = configuration(stage, spec, &runtime, &state)?;
        let config = config_file(room, name);
        fs::write(&config, &config_text)?;
        let model = calibrate(&binary, &config, stage, spec, &state)?;
        copy_files(&state, &measured)?;
        let mut daemon = Daemon::start_with(room, name, &config_text, cgroup)?;
        daemon.model = model;
        Ok(daemon)
    }

    /// Start with this configuration, whose runtime folder is [`runtime_folder`], without
    /// calibration.
    ///
    /// Errors   those of [`Daemon::start`]
    pub fn start_with(
        room: &Room,
        name: &str,
        config_text: &str,
        cgroup: &Cgroup,
    ) -> Result<Daemon> {
        let binary = find_rushes()?;
        let runtime = runtime_folder(room, name);
        fs::create_dir_all(&runtime)?;
        in_memory(&runtime)?;
        let config = config_file(room, name);
        fs::write(&config, config_text)?;
        let log = room.path().join(format!("{name}-serve.log"));
        let child = cgroup
            .command(&binary)
            .args(["serve", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{} cannot be started", binary.display()))?;
        let mut daemon = Daemon {
            child,
            binary,
            config,
            config_text: config_text.to_owned(),
            runtime,
            log,
            model: Value::Null,
        };
        daemon.wait_until_ready()?;
        Ok(daemon)
    }

    /// Its `rushes.toml`.
    pub fn config_text(&self) -> &str {
        &self.config_text
    }

    /// Its device models, as they stand in its state folder.
    pub fn model(&self) -> &Value {
        &self.model
    }

    /// Its status.
    pub fn status(&self) -> Result<Value> {
        let out = Command::new(&self.binary)
            .args(["status", "--json", "--config"])
            .arg(&self.config)
            .output()?;
        ensure!(
            out.status.success(),
            "rushes status failed: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        serde_json::from_slice(&out.stdout).context("rushes status printed no JSON")
    }

    /// Wait until so many doors of a pool's mount have a session; `said` returns the mount's log
    /// for an error.
    pub fn wait_for_doors(&self, count: u64, said: &dyn Fn() -> String) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        loop {
            go_on()?;
            let status = self.status()?;
            let sessions = status["sessions"].as_array().map_or(0, Vec::len) as u64;
            if sessions >= count {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "{sessions} of {count} members have a session with rushes serve after {READY_MAX:?}:\n{}\n{}",
                said(),
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let socket = self.runtime.join("control.sock");
        // The daemon makes it last: from then on it accepts sessions.
        let doors = self.runtime.join("session.sock");
        let end = Instant::now() + READY_MAX;
        loop {
            go_on()?;
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "rushes serve ended at once ({status}):\n{}",
                    self.log_tail()
                );
            }
            if doors.exists() && UnixStream::connect(&socket).is_ok() {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "rushes serve did not answer on {} within {READY_MAX:?}:\n{}",
                socket.display(),
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Daemon {
    /// End it, and wait until it has written its write buffer.
    ///
    /// Errors   it did not end by itself, or not with 0
    pub fn stop(mut self) -> Result<()> {
        self.end();
        let status = self.child.wait()?;
        ensure!(
            status.success(),
            "rushes serve was told to stop and ended with {status}; expected it to write all data \
             and to end with 0. Its log ends:\n{}",
            self.log_tail()
        );
        Ok(())
    }

    fn end(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32);
        let (Some(pid), Ok(None)) = (pid, self.child.try_wait()) else {
            // Its number may be another process's by now.
            return;
        };
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                eprintln!("rushes serve did not stop within 10 s and is killed:");
                eprintln!("{}", self.log_tail());
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// Mount a tmpfs unless the folder is in one, as `/run` is: lanes lie there, and on a disk the
/// kernel would write them back. The room unmounts it.
fn in_memory(folder: &Path) -> Result<()> {
    if rustix::fs::statfs(folder)?.f_type as u64 == TMPFS_MAGIC {
        return Ok(());
    }
    run(Command::new("mount")
        .args(["-t", "tmpfs", "-o", "mode=0755", "tmpfs"])
        .arg(folder))?;
    Ok(())
}

/// Copies the files of a folder into another, which it makes.
fn copy_files(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("{} cannot be made", to.display()))?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))
                .with_context(|| format!("{} cannot be copied", entry.path().display()))?;
        }
    }
    Ok(())
}

fn configuration(stage: &Stage, spec: &Spec, runtime: &Path, state: &Path) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "[cache]\nbytes = {}\n", spec.cache_bytes)?;
    writeln!(text, "[server]")?;
    writeln!(text, "runtime_dir = \"{}\"", runtime.display())?;
    writeln!(text, "state_dir = \"{}\"", state.display())?;
    // The daemon refuses a preroll below 100 ms; a player that waits less gets the contract of one
    // that waits 100 ms.
    let preroll_ms = spec.preroll.as_millis().max(100);
    writeln!(text, "preroll = \"{preroll_ms}ms\"")?;
    writeln!(text, "analyser = {}", spec.analyser)?;
    // The lab itself warms names and extents, or leaves them cold, for all servers alike.
    writeln!(text, "warm_metadata = false")?;
    for (key, value) in &spec.rushes_options {
        writeln!(text, "{key} = {value}")?;
    }
    if spec.write_buffer_bytes > 0 {
        writeln!(
            text,
            "\n[write]\nbuffer_bytes = {}",
            spec.write_buffer_bytes
        )?;
        for (key, value) in &spec.write_options {
            writeln!(text, "{key} = {value}")?;
        }
    }
    for (name, path) in shares(stage) {
        writeln!(
            text,
            "\n[[share]]\nname = \"{name}\"\npath = \"{}\"",
            path.display()
        )?;
        for (key, value) in &spec.share_options {
            writeln!(text, "{key} = {value}")?;
        }
    }
    // A part of a striped frame has a rate, if a rule gives one, but is not a frame.
    let frames = spec
        .frames_per_kilosecond
        .filter(|_| stage.layout() != Layout::PoolStriped);
    if let Some(frames) = frames {
        writeln!(
            text,
            "\n[[rule]]\nmatch = \"footage/**\"\nframes_per_second = {}",
            frames as f64 / 1000.0
        )?;
    } else if let Some(bitrate) = spec.bitrate {
        writeln!(
            text,
            "\n[[rule]]\nmatch = \"footage/**\"\nbitrate = \"{bitrate}\""
        )?;
    }
    Ok(text)
}

/// The shares: the stage, or each member of the pool on it.
fn shares(stage: &Stage) -> Vec<(String, PathBuf)> {
    match stage.array() {
        Some(array) if stage.is_pool() => (0..)
            .zip(array.branches())
            .map(|(number, branch): (u64, _)| (format!("member{number}"), branch))
            .collect(),
        _ => vec![(SHARE.to_owned(), stage.root().to_owned())],
    }
}

/// Let the daemon's own tool measure the devices, all at once, once for a stage; returns the models
/// that it wrote.
fn calibrate(
    binary: &Path,
    config: &Path,
    stage: &Stage,
    spec: &Spec,
    state: &Path,
) -> Result<Value> {
    if let Some(model) = &spec.model
        && fs::read_dir(state)?.next().is_none()
    {
        let name = model.file_name().context("--model names no file")?;
        fs::copy(model, state.join(name))
            .with_context(|| format!("the model {} cannot be read", model.display()))?;
    }
    if fs::read_dir(state)?.next().is_none() {
        stage.timing(true)?;
        std::thread::scope(|scope| {
            let measuring: Vec<_> = shares(stage)
                .into_iter()
                .map(|(_, path)| {
                    scope.spawn(move || {
                        run(Command::new(binary)
                            .args(["calibrate", "--quick", "--save", "--config"])
                            .arg(config)
                            .arg(path))
                    })
                })
                .collect();
            measuring.into_iter().try_for_each(|one| {
                one.join()
                    .map_err(|_| anyhow!("a thread that measured a disk panicked"))?
            })
        })?;
        stage.timing(false)?;
    }
    let mut models = serde_json::Map::new();
    for entry in fs::read_dir(state)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        models.insert(
            name,
            serde_json::from_str(&text).unwrap_or(Value::from(text)),
        );
    }
    Ok(Value::Object(models))
}

/// The `rushes` beside this program, as in an installation; else one that was built or installed.
pub fn find_rushes() -> Result<PathBuf> {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|path| Some(path.parent()?.join("rushes")));
    // The build folder may have any path; a test's program is in it.
    let program = std::env::current_exe().unwrap_or_default();
    let same: Vec<PathBuf> = program
        .ancestors()
        .map(|folder| folder.join("release/rushes"))
        .collect();
    let built = ancestors_of_binary().map(|folder| folder.join("target/release/rushes"));
    beside
        .into_iter()
        .chain(same)
        .chain(built)
        .chain([PathBuf::from("/usr/bin/rushes")])
        .find(|path| path.exists())
        .context(
            "the program `rushes` was not found beside rushes-lab; build it first (make build)",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_comes_along_and_nothing_else() {
        let room = Room::create().unwrap();
        let (measured, state) = (room.path().join("measured"), room.path().join("state"));
        fs::create_dir_all(measured.join("folder")).unwrap();
        fs::write(measured.join("model.json"), "{}").unwrap();
        copy_files(&measured, &state).unwrap();
        let names: Vec<_> = fs::read_dir(&state).unwrap().flatten().collect();
        assert_eq!(names.len(), 1);
        assert_eq!(fs::read_to_string(state.join("model.json")).unwrap(), "{}");
    }
}
