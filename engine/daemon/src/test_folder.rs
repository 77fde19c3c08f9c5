// SPDX-License-Identifier: Apache-2.0
//! A folder for a unit test, on the file system of lanes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// Deleted with its owner.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = format!("/dev/shm/rushes-daemon-{}-{number}", std::process::id());
        std::fs::create_dir(&path).expect("a folder of our own");
        Folder(path.into())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
