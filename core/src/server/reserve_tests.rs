// SPDX-License-Identifier: Apache-2.0
//! What is asked of the file system for a file that is being written, and how long its writer waits for it.

use super::*;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

const SESSION: SessionId = SessionId(1);
const HANDLE: HandleId = HandleId(1);
const FILE: FileId = FileId(7);
const DISK: DeviceId = DeviceId(1);

struct Writer {
    server: Server,
    now: Instant,
    next: u64,
    /// What was reserved: needed, and up to where.
    asked: Vec<(ByteRange, u64)>,
    mapped: u64,
    granted: u64,
    is_granted: bool,
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
        });
        writer.step(Event::Opened {
            session: SESSION,
            handle: HANDLE,
            facts: Ok(FileFacts {
                file: FILE,
                key: FileKey {
                    device: 1,
                    inode: 7,
                },
                device: DISK,
                size: ByteCount(0),
                version: 1,
                extents: Vec::new(),
                hint: None,
                way: WriteWay::Cached,
                is_exclusive: false,
            }),
        });
        writer
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
                // (The disk has what it is given at once.)
                Action::SubmitWrite(io) => {
                    let result = Ok(io.range.length);
                    self.step(Event::IoDone { io: io.io, result });
                }
                _ => {}
            }
        }
    }

    fn reserve_all(&mut self) {
        let end = self.asked.last().map_or(0, |asked| asked.1);
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
        // What was asked for ahead comes before the next frame.
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
