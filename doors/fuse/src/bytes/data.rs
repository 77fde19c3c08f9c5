// SPDX-License-Identifier: Apache-2.0
//! Writes bytes to the objects that the layout names, part by part. Also here: allocation, holes,
//! copies, searches for holes, and syncs. Reads: reads.rs.
//!
//! No program gets "no space" while a member has room: bytes that do not fit go elsewhere, in the
//! middle of a file if need be. Bytes that no object has are zero.

use crate::bytes::files::{OpenFile, State, range};
use crate::daemon::{Changed, Done};
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::Node;
use crate::tree::removals::RoomSought;
use rushes_pool::{
    Access, ByteCount, ByteOffset, Growth, Layout, Located, Object, PoolError, RoomBefore,
    SpillReason,
};
use rustix::fs::{
    FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fallocate,
    fdatasync, futimens, seek,
};
use rustix::io::{Errno, pwrite};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One request copies so much at most; the kernel asks again. Units: bytes.
const COPY_BYTES_MAX: u64 = 16 << 20;
/// One step of a copy. Units: bytes.
const COPY_CHUNK_BYTES: usize = 1 << 20;
/// The pool reserves at least so much when it gives bytes a place. Units: bytes.
const BLOCK_BYTES: u64 = 4096;
/// The supported FALLOC_FL_… flags: keep the size, punch a hole, make zero.
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;
/// Between two looks for room in a pool that has none.
const LOOK_FOR_ROOM_EVERY: Duration = Duration::from_millis(100);
/// By then the daemon has written files that were just closed, and freed the space that it reserved
/// for them.
const ROOM_COMES_BY: Duration = Duration::from_millis(1500);
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// The instant since which no member has had room for a byte.
#[derive(Debug, Default)]
pub(crate) struct Full(Mutex<Option<Instant>>);

impl Full {
    /// No member has room. Returns whether another look is worth it, because a member may soon have
    /// room: only beside a daemon, and for one such time in all, not for each write.
    fn note(&self, beside_daemon: bool) -> bool {
        let since = *locked(&self.0).get_or_insert_with(Instant::now);
        beside_daemon && since.elapsed() < ROOM_COMES_BY
    }

    /// A member has room again.
    fn ended(&self) {
        *locked(&self.0) = None;
    }
}

/// The change of the object that other doors learn of after an operation.
#[derive(Clone, Copy, Debug)]
enum Known {
    /// The object reaches at least to the end of the part.
    Written,
    /// Nothing: a reservation behind its end leaves it as long as it was.
    Nothing,
}

/// The outcome of one part of a write or an allocation.
enum PartOutcome {
    /// The number of bytes that are done.
    Done(u64),
    /// The byte needs a place, or another one.
    NoPlace(Option<(Object, SpillReason)>),
}

/// Does the operation on the whole length, or on as much from the start on as there is room for,
/// down to one block.
///
/// A file system may refuse a long write whole although it has reserved the first block. If the
/// door took that for a full member, two full members would hand the same bytes to and fro for
/// ever.
fn less_and_less(start: u64, length: u64, mut act: impl FnMut(u64) -> Answer<u64>) -> Answer<u64> {
    let least = (BLOCK_BYTES - start % BLOCK_BYTES).min(length);
    let mut tried = length;
    loop {
        match act(tried) {
            Ok(0) | Err(Errno::NOSPC | Errno::DQUOT) if tried > least => {
                tried = (tried / 2).max(least)
            }
            Ok(0) => return Err(Errno::NOSPC),
            done => return done,
        }
    }
}

/// An operation behind the end goes to another member when its member cannot do it.
fn part_outcome(done: Answer<u64>, located: &Located, behind_end: bool) -> Answer<PartOutcome> {
    let moved = |reason| Ok(PartOutcome::NoPlace(Some((located.object, reason))));
    match done {
        Ok(count) => Ok(PartOutcome::Done(count)),
        Err(Errno::NOSPC) => moved(SpillReason::Full),
        Err(Errno::DQUOT) => moved(SpillReason::OverQuota),
        Err(Errno::ROFS) if behind_end => moved(SpillReason::Unwritable),
        Err(error) => Err(error),
    }
}

