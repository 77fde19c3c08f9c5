// SPDX-License-Identifier: Apache-2.0
//! The daemon's streams of NFS clients that read a pool, and the end of their handles after its
//! catalogue was lost: docs/guide/pool-export.md and pool-trouble.md say so.

use rushes_tests::daemon::Daemon;
use rushes_tests::export::{Export, NFS};
use rushes_tests::needs;
use rushes_tests::nfs4::{NFS4ERR_STALE, Nfs4};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, XFS, put};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PIECE: u32 = 65_536;
const RULE: &str = "[[rule]]\nmatch = \"reel/*.mov\"\nbitrate = \"2M\"\n";
/// Ganesha closes a file that no client has open after 5 s, when it next looks.
const CLOSES_WITHIN: Duration = Duration::from_secs(40);

fn streams(daemon: &Daemon, path: &str) -> Vec<Value> {
    let status = daemon.status();
    let all = status["streams"].as_array().expect("a list");
    let of_it = all.iter().filter(|stream| stream["path"] == path);
    of_it.cloned().collect()
}

fn open_streams(daemon: &Daemon, path: &str) -> usize {
    let all = streams(daemon, path);
    all.iter().filter(|stream| stream["open"] == true).count()
}

fn until_closed(daemon: &Daemon, path: &str) {
    let end = Instant::now() + CLOSES_WITHIN;
    while open_streams(daemon, path) > 0 {
        assert!(Instant::now() < end, "{path}: {:#}", daemon.status());
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Drops all bytes and names from the caches of the kernel and the mount.
fn forget() {
    rushes_tests::caches::drop("3");
}

#[test]
fn a_stream_of_nfs_is_a_file_whoever_reads_it_and_ends_with_its_close() {
    if !needs::all_there(NFS) {
        return;
    }
    let Some(world) = PoolWorld::build(&[(EXT4, 100), (XFS, 300)]) else {
        return;
    };
    fs::create_dir(world.path("reel")).expect("made");
    for (name, seed) in [("reel/one.mov", 1), ("reel/two.mov", 2)] {
        put(&world.path(name), seed, 8 * MIB).expect("room");
    }
    let daemon = world.served(2, RULE);
    forget();
    // Ganesha drops a client that is silent for half of this time.
    let export = Export::nfs_with(&world, &["--grace", "20"]);
    let mut first = Nfs4::connect(export.port, "first", 1);
    let mut second = Nfs4::connect(export.port, "second", 2);
    let root = first.root("media").expect("exported");
    let reel = first.lookup(&root, b"reel").expect("there");
    let mut open = vec![
        first.open(&reel, b"one.mov", false).expect("there"),
        second.open(&reel, b"one.mov", false).expect("there"),
    ];
    for piece in 0..16 {
        let at = u64::from(piece * PIECE);
        for (nfs, open, at) in [
            (&mut first, &open[0], at),
            (&mut second, &open[1], at + 4 * MIB as u64),
        ] {
            let bytes = nfs.read(open, at, PIECE).expect("read");
            pattern::check(1, at, &bytes, "one.mov");
        }
    }
    let found = streams(&daemon, "reel/one.mov");
    assert_eq!(found.len(), 1, "{found:#?}");
    let said = ["user", "client", "open", "rate_source"].map(|name| &found[0][name]);
    assert_eq!(
        said,
        [
            // The NFS server opens files for any client that asks it.
            &json!("root"),
            &json!("ganesha.nfsd"),
            &json!(true),
            &json!("rule")
        ]
    );
    assert_eq!(streams(&daemon, "reel/two.mov").len(), 0);
    // The stream is open as long as one client has the file open.
    second.close(open.remove(1)).expect("closed");
    std::thread::sleep(Duration::from_secs(1));
    let bytes = first.read(&open[0], 7 * MIB as u64, PIECE).expect("read");
    pattern::check(1, 7 * MIB as u64, &bytes, "one.mov");
    assert_eq!(open_streams(&daemon, "reel/one.mov"), 1);
    first.close(open.remove(0)).expect("closed");
    until_closed(&daemon, "reel/one.mov");

    // Read without an open, as NFSv3 clients do.
    let two = first.lookup(&reel, b"two.mov").expect("there");
    let read = |nfs: &mut Nfs4, at: u64| {
        let bytes = nfs.read_closed(&two, at, PIECE).expect("read");
        pattern::check(2, at, &bytes, "two.mov");
    };
    for piece in 0..8 {
        read(&mut first, u64::from(piece * PIECE));
    }
    assert_eq!(open_streams(&daemon, "reel/two.mov"), 1);
    until_closed(&daemon, "reel/two.mov");
    // A place that was not read ahead.
    read(&mut first, 6 * MIB as u64);
    assert_eq!(open_streams(&daemon, "reel/two.mov"), 1);
    assert_eq!(streams(&daemon, "reel/two.mov").len(), 2, "another one");
    export.end();
}

#[test]
fn handles_and_inode_numbers_do_not_outlive_a_lost_catalogue() {
    if !needs::all_there(NFS) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    fs::create_dir(world.path("reel")).expect("made");
    put(&world.path("reel/a.mov"), 1, MIB).expect("room");
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "before", 1);
    let root = nfs.root("media").expect("exported");
    let reel = nfs.lookup(&root, b"reel").expect("there");
    let a = nfs.lookup(&reel, b"a.mov").expect("there");
    // The log of names is a second behind at most.
    std::thread::sleep(Duration::from_millis(2500));
    export.end();
    world.end();
    world.lose_catalogue();
    let members = [0, 1].map(|number| world.member(number).join("pool"));
    let (report, code) = world.json(&["rescue"], &members);
    assert_eq!(code, Some(0), "{report}");
    world.start();
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "behind", 2);
    for (what, handle) in [("a folder", &reel), ("a file", &a)] {
        assert_eq!(nfs.known(handle).err(), Some(NFS4ERR_STALE), "{what}");
    }
    // A client that mounts again gets it.
    let root = nfs.root("media").expect("exported");
    let reel = nfs.lookup(&root, b"reel").expect("there");
    let a = nfs.lookup(&reel, b"a.mov").expect("there");
    let bytes = nfs.read_closed(&a, 0, PIECE).expect("read");
    pattern::check(1, 0, &bytes, "a.mov");
    export.end();
}
