// SPDX-License-Identifier: Apache-2.0
//! A seat that plays a timeline again is read ahead across its cuts. How many editors a
//! device keeps then is in `sim/scenarios/timeline_again.toml`.

use super::rehearsal::RunPlace;
use super::tests::{Bench, ruled};
use super::*;
use alloc::vec::Vec;

const MIB: u64 = 1 << 20;
const FRAME: u64 = 500_000;
/// Frames of a run: three seconds.
const RUN: u64 = 75;

/// An editor with a timeline: clips that stay open, each under a handle of its own.
struct Editor {
    bench: Bench,
    seat: u32,
    request: u64,
}

impl Editor {
    fn new() -> Editor {
        let mut bench = Bench::new(128);
        bench.session(1);
        for handle in 1..=6 {
            bench.open(1, handle, "clip", ruled(handle, 1000 * MIB, 100_000_000));
        }
        Editor {
            bench,
            seat: 1,
            request: 0,
        }
    }

    /// Read frames of a clip in time; the device keeps up. True: the first one and more was fetched
    /// before it was asked for.
    fn play(&mut self, clip: u32, start: u64, count: u64) -> bool {
        let mut was_there = false;
        for frame in 0..count {
            self.request += 1;
            self.bench
                .read(self.seat, clip, self.request, start + frame * FRAME, FRAME);
            was_there |= frame == 0 && self.is_fetched_beyond_a_frame();
            self.bench.answer_looks();
            self.bench.serve_all();
            self.bench.answer_looks();
            self.bench.end(self.seat, self.request);
            self.bench.now = self.bench.now + Duration::from_ms(40);
        }
        was_there
    }

    /// Play a list of clips, each from its own place. For each one: whether its first frame was
    /// there.
    fn play_list(&mut self, clips: &[u32]) -> Vec<bool> {
        let play = |&clip: &u32| self.play(clip, place(clip), RUN);
        clips.iter().map(play).collect()
    }

    fn read_header(&mut self, clip: u32) {
        self.request += 1;
        self.bench.read(self.seat, clip, self.request, 0, 65_536);
        self.bench.answer_looks();
        self.bench.serve_all();
        self.bench.end(self.seat, self.request);
    }

    fn close(&mut self, clip: u32) {
        self.bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(clip),
        });
    }

    fn is_fetched_beyond_a_frame(&self) -> bool {
        let mut streams = self.bench.server.streams.iter().map(|(_, stream)| stream);
        let promised = streams.find(|stream| stream.standing == Standing::Contract);
        promised.is_some_and(|stream| stream.fetched > FRAME)
    }

    fn promised(&self) -> &Stream {
        let mut streams = self.bench.server.streams.iter().map(|(_, stream)| stream);
        let promised = streams.find(|stream| stream.standing == Standing::Contract);
        promised.expect("a stream has a contract")
    }

    fn seat(&self) -> SeatRecord {
        self.bench.server.seats(self.bench.now).remove(0)
    }
}

/// Where the run of a clip begins; not where a buffer does.
fn place(clip: u32) -> u64 {
    u64::from(clip) * 100 * MIB + 12_345
}

const LIST: [u32; 5] = [1, 4, 2, 5, 3];

#[test]
fn first_frames_are_there_when_a_list_is_played_again() {
    let mut editor = Editor::new();
    assert_eq!(editor.play_list(&LIST), [false; 5]);
    // The first clip follows the last one for the first time.
    assert_eq!(editor.play_list(&LIST), [false, true, true, true, true]);
    assert_eq!(editor.play_list(&LIST), [true; 5]);
    let seat = editor.seat();
    assert_eq!((seat.rehearsed_cuts, seat.foreseen_cuts), (9, 9));
}

