// SPDX-License-Identifier: Apache-2.0
//! Reads: a thread asks for the parts, and the thread that gets the last one answers.
//!
//! A reader without a contract may wait for seconds, with all that the kernel reads ahead for it.
//! So no thread that takes requests waits for the daemon: it asks for the parts of a read and goes
//! on to the next request. Bytes that the daemon does not bring are read from their object in the
//! line of that member (lines.rs): a disk that is slow, or hangs, delays no request to another one.
//! Without a daemon, a thread itself reads while few threads do.

use crate::bytes::files::{OpenFile, SharedState};
use crate::bytes::lines::Line;
use crate::daemon::{Served, Waiter, only_object};
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::Node;
use rushes_pool::{Access, ByteOffset, Object, PoolError};
use rustix::buffer::spare_capacity;
use rustix::fs::OFlags;
use rustix::io::{Errno, pread};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};

/// Threads that pass on the daemon's answers. Each copies one answer at a time to the kernel.
const ANSWERING_COUNT: usize = 4;

/// The receiver of a read's bytes; called once, by any thread.
pub(crate) type Reply = Box<dyn FnOnce(Answer<Vec<u8>>) + Send>;

/// The threads that finish reads.
pub(crate) struct Finishers {
    answering: Sender<Gathered>,
}

/// A part of a read, in one object.
#[derive(Clone, Copy)]
struct Part {
    object: Object,
    start: u64,
    length: usize,
}

/// A file of which the daemon does not know yet.
pub(crate) struct UntoldOpen {
    object: Object,
    node: Arc<Node>,
    file: Arc<OpenFile>,
    /// It keeps the file open meanwhile. The last field: descriptors go before it.
    state: SharedState,
}

/// A read whose parts have been asked for.
struct Reading {
    door: Arc<Door>,
    node: Arc<Node>,
    file: Arc<OpenFile>,
    parts: Vec<Part>,
    /// Length of the answer; bytes in no part are zero. Units: bytes.
    length: usize,
    gathering: Mutex<Gathering>,
    /// No thread changes the file before the answer. The last field: descriptors go before it.
    state: SharedState,
}

struct Gathering {
    left: usize,
    /// Of the parts that have come.
    bytes: Vec<Answer<Vec<u8>>>,
    reply: Option<Reply>,
}

/// A read whose parts have all come.
struct Gathered {
    reading: Arc<Reading>,
    bytes: Vec<Answer<Vec<u8>>>,
    reply: Reply,
}

impl Gathered {
    fn answer(self) {
        let length = self.reading.length;
        let mut bytes = Vec::new();
        for part in self.bytes {
            match part {
                // Mostly this part is the whole read.
                Ok(part) if bytes.is_empty() => bytes = part,
                Ok(part) => bytes.extend_from_slice(&part),
                Err(error) => return (self.reply)(Err(error)),
            }
        }
        bytes.resize(length, 0);
        (self.reply)(Ok(bytes));
    }
}

impl Finishers {
    pub(crate) fn start() -> io::Result<Finishers> {
        Ok(Finishers {
            answering: finishing("answers", ANSWERING_COUNT)?,
        })
    }
}

/// Threads that end with the door.
fn finishing(name: &str, count: usize) -> io::Result<Sender<Gathered>> {
    let (sender, receiver) = channel();
    let receiver: Arc<Mutex<Receiver<Gathered>>> = Arc::new(Mutex::new(receiver));
    for number in 0..count {
        let receiver = Arc::clone(&receiver);
        std::thread::Builder::new()
            .name(format!("{name}-{number}"))
            .spawn(move || {
                loop {
                    let next = locked(&receiver).recv();
                    let Ok(gathered) = next else {
                        return;
                    };
                    gathered.answer();
                }
            })?;
    }
    Ok(sender)
}

/// The thread that brings a part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// A thread that may answer as well.
    Reader,
    /// A member's thread, which has others to serve.
    MemberThread,
}

/// Reads the rest of a part after these bytes. If the object ends before the file does, the rest
/// is a hole.
fn read_rest(fd: &OwnedFd, part: Part, mut bytes: Vec<u8>) -> Answer<Vec<u8>> {
    // Also if the daemon's answer was short: only the object knows where it ends.
    bytes.reserve_exact(part.length - bytes.len().min(part.length));
    while bytes.len() < part.length {
        let at = part.start + bytes.len() as u64;
        if pread(fd, spare_capacity(&mut bytes), at)? == 0 {
            break;
        }
    }
    bytes.resize(part.length, 0);
    Ok(bytes)
}

