// SPDX-License-Identifier: Apache-2.0
//! Which bytes each buffer holds, and which may be taken. Holds slot numbers, never bytes.
//!
//! A slot is *free*, *idle* or *busy*. An idle one is owned by a block of a file and stands in a
//! list, so that the least recently used goes first. A busy one is pinned by a client, held for a
//! stream, being filled, or an orphan that waits for its last user. Only idle and free slots are
//! ever given away. A slot whose block was dropped while it was in use becomes an orphan: it
//! answers no lookup any more and its last user frees it, so no reader sees bytes change owner
//! under its hands.

mod pages;

pub use pages::{PAGES_MAX, PageSet};

use crate::units::{FileId, SlotIndex};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

const NONE: u32 = u32::MAX;

/// A block of a file: its number is the offset divided by the slot size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its file.
    pub file: FileId,
    /// Its number in the file.
    pub number: u64,
}

/// The users of a slot, by their own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// Clients and writes that copy from it.
    pub pins: u32,
    /// Streams that will want it.
    pub holds: u32,
    /// Device requests that fill it.
    pub fills: u32,
}

#[derive(Clone, Debug)]
struct Slot {
    owner: Option<Block>,
    valid: PageSet,
    filling: PageSet,
    /// Pages that were changed while being filled: bytes that arrive for them are old and not kept.
    dropped: PageSet,
    fill_count: u32,
    pin_count: u32,
    hold_count: u32,
    /// It has recorded bytes that no client has used since.
    only_recorded: bool,
    listed: bool,
    newer: u32,
    older: u32,
}

/// Idle slots, by when they were used last.
#[derive(Clone, Copy, Debug)]
struct Idle {
    newest: u32,
    oldest: u32,
    count: u32,
}

impl Idle {
    const EMPTY: Idle = Idle {
        newest: NONE,
        oldest: NONE,
        count: 0,
    };
}

/// Once no slot is free, those with recorded bytes that were not read are at most this part of all
/// slots, as one in so many.
const RECORDED_PART: u32 = 8;

/// All slots of the segment.
#[derive(Clone, Debug)]
pub struct Cache {
    slots: Vec<Slot>,
    free: Vec<SlotIndex>,
    /// Idle slots that a client has used.
    used: Idle,
    /// Idle slots that are `only_recorded`.
    recorded: Idle,
    held_count: u32,
    pinned_count: u32,
}

impl Cache {
    /// `slot_count` free slots.
    pub fn new(slot_count: u32) -> Cache {
        let empty = Slot {
            owner: None,
            valid: PageSet::EMPTY,
            filling: PageSet::EMPTY,
            dropped: PageSet::EMPTY,
            fill_count: 0,
            pin_count: 0,
            hold_count: 0,
            only_recorded: false,
            listed: false,
            newer: NONE,
            older: NONE,
        };
        Cache {
            slots: alloc::vec![empty; slot_count as usize],
            free: (0..slot_count).rev().map(SlotIndex).collect(),
            used: Idle::EMPTY,
            recorded: Idle::EMPTY,
            held_count: 0,
            pinned_count: 0,
        }
    }

    /// Slots never used or given back.
    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Slots that could be taken now.
    pub fn takeable_count(&self) -> u32 {
        self.free_count() + self.idle_count()
    }

    fn idle_count(&self) -> u32 {
        self.used.count + self.recorded.count
    }

    /// Slots held for streams.
    pub fn held_count(&self) -> u32 {
        self.held_count
    }

    /// Slots pinned by clients.
    pub fn pinned_count(&self) -> u32 {
        self.pinned_count
    }

    /// The block whose bytes it has.
    pub fn owner(&self, index: SlotIndex) -> Option<Block> {
        self.slots.get(index.0 as usize)?.owner
    }

    /// Slots that are a block's.
    pub fn owned_count(&self) -> u32 {
        self.slots
            .iter()
            .filter(|slot| slot.owner.is_some())
            .count() as u32
    }

