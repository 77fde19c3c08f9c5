// SPDX-License-Identifier: Apache-2.0
//! The slow disk: a block device whose timing follows a model, so that absolute times mean
//! something on any machine.
//!
//! It is a FUSE file system with one file, a loop device over that file, and `mq-deadline`:
//! [`timing`] is the model, [`cache`] the drive's memory, [`server`] the child process that keeps
//! it, [`stamps`] its log of when recorded pages came, [`fuse`] the door to the kernel, [`log`]
//! what it has been told when that is recorded, [`setup`] what puts a disk up and takes it down,
//! [`measure`] the proof against the paper's table.

pub mod cache;
pub mod cli;
mod control;
mod fuse;
pub mod log;
pub mod measure;
mod server;
mod setup;
mod stamps;
pub mod timing;

pub use control::{Fault, Flow, Statistics};
pub use setup::{DiskError, DiskSpec, FileSystem, Marker, SlowDisk, clean};
pub use stamps::Arrival;
