// SPDX-License-Identifier: Apache-2.0
//! Gaps that cost less than another request: read through, or written with the bytes that they
//! hold.
//!
//! The trick is that a write needs no second copy of the bytes in a gap. A page of the cache is the
//! device's page, with bytes that are not written yet laid over it; a page that is valid can be
//! written as it is. Such a page, on its way, must never overwrite newer bytes. Ours are safe: a
//! commit makes the buffer an orphan, since the flight has it pinned, and the write-back of the new
//! bytes waits, since the flight's range has the gap in it. Bytes of a writer beside us are not
//! safe; so gaps are written only in files that are ours alone (docs/decisions/0018). Absent: the
//! choice of the next request.

use super::state::*;
use super::turns::DEMANDS_WEIGHED;
use super::writeback::{parts_of, without};
use super::*;
use crate::cache::PageSet;
use crate::write::Span;
use alloc::vec::Vec;
use core::ops::Range;

/// The spans and buffers that a write takes.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    pub spans: Vec<Span>,
    /// Buffers that it writes from, each once.
    pub pins: Vec<SlotIndex>,
    /// The bytes that the device has already. Units: bytes.
    pub bridged: u64,
}

impl Device {
    /// Bridging a gap costs this device less than another request behind it would.
    pub(super) fn bridges(&self, writes: bool, gap: u64) -> bool {
        self.model.transfer_of(writes, gap) < self.model.another(writes, gap)
    }
}

impl Stream {
    /// The bytes of `range` that the stream did not ask for, if `range` has advanced it by `done`.
    /// Units: bytes.
    pub(super) fn read_over(&self, range: ByteRange, done: u64) -> u64 {
        match self.flow {
            Flow::Strided { .. } if done > 0 => range.length.0.saturating_sub(done),
            _ => 0,
        }
    }
}

impl Server {
    // ---- Writing ----

    /// Whether gaps between dirty bytes of this file may be written with them: no other writer can
    /// have put newer bytes there. A session without a lane writes on its own descriptor and
    /// reports it afterwards. So does a holder once it has its answer; until then it waits for all
    /// of the file to be written.
    fn may_bridge(&self, file: &File) -> bool {
        let is_answered = |(_, request): &(SessionId, Option<RequestId>)| request.is_none();
        self.policy.coalesce
            && file.is_exclusive
            && !file.size_stale
            && !file.writing.is_unbridgeable
            && !file.writing.holds.iter().any(is_answered)
            && self.sessions.values().all(|session| session.lane.is_some())
    }

    /// A request for `first` of a file, lengthened by the dirty bytes behind it as long as the gap
    /// between costs less than another request. Never past a chunk, so that no request waits longer
    /// for the device than without; nor past the end that the file system knows, nor from one
    /// extent to the next.
    pub(super) fn lengthened(&self, device: &Device, file: &File, first: ByteRange) -> ByteRange {
        let start = first.start.0;
        let chunk = self.limits.chunk_bytes_max / PAGE_BYTES * PAGE_BYTES;
        if first.length.0 >= chunk || !self.may_bridge(file) {
            return first;
        }
        let contiguous = match file.is_mapped(first) {
            true => file.place(start).contiguous,
            false => 0,
        };
        let end_max = (start + chunk.min(contiguous))
            .min(file.writing.native_size)
            .min(file.writing.mapped_end)
            / PAGE_BYTES
            * PAGE_BYTES;
        let mut end = first.end();
        while let Some(next) = next_whole(file, ByteRange::new(end, end_max.saturating_sub(end))) {
            let gap = ByteRange::new(end, next.start.0 - end);
            let all = ByteRange::new(end, next.end() - end);
            let worth = gap.length.0 == 0
                || device.bridges(true, gap.length.0) && self.is_cached(file, gap);
            if !worth || without(&file.writing.flights, end, next.end()) != Some(all) {
                break;
            }
            end = next.end();
        }
        ByteRange::new(start, end - start)
    }

    /// Every page of `range`, which is of whole pages, is in the cache.
    fn is_cached(&self, file: &File, range: ByteRange) -> bool {
        pages_of(range, self.slot_bytes()).all(|(number, pages)| {
            let pages = PageSet::run(pages.start, pages.end);
            file.blocks
                .get(&number)
                .is_some_and(|&slot| self.cache.valid(slot).contains(pages))
        })
    }