    /// Append a sentence for each slot whose users or list are not as `users` says, and for each
    /// count that is wrong. `users`: one for each slot. The time that it takes grows with the
    /// slots.
    pub fn check(&self, users: &[Users], odd: &mut Vec<String>) {
        let (mut pinned, mut held, mut idle, mut free, mut recorded) = (0, 0, 0, 0, 0);
        for (index, (slot, &wanted)) in self.slots.iter().zip(users).enumerate() {
            let counted = Users {
                pins: slot.pin_count,
                holds: slot.hold_count,
                fills: slot.fill_count,
            };
            if counted != wanted {
                odd.push(format!(
                    "buffer {index} counts {counted:?}, but has {wanted:?}"
                ));
            }
            let is_idle = counted == Users::default() && slot.owner.is_some();
            if slot.listed != is_idle {
                odd.push(format!(
                    "buffer {index} is idle: {is_idle}, but listed: {}",
                    slot.listed
                ));
            }
            if (slot.fill_count == 0) != slot.filling.is_empty() {
                odd.push(format!(
                    "buffer {index} is filled by {} requests, with {:?}",
                    slot.fill_count, slot.filling
                ));
            }
            if !slot.valid.and(slot.filling).is_empty() {
                odd.push(format!(
                    "buffer {index} is filled over bytes that are there"
                ));
            }
            pinned += u32::from(slot.pin_count > 0);
            held += u32::from(slot.hold_count > 0);
            idle += u32::from(is_idle);
            recorded += u32::from(is_idle && slot.only_recorded);
            free += u32::from(counted == Users::default() && slot.owner.is_none());
        }
        let said = (
            self.pinned_count,
            self.held_count,
            self.idle_count(),
            self.free_count(),
        );
        let found = (pinned, held, idle, free);
        if said != found {
            odd.push(format!(
                "buffers pinned, held, idle and free are counted {said:?}, but are {found:?}"
            ));
        }
        if self.recorded.count != recorded {
            let said = self.recorded.count;
            odd.push(format!(
                "buffers recorded and not read are counted {said}, but are {recorded}"
            ));
        }
    }

    /// Take a slot for `block`: a free one, or the idle one that is the least likely to be read
    /// again, whose former block is returned so that the file can forget it. None when every slot
    /// is busy.
    ///
    /// Used slots go by the time of their last use. Slots with recorded bytes that no client read
    /// may take their place up to a part of the cache: most of them are never asked for, and hours
    /// of recording would leave nothing of the clips that clients work with.
    pub fn take(&mut self, block: Block) -> Option<(SlotIndex, Option<Block>)> {
        let recorded_max = self.slots.len() as u32 / RECORDED_PART;
        let oldest = match (self.used.oldest, self.recorded.oldest) {
            (NONE, recorded) => recorded,
            (_, recorded) if recorded != NONE && self.recorded.count >= recorded_max => recorded,
            (used, _) => used,
        };
        let (index, evicted) = match self.free.pop() {
            Some(index) => (index, None),
            None if oldest == NONE => return None,
            None => {
                let index = SlotIndex(oldest);
                self.unlist(index);
                let evicted = self.slot(index).owner;
                (index, evicted)
            }
        };
        let slot = self.slot_mut(index);
        slot.owner = Some(block);
        slot.valid = PageSet::EMPTY;
        slot.dropped = PageSet::EMPTY;
        slot.only_recorded = false;
        // Not listed yet: the caller fills, holds or pins it, and `settle` lists it afterwards.
        Some((index, evicted))
    }

    /// Pages whose bytes are there.
    pub fn valid(&self, index: SlotIndex) -> PageSet {
        self.slot(index).valid
    }

    /// Pages on their way from the device that will be kept.
    pub fn coming(&self, index: SlotIndex) -> PageSet {
        let slot = self.slot(index);
        slot.filling.without(slot.dropped)
    }

    /// Pages with device I/O in flight, kept or not: no other request may fill them.
    pub fn filling(&self, index: SlotIndex) -> PageSet {
        self.slot(index).filling
    }

    /// True while a client may be copying from it.
    pub fn is_pinned(&self, index: SlotIndex) -> bool {
        self.slot(index).pin_count > 0
    }

    /// Device I/O into `pages` starts. They were neither valid nor being filled.
    pub fn fill_begins(&mut self, index: SlotIndex, pages: PageSet) {
        let slot = self.slot_mut(index);
        assert!(
            slot.filling.and(pages).is_empty() && slot.valid.and(pages).is_empty(),
            "two fills of one page, or a fill over bytes a reader may hold"
        );
        slot.filling = slot.filling.or(pages);
        slot.fill_count += 1;
        self.settle(index);
    }

    /// That I/O ended; `arrived` of `pages` hold bytes now, unless they were changed meanwhile.
    pub fn fill_ends(&mut self, index: SlotIndex, pages: PageSet, arrived: PageSet) {
        let slot = self.slot_mut(index);
        slot.filling = slot.filling.without(pages);
        slot.fill_count -= 1;
        if slot.owner.is_some() {
            slot.valid = slot.valid.or(arrived.and(pages).without(slot.dropped));
        }
        slot.dropped = slot.dropped.without(pages);
        self.settle(index);
    }

