// SPDX-License-Identifier: Apache-2.0
//! A power cut: the content of disks' media when the power goes at some record of their logs.
//!
//! It goes for all at one instant. All changes that came to a disk before the last flush that it
//! answered are on its medium. Of later changes any part may be, sector by sector, in any order:
//! since a later write may be kept and an earlier one lost, keeping any subset gives all orders.
//!
//! One thing is never torn: ext4's superblock. It is two sectors with one checksum, which ext4
//! writes in place and reads before the journal. So no ext4 survives a disk that writes half of it,
//! as `--lie superblock` shows. Disks with physical sectors of 4 KiB do not tear it.

use std::ops::Range;

use super::chance::Chance;
use super::record::{Recording, lane_and_step};
use super::script::LANE_COUNT;
use super::sector::{NOBODY, SECTOR_BYTES, Stamp};
use crate::disk::FileSystem;
use crate::disk::log::Change;

/// Sectors of ext4's superblock, the same for all block sizes.
const SUPERBLOCK: Range<u64> = 2..4;

/// A forbidden act of a disk or a door, to test the checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Lie {
    /// Nothing.
    #[default]
    None,
    /// The disk answers the last flush before the cut without having flushed.
    Flush,
    /// The disk answers all flushes without having flushed.
    Flushes,
    /// Half of ext4's superblock may be new and half of it old.
    Superblock,
    /// Two writes of different files' content change places.
    Misdirect,
    /// The door lies, not the disk: it syncs files and does not ask the daemon for their bytes.
    Door,
}

/// When the power goes, and how much is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Records of all disks before the cut.
    pub record: usize,
    /// The loss of each disk. Losses differ: one disk may keep a name of bytes that another lost.
    pub losses: Vec<Loss>,
    seed: u64,
}

/// The loss of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Of a hundred writes after the last flush that are not torn so many are kept.
    pub kept_percent: u64,
    /// Of a hundred writes after the last flush so many are torn: any of their sectors are kept.
    pub torn_percent: u64,
}

impl Cut {
    /// A cut somewhere in the logs: a quarter of cuts is just after a mark, when the step's promise
    /// is youngest; half of them just before a flush, when most writes are at stake.
    pub fn random(seed: u64, recording: &Recording) -> Cut {
        let mut chance = Chance::new(seed, 0);
        let all = recording.len();
        let mut record = chance.below(all as u64 + 1) as usize;
        let place = chance.below(4);
        let is_there = |at: &usize| match recording.get(*at).1 {
            Change::Mark { .. } => place == 1,
            Change::Flush => place >= 2,
            _ => false,
        };
        if place > 0 {
            let found = (record..all).find(is_there);
            record = found.map_or(all, |at| at + usize::from(place == 1));
        }
        let mut loss = |_| Loss {
            kept_percent: chance.pick(&[0, 10, 50, 50, 90]),
            torn_percent: chance.pick(&[0, 0, 20, 100]),
        };
        Cut {
            record,
            losses: recording.disks.iter().map(&mut loss).collect(),
            seed: chance.number(),
        }
    }

    /// Number of steps of each lane that were acknowledged before the cut.
    pub fn done(&self, recording: &Recording) -> Vec<usize> {
        let mut done = vec![0; LANE_COUNT as usize];
        for at in 0..self.record {
            if let (_, Change::Mark { number }) = recording.get(at) {
                let (lane, step) = lane_and_step(number);
                done[lane] = step + 1;
            }
        }
        done
    }

    /// For each disk the record before which all its changes are on the medium.
    fn barriers(&self, recording: &Recording, lie: Lie) -> Vec<usize> {
        let forgotten = match lie {
            Lie::None | Lie::Superblock | Lie::Misdirect | Lie::Door => 0,
            Lie::Flush => 1,
            Lie::Flushes => usize::MAX,
        };
        let barrier = |disk| {
            (0..self.record)
                .rev()
                .filter(|&at| recording.get(at) == (disk, Change::Flush))
                .nth(forgotten)
                .unwrap_or(0)
        };
        (0..recording.disks.len()).map(barrier).collect()
    }

    /// Fills each of `images` with the content of that disk's medium; returns the fate of the
    /// writes that were not safe.
    pub fn images(&self, recording: &Recording, lie: Lie, images: &mut Vec<Vec<u8>>) -> Fate {
        images.resize_with(recording.disks.len(), Vec::new);
        for (image, disk) in images.iter_mut().zip(&recording.disks) {
            image.clear();
            image.extend_from_slice(&disk.base);
        }
        let mut chance = Chance::new(self.seed, 1);
        let barriers = self.barriers(recording, lie);
        let swapped = match lie {
            Lie::Misdirect => two_writes(recording, self.record, &mut chance),
            _ => None,
        };
        let mut fate = Fate::default();
        for at in 0..self.record {
            let place = match swapped {
                Some((one, other)) if at == one => offset_of(recording.get(other).1),
                Some((one, other)) if at == other => offset_of(recording.get(one).1),
                _ => None,
            };
            let (disk, change) = recording.get(at);
            let joined = match recording.disks[disk].file_system {
                FileSystem::Ext4 if lie != Lie::Superblock => SUPERBLOCK,
                _ => 0..0,
            };
            let image = &mut images[disk];
            if at < barriers[disk] {
                store(change, place, image, &mut |_| true);
            } else if !matches!(change, Change::Flush | Change::Mark { .. }) {
                fate.count(self.losses[disk].keep_some(&mut chance), |keep| {
                    store(change, place, image, &mut |sector| {
                        keep.keeps(sector, &joined)
                    });
                });
            }
        }
        fate
    }
}

