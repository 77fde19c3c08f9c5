// SPDX-License-Identifier: Apache-2.0
//! `rushes lab play` from end to end, small: it plays, reports all fields of the reference and
//! leaves nothing behind. Lateness is measured elsewhere: machines that test are busy.

use rushes_tests::disk::Disk;
use rushes_tests::lab::{self, is_all_there};
use rushes_tests::scratch::Scratch;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

const STREAMS: u64 = 2;
const SECONDS: u64 = 3;
const CACHE_BYTES: u64 = 64 << 20;

fn play(scratch: &Scratch, disk: &Disk, rooms: &Path, flags: &[&str]) -> Value {
    lab::report_of(&played(scratch, disk, rooms, flags), flags)
}

fn played(scratch: &Scratch, disk: &Disk, rooms: &Path, flags: &[&str]) -> Output {
    let [streams, seconds, cache] = [STREAMS, SECONDS, CACHE_BYTES].map(|it| it.to_string());
    let footage = ["play", "--bitrate", "20M", "--streams", &streams];
    let words = ["--seconds", &seconds, "--cache", &cache];
    let words = [&footage[..], &words[..], flags].concat();
    lab::run(scratch, disk, rooms, &words)
}

/// Checks the fields by which runs are compared: present, of their type, and possible.
fn check(report: &Value, flags: &[&str], frames_per_s: u64) {
    let number = |name: &str| {
        report[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{flags:?}: {name} is {}", report[name]))
    };
    let count = |name: &str| {
        report[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{flags:?}: {name} is {}", report[name]))
    };
    assert_eq!(count("streams"), STREAMS);
    assert_eq!(count("frames"), STREAMS * SECONDS * frames_per_s);
    assert!(count("streams_admitted") <= STREAMS);
    assert!(count("late_streams") <= STREAMS);
    assert!(count("late_frames") <= count("frames"));
    assert!(count("late_frames_admitted") <= count("late_frames"));
    assert!(number("worst_lateness_ms").is_finite());
    assert!(number("first_frame_ms_max") > 0.0);
    assert!(number("server_cpu_s") >= 0.0);
    assert_eq!(count("copy_bytes"), 0, "nobody copied");
    assert_eq!(count("bytes_wrong"), 0, "{flags:?}: {report:#}");
    assert_eq!(report["start"], "staggered");
    assert_eq!(count("cache_bytes_max"), CACHE_BYTES);
    assert_eq!(report["errors"], Value::Array(Vec::new()), "{flags:?}");
}

/// Processes, mounts and loop devices that still use this folder, and its entries.
fn left_in(folder: &Path) -> Vec<String> {
    let name = folder.to_string_lossy().into_owned();
    let entries = |of: &str| fs::read_dir(of).into_iter().flatten().flatten();
    let says = |path: &Path| {
        let text = fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&text).replace('\0', " ")
    };
    let processes = entries("/proc").map(|entry| entry.path().join("cmdline"));
    let loops = entries("/sys/block").map(|entry| entry.path().join("loop/backing_file"));
    let users = processes
        .chain(loops)
        .map(|path| says(&path))
        .filter(|text| text.contains(&name));
    let mounts = says(Path::new("/proc/self/mountinfo"));
    let mounts = mounts.lines().filter(|line| line.contains(&name));
    users
        .chain(mounts.map(str::to_owned))
        .chain(entries(&name).map(|entry| entry.path().display().to_string()))
        .collect()
}

#[test]
fn a_disk_that_is_too_small_is_told_before_it_is_filled() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    // The files of the run fit, but would not leave free the space that `lab` leaves.
    let disk = Disk::ext4(&scratch, 64 << 20);
    let rooms = scratch.folder("rooms");
    let used = || {
        let found = rustix::fs::statvfs(disk.path()).expect("it is mounted");
        found.f_blocks - found.f_bfree
    };
    let before = used();
    let output = played(&scratch, &disk, &rooms, &["--server", "rushes"]);
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    for expect in [
        "the files of this run take 14 MiB, 64 MiB are to stay free",
        "take fewer streams, seconds or copies, or name another folder with --disk",
    ] {
        assert!(said.contains(expect), "{expect}: {said}");
    }
    assert_eq!(used(), before, "it wrote something");
    assert_eq!(left_in(&rooms), Vec::<String>::new());
}

#[test]
fn every_server_and_door_plays_and_says_what_the_reference_promises() {
    if !is_all_there() {
        return;
    }
    let scratch = Scratch::new();
    let disk = Disk::ext4(&scratch, 256 << 20);
    let rooms = scratch.folder("rooms");
    // Copies are left out: each needs two files larger than the cache, hundreds of megabytes.
    let runs: [(&[&str], u64); 4] = [
        (&["--server", "rushes", "--door", "smb"], 25),
        (&["--server", "stock", "--door", "smb"], 25),
        (&["--server", "rushes", "--door", "local"], 25),
        (&["--server", "rushes", "--door", "smb", "--sequence"], 24),
    ];
    for (flags, frames_per_s) in runs {
        let report = play(&scratch, &disk, &rooms, flags);
        check(&report, flags, frames_per_s);
        assert_eq!(report["server"], flags[1]);
        assert_eq!(report["door"], flags[3]);
        assert_eq!(report["sequence"], flags.contains(&"--sequence"));
        assert_eq!(left_in(&rooms), Vec::<String>::new(), "{flags:?}");
    }
}
