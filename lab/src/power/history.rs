// SPDX-License-Identifier: Apache-2.0
//! The state of each file and each path after every step of a lane, and from which step on a power
//! cut may not take it back.
//!
//! It is computed from the steps alone. `done` is the number of steps acknowledged before the cut;
//! the next step may have begun. So at a cut every file has a *floor*, its last sync among the done
//! steps, and may show the state at that sync or after any later step; and every path has one, its
//! last change that was safe.
//!
//! A sync of its folder makes a change of a name safe, and so does fsync of the file itself; for a
//! new file fdatasync as well, since no program could reach the data otherwise. That is more than
//! POSIX demands; ext4 and XFS, whose journals are in order, do it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::script::{Step, folder_of};
use super::sector::{SECTOR_BYTES, Stamp};

const SECTOR: u64 = SECTOR_BYTES as u64;

/// The contents of a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Version {
    /// Never written, or zeroed.
    Zero,
    /// Bytes of one write.
    Whole {
        /// Generation of that write.
        generation: u64,
    },
    /// Bytes of several writes, or a write cut off.
    Mixed(Arc<[u8; SECTOR_BYTES]>),
}

impl Version {
    /// Its bytes.
    pub fn bytes(&self, file: u64, index: u64) -> [u8; SECTOR_BYTES] {
        match self {
            Version::Zero => [0; SECTOR_BYTES],
            Version::Whole { generation } => Stamp {
                file,
                index,
                generation: *generation,
            }
            .sector(),
            Version::Mixed(bytes) => **bytes,
        }
    }
}

/// A step, and a state after it.
#[derive(Clone, Debug)]
pub struct Since<T> {
    /// Number of the step.
    pub step: usize,
    /// Number of the step after whose end no cut takes this state back.
    pub safe_by: Option<usize>,
    /// The state.
    pub what: T,
}

impl<T> Since<T> {
    fn new(step: usize, what: T) -> Since<T> {
        Since {
            step,
            safe_by: None,
            what,
        }
    }
}

/// The states that may hold after a cut: of these changes the last that is safe, and all later ones
/// that may have begun.
///
/// Returns these, and whether the first of them is safe; if not, the state before all changes is
/// possible as well.
pub fn possible<T>(changes: &[Since<T>], done: usize) -> (&[Since<T>], bool) {
    let end = changes.partition_point(|change| change.step <= done);
    let begun = &changes[..end];
    let floor = begun
        .iter()
        .rposition(|change| change.safe_by.is_some_and(|step| step < done));
    (&begun[floor.unwrap_or(0)..], floor.is_some())
}

/// The occupant of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing.
    Nobody,
    /// A folder.
    Folder,
    /// A file.
    File(u64),
}

/// The history of one file.
#[derive(Clone, Debug)]
pub struct FileHistory {
    /// Its number.
    pub file: u64,
    created: usize,
    sizes: Vec<(usize, u64)>,
    sectors: BTreeMap<u64, Vec<(usize, Version)>>,
    syncs: Vec<usize>,
    /// Its names; `None`: removed.
    pub names: Vec<Since<Option<String>>>,
    /// Offsets at which a change of it began or ended. Units: bytes.
    edges: BTreeSet<u64>,
    is_parted: bool,
}

impl FileHistory {
    fn new(file: u64, step: usize, path: &str) -> FileHistory {
        FileHistory {
            file,
            created: step,
            sizes: vec![(step, 0)],
            sectors: BTreeMap::new(),
            syncs: Vec::new(),
            names: vec![Since::new(step, Some(path.to_owned()))],
            edges: BTreeSet::new(),
            is_parted: false,
        }
    }

    /// The step of the last sync among the done ones, or of the file's creation.
    pub fn floor(&self, done: usize) -> usize {
        let synced = self.syncs.partition_point(|&step| step < done);
        synced
            .checked_sub(1)
            .map_or(self.created, |last| self.syncs[last])
    }

    fn size(&self) -> u64 {
        self.sizes.last().map_or(0, |&(_, size)| size)
    }

    fn size_at(&self, step: usize) -> u64 {
        let end = self.sizes.partition_point(|&(at, _)| at <= step);
        end.checked_sub(1).map_or(0, |last| self.sizes[last].1)
    }

    /// Smallest and largest size that it may have after a cut: write-back lets a file grow bit by
    /// bit.
    pub fn sizes(&self, done: usize) -> (u64, u64) {
        let floor = self.floor(done);
        let first = self.size_at(floor);
        self.sizes
            .iter()
            .filter(|&&(step, _)| step > floor && step <= done)
            .fold((first, first), |(least, most), &(_, size)| {
                (least.min(size), most.max(size))
            })
    }

