// SPDX-License-Identifier: Apache-2.0
//! A member's thread: it finds the daemon, has a session with it, loses it, and finds the next one.

use super::finder::Finder;
use super::queue::{Names, Queue};
use super::session::{Session, Told};
use super::stations::Stations;
use super::{LOOK_EVERY, STATUS_PATIENCE, share_of};
use crate::lock::locked;
use rushes_control::{Answer, Ask, Status};
use rushes_core::format::door;
use rushes_core::units;
use rushes_shm::Connect;
use rushes_shm::client::Client;
use rushes_shm::facts::FactsView;
use rushes_sys::bell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The door asks a daemon that does not accept a session by then again later.
const PATIENCE: units::Duration = units::Duration::from_ms(500);
/// Between two looks at the heartbeat while a request waits.
const BEAT_EVERY: Duration = Duration::from_secs(5);
/// Between two starts of the command that recovers a dead daemon's bytes.
const RECOVER_EVERY: Duration = Duration::from_secs(10);
/// A daemon that runs and accepts no session may have parts of objects in its cache, and write
/// them: for so long after the mount began no thread changes objects without it (as in smbd, see
/// docs/decisions/0015).
const NOT_LET_IN: Duration = Duration::from_secs(5);
/// Between two tries until then.
const TRY_EVERY: Duration = Duration::from_millis(50);
/// Between two looks for a daemon after the last one has died.
const AGAIN_EVERY: Duration = Duration::from_millis(20);

/// The facts about daemons that all threads of the door share.
pub(super) struct Daemons {
    pub(super) runtime_dir: PathBuf,
    /// A shell command that writes the bytes that a dead daemon left, when no daemon comes back.
    pub(super) recover: String,
    /// So long after the daemon's death the command starts.
    pub(super) recover_after: Duration,
    /// Facts of objects that lack bytes. None: there never was a daemon that took writes.
    pub(super) facts: Mutex<Option<Arc<FactsView>>>,
    pub(super) missed: Mutex<Missed>,
    pub(super) names: Arc<Names>,
    /// Tells the daemon which sessions belong to one door. Drawn when the door starts; never 0.
    pub(super) pool: u64,
    pub(super) finder: Finder,
    pub(super) stations: Arc<Stations>,
}

/// For how long a daemon has been missing although one is needed.
#[derive(Default)]
pub(super) struct Missed {
    since: Option<Instant>,
    recovering: Option<Child>,
    /// Not to start again before.
    next: Option<Instant>,
}

impl Daemons {
    pub(super) fn look_at_facts(&self) {
        if let Some(view) = FactsView::open(&self.runtime_dir) {
            *locked(&self.facts) = Some(Arc::new(view));
        }
    }

    pub(super) fn facts(&self) -> Option<Arc<FactsView>> {
        locked(&self.facts).clone()
    }

    /// There is a daemon: the loss of the former one is over.
    fn forget_loss(&self) {
        let missed = std::mem::take(&mut *locked(&self.missed));
        if let Some(mut child) = missed.recovering {
            // The command ends by itself.
            std::thread::spawn(move || child.wait());
        }
    }

