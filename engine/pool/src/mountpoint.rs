// SPDX-License-Identifier: Apache-2.0
//! Whether a pool may be mounted on a folder: a mount hides all that lies below, and that must be
//! nothing that the pool itself is made of. Mounting is a door's.

use crate::create::{of_pool, refused};
use crate::error::PoolError;
use crate::pool::Pool;
use rustix::fs::stat;
use std::path::Path;

/// The folder is beside the catalogue and the members of this pool: it is none of them, in none,
/// and none is in it. It is in no other pool's either.
///
/// Errors   [`PoolError::Refused`] says which one is in the way
pub fn may_be_mounted_on(pool: &Pool, folder: &Path) -> Result<(), PoolError> {
    // A dead mount on it cannot be gone through, and is taken away first: then its path says where
    // it is. A folder that is not there is refused when it is to be mounted on.
    let folder = match folder.canonicalize() {
        Ok(folder) => folder,
        Err(_) => std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf()),
    };
    let expected =
        "expected a folder beside those of the pool, since what is mounted hides what lies below";
    let members = pool.members();
    let members = members.iter().map(|one| {
        (
            one.path().to_path_buf(),
            format!("member {}", one.number().0),
        )
    });
    let catalogue = pool.catalogue().path().to_path_buf();
    let all = [(catalogue, String::from("the catalogue"))]
        .into_iter()
        .chain(members);
    for (path, role) in all {
        let (folder, path) = (folder.as_path(), path.as_path());
        let how = if path == folder {
            "is"
        } else if is_in(path, folder) {
            "contains"
        } else if folder.starts_with(path) {
            "is inside"
        } else {
            continue;
        };
        return refused(format!(
            "{} {how} {} ({role}), and the pool cannot be mounted on it; {expected}",
            folder.display(),
            path.display()
        ));
    }
    // By what lies there, too: a bind mount shows the same folders elsewhere, and what is mounted
    // on one is often on the other at once.
    match folder.ancestors().find_map(of_pool) {
        None => Ok(()),
        Some((outer, of)) => refused(format!(
            "{} {} {}, which is {of}, and the pool cannot be mounted on it; {expected}",
            folder.display(),
            if outer == folder { "is" } else { "is inside" },
            outer.display()
        )),
    }
}

/// By its path, or because a folder that it is in is the same one under another name.
fn is_in(path: &Path, folder: &Path) -> bool {
    let id = |path: &Path| stat(path).ok().map(|found| (found.st_dev, found.st_ino));
    let own = id(folder);
    path.starts_with(folder)
        || (own.is_some() && path.ancestors().skip(1).any(|outer| id(outer) == own))
}
