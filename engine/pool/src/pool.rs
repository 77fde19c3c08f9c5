// SPDX-License-Identifier: Apache-2.0
//! An open pool: layouts of files, and the order of durable steps between catalogue and members.
//!
//! A layout names an object only after it is on its member for good; an object goes only after its
//! name has gone for good. So a crash leaves at worst objects that no layout names.

use crate::catalogue::{Catalogue, Lock, REMOVED};
use crate::data::next_run;
use crate::error::PoolError;
use crate::failing::is_of_process;
use crate::format::{CatalogueFormat, FORMAT_FILE, Format};
use crate::gather::width;
use crate::hole::vacate;
use crate::member::{Access, Member, MemberState, mark_of};
use crate::refused::Refused;
use crate::rules::Rules;
use crate::sequences::{Frame, Sequences};
use crate::wishes::Loads;
use crate::xattr::{self, LAYOUT_ATTRIBUTE};
use rushes_core::pool::check::Mark;
use rushes_core::pool::{
    Asked, Class, FileIdentity, Layout, Located, MemberNumber, Object, Part, Policy, PoolId, Room,
    Segment, Shape, Wish, follow, order, stripe,
};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Mode, OFlags, fallocate, fdatasync, fstat, fsync, ftruncate,
    openat, statat, unlinkat,
};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// Bytes that move together when one of them does not fit where it is, as on copy-on-write file
/// systems.
const MOVE_BYTES: u64 = 1 << 20;
/// The last try for room on a member asks for so much. Units: bytes.
const BLOCK_BYTES: u64 = 4096;

/// Why a segment cannot take bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillReason {
    /// Its member returned ENOSPC.
    Full,
    /// Its member returned EDQUOT: as if it were full, but if all others return it, too, that is
    /// the error.
    OverQuota,
    /// Its member is missing or read-only, and nothing was ever written at or behind the range: it
    /// begins at or behind the file's end.
    Unwritable,
    /// The same, and its device fails.
    Failing,
}

/// All members together, each device once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of members that are there.
    pub bytes_total: ByteCount,
    /// Room that can be written; read-only and draining members have none.
    pub bytes_free: ByteCount,
    /// How many devices they are on.
    pub device_count: usize,
    /// Members that are not there.
    pub missing_count: usize,
}

/// The outcome of [`Pool::bury`].
#[derive(Debug, Default)]
pub struct Buried {
    /// Stubs that are gone with all their objects.
    pub file_count: usize,
    /// Those of them that had objects.
    pub files: Vec<FileIdentity>,
    /// Why some could not be removed yet; the next call tries them again.
    pub kept: Vec<PoolError>,
    /// How many a program opened meanwhile, or lost their last name only then: they are for the
    /// next time.
    pub left_count: usize,
}

/// Whether a program reads objects by themselves, whatever the layout says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// No program does.
    None,
    /// By the kernel's passthrough, as they were when the file was opened.
    Passthrough,
}

/// The source of a move: a segment, and its objects opened.
pub(crate) struct Source {
    pub(crate) segment: Segment,
    /// None: it is away.
    pub(crate) objects: Vec<Option<OwnedFd>>,
    readers: Readers,
}

impl Source {
    /// The first byte of the file at or behind `at` that is in one of the objects.
    pub(crate) fn next_data(&self, at: u64) -> Result<Option<u64>, PoolError> {
        let (shape, origin) = (self.segment.shape, self.segment.origin.0);
        let mut first = None;
        for (index, fd) in self.objects.iter().enumerate() {
            let Some(fd) = fd else {
                continue;
            };
            let from = shape.share(index, at - origin);
            if let Some(data) = next_data(fd, from)? {
                let found = origin.saturating_add(shape.offset_of(index, data));
                first = Some(first.map_or(found, |first: u64| first.min(found)));
            }
        }
        Ok(first)
    }

    /// Copy bytes of the file to an object that has each where the file has it, durably.
    ///
    /// `to_failed`  makes the error of a write to that object
    fn copy(
        &self,
        to: &OwnedFd,
        range: ByteRange,
        to_failed: impl Fn(Errno) -> PoolError,
    ) -> Result<(), PoolError> {
        let failed = |error| PoolError::system("move bytes between members", "", error);
        let mut buffer = vec![0; 1 << 16];
        let mut at = range.start.0;
        while at < range.end() {
            let (index, from, run) = self.segment.shape.locate(at - self.segment.origin.0);
            let run = run.min(range.end() - at);
            let length = run.min(buffer.len() as u64) as usize;
            let part = &mut buffer[..length];
            let Some(object) = &self.objects[index] else {
                return Err(failed(Errno::IO));
            };
            let count = rustix::io::pread(object, part, from).map_err(failed)?;
            let mut written = 0;
            while written < count {
                let part = &buffer[written..count];
                written += rustix::io::pwrite(to, part, at + written as u64).map_err(&to_failed)?;
            }
            // Behind the end of this object is a hole; others of a stripe may go on.
            at += if count == 0 { run } else { count as u64 };
        }
        fdatasync(to).map_err(to_failed)
    }

    /// Make holes in place of bytes of the file that have moved, as this layout has it.
    pub(crate) fn vacate(&self, layout: &Layout, range: ByteRange) -> Result<(), Errno> {
        let (shape, origin) = (self.segment.shape, self.segment.origin.0);
        self.objects
            .iter()
            .enumerate()
            .filter_map(|(index, fd)| Some((index, fd.as_ref()?)))
            .try_for_each(|(index, fd)| {
                let start = shape.share(index, range.start.0 - origin);
                let end = shape.share(index, range.end() - origin);
                let part = ByteRange::new(start, end - start);
                vacate(fd, layout, self.segment.objects[index], part)
            })
    }
}

