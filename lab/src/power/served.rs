// SPDX-License-Identifier: Apache-2.0
//! Lanes whose bytes go through a daemon: the recorded disk gets that daemon's write-back,
//! reservations and syncs.
//!
//! A lane changes names by system calls, as smbd does, and sends the daemon the requests of the
//! module for Samba, doors/smb/rushes_write.c: a hold before it truncates, punches or plainly
//! writes a file, and a report of the change after it; a report of a file that lost its name; a
//! sync where the daemon has bytes that the file lacks. Work that the daemon leaves to its doors
//! the lane does on its own descriptor.
//!
//! It does not kill the daemon: a power cut ends all at once. tests/tests/writing.rs tests the
//! remains of a killed daemon.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use rushes_core::format::door;
use rushes_core::units::Duration as CoreDuration;
use rushes_shm::Connect;
use rushes_shm::client::{Client, FileHandle, ReadError};
use rushes_shm::facts::FactsView;
use rustix::fs::{Advice, FallocateFlags};

use super::script::Step;
use super::sector::content;
use super::writer::{Host, Told, Writer};
use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::{Daemon, runtime_folder};
use crate::servers::smbd::SHARE;
use crate::stage::room::Room;

/// Name of the daemon and its folders in the room.
const NAME: &str = "served";

/// The daemon with its cache, its lanes and its threads. Units: bytes.
const MEMORY_BYTES: u64 = 1 << 30;

/// The daemon's write buffer: larger than all writes of a recording. Units: bytes.
const WRITE_BUFFER_BYTES: u64 = 64 << 20;

/// The least `[write] age` that the daemon accepts: bytes that no lane syncs must be on their way
/// too when the power goes.
pub const WRITE_AGE: Duration = Duration::from_millis(500);

/// A step that drops pages waits past [`WRITE_AGE`] if its number is a multiple of this.
pub const NAP_EVERY: usize = 5;

/// How long a lane waits for a daemon that is just starting, and to begin a plain change.
const PATIENCE: Duration = Duration::from_secs(10);

/// The control group, folders and configuration of the daemons, one for each recording.
#[derive(Debug)]
pub struct House<'a> {
    room: &'a Room,
    cgroup: Cgroup,
    careless: bool,
}

impl<'a> House<'a> {
    /// Makes it in this room. `careless`: lanes sync the file system alone, like a door that
    /// forgets that the daemon has bytes.
    pub fn new(room: &'a Room, careless: bool) -> Result<House<'a>> {
        Ok(House {
            room,
            cgroup: Cgroup::create(room, NAME, MEMORY_BYTES)?,
            careless,
        })
    }

    /// A daemon that serves the file system mounted at `root`.
    pub fn open(&self, root: &Path) -> Result<Served> {
        Ok(Served {
            daemon: self.daemon(&[(SHARE.to_owned(), root.to_owned())])?,
            root: root.to_owned(),
            runtime: self.runtime(),
            careless: self.careless,
            written: AtomicU64::new(0),
            written_plainly: AtomicU64::new(0),
        })
    }

    /// A daemon with these shares.
    pub fn daemon(&self, shares: &[(String, PathBuf)]) -> Result<Daemon> {
        let state = self.room.folder("state")?;
        let config = configuration(shares, &self.runtime(), &state);
        Daemon::start_with(self.room, NAME, &config, &self.cgroup)
    }

    /// The folder of the daemon's sockets.
    pub fn runtime(&self) -> PathBuf {
        runtime_folder(self.room, NAME)
    }
}

fn configuration(shares: &[(String, PathBuf)], runtime: &Path, state: &Path) -> String {
    let share = |(name, path): &(String, PathBuf)| {
        format!(
            "[[share]]\nname = \"{name}\"\npath = \"{}\"\n",
            path.display()
        )
    };
    format!(
        "[cache]\nbytes = \"16MiB\"\nbuffer_bytes = \"64KiB\"\n\n\
         [write]\nbuffer_bytes = {WRITE_BUFFER_BYTES}\nage = \"{}ms\"\n\n\
         [server]\nruntime_dir = \"{}\"\nstate_dir = \"{}\"\nwarm_metadata = false\n\n{}",
        WRITE_AGE.as_millis(),
        runtime.display(),
        state.display(),
        shares.iter().map(share).collect::<String>()
    )
}

/// A daemon for one recording.
#[derive(Debug)]
pub struct Served {
    daemon: Daemon,
    root: PathBuf,
    runtime: PathBuf,
    careless: bool,
    /// Writes that the daemon took.
    written: AtomicU64,
    /// Writes that the daemon left to the lane.
    written_plainly: AtomicU64,
}

impl Host for Served {
    fn writer(&self) -> Result<Box<dyn Writer + '_>> {
        let who = Connect {
            door: door::LOCAL,
            share: SHARE.to_owned(),
            user: "lab".to_owned(),
            client: "lab".to_owned(),
            ..Connect::default()
        };
        let socket = self.runtime.join("session.sock");
        let patience = CoreDuration::from_s(PATIENCE.as_secs());
        let session = Client::connect_within(&socket, &who, patience)
            .map_err(|error| anyhow!("the daemon refused a lane: {error:?}"))?;
        anyhow::ensure!(
            session.takes_writes(),
            "the daemon gave a lane no room to write; its log ends:\n{}",
            self.daemon.log_tail()
        );
        Ok(Box::new(Lane {
            host: self,
            session,
            facts: FactsView::open(&self.runtime),
            open: HashMap::new(),
            paths: HashMap::new(),
        }))
    }

