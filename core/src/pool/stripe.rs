// SPDX-License-Identifier: Apache-2.0
//! Which members a stripe goes over.
//!
//! One of each device: two of one device would only send its head to and fro. Where there are fewer
//! members than the policy wants, a stripe has as many whole groups as there are, if two; else as
//! many members. With less than two devices there is no stripe.

use super::layout::{MemberNumber, Shape};
use super::place::{ROOM_LEAST, Room};
use super::wish::{STRIPE_MAX, Spread, Wish};
use crate::units::ByteCount;
use alloc::vec::Vec;

/// Shape and members of a stripe, in the order of its objects. None: the policy wants none, or
/// there are not two devices with room.
///
/// `asked`   all members of `rooms`, the best first
/// `wanted`  bytes of the write
pub fn stripe(
    wish: &Wish,
    rooms: &[Room],
    asked: &[MemberNumber],
    wanted: ByteCount,
) -> Option<(Shape, Vec<MemberNumber>)> {
    let most = match wish.spread? {
        Spread::Single => return None,
        Spread::Striped { members } => members.unwrap_or(STRIPE_MAX),
        Spread::StripedTwice { groups, members } => groups.saturating_mul(members).min(STRIPE_MAX),
    };
    let mut devices = Vec::new();
    let mut members = Vec::new();
    for &number in asked {
        let Some(room) = rooms.iter().find(|room| room.member == number) else {
            continue;
        };
        let has_room = room.free >= ROOM_LEAST && room.free >= wanted;
        if has_room && !devices.contains(&room.device) && members.len() < usize::from(most) {
            devices.push(room.device);
            members.push(number);
        }
    }
    let count = members.len() as u8;
    if count < 2 {
        return None;
    }
    let (unit_log2, group_unit_log2) = wish.units_log2();
    let shape = match wish.spread? {
        Spread::StripedTwice { members: of, .. } if count / of >= 2 => {
            let groups = count / of;
            members.truncate(usize::from(groups * of));
            // Neighbours by number are a group: that is how they were given.
            members.sort_unstable();
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members: of,
            }
        }
        _ => Shape::Striped {
            unit_log2,
            members: count,
        },
    };
    Some((shape, members))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(devices: &[(u64, u64)]) -> Vec<Room> {
        let all = devices.iter().zip(0u16..);
        all.map(|(&(device, free_mib), number)| Room {
            member: MemberNumber(number),
            device,
            free: ByteCount::from_mib(free_mib),
            unpromised: None,
        })
        .collect()
    }

    fn of(words: &str, rooms: &[Room], asked: &[u16]) -> Option<(Shape, Vec<u16>)> {
        let wish = Wish::of(words).expect("a wish");
        let asked: Vec<MemberNumber> = asked.iter().map(|&number| MemberNumber(number)).collect();
        let found = stripe(&wish, rooms, &asked, ByteCount::from_mib(1))?;
        Some((found.0, found.1.iter().map(|member| member.0).collect()))
    }

    const fn striped(members: u8) -> Shape {
        Shape::Striped {
            unit_log2: 20,
            members,
        }
    }

    #[test]
    fn one_of_each_device_in_the_order_that_is_asked() {
        let rooms = rooms(&[(1, 900), (1, 900), (2, 900), (3, 900), (4, 3)]);
        assert_eq!(
            of("striped", &rooms, &[2, 1, 0, 3, 4]),
            Some((striped(3), alloc::vec![2, 1, 3]))
        );
        assert_eq!(
            of("striped=2", &rooms, &[3, 0, 1, 2, 4]),
            Some((striped(2), alloc::vec![3, 0]))
        );
        // Members that are not there are not waited for.
        assert_eq!(
            of("striped=8 unit=64KiB", &rooms, &[0, 2, 3]),
            Some((
                Shape::Striped {
                    unit_log2: 16,
                    members: 3
                },
                alloc::vec![0, 2, 3]
            ))
        );
        assert_eq!(of("single", &rooms, &[0, 2]), None);
        assert_eq!(of("unit=64KiB", &rooms, &[0, 2]), None);
        assert_eq!(of("striped", &rooms, &[0, 1]), None);
        assert_eq!(of("striped", &rooms, &[0, 4]), None);
    }

    #[test]
    fn groups_are_neighbours_by_number_and_whole() {
        let rooms = rooms(&[(1, 900), (2, 900), (3, 900), (4, 900), (5, 900)]);
        let twice = Shape::StripedTwice {
            unit_log2: 20,
            group_unit_log2: 23,
            groups: 2,
            members: 2,
        };
        assert_eq!(
            of("striped=2x2", &rooms, &[4, 2, 0, 3, 1]),
            Some((twice, alloc::vec![0, 2, 3, 4]))
        );
        // Further groups may come; until then there are as many as there are disks for.
        assert_eq!(
            of("striped=3x2", &rooms, &[4, 2, 0, 3, 1]),
            Some((twice, alloc::vec![0, 2, 3, 4]))
        );
        assert_eq!(
            of("striped=2x4", &rooms, &[4, 2, 0, 3, 1]),
            Some((striped(5), alloc::vec![4, 2, 0, 3, 1]))
        );
    }
}
