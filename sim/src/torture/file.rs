// SPDX-License-Identifier: Apache-2.0
//! One file: its bytes in a kernel, a drive and its medium, and the contents that clients have been
//! told.
//!
//! A byte of the simulated world is a [`Cell`]: it has the file, the place and the change that
//! wrote it. So a byte that is old, misplaced or of another file always differs from the right one,
//! and "this or newer" is a comparison of two numbers.
//!
//! Three copies: `native` is the kernel's view, `disk` the drive's bytes, `medium` the bytes that
//! survive a power cut. `flat` has the contents that clients have been told; `floor` those of them
//! that are declared safe from power cuts.

use rushes_core::server::*;
use rushes_core::units::*;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// A byte: change in the upper 32 bits, then 8 bits of file, then 24 of place. 0: nothing was ever
/// written there.
pub(super) type Cell = u64;

/// A value that no file ever has.
pub(super) const GARBAGE: Cell = u64::MAX;

pub(super) fn change_of(cell: Cell) -> u64 {
    cell >> 32
}

/// A change of the contents that clients have been told; needed for clients that asked before it.
pub(super) struct Change {
    pub(super) start: u64,
    pub(super) cells: Vec<Cell>,
    /// The cells before; kept if they may be seen for a while after.
    old: Vec<Cell>,
    pub(super) length: u64,
    old_length: u64,
}

/// The jobs of a worker on a file, one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chore {
    Reserve { needed: ByteRange, wished_end: u64 },
    Trim,
    Settle,
}

/// The last error with a cause in the world.
#[derive(Clone, Copy, Default)]
pub(super) struct Reasons {
    pub(super) read: Instant,
    pub(super) write: Instant,
    pub(super) full: Instant,
}

pub(super) struct OneFile {
    pub(super) index: usize,
    pub(super) device: usize,
    pub(super) key: FileKey,
    pub(super) path: String,
    /// The daemon's number for it, while the daemon knows it.
    pub(super) id: Option<FileId>,
    pub(super) way: WriteWay,
    pub(super) is_exclusive: bool,
    pub(super) refuses_direct: bool,
    pub(super) hint: Option<RateHint>,
    pub(super) native: Vec<Cell>,
    pub(super) disk: Vec<Cell>,
    pub(super) medium: Vec<Cell>,
    /// The doors know that some of its bytes may be in the kernel's cache alone.
    pub(super) is_marked_loose: bool,
    /// Pages of the kernel's cache that the drive does not have.
    pub(super) dirty: BTreeSet<u64>,
    /// Pages whose write to the drive failed, and that the kernel takes for written.
    pub(super) lost: BTreeSet<u64>,
    /// Those of them that have left the kernel's cache, too: a reader sees the drive's bytes.
    pub(super) let_go: BTreeSet<u64>,
    /// Lost pages that the daemon knows: it, or the next one, writes them again. And pages that are
    /// just being reported to it.
    pub(super) told: BTreeSet<u64>,
    pub(super) telling: BTreeSet<u64>,
    /// Pages that it knew when there may have been too few records for all parts: it alone writes
    /// them again, not the next one, until the drive has them.
    pub(super) unrecorded: BTreeSet<u64>,
    /// Pages lost during a former daemon's life: the kernel has them in its cache, where drivers
    /// look first (the daemon's through.rs).
    pub(super) lost_before: BTreeSet<u64>,
    /// The kernel has not reported that yet.
    pub(super) has_error: bool,
    /// Nor to the descriptor that writes past its cache.
    pub(super) has_error_past: bool,
    /// The unreported error is that the disk has failed.
    pub(super) has_failed: bool,
    /// Errors reported by the descriptor past the cache; so many before the request for the sync
    /// that is under way.
    pub(super) told_past_count: u64,
    pub(super) told_past_before: u64,
    /// The kernel succeeds in making room in its cache after each write past it that begins before.
    pub(super) meets_from: Instant,
    /// Failed syncs in a row, perhaps without any fault of the disk.
    pub(super) doubted_syncs: u8,
    /// So the next write past the cache goes through it.
    pub(super) falls_back: bool,
    /// Where it stays until the kernel writes by itself.
    pub(super) falls_back_lazily: bool,
    /// Pages that went through the cache since the last good sync; and those that the present sync
    /// covers.
    pub(super) loose: BTreeSet<u64>,
    pub(super) covered: BTreeSet<u64>,
    /// Pages that may be lost, by the result of a sync: until the daemon reports that it has
    /// written all of them again.
    pub(super) again: BTreeSet<u64>,
    /// Pages that are in the drive's volatile memory alone.
    pub(super) volatile: BTreeSet<u64>,
    /// Pages that have a block.
    pub(super) mapped: BTreeSet<u64>,
    pub(super) flat: Vec<Cell>,
    pub(super) floor: Vec<Cell>,
    /// The place of each change in the order of all, by its number; 0: it did not happen.
    pub(super) order: Vec<u64>,
    last: u64,
    pub(super) log: VecDeque<Change>,
    /// Number of the first entry of the log.
    pub(super) log_base: u64,
    /// Changes by strangers, and by clients themselves, of which the daemon does not know yet, by
    /// number in the log.
    pub(super) untold: Vec<u64>,
    pub(super) version: u64,
    pub(super) changed_at: Instant,
    pub(super) chores: VecDeque<Chore>,
    pub(super) is_busy: bool,
    /// Looks at its length that are under way.
    pub(super) looks: u32,
    pub(super) syncs: u32,
    pub(super) reasons: Reasons,
    /// A stranger has changed its length, and no look has found it.
    pub(super) is_length_unsure: bool,
    /// A former daemon reserved blocks behind its end.
    pub(super) is_left_reserved: bool,
    /// The server does not know yet the bytes that a former daemon left of it.
    pub(super) is_kept: bool,
}

