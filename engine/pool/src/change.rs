// SPDX-License-Identifier: Apache-2.0
//! Members of a pool: add, drain and remove them. [`drain`] needs a pool without a door; a door
//! that has it moves files by [`crate::Move`], and passes itself as [`Users`].
//!
//! Each step is durable before the next one, and a repeated command finishes one that was
//! interrupted. A file's bytes move as in a spill: copied and fsynced, then the layout, then that
//! made durable, then the old object goes. So at every instant a layout leads to all its bytes.

use crate::create::{Folder, MEMBER_COUNT_MAX, OBJECTS, all_apart, member_format};
use crate::data::data_ranges;
use crate::error::{PoolError, is_full};
use crate::failed::Failed;
use crate::format::{
    self, CatalogueFormat, Duty, FORMAT_FILE, Format, MemberEntry, MemberFormat, MemberId,
};
use crate::hole::vacate;
use crate::kept::{in_front, keep, length_of};
use crate::member::{Access, Member, MemberState, NAMES, mark_of, random};
use crate::names::{checkpoint_now, newest_log};
use crate::others;
use crate::pool::{Pool, punch};
use crate::refusal::{AddRefusal, MemberRefusal, Role, refused};
use crate::refused::Refused;
use crate::walk::{each_stub, each_stub_below};
use crate::wishes::{change_classes, lacks_any};
use rushes_core::pool::check::{Mark, part_of};
use rushes_core::pool::{Class, Layout, MemberNumber, Object, Part, Shape};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rustix::fs::{AtFlags, Mode, OFlags, fsync, openat, renameat, unlinkat};
use rustix::io::{Errno, pread, pwrite};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The catalogue's format file with the future members.
const PLAN: &str = "rushes-pool.adding";
/// A range no longer than this is not cut any more when no member has room for it. Units: bytes.
const PART_BYTES: u64 = 1 << 20;
/// Copied at a time. Units: bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// The users of a pool while its members change: a door, or [`Nobody`].
pub trait Users {
    /// Bury removed files that no program has open.
    fn bury(&self, pool: &Pool) -> Result<(), PoolError>;
    /// Put a log of names on members that take bytes now.
    fn log_names(&self, pool: &Pool) -> Result<(), PoolError>;
    /// True: files come, go and get other names meanwhile.
    fn are_there(&self) -> bool;
}

/// No door has the pool.
#[derive(Clone, Copy, Debug)]
pub struct Nobody;

impl Users for Nobody {
    fn bury(&self, pool: &Pool) -> Result<(), PoolError> {
        pool.bury(|_| false, || ()).map(|_| ())
    }

    fn log_names(&self, pool: &Pool) -> Result<(), PoolError> {
        checkpoint_now(pool)
    }

    fn are_there(&self) -> bool {
        false
    }
}

/// The progress of a drain, a rebalance or a defrag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    /// Files that were looked at.
    pub file_count: u64,
    /// Files of which bytes were moved.
    pub moved_count: u64,
    /// Units: bytes.
    pub moved_bytes: u64,
}

