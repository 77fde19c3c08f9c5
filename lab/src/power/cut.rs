// SPDX-License-Identifier: Apache-2.0
//! A power cut: what a disk has on its medium when the power goes at some record of its log.
//!
//! Before the last flush that was answered everything is there. Of what came after it any part may be, sector by sector, in any order:
//! since a later write may be kept where an earlier one is lost, keeping any subset gives all orders. It does not know file systems.

use super::chance::Chance;
use super::record::{Recording, lane_and_step};
use super::script::LANE_COUNT;
use super::sector::{NOBODY, SECTOR_BYTES, Stamp};
use crate::disk::log::{Change, Log};

/// What a disk does that it may not. With it the checks are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Lie {
    /// Nothing.
    #[default]
    None,
    /// Flushes are answered and are no barrier.
    Flush,
    /// Two writes of different files' content change places.
    Misdirect,
}

/// Where the power goes, and how much is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// So many records had happened.
    pub record: usize,
    /// Of writes after the last flush so many in a hundred are kept.
    pub kept_percent: u64,
    /// So many in a hundred are torn: any of their sectors are kept.
    pub torn_percent: u64,
    seed: u64,
}

impl Cut {
    /// Somewhere in the log; half of them just after something was acknowledged, where promises are youngest.
    pub fn random(seed: u64, log: &Log) -> Cut {
        let mut chance = Chance::new(seed, 0);
        let mut record = chance.below(log.len() as u64 + 1) as usize;
        if chance.percent(50) {
            let rest = (record..log.len()).find(|&at| matches!(log.get(at), Change::Mark { .. }));
            record = rest.map_or(log.len(), |mark| mark + 1);
        }
        Cut {
            record,
            kept_percent: chance.pick(&[0, 10, 50, 50, 90, 100]),
            torn_percent: chance.pick(&[0, 0, 20, 100]),
            seed: chance.next(),
        }
    }

    /// Steps of each lane that had been acknowledged.
    pub fn done(&self, log: &Log) -> Vec<usize> {
        let mut done = vec![0; LANE_COUNT as usize];
        for change in log.iter().take(self.record) {
            if let Change::Mark { number } = change {
                let (lane, step) = lane_and_step(number);
                done[lane] = step + 1;
            }
        }
        done
    }

    /// Records before this one are on the medium.
    fn barrier(&self, log: &Log, lie: Lie) -> usize {
        if lie == Lie::Flush {
            return 0;
        }
        (0..self.record)
            .rev()
            .find(|&at| log.get(at) == Change::Flush)
            .unwrap_or(0)
    }

    /// Makes `image` what the medium has.
    pub fn image(&self, recording: &Recording, lie: Lie, image: &mut Vec<u8>) {
        let log = &recording.log;
        image.clear();
        image.extend_from_slice(&recording.base);
        let mut chance = Chance::new(self.seed, 1);
        let barrier = self.barrier(log, lie);
        let swapped = match lie {
            Lie::Misdirect => two_writes(log, self.record, &mut chance),
            _ => None,
        };
        for at in 0..self.record {
            let place = match swapped {
                Some((one, other)) if at == one => offset_of(log.get(other)),
                Some((one, other)) if at == other => offset_of(log.get(one)),
                _ => None,
            };
            if at < barrier {
                store(log.get(at), place, image, |_| true);
            } else {
                self.store_some(log.get(at), place, image, &mut chance);
            }
        }
    }

    fn store_some(
        &self,
        change: Change,
        place: Option<u64>,
        image: &mut [u8],
        chance: &mut Chance,
    ) {
        if chance.percent(self.torn_percent) {
            store(change, place, image, |_| chance.percent(50));
        } else if chance.percent(self.kept_percent) {
            store(change, place, image, |_| true);
        }
    }
}

fn offset_of(change: Change) -> Option<u64> {
    match change {
        Change::Write { offset, .. } => Some(offset),
        _ => None,
    }
}

/// Two writes of the same length whose content is of different files.
fn two_writes(log: &Log, end: usize, chance: &mut Chance) -> Option<(usize, usize)> {
    let owner = |at: usize| match log.get(at) {
        Change::Write { bytes, .. } if bytes.len() >= SECTOR_BYTES => {
            let stamp = Stamp::of(&bytes[..SECTOR_BYTES])?;
            (stamp.file != NOBODY).then_some((at, stamp.file, bytes.len()))
        }
        _ => None,
    };
    let writes: Vec<(usize, u64, usize)> = (0..end).filter_map(owner).collect();
    for _ in 0..64.min(writes.len()) {
        let (one, other) = (chance.pick(&writes), chance.pick(&writes));
        if one.1 != other.1 && one.2 == other.2 {
            return Some((one.0, other.0));
        }
    }
    None
}

/// Writes the sectors of a change that are kept; at another place if it is misdirected.
fn store(
    change: Change,
    place: Option<u64>,
    image: &mut [u8],
    mut keeps: impl FnMut(usize) -> bool,
) {
    let (offset, length, bytes) = match change {
        Change::Write { offset, bytes } => (offset, bytes.len(), Some(bytes)),
        Change::Zeros { offset, length } | Change::Discard { offset, length } => {
            (offset, length as usize, None)
        }
        Change::Flush | Change::Mark { .. } => return,
    };
    let start = place.unwrap_or(offset) as usize;
    for from in (0..length).step_by(SECTOR_BYTES) {
        let to = (from + SECTOR_BYTES).min(length);
        if keeps(from / SECTOR_BYTES) {
            let target = &mut image[start + from..start + to];
            match bytes {
                Some(bytes) => target.copy_from_slice(&bytes[from..to]),
                None => target.fill(0),
            }
        }
    }
}