impl Loss {
    fn keep_some<'a>(&self, chance: &'a mut Chance) -> Keep<'a> {
        if chance.percent(self.torn_percent) {
            Keep::Sectors(chance, false)
        } else if chance.percent(self.kept_percent) {
            Keep::Whole
        } else {
            Keep::Nothing
        }
    }
}

/// The part that is kept of one write.
enum Keep<'a> {
    Whole,
    Nothing,
    /// Each sector by chance, and the last decision.
    Sectors(&'a mut Chance, bool),
}

impl Keep<'_> {
    /// Called in order for each sector of a write. The joined sectors share the fate of the first
    /// of them.
    fn keeps(&mut self, sector: u64, joined: &Range<u64>) -> bool {
        match self {
            Keep::Whole => true,
            Keep::Nothing => false,
            Keep::Sectors(chance, last) => {
                if !joined.contains(&sector) || sector == joined.start {
                    *last = chance.percent(50);
                }
                *last
            }
        }
    }
}

/// The fate of the writes after the last flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// Writes that are whole on the medium.
    pub kept: u64,
    /// Writes with some of their sectors there.
    pub torn: u64,
    /// Writes that are lost.
    pub lost: u64,
}

impl Fate {
    fn count(&mut self, mut keep: Keep, act: impl FnOnce(&mut Keep)) {
        *match keep {
            Keep::Whole => &mut self.kept,
            Keep::Sectors(..) => &mut self.torn,
            Keep::Nothing => &mut self.lost,
        } += 1;
        act(&mut keep);
    }
}

fn offset_of(change: Change) -> Option<u64> {
    match change {
        Change::Write { offset, .. } => Some(offset),
        _ => None,
    }
}

/// Two writes of the same length to one disk with content of different files.
fn two_writes(recording: &Recording, end: usize, chance: &mut Chance) -> Option<(usize, usize)> {
    let owner = |at: usize| match recording.get(at) {
        (disk, Change::Write { bytes, .. }) if bytes.len() >= SECTOR_BYTES => {
            let stamp = Stamp::of(&bytes[..SECTOR_BYTES])?;
            (stamp.file != NOBODY).then_some((at, stamp.file, (disk, bytes.len())))
        }
        _ => None,
    };
    let writes: Vec<(usize, u64, (usize, usize))> = (0..end).filter_map(owner).collect();
    for _ in 0..64.min(writes.len()) {
        let (one, other) = (chance.pick(&writes), chance.pick(&writes));
        if one.1 != other.1 && one.2 == other.2 {
            return Some((one.0, other.0));
        }
    }
    None
}

