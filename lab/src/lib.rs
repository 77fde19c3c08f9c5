// SPDX-License-Identifier: Apache-2.0
//! Measurements of the real programs: a slow disk, private servers, players with a clock, rivals,
//! plots, power cuts.
//!
//! The server imports nothing of it. `rushes lab …` executes the binary of this crate, so the
//! server links neither FUSE nor libsmbclient.

pub mod amounts;
pub mod cli;
pub mod clients;
pub mod commands;
pub mod disk;
pub mod edit;
pub mod experiments;
pub mod power;
pub mod reports;
pub mod servers;
pub mod stage;
pub mod words;
