// SPDX-License-Identifier: Apache-2.0
//! The state after a cut: images that the kernel mounts and recovers, read whole; a pool also by
//! way of our own tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::check::{Finding, Rule, Tree};
use super::mounted::{Mounted, Place, read_tree, run, unmount_all};
use super::pooled::PoolGround;
use crate::disk::FileSystem;
use crate::stage::room::Room;

/// The contents that came back after a cut.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The tree as read; of a pool that fsck mended after a first mount, before and after. Empty:
    /// it was unreadable.
    pub trees: Vec<Tree>,
    /// Files without a name that fsck moved to `lost+found`.
    pub orphans: Tree,
    /// Misfits of a pool that fsck mended.
    pub mended: u64,
    /// Faults found on the way.
    pub complaints: Vec<Finding>,
}

/// How to read the images.
#[derive(Clone, Copy, Debug)]
pub struct Looking<'a> {
    /// The file system on each image, and its mount point.
    pub places: &'a [Place],
    /// The pool whose disks they are; `None`: plain.
    pub pool: Option<&'a PoolGround>,
    /// fsck mends the pool before the mount; else the pool is mounted as it is.
    pub mend_first: bool,
    /// The file systems' own checkers run as well.
    pub fsck: bool,
}

/// The folder for images.
///
/// Each image is a file of its own: mount may reuse a loop device over the same file that another
/// process kept open, and no cached state of one point may reach the next.
#[derive(Debug)]
pub struct Scratch {
    folder: PathBuf,
    count: u64,
}

impl Scratch {
    /// Makes it in this room.
    pub fn new(room: &Room) -> Scratch {
        Scratch {
            folder: room.path().to_owned(),
            count: 0,
        }
    }

    /// Lets the kernel recover images, and reads all files.
    ///
    /// Errors   of the experiment; faults of the recovered state are in the answer
    pub fn recover(&mut self, images: &[Vec<u8>], how: Looking) -> Result<Recovered> {
        self.count += 1;
        let path = |number| self.folder.join(format!("cut-{}-{number}.img", self.count));
        let paths: Vec<PathBuf> = (0..images.len()).map(path).collect();
        for (path, image) in paths.iter().zip(images) {
            fs::write(path, image)
                .with_context(|| format!("{} cannot be written", path.display()))?;
        }
        let recovered = look_at(&paths, how)?;
        for path in &paths {
            fs::remove_file(path)?;
        }
        Ok(recovered)
    }
}

fn look_at(images: &[PathBuf], how: Looking) -> Result<Recovered> {
    let mount = |(place, image): (&Place, &PathBuf)| place.mount(image, true);
    let mounted: Result<Vec<Mounted>> = how.places.iter().zip(images).map(mount).collect();
    let mounted = match mounted {
        Ok(mounted) => mounted,
        Err(error) => {
            return Ok(Recovered {
                complaints: vec![unreadable("a file system that mounts", &error)],
                ..Recovered::default()
            });
        }
    };
    let mut recovered = match how.pool {
        Some(pool) => pool.recover(how.mend_first)?,
        None => Recovered {
            trees: vec![read_tree(&how.places[0].point)],
            ..Recovered::default()
        },
    };
    unmount_all(mounted)?;
    if how.fsck {
        let images = how.places.iter().zip(images);
        let complaints = images.filter_map(|(place, image)| complaint(place.how.kind, image));
        recovered.complaints.extend(complaints);
    }
    Ok(recovered)
}

/// The finding of a file system or a pool that could not be mounted or read.
pub fn unreadable(expected: &str, error: &anyhow::Error) -> Finding {
    Finding {
        rule: Rule::Unreadable,
        path: String::from("/"),
        file: 0,
        expected: expected.to_owned(),
        read: format!("{error:#}"),
    }
}

/// The finding of the file system's own checker, if it has one.
fn complaint(kind: FileSystem, image: &Path) -> Option<Finding> {
    let mut command = match kind {
        FileSystem::Ext4 => {
            let mut command = Command::new("e2fsck");
            command.arg("-fn");
            command
        }
        FileSystem::Xfs => {
            let mut command = Command::new("xfs_repair");
            command.args(["-n", "-f"]);
            command
        }
    };
    let error = run(command.arg(image)).err()?;
    Some(Finding {
        rule: Rule::Inconsistent,
        path: String::from("/"),
        file: 0,
        expected: String::from("nothing to repair after recovery"),
        read: format!("{error:#}"),
    })
}
