// SPDX-License-Identifier: Apache-2.0
//! Files the daemon holds open for itself, under the numbers the core knows them by.
//!
//! One inode has one number for all clients and all its names: so bytes that the daemon read for
//! one client, or ahead of all, serve the next.

use crate::share::Share;
use rushes_core::server::{Errno, FileKey, LOST_IN_A_ROW, RateHint};
use rushes_core::units::{ByteRange, Duration, FileId, Instant};
use rushes_shm::Writer;
use rushes_sys::space::WriteFile;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Descriptors of a file that is written.
pub(crate) const WRITTEN_FILE_DESCRIPTORS: u64 = 3;

/// The facts by which another daemon finds the file again, and the user on whose account it is
/// written.
#[derive(Clone, Debug)]
pub(crate) struct Durable {
    pub(crate) key: FileKey,
    pub(crate) file_system: [u8; 16],
    /// As `name_to_handle_at` gives it.
    pub(crate) handle_kind: i32,
    pub(crate) handle: Box<[u8]>,
    pub(crate) writer: Writer,
}

/// Instead of a time: the file system has it already.
pub(crate) const TIME_IS_SET: i64 = i64::MIN;

/// Our state of a file that is written through lanes.
#[derive(Debug)]
pub(crate) struct Written {
    /// Or why it could not be opened for writing yet, for a file that a former daemon wrote to.
    /// Each write retries it.
    pub(crate) file: Result<WriteFile, Errno>,
    pub(crate) durable: Durable,
    /// Time of the latest change that the file system does not have yet; or [`TIME_IS_SET`]. Units:
    /// ns since 1970.
    pub(crate) changed_ns: i64,
    /// Work on its blocks and times that waits for the chore under way: one runs at a time.
    pub(crate) chores: VecDeque<Chore>,
    pub(crate) is_busy: bool,
    /// The file's `told_past_count` when its latest sync was queued.
    pub(crate) told_past_before: u64,
    /// Consecutive failed syncs whose error may not come from the disk.
    pub(crate) doubted_sync_count: u8,
    /// The error of writes that was last logged, and the time.
    pub(crate) said: Option<(Errno, Instant)>,
    /// The log's warning that a flush failed, perhaps without a fault of the disk.
    pub(crate) doubted_flush: Repeated,
}

#[cfg(test)]
impl Written {
    /// For unit tests: a file to which nothing has happened yet.
    pub(crate) fn of_test(file: Result<WriteFile, Errno>, durable: Durable) -> Written {
        Written {
            file,
            durable,
            changed_ns: TIME_IS_SET,
            chores: VecDeque::new(),
            is_busy: false,
            told_past_before: 0,
            doubted_sync_count: 0,
            said: None,
            doubted_flush: Default::default(),
        }
    }
}

/// A sentence that would fill the log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Repeated {
    said_at: Option<Instant>,
    unsaid_count: u64,
}

impl Repeated {
    /// Decides whether to log it now; if it was logged less than `pace` ago, counts it.
    ///
    /// Returns  how often it was left out since it was last logged; None: not now
    pub(crate) fn say(&mut self, now: Instant, pace: Duration) -> Option<u64> {
        if self.said_at.is_some_and(|at| now < at + pace) {
            self.unsaid_count += 1;
            return None;
        }
        self.said_at = Some(now);
        Some(std::mem::take(&mut self.unsaid_count))
    }
}

impl Written {
    /// Count an error of a sync. True: it may not come from the disk. The kernel reports a failure
    /// after a write past its cache to every descriptor of the file, and first to a sync that runs
    /// at that moment. So the error is doubtful if the descriptor that writes past the cache got
    /// one as well, just now or since the sync was queued. A drive that fails to flush reports it
    /// to the sync alone. The last of `LOST_IN_A_ROW` such errors in a row counts as the disk's.
    pub(crate) fn doubt_sync(
        &mut self,
        errno: Errno,
        is_told_past: bool,
        told_past_count: u64,
    ) -> bool {
        self.doubted_sync_count += 1;
        let is_told_past = is_told_past || told_past_count > self.told_past_before;
        let is_doubtful =
            errno == Errno::IO && is_told_past && self.doubted_sync_count < LOST_IN_A_ROW;
        if !is_doubtful {
            self.doubted_sync_count = 0;
        }
        is_doubtful
    }
}

/// Work on a written file besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
    /// See `Action::Reserve`.
    Reserve { needed: ByteRange, wished_end: u64 },
    /// See `Action::Trim`; the file's length at that time.
    Trim { size: u64 },
    /// See `Action::Clean`: set its time.
    Settle { changed_ns: i64 },
}

