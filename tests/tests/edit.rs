// SPDX-License-Identifier: Apache-2.0
//! `rushes lab edit` from end to end, small: clients edit, the lab compares every byte and leaves
//! nothing behind. Lateness is measured elsewhere: machines that test are busy.

use rushes_tests::disk::Disk;
use rushes_tests::lab::{self, is_all_there};
use rushes_tests::scratch::Scratch;
use serde_json::Value;
use std::fs;
use std::process::Output;

const SECONDS: u64 = 3;
/// Synthetic footage.
const FILES: [&str; 4] = ["--files", "4", "--file-bytes", "20M"];
/// Of 20 Mb/s at 25 frames a second. Units: bytes.
const FRAME_BYTES: usize = 100_000;

fn edit(scratch: &Scratch, disk: &Disk, flags: &[&str]) -> Output {
    let memory = ["--cache", "64MiB", "--write-buffer", "64MiB"];
    edit_at(
        &[&["--bitrate", "20M"], &memory[..]].concat(),
        scratch,
        disk,
        flags,
    )
}

/// `load`: the rate of the footage, and the memory of the server
fn edit_at(load: &[&str], scratch: &Scratch, disk: &Disk, flags: &[&str]) -> Output {
    let seconds = SECONDS.to_string();
    let words = [&["edit", "--seconds", &seconds], load, flags].concat();
    lab::run(scratch, disk, &scratch.folder("rooms"), &words)
}

fn count(value: &Value, name: &str) -> u64 {
    value[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} is {} in {value:#}", value[name]))
}

/// The row of one kind of client in a run.
fn kind<'a>(run: &'a Value, name: &str) -> &'a Value {
    let mut rows = run["kinds"].as_array().expect("kinds").iter();
    rows.find(|row| row["kind"] == name)
        .unwrap_or_else(|| panic!("no {name} in {run:#}"))
}

#[test]
fn two_editors_and_a_scrubber_get_their_own_bytes_from_rushes_and_from_stock() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 512 << 20);
    let flags = ["--server", "rushes,stock", "--mix", "timeline=2,scrub=1"];
    let flags = [&FILES[..], &flags[..]].concat();
    let report = lab::report_of(&edit(&scratch, &disk, &flags), &[]);
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    let runs = report["runs"].as_array().expect("runs");
    let servers: Vec<&Value> = runs.iter().map(|run| &run["server"]).collect();
    assert_eq!(servers, ["rushes", "stock"]);
    for run in runs {
        let editors = kind(run, "timeline");
        assert_eq!(count(editors, "frames"), 2 * SECONDS * 25);
        assert_eq!(count(editors, "frames_done"), 2 * SECONDS * 25);
        assert_eq!(
            count(editors, "bytes_read"),
            2 * SECONDS * 25 * FRAME_BYTES as u64
        );
        assert!(count(editors, "cuts") >= 2, "{editors:#}");
        let scrubber = kind(run, "scrub");
        assert_eq!(count(scrubber, "frames"), 0, "a hand has no clock");
        assert!(count(scrubber, "frames_done") > 0);
        assert_eq!(run["errors"], Value::Array(Vec::new()));
    }
    let cuts = |run: &Value| -> Vec<usize> {
        let rows = run["per_client"].as_array().expect("per_client").iter();
        rows.filter(|row| row["kind"] == "timeline")
            .map(|row| row["first_frame_ms"].as_array().map_or(0, Vec::len))
            .collect()
    };
    assert_eq!(cuts(&runs[0]), cuts(&runs[1]), "both play the same cuts");
}

#[test]
fn what_is_recorded_and_rendered_meanwhile_is_right_too() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 512 << 20);
    let flags = ["--server", "rushes", "--mix", "grow=1,render=1,op-atom=1"];
    let flags = [&FILES[..], &flags[..]].concat();
    let report = lab::report_of(&edit(&scratch, &disk, &flags), &[]);
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    let run = &report["runs"][0];
    let frames = SECONDS * 25;
    assert_eq!(count(kind(run, "grow"), "frames_done"), frames);
    let recorded = count(kind(run, "grow-recorder"), "bytes_written");
    assert_eq!(recorded, frames * FRAME_BYTES as u64);
    let render = kind(run, "render");
    assert!(count(render, "bytes_written") > 0);
    assert_eq!(
        count(render, "bytes_read"),
        3 * count(render, "bytes_written")
    );
    assert!(count(kind(run, "op-atom"), "bytes_read") > frames * FRAME_BYTES as u64);
}

