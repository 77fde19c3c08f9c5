// SPDX-License-Identifier: Apache-2.0
//! A share's folder, its file system, its device and the device's calibration.

use super::{Finding, Level};
use crate::calibrate::{Calibration, identity_of};
use crate::config::{Config, ShareConfig};
use crate::device;
use crate::error::ServeError;
use crate::share::{Share, Way};
use rushes_sys::device::DeviceFacts;
use rushes_sys::space::Reserves;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::SystemTime;

/// Disks fill and age; a model this old should be looked at again. Units: days.
const CALIBRATION_DAYS_MAX: u64 = 180;

pub(super) fn examine(
    config: &Config,
    share: &ShareConfig,
    exported: &[PathBuf],
    findings: &mut Vec<Finding>,
) {
    let area = format!("share {}", share.name);
    let opened = match Share::open(share) {
        Ok(opened) => opened,
        Err(error) => {
            findings.push(Finding::of(
                Level::Error,
                &area,
                error.to_string(),
                unopened_remedy(&error),
            ));
            return;
        }
    };
    place(&area, &opened, findings);
    file_system(&area, &opened, findings);
    write_way(&area, &opened, config.write_buffer_bytes, findings);
    let facts = device::facts_of(&opened);
    if let Some(facts) = &facts {
        scheduler(&area, facts, findings);
    }
    // While the share's own file system is away, the device under the folder need not be measured.
    if opened.lacks.is_none() && (opened.direct_io || facts.is_some()) {
        calibration(&area, config, share, findings);
    }
    other_doors(&area, share, exported, findings);
}

/// The remedy for a share whose folder cannot be opened.
fn unopened_remedy(error: &ServeError) -> &'static str {
    let kind = match error {
        ServeError::Share { source, .. } => source.kind(),
        _ => ErrorKind::Other,
    };
    match kind {
        ErrorKind::PermissionDenied => {
            "run `sudo rushes check`: the daemon is root, and this user may not enter the folder"
        }
        ErrorKind::NotADirectory => {
            "correct the path in rushes.toml: it leads to a file, and a share is a folder"
        }
        ErrorKind::NotFound => {
            "mount the file system, make the folder, or correct the path in rushes.toml"
        }
        _ => {
            "see dmesg for what its disk or server says; the daemon serves the share when its folder can be opened again"
        }
    }
}

/// A share whose file system is not mounted: its folder then lies on the file system above.
fn place(area: &str, share: &Share, findings: &mut Vec<Finding>) {
    if let Some(lacks) = &share.lacks {
        let lacks = lacks.display();
        findings.push(Finding::of(
            Level::Error,
            area,
            format!(
                "{lacks} is not mounted, although /etc/fstab has a file system for it: until it \
                 is, {} lies on {} ({}), and clients write there",
                share.config.path.display(),
                share.mount_point.display(),
                share.file_system
            ),
            format!("mount {lacks}"),
        ));
    }
}

fn file_system(area: &str, share: &Share, findings: &mut Vec<Finding>) {
    let kind = share.file_system.as_str();
    let path = share.config.path.display();
    let uuid = identity_of(&share.config.path)
        .ok()
        .and_then(|identity| identity.uuid);
    if !share.direct_io {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!("{path} lies on {kind}, which has no direct I/O: it is served buffered"),
            "put media on ext4, xfs or btrfs; for a test this is fine",
        ));
    } else if kind.starts_with("fuse") || kind.starts_with("nfs") || kind == "cifs" {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!("{path} lies on {kind}: another machine or program decides how fast it is"),
            "contracts need disks of this machine: share a native file system",
        ));
    } else {
        findings.push(Finding::ok(
            area,
            format!(
                "{path} lies on {kind} (mounted on {}{}) with direct I/O, {}",
                share.mount_point.display(),
                device::facts_of(share)
                    .map_or_else(String::new, |facts| format!(", device {}", facts.disk)),
                uuid.map_or_else(
                    || String::from("without UUID"),
                    |uuid| format!("UUID {uuid}")
                )
            ),
        ));
    }
}

