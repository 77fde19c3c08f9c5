// SPDX-License-Identifier: Apache-2.0
//! The mount's obligations to the kernel, for a mount that outlives its process: in memory that the
//! keeper holds, too (docs/decisions/0032).
//!
//! Each record is written before the kernel gets the answer, by one pwrite(2) within one page,
//! which a SIGKILL leaves whole or undone. So a dead process never leaves too little: an open that
//! no program has keeps a removed file's bytes until the unmount, a lookup that the kernel has
//! forgotten keeps a few bytes here. All records were written on this machine by this mount.
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 8 | magic, layout version 1 |
//! | 8 | 4 | length of INIT |
//! | 12 | 4 | length of its answer |
//! | 64 | 256 | the kernel's INIT |
//! | 512 | 256 | its answer |
//! | 4096 | 16 × 256 × 64 | intents: those of a process in block (its serial number mod 16), one of each thread |
//! | 1 MiB | 128 each | records: of nodes and of opens |
//!
//! An intent: unique, then the state that the request will change (16 bytes). A record: kind (4:
//! 0 free, 1 node, 2 open), kind of handle (4), its length (4), 4 free; of a node: number, lookups,
//! handle (96 bytes at most); of an open: number, file handle, unique. All native-endian.

use crate::kernel::answer::{Answer, errno};
use crate::lock::locked;
use rushes_sys::handle::Handle;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::{Errno, pread, pwrite};
use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const MAGIC: &[u8; 8] = b"rushkee\x01";
const INIT_AT: u64 = 64;
const ANSWER_AT: u64 = 512;
const MESSAGE_BYTES_MAX: usize = 256;
const INTENTS_AT: u64 = 4096;
/// An intent is forgotten after so many deaths in a row, if the request that was under way at the
/// first is still not answered.
const BLOCK_COUNT: u64 = 16;
const BLOCK_INTENTS: u64 = 256;
const INTENT_BYTES: usize = 64;
const RECORDS_AT: u64 = 1 << 20;
const RECORD_BYTES: usize = 128;
const HANDLE_AT: usize = 32;
const NODE: u32 = 1;
const OPEN: u32 = 2;
/// The bit of `unique` that marks a request which the kernel sends again (FUSE_UNIQUE_RESEND).
const RESENT: u64 = 1 << 63;
/// File handles of one process; those of the next one begin behind them.
const HANDLES_OF_ONE: u64 = 1 << 40;

const _: () = assert!(INTENTS_AT + BLOCK_COUNT * BLOCK_INTENTS * INTENT_BYTES as u64 <= RECORDS_AT);
const _: () = assert!(4096 % RECORD_BYTES == 0 && 4096 % INTENT_BYTES == 0);

/// The name of a request, for as long as the connection lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unique {
    number: u64,
    /// A process that died had the request, and may have done it.
    is_resent: bool,
}

impl Unique {
    /// From the protocol's form.
    pub(crate) fn of(unique: u64) -> Unique {
        Unique {
            number: unique & !RESENT,
            is_resent: unique & RESENT != 0,
        }
    }
}

/// The state that a request will change, as much as is needed to tell whether it did: inode
/// numbers, 0 for none.
pub(crate) type State = [u64; 2];

/// A record's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u32);

/// A node that the kernel knows.
#[derive(Debug)]
pub(crate) struct KnownNode {
    pub(crate) number: u64,
    pub(crate) lookups: u64,
    pub(crate) handle: Handle,
    pub(crate) place: Place,
}

/// A file that the kernel has open.
#[derive(Debug)]
pub(crate) struct KnownOpen {
    pub(crate) number: u64,
    pub(crate) handle: u64,
    pub(crate) place: Place,
}

/// The state that earlier processes left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    pub(crate) nodes: Vec<KnownNode>,
    pub(crate) opens: Vec<KnownOpen>,
}

#[derive(Debug, Default)]
struct Places {
    free: Vec<u32>,
    /// Behind all places that were ever used.
    end: u32,
}

