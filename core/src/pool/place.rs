// SPDX-License-Identifier: Apache-2.0
//! Which member takes a segment.
//!
//! The answer is an order, not a choice: the caller goes down the list until a member takes the
//! segment, so that no client gets "no space" while a member has room. Members on one device count
//! as one: two of them must not get twice the files of their neighbour.

use super::layout::MemberNumber;
use crate::units::ByteCount;
use alloc::vec::Vec;

/// A member with less than this is asked last: a segment that begins there would soon have to go on
/// elsewhere.
pub(super) const ROOM_LEAST: ByteCount = ByteCount::from_mib(64);

/// A member within one part in so many of the best is as good.
const ALIKE: u64 = 8;

/// How members are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// One device after the other.
    RoundRobin,
    /// The device with most free space; those that have about as much take turns.
    #[default]
    MostFreeSpace,
    /// The files of a user on one device, by the user's number; when that is nearly full, on the
    /// next one in turn.
    PerUser,
    /// The device of which most bandwidth is not promised to streams.
    LeastLoaded,
}

impl Policy {
    /// All there are.
    pub const ALL: [Policy; 4] = [
        Policy::RoundRobin,
        Policy::MostFreeSpace,
        Policy::PerUser,
        Policy::LeastLoaded,
    ];

    /// As it is written in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::RoundRobin => "round_robin",
            Policy::MostFreeSpace => "most_free_space",
            Policy::PerUser => "per_user",
            Policy::LeastLoaded => "least_loaded",
        }
    }

    /// The one of this name.
    pub fn of(name: &str) -> Option<Policy> {
        Policy::ALL.into_iter().find(|policy| policy.name() == name)
    }
}

/// A member that is there and can be written to, and its free room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Which.
    pub member: MemberNumber,
    /// On which device; equal for members that share one.
    pub device: u64,
    /// For files of others than root.
    pub free: ByteCount,
    /// The bandwidth of its device that the daemon has not promised. None: not known. Units: bytes
    /// per second.
    pub unpromised: Option<u64>,
}

/// The user that asks for a place, and for how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Rises by one with each segment of the pool; where it starts does not matter.
    pub turn: u64,
    /// The owner of the file.
    pub user: u32,
    /// Bytes of the write.
    pub wanted: ByteCount,
}

/// In which order members are asked to take a segment.
///
/// Returns  every member of `rooms` once: first those with room for a good while, last the nearly
/// full ones, most free first
pub fn order(policy: Policy, rooms: &[Room], asked: Asked) -> Vec<MemberNumber> {
    let Asked { turn, user, wanted } = asked;
    let least = room_least(wanted);
    let is_roomy = |room: &Room| room.free >= least;
    let (roomy, nearly_full): (Vec<Room>, Vec<Room>) = rooms.iter().copied().partition(is_roomy);
    let mut found = match policy {
        Policy::RoundRobin => in_turn(roomy, turn),
        Policy::MostFreeSpace => roomiest_first(roomy, turn),
        // Counted among all, so that a device that fills moves its own users only.
        Policy::PerUser => {
            let mut all = by_device(rooms.to_vec(), u64::from(user), turn);
            all.retain(is_roomy);
            all
        }
        Policy::LeastLoaded => least_loaded_first(roomy, turn),
    };
    found.extend(most_free_first(nearly_full, turn));
    found.into_iter().map(|room| room.member).collect()
}

/// A frame of a sequence whose frame before went to `member` goes there, too, as long as that has
/// room and is not overloaded: a sequence is read in order, and on one device that is one way. Not
/// where the policy says that files take turns.
///
/// Assumes  `asked` is the [`order`] of `rooms`
pub fn follow(
    policy: Policy,
    rooms: &[Room],
    asked: &mut [MemberNumber],
    member: MemberNumber,
    wanted: ByteCount,
) {
    let least = room_least(wanted);
    let best = rooms.iter().filter(|room| room.free >= least);
    let best = best.filter_map(|room| room.unpromised).max().unwrap_or(0);
    let may = rooms.iter().any(|room| {
        let has_load_left = match (policy, room.unpromised) {
            (_, Some(0)) | (Policy::RoundRobin | Policy::PerUser, _) => false,
            (Policy::LeastLoaded, Some(left)) => left >= best / 2,
            (Policy::LeastLoaded, None) => best == 0,
            (Policy::MostFreeSpace, _) => true,
        };
        room.member == member && room.free >= least && has_load_left
    });
    let place = asked.iter().position(|&asked| asked == member);
    if let Some(place) = place.filter(|_| may) {
        asked[..=place].rotate_right(1);
    }
}