    /// There is no daemon, and one left bytes: starts the command that writes them when that is
    /// due, and again if it failed.
    fn recover_when_due(&self) {
        let mut missed = locked(&self.missed);
        let since = *missed.since.get_or_insert_with(|| {
            tracing::warn!(
                "the daemon is gone, and acknowledged bytes are not written yet: the next daemon writes them, or \"{}\" in {} s; programs that need them \
                 wait until then",
                self.recover,
                self.recover_after.as_secs()
            );
            Instant::now()
        });
        if let Some(child) = &mut missed.recovering {
            match child.try_wait() {
                Ok(None) => return,
                Ok(Some(status)) if status.success() => {}
                ended => {
                    let why = match ended {
                        Ok(Some(status)) => status.to_string(),
                        Ok(None) => String::from("it has not ended"),
                        Err(error) => error.to_string(),
                    };
                    tracing::warn!(
                        "\"{}\" has not written all data that a daemon left ({why}; another may be \
                         running: an smbd starts one, too); if data is left in {} s, it is started \
                         again",
                        self.recover,
                        RECOVER_EVERY.as_secs()
                    );
                }
            }
            missed.recovering = None;
            missed.next = Some(Instant::now() + RECOVER_EVERY);
        }
        let is_early = missed.next.is_some_and(|next| Instant::now() < next);
        if since.elapsed() < self.recover_after || is_early {
            return;
        }
        tracing::warn!("no daemon has started; starting \"{}\"", self.recover);
        match Command::new("/bin/sh")
            .args(["-c", &self.recover])
            .env("RUSHES_RUNTIME_DIR", &self.runtime_dir)
            .spawn()
        {
            Ok(child) => missed.recovering = Some(child),
            Err(error) => {
                tracing::warn!(
                    "/bin/sh cannot be started for \"{}\": {error}; expected that command to write \
                     the data that the daemon left; start the daemon (systemctl start rushes) or \
                     the command by hand; the mount tries again in {} s",
                    self.recover,
                    RECOVER_EVERY.as_secs()
                );
                missed.next = Some(Instant::now() + RECOVER_EVERY);
            }
        }
    }
}

/// A member's thread.
pub(super) struct MemberThread {
    pub(super) queue: Arc<Queue>,
    pub(super) daemons: Arc<Daemons>,
    pub(super) member: PathBuf,
    /// The obstacle is in the log.
    pub(super) logged: bool,
}

/// Why there is no session although a daemon runs.
enum Unserved {
    /// The member lies in none of its shares, or cannot be found.
    NotShared(String),
    /// The member may lie in one.
    NotLetIn(String),
}

impl MemberThread {
    pub(super) fn run(mut self) {
        let begun = Instant::now();
        while !self.queue.is_closing() {
            let found = self.connect();
            let is_waited_for =
                matches!(&found, Err(Unserved::NotLetIn(_))) && begun.elapsed() < NOT_LET_IN;
            if !is_waited_for && !matches!(&found, Ok(Some(_))) {
                self.queue.allow_plain();
            }
            match found {
                Ok(Some(session)) => {
                    self.logged = false;
                    self.serve(session);
                    if !self.queue.is_closing() {
                        tracing::info!(
                            "{}: the daemon is gone and has left no data; the member is used without a daemon",
                            self.member.display()
                        );
                    }
                }
                Ok(None) => {
                    if self.daemons.facts().is_some_and(|facts| !facts.is_empty()) {
                        self.daemons.recover_when_due();
                    }
                }
                Err(_) if is_waited_for => {}
                Err(Unserved::NotShared(sentence) | Unserved::NotLetIn(sentence))
                    if !self.logged =>
                {
                    self.logged = true;
                    tracing::info!(
                        "{}: the member is used without a daemon: {sentence}",
                        self.member.display()
                    );
                }
                Err(_) => {}
            }
            let pause = match is_waited_for {
                true => TRY_EVERY,
                false => LOOK_EVERY,
            };
            self.wait(&[], pause);
            self.refuse_all();
        }
        self.refuse_all();
    }

