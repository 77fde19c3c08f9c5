// SPDX-License-Identifier: Apache-2.0
//! The end of a mount, as a signal asks for it: once, and again.
//!
//! The first time it is unmounted: programs that have files open keep them, and the mount ends with
//! the last. The second time it waits for nobody any more: neither for programs that have files
//! open, nor for a disk that hangs. Acknowledged bytes are in the members' files or with the daemon
//! by then, as whenever this process dies (docs/decisions/0026); bytes that programs have stored
//! through mappings get a few seconds to come there.

use crate::door::Door;
use crate::kernel::keeper::Replacing;
use crate::kernel::mounting::{mounts_of, unmount_lazily};
use crate::kernel::session::Mounted;
use crate::lock::locked;
use rushes_sys::descriptor::replace;
use rustix::fs::{Mode, OFlags, open, readlink, sync};
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// For what was stored through mappings, when nobody is waited for.
const STORES_PATIENCE: Duration = Duration::from_secs(3);
/// All that is done when nobody is waited for is done by then.
const HURRY_PATIENCE: Duration = Duration::from_secs(5);
/// A mount that is told to end before it is there is unmounted when it is; looked at so often, for
/// so long.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const LOOK_UNTIL: Duration = Duration::from_secs(60);
/// An unmounted mount that no program uses has ended by then.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// Files that are named of those that are open.
const NAMED_COUNT: usize = 3;
const DEVICE: &str = "/dev/fuse";

/// The end of a mount, as far as a process that serves it, or keeps it, knows of it.
#[derive(Debug)]
pub struct Stop {
    catalogue: PathBuf,
    folder: PathBuf,
    /// The door that it serves. None: nothing yet, or it is a keeper.
    door: Mutex<Option<Weak<Door>>>,
    /// How the keeper's process is asked to end.
    keeper: Option<Arc<Replacing>>,
    is_asked: AtomicBool,
    is_hurried: AtomicBool,
}

impl Stop {
    /// For a pool that is to be mounted there. Neither is looked at but by name. `keeper`: of a
    /// process that keeps it.
    pub fn new(
        catalogue: &Path,
        folder: &Path,
        keeper: Option<Arc<Replacing>>,
    ) -> io::Result<Arc<Stop>> {
        Ok(Arc::new(Stop {
            catalogue: catalogue.canonicalize()?,
            folder: std::path::absolute(folder)?,
            door: Mutex::default(),
            keeper,
            is_asked: AtomicBool::new(false),
            is_hurried: AtomicBool::new(false),
        }))
    }

    /// The mount is there, and this process serves it.
    pub fn serves(&self, mounted: &Mounted) {
        *locked(&self.door) = Some(Arc::downgrade(mounted.door()));
    }

    fn door(&self) -> Option<Arc<Door>> {
        locked(&self.door).as_ref().and_then(Weak::upgrade)
    }

    /// Unmount it, also when it is not there yet.
    ///
    /// Returns  false: that was asked for before
    pub fn ask(self: &Arc<Stop>) -> bool {
        if self.is_asked.swap(true, Ordering::AcqRel) {
            return false;
        }
        let stop = Arc::clone(self);
        // Signals go on being handled.
        let started = std::thread::Builder::new().spawn(move || stop.unmount());
        if started.is_err() {
            self.unmount();
        }
        true
    }

    fn unmount(&self) {
        let end = Instant::now() + LOOK_UNTIL;
        let is_kept = || self.keeper.as_ref().is_some_and(|one| one.has_mounted());
        // One of which the kernel has no answer yet would end with an error.
        while self.door().is_none() && !is_kept() && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
        let Some(folder) = mounts_of(&self.catalogue, &self.folder) else {
            return;
        };
        unmount_lazily(&folder);
        if let Some(open) = self.open() {
            tracing::info!(
                "{}: unmounted; the process ends when {open} are closed. A second signal ends it at once",
                self.folder.display()
            );
        } else if self.keeper.is_some() {
            tracing::info!(
                "{}: unmounted; the process ends when no program has a file open there. A second signal ends it at once",
                self.folder.display()
            );
        }
        // A process that ends is gone by then.
        std::thread::sleep(ENDS_WITHIN);
        if let Some(clause) = rushes_pool::kept_elsewhere(&self.catalogue) {
            tracing::warn!(
                "{}: unmounted here, but {clause}. The process ends then; a second signal ends it at once",
                self.folder.display()
            );
        }
    }

