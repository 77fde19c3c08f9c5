// SPDX-License-Identifier: Apache-2.0
//! The messages of a pool's commands, and the files that they leave alone when they refuse: an
//! operator reads them at the rack at midnight.

use rushes_tests::disk::run;
use rushes_tests::needs;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(world: &PoolWorld, words: &[&str]) -> String {
    let output = world.command(words, &[]).output().expect("rushes starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(world: &PoolWorld, words: &[&str], sentence: &str) {
    let output = world.command(words, &[]).output().expect("rushes starts");
    assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
    assert!(said(&output).contains(sentence), "{words:?}: {output:?}");
}

fn duty(world: &PoolWorld, number: usize) -> Value {
    world.json(&["ls"], &[]).0[0]["members"][number]["duty"].clone()
}

#[test]
fn a_drain_that_cannot_be_begun_changes_nothing() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    put(&world.path("f"), 1, 2 * MIB).expect("there is room");
    let format = || fs::read(world.catalogue().join("rushes-pool")).expect("it is there");
    let before = format();
    world.unplug(1);
    for _ in ["mounted", "not mounted"] {
        refused(&world, &["drain", "1"], "member 1 is missing");
        refused(&world, &["drain", "7"], "no member 7; expected one of 0, 1");
        assert_eq!(duty(&world, 1), "full");
        let now = fs::read(world.catalogue().join("rushes-pool")).expect("it is there");
        assert!(now == before, "the format file is another one");
        world.end();
    }
    // A member that goes away during its drain may be told to take bytes again, wherever it is.
    world.plug(1, "loop");
    world.start();
    let output = world.command(&["drain", "1"], &[]).output();
    assert!(output.expect("rushes starts").status.success());
    assert_eq!(duty(&world, 1), "draining");
    let shown = text(&world, &["ls"]);
    assert!(shown.contains("draining, takes nothing new"), "{shown}");
    world.unplug(1);
    let output = world.command(&["drain", "1", "--cancel"], &[]).output();
    assert!(output.expect("rushes starts").status.success());
    assert_eq!(duty(&world, 1), "full");
    assert!(!text(&world, &["ls"]).contains("takes nothing new"));
}

#[test]
fn a_member_beside_the_catalogue_leaves_room_for_names_and_its_log_says_why() {
    let Some(world) = PoolWorld::build(&[(EXT4, 20)]) else {
        return;
    };
    let disk = world.scratch.path().join("catalogue");
    let folder = disk.join("member");
    fs::create_dir(&folder).expect("our own disk");
    let output = world.command(&["add"], &[folder]).output().expect("starts");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(
        shown.contains("Warning: the catalogue ") && shown.contains("file system of member 1"),
        "{output:?}"
    );
    assert!(text(&world, &["ls"]).contains("Warning: the catalogue "));
    // One file that grows over both, then many small ones.
    let free = || {
        let found = rustix::fs::statvfs(&disk).expect("it is mounted");
        found.f_bavail * found.f_frsize
    };
    let error = put(&world.path("large"), 1, 200 * MIB).expect_err("there is no such room");
    assert_eq!(error.raw_os_error(), Some(28), "{error}");
    assert!(free() > 4 << 20, "{} bytes are left", free());
    for at in 0..100 {
        fs::write(world.path(format!("name{at}")), "").expect("there is room for names");
    }
    assert!(fs::write(world.path("more"), vec![1; MIB]).is_err());
    let log = world.log();
    assert!(
        log.contains("the rest of member 1") && log.contains("stays free for the catalogue"),
        "{log}"
    );
    assert!(!log.contains("extended attributes"), "{log}");
    // Another program may take all the same the room that the pool leaves free.
    let mut filler = File::create(disk.join("filler")).expect("our own disk");
    while filler.write_all(&vec![1; MIB]).is_ok() || filler.write_all(&[1; 4096]).is_ok() {}
    let long = "n".repeat(200);
    let refused = (0..3000).find_map(|at| File::create(world.path(format!("{long}{at}"))).err());
    let refused = refused.expect("no block is left for names");
    assert_eq!(refused.raw_os_error(), Some(28), "{refused}");
    let log = world.log();
    assert!(
        log.contains(" is full, whatever room members have"),
        "{log}"
    );
}

