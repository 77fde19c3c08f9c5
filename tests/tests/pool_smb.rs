// SPDX-License-Identifier: Apache-2.0
//! A pool behind a real smbd: its share is the mount. Clients get the bytes of a model of the
//! files, a player gets its contract, and no client reaches a layout.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::fsx;
use rushes_tests::needs::path_of;
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS, check};
use rushes_tests::random::Random;
use rushes_tests::smb2::{self, Connection, Disposition};
use rushes_tests::smbd::{self, SHARE, Smbd, SmbdSpec};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

const BLOCK: usize = 65_536;
/// Blocks of a frame of 100 Mb/s at 25 a second, rounded up.
const FRAME_BLOCKS: u64 = 8;

/// The pool, a daemon that serves its members, and smbd over the mount; stock, or with our module
/// before it.
fn shared(
    modules: Option<&str>,
    write_buffer: Option<&'static str>,
) -> Option<(PoolWorld, Daemon, Smbd)> {
    let members = [(EXT4, 200), (XFS, 300), (BTRFS, 200)];
    shared_on(&members, modules, write_buffer)
}

fn shared_on(
    made: &[Made],
    modules: Option<&str>,
    write_buffer: Option<&'static str>,
) -> Option<(PoolWorld, Daemon, Smbd)> {
    let world = PoolWorld::build(made)?;
    let members = (0..made.len()).map(|number| world.member(number).join("pool"));
    let mut spec = DaemonSpec::of_members(members);
    spec.write_buffer = write_buffer;
    // A rule by the path in the pool, which no share has.
    spec.more += "[[rule]]\nmatch = \"reels/*.mov\"\nbitrate = \"100M\"\n";
    let daemon = Daemon::start(&world.scratch, &spec);
    daemon.wait_for_members(made.len());
    let mut share: Vec<String> = smb2::SHARE_LINES
        .into_iter()
        .chain(["allocation roundup size = 0"])
        .map(String::from)
        .collect();
    if let Some(modules) = modules {
        share.push(format!("vfs objects = {modules}"));
        share.push(format!(
            "rushes:socket = {}",
            Daemon::session_socket(&world.scratch).display()
        ));
    }
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.path(""), everybody).expect("our own mount");
    let smbd = smbd::start(
        &world.scratch,
        &SmbdSpec {
            path: world.path(""),
            share,
            global: vec![String::from(smb2::GLOBAL)],
        },
    );
    Some((world, daemon, smbd))
}

fn files_are_what_a_model_says(modules: Option<&str>, seed: u64) {
    let Some((world, _daemon, smbd)) = shared(modules, None) else {
        return;
    };
    let plan = fsx::Plan::new(seed, 1500);
    let report = fsx::run(smbd.port(), &world.path(""), &plan);
    let report = report.unwrap_or_else(|divergence| panic!("{divergence}"));
    assert_eq!(report.operations, 1500);
}

#[test]
fn files_of_a_pool_are_what_a_model_of_them_is() {
    files_are_what_a_model_says(None, 21);
}

#[test]
fn our_module_before_a_mount_changes_nothing() {
    files_are_what_a_model_says(Some("rushes"), 22);
}

/// Clients' writes go through lanes, and daemons die meanwhile.
#[test]
fn files_are_what_a_model_of_them_is_whichever_daemons_die() {
    let Some((world, mut daemon, smbd)) = shared(None, Some("64MiB")) else {
        return;
    };
    let plan = fsx::Plan {
        daemon_dies: true,
        ..fsx::Plan::new(23, 3000)
    };
    let (port, folder) = (smbd.port(), world.path(""));
    let report = std::thread::scope(|scope| {
        let work = scope.spawn(|| fsx::run(port, &folder, &plan));
        let mut random = Random(29);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(100 + random.below(400)));
            if work.is_finished() {
                break;
            }
            daemon.kill();
            std::thread::sleep(Duration::from_millis(random.below(100)));
            daemon.start_again();
        }
        work.join().expect("no panic")
    });
    let report = report.unwrap_or_else(|divergence| panic!("{divergence}"));
    assert_eq!(report.operations, 3000);
    let status = daemon.status();
    let count = |name: &str| status["write"][name].as_u64().expect("a count");
    assert!(
        count("write_count") + count("plain_count") > 0,
        "{:#}",
        status["write"]
    );
}

