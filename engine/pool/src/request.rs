// SPDX-License-Identifier: Apache-2.0
//! Requests of a command to the door that has the pool, and the door's answers: one JSON object a
//! line, over a socket in the catalogue's folder.
//!
//! The socket lies beside the lock that the door holds: a program that knows the catalogue finds
//! it, and the door deletes it when it ends. The door answers a request by any number of lines with
//! its progress, and a last one. If a command closes the connection before that, the door stops
//! where nothing is lost, and the same request goes on there. Both ends are of one version; nothing
//! of this is kept on a disk.

use crate::catalogue::SOCKET;
use crate::change::Drained;
use crate::error::PoolError;
use crate::failed::Failed;
use crate::gather::Defragged;
use crate::refusal::{WorkRefusal, refused};
use rushes_sys::socket::peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use serde::{Deserialize, Serialize};
use std::fs::Permissions;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest request. Units: bytes.
const REQUEST_BYTES_MAX: u64 = 4 << 20;
/// A peer that neither reads nor writes anything for so long is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// A request to the door.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Add folders as further members.
    Add {
        /// Absolute paths.
        members: Vec<PathBuf>,
        /// Their class, as [`crate::Class::of`] reads it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        class: Option<String>,
    },
    /// Set the classes of members.
    Classes {
        /// Numbers, each with its class; None: of none.
        classes: Vec<(u16, Option<String>)>,
    },
    /// Drain a member.
    Drain {
        /// Its number.
        member: u16,
        /// End the drain: it takes new bytes again.
        cancel: bool,
    },
    /// Remove a member.
    Remove {
        /// Its number.
        member: u16,
        /// It is missing, and given up with its bytes; else only one that has no bytes goes.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        lost: bool,
    },
    /// Make members equally full, and stripes as wide as they can be.
    Rebalance {},
    /// Bring files together that are in more segments and extents than need be.
    Defrag {
        /// Files and folders, below the tree; all if there are none.
        paths: Vec<PathBuf>,
    },
    /// Set when the pool tidies itself.
    Tidy {
        /// As [`crate::Schedule::of`] reads it.
        schedule: String,
    },
    /// Return the work that is under way.
    Status {},
}

/// An answer of the door.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum Told {
    /// So many members are in; not the last line.
    Added {
        /// How many.
        count: u64,
    },
    /// The progress; not the last line.
    Moved {
        /// How far.
        now: Drained,
    },
    /// It is done, as far as it can be.
    Done {
        /// Of new members.
        numbers: Vec<u16>,
        /// All moves together.
        all: Drained,
        /// Of a drain: nothing is left.
        is_empty: bool,
        /// Of a defrag.
        defragged: Defragged,
        /// Of a rebalance or a defrag.
        failed: Failed,
    },
    /// To [`Request::Status`].
    Status {
        /// None: nothing is.
        work: Option<Work>,
        /// Why the pool does not tidy itself at this moment, as a word; None: it does.
        tidying_waits: Option<String>,
        /// None from a mount that is older than this program.
        #[serde(default)]
        mount: Option<MountState>,
        /// Members whose devices fail, each with the error.
        #[serde(default)]
        failing: Vec<(u16, String)>,
    },
    /// It was not done.
    Refused {
        /// A sentence with the finding, the expectation and the remedy.
        sentence: String,
    },
}

/// How a mount is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountState {
    /// The process that serves is replaced when it dies.
    pub has_keeper: bool,
    /// The kernel may read files without a writer straight from their objects.
    pub can_pass: bool,
    /// Opens that it reads so at this moment.
    pub passed_open_count: u64,
}

/// The status that a mount reports of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DoorStatus {
    /// The work that is under way there.
    pub work: Option<Work>,
    /// Why the pool does not tidy itself, as a word; None: it does.
    pub tidying_waits: Option<String>,
    /// None: it does not say.
    pub mount: Option<MountState>,
    /// Numbers of members whose devices fail, each with the error.
    pub failing: Vec<(u16, String)>,
}

/// The kinds of work that can be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkKind {
    /// [`Request::Add`]
    Add,
    /// [`Request::Drain`]
    Drain,
    /// [`Request::Remove`]
    Remove,
    /// [`Request::Rebalance`]
    Rebalance,
    /// [`Request::Defrag`]
    Defrag,
}