/// The table, as the serving process sees it.
#[derive(Debug)]
pub(crate) struct Table {
    memory: OwnedFd,
    serial: u32,
    places: Mutex<Places>,
    thread_count: AtomicUsize,
    /// Intents of requests that a dead process may have done.
    intents: HashMap<u64, State>,
    /// File handles that it may have sent for opens, by request.
    opens: HashMap<u64, (u64, u64)>,
    next_handle: AtomicU64,
}

thread_local! {
    /// This thread's intent, within its process's block.
    static OWN_INTENT: Cell<Option<u64>> = const { Cell::new(None) };
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

fn read_all(memory: &OwnedFd, at: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        match pread(memory, &mut bytes[done..], at + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    // Behind its end nothing was written.
    Ok(bytes)
}

/// A new, empty one, for the keeper to hold.
pub(crate) fn create() -> io::Result<OwnedFd> {
    let memory = memfd_create("rushes-keeper", MemfdFlags::CLOEXEC)?;
    pwrite(&memory, MAGIC, 0)?;
    Ok(memory)
}

/// Whether handles of this kind fit into a record.
pub(crate) fn has_room(handle: &Handle) -> bool {
    handle.parts().1.len() <= RECORD_BYTES - HANDLE_AT
}

impl Table {
    /// `serial`: of this process among those that have served the mount, from 1 on.
    ///
    /// Errors   InvalidData when another version of Rushes wrote it; an error of reading memory
    pub(crate) fn open(memory: OwnedFd, serial: u32) -> io::Result<(Table, Left)> {
        if read_all(&memory, 0, MAGIC.len())? != MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the former process of this mount was another version; expected this one. Unmount \
                 the pool and mount it again",
            ));
        }
        let block_bytes = BLOCK_INTENTS as usize * INTENT_BYTES;
        let blocks = read_all(&memory, INTENTS_AT, BLOCK_COUNT as usize * block_bytes)?;
        // Our own block is that of the process 16 before us: its requests were answered long ago.
        let own = u64::from(serial) % BLOCK_COUNT;
        let intents = blocks
            .chunks_exact(INTENT_BYTES)
            .enumerate()
            .filter(|(at, _)| *at as u64 / BLOCK_INTENTS != own)
            .map(|(_, intent)| (word64(intent, 0), [word64(intent, 8), word64(intent, 16)]))
            .filter(|(unique, _)| *unique != 0)
            .collect();
        pwrite(
            &memory,
            &vec![0; block_bytes],
            INTENTS_AT + own * block_bytes as u64,
        )?;
        let length = (fstat(&memory)?.st_size as u64).saturating_sub(RECORDS_AT);
        let records = read_all(&memory, RECORDS_AT, length as usize)?;
        let mut places = Places::default();
        let mut left = Left::default();
        let mut opens = HashMap::new();
        for record in records.chunks_exact(RECORD_BYTES) {
            let place = Place(places.end);
            places.end += 1;
            let (number, second) = (word64(record, 16), word64(record, 24));
            match word32(record, 0) {
                NODE => {
                    let length = (word32(record, 8) as usize).min(RECORD_BYTES - HANDLE_AT);
                    let kind = word32(record, 4) as i32;
                    left.nodes.push(KnownNode {
                        number,
                        lookups: second,
                        handle: Handle::from_parts(kind, &record[HANDLE_AT..][..length]),
                        place,
                    });
                }
                OPEN => {
                    opens.insert(word64(record, 32), (number, second));
                    left.opens.push(KnownOpen {
                        number,
                        handle: second,
                        place,
                    });
                }
                _ => places.free.push(place.0),
            }
        }
        let table = Table {
            memory,
            serial,
            places: Mutex::new(places),
            thread_count: AtomicUsize::new(0),
            intents,
            opens,
            next_handle: AtomicU64::new(u64::from(serial) * HANDLES_OF_ONE),
        };
        Ok((table, left))
    }

    /// The kernel's INIT and the answer to it. None: not sent yet.
    pub(crate) fn agreed(&self) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
        let head = read_all(&self.memory, 0, INIT_AT as usize)?;
        let (init, answer) = (word32(&head, 8) as usize, word32(&head, 12) as usize);
        if init == 0 {
            return Ok(None);
        }
        let init = read_all(&self.memory, INIT_AT, init.min(MESSAGE_BYTES_MAX))?;
        let answer = read_all(&self.memory, ANSWER_AT, answer.min(MESSAGE_BYTES_MAX))?;
        Ok(Some((init, answer)))
    }

    /// Enters both, so that each later process agrees to the same.
    pub(crate) fn agree(&self, init: &[u8], answer: &[u8]) -> io::Result<()> {
        if init.len().max(answer.len()) > MESSAGE_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the kernel's INIT has {} bytes and its answer {}; expected {MESSAGE_BYTES_MAX} at most",
                    init.len(),
                    answer.len()
                ),
            ));
        }
        pwrite(&self.memory, init, INIT_AT)?;
        pwrite(&self.memory, answer, ANSWER_AT)?;
        let lengths = [
            (init.len() as u32).to_ne_bytes(),
            (answer.len() as u32).to_ne_bytes(),
        ];
        pwrite(&self.memory, &lengths.concat(), 8)?;
        Ok(())
    }

    /// A file handle that no process of this mount has used.
    pub(crate) fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    /// The state that a dead process's request was to change, as it was when that process began it.
    /// None: it had not begun, or the request is new.
    pub(crate) fn intended(&self, unique: Unique) -> Option<State> {
        let known = self
            .intents
            .get(&unique.number)
            .filter(|_| unique.is_resent);
        known.copied()
    }

    /// This thread is about to execute the request, which changes this state.
    pub(crate) fn intend(&self, unique: Unique, before: State) -> Answer<()> {
        let own = OWN_INTENT.get().unwrap_or_else(|| {
            let own = self.thread_count.fetch_add(1, Ordering::Relaxed) as u64 % BLOCK_INTENTS;
            OWN_INTENT.set(Some(own));
            own
        });
        let block = u64::from(self.serial) % BLOCK_COUNT;
        let at = INTENTS_AT + (block * BLOCK_INTENTS + own) * INTENT_BYTES as u64;
        let words = [unique.number, before[0], before[1]];
        self.write(&words.map(u64::to_ne_bytes).concat(), at)
    }

    /// The file handle that a dead process sent, or was about to send, for this open of the file.
    /// None: there is none, or the request is new.
    pub(crate) fn opened_before(&self, unique: Unique, number: u64) -> Option<u64> {
        let known = self.opens.get(&unique.number).filter(|_| unique.is_resent);
        let (_, handle) = known.filter(|(found, _)| *found == number)?;
        Some(*handle)
    }

    /// The kernel has the file open by this handle, from the next answer on.
    pub(crate) fn opened(&self, number: u64, handle: u64, unique: Unique) -> Answer<Place> {
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&OPEN.to_ne_bytes());
        let words = [number, handle, unique.number];
        record[16..40].copy_from_slice(&words.map(u64::to_ne_bytes).concat());
        self.add(&record)
    }

    /// The kernel has so many lookups of the node. `place`: of the node's record, if it has one.
    ///
    /// Errors   EOVERFLOW: its handle is longer than any that is known; an error of writing memory
    pub(crate) fn knows(
        &self,
        place: Option<Place>,
        number: u64,
        handle: &Handle,
        lookups: u64,
    ) -> Answer<Place> {
        if !has_room(handle) {
            return Err(Errno::OVERFLOW);
        }
        let (kind, bytes) = handle.parts();
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&NODE.to_ne_bytes());
        record[4..8].copy_from_slice(&kind.to_ne_bytes());
        record[8..12].copy_from_slice(&(bytes.len() as u32).to_ne_bytes());
        record[16..24].copy_from_slice(&number.to_ne_bytes());
        record[24..32].copy_from_slice(&lookups.to_ne_bytes());
        record[HANDLE_AT..][..bytes.len()].copy_from_slice(bytes);
        match place {
            Some(place) => self.write(&record, at(place)).map(|()| place),
            None => self.add(&record),
        }
    }

    /// Frees a record. One that cannot be written stays: the table then has too much, never too
    /// little.
    pub(crate) fn free(&self, place: Place) {
        if self.write(&[0; 4], at(place)).is_ok() {
            locked(&self.places).free.push(place.0);
        }
    }

    fn add(&self, record: &[u8]) -> Answer<Place> {
        let place = {
            let mut places = locked(&self.places);
            let free = places.free.pop();
            Place(free.unwrap_or_else(|| {
                places.end += 1;
                places.end - 1
            }))
        };
        let written = self.write(record, at(place));
        if written.is_err() {
            locked(&self.places).free.push(place.0);
        }
        written.map(|()| place)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Answer<()> {
        match pwrite(&self.memory, bytes, at) {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err(Errno::NOMEM),
            Err(error) => Err(errno(error.into())),
        }
    }
}

