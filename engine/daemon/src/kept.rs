// SPDX-License-Identifier: Apache-2.0
//! Bytes that a former daemon left and that cannot be written yet, file by file: the daemon looks
//! for their files again and again, and reports their state to doors and in `rushes status`.
//!
//! The bytes of a file are dropped only when the file is proved gone: its handle is stale on a file
//! system that is mounted, writable and without a detected fault. Any other obstacle proves
//! nothing: the file's pieces stay in their lanes, its fact stays, and until it is found its
//! clients get an error rather than older bytes. Files have no order among each other, so the other
//! files of a lane are written.

use crate::doctor::counted;
use crate::error::ServeError;
use crate::event_loop::Daemon;
use crate::files::{Durable, TIME_IS_SET, WRITTEN_FILE_DESCRIPTORS};
use crate::jobs::{Job, Looked, OpenedFile};
use crate::lanes::{Left, LeftPiece};
use crate::share::Share;
use crate::worker::Urgency;
use crate::writing;
use rushes_core::format::facts::known_generation;
use rushes_core::format::lane::{FileRecord, State};
use rushes_core::server::{Errno, Event, FileFacts, FileKey};
use rushes_core::units::{Duration, FileId, Instant, LaneId};
use rushes_core::write::Runs;
use rushes_shm::Writer;
use rushes_sys::file::{PrivateFile, status};
use rushes_sys::handle::generation_of;
use rushes_sys::space::{self, WriteFile};
use rushes_sys::watch::handle_of;
use rushes_sys::{clock, errno_of, extents, limits};
use rustix::io::Errno as KernelError;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// How often the daemon looks for kept files again.
const LOOK_AGAIN: Duration = Duration::from_s(2);
/// Names of files in a sentence; then how many more there are.
const NAMES_MAX: usize = 3;

/// A file of which a former daemon left writes.
#[derive(Debug)]
pub(crate) struct KeptFile {
    record: FileRecord,
    /// Below its share; set by the first look for it.
    path: Option<String>,
    why: Why,
    pieces: Vec<(LaneId, LeftPiece)>,
}

/// Why it is not being written yet.
#[derive(Debug)]
pub(crate) enum Why {
    /// It waits for its turn: other files have all descriptors.
    Later,
    /// No share is on its file system.
    NotMounted,
    /// It could not be opened.
    Refused {
        /// The attempt, as a clause.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
}

/// Why a file was not found.
#[derive(Debug)]
pub(crate) enum Missed {
    /// It is proved to be deleted.
    Gone,
    /// It may be there.
    Kept(Why, Option<String>),
}

/// A kept file that a worker has found and opened, and where.
pub(crate) struct FoundAgain {
    found: OpenedFile,
    share: Arc<Share>,
    path: String,
}

/// How files are looked for.
pub(crate) struct Terms {
    /// The daemon only recovers: a file that cannot be opened for writing counts as missed.
    needs_writing: bool,
    /// Files to open at most.
    most: u64,
}

impl KeptFile {
    /// Its pieces that are not on disk yet. A piece that was written also keeps its record until
    /// the file's time is set.
    fn unwritten(&self) -> impl Iterator<Item = &LeftPiece> {
        let pieces = self.pieces.iter().map(|(_, left)| left);
        pieces.filter(|left| left.state != State::Spent)
    }

    fn handle(&self) -> &[u8] {
        handle_in(&self.record)
    }

    fn known_as(&self) -> (u64, u64) {
        (self.record.device, self.record.inode)
    }

    /// Whether this open file is the kept one.
    fn is(&self, key: FileKey, fd: impl AsFd) -> bool {
        let is_same = || {
            let handle = handle_of(&fd).ok()?;
            let (kind, handle) = handle.split_first_chunk::<4>()?;
            let file_system = space::file_system_id(&fd).ok()?;
            let is_handle = i32::from_ne_bytes(*kind) == self.record.handle_kind;
            Some(is_handle && handle == self.handle() && file_system == self.record.file_system)
        };
        key.inode == self.record.inode && is_same().unwrap_or(false)
    }

