// SPDX-License-Identifier: Apache-2.0
//! The exported mount, and whether it still is the one that a server has open.
//!
//! A mount whose process ended answers every call with an error, for ever; to a server that has the
//! old one open, a new mount on the same folder is another file system. A thread of its own asks
//! the mount: one that waits for a disk must not delay the stop.

use crate::error::ExportError;
use crate::refusal::MountRefusal;
use rushes_pool::{Pool, PoolId};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fstat, openat2, stat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(200);

/// ext4's number in statfs(2).
const EXT4_MAGIC: i64 = 0xEF53;

/// A pool's mount.
#[derive(Clone, Debug)]
pub struct Mount {
    folder: PathBuf,
    catalogue: PathBuf,
    pool: PoolId,
}

impl Mount {
    /// The mount of the pool in which this path lies.
    ///
    /// Errors   Refused if no pool is mounted there
    pub fn of(path: &Path) -> Result<Mount, ExportError> {
        let real = path
            .canonicalize()
            .map_err(|error| ExportError::at("open", path, error))?;
        let all = rushes_pool::mounted()?;
        let mounted = all
            .into_iter()
            .filter(|mounted| real.starts_with(&mounted.mount))
            .max_by_key(|mounted| mounted.mount.as_os_str().len())
            .ok_or_else(|| MountRefusal::InNoPool(path.to_path_buf()))?;
        let pool = Pool::look(&mounted.catalogue)?;
        Ok(Mount {
            folder: mounted.mount,
            catalogue: mounted.catalogue,
            pool: pool.id(),
        })
    }

    /// The folder on which it is mounted.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A part for names that differs for each exported file or folder, also if their names are the
    /// same: 8 hexadecimal digits.
    pub fn label(&self, path: &Path) -> String {
        let below = path.strip_prefix(&self.folder).unwrap_or(path);
        // FNV-1a
        let mixed = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        let pool = self.pool.0.to_le_bytes();
        let bytes = pool.iter().chain(below.as_os_str().as_bytes());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, mixed);
        format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
    }

    /// Opens the exported file or folder as it was when the export began: a user with write access
    /// there may since have replaced it by a link to any file of this machine, and its server is
    /// root.
    pub(crate) fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, ExportError> {
        open_inside(&self.folder, path, flags)
    }

    /// Its pool's id.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Handles that clients keep stay valid over a restart only if the catalogue's file system
    /// finds an inode by its number.
    pub(crate) fn has_lasting_handles(&self) -> bool {
        rustix::fs::statfs(&self.catalogue).is_ok_and(|found| found.f_type == EXT4_MAGIC)
    }

    /// Its device number, which no other mount has as long as this one is open. 0: it is missing.
    ///
    /// Waits as long as the mount does
    fn device(&self) -> u64 {
        // The kernel answers stat from its memory even if no process serves the mount.
        if rustix::fs::statfs(&self.folder).is_err() {
            return 0;
        }
        let is_ours = rushes_pool::mounted().is_ok_and(|all| {
            all.iter()
                .any(|mounted| mounted.mount == self.folder && mounted.catalogue == self.catalogue)
        });
        match rustix::fs::stat(&self.folder) {
            Ok(found) if is_ours => found.st_dev,
            _ => 0,
        }
    }

    /// Starts to look at it regularly.
    pub(crate) fn watch(&self) -> Result<Watch, ExportError> {
        let device = Arc::new(AtomicU64::new(self.device()));
        let (seen, mount) = (Arc::downgrade(&device), self.clone());
        std::thread::Builder::new()
            .name("mount-watch".to_owned())
            .spawn(move || mount.look_again(&seen))
            .map_err(|source| ExportError::System {
                what: String::from("start a thread"),
                source,
            })?;
        Ok(Watch { device })
    }

    fn look_again(&self, seen: &Weak<AtomicU64>) {
        loop {
            let device = self.device();
            match seen.upgrade() {
                Some(seen) => seen.store(device, Ordering::Release),
                None => return,
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// The mount at the last look.
pub(crate) struct Watch {
    device: Arc<AtomicU64>,
}

impl Watch {
    /// None: nothing is mounted, or no process serves the mount.
    pub(crate) fn device(&self) -> Option<u64> {
        match self.device.load(Ordering::Acquire) {
            0 => None,
            device => Some(device),
        }
    }
}

/// Opens a path without links, on the same file system as `folder`.
///
/// Errors   Refused: a part of it is a link, or it is on another file system
fn open_inside(folder: &Path, path: &Path, flags: OFlags) -> Result<OwnedFd, ExportError> {
    let failed = |error| match error {
        Errno::LOOP => MountRefusal::ThroughLink(path.to_path_buf()).into(),
        error => ExportError::at("open", path, error),
    };
    let flags = flags | OFlags::CLOEXEC;
    let fd = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).map_err(failed)?;
    let (found, own) = (fstat(&fd).map_err(failed)?, stat(folder).map_err(failed)?);
    match found.st_dev == own.st_dev {
        true => Ok(fd),
        false => {
            let (path, folder) = (path.to_path_buf(), folder.to_path_buf());
            Err(MountRefusal::NotInMount { path, folder }.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(folder: &str, pool: u128) -> Mount {
        Mount {
            folder: PathBuf::from(folder),
            catalogue: PathBuf::from("/catalogue"),
            pool: PoolId(pool),
        }
    }

    #[test]
    fn what_is_called_the_same_has_another_label_and_a_pool_keeps_its_own() {
        let (a, b) = (mount("/a/media", 1), mount("/b/media", 2));
        let label = a.label(Path::new("/a/media"));
        assert_eq!(label.len(), 8);
        assert_ne!(label, b.label(Path::new("/b/media")));
        assert_ne!(label, a.label(Path::new("/a/media/x/media")));
        assert_ne!(
            a.label(Path::new("/a/media/x/disk")),
            a.label(Path::new("/a/media/y/disk"))
        );
        let elsewhere = mount("/c", 1);
        assert_eq!(
            a.label(Path::new("/a/media/disk")),
            elsewhere.label(Path::new("/c/disk"))
        );
    }

    #[test]
    fn what_became_a_link_or_is_elsewhere_is_not_opened() {
        let own = std::env::temp_dir().join(format!("rushes-export.{}", std::process::id()));
        let own = own.as_path();
        std::fs::create_dir_all(own.join("folder")).expect("made");
        let own = own.canonicalize().expect("it is there");
        std::fs::write(own.join("folder/disk"), "bytes").expect("made");
        std::os::unix::fs::symlink("folder", own.join("way")).expect("made");
        std::os::unix::fs::symlink("disk", own.join("folder/link")).expect("made");
        let opened = |path: &Path| open_inside(&own, path, OFlags::RDONLY).map(drop);
        opened(&own.join("folder/disk")).expect("it is a file");
        for link in ["way/disk", "folder/link"] {
            let error = opened(&own.join(link)).expect_err("a link");
            assert!(error.to_string().contains("is a symbolic link"), "{error}");
        }
        let error = opened(Path::new("/proc/version")).expect_err("elsewhere");
        assert!(error.to_string().contains("is not in the mount"), "{error}");
        std::fs::remove_dir_all(own).expect("ours");
    }
}
