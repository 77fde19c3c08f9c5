// SPDX-License-Identifier: Apache-2.0
//! The attributes with which a small FUSE file system answers: a folder with files of one size.

use fuser::{FileAttr, FileType, INodeNo};
use std::time::UNIX_EPOCH;

/// Inode 1 is the folder.
pub(crate) fn attributes(inode: u64, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if inode == 1 {
            FileType::Directory
        } else {
            FileType::RegularFile
        },
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
