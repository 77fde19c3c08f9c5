// SPDX-License-Identifier: Apache-2.0
//! The facts, both ends: length and time of files whose bytes the file system does not have yet,
//! for doors. The layout is `rushes_core::format::facts`.
//!
//! All daemons that come after each other use one file: a door without a session with the latest
//! sees that daemon's facts all the same. Nothing ever truncates or replaces the file.

use rushes_core::format::facts::*;
use rushes_core::units::{Duration, Instant};
use rushes_sys::{Access, Mapping, SysError, clock};
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock, fstat, open};
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

/// Looks at an entry in the middle of a change before the reader yields: the writer needs a few
/// stores.
const LOOK_COUNT: u32 = 100;
/// After so long the writer has died between them.
const PATIENCE: Duration = Duration::from_ms(200);

/// The facts of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileFact {
    /// Its length as it was acknowledged. Units: bytes.
    pub size: u64,
    /// When it was changed last. Units: ns since 1970.
    pub changed_ns: i64,
    /// Tells files apart that have this inode number one after the other, as [`known_generation`]
    /// gives it; 0: not known.
    pub generation: u64,
}

fn is_mark(device: u64) -> bool {
    reserved_mark(device) == device
}

/// A file's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// Byte offset of its entry.
    start: usize,
    /// Doors find an entry there.
    is_told: bool,
    /// No other file gets it, also while it has no entry.
    is_kept: bool,
}

/// The daemon's end.
#[derive(Debug)]
pub struct FactsTable {
    readers: OwnedFd,
    table: Mapping,
    key: Key,
    places: HashMap<(u64, u64), Place>,
    /// Entries of `places`.
    taken: HashSet<usize>,
}

impl FactsTable {
    /// The table in this folder, with a former daemon's entries; made if there is none. Takes all
    /// its memory at once: a page that a full tmpfs cannot give raises SIGBUS, also in a door that
    /// only reads.
    pub fn open(folder: &Path) -> Result<FactsTable, SysError> {
        let path = folder.join("facts");
        let about = || path.display().to_string();
        let failed = |error: io::Error| SysError::new("open the facts", about(), error);
        let taken = |error| SysError::new("take 4 MiB of memory for the facts", about(), error);
        let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = open_file(folder, "facts", BYTES).map_err(taken)?;
        let table = Mapping::shared(&file, BYTES, Access::ReadWrite).map_err(failed)?;
        let readers =
            open(&path, flags | OFlags::RDONLY, Mode::empty()).map_err(|e| failed(e.into()))?;
        let mut facts = FactsTable {
            readers,
            table,
            key: Key::default(),
            places: HashMap::new(),
            taken: HashSet::new(),
        };
        facts.key = key_in(&facts.table);
        facts.take_over();
        // From now on a daemon maintains it.
        facts.word(LEFT_AT, 0).store(0, Release);
        if facts.places.is_empty() && facts.key == Key::default() {
            facts.choose_key();
        }
        Ok(facts)
    }

    /// The table in this folder, if there is one.
    pub fn find(folder: &Path) -> Option<FactsTable> {
        let is_there = folder.join("facts").exists();
        is_there.then(|| FactsTable::open(folder).ok()).flatten()
    }

    /// Take a former daemon's entries over. If it died in the middle of a change, it left that
    /// entry unreadable: make it readable. The entry stays if its file may belong to this bucket:
    /// the older fact counts until its daemon sets it again.
    fn take_over(&mut self) {
        for start in (0..BYTES).step_by(ENTRY_WORDS * 8) {
            let sequence = self.word(start, word::SEQUENCE).load(Relaxed);
            let mut inode = self.word(start, word::INODE).load(Relaxed);
            let device = self.word(start, word::DEVICE).load(Relaxed);
            if !sequence.is_multiple_of(2) {
                let bucket = self.key.bucket_of(device, inode);
                if !(bucket..bucket + WAYS * ENTRY_WORDS * 8).contains(&start) {
                    inode = 0;
                    self.word(start, word::INODE).store(inode, Relaxed);
                }
                self.word(start, word::SEQUENCE)
                    .store(sequence.wrapping_add(1), Release);
            }
            if inode != 0 {
                let place = Place {
                    start,
                    is_told: true,
                    is_kept: false,
                };
                self.places.insert((device, inode), place);
                self.taken.insert(start);
            }
        }
    }

