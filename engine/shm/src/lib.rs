// SPDX-License-Identifier: Apache-2.0
//! Sessions between a door and the daemon over shared memory: both ends.
//!
//! [`server`] is the daemon's end, [`client`] the door's. [`ffi`] gives the client a C face,
//! `include/rushes_client.h`, for plug-ins such as Samba's. The layouts are those of
//! `rushes_core::format`.
//!
//! The two ends do not trust each other's memory: each copies every index and entry once and checks
//! the copy. A peer that breaks a rule causes an error value, never a panic, a wait or an access
//! out of bounds.
#![allow(unsafe_code)]

pub mod client;
mod doorbell;
pub mod facts;
pub mod ffi;
pub mod lane;
mod layout;
mod rings;
pub mod server;
pub mod survey;
#[cfg(test)]
mod test_folder;

pub use layout::{Connect, PeerError, Writer};

#[cfg(not(target_endian = "little"))]
compile_error!("the layouts of rushes_core::format are little endian and used in place");
