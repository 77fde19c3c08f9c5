// SPDX-License-Identifier: Apache-2.0
//! Stages of several disks from end to end, small, on disks that take no time: a pool of ours, and
//! its rivals. They play and write, every byte is right, and nothing is left behind. Absent:
//! speed.

mod kit;

use kit::{Rooms, count, number, possible, possible_with_rushes};
use serde_json::Value;
use std::path::Path;

const STREAMS: u64 = 4;
const FRAMES: u64 = STREAMS * 2 * 25;
const PLAY: &str =
    "play --streams 4 --seconds 2 --bitrate 20M --cache 64MiB --disk memory --disks 2";

fn there(programs: &[&str]) -> bool {
    let missing: Vec<_> = programs
        .iter()
        .filter(|program| !Path::new(program).exists())
        .collect();
    assert!(
        missing.is_empty() || std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
        "needs {missing:?}"
    );
    if !missing.is_empty() {
        eprintln!("SKIPPED: it needs {missing:?}");
    }
    missing.is_empty()
}

fn check_played(report: &Value, layout: &str) {
    assert_eq!(count(report, "frames"), FRAMES, "{report:#}");
    assert_eq!(count(report, "bytes_wrong"), 0, "{report:#}");
    assert_eq!(report["errors"], Value::Array(Vec::new()));
    assert_eq!(count(report, "stream_bytes"), FRAMES * 100_000);
    assert_eq!(
        (&report["layout"], count(report, "disks")),
        (&layout.into(), 2)
    );
    assert_eq!(report["disk"], "memory");
}

/// Checks that a stream had a contract. Only a quiet machine could check which reads came in time.
fn check_contract(report: &Value) {
    let rows = report["per_stream"].as_array().expect("a list");
    assert!(
        rows.iter().any(|row| row["standing"] == "contract"),
        "{report:#}"
    );
}

#[test]
fn streams_are_played_from_a_pool_under_contract() {
    if !possible_with_rushes("pool") {
        return;
    }
    let rooms = Rooms::new("pool");
    let report = rooms.run(&format!("{PLAY} --server rushes --layout pool"));
    check_played(&report, "pool");
    assert_eq!(report["streams_per_disk"], serde_json::json!([2, 2]));
    // Whether frames are late or not, the mount has a session with the daemon for each member, and
    // the daemon knows the streams.
    check_contract(&report);
    let sessions = report["status"]["sessions"].as_array().expect("a list");
    assert!(sessions.iter().all(|session| session["door"] == "fuse"));
    assert_eq!(sessions.len(), 2);

    let report = rooms.run(&format!("{PLAY} --server rushes --layout pool-striped"));
    check_played(&report, "pool-striped");
    assert_eq!(report["streams_per_disk"], serde_json::json!([4, 4]));
    check_contract(&report);

    if there(&["/usr/bin/ganesha.nfsd"]) {
        let beside = "--server rushes --layout pool --door nfs --copies 1";
        let report = rooms.run(&format!("{PLAY} {beside}"));
        check_played(&report, "pool");
        assert_eq!(report["door"], "nfs");
        check_contract(&report);
        assert!(number(&report, "copy_mb_per_s") > 0.0, "{report:#}");
        assert_eq!(report["copy_failures"], Value::Array(Vec::new()));
    }

    let report = rooms.run(&format!("{PLAY} --server stock --layout pool"));
    check_played(&report, "pool");
    assert_eq!(count(&report, "streams_admitted"), 0);
}

#[test]
fn rivals_play_from_the_same_disks() {
    let programs = ["/usr/bin/mergerfs", "/usr/sbin/mkfs.btrfs"];
    let programs = programs.map(|program| match program {
        "/usr/sbin/mkfs.btrfs" if Path::new("/usr/bin/mkfs.btrfs").exists() => {
            "/usr/bin/mkfs.btrfs"
        }
        program => program,
    });
    if !possible("rivals") || !there(&programs) {
        return;
    }
    let rooms = Rooms::new("rivals");
    for layout in ["raid0", "single", "mergerfs"] {
        let report = rooms.run(&format!("{PLAY} --server stock-tuned --layout {layout}"));
        check_played(&report, layout);
        assert_eq!(report["settings"]["read_ahead_kib"], 16384);
        let per_disk = match layout {
            "mergerfs" => serde_json::json!([2, 2]),
            _ => Value::Null,
        };
        assert_eq!(report["streams_per_disk"], per_disk, "{layout}");
    }
}

