// SPDX-License-Identifier: Apache-2.0
//! The end of a mount by a signal: the first one, and the second.
//!
//! The first signal unmounts it: programs that have files open keep them, and the mount ends with
//! the last. After the second it waits neither for programs that have files open nor for a disk
//! that hangs. By then acknowledged bytes are in the members' files or with the daemon, as whenever
//! this process dies (docs/decisions/0026); bytes that programs have stored through mappings get a
//! few seconds to get there.

use crate::door::Door;
use crate::kernel::keeper::Replacing;
use crate::kernel::mounting::{mounts_of, unmount_lazily};
use crate::kernel::protocol::Mounted;
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

/// For stores through mappings, in a hurried end.
const STORES_PATIENCE: Duration = Duration::from_secs(3);
/// A hurried end is done by then.
const HURRY_PATIENCE: Duration = Duration::from_secs(5);
/// A signal may come before the pool is mounted: then it is unmounted as soon as it is. The process
/// looks for it so often, for so long.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const LOOK_UNTIL: Duration = Duration::from_secs(60);
/// A mount that is unmounted, and that no program uses, has ended by then.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// Open files that the message names.
const NAMED_COUNT: usize = 3;
const DEVICE: &str = "/dev/fuse";

/// The end of a mount, as far as a process that serves or keeps it knows.
#[derive(Debug)]
pub struct Stop {
    catalogue: PathBuf,
    folder: PathBuf,
    /// The door that it serves. None: nothing yet, or it is a keeper.
    door: Mutex<Option<Weak<Door>>>,
    /// For a keeper: how it asks its serving process to end.
    keeper: Option<Arc<Replacing>>,
    is_asked: AtomicBool,
    is_hurried: AtomicBool,
}

impl Stop {
    /// For a pool that will be mounted there. Looks only at the names of both. `keeper`: for a
    /// process that keeps the mount.
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
    pub fn set_mounted(&self, mounted: &Mounted) {
        *locked(&self.door) = Some(Arc::downgrade(mounted.door()));
    }

    fn door(&self) -> Option<Arc<Door>> {
        locked(&self.door).as_ref().and_then(Weak::upgrade)
    }

    /// Unmounts it, also if it is not mounted yet.
    ///
    /// Returns  false: there was a signal before
    pub fn ask(self: &Arc<Stop>) -> bool {
        if self.is_asked.swap(true, Ordering::AcqRel) {
            return false;
        }
        let stop = Arc::clone(self);
        // The process goes on handling signals.
        let started = std::thread::Builder::new().spawn(move || stop.unmount());
        if started.is_err() {
            self.unmount();
        }
        true
    }

    fn unmount(&self) {
        let end = Instant::now() + LOOK_UNTIL;
        let is_kept = || self.keeper.as_ref().is_some_and(|one| one.has_mounted());
        // A mount whose first request has no answer yet would end with an error.
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

    /// Whether the end waits for nothing any more.
    pub fn is_hurried(&self) -> bool {
        self.is_hurried.load(Ordering::Acquire)
    }

    /// From now on the end waits for no program. Takes no longer than [`HURRY_PATIENCE`], even if a
    /// disk hangs; then the process must exit.
    pub fn hurry(self: &Arc<Stop>) {
        if !self.is_hurried.swap(true, Ordering::AcqRel) {
            let stop = Arc::clone(self);
            within(HURRY_PATIENCE, move || stop.end_now());
            // Also if a part of that hangs: a thread that a disk keeps from ending would hold the
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

    /// The open files, in words. None: there are none, or this process does not know them.
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

/// Does it, and waits for its end at most so long.
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

/// Points the descriptors of the kernel's connection to /dev/null: programs that wait for its
/// answers get errors when the threads that read from it end, with the process.
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
    /// The number of open files, and the paths of some of them in the tree.
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
