// SPDX-License-Identifier: Apache-2.0
//! The process behind a slow disk: takes requests from the kernel and answers each at the model's
//! instant.
//!
//! It is a process of its own so that its processor time is counted apart from all others, and so
//! that it cannot wait for a file system that waits for it. One thread is the disk: it takes one
//! request, fetches the bytes, sleeps until the model's instant, answers. Without a write cache a
//! write goes to the backing file when it comes, and only its answer waits. With one, see
//! [`super::cache`], the disk answers the write when it comes, and its bytes go to the backing file
//! when the head writes them. The backing file is sparse, and pages of zeros are holes in it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rushes_core::units::{ByteCount, Duration, Instant};
use rustix::fs::FallocateFlags;
use rustix::time::{ClockId, Timespec};

use super::cache::{Bytes, WriteCache};
use super::control::{Command, Fault, Flow, Statistics, as_ms};
use super::fuse::{BytesReply, Mounted, OneFile, SyncedReply, WrittenReply};
use super::log::{Change, Recorder};
use super::stamps::{self, Seen};
use super::timing::{Direction, DiskTiming, Mechanics, Queue, Request};
use crate::servers::daemon::TMPFS_MAGIC;

/// Granularity of holes. Units: bytes.
const PAGE_BYTES: u64 = 4096;

/// Longest run that the head destages from the write cache before another request gets a turn.
/// Units: bytes.
pub(super) const DESTAGE_BYTES: u64 = 4 << 20;

/// After so long without a read or a write past the cache the disk begins to empty its write cache.
/// A write into the cache does not count: an idle head need not wait until the cache holds more.
const IDLE: Duration = Duration::from_ms(100);

/// How often the process syncs a backing file on a real disk.
const KEEP_FREE: std::time::Duration = std::time::Duration::from_secs(1);

/// Longest sleep that a command cannot end.
const LONG: Duration = Duration::from_ms(200);

/// A slow disk at work.
pub(super) struct Server {
    backing: File,
    size: ByteCount,
    timing: DiskTiming,
    /// The disk notes the arrival of pages stamped with this key; 0: of none. Not in `state`, since
    /// the scan of the bytes runs outside its lock.
    stamp_key: AtomicU64,
    /// Path of the log while changes are recorded.
    log_path: PathBuf,
    /// Locked before `state` when both are.
    recorder: Mutex<Option<Recorder>>,
    state: Mutex<State>,
    /// A request or a command came.
    changed: Condvar,
    /// A command came.
    commanded: Condvar,
}

struct State {
    timing_on: bool,
    mechanics: Mechanics,
    queue: Queue<Waiting>,
    cache: WriteCache,
    /// Writes that wait for room in the cache, in order.
    stalled: VecDeque<Stalled>,
    /// Flushes and the epoch for which each waits.
    flushes: Vec<(u64, SyncedReply)>,
    /// The head is destaging a run of the cache.
    destaging: bool,
    /// Since when the cache has held bytes.
    filled_since: Option<Instant>,
    /// Since when the head has had to destage: see [`State::must_destage`].
    pressed_since: Option<Instant>,
    /// When the last read, or write past the cache, came.
    wanted_at: Instant,
    powerless: bool,
    faults: Vec<Fault>,
    stalled_until: Instant,
    /// When a command last cleared faults or switched the timing off: long waits that began before
    /// end.
    released_at: Instant,
    stamps: stamps::Log,
    statistics: Statistics,
    counted_since: Instant,
    answered_count: u64,
    oversleep: Duration,
}

struct Waiting {
    reply: Reply,
    /// Stamped pages of a write.
    seen: Vec<Seen>,
    /// It fails, by an injected fault or because the power is off.
    failing: bool,
}

/// A write that waits for room in the cache.
struct Stalled {
    offset: u64,
    bytes: Arc<[u8]>,
    seen: Vec<Seen>,
    reply: WrittenReply,
}

/// The next work of the head.
enum Work {
    /// A request, and the instant of its answer; `None`: at once.
    Serve(Request, Waiting, Option<Instant>),
    /// A run of the cache that the head is writing, and the instant at which it ends.
    Destage(Instant),
}

enum Reply {
    Bytes(BytesReply),
    Written(WrittenReply),
}

