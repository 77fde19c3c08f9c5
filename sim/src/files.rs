// SPDX-License-Identifier: Apache-2.0
//! The files of the simulated world: their places, lengths and changes.
//!
//! Content is abstract: every change raises a file's serial, and bytes that are read carry the
//! serial of the instant of reading. Bytes are right when they come from the right file and place
//! and are no older than the last change that was acknowledged there.

use rushes_core::server::{Extent, FileFacts, FileKey, RateHint, WriteWay};
use rushes_core::units::*;
use std::collections::BTreeMap;

impl FileIndex {
    /// The file with this key in stat.
    pub fn of(key: FileKey) -> FileIndex {
        FileIndex((key.inode - INODE_BASE) as u32)
    }
}

/// As in the driver (engine/sys/src/file.rs).
const FRESH: Duration = Duration::from_s(2);
/// Inode of the first file.
const INODE_BASE: u64 = 12;

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
    /// The key from stat.
    pub key: FileKey,
    /// Its device.
    pub device: DeviceId,
    /// Its length.
    pub size: u64,
    /// In place of its ctime.
    pub version: u64,
    /// The instant of that version.
    pub version_at: Instant,
    /// The last change by a client that reports its changes. None: there was none.
    pub told_at: Option<Instant>,
    /// How often its content changed.
    pub serial: u64,
    /// Its lengths so far: (first serial, bytes), the last is [`WorldFile::size`].
    pub sizes: Vec<(u64, u64)>,
    /// Changes that the server may not know of yet: (bytes, serial).
    pub untold: Vec<(ByteRange, u64)>,
    /// Its extents on the device.
    pub extents: Vec<Extent>,
    /// False: the driver could not find its extents.
    pub tells_extents: bool,
    /// From a rule, or a header that was read.
    pub hint: Option<RateHint>,
    /// The rate in its header, and how many places of the file have to be read for it. None: it has
    /// none, or the rate is known already.
    pub header: Option<(Option<RateHint>, u32)>,
    /// The driver's present id of it.
    pub id: Option<FileId>,
    /// False: no longer served (unlinked).
    pub linked: bool,
    /// How clients write to it.
    pub way: WriteWay,
    /// Only clients of the server write to it.
    pub is_exclusive: bool,
}

impl WorldFile {
    /// The possible lengths of a read of `range` that sees the file as of change `oldest` or a
    /// later one.
    pub fn lengths_since(&self, oldest: u64, range: ByteRange) -> impl Iterator<Item = u64> + '_ {
        let later = self.sizes.iter().skip(1).map(|(serial, _)| *serial);
        let ends = later.chain([u64::MAX]);
        self.sizes
            .iter()
            .zip(ends)
            .filter(move |(_, end)| *end > oldest)
            .map(move |((_, size), _)| size.saturating_sub(range.start.0).min(range.length.0))
    }

    fn change(&mut self, range: ByteRange, size: u64) {
        self.serial += 1;
        self.untold.push((range, self.serial));
        if size != self.size {
            self.size = size;
            self.sizes.push((self.serial, size));
        }
    }

    /// Bytes that the file has room for on its device.
    pub fn room(&self) -> u64 {
        self.extents.last().map_or(0, |e| e.logical.0 + e.length.0)
    }
}

/// The change of a stranger that writes to a file beside one of our clients, and reports nothing,
/// is seen so long after that client's last change (decision 0038).
const BEHIND_A_CLIENT: Duration = Duration::from_s(3);

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
            inode: u64::from(index.0) + INODE_BASE,
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

    /// The file with this id in the driver.
    pub fn by_id(&self, id: FileId) -> Option<FileIndex> {
        *self.by_id.get(id.0 as usize)?
    }

    /// How many files the driver holds open for the server.
    pub fn held_count(&self) -> usize {
        self.by_id.len() - self.free_ids.len()
    }

    /// A change begins: the version shows it from now on, the bytes when they are there.
    pub fn stamp(&mut self, index: FileIndex, now: Instant) {
        let file = self.get_mut(index);
        file.version += 1;
        file.version_at = now;
    }

    /// Whether a change began so short a time before `now` that it may not be over.
    pub fn is_fresh(&self, index: FileIndex, now: Instant) -> bool {
        let file = self.get(index);
        file.version > 1 && now.since(file.version_at) < FRESH
    }

    /// By then every client sees a present change by a stranger that reports nothing: a second, and
    /// three after a client's last change (0038).
    pub fn seen_by(&self, index: FileIndex, now: Instant) -> Instant {
        let told = self.get(index).told_at.map(|told| told + BEHIND_A_CLIENT);
        told.map_or(now, |told| told.max(now))
    }

    /// Writes bytes, as far as the file has room. Returns the changed range.
    pub fn write(&mut self, index: FileIndex, range: ByteRange) -> ByteRange {
        let file = self.get_mut(index);
        let end = range.end().min(file.room().max(file.size));
        let range = ByteRange::new(range.start.0.min(end), end.saturating_sub(range.start.0));
        // Bytes between the old end and the first one written are new as well.
        let from = range.start.0.min(file.size);
        let changed = ByteRange::new(from, range.end() - from);
        file.change(changed, file.size.max(range.end()));
        changed
    }

    /// Truncates a file. Returns the range that is gone.
    pub fn truncate(&mut self, index: FileIndex, size: u64) -> ByteRange {
        let file = self.get_mut(index);
        let range = ByteRange::new(size, u64::MAX);
        file.change(range, size);
        range
    }

    /// Takes changes up to number `last` of which the server does not know; now it does.
    pub fn take_untold(&mut self, index: FileIndex, last: u64) -> Vec<(ByteRange, u64)> {
        let untold = &mut self.get_mut(index).untold;
        let told = untold.iter().copied().filter(|&(_, serial)| serial <= last);
        let told = told.collect();
        untold.retain(|&(_, serial)| serial > last);
        told
    }

    /// How often the content changed so far.
    pub fn serial(&self, index: FileIndex) -> u64 {
        self.get(index).serial
    }

    /// The driver's answer to an open. It gives the id that was freed last, which exposes a server
    /// that still uses it.
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
            is_header_unread: file.header.is_some(),
            way: Some(file.way),
            is_exclusive: file.is_exclusive,
            has_unwritten: file.size > 0,
            is_fresh: false,
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

    /// The place of a byte on its device; for a hole, the place of the next byte.
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
        version_at: Instant::ZERO,
        serial: 0,
        sizes: vec![(0, size)],
        told_at: None,
        untold: Vec::new(),
        // Blocks of 4 KiB, as file systems allocate them.
        extents: vec![Extent {
            logical: ByteOffset(0),
            physical: ByteOffset(physical & !4095),
            length: ByteCount(size.next_multiple_of(4096)),
        }],
        tells_extents: true,
        hint,
        header: None,
        id: None,
        linked: true,
        way: WriteWay::Through,
        is_exclusive: false,
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
    fn a_read_may_see_the_sizes_since_the_last_acknowledged_one() {
        let mut files = Files::default();
        let index = files.add(contiguous("a", "1", DeviceId(0), 0, 8192, None));
        files.truncate(index, 100);
        files.write(index, ByteRange::new(50, 150));
        let range = ByteRange::new(40, 1000);
        let since =
            |oldest| -> Vec<u64> { files.get(index).lengths_since(oldest, range).collect() };
        assert_eq!(since(0), [1000, 60, 160]);
        assert_eq!(since(1), [60, 160]);
        assert_eq!(since(2), [160]);
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