/// The work that is under way, and how far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Its kind.
    pub kind: WorkKind,
    /// Which member it is about.
    pub member: Option<u16>,
    /// No command asked for it: the pool tidies itself.
    pub is_tidying: bool,
    /// How far.
    pub done: Drained,
    /// Since when. Units: seconds.
    pub running_s: u64,
}

impl WorkKind {
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            WorkKind::Add => "add",
            WorkKind::Drain => "drain",
            WorkKind::Remove => "remove",
            WorkKind::Rebalance => "rebalance",
            WorkKind::Defrag => "defrag",
        }
    }
}

fn line_of(message: &impl Serialize) -> io::Result<String> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    Ok(line)
}

/// By the folder's descriptor: an address has room for 107 bytes, a path for more.
fn address(folder: BorrowedFd<'_>, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))
}

fn folder_of(catalogue: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(open(catalogue, flags, Mode::empty())?)
}

/// The door that has a pool, as a command sees it.
#[derive(Debug)]
pub struct Door(BufReader<UnixStream>);

impl Door {
    /// The one that has the pool of this catalogue. None: no mount has it, though another process
    /// may.
    pub fn of(catalogue: &Path) -> Option<Door> {
        let folder = folder_of(catalogue).ok()?;
        let stream = UnixStream::connect(address(folder.as_fd(), SOCKET)).ok()?;
        Some(Door(BufReader::new(stream)))
    }

    /// Ask, and wait until it is done.
    ///
    /// `told`   gets each line but the last one
    /// Returns  the last one
    /// Errors   [`PoolError::Refused`]: the door refused it, or the door is gone
    pub fn ask(mut self, request: &Request, mut told: impl FnMut(Told)) -> Result<Told, PoolError> {
        let gone = |error: io::Error| PoolError::from(WorkRefusal::MountGone { error });
        let line = line_of(request).map_err(|error| WorkRefusal::Unsaid { error })?;
        self.0.get_mut().write_all(line.as_bytes()).map_err(gone)?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).map_err(gone)? == 0 {
                return Err(gone(ErrorKind::UnexpectedEof.into()));
            }
            let answer =
                serde_json::from_str(&line).map_err(|error| WorkRefusal::Misunderstood {
                    answer: line.trim().to_owned(),
                    error,
                })?;
            match answer {
                Told::Refused { sentence } => return refused(WorkRefusal::ByMount { sentence }),
                Told::Done { .. } | Told::Status { .. } => return Ok(answer),
                Told::Added { .. } | Told::Moved { .. } => told(answer),
            }
        }
    }

    /// None: no answer within a few seconds.
    pub fn status(self) -> Option<DoorStatus> {
        self.0.get_ref().set_read_timeout(Some(PATIENCE)).ok()?;
        match self.ask(&Request::Status {}, |_| {}) {
            Ok(Told::Status {
                work,
                tidying_waits,
                mount,
                failing,
            }) => Some(DoorStatus {
                work,
                tidying_waits,
                mount,
                failing,
            }),
            _ => None,
        }
    }
}

/// The door's end.
#[derive(Debug)]
pub struct Listener {
    folder: OwnedFd,
    socket: UnixListener,
}

impl Listener {
    /// Listen beside the catalogue's lock, for root alone.
    ///
    /// Assumes  the caller holds that lock: a socket that is there is a dead door's
    pub fn new(catalogue: &Path) -> io::Result<Listener> {
        let folder = folder_of(catalogue)?;
        let (new, name) = (format!("{SOCKET}.new"), address(folder.as_fd(), SOCKET));
        let new = address(folder.as_fd(), &new);
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixListener::bind(&new)?;
        std::fs::set_permissions(&new, Permissions::from_mode(0o600))?;
        std::fs::rename(&new, &name)?;
        socket.set_nonblocking(true)?;
        Ok(Listener { folder, socket })
    }

    /// The next asker. None: none waits, or one that is not root.
    pub fn accept(&self) -> io::Result<Option<Asked>> {
        let stream = match self.socket.accept() {
            Ok((stream, _)) => stream,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if peer(&stream)?.uid != 0 {
            return Ok(None);
        }
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Some(Asked(BufReader::new(stream))))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(address(self.folder.as_fd(), SOCKET));
    }
}

