// SPDX-License-Identifier: Apache-2.0
//! Reads: pieces are asked for, and whoever has the last one sees to the answer.
//!
//! A reader without a contract may wait for seconds, with all that the kernel reads ahead for him. So no thread that takes requests waits for the
//! daemon: it asks for the pieces of a read and goes on to the next request. A few threads answer, and others do what the daemon did not.

use crate::answer::Answer;
use crate::door::Door;
use crate::engine::{Served, Waiter};
use crate::files::{OpenFile, SharedState, State};
use crate::nodes::{Node, locked};
use rushes_pool::{Access, ByteOffset, Object};
use rustix::buffer::spare_capacity;
use rustix::io::pread;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};

/// Threads that hand on what the daemon has brought. Each copies one answer at a time to the kernel.
const ANSWERING_COUNT: usize = 4;
/// Threads that read objects themselves where the daemon did not.
const READING_COUNT: usize = 32;

/// Who gets a read's bytes; called once, by any thread.
pub(crate) type Reply = Box<dyn FnOnce(Answer<Vec<u8>>) + Send>;

/// Who finishes reads.
pub(crate) struct Finishers {
    answering: Sender<Gathered>,
    reading: Sender<Gathered>,
}

/// A part of a read, in one object.
struct Piece {
    object: Object,
    fd: Arc<OwnedFd>,
    start: u64,
    length: usize,
}

/// What is to be read.
struct Pieces {
    pieces: Vec<Piece>,
    /// Of all there is to answer; what no piece has is zero. Units: bytes.
    length: usize,
}

/// A read whose pieces are on their way.
struct Gathering {
    left: usize,
    served: Vec<Served>,
    rest: Option<Rest>,
}

/// What it takes to answer it.
struct Rest {
    door: Arc<Door>,
    /// Nobody changes the file before it is answered.
    state: SharedState,
    pieces: Pieces,
    reply: Reply,
}

/// A read whose pieces are there, or are to be read by who finishes it.
struct Gathered {
    rest: Rest,
    served: Vec<Served>,
}

impl Gathered {
    fn answer(self) {
        let Rest {
            door,
            state,
            pieces,
            reply,
        } = self.rest;
        let bytes = door.assembled(&pieces, self.served);
        drop(state);
        reply(bytes);
    }
}

impl Finishers {
    pub(crate) fn start() -> io::Result<Finishers> {
        Ok(Finishers {
            answering: finishing("answers", ANSWERING_COUNT)?,
            reading: finishing("reads", READING_COUNT)?,
        })
    }

