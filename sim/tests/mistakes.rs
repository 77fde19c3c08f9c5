// SPDX-License-Identifier: Apache-2.0
//! The checkers find the faults for which they exist: a server makes one mistake on purpose.

use rushes_core::server::Server;
use rushes_sim::machine::{Machine, Mistake, Naive};
use rushes_sim::scenario::Scenario;
use rushes_sim::spoiled::{Spoiled, WriteMistake};
use std::fmt::Debug;

const SCENARIO: &str = r#"
goal = "Something of everything, small."
seconds = 8
[server]
slots = 256
[[disk]]
fixed_us = 300
rate_mb = 900
[[player]]
count = 2
megabits = 20.0
[[player]]
count = 4
megabits = 20.0
every_ms = 1000
die_per_10k = 100
[[copy]]
request_kib = 1024
file_mb = 50
[[ramble]]
count = 3
files = 2
file_kib = 4000
hold_ms = 30
[[writer]]
count = 2
think_ms = 80
write_kib = 512
[expect]
late_promised_max = 1000000
shed_max = 1000000
patience_seconds = 30
ledger = false
"#;

/// The violations reported of a run with this server.
fn violations(scenario: &Scenario, server: Box<dyn Machine>) -> Vec<String> {
    let world = scenario.world_of(3, server);
    scenario.play("mistakes", 3, world).violations
}

/// The violations reported of a run with a server that makes `mistake`.
fn told(mistake: Mistake) -> Vec<String> {
    let scenario = Scenario::parse(SCENARIO).expect("the scenario above is one");
    let server = Naive::new(scenario.server.limits(), mistake);
    violations(&scenario, Box::new(server))
}

#[track_caller]
fn check(mistake: Mistake, expect: &str) {
    assert_found(told(mistake), mistake, expect);
}

#[track_caller]
fn assert_found(told: Vec<String>, mistake: impl Debug, expect: &str) {
    assert!(
        told.iter().any(|line| line.contains(expect)),
        "{mistake:?} should have been found as \"{expect}\", but was told: {told:#?}"
    );
}

#[test]
fn a_server_without_mistakes_is_not_blamed() {
    assert_eq!(told(Mistake::None), Vec::<String>::new());
}

#[test]
fn a_lost_read_is_found() {
    check(Mistake::LosesRead, "never answered");
}

#[test]
fn a_second_answer_is_found() {
    check(Mistake::AnswersTwice, "answered before");
}

#[test]
fn another_files_bytes_are_found() {
    check(Mistake::WrongSlots, "should hold block");
}

#[test]
fn a_slot_refilled_under_a_client_is_found() {
    check(Mistake::RefillsPinned, "in a client's hands");
}

#[test]
fn bytes_before_the_device_has_read_them_are_found() {
    check(Mistake::AnswersEarly, "a device still writes into");
}

#[test]
fn bytes_older_than_an_acknowledged_change_are_found() {
    check(Mistake::ServesOld, "was acknowledged");
}

#[test]
fn an_answer_to_the_dead_is_found() {
    check(Mistake::AnswersTheDead, "but the session is closed");
}

#[test]
fn books_that_contradict_themselves_are_found() {
    check(
        Mistake::ContradictsItself,
        "contradicts itself: it counts more",
    );
}

#[test]
fn a_promise_to_everybody_is_found_as_late() {
    let text = "seconds = 10\n[[disk]]\n[[player]]\ncount = 8\n";
    let scenario = Scenario::parse(text).expect("a scenario");
    let server = Naive::new(scenario.server.limits(), Mistake::PromisesAll);
    let world = scenario.world_of(1, Box::new(server));
    let report = scenario.play("promises", 1, world);
    assert!(report.late_promised > 100, "{report:?}");
    assert!(
        report
            .failures
            .iter()
            .any(|f| f.contains("late frames of promised"))
    );
}

const WRITERS: &str = r#"
goal = "Everything that writes through lanes, small."
seconds = 8
[server]
slots = 256
write_buffer_mib = 64
[[disk]]
fixed_us = 300
rate_mb = 900
[[player]]
count = 2
megabits = 20.0
[[player]]
count = 2
behind_ms = 500
[[record]]
count = 3
megabits = 40.0
sync_every = 50
ruled = true
[[copy_in]]
count = 2
file_mib = 48
announce = true
"#;

/// The violations reported of a run with the real server and one mistake about writes.
fn told_of_writes(mistake: WriteMistake) -> Vec<String> {
    let scenario = Scenario::parse(WRITERS).expect("the scenario above is one");
    let server = Server::new(scenario.server.limits(), scenario.server.policy());
    violations(&scenario, Box::new(Spoiled::new(server, mistake)))
}

#[track_caller]
fn check_write(mistake: WriteMistake, expect: &str) {
    assert_found(told_of_writes(mistake), mistake, expect);
}

#[test]
fn the_real_server_is_not_blamed_for_its_writes() {
    assert_eq!(told_of_writes(WriteMistake::None), Vec::<String>::new());
}

#[test]
fn an_answer_without_a_published_piece_is_found() {
    let expect = "acknowledged before its piece is published";
    check_write(WriteMistake::Unpublished, expect);
    check_write(WriteMistake::PublishedLate, expect);
}

#[test]
fn a_strike_before_the_device_has_the_bytes_is_found() {
    let expect = "is struck before its device has";
    check_write(WriteMistake::StruckEarly, expect);
    check_write(WriteMistake::SpentEarly, expect);
}

#[test]
fn a_sync_without_its_bytes_on_the_medium_is_found() {
    check_write(WriteMistake::SyncedEarly, "the medium lacks");
}

#[test]
fn pages_that_belong_to_two_are_found() {
    check_write(WriteMistake::SamePages, "is granted and still in use");
    check_write(
        WriteMistake::GivenBackUsed,
        "is given back and still in use",
    );
}

#[test]
fn acknowledged_bytes_that_never_reach_their_device_are_found() {
    check_write(WriteMistake::NotSent, "are not on its device");
}

#[test]
fn requests_to_the_wrong_place_are_found() {
    check_write(WriteMistake::Misplaced, "blocks that were not reserved");
    check_write(
        WriteMistake::SentTwice,
        "writes a page that another request writes",
    );
}

#[test]
fn wrong_words_about_a_file_are_found() {
    check_write(WriteMistake::WrongLength, "but the file has");
    check_write(WriteMistake::CleanEarly, "is clean, and its device lacks");
    check_write(WriteMistake::BlocksKept, "keeps blocks up to");
    check_write(WriteMistake::LaneDoneEarly, "is done with");
}

#[test]
fn a_read_of_other_bytes_than_were_acknowledged_is_found() {
    check_write(WriteMistake::NotFilled, "was acknowledged");
    check_write(WriteMistake::ReadLeft, "is left to its client");
}

#[test]
fn a_sync_while_the_drive_alone_has_the_bytes_is_found() {
    let text = WRITERS.replace("[[disk]]\n", "[[disk]]\nmemory = { mb = 64 }\n");
    let scenario = Scenario::parse(&text).expect("a scenario");
    let server = Server::new(scenario.server.limits(), scenario.server.policy());
    let server = Spoiled::new(server, WriteMistake::SyncedEarly);
    let world = scenario.world_of(3, Box::new(server));
    let told = scenario.play("mistakes", 3, world).violations;
    assert!(
        told.iter().any(|line| line.contains("the medium lacks")),
        "{told:#?}"
    );
    let calm = scenario.run("mistakes", 3).violations;
    assert_eq!(calm, Vec::<String>::new());
}
