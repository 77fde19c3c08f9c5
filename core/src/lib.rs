// SPDX-License-Identifier: Apache-2.0
//! The decisions of Rushes, and nothing else.
//!
//! Everything here is a function of its arguments: there is no clock, file, thread, socket or
//! chance in this crate, and no dependency. Time arrives as an [`units::Instant`], the world as an
//! [`server::Event`], and each decision leaves as an [`server::Action`]. The daemon and the
//! simulator are two drivers of the same [`server::Server`].
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod cache;
pub mod format;
pub mod pool;
pub mod sched;
pub mod server;
pub mod stream;
pub mod units;
pub mod write;
