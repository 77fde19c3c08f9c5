// SPDX-License-Identifier: Apache-2.0
//! A share's folder, held open, and the access to the files below it.
//!
//! The folder is opened once; everything below is then reached from this descriptor, so that
//! renaming or mounting over the path later changes nothing unseen. When the path leads to another
//! mount, the share is opened again, as another [`Share`] (see moves.rs) that uses nothing of the
//! former one.

use crate::calibrate::{Identity, identity_of};
use crate::config::ShareConfig;
use crate::error::ServeError;
use crate::mounts::{MountTable, lacks_mount};
use rushes_core::server::FileKey;
use rushes_core::units::DeviceId;
use rushes_sys::file::{self, MountId};
use rushes_sys::space::{self, Reserves};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, open, openat2, statat};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// File systems that answer O_DIRECT with the page cache, or not at all: their bytes are in memory.
const MEMORY_FILE_SYSTEMS: &[&str] = &["tmpfs", "ramfs", "hugetlbfs"];

/// A share being served.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) config: ShareConfig,
    /// The same folder without symlinks.
    pub(crate) real: PathBuf,
    /// None after [`Share::let_go`].
    held: Mutex<Option<Held>>,
    pub(crate) mount: MountId,
    /// The identity that tells the calibration of its device. None: it could not be read.
    pub(crate) identity: Option<Identity>,
    /// `st_dev` of the folder.
    pub(crate) st_dev: u64,
    inode: u64,
    /// The folder on which that mount lies; empty when the kernel's table does not say.
    pub(crate) mount_point: PathBuf,
    /// The folder on which /etc/fstab has another file system that is not mounted.
    pub(crate) lacks: Option<PathBuf>,
    /// Kind, as the kernel calls it.
    pub(crate) file_system: String,
    pub(crate) direct_io: bool,
    /// The result of a trial when the share was opened.
    pub(crate) reserves: Reserves,
    /// Set when a watch on one of its files fails.
    pub(crate) unwatchable: AtomicBool,
    /// The path leads to another place by now.
    is_left: AtomicBool,
}

/// The descriptors that keep a share's mount in use beside its files.
#[derive(Clone, Debug)]
struct Held {
    /// O_PATH.
    root: Arc<OwnedFd>,
    /// A file without a name and without bytes: a sync of it makes the drive flush its cache.
    flush_with: Option<Arc<OwnedFd>>,
}

/// Which folder a path leads to, and by which mount.
///
/// The kernel reuses numbers of mounts and inodes: it means the same folder only while that is held
/// open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    mount: MountId,
    st_dev: u64,
    inode: u64,
}

/// Where a path leads now. Waits for its file system.
pub(crate) fn place_of(path: &Path) -> io::Result<Place> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let status = file::status(open(path, flags, Mode::empty())?)?;
    Ok(Place {
        mount: status.mount,
        st_dev: status.key.device,
        inode: status.key.inode,
    })
}

/// The way of clients' writes to a share's disk. Each file may still go the second way: see
/// `space::NotOurs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The daemon reserves blocks, acknowledges the bytes and writes them in their order.
    Extents,
    /// The door writes them itself; the write buffer is not used.
    Through,
    /// The first write to each file shows it.
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

    /// As log and check have it.
    pub(crate) fn sentence(self, reason: &str) -> String {
        match self {
            Way::Extents => format!("clients' writes go by extents ({reason})"),
            Way::Through => format!("clients' writes go straight to their files ({reason})"),
            Way::Unknown => {
                format!(
                    "it is not known yet whether clients' writes go by extents or through ({reason})"
                )
            }
        }
    }
}