impl Reading {
    /// Enters a part. The last one answers the read.
    fn came(self: Arc<Self>, index: usize, bytes: Answer<Vec<u8>>, by: By) {
        let mut now = locked(&self.gathering);
        now.bytes[index] = bytes;
        now.left -= 1;
        if now.left > 0 {
            return;
        }
        let bytes = std::mem::take(&mut now.bytes);
        let reply = now.reply.take();
        drop(now);
        let Some(reply) = reply else {
            return;
        };
        let finishers = Arc::clone(&self.door);
        let gathered = Gathered {
            reading: self,
            bytes,
            reply,
        };
        match by {
            By::Reader => gathered.answer(),
            // Those threads live as long as the door, and this waiting thread keeps the door alive.
            By::MemberThread => drop(finishers.finishers.answering.send(gathered)),
        }
    }

    /// Does work that may wait for the member's disk: at once while few threads wait for it, else
    /// in its line.
    fn on_disk(
        self: Arc<Self>,
        index: usize,
        may_stay: bool,
        act: impl FnOnce(Arc<Self>) + Send + 'static,
    ) {
        let door = Arc::clone(&self.door);
        let member = self.parts[index].object.member;
        let inside = match may_stay {
            true => door.lines.enter(member),
            false => None,
        };
        match inside {
            Some(_inside) => act(self),
            None => door.lines.put(Line::Disk(member), move || act(self)),
        }
    }

    /// Asks for a part.
    ///
    /// `may_stay` whether this thread may wait for a disk, if few do
    fn begin(self: Arc<Self>, index: usize, may_stay: bool) {
        let part = self.parts[index];
        let member = part.object.member;
        if self.door.pool.is_lost(member) {
            let error = self.door.trouble(&self.node, &PoolError::Lost { member });
            return self.came(index, Err(error), By::Reader);
        }
        if let Some(fd) = self.state.known(part.object) {
            return self.begin_with(index, &fd, may_stay);
        }
        self.on_disk(index, may_stay, move |this| {
            let fd = this
                .door
                .object(&this.node, &this.state, part.object, Access::Read);
            match fd.map_err(|error| this.door.trouble(&this.node, &error)) {
                Ok(fd) => this.begin_with(index, &fd, may_stay),
                Err(error) => this.came(index, Err(error), By::Reader),
            }
        });
    }

    fn begin_with(self: Arc<Self>, index: usize, fd: &Arc<OwnedFd>, may_stay: bool) {
        let part = self.parts[index];
        // The daemon does not know enough of a file that programs read, or store to by a mapping,
        // without the door.
        if self.file.may_be_passed() || !self.door.sessions.serves(part.object) {
            return self.brought(index, Arc::clone(fd), Served::Plain, may_stay);
        }
        let door = Arc::clone(&self.door);
        let own = Arc::clone(fd);
        let waiter = Waiter::new(move |served| self.brought(index, own, served, false));
        door.sessions
            .read(part.object, fd, part.length, part.start, waiter);
    }

    /// Takes the daemon's answer for a part. The rest comes from the object, unless a daemon has
    /// bytes that the object lacks. Does not wait, unless `may_stay`.
    fn brought(self: Arc<Self>, index: usize, fd: Arc<OwnedFd>, served: Served, may_stay: bool) {
        let part = self.parts[index];
        let bytes = match served {
            Served::Bytes(bytes) if bytes.len() >= part.length => Ok(bytes),
            Served::Bytes(bytes) => return self.read_rest(index, fd, bytes, may_stay),
            Served::Plain if self.door.sessions.is_whole(&fd) => {
                return self.read_rest(index, fd, Vec::new(), may_stay);
            }
            Served::Plain => {
                let door = Arc::clone(&self.door);
                let until = door.sessions.patience();
                let work = move || {
                    let sessions = &self.door.sessions;
                    let served = sessions
                        .read_when_known((part.object, &fd), part.length, part.start, until)
                        .unwrap_or_else(Served::Failed);
                    match served {
                        Served::Plain => self.read_rest(index, fd, Vec::new(), false),
                        served => self.brought(index, fd, served, false),
                    }
                };
                return door.lines.put(Line::Daemon(part.object.member), work);
            }
            Served::Failed(error) => Err(error),
        };
        // Drop the descriptor before the lock on the file: under that lock, no thread looks whether
        // other programs have the object open.
        drop(fd);
        self.came(index, bytes, By::MemberThread);
    }

    fn read_rest(self: Arc<Self>, index: usize, fd: Arc<OwnedFd>, bytes: Vec<u8>, may_stay: bool) {
        let part = self.parts[index];
        self.on_disk(index, may_stay, move |this| {
            let read = read_rest(&fd, part, bytes);
            drop(fd);
            this.came(index, read, By::Reader);
        });
    }
}

