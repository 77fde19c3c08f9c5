// SPDX-License-Identifier: Apache-2.0
//! The member of the last frame of each sequence that is being recorded: the next frame follows it,
//! see docs/decisions/0034.
//!
//! In memory alone. A door that starts anew begins each sequence anew, where the pool's policy
//! says; that loses only evenness.

use rushes_core::pool::MemberNumber;
use rushes_core::stream::{FrameName, NUMBERS_LEAST_OF_OTHERS};
use rustix::fs::readlink;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sequences remembered by name; beyond that the pool forgets those longest not written to.
const COUNT_MAX: usize = 4096;

/// Fewer digits than this, without zeros in front, are more often those of single files: `take1`,
/// `take2`.
const DIGITS_LEAST: u8 = 3;

/// A sequence: its folder, and what stands before and behind its numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    folder: PathBuf,
    prefix: String,
    suffix: String,
}

/// The sequences of which a file may be a frame, and its number there.
///
/// The name alone does not say which of its digits are the number: those that change from file to
/// file are, as in `rushes_core::stream::SequenceTracker`, which follows readers. So there is a
/// reading for each run of digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// By the last digits.
    usual: Option<(Key, u64)>,
    others: Vec<(Key, u64)>,
}

impl Frame {
    /// By its name. None: it is no frame, or has no name.
    pub(crate) fn of(stub: BorrowedFd<'_>) -> Option<Frame> {
        let own = format!("/proc/self/fd/{}", stub.as_raw_fd());
        let path = readlink(own, Vec::new()).ok()?;
        Frame::of_path(&PathBuf::from(OsString::from_vec(path.into_bytes())))
    }

    fn of_path(path: &Path) -> Option<Frame> {
        let name = path.file_name()?.to_str()?;
        let folder = path.parent()?;
        let key = |frame: FrameName<'_>| {
            let counts = frame.width() >= DIGITS_LEAST || frame.padded();
            let key = Key {
                folder: folder.to_path_buf(),
                prefix: frame.prefix().to_owned(),
                suffix: frame.suffix().to_owned(),
            };
            (counts && !frame.is_clip()).then_some((key, frame.number()))
        };
        let frame = Frame {
            usual: FrameName::parse(name).and_then(key),
            others: FrameName::others(name).filter_map(key).collect(),
        };
        let is_none = frame.usual.is_none() && frame.others.is_empty();
        (!is_none).then_some(frame)
    }
}

/// The sequences that are being recorded.
#[derive(Debug, Default)]
pub(crate) struct Sequences(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    last: HashMap<Key, Last>,
    count: u64,
}

/// The last frame of a sequence.
#[derive(Debug)]
struct Last {
    member: MemberNumber,
    number: u64,
    /// Different numbers, one after the other, that frames of it had.
    number_count: usize,
    /// Its place among all frames.
    count: u64,
}

impl Sequences {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the frame before it went.
    pub(crate) fn last(&self, frame: &Frame) -> Option<MemberNumber> {
        let known = self.known();
        if let Some((key, _)) = &frame.usual
            && let Some(last) = known.last.get(key)
        {
            return Some(last.member);
        }
        // With this one there are enough numbers.
        let is_one = |last: &&Last, number: u64| {
            last.number != number && last.number_count + 1 >= NUMBERS_LEAST_OF_OTHERS
        };
        let mut others = frame.others.iter();
        others
            .find_map(|(key, number)| {
                let last = known.last.get(key)?;
                Some(last).filter(|last| is_one(last, *number))
            })
            .map(|last| last.member)
    }

    /// Note where a frame went.
    pub(crate) fn went_to(&self, frame: Frame, member: MemberNumber) {
        let known = &mut *self.known();
        known.count += 1;
        let of_usual = frame
            .usual
            .as_ref()
            .and_then(|(key, _)| known.last.get(key));
        // Then the last digits are the number, and each other reading would be a new sequence with
        // each frame.
        let is_usual = of_usual.is_some_and(|last| last.number_count > 1);
        let others = frame.others.into_iter().filter(|_| !is_usual);
        for (key, number) in frame.usual.into_iter().chain(others) {
            let count = known.count;
            let last = known.last.entry(key).or_insert(Last {
                member,
                number,
                number_count: 1,
                count,
            });
            last.number_count += usize::from(last.number != number);
            (last.member, last.number, last.count) = (member, number, count);
        }
        if known.last.len() > COUNT_MAX {
            // Half of them at once, so that this search is rare.
            let mut counts: Vec<u64> = known.last.values().map(|last| last.count).collect();
            counts.sort_unstable();
            let middle = counts[COUNT_MAX / 2];
            known.last.retain(|_, last| last.count > middle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(path: &str) -> Option<Frame> {
        Frame::of_path(Path::new(path))
    }

    /// Frames that go one after the other to the members with these numbers, unless they follow
    /// one.
    fn members(paths: &[&str]) -> Vec<u16> {
        let known = Sequences::default();
        let go = |(at, path): (usize, &&str)| {
            let frame = frame(path).unwrap_or_else(|| panic!("{path} is no frame"));
            let member = known.last(&frame).unwrap_or(MemberNumber(at as u16));
            known.went_to(frame, member);
            member.0
        };
        paths.iter().enumerate().map(go).collect()
    }

    #[test]
    fn frames_of_one_folder_and_name_follow_each_other_and_no_others() {
        let paths = ["/t/shot/f.0001.dpx", "/t/shot/f.0999.dpx"];
        assert_eq!(members(&paths), [0, 0]);
        for other in [
            "/t/other/f.0002.dpx",
            "/t/shot/g.0002.dpx",
            "/t/shot/f.0002.exr",
        ] {
            assert_eq!(members(&[paths[0], other]), [0, 1], "{other}");
        }
        assert_eq!(members(&["/t/f01.exr", "/t/f02.exr"]), [0, 0]);
        for none in ["/t/shot/A001_C002.mov", "/t/readme", "/t/take7", "/"] {
            assert_eq!(frame(none), None, "{none}");
        }
    }

    #[test]
    fn digits_that_change_are_the_number_wherever_they_stand() {
        let versions = [
            "/t/shot_1001_v002.exr",
            "/t/shot_1002_v002.exr",
            "/t/shot_1003_v002.exr",
            "/t/shot_1004_v002.exr",
        ];
        // The third one shows which digits are the number.
        assert_eq!(members(&versions), [0, 1, 1, 1]);
        let scans = [
            "/t/scan_000001_4k.dpx",
            "/t/scan_000002_4k.dpx",
            "/t/scan_000003_4k.dpx",
        ];
        assert_eq!(members(&scans), [0, 1, 1]);
        // Two cameras side by side are no sequence of two frames.
        let cameras = [
            "/t/cam01_f0001.dpx",
            "/t/cam02_f0001.dpx",
            "/t/cam01_f0002.dpx",
            "/t/cam02_f0002.dpx",
        ];
        assert_eq!(members(&cameras), [0, 1, 0, 1]);
    }

    #[test]
    fn those_longest_not_written_to_are_forgotten() {
        let known = Sequences::default();
        let one = |folder: usize, n: usize| {
            let path = format!("/t/{folder}/f.{n:06}.dpx");
            frame(&path).expect("a frame")
        };
        for n in 0..5 * COUNT_MAX {
            known.went_to(one(0, n), MemberNumber(7));
            known.went_to(one(n + 1, 1), MemberNumber(1));
        }
        assert_eq!(known.last(&one(0, 9)), Some(MemberNumber(7)));
        assert_eq!(known.last(&one(1, 2)), None);
        assert!(known.known().last.len() <= COUNT_MAX);
    }
}
