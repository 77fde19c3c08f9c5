// SPDX-License-Identifier: Apache-2.0
//! Jobs of the workers for the loop: everything that may wait for a disk.

use crate::calibrate::Calibration;
use crate::config::{Config, ConfigError, ShareConfig};
use crate::error::ServeError;
use crate::files::{Chore, Durable, TIME_IS_SET};
use crate::kept::{FoundAgain, Missed, Terms, find_again};
use crate::mounts::{MountTable, same_file_system_elsewhere};
use crate::remembered::{self, FileSystem};
use crate::reserved::{Attempts, give_back};
use crate::share::{Place, Share, place_of};
use rushes_core::format::lane::FileRecord;
use rushes_core::server::{
    DeviceModel, Errno, Extent, FileKey, PAGE_BYTES, RateHint, RateSource, RememberedRun,
};
use rushes_core::units::{DeviceId, FileId, HandleId, PoolNumber, SessionId};
use rushes_shm::Writer;
use rushes_sys::extents;
use rushes_sys::file::{self, FileStatus, MountId, PrivateFile, Unserved};
use rushes_sys::space::{self, WriteFile};
use rushes_sys::watch::handle_of;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The extents of a written file must be known completely, or blocks that it has would be reserved
/// again and again.
const WRITTEN_EXTENT_COUNT_MAX: usize = 1 << 20;
/// Extents of a file to read: a file with more is scattered anyway.
const EXTENT_COUNT_MAX: usize = 4096;

/// How far a sync brings a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncTo {
    /// On stable storage, with the metadata that finds them.
    Medium,
    /// Out of the kernel's cache.
    Device,
}

/// A job.
pub(crate) enum Job {
    /// Vet a client's descriptor and open its file again.
    Open {
        session: SessionId,
        handle: HandleId,
        /// Tells this opening from a later one under the same handle.
        opening: u64,
        share: Arc<Share>,
        /// For the folder of calibrations, in case that the share lies elsewhere by now.
        config: Arc<Config>,
        /// Below the share's root.
        path: String,
        fd: OwnedFd,
        /// Process of the client, for the numbers of its mounts.
        pid: i32,
        /// The user that writes to it through a lane, if one may.
        writer: Option<Writer>,
    },
    /// Reserve blocks, free them, set times.
    Chore {
        file: FileId,
        generation: u64,
        fd: Arc<OwnedFd>,
        writer: Writer,
        chore: Chore,
    },
    /// Open a file for writing that could not be opened so when it was found.
    OpenToWrite {
        file: FileId,
        generation: u64,
        /// A file of its file system.
        fd: Arc<OwnedFd>,
        durable: Durable,
    },
    /// Look for files of which a former daemon left writes, by the number of the oldest of these.
    FindAgain {
        shares: Vec<Arc<Share>>,
        wanted: Vec<(u64, FileRecord)>,
        terms: Terms,
    },
    /// Put it on stable storage, or no further than on its device.
    Sync {
        file: FileId,
        generation: u64,
        fd: Arc<OwnedFd>,
        to: SyncTo,
    },
    /// Make a drive flush its cache, by syncing a file without dirty pages.
    Flush { device: DeviceId, fd: Arc<OwnedFd> },
    /// Open a file beside one that a client opened.
    Neighbour {
        beside: FileId,
        share: Arc<Share>,
        /// Of the file beside.
        path: String,
        key: FileKey,
        name: String,
    },
    /// Vet the descriptor of a file that a pool's door has found for us, and open it again.
    PoolFile {
        pool: PoolNumber,
        /// In the pool's tree.
        path: String,
        /// The share in which the door says that it lies.
        share: Arc<Share>,
        config: Arc<Config>,
        fd: OwnedFd,
        /// Process of the door.
        pid: i32,
    },
    /// Read its length.
    Stat {
        file: FileId,
        generation: u64,
        fd: Arc<OwnedFd>,
    },
    /// Does it still have a name?
    Links { key: FileKey, fd: Arc<OwnedFd> },
    /// Look for the rate in its header.
    Probe {
        file: FileId,
        generation: u64,
        key: FileKey,
        fd: Arc<OwnedFd>,
        /// Its acknowledged length. The device may not have all of it yet.
        size: u64,
    },
    /// Free blocks that an earlier use left reserved.
    GiveBack {
        shares: Vec<Arc<Share>>,
        left: Vec<(u32, FileRecord)>,
    },
    /// Does the share's path still lead to the same place?
    Look {
        share: ShareConfig,
        config: Arc<Config>,
        /// None: it led nowhere.
        known: Option<Place>,
    },
    /// Read the configuration again, and open shares that are new in it, or lie elsewhere by now.
    Reload {
        file: PathBuf,
        known: Vec<Arc<Share>>,
    },
    /// Read the runs that rehearsal remembered.
    LoadRuns {
        state_dir: PathBuf,
        file_systems: Vec<FileSystem>,
    },
    /// Write the runs that rehearsal remembers.
    SaveRuns {
        state_dir: PathBuf,
        file_systems: Vec<FileSystem>,
        runs: Vec<RememberedRun>,
        /// The server's count when it had these runs.
        changes: u64,
    },
}

