// SPDX-License-Identifier: Apache-2.0
//! The bandwidth that the members' devices have left, by the daemon's report once a second: the
//! pool uses it where a policy asks for that.
//!
//! Of a device without a share nothing is known. This tells the daemon nothing.

use crate::daemon::{LOOK_EVERY, STATUS_PATIENCE, share_of};
use crate::door::Door;
use rushes_control::{Answer, Ask, Client, Status};
use std::path::Path;
use std::sync::atomic::Ordering;

impl Door {
    /// Runs until the door closes.
    pub(crate) fn ask_loads_now_and_then(&self) {
        let Some(runtime_dir) = &self.runtime_dir else {
            return;
        };
        let control = runtime_dir.join("control.sock");
        let mut daemon = None;
        while !self.closing.load(Ordering::Acquire) {
            daemon = self.ask_loads(&control, daemon.take());
            if daemon.is_none() {
                // There are no contracts.
                self.tidying.set_promised(false);
            }
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Returns the connection, if it can be used again. Without one the pool's last figures expire
    /// by themselves
    fn ask_loads(&self, control: &Path, daemon: Option<Client>) -> Option<Client> {
        let mut daemon = daemon.or_else(|| Client::connect(control, STATUS_PATIENCE).ok())?;
        let Ok(Answer::Status(status)) = daemon.ask(&Ask::Status {}) else {
            return None;
        };
        let mut is_promised = false;
        let loads: Vec<(u64, u64)> = self
            .pool
            .members()
            .iter()
            .filter_map(|member| {
                let folder = member.path().canonicalize().ok()?;
                is_promised |= has_promises(&status, &folder);
                let unpromised = unpromised(&status, &folder)?;
                Some((member.status().device?, unpromised))
            })
            .collect();
        self.pool.set_loads(loads);
        self.tidying.set_promised(is_promised);
        Some(daemon)
    }
}

/// Whether streams have contracts on the device below this folder.
fn has_promises(status: &Status, folder: &Path) -> bool {
    share_of(status, folder).is_some_and(|(share, _)| {
        let mut devices = status.devices.iter();
        devices.any(|one| one.name == share.device && one.promised_bytes_per_s > 0)
    })
}

/// The bandwidth that contracts leave on the device below this folder.
///
/// Units    bytes per second
fn unpromised(status: &Status, folder: &Path) -> Option<u64> {
    let (share, _) = share_of(status, folder)?;
    let of_name = |device: &&rushes_control::DeviceStatus| device.name == share.device;
    let mut devices = status.devices.iter().filter(of_name);
    let device = devices.next()?;
    // Shares without a block device have no device name of their own.
    if devices.next().is_some() {
        return None;
    }
    Some(
        device
            .read_bytes_per_s
            .saturating_sub(device.promised_bytes_per_s),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_control::{DeviceStatus, ShareStatus};

    fn status(devices: &[(&str, u64, u64)], shares: &[(&str, &str)]) -> Status {
        let device =
            |&(name, read_bytes_per_s, promised_bytes_per_s): &(&str, u64, u64)| DeviceStatus {
                name: name.to_owned(),
                read_bytes_per_s,
                promised_bytes_per_s,
                ..DeviceStatus::default()
            };
        let share = |&(path, device): &(&str, &str)| ShareStatus {
            path: path.to_owned(),
            device: device.to_owned(),
            ..ShareStatus::default()
        };
        Status {
            devices: devices.iter().map(device).collect(),
            shares: shares.iter().map(share).collect(),
            ..Status::default()
        }
    }

    #[test]
    fn a_folder_has_what_is_left_of_the_device_of_its_nearest_share() {
        let status = status(
            &[
                ("sda", 500, 100),
                ("sdb", 300, 400),
                ("tmpfs", 1, 0),
                ("tmpfs", 2, 0),
            ],
            &[
                ("/none/a", "sda"),
                ("/none/a/b", "sdb"),
                ("/none/c", "tmpfs"),
                ("/none/d", "gone"),
            ],
        );
        let of = |folder: &str| unpromised(&status, Path::new(folder));
        assert_eq!(of("/none/a/pool"), Some(400));
        assert_eq!(of("/none/a/b"), Some(0), "more was promised than is there");
        assert_eq!(of("/none/c/pool"), None, "two of one name");
        assert_eq!(of("/none/d"), None);
        assert_eq!(of("/none/ab"), None, "in no share");
        let promised = |folder: &str| has_promises(&status, Path::new(folder));
        assert!(promised("/none/a/pool") && promised("/none/a/b"));
        assert!(!promised("/none/c/pool") && !promised("/none/d") && !promised("/none/ab"));
    }
}
