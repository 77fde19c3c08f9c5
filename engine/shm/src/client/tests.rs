// SPDX-License-Identifier: Apache-2.0
//! The door's end against a daemon that breaks every rule.

use super::*;
use crate::layout::{write_refused, write_welcome};
use rushes_core::format::{WelcomeMessage, ring};
use rushes_sys::{Segment, SegmentHome, memory_file};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

const SLOT: u32 = 4096;
const SLOT_COUNT: u32 = 8;

fn welcome() -> WelcomeMessage {
    WelcomeMessage {
        session: 1,
        slot_count: SLOT_COUNT,
        slot_bytes: SLOT,
        ring_entries: RING_ENTRIES,
        read_bytes_max: 3 * u64::from(SLOT),
        ..WelcomeMessage::default()
    }
}

/// The daemon's end, without any of its manners.
struct Raw {
    socket: OwnedFd,
    memory: RingMemory,
    segment: Segment,
    head: u32,
    tail: u32,
}

impl Raw {
    fn pop(&mut self) -> Request {
        assert_ne!(self.memory.waiting(Which::Requests, self.head).unwrap(), 0);
        let request = self.memory.read_request(self.head);
        self.head = self.head.wrapping_add(1);
        self.memory.publish_head(Which::Requests, self.head);
        request
    }

    fn pending(&self) -> u32 {
        self.memory.waiting(Which::Requests, self.head).unwrap()
    }

    fn push(&mut self, reply: Reply) {
        self.memory.write_reply(self.tail, &reply);
        self.tail = self.tail.wrapping_add(1);
        self.memory.publish_tail(Which::Replies, self.tail);
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        self.memory.mapping().word32(offset)
    }
}

fn unused_path() -> std::path::PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Relaxed);
    let name = format!("rushes-client-{}-{number}", std::process::id());
    std::env::temp_dir().join(name)
}

/// Connect to a daemon that answers with these bytes and descriptors.
fn connect_to(answer: Vec<u8>, fds: Vec<OwnedFd>) -> (Result<Client, ConnectError>, OwnedFd) {
    let path = unused_path();
    let listener = socket::listen_at(&path).unwrap();
    let server = std::thread::spawn(move || {
        let accepted = loop {
            if let Some(accepted) = socket::accept(&listener).unwrap() {
                break accepted;
            }
            std::thread::yield_now();
        };
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        if answer.is_empty() {
            // Close without an answer; an eventfd stands in for the socket.
            return bell::new().unwrap();
        }
        socket::send(&accepted, &[&answer], &fds).unwrap();
        accepted
    });
    // Longer than a busy machine keeps the other thread from running.
    let patience = Duration::from_s(10);
    let result = Client::connect_within(&path, &Connect::default(), patience);
    let _ = std::fs::remove_file(&path);
    (result, server.join().unwrap())
}

#[test]
fn a_door_that_a_dead_daemons_socket_keeps_waiting_finds_the_next_daemon() {
    let path = unused_path();
    let deaf = socket::listen_at(&path).unwrap();
    let (at, (told, is_told)) = (path.clone(), std::sync::mpsc::channel());
    let next = std::thread::spawn(move || {
        // Once the door waits for the other daemon.
        is_told.recv().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        // In one step: a door that finds no socket at all does not wait.
        let elsewhere = unused_path();
        let listener = socket::listen_at(&elsewhere).unwrap();
        std::fs::rename(&elsewhere, &at).unwrap();
        let accepted = loop {
            if let Some(accepted) = socket::accept(&listener).unwrap() {
                break accepted;
            }
            std::thread::yield_now();
        };
        socket::send(&accepted, &[&write_refused(13, "I am the next")], &[]).unwrap();
        accepted
    });
    told.send(()).unwrap();
    let patience = Duration::from_s(10);
    let result = Client::connect_within(&path, &Connect::default(), patience);
    let said = result.err().unwrap().to_string();
    assert!(said.contains("I am the next"), "{said}");
    std::fs::remove_file(&path).unwrap();
    drop((next.join().unwrap(), deaf));
}

