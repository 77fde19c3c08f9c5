// SPDX-License-Identifier: Apache-2.0
//! Maintenance of a mounted pool: members are added, drained and removed beside programs that read,
//! write, rename and remove files; the command is interrupted, the mount is killed, and every byte
//! is where it belongs.

use rushes_tests::fsx;
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, XFS, check, put};
use rushes_tests::random::Random;
use rushes_tests::smb2;
use rushes_tests::smbd::{self, SmbdSpec};
use rustix::fs::XattrFlags;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// fsck mends the remains of a kill, and puts none of them into lost+found.
fn mended(world: &PoolWorld, context: &str) {
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{context}: {report}");
    let lost = world.catalogue().join("tree/lost+found");
    assert!(!lost.exists(), "{context}: {report}");
    world.assert_sound(context);
}

fn member_status(world: &PoolWorld, number: usize) -> Value {
    let (status, _) = world.json(&["status"], &[]);
    let members = status[0]["members"].as_array().expect("a list");
    let found = members.iter().find(|one| one["number"] == number);
    found.expect("it is a member").clone()
}

fn work(world: &PoolWorld) -> Value {
    world.json(&["status"], &[]).0[0]["work"].clone()
}

fn emptied(world: &PoolWorld, number: usize) -> Value {
    let (report, code) = world.json(&["drain", &number.to_string()], &[]);
    assert_eq!(
        (&report["is_empty"], code),
        (&json!(true), Some(0)),
        "{report}"
    );
    assert_eq!(member_status(world, number)["object_count"], 0, "{report}");
    report
}

fn fill_again(world: &PoolWorld, number: usize) {
    let (report, code) = world.json(&["drain", &number.to_string(), "--cancel"], &[]);
    assert_eq!(code, Some(0), "{report}");
}