    /// Choose a new key for a table that is empty: it has no entry under the old one.
    fn choose_key(&mut self) {
        let mut bytes = [0; 16];
        if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) != Ok(16) {
            // Without random numbers the old key stays, which costs no byte.
            return;
        }
        let number = u128::from_ne_bytes(bytes);
        self.key = Key([number as u64, (number >> 64) as u64]);
        for (place, word) in KEY.into_iter().zip(self.key.0) {
            self.table.word64(place).store(word, Release);
        }
    }

    /// Delete the table, which has no more use: no later daemon has bytes that files lack.
    pub fn remove(mut self, folder: &Path) {
        self.keep_only(&HashSet::new());
        let _ = std::fs::remove_file(folder.join("facts"));
    }

    /// The facts stay without a daemon that maintains them: this one ends, and could not write all
    /// of the data.
    pub fn leave(&self) {
        self.word(LEFT_AT, 0).store(1, Release);
    }

    /// Forget all files but these; a mark is a file of its own.
    pub fn keep_only(&mut self, files: &HashSet<(u64, u64)>) {
        let others: Vec<(u64, u64)> = self
            .places
            .keys()
            .filter(|file| !files.contains(file))
            .copied()
            .collect();
        for (device, inode) in others {
            self.clear(device, inode);
        }
    }

    /// The fact of a file; the last one that a dead daemon set counts.
    pub fn get(&self, device: u64, inode: u64) -> Option<FileFact> {
        let place = self.places.get(&(device, inode));
        let start = place.filter(|place| place.is_told)?.start;
        let load = |word: usize| self.word(start, word).load(Relaxed);
        Some(FileFact {
            size: load(word::SIZE),
            changed_ns: load(word::CHANGED) as i64,
            generation: load(word::GENERATION),
        })
    }

    /// A descriptor for a session, which can map it only for reading.
    pub fn session_fd(&self) -> &OwnedFd {
        &self.readers
    }

    /// Files in it whose bytes the file system does not have yet.
    pub fn count(&self) -> usize {
        let is_fact =
            |((device, _), place): &(&(u64, u64), &Place)| !is_mark(*device) && place.is_told;
        self.places.iter().filter(is_fact).count()
    }

    /// The same without these.
    pub fn count_without(&self, files: &HashSet<(u64, u64)>) -> usize {
        let others = |(file, place): &(&(u64, u64), &Place)| {
            !is_mark(file.0) && place.is_told && !files.contains(file)
        };
        self.places.iter().filter(others).count()
    }

    /// Mark a file that has our reserved blocks behind its end. Without room for the mark doors
    /// show the file system's answer.
    pub fn set_reserved(&mut self, device: u64, inode: u64) {
        self.set_mark(reserved_mark(device), inode);
    }

    fn set_mark(&mut self, mark: u64, inode: u64) {
        if !self.is_told(mark, inode) {
            let fact = FileFact {
                size: 0,
                changed_ns: 0,
                generation: 0,
            };
            self.set(mark, inode, fact);
        }
    }

    /// Set the bytes of blocks that the file had on its disk before; the first call counts.
    pub fn set_taken_before(&mut self, device: u64, inode: u64, bytes: u64) {
        let mark = reserved_mark(device);
        let known = self.told(mark, inode);
        if known.is_some_and(|start| self.word(start, word::SIZE).load(Relaxed) == 0) {
            let fact = FileFact {
                size: bytes.max(1),
                changed_ns: 0,
                generation: 0,
            };
            self.set(mark, inode, fact);
        }
    }

    /// Clear that mark: the blocks were freed.
    pub fn clear_reserved(&mut self, device: u64, inode: u64) {
        self.clear(reserved_mark(device), inode);
    }

    /// Mark a file whose bytes may be in the kernel's cache alone, or clear the mark. Without room
    /// for it doors trust the file system.
    pub fn set_loose(&mut self, device: u64, inode: u64, is_loose: bool) {
        match is_loose {
            true => self.set_mark(loose_mark(device), inode),
            false => self.clear(loose_mark(device), inode),
        }
    }

    /// The place of a file's entry.
    fn told(&self, device: u64, inode: u64) -> Option<usize> {
        let place = self.places.get(&(device, inode))?;
        place.is_told.then_some(place.start)
    }

    fn is_told(&self, device: u64, inode: u64) -> bool {
        self.told(device, inode).is_some()
    }

    /// A file's place; a free one if it has none. None: its bucket has none left.
    fn place(&mut self, device: u64, inode: u64) -> Option<&mut Place> {
        let known = (device, inode);
        if !self.places.contains_key(&known) {
            let bucket = self.key.bucket_of(device, inode);
            let start = (0..WAYS)
                .map(|way| bucket + way * ENTRY_WORDS * 8)
                .find(|start| !self.taken.contains(start))?;
            self.taken.insert(start);
            let place = Place {
                start,
                is_told: false,
                is_kept: false,
            };
            self.places.insert(known, place);
        }
        self.places.get_mut(&known)
    }

    fn leave_if_unused(&mut self, device: u64, inode: u64) {
        if let Some(place) = self.places.get(&(device, inode))
            && !place.is_told
            && !place.is_kept
        {
            self.taken.remove(&place.start);
            self.places.remove(&(device, inode));
        }
    }

    /// The daemon is about to take bytes of a file: from now on [`FactsTable::set`] cannot fail for
    /// it, until [`FactsTable::let_go`]. False: its bucket is full, and the daemon must take
    /// nothing of it.
    pub fn keep(&mut self, device: u64, inode: u64) -> bool {
        let Some(place) = self.place(device, inode) else {
            return false;
        };
        place.is_kept = true;
        true
    }

    /// The daemon takes no more bytes of a file. Its fact stays until it is cleared.
    pub fn let_go(&mut self, device: u64, inode: u64) {
        if let Some(place) = self.places.get_mut(&(device, inode)) {
            place.is_kept = false;
        }
        self.leave_if_unused(device, inode);
    }

    /// Set a file's fact. False: its bucket is full, which cannot be while a place is kept for it.
    pub fn set(&mut self, device: u64, inode: u64, fact: FileFact) -> bool {
        let Some(place) = self.place(device, inode) else {
            return false;
        };
        place.is_told = true;
        let start = place.start;
        self.change(start, |table| {
            table.word(start, word::DEVICE).store(device, Relaxed);
            table.word(start, word::INODE).store(inode, Relaxed);
            table.word(start, word::SIZE).store(fact.size, Relaxed);
            let generation = table.word(start, word::GENERATION);
            generation.store(fact.generation, Relaxed);
            let changed = fact.changed_ns as u64;
            table.word(start, word::CHANGED).store(changed, Relaxed);
        });
        true
    }

    /// Set the time of change in a file's fact, if it has one.
    pub fn set_time(&mut self, device: u64, inode: u64, changed_ns: i64) {
        if let Some(start) = self.told(device, inode) {
            self.change(start, |table| {
                let changed = changed_ns as u64;
                table.word(start, word::CHANGED).store(changed, Relaxed);
            });
        }
    }

    /// Delete a file's fact: the file system has all its bytes.
    pub fn clear(&mut self, device: u64, inode: u64) {
        let Some(start) = self.told(device, inode) else {
            return;
        };
        self.change(start, |table| {
            table.word(start, word::INODE).store(0, Relaxed);
        });
        if let Some(place) = self.places.get_mut(&(device, inode)) {
            place.is_told = false;
        }
        self.leave_if_unused(device, inode);
    }

    fn change(&self, start: usize, change: impl FnOnce(&FactsTable)) {
        let sequence = self.word(start, word::SEQUENCE);
        let before = sequence.load(Relaxed);
        sequence.store(before.wrapping_add(1), Relaxed);
        fence(Release);
        change(self);
        sequence.store(before.wrapping_add(2), Release);
    }

    fn word(&self, start: usize, word: usize) -> &std::sync::atomic::AtomicU64 {
        self.table.word64(start + word * 8)
    }
}