/// The error that a program gets when members repeatedly refuse writes to space that the pool has
/// reserved there.
fn refused_with(why: Option<(Object, SpillReason)>) -> Errno {
    match why {
        Some((_, SpillReason::OverQuota)) => Errno::DQUOT,
        Some((_, SpillReason::Failing)) => Errno::IO,
        _ => Errno::NOSPC,
    }
}

impl Door {
    pub(crate) fn write(
        &self,
        number: u64,
        offset: u64,
        data: &[u8],
        drop_set_id: bool,
    ) -> Answer<usize> {
        let node = self.nodes.get(number)?;
        let file = self.file(&node)?;
        if drop_set_id {
            self.drop_set_id(&node)?;
        }
        let done = self.write_to(&node, &file, offset, data);
        self.changed(&node);
        done
    }

    fn write_to(&self, node: &Node, file: &OpenFile, offset: u64, data: &[u8]) -> Answer<usize> {
        if offset > file.size() {
            self.clean_tail(node, file)?;
        }
        let size_before = file.size();
        if offset + data.len() as u64 > size_before {
            self.widen(node, file);
        }
        let (done, result) =
            self.part_by_part(node, file, (offset, data.len() as u64), |done, rest| {
                self.write_part(
                    node,
                    file,
                    offset + done,
                    &data[done as usize..][..rest as usize],
                )
            });
        if result.is_err() {
            file.tail_is_unclean();
        }
        if done == 0 {
            return result.map(|()| 0);
        }
        // A file that grew got its mtime by that.
        if offset + done <= size_before {
            self.written(file, 0)?;
        }
        Ok(done as usize)
    }

    /// Writes through the daemon's lane, else to the object itself.
    fn write_part(
        &self,
        node: &Node,
        file: &OpenFile,
        at: u64,
        data: &[u8],
    ) -> Answer<PartOutcome> {
        let state = file.state();
        let (located, fd) = match self.place_of(node, file, &state, at)? {
            Ok(place) => place,
            Err(no_place) => return Ok(no_place),
        };
        let length = located.length.0.min(data.len() as u64);
        let start = located.object_offset.0;
        let mut is_plain = !file.asks_daemon() || file.may_be_passed();
        let done = less_and_less(start, length, |length| {
            if is_plain {
                return Err(Errno::AGAIN);
            }
            let part = &data[..length as usize];
            match self.sessions.write(located.object, &fd, part, start) {
                Done::Whole => Ok(length),
                Done::Failed(error) => Err(error),
                Done::Plain => {
                    is_plain = true;
                    Err(Errno::AGAIN)
                }
            }
        });
        file.was_taken(!is_plain);
        if is_plain {
            drop(state);
            return self.change_part(
                node,
                file,
                (at, length),
                Known::Written,
                |fd, start, length| {
                    pwrite(fd, &data[..length as usize], start).map(|count| count as u64)
                },
            );
        }
        if let Ok(count) = done {
            // Before another thread can change the layout: bytes behind the end would have no
            // place.
            file.grow(at + count)?;
        }
        // The error may be of bytes that the daemon took before. Their writer must get it, so these
        // bytes do not silently go to another member.
        self.note_failure(located.object, "write to an object", &done);
        part_outcome(done, &located, at >= file.size())
    }

    /// Looks at the result of an operation on an object. The error may show that its member fails.
    fn note_failure<T>(&self, object: Object, operation: &'static str, done: &Answer<T>) -> bool {
        let member = self.pool.member(object.member);
        let failed = done.as_ref().err().zip(member);
        failed.is_some_and(|(error, member)| member.note_failure(operation, *error))
    }

