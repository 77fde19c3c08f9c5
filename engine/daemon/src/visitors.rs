// SPDX-License-Identifier: Apache-2.0
//! The loop's part for doors: connections, messages, and the end of sessions.
//!
//! If a door breaks a rule, the daemon ends its session and logs what it read and what it expected;
//! other sessions are not affected.

use crate::event_loop::{AGAIN, Daemon, tag};
use crate::files::WRITTEN_FILE_DESCRIPTORS;
use crate::jobs::Job;
use crate::sessions::{DoorSession, Guest, IsFound, NEWCOMER_COUNT_MAX, OpenHandle};
use crate::worker::Urgency;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_shm::server::{ClientEvent, Newcomer, ReplyBody, SessionTerms};
use rushes_shm::{Connect, PeerError, Writer};
use rushes_sys::file::FdInfo;
use rushes_sys::limits::descriptor_count_max;
use rushes_sys::space::Allows;
use rushes_sys::{clock, errno_of};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Events of one session that a turn takes before it goes on with the others.
const EVENTS_PER_TURN: usize = 128;
/// Pause after a failed accept, such as for lack of descriptors: the poll would report a waiting
/// door again at once.
const ACCEPT_AGAIN: Duration = Duration::from_ms(100);
/// EMFILE: too many open files in this process. ENFILE does not count: when the machine has too
/// many, they are seldom ours.
const NO_DESCRIPTOR: Errno = Errno(24);
/// Between two times that unused files are closed for others: if each of many failed opens closed
/// some, nothing would stay cached.
const CROWDED_AGAIN: Duration = ACCEPT_AGAIN;
/// Logged for a file without a descriptor.
const TOO_MANY: &str = "a file is not served, its client does plain I/O: too many are open (raise LimitNOFILE=, ulimit -n)";
/// How long a newcomer may be silent.
const GUEST_PATIENCE: Duration = Duration::from_s(5);

/// When unused files may be closed next for lack of descriptors.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    next: Instant,
}

impl Crowd {
    /// True: close some, since a call failed with `errno` at `now`.
    fn take_turn(&mut self, errno: Errno, now: Instant) -> bool {
        let is_due = errno == NO_DESCRIPTOR && now >= self.next;
        if is_due {
            self.next = now + CROWDED_AGAIN;
        }
        is_due
    }
}

impl Daemon {
    // ---- Connections ----

    pub(super) fn accept(&mut self) {
        // Level-triggered: the poll reports a door that still waits again.
        for _ in 0..16 {
            if self.stopping {
                return;
            }
            let Some(listener) = &self.listener else {
                return;
            };
            let newcomer = match listener.accept() {
                Ok(Some(newcomer)) => newcomer,
                Ok(None) => return,
                Err(error) => {
                    self.say_once(format!("a door could not connect: {error}"));
                    if let Some(poll) = self.listener_poll.take() {
                        self.ring.poll_remove(poll);
                    }
                    self.accept_at = clock::now() + ACCEPT_AGAIN;
                    self.crowded_if(errno_of(&error));
                    return;
                }
            };
            self.newcomer(newcomer);
        }
    }

    /// Watch the listener, unless it is watched already.
    pub(super) fn look_out(&mut self, now: Instant) {
        if now < self.accept_at {
            return;
        }
        self.accept_at = Instant::NEVER;
        let Some(listener) = self
            .listener
            .as_ref()
            .filter(|_| self.listener_poll.is_none())
        else {
            return;
        };
        match self.ring.poll_add(listener.fd().clone(), tag::LISTENER) {
            Ok(poll) => self.listener_poll = Some(poll),
            Err(error) => {
                self.say_once(format!(
                    "no door can connect: the daemon's socket cannot be watched: {error}; the \
                     daemon keeps retrying"
                ));
                self.accept_at = now + ACCEPT_AGAIN;
            }
        }
    }

    /// A call failed with `errno`: if for lack of descriptors, the core closes unused files.
    pub(super) fn crowded_if(&mut self, errno: Errno) {
        if self.crowd.take_turn(errno, clock::now()) {
            self.feed(Event::Crowded);
        }
    }

