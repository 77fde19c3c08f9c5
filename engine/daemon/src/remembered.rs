// SPDX-License-Identifier: Apache-2.0
//! The file that keeps the memory of rehearsal from one daemon to the next (decision 0051).
//!
//! Two lines of JSON: the version with a checksum of the second line, and the runs, oldest first.
//! Device numbers change from boot to boot, so a file system is written as its share's identity is,
//! by its UUID. The file holds which user has played which stretch, so only its owner may read it.

use crate::calibrate::Identity;
use crate::event_loop::Daemon;
use crate::jobs::Job;
use crate::share::ServedShare;
use crate::worker::Urgency;
use rushes_core::pool::layout::crc32c;
use rushes_core::server::{Event, FileKey, RememberedRun, RunPlace, ShareUser};
use rushes_core::units::{BytesPerSecond, Duration, Instant};
use rushes_sys::clock;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Its name in the state folder.
const FILE_NAME: &str = "rehearsal.json";
/// Version of the file format. 1: first.
const VERSION: u32 = 1;
/// A longer file was not written by a daemon: all runs that are remembered have half of it. Units:
/// bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// How often a memory that changes is written.
const SAVE_EVERY: Duration = Duration::from_s(60);
/// A stop waits at most so long for the last save.
const SAVE_MAX: Duration = Duration::from_s(5);

/// The loop's part of it.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    /// The file of an earlier daemon was read, or cannot be.
    is_read: bool,
    /// A worker reads or writes the file.
    is_busy: bool,
    /// The server's count of changes that the file has.
    saved: u64,
    /// When to write it next.
    save_at: Instant,
    /// While the daemon stops: the last save was started, and until when to wait for it.
    saved_at_end: bool,
    end: Option<Instant>,
}

/// A file system that is served now.
#[derive(Clone, Debug)]
pub(crate) struct FileSystem {
    mark: Mark,
    st_dev: u64,
}

/// The marks of a file system in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// A share on it. Of several with one UUID, such as subvolumes, it tells which.
    share: String,
    identity: Identity,
}

#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Of the line behind it, without its end.
    crc32c: u32,
}

#[derive(Serialize, Deserialize)]
struct Body {
    file_systems: Vec<Mark>,
    /// Share and name.
    users: Vec<(String, String)>,
    runs: Vec<Run>,
}

/// User, place, length, rate, next place. User and file system are indices.
#[derive(Serialize, Deserialize)]
struct Run(u32, Place, u64, u64, Option<Place>);

/// File system, inode, first byte.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Place(u32, u64, u64);

/// Why the file is not used. The sentence has no path.
#[derive(Debug)]
enum Fault {
    Read(io::Error),
    NoFile,
    TooLarge,
    Version(u32),
    Head(serde_json::Error),
    Checksum,
    Body(serde_json::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Read(error) => write!(f, "it cannot be read: {error}"),
            Fault::NoFile => f.write_str("found no regular file, expected one"),
            Fault::TooLarge => write!(
                f,
                "found more than {FILE_BYTES_MAX} bytes, expected no more"
            ),
            Fault::Version(found) => write!(f, "found version {found}, expected {VERSION}"),
            Fault::Head(error) => write!(
                f,
                "its first line is damaged ({error}), expected a version and a checksum"
            ),
            Fault::Checksum => f.write_str(
                "its checksum is that of other bytes, expected a file as a daemon wrote it",
            ),
            Fault::Body(error) => write!(
                f,
                "its second line is damaged ({error}), expected runs of users"
            ),
        }
    }
}

/// The file systems of these shares, each once.
fn file_systems_of(shares: &[Arc<ServedShare>]) -> Vec<FileSystem> {
    let mut found: Vec<FileSystem> = Vec::new();
    for served in shares {
        let share = &served.share;
        let is_new = !found.iter().any(|known| known.st_dev == share.st_dev);
        if let Some(identity) = share.identity.clone().filter(|_| is_new) {
            let mark = Mark {
                share: share.config.name.clone(),
                identity,
            };
            found.push(FileSystem {
                mark,
                st_dev: share.st_dev,
            });
        }
    }
    found
}

