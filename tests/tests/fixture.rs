// SPDX-License-Identifier: Apache-2.0
//! The fixture itself, on Samba alone: a later failure with Rushes in between is then Rushes'
//! doing.

use rushes_kit::smbd::module_folder;
use rushes_tests::hand::Hand;
use rushes_tests::needs::path_of;
use rushes_tests::pattern;
use rushes_tests::world::{Backing, Setup, World};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");

#[test]
fn plain_samba_serves_what_the_fixture_puts() {
    let setup = Setup {
        modules: String::new(),
        daemon: false,
        ..Setup::default()
    };
    let Some(world) = World::build(&setup) else {
        return;
    };
    world.put("a.bin", 1, 3_000_001);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open_rw("a.bin");
    pattern::check(1, 0, &hand.read(file, 0, 4_000_000), "whole file");
    assert_eq!(hand.read(file, 0, 4_000_000).len(), 3_000_001);
    hand.write(file, 12_345, &pattern::bytes(2, 12_345, 100_000));
    pattern::check(2, 12_345, &hand.read(file, 12_345, 100_000), "written part");
    hand.close(file);
    hand.rename("a.bin", "b.bin");
    assert_eq!(hand.size("b.bin"), 3_000_001);
    hand.unlink("b.bin");
    assert!(!world.path("b.bin").exists());
}

#[test]
fn a_private_smbd_keeps_no_mount_of_another_test() {
    let setup = Setup {
        backing: Backing::Tmpfs,
        daemon: false,
        ..Setup::default()
    };
    let Some(other) = World::build(&setup) else {
        return;
    };
    let world = World::build(&setup).expect("what one needs is there");
    let modules = module_folder(&path_of("smbd")).expect("smbd names it");
    let mounts = format!("/proc/{}/mountinfo", world.smbd.pid());
    let mounts = std::fs::read_to_string(mounts).expect("it runs");
    let has = |folder: &std::path::Path| mounts.contains(&format!(" {}", folder.display()));
    assert!(has(world.scratch.path()), "its own share: {mounts}");
    assert!(has(&modules), "its own modules: {mounts}");
    assert!(!has(other.scratch.path()), "the other's share: {mounts}");
    let all = std::fs::read_to_string("/proc/self/mountinfo").expect("procfs");
    let place = other.scratch.path().display().to_string();
    assert!(all.contains(&place), "the other's share is mounted: {all}");
}
