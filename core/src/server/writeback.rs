// SPDX-License-Identifier: Apache-2.0
//! The way of acknowledged bytes from their lanes to their device.
//!
//! A request takes whole pages, contiguous in the file and on the device, from as many pieces as it
//! needs. A part of a page at either end of a dirty run waits until its neighbour bytes come, and
//! goes through the kernel's cache when they do not come in time.

use super::fetch::{Claimant, Served, WRITE_FLIGHT};
use super::state::*;
use super::*;
use crate::cache::{Block, PageSet};
use crate::sched::admission::{self, Player};
use crate::write::{PieceKey, Span};
use alloc::vec::Vec;

/// One file's turn at the device. Units: bytes.
const WRITE_VISIT: u64 = 32 << 20;
/// A device with nothing else to do begins to write bytes that have rested this long.
const WRITE_REST: Duration = Duration::from_ms(500);
/// A request of less is one of many small ones. Units: bytes.
const SCATTERED_BYTES: u64 = 1 << 20;
/// A writer that was held back keeps its claim if it keeps to its earlier rate and that is no more
/// than one part in so many of its device's: a writer that wants more might be a copy that was not
/// held back yet, and takes the room of all others.
const KEPT_PART: u64 = 6;

/// The next write of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextWrite {
    pub file: FileId,
    pub range: ByteRange,
    pub buffered: bool,
    pub physical: u64,
    /// When it should be on the device.
    pub due: Instant,
    /// It takes turns with reads without a contract. Else it goes when no other request wants the
    /// device.
    pub is_wanted: bool,
}

impl NextWrite {
    /// The end of the write that it would go on.
    fn begins_at(&self) -> WriteEnd {
        WriteEnd {
            file: self.file,
            offset: self.range.start.0,
        }
    }
}

/// A file with dirty bytes, as its device sees it.
struct Weighed {
    next: NextWrite,
    /// When the oldest byte that the device lacks was acknowledged.
    oldest: Instant,
    /// Waiting for more of it is no use.
    is_ripe: bool,
}

impl Writing {
    /// No byte of it is dirty, on its way to the device, or granted.
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.flights.is_empty() && self.grant_count == 0
    }

    /// It is clean and not loose, and the kernel can lose none of it: a client that reads by itself
    /// finds all acknowledged bytes.
    pub(super) fn is_with_the_kernel(&self) -> bool {
        self.is_clean() && !self.is_loose
    }

    /// It is clean, and its time is set.
    pub(super) fn is_settled(&self) -> bool {
        self.is_clean() && !self.is_unsettled && self.settling == 0
    }

    /// A sync, a hold or a writer that needs its blocks waits for all of it to be on the device.
    fn is_wanted(&self) -> bool {
        !self.syncs.is_empty() || !self.holds.is_empty() || self.gives_room
    }
}

/// A reader that plays a recording in progress is at most this part of the cache behind, as one in
/// so many.
const FOLLOWED_PART: u64 = 8;
/// A recording stays in the cache where more of it than one in so many is free or idle.
const RECORDED_PART: u32 = 4;
/// A reader that has not read for so long has stopped.
const FOLLOWED_SILENT: Duration = Duration::from_s(10);

/// A writer's own rate, to which it keeps although it was held back; 0: none. Units: bytes a
/// second.
fn kept_rate(file: &File, most: u64) -> u64 {
    let own = file.writing.pace.own_rate();
    own.filter(|rate| rate.0 <= most / KEPT_PART)
        .map_or(0, |rate| rate.0)
}

impl Server {
    // ---- Reading bytes that are not written yet ----

    /// Bring into the cache those pages of `range` for which the device has nothing to give,
    /// because all their bytes are in lanes. False: no buffer is free.
    pub(super) fn compose(
        &mut self,
        id: FileId,
        range: ByteRange,
        holder: Option<StreamId>,
        actions: &mut Actions,
    ) -> bool {
        self.bring_in(id, range, holder, false, actions)
    }

