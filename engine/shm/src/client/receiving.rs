// SPDX-License-Identifier: Apache-2.0
//! Replies of the daemon: checked, copied out of the cache segment, and joined to finished
//! requests.

use super::*;

impl Client {
    /// Take the daemon's replies, copy their bytes, and send requests that waited for room.
    pub(super) fn collect(&mut self) {
        if !self.usable() {
            return;
        }
        self.wake();
        if self.take_replies() > 0 {
            self.found = true;
        } else if !self.found {
            // Woken, and not by a reply.
            self.look_at_socket();
        }
        self.send_parts();
        self.send_closes();
        if self.urgent {
            self.tell_server();
        }
    }

    /// Awake: the daemon need not ring any more; silence the ring that came.
    pub(super) fn wake(&mut self) {
        if std::mem::take(&mut self.armed) && self.memory.disarm(Which::Replies) {
            self.owed = true;
        }
        if self.owed && bell::silence(&self.own_bell).unwrap_or(true) {
            // Else the ring is still on its way, and will wake us once for nothing.
            self.owed = false;
        }
    }

    pub(super) fn take_replies(&mut self) -> u32 {
        let mut taken = 0;
        loop {
            match self.memory.waiting(Which::Replies, self.reply_head) {
                Ok(0) => return taken,
                Ok(_) => {}
                Err(error) => {
                    self.die(error);
                    return taken;
                }
            }
            let reply = self.memory.read_reply(self.reply_head);
            self.reply_head = self.reply_head.wrapping_add(1);
            self.memory.publish_head(Which::Replies, self.reply_head);
            taken += 1;
            if let Err(error) = self.take_reply(&reply) {
                self.die(error);
                return taken;
            }
        }
    }

    pub(super) fn take_reply(&mut self, reply: &Reply) -> Result<(), PeerError> {
        let key = PartKey::from(KeyData::from_ffi(reply.id));
        let Some(part) = self.parts.get_mut(key) else {
            return Err(broken(format!(
                "read a reply to request {}, which is not under way",
                reply.id
            )));
        };
        let length = part.length;
        let use_ = part.use_;
        if !matches!(
            use_,
            PartUse::WriteBegin { .. } | PartUse::WriteForgotten { .. }
        ) {
            check_reply(reply, length, self.slot_count, self.slot_bytes)?;
        }
        match use_ {
            PartUse::WriteBegin { offset, .. } | PartUse::WriteForgotten { offset } => {
                let runs = self.check_grant(reply, offset, length)?;
                self.take_grant(key, use_, reply, runs);
            }
            PartUse::WriteEnd { ticket } | PartUse::NoBytes { ticket } => {
                if reply.slot_count > 0 {
                    return Err(broken(format!(
                        "read buffers in the reply to request {}, which asked for none",
                        reply.id
                    )));
                }
                let owes_end = matches!(use_, PartUse::NoBytes { .. });
                self.drop_part(key, owes_end);
                self.end_ticket(ticket, reply);
            }
            PartUse::Notice => part.use_ = PartUse::NoticeDone(reply.errno),
            PartUse::LeaseWanted => part.use_ = PartUse::LeaseGiven(*reply),
            PartUse::Read { ticket, start } => {
                self.take_part(ticket, start, length as usize, reply);
                self.end_part(key, reply.slot_count > 0);
            }
            PartUse::Query { ticket } => {
                self.drop_part(key, true);
                self.queried(ticket, reply);
            }
            PartUse::Forgotten => self.end_part(key, reply.slot_count > 0),
            // Its room for an end is used already.
            PartUse::EndForgotten => {
                self.drop_part(key, false);
            }
            PartUse::LeaseGiven(_) | PartUse::Leased | PartUse::NoticeDone(_) => {
                return Err(broken(format!(
                    "read a second reply to request {}",
                    reply.id
                )));
            }
        }
        self.unanswered -= 1;
        Ok(())
    }

    /// A ticket of one part has ended.
    pub(super) fn end_ticket(&mut self, key: TicketKey, reply: &Reply) {
        if let Some(ticket) = self.tickets.get_mut(key) {
            ticket.part_count -= 1;
            ticket.error = error_of(reply);
            self.finish(key);
        }
    }

    /// A part of a read has come.
    pub(super) fn take_part(&mut self, key: TicketKey, start: usize, length: usize, reply: &Reply) {
        let Some(ticket) = self.tickets.get_mut(key) else {
            return;
        };
        ticket.part_count -= 1;
        match error_of(reply) {
            // Plain overrides an error: the caller's own read finds the error again, if it is one.
            Some(ReadError::Plain) => ticket.error = Some(ReadError::Plain),
            Some(error) => {
                ticket.error.get_or_insert(error);
            }
            None => {
                let bytes = reply.length as usize;
                if bytes < length {
                    ticket.end = ticket.end.min(start + bytes);
                }
                if ticket.error.is_none() && start < ticket.end {
                    // `start + bytes` is inside the buffer: the part is, and bytes <= length.
                    let mut target = ticket.buffer.wrapping_add(start);
                    self.pieces(reply, |source, bytes| {
                        // SAFETY: the source lies in the mapping (`check_reply`); the target is the
                        // caller's buffer, valid until the read is reported or cancelled
                        // (`read_send`), and this read is in our table, so neither has happened.
                        // They do not overlap: the mapping is ours and read-only.
                        unsafe { source.as_ptr().copy_to_nonoverlapping(target, bytes) };
                        target = target.wrapping_add(bytes);
                    });
                }
            }
        }
        let Some(ticket) = self.tickets.get(key) else {
            return;
        };
        if ticket.part_count == 0 && ticket.all_sent() {
            self.finish(key);
        }
    }