#[test]
fn a_rebalance_says_why_it_goes_no_further_and_whom_it_left_out() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    // The large file would fill any other member as much.
    put(&world.path("large"), 1, 30 * MIB).expect("there is room");
    let home = world.members_of("large")[0];
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        (&report["is_even"], &report["too_large_count"]),
        (&json!(false), &json!(1)),
        "{report}"
    );
    assert_eq!(report["fuller"][0]["member"], home, "{report}");
    assert_eq!(report["left_out"], json!([]), "{report}");
    let shown = text(&world, &["rebalance"]);
    let words = format!("member {home} (");
    assert!(
        shown.contains(&words) && shown.contains("1 too large"),
        "{shown}"
    );

    let other = (home + 1) % 3;
    let words = ["drain", &other.to_string()];
    let drained = world.command(&words, &[]).output().expect("rushes starts");
    assert!(drained.status.success(), "{drained:?}");
    fs::remove_file(world.path("large")).expect("removed");
    let end = Instant::now() + Duration::from_secs(30);
    // The mount gives its room back some time later.
    let report = loop {
        let report = world.json(&["rebalance"], &[]).0;
        if report["is_even"] == true {
            break report;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let out = json!([{"member": other, "duty": "draining", "state": "present"}]);
    assert_eq!(report["left_out"], out, "{report}");
    let shown = text(&world, &["rebalance"]);
    let words = format!("member {other} (draining)");
    assert!(
        shown.contains("No member is fuller") && shown.contains(&words),
        "{shown}"
    );
}

#[test]
fn who_cancels_right_behind_an_interrupted_drain_is_not_told_to_wait() {
    let Some(world) = PoolWorld::build(&[(EXT4, 200), (EXT4, 220)]) else {
        return;
    };
    for seed in 0..2 {
        put(&world.path(format!("f{seed}")), seed, 60 * MIB).expect("there is room");
    }
    let number = world.members_of("f0")[0].to_string();
    let mut drain = world
        .command(&["drain", &number], &[])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("rushes starts");
    let end = Instant::now() + Duration::from_secs(60);
    while world.json(&["status"], &[]).0[0]["work"]["moved_bytes"].as_u64() < Some(1) {
        assert!(Instant::now() < end, "it does not begin");
    }
    let pid = rustix::process::Pid::from_child(&drain);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is ours");
    let mut words = String::new();
    let mut stderr = drain.stderr.take().expect("it is piped");
    stderr.read_to_string(&mut words).expect("read");
    let status = drain.wait().expect("it is ours");
    // The drain ended before the signal, or says how to continue.
    if status.code() != Some(0) {
        assert_eq!(status.code(), None, "as the signal ends everybody: {words}");
        assert!(words.contains("continues and joins them"), "{words}");
    }
    let (report, code) = world.json(&["drain", &number, "--cancel"], &[]);
    assert_eq!(
        (code, &report["is_draining"]),
        (Some(0), &json!(false)),
        "{report}"
    );
    for seed in 0..2 {
        check(&world.path(format!("f{seed}")), seed, 60 * MIB);
    }
}

#[test]
fn a_mount_says_one_line_and_leaves_alone_what_is_on_its_folder_afterwards() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40)]) else {
        return;
    };
    world.end();
    assert!(!world.log().contains("nmount failed"), "{}", world.log());
    // A path with a comma and a space: as an option of mount it would be several ones.
    let strange = world.scratch.folder("a, folder");
    let mut mount = Command::new(needs::path_of("rushes"))
        .args(["pool", "mount", "--json", "--runtime-dir"])
        .arg(world.scratch.path().join("run"))
        .arg(world.catalogue())
        .arg(&strange)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("rushes starts");
    let mut lines = BufReader::new(mount.stdout.take().expect("it is piped"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("it says something");
    let event: Value =
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert_eq!(event["folder"], strange.display().to_string());
    put(&strange.join("f"), 1, MIB).expect("there is room");
    let shown = text(&world, &["ls"]);
    assert!(shown.contains("present"), "{shown}");
    // The mount ends with its last open file; by then another file system is on its folder.
    let open = File::open(strange.join("f")).expect("opened");
    run(Command::new("umount").arg("--lazy").arg(&strange));
    run(Command::new("mount")
        .args(["-t", "tmpfs", "tmpfs"])
        .arg(&strange));
    fs::write(strange.join("theirs"), "theirs").expect("written");
    let mut byte = [0; 1];
    open.read_exact_at(&mut byte, 0).expect("it is open still");
    drop(open);
    let status = mount.wait().expect("it is ours");
    let mut rest = String::new();
    lines.read_to_string(&mut rest).expect("read");
    let mut log = String::new();
    let stderr = mount.stderr.as_mut().expect("it is piped");
    stderr.read_to_string(&mut log).expect("read");
    assert!(status.success(), "{status}: {log}");
    assert_eq!(rest, "", "one line, and no more");
    assert!(!log.contains("nmount failed"), "{log}");
    let theirs = fs::read_to_string(strange.join("theirs"));
    assert_eq!(theirs.expect("it is mounted"), "theirs");
}

/// Waits until `is_so`. Returns  the mount's part of `status`
fn mount_once(world: &PoolWorld, mut is_so: impl FnMut(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let (report, _) = world.json(&["status"], &[]);
        let mount = report[0]["mount"].clone();
        if is_so(&mount) {
            return mount;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn status_says_whether_a_mount_has_a_keeper_and_what_the_kernel_reads_itself() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    let text = |world: &PoolWorld| {
        let output = world.command(&["status"], &[]).output();
        String::from_utf8_lossy(&output.expect("it starts").stdout).into_owned()
    };
    put(&world.path("f"), 1, 100_000).expect("room");
    let mount = mount_once(&world, |mount| mount["passed_open_count"] == 0);
    assert_eq!(
        (&mount["has_keeper"], &mount["can_pass"]),
        (&json!(false), &json!(true))
    );
    // The kernel tells the mount of a writer's close a moment after it.
    let mut open = Vec::new();
    let mount = mount_once(&world, |mount| {
        open.push(File::open(world.path("f")).expect("there"));
        mount["passed_open_count"].as_u64() > Some(0)
    });
    let count = mount["passed_open_count"].as_u64().expect("a number");
    assert!(count <= open.len() as u64, "{mount}");
    let said = text(&world);
    assert!(said.contains("in use without a keeper, "), "{said}");
    assert!(said.contains(" opens read by passthrough"), "{said}");
    drop(open);
    mount_once(&world, |mount| mount["passed_open_count"] == 0);
    world.end();
    assert_eq!(mount_once(&world, |_| true), Value::Null);
    drop(world);
    let Some(world) = PoolWorld::kept(&[(EXT4, 64)]) else {
        return;
    };
    let expected = json!({"has_keeper": true, "can_pass": false, "passed_open_count": 0});
    assert_eq!(mount_once(&world, |_| true), expected);
    let said = text(&world);
    assert!(said.contains("in use with a keeper, "), "{said}");
}

#[test]
fn the_log_says_once_that_a_member_is_away_or_read_only_and_that_it_is_back() {
    let Some(world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    let number = world.members_of("f")[0] as usize;
    let said = |words: &str| {
        let words = format!(
            "member {number} ({}) {words}",
            world.member(number).join("pool").display()
        );
        world.log().matches(&words).count()
    };
    let until = |words: &str, count: usize| {
        let end = Instant::now() + Duration::from_secs(60);
        while said(words) < count {
            assert!(Instant::now() < end, "nobody says {words}: {}", world.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(said(words), count, "{}", world.log());
    };
    for turn in 1..=2 {
        world.unplug(number);
        until("is missing", turn);
        for _ in 0..20 {
            File::open(world.path("f"))
                .and_then(|file| file.read_at(&mut [0; 16], 0))
                .expect_err("its disk is away");
        }
        world.plug(number, "loop,ro");
        until("is mounted read-only", turn);
        world.unplug(number);
        world.plug(number, "loop");
        until("is there again", turn);
        check(&world.path("f"), 1, MIB);
    }
    // The mount may have seen it away between the two plugs, and no more often.
    assert!((2..=4).contains(&said("is missing")), "{}", world.log());
    assert!(!world.log().contains("file 1"), "{}", world.log());
}

#[test]
fn a_name_with_a_newline_makes_no_second_line() {
    let Some(world) = PoolWorld::build(&[(EXT4, 40)]) else {
        return;
    };
    let name = "two\nlines";
    put(&world.path(name), 1, MIB).expect("there is room");
    let output = Command::new(needs::path_of("rushes"))
        .args(["pool", "where"])
        .arg(world.path(name))
        .output()
        .expect("rushes starts");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("two\\nlines: "), "{shown}");
}
