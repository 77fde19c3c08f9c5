// SPDX-License-Identifier: Apache-2.0
//! A mount that is told to end, and told again: first it waits for its users, then for none, and
//! acknowledged bytes stay.

use rushes_tests::mapper::Mapper;
use rushes_tests::needs::{self, Need};
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// A mount that is told twice is gone within this time.
const SOON: Duration = Duration::from_secs(12);
const HURRIED: i32 = 1;

/// Tells the mount to end once: it is unmounted, and programs keep using open files.
fn told_once(world: &mut PoolWorld, open: &File) {
    world.tell_to_end();
    let end = Instant::now() + SOON;
    while world.path("used.bin").exists() {
        assert!(Instant::now() < end, "it is not unmounted");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert!(world.is_there(), "{}", world.log());
    let mut bytes = vec![0; 4096];
    open.read_exact_at(&mut bytes, MIB as u64)
        .expect("it is open");
    pattern::check(1, MIB as u64, &bytes, "used.bin");
}

/// Tells it again: it ends at once.
fn told_again(world: &mut PoolWorld) {
    let begun = Instant::now();
    world.tell_to_end();
    let status = world.wait();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(status.code(), Some(HURRIED), "{}", world.log());
}

#[test]
fn a_mount_that_is_told_twice_to_end_waits_for_nobody_and_loses_nothing() {
    for is_kept in [false, true] {
        let build = if is_kept {
            PoolWorld::kept
        } else {
            PoolWorld::build
        };
        let Some(mut world) = build(&[(EXT4, 64), (EXT4, 64)]) else {
            return;
        };
        for is_served in [false, true] {
            let daemon = is_served.then(|| world.served(2, ""));
            put(&world.path("used.bin"), 1, 3 * MIB).expect("there is room");
            let used = File::open(world.path("used.bin")).expect("there");
            let late = File::options()
                .create(true)
                .read(true)
                .write(true)
                .truncate(true)
                .open(world.path("late.bin"))
                .expect("made");
            told_once(&mut world, &used);
            // Acknowledged, without a sync.
            for at in (0..5 * MIB).step_by(MIB) {
                late.write_all_at(&pattern::bytes(2, at as u64, MIB), at as u64)
                    .expect("it is open");
            }
            told_again(&mut world);
            let said = world.log();
            assert!(said.contains("2 open files"), "{said}");
            assert!(said.contains("late.bin"), "{said}");
            assert!(late.write_all_at(b"x", 0).is_err(), "it is over");
            drop((used, late));
            world.start();
            check(&world.path("used.bin"), 1, 3 * MIB);
            check(&world.path("late.bin"), 2, 5 * MIB);
            drop(daemon);
        }
        // Told once, without users.
        world.end();
    }
}

#[test]
fn what_was_stored_through_a_mapping_is_written_before_nobody_is_waited_for() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 32)]) else {
        return;
    };
    put(&world.path("used.bin"), 1, 3 * MIB).expect("there is room");
    let mut mapper = Mapper::new(&world.path("used.bin"), "w");
    mapper.stores(5000, b"stored");
    world.tell_to_end();
    std::thread::sleep(Duration::from_millis(300));
    told_again(&mut world);
    drop(mapper);
    world.start();
    let found = fs::read(world.path("used.bin")).expect("read");
    assert_eq!(&found[5000..5006], b"stored");
}

#[test]
fn a_mount_that_is_told_twice_does_not_wait_for_a_disk_that_hangs() {
    if !needs::all_there(&[Need::Program("rushes-lab")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 32)]) else {
        return;
    };
    world.add_slow_disk(1 << 30);
    put(&world.path("used.bin"), 1, 3 * MIB).expect("there is room");
    put(&world.path("removed.bin"), 1, 3 * MIB).expect("there is room");
    let used = File::options()
        .read(true)
        .write(true)
        .open(world.path("used.bin"))
        .expect("there");
    world.slow_disk().make_cold();
    rushes_tests::caches::drop("3");
    world.slow_disk().tell("timing on");
    world.slow_disk().tell("stall 60000");
    fs::remove_file(world.path("removed.bin")).expect("removed");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let error = used.read_exact_at(&mut [0; 4096], MIB as u64);
            error.err()
        });
        std::thread::sleep(Duration::from_millis(700));
        let begun = Instant::now();
        world.tell_to_end();
        std::thread::sleep(Duration::from_millis(500));
        world.tell_to_end();
        let error = reader.join().expect("no panic");
        assert!(error.is_some(), "its disk hangs");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    });
    world.slow_disk().tell("clear");
    world.slow_disk().tell("timing off");
    assert_eq!(world.wait().code(), Some(HURRIED), "{}", world.log());
    drop(used);
    world.start();
    check(&world.path("used.bin"), 1, 3 * MIB);
    world.end();
}