/// A file held open.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) key: FileKey,
    pub(crate) fd: Arc<OwnedFd>,
    /// As last read from the file system. Units: bytes.
    pub(crate) size: u64,
    pub(crate) share: Arc<Share>,
    /// Below the share's root, as last opened.
    pub(crate) path: String,
    /// Tells this use of the number from a later one.
    pub(crate) generation: u64,
    /// Changes by others are watched.
    pub(crate) watched: bool,
    /// Set if it may be written through lanes. A caller that opens it for that calls
    /// [`Files::count_again`].
    pub(crate) written: Option<Written>,
    /// Reads through the kernel's cache, if it was read so before it was written (through.rs).
    pub(crate) through: Option<Arc<OwnedFd>>,
    /// Consecutive writes past that cache after which the kernel reported an error.
    pub(crate) lost_count: u8,
    /// Errors of the descriptor that writes past that cache which a sync had got already from the
    /// one that syncs.
    pub(crate) told_past_count: u64,
    /// The kernel reported an error that may not come from a disk: the disk may lack bytes that the
    /// kernel's cache has.
    pub(crate) is_doubted: bool,
    /// Its part of the descriptors of all files.
    counted: u64,
}

/// Rates of headers, so that the header of a file that is opened often is read once.
///
/// Kept by inode and version: a changed file may have another rate.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    said: HashMap<(FileKey, u64), Option<RateHint>>,
    /// Reads of headers that were begun, and ended.
    pub(crate) begun_count: u64,
    pub(crate) ended_count: u64,
}

/// Files whose headers are remembered; beyond that all are forgotten and read again.
const HEADER_COUNT_MAX: usize = 16_384;

impl Headers {
    /// The rate of the header; None: it was not read, Some(None): it gives no rate.
    pub(crate) fn get(&self, key: FileKey, version: u64) -> Option<Option<RateHint>> {
        self.said.get(&(key, version)).copied()
    }

