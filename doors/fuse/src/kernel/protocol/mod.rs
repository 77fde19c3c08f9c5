// SPDX-License-Identifier: Apache-2.0
//! The protocol: requests of the kernel in, the door's answers out. All code that knows the crate
//! `fuser` is in this folder; this file has the mount's begin and end.
//!
//! Its API breaks between releases. This folder avoids two of its faults (0.18.0): it never asks
//! for SETXATTR_EXT, and [`Mounting`] does the mount itself. It undoes a third: the form of times
//! before 1970.

mod replies;
mod requests;

use crate::door::{Door, raise_read_ahead};
use crate::kernel::crew::Crew;
use crate::kernel::keeper::is_unmounted;
use crate::kernel::kept::{self, Latch};
use crate::kernel::mounting::Mounting;
use crate::kernel::table::Table;
use crate::upkeep::control;
use fuser::{Config, INodeNo, SessionACL};
use requests::Requests;
use rushes_sys::descriptor::replace;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest request that the kernel sends; the default of `fs.fuse.max_pages_limit`. Units: bytes.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Threads that take requests. None of them waits for a read through the daemon (reads.rs), and few
/// for a member's disk (lines.rs); a program that writes faster than its disk occupies one.
const THREAD_COUNT: usize = 128;

/// Background requests that the kernel may have under way: all its read-ahead. Beyond this number
/// it holds back requests of all readers, so that waiting readers, with eight requests each, would
/// keep others from their contracts.
const BACKGROUND_MAX: u16 = 4096;

/// An object's registration with the kernel, which reads it itself. Dropped when no open needs it
/// any more.
#[derive(Debug)]
pub(crate) struct Backing(fuser::BackingId);

/// Messages that the door sends to the kernel unasked.
pub(crate) struct Notices(fuser::Notifier);

impl Notices {
    /// Makes the kernel forget the inode's attributes.
    pub(crate) fn forget_attributes(&self, number: u64) {
        // An error: it has none.
        let _ = self.0.inval_inode(INodeNo(number), -1, 0);
    }
}

/// The node of requests that do not come from the kernel: see [`take_over`].
const NOBODY: u64 = u64::MAX;

/// A mounted pool; dropping it unmounts.
pub struct Mounted {
    threads: fuser::BackgroundSession,
    /// None: the mount outlives this process.
    mounting: Option<Mounting>,
    door: Arc<Door>,
    /// Threads that work in the background until the door closes.
    helpers: Vec<JoinHandle<()>>,
}

impl Mounted {
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// Waits until it is unmounted.
    pub fn wait(self) -> io::Result<()> {
        let ended = match self.threads.join() {
            // A thread had just taken a request when the connection ended.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::CONNABORTED.raw_os_error()) =>
            {
                Ok(())
            }
            ended => ended,
        };
        drop(self.mounting);
        self.door.closing.store(true, Ordering::Release);
        for helper in &self.helpers {
            helper.thread().unpark();
        }
        self.door.follow_all_at_last();
        // Before waiting for threads that a disk may block; and once more afterwards, with the
        // files that they settled.
        self.door.log_names_at_last();
        for helper in self.helpers {
            let _ = helper.join();
        }
        self.door.log_names_at_last();
        ended
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(THREAD_COUNT);
    config
}

/// Mounts it on `folder`; threads of its own answer requests.
pub(crate) fn mount(door: Arc<Door>, folder: &Path) -> io::Result<Mounted> {
    let mut config = config();
    config.clone_fd = true;
    let (mounting, device) = mounting(&door, folder)?;
    let requests = Requests::new(&door);
    let crew = Arc::clone(&requests.crew);
    let connection = fuser::Session::from_fd(requests, device, config.acl, config)?;
    let device = connection.as_fd().try_clone_to_owned()?;
    let threads = connection.spawn()?;
    raise_read_ahead_on(folder);
    served(door, threads, (crew, device), Some(mounting))
}

fn mounting(door: &Door, folder: &Path) -> io::Result<(Mounting, OwnedFd)> {
    // The source by which `rushes pool where` finds the pool of a mount.
    let source = door.pool.catalogue().path().canonicalize()?;
    Mounting::new(&source, folder, REQUEST_BYTES_MAX)
}

fn raise_read_ahead_on(folder: &Path) {
    if let Err(error) = raise_read_ahead(folder) {
        tracing::warn!("cannot raise the kernel's read-ahead: {error}");
    }
}

/// Like [`mount`], in a process that the keeper replaces by another one when it dies.
///
/// Returns  the mount, and whether the kernel can send again the requests that a dying process has
/// not answered (Linux 6.9)
pub(crate) fn mount_kept(door: Arc<Door>, folder: &Path) -> io::Result<(Mounted, OwnedFd, bool)> {
    let (mounting, device) = mounting(&door, folder)?;
    let (mounted, asks_again) = begin(door, &device, folder)?;
    // From now on it outlives this process.
    mounting.leave();
    Ok((mounted, device, asks_again))
}

fn begin(door: Arc<Door>, device: &OwnedFd, folder: &Path) -> io::Result<(Mounted, bool)> {
    let init = kept::read_init(device)?;
    let (shaken, answer) = handshake(&door, &init)?;
    let crew = Arc::clone(&shaken.crew);
    // In this order: each later process knows the agreement with the kernel.
    table(&door)?.agree(&init, &answer)?;
    let (threads, asks_again) = take_over(shaken, device, || {
        rustix::io::write(device, &answer)?;
        kept::ask_again(device)
    })?;
    raise_read_ahead_on(folder);
    let mounted = served(door, threads, (crew, device.try_clone()?), None)?;
    Ok((mounted, asks_again))
}

/// Goes on where a process died.
///
/// Does not look at the place of the mount: by now that may be another folder, or the look would be
/// a request that this process would have to answer.
/// Errors   InvalidData if the kernel has agreed to other terms than this version needs
pub(crate) fn go_on(door: Arc<Door>, device: &OwnedFd) -> io::Result<Mounted> {
    let Some((init, agreed)) = table(&door)?.agreed()? else {
        return Err(io::Error::other(
            "the former process died before it had mounted the pool; expected a mount to continue: \
             mount the pool again",
        ));
    };
    let (shaken, answer) = handshake(&door, &init)?;
    if answer != agreed {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "this version needs other kernel features than the version that mounted the pool; \
             expected the same. Unmount the pool and mount it again",
        ));
    }
    let crew = Arc::clone(&shaken.crew);
    let (threads, _) = take_over(shaken, device, || kept::ask_again(device))?;
    served(door, threads, (crew, device.try_clone()?), None)
}

