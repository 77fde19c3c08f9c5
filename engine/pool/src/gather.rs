// SPDX-License-Identifier: Apache-2.0
//! Moves a file's bytes to one new home, step by step: to one object of those it has, to an
//! object made anew, or to a wider stripe.
//!
//! The bytes of a step are copied to the home and fsynced, then the layout names them there, then
//! that is made durable, then their old place becomes a hole, or goes with its last byte. So at
//! every instant the layout leads to each byte once. The home begins with the file, so that the
//! bytes that an interrupted move has moved are in front: the next move goes on there. This module
//! does not say which file is next, nor how fast.

use crate::change::within;
use crate::data::{data_ranges, next_run};
use crate::error::PoolError;
use crate::hole::vacate;
use crate::kept::{in_front, kept, length_of};
use crate::member::{Access, MemberState};
use crate::online::Moved;
use crate::pool::{Pool, Source};
use rushes_core::pool::check::is_plain;
use rushes_core::pool::defrag::{Holding, gather_on, is_scattered, is_worth};
use rushes_core::pool::vain::Try;
use rushes_core::pool::{Layout, MemberNumber, Object, Part, Segment, Shape, Spread, stripe};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rushes_sys::extents;
use rustix::fs::{FallocateFlags, fallocate, fsync};
use rustix::io::{Errno, pread, pwrite};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Copied at a time. Units: bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// More extents of one object are not counted.
const EXTENT_COUNT_MAX: usize = 1 << 20;
/// Room that stays free on a member of a wider stripe beside its share. Units: bytes.
const SPARE_BYTES: u64 = 1 << 20;

/// In how many segments and extents files are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fragments {
    /// Parts of files that are each in other objects than the one before.
    pub segment_count: u64,
    /// Places on their devices, where the file systems tell.
    pub extent_count: u64,
}

/// In how many segments and extents the examined files are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defragged {
    /// Beforehand.
    pub before: Fragments,
    /// Now.
    pub after: Fragments,
}

impl Fragments {
    /// Add those of another file.
    pub fn add(&mut self, other: Fragments) {
        self.segment_count += other.segment_count;
        self.extent_count += other.extent_count;
    }
}

impl Pool {
    /// Check that each object of a file opens.
    ///
    /// Errors   that of one that does not
    pub fn check_objects(&self, layout: &Layout) -> Result<(), PoolError> {
        let mut objects = layout.objects().into_iter();
        objects.try_for_each(|one| self.open_object(layout, one, Access::Read).map(drop))
    }

    /// In how many segments and extents a file is. An object that cannot be looked at
    /// counts as none.
    pub fn fragments(&self, layout: &Layout) -> Fragments {
        let objects = layout.objects().into_iter();
        let opened = objects.filter_map(|one| self.open_object(layout, one, Access::Read).ok());
        let extents = opened.filter_map(|fd| extents_of(&fd).map(|(count, _)| count));
        Fragments {
            segment_count: layout.segments().len() as u64,
            extent_count: extents.sum(),
        }
    }
}

/// In how many places on its device an object is, and how much of it. Holes between places that
/// follow each other count for nothing. None: its file system does not tell.
fn extents_of(fd: &OwnedFd) -> Option<(u64, u64)> {
    let map = extents::of(fd, EXTENT_COUNT_MAX).ok()?;
    let mut end = None;
    let (mut count, mut bytes) = (0, 0);
    for extent in map.extents {
        count += u64::from(end != Some(extent.physical.0));
        end = Some(extent.physical.0 + extent.length.0);
        bytes += extent.length.0;
    }
    Some((count, bytes))
}

/// The aim for the file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Aim {
    /// All of it singly on this member.
    Together(MemberNumber),
    /// The part of it in this home, in another one on the same members, in fewer extents.
    Afresh(Home),
    /// The part of it in narrower segments, in a stripe of this shape over these members.
    Wider(Shape, Vec<MemberNumber>),
}

/// Where the file is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Home {
    shape: Shape,
    origin: ByteOffset,
    objects: Vec<Object>,
}

impl Home {
    fn of(segment: &Segment) -> Home {
        Home {
            shape: segment.shape,
            origin: segment.origin,
            objects: segment.objects.clone(),
        }
    }

    fn has(&self, segment: &Segment) -> bool {
        (self.shape, self.origin, &self.objects)
            == (segment.shape, segment.origin, &segment.objects)
    }
}

/// A file on its way to one home.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    aim: Aim,
    /// None: there is none yet.
    home: Option<Home>,
    /// The move is impossible, or not worth it.
    is_vain: bool,
}