    fn name(&self) -> String {
        name_of(self.path.as_deref(), self.known_as())
    }

    fn reason(&self) -> String {
        match &self.why {
            Why::Later => {
                String::from("they are opened when descriptors of the files before them are free")
            }
            Why::NotMounted => {
                let mut lanes: Vec<u32> = self.pieces.iter().map(|(lane, _)| lane.0).collect();
                lanes.sort_unstable();
                lanes.dedup();
                let lanes: Vec<String> = lanes.iter().map(u32::to_string).collect();
                format!(
                    "their file system ({}it was device {}:{}) is not mounted where a share is: \
                     mount it there; `rushes status` names shares whose file systems are absent, \
                     and blkid shows where a UUID is. If it is lost for good: stop the daemon, \
                     then rushes recover --give-up N --yes, for lane {}",
                    uuid_of(&self.record.file_system),
                    rustix::fs::major(self.record.device),
                    rustix::fs::minor(self.record.device),
                    lanes.join(", ")
                )
            }
            Why::Refused { what, error } => format!("{what}: {error}; {}", remedy(error)),
        }
    }
}

/// As blkid and /etc/fstab write it. Empty if the kernel is an older one, which gives a number of
/// half the length instead of the UUID.
fn uuid_of(id: &[u8; 16]) -> String {
    let (_, second) = id.split_at(8);
    if second == [0; 8] {
        return String::new();
    }
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "UUID {}-{}-{}-{}-{}, ",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

/// The path, or the inode: the kernel knows no name of a file that was not looked up since its file
/// system was mounted.
fn name_of(path: Option<&str>, (device, inode): (u64, u64)) -> String {
    match path {
        Some(path) if !path.is_empty() => path.to_owned(),
        _ => format!(
            "inode {inode} of device {}:{}",
            rustix::fs::major(device),
            rustix::fs::minor(device)
        ),
    }
}

fn handle_in(record: &FileRecord) -> &[u8] {
    let length = (record.handle_bytes as usize).min(record.handle.len());
    record.handle.get(..length).unwrap_or_default()
}

/// The operator's remedy.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match KernelError::from_io_error(error) {
        Some(KernelError::ROFS) => {
            "remount it read-write (if it became read-only by itself, look at dmesg and check it with fsck first)"
        }
        Some(KernelError::MFILE) => "raise the limit of open files (LimitNOFILE=, ulimit -n)",
        Some(KernelError::NFILE) => "raise fs.file-max",
        // fs-verity refuses it with the same error, and no call takes it off a file.
        Some(KernelError::PERM) => {
            "lsattr shows the file's attribute that forbids it: chattr -i or chattr -a clears i or a; \
             V (fs-verity) is for good, so copy the file and write to the copy"
        }
        Some(KernelError::NOKEY) => "unlock its folder (fscrypt unlock FOLDER)",
        Some(KernelError::ACCESS) => "run it as root, or with the rights that rushes.service gives",
        Some(KernelError::TXTBSY) => {
            "end the program that runs from it; if it is swap, use swapoff"
        }
        Some(KernelError::NOMEM) => "free some memory",
        _ => "dmesg may say what is wrong with the disk; check the file system with fsck",
    }
}

/// The identity of each file system, with an open folder on it.
struct FileSystems(Vec<([u8; 16], OwnedFd, Arc<Share>)>);

impl FileSystems {
    /// The file systems on which shares lie now. A process that only recovers does not follow
    /// shares to other mounts, so it also opens their paths. Waits for them.
    fn of(shares: &[Arc<Share>], goes_by_path: bool) -> FileSystems {
        let mut known: Vec<([u8; 16], OwnedFd, Arc<Share>)> = Vec::new();
        for share in shares {
            let by_path = || std::fs::File::open(&share.config.path).map(OwnedFd::from);
            let root = [Some(share.readable_root()), goes_by_path.then(by_path)];
            for root in root.into_iter().flatten().flatten() {
                match space::file_system_id(&root) {
                    Ok(id) if known.iter().all(|(other, ..)| *other != id) => {
                        known.push((id, root, share.clone()));
                    }
                    _ => {}
                }
            }
        }
        FileSystems(known)
    }