/// Add folders as further members. The same command again finishes one that was interrupted.
///
/// `class`  of all of them; None: of none
/// Returns  their numbers
/// Errors   [`PoolError::Refused`] names the folder and its fault; then nothing was changed
pub fn add(
    pool: &Pool,
    members: &[PathBuf],
    class: Option<&Class>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<MemberNumber>, PoolError> {
    let catalogue = Folder::enter(Role::Catalogue, pool.catalogue().path())?;
    let mut folders = Vec::with_capacity(members.len());
    for path in members {
        folders.push(Folder::enter(Role::NewMember, path)?);
    }
    let mut others = Vec::new();
    for member in pool.members().iter() {
        let is_there = !matches!(member.status().state, MemberState::Missing(_));
        let is_given = folders.iter().any(|folder| folder.path == member.path());
        if is_there && !is_given {
            others.push(Folder::enter(Role::Member(member.number()), member.path())?);
        }
    }
    let given = folders.len();
    folders.extend(others);
    all_apart(&catalogue, &folders)?;
    folders.truncate(given);
    for folder in [&catalogue].into_iter().chain(&folders) {
        folder.lock()?;
    }
    let plan = match format::read(catalogue.fd.as_fd(), PLAN) {
        // A command that was killed after its last step is repeated all the same.
        Ok(None) if let Some(numbers) = all_are_in(pool, &folders) => {
            if let Some(class) = class {
                let classes = numbers.iter().map(|number| (*number, Some(class.clone())));
                change_classes(pool, classes.collect())?;
            }
            return Ok(numbers);
        }
        Ok(None) => None,
        Ok(Some(Format::Catalogue(plan))) if plan.pool == pool.id() => Some(plan),
        _ => {
            return refused(AddRefusal::Plan {
                plan: catalogue.path.join(PLAN),
            });
        }
    };
    if let Some(plan) = &plan {
        let planned = plan.members.iter().skip(pool.members().len());
        let planned: Vec<&Path> = planned.map(|entry| entry.path.as_path()).collect();
        if !planned
            .iter()
            .copied()
            .eq(folders.iter().map(|folder| folder.path.as_path()))
        {
            return refused(AddRefusal::OtherMembers {
                members: planned.into_iter().map(Path::to_path_buf).collect(),
                plan: catalogue.path.join(PLAN),
            });
        }
    }
    if plan.is_none() {
        // A member's disk is away, and another folder is at its place: the pool would look for both
        // there.
        let known = pool.members();
        let taken = folders.iter().find_map(|folder| {
            // A member that is there is refused below, by its format file.
            let mut members = known.iter().filter(|_| folder.format.is_none());
            let one = members.find(|one| one.path() == folder.path)?;
            Some((folder.path.clone(), one.number()))
        });
        if let Some((path, number)) = taken {
            return refused(AddRefusal::TakenPlace { path, number });
        }
    }
    for folder in &folders {
        if let Some(Format::Member(of)) = &folder.format
            && of.pool == pool.id()
            && pool.is_lost(of.number)
        {
            return refused(AddRefusal::GivenUp {
                path: folder.path.clone(),
                number: of.number,
            });
        }
        let known = pool.members();
        let displaced = |of: &MemberFormat| {
            let of_it = |one: &&Arc<Member>| one.number() == of.number && one.path() != folder.path;
            let member = known.iter().find(of_it).filter(|_| of.pool == pool.id());
            member.map(|member| member.path().to_path_buf())
        };
        if let Some(Format::Member(of)) = &folder.format
            && let Some(place) = displaced(of)
        {
            return refused(AddRefusal::Displaced {
                path: folder.path.clone(),
                number: of.number,
                place,
            });
        }
        let entries = plan.iter().flat_map(|plan| &plan.members);
        let entry = entries.clone().find(|entry| entry.path == folder.path);
        folder.check_free(plan.as_ref(), entry)?;
        folder.probe_records()?;
    }
    let plan = match plan {
        Some(plan) => plan,
        None => {
            for folder in &folders {
                folder.check_in_no_pool()?;
            }
            let plan = planned(&pool.format(), &folders, class)?;
            let format = Format::Catalogue(plan.clone());
            format::write(catalogue.fd.as_fd(), &catalogue.path, PLAN, &format)?;
            plan
        }
    };
    let is_of_another = |entry: &&MemberEntry| {
        class.is_some()
            && entry.class.as_ref() != class
            && folders.iter().any(|folder| folder.path == entry.path)
    };
    if let Some(entry) = plan.members.iter().find(is_of_another) {
        return refused(AddRefusal::OtherClass {
            path: entry.path.clone(),
            class: entry.class.clone(),
        });
    }
    let mut numbers = Vec::new();
    for (at, folder) in folders.iter().enumerate() {
        let entry = plan.members.iter().find(|entry| entry.path == folder.path);
        let entry = entry.expect("the plan has every folder that is given");
        folder.furnish_member(&plan, entry)?;
        numbers.push(entry.number);
        progress(at + 1, folders.len());
    }
    catalogue.failed(
        "take in the members",
        renameat(&catalogue.fd, PLAN, &catalogue.fd, FORMAT_FILE)
            .and_then(|()| fsync(&catalogue.fd)),
    )?;
    pool.adopt(plan);
    Ok(numbers)
}

/// The numbers of folders that are all members of this pool already.
fn all_are_in(pool: &Pool, folders: &[Folder]) -> Option<Vec<MemberNumber>> {
    let now = pool.format();
    let number = |folder: &Folder| {
        let entry = now.members.iter().find(|one| one.path == folder.path)?;
        let own = Format::Member(member_format(&now, entry));
        (folder.format.as_ref() == Some(&own)).then_some(entry.number)
    };
    folders.iter().map(number).collect()
}

fn planned(
    now: &CatalogueFormat,
    folders: &[Folder],
    class: Option<&Class>,
) -> Result<CatalogueFormat, PoolError> {
    let mut plan = now.clone();
    for folder in folders {
        if plan.members.len() >= MEMBER_COUNT_MAX {
            return refused(AddRefusal::TooMany);
        }
        let Ok(number) = u16::try_from(plan.members_given) else {
            return refused(AddRefusal::NoNumber);
        };
        let id = u128::from(random()?) << 64 | u128::from(random()?);
        let path = folder.path.clone();
        let mut entry = MemberEntry::new(MemberNumber(number), MemberId(id), path);
        entry.class = class.cloned();
        plan.members.push(entry);
        plan.members_given += 1;
    }
    Ok(plan)
}

/// An interrupted add waits for its repetition.
pub fn is_add_interrupted(pool: &Pool) -> bool {
    pool.catalogue().path().join(PLAN).exists()
}

/// The format file with this duty of a member.
fn with_duty(pool: &Pool, number: MemberNumber, duty: Duty) -> CatalogueFormat {
    let mut format = pool.format();
    for entry in &mut format.members {
        if entry.number == number {
            entry.duty = duty;
        }
    }
    format
}

/// Set, durably, a member's duty.
fn set_duty(pool: &Pool, number: MemberNumber, duty: Duty) -> Result<(), PoolError> {
    let format = with_duty(pool, number, duty);
    write(pool, &format)?;
    pool.adopt(format);
    Ok(())
}

pub(crate) fn write(pool: &Pool, format: &CatalogueFormat) -> Result<(), PoolError> {
    let catalogue = pool.catalogue();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(catalogue.path(), flags, Mode::empty()).map_err(|error| {
        PoolError::system("open", catalogue.path().display().to_string(), error)
    })?;
    no_add_waits(pool)?;
    let format = Format::Catalogue(format.clone());
    format::write(root.as_fd(), catalogue.path(), FORMAT_FILE, &format)
}

/// Refuse if an add was interrupted: its last step would undo the caller's write.
fn no_add_waits(pool: &Pool) -> Result<(), PoolError> {
    if !is_add_interrupted(pool) {
        return Ok(());
    }
    refused(AddRefusal::Interrupted {
        plan: pool.catalogue().path().join(PLAN),
    })
}

/// Set, durably, that a member takes no new bytes, or does again.
///
/// Errors   nothing was changed then; [`PoolError::Missing`]: it cannot be drained, since its bytes
///          cannot be read; [`PoolError::Refused`]: no other member would take its bytes
pub fn set_draining(pool: &Pool, number: MemberNumber, draining: bool) -> Result<(), PoolError> {
    let duty = if draining { Duty::Draining } else { Duty::Full };
    let Some(member) = pool.member(number) else {
        let members = pool.members();
        let known = members.iter().map(|one| one.number()).collect();
        return refused(MemberRefusal::Unknown { number, known });
    };
    if draining {
        member.check_there()?;
    }
    match member.duty() {
        Duty::Leaving => refused(MemberRefusal::Leaving { number }),
        now => {
            let is_new = now != duty;
            if is_new {
                no_add_waits(pool)?;
            }
            // Also for a drain that began before: it would try each of the files in vain.
            if draining {
                others::check_takes_bytes_beside(pool, number)?;
            }
            match is_new {
                true => set_duty(pool, number, duty),
                false => Ok(()),
            }
        }
    }
}

/// Move all bytes of a member to others. Moved bytes stay moved if it is interrupted; the same
/// command again goes on. It skips a file that it cannot move: the result lists it with the reason,
/// also where no member has room for it.
///
/// Assumes  the member is draining, by [`set_draining`], and no door uses the pool
/// Errors   [`PoolError::Missing`]; those of the walk through the tree
pub fn drain(
    pool: &Pool,
    number: MemberNumber,
    mut progress: impl FnMut(Drained),
) -> Result<(Drained, Failed), PoolError> {
    let member = pool.known(number)?;
    assert!(
        !member.takes_bytes(),
        "it would be filled while it is emptied"
    );
    member.check_there()?;
    pool.bury(|_| false, || ())?;
    let mut drained = Drained::default();
    let mut failed = Failed::default();
    each_stub_below(
        pool.catalogue(),
        Path::new(""),
        &mut BTreeSet::new(),
        |path, stub| {
            drained.file_count += 1;
            match stub.and_then(|stub| file_off(pool, &stub, number)) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    drained.moved_count += 1;
                    drained.moved_bytes += bytes;
                }
                Err(error) => failed.note(path, &error),
            }
            progress(drained);
            Ok(())
        },
    )?;
    // Layouts have changed without a door that writes that into the log of names.
    names_follow(pool, number, &Nobody)?;
    Ok((drained, failed))
}

