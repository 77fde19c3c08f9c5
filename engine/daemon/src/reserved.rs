// SPDX-License-Identifier: Apache-2.0
//! Files for which we reserved blocks and have not freed them yet, in a file that outlives us:
//! `lanes/reserved`, laid out as `rushes_core::format::reserved` says. Entries written here are
//! small and lie in memory: a write does not wait.
//!
//! The next daemon, or `rushes recover`, frees the blocks that a daemon leaves, when no program has
//! the file open: a program that lengthens it at the same moment would lose bytes. The same goes
//! for files that we forgot before their blocks were freed.

use crate::event_loop::Daemon;
use crate::files::Durable;
use crate::jobs::Job;
use crate::share::Share;
use crate::worker::Urgency;
use rushes_core::format::lane::{FileRecord, HeadFault};
use rushes_core::format::reserved::*;
use rushes_core::server::{Event, FileKey};
use rushes_core::units::{Duration, FileId, Instant};
use rushes_sys::space::{self, GivenBack};
use rushes_sys::{SysError, clock};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A door that has closed a file's handle closes its own descriptor a moment later.
const TRY_FIRST: Duration = Duration::from_ms(500);
/// How often files that a program had open are tried again.
const TRY_AGAIN: Duration = Duration::from_s(20);

/// The table of them.
pub(crate) struct Reserved {
    file: File,
    records: HashMap<FileKey, u32>,
    free: Vec<u32>,
    next: u32,
    /// Records without an open file of ours: of a former daemon, or of files that we forgot.
    left: BTreeMap<u32, FileRecord>,
}

fn path_in(folder: &Path) -> PathBuf {
    folder.join("reserved")
}

fn key_of(file: &FileRecord) -> FileKey {
    FileKey {
        device: file.device,
        inode: file.inode,
    }
}

/// Whether the record is of this file, and not of another one that had its inode number.
fn is_of(record: &FileRecord, durable: &Durable) -> bool {
    let own = durable.record();
    record.file_system == own.file_system
        && (record.handle_kind, record.handle) == (own.handle_kind, own.handle)
}

/// True when a former daemon left blocks to free.
pub(crate) fn any_in(folder: &Path) -> bool {
    path_in(folder).exists()
        && Reserved::open(folder).is_ok_and(|reserved| !reserved.left.is_empty())
}

impl Reserved {
    /// The table in this folder with the records of a former daemon; made if there is none.
    pub(crate) fn open(folder: &Path) -> Result<Reserved, SysError> {
        let path = path_in(folder);
        let failed = |error| SysError::new("open", path.display().to_string(), error);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let mut reserved = Reserved {
            file,
            records: HashMap::new(),
            free: Vec::new(),
            next: 0,
            left: BTreeMap::new(),
        };
        reserved.take_over().map_err(failed)?;
        Ok(reserved)
    }

    fn take_over(&mut self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        let mut found = [0; HEAD_BYTES];
        if length > 0 {
            // A shorter file never got its whole head.
            let _ = self.file.read_exact_at(&mut found, 0);
        }
        match check_head(&found) {
            Ok(()) => {}
            Err(fault) => {
                if !matches!(fault, HeadFault::Magic(0)) {
                    tracing::warn!(
                        "cannot read the list of files with reserved blocks ({fault:?}); blocks that an earlier daemon reserved \
                         are not freed; see \"Space\" in docs/guide/recording.md"
                    );
                }
                self.file.set_len(0)?;
                return self.file.write_all_at(&head(), 0);
            }
        }
        let mut bytes = [0; RECORD_BYTES];
        for record in 0..RECORD_COUNT_MAX {
            if place_of(record) + RECORD_BYTES as u64 > length {
                break;
            }
            self.file.read_exact_at(&mut bytes, place_of(record))?;
            self.next = record + 1;
            match file_in(&bytes) {
                Ok(Some(file)) => {
                    self.records.insert(key_of(&file), record);
                    self.left.insert(record, file);
                }
                Ok(None) => self.free.push(record),
                Err(damage) => {
                    tracing::warn!(
                        "an entry of the list of files with reserved blocks is damaged: {damage:?}"
                    );
                    self.strike(record)?;
                }
            }
        }
        Ok(())
    }