    /// Close unused files until all open files together take at most half of the descriptors.
    pub(super) fn close_unused(&mut self) {
        let most = descriptor_count_max() / 2;
        while self.files.descriptors() > most {
            let before = self.files.descriptors();
            // A lower bound: most files take fewer. The loop goes on.
            let count = (before - most).div_ceil(WRITTEN_FILE_DESCRIPTORS);
            self.feed(Event::Overfull {
                count: u32::try_from(count).unwrap_or(u32::MAX),
            });
            if self.files.descriptors() >= before {
                return;
            }
        }
    }

    /// True: as far as can be told, a client's descriptor is of a file that we have open already.
    /// Never waits for a file system.
    fn has_open(&self, session: SessionId, fd: &OwnedFd) -> bool {
        let door = self.sessions.doors.get(&session);
        let (Some(door), Ok(info)) = (door, FdInfo::of(fd)) else {
            return false;
        };
        // A door may have the share's file system on a mount of its own, so the mount is not
        // compared. The worker that opens the file finds one of another file system.
        let device = door.share.share.st_dev;
        let key = info.inode.map(|inode| FileKey { device, inode });
        key.is_some_and(|key| self.files.id_of(key).is_some())
    }

    pub(super) fn newcomer(&mut self, newcomer: Newcomer) {
        let peer = newcomer.peer();
        if peer.uid != 0 {
            let reason = format!(
                "user {} may not open a data session; expected root (smbd before it changes user)",
                peer.uid
            );
            self.refuse(newcomer, Errno(1), &reason);
            return;
        }
        if self.sessions.guests.len() >= NEWCOMER_COUNT_MAX
            || self.sessions.doors.len() >= self.limits.session_count_max as usize
        {
            let reason = format!(
                "{} sessions are open already; expected at most {}",
                self.sessions.doors.len(),
                self.limits.session_count_max
            );
            self.refuse(newcomer, AGAIN, &reason);
            return;
        }
        let number = self.sessions.unused_guest();
        let fd = newcomer.fd().clone();
        match self.ring.poll_add(fd, tag::GUEST | u64::from(number)) {
            Ok(poll) => {
                let guest = Guest {
                    newcomer,
                    poll,
                    leave_at: clock::now() + GUEST_PATIENCE,
                };
                self.sessions.guests.insert(number, guest);
            }
            Err(error) => {
                self.refuse(newcomer, AGAIN, &format!("no room: {error}"));
            }
        }
    }

    pub(super) fn refuse(&mut self, mut newcomer: Newcomer, errno: Errno, reason: &str) {
        self.counts.refused += 1;
        // If a socket is closed with unread data, its peer gets ECONNRESET before our sentence.
        let _ = newcomer.receive();
        tracing::warn!(
            "refused a session for pid {}: {reason}",
            newcomer.peer().pid
        );
        newcomer.refuse(errno, reason);
    }

    pub(super) fn guest_speaks(&mut self, number: u32) {
        let Some(guest) = self.sessions.guests.get_mut(&number) else {
            return;
        };
        let said = guest.newcomer.receive();
        if matches!(said, Ok(None)) {
            return;
        }
        let Some(guest) = self.sessions.guests.remove(&number) else {
            return;
        };
        self.ring.poll_remove(guest.poll);
        match said {
            Ok(Some(connect)) => self.welcome(guest.newcomer, connect),
            Ok(None) => {}
            Err(PeerError::Closed) => {}
            Err(error) => {
                let reason = error.to_string();
                // EPROTO.
                self.refuse(guest.newcomer, Errno(71), &reason);
            }
        }
    }