    /// The same; `is_recorded`: a client has written it and none has asked for it, so it evicts
    /// little that was used.
    fn bring_in(
        &mut self,
        id: FileId,
        range: ByteRange,
        holder: Option<StreamId>,
        is_recorded: bool,
        actions: &mut Actions,
    ) -> bool {
        let slot_bytes = self.slot_bytes();
        let mut page = range.start.0 / PAGE_BYTES * PAGE_BYTES;
        while page < range.end() {
            let Some(file) = self.files.get(&id).filter(|file| !file.size_stale) else {
                return true;
            };
            let number = page / slot_bytes;
            let base = number * slot_bytes;
            let stop = range.end().min(base + slot_bytes);
            let known = file.blocks.get(&number).copied();
            let there = known.map_or(PageSet::EMPTY, |slot| {
                self.cache.valid(slot).or(self.cache.filling(slot))
            });
            let mut pages = PageSet::EMPTY;
            while page < stop {
                // The bytes that the device would have to give of this page.
                let on_device = file.writing.native_size.min(page + PAGE_BYTES);
                let wanted = ByteRange::new(page, on_device.saturating_sub(page));
                if page < file.size && file.writing.dirty.covers(wanted) {
                    let bit = ((page - base) / PAGE_BYTES) as u32;
                    pages = pages.or(PageSet::run(bit, bit + 1));
                }
                page += PAGE_BYTES;
            }
            let pages = pages.without(there);
            if pages.is_empty() {
                continue;
            }
            let slot = match known {
                Some(slot) => slot,
                None => match self.take_slot(Block { file: id, number }, holder, actions) {
                    Some(slot) => {
                        if is_recorded {
                            self.cache.mark_recorded(slot);
                        }
                        slot
                    }
                    None => return false,
                },
            };
            self.cache.fill_begins(slot, pages);
            let mut left = pages;
            while let Some((first, end)) = left.first_run() {
                let run = PageSet::run(first, end);
                self.overlay(id, slot, base, run, actions);
                left = left.without(run);
            }
            self.cache.fill_ends(slot, pages, pages);
        }
        true
    }

    /// Whether a player follows the recording so closely that it will come to `range` soon: the
    /// bytes then stay in the cache, and are not read from the device that has just got them. The
    /// kernel keeps them for clients of plain Samba.
    fn is_followed(&self, id: FileId, range: ByteRange) -> bool {
        let behind_max = u64::from(self.limits.slot_count) * self.slot_bytes() / FOLLOWED_PART;
        let follows = |stream: &Stream| {
            let at = stream.origin.saturating_add(stream.consumed);
            stream.file == id
                && !stream.is_kept
                && stream.flow == Flow::Forward
                && at <= range.end()
                && range.start.0.saturating_sub(at) <= behind_max
                && self.now.since(stream.last_read) <= FOLLOWED_SILENT
        };
        self.has_buffers_to_spare() && self.streams.iter().any(|(_, stream)| follows(stream))
    }

    /// Whether a recorder writes it, at a rate of its own: a player behind the recorder begins at
    /// any moment, some seconds back. So it stays while the cache has enough idle slots, as it does
    /// in the kernel's for clients of plain Samba.
    fn is_recorded(&self, id: FileId) -> bool {
        let is_roomy = self.cache.takeable_count() > self.limits.slot_count / RECORDED_PART;
        let is_recorder =
            |file: &File| file.writing.pace.is_known(self.now) && self.has_claim(file);
        is_roomy && self.files.get(&id).is_some_and(is_recorder)
    }

    /// Lay unwritten bytes over pages of a slot that have the device's bytes; past the device's end
    /// of the file they become zero.
    pub(super) fn overlay(
        &mut self,
        id: FileId,
        slot: SlotIndex,
        base: u64,
        pages: PageSet,
        actions: &mut Actions,
    ) {
        let Some((first, last)) = pages.first_run() else {
            return;
        };
        let Some(file) = self.files.get(&id) else {
            return;
        };
        // No byte is ours, and the server is asking for the file's length: the device's bytes are
        // all that is known.
        let is_known_longer = !file.size_stale && file.size > file.writing.native_size;
        if file.writing.dirty.is_empty() && !is_known_longer {
            return;
        }
        let start = base + u64::from(first) * PAGE_BYTES;
        let end = base + u64::from(last) * PAGE_BYTES;
        let nothing_from = file.writing.native_size.max(start);
        if nothing_from < end {
            actions.list.push(Action::Zero {
                slot,
                offset: (nothing_from - base) as u32,
                length: (end - nothing_from) as u32,
            });
        }
        for span in file.writing.dirty.spans(ByteRange::new(start, end - start)) {
            let piece = self.pieces.get(span.piece.0);
            let piece = piece
                .expect("dirty bytes have their piece: without it a reader would get older ones");
            let mut to = span.range.start.0 - base;
            for part in parts_of(piece, &span) {
                actions.list.push(Action::Fill {
                    slot,
                    offset: to as u32,
                    from: part,
                });
                to += part.length;
            }
        }
    }

    /// Forget a block whose buffer did not get its bytes; the next read puts it together anew.
    pub(super) fn unfilled(&mut self, slot: SlotIndex) {
        let Some(block) = self.cache.owner(slot) else {
            return;
        };
        if let Some(file) = self.files.get_mut(&block.file) {
            file.blocks.remove(&block.number);
        }
        self.cache.orphan(slot);
    }

    // ---- Writing ----