/// Returns  how many bytes were copied; None: it has nothing there
fn file_off(pool: &Pool, stub: &OwnedFd, number: MemberNumber) -> Result<Option<u64>, PoolError> {
    let Some(mut layout) = pool.layout(stub.as_fd())? else {
        return Ok(None);
    };
    let is_there = layout.objects().iter().any(|one| one.member == number);
    is_there
        .then(|| move_off(pool, stub.as_fd(), &mut layout, number))
        .transpose()
}

/// Put the moves off a member into the log of names, and that on others.
pub fn names_follow(
    pool: &Pool,
    number: MemberNumber,
    users: &impl Users,
) -> Result<(), PoolError> {
    users.log_names(pool).map_err(|error| {
        MemberRefusal::LogAfterDrain(others::why_no_log(pool, number, &error)).into()
    })
}

/// An error with a file, by its name.
fn about(path: &Path, error: PoolError) -> PoolError {
    MemberRefusal::File {
        path: path.to_path_buf(),
        trouble: Box::new(error),
    }
    .into()
}

/// Returns  how many bytes were copied
fn move_off(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    number: MemberNumber,
) -> Result<u64, PoolError> {
    let mut moved = 0;
    loop {
        let found = layout.segments().iter().enumerate().find_map(|(at, one)| {
            let place = one.objects.iter().position(|one| one.member == number)?;
            Some((at, one, place))
        });
        let Some((at, segment, place)) = found else {
            return Ok(moved);
        };
        let (range, object) = (layout.range_of(at), segment.objects[place]);
        let source = match pool.open_object(layout, object, Access::Write) {
            // A failing disk is often read-only by then: its bytes can still be read.
            Err(PoolError::ReadOnly { .. }) => pool.open_object(layout, object, Access::Read),
            opened => opened,
        }?;
        let failed = |error| PoolError::system("look for data in an object", "", error);
        let data = data_ranges(&source).map_err(failed)?;
        if segment.shape != Shape::Single {
            moved += move_whole(pool, stub, layout, (object, &source), &data)?;
            continue;
        }
        let data = within(&data, range);
        moved += move_range(pool, stub, layout, (object, &source), range, &data)?;
    }
}

