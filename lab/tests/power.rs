// SPDX-License-Identifier: Apache-2.0
//! Power cuts on the real kernel's ext4 and XFS, under a daemon and without one: no promised bytes
//! are missing; and the checks detect a disk or a door that lies.
//!
//! `rushes lab power-cuts` does the same with more points. Without root, `/dev/fuse`, the file
//! system's tools or a built `rushes` these tests skip aloud.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rushes_lab::disk::FileSystem;
use rushes_lab::power::check::Rule;
use rushes_lab::power::cut::Lie;
use rushes_lab::power::report::PowerReport;
use rushes_lab::power::{self, Layout, Plan, Server};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rushes-lab");

/// False, with a message, where a run is impossible; under `make test` that is a failure.
fn possible(test: &str, file_system: FileSystem, server: Server) -> bool {
    let missing = match rustix::process::geteuid().is_root() {
        true => power::missing(file_system, Layout::Plain, server),
        false => Some(String::from("it needs root")),
    };
    if let Some(missing) = &missing {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "{test}: {missing}"
        );
        eprintln!("SKIPPED {test}: {missing}");
    }
    missing.is_none()
}

fn plan(file_system: FileSystem, server: Server, seed: u64, points: u64) -> Plan {
    Plan {
        server,
        program: Some(PathBuf::from(PROGRAM)),
        ..Plan::new(file_system, seed, points)
    }
}

fn cut(plan: &Plan) -> PowerReport {
    power::cut_power(plan, &mut |_| ()).expect("the power can be cut")
}

fn nothing_is_missing(test: &str, file_system: FileSystem, server: Server, points: u64) {
    if !possible(test, file_system, server) {
        return;
    }
    let report = cut(&plan(file_system, server, 1, points));
    assert_eq!(report.violation_count, 0, "{}", report.text());
    assert_eq!(report.points, points);
    // Else the run tested nothing.
    let at_stake = report.writes_kept + report.writes_torn + report.writes_lost;
    assert!(
        at_stake > points && report.writes_lost * 10 > points * 3,
        "{}",
        report.text()
    );
    assert!(report.flushes > points, "{}", report.text());
    assert!(report.files_read > 2 * points, "{}", report.text());
    let writes = (report.writes_served, report.writes_plain);
    match server {
        // Writes that the daemon leaves to the lanes do not test the daemon.
        Server::Rushes => assert!(writes.0 > 200 && writes.1 * 10 < writes.0, "{writes:?}"),
        Server::None => assert_eq!(writes, (0, 0)),
    }
    assert_eq!(report.served, server == Server::Rushes);
}

#[test]
fn ext4_keeps_what_was_promised_at_a_hundred_power_cuts() {
    nothing_is_missing("ext4", FileSystem::Ext4, Server::None, 100);
}

#[test]
fn xfs_keeps_what_was_promised_at_a_hundred_power_cuts() {
    nothing_is_missing("xfs", FileSystem::Xfs, Server::None, 100);
}

#[test]
fn daemon_on_ext4_keeps_what_was_promised_at_fifty_power_cuts() {
    nothing_is_missing("daemon on ext4", FileSystem::Ext4, Server::Rushes, 50);
}

#[test]
fn daemon_on_xfs_keeps_what_was_promised_at_fifty_power_cuts() {
    nothing_is_missing("daemon on xfs", FileSystem::Xfs, Server::Rushes, 50);
}

/// The rules that are broken when the disk or the door tells this lie.
fn broken(file_system: FileSystem, server: Server, lie: Lie) -> Vec<Rule> {
    let report = cut(&Plan {
        lie,
        ..plan(file_system, server, 2, 50)
    });
    for violation in &report.violations {
        assert!(
            violation
                .replay
                .contains(&format!("--point {}", violation.point))
        );
        assert!(!violation.finding.expected.is_empty());
    }
    let rules = report.violations.iter().map(|v| v.finding.rule);
    rules.collect()
}

#[test]
fn disk_that_forgets_a_flush_is_found_out() {
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        if possible("lie", file_system, Server::None) {
            for lie in [Lie::Flush, Lie::Flushes] {
                let rules = broken(file_system, Server::None, lie);
                assert!(!rules.is_empty(), "{file_system:?}, {lie:?}");
            }
        }
    }
}

