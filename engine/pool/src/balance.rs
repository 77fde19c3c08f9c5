// SPDX-License-Identifier: Apache-2.0
//! Moves whole files so that members are equally full, and stripes to as many members as they may
//! have. [`rebalance`] needs a pool without a door; a door moves files by [`crate::Move`].
//!
//! core/pool/balance says which bytes go where; they move as in a drain. A stripe has as many bytes
//! on one member as on the other: it only becomes wider.

use crate::change::{Drained, sum, take, within};
use crate::data::data_ranges;
use crate::error::PoolError;
use crate::failed::Failed;
use crate::format::Duty;
use crate::kept::{held, in_front, length_of};
use crate::member::{Access, MemberState};
use crate::names::checkpoint_now;
use crate::online::{Move, each_file_in};
use crate::pool::Pool;
use crate::refusal::WorkRefusal;
use crate::walk::each_stub;
use rushes_core::pool::balance::{Fill, Stay, fuller, lighter, whole_permille};
use rushes_core::pool::{Layout, MemberNumber, Object, Shape};
use rushes_core::units::{ByteCount, ByteRange};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

/// Moved at a time of a file that no program has open. Units: bytes.
const STEP: ByteCount = ByteCount::from_mib(16);

/// Move files from members that are fuller than all of them together to emptier ones. Moved bytes
/// stay moved if it is interrupted; the same command again goes on. It skips a file that it cannot
/// read or move.
pub fn rebalance(
    pool: &Pool,
    progress: impl FnMut(Drained),
) -> Result<(Drained, Failed), PoolError> {
    each_with_record(pool, &[], progress, |stub, layout, copied| {
        spread(pool, stub, layout, copied)?;
        let wider = Move::widening(pool, stub, layout);
        all_of(pool, stub, layout, wider, copied)
    })
}

/// Call `act` for each file that has a layout, of these paths or of the whole pool; it may move
/// bytes. No door uses the pool meanwhile.
///
/// `act`    gets stub and layout, which it keeps equal to the stub's; it adds up the bytes that it
///          copies
/// Errors   the pool's; a file's own is noted
pub(crate) fn each_with_record(
    pool: &Pool,
    paths: &[PathBuf],
    mut progress: impl FnMut(Drained),
    mut act: impl FnMut(BorrowedFd<'_>, &mut Layout, &mut u64) -> Result<(), PoolError>,
) -> Result<(Drained, Failed), PoolError> {
    pool.bury(|_| false, || ())?;
    let mut done = Drained::default();
    let mut failed = Failed::default();
    each_file_in(pool, paths, |path, stub| {
        done.file_count += 1;
        let mut one = |stub: BorrowedFd<'_>| {
            let Some(mut layout) = pool.layout(stub)? else {
                return Ok(());
            };
            // Only the operator can mend it, and was told.
            if pool.has_lost(&layout) {
                return Ok(());
            }
            pool.check_objects(&layout)?;
            let (was, mut copied) = (layout.clone(), 0);
            let acted = act(stub, &mut layout, &mut copied);
            done.moved_count += u64::from(layout != was);
            done.moved_bytes += copied;
            acted
        };
        if let Err(error) = stub.and_then(|stub| one(stub.as_fd())) {
            failed.note(path, &error);
        }
        progress(done);
        Ok(())
    })?;
    // Layouts have changed without a door that writes that into the log of names.
    if done.moved_count > 0 {
        checkpoint_now(pool).map_err(|error| WorkRefusal::LogUnwritten {
            trouble: Box::new(error),
        })?;
    }
    Ok((done, failed))
}

/// Make all these moves of a file that no program has open.
///
/// `copied`  grows by the bytes that were moved
pub(crate) fn all_of(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    moves: impl IntoIterator<Item = Move>,
    copied: &mut u64,
) -> Result<(), PoolError> {
    for mut one in moves {
        while let Some(moved) = one.take_step(pool, stub, layout, STEP)? {
            *copied += moved.copied;
        }
    }
    Ok(())
}

fn spread(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    copied: &mut u64,
) -> Result<(), PoolError> {
    let mut seen: BTreeSet<Object> = BTreeSet::new();
    loop {
        let next = layout.segments().iter().enumerate().find_map(|(at, one)| {
            let object = one.objects[0];
            let is_new = one.shape == Shape::Single && !seen.contains(&object);
            is_new.then(|| (layout.range_of(at), object))
        });
        let Some((range, object)) = next else {
            return Ok(());
        };
        seen.insert(object);
        let Some((target, bytes)) = move_one(pool, stub, layout, range, object)? else {
            continue;
        };
        seen.extend(layout.objects().iter().filter(|one| one.member == target));
        *copied += bytes;
    }
}

fn move_one(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &mut Layout,
    range: ByteRange,
    object: Object,
) -> Result<Option<(MemberNumber, u64)>, PoolError> {
    // A member that is read-only: nothing to move.
    let Ok(source) = pool.open_object(layout, object, Access::Write) else {
        return Ok(None);
    };
    let failed = |error| PoolError::system("look for data in an object", "", error);
    let data = within(&data_ranges(&source).map_err(failed)?, range);
    let bytes = sum(&data);
    let length = length_of(stub).map_err(failed)?;
    let wanted = held(&source, in_front(range, length)).map_err(failed)?;
    let Ok(target) = target_of(pool, stub, object, wanted.max(bytes)) else {
        return Ok(None);
    };
    let is_moved = take(pool, stub, layout, (object, &source), target, range, &data)?;
    Ok(is_moved.then_some((target, bytes)))
}