#[test]
fn what_is_written_to_a_pool_is_found_on_its_disks() {
    if !possible_with_rushes("record to a pool") {
        return;
    }
    let rooms = Rooms::new("pool-record");
    let report = rooms.run(
        "record --server rushes --layout pool --disks 2 --streams 4 --seconds 2 --bitrate 20M --cache 64MiB",
    );
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    assert_eq!(count(&report, "bytes"), FRAMES * 100_000);
    assert_eq!(count(&report, "device_missing_blocks"), 0);
    assert!(count(&report, "fragments") >= STREAMS);
    let disks = report["disk_statistics"]["disks"].as_array();
    let disks = disks.expect("one for each");
    assert_eq!(disks.len(), 2);
    // Four files, two disks.
    for disk in disks {
        assert!(
            count(disk, "cached_bytes") > FRAMES * 100_000 / 4,
            "{disk:#}"
        );
    }
    if there(&["/usr/bin/ganesha.nfsd"]) {
        let report = rooms.run(
            "record --server rushes --layout pool --disks 2 --streams 2 --seconds 1 --bitrate 20M --cache 64MiB --door nfs --flush",
        );
        assert_eq!(report["door"], "nfs");
        assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
        assert_eq!(count(&report, "bytes"), 2 * 25 * 100_000);
        assert_eq!(count(&report, "device_missing_blocks"), 0);
        assert_eq!(report["errors"], Value::Array(Vec::new()));
    }
}

#[test]
fn a_pool_of_unequal_disks_is_filled_beside_players() {
    if !possible_with_rushes("fill") {
        return;
    }
    let rooms = Rooms::new("fill");
    let report = rooms.run(
        "fill --server rushes --layout pool --disk memory --sizes 384MiB,448MiB --streams 1 --seconds 2 --bitrate 8M --cache 64MiB \
         --write-buffer 64MiB --fillers 2 --bytes 32MiB --limit 60",
    );
    assert_eq!(count(&report, "frames"), 50, "{report:#}");
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    let filling = &report["filling"];
    assert_eq!(count(filling, "filled_bytes_wrong"), 0, "{filling:#}");
    assert_eq!(filling["fill_errors"], Value::Array(Vec::new()));
    assert!(count(filling, "filled_bytes") > 700 << 20, "{filling:#}");
    // So small a disk keeps a hundredth for itself; and a file that was open when the last writer
    // got ENOSPC had up to a sixteenth of the remaining room reserved, more than once on its way.
    let free = filling["free_permille"].as_array().expect("one for each");
    assert_eq!(free.len(), 2);
    assert!(
        free.iter().all(|one| one.as_u64() < Some(60)),
        "{filling:#}"
    );
    let late = count(filling, "bytes_after_refusal") * 20;
    assert!(late <= count(filling, "disk_bytes"), "{filling:#}");
}

#[test]
fn readers_and_writers_of_a_pool_are_counted() {
    if !possible_with_rushes("throughput") {
        return;
    }
    let rooms = Rooms::new("throughput");
    const BYTES: u64 = 32 << 20;
    let load = "throughput --disk memory --readers 2 --writers 1 --bytes 32MiB --cache 64MiB --write-buffer 64MiB";
    for (flags, clients) in [
        ("--server rushes --layout pool --disks 2 --door smb", 3),
        (
            "--server rushes --layout pool-striped --disks 2 --door local",
            3,
        ),
        ("--server stock --door local", 3),
    ] {
        let report = rooms.run(&format!("{load} {flags}"));
        assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
        assert_eq!(count(&report, "bytes_read"), 2 * BYTES);
        assert_eq!(count(&report, "bytes_written"), BYTES);
        assert_eq!(
            report["client_mb_per_s"].as_array().map(Vec::len),
            Some(clients)
        );
        assert!(number(&report, "client_mb_per_s_min") <= number(&report, "client_mb_per_s_mean"));
        assert!(number(&report, "mb_per_s_synced") <= number(&report, "mb_per_s"));
        assert!(number(&report, "cpu_s_per_gib") > 0.0);
    }
}

#[test]
fn a_search_ends_with_a_number() {
    if !possible("most") {
        return;
    }
    let rooms = Rooms::new("most");
    let report = rooms.run(
        "most --server stock --least 1 --most 3 --seconds 1 --bitrate 8M --cache 64MiB --disk memory",
    );
    let kept = count(&report, "streams_kept");
    assert!(kept <= 3);
    let runs = report["runs"].as_array().expect("a list");
    assert!((1..=2).contains(&runs.len()), "{}", runs.len());
    assert_eq!(count(&report, "bytes_wrong"), 0);
}

#[test]
fn what_does_not_go_together_is_said() {
    let rooms = Rooms::new("refused");
    for (arguments, said) in [
        (
            "play --streams 1 --seconds 1 --disks 2 --disk memory",
            "--layout",
        ),
        (
            "play --streams 1 --seconds 1 --disks 2 --layout pool --keep /nowhere",
            "--keep",
        ),
        (
            "play --streams 1 --seconds 1 --disks 2 --layout raid0 --disk /",
            "leave out --disks",
        ),
    ] {
        let child = rooms.start(arguments);
        let pid = child.id();
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && text.contains(said),
            "{arguments}: {text}"
        );
        rooms.check_tidy(arguments, pid);
    }
}
