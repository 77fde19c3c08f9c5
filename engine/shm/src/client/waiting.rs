// SPDX-License-Identifier: Apache-2.0
//! Waiting for the daemon, within bounds, and the end of a session.

use super::*;

/// How often a waiting call looks whether the daemon lives.
const LOOK_FOR_BEAT: Duration = Duration(5 * NS_PER_S);

impl Client {
    pub(super) fn has(&mut self, wanted: Wanted) -> bool {
        match wanted {
            Wanted::Ticket(key) => self.tickets.get(key).is_none_or(|ticket| ticket.done),
            Wanted::Part(key) => self.parts.get(key).is_none_or(|part| {
                matches!(part.use_, PartUse::LeaseGiven(_) | PartUse::NoticeDone(_))
            }),
            Wanted::Room => self.room_for_read(),
        }
    }

    /// Wait until it is there or the session has ended.
    pub(super) fn wait_for(&mut self, wanted: Wanted) {
        let begun = clock::now();
        let mut beat = (self.heartbeat(), begun);
        loop {
            self.collect_in_wait();
            if !self.alive || self.has(wanted) {
                return;
            }
            // The daemon may be waiting for just the slots that are given back here.
            self.tell_server();
            if self.spin_for_reply() {
                continue;
            }
            let now = clock::now();
            if beat.0 != self.heartbeat() {
                beat = (self.heartbeat(), now);
            }
            let patience = (beat.1 + HUNG_PATIENCE).min(begun + LOST_PATIENCE);
            if now >= patience {
                let waited_s = now.since(begun).0 / NS_PER_S;
                self.die(broken(format!(
                    "the daemon has not answered for {waited_s} s"
                )));
                return;
            }
            self.sleep(wanted, patience.since(now).min(LOOK_FOR_BEAT));
        }
    }

    pub(super) fn collect_in_wait(&mut self) {
        self.wake();
        self.take_replies();
        self.send_parts();
        self.send_closes();
    }

    pub(super) fn sleep(&mut self, wanted: Wanted, at_most: Duration) {
        self.memory.arm(Which::Replies);
        self.armed = true;
        match self.memory.waiting(Which::Replies, self.reply_head) {
            Ok(0) => {}
            Ok(_) => return,
            Err(error) => return self.die(error),
        }
        // No bell rings for room in the request ring; it comes within microseconds.
        let at_most = match wanted {
            Wanted::Room => at_most.min(Duration::from_us(200)),
            _ => at_most,
        };
        let mut fds = [
            PollFd::new(&self.own_bell, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let ended = match poll(&mut fds, Some(&timespec(at_most))) {
            Ok(_) => !fds[1].revents().is_empty(),
            Err(_) => false,
        };
        if ended {
            // First take the replies that came before the end.
            self.collect_in_wait();
            if self.alive {
                self.look_at_socket();
            }
        }
    }

    /// The caller returns to its event loop: make sure that it will be woken, and wake the daemon.
    pub(super) fn rest(&mut self) {
        self.found = false;
        if !self.usable() {
            if !self.ready.is_empty() && self.guard.same_process() {
                self.ring_ourselves();
            }
            return;
        }
        if self.unrung && self.memory.server_flags() & server_flag::SWEEPS == 0 {
            self.tell_server();
        }
        if !self.armed && self.unanswered > 0 {
            self.memory.arm(Which::Replies);
            self.armed = true;
            match self.memory.waiting(Which::Replies, self.reply_head) {
                Ok(0) => {}
                Ok(_) => self.ring_ourselves(),
                Err(error) => self.die(error),
            }
        }
        if !self.ready.is_empty() {
            self.ring_ourselves();
        }
    }

    pub(super) fn ring_ourselves(&mut self) {
        if !self.owed {
            self.owed = bell::ring(&self.own_bell).is_ok();
        }
    }

    /// After its welcome the daemon sends nothing on the socket, except requests to a pool's door:
    /// a readable socket has one of those, or its end.
    pub(super) fn look_at_socket(&mut self) {
        let mut buffer = [0; PACKET_BYTES_MAX];
        match socket::receive(&self.socket, &mut buffer) {
            Ok(None) => {}
            Ok(Some(packet)) if packet.bytes == 0 => self.die(PeerError::Closed),
            Ok(Some(packet)) if self.is_of_pool => {
                self.hear_wanted(buffer.get(..packet.bytes).unwrap_or_default());
            }
            Ok(Some(packet)) => self.die(broken(format!(
                "read a packet of {} bytes from the daemon; expected none after its welcome",
                packet.bytes
            ))),
            Err(error) => self.die(error.into()),
        }
    }

    pub(super) fn usable(&mut self) -> bool {
        if self.alive && !self.guard.same_process() {
            self.die(broken("this is a forked copy of the session's process"));
        }
        self.alive
    }

    /// A caller that does not wait has found the daemon hung: take it for dead.
    pub fn lose(&mut self) {
        self.die(broken("the daemon was taken for hung"));
    }

    /// The session is over: requests that are under way end Plain, unless another daemon may know
    /// of the file or of the write.
    pub(super) fn die(&mut self, why: PeerError) {
        if !self.alive {
            return;
        }
        self.alive = false;
        self.end = Some(why);
        self.lost = self.lane.is_some() && self.guard.same_process();
        self.unanswered = 0;
        if self.guard.same_process() {
            // A daemon that was only hung must not serve this session's requests any more.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
        if self.lost {
            self.keep_what_was_given();
        }
        self.parts
            .retain(|_, part| matches!(part.use_, PartUse::Leased));
        self.unsent.clear();
        self.closing.clear();
        self.wanted.clear();
        let keys: Vec<TicketKey> = self.tickets.keys().collect();
        for key in keys {
            if let Some(ticket) = self.tickets.get_mut(key) {
                let identity = self.files.get(&ticket.handle).map(|file| file.identity);
                let kept = ticket.kind != Kind::Read
                    || identity.is_some_and(|(device, inode)| {
                        let lane = self.lane.as_ref();
                        lane.is_some_and(|lane| lane.facts.of(device, inode).is_some())
                    });
                if self.lost && kept && !ticket.waited_for && !ticket.done {
                    ticket.begin_again();
                    continue;
                }
                ticket.error = Some(ReadError::Plain);
            }
            self.finish(key);
        }
    }
}