impl Reply {
    fn error(self, error: &io::Error) {
        match self {
            Reply::Bytes(reply) => reply.error(error),
            Reply::Written(reply) => reply.error(error),
        }
    }
}

/// Serves `backing`, of `size` bytes, in `folder`, until it is unmounted.
pub(super) fn mount(
    backing: File,
    size: ByteCount,
    timing: DiskTiming,
    folder: &Path,
    log_path: PathBuf,
) -> io::Result<Mounted> {
    let server = Arc::new(Server {
        backing,
        size,
        timing,
        stamp_key: AtomicU64::new(0),
        log_path,
        recorder: Mutex::new(None),
        state: Mutex::new(State {
            timing_on: true,
            mechanics: Mechanics::new(timing, size),
            queue: Queue::default(),
            cache: WriteCache::new(timing.write_cache_bytes),
            stalled: VecDeque::new(),
            flushes: Vec::new(),
            destaging: false,
            filled_since: None,
            pressed_since: None,
            wanted_at: Instant::ZERO,
            powerless: false,
            faults: Vec::new(),
            stalled_until: Instant::ZERO,
            released_at: Instant::ZERO,
            stamps: stamps::Log::default(),
            statistics: Statistics::default(),
            counted_since: now(),
            answered_count: 0,
            oversleep: Duration::ZERO,
        }),
        changed: Condvar::new(),
        commanded: Condvar::new(),
    });
    let disk = server.clone();
    std::thread::Builder::new()
        .name("disk".into())
        .spawn(move || disk.work())?;
    if !lies_in_memory(&server.backing)? {
        let keeper = server.clone();
        std::thread::Builder::new()
            .name("backing".into())
            .spawn(move || keeper.keep_memory_free())?;
    }
    super::fuse::mount(server, folder)
}

fn lies_in_memory(backing: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(backing)?.f_type as u64 == TMPFS_MAGIC)
}

fn now() -> Instant {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    Instant(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

fn sleep_until(at: Instant) {
    let at = Timespec {
        tv_sec: (at.0 / 1_000_000_000) as i64,
        tv_nsec: (at.0 % 1_000_000_000) as _,
    };
    // Interrupted: sleep on. No other error can occur with a valid clock and time.
    while rustix::thread::clock_nanosleep_absolute(ClockId::Monotonic, &at)
        == Err(rustix::io::Errno::INTR)
    {}
}

fn on_purpose() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())
}

impl State {
    fn slow_factor(&self) -> f64 {
        self.faults
            .iter()
            .filter_map(|fault| match fault {
                Fault::Slow { factor } => Some(*factor),
                _ => None,
            })
            .product()
    }

    /// True when a fault hits such a request.
    fn will_fail(&self, direction: Direction, offset: u64, length: u64) -> bool {
        self.faults
            .iter()
            .any(|fault| fault.hits(direction, offset, length))
    }

    /// True when a fault hits this request; counts the fault down.
    fn takes_fault(&mut self, direction: Direction, offset: u64, length: u64) -> bool {
        let hit = self
            .faults
            .iter_mut()
            .find(|fault| fault.hits(direction, offset, length));
        match hit {
            Some(Fault::Fail { count, .. }) => {
                *count = count.map(|left| left - 1);
                true
            }
            _ => false,
        }
    }

    fn flow(&mut self, direction: Direction) -> &mut Flow {
        match direction {
            Direction::Read => &mut self.statistics.read,
            Direction::Write => &mut self.statistics.write,
        }
    }

    fn obey(&mut self, command: Command, now: Instant) {
        match command {
            Command::Timing(on) => {
                if on && !self.timing_on {
                    self.mechanics.rest_at(now);
                }
                if !on {
                    self.released_at = now;
                }
                self.timing_on = on;
            }
            Command::Inject(Fault::Stall { ms }) => {
                self.stalled_until = now + Duration::from_ms(ms);
                self.mechanics.hold_until(self.stalled_until);
            }
            Command::Inject(fault) => self.faults.push(fault),
            Command::Clear => {
                self.faults.clear();
                self.stalled_until = now;
                self.released_at = now;
                self.mechanics.rest_at(now);
            }
            Command::Reset => {
                self.statistics = Statistics::default();
                self.counted_since = now;
                self.answered_count = 0;
                self.oversleep = Duration::ZERO;
            }
            Command::Stamps(Some(_)) => self.stamps = stamps::Log::default(),
            Command::Stamps(None) => {}
            // The effect on the cache needs the backing file: see `Server::obey_with_cache`.
            Command::PowerOff(_) => self.powerless = true,
            Command::PowerOn => {
                self.powerless = false;
                self.mechanics.rest_at(now);
            }
            // The recorder is not part of this state: see `Server::obey_with_recorder`.
            Command::Record(_) | Command::Mark(_) => {}
        }
    }

