// SPDX-License-Identifier: Apache-2.0
//! The real thing, measured: a slow disk, private servers, players that keep the time, rivals, plots, power cuts.
//!
//! Nothing here is imported by the server. `rushes lab …` executes the binary of this crate, so the
//! server links neither FUSE nor libsmbclient.

pub mod amounts;
pub mod array;
pub mod arrival;
pub mod blocks;
pub mod cgroup;
pub mod cli;
pub mod client;
pub mod compare;
pub mod copies;
pub mod daemon;
pub mod demo;
pub mod disk;
pub mod door;
pub mod edit;
pub mod export;
pub mod fill;
pub mod footage;
pub mod ground;
pub mod metadata;
pub mod most;
pub mod nfs;
pub mod play;
pub mod player;
pub mod plot;
pub mod power;
pub mod preroll;
pub mod record;
pub mod report;
pub mod room;
pub mod scatter;
pub mod server;
pub mod smbd;
pub mod stage;
pub mod storm;
pub mod strokes;
pub mod take;
pub mod throughput;
pub mod tidy;
pub mod trials;
pub mod wire;
pub mod words;
pub mod work;
pub mod writer;
pub mod written;