    /// The contents that a sector may have after a cut, the safe one first. Zeros are possible as
    /// well where the file had no bytes at its last sync: the size may have reached the disk with a
    /// later write.
    pub fn versions(&self, index: u64, done: usize) -> Vec<Version> {
        let floor = self.floor(done);
        let all = self.sectors.get(&index).map_or(&[][..], |all| all);
        let safe = all.partition_point(|&(step, _)| step <= floor);
        let begun = all.partition_point(|&(step, _)| step <= done);
        let first = safe
            .checked_sub(1)
            .map_or(Version::Zero, |last| all[last].1.clone());
        let mut versions = vec![first];
        versions.extend(all[safe..begun].iter().map(|(_, version)| version.clone()));
        if index * SECTOR >= self.size_at(floor) && !versions.contains(&Version::Zero) {
            versions.push(Version::Zero);
        }
        versions
    }

    /// True if a sector, or the first part of it at the end of a file, is one of these versions. On
    /// a pool it may be one version up to an edge, where a change began or ended, and another from
    /// there: bytes and length are on two disks, and a full disk splits a file at any byte.
    pub fn is_one_of<'a>(
        &'a self,
        index: u64,
        got: &[u8],
        versions: impl IntoIterator<Item = &'a Version>,
    ) -> bool {
        let start = index * SECTOR;
        let inside = self.edges.range(start + 1..start + got.len() as u64);
        let mut edges: Vec<usize> = match self.is_parted {
            true => inside.map(|edge| (edge - start) as usize).collect(),
            false => Vec::new(),
        };
        edges.push(got.len());
        let mut fits = vec![false; edges.len()];
        for version in versions {
            let bytes = version.bytes(self.file, index);
            let mut from = 0;
            for (fits, &to) in fits.iter_mut().zip(&edges) {
                *fits |= bytes[from..to] == got[from..to];
                from = to;
            }
        }
        fits.into_iter().all(|fits| fits)
    }

    /// All versions that a sector ever had.
    pub fn versions_ever(&self, index: u64) -> impl Iterator<Item = &Version> {
        let all = self.sectors.get(&index).into_iter().flatten();
        all.map(|(_, version)| version)
    }

    fn latest(&self, index: u64) -> Version {
        self.sectors
            .get(&index)
            .and_then(|all| all.last())
            .map_or(Version::Zero, |(_, version)| version.clone())
    }

    /// Bytes `start..end` become those of `new`.
    fn change(&mut self, step: usize, start: u64, end: u64, new: &Version) {
        for index in start / SECTOR..end.div_ceil(SECTOR) {
            let from = start.saturating_sub(index * SECTOR) as usize;
            let to = (end - index * SECTOR).min(SECTOR) as usize;
            let version = if (from, to) == (0, SECTOR_BYTES) {
                new.clone()
            } else {
                let mut bytes = self.latest(index).bytes(self.file, index);
                bytes[from..to].copy_from_slice(&new.bytes(self.file, index)[from..to]);
                Version::Mixed(Arc::new(bytes))
            };
            self.sectors.entry(index).or_default().push((step, version));
        }
    }

    fn resize(&mut self, step: usize, size: u64) {
        let old = self.size();
        if size < old {
            self.change(step, size, old.next_multiple_of(SECTOR), &Version::Zero);
        }
        if size != old {
            self.sizes.push((step, size));
        }
    }
}

/// The history of one lane.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// All files that ever existed.
    pub files: BTreeMap<u64, FileHistory>,
    /// All paths that ever existed.
    pub paths: BTreeMap<String, Vec<Since<Occupant>>>,
}

/// A change of names that is not safe yet.
struct Pending {
    step: usize,
    folder: String,
    file: Option<u64>,
    /// fdatasync does not make it safe.
    full_only: bool,
}

impl History {
    /// The history of these steps, in the folder `root`, which existed before and is safe.
    pub fn of(root: &str, steps: &[Step]) -> History {
        let mut history = History::default();
        let was_there = Since {
            step: 0,
            safe_by: Some(0),
            what: Occupant::Folder,
        };
        history.paths.insert(root.to_owned(), vec![was_there]);
        let mut pending: Vec<Pending> = Vec::new();
        let mut safe_by: BTreeMap<usize, usize> = BTreeMap::new();
        for (number, step) in steps.iter().enumerate() {
            pending.extend(history.apply(number, step));
            pending.retain(|change| {
                let safe = change.is_safe_by(step);
                if safe {
                    safe_by.insert(change.step, number);
                }
                !safe
            });
        }
        for names in history.files.values_mut().map(|file| &mut file.names) {
            for name in names {
                name.safe_by = safe_by.get(&name.step).copied();
            }
        }
        for (path, changes) in &mut history.paths {
            for change in changes.iter_mut().skip(usize::from(path == root)) {
                change.safe_by = safe_by.get(&change.step).copied();
            }
        }
        history
    }

