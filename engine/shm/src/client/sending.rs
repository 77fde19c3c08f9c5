// SPDX-License-Identifier: Apache-2.0
//! Requests on their way to the daemon: tickets, their parts, notices, and room in the ring.

use super::*;

impl Client {
    pub(super) fn begin(&mut self, file: FileHandle, ask: &Ask) -> Option<TicketKey> {
        let length = ask.length;
        let end = ask.offset.checked_add(length as u64)?;
        if !self.is_open(file) || i64::try_from(end).is_err() {
            return None;
        }
        let key = self.new_ticket(file, ask);
        self.unsent.push_back(key);
        self.send_parts();
        let Some(ticket) = self.tickets.get(key) else {
            // The shared memory was invalid, which ended all reads; this one was not taken.
            self.ready
                .retain(|finished| finished.ticket.0 != key.data().as_ffi());
            return None;
        };
        if length == 0 && ask.kind == Kind::Read {
            self.finish(key);
        } else if ticket.part_count == 0 && self.unanswered == 0 {
            // No reply is to come, after which the client would send it.
            self.forget(key);
            return None;
        }
        Some(key)
    }

    pub(super) fn new_ticket(&mut self, file: FileHandle, ask: &Ask) -> TicketKey {
        self.ticket_last += 1;
        self.tickets.insert(TicketState {
            kind: ask.kind,
            handle: file.0,
            buffer: ask.buffer,
            offset: ask.offset,
            length: ask.length,
            private_data: ask.private_data,
            waited_for: ask.waited_for,
            sent: 0,
            is_sent: false,
            order: self.ticket_last,
            given: None,
            part_count: 0,
            end: ask.length,
            error: None,
            done: false,
        })
    }

    /// Send waiting requests as far as the ring has room.
    pub(super) fn send_parts(&mut self) {
        while let Some(&key) = self.unsent.front() {
            let Some(ticket) = self.tickets.get(key) else {
                self.unsent.pop_front();
                continue;
            };
            if ticket.all_sent() {
                self.unsent.pop_front();
                continue;
            }
            let (handle, start) = (ticket.handle, ticket.sent);
            if let Some(given) = ticket.given {
                if !self.send_query(key, given) {
                    return;
                }
                self.note_sent(key);
                continue;
            }
            if ticket.kind != Kind::Read {
                let (offset, length) = (ticket.offset, ticket.length as u64);
                let (op, use_) = match ticket.kind {
                    Kind::Write => {
                        let begin = PartUse::WriteBegin {
                            ticket: key,
                            offset,
                        };
                        (op::WRITE_BEGIN, begin)
                    }
                    Kind::Hold => (op::HOLD, PartUse::NoBytes { ticket: key }),
                    _ => (op::SYNC, PartUse::NoBytes { ticket: key }),
                };
                if self.send_part(op, handle, offset, length, use_).is_none() {
                    return;
                }
                self.note_sent(key);
                continue;
            }
            let offset = ticket.offset + start as u64;
            let Some(length) = self.part_length(offset, ticket.length - start) else {
                return;
            };
            let use_ = PartUse::Read { ticket: key, start };
            if self
                .send_part(op::READ, handle, offset, length as u64, use_)
                .is_none()
            {
                return;
            }
            if let Some(ticket) = self.tickets.get_mut(key) {
                ticket.sent += length;
                ticket.part_count += 1;
            }
        }
    }

    /// A request that is one part is on its way.
    fn note_sent(&mut self, key: TicketKey) {
        if let Some(ticket) = self.tickets.get_mut(key) {
            ticket.is_sent = true;
            ticket.part_count += 1;
        }
    }

    /// The length of a read at `offset` that one request can ask for: at most the daemon's limit,
    /// and the room in the slots of one reply, from the offset's place in the first on.
    pub(super) fn part_length(&self, offset: u64, length: usize) -> Option<usize> {
        let slot_bytes = u64::from(self.slot_bytes);
        let spanned = slot_bytes * REPLY_SLOTS_MAX as u64 - offset % slot_bytes;
        let most = spanned.min(self.read_bytes_max).min(length as u64);
        usize::try_from(most).ok().filter(|&most| most > 0)
    }

