// SPDX-License-Identifier: Apache-2.0
//! When a pool tidies itself, in its format file, and the result of the last time, in a file of the
//! catalogue beside that.
//!
//! The result is for people: the pool writes it afterwards, whole, and one that is lost or
//! unreadable counts as none. Its time of modification says when that was.

use crate::change::{Drained, write};
use crate::error::PoolError;
use crate::failed::Failed;
use crate::gather::Defragged;
use crate::pool::Pool;
use rushes_core::pool::tidy::Schedule;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::SystemTime;

/// Its name.
const FILE: &str = "tidied";

/// The work that a pool did to tidy itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tidied {
    /// It was not interrupted.
    pub is_whole: bool,
    /// Members made equally full, stripes made wider.
    pub rebalanced: Drained,
    /// Files brought together.
    pub gathered: Drained,
    /// In how many segments and extents they were.
    pub defragged: Defragged,
    /// Files that could not be read or moved; they count as gone through.
    #[serde(default)]
    pub failed: Failed,
    /// The error with the pool as a whole, as a sentence.
    pub trouble: Option<String>,
}

impl Pool {
    /// When it may tidy itself.
    pub fn schedule(&self) -> Schedule {
        self.format().tidy
    }

    /// The work that it did the last time, and when that ended. None: nothing yet.
    pub fn tidied(&self) -> Option<(SystemTime, Tidied)> {
        let path = self.catalogue().path().join(FILE);
        let ended = fs::metadata(&path).ok()?.modified().ok()?;
        let text = fs::read(&path).ok()?;
        Some((ended, serde_json::from_slice(&text).ok()?))
    }

    /// Store the work that it did.
    ///
    /// Assumes  the pool is served by the caller
    pub fn set_tidied(&self, done: &Tidied) -> Result<(), PoolError> {
        let path = self.catalogue().path().join(FILE);
        let new = path.with_extension("new");
        let written = serde_json::to_vec_pretty(done)
            .map_err(std::io::Error::from)
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| PoolError::system("write", path.display().to_string(), error))
    }
}

/// Set, durably, when a pool may tidy itself.
///
/// Assumes  the pool is served by the caller
pub fn set_schedule(pool: &Pool, schedule: Schedule) -> Result<(), PoolError> {
    let mut format = pool.format();
    if format.tidy != schedule {
        format.tidy = schedule;
        write(pool, &format)?;
        pool.adopt(format);
    }
    Ok(())
}