    pub(super) fn welcome(&mut self, newcomer: Newcomer, connect: Connect) {
        let share = self.shares.iter().find(|served| {
            served
                .share
                .config
                .name
                .eq_ignore_ascii_case(&connect.share)
        });
        let Some(share) = share.cloned() else {
            if let Some(why) = self.moves.why_absent(&connect.share) {
                let reason = why.to_owned();
                self.refuse(newcomer, Errno(2), &reason);
                return;
            }
            let reason = format!(
                "share {:?} is not in the daemon's configuration; expected one of: {}",
                connect.share,
                self.share_names()
            );
            self.refuse(newcomer, Errno(2), &reason);
            return;
        };
        let pid = newcomer.peer().pid;
        let session = self.sessions.unused();
        let terms = SessionTerms {
            session,
            read_bytes_max: self.limits.read_bytes_max,
            handle_count_max: self.limits.handle_count_max,
            write_bytes_max: self.limits.write_bytes_max,
            sweeps: true,
        };
        let (served, lane) = match self.welcome_with_lane(newcomer, terms) {
            Ok(served) => served,
            Err(error) => {
                self.counts.refused += 1;
                tracing::warn!("a session with pid {pid} could not be set up: {error}");
                return;
            }
        };
        let number = u64::from(session.0);
        let socket = self
            .ring
            .poll_add(served.socket().clone(), tag::SOCKET | number);
        let bell = self
            .ring
            .bell_add(served.doorbell().clone(), tag::BELL | number);
        let (socket, bell) = match (socket, bell) {
            (Ok(socket), Ok(bell)) => (socket, bell),
            (socket, bell) => {
                for poll in [socket, bell].into_iter().flatten() {
                    self.ring.poll_remove(poll);
                }
                if let (Some(lane), Some(lanes)) = (lane, &mut self.lanes) {
                    lanes.done(lane);
                }
                self.say_once(String::from("cannot watch another session; it was closed"));
                return;
            }
        };
        let label = SessionLabel {
            share: share.share.config.name.clone(),
            user: connect.user.clone(),
            client: connect.client.clone(),
        };
        let door = DoorSession {
            session: served,
            share,
            user: connect.user,
            client: connect.client,
            door: connect.door,
            pool: (connect.pool != 0).then_some(PoolNumber(connect.pool)),
            polls: [socket, bell],
            handles: HashMap::new(),
            lane: None,
            to_flush: false,
            to_hear: false,
        };
        tracing::info!(
            "session {}: {} of {:?} from {:?} on share {:?} (pid {pid})",
            session.0,
            door.door_name(),
            label.user,
            label.client,
            label.share
        );
        let pool = door.pool;
        self.sessions.doors.insert(session, door);
        self.feed(Event::SessionOpened { session, label });
        if let Some(pool) = pool {
            self.feed(Event::SessionOfPool { session, pool });
        }
        self.lane_opened(session, lane);
        self.hear(session);
    }

    pub(super) fn share_names(&self) -> String {
        let names: Vec<&str> = self
            .shares
            .iter()
            .map(|served| served.share.config.name.as_str())
            .collect();
        names.join(", ")
    }

    pub(super) fn guests_leave(&mut self, now: Instant) {
        if self.sessions.next_leave() > now {
            return;
        }
        let late: Vec<u32> = self
            .sessions
            .guests
            .iter()
            .filter(|(_, guest)| guest.leave_at <= now)
            .map(|(number, _)| *number)
            .collect();
        for number in late {
            if let Some(guest) = self.sessions.guests.remove(&number) {
                self.ring.poll_remove(guest.poll);
                let reason = format!(
                    "the door sent nothing for {} s; expected CONNECT",
                    GUEST_PATIENCE.ms() / 1000
                );
                self.refuse(guest.newcomer, Errno(110), &reason);
            }
        }
    }

    // ---- Messages of sessions ----

    pub(super) fn hear(&mut self, id: SessionId) {
        for _ in 0..EVENTS_PER_TURN {
            let Some(door) = self.sessions.doors.get_mut(&id) else {
                return;
            };
            match door.session.next_event() {
                Ok(Some(event)) => self.client_event(id, event),
                Ok(None) => return,
                Err(error) => {
                    self.end_session(id, &error);
                    return;
                }
            }
        }
        // No bell rings for the remaining requests.
        if let Some(door) = self.sessions.doors.get_mut(&id)
            && !door.to_hear
        {
            door.to_hear = true;
            self.to_hear.push(id);
        }
    }

