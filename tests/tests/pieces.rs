// SPDX-License-Identifier: Apache-2.0
//! The daemon writes bytes that it acknowledged in pieces of any size and in any order. If a
//! program then makes the file unwritable, the daemon keeps the bytes, names the file and the way
//! out in its log, and writes the bytes when it can.

use rushes_tests::disk::run;
use rushes_tests::fsx::{client, world};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, XFS};
use rushes_tests::random::Random;
use rushes_tests::same_file::round;
use rushes_tests::smb2::Disposition;
use rushes_tests::stand::Stand;
use rushes_tests::world::Backing;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// More buffers than one request of the kernel takes, which is IOV_MAX.
const PIECES: u64 = 1500;

#[test]
fn bytes_one_by_one_over_smb_are_written() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    let client = client(&world);
    let bytes = pattern::bytes(1, 0, PIECES as usize);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    for at in 0..PIECES {
        let one = &bytes[at as usize..=at as usize];
        client.write(file, at, one).expect("acknowledged");
    }
    client.flush(file).expect("flushed");
    assert!(fs::read(world.path("a.mov")).expect("there") == bytes);
    // In any order, a page's worth of pieces that overlap.
    let mut random = Random(5);
    let mut model = bytes;
    model.resize(9000, 0);
    for seed in 0..PIECES {
        let at = random.below(8900);
        let piece = pattern::bytes(seed, at, 1 + random.below(60) as usize);
        client.write(file, at, &piece).expect("acknowledged");
        model[at as usize..at as usize + piece.len()].copy_from_slice(&piece);
    }
    client.write(file, 8999, &[0]).expect("acknowledged");
    client.flush(file).expect("flushed");
    assert!(fs::read(world.path("a.mov")).expect("there") == model);
    client.close(file).expect("closed");
    world.everything_is_written();
}

#[test]
fn bytes_one_by_one_on_a_pool_are_written() {
    let Some(world) = PoolWorld::build(&[(EXT4, 100), (XFS, 300)]) else {
        return;
    };
    let daemon = world.served(2, "");
    let bytes = pattern::bytes(1, 0, PIECES as usize);
    let mut file = File::create(world.path("a.mov")).expect("made");
    for one in bytes.chunks(1) {
        file.write_all(one).expect("taken");
    }
    file.sync_all().expect("synced");
    assert!(fs::read(world.path("a.mov")).expect("there") == bytes);
    daemon.wait_for("nothing is left to be written", |status| {
        status["write"]["used_bytes"] == 0
    });
}

/// Pages whose order in the file differs from that in the lane: each is a buffer of its own.
#[test]
fn pages_in_any_order_on_a_pool_are_written() {
    let Some(world) = PoolWorld::build(&[(EXT4, 100)]) else {
        return;
    };
    let daemon = world.served(1, "");
    let bytes = pattern::bytes(2, 0, PIECES as usize * 4096);
    let file = File::create(world.path("a.mov")).expect("made");
    // 7 and 1500 have no divisor in common.
    for step in 0..PIECES {
        let at = (step * 7 % PIECES) as usize * 4096;
        let page = &bytes[at..at + 4096];
        file.write_all_at(page, at as u64).expect("taken");
    }
    file.sync_all().expect("synced");
    assert!(fs::read(world.path("a.mov")).expect("there") == bytes);
    daemon.wait_for("nothing is left to be written", |status| {
        status["write"]["used_bytes"] == 0
    });
}

#[test]
fn a_file_that_is_made_immutable_is_kept_until_it_is_not() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    let bytes = pattern::bytes(1, 0, 100_000);
    for (part, at) in bytes.chunks(60_000).zip([0, 60_000]) {
        client.write(file, at, part).expect("acknowledged");
    }
    let chattr = |how: &str| run(Command::new("chattr").arg(how).arg(world.path("a.mov")));
    chattr("+i");
    assert!(client.flush(file).is_err(), "it cannot be written");
    // Other files of the same session are written.
    let (other, _) = client.open("b.mov", Disposition::OpenIf).expect("made");
    client.write(other, 0, &bytes[..60_000]).expect("taken");
    client.flush(other).expect("flushed");
    assert!(client.flush(file).is_err(), "still");
    assert!(client.read(file, 0, 60_000).as_deref() == Ok(&bytes[..60_000]));
    chattr("-i");
    world.daemon().wait_for_log("chattr -i lets it be written");
    world.everything_is_written();
    client.flush(file).expect("flushed");
    assert!(fs::read(world.path("a.mov")).expect("there") == bytes);
    let said = world.daemon().log().matches("chattr -i").count();
    assert!(said < 4, "said {said} times");
}

#[test]
fn a_stop_does_not_wait_for_long_for_a_file_that_cannot_be_written() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    let client = client(&world);
    let bytes = pattern::bytes(1, 0, 100_000);
    for name in ["a.mov", "b.mov"] {
        let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
        client
            .write(file, 0, &bytes[..60_000])
            .expect("acknowledged");
        client
            .write(file, 60_000, &bytes[60_000..])
            .expect("acknowledged");
    }
    let path = world.path("a.mov");
    let chattr = |how: &str| run(Command::new("chattr").arg(how).arg(&path));
    chattr("+i");
    let begun = Instant::now();
    let ended = world.daemon().end();
    let took = begun.elapsed();
    assert_eq!(ended.code(), Some(1), "{}", world.daemon().log());
    let waits = Duration::from_secs(15)..Duration::from_secs(60);
    assert!(waits.contains(&took), "{took:?}: {}", world.daemon().log());
    let log = world.daemon().log();
    let said = log.lines().last().unwrap_or_default();
    assert!(said.contains("a.mov") && !said.contains("b.mov"), "{said}");
    assert!(fs::read(world.path("b.mov")).expect("there") == bytes);
    chattr("-i");
    world.daemon().start_again();
    world.everything_is_written();
    assert!(fs::read(world.path("a.mov")).expect("there") == bytes);
}

/// A file system whose blocks are larger than our pages, as since Linux 6.12, takes no request of a
/// page past the kernel's cache. Doors read and write its files themselves; a write by the daemon
/// would go through that cache.
#[test]
fn a_file_system_of_large_blocks_is_written() {
    let Some(mut world) = world(Backing::LargeBlocks) else {
        return;
    };
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    let mut random = Random(7);
    let mut model = vec![0; 300_000];
    for seed in 0..60 {
        let at = random.below(240_000);
        let piece = pattern::bytes(seed, at, 1 + random.below(60_000) as usize);
        client.write(file, at, &piece).expect("acknowledged");
        model[at as usize..at as usize + piece.len()].copy_from_slice(&piece);
        if seed % 20 == 19 {
            client.flush(file).expect("flushed");
        }
    }
    client.write(file, 299_999, &[0]).expect("acknowledged");
    client.flush(file).expect("flushed");
    assert!(fs::read(world.path("a.mov")).expect("there") == model);
    for at in (0..300_000).step_by(60_000) {
        let found = client.read(file, at as u64, 60_000).expect("read");
        assert!(found == model[at..at + 60_000], "{at}");
    }
    client.close(file).expect("closed");
    world.everything_is_written();
}

/// A sample of `make same-file-kills`.
#[test]
fn clients_of_one_file_keep_their_order_whoever_is_killed() {
    for stand in [Stand::plain, Stand::pool] {
        let Some(mut stand) = stand() else {
            return;
        };
        assert_eq!(round(&mut stand, 4), 0, "blocks are wrong");
    }
}
