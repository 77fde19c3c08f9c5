// SPDX-License-Identifier: Apache-2.0
//! Writes at the door's end: the client asks for pages of the lane, fills them, and gives them
//! over.

use super::*;
use rustix::fs::{FallocateFlags, fallocate};

impl Client {
    /// Start a write from `buffer`; [`Client::poll`] reports its end: all of it was acknowledged,
    /// or nothing. None: not taken, write plainly.
    ///
    /// # Safety
    /// `buffer` is valid for reading `length` bytes, and not changed, until the write is reported
    /// or cancelled, its file closed, or the client dropped.
    pub unsafe fn write_send(
        &mut self,
        file: FileHandle,
        buffer: *const u8,
        length: usize,
        offset: u64,
        private_data: usize,
    ) -> Option<Ticket> {
        if !self.takes_write(length) {
            return None;
        }
        let ask = Ask {
            kind: Kind::Write,
            // Never written to.
            buffer: buffer.cast_mut(),
            length,
            offset,
            private_data,
            waited_for: false,
        };
        self.send_or_wait(file, &ask)
    }

    /// Flush the acknowledged bytes of a file; [`Client::poll`] reports the end. None: not taken,
    /// the file has all bytes: sync that.
    pub fn sync_send(&mut self, file: FileHandle, private_data: usize) -> Option<Ticket> {
        let ask = Ask {
            private_data,
            ..Ask::without_bytes(Kind::Sync)
        };
        if self.waits(file) {
            return self.wait_for_another(file, &ask);
        }
        if !self.usable() || self.lane.is_none() {
            return None;
        }
        self.send(file, &ask)
    }

    /// As [`Client::hold`], without waiting: [`Client::poll`] reports when the file is held. If the
    /// daemon dies meanwhile, the client asks the next one. None: there is no daemon, and the file
    /// lacks no bytes.
    pub fn hold_send(&mut self, file: FileHandle, private_data: usize) -> Option<Ticket> {
        let ask = Ask {
            private_data,
            ..Ask::without_bytes(Kind::Hold)
        };
        self.send_or_wait(file, &ask)
    }

    /// Write and wait.
    pub fn write(
        &mut self,
        file: FileHandle,
        bytes: &[u8],
        offset: u64,
    ) -> Result<usize, ReadError> {
        if !self.usable() || !self.takes_write(bytes.len()) {
            return Err(ReadError::Plain);
        }
        self.ask_and_wait(
            file,
            &Ask {
                kind: Kind::Write,
                buffer: bytes.as_ptr().cast_mut(),
                length: bytes.len(),
                offset,
                private_data: 0,
                waited_for: true,
            },
        )
    }

    /// As [`Client::sync_send`], and wait.
    pub fn sync(&mut self, file: FileHandle) -> Result<(), ReadError> {
        if !self.usable() || self.lane.is_none() {
            return Err(ReadError::Plain);
        }
        let ask = Ask {
            waited_for: true,
            ..Ask::without_bytes(Kind::Sync)
        };
        self.ask_and_wait(file, &ask).map(|_| ())
    }

    /// Does the daemon take writes of this session?
    pub fn takes_writes(&self) -> bool {
        self.lane.is_some()
    }

    /// Is there a lane for writes, and could this one fit?
    fn takes_write(&self, length: usize) -> bool {
        let most = self
            .lane
            .as_ref()
            .map_or(0, |_| self.write_bytes_max as usize);
        length > 0 && length <= most
    }

    /// The fact of a file some of whose bytes are still with the daemon, so that the file system's
    /// answer is not the last word. None: it has none.
    pub fn fact(&self, device: u64, inode: u64) -> Option<FileFact> {
        self.lane.as_ref()?.facts.of(device, inode)
    }

    // ---- Grants ----