fn write_way(area: &str, share: &Share, write_buffer_bytes: u64, findings: &mut Vec<Finding>) {
    let (way, reason) = share.way(write_buffer_bytes);
    let sentence = way.sentence(&reason);
    findings.push(match way {
        // Without a write buffer this is as configured.
        _ if write_buffer_bytes == 0 => Finding::ok(area, sentence),
        Way::Extents => Finding::ok(area, sentence),
        Way::Through => Finding::of(
            Level::Warning,
            area,
            format!("{sentence}: they are not gathered in memory, and have no deadlines"),
            "put media that are recorded on ext4 or xfs; everything else works as it is",
        ),
        Way::Unknown => Finding::of(
            Level::Note,
            area,
            sentence,
            match &share.reserves {
                Reserves::Full(_) => {
                    "free space on the file system; the daemon tries again when it is restarted"
                }
                Reserves::Untried(why) if why.contains("Read-only") => {
                    "mount it for writing (mount -o remount,rw), and look at dmesg if the kernel \
                     made it read-only; or leave it, if no client writes there"
                }
                _ => "let the daemon's user write to the folder; or leave it, if no client writes there",
            },
        ),
    });
}

/// Priorities reach the disk only through a scheduler that knows them.
fn scheduler(area: &str, facts: &DeviceFacts, findings: &mut Vec<Finding>) {
    if facts.rotational && !matches!(facts.scheduler.as_str(), "mq-deadline" | "bfq" | "") {
        findings.push(Finding::of(
            Level::Warning,
            area,
            format!(
                "the scheduler of {} is {}: it has no I/O priorities, so the I/O of other programs \
                 does not yield to contracts",
                facts.disk, facts.scheduler
            ),
            format!(
                "echo mq-deadline > /sys/block/{}/queue/scheduler",
                facts.disk
            ),
        ));
    }
}

fn calibration(area: &str, config: &Config, share: &ShareConfig, findings: &mut Vec<Finding>) {
    let measure = format!("rushes calibrate {} --save", share.path.display());
    let loaded = identity_of(&share.path)
        .and_then(|identity| Calibration::load_for(&config.state_dir, &identity));
    match loaded {
        Err(error) => findings.push(Finding::of(
            Level::Error,
            area,
            format!("the device's calibration cannot be used: {error}"),
            format!("measure it again: {measure}"),
        )),
        Ok(None) => findings.push(Finding::of(
            Level::Warning,
            area,
            "the device was never measured: contracts rest on a cautious guess",
            measure,
        )),
        Ok(Some(calibration)) => findings.push(measured(area, &measure, &calibration)),
    }
}

/// The worst fault that a calibration has noted: `rushes calibrate` has said it once, perhaps to
/// somebody else.
fn measured(area: &str, measure: &str, calibration: &Calibration) -> Finding {
    let days = age_days(&calibration.measured_at);
    let when = &calibration.measured_at;
    let disk = &calibration.identity.disk;
    if let Some(file) = &calibration.buffered_file {
        Finding::of(
            Level::Warning,
            area,
            format!(
                "the device was measured on {when} through this machine's memory, as /dev/{disk} \
                 is the file {file}: contracts that rest on it will not hold"
            ),
            format!("losetup --direct-io=on /dev/{disk}; then measure it again: {measure}"),
        )
    } else if calibration.is_doubtful() {
        Finding::of(
            Level::Note,
            area,
            format!(
                "the device was measured on {when} while something else used it: its times \
                 scatter widely, and contracts rest on them"
            ),
            format!("measure it again when it is quiet: {measure}"),
        )
    } else if days.is_some_and(|days| days > CALIBRATION_DAYS_MAX) {
        Finding::of(
            Level::Note,
            area,
            format!("the device was measured on {when}, more than half a year ago"),
            format!("measure it again when no client plays: {measure}"),
        )
    } else if calibration.quick {
        Finding::of(
            Level::Note,
            area,
            format!("the device was measured quickly ({when}): the model is rough"),
            format!("when no client plays: {measure}"),
        )
    } else {
        Finding::ok(area, format!("the device was measured on {when}"))
    }
}

/// None: in the future, or no date.
fn age_days(measured_at: &str) -> Option<u64> {
    let then = humantime::parse_rfc3339_weak(measured_at).ok()?;
    let age = SystemTime::now().duration_since(then).ok()?;
    Some(age.as_secs() / 86_400)
}

