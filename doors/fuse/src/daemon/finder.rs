// SPDX-License-Identifier: Apache-2.0
//! Files that the daemon wants before a program has opened them: the next frames of sequences
//! (docs/decisions/0034).
//!
//! The daemon asks by the name in the tree; it gets the object, in the session of the member that
//! has it. No request waits for these threads: one looks into the catalogue, and one for each
//! member opens objects there, so that a member that hangs does not delay finds on others.

use super::queue::{Job, Queue};
use crate::lock::locked;
use rushes_pool::{Access, Layout, MemberNumber, Object, Pool, Shape};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;

/// Files that wait for the catalogue, and for each member's disk; a further file counts as missing.
const WAITING_MAX: usize = 256;

/// The members' threads.
pub(super) type Queues = RwLock<HashMap<MemberNumber, Arc<Queue>>>;

/// A file that the daemon has asked for.
pub(super) struct Wanted {
    /// The number for the answer.
    pub(super) number: u64,
    /// Below the root of the tree.
    pub(super) path: Vec<u8>,
    /// The queue of the session that the daemon asked.
    pub(super) asked: Arc<Queue>,
}

impl Wanted {
    fn refuse(self, errno: Errno) {
        self.asked.push(Job::Found {
            number: self.number,
            file: Err(errno),
        });
    }
}

/// An object to be opened.
struct Opening {
    wanted: Wanted,
    layout: Layout,
    object: Object,
}

/// Takes the files that the daemon asks for in the members' sessions.
pub(super) struct Finder {
    wanted: Mutex<Option<SyncSender<Wanted>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Finder {
    pub(super) fn start(pool: &Arc<Pool>, queues: &Arc<Queues>) -> io::Result<Finder> {
        let (wanted, waiting) = sync_channel(WAITING_MAX);
        let catalogue = Catalogue {
            // A thread that hangs in a member's disk does not keep the pool alive.
            pool: Arc::downgrade(pool),
            queues: Arc::clone(queues),
            members: HashMap::new(),
        };
        let thread = std::thread::Builder::new()
            .name(String::from("frames"))
            .spawn(move || catalogue.run(&waiting))?;
        Ok(Finder {
            wanted: Mutex::new(Some(wanted)),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Starts the search for a file. Never waits.
    pub(super) fn find(&self, wanted: Wanted) {
        let refused = match &*locked(&self.wanted) {
            Some(waiting) => waiting.try_send(wanted),
            None => return,
        };
        if let Err(TrySendError::Full(wanted)) = refused {
            wanted.refuse(Errno::AGAIN);
        }
    }

    /// Ends the searches in the catalogue.
    pub(super) fn end(&self) {
        drop(locked(&self.wanted).take());
        if let Some(thread) = locked(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

/// The thread that looks for names.
struct Catalogue {
    pool: Weak<Pool>,
    queues: Arc<Queues>,
    members: HashMap<MemberNumber, SyncSender<Opening>>,
}

impl Catalogue {
    fn run(mut self, waiting: &Receiver<Wanted>) {
        while let Ok(wanted) = waiting.recv() {
            let Some(pool) = self.pool.upgrade() else {
                return;
            };
            let found = look_for(&pool, &wanted.path);
            drop(pool);
            match found {
                Ok((layout, object)) => self.have_opened(Opening {
                    wanted,
                    layout,
                    object,
                }),
                Err(errno) => wanted.refuse(errno),
            }
        }
    }

    /// Gives the object to its member's thread, which starts when it is first needed.
    fn have_opened(&mut self, opening: Opening) {
        let member = opening.object.member;
        if !self.members.contains_key(&member) {
            let (sender, openings) = sync_channel(WAITING_MAX);
            let (pool, queues) = (Weak::clone(&self.pool), Arc::clone(&self.queues));
            // It ends with this one, unless a disk hangs.
            let thread = std::thread::Builder::new()
                .name(format!("frames-{}", member.0))
                .spawn(move || open_each(&pool, &queues, &openings));
            if thread.is_err() {
                return opening.wanted.refuse(Errno::AGAIN);
            }
            self.members.insert(member, sender);
        }
        let refused = self.members[&member].try_send(opening);
        if let Err(TrySendError::Full(opening) | TrySendError::Disconnected(opening)) = refused {
            opening.wanted.refuse(Errno::AGAIN);
        }
    }
}

/// The file's layout, and the object that has all of it.
///
/// Errors   ENOENT: no file has this name; NODATA: it is not a file of one object, and cannot be
/// fetched ahead
fn look_for(pool: &Pool, path: &[u8]) -> Result<(Layout, Object), Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    let tree = pool.catalogue().tree();
    let stub = openat2(tree, path, flags | OFlags::NOFOLLOW, Mode::empty(), within)?;
    if FileType::from_raw_mode(fstat(&stub)?.st_mode) != FileType::RegularFile {
        return Err(Errno::NODATA);
    }
    let layout = pool.layout(stub.as_fd()).map_err(|error| error.errno())?;
    let layout = layout.ok_or(Errno::NODATA)?;
    let object = only_object(&layout).ok_or(Errno::NODATA)?;
    Ok((layout, object))
}

/// The object that has all bytes of a file. None: it has several, or none yet.
pub(crate) fn only_object(layout: &Layout) -> Option<Object> {
    match layout.segments() {
        [segment] if segment.shape == Shape::Single => segment.objects.first().copied(),
        _ => None,
    }
}

/// A member's thread.
fn open_each(pool: &Weak<Pool>, queues: &Queues, openings: &Receiver<Opening>) {
    while let Ok(opening) = openings.recv() {
        let Opening {
            wanted,
            layout,
            object,
        } = opening;
        let Some(pool) = pool.upgrade() else {
            return;
        };
        let file = pool.open_object(&layout, object, Access::Read);
        drop(pool);
        let fd = match file {
            Ok(fd) => fd,
            Err(error) => {
                wanted.refuse(error.errno());
                continue;
            }
        };
        answer(queues, wanted, object, fd);
    }
}

/// Answers in the session of the object's member: the daemon accepts it only for that share.
fn answer(queues: &Queues, wanted: Wanted, object: Object, fd: OwnedFd) {
    let queue = {
        let members = queues.read().unwrap_or_else(PoisonError::into_inner);
        members.get(&object.member).map(Arc::clone)
    };
    match queue.filter(|queue| queue.serves()) {
        Some(queue) => queue.push(Job::Found {
            number: wanted.number,
            file: Ok(fd),
        }),
        None => wanted.refuse(Errno::NODEV),
    }
}