    /// Finds the place of a byte, and opens its object for writing.
    #[allow(clippy::type_complexity)]
    fn place_of(
        &self,
        node: &Node,
        file: &OpenFile,
        state: &State,
        at: u64,
    ) -> Answer<Result<(Located, Arc<OwnedFd>), PartOutcome>> {
        let Some(located) = state
            .layout
            .as_ref()
            .and_then(|layout| layout.locate(ByteOffset(at)))
        else {
            return Ok(Err(PartOutcome::NoPlace(None)));
        };
        // A draining member takes no new bytes, not even of files that it has already. It counts as
        // full.
        let number = located.object.member;
        if at >= file.size() && !self.pool.takes_bytes(number) && !self.pool.is_lost(number) {
            let why = (located.object, SpillReason::Full);
            return Ok(Err(PartOutcome::NoPlace(Some(why))));
        }
        match self.object(node, state, located.object, Access::Write) {
            Ok(fd) if at >= file.size() => match self.pool.growth(&located, &fd) {
                Growth::Until(length) => Ok(Ok((Located { length, ..located }, fd))),
                Growth::Refused => {
                    let why = (located.object, SpillReason::Full);
                    Ok(Err(PartOutcome::NoPlace(Some(why))))
                }
            },
            Ok(fd) => Ok(Ok((located, fd))),
            Err(
                PoolError::Missing { .. } | PoolError::Lost { .. } | PoolError::ReadOnly { .. },
            ) if at >= file.size() => {
                let why = (located.object, SpillReason::Unwritable);
                Ok(Err(PartOutcome::NoPlace(Some(why))))
            }
            Err(PoolError::Failing { .. }) if at >= file.size() => {
                let why = (located.object, SpillReason::Failing);
                Ok(Err(PartOutcome::NoPlace(Some(why))))
            }
            Err(error) => Err(self.trouble(node, &error)),
        }
    }

