// SPDX-License-Identifier: Apache-2.0
//! The path of a read through the ring allocates nothing once it is warm.
#![allow(unsafe_code, clippy::unwrap_used)] // An allocator is unsafe by nature.

use rushes_core::server::IoClass;
use rushes_core::units::*;
use rushes_sys::{Completion, Ring, RingLimits, Segment, SegmentHome, SlotRead, bell};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's; the counter is a thread-local without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn warm_ring_reads_and_watches_without_allocating() {
    let path = std::env::temp_dir().join(format!("rushes-allocations-{}", std::process::id()));
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let file = Arc::new(std::fs::File::open(&path).unwrap().into());
    std::fs::remove_file(&path).unwrap();
    let (segment, _) = Segment::create(SegmentHome::Memfd, 16, 65536).unwrap();
    let mut ring = Ring::new(Arc::new(segment), RingLimits::default()).unwrap();
    let door = Arc::new(bell::new().unwrap());
    ring.bell_add(Arc::clone(&door), 1).unwrap();
    let slots: Vec<SlotIndex> = (0..16).rev().map(SlotIndex).collect();
    let mut round = || {
        for n in 0..32 {
            ring.read(&SlotRead {
                file: &file,
                range: ByteRange::new(0, 1 << 20),
                expected: ByteCount(1 << 20),
                slots: &slots,
                class: IoClass::RealTime,
                user_data: n,
            })
            .unwrap();
        }
        bell::ring(&*door).unwrap();
        let (mut reads, mut bells) = (0, 0);
        while reads < 32 || bells < 1 {
            ring.submit_and_wait().unwrap();
            while let Some(completion) = ring.next_completion() {
                match completion {
                    Completion::Read { result, .. } => {
                        assert_eq!(result, Ok(ByteCount(1 << 20)));
                        reads += 1;
                    }
                    Completion::Bell { .. } => bells += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
    };
    round();
    let before = COUNT.with(Cell::get);
    for _ in 0..10 {
        round();
    }
    assert_eq!(COUNT.with(Cell::get) - before, 0);
}
