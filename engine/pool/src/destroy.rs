// SPDX-License-Identifier: Apache-2.0
//! Undoes a create: its folders are no pool any more, and keep only foreign files, mostly none.
//!
//! First the catalogue's format file gets another name: from then on no door can mount it, and the
//! same command goes on. Then destroy deletes the content of the members, each member's own format
//! file last; then the catalogue's folders, and that file under its other name last of all. So
//! nothing of a pool is ever left without a file that says whose it is. This module does not
//! unmount, nor wait for bytes that a daemon has in memory.

use crate::catalogue::{LOCK, Lock, NUMBERS, REMOVED, SOCKET, TREE};
use crate::change::is_add_interrupted;
use crate::create::{OBJECTS, PROBE};
use crate::error::PoolError;
use crate::find::mounts_below;
use crate::format::FORMAT_FILE;
use crate::member::{Member, MemberState, NAMES, mark_of};
use crate::pool::Pool;
use crate::refusal::{MemberRefusal, refused};
use rushes_core::pool::check::Mark;
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, fsync, mkdirat, openat, renameat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The catalogue's format file during a destroy.
const DESTROYING: &str = "rushes-pool.destroying";
/// The other files that a door and the commands leave in a catalogue.
const LEFT_BY_DOORS: [&str; 6] = [
    NUMBERS,
    SOCKET,
    "door.sock.new",
    "tidied",
    "rushes-pool.daemon",
    PROBE,
];

/// The permission of a destroy to delete files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// There must be none.
    None,
    /// Delete them.
    Go,
}

/// A pool that is to be destroyed, and that no other process has.
#[derive(Debug)]
pub struct Doomed {
    pool: Pool,
    /// An earlier destroy was interrupted: this one finishes it.
    pub is_resumed: bool,
    /// There are names in its tree.
    pub has_files: bool,
    /// On all members.
    pub object_count: u64,
}

/// Files and folders that are not the pool's and stay in its folders.
#[derive(Debug, Default)]
pub struct Destroyed {
    /// Files and folders.
    pub left: Vec<PathBuf>,
}

impl Doomed {
    /// Look whether it may go. Changes nothing.
    ///
    /// `serve`  opens a pool as its only one
    /// Errors   [`PoolError::Served`]; [`PoolError::Refused`]: it has files that must not go, or a
    ///          member that is not there
    pub fn look(
        catalogue: &Path,
        files: Files,
        serve: impl FnOnce(&Path) -> Result<Pool, PoolError>,
    ) -> Result<Doomed, PoolError> {
        let is_resumed =
            !catalogue.join(FORMAT_FILE).exists() && catalogue.join(DESTROYING).exists();
        let pool = match is_resumed {
            true => half_gone(catalogue)?,
            false => serve(catalogue)?,
        };
        let mut doomed = Doomed {
            has_files: !pool.catalogue().is_empty()?,
            pool,
            is_resumed,
            object_count: 0,
        };
        if !is_resumed {
            doomed.check_whole(files)?;
        }
        for folder in doomed.folders() {
            if let Some(mount) = mounts_below(&folder)?.into_iter().next() {
                return refused(MemberRefusal::MountInside { mount, folder });
            }
        }
        Ok(doomed)
    }

    /// Refuse a pool without one of its members, or with files that may not go; count the objects.
    fn check_whole(&mut self, files: Files) -> Result<(), PoolError> {
        if is_add_interrupted(&self.pool) {
            return refused(MemberRefusal::AddInterrupted);
        }
        for member in self.pool.members().iter() {
            match member.status().state {
                MemberState::Present => {}
                MemberState::ReadOnly => {
                    return Err(PoolError::ReadOnly {
                        member: member.number(),
                        path: member.path().to_path_buf(),
                    });
                }
                MemberState::Missing(why) => {
                    let members = self.pool.members();
                    let mut states = members.iter().map(|other| other.status().state);
                    let is_all = states.all(|state| matches!(state, MemberState::Missing(_)));
                    return refused(MemberRefusal::Missing {
                        number: member.number(),
                        path: member.path().to_path_buf(),
                        why,
                        catalogue: self.catalogue().to_path_buf(),
                        is_all,
                    });
                }
            }
            self.object_count += member.object_count()?;
        }
        if self.has_files && files == Files::None {
            return refused(MemberRefusal::PoolHasFiles {
                catalogue: self.catalogue().to_path_buf(),
            });
        }
        Ok(())
    }

    /// Its catalogue.
    pub fn catalogue(&self) -> &Path {
        self.pool.catalogue().path()
    }

    /// The pool itself, opened as its only one.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The catalogue's folder and those of members.
    pub fn folders(&self) -> Vec<PathBuf> {
        let members = self.pool.members();
        let paths = members.iter().map(|member| member.path().to_path_buf());
        [self.catalogue().to_path_buf()]
            .into_iter()
            .chain(paths)
            .collect()
    }

