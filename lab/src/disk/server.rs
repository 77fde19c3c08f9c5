// SPDX-License-Identifier: Apache-2.0
//! The process behind a slow disk: takes requests from the kernel and answers each when the model says.
//!
//! It is a process of its own so that its processor time can be told from everybody else's and so that it
//! cannot wait for a file system that waits for it. One thread is the disk: it takes one request, fetches
//! the bytes, sleeps until the model's instant, answers. What is written goes to the backing file when it
//! comes and only its answer waits. The backing file is sparse, and pages of zeros are holes in it.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rushes_core::units::{ByteCount, Duration, Instant};
use rustix::fs::FallocateFlags;
use rustix::time::{ClockId, Timespec};

use super::control::{Command, Fault, Flow, Statistics, as_ms};
use super::fuse::{BytesReply, Mounted, OneFile, WrittenReply};
use super::timing::{Direction, DiskTiming, Mechanics, Queue, Request};

/// Granularity of holes. Units: bytes.
const PAGE_BYTES: u64 = 4096;

/// Longest sleep that no command ends.
const LONG: Duration = Duration::from_ms(200);

/// A slow disk at work.
pub(super) struct Server {
    backing: File,
    size: ByteCount,
    timing: DiskTiming,
    state: Mutex<State>,
    /// A request came, or a command.
    changed: Condvar,
    /// A command came.
    commanded: Condvar,
}

struct State {
    timing_on: bool,
    mechanics: Mechanics,
    queue: Queue<Waiting>,
    faults: Vec<Fault>,
    stalled_until: Instant,
    /// When faults were cleared or the timing switched off last: nothing that began before waits on.
    released_at: Instant,
    statistics: Statistics,
    counted_since: Instant,
    answered_count: u64,
    oversleep: Duration,
}

struct Waiting {
    reply: Reply,
    /// It will fail on purpose.
    failing: bool,
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
) -> io::Result<Mounted> {
    let server = Arc::new(Server {
        backing,
        size,
        timing,
        state: Mutex::new(State {
            timing_on: true,
            mechanics: Mechanics::new(timing, size),
            queue: Queue::default(),
            faults: Vec::new(),
            stalled_until: Instant::ZERO,
            released_at: Instant::ZERO,
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
    super::fuse::mount(server, folder)
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
    // Interrupted: sleep on. Anything else cannot happen with a valid clock and time.
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

    /// True when this request is to fail; counts down.
    fn takes_fault(&mut self, direction: Direction, offset: u64, length: u64) -> bool {
        let hit = self.faults.iter_mut().find_map(|fault| match fault {
            Fault::Fail {
                direction: which,
                start,
                length: bad,
                count,
            } if *which == direction
                && *count != Some(0)
                && offset < start.saturating_add(*bad)
                && *start < offset.saturating_add(length) =>
            {
                Some(count)
            }
            _ => None,
        });
        match hit {
            Some(count) => {
                *count = count.map(|left| left - 1);
                true
            }
            None => false,
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
        }
    }
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk itself: for ever one request after the other.
    fn work(&self) {
        // A timer slack of 50 µs is the default and would be added to every request.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut buffer = Vec::new();
        loop {
            let (request, waiting, until) = self.take();
            self.answer(&request, waiting, until, &mut buffer);
        }
    }

    /// Waits for a request and lets the model decide when it ends; `None`: at once.
    fn take(&self) -> (Request, Waiting, Option<Instant>) {
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
            let Some((request, waiting)) = state.queue.take_next(head, time, patience) else {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if !state.timing_on {
                state.statistics.untimed_count += 1;
                return (request, waiting, None);
            }
            let slow = state.slow_factor();
            let service = state.mechanics.serve(&request, slow);
            let flow = state.flow(request.direction);
            flow.request_count += 1;
            flow.bytes += request.length.0;
            flow.sequential_count += u64::from(!service.positioned);
            flow.positioned_count += u64::from(service.positioned);
            flow.failed_count += u64::from(waiting.failing);
            flow.busy_ms += as_ms(service.busy);
            let wait_ms = as_ms(service.done.since(request.arrived));
            flow.longest_wait_ms = flow.longest_wait_ms.max(wait_ms);
            return (request, waiting, Some(service.done));
        }
    }

    fn answer(
        &self,
        request: &Request,
        waiting: Waiting,
        until: Option<Instant>,
        buffer: &mut Vec<u8>,
    ) {
        // The bytes are fetched while the model's head moves.
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
        match (waiting.reply, fetched) {
            (reply, _) if waiting.failing => reply.error(&on_purpose()),
            (reply, Err(error)) => reply.error(&error),
            (Reply::Bytes(reply), Ok(length)) => reply.bytes(&buffer[..length]),
            (Reply::Written(reply), Ok(_)) => reply.written(request.length.0 as u32),
        }
    }

    /// Sleeps until the model's instant. Returns false when a command ended it before.
    fn wait(&self, until: Instant) -> bool {
        let begun = now();
        // No request of a healthy disk takes so long: here something goes wrong on purpose, and who does
        // that may end it. Waiting for that as well would cost the others their precision.
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
        self.backing
            .read_exact_at(&mut buffer[..length], request.offset)?;
        Ok(length)
    }

    /// Queues a request for the disk; gives it back when it may be served at once.
    fn queue(&self, request: Request, reply: Reply) -> Option<Reply> {
        let mut state = self.lock();
        let failing = state.takes_fault(request.direction, request.offset, request.length.0);
        if !state.timing_on && !failing {
            state.statistics.untimed_count += 1;
            return Some(reply);
        }
        state.queue.push(request, Waiting { reply, failing });
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
                self.discard(at, (run.end - run.start) as u64)?;
            } else {
                self.backing.write_all_at(&bytes[run.start..run.end], at)?;
            }
        }
        Ok(())
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
        let Some(Reply::Bytes(reply)) = self.queue(request, Reply::Bytes(reply)) else {
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
        // A write that will fail on purpose is stored all the same: after an error what is on the medium
        // is undefined, and whoever relies on the old bytes is wrong.
        if let Err(error) = self.store(offset, bytes) {
            return reply.error(&error);
        }
        if let Some(Reply::Written(reply)) = self.queue(request, Reply::Written(reply)) {
            reply.written(bytes.len() as u32);
        }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.lock().statistics.discard_count += 1;
        match rustix::fs::fallocate(&self.backing, flags, offset, length) {
            Err(rustix::io::Errno::OPNOTSUPP) => write_zeros(&self.backing, offset, length),
            other => Ok(other?),
        }
    }

    fn sync(&self) {
        // The backing file is gone with the disk: nothing of it has to survive a crash.
        self.lock().statistics.flush_count += 1;
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
        drop(state);
        let cpu = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
        statistics.cpu_ms = cpu.tv_sec as f64 * 1e3 + cpu.tv_nsec as f64 / 1e6;
        let mut text = serde_json::to_vec_pretty(&statistics).unwrap_or_default();
        text.push(b'\n');
        text
    }

    fn command(&self, text: &str) -> Result<(), String> {
        let commands: Result<Vec<Command>, String> = text.lines().map(str::parse).collect();
        let mut state = self.lock();
        match commands {
            Ok(commands) => {
                let time = now();
                for command in commands {
                    state.obey(command, time);
                }
                drop(state);
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
        // Half pages at the ends are written even when they are zeros.
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