/// While a daemon has this, no door changes a file on its own descriptor.
///
/// A daemon that starts does not know of such a change that a door began before: it might read
/// bytes of the file too early, and write these back beside newer ones.
#[derive(Debug)]
pub struct NoPlainChanges {
    /// Holds the lock that doors hold while they change something.
    _changes: OwnedFd,
    /// Holds the lock that they hold for a moment before they begin.
    _gate: OwnedFd,
}

impl NoPlainChanges {
    /// Wait until all changes under way have ended, at most so long; new ones wait until this is
    /// dropped. There are two locks: changes that overlap for ever would never leave a single one
    /// free. Makes both files if there are none.
    ///
    /// Errors   TimedOut: a change goes on for longer.
    pub fn wait(folder: &Path, patience: Duration) -> io::Result<NoPlainChanges> {
        let end = clock::now() + patience;
        let alone = |file: OwnedFd| {
            while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                if clock::now() >= end {
                    return Err(io::Error::from(io::ErrorKind::TimedOut));
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Ok(file)
        };
        Ok(NoPlainChanges {
            _gate: alone(open_file(folder, "gate", 0)?)?,
            _changes: alone(open_file(folder, "facts", BYTES)?)?,
        })
    }
}

/// A file of ours in the folder of lanes, made if there is none, with memory for so many bytes. It
/// is never truncated.
///
/// Errors   ENOSPC: it is then as short as it was, and no door maps it.
fn open_file(folder: &Path, name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::RDWR | OFlags::CREATE;
    let file = open(folder.join(name), flags, Mode::RUSR | Mode::WUSR)?;
    if bytes > 0 {
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
    }
    Ok(file)
}

/// The key by which a table places files.
fn key_in(table: &Mapping) -> Key {
    Key(KEY.map(|place| table.word64(place).load(Acquire)))
}

/// A door's end.
#[derive(Debug)]
pub struct FactsView {
    table: Mapping,
    /// None for a session's table: it shares the daemon's open file, and with it the locks.
    locks: Option<Locks>,
}

#[derive(Debug)]
struct Locks {
    changes: OwnedFd,
    gate: OwnedFd,
}

impl FactsView {
    /// The facts of the daemons that serve from this runtime folder, by name: for a door without a
    /// session. None: there never were any.
    pub fn open(runtime_dir: &Path) -> Option<FactsView> {
        FactsView::find(runtime_dir).ok()?
    }

