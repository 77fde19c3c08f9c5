// SPDX-License-Identifier: Apache-2.0
//! Blocks before bytes: which way a share goes and how one knows it, what a daemon that is killed leaves
//! reserved, and what clients see of all that.

use rushes_tests::fsx;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition};
use rushes_tests::smbd::SHARE;
use rushes_tests::world::{Backing, Setup, World};
use serde_json::Value;
use std::process::Command;

const BLOCK: usize = 65_536;

fn world(backing: Backing) -> Option<World> {
    World::build(&Setup {
        backing,
        ..fsx::setup("64MiB")
    })
}

fn client(world: &World) -> Connection {
    Connection::connect(world.smbd.port(), SHARE).expect("smbd lets guests in")
}

/// `rushes ARGS` for this world.
fn rushes(world: &World, args: &[&str]) -> String {
    let output = Command::new(needs::path_of("rushes"))
        .args(args)
        .arg("--config")
        .arg(world.scratch.path().join("rushes.toml"))
        .output()
        .expect("rushes starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Log, check and status say the same of a share's way; what is written goes it.
fn check_way(backing: Backing, way: &str, reason: &str) {
    let Some(mut world) = world(backing) else {
        return;
    };
    let status = world.daemon().status();
    let share = &status["shares"][0];
    assert_eq!(share["write_way"], way, "{share}");
    let said = share["write_way_reason"].as_str().expect("a sentence");
    assert!(said.contains(reason), "{said:?}, expected {reason:?}");
    let sentence = format!("what clients write goes by way of {way} ({said})");
    let log = world.daemon().log();
    assert!(log.contains(&sentence), "{log}");
    let report: Value = serde_json::from_str(&rushes(&world, &["check", "--json"])).expect("JSON");
    let findings = report["findings"].as_array().expect("a list");
    let found = findings
        .iter()
        .find(|finding| {
            let text = finding["finding"].as_str().unwrap_or_default();
            finding["area"] == format!("share {SHARE}") && text.starts_with(&sentence)
        })
        .unwrap_or_else(|| panic!("not {sentence:?} in {report:#}"));
    let level = if way == "extents" { "ok" } else { "warning" };
    assert_eq!(found["level"], level, "{found}");
    let table = rushes(&world, &["status"]);
    assert!(table.contains(way), "{table}");
    assert!(way == "extents" || table.contains(reason), "{table}");
    // Nothing of the trial is left.
    let names = std::fs::read_dir(world.disk.path()).expect("our own disk");
    let trial = |name: &std::ffi::OsString| name.to_string_lossy().contains("rushes-trial");
    assert!(!names.flatten().any(|entry| trial(&entry.file_name())));

    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::OpenIf).expect("made");
    let bytes = pattern::bytes(5, 0, BLOCK);
    client.write(file, 0, &bytes).expect("written");
    let status = world.daemon().status();
    let counts = (
        &status["write"]["write_count"],
        &status["write"]["plain_count"],
    );
    if way == "extents" {
        assert!(counts.0.as_u64() > Some(0) && counts.1 == 0, "{status:#}");
    } else {
        assert_eq!(counts.0, 0, "{status:#}");
    }
    client.close(file).expect("closed");
    world.wait_for_file("take.mov", &bytes);
}

#[test]
fn ext4_reserves_and_says_so() {
    check_way(Backing::Ext4, "extents", "ext4 reserves");
}

#[test]
fn a_file_system_without_fallocate_is_written_through_and_says_so() {
    check_way(
        Backing::Small(&["mkfs.ext2", "-q", "-F"]),
        "through",
        "ext2: it has no fallocate",
    );
}

#[test]
fn a_file_system_without_places_is_written_through_and_says_so() {
    check_way(Backing::Tmpfs, "through", "tmpfs: it has no direct I/O");
}