    pub(super) fn send_part(
        &mut self,
        op: u32,
        handle: u32,
        offset: u64,
        length: u64,
        use_: PartUse,
    ) -> Option<PartKey> {
        if !self.room_for_read() {
            return None;
        }
        let key = self.parts.insert(Part {
            handle,
            length,
            use_,
        });
        self.end_count += 1;
        self.unanswered += 1;
        // A hold is of the file, under any name.
        let (mut device, mut inode) = (0, 0);
        if let Some(file) = self.files.get_mut(&handle) {
            file.part_count += 1;
            if op == op::HOLD {
                (device, inode) = file.identity;
            }
        }
        self.push(&Request {
            id: key.data().as_ffi(),
            op,
            handle: if op == op::HOLD { 0 } else { handle },
            offset,
            length,
            device,
            inode,
            sent_ns: clock::now().0,
            ..Request::default()
        });
        self.urgent = true;
        Some(key)
    }

    /// Room for a read and for its END, besides an END for every other read. See *Room* in
    /// `mod.rs`.
    pub(super) fn room_for_read(&mut self) -> bool {
        self.room_for(2)
    }

    pub(super) fn room_for(&mut self, entries: u32) -> bool {
        if !self.alive || self.parts.len() >= RING_ENTRIES as usize {
            return false;
        }
        match self.memory.untaken(Which::Requests, self.request_tail) {
            Ok(untaken) => untaken + self.end_count + entries <= RING_ENTRIES,
            Err(error) => {
                self.die(error);
                false
            }
        }
    }

    /// Publish a request for which there is room.
    pub(super) fn push(&mut self, request: &Request) {
        self.memory.write_request(self.request_tail, request);
        self.request_tail = self.request_tail.wrapping_add(1);
        self.memory.publish_tail(Which::Requests, self.request_tail);
        self.unrung = true;
    }

    /// Make the daemon look at the published requests.
    pub(super) fn tell_server(&mut self) {
        self.urgent = false;
        if std::mem::take(&mut self.unrung) && self.memory.must_ring(Which::Requests) {
            let _ = bell::ring(&self.server_bell);
        }
    }

    /// Closes ring: the daemon does not look for them, as it does for returned slots, and the
    /// bandwidth promised to a file is free for others once its close arrives.
    pub(super) fn send_closes(&mut self) {
        let mut told = false;
        while let Some(&handle) = self.closing.front()
            && self.room_for(1)
        {
            self.closing.pop_front();
            self.push(&Request {
                op: op::CLOSE,
                handle,
                ..Request::default()
            });
            told = true;
        }
        if told {
            self.tell_server();
        }
    }

    /// Send a notice and wait. Returns the answer's errno, 0 for none. None: there is no answer.
    pub(super) fn notice(&mut self, request: Request) -> Option<u32> {
        if !self.usable() {
            return None;
        }
        if !self.room_for(1) {
            self.wait_for(Wanted::Room);
        }
        if !self.room_for(1) {
            return None;
        }
        let key = self.parts.insert(Part {
            handle: 0,
            length: 0,
            use_: PartUse::Notice,
        });
        self.unanswered += 1;
        self.push(&Request {
            id: key.data().as_ffi(),
            sent_ns: clock::now().0,
            ..request
        });
        self.tell_server();
        self.wait_for(Wanted::Part(key));
        let part = self.parts.remove(key);
        self.rest();
        match part.map(|part| part.use_) {
            Some(PartUse::NoticeDone(errno)) => Some(errno),
            _ => None,
        }
    }

    /// Whether the file is open in this session: after [`Client::reconnect`] it may not be.
    pub fn is_open(&self, file: FileHandle) -> bool {
        self.files.get(&file.0).is_some_and(|state| !state.closed)
    }

    pub(super) fn new_handle(&mut self) -> Option<u32> {
        // After 2^32 opens numbers come again; skip those still in use.
        for _ in 0..=self.files.len() + self.closing.len() {
            self.handle_last = self.handle_last.wrapping_add(1);
            let handle = self.handle_last;
            if !self.files.contains_key(&handle) && !self.closing.contains(&handle) {
                return Some(handle);
            }
        }
        None
    }
}
