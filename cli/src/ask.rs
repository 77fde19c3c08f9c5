// SPDX-License-Identifier: Apache-2.0
//! Asking a running daemon, and what is common to all who do.

use crate::args::DaemonArg;
use rushes_control::{Answer, Ask, Client};
use rushes_daemon::config::{Config, DEFAULT_CONFIG, DEFAULT_RUNTIME_DIR};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A daemon that does not answer in this time is stuck, and the person asking should know.
const PATIENCE: Duration = Duration::from_secs(5);

/// The folder with the daemon's sockets: as told, else as configured, else the default.
///
/// Errors   the configuration that was asked for is not there
pub(crate) fn runtime_dir(daemon: &DaemonArg) -> Result<PathBuf, String> {
    if let Some(dir) = &daemon.runtime_dir {
        return Ok(dir.clone());
    }
    let file = &daemon.config.config;
    match Config::load(file) {
        Ok(config) => Ok(config.runtime_dir),
        // Without a configuration it is where it is by default. (Not so if one was named: another daemon would answer.)
        Err(error) if !file.exists() => match file == Path::new(DEFAULT_CONFIG) {
            true => Ok(PathBuf::from(DEFAULT_RUNTIME_DIR)),
            false => Err(error.to_string()),
        },
        // No obstacle to asking, but the daemon may be elsewhere.
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            eprintln!(
                "rushes: {} is wrong ({first}), so the daemon is looked for in {DEFAULT_RUNTIME_DIR}; \
                 `rushes check` tells more, --runtime-dir names another folder",
                file.display()
            );
            Ok(PathBuf::from(DEFAULT_RUNTIME_DIR))
        }
    }
}

/// Put one question.
pub(crate) fn ask(daemon: &DaemonArg, question: &Ask) -> Result<Answer, String> {
    ask_in(&runtime_dir(daemon)?, question)
}

/// Put one question to the daemon of a folder.
pub(crate) fn ask_in(runtime_dir: &Path, question: &Ask) -> Result<Answer, String> {
    let mut client =
        Client::connect(&runtime_dir.join("control.sock"), PATIENCE).map_err(|e| e.to_string())?;
    match client.ask(question).map_err(|e| e.to_string())? {
        Answer::Error { error } => Err(error),
        answer => Ok(answer),
    }
}

/// An answer of another kind than asked for: daemon and program do not fit.
pub(crate) fn unexpected(answer: &Answer) -> String {
    let kind = match answer {
        Answer::Status(_) => "a status",
        Answer::Admit(_) => "a verdict",
        Answer::Done { .. } => "\"done\"",
        Answer::Error { .. } => "an error",
    };
    format!("the daemon answered {kind} to another question; are both of one version?")
}

/// A value as indented JSON on standard output.
pub(crate) fn print_json<T: serde::Serialize>(value: &T) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value).map_err(|e| format!("cannot say it: {e}"))?;
    say(&format!("{text}\n"))
}

/// Text on standard output. Whoever reads it may stop when he has seen enough (`| head`): then nothing is left
/// to be done, and nothing is wrong.
pub(crate) fn say(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(format!("standard output cannot be written: {error}")),
    }
}
