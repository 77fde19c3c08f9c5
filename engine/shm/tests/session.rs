// SPDX-License-Identifier: Apache-2.0
//! Client library and server end against each other, through real sockets and memory.
#![allow(unsafe_code, clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_core::units::Duration;
use rushes_shm::Connect;
use rushes_shm::client::{Client, FileHandle, ReadError};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use support::{Echo, EchoSize, Folder, Numbers, Running, SMALL};

/// A machine that is busy with other tests may keep the server from answering in 50 ms.
fn connect(path: &Path) -> Client {
    Client::connect_within(path, &who(), Duration::from_s(10)).unwrap()
}

fn who() -> Connect {
    Connect {
        door: 3,
        share: "media".into(),
        user: "eva".into(),
        client: "test".into(),
        ..Connect::default()
    }
}

fn check_read(client: &mut Client, file: FileHandle, bytes: &[u8], offset: u64, length: usize) {
    let mut buffer = vec![0xee; length + 16];
    let count = client.read(file, &mut buffer[..length], offset).unwrap();
    let start = bytes.len().min(offset as usize);
    let expected = &bytes[start..bytes.len().min(start + length)];
    assert_eq!(count, expected.len(), "{length} at {offset}");
    assert!(buffer[..count] == *expected, "{length} at {offset}");
    assert!(buffer[length..].iter().all(|&byte| byte == 0xee));
}

#[test]
fn reads_of_every_size_and_place_give_the_files_bytes() {
    for sweeps in [false, true] {
        let folder = Folder::new(&format!("sizes-{sweeps}"));
        let (file, bytes) = folder.footage("clip.mov", 1_000_003);
        let server = Running::start(&folder.socket(), EchoSize { sweeps, ..SMALL });
        let mut client = connect(&folder.socket());
        let handle = client.open(&file, b"clip.mov").unwrap();
        for (offset, length) in [
            (0, 1),
            (4095, 2),
            (0, 4096),
            (1, 4096),
            (0, 40_000),
            (4095, 40_001),
            (0, 1_000_003),
            (1_000_002, 10),
            (1_000_003, 10),
            (5_000_000, 10),
            (999_000, 500_000),
        ] {
            check_read(&mut client, handle, &bytes, offset, length);
        }
        let mut numbers = Numbers(7);
        for _ in 0..300 {
            let offset = numbers.below(1_100_000);
            let length = numbers.below(150_000) as usize + 1;
            check_read(&mut client, handle, &bytes, offset, length);
        }
        client.close(handle);
        assert_eq!(client.read(handle, &mut [0; 4], 0), Err(ReadError::Plain));
        drop(client);
        let mut echo = server.stop();
        echo.turn(0).unwrap();
        assert_eq!((echo.free_count(), echo.session_count()), (64, 0));
        assert!(echo.faults.is_empty(), "{:?}", echo.faults);
    }
}

#[test]
fn many_reads_at_once_are_joined_whatever_order_they_come_in() {
    let folder = Folder::new("many");
    let (file, bytes) = folder.footage("clip.mov", 2_000_000);
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"clip.mov").unwrap();
    let mut numbers = Numbers(11);
    for _ in 0..20 {
        // Up to 60 reads of up to 50 parts: far more than the ring holds at once.
        let mut under_way: HashMap<usize, (u64, Vec<u8>)> = HashMap::new();
        for n in 0..60usize {
            let offset = numbers.below(1_999_999);
            let mut buffer = vec![0; numbers.below(2_000_000 / 4) as usize];
            // SAFETY: the buffer's memory stays where it is in the map until the read is reported.
            let ticket =
                unsafe { client.read_send(handle, buffer.as_mut_ptr(), buffer.len(), offset, n) };
            assert!(ticket.is_some());
            under_way.insert(n, (offset, buffer));
        }
        while !under_way.is_empty() {
            wait_readable(&client);
            while let Some(finished) = client.poll() {
                let (offset, buffer) = under_way.remove(&finished.private_data).unwrap();
                let start = offset as usize;
                let expected = &bytes[start..bytes.len().min(start + buffer.len())];
                assert_eq!(finished.result, Ok(expected.len()));
                assert!(buffer[..expected.len()] == *expected);
            }
        }
    }
    drop(client);
    let mut echo = server.stop();
    echo.turn(0).unwrap();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
    assert_eq!(echo.free_count(), 64);
}

/// As an event loop does; ten seconds without a bell is a lost wake-up.
fn wait_readable(client: &Client) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let fds = client.event_fds();
    let mut fds = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
    let span = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    assert!(poll(&mut fds, Some(&span)).unwrap() > 0, "nobody rang");
}

