// SPDX-License-Identifier: Apache-2.0
//! Which files of a pool are in more segments and extents than they need be, and when a copy is
//! worth its cost.

use super::layout::MemberNumber;
use alloc::vec::Vec;

/// A file may have one extent for each so many bytes, and one more: a disk that has read so much
/// has long made up for the positioning. Units: bytes.
const EXTENT_BYTES: u64 = 64 << 20;
/// A new copy is worth its writing if it has one extent for so many of the old one, at most.
const FEWER: u64 = 2;
/// The space that stays free on a member beside the bytes that come to it, for the file system
/// itself: so much, and one part in so many. Units: bytes.
const SPARE_BYTES: u64 = 1 << 20;
const SPARE_PART: u64 = 64;

/// The bytes that a member has of a file, and its free room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Which.
    pub member: MemberNumber,
    /// Of the file. Units: bytes.
    pub held: u64,
    /// Units: bytes.
    pub free: u64,
}

/// The member on which all of a file comes together: the one to which least has to be moved. None:
/// no member has room for the whole.
///
/// `holdings`  of members that may take bytes of it; the best first among those that have as much
///             of it
/// Units       total: bytes
pub fn gather_on(holdings: &[Holding], total: u64) -> Option<MemberNumber> {
    let has_room = |one: &&Holding| {
        let comes = total.saturating_sub(one.held);
        one.free >= comes.saturating_add(comes / SPARE_PART + SPARE_BYTES)
    };
    let mut fit: Vec<&Holding> = holdings.iter().filter(has_room).collect();
    // Stable: those that have as much stay in their order.
    fit.sort_by_key(|one| core::cmp::Reverse(one.held));
    fit.first().map(|one| one.member)
}

/// So much in so many extents is scattered.
///
/// Units    bytes: of data, holes not counted
pub fn is_scattered(extent_count: u64, bytes: u64) -> bool {
    extent_count > 1 + bytes / EXTENT_BYTES
}

/// Whether a copy with so many extents is worth its writing.
pub fn is_worth(before: u64, after: u64) -> bool {
    after.saturating_mul(FEWER) <= before
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn holding(member: u16, held_mib: u64, free_mib: u64) -> Holding {
        Holding {
            member: MemberNumber(member),
            held: held_mib * MIB,
            free: free_mib * MIB,
        }
    }

    #[test]
    fn a_file_comes_together_where_most_of_it_is_already_if_there_is_room() {
        let holdings = [holding(3, 0, 900), holding(0, 80, 30), holding(1, 20, 500)];
        assert_eq!(gather_on(&holdings, 100 * MIB), Some(MemberNumber(0)));
        // Not to the last byte: the file system needs some itself.
        let full = [holding(3, 0, 900), holding(0, 80, 20), holding(1, 20, 500)];
        assert_eq!(gather_on(&full, 100 * MIB), Some(MemberNumber(1)));
        let other = [holding(3, 0, 900), holding(0, 80, 20), holding(1, 20, 50)];
        assert_eq!(gather_on(&other, 100 * MIB), Some(MemberNumber(3)));
        assert_eq!(gather_on(&other[1..], 100 * MIB), None);
        assert_eq!(gather_on(&[], 0), None);
        // As much of it: the order that was given.
        let alike = [holding(5, 10, 900), holding(2, 10, 900)];
        assert_eq!(gather_on(&alike, 20 * MIB), Some(MemberNumber(5)));
    }

    #[test]
    fn large_files_may_have_more_extents_and_half_of_them_is_worth_a_copy() {
        for (extents, mib, expected) in [
            (1, 0, false),
            (2, 0, true),
            (2, 63, true),
            (2, 64, false),
            (5, 200, true),
            (4, 200, false),
            (1000, 1, true),
        ] {
            assert_eq!(
                is_scattered(extents, mib * MIB),
                expected,
                "{extents} {mib}"
            );
        }
        assert!(is_worth(2, 1) && is_worth(9, 4) && !is_worth(9, 5) && !is_worth(1, 1));
    }
}
