// SPDX-License-Identifier: Apache-2.0
//! The requests to the file system for a file that is being written, and how long its writer waits
//! for them.

use super::*;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

const SESSION: SessionId = SessionId(1);
const HANDLE: HandleId = HandleId(1);
const FILE: FileId = FileId(7);
const DISK: DeviceId = DeviceId(1);
const KEY: FileKey = FileKey {
    device: 1,
    inode: 7,
};

struct Writer {
    server: Server,
    now: Instant,
    next: u64,
    /// The reservations: the range that was needed, and up to where.
    asked: Vec<(ByteRange, u64)>,
    mapped: u64,
    granted: u64,
    is_granted: bool,
    /// Times and blocks that are being set.
    settles: u32,
    /// Requests that were answered with "done".
    done: Vec<RequestId>,
    is_forgotten: bool,
    is_trimmed: bool,
    /// Lengths that doors got.
    known: Vec<ByteCount>,
}

impl Writer {
    fn new() -> Writer {
        let row = ServiceModel {
            fixed: Duration::from_ms(6),
            span: Duration::from_ms(17),
            rate: BytesPerSecond(150_000_000),
        };
        let mut writer = Writer {
            server: Server::new(Limits::default(), Policy::default()),
            now: Instant(1),
            next: 1,
            asked: Vec::new(),
            mapped: 0,
            granted: 0,
            is_granted: false,
            settles: 0,
            done: Vec::new(),
            is_forgotten: false,
            is_trimmed: false,
            known: Vec::new(),
        };
        writer.step(Event::DeviceAdded {
            device: DISK,
            model: DeviceModel {
                read: row,
                write: row,
                size: ByteCount(40 << 30),
            },
        });
        writer.step(Event::SessionOpened {
            session: SESSION,
            label: SessionLabel::default(),
        });
        writer.step(Event::LaneAdded {
            lane: LaneId(1),
            session: Some(SESSION),
            page_count: 1 << 16,
            record_count: 8192,
        });
        writer.step(Event::Opening {
            session: SESSION,
            handle: HANDLE,
            path: "take.mov".to_string(),
            part: FilePart::WHOLE,
        });
        writer.opened(HANDLE, (FILE, KEY), ByteCount(0), Vec::new());
        writer
    }

    fn opened(
        &mut self,
        handle: HandleId,
        (file, key): (FileId, FileKey),
        size: ByteCount,
        extents: Vec<Extent>,
    ) {
        self.step(Event::Opened {
            session: SESSION,
            handle,
            facts: Ok(FileFacts {
                file,
                key,
                device: DISK,
                size,
                version: 1,
                extents,
                hint: None,
                is_header_unread: false,
                way: Some(WriteWay::Extents),
                is_exclusive: false,
                has_unwritten: true,
                is_fresh: false,
            }),
        });
    }

    fn step(&mut self, event: Event) {
        let mut actions = Actions::default();
        self.server.step(self.now, event, &mut actions);
        for action in actions.list {
            match action {
                Action::Reserve {
                    needed, wished_end, ..
                } => self.asked.push((needed, wished_end)),
                Action::Reply {
                    outcome: Outcome::Granted { .. },
                    ..
                } => {
                    self.granted += 1;
                    self.is_granted = true;
                }
                // The disk has the bytes at once.
                Action::SubmitWrite(io) => {
                    let result = Ok(io.range.length);
                    self.step(Event::IoDone { io: io.io, result });
                }
                Action::Reply {
                    request,
                    outcome: Outcome::Done,
                    ..
                } => self.done.push(request),
                Action::Clean { .. } => self.settles += 1,
                Action::Sync { file } | Action::WriteOut { file } => {
                    let result = Ok(());
                    self.step(Event::Synced { file, result });
                }
                Action::Trim { .. } => {
                    self.settles += 1;
                    self.is_trimmed = true;
                }
                Action::Known { size, .. } => self.known.push(size),
                Action::Forget { .. } => self.is_forgotten = true,
                _ => {}
            }
        }
    }

    /// A client is about to change the file on its own descriptor. True: it may.
    fn hold(&mut self) -> bool {
        self.next += 1;
        self.step(Event::Hold {
            session: SESSION,
            request: RequestId(self.next),
            key: KEY,
        });
        self.settle();
        self.done.contains(&RequestId(self.next))
    }