    pub(super) fn client_event(&mut self, session: SessionId, event: ClientEvent) {
        match event {
            ClientEvent::Open {
                handle,
                path,
                part,
                file,
                writer,
            } => self.open(session, handle, (path, part), (file, writer)),
            ClientEvent::NoRoom => {
                self.say_once(String::from(TOO_MANY));
                self.counts.plain += 1;
                self.crowded_if(NO_DESCRIPTOR);
            }
            ClientEvent::Found { number, file } => {
                if let Err(errno) = &file {
                    self.crowded_if(*errno);
                }
                self.pool_found(session, number, file);
            }
            ClientEvent::Station {
                handle,
                user,
                client,
            } => self.feed(Event::Stationed {
                session,
                handle,
                station: Station { user, client },
            }),
            ClientEvent::Read {
                request, handle, ..
            } if !self.allows(session, handle).read => self.plain(session, request),
            ClientEvent::Read {
                request,
                handle,
                range,
                sent,
            } => self.feed(Event::Read {
                session,
                handle,
                request,
                range,
                sent,
            }),
            ClientEvent::ReadEnd { request } => self.feed(Event::ReadEnd { session, request }),
            ClientEvent::Close { handle } => {
                if let Some(door) = self.sessions.doors.get_mut(&session) {
                    if let Some(opened) = door.handles.get_mut(&handle)
                        && opened.found != IsFound::Yes
                    {
                        opened.found = IsFound::NotYetAndClosed;
                        return;
                    }
                    door.handles.remove(&handle);
                }
                self.feed(Event::Closed { session, handle });
            }
            ClientEvent::Changed {
                request,
                key,
                range,
                has_bytes,
            } => {
                if let Some(door) = self.sessions.doors.get(&session) {
                    let pid = door.session.peer().pid;
                    self.reports.reported(clock::now(), pid, key);
                }
                self.feed(Event::Changed {
                    session,
                    request,
                    key,
                    range,
                    has_bytes,
                });
            }
            ClientEvent::Gone { request, key } => self.feed(Event::Gone {
                session,
                request,
                key,
            }),
            ClientEvent::WriteBegin {
                request, handle, ..
            } if !self.allows(session, handle).write => self.plain(session, request),
            ClientEvent::WriteBegin {
                request,
                handle,
                range,
                sent,
            } => self.feed(Event::WriteBegin {
                session,
                handle,
                request,
                range,
                sent,
            }),
            ClientEvent::WriteEnd { request } => {
                self.grant_ended(session);
                self.feed(Event::WriteEnd { session, request });
            }
            ClientEvent::WriteAbort { request } => {
                self.grant_ended(session);
                self.feed(Event::WriteAbort { session, request });
            }
            ClientEvent::Sync { request, handle } => self.feed(Event::Sync {
                session,
                handle,
                request,
            }),
            ClientEvent::WasCommitted {
                request,
                lane,
                secret,
                then,
            } => {
                self.end_former(lane, secret);
                let committed = self
                    .lanes
                    .as_ref()
                    .is_some_and(|lanes| lanes.was_committed(lane, secret, then));
                let body = if committed {
                    ReplyBody::Done
                } else {
                    ReplyBody::Plain
                };
                self.answer_at_once(session, request, body);
            }
            ClientEvent::Timed {
                request,
                key,
                changed_ns,
            } => {
                self.timed(key, changed_ns);
                self.answer_at_once(session, request, ReplyBody::Done);
            }
            ClientEvent::Hold { request, key } if self.is_kept(key) => {
                // The client would read bytes that are older than the kept ones, or its write would
                // be replaced by those.
                self.answer_at_once(session, request, ReplyBody::Failed(Errno::IO));
            }
            ClientEvent::Hold { request, key } => self.feed(Event::Hold {
                session,
                request,
                key,
            }),
        }
    }

    /// The access that the descriptor behind a handle allows.
    fn allows(&self, session: SessionId, handle: HandleId) -> Allows {
        self.sessions
            .doors
            .get(&session)
            .and_then(|door| door.handles.get(&handle))
            .map_or(Allows::default(), |opened| opened.allows)
    }

    /// The door does the request on its own descriptor.
    fn plain(&mut self, session: SessionId, request: RequestId) {
        self.answer_at_once(session, request, ReplyBody::Plain);
    }

    fn answer_at_once(&mut self, session: SessionId, request: RequestId, body: ReplyBody<'_>) {
        if let Some(door) = self.sessions.doors.get_mut(&session) {
            if let Err(error) = door.session.reply(request, body) {
                self.to_expel.push((session, error));
            } else {
                door.session.flush();
            }
        }
    }

