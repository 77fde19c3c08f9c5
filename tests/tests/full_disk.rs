// SPDX-License-Identifier: Apache-2.0
//! A disk that is almost full: a write over shared blocks needs new ones, and the daemon gives room
//! that it reserved ahead of an idle client to another client.

use rushes_tests::disk::run;
use rushes_tests::fsx::{client, world};
use rushes_tests::pattern;
use rushes_tests::smb2::{Chunk, Connection, DISK_FULL, Disposition, Handle, Status};
use rushes_tests::world::{Backing, World};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

const BLOCK: usize = 65_536;
const XFS: Backing = Backing::Small(&["mkfs.xfs", "-q", "-f", "-m", "reflink=1"]);
/// Length of the file that the client overwrites. Units: bytes.
const LENGTH: usize = 24 << 20;

/// Free bytes, as an unprivileged process may use them.
fn room(world: &World) -> u64 {
    let output = Command::new("stat")
        .args(["-f", "-c", "%S %a"])
        .arg(world.disk.path())
        .output()
        .expect("coreutils");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace()
        .map(|number| number.parse::<u64>().expect("a number"))
        .product()
}

/// Fills the disk until `leave` bytes are free.
fn fill(world: &World, leave: u64) {
    for turn in 0..20 {
        let too_much = room(world).saturating_sub(leave);
        if too_much < 1 << 18 {
            return;
        }
        // A file system does not give its very last blocks to one request.
        let part = if turn < 3 { too_much } else { too_much / 2 };
        let _ = Command::new("fallocate")
            .arg("-l")
            .arg(part.to_string())
            .arg(world.path(&format!("filler{turn}")))
            .output();
    }
}

fn remove_fillers(world: &World) {
    for turn in 0..20 {
        let _ = fs::remove_file(world.path(&format!("filler{turn}")));
    }
}

/// Overwrites block by block until the disk is full. Returns the count of acknowledged blocks.
fn overwrite(client: &Connection, file: Handle, model: &mut [u8]) -> usize {
    for block in 0..LENGTH / BLOCK {
        let at = block * BLOCK;
        let bytes = pattern::bytes(7, at as u64, BLOCK);
        match client.write(file, at as u64, &bytes) {
            Ok(()) => model[at..at + BLOCK].copy_from_slice(&bytes),
            Err(status) => {
                assert_eq!(status, Status(DISK_FULL), "block {block}");
                return block;
            }
        }
    }
    LENGTH / BLOCK
}

/// The file has all acknowledged bytes, and may have any part of the refused block.
fn check_overwritten(world: &World, model: &[u8], acknowledged: usize) {
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert_eq!(found.len(), model.len());
    let refused = acknowledged * BLOCK..(acknowledged + 1) * BLOCK;
    let is_wrong = |at: &usize| found[*at] != model[*at] && !refused.contains(at);
    assert_eq!((0..found.len()).find(is_wrong), None, "first wrong byte");
    let copy = fs::read(world.path("copy.mov")).expect("the file is there");
    pattern::check(1, 0, &copy, "who shared its blocks");
}

/// `share` makes copy.mov of take.mov, which a client has open.
fn overwriting_a_shared_file(share: impl Fn(&World, &Connection, Handle)) {
    let Some(mut world) = world(XFS) else {
        return;
    };
    world.put("take.mov", 1, LENGTH);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let mut model = pattern::bytes(1, 0, LENGTH);
    share(&world, &client, file);
    fill(&world, 6 << 20);
    let acknowledged = overwrite(&client, file, &mut model);
    assert!(
        acknowledged < LENGTH / BLOCK,
        "all was acknowledged with 6 MB left"
    );
    assert!(acknowledged > 16, "full too early: {acknowledged} blocks");
    client
        .flush(file)
        .expect("what was acknowledged has its room");
    client.close(file).expect("closed");
    world.everything_is_written();
    check_overwritten(&world, &model, acknowledged);
    assert!(!world.daemon().log().contains("failed"));
}

fn reflink(world: &World) {
    run(Command::new("cp")
        .arg("--reflink=always")
        .arg(world.path("take.mov"))
        .arg(world.path("copy.mov")));
}

#[test]
fn who_overwrites_shared_blocks_hears_of_a_full_disk_before_it_is_acknowledged() {
    overwriting_a_shared_file(|world, _, _| reflink(world));
}

#[test]
fn so_does_who_wrote_to_the_file_before_it_was_copied_by_the_server() {
    overwriting_a_shared_file(|world, client, file| {
        // The daemon has found that the file shares no blocks.
        let bytes = pattern::bytes(1, 0, BLOCK);
        client.write(file, 0, &bytes).expect("written");
        client.flush(file).expect("flushed");
        let (copy, _) = client.open("copy.mov", Disposition::OpenIf).expect("made");
        for at in (0..LENGTH as u64).step_by(1 << 20) {
            let chunk = Chunk {
                from: at,
                to: at,
                length: 1 << 20,
            };
            client.copy(file, copy, &[chunk]).expect("copied");
        }
        client.close(copy).expect("closed");
        // The file's blocks stay shared when another client opens and reads it.
        let other = rushes_tests::fsx::client(world);
        let (again, _) = other.open("take.mov", Disposition::Open).expect("opened");
        other.read(again, 0, BLOCK).expect("read");
        // The test rests on this.
        let output = Command::new("filefrag")
            .arg("-v")
            .arg(world.path("take.mov"))
            .output();
        let text = String::from_utf8_lossy(&output.expect("e2fsprogs").stdout).into_owned();
        assert!(text.contains("shared"), "{text}");
    });
}

