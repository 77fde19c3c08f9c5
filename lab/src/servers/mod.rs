// SPDX-License-Identifier: Apache-2.0
//! The servers under test, each private to its run.

pub mod cgroup;
pub mod daemon;
pub mod export;
pub mod server;
pub mod smbd;
