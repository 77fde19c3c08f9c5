// SPDX-License-Identifier: Apache-2.0
//! `rushes calibrate` finds the model that the slow disk was made from, keeps it, and says why if
//! it cannot measure. The daemon's own tests check the least squares, without a clock.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::disk::Disk;
use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{EXT4, PoolWorld};
use rushes_tests::scratch::Scratch;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const NEEDS: [Need<'_>; 4] = [
    Need::Root,
    Need::Program("rushes"),
    Need::Program("rushes-lab"),
    Need::Program("mkfs.ext4"),
];

fn calibrate(path: &std::path::Path, scratch: &Scratch, flags: &[&str]) -> Output {
    Command::new(needs::path_of("rushes"))
        .arg("calibrate")
        .args(["--quick", "--json", "--state-dir"])
        .arg(scratch.path().join("state"))
        .args(flags)
        .arg(path)
        .output()
        .expect("rushes starts")
}

fn json(output: &Output) -> serde_json::Value {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    serde_json::from_slice(&output.stdout).expect("it prints JSON")
}

/// The values that are not within their bounds.
fn far_off(found: &serde_json::Value) -> Vec<String> {
    let bounds = [
        ("read", "bytes_per_second", 172e6, 0.12),
        ("read", "span_ns", 1.13 * 15.2e6, 0.3),
        ("read", "fixed_ns", 0.4 * 15.2e6, 0.5),
        ("write", "bytes_per_second", 145e6, 0.15),
    ];
    let mut off = Vec::new();
    for (direction, term, expect, part) in bounds {
        let value = found[direction][term].as_f64().expect("a number");
        if (value / expect - 1.0).abs() >= part {
            off.push(format!(
                "{direction}.{term}: {value}, expected {expect} within {} %",
                part * 100.0
            ));
        }
    }
    off
}

/// Measurements at most, until one is within the bounds: a machine that has no processor to spare
/// adds time to each request that is not the disk's.
const TRIES: usize = 4;

/// Bounds leave room for the time that a busy machine adds to each request; a wrong term would be
/// off by far more.
#[test]
fn the_model_of_the_slow_disk_is_found_and_kept() {
    if !needs::all_there(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::slow(&scratch, 4 << 30);
    disk.tell("timing on");
    let mut found = serde_json::Value::Null;
    let mut off = Vec::new();
    for _ in 0..TRIES {
        let start = Instant::now();
        found = json(&calibrate(disk.path(), &scratch, &["--save"]));
        let taken = start.elapsed();
        assert!(taken < Duration::from_secs(12), "{taken:?}");
        off = far_off(&found);
        if off.is_empty() {
            break;
        }
    }
    assert!(off.is_empty(), "{off:?}");

    assert_eq!(found["source"], "whole_device");
    assert_eq!(found["identity"]["bytes"], 4u64 << 30);
    assert_eq!(found["write"]["estimated"], false);
    // On a busy machine the time of a calibration may end before each of the 7 sizes had a request
    // far from the last.
    for table in ["read_table", "write_table"] {
        let rows = found[table].as_array().map(Vec::len);
        assert!(rows >= Some(5), "{table}: {:?}", found[table]);
    }

    let kept: Vec<_> = std::fs::read_dir(scratch.path().join("state"))
        .expect("the state folder was made")
        .flatten()
        .collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    let text = std::fs::read(kept[0].path()).unwrap();
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(&text).unwrap(),
        found
    );
    // Only the folder that mkfs made is left on the disk.
    let left: Vec<_> = std::fs::read_dir(disk.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_full_disk_is_measured_by_reads_alone() {
    if !needs::all_there(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    // A tenth of it is less than two of the largest requests.
    let disk = Disk::slow(&scratch, 256 << 20);
    let found = json(&calibrate(disk.path(), &scratch, &[]));
    assert_eq!(found["write"]["estimated"], true);
    let missing = found["writes_missing"].as_str().expect("it says why");
    assert!(
        missing.starts_with("cannot create a scratch file in "),
        "{missing}"
    );
    assert_eq!(found["write_table"].as_array().map(Vec::len), Some(0));
    assert_eq!(found["read_table"].as_array().map(Vec::len), Some(7));
    assert!(
        !scratch.path().join("state").exists(),
        "kept without --save"
    );
}

#[test]
fn a_disk_that_fails_is_not_measured_and_says_so() {
    if !needs::all_there(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::slow(&scratch, 512 << 20);
    disk.tell("fail read 0 536870912");
    let output = calibrate(disk.path(), &scratch, &["--save"]);
    assert!(!output.status.success());
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("only 0 requests succeeded"), "{words}");
    assert!(words.contains("Input/output error"), "{words}");
    disk.tell("clear");
}

#[test]
fn a_file_behind_the_machines_memory_is_measured_with_a_warning() {
    if !needs::all_there(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 400 << 20);
    let output = calibrate(disk.path(), &scratch, &["--no-writes"]);
    let found = json(&output);
    let words = String::from_utf8_lossy(&output.stderr);
    let file = found["buffered_file"].as_str().expect("a file");
    assert!(
        file.starts_with(&scratch.path().display().to_string()),
        "{file}"
    );
    assert!(
        words.contains(file) && words.contains("--direct-io=on"),
        "{words}"
    );
}

#[test]
fn memory_is_no_device_and_says_so() {
    if !needs::all_there(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let memory = Disk::tmpfs(&scratch, 1 << 20);
    let output = calibrate(memory.path(), &scratch, &[]);
    assert!(!output.status.success());
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("Give a folder on a disk"), "{words}");
}

/// A pool's members are on disks; a folder in its mount is not.
#[test]
fn a_mount_that_is_a_programs_is_not_measured_and_its_members_are() {
    let Some(world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    let scratch = Scratch::new();
    let output = calibrate(&world.path(""), &scratch, &["--save"]);
    assert!(!output.status.success());
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains("fuse"), "{words}");
    assert!(words.contains("pool"), "{words}");
    assert!(!scratch.path().join("state").exists(), "kept all the same");
    let left = std::fs::read_dir(world.path(""))
        .expect("it is there")
        .count();
    assert_eq!(left, 0, "left in the pool");
}
