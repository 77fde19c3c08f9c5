// SPDX-License-Identifier: Apache-2.0
//! The mount that is exported, and whether it still is the one that a server has open.
//!
//! A mount whose process ended answers every call with an error, for ever; a new one at the same place is another file system to who
//! has the old one open. It is asked from a thread of its own: a mount that waits for a disk must not keep us from stopping.

use crate::error::ExportError;
use rushes_pool::{Pool, PoolId};
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
    /// The mount of a pool that this path is in.
    ///
    /// Errors   Refused where no pool is mounted
    pub fn of(path: &Path) -> Result<Mount, ExportError> {
        let real = path
            .canonicalize()
            .map_err(|error| ExportError::at("open", path, error))?;
        let all =
            rushes_pool::mounted().map_err(|error| ExportError::refused(error.to_string()))?;
        let mounted = all
            .into_iter()
            .filter(|mounted| real.starts_with(&mounted.mount))
            .max_by_key(|mounted| mounted.mount.as_os_str().len())
            .ok_or_else(|| {
                ExportError::refused(format!(
                    "{} is in no pool that is mounted here; expected the folder of `rushes pool mount`, or something in it",
                    path.display()
                ))
            })?;
        let pool = Pool::look(&mounted.catalogue)
            .map_err(|error| ExportError::refused(error.to_string()))?;
        Ok(Mount {
            folder: mounted.mount,
            catalogue: mounted.catalogue,
            pool: pool.id(),
        })
    }

    /// Where it is mounted.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Of its pool.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Handles that clients keep are good after a restart only where the catalogue's file system finds an inode by its number.
    pub(crate) fn has_lasting_handles(&self) -> bool {
        rustix::fs::statfs(&self.catalogue).is_ok_and(|found| found.f_type == EXT4_MAGIC)
    }

    /// Its device number, which no other mount has as long as somebody has this one open. 0: it is not there.
    ///
    /// Waits as long as the mount does
    fn device(&self) -> u64 {
        // A stat is answered from the kernel's memory also when nobody is behind it.
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

    /// Begin to look at it now and then.
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

/// What was last seen of a mount.
pub(crate) struct Watch {
    device: Arc<AtomicU64>,
}

impl Watch {
    /// None: nothing is mounted, or nobody answers.
    pub(crate) fn device(&self) -> Option<u64> {
        match self.device.load(Ordering::Acquire) {
            0 => None,
            device => Some(device),
        }
    }
}