    /// A session of the member's share. None: there is no daemon.
    fn connect(&self) -> Result<Option<Session>, Unserved> {
        let runtime_dir = &self.daemons.runtime_dir;
        let control = runtime_dir.join("control.sock");
        let Ok(mut asked) = rushes_control::Client::connect(&control, STATUS_PATIENCE) else {
            return Ok(None);
        };
        let status: Status = match asked.ask(&Ask::Status {}) {
            Ok(Answer::Status(status)) => *status,
            Ok(_) | Err(_) => {
                let sentence = String::from("it does not answer which shares it has");
                return Err(Unserved::NotLetIn(sentence));
            }
        };
        let member = self
            .member
            .canonicalize()
            .map_err(|error| Unserved::NotShared(error.to_string()))?;
        let Some((share, below)) = share_of(&status, &member) else {
            return Err(Unserved::NotShared(String::from(
                "none of its shares contains this folder; add one to rushes.toml, so that reads \
                 and writes on this member get contracts",
            )));
        };
        let who = Connect {
            door: door::FUSE,
            share: share.name.clone(),
            user: String::from("pool"),
            client: String::from("mount"),
            pool: self.daemons.pool,
        };
        let socket = runtime_dir.join("session.sock");
        let client = Client::connect_within(&socket, &who, PATIENCE)
            .map_err(|error| Unserved::NotLetIn(format!("it refused the connection: {error:?}")))?;
        tracing::info!(
            "{}: the member is used through the daemon, share {:?}{}",
            self.member.display(),
            share.name,
            if client.takes_writes() {
                ""
            } else {
                ", which takes no writes"
            }
        );
        let told = Told {
            below,
            names: Arc::clone(&self.daemons.names),
            stations: Arc::clone(&self.daemons.stations),
        };
        Ok(Some(Session::new(client, who, socket, told)))
    }

    /// Serves until the session or the door ends.
    fn serve(&self, mut session: Session) {
        self.daemons.look_at_facts();
        self.daemons.forget_loss();
        self.set_takes_writes(&session);
        self.queue.begin_to_serve();
        while !self.queue.is_closing() && self.carry_on(&mut session) {
            for job in self.queue.take() {
                session.begin(job, &self.queue);
            }
            session.collect(&self.queue);
            session.find(&self.daemons.finder, &self.queue);
            session.close();
            if !session.linger(|| self.queue.has_jobs()) {
                self.pause(&session);
            }
        }
        self.queue.takes_writes.store(false, Ordering::Release);
        session.collect(&self.queue);
        self.queue.end_serving();
        drop(session);
        self.refuse_all();
    }

    fn set_takes_writes(&self, session: &Session) {
        let takes_writes = session.takes_writes();
        self.queue
            .takes_writes
            .store(takes_writes, Ordering::Release);
    }

    /// Carries on the session, with this daemon or the next one. False: it has ended, and the
    /// objects have all that the last daemon acknowledged.
    fn carry_on(&self, session: &mut Session) -> bool {
        let has_daemon = session.check_daemon();
        let is_lost = !has_daemon && session.is_lost();
        self.queue.is_lost.store(is_lost, Ordering::Release);
        if has_daemon {
            return true;
        }
        if !is_lost {
            return false;
        }
        if !session.begin_look(AGAIN_EVERY) {
            return true;
        }
        // A daemon that begins to serve must not find an object half changed.
        if !self.queue.is_untouched() {
            session.be_reluctant();
        } else if session.reconnect().is_ok() {
            tracing::info!("{}: a daemon has started", self.member.display());
            self.daemons.look_at_facts();
            self.daemons.forget_loss();
            self.set_takes_writes(session);
            return true;
        }
        if session.is_recovered() {
            session.give_up();
            return false;
        }
        self.daemons.recover_when_due();
        true
    }

    fn pause(&self, session: &Session) {
        if session.is_lost() {
            self.wait(&[], AGAIN_EVERY);
        } else {
            self.wait(&session.event_fds(), BEAT_EVERY);
        }
    }

    /// Waits until a bell rings.
    fn wait(&self, others: &[BorrowedFd<'_>], patience: Duration) {
        let all = std::iter::once(self.queue.bell.as_fd()).chain(others.iter().copied());
        let mut fds: Vec<PollFd<'_>> = all
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        // Interrupted or not: the caller looks at everything again.
        let _ = poll(&mut fds, Some(&limit));
        let _ = bell::silence(&self.queue.bell);
    }

    fn refuse_all(&self) {
        // Dropping a job tells its waiting caller.
        drop(self.queue.take());
    }
}
