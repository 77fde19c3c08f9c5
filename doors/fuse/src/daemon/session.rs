// SPDX-License-Identifier: Apache-2.0
//! A member's session: the objects that the daemon knows, and the requests to it.

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

/// A daemon that accepts the session again answers by then; else the door asks it again.
const AGAIN_PATIENCE: units::Duration = units::Duration::from_ms(50);

/// Reads of one object that the daemon has at a time. The kernel reads ahead eight requests for a
/// reader, and all readers share the rings: reads of those that wait would leave no room for
/// others.
const READS_MAX: usize = 2;

/// Files that the daemon wants and that this thread takes before other work has its turn.
const WANTED_AT_ONCE: usize = 64;

/// A read that the daemon does not have yet.
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
    /// Open as long as the daemon knows it: the next daemon may need it.
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

/// The sources of all facts about objects that the daemon gets.
pub(super) struct Told {
    /// The member's path below the share.
    pub(super) below: PathBuf,
    pub(super) names: Arc<Names>,
    pub(super) stations: Arc<Stations>,
}

pub(super) struct Session {
    client: OwnedClient,
    who: Connect,
    socket: PathBuf,
    told: Told,
    /// The flag says whether for a write: the daemon grants nothing on a descriptor for reading.
    named: HashMap<(ObjectId, bool), Named>,
    waiting: HashMap<usize, (ObjectId, Asked)>,
    reads: HashMap<ObjectId, Reads>,
    /// The door closed them while requests on them were under way.
    closing: Vec<ObjectId>,
    beat: (u32, Instant),
    /// The last look for the next daemon.
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

    /// Before its thread sleeps: looks for answers a moment longer, as long as that pays. True: one
    /// came, or `else_` returned true.
    pub(super) fn linger(&mut self, else_: impl FnMut() -> bool) -> bool {
        self.client.linger(else_)
    }

    pub(super) fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.client.event_fds()
    }

    /// There is no daemon, and the last one may have acknowledged bytes that objects lack.
    pub(super) fn is_lost(&self) -> bool {
        self.client.client().is_lost()
    }

    /// Nothing is left to wait for: all that a daemon acknowledged is in its objects.
    pub(super) fn is_recovered(&self) -> bool {
        self.client.client().is_recovered()
    }

    /// Looks whether the daemon runs, and its heart beats if a request waits for it. Gives up a
    /// daemon that hangs.
    pub(super) fn check_daemon(&mut self) -> bool {
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

    /// Begins a look for a daemon, if the last one is so long ago. Returns whether.
    pub(super) fn begin_look(&mut self, pause: Duration) -> bool {
        let may = self.looked.is_none_or(|looked| looked.elapsed() >= pause);
        if may {
            self.looked = Some(Instant::now());
        }
        may
    }

    /// Goes on with another daemon.
    pub(super) fn reconnect(&mut self) -> Result<(), ConnectError> {
        self.is_reluctant = false;
        let done = self
            .client
            .reconnect(&self.socket, &self.who, AGAIN_PATIENCE);
        self.beat = (self.client.client().heartbeat(), Instant::now());
        if done.is_ok() {
            // Objects that it could not be told of get another name when they are used.
            let client = self.client.client();
            self.named.retain(|_, named| client.is_open(named.handle));
            // And it does not know their users and clients yet.
            let objects: Vec<ObjectId> = self.named.keys().map(|(object, _)| *object).collect();
            for object in objects {
                self.stationed(object);
            }
        }
        done
    }

    /// The session needs another daemon, and threads change objects: no further thread begins to
    /// before the session has one.
    pub(super) fn be_reluctant(&mut self) {
        self.is_reluctant = true;
    }

    /// Stops waiting for a daemon.
    pub(super) fn give_up(&mut self) {
        self.client.give_up();
    }

    fn has_fact(&self, (device, inode): Inode) -> bool {
        self.client.client().fact(device, inode).is_some()
    }

    fn known(&self, object: ObjectId, writes: bool) -> Option<&Named> {
        // A handle for writing reads as well, and knows of the written bytes.
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

    /// A program begins to read it: tells the daemon now, which looks into its header. A handle
    /// that it got when the file was still to be written does not tell that, though reads may use
    /// that handle.
    fn name_for_reading(
        &mut self,
        object: ObjectId,
        fd: &Arc<OwnedFd>,
        name: Option<(PathBuf, FilePart)>,
    ) {
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
            // Each would be one more than the door counts for the object.
            read.fd = Arc::clone(fd);
        }
        self.stationed(object);
        Some(handle)
    }

    /// Tells the daemon its user and client, if they are known.
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

    /// Begins a job.
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
                    // A caller that does it on the object takes a hold before.
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
            Job::Opened { object, fd, name } => self.name_for_reading(object, &fd, name),
            Job::Closed(object) => self.closing.push(object),
            Job::Stationed(object) => self.stationed(object),
            Job::Found { number, file } => {
                let file = file.as_ref().map(AsFd::as_fd);
                self.client
                    .found(number, file.map_err(|errno| errno.raw_os_error() as u32));
            }
        }
    }

    /// Sends as many reads as the daemon may have, in the order in which they came.
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
            // A dropped waiter makes its caller ask again if the object lacks bytes.
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
            // Otherwise the caller asks again: the next daemon need not answer each of its tries.
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
        // A daemon that is too busy to accept a handle accepts this all the same, and it has few
        // bytes of a file without a handle.
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

    /// Waits until no requests of a file are under way; they would be lost with its handle.
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

    /// Starts the search for files that the daemon wants.
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
                    // The caller asks again: there is another daemon, or none.
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
        // A disk's errors are for the caller; the others are between the door and the daemon.
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
