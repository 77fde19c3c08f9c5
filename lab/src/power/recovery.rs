// SPDX-License-Identifier: Apache-2.0
//! The state after a cut: images that the kernel mounts and recovers, read whole; of a pool, what
//! our own tools make of them.

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
    /// As it was read, once or again after it was mended; none: it could not be.
    pub trees: Vec<Tree>,
    /// Files without a name that were put aside.
    pub orphans: Tree,
    /// The misfits in a pool that were mended.
    pub mended: u64,
    /// The faults of all of it.
    pub complaints: Vec<Finding>,
}

/// How to look at it.
#[derive(Clone, Copy, Debug)]
pub struct Looking<'a> {
    /// The file system on each image, and where it is mounted.
    pub places: &'a [Place],
    /// They are a pool's.
    pub pool: Option<&'a PoolGround>,
    /// The pool is mended before anybody mounts it; else it is mounted as it is.
    pub mend_first: bool,
    /// The file systems' own checkers look as well.
    pub fsck: bool,
}

/// Where images are made and mounted.
///
/// Each is a file of its own: mount may take a loop device again that somebody has kept open over
/// the same file, and nothing that the kernel remembers of one point may reach the next.
#[derive(Debug)]
pub struct Scratch {
    folder: PathBuf,
    count: u64,
}

impl Scratch {
    /// In this room.
    pub fn new(room: &Room) -> Scratch {
        Scratch {
            folder: room.path().to_owned(),
            count: 0,
        }
    }

    /// Lets the kernel recover images, and reads all of it.
    ///
    /// Errors   of the experiment; what is wrong with what came back is in the answer
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

/// Something that could not even be looked at.
pub fn unreadable(expected: &str, error: &anyhow::Error) -> Finding {
    Finding {
        rule: Rule::Unreadable,
        path: String::from("/"),
        file: 0,
        expected: expected.to_owned(),
        read: format!("{error:#}"),
    }
}

/// The complaint of the file system's own checker.
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
