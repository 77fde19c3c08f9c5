// SPDX-License-Identifier: Apache-2.0
//! A fault reaches only the party that it concerns: a bad sector its reader, a dead client nobody,
//! a dead daemon the contracts and not the bytes.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::hand::Hand;
use rushes_tests::pattern;
use rushes_tests::world::{Backing, Setup, World};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    listen, recv, send, socket_with,
};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 12_000_001;

fn slow_world() -> Option<World> {
    let world = World::build(&Setup {
        backing: Backing::Slow,
        ..Setup::default()
    })?;
    world.put("clip.mov", 1, LENGTH);
    world.put("other.mov", 2, LENGTH);
    Some(world)
}

/// With a file, and a socket that nobody has made.
fn without_daemon() -> Option<World> {
    let world = World::build(&Setup {
        daemon: false,
        ..Setup::default()
    })?;
    world.put("clip.mov", 1, LENGTH);
    Some(world)
}

/// Major and minor number of the device below.
fn device_of(path: &std::path::Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let device = std::fs::metadata(path).expect("it is there").dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major}:{minor}")
}

#[test]
fn a_bad_sector_is_the_readers_error_and_the_stream_goes_on() {
    let Some(mut world) = slow_world() else {
        return;
    };
    // Its page lies within one of the pieces read below.
    const BAD: u64 = 5_100_000;
    const PIECE: u64 = 5_000_000;
    // For reads that smbd then does by itself, the kernel reads ahead by its default of 128 KiB;
    // with a longer read-ahead one bad page would fail a MiB.
    let device = device_of(&world.path("clip.mov"));
    let knob = format!("/sys/dev/block/{device}/queue/read_ahead_kb");
    std::fs::write(&knob, "128").expect("a block device");
    let place = world.disk.physical(&world.path("clip.mov"), BAD) & !4095;
    world.disk.tell(&format!("fail read {place} 4096"));
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    let mut at = 0;
    let mut errors = Vec::new();
    while at < LENGTH as u64 {
        match hand.try_read(file, at, 250_000) {
            Ok(found) => pattern::check(1, at, &found, "beside the bad sector"),
            Err(error) => errors.push((at, error)),
        }
        at += 250_000;
    }
    assert!(
        matches!(errors.as_slice(), [(PIECE, _)]),
        "expected an error for the piece at {PIECE} alone: {errors:?}"
    );
    let mut other = Hand::connect(HAND, world.smbd.port());
    let whole = other.open("other.mov");
    pattern::check(2, 0, &other.read(whole, 0, LENGTH), "another file");
    assert!(world.daemon().is_alive());

    // From here on as if the drive had remapped the sector.
    world.disk.tell("clear");
    let found = hand.read(file, PIECE, 250_000);
    pattern::check(1, PIECE, &found, "after the repair");
}

#[test]
fn a_client_that_dies_in_the_middle_of_a_read_leaves_nothing_behind() {
    let Some(mut world) = slow_world() else {
        return;
    };
    world.disk.tell("stall 1500");
    let mut victim = Hand::connect(HAND, world.smbd.port());
    let file = victim.open("clip.mov");
    victim.begin_read(file, 0, 8 << 20);
    world
        .daemon()
        .wait_for("the victim's session is there", |status| {
            status["sessions"].as_array().is_some_and(|s| !s.is_empty())
        });
    std::thread::sleep(Duration::from_millis(200));
    victim.kill();
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = other.open("clip.mov");
    pattern::check(
        1,
        0,
        &other.read(file, 0, LENGTH),
        "the same file for another",
    );
    drop(other);
    world
        .daemon()
        .wait_for("no session and no pinned buffer is left", |status| {
            status["sessions"].as_array().is_some_and(Vec::is_empty)
                && status["cache"]["pinned_count"] == 0
        });
}