fn spawned(world: &PoolWorld, words: &[&str]) -> Child {
    world
        .command(words, &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("rushes starts")
}

/// Starts a command, and waits until `status` shows it.
fn begun(world: &PoolWorld, words: &[&str]) -> Child {
    let mut child = spawned(world, words);
    let end = Instant::now() + Duration::from_secs(60);
    while work(world)["kind"] != words[0] {
        let ended = child.try_wait().expect("it is ours");
        assert!(
            ended.is_none(),
            "{words:?} was too fast to be seen: {ended:?}"
        );
        assert!(Instant::now() < end, "{words:?} does not begin");
    }
    child
}

#[test]
fn a_member_that_is_added_to_a_mounted_pool_gets_new_files_at_once() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 48)]) else {
        return;
    };
    put(&world.path("old"), 1, 8 * MIB).expect("there is room");
    let new = world.disk("new", (EXT4, 400));
    let (report, code) = world.json(&["add"], std::slice::from_ref(&new));
    assert_eq!(
        (code, &report["numbers"]),
        (Some(0), &json!([1])),
        "{report}"
    );
    put(&world.path("new"), 2, MIB).expect("there is room");
    assert_eq!(world.members_of("new"), [1], "it has most room");
    // A second `add` of the same folder answers with its member's number, and adds nothing.
    let (again, code) = world.json(&["add"], std::slice::from_ref(&new));
    assert_eq!((code, &again["numbers"]), (Some(0), &json!([1])), "{again}");
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        world.members_of("old"),
        [1],
        "the first was fuller: {report}"
    );
    // The mount refuses as the command does that changes an unmounted pool itself.
    let catalogue = world.catalogue();
    let output = world
        .command(&["add"], &[catalogue])
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    world.end();
    world.assert_sound("after the end");
    world.start();
    check(&world.path("old"), 1, 8 * MIB);
    check(&world.path("new"), 2, MIB);
    // Both members have the log of names a second later.
    let end = Instant::now() + Duration::from_secs(60);
    while world.json(&["status"], &[]).0[0]["log_members"] != json!([0, 1]) {
        assert!(Instant::now() < end, "the new member gets no names");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_member_is_emptied_and_removed_beside_those_who_use_its_files() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 140), (EXT4, 100), (XFS, 300)]) else {
        return;
    };
    let sizes: Vec<usize> = (0..10).map(|at| at * MIB + 4096 * at + 17).collect();
    for (seed, &length) in sizes.iter().enumerate() {
        put(&world.path(format!("f{seed}")), seed as u64, length).expect("there is room");
    }
    fs::hard_link(world.path("f3"), world.path("also")).expect("linked");
    let hole = File::create(world.path("hole")).expect("made");
    hole.write_all_at(b"end", 50 << 20).expect("written");
    let file = File::create(world.path("take")).expect("made");
    // A file that is read and written after it has lost its name.
    let nameless = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(world.path("nameless"))
        .expect("made");
    let secret = pattern::bytes(77, 0, 6 * MIB);
    nameless.write_all_at(&secret, 0).expect("written");
    fs::remove_file(world.path("nameless")).expect("removed");
    let times: Vec<_> = (0..10)
        .map(|at| fs::metadata(world.path(format!("f{at}"))).expect("there"))
        .map(|found| (found.mtime(), found.mtime_nsec()))
        .collect();
    for member in [0, 1, 2] {
        let is_done = AtomicBool::new(false);
        let written = std::thread::scope(|scope| {
            let (world, is_done, sizes) = (&world, &is_done, &sizes);
            let reader = scope.spawn(move || {
                while !is_done.load(Ordering::Acquire) {
                    for seed in [2, 5, 9] {
                        check(&world.path(format!("f{seed}")), seed, sizes[seed as usize]);
                    }
                    rushes_tests::caches::drop("3");
                }
            });
            let file = &file;
            let writer = scope.spawn(move || {
                let start = file.metadata().expect("known").len();
                let mut at = start;
                while !is_done.load(Ordering::Acquire) && at < start + (16 << 20) {
                    file.write_all_at(&pattern::bytes(99, at, 100_000), at)
                        .expect("room");
                    at += 100_000;
                }
                at
            });
            emptied(world, member);
            is_done.store(true, Ordering::Release);
            reader.join().expect("nothing was wrong");
            writer.join().expect("nothing was wrong")
        });
        check(&world.path("take"), 99, written as usize);
        for (seed, &length) in sizes.iter().enumerate() {
            let name = format!("f{seed}");
            assert!(
                !world.members_of(&name).contains(&(member as u64)),
                "{name}"
            );
            check(&world.path(&name), seed as u64, length);
        }
        let mut found = vec![0; secret.len()];
        nameless.read_exact_at(&mut found, 0).expect("read");
        assert!(found == secret, "the file without a name, {member}");
        // A file that grows continues on another member at once.
        file.write_all_at(b"more", written).expect("there is room");
        file.set_len(written).expect("cut");
        assert!(!world.members_of("take").contains(&(member as u64)));
        if member != 2 {
            fill_again(&world, member);
        }
    }
    for (seed, before) in times.iter().enumerate() {
        let found = fs::metadata(world.path(format!("f{seed}"))).expect("there");
        assert_eq!((found.mtime(), found.mtime_nsec()), *before, "f{seed}");
    }
    // The third member is still empty and takes no bytes: `remove` succeeds.
    let (report, code) = world.json(&["remove", "2"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let left = fs::read_dir(world.member(2).join("pool")).expect("it is there");
    assert_eq!(left.count(), 0);
    let output = world
        .command(&["remove", "1"], &[])
        .output()
        .expect("starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("rushes pool drain"), "{said}");
    put(&world.path("later"), 12, MIB).expect("it takes bytes as before");
    check(&world.path("also"), 3, sizes[3]);
    let found = fs::read(world.path("hole")).expect("read");
    assert!(found.len() == (50 << 20) + 3 && found.ends_with(b"\0end"));
    drop((nameless, file, hole));
    world.end();
    world.assert_sound("after the end");
    world.start();
    for (seed, &length) in sizes.iter().enumerate() {
        check(&world.path(format!("f{seed}")), seed as u64, length);
    }
}

#[test]
fn a_command_that_is_interrupted_stops_the_mount_and_the_next_one_goes_on() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 240), (EXT4, 260)]) else {
        return;
    };
    for seed in 0..3 {
        put(&world.path(format!("f{seed}")), seed, 60 * MIB).expect("there is room");
    }
    let most = (0..2)
        .max_by_key(|number| member_status(&world, *number)["object_count"].as_u64())
        .expect("two");
    let number = most.to_string();
    let mut drain = begun(&world, &["drain", &number]);
    // The mount does one such command at a time.
    let output = world.command(&["rebalance"], &[]).output().expect("starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains(&format!("`rushes pool drain` of member {number}")),
        "{said}"
    );
    let text = world.command(&["status"], &[]).output().expect("starts");
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains(&format!("drain of member {number} for ")),
        "{text}"
    );
    let pid = rustix::process::Pid::from_child(&drain);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is ours");
    drain.wait().expect("it is ours");
    let end = Instant::now() + Duration::from_secs(60);
    while work(&world) != Value::Null {
        assert!(Instant::now() < end, "the mount goes on: {}", work(&world));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(member_status(&world, most)["duty"], "draining");
    for seed in 0..3 {
        check(&world.path(format!("f{seed}")), seed, 60 * MIB);
    }
    emptied(&world, most);
    for seed in 0..3 {
        check(&world.path(format!("f{seed}")), seed, 60 * MIB);
    }
    // An unmount stops a drain, too.
    fill_again(&world, most);
    let other = (1 - most).to_string();
    let mut drain = begun(&world, &["drain", &other]);
    world.end();
    let code = drain.wait().expect("it is ours").code();
    assert!(
        matches!(code, Some(0 | 2)),
        "done just before, or refused: {code:?}"
    );
    world.assert_sound("unmounted in the middle");
    world.start();
    emptied(&world, 1 - most);
    for seed in 0..3 {
        check(&world.path(format!("f{seed}")), seed, 60 * MIB);
    }
}

