// SPDX-License-Identifier: Apache-2.0
//! Hostile peers, one by one: the daemon refuses each or gives it nothing, and an honest client
//! reads on undisturbed.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use fuser::{
    Config, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, MountOption,
    OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use rushes_core::format::{PLAIN, RING_ENTRIES, VERSION, message, op};
use rushes_shm::client::{Client, ReadError};
use rushes_sys::{Access, Mapping, socket};
use rustix::fs::{Mode, OFlags, open as open_fd};
use rustix::mount::{UnmountFlags, unmount};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::fuse::attributes;
use support::raw::{Answer, Raw, answer, connect_packet, head, open_packet, say};
use support::*;

/// A daemon, and an honest client that reads all the time and must not be disturbed.
struct World {
    daemon: Daemon,
    share: Folder,
    stop: Arc<AtomicBool>,
    bystander: Option<std::thread::JoinHandle<u64>>,
}

impl World {
    fn new() -> World {
        let share = Folder::below(&std::env::temp_dir());
        let daemon = Daemon::start(&share.0, "");
        let whole = pattern(7, 3 << 20);
        std::fs::write(share.0.join("honest.mov"), &whole).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (socket, folder) = (daemon.session_socket(), share.0.clone());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let bystander = std::thread::spawn(move || {
            let mut client = Client::connect(&socket, &who("media")).unwrap();
            let (file, handle) = open(&mut client, &folder, "honest.mov");
            let mut count = 0;
            while !stopped.load(Ordering::Relaxed) || count == 0 {
                let offset = (count * 777_777) % (2 << 20);
                let mut bytes = vec![0; 300_000];
                match client.read(handle, &mut bytes, offset) {
                    Ok(count) => assert_eq!(count, 300_000, "at {offset}"),
                    // It reads here and there, without a contract: bytes that are not cached any
                    // more it reads itself.
                    Err(ReadError::Plain) => file.read_exact_at(&mut bytes, offset).unwrap(),
                    Err(error) => panic!("{error:?} at {offset}: {:?}", client.end()),
                }
                assert!(
                    bytes == whole[offset as usize..offset as usize + 300_000],
                    "the bystander read wrong bytes at {offset}"
                );
                count += 1;
                let _ = ready.send(());
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(client.alive(), "the bystander was put out");
            count
        });
        is_ready.recv().unwrap();
        World {
            daemon,
            share,
            stop,
            bystander: Some(bystander),
        }
    }

    fn raw(&self) -> Raw {
        Raw::connect(&self.daemon.session_socket())
    }

    fn say(&self, packet: &[u8]) -> Answer {
        say(&self.daemon.session_socket(), packet, &[])
    }

    fn expelled(&self) -> u64 {
        self.daemon.status().daemon.expelled_session_count
    }

    /// Ends the bystander, which must have read without an error.
    fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let count = self.bystander.take().unwrap().join().unwrap();
        assert!(count > 0);
    }
}

fn refused(answer: &Answer, number: u32, word: &str) {
    match answer {
        Answer::Refused { errno, reason } if *errno == number && reason.contains(word) => {}
        other => panic!("expected errno {number} and {word:?}, read {other:?}"),
    }
}

#[test]
fn nonsense_instead_of_a_greeting_is_turned_away_with_a_sentence() {
    let world = World::new();
    refused(&world.say(b"GET / HTTP/1.1\r\n\r\n"), 71, "expected");
    refused(&world.say(&[0]), 71, "expected a head");
    refused(&world.say(&vec![0xff; 6000]), 71, "expected at most");
    refused(&world.say(&head(message::CONNECT)), 71, "expected 224");
    refused(&world.say(&head(99)), 71, "message 99");
    let mut newer = connect_packet("media");
    newer[4..8].copy_from_slice(&(VERSION + 1).to_le_bytes());
    refused(
        &world.say(&newer),
        71,
        "install door and daemon of one release",
    );
    refused(
        &world.say(&connect_packet("nosuch")),
        2,
        "expected one of: media",
    );
    let mut control = connect_packet("media");
    control[24] = 7;
    refused(&world.say(&control), 71, "printable");
    let null = File::open("/dev/null").unwrap();
    let with_fd = say(
        &world.daemon.session_socket(),
        &connect_packet("media"),
        &[null.as_fd()],
    );
    refused(&with_fd, 71, "expected none");
    let status = world.daemon.status();
    assert_eq!(status.daemon.refused_session_count, 9);
    assert_eq!(status.sessions.len(), 1, "only the bystander");
    world.end();
}