impl OneFile {
    /// A file with so many bytes, all of its first change.
    pub(super) fn new(index: usize, device: usize, length: u64) -> OneFile {
        let mut file = OneFile {
            index,
            device,
            key: FileKey {
                device: device as u64 + 1,
                inode: index as u64 + 100,
            },
            path: format!("take{}.mov", (b'a' + index as u8) as char),
            id: None,
            way: WriteWay::Extents,
            is_exclusive: true,
            refuses_direct: false,
            hint: None,
            native: Vec::new(),
            disk: Vec::new(),
            medium: Vec::new(),
            dirty: BTreeSet::new(),
            is_marked_loose: false,
            lost: BTreeSet::new(),
            let_go: BTreeSet::new(),
            told: BTreeSet::new(),
            telling: BTreeSet::new(),
            lost_before: BTreeSet::new(),
            has_error: false,
            has_error_past: false,
            has_failed: false,
            told_past_count: 0,
            told_past_before: 0,
            meets_from: Instant::ZERO,
            doubted_syncs: 0,
            falls_back: false,
            falls_back_lazily: !index.is_multiple_of(2),
            loose: BTreeSet::new(),
            covered: BTreeSet::new(),
            again: BTreeSet::new(),
            unrecorded: BTreeSet::new(),
            volatile: BTreeSet::new(),
            mapped: BTreeSet::new(),
            flat: Vec::new(),
            floor: Vec::new(),
            order: vec![0],
            last: 0,
            log: VecDeque::new(),
            log_base: 0,
            untold: Vec::new(),
            version: 1,
            changed_at: Instant::ZERO,
            chores: VecDeque::new(),
            is_busy: false,
            looks: 0,
            syncs: 0,
            reasons: Reasons::default(),
            is_length_unsure: false,
            is_left_reserved: false,
            is_kept: false,
        };
        let change = file.change();
        file.happens(change);
        file.flat = file.cells(change, ByteRange::new(0, length));
        file.native.clone_from(&file.flat);
        file.disk.clone_from(&file.flat);
        file.medium.clone_from(&file.flat);
        file.floor.clone_from(&file.flat);
        file
    }

