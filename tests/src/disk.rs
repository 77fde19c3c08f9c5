// SPDX-License-Identifier: Apache-2.0
//! A file system to serve from: ext4 in an image over a loop device, so that direct I/O and extents are real.

use crate::scratch::Scratch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system in a scratch folder; the folder unmounts it.
#[derive(Debug)]
pub struct Disk {
    mount: PathBuf,
}

impl Disk {
    /// Make and mount an ext4 of this size.
    pub fn ext4(scratch: &Scratch, bytes: u64) -> Disk {
        let image = scratch.path().join("disk.img");
        File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .expect("the temporary folder takes a sparse image");
        run(Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0"])
            .arg(&image));
        let mount = scratch.folder("disk");
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&mount));
        Disk { mount }
    }

    /// A tmpfs, which has no direct I/O.
    pub fn tmpfs(scratch: &Scratch, bytes: u64) -> Disk {
        let mount = scratch.folder("disk");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o"])
            .arg(format!("size={bytes}"))
            .arg("tmpfs")
            .arg(&mount));
        Disk { mount }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Everything written is on the disk, and the kernel has forgotten what it cached of it.
    pub fn make_cold(&self) {
        run(Command::new("sync").arg("-f").arg(&self.mount));
        // Clean pages only; harmless to others but for speed.
        fs::write("/proc/sys/vm/drop_caches", "1").expect("root may drop caches");
    }
}

/// Run to the end.
///
/// Panics   with its error output when it fails
pub fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}
