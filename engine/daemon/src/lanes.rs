// SPDX-License-Identifier: Apache-2.0
//! The lanes of all sessions, the files of the pieces in them, and the facts that doors read of
//! these files.

use crate::error::ServeError;
use crate::files::{Durable, Written};
use crate::recovery::lane_error;
use crate::reserved::Reserved;
use rushes_core::format::lane::{
    Damage, FileRecord, HANDLE_BYTES_MAX, Head, PIECE_COUNT, PieceRecord, State,
};
use rushes_core::server::{FileKey, LanePart, PageRun, WritePart};
use rushes_core::units::{ByteRange, FileId, LaneId, RequestId};
use rushes_core::write::Runs;
use rushes_shm::facts::FactsTable;
use rushes_shm::lane::{LaneFault, LaneFile, lanes_in};
use rushes_sys::{Mapping, MemoryPart, Segment, SysError};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PAGE_BYTES: u64 = rushes_core::server::PAGE_BYTES;

/// A lane, and the use of its records.
struct Lane {
    file: LaneFile,
    /// For each file with pieces: its record, and the number of pieces.
    files: HashMap<FileId, (u32, u32)>,
    free_files: Vec<u32>,
    next_file: u32,
    /// File of each published piece.
    pieces: HashMap<u32, FileId>,
    /// Open grants: granted, and neither committed nor aborted.
    grant_count: u32,
    /// Pages were granted since its memory was freed.
    is_used: bool,
    /// The core has it.
    is_told: bool,
    /// Pieces of a former daemon that the core does not have yet, since their files could not be
    /// opened.
    kept: HashSet<u32>,
    /// Pages before this one have memory, or a session with a grant is taking it.
    backed_to: u32,
}

impl Lane {
    fn of(file: LaneFile) -> Lane {
        Lane {
            file,
            files: HashMap::new(),
            free_files: Vec::new(),
            next_file: 0,
            pieces: HashMap::new(),
            grant_count: 0,
            is_used: false,
            is_told: false,
            kept: HashSet::new(),
            backed_to: 0,
        }
    }

    /// See that the table has memory for this record, and for the name of its file.
    fn make_ready(&self, record: u32) -> io::Result<()> {
        // Each open grant may bring another file.
        let files = self.next_file + self.grant_count + 1;
        self.file.make_ready(files.max(record + 1))
    }

    /// Memory that the folder must have for these pages.
    fn needed(&self, runs: &Runs) -> u64 {
        let end = |run: &PageRun| run.first + run.count;
        let end = runs.as_slice().iter().map(end).max().unwrap_or(0);
        u64::from(end.saturating_sub(self.backed_to)) * PAGE_BYTES
    }
}

/// The pieces that a dead daemon left in a lane.
pub(crate) struct Left {
    pub(crate) lane: LaneId,
    pub(crate) pieces: Vec<LeftPiece>,
}

/// A write that a dead daemon left.
#[derive(Debug)]
pub(crate) struct LeftPiece {
    pub(crate) record: u32,
    pub(crate) state: State,
    pub(crate) piece: PieceRecord,
    pub(crate) file: FileRecord,
}

/// Lanes whose sessions are gone that doors may still ask about.
const FORMER_COUNT_MAX: usize = 1024;

/// All of them.
pub(crate) struct Lanes {
    folder: PathBuf,
    page_count: u32,
    lanes: HashMap<LaneId, Lane>,
    next: u32,
    epoch: u64,
    order: u64,
    /// Lanes of former sessions: number, secret, and the requests that were committed last.
    former: VecDeque<(LaneId, u64, HashSet<u64>)>,
    pub(crate) facts: FactsTable,
    pub(crate) reserved: Reserved,
}

