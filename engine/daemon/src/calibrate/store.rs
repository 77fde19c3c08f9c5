// SPDX-License-Identifier: Apache-2.0
//! Which device a calibration belongs to, and the file that keeps it.
//!
//! Device numbers change from boot to boot, so a calibration follows the file system's UUID and the
//! size of the disk; only where no UUID can be found does the device number stand in.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rushes_sys::device::{self, DeviceFacts};
use rushes_sys::file;
use serde::{Deserialize, Serialize};

use super::{CalibrateError, Calibration};

/// Version of the file format. 1: first.
pub(super) const VERSION: u32 = 1;

/// The marks that tell one device from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// UUID of the file system.
    pub uuid: Option<String>,
    /// `major:minor` of the file system's device, as it was when this was made.
    pub device: String,
    /// The disk's name, as it was when this was made; empty where there is no block device.
    pub disk: String,
    /// Size of the disk. Units: bytes.
    pub bytes: u64,
}

impl Identity {
    /// True when both are the same device; with a UUID, also under another device number.
    pub fn is(&self, other: &Identity) -> bool {
        let same_name = match (&self.uuid, &other.uuid) {
            (Some(mine), Some(theirs)) => mine == theirs,
            (None, None) => self.device == other.device,
            _ => false,
        };
        same_name && self.bytes == other.bytes
    }

    /// The name of its file in the state folder.
    fn file_name(&self) -> String {
        let name = match &self.uuid {
            Some(uuid) => uuid.clone(),
            None => format!("device-{}", self.device.replace(':', "-")),
        };
        // The UUID comes from the disk and is not trusted: the path must not leave the folder.
        let plain: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        format!("calibration-{plain}.json")
    }
}

/// The facts of the device under a path.
pub(super) struct Under {
    pub(super) identity: Identity,
    /// None: no block device can be found (overlayfs, NFS, FUSE, several devices).
    pub(super) facts: Option<DeviceFacts>,
}

/// The device under `path`.
///
/// Errors   the path cannot be read
pub fn identity_of(path: &Path) -> Result<Identity, CalibrateError> {
    under(path).map(|under| under.identity)
}

pub(super) fn under(path: &Path) -> Result<Under, CalibrateError> {
    let folder = File::open(path).map_err(CalibrateError::io("open", path))?;
    let status = file::status(&folder).map_err(CalibrateError::io("stat", path))?;
    let facts = match device::facts(status.key.device) {
        Ok(facts) => Some(facts),
        // btrfs has a device number of its own; its mount names the device.
        Err(_) => device::st_dev_of_mount(status.mount)
            .ok()
            .flatten()
            .and_then(|number| device::facts(number).ok()),
    };
    let (major, minor) = facts.as_ref().map_or(
        (
            rustix::fs::major(status.key.device),
            rustix::fs::minor(status.key.device),
        ),
        |facts| (facts.major, facts.minor),
    );
    let uuid = facts.as_ref().and_then(|facts| {
        facts
            .uuid
            .clone()
            .or_else(|| uuid_on(&node_of(facts.major, facts.minor)?).ok()?)
    });
    let bytes = match &facts {
        Some(facts) => facts.disk_bytes,
        None => {
            let space = rustix::fs::fstatvfs(&folder).map_err(|error| {
                CalibrateError::io("stat the file system of", path)(error.into())
            })?;
            space.f_blocks.saturating_mul(space.f_frsize)
        }
    };
    Ok(Under {
        identity: Identity {
            uuid,
            device: format!("{major}:{minor}"),
            disk: facts.as_ref().map_or(String::new(), |f| f.disk.clone()),
            bytes,
        },
        facts,
    })
}

/// The kind of file system at `path`, as the kernel calls it.
pub(super) fn file_system_of(path: &Path) -> Option<String> {
    let folder = File::open(path).ok()?;
    let mount = file::status(&folder).ok()?.mount;
    crate::mounts::MountTable::read().ok()?.file_system(mount)
}

/// The device node that the kernel names for a number.
pub(super) fn node_of(major: u32, minor: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).ok()?;
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Path::new("/dev").join(name))
}

/// Where known file systems keep their magic and UUID. Units: bytes from the start of the device.
const SUPERBLOCKS: [(u64, &[u8], u64); 3] = [
    // ext2, ext3, ext4: superblock at 1024.
    (1024 + 0x38, &[0x53, 0xef], 1024 + 0x68),
    // xfs: superblock at 0.
    (0, b"XFSB", 32),
    // btrfs: superblock at 64 KiB.
    (0x1_0040, b"_BHRfS_M", 0x1_0020),
];

/// UUID of the file system on a device, where udev made no link. None: unknown file system.
fn uuid_on(node: &Path) -> io::Result<Option<String>> {
    uuid_in(&mut File::open(node)?)
}

