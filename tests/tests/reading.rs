// SPDX-License-Identifier: Apache-2.0
//! Bytes that come out of SMB are the bytes of the file, on every path that smbd has for reading,
//! and they come through the daemon: otherwise these tests would pass on plain Samba.

use rushes_tests::disk::run;
use rushes_tests::hand::Hand;
use rushes_tests::needs::{self, Need, all_there};
use rushes_tests::pattern;
use rushes_tests::smbd::{PASSWORD, SHARE, USER};
use rushes_tests::world::{Backing, Setup, World};
use std::process::Command;

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");

/// Reads that the daemon has answered from or through its cache.
fn served_count(world: &mut World) -> u64 {
    let status = world.daemon().status();
    let count = |key: &str| status["cache"][key].as_u64().unwrap_or_default();
    count("hit_count") + count("miss_count")
}

#[test]
fn any_piece_of_a_file_is_right() {
    let Some(mut world) = World::build(&Setup::default()) else {
        return;
    };
    // Ends in the middle of a page.
    const LENGTH: usize = 20_000_123;
    world.put("clip.mov", 1, LENGTH);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    for (offset, length) in [
        (0, 1),
        (4095, 2),
        (1 << 20, 1 << 20),
        ((1 << 20) - 1, 3_000_001),
        (12_345_678, 5_000_000),
        (LENGTH as u64 - 10, 10),
    ] {
        let found = hand.read(file, offset, length);
        assert_eq!(found.len(), length, "at {offset}");
        pattern::check(1, offset, &found, "piece");
    }
    assert_eq!(
        hand.read(file, LENGTH as u64 - 10, 100).len(),
        10,
        "over the end"
    );
    assert_eq!(hand.read(file, LENGTH as u64, 100).len(), 0, "at the end");
    assert_eq!(
        hand.read(file, LENGTH as u64 + 1, 100).len(),
        0,
        "past the end"
    );
    let mut at = 0;
    while at < LENGTH {
        let found = hand.read(file, at as u64, 500_000);
        pattern::check(1, at as u64, &found, "from start to end");
        at += found.len();
    }
    assert!(served_count(&mut world) > 0, "the daemon saw none of this");
}

#[test]
fn who_jumps_about_and_then_plays_is_followed_at_once() {
    let Some(mut world) = World::build(&Setup::default()) else {
        return;
    };
    const LENGTH: usize = 100_000_000;
    const PIECE: usize = 8192;
    world.put("clip.mov", 1, LENGTH);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    for step in 0..60_u64 {
        let offset = step * 7919 % 12_000 * PIECE as u64;
        let found = hand.read(file, offset, PIECE);
        pattern::check(1, offset, &found, "jumping about");
    }
    let before = served_count(&mut world);
    assert!(before < 60, "scattered reads are left to the kernel");
    for frame in 0..20_u64 {
        let offset = 50_000_000 + frame * 500_000;
        pattern::check(1, offset, &hand.read(file, offset, 500_000), "playing");
    }
    // All but the first few, which still might be jumps for the daemon.
    let after = served_count(&mut world);
    assert!(
        after >= before + 15,
        "the daemon answered {} of 20",
        after - before
    );
}

/// One of smbd's ways to read.
fn check_way(global: &[&str], share: &[&str]) {
    let setup = Setup {
        global: global.iter().map(|line| (*line).to_owned()).collect(),
        share: share.iter().map(|line| (*line).to_owned()).collect(),
        ..Setup::default()
    };
    if !all_there(&[Need::Program("smbclient")]) {
        return;
    }
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("clip.mov", 2, 30_000_001);
    let got = world.scratch.path().join("got");
    // smbclient keeps two reads of 8 MiB in flight.
    run(Command::new(needs::path_of("smbclient"))
        .arg(format!("//127.0.0.1/{SHARE}"))
        .args(["-p", &world.smbd.port().to_string()])
        .args(["-U", &format!("{USER}%{PASSWORD}"), "-c"])
        .arg(format!("get clip.mov {}", got.display())));
    let found = std::fs::read(&got).expect("smbclient wrote it");
    assert_eq!(found.len(), 30_000_001);
    pattern::check(2, 0, &found, "smbclient get");
    assert!(served_count(&mut world) > 0, "the daemon saw none of this");
}

