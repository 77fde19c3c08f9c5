// SPDX-License-Identifier: Apache-2.0
//! The daemon: turns the outside into events for `rushes_core::server`, and its actions into system
//! calls.
//!
//! Where to look: [`serve()`] puts it together; `event_loop` is the one thread that does the work,
//! `visitors` its part for doors, `findings` for files, `answers` for people; `jobs` has the work
//! that may wait for a disk, done by `worker`; `desk` and `metrics` the sockets for people and
//! scrapers; `share`, `device`, `files`, `sessions` the loop's state; `doctor` the checks of
//! `rushes check`. No policy lives here.

mod answers;
pub mod calibrate;
pub mod config;
mod desk;
mod device;
pub mod doctor;
mod error;
mod event_loop;
mod files;
mod findings;
mod foreign;
mod hung;
mod jobs;
mod kept;
mod lag;
mod lanes;
pub mod lanes_left;
mod metrics;
mod mounts;
mod moves;
mod process;
mod recovery;
mod remembered;
mod reports;
mod reserved;
mod runtime_dir;
mod serve;
mod sessions;
mod share;
mod signals;
#[cfg(test)]
mod test_folder;
mod through;
mod visitors;
mod wanted;
mod warm;
mod worker;
mod writing;

pub use error::ServeError;
pub use runtime_dir::{Running, config_of, running_elsewhere};
pub use serve::{recover, serve};