    fn look_for(&self, record: &FileRecord, needs_writing: bool) -> Result<FoundAgain, Missed> {
        let system = self.0.iter().find(|(id, ..)| *id == record.file_system);
        let Some((_, root, share)) = system else {
            return Err(Missed::Kept(Why::NotMounted, None));
        };
        let (kind, handle) = (record.handle_kind, handle_in(record));
        let path = || space::name_by_handle(root, kind, handle).ok();
        let path = || path().map(|path| below(share, path));
        let refused = |what, error, path| Err(Missed::Kept(Why::Refused { what, error }, path));
        let fd = match space::open_by_handle(root, kind, handle) {
            Ok(fd) => fd,
            Err(error) if KernelError::from_io_error(&error) == Some(KernelError::STALE) => {
                return match space::prove_gone(root, kind, handle) {
                    Ok(()) => Err(Missed::Gone),
                    Err(error) => refused(
                        "they seem to be deleted, which cannot be proved on their file system",
                        error,
                        None,
                    ),
                };
            }
            Err(error) => return refused("they could not be opened", error, path()),
        };
        let found = match status(&*fd) {
            Ok(found) => found,
            Err(error) => return refused("their attributes could not be read", error, path()),
        };
        let opened = match space::open_writing_by_handle(root, kind, handle) {
            Ok(opened) => Ok(opened),
            Err(error) if needs_writing => {
                return refused("they could not be opened for writing", error, path());
            }
            Err(error) => Err(errno_of(&error)),
        };
        let places = extents::of(&*fd, usize::MAX)
            .map(|map| map.extents)
            .unwrap_or_default();
        Ok(FoundAgain {
            found: OpenedFile {
                looked: Looked::Writable(Box::new((opened, durable(record, found.key)))),
                file: PrivateFile {
                    fd,
                    direct: true,
                    status: found,
                },
                extents: places,
            },
            share: share.clone(),
            path: path().unwrap_or_default(),
        })
    }
}

/// The path below a share's root, as far as the kernel knows it.
fn below(share: &Share, path: PathBuf) -> String {
    path.strip_prefix(&share.real)
        .unwrap_or(&path)
        .to_string_lossy()
        .into_owned()
}

fn durable(record: &FileRecord, key: FileKey) -> Durable {
    Durable {
        key,
        file_system: record.file_system,
        handle_kind: record.handle_kind,
        handle: handle_in(record).into(),
        writer: Writer {
            uid: record.uid,
            gid: record.gid,
        },
    }
}

/// Look for files, by the number of their oldest write. Waits for disks.
pub(crate) fn find_again(
    shares: &[Arc<Share>],
    wanted: &[(u64, FileRecord)],
    terms: &Terms,
) -> Vec<(u64, Result<FoundAgain, Missed>)> {
    let systems = FileSystems::of(shares, terms.needs_writing);
    let mut left = terms.most;
    let mut look = |record: &FileRecord| {
        if left == 0 {
            return Err(Missed::Kept(Why::Later, None));
        }
        let found = systems.look_for(record, terms.needs_writing);
        match &found {
            Ok(_) => left -= 1,
            Err(Missed::Kept(Why::Refused { error, .. }, _)) => {
                let is_out = matches!(
                    KernelError::from_io_error(error),
                    Some(KernelError::MFILE | KernelError::NFILE)
                );
                left *= u64::from(!is_out);
            }
            Err(_) => {}
        }
        found
    };
    wanted
        .iter()
        .map(|(order, record)| (*order, look(record)))
        .collect()
}

