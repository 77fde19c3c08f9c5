// SPDX-License-Identifier: Apache-2.0
//! Reading by way of the daemon: its cache, its reading ahead, its contracts.
//!
//! A member whose folder lies in a share of the daemon has a thread with a session of that share; requests of all threads of the door go
//! through it, so that the daemon sees each file's reads in one stream. Without a daemon, or a share, the door reads the objects itself.
//! Writes go to the objects, and the daemon is told of each before it is answered. Decision: docs/decisions/0025.

use rushes_control::{Answer, Ask, ShareStatus, Status};
use rushes_core::format::door;
use rushes_pool::{MemberNumber, Object, ObjectId, ObjectName, Pool};
use rushes_shm::Connect;
use rushes_shm::client::{FileHandle, HUNG_PATIENCE, OwnedClient, ReadError};
use rushes_sys::bell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks for a daemon.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A daemon that does not let us in by then is asked again later.
const PATIENCE_MS: u64 = 500;
/// For its answer to what shares it has.
pub(crate) const STATUS_PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at the heartbeat while reads wait.
const BEAT_EVERY: Duration = Duration::from_secs(5);

/// What the daemon made of a read.
pub(crate) enum Served {
    /// Fewer than asked at the object's end only.
    Bytes(Vec<u8>),
    /// Nobody has read, or it was an error: do it on the object, which says what is true.
    Plain,
}

enum Job {
    Read {
        object: ObjectId,
        fd: Arc<OwnedFd>,
        length: usize,
        offset: u64,
        answer: SyncSender<Served>,
    },
    Changed {
        object: ObjectId,
        /// None: it cannot be opened now.
        fd: Option<Arc<OwnedFd>>,
        offset: u64,
        length: u64,
        answer: SyncSender<()>,
    },
    /// It has no name any more.
    Gone {
        object: ObjectId,
        fd: Arc<OwnedFd>,
    },
    Closed(ObjectId),
}

/// A read that is under way.
pub(crate) struct Reading(Option<Receiver<Served>>);

impl Reading {
    /// Wait for it.
    pub(crate) fn served(self) -> Served {
        // An error: the session has ended.
        self.0
            .and_then(|answered| answered.recv().ok())
            .unwrap_or(Served::Plain)
    }
}

/// One thread's requests.
struct Queue {
    jobs: Mutex<Vec<Job>>,
    bell: OwnedFd,
    /// There is a session: else nobody needs to ask.
    serves: AtomicBool,
    closing: AtomicBool,
}

impl Queue {
    fn push(&self, job: Job) {
        let mut jobs = crate::nodes::locked(&self.jobs);
        let was_empty = jobs.is_empty();
        jobs.push(job);
        drop(jobs);
        if was_empty {
            // Cannot fail but for a descriptor that is not ours; the thread looks by itself each second.
            let _ = bell::ring(&self.bell);
        }
    }

    fn take(&self) -> Vec<Job> {
        std::mem::take(&mut crate::nodes::locked(&self.jobs))
    }
}