    /// True when the cache is nearly full, or a write or a flush waits for the head to destage.
    fn must_destage(&self) -> bool {
        self.cache.is_pressing() || !self.stalled.is_empty() || !self.flushes.is_empty()
    }

    /// Notes since when the head has had a reason to destage; called after each change that may
    /// give or end one. By the model the head begins at that instant, not when the disk's thread
    /// wakes up: that delay would add to every run.
    fn note_reasons(&mut self, now: Instant) {
        let since = |is_so: bool, since: Option<Instant>| is_so.then(|| since.unwrap_or(now));
        self.filled_since = since(!self.cache.is_empty(), self.filled_since);
        self.pressed_since = since(self.must_destage(), self.pressed_since);
    }

    /// Takes the flushes whose bytes are all on the medium.
    fn take_synced(&mut self) -> Vec<SyncedReply> {
        if self.destaging {
            return Vec::new();
        }
        let flushes = std::mem::take(&mut self.flushes);
        let (done, waiting) = flushes
            .into_iter()
            .partition(|(epoch, _)| self.cache.is_past(*epoch));
        self.flushes = waiting;
        let done: Vec<(u64, SyncedReply)> = done;
        done.into_iter().map(|(_, reply)| reply).collect()
    }

    /// Takes stalled writes that fit now into the cache; returns the replies to send.
    fn take_stalled(&mut self) -> Vec<(WrittenReply, u32)> {
        let mut taken = Vec::new();
        while let Some(first) = self.stalled.front()
            && self.cache.fits(first.bytes.len() as u64)
            && let Some(write) = self.stalled.pop_front()
        {
            let length = write.bytes.len() as u32;
            self.keep(write.offset, write.bytes);
            self.stamps.note(&write.seen, now());
            taken.push((write.reply, length));
        }
        taken
    }

    /// Puts a write into the cache and counts it.
    fn keep(&mut self, offset: u64, bytes: Arc<[u8]>) {
        self.statistics.cached_count += 1;
        self.statistics.cached_bytes += bytes.len() as u64;
        self.cache.put(offset, Bytes::from(bytes));
        self.note_reasons(now());
    }
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs a backing file on a real disk every second and drops its clean pages. It may be larger
    /// than the machine's memory: else the kernel would reclaim memory for seconds in the middle of
    /// a measurement.
    fn keep_memory_free(&self) {
        loop {
            std::thread::sleep(KEEP_FREE);
            // If the sync fails, the bytes stay in memory; the next read or write of them reports
            // the error.
            if rustix::fs::fdatasync(&self.backing).is_ok() {
                let advice = rustix::fs::Advice::DontNeed;
                let _ = rustix::fs::fadvise(&self.backing, 0, None, advice);
            }
        }
    }

    /// The disk itself: serves one request after the other, for ever.
    fn work(&self) {
        // The default timer slack of 50 µs would add to every request.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut buffer = Vec::new();
        loop {
            match self.take() {
                Work::Serve(request, waiting, until) => {
                    self.answer(&request, waiting, until, &mut buffer);
                }
                Work::Destage(until) => {
                    self.wait(until);
                    self.lock().destaging = false;
                }
            }
            self.settle_cache();
        }
    }

    /// Answer the stalled writes for which the cache now has room, and the flushes that are done.
    fn settle_cache(&self) {
        let mut state = self.lock();
        let taken = state.take_stalled();
        let synced = state.take_synced();
        state.note_reasons(now());
        drop(state);
        for (reply, length) in taken {
            reply.written(length);
        }
        for reply in synced {
            reply.synced();
        }
    }

