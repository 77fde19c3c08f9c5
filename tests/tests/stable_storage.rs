// SPDX-License-Identifier: Apache-2.0
//! A client that asks for stable storage gets its answer when the bytes are there: the disk loses
//! its power at once after the answer, with the contents of its write cache, and the medium has
//! every byte and the length.

use rushes_tests::fsx::{self, client};
use rushes_tests::pattern;
use rushes_tests::smb2::{Access, Connection, Disposition, Handle, Status};
use rushes_tests::world::{Backing, Setup, World};
use std::fs;
use std::path::Path;

const BLOCK: usize = 65_536;

/// How a client asks for stable storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    /// The server's `sync always = yes`.
    Always,
    /// `SMB2_WRITEFLAG_WRITE_THROUGH` of each write.
    Flag,
    /// `FILE_WRITE_THROUGH` of the open.
    Open,
    /// A flush after the last write.
    Flush,
    /// Not at all.
    Nobody,
}

fn setup(backing: Backing, asks: Asks) -> Setup {
    let mut setup = Setup {
        backing,
        ..fsx::setup("64MiB")
    };
    if asks == Asks::Always {
        setup.share.push(String::from("sync always = yes"));
    }
    setup
}

fn open(client: &Connection, name: &str, asks: Asks) -> Handle {
    let access = Access {
        write_through: asks == Asks::Open,
        ..Access::default()
    };
    client
        .open_as(name, Disposition::OpenIf, access)
        .expect("opened")
}

fn write(
    client: &Connection,
    file: Handle,
    asks: Asks,
    at: u64,
    bytes: &[u8],
) -> Result<(), Status> {
    match asks {
        Asks::Flag => client.write_through(file, at, bytes),
        _ => client.write(file, at, bytes),
    }
}

/// A new file and an old one, written in pieces of odd lengths and places. Returns the bytes of
/// them that the medium must have.
fn write_all(client: &Connection, asks: Asks) -> (Vec<u8>, Vec<u8>) {
    let new = open(client, "new.mov", asks);
    let mut new_model = Vec::new();
    for step in 0..12 {
        let at = new_model.len();
        let bytes = pattern::bytes(20 + step, at as u64, 1 + step as usize * 5_003);
        write(client, new, asks, at as u64, &bytes).expect("written");
        new_model.extend(bytes);
    }
    let old = open(client, "old.mov", asks);
    let mut old_model = pattern::bytes(1, 0, 2 << 20);
    for step in 0..8 {
        let at = step as usize * 200_001;
        let bytes = pattern::bytes(40 + step, at as u64, 30_000);
        write(client, old, asks, at as u64, &bytes).expect("written");
        old_model[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    if asks == Asks::Flush {
        client.flush(new).expect("flushed");
        client.flush(old).expect("flushed");
    }
    (new_model, old_model)
}

/// Bytes that the medium lacks, as a sentence; None: it has all of them.
fn missing(medium: &Path, name: &str, model: &[u8]) -> Option<String> {
    let Ok(found) = fs::read(medium.join(name)) else {
        return Some(format!("{name} is not there"));
    };
    let wrong = found.iter().zip(model).position(|(a, b)| a != b);
    (found.len() < model.len() || wrong.is_some()).then(|| {
        format!(
            "{name} has {} bytes of {}, the first wrong one is {wrong:?}",
            found.len(),
            model.len()
        )
    })
}

fn check(asks: Asks) {
    let Some(mut world) = World::build(&setup(Backing::Volatile, asks)) else {
        return;
    };
    world.write("old.mov", 1, 2 << 20);
    world.disk.make_cold();
    let client = client(&world);
    let (new, old) = write_all(&client, asks);
    let medium = world.disk.lose_power(&world.scratch, 5);
    let faults: Vec<String> = [("new.mov", &new), ("old.mov", &old)]
        .into_iter()
        .filter_map(|(name, model)| missing(&medium, name, model))
        .collect();
    if asks == Asks::Nobody {
        // Without a request the medium lacks bytes: the other cases do test something.
        assert_eq!(faults.len(), 2, "{faults:?}");
    } else {
        assert!(faults.is_empty(), "{asks:?}: {faults:?}");
    }
    assert!(world.daemon().is_alive());
}

#[test]
fn sync_always_is_answered_from_stable_storage() {
    check(Asks::Always);
}

#[test]
fn a_write_that_says_write_through_is_answered_from_stable_storage() {
    check(Asks::Flag);
}

#[test]
fn a_file_opened_for_write_through_is_answered_from_stable_storage() {
    check(Asks::Open);
}

#[test]
fn a_flush_is_answered_from_stable_storage() {
    check(Asks::Flush);
}

#[test]
fn who_asks_for_nothing_may_lose_it() {
    check(Asks::Nobody);
}

/// A write that asks for stable storage returns the error of a failing device itself, and a later
/// one does not.
fn check_failure(asks: Asks) {
    let Some(mut world) = World::build(&setup(Backing::Slow, asks)) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let place = world.disk.physical(&world.path("take.mov"), 1 << 20) & !4095;
    let client = client(&world);
    let file = open(&client, "take.mov", asks);
    let bytes = pattern::bytes(2, 1 << 20, BLOCK);
    write(&client, file, asks, 0, &bytes).expect("the device works there");
    world.disk.tell(&format!("fail write {place} 65536"));
    let failed = write(&client, file, asks, 1 << 20, &bytes);
    assert!(failed.is_err(), "{asks:?}: the device has failed");
    world.disk.tell("clear");
    world.everything_is_written();
    let again = write(&client, file, asks, 1 << 20, &bytes);
    assert_eq!(again, Ok(()), "{asks:?}: the device works again");
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert!(found[1 << 20..(1 << 20) + BLOCK] == bytes);
}

#[test]
fn a_failing_device_is_the_answer_under_sync_always() {
    check_failure(Asks::Always);
}

#[test]
fn a_failing_device_is_the_answer_to_a_write_through() {
    check_failure(Asks::Flag);
}

#[test]
fn a_failing_device_is_the_answer_of_a_file_opened_for_write_through() {
    check_failure(Asks::Open);
}
