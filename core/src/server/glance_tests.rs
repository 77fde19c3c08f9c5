// SPDX-License-Identifier: Apache-2.0
//! Single frames here and there: the reads for them, the contracts, and the moment at which the
//! client plays again.

use super::tests::{Bench, facts, ruled};
use super::*;

const MIB: u64 = 1 << 20;

const FRAME: u64 = 500_000;

/// A client that has looked at `count` frames, far apart in one clip of 100 Mb/s.
fn glancer(count: u64) -> Bench {
    let mut bench = Bench::new(256);
    bench.session(1);
    bench.open(1, 1, "a", ruled(1, 900 * MIB, 100_000_000));
    for nth in 0..count {
        glance(&mut bench, nth + 1, (nth * 37 % 61 + 1) * 14 * MIB);
    }
    bench
}

/// Read a frame and wait 40 ms. Returns how much the device read for it. Units: bytes.
fn glance(bench: &mut Bench, request: u64, at: u64) -> u64 {
    bench.read(1, 1, request, at, FRAME);
    let mut bytes = 0;
    for _ in 0..64 {
        bytes += bench
            .flights
            .iter()
            .map(|io| io.range.length.0)
            .sum::<u64>();
        if bench.flights.is_empty() && bench.outcome(request).is_some() {
            break;
        }
        bench.now = bench.now + Duration::from_ms(1);
        bench.step(Event::Timer);
        for file in core::mem::take(&mut bench.stats) {
            let facts = ruled(file.0, 900 * MIB, 100_000_000);
            bench.step(Event::Stat {
                file,
                size: facts.size,
                version: facts.version,
                is_fresh: false,
            });
        }
        let many = bench.flights.len();
        bench.run(many);
    }
    bench.end(1, request);
    bench.now = bench.now + Duration::from_ms(40);
    bytes
}

fn standing(bench: &Bench) -> Standing {
    bench.server.streams(bench.now)[0].standing
}

#[test]
fn nothing_is_read_behind_a_frame_of_somebody_who_glances_about() {
    let mut bench = glancer(5);
    for nth in 0..20 {
        let bytes = glance(&mut bench, 100 + nth, (nth * 29 % 60) * 14 * MIB + 5 * MIB);
        // Rounded out to pages, or as far as that costs nothing to speak of.
        assert!(bytes <= FRAME + (128 << 10), "{bytes} bytes for a frame");
    }
    assert_eq!(standing(&bench), Standing::BestEffort);
}

#[test]
fn a_frame_beside_the_one_before_is_no_play_yet() {
    let mut bench = glancer(5);
    // Two frames that touch, one before the other: a conform meets them by chance.
    glance(&mut bench, 100, 400 * MIB + FRAME);
    glance(&mut bench, 101, 400 * MIB);
    assert_eq!(standing(&bench), Standing::BestEffort);
}

#[test]
fn a_frame_a_few_frames_on_has_nothing_read_behind_it() {
    let mut bench = glancer(5);
    // As a hand moves: between two and eight frames, forwards and backwards.
    let mut at = 400 * MIB;
    for nth in 0..40 {
        let way = (2 + nth * 5 % 7) * FRAME;
        at = if nth % 9 < 5 { at + way } else { at - way };
        let bytes = glance(&mut bench, 100 + nth, at);
        assert!(
            bytes <= FRAME + (128 << 10),
            "{bytes} bytes for frame {nth}"
        );
    }
}

#[test]
fn whoever_plays_where_he_scrubbed_plays_after_half_a_second_and_no_longer_when_he_scrubs_again() {
    let mut bench = glancer(5);
    let (mut at, mut request) = (100 * MIB, 100);
    let mut step = |bench: &mut Bench, frames: u64| {
        at += frames * FRAME;
        request += 1;
        glance(bench, request, at)
    };
    for nth in 0..60 {
        step(&mut bench, 2 + nth % 7);
    }
    for _ in 0..30 {
        step(&mut bench, 1);
    }
    assert_eq!(standing(&bench), Standing::Contract);
    // Each third to ninth frame, and nothing between.
    let mut bytes = 0;
    for nth in 0..60 {
        bytes += step(&mut bench, 3 + nth % 7);
    }
    let stream = bench.server.streams.iter().next().expect("it reads").1;
    assert!(bench.server.glances_about(stream));
    assert!(bytes < 60 * 4 * FRAME, "{bytes} bytes for sixty frames");
}

#[test]
fn a_second_of_each_sound_is_no_glance() {
    let mut bench = Bench::new(256);
    bench.session(1);
    // 144 kB a second, and as much a read; a picture beside them.
    for sound in 1..=8 {
        let facts = ruled(sound, 6 * MIB, 8 * 144_000);
        bench.open(1, sound, "a", facts);
        bench.read(1, sound, u64::from(sound), 0, 144_000);
        bench.serve_all();
        bench.end(1, u64::from(sound));
    }
    for (_, stream) in bench.server.streams.iter() {
        assert!(!bench.server.glances_about(stream));
    }
}