    /// Waits for the head's next work and lets the model decide when it ends.
    fn take(&self) -> Work {
        let mut state = self.lock();
        loop {
            let time = now();
            if state.timing_on && time < state.stalled_until {
                let span = std::time::Duration::from_nanos(state.stalled_until.since(time).0);
                state = self
                    .changed
                    .wait_timeout(state, span)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            let head = state.mechanics.head();
            let patience = self.timing.patience();
            let idle_at = state.wanted_at + IDLE;
            if let Some((offset, length)) = state.cache.next_run(head, DESTAGE_BYTES) {
                let turn = state.queue.is_empty() && time >= idle_at
                    || state.must_destage()
                        && !state.queue.goes_before(offset, head, time, patience);
                if turn {
                    return self.destage(&mut state, offset, length, time);
                }
            }
            let Some((request, waiting)) = state.queue.take_next(head, time, patience) else {
                state = if state.cache.is_empty() {
                    self.changed
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner)
                } else {
                    let span = std::time::Duration::from_nanos(idle_at.since(time).0.max(1));
                    self.changed
                        .wait_timeout(state, span)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                };
                continue;
            };
            if !state.timing_on {
                state.statistics.untimed_count += 1;
                return Work::Serve(request, waiting, None);
            }
            let slow = state.slow_factor();
            let service = state.mechanics.serve(&request, slow);
            let flow = state.flow(request.direction);
            flow.count(&request, &service);
            flow.failed_count += u64::from(waiting.failing);
            return Work::Serve(request, waiting, Some(service.done));
        }
    }

    /// Begins to destage a run of the cache.
    fn destage(&self, state: &mut State, offset: u64, length: u64, time: Instant) -> Work {
        let idle_at = state.wanted_at + IDLE;
        let since = state.pressed_since.unwrap_or_else(|| {
            let filled = state.filled_since.unwrap_or(time);
            filled.max(idle_at)
        });
        let request = Request {
            direction: Direction::Write,
            offset,
            length: ByteCount(length),
            arrived: since.min(time),
        };
        let slow = state.slow_factor();
        let service = state.mechanics.serve(&request, slow);
        state.statistics.write.count(&request, &service);
        state.destaging = true;
        for (at, bytes) in state.cache.take(offset, length) {
            self.store_or_complain(at, bytes.as_slice());
        }
        state.note_reasons(time);
        Work::Destage(service.done)
    }

    /// Stores destaged bytes; prints an error, since the writer got its answer long ago. The
    /// backing file lies in memory as a rule: then an error means that the machine has no more.
    fn store_or_complain(&self, offset: u64, bytes: &[u8]) {
        if let Err(error) = self.store(offset, bytes) {
            eprintln!(
                "slow disk: {} bytes at {offset} could not be destaged: {error}",
                bytes.len()
            );
        }
    }

    fn answer(
        &self,
        request: &Request,
        waiting: Waiting,
        until: Option<Instant>,
        buffer: &mut Vec<u8>,
    ) {
        // Fetch the bytes while the model's head moves.
        let fetched = match &waiting.reply {
            Reply::Bytes(_) if !waiting.failing => self.fetch(request, buffer),
            _ => Ok(0),
        };
        if let Some(until) = until
            && self.wait(until)
        {
            let over = now().since(until);
            let mut state = self.lock();
            state.answered_count += 1;
            state.oversleep += over;
            let worst = &mut state.statistics.oversleep_ms_max;
            *worst = worst.max(as_ms(over));
        }
        if !waiting.failing && !waiting.seen.is_empty() {
            self.lock().stamps.note(&waiting.seen, now());
        }
        match (waiting.reply, fetched) {
            (reply, _) if waiting.failing => reply.error(&on_purpose()),
            (reply, Err(error)) => reply.error(&error),
            (Reply::Bytes(reply), Ok(length)) => reply.bytes(&buffer[..length]),
            (Reply::Written(reply), Ok(_)) => reply.written(request.length.0 as u32),
        }
    }

    /// Sleeps until the model's instant. Returns false when a command ended the sleep before.
    fn wait(&self, until: Instant) -> bool {
        let begun = now();
        // No request of a healthy disk of Table 5 takes longer than LONG: this is an injected
        // fault, which a command may end. A shorter sleep does not wait for commands, which would
        // cost precision.
        let mut left = until.since(begun);
        while left > LONG {
            let state = self.lock();
            if state.released_at >= begun {
                return false;
            }
            let span = std::time::Duration::from_nanos((left - LONG).0);
            drop(
                self.commanded
                    .wait_timeout(state, span)
                    .unwrap_or_else(PoisonError::into_inner),
            );
            left = until.since(now());
        }
        sleep_until(until);
        true
    }