/// The number of a file system now. None: it is not there.
fn st_dev_of(mark: &Mark, now: &[FileSystem]) -> Option<u64> {
    let mut same = now
        .iter()
        .filter(|known| known.mark.identity.is(&mark.identity));
    let named = same.clone().find(|known| known.mark.share == mark.share);
    named.or_else(|| same.next()).map(|known| known.st_dev)
}

fn path_in(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE_NAME)
}

fn encode(runs: &[RememberedRun], now: &[FileSystem]) -> serde_json::Result<Vec<u8>> {
    let place_of = |place: RunPlace| {
        let at = |known: &FileSystem| known.st_dev == place.file.device;
        let index = u32::try_from(now.iter().position(at)?).ok()?;
        Some(Place(index, place.file.inode, place.start))
    };
    let mut users = Vec::new();
    let mut numbers: HashMap<&ShareUser, u32> = HashMap::new();
    let mut written = Vec::new();
    for run in runs {
        let Some(place) = place_of(run.place) else {
            continue;
        };
        let user = *numbers.entry(&run.user).or_insert_with(|| {
            users.push((run.user.share.clone(), run.user.user.clone()));
            users.len() as u32 - 1
        });
        let next = run.next.and_then(place_of);
        written.push(Run(user, place, run.length, run.rate.0, next));
    }
    let body = serde_json::to_vec(&Body {
        file_systems: now.iter().map(|known| known.mark.clone()).collect(),
        users,
        runs: written,
    })?;
    let mut text = serde_json::to_vec(&Head {
        version: VERSION,
        crc32c: crc32c(&body),
    })?;
    text.push(b'\n');
    text.extend(body);
    text.push(b'\n');
    Ok(text)
}

fn decode(text: &[u8], now: &[FileSystem]) -> Result<Vec<RememberedRun>, Fault> {
    #[derive(Deserialize)]
    struct AnyHead {
        version: u32,
    }
    let end = text.iter().position(|&byte| byte == b'\n');
    let (head, rest) = text.split_at(end.unwrap_or(text.len()));
    // Another version may have another head.
    let any: AnyHead = serde_json::from_slice(head).map_err(Fault::Head)?;
    if any.version != VERSION {
        return Err(Fault::Version(any.version));
    }
    let head: Head = serde_json::from_slice(head).map_err(Fault::Head)?;
    let body = rest.strip_prefix(b"\n").unwrap_or(rest);
    let body = body.strip_suffix(b"\n").ok_or(Fault::Checksum)?;
    if crc32c(body) != head.crc32c {
        return Err(Fault::Checksum);
    }
    let body: Body = serde_json::from_slice(body).map_err(Fault::Body)?;
    let marks = body.file_systems.iter();
    let devices: Vec<Option<u64>> = marks.map(|mark| st_dev_of(mark, now)).collect();
    let place_of = |Place(index, inode, start): Place| {
        let device = devices.get(index as usize).copied().flatten()?;
        let file = FileKey { device, inode };
        Some(RunPlace { file, start })
    };
    let users = body.users.into_iter();
    let users: Vec<Arc<ShareUser>> = users
        .map(|(share, user)| Arc::new(ShareUser { share, user }))
        .collect();
    let run_of = |Run(user, place, length, rate, next): Run| {
        Some(RememberedRun {
            user: users.get(user as usize)?.clone(),
            place: place_of(place)?,
            length,
            rate: BytesPerSecond(rate),
            next: next.and_then(place_of),
        })
    };
    Ok(body.runs.into_iter().filter_map(run_of).collect())
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Fault> {
    // A pipe of this name must not keep the worker.
    let no_wait = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(no_wait)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Fault::Read(error)),
    };
    if !file.metadata().map_err(Fault::Read)?.is_file() {
        return Err(Fault::NoFile);
    }
    let mut text = Vec::new();
    let mut bounded = file.take(FILE_BYTES_MAX + 1);
    bounded.read_to_end(&mut text).map_err(Fault::Read)?;
    match text.len() as u64 > FILE_BYTES_MAX {
        true => Err(Fault::TooLarge),
        false => Ok(Some(text)),
    }
}

