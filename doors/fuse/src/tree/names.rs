// SPDX-License-Identifier: Apache-2.0
//! Names: the native file system executes each operation on the catalogue's own directory.
//!
//! The kernel has checked the caller's rights, and holds the directories' locks. Files are made
//! with the caller's user, group and umask on this thread. So the native file system handles owner,
//! setgid directories, default ACLs and quotas, and no crash leaves a file with a wrong owner.

use crate::bytes::descriptors::Opener;
use crate::bytes::passthrough::OpenReply;
use crate::door::Door;
use crate::kernel::answer::{Answer, errno};
use crate::kernel::protocol::Backing;
use crate::kernel::table::{State, Unique};
use crate::lock::locked;
use crate::tree::attributes::Attributes;
use crate::tree::nodes::{Node, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, status};
use crate::tree::removals::RoomSought;
use rushes_sys::thread::{ActingAs, Identity, set_own_umask};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Statx, linkat, mkdirat, mknodat, openat,
    readlinkat, renameat_with, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;
use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Its value in the protocol.
const O_EXCL: i32 = 0o200;

/// An inode in the answer to the kernel.
pub(crate) struct Entry {
    pub(crate) node: Arc<Node>,
    pub(crate) attributes: Attributes,
}

/// The identity and the umask of a program that makes a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub(crate) identity: Identity,
    pub(crate) umask: u32,
}

impl Maker {
    fn act(self) -> Answer<ActingAs> {
        set_own_umask(self.umask).map_err(errno)?;
        ActingAs::new(self.identity).map_err(errno)
    }
}

/// The inode of this name: not followed, not opened.
fn path_at(folder: impl AsFd, name: impl Arg) -> Answer<OwnedFd> {
    openat(
        folder,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Number of the inode of this name, without a descriptor; 0: there is none.
fn number_at(folder: impl AsFd, name: &OsStr) -> Answer<u64> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(found.st_ino),
        Err(Errno::NOENT) => Ok(0),
        Err(error) => Err(error),
    }
}

impl Door {
    fn folder(&self, number: u64) -> Answer<Arc<OwnedFd>> {
        self.nodes.descriptor(&self.nodes.get(number)?)
    }

    fn entry(&self, fd: OwnedFd) -> Answer<Entry> {
        self.nodes.enter(fd).map(|found| self.as_it_is(found))
    }

    /// The inode of a name that was just listed, while the kernel holds its directory. `mode`: from
    /// the listing.
    pub(crate) fn entry_listed(
        &self,
        folder: BorrowedFd<'_>,
        name: &CStr,
        mode: u32,
    ) -> Answer<Entry> {
        if mode & S_IFMT != S_IFREG {
            // Once its name is gone, only a descriptor leads to an open pipe, or to a folder in
            // which a program works.
            return self.entry(path_at(folder, name)?);
        }
        let found = self.nodes.enter_name(folder, name)?;
        Ok(self.as_it_is(found))
    }

    fn as_it_is(&self, (node, found): (Arc<Node>, Statx)) -> Entry {
        let may_be_stored = locked(&node.file).may_be_stored();
        let now = may_be_stored.then(|| self.attributes_of(&node).ok());
        let attributes = now
            .flatten()
            .unwrap_or_else(|| Attributes::of(node.number, &found));
        Entry { node, attributes }
    }

    /// The kernel asks for `.` and `..` when an NFS client sends a handle that it has forgotten.
    pub(crate) fn lookup(&self, parent: u64, name: &OsStr) -> Answer<Entry> {
        let folder = match self.folder(parent) {
            Err(Errno::STALE) if name == "." => return self.lookup_cold(parent),
            found => found?,
        };
        if name == "." {
            let again = folder.as_fd().try_clone_to_owned().map_err(errno)?;
            return self.entry(again);
        }
        if name == ".." && parent == crate::tree::nodes::ROOT {
            return Err(Errno::NOENT);
        }
        self.entry(self.nodes.with_room(|| path_at(&folder, name))?)
    }

    /// A client may have made up the handle that it sends: the door does not open an inode that may
    /// be outside this tree.
    fn lookup_cold(&self, number: u64) -> Answer<Entry> {
        let fd = self.nodes.open_cold(number)?;
        let is_ours = match u32::from(status(&fd)?.stx_mode) & S_IFMT {
            S_IFDIR => self.nodes.is_below_tree(&fd)?,
            S_IFREG => self.is_stub(&fd) && !self.is_removed(number)?,
            _ => self.is_marked(&fd),
        };
        if is_ours {
            self.entry(fd)
        } else {
            Err(Errno::STALE)
        }
    }