    /// Find out which write the device would get next: writers that have a rate of their own get
    /// claims, like readers; of all others the one whose turn it is.
    pub(super) fn weigh_writers(
        &mut self,
        id: DeviceId,
        claims: &mut Vec<Claim>,
        claimants: &mut Vec<Claimant>,
    ) {
        self.next_write = None;
        // Held-back writers that want more than it can write are no cameras: a crowd of copies
        // begins as slowly as one.
        if let Some(device) = self.devices.get_mut(&id) {
            let most = device.model.base.write.rate.0;
            let writers = device.writers.iter();
            let files = writers.filter_map(|file| self.files.get(file));
            device.kept_rate = files.map(|file| kept_rate(file, most)).sum();
        }
        let Some(device) = self.devices.get(&id) else {
            return;
        };
        // The next record of a recovery may hide bytes of earlier ones: they must not reach the
        // device.
        if device.writers.is_empty() || self.is_recovering {
            return;
        }
        let pressed = self.is_pressed();
        let mut best: Option<((bool, bool, bool, u64), NextWrite)> = None;
        for &file in &device.writers {
            let Some(weighed) = self.weigh_file(device, file, pressed, false) else {
                continue;
            };
            if let Some(claim) = self.writing_claim(file, weighed.oldest, weighed.next.physical) {
                claims.push(claim);
                claimants.push(Claimant::Writer(weighed.next));
            }
            if !weighed.is_ripe {
                continue;
            }
            let next = weighed.next;
            let goes_on = device.visits.write_end == Some(next.begins_at())
                && device.visits.write_given < WRITE_VISIT;
            // A wanted write goes first, then the file under way, then one that is due; then the
            // nearest ahead.
            let is_overdue = self.now >= next.due;
            let ahead = next.physical.wrapping_sub(device.queue.head);
            let rank = if is_overdue { next.due.0 } else { ahead };
            let key = (!next.is_wanted, !goes_on, !is_overdue, rank);
            if best.as_ref().is_none_or(|(other, _)| key < *other) {
                best = Some((key, next));
            }
        }
        self.next_write = best
            .map(|(_, next)| next)
            .or_else(|| self.next_edge(device, pressed));
    }

    /// A client waits for pages, and the only dirty bytes left are parts of pages of which the rest
    /// may still come: they hold the memory up to where they lie.
    fn next_edge(&self, device: &Device, pressed: bool) -> Option<NextWrite> {
        let somebody_waits = self.lanes.values().any(|lane| !lane.waiting.is_empty());
        // Whole pages that are under way give their memory back by themselves.
        let is_under_way = |id: &FileId| {
            let flights = self.files.get(id).map(|file| &file.writing.flights);
            flights.is_some_and(|all| all.iter().any(|range| range.length.0 >= PAGE_BYTES))
        };
        if !somebody_waits || device.writers.iter().any(is_under_way) {
            return None;
        }
        let weighed = |&id| self.weigh_file(device, id, pressed, true);
        let edges = device.writers.iter().filter_map(weighed);
        edges
            .map(|weighed| weighed.next)
            .min_by_key(|next| next.due)
    }

    /// A write waits for a lane, or the write buffer is more than half in use: waiting is no use.
    fn is_pressed(&self) -> bool {
        let waits = self.lanes.values().any(|lane| !lane.waiting.is_empty());
        waits || self.free_bytes() < self.limits.write_buffer_bytes / 2
    }

    /// When the oldest byte that the device lacks was acknowledged. Bytes that only announce a
    /// length wait for those that will hide them, as long as they come: each by itself would cost
    /// the device positioning.
    fn oldest_dirty(&self, file: &File) -> Option<Instant> {
        let comes = self.is_still_written(file);
        self.oldest_where(file, |piece| !(comes && piece.is_announcement))
    }

    /// The same of all bytes.
    fn oldest_of_all(&self, file: &File) -> Option<Instant> {
        self.oldest_where(file, |_| true)
    }

    fn oldest_where(&self, file: &File, counts: impl Fn(&Piece) -> bool) -> Option<Instant> {
        let pieces = &self.pieces;
        file.writing
            .commits
            .iter()
            .filter_map(|entry| piece_of(pieces, entry))
            .find(|piece| piece.live > 0 && counts(piece))
            .map(|piece| piece.committed)
    }

    /// Its oldest bytes are in a lane without a session, as a dead daemon leaves it: no client will
    /// add to them there.
    fn is_left(&self, file: &File) -> bool {
        let known = file.writing.commits.iter();
        let mut known = known.filter_map(|entry| piece_of(&self.pieces, entry));
        let live = known.find(|piece| piece.live > 0);
        live.and_then(|piece| self.lanes.get(&piece.lane))
            .is_some_and(|lane| lane.session.is_none())
    }

    /// The lane of its newest bytes.
    fn lane_of(&self, file: &File) -> Option<(LaneId, &LaneState)> {
        let mut known = file.writing.commits.iter().rev();
        let newest = known.find_map(|entry| piece_of(&self.pieces, entry))?;
        Some((newest.lane, self.lanes.get(&newest.lane)?))
    }

    /// A client goes on writing it. Not when records run short: each announcement has one.
    fn is_still_written(&self, file: &File) -> bool {
        let short = self
            .lane_of(file)
            .is_none_or(|(_, lane)| lane.records.len() < lane.record_count as usize / 4);
        let waits = !file.writing.waiting.is_empty() || file.writing.grant_count > 0;
        (waits || file.writing.pace.rate(self.now).0 > 0) && !short
    }