    /// The same for a caller that must tell an unreadable table from none.
    ///
    /// Errors   it may be there: too few descriptors, no right to read it.
    pub fn find(runtime_dir: &Path) -> io::Result<Option<FactsView>> {
        let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::RDONLY;
        let file = match open(runtime_dir.join("lanes/facts"), flags, Mode::empty()) {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if (fstat(&file)?.st_size as u64) < BYTES as u64 {
            // Its daemon died before it set anything.
            return Ok(None);
        }
        let view = FactsView::map(&file)?;
        let gate = open(runtime_dir.join("lanes/gate"), flags, Mode::empty()).ok();
        let locks = gate.map(|gate| Locks {
            changes: file,
            gate,
        });
        Ok(Some(FactsView { locks, ..view }))
    }

    /// The caller changes a file on its own descriptor from now on: no daemon starts to serve until
    /// [`FactsView::plain_changes_end`]. Call it before each change, also beside others. False: a
    /// daemon is just starting; try again soon.
    pub fn plain_changes_begin(&self) -> bool {
        self.locks.as_ref().is_none_or(|locks| {
            let shared = FlockOperation::NonBlockingLockShared;
            let begun = flock(&locks.gate, shared).is_ok() && flock(&locks.changes, shared).is_ok();
            // Cannot fail: the file is open. To unlock one that is not locked does no harm.
            let _ = flock(&locks.gate, FlockOperation::NonBlockingUnlock);
            begun
        })
    }

    /// All such changes have ended.
    pub fn plain_changes_end(&self) {
        if let Some(locks) = &self.locks {
            // Cannot fail: it is an open file.
            let _ = flock(&locks.changes, FlockOperation::NonBlockingUnlock);
        }
    }

    /// Map it. The caller has checked that the file is as long, and nothing truncates it.
    pub(crate) fn map(fd: impl AsFd) -> io::Result<FactsView> {
        Ok(FactsView {
            table: Mapping::shared(fd, BYTES, Access::Read)?,
            locks: None,
        })
    }

    /// The fact of a file, which a door must know besides the file system's answer. None: it has
    /// none.
    pub fn of(&self, device: u64, inode: u64) -> Option<FileFact> {
        let bucket = key_in(&self.table).bucket_of(device, inode);
        (0..WAYS).find_map(|way| self.entry(bucket + way * ENTRY_WORDS * 8, device, inode))
    }

    /// Space that a file took on its disk before the daemon reserved blocks behind its end, which
    /// no client asked for. None: there are no such blocks. Units: bytes.
    pub fn reserved(&self, device: u64, inode: u64) -> Option<u64> {
        Some(self.of(reserved_mark(device), inode)?.size)
    }

    /// Bytes of it may be in the kernel's cache alone, which may have to drop them: a door asks the
    /// live daemon before it reads the file past it.
    pub fn is_loose(&self, device: u64, inode: u64) -> bool {
        self.of(loose_mark(device), inode).is_some()
    }

    /// True when the file systems have all bytes.
    pub fn is_empty(&self) -> bool {
        (0..BYTES).step_by(ENTRY_WORDS * 8).all(|start| {
            let load = |word: usize| self.table.word64(start + word * 8).load(Relaxed);
            load(word::INODE) == 0 || is_mark(load(word::DEVICE))
        })
    }

    /// The daemon has ended, and could not write all data.
    pub fn is_left(&self) -> bool {
        self.table.word64(LEFT_AT).load(Acquire) == 1
    }

    /// Files of these devices of which bytes may be in the kernel's cache alone.
    pub fn loose_count_on(&self, devices: &[u64]) -> usize {
        let marks: Vec<u64> = devices.iter().map(|device| loose_mark(*device)).collect();
        self.count_on(&marks)
    }

    /// Files of these devices whose bytes their file systems do not have yet.
    pub fn count_on(&self, devices: &[u64]) -> usize {
        (0..BYTES)
            .step_by(ENTRY_WORDS * 8)
            .filter(|start| {
                let load = |word: usize| self.table.word64(start + word * 8).load(Relaxed);
                load(word::INODE) != 0 && devices.contains(&load(word::DEVICE))
            })
            .count()
    }

    fn entry(&self, start: usize, device: u64, inode: u64) -> Option<FileFact> {
        let load = |word: usize| self.table.word64(start + word * 8).load(Relaxed);
        let mut looks = 0;
        let mut begun = Instant::NEVER;
        loop {
            let before = self.table.word64(start + word::SEQUENCE * 8).load(Acquire);
            let found = load(word::DEVICE) == device && load(word::INODE) == inode && inode != 0;
            let fact = FileFact {
                size: load(word::SIZE),
                changed_ns: load(word::CHANGED) as i64,
                generation: load(word::GENERATION),
            };
            fence(Acquire);
            if before.is_multiple_of(2) && load(word::SEQUENCE) == before {
                return found.then_some(fact);
            }
            looks += 1;
            if looks <= LOOK_COUNT {
                std::hint::spin_loop();
                continue;
            }
            begun = begun.min(clock::now());
            if clock::now() >= begun + PATIENCE {
                // Better half a change than no fact: the door then knows that the file has one.
                return found.then_some(fact);
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::Folder;

    #[test]
    fn marks_of_loose_bytes_are_no_facts_and_not_those_of_reserved_blocks() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(table.session_fd()).unwrap();
        table.set_loose(5, 77, true);
        table.set_loose(5, 77, true);
        assert!(view.is_loose(5, 77) && !view.is_loose(5, 78) && !view.is_loose(6, 77));
        assert_eq!((view.of(5, 77), view.reserved(5, 77)), (None, None));
        assert!(view.is_empty() && table.count() == 0 && view.count_on(&[5]) == 0);
        assert_eq!(
            (view.loose_count_on(&[5]), view.loose_count_on(&[6])),
            (1, 0)
        );
        table.set_loose(5, 77, false);
        assert!(!view.is_loose(5, 77));
        // The next daemon drops the mark of a dead one.
        table.set_loose(5, 77, true);
        table.keep_only(&HashSet::from([(5, 77), (reserved_mark(5), 77)]));
        assert!(!view.is_loose(5, 77));
    }

    #[test]
    fn marks_of_reserved_blocks_are_no_facts() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(table.session_fd()).unwrap();
        table.set_reserved(5, 77);
        assert_eq!(
            (view.reserved(5, 77), view.reserved(5, 78)),
            (Some(0), None)
        );
        table.set_taken_before(5, 78, 9);
        table.set_taken_before(5, 77, 4096);
        // From now on some of it is ours.
        table.set_reserved(5, 77);
        table.set_taken_before(5, 77, 1 << 30);
        assert_eq!(
            (view.reserved(5, 77), view.reserved(5, 78)),
            (Some(4096), None)
        );
        assert_eq!(view.of(5, 77), None);
        assert!(view.is_empty() && table.count() == 0);
        table.set(5, 77, fact(10));
        assert_eq!(view.of(5, 77), Some(fact(10)));
        assert!(!view.is_empty() && table.count() == 1);
        let count = |inode: u64| table.count_without(&HashSet::from([(5, inode)]));
        assert_eq!((count(77), count(78)), (0, 1));
        assert_eq!((view.count_on(&[6, 5]), view.count_on(&[6])), (1, 0));
        table.clear(5, 77);
        assert_eq!(view.count_on(&[5]), 0);
        table.keep_only(&HashSet::from([(reserved_mark(5), 77)]));
        assert_eq!(view.reserved(5, 77), Some(4096));
        table.clear_reserved(5, 77);
        assert_eq!(view.reserved(5, 77), None);
        table.set_reserved(5, 77);
        table.keep_only(&HashSet::new());
        assert_eq!(view.reserved(5, 77), None);
    }

    fn fact(size: u64) -> FileFact {
        FileFact {
            size,
            changed_ns: -5,
            generation: size % 3,
        }
    }

    #[test]
    fn doors_see_what_was_set_until_it_is_cleared() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(table.session_fd()).unwrap();
        assert_eq!(view.of(1, 2), None);
        for inode in 1..=1000 {
            assert!(table.set(7, inode, fact(inode)));
        }
        assert!(table.set(7, 9, fact(4096)));
        assert_eq!(view.of(7, 9), Some(fact(4096)));
        assert_eq!(view.of(7, 10), Some(fact(10)));
        assert_eq!((table.get(7, 10), table.get(8, 10)), (Some(fact(10)), None));
        assert_eq!(view.of(8, 10), None);
        table.clear(7, 9);
        table.clear(7, 9);
        assert_eq!(view.of(7, 9), None);
        assert_eq!(table.count(), 999);
        // Free entries are used again.
        assert!(table.set(7, 9, fact(3)));
        assert_eq!(view.of(7, 9), Some(fact(3)));
        let door = table.session_fd();
        assert!(Mapping::shared(door, BYTES, Access::ReadWrite).is_err());
    }

    #[test]
    fn a_door_of_a_former_daemon_sees_what_the_next_one_sets() {
        let folder = Folder::new();
        let mut first = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(first.session_fd()).unwrap();
        first.set(1, 2, fact(5));
        first.set(1, 3, fact(6));
        // It dies in the middle of a change.
        let start = first.places[&(1, 3)].start;
        first.word(start, word::SEQUENCE).store(99, Relaxed);
        assert!(!view.is_left());
        first.leave();
        assert!(view.is_left());
        drop(first);
        let mut second = FactsTable::open(&folder.0).unwrap();
        assert!(!view.is_left(), "somebody is at it again");
        // Doors may have seen the former facts alone.
        assert_eq!(second.count(), 2);
        assert_eq!(
            (view.of(1, 2), view.of(1, 3)),
            (Some(fact(5)), Some(fact(6)))
        );
        second.set(1, 3, fact(7));
        assert_eq!(view.of(1, 3), Some(fact(7)));
        second.keep_only(&HashSet::from([(1, 3)]));
        assert_eq!((view.of(1, 2), view.of(1, 3)), (None, Some(fact(7))));
        assert!(!view.is_empty());
        second.clear(1, 3);
        assert!(view.is_empty());
    }

    #[test]
    fn no_door_changes_files_plainly_while_a_daemon_starts_and_none_starts_while_one_does() {
        let runtime = Folder::new();
        let folder = runtime.0.join("lanes");
        std::fs::create_dir(&folder).unwrap();
        let wait = || NoPlainChanges::wait(&folder, Duration::from_ms(20)).ok();
        assert!(FactsView::open(&runtime.0).is_none());
        // A table that cannot be read is not taken for none.
        std::os::unix::fs::symlink("elsewhere", folder.join("facts")).unwrap();
        assert!(FactsView::find(&runtime.0).is_err());
        std::fs::remove_file(folder.join("facts")).unwrap();
        assert!(FactsView::find(&runtime.0).unwrap().is_none());
        // The first daemon there ever was.
        drop(wait().unwrap());
        let table = FactsTable::open(&folder).unwrap();
        let door = FactsView::open(&runtime.0).unwrap();
        let other = FactsView::open(&runtime.0).unwrap();
        assert!(door.plain_changes_begin() && other.plain_changes_begin());
        assert!(wait().is_none());
        door.plain_changes_end();
        assert!(wait().is_none());
        // It died in the middle of one.
        drop(other);
        let starting = wait().unwrap();
        assert!(!door.plain_changes_begin());
        drop(starting);
        assert!(door.plain_changes_begin());
        // Changes that overlap for ever keep no daemon out: while it waits none of them begins.
        std::thread::scope(|scope| {
            let waiting = || NoPlainChanges::wait(&folder, Duration::from_s(10)).is_ok();
            let starts = scope.spawn(waiting);
            while door.plain_changes_begin() {
                std::thread::yield_now();
            }
            door.plain_changes_end();
            assert!(starts.join().unwrap());
        });
        // A session's table is the daemon's own open file.
        let given = FactsView::map(table.session_fd()).unwrap();
        assert!(given.plain_changes_begin());
    }

    /// Files whose entries lie in one bucket.
    fn same_bucket(table: &FactsTable, count: usize) -> Vec<u64> {
        let bucket = table.key.bucket_of(1, 1);
        (1..)
            .filter(|&inode| table.key.bucket_of(1, inode) == bucket)
            .take(count)
            .collect()
    }

    #[test]
    fn full_bucket_is_said() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let same = same_bucket(&table, WAYS + 1);
        for &inode in &same[..WAYS] {
            assert!(table.set(1, inode, fact(1)));
        }
        assert!(!table.set(1, same[WAYS], fact(1)) && !table.keep(1, same[WAYS]));
        table.clear(1, same[3]);
        assert!(table.set(1, same[WAYS], fact(1)));
    }