    /// Blocks are about to be reserved for this file.
    ///
    /// Errors   no room: after a crash the file keeps its reserved blocks
    pub(crate) fn begin(&mut self, durable: &Durable) -> io::Result<()> {
        if let Some(record) = self.records.get(&durable.key)
            && self
                .left
                .get(record)
                .is_none_or(|left| is_of(left, durable))
        {
            self.left.remove(record);
            return Ok(());
        }
        // If another file had its numbers, which is deleted or on a file system that is away, the
        // record of that one stays.
        let record = match self.free.pop() {
            Some(record) => record,
            None if self.next < RECORD_COUNT_MAX => {
                self.next += 1;
                self.next - 1
            }
            None => return Err(io::ErrorKind::StorageFull.into()),
        };
        let bytes = record_of(&durable.record());
        match self.file.write_all_at(&bytes, place_of(record)) {
            Ok(()) => {
                self.records.insert(durable.key, record);
                Ok(())
            }
            Err(error) => {
                self.free.push(record);
                Err(error)
            }
        }
    }

    /// The file's blocks were freed.
    pub(crate) fn end(&mut self, key: FileKey) {
        if let Some(record) = self.records.remove(&key) {
            self.left.remove(&record);
            self.strike_or_say(record);
        }
    }

    /// We forget the file. True: it has blocks to free.
    pub(crate) fn leave(&mut self, durable: &Durable) -> bool {
        let record = self.records.get(&durable.key);
        if let Some(record) = record {
            self.left.insert(*record, durable.record());
        }
        record.is_some()
    }

    /// A client has opened a file: if it has a left record, its open file frees the blocks. True:
    /// it has one.
    pub(crate) fn resume_if_same(&mut self, durable: &Durable) -> bool {
        let record = self.records.get(&durable.key);
        let left = record.and_then(|record| self.left.get(record));
        left.is_some_and(|left| is_of(left, durable)) && self.resume(durable.key)
    }

    /// We have the file open again, so its record is left no longer. True: it was.
    pub(crate) fn resume(&mut self, key: FileKey) -> bool {
        let record = self.records.get(&key);
        record.is_some_and(|record| self.left.remove(record).is_some())
    }

    /// A worker has freed the blocks of a left record. Returns the file that doors know by its
    /// numbers; None: we have it open by now, or another file has its numbers.
    fn end_left(&mut self, record: u32, attempted: &FileRecord) -> Option<FileKey> {
        if self.left.get(&record) != Some(attempted) {
            return None;
        }
        self.left.remove(&record);
        self.strike_or_say(record);
        let key = key_of(attempted);
        if self.records.get(&key) != Some(&record) {
            return None;
        }
        self.records.remove(&key);
        Some(key)
    }

    /// All files with records.
    pub(crate) fn keys(&self) -> impl Iterator<Item = FileKey> {
        self.records.keys().copied()
    }

    fn strike_or_say(&mut self, record: u32) {
        if let Err(error) = self.strike(record) {
            tracing::warn!("cannot clear a record of reserved blocks: {error}");
        }
    }

    fn strike(&mut self, record: u32) -> io::Result<()> {
        self.file.write_all_at(&[0; 8], place_of(record))?;
        self.free.push(record);
        Ok(())
    }
}

/// A worker's result for each record; None: no share is on its file system now.
pub(crate) type Attempts = Vec<(u32, FileRecord, io::Result<Option<GivenBack>>)>;

/// Try to free the blocks of left records. Waits for disks.
pub(crate) fn give_back(shares: &[Arc<Share>], left: &[(u32, FileRecord)]) -> Attempts {
    let roots: Vec<_> = shares
        .iter()
        .filter_map(|share| {
            let root = share.readable_root().ok()?;
            Some((space::file_system_id(&root).ok()?, root))
        })
        .collect();
    let attempt = |file: &FileRecord| {
        let root = roots.iter().find(|(id, _)| *id == file.file_system);
        let handle = file.handle.get(..file.handle_bytes as usize);
        match (root, handle) {
            (Some((_, root)), Some(handle)) => {
                space::give_back(root, file.handle_kind, handle).map(Some)
            }
            _ => Ok(None),
        }
    };
    left.iter()
        .map(|(record, file)| (*record, *file, attempt(file)))
        .collect()
}

