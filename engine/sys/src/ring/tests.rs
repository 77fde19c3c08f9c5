// SPDX-License-Identifier: Apache-2.0
//! The ring over the kernel, and the fake one.

use super::*;
use crate::{SegmentHome, bell};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;

const SLOT: u32 = 65536;

fn segment(slot_count: u32) -> Arc<Segment> {
    Arc::new(
        Segment::create(SegmentHome::Anonymous, slot_count, SLOT)
            .unwrap()
            .0,
    )
}

fn limits() -> RingLimits {
    RingLimits {
        read_count_max: 16,
        poll_count_max: 16,
        slots_per_read_max: 32,
    }
}

/// A file whose every 8 bytes say where they are.
struct Footage {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Footage {
    fn new(name: &str, length: usize) -> Footage {
        let path = std::env::temp_dir().join(format!("rushes-ring-{name}-{}", std::process::id()));
        let bytes: Vec<u8> = (0..length.div_ceil(8) as u64)
            .flat_map(|n| (n * 8 + 0x0123_4567_0000_0000).to_le_bytes())
            .take(length)
            .collect();
        std::fs::File::create(&path)
            .unwrap()
            .write_all(&bytes)
            .unwrap();
        Footage { path, bytes }
    }

    fn open(&self, direct: bool) -> Arc<OwnedFd> {
        use rustix::fs::{Mode, OFlags, open};
        let flags = if direct {
            OFlags::RDONLY | OFlags::DIRECT
        } else {
            OFlags::RDONLY
        };
        let opened = open(&self.path, flags, Mode::empty());
        Arc::new(
            opened
                .or_else(|_| open(&self.path, OFlags::RDONLY, Mode::empty()))
                .unwrap(),
        )
    }
}

impl Drop for Footage {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn slots(list: &[u32]) -> Vec<SlotIndex> {
    list.iter().map(|&slot| SlotIndex(slot)).collect()
}

fn next(ring: &mut Ring) -> Completion {
    for _ in 0..1000 {
        if let Some(completion) = ring.next_completion() {
            return completion;
        }
        ring.submit_and_wait().unwrap();
    }
    panic!("nothing completed");
}

/// Read, and compare the bytes in the slots with the file.
fn check(
    ring: &mut Ring,
    segment: &Segment,
    footage: &Footage,
    direct: bool,
    range: ByteRange,
    list: &[u32],
) {
    let slots = slots(list);
    let size = footage.bytes.len() as u64;
    let expected = range.length.0.min(size.saturating_sub(range.start.0));
    ring.read(&SlotRead {
        file: &footage.open(direct),
        range,
        expected: ByteCount(expected),
        slots: &slots,
        class: IoClass::RealTime,
        user_data: 77,
    })
    .unwrap();
    let result = Ok(ByteCount(expected));
    assert_eq!(
        next(ring),
        Completion::Read {
            user_data: 77,
            result
        }
    );
    let mut position = range.start.0;
    for slot in slots {
        let offset = (position % u64::from(SLOT)) as u32;
        let wanted =
            u64::from(SLOT - offset).min((range.start.0 + expected).saturating_sub(position));
        let mut found = vec![0; wanted as usize];
        segment.copy_out(slot, offset, &mut found).unwrap();
        if wanted == 0 {
            break;
        }
        let at = position as usize;
        assert!(
            found == footage.bytes[at..at + wanted as usize],
            "slot {slot:?} at {at}"
        );
        position += wanted;
    }
}

#[test]
fn reads_land_in_their_slots_contiguous_or_scattered() {
    let footage = Footage::new("slots", 20 * SLOT as usize + 5000);
    let segment = segment(64);
    let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
    eprintln!("{:?}", ring.facts());
    let slot = u64::from(SLOT);
    for direct in [false, true] {
        let mut check = |start, length, list: &[u32]| {
            check(
                &mut ring,
                &segment,
                &footage,
                direct,
                ByteRange::new(start, length),
                list,
            );
        };
        check(0, slot, &[5]);
        check(0, 4 * slot, &[8, 9, 10, 11]);
        check(2 * slot, 4 * slot, &[40, 3, 4, 20]);
        check(slot + 8192, 2 * slot, &[30, 1, 2]);
        // To the end of the file and beyond.
        check(19 * slot, 3 * slot, &[0, 63, 31]);
        check(30 * slot, slot, &[7]);
    }
}

#[test]
fn many_reads_at_once_each_get_their_own_bytes() {
    let footage = Footage::new("many", 64 * SLOT as usize);
    let segment = segment(64);
    let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
    let file = footage.open(true);
    for round in 0..4u64 {
        for n in 0..16u64 {
            let block = round * 16 + n;
            ring.read(&SlotRead {
                file: &file,
                range: ByteRange::new(block * u64::from(SLOT), u64::from(SLOT)),
                expected: ByteCount(u64::from(SLOT)),
                slots: &[SlotIndex(63 - block as u32)],
                class: IoClass::BestEffort,
                user_data: block,
            })
            .unwrap();
        }
        let full = ring.read(&SlotRead {
            file: &file,
            range: ByteRange::new(0, 4096),
            expected: ByteCount(4096),
            slots: &[SlotIndex(0)],
            class: IoClass::Idle,
            user_data: 0,
        });
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut seen: Vec<u64> = (0..16)
            .map(|_| match next(&mut ring) {
                Completion::Read {
                    user_data,
                    result: Ok(ByteCount(65536)),
                } => user_data,
                other => panic!("{other:?}"),
            })
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (round * 16..round * 16 + 16).collect::<Vec<_>>());
    }
    assert_eq!(ring.read_count(), 0);
    for block in 0..64usize {
        let mut found = vec![0; SLOT as usize];
        segment
            .copy_out(SlotIndex(63 - block as u32), 0, &mut found)
            .unwrap();
        let start = block * SLOT as usize;
        assert!(found == footage.bytes[start..start + SLOT as usize]);
    }
}

#[test]
fn errors_of_the_device_come_back_as_numbers() {
    let segment = segment(2);
    let mut ring = Ring::new(segment, limits()).unwrap();
    let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
    ring.read(&SlotRead {
        file: &Arc::new(directory.into()),
        range: ByteRange::new(0, 4096),
        expected: ByteCount(4096),
        slots: &[SlotIndex(0)],
        class: IoClass::BestEffort,
        user_data: 1,
    })
    .unwrap();
    let result = Err(Errno(libc::EISDIR as u32));
    assert_eq!(
        next(&mut ring),
        Completion::Read {
            user_data: 1,
            result
        }
    );
}

#[test]
fn reads_that_do_not_fit_their_slots_are_refused() {
    let footage = Footage::new("misfit", 4096);
    let segment = segment(4);
    let (mut fake, _) = Ring::fake(Arc::clone(&segment), limits());
    let mut real = Ring::new(segment, limits()).unwrap();
    let file = footage.open(false);
    let mut refused = |start, length, list: &[u32]| {
        let slots = slots(list);
        let read = SlotRead {
            file: &file,
            range: ByteRange::new(start, length),
            expected: ByteCount(0),
            slots: &slots,
            class: IoClass::Idle,
            user_data: 0,
        };
        for ring in [&mut fake, &mut real] {
            assert_eq!(
                ring.read(&read).unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
        }
    };
    refused(0, 4096, &[]);
    refused(0, 0, &[0]);
    refused(0, u64::from(SLOT) + 1, &[0]);
    refused(4096, u64::from(SLOT), &[0]);
    refused(0, 4096, &[4]);
    refused(0, 4096, &[u32::MAX]);
    refused(u64::MAX - 4096, 4096, &[0]);
    refused(1 << 63, 4096, &[0]);
    refused(0, u64::MAX, &[0, 1, 2, 3]);
    refused(0, 4096, &[0; 33]);
}

#[test]
fn watched_descriptors_are_reported_until_drained_and_not_after_removal() {
    let mut ring = Ring::new(segment(1), limits()).unwrap();
    let (ours, theirs) = crate::socket::pair().unwrap();
    let ours = Arc::new(ours);
    let id = ring.poll_add(Arc::clone(&ours), 5).unwrap();
    crate::socket::send(&theirs, &[b"hello"], &[]).unwrap();
    let ready = Completion::Ready {
        user_data: 5,
        readable: true,
        hung_up: false,
    };
    // Work left undone is reported again.
    assert_eq!(next(&mut ring), ready);
    assert_eq!(next(&mut ring), ready);
    crate::socket::receive(&*ours, &mut [0; 16]).unwrap();
    drop(theirs);
    let Completion::Ready {
        user_data: 5,
        hung_up: true,
        ..
    } = next(&mut ring)
    else {
        panic!("the end was not seen");
    };
    ring.poll_remove(id);
    ring.poll_remove(id);
    ring.wake_at(clock::now() + Duration::from_ms(20));
    assert_eq!(next(&mut ring), Completion::Timer);
}

#[test]
fn removed_watch_lets_its_descriptor_go() {
    let mut ring = Ring::new(segment(1), limits()).unwrap();
    let (ours, theirs) = crate::socket::pair().unwrap();
    let id = ring.poll_add(Arc::new(ours), 5).unwrap();
    ring.submit().unwrap();
    ring.poll_remove(id);
    let _other = ring.bell_add(Arc::new(bell::new().unwrap()), 6).unwrap();
    ring.wake_at(clock::now() + Duration::from_ms(20));
    assert_eq!(next(&mut ring), Completion::Timer);
    // Our end was closed with the ring's last hold on it.
    let packet = crate::socket::receive(&theirs, &mut [0; 4])
        .unwrap()
        .unwrap();
    assert_eq!(packet.bytes, 0);
}

#[test]
fn doorbell_is_silenced_and_armed_again() {
    let mut ring = Ring::new(segment(1), limits()).unwrap();
    let door = Arc::new(bell::new().unwrap());
    ring.bell_add(Arc::clone(&door), 9).unwrap();
    for _ in 0..3 {
        bell::ring(&*door).unwrap();
        bell::ring(&*door).unwrap();
        assert_eq!(next(&mut ring), Completion::Bell { user_data: 9 });
        ring.wake_at(clock::now() + Duration::from_ms(5));
        assert_eq!(next(&mut ring), Completion::Timer);
    }
}

#[test]
fn timer_is_replaced_and_said_once() {
    let mut ring = Ring::new(segment(1), limits()).unwrap();
    let start = clock::now();
    ring.wake_at(start + Duration::from_s(600));
    ring.wake_at(start + Duration::from_ms(30));
    assert_eq!(next(&mut ring), Completion::Timer);
    assert!(clock::now() >= start + Duration::from_ms(30));
    assert!(ring.next_completion().is_none());
    ring.wake_at(Instant::ZERO);
    assert_eq!(next(&mut ring), Completion::Timer);
}

#[test]
fn ring_dropped_with_reads_in_flight_waits_for_them() {
    let footage = Footage::new("drop", 16 * SLOT as usize);
    let segment = segment(16);
    for _ in 0..8 {
        let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
        for n in 0..16u32 {
            ring.read(&SlotRead {
                file: &footage.open(true),
                range: ByteRange::new(u64::from(n * SLOT), u64::from(SLOT)),
                expected: ByteCount(u64::from(SLOT)),
                slots: &[SlotIndex(n)],
                class: IoClass::BestEffort,
                user_data: u64::from(n),
            })
            .unwrap();
        }
        ring.poll_add(Arc::new(bell::new().unwrap()), 0).unwrap();
        ring.submit().unwrap();
        drop(ring);
        // The ring gave its hold on the segment back, so nothing was in flight any more.
        assert_eq!(Arc::strong_count(&segment), 1);
    }
}

#[test]
fn pipe_that_never_answers_does_not_keep_the_ring_from_ending() {
    let (out, _held) = rustix::pipe::pipe().unwrap();
    let segment = segment(1);
    let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
    ring.read(&SlotRead {
        file: &Arc::new(out),
        range: ByteRange::new(0, 4096),
        expected: ByteCount(4096),
        slots: &[SlotIndex(0)],
        class: IoClass::BestEffort,
        user_data: 0,
    })
    .unwrap();
    ring.submit().unwrap();
    drop(ring);
    assert_eq!(Arc::strong_count(&segment), 1);
}

#[test]
fn fake_ring_completes_what_the_test_says() {
    let footage = Footage::new("fake", 3 * SLOT as usize);
    let segment = segment(8);
    let (mut ring, fake) = Ring::fake(Arc::clone(&segment), limits());
    let file = footage.open(false);
    for tag in [1, 2] {
        ring.read(&SlotRead {
            file: &file,
            range: ByteRange::new(4096, 2 * u64::from(SLOT)),
            expected: ByteCount(2 * u64::from(SLOT)),
            slots: &[SlotIndex(6), SlotIndex(0), SlotIndex(1)],
            class: IoClass::RealTime,
            user_data: tag,
        })
        .unwrap();
    }
    assert_eq!(ring.next_completion(), None);
    assert!(fake.finish(2, Err(Errno::IO)));
    assert!(fake.serve(1));
    assert!(!fake.serve(1));
    let failed = Completion::Read {
        user_data: 2,
        result: Err(Errno::IO),
    };
    assert_eq!(ring.next_completion(), Some(failed));
    let result = Ok(ByteCount(2 * u64::from(SLOT)));
    assert_eq!(
        ring.next_completion(),
        Some(Completion::Read {
            user_data: 1,
            result
        })
    );
    let mut found = [0; 8];
    segment.copy_out(SlotIndex(0), 0, &mut found).unwrap();
    assert_eq!(found, footage.bytes[SLOT as usize..SLOT as usize + 8]);

    let door = Arc::new(bell::new().unwrap());
    let id = ring.bell_add(Arc::clone(&door), 3).unwrap();
    fake.poll_now();
    assert_eq!(ring.next_completion(), None);
    bell::ring(door.as_fd()).unwrap();
    fake.poll_now();
    assert_eq!(
        ring.next_completion(),
        Some(Completion::Bell { user_data: 3 })
    );
    ring.poll_remove(id);
    assert_eq!(fake.polls().len(), 0);
    ring.wake_at(Instant(100));
    assert_eq!(ring.next_completion(), None);
    fake.set_now(Instant(100));
    assert_eq!(ring.next_completion(), Some(Completion::Timer));
}

#[test]
fn read_that_stops_short_goes_on_where_it_stopped() {
    // A pipe returns the bytes that it has, like a device that returns a part.
    let (out, inward) = rustix::pipe::pipe().unwrap();
    let segment = segment(8);
    let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
    let slot = u64::from(SLOT);
    ring.read(&SlotRead {
        file: &Arc::new(out),
        range: ByteRange::new(0, 3 * slot),
        expected: ByteCount(3 * slot),
        slots: &slots(&[5, 2, 7]),
        class: IoClass::BestEffort,
        user_data: 4,
    })
    .unwrap();
    // One whole slot, then 512 bytes of the next, then 100 (not a place to go on from): the end.
    for (fill, count) in [(1, SLOT as usize), (2, 512), (3, 100)] {
        let bytes = vec![fill; count];
        assert_eq!(rustix::io::write(&inward, &bytes).unwrap(), count);
        ring.wake_at(clock::now() + Duration::from_ms(20));
        let done = next(&mut ring);
        if fill < 3 {
            assert_eq!(done, Completion::Timer);
        } else {
            let result = Ok(ByteCount(slot + 612));
            assert_eq!(
                done,
                Completion::Read {
                    user_data: 4,
                    result
                }
            );
        }
    }
    let mut found = vec![0; SLOT as usize];
    segment.copy_out(SlotIndex(5), 0, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 1));
    segment.copy_out(SlotIndex(2), 0, &mut found).unwrap();
    let expected = [vec![2; 512], vec![3; 100], vec![0; SLOT as usize - 612]].concat();
    assert!(found == expected);
}

#[test]
fn real_time_reads_go_as_best_effort_where_the_class_is_refused() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let footage = Footage::new("refused", SLOT as usize);
    // Capabilities belong to a thread, and so does a ring.
    std::thread::spawn(move || {
        let segment = segment(1);
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::SYS_NICE | CapabilitySet::SYS_ADMIN;
        if set_capabilities(None, sets).is_err() {
            crate::skip("cannot drop capabilities here");
            return;
        }
        let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
        let whole = ByteRange::new(0, u64::from(SLOT));
        check(&mut ring, &segment, &footage, false, whole, &[0]);
        assert!(ring.facts().real_time_refused);
        check(&mut ring, &segment, &footage, true, whole, &[0]);
    })
    .join()
    .unwrap();
}

#[test]
fn file_that_forbids_a_write_for_good_answers_so_and_the_class_is_kept() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    // A sealed file answers each write with EPERM, as a server of FUSE may answer a read.
    let file = memfd_create(c"sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 4096).unwrap();
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let segment = segment(1);
    let mut ring = Ring::new(Arc::clone(&segment), limits()).unwrap();
    let file = Arc::new(file);
    for user_data in 0..2 {
        ring.write(FileWrite {
            file: Arc::clone(&file),
            offset: 0,
            parts: vec![segment.part(SlotIndex(0), 0, 4096).unwrap()],
            class: IoClass::RealTime,
            user_data,
        })
        .unwrap();
        let result = Err(Errno(1));
        assert_eq!(next(&mut ring), Completion::Written { user_data, result });
    }
    assert!(!ring.facts().real_time_refused);
}