    /// Reads the bytes of a request to the start of `buffer`. Returns how many there are.
    fn fetch(&self, request: &Request, buffer: &mut Vec<u8>) -> io::Result<usize> {
        let left = self.size.0.saturating_sub(request.offset);
        let length = request.length.0.min(left) as usize;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        // Both under one lock: a run destaged between the two would be seen in neither.
        let state = (self.timing.write_cache_bytes > 0).then(|| self.lock());
        self.backing
            .read_exact_at(&mut buffer[..length], request.offset)?;
        if let Some(state) = state {
            state.cache.overlay(request.offset, &mut buffer[..length]);
        }
        Ok(length)
    }

    /// True when this request must fail. Called once for each request: it counts faults down.
    fn is_failing(&self, request: &Request) -> bool {
        let mut state = self.lock();
        state.powerless || state.takes_fault(request.direction, request.offset, request.length.0)
    }

    /// Queues a request for the disk; returns the reply when the caller may answer at once.
    fn queue(
        &self,
        request: Request,
        reply: Reply,
        seen: Vec<Seen>,
        failing: bool,
    ) -> Option<Reply> {
        let mut state = self.lock();
        state.wanted_at = request.arrived;
        if !state.timing_on && !failing {
            state.statistics.untimed_count += 1;
            state.stamps.note(&seen, now());
            return Some(reply);
        }
        let waiting = Waiting {
            reply,
            seen,
            failing,
        };
        state.queue.push(request, waiting);
        let waiting = state.queue.len() as u64;
        let most = &mut state.statistics.waiting_count_max;
        *most = waiting.max(*most);
        drop(state);
        self.changed.notify_one();
        None
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if offset.saturating_add(bytes.len() as u64) > self.size.0 {
            return Err(rustix::io::Errno::NOSPC.into());
        }
        for run in zero_runs(offset, bytes) {
            let at = offset + run.start as u64;
            if run.zero {
                self.punch(at, (run.end - run.start) as u64)?;
            } else {
                self.backing.write_all_at(&bytes[run.start..run.end], at)?;
            }
        }
        Ok(())
    }
}

impl Server {
    /// Makes bytes of the backing file zero and gives their memory back. Takes no lock: a caller
    /// that destages holds it.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.backing, flags, offset, length) {
            Err(rustix::io::Errno::OPNOTSUPP) => write_zeros(&self.backing, offset, length),
            other => Ok(other?),
        }
    }

    /// Takes a write into the cache, or lets it wait for room there; returns the reply when the
    /// write goes to the medium.
    fn write_cached(
        &self,
        offset: u64,
        bytes: &[u8],
        seen: &mut Vec<Seen>,
        reply: WrittenReply,
    ) -> Option<WrittenReply> {
        let length = bytes.len() as u64;
        let cached =
            self.timing.write_cache_bytes > 0 && offset.saturating_add(length) <= self.size.0;
        // Outside the lock: copying a megabyte takes a while.
        let copy: Arc<[u8]> = Arc::from(if cached { bytes } else { &[] });
        let mut state = self.lock();
        if state.powerless {
            drop(state);
            reply.error(&on_purpose());
            return None;
        }
        if !cached {
            return Some(reply);
        }
        if !state.timing_on || state.will_fail(Direction::Write, offset, length) {
            state.cache.forget(offset, length);
            return Some(reply);
        }
        if state.stalled.is_empty() && state.cache.fits(length) {
            state.keep(offset, copy);
            state.stamps.note(seen, now());
            drop(state);
            reply.written(length as u32);
            self.changed.notify_one();
            return None;
        }
        state.stalled.push_back(Stalled {
            offset,
            bytes: copy,
            seen: std::mem::take(seen),
            reply,
        });
        state.note_reasons(now());
        drop(state);
        self.changed.notify_one();
        None
    }

    /// Makes a change and notes it. One lock around both, so that the log has changes in the order
    /// in which they happened; without a recorder changes do not wait for each other.
    fn recorded(&self, change: Change, act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut recorder = self.recorder();
        let Some(recorder) = recorder.as_mut() else {
            drop(recorder);
            return act();
        };
        act()?;
        recorder.note(change, now());
        Ok(())
    }

    fn recorder(&self) -> MutexGuard<'_, Option<Recorder>> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The effect of a command on the log.
    fn obey_with_recorder(&self, command: Command) -> Result<(), String> {
        match command {
            Command::Record(true) if self.timing.write_cache_bytes > 0 => Err(String::from(
                "this disk has a write cache; expected none for a recording: make a disk without",
            )),
            Command::Record(true) => {
                let recorder = Recorder::create(&self.log_path, self.size.0)
                    .map_err(|error| format!("{}: {error}", self.log_path.display()))?;
                *self.recorder() = Some(recorder);
                Ok(())
            }
            Command::Record(false) => match self.recorder().take() {
                Some(recorder) => recorder.finish(),
                None => Ok(()),
            },
            Command::Mark(number) => match self.recorder().as_mut() {
                Some(recorder) => {
                    recorder.note(Change::Mark { number }, now());
                    recorder.complaint().map_or(Ok(()), Err)
                }
                None => Err(String::from(
                    "a mark was sent, but nothing is recorded; send `record on` before",
                )),
            },
            _ => Ok(()),
        }
    }

    /// The effect of a command on the cache.
    fn obey_with_cache(&self, state: &mut State, command: Command) {
        match command {
            // Without timing the medium is as fast as the cache.
            Command::Timing(false) => {
                for (at, bytes) in state.cache.take(0, self.size.0) {
                    self.store_or_complain(at, bytes.as_slice());
                }
            }
            Command::PowerOff(seed) => {
                let mut state_of_chance = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                let kept = state.cache.lose(|| {
                    state_of_chance ^= state_of_chance << 13;
                    state_of_chance ^= state_of_chance >> 7;
                    state_of_chance ^= state_of_chance << 17;
                    state_of_chance >> 63 == 1
                });
                for (at, bytes) in kept {
                    self.store_or_complain(at, bytes.as_slice());
                }
                for write in state.stalled.drain(..) {
                    write.reply.error(&on_purpose());
                }
                for (_, reply) in state.flushes.drain(..) {
                    reply.error(&on_purpose());
                }
            }
            _ => {}
        }
    }
}

