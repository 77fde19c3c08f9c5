// SPDX-License-Identifier: Apache-2.0
//! A pool with `--tidy always` tidies itself beside its users: files are moved, every byte is
//! right, and so is the report of the lab that measures lateness. Lateness itself is measured
//! elsewhere: machines that test are busy.

use rushes_tests::needs::{self, Need, all_there};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use rushes_tests::scratch::Scratch;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

#[test]
fn a_pool_that_is_never_idle_is_tidied_all_the_same() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    let (count, length) = (4, 20 * MIB + 17);
    for seed in 0..count {
        put(&world.path(format!("s{seed}")), seed, length).expect("room");
    }
    let new = world.disk("new", (EXT4, 200));
    let (report, code) = world.json(&["add"], &[new]);
    assert_eq!(code, Some(0), "{report}");
    world.end();
    world.mount_options = vec!["--tidy-after", "1"];
    world.start();
    let (is_done, read_count) = (AtomicBool::new(false), AtomicU64::new(0));
    let end = Instant::now() + Duration::from_secs(120);
    let status = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for seed in (0..count).cycle() {
                // The reader ends also if the tidying never does.
                if is_done.load(Ordering::Acquire) || Instant::now() > end {
                    return;
                }
                let bytes = fs::read(world.path(format!("s{seed}"))).expect("read");
                pattern::check(seed, 0, &bytes, "a file");
                read_count.fetch_add(1, Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (report, code) = world.json(&["policy", "--tidy", "always"], &[]);
        assert_eq!((&report["tidy"], code), (&json!("always"), Some(0)));
        let status = loop {
            let (report, _) = world.json(&["status"], &[]);
            if report[0]["tidy"]["last"]["is_whole"] == true {
                break report[0].clone();
            }
            assert!(Instant::now() < end, "never: {report} {}", world.log());
            std::thread::sleep(Duration::from_millis(50));
        };
        is_done.store(true, Ordering::Release);
        reader.join().expect("every byte is right");
        status
    });
    let moved = &status["tidy"]["last"]["rebalance"]["moved_count"];
    assert!(moved.as_u64() > Some(0), "{status}");
    assert!(read_count.load(Ordering::Acquire) > 4, "nobody was there");
    world.end();
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!((&report["findings"], code), (&json!([]), Some(0)));
    world.start();
    for seed in 0..count {
        check(&world.path(format!("s{seed}")), seed, length);
    }
}

#[test]
fn the_lab_tidies_a_pool_beside_players_and_recorders_and_compares_all_of_it() {
    let wanted = [
        Need::Root,
        Need::Program("rushes"),
        Need::Program("rushes-lab"),
        Need::Program("mkfs.ext4"),
        Need::Program("smbd"),
        Need::Program("pdbedit"),
    ];
    if !all_there(&wanted) {
        return;
    }
    let scratch = Scratch::new();
    for (way, disks) in [("rebalance", 2), ("defrag", 1), ("grow", 6)] {
        let output = Command::new(needs::path_of("rushes"))
            .args([
                "lab",
                "mixed",
                "--json",
                "--bitrate",
                "8M",
                "--seconds",
                "5",
            ])
            .args(["--readers", "1", "--writers", "1", "--layout", "pool"])
            .args(["--disk", "memory", "--disks", &disks.to_string()])
            .args(["--cache", "64MiB", "--write-buffer", "64MiB"])
            .args(["--tidy", way, "--tidy-files", "8", "--tidy-bytes", "8MiB"])
            .env("TMPDIR", scratch.path())
            .current_dir(scratch.path())
            .output()
            .expect("rushes starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{way}: {said}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        let tidied = &report["tidying"];
        assert_eq!(tidied["untidy"], way);
        assert!(tidied["moved_bytes"].as_u64() > Some(0), "{way}: {tidied}");
        assert_eq!(tidied["tidied_bytes_wrong"], 0, "{way}: {tidied}");
        assert_eq!(report["bytes_wrong"], 0, "{way}");
        assert_eq!(report["recording"]["bytes_wrong"], 0, "{way}");
    }
}