/// The outcome of a job.
pub(crate) enum Done {
    Opened {
        session: SessionId,
        handle: HandleId,
        opening: u64,
        path: String,
        /// The share, if it lies elsewhere by now, where this file is.
        moved: Option<OpenedShare>,
        result: Result<OpenedFile, Unserved>,
    },
    Chore {
        file: FileId,
        generation: u64,
        key: FileKey,
        chore: Chore,
        /// After a reservation: where the file's bytes are now.
        result: io::Result<Vec<Extent>>,
        /// Its blocks on its disk before. Units: bytes.
        taken_before: u64,
        /// Its version after that.
        version: u64,
    },
    OpenedToWrite {
        file: FileId,
        generation: u64,
        result: io::Result<WriteFile>,
    },
    FoundAgain(Vec<(u64, Result<FoundAgain, Missed>)>),
    Synced {
        file: FileId,
        generation: u64,
        result: io::Result<()>,
    },
    Flushed {
        device: DeviceId,
        result: io::Result<()>,
    },
    Neighbour {
        beside: FileId,
        /// Of the neighbour.
        path: String,
        name: String,
        share: Arc<Share>,
        result: Result<OpenedFile, Errno>,
    },
    PoolFile {
        pool: PoolNumber,
        path: String,
        share: Arc<Share>,
        moved: Option<OpenedShare>,
        result: Result<OpenedFile, Errno>,
    },
    Stat {
        file: FileId,
        generation: u64,
        result: Option<FileStatus>,
    },
    Links {
        key: FileKey,
        link_count: u32,
    },
    Probed {
        file: FileId,
        generation: u64,
        key: FileKey,
        version: u64,
        hint: Option<RateHint>,
    },
    GaveBack(Attempts),
    /// None: its path leads to the same place.
    Looked {
        share: ShareConfig,
        result: Result<Option<OpenedShare>, ServeError>,
    },
    Reloaded(Result<Box<Reloaded>, ConfigError>),
    /// Err: a sentence.
    RunsLoaded(Result<Vec<RememberedRun>, String>),
    /// Err: a sentence.
    RunsSaved {
        changes: u64,
        result: Result<(), String>,
    },
}

/// Whether a file can be written through a lane.
pub(crate) enum Looked {
    /// Not asked for, or the attempt failed.
    Not,
    /// It cannot.
    Refused,
    /// It can, through these descriptors; or it could before, and cannot be opened for writing now.
    Writable(Box<(Result<WriteFile, Errno>, Durable)>),
}

/// A file that a worker has opened for the daemon, with its descriptors. `adopt` keeps those, and
/// makes of the rest the `FileFacts` that the core gets.
pub(crate) struct OpenedFile {
    /// The result for writes through a lane.
    pub(crate) looked: Looked,
    pub(crate) file: PrivateFile,
    /// On the file system's device, not the disk.
    pub(crate) extents: Vec<Extent>,
}

/// A share just opened, and the calibration of its device.
pub(crate) type OpenedShare = Box<(Share, Option<Calibration>)>;

/// A configuration read again.
pub(crate) struct Reloaded {
    pub(crate) config: Config,
    /// Shares that were not there before, or lie elsewhere by now, opened.
    pub(crate) shares: Vec<(ShareConfig, Result<OpenedShare, ServeError>)>,
    /// The models known by now of the devices of shares that are where they were.
    pub(crate) measured: Vec<(Arc<Share>, DeviceModel)>,
}