#[test]
fn one_who_reads_past_the_kernels_cache_gets_the_right_bytes_beside_an_editor() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 512 << 20);
    let flags = ["--server", "rushes", "--mix", "timeline=1,direct=1"];
    let flags = [&FILES[..], &flags[..]].concat();
    let report = lab::report_of(&edit(&scratch, &disk, &flags), &[]);
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    let run = &report["runs"][0];
    assert_eq!(count(kind(run, "timeline"), "frames_done"), SECONDS * 25);
    assert!(count(kind(run, "direct"), "bytes_read") > 0);
}

#[test]
fn a_list_is_played_again_and_each_pass_is_told_apart() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 1 << 30);
    let flags = [
        ["--files", "6"],
        ["--file-bytes", "100M"],
        ["--clients", "3"],
        ["--again", "1"],
        ["--rest", "200ms"],
    ];
    // Timelines of three seconds, more than the small cache holds.
    let memory = [
        "--bitrate",
        "200M",
        "--cache",
        "64MiB",
        "--write-buffer",
        "0",
    ];
    let report = lab::report_of(
        &edit_at(&memory, &scratch, &disk, flags.as_flattened()),
        &[],
    );
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    // A busy machine may leave out frames at the end of a pass.
    let passes = &kind(&report["runs"][0], "timeline")["passes"];
    let passes = passes.as_array().expect("passes");
    let numbers: Vec<u64> = passes.iter().map(|pass| count(pass, "pass")).collect();
    assert_eq!(numbers, [1, 2]);
    for pass in passes {
        assert_eq!(count(pass, "frames"), 3 * SECONDS * 25);
        let done = count(pass, "frames_done");
        assert!(done > SECONDS * 25, "{pass:#}");
        assert_eq!(count(pass, "bytes_read"), done * 10 * FRAME_BYTES as u64);
    }
}

#[test]
fn a_list_of_cuts_that_is_none_is_refused_before_anything_is_set_up() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 64 << 20);
    let list = scratch.path().join("trailer.edl");
    fs::write(
        &list,
        "TITLE: TRAILER\n001 A001 V C 01:00:00:00 01:00:02:25 00:00:00:00 00:00:02:00\n",
    )
    .expect("the list is written");
    let path = list.to_str().expect("a name of text");
    let output = edit(&scratch, &disk, &["--edl", path]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in ["trailer.edl", "line 2", "`01:00:02:25`", "--fps"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn the_clips_of_a_list_are_real_files_and_one_that_is_missing_is_named() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 128 << 20);
    let media = scratch.folder("media");
    let file = |name: &str, first: u8| {
        let bytes: Vec<u8> = (0..60 * FRAME_BYTES)
            .map(|at| first.wrapping_add((at / 7) as u8))
            .collect();
        fs::write(media.join(name), bytes).expect("a clip is written");
    };
    file("a001c003.mxf", 1);
    let list = scratch.path().join("trailer.edl");
    let text = "TITLE: TRAILER\n\
        001 R1 V C 01:00:00:00 01:00:01:00 00:00:00:00 00:00:01:00\n\
        * FROM CLIP NAME: A001C003.MXF\n\
        002 A002 V C 02:00:10:00 02:00:11:00 00:00:01:00 00:00:02:00\n\
        003 A002 V C 02:00:11:00 02:00:12:00 00:00:02:00 00:00:03:00\n";
    fs::write(&list, text).expect("the list is written");
    let names = [&list, &media].map(|path| path.to_str().expect("a name of text"));
    let flags = ["--clients", "2", "--edl", names[0], "--media", names[1]];

    let output = edit(&scratch, &disk, &flags);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in ["trailer.edl", "line 4", "`A002`", "leave --media out"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }

    file("A002.mov", 99);
    let report = lab::report_of(&edit(&scratch, &disk, &flags), &[]);
    assert_eq!(count(&report, "bytes_wrong"), 0, "{report:#}");
    assert_eq!(count(&report, "files"), 2);
    let editors = kind(&report["runs"][0], "timeline");
    let frames = 2 * SECONDS * 25;
    assert_eq!(count(editors, "frames_done"), frames);
    assert_eq!(count(editors, "bytes_read"), frames * FRAME_BYTES as u64);
}