pub(crate) fn within(data: &[ByteRange], range: ByteRange) -> Vec<ByteRange> {
    let parts = data.iter().map(|one| {
        let start = one.start.0.max(range.start.0);
        let end = one.end().min(range.end());
        ByteRange::new(start, end.saturating_sub(start))
    });
    parts.filter(|part| part.length.0 > 0).collect()
}

pub(crate) fn sum(data: &[ByteRange]) -> u64 {
    data.iter().map(|part| part.length.0).sum()
}

/// Move an object of a stripe to one member, which takes its place. If a member with room has no
/// object of the file yet, to that one.
pub(crate) fn move_whole(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    (object, source): (Object, &OwnedFd),
    data: &[ByteRange],
) -> Result<u64, PoolError> {
    let failed = |error| PoolError::system("look at a file", "", error);
    let length = layout.lengths(length_of(stub).map_err(failed)?);
    let length = length.get(&object).copied().unwrap_or(0);
    let need = sum(data);
    let part = mark_of(source).map_err(|error| PoolError::system("read a mark", "", error))?;
    let part = match part {
        Mark::Sound(mark) => mark.part,
        _ => part_of(layout, object),
    };
    let taken: BTreeSet<MemberNumber> = layout.objects().iter().map(|one| one.member).collect();
    let mut asked = candidates(pool, stub, object.member, ByteCount(need));
    asked.sort_by_key(|number| taken.contains(number));
    for number in asked {
        let (target, fd) = match pool.known(number)?.create_object(layout.file, part, true) {
            Ok(made) => made,
            Err(error) if Refused::is_of_member(&error) => continue,
            Err(error) => return Err(error),
        };
        let copied = keep(source, &fd, ByteRange::new(0, length))
            .and_then(|()| data.iter().try_for_each(|part| copy(source, &fd, *part)))
            .and_then(|()| fsync(&fd));
        let mut next = layout.clone();
        next.replace(object, target);
        let moved = match copied {
            Ok(()) => pool.set_layout(stub, &next),
            Err(error) => Err(PoolError::system("move bytes between members", "", error)),
        };
        if let Err(error) = moved {
            let _ = pool.known(number)?.remove_object(layout.file, target.id);
            if error.is_full() {
                continue;
            }
            return Err(error);
        }
        fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
        *layout = next;
        if let Some(member) = pool.member(object.member) {
            let _ = member.remove_object(layout.file, object.id);
        }
        return Ok(need);
    }
    Err(no_room(pool, stub, object.member))
}

