// SPDX-License-Identifier: Apache-2.0
//! Bringing files together that are in more pieces than they need be. [`defrag`] wants nobody to use the pool meanwhile; a door moves files by
//! [`crate::Move`].
//!
//! First what is in several objects though one member has room for all of it; then objects that are scattered over their device.

use crate::balance::all_of;
use crate::change::{Drained, about};
use crate::error::PoolError;
use crate::gather::Defragged;
use crate::names::checkpoint_now;
use crate::online::{Move, each_file_in};
use crate::pool::Pool;
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Bring together these files, or all in these folders; all there are if none is named. What was moved is moved, whenever it is interrupted; the same
/// command again goes on.
///
/// `paths`  below the tree
pub fn defrag(
    pool: &Pool,
    paths: &[PathBuf],
    mut progress: impl FnMut(Drained),
) -> Result<(Drained, Defragged), PoolError> {
    pool.bury(|_| false)?;
    let mut done = Drained::default();
    let mut pieces = Defragged::default();
    each_file_in(pool, paths, |path, stub| {
        done.file_count += 1;
        // What cannot be read stays where it is: fsck tells of it.
        if let Ok(Some(mut layout)) = pool.layout(stub.as_fd()) {
            let (before, was) = (pool.pieces(&layout), layout.clone());
            let together = Move::gathering(pool, stub.as_fd(), &layout);
            let moved = all_of(pool, stub.as_fd(), &mut layout, together).and_then(|moved| {
                let afresh = Move::afresh(pool, &layout);
                Ok(moved + all_of(pool, stub.as_fd(), &mut layout, afresh)?)
            });
            let moved = moved.map_err(|error| about(path, &error))?;
            pieces.before.add(before);
            let is_changed = layout != was;
            pieces.after.add(match is_changed {
                true => pool.pieces(&layout),
                false => before,
            });
            done.moved_count += u64::from(is_changed);
            done.moved_bytes += moved;
        }
        progress(done);
        Ok(())
    })?;
    // Records have changed without a door that tells of it.
    if done.moved_count > 0 {
        checkpoint_now(pool).map_err(|error| {
            PoolError::Refused(format!(
                "files were moved, but the log of names could not be written: {error}; repeat this when there is room for it"
            ))
        })?;
    }
    Ok((done, pieces))
}
