// SPDX-License-Identifier: Apache-2.0
//! Files that local programs change in every way there is, read over SMB meanwhile; `make
//! hunt-stale` does it for long.

use rushes_tests::needs::{Need, all_there};
use rushes_tests::stale::{self, Plan, XFS};
use rushes_tests::world::{Backing, Setup, World};
use std::time::Duration;

fn check(setup: &Setup, ways: &[&str], seed: u64) {
    if !all_there(&[Need::Program("python3")]) {
        return;
    }
    let Some(world) = World::build(setup) else {
        return;
    };
    let plan = Plan {
        seed,
        time: Duration::from_secs(8),
        workers: 6,
        only: None,
        ways: ways.iter().map(|way| String::from(*way)).collect(),
        // Another test may use the machine: data that stay wrong are a fault, late ones are not.
        timed: false,
        go_on: false,
    };
    let report = stale::run(world.smbd.port(), world.disk.path(), &plan);
    assert!(report.faults.is_empty(), "{}", report.faults.join("\n"));
    assert!(report.rounds > 0, "{report:?}");
}

#[test]
fn what_local_programs_do_to_files_is_read_over_smb() {
    check(&stale::setup(Backing::Ext4, None, false), &[], 1);
}

#[test]
fn what_local_programs_do_to_files_that_clients_write_is_read_over_smb() {
    check(&stale::setup(XFS, Some("64MiB"), true), &[], 2);
}

#[test]
fn what_the_kernel_tells_nobody_of_is_read_over_smb() {
    let ways = ["write", "store", "asynchronous direct", "asynchronous"];
    check(&stale::setup(Backing::Ext4, None, false), &ways, 3);
}
