// SPDX-License-Identifier: Apache-2.0
//! The simulated world: disks, players and faults around [`rushes_core::server::Server`], from a
//! seed.
//!
//! Time here is virtual, random numbers come from a seed, and the same seed gives the same run.
//! Nothing in this crate touches a real disk or a socket, and no crate imports it.
#![forbid(unsafe_code)]

pub mod admission;
pub mod catalogue;
pub mod checker;
pub mod client;
pub mod contents;
pub mod digest;
pub mod disk;
pub mod drive_memory;
pub mod files;
pub mod judge;
pub mod machine;
pub mod op_atom;
pub mod oracle;
pub mod others;
pub mod player;
pub mod prng;
pub mod queue;
pub mod record_groups;
pub mod recorder;
pub mod recording;
pub mod run;
pub mod scatterer;
pub mod scenario;
pub mod scrubber;
pub mod space;
pub mod spoiled;
pub mod swarm;
pub mod table5;
pub mod torture;
pub mod world;
pub mod written;