impl Lanes {
    /// Without lanes yet. `folder`: on tmpfs, ours alone.
    pub(crate) fn new(folder: &Path, buffer_bytes: u64) -> Result<Lanes, SysError> {
        std::fs::create_dir_all(folder).map_err(|error| {
            SysError::new(
                "make the folder of lanes",
                folder.display().to_string(),
                error,
            )
        })?;
        Ok(Lanes {
            folder: folder.to_path_buf(),
            page_count: u32::try_from(buffer_bytes / PAGE_BYTES).unwrap_or(u32::MAX),
            lanes: HashMap::new(),
            next: 0,
            epoch: 1,
            order: 0,
            former: VecDeque::new(),
            facts: FactsTable::open(folder)?,
            reserved: Reserved::open(folder)?,
        })
    }

    /// Read the lanes in the folder, and take them over.
    ///
    /// Errors   a table cannot be read: then nothing is taken over
    pub(crate) fn take_over(&mut self) -> Result<Vec<Left>, ServeError> {
        let folder = self.folder.clone();
        let found = lanes_in(&folder)
            .map_err(|error| SysError::new("read", folder.display().to_string(), error))?;
        let mut left = Vec::new();
        let mut opened = Vec::new();
        for id in found {
            let wrong = |fault| lane_error(&folder, id, fault);
            let Some(file) = LaneFile::open(&folder, id).map_err(wrong)? else {
                continue;
            };
            let mut pieces = Vec::new();
            for (record, state, piece) in file.pieces().map_err(wrong)? {
                let Some(named) = file.file(piece.file).map_err(wrong)? else {
                    let damage = Damage::Fields;
                    let what = "file";
                    return Err(wrong(LaneFault::Record {
                        what,
                        record: piece.file,
                        damage,
                    }));
                };
                self.order = self.order.max(piece.order);
                pieces.push(LeftPiece {
                    record,
                    state,
                    piece,
                    file: named,
                });
            }
            self.next = self.next.max(id.0);
            self.epoch = self.epoch.max(file.head().epoch + 1);
            opened.push((id, file, pieces));
        }
        for (id, mut file, pieces) in opened {
            file.take_over(self.epoch);
            self.remember(id, &file);
            if pieces.is_empty() {
                file.remove();
                continue;
            }
            let mut lane = Lane::of(file);
            lane.kept = pieces.iter().map(|piece| piece.record).collect();
            // New names come after the names of these pieces.
            let names = pieces.iter().map(|piece| piece.piece.file);
            lane.next_file = names.max().map_or(0, |last| last + 1);
            self.lanes.insert(id, lane);
            left.push(Left { lane: id, pieces });
        }
        Ok(left)
    }