impl Gather {
    /// The aim for which it is tried.
    pub(crate) fn how(&self) -> Try {
        match self.aim {
            Aim::Together(_) => Try::Together,
            Aim::Afresh(_) => Try::Afresh,
            Aim::Wider(..) => Try::Wider,
        }
    }

    /// It was tried, and there was no room for it, or it would not have become better.
    pub(crate) fn was_vain(&self) -> bool {
        self.is_vain
    }

    /// All of a file on one member, if it is in several objects and one has room for the whole. Not
    /// of a stripe, and not of a file that should be one.
    pub(crate) fn together(pool: &Pool, stub: BorrowedFd<'_>, layout: &Layout) -> Option<Gather> {
        let objects = layout.objects();
        if objects.len() < 2 || !is_plain(layout) {
            return None;
        }
        let (wish, rooms, asked) = pool.candidates(stub, None, ByteCount(0));
        if !matches!(wish.spread, None | Some(Spread::Single)) {
            return None;
        }
        let held = held_by_members(pool, layout, |_| true)?;
        let holdings: Vec<Holding> = asked
            .iter()
            .filter_map(|number| {
                let room = rooms.iter().find(|room| room.member == *number)?;
                Some(Holding {
                    member: *number,
                    held: held.get(number).copied().unwrap_or(0),
                    free: room.free.0,
                })
            })
            .collect();
        let member = gather_on(&holdings, held.values().sum())?;
        let mut segments = layout.segments().iter();
        let there = segments.find(|one| one.objects[0].member == member);
        Some(Gather {
            aim: Aim::Together(member),
            home: there.map(Home::of),
            is_vain: false,
        })
    }

    /// Each home of a file with an object that is scattered over its device. Whether a copy has
    /// fewer extents shows when it has room.
    pub(crate) fn afresh(pool: &Pool, layout: &Layout) -> Vec<Gather> {
        let mut found: Vec<Gather> = Vec::new();
        let mut before: Option<&Segment> = None;
        for segment in layout.segments() {
            let aim = Aim::Afresh(Home::of(segment));
            let members = |one: &Segment| -> Vec<MemberNumber> {
                one.objects.iter().map(|object| object.member).collect()
            };
            let take_bytes = || members(segment).iter().all(|one| pool.takes_bytes(*one));
            let is_scattered = || {
                let objects = segment.objects.iter();
                let mut opened =
                    objects.filter_map(|one| pool.open_object(layout, *one, Access::Read).ok());
                opened.any(|fd| {
                    extents_of(&fd).is_some_and(|(count, bytes)| is_scattered(count, bytes))
                })
            };
            if found.iter().all(|one| one.aim != aim) && take_bytes() && is_scattered() {
                // Where an interrupted move went.
                let alike = before
                    .filter(|one| (one.shape, members(one)) == (segment.shape, members(segment)));
                found.push(Gather {
                    aim,
                    home: alike.map(Home::of),
                    is_vain: false,
                });
            }
            before = Some(segment);
        }
        found
    }

    /// The part of a striped file that is in a narrower stripe than it could have by now, or in
    /// none.
    pub(crate) fn wider(pool: &Pool, stub: BorrowedFd<'_>, layout: &Layout) -> Option<Gather> {
        let is_striped = |one: &Segment| one.shape != Shape::Single;
        if !layout.segments().iter().any(is_striped) {
            return None;
        }
        let (wish, mut rooms, asked) = pool.candidates(stub, None, ByteCount(0));
        let fewest = layout.segments().iter().map(width).min();
        if fewest >= Some(asked.len()) {
            return None;
        }
        // Its bytes there make room as they arrive anew.
        let held = held_by_members(pool, layout, |_| true)?;
        for room in &mut rooms {
            room.free += ByteCount(held.get(&room.member).copied().unwrap_or(0));
        }
        let (shape, members) = stripe(&wish, &rooms, &asked, ByteCount(0))?;
        let is_narrow = |one: &Segment| width(one) < members.len();
        let first = layout.segments().iter().position(is_narrow)?;
        let held = held_by_members(pool, layout, is_narrow)?;
        let all: u64 = held.values().sum();
        let share = all.div_ceil(members.len() as u64) + shape.unit_bytes() + SPARE_BYTES;
        let has_room = |number: &MemberNumber| {
            let free = pool
                .member(*number)
                .map_or(0, |one| one.status().bytes_free.0);
            // Room that a member gives up is room for the bytes that it gets.
            free + held.get(number).copied().unwrap_or(0) >= share
        };
        if !members.iter().all(has_room) {
            return None;
        }
        // Where an interrupted move went.
        let before = first.checked_sub(1).map(|at| &layout.segments()[at]);
        let can_take = |one: &&Segment| {
            is_striped(one) && one.objects.iter().all(|one| pool.takes_bytes(one.member))
        };
        Some(Gather {
            home: before.filter(can_take).map(Home::of),
            aim: Aim::Wider(shape, members),
            is_vain: false,
        })
    }

