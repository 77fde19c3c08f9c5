// SPDX-License-Identifier: Apache-2.0
//! File systems that are mounted as long as they are in use, and reading their trees after a cut.
//!
//! `mount -o loop` mounts an image: the kernel then detaches the loop device with the mount, so
//! that nothing stays behind even if we are killed and another process unmounts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::UnmountFlags;

use super::check::{Node, Tree};
use crate::disk::FileSystem;

/// How long an unmount of a busy file system is retried.
const PATIENCE: Duration = Duration::from_secs(5);

/// The file system's name for mount.
pub fn name_of(kind: FileSystem) -> &'static str {
    match kind {
        FileSystem::Ext4 => "ext4",
        FileSystem::Xfs => "xfs",
    }
}

/// Runs a tool; the error has its output. Returns its standard output.
pub fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{name} cannot be run"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let (out, complaint) = (said(&output.stdout), said(&output.stderr));
        bail!("{name}: {}: {complaint} {out}", output.status);
    }
    Ok(said(&output.stdout))
}

/// A file system and its mount options.
#[derive(Clone, Debug)]
pub struct How {
    /// Which file system.
    pub kind: FileSystem,
    /// Options beside the usual ones.
    pub options: String,
}

/// A disk's size, its file system, and the mount point, for the lanes and after each cut.
#[derive(Clone, Debug)]
pub struct Place {
    /// File system and mount options.
    pub how: How,
    /// The mount point, an empty folder.
    pub point: PathBuf,
    /// Units: MiB.
    pub mib: u64,
}

impl Place {
    /// Mounts a device there, or with `image` a file.
    pub fn mount(&self, from: &Path, image: bool) -> Result<Mounted> {
        Mounted::new(&self.how, from, &self.point, image)
    }
}

/// Unmounts all, the last first.
pub fn unmount_all(mounted: Vec<Mounted>) -> Result<()> {
    mounted.into_iter().rev().try_for_each(Mounted::unmount)
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub struct Mounted {
    point: Option<PathBuf>,
}

impl Mounted {
    /// Mounts a device, or with `image` a file.
    fn new(how: &How, from: &Path, point: &Path, image: bool) -> Result<Mounted> {
        let mut options = String::from("noatime,nosuid,nodev,noexec");
        if how.kind == FileSystem::Xfs {
            // The recorded disk has the same UUID.
            options.push_str(",nouuid");
        }
        if image {
            options.push_str(",loop");
        }
        if !how.options.is_empty() {
            options = format!("{options},{}", how.options);
        }
        let mut command = Command::new("mount");
        command.args(["-t", name_of(how.kind), "-o", &options]);
        run(command.arg(from).arg(point))?;
        Ok(Mounted {
            point: Some(point.to_owned()),
        })
    }

    /// Unmounts it.
    pub fn unmount(mut self) -> Result<()> {
        match self.point.take() {
            Some(point) => {
                unmount(&point).with_context(|| format!("{} cannot be unmounted", point.display()))
            }
            None => Ok(()),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(point) = self.point.take()
            && unmount(&point).is_err()
        {
            // A process that still uses it must not hold us up.
            let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH);
        }
    }
}

fn unmount(point: &Path) -> io::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match rustix::mount::unmount(point, UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return Ok(other?),
        }
    }
}

/// Reads everything below `root`. An entry that cannot be read is part of the tree.
pub fn read_tree(root: &Path) -> Tree {
    let mut tree = Tree::new();
    read_folder(root, "", &mut tree);
    // mkfs.ext4 makes it.
    if tree.get("lost+found") == Some(&Node::Folder) {
        tree.remove("lost+found");
    }
    tree
}

fn read_folder(root: &Path, folder: &str, tree: &mut Tree) {
    let mut unreadable = |error: io::Error| {
        tree.insert(folder.to_owned(), Node::Unreadable(error.to_string()));
    };
    let entries = match fs::read_dir(root.join(folder)) {
        Ok(entries) => entries,
        Err(error) => return unreadable(error),
    };
    let mut names = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => names.push(entry.file_name().to_string_lossy().into_owned()),
            Err(error) => return unreadable(error),
        }
    }
    for name in names {
        let path = if folder.is_empty() {
            name
        } else {
            format!("{folder}/{name}")
        };
        let whole = root.join(&path);
        let node = fs::symlink_metadata(&whole).and_then(|meta| {
            if meta.is_dir() {
                Ok(Node::Folder)
            } else {
                fs::read(&whole).map(Node::File)
            }
        });
        let node = node.unwrap_or_else(|error| Node::Unreadable(error.to_string()));
        let is_folder = node == Node::Folder;
        tree.insert(path.clone(), node);
        if is_folder {
            read_folder(root, &path, tree);
        }
    }
}