/// The files with bytes in lanes, each by the number of its oldest write.
pub(crate) fn by_file(left: Vec<Left>) -> BTreeMap<u64, KeptFile> {
    let mut files: HashMap<([u8; 16], i32, Vec<u8>), KeptFile> = HashMap::new();
    for lane in left {
        for piece in lane.pieces {
            let record = piece.file;
            let identity = (
                record.file_system,
                record.handle_kind,
                handle_in(&record).to_vec(),
            );
            let file = files.entry(identity).or_insert_with(|| KeptFile {
                record,
                path: None,
                why: Why::Later,
                pieces: Vec::new(),
            });
            file.pieces.push((lane.lane, piece));
        }
    }
    let oldest = |file: &KeptFile| file.pieces.iter().map(|(_, left)| left.piece.order).min();
    files
        .into_values()
        .map(|file| (oldest(&file).unwrap_or(0), file))
        .collect()
}

impl Daemon {
    /// Look for all kept files, now. Waits for disks, so only before any session is served.
    pub(super) fn find_kept_first(&mut self) {
        let (shares, wanted, terms) = self.search();
        let found = find_again(&shares, &wanted, &terms);
        self.take_found(found);
        self.look_at = clock::now() + LOOK_AGAIN;
    }

    fn search(&self) -> (Vec<Arc<Share>>, Vec<(u64, FileRecord)>, Terms) {
        let shares = self.shares.iter().map(|served| served.share.clone());
        let wanted = self.kept.iter().map(|(order, kept)| (*order, kept.record));
        let room = limits::descriptor_count_max() / 2 / WRITTEN_FILE_DESCRIPTORS;
        let terms = Terms {
            needs_writing: self.only_recovers,
            most: room.saturating_sub(self.files.count() as u64).max(1),
        };
        (shares.collect(), wanted.collect(), terms)
    }

    /// Start a look for the kept files, if it is time.
    pub(super) fn look_for_kept(&mut self, now: Instant) {
        if now < self.look_at || self.is_looking {
            return;
        }
        self.look_at = Instant::NEVER;
        if self.kept.is_empty() {
            return;
        }
        let (shares, wanted, terms) = self.search();
        let job = Job::FindAgain {
            shares,
            wanted,
            terms,
        };
        self.is_looking = self.workers.push(Urgency::Now, job).is_ok();
        if !self.is_looking {
            self.look_at = now + LOOK_AGAIN;
        }
    }

    /// An obstacle may be gone: look at once, or, while a look is under way, right after it.
    pub(super) fn look_for_kept_soon(&mut self) {
        self.look_at = Instant::ZERO;
    }

    /// When the next look begins.
    pub(super) fn next_look(&self) -> Instant {
        match self.is_looking {
            true => Instant::NEVER,
            false => self.look_at,
        }
    }

    pub(super) fn found_again(&mut self, mut found: Vec<(u64, Result<FoundAgain, Missed>)>) {
        self.is_looking = false;
        // Drop the finds of a share that has moved meanwhile, since nothing would close them; the
        // next look finds these files where the share lies now.
        found.retain(|(_, result)| !matches!(result, Ok(again) if again.share.is_left()));
        self.looks_at_end |= self.take_found(found);
        self.look_at = self.look_at.min(clock::now() + LOOK_AGAIN);
    }

    /// Look once more before we end, and again as long as a look finds something. True: a look is
    /// under way.
    pub(super) fn look_at_end(&mut self) -> bool {
        if !self.is_looking && !self.kept.is_empty() && std::mem::take(&mut self.looks_at_end) {
            self.look_for_kept_soon();
            self.look_for_kept(clock::now());
        }
        self.is_looking
    }

    /// A client has opened a file: if it is a kept one, it is found.
    pub(super) fn find_kept(&mut self, found: &OpenedFile, share: &Arc<Share>, path: &str) {
        let key = found.file.status.key;
        let mut kept = self.kept.iter();
        let Some((&order, kept)) = kept.find(|(_, kept)| kept.is(key, &*found.file.fd)) else {
            return;
        };
        let opened = match &found.looked {
            Looked::Writable(written) => written.0.clone(),
            // The next attempt to write opens it.
            Looked::Not | Looked::Refused => Err(Errno::BAD_HANDLE),
        };
        let again = FoundAgain {
            found: OpenedFile {
                looked: Looked::Writable(Box::new((opened, durable(&kept.record, key)))),
                file: found.file.clone(),
                extents: found.extents.clone(),
            },
            share: share.clone(),
            path: path.to_owned(),
        };
        self.take_found(vec![(order, Ok(again))]);
    }