#[test]
fn nothing_is_fetched_along_a_way_where_rehearsal_is_off() {
    let mut editor = Editor::new();
    let policy = Policy {
        rehearsal: false,
        ..editor.bench.server.policy.clone()
    };
    editor.bench.step(Event::PolicyChanged(policy));
    editor.play_list(&LIST);
    assert_eq!(editor.play_list(&LIST), [false; 5]);
    assert_eq!(editor.seat().rehearsed_cuts, 0);
}

#[test]
fn ways_end_where_rehearsal_is_switched_off() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), 10);
    assert!(!editor.promised().way.is_empty());
    let policy = Policy {
        rehearsal: false,
        ..editor.bench.server.policy.clone()
    };
    editor.bench.step(Event::PolicyChanged(policy));
    assert!(editor.promised().way.is_empty());
    // It is read ahead in its own file.
    editor.play(1, place(1) + 10 * FRAME, RUN);
    assert_eq!(editor.bench.server.check(), Vec::<String>::new());
}

#[test]
fn way_is_fetched_as_far_as_the_window_and_in_order() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), 10);
    let stream = editor.promised();
    let legs: Vec<u64> = stream.way.iter().map(|leg| leg.v / FRAME).collect();
    // The list begins for the second time just now: that is not known yet.
    let expected: Vec<u64> = (1..=4).map(|nth| nth * RUN).collect();
    assert_eq!(legs, expected);
    // The buffers of the way are held in the order in which they are needed.
    assert!(stream.fetched > RUN * FRAME, "{}", stream.fetched);
    let ends: Vec<u64> = stream.held.iter().map(|held| held.end).collect();
    assert!(ends.is_sorted(), "{ends:?}");
}

#[test]
fn reader_that_cuts_elsewhere_leaves_its_way() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), RUN);
    let before = editor.seat().unread.0;
    // To a clip that the list has nowhere.
    assert!(!editor.play(6, place(6), RUN));
    assert!(editor.promised().way.is_empty());
    let seat = editor.seat();
    assert_eq!((seat.rehearsed_cuts, seat.foreseen_cuts), (1, 0));
    assert!(seat.unread.0 > before, "{} {before}", seat.unread.0);
    // Nothing of the way is held.
    let held = editor.bench.held_count();
    let own = editor.promised().held.len();
    assert_eq!(held, own);
}

#[test]
fn reader_that_plays_on_beyond_the_cut_is_read_ahead_there() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), RUN);
    assert!(!editor.promised().way.is_empty());
    editor.play(1, place(1) + RUN * FRAME, 5);
    let stream = editor.promised();
    assert!(stream.way.is_empty());
    let ahead = stream.fetched - stream.consumed;
    assert!(ahead > 4 * MIB, "{ahead}");
    assert_eq!(editor.bench.held_count(), editor.promised().held.len());
}

#[test]
fn reader_that_cuts_earlier_finds_its_next_clip() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), RUN - 25);
    assert!(editor.play(4, place(4), RUN));
    // From now on the run is as long as it was this time.
    editor.play(1, place(1), 1);
    assert_eq!(
        editor.promised().way.first().map(|leg| leg.v / FRAME),
        Some(RUN - 25)
    );
}

#[test]
fn reader_that_leaves_a_clip_out_finds_the_one_behind() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), RUN);
    assert!(editor.play(2, place(2), 1));
}

#[test]
fn looks_between_two_runs_do_not_count() {
    let mut editor = Editor::new();
    for pass in 0..3 {
        for clip in [1, 2] {
            let was_there = editor.play(clip, place(clip), RUN);
            assert!(was_there || pass == 0 || clip == 1, "pass {pass}");
            editor.play(6, place(6) + u64::from(clip + 2 * pass) * 40 * MIB, 3);
        }
    }
    let seat = editor.seat();
    assert_eq!(seat.rehearsed_cuts, seat.foreseen_cuts);
    assert!(seat.rehearsed_cuts >= 3, "{}", seat.rehearsed_cuts);
}