    /// As much of `range`, from its start, as one request may be put together from. A run of memory
    /// counts once, and once more when it begins within a page: the sender has to copy that page
    /// together. The first page always goes, from however many pieces.
    pub(super) fn within_parts(&self, file: &File, range: ByteRange, buffered: bool) -> ByteRange {
        let start = range.start.0;
        let first_page_end = (start / PAGE_BYTES + 1) * PAGE_BYTES;
        let count_max = u64::from(self.limits.write_part_count_max);
        let mut count = 0;
        let mut follows: Option<(LaneId, u64)> = None;
        // Behind the last dirty byte that goes.
        let mut end = start;
        while end < range.end() {
            let left = ByteRange::new(end, range.end() - end);
            let Some(whole) = (if buffered {
                Some(left)
            } else {
                next_whole(file, left)
            }) else {
                break;
            };
            let gap = ByteRange::new(end, whole.start.0 - end);
            let buffers = pages_of(gap, self.slot_bytes()).count() as u64;
            count += buffers;
            if buffers > 0 {
                follows = None;
            }
            for span in file.writing.dirty.spans(whole) {
                let Some(piece) = self.pieces.get(span.piece.0) else {
                    continue;
                };
                let mut at = span.range.start.0;
                for part in parts_of(piece, &span) {
                    if follows != Some((part.lane, part.offset)) {
                        count += 1 + u64::from(!at.is_multiple_of(PAGE_BYTES));
                    }
                    if count > count_max {
                        // Stop before this page, and before a gap with no dirty bytes behind it.
                        let page = at / PAGE_BYTES * PAGE_BYTES;
                        let stop = if page > whole.start.0 { page } else { end };
                        let stop = stop.max(first_page_end).min(range.end());
                        return ByteRange::new(start, stop - start);
                    }
                    follows = Some((part.lane, part.offset + part.length));
                    at += part.length;
                }
            }
            end = whole.end();
        }
        range
    }

    /// Put together the bytes for a write of `range`: dirty ones out of their lanes, all others out
    /// of the cache, where they stay until [`Server::let_go`].
    pub(super) fn gather(
        &mut self,
        id: FileId,
        range: ByteRange,
        buffered: bool,
        actions: &mut Actions,
    ) -> Gathered {
        let mut gathered = Gathered::default();
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get(&id) else {
            return gathered;
        };
        gathered.spans = file.writing.dirty.spans(range).collect();
        let mut at = range.start.0;
        while at < range.end() {
            let left = ByteRange::new(at, range.end() - at);
            let whole = match buffered {
                true => left,
                false => next_whole(file, left).unwrap_or(ByteRange::new(range.end(), 0)),
            };
            let gap = ByteRange::new(at, whole.start.0 - at);
            gathered.bridged += gap.length.0;
            for (number, pages) in pages_of(gap, slot_bytes) {
                let slot = file.blocks.get(&number);
                let &slot = slot.expect("a gap is gone over when all of it is in the cache");
                assert!(
                    self.cache
                        .valid(slot)
                        .contains(PageSet::run(pages.start, pages.end)),
                    "bytes of a gap that are not there were to be written"
                );
                actions.parts.push(WritePart::Slot {
                    slot,
                    offset: pages.start * PAGE_BYTES as u32,
                    length: (pages.end - pages.start) * PAGE_BYTES as u32,
                });
                if gathered.pins.last() != Some(&slot) {
                    self.cache.pin(slot);
                    gathered.pins.push(slot);
                }
            }
            for span in file.writing.dirty.spans(whole) {
                let piece = self.pieces.get(span.piece.0);
                let piece = piece.expect("dirty bytes have their piece");
                let parts = parts_of(piece, &span).map(WritePart::Lane);
                actions.parts.extend(parts);
            }
            at = whole.end();
        }
        for span in &gathered.spans {
            let piece = self.pieces.get_mut(span.piece.0);
            piece.expect("dirty bytes have their piece").flights += 1;
        }
        gathered
    }

    /// A write has ended: unpin its buffers.
    pub(super) fn let_go(&mut self, pins: &[SlotIndex]) {
        for &slot in pins {
            self.cache.unpin(slot);
        }
    }

