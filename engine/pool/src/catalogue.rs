// SPDX-License-Identifier: Apache-2.0
//! The catalogue: the directory tree of a pool, the stubs on their way out, and the numbers of its
//! files.

use crate::error::PoolError;
use crate::format::{self, CatalogueFormat, Format, FormatFault};
use crate::member::{random, shared_device};
use crate::refusal::{CatalogueRefusal, refused};
use rushes_core::pool::FileIdentity;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, flock, fstat, open, openat,
    openat2, statat, syncfs,
};
use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The folder below which the names are.
pub const TREE: &str = "tree";
/// Stubs without a name in the tree, whose objects are still there.
pub(crate) const REMOVED: &str = "removed";
/// The socket at which the door takes requests.
pub(crate) const SOCKET: &str = "door.sock";
/// Held by the door.
pub(crate) const LOCK: &str = "lock";
/// The first inode number that no door has set aside yet, as text.
pub(crate) const NUMBERS: &str = "numbers";
/// Numbers set aside at a time; the pool never uses those that a dead door had left.
const NUMBERS_AT_A_TIME: u64 = 65_536;

/// An opened catalogue's part in the pool's lock.
#[derive(Debug)]
pub(crate) enum Lock {
    /// None: the caller only looks.
    None,
    /// Take it.
    Take,
    /// This process got it from one that has taken it, and has it still.
    Had(OwnedFd),
}

#[derive(Debug)]
struct Numbers {
    next: u64,
    end: u64,
}

/// An open catalogue.
#[derive(Debug)]
pub struct Catalogue {
    path: PathBuf,
    root: OwnedFd,
    tree: OwnedFd,
    removed: OwnedFd,
    /// None: the caller only looks.
    lock: Option<File>,
    numbers: Mutex<Numbers>,
    generation: u32,
}

impl Catalogue {
    /// It is this process's alone.
    pub(crate) fn has_lock(&self) -> bool {
        self.lock.is_some()
    }

    /// `file`: the name of its format file, which is another one while it is being made anew.
    pub(crate) fn open(
        path: &Path,
        lock: Lock,
        file: &str,
    ) -> Result<(Catalogue, CatalogueFormat), PoolError> {
        let path = path
            .canonicalize()
            .map_err(|error| CatalogueRefusal::NotEntered {
                path: path.to_path_buf(),
                error,
            })?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let failed = |name: &str, error: rustix::io::Errno| match error {
            rustix::io::Errno::ACCESS => CatalogueRefusal::Denied {
                path: path.join(name),
            }
            .into(),
            error => PoolError::system("open", path.join(name).display().to_string(), error),
        };
        let root = open(&path, flags, Mode::empty()).map_err(|error| failed("", error))?;
        let format = match format::read(root.as_fd(), file) {
            Ok(Some(Format::Catalogue(format))) => format,
            Ok(Some(Format::Member(_))) => {
                return refused(CatalogueRefusal::IsMember { path });
            }
            Ok(None) => {
                return refused(match crate::find::mounted_on(&path) {
                    Some(catalogue) => CatalogueRefusal::IsMount { path, catalogue },
                    None => CatalogueRefusal::IsNone { path },
                });
            }
            Err(FormatFault::Failed(error)) => {
                let about = path.join(file).display().to_string();
                return Err(PoolError::system("read", about, error));
            }
            Err(fault @ FormatFault::Wrong(_)) => {
                let file = path.join(file);
                return refused(CatalogueRefusal::Format { file, fault });
            }
        };
        let below = |name: &str| {
            openat(&root, name, flags, Mode::empty()).map_err(|error| failed(name, error))
        };
        let (tree, removed) = (below(TREE)?, below(REMOVED)?);
        let lock = match lock {
            Lock::None => None,
            Lock::Take => Some(take_lock(&root, &path)?),
            Lock::Had(lock) => Some(its_lock(&root, &path, lock)?),
        };
        let numbers = Mutex::new(Numbers { next: 0, end: 0 });
        let generation = random()? as u32;
        let catalogue = Catalogue {
            path,
            root,
            tree,
            removed,
            lock,
            numbers,
            generation,
        };
        Ok((catalogue, format))
    }

    /// The lock, for a process that goes on with it: it is held until all processes that have it
    /// have closed it. None: the caller only looks.
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        self.lock.as_ref().map(File::as_fd)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Equal to that of members on its device.
    pub fn device(&self) -> Result<u64, PoolError> {
        let status = fstat(&self.root).map_err(|error| {
            PoolError::system("look at", self.path.display().to_string(), error)
        })?;
        Ok(shared_device(self.root.as_fd(), status.st_dev))
    }