/// Do it. May wait for disks without a bound.
pub(crate) fn work(job: Job) -> Done {
    match job {
        Job::Open {
            session,
            handle,
            opening,
            share,
            config,
            path,
            fd,
            pid,
            writer,
        } => {
            let (result, moved) = reopen(&share, &config, &fd, pid);
            Done::Opened {
                session,
                handle,
                opening,
                path,
                moved,
                result: result.and_then(|file| {
                    let looked = writer.map_or(Looked::Not, |writer| writable(&fd, &file, writer));
                    Ok(OpenedFile {
                        looked,
                        ..found(file)?
                    })
                }),
            }
        }
        Job::Chore {
            file,
            generation,
            fd,
            writer,
            chore,
        } => {
            let taken_before = space::taken(&*fd);
            let result = do_chore(&fd, writer, chore);
            let status = file::status(&*fd);
            Done::Chore {
                file,
                generation,
                key: status
                    .as_ref()
                    .map_or(FileKey::default(), |found| found.key),
                chore,
                result,
                taken_before,
                version: status.map_or(0, |found| found.version),
            }
        }
        Job::OpenToWrite {
            file,
            generation,
            fd,
            durable,
        } => Done::OpenedToWrite {
            file,
            generation,
            result: space::open_writing_by_handle(&*fd, durable.handle_kind, &durable.handle),
        },
        Job::FindAgain {
            shares,
            wanted,
            terms,
        } => Done::FoundAgain(find_again(&shares, &wanted, &terms)),
        Job::Sync {
            file,
            generation,
            fd,
            to,
        } => Done::Synced {
            file,
            generation,
            result: match to {
                SyncTo::Medium => space::sync(&*fd),
                SyncTo::Device => space::write_out(&*fd),
            },
        },
        Job::Flush { device, fd } => Done::Flushed {
            device,
            result: space::sync_data(&*fd),
        },
        Job::Neighbour {
            beside,
            share,
            path,
            key,
            name,
        } => {
            let result = neighbour(&share, &path, key, &name);
            let path = match Path::new(&path).parent() {
                Some(folder) => folder.join(&name).to_string_lossy().into_owned(),
                None => name.clone(),
            };
            Done::Neighbour {
                beside,
                path,
                name,
                share,
                result: result.map_err(|unserved| unserved.errno()),
            }
        }
        Job::PoolFile {
            pool,
            path,
            share,
            config,
            fd,
            pid,
        } => {
            let (result, moved) = reopen(&share, &config, &fd, pid);
            let result = result.and_then(found);
            Done::PoolFile {
                pool,
                path,
                share,
                moved,
                result: result.map_err(|unserved| unserved.errno()),
            }
        }
        Job::Stat {
            file,
            generation,
            fd,
        } => Done::Stat {
            file,
            generation,
            result: file::status(&*fd).ok(),
        },
        Job::Links { key, fd } => Done::Links {
            key,
            // If its status cannot be read, it counts as one with a name.
            link_count: file::status(&*fd).map_or(1, |status| status.link_count),
        },
        Job::Probe {
            file,
            generation,
            key,
            fd,
            size,
        } => {
            // Before the header is read: a change after that gives the file another version.
            let status = file::status(&*fd).ok();
            let size = size.max(status.map_or(0, |status| status.size.0));
            Done::Probed {
                file,
                generation,
                key,
                version: status.map_or(0, |status| status.version),
                hint: probe_header(&fd, size),
            }
        }
        Job::GiveBack { shares, left } => Done::GaveBack(give_back(&shares, &left)),
        Job::Look {
            share,
            config,
            known,
        } => {
            let result = look(&share, &config, known);
            Done::Looked { share, result }
        }
        Job::Reload { file, known } => Done::Reloaded(reload(&file, &known).map(Box::new)),
        Job::LoadRuns {
            state_dir,
            file_systems,
        } => Done::RunsLoaded(remembered::load(&state_dir, &file_systems)),
        Job::SaveRuns {
            state_dir,
            file_systems,
            runs,
            changes,
        } => Done::RunsSaved {
            changes,
            result: remembered::save(&state_dir, &runs, &file_systems),
        },
    }
}

