// SPDX-License-Identifier: Apache-2.0
//! The kernel's facts of the block device under a file system, from sysfs.

use std::io;
use std::path::{Path, PathBuf};

/// A block device that carries a mounted file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Major number of the file system's device (`st_dev`).
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// The whole disk's name under /sys/block (`sda`, `nvme0n1`, `loop3`). Two partitions of one
    /// disk have the same: one queue.
    pub disk: String,
    /// Where the file system's device starts on the disk. Units: bytes; 0 unless it is a partition.
    pub partition_offset: u64,
    /// Size of the disk. Units: bytes.
    pub disk_bytes: u64,
    /// Size of the file system's device. Units: bytes.
    pub bytes: u64,
    /// The kernel takes it for a disk with a moving head.
    pub rotational: bool,
    /// The scheduler in force: `none`, `mq-deadline`, `bfq`, `kyber`. Empty: not said.
    pub scheduler: String,
    /// Largest request the queue takes. Units: bytes.
    pub request_bytes_max: u64,
    /// Smallest unit of direct I/O. Units: bytes.
    pub logical_block_bytes: u32,
    /// The backing file of a loop device without direct I/O, whose bytes go through this machine's
    /// memory. None for all other devices.
    pub buffered_file: Option<String>,
    /// UUID of the file system, where udev has made a link for it.
    pub uuid: Option<String>,
}

/// Facts of the device `st_dev` (as [`crate::file::status`] gives it).
///
/// Errors   NotFound: no block device of its own (tmpfs, NFS, FUSE, btrfs, overlayfs)
pub fn facts(st_dev: u64) -> io::Result<DeviceFacts> {
    facts_below(Path::new("/sys/dev/block"), st_dev).map(|mut facts| {
        facts.uuid = uuid(facts.major, facts.minor);
        facts
    })
}

/// The device that a mount's source names, for file systems whose `st_dev` is not that of a block
/// device, such as btrfs on one device. None: the source is no device.
pub fn st_dev_of_mount(mount: crate::file::MountId) -> io::Result<Option<u64>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let Some(source) = source_of(&table, mount.0) else {
        return Ok(None);
    };
    if !source.starts_with("/dev/") {
        return Ok(None);
    }
    let status = rustix::fs::stat(source.as_str())?;
    Ok((status.st_mode & libc::S_IFMT == libc::S_IFBLK).then_some(status.st_rdev))
}

/// One line: `id parent maj:min root mountpoint options… - type source superoptions` (proc(5)).
fn source_of(table: &str, mount: u64) -> Option<String> {
    let line = table
        .lines()
        .find(|line| line.split(' ').next().and_then(|id| id.parse().ok()) == Some(mount))?;
    let (_, tail) = line.split_once(" - ")?;
    tail.split(' ').nth(1).map(str::to_owned)
}

fn facts_below(root: &Path, st_dev: u64) -> io::Result<DeviceFacts> {
    let (major, minor) = (rustix::fs::major(st_dev), rustix::fs::minor(st_dev));
    let device = root.join(format!("{major}:{minor}")).canonicalize()?;
    let is_partition = device.join("partition").exists();
    let disk: PathBuf = match device.parent() {
        Some(parent) if is_partition => parent.to_owned(),
        _ => device.clone(),
    };
    let queue = disk.join("queue");
    // sysfs counts in units of 512 bytes for all devices.
    let sectors = |path: PathBuf| Ok::<u64, io::Error>(number(&path)?.saturating_mul(512));
    Ok(DeviceFacts {
        major,
        minor,
        disk: disk
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default(),
        partition_offset: if is_partition {
            sectors(device.join("start"))?
        } else {
            0
        },
        disk_bytes: sectors(disk.join("size"))?,
        bytes: sectors(device.join("size"))?,
        rotational: number(&queue.join("rotational")).unwrap_or(0) != 0,
        scheduler: std::fs::read_to_string(queue.join("scheduler"))
            .map(|text| chosen(&text))
            .unwrap_or_default(),
        request_bytes_max: number(&queue.join("max_sectors_kb"))
            .unwrap_or(0)
            .saturating_mul(1024),
        logical_block_bytes: number(&queue.join("logical_block_size"))
            .ok()
            .and_then(|bytes| u32::try_from(bytes).ok())
            .unwrap_or(512),
        buffered_file: buffered_file(&disk),
        uuid: None,
    })
}

fn buffered_file(disk: &Path) -> Option<String> {
    let said = |name| std::fs::read_to_string(disk.join("loop").join(name)).ok();
    let is_buffered = said("dio")?.trim() == "0";
    is_buffered
        .then(|| said("backing_file"))?
        .map(|file| file.trim_end().to_owned())
}

