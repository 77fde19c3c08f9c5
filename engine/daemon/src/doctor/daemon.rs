// SPDX-License-Identifier: Apache-2.0
//! The daemon itself: whether it runs, its version, and the troubles that it reports.

use super::{Finding, Level, counted};
use crate::calibrate::{Calibration, identity_of};
use crate::config::Config;
use crate::config::amount::show_size;
use crate::error::is_root;
use crate::lanes_left::list;
use crate::runtime_dir::{Purpose, RuntimeDir, running_elsewhere};
use rushes_control::{Answer, Ask, Client, ControlError, Status};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

const AREA: &str = "daemon";
/// The room that a server's folder has to have left.
const RUNTIME_BYTES_MIN: u64 = 16 << 20;
const RUNTIME_INODES_MIN: u64 = 256;

pub(super) fn examine(config: &Config, findings: &mut Vec<Finding>) {
    folder(config, findings);
    room(config, findings);
    let socket = config.runtime_dir.join("control.sock");
    let answer = Client::connect(&socket, Duration::from_secs(5))
        .and_then(|mut client| client.ask(&Ask::Status {}));
    match answer {
        Ok(Answer::Status(status)) => running(config, &status, findings),
        Ok(_) => findings.push(Finding::of(
            Level::Error,
            AREA,
            "the daemon answered another question than this program asked",
            "install program and daemon of one release and restart the daemon",
        )),
        Err(error) if is_not_allowed(&error) => findings.push(Finding::of(
            Level::Note,
            AREA,
            format!("a daemon runs, but this user may not ask it: {error}"),
            "run `sudo rushes check`; server.control_group names a group whose users may ask as well",
        )),
        Err(error) if RuntimeDir::is_held(&config.runtime_dir) => {
            let (level, finding, remedy) = match RuntimeDir::holder(&config.runtime_dir) {
                Some((pid, Purpose::Recover)) => (
                    Level::Note,
                    format!(
                        "`rushes recover` (pid {}) is writing the data that an earlier daemon left",
                        pid.as_raw_nonzero()
                    ),
                    "wait until it ends, then systemctl start rushes",
                ),
                Some((pid, Purpose::Start)) => (
                    Level::Note,
                    format!(
                        "the daemon (pid {}) is starting and does not answer yet: {error}",
                        pid.as_raw_nonzero()
                    ),
                    "check again in a minute; its log says what it waits for: journalctl -u rushes",
                ),
                holder => {
                    let who = match holder {
                        Some((pid, _)) => format!("pid {}", pid.as_raw_nonzero()),
                        None => String::from("its lock is held"),
                    };
                    (
                        Level::Error,
                        format!("a daemon runs ({who}) but does not answer: {error}"),
                        "ask again as root; if it still does not answer: systemctl restart rushes \
                         (the next daemon takes over its data)",
                    )
                }
            };
            findings.push(Finding::of(level, AREA, finding, remedy));
        }
        Err(_) => {
            findings.push(not_running(config));
            left_behind(config, findings);
        }
    }
}

/// No daemon serves from the configured folder.
fn not_running(config: &Config) -> Finding {
    let file = std::path::absolute(&config.file).unwrap_or_else(|_| config.file.clone());
    let others = running_elsewhere(&config.runtime_dir);
    match others.iter().find(|other| other.is_of(&file)) {
        Some(other) => Finding::of(
            Level::Warning,
            AREA,
            format!(
                "the daemon of {} was started with another runtime_dir and runs in {}; the \
                 configuration now says {}",
                file.display(),
                other.dir.display(),
                config.runtime_dir.display()
            ),
            "systemctl restart rushes, or set runtime_dir back. Every rushes:socket in smb.conf \
             has to name the same folder",
        ),
        None => Finding::of(
            Level::Note,
            AREA,
            "the daemon is not running: clients do plain I/O",
            "systemctl enable --now rushes",
        ),
    }
}

fn is_not_allowed(error: &ControlError) -> bool {
    match error {
        ControlError::Connect { source, .. } | ControlError::Talk { source, .. } => {
            source.kind() == ErrorKind::PermissionDenied
        }
        ControlError::Answer { .. } => false,
    }
}

/// Acknowledged writes that a dead daemon left in lanes.
fn left_behind(config: &Config, findings: &mut Vec<Finding>) {
    let (finding, remedy) = match list(config) {
        Ok(lanes) if lanes.is_empty() => return,
        Ok(lanes) => {
            let count: u64 = lanes.iter().map(|lane| lane.write_count).sum();
            let bytes: u64 = lanes.iter().map(|lane| lane.bytes).sum();
            (
                format!(
                    "the only copy of {} ({}) that an earlier daemon left is in memory, in {}",
                    counted(
                        usize::try_from(count).unwrap_or(usize::MAX),
                        "acknowledged write"
                    ),
                    show_size(bytes),
                    config.runtime_dir.join("lanes").display()
                ),
                String::from(
                    "write them with systemctl start rushes or rushes recover, and do not switch \
                     the machine off before. rushes recover --list names their files",
                ),
            )
        }
        Err(error) => (
            format!("the data that an earlier daemon left cannot be listed: {error}"),
            String::from(match is_root() {
                true => "rushes recover --list shows what can be read of it",
                false => "run `sudo rushes check`: only root may read the lanes",
            }),
        ),
    };
    findings.push(Finding::of(Level::Error, AREA, finding, remedy));
}

fn folder(config: &Config, findings: &mut Vec<Finding>) {
    let Ok(found) = std::fs::metadata(&config.runtime_dir) else {
        return;
    };
    if found.uid() != 0 || found.mode() & 0o022 != 0 {
        findings.push(Finding::of(
            Level::Error,
            AREA,
            format!(
                "{} belongs to user {} with mode {:o}: other users could create sockets in it",
                config.runtime_dir.display(),
                found.uid(),
                found.mode() & 0o7777
            ),
            format!(
                "chown root {0} && chmod 755 {0}",
                config.runtime_dir.display()
            ),
        ));
    }
}