/// Move the whole range to one member, or in halves to several.
fn move_range(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    (object, source): (Object, &OwnedFd),
    range: ByteRange,
    data: &[ByteRange],
) -> Result<u64, PoolError> {
    let need = sum(data);
    for number in candidates(pool, stub, object.member, ByteCount(need)) {
        if take(pool, stub, layout, (object, source), number, range, data)? {
            return Ok(need);
        }
    }
    let (Some(first), Some(last)) = (data.first(), data.last()) else {
        return Err(no_room(pool, stub, object.member));
    };
    let (start, end) = (first.start.0, last.end());
    if end - start <= PART_BYTES {
        return Err(no_room(pool, stub, object.member));
    }
    let middle = start
        + ((end - start) / 2)
            .next_multiple_of(PART_BYTES)
            .min(end - start - 1);
    let first = ByteRange::new(range.start.0, middle - range.start.0);
    let second = ByteRange::new(middle, range.end() - middle);
    let mut moved = 0;
    for part in [first, second] {
        moved += move_range(
            pool,
            stub,
            layout,
            (object, source),
            part,
            &within(data, part),
        )?;
    }
    Ok(moved)
}

/// Why no member took bytes that are to leave one.
pub(crate) fn no_room(pool: &Pool, stub: BorrowedFd<'_>, except: MemberNumber) -> PoolError {
    let class = pool.wish_of(stub).class;
    let members = pool.members();
    let is_of_it =
        |member: &Arc<Member>| member.class() == class.as_ref() && member.number() != except;
    match class.clone() {
        Some(class) if !members.iter().any(|one| one.takes_bytes() && is_of_it(one)) => {
            MemberRefusal::Bound { class }.into()
        }
        Some(class) => PoolError::ClassFull { class },
        None => PoolError::NoRoom,
    }
}

/// Members that have room for so much of this file, the best first.
pub(crate) fn candidates(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    except: MemberNumber,
    wanted: ByteCount,
) -> Vec<MemberNumber> {
    let (_, rooms, members) = pool.candidates(stub, Some(except), wanted);
    members
        .into_iter()
        .filter(|number| {
            let room = rooms.iter().find(|room| room.member == *number);
            room.is_some_and(|room| room.free >= wanted)
        })
        .collect()
}