fn number(path: &Path) -> io::Result<u64> {
    let text = std::fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| {
        let what = format!(
            "{}: expected a number, read {:?}",
            path.display(),
            text.trim()
        );
        io::Error::new(io::ErrorKind::InvalidData, what)
    })
}

/// sysfs puts brackets around the scheduler in force: `none [mq-deadline]`.
fn chosen(text: &str) -> String {
    let text = text.trim();
    match text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
    {
        Some((name, _)) => name.to_owned(),
        None => text.to_owned(),
    }
}

fn uuid(major: u32, minor: u32) -> Option<String> {
    let links = std::fs::read_dir("/dev/disk/by-uuid").ok()?.flatten();
    let wanted = rustix::fs::makedev(major, minor);
    name_of_link(links.map(|entry| entry.path()), wanted)
}

/// The name of the link that leads to a device. A link that leads nowhere says nothing about the
/// others: udev leaves those of disks that were pulled.
fn name_of_link(links: impl IntoIterator<Item = PathBuf>, wanted: u64) -> Option<String> {
    let leads_there =
        |link: &PathBuf| rustix::fs::stat(link).is_ok_and(|found| found.st_rdev == wanted);
    let link = links.into_iter().find(leads_there)?;
    link.file_name()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn partition_is_traced_to_its_disk_and_queue() {
        let root = std::env::temp_dir().join(format!("rushes-device-{}", std::process::id()));
        let disk = root.join("devices/sda");
        let write = |path: &str, text: &str| {
            let path = disk.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("size", "1000\n");
        write("queue/rotational", "1\n");
        write("queue/scheduler", "none [mq-deadline] kyber\n");
        write("queue/max_sectors_kb", "1280\n");
        write("queue/logical_block_size", "4096\n");
        write("sda1/partition", "1\n");
        write("sda1/start", "8\n");
        write("sda1/size", "900\n");
        let links = root.join("block");
        fs::create_dir_all(&links).unwrap();
        std::os::unix::fs::symlink("../devices/sda/sda1", links.join("8:1")).unwrap();
        let facts = facts_below(&links, rustix::fs::makedev(8, 1));
        let absent = facts_below(&links, rustix::fs::makedev(8, 2));
        fs::remove_dir_all(&root).unwrap();
        let expected = DeviceFacts {
            major: 8,
            minor: 1,
            disk: "sda".into(),
            partition_offset: 8 * 512,
            disk_bytes: 1000 * 512,
            bytes: 900 * 512,
            rotational: true,
            scheduler: "mq-deadline".into(),
            request_bytes_max: 1280 << 10,
            logical_block_bytes: 4096,
            buffered_file: None,
            uuid: None,
        };
        assert_eq!(facts.unwrap(), expected);
        assert_eq!(absent.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_loop_device_without_direct_io_names_its_file() {
        let disk = std::env::temp_dir().join(format!("rushes-loop-{}", std::process::id()));
        fs::create_dir_all(disk.join("loop")).unwrap();
        assert_eq!(buffered_file(&disk), None, "no file yet");
        fs::write(disk.join("loop/backing_file"), "/srv/a disk.img\n").unwrap();
        fs::write(disk.join("loop/dio"), "0\n").unwrap();
        assert_eq!(buffered_file(&disk).as_deref(), Some("/srv/a disk.img"));
        fs::write(disk.join("loop/dio"), "1\n").unwrap();
        assert_eq!(buffered_file(&disk), None);
        fs::remove_dir_all(&disk).unwrap();
    }

    #[test]
    fn link_that_leads_nowhere_hides_no_other_link() {
        let links = || ["/dev/rushes-pulled", "/dev/null", "/dev/zero"].map(PathBuf::from);
        let zero = rustix::fs::stat("/dev/zero").unwrap().st_rdev;
        assert_eq!(name_of_link(links(), zero).as_deref(), Some("zero"));
        assert_eq!(name_of_link(links(), rustix::fs::makedev(4000, 1)), None);
    }

    #[test]
    fn source_is_found_whatever_optional_fields_come_before() {
        let table = "24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                     240 24 0:45 / /m rw shared:2 master:3 - btrfs /dev/loop0 rw\n";
        assert_eq!(source_of(table, 24).unwrap(), "/dev/vda");
        assert_eq!(source_of(table, 240).unwrap(), "/dev/loop0");
        assert_eq!(source_of(table, 2), None);
    }

    #[test]
    fn real_device_of_the_temporary_folder_or_none() {
        let file = fs::File::open(std::env::temp_dir()).unwrap();
        let key = crate::file::status(&file).unwrap().key;
        match facts(key.device) {
            Ok(facts) => assert!(facts.bytes > 0 && facts.disk_bytes >= facts.bytes),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
    }
}
