// SPDX-License-Identifier: Apache-2.0
//! Tests through the real doors, and tests of the source tree itself.
//!
//! This library holds what several of them need. Of the workspace it imports the kit alone:
//! programs are driven as their users drive them, and the source is read as text.

pub mod caches;
pub mod changer;
pub mod daemon;
pub mod disk;
pub mod export;
pub mod facts;
pub mod fsx;
pub mod hand;
pub mod initiator;
pub mod kills;
pub mod lab;
pub mod local;
pub mod mapper;
pub mod needs;
pub mod nfs4;
pub mod patience;
pub mod pattern;
pub mod pool;
pub mod random;
mod ring;
pub mod rust_text;
pub mod same_file;
pub mod scratch;
pub mod smb2;
pub mod smbd;
pub mod stale;
pub mod stand;
pub mod stop;
pub mod torture;
pub mod tree;
pub mod ways;
pub mod words;
pub mod world;