/// Appends until the disk is full. Returns the count of acknowledged bytes.
fn write_all(client: &Connection, file: Handle, seed: u64) -> u64 {
    let mut written = 0;
    loop {
        let bytes = pattern::bytes(seed, written, BLOCK);
        match client.write(file, written, &bytes) {
            Ok(()) => written += BLOCK as u64,
            Err(status) => {
                assert_eq!(status, Status(DISK_FULL));
                return written;
            }
        }
    }
}

fn check_written(world: &World, name: &str, seed: u64, length: u64) {
    let found = fs::read(world.path(name)).expect("the file is there");
    assert_eq!(found.len() as u64, length, "{name}");
    pattern::check(seed, 0, &found, name);
}

const FILE_SYSTEMS: [&[&str]; 2] = [
    &["mkfs.ext4", "-q", "-F", "-m", "0"],
    &["mkfs.xfs", "-q", "-f"],
];
/// The part of the reported free space that a file system may need for itself. Units: bytes.
const OVERHEAD: u64 = 4 << 20;

#[test]
fn what_a_writer_has_reserved_ahead_is_his_own_to_the_last_block() {
    for mkfs in FILE_SYSTEMS {
        let Some(mut world) = world(Backing::Small(mkfs)) else {
            return;
        };
        let before = room(&world);
        let client = client(&world);
        let (file, _) = client.open("take.mov", Disposition::OpenIf).expect("made");
        let written = write_all(&client, file, 1);
        assert!(
            written > before - OVERHEAD,
            "{mkfs:?}: {written} of {before}"
        );
        client.flush(file).expect("it has its room");
        client.close(file).expect("closed");
        world.everything_is_written();
        check_written(&world, "take.mov", 1, written);
    }
}

/// Room that the daemon reserved ahead of one writer, which has the file open and does not write
/// for the moment, goes to another writer that fills the disk.
#[test]
fn what_one_has_reserved_ahead_is_another_s_when_the_disk_is_full() {
    for mkfs in FILE_SYSTEMS {
        let Some(mut world) = world(Backing::Small(mkfs)) else {
            return;
        };
        let before = room(&world);
        let (one, other) = (client(&world), client(&world));
        let (ahead, _) = one.open("one.mov", Disposition::OpenIf).expect("made");
        const WRITTEN: u64 = 6 << 20;
        for at in (0..WRITTEN).step_by(BLOCK) {
            let bytes = pattern::bytes(1, at, BLOCK);
            one.write(ahead, at, &bytes).expect("written");
        }
        one.flush(ahead).expect("flushed");
        let taken = || fs::metadata(world.path("one.mov")).expect("there").blocks() * 512;
        assert!(
            taken() > WRITTEN + (4 << 20),
            "{} bytes are reserved",
            taken()
        );
        let (file, _) = other.open("other.mov", Disposition::OpenIf).expect("made");
        let written = write_all(&other, file, 2);
        assert!(
            written > before - WRITTEN - OVERHEAD,
            "{mkfs:?}: {written} bytes of {before}; {} are taken for {WRITTEN}",
            taken()
        );
        assert!(taken() < WRITTEN + (1 << 20), "{} bytes are taken", taken());
        other.flush(file).expect("flushed");
        // The first client keeps the bytes that it wrote, and may get the error of the full disk.
        let more = pattern::bytes(1, WRITTEN, BLOCK);
        let refused = one.write(ahead, WRITTEN, &more);
        assert!(
            refused.is_ok() || refused == Err(Status(DISK_FULL)),
            "{refused:?}"
        );
        let length = WRITTEN + if refused.is_ok() { BLOCK as u64 } else { 0 };
        one.close(ahead).expect("closed");
        other.close(file).expect("closed");
        world.everything_is_written();
        check_written(&world, "one.mov", 1, length);
        check_written(&world, "other.mov", 2, written);
    }
}

/// A local program shares blocks after their bytes were acknowledged; no server can know of it. The
/// flush returns an error, nothing is lost, and the daemon writes the bytes when there is room.
#[test]
fn blocks_that_are_shared_behind_our_back_are_told_and_nothing_is_lost() {
    let Some(mut world) = world(Backing::SlowXfs) else {
        return;
    };
    world.put("take.mov", 1, LENGTH);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let mut model = pattern::bytes(1, 0, LENGTH);
    fill(&world, 2 << 20);
    // The daemon has not written bytes that it acknowledges from here on when their blocks become
    // shared.
    world.disk.tell("timing on");
    world.disk.tell("stall 1500");
    let acknowledged = overwrite(&client, file, &mut model);
    assert_eq!(acknowledged, LENGTH / BLOCK, "it has its blocks");
    reflink(&world);
    // The copy also has bytes that the daemon had written by then.
    let flushed = client.flush(file);
    assert!(flushed.is_err(), "there cannot be room for all of it");
    let back = client.read(file, 20 << 20, BLOCK).expect("read");
    pattern::check(7, 20 << 20, &back, "what clients see");
    let log = world.daemon().log();
    assert!(log.contains("take.mov"), "{log}");
    remove_fillers(&world);
    let end = Instant::now() + Duration::from_secs(20);
    while client.flush(file).is_err() {
        assert!(Instant::now() < end, "there is room again");
        std::thread::sleep(Duration::from_millis(100));
    }
    client.close(file).expect("closed");
    world.everything_is_written();
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert!(found == model);
}