    /// Give the core the files that were found, and drop the writes to deleted ones. True: there
    /// was at least one of either.
    pub(super) fn take_found(&mut self, found: Vec<(u64, Result<FoundAgain, Missed>)>) -> bool {
        let mut told: Vec<(LaneId, LeftPiece, FileFacts)> = Vec::new();
        let mut is_any = false;
        for (order, result) in found {
            // A client may have opened it meanwhile.
            let Some(mut kept) = self.kept.remove(&order) else {
                continue;
            };
            match result {
                Ok(again) => {
                    is_any = true;
                    let facts = self.adopt_kept(&kept, again);
                    let pieces = kept.pieces.into_iter();
                    told.extend(pieces.map(|(lane, left)| (lane, left, facts.clone())));
                }
                Err(Missed::Gone) => {
                    is_any = true;
                    self.forget_kept(kept);
                }
                Err(Missed::Kept(why, path)) => {
                    kept.why = why;
                    kept.path = path.or(kept.path);
                    self.kept.insert(order, kept);
                }
            }
        }
        if !told.is_empty() {
            told.sort_unstable_by_key(|(_, left, _)| left.piece.order);
            self.tell(told);
        }
        is_any
    }

    fn adopt_kept(&mut self, kept: &KeptFile, again: FoundAgain) -> FileFacts {
        let facts = self.adopt(again.found, &again.share, &again.path, None);
        let generation = known_generation(generation_of(kept.handle()));
        let known_as = kept.known_as();
        let Some(lanes) = &mut self.lanes else {
            return facts;
        };
        // The fact was set last, so it counts: a client may have set another time after its
        // writes.
        let said = lanes.facts.get(known_as.0, known_as.1);
        let said = said.filter(|said| said.generation == 0 || said.generation == generation);
        // Without a fact: the daemon died before the first one, or after it had set the time; then
        // only a record in state `Spent` is left.
        let committed = kept
            .pieces
            .iter()
            .filter(|(_, left)| left.state != State::Spent);
        let newest = committed.map(|(_, left)| left.piece.changed_ns).max();
        let said = said.map(|said| said.changed_ns);
        let changed_ns = said.or(newest).unwrap_or(TIME_IS_SET);
        if known_as != (facts.key.device, facts.key.inode) {
            // Its file system had another device number then.
            lanes.facts.clear(known_as.0, known_as.1);
        }
        // Its reserved blocks are freed when all of it is written and no session has it open.
        lanes.reserved.resume(facts.key);
        let file = self.files.get_mut(facts.file);
        if let Some(written) = file.and_then(|file| file.written.as_mut()) {
            written.changed_ns = changed_ns;
        }
        facts
    }

    /// Drop the writes to a deleted file: it has no name, and no program has it open.
    fn forget_kept(&mut self, kept: KeptFile) {
        tracing::warn!(
            "{} no longer exists; what an earlier daemon left for it is dropped: {}",
            kept.name(),
            counted(kept.pieces.len(), "acknowledged write")
        );
        let Some(lanes) = &mut self.lanes else {
            return;
        };
        for (lane, left) in &kept.pieces {
            lanes.discard(*lane, left.record);
        }
        let (device, inode) = kept.known_as();
        let is_known = |other: &KeptFile| other.known_as() == (device, inode);
        if self.files.id_of(FileKey { device, inode }).is_none()
            && !self.kept.values().any(is_known)
        {
            lanes.facts.clear(device, inode);
            lanes.reserve_ended(FileKey { device, inode });
        }
    }

