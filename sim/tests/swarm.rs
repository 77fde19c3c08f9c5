// SPDX-License-Identifier: Apache-2.0
//! For any seed: no violation, and no promise broken where its premises hold. The binary plays
//! thousands (`rushes-sim run swarm --count 5000`), this some.

use rushes_sim::admission::Admission;
use rushes_sim::run::again;
use rushes_sim::swarm;

#[test]
fn eighty_seeds_find_nothing() {
    let mut bad = Vec::new();
    for seed in 1..=80 {
        let scenario = swarm::scenario(seed);
        let mut report = scenario.run("swarm", seed);
        if seed % 8 == 0 {
            again(&scenario, &mut report);
        }
        if !report.failures.is_empty() {
            bad.push((seed, report.failures, report.violations));
        }
    }
    assert!(bad.is_empty(), "{} bad: {bad:#?}", bad.len());
}

#[test]
fn sixty_questions_of_admission() {
    let admission = Admission {
        count: 60,
        seed: 1,
        json: false,
        verbose: false,
    };
    let (result, _) = admission.ask();
    let all = &result.all;
    assert_eq!(all.late_streams, 0, "late: {:?}", result.bad_seeds);
    assert_eq!(all.violations, 0, "violations: {:?}", result.bad_seeds);
    assert!(all.ratio_first_come >= 0.9, "{all:?}");
}
