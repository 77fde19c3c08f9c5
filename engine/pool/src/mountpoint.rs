// SPDX-License-Identifier: Apache-2.0
//! Whether a pool may be mounted on a folder: a mount hides all that lies below, and that must not
//! be a folder of the pool itself. The door mounts.

use crate::create::of_pool;
use crate::error::PoolError;
use crate::pool::Pool;
use crate::refusal::{FolderRefusal, Overlap, PoolFolder, Role, refused};
use rustix::fs::stat;
use std::path::Path;

/// The folder is beside the catalogue and the members of this pool: it is none of them, in none,
/// and none is in it. It is in no other pool's either.
///
/// Errors   [`PoolError::Refused`] says which one is in the way
pub fn check_mountpoint(pool: &Pool, folder: &Path) -> Result<(), PoolError> {
    // A dead mount on the folder lets no look-up through; the door removes it first, and the path
    // then says where the folder is. The mount itself refuses a folder that is not there.
    let folder = match folder.canonicalize() {
        Ok(folder) => folder,
        Err(_) => std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf()),
    };
    let members = pool.members();
    let members = members.iter().map(|one| PoolFolder {
        path: one.path().to_path_buf(),
        role: Role::Member(one.number()),
    });
    let catalogue = PoolFolder {
        path: pool.catalogue().path().to_path_buf(),
        role: Role::Catalogue,
    };
    for covered in [catalogue].into_iter().chain(members) {
        let path = covered.path.as_path();
        let overlap = if path == folder {
            Overlap::Is
        } else if is_in(path, &folder) {
            Overlap::Contains
        } else if folder.starts_with(path) {
            Overlap::IsInside
        } else {
            continue;
        };
        return refused(FolderRefusal::Covers {
            folder,
            overlap,
            covered,
        });
    }
    // By the contents, too: a bind mount shows the same folders elsewhere, and a mount on one is
    // often on the other at once.
    match folder.ancestors().find_map(of_pool) {
        None => Ok(()),
        Some((outer, occupant)) => refused(FolderRefusal::MountInPool {
            overlap: match outer == folder {
                true => Overlap::Is,
                false => Overlap::IsInside,
            },
            outer: outer.to_path_buf(),
            occupant,
            folder: folder.clone(),
        }),
    }
}

/// By its path, or because one of its outer folders is the same one under another name.
fn is_in(path: &Path, folder: &Path) -> bool {
    let id = |path: &Path| stat(path).ok().map(|found| (found.st_dev, found.st_ino));
    let own = id(folder);
    path.starts_with(folder)
        || (own.is_some() && path.ancestors().skip(1).any(|outer| id(outer) == own))
}