#[test]
fn a_daemon_that_dies_in_the_middle_of_a_read_is_not_noticed() {
    let Some(mut world) = slow_world() else {
        return;
    };
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    pattern::check(1, 0, &hand.read(file, 0, 100_000), "with the daemon");
    world.disk.tell("stall 700");
    hand.begin_read(file, 6_000_000, 4 << 20);
    std::thread::sleep(Duration::from_millis(200));
    world.daemon().kill();
    let found = hand.finish_read().expect("plain I/O after the daemon died");
    pattern::check(1, 6_000_000, &found, "the read in flight");
    let mut at = 0;
    while at < LENGTH as u64 {
        let found = hand.read(file, at, 1 << 20);
        pattern::check(1, at, &found, "without the daemon");
        at += 1 << 20;
    }

    world.daemon().start_again();
    world.daemon().wait_for("the client is back", |status| {
        // A read offers the file again.
        pattern::check(1, 0, &hand.read(file, 0, 100_000), "the daemon is back");
        status["sessions"].as_array().is_some_and(|s| !s.is_empty())
            && status["cache"]["miss_count"].as_u64() > Some(0)
    });
}

#[test]
fn writes_while_the_daemon_dies_and_returns_are_never_lost() {
    let Some(mut world) = slow_world() else {
        return;
    };
    let mut writer = Hand::connect(HAND, world.smbd.port());
    let mut reader = Hand::connect(HAND, world.smbd.port());
    let written = writer.open_rw("clip.mov");
    let read = reader.open("clip.mov");
    for round in 0..6_u64 {
        let offset = round * 1_000_000;
        reader.read(read, offset, 1_000_000);
        if round % 2 == 0 {
            world.daemon().kill();
        }
        writer.write(
            written,
            offset,
            &pattern::bytes(100 + round, offset, 1_000_000),
        );
        if round % 2 == 0 {
            world.daemon().start_again();
        }
        let found = reader.read(read, offset, 1_000_000);
        pattern::check(100 + round, offset, &found, "after the write");
    }
}

/// Time that a client needs from nothing to its first bytes.
fn first_bytes(world: &World) -> Duration {
    let start = Instant::now();
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    pattern::check(1, 0, &hand.read(file, 0, 1000), "first bytes");
    start.elapsed()
}

const TRIES: usize = 5;

/// The quickest of [`TRIES`]: other programs use this machine as well.
fn quickest(world: &World) -> Duration {
    let times = (0..TRIES).map(|_| first_bytes(world));
    times.min().expect("some")
}

#[test]
fn without_a_daemon_it_is_plain_samba_with_one_line_in_the_log() {
    let plain = World::build(&Setup {
        modules: String::new(),
        daemon: false,
        ..Setup::default()
    });
    let ours = World::build(&Setup {
        daemon: false,
        ..Setup::default()
    });
    let (Some(plain), Some(ours)) = (plain, ours) else {
        return;
    };
    for world in [&plain, &ours] {
        world.put("clip.mov", 1, LENGTH);
        // The first connection pays for loading libraries.
        first_bytes(world);
    }
    let (plain_time, our_time) = (quickest(&plain), quickest(&ours));
    assert!(
        our_time < plain_time + Duration::from_millis(100),
        "{our_time:?} without a daemon, {plain_time:?} without the module"
    );
    let mut hand = Hand::connect(HAND, ours.smbd.port());
    let file = hand.open_rw("clip.mov");
    for round in 0..20_u64 {
        let offset = round * 500_000;
        hand.write(file, offset, &pattern::bytes(50 + round, offset, 1000));
        pattern::check(50 + round, offset, &hand.read(file, offset, 1000), "plain");
    }
    drop(hand);
    let log = ours.smbd.log();
    let lines: Vec<&str> = log.lines().filter(|l| l.contains("no daemon at")).collect();
    assert!(
        lines.len() == 1 + TRIES + 1,
        "expected one line for each connection: {lines:#?}\n{log}"
    );
}