/// Vet a client's descriptor. Also returns the share as it is now, if it lies on another mount by
/// now, and the file is there.
fn reopen(
    share: &Share,
    config: &Config,
    fd: &OwnedFd,
    pid: i32,
) -> (Result<PrivateFile, Unserved>, Option<OpenedShare>) {
    let vetted = if share.is_left() {
        // Another mount may have its mount's number by now.
        file::reopen_vetted(fd, &[])
    } else {
        reopen_in(share, fd, pid)
    };
    let Err(Unserved::OtherMount(theirs)) = vetted else {
        return (vetted, None);
    };
    let refused = Err(Unserved::OtherMount(theirs));
    // Reads the table alone: a file system that hangs there is not touched before the file is known
    // to be of the share.
    let now = MountTable::read()
        .ok()
        .and_then(|table| table.over(&share.real));
    let is_there = |now: MountId| now == theirs || same_file_system_elsewhere(pid, theirs, now);
    if !now.is_some_and(|now| (now != share.mount || share.is_left()) && is_there(now)) {
        return (refused, None);
    }
    match open_share(&share.config, config) {
        Ok(moved) => (reopen_in(&moved.0, fd, pid), Some(moved)),
        Err(_) => (refused, None),
    }
}

fn reopen_in(share: &Share, fd: &OwnedFd, pid: i32) -> Result<PrivateFile, Unserved> {
    match file::reopen_vetted(fd, &[share.mount]) {
        Err(Unserved::OtherMount(theirs))
            if same_file_system_elsewhere(pid, theirs, share.mount) =>
        {
            file::reopen_vetted(fd, &[theirs])
        }
        other => other,
    }
}

fn open_share(share: &ShareConfig, config: &Config) -> Result<OpenedShare, ServeError> {
    let opened = Share::open(share)?;
    let calibration = calibration_for(&config.state_dir, &opened);
    Ok(Box::new((opened, calibration)))
}

fn look(
    share: &ShareConfig,
    config: &Config,
    known: Option<Place>,
) -> Result<Option<OpenedShare>, ServeError> {
    let is_same = known.is_some() && place_of(&share.path).ok() == known;
    (!is_same).then(|| open_share(share, config)).transpose()
}

/// Large reservations of one file system are made one by one: at the same time they would take
/// turns at the same free space, and get many small extents.
fn turn_of(st_dev: u64) -> Arc<Mutex<()>> {
    static TURNS: Mutex<BTreeMap<u64, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    turns.entry(st_dev).or_default().clone()
}

fn do_chore(fd: &OwnedFd, writer: Writer, chore: Chore) -> io::Result<Vec<Extent>> {
    match chore {
        Chore::Reserve { needed, wished_end } => {
            let who = (writer.uid, writer.gid);
            let turn = turn_of(file::status(fd)?.key.device);
            // A reservation of no more than a write needs is made at once: a small file does not
            // wait for another file's gigabyte.
            let _turn = (wished_end > needed.end())
                .then(|| turn.lock().unwrap_or_else(PoisonError::into_inner));
            match space::reserve(fd, needed, wished_end, who, WRITTEN_EXTENT_COUNT_MAX) {
                // No extents: clients then write the file past the daemon.
                Err(error)
                    if error.raw_os_error()
                        == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) =>
                {
                    Ok(Vec::new())
                }
                other => other,
            }
        }
        Chore::Trim { size } => space::trim(fd, size).map(|()| Vec::new()),
        Chore::Settle {
            changed_ns: TIME_IS_SET,
        } => Ok(Vec::new()),
        Chore::Settle { changed_ns } => space::set_modified(fd, changed_ns).map(|()| Vec::new()),
    }
}

/// Our own descriptors for writing, if the file can be written through a lane.
fn writable(fd: &OwnedFd, file: &PrivateFile, writer: Writer) -> Looked {
    let key = file.status.key;
    let opened = match space::open_writing(fd, key) {
        Ok(Ok(opened)) => opened,
        Ok(Err(why)) => {
            tracing::debug!("clients write a file past the daemon: {why:?}");
            return Looked::Refused;
        }
        Err(error) => {
            tracing::debug!("clients write a file past the daemon: {error}");
            return Looked::Not;
        }
    };
    match durable(fd, key, writer) {
        Some(durable) => Looked::Writable(Box::new((Ok(opened), durable))),
        None => Looked::Refused,
    }
}