#[test]
fn a_mount_that_is_told_to_end_leaves_alone_what_others_have_mounted_there() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 32)]) else {
        return;
    };
    put(&world.path("used.bin"), 1, 3 * MIB).expect("there is room");
    let used = File::open(world.path("used.bin")).expect("there");
    told_once(&mut world, &used);
    let folder = world.path("");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "tmpfs"])
        .arg(&folder)
        .status();
    assert!(mounted.expect("mount starts").success());
    fs::write(folder.join("mine"), "x").expect("a tmpfs");
    told_again(&mut world);
    assert!(folder.join("mine").exists(), "it is somebody else's");
    let unmounted = Command::new("umount").arg(&folder).status();
    assert!(unmounted.expect("umount starts").success());
}

#[test]
fn a_mount_that_is_told_to_end_before_it_is_there_ends_when_it_is() {
    if !needs::all_there(&[Need::Program("strace")]) {
        return;
    }
    for keeper in [&[][..], &["--keeper"]] {
        let Some(mut world) = PoolWorld::build(&[(EXT4, 32)]) else {
            return;
        };
        world.end();
        let mut mount = Command::new(needs::path_of("strace"))
            .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=mount"])
            .args(["-e", "inject=mount:delay_enter=2000000"])
            .arg(needs::path_of("rushes"))
            .args(["pool", "mount"])
            .args(keeper)
            .arg(world.catalogue())
            .arg(world.path(""))
            .arg("--runtime-dir")
            .arg(world.scratch.path().join("run"))
            .spawn()
            .expect("strace starts");
        std::thread::sleep(Duration::from_secs(1));
        let children = format!("/proc/{0}/task/{0}/children", mount.id());
        let children = fs::read_to_string(children).expect("it lives");
        let told = Command::new("kill")
            .args(children.split_whitespace())
            .status();
        assert!(told.expect("kill starts").success());
        let end = Instant::now() + SOON;
        let status = loop {
            if let Some(status) = mount.try_wait().expect("ours") {
                break status;
            }
            assert!(Instant::now() < end, "it is mounted, and stays");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(status.code(), Some(0));
    }
}

/// A container, or a service with a private `/`, that started while the pool was mounted.
struct Namespace(std::process::Child);

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_mount_that_another_namespace_keeps_says_which_process_keeps_it() {
    for is_kept in [false, true] {
        let build = if is_kept {
            PoolWorld::kept
        } else {
            PoolWorld::build
        };
        let Some(mut world) = build(&[(EXT4, 64)]) else {
            return;
        };
        put(&world.path("f"), 1, MIB).expect("there is room");
        let child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sleep", "120"])
            .spawn()
            .expect("util-linux is there");
        let namespace = Namespace(child);
        let table = format!("/proc/{}/mountinfo", namespace.0.id());
        let mnt = world.path("").display().to_string();
        let mnt = mnt.trim_end_matches('/');
        let is_private = || {
            let name = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
            name(&namespace.0.id().to_string()) != name("self")
                && fs::read_to_string(&table).is_ok_and(|text| text.contains(mnt))
        };
        until("it has mounts of its own", 5 * SOON, is_private);
        world.tell_to_end();
        let says = format!("process {}", namespace.0.id());
        until("the log names it", 5 * SOON, || {
            let log = world.log();
            log.contains("another mount namespace still has it mounted") && log.contains(&says)
        });
        let output = world.command(&["fsck"], &[]).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("another mount namespace"), "{said}");
        assert!(said.contains(&says), "{said}");
        drop(namespace);
        let status = world.wait();
        assert_eq!(status.code(), Some(0), "{}", world.log());
        let (report, code) = world.json(&["fsck"], &[]);
        assert_eq!(code, Some(0), "{report}");
    }
}