    /// Another client that comes asks for the same.
    fn hold_by(&mut self, session: SessionId, request: RequestId, key: FileKey) {
        self.step(Event::SessionOpened {
            session,
            label: SessionLabel::default(),
        });
        self.step(Event::Hold {
            session,
            request,
            key,
        });
    }

    fn settle(&mut self) {
        for _ in 0..core::mem::take(&mut self.settles) {
            self.step(Event::Settled {
                file: FILE,
                version: 2,
            });
        }
    }

    fn reserve_all(&mut self) {
        let end = self.asked.last().map_or(0, |asked| asked.1);
        self.reserve_to(end);
    }

    /// Reserve as much as needed, and so much more.
    fn reserve_with(&mut self, more: u64) {
        let end = self.asked.last().map_or(0, |asked| asked.0.end());
        self.reserve_to(end + more);
    }

    fn reserve_to(&mut self, end: u64) {
        self.mapped = self.mapped.max(end.next_multiple_of(PAGE_BYTES));
        self.step(Event::Reserved {
            file: FILE,
            result: Ok(vec![Extent {
                logical: ByteOffset(0),
                physical: ByteOffset(1 << 30),
                length: ByteCount(self.mapped),
            }]),
        });
    }

    /// Asks to write. True: granted at once.
    fn begin(&mut self, range: ByteRange) -> bool {
        self.is_granted = false;
        self.next += 1;
        self.step(Event::WriteBegin {
            session: SESSION,
            handle: HANDLE,
            request: RequestId(self.next),
            range,
            sent: self.now,
        });
        self.is_granted
    }

    fn end(&mut self) {
        self.step(Event::WriteEnd {
            session: SESSION,
            request: RequestId(self.next),
        });
        self.now = self.now + Duration::from_ms(40);
    }
}

#[test]
fn a_recording_waits_for_its_first_blocks_alone() {
    let mut writer = Writer::new();
    let mut waited = 0;
    for frame in 0..400u64 {
        if !writer.begin(ByteRange::new(frame * 500_000, 500_000)) {
            waited += 1;
            writer.reserve_all();
        }
        assert!(writer.is_granted, "frame {frame}: {:?}", writer.asked);
        writer.end();
        // The room that the server asked for ahead comes before the next frame.
        if writer
            .asked
            .last()
            .is_some_and(|asked| asked.1 > writer.mapped)
        {
            writer.reserve_all();
        }
    }
    assert_eq!(waited, 1, "{:?}", writer.asked);
    assert!(writer.asked.len() <= 4, "{:?}", writer.asked);
}

#[test]
fn bytes_that_announce_a_length_become_one_reservation() {
    let mut writer = Writer::new();
    for unit in 1..=256u64 {
        if !writer.begin(ByteRange::new((unit << 20) - 1, 1)) {
            writer.reserve_all();
        }
        writer.end();
    }
    assert_eq!(writer.granted, 256);
    assert_eq!(writer.asked.len(), 1, "{:?}", writer.asked);
    // From the start, not from the byte on.
    assert_eq!(writer.asked[0].0, ByteRange::new(0, 1 << 20));
    assert!(
        writer.begin(ByteRange::new(0, 1 << 20)),
        "nothing is missing"
    );
}

#[test]
fn one_byte_far_away_announces_nothing() {
    let mut writer = Writer::new();
    writer.begin(ByteRange::new(10 << 30, 1));
    assert_eq!(writer.asked[0].0, ByteRange::new(10 << 30, 1));
}

/// The door's fsx hung on it: a file that is closed, written back and held at once was forgotten
/// before it was settled.
#[test]
fn who_is_about_to_change_a_file_that_nobody_has_open_gets_to_do_so() {
    let mut writer = Writer::new();
    writer.begin(ByteRange::new(0, 100));
    writer.reserve_all();
    writer.end();
    writer.step(Event::Closed {
        session: SESSION,
        handle: HANDLE,
    });
    assert!(writer.hold());
    assert!(!writer.is_forgotten, "its next writer has to wait");
    writer.step(Event::Changed {
        session: SESSION,
        request: RequestId(1000),
        key: KEY,
        range: ByteRange::new(0, 0),
        has_bytes: true,
    });
    assert!(writer.is_forgotten);
}