/// Sockets, locks and the table of facts lie there: smbd refuses new work when it is full.
fn room(config: &Config, findings: &mut Vec<Finding>) {
    let is_there = config
        .runtime_dir
        .ancestors()
        .find(|folder| folder.is_dir());
    let Some(folder) = is_there else {
        return;
    };
    let Ok(found) = rustix::fs::statvfs(folder) else {
        return;
    };
    let left = found.f_bavail.saturating_mul(found.f_frsize);
    // Some file systems count no inodes.
    let has_inodes = found.f_files == 0 || found.f_favail >= RUNTIME_INODES_MIN;
    if left >= RUNTIME_BYTES_MIN && has_inodes {
        return;
    }
    let is_full = left < RUNTIME_BYTES_MIN / 16 || !has_inodes;
    findings.push(Finding::of(
        if is_full { Level::Error } else { Level::Warning },
        AREA,
        format!(
            "the file system of {} has {} and {} inodes left; expected at least {} and {RUNTIME_INODES_MIN}: once it is full, new sessions and new files to write are refused",
            folder.display(),
            show_size(left),
            found.f_favail,
            show_size(RUNTIME_BYTES_MIN)
        ),
        room_remedy(folder, has_inodes),
    ));
}

fn room_remedy(folder: &Path, has_inodes: bool) -> String {
    let (look, larger) = match has_inodes {
        true => ("du -x", "size=SIZE"),
        false => ("du -x --inodes", "nr_inodes=NUMBER"),
    };
    format!(
        "`{look} {}` shows what fills it; delete files that are not needed and do not belong to \
         Rushes, or make the file system larger: a tmpfs with mount -o remount,{larger}",
        folder.display()
    )
}

/// Calibrations that the daemon has not read: `rushes calibrate --save` does not notify it.
fn measured_meanwhile(config: &Config, status: &Status, findings: &mut Vec<Finding>) {
    let mut said: Vec<&str> = Vec::new();
    for served in status.shares.iter().filter(|one| one.trouble.is_none()) {
        let mut devices = status.devices.iter();
        let device = devices.find(|device| device.name == served.device);
        let is_guess = device.is_some_and(|device| device.model_source != "calibrated");
        if !is_guess || said.contains(&served.device.as_str()) {
            continue;
        }
        let measured = identity_of(Path::new(&served.path))
            .and_then(|identity| Calibration::load_for(&config.state_dir, &identity));
        if let Ok(Some(measured)) = measured {
            said.push(&served.device);
            findings.push(Finding::of(
                Level::Warning,
                AREA,
                format!(
                    "{} (share {}) was measured on {}, but the daemon has not read the result yet: \
                     contracts rest on a cautious guess",
                    served.device, served.name, measured.measured_at
                ),
                "systemctl reload rushes",
            ));
        }
    }
}

fn running(config: &Config, status: &Status, findings: &mut Vec<Finding>) {
    let ours = env!("CARGO_PKG_VERSION");
    let daemon = &status.daemon;
    if daemon.version != ours {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!(
                "version {} is running, but this program is version {ours}",
                daemon.version
            ),
            "systemctl restart rushes",
        ));
    } else {
        findings.push(Finding::ok(
            AREA,
            format!("version {} is running (pid {})", daemon.version, daemon.pid),
        ));
    }
    for sentence in &daemon.unwritten {
        findings.push(Finding::of(
            Level::Error,
            AREA,
            sentence.clone(),
            "repair that, and the daemon writes them within seconds; do not switch the machine off \
             before",
        ));
    }
    if let Some(error) = &daemon.reload_error {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!("the last reload failed: {error}"),
            "correct rushes.toml, then systemctl reload rushes",
        ));
    }
    for share in &config.shares {
        let served = status
            .shares
            .iter()
            .find(|served| served.name == share.name);
        if let Some(trouble) = served.and_then(|served| served.trouble.as_ref()) {
            findings.push(Finding::of(
                Level::Warning,
                AREA,
                trouble.clone(),
                "mount it; the daemon serves it from there within seconds (rushes status says so)",
            ));
        }
        if served.is_none() {
            findings.push(Finding::of(
                Level::Warning,
                AREA,
                format!("share {:?} is configured, but not served yet", share.name),
                "systemctl reload rushes",
            ));
        }
    }
    measured_meanwhile(config, status, findings);
    if !status.cache.locked {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            "the cache is not locked in memory: reads may be late under memory pressure",
            "set LimitMEMLOCK=infinity in the service, restart",
        ));
    }
    if daemon.event_loop.priority == "ordinary" {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            "the event loop runs with ordinary priority: it may be late when the machine is busy",
            "set LimitRTPRIO=1 in the service (packaging/rushes.service does), restart",
        ));
    }
    if daemon.expelled_session_count > 0 {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!(
                "the daemon has closed {} that broke the protocol",
                counted(
                    usize::try_from(daemon.expelled_session_count).unwrap_or(usize::MAX),
                    "session"
                )
            ),
            "see `journalctl -u rushes`; install module and daemon of one release",
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_of_a_full_runtime_folder_is_of_what_lacks() {
        let bytes = room_remedy(Path::new("/run"), true);
        assert!(
            bytes.contains("`du -x /run`") && bytes.contains("size="),
            "{bytes}"
        );
        let inodes = room_remedy(Path::new("/run"), false);
        assert!(inodes.contains("du -x --inodes /run"), "{inodes}");
        assert!(inodes.contains("nr_inodes="), "{inodes}");
    }
}