    /// Copy bytes that are about to be written into the buffers of their neighbours. Else the cache
    /// would have less and less of a file that is written here and there, and its gaps would cost
    /// more with each turn.
    pub(super) fn keep_written(&mut self, id: FileId, range: ByteRange, actions: &mut Actions) {
        let slot_bytes = self.slot_bytes();
        let is_scattered = range.length.0 < self.limits.chunk_bytes_max / PAGE_BYTES * PAGE_BYTES;
        let Some(file) = self.files.get(&id) else {
            return;
        };
        if !is_scattered || !self.may_bridge(file) {
            return;
        }
        let known: Vec<ByteRange> = pages_of(range, slot_bytes)
            .filter(|(number, _)| file.blocks.contains_key(number))
            .map(|(number, pages)| {
                let start = number * slot_bytes + u64::from(pages.start) * PAGE_BYTES;
                ByteRange::new(start, u64::from(pages.end - pages.start) * PAGE_BYTES)
            })
            .collect();
        for part in known {
            // All of it has its buffer, so no buffer can be lacking.
            self.compose(id, part, None, actions);
        }
    }
}

impl Server {
    // ---- Reading ----

    /// The range to read for a demand, with the demands behind it that cost less in the same
    /// request than by themselves; and how much of it no demand asked for. A reader under contract
    /// does not wait for others.
    pub(super) fn with_those_behind(&self, device: &Device, first: &Demand) -> (ByteRange, u64) {
        let (start, mut end) = (first.range.start.0, first.range.end());
        let chunk = self.limits.chunk_bytes_max;
        let file = self.files.get(&first.file);
        let contiguous = file.map_or(0, |file| file.place(start).contiguous);
        let end_max = start.saturating_add(chunk.min(contiguous));
        let mut bridged = 0;
        if self.policy.coalesce && first.due == Instant::NEVER {
            let next_after = |end: u64| {
                device
                    .queue
                    .demands
                    .iter()
                    .take(DEMANDS_WEIGHED)
                    .filter(|other| other.file == first.file && other.due == Instant::NEVER)
                    .filter(|other| other.range.start.0 >= start && other.range.end() > end)
                    .min_by_key(|other| other.range.start)
            };
            while let Some(next) = next_after(end) {
                let gap = next.range.start.0.saturating_sub(end);
                if next.range.end() > end_max || gap > 0 && !device.bridges(false, gap) {
                    break;
                }
                bridged += gap;
                end = next.range.end();
            }
        }
        (ByteRange::new(start, end - start), bridged)
    }

    /// How many stretches of a strided stream one request of at most `bytes` reads, with the gaps
    /// between them. Units of the arguments: bytes.
    pub(super) fn strides_at_once(
        &self,
        file: &File,
        stride: i64,
        stretch_bytes: u64,
        bytes: u64,
    ) -> u64 {
        let Some(gap) = u64::try_from(stride)
            .ok()
            .and_then(|stride| stride.checked_sub(stretch_bytes))
        else {
            return 1;
        };
        let bridges = self
            .devices
            .get(&file.device)
            .is_some_and(|device| device.bridges(false, gap));
        match self.policy.coalesce && bridges {
            true => bytes.saturating_sub(stretch_bytes) / (stretch_bytes + gap).max(1) + 1,
            false => 1,
        }
    }
}

/// The first run of whole pages in `range` of which every byte is dirty. `range` is of whole pages.
fn next_whole(file: &File, range: ByteRange) -> Option<ByteRange> {
    let mut from = range.start.0;
    while from < range.end() {
        let run = file.writing.dirty.next_run(from)?;
        let start = run.start.0.max(range.start.0).div_ceil(PAGE_BYTES) * PAGE_BYTES;
        let end = run.end().min(range.end()) / PAGE_BYTES * PAGE_BYTES;
        if start < end {
            return Some(ByteRange::new(start, end - start));
        }
        from = run.end();
    }
    None
}

/// The blocks in which `range`, which is of whole pages, has a part, with their pages.
fn pages_of(range: ByteRange, slot_bytes: u64) -> impl Iterator<Item = (u64, Range<u32>)> {
    let numbers = range.start.0 / slot_bytes..range.end().div_ceil(slot_bytes);
    let pages_in = move |number: u64| {
        let base = number * slot_bytes;
        let start = range.start.0.max(base) - base;
        let end = range.end().min(base + slot_bytes) - base;
        (start / PAGE_BYTES) as u32..(end / PAGE_BYTES) as u32
    };
    numbers
        .map(move |number| (number, pages_in(number)))
        .filter(|(_, pages)| !pages.is_empty())
}