    fn tell(&mut self, told: Vec<(LaneId, LeftPiece, FileFacts)>) {
        self.feed(Event::RecoveryBegun);
        let mut new = Vec::new();
        for (lane, left, facts) in &told {
            let Some(lanes) = &mut self.lanes else {
                return;
            };
            let page_count = lanes.tell(*lane);
            lanes.recovered(*lane, left.record, left.piece.file, facts.file);
            if let Some(page_count) = page_count {
                new.push(*lane);
                self.feed(Event::LaneAdded {
                    lane: *lane,
                    session: None,
                    page_count,
                    record_count: crate::lanes::Lanes::record_count(),
                });
            }
        }
        for lane in new {
            let kept = self.lanes.as_ref().map(|lanes| lanes.kept_records(lane));
            for record in kept.unwrap_or_default() {
                self.feed(Event::RecordKept { lane, record });
            }
        }
        // Only after all records are entered: a piece that is struck at once must not free the name
        // of a file that later pieces need.
        for (lane, left, facts) in told {
            let runs = match left.state {
                State::Spent => Runs::default(),
                _ => left.piece.runs,
            };
            self.feed(Event::Recovered {
                lane,
                record: left.record,
                facts,
                range: left.piece.range,
                runs,
            });
        }
        self.feed(Event::RecoveryEnded);
    }

    // ---- Questions of others ----

    /// True: the file has kept bytes. No door may read it without them, or write before them.
    pub(super) fn is_kept(&self, key: FileKey) -> bool {
        let known_as = (key.device, key.inode);
        self.kept.values().any(|kept| kept.known_as() == known_as)
    }

    /// The kept files by device and inode, as the facts have them.
    pub(super) fn kept_keys(&self) -> HashSet<(u64, u64)> {
        self.kept.values().map(KeptFile::known_as).collect()
    }

    /// Counts of kept writes, of their bytes and of their files.
    pub(super) fn kept_sums(&self) -> (u64, u64, usize) {
        let pieces = || self.kept.values().flat_map(KeptFile::unwritten);
        let bytes = pieces().map(|left| left.piece.range.length.0).sum();
        let files = self.kept.values();
        let file_count = files.filter(|kept| kept.unwritten().next().is_some());
        (pieces().count() as u64, bytes, file_count.count())
    }

    /// The files of a former daemon that cannot be written yet, and why: a sentence a reason.
    pub(super) fn kept_sentences(&self) -> Vec<String> {
        let mut reasons: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
        let mut add = |reason: String, writes: u64, name: String| {
            let (count, names) = reasons.entry(reason).or_default();
            *count += writes;
            names.push(name);
        };
        for kept in self.kept.values() {
            // A file that only lacks its time counts as one write.
            add(
                kept.reason(),
                (kept.unwritten().count() as u64).max(1),
                kept.name(),
            );
        }
        let unwritten = self.lanes.as_ref().map(|lanes| lanes.unwritten());
        let mut unwritten = unwritten.unwrap_or_default();
        for (id, file, errno) in self.files.unwritable() {
            if let Some(count) = unwritten.remove(&id) {
                let error = io::Error::from_raw_os_error(errno.0 as i32);
                let remedy = remedy(&error);
                add(
                    format!("they could not be opened for writing: {error}; {remedy}"),
                    count,
                    name_of(Some(&file.path), (file.key.device, file.key.inode)),
                );
            }
        }
        reasons.into_iter().map(sentence).collect()
    }

    /// The open files whose disks refuse their bytes, and why: a sentence a reason.
    pub(super) fn failing_sentences(&self) -> Vec<String> {
        let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (id, file) in self.files.all() {
            let Some(errno) = self.server.failing(id) else {
                continue;
            };
            let error = io::Error::from_raw_os_error(errno.0 as i32);
            let remedy = writing::remedy(errno).map_or(String::new(), |what| format!("; {what}"));
            let name = name_of(Some(&file.path), (file.key.device, file.key.inode));
            reasons
                .entry(format!("{error}{remedy}"))
                .or_default()
                .push(name);
        }
        let sentence = |(reason, mut names): (String, Vec<String>)| {
            names.sort_unstable();
            let (files, names) = (counted(names.len(), "file"), shortened(names));
            format!(
                "acknowledged bytes of {files} are only in memory, because their disk does not \
                 take them ({names}): {reason}. They are kept and retried each second"
            )
        };
        reasons.into_iter().map(sentence).collect()
    }