/// The runs that the file in `state_dir` has of file systems that are there now. Waits for the
/// disk.
///
/// Errors   a sentence
pub(crate) fn load(state_dir: &Path, now: &[FileSystem]) -> Result<Vec<RememberedRun>, String> {
    let path = path_in(state_dir);
    let found = read(&path).and_then(|text| match text {
        Some(text) => decode(&text, now),
        None => Ok(Vec::new()),
    });
    found.map_err(|fault| {
        format!(
            "the runs in {} are not used for rehearsal: {fault}; the daemon serves without them, \
             and the next save replaces the file: copy it now to keep it",
            path.display()
        )
    })
}

/// Write the runs of these file systems into the file in `state_dir`. Waits for the disk.
///
/// A reader sees the whole old file or the whole new one.
///
/// Errors   a sentence
pub(crate) fn save(
    state_dir: &Path,
    runs: &[RememberedRun],
    now: &[FileSystem],
) -> Result<(), String> {
    let path = path_in(state_dir);
    let write = || -> io::Result<()> {
        let text = encode(runs, now)?;
        fs::create_dir_all(state_dir)?;
        let new = path.with_extension("json.new");
        // One that a daemon left might have another mode.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let written = write_new(&new, &text).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // On a full disk it would hold the rest of the room.
            let _ = fs::remove_file(&new);
        }
        written
    };
    write().map_err(|error| {
        format!(
            "the runs that rehearsal remembers cannot be saved in {}: {error}; a restart of the \
             daemon forgets them; expected a folder with some MB free that the daemon may write \
             to: make room, or set server.state_dir to another one",
            path.display()
        )
    })
}