#[test]
fn a_grant_that_is_given_back_keeps_nobody_from_changing_the_file() {
    let mut writer = Writer::new();
    writer.begin(ByteRange::new(0, 100));
    writer.reserve_all();
    writer.end();
    // All of it reaches the disk, and while its time is being set the next grant is made, and given
    // back.
    let sync = writer.next + 1;
    writer.next = sync;
    writer.step(Event::Sync {
        session: SESSION,
        handle: HANDLE,
        request: RequestId(sync),
    });
    assert!(writer.settles > 0);
    assert!(writer.begin(ByteRange::new(0, 50)));
    writer.settle();
    writer.step(Event::WriteAbort {
        session: SESSION,
        request: RequestId(writer.next),
    });
    assert!(writer.hold());
}

/// The door's fsx hung on it: the bytes waited for those that would hide them, these for the
/// holder, and the holder for the bytes.
#[test]
fn bytes_that_announce_a_length_are_written_for_who_waits_for_them() {
    const OTHER: SessionId = SessionId(2);
    let mut writer = Writer::new();
    for unit in 1..=2u64 {
        if !writer.begin(ByteRange::new((unit << 20) - 1, 1)) {
            writer.reserve_all();
        }
        writer.end();
    }
    writer.step(Event::SessionOpened {
        session: OTHER,
        label: SessionLabel::default(),
    });
    let hold = RequestId(1000);
    writer.step(Event::Hold {
        session: OTHER,
        request: hold,
        key: KEY,
    });
    assert!(!writer.begin(ByteRange::new(0, 1000)), "it is held");
    writer.now = writer.now + Duration::from_s(1);
    writer.step(Event::Timer);
    writer.settle();
    assert!(writer.done.contains(&hold));
}

/// Written, and all of it is on the disk.
fn written() -> Writer {
    let mut writer = Writer::new();
    writer.begin(ByteRange::new(0, 1 << 20));
    writer.reserve_all();
    writer.end();
    writer.now = writer.now + Duration::from_s(10);
    writer.step(Event::Timer);
    writer.settle();
    writer
}

#[test]
fn what_was_reserved_is_given_back_at_the_last_close() {
    let mut writer = written();
    assert!(!writer.is_trimmed);
    writer.step(Event::Closed {
        session: SESSION,
        handle: HANDLE,
    });
    assert!(writer.is_trimmed);
}

/// Its client may go on by itself, and bytes that it writes at that moment would be cut off.
#[test]
fn nothing_is_cut_off_a_file_whose_session_ended_without_closing_it() {
    let mut writer = written();
    writer.step(Event::SessionClosed { session: SESSION });
    writer.settle();
    assert!(!writer.is_trimmed);
    assert!(writer.is_forgotten, "the driver sees to it");
}

#[test]
fn nothing_is_cut_off_a_file_that_a_former_server_reserved_for() {
    let mut writer = Writer::new();
    writer.step(Event::ReserveFound { file: FILE });
    writer.step(Event::Closed {
        session: SESSION,
        handle: HANDLE,
    });
    assert!(!writer.is_trimmed && writer.is_forgotten);
}

/// A client whose handle writes through holds the file for each of its writes, and has no handle of
/// ours.
#[test]
fn nothing_is_cut_off_a_file_that_another_client_is_changing() {
    let holder = SessionId(2);
    for (heard, is_cut) in [(Some(1000), true), (Some(u64::MAX), false), (None, false)] {
        let mut writer = written();
        writer.hold_by(holder, RequestId(900), KEY);
        assert!(
            writer.done.contains(&RequestId(900)),
            "nothing of it is dirty"
        );
        writer.step(Event::Closed {
            session: SESSION,
            handle: HANDLE,
        });
        assert!(!writer.is_trimmed && !writer.is_forgotten);
        match heard {
            Some(length) => writer.step(Event::Changed {
                session: holder,
                request: RequestId(901),
                key: KEY,
                range: ByteRange::new(0, length),
                has_bytes: true,
            }),
            None => writer.step(Event::SessionClosed { session: holder }),
        }
        // To a length that is not known, or beside a door that may go on, nothing is cut: the
        // driver does that when no program has the file open.
        assert_eq!((writer.is_trimmed, writer.is_forgotten), (is_cut, !is_cut));
    }
}

