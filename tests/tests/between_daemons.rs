// SPDX-License-Identifier: Apache-2.0
//! Lengths and bytes that clients see, and changes that they may make, after a daemon has died and
//! before the next one serves.

use rushes_tests::fsx;
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition, Handle};
use rushes_tests::world::World;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

const TAKE_BYTES: usize = 3_000_000;
const PLAIN_BYTES: usize = 1_000_000;
const BLOCK: usize = 65_536;

/// A world whose smbd waits 60 s for the next daemon before it starts a recovery.
fn patient() -> Option<World> {
    let mut setup = fsx::setup("64MiB");
    setup.share.push(String::from("rushes:recover after = 60"));
    World::build(&setup)
}

/// Writes a file whose bytes the disk does not have yet.
fn record(client: &Connection, name: &str) {
    let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
    write(client, file, 5, TAKE_BYTES);
    client.close(file).expect("closed");
}

fn write(client: &Connection, file: Handle, seed: u64, length: usize) {
    for at in (0..length).step_by(BLOCK) {
        let bytes = pattern::bytes(seed, at as u64, BLOCK.min(length - at));
        client.write(file, at as u64, &bytes).expect("written");
    }
}

fn inode(world: &World, name: &str) -> u64 {
    fs::metadata(world.path(name)).expect("it is there").ino()
}

#[test]
fn a_new_file_is_not_taken_for_the_one_whose_inode_number_it_got() {
    let Some(mut world) = patient() else {
        return;
    };
    let client = fsx::client(&world);
    record(&client, "old.mov");
    record(&client, "other.mov");
    let number = inode(&world, "old.mov");
    world.daemon().kill();
    fs::remove_file(world.path("old.mov")).expect("our own file");
    // ext4 gives the first number that is free.
    let new = (0..20)
        .map(|index| format!("new-{index}.mov"))
        .find(|name| {
            fs::write(world.path(name), b"ten bytes!").expect("written");
            inode(&world, name) == number
        })
        .expect("the number is given again");

    let everybody = fs::Permissions::from_mode(0o666);
    fs::set_permissions(world.path(&new), everybody).expect("our own file");
    let size = |name: &str| client.list(name).expect("listed").map(|info| info.size);
    assert_eq!(size(&new), Some(10));
    let (file, info) = client.open(&new, Disposition::Open).expect("opened");
    assert_eq!(info.size, 10);
    assert_eq!(client.info(file).expect("asked by handle").size, 10);
    // The bytes of another file that the dead daemon had count in its length all the same.
    assert_eq!(size("other.mov"), Some(TAKE_BYTES as u64));

    world.daemon().start_again();
    assert_eq!(client.read(file, 0, 100).expect("read"), b"ten bytes!");
    world.everything_is_written();
    assert_eq!(fs::read(world.path(&new)).expect("read"), b"ten bytes!");
    let other = fs::read(world.path("other.mov")).expect("read");
    assert_eq!(other.len(), TAKE_BYTES);
    pattern::check(5, 0, &other, "other.mov");
}

#[test]
fn a_client_that_waits_for_a_daemon_keeps_none_from_starting() {
    let Some(mut world) = patient() else {
        return;
    };
    const WRITERS: u64 = 8;
    record(&fsx::client(&world), "take.mov");
    world.daemon().kill();
    // Its smbd has never seen a daemon: a truncation waits in its only thread for the bytes that
    // the dead one had.
    let client = fsx::client(&world);
    let files: Vec<_> = (0..WRITERS)
        .map(|index| client.open(&format!("plain-{index}.mov"), Disposition::OpenIf))
        .collect();
    let (take, _) = client.open("take.mov", Disposition::Open).expect("opened");
    std::thread::scope(|scope| {
        let client = &client;
        for file in &files {
            let file = file.expect("made").0;
            scope.spawn(move || write(client, file, 7, PLAIN_BYTES));
        }
        scope.spawn(move || client.set_size(take, 1_000_000).expect("cut"));
        std::thread::sleep(std::time::Duration::from_millis(500));
        world.daemon.as_mut().expect("one").start_again();
    });
    let log = world.daemon().log();
    assert!(!log.contains("serving without waiting"), "{log}");
    world.everything_is_written();
    for index in 0..WRITERS {
        let found = fs::read(world.path(&format!("plain-{index}.mov"))).expect("read");
        assert_eq!(found.len(), PLAIN_BYTES);
        pattern::check(7, 0, &found, "written without a daemon");
    }
    let take = fs::read(world.path("take.mov")).expect("read");
    assert_eq!(take.len(), 1_000_000);
    pattern::check(5, 0, &take, "take.mov");
}
