// SPDX-License-Identifier: Apache-2.0
//! Whether one more stream can be promised its rate.
//!
//! Two tests. In the long run: transfer and positioning of all players must leave the margin free,
//! with visits no larger than the buffers allow. From here on: the scheduler itself is played
//! forward from the claims as they stand, newcomer included, and no player may be late, the
//! newcomer's start-up ramp included.

use super::RefinedModel;
use super::policy::{Choice, Claim, Load, Order, choose};
use crate::units::*;
use alloc::vec::Vec;

/// Why a stream is not promised its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Transfer and positioning would take more than the device has. Thousandths of its time.
    Capacity {
        /// The time that all of them would need.
        needed_permille: u64,
    },
    /// The device could, but one of them would be late while the newcomer starts.
    Start {
        /// By how much, in the dry run.
        late_by: Duration,
    },
    /// The buffers are too few for so many.
    Buffers {
        /// The buffers that all of them would need at least. Units: bytes.
        needed: ByteCount,
    },
}

/// A claim, and the facts by which the dry run lets it be consumed.
#[derive(Clone, Copy, Debug)]
pub struct Player {
    /// The claim as it stands.
    pub claim: Claim,
    /// From the request for a byte until it is due: buffered bytes are counted from that request.
    pub lead: Duration,
    /// Bytes that do not move the deadline: a read is due as a whole, and so much of its first one
    /// is not fetched yet.
    pub first_read: ByteCount,
    /// Its reader cuts away after so much, and bytes fetched ahead are lost then; None: not known.
    pub run: Option<ByteCount>,
    /// It is read along the runs that follow: at its cuts the device positions, and nothing is
    /// lost.
    pub is_rehearsed: bool,
}

/// The facts of a device that the dry run needs.
#[derive(Clone, Copy, Debug)]
pub struct Device<'a> {
    /// Its model.
    pub model: &'a RefinedModel,
    /// When it has done all that was sent to it.
    pub free_at: Instant,
    /// Where its last request ends.
    pub head: u64,
    /// Longest single request. Units: bytes.
    pub chunk: u64,
    /// Kept free, in thousandths.
    pub margin_permille: u32,
}

/// Never promised, so that there is time for clients without a contract: `policy` lets one request
/// of theirs through every 1.5 s, and that must not come out of contracts. Thousandths of the time.
const BEST_EFFORT_PERMILLE: u64 = 20;

/// How far the dry run looks.
const HORIZON: Duration = Duration::from_s(12);

/// The long run, in thousandths of the device's time that `players` need: transfer, positioning,
/// and the costs of cuts. At a cut half of the bytes read ahead is lost in the mean, and the device
/// positions once more.
pub fn needed_permille(model: &RefinedModel, players: &[Player]) -> u64 {
    needed(model, players, cuts)
}

/// The same, with cuts at this price.
fn needed(model: &RefinedModel, players: &[Player], cuts: fn(&Player) -> (u64, u64)) -> u64 {
    let mut needed_ns: u64 = 0;
    let mut visits_milli: u64 = 0;
    let mut most_visits_milli: u64 = 0;
    // Of readers and writers the dearer.
    let mut positioning = Duration::ZERO;
    for player in players {
        let rate = player.claim.rate;
        let (lost, cuts_per_s_milli) = cuts(player);
        let transfer = rate.0.saturating_add(lost);
        needed_ns = needed_ns.saturating_add(model.transfer_of(player.claim.writes, transfer).0);
        positioning = positioning.max(model.step_of(player.claim.writes, players.len()));
        // A visit can be as large as the buffers, less the bytes that must stay in them while the
        // others are visited.
        let visit = (player.claim.cap * 7 / 10).max(1);
        let visits_per_s_milli = transfer.saturating_mul(1000) / visit + cuts_per_s_milli;
        visits_milli = visits_milli.saturating_add(visits_per_s_milli);
        most_visits_milli = most_visits_milli.max(visits_per_s_milli);
    }
    // The player that is visited most often is so in turn with others.
    if players.len() > 1 {
        visits_milli = visits_milli.max(most_visits_milli.saturating_mul(2));
    }
    needed_ns = needed_ns.saturating_add(positioning.0.saturating_mul(visits_milli) / 1000);
    needed_ns / (NS_PER_S / 1000)
}