/// A disk that is almost full gives as much as needed and hardly more: the server asks ahead of
/// need once, and then when a write waits.
#[test]
fn a_disk_that_gives_little_is_not_asked_again_at_each_write() {
    let mut writer = Writer::new();
    let (mut ahead, mut waited) = (0, 0);
    for frame in 0..200u64 {
        let mut answered = writer.asked.len();
        if !writer.begin(ByteRange::new(frame * 500_000, 500_000)) {
            waited += 1;
            answered += 1;
            writer.reserve_with(3 << 20);
        }
        assert!(writer.is_granted, "frame {frame}: {:?}", writer.asked);
        writer.end();
        if writer.asked.len() > answered {
            ahead += 1;
            writer.reserve_with(4096);
        }
    }
    assert_eq!(ahead, 1, "{:?}", writer.asked);
    assert!((25..=30).contains(&waited), "{waited} of 200 waited");
}

/// A door asks for a hold right behind the opening, cuts the file, and writes: the blocks found
/// before are its own no more.
#[test]
fn a_file_that_is_changed_while_it_is_opened_is_granted_nothing_over_what_it_had_before() {
    for is_changed in [false, true] {
        let mut writer = Writer::new();
        let (handle, file) = (HandleId(2), FileId(8));
        let key = FileKey {
            device: 1,
            inode: 8,
        };
        writer.step(Event::Opening {
            session: SESSION,
            handle,
            path: "cut.mov".to_string(),
            part: FilePart::WHOLE,
        });
        if is_changed {
            writer.step(Event::Changed {
                session: SESSION,
                request: RequestId(500),
                key,
                range: ByteRange::new(0, u64::MAX),
                has_bytes: true,
            });
        }
        let extents = vec![Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(2 << 30),
            length: ByteCount(1 << 20),
        }];
        writer.opened(handle, (file, key), ByteCount(1 << 20), extents);
        writer.step(Event::WriteBegin {
            session: SESSION,
            handle,
            request: RequestId(501),
            range: ByteRange::new(0, 4096),
            sent: writer.now,
        });
        writer.step(Event::Stat {
            file,
            size: ByteCount(1 << 20),
            version: 2,
            is_fresh: false,
        });
        assert_eq!(
            (writer.is_granted, writer.asked.len()),
            (!is_changed, usize::from(is_changed))
        );
    }
}

/// A file becomes known while a client, which asked before that, is about to cut it: none of it is
/// granted before that is done, and then it has its new length. Found by the simulator's torture,
/// seed 7000, round 7.
#[test]
fn who_changes_a_file_that_is_not_known_holds_it_once_it_is() {
    const OTHER: FileId = FileId(8);
    let key = FileKey {
        device: 1,
        inode: 8,
    };
    let holder = SessionId(2);
    for leaves in [false, true] {
        let mut writer = Writer::new();
        writer.hold_by(holder, RequestId(900), key);
        assert_eq!(writer.done, [RequestId(900)]);
        writer.step(Event::Opening {
            session: SESSION,
            handle: HandleId(2),
            path: "cut.mov".to_string(),
            part: FilePart::WHOLE,
        });
        writer.opened(
            HandleId(2),
            (OTHER, key),
            ByteCount(57_344),
            vec![Extent {
                logical: ByteOffset(0),
                physical: ByteOffset(0),
                length: ByteCount(57_344),
            }],
        );
        writer.step(Event::WriteBegin {
            session: SESSION,
            handle: HandleId(2),
            request: RequestId(901),
            range: ByteRange::new(26_766, 1),
            sent: writer.now,
        });
        assert!(!writer.is_granted, "it is being cut");
        if leaves {
            writer.step(Event::SessionClosed { session: holder });
            assert!(writer.is_granted);
            continue;
        }
        writer.step(Event::Changed {
            session: holder,
            request: RequestId(902),
            key,
            range: ByteRange::new(0, u64::MAX),
            has_bytes: true,
        });
        assert!(!writer.is_granted, "its length is not known");
        writer.step(Event::Stat {
            file: OTHER,
            size: ByteCount(0),
            version: 2,
            is_fresh: true,
        });
        writer.step(Event::Reserved {
            file: OTHER,
            result: Ok(vec![Extent {
                logical: ByteOffset(0),
                physical: ByteOffset(0),
                length: ByteCount(57_344),
            }]),
        });
        assert!(writer.is_granted);
        writer.step(Event::WriteEnd {
            session: SESSION,
            request: RequestId(901),
        });
        assert_eq!(writer.known.last(), Some(&ByteCount(26_767)));
        // A change without a hold ends no hold that is to come.
        assert!(writer.hold());
    }
}