    /// The same for all data that is not on its disk when the daemon ends.
    pub(super) fn unwritten_sentences(&self) -> Vec<String> {
        let mut sentences = self.kept_sentences();
        let unwritten = self.lanes.as_ref().map(|lanes| lanes.unwritten());
        let is_openable = |id: &FileId| self.files.unwritable().all(|(other, ..)| other != *id);
        let mut reasons: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
        for (id, pieces) in unwritten.unwrap_or_default() {
            if !is_openable(&id) {
                continue;
            }
            let file = self.files.get(id);
            let (count, names) = reasons.entry(self.why_unwritten(id)).or_default();
            *count += pieces;
            names.extend(
                file.map(|file| name_of(Some(&file.path), (file.key.device, file.key.inode))),
            );
        }
        for (reason, (count, mut names)) in reasons {
            names.sort_unstable();
            sentences.push(sentence((reason, (count, names))));
        }
        sentences
    }

    /// The error of its file system at the last attempt, as a clause.
    fn why_unwritten(&self, id: FileId) -> String {
        match self.why_not(id) {
            Some(errno) => {
                let error = io::Error::from_raw_os_error(errno.0 as i32);
                let remedy =
                    writing::remedy(errno).map_or(String::new(), |what| format!("; {what}"));
                format!("they could not be written: {error}{remedy}")
            }
            None => String::from(
                "their disk has not taken them; dmesg and the log may say what is wrong with it",
            ),
        }
    }

    /// The data that is left, as an error. The facts then tell doors that no process is writing it.
    pub(crate) fn ended_clean(&self) -> Result<(), ServeError> {
        let mut sentences = self.unwritten_sentences();
        sentences.extend(self.unrecorded_sentence());
        if self.server.writes().unclaimed_count > 0 {
            sentences.push(self.unclaimed_sentence());
        }
        if sentences.is_empty() {
            return Ok(());
        }
        if let Some(lanes) = &self.lanes {
            lanes.facts.leave();
        }
        Err(ServeError::Left { sentences })
    }

    /// Files with bytes that are not on their disk, of which no lane has a record: there was no
    /// room for one.
    fn unrecorded_sentence(&self) -> Option<String> {
        let recorded = self.lanes.as_ref().map(|lanes| lanes.unwritten());
        let recorded = recorded.unwrap_or_default();
        let lost = self
            .files
            .all()
            .filter(|(id, _)| self.server.is_dirty(*id) && !recorded.contains_key(id));
        let mut names: Vec<String> = lost
            .map(|(_, file)| name_of(Some(&file.path), (file.key.device, file.key.inode)))
            .collect();
        names.sort_unstable();
        let is_any = !names.is_empty();
        let (files, names) = (counted(names.len(), "file"), shortened(names));
        is_any.then(|| {
            format!(
                "acknowledged bytes of {files} are lost with this daemon: their disk has not taken \
                 them, and the runtime folder had no space to record them ({names}). The clients \
                 that wrote them have to write them again"
            )
        })
    }

    pub(super) fn unclaimed_sentence(&self) -> String {
        let count = self.server.writes().unclaimed_count;
        let writes = counted(usize::try_from(count).unwrap_or(usize::MAX), "write");
        format!(
            "what a former daemon left contradicts other data and stays where it is, {writes}; \
             list it with: rushes recover --list"
        )
    }

    // ---- Files that were found and could not be opened for writing ----

    pub(super) fn open_to_write(&mut self, id: FileId) {
        let Some(file) = self.files.get(id) else {
            return;
        };
        let Some(written) = &file.written else {
            return;
        };
        let job = Job::OpenToWrite {
            file: id,
            generation: file.generation,
            fd: file.fd.clone(),
            durable: written.durable.clone(),
        };
        // If the workers have no room, the next write retries it.
        let _ = self.workers.push(Urgency::Now, job);
    }