fn segment() -> Segment {
    Segment::create(SegmentHome::Memfd, SLOT_COUNT, SLOT)
        .unwrap()
        .0
}

fn honest_fds(segment: &Segment, rings: &OwnedFd) -> Vec<OwnedFd> {
    vec![
        segment.session_fd().unwrap(),
        rings.try_clone().unwrap(),
        bell::new().unwrap(),
        bell::new().unwrap(),
    ]
}

fn session() -> (Client, Raw) {
    let segment = segment();
    for slot in 0..SLOT_COUNT {
        let bytes = vec![slot as u8 + 1; SLOT as usize];
        segment
            .copy_in(rushes_core::units::SlotIndex(slot), 0, &bytes)
            .unwrap();
    }
    let rings = memory_file("rings", ring::BYTES as u64).unwrap();
    let (client, socket) = connect_to(write_welcome(&welcome()), honest_fds(&segment, &rings));
    let raw = Raw {
        socket,
        memory: RingMemory::map(&rings).unwrap(),
        segment,
        head: 0,
        tail: 0,
    };
    (client.unwrap(), raw)
}

fn open(client: &mut Client) -> FileHandle {
    client
        .open(std::fs::File::open("/dev/null").unwrap(), b"clip.mov")
        .unwrap()
}

#[test]
fn answers_to_connect_that_make_no_sense_are_said() {
    let check = |answer: Vec<u8>, fds: Vec<OwnedFd>, expected: &str| {
        let (result, _socket) = connect_to(answer, fds);
        let Err(error) = result else {
            panic!("connected; expected {expected:?}")
        };
        let said = error.to_string();
        assert!(said.contains(expected), "{said:?} has no {expected:?}");
    };
    let segment = segment();
    let rings = memory_file("rings", ring::BYTES as u64).unwrap();
    let honest = || honest_fds(&segment, &rings);
    let good = write_welcome(&welcome());
    check(write_refused(13, "no such share"), vec![], "no such share");
    check(b"HTTP/1.1 200 OK\r\n".to_vec(), vec![], "starts with");
    check(good[..39].to_vec(), honest(), "39 bytes; expected 64");
    let mut newer = good.clone();
    newer[4] = 99;
    check(newer, honest(), "version 99");
    let fewer = || honest().into_iter().take(3).collect();
    check(good.clone(), fewer(), "3 descriptors; expected 4");
    let more = || honest().into_iter().chain([bell::new().unwrap()]).collect();
    check(good.clone(), more(), "5 descriptors; expected 4");
    check(good.clone(), vec![], "0 descriptors; expected 4");
    let swapped = |place: usize, fd: OwnedFd| {
        let mut fds = honest();
        fds[place] = fd;
        fds
    };
    let small = memory_file("small", 4096).unwrap();
    check(
        good.clone(),
        swapped(0, small.try_clone().unwrap()),
        "data segment of 4096 bytes",
    );
    check(
        good.clone(),
        swapped(1, small),
        "ring segment of 4096 bytes",
    );
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("unsealed", flags).unwrap();
    rustix::fs::ftruncate(&unsealed, ring::BYTES as u64).unwrap();
    check(good.clone(), swapped(1, unsealed), "not sealed");
    for wrong in [
        WelcomeMessage {
            slot_bytes: 0,
            ..welcome()
        },
        WelcomeMessage {
            slot_bytes: 5000,
            ..welcome()
        },
        WelcomeMessage {
            slot_count: 0,
            ..welcome()
        },
        WelcomeMessage {
            ring_entries: 512,
            ..welcome()
        },
        WelcomeMessage {
            read_bytes_max: 0,
            ..welcome()
        },
    ] {
        check(write_welcome(&wrong), honest(), "expected a power of two");
    }
    let huge = WelcomeMessage {
        slot_count: u32::MAX,
        slot_bytes: 1 << 31,
        ..welcome()
    };
    check(
        write_welcome(&huge),
        honest(),
        "data segment of 32768 bytes",
    );
    check(Vec::new(), vec![], "closed");
}

