// SPDX-License-Identifier: Apache-2.0
//! A file system to serve from: ext4 in an image over a loop device, so that direct I/O and extents
//! are real; or on the lab's slow disk, which fails and stalls when it is told.

use crate::needs;
use crate::scratch::Scratch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A mounted file system in a scratch folder.
#[derive(Debug)]
pub struct Disk {
    mount: PathBuf,
    /// Name of the slow disk below it.
    slow: Option<String>,
}

impl Disk {
    /// Make and mount an ext4 of this size.
    pub fn ext4(scratch: &Scratch, bytes: u64) -> Disk {
        Disk::made(scratch, &["mkfs.ext4", "-q", "-F", "-m", "0"], bytes)
    }

    /// Make and mount what this command makes of an image of this size.
    pub fn made(scratch: &Scratch, mkfs: &[&str], bytes: u64) -> Disk {
        let image = scratch.path().join("disk.img");
        File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .expect("the temporary folder takes a sparse image");
        run(Command::new(needs::path_of(mkfs[0]))
            .args(&mkfs[1..])
            .arg(&image));
        let mount = scratch.folder("disk");
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&mount));
        Disk { mount, slow: None }
    }

    /// Make and mount an XFS of blocks of 16 KiB on a disk of such, which takes no smaller direct
    /// request (Linux 6.12). None: this kernel has no such disks.
    pub fn large_blocks(scratch: &Scratch, bytes: u64) -> Option<Disk> {
        let image = scratch.path().join("disk.img");
        File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .expect("the temporary folder takes a sparse image");
        let device = attach(&image, &["--sector-size", "16384"]).ok()?;
        run(Command::new(needs::path_of("mkfs.xfs"))
            .args(["-q", "-f", "-b", "size=16384", "-s", "size=16384"])
            .arg(&device));
        let mount = scratch.folder("disk");
        run(Command::new("mount").arg(&device).arg(&mount));
        // It goes when it is unmounted.
        run(Command::new("losetup").args(["--detach", &device]));
        Some(Disk { mount, slow: None })
    }

    /// A tmpfs, which has no direct I/O.
    pub fn tmpfs(scratch: &Scratch, bytes: u64) -> Disk {
        let mount = scratch.folder("disk");
        mount_tmpfs(&mount, bytes);
        Disk { mount, slow: None }
    }

    /// A tmpfs on a new folder of it. It goes with the scratch folder.
    pub fn mount_tmpfs(&self, folder: &str, bytes: u64) {
        let inner = self.mount.join(folder);
        fs::create_dir(&inner).expect("our own disk");
        mount_tmpfs(&inner, bytes);
    }

    /// An ext4 on the lab's slow disk, its timing off: as fast as memory until it is told
    /// otherwise.
    pub fn slow(scratch: &Scratch, bytes: u64) -> Disk {
        let disk = Disk::modelled(scratch, "ext4", bytes, &[]);
        disk.tell("timing off");
        disk
    }

    /// An XFS on such a disk.
    pub fn slow_xfs(scratch: &Scratch, bytes: u64) -> Disk {
        let disk = Disk::modelled(scratch, "xfs", bytes, &[]);
        disk.tell("timing off");
        disk
    }

    /// The same with a volatile write cache and its timing on: what is not flushed may be gone
    /// after [`Disk::lose_power`].
    pub fn volatile(scratch: &Scratch, bytes: u64) -> Disk {
        Disk::modelled(scratch, "ext4", bytes, &["--write-back"])
    }

    fn modelled(scratch: &Scratch, kind: &str, bytes: u64, more: &[&str]) -> Disk {
        let mount = scratch.folder("disk");
        let name = scratch
            .path()
            .file_name()
            .map(|name| name.to_string_lossy().replace('.', "-"))
            .expect("a scratch folder has a name");
        run(Command::new(needs::path_of("rushes-lab"))
            .args(["disk", "up", &name, "--fs", kind, "--size"])
            .arg(bytes.to_string())
            .arg("--mount")
            .arg(&mount)
            .args(more));
        Disk {
            mount,
            slow: Some(name),
        }
    }

    /// Take a slow disk's power away, and mount what its medium has then elsewhere: its folder. The
    /// disk itself fails everything from now on.
    ///
    /// A copy is mounted: smbd of this test and of others have this disk mounted in name spaces of
    /// their own, and would have the kernel go on with what it remembers.
    pub fn lose_power(&self, scratch: &Scratch, seed: u64) -> PathBuf {
        self.tell(&format!("power off {seed}"));
        let name = self
            .slow
            .as_ref()
            .expect("only a slow disk can be powerless");
        let image = scratch.path().join("medium.img");
        run(Command::new("cp")
            .arg("--sparse=always")
            .arg(format!("/dev/shm/rushes-disk-{name}.img"))
            .arg(&image));
        let mount = scratch.folder("medium");
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&mount));
        mount
    }

    /// Whether it can be told anything.
    pub fn obeys(&self) -> bool {
        self.slow.is_some()
    }

    /// `rushes-lab disk tell`: `fail read START LENGTH`, `stall MS`, `slow FACTOR`, `clear`.
    pub fn tell(&self, words: &str) {
        let name = self.slow.as_ref().expect("only a slow disk can be told");
        run(Command::new(needs::path_of("rushes-lab"))
            .args(["disk", "tell", name])
            .args(words.split(' ')));
    }

    /// Where a file's byte lies on the disk.
    pub fn physical(&self, path: &Path, offset: u64) -> u64 {
        let output = Command::new(needs::path_of("filefrag"))
            .args(["-b1", "-e"])
            .arg(path)
            .output()
            .expect("filefrag comes with e2fsprogs");
        let text = String::from_utf8_lossy(&output.stdout);
        // "   0:        0.. 2097151:   34603008..  36700159: 2097152:             last,eof"
        text.lines()
            .filter_map(|line| {
                let numbers: Vec<u64> = line
                    .split([':', '.', ' '])
                    .filter(|word| !word.is_empty())
                    .map_while(|word| word.parse().ok())
                    .collect();
                match numbers.as_slice() {
                    [_, first, last, physical, ..] if (*first..=*last).contains(&offset) => {
                        Some(physical + (offset - first))
                    }
                    _ => None,
                }
            })
            .next()
            .unwrap_or_else(|| panic!("filefrag names no place for byte {offset}:\n{text}"))
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Everything written is on the disk, and the kernel has forgotten what it cached of it.
    pub fn make_cold(&self) {
        run(Command::new("sync").arg("-f").arg(&self.mount));
        // Clean pages only.
        crate::caches::drop("1");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let Some(name) = &self.slow else { return };
        // Not `run`: a panic while unwinding would hide the reason for the first.
        let down = Command::new(needs::path_of("rushes-lab"))
            .args(["disk", "down", name])
            .output();
        if !down.is_ok_and(|output| output.status.success()) {
            eprintln!(
                "the slow disk {name} could not be taken down; `rushes-lab disk clean` does it"
            );
        }
    }
}

/// The kernel has nothing of a file in its cache but what it has still to write: what a disk did
/// not take is gone. Only of this file: other tests, beside this one, count on what it has of
/// theirs.
pub fn forget(path: &Path) {
    let file = File::open(path).expect("the file is there");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("any file system");
}

/// The same of one that is on its disk first.
pub fn make_cold(path: &Path) {
    run(Command::new("sync").arg("-f").arg(path));
    forget(path);
}

/// A tmpfs of so many bytes on a folder.
pub fn mount_tmpfs(folder: &Path, bytes: u64) {
    run(Command::new("mount")
        .args(["-t", "tmpfs", "-o"])
        .arg(format!("size={bytes}"))
        .arg("tmpfs")
        .arg(folder));
}

/// Attaches a loop device to an image, with these options of losetup. Its path, or the error text
/// of losetup.
pub fn attach(image: &Path, options: &[&str]) -> Result<String, String> {
    let output = Command::new("losetup")
        .args(["--find", "--show"])
        .args(options)
        .arg(image)
        .output()
        .expect("losetup comes with mount");
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        false => Err(said(&output)),
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
        said(&output)
    );
}

/// All that a program has said.
pub fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes))
        .concat()
}