/// Returns  false when the member has no room for it after all
pub(crate) fn take(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    (object, source): (Object, &OwnedFd),
    number: MemberNumber,
    range: ByteRange,
    data: &[ByteRange],
) -> Result<bool, PoolError> {
    let member = pool.known(number)?;
    let mine = layout.single_on(number, ByteOffset(0));
    let (target, fd) = match mine {
        Some(target) => (target, pool.open_object(layout, target, Access::Write)?),
        None => {
            let serial = pool.next_serial(layout);
            match member.create_object(layout.file, Part::single(serial), true) {
                Ok(made) => made,
                Err(error) if Refused::is_of_member(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    };
    // An object that was there before may have outdated bytes in the range.
    let copied = punch(&fd, range)
        .and_then(|()| keep(source, &fd, in_front(range, length_of(stub)?)))
        .and_then(|()| data.iter().try_for_each(|part| copy(source, &fd, *part)))
        .and_then(|()| fsync(&fd));
    let undo = || match mine {
        Some(_) => drop(vacate(&fd, layout, target, range)),
        None => drop(member.remove_object(layout.file, target.id)),
    };
    if let Err(error) = copied {
        undo();
        return match error {
            error if is_full(error) => Ok(false),
            error => Err(PoolError::system("move bytes between members", "", error)),
        };
    }
    let mut next = layout.clone();
    next.assign(range, ByteOffset(0), target);
    if let Err(error) = pool.set_layout(stub, &next) {
        undo();
        return Err(error);
    }
    fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
    *layout = next;
    // Free room for others; if it fails, only the room is not regained, and fsck frees it.
    if layout.objects().contains(&object) {
        let _ = vacate(source, layout, object, range);
    } else if let Some(member) = pool.member(object.member) {
        let _ = member.remove_object(layout.file, object.id);
    }
    Ok(true)
}

fn copy(from: &OwnedFd, to: &OwnedFd, range: ByteRange) -> Result<(), Errno> {
    let mut buffer = vec![0; CHUNK_BYTES.min(range.length.0 as usize)];
    let mut at = range.start.0;
    while at < range.end() {
        let length = (range.end() - at).min(buffer.len() as u64) as usize;
        let count = pread(from, &mut buffer[..length], at)?;
        if count == 0 {
            break;
        }
        let mut written = 0;
        while written < count {
            written += pwrite(to, &buffer[written..count], at + written as u64)?;
        }
        at += count as u64;
    }
    Ok(())
}

/// Files and objects left on a member that is to be removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    /// Files whose layouts name it.
    file_count: u64,
    /// Objects on it, named or not.
    object_count: u64,
}

/// Which members may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// One that has no bytes.
    Empty,
    /// One that is missing, with its bytes: its disk does not come back.
    Lost,
}

impl Parting {
    /// As a command says it.
    pub fn of(is_lost: bool) -> Parting {
        if is_lost {
            Parting::Lost
        } else {
            Parting::Empty
        }
    }
}

/// Remove a member. The same command again finishes one that was interrupted. One that is missing
/// may go as [`Parting::Empty`], too, if no file is on it. Layouts go on naming one that goes as
/// [`Parting::Lost`]: a read of these bytes gets [`PoolError::Lost`], and all other bytes of such
/// files can be read.
///
/// Errors   [`PoolError::Refused`]: it has bytes, or is the last one that takes some; then no byte
///          was moved. While files are in use one that is missing cannot go as
///          [`Parting::Empty`], and one that is there never goes as [`Parting::Lost`]
pub fn remove(
    pool: &Pool,
    number: MemberNumber,
    parting: Parting,
    users: &impl Users,
) -> Result<(), PoolError> {
    let given = pool.format().members_given;
    let Some(member) = pool.member(number) else {
        return if u32::from(number.0) < given {
            // The first try may have been killed before it wrote the log of names.
            if !users.are_there() {
                let _ = users.log_names(pool);
            }
            Ok(())
        } else {
            let known = pool.members().iter().map(|one| one.number()).collect();
            refused(MemberRefusal::Unknown { number, known })
        };
    };
    if parting == Parting::Lost {
        return give_up(pool, &member, users);
    }
    if member.duty() != Duty::Leaving {
        others::check_takes_bytes_without(pool, &member)?;
        let now = pool.format();
        let mut without = now.clone();
        without.members.retain(|entry| entry.number != number);
        if lacks_any(&now).is_none()
            && let Some(lacked) = lacks_any(&without)
        {
            return refused(MemberRefusal::Lacks { number, lacked });
        }
        // No bytes get there during the search.
        pool.adopt(with_duty(pool, number, Duty::Draining));
        let leaves =
            refuse_used(pool, &member, users).and_then(|()| set_duty(pool, number, Duty::Leaving));
        if let Err(error) = leaves {
            pool.adopt(now);
            return Err(error);
        }
    }
    // From here on it takes no log of names. It may have the only one.
    if let Err(error) = users.log_names(pool)
        && newest_log(pool).is_none_or(|(_, members)| members.iter().all(|one| *one == number))
    {
        return log_must_stay(pool, number, &error);
    }
    if !matches!(member.status().state, MemberState::Missing(_)) {
        clear(&member)?;
    }
    let mut format = pool.format();
    format.members.retain(|entry| entry.number != number);
    write(pool, &format)?;
    pool.adopt(format);
    // So that the log knows which members are left. Without it the one before is there; the next
    // mount writes another.
    let _ = users.log_names(pool);
    Ok(())
}

fn log_must_stay(pool: &Pool, number: MemberNumber, error: &PoolError) -> Result<(), PoolError> {
    refused(MemberRefusal::OnlyLog(others::why_no_log(
        pool, number, error,
    )))
}

/// Remove a member with all its bytes, in one step. This waits for no thread that may hang in its
/// disk: a thread that makes an object there, or looks at one, at this moment gets the error that
/// it is lost, or its new object is as lost as all others.
fn give_up(pool: &Pool, member: &Member, users: &impl Users) -> Result<(), PoolError> {
    let number = member.number();
    if !member.is_away() {
        return refused(MemberRefusal::IsThere {
            number,
            path: member.path().to_path_buf(),
        });
    }
    others::check_takes_bytes_without(pool, member)?;
    // It may have the only log of names.
    if newest_log(pool).is_none()
        && let Err(error) = users.log_names(pool)
    {
        return log_must_stay(pool, number, &error);
    }
    let mut format = pool.format();
    format.members.retain(|entry| entry.number != number);
    format.lost.insert(number);
    write(pool, &format)?;
    pool.adopt_at_once(format);
    if !users.are_there() {
        let _ = users.log_names(pool);
    }
    Ok(())
}

/// Refuse if a file has bytes on a member.
fn refuse_used(pool: &Pool, member: &Member, users: &impl Users) -> Result<(), PoolError> {
    let number = member.number();
    if users.are_there() && matches!(member.status().state, MemberState::Missing(_)) {
        return refused(MemberRefusal::MissingInUse { number });
    }
    let left = left(pool, member, users)?;
    if left.file_count > 0 {
        return refused(MemberRefusal::HasFiles {
            number,
            count: left.file_count,
        });
    }
    if left.object_count > 0 {
        return refused(MemberRefusal::HasObjects {
            number,
            count: left.object_count,
        });
    }
    Ok(())
}

/// Count the files and objects on a member.
fn left(pool: &Pool, member: &Member, users: &impl Users) -> Result<Left, PoolError> {
    let mut left = Left::default();
    users.bury(pool)?;
    let mut count = |path: &Path, stub: BorrowedFd<'_>| {
        // A layout that cannot be read may name it.
        let layout = pool.layout(stub).map_err(|error| about(path, error))?;
        let objects = layout.map(|layout| layout.objects()).unwrap_or_default();
        let is_on_it = objects
            .iter()
            .any(|object| object.member == member.number());
        left.file_count += u64::from(is_on_it);
        Ok::<(), PoolError>(())
    };
    each_stub(pool.catalogue(), &mut BTreeSet::new(), |named, stub| {
        count(named.path, stub.as_fd())
    })?;
    let removed = pool.catalogue().path().join(crate::catalogue::REMOVED);
    let failed = |error| PoolError::system("list", removed.display().to_string(), error);
    for entry in std::fs::read_dir(&removed).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        match std::fs::File::open(&path) {
            Ok(stub) => count(&path, stub.as_fd())?,
            // Buried meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    if !matches!(member.status().state, MemberState::Missing(_)) {
        left.object_count = member.object_count()?;
    }
    Ok(left)
}