    /// Marks a new inode as part of this tree, so that its handle is valid after a restart. A
    /// directory is known by its parents. Without a mark, for example for lack of room, the inode
    /// works, and only its handle becomes invalid when this process ends.
    fn sign(&self, fd: &OwnedFd, mode: u32) {
        let signed = if mode & S_IFMT == S_IFREG {
            self.sign_stub(fd)
        } else {
            self.mark(fd)
        };
        if let Err(error) = signed {
            tracing::debug!("cannot mark an inode as one of its pool: {error}");
        }
    }

    /// Whether an earlier process has executed the request, which cannot be executed twice: then
    /// the state differs from before. Nothing else changes it, since the kernel holds the caller's
    /// locks until the caller gets the answer.
    ///
    /// `now`: the state that it changes
    /// Returns  the state before, if it was executed; else this thread is about to execute it
    pub(crate) fn was_done(
        &self,
        asked: Unique,
        now: impl FnOnce() -> Answer<State>,
    ) -> Answer<Option<State>> {
        let Some(table) = &self.table else {
            return Ok(None);
        };
        let now = now()?;
        match table.intended(asked) {
            Some(before) if before != now => Ok(Some(before)),
            _ => table.intend(asked, now).map(|()| None),
        }
    }

    /// The same for one name: it leads to another inode, to one at all, or to none.
    fn was_changed(&self, asked: Unique, folder: impl AsFd, name: &OsStr) -> Answer<bool> {
        let done = self.was_done(asked, || Ok([number_at(folder, name)?, 0]))?;
        Ok(done.is_some())
    }

    /// A new name in the catalogue needs an inode there; removed files free theirs with their
    /// burial.
    fn when_there_is_room<T>(&self, mut make: impl FnMut() -> Answer<T>) -> Answer<T> {
        let mut sought = RoomSought::default();
        loop {
            match make() {
                Err(Errno::NOSPC | Errno::DQUOT) if self.room_comes(&mut sought) => {}
                Err(Errno::NOSPC) => {
                    self.say_once(self.pool.catalogue_full().to_string());
                    return Err(Errno::NOSPC);
                }
                made => return made,
            }
        }
    }

    pub(crate) fn read_link(&self, number: u64) -> Answer<Vec<u8>> {
        let fd = self.folder(number)?;
        Ok(readlinkat(&fd, c"", Vec::new())?.into_bytes())
    }

    /// Anything but a directory or a symbolic link. Device numbers in the form of makedev(3).
    pub(crate) fn make_node(
        &self,
        parent: u64,
        name: &OsStr,
        mode: u32,
        device: u64,
        (maker, asked): (Maker, Unique),
    ) -> Answer<Entry> {
        let folder = self.folder(parent)?;
        let kind = FileType::from_raw_mode(mode);
        if !self.was_changed(asked, &folder, name)? {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            self.when_there_is_room(|| {
                let _acting = maker.act()?;
                mknodat(&folder, name, kind, mode, device)
            })?;
        }
        let made = path_at(&folder, name)?;
        self.sign(&made, mode);
        if mode & S_IFMT == S_IFREG {
            self.wish_by_name(&folder, name, &made);
        }
        self.named(parent, name, made)
    }

    pub(crate) fn make_directory(
        &self,
        parent: u64,
        name: &OsStr,
        mode: u32,
        (maker, asked): (Maker, Unique),
    ) -> Answer<Entry> {
        let folder = self.folder(parent)?;
        if !self.was_changed(asked, &folder, name)? {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            self.when_there_is_room(|| {
                let _acting = maker.act()?;
                mkdirat(&folder, name, mode)
            })?;
        }
        let made = path_at(&folder, name)?;
        self.inherit_wish(&folder, &made);
        self.named(parent, name, made)
    }

    pub(crate) fn make_symlink(
        &self,
        parent: u64,
        name: &OsStr,
        target: &Path,
        (maker, asked): (Maker, Unique),
    ) -> Answer<Entry> {
        let folder = self.folder(parent)?;
        if !self.was_changed(asked, &folder, name)? {
            self.when_there_is_room(|| {
                let _acting = maker.act()?;
                symlinkat(target, &folder, name)
            })?;
        }
        let made = path_at(&folder, name)?;
        self.sign(&made, S_IFLNK);
        self.named(parent, name, made)
    }