    /// A left piece belongs to this file; the table calls the file `name`.
    pub(crate) fn recovered(&mut self, id: LaneId, record: u32, name: u32, file: FileId) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        lane.kept.remove(&record);
        lane.pieces.insert(record, file);
        // A file has one name in a table; a second one would stay until the lane is removed.
        lane.files.entry(file).or_insert((name, 0)).1 += 1;
    }

    /// Its records that the core does not have yet.
    pub(crate) fn kept_records(&self, id: LaneId) -> Vec<u32> {
        let lane = self.lanes.get(&id).into_iter();
        lane.flat_map(|lane| lane.kept.iter().copied()).collect()
    }

    /// Drop a left piece: its file is proved to be deleted.
    pub(crate) fn discard(&mut self, id: LaneId, record: u32) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        lane.file.set_state(record, State::Free);
        lane.kept.remove(&record);
        if !lane.is_told {
            self.done(id);
        }
    }

    /// Marks a left lane as one that the core has. Returns its page count; None: the core had it
    /// already.
    pub(crate) fn tell(&mut self, id: LaneId) -> Option<u32> {
        let lane = self.lanes.get_mut(&id).filter(|lane| !lane.is_told)?;
        lane.is_told = true;
        Some(lane.file.head().page_count)
    }

    /// True: the lanes have only pieces that cannot be written yet.
    pub(crate) fn is_empty(&self) -> bool {
        !self.lanes.values().any(|lane| lane.is_told)
    }

    /// The files with unwritten pieces, and how many pieces each has.
    pub(crate) fn unwritten(&self) -> HashMap<FileId, u64> {
        let mut counts = HashMap::new();
        for file in self.lanes.values().flat_map(|lane| lane.pieces.values()) {
            *counts.entry(*file).or_insert(0) += 1;
        }
        counts
    }

    fn remember(&mut self, id: LaneId, file: &LaneFile) {
        if self.former.len() >= FORMER_COUNT_MAX {
            self.former.pop_front();
        }
        let done = file.done().into_iter().collect();
        self.former.push_back((id, file.head().secret, done));
    }

    /// The session of a lane has ended; its door may come back and ask for its writes.
    pub(crate) fn session_left(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.remove(&id) {
            self.remember(id, &lane.file);
            self.lanes.insert(id, lane);
        }
    }

    /// Was this request of a former session committed?
    pub(crate) fn was_committed(&self, id: LaneId, secret: u64, request: RequestId) -> bool {
        self.former
            .iter()
            .any(|(lane, known, done)| *lane == id && *known == secret && done.contains(&request.0))
    }

    /// False: the lanes only hold the data of an earlier daemon.
    pub(crate) fn take_writes(&self) -> bool {
        self.page_count > 0
    }

    /// A lane for a new session.
    pub(crate) fn create(&mut self) -> Result<LaneId, SysError> {
        self.next += 1;
        let id = LaneId(self.next);
        let head = Head {
            lane: id.0,
            page_count: self.page_count,
            epoch: self.epoch,
            secret: secret(),
        };
        let mut lane = Lane::of(LaneFile::create(&self.folder, head)?);
        lane.is_told = true;
        self.lanes.insert(id, lane);
        Ok(id)
    }

    pub(crate) fn file(&self, id: LaneId) -> Option<&LaneFile> {
        self.lanes.get(&id).map(|lane| &lane.file)
    }

    /// The number of records of a lane.
    pub(crate) fn record_count() -> u32 {
        PIECE_COUNT
    }

    /// A session was granted pages, with `record` as their record: see that the record has memory,
    /// and that the folder has room for the pages. Another writer may take that room first, so the
    /// door checks again before it stores anything there.
    ///
    /// Errors   StorageFull: the folder lacks the memory; NotFound: there is no such lane
    pub(crate) fn granted(&mut self, id: LaneId, record: u32, runs: &Runs) -> io::Result<()> {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let needed = lane.needed(runs);
        if needed > 0 {
            let found = rustix::fs::fstatfs(lane.file.bytes_fd())?;
            let free = found.f_bavail.saturating_mul(found.f_bsize as u64);
            // A tmpfs without a limit has no blocks at all.
            if found.f_blocks > 0 && free < needed {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        lane.make_ready(record)?;
        lane.grant_count += 1;
        lane.is_used = true;
        lane.backed_to += (needed / PAGE_BYTES) as u32;
        Ok(())
    }

    /// A grant has ended.
    pub(crate) fn grant_ended(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.grant_count = lane.grant_count.saturating_sub(1);
        }
    }

    /// If the lane's epoch is not ours, another daemon took us for dead and has taken the lane
    /// over: nothing of ours may reach a file or a client any more, so this does not return.
    fn end_if_superseded(&self, id: LaneId) {
        let Some(lane) = self.lanes.get(&id) else {
            return;
        };
        let found = lane.file.epoch();
        if found != self.epoch {
            tracing::error!(
                "lane {} has epoch {found}, this daemon has epoch {}: another daemon has taken over, so this one exits now",
                id.0,
                self.epoch
            );
            std::process::exit(1);
        }
    }

    /// See `Action::Publish`. False: there is no such lane.
    pub(crate) fn publish(
        &mut self,
        id: LaneId,
        record: u32,
        (file, written): (FileId, &Written),
        (range, runs): (ByteRange, Runs),
        request: Option<RequestId>,
    ) -> bool {
        self.end_if_superseded(id);
        self.order += 1;
        let Some(lane) = self.lanes.get_mut(&id) else {
            return false;
        };
        // A grant has made the record ready, but a piece that is written again has no grant.
        if request.is_none()
            && let Err(error) = lane.make_ready(record)
        {
            tracing::error!(
                "the runtime folder has no space to record that bytes have to be written again: {error}; if this daemon dies before it has written them, they are lost. Free space in the runtime folder"
            );
            return true;
        }
        let name = match lane.files.get_mut(&file) {
            Some((name, count)) => {
                *count += 1;
                *name
            }
            None => {
                let name = lane.free_files.pop().unwrap_or_else(|| {
                    lane.next_file += 1;
                    lane.next_file - 1
                });
                lane.file.name_file(name, &written.durable.record());
                lane.files.insert(file, (name, 1));
                name
            }
        };
        lane.pieces.insert(record, file);
        lane.file.publish(
            record,
            &PieceRecord {
                order: self.order,
                // 0 is no door's request.
                request: request.map_or(0, |request| request.0),
                range,
                file: name,
                runs,
                changed_ns: written.changed_ns,
            },
        );
        true
    }

    /// See `Action::Spent`.
    pub(crate) fn spent(&mut self, id: LaneId, record: u32) {
        if let Some(lane) = self.lanes.get(&id)
            && lane.pieces.contains_key(&record)
        {
            lane.file.set_state(record, State::Spent);
        }
    }

    /// See `Action::Strike`.
    pub(crate) fn strike(&mut self, id: LaneId, record: u32) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        let Some(file) = lane.pieces.remove(&record) else {
            return;
        };
        lane.file.set_state(record, State::Free);
        if let Some((name, count)) = lane.files.get_mut(&file) {
            *count -= 1;
            if *count == 0 {
                let name = *name;
                lane.files.remove(&file);
                lane.file.forget_file(name);
                lane.free_files.push(name);
            }
        }
    }

    /// Bytes of these parts are about to be sent to a device.
    pub(crate) fn submitted(&mut self, parts: &[WritePart]) {
        for part in parts {
            let WritePart::Lane(part) = part else {
                continue;
            };
            self.end_if_superseded(part.lane);
            // A piece that is written again may lack a record.
            if let Some(lane) = self.lanes.get(&part.lane)
                && lane.pieces.contains_key(&part.record)
            {
                lane.file.set_state(part.record, State::Submitted);
            }
        }
    }

    /// Our blocks behind the end of a file are freed: doors need not hide them any more.
    pub(crate) fn reserve_ended(&mut self, key: FileKey) {
        self.reserved.end(key);
        self.facts.clear_reserved(key.device, key.inode);
    }

    /// The core has no more use for a lane. Removes it, unless it has pieces that the core did not
    /// get or did not take.
    pub(crate) fn done(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        lane.is_told = false;
        if lane.kept.is_empty()
            && lane.pieces.is_empty()
            && let Some(lane) = self.lanes.remove(&id)
        {
            lane.file.remove();
        }
    }

    /// Free the memory of unused pages at a lane's end.
    pub(crate) fn give_back(&mut self, id: LaneId, run: PageRun) {
        // The core takes the pages of kept pieces for free ones.
        if let Some(lane) = (self.lanes.get_mut(&id)).filter(|lane| lane.kept.is_empty()) {
            lane.backed_to = lane.backed_to.min(run.first);
            if let Err(error) = lane.file.give_memory_back(run.first, run.count) {
                tracing::warn!("lane {}: cannot free memory: {error}", id.0);
            }
        }
    }

    /// Free the memory of lanes without pieces and grants, if the core has no use for them either.
    pub(crate) fn give_memory_back(&mut self, is_unused: impl Fn(LaneId) -> bool) {
        for (&id, lane) in &mut self.lanes {
            let holds = !lane.pieces.is_empty() || !lane.kept.is_empty();
            let is_empty = !holds && lane.grant_count == 0;
            if lane.is_used && is_empty && is_unused(id) {
                lane.is_used = false;
                lane.backed_to = 0;
                let pages = lane.file.head().page_count;
                if let Err(error) = lane.file.give_memory_back(0, pages) {
                    tracing::debug!("a lane's memory could not be given back: {error}");
                }
            }
        }
    }

    /// The parts of a write as memory for the device: parts of less than a page are copied behind
    /// each other into one buffer, so only the others count for `Limits::write_part_count_max`.
    ///
    /// Errors   a lane's memory ends before its piece does; by a mistake of ours, a direct write is
    /// not of whole pages
    pub(crate) fn memory_of(
        &self,
        segment: &Segment,
        parts: &[WritePart],
        buffered: bool,
    ) -> io::Result<Vec<MemoryPart>> {
        let parts = cut(parts, buffered)?;
        let copied = |part: &Cut| match part {
            Cut::Copied(part) => part.length,
            Cut::AsItIs(_) => 0,
        };
        let copied: u64 = parts.iter().map(copied).sum();
        let copy = match copied {
            0 => None,
            // The copy is smaller than one request.
            _ => Some(Arc::new(Mapping::private(
                copied.next_multiple_of(PAGE_BYTES) as usize,
            )?)),
        };
        let mut at = 0;
        let mut memory: Vec<MemoryPart> = Vec::new();
        for part in parts {
            let part = match (part, &copy) {
                (Cut::AsItIs(WritePart::Lane(part)), _) => self.part(&part)?,
                (
                    Cut::AsItIs(WritePart::Slot {
                        slot,
                        offset,
                        length,
                    }),
                    _,
                ) => segment.part(slot, offset, length)?,
                (Cut::Copied(part), Some(copy)) => {
                    let offset = at;
                    let bytes = part.length as usize;
                    self.copy(&part, copy, offset)?;
                    at += bytes;
                    MemoryPart {
                        memory: Arc::clone(copy),
                        offset,
                        bytes,
                    }
                }
                (Cut::Copied(_), None) => continue,
            };
            push(&mut memory, part);
        }
        Ok(memory)
    }

    fn part(&self, part: &LanePart) -> io::Result<MemoryPart> {
        let lane = self.lanes.get(&part.lane).ok_or(io::ErrorKind::NotFound)?;
        Ok(MemoryPart {
            memory: lane.file.bytes().clone(),
            offset: usize::try_from(part.offset).map_err(|_| io::ErrorKind::InvalidInput)?,
            bytes: usize::try_from(part.length).map_err(|_| io::ErrorKind::InvalidInput)?,
        })
    }

    fn copy(&self, part: &LanePart, to: &Mapping, at: usize) -> io::Result<()> {
        let lane = self.lanes.get(&part.lane).ok_or(io::ErrorKind::NotFound)?;
        let length = part.length as usize;
        let count = to.read_at(lane.file.bytes_fd(), part.offset, at, length)?;
        if count < length {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "the memory of lane {} ends {} bytes before a write in it does; its session has cut it short",
                    part.lane.0,
                    length - count
                ),
            ));
        }
        Ok(())
    }
}

