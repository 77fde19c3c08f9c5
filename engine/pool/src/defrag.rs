// SPDX-License-Identifier: Apache-2.0
//! Bringing files together that are in more pieces than they need be. [`defrag`] wants nobody to
//! use the pool meanwhile; a door moves files by [`crate::Move`].
//!
//! First what is in several objects though one member has room for all of it; then objects that are
//! scattered over their device.

use crate::balance::{all_of, each_with_record};
use crate::change::Drained;
use crate::error::PoolError;
use crate::failed::Failed;
use crate::gather::Defragged;
use crate::online::Move;
use crate::pool::Pool;
use std::path::PathBuf;

/// Bring together these files, or all in these folders; all there are if none is named. Bytes that
/// were moved stay moved, whenever it is interrupted; the same command again goes on. A file that
/// cannot be read or moved keeps nobody from the others.
///
/// `paths`  below the tree
pub fn defrag(
    pool: &Pool,
    paths: &[PathBuf],
    progress: impl FnMut(Drained),
) -> Result<(Drained, Defragged, Failed), PoolError> {
    let mut pieces = Defragged::default();
    let (done, failed) = each_with_record(pool, paths, progress, |stub, layout, copied| {
        let before = pool.pieces(layout);
        let was = layout.clone();
        let together = Move::gathering(pool, stub, layout);
        let moved = all_of(pool, stub, layout, together, copied).and_then(|()| {
            let afresh = Move::afresh(pool, layout);
            all_of(pool, stub, layout, afresh, copied)
        });
        // Room that a move that was interrupted had reserved, and these have not used. It is only
        // room, which fsck sees to otherwise.
        let _ = pool.give_back(layout);
        pieces.before.add(before);
        pieces.after.add(match *layout == was {
            true => before,
            false => pool.pieces(layout),
        });
        moved
    })?;
    Ok((done, pieces, failed))
}