    /// The next write of a file; with `edges` parts of pages, too, that a client may still
    /// complete.
    fn weigh_file(
        &self,
        device: &Device,
        id: FileId,
        pressed: bool,
        edges: bool,
    ) -> Option<Weighed> {
        let now = self.now;
        let file = self.files.get(&id)?;
        if file.writing.is_cut_doubted {
            return None;
        }
        let asked = file.writing.is_wanted() || file.way == WriteWay::Through;
        // A client that waits for all of it waits for bytes that announce, too: the write that will
        // hide them may itself be waiting for that client.
        let oldest = match asked {
            true => self.oldest_of_all(file),
            false => self.oldest_dirty(file),
        }?;
        if file.writing.failed.is_some_and(|(_, again)| now < again) {
            return None;
        }
        let age = self.policy.write_age;
        let goes_on = match device.visits.write_end {
            Some(end) if end.file == id => end.offset,
            _ => 0,
        };
        let is_left = self.is_left(file);
        let edges = edges || asked || is_left;
        let (range, buffered) = self
            .next_range(file, goes_on, edges)
            .or_else(|| self.next_range(file, 0, edges))?;
        let range = match buffered {
            true => range,
            false => self.lengthened(device, file, range),
        };
        let has_claim = self.has_claim(file);
        // Scattered bytes are better written when more of them have come together: a drive with a
        // volatile cache orders the bytes in it. A drive without one spends so much on positioning
        // that it never has nothing to do.
        let is_scattered = device.defers_writes()
            && range.length.0 < SCATTERED_BYTES
            && self.is_still_written(file);
        let much = file.writing.dirty.bytes() >= WRITE_VISIT && !is_scattered;
        let soon = pressed || much || now >= oldest + Duration(age.0 / 2);
        let rests = now >= oldest + WRITE_REST && !is_scattered;
        Some(Weighed {
            oldest,
            next: NextWrite {
                file: id,
                range,
                buffered,
                physical: file.place(range.start.0).physical,
                due: oldest + age,
                is_wanted: asked || soon && !has_claim,
            },
            is_ripe: asked || soon || rests || is_left,
        })
    }

    // ---- Claims ----

    /// It is written at a rate of its own that its device could keep. A writer that sends as fast
    /// as it may, or here and there, takes turns with readers without a contract.
    pub(super) fn has_claim(&self, file: &File) -> bool {
        let pace = &file.writing.pace;
        let most = self
            .devices
            .get(&file.device)
            .map_or(0, |device| device.model.base.write.rate.0);
        let known = pace.is_paced() && pace.rate(self.now).0 <= most / 10 * 9;
        let kept = kept_rate(file, most) > 0
            && self
                .devices
                .get(&file.device)
                .is_some_and(|device| device.kept_rate <= most);
        !file.writing.dirty.is_empty() && (known || kept)
    }

    /// A writer without a claim has bytes that its device should have by now: its next write waits
    /// for those.
    pub(super) fn is_aged(&self, id: FileId) -> bool {
        let Some(file) = self.files.get(&id).filter(|file| !self.has_claim(file)) else {
            return false;
        };
        self.oldest_dirty(file)
            .is_some_and(|oldest| self.now >= oldest + self.policy.write_age)
    }

    /// Writers without a claim have so much under way that their device will not have it in time:
    /// they wait for their earlier bytes. Bytes that a device cannot take in `write_age` would be
    /// old when they get there, and are less safe than their client thinks.
    pub(super) fn is_behind(&self, id: FileId, bytes: u64) -> bool {
        let Some(file) = self.files.get(&id) else {
            return false;
        };
        if self.has_claim(file) || self.oldest_dirty(file).is_none() {
            return false;
        }
        let Some(device) = self.devices.get(&file.device) else {
            return false;
        };
        let dirty: u64 = device
            .writers
            .iter()
            .filter_map(|file| self.files.get(file))
            .filter(|file| !self.has_claim(file))
            .map(|file| file.writing.dirty.bytes())
            .sum();
        let room = self.spare_bytes(file.device, self.policy.write_age);
        dirty + bytes > room.max(2 * WRITE_VISIT)
    }

    /// The bytes that a device can write in this time for writers without a claim.
    fn spare_bytes(&self, id: DeviceId, time: Duration) -> u64 {
        let Some(device) = self.devices.get(&id) else {
            return 0;
        };
        let mut players = self.players(id, self.promised, &[]);
        players.extend(self.writing_players(id));
        let needed = admission::needed_permille(&device.model, &players).min(1000);
        let reads = !device.queue.demands.is_empty() || !device.visits.background.is_empty();
        let spare = (1000 - needed) / if reads { 2 } else { 1 };
        device.model.base.write.rate.bytes_in(time).0 / 1000 * spare
    }

