// SPDX-License-Identifier: Apache-2.0
//! Power cuts of a pool, all of its disks at one instant, with a daemon and without one, while
//! members fill, are drained and tidied: no promised bytes are missing, fsck mends the rest, and
//! the checks detect a disk that lies.
//!
//! `rushes lab power-cuts --layout pool` does the same with more points. Without root, `/dev/fuse`,
//! the file systems' tools or a built `rushes` these tests skip aloud.

use std::path::PathBuf;

use rushes_lab::disk::FileSystem;
use rushes_lab::power::check::Rule;
use rushes_lab::power::cut::Lie;
use rushes_lab::power::report::PowerReport;
use rushes_lab::power::{self, Layout, Plan, Server};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rushes-lab");

/// `None`, with a message, where a run is impossible; under `make test` that is a failure.
fn plan(file_system: FileSystem, server: Server, seed: u64, points: u64) -> Option<Plan> {
    let missing = match rustix::process::geteuid().is_root() {
        true => power::missing(file_system, Layout::Pool, server),
        false => Some(String::from("it needs root")),
    };
    if let Some(missing) = &missing {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "power cuts of a pool: {missing}"
        );
        eprintln!("SKIPPED power cuts of a pool: {missing}");
        return None;
    }
    Some(Plan {
        layout: Layout::Pool,
        server,
        program: Some(PathBuf::from(PROGRAM)),
        ..Plan::new(file_system, seed, points)
    })
}

fn cut(plan: &Plan) -> PowerReport {
    power::cut_power(plan, &mut |_| ()).expect("the power can be cut")
}

fn nothing_is_missing(plan: Option<Plan>) {
    let Some(plan) = plan else {
        return;
    };
    let report = cut(&plan);
    assert_eq!(report.violation_count, 0, "{}", report.text());
    assert_eq!(report.points, plan.points);
    // Else the run tested nothing.
    let at_stake = report.writes_kept + report.writes_torn + report.writes_lost;
    assert!(at_stake > plan.points, "{}", report.text());
    assert!(report.writes_lost > plan.points / 3, "{}", report.text());
    assert!(report.files_read > 2 * plan.points, "{}", report.text());
    assert!(report.disturbances > 0, "{}", report.text());
    assert_eq!(
        report.writes_served > 100,
        report.served,
        "{}",
        report.text()
    );
}

#[test]
fn pool_under_a_daemon_keeps_what_was_promised_at_twenty_five_power_cuts() {
    nothing_is_missing(plan(FileSystem::Ext4, Server::Rushes, 1, 25));
}

#[test]
fn pool_of_xfs_and_ext4_keeps_what_was_promised_at_twenty_five_power_cuts() {
    nothing_is_missing(plan(FileSystem::Xfs, Server::None, 1, 25));
}

#[test]
fn disk_of_a_pool_that_forgets_flushes_is_found_out() {
    let Some(plan) = plan(FileSystem::Ext4, Server::None, 2, 25) else {
        return;
    };
    let report = cut(&Plan {
        lie: Lie::Flushes,
        ..plan
    });
    let rules: Vec<Rule> = report.violations.iter().map(|v| v.finding.rule).collect();
    assert!(!rules.is_empty(), "{}", report.text());
    for violation in &report.violations {
        assert!(violation.replay.contains("--layout pool"));
    }
}