/// Make a member's folder a plain one again. A folder in it that is not empty stays: it is none of
/// ours.
fn clear(member: &Member) -> Result<(), PoolError> {
    let failed = |error| PoolError::system("clear", member.path().display().to_string(), error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(member.path(), flags, Mode::empty()).map_err(failed)?;
    let folder = |name: &str, flag: AtFlags| match unlinkat(&root, name, flag) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
        Err(error) => Err(failed(error)),
    };
    for at in 0..=u8::MAX {
        folder(&format!("{OBJECTS}/{at:02x}"), AtFlags::REMOVEDIR)?;
    }
    folder(OBJECTS, AtFlags::REMOVEDIR)?;
    if let Ok(names) = openat(&root, NAMES, flags, Mode::empty()) {
        for entry in rustix::fs::Dir::read_from(&names)
            .map_err(failed)?
            .flatten()
        {
            let name: &OsStr =
                std::os::unix::ffi::OsStrExt::from_bytes(entry.file_name().to_bytes());
            let is_ours = [".log", ".new"]
                .iter()
                .any(|end| name.to_string_lossy().ends_with(end));
            if is_ours {
                unlinkat(&names, name, AtFlags::empty()).map_err(failed)?;
            }
        }
    }
    folder(NAMES, AtFlags::REMOVEDIR)?;
    // Last: without it the folder is no member, and no repetition comes here.
    folder(FORMAT_FILE, AtFlags::empty())?;
    fsync(&root).map_err(failed)
}