    /// Check a reply to WRITE_BEGIN before any use. No runs: it was not granted.
    pub(super) fn check_grant(
        &self,
        reply: &Reply,
        offset: u64,
        length: u64,
    ) -> Result<Runs, PeerError> {
        let count = reply.slot_count as usize;
        let pairs = reply.slots.get(..count).unwrap_or(&[]).chunks_exact(2);
        let mut runs = Vec::with_capacity(REPLY_SLOTS_MAX / 2);
        for pair in pairs {
            runs.push(PageRun {
                first: pair[0],
                count: pair[1],
            });
        }
        let lane_pages = self
            .lane
            .as_ref()
            .map_or(0, |lane| lane.bytes.bytes() as u64 / PAGE_BYTES);
        let into = offset % PAGE_BYTES;
        let inside = |run: &PageRun| u64::from(run.first) + u64::from(run.count) <= lane_pages;
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let granted = reply.errno == 0
            && count == 2 * runs.len()
            && runs.iter().all(inside)
            && pages == (into + length).div_ceil(PAGE_BYTES)
            && u64::from(reply.first_offset) == into
            && reply.length == length;
        let refused = count == 0 && (1..=4095).contains(&reply.errno) || reply.errno == PLAIN;
        match Runs::from_runs(&runs) {
            Some(runs) if granted || refused && count == 0 => Ok(runs),
            _ => Err(broken(format!(
                "read a grant of {} bytes from offset {} in {pages} pages, errno {}; expected {length} bytes from \
                 offset {into} in a lane of {lane_pages} pages",
                reply.length, reply.first_offset, reply.errno
            ))),
        }
    }

    /// A write got its pages, or did not.
    pub(super) fn take_grant(&mut self, key: PartKey, use_: PartUse, reply: &Reply, runs: Runs) {
        let granted = reply.errno == 0;
        let ticket = match use_ {
            PartUse::WriteBegin { ticket, .. } => Some(ticket),
            _ => None,
        };
        let Some((ticket, true)) = ticket.map(|ticket| (ticket, granted)) else {
            self.drop_part(key, true);
            if granted {
                // Room is certain: see *Room* in `mod.rs`.
                self.push_urgent(key, op::WRITE_ABORT);
            }
            if let Some(ticket) = ticket {
                self.end_ticket(ticket, reply);
            }
            return;
        };
        if !self.has_memory(&runs) {
            // The lanes' folder is full: treat it as not granted.
            self.drop_part(key, true);
            self.push_urgent(key, op::WRITE_ABORT);
            let plain = Reply {
                errno: PLAIN,
                ..*reply
            };
            return self.end_ticket(ticket, &plain);
        }
        self.copy_to_lane(ticket, reply.first_offset, &runs);
        if let Some(part) = self.parts.get_mut(key) {
            part.use_ = PartUse::WriteEnd { ticket };
        }
        self.end_count -= 1;
        self.unanswered += 1;
        self.push_urgent(key, op::WRITE_END);
    }

    fn push_urgent(&mut self, key: PartKey, op: u32) {
        self.push(&Request {
            id: key.data().as_ffi(),
            op,
            ..Request::default()
        });
        self.urgent = true;
    }

    /// Get memory for pages of the lane: a store where none is left would kill the process.
    fn has_memory(&self, runs: &Runs) -> bool {
        let Some(lane) = &self.lane else {
            return false;
        };
        runs.as_slice().iter().all(|run| {
            let start = u64::from(run.first) * PAGE_BYTES;
            let bytes = u64::from(run.count) * PAGE_BYTES;
            let taken = lane.bytes.populate_part(start as usize, bytes as usize);
            match taken {
                // A kernel before Linux 5.14.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    fallocate(&lane.file, FallocateFlags::empty(), start, bytes).is_ok()
                }
                other => other.is_ok(),
            }
        })
    }

    fn copy_to_lane(&self, key: TicketKey, first_offset: u32, runs: &Runs) {
        let (Some(ticket), Some(lane)) = (self.tickets.get(key), &self.lane) else {
            return;
        };
        let mut source = ticket.buffer.cast_const();
        let mut left = ticket.length;
        let mut into = first_offset as usize;
        for run in runs.as_slice() {
            let start = run.first as usize * PAGE_BYTES as usize + into;
            let bytes = left.min(run.count as usize * PAGE_BYTES as usize - into);
            // SAFETY: the run lies in the mapping (`check_grant`), and `into` is less than a page;
            // the source is the caller's buffer, valid until the write is reported or cancelled
            // (`write_send`), of which `left` bytes remain. They do not overlap: the mapping is
            // ours.
            unsafe {
                let target = lane.bytes.start().as_ptr().add(start);
                source.copy_to_nonoverlapping(target, bytes);
            }
            source = source.wrapping_add(bytes);
            left -= bytes;
            into = 0;
        }
    }
}
