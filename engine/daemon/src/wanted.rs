// SPDX-License-Identifier: Apache-2.0
//! The loop's part for pools: frames of a pool's sequences that the core wants before they are
//! read, which only the pool's door can find.
//!
//! The daemon asks the door in one of its sessions; the door may answer in any. The daemon never
//! waits for it: a file that it has not found after a while counts as missing, and a file that it
//! brings is vetted as any file that a door opens (docs/decisions/0034).

use crate::event_loop::{AGAIN, Daemon};
use crate::jobs::Job;
use crate::worker::Urgency;
use rushes_core::server::{Errno, Event};
use rushes_core::units::{Duration, Instant, PoolNumber, SessionId};
use rushes_shm::PeerError;
use rushes_sys::clock;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// So long a door may look for a file; by then its reader has long opened it itself.
const PATIENCE: Duration = Duration::from_s(5);
/// Open questions to one pool's door.
const COUNT_MAX: usize = 512;
/// ETIMEDOUT.
const TOO_LATE: Errno = Errno(110);

/// A file that the daemon has asked a door for.
struct Wanted {
    pool: PoolNumber,
    path: String,
    /// The session of the question.
    asked: SessionId,
    until: Instant,
}

/// All questions that doors have not answered.
#[derive(Default)]
pub(crate) struct Wants {
    /// By number, which is the order of time.
    wants: BTreeMap<u64, Wanted>,
    number_last: u64,
}

impl Wants {
    /// When the next question ends without an answer.
    pub(crate) fn next(&self) -> Instant {
        let first = self.wants.first_key_value();
        first.map_or(Instant::NEVER, |(_, wanted)| wanted.until)
    }

    fn count_of(&self, pool: PoolNumber) -> usize {
        let of_pool = |wanted: &&Wanted| wanted.pool == pool;
        self.wants.values().filter(of_pool).count()
    }

    /// Takes the question with this number, if it is one to this pool's door.
    fn take(&mut self, number: u64, pool: PoolNumber) -> Option<Wanted> {
        self.wants.get(&number).filter(|it| it.pool == pool)?;
        self.wants.remove(&number)
    }
}

impl Daemon {
    /// Ask a pool's door for a file.
    pub(super) fn ask_pool(&mut self, pool: PoolNumber, path: &str) {
        if !self.try_to_ask(pool, path) {
            self.pending.push_back(Event::PoolFileOpened {
                pool,
                path: path.to_string(),
                facts: Err(AGAIN),
            });
        }
    }

    fn try_to_ask(&mut self, pool: PoolNumber, path: &str) -> bool {
        if self.wants.count_of(pool) >= COUNT_MAX {
            return false;
        }
        let mut sessions: Vec<SessionId> = self
            .sessions
            .doors
            .iter()
            .filter(|(_, door)| door.pool == Some(pool))
            .map(|(id, _)| *id)
            .collect();
        if sessions.is_empty() {
            return false;
        }
        sessions.sort_unstable();
        self.wants.number_last += 1;
        let number = self.wants.number_last;
        // The sessions take turns: if the member of one hangs, the others still find files.
        let turn = (number % sessions.len() as u64) as usize;
        sessions.rotate_left(turn);
        let asked = sessions.into_iter().find(|session| {
            let door = self.sessions.doors.get_mut(session);
            door.is_some_and(|door| door.session.want(number, path.as_bytes()))
        });
        let Some(asked) = asked else {
            return false;
        };
        let wanted = Wanted {
            pool,
            path: path.to_string(),
            asked,
            until: clock::now() + PATIENCE,
        };
        self.wants.wants.insert(number, wanted);
        true
    }

    /// A door's answer: the file that it has found, or an error.
    pub(super) fn pool_found(
        &mut self,
        session: SessionId,
        number: u64,
        file: Result<OwnedFd, Errno>,
    ) {
        let Some(door) = self.sessions.doors.get(&session) else {
            return;
        };
        let Some(pool) = door.pool else {
            let what = "read a FOUND in a session that is not a pool's; expected none";
            let error = PeerError::Broken(String::from(what));
            return self.to_expel.push((session, error));
        };
        // An unknown question was answered too late, or twice.
        let Some(Wanted { path, .. }) = self.wants.take(number, pool) else {
            return;
        };
        let refused = match file {
            Ok(fd) => {
                let job = Job::PoolFile {
                    pool,
                    path: path.clone(),
                    share: door.share.share.clone(),
                    config: self.config.clone(),
                    fd,
                    pid: door.session.peer().pid,
                };
                match self.workers.push(Urgency::Ahead, job) {
                    Ok(()) => return,
                    Err(_) => AGAIN,
                }
            }
            Err(errno) => errno,
        };
        self.pool_lacks(pool, path, refused);
    }

    fn pool_lacks(&mut self, pool: PoolNumber, path: String, errno: Errno) {
        self.feed(Event::PoolFileOpened {
            pool,
            path,
            facts: Err(errno),
        });
    }

    /// End the questions that have waited long enough.
    pub(super) fn end_late_wants(&mut self, now: Instant) {
        while self.wants.next() <= now {
            let Some((_, wanted)) = self.wants.wants.pop_first() else {
                return;
            };
            self.pool_lacks(wanted.pool, wanted.path, TOO_LATE);
        }
    }

    /// A session has ended: its questions end without an answer.
    pub(super) fn end_wants_of(&mut self, session: SessionId) {
        let mut left: Vec<u64> = Vec::new();
        for (number, wanted) in &self.wants.wants {
            if wanted.asked == session {
                left.push(*number);
            }
        }
        for number in left {
            if let Some(wanted) = self.wants.wants.remove(&number) {
                self.pool_lacks(wanted.pool, wanted.path, AGAIN);
            }
        }
    }
}