    /// A slot that was just taken will get recorded bytes that no client has asked for.
    pub fn mark_recorded(&mut self, index: SlotIndex) {
        let slot = self.slot_mut(index);
        assert!(!slot.listed, "listed among those that were used");
        slot.only_recorded = true;
    }

    /// A client starts copying from it.
    pub fn pin(&mut self, index: SlotIndex) {
        self.mark_used(index);
        let slot = self.slot_mut(index);
        slot.pin_count += 1;
        if slot.pin_count == 1 {
            self.pinned_count += 1;
        }
        self.settle(index);
    }

    /// The client has ended that.
    pub fn unpin(&mut self, index: SlotIndex) {
        let slot = self.slot_mut(index);
        slot.pin_count -= 1;
        if slot.pin_count == 0 {
            self.pinned_count -= 1;
        }
        self.settle(index);
    }

    /// A stream will want it.
    pub fn hold(&mut self, index: SlotIndex) {
        self.mark_used(index);
        let slot = self.slot_mut(index);
        slot.hold_count += 1;
        if slot.hold_count == 1 {
            self.held_count += 1;
        }
        self.settle(index);
    }

    /// The stream does not want it any more.
    pub fn unhold(&mut self, index: SlotIndex) {
        let slot = self.slot_mut(index);
        slot.hold_count -= 1;
        if slot.hold_count == 0 {
            self.held_count -= 1;
        }
        self.settle(index);
    }

    /// It was used: now it is the last to be evicted.
    pub fn touch(&mut self, index: SlotIndex) {
        if self.slot(index).listed {
            self.unlist(index);
            self.slot_mut(index).only_recorded = false;
            self.settle(index);
        }
    }

    fn mark_used(&mut self, index: SlotIndex) {
        if self.slot(index).only_recorded {
            if self.slot(index).listed {
                self.unlist(index);
            }
            self.slot_mut(index).only_recorded = false;
        }
    }

    /// Bytes of `pages` are no longer the file's; those on their way are old too. A pinned slot
    /// must be orphaned instead (asserted): its bytes may be refilled at once.
    pub fn invalidate(&mut self, index: SlotIndex, pages: PageSet) {
        let slot = self.slot_mut(index);
        assert!(slot.pin_count == 0, "pages refilled under a reader");
        slot.valid = slot.valid.without(pages);
        slot.dropped = slot.dropped.or(slot.filling.and(pages));
    }

    /// Bytes on their way into `pages` may be old; those that are there are not.
    pub fn outdate(&mut self, index: SlotIndex, pages: PageSet) {
        let slot = self.slot_mut(index);
        slot.dropped = slot.dropped.or(slot.filling.and(pages));
    }

    /// Take the block from this slot; the slot's last user frees it.
    pub fn orphan(&mut self, index: SlotIndex) {
        let slot = self.slot_mut(index);
        slot.owner = None;
        slot.valid = PageSet::EMPTY;
        self.settle(index);
    }

    /// Put the slot where its condition says: the free list, the used list, or neither.
    fn settle(&mut self, index: SlotIndex) {
        let slot = self.slot(index);
        let busy = slot.pin_count > 0 || slot.hold_count > 0 || slot.fill_count > 0;
        let (listed, owned) = (slot.listed, slot.owner.is_some());
        if listed && (busy || !owned) {
            self.unlist(index);
        }
        if busy {
            return;
        }
        if !owned {
            debug_assert!(!self.free.contains(&index), "freed twice");
            self.free.push(index);
        } else if !listed {
            self.list_newest(index);
        }
    }

    fn list_newest(&mut self, index: SlotIndex) {
        let older = self.idle(index).newest;
        let slot = self.slot_mut(index);
        slot.listed = true;
        slot.newer = NONE;
        slot.older = older;
        match older {
            NONE => self.idle(index).oldest = index.0,
            _ => self.slot_mut(SlotIndex(older)).newer = index.0,
        }
        let idle = self.idle(index);
        idle.newest = index.0;
        idle.count += 1;
    }

    fn unlist(&mut self, index: SlotIndex) {
        let slot = self.slot_mut(index);
        let (newer, older) = (slot.newer, slot.older);
        slot.listed = false;
        slot.newer = NONE;
        slot.older = NONE;
        match newer {
            NONE => self.idle(index).newest = older,
            _ => self.slot_mut(SlotIndex(newer)).older = older,
        }
        match older {
            NONE => self.idle(index).oldest = newer,
            _ => self.slot_mut(SlotIndex(older)).newer = newer,
        }
        self.idle(index).count -= 1;
    }