#[test]
fn many_clients_with_few_buffers_all_get_their_bytes() {
    let folder = Folder::new("few");
    let server = Running::start(
        &folder.socket(),
        EchoSize {
            slot_count: 16,
            ..SMALL
        },
    );
    std::thread::scope(|scope| {
        for n in 0..6u64 {
            let (file, bytes) = folder.footage(&format!("clip{n}"), 300_000 + n as usize);
            let socket = folder.socket();
            scope.spawn(move || {
                let mut client = connect(&socket);
                let handle = client.open(&file, b"clip").unwrap();
                let mut numbers = Numbers(n);
                for _ in 0..100 {
                    let offset = numbers.below(300_000);
                    check_read(&mut client, handle, &bytes, offset, 50_000);
                }
            });
        }
    });
    let mut echo = server.stop();
    echo.turn(0).unwrap();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
    assert_eq!(echo.free_count(), 16);
}

#[test]
fn cancelled_read_leaves_its_buffer_alone_and_its_slots_come_back() {
    let folder = Folder::new("cancel");
    let (file, bytes) = folder.footage("clip.mov", 500_000);
    let mut echo = Echo::new(&folder.socket(), SMALL).unwrap();
    let mut client = connect_beside(&mut echo, &folder);
    let handle = client.open(&file, b"clip.mov").unwrap();
    let mut buffers = [vec![0xaa; 300_000], vec![0xaa; 10_000], vec![0xaa; 100_000]];
    let tickets = buffers.each_mut().map(|buffer| {
        // SAFETY: the buffers outlive the reads.
        unsafe { client.read_send(handle, buffer.as_mut_ptr(), buffer.len(), 0, 0) }.unwrap()
    });
    echo.turn(0).unwrap();
    client.cancel_request(tickets[0]);
    client.cancel_request(tickets[2]);
    client.cancel_request(tickets[2]);
    let mut seen = 0;
    for _ in 0..100 {
        while let Some(finished) = client.poll() {
            assert_eq!((finished.ticket, finished.result), (tickets[1], Ok(10_000)));
            seen += 1;
        }
        echo.turn(0).unwrap();
    }
    assert_eq!(seen, 1);
    assert!(
        buffers[0]
            .iter()
            .chain(&buffers[2])
            .all(|&byte| byte == 0xaa)
    );
    assert!(buffers[1] == bytes[..10_000]);
    assert_eq!(echo.free_count(), 64);
    // A file closed with reads under way: the client forgets them, then closes it at the server.
    // SAFETY: the buffer outlives the reads.
    unsafe { client.read_send(handle, buffers[0].as_mut_ptr(), 300_000, 0, 0) }.unwrap();
    client.close(handle);
    for _ in 0..100 {
        assert_eq!(client.poll(), None);
        echo.turn(0).unwrap();
    }
    assert!(buffers[0].iter().all(|&byte| byte == 0xaa));
    assert_eq!(echo.free_count(), 64);
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

/// Connect while this thread also plays the server.
fn connect_beside(echo: &mut Echo, folder: &Folder) -> Client {
    let socket = folder.socket();
    let connecting = std::thread::spawn(move || SendBox(connect(&socket)));
    while !connecting.is_finished() {
        echo.turn(1).unwrap();
    }
    connecting.join().unwrap().0
}

/// A client belongs to one thread at a time; here it moves to another before its first use.
struct SendBox(Client);
// SAFETY: the making thread gives it up; nothing in it is tied to that thread.
unsafe impl Send for SendBox {}

#[test]
fn lease_shows_the_files_bytes_until_it_is_given_back() {
    let folder = Folder::new("lease");
    let (file, bytes) = folder.footage("clip.mov", 100_000);
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"clip.mov").unwrap();
    let mut position = 0;
    while position < bytes.len() {
        let lease = client
            .lease(handle, bytes.len() - position, position as u64)
            .unwrap();
        let seen: Vec<u8> = lease
            .pieces
            .iter()
            // SAFETY: pinned until the lease is ended below.
            .flat_map(|(start, length)| unsafe {
                std::slice::from_raw_parts(start.as_ptr(), *length)
            })
            .copied()
            .collect();
        assert_eq!(seen.len(), lease.length);
        assert!(seen == bytes[position..position + seen.len()]);
        position += seen.len();
        client.lease_end(lease.id);
        client.lease_end(lease.id);
    }
    let end = client.lease(handle, 10, bytes.len() as u64).unwrap();
    assert_eq!((end.length, end.pieces.len()), (0, 0));
    drop(client);
    let mut echo = server.stop();
    echo.turn(0).unwrap();
    assert_eq!(echo.free_count(), 64);
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

#[test]
fn changes_are_acknowledged_among_reads_under_way() {
    let folder = Folder::new("changed");
    let (file, bytes) = folder.footage("clip.mov", 400_000);
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"clip.mov").unwrap();
    let mut buffer = vec![0; 400_000];
    for n in 0..50 {
        // SAFETY: the buffer outlives the read.
        unsafe { client.read_send(handle, buffer.as_mut_ptr(), buffer.len(), 0, 5) }.unwrap();
        client.changed(7, n, 0, u64::MAX);
        client.gone(8, n);
        loop {
            // The reply to the read may have come while we waited for the other: it must ring
            // again.
            wait_readable(&client);
            if let Some(finished) = client.poll() {
                assert_eq!(finished.result, Ok(400_000));
                break;
            }
        }
        assert!(buffer == bytes);
        buffer.fill(0);
    }
    drop(client);
    let echo = server.stop();
    let expected: Vec<(u64, u64)> = (0..50).flat_map(|n| [(7, n), (8, n)]).collect();
    assert_eq!(echo.notices, expected);
}

