// SPDX-License-Identifier: Apache-2.0
//! Tools that the lab and the tests share: a private smbd, clients of NFS and SMB that say what a
//! library keeps to itself, and the mounts of this machine.
//!
//! Nothing here imports another crate of the workspace or knows the server, so that the tests still
//! drive programs as their users do. Each function returns its errors: the lab shows them to its
//! user, a test panics with them.

pub mod mounts;
pub mod nfs;
pub mod smbd;
pub mod wire;

use anyhow::{Context, Result};
use std::net::TcpListener;

/// A port of 127.0.0.1 that was free a moment ago.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}