    /// A writer's claim on its device: a reader's claim, mirrored. It is due when its oldest byte
    /// is, or its share of the buffer is full.
    fn writing_claim(&self, id: FileId, oldest: Instant, physical: u64) -> Option<Claim> {
        let file = self.files.get(&id).filter(|file| self.has_claim(file))?;
        let age = self.policy.write_age;
        let now = self.now;
        let writing = &file.writing;
        let under_way: u64 = writing.flights.iter().map(|range| range.length.0).sum();
        let dirty = writing.dirty.bytes().saturating_sub(under_way);
        let pace = &writing.pace;
        let written = match pace.own_rate() {
            Some(own) if !pace.is_paced() => own.0,
            _ => pace.rate(now).0,
        };
        // The rate that it will have when nothing comes any more.
        let drained = u128::from(dirty) * u128::from(NS_PER_S) / u128::from(age.0.max(1));
        let rate = BytesPerSecond(written.max(drained as u64).max(1));
        let growth = self.growth_of(file);
        let full = now + rate.time_for(ByteCount(growth));
        let cap = rate.bytes_in(age).0.min(dirty.saturating_add(growth));
        Some(Claim {
            writes: true,
            deadline: (oldest + age).min(full),
            rate,
            physical,
            room: dirty,
            cap: cap.max(1),
            left: if written == 0 { dirty } else { u64::MAX },
            is_awaited: false,
        })
    }

    /// The bytes that its writers may still add before they have to wait. Units: bytes.
    fn growth_of(&self, file: &File) -> u64 {
        let Some((_, state)) = self.lane_of(file) else {
            return 0;
        };
        // Other lanes give back memory that they do not use when it is wanted.
        let free = self.free_bytes();
        let own = state.used_bytes();
        // As `may_grow` has it: own + growth = 2 · (free − growth).
        (2 * free).saturating_sub(own) / 3
    }

    /// Writers as the dry run of admission sees them: those that will go on.
    pub(super) fn writing_players(&self, id: DeviceId) -> Vec<Player> {
        let Some(device) = self.devices.get(&id) else {
            return Vec::new();
        };
        let player = |&id: &FileId| {
            let file = self.files.get(&id)?;
            if !file.writing.pace.is_known(self.now) {
                return None;
            }
            let oldest = self.oldest_dirty(file)?;
            let place = file.writing.dirty.next_run(0)?.start.0;
            let claim = self.writing_claim(id, oldest, file.place(place).physical)?;
            Some(Player {
                claim,
                lead: Duration::ZERO,
                first_read: ByteCount(0),
                run: None,
                is_rehearsed: false,
            })
        };
        device.writers.iter().filter_map(player).collect()
    }

