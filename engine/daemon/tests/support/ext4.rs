// SPDX-License-Identifier: Apache-2.0
//! A small ext4 on a loop device, unmounted and detached at the end.

use super::Folder;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) struct Ext4 {
    pub(crate) folder: Folder,
    pub(crate) device: String,
}

impl Ext4 {
    /// Made and mounted.
    pub(crate) fn new() -> Ext4 {
        let disk = Ext4::unmounted();
        disk.plug();
        disk
    }

    /// Made; the folder for it is there.
    pub(crate) fn unmounted() -> Ext4 {
        let folder = Folder::below(&std::env::temp_dir());
        let image = folder.0.join("image");
        File::create(&image).unwrap().set_len(128 << 20).unwrap();
        run(Command::new("mkfs.ext4").arg("-q").arg(&image));
        let device = run(Command::new("losetup")
            .args(["--find", "--show"])
            .arg(&image));
        std::fs::create_dir(folder.0.join("mnt")).unwrap();
        Ext4 { folder, device }
    }

    pub(crate) fn mount(&self) -> PathBuf {
        self.folder.0.join("mnt")
    }

    pub(crate) fn plug(&self) {
        run(Command::new("mount").arg(&self.device).arg(self.mount()));
    }

    /// Lazy unmount: from its folder at once; the file system, when no process uses it any more.
    pub(crate) fn unplug(&self) {
        run(Command::new("umount").arg("-l").arg(self.mount()));
    }

    /// Kernel name of its device.
    pub(crate) fn name(&self) -> &str {
        self.device.strip_prefix("/dev/").unwrap()
    }

    /// This process, and so the daemon in it, has a file of it open.
    pub(crate) fn is_in_use(&self) -> bool {
        let number = std::fs::metadata(&self.device).unwrap().rdev();
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let mut on_it = open.filter_map(|entry| std::fs::metadata(entry.path()).ok());
        on_it.any(|found| found.dev() == number)
    }

    pub(crate) fn wait_until_unused(&self) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.is_in_use() {
            assert!(Instant::now() < end, "{} stays in use", self.device);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.mount()).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}
