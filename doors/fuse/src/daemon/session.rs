// SPDX-License-Identifier: Apache-2.0
//! A member's session: objects as the daemon knows them, and what it was asked for.

use super::finder::{Finder, Wanted};
use super::queue::{Changed, Done, Grip, Hold, Job, Names, Queue, Served, Waiter};
use super::stations::Stations;
use rushes_core::units::{self, FilePart};
use rushes_pool::{ObjectId, ObjectName};
use rushes_shm::Connect;
use rushes_shm::client::{
    Client, ConnectError, FileHandle, HUNG_PATIENCE, OwnedClient, OwnedDone, ReadError, WantedFile,
};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// A daemon that lets us in again answers by then, or is asked again.
const AGAIN_PATIENCE: units::Duration = units::Duration::from_ms(50);

/// Reads of one object that the daemon is asked for at a time. The kernel reads ahead eight
/// requests for a reader, and the rings are everybody's: those of readers that wait would leave no
/// room for others.
const READS_MAX: usize = 2;

/// Files that the daemon wants which are taken before others have their turn.
const WANTED_AT_ONCE: usize = 64;

/// One read, not asked for yet.
struct Read {
    fd: Arc<OwnedFd>,
    length: usize,
    offset: u64,
    waiter: Waiter,
}

/// Reads of one object.
#[derive(Default)]
struct Reads {
    asked_count: usize,
    behind: VecDeque<Read>,
}

/// An object as the daemon knows it.
struct Named {
    handle: FileHandle,
    /// Open as long as the daemon knows it: it may have to be named to the next one.
    fd: Arc<OwnedFd>,
    inode: Inode,
}

/// Device and number.
type Inode = (u64, u64);

/// The caller that waits for an answer.
enum Asked {
    Read(Waiter),
    Write(SyncSender<Done>),
    Sync(SyncSender<Done>),
    Hold(SyncSender<Hold>, Arc<OwnedFd>),
}

/// The sources of all that the daemon is told of objects.
pub(super) struct Told {
    /// Where the member lies below the share.
    pub(super) below: PathBuf,
    pub(super) names: Arc<Names>,
    pub(super) stations: Arc<Stations>,
}

pub(super) struct Session {
    client: OwnedClient,
    who: Connect,
    socket: PathBuf,
    told: Told,
    /// Whether a write needs it: a descriptor for reading is granted nothing.
    named: HashMap<(ObjectId, bool), Named>,
    waiting: HashMap<usize, (ObjectId, Asked)>,
    reads: HashMap<ObjectId, Reads>,
    /// Closed by the door while something of theirs was under way.
    closing: Vec<ObjectId>,
    beat: (u32, Instant),
    /// For the next daemon.
    looked: Option<Instant>,
    is_reluctant: bool,
}

impl Session {
    pub(super) fn new(client: Client, who: Connect, socket: PathBuf, told: Told) -> Session {
        let beat = (client.heartbeat(), Instant::now());
        Session {
            client: OwnedClient::new(client),
            who,
            socket,
            told,
            named: HashMap::new(),
            waiting: HashMap::new(),
            reads: HashMap::new(),
            closing: Vec::new(),
            beat,
            looked: None,
            is_reluctant: false,
        }
    }

    pub(super) fn takes_writes(&self) -> bool {
        self.client.client().takes_writes()
    }

    /// Before its thread sleeps: look for answers a moment longer, as long as that pays. True: one
    /// came, or `else_` is.
    pub(super) fn linger(&mut self, else_: impl FnMut() -> bool) -> bool {
        self.client.linger(else_)
    }