    #[test]
    fn a_place_that_is_kept_is_there_when_it_is_needed() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(table.session_fd()).unwrap();
        let same = same_bucket(&table, WAYS + 1);
        let (last, others) = same.split_last().unwrap();
        for &inode in others {
            assert!(table.keep(1, inode));
        }
        // No file has a fact yet; and yet the bucket is full.
        assert!(view.is_empty() && table.count() == 0 && view.of(1, others[0]).is_none());
        assert!(!table.keep(1, *last) && !table.set(1, *last, fact(1)));
        for &inode in others {
            assert!(table.keep(1, inode) && table.set(1, inode, fact(inode)));
        }
        // Set and cleared: its place is still kept. Let go: a fact that is set stays.
        table.clear(1, others[0]);
        assert!(!table.keep(1, *last));
        table.let_go(1, others[1]);
        assert!(!table.keep(1, *last));
        assert_eq!(view.of(1, others[1]), Some(fact(others[1])));
        table.clear(1, others[1]);
        assert!(table.keep(1, *last));
        table.let_go(1, *last);
        table.let_go(1, *last);
        assert!(table.keep(1, others[1]));
        table.let_go(1, others[0]);
        assert!(table.keep(1, *last));
    }

    #[test]
    fn each_table_places_files_by_a_key_of_its_own_which_doors_find_in_it() {
        let folders = (Folder::new(), Folder::new());
        let one = FactsTable::open(&folders.0.0).unwrap();
        let other = FactsTable::open(&folders.1.0).unwrap();
        assert!(one.key != Key::default() && one.key != other.key);
        let key = one.key;
        drop(one);
        let mut one = FactsTable::open(&folders.0.0).unwrap();
        assert_eq!(one.key, key);
        // An entry where the key stands leaves it alone.
        for inode in 1..=3000 {
            one.keep(1, inode);
            one.set(1, inode, fact(inode));
            one.clear(1, inode);
        }
        assert_eq!(key_in(&one.table), key);
    }