    /// Number of the first segment that is to move.
    fn next(&self, layout: &Layout) -> Option<usize> {
        let is_to_go = |one: &Segment| match &self.aim {
            Aim::Together(_) => true,
            Aim::Afresh(home) => home.has(one),
            Aim::Wider(shape, _) => width(one) < shape.object_count(),
        };
        layout
            .segments()
            .iter()
            .position(|one| is_to_go(one) && self.home.as_ref().is_none_or(|home| !home.has(one)))
    }

    /// The source of the next step: range, shape, and its first object. None: all is in its home.
    pub(crate) fn source(&self, layout: &Layout) -> Option<(ByteRange, Shape, Object)> {
        self.next(layout).map(|at| {
            let segment = &layout.segments()[at];
            (layout.range_of(at), segment.shape, segment.objects[0])
        })
    }

    /// Take the next step, durably.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    /// Returns  None: nothing is left to move, or it cannot move; then it is as it was
    pub(crate) fn take_step(
        &mut self,
        pool: &Pool,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        step: ByteCount,
    ) -> Result<Option<Moved>, PoolError> {
        let Some(at) = self.next(layout) else {
            return Ok(None);
        };
        // A member is away or read-only, or an object is damaged: the bytes stay.
        let Ok(source) = pool.source(layout, at) else {
            return Ok(None);
        };
        let range = layout.range_of(at);
        let failed = |error| PoolError::system("look for what is reserved", "", error);
        let length = length_of(stub).map_err(failed)?;
        let Some((home, opened)) = self.enter(pool, layout, (range, length), &source)? else {
            return Ok(None);
        };
        let (range, data) = next_data(&source, range, step)?;
        let range = source.span(range, length).map_err(failed)?;
        let data = within(&data, range);
        let mut next = layout.clone();
        next.lay(range, home.origin, home.shape, home.objects.clone());
        let brought = bring(&source, layout, (&home, &opened), (range, length), &data)
            .and_then(|()| pool.set_layout(stub, &next));
        if let Err(error) = brought {
            self.give_up(pool, layout, (&home, &opened), range);
            self.is_vain = error.is_full();
            return if self.is_vain { Ok(None) } else { Err(error) };
        }
        fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
        let mut gone = layout.objects();
        *layout = next;
        // Free room for others; if it fails, only the room is not regained, and fsck frees it.
        let named = layout.objects();
        gone.retain(|object| !named.contains(object));
        // Objects to be deleted stay whole until then: a hole may leave zeroes in a last block,
        // which are no copy of anything.
        if source.segment.objects.iter().all(|one| named.contains(one)) {
            let _ = source.vacate(layout, range);
        }
        for object in gone {
            pool.forget(layout.file, object);
        }
        Ok(Some(Moved {
            source: source.segment.objects[0],
            target: home.objects.first().copied(),
            range,
            data_end: data.last().map_or(range.start.0, |part| part.end()),
            copied: data.iter().map(|part| part.length.0).sum(),
        }))
    }

    /// Its home, opened, and made if there is none yet. None: that is impossible, or not worth it.
    fn enter(
        &mut self,
        pool: &Pool,
        layout: &Layout,
        (range, length): (ByteRange, ByteCount),
        source: &Source,
    ) -> Result<Option<(Home, Vec<OwnedFd>)>, PoolError> {
        if let Some(home) = &self.home {
            let objects = home.objects.iter();
            let opened: Result<Vec<OwnedFd>, PoolError> = objects
                .map(|object| pool.open_object(layout, *object, Access::Write))
                .collect();
            return Ok(opened.ok().map(|opened| (home.clone(), opened)));
        }
        let (shape, members) = match &self.aim {
            Aim::Together(member) => (Shape::Single, vec![*member]),
            Aim::Afresh(old) => {
                let members = old.objects.iter().map(|object| object.member);
                (old.shape, members.collect())
            }
            Aim::Wider(shape, members) => (*shape, members.clone()),
        };
        let origin = match (&self.aim, shape) {
            // Byte for byte: so it is clear beforehand which object needs room where.
            (Aim::Afresh(old), _) => old.origin.0,
            (_, Shape::Single) => 0,
            _ => range.start.0 & !(shape.unit_bytes() - 1),
        };
        let mut home = Home {
            shape,
            origin: ByteOffset(origin),
            objects: Vec::new(),
        };
        let mut opened = Vec::new();
        let made =
            make(pool, layout, &members, &mut home, &mut opened).and_then(|()| match &self.aim {
                Aim::Afresh(old) => has_fewer_extents(layout, length, old, source, &opened),
                Aim::Together(_) | Aim::Wider(..) => Ok(true),
            });
        if let Ok(true) = made {
            self.home = Some(home.clone());
            return Ok(Some((home, opened)));
        }
        for object in home.objects {
            pool.forget(layout.file, object);
        }
        match made {
            Err(
                PoolError::Missing { .. } | PoolError::Lost { .. } | PoolError::ReadOnly { .. },
            ) => Ok(None),
            Err(error) if !error.is_full() && error.errno() != Errno::OPNOTSUPP => Err(error),
            _ => {
                self.is_vain = true;
                Ok(None)
            }
        }
    }