    /// Destroy it, durably.
    ///
    /// `progress`  called for each member that is done
    pub fn destroy(self, mut progress: impl FnMut(usize)) -> Result<Destroyed, PoolError> {
        let path = self.catalogue().to_path_buf();
        let failed = |operation, name: &str, error: Errno| {
            PoolError::system(operation, path.join(name).display().to_string(), error)
        };
        let root = folder_at(rustix::fs::CWD, &path).map_err(|error| failed("open", "", error))?;
        if !self.is_resumed {
            renameat(&root, FORMAT_FILE, &root, DESTROYING)
                .and_then(|()| fsync(&root))
                .map_err(|error| failed("give another name to", FORMAT_FILE, error))?;
        }
        let mut destroyed = Destroyed::default();
        for (at, member) in self.pool.members().iter().enumerate() {
            match member.root() {
                Ok(root) => vacate(&self.pool, member, &root, &mut destroyed)?,
                // It was done before.
                Err(PoolError::Missing { .. }) if self.is_resumed => {}
                Err(error) => return Err(error),
            }
            progress(at + 1);
        }
        for name in [TREE, REMOVED] {
            remove_all(&path.join(name))?;
        }
        for name in LEFT_BY_DOORS.into_iter().chain([LOCK]) {
            gone(unlinkat(&root, name, AtFlags::empty()))
                .map_err(|error| failed("remove", name, error))?;
        }
        fsync(&root).map_err(|error| failed("make durable", "", error))?;
        unlinkat(&root, DESTROYING, AtFlags::empty())
            .and_then(|()| fsync(&root))
            .map_err(|error| failed("remove", DESTROYING, error))?;
        note_rest(&root, &path, &mut destroyed).map_err(|error| failed("list", "", error))?;
        Ok(destroyed)
    }
}

/// The pool that an interrupted destroy has left, opened: of the catalogue's folders some may have
/// gone.
fn half_gone(catalogue: &Path) -> Result<Pool, PoolError> {
    let failed = |error| PoolError::system("open", catalogue.display().to_string(), error);
    let root = folder_at(rustix::fs::CWD, catalogue).map_err(failed)?;
    for name in [TREE, REMOVED] {
        match mkdirat(&root, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Pool::open(catalogue, Lock::Take, DESTROYING)
}

fn folder_at(folder: impl std::os::fd::AsFd, name: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat(folder, name, flags, Mode::empty())
}

fn gone(done: Result<(), Errno>) -> Result<(), Errno> {
    match done {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

/// Delete a folder with its contents. Nothing is mounted below it: [`Doomed::look`] has checked.
fn remove_all(path: &Path) -> Result<(), PoolError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(PoolError::system(
            "remove",
            path.display().to_string(),
            error,
        )),
        _ => Ok(()),
    }
}

/// Delete everything of the pool from a member, its format file last.
fn vacate(
    pool: &Pool,
    member: &Member,
    root: &OwnedFd,
    destroyed: &mut Destroyed,
) -> Result<(), PoolError> {
    remove_all(&member.path().join(NAMES))?;
    let failed = |error| member.failed("remove objects", OBJECTS, error);
    for at in 0..=u8::MAX {
        let below = PathBuf::from(OBJECTS).join(format!("{at:02x}"));
        let folder = match folder_at(root, &below) {
            Err(Errno::NOENT) => continue,
            opened => opened.map_err(failed)?,
        };
        for (name, is_file) in entries(&folder).map_err(failed)? {
            let is_ours = is_file && is_object(&name, at) && !is_of_another(pool, &folder, &name);
            if is_ours {
                gone(unlinkat(&folder, name.as_c_str(), AtFlags::empty())).map_err(failed)?;
            } else {
                let name = name.to_string_lossy().into_owned();
                destroyed.left.push(member.path().join(&below).join(name));
            }
        }
        empty_goes(unlinkat(root, &below, AtFlags::REMOVEDIR)).map_err(failed)?;
    }
    destroyed.left.extend(member.strays()?);
    empty_goes(unlinkat(root, OBJECTS, AtFlags::REMOVEDIR)).map_err(failed)?;
    fsync(root).map_err(failed)?;
    gone(unlinkat(root, FORMAT_FILE, AtFlags::empty()))
        .and_then(|()| fsync(root))
        .map_err(|error| member.failed("remove", FORMAT_FILE, error))?;
    note_rest(root, member.path(), destroyed).map_err(failed)
}

/// A folder with foreign files stays.
fn empty_goes(done: Result<(), Errno>) -> Result<(), Errno> {
    match done {
        Err(Errno::NOTEMPTY | Errno::NOENT) => Ok(()),
        done => done,
    }
}

fn entries(folder: &OwnedFd) -> Result<Vec<(CString, bool)>, Errno> {
    let mut found = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            let is_file = entry.file_type() == FileType::RegularFile;
            found.push((entry.file_name().to_owned(), is_file));
        }
    }
    Ok(found)
}

fn is_object(name: &CString, folder: u8) -> bool {
    let name = name.to_bytes();
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    name.len() == 16
        && name.iter().all(is_digit)
        && name.starts_with(format!("{folder:02x}").as_bytes())
}

/// By its mark it is another pool's.
fn is_of_another(pool: &Pool, folder: &OwnedFd, name: &CString) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let marked = openat(folder, name.as_c_str(), flags, Mode::empty())
        .ok()
        .and_then(|fd| mark_of(&fd).ok());
    matches!(marked, Some(Mark::Sound(mark)) if mark.pool != pool.id())
}

/// Note the entries of a folder that was the pool's, but for those of a new ext4.
fn note_rest(root: &OwnedFd, path: &Path, destroyed: &mut Destroyed) -> Result<(), Errno> {
    for (name, _) in entries(root)? {
        let name = name.to_string_lossy().into_owned();
        if ![crate::create::LOST_AND_FOUND, OBJECTS].contains(&name.as_str()) {
            destroyed.left.push(path.join(name));
        }
    }
    Ok(())
}