impl Daemon {
    /// A file was opened: if it has blocks that were left reserved, they can be freed after its
    /// last close.
    pub(super) fn resume_reserve(&mut self, id: FileId) {
        let file = self.files.get(id);
        let written = file.and_then(|file| file.written.as_ref());
        let (Some(written), Some(lanes)) = (written, &mut self.lanes) else {
            return;
        };
        if lanes.reserved.resume_if_same(&written.durable) {
            self.feed(Event::ReserveFound { file: id });
        }
    }

    /// A last attempt before we end. True: it is under way.
    pub(super) fn give_back_at_end(&mut self) -> bool {
        if std::mem::take(&mut self.gives_back_at_end) {
            self.give_back_at = Instant::ZERO;
            self.give_left_back(clock::now());
        }
        self.is_giving_back
    }

    /// Start an attempt to free left blocks, if it is time.
    pub(super) fn give_left_back(&mut self, now: Instant) {
        if now < self.give_back_at || self.is_giving_back {
            return;
        }
        self.give_back_at = Instant::NEVER;
        let Some(lanes) = &self.lanes else {
            return;
        };
        let left: Vec<(u32, FileRecord)> = lanes
            .reserved
            .left
            .iter()
            .map(|(record, file)| (*record, *file))
            .collect();
        if left.is_empty() {
            return;
        }
        let shares = self.shares.iter().map(|served| served.share.clone());
        let job = Job::GiveBack {
            shares: shares.collect(),
            left,
        };
        self.is_giving_back = self.workers.push(Urgency::Now, job).is_ok();
        if !self.is_giving_back {
            self.give_back_at = now + TRY_AGAIN;
        }
    }

    pub(super) fn given_back(&mut self, attempts: Attempts) {
        self.is_giving_back = false;
        let (mut done_count, mut busy_count) = (0, 0);
        let attempted: HashSet<u32> = attempts.iter().map(|(record, ..)| *record).collect();
        for (record, file, result) in attempts {
            match result {
                Ok(Some(GivenBack::Done | GivenBack::Gone)) => {
                    done_count += 1;
                    if let Some(lanes) = &mut self.lanes
                        && let Some(key) = lanes.reserved.end_left(record, &file)
                    {
                        lanes.facts.clear_reserved(key.device, key.inode);
                    }
                }
                Ok(Some(GivenBack::Busy)) => busy_count += 1,
                Ok(None) => self.say_once(String::from(
                    "blocks stay reserved for files of a file system that has no share now; they \
                     are freed when it has one",
                )),
                Err(error) => self.say_once(format!(
                    "cannot free the blocks reserved for a file: {error}"
                )),
            }
        }
        if done_count > 0 {
            tracing::info!("freed the blocks that were reserved for {done_count} files");
        }
        if busy_count > 0 {
            tracing::info!(
                "{busy_count} files with reserved blocks are open; their blocks are freed later"
            );
            self.give_back_at = clock::now() + TRY_AGAIN;
        }
        let left_meanwhile = self.lanes.as_ref().is_some_and(|lanes| {
            let mut left = lanes.reserved.left.keys();
            left.any(|record| !attempted.contains(record))
        });
        if left_meanwhile {
            self.give_left_back_soon();
        }
    }

