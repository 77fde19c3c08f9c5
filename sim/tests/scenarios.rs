// SPDX-License-Identifier: Apache-2.0
//! Every scenario does what its file says, kept seeds stay fixed, and a seed gives one run only.

use rushes_sim::catalogue::{self, Kept, SCENARIOS};
use rushes_sim::run::again;

#[track_caller]
fn check(name: &str) {
    let scenario = catalogue::find(name, 1).expect("it is in the catalogue");
    let mut report = scenario.run(name, 1);
    again(&scenario, &mut report);
    assert!(
        report.failures.is_empty(),
        "{name}: {}\n{report:#?}\nplay it: rushes-sim replay {name} --trace",
        scenario.goal
    );
}

macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { check(stringify!($name)); })*

        #[test]
        fn every_scenario_is_tested() {
            let tested = [$(stringify!($name)),*];
            for (name, _) in SCENARIOS {
                assert!(
                    tested.contains(name) || *name == "thousand_disks",
                    "{name} is not tested"
                );
            }
        }
    };
}

scenarios!(
    client_deaths,
    cold_opens,
    conform,
    copies_alone,
    copies_come_along,
    copy_storm,
    failing_reads,
    fragmented,
    frame_sequences,
    full_cache,
    ingest_beside,
    joins_and_leaves,
    metadata_storm,
    mixed,
    multicam,
    no_analyser,
    op_atom,
    op_atom_untold,
    opens_beside_windows,
    overload,
    patterns,
    pool_sequences,
    recordings,
    recordings_beside,
    recordings_in_trouble,
    recordings_played,
    recordings_volatile,
    ruled_copies,
    scattered,
    scrub,
    scrub_beside,
    seeks_and_jumps,
    sequences_by_threads,
    sequences_that_end,
    shared_file,
    silent_strangers,
    slow_disk,
    ssd,
    starts_beside_copies,
    stalls,
    steady,
    timeline,
    timeline_closes_first,
    timeline_full,
    timeline_again,
    timeline_again_shared,
    timeline_changed,
    together,
    worn_disk,
    writers,
);

fn files_in(folder: &str) -> Vec<std::path::PathBuf> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("it can be listed").path())
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect();
    files.sort();
    files
}

#[test]
fn every_file_is_in_the_catalogue() {
    for path in files_in("scenarios") {
        let name = path
            .file_stem()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        assert!(
            SCENARIOS.iter().any(|(known, _)| *known == name),
            "{name} is not in the catalogue"
        );
    }
}

#[test]
fn kept_seeds_stay_fixed() {
    for path in files_in("seeds") {
        let text = std::fs::read_to_string(&path).expect("it can be read");
        let kept: Kept = toml::from_str(&text).expect("it is a kept seed");
        let name = path
            .file_stem()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        let report = kept.scenario.run(name, kept.seed);
        assert!(
            report.failures.is_empty(),
            "{name}: {}\n{report:#?}",
            kept.cause
        );
    }
}

#[test]
fn a_thousand_disks_in_small() {
    let mut scenario = catalogue::find("thousand_disks", 1).expect("it is in the catalogue");
    scenario.seconds = 20;
    scenario.look_ms = 2000;
    scenario.disk[0].count = 40;
    scenario.player[0].count = 400;
    scenario.player[0].every_ms = 20;
    scenario.expect.promised_min = 400;
    let report = scenario.run("thousand_disks in small", 1);
    assert!(report.failures.is_empty(), "{report:#?}");
}

#[test]
fn a_scenario_survives_being_written() {
    for (name, text) in SCENARIOS {
        let scenario = rushes_sim::scenario::Scenario::parse(text)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let again = rushes_sim::scenario::Scenario::parse(&scenario.print());
        assert_eq!(again, Ok(scenario), "{name}");
    }
}

#[test]
fn an_unknown_key_is_an_error() {
    let error = rushes_sim::scenario::Scenario::parse("secnods = 3").unwrap_err();
    assert!(error.contains("secnods"), "{error}");
}
