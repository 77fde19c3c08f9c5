// SPDX-License-Identifier: Apache-2.0
//! The daemon's end against a client that breaks every rule.

use super::*;
use crate::layout::{write_connect, write_open};
use proptest::prelude::*;
use rushes_sys::SegmentHome;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};

const TERMS: SessionTerms = SessionTerms {
    session: SessionId(7),
    read_bytes_max: 1 << 20,
    write_bytes_max: 1 << 20,
    handle_count_max: 4,
    sweeps: false,
};

/// The client's end, without any of its manners.
struct Raw {
    socket: OwnedFd,
    memory: RingMemory,
    reply_bell: OwnedFd,
    tail: u32,
}

impl Raw {
    fn push(&mut self, request: Request) {
        self.memory.write_request(self.tail, &request);
        self.tail = self.tail.wrapping_add(1);
        self.memory.publish_tail(Which::Requests, self.tail);
    }

    fn read(&mut self, id: u64) {
        self.push(Request {
            id,
            op: op::READ,
            handle: 1,
            length: 4096,
            ..Request::default()
        });
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        self.memory.mapping().word32(offset)
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        socket::send(&self.socket, &[bytes], fds).unwrap();
    }

    fn open(&self, handle: u32, path: &str, fds: &[BorrowedFd<'_>]) {
        let mut bytes = write_open(handle, path.len(), Writer::default(), FilePart::WHOLE);
        bytes.extend(path.as_bytes());
        self.send(&bytes, fds);
    }

    /// An honest file under handle 1, as the server has seen it.
    fn open_file(&self, session: &mut ServerSession) {
        let file = null();
        self.open(1, "clip.mov", &[file.as_fd()]);
        session.socket_ready();
        let event = session.next_event().unwrap().unwrap();
        assert!(matches!(
            event,
            ClientEvent::Open {
                handle: HandleId(1),
                ..
            }
        ));
    }
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

fn listener(name: &str) -> Listener {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Relaxed);
    let name = format!("rushes-server-{name}-{}-{number}", std::process::id());
    Listener::bind(&std::env::temp_dir().join(name)).unwrap()
}

fn newcomer(listener: &Listener) -> (OwnedFd, Newcomer) {
    let socket = socket::connect_to(&listener.path).unwrap();
    (socket, listener.accept().unwrap().unwrap())
}

fn session() -> (Raw, ServerSession) {
    let listener = listener("session");
    let (socket, mut newcomer) = newcomer(&listener);
    socket::send(&socket, &[&write_connect(&Connect::default())], &[]).unwrap();
    assert_eq!(newcomer.receive().unwrap(), Some(Connect::default()));
    let (segment, _) = Segment::create(SegmentHome::Memfd, 8, 4096).unwrap();
    let server = newcomer.welcome(TERMS, &segment, None).unwrap();
    let mut packet = socket::receive(&socket, &mut [0; 128]).unwrap().unwrap();
    let reply_bell = packet.fds.pop().unwrap();
    let memory = RingMemory::map(&packet.fds[1]).unwrap();
    let raw = Raw {
        socket,
        memory,
        reply_bell,
        tail: 0,
    };
    (raw, server)
}

/// Until None or an error.
fn drain(session: &mut ServerSession) -> Result<Vec<ClientEvent>, PeerError> {
    let mut events = Vec::new();
    while let Some(event) = session.next_event()? {
        events.push(event);
    }
    Ok(events)
}

/// The client's act ends the session with this error.
fn check(expected: &str, work: impl FnOnce(&mut Raw)) {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    work(&mut raw);
    session.socket_ready();
    let error = drain(&mut session).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} has no {expected:?}");
}

#[test]
fn requests_that_break_the_rules_end_the_session() {
    let read = Request {
        id: 1,
        op: op::READ,
        handle: 1,
        length: 1,
        ..Request::default()
    };
    check("operation 0", |raw| raw.push(Request { op: 0, ..read }));
    check("end within a file", |raw| {
        raw.push(Request {
            op: op::CHANGED,
            length: u64::MAX - 1,
            ..read
        })
    });
    check("operation 99", |raw| raw.push(Request { op: 99, ..read }));
    check("reserved", |raw| {
        raw.push(Request {
            reserved: 1,
            ..read
        })
    });
    check("0 bytes", |raw| raw.push(Request { length: 0, ..read }));
    check("1048577 bytes", |raw| {
        raw.push(Request {
            length: (1 << 20) + 1,
            ..read
        })
    });
    check("below 2^63", |raw| {
        raw.push(Request {
            offset: u64::MAX,
            ..read
        })
    });
    check("below 2^63", |raw| {
        raw.push(Request {
            offset: i64::MAX as u64,
            ..read
        })
    });
    check("request 1 twice", |raw| {
        raw.push(read);
        raw.push(read);
    });
    check("holds no buffers", |raw| {
        raw.push(Request {
            op: op::READ_END,
            ..read
        })
    });
    check("holds no buffers", |raw| {
        raw.push(read);
        raw.push(Request {
            op: op::READ_END,
            ..read
        });
    });
}

