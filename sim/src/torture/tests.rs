// SPDX-License-Identifier: Apache-2.0
//! Rounds stay the same, and a secret change is found.

use super::*;

fn short(number: u64, flip: Option<Flip>) -> Round {
    let otherwise = Otherwise {
        flip,
        seconds: Some(20),
        trace: false,
    };
    round(5, number, otherwise)
}

#[test]
fn a_round_is_the_same_each_time_and_without_violations() {
    let mut sum = Counts::default();
    for number in 0..24 {
        let first = short(number, None);
        assert_eq!(first.violations, Vec::<String>::new(), "round {number}");
        sum.add(&first.counts);
        if number % 4 == 0 {
            let again = short(number, None);
            assert_eq!(first.digest, again.digest, "round {number}");
            assert_eq!(first.virtual_ms, again.virtual_ms);
        }
    }
    // Each event that gives a count its name does happen.
    for (name, count) in sum.named() {
        let is_rare = matches!(
            name.as_str(),
            "bridged_writes"
                | "told_later"
                | "kills_booting"
                | "no_space"
                | "plain_reads"
                | "strange_cuts"
                | "doubted_syncs"
        );
        assert!(is_rare || count > 0, "{name}: {sum:?}");
    }
}

#[track_caller]
fn check(flip: Flip, least: usize, what: &str) {
    let rounds = (0..12).map(|number| short(number, Some(flip)));
    let is_found = |round: &Round| {
        let mut told = round.violations.iter();
        told.any(|sentence| sentence.contains(what))
    };
    let found = rounds.filter(is_found).count();
    assert!(found >= least, "{flip:?} is found {found} times of 12");
}

#[test]
fn a_byte_that_is_changed_where_the_kernel_shows_it_is_found() {
    check(Flip::Shown, 9, "byte 0");
}

#[test]
fn a_byte_that_is_changed_on_the_disk_is_found() {
    check(Flip::Disk, 8, "the disk has");
}

#[test]
fn a_synced_byte_that_is_not_on_the_medium_is_found() {
    check(Flip::Medium, 6, "was synced");
}

#[test]
fn a_byte_that_is_changed_in_a_lane_is_found() {
    check(Flip::Lane, 3, "file");
}

#[test]
fn a_buffer_that_is_changed_in_a_clients_hands_is_found() {
    check(Flip::Buffer, 9, "a buffer in a client's hands");
}