#[test]
fn who_is_not_root_gets_no_session() {
    if !is_root("changing the user of a thread") {
        return;
    }
    let world = World::new();
    let path = world.daemon.session_socket();
    let as_nobody = |path: std::path::PathBuf| {
        std::thread::spawn(move || {
            let nobody = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let socket = socket::connect_to(&path)?;
            Ok::<_, std::io::Error>(answer(&socket, Duration::from_secs(10)))
        })
        .join()
        .unwrap()
    };
    // The socket's mode is the first barrier, the credentials are the second.
    let error = as_nobody(path.clone()).expect_err("mode 0600");
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    std::fs::set_permissions(&path, everybody).unwrap();
    refused(&as_nobody(path).unwrap(), 1, "expected root");
    assert_eq!(world.daemon.status().daemon.refused_session_count, 1);
    world.end();
}

#[test]
fn who_says_nothing_is_asked_to_leave() {
    let world = World::new();
    let silent: Vec<OwnedFd> = (0..64)
        .map(|_| socket::connect_to(&world.daemon.session_socket()).unwrap())
        .collect();
    // All places for silent sockets are taken, but only until their patience ends.
    let start = Instant::now();
    let late = answer(&silent[0], Duration::from_secs(20));
    refused(&late, 110, "expected CONNECT");
    assert!(start.elapsed() < Duration::from_secs(10));
    for socket in &silent[1..] {
        assert!(matches!(
            answer(socket, Duration::from_secs(20)),
            Answer::Refused { errno: 110, .. }
        ));
    }
    drop(world.daemon.connect());
    world.end();
}

#[test]
fn broken_packets_in_a_session_end_it() {
    let world = World::new();
    let null = File::open("/dev/null").unwrap();
    let fd = null.as_fd();
    let before = world.expelled();
    let mut cases = 0;
    let mut check = |what: &str, bytes: &[u8], fd_count: usize| {
        let raw = world.raw();
        raw.send(bytes, &vec![fd; fd_count]);
        raw.expect_put_out(what);
        cases += 1;
    };
    check("noise", b"\x01\x02\x03", 0);
    check("a second greeting", &connect_packet("media"), 0);
    check("an OPEN without a descriptor", &open_packet(1, b"x"), 0);
    check("an OPEN with two descriptors", &open_packet(1, b"x"), 2);
    check(
        "an OPEN with a path upwards",
        &open_packet(1, b"../etc/passwd"),
        1,
    );
    check(
        "an OPEN with an absolute path",
        &open_packet(1, b"/etc/passwd"),
        1,
    );
    check("an OPEN with no path", &open_packet(1, b""), 1);
    check("an OPEN with a NUL", &open_packet(1, b"a\0b"), 1);
    check(
        "a path longer than any",
        &open_packet(1, &vec![b'a'; 4097]),
        1,
    );
    let mut lying = open_packet(1, b"abc");
    lying[20..24].copy_from_slice(&4u32.to_le_bytes());
    check("a length that lies", &lying, 1);
    let part = |index: u32, count: u32| {
        let mut packet = open_packet(1, b"abc");
        packet[32..36].copy_from_slice(&index.to_le_bytes());
        packet[36..40].copy_from_slice(&count.to_le_bytes());
        packet
    };
    check("a part of nothing", &part(0, 0), 1);
    check("a part behind the last", &part(4, 4), 1);
    check("more parts than there can be", &part(7, u32::MAX), 1);
    check("a part in a session that is no pool's", &part(1, 4), 1);

    let raw = world.raw();
    let honest = File::open(world.share.0.join("honest.mov")).unwrap();
    raw.open(1, &honest);
    raw.open(1, &honest);
    raw.expect_put_out("one handle twice");
    assert_eq!(world.expelled() - before, cases + 1);
    world.end();
}