#[test]
fn members_that_are_full_are_said_and_a_new_one_lets_it_go_on() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 24)]) else {
        return;
    };
    put(&world.path("f"), 1, 30 * MIB).expect("there is room");
    let (report, code) = world.json(&["drain", "0"], &[]);
    assert_eq!(
        (code, &report["is_empty"]),
        (Some(1), &json!(false)),
        "{report}"
    );
    check(&world.path("f"), 1, 30 * MIB);
    let new = world.disk("new", (EXT4, 60));
    let (report, code) = world.json(&["add"], &[new]);
    assert_eq!(code, Some(0), "{report}");
    emptied(&world, 0);
    check(&world.path("f"), 1, 30 * MIB);
}

#[test]
fn a_striped_file_goes_off_a_member_while_it_is_open() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 120), (EXT4, 120), (EXT4, 120)]) else {
        return;
    };
    fs::create_dir(world.path("reels")).expect("made");
    let words = b"striped=2 unit=64KiB";
    let none = XattrFlags::empty();
    rustix::fs::setxattr(world.path("reels"), "user.rushes.policy", words, none).expect("a wish");
    let length = 9 * MIB + 17;
    put(&world.path("reels/a"), 4, length).expect("there is room");
    let file = File::open(world.path("reels/a")).expect("opened");
    let before = world.members_of("reels/a");
    assert_eq!(before.len(), 2);
    emptied(&world, before[0] as usize);
    let after = world.members_of("reels/a");
    assert!(
        after.len() == 2 && !after.contains(&before[0]),
        "{before:?} {after:?}"
    );
    rushes_tests::caches::drop("3");
    let mut found = vec![0; length];
    file.read_exact_at(&mut found, 0).expect("read");
    pattern::check(4, 0, &found, "reels/a");
    drop(file);
    world.end();
    world.assert_sound("after the end");
}