    /// Open a regular file in the tree, following no symbolic link and leaving the tree by no way.
    ///
    /// Assumes  `below`: relative to the tree's root; empty is that root, which is no file
    pub fn open_file_below(&self, below: &Path) -> Result<OwnedFd, PoolError> {
        let below = if below.as_os_str().is_empty() {
            Path::new(".")
        } else {
            below
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let named = |flags| {
            openat2(
                &self.tree,
                below,
                flags | OFlags::CLOEXEC,
                Mode::empty(),
                resolve,
            )
        };
        let failed = |error| {
            let path = self.path.join(TREE).join(below);
            PoolError::system("open", path.display().to_string(), error)
        };
        // Look first: opening a device uses it.
        let found = named(OFlags::PATH).and_then(fstat).map_err(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return refused(CatalogueRefusal::NotRegular {
                path: self.path.join(TREE).join(below),
            });
        }
        named(OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME).map_err(failed)
    }

    /// Whether a mount has the pool, or a command that changes it.
    pub fn is_served(&self) -> Result<bool, PoolError> {
        if self.lock.is_some() {
            return Ok(true);
        }
        let failed = |error: std::io::Error| {
            PoolError::system("look at", self.path.join(LOCK).display().to_string(), error)
        };
        let inode = match statat(&self.root, LOCK, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(status) => status.st_ino,
            Err(rustix::io::Errno::NOENT) => return Ok(false),
            Err(error) => return Err(failed(error.into())),
        };
        // To try the lock would keep out a door that starts at this moment.
        let device = self.device()?;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let file = format!("{major:02x}:{minor:02x}:{inode}");
        let locks = std::fs::read_to_string("/proc/locks").map_err(failed)?;
        let is_its =
            |line: &str| line.contains(" FLOCK ") && line.split(' ').any(|word| word == file);
        Ok(locks.lines().any(is_its))
    }

    /// There is no name in the tree.
    pub fn is_empty(&self) -> Result<bool, PoolError> {
        let failed =
            |error| PoolError::system("list", self.path.join(TREE).display().to_string(), error);
        let mut names = Dir::read_from(&self.tree).map_err(failed)?;
        let is_name = |name: &CStr| !matches!(name.to_bytes(), b"." | b"..");
        let found = names.find(|entry| {
            entry
                .as_ref()
                .map_or(true, |entry| is_name(entry.file_name()))
        });
        found.transpose().map_err(failed).map(|name| name.is_none())
    }

    /// The root of the tree.
    pub fn tree(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }

    /// Where a door moves a stub instead of taking its last name, and links one that a rename is
    /// about to replace, under any name. [`crate::Pool::bury`] does the rest, also after a crash.
    pub fn removed(&self) -> BorrowedFd<'_> {
        self.removed.as_fd()
    }

    /// Make all changes of names so far durable.
    pub(crate) fn sync(&self) -> Result<(), PoolError> {
        syncfs(&self.root).map_err(|error| {
            PoolError::system("make durable", self.path.display().to_string(), error)
        })
    }

    /// An identity that no file of this pool has or had.
    pub(crate) fn new_file(&self) -> Result<FileIdentity, PoolError> {
        assert!(
            self.lock.is_some(),
            "a pool that is only looked at makes no files"
        );
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if numbers.next == numbers.end {
            *numbers = self.set_aside()?;
        }
        let number = numbers.next;
        numbers.next += 1;
        Ok(FileIdentity {
            number,
            generation: self.generation,
        })
    }

    /// The first number that no door has set aside. None: the file has none.
    pub(crate) fn numbers_end(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.path.join(NUMBERS)).ok()?;
        text.trim().parse().ok().filter(|&next| next > 0)
    }

    /// No number below this one will be given, durably.
    pub(crate) fn set_numbers_end(&self, end: u64) -> Result<(), PoolError> {
        let text = format!("{end}\n");
        format::replace_file(self.root.as_fd(), &self.path, NUMBERS, text.as_bytes())?;
        *self.numbers.lock().unwrap_or_else(PoisonError::into_inner) = Numbers { next: 0, end: 0 };
        Ok(())
    }

    /// Durably: a number is never given twice.
    fn set_aside(&self) -> Result<Numbers, PoolError> {
        let path = self.path.join(NUMBERS);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| PoolError::system("read", path.display().to_string(), error))?;
        let next: u64 = text
            .trim()
            .parse()
            .ok()
            .filter(|&next| next > 0)
            .ok_or_else(|| CatalogueRefusal::Number {
                file: path.clone(),
                text: text.clone(),
            })?;
        let end =
            next.checked_add(NUMBERS_AT_A_TIME)
                .ok_or_else(|| CatalogueRefusal::NumbersUsedUp {
                    file: path.clone(),
                    number: next,
                })?;
        let text = format!("{end}\n");
        format::replace_file(self.root.as_fd(), &self.path, NUMBERS, text.as_bytes())?;
        Ok(Numbers { next, end })
    }
}

fn take_lock(root: &OwnedFd, path: &Path) -> Result<File, PoolError> {
    let failed = |error: std::io::Error| {
        PoolError::system("lock", path.join(LOCK).display().to_string(), error)
    };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd =
        openat(root, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
    let mut file = File::from(fd);
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let _ = (&file).take(200).read_to_string(&mut holder);
            let mut holder = holder.trim().to_owned();
            for mount in crate::find::mounts_of(path).unwrap_or_default() {
                holder += &format!(", mounted on {}", mount.display());
            }
            let catalogue = path.to_path_buf();
            return Err(PoolError::Served { catalogue, holder });
        }
        Err(error) => return Err(failed(error.into())),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "process {}", std::process::id()))
        .map_err(failed)?;
    Ok(file)
}

/// Whether that is this catalogue's lock: the folder may be another one by now.
fn its_lock(root: &OwnedFd, path: &Path, lock: OwnedFd) -> Result<File, PoolError> {
    let failed = |error| PoolError::system("look at", path.join(LOCK).display().to_string(), error);
    let had = fstat(&lock).map_err(failed)?;
    let now = statat(root, LOCK, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if (had.st_dev, had.st_ino) != (now.st_dev, now.st_ino) {
        return refused(CatalogueRefusal::OtherLock {
            file: path.join(LOCK),
        });
    }
    Ok(File::from(lock))
}
