// SPDX-License-Identifier: Apache-2.0
//! Room for the layout among the attributes of a file: other attributes must leave as much as the
//! layout may come to need, or the file could not continue on another member.
//!
//! ext4 has one block for all attributes of a file, and the rest of its inode, on which this module
//! does not count; with the feature ea_inode a value that does not fit has an inode of its own. XFS
//! and btrfs give each attribute its own room. This module does nothing for files whose attributes
//! were there before: they get [`PoolError::LayoutTooLong`] once their layout does not fit.

use crate::catalogue::REMOVED;
use crate::error::PoolError;
use crate::pool::Pool;
use crate::xattr::{self, HIDDEN_PREFIX, LAYOUT_ATTRIBUTE};
use rushes_core::pool::layout::{OBJECT_BYTES, SEGMENT_BYTES};
use rustix::fs::{Mode, OFlags, fstatfs, getxattr_query, listxattr, listxattr_query, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Of ext2, ext3 and ext4, in linux/magic.h.
const EXT4_MAGIC: u64 = 0xef53;
/// A block of attributes without any: its head, and the end of its list, see fs/ext4/xattr.h.
/// Units: bytes.
const EMPTY_BLOCK_BYTES: usize = 32 + 4;
/// Of an attribute in the list, before its name. Units: bytes.
const ENTRY_BYTES: usize = 16;
/// A layout may come to need so much: 30 segments on single members, mostly as many as there are
/// disks. Units: bytes.
const ROOM_BYTES: usize = 1024;
/// A longer layout may grow by so much: a segment of a stripe over 20 members. Units: bytes.
const GROWTH_BYTES: usize = SEGMENT_BYTES + 20 * OBJECT_BYTES;
/// Or by this part of a block, where that is less.
const GROWTH_PART: usize = 15;
/// A new file gets this from its folder's default ACL, without a call that sets it.
const INHERITED: &[u8] = b"system.posix_acl_access";
/// Smaller blocks cause a warning. Units: bytes.
const BLOCK_BYTES_USUAL: usize = 4096;

/// The bytes that an attribute takes of a block.
fn taken(name: &[u8], length: usize) -> usize {
    // "user." and the like are a number.
    let name = name.splitn(2, |byte| *byte == b'.').nth(1).unwrap_or(name);
    (ENTRY_BYTES + name.len()).next_multiple_of(4) + length.next_multiple_of(4)
}

/// Whether a layout may become long enough beside attributes of these lengths.
fn fits<'a>(
    block_bytes: usize,
    layout_bytes: usize,
    others: impl Iterator<Item = (&'a [u8], usize)>,
) -> bool {
    let wanted = ROOM_BYTES.min(block_bytes / 4);
    let wanted = wanted.max(layout_bytes + GROWTH_BYTES.min(block_bytes / GROWTH_PART));
    let layout = taken(LAYOUT_ATTRIBUTE.as_bytes(), wanted);
    let others: usize = others.map(|(name, length)| taken(name, length)).sum();
    EMPTY_BLOCK_BYTES + layout + others <= block_bytes
}

/// The block that all attributes of a file share. None: each has room of its own.
fn shared_block(root: &OwnedFd) -> Result<Option<usize>, Errno> {
    let found = fstatfs(root)?;
    if found.f_type as u64 != EXT4_MAGIC {
        return Ok(None);
    }
    let block_bytes = usize::try_from(found.f_bsize).unwrap_or(BLOCK_BYTES_USUAL);
    // Only the device says which features it has, and that need not be ours to read: try it.
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let probe = rustix::fs::openat(root, c".", flags, Mode::RUSR | Mode::WUSR)?;
    let name = format!("{HIDDEN_PREFIX}probe");
    match xattr::set(probe.as_fd(), &name, &vec![0; block_bytes]) {
        Ok(()) => Ok(None),
        Err(_) => Ok(Some(block_bytes)),
    }
}

fn opened(folder: &Path) -> Result<OwnedFd, Errno> {
    open(
        folder,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// The warning for the place of a new catalogue, as a sentence. None: no warning.
pub(crate) fn scarce_room(catalogue: &Path) -> Option<String> {
    let block_bytes = shared_block(&opened(catalogue).ok()?).ok()??;
    (block_bytes < BLOCK_BYTES_USUAL).then(|| {
        format!(
            "{} is on an ext4 with blocks of {block_bytes} bytes, which are all that the attributes of a file and its layout have together: large ACLs and attributes (of Samba's, too) are refused there, and files with more than a few segments; expected 4096 (mkfs.ext4 -b 4096 -i 4096), or the feature ea_inode",
            catalogue.display()
        )
    })
}

impl Pool {
    /// Before a file in the tree gets an attribute: whether its layout can grow beside it as far as
    /// it may have to.
    ///
    /// `path`     leads to the file, which is not followed further
    pub fn leaves_layout_room(
        &self,
        path: &str,
        name: &[u8],
        length: usize,
    ) -> Result<bool, PoolError> {
        let failed = |error| PoolError::system("look at the attributes of", path, error);
        let Some(block_bytes) = self.attribute_block() else {
            return Ok(true);
        };
        let mut names: Vec<u8> = Vec::with_capacity(listxattr_query(path).map_err(failed)? + 256);
        listxattr(path, rustix::buffer::spare_capacity(&mut names)).map_err(failed)?;
        let mut layout_bytes = 0;
        let mut others = vec![(name, length)];
        for other in names.split(|byte| *byte == 0).filter(|one| !one.is_empty()) {
            let its = match getxattr_query(path, std::ffi::OsStr::from_bytes(other)) {
                Ok(its) => its,
                Err(Errno::NODATA) => continue,
                Err(error) => return Err(failed(error)),
            };
            if other == LAYOUT_ATTRIBUTE.as_bytes() {
                layout_bytes = its;
            } else if other != name {
                others.push((other, its));
            } else if length <= its {
                // A value that becomes no longer takes no room.
                return Ok(true);
            }
        }
        Ok(fits(block_bytes, layout_bytes, others.into_iter()))
    }

    /// The same for files in a folder, before that gets a default ACL of this length.
    pub fn leaves_layout_room_below(&self, length: usize) -> bool {
        let block_bytes = self.attribute_block();
        block_bytes.is_none_or(|block| fits(block, 0, std::iter::once((INHERITED, length))))
    }

    /// As [`shared_block`] found it; None, which refuses nothing, if that failed.
    fn attribute_block(&self) -> Option<usize> {
        *self.attribute_block.get_or_init(|| {
            let folder = opened(&self.catalogue().path().join(REMOVED));
            folder.and_then(|folder| shared_block(&folder)).ok()?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_that_leaves_the_layout_no_room_does_not_fit() {
        for (block, layout, length, expected) in [
            (4096, 0, 2900, true),
            (4096, 56, 2900, true),
            (4096, 56, 3000, false),
            (4096, 56, 4000, false),
            (4096, 1000, 2900, false),
            (4096, 1000, 2700, true),
            (4096, 3600, 100, true),
            (4096, 3800, 100, false),
            (1024, 56, 600, true),
            (1024, 56, 800, false),
        ] {
            let others = [(&b"user.a"[..], length)];
            let found = fits(block, layout, others.into_iter());
            assert_eq!(found, expected, "{block} {layout} {length}");
        }
        // A stripe over 20 members goes on in one more segment.
        let room = taken(LAYOUT_ATTRIBUTE.as_bytes(), 2000 + 20 + 20 * 12);
        let left = 4096 - EMPTY_BLOCK_BYTES - room - taken(b"user.a", 0);
        for (length, expected) in [(left, true), (left + 4, false)] {
            let others = std::iter::once((&b"user.a"[..], length));
            assert_eq!(fits(4096, 2000, others), expected, "{length}");
        }
        let small = [(&b"user.DOSATTRIB"[..], 100); 40];
        assert!(fits(4096, 56, small[..20].iter().copied()));
        assert!(!fits(4096, 56, small.iter().copied()));
    }

    #[test]
    fn an_entry_takes_its_name_without_what_is_a_number() {
        assert_eq!(taken(b"user.a", 1), 20 + 4);
        assert_eq!(taken(b"trusted.rushes.layout", 56), 32 + 56);
        assert_eq!(taken(b"system.posix_acl_access", 0), 32);
    }
}
