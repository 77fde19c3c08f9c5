// SPDX-License-Identifier: Apache-2.0
//! Changes to files beside our door: by the same smbd that serves them, through a share without the
//! module; and by local programs that remove, append and store.

use rushes_tests::hand::Hand;
use rushes_tests::mapper::Mapper;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::smbd::{PASSWORD, SHARE, USER};
use rushes_tests::world::{Setup, World};
use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 3_000_001;
const PATIENCE: Duration = Duration::from_secs(10);

/// A world whose daemon notices changes beside every door.
fn world_with_notice(setup: &Setup) -> Option<World> {
    let mut world = World::build(setup)?;
    if world.daemon().status()["shares"][0]["foreign_changes_noticed"] != true {
        needs::skip("this test needs fanotify (CAP_SYS_ADMIN, and a file system that has it)");
        return None;
    }
    world.put("clip.mov", 1, LENGTH);
    Some(world)
}

fn wait_until(what: &str, mut come: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !come() {
        assert!(Instant::now() < end, "{what} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_write_through_a_share_without_the_module_is_seen_through_the_one_with_it() {
    let setup = Setup {
        plain_share: Some("plain"),
        ..Setup::default()
    };
    let Some(world) = world_with_notice(&setup) else {
        return;
    };
    let mut reader = Hand::connect(HAND, world.smbd.port());
    let held = reader.open("clip.mov");
    pattern::check(1, 0, &reader.read(held, 0, LENGTH), "before");
    let new = world.scratch.folder("new").join("new.mov");
    fs::write(&new, pattern::bytes(2, 0, LENGTH)).expect("scratch is writable");
    // One client, one smbd: it has a session with the daemon through the one share, and writes
    // through the other.
    let commands = format!(
        "get clip.mov /dev/null; tcon plain; put {} clip.mov",
        new.display()
    );
    let out = Command::new("smbclient")
        .arg(format!("//127.0.0.1/{SHARE}"))
        .args(["-p", &world.smbd.port().to_string()])
        .args(["-U", &format!("{USER}%{PASSWORD}"), "-c", &commands])
        .output()
        .expect("smbclient is installed");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(
        fs::read(world.path("clip.mov")).expect("it is there"),
        pattern::bytes(2, 0, LENGTH),
        "smbclient wrote it"
    );
    wait_until("new bytes", || {
        reader.read(held, 0, LENGTH) == pattern::bytes(2, 0, LENGTH)
    });
}

#[test]
fn a_file_removed_beside_every_door_gives_its_space_back() {
    let Some(mut world) = world_with_notice(&Setup::default()) else {
        return;
    };
    let pid = world.daemon().pid();
    let held_by_daemon = || -> usize {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("the daemon runs");
        let targets = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        targets
            .filter(|target| target.to_string_lossy().contains("clip.mov"))
            .count()
    };
    let mut reader = Hand::connect(HAND, world.smbd.port());
    let held = reader.open("clip.mov");
    pattern::check(1, 0, &reader.read(held, 0, LENGTH), "before");
    reader.close(held);
    // No client has it open any more; the daemon keeps its cached bytes, and the file open.
    assert!(held_by_daemon() > 0, "the daemon keeps it for the next one");
    fs::remove_file(world.path("clip.mov")).expect("it is there");
    wait_until("the daemon lets go of it", || held_by_daemon() == 0);

    // Removed while a client plays it: the player goes on, and the file goes after it.
    world.put("clip.mov", 3, LENGTH);
    let held = reader.open("clip.mov");
    pattern::check(3, 0, &reader.read(held, 0, 1_000_000), "before");
    fs::remove_file(world.path("clip.mov")).expect("it is there");
    pattern::check(3, 0, &reader.read(held, 0, LENGTH), "an open file");
    reader.close(held);
    wait_until("the daemon lets go of it too", || held_by_daemon() == 0);

    // Removed while it is open and before a client has read of it: the daemon never knew it under a
    // name.
    world.put("clip.mov", 4, LENGTH);
    let held = reader.open("clip.mov");
    fs::remove_file(world.path("clip.mov")).expect("it is there");
    pattern::check(4, 0, &reader.read(held, 0, LENGTH), "an open file");
    reader.close(held);
    wait_until("the daemon lets go of that one too", || {
        held_by_daemon() == 0
    });
}

#[test]
fn a_file_that_a_local_program_goes_on_writing_reads_right_meanwhile() {
    let Some(world) = world_with_notice(&Setup::default()) else {
        return;
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As an ingest does: append piece by piece.
            let mut at = LENGTH;
            let file = fs::OpenOptions::new()
                .append(true)
                .open(world.path("clip.mov"))
                .expect("it is there");
            while !done.load(Ordering::Relaxed) && at < 40 * LENGTH {
                let piece = pattern::bytes(1, at as u64, 64 << 10);
                (&file).write_all(&piece).expect("there is room");
                at += piece.len();
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let mut reader = Hand::connect(HAND, world.smbd.port());
        let held = reader.open("clip.mov");
        for round in 0..20 {
            let start = round * (LENGTH / 20);
            let got = reader.read(held, start as u64, LENGTH / 20);
            assert_eq!(got.len(), LENGTH / 20, "round {round}");
            pattern::check(1, start as u64, &got, "beside an ingest");
        }
        done.store(true, Ordering::Relaxed);
        reader.close(held);
    });
}

#[test]
fn stores_into_a_page_that_is_mapped_and_not_written_yet_are_seen() {
    if !needs::all_there(&[needs::Need::Program("python3")]) {
        return;
    }
    // Otherwise the daemon would leave scattered reads to the kernel.
    let setup = Setup {
        server: String::from("analyser = false"),
        ..Setup::default()
    };
    let Some(world) = world_with_notice(&setup) else {
        return;
    };
    let mut reader = Hand::connect(HAND, world.smbd.port());
    let held = reader.open("clip.mov");
    pattern::check(1, 0, &reader.read(held, 0, LENGTH), "before");
    let mut program = Mapper::new(&world.path("clip.mov"), "w");
    // The kernel notices the first store into a page, and later ones when it has written the page.
    for nth in 0..3_u8 {
        let stored = [b'a' + nth; 8];
        program.stores(5000, &stored);
        wait_until("what is stored is read", || {
            reader.read(held, 5000, 8) == stored
        });
        // The daemon doubts a new version for two seconds; readers go on.
        let end = Instant::now() + Duration::from_millis(3_500);
        while Instant::now() < end {
            assert_eq!(reader.read(held, 5000, 8), stored);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