    /// Sets the stub's size and time after a write.
    fn written(&self, file: &OpenFile, end: u64) -> Answer<()> {
        if file.grow(end)? {
            return Ok(());
        }
        let omit = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        };
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        futimens(
            &*file.stub,
            &Timestamps {
                last_access: omit,
                last_modification: now,
            },
        )
    }

    /// No member has room. Returns whether another look is worth it, because a member may have room
    /// by now or soon.
    ///
    /// `full`  since when no member has room
    fn wait_for_room(&self, sought: &mut RoomSought, full: &Full) -> bool {
        if self.room_comes(sought) {
            // Files that the daemon has open free their room a little later.
            full.ended();
            return true;
        }
        let is_worth_it = full.note(self.sessions.serves_any());
        if is_worth_it {
            std::thread::sleep(LOOK_FOR_ROOM_EVERY);
        }
        is_worth_it
    }

    /// Does an operation on a range, in each object that holds a part of it, and makes places as
    /// they are needed.
    ///
    /// Returns  how much is done from the start on, and the error that ended it
    fn part_by_part(
        &self,
        node: &Node,
        file: &OpenFile,
        (offset, total): (u64, u64),
        mut act: impl FnMut(u64, u64) -> Answer<PartOutcome>,
    ) -> (u64, Answer<()>) {
        let mut done = 0;
        let mut sought = RoomSought::default();
        // A member on a copy-on-write file system may refuse even a write to reserved blocks: the
        // door asks each member twice at most for one byte.
        let tries_max = 2 * self.pool.members().len() + 2;
        let mut tries = 0;
        while done < total {
            let went_on = match act(done, total - done) {
                Ok(PartOutcome::Done(count)) => {
                    done += count;
                    tries = 0;
                    Ok(())
                }
                Ok(PartOutcome::NoPlace(why)) if tries >= tries_max => Err(refused_with(why)),
                Ok(PartOutcome::NoPlace(why)) => {
                    tries += 1;
                    match self.make_place(node, file, range(offset + done, total - done), why) {
                        Err(Errno::NOSPC | Errno::DQUOT)
                            if self.wait_for_room(&mut sought, &self.full) =>
                        {
                            tries = 0;
                            Ok(())
                        }
                        made => {
                            if made.is_ok() {
                                self.full.ended();
                            }
                            made
                        }
                    }
                }
                Err(error) => Err(error),
            };
            if let Err(error) = went_on {
                return (done, Err(error));
            }
        }
        (done, Ok(()))
    }

    /// Changes one part on the object itself. No other thread reads or writes the file meanwhile.
    fn change_part(
        &self,
        node: &Node,
        file: &OpenFile,
        (at, length): (u64, u64),
        known: Known,
        mut act: impl FnMut(&OwnedFd, u64, u64) -> Answer<u64>,
    ) -> Answer<PartOutcome> {
        let state = file.change();
        let (located, fd) = match self.place_of(node, file, &state, at)? {
            Ok(place) => place,
            Err(no_place) => return Ok(no_place),
        };
        let behind_end = at >= file.size();
        let start = located.object_offset.0;
        let mut held = self
            .sessions
            .hold(vec![(located.object, Arc::clone(&fd))])?;
        held.what = Changed::From { offset: start };
        state.note_owed_sync(located.object);
        let length = located.length.0.min(length);
        let done = less_and_less(start, length, |length| act(&fd, start, length));
        if let (Known::Written, Ok(count)) = (known, &done) {
            held.what = Changed::Bytes {
                offset: start,
                length: *count,
            };
            file.grow(at + count)?;
        }
        drop(held);
        if self.note_failure(located.object, "write to an object", &done) && behind_end {
            let why = (located.object, SpillReason::Failing);
            return Ok(PartOutcome::NoPlace(Some(why)));
        }
        part_outcome(done, &located, behind_end)
    }

    pub(crate) fn allocate(
        &self,
        number: u64,
        offset: u64,
        length: u64,
        mode: u32,
        by_user: bool,
    ) -> Answer<()> {
        let node = self.nodes.get(number)?;
        let file = self.file(&node)?;
        let end = offset
            .checked_add(length)
            .filter(|_| length > 0)
            .ok_or(Errno::INVAL)?;
        let action = match mode & !KEEP_SIZE {
            0 => FallocateFlags::empty(),
            PUNCH_HOLE if mode & KEEP_SIZE != 0 => FallocateFlags::PUNCH_HOLE,
            ZERO_RANGE => FallocateFlags::ZERO_RANGE,
            _ => return Err(Errno::OPNOTSUPP),
        } | FallocateFlags::KEEP_SIZE;
        if by_user {
            self.drop_set_id(&node)?;
        }
        if end > file.size()
            && let Err(error) = self.clean_tail(&node, &file)
        {
            self.changed(&node);
            return Err(error);
        }
        if mode & PUNCH_HOLE != 0 && file.state().layout.is_none() {
            return Ok(());
        }
        let takes_room = mode & PUNCH_HOLE == 0;
        let before = self
            .pool
            .room_before(file.state().layout.as_ref(), range(offset, length));
        if takes_room && let Err(error) = self.require_room(&file, &before) {
            self.changed(&node);
            return Err(error);
        }
        let (_, result) = self.part_by_part(&node, &file, (offset, length), |done, rest| {
            let part = (offset + done, rest);
            self.change_part(&node, &file, part, Known::Nothing, |fd, start, length| {
                fallocate(fd, action, start, length).map(|()| length)
            })
        });
        if takes_room && result.is_err() {
            self.give_back_since(&node, &file, &before);
        }
        let end = if mode & KEEP_SIZE == 0 { end } else { 0 };
        let done = result
            .and_then(|()| match end > file.size() && file.may_be_passed() {
                true => self.stretch(&node, &file, &file.change(), end),
                false => Ok(()),
            })
            .and_then(|()| self.written(&file, end));
        self.changed(&node);
        done
    }

    /// Refuses a request that cannot fit before it begins; else other writers would get "no space"
    /// meanwhile.
    fn require_room(&self, file: &OpenFile, before: &RoomBefore) -> Answer<()> {
        // Other members may have room enough.
        let (mut sought, full) = (RoomSought::default(), Full::default());
        loop {
            let room = {
                let state = file.state();
                self.pool
                    .room_at_most(file.stub.as_fd(), state.layout.as_ref())
            };
            if before.lacking() <= room {
                return Ok(());
            }
            if !self.wait_for_room(&mut sought, &full) {
                return Err(Errno::NOSPC);
            }
        }
    }

    /// The allocation did not fit after all: frees the room that it took. Room that another program
    /// reserved in the same file at the same time may go with it.
    fn give_back_since(&self, node: &Node, file: &OpenFile, before: &RoomBefore) {
        let mut state = file.change();
        let Some(mut layout) = state.layout.clone() else {
            return;
        };
        let is_passed = self.check_passed(node, file, &state);
        // The daemon first writes all it has of the file, and afterwards looks up its blocks again.
        let Ok(held) = self.hold(node, &state, |_| true) else {
            return;
        };
        let size = ByteCount(file.size());
        let stub = file.stub.as_fd();
        let given = self
            .pool
            .give_back_since(stub, &mut layout, size, before, is_passed);
        if let Err(error) = given {
            tracing::warn!(
                "{}: cannot free space that was allocated for a write that failed: {error}; it \
                 stays allocated until the file is truncated or deleted",
                self.name_of(node)
            );
        }
        self.let_go(&state, &layout);
        file.set_layout(&mut state, layout);
        drop(held);
    }

    pub(crate) fn seek(&self, number: u64, offset: i64, whence: i32) -> Answer<i64> {
        let node = self.nodes.get(number)?;
        let file = self.file(&node)?;
        self.settle(&node, &file)?;
        let state = file.state();
        let size = file.size();
        let start = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        if !matches!(whence, SEEK_DATA | SEEK_HOLE) {
            return Err(Errno::INVAL);
        }
        if start >= size {
            return Err(Errno::NXIO);
        }
        let mut at = start;
        while at < size {
            let Some(located) = state
                .layout
                .as_ref()
                .and_then(|layout| layout.locate(ByteOffset(at)))
            else {
                break;
            };
            let fd = self.object(&node, &state, located.object, Access::Read);
            let fd = fd.map_err(|error| self.trouble(&node, &error))?;
            let from = located.object_offset.0;
            let found = if whence == SEEK_DATA {
                seek(&*fd, SeekFrom::Data(from))
            } else {
                seek(&*fd, SeekFrom::Hole(from))
            };
            let found = match found {
                Ok(found) => Some(found),
                // Behind the object's end there is only a hole.
                Err(Errno::NXIO) => (whence == SEEK_HOLE).then_some(from),
                Err(error) => return Err(error),
            };
            let end = (at.saturating_add(located.length.0)).min(size);
            if let Some(found) = found
                .map(|found| at + (found - from))
                .filter(|found| *found < end)
            {
                return Ok(found as i64);
            }
            at = end;
        }
        match whence {
            // Without an object, or with data up to the end, the end counts as a hole.
            SEEK_HOLE
                if state
                    .layout
                    .as_ref()
                    .is_none_or(|layout| layout.segments().is_empty()) =>
            {
                Ok(start as i64)
            }
            SEEK_HOLE => Ok(size as i64),
            _ => Err(Errno::NXIO),
        }
    }

    /// May copy fewer bytes than asked, if it is much: the kernel asks again.
    pub(crate) fn copy(
        self: &Arc<Door>,
        from: (u64, u64),
        to: (u64, u64),
        length: u64,
        by_user: bool,
    ) -> Answer<usize> {
        let (source_node, target_node) = (self.nodes.get(from.0)?, self.nodes.get(to.0)?);
        let (source, target) = (self.file(&source_node)?, self.file(&target_node)?);
        if by_user {
            self.drop_set_id(&target_node)?;
        }
        let length = length.min(COPY_BYTES_MAX);
        let mut done = 0;
        let mut result = Ok(());
        while done < length {
            let chunk = (length - done).min(COPY_CHUNK_BYTES as u64) as usize;
            let copied = self
                .read_and_wait(&source_node, &source, from.1 + done, chunk)
                .and_then(|bytes| self.write_to(&target_node, &target, to.1 + done, &bytes));
            match copied {
                Ok(0) => break,
                Ok(count) => done += count as u64,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        self.changed(&target_node);
        // A program that goes on gets the error that ended this copy.
        if done > 0 {
            return Ok(done as usize);
        }
        result.map(|()| 0)
    }

    /// Syncs before the door answers a write, if the flags of the open (O_SYNC, O_DSYNC) ask for
    /// it. After a write through its cache the kernel asks for a sync by itself; after one past its
    /// cache it leaves that to the door. If only O_DIRECT makes the open go past the cache, nobody
    /// asks for a sync after writes by AIO or io_uring (fs/fuse/file.c). The kernel does not pass
    /// on RWF_DSYNC of such a write.
    pub(crate) fn sync_if_asked(&self, number: u64, handle: u64, flags: i32) -> Answer<()> {
        let flags = OFlags::from_bits_retain(flags as u32);
        if !flags.intersects(OFlags::SYNC) {
            return Ok(());
        }
        if !flags.contains(OFlags::DIRECT) && self.is_cached(number, handle)? {
            return Ok(());
        }
        self.sync(number, handle, !flags.contains(OFlags::SYNC))
    }

    /// Syncs the objects, then the stub that names them, also those that another open wrote. Each
    /// open gets a write error of the kernel once, as on any file system: all opens use one
    /// descriptor, to which the kernel reports the error once.
    pub(crate) fn sync(&self, number: u64, handle: u64, data_only: bool) -> Answer<()> {
        let node: Arc<Node> = self.nodes.get(number)?;
        let file = self.file(&node)?;
        let done = self.sync_all(&node, &file, data_only);
        file.wait_for_who_asks();
        let heard = self.hear_of_sync(&node, &file, handle);
        done.and(heard)
    }

    fn sync_all(&self, node: &Arc<Node>, file: &OpenFile, data_only: bool) -> Answer<()> {
        let state = file.state();
        for object in state.layout.iter().flat_map(|layout| layout.objects()) {
            let fd = match self.object(node, &state, object, Access::Read) {
                Ok(fd) => fd,
                Err(PoolError::Lost { .. }) => {
                    // Bytes that were written to it and not synced are lost with it, and each open
                    // gets that error once. All else of the file becomes durable.
                    if state.forget_written(object) {
                        file.sync_failed(Errno::IO);
                    }
                    continue;
                }
                // No bytes of ours wait for a missing member, unless a daemon has some in memory.
                Err(PoolError::Missing { .. }) if !self.sessions.lacks_any() => continue,
                Err(error) => return Err(self.trouble(node, &error)),
            };
            // Of a daemon that vanished, lanes and all, the door cannot know whether its device
            // failed.
            let synced = match self.sessions.sync(object, &fd)? {
                Done::Failed(error) => Err(error),
                done => match state.take_owed_sync(object) || matches!(done, Done::Plain) {
                    true => fdatasync(&*fd),
                    false => Ok(()),
                },
            };
            // The daemon repeats an error of bytes that it has in memory until they are written. It
            // forgets one of bytes that the drive did not write.
            let synced = synced.inspect_err(|error| file.sync_failed(*error));
            self.note_failure(object, "make an object durable", &synced);
            synced?;
        }
        let is_unsettled = state.layout.as_ref().is_some_and(Layout::is_unsettled);
        let synced = if is_unsettled {
            drop(state);
            self.make_durable(node, file)
                .and_then(|()| file.sync_stub(file.state(), data_only))
        } else {
            file.sync_stub(state, data_only)
        };
        synced.inspect_err(|error| file.sync_failed(*error))
    }
}