#[test]
fn a_mount_that_is_killed_while_it_moves_files_loses_nothing_and_the_drain_goes_on() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200), (EXT4, 200), (XFS, 300)]) else {
        return;
    };
    /// `files`: whole ones. `busy`: names of the call under way when the mount died.
    #[derive(Default)]
    struct Model {
        files: BTreeMap<String, (u64, usize)>,
        busy: Vec<String>,
    }
    let model = Arc::new(Mutex::new(Model::default()));
    for seed in 0..3 {
        let name = format!("big{seed}");
        put(&world.path(&name), seed, 40 * MIB).expect("there is room");
    }
    let mut random = Random(0x51ab);
    let mut interrupted_count = 0;
    // Kill at some moment of a drain. Its length depends on the machine: after a drain that ended
    // first, kill sooner.
    let mut longest_ms = 340;
    for round in 0..30 {
        if round >= 6 && interrupted_count > 2 {
            break;
        }
        let (folder, shared) = (world.path(""), Arc::clone(&model));
        let mut theirs = Random(round);
        let worker = std::thread::spawn(move || {
            let lock = || shared.lock().expect("nobody panics with it");
            loop {
                let (name, other) = (theirs.below(8), theirs.below(8));
                let (name, other) = (format!("f{name}"), format!("f{other}"));
                let (what, length) = (theirs.below(8), theirs.below(5 << 20) as usize);
                let seed = theirs.below(1 << 40);
                lock().busy = vec![name.clone(), other.clone()];
                let path = folder.join(&name);
                // Never truncate: an interrupted truncation leaves a name in lost+found, with a
                // drain or without.
                let made = |length| {
                    let _ = fs::remove_file(&path);
                    put(&path, seed, length)
                };
                let done = match what {
                    0..=4 => made(length).map(|()| {
                        lock().files.insert(name.clone(), (seed, length));
                    }),
                    5 => fs::rename(&path, folder.join(&other)).map(|()| {
                        let mut model = lock();
                        if let Some(file) = model.files.remove(&name) {
                            model.files.insert(other.clone(), file);
                        }
                    }),
                    _ => fs::remove_file(&path).map(|()| {
                        lock().files.remove(&name);
                    }),
                };
                match done.map_err(|error| error.raw_os_error()) {
                    Ok(()) | Err(Some(2)) => lock().busy.clear(),
                    // The mount was killed.
                    Err(_) => return,
                }
            }
        });
        let member = world.members_of("big0")[0] as usize;
        let mut drain = spawned(&world, &["drain", &member.to_string()]);
        std::thread::sleep(Duration::from_millis(random.below(longest_ms)));
        world.kill();
        worker.join().expect("it ends with the mount");
        if drain.wait().expect("it is ours").success() {
            longest_ms = (longest_ms / 2).max(20);
        } else {
            interrupted_count += 1;
        }
        let context = format!("round {round}");
        mended(&world, &context);
        world.start();
        let mut model = model.lock().expect("nobody panics with it");
        for name in std::mem::take(&mut model.busy) {
            model.files.remove(&name);
            let _ = fs::remove_file(world.path(&name));
        }
        emptied(&world, member);
        for (name, &(seed, length)) in &model.files {
            check(&world.path(name), seed, length);
        }
        for seed in 0..3 {
            check(&world.path(format!("big{seed}")), seed, 40 * MIB);
        }
        fill_again(&world, member);
    }
    assert!(
        interrupted_count > 2,
        "only {interrupted_count} drains were killed"
    );
    world.end();
    world.assert_sound("at last");
}

#[test]
fn random_operations_by_smb_beside_drains_are_what_a_model_says() {
    if !needs::all_there(&[Need::Program("smbd"), Need::Program("pdbedit")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200), (XFS, 300), (EXT4, 200)]) else {
        return;
    };
    let daemon = world.served(3, "");
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.path(""), everybody).expect("our own mount");
    let share = smb2::SHARE_LINES.into_iter();
    let share = share.chain(["allocation roundup size = 0"]);
    let spec = SmbdSpec {
        path: world.path(""),
        share: share.map(String::from).collect(),
        global: vec![String::from(smb2::GLOBAL)],
    };
    let smbd = smbd::start(&world.scratch, &spec);
    let plan = fsx::Plan::new(29, 2400);
    let is_done = AtomicBool::new(false);
    let drains = std::thread::scope(|scope| {
        let (world, is_done) = (&world, &is_done);
        let draining = scope.spawn(move || {
            let mut moved = 0;
            for round in 0.. {
                if is_done.load(Ordering::Acquire) {
                    break;
                }
                let report = emptied(world, round % 3);
                moved += report["moved_count"].as_u64().expect("a number");
                fill_again(world, round % 3);
            }
            moved
        });
        let report = fsx::run(smbd.port(), &world.path(""), &plan);
        is_done.store(true, Ordering::Release);
        let moved = draining.join().expect("each drain ends well");
        (report, moved)
    });
    let report = drains.0.unwrap_or_else(|divergence| panic!("{divergence}"));
    assert_eq!(report.operations, 2400);
    assert!(drains.1 > 0, "no file was moved");
    drop(smbd);
    world.end();
    // fsck waits until the daemon has written its bytes.
    world.assert_sound("after the end");
    drop(daemon);
}

