// SPDX-License-Identifier: Apache-2.0
//! The control and metrics sockets: a few threads that take questions to the loop and its answers
//! back.
//!
//! A slow peer must not stop the loop: these threads read, parse and write, each with a time limit;
//! the loop gets whole questions only, through a bounded channel.

use crate::calibrate::{Calibration, Identity};
use crate::error::ServeError;
use crate::metrics;
use crate::process;
use crate::runtime_dir::{Purpose, RuntimeDir};
use rushes_control::{ASK_BYTES_MAX, Answer, Ask, line_of, parse_ask};
use rushes_sys::bell;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Conversations at a time; more are closed at once.
const CONVERSATION_COUNT_MAX: usize = 32;
/// Questions that wait for the loop.
const QUESTION_COUNT_MAX: usize = 64;
/// How long the loop may take to answer; it takes milliseconds.
const LOOP_PATIENCE: Duration = Duration::from_secs(5);
/// How long an asker may be silent on an open connection.
const ASKER_PATIENCE: Duration = Duration::from_secs(60);
/// How long a scraper may take over its request.
const SCRAPER_PATIENCE: Duration = Duration::from_secs(5);
/// Longest HTTP request head of a scraper.
const HTTP_BYTES_MAX: u64 = 8 << 10;
const STACK_BYTES: usize = 256 << 10;

/// A question on its way to the loop.
pub(crate) struct Question {
    pub(crate) ask: Ask,
    pub(crate) answer: SyncSender<Answer>,
}

/// A device whose model is a guess, and the facts that tell whether it was measured since.
#[derive(Clone, Debug)]
pub(crate) struct Guess {
    pub(crate) device: String,
    /// A share on it.
    pub(crate) path: PathBuf,
    pub(crate) identity: Option<Identity>,
    /// Where calibrations are kept.
    pub(crate) state_dir: PathBuf,
}

impl Guess {
    /// Says that its model is a guess, and the remedy. Reads a file, so the loop must not call it.
    pub(crate) fn sentence(&self) -> String {
        let (device, path) = (&self.device, self.path.display());
        let identity = self.identity.as_ref();
        let found = identity.map(|identity| Calibration::load_for(&self.state_dir, identity));
        match found {
            Some(Ok(Some(measured))) => format!(
                "{device} was measured on {}, after the daemon had read its calibrations, so \
                 contracts still rest on a cautious guess; run `systemctl reload rushes` to use \
                 the measurement",
                measured.measured_at
            ),
            Some(Err(error)) => format!(
                "the measurement of {device} cannot be read, and its model is a cautious guess: {error}; measure it again with: \
                 rushes calibrate {path} --save"
            ),
            Some(Ok(None)) | None => unmeasured(device, &path),
        }
    }
}

/// The sentence for a device without a measurement.
pub(crate) fn unmeasured(device: &str, path: &impl std::fmt::Display) -> String {
    format!(
        "{device} was never measured, its model is a cautious guess; measure it with: rushes calibrate {path} --save"
    )
}

/// The loop's end: questions, and the bell that rings for them.
pub(crate) struct Desk {
    questions: Receiver<Question>,
    bell: Arc<OwnedFd>,
    guesses: Arc<Mutex<Vec<Guess>>>,
    /// Rung to close the sockets.
    close: Arc<OwnedFd>,
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = bell::ring(&*self.close);
    }
}

/// The parts that every conversation holds.
struct Clerk {
    questions: SyncSender<Question>,
    bell: Arc<OwnedFd>,
    conversation_count: AtomicUsize,
    totals: Mutex<metrics::Totals>,
    /// The loop sets it with each status.
    guesses: Arc<Mutex<Vec<Guess>>>,
    /// Its lock file says whether the daemon is still starting.
    runtime_dir: PathBuf,
}

/// Which sockets to open.
pub(crate) struct Addresses<'a> {
    pub(crate) control: &'a Path,
    pub(crate) control_group: Option<u32>,
    pub(crate) metrics: &'a Path,
    pub(crate) metrics_tcp: Option<SocketAddr>,
}

enum Door {
    Control(UnixListener),
    Metrics(UnixListener),
    MetricsTcp(TcpListener),
}

