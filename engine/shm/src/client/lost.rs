// SPDX-License-Identifier: Apache-2.0
//! A daemon that died, and the next one: requests under way go on with the next.
//!
//! Reads of files that have all their bytes end [`ReadError::Plain`] at once. Other reads, writes
//! and syncs wait, and new ones with them. The caller tries [`Client::reconnect`] until it
//! succeeds, or until another program has written the lanes' pieces, see [`Client::is_recovered`];
//! then it calls [`Client::give_up`] and they end Plain. If a write was given over and not
//! answered, the client first asks for it by its old number, so that it happens once.

use super::connect::{self, ConnectError};
use super::*;
use rustix::fs::fstat;
use rustix::io::FdFlags;

impl Client {
    /// The daemon is gone, and may have acknowledged bytes that files lack: before
    /// [`Client::reconnect`] or [`Client::is_recovered`] the caller must neither read nor write
    /// plainly a file with a [`Client::fact`].
    pub fn is_lost(&self) -> bool {
        self.lost && self.guard.same_process()
    }

    /// A file that lacks bytes waits for the next daemon, and its requests with it.
    pub(super) fn waits(&self, file: FileHandle) -> bool {
        self.is_lost()
            && self.files.get(&file.0).is_some_and(|state| {
                let (device, inode) = state.identity;
                !state.closed && self.fact(device, inode).is_some()
            })
    }

    /// Take a request that the client will send to the next daemon.
    pub(super) fn wait_for_another(&mut self, file: FileHandle, ask: &Ask) -> Option<Ticket> {
        let end = ask.offset.checked_add(ask.length as u64)?;
        i64::try_from(end).ok()?;
        let key = self.new_ticket(file, ask);
        Some(Ticket(key.data().as_ffi()))
    }

    /// All acknowledged bytes are in their files: another program has written the lanes' pieces. Or
    /// as many of them as can be written now; files with a [`Client::fact`] lack bytes then, and
    /// the caller must leave them alone.
    pub fn is_recovered(&self) -> bool {
        self.lane.as_ref().is_none_or(Lane::is_done)
    }

    /// Wait for no daemon any more: requests under way end Plain.
    pub fn give_up(&mut self) {
        if !std::mem::take(&mut self.lost) {
            return;
        }
        self.lane = None;
        let keys: Vec<TicketKey> = self.tickets.keys().collect();
        for key in keys {
            if let Some(ticket) = self.tickets.get_mut(key) {
                ticket.error = Some(ReadError::Plain);
            }
            self.finish(key);
        }
        if !self.ready.is_empty() {
            self.ring_ourselves();
        }
    }

    /// Go on with another daemon: name the files to it, and send the waiting requests again.
    /// [`Client::event_fds`] change.
    ///
    /// Errors   nothing has changed; try again.
    pub fn reconnect(
        &mut self,
        path: &Path,
        who: &Connect,
        patience: Duration,
    ) -> Result<(), ConnectError> {
        let session = connect::connect(path, who, patience)?;
        self.slot_count = session.welcome.slot_count;
        self.slot_bytes = session.welcome.slot_bytes;
        self.read_bytes_max = session.welcome.read_bytes_max;
        self.write_bytes_max = session.welcome.write_bytes_max;
        self.socket = session.socket;
        self.memory = session.memory;
        self.data = session.data;
        self.server_bell = session.server_bell;
        self.own_bell = session.own_bell;
        self.lane = session.lane;
        self.alive = true;
        self.lost = false;
        self.end = None;
        self.request_tail = 0;
        self.reply_head = 0;
        self.armed = false;
        self.owed = false;
        self.unrung = false;
        self.urgent = false;
        self.unanswered = 0;
        self.found = false;
        self.end_count = 0;
        self.parts.clear();
        self.name_files_again(clock::now() + patience);
        self.send_again();
        self.tell_server();
        self.rest();
        Ok(())
    }