#[test]
fn asynchronous_reads_are_right() {
    check_way(&[], &[]);
}

#[test]
fn synchronous_reads_are_right() {
    check_way(&[], &["aio read size = 0", "aio write size = 0"]);
}

#[test]
fn sendfile_is_right() {
    check_way(
        &["server signing = disabled"],
        &["aio read size = 0", "use sendfile = yes"],
    );
}

#[test]
fn signed_reads_are_right() {
    check_way(&["server signing = mandatory"], &[]);
}

#[test]
fn encrypted_reads_are_right() {
    check_way(&["server smb encrypt = required"], &["use sendfile = yes"]);
}

#[test]
fn several_clients_with_more_data_than_cache_get_their_own_bytes() {
    let Some(mut world) = World::build(&Setup::default()) else {
        return;
    };
    const CLIENTS: u64 = 6;
    const LENGTH: usize = 24 << 20;
    for client in 0..CLIENTS {
        world.write(&format!("clip{client}.mov"), 10 + client, LENGTH);
    }
    world.disk.make_cold();
    let mut hands: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let mut hand = Hand::connect(HAND, world.smbd.port());
            let file = hand.open(&format!("clip{client}.mov"));
            (hand, file)
        })
        .collect();
    let mut at = 0;
    while at < LENGTH {
        for (client, (hand, file)) in (0..).zip(&mut hands) {
            hand.begin_read(*file, at as u64, 1 << 20);
            let found = hand
                .finish_read()
                .unwrap_or_else(|error| panic!("client {client} at {at}: {error}"));
            pattern::check(10 + client, at as u64, &found, "own clip");
        }
        at += 1 << 20;
    }
    let status = world.daemon().status();
    assert_eq!(status["cache"]["bytes"], 64 << 20);
    assert!(served_count(&mut world) >= CLIENTS * 24);
}

#[test]
fn frames_of_a_sequence_are_right_in_order_and_out_of_order() {
    let setup = Setup {
        more: String::from("[[rule]]\nmatch = \"**/*.dpx\"\nframes_per_second = 24"),
        ..Setup::default()
    };
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    let name = |frame: u64| format!("shot/shot.{frame:04}.dpx");
    for frame in 1..=40 {
        world.write(&name(frame), frame, 200_000 + frame as usize);
    }
    world.disk.make_cold();
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let mut play = |frame: u64| {
        let file = hand.open(&name(frame));
        let found = hand.read(file, 0, 300_000);
        assert_eq!(found.len(), 200_000 + frame as usize);
        pattern::check(frame, 0, &found, &name(frame));
        hand.close(file);
    };
    (1..=20).for_each(&mut play);
    // A program renders a frame again that was fetched ahead but not yet played.
    world.put(&name(25), 925, 200_025);
    (21..=24).for_each(&mut play);
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = other.open(&name(25));
    pattern::check(
        925,
        0,
        &other.read(file, 0, 300_000),
        "the frame rendered again",
    );
    [40, 3, 39, 30].iter().copied().for_each(&mut play);
    let status = world.daemon().status();
    let streams = status["streams"].as_array().expect("a list").iter();
    let ahead = streams
        .filter(|stream| stream["sequence"] == true)
        .filter_map(|stream| stream["hit_count"].as_u64())
        .max();
    assert!(ahead > Some(5), "frames were not fetched ahead: {status:#}");
}

#[test]
fn a_file_system_without_direct_io_is_served_buffered_and_says_so() {
    let setup = Setup {
        backing: Backing::Tmpfs,
        ..Setup::default()
    };
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("clip.mov", 3, 5_000_001);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    pattern::check(3, 0, &hand.read(file, 0, 6_000_000), "tmpfs");
    let status = world.daemon().status();
    assert_eq!(status["shares"][0]["direct_io"], false);
    assert!(served_count(&mut world) > 0, "the daemon saw none of this");
}
