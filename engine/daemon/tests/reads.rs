// SPDX-License-Identifier: Apache-2.0
//! Bytes through client library, rings, daemon, core, io_uring and disk are the file's bytes.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_shm::client::ReadError;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use support::ext4::Ext4;
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

#[test]
fn bytes_are_the_files_on_ext4_of_its_own() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    bytes_are_the_files(&disk.mount());
    let daemon = Daemon::start(&disk.mount(), "");
    let status = daemon.status();
    assert!(status.shares[0].direct_io);
    assert_eq!(status.shares[0].file_system, "ext4");
    assert!(
        disk.device.ends_with(&status.devices[0].name),
        "{} is {:?}",
        disk.device,
        status.devices
    );
    assert_eq!(status.devices[0].size_bytes, 128 << 20);
}

#[test]
fn writes_beside_the_cache_are_seen_by_the_next_read() {
    let share = Folder::below(&std::env::temp_dir());
    // Without the analyser, which would leave these scattered reads to the kernel's cache.
    let folder = Folder::below(&std::env::temp_dir());
    let text = configuration(&folder.0, &share.0, "")
        .replace("[server]\n", "[server]\nanalyser = false\n");
    std::fs::write(folder.0.join("rushes.toml"), text).unwrap();
    let daemon = Daemon::start_written(folder);
    std::fs::write(share.0.join("x"), pattern(1, 3 << 20)).unwrap();
    let mut reader = daemon.connect();
    let mut writer = daemon.connect();
    let (_file, handle) = open(&mut reader, &share.0, "x");
    assert!(read(&mut reader, handle, 0, 3 << 20) == pattern(1, 3 << 20));
    let native = File::options().write(true).open(share.0.join("x")).unwrap();
    let found = native.metadata().unwrap();
    for round in 2..30u64 {
        let fresh = pattern(round, 70_001);
        let offset = round * 50_000;
        native.write_all_at(&fresh, offset).unwrap();
        writer.changed(found.dev(), found.ino(), offset, fresh.len() as u64);
        assert!(
            read(&mut reader, handle, offset, fresh.len()) == fresh,
            "round {round}"
        );
    }
    // Longer, then shorter.
    native.write_all_at(b"tail", 5 << 20).unwrap();
    writer.changed(found.dev(), found.ino(), 5 << 20, 4);
    assert_eq!(read(&mut reader, handle, (5 << 20) - 2, 10), b"\0\0tail");
    native.set_len(1000).unwrap();
    writer.changed(found.dev(), found.ino(), 1000, u64::MAX);
    assert_eq!(read(&mut reader, handle, 990, 100).len(), 10);
    assert_eq!(read(&mut reader, handle, 2 << 20, 10).len(), 0);
}

#[test]
fn a_change_by_a_stranger_is_noticed() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    if !daemon.status().shares[0].foreign_changes_noticed {
        assert!(
            !is_root("fanotify"),
            "root has no fanotify here: {:?}",
            daemon.status()
        );
        return;
    }
    let path = share.0.join("x");
    std::fs::write(&path, vec![b'a'; 2 << 20]).unwrap();
    let mut reader = daemon.connect();
    let (_file, handle) = open(&mut reader, &share.0, "x");
    assert_eq!(read(&mut reader, handle, 0, 4), b"aaaa");
    // Another process: the daemon leaves out its own.
    let script = format!(
        "printf bbbb | dd of='{}' conv=notrunc status=none",
        path.display()
    );
    assert!(
        Command::new("sh")
            .arg("-c")
            .arg(script)
            .status()
            .unwrap()
            .success()
    );
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while read(&mut reader, handle, 0, 4) != b"bbbb" {
        assert!(std::time::Instant::now() < end, "still the old bytes");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_file_replaced_underneath_is_another_file() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    std::fs::write(share.0.join("x"), pattern(1, 200_000)).unwrap();
    let mut reader = daemon.connect();
    let (_old, before) = open(&mut reader, &share.0, "x");
    assert!(read(&mut reader, before, 0, 200_000) == pattern(1, 200_000));
    std::fs::write(share.0.join("y"), pattern(2, 100_000)).unwrap();
    std::fs::rename(share.0.join("y"), share.0.join("x")).unwrap();
    let (_new, after) = open(&mut reader, &share.0, "x");
    assert!(read(&mut reader, after, 0, 200_000) == pattern(2, 100_000));
    // A client with the old file open still reads the old one.
    assert!(read(&mut reader, before, 100_000, 100_000) == pattern(1, 200_000)[100_000..]);
}

