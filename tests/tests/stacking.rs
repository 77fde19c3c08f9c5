// SPDX-License-Identifier: Apache-2.0
//! The module stands at the end of a stack: modules before it translate names, streams and rights,
//! and none of their work is lost or doubled.

use rushes_tests::disk::run;
use rushes_tests::hand::Hand;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::smbd::{PASSWORD, SHARE, USER};
use rushes_tests::world::{Setup, World};
use std::fs;
use std::process::Command;

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 3_000_001;

/// Everyday work through a stack of modules.
fn check_stack(modules: &str, share: &[&str]) {
    let setup = Setup {
        modules: modules.to_owned(),
        share: share.iter().map(|line| (*line).to_owned()).collect(),
        ..Setup::default()
    };
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("clip.mov", 1, LENGTH);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = hand.open_rw("clip.mov");
    let seen = other.open("clip.mov");
    pattern::check(1, 0, &other.read(seen, 0, LENGTH), "read");
    hand.write(file, 70_000, &pattern::bytes(2, 70_000, 1_000_000));
    let found = other.read(seen, 70_000, 1_000_000);
    pattern::check(2, 70_000, &found, "written by another");

    let stream = world.scratch.path().join("stream");
    let back = world.scratch.path().join("back");
    fs::write(&stream, pattern::bytes(3, 0, 2_000)).expect("scratch is writable");
    // A named stream is an extended attribute, on ext4 of less than a block, and must not come out
    // of the file's cache.
    run(Command::new(needs::path_of("smbclient"))
        .arg(format!("//127.0.0.1/{SHARE}"))
        .args(["-p", &world.smbd.port().to_string()])
        .args(["-U", &format!("{USER}%{PASSWORD}"), "-c"])
        .arg(format!(
            "put {0} clip.mov:notes; get clip.mov:notes {1}; get clip.mov {1}.whole",
            stream.display(),
            back.display()
        )));
    pattern::check(
        3,
        0,
        &fs::read(&back).expect("smbclient wrote it"),
        "named stream",
    );
    assert_eq!(fs::read(&back).expect("smbclient wrote it").len(), 2_000);
    let whole = fs::read(back.with_extension("whole")).expect("smbclient wrote it");
    assert_eq!(
        whole,
        fs::read(world.path("clip.mov")).expect("our own disk"),
        "the file itself"
    );

    hand.close(file);
    other.close(seen);
    hand.rename("clip.mov", "take2.mov");
    let again = other.open("take2.mov");
    pattern::check(2, 70_000, &other.read(again, 70_000, 1_000_000), "renamed");
    other.close(again);
    hand.unlink("take2.mov");
    assert!(!world.path("take2.mov").exists());
    let status = world.daemon().status();
    let served = status["cache"]["hit_count"].as_u64().unwrap_or_default()
        + status["cache"]["miss_count"].as_u64().unwrap_or_default();
    assert!(served > 0, "the daemon saw none of this");
}

#[test]
fn works_below_streams_and_rights() {
    check_stack("acl_xattr streams_xattr rushes", &["ea support = yes"]);
}

#[test]
fn works_below_what_mac_clients_need() {
    check_stack(
        "catia fruit streams_xattr rushes",
        &["ea support = yes", "fruit:metadata = stream"],
    );
}

#[test]
fn works_below_all_of_them() {
    check_stack(
        "catia fruit streams_xattr acl_xattr rushes",
        &["ea support = yes"],
    );
}