    /// The first range from `offset` on that can go to the device now.
    fn next_range(&self, file: &File, offset: u64, asked: bool) -> Option<(ByteRange, bool)> {
        let chunk = self.limits.chunk_bytes_max / PAGE_BYTES * PAGE_BYTES;
        let mut from = offset;
        while let Some(run) = file.writing.dirty.next_run(from) {
            let start = run.start.0.max(offset / PAGE_BYTES * PAGE_BYTES);
            let end = run.end();
            let whole_start = start.div_ceil(PAGE_BYTES) * PAGE_BYTES;
            let whole_end = end / PAGE_BYTES * PAGE_BYTES;
            if whole_start < whole_end {
                let there =
                    file.place(whole_start).contiguous.max(PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
                let stop = whole_end.min(whole_start.saturating_add(chunk.min(there)));
                if let Some(free) = without(&file.writing.flights, whole_start, stop) {
                    return Some((free, file.writing.is_direct_refused));
                }
            }
            let head = (start, end.min(whole_start));
            let tail = (whole_end.max(start), end);
            for (edge_start, edge_end) in [head, tail] {
                let edge = ByteRange::new(edge_start, edge_end.saturating_sub(edge_start));
                if edge.length.0 > 0 && (asked || self.is_quiet(file, edge)) {
                    // No other part of the same page may be under way: the order of the two would
                    // not be known.
                    let page = edge_start / PAGE_BYTES * PAGE_BYTES;
                    let around = ByteRange::new(page, PAGE_BYTES);
                    if !file
                        .writing
                        .flights
                        .iter()
                        .any(|busy| busy.overlaps(around))
                    {
                        return Some((edge, true));
                    }
                }
            }
            from = end;
        }
        None
    }

    /// An edge, less than a page, has rested so long that the rest of its page may never come.
    fn is_quiet(&self, file: &File, edge: ByteRange) -> bool {
        let rest = Duration(self.policy.write_age.0 / 2);
        let comes = self.is_still_written(file);
        file.writing.dirty.spans(edge).any(|span| {
            self.pieces.get(span.piece.0).is_some_and(|piece| {
                self.now >= piece.committed + rest && !(comes && piece.is_announcement)
            })
        })
    }

    /// Send the device a write, of a claim or without one.
    pub(super) fn send_write(
        &mut self,
        id: DeviceId,
        next: &NextWrite,
        is_claimed: bool,
        actions: &mut Actions,
    ) {
        let now = self.now;
        self.next_write = None;
        let Some(file) = self.files.get(&next.file) else {
            return;
        };
        let next = &NextWrite {
            range: self.within_parts(file, next.range, next.buffered),
            ..*next
        };
        if !next.buffered {
            self.keep_written(next.file, next.range, actions);
        }
        let start = actions.parts.len() as u32;
        let gathered = self.gather(next.file, next.range, next.buffered, actions);
        let Some(file) = self.files.get_mut(&next.file) else {
            return;
        };
        file.writing.flights.push(next.range);
        file.writing.is_unsettled = true;
        let failed_syncs = file.writing.failed_syncs;
        file.use_count += 1;
        let parts = PartRun {
            start,
            count: actions.parts.len() as u32 - start,
        };
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let (bytes, distance) = (
            next.range.length.0,
            next.physical.abs_diff(device.queue.head),
        );
        let cost = device.model.write(distance, bytes);
        let calibrated = device.model.calibrated_write(distance, bytes);
        if device.queue.flight_count == 0 {
            device.queue.service_started = now;
            device.queue.batch_bytes = 0;
        }
        device.medium.flushes_alone = false;
        device.queue.batch_bytes += bytes;
        device.queue.head = next.physical.saturating_add(bytes);
        device.queue.flight_count += 1;
        device.queue.flight_bytes += bytes;
        device.queue.flight_cost += cost;
        device.queue.flight_deadlines.push(next.due);
        device.gaps.sent(IoClass::BestEffort, cost, Some(false));
        device.counts.write_count += 1;
        device.counts.write_bytes += bytes;
        device.counts.write_bridged += gathered.bridged;
        device.shares.leave_out(cost);
        if is_claimed {
            device.visits.begin(Visitor::Writer(next.file));
            device.visits.given += bytes;
        } else {
            device.visits.visitor = None;
            device.visits.best_effort_served = now;
            device.turn_taken(true, cost);
        }
        if device.visits.write_end != Some(next.begins_at())
            || device.visits.write_given >= WRITE_VISIT
        {
            device.visits.write_given = 0;
        }
        device.visits.write_given += bytes;
        device.visits.write_end = Some(WriteEnd {
            file: next.file,
            offset: next.range.end(),
        });
        self.flight_generation = self.flight_generation.wrapping_add(1);
        let generation = self.flight_generation;
        let key = self.write_flights.insert(WriteFlight {
            generation,
            device: id,
            file: next.file,
            range: next.range,
            buffered: next.buffered,
            failed_syncs,
            lost: None,
            is_again: false,
            spans: gathered.spans,
            pins: gathered.pins,
            cost,
            deadline: next.due,
            calibrated,
        });
        actions.list.push(Action::SubmitWrite(IoWrite {
            io: IoId(u64::from(generation) << 32 | WRITE_FLIGHT | u64::from(key)),
            file: next.file,
            device: id,
            range: next.range,
            parts,
            buffered: next.buffered,
            class: IoClass::BestEffort,
            deadline: next.due,
        }));
    }

    fn write_flight_of(&self, io: IoId) -> Option<u32> {
        let key = (io.0 & (WRITE_FLIGHT - 1)) as u32;
        let flight = self.write_flights.get(key)?;
        (u64::from(flight.generation) == io.0 >> 32).then_some(key)
    }

    /// A write past the kernel's cache went into it: from now on it counts as one through that
    /// cache. The kernel reports bytes that it could not write only once, so the server writes
    /// again all that is under way past it: any may be the one.
    pub(super) fn fell_back(&mut self, io: IoId, lost: Option<Errno>) {
        let key = self.write_flight_of(io);
        let Some(flight) = key.and_then(|key| self.write_flights.get_mut(key)) else {
            return;
        };
        let id = flight.file;
        if lost.is_some() {
            if let Some(file) = self.files.get_mut(&id) {
                file.writing.lost_count = file.writing.lost_count.saturating_add(1);
            }
            let all = self.write_flights.iter_mut().map(|(_, flight)| flight);
            let past = all.filter(|flight| flight.file == id && !flight.buffered);
            past.for_each(|flight| flight.lost = lost);
        } else if let Some(file) = self.files.get_mut(&id) {
            // The first time the write goes past the cache once more, since its cause is gone with
            // that; a file that falls back again has no other way.
            let falls_back = core::mem::replace(&mut file.writing.falls_back, true);
            flight.is_again = !falls_back && !flight.buffered;
            flight.buffered |= falls_back;
        }
    }

    pub(super) fn write_done(
        &mut self,
        io: IoId,
        result: Result<ByteCount, Errno>,
        actions: &mut Actions,
    ) {
        let Some(flight) = self
            .write_flight_of(io)
            .and_then(|key| self.write_flights.remove(key))
        else {
            return;
        };
        let lost_count = self
            .files
            .get(&flight.file)
            .map_or(0, |file| file.writing.lost_count);
        let result = match flight.lost {
            Some(errno) if lost_count >= LOST_IN_A_ROW => Err(errno),
            _ => result,
        };
        let served = Served {
            bytes: flight.range.length.0,
            cost: flight.cost,
            calibrated: flight.calibrated,
            deadline: flight.deadline,
            wrote: true,
        };
        self.device_served(flight.device, &served);
        let id = flight.file;
        self.let_go(&flight.pins);
        if result.is_ok() {
            if self.is_followed(id, flight.range) {
                self.compose(id, flight.range, None, actions);
            } else if self.is_recorded(id) {
                self.bring_in(id, flight.range, None, true, actions);
            }
        }
        let mut released = core::mem::take(&mut self.released);
        let mut loosened: Vec<Span> = Vec::new();
        let mut has_failed = false;
        let mut is_doubtful = false;
        if let Some(file) = self.files.get_mut(&id) {
            let flights = &mut file.writing.flights;
            if let Some(place) = flights.iter().position(|range| *range == flight.range) {
                flights.swap_remove(place);
            }
            let moved = result.map_or(0, |count| count.0.min(flight.range.length.0));
            let written_end = flight.range.start.0 + moved;
            match result {
                Ok(count) if count.0 >= flight.range.length.0 => file.writing.failed = None,
                Ok(count) if count.0 > 0 => {}
                // The cause may be the gap, which no client wrote.
                Err(_) if !flight.pins.is_empty() => file.writing.is_unbridgeable = true,
                Err(errno) if !flight.buffered && errno.refuses_direct() => {
                    file.writing.is_direct_refused = true;
                }
                // An error, or no bytes without a reason: a retry at once would end the same.
                Err(_) | Ok(_) => {
                    let errno = result.err().unwrap_or(Errno::IO);
                    file.writing
                        .failed_to_write(errno, self.now, self.commit_count);
                    has_failed = true;
                }
            }
            if moved > 0 && written_end > file.writing.native_size {
                // A look at its length that began before may have seen the old one.
                file.writing.native_size = written_end;
                self.change_count += 1;
                file.changed = self.change_count;
                if let Some(asked) = &mut file.stat {
                    asked.length = asked.length.max(written_end);
                }
            }
            // The kernel's cache has the bytes, and may have reported already that it could not
            // keep them: write them once more.
            is_doubtful = flight.is_again
                || flight.lost.is_some()
                || flight.buffered && flight.failed_syncs != file.writing.failed_syncs;
            file.writing.falls_back &= flight.buffered || flight.is_again || result.is_err();
            if result.is_ok() && !flight.buffered && flight.lost.is_none() {
                file.writing.lost_count = 0;
            }
            for span in flight.spans.iter().filter(|_| !is_doubtful) {
                let length = written_end
                    .saturating_sub(span.range.start.0)
                    .min(span.range.length.0);
                let done = Span {
                    range: ByteRange::new(span.range.start.0, length),
                    ..*span
                };
                if flight.buffered {
                    loosened.extend(file.writing.dirty.current(&done));
                }
                file.writing.dirty.written(&done, &mut released);
            }
            let written = ByteRange::new(flight.range.start.0, moved);
            self.outdate_fills(id, written);
        }
        if has_failed {
            self.hurry_loose(|_, _, file| file.device == flight.device);
        }
        for span in loosened {
            self.loosen(id, span, actions);
        }
        for span in &flight.spans {
            let piece = self.pieces.get_mut(span.piece.0);
            let piece = piece.expect("a piece stays as long as a request reads from it");
            piece.flights -= 1;
        }
        if is_doubtful || !result.is_ok_and(|count| count >= flight.range.length) {
            self.owe_anew(id, &flight.spans);
        }
        if result.is_err() {
            // A write that waits for room may be one that cannot get it any more.
            self.roomier();
        }
        self.settle_released(&mut released, actions);
        self.released = released;
        let ended: Vec<PieceKey> = flight.spans.iter().map(|span| span.piece).collect();
        for piece in ended {
            self.strike_if_done(piece, actions);
        }
        self.end_failing(id);
        self.settle_clean(id, actions);
        self.settle_waiters(id, actions);
        self.release(id, actions);
        self.touch(flight.device);
    }

    /// End the failing once the device has all bytes that were committed when it last failed: a
    /// file to which a client writes without a pause is never clean.
    fn end_failing(&mut self, id: FileId) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &mut file.writing;
        if writing.failing.is_none() {
            return;
        }
        let pieces = &self.pieces;
        let known = writing.commits.iter();
        let known = known.filter_map(|entry| piece_of(pieces, entry));
        if known
            .filter_map(Piece::owed)
            .all(|owed| owed > writing.failing_since)
        {
            writing.fails_no_more();
        }
    }