impl Desk {
    /// Open the sockets and start listening.
    pub(crate) fn open(addresses: &Addresses<'_>) -> Result<Desk, ServeError> {
        let mut doors = vec![
            Door::Control(unix(addresses.control, addresses.control_group)?),
            Door::Metrics(unix(addresses.metrics, addresses.control_group)?),
        ];
        if let Some(address) = addresses.metrics_tcp {
            let listener = TcpListener::bind(address)
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .map_err(|source| ServeError::Listen {
                    address: address.to_string(),
                    source,
                })?;
            doors.push(Door::MetricsTcp(listener));
        }
        let (sender, questions) = sync_channel(QUESTION_COUNT_MAX);
        let new_bell = || {
            bell::new()
                .map(Arc::new)
                .map_err(|source| ServeError::Listen {
                    address: String::from("the control desk's doorbell"),
                    source,
                })
        };
        let (bell, close) = (new_bell()?, new_bell()?);
        let closing = close.clone();
        let guesses = Arc::<Mutex<Vec<Guess>>>::default();
        let clerk = Arc::new(Clerk {
            questions: sender,
            bell: bell.clone(),
            conversation_count: AtomicUsize::new(0),
            totals: Mutex::new(metrics::Totals::default()),
            guesses: guesses.clone(),
            runtime_dir: addresses
                .control
                .parent()
                .map(Path::to_path_buf)
                .unwrap_or_default(),
        });
        spawn("rushes-desk", move || listen(&doors, &clerk, &closing)).map_err(|source| {
            ServeError::Listen {
                address: addresses.control.display().to_string(),
                source,
            }
        })?;
        Ok(Desk {
            questions,
            bell,
            guesses,
            close,
        })
    }

    /// Rung when questions wait.
    pub(crate) fn bell(&self) -> &Arc<OwnedFd> {
        &self.bell
    }

    /// With each status: the devices whose model is a guess.
    pub(crate) fn tell_guesses(&self, now: Vec<Guess>) {
        *self.guesses.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// The next question, if one waits.
    pub(crate) fn next(&self) -> Option<Question> {
        self.questions.try_recv().ok()
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name(name.to_string())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}

/// A stream socket of mode 0660. It replaces the socket of a dead daemon; the lock proves that
/// it is dead.
fn unix(path: &Path, group: Option<u32>) -> Result<UnixListener, ServeError> {
    let open = || {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        if let Some(group) = group {
            std::os::unix::fs::chown(path, None, Some(group))?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
        Ok(listener)
    };
    open().map_err(|source| ServeError::Listen {
        address: path.display().to_string(),
        source,
    })
}

/// Wait at all doors until told to close them.
fn listen(doors: &[Door], clerk: &Arc<Clerk>, close: &OwnedFd) {
    loop {
        let mut waiting: Vec<PollFd<'_>> = doors
            .iter()
            .map(|door| match door {
                Door::Control(listener) | Door::Metrics(listener) => {
                    PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)
                }
                Door::MetricsTcp(listener) => {
                    PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)
                }
            })
            .collect();
        waiting.push(PollFd::new(close, PollFlags::IN));
        if let Err(error) = poll(&mut waiting, None)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(
                "the control socket cannot wait for connections: {error}; it is closed, and `rushes status` and the other commands get no answer until the daemon is restarted"
            );
            return;
        }
        let closed = waiting
            .last()
            .is_some_and(|close| !close.revents().is_empty());
        if closed {
            return;
        }
        for door in doors {
            if let Err(error) = welcome(door, clerk)
                && error.kind() != io::ErrorKind::WouldBlock
            {
                tracing::warn!("cannot accept a connection to the control socket: {error}");
                // Out of descriptors, most likely: the next attempt would fail at once, too.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Take one connection, if there is one, into a thread of its own.
fn welcome(door: &Door, clerk: &Arc<Clerk>) -> io::Result<()> {
    match door {
        Door::Control(listener) => {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(ASKER_PATIENCE))?;
            stream.set_write_timeout(Some(SCRAPER_PATIENCE))?;
            converse(clerk, move |clerk| control(clerk, stream))
        }
        Door::Metrics(listener) => {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(SCRAPER_PATIENCE))?;
            stream.set_write_timeout(Some(SCRAPER_PATIENCE))?;
            converse(clerk, move |clerk| scrape(clerk, stream))
        }
        Door::MetricsTcp(listener) => {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(SCRAPER_PATIENCE))?;
            stream.set_write_timeout(Some(SCRAPER_PATIENCE))?;
            converse(clerk, move |clerk| scrape(clerk, stream))
        }
    }
}

fn converse(
    clerk: &Arc<Clerk>,
    talk: impl FnOnce(&Clerk) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    if clerk.conversation_count.fetch_add(1, Ordering::Relaxed) >= CONVERSATION_COUNT_MAX {
        clerk.conversation_count.fetch_sub(1, Ordering::Relaxed);
        return Err(io::Error::other(format!(
            "{CONVERSATION_COUNT_MAX} connections are being answered already"
        )));
    }
    let mine = clerk.clone();
    let started = spawn("rushes-answer", move || {
        if let Err(error) = talk(&mine) {
            tracing::debug!("a conversation broke off: {error}");
        }
        mine.conversation_count.fetch_sub(1, Ordering::Relaxed);
    });
    if started.is_err() {
        clerk.conversation_count.fetch_sub(1, Ordering::Relaxed);
    }
    started
}

impl Clerk {
    /// Put a question to the loop and wait for its answer.
    fn ask(&self, ask: Ask) -> Answer {
        let (answer, wait) = sync_channel(1);
        if self.questions.try_send(Question { ask, answer }).is_err() {
            return error(format!(
                "{QUESTION_COUNT_MAX} questions are waiting already; ask again in a moment"
            ));
        }
        if let Err(failure) = bell::ring(&*self.bell) {
            return error(format!("the event loop cannot be reached: {failure}"));
        }
        let mut answer = wait.recv_timeout(LOOP_PATIENCE).unwrap_or_else(|_| {
            let patience = LOOP_PATIENCE.as_secs();
            error(match RuntimeDir::holder(&self.runtime_dir) {
                Some((_, Purpose::Start)) => format!(
                    "the daemon is starting and has not answered within {patience} s: it waits for \
                     a write that a door began without it, or looks for data that an earlier \
                     daemon left; ask again in a minute; if it is still starting then, see its log"
                ),
                _ => format!(
                    "the event loop has not answered within {patience} s; see the daemon's log"
                ),
            })
        });
        if let Answer::Status(status) = &mut answer {
            let cache_bytes = status.cache.bytes;
            process::fill(&mut status.daemon, cache_bytes);
            let guesses = self.guesses.lock();
            let guesses = guesses.unwrap_or_else(PoisonError::into_inner).clone();
            let sentences = guesses.iter().map(Guess::sentence);
            status.daemon.notes.extend(sentences);
        }
        answer
    }
}

fn error(error: String) -> Answer {
    Answer::Error { error }
}

/// Answers questions until the asker hangs up. A line that is no question gets an error, and the
/// asker may go on.
fn control(clerk: &Clerk, stream: std::os::unix::net::UnixStream) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let count = (&mut stream)
            .take(ASK_BYTES_MAX as u64 + 1)
            .read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(());
        }
        if count > ASK_BYTES_MAX {
            let answer = error(format!(
                "the question is longer than {ASK_BYTES_MAX} bytes; expected one JSON object a line"
            ));
            return stream.get_mut().write_all(line_of(&answer).as_bytes());
        }
        let answer = match parse_ask(&String::from_utf8_lossy(&line)) {
            Ok(ask) => clerk.ask(ask),
            Err(sentence) => error(sentence),
        };
        stream.get_mut().write_all(line_of(&answer).as_bytes())?;
    }
}

