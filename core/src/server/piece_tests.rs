// SPDX-License-Identifier: Apache-2.0
//! Pieces of any size in any order: the memory from which each request is put together, and that
//! all of them are written.

use super::*;

/// A request as its driver sends it: of how many pieces of memory, and how many pages it had to
/// copy together first. A direct write is of whole pages of a lane, or of a copy; a buffered one of
/// anything, parts of less than a page copied together.
pub(super) fn memory_of(io: &IoWrite, parts: &[WritePart]) -> (usize, u64) {
    // Of each page of the request by how many parts it is filled.
    let mut at = io.range.start.0;
    let mut fills: BTreeMap<u64, u64> = BTreeMap::new();
    for part in parts {
        let end = at + part.bytes();
        for page in at / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
            *fills.entry(page).or_default() += 1;
        }
        at = end;
    }
    let is_copied = |page: u64| fills.get(&page).is_some_and(|&count| count > 1);
    let mut at = io.range.start.0;
    // The end of the last piece of memory: a copy, or a place in a lane.
    let mut last: Option<Option<(LaneId, u64)>> = None;
    let mut pieces = 0;
    for part in parts {
        let end = at + part.bytes();
        for page in at / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
            let into = (page * PAGE_BYTES).max(at) - at;
            let until = ((page + 1) * PAGE_BYTES).min(end) - at;
            // A buffer is memory as well.
            let (memory, offset) = match *part {
                WritePart::Lane(part) => (part.lane, part.offset),
                WritePart::Slot { slot, offset, .. } => {
                    (LaneId(u32::MAX - slot.0), u64::from(offset))
                }
            };
            let (from, to) = match is_copied(page) {
                true => (None, None),
                false => (
                    Some((memory, offset + into)),
                    Some((memory, offset + until)),
                ),
            };
            pieces += usize::from(last != Some(from));
            last = Some(to);
        }
        at = end;
    }
    assert!(
        pieces <= PART_COUNT_MAX || pieces == 1,
        "{pieces} pieces: {io:?} {parts:?}"
    );
    (
        pieces,
        fills.keys().filter(|&&page| is_copied(page)).count() as u64,
    )
}

/// Pieces of any size in any order, more of them to a page than a request may have: the request to
/// the device stays within that bound (see [`memory_of`]), and has exactly the written bytes.
#[test]
fn any_sequence_of_pieces_is_written() {
    let (mut writes, mut joined) = (0, 0);
    for seed in 0..200 {
        let mut world = World::new(3);
        world.is_exclusive = seed % 2 == 0;
        let mut world = emptied(world);
        world.random = Random(seed);
        world.refuses_direct = seed % 5 == 0;
        let most = [1, 3, 40, 700, 5_000, 9_000][seed as usize % 6];
        let mut at = world.random.below(9_000);
        for turn in 0..60 {
            let range = match seed % 3 {
                0 => world.range(9_000, most),
                1 => ByteRange::new(world.random.below(30) * PAGE_BYTES, PAGE_BYTES),
                _ => ByteRange::new(at, 1 + world.random.below(most)),
            };
            at = range.end();
            let index = world.random.below(3) as usize;
            if matches!(world.clients[index].2, Doing::Nothing) {
                world.write(index, range);
                world.end_reserve();
            }
            if turn % 20 == 19 {
                for _ in 0..world.random.below(60) {
                    world.now = world.now + Duration::from_ms(60);
                    world.step(Event::Timer);
                    world.end_io();
                }
            }
        }
        world.settle();
        writes += world.counts.writes;
        joined += world.counts.joined_writes;
    }
    assert!(
        writes > 3000 && joined > 20,
        "{writes} writes, {joined} joined"
    );
}

/// A page from more pieces than a request may have goes by itself: they are copied together.
#[test]
fn bytes_one_by_one_are_written() {
    const COUNT: u64 = 6 * PART_COUNT_MAX as u64;
    let mut world = quiet();
    world.is_immortal = true;
    for step in 0..COUNT {
        world.write(step as usize % 3, ByteRange::new(100 + step, 1));
    }
    let before = world.counts.device_writes;
    world.settle();
    assert_eq!(world.counts.writes, COUNT);
    assert_eq!(world.counts.device_writes - before, 1);
}

/// Where blocks are larger than our pages a request past the kernel's cache is refused, each time.
#[test]
fn what_is_refused_past_the_cache_goes_through_it() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 8192));
    world.write_back(Err(Errno::INVALID));
    world.write_back(Ok(()));
    assert_eq!(
        (world.native == world.flat, world.counts.refused),
        (true, 0)
    );
    world.write(0, ByteRange::new(4096, 4096));
    world.write_back(Ok(()));
    assert_eq!(world.counts.device_writes, 3, "it is known by now");
    world.sync(0);
    world.settle();
    assert_eq!(world.counts.syncs, 1);
}
