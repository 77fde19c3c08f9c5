// SPDX-License-Identifier: Apache-2.0
//! A member whose disk stalls: a program that needs it waits, and no other program does.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, put};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const FILE_BYTES: usize = 4 * MIB;
/// Files on the disk that stalls. Each is read at four places at once: more requests than the mount
/// has threads.
const FILE_COUNT: usize = 48;
/// Small files there that no program has open before it stalls.
const CLOSED_COUNT: usize = 140;
const QUICK_SEED: u64 = 99;
const QUICK_BYTES: usize = 32 * MIB;
/// A program that does not use the stalled disk waits for less than this.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Which members are shares of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    None,
    Quick,
    Both,
}

fn daemon(world: &PoolWorld, served: Served) -> Option<Daemon> {
    let quick = world.member(0).join("pool");
    let slow = world.slow_disk().path().join("pool");
    let more = match served {
        Served::None => return None,
        Served::Quick => String::new(),
        Served::Both => format!("[[share]]\nname = \"slow\"\npath = {slow:?}\n"),
    };
    let spec = DaemonSpec {
        share: quick,
        cache: String::from("64MiB"),
        write_buffer: None,
        server: String::new(),
        more,
    };
    let daemon = Daemon::start(&world.scratch, &spec);
    let count = if served == Served::Both { 2 } else { 1 };
    daemon.wait_for("the mount's sessions", |status| {
        let sessions = status["sessions"].as_array();
        sessions.is_some_and(|all| all.len() == count)
    });
    Some(daemon)
}

fn stalled(number: usize) -> String {
    format!("stalled{number}.bin")
}

/// Reads a file of another member piece by piece, and does `beside` after each.
///
/// Returns  the longest time that one of these rounds took
fn slowest_round(file: &File, mut beside: impl FnMut(usize)) -> Duration {
    let mut slowest = Duration::ZERO;
    for round in 0..QUICK_BYTES / MIB {
        let begun = Instant::now();
        let at = (round * MIB) as u64;
        let mut bytes = vec![0; MIB];
        file.read_exact_at(&mut bytes, at).expect("read");
        pattern::check(QUICK_SEED, at, &bytes, "a file elsewhere");
        beside(round);
        slowest = slowest.max(begun.elapsed());
        if slowest > AT_ONCE {
            break;
        }
    }
    slowest
}

fn others_go_on(served: Served) {
    if !needs::all_there(&[Need::Program("rushes-lab")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    let quick = world.path("quick.bin");
    put(&quick, QUICK_SEED, QUICK_BYTES).expect("there is room");
    world.add_slow_disk(1 << 30);
    for number in 0..FILE_COUNT {
        put(&world.path(stalled(number)), number as u64, FILE_BYTES).expect("there is room");
        assert_eq!(world.members_of(&stalled(number)), [1], "the emptier one");
    }
    for number in 0..CLOSED_COUNT {
        fs::write(world.path(format!("closed{number}")), number.to_string()).expect("room");
    }
    let daemon = daemon(&world, served);
    // Beside a writer all reads go through the door.
    let open = |path: PathBuf| {
        File::options()
            .read(true)
            .write(true)
            .open(path)
            .expect("there")
    };
    let files: Vec<File> = (0..FILE_COUNT)
        .map(|number| open(world.path(stalled(number))))
        .collect();
    let quick_file = open(quick);
    world.slow_disk().make_cold();
    // Make inodes cold, too.
    rushes_tests::caches::drop("3");
    let answered = AtomicUsize::new(0);
    world.slow_disk().tell("timing on");
    world.slow_disk().tell("stall 60000");
    std::thread::scope(|scope| {
        for (number, file) in files.iter().enumerate() {
            for part in 0..4 {
                let answered = &answered;
                scope.spawn(move || {
                    let mut bytes = vec![0; 256 << 10];
                    let at = (part * MIB) as u64;
                    file.read_exact_at(&mut bytes, at).expect("read at last");
                    pattern::check(number as u64, at, &bytes, "a file that stalled");
                    answered.fetch_add(1, Ordering::Relaxed);
                });
            }
        }
        for number in 0..CLOSED_COUNT {
            let path = world.path(format!("closed{number}"));
            scope.spawn(move || {
                let text = fs::read_to_string(path).expect("opened and read at last");
                assert_eq!(text, number.to_string());
            });
        }
        // Until all of them wait.
        std::thread::sleep(Duration::from_millis(500));
        let slowest = slowest_round(&quick_file, |round| {
            assert!(fs::metadata(world.path(format!("none{round}"))).is_err());
            fs::metadata(world.path(stalled(round))).expect("known");
        });
        let waiting = 4 * FILE_COUNT - answered.load(Ordering::Relaxed);
        world.slow_disk().tell("clear");
        world.slow_disk().tell("timing off");
        assert!(
            slowest < AT_ONCE,
            "{served:?}: {slowest:?} for a read elsewhere"
        );
        assert!(
            waiting > 2 * FILE_COUNT,
            "{served:?}: only {waiting} waited"
        );
    });
    drop((files, quick_file, daemon));
    world.end();
}

#[test]
fn reads_of_a_stalled_member_keep_nobody_from_another_one() {
    for served in [Served::None, Served::Quick, Served::Both] {
        others_go_on(served);
    }
}

#[test]
fn who_waits_for_a_file_on_its_way_to_a_stalled_member_keeps_nobody_from_others() {
    if !needs::all_there(&[Need::Program("rushes-lab")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200)]) else {
        return;
    };
    put(&world.path("moved.bin"), 1, FILE_BYTES).expect("there is room");
    put(&world.path("other.bin"), QUICK_SEED, QUICK_BYTES).expect("there is room");
    world.add_slow_disk(1 << 30);
    // The mount moves an open file last.
    let other = File::options()
        .read(true)
        .write(true)
        .open(world.path("other.bin"))
        .expect("there");
    rushes_tests::caches::drop("1");
    world.slow_disk().tell("timing on");
    world.slow_disk().tell("stall 60000");
    let mut drain = world.command(&["drain", "0"], &[]);
    let mut drain = drain
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("rushes starts");
    std::thread::sleep(Duration::from_secs(1));
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..150 {
            let (path, answered) = (world.path("moved.bin"), &answered);
            scope.spawn(move || {
                let file = File::open(path).expect("opened at last");
                let mut bytes = vec![0; 5000];
                file.read_exact_at(&mut bytes, 777_777)
                    .expect("read at last");
                pattern::check(1, 777_777, &bytes, "moved.bin");
                answered.fetch_add(1, Ordering::Relaxed);
            });
        }
        std::thread::sleep(Duration::from_millis(500));
        let slowest = slowest_round(&other, |_| {
            fs::metadata(world.path("moved.bin")).expect("known");
        });
        let count = answered.load(Ordering::Relaxed);
        world.slow_disk().tell("clear");
        world.slow_disk().tell("timing off");
        assert!(slowest < AT_ONCE, "{slowest:?} for a read of another file");
        assert_eq!(count, 0, "it is on its way");
    });
    drop(other);
    assert_eq!(drain.wait().expect("ours").code(), Some(0));
    assert_eq!(world.members_of("moved.bin"), [1]);
    world.end();
}