impl OneFile for Server {
    fn size(&self) -> u64 {
        self.size.0
    }

    fn read(&self, offset: u64, length: u32, reply: BytesReply) {
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let request = Request {
            direction: Direction::Read,
            offset,
            length: ByteCount(u64::from(length)),
            arrived: now(),
        };
        let failing = self.is_failing(&request);
        let queued = self.queue(request, Reply::Bytes(reply), Vec::new(), failing);
        let Some(Reply::Bytes(reply)) = queued else {
            return;
        };
        BUFFER.with_borrow_mut(|buffer| match self.fetch(&request, buffer) {
            Ok(length) => reply.bytes(&buffer[..length]),
            Err(error) => reply.error(&error),
        });
    }

    fn write(&self, offset: u64, bytes: &[u8], reply: WrittenReply) {
        let request = Request {
            direction: Direction::Write,
            offset,
            length: ByteCount(bytes.len() as u64),
            arrived: now(),
        };
        let mut seen = match self.stamp_key.load(Ordering::Relaxed) {
            0 => Vec::new(),
            key => stamps::scan(key, offset, bytes),
        };
        let Some(reply) = self.write_cached(offset, bytes, &mut seen, reply) else {
            return;
        };
        // A failed write stores nothing. A disk may do either; but only old bytes expose a program
        // that ignores the error.
        let failing = self.is_failing(&request);
        if !failing
            && let Err(error) = self.recorded(Change::Write { offset, bytes }, || {
                self.store(offset, bytes)
            })
        {
            return reply.error(&error);
        }
        let queued = self.queue(request, Reply::Written(reply), seen, failing);
        if let Some(Reply::Written(reply)) = queued {
            reply.written(bytes.len() as u32);
        }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.lock();
        if state.powerless {
            return Err(on_purpose());
        }
        state.cache.forget(offset, length);
        state.statistics.discard_count += 1;
        drop(state);
        self.recorded(Change::Discard { offset, length }, || {
            self.punch(offset, length)
        })
    }