    /// Begins a change; returns its number.
    pub(super) fn change(&mut self) -> u64 {
        self.order.push(0);
        self.order.len() as u64 - 1
    }

    /// The change happens after all earlier ones.
    pub(super) fn happens(&mut self, change: u64) {
        self.last += 1;
        self.order[change as usize] = self.last;
    }

    /// The place of that byte's change in the order; 0: it did not happen.
    fn rank(&self, cell: Cell) -> u64 {
        let order = self.order.get(change_of(cell) as usize);
        order.copied().unwrap_or(0)
    }

    pub(super) fn cell(&self, change: u64, at: u64) -> Cell {
        change << 32 | (self.index as u64 & 0xFF) << 24 | (at & 0xFF_FFFF)
    }

    /// A change's bytes.
    pub(super) fn cells(&self, change: u64, range: ByteRange) -> Vec<Cell> {
        (range.start.0..range.end())
            .map(|at| self.cell(change, at))
            .collect()
    }

    pub(super) fn pages(range: ByteRange) -> Range<u64> {
        range.start.0 / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES)
    }

    pub(super) fn extents(&self) -> Vec<Extent> {
        let base = (self.index as u64 + 1) << 30;
        let mut extents: Vec<Extent> = Vec::new();
        for &page in &self.mapped {
            let start = page * PAGE_BYTES;
            match extents.last_mut() {
                Some(last) if last.logical.0 + last.length.0 == start => {
                    last.length.0 += PAGE_BYTES
                }
                _ => extents.push(Extent {
                    logical: ByteOffset(start),
                    physical: ByteOffset(base + start),
                    length: ByteCount(PAGE_BYTES),
                }),
            }
        }
        extents
    }

    pub(super) fn size(&self) -> u64 {
        self.native.len() as u64
    }

    pub(super) fn touched(&mut self, now: Instant) {
        self.version += 1;
        self.changed_at = now;
    }

    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        now.since(self.changed_at) < Duration::from_s(2)
    }

    // ---- The kernel and the drive ----

    fn grow(&mut self, length: u64) {
        if self.size() < length {
            self.native.resize(length as usize, 0);
        }
        self.disk.resize(self.native.len(), 0);
    }

    /// A write through the kernel's cache.
    pub(super) fn write_buffered(&mut self, start: u64, cells: &[Cell], now: Instant) {
        let end = start + cells.len() as u64;
        self.grow(end);
        self.native[start as usize..end as usize].copy_from_slice(cells);
        let pages = Self::pages(ByteRange::new(start, cells.len() as u64));
        for page in pages {
            self.dirty.insert(page);
            self.loose.insert(page);
            // The kernel then writes the whole page.
            self.no_more_lost(page);
        }
        self.touched(now);
    }

    fn no_more_lost(&mut self, page: u64) {
        self.lost.remove(&page);
        self.let_go.remove(&page);
        self.told.remove(&page);
        self.telling.remove(&page);
        self.lost_before.remove(&page);
    }

    /// A write past the cache, or a stranger's that syncs itself.
    pub(super) fn write_direct(&mut self, start: u64, cells: &[Cell], now: Instant) {
        let end = start + cells.len() as u64;
        self.grow(end);
        let place = start as usize..end as usize;
        self.native[place.clone()].copy_from_slice(cells);
        self.disk[place].copy_from_slice(cells);
        let range = ByteRange::new(start, cells.len() as u64);
        for page in Self::pages(range) {
            self.volatile.insert(page);
            if page * PAGE_BYTES >= start && (page + 1) * PAGE_BYTES <= end {
                self.dirty.remove(&page);
                self.no_more_lost(page);
            }
        }
        self.touched(now);
    }

    pub(super) fn truncate(&mut self, length: u64, now: Instant) {
        let former = self.size();
        self.native.resize(length as usize, 0);
        self.disk.resize(length as usize, 0);
        self.medium.truncate(length as usize);
        self.medium.resize(length as usize, 0);
        self.floor.truncate(length as usize);
        if length < former {
            let pages = length.div_ceil(PAGE_BYTES);
            let beyond = |page: &u64| *page < pages;
            self.dirty.retain(beyond);
            self.lost.retain(beyond);
            self.let_go.retain(beyond);
            self.told.retain(beyond);
            self.telling.retain(beyond);
            self.lost_before.retain(beyond);
            self.volatile.retain(beyond);
        }
        self.touched(now);
    }

    /// The kernel writes a page of its cache to the drive, or fails to.
    pub(super) fn write_page_out(&mut self, page: u64, fails: bool) {
        if !self.dirty.remove(&page) {
            return;
        }
        if fails {
            self.lost.insert(page);
            self.has_error = true;
            self.has_error_past = true;
            self.has_failed = true;
            self.falls_back = true;
            return;
        }
        let end = ((page + 1) * PAGE_BYTES).min(self.size()) as usize;
        let start = ((page * PAGE_BYTES) as usize).min(end);
        self.disk[start..end].copy_from_slice(&self.native[start..end]);
        self.volatile.insert(page);
    }

    /// The file as a reader of these pages sees it. A page that the kernel could not write comes
    /// from the drive if it has left the cache, or if this reader does not look into the cache.
    pub(super) fn seen(
        &self,
        pages: Range<u64>,
        looks_into_the_cache: impl Fn(u64) -> bool,
    ) -> Cow<'_, [Cell]> {
        let mut native = Cow::Borrowed(self.native.as_slice());
        let is_shown = |page: u64| !self.let_go.contains(&page) && looks_into_the_cache(page);
        for &page in self.lost.range(pages).filter(|page| !is_shown(**page)) {
            let end = ((page + 1) * PAGE_BYTES).min(self.size()) as usize;
            let start = ((page * PAGE_BYTES) as usize).min(end);
            let into = &mut native.to_mut()[start..end];
            into.fill(0);
            let there = self.disk.get(start..end.min(self.disk.len()));
            let there = there.unwrap_or_default();
            into[..there.len()].copy_from_slice(there);
        }
        native
    }

    /// The drive flushes to its medium, and the file system its length.
    pub(super) fn flush(&mut self) {
        self.medium.resize(self.disk.len(), 0);
        for page in std::mem::take(&mut self.volatile) {
            let end = ((page + 1) * PAGE_BYTES).min(self.disk.len() as u64) as usize;
            let start = ((page * PAGE_BYTES) as usize).min(end);
            self.medium[start..end].copy_from_slice(&self.disk[start..end]);
        }
    }

    /// The daemon knows of these lost pages from now on. Without a record for each part it alone
    /// does, and of all lost pages.
    pub(super) fn tell(&mut self, telling: &BTreeSet<u64>, has_records: bool) {
        let lost = &self.lost;
        self.unrecorded.retain(|page| lost.contains(page));
        if has_records {
            let known = telling.intersection(lost);
            let recorded = known.filter(|page| !self.unrecorded.contains(page));
            self.told.extend(recorded);
        } else {
            self.unrecorded.extend(lost);
        }
    }

    /// One fault at a time: bytes of which a dying daemon had the only copy are not lost. Pages
    /// that were reported stay lost: the next daemon has them.
    pub(super) fn keep_what_is_untold(&mut self) {
        self.is_marked_loose = false;
        self.loose.clear();
        self.covered.clear();
        self.telling.clear();
        self.unrecorded.clear();
        self.let_go.clear();
        let told = std::mem::take(&mut self.told);
        let lost = std::mem::take(&mut self.lost);
        let (told, untold) = lost.into_iter().partition(|page| told.contains(page));
        let untold: BTreeSet<u64> = untold;
        let pages: Vec<u64> = self.dirty.iter().chain(&untold).copied().collect();
        (self.lost, self.told, self.lost_before) = (told.clone(), told.clone(), told.clone());
        self.again = told;
        self.has_error = false;
        self.has_error_past = false;
        self.falls_back = false;
        for page in pages {
            self.dirty.insert(page);
            self.write_page_out(page, false);
        }
    }

    // ---- The contents that clients have been told ----

    pub(super) fn log_end(&self) -> u64 {
        self.log_base + self.log.len() as u64
    }

    /// The place in the log from which on a read that comes now may be answered.
    pub(super) fn since(&self) -> u64 {
        self.untold.first().copied().unwrap_or(self.log_end())
    }

    pub(super) fn slice(&self, range: ByteRange) -> Vec<Cell> {
        let length = self.flat.len() as u64;
        let end = range.end().min(length) as usize;
        let start = (range.start.0 as usize).min(end);
        self.flat[start..end].to_vec()
    }

    /// Drops entries that no client can see any more that asks now, or has asked since that entry.
    pub(super) fn prune(&mut self, since: u64) {
        let end = since.min(self.since());
        let count = end.saturating_sub(self.log_base) as usize;
        self.log.drain(..count.min(self.log.len()));
        self.log_base = self.log_base.max(end);
    }

    /// The last change was not published after all.
    pub(super) fn untell(&mut self, change: u64, flat: Vec<Cell>) {
        self.order[change as usize] = 0;
        self.flat = flat;
        self.log.pop_back();
    }

    /// The file has these bytes now. `is_news`: the daemon does not know of it yet.
    pub(super) fn told(&mut self, start: u64, cells: Vec<Cell>, is_news: bool) {
        let end = start + cells.len() as u64;
        let old_length = self.flat.len() as u64;
        let old = match is_news {
            true => self.slice(ByteRange::new(start, cells.len() as u64)),
            false => Vec::new(),
        };
        if old_length < end {
            self.flat.resize(end as usize, 0);
        }
        self.flat[start as usize..end as usize].copy_from_slice(&cells);
        self.log.push_back(Change {
            start,
            cells,
            old,
            length: self.flat.len() as u64,
            old_length,
        });
    }

    /// The file has another length.
    pub(super) fn told_cut(&mut self, length: u64) {
        let old_length = self.flat.len() as u64;
        let start = length.min(old_length);
        let old = self.flat[start as usize..].to_vec();
        self.flat.resize(length as usize, 0);
        self.log.push_back(Change {
            start,
            cells: vec![0; (old_length.max(length) - start) as usize],
            old,
            length,
            old_length,
        });
    }

    fn changes_since(&self, since: u64) -> impl Iterator<Item = &Change> {
        let skip = since.saturating_sub(self.log_base) as usize;
        self.log.iter().skip(skip)
    }

    /// Why these bytes are no answer to a read of `range` that saw `then` when it came; None: they
    /// are one.
    pub(super) fn wrong_read(
        &self,
        range: ByteRange,
        got: &[Cell],
        (then, then_length, since): (&[Cell], u64, u64),
    ) -> Option<String> {
        let full = |length: u64| length.min(range.end()).saturating_sub(range.start.0);
        let is_length = |length: u64| full(length) == got.len() as u64;
        let mut lengths = self
            .changes_since(since)
            .flat_map(|change| [change.length, change.old_length]);
        if !is_length(then_length) && !lengths.any(is_length) {
            return Some(format!(
                "{} bytes of {range:?} of a file of {then_length}",
                got.len()
            ));
        }
        let over: Vec<&Change> = self
            .changes_since(since)
            .filter(|change| {
                let length = change.cells.len().max(change.old.len()) as u64;
                ByteRange::new(change.start, length).overlaps(range)
            })
            .collect();
        for (step, &cell) in got.iter().enumerate() {
            if then.get(step).copied().unwrap_or(0) == cell {
                continue;
            }
            let at = range.start.0 + step as u64;
            let is_of = |change: &&Change| {
                let into = at.checked_sub(change.start);
                into.is_some_and(|into| {
                    change.cells.get(into as usize) == Some(&cell)
                        || change.old.get(into as usize) == Some(&cell)
                })
            };
            if !over.iter().any(is_of) {
                return Some(format!(
                    "byte {at} of {range:?} reads {}; expected {}",
                    self.name(cell),
                    self.name(then.get(step).copied().unwrap_or(0))
                ));
            }
        }
        None
    }

    /// The name of a cell, for people.
    pub(super) fn name(&self, cell: Cell) -> String {
        match cell {
            0 => "zero".into(),
            GARBAGE => "what nobody wrote".into(),
            _ => format!(
                "change {} of file {} byte {}",
                change_of(cell),
                cell >> 24 & 0xFF,
                cell & 0xFF_FFFF
            ),
        }
    }

    /// A sync of the contents at that time has succeeded.
    pub(super) fn synced(&mut self, then: &[Cell], since: u64) {
        let shortest = self.changes_since(since).map(|change| change.length).min();
        let kept = shortest.map_or(then.len(), |length| then.len().min(length as usize));
        if self.floor.len() < kept {
            self.floor.resize(kept, 0);
        }
        // A stranger's bytes over ours do not count; ours came before.
        for (at, &cell) in then[..kept].iter().enumerate() {
            if self.rank(self.floor[at]) < self.rank(cell) {
                self.floor[at] = cell;
            }
        }
    }

    /// The part of the floor that the medium lacks.
    pub(super) fn not_durable(&self, medium: &[Cell]) -> Option<String> {
        if medium.len() < self.floor.len() {
            return Some(format!(
                "{} of {} bytes that were synced are there",
                medium.len(),
                self.floor.len()
            ));
        }
        let is_lost = |(floor, found): (&Cell, &Cell)| {
            floor != found && (self.rank(*found) < self.rank(*floor) || *found == GARBAGE)
        };
        let wrong = self.floor.iter().zip(medium).position(is_lost)?;
        Some(format!(
            "byte {wrong} was synced as {} and is {}",
            self.name(self.floor[wrong]),
            self.name(medium[wrong])
        ))
    }

    /// The first byte of `have` that differs from the contents that clients have been told.
    pub(super) fn differs(&self, have: &[Cell]) -> Option<String> {
        if have == self.flat.as_slice() {
            return None;
        }
        let at = self
            .flat
            .iter()
            .zip(have)
            .position(|(told, found)| told != found);
        Some(match at {
            Some(at) => format!(
                "byte {at} is {}; told was {} (of {} bytes, {} told)",
                self.name(have[at]),
                self.name(self.flat[at]),
                have.len(),
                self.flat.len()
            ),
            None => format!("it has {} bytes; told were {}", have.len(), self.flat.len()),
        })
    }

    /// The power goes: pages on their way are there or not, whole or in part.
    pub(super) fn power_cut(&mut self, mut coin: impl FnMut() -> bool) {
        const SECTOR: usize = 512;
        if coin() {
            // Its length had come with the journal.
            self.medium.resize(self.disk.len(), 0);
        }
        let mut unsure: BTreeMap<u64, bool> = BTreeMap::new();
        unsure.extend(self.volatile.iter().map(|&page| (page, false)));
        unsure.extend(self.dirty.iter().map(|&page| (page, true)));
        for (page, from_cache) in unsure {
            let end = ((page + 1) * PAGE_BYTES).min(self.medium.len() as u64) as usize;
            let start = ((page * PAGE_BYTES) as usize).min(end);
            let source = match from_cache && coin() {
                true => &self.native,
                false => &self.disk,
            };
            for sector in (start..end).step_by(SECTOR) {
                if coin() {
                    let stop = (sector + SECTOR).min(end).min(source.len());
                    let sector = sector.min(stop);
                    self.medium[sector..stop].copy_from_slice(&source[sector..stop]);
                }
            }
        }
        self.native = self.medium.clone();
        self.disk = self.medium.clone();
        self.flat = self.medium.clone();
        self.dirty.clear();
        self.lost.clear();
        self.loose.clear();
        self.covered.clear();
        self.again.clear();
        self.volatile.clear();
        self.has_error = false;
        self.log_base += self.log.len() as u64;
        self.log.clear();
        self.untold.clear();
    }
}