fn at(place: Place) -> u64 {
    RECORDS_AT + u64::from(place.0) * RECORD_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn again(memory: &OwnedFd, serial: u32) -> (Table, Left) {
        let memory = memory.as_fd().try_clone_to_owned().unwrap();
        Table::open(memory, serial).unwrap()
    }

    #[test]
    fn the_next_process_knows_what_was_not_taken_back() {
        let memory = create().unwrap();
        let (table, left) = again(&memory, 1);
        assert!(left.nodes.is_empty() && left.opens.is_empty());
        assert_eq!(table.agreed().unwrap(), None);
        table.agree(b"init", b"answer").unwrap();
        let handle = Handle::from_parts(1, &[7; 8]);
        let node = table.knows(None, 12, &handle, 1).unwrap();
        assert_eq!(table.knows(Some(node), 12, &handle, 2).unwrap(), node);
        let forgotten = table.knows(None, 13, &handle, 1).unwrap();
        let request = Unique::of(40);
        let open = table.opened(12, table.new_handle(), request).unwrap();
        table.free(forgotten);

        let (next, left) = again(&memory, 2);
        let agreed = Some((b"init".to_vec(), b"answer".to_vec()));
        assert_eq!(next.agreed().unwrap(), agreed);
        let [known] = &left.nodes[..] else {
            panic!("{left:?}");
        };
        assert_eq!((known.number, known.lookups, known.place), (12, 2, node));
        assert_eq!(known.handle, handle);
        let [known] = &left.opens[..] else {
            panic!("{left:?}");
        };
        assert_eq!((known.number, known.place), (12, open));
        assert_eq!(known.handle, HANDLES_OF_ONE);
        let resent = Unique::of(40 | RESENT);
        assert_eq!(next.opened_before(resent, 12), Some(HANDLES_OF_ONE));
        assert_eq!(next.opened_before(resent, 13), None);
        assert_eq!(next.opened_before(request, 12), None);
        assert_eq!(next.new_handle(), 2 * HANDLES_OF_ONE);
        // A freed place is used again.
        assert_eq!(next.knows(None, 14, &handle, 1).unwrap(), forgotten);
    }

    #[test]
    fn an_intent_is_known_until_fifteen_more_have_died() {
        let memory = create().unwrap();
        let (table, _) = again(&memory, 1);
        table.intend(Unique::of(6), [1, 0]).unwrap();
        table.intend(Unique::of(8), [2, 3]).unwrap();
        let resent = Unique::of(8 | RESENT);
        for serial in 2..=16 {
            let (next, _) = again(&memory, serial);
            assert_eq!(next.intended(resent), Some([2, 3]), "{serial}");
            // A thread has one request at a time.
            assert_eq!(next.intended(Unique::of(6 | RESENT)), None);
            assert_eq!(next.intended(Unique::of(8)), None);
        }
        let (late, _) = again(&memory, 17);
        assert_eq!(late.intended(resent), None);
    }

    #[test]
    fn what_another_version_left_is_refused() {
        let memory = create().unwrap();
        pwrite(&memory, b"rushkee\x02", 0).unwrap();
        assert!(Table::open(memory, 2).is_err());
    }
}
