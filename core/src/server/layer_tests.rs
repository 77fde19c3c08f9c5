// SPDX-License-Identifier: Apache-2.0
//! Editors whose programs play several files at once and read them one after the other.

use super::tests::{Bench, ruled};
use super::*;

const MIB: u64 = 1 << 20;
const FRAME: u64 = 500_000;
const TICK: Duration = Duration::from_ms(40);
const RATE: u64 = 12_500_000;
const LAYERS: u32 = 3;

fn editor() -> Bench {
    let mut bench = Bench::new(512);
    bench.session(1);
    for layer in 1..=LAYERS {
        let facts = ruled(layer, 900 * MIB, RATE * 8);
        bench.open(1, layer, &alloc::format!("camera{layer}"), facts);
    }
    bench
}

/// Reads one frame of a layer; the answer takes so long.
fn read(bench: &mut Bench, layer: u32, frame: u64, takes: Duration) {
    let request = u64::from(layer) * 1000 + frame;
    bench.read(1, layer, request, frame * FRAME, FRAME);
    bench.now = bench.now + takes;
    for _ in 0..64 {
        bench.serve_all();
        bench.answer_looks();
        if bench.outcome(request).is_some() {
            break;
        }
        bench.now = bench.now + Duration::from_ms(1);
        bench.step(Event::Timer);
    }
    bench.end(1, request);
}

fn standings(bench: &Bench) -> Vec<Standing> {
    let mut lines = bench.server.streams(bench.now);
    lines.sort_by_key(|line| line.number);
    lines.iter().map(|line| line.standing).collect()
}

#[test]
fn all_layers_have_contracts_when_the_first_one_goes_on() {
    // From the beginning of the files, and from a place within.
    for from in [0, 400] {
        let mut bench = editor();
        for layer in 1..=LAYERS {
            read(&mut bench, layer, from, Duration::from_ms(20));
        }
        read(&mut bench, 1, from + 1, Duration::ZERO);
        assert_eq!(standings(&bench), [Standing::Contract; 3], "from {from}");
    }
}

#[test]
fn files_that_were_looked_into_before_a_play_began_are_no_layers_of_it() {
    let mut bench = editor();
    read(&mut bench, 2, 0, Duration::from_ms(20));
    read(&mut bench, 1, 0, Duration::from_ms(20));
    read(&mut bench, 3, 0, Duration::from_ms(20));
    read(&mut bench, 1, 1, Duration::ZERO);
    use Standing::{BestEffort, Contract};
    assert_eq!(standings(&bench), [BestEffort, Contract, Contract]);
}

#[test]
fn a_layer_that_is_not_read_on_gives_its_contract_back() {
    let mut bench = editor();
    for layer in 1..=LAYERS {
        read(&mut bench, layer, 0, Duration::from_ms(20));
    }
    for frame in 1..150 {
        read(&mut bench, 1, frame, Duration::ZERO);
        bench.now = bench.now + TICK;
        bench.step(Event::Timer);
    }
    use Standing::{BestEffort, Contract};
    assert_eq!(standings(&bench), [Contract, BestEffort, BestEffort]);
}

#[test]
fn layers_are_known_by_their_turns_and_two_players_are_not() {
    let turns = |bench: &Bench| -> Vec<bool> {
        let streams = bench.server.streams.iter();
        streams.map(|(_, stream)| stream.turn.is_some()).collect()
    };
    let mut bench = editor();
    for frame in 0..3 {
        for layer in 1..=LAYERS {
            read(&mut bench, layer, frame, Duration::ZERO);
        }
        bench.now = bench.now + TICK;
    }
    assert_eq!(turns(&bench), [false, true, true]);
    // Two programs of one station, each by its own clock.
    let mut bench = editor();
    for frame in 0..3 {
        for layer in 1..=2 {
            read(&mut bench, layer, frame, Duration::ZERO);
            bench.now = bench.now + Duration(TICK.0 / 2);
        }
    }
    assert_eq!(turns(&bench), [false, false]);
}