/// Part of a write, as it goes to the device.
enum Cut {
    /// From its own memory.
    AsItIs(WritePart),
    /// From the copy, behind the parts copied before.
    Copied(LanePart),
}

/// A direct write takes whole pages of a part from the lane, and copies the pages that several
/// parts share. A write through the kernel's cache takes any bytes: it copies only parts of less
/// than a page, and not a lone one.
fn cut(parts: &[WritePart], buffered: bool) -> io::Result<Vec<Cut>> {
    let mut out = Vec::with_capacity(parts.len());
    // Bytes in the page that is being copied.
    let mut filled = 0;
    for part in parts {
        let part = match part {
            WritePart::Lane(part) => *part,
            WritePart::Slot { .. } if filled > 0 => {
                return Err(io::Error::other("a buffer's bytes amid a page of a lane"));
            }
            WritePart::Slot { .. } => {
                out.push(Cut::AsItIs(*part));
                continue;
            }
        };
        if buffered {
            let is_short = part.length < PAGE_BYTES && parts.len() > 1;
            out.push(match is_short {
                true => Cut::Copied(part),
                false => Cut::AsItIs(WritePart::Lane(part)),
            });
            continue;
        }
        let head = match filled {
            0 => 0,
            _ => part.length.min(PAGE_BYTES - filled),
        };
        let whole = (part.length - head) / PAGE_BYTES * PAGE_BYTES;
        let tail = part.length - head - whole;
        filled = (filled + head) % PAGE_BYTES + tail;
        let mut offset = part.offset;
        for (length, is_copied) in [(head, true), (whole, false), (tail, true)] {
            let piece = LanePart {
                offset,
                length,
                ..part
            };
            offset += length;
            if length > 0 {
                out.push(match is_copied {
                    true => Cut::Copied(piece),
                    false => Cut::AsItIs(WritePart::Lane(piece)),
                });
            }
        }
    }
    if filled > 0 {
        return Err(io::Error::other("a direct write that ends within a page"));
    }
    Ok(out)
}