#[test]
fn a_player_of_a_pool_gets_a_contract_and_every_byte() {
    let Some((world, daemon, smbd)) = shared(None, None) else {
        return;
    };
    let reels = world.path("reels");
    fs::create_dir(&reels).expect("made");
    fs::set_permissions(&reels, fs::Permissions::from_mode(0o777)).expect("our own");
    let client = Connection::connect(smbd.port(), SHARE).expect("smbd lets guests in");
    let (file, _) = client
        .open("reels\\clip.mov", Disposition::OpenIf)
        .expect("made");
    let blocks = 150 * FRAME_BLOCKS;
    for block in 0..blocks {
        let at = block * BLOCK as u64;
        let bytes = pattern::bytes(9, at, BLOCK);
        client.write(file, at, &bytes).expect("written");
    }
    client.flush(file).expect("flushed");
    client.close(file).expect("closed");
    rushes_tests::caches::drop("3");

    let (file, _) = client
        .open("reels\\clip.mov", Disposition::Open)
        .expect("opened");
    let begun = Instant::now();
    let mut promised = false;
    for block in 0..blocks {
        let at = block * BLOCK as u64;
        let found = client.read(file, at, BLOCK).expect("read");
        pattern::check(9, at, &found, "clip.mov");
        if block % FRAME_BLOCKS == FRAME_BLOCKS - 1 {
            let due = Duration::from_millis(40) * (block / FRAME_BLOCKS + 1) as u32;
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
            let status = daemon.status();
            promised |= status["streams"].as_array().is_some_and(|streams| {
                streams.iter().any(|stream| {
                    stream["standing"] == "contract" && stream["path"] == "reels/clip.mov"
                })
            });
        }
    }
    assert!(promised, "{:#}", daemon.status());
    // No name reaches an object.
    let member = world.members_of("reels/clip.mov");
    assert_eq!(member.len(), 1, "it fits one");
    for name in ["objects", "rushes-pool", "..\\m0\\pool\\rushes-pool"] {
        assert!(client.open(name, Disposition::Open).is_err(), "{name}");
    }
}

#[test]
fn whoever_has_a_file_of_a_pool_open_is_in_the_ledger() {
    let Some((world, daemon, smbd)) = shared(None, None) else {
        return;
    };
    let reels = world.path("reels");
    fs::create_dir(&reels).expect("made");
    fs::set_permissions(&reels, fs::Permissions::from_mode(0o777)).expect("our own");
    for name in ["clip.mov", "other.mov", "third.mov"] {
        fs::write(reels.join(name), pattern::bytes(9, 0, 64 * BLOCK)).expect("written");
        fs::set_permissions(reels.join(name), fs::Permissions::from_mode(0o666)).expect("our own");
    }
    rushes_tests::caches::drop("3");
    // Waits for a stream of this file, with this user and client.
    let stands = |what: &str, path: &str, user: &str, client: &str| {
        daemon.wait_for(what, |status| {
            status["streams"].as_array().is_some_and(|streams| {
                streams.iter().any(|stream| {
                    (&stream["path"], &stream["user"], &stream["client"])
                        == (&path.into(), &user.into(), &client.into())
                })
            })
        })
    };
    let own = fs::read_to_string("/proc/self/comm").expect("it is there");
    let own = own.trim_end();

    let client = Connection::connect(smbd.port(), SHARE).expect("smbd lets guests in");
    let clip = ("reels\\clip.mov", "reels/clip.mov");
    let (file, _) = client.open(clip.0, Disposition::Open).expect("opened");
    let found = client.read(file, 0, BLOCK).expect("read");
    pattern::check(9, 0, &found, "clip.mov");
    stands("the client's address", clip.1, "daemon", "127.0.0.1");

    let mut mine = fs::File::open(reels.join("other.mov")).expect("opened");
    let mut other = Vec::new();
    mine.read_to_end(&mut other).expect("read");
    pattern::check(9, 0, &other, "other.mov");
    stands("a local program", "reels/other.mov", "root", own);
    drop(mine);
    // The ledger names a program that it knows by now although that does not stay.
    fs::read(reels.join("third.mov")).expect("read");
    stands("the same, in haste", "reels/third.mov", "root", own);

    // Both have one file open, then one of them.
    let mine = fs::File::open(reels.join("clip.mov")).expect("opened");
    let both = format!("127.0.0.1, {own}");
    stands("both of them", clip.1, "daemon, root", &both);
    client.close(file).expect("closed");
    let status = stands("who is left", clip.1, "root", own);
    drop(mine);
    let lines = status["streams"].as_array().expect("a list");
    let mut numbers: Vec<u64> = lines
        .iter()
        .filter_map(|line| line["stream"].as_u64())
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), lines.len(), "{:#}", status["streams"]);
}