    /// These bytes did not reach the device. Bytes written over them meanwhile counted on that: a
    /// sync of the old ones now waits for the new ones.
    fn owe_anew(&mut self, id: FileId, spans: &[Span]) {
        let Some(file) = self.files.get(&id) else {
            return;
        };
        for span in spans {
            let Some(older) = self.pieces.get(span.piece.0) else {
                continue;
            };
            let (commit, since) = (older.commit, older.since);
            for (newer, key) in file.writing.commits.iter().rev() {
                if *newer <= commit {
                    break;
                }
                if let Some(piece) = self.pieces.get_mut(key.0)
                    && piece.commit == *newer
                    && piece.range.overlaps(span.range)
                {
                    piece.since = piece.since.min(since);
                }
            }
        }
    }

    /// Device reads that were under way while these bytes were written may bring older ones.
    fn outdate_fills(&mut self, id: FileId, range: ByteRange) {
        let slot_bytes = self.slot_bytes();
        let Some(file) = self.files.get(&id) else {
            return;
        };
        if range.length.0 == 0 {
            return;
        }
        let numbers = range.start.0 / slot_bytes..range.end().div_ceil(slot_bytes);
        for number in numbers {
            let Some(&slot) = file.blocks.get(&number) else {
                continue;
            };
            let base = number * slot_bytes;
            let first = range.start.0.saturating_sub(base) / PAGE_BYTES;
            let last = (range.end() - base).min(slot_bytes).div_ceil(PAGE_BYTES);
            self.cache
                .outdate(slot, PageSet::run(first as u32, last as u32));
        }
    }