    fn sync(&self, reply: SyncedReply) {
        // No sync of the backing file: it goes with the disk and need not survive a crash of the
        // machine.
        let mut state = self.lock();
        state.statistics.flush_count += 1;
        if state.powerless {
            drop(state);
            return reply.error(&on_purpose());
        }
        if state.cache.is_empty() && !state.destaging {
            drop(state);
            return match self.recorded(Change::Flush, || Ok(())) {
                Ok(()) => reply.synced(),
                Err(error) => reply.error(&error),
            };
        }
        let epoch = state.cache.close_epoch();
        state.flushes.push((epoch, reply));
        state.note_reasons(now());
        drop(state);
        self.changed.notify_one();
    }

    fn describe(&self) -> Vec<u8> {
        let state = self.lock();
        let mut statistics = state.statistics.clone();
        statistics.disk_bytes = self.size.0;
        statistics.timing = state.timing_on;
        statistics.elapsed_ms = as_ms(now().since(state.counted_since));
        statistics.waiting_count = state.queue.len() as u64;
        statistics.oversleep_ms_mean =
            as_ms(state.oversleep) / (state.answered_count.max(1) as f64);
        statistics.faults = state.faults.clone();
        statistics.cache_bytes = state.cache.bytes();
        statistics.powerless = state.powerless;
        statistics.stamps_lost_count = state.stamps.lost_count();
        drop(state);
        let cpu = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
        statistics.cpu_ms = cpu.tv_sec as f64 * 1e3 + cpu.tv_nsec as f64 / 1e6;
        let mut text = serde_json::to_vec_pretty(&statistics).unwrap_or_default();
        text.push(b'\n');
        text
    }

    fn arrivals(&self) -> Vec<u8> {
        self.lock().stamps.text()
    }

    fn command(&self, text: &str) -> Result<(), String> {
        let commands: Result<Vec<Command>, String> = text.lines().map(str::parse).collect();
        let commands = commands.and_then(|commands| {
            for &command in &commands {
                self.obey_with_recorder(command)?;
            }
            Ok(commands)
        });
        let mut state = self.lock();
        match commands {
            Ok(commands) => {
                let time = now();
                for command in commands {
                    if let Command::Stamps(key) = command {
                        let key = key.map_or(0, NonZeroU64::get);
                        self.stamp_key.store(key, Ordering::Relaxed);
                    }
                    self.obey_with_cache(&mut state, command);
                    state.obey(command, time);
                }
                drop(state);
                self.settle_cache();
                self.changed.notify_all();
                self.commanded.notify_all();
                Ok(())
            }
            Err(error) => {
                state.statistics.last_error = Some(error.clone());
                Err(error)
            }
        }
    }
}

fn write_zeros(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let zeros = vec![0u8; length.min(1 << 20) as usize];
    let end = offset + length;
    let mut at = offset;
    while at < end {
        let part = (end - at).min(zeros.len() as u64);
        file.write_all_at(&zeros[..part as usize], at)?;
        at += part;
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    end: usize,
    zero: bool,
}

/// Cuts `bytes`, which lie at `offset`, into runs of whole pages of zeros and of everything else.
fn zero_runs(offset: u64, bytes: &[u8]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    while start < bytes.len() {
        let at = offset + start as u64;
        let page_end = (at / PAGE_BYTES + 1) * PAGE_BYTES;
        let end = start + ((page_end - at) as usize).min(bytes.len() - start);
        let whole = end - start == PAGE_BYTES as usize;
        let zero = whole && bytes[start..end].iter().all(|&byte| byte == 0);
        match runs.last_mut() {
            Some(last) if last.zero == zero => last.end = end,
            _ => runs.push(Run { start, end, zero }),
        }
        start = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_zeros_become_holes_and_nothing_else_does() {
        let page = PAGE_BYTES as usize;
        let mut bytes = vec![0u8; 6 * page];
        bytes[2 * page + 17] = 1;
        let run = |start: usize, end: usize, zero| Run { start, end, zero };
        assert_eq!(
            zero_runs(PAGE_BYTES * 5, &bytes),
            [
                run(0, 2 * page, true),
                run(2 * page, 3 * page, false),
                run(3 * page, 6 * page, true)
            ]
        );
        // Parts of pages at the ends are written even if they are zeros.
        assert_eq!(
            zero_runs(512, &bytes[..2 * page]),
            [
                run(0, page - 512, false),
                run(page - 512, 2 * page - 512, true),
                run(2 * page - 512, 2 * page, false)
            ]
        );
        assert_eq!(zero_runs(0, &[]), []);
    }
}