/// As clients read a container's header or index once more.
#[test]
fn header_that_is_read_again_in_the_middle_of_a_run_is_no_cut() {
    let mut editor = Editor::new();
    // Another seat of the user has played the clip from its start.
    editor.seat = 2;
    editor.bench.session(2);
    editor
        .bench
        .open(2, 1, "clip", ruled(1, 1000 * MIB, 100_000_000));
    editor.play(1, 0, RUN);
    editor.play(1, 500 * FRAME, 1);
    editor.bench.step(Event::SessionClosed {
        session: SessionId(2),
    });
    editor.seat = 1;
    editor.read_header(1);
    editor.play(1, 400 * FRAME, 20);
    let number = editor.promised().number;
    editor.read_header(1);
    editor.play(1, 420 * FRAME, 5);
    editor.play(4, place(4), RUN);
    // One run, from frame 400 to 425.
    let key = FileKey {
        device: 1,
        inode: 1,
    };
    let place = RunPlace {
        file: key,
        start: 400 * FRAME,
    };
    let login = editor.bench.server.sessions[&SessionId(1)].login.clone();
    let run = editor.bench.server.rehearsal.run_at(&login, place);
    assert_eq!(run.map(|run| run.length / FRAME), Some(25));
    assert_ne!(editor.promised().number, number);
}

/// Admission counts a player whose way ends: it plays on there.
#[test]
fn player_at_the_end_of_its_way_is_a_player() {
    let mut editor = Editor::new();
    editor.play(1, place(1), 15);
    editor.play(4, place(4), 15);
    editor.play(6, place(6), RUN);
    editor.play(1, place(1), 10);
    let stream = editor.promised();
    let end = stream.way.last().map(|leg| leg.v + leg.length);
    assert_eq!(end, Some(stream.fetched), "all of the way is fetched");
    let server = &editor.bench.server;
    let players = server.players(stream.device, server.promised, &[]);
    assert_eq!(players.len(), 1);
}

#[test]
fn bytes_left_unread_are_counted_once() {
    let mut editor = Editor::new();
    editor.play(1, place(1), RUN);
    let ahead = editor.promised().ahead_bytes();
    assert!(ahead > 0);
    editor.play(4, place(4), 1);
    assert_eq!(editor.seat().unread.0, ahead);
    // The handle that was left is closed.
    editor.close(1);
    assert_eq!(editor.seat().unread.0, ahead);
}

#[test]
fn single_reads_of_known_places_are_presumed_to_play_twice_at_most() {
    let mut editor = Editor::new();
    for clip in LIST {
        editor.play(clip, place(clip), RUN);
    }
    // The seat pauses, and lets its contract go.
    editor.bench.now = editor.bench.now + Duration::from_s(60);
    editor.bench.step(Event::Timer);
    let session = SessionId(1);
    let starts = |editor: &Editor| editor.bench.server.sessions[&session].presumed_starts;
    for clip in LIST {
        editor.play(clip, place(clip), 1);
        editor.bench.now = editor.bench.now + Duration::from_s(5);
    }
    assert!(starts(&editor) <= 2, "{}", starts(&editor));
}

#[test]
fn seat_whose_ways_were_wrong_twice_in_a_row_is_followed_again_after_two_right_cuts() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    for wrong in [1, 2] {
        editor.play(wrong, place(wrong), RUN);
        editor.play(6, place(6) + u64::from(wrong) * 10 * MIB, RUN);
    }
    editor.play(4, place(4), 10);
    assert!(editor.promised().way.is_empty(), "two were wrong");
    editor.play(4, place(4) + 10 * FRAME, RUN - 10);
    // Right, but not fetched.
    assert!(!editor.play(2, place(2), RUN));
    editor.play(6, place(6) + 20 * MIB, RUN);
    editor.play(4, place(4), RUN);
    editor.play(2, place(2), RUN);
    editor.play(6, place(6) + 20 * MIB, 10);
    assert!(!editor.promised().way.is_empty(), "two were right");
}

