// SPDX-License-Identifier: Apache-2.0
//! A file that was read by passthrough, after its last close: wherever that matters, the mount asks
//! the kernel whether a program has it mapped, and treats it as any other file once none has.

use rushes_tests::daemon::Daemon;
use rushes_tests::mapper::{Mapper, hex};
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, Made, PoolWorld, check, put};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

fn built(members: &[Made]) -> Option<PoolWorld> {
    if !needs::all_there(&[Need::Program("python3")]) {
        return None;
    }
    PoolWorld::build(members)
}

/// Reads that the daemon has answered.
fn answered(daemon: &Daemon) -> u64 {
    let status = daemon.status();
    let of = |name: &str| status["cache"][name].as_u64().expect("a count");
    of("hit_count") + of("miss_count")
}

/// Whether a reader that opens it now reads through the daemon.
fn is_asked(world: &PoolWorld, daemon: &Daemon, name: &str, seed: u64, length: usize) -> bool {
    let before = answered(daemon);
    rushes_tests::caches::drop("1");
    check(&world.path(name), seed, length);
    answered(daemon) > before
}

/// Waits until it is so: the kernel tells the mount of a close a moment after it.
fn until(sentence: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not so by now: {sentence}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads all files by passthrough, and closes them.
fn pass(world: &PoolWorld) {
    for entry in fs::read_dir(world.path("")).expect("listed") {
        let path = entry.expect("one").path();
        until("the kernel reads it itself", || {
            let before = world.read_by_mount();
            let length = fs::read(&path).expect("read").len() as u64;
            world.read_by_mount() - before < length
        });
    }
}

/// Takes a lease of a file, says so, and keeps it for half a second: as a daemon that gives blocks
/// back, or a mount that asks whether a program has the file open.
const LEASED: &str = r#"
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
time.sleep(0.5)
"#;

#[test]
fn whoever_opens_a_file_of_whose_object_somebody_has_a_lease_waits_and_is_refused_nothing() {
    let Some(mut world) = built(&[(EXT4, 64)]) else {
        return;
    };
    put(&world.path("a"), 7, MIB).expect("there is room");
    let placed = world.where_is("a");
    let object = world.object_of(&placed["segments"][0]);
    world.end();
    world.start();
    let mut leased = std::process::Command::new(needs::path_of("python3"))
        .args(["-c", LEASED])
        .arg(&object)
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 starts");
    let mut line = String::new();
    let output = leased.stdout.take().expect("it is piped");
    BufReader::new(output).read_line(&mut line).expect("read");
    assert_eq!(line, "leased\n", "of {}", object.display());
    let begun = Instant::now();
    let file = File::options().read(true).write(true).open(world.path("a"));
    file.and_then(|file| file.write_all_at(&[1; 16], 0))
        .expect("nobody refuses it");
    assert!(
        begun.elapsed() > Duration::from_millis(200),
        "it did not wait"
    );
    assert!(leased.wait().expect("it ends").success());
    world.end_and_assert_sound();
}

#[test]
fn a_daemon_that_comes_has_what_was_passed_and_what_is_mapped_when_it_is_not_any_more() {
    let Some(mut world) = built(&[(EXT4, 64)]) else {
        return;
    };
    for (seed, name) in ["closed", "mapped", "written"].into_iter().enumerate() {
        put(&world.path(name), seed as u64, 2 * MIB).expect("there is room");
    }
    pass(&world);
    let mapper = Mapper::new(&world.path("mapped"), "r");
    let reader = File::open(world.path("written")).expect("there");
    let mut daemon = world.served(1, "");
    until("what was passed is not any more", || {
        is_asked(&world, &daemon, "closed", 0, 2 * MIB)
    });
    assert!(!is_asked(&world, &daemon, "mapped", 1, 2 * MIB));
    drop(mapper);
    until("nobody has it mapped any more", || {
        is_asked(&world, &daemon, "mapped", 1, 2 * MIB)
    });
    // The mount tells the daemon of writes beside a reader, but the daemon does not keep its
    // object.
    let file = File::options().write(true).open(world.path("written"));
    let file = file.expect("there");
    file.write_all_at(&pattern::bytes(2, 5000, 9000), 5000)
        .expect("room");
    assert!(!is_asked(&world, &daemon, "written", 2, 2 * MIB));
    drop((file, reader));
    until("nobody has it open any more", || {
        is_asked(&world, &daemon, "written", 2, 2 * MIB)
    });
    // Writes from now on go through the daemon as well: when it dies, the mount's log says that
    // their bytes are not written yet.
    fs::write(world.path("closed"), "anew").expect("room");
    daemon.kill();
    until("it is missed", || {
        world
            .log()
            .contains("acknowledged bytes are not written yet")
    });
    daemon.start_again();
    assert_eq!(fs::read(world.path("closed")).expect("read"), b"anew");
    daemon.end();
    world.end_and_assert_sound();
}

#[test]
fn a_mapped_file_is_not_moved_though_the_kernel_is_told_to_forget_it() {
    let Some(mut world) = built(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    let length = 3 * MIB + 5;
    put(&world.path("f"), 1, length).expect("there is room");
    let home = world.members_of("f")[0];
    pass(&world);
    let mut reader = Mapper::new(&world.path("f"), "r");
    let mut mapper = Mapper::new(&world.path("f"), "w");
    for _ in 0..3 {
        rushes_tests::caches::drop("3");
    }
    let mut drain = world.command(&["drain", &home.to_string()], &[]);
    let mut drain = drain.stdout(Stdio::null()).spawn().expect("rushes starts");
    std::thread::sleep(Duration::from_secs(2));
    rushes_tests::caches::drop("3");
    mapper.stores(2 << 20, b"stored meanwhile");
    assert_eq!(reader.sees(2 << 20, 16), hex(b"stored meanwhile"));
    assert_eq!(drain.try_wait().expect("ours"), None, "it waits");
    assert_eq!(world.members_of("f"), [home]);
    drop((mapper, reader));
    assert_eq!(drain.wait().expect("ours").code(), Some(0));
    assert_eq!(world.members_of("f"), [1 - home]);
    let mut expected = pattern::bytes(1, 0, length);
    expected[2 << 20..(2 << 20) + 16].copy_from_slice(b"stored meanwhile");
    assert!(fs::read(world.path("f")).expect("read") == expected);
    world.end_and_assert_sound();
}

fn rebalanced(world: &PoolWorld) -> Value {
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    report
}

#[test]
fn a_rebalance_leaves_what_is_mapped_and_moves_what_only_was() {
    let Some(mut world) = built(&[(EXT4, 100)]) else {
        return;
    };
    let names = ["a", "b", "c", "d"];
    for (seed, name) in names.into_iter().enumerate() {
        put(&world.path(name), seed as u64, 12 * MIB).expect("there is room");
    }
    pass(&world);
    let mappers: Vec<Mapper> = names
        .iter()
        .map(|name| Mapper::new(&world.path(name), "r"))
        .collect();
    let folder = world.disk("new", (EXT4, 100));
    fs::create_dir_all(&folder).expect("our own disk");
    let (report, code) = world.json(&["add"], &[folder]);
    assert_eq!(code, Some(0), "{report}");
    let begun = Instant::now();
    rebalanced(&world);
    assert!(begun.elapsed() < PATIENCE, "it waits for nobody");
    let moved = || {
        let is_elsewhere = |name: &&&str| world.members_of(name) != [0];
        names.iter().filter(is_elsewhere).count()
    };
    assert_eq!(moved(), 0, "all are mapped");
    drop(mappers);
    until("none is mapped any more", || {
        rebalanced(&world);
        moved() > 0
    });
    for (seed, name) in names.into_iter().enumerate() {
        check(&world.path(name), seed as u64, 12 * MIB);
    }
    world.end_and_assert_sound();
}

#[test]
fn a_mapped_file_is_removed_cut_and_written_at_once() {
    let Some(mut world) = built(&[(EXT4, 64)]) else {
        return;
    };
    for (seed, name) in ["removed", "replaced", "new", "cut"]
        .into_iter()
        .enumerate()
    {
        put(&world.path(name), seed as u64, MIB).expect("there is room");
    }
    let objects = world.member(0).join("pool/objects");
    let object_count = || {
        let folders = fs::read_dir(&objects).expect("listed");
        let of = |folder: fs::DirEntry| fs::read_dir(folder.path()).map_or(0, Iterator::count);
        folders.flatten().map(of).sum::<usize>()
    };
    pass(&world);
    let map = |name: &str| Mapper::new(&world.path(name), "r");
    let (mut removed, mut replaced, mut cut) = (map("removed"), map("replaced"), map("cut"));
    let begun = Instant::now();
    fs::remove_file(world.path("removed")).expect("removed");
    fs::rename(world.path("new"), world.path("replaced")).expect("renamed");
    let file = File::options().write(true).open(world.path("cut"));
    let file = file.expect("there");
    file.set_len(500).expect("cut");
    file.set_len(MIB as u64).expect("made longer");
    file.write_all_at(b"written", 4096).expect("room");
    assert!(begun.elapsed() < Duration::from_secs(5), "nobody waits");
    assert_eq!(removed.sees(9000, 64), hex(&pattern::bytes(0, 9000, 64)));
    assert_eq!(replaced.sees(9000, 64), hex(&pattern::bytes(1, 9000, 64)));
    assert_eq!(cut.sees(4096, 8), hex(b"written\0"));
    check(&world.path("replaced"), 2, MIB);
    drop((removed, replaced, cut, file));
    // A file that no program has mapped any more loses its object when it is truncated to nothing.
    File::create(world.path("cut")).expect("cut");
    until("one object is left", || object_count() == 1);
    world.end_and_assert_sound();
}