    pub(super) fn opened_to_write(
        &mut self,
        id: FileId,
        generation: u64,
        result: io::Result<WriteFile>,
    ) {
        let file = self.files.same_mut(id, generation);
        if let Some(written) = file.and_then(|file| file.written.as_mut())
            && written.file.is_err()
        {
            written.file = result.map_err(|error| errno_of(&error));
        }
        self.files.count_again(id);
    }
}

fn sentence((reason, (writes, names)): (String, (u64, Vec<String>))) -> String {
    let writes = counted(usize::try_from(writes).unwrap_or(usize::MAX), "write");
    let (files, names) = (counted(names.len(), "file"), shortened(names));
    format!(
        "{writes} to {files} that a former daemon left are kept and not written yet ({names}): {reason}"
    )
}

/// The first names, and the number of the others.
fn shortened(mut names: Vec<String>) -> String {
    let count = names.len();
    names.truncate(NAMES_MAX);
    match count - names.len() {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_core::format::lane::{HANDLE_BYTES_MAX, PieceRecord};
    use rushes_core::units::ByteRange;

    fn left(order: u64, generation: u8) -> LeftPiece {
        LeftPiece {
            record: order as u32,
            state: State::Committed,
            piece: PieceRecord {
                order,
                request: 1,
                range: ByteRange::new(0, 10),
                file: 0,
                runs: Runs::default(),
                changed_ns: 0,
            },
            file: FileRecord {
                file_system: [1; 16],
                handle_kind: 1,
                handle: [generation; HANDLE_BYTES_MAX],
                handle_bytes: 8,
                device: 7,
                inode: 12,
                uid: 0,
                gid: 0,
            },
        }
    }

    #[test]
    fn remedy_of_bytes_that_are_kept_is_of_its_error() {
        for (code, word) in [
            (KernelError::ROFS, "remount"),
            (KernelError::MFILE, "LimitNOFILE"),
            (KernelError::NFILE, "fs.file-max"),
            (KernelError::PERM, "chattr -i"),
            (
                KernelError::PERM,
                "V (fs-verity) is for good, so copy the file",
            ),
            (KernelError::NOKEY, "fscrypt unlock"),
            (KernelError::ACCESS, "rushes.service"),
            (KernelError::TXTBSY, "end the program"),
            (KernelError::NOMEM, "free some memory"),
            (KernelError::IO, "fsck"),
        ] {
            let text = remedy(&io::Error::from(code));
            assert!(text.contains(word), "{code}: {text}");
        }
    }

    #[test]
    fn who_gets_an_inode_number_again_is_another_file() {
        let lane = |lane, pieces| Left {
            lane: LaneId(lane),
            pieces,
        };
        let files = by_file(vec![
            lane(1, vec![left(5, 1), left(8, 2)]),
            lane(2, vec![left(3, 1), left(9, 2)]),
        ]);
        let orders = |file: &KeptFile| {
            let orders = file.pieces.iter().map(|(_, left)| left.piece.order);
            orders.collect::<Vec<u64>>()
        };
        let found: Vec<(u64, Vec<u64>)> = files
            .iter()
            .map(|(oldest, file)| (*oldest, orders(file)))
            .collect();
        assert_eq!(found, [(3, vec![5, 3]), (8, vec![8, 9])]);
    }

    #[test]
    fn a_sentence_names_some_files_and_counts_the_others() {
        let names = |count: u32| (1..=count).map(|n| format!("{n}.mov")).collect();
        let say = |count| sentence((String::from("why; what to do"), (9, names(count))));
        assert!(say(1).ends_with("(1.mov): why; what to do"), "{}", say(1));
        let many = say(60);
        assert!(many.contains("9 writes to 60 files"), "{many}");
        assert!(
            many.contains("(1.mov, 2.mov, 3.mov and 57 more): why"),
            "{many}"
        );
    }
}