#[test]
fn errors_of_the_file_reach_the_reader() {
    let folder = Folder::new("errors");
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    // Reading a folder is an error of the file, not of the session.
    let handle = client
        .open(File::open(&folder.0).unwrap(), b"clip.mov")
        .unwrap();
    let is_directory = Err(ReadError::Errno(21));
    assert_eq!(client.read(handle, &mut [0; 100_000], 0), is_directory);
    assert_eq!(
        client.read(handle, &mut [0; 10], u64::MAX - 20),
        Err(ReadError::Plain)
    );
    assert_eq!(client.open(server_file(&folder), b"../clip.mov"), None);
    assert!(client.alive());
    let echo = server.stop();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

fn server_file(folder: &Folder) -> File {
    folder.footage("other", 10).0
}

// ---- The daemon dies ----

#[test]
fn no_daemon_is_said_at_once() {
    let folder = Folder::new("absent");
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let Err(error) = Client::connect(&folder.socket(), &who()) else {
        panic!()
    };
    assert!(said(&error).contains("no daemon"), "{error}");
    // A socket that a dead daemon left.
    drop(std::os::unix::net::UnixListener::bind(folder.socket()).unwrap());
    assert!(Client::connect(&folder.socket(), &who()).is_err());
}

#[test]
fn daemon_that_does_not_answer_is_given_up() {
    let folder = Folder::new("silent");
    let echo = Echo::new(&folder.socket(), SMALL).unwrap();
    let start = std::time::Instant::now();
    let Err(error) = Client::connect(&folder.socket(), &who()) else {
        panic!()
    };
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!(start.elapsed() < std::time::Duration::from_secs(5));
    drop(echo);
}

#[test]
fn daemon_killed_with_reads_under_way_ends_them_plain() {
    for answered_turns in 0..4 {
        let folder = Folder::new(&format!("killed-{answered_turns}"));
        let (file, _) = folder.footage("clip.mov", 400_000);
        let mut echo = Echo::new(&folder.socket(), SMALL).unwrap();
        let mut client = connect_beside(&mut echo, &folder);
        let handle = client.open(&file, b"clip.mov").unwrap();
        let mut buffers = vec![vec![0; 200_000]; 10];
        for (n, buffer) in buffers.iter_mut().enumerate() {
            // SAFETY: the buffers outlive the reads.
            unsafe { client.read_send(handle, buffer.as_mut_ptr(), buffer.len(), 0, n) }.unwrap();
        }
        let mut results = Vec::new();
        for _ in 0..answered_turns {
            echo.turn(0).unwrap();
            while let Some(finished) = client.poll() {
                results.push(finished.result);
            }
        }
        drop(echo);
        wait_readable(&client);
        while let Some(finished) = client.poll() {
            results.push(finished.result);
        }
        assert_eq!(results.len(), 10);
        assert!(
            results
                .iter()
                .all(|result| matches!(result, Ok(200_000) | Err(ReadError::Plain)))
        );
        assert_eq!(results.last(), Some(&Err(ReadError::Plain)));
        assert!(!client.alive());
        // And everything after that is Plain at once.
        assert_eq!(client.read(handle, &mut [0; 10], 0), Err(ReadError::Plain));
        assert!(client.lease(handle, 10, 0).is_err());
        assert_eq!(client.open(&file, b"clip.mov"), None);
        client.changed(1, 2, 0, 1);
        client.gone(1, 2);
        client.close(handle);
        assert_eq!(client.poll(), None);
    }
}

#[test]
fn daemon_killed_while_somebody_waits_wakes_him() {
    let folder = Folder::new("waiting");
    let (file, _) = folder.footage("clip.mov", 400_000);
    for wait in 0..3 {
        let mut echo = Echo::new(
            &folder.socket(),
            EchoSize {
                slot_count: 8,
                ..SMALL
            },
        )
        .unwrap();
        let mut client = connect_beside(&mut echo, &folder);
        let handle = client.open(&file, b"clip.mov").unwrap();
        // No server answers from here on.
        let killer = std::thread::spawn(move || {
            // Only so that the other thread is likely to sleep by now; either way it must end.
            std::thread::sleep(std::time::Duration::from_millis(30));
            drop(echo);
        });
        match wait {
            0 => assert_eq!(client.read(handle, &mut [0; 10], 0), Err(ReadError::Plain)),
            1 => assert!(client.lease(handle, 10, 0).is_err()),
            _ => client.changed(1, 1, 0, 1),
        }
        assert!(!client.alive());
        killer.join().unwrap();
    }
}

#[test]
fn forked_child_finds_its_copy_dead_and_harms_nothing() {
    let folder = Folder::new("fork");
    let (file, bytes) = folder.footage("clip.mov", 50_000);
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"clip.mov").unwrap();
    // SAFETY: the child calls into the client, which allocates little and takes no lock of other
    // threads, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let dead = !client.alive()
            && client.read(handle, &mut [0; 10], 0) == Err(ReadError::Plain)
            && client.poll().is_none();
        drop(client);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(i32::from(!dead)) };
    }
    let mut status = -1;
    // SAFETY: `status` is an int.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    check_read(&mut client, handle, &bytes, 0, 50_000);
    drop(client);
    assert!(server.stop().faults.is_empty());
}

