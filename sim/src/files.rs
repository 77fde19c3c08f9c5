// SPDX-License-Identifier: Apache-2.0
//! The files of the simulated world: where they lie, how long they are, what was written when.
//!
//! Content is abstract: a file has a serial that every change raises, and what is read carries the
//! serial of the instant of reading. Bytes are right when they come from the right file and place and
//! are no older than the last change that was acknowledged there.

use rushes_core::server::{Extent, FileFacts, FileKey, RateHint};
use rushes_core::units::*;
use std::collections::BTreeMap;

/// A file of the world, counted from zero; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIndex(pub u32);

/// A file.
#[derive(Clone, Debug)]
pub struct WorldFile {
    /// Folder, without slashes at its ends.
    pub folder: String,
    /// Name in it.
    pub name: String,
    /// What stat says.
    pub key: FileKey,
    /// On which device.
    pub device: DeviceId,
    /// Its length.
    pub size: u64,
    /// Its ctime, so to speak.
    pub version: u64,
    /// How often its content changed.
    pub serial: u64,
    /// Where it is.
    pub extents: Vec<Extent>,
    /// False: the driver could not find out where it lies.
    pub tells_extents: bool,
    /// From a rule or header.
    pub hint: Option<RateHint>,
    /// How the driver calls it now.
    pub id: Option<FileId>,
    /// False: no longer served (unlinked).
    pub linked: bool,
}

/// All files.
#[derive(Default)]
pub struct Files {
    list: Vec<WorldFile>,
    by_name: BTreeMap<(String, String), FileIndex>,
    by_id: Vec<Option<FileIndex>>,
    free_ids: Vec<FileId>,
}

impl Files {
    /// Adds a file; its key is made from its index.
    pub fn add(&mut self, mut file: WorldFile) -> FileIndex {
        let index = FileIndex(self.list.len() as u32);
        file.key = FileKey {
            device: u64::from(file.device.0) + 64_512,
            inode: u64::from(index.0) + 12,
        };
        self.by_name
            .insert((file.folder.clone(), file.name.clone()), index);
        self.list.push(file);
        index
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// A file.
    pub fn get(&self, index: FileIndex) -> &WorldFile {
        &self.list[index.0 as usize]
    }

    /// A file, to change it.
    pub fn get_mut(&mut self, index: FileIndex) -> &mut WorldFile {
        &mut self.list[index.0 as usize]
    }

    /// The file of that name.
    pub fn named(&self, folder: &str, name: &str) -> Option<FileIndex> {
        let key = (folder.to_owned(), name.to_owned());
        let index = *self.by_name.get(&key)?;
        self.get(index).linked.then_some(index)
    }

    /// The file a driver's id stands for.
    pub fn by_id(&self, id: FileId) -> Option<FileIndex> {
        *self.by_id.get(id.0 as usize)?
    }

    /// How many files the driver holds open for the server.
    pub fn held_count(&self) -> usize {
        self.by_id.len() - self.free_ids.len()
    }

    /// How often the content changed so far.
    pub fn serial(&self, index: FileIndex) -> u64 {
        self.get(index).serial
    }

    /// What the driver answers when asked to open it. An id is given out that was freed last, so that
    /// a server that still uses it is found out.
    pub fn facts(&mut self, index: FileIndex) -> FileFacts {
        let id = match self.get(index).id {
            Some(id) => id,
            None => {
                let id = self.free_ids.pop().unwrap_or_else(|| {
                    self.by_id.push(None);
                    FileId(self.by_id.len() as u32 - 1)
                });
                self.by_id[id.0 as usize] = Some(index);
                self.get_mut(index).id = Some(id);
                id
            }
        };
        let file = self.get(index);
        FileFacts {
            file: id,
            key: file.key,
            device: file.device,
            size: ByteCount(file.size),
            version: file.version,
            extents: if file.tells_extents {
                file.extents.clone()
            } else {
                Vec::new()
            },
            hint: file.hint,
        }
    }

    /// The server forgot it. Returns false when it was not known.
    pub fn forget(&mut self, id: FileId) -> bool {
        let Some(slot) = self.by_id.get_mut(id.0 as usize) else {
            return false;
        };
        let Some(index) = slot.take() else {
            return false;
        };
        self.free_ids.push(id);
        self.get_mut(index).id = None;
        true
    }

    /// Where a byte is on its device; of a hole, where the next byte is.
    pub fn physical(&self, index: FileIndex, offset: ByteOffset) -> u64 {
        let extents = &self.get(index).extents;
        let at = extents.partition_point(|e| e.logical.0 + e.length.0 <= offset.0);
        extents
            .get(at)
            .map_or(0, |e| e.physical.0 + offset.0.saturating_sub(e.logical.0))
    }

    /// The runs on the device that make up a range: (start, bytes).
    pub fn pieces(
        &self,
        index: FileIndex,
        range: ByteRange,
    ) -> impl Iterator<Item = (u64, u64)> + '_ {
        let extents = &self.get(index).extents;
        let first = extents.partition_point(|e| e.logical.0 + e.length.0 <= range.start.0);
        extents[first..]
            .iter()
            .take_while(move |e| e.logical.0 < range.end())
            .map(move |e| {
                let from = range.start.0.max(e.logical.0);
                let to = range.end().min(e.logical.0 + e.length.0);
                (e.physical.0 + (from - e.logical.0), to - from)
            })
    }
}

/// A file of `size` bytes in one piece at `physical`.
pub fn contiguous(
    folder: &str,
    name: &str,
    device: DeviceId,
    physical: u64,
    size: u64,
    hint: Option<RateHint>,
) -> WorldFile {
    WorldFile {
        folder: folder.to_owned(),
        name: name.to_owned(),
        key: FileKey::default(),
        device,
        size,
        version: 1,
        serial: 0,
        // Blocks of 4 KiB, as a file system gives them out.
        extents: vec![Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(physical & !4095),
            length: ByteCount(size.next_multiple_of(4096)),
        }],
        tells_extents: true,
        hint,
        id: None,
        linked: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_over_two_extents_is_two_pieces() {
        let mut files = Files::default();
        let mut file = contiguous("a", "b", DeviceId(0), 4096, 8192, None);
        file.extents = vec![
            Extent {
                logical: ByteOffset(0),
                physical: ByteOffset(40_960),
                length: ByteCount(4096),
            },
            Extent {
                logical: ByteOffset(8192),
                physical: ByteOffset(4096),
                length: ByteCount(4096),
            },
        ];
        let index = files.add(file);
        let pieces: Vec<_> = files.pieces(index, ByteRange::new(1024, 9000)).collect();
        assert_eq!(pieces, [(41_984, 3072), (4096, 1832)]);
        assert_eq!(files.physical(index, ByteOffset(5000)), 4096);
    }

    #[test]
    fn a_forgotten_id_is_given_to_the_next_file() {
        let mut files = Files::default();
        let one = files.add(contiguous("a", "1", DeviceId(0), 0, 4096, None));
        let two = files.add(contiguous("a", "2", DeviceId(0), 0, 4096, None));
        let id = files.facts(one).file;
        assert_eq!(files.facts(one).file, id);
        assert!(files.forget(id));
        assert!(!files.forget(id));
        assert_eq!(files.facts(two).file, id);
        assert_eq!(files.by_id(id), Some(two));
    }
}