/// Append a part, joined with the last one if it lies right behind it.
fn push(memory: &mut Vec<MemoryPart>, part: MemoryPart) {
    if let Some(last) = memory.last_mut()
        && Arc::ptr_eq(&last.memory, &part.memory)
        && last.offset + last.bytes == part.offset
    {
        last.bytes += part.bytes;
        return;
    }
    memory.push(part);
}

/// A number that a door cannot guess; never 0.
fn secret() -> u64 {
    let mut bytes = [0; 8];
    // If the kernel gives no random bytes, any number will do: only processes of root can connect,
    // and the secret only guards against mistakes.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes) | 1
}

impl Durable {
    pub(crate) fn record(&self) -> FileRecord {
        let mut handle = [0; HANDLE_BYTES_MAX];
        let length = self.handle.len().min(HANDLE_BYTES_MAX);
        handle[..length].copy_from_slice(&self.handle[..length]);
        FileRecord {
            file_system: self.file_system,
            handle_kind: self.handle_kind,
            handle,
            handle_bytes: length as u32,
            device: self.key.device,
            inode: self.key.inode,
            uid: self.writer.uid,
            gid: self.writer.gid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::Folder;
    use rushes_core::units::SlotIndex;

    fn written(inode: u64) -> Written {
        let null = || Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let file = rushes_sys::space::WriteFile {
            direct: null(),
            buffered: null(),
        };
        let mut written = Written::of_test(Ok(file), durable(inode));
        written.changed_ns = 7;
        written
    }

    fn durable(inode: u64) -> Durable {
        Durable {
            key: FileKey { device: 1, inode },
            file_system: [7; 16],
            handle_kind: 1,
            handle: vec![9; 12].into(),
            writer: rushes_shm::Writer { uid: 5, gid: 6 },
        }
    }

    fn runs(first: u32, count: u32) -> Runs {
        Runs::from_runs(&[PageRun { first, count }]).unwrap()
    }

    #[test]
    fn files_are_named_as_long_as_they_have_pieces() {
        let folder = Folder::new();
        let mut lanes = Lanes::new(&folder.0, 1 << 20).unwrap();
        let id = lanes.create().unwrap();
        let (one, two) = (written(10), written(20));
        let range = ByteRange::new(0, 4096);
        for (record, file, durable) in [(0, 1, &one), (1, 2, &two), (2, 1, &one)] {
            lanes.granted(id, record, &runs(record, 1)).unwrap();
            let file = (FileId(file), durable);
            assert!(lanes.publish(
                id,
                record,
                file,
                (range, runs(record, 1)),
                Some(RequestId(9))
            ));
            lanes.grant_ended(id);
        }
        let read = |lanes: &Lanes| {
            let file = lanes.file(id).unwrap();
            let pieces = file.pieces().unwrap();
            pieces
                .iter()
                .map(|(_, _, piece)| file.file(piece.file).unwrap().unwrap().inode)
                .collect::<Vec<u64>>()
        };
        assert_eq!(read(&lanes), [10, 20, 10]);
        lanes.strike(id, 0);
        assert_eq!(read(&lanes), [20, 10]);
        lanes.strike(id, 2);
        assert_eq!(read(&lanes), [20]);
        // The next file gets the name that became free.
        lanes.granted(id, 0, &runs(0, 1)).unwrap();
        lanes.publish(
            id,
            0,
            (FileId(3), &written(30)),
            (range, runs(0, 1)),
            Some(RequestId(10)),
        );
        assert_eq!(read(&lanes), [20, 30]);
        lanes.spent(id, 1);
        lanes.strike(id, 1);
        lanes.strike(id, 0);
        assert!(read(&lanes).is_empty());
        lanes.done(id);
        assert!(lanes_in(&folder.0).unwrap().is_empty());
    }

    /// A lane that a daemon left with a piece of each of two files, 10 and 20.
    fn two_left(folder: &Folder) -> LaneId {
        let mut first = Lanes::new(&folder.0, 1 << 20).unwrap();
        let id = first.create().unwrap();
        for (record, file) in [(0, 10), (1, 20)] {
            first.granted(id, record, &Runs::default()).unwrap();
            let (written, piece) = (written(file), (ByteRange::new(0, 4096), runs(record, 1)));
            let file = (FileId(file as u32), &written);
            first.publish(id, record, file, piece, Some(RequestId(9)));
        }
        id
    }

    #[test]
    fn what_is_published_again_takes_no_name_of_what_is_kept_and_is_nobodys_request() {
        let folder = Folder::new();
        let id = two_left(&folder);
        let mut next = Lanes::new(&folder.0, 1 << 20).unwrap();
        let left = next.take_over().unwrap().remove(0);
        assert!(next.tell(id).is_some());
        next.recovered(id, 0, left.pieces[0].piece.file, FileId(1));
        assert_eq!(next.kept_records(id), [1]);
        // The piece is written and struck, and its bytes are lost after all: its new record is far
        // behind those that ever had memory.
        next.strike(id, 0);
        let piece = (ByteRange::new(0, 4096), runs(0, 1));
        assert!(next.publish(id, 900, (FileId(1), &written(10)), piece, None));
        let file = next.file(id).unwrap();
        let pieces = file.pieces().unwrap();
        let inodes = pieces
            .iter()
            .map(|(record, _, piece)| (*record, file.file(piece.file).unwrap().unwrap().inode));
        assert_eq!(inodes.collect::<Vec<_>>(), [(1, 20), (900, 10)]);
        assert_eq!(file.done(), [9]);
        next.strike(id, 900);
        next.strike(id, 900);
        assert_eq!(next.file(id).unwrap().pieces().unwrap().len(), 1);
    }

    #[test]
    fn a_lane_with_something_that_is_kept_outlives_the_rest_of_it() {
        let folder = Folder::new();
        let id = two_left(&folder);
        let mut next = Lanes::new(&folder.0, 1 << 20).unwrap();
        let left = next.take_over().unwrap().remove(0);
        assert_eq!((left.lane, left.pieces.len()), (id, 2));
        assert!(next.is_empty(), "nobody is told of it yet");
        // One of its files is found, and written.
        assert!(next.tell(id).is_some() && next.tell(id).is_none());
        next.recovered(id, 0, left.pieces[0].piece.file, FileId(1));
        assert!(!next.is_empty() && next.unwritten() == HashMap::from([(FileId(1), 1)]));
        // The core takes its pages for free ones; they must keep their memory.
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::File::from(next.file(id).unwrap().bytes_fd().try_clone().unwrap()),
            b"kept",
            4096,
        )
        .unwrap();
        next.give_back(id, PageRun { first: 1, count: 1 });
        next.strike(id, 0);
        next.done(id);
        assert!(next.is_empty() && next.file(id).is_some());
        let mut bytes = [0; 4];
        next.file(id).unwrap().copy_out(4096, &mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
        // The other one is found later, or proved to be deleted.
        assert!(next.tell(id).is_some());
        next.done(id);
        next.discard(id, 1);
        assert!(next.file(id).is_none());
        assert!(lanes_in(&folder.0).unwrap().is_empty());
    }

    #[test]
    fn pages_that_pieces_share_are_put_together() {
        let folder = Folder::new();
        let mut lanes = Lanes::new(&folder.0, 1 << 20).unwrap();
        let id = lanes.create().unwrap();
        let bytes: Vec<u8> = (0..65_536u32).map(|at| (at / 256) as u8).collect();
        let fd = lanes.file(id).unwrap().bytes_fd().try_clone().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&std::fs::File::from(fd), &bytes, 0).unwrap();
        let part = |offset: u64, length: u64| {
            WritePart::Lane(LanePart {
                lane: id,
                record: 0,
                offset,
                length,
            })
        };
        let slot = |offset: u32, length: u32| WritePart::Slot {
            slot: SlotIndex(1),
            offset,
            length,
        };
        // Two pages, a third of 1000 + 3000 + 96 bytes from three places, a page that follows, and
        // a gap's.
        let parts = [
            part(0, 8192 + 1000),
            part(16_384 + 1000, 3000),
            part(32_768 + 4000, 96 + 4096),
            slot(4096, 4096),
        ];
        let segment = Segment::create(rushes_sys::SegmentHome::Memfd, 2, 8192).unwrap();
        let segment = Arc::new(segment.0);
        segment.copy_in(SlotIndex(1), 4096, &[0xC5; 4096]).unwrap();
        let memory = lanes.memory_of(&segment, &parts, false).unwrap();
        let lengths: Vec<usize> = memory.iter().map(|part| part.bytes).collect();
        assert_eq!(lengths, [8192, 4096, 4096, 4096]);
        assert!(memory.iter().all(|part| part.offset.is_multiple_of(4096)));
        let bytes_of = |part: &WritePart| match part {
            WritePart::Lane(part) => {
                bytes[part.offset as usize..(part.offset + part.length) as usize].to_vec()
            }
            WritePart::Slot { length, .. } => vec![0xC5; *length as usize],
        };
        let expected: Vec<u8> = parts.iter().flat_map(bytes_of).collect();
        let path = folder.0.join("out");
        let limits = rushes_sys::RingLimits::default();
        let mut ring = rushes_sys::Ring::new(Arc::clone(&segment), limits).unwrap();
        let file = Arc::new(std::os::fd::OwnedFd::from(
            std::fs::File::create(&path).unwrap(),
        ));
        ring.write(rushes_sys::FileWrite {
            file,
            offset: 0,
            parts: memory,
            class: rushes_core::server::IoClass::BestEffort,
            user_data: 4,
        })
        .unwrap();
        let written = loop {
            ring.submit_and_wait().unwrap();
            if let Some(completion) = ring.next_completion() {
                break completion;
            }
        };
        assert_eq!(
            written,
            rushes_sys::Completion::Written {
                user_data: 4,
                result: Ok(rushes_core::units::ByteCount(expected.len() as u64))
            }
        );
        assert!(std::fs::read(path).unwrap() == expected);
        // For a write through the kernel's cache only short parts are copied together.
        assert_eq!(lanes.memory_of(&segment, &parts, true).unwrap().len(), 4);
        // A page from any number of pieces is one part of memory: here each byte has its own place
        // in the page.
        let crumbs: Vec<WritePart> = (0..4096).map(|at| part(at % 16 * 4096 + at, 1)).collect();
        for buffered in [true, false] {
            let memory = lanes.memory_of(&segment, &crumbs, buffered).unwrap();
            assert_eq!((memory.len(), memory[0].bytes), (1, 4096));
        }
        assert_eq!(
            lanes
                .memory_of(&segment, &crumbs[..1500], true)
                .unwrap()
                .len(),
            1
        );
        let wrong = |parts: &[WritePart]| lanes.memory_of(&segment, parts, false).is_err();
        assert!(wrong(&[part(0, 100)]));
        assert!(wrong(&[part(0, 100), slot(0, 4096), part(100, 3996)]));
        assert!(wrong(&[slot(8192, 4096)]) && wrong(&[slot(4096, 8192)]));
    }
}