    #[test]
    fn a_table_of_version_1_is_good_and_gets_a_key_when_nothing_is_in_it() {
        let folder = Folder::new();
        // As that version made it: a hole.
        let mut options = std::fs::File::options();
        let made = options.read(true).write(true).create(true);
        let file = made.open(folder.0.join("facts")).unwrap();
        file.set_len(BYTES as u64).unwrap();
        let table = Mapping::shared(&file, BYTES, Access::ReadWrite).unwrap();
        let start = Key::default().bucket_of(5, 77);
        for (word, value) in [(word::DEVICE, 5), (word::INODE, 77), (word::SIZE, 9)] {
            table.word64(start + word * 8).store(value, Relaxed);
        }
        let mut first = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(first.session_fd()).unwrap();
        assert_eq!((first.key, first.count()), (Key::default(), 1));
        assert_eq!(view.of(5, 77).map(|fact| fact.size), Some(9));
        assert!(first.set(5, 78, fact(3)) && view.of(5, 78) == Some(fact(3)));
        first.clear(5, 77);
        first.clear(5, 78);
        drop(first);
        let mut second = FactsTable::open(&folder.0).unwrap();
        assert_ne!(second.key, Key::default());
        // The door of the former daemon follows.
        assert!(second.set(5, 77, fact(4)) && view.of(5, 77) == Some(fact(4)));
    }