#[test]
fn disk_that_writes_to_the_wrong_place_shows_foreign_bytes() {
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        if possible("misdirect", file_system, Server::None) {
            let rules = broken(file_system, Server::None, Lie::Misdirect);
            assert!(rules.contains(&Rule::Foreign), "{file_system:?}: {rules:?}");
        }
    }
}

/// Bytes are safe only if the door asks the daemon for a sync and the disk below flushes.
#[test]
fn daemon_over_a_disk_that_forgets_flushes_and_a_door_that_forgets_the_daemon_are_found_out() {
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        if possible("daemon that is lied about", file_system, Server::Rushes) {
            for lie in [Lie::Flush, Lie::Door] {
                let rules = broken(file_system, Server::Rushes, lie);
                // Which rule is broken first depends on when the daemon writes: bytes, lengths or
                // names.
                assert!(!rules.is_empty(), "{file_system:?}, {lie:?}");
            }
        }
    }
}

#[test]
fn door_that_forgets_a_daemon_needs_one() {
    let plan = Plan {
        lie: Lie::Door,
        ..plan(FileSystem::Ext4, Server::None, 1, 1)
    };
    let error = power::cut_power(&plan, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("--server rushes"), "{error:#}");
}

/// The file system itself does not flush: a fault of software, like those that these tests are for.
#[test]
fn file_system_without_barriers_is_found_out() {
    if !possible("barrier", FileSystem::Ext4, Server::None) {
        return;
    }
    let report = cut(&Plan {
        mount_options: String::from("barrier=0"),
        ..plan(FileSystem::Ext4, Server::None, 3, 50)
    });
    assert!(report.violation_count > 0, "{}", report.text());
}

#[test]
fn kept_recording_shows_the_same_again() {
    if !possible("replay", FileSystem::Ext4, Server::Rushes) {
        return;
    }
    let folder = format!("rushes-power-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    let first = cut(&Plan {
        lie: Lie::Flushes,
        keep: Some(folder.clone()),
        ..plan(FileSystem::Ext4, Server::Rushes, 4, 25)
    });
    let point = first.violations[0].point;
    let again = cut(&Plan {
        lie: Lie::Flushes,
        from: Some(folder.clone()),
        point: Some(point),
        ..plan(FileSystem::Ext4, Server::Rushes, 4, 1)
    });
    fs::remove_dir_all(&folder).unwrap();
    let of = |report: &PowerReport| {
        let of_point = report.violations.iter().filter(|v| v.point == point);
        of_point
            .map(|v| (v.record, v.finding.path.clone(), v.finding.rule))
            .collect::<Vec<_>>()
    };
    // Not the text of a finding: the kernel's error for a failed mount has names of that run.
    assert_eq!(of(&first), of(&again));
}

/// Mounts, files in memory, disks, processes and loop devices with such a number in their names.
fn traces(pid: u32) -> Vec<String> {
    let number = format!("{pid}-");
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc is there");
    let mut traces: Vec<String> = mounts.lines().map(str::to_owned).collect();
    for folder in ["/dev/shm", "/run/rushes-lab/disks"] {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        traces.extend(entries.map(|entry| entry.path().display().to_string()));
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    traces.extend(
        processes.filter_map(|process| fs::read_to_string(process.path().join("cmdline")).ok()),
    );
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    traces.extend(
        devices
            .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok()),
    );
    let is_named = |trace: &String| {
        trace.contains(&format!("rushes-lab.{number}"))
            || trace.contains(&format!("rushes-disk-{number}"))
            || trace.contains(&format!("/disks/{number}"))
    };
    traces.retain(is_named);
    traces
}

#[test]
fn interrupted_run_leaves_nothing_behind() {
    if !possible("interrupted", FileSystem::Xfs, Server::Rushes) {
        return;
    }
    let mut child = Command::new(PROGRAM)
        .args(["power-cuts", "--fs", "xfs", "--points", "100000", "--json"])
        .args([Path::new("--keep"), &std::env::temp_dir()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let within = |what: &str, done: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let number = child.id();
    within("no cut was ever mounted", &|| {
        traces(number).iter().any(|trace| trace.contains("/cut-"))
    });
    let pid = i32::try_from(number).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(!child.wait().unwrap().success());
    within("traces are left", &|| traces(number).is_empty());
}