/// A daemon that does this to a read of 10,000 bytes ends the session; the read is Plain.
fn check(expected: &str, work: impl FnOnce(&mut Raw, Request)) {
    let (mut client, mut raw) = session();
    let file = open(&mut client);
    let mut buffer = vec![0xaa; 10_000];
    // SAFETY: the buffer outlives the read.
    unsafe { client.read_send(file, buffer.as_mut_ptr(), buffer.len(), 0, 77) }.unwrap();
    let request = raw.pop();
    assert_eq!((request.op, request.length), (op::READ, 10_000));
    work(&mut raw, request);
    let finished = client.poll().unwrap();
    assert_eq!(
        (finished.private_data, finished.result),
        (77, Err(ReadError::Plain))
    );
    assert!(!client.alive());
    let said = client.end().unwrap().to_string();
    assert!(said.contains(expected), "{said:?} has no {expected:?}");
    assert!(buffer.iter().all(|&byte| byte == 0xaa));
    assert_eq!(client.poll(), None);
}

#[test]
fn replies_that_make_no_sense_end_the_session_and_touch_nothing() {
    let reply = |request: Request| Reply {
        id: request.id,
        slot_count: 3,
        length: 10_000,
        slots: std::array::from_fn(|n| n as u32),
        ..Reply::default()
    };
    check("not under way", |raw, _| raw.push(Reply::default()));
    check("not under way", |raw, request| {
        raw.push(Reply {
            id: request.id ^ (1 << 40),
            ..reply(request)
        })
    });
    check("of 8 buffers", |raw, request| {
        raw.push(Reply {
            slots: [SLOT_COUNT; REPLY_SLOTS_MAX],
            ..reply(request)
        });
    });
    check("of 8 buffers", |raw, request| {
        raw.push(Reply {
            slots: [u32::MAX; REPLY_SLOTS_MAX],
            ..reply(request)
        });
    });
    check("17 buffers", |raw, request| {
        raw.push(Reply {
            slot_count: 17,
            ..reply(request)
        })
    });
    check("buffers", |raw, request| {
        raw.push(Reply {
            slot_count: u32::MAX,
            ..reply(request)
        })
    });
    check("10001 bytes", |raw, request| {
        raw.push(Reply {
            length: 10_001,
            ..reply(request)
        })
    });
    check("bytes", |raw, request| {
        raw.push(Reply {
            length: u64::MAX,
            ..reply(request)
        })
    });
    check("offset 4096", |raw, request| {
        raw.push(Reply {
            first_offset: SLOT,
            ..reply(request)
        })
    });
    check("offset 4000", |raw, request| {
        raw.push(Reply {
            first_offset: 4000,
            ..reply(request)
        })
    });
    check("0 buffers", |raw, request| {
        raw.push(Reply {
            slot_count: 0,
            ..reply(request)
        })
    });
    check("errno 5", |raw, request| {
        raw.push(Reply {
            errno: 5,
            ..reply(request)
        })
    });
    check("errno 70000", |raw, request| {
        raw.push(Reply {
            errno: 70_000,
            slot_count: 0,
            length: 0,
            ..reply(request)
        });
    });
    check("at most 256 apart", |raw, _| {
        raw.word(ring::REPLY_TAIL).store(300, Relaxed)
    });
    check("closed", |raw, _| raw.socket = bell::new().unwrap());
    check("from the daemon", |raw, _| {
        socket::send(&raw.socket, &[b"hello"], &[]).unwrap()
    });
}

#[test]
fn second_reply_to_one_request_ends_the_session() {
    let (mut client, mut raw) = session();
    let file = open(&mut client);
    let mut buffer = [0; 10];
    // SAFETY: the buffer outlives the read.
    unsafe { client.read_send(file, buffer.as_mut_ptr(), 10, 0, 0) }.unwrap();
    let id = raw.pop().id;
    let reply = Reply {
        id,
        slot_count: 1,
        length: 10,
        ..Reply::default()
    };
    raw.push(reply);
    raw.push(reply);
    assert_eq!(client.poll().unwrap().result, Ok(10));
    assert_eq!(client.poll(), None);
    assert!(!client.alive());
}

