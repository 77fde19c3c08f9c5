// SPDX-License-Identifier: Apache-2.0
//! The program that changes a pool: this one, or, at its request, the mount that has the pool. Also
//! the words for the progress and the result of that work.

use super::error::CommandError;
use super::opening::{serve, settled};
use super::words::told;
use crate::show;
use indicatif::ProgressBar;
use rushes_pool::{Defragged, Door, Drained, Failed, Failure, Pool, PoolError, Request, Told};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::path::Path;

/// The program that changes a pool.
pub(crate) enum Hand {
    /// This program: no mount has the pool.
    Ours(Box<Pool>),
    /// The mount that has it.
    Mount(Door),
}

impl Hand {
    /// Errors   another process has it that takes no requests
    pub(crate) fn on(catalogue: &Path) -> Result<Hand, String> {
        match serve(catalogue) {
            Ok(pool) => Ok(Hand::Ours(Box::new(settled(pool)?))),
            Err(error @ PoolError::Served { .. }) => match Door::of(catalogue) {
                Some(door) => Ok(Hand::Mount(door)),
                None => Err(told(error)),
            },
            Err(error) => Err(told(error)),
        }
    }
}

/// The result of a mount's work.
#[derive(Default)]
pub(crate) struct Done {
    pub(crate) numbers: Vec<u16>,
    pub(crate) all: Drained,
    pub(crate) is_empty: bool,
    pub(crate) defragged: Defragged,
    pub(crate) failed: Failed,
}

/// Asks the mount. An interrupt of this program interrupts the work.
pub(crate) fn asked(door: Door, request: &Request, bar: &ProgressBar) -> Result<Done, PoolError> {
    let last = door.ask(request, |told| match told {
        Told::Added { count } => bar.set_position(count),
        Told::Moved { now } => bar.set_message(moved_so_far(now)),
        Told::Done { .. } | Told::Status { .. } | Told::Refused { .. } => {}
    })?;
    Ok(match last {
        Told::Done {
            numbers,
            all,
            is_empty,
            defragged,
            failed,
        } => Done {
            numbers,
            all,
            is_empty,
            defragged,
            failed,
        },
        _ => Done::default(),
    })
}

/// Prints the sentence when SIGINT or SIGTERM ends this program. Its work, its own or the mount's,
/// may stop at any instant.
pub(crate) fn say_when_interrupted(
    bar: &ProgressBar,
    sentence: String,
) -> Result<(), CommandError> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::Signals)?;
    let bar = bar.clone();
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            bar.finish_and_clear();
            eprintln!("{sentence}");
            // As without a handler: the caller of this program sees which signal ended it.
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// Files that stayed as they are, a line each, and how many more; empty if there are none.
pub(crate) fn failed_text(count: u64, first: &[Failure]) -> String {
    if count == 0 {
        return String::new();
    }
    let files = show::count(count, "file");
    let mut text = format!("{files} could not be read or moved:\n");
    for one in first {
        let (file, sentence) = (show::one_line(&one.file), show::one_line(&one.sentence));
        text.push_str(&format!("  {file}: {sentence}\n"));
    }
    let more = count.saturating_sub(first.len() as u64);
    if more > 0 {
        text.push_str(&format!("  and {more} more\n"));
    }
    text
}

pub(crate) fn moved_so_far(now: Drained) -> String {
    format!(
        "{} looked at, {} moved, {}",
        show::count(now.file_count, "file"),
        now.moved_count,
        show::bytes(now.moved_bytes)
    )
}
