// SPDX-License-Identifier: Apache-2.0
//! Recorders, copies in both directions and scatterers on the lab's disk: their times, and their
//! effect on each other. The checker looks at their bytes in each of these runs.

use rushes_sim::judge::Report;
use rushes_sim::record_groups::Recorded;
use rushes_sim::recording::Recording;

/// Plays it. No byte may be wrong.
#[track_caller]
fn play(recording: &Recording) -> (Report, Recorded) {
    let report = recording.run();
    assert_eq!(report.violations, Vec::<String>::new(), "{recording:?}");
    let written = report.recorded.clone().expect("somebody writes");
    assert_eq!(
        (written.plain, written.missing_bytes),
        (0, 0),
        "{written:?}"
    );
    (report, written)
}

/// Plays it. Neither players nor recorders may be late.
#[track_caller]
fn play_in_time(recording: &Recording) -> (Report, Recorded) {
    let (report, written) = play(recording);
    assert_eq!((report.late, written.late), (0, 0), "{report:?}");
    assert_eq!(written.device_late_bytes, 0, "{report:?}");
    assert_eq!(report.promised, recording.readers, "{report:?}");
    (report, written)
}

#[test]
fn copies_of_a_gigabyte_side_by_side_have_two_fragments_each() {
    for announce in [false, true] {
        let (_, out) = play(&Recording {
            copies_in: 12,
            announce,
            seconds: 60,
            ..Recording::default()
        });
        assert!(out.fragments_max <= 2, "{out:?}");
        assert!(out.copy_mb_per_second > 130.0, "{out:?}");
    }
}

#[test]
fn lanes_that_are_written_to_keep_their_memory() {
    let (_, out) = play(&Recording {
        copies_in: 12,
        memory: 256,
        seconds: 100,
        ..Recording::default()
    });
    // The bytes of the first have to move: it had most of the buffer. Without shares 3.8 GB move.
    assert!(out.moved_bytes < 1200 << 20, "{out:?}");
}

#[test]
fn copies_that_write_as_fast_as_they_are_let_get_on_alike() {
    for (one_session, memory) in [(false, 0), (true, 0), (false, 256), (true, 256)] {
        let (_, out) = play(&Recording {
            copies_in: 16,
            copy_in_mib: 1024,
            one_session,
            memory,
            slower: 4,
            buffer: 512,
            ..Recording::default()
        });
        assert!(out.copy_even > 0.85, "{one_session} {memory} {out:?}");
        assert!(
            out.copy_mb_per_second > 35.0,
            "{one_session} {memory} {out:?}"
        );
    }
}

#[test]
fn small_writes_over_a_cached_file_become_few_requests() {
    // Three lengths of the file: how often two writes meet in one is a matter of chance.
    let scattered = |no_coalesce| {
        let outs = [192, 256, 512].map(|scatter_mib| {
            let (_, out) = play(&Recording {
                scatterers: 8,
                scatter_mib,
                no_coalesce,
                ..Recording::default()
            });
            out
        });
        assert!(
            outs.iter()
                .all(|out| no_coalesce == (out.bridged_bytes == 0)),
            "{outs:?}"
        );
        outs
    };
    let (with, without) = (scattered(false), scattered(true));
    let writes = |outs: &[Recorded]| outs.iter().map(|out| out.writes).sum::<u64>();
    assert!(
        writes(&with) * 4 <= writes(&without),
        "{with:?} {without:?}"
    );
    for (with, without) in with.iter().zip(&without) {
        let times = with.scatter_mb_per_second / without.scatter_mb_per_second;
        assert!(times >= 1.38, "{times} {with:?} {without:?}");
    }
}

#[test]
fn gaps_that_are_bridged_make_no_promise_late() {
    let (_, out) = play_in_time(&Recording {
        readers: 6,
        writers: 2,
        scatterers: 4,
        // So much of it stays in the cache beside players and recorders that there are gaps to
        // bridge.
        scatter_mib: 192,
        ..Recording::default()
    });
    assert!(out.bridged_bytes > 0, "{out:?}");
}

#[test]
fn copies_in_and_out_slow_each_other_and_nobody_else() {
    let (report, out) = play_in_time(&Recording {
        readers: 6,
        writers: 3,
        copies: 1,
        copies_in: 2,
        copy_in_mib: 512,
        ..Recording::default()
    });
    assert!(report.copy_mb_per_second > 5.0, "{report:?}");
    assert!(out.copy_mb_per_second > 5.0, "{report:?}");
}

