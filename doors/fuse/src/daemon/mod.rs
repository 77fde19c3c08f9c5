// SPDX-License-Identifier: Apache-2.0
//! Bytes through the daemon: its cache, its reading ahead, its lanes, its contracts.
//!
//! A member whose folder lies in a share of the daemon has a thread with a session of that share.
//! All threads of the door send requests through it, so that the daemon sees each file's reads in
//! one stream. Without a daemon, or a share, the door itself reads and writes the objects.
//! Decisions: docs/decisions/0025 and 0026.
//!
//! **A thread that changes an object itself** holds the file's lock alone (`OpenFile::change`) and
//! a [`Held`] of the object: the daemon has written all it had of the object, or there is none and
//! none begins to serve meanwhile. Writes through lanes share the lock.

mod finder;
pub(crate) mod loads;
mod member_thread;
mod queue;
mod session;
mod stations;
pub(crate) mod unwritten;

pub(crate) use finder::only_object;
pub(crate) use queue::{Changed, Done, Served, Waiter};

use crate::bytes::descriptors::Opener;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use finder::{Finder, Queues};
use member_thread::{Daemons, MemberThread};
use queue::{Hold, Job, Plain, Queue, TRY_EVERY};
use rushes_control::{ShareStatus, Status};
use rushes_core::units::FilePart;
use rushes_pool::{MemberNumber, Object, Pool};
use rushes_shm::client::lend;
use rushes_shm::facts::FactsView;
use rustix::io::Errno;
use stations::Stations;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks for a daemon.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// For the daemon's answer to the question for its shares.
pub(crate) const STATUS_PATIENCE: Duration = Duration::from_secs(2);
/// A program that has waited so long for bytes that only a daemon has gets an error.
const PATIENCE: Duration = Duration::from_secs(120);
/// The daemon retries the bytes that the kernel could not write once a second; a reader of the
/// object itself waits so long for that.
pub(crate) const LOOSE_PATIENCE: Duration = Duration::from_secs(3);

/// The daemon that a mount uses, and the steps when it dies and none comes back.
#[derive(Clone, Debug)]
pub struct DaemonPlace {
    /// The folder with its sockets.
    pub runtime_dir: PathBuf,
    /// A shell command that writes the bytes that a dead daemon left.
    pub recover: String,
    /// So long after the daemon's death the command starts.
    pub recover_after: Duration,
}

/// The sessions of a pool's mount with the daemon, one for each member.
pub(crate) struct Sessions {
    members: Arc<Queues>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// None: the door uses no daemon.
    daemons: Option<Arc<Daemons>>,
}

impl Sessions {
    /// Starts a thread for each member; none without a place to look for a daemon.
    pub(crate) fn start(pool: &Arc<Pool>, place: Option<&DaemonPlace>) -> io::Result<Sessions> {
        let members: Arc<Queues> = Arc::default();
        let begin = |place: &DaemonPlace| {
            let daemons = Daemons {
                runtime_dir: place.runtime_dir.clone(),
                recover: place.recover.clone(),
                recover_after: place.recover_after,
                facts: Mutex::default(),
                missed: Mutex::default(),
                names: Arc::default(),
                pool: random()?.max(1),
                finder: Finder::start(pool, &members)?,
                stations: Stations::start(&members)?,
            };
            daemons.look_at_facts();
            Ok::<_, io::Error>(Arc::new(daemons))
        };
        let daemons = place.map(begin).transpose()?;
        let sessions = Sessions {
            members,
            threads: Mutex::default(),
            daemons,
        };
        sessions.follow(pool)?;
        Ok(sessions)
    }

    /// The pool has other members now: starts a thread for each new one, ends those of members that
    /// left.
    pub(crate) fn follow(&self, pool: &Pool) -> io::Result<()> {
        let Some(daemons) = &self.daemons else {
            return Ok(());
        };
        let all = pool.members();
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let mut threads = locked(&self.threads);
        members.retain(|number, queue| {
            let stays = all.iter().any(|member| member.number() == *number);
            if !stays {
                queue.close();
            }
            stays
        });
        for member in all.iter() {
            if members.contains_key(&member.number()) {
                continue;
            }
            let queue = Arc::new(Queue::new()?);
            let thread = MemberThread {
                queue: Arc::clone(&queue),
                daemons: Arc::clone(daemons),
                member: member.path().to_path_buf(),
                logged: false,
            };
            let thread = std::thread::Builder::new()
                .name(format!("member-{}", member.number().0))
                .spawn(move || thread.run())?;
            members.insert(member.number(), queue);
            threads.push(thread);
        }
        Ok(())
    }

    /// Whether there is a daemon to ask for its bytes.
    pub(crate) fn serves(&self, object: Object) -> bool {
        self.serving(object.member).is_some()
    }