fn uuid_in(device: &mut (impl Read + Seek)) -> io::Result<Option<String>> {
    for (magic_at, magic, uuid_at) in SUPERBLOCKS {
        let mut found = [0u8; 8];
        device.seek(SeekFrom::Start(magic_at))?;
        if device.read_exact(&mut found[..magic.len()]).is_err() || !found.starts_with(magic) {
            continue;
        }
        let mut uuid = [0u8; 16];
        device.seek(SeekFrom::Start(uuid_at))?;
        device.read_exact(&mut uuid)?;
        let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let part = |from: usize, to: usize| hex[from..to].concat();
        return Ok(Some(format!(
            "{}-{}-{}-{}-{}",
            part(0, 4),
            part(4, 6),
            part(6, 8),
            part(8, 10),
            part(10, 16)
        )));
    }
    Ok(None)
}

impl Calibration {
    /// Keeps it in `state_dir` (made if absent) for the daemon. Returns the file.
    ///
    /// A reader sees the whole old file or the whole new one.
    pub fn save(&self, state_dir: &Path) -> Result<PathBuf, CalibrateError> {
        let path = state_dir.join(self.identity.file_name());
        let new = path.with_extension("json.new");
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| CalibrateError::io("describe", &path)(error.into()))?;
        text.push(b'\n');
        fs::create_dir_all(state_dir).map_err(CalibrateError::io("create", state_dir))?;
        let write = || {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(CalibrateError::io("write", &path))?;
        Ok(path)
    }

    /// The calibration of this very device, if one is kept in `state_dir`.
    ///
    /// Errors   the file cannot be read, or its values are impossible
    pub fn load_for(
        state_dir: &Path,
        identity: &Identity,
    ) -> Result<Option<Calibration>, CalibrateError> {
        let path = state_dir.join(identity.file_name());
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CalibrateError::io("read", &path)(error)),
        };
        let calibration: Calibration = serde_json::from_slice(&text)
            .map_err(|error| CalibrateError::nonsense(&path, error.to_string()))?;
        calibration
            .check()
            .map_err(|reason| CalibrateError::nonsense(&path, reason))?;
        // A disk that was replaced or grown is another device.
        Ok(calibration.identity.is(identity).then_some(calibration))
    }

    /// Errors   a sentence that names the first impossible value
    fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("read version {}, expected {VERSION}", self.version));
        }
        if self.identity.bytes == 0 {
            return Err("read a device of 0 bytes".into());
        }
        for (name, fit) in [("read", &self.read), ("write", &self.write)] {
            if fit.bytes_per_second == 0 {
                return Err(format!("read {name}.bytes_per_second 0, expected a rate"));
            }
            // An hour: no device is positioned so long.
            if fit.fixed_ns.max(fit.span_ns) > 3_600_000_000_000 {
                return Err(format!(
                    "read {name}.fixed_ns {} and span_ns {}, expected less than an hour",
                    fit.fixed_ns, fit.span_ns
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(uuid: Option<&str>, device: &str, bytes: u64) -> Identity {
        Identity {
            uuid: uuid.map(str::to_owned),
            device: device.into(),
            disk: "sda".into(),
            bytes,
        }
    }

    #[test]
    fn device_is_the_same_by_uuid_and_size_whatever_its_number() {
        let mine = identity(Some("a-b"), "8:1", 100);
        assert!(mine.is(&identity(Some("a-b"), "8:17", 100)));
        assert!(!mine.is(&identity(Some("a-b"), "8:1", 200)));
        assert!(!mine.is(&identity(Some("a-c"), "8:1", 100)));
        assert!(!mine.is(&identity(None, "8:1", 100)));
        let nameless = identity(None, "8:1", 100);
        assert!(nameless.is(&identity(None, "8:1", 100)));
        assert!(!nameless.is(&identity(None, "8:2", 100)));
    }

    #[test]
    fn file_name_stays_in_the_folder() {
        let name = identity(Some("../../etc/passwd"), "8:1", 100).file_name();
        assert_eq!(name, "calibration-------etc-passwd.json");
    }

    #[test]
    fn uuid_is_read_from_superblocks() {
        let uuid: Vec<u8> = (0..16).collect();
        for (magic_at, magic, uuid_at) in SUPERBLOCKS {
            let mut disk = vec![0u8; 128 << 10];
            disk[magic_at as usize..][..magic.len()].copy_from_slice(magic);
            disk[uuid_at as usize..][..16].copy_from_slice(&uuid);
            let found = uuid_in(&mut io::Cursor::new(disk)).unwrap();
            assert_eq!(
                found.as_deref(),
                Some("00010203-0405-0607-0809-0a0b0c0d0e0f")
            );
        }
        for length in [0, 10, 4096, 128 << 10] {
            assert_eq!(
                uuid_in(&mut io::Cursor::new(vec![0u8; length])).unwrap(),
                None
            );
        }
    }
}