impl Door {
    /// Reads; any thread that has the bytes replies.
    pub(crate) fn read(self: &Arc<Door>, number: u64, offset: u64, length: usize, reply: Reply) {
        let found = self.nodes.get(number).and_then(|node| {
            let file = self.file(&node)?;
            Ok((node, file))
        });
        let (node, file) = match found {
            Ok(found) => found,
            Err(error) => return reply(Err(error)),
        };
        if let Some(state) = file.shared_state_now() {
            return self.read_of((node, file, state), (offset, length), reply, true);
        }
        // A thread that changes the file may itself wait for a disk.
        let door = Arc::clone(self);
        self.lines.put(Line::File(number), move || {
            let state = file.shared_state();
            door.read_of((node, file, state), (offset, length), reply, false);
        });
    }

    fn read_of(
        self: &Arc<Door>,
        (node, file, state): (Arc<Node>, Arc<OpenFile>, SharedState),
        (offset, length): (u64, usize),
        reply: Reply,
        may_stay: bool,
    ) {
        let end = offset.saturating_add(length as u64).min(file.size());
        let mut parts = Vec::new();
        let mut at = offset;
        while at < end {
            let layout = state.layout.as_ref();
            let Some(located) = layout.and_then(|layout| layout.locate(ByteOffset(at))) else {
                break;
            };
            let length = located.length.0.min(end - at);
            parts.push(Part {
                object: located.object,
                start: located.object_offset.0,
                length: length as usize,
            });
            at += length;
        }
        let count = parts.len();
        let reading = Arc::new(Reading {
            door: Arc::clone(self),
            node,
            file,
            parts,
            length: end.saturating_sub(offset) as usize,
            gathering: Mutex::new(Gathering {
                left: count,
                bytes: vec![Ok(Vec::new()); count],
                reply: Some(reply),
            }),
            state,
        });
        if count == 0 {
            return reading.answer_nothing();
        }
        // Ask for all parts before the first has come: those of a stripe are on several disks.
        // This thread stays for the last one at most.
        for index in 0..count - 1 {
            Arc::clone(&reading).begin(index, false);
        }
        reading.begin(count - 1, may_stay);
    }

    /// A file was opened for reading: the daemon learns of it before its first read. The kernel's
    /// cache may answer that read, with the header; then the daemon could not tell the following
    /// reads from reads here and there. A file in several objects has no header in any of them.
    /// Waits for nothing.
    ///
    /// Call it before the kernel is told that the file is open: a program that finds all its reads
    /// in the kernel's cache closes the file a moment later, and here it stays open until the
    /// daemon knows of it ([`Door::tell_of_open`]).
    pub(crate) fn opened_to_read(&self, number: u64, flags: i32) -> Option<UntoldOpen> {
        let flags = OFlags::from_bits_retain(flags as u32);
        if flags & OFlags::ACCMODE == OFlags::WRONLY {
            return None;
        }
        let node = self.nodes.get(number).ok()?;
        let file = locked(&node.file).open_file()?;
        // While another thread changes the file, the daemon learns of it by the first read.
        let state = file.shared_state_now()?;
        let object = state.layout.as_ref().and_then(only_object)?;
        if file.may_be_passed() || !self.sessions.serves(object) {
            return None;
        }
        Some(UntoldOpen {
            object,
            node,
            file,
            state,
        })
    }

    /// Tells the daemon of the file. Waits for nothing.
    pub(crate) fn tell_of_open(self: &Arc<Door>, opened: UntoldOpen) {
        let object = opened.object;
        if let Some(fd) = opened.state.known(object) {
            return self.sessions.tell_of(object, fd);
        }
        let door = Arc::clone(self);
        self.lines.put(Line::Disk(object.member), move || {
            let UntoldOpen {
                node, file, state, ..
            } = opened;
            // If the object cannot be opened, a program that reads it gets the error.
            if let Ok(fd) = door.object(&node, &state, object, Access::Read) {
                door.sessions.tell_of(object, fd);
            }
            drop((state, file));
        });
    }

    /// Reads, for a thread that has nothing else to do.
    pub(crate) fn read_and_wait(
        self: &Arc<Door>,
        node: &Arc<Node>,
        file: &Arc<OpenFile>,
        offset: u64,
        length: usize,
    ) -> Answer<Vec<u8>> {
        let (answer, answered) = sync_channel(1);
        let reply = Box::new(move |bytes| drop(answer.send(bytes)));
        let of = (Arc::clone(node), Arc::clone(file), file.shared_state());
        self.read_of(of, (offset, length), reply, true);
        answered.recv().unwrap_or(Err(Errno::IO))
    }
}

impl Reading {
    /// No object has any byte of the read.
    fn answer_nothing(self: Arc<Self>) {
        let reply = locked(&self.gathering).reply.take();
        if let Some(reply) = reply {
            Gathered {
                reading: self,
                bytes: Vec::new(),
                reply,
            }
            .answer();
        }
    }
}
