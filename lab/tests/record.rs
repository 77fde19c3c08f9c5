// SPDX-License-Identifier: Apache-2.0
//! `rushes-lab record` and its kin from end to end, small, on the slow disk, against plain Samba
//! and against Rushes: they write, report all figures, and leave nothing behind. Absent: lateness,
//! since machines that test are busy.

mod kit;

use kit::{Rooms, count, number, possible, possible_with_rushes};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const WRITERS: u64 = 2;
const SECONDS: u64 = 2;

/// Checks the figures of all runs that write to the slow disk.
fn check_written(report: &Value, files: u64, bytes: u64) {
    assert_eq!(count(report, "bytes_wrong"), 0, "{report:#}");
    assert_eq!(report["errors"], Value::Array(Vec::new()));
    assert_eq!(count(report, "bytes"), bytes);
    assert_eq!(
        report["per_file"].as_array().map(Vec::len),
        Some(files as usize)
    );
    // The device got all bytes at last, and noted when.
    assert_eq!(count(report, "device_missing_blocks"), 0);
    assert!(number(report, "device_worst_age_s") > 0.0);
    assert!(count(report, "device_late_blocks") * 4096 >= count(report, "device_late_bytes"));
    assert!(count(report, "fragments_max") >= 1);
    assert!(count(report, "fragments") >= files);
    assert!(number(report, "final_sync_s") > 0.0);
    assert!(number(report, "mb_per_s") > number(report, "mb_per_s_synced"));
    assert!(count(&report["disk_statistics"], "cached_bytes") >= bytes);
    assert!(count(&report["block_statistics"], "write_bytes") >= bytes);
}

#[test]
fn recordings_are_judged_in_every_respect() {
    if !possible("recordings") {
        return;
    }
    let rooms = Rooms::new("record");
    let frames = WRITERS * SECONDS * 25;
    for flags in ["--server stock", "--server stock-strict --fs xfs --flush"] {
        if flags.contains("xfs") && !Path::new("/usr/sbin/mkfs.xfs").exists() {
            eprintln!("SKIPPED {flags}: it needs xfsprogs");
            continue;
        }
        let report = rooms.run(&format!(
            "record {flags} --streams {WRITERS} --seconds {SECONDS} --bitrate 20M --cache 64MiB"
        ));
        check_written(&report, WRITERS, frames * 100_000);
        assert_eq!(count(&report, "frames"), frames);
        assert!(count(&report, "late_frames") <= frames);
        assert!(number(&report, "worst_lateness_ms") > -500.0);
        assert_eq!(report["write_back"], true);
    }
}

#[test]
fn copies_are_extended_and_arrive_whole() {
    if !possible("copies") {
        return;
    }
    let rooms = Rooms::new("copy-in");
    for extend in ["one-byte", "set-eof", "none"] {
        let report = rooms.run(&format!(
            "copy-in --server stock --clients {WRITERS} --files 2 --bytes 5000001 --extend {extend} --cache 64MiB"
        ));
        check_written(&report, 2 * WRITERS, 2 * WRITERS * 5_000_001);
        assert_eq!(report["extend"], extend);
        assert_eq!(report["worst_lateness_ms"], Value::Null);
    }
}

#[test]
fn players_and_writers_share_a_server() {
    if !possible("mixed") {
        return;
    }
    let rooms = Rooms::new("mixed");
    let report = rooms.run(&format!(
        "mixed --server stock --readers 1 --writers {WRITERS} --seconds {SECONDS} --bitrate 20M --cache 64MiB"
    ));
    assert_eq!(count(&report, "frames"), SECONDS * 25);
    assert_eq!(count(&report, "bytes_wrong"), 0);
    let bytes = WRITERS * SECONDS * 25 * 100_000;
    check_written(&report["recording"], WRITERS, bytes);
}