    fn close(self: Box<Self>) -> Result<Told> {
        self.daemon.stop()?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Ok(Told {
            writes_served: count(&self.written),
            writes_plain: count(&self.written_plainly),
            ..Told::default()
        })
    }
}

/// One lane's session, like that of one tree connect of smbd.
struct Lane<'a> {
    host: &'a Served,
    session: Client,
    facts: Option<FactsView>,
    open: HashMap<u64, OpenFile>,
    /// Path of each file that has a name.
    paths: HashMap<u64, String>,
}

struct OpenFile {
    file: File,
    handle: Option<FileHandle>,
    device: u64,
    inode: u64,
}

/// The daemon is gone, so it has no bytes for the door; during a recording that is an error.
fn gone() -> io::Error {
    io::Error::other("the daemon is gone in the middle of a recording")
}

fn not_held(error: ReadError) -> io::Error {
    match error {
        ReadError::Plain => gone(),
        ReadError::Errno(errno) => io::Error::from_raw_os_error(errno as i32),
    }
}

impl Lane<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.host.root.join(path)
    }

    /// Opens a file unless it is open: programs close a saved file and open it again.
    fn open(&mut self, file: u64) -> io::Result<()> {
        if self.open.contains_key(&file) {
            return Ok(());
        }
        let path = self.paths.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let path = path.clone();
        let known = OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path(&path))?;
        self.insert(file, &path, known)
    }

    fn insert(&mut self, file: u64, path: &str, opened: File) -> io::Result<()> {
        let found = opened.metadata()?;
        let known = OpenFile {
            handle: self.session.open(&opened, path.as_bytes()),
            device: found.dev(),
            inode: found.ino(),
            file: opened,
        };
        self.open.insert(file, known);
        Ok(())
    }

    fn close(&mut self, file: u64) {
        if let Some(OpenFile {
            handle: Some(handle),
            ..
        }) = self.open.remove(&file)
        {
            self.session.close(handle);
        }
    }

    fn opened(&mut self, file: u64) -> io::Result<&OpenFile> {
        self.open(file)?;
        Ok(&self.open[&file])
    }

    /// Changes a file on the lane's own descriptor, under a hold: before it the daemon has written
    /// all bytes of the file, after it the daemon gets a report of the change.
    fn plainly<T>(
        &mut self,
        file: u64,
        change: impl FnOnce(&File) -> io::Result<T>,
        (offset, length): (u64, u64),
    ) -> io::Result<T> {
        let &OpenFile { device, inode, .. } = self.opened(file)?;
        let begun = Instant::now();
        while let Some(facts) = &self.facts
            && !facts.plain_changes_begin()
        {
            if begun.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let held = self.session.hold(device, inode);
        let changed = match held {
            Ok(()) => change(&self.open[&file].file),
            Err(error) => Err(not_held(error)),
        };
        // A failed change may have changed some bytes.
        let length = if changed.is_ok() { length } else { u64::MAX };
        self.session.changed(device, inode, offset, length);
        if let Some(facts) = &self.facts {
            facts.plain_changes_end();
        }
        changed
    }

    fn write(&mut self, file: u64, bytes: &[u8], offset: u64) -> io::Result<()> {
        let handle = self.opened(file)?.handle;
        let written = match handle {
            Some(handle) => self.session.write(handle, bytes, offset),
            None => Err(ReadError::Plain),
        };
        let counter = match written {
            Ok(_) => &self.host.written,
            Err(_) => &self.host.written_plainly,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        match written {
            Ok(_) => Ok(()),
            Err(ReadError::Errno(errno)) => Err(io::Error::from_raw_os_error(errno as i32)),
            Err(ReadError::Plain) => {
                let change = |file: &File| file.write_all_at(bytes, offset);
                self.plainly(file, change, (offset, bytes.len() as u64))
            }
        }
    }

    fn truncate(&mut self, file: u64, size: u64) -> io::Result<()> {
        let known = self.opened(file)?;
        let (device, inode, on_disk) = (known.device, known.inode, known.file.metadata()?.len());
        let fact = self.session.fact(device, inode);
        let before = fact.map_or(on_disk, |fact| fact.size);
        let cut = |file: &File| file.set_len(size);
        self.plainly(file, cut, (before.min(size), u64::MAX))
    }

    /// Makes the daemon write all acknowledged bytes to the file.
    fn settle(&mut self, file: u64) -> io::Result<()> {
        let &OpenFile { device, inode, .. } = self.opened(file)?;
        if self.session.fact(device, inode).is_some() {
            self.session.hold(device, inode).map_err(not_held)?;
            self.session.changed(device, inode, 0, 0);
        }
        Ok(())
    }

    fn sync(&mut self, file: u64) -> io::Result<()> {
        let &OpenFile {
            device,
            inode,
            handle,
            ..
        } = self.opened(file)?;
        if !self.host.careless
            && self.session.fact(device, inode).is_some()
            && let Some(handle) = handle
        {
            match self.session.sync(handle) {
                Ok(()) => return Ok(()),
                Err(ReadError::Errno(errno)) => {
                    return Err(io::Error::from_raw_os_error(errno as i32));
                }
                Err(ReadError::Plain) => {}
            }
        }
        if !self.host.careless {
            self.settle(file)?;
        }
        self.open[&file].file.sync_all()
    }

    fn sync_all(&mut self) -> io::Result<()> {
        let files: Vec<u64> = self.paths.keys().copied().collect();
        for file in files {
            self.sync(file)?;
        }
        Ok(rustix::fs::syncfs(File::open(&self.host.root)?)?)
    }

    /// Removes a name and reports the file: the daemon keeps files open, and one without a name
    /// would keep its space.
    fn lose_name(&mut self, path: &Path, lose: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let victim = fs::symlink_metadata(path)
            .ok()
            .filter(fs::Metadata::is_file);
        lose()?;
        if let Some(victim) = victim {
            self.session.gone(victim.dev(), victim.ino());
        }
        Ok(())
    }

    fn rename(&mut self, file: u64, from: &str, to: &str) -> io::Result<()> {
        let replaced = self.paths.iter().find(|(_, path)| *path == to);
        // Over SMB a rename does not replace an open file.
        if let Some(replaced) = replaced.map(|(&replaced, _)| replaced) {
            self.close(replaced);
            self.paths.remove(&replaced);
        }
        let (source, target) = (self.path(from), self.path(to));
        self.lose_name(&target, || fs::rename(source, &target))?;
        self.paths.insert(file, to.to_owned());
        self.close(file);
        Ok(())
    }

    /// Makes the daemon write the file and drops its pages, which starts their write-back; now and
    /// then waits past the write age instead.
    fn let_go(&mut self, number: usize, file: u64) -> io::Result<()> {
        if number.is_multiple_of(NAP_EVERY) {
            std::thread::sleep(WRITE_AGE + WRITE_AGE / 4);
            return Ok(());
        }
        self.settle(file)?;
        Ok(rustix::fs::fadvise(
            &self.open[&file].file,
            0,
            None,
            Advice::DontNeed,
        )?)
    }
}

impl Writer for Lane<'_> {
    fn act(&mut self, number: usize, step: &Step) -> io::Result<()> {
        match step {
            Step::MakeFolder { path } => fs::create_dir(self.path(path)),
            Step::Create { file, path } => {
                let new = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .open(self.path(path))?;
                self.paths.insert(*file, path.clone());
                self.insert(*file, path, new)
            }
            // SMB does not distinguish direct writes.
            &Step::Write {
                file,
                offset,
                length,
                ..
            } => {
                let bytes = content(file, number as u64 + 1, offset, length);
                self.write(file, &bytes, offset)
            }
            &Step::WriteThrough {
                file,
                offset,
                length,
            } => {
                let bytes = content(file, number as u64 + 1, offset, length);
                self.write(file, &bytes, offset)?;
                self.sync(file)
            }
            &Step::Truncate { file, size } => self.truncate(file, size),
            &Step::Punch {
                file,
                offset,
                length,
            } => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let punch = |file: &File| Ok(rustix::fs::fallocate(file, flags, offset, length)?);
                self.plainly(file, punch, (offset, u64::MAX))
            }
            &Step::Reserve {
                file,
                offset,
                length,
            } => {
                let flags = FallocateFlags::KEEP_SIZE;
                let reserve = |file: &File| Ok(rustix::fs::fallocate(file, flags, offset, length)?);
                self.plainly(file, reserve, (offset, u64::MAX))
            }
            // A client's flush covers data and metadata.
            Step::Sync { file, .. } => self.sync(*file),
            Step::SyncFolder { path } => File::open(self.path(path))?.sync_all(),
            Step::SyncAll => self.sync_all(),
            Step::LetGo { file } => self.let_go(number, *file),
            Step::Rename { file, from, to } => self.rename(*file, from, to),
            Step::Unlink { file, path } => {
                let path = self.path(path);
                self.lose_name(&path, || fs::remove_file(&path))?;
                self.paths.remove(file);
                self.close(*file);
                Ok(())
            }
        }
    }
}
