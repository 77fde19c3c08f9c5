// SPDX-License-Identifier: Apache-2.0
//! Bytes through client library, rings, daemon, core, io_uring and disk are the file's bytes.

mod support;

use std::path::Path;
use support::*;

fn bytes_are_the_files(share: &Path) {
    let daemon = Daemon::start(share, "");
    let whole = pattern(1, (10 << 20) + 12_345);
    std::fs::write(share.join("take.mov"), &whole).unwrap();
    let mut client = daemon.connect();
    let (_file, handle) = open(&mut client, share, "take.mov");

    // In order, as a player does.
    let mut at = 0;
    while at < whole.len() {
        let length = 500_000.min(whole.len() - at);
        let read = read(&mut client, handle, at as u64, 500_000);
        assert_eq!(read.len(), length, "at {at}");
        assert!(read == whole[at..at + length], "wrong bytes at {at}");
        at += 500_000;
    }
    // Here and there, odd lengths, across buffers, up to and past the end.
    for (offset, length) in [
        (1, 1),
        (4095, 2),
        ((1 << 20) - 1, 2),
        ((3 << 20) + 77, (5 << 20) + 3),
        (whole.len() - 10, 100),
        (whole.len(), 10),
        (whole.len() + 5_000_000, 10),
    ] {
        let read = read(&mut client, handle, offset as u64, length);
        let end = whole.len().min(offset + length);
        assert!(
            read == whole[offset.min(end)..end],
            "{length} at {offset}: {} bytes",
            read.len()
        );
    }
    let status = daemon.status();
    assert_eq!(status.sessions.len(), 1);
    assert!(
        status.streams.iter().any(|s| s.path == "take.mov"),
        "{status:#?}"
    );
    drop(client);
    daemon.status_when("without the session", |status| status.sessions.is_empty());
}

#[test]
fn bytes_are_the_files_on_tmpfs_and_it_says_that_it_is_buffered() {
    let share = Folder::below(Path::new("/dev/shm"));
    bytes_are_the_files(&share.0);
    let daemon = Daemon::start(&share.0, "");
    let status = daemon.status();
    assert!(!status.shares[0].direct_io);
    assert_eq!(status.shares[0].file_system, "tmpfs");
    assert!(
        status
            .daemon
            .notes
            .iter()
            .any(|note| note.contains("served buffered")),
        "{:?}",
        status.daemon.notes
    );
}

#[test]
fn bytes_are_the_files_in_the_temporary_folder() {
    let share = Folder::below(&std::env::temp_dir());
    bytes_are_the_files(&share.0);
}