fn room_least(wanted: ByteCount) -> ByteCount {
    ByteCount(ROOM_LEAST.0.max(wanted.0.saturating_mul(2)))
}

/// The devices in turn, and of each its members in turn.
fn in_turn(rooms: Vec<Room>, turn: u64) -> Vec<Room> {
    let mut devices: Vec<u64> = rooms.iter().map(|room| room.device).collect();
    devices.sort_unstable();
    devices.dedup();
    let device_count = devices.len().max(1) as u64;
    by_device(rooms, turn, turn / device_count)
}

/// The devices one after the other, and of each its members, from these on.
fn by_device(rooms: Vec<Room>, device: u64, member: u64) -> Vec<Room> {
    let mut devices: Vec<Vec<Room>> = Vec::new();
    for room in rooms {
        match devices.iter_mut().find(|of| of[0].device == room.device) {
            Some(of) => of.push(room),
            None => devices.push(alloc::vec![room]),
        }
    }
    for of in &mut devices {
        let first = member % of.len() as u64;
        of.rotate_left(first as usize);
    }
    let device_count = devices.len().max(1) as u64;
    devices.rotate_left((device % device_count) as usize);
    // The other members of a device are no better than it is: they come after all other devices.
    let longest = devices.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest)
        .flat_map(|at| devices.iter().filter_map(move |of| of.get(at).copied()))
        .collect()
}