#[test]
fn whoever_glanced_about_plays_again_after_half_a_second() {
    let mut bench = glancer(5);
    let mut bytes = 0;
    for frame in 0..14 {
        bytes += glance(&mut bench, 100 + frame, 500 * MIB + frame * FRAME);
    }
    assert_eq!(standing(&bench), Standing::Contract);
    assert!(bytes > 20 * FRAME, "it is read ahead: {bytes}");
}

#[test]
fn a_player_that_leaves_frames_out_does_not_glance() {
    let mut bench = glancer(0);
    // At four times its speed: each fourth frame.
    for frame in 0..20 {
        glance(&mut bench, 1 + frame, 100 * MIB + frame * 4 * FRAME);
    }
    let stream = bench.server.streams.iter().next().expect("it reads").1;
    assert!(!bench.server.glances_about(stream));
}

#[test]
fn a_hop_within_what_is_played_begins_a_schedule_of_its_own() {
    let mut bench = glancer(0);
    for frame in 0..30 {
        glance(&mut bench, 1 + frame, frame * FRAME);
    }
    assert_eq!(standing(&bench), Standing::Contract);
    // Twelve frames are left out: the next one is due a preroll after it was asked for, not when
    // those had been played.
    let at = bench.now;
    bench.read(1, 1, 900, 42 * FRAME, FRAME);
    let stream = bench.server.streams.iter().next().expect("it plays").1;
    assert_eq!((stream.origin, stream.anchor), (42 * FRAME, at));
}

/// A clip in several files, each asked for after the other, which is Avid's way: the next is not
/// behind the read-ahead of the last, of any client.
#[test]
fn a_disk_rests_for_a_moment_behind_a_first_read_when_it_has_time() {
    let mut bench = Bench::new(256);
    bench.session(1);
    // A client plays, and is far from having all that may be read ahead.
    bench.open(1, 1, "picture", ruled(1, 900 * MIB, 100_000_000));
    bench.read(1, 1, 1, 0, FRAME);
    bench.run(2);
    bench.read(1, 1, 2, FRAME, FRAME);
    bench.run(2);
    assert!(bench.is_busy(), "the daemon reads ahead for the seat");
    // And then sound of unknown rate.
    for nth in 0..8 {
        let (handle, request) = (2 + nth, u64::from(10 + nth));
        bench.open(1, handle, "sound", facts(handle, 5 * MIB));
        bench.read(1, handle, request, MIB, 144_000);
        let mut others = 0;
        while bench.outcome(request).is_none() {
            others += u32::from(bench.flights[0].file != FileId(handle));
            bench.run(1);
        }
        assert!(
            others <= if nth == 0 { 4 } else { 0 },
            "{nth}: {others} before it"
        );
        assert!(bench.flights.is_empty(), "{nth}: it rests");
        bench.end(1, request);
        bench.now = bench.now + Duration::from_ms(1);
        bench.step(Event::Timer);
        assert!(bench.flights.is_empty(), "{nth}: it rests");
    }
    bench.now = bench.now + Duration::from_ms(10);
    bench.step(Event::Timer);
    assert!(!bench.flights.is_empty(), "and goes on");
}

#[test]
fn a_read_whose_pages_go_while_the_file_is_looked_at_is_read_again() {
    let mut bench = glancer(5);
    let (mut at, mut request) = (100 * MIB, 100);
    let mut step = |bench: &mut Bench, frames: u64| {
        at += frames * FRAME;
        request += 1;
        glance(bench, request, at);
        at
    };
    for _ in 0..30 {
        step(&mut bench, 1);
    }
    let places: Vec<u64> = (0..20).map(|nth| step(&mut bench, 3 + nth % 7)).collect();
    assert_eq!(standing(&bench), Standing::Contract);
    let stream = bench.server.streams.iter().next().expect("it reads").1;
    assert!(bench.server.glances_about(stream));
    // Its bytes are cached; but the server has to look at the file first, and another program has
    // changed it.
    for nth in 0..4 {
        bench.read(1, 1, 800 + nth, places[10] + 1000 + nth * 6, 6);
        assert!(bench.outcome(800 + nth).is_some());
        bench.end(1, 800 + nth);
    }
    bench.now = bench.now + Duration::from_ms(800);
    bench.read(1, 1, 900, places[10] + 1024, 6);
    assert_eq!(bench.outcome(900), None);
    let stream = bench.server.streams.iter().next().expect("it reads").1;
    assert!(bench.server.glances_about(stream));
    assert_eq!(core::mem::take(&mut bench.stats), [FileId(1)]);
    bench.step(Event::Stat {
        file: FileId(1),
        size: ByteCount(900 * MIB),
        version: 2,
        is_fresh: false,
    });
    bench.run(8);
    assert!(bench.outcome(900).is_some(), "nobody reads its bytes again");
}
