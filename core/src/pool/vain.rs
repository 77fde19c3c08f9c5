// SPDX-License-Identifier: Apache-2.0
//! Attempts to put a file in order that were in vain: they are not made again before the file has
//! changed, or there is more room.
//!
//! Kept in memory, for so many at most, and forgotten with the process. A look through all files
//! forgets those that it does not come upon.

use super::layout::{FileIdentity, MemberNumber};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// So many attempts; others are made each time.
pub const VAIN_COUNT_MAX: usize = 1 << 16;
/// There is more room when a member has so much more than it had at least since: so much, and one
/// part in so many of that. Units: bytes.
const MORE_BYTES: u64 = 16 << 20;
const MORE_PART: u64 = 16;

/// How it was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Try {
    /// To bring the file together on one member.
    Together,
    /// To write it anew in fewer extents.
    Afresh,
    /// To make its stripe wider.
    Wider,
}

/// Free on each member that counts. Units: bytes.
pub type Rooms = Vec<(MemberNumber, u64)>;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    stamp: u64,
    rooms: Rooms,
    look: u64,
}

/// The attempts that were in vain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vain {
    known: BTreeMap<(FileIdentity, Try), Known>,
    look: u64,
}

impl Vain {
    /// Whether that was tried in vain on a file as it is, and no member has clearly more room
    /// since.
    ///
    /// `stamp`  another number when the file is another one
    pub fn is_known(&mut self, file: FileIdentity, how: Try, stamp: u64, rooms: &Rooms) -> bool {
        let Some(known) = self.known.get_mut(&(file, how)) else {
            return false;
        };
        if known.stamp != stamp || is_more(&known.rooms, rooms) {
            self.known.remove(&(file, how));
            return false;
        }
        known.look = self.look;
        // From the least there was: bytes that went and came again may lie better.
        for (known, (_, free)) in known.rooms.iter_mut().zip(rooms) {
            known.1 = known.1.min(*free);
        }
        true
    }

    /// That was tried in vain.
    pub fn remember(&mut self, file: FileIdentity, how: Try, stamp: u64, rooms: Rooms) {
        let is_full = self.known.len() >= VAIN_COUNT_MAX;
        if is_full && !self.known.contains_key(&(file, how)) {
            return;
        }
        let look = self.look;
        let known = Known { stamp, rooms, look };
        self.known.insert((file, how), known);
    }

    /// A look through all files is done: those that it did not come upon are gone.
    pub fn looked(&mut self) {
        let look = self.look;
        self.known.retain(|_, known| known.look == look);
        self.look += 1;
    }

    /// An operator wants all of it to be tried again.
    pub fn forget(&mut self) {
        self.known.clear();
    }
}

/// Members are others, or one has clearly more room.
fn is_more(before: &Rooms, now: &Rooms) -> bool {
    let members = |rooms: &Rooms| rooms.iter().map(|(member, _)| *member).collect::<Vec<_>>();
    let has_more = |((_, before), (_, now)): (&(MemberNumber, u64), &(MemberNumber, u64))| {
        *now >= before.saturating_add(before / MORE_PART + MORE_BYTES)
    };
    members(before) != members(now) || before.iter().zip(now).any(has_more)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(number: u64) -> FileIdentity {
        FileIdentity {
            number,
            generation: 1,
        }
    }

    fn rooms(all: &[(u16, u64)]) -> Rooms {
        let one = |&(member, mib): &(u16, u64)| (MemberNumber(member), mib * MIB);
        all.iter().map(one).collect()
    }

    #[test]
    fn what_was_in_vain_is_not_tried_again_until_the_file_or_the_room_is_another_one() {
        let room = rooms(&[(0, 100), (1, 1600)]);
        let tried = || {
            let mut vain = Vain::default();
            vain.remember(file(1), Try::Afresh, 7, room.clone());
            vain
        };
        assert!(tried().is_known(file(1), Try::Afresh, 7, &room));
        assert!(!tried().is_known(file(1), Try::Afresh, 8, &room));
        assert!(!tried().is_known(file(1), Try::Together, 7, &room));
        assert!(!tried().is_known(file(2), Try::Afresh, 7, &room));
        for (now, expected) in [
            (&[(0, 121), (1, 1600)][..], true),
            (&[(0, 123), (1, 1600)], false),
            (&[(0, 100), (1, 1715)], true),
            (&[(0, 100), (1, 1716)], false),
            (&[(0, 0), (1, 0)], true),
            (&[(0, 100)], false),
            (&[(0, 100), (1, 1600), (2, 1)], false),
            (&[(0, 100), (2, 1600)], false),
        ] {
            let found = tried().is_known(file(1), Try::Afresh, 7, &rooms(now));
            assert_eq!(found, expected, "{now:?}");
        }
        // Used up and free again: the places are others.
        let mut vain = tried();
        assert!(vain.is_known(file(1), Try::Afresh, 7, &rooms(&[(0, 10), (1, 1600)])));
        assert!(!vain.is_known(file(1), Try::Afresh, 7, &room));
        // And that was said once: it is tried now.
        assert!(!vain.is_known(file(1), Try::Afresh, 7, &rooms(&[(0, 10), (1, 1600)])));
    }

    #[test]
    fn files_that_are_gone_are_forgotten_and_there_are_never_more_than_so_many() {
        let mut vain = Vain::default();
        for number in 0..VAIN_COUNT_MAX as u64 + 9 {
            vain.remember(file(number), Try::Afresh, 7, Rooms::new());
        }
        assert_eq!(vain.known.len(), VAIN_COUNT_MAX);
        let is_known =
            |vain: &mut Vain, number| vain.is_known(file(number), Try::Afresh, 7, &Rooms::new());
        assert!(is_known(&mut vain, 3) && !is_known(&mut vain, VAIN_COUNT_MAX as u64 + 1));
        vain.looked();
        assert!(is_known(&mut vain, 3) && is_known(&mut vain, 4));
        vain.looked();
        assert!(is_known(&mut vain, 3) && !is_known(&mut vain, 5));
        assert_eq!(vain.known.len(), 2);
        vain.forget();
        assert!(!is_known(&mut vain, 3));
    }
}