/// The daemon, as a pool's door sees it.
pub(crate) struct Engine {
    members: HashMap<MemberNumber, Arc<Queue>>,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// A thread for each member; none without the daemon's folder.
    pub(crate) fn start(pool: &Pool, runtime_dir: Option<&Path>) -> io::Result<Engine> {
        let mut engine = Engine {
            members: HashMap::new(),
            threads: Vec::new(),
        };
        let Some(runtime_dir) = runtime_dir else {
            return Ok(engine);
        };
        for member in pool.members() {
            let queue = Arc::new(Queue {
                jobs: Mutex::default(),
                bell: bell::new()?,
                serves: AtomicBool::new(false),
                closing: AtomicBool::new(false),
            });
            let lead = Lead {
                queue: Arc::clone(&queue),
                runtime_dir: runtime_dir.to_path_buf(),
                member: member.path().to_path_buf(),
                logged: false,
            };
            let thread = std::thread::Builder::new()
                .name(format!("member-{}", member.number().0))
                .spawn(move || lead.run())?;
            engine.members.insert(member.number(), queue);
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    fn serving(&self, member: MemberNumber) -> Option<&Queue> {
        self.members
            .get(&member)
            .map(AsRef::as_ref)
            .filter(|queue| queue.serves.load(Ordering::Acquire))
    }

    /// Ask for so many bytes from this offset of the object.
    pub(crate) fn read(
        &self,
        object: Object,
        fd: &Arc<OwnedFd>,
        length: usize,
        offset: u64,
    ) -> Reading {
        let Some(queue) = self.serving(object.member) else {
            return Reading(None);
        };
        let (answer, answered) = sync_channel(1);
        queue.push(Job::Read {
            object: object.id,
            fd: Arc::clone(fd),
            length,
            offset,
            answer,
        });
        Reading(Some(answered))
    }

    /// These bytes of the object were changed: whoever reads from now on sees the new ones. `length` u64::MAX: to its end. Without a
    /// descriptor it is the object that is known, or has the name.
    pub(crate) fn changed(
        &self,
        object: Object,
        fd: Option<&Arc<OwnedFd>>,
        offset: u64,
        length: u64,
    ) {
        let Some(queue) = self.serving(object.member) else {
            return;
        };
        let (answer, answered) = sync_channel(1);
        queue.push(Job::Changed {
            object: object.id,
            fd: fd.cloned(),
            offset,
            length,
            answer,
        });
        // An error: the session has ended, and its cache with it.
        let _ = answered.recv();
    }

    /// The object is removed, or is about to be: the daemon keeps nothing of it once it is closed.
    pub(crate) fn gone(&self, object: Object, fd: &Arc<OwnedFd>) {
        if let Some(queue) = self.serving(object.member) {
            let fd = Arc::clone(fd);
            queue.push(Job::Gone {
                object: object.id,
                fd,
            });
        }
    }

    /// The door has closed the object.
    pub(crate) fn closed(&self, object: Object) {
        if let Some(queue) = self.serving(object.member) {
            queue.push(Job::Closed(object.id));
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for queue in self.members.values() {
            queue.closing.store(true, Ordering::Release);
            let _ = bell::ring(&queue.bell);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// An object as the daemon knows it.
struct Named {
    handle: FileHandle,
    device: u64,
    inode: u64,
}

struct Session {
    client: OwnedClient,
    member: PathBuf,
    /// Where it lies below the share.
    below: PathBuf,
    named: HashMap<ObjectId, Named>,
    waiting: HashMap<usize, (ObjectId, SyncSender<Served>)>,
    /// Closed by the door while something of theirs was under way.
    closing: Vec<ObjectId>,
    beat: (u32, Instant),
}

/// A member's thread.
struct Lead {
    queue: Arc<Queue>,
    runtime_dir: PathBuf,
    member: PathBuf,
    /// What hinders is in the log.
    logged: bool,
}

impl Lead {
    fn run(mut self) {
        while !self.queue.closing.load(Ordering::Acquire) {
            match self.connect() {
                Ok(Some(session)) => {
                    self.logged = false;
                    self.serve(session);
                }
                Ok(None) => {}
                Err(sentence) if !self.logged => {
                    self.logged = true;
                    tracing::info!(
                        "{}: read without the daemon: {sentence}",
                        self.member.display()
                    );
                }
                Err(_) => {}
            }
            self.wait(&[], LOOK_EVERY);
            self.refuse_all();
        }
        self.refuse_all();
    }

    /// A session of the share that the member lies in. None: there is no daemon.
    fn connect(&self) -> Result<Option<Session>, String> {
        let control = self.runtime_dir.join("control.sock");
        let Ok(mut asked) = rushes_control::Client::connect(&control, STATUS_PATIENCE) else {
            return Ok(None);
        };
        let status = match asked.ask(&Ask::Status {}) {
            Ok(Answer::Status(status)) => status,
            Ok(_) | Err(_) => return Err(String::from("it does not say what shares it has")),
        };
        let member = self
            .member
            .canonicalize()
            .map_err(|error| error.to_string())?;
        let Some((share, below)) = share_of(&status, &member) else {
            return Err(String::from(
                "none of its shares has this folder; add one to rushes.toml, and the reads of this member get contracts",
            ));
        };
        let who = Connect {
            door: door::FUSE,
            share: share.name.clone(),
            user: String::from("pool"),
            client: String::from("mount"),
        };
        let socket = self.runtime_dir.join("session.sock");
        let patience = rushes_core::units::Duration::from_ms(PATIENCE_MS);
        let client = rushes_shm::client::Client::connect_within(&socket, &who, patience)
            .map_err(|error| format!("it does not let us in: {error:?}"))?;
        tracing::info!(
            "{}: read by way of the daemon, share {:?}",
            self.member.display(),
            share.name
        );
        let beat = (client.heartbeat(), Instant::now());
        Ok(Some(Session {
            client: OwnedClient::new(client),
            member,
            below,
            named: HashMap::new(),
            waiting: HashMap::new(),
            closing: Vec::new(),
            beat,
        }))
    }

    /// Until the session or the door ends.
    fn serve(&self, mut session: Session) {
        self.queue.serves.store(true, Ordering::Release);
        while session.goes_on() && !self.queue.closing.load(Ordering::Acquire) {
            for job in self.queue.take() {
                session.begin(job);
            }
            session.collect();
            session.close();
            self.wait(&session.client.event_fds(), BEAT_EVERY);
        }
        self.queue.serves.store(false, Ordering::Release);
        session.collect();
        drop(session);
        self.refuse_all();
    }

    /// Until somebody rings.
    fn wait(&self, others: &[std::os::fd::BorrowedFd<'_>], patience: Duration) {
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
        // Who waits for the answer of one that is dropped hears so.
        drop(self.queue.take());
    }
}

/// The share that a folder lies in, and where below it.
///
/// Assumes  `folder`: canonical
pub(crate) fn share_of<'a>(
    status: &'a Status,
    folder: &Path,
) -> Option<(&'a ShareStatus, PathBuf)> {
    let below = |share: &ShareStatus| {
        let path = Path::new(&share.path);
        // As it was written into the configuration, links and all.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        folder.strip_prefix(path).map(Path::to_path_buf).ok()
    };
    let shares = status.shares.iter();
    shares
        .filter_map(|share| Some((share, below(share)?)))
        .min_by_key(|(_, below)| below.components().count())
}

impl Session {
    /// The daemon is there, and its heart beats if somebody waits for it.
    fn goes_on(&mut self) -> bool {
        let beat = self.client.heartbeat();
        if beat != self.beat.0 || !self.client.is_busy() {
            self.beat = (beat, Instant::now());
        }
        let patience = Duration::from_nanos(HUNG_PATIENCE.0);
        self.client.alive() && self.beat.1.elapsed() < patience
    }

    fn name(&mut self, object: ObjectId, fd: &OwnedFd) -> Option<&Named> {
        if !self.named.contains_key(&object) {
            let found = rustix::fs::fstat(fd).ok()?;
            let path = self.below.join(ObjectName::of(object).as_str());
            let handle = self.client.open(fd, path.as_os_str().as_encoded_bytes())?;
            self.named.insert(
                object,
                Named {
                    handle,
                    device: found.st_dev,
                    inode: found.st_ino,
                },
            );
        }
        self.named.get(&object)
    }

    /// Device and inode of an object: as the daemon has it, else as it is now. By its name it costs no descriptor.
    fn identity(&self, object: ObjectId, fd: Option<&Arc<OwnedFd>>) -> Option<(u64, u64)> {
        if let Some(named) = self.named.get(&object) {
            return Some((named.device, named.inode));
        }
        let found = match fd {
            Some(fd) => rustix::fs::fstat(fd),
            None => rustix::fs::lstat(self.member.join(ObjectName::of(object).as_str())),
        };
        found.map(|found| (found.st_dev, found.st_ino)).ok()
    }

    fn begin(&mut self, job: Job) {
        match job {
            Job::Read {
                object,
                fd,
                length,
                offset,
                answer,
            } => {
                let handle = self.name(object, &fd).map(|named| named.handle);
                let sent = handle.and_then(|handle| self.client.read_send(handle, length, offset));
                // Who waits for the answer of one that is dropped hears so.
                if let Some(number) = sent {
                    self.waiting.insert(number, (object, answer));
                }
            }
            Job::Changed {
                object,
                fd,
                offset,
                length,
                answer,
            } => {
                if let Some((device, inode)) = self.identity(object, fd.as_ref()) {
                    self.client.changed(device, inode, offset, length);
                }
                let _ = answer.send(());
            }
            Job::Gone { object, fd } => {
                if let Some((device, inode)) = self.identity(object, Some(&fd)) {
                    self.client.gone(device, inode);
                }
            }
            Job::Closed(object) => self.closing.push(object),
        }
    }

    /// What is under way of a file would be lost with its name.
    fn close(&mut self) {
        for object in std::mem::take(&mut self.closing) {
            if self.waiting.values().any(|(busy, _)| *busy == object) {
                self.closing.push(object);
            } else if let Some(named) = self.named.remove(&object) {
                self.client.close(named.handle);
            }
        }
    }

    fn collect(&mut self) {
        while let Some(read) = self.client.poll() {
            let Some((object, answer)) = self.waiting.remove(&read.number) else {
                continue;
            };
            let _ = answer.send(match read.result {
                Ok(bytes) => Served::Bytes(bytes),
                Err(ReadError::Plain) => Served::Plain,
                Err(ReadError::Errno(errno)) => {
                    tracing::debug!(
                        "{}: the daemon read with error {errno}",
                        ObjectName::of(object).as_str()
                    );
                    Served::Plain
                }
            });
        }
    }
}
