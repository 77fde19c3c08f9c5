// SPDX-License-Identifier: Apache-2.0
//! The mount of a pool: names and attributes on the catalogue's tree, data on the members' objects.
//!
//! Node ids, rights, coherence, and refused requests: docs/decisions/0022.

mod bytes;
mod daemon;
mod door;
mod kernel;
mod lock;
mod tree;
mod upkeep;

pub use daemon::DaemonPlace;
pub use daemon::unwritten::{Unwritten, wait_until_members_have_all, wait_until_written};
pub use kernel::keeper::{Ended, HURRIED, Handover, Replacing, keep};
pub use kernel::protocol::Mounted;
pub use kernel::stopping::Stop;

use rushes_pool::Pool;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Mounts an open pool on a folder. Reads and writes of bytes in shares of the daemon at this place
/// go through it, as long as it runs. With a schedule the pool tidies itself when no program has
/// asked for bytes for `tidy_after`.
///
/// Assumes  root
/// Errors   EOPNOTSUPP when the catalogue's file system has no file handles; an error of mount(2)
pub fn mount(
    pool: Pool,
    daemon: Option<&DaemonPlace>,
    tidy_after: Duration,
    folder: &Path,
) -> io::Result<Mounted> {
    ask_of_the_machine();
    kernel::protocol::mount(
        Arc::new(door::Door::new(pool, daemon, tidy_after, None)?),
        folder,
    )
}

/// Keeps all programs, also root's, from creating files in the folder while no pool is mounted
/// there, from now on.
///
/// Errors   a sentence: its file system does not support that, for example
pub fn protect(folder: &Path) -> Result<(), String> {
    kernel::mounting::protect(folder)
}

/// Asks the kernel for the resources of a process that serves a mount.
pub(crate) fn ask_of_the_machine() {
    // The crate `fuser` has such a buffer for each thread.
    rushes_sys::heap::map_large_buffers();
    // A shell's limit of a thousand is less than a mount keeps open.
    if let Err(error) = rushes_sys::limits::raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    // The kernel has checked a writing program against its own limit.
    if let Err(error) = rushes_sys::limits::lift_file_size_limit() {
        tracing::warn!(
            "cannot raise the limit of file sizes (ulimit -f), so files cannot be longer: {error}"
        );
    }
}