    pub(super) fn finish(&mut self, key: TicketKey) {
        let Some(ticket) = self.tickets.get_mut(key) else {
            return;
        };
        ticket.done = true;
        if ticket.waited_for {
            return;
        }
        self.ready.push_back(Finished {
            ticket: Ticket(key.data().as_ffi()),
            private_data: ticket.private_data,
            result: ticket.result(),
        });
        self.tickets.remove(key);
    }

    /// A request has ended; give its buffers back if it got any.
    pub(super) fn end_part(&mut self, key: PartKey, give_back: bool) {
        if !self.drop_part(key, true) {
            return;
        }
        if give_back {
            // Room is certain: see *Room* in `mod.rs`.
            self.push(&Request {
                id: key.data().as_ffi(),
                op: op::READ_END,
                ..Request::default()
            });
        }
    }

    /// A request is over. `owes_end`: the ring keeps room for a request that ends it.
    pub(super) fn drop_part(&mut self, key: PartKey, owes_end: bool) -> bool {
        let Some(part) = self.parts.remove(key) else {
            return false;
        };
        if owes_end {
            self.end_count -= 1;
        }
        if let Some(file) = self.files.get_mut(&part.handle) {
            file.part_count -= 1;
            if file.part_count == 0 && file.closed {
                self.files.remove(&part.handle);
                self.closing.push_back(part.handle);
            }
        }
        true
    }

    /// Where the bytes of a checked reply are.
    pub(super) fn pieces(&self, reply: &Reply, mut take: impl FnMut(NonNull<u8>, usize)) {
        let slot_bytes = self.slot_bytes as usize;
        let mut offset = reply.first_offset as usize;
        let mut left = reply.length as usize;
        for &slot in reply.slots.iter().take(reply.slot_count as usize) {
            let bytes = left.min(slot_bytes - offset);
            if bytes == 0 {
                return;
            }
            // SAFETY: `check_reply` saw slot < slot_count and offset < slot_bytes, and the mapping
            // is slot_count × slot_bytes long.
            let piece = unsafe { self.data.start().add(slot as usize * slot_bytes + offset) };
            take(piece, bytes);
            left -= bytes;
            offset = 0;
        }
    }

    /// Forget a read: drop its parts' replies when they come.
    pub(super) fn forget(&mut self, key: TicketKey) {
        if self
            .tickets
            .remove(key)
            .is_none_or(|ticket| ticket.part_count == 0)
        {
            return;
        }
        for part in self.parts.values_mut() {
            match part.use_ {
                PartUse::Read { ticket, .. }
                | PartUse::NoBytes { ticket }
                | PartUse::Query { ticket }
                    if ticket == key =>
                {
                    part.use_ = PartUse::Forgotten;
                }
                PartUse::WriteBegin { ticket, offset } if ticket == key => {
                    part.use_ = PartUse::WriteForgotten { offset };
                }
                PartUse::WriteEnd { ticket } if ticket == key => {
                    part.use_ = PartUse::EndForgotten;
                }
                _ => {}
            }
        }
    }
}

pub(super) fn error_of(reply: &Reply) -> Option<ReadError> {
    match reply.errno {
        0 => None,
        PLAIN => Some(ReadError::Plain),
        errno => Some(ReadError::Errno(errno)),
    }
}

/// Check a reply to a read of `length` bytes before any use.
fn check_reply(
    reply: &Reply,
    length: u64,
    slot_count: u32,
    slot_bytes: u32,
) -> Result<(), PeerError> {
    let slots = reply.slots.get(..reply.slot_count as usize);
    let fits = slots.is_some_and(|slots| {
        let room = slots.len() as u64 * u64::from(slot_bytes);
        slots.iter().all(|&slot| slot < slot_count)
            && reply.length <= length
            && reply.first_offset < slot_bytes
            && (u64::from(reply.first_offset) + reply.length <= room || reply.length == 0)
            && (reply.errno == 0 || slots.is_empty())
            && (reply.errno <= 4095 || reply.errno == PLAIN)
    });
    if fits {
        return Ok(());
    }
    Err(broken(format!(
        "read a reply of {} bytes from offset {} of {} buffers, errno {}; expected at most {length} bytes in at \
         most {REPLY_SLOTS_MAX} of {slot_count} buffers of {slot_bytes}",
        reply.length, reply.first_offset, reply.slot_count, reply.errno
    )))
}