    pub(super) fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.client.event_fds()
    }

    /// There is no daemon, and the last one may have acknowledged what objects have not.
    pub(super) fn is_lost(&self) -> bool {
        self.client.client().is_lost()
    }

    /// Nothing is left to be waited for: all that a daemon acknowledged is in its objects.
    pub(super) fn is_recovered(&self) -> bool {
        self.client.client().is_recovered()
    }

    /// The daemon is there, and its heart beats if somebody waits for it.
    pub(super) fn has_daemon(&mut self) -> bool {
        let beat = self.client.client().heartbeat();
        if beat != self.beat.0 || !self.client.is_busy() {
            self.beat = (beat, Instant::now());
        }
        if self.client.client().alive()
            && self.beat.1.elapsed() >= Duration::from_nanos(HUNG_PATIENCE.0)
        {
            self.client.lose();
        }
        self.client.client().alive()
    }

    /// Whether it is so long ago that a daemon was looked for.
    pub(super) fn may_look_again(&mut self, pause: Duration) -> bool {
        let may = self.looked.is_none_or(|looked| looked.elapsed() >= pause);
        if may {
            self.looked = Some(Instant::now());
        }
        may
    }

    /// Go on with another daemon.
    pub(super) fn reconnect(&mut self) -> Result<(), ConnectError> {
        self.is_reluctant = false;
        let done = self
            .client
            .reconnect(&self.socket, &self.who, AGAIN_PATIENCE);
        self.beat = (self.client.client().heartbeat(), Instant::now());
        if done.is_ok() {
            // Those that it could not be told of get another name when they are used.
            let client = self.client.client();
            self.named.retain(|_, named| client.is_open(named.handle));
            // And it has not been told yet whose those are.
            let objects: Vec<ObjectId> = self.named.keys().map(|(object, _)| *object).collect();
            for object in objects {
                self.stationed(object);
            }
        }
        done
    }

    /// Another daemon is to be looked for, and somebody changes objects: no further ones begin to
    /// before that is done.
    pub(super) fn be_reluctant(&mut self) {
        self.is_reluctant = true;
    }

    /// No daemon is waited for any more.
    pub(super) fn give_up(&mut self) {
        self.client.give_up();
    }

    fn has_fact(&self, (device, inode): Inode) -> bool {
        self.client.client().fact(device, inode).is_some()
    }

    fn known(&self, object: ObjectId, writes: bool) -> Option<&Named> {
        // One for writing reads as well, and knows of what was written.
        let reads = || self.named.get(&(object, false)).filter(|_| !writes);
        self.named.get(&(object, true)).or_else(reads)
    }

    fn name(&mut self, object: ObjectId, fd: &Arc<OwnedFd>, writes: bool) -> Option<FileHandle> {
        if let Some(named) = self.known(object, writes) {
            return Some(named.handle);
        }
        let name = self.told.names.of(object);
        self.name_anew(object, fd, writes, name)
    }

    /// A program begins to read it: the daemon is told now, and looks into its header. A name that
    /// it got when the file was still to be written says nothing of that, though bytes may be asked
    /// for by that name.
    fn is_read(&mut self, object: ObjectId, fd: &Arc<OwnedFd>, name: Option<(PathBuf, FilePart)>) {
        if !self.named.contains_key(&(object, false)) {
            self.name_anew(object, fd, false, name);
        }
    }

    fn name_anew(
        &mut self,
        object: ObjectId,
        fd: &Arc<OwnedFd>,
        writes: bool,
        name: Option<(PathBuf, FilePart)>,
    ) -> Option<FileHandle> {
        let inode = inode_of(fd)?;
        let (path, part) = name.unwrap_or_else(|| {
            let path = self.told.below.join(ObjectName::of(object).as_str());
            (path, FilePart::WHOLE)
        });
        let path = path.as_os_str().as_encoded_bytes();
        let handle = self.client.open_part(fd, path, part)?;
        let named = Named {
            handle,
            fd: Arc::clone(fd),
            inode,
        };
        self.named.insert((object, writes), named);
        if writes
            && let Some(read) = self.named.get_mut(&(object, false))
            && self.client.renew(read.handle, fd)
        {
            // Each would be one more than is counted of the object.
            read.fd = Arc::clone(fd);
        }
        self.stationed(object);
        Some(handle)
    }

    /// The daemon is told whose it is, if that is known.
    fn stationed(&mut self, object: ObjectId) {
        let Some(station) = self.told.stations.of(object) else {
            return;
        };
        for writes in [false, true] {
            if let Some(named) = self.named.get(&(object, writes)) {
                self.client
                    .station(named.handle, &station.user, &station.client);
            }
        }
    }

    /// Device and inode of an object.
    fn inode(&self, object: ObjectId, fd: &OwnedFd) -> Option<Inode> {
        match self.known(object, false) {
            Some(named) => Some(named.inode),
            None => inode_of(fd),
        }
    }

    /// Begin it.
    pub(super) fn begin(&mut self, job: Job, queue: &Arc<Queue>) {
        match job {
            Job::Read {
                object,
                fd,
                length,
                offset,
                waiter,
            } => {
                let read = Read {
                    fd,
                    length,
                    offset,
                    waiter,
                };
                self.reads.entry(object).or_default().behind.push_back(read);
                self.send_reads(object);
            }
            Job::Write {
                object,
                fd,
                bytes,
                offset,
                answer,
            } => {
                let sent = self
                    .name(object, &fd, true)
                    .and_then(|handle| self.client.write_send(handle, bytes, offset));
                match sent {
                    Some(number) => self.wait(number, object, Asked::Write(answer)),
                    // A caller that does it on the object asks for a hold before.
                    None => answered(&answer, Done::Plain),
                }
            }
            Job::Sync { object, fd, answer } => {
                let handle = self.name(object, &fd, false);
                if let Some(number) = handle.and_then(|handle| self.client.sync_send(handle)) {
                    self.wait(number, object, Asked::Sync(answer));
                }
            }
            Job::Hold { object, fd, answer } => self.hold(object, fd, answer, queue),
            Job::Changed {
                object,
                fd,
                what,
                answer,
            } => {
                if let Some((device, inode)) = self.inode(object, &fd) {
                    match what {
                        Changed::Bytes { offset, length } => {
                            self.client.changed(device, inode, offset, length);
                        }
                        Changed::From { offset } => {
                            self.client.changed(device, inode, offset, u64::MAX);
                        }
                        Changed::Size => self.client.resized(device, inode, 0),
                    }
                }
                answered(&answer, ());
            }
            Job::Gone { object, fd } => {
                if let Some((device, inode)) = self.inode(object, &fd) {
                    self.client.gone(device, inode);
                }
            }
            Job::Opened { object, fd, name } => self.is_read(object, &fd, name),
            Job::Closed(object) => self.closing.push(object),
            Job::Stationed(object) => self.stationed(object),
            Job::Found { number, file } => {
                let file = file.as_ref().map(AsFd::as_fd);
                self.client
                    .found(number, file.map_err(|errno| errno.raw_os_error() as u32));
            }
        }
    }

    /// As many as may be asked for, in the order in which they came.
    fn send_reads(&mut self, object: ObjectId) {
        while let Some(reads) = self.reads.get_mut(&object)
            && reads.asked_count < READS_MAX
        {
            let Some(read) = reads.behind.pop_front() else {
                if reads.asked_count == 0 {
                    self.reads.remove(&object);
                }
                return;
            };
            let handle = self.name(object, &read.fd, false);
            let sent =
                handle.and_then(|handle| self.client.read_send(handle, read.length, read.offset));
            // The caller of one that is dropped asks again if the object lacks bytes.
            if let Some(number) = sent {
                self.wait(number, object, Asked::Read(read.waiter));
                if let Some(reads) = self.reads.get_mut(&object) {
                    reads.asked_count += 1;
                }
            }
        }
    }

    fn wait(&mut self, number: usize, object: ObjectId, asked: Asked) {
        self.waiting.insert(number, (object, asked));
    }

    fn hold(
        &mut self,
        object: ObjectId,
        fd: Arc<OwnedFd>,
        answer: SyncSender<Hold>,
        queue: &Arc<Queue>,
    ) {
        let Some(inode) = self.inode(object, &fd) else {
            return answered(&answer, Hold::Failed(Errno::BADF));
        };
        if self.is_lost() {
            // Else the caller asks again: the next daemon is not to have to answer each of its
            // tries.
            if !self.has_fact(inode) && !self.is_reluctant {
                answered(&answer, Hold::Alone(queue.give_plain()));
            }
            return;
        }
        let handle = self.name(object, &fd, false);
        if let Some(number) = handle.and_then(|handle| self.client.hold_send(handle)) {
            self.wait(number, object, Asked::Hold(answer, fd));
            return;
        }
        // A daemon that is too busy to take a name takes this all the same, and has little of what
        // it has no name of.
        match self.client.hold(inode.0, inode.1) {
            Ok(()) => answered(&answer, Hold::Held(Grip::new(queue, object, fd))),
            Err(ReadError::Errno(errno)) => {
                answered(
                    &answer,
                    Hold::Failed(Errno::from_raw_os_error(errno as i32)),
                );
            }
            Err(ReadError::Plain) => {}
        }
    }

    /// Requests of a file that are under way would be lost with its name.
    pub(super) fn close(&mut self) {
        for object in std::mem::take(&mut self.closing) {
            let waits = |(busy, _): &(ObjectId, Asked)| *busy == object;
            if self.reads.contains_key(&object) || self.waiting.values().any(waits) {
                self.closing.push(object);
                continue;
            }
            for writes in [false, true] {
                if let Some(named) = self.named.remove(&(object, writes)) {
                    self.client.close(named.handle);
                    drop(named.fd);
                }
            }
        }
    }

    /// Have the files looked for that the daemon wants.
    pub(super) fn find(&mut self, finder: &Finder, queue: &Arc<Queue>) {
        for _ in 0..WANTED_AT_ONCE {
            let Some(WantedFile { number, path }) = self.client.take_wanted() else {
                return;
            };
            finder.find(Wanted {
                number,
                path,
                asked: Arc::clone(queue),
            });
        }
    }

    pub(super) fn collect(&mut self, queue: &Arc<Queue>) {
        while let Some(OwnedDone { number, result }) = self.client.poll() {
            let Some((object, asked)) = self.waiting.remove(&number) else {
                continue;
            };
            match asked {
                Asked::Read(waiter) => {
                    if let Some(reads) = self.reads.get_mut(&object) {
                        reads.asked_count -= 1;
                    }
                    let served = self.read(object, result);
                    self.send_reads(object);
                    waiter.tell(served);
                }
                Asked::Write(answer) => answered(&answer, written(result)),
                Asked::Sync(answer) => answered(&answer, synced(result)),
                Asked::Hold(answer, fd) => match result {
                    Ok(_) => answered(&answer, Hold::Held(Grip::new(queue, object, fd))),
                    Err(ReadError::Errno(errno)) => {
                        answered(
                            &answer,
                            Hold::Failed(Errno::from_raw_os_error(errno as i32)),
                        );
                    }
                    // The caller asks again: the daemon is another, or there is none.
                    Err(ReadError::Plain) => {}
                },
            }
        }
    }

    fn read(&self, object: ObjectId, result: Result<Vec<u8>, ReadError>) -> Served {
        let errno = match result {
            Ok(bytes) => return Served::Bytes(bytes),
            Err(ReadError::Plain) => return Served::Plain,
            Err(ReadError::Errno(errno)) => errno,
        };
        let named = self.known(object, false);
        if named.is_some_and(|named| self.has_fact(named.inode)) {
            return Served::Failed(Errno::from_raw_os_error(errno as i32));
        }
        let name = ObjectName::of(object);
        tracing::debug!(
            "{}: the daemon answered a read with error {errno}",
            name.as_str()
        );
        Served::Plain
    }
}

