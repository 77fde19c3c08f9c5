// SPDX-License-Identifier: Apache-2.0
//! Moves a file's bytes to other members while it is in use: step by step, each as in a drain.
//!
//! A mover holds the file's lock for one step at a time, and first reads the bytes into the
//! kernel's memory without it, by [`Move::read_before`]. The bytes of a step follow those of
//! the step before to the same member, so that a file has one segment more on its way, and none
//! more when it is there. This module does not say which file is next, nor how fast.

use crate::balance::target_of;
use crate::catalogue::REMOVED;
use crate::change::{candidates, move_whole, no_room, sum, take};
use crate::data::{data_ranges, next_run};
use crate::error::PoolError;
use crate::gather::Gather;
use crate::kept::{held, length_of};
use crate::member::{Access, MemberState};
use crate::pool::Pool;
use crate::walk::each_stub_below;
use rushes_core::pool::vain::{Rooms, Try};
use rushes_core::pool::{Layout, MemberNumber, Object, Shape};
use rushes_core::units::{ByteCount, ByteRange};
use rustix::fs::{Dir, Mode, OFlags, fstat, openat};
use rustix::io::{Errno, pread};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Read at a time. Units: bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// The bytes to move.
#[derive(Clone, Debug)]
enum What {
    /// All bytes of the file on a member, which takes no new ones.
    Member(MemberNumber),
    /// The unstriped bytes in this object, to one member that is emptier.
    Object(Object),
    /// The bytes that are not in one home yet.
    Home(Gather),
}

/// One file's bytes, on their way.
#[derive(Clone, Debug)]
pub struct Move {
    what: What,
    /// Where the bytes of the step before went.
    target: Option<MemberNumber>,
}

/// A step that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Where it was.
    pub source: Object,
    /// Where it is. None: a whole object of a stripe, which has the same bytes as before.
    pub target: Option<Object>,
    /// Bytes of the file.
    pub range: ByteRange,
    /// The end of the last of them that is no hole; the first of them if all are. Units: bytes.
    pub data_end: u64,
    /// Copied. Units: bytes.
    pub copied: u64,
}