/// Whether an asker still waits, for other threads to see.
#[derive(Debug)]
pub struct Asker(UnixStream);

impl Asker {
    /// It has closed the connection, and no longer wants the work that it asked for.
    pub fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::RDHUP)];
        // If the poll fails, the asker counts as waiting.
        let polled = poll(&mut fds, Some(&Timespec::default()));
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        polled.is_ok() && fds[0].revents().intersects(gone)
    }
}

/// A command that asks the door.
#[derive(Debug)]
pub struct Asked(BufReader<UnixStream>);

impl Asked {
    /// The asker, for other threads to see. None: there is no descriptor left for that.
    pub fn asker(&self) -> Option<Asker> {
        self.0.get_ref().try_clone().map(Asker).ok()
    }

    /// The asker's request.
    ///
    /// Errors   a sentence for the asker
    pub fn request(&mut self) -> Result<Request, String> {
        let mut line = String::new();
        let read = (&mut self.0).take(REQUEST_BYTES_MAX).read_line(&mut line);
        read.map_err(|error| error.to_string())?;
        serde_json::from_str(&line).map_err(|error| {
            format!("this is nothing that a mount can be asked: {error}; are both of one version?")
        })
    }

    /// Send the asker an answer.
    ///
    /// Returns  false: it is gone
    pub fn tell(&mut self, told: &Told) -> bool {
        let line = line_of(told);
        line.is_ok_and(|line| self.0.get_mut().write_all(line.as_bytes()).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("rushes-pool-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_command_hears_how_far_it_is_and_the_end_and_the_socket_goes_with_the_door() {
        let catalogue = folder("request");
        assert!(Door::of(&catalogue).is_none(), "nobody listens");
        let listener = Listener::new(&catalogue).unwrap();
        let mode = std::fs::metadata(catalogue.join(SOCKET))
            .unwrap()
            .permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let door = Door::of(&catalogue).unwrap();
        let now = Drained {
            file_count: 3,
            moved_count: 1,
            moved_bytes: 5,
        };
        let answer = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let mut heard = Vec::new();
                let request = Request::Drain {
                    member: 7,
                    cancel: false,
                };
                let done = door.ask(&request, |told| heard.push(told));
                (heard, done)
            });
            // The socket is root's alone, and in this test, too.
            if let Ok(Some(mut asked)) = listener.accept() {
                let request = asked.request().unwrap();
                assert_eq!(
                    request,
                    Request::Drain {
                        member: 7,
                        cancel: false
                    }
                );
                assert!(asked.tell(&Told::Moved { now }));
                assert!(asked.tell(&Told::Refused {
                    sentence: String::from("no")
                }));
            }
            asking.join().unwrap()
        });
        let is_root = rustix::process::geteuid().is_root();
        match answer.1 {
            Err(error) if is_root => {
                assert!(matches!(error, PoolError::Refused(_)), "{error:?}");
                assert_eq!(
                    (answer.0, error.to_string().as_str()),
                    (vec![Told::Moved { now }], "no")
                );
            }
            Err(error) => assert!(error.to_string().contains("does not answer")),
            other => panic!("{other:?}"),
        }
        // A door that was killed leaves its socket; the next one takes its place.
        let next = Listener::new(&catalogue).unwrap();
        assert!(Door::of(&catalogue).is_some());
        drop(next);
        assert!(Door::of(&catalogue).is_none());
        drop(listener);
        std::fs::remove_dir_all(&catalogue).unwrap();
    }

    #[test]
    fn who_has_hung_up_is_seen_to_be_gone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let asker = Asked(BufReader::new(ours)).asker().unwrap();
        assert!(!asker.is_gone());
        drop(theirs);
        assert!(asker.is_gone());
    }

    #[test]
    fn what_is_no_request_gets_a_sentence() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut theirs = theirs;
        theirs.write_all(b"{\"ask\":\"dance\"}\n").unwrap();
        let error = Asked(BufReader::new(ours)).request().unwrap_err();
        assert!(error.contains("unknown variant `dance`"), "{error}");
    }
}
