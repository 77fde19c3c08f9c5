// SPDX-License-Identifier: Apache-2.0
//! Folders of a pool listed through its mount: by readers with small buffers, from offsets, with
//! and without a stat of each entry, and while names come and go.

use rushes_tests::pool::{EXT4, PoolWorld, XFS};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir, SeekFrom, fstat, open, seek, statat};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

/// A name, its inode number, and the offset behind it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Found {
    name: CString,
    number: u64,
    next: u64,
}

fn opened(folder: &Path) -> OwnedFd {
    open(
        folder,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .expect("it is there")
}

/// The entries that one getdents64(2) with `room` bytes returns; none at the end. `looks`: stats
/// each of them, too.
fn some(folder: &OwnedFd, room: usize, looks: bool) -> Vec<Found> {
    let mut bytes = vec![MaybeUninit::uninit(); room];
    let mut entries = RawDir::new(folder, &mut bytes);
    let mut found = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry.expect("listed");
        found.push(Found {
            name: entry.file_name().to_owned(),
            number: entry.ino(),
            next: entry.next_entry_cookie(),
        });
        if entries.is_buffer_empty() {
            break;
        }
    }
    for one in found.iter().filter(|_| looks) {
        let seen = statat(folder, &one.name, AtFlags::SYMLINK_NOFOLLOW).expect("it is there");
        assert!(seen.st_ino == one.number || one.name.as_c_str() == c"..");
    }
    found
}

/// All entries from the folder's present offset on.
fn rest(folder: &OwnedFd, room: usize, looks: bool) -> Vec<Found> {
    let mut all = Vec::new();
    loop {
        let found = some(folder, room, looks);
        if found.is_empty() {
            return all;
        }
        all.extend(found);
    }
}

fn names(found: &[Found]) -> BTreeSet<String> {
    let names: BTreeSet<String> = found
        .iter()
        .map(|one| one.name.to_str().expect("text").to_owned())
        .collect();
    assert_eq!(names.len(), found.len(), "each once");
    names
}

/// Makes a folder with so many files. Returns  all its names, also `.` and `..`
fn made(folder: &Path, count: usize) -> BTreeSet<String> {
    fs::create_dir(folder).expect("made");
    let mut names: BTreeSet<String> = [".", ".."].map(String::from).into();
    for number in 0..count {
        let name = format!("frame{number:07}.dpx");
        File::create(folder.join(&name)).expect("made");
        names.insert(name);
    }
    names
}

/// Files in a folder: small ones, one that the mount lists in several chunks, and a large one, of
/// which only the first entries come with attributes.
const COUNTS: [usize; 4] = [0, 100, 1000, 5000];

#[test]
fn whoever_lists_gets_each_name_once_however_little_room_he_has() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64), (XFS, 300)]) else {
        return;
    };
    let all = COUNTS.map(|count| made(&world.path(format!("d{count}")), count));
    for is_known in [true, false] {
        for (count, all) in COUNTS.iter().zip(&all) {
            let path = world.path(format!("d{count}"));
            for room in [64, 256, 1024, 32_768, 1 << 20] {
                for looks in [false, true] {
                    let folder = opened(&path);
                    let found = rest(&folder, room, looks);
                    assert_eq!(&names(&found), all, "of {count} with room for {room}");
                    // Once more from the beginning, and from each fiftieth offset.
                    seek(&folder, SeekFrom::Start(0)).expect("rewound");
                    assert_eq!(rest(&folder, room, looks), found);
                    for (at, one) in found.iter().enumerate().step_by(50) {
                        seek(&folder, SeekFrom::Start(one.next)).expect("there it was");
                        let here = some(&folder, room, looks);
                        assert_eq!(here, found[at + 1..][..here.len()], "behind {one:?}");
                        assert!(!here.is_empty() || at + 1 == found.len());
                    }
                }
            }
        }
        if is_known {
            world.end();
            world.start();
        }
    }
}