/// The member to which these bytes of an object go, if to another one.
pub(crate) fn target_of(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    object: Object,
    bytes: u64,
) -> Result<MemberNumber, Stay> {
    let (_, rooms, _) = pool.candidates(stub, Some(object.member), ByteCount(bytes));
    let of = |number: MemberNumber| {
        number == object.member || rooms.iter().any(|room| room.member == number)
    };
    lighter(&fills(pool, of), object.member, bytes)
}

/// How full members are that can be written to.
fn fills(pool: &Pool, of: impl Fn(MemberNumber) -> bool) -> Vec<Fill> {
    pool.members()
        .iter()
        .filter(|member| of(member.number()))
        .filter_map(|member| {
            let status = member.status();
            let device = status
                .device
                .filter(|_| status.state == MemberState::Present)?;
            Some(Fill {
                member: member.number(),
                device,
                used: status.bytes_total.0.saturating_sub(status.bytes_free.0),
                total: status.bytes_total.0,
            })
        })
        .collect()
}

/// How equally full members are, and the reasons why they are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evenness {
    /// How full those are together that files may go to. Units: thousandths
    pub whole_permille: u64,
    /// Which of them are fuller than that, and how full; those within a hundredth are not. Units:
    /// thousandths
    pub fuller: Vec<(MemberNumber, u64)>,
    /// The files that are left on these.
    pub kept: Kept,
    /// Members that files do not go to.
    pub left_out: Vec<LeftOut>,
}

/// Files that have bytes on members that are fuller, each once, by the reason that they stay there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// With them each other member would be fuller than all of them together.
    pub too_large_count: u64,
    /// Stripes have as many bytes on one member as on the other.
    pub striped_count: u64,
    /// Members of the class of their policy are full alike.
    pub bound_count: u64,
    /// They, or their bytes on a member, cannot be read.
    pub unreadable_count: u64,
    /// No reason any more: they were in use, or came meanwhile.
    pub movable_count: u64,
}

/// A member that files do not go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Which.
    pub member: MemberNumber,
    /// The member's duty.
    pub duty: Duty,
    /// How it is.
    pub state: MemberState,
}

/// How far [`rebalance`] has come, and why no further. Walks the tree if members are not equally
/// full.
pub fn evenness(pool: &Pool) -> Result<Evenness, PoolError> {
    let members = pool.members();
    let left_out = members.iter().filter_map(|member| {
        let (duty, state) = (member.duty(), member.status().state);
        let is_out = duty != Duty::Full || state != MemberState::Present;
        is_out.then(|| LeftOut {
            member: member.number(),
            duty,
            state,
        })
    });
    let fills = fills(pool, |number| pool.takes_bytes(number));
    let mut found = Evenness {
        whole_permille: whole_permille(&fills),
        fuller: fuller(&fills),
        kept: Kept::default(),
        left_out: left_out.collect(),
    };
    if !found.fuller.is_empty() {
        each_stub(pool.catalogue(), &mut BTreeSet::new(), |_, stub| {
            found.kept.count(pool, stub.as_fd(), &found.fuller);
            Ok::<(), PoolError>(())
        })?;
    }
    Ok(found)
}

impl Kept {
    fn count(&mut self, pool: &Pool, stub: BorrowedFd<'_>, fuller: &[(MemberNumber, u64)]) {
        let layout = match pool.layout(stub) {
            Ok(Some(layout)) => layout,
            Ok(None) => return,
            Err(_) => {
                self.unreadable_count += 1;
                return;
            }
        };
        let is_fuller = |object: &Object| fuller.iter().any(|(number, _)| *number == object.member);
        let segments = layout.segments().iter();
        let Some((shape, object)) = segments
            .flat_map(|one| one.objects.iter().map(move |object| (one.shape, *object)))
            .find(|(_, object)| is_fuller(object))
        else {
            return;
        };
        let count = match shape {
            Shape::Single => match why_it_stays(pool, stub, &layout, object) {
                None => &mut self.unreadable_count,
                Some(Ok(_)) => &mut self.movable_count,
                Some(Err(Stay::TooMany)) => &mut self.too_large_count,
                Some(Err(Stay::Level)) => &mut self.bound_count,
            },
            Shape::Striped { .. } | Shape::StripedTwice { .. } => &mut self.striped_count,
        };
        *count += 1;
    }
}

/// Returns  None: it cannot be opened
fn why_it_stays(
    pool: &Pool,
    stub: BorrowedFd<'_>,
    layout: &Layout,
    object: Object,
) -> Option<Result<MemberNumber, Stay>> {
    let source = pool.open_object(layout, object, Access::Read).ok()?;
    let bytes = sum(&data_ranges(&source).ok()?);
    let all = ByteRange::new(0, length_of(stub).ok()?.0);
    let bytes = held(&source, all).ok()?.max(bytes);
    Some(target_of(pool, stub, object, bytes))
}
