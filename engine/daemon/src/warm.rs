// SPDX-License-Identifier: Apache-2.0
//! Reads a share's names, inodes and extents ahead, while its disks are idle.
//!
//! Opening a file that is in no cache costs a disk several small reads, each with positioning there
//! and back. Twelve streams that start within three seconds lose a third of the disk to that. The
//! kernel keeps each entry that it has looked up while memory lasts, so we look everything up in
//! idle time: one thread a share, at the lowest priority, that pauses while a client reads through
//! the daemon. On shares with writes it also makes the file system look for free blocks near the
//! first folders, by a short reservation in a file without a name.

use crate::share::Share;
use rushes_sys::space::{self, Reserves};
use rushes_sys::{extents, priority};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Files and folders looked at in one share: a quarter of a million inodes take some 300 MB of the
/// kernel's memory, which it takes back when it needs it.
const ENTRY_COUNT_MAX: u32 = 250_000;
/// Smaller files have their extents in the inode.
const EXTENTS_BYTES_MIN: u64 = 8 << 20;
/// Extents to read of a file: the kernel caches the blocks of the extent tree on the way.
const EXTENT_COUNT_MAX: usize = 4096;
/// Folders near which the file system looks for free blocks: file systems spread folders, so some
/// are in each part of the disk.
const FOLDER_COUNT_MAX: u32 = 256;
/// How often a paused walk checks whether it may go on.
const STAND_STILL: Duration = Duration::from_millis(250);

/// The signals between walkers and the event loop.
#[derive(Debug, Default)]
pub(crate) struct Idleness {
    /// A read is under way or a contract exists: pause.
    pub(crate) busy: AtomicBool,
    /// The daemon ends.
    pub(crate) stop: AtomicBool,
    /// Walkers at work; their reads do not count as others' load.
    pub(crate) walking_count: AtomicU32,
}

/// Walk a share in a thread of its own. `finds_blocks`: clients write through the daemon, which
/// then reserves blocks.
pub(crate) fn start(
    share: Arc<Share>,
    idleness: Arc<Idleness>,
    finds_blocks: bool,
) -> io::Result<()> {
    idleness.walking_count.fetch_add(1, Ordering::Relaxed);
    let theirs = idleness.clone();
    let started = std::thread::Builder::new()
        .name(String::from("rushes-warm"))
        .spawn(move || {
            // Not fatal: the thread then has ordinary priority.
            let _ = priority::nice(19);
            let _ = priority::idle_io();
            let begin = std::time::Instant::now();
            let seen = walk(&share, &theirs, finds_blocks);
            theirs.walking_count.fetch_sub(1, Ordering::Relaxed);
            tracing::info!(
                "share {:?}: {} names and the extents of {} files are in memory after {:.1} s{}",
                share.config.name,
                seen.entry_count,
                seen.mapped_count,
                begin.elapsed().as_secs_f64(),
                if seen.entry_count >= ENTRY_COUNT_MAX {
                    "; the other files follow when they are opened"
                } else {
                    ""
                }
            );
        });
    if started.is_err() {
        idleness.walking_count.fetch_sub(1, Ordering::Relaxed);
    }
    started.map(drop)
}

/// The entries that a walk has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    entry_count: u32,
    mapped_count: u32,
    /// Folders near which it looked for free blocks.
    folder_count: u32,
}

/// Breadth first, so that folders near the root, mostly today's projects, come first. Skips a
/// folder that cannot be read: a client that opens it gets the error then.
fn walk(share: &Share, idleness: &Idleness, finds_blocks: bool) -> Seen {
    let mut seen = Seen::default();
    let Ok(root) = share.readable_root() else {
        return seen;
    };
    let mut finds_blocks = finds_blocks && share.reserves == Reserves::Extents;
    let mut folders = VecDeque::from([root]);
    while let Some(folder) = folders.pop_front() {
        if finds_blocks && seen.folder_count < FOLDER_COUNT_MAX {
            stand_still(share, idleness);
            if is_over(share, idleness) {
                return seen;
            }
            // A full or read-only disk would refuse near the next folder, too.
            finds_blocks = space::look_for_blocks(&folder).is_ok();
            seen.folder_count += u32::from(finds_blocks);
        }
        let Ok(entries) = Dir::read_from(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            stand_still(share, idleness);
            if is_over(share, idleness) || seen.entry_count >= ENTRY_COUNT_MAX {
                return seen;
            }
            seen.entry_count += 1;
            let Ok(status) = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            // Other file systems mounted below are no part of the share.
            if status.st_dev != share.st_dev {
                continue;
            }
            match FileType::from_raw_mode(status.st_mode) {
                FileType::Directory if folders.len() < ENTRY_COUNT_MAX as usize / 64 => {
                    folders.extend(open_in(&folder, name, OFlags::DIRECTORY));
                }
                FileType::RegularFile if status.st_size as u64 >= EXTENTS_BYTES_MIN => {
                    let map = open_in(&folder, name, OFlags::empty())
                        .and_then(|file| extents::of(file.as_fd(), EXTENT_COUNT_MAX).ok());
                    seen.mapped_count += u32::from(map.is_some());
                }
                _ => {}
            }
        }
    }
    seen
}

/// Pauses while clients read.
fn stand_still(share: &Share, idleness: &Idleness) {
    while idleness.busy.load(Ordering::Relaxed) && !is_over(share, idleness) {
        std::thread::sleep(STAND_STILL);
    }
}

/// The walk is of no more use: the daemon ends, or the share lies elsewhere.
fn is_over(share: &Share, idleness: &Idleness) -> bool {
    idleness.stop.load(Ordering::Relaxed) || share.is_left()
}

/// Opens a name without following a symlink, waiting for a program that holds a lease, or changing
/// its time of access.
fn open_in(folder: &OwnedFd, name: &std::ffi::CStr, kind: OFlags) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOATIME
        | OFlags::CLOEXEC
        | kind;
    openat(folder, name, flags, Mode::empty()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ShareConfig;

    #[test]
    fn everything_below_is_seen_once_and_nothing_through_symlinks() {
        let path = std::env::temp_dir().join(format!("rushes-warm-{}", std::process::id()));
        std::fs::create_dir_all(path.join("a/b")).unwrap();
        std::fs::write(path.join("a/b/1.dpx"), b"x").unwrap();
        let large = std::fs::File::create(path.join("a/large.mov")).unwrap();
        large.set_len(EXTENTS_BYTES_MIN).unwrap();
        // A link to the folder above: a walk through it would never end.
        std::os::unix::fs::symlink("..", path.join("a/up")).unwrap();
        let share = Share::open(&ShareConfig {
            name: String::from("s"),
            path: path.clone(),
            exclusive: false,
        })
        .unwrap();
        let idleness = Arc::new(Idleness::default());
        assert_eq!(walk(&share, &idleness, false).folder_count, 0);
        let seen = walk(&share, &idleness, true);
        assert_eq!(seen.entry_count, 5);
        assert!(seen.mapped_count <= 1, "{seen:?}");
        let looks = share.reserves == Reserves::Extents;
        assert_eq!(seen.folder_count, if looks { 3 } else { 0 });
        // Busy: it pauses, and ends when `stop` is set.
        idleness.busy.store(true, Ordering::Relaxed);
        start(Arc::new(share), idleness.clone(), true).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(idleness.walking_count.load(Ordering::Relaxed), 1);
        idleness.stop.store(true, Ordering::Relaxed);
        for _ in 0..200 {
            if idleness.walking_count.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(idleness.walking_count.load(Ordering::Relaxed), 0);
        std::fs::remove_dir_all(path).unwrap();
    }
}
