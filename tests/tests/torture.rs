// SPDX-License-Identifier: Apache-2.0
//! A sample of `make torture`, and a test that it finds a byte that has changed.

use rushes_tests::torture::{Kind, Plan, run};
use std::time::Duration;

fn plan(seed: u64, kind: Kind) -> Plan {
    Plan {
        seed,
        time: Duration::from_secs(60),
        stand: Some(kind),
        only: Some(3),
        round: Some(Duration::from_secs(5)),
        roles: Vec::new(),
        troubles: Vec::new(),
        flips: false,
    }
}

#[test]
fn whoever_is_killed_and_whatever_fails_clients_read_what_they_were_told_is_written() {
    for kind in [Kind::Plain, Kind::Pool] {
        let Some(report) = run(&plan(1, kind)) else {
            return;
        };
        assert!(report.faults.is_empty(), "{}", report.faults.join("\n"));
        assert!(report.steps > 200, "hardly anything was done: {report:?}");
    }
}

#[test]
fn clients_of_a_daemon_that_is_stopped_again_and_again_read_what_was_written() {
    // With this seed each of the first four stops met a client that was not expelled, once in three
    // runs.
    let plan = Plan {
        only: Some(51),
        round: Some(Duration::from_secs(12)),
        ..plan(100, Kind::Plain)
    };
    let Some(report) = run(&Plan {
        stand: None,
        ..plan
    }) else {
        return;
    };
    assert!(report.faults.is_empty(), "{}", report.faults.join("\n"));
}

#[test]
fn a_byte_that_changes_behind_everybody_s_back_is_found() {
    let plan = Plan {
        roles: Vec::new(),
        troubles: Vec::new(),
        flips: true,
        ..plan(2, Kind::Plain)
    };
    let Some(report) = run(&plan) else {
        return;
    };
    let [fault] = report.faults.as_slice() else {
        panic!("one fault was expected: {}", report.faults.join("\n"));
    };
    assert!(fault.contains("shared.mov"), "{fault}");
    assert!(fault.contains("on the disk in the end"), "{fault}");
}