fn write_new(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

impl Daemon {
    fn keeps_rehearsal(&self) -> bool {
        !self.only_recovers && self.config.policy.rehearsal
    }

    /// Now and then: read the file of an earlier daemon, or write it anew when the memory has
    /// changed.
    pub(super) fn keep_rehearsal(&mut self, now: Instant) {
        if !self.keeps_rehearsal() || self.keeper.is_busy {
            return;
        }
        if !self.keeper.is_read {
            let job = Job::LoadRuns {
                state_dir: self.config.state_dir.clone(),
                file_systems: file_systems_of(&self.shares),
            };
            self.keeper.is_busy = self.workers.push(Urgency::Ahead, job).is_ok();
        } else if now >= self.keeper.save_at {
            self.save_rehearsal(now);
        }
    }

    fn save_rehearsal(&mut self, now: Instant) {
        let changes = self.server.rehearsal_changes();
        if changes == self.keeper.saved {
            return;
        }
        let job = Job::SaveRuns {
            state_dir: self.config.state_dir.clone(),
            file_systems: file_systems_of(&self.shares),
            runs: self.server.remembered(),
            changes,
        };
        self.keeper.is_busy = self.workers.push(Urgency::Later, job).is_ok();
        self.keeper.save_at = now + SAVE_EVERY;
    }

    pub(super) fn runs_loaded(&mut self, result: Result<Vec<RememberedRun>, String>) {
        self.keeper.is_busy = false;
        self.keeper.is_read = true;
        self.keeper.save_at = clock::now() + SAVE_EVERY;
        match result {
            Ok(runs) if runs.is_empty() => {}
            Ok(runs) => {
                tracing::info!("{} runs are remembered from before", runs.len());
                let had_none = self.server.rehearsal_changes() == 0;
                self.feed(Event::Remembered(runs));
                if had_none {
                    self.keeper.saved = self.server.rehearsal_changes();
                }
            }
            Err(sentence) => tracing::warn!("{sentence}"),
        }
    }

    /// `changes`  those that the written memory had
    pub(super) fn runs_saved(&mut self, changes: u64, result: Result<(), String>) {
        self.keeper.is_busy = false;
        match result {
            Ok(()) => self.keeper.saved = changes,
            Err(sentence) => self.say_once(sentence),
        }
    }

    /// Write the file once more before we end. True: that is under way.
    pub(super) fn save_at_end(&mut self) -> bool {
        let now = clock::now();
        let end = *self.keeper.end.get_or_insert(now + SAVE_MAX);
        let may_save = self.keeps_rehearsal() && self.keeper.is_read && !self.keeper.is_busy;
        if may_save && !std::mem::replace(&mut self.keeper.saved_at_end, true) {
            self.save_rehearsal(now);
        }
        self.keeper.is_busy && now < end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::Folder;
    use std::os::unix::fs::PermissionsExt;

    fn file_system(share: &str, uuid: &str, st_dev: u64) -> FileSystem {
        FileSystem {
            mark: Mark {
                share: share.into(),
                identity: Identity {
                    uuid: Some(uuid.into()),
                    device: format!("8:{st_dev}"),
                    disk: "sda".into(),
                    bytes: 100,
                },
            },
            st_dev,
        }
    }

    fn place(device: u64, inode: u64, start: u64) -> RunPlace {
        let file = FileKey { device, inode };
        RunPlace { file, start }
    }

    fn run(user: &str, place: RunPlace, next: Option<RunPlace>) -> RememberedRun {
        RememberedRun {
            user: Arc::new(ShareUser {
                share: "media".into(),
                user: user.into(),
            }),
            place,
            length: 5_000_000,
            rate: BytesPerSecond(12_500_000),
            next,
        }
    }

    /// Runs of two users on a file system.
    fn runs_on(device: u64) -> Vec<RememberedRun> {
        vec![
            run("ana", place(device, 7, 12_345), None),
            run(
                "ben \"1\"\n",
                place(device, u64::MAX, 0),
                Some(place(device, 7, 9)),
            ),
            run("ana", place(device, 8, 0), Some(place(device, 7, 12_345))),
        ]
    }

    /// A folder with a saved file, and the file.
    fn saved() -> (Folder, PathBuf) {
        let folder = Folder::new();
        save(&folder.0, &runs_on(1), &[file_system("media", "a", 1)]).unwrap();
        let path = path_in(&folder.0);
        (folder, path)
    }

    fn fault(folder: &Folder) -> String {
        load(&folder.0, &[file_system("media", "a", 1)]).unwrap_err()
    }

    #[test]
    fn saved_runs_are_loaded_in_their_order() {
        let (folder, path) = saved();
        let now = [file_system("media", "a", 1)];
        assert_eq!(load(&folder.0, &now), Ok(runs_on(1)));
        let mode = fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn folder_is_made_and_a_file_is_replaced() {
        let folder = Folder::new();
        let state_dir = folder.0.join("a/b");
        let now = [file_system("media", "a", 1)];
        assert_eq!(load(&state_dir, &now), Ok(Vec::new()));
        fs::create_dir_all(&state_dir).unwrap();
        // A daemon was killed while it wrote.
        fs::write(state_dir.join("rehearsal.json.new"), "{").unwrap();
        for count in [3, 1] {
            save(&state_dir, &runs_on(1)[..count], &now).unwrap();
            assert_eq!(load(&state_dir, &now).unwrap().len(), count);
        }
    }

    #[test]
    fn file_system_is_found_under_another_device_number() {
        let (folder, _) = saved();
        let now = [file_system("other", "b", 1), file_system("media", "a", 44)];
        assert_eq!(load(&folder.0, &now), Ok(runs_on(44)));
        let renamed = [file_system("films", "a", 45)];
        assert_eq!(load(&folder.0, &renamed), Ok(runs_on(45)));
        let elsewhere = [file_system("media", "b", 1)];
        assert_eq!(load(&folder.0, &elsewhere), Ok(Vec::new()));
    }

    #[test]
    fn shares_with_one_uuid_are_told_apart_by_their_names() {
        let folder = Folder::new();
        let before = [file_system("media", "a", 1), file_system("sound", "a", 2)];
        let runs = vec![
            run("ana", place(1, 7, 0), Some(place(2, 7, 0))),
            run("ana", place(2, 7, 0), Some(place(3, 7, 0))),
            run("ana", place(3, 7, 0), None),
        ];
        save(&folder.0, &runs, &before).unwrap();
        let now = [file_system("sound", "a", 5), file_system("media", "a", 6)];
        let expected = vec![
            run("ana", place(6, 7, 0), Some(place(5, 7, 0))),
            run("ana", place(5, 7, 0), None),
        ];
        assert_eq!(load(&folder.0, &now), Ok(expected));
    }

    #[test]
    fn damaged_file_is_refused_with_a_reason() {
        let (folder, path) = saved();
        let text = fs::read(&path).unwrap();
        for length in 0..text.len() {
            fs::write(&path, &text[..length]).unwrap();
            fault(&folder);
        }
        for at in 0..text.len() {
            let mut damaged = text.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            fault(&folder);
        }
        fs::write(&path, [&text[..], b"more\n"].concat()).unwrap();
        let sentence = fault(&folder);
        assert!(sentence.contains("checksum") && sentence.contains("rehearsal.json"));
        // And it is replaced.
        let now = [file_system("media", "a", 1)];
        save(&folder.0, &runs_on(1), &now).unwrap();
        assert_eq!(load(&folder.0, &now), Ok(runs_on(1)));
    }

    #[test]
    fn indices_beyond_the_lists_are_no_runs() {
        let (folder, path) = saved();
        let body = br#"{"file_systems":[],"users":[],"runs":[[0,[0,1,2],3,4,null]]}"#;
        let head = format!("{{\"version\":1,\"crc32c\":{}}}\n", crc32c(body));
        fs::write(&path, [head.as_bytes(), body, b"\n"].concat()).unwrap();
        let now = [file_system("media", "a", 1)];
        assert_eq!(load(&folder.0, &now), Ok(Vec::new()));
    }

    #[test]
    fn file_of_another_kind_is_refused_with_a_reason() {
        let (folder, path) = saved();
        fs::write(&path, "{\"version\":2,\"sum\":\"x\"}\n").unwrap();
        let sentence = fault(&folder);
        assert!(
            sentence.contains("found version 2, expected 1"),
            "{sentence}"
        );
        let large = File::create(&path).unwrap();
        large.set_len(FILE_BYTES_MAX + 1).unwrap();
        assert!(fault(&folder).contains("more than 16777216 bytes"));
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert!(fault(&folder).contains("no regular file"));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        assert!(fault(&folder).contains("cannot be read"));
    }

    #[test]
    fn folder_that_cannot_be_written_to_is_named() {
        let folder = Folder::new();
        let state_dir = folder.0.join("file");
        fs::write(&state_dir, "x").unwrap();
        let now = [file_system("media", "a", 1)];
        let sentence = save(&state_dir, &runs_on(1), &now).unwrap_err();
        assert!(sentence.contains("file/rehearsal.json"), "{sentence}");
    }

    #[test]
    fn all_runs_that_a_server_remembers_fit_the_file() {
        let longest = u64::MAX;
        let far = Some(place(1, longest, longest));
        let runs: Vec<RememberedRun> = (0..32_768)
            .map(|number| RememberedRun {
                length: longest,
                rate: BytesPerSecond(longest),
                ..run(
                    &format!("{:0>4096}", number % 64),
                    place(1, longest, longest),
                    far,
                )
            })
            .collect();
        let text = encode(&runs, &[file_system("media", "a", 1)]).unwrap();
        assert!((text.len() as u64) < FILE_BYTES_MAX / 2, "{}", text.len());
    }
}