    #[test]
    fn its_memory_is_taken_when_it_is_made() {
        use std::os::unix::fs::MetadataExt;
        let folder = Folder::new();
        let table = FactsTable::open(&folder.0).unwrap();
        let taken = std::fs::metadata(folder.0.join("facts")).unwrap().blocks() * 512;
        assert!(taken >= BYTES as u64, "{taken} of {BYTES}");
        drop(table);
    }

    #[test]
    fn readers_beside_a_writer_never_see_half_a_change() {
        let folder = Folder::new();
        let mut table = FactsTable::open(&folder.0).unwrap();
        let view = FactsView::map(table.session_fd()).unwrap();
        table.set(
            1,
            1,
            FileFact {
                size: 0,
                changed_ns: 0,
                generation: 0,
            },
        );
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let mut seen = 0;
                while seen < 19_999 {
                    let fact = view.of(1, 1).unwrap();
                    assert_eq!(fact.size as i64, fact.changed_ns);
                    assert_eq!(fact.size, fact.generation);
                    assert!(fact.size >= seen);
                    seen = fact.size;
                }
            });
            for size in 0..20_000u64 {
                let changed_ns = size as i64;
                let fact = FileFact {
                    size,
                    changed_ns,
                    generation: size,
                };
                table.set(1, 1, fact);
            }
            reader.join().unwrap();
        });
    }
}
