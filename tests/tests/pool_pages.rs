// SPDX-License-Identifier: Apache-2.0
//! The kernel's copies of a pool's files are never older than the files: pages, with each way to
//! write beside each way to read, and modes.

use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{EXT4, PoolWorld, put};
use rushes_tests::ways::{Hands, READERS, Range, WRITERS};
use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, statx};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE: usize = 4096;
const PAGE_COUNT: usize = 160;
const LENGTH: u64 = (PAGE_COUNT * PAGE) as u64;

/// Readers that read the file again and again through the kernel's cache, until `act` has ended.
fn beside_readers<T>(path: &Path, count: usize, act: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                let file = File::open(path).expect("there");
                let mut page = vec![0; PAGE];
                while !ended.load(Ordering::Acquire) {
                    for at in 0..PAGE_COUNT {
                        // The file may be truncated at this moment.
                        let _ = file.read_at(&mut page, (at * PAGE) as u64);
                    }
                }
            });
        }
        let ends = EndsReaders(&ended);
        let done = act();
        drop(ends);
        done
    })
}

/// Ends the readers when it is dropped, also where a test fails.
struct EndsReaders<'a>(&'a AtomicBool);

impl Drop for EndsReaders<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn old_pages(file: &File, byte: u8) -> usize {
    let mut bytes = vec![0; LENGTH as usize];
    file.read_exact_at(&mut bytes, 0).expect("read");
    let is_old = |page: &&[u8]| page.iter().any(|one| *one != byte);
    bytes.chunks(PAGE).filter(is_old).count()
}

/// The test generic/451 of xfstests.
#[test]
fn pages_are_not_older_than_an_asynchronous_write_past_the_cache() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    for is_kept in [false, true] {
        let members = [(EXT4, 64)];
        let world = match is_kept {
            true => PoolWorld::kept(&members),
            false => PoolWorld::build(&members),
        };
        let Some(world) = world else {
            return;
        };
        let path = world.path("f");
        put(&path, 1, LENGTH as usize).expect("there is room");
        let mut hands = Hands::new();
        // Beside these opens no reader gets passthrough.
        hands.open("direct", &path, OFlags::RDWR | OFlags::DIRECT);
        hands.open("written", &path, OFlags::WRONLY);
        let open = File::open(&path).expect("there");
        beside_readers(&path, 2, || {
            for round in 0..24u8 {
                let way = ["direct", "written"][usize::from(round % 2)];
                hands.does("aio", way, (0, LENGTH), &round.to_string());
                let anew = File::open(&path).expect("there");
                let old = (old_pages(&open, round), old_pages(&anew, round));
                assert_eq!(
                    old,
                    (0, 0),
                    "old pages of an open before and of a new one, of {PAGE_COUNT}; {way}, round {round}, kept: {is_kept}"
                );
            }
        });
    }
}

/// One row of the table: after a write of one way, each way to read has the new bytes, also opens
/// and mappings that have seen the old ones.
fn row(hands: &mut Hands, path: &Path, writer: &str, range: Range, byte: u8) {
    for (word, name) in READERS {
        hands.does(word, name, range, "-");
    }
    let expected = format!("{:02x}", hands.change(writer, range, byte));
    hands.open("new open", path, OFlags::RDONLY);
    for (word, name) in READERS.into_iter().chain([("see", "new open")]) {
        let seen = hands.does(word, name, range, "-");
        assert_eq!(seen, expected, "written: {writer}; read: {word}, {name}");
    }
    hands.close("new open");
}

/// The table: each way to write beside each way to read. `is_passed`: readers came first, and the
/// kernel reads the object itself.
fn table(hands: &mut Hands, world: &PoolWorld, is_passed: bool) {
    let path = world.path("f");
    put(&path, 1, LENGTH as usize).expect("there is room");
    let first = match is_passed {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    hands.open_to_read(&path, first);
    hands.open(
        "source",
        &world.path("source"),
        OFlags::RDWR | OFlags::CREATE,
    );
    let mut byte = 1;
    for writer in WRITERS {
        // An open for each way alone, so that the mount chooses the kind of each.
        hands.open_to_change(writer, &path);
        for range in [(0, LENGTH), (40 << 10, 8 << 10), (LENGTH - 4096, 4096)] {
            // A truncation goes to the end.
            let range = match writer {
                "cut and made longer" => (range.0, LENGTH - range.0),
                _ => range,
            };
            row(hands, &path, writer, range, byte);
            byte += 1;
        }
        hands.close(writer);
    }
    hands.close_readers();
    hands.close("source");
    std::fs::remove_file(&path).expect("removed");
}

#[test]
fn whoever_reads_in_whatever_way_sees_what_was_written_in_whatever_way() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    for is_kept in [false, true] {
        let members = [(EXT4, 64), (EXT4, 64)];
        let world = match is_kept {
            true => PoolWorld::kept(&members),
            false => PoolWorld::build(&members),
        };
        let Some(world) = world else {
            return;
        };
        let mut hands = Hands::new();
        table(&mut hands, &world, false);
        table(&mut hands, &world, true);
        // Through a daemon and its lanes.
        let _daemon = world.served(2, "");
        table(&mut hands, &world, false);
        drop(hands);
    }
}

/// A program that changes a file as another user than root.
const AS_NOBODY: &str = r#"
import ctypes, os, sys
os.setgid(65534); os.setuid(65534)
way, path = sys.argv[1:]
if way == "truncated":
    os.truncate(path, 5000)
else:
    fd = os.open(path, os.O_RDWR if way == "cached" else os.O_WRONLY)
    if way == "reserved":
        os.posix_fallocate(fd, 0, 9000)
    else:
        os.pwrite(fd, b"written", 100)
"#;

#[test]
fn set_id_bits_that_were_dropped_are_shown_to_nobody() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    let members = [(EXT4, 64)];
    for world in [PoolWorld::build(&members), PoolWorld::kept(&members)] {
        let Some(world) = world else {
            return;
        };
        set_id_bits_are_dropped(&world);
    }
}

fn set_id_bits_are_dropped(world: &PoolWorld) {
    for way in ["cached", "write only", "truncated", "reserved"] {
        let path = world.path("f");
        put(&path, 1, 8000).expect("there is room");
        let everybody = std::fs::Permissions::from_mode(0o6777);
        std::fs::set_permissions(&path, everybody).expect("ours");
        // Asks for the mode alone: the kernel asks the mount only for attributes that it lacks.
        let mode = || {
            let flags = StatxFlags::MODE;
            let found = statx(CWD, &path, AtFlags::empty(), flags).expect("there");
            found.stx_mode & 0o7777
        };
        assert_eq!(mode(), 0o6777, "{way}");
        let done = Command::new(needs::path_of("python3"))
            .args(["-c", AS_NOBODY, way])
            .arg(&path)
            .status();
        assert!(done.expect("python3 starts").success(), "{way}");
        assert_eq!(mode(), 0o777, "{way}");
        std::fs::remove_file(&path).expect("removed");
    }
}
