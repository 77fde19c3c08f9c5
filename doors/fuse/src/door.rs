// SPDX-License-Identifier: Apache-2.0
//! The door as a whole: one pool, its nodes, and what goes on in the background.

use crate::answer::Answer;
use crate::engine::Engine;
use crate::nodes::Nodes;
use rushes_pool::Pool;
use rustix::fs::fstatvfs;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Read ahead by the kernel; its default of 128 KiB is little for media. Units: KiB.
const READ_AHEAD_KIB: u32 = 4096;

/// Serves one pool.
pub(crate) struct Door {
    pub(crate) pool: Pool,
    pub(crate) nodes: Nodes,
    pub(crate) engine: Engine,
    /// Held while a link is made or goes.
    pub(crate) links: Mutex<()>,
    pub(crate) removed_serial: AtomicU64,
    pub(crate) removed_waits: AtomicBool,
    pub(crate) closing: AtomicBool,
}

/// For statfs(2).
pub(crate) struct Room {
    pub(crate) blocks: u64,
    pub(crate) blocks_free: u64,
    pub(crate) blocks_available: u64,
    pub(crate) files: u64,
    pub(crate) files_free: u64,
    /// Units: bytes.
    pub(crate) block_bytes: u32,
    pub(crate) name_bytes_max: u32,
}

impl Door {
    pub(crate) fn new(pool: Pool, runtime_dir: Option<&Path>) -> io::Result<Door> {
        let nodes = Nodes::new(pool.catalogue().tree())?;
        Ok(Door {
            nodes,
            engine: Engine::start(&pool, runtime_dir)?,
            pool,
            links: Mutex::default(),
            removed_serial: AtomicU64::new(0),
            // What a door before us left.
            removed_waits: AtomicBool::new(true),
            closing: AtomicBool::new(false),
        })
    }

    /// Bytes are the members', files the catalogue's.
    pub(crate) fn room(&self) -> Answer<Room> {
        const BLOCK_BYTES: u64 = 4096;
        let usage = self.pool.usage();
        let names = fstatvfs(&**self.nodes.tree())?;
        let free = usage.bytes_free.0 / BLOCK_BYTES;
        Ok(Room {
            blocks: usage.bytes_total.0 / BLOCK_BYTES,
            blocks_free: free,
            blocks_available: free,
            files: names.f_files,
            files_free: names.f_ffree,
            block_bytes: BLOCK_BYTES as u32,
            name_bytes_max: names.f_namemax as u32,
        })
    }
}

/// Let the kernel read further ahead on this mount.
pub(crate) fn raise_read_ahead(folder: &Path) -> io::Result<()> {
    let found = rustix::fs::stat(folder)?;
    let (major, minor) = (
        rustix::fs::major(found.st_dev),
        rustix::fs::minor(found.st_dev),
    );
    std::fs::write(
        format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"),
        READ_AHEAD_KIB.to_string(),
    )
}
