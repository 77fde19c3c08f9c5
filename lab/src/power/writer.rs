// SPDX-License-Identifier: Apache-2.0
//! Performs the steps: a [`Writer`] for each lane, of a [`Host`] for each recording. A writer
//! returns from a step when that is acknowledged, and makes no promise itself.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use anyhow::Result;
use rustix::fs::{Advice, FallocateFlags, OFlags};

use super::script::Step;
use super::sector::content;

/// The layer between lanes and the file system during a recording.
pub trait Host: Sync {
    /// Makes the writer of one lane, in the thread that will use it.
    fn writer(&self) -> Result<Box<dyn Writer + '_>>;

    /// Writes all buffered bytes to the file system, when all lanes have ended.
    fn close(self: Box<Self>) -> Result<Told>;
}

/// A host's counts of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Writes that a server took.
    pub writes_served: u64,
    /// Writes that it left to the lanes.
    pub writes_plain: u64,
    /// Files of a pool that lay in more than one segment at the end.
    pub files_in_pieces: u64,
    /// Files of a pool that were striped then.
    pub files_striped: u64,
    /// How often the lab filled, drained or tidied a member of a pool meanwhile.
    pub disturbances: u64,
}

/// A way to the file system, such as a door under test.
pub trait Writer {
    /// Performs the step of this number; returns when the step is acknowledged.
    fn act(&mut self, number: usize, step: &Step) -> io::Result<()>;
}

/// A host without a server: lanes work on the file system mounted at this path.
#[derive(Debug)]
pub struct Nobody(pub PathBuf);

impl Host for Nobody {
    fn writer(&self) -> Result<Box<dyn Writer + '_>> {
        Ok(Box::new(Plain::new(self.0.clone())))
    }

    fn close(self: Box<Self>) -> Result<Told> {
        Ok(Told::default())
    }
}

/// Plain system calls on the mounted file system.
#[derive(Debug)]
pub struct Plain {
    root: PathBuf,
    open: HashMap<u64, File>,
    /// Path of each file, to open it once more.
    paths: HashMap<u64, PathBuf>,
}

impl Plain {
    /// A writer on the file system mounted at `root`.
    pub fn new(root: PathBuf) -> Plain {
        Plain {
            root,
            open: HashMap::new(),
            paths: HashMap::new(),
        }
    }

    /// Closes a file and opens it again, as programs do after they have saved it.
    pub(super) fn open_again(&mut self, file: u64) -> io::Result<()> {
        self.open.remove(&file);
        let path = self.paths.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let again = OpenOptions::new().read(true).write(true).open(path)?;
        self.open.insert(file, again);
        Ok(())
    }

    fn file(&self, file: u64) -> io::Result<&File> {
        self.open
            .get(&file)
            .ok_or_else(|| io::Error::other(format!("file {file:#x} is not open")))
    }

    fn write_through(&self, file: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
        let path = self.paths.get(&file).ok_or(io::ErrorKind::NotFound)?;
        OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::DSYNC.bits() as i32)
            .open(path)?
            .write_all_at(bytes, offset)
    }

    fn write_direct(&self, file: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
        const PAGE: usize = 4096;
        let mut memory = vec![0u8; bytes.len() + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let aligned = &mut memory[start..start + bytes.len()];
        aligned.copy_from_slice(bytes);
        let path = self.paths.get(&file).ok_or(io::ErrorKind::NotFound)?;
        OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(path)?
            .write_all_at(aligned, offset)
    }
}

impl Writer for Plain {
    fn act(&mut self, number: usize, step: &Step) -> io::Result<()> {
        match step {
            Step::MakeFolder { path } => fs::create_dir(self.root.join(path))?,
            Step::Create { file, path } => {
                let path = self.root.join(path);
                let new = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .open(&path)?;
                self.open.insert(*file, new);
                self.paths.insert(*file, path);
            }
            &Step::Write {
                file,
                offset,
                length,
                direct,
            } => {
                let bytes = content(file, number as u64 + 1, offset, length);
                if direct {
                    self.write_direct(file, &bytes, offset)?;
                } else {
                    self.file(file)?.write_all_at(&bytes, offset)?;
                }
            }
            &Step::WriteThrough {
                file,
                offset,
                length,
            } => {
                let bytes = content(file, number as u64 + 1, offset, length);
                // O_DSYNC covers the bytes of its own write; the step is a sync of the file.
                self.file(file)?.sync_data()?;
                self.write_through(file, &bytes, offset)?;
            }
            Step::Truncate { file, size } => self.file(*file)?.set_len(*size)?,
            &Step::Punch {
                file,
                offset,
                length,
            } => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(self.file(file)?, flags, offset, length)?;
            }
            &Step::Reserve {
                file,
                offset,
                length,
            } => {
                let flags = FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(self.file(file)?, flags, offset, length)?;
            }
            Step::Sync { file, data_only } if *data_only => self.file(*file)?.sync_data()?,
            Step::Sync { file, .. } => self.file(*file)?.sync_all()?,
            Step::SyncFolder { path } => File::open(self.root.join(path))?.sync_all()?,
            Step::SyncAll => rustix::fs::syncfs(File::open(&self.root)?)?,
            // The kernel begins to write dirty pages that are dropped, and does not wait for them.
            Step::LetGo { file } => {
                rustix::fs::fadvise(self.file(*file)?, 0, None, Advice::DontNeed)?;
            }
            Step::Rename { file, from, to } => {
                let to = self.root.join(to);
                fs::rename(self.root.join(from), &to)?;
                self.paths.insert(*file, to);
            }
            Step::Unlink { file, path } => {
                fs::remove_file(self.root.join(path))?;
                self.open.remove(file);
            }
        }
        Ok(())
    }
}