#[test]
fn broken_rings_end_the_session() {
    let world = World::new();
    let honest = File::open(world.share.0.join("honest.mov")).unwrap();
    let before = world.expelled();
    let mut cases = 0;
    let mut check = |what: &str, harm: &dyn Fn(&mut Raw)| {
        let mut raw = world.raw();
        raw.open(1, &honest);
        // The session is served before the harm begins.
        raw.read(1, 1, 0, 100);
        assert_eq!(raw.reply(), (1, 0, 1), "{what}");
        harm(&mut raw);
        raw.expect_put_out(what);
        cases += 1;
    };
    let read = u64::from(op::READ) | 1 << 32;
    check("a tail far ahead", &|raw| raw.publish(1_000_000));
    check("a tail behind", &|raw| raw.publish(0));
    check("an operation that is none", &|raw| {
        raw.request([2, 77, 0, 0, 0, 0, 0, 0]);
    });
    check("a read of nothing", &|raw| raw.read(2, 1, 0, 0));
    check("a read too long", &|raw| raw.read(2, 1, 0, 1 << 40));
    check("a read past the world", &|raw| {
        raw.read(2, 1, u64::MAX - 5, 100);
    });
    check("a reserved word", &|raw| {
        raw.request([2, read, 0, 100, 0, 0, 0, 9]);
    });
    check("giving back what was never had", &|raw| {
        raw.request([55, u64::from(op::READ_END), 0, 0, 0, 0, 0, 0]);
    });
    check("giving back twice", &|raw| {
        raw.request([1, u64::from(op::READ_END), 0, 0, 0, 0, 0, 0]);
        raw.request([1, u64::from(op::READ_END), 0, 0, 0, 0, 0, 0]);
    });
    check("one number for two reads", &|raw| raw.read(1, 1, 0, 100));
    check("more reads than a ring holds", &|raw| {
        for id in 10..10 + 2 * u64::from(RING_ENTRIES) {
            raw.read(id, 1, 0, 100);
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    assert_eq!(world.expelled() - before, cases);
    // The slots that they had pinned are free again.
    world
        .daemon
        .status_when("nothing pinned by the dead", |status| {
            status.sessions.len() == 1 && status.cache.pinned_count <= 2
        });
    world.end();
}

#[test]
fn a_read_only_descriptor_gives_no_way_to_write() {
    let world = World::new();
    let path = world.share.0.join("honest.mov");
    let honest = File::open(&path).unwrap();
    let modified = honest.metadata().unwrap().modified().unwrap();
    let before = world.expelled();
    // Every number an operation could have been given, and some that are far off.
    let known = [
        op::READ,
        op::READ_END,
        op::CLOSE,
        op::CHANGED,
        op::GONE,
        op::WRITE_BEGIN,
        op::SYNC,
        op::HOLD,
        op::WAS_COMMITTED,
        op::TIMED,
        op::RESIZED,
    ];
    let numbers = (0..256)
        .chain((8..32).map(|bit| 1u32 << bit))
        .chain([u32::MAX]);
    let unknown: Vec<u32> = numbers.filter(|number| !known.contains(number)).collect();
    for number in &unknown {
        let mut raw = world.raw();
        raw.open(1, &honest);
        raw.request([1, u64::from(*number) | 1 << 32, 0, 4096, 0, 0, 0, 0]);
        // Also the end of a write without a grant.
        raw.expect_put_out(&format!("operation {number}"));
    }
    assert_eq!(world.expelled() - before, unknown.len() as u64);

    // A client that asks for pages to write to gets none.
    let mut raw = world.raw();
    raw.open(1, &honest);
    let write = u64::from(op::WRITE_BEGIN) | 1 << 32;
    raw.request([1, write, 0, 4096, 0, 0, 0, 0]);
    assert_eq!(raw.reply(), (1, PLAIN, 0));

    // Nor through the cache segment, which has the file's bytes.
    let mut raw = world.raw();
    raw.open(1, &honest);
    raw.read(1, 1, 0, 4096);
    assert_eq!(raw.reply(), (1, 0, 1));
    assert!(Mapping::shared(&raw.data, 4096, Access::Read).is_ok());
    let writable = Mapping::shared(&raw.data, 4096, Access::ReadWrite);
    let refused = writable.map(drop).expect_err("a descriptor for reading");
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    let data = File::from(raw.data.try_clone().unwrap());
    assert!(data.write_at(b"harm", 0).is_err());
    assert!(data.set_len(0).is_err());

    assert!(std::fs::read(&path).unwrap() == pattern(7, 3 << 20));
    assert_eq!(honest.metadata().unwrap().modified().unwrap(), modified);
    drop(raw);
    world.end();
}

#[test]
fn strange_descriptors_are_left_to_their_owner() {
    let world = World::new();
    let honest = world.share.0.join("honest.mov");
    let flags = |flags| open_fd(&honest, flags, Mode::empty()).unwrap();
    std::fs::create_dir(world.share.0.join("folder")).unwrap();
    let elsewhere = Folder::below(std::path::Path::new("/dev/shm"));
    std::fs::write(elsewhere.0.join("x"), b"x").unwrap();
    let cases: Vec<(&str, OwnedFd)> = vec![
        ("O_PATH", flags(OFlags::PATH)),
        ("write-only", flags(OFlags::WRONLY)),
        (
            "a folder",
            File::open(world.share.0.join("folder")).unwrap().into(),
        ),
        ("a device", File::open("/dev/zero").unwrap().into()),
        ("a pipe", rustix::pipe::pipe().unwrap().0),
        ("a socket", socket::pair().unwrap().0),
        ("a memory file", rushes_sys::memory_file("m", 4096).unwrap()),
        ("procfs", File::open("/proc/self/maps").unwrap().into()),
        (
            "a file of another mount",
            File::open(elsewhere.0.join("x")).unwrap().into(),
        ),
    ];
    let mut raw = world.raw();
    let before = world.daemon.status().daemon.plain_open_count;
    // The daemon takes the write-only one, and does not read from it.
    let count = cases.len() as u64 - 1;
    for (handle, (what, fd)) in (10..).zip(cases) {
        raw.open(handle, &fd);
        raw.expect_plain(handle, what);
    }
    // A read of a handle that was never opened does not end the session either.
    raw.expect_plain(999, "an unknown handle");
    let status = world.daemon.status();
    assert_eq!(status.daemon.plain_open_count - before, count);
    assert_eq!(status.daemon.expelled_session_count, 0);
    // The session goes on: an ordinary file is served.
    raw.open(500, File::open(&honest).unwrap());
    raw.read(5000, 500, 0, 100);
    assert_eq!(raw.reply(), (5000, 0, 1));
    world.end();
}

#[test]
fn more_handles_than_allowed_are_plain() {
    // A test cannot open as many handles as the bound; engine/shm has a test of that. Here:
    // thousands of handles are neither slow nor kept after the session.
    let world = World::new();
    let honest = File::open(world.share.0.join("honest.mov")).unwrap();
    let mut raw = world.raw();
    for handle in 0..2000 {
        while socket::send(
            &raw.socket,
            &[&open_packet(handle, b"x")],
            &[honest.as_fd()],
        )
        .is_err()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    raw.read(1, 1999, 0, 100);
    assert_eq!(raw.reply(), (1, 0, 1));
    drop(raw);
    world
        .daemon
        .status_when("without the session", |status| status.sessions.len() == 1);
    world.end();
}

#[test]
fn a_client_that_dies_in_the_middle_of_a_read_leaves_nothing_behind() {
    let world = World::new();
    let big = pattern(3, 40 << 20);
    std::fs::write(world.share.0.join("big.mov"), &big).unwrap();
    let file = File::open(world.share.0.join("big.mov")).unwrap();
    for round in 0..20u64 {
        let mut raw = world.raw();
        raw.open(1, &file);
        for id in 0..8 {
            raw.read(id, 1, ((round + id) % 8) * (5 << 20), 4 << 20);
        }
        if round % 2 == 0 {
            raw.reply();
        }
        drop(raw);
    }
    world
        .daemon
        .status_when("nothing held by the dead", |status| {
            status.sessions.len() == 1 && status.cache.pinned_count <= 2
        });
    world.end();
}

/// A file system that answers all requests until `hang` is set, then none.
struct Hanging {
    hang: Arc<AtomicBool>,
}

impl Filesystem for Hanging {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent.0 == 1 && name == "file" {
            reply.entry(&Duration::ZERO, &attributes(2, 4096), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if self.hang.load(Ordering::Relaxed) {
            // Dropped, it would answer EIO; forgotten, it never answers.
            std::mem::forget(reply);
        } else {
            reply.attr(&Duration::ZERO, &attributes(inode.0, 4096));
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        std::mem::forget(reply);
    }
}

/// Breaks the connection of a FUSE mount, so that a program that hangs in it gets an error.
struct Abort(PathBuf);

impl Drop for Abort {
    fn drop(&mut self) {
        // FORCE breaks the connection; DETACH removes the mount although files are open.
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
        let _ = unmount(&self.0, flags);
    }
}

#[test]
fn a_descriptor_of_a_hanging_fuse_hangs_nobody() {
    if !is_root("mounting FUSE") {
        return;
    }
    let world = World::new();
    let hang = Arc::new(AtomicBool::new(false));
    let folder = Folder::below(&std::env::temp_dir());
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName(String::from("rushes-hang"))];
    let mounted = fuser::spawn_mount(Hanging { hang: hang.clone() }, &folder.0, &config);
    let mounted = match mounted {
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
    let file = File::open(folder.0.join("file")).unwrap();
    let abort = Abort(folder.0.clone());
    hang.store(true, Ordering::Relaxed);

    // It does hang: a program that reads attributes waits.
    let asked = file.try_clone().unwrap();
    let victim = std::thread::spawn(move || asked.metadata().map(drop));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!victim.is_finished(), "the file system answered");

    // More than there are workers.
    let mut raw = world.raw();
    for handle in 1..=8 {
        raw.open(handle, &file);
    }
    for handle in 1..=8 {
        raw.expect_plain(handle, "a hanging file");
    }
    assert_eq!(world.daemon.status().daemon.plain_open_count, 8);
    // The workers are free for other clients.
    let mut other = world.daemon.connect();
    let (_file, honest) = open(&mut other, &world.share.0, "honest.mov");
    assert_eq!(read(&mut other, honest, 5, 10), pattern(7, 15)[5..]);

    drop(raw);
    drop(abort);
    assert!(victim.join().unwrap().is_err(), "freed by the abort");
    drop(file);
    drop(mounted);
    world.end();
}
