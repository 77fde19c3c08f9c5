// SPDX-License-Identifier: Apache-2.0
//! Attributes that users give a file of a pool leave its layout the room to continue on another
//! member, and `rushes pool create` warns of a catalogue with little room for attributes.

use rushes_tests::disk::run;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const MIB: usize = 1 << 20;

fn set(path: &Path, name: &str, length: usize) -> Result<(), Errno> {
    setxattr(path, name, &vec![b'a'; length], XattrFlags::empty())
}

#[test]
fn a_file_with_large_attributes_goes_on_on_another_member() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 30), (EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    // Make the pool anew with a catalogue of 4 KiB blocks, as on a large disk.
    world.end();
    let (report, code) = world.json(&["destroy", "--yes"], &[]);
    assert_eq!(code, Some(0), "{report}");
    run(Command::new("umount").arg(world.scratch.path().join("catalogue")));
    world.disk("catalogue", (&["mkfs.ext4", "-q", "-F", "-b", "4096"], 64));
    assert!(world.create(&[]).status.success());
    world.start();
    let path = world.path("reel");
    let file = File::create(&path).expect("made");
    // An attribute that would take all room of the layout is refused, before and after the first
    // written byte, and nothing is changed.
    assert_eq!(set(&path, "user.large", 4000), Err(Errno::NOSPC));
    assert_eq!(set(&path, "user.large", 2800), Ok(()));
    file.write_all_at(&pattern::bytes(1, 0, MIB), 0)
        .expect("room");
    assert_eq!(set(&path, "user.large", 4000), Err(Errno::NOSPC));
    assert_eq!(set(&path, "user.second", 300), Err(Errno::NOSPC));
    assert_eq!(getxattr(&path, "user.large", &mut [0; 4096][..]), Ok(2800));
    for at in 1..75 {
        let piece = pattern::bytes(1, (at * MIB) as u64, MIB);
        let written = file.write_all_at(&piece, (at * MIB) as u64);
        written.unwrap_or_else(|error| panic!("{error} at {at} MiB"));
    }
    file.sync_all().expect("written");
    assert_eq!(world.members_of("reel"), [0, 1, 2]);
    check(&path, 1, 75 * MIB);
    // A smaller value is always taken, and a folder has no layout that needs room.
    assert_eq!(set(&path, "user.large", 2000), Ok(()));
    assert_eq!(set(&world.path(""), "user.large", 3900), Ok(()));
}

#[test]
fn a_catalogue_whose_blocks_are_small_is_warned_of() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 30)]) else {
        return;
    };
    world.end();
    let create = |name: &str, mkfs: &'static [&'static str]| {
        let catalogue = world.disk(name, (mkfs, 20));
        let member = world.disk(&format!("{name}-member"), (EXT4, 20));
        let output = Command::new(needs::path_of("rushes"))
            .args(["pool", "create", "--json"])
            .args([&catalogue, &member])
            .output()
            .expect("rushes starts");
        assert!(output.status.success(), "{output:?}");
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        said["warnings"].as_array().expect("a list").len()
    };
    let small = &["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "1024"];
    assert_eq!(create("small", small), 1);
    let large = &["mkfs.ext4", "-q", "-F", "-b", "1024", "-O", "ea_inode"];
    assert_eq!(create("large", large), 0);
    assert_eq!(create("usual", &["mkfs.ext4", "-q", "-F", "-b", "4096"]), 0);
}
