// SPDX-License-Identifier: Apache-2.0
//! A contract goes where its reader goes. How many editors a device keeps is in
//! `sim/scenarios/timeline.toml`.

use super::tests::{Bench, facts, ruled};
use super::*;
use alloc::vec::Vec;

const MIB: u64 = 1 << 20;
const FRAME: u64 = 500_000;

/// A client that plays clips, each of them open under a handle of its own.
struct Editor {
    session: u32,
    request: u64,
}

impl Editor {
    fn new(bench: &mut Bench, session: u32, clips: u32) -> Editor {
        bench.session(session);
        for handle in 1..=clips {
            let file = session * 100 + handle;
            bench.open(
                session,
                handle,
                "clip",
                ruled(file, 1000 * MIB, 100_000_000),
            );
        }
        Editor {
            session,
            request: u64::from(session) * 1_000_000,
        }
    }

    /// Read a frame of each clip, `count` times, a frame's time apart; the device keeps up.
    fn play(&mut self, bench: &mut Bench, clips: &[u32], start: u64, count: u64) {
        for frame in 0..count {
            for &handle in clips {
                self.request += 1;
                let at = start + frame * FRAME;
                bench.read(self.session, handle, self.request, at, FRAME);
                bench.serve_all();
                bench.end(self.session, self.request);
            }
            bench.now = bench.now + Duration::from_ms(40);
        }
    }

    /// The clips that have a contract.
    fn promised(&self, bench: &Bench) -> Vec<u32> {
        let session = SessionId(self.session);
        let with_contract = |(_, stream): (u32, &Stream)| {
            let is_own = stream.session == session && stream.standing == Standing::Contract;
            stream.handle.filter(|_| is_own).map(|handle| handle.0)
        };
        let mut clips: Vec<u32> = bench
            .server
            .streams
            .iter()
            .filter_map(with_contract)
            .collect();
        clips.sort_unstable();
        clips
    }
}

#[test]
fn promise_goes_from_clip_to_clip_with_the_reader() {
    let mut bench = Bench::new(1024);
    let mut editor = Editor::new(&mut bench, 1, 5);
    for (cut, clip) in [1, 2, 3, 4, 5, 2, 1].into_iter().enumerate() {
        editor.play(&mut bench, &[clip], (100 + 50 * cut as u64) * MIB, 50);
        assert_eq!(editor.promised(&bench), [clip], "cut {cut}");
    }
    assert_eq!(bench.server.promised.rate, 12_500_000);
}

#[test]
fn who_has_a_promise_keeps_it_over_a_cut_on_a_device_that_is_full() {
    let mut bench = Bench::new(1024);
    let mut editors: Vec<Editor> = (1..=14)
        .map(|nth| Editor::new(&mut bench, nth, 2))
        .collect();
    for editor in &mut editors {
        editor.play(&mut bench, &[1], 0, 6);
    }
    let promised: Vec<usize> = (0..14)
        .filter(|&nth| editors[nth].promised(&bench) == [1])
        .collect();
    assert!((9..=13).contains(&promised.len()), "{promised:?}");
    for &nth in &promised {
        editors[nth].play(&mut bench, &[2], 400 * MIB, 1);
        assert_eq!(editors[nth].promised(&bench), [2], "editor {nth}");
    }
}

#[test]
fn layers_that_are_read_together_are_promised_each() {
    let mut bench = Bench::new(1024);
    let mut editor = Editor::new(&mut bench, 1, 6);
    editor.play(&mut bench, &[1, 2, 3], 0, 50);
    assert_eq!(editor.promised(&bench), [1, 2, 3]);
    // All of them cut at once, and to two: the third one's contract is given back.
    editor.play(&mut bench, &[4, 5, 6], 300 * MIB, 50);
    assert_eq!(editor.promised(&bench), [4, 5, 6]);
    editor.play(&mut bench, &[1, 2], 600 * MIB, 150);
    assert_eq!(editor.promised(&bench), [1, 2]);
}

#[test]
fn promise_stays_where_somebody_plays_while_he_looks_something_up() {
    let mut bench = Bench::new(1024);
    let mut editor = Editor::new(&mut bench, 1, 2);
    bench.open(1, 9, "project.db", facts(900, 900 * MIB));
    editor.play(&mut bench, &[1], 0, 50);
    for look in 0..40 {
        let request = 5_000_000 + look;
        bench.read(1, 9, request, look * 7919 % 899 * MIB, 8192);
        bench.serve_all();
        bench.end(1, request);
        assert_eq!(editor.promised(&bench), [1], "look {look}");
        bench.now = bench.now + Duration::from_ms(1500);
        editor.play(&mut bench, &[1], (50 + look) * FRAME, 1);
    }
}

#[test]
fn place_that_was_left_holds_no_buffers() {
    let mut bench = Bench::new(1024);
    let mut editor = Editor::new(&mut bench, 1, 2);
    editor.play(&mut bench, &[1], 0, 50);
    assert!(bench.held_count() > 8, "{} held", bench.held_count());
    editor.play(&mut bench, &[2], 0, 1);
    let held = |handle: u32| {
        let of = |(_, stream): &(u32, &Stream)| stream.handle == Some(HandleId(handle));
        let found = bench.server.streams.iter().find(of);
        found.map_or(0, |(_, stream)| stream.held.len())
    };
    assert_eq!(held(1), 0);
    assert!(held(2) > 0);
}

#[test]
fn read_ahead_is_as_long_as_the_runs_are() {
    let mut bench = Bench::new(1024);
    let ahead = |bench: &Bench| {
        let streams = bench.server.streams.iter();
        let mut ahead = streams
            .filter(|(_, stream)| stream.standing == Standing::Contract)
            .map(|(_, stream)| stream.fetched - stream.consumed);
        ahead.next().unwrap_or(0)
    };
    let mut editor = Editor::new(&mut bench, 1, 8);
    editor.play(&mut bench, &[1], 0, 75);
    let without_cuts = ahead(&bench);
    for clip in 2..=8 {
        editor.play(&mut bench, &[clip], 100 * MIB, 75);
    }
    // The bytes read ahead go down until a visit is worth while; at most they are the window.
    let mut with_cuts = 0;
    for frame in 75..115 {
        editor.play(&mut bench, &[8], 100 * MIB + frame * FRAME, 1);
        with_cuts = with_cuts.max(ahead(&bench));
    }
    // √(2 · 2.6 MB · 37 MB) is 14 MB.
    assert!((8 * MIB..24 * MIB).contains(&with_cuts), "{with_cuts}");
    assert!(without_cuts > 40 * MIB, "{without_cuts}");
    // Long runs bring it back.
    editor.play(&mut bench, &[8], 100 * MIB + 115 * FRAME, 1200);
    assert!(ahead(&bench) > 40 * MIB, "{}", ahead(&bench));
}
