// SPDX-License-Identifier: Apache-2.0
//! Persistent names of inodes: the file handles of name_to_handle_at(2) and open_by_handle_at(2).
//!
//! A handle survives rename, the closing of every descriptor and a restart, and costs no
//! descriptor. It does not tell the file's path, and a process that may open by it
//! (CAP_DAC_READ_SEARCH) bypasses the permissions of all directories: so we take handles from our
//! own file system alone, never from a peer.

use rustix::fs::OFlags;
use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Longest handle that the kernel makes (MAX_HANDLE_SZ). Units: bytes.
const HANDLE_BYTES_MAX: usize = 128;

/// FILEID_INO32_GEN of linux/exportfs.h: a 32-bit inode number, then its generation.
const KIND_INODE_AND_GENERATION: i32 = 1;

/// The structure that the kernel reads and writes: `struct file_handle` of open_by_handle_at(2).
///
/// | offset | size | meaning |
/// |---|---|---|
/// | 0 | 4 | bytes used of `bytes` |
/// | 4 | 4 | kind, the file system's own |
/// | 8 | 128 | the handle |
#[repr(C)]
struct Raw {
    length: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES_MAX],
}

const _: () = assert!(offset_of!(Raw, bytes) == 8 && size_of::<Raw>() == 8 + HANDLE_BYTES_MAX);

/// The persistent name of one inode, within one file system.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    kind: i32,
    bytes: Box<[u8]>,
}

impl Handle {
    /// The name of the inode behind an open file (O_PATH will do).
    ///
    /// Errors   EOPNOTSUPP where the file system has no persistent names
    pub fn of(fd: impl AsFd) -> io::Result<Handle> {
        Handle::made(fd, c"", libc::AT_EMPTY_PATH)
    }

    /// The name of the inode of `name` in an open directory. Symbolic links are not followed.
    ///
    /// Errors   EOPNOTSUPP where the file system has no persistent names; ENOENT when there is no
    /// such name
    pub fn at(directory: impl AsFd, name: &CStr) -> io::Result<Handle> {
        Handle::made(directory, name, 0)
    }

    fn made(fd: impl AsFd, name: &CStr, flags: libc::c_int) -> io::Result<Handle> {
        let mut raw = Raw {
            length: HANDLE_BYTES_MAX as u32,
            kind: 0,
            bytes: [0; HANDLE_BYTES_MAX],
        };
        let mut mount: libc::c_int = 0;
        // SAFETY: both pointers are to live, writable values of this frame; the kernel writes at
        // most `length` bytes behind the header, the size of `bytes`. The name has its NUL.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                fd.as_fd().as_raw_fd(),
                name.as_ptr(),
                &raw mut raw,
                &raw mut mount,
                flags,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let length = (raw.length as usize).min(HANDLE_BYTES_MAX);
        Ok(Handle {
            kind: raw.kind,
            bytes: raw.bytes[..length].into(),
        })
    }

    /// Open the inode. `within` is any descriptor on its file system that was not opened with
    /// O_PATH.
    ///
    /// Errors   ESTALE when the inode is gone; EPERM without CAP_DAC_READ_SEARCH
    pub fn open(&self, within: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        let mut raw = Raw {
            length: self.bytes.len() as u32,
            kind: self.kind,
            bytes: [0; HANDLE_BYTES_MAX],
        };
        raw.bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        let flags = (flags | OFlags::CLOEXEC).bits() as libc::c_int;
        // SAFETY: the pointer is to a live value of this frame whose `length` bytes are
        // initialised.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                within.as_raw_fd(),
                &raw mut raw,
                flags,
            )
        };
        let fd = libc::c_int::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us; nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Its kind and bytes, to store where no other user can write.
    pub fn parts(&self) -> (i32, &[u8]) {
        (self.kind, &self.bytes)
    }

    /// The handle with these [`Handle::parts`].
    pub fn from_parts(kind: i32, bytes: &[u8]) -> Handle {
        Handle {
            kind,
            bytes: bytes[..bytes.len().min(HANDLE_BYTES_MAX)].into(),
        }
    }

    /// A number that differs between two inodes that had the same inode number, one after the
    /// other.
    ///
    /// The words of the handle folded by exclusive or. Two handles with one inode number differ
    /// only in the generation, so that they never fold alike.
    pub fn generation(&self) -> u32 {
        generation_of(&self.bytes)
    }

    /// The handle of the inode that has this number now, where the file system takes a handle
    /// without a generation.
    ///
    /// ext4 does: it reads generation 0 as "any". `like` is a handle of the same file system.
    /// Returns  None where handles have another form (XFS and btrfs need the generation)
    pub fn of_number(like: &Handle, number: u64) -> Option<Handle> {
        let number = u32::try_from(number).ok()?;
        if like.kind != KIND_INODE_AND_GENERATION || like.bytes.len() != 8 {
            return None;
        }
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&number.to_ne_bytes());
        Some(Handle {
            kind: like.kind,
            bytes: Box::new(bytes),
        })
    }
}

/// [`Handle::generation`] of a handle's bytes.
pub fn generation_of(handle: &[u8]) -> u32 {
    handle.chunks(4).fold(0, |folded, word| {
        let mut whole = [0; 4];
        whole[..word.len()].copy_from_slice(word);
        folded ^ u32::from_ne_bytes(whole)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, open};

    /// None, with a note that the test is skipped, where this needs root.
    fn opened(handle: &Handle, within: &OwnedFd) -> Option<io::Result<OwnedFd>> {
        match handle.open(within.as_fd(), OFlags::PATH) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                crate::skip("opening by handle needs root");
                None
            }
            result => Some(result),
        }
    }

    #[test]
    fn handle_survives_rename_and_dies_with_the_inode() {
        let folder = crate::test_folder("handle");
        let within = open(&folder, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let (first, second) = (folder.join("first"), folder.join("second"));
        std::fs::write(&first, b"x").unwrap();
        let handle = Handle::of(open(&first, OFlags::PATH, Mode::empty()).unwrap()).unwrap();
        assert_eq!(Handle::at(&within, c"first").unwrap(), handle);
        std::fs::rename(&first, &second).unwrap();
        let gone = Handle::at(&within, c"first").unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        let Some(found) = opened(&handle, &within) else {
            return;
        };
        let found = rustix::fs::fstat(found.unwrap()).unwrap();
        assert_eq!(found.st_ino, rustix::fs::stat(&second).unwrap().st_ino);
        if let Some(by_number) = Handle::of_number(&handle, found.st_ino) {
            let same = by_number.open(within.as_fd(), OFlags::PATH).unwrap();
            assert_eq!(Handle::of(&same).unwrap(), handle);
        }
        std::fs::remove_file(&second).unwrap();
        let gone = opened(&handle, &within).unwrap().unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESTALE));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn generations_of_one_number_differ() {
        let of = |generation: u32| Handle {
            kind: KIND_INODE_AND_GENERATION,
            bytes: [12u32.to_ne_bytes(), generation.to_ne_bytes()]
                .concat()
                .into(),
        };
        assert_ne!(of(1).generation(), of(2).generation());
        assert_ne!(of(0).generation(), of(0x8000_0000).generation());
        assert!(Handle::of_number(&of(7), 1 << 32).is_none());
    }
}