#[test]
fn a_file_that_is_played_under_contract_moves_and_the_player_gets_every_byte() {
    const FRAME_BYTES: usize = 500_000;
    const FRAME_COUNT: usize = 150;
    let Some(mut world) = PoolWorld::build(&[(EXT4, 300), (EXT4, 300)]) else {
        return;
    };
    let length = FRAME_BYTES * FRAME_COUNT;
    put(&world.path("clip.mov"), 9, length).expect("there is room");
    // A rule: on a busy machine no player keeps a cadence.
    let rule = "[[rule]]\nmatch = \"**\"\nbitrate = \"100M\"\n";
    let daemon = world.served(2, rule);
    rushes_tests::caches::drop("3");
    let home = world.members_of("clip.mov")[0];
    let file = File::open(world.path("clip.mov")).expect("opened");
    let is_promised = || {
        let status = daemon.status();
        let streams = status["streams"].as_array().expect("a list").clone();
        streams
            .iter()
            .any(|stream| stream["standing"] == "contract")
    };
    let mut drain = None;
    let mut was_promised = false;
    let begin = Instant::now();
    let mut frame = vec![0; FRAME_BYTES];
    for number in 0..FRAME_COUNT {
        let at = (number * FRAME_BYTES) as u64;
        file.read_exact_at(&mut frame, at).expect("read");
        pattern::check(9, at, &frame, "clip.mov");
        was_promised = was_promised || is_promised();
        if was_promised && drain.is_none() {
            drain = Some(begun(&world, &["drain", &home.to_string()]));
        }
        let due = Duration::from_millis(40) * (number as u32 + 1);
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
    }
    assert!(was_promised, "{:#}", daemon.status());
    let mut drain = drain.expect("it was begun");
    assert_eq!(drain.wait().expect("it is ours").code(), Some(0));
    assert_eq!(world.members_of("clip.mov"), [1 - home]);
    rushes_tests::caches::drop("3");
    check(&world.path("clip.mov"), 9, length);
    // The mount reads a new member through the daemon if it is a share, and otherwise by itself.
    let new = world.disk("new", (EXT4, 400));
    let (report, code) = world.json(&["add"], &[new]);
    assert_eq!(code, Some(0), "{report}");
    put(&world.path("more.mov"), 10, 8 * MIB).expect("there is room");
    assert_eq!(world.members_of("more.mov"), [2]);
    rushes_tests::caches::drop("3");
    check(&world.path("more.mov"), 10, 8 * MIB);
    drop(file);
    world.end();
    world.assert_sound("after the end");
    drop(daemon);
}

#[test]
fn who_is_not_root_cannot_ask_the_mount() {
    let Some(world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    let socket = world.catalogue().join("door.sock");
    let found = fs::metadata(&socket).expect("it is there");
    assert_eq!((found.mode() & 0o777, found.uid()), (0o600, 0));
    // The mount survives a request that it does not know.
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("root may");
    stream.write_all(b"{\"ask\":\"dance\"}\n").expect("heard");
    let mut line = String::new();
    let read = std::io::BufRead::read_line(&mut std::io::BufReader::new(stream), &mut line);
    read.expect("answered");
    assert!(line.contains("refused") && line.contains("dance"), "{line}");
    put(&world.path("f"), 1, MIB).expect("there is room");
    let user = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(needs::path_of("rushes"))
        .args(["pool", "drain"])
        .arg(world.catalogue())
        .arg("0")
        .output()
        .expect("setpriv starts");
    assert!(!user.status.success(), "{user:?}");
    assert_eq!(member_status(&world, 0)["duty"], "full");
}