    pub(super) fn open(
        &mut self,
        session: SessionId,
        handle: HandleId,
        (path, part): (PathBuf, FilePart),
        (fd, writer): (OwnedFd, Writer),
    ) {
        let allows = Allows::of(&fd);
        let through_lanes = self.lanes.is_some() && allows.write;
        // Keep a quarter of the descriptors for new files and for calls that change files. A file
        // that is open already needs none and is served: another client may write to it, and with
        // plain I/O here each of those writes would have to go to the disk first.
        let has_no_room = self.files.descriptors() >= descriptor_count_max() / 4 * 3;
        let is_crowded = has_no_room && !self.has_open(session, &fd);
        let opening = self.sessions.opening();
        let Some(door) = self.sessions.doors.get_mut(&session) else {
            return;
        };
        if !part.is_whole() && door.pool.is_none() {
            let what = "read an OPEN message for a part of a file in a session that is not a pool's; expected whole files";
            let error = PeerError::Broken(String::from(what));
            return self.to_expel.push((session, error));
        }
        let opened = OpenHandle {
            opening,
            found: IsFound::NotYet,
            part,
            allows,
        };
        door.handles.insert(handle, opened);
        let job = Job::Open {
            session,
            handle,
            opening,
            share: door.share.share.clone(),
            config: self.config.clone(),
            path: path.to_string_lossy().into_owned(),
            fd,
            pid: door.session.peer().pid,
            writer: through_lanes.then_some(writer),
        };
        self.feed(Event::Opening {
            session,
            handle,
            path: path.to_string_lossy().into_owned(),
            part,
        });
        let refused = match is_crowded {
            true => Some(TOO_MANY),
            false => self.workers.push(Urgency::Now, job).is_err().then_some(
                "a file is not served: too many are being opened already, perhaps because a share \
                 hangs",
            ),
        };
        if let Some(why) = refused {
            self.say_once(String::from(why));
            self.counts.plain += 1;
            if let Some(door) = self.sessions.doors.get_mut(&session)
                && let Some(opened) = door.handles.get_mut(&handle)
            {
                opened.found = IsFound::Yes;
            }
            self.feed(Event::Opened {
                session,
                handle,
                facts: Err(AGAIN),
            });
        }
    }

    pub(super) fn expel_all(&mut self) {
        while let Some((session, error)) = self.to_expel.pop() {
            self.end_session(session, &error);
        }
    }

    /// The door that asks about a lane has taken us for hung, and left its session: end that one,
    /// since the requests in its ring count no more.
    fn end_former(&mut self, lane: LaneId, secret: u64) {
        let known = self.lanes.as_ref().and_then(|lanes| lanes.file(lane));
        if known.is_none_or(|file| file.head().secret != secret) {
            return;
        }
        let mut doors = self.sessions.doors.iter();
        let former = doors.find_map(|(id, door)| (door.lane == Some(lane)).then_some(*id));
        if let Some(former) = former {
            self.end_session(former, &PeerError::Closed);
        }
    }

    pub(super) fn end_session(&mut self, id: SessionId, error: &PeerError) {
        let Some(door) = self.sessions.doors.remove(&id) else {
            return;
        };
        for poll in door.polls {
            self.ring.poll_remove(poll);
        }
        match error {
            PeerError::Closed => tracing::info!("session {}: ended", id.0),
            error => {
                self.counts.expelled += 1;
                tracing::warn!(
                    "session {} ({} of {:?} from {:?}, pid {}) was closed by the daemon: {error}",
                    id.0,
                    door.door_name(),
                    door.user,
                    door.client,
                    door.session.peer().pid
                );
            }
        }
        if let (Some(lane), Some(lanes)) = (door.lane, &mut self.lanes) {
            lanes.session_left(lane);
        }
        drop(door);
        self.feed(Event::SessionClosed { session: id });
        self.end_wants_of(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_given_up_now_and_then_and_not_for_what_others_have_open() {
        let mut crowd = Crowd::default();
        let start = Instant(1);
        for other in [Errno(23), Errno(103), Errno::IO] {
            assert!(!crowd.take_turn(other, start));
        }
        let due =
            (0..1000).filter(|&ms| crowd.take_turn(NO_DESCRIPTOR, start + Duration::from_ms(ms)));
        assert_eq!(due.count(), 10);
    }
}
