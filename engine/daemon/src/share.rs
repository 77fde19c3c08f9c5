// SPDX-License-Identifier: Apache-2.0
//! A share's folder, held open, and what lies below it.
//!
//! The folder is opened once, at start; everything below is then reached from this descriptor, so
//! that renaming or mounting over the path later changes nothing unseen.

use crate::config::ShareConfig;
use crate::error::ServeError;
use rushes_core::server::FileKey;
use rushes_core::units::DeviceId;
use rushes_sys::file::{self, MountId};
use rushes_sys::space::{self, Reserves};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, open, openat2, statat};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// File systems that answer O_DIRECT with the page cache, or not at all: their bytes are in memory.
const MEMORY_FILE_SYSTEMS: &[&str] = &["tmpfs", "ramfs", "hugetlbfs"];

/// A share being served.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) config: ShareConfig,
    /// The same folder without symlinks.
    pub(crate) real: PathBuf,
    /// O_PATH.
    root: OwnedFd,
    pub(crate) mount: MountId,
    /// `st_dev` of the folder.
    pub(crate) st_dev: u64,
    /// Kind, as the kernel calls it.
    pub(crate) file_system: String,
    pub(crate) direct_io: bool,
    /// As found by trying when it was opened.
    pub(crate) reserves: Reserves,
    /// A file without a name and without bytes: to sync it is to have the drive bring what it has in its memory to the medium.
    pub(crate) flush_with: Option<Arc<OwnedFd>>,
    /// Set when the file system turns out not to let its files be watched.
    pub(crate) unwatchable: AtomicBool,
}

/// How what clients write to a share gets to its disk. Each file may still go the second way: see `space::NotOurs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The kernel reserves blocks, then bytes are answered and written when it is their turn.
    Extents,
    /// The client's own hand writes; nothing is kept in memory.
    Through,
    /// Each file will show.
    Unknown,
}

impl Way {
    /// As `rushes status` has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Extents => "extents",
            Way::Through => "through",
            Way::Unknown => "unknown",
        }
    }
}

/// A share and the device it lies on.
#[derive(Debug)]
pub(crate) struct ServedShare {
    pub(crate) share: std::sync::Arc<Share>,
    pub(crate) device: DeviceId,
}

impl Share {
    /// Open a share's folder. Waits for its file system.
    pub(crate) fn open(config: &ShareConfig) -> Result<Share, ServeError> {
        let fail = |source: io::Error| ServeError::Share {
            name: config.name.clone(),
            path: config.path.clone(),
            source,
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&config.path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        let status = file::status(&root).map_err(fail)?;
        let file_system = file_system_of(status.mount).unwrap_or_else(|| String::from("unknown"));
        let direct_io = !MEMORY_FILE_SYSTEMS.contains(&file_system.as_str()) && takes_direct(&root);
        let mut share = Share {
            config: config.clone(),
            real: config
                .path
                .canonicalize()
                .unwrap_or_else(|_| config.path.clone()),
            root,
            mount: status.mount,
            st_dev: status.key.device,
            file_system,
            direct_io,
            reserves: Reserves::Never("it has no direct I/O"),
            flush_with: None,
            unwatchable: AtomicBool::new(false),
        };
        if direct_io {
            let root = share.readable_root().map_err(fail)?;
            share.reserves = Reserves::of(&root);
            if share.reserves == Reserves::Extents {
                share.flush_with = space::unnamed(&root).ok().map(Arc::new);
            }
        }
        Ok(share)
    }

    /// How what clients write gets to its disk, and why so.
    pub(crate) fn way(&self, write_buffer_bytes: u64) -> (Way, String) {
        let file_system = &self.file_system;
        match &self.reserves {
            _ if write_buffer_bytes == 0 => (Way::Through, String::from("write.buffer_bytes is 0")),
            Reserves::Extents => (
                Way::Extents,
                format!("{file_system} reserves blocks before bytes (fallocate)"),
            ),
            Reserves::Never(why) => (Way::Through, format!("{file_system}: {why}")),
            Reserves::Untried(why) => (Way::Unknown, format!("it could not be tried: {why}")),
        }
    }

    /// The folder itself, for reading its names.
    pub(crate) fn readable_root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.root, ".", flags, Mode::empty())?)
    }

    /// The folder of the file that was opened as `path`, if that is still the file `key`.
    ///
    /// Errors   ESTALE: another file (or none) has that name now; otherwise what openat2(2) says.
    pub(crate) fn folder_of(&self, path: &str, key: FileKey) -> io::Result<OwnedFd> {
        let path = Path::new(path);
        let (Some(name), parent) = (path.file_name(), path.parent()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let parent = match parent {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS
            | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat2(&self.root, parent, flags, Mode::empty(), resolve)?;
        let found = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if found.st_dev != key.device || found.st_ino != key.inode {
            return Err(rustix::io::Errno::STALE.into());
        }
        Ok(folder)
    }
}

/// Whether a file without a name can be opened for direct I/O; where none can be made (a read-only
/// mount), it is taken to be possible until a file says otherwise.
fn takes_direct(root: &OwnedFd) -> bool {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let private = Mode::RUSR | Mode::WUSR;
    match rustix::fs::openat(root, ".", flags | OFlags::DIRECT, private) {
        Ok(_) => true,
        Err(rustix::io::Errno::INVAL) => rustix::fs::openat(root, ".", flags, private).is_err(),
        Err(_) => true,
    }
}

/// Kind of the file system behind a mount of our namespace.
pub(crate) fn file_system_of(mount: MountId) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let line = mount_line(&table, mount)?;
    let (_, tail) = line.split_once(" - ")?;
    tail.split(' ').next().map(str::to_owned)
}