    /// Delete the copy of a step's bytes.
    fn give_up(
        &mut self,
        pool: &Pool,
        layout: &Layout,
        (home, opened): (&Home, &[OwnedFd]),
        range: ByteRange,
    ) {
        let named = layout.objects();
        if home.objects.iter().any(|object| named.contains(object)) {
            let _ = clear(layout, home, opened, range);
            return;
        }
        for object in &home.objects {
            pool.forget(layout.file, *object);
        }
        self.home = None;
    }
}

impl Pool {
    /// The stripe that a file would get if it began now. None: none.
    pub(crate) fn widest(&self, stub: BorrowedFd<'_>) -> Option<(Shape, Vec<MemberNumber>)> {
        let (wish, rooms, asked) = self.candidates(stub, None, ByteCount(0));
        stripe(&wish, &rooms, &asked, ByteCount(0))
    }
}

/// On how many members a segment is: on fewer than it has objects, where a drain had to put two of
/// them on one.
pub(crate) fn width(segment: &Segment) -> usize {
    let mut members: Vec<MemberNumber> = segment.objects.iter().map(|one| one.member).collect();
    members.sort_unstable();
    members.dedup();
    members.len()
}

/// How much each member has of a file's segments. None: one is away.
fn held_by_members(
    pool: &Pool,
    layout: &Layout,
    which: impl Fn(&Segment) -> bool,
) -> Option<BTreeMap<MemberNumber, u64>> {
    let mut held = BTreeMap::new();
    let segments = layout.segments().iter().filter(|one| which(one));
    let mut objects: Vec<Object> = segments.flat_map(|one| one.objects.clone()).collect();
    objects.sort_unstable();
    objects.dedup();
    for object in objects {
        let member = pool.member(object.member)?;
        if member.status().state != MemberState::Present {
            return None;
        }
        let fd = pool.open_object(layout, object, Access::Read).ok()?;
        let bytes: u64 = data_ranges(&fd).ok()?.iter().map(|one| one.length.0).sum();
        *held.entry(object.member).or_insert(0) += bytes;
    }
    Some(held)
}

/// Make an object on each of these members, durably; no layout names them yet.
fn make(
    pool: &Pool,
    layout: &Layout,
    members: &[MemberNumber],
    home: &mut Home,
    opened: &mut Vec<OwnedFd>,
) -> Result<(), PoolError> {
    let serial = pool.next_serial(layout);
    for (number, place) in members.iter().zip(0u16..) {
        let part = Part {
            serial,
            place,
            origin: home.origin,
            shape: home.shape,
        };
        let (object, fd) = pool
            .known(*number)?
            .create_object(layout.file, part, true)?;
        home.objects.push(object);
        opened.push(fd);
    }
    Ok(())
}

