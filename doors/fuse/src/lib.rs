// SPDX-License-Identifier: Apache-2.0
//! The mount of a pool: names and attributes on the catalogue's tree, data on the members' objects.
//!
//! Node ids, rights, coherence, and what is refused: docs/decisions/0022.

mod answer;
mod attributes;
mod data;
mod door;
mod files;
mod listing;
mod names;
mod nodes;
mod removals;
mod session;
mod signs;

pub use session::Mounted;

use rushes_pool::Pool;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Mount an open pool on a folder.
///
/// Assumes  root
/// Errors   EOPNOTSUPP when the catalogue's file system has no file handles; what mount(2) says
pub fn mount(pool: Pool, folder: &Path) -> io::Result<Mounted> {
    session::mount(Arc::new(door::Door::new(pool)?), folder)
}
