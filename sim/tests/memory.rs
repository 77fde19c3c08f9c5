// SPDX-License-Identifier: Apache-2.0
//! Ten times the time does not take more memory: queues, ledger and books are bounded.

use cap::Cap;
use rushes_sim::scenario::Scenario;
use std::alloc::System;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

const SCENARIO: &str = r#"
goal = "Players come and go, copies and readers stay, for long."
[server]
slots = 512
[[disk]]
[[player]]
count = 5
[[player]]
count = 60
megabits = 20.0
every_ms = 3000
seconds = 4
[[copy]]
count = 1
[[ramble]]
count = 3
request_kib = 512
die_per_10k = 1
"#;

/// Bytes held after so many virtual seconds of one world.
fn held_after(seconds: &[u64]) -> Vec<usize> {
    let mut scenario = Scenario::parse(SCENARIO).expect("a scenario");
    scenario.seconds = 1000;
    let before = ALLOCATOR.allocated();
    let mut world = scenario.world(1);
    let held = seconds
        .iter()
        .map(|s| {
            let s = rushes_core::units::Duration::from_s(*s);
            world.run_until(rushes_core::units::Instant::ZERO + s);
            ALLOCATOR.allocated() - before
        })
        .collect();
    assert_eq!(world.checker.told, Vec::<String>::new());
    held
}

#[test]
fn memory_does_not_grow_with_time() {
    let held = held_after(&[20, 200]);
    assert!(
        held[0] < 24 << 20,
        "{held:?} bytes, simulated world included"
    );
    assert!(
        held[1] < held[0] + (1 << 20),
        "held {held:?} bytes after 20 and 200 s"
    );
}