#[test]
fn ring_counters_out_of_range_end_the_session() {
    check("at most 256 apart", |raw| {
        raw.word(ring::REQUEST_TAIL).store(257, Relaxed)
    });
    check("at most 256 apart", |raw| {
        raw.word(ring::REQUEST_TAIL).store(u32::MAX, Relaxed)
    });
    check("at most 256 apart", |raw| {
        // The head runs on while the server keeps its own: it reads no entry twice.
        raw.word(ring::REQUEST_TAIL).store(1 << 31, Relaxed);
    });
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    raw.read(1);
    drain(&mut session).unwrap();
    raw.word(ring::REPLY_HEAD).store(5, Relaxed);
    let error = session.reply(RequestId(1), ReplyBody::Plain).unwrap_err();
    assert!(error.to_string().contains("at most 256 apart"), "{error}");
}

#[test]
fn head_changed_by_the_client_is_not_believed() {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    for id in 0..600 {
        // The server's own counter is private: the one in the page changes nothing.
        raw.word(ring::REQUEST_HEAD).store(12345, Relaxed);
        raw.word(ring::REPLY_TAIL).store(54321, Relaxed);
        raw.read(id);
        let events = drain(&mut session).unwrap();
        assert!(matches!(events[..], [ClientEvent::Read { request: RequestId(n), .. }] if n == id));
        session.reply(RequestId(id), ReplyBody::Plain).unwrap();
        assert_eq!(raw.memory.read_reply(id as u32).id, id);
        raw.memory.publish_head(Which::Replies, id as u32 + 1);
    }
}

#[test]
fn more_requests_than_the_reply_ring_holds_end_the_session() {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    for id in 0..256 {
        raw.read(id);
        drain(&mut session).unwrap();
    }
    assert_eq!((session.waiting_count(), session.pinned_count()), (256, 0));
    raw.read(256);
    let error = drain(&mut session).unwrap_err();
    assert!(
        error.to_string().contains("expected at most 256"),
        "{error}"
    );
}

#[test]
fn replies_never_taken_end_the_session() {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    for id in 0..256 {
        raw.read(id);
        drain(&mut session).unwrap();
        session.reply(RequestId(id), ReplyBody::Plain).unwrap();
    }
    raw.read(256);
    drain(&mut session).unwrap();
    let error = session.reply(RequestId(256), ReplyBody::Plain).unwrap_err();
    assert!(error.to_string().contains("replies not taken"), "{error}");
}

#[test]
fn wrong_packets_end_the_session() {
    let file = null();
    let fd = file.as_fd();
    check("descriptors; expected one", |raw| raw.open(2, "a", &[]));
    check("with 2 descriptors", |raw| raw.open(2, "a", &[fd, fd]));
    check("handle 1, which is open", |raw| raw.open(1, "a", &[fd]));
    check("without \"..\"", |raw| {
        raw.open(2, "../../etc/shadow", &[fd])
    });
    check("without \"..\"", |raw| raw.open(2, "", &[fd]));
    check("packet of 3 bytes", |raw| raw.send(b"abc", &[fd]));
    check("starts with", |raw| raw.send(&[0xff; 64], &[fd]));
    check("at most 4136", |raw| raw.send(&[0; 9000], &[]));
    check("message 1; expected 4", |raw| {
        raw.send(&write_connect(&Connect::default()), &[])
    });
    check("with 0 bytes of path", |raw| {
        raw.send(&write_open(2, 9, Writer::default(), FilePart::WHOLE), &[fd])
    });
    let mut newer = write_open(2, 0, Writer::default(), FilePart::WHOLE);
    newer[4] = 99;
    check("version 99", move |raw| raw.send(&newer, &[]));
    check("closed the session", |raw| {
        raw.socket = null();
    });
}

#[test]
fn descriptors_beyond_the_one_expected_are_closed() {
    let (raw, mut session) = session();
    let (out, inward) = rustix::pipe::pipe().unwrap();
    raw.open(2, "a", &[inward.as_fd(), inward.as_fd()]);
    drop(inward);
    session.socket_ready();
    drain(&mut session).unwrap_err();
    assert_eq!(rustix::io::read(&out, &mut [0; 1]).unwrap(), 0);
}