/// The content of the format file, and the members that it names.
#[derive(Debug)]
struct Membership {
    format: CatalogueFormat,
    members: Vec<Arc<Member>>,
}

/// The members of a pool at the time of the call; others may be there since.
#[derive(Clone, Debug)]
pub struct Members(Arc<Membership>);

impl Deref for Members {
    type Target = [Arc<Member>];

    fn deref(&self) -> &[Arc<Member>] {
        &self.0.members
    }
}

/// An open pool. Its members may change while files are in use, by [`Pool::adopt`].
#[derive(Debug)]
pub struct Pool {
    id: PoolId,
    policy: Policy,
    catalogue: Catalogue,
    membership: RwLock<Arc<Membership>>,
    /// Held by a thread that chooses members and makes objects on them, until the layout names
    /// those.
    placing: RwLock<()>,
    turn: AtomicU64,
    /// How often other members were adopted.
    generation: AtomicU64,
    loads: Loads,
    sequences: Sequences,
    /// The size of the block that the attributes of a file share; see layout_room.rs.
    pub(crate) attribute_block: OnceLock<Option<usize>>,
}

/// The policy of a file, members with room, and those that may take bytes, in the order in which
/// the pool asks them.
type Candidates = (Wish, Vec<Room>, Vec<MemberNumber>);

impl Pool {
    /// Open it for a door, which then is its only one.
    ///
    /// Errors   [`PoolError::Served`]: another door has it. Missing members are no error.
    pub fn serve(catalogue: &Path) -> Result<Pool, PoolError> {
        Pool::open(catalogue, Lock::Take, FORMAT_FILE)
    }

    /// Open it for a door that goes on after another one, with that one's [`Catalogue::lock`],
    /// which was held all the time.
    ///
    /// Errors   [`PoolError::Refused`]: it is another pool's
    pub fn serve_on(catalogue: &Path, lock: OwnedFd) -> Result<Pool, PoolError> {
        Pool::open(catalogue, Lock::Had(lock), FORMAT_FILE)
    }

    /// Open it to look, beside a door.
    pub fn look(catalogue: &Path) -> Result<Pool, PoolError> {
        Pool::open(catalogue, Lock::None, FORMAT_FILE)
    }

    pub(crate) fn open(catalogue: &Path, lock: Lock, file: &str) -> Result<Pool, PoolError> {
        let (catalogue, format) = Catalogue::open(catalogue, lock, file)?;
        let id = format.pool;
        let members = format.members.iter();
        // A catalogue that is still being made takes no member over: its rescue may be refused, or
        // interrupted.
        let takes_over = catalogue.has_lock() && file == FORMAT_FILE;
        // A door has asked its members when it opened the pool. A command beside it waits for no
        // member that hangs.
        let is_asked = !catalogue.has_lock() && catalogue.is_served()?;
        let device = catalogue.device().ok();
        let members = members.map(|entry| {
            let member = Member::new(entry, &format, device);
            if !is_asked {
                member.belongs(catalogue.path())?;
            }
            if takes_over {
                // A member that cannot be written to learns of it when it can.
                let _ = member.take_over();
            }
            Ok(Arc::new(member))
        });
        let members = members.collect::<Result<Vec<_>, PoolError>>()?;
        Ok(Pool {
            id,
            policy: format.policy,
            catalogue,
            turn: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            membership: RwLock::new(Arc::new(Membership { members, format })),
            placing: RwLock::default(),
            loads: Loads::default(),
            sequences: Sequences::default(),
            attribute_block: OnceLock::new(),
        })
    }

