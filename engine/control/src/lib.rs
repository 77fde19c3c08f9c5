// SPDX-License-Identifier: Apache-2.0
//! Messages of the control socket: one JSON object a line, a question up, an answer down.
//!
//! Both ends are here: the types, the codec for either side and a blocking client. Field names are
//! stable: fields may be added, never renamed or given another unit; a reader ignores fields that
//! it does not know. Units stand at the end of a name: `_bytes`, `_ms`, `_bytes_per_s`. A bitrate
//! in a question is bits a second, as editors speak. This crate decides nothing and opens no other
//! socket.

mod client;
mod status;
mod wire;

pub use client::{Client, ControlError};
pub use status::*;
pub use wire::*;
