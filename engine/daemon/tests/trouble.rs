// SPDX-License-Identifier: Apache-2.0
//! Trouble below and shortage within: a disk that fails, a cache with every slot pinned.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use fuser::{
    Config, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, MountOption,
    OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use rushes_shm::client::{Client, ReadError};
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use support::fuse::attributes;
use support::raw::Raw;
use support::*;

const FILE_BYTES: u64 = 16 << 20;
const BAD: std::ops::Range<u64> = (4 << 20)..(5 << 20);

/// One file of a pattern with a range that cannot be read.
struct Scratched(Vec<u8>);

impl Filesystem for Scratched {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent.0 == 1 && name == "take.mov" {
            reply.entry(
                &Duration::from_secs(9),
                &attributes(2, FILE_BYTES),
                Generation(0),
            );
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(9), &attributes(inode.0, FILE_BYTES));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = (offset + u64::from(size)).min(FILE_BYTES);
        if offset < BAD.end && BAD.start < end {
            reply.error(Errno::EIO);
        } else {
            reply.data(&self.0[offset.min(end) as usize..end as usize]);
        }
    }
}

#[test]
fn a_read_error_reaches_its_reader_and_the_stream_goes_on() {
    if !is_root("mounting FUSE") {
        return;
    }
    let whole = pattern(9, FILE_BYTES as usize);
    let folder = Folder::below(&std::env::temp_dir());
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName(String::from("rushes-scratched"))];
    let mounted = match fuser::spawn_mount(Scratched(whole.clone()), &folder.0, &config) {
        Ok(mounted) => mounted,
        Err(error) => {
            assert!(
                std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
                "FUSE: {error}"
            );
            eprintln!("SKIPPED: FUSE cannot be mounted: {error}");
            return;
        }
    };
    {
        let daemon = Daemon::start(&folder.0, "");
        let mut client = daemon.connect();
        let (_file, handle) = open(&mut client, &folder.0, "take.mov");
        let mut failed = 0;
        let mut buffer = vec![0; 262_144];
        for at in (0..FILE_BYTES).step_by(262_144) {
            match client.read(handle, &mut buffer, at) {
                Ok(count) => {
                    let at = at as usize;
                    assert_eq!(count, buffer.len());
                    assert!(buffer == whole[at..at + count], "wrong bytes at {at}");
                }
                Err(ReadError::Errno(5)) => {
                    // A read may fail if one request fetched its bytes together with bad ones.
                    assert!(at + 262_144 > BAD.start && at < BAD.end, "EIO at {at}");
                    failed += 1;
                }
                other => panic!("{other:?} at {at}"),
            }
        }
        assert_eq!(failed, 4, "one megabyte in quarters");
        let status = daemon.status();
        assert_eq!(status.sessions.len(), 1);
        assert_eq!(status.daemon.expelled_session_count, 0);
    }
    drop(mounted);
}

/// The slots that one session may pin in the cache of these tests: half of its 64.
const PIN_COUNT_MAX: u64 = 32;
/// How long the test watches a client that must wait.
const WATCHED: Duration = Duration::from_millis(300);

/// A session that reads a megabyte at each of these places and unpins nothing; the place is the
/// read's number.
fn hoarder(daemon: &Daemon, file: &File, places: Range<u64>) -> Raw {
    let mut raw = Raw::connect(&daemon.session_socket());
    raw.open(1, file);
    for place in places {
        raw.read(place, 1, place << 20, 1 << 20);
        assert_eq!(raw.reply(), (place, 0, 1));
    }
    raw
}