    fn finish(&self, gathered: Gathered) {
        let is_whole = |served: &Served| matches!(served, Served::Bytes(_) | Served::Failed(_));
        let finishers = if gathered.served.iter().all(is_whole) {
            &self.answering
        } else {
            &self.reading
        };
        // Those threads live as long as the door, which who waits has.
        let _ = finishers.send(gathered);
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

/// So many bytes of an object from `start` on, of which the daemon has given this; where the object ends before the file does is a hole.
fn read_piece(fd: &OwnedFd, start: u64, length: usize, served: Served) -> Answer<Vec<u8>> {
    let mut bytes = match served {
        Served::Bytes(bytes) => bytes,
        Served::Plain => Vec::with_capacity(length),
        Served::Failed(error) => return Err(error),
    };
    // Also what the daemon's answer lacks: where the object ends is the object's to say.
    bytes.reserve_exact(length - bytes.len().min(length));
    while bytes.len() < length {
        let at = start + bytes.len() as u64;
        if pread(fd, spare_capacity(&mut bytes), at)? == 0 {
            break;
        }
    }
    bytes.resize(length, 0);
    Ok(bytes)
}

impl Door {
    /// Read, and reply from whatever thread has the bytes.
    pub(crate) fn read(self: &Arc<Door>, number: u64, offset: u64, length: usize, reply: Reply) {
        let pieces = self.nodes.get(number).and_then(|node| {
            let file = self.file(&node)?;
            let state = file.shared_state();
            let pieces = self.pieces(&node, &file, &state, (offset, length))?;
            Ok((state, pieces, file))
        });
        let (state, pieces, file) = match pieces {
            Ok(found) => found,
            Err(error) => return reply(Err(error)),
        };
        let is_asked = |piece: &Piece| self.engine.is_asked(piece.object, &piece.fd);
        // Without a daemon who waits for a disk here keeps nobody from a contract. Of what is also read, or stored by a mapping, without the door it does
        // not know enough.
        if file.may_be_passed() || !pieces.pieces.iter().any(is_asked) {
            let served = pieces.pieces.iter().map(|_| Served::Plain).collect();
            let bytes = self.assembled(&pieces, served);
            drop(state);
            return reply(bytes);
        }
        let count = pieces.pieces.len();
        // All are asked for before the first is there: those of a stripe are on several disks.
        let asked: Vec<_> = pieces
            .pieces
            .iter()
            .map(|piece| {
                (
                    piece.object,
                    Arc::clone(&piece.fd),
                    piece.length,
                    piece.start,
                )
            })
            .collect();
        let gathering = Arc::new(Mutex::new(Gathering {
            left: count,
            served: (0..count).map(|_| Served::Plain).collect(),
            rest: Some(Rest {
                door: Arc::clone(self),
                state,
                pieces,
                reply,
            }),
        }));
        for (index, (object, fd, length, start)) in asked.into_iter().enumerate() {
            let gathering = Arc::clone(&gathering);
            let waiter = Waiter::new(move |served| came(&gathering, index, served));
            // Who waits has heard of it, and reads again.
            let _ = self.engine.read(object, &fd, length, start, waiter);
        }
    }

    /// The same, for who has nothing else to do.
    pub(crate) fn read_and_wait(
        &self,
        node: &Node,
        file: &OpenFile,
        offset: u64,
        length: usize,
    ) -> Answer<Vec<u8>> {
        let state = file.state();
        let pieces = self.pieces(node, file, &state, (offset, length))?;
        let mut waited = Vec::new();
        for piece in &pieces.pieces {
            let (answer, answered) = sync_channel(1);
            let waiter = Waiter::new(move |served| drop(answer.send(served)));
            if !file.may_be_passed() {
                self.engine
                    .read(piece.object, &piece.fd, piece.length, piece.start, waiter)?;
            }
            waited.push(answered);
        }
        let served = waited
            .into_iter()
            .map(|answered| answered.recv().unwrap_or(Served::Plain))
            .collect();
        self.assembled(&pieces, served)
    }

    fn pieces(
        &self,
        node: &Node,
        file: &OpenFile,
        state: &State,
        (offset, length): (u64, usize),
    ) -> Answer<Pieces> {
        let end = offset.saturating_add(length as u64).min(file.size());
        let mut pieces = Vec::new();
        let mut at = offset;
        while at < end {
            let Some(located) = state
                .layout
                .as_ref()
                .and_then(|layout| layout.locate(ByteOffset(at)))
            else {
                break;
            };
            let length = located.length.0.min(end - at);
            let fd = self.object(node, state, located.object, Access::Read);
            let fd = fd.map_err(|error| self.trouble(node, &error))?;
            pieces.push(Piece {
                object: located.object,
                fd,
                start: located.object_offset.0,
                length: length as usize,
            });
            at += length;
        }
        Ok(Pieces {
            pieces,
            length: end.saturating_sub(offset) as usize,
        })
    }

    /// The bytes, with what the daemon did not read read from the objects.
    fn assembled(&self, pieces: &Pieces, served: Vec<Served>) -> Answer<Vec<u8>> {
        let mut bytes = Vec::new();
        for (piece, served) in pieces.pieces.iter().zip(served) {
            let served = match served {
                Served::Plain => {
                    self.engine
                        .read_again(piece.object, &piece.fd, piece.length, piece.start)?
                }
                served => served,
            };
            let read = read_piece(&piece.fd, piece.start, piece.length, served)?;
            // Mostly it is all there is to read.
            if bytes.is_empty() {
                bytes = read;
            } else {
                bytes.extend_from_slice(&read);
            }
        }
        bytes.resize(pieces.length, 0);
        Ok(bytes)
    }
}

/// A piece is there; with the last of them the read goes to who finishes it.
fn came(gathering: &Mutex<Gathering>, index: usize, served: Served) {
    let mut now = locked(gathering);
    now.served[index] = served;
    now.left -= 1;
    if now.left > 0 {
        return;
    }
    let served = std::mem::take(&mut now.served);
    let rest = now.rest.take();
    drop(now);
    if let Some(rest) = rest {
        let door = Arc::clone(&rest.door);
        door.finishers.finish(Gathered { rest, served });
    }
}