/// By free space, the most first; those that have about as much take turns, or all clients that
/// begin to write at one moment would meet on one device: free space does not show their bytes
/// before they are there.
fn roomiest_first(mut rooms: Vec<Room>, turn: u64) -> Vec<Room> {
    rooms.sort_by_key(|room| core::cmp::Reverse(room.free));
    let mut found = Vec::new();
    while let Some(best) = rooms.first().map(|room| room.free.0) {
        let alike = rooms.partition_point(|room| room.free.0 >= best - best / ALIKE);
        let others = rooms.split_off(alike);
        rooms.sort_by_key(|room| room.member.0);
        found.extend(in_turn(rooms, turn));
        rooms = others;
    }
    found
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

/// By unpromised bandwidth, the most first; of those that are about as good, by free space. A
/// member whose bandwidth is not known comes behind those that have some left, and before those
/// that have none.
fn least_loaded_first(rooms: Vec<Room>, turn: u64) -> Vec<Room> {
    let (none_left, rest): (Vec<Room>, Vec<Room>) = rooms
        .into_iter()
        .partition(|room| room.unpromised == Some(0));
    let (unknown, mut known): (Vec<Room>, Vec<Room>) =
        rest.into_iter().partition(|room| room.unpromised.is_none());
    known.sort_by_key(|room| core::cmp::Reverse(room.unpromised));
    let mut found = Vec::new();
    while let Some(best) = known.first().and_then(|room| room.unpromised) {
        // The measured speed of a device is never twice the same: of two alike one would get all
        // files.
        let least = best - best / ALIKE;
        let alike = known.partition_point(|room| room.unpromised >= Some(least));
        let others = known.split_off(alike);
        found.extend(roomiest_first(known, turn));
        known = others;
    }
    found.extend(roomiest_first(unknown, turn));
    found.extend(roomiest_first(none_left, turn));
    found
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
        asked_for(policy, rooms, asked)
    }

    fn asked_for(policy: Policy, rooms: &[Room], asked: Asked) -> Vec<u16> {
        order(policy, rooms, asked)
            .into_iter()
            .map(|member| member.0)
            .collect()
    }

    fn of_user(rooms: &[Room], user: u32, turn: u64) -> Vec<u16> {
        let asked = Asked {
            turn,
            user,
            wanted: ByteCount(1),
        };
        asked_for(Policy::PerUser, rooms, asked)
    }

    /// As `room`, with so many bytes a second without a contract.
    fn loaded(member: u16, free_mib: u64, unpromised: impl Into<Option<u64>>) -> Room {
        Room {
            unpromised: unpromised.into(),
            ..room(member, u64::from(member), free_mib)
        }
    }

    #[test]
    fn names_of_policies_read_back() {
        for policy in Policy::ALL {
            assert_eq!(Policy::of(policy.name()), Some(policy));
        }
        assert_eq!(Policy::of("best"), None);
    }

    #[test]
    fn most_free_space_goes_by_free_space_and_those_about_as_free_take_turns() {
        let rooms = [room(0, 1, 100), room(1, 2, 850), room(2, 3, 900)];
        assert_eq!(numbers(Policy::MostFreeSpace, &rooms, 0, 1), [1, 2, 0]);
        assert_eq!(numbers(Policy::MostFreeSpace, &rooms, 1, 1), [2, 1, 0]);
        let rooms = [room(0, 1, 100), room(1, 2, 700), room(2, 3, 900)];
        for turn in 0..5 {
            assert_eq!(numbers(Policy::MostFreeSpace, &rooms, turn, 1), [2, 1, 0]);
        }
    }

    #[test]
    fn who_begins_to_write_at_one_moment_is_spread() {
        // No bytes are written yet that free space would show.
        let rooms: Vec<Room> = (0..4).map(|at| room(at, u64::from(at), 900)).collect();
        let mut counts = [0; 4];
        for turn in 0..8 {
            counts[usize::from(numbers(Policy::MostFreeSpace, &rooms, turn, 1)[0])] += 1;
        }
        assert_eq!(counts, [2; 4]);
    }

    #[test]
    fn frames_follow_the_one_before_while_there_is_room_and_the_policy_lets_them() {
        let first = |policy: Policy, rooms: &[Room], turn: u64, before: u16| {
            let asked = Asked {
                turn,
                user: 1,
                wanted: ByteCount(1),
            };
            let mut found = order(policy, rooms, asked);
            let count = found.len();
            follow(
                policy,
                rooms,
                &mut found,
                MemberNumber(before),
                asked.wanted,
            );
            assert_eq!(found.len(), count);
            found[0].0
        };
        let rooms: Vec<Room> = (0..4).map(|at| room(at, u64::from(at), 900)).collect();
        for turn in 0..8 {
            assert_eq!(first(Policy::MostFreeSpace, &rooms, turn, 2), 2);
            assert_eq!(first(Policy::LeastLoaded, &rooms, turn, 2), 2);
            // A policy that says that files take turns, or go by user, is followed to the letter.
            assert_eq!(
                first(Policy::RoundRobin, &rooms, turn, 2),
                (turn % 4) as u16
            );
            assert_eq!(first(Policy::PerUser, &rooms, turn, 2), 1);
            // One that is not there, or may not take it.
            assert_ne!(first(Policy::MostFreeSpace, &rooms, turn, 9), 9);
        }
        let full = [room(0, 1, 10), room(1, 2, 900)];
        assert_eq!(first(Policy::MostFreeSpace, &full, 0, 0), 1);
        // Much is promised of it by now.
        let busy = [loaded(0, 900, 40_000_000), loaded(1, 900, 100_000_000)];
        assert_eq!(first(Policy::LeastLoaded, &busy, 0, 0), 1);
        assert_eq!(first(Policy::MostFreeSpace, &busy, 0, 0), 0);
        let half = [loaded(0, 900, 60_000_000), loaded(1, 900, 100_000_000)];
        assert_eq!(first(Policy::LeastLoaded, &half, 0, 0), 0);
        let none = [loaded(0, 900, 0), loaded(1, 900, 100_000_000)];
        // Room alone decides which is first; no member is put before it.
        assert_eq!(first(Policy::MostFreeSpace, &none, 1, 0), 1);
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
    fn the_files_of_a_user_go_to_one_device() {
        let rooms = [room(0, 1, 900), room(1, 2, 900), room(2, 3, 900)];
        for turn in 0..5 {
            assert_eq!(of_user(&rooms, 1000, turn), [1, 2, 0]);
            assert_eq!(of_user(&rooms, 1001, turn), [2, 0, 1]);
            assert_eq!(of_user(&rooms, 1002, turn), [0, 1, 2]);
        }
        // Two folders of one device take turns, and the other device comes before the second of
        // them.
        let rooms = [room(0, 1, 900), room(1, 1, 900), room(2, 2, 900)];
        assert_eq!(of_user(&rooms, 0, 0), [0, 2, 1]);
        assert_eq!(of_user(&rooms, 0, 1), [1, 2, 0]);
        assert_eq!(of_user(&rooms, 1, 0)[0], 2);
    }

    #[test]
    fn a_device_that_is_nearly_full_moves_its_own_users_to_the_next_and_nobody_else() {
        let mut rooms = [room(0, 1, 900), room(1, 2, 900), room(2, 3, 900)];
        rooms[1].free = ByteCount::from_mib(1);
        assert_eq!(of_user(&rooms, 1000, 0), [2, 0, 1]);
        assert_eq!(of_user(&rooms, 1001, 0), [2, 0, 1]);
        assert_eq!(of_user(&rooms, 1002, 0), [0, 2, 1]);
    }

    #[test]
    fn least_loaded_goes_by_what_is_not_promised() {
        let rooms = [
            loaded(0, 900, 100_000_000),
            loaded(1, 100, 300_000_000),
            loaded(2, 500, 200_000_000),
        ];
        for turn in 0..5 {
            assert_eq!(numbers(Policy::LeastLoaded, &rooms, turn, 1), [1, 2, 0]);
        }
    }

    #[test]
    fn devices_that_can_do_about_the_same_go_by_free_space() {
        let rooms = [
            loaded(0, 300, 200_000_000),
            loaded(1, 900, 180_000_000),
            loaded(2, 950, 170_000_000),
            loaded(3, 300, 150_000_000),
        ];
        assert_eq!(numbers(Policy::LeastLoaded, &rooms, 0, 1), [1, 0, 2, 3]);
        let equal = [loaded(0, 300, 7), loaded(1, 300, 7)];
        let first = |turn| numbers(Policy::LeastLoaded, &equal, turn, 1)[0];
        assert_eq!([first(0), first(1), first(2)], [0, 1, 0]);
    }

    #[test]
    fn who_is_not_known_comes_behind_who_has_something_left_and_before_who_has_nothing() {
        let rooms = [
            loaded(0, 900, 0),
            loaded(1, 700, None),
            loaded(2, 100, 1_000_000),
            loaded(3, 850, None),
        ];
        assert_eq!(numbers(Policy::LeastLoaded, &rooms, 0, 1), [2, 3, 1, 0]);
        let unknown = [loaded(0, 300, None), loaded(1, 400, None)];
        assert_eq!(numbers(Policy::LeastLoaded, &unknown, 0, 1), [1, 0]);
    }

    #[test]
    fn nearly_full_members_are_asked_last() {
        let rooms = [room(0, 1, 1), room(1, 2, 70), room(2, 3, 3)];
        for turn in 0..5 {
            assert_eq!(numbers(Policy::RoundRobin, &rooms, turn, 1), [1, 2, 0]);
        }
        // For a write of 40 MiB at once, 70 is nearly full too.
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
                .map(|at| Room {
                    unpromised: [None, Some(0), Some(next() % 1000), Some(next())]
                        [(next() % 4) as usize],
                    ..room(at as u16, next() % 4, next() % 200)
                })
                .collect();
            let (turn, wanted) = (next(), next() % (200 << 20));
            for policy in Policy::ALL {
                let asked = Asked {
                    turn,
                    user: (turn >> 7) as u32,
                    wanted: ByteCount(wanted),
                };
                let found = asked_for(policy, &rooms, asked);
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