#[test]
fn one_client_holds_half_the_cache_at_most_and_waits_alone() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let small = pattern(5, 2 << 20);
    std::fs::write(share.0.join("big.mov"), pattern(4, 40 << 20)).unwrap();
    std::fs::write(share.0.join("small.mov"), &small).unwrap();
    let file = File::open(share.0.join("big.mov")).unwrap();
    let mut greedy = hoarder(&daemon, &file, 0..PIN_COUNT_MAX);
    assert_eq!(u64::from(daemon.status().cache.pinned_count), PIN_COUNT_MAX);

    greedy.read(PIN_COUNT_MAX, 1, PIN_COUNT_MAX << 20, 1000);
    let watched = Instant::now() + WATCHED;
    let mut other = daemon.connect();
    let (_file, handle) = open(&mut other, &share.0, "small.mov");
    let mut count = 0;
    while Instant::now() < watched || count == 0 {
        let at = count * 77_777 % (1 << 20);
        let bytes = read(&mut other, handle, at as u64, 100_000);
        assert!(bytes == small[at..at + 100_000], "wrong bytes at {at}");
        count += 1;
    }
    assert!(!greedy.has_reply(), "more than half the cache was given");

    greedy.read_end(0);
    assert_eq!(greedy.reply(), (PIN_COUNT_MAX, 0, 1));
    drop(greedy);
    daemon.status_when("everything given back", |status| {
        status.cache.pinned_count == 0
    });
}

#[test]
fn with_every_buffer_in_others_hands_a_client_waits_and_then_goes_on() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let whole = pattern(4, 80 << 20);
    std::fs::write(share.0.join("big.mov"), &whole).unwrap();
    std::fs::write(share.0.join("small.mov"), pattern(5, 2 << 20)).unwrap();
    let file = File::open(share.0.join("big.mov")).unwrap();
    let first = hoarder(&daemon, &file, 0..PIN_COUNT_MAX);
    let second = hoarder(&daemon, &file, PIN_COUNT_MAX..2 * PIN_COUNT_MAX);
    let cache = daemon.status().cache;
    assert_eq!(cache.pinned_count, cache.buffer_count, "{cache:?}");

    // Another client has to wait; it may take long, but never gets wrong bytes.
    let (socket, folder) = (daemon.session_socket(), share.0.clone());
    let (done, is_done) = channel();
    let reader = std::thread::spawn(move || {
        let mut client = Client::connect(&socket, &who("media")).unwrap();
        let (_file, handle) = open(&mut client, &folder, "small.mov");
        for round in 0..20u64 {
            let at = round * 100_000;
            let bytes = read(&mut client, handle, at, 100_000);
            let expect = &pattern(5, 2 << 20)[at as usize..at as usize + 100_000];
            assert!(bytes == expect, "round {round}");
            done.send(round).unwrap();
        }
    });
    assert_eq!(
        is_done.recv_timeout(WATCHED),
        Err(RecvTimeoutError::Timeout)
    );
    // The daemon answers meanwhile.
    daemon.status();
    drop((first, second));
    while is_done.recv_timeout(Duration::from_secs(20)).unwrap() != 19 {}
    reader.join().unwrap();
    let mut late = daemon.connect();
    let (_file, handle) = open(&mut late, &share.0, "big.mov");
    assert!(read(&mut late, handle, 70 << 20, 1000) == whole[70 << 20..(70 << 20) + 1000]);
    drop(late);
    daemon.status_when("everything given back", |status| {
        status.cache.pinned_count == 0
    });
}

#[test]
fn a_truncated_file_ends_where_it_ends() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let path: PathBuf = share.0.join("x.mov");
    std::fs::write(&path, pattern(6, 8 << 20)).unwrap();
    let mut client = daemon.connect();
    let (_file, handle) = open(&mut client, &share.0, "x.mov");
    assert!(read(&mut client, handle, 0, 1 << 20) == pattern(6, 1 << 20));
    // Another process truncates it while the daemon reads ahead of its reader.
    let cut = std::process::Command::new("truncate")
        .args(["-s", "3000000"])
        .arg(&path)
        .status();
    assert!(cut.unwrap().success());
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let rest = read(&mut client, handle, 2_900_000, 1 << 20);
        if rest.len() == 100_000 {
            assert!(rest == pattern(6, 3_000_000)[2_900_000..]);
            break;
        }
        assert!(Instant::now() < end, "{} bytes are left", rest.len());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(read(&mut client, handle, 4 << 20, 10).len(), 0);
}