    /// Makes a new regular file and opens it. Opens an existing one, unless the flags have O_EXCL.
    ///
    /// Returns  it, its file handle, and how it is opened
    pub(crate) fn create(
        &self,
        parent: u64,
        name: &OsStr,
        mode: u32,
        flags: i32,
        (maker, asked, opener): (Maker, Unique, Opener),
        register: impl FnOnce(&OwnedFd) -> io::Result<Backing>,
    ) -> Answer<(Entry, u64, OpenReply)> {
        let folder = self.folder(parent)?;
        // First: a file that could not be opened then would exist although its creation failed.
        let share = self.descriptors.take_for(opener)?;
        let exclusive = flags & O_EXCL != 0;
        let open_flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let was_made = self.was_changed(asked, &folder, name)?;
        let made = self.nodes.with_room(|| {
            if was_made {
                return openat(&folder, name, open_flags, Mode::empty());
            }
            let open_flags = open_flags | OFlags::CREATE | OFlags::EXCL;
            let mode = Mode::from_raw_mode(mode & 0o7777);
            self.when_there_is_room(|| {
                let _acting = maker.act()?;
                openat(&folder, name, open_flags, mode)
            })
        });
        match made {
            // Rare, since the kernel looked before: another program made it in between.
            Err(Errno::EXIST) if !exclusive => {
                let entry = self.entry(path_at(&folder, name)?)?;
                if entry.attributes.mode & S_IFMT != S_IFREG {
                    return Err(Errno::EXIST);
                }
                drop(share);
                let asked = (asked, opener);
                let (handle, opened) = self.open(entry.node.number, flags, asked, register)?;
                Ok((entry, handle, opened))
            }
            made => {
                let made = made?;
                self.sign(&made, S_IFREG);
                self.wish_by_name(&folder, name, &made);
                let entry = self.named(parent, name, path_at(&folder, name)?)?;
                let open = || self.open_new_file(&entry.node, made, share);
                let (handle, opened) =
                    self.open_for_kernel(&entry.node, flags, (asked, register), open)?;
                self.sessions.opened_by(entry.node.number, handle, opener);
                Ok((entry, handle, opened))
            }
        }
    }

    pub(crate) fn link(
        &self,
        number: u64,
        parent: u64,
        name: &OsStr,
        asked: Unique,
    ) -> Answer<Entry> {
        let (file, folder) = (self.folder(number)?, self.folder(parent)?);
        let _links = locked(&self.links);
        if !self.was_changed(asked, &folder, name)? {
            linkat(&file, c"", &folder, name, AtFlags::EMPTY_PATH)?;
        }
        self.named(parent, name, path_at(&folder, name)?)
    }

    /// Holds the inode of the name until it is known whether that was its last one.
    pub(crate) fn unlink(&self, parent: u64, name: &OsStr, asked: Unique) -> Answer<()> {
        let folder = self.folder(parent)?;
        if !self.was_changed(asked, &folder, name)? {
            let victim = path_at(&folder, name)?;
            self.remove_name(&folder, name, &victim)?;
        }
        self.name_changed(parent, name, None);
        Ok(())
    }

    pub(crate) fn remove_directory(&self, parent: u64, name: &OsStr, asked: Unique) -> Answer<()> {
        let folder = self.folder(parent)?;
        if !self.was_changed(asked, &folder, name)? {
            unlinkat(&folder, name, AtFlags::REMOVEDIR)?;
        }
        self.name_changed(parent, name, None);
        Ok(())
    }

    /// Layouts belong to the stubs and move with them; only a replaced file needs care.
    pub(crate) fn rename(
        &self,
        from: (u64, &OsStr),
        to: (u64, &OsStr),
        flags: u32,
        asked: Unique,
    ) -> Answer<()> {
        let flags = RenameFlags::from_bits_retain(flags);
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL);
        }
        let (source, target) = (self.folder(from.0)?, self.folder(to.0)?);
        // First: a look afterwards may fail when the rename is done already.
        let found = [number_at(&source, from.1)?, number_at(&target, to.1)?];
        let done = self.was_done(asked, || Ok(found))?;
        let [moved, replaced] = done.unwrap_or(found);
        self.moves(moved);
        if flags.contains(RenameFlags::EXCHANGE) {
            self.moves(replaced);
        }
        if done.is_none() {
            let victim = match path_at(&target, to.1) {
                Ok(victim) if flags.is_empty() => Some(victim),
                Ok(_) | Err(Errno::NOENT) => None,
                // Without it the objects of the replaced file would belong to no file.
                Err(error) => return Err(error),
            };
            let replace = || renameat_with(&source, from.1, &target, to.1, flags);
            match victim {
                Some(victim) => self.replace_name(&victim, replace),
                None => replace(),
            }?;
        }
        let left = match flags.contains(RenameFlags::EXCHANGE) {
            true => replaced,
            // Two names of one inode both stay as they are.
            false if moved == replaced => moved,
            false => 0,
        };
        self.name_leads_to(from.0, from.1, left);
        self.name_leads_to(to.0, to.1, moved);
        Ok(())
    }

    /// An inode under its new name.
    fn named(&self, parent: u64, name: &OsStr, fd: OwnedFd) -> Answer<Entry> {
        let entry = self.entry(fd)?;
        self.name_changed(parent, name, Some(&entry.node));
        Ok(entry)
    }
}