/// Bytes read and lost at cuts, in bytes a second, and cuts in 1,000 seconds.
fn cuts(player: &Player) -> (u64, u64) {
    let Some(run) = player.run else {
        return (0, 0);
    };
    let (rate, run) = (player.claim.rate.0, run.0.max(1));
    let lost = u128::from(rate) * u128::from(player.claim.cap / 2) / u128::from(run);
    // No more than twice the rate of play: part of these bytes is in the cache from before.
    let lost = u64::try_from(lost).unwrap_or(u64::MAX).min(2 * rate);
    let lost = if player.is_rehearsed { 0 } else { lost };
    (lost, rate.saturating_mul(1000) / run)
}

/// Play the scheduler forward. Ok: no player is late.
pub fn dry_run(
    device: &Device<'_>,
    now: Instant,
    players: &[Player],
    order: &mut Order,
) -> Result<(), Refusal> {
    let needed_permille = needed_permille(device.model, players);
    let foreseen = |player: &Player| match player.is_rehearsed {
        true => cuts(player),
        false => (0, 0),
    };
    let without_cuts = needed(device.model, players, foreseen);
    let of_cuts = needed_permille.saturating_sub(without_cuts);
    // Cuts do not come in turn: for those that come together half of their cost is kept free. Not
    // of those that are foreseen, whose bytes are fetched at any time before.
    let kept = u64::from(device.margin_permille) + BEST_EFFORT_PERMILLE + of_cuts / 2;
    if needed_permille + kept > 1000 {
        return Err(Refusal::Capacity { needed_permille });
    }
    // At the model's price, and with the margin on top, so that a contract survives a device that
    // is that much slower. Both, since at another price others go first, and other claims come
    // late.
    play(device, now, players, 0, order)?;
    play(device, now, players, device.margin_permille, order)
}

/// Whether all players will be in time as things stand, as far as can be seen, even if the long run
/// says no.
pub fn in_time(device: &Device<'_>, now: Instant, players: &[Player], order: &mut Order) -> bool {
    play(device, now, players, 0, order).is_ok()
}

/// Play the scheduler forward on a device that is so many thousandths slower.
fn play(
    device: &Device<'_>,
    now: Instant,
    players: &[Player],
    slower_permille: u32,
    order: &mut Order,
) -> Result<(), Refusal> {
    let mut players = players.to_vec();
    let mut claims: Vec<Claim> = players.iter().map(|player| player.claim).collect();
    let mut at = device.free_at;
    let mut head = device.head;
    let mut visiting = None;
    let mut visit_given = 0;
    let end = now + HORIZON;
    let dearer =
        |time: Duration| Duration(time.0.saturating_mul(1000 + u64::from(slower_permille)) / 1000);
    while at < end {
        let mut full = true;
        for (claim, player) in claims.iter_mut().zip(players.iter()) {
            // Bytes asked of the device and not yet asked for by the player.
            let level = claim
                .rate
                .bytes_in(claim.deadline.since(at + player.lead))
                .0;
            claim.room = claim.cap.saturating_sub(level);
            full &= level >= claim.cap / 2;
        }
        if full {
            return Ok(());
        }
        let load = Load {
            model: device.model,
            free_at: at,
            head,
            claims: &claims,
            visiting,
            visit_given,
            chunk: device.chunk,
            best_effort: None,
        };
        match choose(&load, order) {
            Choice::Stream(index) => {
                let claim = &mut claims[index];
                let bytes = device.chunk.min(claim.room.max(1));
                let distance = claim.physical.abs_diff(head);
                at = at + dearer(device.model.request_of(claim.writes, distance, bytes));
                if at > claim.deadline {
                    return Err(Refusal::Start {
                        late_by: at.since(claim.deadline),
                    });
                }
                let player = &mut players[index];
                let first = bytes.min(player.first_read.0);
                player.first_read.0 -= first;
                player.lead = player.lead - claim.rate.time_for(ByteCount(first));
                claim.deadline = claim.deadline + claim.rate.time_for(ByteCount(bytes - first));
                claim.physical = claim.physical.saturating_add(bytes);
                head = claim.physical;
                if visiting != Some(index) {
                    visit_given = 0;
                }
                visit_given += bytes;
                visiting = Some(index);
            }
            Choice::BestEffort | Choice::Nobody => {
                visiting = None;
                at = at + Duration::from_ms(10);
            }
        }
        if let Some(late) = claims
            .iter()
            .map(|claim| claim.deadline)
            .min()
            .filter(|&due| due < at)
        {
            return Err(Refusal::Start {
                late_by: at.since(late),
            });
        }
    }
    Ok(())
}