    fn queue(&self, member: MemberNumber) -> Option<Arc<Queue>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.get(&member).map(Arc::clone)
    }

    fn serving(&self, member: MemberNumber) -> Option<Arc<Queue>> {
        self.queue(member).filter(|queue| queue.serves())
    }

    /// Whether a daemon has a session of ours.
    pub(crate) fn serves_any(&self) -> bool {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.values().any(|queue| queue.serves())
    }

    /// Whether reads of it may bypass the door: there was no daemon for them since the mount began,
    /// and none has bytes of it. After a daemon's death the next one gets its reads.
    pub(crate) fn may_pass(&self, object: Object, fd: &OwnedFd) -> bool {
        let queue = self.queue(object.member);
        queue.is_none_or(|queue| !queue.has_served()) && self.is_whole(fd)
    }

    /// Whether the object lacks bytes that a daemon has, or has left.
    pub(crate) fn has_fact(&self, fd: &OwnedFd) -> bool {
        self.facts_say(fd, is_known)
    }

    /// Whether a read of the object itself finds all acknowledged bytes: it lacks none, and none is
    /// in the kernel's cache alone, which may lose them.
    pub(crate) fn is_whole(&self, fd: &OwnedFd) -> bool {
        // Loose bytes may be dirty again between the two looks.
        !self.facts_say(fd, |facts, device, inode| {
            is_known(facts, device, inode)
                || facts.is_loose(device, inode)
                || is_known(facts, device, inode)
        })
    }

    fn facts_say(&self, fd: &OwnedFd, what: impl Fn(&FactsView, u64, u64) -> bool) -> bool {
        let facts = self.daemons.as_ref().and_then(|daemons| daemons.facts());
        facts.is_some_and(|facts| {
            let found = rustix::fs::fstat(fd);
            found.is_ok_and(|found| what(&facts, found.st_dev, found.st_ino))
        })
    }

    /// Whether some object lacks bytes, perhaps one that cannot be opened.
    pub(crate) fn lacks_any(&self) -> bool {
        let facts = self.daemons.as_ref().and_then(|daemons| daemons.facts());
        facts.is_some_and(|facts| !facts.is_empty())
    }

    /// The member's thread to ask. None: there is none, and the object has all its bytes.
    fn asked(&self, object: Object, fd: &OwnedFd) -> Answer<Option<Arc<Queue>>> {
        let begun = Instant::now();
        loop {
            if let Some(queue) = self.serving(object.member) {
                return Ok(Some(queue));
            }
            if !self.has_fact(fd) {
                return Ok(None);
            }
            if begun.elapsed() > PATIENCE {
                return Err(Errno::IO);
            }
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// Asks for so many bytes from this offset of the object; `waiter` gets the answer, at once if
    /// there is no daemon to ask. Waits for nothing.
    pub(crate) fn read(
        &self,
        object: Object,
        fd: &Arc<OwnedFd>,
        length: usize,
        offset: u64,
        waiter: Waiter,
    ) {
        if let Some(queue) = self.serving(object.member) {
            queue.push(Job::Read {
                object: object.id,
                fd: Arc::clone(fd),
                length,
                offset,
                waiter,
            });
        }
    }

    /// The end of the wait of a thread that begins now to wait for bytes that only a daemon has.
    pub(crate) fn patience(&self) -> Instant {
        Instant::now() + PATIENCE
    }

    /// The same, for a thread whose answer was to read the object itself: waits while the object
    /// lacks bytes that a daemon has. A daemon that knows the file by another name, or not yet,
    /// answers so.
    ///
    /// Returns  Plain: it lacks none any more, and the kernel has none of it that it may lose
    /// Errors   EIO: it lacks some, and no daemon gave them in time; or its disk does not take the
    /// bytes that the kernel could not write
    pub(crate) fn read_when_known(
        &self,
        (object, fd): (Object, &Arc<OwnedFd>),
        length: usize,
        offset: u64,
        until: Instant,
    ) -> Answer<Served> {
        let tight_by = (Instant::now() + LOOSE_PATIENCE).min(until);
        loop {
            let served = self.read_from_daemon((object, fd), length, offset, until)?;
            let is_over = self.is_whole(fd) || Instant::now() > tight_by;
            if !matches!(served, Served::Plain) || is_over {
                return Ok(served);
            }
            // An error belongs to an earlier write, not to this reader: after it the daemon has the
            // bytes, and the read gets them from there.
            if !matches!(self.sync(object, fd)?, Done::Whole) {
                std::thread::sleep(TRY_EVERY);
            }
        }
    }

    /// The same, as long as the object lacks bytes.
    fn read_from_daemon(
        &self,
        (object, fd): (Object, &Arc<OwnedFd>),
        length: usize,
        offset: u64,
        until: Instant,
    ) -> Answer<Served> {
        while self.has_fact(fd) {
            if Instant::now() > until {
                return Err(Errno::IO);
            }
            std::thread::sleep(TRY_EVERY);
            let (answer, answered) = sync_channel(1);
            let waiter = Waiter::new(move |served| drop(answer.send(served)));
            self.read(object, fd, length, offset, waiter);
            match answered.recv() {
                Ok(Served::Plain) | Err(_) => {}
                Ok(served) => return Ok(served),
            }
        }
        Ok(Served::Plain)
    }

    /// Writes to the object, through the session's lane.
    ///
    /// Assumes  the file's lock, shared or alone
    pub(crate) fn write(
        &self,
        object: Object,
        fd: &Arc<OwnedFd>,
        bytes: &[u8],
        offset: u64,
    ) -> Done {
        let queue = self
            .serving(object.member)
            .filter(|queue| queue.takes_writes.load(Ordering::Acquire));
        let Some(queue) = queue else {
            return Done::Plain;
        };
        lend(bytes, |bytes| {
            let answered = queue.ask(|answer| Job::Write {
                object: object.id,
                fd: Arc::clone(fd),
                bytes,
                offset,
                answer,
            });
            answered.recv().unwrap_or(Done::Plain)
        })
    }

    /// All bytes of the object that the daemon acknowledged are on stable storage, or its device
    /// has failed. Plain: the object has them all, sync that.
    ///
    /// Errors   no daemon answered
    pub(crate) fn sync(&self, object: Object, fd: &Arc<OwnedFd>) -> Answer<Done> {
        let begun = Instant::now();
        loop {
            let Some(queue) = self.asked(object, fd)? else {
                return Ok(Done::Plain);
            };
            // Also for an object that lacks nothing: the kernel reports a failed write once to each
            // descriptor. The daemon, which has the bytes, must get that error before a second sync
            // succeeds.
            let answered = queue.ask(|answer| Job::Sync {
                object: object.id,
                fd: Arc::clone(fd),
                answer,
            });
            match answered.recv() {
                Ok(done @ (Done::Whole | Done::Failed(_))) => return Ok(done),
                Ok(Done::Plain) | Err(_) if !self.has_fact(fd) => return Ok(Done::Plain),
                // A daemon that does not know the file yet answers so, too, and may have bytes of
                // it all the same.
                Ok(Done::Plain) | Err(_) => {}
            }
            if begun.elapsed() > PATIENCE {
                return Err(Errno::IO);
            }
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// Takes a hold before objects are changed themselves: see this file's head. They may be of
    /// several members.
    ///
    /// Assumes  the file's lock, alone; no other [`Held`] of this thread
    /// Errors   the daemon cannot write its bytes of one of them; nothing is held
    pub(crate) fn hold(&self, objects: Vec<(Object, Arc<OwnedFd>)>) -> Answer<Held<'_>> {
        let begun = Instant::now();
        loop {
            if let Some(held) = self.try_hold(&objects)? {
                return Ok(held);
            }
            if begun.elapsed() > PATIENCE {
                return Err(Errno::IO);
            }
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// None: a session begins or ends. Nothing is held then; else two threads that wait for each
    /// other's members might wait for ever.
    fn try_hold(&self, objects: &[(Object, Arc<OwnedFd>)]) -> Answer<Option<Held<'_>>> {
        let mut held = Held {
            sessions: self,
            objects: Vec::new(),
            plain: Vec::new(),
            // Until all are held nothing is changed.
            what: Changed::NOTHING,
        };
        let mut asked = Vec::new();
        for (object, fd) in objects {
            let Some(queue) = self.queue(object.member) else {
                continue;
            };
            if !queue.serves() {
                let Some(plain) = queue.begin_plain().filter(|_| !self.has_fact(fd)) else {
                    return Ok(None);
                };
                held.plain.push(plain);
                continue;
            }
            if !queue.takes_writes.load(Ordering::Acquire) && !self.has_fact(fd) {
                held.objects.push((*object, Arc::clone(fd)));
                continue;
            }
            let answered = queue.ask(|answer| Job::Hold {
                object: object.id,
                fd: Arc::clone(fd),
                answer,
            });
            asked.push((*object, Arc::clone(fd), queue, answered));
        }
        for (object, fd, queue, answered) in asked {
            let hold = loop {
                match answered.recv_timeout(TRY_EVERY) {
                    // The holds so far would keep this session from its next daemon.
                    Err(RecvTimeoutError::Timeout) if queue.is_lost() || !queue.serves() => {
                        return Ok(None);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(None),
                    Ok(hold) => break hold,
                }
            };
            match hold {
                Hold::Held(grip) => {
                    held.objects.push((object, fd));
                    held.plain.extend(grip.take());
                }
                Hold::Alone(plain) => held.plain.push(plain),
                Hold::Failed(errno) => return Err(errno),
            }
        }
        held.what = Changed::From { offset: 0 };
        Ok(Some(held))
    }

    fn changed(&self, objects: &[(Object, Arc<OwnedFd>)], what: Changed) {
        let mut told = Vec::new();
        for (object, fd) in objects {
            let Some(queue) = self.serving(object.member) else {
                continue;
            };
            let answered = queue.ask(|answer| Job::Changed {
                object: object.id,
                fd: Arc::clone(fd),
                what,
                answer,
            });
            told.push(answered);
        }
        for answered in told {
            // An error: the session has ended, and its cache with it.
            let _ = answered.recv();
        }
    }

    /// The object is removed, or about to be: the daemon keeps nothing of it once it is closed.
    pub(crate) fn gone(&self, object: Object, fd: &Arc<OwnedFd>) {
        if let Some(queue) = self.serving(object.member) {
            let fd = Arc::clone(fd);
            queue.push(Job::Gone {
                object: object.id,
                fd,
            });
        }
    }

    /// The door has opened the object, of the file of node `number`. `name` returns the path of its
    /// file in the tree, and the object's part of it, for the ledger and for rules. None: it has no
    /// name that the daemon can use.
    pub(crate) fn opened(
        &self,
        number: u64,
        object: Object,
        name: impl FnOnce() -> Option<(PathBuf, FilePart)>,
    ) {
        if let Some(daemons) = &self.daemons {
            daemons.stations.add_object(number, object);
            if let Some(name) = name() {
                daemons.names.set(object.id, name);
            }
        }
    }

    /// A program has the file of this node open from now on, by this file handle.
    pub(crate) fn opened_by(&self, number: u64, handle: u64, opener: Opener) {
        if let Some(daemons) = &self.daemons {
            daemons.stations.opened(number, handle, opener);
        }
    }

    /// That open has ended.
    pub(crate) fn left(&self, number: u64, handle: u64) {
        if let Some(daemons) = &self.daemons {
            daemons.stations.left(number, handle);
        }
    }

    /// A program is about to read the object: tells the daemon of it.
    pub(crate) fn tell_of(&self, object: Object, fd: Arc<OwnedFd>) {
        let Some(daemons) = &self.daemons else {
            return;
        };
        if let Some(queue) = self.serving(object.member) {
            queue.push(Job::Opened {
                object: object.id,
                fd,
                name: daemons.names.of(object.id),
            });
        }
    }

    /// The door has closed the object.
    pub(crate) fn closed(&self, object: Object) {
        if let Some(daemons) = &self.daemons {
            daemons.names.forget(object.id);
            daemons.stations.forget(object);
        }
        if let Some(queue) = self.serving(object.member) {
            queue.push(Job::Closed(object.id));
        }
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        for queue in members.values() {
            queue.close();
        }
        drop(members);
        let threads = self.threads.get_mut();
        for thread in threads.unwrap_or_else(PoisonError::into_inner).drain(..) {
            // The last answer by one of these threads may drop the door.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        if let Some(daemons) = &self.daemons {
            daemons.finder.end();
            daemons.stations.end();
        }
    }
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(bytes.as_mut_slice(), rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

fn is_known(facts: &FactsView, device: u64, inode: u64) -> bool {
    facts.of(device, inode).is_some()
}

/// Objects that the caller may change itself until this is dropped. Then the daemon gets a message,
/// so that a program that reads from then on sees the new bytes.
pub(crate) struct Held<'a> {
    sessions: &'a Sessions,
    objects: Vec<(Object, Arc<OwnedFd>)>,
    plain: Vec<Plain>,
    /// The part of each object that is changed.
    pub(crate) what: Changed,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // First: the message of the change may wait for a session that waits for these to end.
        self.plain.clear();
        self.sessions.changed(&self.objects, self.what);
    }
}

/// The share that a folder lies in, and the folder's path below it.
///
/// Assumes  `folder`: canonical
pub(crate) fn share_of<'a>(
    status: &'a Status,
    folder: &Path,
) -> Option<(&'a ShareStatus, PathBuf)> {
    let below = |share: &ShareStatus| {
        let path = Path::new(&share.path);
        // The path stands in the configuration as written, links and all.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        folder.strip_prefix(path).map(Path::to_path_buf).ok()
    };
    let shares = status.shares.iter();
    shares
        .filter(|share| !share.is_absent)
        .filter_map(|share| Some((share, below(share)?)))
        .min_by_key(|(_, below)| below.components().count())
}