/// Writes the sectors of a change that are kept; to `place` if the change is misdirected.
fn store(change: Change, place: Option<u64>, image: &mut [u8], keeps: &mut dyn FnMut(u64) -> bool) {
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
        if keeps(((start + from) / SECTOR_BYTES) as u64) {
            let target = &mut image[start + from..start + to];
            match bytes {
                Some(bytes) => target.copy_from_slice(&bytes[from..to]),
                None => target.fill(0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::record::RecordedDisk;
    use super::*;
    use crate::disk::log::Log;

    const BLOCK: u64 = 4096;
    const BLOCKS: u64 = 64;

    /// The requests to a disk: time, offset, bytes; without bytes a flush, or a mark of that
    /// number.
    fn disk(told: &[(u64, u64, &[u8])]) -> RecordedDisk {
        let mut bytes = b"RUSHLOG\x02".to_vec();
        bytes.extend((BLOCK * BLOCKS).to_le_bytes());
        for &(when, offset, content) in told {
            let kind = match (content, offset) {
                ([], 0) => 4,
                ([], _) => 5,
                _ => 1,
            };
            let head = [kind, offset, content.len() as u64, when];
            bytes.extend(head.iter().flat_map(|number| number.to_le_bytes()));
            bytes.extend_from_slice(content);
        }
        RecordedDisk {
            file_system: FileSystem::Ext4,
            base: Arc::new(vec![0; (BLOCK * BLOCKS) as usize]),
            log: Log::parse(bytes).unwrap(),
        }
    }

    fn block_of(number: u64) -> Vec<u8> {
        vec![number as u8 + 1; BLOCK as usize]
    }

    /// Two blocks, a flush and a mark, the rest of the blocks; each sector is full of the number of
    /// its block plus one.
    fn recording() -> Recording {
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(block_of).collect();
        let mut told: Vec<(u64, u64, &[u8])> = Vec::new();
        for (number, block) in (0..).zip(&blocks) {
            told.push((1, number * BLOCK, block));
            if number == 1 {
                told.extend([(1, 0, &[][..]), (1, (1 << 32) | 6, &[])]);
            }
        }
        Recording::of(vec![disk(&told)], Vec::new())
    }

    fn cut(kept_percent: u64, torn_percent: u64) -> Cut {
        let loss = Loss {
            kept_percent,
            torn_percent,
        };
        Cut {
            record: BLOCKS as usize + 2,
            losses: vec![loss; 2],
            seed: 1,
        }
    }

    /// For each block the number of its sectors on the medium, which must have its content.
    fn sectors(cut: Cut, lie: Lie) -> (Vec<usize>, Fate) {
        let mut images = Vec::new();
        let fate = cut.images(&recording(), lie, &mut images);
        (counts(&images[0]), fate)
    }

    fn counts(image: &[u8]) -> Vec<usize> {
        let count = |(block, bytes): (usize, &[u8])| {
            let sectors = bytes.chunks(SECTOR_BYTES);
            sectors
                .filter(|sector| {
                    assert!(sector.iter().all(|&b| b == sector[0]));
                    assert!(sector[0] == 0 || sector[0] == block as u8 + 1);
                    sector[0] > 0
                })
                .count()
        };
        image
            .chunks(BLOCK as usize)
            .enumerate()
            .map(count)
            .collect()
    }

    #[test]
    fn flushed_is_there_and_of_the_rest_whole_writes_or_sectors_as_chance_has_it() {
        let (counts, fate) = sectors(cut(50, 0), Lie::None);
        assert_eq!(counts[..2], [8, 8]);
        assert!(counts.iter().all(|&count| count == 0 || count == 8));
        assert!(fate.kept > 10 && fate.lost > 10 && fate.kept + fate.lost == BLOCKS - 2);
        let (counts, fate) = sectors(cut(0, 100), Lie::None);
        assert_eq!(counts[..2], [8, 8]);
        assert!(counts[2..].iter().any(|&count| count > 0 && count < 8));
        assert_eq!(fate.torn, BLOCKS - 2);
        assert_eq!(sectors(cut(0, 0), Lie::None).0[1..3], [8, 0]);
        assert_eq!(sectors(cut(100, 0), Lie::None).0, [8; BLOCKS as usize]);
    }

    #[test]
    fn forgotten_flush_is_no_barrier() {
        assert_eq!(sectors(cut(0, 0), Lie::Flush).0, [0; BLOCKS as usize]);
        assert_eq!(sectors(cut(0, 0), Lie::Flushes).0, [0; BLOCKS as usize]);
    }

    #[test]
    fn superblock_is_torn_only_by_a_disk_that_lies() {
        let torn = |lie| {
            (0..32u64).any(|seed| {
                let cut = Cut {
                    record: 1,
                    seed,
                    ..cut(0, 100)
                };
                let mut images = Vec::new();
                cut.images(&recording(), lie, &mut images);
                images[0][2 * SECTOR_BYTES] != images[0][3 * SECTOR_BYTES]
            })
        };
        assert!(!torn(Lie::None));
        assert!(torn(Lie::Superblock));
    }

    #[test]
    fn steps_are_done_when_their_mark_is_before_the_cut() {
        let recording = recording();
        assert_eq!(cut(0, 0).done(&recording), [0, 7, 0]);
        let early = Cut {
            record: 3,
            ..cut(0, 0)
        };
        assert_eq!(early.done(&recording), [0, 0, 0]);
    }

    #[test]
    fn flush_of_one_disk_is_none_of_another_and_time_orders_them() {
        let blocks: Vec<Vec<u8>> = (0..3).map(block_of).collect();
        let one = disk(&[(10, 0, &blocks[0]), (30, 0, &[]), (50, BLOCK, &blocks[1])]);
        let other = disk(&[(20, 0, &blocks[0]), (40, BLOCK, &blocks[1]), (60, 0, &[])]);
        let recording = Recording::of(vec![one, other], Vec::new());
        let disks: Vec<usize> = (0..6).map(|at| recording.get(at).0).collect();
        assert_eq!(disks, [0, 1, 0, 1, 0, 1]);
        let kept = |record| {
            let cut = Cut {
                record,
                ..cut(0, 0)
            };
            let mut images = Vec::new();
            cut.images(&recording, Lie::None, &mut images);
            let blocks = images
                .iter()
                .map(|image| counts(image).iter().sum::<usize>() / 8);
            blocks.collect::<Vec<_>>()
        };
        // Neither disk has flushed; then the first has, then the second has, too.
        assert_eq!(kept(2), [0, 0]);
        assert_eq!(kept(5), [1, 0]);
        assert_eq!(kept(6), [1, 2]);
    }
}