    /// The same on a pool, whose files have several segments.
    pub fn parted(mut self) -> History {
        for file in self.files.values_mut() {
            file.is_parted = true;
        }
        self
    }

    fn occupy(&mut self, path: &str, step: usize, who: Occupant) {
        let changes = self.paths.entry(path.to_owned()).or_default();
        changes.push(Since::new(step, who));
    }

    fn name(&mut self, file: u64, step: usize, path: Option<&str>) {
        if let Some(history) = self.files.get_mut(&file) {
            let name = path.map(str::to_owned);
            history.names.push(Since::new(step, name));
        }
    }

    /// Applies one step; returns its change of names, if it is one.
    fn apply(&mut self, number: usize, step: &Step) -> Option<Pending> {
        let pending = |path: &str, file, full_only| {
            Some(Pending {
                step: number,
                folder: folder_of(path).to_owned(),
                file,
                full_only,
            })
        };
        match step {
            Step::MakeFolder { path } => {
                self.occupy(path, number, Occupant::Folder);
                pending(path, None, true)
            }
            Step::Create { file, path } => {
                let history = FileHistory::new(*file, number, path);
                self.files.insert(*file, history);
                self.occupy(path, number, Occupant::File(*file));
                pending(path, Some(*file), false)
            }
            Step::Rename { file, from, to } => {
                if let Some(Occupant::File(old)) = self.occupant(to) {
                    self.name(old, number, None);
                }
                self.name(*file, number, Some(to));
                self.occupy(from, number, Occupant::Nobody);
                self.occupy(to, number, Occupant::File(*file));
                pending(to, Some(*file), true)
            }
            Step::Unlink { file, path } => {
                self.name(*file, number, None);
                self.occupy(path, number, Occupant::Nobody);
                pending(path, None, true)
            }
            Step::SyncAll => {
                for file in self.files.values_mut() {
                    file.syncs.push(number);
                }
                None
            }
            Step::SyncFolder { .. } => None,
            Step::Write { file, .. }
            | Step::WriteThrough { file, .. }
            | Step::Truncate { file, .. }
            | Step::Punch { file, .. }
            | Step::Reserve { file, .. }
            | Step::Sync { file, .. }
            | Step::LetGo { file } => {
                if let Some(file) = self.files.get_mut(file) {
                    change_content(file, number, step);
                }
                None
            }
        }
    }

    fn occupant(&self, path: &str) -> Option<Occupant> {
        Some(self.paths.get(path)?.last()?.what)
    }
}

impl Pending {
    fn is_safe_by(&self, step: &Step) -> bool {
        match step {
            Step::SyncAll => true,
            Step::SyncFolder { path } => *path == self.folder,
            Step::Sync { file, data_only } => {
                self.file == Some(*file) && !(self.full_only && *data_only)
            }
            Step::WriteThrough { file, .. } => self.file == Some(*file) && !self.full_only,
            _ => false,
        }
    }
}