    /// The list it belongs to.
    fn idle(&mut self, index: SlotIndex) -> &mut Idle {
        match self.slot(index).only_recorded {
            true => &mut self.recorded,
            false => &mut self.used,
        }
    }

    // Slot numbers come from `take` alone, so the index is in range.
    fn slot(&self, index: SlotIndex) -> &Slot {
        &self.slots[index.0 as usize]
    }

    fn slot_mut(&mut self, index: SlotIndex) -> &mut Slot {
        &mut self.slots[index.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> Block {
        Block {
            file: FileId(1),
            number,
        }
    }

    fn filled(cache: &mut Cache, number: u64) -> SlotIndex {
        let (index, _) = cache.take(block(number)).expect("a slot");
        cache.fill_begins(index, PageSet::run(0, 256));
        cache.fill_ends(index, PageSet::run(0, 256), PageSet::run(0, 256));
        index
    }

    #[test]
    fn least_recently_used_goes_first_and_says_whose_it_was() {
        let mut cache = Cache::new(2);
        let first = filled(&mut cache, 0);
        filled(&mut cache, 1);
        cache.touch(first);
        let (_, evicted) = cache.take(block(2)).expect("a slot");
        assert_eq!(evicted, Some(block(1)));
    }

    /// Hours of recordings without a player leave the clips that clients work with in the cache.
    #[test]
    fn what_is_recorded_takes_a_part_of_what_was_used_and_no_more() {
        let slot_count = 64;
        let mut cache = Cache::new(slot_count);
        for number in 0..u64::from(slot_count) {
            filled(&mut cache, number);
        }
        let mut taken_from_used = 0;
        for number in 0..1000 {
            let (index, evicted) = cache.take(block(1000 + number)).expect("a slot");
            cache.mark_recorded(index);
            cache.fill_begins(index, PageSet::run(0, 1));
            cache.fill_ends(index, PageSet::run(0, 1), PageSet::run(0, 1));
            taken_from_used += u32::from(evicted.is_some_and(|block| block.number < 1000));
        }
        assert_eq!(taken_from_used, slot_count / RECORDED_PART);
        let mut odd = Vec::new();
        cache.check(&[Users::default(); 64], &mut odd);
        assert_eq!(odd, [""; 0]);
        // A reader of one of them works with it: the others go before it.
        let index = SlotIndex(cache.recorded.oldest);
        cache.pin(index);
        cache.unpin(index);
        for number in 0..8 {
            let (other, _) = cache.take(block(3000 + number)).expect("a slot");
            assert_ne!(other, index);
        }
    }

    #[test]
    fn pinned_held_and_filling_slots_are_never_given_away() {
        let mut cache = Cache::new(3);
        let pinned = filled(&mut cache, 0);
        cache.pin(pinned);
        let held = filled(&mut cache, 1);
        cache.hold(held);
        let (filling, _) = cache.take(block(2)).expect("a slot");
        cache.fill_begins(filling, PageSet::run(0, 1));
        assert_eq!(cache.take(block(3)), None);
        assert_eq!(cache.takeable_count(), 0);
        cache.unpin(pinned);
        assert_eq!(cache.take(block(3)), Some((pinned, Some(block(0)))));
    }

    #[test]
    fn bytes_that_were_changed_on_their_way_are_not_kept() {
        let mut cache = Cache::new(1);
        let (index, _) = cache.take(block(0)).expect("a slot");
        cache.fill_begins(index, PageSet::run(0, 8));
        cache.invalidate(index, PageSet::run(2, 3));
        assert_eq!(
            cache.coming(index),
            PageSet::run(0, 2).or(PageSet::run(3, 8))
        );
        cache.fill_ends(index, PageSet::run(0, 8), PageSet::run(0, 8));
        assert_eq!(
            cache.valid(index),
            PageSet::run(0, 2).or(PageSet::run(3, 8))
        );
    }

    #[test]
    fn orphan_is_freed_by_its_last_user() {
        let mut cache = Cache::new(1);
        let index = filled(&mut cache, 0);
        cache.pin(index);
        cache.orphan(index);
        assert_eq!(cache.free_count(), 0);
        cache.unpin(index);
        assert_eq!(cache.free_count(), 1);
    }
}