/// Call `each` for each file once that is at one of these paths below the tree or in such a folder;
/// of the whole pool if there are none. It gets one of the file's names, and the file open to read,
/// or the error of the open. It may get files that are renamed meanwhile twice, or not at all.
///
/// Errors   the pool's; a path that is not there; `each`'s own, which ends it
pub fn each_file_in(
    pool: &Pool,
    paths: &[PathBuf],
    mut each: impl FnMut(&Path, Result<OwnedFd, PoolError>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let mut linked = BTreeSet::new();
    let all = [PathBuf::new()];
    for path in if paths.is_empty() { &all } else { paths } {
        each_stub_below(pool.catalogue(), path, &mut linked, |path, stub| {
            each(path, stub)
        })?;
    }
    Ok(())
}

impl Pool {
    /// Another number when a file's bytes may lie elsewhere than before. None: one of its objects
    /// cannot be examined.
    pub fn stamp(&self, layout: &Layout) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        layout.encode().hash(&mut hasher);
        for object in layout.objects() {
            let fd = self.open_object(layout, object, Access::Read).ok()?;
            let seen = fstat(&fd).ok()?;
            // Only a difference of the time counts.
            let changed = (seen.st_ctime, seen.st_ctime_nsec);
            (seen.st_size, seen.st_blocks, changed).hash(&mut hasher);
        }
        Some(hasher.finish())
    }

    /// The room that is free where a try of this kind may need it: on the file's own members, or on
    /// all that take bytes.
    pub fn rooms_for(&self, how: Try, layout: &Layout) -> Rooms {
        let own = layout.objects();
        let members = self.members();
        let counts = members.iter().filter(|member| match how {
            Try::Afresh => own.iter().any(|one| one.member == member.number()),
            Try::Together | Try::Wider => member.takes_bytes(),
        });
        counts
            .map(|member| (member.number(), member.status().bytes_free.0))
            .collect()
    }

    /// Call `each` for each file that was removed and is not gone yet, as [`each_file_in`].
    pub fn each_removed(
        &self,
        mut each: impl FnMut(&Path, &OwnedFd) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let folder = self.catalogue().path().join(REMOVED);
        let failed =
            |error: Errno| PoolError::system("look through", folder.display().to_string(), error);
        let entries = Dir::read_from(self.catalogue().removed()).map_err(failed)?;
        for entry in entries {
            let entry = entry.map_err(failed)?;
            if entry.file_name().to_bytes().starts_with(b".") {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let removed = self.catalogue().removed();
            match openat(removed, entry.file_name(), flags, Mode::empty()) {
                Ok(stub) => each(
                    &folder.join(OsStr::from_bytes(entry.file_name().to_bytes())),
                    &stub,
                )?,
                Err(Errno::NOENT) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

impl Move {
    /// All bytes of a file on a member.
    pub fn off(member: MemberNumber) -> Move {
        Move {
            what: What::Member(member),
            target: None,
        }
    }

    /// The moves of this file for a rebalance: one for each of its objects, to be made one after
    /// the other.
    pub fn spreading(layout: &Layout) -> Vec<Move> {
        let single = layout.segments().iter();
        let single = single.filter(|one| one.shape == Shape::Single);
        let objects: BTreeSet<Object> = single.map(|one| one.objects[0]).collect();
        let all = objects.into_iter().map(|object| Move {
            what: What::Object(object),
            target: None,
        });
        all.collect()
    }

    /// All of a file to one member, if it is in several objects and one has room for the whole.
    pub fn gathering(pool: &Pool, stub: BorrowedFd<'_>, layout: &Layout) -> Option<Move> {
        Gather::together(pool, stub, layout).map(Move::home)
    }

    /// Each of a file's objects that is scattered over its device to another one on its member, if
    /// that has at most half as many extents.
    pub fn afresh(pool: &Pool, layout: &Layout) -> Vec<Move> {
        let all = Gather::afresh(pool, layout).into_iter();
        all.map(Move::home).collect()
    }

    /// The part of a striped file in a narrower stripe than its policy and the members allow by
    /// now, to a wider one, if there is room for it.
    pub fn widening(pool: &Pool, stub: BorrowedFd<'_>, layout: &Layout) -> Option<Move> {
        Gather::wider(pool, stub, layout).map(Move::home)
    }

    /// The aim for which it is tried. None: such a move is never known beforehand to be in vain.
    pub fn how(&self) -> Option<Try> {
        match &self.what {
            What::Home(gather) => Some(gather.how()),
            What::Member(_) | What::Object(_) => None,
        }
    }

    /// It was tried, and there was no room for it, or the file would not have become better.
    pub fn was_vain(&self) -> bool {
        matches!(&self.what, What::Home(gather) if gather.was_vain())
    }

    fn home(gather: Gather) -> Move {
        Move {
            what: What::Home(gather),
            target: None,
        }
    }

    /// The first segment that is to move, and its object. None: all has moved.
    fn next(&self, layout: &Layout) -> Option<(ByteRange, Shape, Object)> {
        if let What::Home(gather) = &self.what {
            return gather.source(layout);
        }
        let mut all = layout.segments().iter().enumerate();
        all.find_map(|(at, one)| {
            let object = match &self.what {
                What::Member(number) => one.objects.iter().find(|one| one.member == *number),
                What::Object(wanted) if one.shape == Shape::Single => {
                    one.objects.iter().find(|one| *one == wanted)
                }
                What::Object(_) | What::Home(_) => None,
            };
            object.map(|object| (layout.range_of(at), one.shape, *object))
        })
    }

    /// The object with the bytes of the next step. None: all has moved.
    pub fn source(&self, layout: &Layout) -> Option<Object> {
        self.next(layout).map(|(_, _, object)| object)
    }

    /// Read the bytes of the next step into the kernel's memory. The move itself reports bytes
    /// that cannot be read.
    ///
    /// Assumes  `source`: the object of [`Move::source`], opened. Needs no lock: writes meanwhile
    ///          go to the same memory
    pub fn read_before(&self, layout: &Layout, source: &OwnedFd, step: ByteCount) {
        let Some((range, Shape::Single, _)) = self.next(layout) else {
            return;
        };
        let (_, data) = next_step(source, range, step).unwrap_or((range, Vec::new()));
        let mut buffer = vec![0; CHUNK_BYTES.min(step.0 as usize)];
        for part in data {
            let mut at = part.start.0;
            while at < part.end() {
                let length = (part.end() - at).min(buffer.len() as u64) as usize;
                match pread(source, &mut buffer[..length], at) {
                    Ok(count) if count > 0 => at += count as u64,
                    _ => return,
                }
            }
        }
    }

    /// Take the next step, durably.
    ///
    /// Units    step: bytes that are copied at most. An object of a stripe moves whole
    /// Assumes  exclusive, as [`Pool::set_layout`]
    /// Returns  None: nothing is left to move
    /// Errors   [`PoolError::NoRoom`]: no other member has room for the bytes
    pub fn take_step(
        &mut self,
        pool: &Pool,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        step: ByteCount,
    ) -> Result<Option<Moved>, PoolError> {
        if let What::Home(gather) = &mut self.what {
            return gather.take_step(pool, stub, layout, step);
        }
        let Some((range, shape, object)) = self.next(layout) else {
            return Ok(None);
        };
        let source = match pool.open_object(layout, object, Access::Write) {
            // A failing disk is often read-only by then: its bytes can still be read.
            Err(PoolError::ReadOnly { .. }) if matches!(self.what, What::Member(_)) => {
                pool.open_object(layout, object, Access::Read)?
            }
            // A member is away, or its object damaged: it stays as full as before.
            Err(_) if matches!(self.what, What::Object(_)) => return Ok(None),
            opened => opened?,
        };
        let failed = |error| PoolError::system("look for data in an object", "", error);
        if shape != Shape::Single {
            let data = data_ranges(&source).map_err(failed)?;
            let copied = move_whole(pool, stub, layout, (object, &source), &data)?;
            return Ok(Some(Moved {
                source: object,
                target: None,
                range,
                data_end: range.start.0,
                copied,
            }));
        }
        let (range, data) = next_step(&source, range, step).map_err(failed)?;
        let copied = sum(&data);
        for number in self.targets(pool, stub, (object, &source), copied)? {
            if take(pool, stub, layout, (object, &source), number, range, &data)? {
                self.target = Some(number);
                let target = layout.locate(range.start).map(|located| located.object);
                return Ok(Some(Moved {
                    source: object,
                    target,
                    range,
                    data_end: data.last().map_or(range.start.0, |part| part.end()),
                    copied,
                }));
            }
        }
        match self.what {
            What::Member(_) => Err(no_room(pool, stub, object.member)),
            What::Object(_) | What::Home(_) => Ok(None),
        }
    }

    /// Members with room for so many bytes, the best first.
    fn targets(
        &self,
        pool: &Pool,
        stub: BorrowedFd<'_>,
        (object, source): (Object, &OwnedFd),
        copied: u64,
    ) -> Result<Vec<MemberNumber>, PoolError> {
        let has_room = |number: MemberNumber| {
            pool.takes_bytes(number)
                && pool.member(number).is_some_and(|member| {
                    let status = member.status();
                    status.state == MemberState::Present && status.bytes_free.0 >= copied
                })
        };
        let before = self.target.filter(|number| has_room(*number));
        if let (What::Object(_), Some(before)) = (&self.what, self.target) {
            // It goes to one member, or stays.
            return Ok(vec![before]);
        }
        let failed = |error| PoolError::system("look for data in an object", "", error);
        let wanted = match before {
            Some(_) => copied,
            // The first step chooses for all bytes.
            None => {
                let all = ByteRange::new(0, length_of(stub).map_err(failed)?.0);
                let bytes = sum(&data_ranges(source).map_err(failed)?);
                held(source, all).map_err(failed)?.max(bytes)
            }
        };
        if let What::Object(_) = self.what {
            return Ok(target_of(pool, stub, object, wanted).into_iter().collect());
        }
        let mut found: Vec<MemberNumber> = before.into_iter().collect();
        found.extend(candidates(pool, stub, object.member, ByteCount(wanted)));
        if before.is_none() && wanted > copied {
            found.extend(candidates(pool, stub, object.member, ByteCount(copied)));
        }
        Ok(found)
    }
}

/// The first bytes of a range that an object has, `step` of them at most, and the part of the
/// range that is done once they are moved.
fn next_step(
    source: &OwnedFd,
    range: ByteRange,
    step: ByteCount,
) -> Result<(ByteRange, Vec<ByteRange>), Errno> {
    let mut found = Vec::new();
    let mut left = step.0;
    let mut at = range.start.0;
    while let Some(run) = next_run(source, ByteRange::new(at, range.end() - at))? {
        let start = run.start.0;
        if left == 0 {
            let settled = ByteRange::new(range.start.0, start - range.start.0);
            return Ok((settled, found));
        }
        let length = left.min(run.length.0);
        found.push(ByteRange::new(start, length));
        left -= length;
        at = start + length;
    }
    Ok((range, found))
}