    pub(crate) fn put(&mut self, key: FileKey, version: u64, hint: Option<RateHint>) {
        if self.said.len() >= HEADER_COUNT_MAX {
            self.said.clear();
        }
        self.said.insert((key, version), hint);
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Files {
    by_id: HashMap<FileId, File>,
    by_key: HashMap<FileKey, FileId>,
    next: u32,
    generation: u64,
    /// Of all of them together.
    descriptors: u64,
}

impl File {
    /// The number of descriptors that it takes.
    fn descriptors(&self) -> u64 {
        let written = match &self.written {
            Some(Written { file: Ok(_), .. }) => WRITTEN_FILE_DESCRIPTORS,
            _ => 1,
        };
        written + u64::from(self.through.is_some())
    }

    /// A descriptor that reads through the kernel's cache, if there is one.
    pub(crate) fn through(&self) -> Option<&Arc<OwnedFd>> {
        let opened = self.written.as_ref().map(|written| &written.file);
        match opened {
            Some(Ok(opened)) => Some(&opened.buffered),
            _ => self.through.as_ref(),
        }
    }
}

impl Files {
    /// The number of a file just opened: the one it has, or a new one. True when it had been opened
    /// through another mount; from now on its reads and writes go through this one.
    pub(crate) fn adopt(
        &mut self,
        key: FileKey,
        fd: Arc<OwnedFd>,
        size: u64,
        share: &Arc<Share>,
        path: &str,
    ) -> (FileId, bool) {
        if let Some(id) = self.by_key.get(&key)
            && let Some(file) = self.by_id.get_mut(id)
        {
            // We hold it open, so its inode number cannot belong to another file by now.
            file.size = size;
            if file.path != path {
                file.path = path.to_string();
            }
            let has_moved = file.share.mount != share.mount;
            if has_moved {
                file.fd = fd;
                file.through = None;
                let count = file.descriptors();
                self.descriptors = self.descriptors - file.counted + count;
                file.counted = count;
            }
            file.share = share.clone();
            return (*id, has_moved);
        }
        let id = self.unused();
        self.generation += 1;
        let file = File {
            key,
            fd,
            size,
            share: share.clone(),
            path: path.to_string(),
            generation: self.generation,
            watched: false,
            written: None,
            through: None,
            lost_count: 0,
            told_past_count: 0,
            is_doubted: false,
            counted: 1,
        };
        self.descriptors += file.counted;
        self.by_id.insert(id, file);
        self.by_key.insert(key, id);
        (id, false)
    }

    pub(crate) fn get(&self, id: FileId) -> Option<&File> {
        self.by_id.get(&id)
    }

    pub(crate) fn by_key(&self, key: FileKey) -> Option<&File> {
        self.get(self.id_of(key)?)
    }

    pub(crate) fn id_of(&self, key: FileKey) -> Option<FileId> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn get_mut(&mut self, id: FileId) -> Option<&mut File> {
        self.by_id.get_mut(&id)
    }

    /// The file, if the number still means the same one as when a job was sent.
    pub(crate) fn same_mut(&mut self, id: FileId, generation: u64) -> Option<&mut File> {
        self.get_mut(id)
            .filter(|file| file.generation == generation)
    }

    /// Close it. Reads in flight keep its descriptor until they have ended.
    pub(crate) fn forget(&mut self, id: FileId) -> Option<File> {
        let file = self.by_id.remove(&id)?;
        self.by_key.remove(&file.key);
        self.descriptors -= file.counted;
        Some(file)
    }

    /// Numbers wrap around only after 2^32 files, so that a late answer about a forgotten file is
    /// never taken for one about another.
    fn unused(&mut self) -> FileId {
        loop {
            self.next = self.next.wrapping_add(1);
            if !self.by_id.contains_key(&FileId(self.next)) {
                return FileId(self.next);
            }
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.by_id.len()
    }

    /// How many descriptors they have in all.
    pub(crate) fn descriptors(&self) -> u64 {
        self.descriptors
    }

    /// Count a file's descriptors again: it may have been opened for writing.
    pub(crate) fn count_again(&mut self, id: FileId) {
        if let Some(file) = self.by_id.get_mut(&id) {
            let count = file.descriptors();
            self.descriptors = self.descriptors - file.counted + count;
            file.counted = count;
        }
    }

    /// Those that could not be opened for writing yet, and why.
    pub(crate) fn unwritable(&self) -> impl Iterator<Item = (FileId, &File, Errno)> {
        self.by_id.iter().filter_map(|(id, file)| {
            let why = file.written.as_ref()?.file.as_ref().err()?;
            Some((*id, file, *why))
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (FileId, &File)> {
        self.by_id.iter().map(|(id, file)| (*id, file))
    }

    pub(crate) fn keys(&self) -> Vec<FileKey> {
        self.by_key.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ShareConfig;

    #[test]
    fn an_error_that_the_sync_alone_was_told_of_is_the_disks() {
        let durable = Durable {
            key: FileKey::default(),
            file_system: [0; 16],
            handle_kind: 0,
            handle: Box::default(),
            writer: Writer { uid: 0, gid: 0 },
        };
        let mut written = Written::of_test(Err(Errno::IO), durable);
        written.told_past_before = 7;
        // A drive that fails to flush; the other descriptor had got an error before the sync.
        assert!(!written.doubt_sync(Errno::IO, false, 7));
        assert!(!written.doubt_sync(Errno::NO_SPACE, true, 8));
        for _ in 1..LOST_IN_A_ROW {
            assert!(written.doubt_sync(Errno::IO, true, 7));
        }
        assert!(
            !written.doubt_sync(Errno::IO, true, 7),
            "the third in a row"
        );
        assert!(written.doubt_sync(Errno::IO, false, 8));
    }

    #[test]
    fn an_inode_keeps_its_number_until_it_is_forgotten() {
        let folder = std::env::temp_dir();
        let share = Arc::new(
            Share::open(&ShareConfig {
                name: String::from("s"),
                path: folder,
                exclusive: false,
            })
            .unwrap(),
        );
        let fd = || Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let key = FileKey {
            device: 1,
            inode: 2,
        };
        let mut files = Files::default();
        let (id, _) = files.adopt(key, fd(), 5, &share, "a");
        assert_eq!(files.adopt(key, fd(), 6, &share, "b"), (id, false));
        let file = files.get(id).unwrap();
        assert_eq!((file.size, file.path.as_str()), (6, "b"));
        let generation = file.generation;
        files.forget(id).unwrap();
        let (other, _) = files.adopt(key, fd(), 7, &share, "a");
        assert!(other != id);
        assert!(files.same_mut(id, generation).is_none());
        assert_eq!(files.keys(), [key]);
        assert_eq!(files.descriptors(), 1);
        let durable = Durable {
            key,
            file_system: [0; 16],
            handle_kind: 0,
            handle: Box::default(),
            writer: Writer { uid: 0, gid: 0 },
        };
        files.get_mut(other).unwrap().written = Some(Written::of_test(
            Ok(WriteFile {
                direct: fd(),
                buffered: fd(),
            }),
            durable,
        ));
        files.count_again(other);
        files.count_again(other);
        assert_eq!(files.descriptors(), WRITTEN_FILE_DESCRIPTORS);
        files.forget(other).unwrap();
        assert_eq!(files.descriptors(), 0);
    }
}