    fn name_files_again(&mut self, deadline: Instant) {
        let mut handles: Vec<u32> = self.files.keys().copied().collect();
        handles.sort_unstable();
        for handle in handles {
            let named = self.name_again(handle, deadline);
            if let Some(state) = self.files.get_mut(&handle) {
                state.part_count = 0;
                state.closed |= !named;
            }
        }
        self.files.retain(|_, state| !state.closed);
    }

    /// False: the descriptor is another file's by now, or the daemon takes no more.
    fn name_again(&self, handle: u32, deadline: Instant) -> bool {
        let Some(state) = self.files.get(&handle).filter(|state| !state.closed) else {
            return false;
        };
        // SAFETY: `identity_of` asks the kernel whether the number is open, and for which file,
        // before anything else uses it.
        let fd = unsafe { BorrowedFd::borrow_raw(state.fd) };
        if identity_of(fd) != Some(state.identity) {
            return false;
        }
        let head = write_open(handle, state.path.len(), state.writer, state.part);
        loop {
            match socket::send(&self.socket, &[&head, &state.path], &[fd]) {
                Ok(()) => return true,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let left = deadline.since(clock::now());
                    let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
                    if left == Duration::ZERO || poll(&mut fds, Some(&timespec(left))).is_err() {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
    }

    /// Note the numbers of writes whose bytes were given over: the client first asks by these.
    pub(super) fn keep_what_was_given(&mut self) {
        let Some((number, secret)) = self.lane.as_ref().map(|lane| (lane.number, lane.secret))
        else {
            return;
        };
        for (key, part) in &self.parts {
            if let PartUse::WriteEnd { ticket } = part.use_
                && let Some(ticket) = self.tickets.get_mut(ticket)
            {
                ticket.given = Some((key.data().as_ffi(), number, secret));
            }
        }
    }

    fn send_again(&mut self) {
        let mut waiting: Vec<(u64, TicketKey)> = self
            .tickets
            .iter()
            .filter(|(_, ticket)| !ticket.done)
            .map(|(key, ticket)| (ticket.order, key))
            .collect();
        waiting.sort_unstable();
        for (_, key) in waiting {
            let handle = self.tickets.get(key).map_or(0, |ticket| ticket.handle);
            if !self.is_open(FileHandle(handle)) {
                if let Some(ticket) = self.tickets.get_mut(key) {
                    ticket.error = Some(ReadError::Plain);
                }
                self.finish(key);
                continue;
            }
            self.unsent.push_back(key);
        }
        self.send_parts();
    }

    /// Ask whether a daemon that died has committed a write. False: no room now.
    pub(super) fn send_query(&mut self, ticket: TicketKey, given: (u64, u32, u64)) -> bool {
        if !self.room_for_read() {
            return false;
        }
        let handle = self.tickets.get(ticket).map_or(0, |ticket| ticket.handle);
        let key = self.parts.insert(Part {
            handle,
            length: 0,
            use_: PartUse::Query { ticket },
        });
        self.end_count += 1;
        self.unanswered += 1;
        if let Some(file) = self.files.get_mut(&handle) {
            file.part_count += 1;
        }
        let (request, lane, secret) = given;
        self.push(&Request {
            id: key.data().as_ffi(),
            op: op::WAS_COMMITTED,
            offset: request,
            device: u64::from(lane),
            inode: secret,
            ..Request::default()
        });
        self.urgent = true;
        true
    }

    /// The answer to that.
    pub(super) fn queried(&mut self, key: TicketKey, reply: &Reply) {
        let Some(ticket) = self.tickets.get_mut(key) else {
            return;
        };
        ticket.part_count = 0;
        ticket.given = None;
        if reply.errno == 0 {
            self.finish(key);
        } else {
            ticket.is_sent = false;
            self.unsent.push_back(key);
        }
    }
}

/// Device and inode. None: it is not open.
pub(super) fn identity_of(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::io::fcntl_getfd(fd).ok().map(|_: FdFlags| ())?;
    let found = fstat(fd).ok()?;
    Some((found.st_dev, found.st_ino))
}