#[test]
fn a_drive_with_a_memory_is_told_to_flush_before_it_is_read_from() {
    let (report, out) = play_in_time(&Recording {
        readers: 6,
        writers: 5,
        copies: 1,
        memory: 256,
        ..Recording::default()
    });
    assert!(report.copy_mb_per_second > 2.0, "{report:?}");
    assert!((30..600).contains(&out.flushes), "{out:?}");
}

#[test]
fn a_drive_without_a_memory_or_without_readers_is_not_told_so() {
    for (readers, memory) in [(6, 0), (0, 256)] {
        let (_, out) = play_in_time(&Recording {
            readers,
            writers: 5,
            memory,
            ..Recording::default()
        });
        assert_eq!(out.flushes, 0, "{out:?}");
    }
}

#[test]
fn a_flush_that_never_ends_stops_nobody() {
    let (_, out) = play_in_time(&Recording {
        readers: 4,
        writers: 3,
        copies: 1,
        memory: 256,
        flush_hangs: true,
        ..Recording::default()
    });
    assert_eq!(out.flushes, 1, "{out:?}");
}

#[test]
fn a_drive_that_was_idle_meanwhile_answers_too() {
    // No reads for a while: the written bytes are on the medium long before the first read.
    let (report, _) = play(&Recording {
        readers: 4,
        copies_in: 1,
        copy_in_mib: 64,
        readers_from: 5,
        memory: 256,
        seconds: 10,
        ..Recording::default()
    });
    assert_eq!(report.late, 0, "{report:?}");
}

#[test]
fn a_copy_beside_recordings_is_not_held_up_by_what_a_memory_owes() {
    let out = |memory| {
        let (_, out) = play_in_time(&Recording {
            writers: 5,
            copies_in: 1,
            memory,
            ..Recording::default()
        });
        out
    };
    let (with, without) = (out(256), out(0));
    assert!(
        with.copy_mb_per_second >= 0.9 * without.copy_mb_per_second,
        "{with:?} {without:?}"
    );
}

#[test]
fn small_writes_gather_for_a_drive_that_orders_them_itself() {
    let scattered = |no_coalesce| {
        let (_, out) = play(&Recording {
            scatterers: 8,
            memory: 256,
            no_coalesce,
            ..Recording::default()
        });
        out
    };
    let (with, without) = (scattered(false), scattered(true));
    assert!(
        with.writes * 5 <= without.writes * 4,
        "{with:?} {without:?}"
    );
}

#[test]
fn a_drive_that_cannot_be_told_so_is_asked_once() {
    let (_, out) = play_in_time(&Recording {
        readers: 4,
        writers: 3,
        memory: 256,
        no_flush: true,
        ..Recording::default()
    });
    assert_eq!(out.flushes, 1, "{out:?}");
}

#[test]
fn writers_that_come_later_hurt_no_contract() {
    let (report, out) = play(&Recording {
        readers: 8,
        late_writers: 8,
        ..Recording::default()
    });
    assert_eq!((report.promised, report.late), (8, 0), "{report:?}");
    assert!(out.late > 0, "somebody has to wait: {out:?}");
}

#[test]
fn readers_are_not_promised_what_writers_take() {
    let (report, out) = play(&Recording {
        readers: 8,
        writers: 8,
        readers_from: 10,
        ..Recording::default()
    });
    assert!((2..8).contains(&report.promised), "{report:?}");
    assert_eq!((report.late_promised, out.late), (0, 0), "{report:?}");
    assert_eq!(out.device_late_bytes, 0, "{out:?}");
}

#[test]
fn eleven_recordings_are_in_time_on_the_disk_too() {
    let (_, out) = play_in_time(&Recording {
        writers: 11,
        seconds: 180,
        ..Recording::default()
    });
    assert!(out.dirty_bytes_max <= 1 << 30, "{out:?}");
    assert!(out.final_write_s < 5.0, "{out:?}");
}

#[test]
fn players_recordings_and_a_copy_share_a_disk() {
    let (report, _) = play_in_time(&Recording {
        readers: 6,
        writers: 5,
        copies: 1,
        ..Recording::default()
    });
    assert!(report.copy_mb_per_second > 1.0, "{report:?}");
}