/// Reserve room for all that moves there, and tell whether that has clearly fewer extents. So no
/// copy is in vain, and no other file's bytes get in between meanwhile.
fn has_fewer_extents(
    layout: &Layout,
    length: ByteCount,
    old: &Home,
    source: &Source,
    opened: &[OwnedFd],
) -> Result<bool, PoolError> {
    let failed = |error| PoolError::system("reserve room in an object", "", error);
    let segments = layout.segments().iter().enumerate();
    let ranges: Vec<ByteRange> = segments
        .filter(|(_, segment)| old.has(segment))
        .map(|(at, _)| layout.range_of(at))
        .collect();
    let (mut before, mut after) = (0, 0);
    for (index, (old_fd, new_fd)) in source.objects.iter().zip(opened).enumerate() {
        let Some(old_fd) = old_fd else {
            return Ok(false);
        };
        let all = ByteRange::new(
            0,
            old.shape
                .share(index, length.0.saturating_sub(old.origin.0)),
        );
        let mut wanted = data_ranges(old_fd).map_err(failed)?;
        wanted.extend(kept(old_fd, all).map_err(failed)?);
        wanted.sort_unstable_by_key(|part| part.start);
        for data in wanted {
            for range in &ranges {
                let share = |at: u64| old.shape.share(index, at - old.origin.0);
                let start = data.start.0.max(share(range.start.0));
                let end = data.end().min(share(range.end()));
                if start < end {
                    fallocate(new_fd, FallocateFlags::KEEP_SIZE, start, end - start)
                        .map_err(failed)?;
                }
            }
        }
        let (Some((had, _)), Some((has, _))) = (extents_of(old_fd), extents_of(new_fd)) else {
            return Ok(false);
        };
        before += had;
        after += has;
    }
    Ok(after > 0 && is_worth(before, after))
}

/// The first bytes of a range that its objects have, `step` of them at most, each part in one
/// object, and the part of the range that is settled when they are moved.
fn next_data(
    source: &Source,
    range: ByteRange,
    step: ByteCount,
) -> Result<(ByteRange, Vec<ByteRange>), PoolError> {
    let failed = |error| PoolError::system("look for data in an object", "", error);
    let (shape, origin) = (source.segment.shape, source.segment.origin.0);
    let mut found = Vec::new();
    let (mut at, mut left) = (range.start.0, step.0);
    loop {
        let Some(start) = source.next_data(at)?.filter(|start| *start < range.end()) else {
            return Ok((range, found));
        };
        if left == 0 {
            let settled = ByteRange::new(range.start.0, start - range.start.0);
            return Ok((settled, found));
        }
        let (index, from, run) = shape.locate(start - origin);
        let Some(fd) = &source.objects[index] else {
            return Ok((range, found));
        };
        let most = run.min(left).min(range.end() - start);
        let data = next_run(fd, ByteRange::new(from, most)).map_err(failed)?;
        // It was there a moment ago; if it is gone, so are the bytes.
        let length = data.map_or(most, |data| data.end() - from);
        found.push(ByteRange::new(start, length));
        left -= length;
        at = start + length;
    }
}

/// Copy a step's bytes to their home, durably, after clearing outdated bytes that the home still
/// had there.
fn bring(
    source: &Source,
    layout: &Layout,
    (home, opened): (&Home, &[OwnedFd]),
    (range, length): (ByteRange, ByteCount),
    data: &[ByteRange],
) -> Result<(), PoolError> {
    clear(layout, home, opened, range)
        .and_then(|()| {
            let to = (home.shape, home.origin, opened);
            source.keep(to, in_front(range, length))
        })
        .and_then(|()| {
            let mut buffer = vec![0; CHUNK_BYTES];
            data.iter()
                .try_for_each(|part| copy(source, (home, opened), *part, &mut buffer))
        })
        .and_then(|()| opened.iter().try_for_each(fsync))
        .map_err(|error| PoolError::system("move bytes between objects", "", error))
}

fn clear(layout: &Layout, home: &Home, opened: &[OwnedFd], range: ByteRange) -> Result<(), Errno> {
    let origin = home.origin.0;
    opened.iter().enumerate().try_for_each(|(index, fd)| {
        let start = home.shape.share(index, range.start.0 - origin);
        let end = home.shape.share(index, range.end() - origin);
        let part = ByteRange::new(start, end - start);
        vacate(fd, layout, home.objects[index], part)
    })
}

fn copy(
    source: &Source,
    (home, opened): (&Home, &[OwnedFd]),
    part: ByteRange,
    buffer: &mut [u8],
) -> Result<(), Errno> {
    let mut at = part.start.0;
    while at < part.end() {
        let of = &source.segment;
        let (from_index, from, from_run) = of.shape.locate(at - of.origin.0);
        let (to_index, to, to_run) = home.shape.locate(at - home.origin.0);
        let length = (part.end() - at).min(from_run).min(to_run);
        let length = length.min(buffer.len() as u64) as usize;
        let fd = source.objects[from_index].as_ref().ok_or(Errno::IO)?;
        let count = pread(fd, &mut buffer[..length], from)?;
        if count == 0 {
            // It had data there a moment ago, under the same lock.
            return Err(Errno::IO);
        }
        let mut written = 0;
        while written < count {
            let fd = opened[to_index].as_fd();
            written += pwrite(fd, &buffer[written..count], to + written as u64)?;
        }
        at += count as u64;
    }
    Ok(())
}