#[test]
fn nonsense_in_the_request_counters_ends_the_session() {
    let (mut client, raw) = session();
    let file = open(&mut client);
    raw.word(ring::REQUEST_HEAD).store(99, Relaxed);
    assert_eq!(client.read(file, &mut [0; 10], 0), Err(ReadError::Plain));
    assert!(!client.alive());
    assert_eq!(client.poll(), None);
}

#[test]
fn ring_always_has_room_for_what_is_owed() {
    let (mut client, mut raw) = session();
    let file = open(&mut client);
    // A server that answers but leaves the requests in the ring as long as it can: it must take a
    // request to answer it, so ENDs pile up behind them.
    let mut buffer = vec![0; SLOT as usize];
    let mut sent = 0;
    let mut finished = 0;
    for _ in 0..2000 {
        // SAFETY: the buffer outlives the reads; all write to it, and the test never reads it.
        if unsafe { client.read_send(file, buffer.as_mut_ptr(), 100, 0, 0) }.is_some() {
            sent += 1;
        }
        if raw.pending() > 100 {
            while raw.pending() > 0 {
                let request = raw.pop();
                if request.op == op::READ {
                    raw.push(Reply {
                        id: request.id,
                        slot_count: 1,
                        length: 100,
                        ..Reply::default()
                    });
                }
            }
            // The server takes nothing from the ring while the client finishes these.
            while client.poll().is_some() {
                finished += 1;
            }
            assert!(client.alive(), "{:?}", client.end());
        }
    }
    assert!(sent > 1000 && finished > 1000, "{sent} {finished}");
    let ends = RING_ENTRIES - raw.pending();
    assert!(ends > 0);
}

#[test]
fn closes_that_find_no_room_are_sent_later() {
    let (mut client, mut raw) = session();
    let files: Vec<FileHandle> = (0..400).map(|_| open_drained(&mut client, &raw)).collect();
    for file in &files {
        client.close(*file);
    }
    assert_eq!(raw.pending(), RING_ENTRIES);
    let mut closed = Vec::new();
    for _ in 0..3 {
        while raw.pending() > 0 {
            let request = raw.pop();
            assert_eq!(request.op, op::CLOSE);
            closed.push(request.handle);
        }
        assert_eq!(client.poll(), None);
    }
    let expected: Vec<u32> = files.iter().map(|file| file.0).collect();
    assert_eq!(closed, expected);
}

fn open_drained(client: &mut Client, raw: &Raw) -> FileHandle {
    let file = open(client);
    socket::receive(&raw.socket, &mut [0; PACKET_BYTES_MAX])
        .unwrap()
        .unwrap();
    file
}

#[test]
fn full_socket_makes_a_file_plain_and_nothing_else() {
    let (mut client, raw) = session();
    let null = std::fs::File::open("/dev/null").unwrap();
    let path = "x".repeat(4000);
    let mut opened = 0;
    while client.open(&null, path.as_bytes()).is_some() {
        opened += 1;
        assert!(opened < 100_000);
    }
    assert!(client.alive());
    // The kernel lets us send again once some of it is read.
    for _ in 0..opened {
        socket::receive(&raw.socket, &mut [0; PACKET_BYTES_MAX])
            .unwrap()
            .unwrap();
    }
    assert!(client.open(&null, b"short").is_some());
}

#[test]
fn short_part_ends_the_read_there_and_the_rest_is_not_asked() {
    let (mut client, mut raw) = session();
    let file = open(&mut client);
    // Parts of three slots, the daemon's limit; one read of 300 of them.
    let mut buffer = vec![0; 900 * SLOT as usize];
    // SAFETY: the buffer outlives the read.
    unsafe { client.read_send(file, buffer.as_mut_ptr(), buffer.len(), 0, 0) }.unwrap();
    let sent = raw.pending();
    assert!((100..256).contains(&sent), "{sent}");
    let mut requests: Vec<Request> = (0..sent).map(|_| raw.pop()).collect();
    // The other way round, and the file ends inside the third part.
    requests.reverse();
    for request in requests {
        let end = 2 * 3 * u64::from(SLOT) + 100;
        let length = end.saturating_sub(request.offset).min(request.length);
        raw.push(Reply {
            id: request.id,
            slot_count: length.div_ceil(u64::from(SLOT)) as u32,
            length,
            slots: std::array::from_fn(|n| n as u32),
            ..Reply::default()
        });
    }
    assert_eq!(client.poll().unwrap().result, Ok(6 * SLOT as usize + 100));
    // Three ENDs, and no further parts.
    let after: Vec<u32> = (0..raw.pending()).map(|_| raw.pop().op).collect();
    assert_eq!(after, [op::READ_END; 3]);
}

