// SPDX-License-Identifier: Apache-2.0
//! Device reads, readiness of descriptors and one timer, through one io_uring.
//!
//! One `Ring` belongs to the thread that made it, so that the kernel needs no locks for it. A
//! caller names files, slots and its own 64-bit tags; it never gives an address, so it cannot give
//! a wrong one: the ring owns the segment that reads land in, and holds every file until the kernel
//! has released it.
//!
//! Readiness is level-triggered: a poll is armed again at the next [`Ring::submit_and_wait`] after
//! its completion was taken, so work left undone is reported again and nothing is lost.
//!
//! [`Ring::fake`] makes a ring without a kernel; the test chooses the completions and their
//! results.

mod fake;
mod kernel;

pub use fake::{FakePoll, FakeRead, FakeRing};

use crate::{Mapping, Segment, SysError, clock};
use rushes_core::server::{Errno, IoClass};
use rushes_core::units::*;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bounds of a ring, fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// Reads and writes in flight at once.
    pub read_count_max: u32,
    /// Descriptors watched at once.
    pub poll_count_max: u32,
    /// Slots that one read spans; at most 1024 (the kernel's IOV_MAX).
    pub slots_per_read_max: u32,
}

impl Default for RingLimits {
    fn default() -> RingLimits {
        RingLimits {
            read_count_max: 512,
            poll_count_max: 2 * 4096 + 64,
            slots_per_read_max: 256,
        }
    }
}

/// The abilities of this kernel and process, for `rushes check` and the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFacts {
    /// The segment is registered: the kernel need not pin its pages for every read.
    pub buffers_registered: bool,
    /// Reads scattered over registered memory are possible (Linux 6.15).
    pub vectored_registered: bool,
    /// The kernel processes completions in our own thread, and only when it asks (Linux 6.1).
    pub deferred_completion: bool,
    /// The real-time I/O class was refused at least once (no CAP_SYS_NICE or CAP_SYS_ADMIN); such
    /// reads go as best effort.
    pub real_time_refused: bool,
}

/// A read from a file into slots.
#[derive(Clone, Copy, Debug)]
pub struct SlotRead<'a> {
    /// From which file. Kept until the read has ended.
    pub file: &'a Arc<OwnedFd>,
    /// Which bytes; may end past the file's end. With O_DIRECT start and end are multiples of the
    /// file's alignment.
    pub range: ByteRange,
    /// How many of them the file has, as far as the caller knows. The ring continues a shorter read
    /// where it stopped, so that only the real end of the file makes a short answer.
    pub expected: ByteCount,
    /// Where to: the first byte goes to `range.start % slot_bytes` of the first.
    pub slots: &'a [SlotIndex],
    /// Priority at the device.
    pub class: IoClass,
    /// Comes back in [`Completion::Read`].
    pub user_data: u64,
}

/// Bytes of memory for a write.
#[derive(Clone, Debug)]
pub struct MemoryPart {
    /// Kept until the write has ended.
    pub memory: Arc<Mapping>,
    /// Where they begin.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

/// A write to a file from memory.
#[derive(Clone, Debug)]
pub struct FileWrite {
    /// To which file.
    pub file: Arc<OwnedFd>,
    /// Where its first byte goes. Units: bytes.
    pub offset: u64,
    /// The memory, one part behind the other; with O_DIRECT each starts and ends at the file's
    /// alignment.
    pub parts: Vec<MemoryPart>,
    /// Priority at the device.
    pub class: IoClass,
    /// Comes back in [`Completion::Written`].
    pub user_data: u64,
}

/// Parts that one write may have (the kernel's IOV_MAX).
pub const WRITE_PART_COUNT_MAX: usize = 1024;

impl FileWrite {
    /// Units: bytes.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes as u64).sum()
    }

    /// Errors   InvalidInput, with the wrong sizes
    fn check(&self) -> io::Result<()> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let count = self.parts.len();
        if count == 0 || count > WRITE_PART_COUNT_MAX {
            return wrong(format!(
                "a write of {count} parts; expected 1 to {WRITE_PART_COUNT_MAX}"
            ));
        }
        let outside = |part: &&MemoryPart| {
            let end = part.offset.checked_add(part.bytes);
            part.bytes == 0 || end.is_none_or(|end| end > part.memory.bytes())
        };
        if let Some(part) = self.parts.iter().find(outside) {
            return wrong(format!(
                "a write of {} bytes from {} of a memory of {}",
                part.bytes,
                part.offset,
                part.memory.bytes()
            ));
        }
        let bytes = self.bytes();
        let end = self.offset.checked_add(bytes);
        if bytes > 0x7fff_f000 || end.is_none_or(|end| i64::try_from(end).is_err()) {
            return wrong(format!("a write of {bytes} bytes at {}", self.offset));
        }
        Ok(())
    }
}