fn change_content(history: &mut FileHistory, number: usize, step: &Step) {
    match *step {
        Step::Write { offset, length, .. }
        | Step::WriteThrough { offset, length, .. }
        | Step::Punch { offset, length, .. }
        | Step::Reserve { offset, length, .. } => {
            history.edges.extend([offset, offset + length]);
        }
        Step::Truncate { size, .. } => {
            history.edges.insert(size);
        }
        _ => {}
    }
    match *step {
        Step::Write { offset, length, .. } | Step::WriteThrough { offset, length, .. } => {
            let end = offset + length;
            let generation = number as u64 + 1;
            history.change(number, offset, end, &Version::Whole { generation });
            if end > history.size() {
                history.sizes.push((number, end));
            }
            if matches!(step, Step::WriteThrough { .. }) {
                history.syncs.push(number);
            }
        }
        Step::Truncate { size, .. } => history.resize(number, size),
        Step::Punch { offset, length, .. } => {
            let end = (offset + length).min(history.size().next_multiple_of(SECTOR));
            if offset < end {
                history.change(number, offset, end, &Version::Zero);
            }
        }
        Step::Sync { .. } => history.syncs.push(number),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: u64 = 1;

    fn write(offset: u64, length: u64) -> Step {
        Step::Write {
            file: F,
            offset,
            length,
            direct: false,
        }
    }

    fn sync(data_only: bool) -> Step {
        Step::Sync { file: F, data_only }
    }

    fn create(path: &str) -> Step {
        Step::Create {
            file: F,
            path: path.into(),
        }
    }

    fn whole(generation: u64) -> Version {
        Version::Whole { generation }
    }

    #[test]
    fn synced_sector_may_be_itself_or_newer_and_an_unsynced_one_nothing_too() {
        let steps = [
            create("l/a"),
            write(0, 512),
            sync(false),
            write(0, 1024),
            write(0, 512),
        ];
        let history = History::of("l", &steps);
        let file = &history.files[&F];
        // Step 3 may have begun when 3 are done; step 4 may not.
        assert_eq!(file.versions(0, 3), [whole(2), whole(4)]);
        assert_eq!(file.versions(0, 5), [whole(2), whole(4), whole(5)]);
        assert_eq!(file.versions(1, 3), [Version::Zero, whole(4)]);
        assert_eq!(file.sizes(3), (512, 1024));
        // The sync is not acknowledged yet.
        assert_eq!(file.versions(0, 2), [Version::Zero, whole(2)]);
        assert_eq!(file.sizes(2), (0, 512));
    }

    #[test]
    fn cut_off_sector_is_mixed_and_what_is_behind_it_zero() {
        let steps = [
            create("l/a"),
            write(0, 2048),
            sync(true),
            Step::Truncate { file: F, size: 700 },
            write(1200, 100),
        ];
        let history = History::of("l", &steps);
        let file = &history.files[&F];
        let [first, cut] = &file.versions(1, 4)[..] else {
            panic!("two versions are possible");
        };
        assert_eq!(*first, whole(2));
        let bytes = cut.bytes(F, 1);
        assert_eq!(bytes[..188], whole(2).bytes(F, 1)[..188]);
        assert_eq!(bytes[188..], [0; SECTOR_BYTES - 188]);
        assert_eq!(file.versions(3, 4), [whole(2), Version::Zero]);
        assert_eq!(file.sizes(4), (700, 2048));
        let after_all = file.versions(2, 5);
        assert_eq!(after_all.len(), 3);
    }

    #[test]
    fn sector_of_a_pool_may_be_parted_where_something_ended_and_nowhere_else() {
        let steps = [create("l/a"), write(0, 700), sync(true), write(512, 512)];
        let plain = History::of("l", &steps);
        let pool = plain.clone().parted();
        let fits = |history: &History, parts: usize| {
            let file = &history.files[&F];
            let versions = file.versions(1, 4);
            let mut got = whole(4).bytes(F, 1);
            got[parts..].copy_from_slice(&versions[0].bytes(F, 1)[parts..]);
            file.is_one_of(1, &got, &versions)
        };
        // The new version up to the former end of the file, the old one behind it.
        assert!(fits(&pool, 188) && !fits(&plain, 188));
        assert!(!fits(&pool, 100) && !fits(&plain, 100));
        assert!(fits(&pool, 512) && fits(&plain, 512) && fits(&plain, 0));
    }

    #[test]
    fn name_is_safe_by_a_sync_of_folder_or_file_and_renamed_not_by_fdatasync() {
        let rename = Step::Rename {
            file: F,
            from: "l/a".into(),
            to: "l/b".into(),
        };
        let folder = Step::SyncFolder { path: "l".into() };
        let check = |last: Step, expect: Option<usize>| {
            let steps = [create("l/a"), sync(true), rename.clone(), last];
            let history = History::of("l", &steps);
            let names = &history.files[&F].names;
            assert_eq!(names[0].safe_by, Some(1));
            assert_eq!(names[1].safe_by, expect);
            assert_eq!(history.paths["l/a"][1].safe_by, expect);
            assert_eq!(history.paths["l/b"][0].safe_by, expect);
        };
        check(sync(true), None);
        check(sync(false), Some(3));
        check(folder, Some(3));
        check(Step::SyncAll, Some(3));
    }

    #[test]
    fn possible_begins_with_the_last_safe_change() {
        let change = |step, safe_by| Since {
            step,
            safe_by,
            what: step,
        };
        let changes = [change(0, Some(2)), change(1, Some(2)), change(4, None)];
        let whats = |done| {
            let (possible, safe) = possible(&changes, done);
            (possible.iter().map(|c| c.what).collect::<Vec<_>>(), safe)
        };
        assert_eq!(whats(0), (vec![0], false));
        assert_eq!(whats(2), (vec![0, 1], false));
        assert_eq!(whats(3), (vec![1], true));
        assert_eq!(whats(4), (vec![1, 4], true));
    }
}