#[test]
fn sessions_memory_cannot_be_written_or_shrunk_by_a_client() {
    use rushes_core::format::{ConnectMessage, VERSION};
    use rustix::fs::{FallocateFlags, OFlags, SealFlags};
    let folder = Folder::new("sealed");
    let server = Running::start(&folder.socket(), SMALL);
    let socket = rushes_sys::socket::connect_to(&folder.socket()).unwrap();
    // CONNECT by hand: magic, version, message, zero, door, zero, names.
    let mut message = Vec::new();
    for word in [0x3148_5352u32, VERSION, 1, 0, 3, 0] {
        message.extend(word.to_le_bytes());
    }
    message.resize(size_of::<ConnectMessage>(), 0);
    rushes_sys::socket::send(&socket, &[&message], &[]).unwrap();
    let mut buffer = [0; 128];
    let packet = loop {
        if let Some(packet) = rushes_sys::socket::receive(&socket, &mut buffer).unwrap() {
            break packet;
        }
        std::thread::yield_now();
    };
    assert_eq!((packet.bytes, packet.fds.len()), (64, 4));
    let [data, rings, ..] = &packet.fds[..] else {
        panic!()
    };
    let flags = rustix::fs::fcntl_getfl(data).unwrap();
    assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
    assert!(rushes_sys::Mapping::shared(data, 4096, rushes_sys::Access::ReadWrite).is_err());
    for fd in [data, rings] {
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap();
        assert!(
            seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL),
            "{seals:?}"
        );
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
    }
    assert!(rustix::fs::ftruncate(rings, 1 << 20).is_err());
    // Not even by opening it anew as root.
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", data.as_raw_fd());
    if let Ok(anew) = File::options().write(true).open(path) {
        assert!(anew.write_at(b"x", 0).is_err());
        assert!(
            rustix::fs::fallocate(
                &anew,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                0,
                4096
            )
            .is_err()
        );
    }
    drop(server.stop());
}

/// The kernel keeps the socket of a dead daemon as long as something holds it, such as a ring of
/// io_uring; here the test does.
#[test]
fn nobody_is_waited_for_at_the_socket_of_a_process_that_has_ended() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
    let folder = Folder::new("ended");
    let path = folder.socket();
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    // The kernel names the process that listens to those that connect.
    let status = std::process::Command::new("python3")
        .args(["-c", "import socket; socket.socket(fileno=0).listen(8)"])
        .stdin(std::process::Stdio::from(socket.try_clone().unwrap()))
        .status()
        .expect("python3 is one of the packages");
    assert!(status.success());
    let begun = std::time::Instant::now();
    let answer = Client::connect_within(&path, &who(), Duration::from_s(600));
    assert!(
        matches!(answer, Err(rushes_shm::client::ConnectError::NoDaemon(_))),
        "{:?}",
        answer.err()
    );
    assert!(begun.elapsed().as_secs() < 300, "it was not waited for");
    drop(socket);
}