fn written(result: Result<Vec<u8>, ReadError>) -> Done {
    let errno = match result {
        Ok(_) => return Done::Whole,
        Err(ReadError::Plain) => return Done::Plain,
        Err(ReadError::Errno(errno)) => Errno::from_raw_os_error(errno as i32),
    };
    match errno {
        // A disk's errors for the bytes; the rest is between us and the daemon.
        Errno::NOSPC
        | Errno::DQUOT
        | Errno::FBIG
        | Errno::ROFS
        | Errno::IO
        | Errno::NODATA
        | Errno::REMOTEIO
        | Errno::ILSEQ
        | Errno::TIMEDOUT => Done::Failed(errno),
        _ => Done::Plain,
    }
}

fn synced(result: Result<Vec<u8>, ReadError>) -> Done {
    match result {
        Ok(_) => Done::Whole,
        Err(ReadError::Plain) => Done::Plain,
        Err(ReadError::Errno(errno)) => Done::Failed(Errno::from_raw_os_error(errno as i32)),
    }
}

/// The asker may have gone.
fn answered<T>(answer: &SyncSender<T>, what: T) {
    let _ = answer.send(what);
}

fn inode_of(fd: &OwnedFd) -> Option<Inode> {
    let found = rustix::fs::fstat(fd).ok()?;
    Some((found.st_dev, found.st_ino))
}