    /// A record was left: try it soon.
    pub(super) fn give_left_back_soon(&mut self) {
        if !self.is_giving_back {
            self.give_back_at = self.give_back_at.min(clock::now() + TRY_FIRST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::Folder;
    use rushes_shm::Writer;

    fn durable(inode: u64) -> Durable {
        Durable {
            key: FileKey { device: 5, inode },
            file_system: [3; 16],
            handle_kind: 1,
            handle: inode.to_le_bytes().into(),
            writer: Writer { uid: 1, gid: 2 },
        }
    }

    fn left_inodes(reserved: &Reserved) -> Vec<u64> {
        reserved.left.values().map(|file| file.inode).collect()
    }

    #[test]
    fn what_was_begun_and_not_ended_is_left_for_the_next() {
        let folder = Folder::new();
        assert!(!any_in(&folder.0));
        let mut first = Reserved::open(&folder.0).unwrap();
        for inode in [10, 11, 12] {
            first.begin(&durable(inode)).unwrap();
            // A second call adds no record.
            first.begin(&durable(inode)).unwrap();
        }
        assert_eq!(left_inodes(&first), [0; 0]);
        first.end(durable(11).key);
        drop(first);
        assert!(any_in(&folder.0));
        let mut next = Reserved::open(&folder.0).unwrap();
        assert_eq!(left_inodes(&next), [10, 12]);
        // The new record takes the place of the one that ended.
        next.begin(&durable(13)).unwrap();
        assert_eq!(next.next, 3);
        assert!(next.resume(durable(10).key) && !next.resume(durable(10).key));
        // A worker that started earlier has freed its blocks.
        assert_eq!(next.end_left(0, &durable(10).record()), None);
        assert_eq!(next.end_left(1, &durable(11).record()), None);
        assert_eq!(left_inodes(&next), [12]);
        assert_eq!(
            next.end_left(2, &durable(12).record()),
            Some(durable(12).key)
        );
        assert_eq!(left_inodes(&next), [0; 0]);
        assert!(next.leave(&durable(10)) && !next.leave(&durable(12)));
        assert_eq!(left_inodes(&next), [10]);
        drop(next);
        assert_eq!(left_inodes(&Reserved::open(&folder.0).unwrap()), [10, 13]);
    }

    #[test]
    fn who_gets_an_inode_number_again_is_another_file() {
        let folder = Folder::new();
        let mut first = Reserved::open(&folder.0).unwrap();
        first.begin(&durable(10)).unwrap();
        drop(first);
        let another = Durable {
            handle: 99u64.to_le_bytes().into(),
            ..durable(10)
        };
        let mut next = Reserved::open(&folder.0).unwrap();
        assert!(!next.resume_if_same(&another));
        next.begin(&another).unwrap();
        assert_eq!(left_inodes(&next), [10], "the former one is seen to");
        // The deleted file's record must not end that of the file with its number.
        assert_eq!(next.end_left(0, &durable(10).record()), None);
        drop(next);
        let mut last = Reserved::open(&folder.0).unwrap();
        assert_eq!(left_inodes(&last), [10]);
        assert!(!last.resume_if_same(&durable(10)) && last.resume_if_same(&another));
    }

    #[test]
    fn damage_costs_one_file_and_another_version_all() {
        let folder = Folder::new();
        let mut first = Reserved::open(&folder.0).unwrap();
        for inode in [10, 11, 12] {
            first.begin(&durable(inode)).unwrap();
        }
        first.file.write_all_at(&[99], place_of(1) + 50).unwrap();
        drop(first);
        let next = Reserved::open(&folder.0).unwrap();
        assert_eq!(left_inodes(&next), [10, 12]);
        next.file.write_all_at(&[9], 8).unwrap();
        drop(next);
        let mut last = Reserved::open(&folder.0).unwrap();
        assert_eq!(left_inodes(&last), [0; 0]);
        last.begin(&durable(20)).unwrap();
        assert_eq!(last.records.len(), 1);
    }

    #[test]
    fn no_more_than_there_is_room_for() {
        let folder = Folder::new();
        let mut reserved = Reserved::open(&folder.0).unwrap();
        for inode in 0..u64::from(RECORD_COUNT_MAX) {
            reserved.begin(&durable(inode)).unwrap();
        }
        assert!(reserved.begin(&durable(u64::MAX)).is_err());
        reserved.end(durable(77).key);
        reserved.begin(&durable(u64::MAX)).unwrap();
    }
}
