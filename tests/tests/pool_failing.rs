// SPDX-License-Identifier: Apache-2.0
//! A member whose device fails, or whose file system's quota is used up: the other members take new
//! files, and no sync succeeds for bytes that are not durable.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::disk::run;
use rushes_tests::needs::{self, Need};
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, PoolWorld, check, put};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const DISK_BYTES: u64 = 1 << 30;
const FILE_BYTES: usize = 4 * MIB;
const EIO: i32 = 5;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;
/// A program gets the error of a fault within this time.
const QUICKLY: Duration = Duration::from_secs(3);
/// A member that works again takes new files within this time.
const COMES_BACK_BY: Duration = Duration::from_secs(60);

/// The requests that the device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Writing,
    Reading,
    Both,
}

/// Whether the file system has a journal; with one it becomes read-only when a write to the journal
/// fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Journal {
    Kept,
    None,
}

fn break_disk(world: &PoolWorld, broken: Broken) {
    if broken != Broken::Reading {
        let words = format!("fail write 0 {DISK_BYTES}");
        world.slow_disk().tell(&words);
    }
    if broken != Broken::Writing {
        let words = format!("fail read 0 {DISK_BYTES}");
        world.slow_disk().tell(&words);
    }
}

/// The device below a mounted folder.
fn device_of(folder: &Path) -> String {
    let text = fs::read_to_string("/proc/mounts").expect("it is mounted");
    let folder = folder.display().to_string();
    let mut lines = text.lines().map(|line| line.split(' '));
    let found = lines.find_map(|mut words| {
        let device = words.next()?;
        (words.next()? == folder).then(|| device.to_owned())
    });
    found.expect("it is mounted")
}

