// SPDX-License-Identifier: Apache-2.0
//! Which member takes a segment.
//!
//! The answer is an order, not a choice: who asks goes down the list until a member takes it, so that nobody hears "no space" while a
//! member has room. Members on one device count as one: two of them must not get twice the files of their neighbour.

use super::layout::MemberNumber;
use crate::units::ByteCount;
use alloc::vec::Vec;

/// A member with less than this is asked last: what begins there would soon have to go on elsewhere.
pub(super) const ROOM_LEAST: ByteCount = ByteCount::from_mib(64);

/// How members are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// One device after the other.
    RoundRobin,
    /// The device with most free space.
    #[default]
    MostFreeSpace,
}

impl Policy {
    /// All there are.
    pub const ALL: [Policy; 2] = [Policy::RoundRobin, Policy::MostFreeSpace];

    /// As it is written in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round_robin",
            Policy::MostFreeSpace => "most_free_space",
        }
    }

    /// The one of this name.
    pub fn of(name: &str) -> Option<Policy> {
        Policy::ALL.into_iter().find(|policy| policy.name() == name)
    }
}

/// A member that is there and can be written to, and what it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Which.
    pub member: MemberNumber,
    /// On which device; equal for members that share one.
    pub device: u64,
    /// For files of others than root.
    pub free: ByteCount,
    /// What the daemon has not promised of its device. None: not known. Units: bytes per second.
    pub unpromised: Option<u64>,
}

/// Who asks for a place, and for how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Rises by one with each segment of the pool; where it starts does not matter.
    pub turn: u64,
    /// Whose file it is.
    pub user: u32,
    /// Bytes that are to be written now.
    pub wanted: ByteCount,
}

/// In which order members are asked to take a segment.
///
/// Returns  every member of `rooms` once: first those with room for a good while, last the nearly full ones (most free first)
pub fn order(policy: Policy, rooms: &[Room], asked: Asked) -> Vec<MemberNumber> {
    let Asked { turn, wanted, .. } = asked;
    let least = ByteCount(ROOM_LEAST.0.max(wanted.0.saturating_mul(2)));
    let (roomy, nearly_full): (Vec<Room>, Vec<Room>) =
        rooms.iter().copied().partition(|room| room.free >= least);
    let mut found = match policy {
        Policy::RoundRobin => in_turn(roomy, turn),
        Policy::MostFreeSpace => most_free_first(roomy, turn),
    };
    found.extend(most_free_first(nearly_full, turn));
    found.into_iter().map(|room| room.member).collect()
}

/// The devices in turn, and of each its members in turn.
fn in_turn(rooms: Vec<Room>, turn: u64) -> Vec<Room> {
    let mut devices: Vec<Vec<Room>> = Vec::new();
    for room in rooms {
        match devices.iter_mut().find(|of| of[0].device == room.device) {
            Some(of) => of.push(room),
            None => devices.push(alloc::vec![room]),
        }
    }
    let device_count = devices.len().max(1) as u64;
    for of in &mut devices {
        let first = turn / device_count % of.len() as u64;
        of.rotate_left(first as usize);
    }
    devices.rotate_left((turn % device_count) as usize);
    // The other members of a device are no better than it is: they come after all other devices.
    let longest = devices.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest)
        .flat_map(|at| devices.iter().filter_map(move |of| of.get(at).copied()))
        .collect()
}

/// By free space, the most first. Equals take turns.
fn most_free_first(mut rooms: Vec<Room>, turn: u64) -> Vec<Room> {
    if !rooms.is_empty() {
        let first = turn % rooms.len() as u64;
        rooms.rotate_left(first as usize);
    }
    rooms.sort_by_key(|room| core::cmp::Reverse(room.free));
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(member: u16, device: u64, free_mib: u64) -> Room {
        Room {
            member: MemberNumber(member),
            device,
            free: ByteCount::from_mib(free_mib),
            unpromised: None,
        }
    }

    fn numbers(policy: Policy, rooms: &[Room], turn: u64, wanted: u64) -> Vec<u16> {
        let asked = Asked {
            turn,
            user: 0,
            wanted: ByteCount(wanted),
        };
        order(policy, rooms, asked)
            .into_iter()
            .map(|member| member.0)
            .collect()
    }

    #[test]
    fn names_of_policies_read_back() {
        for policy in Policy::ALL {
            assert_eq!(Policy::of(policy.name()), Some(policy));
        }
        assert_eq!(Policy::of("best"), None);
    }

    #[test]
    fn most_free_space_goes_by_free_space_and_equals_take_turns() {
        let rooms = [room(0, 1, 100), room(1, 2, 900), room(2, 3, 900)];
        assert_eq!(numbers(Policy::MostFreeSpace, &rooms, 0, 1), [1, 2, 0]);
        assert_eq!(numbers(Policy::MostFreeSpace, &rooms, 2, 1), [2, 1, 0]);
    }

    #[test]
    fn round_robin_counts_members_of_one_device_as_one() {
        let rooms = [room(0, 1, 900), room(1, 1, 900), room(2, 2, 900)];
        let first: Vec<u16> = (0..8)
            .map(|turn| numbers(Policy::RoundRobin, &rooms, turn, 1)[0])
            .collect();
        assert_eq!(first, [0, 2, 1, 2, 0, 2, 1, 2]);
    }

    #[test]
    fn nearly_full_members_are_asked_last() {
        let rooms = [room(0, 1, 1), room(1, 2, 70), room(2, 3, 3)];
        for turn in 0..5 {
            assert_eq!(numbers(Policy::RoundRobin, &rooms, turn, 1), [1, 2, 0]);
        }
        // For who wants 40 MiB at once, 70 is nearly full too.
        assert_eq!(
            numbers(Policy::RoundRobin, &rooms, 0, 40 << 20),
            [1, 2, 0],
            "most free first"
        );
    }

    #[test]
    fn whatever_the_rooms_everyone_is_asked_once() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for _ in 0..5_000 {
            let count = next() % 9;
            let rooms: Vec<Room> = (0..count)
                .map(|at| room(at as u16, next() % 4, next() % 200))
                .collect();
            let (turn, wanted) = (next(), next() % (200 << 20));
            for policy in Policy::ALL {
                let found = numbers(policy, &rooms, turn, wanted);
                let mut sorted = found.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count as u16).collect::<Vec<_>>());
                // A member that can take it for a good while never comes behind one that cannot.
                let roomy = |member: u16| {
                    rooms[usize::from(member)].free.0 >= (64u64 << 20).max(2 * wanted)
                };
                let last_roomy = found.iter().rposition(|&member| roomy(member));
                let first_full = found.iter().position(|&member| !roomy(member));
                if let (Some(roomy), Some(full)) = (last_roomy, first_full) {
                    assert!(roomy < full, "{found:?} of {rooms:?}");
                }
            }
        }
    }
}
