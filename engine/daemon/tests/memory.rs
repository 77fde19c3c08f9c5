// SPDX-License-Identifier: Apache-2.0
//! The promise: with twelve streams the daemon takes less than 64 MiB beside its cache.
//!
//! The players are another process (this program again), since memory is counted by process.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use std::path::PathBuf;
use std::process::Command;
use support::*;

const STREAM_COUNT: usize = 12;
const PLAYER: &str = "RUSHES_TEST_PLAYER";

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
    // Until the daemon was looked at: standard input ends.
    let _ = std::io::read_to_string(std::io::stdin());
}

#[test]
fn beside_its_cache_the_daemon_is_small() {
    let share = Folder::below(&std::env::temp_dir());
    for number in 0..STREAM_COUNT {
        let bytes = pattern(number as u64, 10_000_000);
        std::fs::write(share.0.join(format!("{number}.mov")), bytes).unwrap();
    }
    let daemon = Daemon::start(&share.0, "[cache]\nbytes = \"256MiB\"\n");
    let mut players = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "player"])
        .env(PLAYER, &share.0)
        .env("RUSHES_TEST_SOCKET", daemon.session_socket())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
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
    // This process is the test as well, so the daemon alone takes less than what is seen here.
    assert!(
        status.daemon.rss_beside_cache_bytes < 64 << 20,
        "{} MiB",
        status.daemon.rss_beside_cache_bytes >> 20
    );
    eprintln!(
        "beside the cache: {} KiB",
        status.daemon.rss_beside_cache_bytes >> 10
    );
}