#[test]
fn newcomers_that_say_something_else_are_told_apart() {
    let listener = listener("newcomer");
    let check = |bytes: &[u8], fds: &[BorrowedFd<'_>], expected: &str| {
        let (socket, mut newcomer) = newcomer(&listener);
        assert!(newcomer.receive().unwrap().is_none());
        socket::send(&socket, &[bytes], fds).unwrap();
        let error = newcomer.receive().unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} has no {expected:?}");
    };
    let good = write_connect(&Connect::default());
    let file = null();
    check(b"hello", &[], "5 bytes");
    check(&good[..100], &[], "100 bytes; expected 224");
    check(&[&good[..], &[0]].concat(), &[], "225 bytes; expected 224");
    check(&good, &[file.as_fd()], "1 descriptors; expected none");
    check(
        &write_open(1, 0, Writer::default(), FilePart::WHOLE),
        &[],
        "read message 4",
    );
    let (socket, mut newcomer) = newcomer(&listener);
    drop(socket);
    assert!(matches!(newcomer.receive(), Err(PeerError::Closed)));
}

#[test]
fn refused_newcomer_is_told_why_and_the_socket_closed() {
    let listener = listener("refused");
    let (socket, newcomer) = newcomer(&listener);
    assert_eq!(newcomer.peer().uid, rustix::process::getuid().as_raw());
    newcomer.refuse(Errno(13), "no share of that name");
    let mut buffer = [0; PACKET_BYTES_MAX];
    let packet = socket::receive(&socket, &mut buffer).unwrap().unwrap();
    let (errno, reason) = crate::layout::read_refused(&buffer[..packet.bytes]).unwrap();
    assert_eq!((errno, reason.as_str()), (13, "no share of that name"));
    assert_eq!(
        socket::receive(&socket, &mut buffer)
            .unwrap()
            .unwrap()
            .bytes,
        0
    );
}

