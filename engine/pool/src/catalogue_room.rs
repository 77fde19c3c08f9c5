// SPDX-License-Identifier: Apache-2.0
//! Room that stays free for names where a member lies on the catalogue's file system: without it
//! that member would fill up, and no name could be made although other members have room.
//!
//! The reserve counts as taken wherever the pool asks how much room a member has, so that neither
//! new files, nor moves, nor files that grow take it. This module does not bound writes within a
//! file, nor other programs on that file system.

use crate::error::PoolError;
use crate::layout_room::scarce_room;
use crate::pool::Pool;
use crate::reserved::has_blocks_at;
use rushes_core::pool::{Located, MemberNumber};
use rushes_core::units::ByteCount;
use rustix::fs::fstatvfs;
use std::os::fd::OwnedFd;

/// Part of the file system.
const RESERVE_PART: u64 = 100;
/// But at least so much.
const RESERVE_LEAST: ByteCount = ByteCount::from_mib(256);
/// And at most this part of it.
const RESERVE_MOST_PART: u64 = 8;
/// With less the file system counts as full. Units: bytes.
const FULL_BELOW: u64 = 64 << 10;
/// With less room a member takes nothing more of a file that grows. Units: bytes.
const BLOCK_BYTES: u64 = 4096;

/// The room that stays free for the catalogue on a file system of this size.
pub(crate) fn reserve_of(total: ByteCount) -> ByteCount {
    let wanted = (total.0 / RESERVE_PART).max(RESERVE_LEAST.0);
    ByteCount(wanted.min(total.0 / RESERVE_MOST_PART))
}

/// Whether bytes behind the end of a file may go where its layout has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// So many at most.
    Until(ByteCount),
    /// None: the rest of the room is the catalogue's.
    Refused,
}

impl Pool {
    /// How much of a place behind the end of a file a door may fill.
    ///
    /// `object`  the place's, opened
    pub fn growth(&self, located: &Located, object: &OwnedFd) -> Growth {
        let room = self
            .member(located.object.member)
            .and_then(|member| member.room_beside_catalogue());
        match room {
            None => Growth::Until(located.length),
            Some(room) if room.0 >= BLOCK_BYTES => {
                Growth::Until(ByteCount(located.length.0.min(room.0)))
            }
            // A program has reserved room there, and may use it up.
            Some(_) if has_blocks_at(object, located.object_offset) => {
                Growth::Until(ByteCount(located.length.0.min(BLOCK_BYTES)))
            }
            Some(_) => Growth::Refused,
        }
    }

    /// A member has no room: why.
    pub(crate) fn full(&self, number: MemberNumber) -> PoolError {
        let member = self.member(number);
        let kept = member.filter(|member| {
            let room = member.room_beside_catalogue();
            room.is_some_and(|room| room.0 < BLOCK_BYTES)
        });
        kept.map_or(PoolError::NoRoom, |member| member.room_is_kept())
    }

    /// The catalogue's own file system refused a name or a layout for lack of room.
    pub fn catalogue_full(&self) -> PoolError {
        PoolError::CatalogueFull {
            path: self.catalogue().path().to_path_buf(),
        }
    }

    pub(crate) fn is_catalogue_full(&self) -> bool {
        fstatvfs(self.catalogue().tree())
            .is_ok_and(|found| found.f_bavail.saturating_mul(found.f_frsize) < FULL_BELOW)
    }

    /// Warnings for the operator about the place of the catalogue, as sentences without their full
    /// stop. Mostly none.
    pub fn place_warnings(&self) -> Vec<String> {
        let catalogue = self.catalogue().path();
        let scarce = scarce_room(catalogue).into_iter();
        scarce.chain(self.beside_catalogue(|_| true)).collect()
    }

    /// The one about members of these numbers on the catalogue's file system.
    pub fn beside_catalogue(&self, of: impl Fn(MemberNumber) -> bool) -> Option<String> {
        let members = self.members();
        let mut asked = members.iter().filter(|member| of(member.number()));
        let (member, kept) = asked.find_map(|member| {
            let kept = member.status().bytes_kept;
            (kept.0 > 0).then_some((member, kept))
        })?;
        Some(format!(
            "the catalogue {} is on the file system of member {} ({}): the pool leaves {} MiB of \
             it free for names, and when other programs fill it no file can be made; better give \
             the catalogue a file system of its own",
            self.catalogue().path().display(),
            member.number().0,
            member.path().display(),
            kept.0 >> 20
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_a_hundredth_but_neither_tiny_nor_most_of_a_small_file_system() {
        let mib = ByteCount::from_mib;
        for (total, expected) in [
            (mib(64), mib(8)),
            (mib(2048), mib(256)),
            (mib(20_000), mib(256)),
            (mib(8_000_000), mib(80_000)),
            (ByteCount(0), ByteCount(0)),
        ] {
            assert_eq!(reserve_of(total), expected, "{total:?}");
        }
    }
}