/// Other doors do not break the leases under which SMB clients cache bytes.
fn other_doors(area: &str, share: &ShareConfig, exported: &[PathBuf], findings: &mut Vec<Finding>) {
    let is_exported = exported
        .iter()
        .any(|folder| share.path.starts_with(folder) || folder.starts_with(&share.path));
    if is_exported {
        findings.push(Finding::of(
            Level::Warning,
            area,
            "the folder is exported by NFS as well: NFS clients do not break the leases under \
             which SMB clients cache files, so those may see old bytes",
            "in smb.conf, for this share: smb2 leases = no, oplocks = no; or kernel oplocks = yes with a \
             kernel NFS server",
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_a_measurement_doubtful_is_said_again_however_old_it_is() {
        let mut calibration = crate::calibrate::tests::example();
        calibration.measured_at = String::from("2020-01-01T00:00:00Z");
        let said = |calibration: &Calibration| measured("share s", "measure", calibration).finding;
        assert!(said(&calibration).contains("more than half a year ago"));
        calibration.read.residual_percent_median = 40.0;
        assert!(said(&calibration).contains("scatter widely"));
        calibration.buffered_file = Some(String::from("/srv/disk.img"));
        let finding = measured("share s", "measure", &calibration);
        assert_eq!(finding.level, Level::Warning);
        let sentence = &finding.finding;
        assert!(
            sentence.contains("/dev/sda is the file /srv/disk.img"),
            "{sentence}"
        );
    }

    #[test]
    fn remedy_of_a_share_whose_writes_could_not_be_tried_is_of_its_reason() {
        let path = std::env::temp_dir().join(format!("rushes-ways-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let mut share = Share::open(&ShareConfig {
            name: String::from("s"),
            path: path.clone(),
            exclusive: false,
        })
        .unwrap();
        let why = || String::from("because");
        let mut told = |reserves, bytes| {
            share.reserves = reserves;
            let mut findings = Vec::new();
            write_way("share s", &share, bytes, &mut findings);
            let [found] = <[Finding; 1]>::try_from(findings).unwrap();
            (found.level, found.finding, found.remedy.unwrap_or_default())
        };
        let (level, finding, remedy) = told(Reserves::Full(why()), 1);
        assert_eq!(level, Level::Note);
        assert!(
            finding.contains("it could not be tried: because"),
            "{finding}"
        );
        assert!(
            remedy.starts_with("free space on the file system"),
            "{remedy}"
        );
        let (level, _, remedy) = told(Reserves::Untried(why()), 1);
        assert_eq!(level, Level::Note);
        assert!(
            remedy.starts_with("let the daemon's user write"),
            "{remedy}"
        );
        let read_only = String::from("Read-only file system (os error 30)");
        let (_, _, remedy) = told(Reserves::Untried(read_only), 1);
        assert!(remedy.starts_with("mount it for writing"), "{remedy}");
        let (level, _, remedy) = told(Reserves::Never("because"), 1);
        assert_eq!(level, Level::Warning);
        assert!(remedy.contains("ext4 or xfs"), "{remedy}");
        for (reserves, bytes) in [(Reserves::Extents, 1), (Reserves::Full(why()), 0)] {
            assert_eq!(told(reserves, bytes).0, Level::Ok);
        }
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn remedy_of_a_folder_that_cannot_be_opened_is_of_its_error() {
        let path = std::env::temp_dir().join(format!("rushes-no-folder-{}", std::process::id()));
        let told = || {
            let share = ShareConfig {
                name: String::from("s"),
                path: path.clone(),
                exclusive: false,
            };
            unopened_remedy(&Share::open(&share).unwrap_err())
        };
        assert!(told().starts_with("mount the file system"));
        std::fs::write(&path, "").unwrap();
        assert!(told().starts_with("correct the path"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn age_is_counted_in_days_and_nonsense_has_none() {
        assert!(age_days("2020-01-01T00:00:00Z").unwrap() > 365);
        assert_eq!(age_days("2999-01-01T00:00:00Z"), None);
        assert_eq!(age_days("yesterday"), None);
    }
}
