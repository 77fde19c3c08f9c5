// SPDX-License-Identifier: Apache-2.0
//! Clients: processes that play, record, copy, list and work, and their ways to reach files.

pub mod client;
pub mod copies;
pub mod direct;
pub mod door;
pub mod nfs;
pub mod player;
pub mod storm;
pub mod work;
pub mod writer;
