// SPDX-License-Identifier: Apache-2.0
//! The moves by which a pool's members become equally full: after one was added, or much was
//! removed.

use super::layout::MemberNumber;
use alloc::vec::Vec;

/// Members this near to the pool as a whole are left alone. Units: thousandths of a member.
const NEAR_PERMILLE: u64 = 10;

/// How full a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Which.
    pub member: MemberNumber,
    /// On which device; equal for members that share one, as are the numbers below then.
    pub device: u64,
    /// Units: bytes.
    pub used: u64,
    /// Units: bytes.
    pub total: u64,
}

impl Fill {
    fn permille(&self, more: u64) -> u64 {
        let used = u128::from(self.used) + u128::from(more);
        (used * 1000 / u128::from(self.total.max(1))) as u64
    }
}

/// Why bytes stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// Their member is not fuller than all together, or there are no bytes.
    Level,
    /// Each other member would be fuller than all together with them.
    TooMany,
}

/// How full all of them are together, each device once. Units: thousandths.
pub fn whole_permille(fills: &[Fill]) -> u64 {
    let mut devices: Vec<u64> = Vec::new();
    let (mut used, mut total) = (0u128, 0u128);
    for fill in fills {
        if !devices.contains(&fill.device) {
            devices.push(fill.device);
            used += u128::from(fill.used);
            total += u128::from(fill.total);
        }
    }
    (used * 1000 / total.max(1)) as u64
}

/// Members that are fuller than all together, and how full. Those that are near enough are left
/// alone. Units: thousandths.
pub fn fuller(fills: &[Fill]) -> Vec<(MemberNumber, u64)> {
    let most = whole_permille(fills) + NEAR_PERMILLE;
    let all = fills.iter().map(|fill| (fill.member, fill.permille(0)));
    all.filter(|&(_, permille)| permille > most).collect()
}

/// The member to which these bytes go from one that is fuller than all together.
///
/// Each move brings both members nearer to the whole, or past it by no more than members that are
/// left alone are off; so moving ends.
pub fn lighter(fills: &[Fill], from: MemberNumber, bytes: u64) -> Result<MemberNumber, Stay> {
    let most = whole_permille(fills) + NEAR_PERMILLE;
    let source = fills.iter().find(|fill| fill.member == from);
    let source = source.filter(|source| bytes > 0 && source.permille(0) > most);
    let source = source.ok_or(Stay::Level)?;
    fills
        .iter()
        .filter(|fill| fill.device != source.device)
        .filter(|fill| fill.permille(bytes) <= most)
        .min_by_key(|fill| (fill.permille(0), fill.member))
        .map(|fill| fill.member)
        .ok_or(Stay::TooMany)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(member: u16, device: u64, used: u64, total: u64) -> Fill {
        Fill {
            member: MemberNumber(member),
            device,
            used,
            total,
        }
    }

    #[test]
    fn bytes_go_from_the_full_to_the_empty_and_no_further() {
        let fills = [
            fill(0, 1, 900, 1000),
            fill(1, 2, 0, 1000),
            fill(2, 3, 500, 1000),
        ];
        assert_eq!(lighter(&fills, MemberNumber(0), 100), Ok(MemberNumber(1)));
        // The pool is 46 % full: no member gets more than that.
        assert_eq!(whole_permille(&fills), 466);
        assert_eq!(lighter(&fills, MemberNumber(0), 470), Ok(MemberNumber(1)));
        assert_eq!(lighter(&fills, MemberNumber(0), 490), Err(Stay::TooMany));
        assert_eq!(lighter(&fills, MemberNumber(1), 10), Err(Stay::Level));
        assert_eq!(lighter(&fills, MemberNumber(0), 0), Err(Stay::Level));
        assert_eq!(lighter(&fills, MemberNumber(9), 10), Err(Stay::Level));
        let all = [(MemberNumber(0), 900), (MemberNumber(2), 500)];
        assert_eq!(fuller(&fills), all);
    }

    #[test]
    fn a_neighbour_on_the_same_device_is_no_relief() {
        let fills = [
            fill(0, 1, 900, 1000),
            fill(1, 1, 900, 1000),
            fill(2, 2, 880, 1000),
        ];
        assert_eq!(
            lighter(&fills, MemberNumber(0), 10),
            Err(Stay::Level),
            "all are as full"
        );
        let fills = [
            fill(0, 1, 900, 1000),
            fill(1, 1, 900, 1000),
            fill(2, 2, 0, 1000),
        ];
        assert_eq!(lighter(&fills, MemberNumber(0), 10), Ok(MemberNumber(2)));
    }

    #[test]
    fn whatever_the_members_moving_ends_with_all_near_the_whole_or_stuck() {
        let mut seed = 0x2545_f491_4f6c_dd1du64;
        let mut next = move |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for _ in 0..500 {
            let mut fills: Vec<Fill> = (0..2 + next(5))
                .map(|at| {
                    let total = 1000 + next(100_000);
                    fill(at as u16, at, next(total), total)
                })
                .collect();
            let mut moves = 0;
            loop {
                let step = (0..fills.len()).find_map(|at| {
                    let bytes = (1 + next(40)).min(fills[at].used);
                    let to = lighter(&fills, fills[at].member, bytes).ok()?;
                    Some((at, usize::from(to.0), bytes))
                });
                let Some((from, to, bytes)) = step else {
                    break;
                };
                assert!(fills[to].permille(0) < fills[from].permille(0));
                fills[from].used -= bytes;
                fills[to].used += bytes;
                moves += 1;
                assert!(moves < 500_000, "{fills:?}");
            }
        }
    }
}