#[test]
fn a_listing_goes_on_while_names_come_and_go_and_a_new_one_has_them_as_they_are() {
    let Some(world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    for (round, room) in [256, 1024, 32_768].into_iter().enumerate() {
        for looks in [false, true] {
            let path = world.path(format!("d{round}{looks}"));
            let mut now = made(&path, 5000);
            let folder = opened(&path);
            let (mut found, mut stays) = (Vec::new(), now.clone());
            for step in 0.. {
                let more = some(&folder, room, false);
                if more.is_empty() {
                    break;
                }
                found.extend(more);
                if step % 7 != 0 || step > 700 {
                    continue;
                }
                // Make one file, remove one, rename one.
                let gone = format!("frame{:07}.dpx", step * 3);
                let moved = format!("frame{:07}.dpx", step * 3 + 1);
                let (come, called) = (format!("come{step}"), format!("called{step}"));
                fs::write(path.join(&come), &come).expect("written");
                fs::remove_file(path.join(&gone)).expect("removed");
                fs::rename(path.join(&moved), path.join(&called)).expect("renamed");
                for name in [&gone, &moved] {
                    assert!(now.remove(name) && stays.remove(name));
                }
                now.extend([come.clone(), called.clone()]);
                // A new listing has the change, and so has that one when it is read again.
                if step % 49 == 0 {
                    let other = opened(&path);
                    assert_eq!(names(&rest(&other, room, looks)), now);
                    seek(&other, SeekFrom::Start(0)).expect("rewound");
                    fs::remove_file(path.join(&come)).expect("removed");
                    now.remove(&come);
                    assert_eq!(names(&rest(&other, room, looks)), now);
                }
            }
            let found = names(&found);
            assert!(found.is_superset(&stays), "what stays is listed");
            seek(&folder, SeekFrom::Start(0)).expect("rewound");
            assert_eq!(names(&rest(&folder, room, looks)), now);
            fs::remove_dir_all(path).expect("removed");
        }
    }
}

#[test]
fn a_listing_costs_no_descriptor_a_name() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    let all = made(&world.path("d"), 1000);
    world.end();
    world.start();
    let open_count = || {
        let all = fs::read_dir(format!("/proc/{}/fd", world.keeper()));
        all.expect("it is there").count()
    };
    let before = open_count();
    let folder = opened(&world.path("d"));
    assert_eq!(names(&rest(&folder, 32_768, false)), all);
    let after = open_count();
    assert!(after < before + 20, "{before} and then {after}");
}

#[test]
fn a_folder_that_was_listed_and_removed_is_still_known_to_who_works_in_it() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    fs::create_dir_all(world.path("d/sub")).expect("made");
    world.end();
    world.start();
    let above = opened(&world.path("d"));
    assert_eq!(rest(&above, 32_768, false).len(), 3);
    let sub = opened(&world.path("d/sub"));
    fs::remove_dir(world.path("d/sub")).expect("removed");
    // The kernel keeps attributes for a second.
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(fstat(&sub).expect("it is open").st_nlink, 0);
}

#[test]
fn what_is_told_with_a_listing_is_what_the_files_are() {
    let Some(world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    let folder = world.path("d");
    fs::create_dir(&folder).expect("made");
    let told = || {
        let listed = fs::read_dir(&folder).expect("listed");
        let mut told: Vec<(u64, u64)> = listed
            .map(|entry| {
                let seen = entry.expect("listed").metadata().expect("known");
                (seen.ino(), seen.len())
            })
            .collect();
        told.sort();
        told
    };
    for round in 1..20u64 {
        // New files get inode numbers of removed ones. All are open; all but one have bytes.
        let files: Vec<File> = (0..20)
            .map(|number| File::create_new(folder.join(format!("f{number}"))).expect("made"))
            .collect();
        for (number, file) in files.iter().enumerate().skip(1) {
            file.write_all_at(b"x", round * 1000 + number as u64)
                .expect("written");
        }
        let mut expected: Vec<(u64, u64)> = files
            .iter()
            .map(|file| file.metadata().expect("known"))
            .map(|seen| (seen.ino(), seen.len()))
            .collect();
        expected.sort();
        assert_eq!(told(), expected);
        drop(files);
        for number in 0..20 {
            let path = folder.join(format!("f{number}"));
            let length = if number == 0 {
                0
            } else {
                round * 1000 + number + 1
            };
            assert_eq!(fs::metadata(&path).expect("known").len(), length);
            fs::remove_file(path).expect("removed");
        }
        assert_eq!(told(), []);
    }
}