#[test]
fn way_ends_where_its_file_is_closed() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.close(4);
    editor.bench.step(Event::Gone {
        session: SessionId(1),
        request: RequestId(9),
        key: FileKey {
            device: 1,
            inode: 4,
        },
    });
    editor.play(1, place(1), 10);
    let reached = editor.promised().way.len();
    assert_eq!(reached, 0, "{:?}", editor.promised().way);
    // The reader goes on as it would without a way.
    assert!(!editor.play(2, place(2), RUN));
    assert_eq!(editor.bench.server.check(), Vec::<String>::new());
}

#[test]
fn loop_finds_its_beginning_at_the_second_time() {
    let mut editor = Editor::new();
    assert!(!editor.play(1, place(1), RUN));
    editor.play(1, place(1), RUN);
    assert!(editor.play(1, place(1), RUN));
}

/// As many players do: the last clip is closed before the next one is opened. The files are known
/// since a colleague has them open.
#[test]
fn first_frames_are_there_for_a_player_that_closes_each_clip() {
    let mut editor = Editor::new();
    editor.bench.session(2);
    for handle in 1..=6 {
        let facts = ruled(handle, 1000 * MIB, 100_000_000);
        editor.bench.open(2, handle, "clip", facts);
        editor.close(handle);
    }
    let play_list = |editor: &mut Editor| -> Vec<bool> {
        let play = |&clip: &u32| {
            let facts = ruled(clip, 1000 * MIB, 100_000_000);
            editor.bench.open(1, clip, "clip", facts);
            let was_there = editor.play(clip, place(clip), RUN);
            editor.close(clip);
            was_there
        };
        LIST.iter().map(play).collect()
    };
    assert_eq!(play_list(&mut editor), [false; 5]);
    assert_eq!(play_list(&mut editor), [false, true, true, true, true]);
    // The buffers of the way are given back soon.
    assert!(editor.bench.held_count() > 0);
    editor.bench.now = editor.bench.now + Duration::from_ms(1100);
    editor.bench.step(Event::Timer);
    assert_eq!(editor.bench.held_count(), 0);
    assert_eq!(editor.bench.server.check(), Vec::<String>::new());
}

#[test]
fn contract_that_ends_takes_the_way_with_it() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.play(1, place(1), RUN - 10);
    let (key, _) = editor
        .bench
        .server
        .streams
        .iter()
        .find(|(_, stream)| stream.standing == Standing::Contract)
        .expect("a stream has a contract");
    editor.bench.server.resign(StreamId(key));
    let stream = editor.bench.server.streams.get(key).expect("it is there");
    assert!(stream.way.is_empty());
    assert!(stream.fetched <= RUN * FRAME);
}

#[test]
fn first_frames_are_there_for_a_server_that_was_told_of_the_list() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    editor.close(LIST[4]);
    let remembered = editor.bench.server.remembered();
    assert_eq!(remembered.len(), LIST.len());
    let mut later = Editor::new();
    later.bench.step(Event::Remembered(remembered));
    // A known beginning asks for its contract with its first read.
    assert_eq!(later.play_list(&LIST), [true; 5]);
}

#[test]
fn server_that_was_told_nonsense_serves_on() {
    let mut editor = Editor::new();
    editor.play_list(&LIST);
    let longest = i64::MAX as u64;
    let nonsense = |run: RememberedRun| RememberedRun {
        length: longest - run.place.start,
        next: run.next.or(Some(run.place)),
        ..run
    };
    let remembered = editor.bench.server.remembered();
    let mut later = Editor::new();
    let nonsense = remembered.into_iter().map(nonsense).collect();
    later.bench.step(Event::Remembered(nonsense));
    let first = [true, false, false, false, false];
    assert_eq!(later.play_list(&LIST), first);
    later.play_list(&LIST);
    assert_eq!(later.play_list(&LIST), [true; 5]);
}