fn durable(fd: &OwnedFd, key: FileKey, writer: Writer) -> Option<Durable> {
    let handle = handle_of(fd).ok()?;
    let (kind, handle) = handle.split_first_chunk::<4>()?;
    Some(Durable {
        key,
        file_system: space::file_system_id(fd).ok()?,
        handle_kind: i32::from_ne_bytes(*kind),
        handle: handle.into(),
        writer,
    })
}

fn neighbour(share: &Share, path: &str, key: FileKey, name: &str) -> Result<OpenedFile, Unserved> {
    if name.is_empty() || name == "." || name == ".." || name.contains('/') {
        return Err(Unserved::Failed(std::io::ErrorKind::InvalidInput.into()));
    }
    let folder = share.folder_of(path, key)?;
    found(file::open_beneath(&folder, Path::new(name))?)
}

fn found(file: PrivateFile) -> Result<OpenedFile, Unserved> {
    // The core reads whole pages; a file with a larger alignment would refuse every read.
    let step = file.status.direct_alignment.map_or(0, |align| align.offset);
    if file.direct && u64::from(step) > PAGE_BYTES {
        return Err(Unserved::Failed(std::io::Error::new(
            std::io::ErrorKind::Unsupported,
            format!(
                "its direct I/O needs multiples of {step} bytes; expected at most {PAGE_BYTES}"
            ),
        )));
    }
    let extents = extents::of(&*file.fd, EXTENT_COUNT_MAX)
        .map(|map| map.extents)
        .unwrap_or_default();
    Ok(OpenedFile {
        looked: Looked::Not,
        file,
        extents,
    })
}

/// The rate that a container's header gives. None: it gives none, or cannot be read; then the
/// cadence counts.
fn probe_header(fd: &OwnedFd, size: u64) -> Option<RateHint> {
    // Opened again: our own descriptor is for direct I/O, which needs aligned memory.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let mut file = std::fs::File::open(path).ok()?;
    // A header takes small reads in two or three places: read-ahead would disturb the streams.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    match rushes_header::probe(&mut file, size) {
        Ok(Some(facts)) => Some(RateHint::Rate(facts.bytes_per_second, RateSource::Header)),
        Ok(None) => None,
        Err(error) => {
            tracing::debug!("a header gives no rate: {error}");
            None
        }
    }
}

/// Whether a file's name is that of a container whose header gives its rate.
pub(crate) fn is_container(path: &str) -> bool {
    const ENDINGS: &[&str] = &[
        "mov", "qt", "mp4", "m4v", "m4a", "mxf", "avi", "wav", "bwf", "rf64",
    ];
    Path::new(path)
        .extension()
        .and_then(|ending| ending.to_str())
        .is_some_and(|ending| {
            ENDINGS
                .iter()
                .any(|known| known.eq_ignore_ascii_case(ending))
        })
}

/// The calibration of a share's device, if there is one. An invalid one is logged and ignored. Does
/// not wait for the share.
pub(crate) fn calibration_for(state_dir: &Path, share: &Share) -> Option<Calibration> {
    let loaded = Calibration::load_for(state_dir, share.identity.as_ref()?);
    loaded.unwrap_or_else(|error| {
        tracing::warn!(
            "the calibration of share {:?} is ignored: {error}",
            share.config.name
        );
        None
    })
}

fn reload(file: &Path, known: &[Arc<Share>]) -> Result<Reloaded, ConfigError> {
    let config = Config::load(file)?;
    let table = MountTable::read().ok();
    // By the table alone: a share that hangs must not stop a reload.
    let is_as_it_was = |known: &Share| {
        let now = table.as_ref().and_then(|table| table.over(&known.real));
        now.is_none_or(|now| now == known.mount && !known.is_left())
    };
    let mut shares = Vec::new();
    for share in &config.shares {
        let mut all = known.iter();
        let served = all.find(|k| k.config.name.eq_ignore_ascii_case(&share.name));
        let result = match served {
            Some(served) if is_as_it_was(served) => continue,
            // A new path counts from the next start.
            Some(served) => open_share(&served.config, &config),
            None => open_share(share, &config),
        };
        shares.push((share.clone(), result));
    }
    let measured = known.iter().filter_map(|share| {
        let calibration = calibration_for(&config.state_dir, share)?;
        Some((share.clone(), calibration.model()))
    });
    let measured = measured.collect();
    Ok(Reloaded {
        config,
        shares,
        measured,
    })
}