fn table(door: &Door) -> io::Result<&Table> {
    let table = door.table.as_deref();
    table.ok_or_else(|| io::Error::other("a mount that is kept has a table"))
}

/// A connection that has answered this INIT, over a socket instead of the device: fuser begins each
/// connection with one, the kernel each mount.
fn handshake(door: &Arc<Door>, init: &[u8]) -> io::Result<(Handshaken, Vec<u8>)> {
    let (ours, its) = kept::socket_pair(REQUEST_BYTES_MAX as usize + HEAD_BYTES)?;
    rustix::io::write(&ours, init)?;
    let requests = Requests::new(door);
    let (latch, crew) = (Arc::clone(&requests.latch), Arc::clone(&requests.crew));
    let connection = fuser::Session::from_fd(requests, its, SessionACL::All, config())?;
    let mut answer = vec![0; 512];
    let length = rustix::io::read(&ours, &mut answer)?;
    answer.truncate(length);
    Ok((
        Handshaken {
            connection,
            latch,
            crew,
            ours,
        },
        answer,
    ))
}

struct Handshaken {
    connection: fuser::Session<Requests>,
    latch: Arc<Latch>,
    crew: Arc<Crew>,
    ours: OwnedFd,
}

/// Longer than the head before the bytes of any request. Units: bytes.
const HEAD_BYTES: usize = 8192;

/// The connection's threads go on with the device in place of the socket. First each of them gets
/// one message as long as the longest request, so that its buffer is in memory: if a process is
/// killed while the kernel copies a request to a page that is not there yet, that request ends with
/// EIO.
///
/// `ready`: called while no thread takes requests yet
fn take_over<T>(
    handshaken: Handshaken,
    device: &OwnedFd,
    ready: impl FnOnce() -> io::Result<T>,
) -> io::Result<(fuser::BackgroundSession, T)> {
    let Handshaken {
        connection,
        latch,
        ours,
        ..
    } = handshaken;
    let (number, socket) = {
        let its = connection.as_fd();
        (its.as_raw_fd(), its.try_clone_to_owned()?)
    };
    let threads = connection.spawn()?;
    let length = REQUEST_BYTES_MAX as usize + HEAD_BYTES;
    kept::send_nothing(&ours, NOBODY, THREAD_COUNT, length)?;
    latch.wait_for(THREAD_COUNT)?;
    replace(number, &socket, device)?;
    let done = ready()?;
    latch.open();
    Ok((threads, done))
}

/// Time between two looks whether the mount has ended. Units: ms.
const LOOK_MS: u64 = 50;

/// Tells threads at home that the mount has ended, which those that wait for a request learn from
/// the kernel.
fn close_at_end(crew: &Crew, device: &OwnedFd, closing: &AtomicBool) {
    let has_ended = || is_unmounted(device, Duration::ZERO).unwrap_or(false);
    while !closing.load(Ordering::Acquire) && !has_ended() {
        // Each request would wake a thread that waits for the end in poll(2).
        std::thread::park_timeout(Duration::from_millis(LOOK_MS));
    }
    crew.close();
}

/// With the background threads.
fn served(
    door: Arc<Door>,
    threads: fuser::BackgroundSession,
    (crew, device): (Arc<Crew>, OwnedFd),
    mounting: Option<Mounting>,
) -> io::Result<Mounted> {
    let _ = door.notices.set(Notices(threads.notifier()));
    let helper = |name: &str, work: fn(&Door)| {
        let door = Arc::clone(&door);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&door))
    };
    let mut helpers = vec![
        helper("burier", Door::bury_now_and_then)?,
        helper("names", Door::log_names_now_and_then)?,
        helper("loads", Door::ask_loads_now_and_then)?,
        helper("tidier", Door::tidy_now_and_then)?,
        helper("settler", Door::settle_now_and_then)?,
        helper("failing", Door::look_after_failing)?,
    ];
    helpers.extend(control::start(&door));
    helpers.push({
        let door = Arc::clone(&door);
        std::thread::Builder::new()
            .name(String::from("crew"))
            .spawn(move || close_at_end(&crew, &device, &door.closing))?
    });
    Ok(Mounted {
        threads,
        mounting,
        helpers,
        door,
    })
}