    /// Whether nobody is waited for any more.
    pub fn is_hurried(&self) -> bool {
        self.is_hurried.load(Ordering::Acquire)
    }

    /// From now on nobody is waited for. Takes no longer than [`HURRY_PATIENCE`], whatever hangs;
    /// afterwards the process is to exit.
    pub fn hurry(self: &Arc<Stop>) {
        if !self.is_hurried.swap(true, Ordering::AcqRel) {
            let stop = Arc::clone(self);
            within(HURRY_PATIENCE, move || stop.end_now());
            // Also when a part of that hangs: a thread that a disk keeps from ending would keep the
            // kernel's connection, and with it the programs that wait for an answer.
            if let Err(error) = let_go_of_connection() {
                tracing::warn!(
                    "cannot close the kernel's connection before the process ends: {error}"
                );
            }
        }
    }

    fn end_now(&self) {
        let open = self.open();
        tracing::warn!(
            "{}: second signal: the process ends now{}. Acknowledged writes are on the members or with the daemon; the next mount frees the space of \
             deleted files and completes the log of names",
            self.folder.display(),
            open.as_ref().map_or(String::new(), |open| format!(
                ", and programs get errors from {open}"
            ))
        );
        if open.is_some() {
            within(STORES_PATIENCE, sync);
        }
        if let Some(folder) = mounts_of(&self.catalogue, &self.folder) {
            unmount_lazily(&folder);
        }
    }

    /// The open files, in words. None: there are none, or nobody here knows.
    fn open(&self) -> Option<String> {
        let (count, names) = self.door()?.open_now(NAMED_COUNT);
        let names: Vec<String> = names
            .iter()
            .map(|name| name.display().to_string())
            .collect();
        let more = if names.len() < count { ", …" } else { "" };
        let files = if count == 1 { "file" } else { "files" };
        (count > 0).then(|| format!("{count} open {files} ({}{more})", names.join(", ")))
    }
}

/// Do it, and wait for its end at most so long.
fn within(patience: Duration, act: impl FnOnce() + Send + 'static) {
    let (ended, end) = sync_channel(1);
    let started = std::thread::Builder::new().spawn(move || {
        act();
        let _ = ended.send(());
    });
    if started.is_ok() {
        let _ = end.recv_timeout(patience);
    }
}

/// The descriptors of the kernel's connection lead nowhere from now on: programs that wait for its
/// answers get errors when the threads that have begun to read of it end, with the process.
fn let_go_of_connection() -> io::Result<()> {
    let device = open(DEVICE, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let nowhere = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let is_it = readlink(entry.path(), Vec::new())
            .is_ok_and(|path| path.as_bytes() == DEVICE.as_bytes());
        let number = entry.file_name().to_str().map(str::parse::<RawFd>);
        if let (true, Some(Ok(number))) = (is_it, number) {
            replace(number, &device, &nowhere)?;
        }
    }
    Ok(())
}

impl Door {
    /// How many files somebody has open, and where some of them are in the tree.
    fn open_now(&self, named_count: usize) -> (usize, Vec<PathBuf>) {
        let mut count = 0;
        let mut names = Vec::new();
        for node in self.nodes.all() {
            let stub = {
                let slot = locked(&node.file);
                if !slot.is_open() {
                    continue;
                }
                slot.stub()
            };
            count += 1;
            if names.len() < named_count
                && let Some(path) = stub.and_then(|stub| self.path_of(&stub))
            {
                names.push(path);
            }
        }
        (count, names)
    }
}