    fn membership(&self) -> Arc<Membership> {
        Arc::clone(
            &self
                .membership
                .read()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// The content of its format file.
    pub(crate) fn format(&self) -> CatalogueFormat {
        self.membership().format.clone()
    }

    pub(crate) fn name_rules(&self) -> Rules {
        self.membership().format.rules.clone()
    }

    /// Go by this format file from now on. Once this returns no thread makes an object any more on
    /// members that take nothing new by it.
    pub(crate) fn adopt(&self, format: CatalogueFormat) {
        self.adopt_at_once(format);
        // Threads that chose by the former format file hold this until they are done.
        drop(self.placing.write());
    }

    /// The same, without waiting for threads that choose at this moment: one of them may hang in a
    /// disk that is given up.
    pub(crate) fn adopt_at_once(&self, format: CatalogueFormat) {
        let before = self.membership();
        let device = self.catalogue.device().ok();
        let entries = format.members.iter();
        let members = entries.map(|entry| {
            let known = before.members.iter().find(|member| member.is(entry));
            known.map_or_else(|| Arc::new(Member::new(entry, &format, device)), Arc::clone)
        });
        let now = Arc::new(Membership {
            members: members.collect(),
            format,
        });
        *self
            .membership
            .write()
            .unwrap_or_else(PoisonError::into_inner) = now;
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Its format file, as text.
    pub(crate) fn format_text(&self) -> Result<String, PoolError> {
        Format::Catalogue(self.format())
            .text()
            .map_err(|error| PoolError::system("write the format file", "", error))
    }

    /// Its id.
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// How members are chosen.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Its tree.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// All members, also missing ones.
    pub fn members(&self) -> Members {
        Members(self.membership())
    }

    /// Another number after each change of the format file: there may be other members.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Another number when members have come, gone, or take bytes again.
    pub fn member_set(&self) -> u64 {
        let members = self.members();
        let taking = members.iter().filter(|member| member.takes_bytes());
        taking.fold(0, |all, member| {
            let number = u64::from(member.number().0) + 1;
            all ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    }

    /// The member of this number.
    pub fn member(&self, number: MemberNumber) -> Option<Arc<Member>> {
        let members = self.members();
        let found = members.iter().find(|member| member.number() == number);
        found.map(Arc::clone)
    }

    /// New bytes may go to the member of this number.
    pub fn takes_bytes(&self, number: MemberNumber) -> bool {
        let members = self.members();
        let mut of_number = members.iter().filter(|member| member.number() == number);
        of_number.any(|member| member.takes_bytes())
    }

    /// An identity for a new file.
    pub fn new_file(&self) -> Result<FileIdentity, PoolError> {
        self.catalogue.new_file()
    }

    /// The layout of a stub. None: it has no bytes and no layout yet.
    ///
    /// Assumes  `stub`: a regular file below the tree, opened, not by O_PATH
    pub fn layout(&self, stub: BorrowedFd<'_>) -> Result<Option<Layout>, PoolError> {
        let failed = |error| PoolError::system("read the layout record", "", error);
        match xattr::get(stub, LAYOUT_ATTRIBUTE).map_err(failed)? {
            Some(record) => Layout::decode(&record).map(Some).map_err(PoolError::Layout),
            None => match fstat(stub).map_err(failed)?.st_size as u64 {
                0 => Ok(None),
                size => Err(PoolError::NoLayout { size }),
            },
        }
    }

    /// Replace the layout of a stub, whole. A stub must have one before it gets a size: make it
    /// with [`Layout::new`].
    ///
    /// Assumes  exclusive: no other thread reads or changes this file's layout meanwhile
    pub fn set_layout(&self, stub: BorrowedFd<'_>, layout: &Layout) -> Result<(), PoolError> {
        let too_long = PoolError::LayoutTooLong {
            segment_count: layout.segments().len(),
        };
        if !layout.fits_a_record() {
            return Err(too_long);
        }
        xattr::set(stub, LAYOUT_ATTRIBUTE, &layout.encode()).map_err(|error| match error {
            Errno::DQUOT => self.catalogue_full(),
            // The same number says that the attributes of this one file have no room left.
            Errno::NOSPC if self.is_catalogue_full() => self.catalogue_full(),
            Errno::NOSPC | Errno::TOOBIG | Errno::RANGE => too_long,
            error => PoolError::system("write the layout record", "", error),
        })
    }

    /// Where the first of these bytes goes. Makes the file's first segment and its object if it has
    /// none, and does not wait until that is durable: the file is unsettled then, see
    /// [`Layout::is_unsettled`], and the door has to [`Pool::settle`] it before its fsync ends.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    /// Errors   [`PoolError::NoRoom`]: no member has room for one block of it
    pub fn place(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        wanted: ByteRange,
    ) -> Result<Located, PoolError> {
        if let Some(located) = layout.locate(wanted.start) {
            return Ok(located);
        }
        let _placing = self.placing.read();
        let frame = Frame::of(stub);
        let follows = frame.as_ref().and_then(|it| self.sequences.last(it));
        let mut candidates = self.all_candidates(stub, None, wanted.length)?;
        if let Some(member) = follows {
            let (wish, rooms, asked) = &mut candidates;
            let policy = wish.choose.unwrap_or(self.policy);
            follow(policy, rooms, asked, member, wanted.length);
        }
        let range = ByteRange::new(0, u64::MAX);
        let none = (None, Refused::default());
        self.take_of(stub, layout, range, wanted, candidates, none)?;
        let located = layout
            .locate(wanted.start)
            .expect("a placed file covers every byte");
        if let Some(frame) = frame {
            self.sequences.went_to(frame, located.object.member);
        }
        Ok(located)
    }

    /// Bytes did not fit where the layout has them: let another member take them, and the range
    /// behind them up to the next data.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]; `wanted` begins at the first byte that could
    ///          not be written
    /// Returns  where the first byte goes now; it has a block there already, so each call is
    ///          progress
    /// Errors   [`PoolError::NoRoom`]: no other member has room for one block of it
    pub fn spill(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        wanted: ByteRange,
        reason: SpillReason,
    ) -> Result<Located, PoolError> {
        self.spill_beside(stub, layout, wanted, reason, Readers::None)
    }

    /// The same beside a program that reads objects without the layout: moved bytes stay where they
    /// were, too, until the file is truncated or removed.
    pub fn spill_beside(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        wanted: ByteRange,
        reason: SpillReason,
        readers: Readers,
    ) -> Result<Located, PoolError> {
        let Some(now) = layout.locate(wanted.start) else {
            return self.place(stub, layout, wanted);
        };
        let segment = layout.range_of(now.segment_index);
        let start = wanted.start.0;
        let length = wanted.length.0.min(segment.end() - start).max(1);
        let (from, source) = match reason {
            SpillReason::Unwritable | SpillReason::Failing => {
                // Another program may have written behind it meanwhile, to members that take bytes.
                let mut others = self.opened(layout, now.segment_index, Access::Write);
                let at = others
                    .segment
                    .objects
                    .iter()
                    .position(|one| *one == now.object);
                if let Some(this) = at.and_then(|at| others.objects.get_mut(at)) {
                    *this = None;
                }
                let data = others.next_data(start)?;
                let end = data.unwrap_or(u64::MAX).min(segment.end());
                (ByteRange::new(start, end - start), None)
            }
            SpillReason::Full | SpillReason::OverQuota => {
                let objects = self.opened(layout, now.segment_index, Access::Read);
                let data = objects.next_data(start)?;
                if data == Some(start) {
                    let mut source = self.source(layout, now.segment_index)?;
                    source.readers = readers;
                    let first = (start & !(MOVE_BYTES - 1)).max(segment.start.0);
                    let last = (start + length)
                        .next_multiple_of(MOVE_BYTES)
                        .min(segment.end());
                    (ByteRange::new(first, last - first), Some(source))
                } else {
                    let hole = data.map_or(u64::MAX, |data| data - start);
                    (ByteRange::new(start, hole.min(segment.end() - start)), None)
                }
            }
        };
        let wanted = ByteRange::new(start, length.min(from.end() - start));
        let except = (now.object.member, reason);
        self.take(stub, layout, from, wanted, except, source)?;
        Ok(layout
            .locate(wanted.start)
            .expect("a placed file covers every byte"))
    }

    /// A segment whose bytes are to move.
    pub(crate) fn source(
        &self,
        layout: &Layout,
        segment_index: usize,
    ) -> Result<Source, PoolError> {
        let segment = layout.segments()[segment_index].clone();
        let open = |&object: &Object| self.open_object(layout, object, Access::Write).map(Some);
        let objects = segment.objects.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Source {
            segment,
            objects,
            readers: Readers::None,
        })
    }

    /// A segment with those of its objects that can be opened so.
    fn opened(&self, layout: &Layout, segment_index: usize, access: Access) -> Source {
        let segment = layout.segments()[segment_index].clone();
        let open = |&object: &Object| self.open_object(layout, object, access).ok();
        let objects = segment.objects.iter().map(open).collect();
        Source {
            segment,
            objects,
            readers: Readers::None,
        }
    }

    fn next_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Members with room for bytes of this file, the best first; the policy of the file; and the
    /// members' rooms.
    pub(crate) fn candidates(
        &self,
        stub: BorrowedFd<'_>,
        except: Option<MemberNumber>,
        wanted: ByteCount,
    ) -> Candidates {
        self.candidates_and_lack(stub, except, wanted).0
    }

    /// The same for a caller that needs a look at each member.
    ///
    /// Errors   the process lacks descriptors or memory for that, which says nothing of their room
    fn all_candidates(
        &self,
        stub: BorrowedFd<'_>,
        except: Option<MemberNumber>,
        wanted: ByteCount,
    ) -> Result<Candidates, PoolError> {
        match self.candidates_and_lack(stub, except, wanted) {
            (candidates, None) => Ok(candidates),
            (_, Some(lack)) => Err(lack),
        }
    }

    fn candidates_and_lack(
        &self,
        stub: BorrowedFd<'_>,
        except: Option<MemberNumber>,
        wanted: ByteCount,
    ) -> (Candidates, Option<PoolError>) {
        let wish = self.wish_of(stub);
        let (rooms, lack) = self.rooms(except, wish.class.as_ref());
        let asked = Asked {
            turn: self.next_turn(),
            user: fstat(stub).map_or(0, |status| status.st_uid),
            wanted,
        };
        let mut members = order(wish.choose.unwrap_or(self.policy), &rooms, asked);
        members.extend(self.failing(except, wish.class.as_ref()));
        ((wish, rooms, members), lack)
    }

    /// Give `range` to the first member that has room for `wanted` of it, else for one block; never
    /// to `except`, which has not taken it.
    fn take(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        range: ByteRange,
        wanted: ByteRange,
        (except, reason): (MemberNumber, SpillReason),
        moved: Option<Source>,
    ) -> Result<(), PoolError> {
        let _placing = self.placing.read();
        let candidates = self.all_candidates(stub, Some(except), wanted.length)?;
        let mut refused = Refused::default();
        match reason {
            SpillReason::Full => refused.note(self.full(except)),
            SpillReason::OverQuota => refused.note(PoolError::OverQuota),
            SpillReason::Failing => refused.note(match self.known(except) {
                Ok(member) => member.failed("write to an object", "objects", Errno::IO),
                Err(error) => error,
            }),
            SpillReason::Unwritable => {}
        }
        self.take_of(stub, layout, range, wanted, candidates, (moved, refused))
    }

    /// The same, of chosen members.
    ///
    /// `refused`  by the members asked so far
    /// Assumes  `placing` has been held since
    fn take_of(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        range: ByteRange,
        wanted: ByteRange,
        (wish, rooms, asked): (Wish, Vec<Room>, Vec<MemberNumber>),
        (moved, mut refused): (Option<Source>, Refused),
    ) -> Result<(), PoolError> {
        // Only a range that may grow is worth a stripe.
        if moved.is_none()
            && range.end() == u64::MAX
            && let Some((shape, members)) = stripe(&wish, &rooms, &asked, wanted.length)
            && self.take_striped(stub, layout, range, wanted, (shape, &members))?
        {
            return Ok(());
        }
        // Moved bytes must fit whole, or some that are there would be lost.
        let (room, least) = if moved.is_some() {
            (range, range)
        } else {
            (
                wanted,
                ByteRange::new(wanted.start.0, wanted.length.0.min(BLOCK_BYTES)),
            )
        };
        let is_first = layout.segments().is_empty();
        let class = wish.class;
        let tries = if room == least {
            vec![room]
        } else {
            vec![room, least]
        };
        for room in tries {
            for &number in &asked {
                let taken = self.known(number).and_then(|member| {
                    let taken = self.try_take(layout, &member, range, room)?;
                    Ok((member, taken))
                });
                let (member, (object, fd, is_new)) = match taken {
                    Ok(taken) => taken,
                    // With any error, another one may take it.
                    Err(error) => {
                        refused.note(error);
                        continue;
                    }
                };
                let mut next = layout.clone();
                next.assign(range, ByteOffset(0), object);
                next.set_unsettled(is_first || layout.is_unsettled());
                let published = match &moved {
                    Some(source) => source.copy(&fd, range, |error| {
                        member.failed("move bytes to an object", "objects", error)
                    }),
                    None => Ok(()),
                }
                .and_then(|()| match is_first {
                    true => Ok(()),
                    false => fsync(&fd)
                        .map_err(|error| member.failed("make an object durable", "objects", error)),
                })
                .and_then(|()| self.set_layout(stub, &next));
                if let Err(error) = published {
                    // The layout is as it was: copied bytes are no file's, but programs that read
                    // the object itself may have them.
                    let is_read = |source: &Source| source.readers == Readers::Passthrough;
                    match is_new {
                        true => self.forget(layout.file, object),
                        false if moved.as_ref().is_some_and(is_read) => {}
                        false => drop(vacate(&fd, layout, object, range)),
                    }
                    // A reservation says less on copy-on-write file systems: this member is full
                    // after all, the next one may not be.
                    if Refused::is_of_member(&error) {
                        refused.note(error);
                        continue;
                    }
                    return Err(error);
                }
                self.replaced(stub, layout, next, moved.map(|source| (source, range)));
                return Ok(());
            }
        }
        Err(match (refused.all(), class) {
            (PoolError::NoRoom, Some(class)) => PoolError::ClassFull { class },
            (error, _) => error,
        })
    }

    /// After a layout was written: free the room that the one before had in other objects; if that
    /// fails, only the room is not regained.
    fn replaced(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        next: Layout,
        moved: Option<(Source, ByteRange)>,
    ) {
        let kept = next.objects();
        let mut gone = layout.objects();
        gone.retain(|object| kept.binary_search(object).is_err());
        *layout = next;
        if (moved.is_some() || !gone.is_empty()) && fsync(stub).is_ok() {
            if let Some((source, range)) = &moved
                && source.readers == Readers::None
            {
                let _ = source.vacate(layout, *range);
            }
            for object in gone {
                self.forget(layout.file, object);
            }
        }
    }

    /// Give `range` to new objects, one on each of these members. False: one of them has no room
    /// after all, or is not there any more.
    fn take_striped(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        range: ByteRange,
        wanted: ByteRange,
        (shape, members): (Shape, &[MemberNumber]),
    ) -> Result<bool, PoolError> {
        let mut made = Vec::with_capacity(members.len());
        let done = self.make_stripe(stub, layout, range, wanted, (shape, members), &mut made);
        match done {
            Ok(next) => {
                self.replaced(stub, layout, next, None);
                Ok(true)
            }
            Err(error) => {
                for (object, _) in made {
                    self.forget(layout.file, object);
                }
                match error {
                    error if Refused::is_of_member(&error) || error.is_full() => Ok(false),
                    error => Err(error),
                }
            }
        }
    }

    /// Lay bytes that come behind the end of a file over a wider stripe, if its own is narrower
    /// than it could be by now.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]; `size`: the file's
    /// Returns  false: it is not striped, or cannot be striped over more members
    pub fn widen(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        size: ByteCount,
    ) -> Result<bool, PoolError> {
        let _placing = self.placing.read();
        let Some(last) = layout.segments().last() else {
            return Ok(false);
        };
        let now = width(last);
        let is_striped = last.shape != Shape::Single;
        let Some((shape, members)) = self
            .widest(stub)
            .filter(|(_, members)| is_striped && members.len() > now && last.start.0 <= size.0)
        else {
            return Ok(false);
        };
        // Bytes that a crash left behind the end, or that a program has written there meanwhile.
        let objects = self.opened(layout, layout.segments().len() - 1, Access::Read);
        let is_away = objects.objects.iter().any(Option::is_none);
        if is_away || objects.next_data(size.0)?.is_some() {
            return Ok(false);
        }
        let range = ByteRange::new(size.0, u64::MAX - size.0);
        let wanted = ByteRange::new(size.0, 0);
        self.take_striped(stub, layout, range, wanted, (shape, &members))
    }

    /// Returns  the layout with the stripe, written down
    fn make_stripe(
        &self,
        stub: BorrowedFd<'_>,
        layout: &Layout,
        range: ByteRange,
        wanted: ByteRange,
        (shape, members): (Shape, &[MemberNumber]),
        made: &mut Vec<(Object, OwnedFd)>,
    ) -> Result<Layout, PoolError> {
        // So that units begin where a reader of whole units expects it.
        let origin = range.start.0 & !(shape.unit_bytes() - 1);
        let serial = self.next_serial(layout);
        let is_first = layout.segments().is_empty();
        for (&number, place) in members.iter().zip(0u16..) {
            let part = Part {
                serial,
                place,
                origin: ByteOffset(origin),
                shape,
            };
            let member = self.known(number)?;
            made.push(member.create_object(layout.file, part, !is_first)?);
        }
        for (index, (object, fd)) in made.iter().enumerate() {
            let start = shape.share(index, wanted.start.0 - origin);
            let end = shape.share(index, wanted.end() - origin);
            if end > start {
                let member = self.known(object.member)?;
                reserve(fd, ByteRange::new(start, end - start))
                    .and_then(|()| if is_first { Ok(()) } else { fsync(fd) })
                    .map_err(|error| {
                        member.failed("reserve room in an object", "objects", error)
                    })?;
            }
        }
        let mut next = layout.clone();
        let objects = made.iter().map(|(object, _)| *object).collect();
        next.lay(range, ByteOffset(origin), shape, objects);
        next.set_unsettled(is_first || layout.is_unsettled());
        self.set_layout(stub, &next)?;
        Ok(next)
    }

    /// An object of this member with room for these bytes.
    ///
    /// Returns  also whether it is a new one
    fn try_take(
        &self,
        layout: &Layout,
        member: &Member,
        range: ByteRange,
        room: ByteRange,
    ) -> Result<(Object, OwnedFd, bool), PoolError> {
        if let Some(free) = member.room_beside_catalogue()
            && free < room.length
        {
            return Err(member.room_is_kept());
        }
        // One object a member is enough: it has each byte where the file has it.
        let mine = layout.single_on(member.number(), ByteOffset(0));
        let (object, fd) = match mine {
            Some(object) => {
                let fd = member.open_object(layout.file, object.id, Access::Write)?;
                (object, fd)
            }
            None => {
                let serial = self.next_serial(layout);
                let is_first = layout.segments().is_empty();
                member.create_object(layout.file, Part::single(serial), !is_first)?
            }
        };
        let is_new = mine.is_none();
        // An object that was there before may have outdated bytes in the range.
        let cleared = if is_new { Ok(()) } else { punch(&fd, range) };
        match cleared.and_then(|()| reserve(&fd, room)) {
            Ok(()) => Ok((object, fd, is_new)),
            Err(error) => {
                // A part of the room may have been there.
                match is_new {
                    true => self.forget(layout.file, object),
                    false => drop(vacate(&fd, layout, object, range)),
                }
                Err(member.failed("reserve room in an object", "objects", error))
            }
        }
    }

    /// The serial in the mark of a new object: it is later than each that the file has. A count of
    /// those is not enough, since an earlier one may be gone; two of one serial could not be told
    /// apart when the layout is lost.
    pub(crate) fn next_serial(&self, layout: &Layout) -> u16 {
        let objects = layout.objects();
        let marked = objects.iter().filter_map(|object| {
            let fd = self.open_object(layout, *object, Access::Read).ok()?;
            match mark_of(&fd) {
                Ok(Mark::Sound(mark)) => Some(mark.part.serial.saturating_add(1)),
                _ => None,
            }
        });
        // Objects that are away do not tell theirs.
        let count = u16::try_from(objects.len()).unwrap_or(u16::MAX);
        marked.max().unwrap_or(0).max(count)
    }

    /// Delete an object that no layout names; if that fails, none ever will.
    pub(crate) fn forget(&self, file: FileIdentity, object: Object) {
        if let Some(member) = self.member(object.member) {
            let _ = member.remove_object(file, object.id);
        }
    }

    /// The bandwidth of devices, as far as it is known.
    pub(crate) fn loads(&self) -> &Loads {
        &self.loads
    }

    /// Members that take new bytes and whose devices work; with `class` only those of it.
    ///
    /// Returns  also the process's lack that kept it from a look at one
    fn rooms(
        &self,
        except: Option<MemberNumber>,
        class: Option<&Class>,
    ) -> (Vec<Room>, Option<PoolError>) {
        let mut lack = None;
        let members = self.members();
        let rooms = members
            .iter()
            .filter(|member| member.is_well() && may_take(member, except, class))
            .filter_map(|member| {
                let status = match member.look() {
                    Ok(status) => status,
                    Err(error) => {
                        if is_of_process(error.errno()) {
                            lack = Some(error);
                        }
                        return None;
                    }
                };
                let device = status
                    .device
                    .filter(|_| status.state == MemberState::Present)?;
                Some(Room {
                    member: member.number(),
                    device,
                    free: status.bytes_free,
                    unpromised: self.unpromised(device),
                })
            })
            .collect();
        (rooms, lack)
    }

    /// The same for those whose devices have failed: they may work again, and the pool asks them
    /// when no other one has taken the bytes.
    fn failing(&self, except: Option<MemberNumber>, class: Option<&Class>) -> Vec<MemberNumber> {
        self.members()
            .iter()
            .filter(|member| !member.is_well() && may_take(member, except, class))
            .map(|member| member.number())
            .collect()
    }

    /// Open an object that this layout names, and check that it is this file's.
    pub fn open_object(
        &self,
        layout: &Layout,
        object: Object,
        access: Access,
    ) -> Result<OwnedFd, PoolError> {
        self.known(object.member)?
            .open_object(layout.file, object.id, access)
    }

    /// A member that a layout names.
    pub(crate) fn known(&self, number: MemberNumber) -> Result<Arc<Member>, PoolError> {
        self.member(number)
            .ok_or_else(|| match self.is_lost(number) {
                true => PoolError::Lost { member: number },
                false => PoolError::Missing {
                    member: number,
                    path: self.catalogue.path().to_path_buf(),
                    why: String::from("does not know a member of this number"),
                },
            })
    }

    /// Members that were given up with their bytes, which layouts still name.
    pub(crate) fn lost(&self) -> BTreeSet<MemberNumber> {
        self.membership().format.lost.clone()
    }

    /// The file had bytes on one of them, perhaps.
    pub fn has_lost(&self, layout: &Layout) -> bool {
        let objects = layout.objects();
        objects.iter().any(|object| self.is_lost(object.member))
    }

    /// The member of this number was given up with its bytes.
    pub fn is_lost(&self, number: MemberNumber) -> bool {
        // Runs at each read and write: it changes no reference count.
        let now = self
            .membership
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        now.format.lost.contains(&number)
    }

    /// Truncate a file's objects: they have no byte at or behind `size` then, and segments that
    /// begin there are gone. The door sets the stub's size, afterwards.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    pub fn cut(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        size: ByteCount,
    ) -> Result<(), PoolError> {
        let mut next = layout.clone();
        next.cut(size);
        let failed = |error| PoolError::system("cut an object", "", error);
        // Open all of them first: if one is away, the others must not have lost their bytes.
        let mut opened = Vec::new();
        for (object, length) in next.lengths(size) {
            match self.open_object(layout, object, Access::Write) {
                Ok(fd) => opened.push((fd, length)),
                // It has none any more.
                Err(PoolError::Lost { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        for (fd, length) in opened {
            if fstat(&fd).map_err(failed)?.st_size as u64 > length {
                ftruncate(&fd, length).map_err(failed)?;
            }
        }
        self.shorten(stub, layout, next)
    }

    /// Write a layout that has lost segments, and then delete the objects that it does not name any
    /// more.
    pub(crate) fn shorten(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
        next: Layout,
    ) -> Result<(), PoolError> {
        if next == *layout {
            return Ok(());
        }
        let named = next.objects();
        let mut gone = layout.objects();
        gone.retain(|object| named.binary_search(object).is_err());
        self.set_layout(stub, &next)?;
        *layout = next;
        if !gone.is_empty() {
            fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
            for object in gone {
                self.forget(layout.file, object);
            }
        }
        Ok(())
    }

    /// All members together. Asks each of them.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        let mut devices = Vec::new();
        for member in self.members().iter() {
            let status = member.status();
            match status.device {
                None => usage.missing_count += 1,
                Some(device) if devices.contains(&device) => {}
                Some(device) => {
                    devices.push(device);
                    usage.bytes_total += status.bytes_total;
                    if status.state == MemberState::Present && member.takes_bytes() {
                        usage.bytes_free += status.bytes_free;
                    }
                }
            }
        }
        usage.device_count = devices.len();
        usage
    }

    /// Whether a member is there and can be written: objects that it kept for [`Pool::bury`] can be
    /// removed.
    pub fn can_bury_on(&self, member: MemberNumber) -> bool {
        let known = self.known(member);
        known.is_ok_and(|member| member.status().state == MemberState::Present)
    }

    /// Delete stubs from [`Catalogue::removed`] with their objects, unless `opens` says of a stub's
    /// native inode number that it is needed. A stub that still has a name in the tree only loses
    /// the one in that folder. For a door's start, and then now and then. No other thread makes or
    /// removes names while the guard that `links` returns is there.
    pub fn bury<Guard>(
        &self,
        opens: impl Opens,
        links: impl Fn() -> Guard,
    ) -> Result<Buried, PoolError> {
        let path = self.catalogue.path().join(REMOVED);
        let failed = |error: std::io::Error| {
            PoolError::system("remove what is in", path.display().to_string(), error)
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let inode = std::os::unix::fs::DirEntryExt::ino(&entry);
            if !opens.need(inode) {
                found.push((inode, entry.file_name()));
            }
        }
        let mut buried = Buried::default();
        if found.is_empty() {
            return Ok(buried);
        }
        // If an object went before its name, a power cut could bring the name back without it.
        self.catalogue.sync()?;
        let mut emptied = Vec::with_capacity(found.len());
        for (inode, name) in found {
            match self.remove_objects_of(&name, || opens.close_off(inode)) {
                Ok(Some((is_last, layout))) => emptied.push((inode, name, is_last, layout)),
                // The sync took seconds: a program may have opened it meanwhile.
                Ok(None) => buried.left_count += 1,
                Err(errors) => buried.kept.extend(errors),
            }
        }
        // And if the stub went before its objects, a power cut could bring those back, and nothing
        // would say that they were removed.
        let mut removed: BTreeMap<MemberNumber, BTreeSet<Object>> = BTreeMap::new();
        let layouts = emptied.iter().filter_map(|(.., layout)| layout.as_ref());
        for object in layouts.flat_map(Layout::objects) {
            removed.entry(object.member).or_default().insert(object);
        }
        removed.retain(|&number, objects| {
            let member = self.known(number);
            match member.and_then(|member| member.sync_removed(objects)) {
                Ok(()) | Err(PoolError::Lost { .. }) => false,
                Err(error) => {
                    buried.kept.push(error);
                    true
                }
            }
        });
        for (inode, name, is_last, layout) in emptied {
            let mut objects = layout.iter().flat_map(Layout::objects);
            if objects.any(|object| removed.contains_key(&object.member)) {
                continue;
            }
            let failed = |error| {
                let name = name.to_string_lossy().into_owned();
                PoolError::system("remove", name, error)
            };
            let folder = self.catalogue.removed();
            // Seconds may have gone since the look at it: a stub that a program has open by now, or
            // for which this has become the last name, is for the next time.
            let _links = links();
            let needed = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW)
                .map(|found| opens.is_open(inode) || !is_last && found.st_nlink == 1);
            let gone = opens.let_go(inode, || match needed {
                Ok(true) => Ok(false),
                Ok(false) => unlinkat(folder, &name, AtFlags::empty()).map(|()| true),
                Err(error) => Err(error),
            });
            let gone = gone.map_err(failed);
            match gone {
                Ok(false) => buried.left_count += 1,
                Ok(true) => {
                    buried.file_count += usize::from(is_last);
                    buried.files.extend(layout.map(|layout| layout.file));
                }
                Err(error) => buried.kept.push(error),
            }
        }
        Ok(buried)
    }

    /// Returns  whether it is the file's last name, and where its bytes were. None: it is open
    /// Errors   each member that keeps an object for now; or why no other was tried
    fn remove_objects_of(
        &self,
        name: &std::ffi::OsStr,
        close_off: impl FnOnce() -> bool,
    ) -> Result<Option<(bool, Option<Layout>)>, Vec<PoolError>> {
        let failed = |error: Errno| {
            let name = name.to_string_lossy().into_owned();
            vec![PoolError::system("remove", name, error)]
        };
        let folder = self.catalogue.removed();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let stub = openat(folder, name, flags, Mode::empty()).map_err(failed)?;
        let status = fstat(&stub).map_err(failed)?;
        let is_last = status.st_nlink == 1
            && FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
        if !is_last {
            return Ok(Some((false, None)));
        }
        if !close_off() {
            return Ok(None);
        }
        let layout = self.layout(stub.as_fd()).map_err(|error| vec![error])?;
        // If one member keeps an object for now, the others delete theirs all the same.
        let mut kept = Vec::new();
        for object in layout.iter().flat_map(Layout::objects) {
            let file = layout.as_ref().expect("it names objects").file;
            let member = self.known(object.member);
            match member.and_then(|member| member.remove_named(file, object.id)) {
                // It went before, with its member.
                Ok(()) | Err(PoolError::Lost { .. }) => {}
                Err(
                    error @ (PoolError::Missing { .. }
                    | PoolError::ReadOnly { .. }
                    | PoolError::Failing { .. }),
                ) => kept.push(error),
                // The layout may be wrong: other objects that it names may be another file's.
                Err(error) => {
                    kept.push(error);
                    return Err(kept);
                }
            }
        }
        match kept.is_empty() {
            true => Ok(Some((true, layout))),
            false => Err(kept),
        }
    }
}

/// Which removed files are still needed, by the inode numbers of their stubs. A function that says
/// which are open will do where no program opens any meanwhile.
pub trait Opens {
    /// It must not be buried now.
    fn need(&self, inode: u64) -> bool;
    /// A program has it open.
    fn is_open(&self, inode: u64) -> bool;
    /// Its objects go now: from now on no program can open it.
    ///
    /// Returns  false: a program has it open
    fn close_off(&self, inode: u64) -> bool;
    /// `last` deletes its stub, or leaves it. No thread finds the file half gone, nor a new file of
    /// the same number closed off.
    fn let_go<T>(&self, inode: u64, last: impl FnOnce() -> T) -> T;
}

impl<F: Fn(u64) -> bool> Opens for F {
    fn need(&self, inode: u64) -> bool {
        self(inode)
    }

    fn is_open(&self, inode: u64) -> bool {
        self(inode)
    }

    fn close_off(&self, inode: u64) -> bool {
        !self(inode)
    }

    fn let_go<T>(&self, _inode: u64, last: impl FnOnce() -> T) -> T {
        last()
    }
}

pub(crate) fn may_take(
    member: &Member,
    except: Option<MemberNumber>,
    class: Option<&Class>,
) -> bool {
    let is_of_class = class.is_none() || member.class() == class;
    member.takes_bytes() && Some(member.number()) != except && is_of_class
}

/// Where data begin at or behind `at`. None: there are none.
fn next_data(fd: &OwnedFd, at: u64) -> Result<Option<u64>, PoolError> {
    match next_run(fd, ByteRange::new(at, u64::MAX - at)) {
        Ok(run) => Ok(run.map(|run| run.start.0)),
        Err(error) => Err(PoolError::system("look for data in an object", "", error)),
    }
}

pub(crate) fn punch(fd: &OwnedFd, range: ByteRange) -> Result<(), Errno> {
    let size = fstat(fd)?.st_size as u64;
    let end = range.end().min(size);
    if range.start.0 >= end {
        return Ok(());
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, range.start.0, end - range.start.0)
}

/// Reserve blocks for bytes that have none. Where the file system reserves nothing, zeroes take the
/// first block: a writer that goes on elsewhere because of "full" then always gets a block further,
/// and does not loop.
fn reserve(fd: &OwnedFd, room: ByteRange) -> Result<(), Errno> {
    match fallocate(fd, FallocateFlags::KEEP_SIZE, room.start.0, room.length.0) {
        Err(Errno::OPNOTSUPP) => {
            let zeroes = [0; BLOCK_BYTES as usize];
            let count = room.length.0.min(BLOCK_BYTES) as usize;
            rustix::io::pwrite(fd, &zeroes[..count], room.start.0).map(drop)
        }
        reserved => reserved,
    }
}