/// The end of an operation, and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A write ended.
    Written {
        /// The caller's tag.
        user_data: u64,
        /// How many bytes; fewer than all only if the kernel could write no more.
        result: Result<ByteCount, Errno>,
    },
    /// A read ended; its bytes are in the slots.
    Read {
        /// The caller's tag.
        user_data: u64,
        /// How many bytes; short at the end of the file.
        result: Result<ByteCount, Errno>,
    },
    /// A watched descriptor is readable, or its other end is gone.
    Ready {
        /// The caller's tag.
        user_data: u64,
        /// There is something to read (or to accept).
        readable: bool,
        /// The other end is closed, or the descriptor is in error; there may still be something to
        /// read.
        hung_up: bool,
    },
    /// A watched doorbell was rung; it is silenced already.
    Bell {
        /// The caller's tag.
        user_data: u64,
    },
    /// The instant of [`Ring::wake_at`] has come. Reported once.
    Timer,
}

/// A watched descriptor, for [`Ring::poll_remove`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PollId {
    index: u32,
    generation: u32,
}

/// The ring.
pub struct Ring {
    backend: Backend,
    wake_at: Instant,
}

enum Backend {
    Kernel(Box<kernel::KernelRing>),
    Fake(FakeRing),
}

impl Ring {
    /// A ring whose reads land in `segment`.
    ///
    /// Errors   io_uring is missing or forbidden (`kernel.io_uring_disabled`), or out of memory.
    pub fn new(segment: Arc<Segment>, limits: RingLimits) -> Result<Ring, SysError> {
        Ok(Ring {
            backend: Backend::Kernel(Box::new(kernel::KernelRing::new(segment, limits)?)),
            wake_at: Instant::NEVER,
        })
    }

    /// A ring without a kernel, and the handle by which a test plays the kernel. Its clock is the
    /// test's ([`FakeRing::set_now`]); it never waits.
    pub fn fake(segment: Arc<Segment>, limits: RingLimits) -> (Ring, FakeRing) {
        let fake = FakeRing::new(segment, limits);
        let ring = Ring {
            backend: Backend::Fake(fake.clone()),
            wake_at: Instant::NEVER,
        };
        (ring, fake)
    }

    /// The abilities found here.
    pub fn facts(&self) -> RingFacts {
        match &self.backend {
            Backend::Kernel(ring) => ring.facts(),
            Backend::Fake(_) => RingFacts::default(),
        }
    }

