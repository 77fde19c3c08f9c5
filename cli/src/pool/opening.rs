// SPDX-License-Identifier: Apache-2.0
//! A pool, opened: to look at it, or for this process alone, once its objects have all acknowledged
//! bytes.

use super::error::CommandError;
use super::words::told;
use rushes_fuse::Unwritten;
use rushes_pool::{Pool, PoolError};
use std::path::Path;
use std::time::{Duration, Instant};

/// A mount has ended within this time after its unmount.
const ENDING: Duration = Duration::from_secs(10);
/// A shorter wait needs no message.
const SILENT: Duration = Duration::from_secs(1);

/// A daemon that goes on writing after a mount has ended needs some seconds.
pub(crate) const WRITTEN_PATIENCE: Duration = Duration::from_secs(30);

/// The pool with its catalogue, and its members as they are now.
pub(crate) fn seen(catalogue: &Path) -> Result<Pool, String> {
    Pool::look(catalogue).map_err(told)
}

/// Opens the pool for this process alone. A mount that was unmounted a moment ago still writes its
/// names and ends in a while: this waits for it.
pub(crate) fn serve(catalogue: &Path) -> Result<Pool, PoolError> {
    let end = Instant::now() + ENDING;
    let mut is_said = false;
    loop {
        let error = match Pool::serve(catalogue) {
            Err(error @ PoolError::Served { .. }) => error,
            opened => return opened,
        };
        let path = catalogue.canonicalize();
        let is_mounted = path
            .is_ok_and(|path| rushes_pool::mounts_of(&path).is_ok_and(|mounts| !mounts.is_empty()));
        if is_mounted {
            return Err(error);
        }
        if Instant::now() > end {
            return Err(with_keeper(error));
        }
        if !is_said && Instant::now() + ENDING > end + SILENT {
            eprintln!(
                "rushes: {}. Waiting for its end, {} s at most",
                with_keeper(error),
                ENDING.as_secs()
            );
            is_said = true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// For a pool that is not mounted here: names the process elsewhere that keeps it. It looks at all
/// processes, so not at each try.
fn with_keeper(error: PoolError) -> PoolError {
    match error {
        PoolError::Served {
            catalogue,
            mut holder,
        } => {
            if let Some(clause) = rushes_pool::kept_elsewhere(&catalogue) {
                holder += &format!(", unmounted here, but {clause}");
            }
            PoolError::Served { catalogue, holder }
        }
        other => other,
    }
}

/// A pool that is not mounted, once its objects have all acknowledged bytes.
pub(crate) fn settled(pool: Pool) -> Result<Pool, CommandError> {
    wait_until_written(&pool)?;
    Ok(pool)
}

/// Waits until no daemon has acknowledged bytes that its objects lack.
pub(crate) fn wait_until_written(pool: &Pool) -> Result<(), CommandError> {
    let waited = rushes_fuse::wait_until_written(pool, WRITTEN_PATIENCE, &say_that_it_waits);
    waited.map_err(|unwritten| {
        let catalogue = Some(pool.catalogue().path().to_path_buf());
        CommandError::NotWritten {
            catalogue,
            unwritten,
        }
    })
}

/// A message to the terminal: the command has not begun its work.
pub(crate) fn say_that_it_waits(unwritten: &Unwritten) {
    eprintln!(
        "rushes: {unwritten}: waiting for {}, {} s at most",
        match unwritten.is_daemon_there {
            true => "them",
            false => "a daemon",
        },
        WRITTEN_PATIENCE.as_secs()
    );
}
