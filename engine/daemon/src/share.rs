// SPDX-License-Identifier: Apache-2.0
//! A share's folder, held open, and what lies below it.
//!
//! The folder is opened once; everything below is then reached from this descriptor, so that
//! renaming or mounting over the path later changes nothing unseen. When the path leads to another
//! mount, the share is opened anew, as another [`Share`] (see moves.rs): nothing of the former one
//! is used for it.

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
    /// None: let go of.
    held: Mutex<Option<Held>>,
    pub(crate) mount: MountId,
    /// By which a calibration is known to be of its device. None: it could not be found out.
    pub(crate) identity: Option<Identity>,
    /// `st_dev` of the folder.
    pub(crate) st_dev: u64,
    inode: u64,
    /// The folder on which that mount lies; empty when the kernel's table does not say.
    pub(crate) mount_point: PathBuf,
    /// The folder on which another file system is to be mounted, as /etc/fstab has it, and is not.
    pub(crate) lacks: Option<PathBuf>,
    /// Kind, as the kernel calls it.
    pub(crate) file_system: String,
    pub(crate) direct_io: bool,
    /// As found by trying when it was opened.
    pub(crate) reserves: Reserves,
    /// Set when the file system turns out not to let its files be watched.
    pub(crate) unwatchable: AtomicBool,
    /// The path leads elsewhere by now.
    is_left: AtomicBool,
}

/// The descriptors that keep a share's mount in use beside its files.
#[derive(Clone, Debug)]
struct Held {
    /// O_PATH.
    root: Arc<OwnedFd>,
    /// A file without a name and without bytes: to sync it is to have the drive bring what it has
    /// in its memory to the medium.
    flush_with: Option<Arc<OwnedFd>>,
}

/// Which folder a path leads to, and by which mount.
///
/// Numbers of mounts and inodes are used again: it means the same folder only while that is held
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

/// How what clients write to a share gets to its disk. Each file may still go the second way: see
/// `space::NotOurs`.
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
    /// Where it is at home: on the mount of the deepest folder, of those on which it has lain. And
    /// that one's device, by name.
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
        // Nothing in it is changed in two steps.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors   ESTALE: it was let go of
    fn root(&self) -> io::Result<Arc<OwnedFd>> {
        let root = self.held().as_ref().map(|held| held.root.clone());
        root.ok_or_else(|| rustix::io::Errno::STALE.into())
    }

    /// The descriptor to sync for the drive to flush its cache.
    pub(crate) fn flush_with(&self) -> Option<Arc<OwnedFd>> {
        self.held().as_ref()?.flush_with.clone()
    }

    /// Its path leads elsewhere: what is open of it is closed when it is not needed any more, and
    /// nothing is opened.
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
        let folder = openat2(self.root()?, parent, flags, Mode::empty(), resolve)?;
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
