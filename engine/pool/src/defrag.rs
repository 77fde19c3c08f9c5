// SPDX-License-Identifier: Apache-2.0
//! Brings files together that are in more segments and extents than need be. [`defrag`] needs a
//! pool without a door; a door moves files by [`crate::Move`].
//!
//! First files in several objects, if one member has room for all of it; then objects that are
//! scattered over their device.

use crate::balance::{all_of, each_with_record};
use crate::change::Drained;
use crate::error::PoolError;
use crate::failed::Failed;
use crate::gather::Defragged;
use crate::online::Move;
use crate::pool::Pool;
use std::path::PathBuf;

/// Bring together these files, or all in these folders; all of the pool if none is named. Moved
/// bytes stay moved if it is interrupted; the same command again goes on. It skips a file that it
/// cannot read or move.
///
/// `paths`  below the tree
pub fn defrag(
    pool: &Pool,
    paths: &[PathBuf],
    progress: impl FnMut(Drained),
) -> Result<(Drained, Defragged, Failed), PoolError> {
    let mut fragments = Defragged::default();
    let (done, failed) = each_with_record(pool, paths, progress, |stub, layout, copied| {
        let before = pool.fragments(layout);
        let was = layout.clone();
        let together = Move::gathering(pool, stub, layout);
        let moved = all_of(pool, stub, layout, together, copied).and_then(|()| {
            let afresh = Move::afresh(pool, layout);
            all_of(pool, stub, layout, afresh, copied)
        });
        // Free room that an interrupted move had reserved, and these have not used. If that fails
        // only room is lost, and fsck frees it.
        let _ = pool.give_back(layout);
        fragments.before.add(before);
        fragments.after.add(match *layout == was {
            true => before,
            false => pool.fragments(layout),
        });
        moved
    })?;
    Ok((done, fragments, failed))
}