/// Some day in 2011. Units: 100 ns since 1601.
const TIME: u64 = 129_400_000_000_000_000;
/// The same in seconds since 1970.
const TIME_S: i64 = (TIME / 10_000_000) as i64 - 11_644_473_600;
/// Length of a file whose time is set. Units: bytes.
const TIMED_BYTES: usize = 20_000;

/// Writes a file and sets its time while its bytes are in the write buffer: by a client, after its
/// last bytes or before them, or by a program on the server.
fn record_with_time(world: &PoolWorld, client: &Connection, name: &str, way: usize) {
    let bytes = pattern::bytes(way as u64, 0, TIMED_BYTES);
    if way == 2 {
        let file = fs::File::create(world.path(name)).expect("made");
        file.write_all_at(&bytes, 0).expect("room");
        let time = Duration::from_secs(TIME_S.unsigned_abs());
        file.set_modified(UNIX_EPOCH + time).expect("set");
        return;
    }
    let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
    let first = [TIMED_BYTES, 100][way];
    client.write(file, 0, &bytes[..first]).expect("written");
    client.set_written(file, TIME).expect("set");
    if first < TIMED_BYTES {
        let rest = client.write(file, first as u64, &bytes[first..]);
        rest.expect("written");
    }
    client.close(file).expect("closed");
}

/// Whether `rushes recover --list` finds nothing in lanes.
fn is_nothing_left(world: &PoolWorld) -> bool {
    let output = Command::new(path_of("rushes"))
        .args(["recover", "--list", "--config"])
        .arg(world.scratch.path().join("rushes.toml"))
        .output();
    output.expect("rushes was built").status.success()
}

fn check_times(world: &PoolWorld, names: &[String], context: &str) {
    for (way, name) in names.iter().enumerate() {
        let path = world.path(name);
        let found = fs::metadata(&path).expect("it is there").mtime();
        assert_eq!(found, TIME_S, "{context}: {name}");
        check(&path, way as u64, TIMED_BYTES);
        let found = fs::metadata(&path).expect("it is there").mtime();
        assert_eq!(found, TIME_S, "{context}: {name} once it was read");
    }
}

#[test]
fn a_time_that_was_set_survives_the_daemon_whoever_writes_what_it_left() {
    // No Btrfs, to which writes go at once.
    let shared = shared_on(&[(EXT4, 200), (XFS, 300)], None, Some("64MiB"));
    let Some((mut world, mut daemon, mut smbd)) = shared else {
        return;
    };
    let client = Connection::connect(smbd.port(), SHARE).expect("smbd lets guests in");
    let mut all = Vec::new();
    for next in ["recover", "serve"] {
        let names: Vec<String> = (0..3).map(|way| format!("{next}-{way}.mov")).collect();
        for (way, name) in names.iter().enumerate() {
            record_with_time(&world, &client, name, way);
        }
        let dirty_count = daemon.status()["write"]["dirty_file_count"].as_u64();
        daemon.kill();
        assert_eq!(dirty_count, Some(3), "not all were in the write buffer");
        if next == "serve" {
            daemon.start_again();
            daemon.wait_for_members(2);
        }
        check_times(&world, &names, next);
        // The mount starts `rushes recover` if no daemon comes.
        let patience = Duration::from_secs(60);
        until("nothing is left", patience, || is_nothing_left(&world));
        check_times(&world, &names, next);
        if next == "recover" {
            daemon.start_again();
            daemon.wait_for_members(2);
        }
        all.push(names);
    }
    // Another mount has the times, too: not only the memory of the first one.
    drop(client);
    smbd.stop();
    world.end();
    world.start();
    for names in &all {
        check_times(&world, names, "mounted again");
    }
}