/// `major:minor` of a mount, from a mountinfo table.
fn mount_device(table: &str, mount: MountId) -> Option<&str> {
    mount_line(table, mount)?.split(' ').nth(2)
}

fn mount_line(table: &str, mount: MountId) -> Option<&str> {
    table
        .lines()
        .find(|line| line.split(' ').next().and_then(|id| id.parse().ok()) == Some(mount.0))
}

/// Whether mount `theirs` of process `pid`, which lives in another mount namespace than we, is the
/// same file system as our mount `ours`.
///
/// A service manager may give either side a mount namespace of its own, in which the same mounts
/// have other numbers. Only the tables in /proc are read; the file system is not touched.
pub(crate) fn same_file_system_elsewhere(pid: i32, theirs: MountId, ours: MountId) -> bool {
    let namespace = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
    let peer = pid.to_string();
    let (Some(our_space), Some(their_space)) = (namespace("self"), namespace(&peer)) else {
        return false;
    };
    if our_space == their_space {
        return false;
    }
    let table = |who: &str| std::fs::read_to_string(format!("/proc/{who}/mountinfo")).ok();
    let (Some(our_table), Some(their_table)) = (table("self"), table(&peer)) else {
        return false;
    };
    match (
        mount_device(&our_table, ours),
        mount_device(&their_table, theirs),
    ) {
        (Some(ours), Some(theirs)) => ours == theirs,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_line_tells_kind_and_device() {
        let table = "24 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
                     240 24 0:45 / /m rw - tmpfs tmpfs rw\n";
        assert_eq!(mount_device(table, MountId(240)), Some("0:45"));
        assert_eq!(mount_device(table, MountId(4)), None);
    }

    #[test]
    fn a_folder_is_found_only_while_the_file_keeps_its_name() {
        let path = std::env::temp_dir().join(format!("rushes-share-{}", std::process::id()));
        std::fs::create_dir_all(path.join("a/b")).unwrap();
        std::fs::write(path.join("a/b/1.dpx"), b"x").unwrap();
        std::os::unix::fs::symlink("b", path.join("a/link")).unwrap();
        let share = Share::open(&ShareConfig {
            name: String::from("s"),
            path: path.clone(),
            exclusive: false,
        })
        .unwrap();
        let key = file::status(std::fs::File::open(path.join("a/b/1.dpx")).unwrap())
            .unwrap()
            .key;
        assert!(share.folder_of("a/b/1.dpx", key).is_ok());
        // Through a symlink, from above the root, under another's name, or as another file: no.
        assert!(share.folder_of("a/link/1.dpx", key).is_err());
        assert!(share.folder_of("../x/1.dpx", key).is_err());
        assert!(share.folder_of("", key).is_err());
        assert!(share.folder_of("a/b", key).is_err());
        std::fs::rename(path.join("a/b/1.dpx"), path.join("a/b/2.dpx")).unwrap();
        std::fs::write(path.join("a/b/1.dpx"), b"y").unwrap();
        assert!(share.folder_of("a/b/1.dpx", key).is_err());
        assert!(share.folder_of("a/b/2.dpx", key).is_ok());
        std::fs::remove_dir_all(path).unwrap();
    }

    /// Say aloud that a test is skipped, and why; it then returns.
    ///
    /// Panics   when `RUSHES_TEST_ALL` is 1: under `make test` everything runs
    fn skip(sentence: &str) {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "{sentence}; it may not be skipped under RUSHES_TEST_ALL=1"
        );
        eprintln!("SKIPPED: {sentence}");
    }

    /// `unshare -m` gives a process the same mounts under other numbers.
    #[test]
    fn a_mount_is_known_again_in_another_namespace() {
        let spawned = std::process::Command::new("unshare")
            .args(["-m", "sleep", "20"])
            .spawn();
        let Ok(mut child) = spawned else {
            skip("no unshare(1)");
            return;
        };
        let pid = i32::try_from(child.id()).unwrap();
        let ours = file::mount_of(Path::new("/")).unwrap();
        let own = std::fs::read_link("/proc/self/ns/mnt").unwrap();
        let mut table = String::new();
        for _ in 0..500 {
            let theirs = std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            if theirs.is_some_and(|theirs| theirs != own) {
                table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let mount_at = |point: &str| {
            let line = table.lines().find(|l| l.split(' ').nth(4) == Some(point))?;
            Some(MountId(line.split(' ').next()?.parse().ok()?))
        };
        let found = mount_at("/").map(|theirs| {
            let proc_mount = mount_at("/proc").unwrap();
            (
                theirs != ours,
                same_file_system_elsewhere(pid, theirs, ours),
                same_file_system_elsewhere(pid, proc_mount, ours),
            )
        });
        let _ = child.kill();
        let _ = child.wait();
        match found {
            None => skip("unshare -m is not allowed here"),
            Some(found) => assert_eq!(found, (true, true, false)),
        }
        // In our own namespace another number is another mount.
        let own_pid = i32::try_from(std::process::id()).unwrap();
        assert!(!same_file_system_elsewhere(own_pid, MountId(0), ours));
    }

    #[test]
    fn an_absent_folder_names_the_share() {
        let error = Share::open(&ShareConfig {
            name: String::from("media"),
            path: "/nonexistent/media".into(),
            exclusive: false,
        })
        .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("media") && text.contains("/nonexistent"),
            "{text}"
        );
    }
}