#[test]
fn one_failed_part_fails_the_read_and_plain_goes_first() {
    for (errnos, expected) in [
        ([0, 5, 0], ReadError::Errno(5)),
        ([5, PLAIN, 7], ReadError::Plain),
        ([7, 0, 5], ReadError::Errno(7)),
    ] {
        let (mut client, mut raw) = session();
        let file = open(&mut client);
        let mut buffer = vec![0; 9 * SLOT as usize];
        // SAFETY: the buffer outlives the read.
        unsafe { client.read_send(file, buffer.as_mut_ptr(), buffer.len(), 0, 0) }.unwrap();
        for errno in errnos {
            let request = raw.pop();
            let slot_count = if errno == 0 { 3 } else { 0 };
            let length = u64::from(slot_count * SLOT);
            raw.push(Reply {
                id: request.id,
                errno,
                slot_count,
                length,
                ..Reply::default()
            });
        }
        assert_eq!(client.poll().unwrap().result, Err(expected));
        assert!(client.alive());
    }
}

#[test]
fn ends_ring_the_daemon_unless_it_sweeps() {
    for sweeps in [false, true] {
        let (mut client, mut raw) = session();
        raw.word(ring::SERVER_FLAGS)
            .store(u32::from(sweeps) * server_flag::SWEEPS, Relaxed);
        let file = open(&mut client);
        raw.memory.arm(Which::Requests);
        let mut buffer = [0; 10];
        // SAFETY: the buffer outlives the read.
        unsafe { client.read_send(file, buffer.as_mut_ptr(), 10, 0, 0) }.unwrap();
        // The client took the flag: it rang.
        assert!(raw.memory.disarm(Which::Requests));
        let id = raw.pop().id;
        raw.memory.arm(Which::Requests);
        raw.push(Reply {
            id,
            slot_count: 1,
            length: 10,
            ..Reply::default()
        });
        assert_eq!(client.poll().unwrap().result, Ok(10));
        assert_eq!(client.poll(), None);
        assert_eq!(raw.pop().op, op::READ_END);
        assert_eq!(raw.memory.disarm(Which::Requests), !sweeps);
        assert_eq!(buffer, [1; 10]);
    }
}

#[test]
fn a_close_rings_the_daemon_also_when_it_sweeps() {
    let (mut client, mut raw) = session();
    raw.word(ring::SERVER_FLAGS)
        .store(server_flag::SWEEPS, Relaxed);
    let file = open(&mut client);
    raw.memory.arm(Which::Requests);
    client.close(file);
    assert_eq!(raw.pop().op, op::CLOSE);
    // The client took the flag: it rang.
    assert!(raw.memory.disarm(Which::Requests));
}

#[test]
fn bytes_come_from_the_slots_named_in_their_order() {
    let (mut client, mut raw) = session();
    let file = open(&mut client);
    let mut buffer = vec![0; 5000];
    // SAFETY: the buffer outlives the read.
    unsafe { client.read_send(file, buffer.as_mut_ptr(), 5000, 4000, 0) }.unwrap();
    let id = raw.pop().id;
    let mut reply = Reply {
        id,
        slot_count: 3,
        length: 5000,
        first_offset: 4000,
        ..Reply::default()
    };
    reply.slots[..3].copy_from_slice(&[7, 0, 3]);
    raw.push(reply);
    assert_eq!(client.poll().unwrap().result, Ok(5000));
    let expected = [vec![8; 96], vec![1; 4096], vec![4; 808]].concat();
    assert!(buffer == expected);
    let _ = &raw.segment;
}
