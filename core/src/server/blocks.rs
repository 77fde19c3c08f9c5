// SPDX-License-Identifier: Apache-2.0
//! A writer meets a full disk of which a part is only reserved: files that no client is writing to
//! give back the blocks behind their ends, then the writer asks again (docs/decisions/0016).
//!
//! Blocks reserved for a file that is being written stay: its recorder will need them in a moment.
//! A file with dirty bytes can give nothing before it is written, since to give back is to cut it
//! to the length that its file system knows.

use super::*;

/// Files that others wait for, and the files that wait.
#[derive(Debug, Default)]
pub(super) struct ReservedBlocks {
    /// Files that are about to give back their reserved blocks.
    giving: BTreeSet<FileId>,
    /// Files with a write that was refused its blocks.
    wanting: BTreeSet<FileId>,
}

impl ReservedBlocks {
    /// The file waits for blocks of others: its writes ask for none meanwhile.
    pub(super) fn is_wanting(&self, file: FileId) -> bool {
        self.wanting.contains(&file)
    }
}

impl Server {
    /// A write to `id` found no blocks. True: other files give some back, and the server retries
    /// the write when they have.
    pub(super) fn make_room(&mut self, id: FileId, actions: &mut Actions) -> bool {
        let Some(device) = self.files.get(&id).map(|file| file.device) else {
            return false;
        };
        if self.is_recovering {
            return false;
        }
        let givers: Vec<FileId> = self
            .files
            .iter()
            .filter(|&(&other, file)| {
                other != id && file.device == device && file.could_give() && file.has_reserve()
            })
            .map(|(&other, _)| other)
            .collect();
        for &giver in &givers {
            if let Some(file) = self.files.get_mut(&giver) {
                file.writing.gives_room = true;
            }
            self.reserved_blocks.giving.insert(giver);
            self.trim_if_left(giver, actions);
        }
        // Wait for the files that another writer has asked, too.
        let is_awaited = |giver: &FileId| {
            let file = self.files.get(giver);
            *giver != id && file.is_some_and(|file| file.device == device)
        };
        let wants = self.reserved_blocks.giving.iter().any(is_awaited);
        if wants {
            self.reserved_blocks.wanting.insert(id);
            self.touch(device);
        }
        wants
    }

    /// Let the waiting writes ask once more if some of the awaited blocks have come, or will not.
    /// Called before a step ends.
    pub(super) fn look_for_room(&mut self, actions: &mut Actions) {
        if self.reserved_blocks.giving.is_empty() {
            return;
        }
        let before = self.reserved_blocks.giving.len();
        let files = &mut self.files;
        self.reserved_blocks.giving.retain(|id| {
            let Some(file) = files.get_mut(id) else {
                return false;
            };
            // Blocks that are being cut off come, even if its client goes on meanwhile.
            let gives = file.writing.gives_room && (file.could_give() || file.writing.settling > 0);
            file.writing.gives_room = gives;
            gives
        });
        if self.reserved_blocks.giving.len() == before {
            return;
        }
        for id in core::mem::take(&mut self.reserved_blocks.wanting) {
            let waiting = self.files.get(&id).map(|file| file.writing.waiting.clone());
            for key in waiting.unwrap_or_default() {
                self.advance_write(key, actions);
            }
        }
    }
}

impl File {
    /// No client is writing to it, and the server may cut off the blocks reserved behind its end
    /// once its bytes are written.
    fn could_give(&self) -> bool {
        let writing = &self.writing;
        writing.is_reserved
            && !writing.is_open_elsewhere
            && !self.size_stale
            && writing.grant_count == 0
            && writing.reserving.is_none()
            && writing.waiting.is_empty()
            && writing.holds.is_empty()
            && writing.failing.is_none()
    }

    /// It has blocks behind its end, as far as we know.
    fn has_reserve(&self) -> bool {
        let end = self.size.next_multiple_of(PAGE_BYTES);
        self.extents
            .last()
            .is_some_and(|last| last.logical.0 + last.length.0 > end)
    }
}