#[test]
fn socket_is_for_root_alone_and_its_file_goes_with_it() {
    use std::os::unix::fs::PermissionsExt;
    let first = listener("mode");
    let path = first.path.clone();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A second daemon in the same place: the first must not delete the second's socket.
    let second = Listener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
    std::fs::write(&path, b"not a socket").unwrap();
    assert!(Listener::bind(&path).is_err());
    assert!(path.exists());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn read_overtaking_its_open_waits_for_it() {
    let (mut raw, mut session) = session();
    let file = null();
    raw.open(1, "clip.mov", &[file.as_fd()]);
    raw.open(2, "clip.mov", &[file.as_fd()]);
    raw.push(Request {
        id: 9,
        op: op::READ,
        handle: 2,
        length: 1,
        ..Request::default()
    });
    raw.push(Request {
        op: op::CLOSE,
        handle: 1,
        ..Request::default()
    });
    // Only the doorbell rang: `socket_ready` was not called.
    let events = drain(&mut session).unwrap();
    assert!(
        matches!(
            events[..],
            [
                ClientEvent::Open {
                    handle: HandleId(1),
                    ..
                },
                ClientEvent::Open {
                    handle: HandleId(2),
                    ..
                },
                ClientEvent::Read {
                    handle: HandleId(2),
                    ..
                },
                ClientEvent::Close {
                    handle: HandleId(1)
                },
            ]
        ),
        "{events:?}"
    );
}

#[test]
fn read_of_an_unknown_handle_is_answered_plain() {
    let (mut raw, mut session) = session();
    raw.read(3);
    assert!(drain(&mut session).unwrap().is_empty());
    let reply = raw.memory.read_reply(0);
    assert_eq!((reply.id, reply.errno), (3, PLAIN));
    assert_eq!(session.waiting_count(), 0);
    // Files beyond the limit are such handles.
    let file = null();
    for handle in 10..20 {
        raw.open(handle, "a", &[file.as_fd()]);
    }
    session.socket_ready();
    assert_eq!(drain(&mut session).unwrap().len(), 4);
    raw.push(Request {
        id: 4,
        op: op::READ,
        handle: 19,
        length: 1,
        ..Request::default()
    });
    raw.push(Request {
        op: op::CLOSE,
        handle: 19,
        ..Request::default()
    });
    assert!(drain(&mut session).unwrap().is_empty());
    assert_eq!(raw.memory.read_reply(1).errno, PLAIN);
}

#[test]
fn faults_of_our_own_are_not_sent() {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    raw.read(1);
    drain(&mut session).unwrap();
    let mut wrong = |slots: &[u32], first_offset, length| {
        let slots: Vec<SlotIndex> = slots.iter().map(|&slot| SlotIndex(slot)).collect();
        let body = ReplyBody::Data {
            slots: &slots,
            first_offset,
            length: ByteCount(length),
        };
        assert!(session.reply(RequestId(1), body).is_err());
    };
    wrong(&[8], 0, 1);
    wrong(&[0], 0, 4097);
    wrong(&[0], 1, 4096);
    wrong(&[0], 4096, 0);
    wrong(&[], 0, 1);
    wrong(&[0; 17], 0, 1);
    assert!(session.reply(RequestId(2), ReplyBody::Done).is_err());
    assert_eq!(raw.word(ring::REPLY_TAIL).load(Relaxed), 0);
    session.reply(RequestId(1), ReplyBody::Done).unwrap();
    assert!(session.reply(RequestId(1), ReplyBody::Done).is_err());
}

#[test]
fn bells_ring_for_sleepers_only() {
    let (mut raw, mut session) = session();
    raw.open_file(&mut session);
    // The server sleeps from the start; a client that finds its flag set rings, once.
    assert!(drain(&mut session).unwrap().is_empty());
    raw.read(1);
    assert!(raw.memory.must_ring(Which::Requests));
    raw.read(2);
    assert!(!raw.memory.must_ring(Which::Requests));
    assert_eq!(drain(&mut session).unwrap().len(), 2);
    raw.read(3);
    assert!(raw.memory.must_ring(Which::Requests));
    drain(&mut session).unwrap();

    session.reply(RequestId(1), ReplyBody::Plain).unwrap();
    session.flush();
    assert!(!bell::silence(&raw.reply_bell).unwrap());
    raw.memory.arm(Which::Replies);
    session.flush();
    assert!(!bell::silence(&raw.reply_bell).unwrap());
    session.reply(RequestId(2), ReplyBody::Plain).unwrap();
    session.flush();
    assert!(bell::silence(&raw.reply_bell).unwrap());
}

#[test]
fn client_that_writes_everywhere_all_the_time_does_no_harm() {
    let (raw, mut session) = session();
    raw.open_file(&mut session);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 1u32;
            while !stop.load(Relaxed) {
                for offset in (0..ring::BYTES).step_by(4) {
                    number = number.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                    // Mostly small numbers, which look like sense.
                    let shift = (number >> 24) % 32;
                    raw.word(offset).store(number >> shift, Relaxed);
                }
            }
        });
        for _ in 0..20_000 {
            match session.next_event() {
                Ok(Some(ClientEvent::Read { request, range, .. })) => {
                    assert!(range.length.0 <= TERMS.read_bytes_max && range.end() < 1 << 63);
                    let _ = session.reply(request, ReplyBody::Plain);
                }
                Ok(_) => session.flush(),
                // The session has ended and a real driver drops it. Going on must be harmless, too.
                Err(_) => session.request_head = session.request_head.wrapping_add(1),
            }
        }
        stop.store(true, Relaxed);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_requests_give_events_or_an_error(
        requests in proptest::collection::vec((0u64..6, 0u32..7, 0u32..3, any::<u64>(), any::<u64>(), 0u64..20), 1..80)
    ) {
        let (mut raw, mut session) = session();
        raw.open_file(&mut session);
        let mut waiting: Vec<RequestId> = Vec::new();
        for (id, op, handle, offset, length, shift) in requests {
            raw.push(Request {
                id, op, handle,
                offset: offset >> (shift * 3),
                length: length >> (shift * 3 + 4),
                ..Request::default()
            });
            if id % 2 == 0 {
                continue;
            }
            match drain(&mut session) {
                Ok(events) => for event in events {
                    if let ClientEvent::Read { request, .. } | ClientEvent::Changed { request, .. } | ClientEvent::Gone { request, .. } = event {
                        prop_assert!(!waiting.contains(&request));
                        waiting.push(request);
                    }
                },
                Err(PeerError::Broken(_)) => return Ok(()),
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            }
            if let Some(request) = waiting.pop() {
                let slots = [SlotIndex(0)];
                let body = if request.0 % 3 == 0 { ReplyBody::Plain } else {
                    ReplyBody::Data { slots: &slots, first_offset: 0, length: ByteCount(1) }
                };
                prop_assert!(session.reply(request, body).is_ok());
                raw.memory.publish_head(Which::Replies, session.reply_tail);
            }
        }
    }
}
