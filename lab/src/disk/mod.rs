// SPDX-License-Identifier: Apache-2.0
//! The slow disk: a block device whose timing follows a model, so that absolute times mean
//! something on any machine.
//!
//! It is a FUSE file system with one file, a loop device over that file, and `mq-deadline`:
//! [`timing`] is the model, [`cache`] the drive's write cache, [`server`] the child process that
//! serves it, [`stamps`] its log of the arrival of recorded pages, [`fuse`] the interface to the
//! kernel, [`log`] the recorded requests, [`setup`] puts a disk up and takes it down, [`measure`]
//! compares it with the paper's table.

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