    /// The driver has finished its work on the file's times and blocks.
    pub(super) fn settled(&mut self, id: FileId, version: u64, actions: &mut Actions) {
        if let Some(file) = self.files.get_mut(&id) {
            let writing = &mut file.writing;
            writing.settling = writing.settling.saturating_sub(1);
            // A grant writes nothing yet, and may be given back.
            if writing.settling == 0 && writing.dirty.is_empty() && writing.flights.is_empty() {
                file.version = version;
                file.writing.is_unsettled = false;
                // The version does not show changes that others made meanwhile and did not report.
                if file.looks.doubt != Doubt::Foreign {
                    file.looks.doubt = Doubt::Ours;
                }
                self.strike_remembered(id, actions);
            }
        }
        self.settle_waiters(id, actions);
        self.forget_if_unused(id, actions);
    }

    /// The file has no dirty bytes any more: do all that waits for that.
    pub(super) fn settle_clean(&mut self, id: FileId, actions: &mut Actions) {
        if self.is_recovering {
            // The next piece of the recovery may be of it. See recovery_ended.
            return;
        }
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        if !file.writing.dirty.is_empty() || !file.writing.is_listed {
            return;
        }
        // A client that comes to an ending server finds no daemon, and changes a clean file as it
        // likes: a file with bytes that may have to be written again is not clean.
        if file.writing.is_loose && self.policy.ends() {
            return;
        }
        file.writing.fails_no_more();
        file.writing.is_listed = false;
        file.writing.commits.clear();
        let device = file.device;
        actions.list.push(Action::Clean { file: id });
        file.writing.settling += 1;
        if let Some(device) = self.devices.get_mut(&device) {
            device.writers.retain(|&other| other != id);
        }
        self.trim_if_left(id, actions);
        self.release(id, actions);
    }
}

/// The first run of `start .. stop` that no request under way overlaps.
pub(super) fn without(flights: &[ByteRange], start: u64, stop: u64) -> Option<ByteRange> {
    let mut start = start;
    let mut stop = stop;
    loop {
        let wanted = ByteRange::new(start, stop.saturating_sub(start));
        let Some(busy) = flights.iter().find(|busy| busy.overlaps(wanted)) else {
            return (start < stop).then_some(wanted);
        };
        // Pages that are written in part are busy whole.
        let busy_start = busy.start.0 / PAGE_BYTES * PAGE_BYTES;
        let busy_end = busy.end().div_ceil(PAGE_BYTES) * PAGE_BYTES;
        if busy_start > start {
            stop = busy_start;
        } else {
            start = busy_end;
        }
    }
}

/// Where in its lane the bytes of a span lie.
pub(super) fn parts_of<'a>(piece: &'a Piece, span: &Span) -> impl Iterator<Item = LanePart> + 'a {
    let mut at = piece.range.start.0 % PAGE_BYTES + span.at;
    let mut left = span.range.length.0;
    core::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let place = piece.runs.place((at / PAGE_BYTES) as u32);
        let (page, run) = place.expect("a span lies within the pages of its piece");
        let into = at % PAGE_BYTES;
        let length = (u64::from(run) * PAGE_BYTES - into).min(left);
        let part = LanePart {
            lane: piece.lane,
            record: piece.record,
            offset: u64::from(page) * PAGE_BYTES + into,
            length,
        };
        at += length;
        left -= length;
        Some(part)
    })
}
