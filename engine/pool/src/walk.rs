// SPDX-License-Identifier: Apache-2.0
//! A look at every name of the catalogue's tree, of any depth, without following links or leaving
//! its file system.

use crate::catalogue::Catalogue;
use crate::error::PoolError;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, statat,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Opened of a path at a time; PATH_MAX is 4096. Units: bytes.
const STEP_BYTES: usize = 2048;

/// A name that the walk has found.
#[derive(Debug)]
pub(crate) struct Named<'a> {
    /// From the root of the tree.
    pub(crate) path: &'a Path,
    /// The folder it is in, and that one's inode number.
    pub(crate) folder: BorrowedFd<'a>,
    pub(crate) folder_inode: u64,
    pub(crate) name: &'a OsStr,
    pub(crate) status: &'a Stat,
    pub(crate) kind: FileType,
}

impl Named<'_> {
    /// Open it to read; for regular files and folders.
    pub(crate) fn open(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        openat(self.folder, self.name, flags, Mode::empty())
    }
}

/// Each regular file of the tree once, by the first of its names that the walk finds, open to read.
/// `linked` has the inode numbers of those with several names, also of those that it found before.
pub(crate) fn each_stub(
    catalogue: &Catalogue,
    linked: &mut BTreeSet<u64>,
    mut each: impl FnMut(&Named<'_>, &OwnedFd) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    stubs_from(catalogue, PathBuf::new(), linked, |named, stub| {
        each(named, &stub?)
    })
}

fn stubs_from(
    catalogue: &Catalogue,
    start: PathBuf,
    linked: &mut BTreeSet<u64>,
    mut each: impl FnMut(&Named<'_>, Result<OwnedFd, PoolError>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    walk_from(catalogue, start, |named| {
        if named.kind != FileType::RegularFile
            || (named.status.st_nlink > 1 && !linked.insert(named.status.st_ino))
        {
            return Ok(());
        }
        match named.open() {
            // It has another name by now, or none.
            Err(Errno::NOENT) => Ok(()),
            opened => each(
                named,
                opened.map_err(|error| {
                    PoolError::system("open", named.path.display().to_string(), error)
                }),
            ),
        }
    })
}

/// As [`each_stub`], for a path below the tree: a regular file, or all in a folder. `each` also
/// gets the error of a file that does not open.
pub(crate) fn each_stub_below(
    catalogue: &Catalogue,
    below: &Path,
    linked: &mut BTreeSet<u64>,
    mut each: impl FnMut(&Path, Result<OwnedFd, PoolError>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let failed = |error| PoolError::system("open", below.display().to_string(), error);
    if !below.as_os_str().is_empty() {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let found = open_below(catalogue.tree(), below, flags).map_err(failed)?;
        let status = fstat(&found).map_err(failed)?;
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile if status.st_nlink > 1 && !linked.insert(status.st_ino) => {
                return Ok(());
            }
            FileType::RegularFile => return each(below, Ok(found)),
            _ => {}
        }
    }
    stubs_from(catalogue, below.to_path_buf(), linked, |named, stub| {
        each(named.path, stub)
    })
}

/// Open something below a folder by a path of any length, without following a link in any part of
/// it.
pub(crate) fn open_below(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let into = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let mut here: Option<OwnedFd> = None;
    let mut step = PathBuf::new();
    for part in path.components() {
        if step.as_os_str().len() + part.as_os_str().len() > STEP_BYTES {
            let from = here.as_ref().map_or(root, |fd| fd.as_fd());
            here = Some(openat2(from, &step, into, Mode::empty(), resolve)?);
            step = PathBuf::new();
        }
        step.push(part);
    }
    if step.as_os_str().is_empty() {
        step.push(".");
    }
    let from = here.as_ref().map_or(root, |fd| fd.as_fd());
    openat2(from, &step, flags, Mode::empty(), resolve)
}

/// Call `visit` for every name in the tree, for a folder before its contents. It may miss names
/// that come or go meanwhile, and the contents of a folder that is renamed meanwhile.
pub(crate) fn walk(
    catalogue: &Catalogue,
    visit: impl FnMut(&Named<'_>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    walk_from(catalogue, PathBuf::new(), visit)
}

fn walk_from(
    catalogue: &Catalogue,
    start: PathBuf,
    mut visit: impl FnMut(&Named<'_>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let root = catalogue.tree();
    let failed = |path: &Path, error: Errno| {
        PoolError::system("look through", path.display().to_string(), error)
    };
    let device = fstat(root)
        .map_err(|error| failed(Path::new(""), error))?
        .st_dev;
    let mut waiting = vec![start];
    while let Some(path) = waiting.pop() {
        let folder = match open_below(root, &path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(folder) => folder,
            // It is gone, or something else has its name.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            Err(error) => return Err(failed(&path, error)),
        };
        let folder_inode = fstat(&folder).map_err(|error| failed(&path, error))?.st_ino;
        for entry in Dir::read_from(&folder).map_err(|error| failed(&path, error))? {
            let entry = entry.map_err(|error| failed(&path, error))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let below = path.join(name);
            let status = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(status) => status,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed(&below, error)),
            };
            if status.st_dev != device {
                continue;
            }
            let kind = FileType::from_raw_mode(status.st_mode);
            visit(&Named {
                path: &below,
                folder: folder.as_fd(),
                folder_inode,
                name,
                status: &status,
                kind,
            })?;
            if kind == FileType::Directory {
                waiting.push(below);
            }
        }
    }
    Ok(())
}