    /// Queue a read. It starts at the next [`Ring::submit`] or [`Ring::submit_and_wait`].
    ///
    /// Errors   InvalidInput: range and slots do not fit each other or the segment (our own fault);
    ///          WouldBlock: `read_count_max` are in flight.
    pub fn read(&mut self, read: &SlotRead<'_>) -> io::Result<()> {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.read(read),
            Backend::Fake(ring) => ring.read(read),
        }
    }

    /// Queue a write. It starts as a read does.
    ///
    /// Errors   InvalidInput: it does not fit its memory (our own fault); WouldBlock: as many
    /// requests as are possible are in flight.
    pub fn write(&mut self, write: FileWrite) -> io::Result<()> {
        write.check()?;
        match &mut self.backend {
            Backend::Kernel(ring) => ring.write(write),
            Backend::Fake(ring) => ring.write(write),
        }
    }

    /// Let the ring hold a descriptor's file open until the kernel has ended every request of this
    /// ring, also if this process dies before: while a lock on the file is held, requests may still
    /// be under way.
    pub fn hold(&mut self, file: &OwnedFd) -> io::Result<()> {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.hold(file),
            Backend::Fake(_) => Ok(()),
        }
    }

    /// Watch a descriptor for reading and for the close of its other end, until removed. For its
    /// other end it stays open until then.
    ///
    /// Errors   WouldBlock: `poll_count_max` are watched.
    pub fn poll_add(&mut self, fd: Arc<OwnedFd>, user_data: u64) -> io::Result<PollId> {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.poll_add(fd, user_data, false),
            Backend::Fake(ring) => ring.poll_add(fd, user_data, false),
        }
    }

    /// Watch a doorbell (eventfd): like [`Ring::poll_add`], but the ring silences it as well, which
    /// spares a system call each time.
    pub fn bell_add(&mut self, bell: Arc<OwnedFd>, user_data: u64) -> io::Result<PollId> {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.poll_add(bell, user_data, true),
            Backend::Fake(ring) => ring.poll_add(bell, user_data, true),
        }
    }

    /// Stop watching. Nothing more is reported for it, not even a completion that the kernel has
    /// already; an id that was removed before does no harm.
    pub fn poll_remove(&mut self, id: PollId) {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.poll_remove(id),
            Backend::Fake(ring) => ring.poll_remove(id),
        }
    }

    /// Report [`Completion::Timer`] once at `at` (CLOCK_MONOTONIC); replaces the former instant.
    /// [`Instant::NEVER`]: not at all. In the past: at once.
    pub fn wake_at(&mut self, at: Instant) {
        self.wake_at = at;
    }

    /// Start the queued requests, without waiting.
    pub fn submit(&mut self) -> Result<(), SysError> {
        match &mut self.backend {
            Backend::Kernel(ring) => ring.enter(Wait::No),
            Backend::Fake(_) => Ok(()),
        }
    }

    /// Start the queued requests and wait until there is a completion to take, or a signal came.
    pub fn submit_and_wait(&mut self) -> Result<(), SysError> {
        match &mut self.backend {
            Backend::Kernel(ring) => {
                let wait = if self.wake_at == Instant::NEVER {
                    Wait::Forever
                } else {
                    let span = self.wake_at.since(clock::now());
                    // If the timer is due, still collect other completions.
                    if span == Duration::ZERO {
                        Wait::No
                    } else {
                        Wait::AtMost(span)
                    }
                };
                ring.enter(wait)
            }
            Backend::Fake(_) => Ok(()),
        }
    }

    /// The next completion, without waiting. The timer's comes last.
    pub fn next_completion(&mut self) -> Option<Completion> {
        let (taken, now) = match &mut self.backend {
            Backend::Kernel(ring) => (ring.next_completion(), None),
            Backend::Fake(ring) => (ring.next_completion(), Some(ring.now())),
        };
        if taken.is_some() || self.wake_at == Instant::NEVER {
            return taken;
        }
        if now.unwrap_or_else(clock::now) < self.wake_at {
            return None;
        }
        self.wake_at = Instant::NEVER;
        Some(Completion::Timer)
    }

    /// Reads and writes that were queued and have not been reported.
    pub fn read_count(&self) -> u32 {
        match &self.backend {
            Backend::Kernel(ring) => ring.read_count(),
            Backend::Fake(ring) => ring.read_count(),
        }
    }
}

/// How long to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    No,
    AtMost(Duration),
    Forever,
}

/// A piece of the segment that a read fills: one or more slots that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    slot: SlotIndex,
    offset: u32,
    bytes: u64,
}

/// Cut a read into pieces of contiguous memory and hand them out in order of the file.
///
/// Errors   InvalidInput, with the sizes that do not fit each other.
fn pieces(
    segment: &Segment,
    limits: RingLimits,
    read: &SlotRead<'_>,
    mut take: impl FnMut(Piece),
) -> io::Result<()> {
    let slot_bytes = u64::from(segment.slot_bytes());
    let first_offset = read.range.start.0 % slot_bytes;
    let length = read.range.length.0;
    let room = (read.slots.len() as u64).saturating_mul(slot_bytes) - first_offset.min(slot_bytes);
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if read.slots.is_empty() || read.slots.len() > limits.slots_per_read_max as usize {
        return wrong(format!(
            "a read into {} buffers; expected 1 to {}",
            read.slots.len(),
            limits.slots_per_read_max
        ));
    }
    // The kernel caps one request at this (MAX_RW_COUNT), and answers in an i32.
    if length == 0 || length > room || length > 0x7fff_f000 {
        return wrong(format!(
            "a read of {length} bytes into {room} bytes of buffers"
        ));
    }
    if i64::try_from(read.range.end()).is_err() {
        return wrong(format!("a read up to byte {}", read.range.end()));
    }
    if let Some(slot) = read
        .slots
        .iter()
        .find(|slot| slot.0 >= segment.slot_count())
    {
        return wrong(format!(
            "buffer {} of a cache of {}",
            slot.0,
            segment.slot_count()
        ));
    }
    let mut left = length;
    let mut offset = first_offset;
    let mut piece: Option<(Piece, u32)> = None;
    for slot in read.slots {
        if left == 0 {
            break;
        }
        let bytes = left.min(slot_bytes - offset);
        match &mut piece {
            Some((run, last)) if *last + 1 == slot.0 => {
                run.bytes += bytes;
                *last = slot.0;
            }
            _ => {
                if let Some((run, _)) = piece.take() {
                    take(run);
                }
                let run = Piece {
                    slot: *slot,
                    offset: offset as u32,
                    bytes,
                };
                piece = Some((run, slot.0));
            }
        }
        left -= bytes;
        offset = 0;
    }
    if let Some((run, _)) = piece {
        take(run);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