/// A share and the device it lies on.
#[derive(Clone, Debug)]
pub(crate) struct ServedShare {
    pub(crate) share: Arc<Share>,
    pub(crate) device: DeviceId,
    /// A sentence, when it does not lie where it should.
    pub(crate) trouble: Option<String>,
    /// Its path leads to no folder.
    pub(crate) is_nowhere: bool,
    /// Its home: of all mount points on which it has lain, the deepest, and the name of that
    /// mount's device.
    pub(crate) home: (PathBuf, String),
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
        let table = MountTable::read().map_err(fail)?;
        let file_system = table
            .file_system(status.mount)
            .unwrap_or_else(|| String::from("unknown"));
        let mount_point = table.point(status.mount).unwrap_or_default();
        let real = config
            .path
            .canonicalize()
            .unwrap_or_else(|_| config.path.clone());
        let direct_io = !MEMORY_FILE_SYSTEMS.contains(&file_system.as_str()) && takes_direct(&root);
        let mut share = Share {
            config: config.clone(),
            lacks: lacks_mount(&real, &mount_point),
            real,
            held: Mutex::new(Some(Held {
                root: Arc::new(root),
                flush_with: None,
            })),
            mount: status.mount,
            identity: identity_of(&config.path).ok(),
            st_dev: status.key.device,
            inode: status.key.inode,
            mount_point,
            file_system,
            direct_io,
            reserves: Reserves::Never("it has no direct I/O"),
            unwatchable: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
        };
        if direct_io {
            let root = share.readable_root().map_err(fail)?;
            share.reserves = Reserves::of(&root);
            let is_to_flush = share.reserves == Reserves::Extents;
            if let Some(held) = share.held().as_mut().filter(|_| is_to_flush) {
                held.flush_with = space::unnamed(&root).ok().map(Arc::new);
            }
        }
        Ok(share)
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        // No change of it takes two steps, so it is consistent after a panic.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors   ESTALE: after [`Share::let_go`]
    fn root(&self) -> io::Result<Arc<OwnedFd>> {
        let root = self.held().as_ref().map(|held| held.root.clone());
        root.ok_or_else(|| rustix::io::Errno::STALE.into())
    }

    /// The descriptor whose sync makes the drive flush its cache.
    pub(crate) fn flush_with(&self) -> Option<Arc<OwnedFd>> {
        self.held().as_ref()?.flush_with.clone()
    }

    /// Its path leads elsewhere: no further file of it is opened, and open files are closed when
    /// they are not needed any more.
    pub(crate) fn let_go(&self) {
        self.is_left.store(true, Ordering::Relaxed);
        *self.held() = None;
    }

    pub(crate) fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Relaxed)
    }

    pub(crate) fn place(&self) -> Place {
        Place {
            mount: self.mount,
            st_dev: self.st_dev,
            inode: self.inode,
        }
    }

    /// The way of clients' writes to its disk, and the reason.
    pub(crate) fn way(&self, write_buffer_bytes: u64) -> (Way, String) {
        let file_system = &self.file_system;
        match &self.reserves {
            _ if write_buffer_bytes == 0 => (Way::Through, String::from("write.buffer_bytes is 0")),
            Reserves::Extents => (
                Way::Extents,
                format!("{file_system} reserves blocks before bytes (fallocate)"),
            ),
            Reserves::Never(why) => (Way::Through, format!("{file_system}: {why}")),
            Reserves::Full(why) | Reserves::Untried(why) => {
                (Way::Unknown, format!("it could not be tried: {why}"))
            }
        }
    }

    /// The folder itself, for reading its names.
    pub(crate) fn readable_root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(self.root()?, ".", flags, Mode::empty())?)
    }

    /// The folder of the file that was opened as `path`, if that is still the file `key`.
    ///
    /// Errors   ESTALE: another file has that name now; ENOENT: none has; otherwise as openat2(2)
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
        let folder = openat2(self.root()?, parent, flags, Mode::empty(), resolve)?;
        let found = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if found.st_dev != key.device || found.st_ino != key.inode {
            return Err(rustix::io::Errno::STALE.into());
        }
        Ok(folder)
    }
}

/// Whether a file without a name can be opened for direct I/O. True also where none can be made,
/// such as on a read-only mount: each file then shows it.
fn takes_direct(root: &OwnedFd) -> bool {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let private = Mode::RUSR | Mode::WUSR;
    match rustix::fs::openat(root, ".", flags | OFlags::DIRECT, private) {
        Ok(_) => true,
        Err(rustix::io::Errno::INVAL) => rustix::fs::openat(root, ".", flags, private).is_err(),
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