/// Checks that the daemon's status agrees with the bytes that clients wrote through it.
fn check_daemon(report: &Value, writes: u64, bytes: u64) {
    assert_eq!(report["server"], "rushes");
    let status = &report["status"];
    let counts = ["write_count", "plain_count", "used_bytes"];
    let told = counts.map(|name| count(&status["write"], name));
    assert_eq!(told, [writes, 0, 0], "{counts:?} of {:#}", status["write"]);
    assert_eq!(status["shares"][0]["write_way"], "extents");
    let device = &status["devices"][0];
    assert!(count(device, "written_bytes") >= bytes, "{device:#}");
    assert!(count(device, "write_request_count") < writes, "{device:#}");
    let settings = report["settings"]["rushes_toml"].as_str();
    assert!(settings.is_some_and(|text| text.contains("[write]\nbuffer_bytes")));
}

#[test]
fn rushes_itself_is_judged_by_what_was_written() {
    if !possible_with_rushes("rushes") {
        return;
    }
    let rooms = Rooms::new("rushes");
    const FRAME: u64 = 100_000;
    let frames = WRITERS * SECONDS * 25;
    let streams = "--seconds 2 --bitrate 20M --cache 64MiB --server rushes";
    let report = rooms.run(&format!("record --streams {WRITERS} {streams}"));
    check_written(&report, WRITERS, frames * FRAME);
    check_daemon(&report, frames, frames * FRAME);
    let told = ["frames", "frame_bytes", "file_bytes", "bitrate"];
    let expected = [frames, FRAME, SECONDS * 25 * FRAME, 20_000_000];
    assert_eq!(told.map(|name| count(&report, name)), expected, "{told:?}");
    for row in report["per_file"].as_array().expect("a list") {
        let told = ["frames", "bytes", "bytes_wrong"].map(|name| count(row, name));
        assert_eq!(told, [SECONDS * 25, SECONDS * 25 * FRAME, 0], "{row:#}");
    }

    let report = rooms.run(&format!("mixed --readers 1 --writers {WRITERS} {streams}"));
    assert_eq!(count(&report, "frames"), SECONDS * 25);
    assert_eq!(count(&report, "bytes_wrong"), 0);
    check_written(&report["recording"], WRITERS, frames * FRAME);

    const LENGTH: u64 = 3_000_001;
    let report = rooms.run(&format!(
        "copy-in --server rushes --clients 1 --files 2 --bytes {LENGTH} --extend none --cache 64MiB"
    ));
    check_written(&report, 2, 2 * LENGTH);
    assert_eq!(count(&report, "file_bytes"), LENGTH);
    assert_eq!(report["status"]["write"]["plain_count"], 0);
}

#[test]
fn scattered_writes_are_all_found_again() {
    if !possible("scatter") {
        return;
    }
    let rooms = Rooms::new("scatter");
    let report = rooms
        .run("scatter --server stock --clients 2 --bytes 4MiB --file-bytes 16MiB --cache 64MiB");
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    assert!(count(&report, "bytes") >= 4 << 20);
    assert!(count(&report, "device_write_count") > 0);
    assert!(number(&report, "mb_per_s_synced") > 0.0);
}

#[test]
fn an_interrupted_recording_puts_everything_away() {
    if !possible("interrupt") {
        return;
    }
    let rooms = Rooms::new("interrupt");
    let mut child = rooms.start("record --server stock --streams 1 --seconds 60 --cache 64MiB");
    let pid = child.id();
    let clip = "stage/footage/take00/clip.mov";
    let begun = Instant::now();
    let is_recording = || {
        fs::read_dir(rooms.path())
            .expect("it is there")
            .flatten()
            .any(|room| fs::metadata(room.path().join(clip)).is_ok_and(|file| file.len() > 0))
    };
    while !is_recording() {
        let ended = child.try_wait().expect("it is ours");
        if ended.is_some() || begun.elapsed() > Duration::from_secs(300) {
            let _ = child.kill();
            let output = child.wait_with_output().expect("it is ours");
            panic!("nothing is written within 300 s, or it ended ({ended:?}): {output:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let this = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(this, rustix::process::Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("interrupted"), "{said}");
    rooms.check_tidy("record", pid);
}