/// One HTTP request, one response, closed. Enough of HTTP for every scraper, and no more.
fn scrape<S: Read + Write>(clerk: &Clerk, stream: S) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut first = String::new();
    let mut head = (&mut stream).take(HTTP_BYTES_MAX);
    head.read_line(&mut first)?;
    loop {
        let mut line = Vec::new();
        let count = head.read_until(b'\n', &mut line)?;
        if count == 0 || line == b"\r\n" || line == b"\n" {
            break;
        }
    }
    let (status, kind, body) = respond(clerk, &first);
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.get_mut().write_all(response.as_bytes())?;
    stream.get_mut().write_all(body.as_bytes())
}

fn respond(clerk: &Clerk, request: &str) -> (&'static str, &'static str, String) {
    const TEXT: &str = "text/plain; charset=utf-8";
    const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let mut words = request.split_whitespace();
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let path = target.split('?').next().unwrap_or("");
    if method != "GET" {
        return (
            "405 Method Not Allowed",
            TEXT,
            String::from("expected GET /metrics\n"),
        );
    }
    if path != "/metrics" && path != "/" {
        return (
            "404 Not Found",
            TEXT,
            String::from("expected GET /metrics\n"),
        );
    }
    match clerk.ask(Ask::Status {}) {
        Answer::Status(status) => {
            let mut totals = clerk.totals.lock().unwrap_or_else(PoisonError::into_inner);
            totals.add(&status);
            match metrics::text(&status, &totals) {
                Ok(body) => ("200 OK", METRICS, body),
                Err(_) => (
                    "500 Internal Server Error",
                    TEXT,
                    String::from("the metrics cannot be written\n"),
                ),
            }
        }
        _ => (
            "503 Service Unavailable",
            TEXT,
            String::from("the event loop did not answer\n"),
        ),
    }
}
