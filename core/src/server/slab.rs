// SPDX-License-Identifier: Apache-2.0
//! A table whose keys are given out by itself and used again.

use alloc::vec::Vec;

/// Entries under small numbers. Keys of removed entries are used again, so code that keeps a key
/// longer than the entry must keep something to tell the new one by.
#[derive(Clone, Debug)]
pub(super) struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Slab<T> {
        Slab {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, entry: T) -> u32 {
        if let Some(key) = self.free.pop() {
            self.entries[key as usize] = Some(entry);
            return key;
        }
        self.entries.push(Some(entry));
        (self.entries.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, key: u32) -> Option<T> {
        let entry = self.entries.get_mut(key as usize)?.take();
        if entry.is_some() {
            self.free.push(key);
        }
        entry
    }

    pub(super) fn get(&self, key: u32) -> Option<&T> {
        self.entries.get(key as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, key: u32) -> Option<&mut T> {
        self.entries.get_mut(key as usize)?.as_mut()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.entries
            .iter_mut()
            .enumerate()
            .filter_map(|(key, entry)| Some((key as u32, entry.as_mut()?)))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(key, entry)| Some((key as u32, entry.as_ref()?)))
    }
}