#[test]
fn a_daemon_that_hangs_does_not_hold_up_a_new_client() {
    let Some(mut world) = World::build(&Setup::default()) else {
        return;
    };
    world.put("clip.mov", 1, LENGTH);
    first_bytes(&world);
    let pid = world.daemon().pid().to_string();
    let signal = |name: &str| {
        let status = Command::new("kill").args([name, &pid]).status();
        assert!(status.is_ok_and(|status| status.success()));
    };
    signal("-STOP");
    let time = quickest(&world);
    signal("-CONT");
    assert!(
        time < Duration::from_secs(1),
        "{time:?} with a stopped daemon"
    );
}

#[test]
fn something_else_on_the_socket_means_plain_io() {
    let Some(world) = without_daemon() else {
        return;
    };
    let socket = rushes_tests::daemon::Daemon::session_socket(&world.scratch);
    // The module connects to a socket of packets: this one is a stream, the next a plain file.
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(quickest(&world) < Duration::from_secs(1));
    drop(listener);
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "not a socket").unwrap();
    assert!(quickest(&world) < Duration::from_secs(1));
}

/// A client with an open file, all of whose bytes are on its disk, after the daemon has died.
fn orphan() -> Option<(World, Hand, rushes_tests::hand::Held)> {
    let mut world = World::build(&Setup {
        write_buffer: Some("64MiB"),
        // A recovery that smbd starts would take a waiting writer for hung.
        share: vec![String::from("rushes:recover after = 60")],
        ..Setup::default()
    })?;
    world.put("take.mov", 5, 1_000_000);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open_rw("take.mov");
    // A read: a write would keep the file in the table of facts as long as it is open.
    hand.read(file, 0, 1000);
    world.daemon().kill();
    // A write that is under way when smbd learns of the death waits for the next daemon.
    std::thread::sleep(Duration::from_secs(1));
    Some((world, hand, file))
}

#[test]
fn nothing_is_changed_behind_a_daemon_that_is_only_slow_to_answer() {
    let Some((mut world, mut hand, file)) = orphan() else {
        return;
    };
    let socket = rushes_tests::daemon::Daemon::session_socket(&world.scratch);
    std::fs::remove_file(&socket).expect("a dead daemon's");
    // Nothing accepts connections here: a door that connects waits.
    let deaf = listener_at(&socket);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| hand.write(file, 0, &pattern::bytes(6, 0, 1000)));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!writer.is_finished(), "it went behind somebody's back");
        drop(deaf);
        std::fs::remove_file(&socket).expect("our own");
        world.daemon().start_again();
    });
    pattern::check(6, 0, &hand.read(file, 0, 1000), "what was written then");
}

#[test]
fn a_daemon_starts_to_serve_when_no_door_changes_a_file_without_it() {
    let Some((mut world, mut hand, file)) = orphan() else {
        return;
    };
    let facts = world.scratch.folder("run").join("lanes/facts");
    let changing = std::fs::File::open(facts).expect("a daemon was there");
    changing.lock_shared().expect("nobody starts");
    let daemon = world.daemon();
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| daemon.start_again());
        std::thread::sleep(Duration::from_secs(1));
        assert!(!starting.is_finished(), "it serves beside a change");
        // Other doors need not wait for it.
        hand.write(file, 0, &pattern::bytes(6, 0, 1000));
        drop(changing);
    });
    pattern::check(6, 0, &hand.read(file, 0, 1000), "what was written then");
    // A change that never ends does not keep the daemon out for ever.
    let facts = world.scratch.folder("run").join("lanes/facts");
    let stuck = std::fs::File::open(facts).expect("a daemon is there");
    stuck
        .lock_shared()
        .expect("a daemon that serves has no lock");
    world.daemon().kill();
    world.daemon().start_again();
    let end = Instant::now() + Duration::from_secs(20);
    while !world.daemon().log().contains("serving without waiting") {
        assert!(Instant::now() < end, "{}", world.daemon().log());
        std::thread::sleep(Duration::from_millis(100));
    }
    pattern::check(6, 0, &hand.read(file, 0, 1000), "by a daemon that waited");
}

