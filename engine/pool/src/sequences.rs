// SPDX-License-Identifier: Apache-2.0
//! Where the last frame of each sequence that is being recorded went: the next one is to follow it (docs/decisions/0034).
//!
//! In memory alone. A door that starts anew begins each sequence anew, wherever the pool's policy says; nothing is lost by it but evenness.

use rushes_core::pool::MemberNumber;
use rushes_core::stream::FrameName;
use rustix::fs::readlink;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sequences that are remembered; of more those that were longest not written to are forgotten.
const COUNT_MAX: usize = 1024;

/// Fewer digits than this, without zeros in front, are more often those of single files: `take1`, `take2`.
const DIGITS_LEAST: u8 = 3;

/// A sequence: its folder, and what stands before and behind its numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sequence {
    folder: PathBuf,
    prefix: String,
    suffix: String,
}

impl Sequence {
    /// The one that a file is a frame of, by its name. None: it is none, or has no name.
    pub(crate) fn of(stub: BorrowedFd<'_>) -> Option<Sequence> {
        let own = format!("/proc/self/fd/{}", stub.as_raw_fd());
        let path = readlink(own, Vec::new()).ok()?;
        Sequence::of_path(PathBuf::from(OsString::from_vec(path.into_bytes())))
    }

    fn of_path(path: PathBuf) -> Option<Sequence> {
        let name = path.file_name()?.to_str()?;
        let frame = FrameName::parse(name).filter(|frame| !frame.is_clip())?;
        if frame.width() < DIGITS_LEAST && !frame.padded() {
            return None;
        }
        Some(Sequence {
            folder: path.parent()?.to_path_buf(),
            prefix: frame.prefix().to_owned(),
            suffix: frame.suffix().to_owned(),
        })
    }
}

/// Those that are being recorded.
#[derive(Debug, Default)]
pub(crate) struct Sequences(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Where the last frame went, and which it was of all.
    last: HashMap<Sequence, (MemberNumber, u64)>,
    count: u64,
}

impl Sequences {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its frame before went.
    pub(crate) fn last(&self, sequence: &Sequence) -> Option<MemberNumber> {
        self.known().last.get(sequence).map(|(member, _)| *member)
    }

    /// A frame of it went there.
    pub(crate) fn went_to(&self, sequence: Sequence, member: MemberNumber) {
        let known = &mut *self.known();
        known.count += 1;
        known.last.insert(sequence, (member, known.count));
        if known.last.len() > COUNT_MAX {
            // Half of them at once, so that it is seldom looked for.
            let mut counts: Vec<u64> = known.last.values().map(|(_, count)| *count).collect();
            counts.sort_unstable();
            let middle = counts[COUNT_MAX / 2];
            known.last.retain(|_, (_, count)| *count > middle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(path: &str) -> Option<Sequence> {
        Sequence::of_path(PathBuf::from(path))
    }

    #[test]
    fn frames_of_one_folder_and_name_are_one_sequence() {
        let one = sequence("/c/tree/shot/f.0001.dpx");
        assert!(one.is_some());
        assert_eq!(one, sequence("/c/tree/shot/f.0999.dpx"));
        assert!(sequence("/c/tree/shot/f01.exr").is_some());
        for other in [
            "/c/tree/other/f.0002.dpx",
            "/c/tree/shot/g.0002.dpx",
            "/c/tree/shot/f.0002.exr",
        ] {
            assert_ne!(one, sequence(other), "{other}");
        }
        for none in [
            "/c/tree/shot/A001_C002.mov",
            "/c/tree/readme",
            "/c/tree/take7",
            "/",
        ] {
            assert_eq!(sequence(none), None, "{none}");
        }
    }

    #[test]
    fn those_longest_not_written_to_are_forgotten() {
        let known = Sequences::default();
        let one = |n: usize| sequence(&format!("/c/tree/{n}/f.0001.dpx")).expect("a frame");
        for n in 0..5 * COUNT_MAX {
            known.went_to(one(0), MemberNumber(7));
            known.went_to(one(n + 1), MemberNumber(1));
        }
        assert_eq!(known.last(&one(0)), Some(MemberNumber(7)));
        assert_eq!(known.last(&one(1)), None);
        assert!(known.known().last.len() <= COUNT_MAX);
    }
}
