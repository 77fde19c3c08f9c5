// SPDX-License-Identifier: Apache-2.0
//! The promise: with twelve streams the daemon takes less than 64 MiB beside its cache, and its
//! cache is never larger than its setting.
//!
//! The players are another process (this program again), since memory is counted by process.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use support::*;

const STREAM_COUNT: usize = 12;
const PLAYER: &str = "RUSHES_TEST_PLAYER";
const COPIER: &str = "RUSHES_TEST_COPIER";
/// More than twice the cache.
const LARGE_BYTES: u64 = 150 << 20;
const CACHE_BYTES: u64 = 64 << 20;
const BESIDE_BYTES_MAX: u64 = 64 << 20;

/// One daemon at a time: memory is counted by process, and the daemons are in this one.
static ALONE: Mutex<()> = Mutex::new(());

/// Does nothing unless the other test started this program for it.
#[test]
fn player() {
    let Some(share) = std::env::var_os(PLAYER).map(PathBuf::from) else {
        return;
    };
    let socket = std::env::var_os("RUSHES_TEST_SOCKET").unwrap();
    let mut sessions: Vec<_> = (0..STREAM_COUNT)
        .map(|number| {
            let mut client =
                rushes_shm::client::Client::connect(socket.as_ref(), &who("media")).unwrap();
            let (file, handle) = open(&mut client, &share, &format!("{number}.mov"));
            (client, file, handle)
        })
        .collect();
    for frame in 0..40 {
        for (client, _, handle) in &mut sessions {
            assert_eq!(
                read(client, *handle, frame * 250_000, 250_000).len(),
                250_000
            );
        }
    }
    // Wait until the other test has measured the daemon and closes standard input.
    let _ = std::io::read_to_string(std::io::stdin());
}

/// Does nothing unless the other test started this program for it.
#[test]
fn copier() {
    let Some(share) = std::env::var_os(COPIER).map(PathBuf::from) else {
        return;
    };
    let socket = std::env::var_os("RUSHES_TEST_SOCKET").unwrap();
    let mut client = rushes_shm::client::Client::connect(socket.as_ref(), &who("media")).unwrap();
    let (_file, handle) = open(&mut client, &share, "large.mov");
    for megabyte in 0..LARGE_BYTES >> 20 {
        let bytes = read(&mut client, handle, megabyte << 20, 1 << 20);
        assert!(bytes == pattern(megabyte, 1 << 20), "megabyte {megabyte}");
    }
}

/// This program again, with one of the tests above that do nothing otherwise.
fn start(test: &str, variable: &str, share: &Path, daemon: &Daemon) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(variable, share)
        .env("RUSHES_TEST_SOCKET", daemon.session_socket())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_file_larger_than_the_cache_does_not_enlarge_it() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let share = Folder::below(&std::env::temp_dir());
    let mut large = std::fs::File::create(share.0.join("large.mov")).unwrap();
    for megabyte in 0..LARGE_BYTES >> 20 {
        large.write_all(&pattern(megabyte, 1 << 20)).unwrap();
    }
    let daemon = Daemon::start(&share.0, "[cache]\nbytes = \"64MiB\"\n");
    let mut copier = start("copier", COPIER, &share.0, &daemon);
    let mut rss_bytes_max = 0;
    let status = loop {
        let ended = copier.try_wait().unwrap();
        let status = daemon.status();
        rss_bytes_max = rss_bytes_max.max(status.daemon.rss_bytes);
        if let Some(ended) = ended {
            assert!(ended.success());
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    assert_eq!(
        status.daemon.plain_open_count, 0,
        "it went through the cache"
    );
    assert!(
        (CACHE_BYTES..=CACHE_BYTES + BESIDE_BYTES_MAX).contains(&rss_bytes_max),
        "{} MiB, cache included",
        rss_bytes_max >> 20
    );
    eprintln!("cache included: {} KiB", rss_bytes_max >> 10);
}

#[test]
fn beside_its_cache_the_daemon_is_small() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let share = Folder::below(&std::env::temp_dir());
    for number in 0..STREAM_COUNT {
        let bytes = pattern(number as u64, 10_000_000);
        std::fs::write(share.0.join(format!("{number}.mov")), bytes).unwrap();
    }
    let daemon = Daemon::start(&share.0, "[cache]\nbytes = \"256MiB\"\n");
    let mut players = start("player", PLAYER, &share.0, &daemon);
    let status = daemon.status_when("twelve streams read", |status| {
        status
            .streams
            .iter()
            .filter(|s| s.open && s.read_count >= 40)
            .count()
            == STREAM_COUNT
    });
    drop(players.stdin.take());
    assert!(players.wait().unwrap().success());
    assert!(
        status.daemon.rss_bytes >= 256 << 20,
        "the cache is in memory and counted"
    );
    // This process also runs the test, so the daemon alone takes less than this figure.
    assert!(
        status.daemon.rss_beside_cache_bytes < BESIDE_BYTES_MAX,
        "{} MiB",
        status.daemon.rss_beside_cache_bytes >> 20
    );
    eprintln!(
        "beside the cache: {} KiB",
        status.daemon.rss_beside_cache_bytes >> 10
    );
}