fn listener_at(socket: &Path) -> std::os::fd::OwnedFd {
    let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener =
        socket_with(unix, packets, SocketFlags::CLOEXEC, None).expect("a socket of our own");
    bind(
        &listener,
        &SocketAddrUnix::new(socket).expect("a socket of our own"),
    )
    .expect("a socket of our own");
    listen(&listener, 4).expect("a socket of our own");
    listener
}

/// Listens where the daemon would, takes one door's greeting and welcomes it in the next version.
/// The receiver gets a message then.
fn newer_daemon(socket: &Path) -> Receiver<()> {
    let listener = listener_at(socket);
    let (greeted, is_greeted) = channel();
    std::thread::spawn(move || {
        let door = accept(&listener).expect("the door connects");
        let mut packet = [0; 4096];
        let (count, _) = recv(&door, &mut packet, RecvFlags::empty()).expect("the door says hello");
        // Magic, version, message, zero: CONNECT (1) in its version becomes WELCOME (2) in the
        // next.
        assert!(count >= 64 && packet[8] == 1, "{:?}", &packet[..count]);
        packet[4] += 1;
        packet[8] = 2;
        send(&door, &packet[..64], SendFlags::NOSIGNAL).expect("the door listens");
        greeted.send(()).expect("the test waits for it");
        // Waits until the door closes, as it should.
        let _ = recv(&door, &mut packet, RecvFlags::empty());
    });
    is_greeted
}

#[test]
fn a_daemon_of_another_version_means_plain_io_with_one_line_in_the_log() {
    let Some(world) = without_daemon() else {
        return;
    };
    // The first connection pays for loading libraries; no daemon listens yet.
    first_bytes(&world);
    let socket = rushes_tests::daemon::Daemon::session_socket(&world.scratch);
    let newer = newer_daemon(&socket);
    let time = first_bytes(&world);
    assert!(
        time < Duration::from_secs(1),
        "{time:?} with a newer daemon"
    );
    newer
        .recv_timeout(Duration::from_secs(10))
        .expect("the door greets");
    let log = world.smbd.log();
    let lines = log
        .lines()
        .filter(|l| l.contains("install door and daemon of one release"));
    assert_eq!(lines.count(), 1, "{log}");
}

#[test]
fn files_on_another_mount_in_the_share_are_read_plainly() {
    let Some(mut world) = World::build(&Setup {
        tmpfs_on: Some("inner"),
        ..Setup::default()
    }) else {
        return;
    };
    // The daemon does not serve these files, and they cannot be cold: a tmpfs has them.
    world.write("inner/clip.mov", 3, LENGTH);
    world.write("inner/other.mov", 4, LENGTH);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    for (name, seed) in [("inner/clip.mov", 3), ("inner/other.mov", 4)] {
        let file = hand.open(name);
        let found = hand.read(file, 0, LENGTH);
        pattern::check(seed, 0, &found, name);
    }
    let daemon = world.daemon();
    let status = daemon.wait_for("both were offered", |status| {
        status["daemon"]["plain_open_count"] == 2
    });
    assert_eq!(status["cache"]["hit_count"], 0, "{status:#}");
    assert_eq!(status["cache"]["miss_count"], 0, "{status:#}");
    let log = daemon.log();
    let lines = log.lines().filter(|l| l.contains("a file is not served"));
    assert_eq!(lines.count(), 1, "{log}");
    // The daemon serves files beside that mount.
    world.put("clip.mov", 1, LENGTH);
    let file = hand.open("clip.mov");
    pattern::check(1, 0, &hand.read(file, 0, 100_000), "beside the mount");
    let status = world.daemon().status();
    assert_ne!(status["cache"]["miss_count"], 0, "{status:#}");
}