#[test]
fn a_header_tells_the_rate_without_a_rule() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    // A WAV of four seconds at 1,536,000 bytes a second.
    let rate = 1_536_000u32;
    let data = 4 * rate;
    let mut wav = Vec::new();
    wav.extend(b"RIFF");
    wav.extend((36 + data).to_le_bytes());
    wav.extend(b"WAVEfmt ");
    wav.extend(16u32.to_le_bytes());
    wav.extend(1u16.to_le_bytes());
    wav.extend(8u16.to_le_bytes());
    wav.extend(48_000u32.to_le_bytes());
    wav.extend(rate.to_le_bytes());
    wav.extend(32u16.to_le_bytes());
    wav.extend(32u16.to_le_bytes());
    wav.extend(b"data");
    wav.extend(data.to_le_bytes());
    wav.extend(pattern(5, data as usize));
    std::fs::write(share.0.join("mix.wav"), &wav).unwrap();
    let mut client = daemon.connect();
    let (_file, handle) = open(&mut client, &share.0, "mix.wav");
    assert!(read(&mut client, handle, 0, 100_000) == wav[..100_000]);
    let mut at = 100_000;
    let status = daemon.status_when("a rate from the header", |status| {
        if at + 60_000 < wav.len() {
            read(&mut client, handle, at as u64, 60_000);
            at += 60_000;
        }
        status
            .streams
            .iter()
            .any(|s| s.rate_source.as_deref() == Some("header"))
    });
    let stream = &status.streams[0];
    let told = stream.rate_bytes_per_s.unwrap();
    assert!(told.abs_diff(u64::from(rate)) < 1000, "{told}");
}

#[test]
fn frames_of_a_sequence_are_there_before_they_are_opened() {
    let share = Folder::below(&std::env::temp_dir());
    let rule = "[[rule]]\nmatch = \"**/*.dpx\"\nframes_per_second = 24\n";
    let daemon = Daemon::start(&share.0, rule);
    std::fs::create_dir(share.0.join("shot")).unwrap();
    let frame = |number: u64| pattern(number, 300_000);
    let name = |number: u64| format!("shot/a.{number:04}.dpx");
    for number in 0..60 {
        std::fs::write(share.0.join(name(number)), frame(number)).unwrap();
    }
    // Each open must give its own frame's bytes, whether they were read ahead or not.
    let mut client = daemon.connect();
    for number in 0..60 {
        let (_file, handle) = open(&mut client, &share.0, &name(number));
        assert!(
            read(&mut client, handle, 0, 400_000) == frame(number),
            "frame {number}"
        );
        client.close(handle);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let status = daemon.status();
    let stream = status
        .streams
        .iter()
        .find(|stream| stream.sequence)
        .unwrap_or_else(|| panic!("no sequence in {:#?}", status.streams));
    assert!(
        stream.hit_count > 20,
        "{} of {} reads found their frame in the cache",
        stream.hit_count,
        stream.read_count
    );
}

#[test]
fn an_unread_handle_costs_nothing_and_a_closed_one_is_gone() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    std::fs::write(share.0.join("x"), b"abc").unwrap();
    let mut client = daemon.connect();
    for _ in 0..500 {
        let (_file, handle) = open(&mut client, &share.0, "x");
        client.close(handle);
    }
    let (_file, handle) = open(&mut client, &share.0, "x");
    assert_eq!(read(&mut client, handle, 0, 10), b"abc");
    // Workers open files in parallel: the last may be found before one that is closed already.
    let status = daemon.status_when("one handle alone", |status| {
        status.sessions[0].handle_count == 1
    });
    assert_eq!(status.daemon.expelled_session_count, 0);
}

#[test]
fn a_descriptor_without_read_access_is_left_to_its_owner() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    std::fs::write(share.0.join("x"), b"abc").unwrap();
    let mut client = daemon.connect();
    let file = File::options().write(true).open(share.0.join("x")).unwrap();
    let handle = client.open(&file, b"x").unwrap();
    assert!(matches!(
        client.read(handle, &mut [0; 3], 0),
        Err(ReadError::Plain)
    ));
}

#[test]
fn a_daemon_with_nothing_to_do_is_heard_to_live() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let client = daemon.connect();
    let before = client.heartbeat();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while client.heartbeat() == before {
        assert!(
            std::time::Instant::now() < end,
            "no heartbeat in ten seconds"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