/// Unmounts the disk that can fail, calls `meanwhile` with its device, and mounts it again.
fn remount(world: &PoolWorld, meanwhile: impl FnOnce(&str)) {
    let folder = world.slow_disk().path();
    let device = device_of(folder);
    // The pool's mount may be writing its log of names there at this moment.
    let end = Instant::now() + Duration::from_secs(10);
    let unmounted = || {
        let done = Command::new("umount").arg(folder).status();
        done.is_ok_and(|status| status.success())
    };
    while !unmounted() {
        assert!(Instant::now() < end, "{} stays busy", folder.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    meanwhile(&device);
    run(Command::new("mount").arg(&device).arg(folder));
}

/// A pool of a sound member, number 0, and one whose disk may be broken, number 1, which has more
/// room.
fn world_with(journal: Journal) -> Option<PoolWorld> {
    if !needs::all_there(&[Need::Program("rushes-lab"), Need::Program("tune2fs")]) {
        return None;
    }
    let mut world = PoolWorld::build(&[(EXT4, 300)])?;
    put(&world.path("elsewhere.bin"), 1, FILE_BYTES).expect("there is room");
    world.add_slow_disk(DISK_BYTES);
    if journal == Journal::None {
        remount(&world, |device| {
            run(Command::new(needs::path_of("tune2fs"))
                .args(["-O", "^has_journal"])
                .arg(device));
        });
    }
    put(&world.path("before.bin"), 2, FILE_BYTES).expect("there is room");
    assert_eq!(world.members_of("before.bin"), [1], "the emptier one");
    Some(world)
}

/// A daemon that has both members as shares, with a write buffer.
fn serve(world: &PoolWorld) -> Daemon {
    let path = world.slow_disk().path().join("pool");
    let spec = DaemonSpec {
        share: world.member(0).join("pool"),
        cache: String::from("64MiB"),
        write_buffer: Some("64MiB"),
        server: String::new(),
        more: format!("[[share]]\nname = \"broken\"\npath = {path:?}\n"),
    };
    let daemon = Daemon::start(&world.scratch, &spec);
    daemon.wait_for("a session for each member", |status| {
        let sessions = status["sessions"].as_array();
        sessions.is_some_and(|all| all.len() == 2)
    });
    daemon
}

/// The state of member 1 by `rushes pool status`.
fn state_of_broken(world: &PoolWorld) -> String {
    let (report, _) = world.json(&["status"], &[]);
    let state = report[0]["members"][1]["state"].as_str();
    state.expect("text").to_owned()
}

/// The broken member's file is listed with its length; the other member's file has its bytes.
fn others_are_untouched(world: &PoolWorld) {
    let names = fs::read_dir(world.path("")).expect("listed");
    let names: Vec<String> = names
        .flat_map(|entry| entry.expect("listed").file_name().into_string())
        .collect();
    assert!(names.contains(&String::from("before.bin")), "{names:?}");
    let begun = Instant::now();
    let found = fs::metadata(world.path("before.bin")).expect("its names are the catalogue's");
    assert_eq!(found.len(), FILE_BYTES as u64);
    assert!(begun.elapsed() < QUICKLY);
    check(&world.path("elsewhere.bin"), 1, FILE_BYTES);
}

fn new_files_go_elsewhere(broken: Broken, with_daemon: bool) {
    let Some(mut world) = world_with(Journal::None) else {
        return;
    };
    let about = format!("{broken:?}, daemon: {with_daemon}");
    let mut daemon = with_daemon.then(|| serve(&world));
    world.slow_disk().make_cold();
    if broken != Broken::Writing {
        rushes_tests::caches::drop("3");
    }
    break_disk(&world, broken);
    // The mount does not know of the fault yet: a program whose new file goes there gets the error
    // at its sync.
    let mut failed = Vec::new();
    for number in 0..20 {
        let begun = Instant::now();
        let name = format!("new{number}.bin");
        if let Err(error) = put(&world.path(&name), number, MIB) {
            assert_eq!(error.raw_os_error(), Some(EIO), "{about}: {error}");
            failed.push(number);
        } else {
            assert_eq!(world.members_of(&name), [0], "{about}, {name}");
            check(&world.path(&name), number, MIB);
        }
        assert!(begun.elapsed() < QUICKLY, "{about}: {:?}", begun.elapsed());
    }
    assert!(failed.is_empty() || failed == [0], "{about}: {failed:?}");
    others_are_untouched(&world);
    if broken != Broken::Writing {
        let begun = Instant::now();
        let read = fs::read(world.path("before.bin"));
        let error = read.expect_err("its disk does not give it");
        assert_eq!(error.raw_os_error(), Some(EIO), "{about}: {error}");
        assert!(begun.elapsed() < QUICKLY, "{about}: {:?}", begun.elapsed());
    }
    let said = || {
        let log = world.log();
        let lines = log.lines().filter(|line| line.contains("member 1 ("));
        lines.filter(|line| line.contains(") fails: ")).count()
    };
    until("it is said", QUICKLY, || said() > 0);
    until("status says so", QUICKLY, || {
        state_of_broken(&world) == "failing"
    });

    world.slow_disk().tell("clear");
    until(&about, COMES_BACK_BY, || {
        state_of_broken(&world) == "present"
    });
    assert_eq!(said(), 1, "{about}: once: {}", world.log());
    check(&world.path("before.bin"), 2, FILE_BYTES);
    put(&world.path("after.bin"), 3, FILE_BYTES).expect("it works again");
    assert_eq!(world.members_of("after.bin"), [1], "{about}");
    check(&world.path("after.bin"), 3, FILE_BYTES);
    if let Some(daemon) = &mut daemon {
        assert!(daemon.is_alive());
    }
    drop(daemon);
    world.end();
}

#[test]
fn new_files_go_elsewhere_while_a_disk_fails_to_write() {
    new_files_go_elsewhere(Broken::Writing, false);
}

#[test]
fn new_files_go_elsewhere_while_a_disk_fails_to_read() {
    new_files_go_elsewhere(Broken::Reading, false);
}

#[test]
fn new_files_go_elsewhere_while_a_disk_fails_at_all() {
    new_files_go_elsewhere(Broken::Both, false);
}

#[test]
fn new_files_go_elsewhere_while_a_disk_fails_beside_a_daemon() {
    for broken in [Broken::Writing, Broken::Reading, Broken::Both] {
        new_files_go_elsewhere(broken, true);
    }
}

#[test]
fn what_its_disk_did_not_take_is_told_to_be_durable_to_nobody() {
    for with_daemon in [false, true] {
        let Some(mut world) = world_with(Journal::None) else {
            return;
        };
        let daemon = with_daemon.then(|| serve(&world));
        let path = world.path("take.bin");
        let mut file = File::create(&path).expect("made");
        file.write_all(&pattern::bytes(7, 0, MIB)).expect("written");
        file.sync_all().expect("all is well");
        assert_eq!(world.members_of("take.bin"), [1]);
        let other = File::options().write(true).open(&path).expect("there");
        break_disk(&world, Broken::Writing);
        file.write_all(&pattern::bytes(7, MIB as u64, MIB))
            .expect("it is in memory");
        let error = file.sync_all().expect_err("it is not on its disk");
        assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
        if !with_daemon {
            // The kernel returns the error of discarded bytes to each open file, also when the disk
            // works again.
            world.slow_disk().tell("clear");
        }
        let error = other.sync_data().expect_err("nor for another one");
        assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
        world.slow_disk().tell("clear");
        let begun = Instant::now();
        // Later syncs return no error. A daemon has kept the bytes and writes them.
        while other.sync_all().is_err() {
            assert!(begun.elapsed() < COMES_BACK_BY, "it works again");
            std::thread::sleep(Duration::from_millis(200));
        }
        let late = File::options().write(true).open(&path).expect("there");
        late.sync_all().expect("this writer has lost nothing");
        drop((file, other, late));
        if with_daemon {
            rushes_tests::caches::drop("1");
            check(&path, 7, 2 * MIB);
        }
        drop(daemon);
        world.end();
    }
}

#[test]
fn a_member_whose_journal_is_broken_off_is_left_alone_until_it_is_mounted_again() {
    let Some(mut world) = world_with(Journal::Kept) else {
        return;
    };
    break_disk(&world, Broken::Writing);
    let mut failed = Vec::new();
    for number in 0..20 {
        if let Err(error) = put(&world.path(format!("new{number}.bin")), number, MIB) {
            let code = error.raw_os_error();
            assert!(matches!(code, Some(EIO | EROFS)), "{error}");
            failed.push(number);
        }
    }
    assert!(failed.is_empty() || failed == [0], "{failed:?}");
    others_are_untouched(&world);
    world.slow_disk().tell("clear");
    remount(&world, |_| {});
    until("it is back", COMES_BACK_BY, || {
        state_of_broken(&world) == "present"
    });
    check(&world.path("before.bin"), 2, FILE_BYTES);
    put(&world.path("after.bin"), 3, FILE_BYTES).expect("it works again");
    assert_eq!(world.members_of("after.bin"), [1]);
    world.end();
}

/// Sets a quota of `bytes` on a member's file system.
fn limit(world: &PoolWorld, member: usize, bytes: &str) {
    let btrfs = |words: &[&str]| {
        run(Command::new(needs::path_of("btrfs"))
            .args(words)
            .arg(world.member(member)));
    };
    btrfs(&["quota", "enable"]);
    btrfs(&["quota", "rescan", "-w"]);
    btrfs(&["qgroup", "limit", bytes]);
}

#[test]
fn a_file_goes_on_elsewhere_when_the_quota_of_its_member_is_used_up() {
    for with_daemon in [false, true] {
        let Some(mut world) = PoolWorld::build(&[(BTRFS, 400), (EXT4, 200)]) else {
            return;
        };
        let daemon = with_daemon.then(|| world.served(2, ""));
        limit(&world, 0, "64M");
        put(&world.path("take.mov"), 1, 150 * MIB).expect("the other one has room");
        assert_eq!(world.members_of("take.mov"), [0, 1]);
        // Overwrite its beginning, which btrfs writes to new places.
        let mut file = File::options()
            .write(true)
            .open(world.path("take.mov"))
            .expect("there");
        file.write_all(&pattern::bytes(2, 0, 8 * MIB))
            .and_then(|()| file.sync_all())
            .expect("what does not fit any more moves");
        drop(file);
        let mut found = File::open(world.path("take.mov")).expect("there");
        for at in (0..150 * MIB).step_by(MIB) {
            let mut bytes = vec![0; MIB];
            found.read_exact(&mut bytes).expect("read");
            let seed = if at < 8 * MIB { 2 } else { 1 };
            pattern::check(seed, at as u64, &bytes, "take.mov");
        }
        drop((found, daemon));
        world.end();
    }
}

#[test]
fn who_has_used_up_the_quotas_of_all_members_hears_of_a_quota() {
    let Some(mut world) = PoolWorld::build(&[(BTRFS, 200), (BTRFS, 200)]) else {
        return;
    };
    limit(&world, 0, "48M");
    limit(&world, 1, "48M");
    let mut file = File::create(world.path("take.mov")).expect("made");
    let mut length = 0;
    let error = loop {
        match file.write(&pattern::bytes(1, length, MIB)) {
            Ok(count) => length += count as u64,
            Err(error) => break error,
        }
        assert!(length < 400 << 20, "there is no quota");
    };
    assert_eq!(error.raw_os_error(), Some(EDQUOT), "{error}");
    assert!(length > 64 << 20, "both were asked: {length}");
    assert_eq!(world.members_of("take.mov"), [0, 1]);
    drop(file);
    check(&world.path("take.mov"), 1, length as usize);
    world.end();
}
