// SPDX-License-Identifier: Apache-2.0
//! More files that are being written than one bucket of the facts takes: doors write files without
//! a fact themselves, and each answer about any of the files is true.

use rushes_tests::facts::{WAYS, of_one_bucket, told};
use rushes_tests::fsx::{client, setup};
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition, Handle};
use rushes_tests::world::{Backing, World};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

const LENGTH: usize = 20_000;
/// Enough for forty in one of the 2,048 buckets; ext4 of a gigabyte has inodes for 65,536.
const MADE: usize = 60_000;

/// Makes many files as a program on the server would, and names those of one bucket `0.mov` and so
/// on. Returns their inodes.
fn meeting(world: &World) -> Vec<u64> {
    let folder = world.path("many");
    fs::create_dir(&folder).expect("our own disk");
    let made = (0..MADE).map(|index| {
        let path = folder.join(index.to_string());
        let file = File::create(&path).expect("there are inodes");
        let about = file.metadata().expect("it is open");
        ((path, about.ino()), about.dev(), about.ino())
    });
    let mut met: Vec<(PathBuf, u64)> = of_one_bucket(&world.scratch.folder("run"), made);
    assert!(met.len() >= WAYS + 4, "only {} meet", met.len());
    met.truncate(WAYS + 8);
    for (index, (path, _)) in met.iter().enumerate() {
        let name = world.path(&name_of(index));
        fs::rename(path, &name).expect("our own disk");
        fs::set_permissions(&name, fs::Permissions::from_mode(0o666)).expect("our own disk");
    }
    met.into_iter().map(|(_, inode)| inode).collect()
}

fn name_of(index: usize) -> String {
    format!("{index}.mov")
}

/// The bytes of a file in its n-th version.
fn version(number: u64, index: usize) -> Vec<u8> {
    pattern::bytes(number * 1000 + index as u64, 0, LENGTH)
}

/// Whether the medium has these bytes of a file; the kernel's cache does not count.
fn is_on_the_disk(world: &World, name: &str, bytes: &[u8]) -> bool {
    let image = File::open(world.scratch.path().join("disk.img")).expect("the disk is an image");
    bytes
        .chunks(4096)
        .zip((0..).step_by(4096))
        .all(|(block, at)| {
            let place = world.disk.physical(&world.path(name), at);
            let mut found = vec![0; block.len()];
            image.read_exact_at(&mut found, place).expect("it is there");
            found == block
        })
}

fn seen(client: &Connection, name: &str) -> (u64, u64, Vec<u8>) {
    let (file, info) = client.open_to_read(name).expect("opened");
    let listed = client.list(name).expect("listed").expect("it has a name");
    let bytes = client.read(file, 0, LENGTH).unwrap_or_default();
    client.close(file).expect("closed");
    (info.size, listed.size, bytes)
}

#[test]
fn files_without_a_place_among_the_facts_are_what_their_clients_are_told() {
    let mut setup = setup("64MiB");
    setup.backing = Backing::Ext4;
    // Only the test starts a recovery.
    setup.share.push(String::from("rushes:recover after = 600"));
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    let inodes = meeting(&world);
    let (writer, other) = (client(&world), client(&world));
    let files: Vec<Handle> = (0..inodes.len())
        .map(|index| writer.open(&name_of(index), Disposition::Open))
        .map(|opened| opened.expect("opened").0)
        .collect();
    for (index, &file) in files.iter().enumerate() {
        writer.write(file, 0, &version(1, index)).expect("taken");
        let info = writer.info(file).expect("it is open");
        assert_eq!(info.size, LENGTH as u64, "{index}, at once");
    }
    for (index, &file) in files.iter().enumerate() {
        let (opened, listed, bytes) = seen(&other, &name_of(index));
        assert_eq!((opened, listed), (LENGTH as u64, LENGTH as u64), "{index}");
        assert!(bytes == version(1, index), "{index} by another client");
        writer.flush(file).expect("flushed");
        let about = fs::metadata(world.path(&name_of(index))).expect("it is there");
        assert_eq!(about.len(), LENGTH as u64, "{index} by a local stat");
        assert!(
            is_on_the_disk(&world, &name_of(index), &version(1, index)),
            "{index} was flushed, and the disk has not all of it"
        );
    }
    let log = world.daemon().log();
    assert!(log.contains("its bucket of the facts is full"), "{log}");

    // The daemon dies with bytes in memory; clients go on writing a file that has no fact.
    for (index, &file) in files.iter().enumerate() {
        writer.write(file, 0, &version(2, index)).expect("taken");
    }
    world.daemon().kill();
    let told = told(&world.scratch.folder("run"));
    let lacks = |index: usize| told.contains(&inodes[index]);
    let lacking = (0..files.len()).filter(|&index| lacks(index)).count();
    assert!((8..=WAYS).contains(&lacking), "{lacking} lack bytes");
    for (index, &file) in files.iter().enumerate() {
        if !lacks(index) {
            let (size, _, bytes) = seen(&other, &name_of(index));
            assert_eq!(size, LENGTH as u64, "{index}, without a daemon");
            assert!(bytes == version(2, index), "{index} without a daemon");
            let written = writer.write(file, 0, &version(3, index));
            written.expect("written without a daemon");
        }
    }
    let recovered = world.rushes(&["recover"]).output().expect("built");
    assert!(recovered.status.success(), "{recovered:?}");
    for index in 0..files.len() {
        let newest = if lacks(index) { 2 } else { 3 };
        let found = fs::read(world.path(&name_of(index))).expect("it is there");
        assert!(found == version(newest, index), "{index} after recovery");
    }

    // The same with the next daemon, which has places for as many files.
    world.daemon().start_again();
    for (index, &file) in files.iter().enumerate() {
        writer.write(file, 0, &version(4, index)).expect("taken");
    }
    for (index, &file) in files.iter().enumerate() {
        let (size, listed, bytes) = seen(&other, &name_of(index));
        assert_eq!((size, listed), (LENGTH as u64, LENGTH as u64), "{index}");
        assert!(bytes == version(4, index), "{index} with the next daemon");
        writer.flush(file).expect("flushed");
        assert!(is_on_the_disk(&world, &name_of(index), &version(4, index)));
        writer.close(file).expect("closed");
    }
    world.everything_is_written();
}
