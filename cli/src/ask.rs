// SPDX-License-Identifier: Apache-2.0
//! Asks a running daemon; shared by all commands that do so.

use crate::args::DaemonArg;
use rushes_control::{Answer, Ask, Client, ControlError};
use rushes_daemon::config::{Config, DEFAULT_CONFIG, DEFAULT_RUNTIME_DIR};
use rushes_daemon::{Running, running_elsewhere};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A daemon that does not answer in this time is stuck, and the user should learn that.
const PATIENCE: Duration = Duration::from_secs(5);

/// The folder with the daemon's sockets: by the option, else by the configuration, else the
/// default.
///
/// Errors   the configuration that the user named does not exist
pub(crate) fn runtime_dir(daemon: &DaemonArg) -> Result<PathBuf, String> {
    if let Some(dir) = &daemon.runtime_dir {
        return Ok(dir.clone());
    }
    let file = &daemon.config.config;
    match Config::load(file) {
        Ok(config) => Ok(config.runtime_dir),
        // Without a configuration it is the default. Not so if the user named one: another daemon
        // would answer.
        Err(error) if !file.exists() => match file == Path::new(DEFAULT_CONFIG) {
            true => Ok(PathBuf::from(DEFAULT_RUNTIME_DIR)),
            false => Err(error.to_string()),
        },
        // The question can still be asked, but the daemon may have another folder.
        Err(error) => {
            let (dir, whose) = match Config::runtime_dir_of(file) {
                Some(dir) => (dir, "which it names"),
                None => (PathBuf::from(DEFAULT_RUNTIME_DIR), "the default"),
            };
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            eprintln!(
                "rushes: {} is invalid ({first}). This command looks for the daemon in {}, \
                 {whose}; `rushes check` says more, --runtime-dir names another folder",
                file.display(),
                dir.display()
            );
            Ok(dir)
        }
    }
}

/// Sends one question.
pub(crate) fn ask(daemon: &DaemonArg, question: &Ask) -> Result<Answer, String> {
    ask_in(daemon, &runtime_dir(daemon)?, question)
}

/// Sends one question to the daemon of a folder, which is the one that these arguments name.
pub(crate) fn ask_in(
    daemon: &DaemonArg,
    runtime_dir: &Path,
    question: &Ask,
) -> Result<Answer, String> {
    let connected = Client::connect(&runtime_dir.join("control.sock"), PATIENCE);
    let mut client = connected.map_err(|error| {
        let is_configured = daemon.runtime_dir.is_none();
        match is_configured && has_nobody(&error) {
            true => {
                let others = running_elsewhere(runtime_dir);
                let file = &daemon.config.config;
                let is_read = Config::runtime_dir_of(file).is_some();
                let folders = other_folders(file, is_read, runtime_dir, &others);
                format!("{error}. {folders}")
            }
            false => error.to_string(),
        }
    })?;
    match client.ask(question).map_err(|e| e.to_string())? {
        Answer::Error { error } => Err(error),
        answer => Ok(answer),
    }
}

/// Whether the folder has no daemon.
fn has_nobody(error: &ControlError) -> bool {
    let ControlError::Connect { source, .. } = error else {
        return false;
    };
    matches!(
        source.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused
    )
}

/// A message names so many daemons.
const NAMED_MAX: usize = 3;

/// Why the daemon may have another folder than its configuration says, and the daemons that run in
/// other folders.
///
/// `is_read`   the folder is that of the configuration, and not the default
fn other_folders(file: &Path, is_read: bool, runtime_dir: &Path, others: &[Running]) -> String {
    let whose = match is_read {
        true => format!("the runtime_dir of {}", file.display()),
        false => String::from("the default"),
    };
    let rule = format!(
        "This command looked for it in {}, {whose}; a daemon that was started before runtime_dir \
         was changed keeps its former folder until it is restarted",
        runtime_dir.display(),
    );
    // A daemon of this configuration is the right one.
    let meant = others.iter().find(|other| other.is_of(file));
    if let Some(meant) = meant {
        return format!(
            "{rule}. The daemon of this configuration is in {0}: --runtime-dir {0}",
            meant.dir.display()
        );
    }
    let named: Vec<String> = others
        .iter()
        .take(NAMED_MAX)
        .map(|other| format!("{} ({})", other.dir.display(), other.config.display()))
        .collect();
    let more = if others.len() > NAMED_MAX {
        ", …"
    } else {
        ""
    };
    match named.is_empty() {
        true => rule,
        false => format!(
            "{rule}. Daemons of other configurations run in {}{more}",
            named.join(", ")
        ),
    }
}

/// An answer of the wrong kind: daemon and program do not fit.
pub(crate) fn unexpected(answer: &Answer) -> String {
    let kind = match answer {
        Answer::Status(_) => "a status",
        Answer::Admit(_) => "a verdict",
        Answer::Done { .. } => "\"done\"",
        Answer::Error { .. } => "an error",
    };
    format!(
        "the daemon answered {kind} to another question; install program and daemon of one release"
    )
}

/// A value as indented JSON on standard output.
pub(crate) fn print_json<T: serde::Serialize>(value: &T) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| format!("the answer cannot be printed as JSON: {e}"))?;
    say(&format!("{text}\n"))
}

/// Text on standard output. Its reader may stop when it has seen enough, as in `| head`: that is no
/// error, and no work is left.
pub(crate) fn say(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(format!("standard output cannot be written: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_daemon_that_has_another_is_named_where_it_is_known() {
        let said = |others: &[(&str, &str)]| {
            let running = |(dir, config): &(&str, &str)| Running {
                dir: PathBuf::from(dir),
                config: PathBuf::from(config),
            };
            let others: Vec<Running> = others.iter().map(running).collect();
            other_folders(
                Path::new("/etc/r.toml"),
                true,
                Path::new("/run/new"),
                &others,
            )
        };
        let rule = "This command looked for it in /run/new, the runtime_dir of /etc/r.toml; a daemon that was started before";
        assert!(said(&[]).starts_with(rule));
        assert!(said(&[]).ends_with("until it is restarted"));
        let meant = said(&[("/run/a", "/etc/a.toml"), ("/run/old", "/etc/r.toml")]);
        assert!(
            meant.ends_with("is in /run/old: --runtime-dir /run/old"),
            "{meant}"
        );
        let others = said(&[("/run/a", "/etc/a.toml"); 4]);
        assert!(
            others.contains("Daemons of other configurations run in /run/a (/etc/a.toml), "),
            "{others}"
        );
        assert!(others.ends_with(", …"), "{others}");
    }
}
