// SPDX-License-Identifier: Apache-2.0
//! The fixture itself, on Samba alone: a later failure with Rushes in between is then Rushes'
//! doing.

use rushes_tests::hand::Hand;
use rushes_tests::pattern;
use rushes_tests::world::{Setup, World};

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
