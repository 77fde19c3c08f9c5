// SPDX-License-Identifier: Apache-2.0
//! The ring over the kernel's io_uring.
//!
//! Every request in flight has an entry in a table of fixed size; the kernel's tag is the entry's
//! index and generation. An entry owns the file, the io vectors and a doorbell's word, which the
//! kernel may still touch. It is reused only after the kernel's last completion for it.

use super::{Completion, FileWrite, PollId, RingFacts, RingLimits, SlotRead, Wait, pieces};
use crate::error::errno_of;
use crate::{Mapping, Segment, SysError, clock};
use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use rushes_core::server::{Errno, IoClass};
use rushes_core::units::*;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The kernel takes at most 1 GiB as one registered buffer.
const REGISTERED_BYTES_MAX: u64 = 1 << 30;
/// At most so many registered buffers (IORING_MAX_REG_BUFFERS).
const REGISTERED_COUNT_MAX: u64 = 1 << 14;
/// Entries of the submission queue; when it is full, the ring submits it.
const SUBMISSION_ENTRIES: u32 = 256;
/// Tag of requests whose completions are ignored.
const TAG_NOBODY: u64 = u64::MAX;
/// Generations wrap here, so that no tag is [`TAG_NOBODY`].
const GENERATION_MASK: u32 = 0x7fff_ffff;
/// How long the drop of a ring waits for requests that the kernel still holds.
const DROP_WAIT: Duration = Duration::from_s(2);

pub(super) struct KernelRing {
    uring: ManuallyDrop<IoUring>,
    /// Fixed length: entries hold memory that the kernel writes to, so they never move.
    entries: ManuallyDrop<Box<[Entry]>>,
    segment: ManuallyDrop<Arc<Segment>>,
    limits: RingLimits,
    facts: RingFacts,
    /// Size of each registered buffer but the last; 0 when nothing is registered.
    registered_bytes: u64,
    free: Vec<u32>,
    /// Watches to arm: new ones, and those whose completion was reported.
    rearm: Vec<u32>,
    /// Reads and writes to send again.
    resend: VecDeque<u32>,
    read_count: u32,
    poll_count: u32,
    /// Requests that the kernel holds.
    in_kernel: u32,
}

struct Entry {
    generation: u32,
    user_data: u64,
    /// True while the kernel owes a completion for it.
    in_kernel: bool,
    /// Kept (with its capacity) from use to use, so that a read allocates nothing.
    vectors: Vec<libc::iovec>,
    bell_count: UnsafeCell<u64>,
    use_: Use,
}

enum Use {
    Free,
    Read(ReadState),
    Watch {
        fd: Arc<OwnedFd>,
        bell: bool,
    },
    /// A removed watch that the kernel still holds.
    Leaving {
        _fd: Arc<OwnedFd>,
    },
}

struct ReadState {
    file: Arc<OwnedFd>,
    offset: u64,
    expected: u64,
    done: u64,
    /// Best effort once the real-time class was refused.
    class: IoClass,
    /// It was sent as real-time and got EPERM: the class may have been refused, or the read itself.
    was_refused: bool,
    /// For a write: the memory of the vectors, kept until it has ended.
    memory: Option<Box<[Arc<Mapping>]>>,
}

// SAFETY: the raw pointers inside (io vectors) point into the segment, which is shared memory owned
// through an Arc; nothing is tied to a thread but the kernel's single-issuer rule, which answers
// EEXIST when broken and is no matter of memory.
unsafe impl Send for KernelRing {}

impl KernelRing {
    pub(super) fn new(segment: Arc<Segment>, limits: RingLimits) -> Result<KernelRing, SysError> {
        assert!((1..=1024).contains(&limits.slots_per_read_max));
        let entry_count = limits.read_count_max.saturating_add(limits.poll_count_max);
        let (uring, deferred_completion) = build(entry_count)?;
        // Waiting with a time limit in the same call came with Linux 5.11, submitting without
        // keeping io vectors alive with 5.5.
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_submit_stable() {
            let old = io::Error::other("this kernel's io_uring is older than Linux 5.11");
            return Err(SysError::new("set up io_uring", "", old));
        }
        let mut probe = Probe::new();
        let probed = uring.submitter().register_probe(&mut probe).is_ok();
        let registered_bytes = register(&uring, &segment);
        let facts = RingFacts {
            buffers_registered: registered_bytes != 0,
            vectored_registered: registered_bytes != 0
                && probed
                && probe.is_supported(opcode::ReadvFixed::CODE),
            deferred_completion,
            real_time_refused: false,
        };
        let entries = (0..entry_count)
            .map(|_| Entry {
                generation: 0,
                user_data: 0,
                in_kernel: false,
                vectors: Vec::new(),
                bell_count: UnsafeCell::new(0),
                use_: Use::Free,
            })
            .collect();
        Ok(KernelRing {
            uring: ManuallyDrop::new(uring),
            entries: ManuallyDrop::new(entries),
            segment: ManuallyDrop::new(segment),
            limits,
            facts,
            registered_bytes,
            free: (0..entry_count).rev().collect(),
            rearm: Vec::with_capacity(limits.poll_count_max as usize),
            resend: VecDeque::with_capacity(limits.read_count_max as usize),
            read_count: 0,
            poll_count: 0,
            in_kernel: 0,
        })
    }

    pub(super) fn facts(&self) -> RingFacts {
        self.facts
    }

    pub(super) fn read_count(&self) -> u32 {
        self.read_count
    }

    pub(super) fn read(&mut self, read: &SlotRead<'_>) -> io::Result<()> {
        if self.read_count >= self.limits.read_count_max {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let Some(&index) = self.free.last() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let segment = &*self.segment;
        let entry = &mut self.entries[index as usize];
        entry.vectors.clear();
        pieces(segment, self.limits, read, |piece| {
            entry.vectors.push(libc::iovec {
                iov_base: segment.pointer(piece.slot, piece.offset).as_ptr().cast(),
                iov_len: piece.bytes as usize,
            });
        })?;
        self.free.pop();
        entry.user_data = read.user_data;
        entry.use_ = Use::Read(ReadState {
            file: Arc::clone(read.file),
            offset: read.range.start.0,
            expected: read.expected.0.min(read.range.length.0),
            done: 0,
            class: read.class,
            was_refused: false,
            memory: None,
        });
        self.read_count += 1;
        self.send_read(index);
        Ok(())
    }

    pub(super) fn write(&mut self, write: FileWrite) -> io::Result<()> {
        if self.read_count >= self.limits.read_count_max {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let Some(index) = self.free.pop() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let entry = &mut self.entries[index as usize];
        entry.vectors.clear();
        for part in &write.parts {
            let start = part.memory.start().as_ptr().wrapping_add(part.offset);
            entry.vectors.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: part.bytes,
            });
        }
        entry.user_data = write.user_data;
        let expected = write.bytes();
        entry.use_ = Use::Read(ReadState {
            file: write.file,
            offset: write.offset,
            expected,
            done: 0,
            class: write.class,
            was_refused: false,
            memory: Some(write.parts.into_iter().map(|part| part.memory).collect()),
        });
        self.read_count += 1;
        self.send_read(index);
        Ok(())
    }

    pub(super) fn hold(&mut self, file: &OwnedFd) -> io::Result<()> {
        self.uring.submitter().register_files(&[file.as_raw_fd()])
    }

    pub(super) fn poll_add(
        &mut self,
        fd: Arc<OwnedFd>,
        user_data: u64,
        bell: bool,
    ) -> io::Result<PollId> {
        if self.poll_count >= self.limits.poll_count_max {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let Some(index) = self.free.pop() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let entry = &mut self.entries[index as usize];
        entry.user_data = user_data;
        entry.use_ = Use::Watch { fd, bell };
        self.poll_count += 1;
        self.rearm.push(index);
        Ok(PollId {
            index,
            generation: self.entries[index as usize].generation,
        })
    }

    pub(super) fn poll_remove(&mut self, id: PollId) {
        let Some(entry) = self.entries.get_mut(id.index as usize) else {
            return;
        };
        if entry.generation != id.generation || !matches!(entry.use_, Use::Watch { .. }) {
            return;
        }
        self.poll_count -= 1;
        let Use::Watch { fd, .. } = std::mem::replace(&mut entry.use_, Use::Free) else {
            return;
        };
        if !entry.in_kernel {
            // Never armed, or reported and waiting to be armed again.
            self.rearm.retain(|&index| index != id.index);
            self.release(id.index);
            return;
        }
        entry.use_ = Use::Leaving { _fd: fd };
        let cancel = opcode::AsyncCancel::new(tag(id.index, id.generation))
            .build()
            .user_data(TAG_NOBODY);
        // SAFETY: a cancellation refers to no memory.
        unsafe { self.push(&cancel) };
    }

    /// Submit the queued requests to the kernel and wait by `wait`.
    pub(super) fn enter(&mut self, wait: Wait) -> Result<(), SysError> {
        while let Some(index) = self.resend.pop_front() {
            self.send_read(index);
        }
        for position in 0..self.rearm.len() {
            let index = self.rearm[position];
            self.arm(index);
        }
        self.rearm.clear();

        let ready = !self.uring.completion().is_empty();
        let entered = match wait {
            // With deferred completions, the crate sees the kernel's flag for them and enters the
            // kernel.
            Wait::No => self.uring.submit(),
            _ if ready => self.uring.submit(),
            Wait::Forever => self.uring.submit_and_wait(1),
            Wait::AtMost(span) => {
                let span = clock::timespec(span);
                let span = Timespec::new()
                    .sec(span.tv_sec as u64)
                    .nsec(span.tv_nsec as u32);
                let args = SubmitArgs::new().timespec(&span);
                self.uring.submitter().submit_with_args(1, &args)
            }
        };
        match entered {
            Ok(_) => Ok(()),
            // ETIME: the time is up. EINTR: a signal. EBUSY, EAGAIN: take completions first.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(SysError::new("wait for the device", "", error)),
        }
    }

    pub(super) fn next_completion(&mut self) -> Option<Completion> {
        loop {
            let cqe = self.uring.completion().next()?;
            if cqe.user_data() == TAG_NOBODY {
                continue;
            }
            if let Some(completion) = self.take(&cqe) {
                return Some(completion);
            }
        }
    }

    /// The caller's completion for one of the kernel; None when it is not for the caller.
    fn take(&mut self, cqe: &cqueue::Entry) -> Option<Completion> {
        let (index, generation) = untag(cqe.user_data());
        let entry = self.entries.get_mut(index as usize)?;
        if entry.generation != generation || !entry.in_kernel {
            return None;
        }
        entry.in_kernel = false;
        self.in_kernel -= 1;
        let user_data = entry.user_data;
        let result = match u32::try_from(cqe.result()) {
            Ok(count) => Ok(count),
            Err(_) => Err(Errno(cqe.result().unsigned_abs())),
        };
        match &mut entry.use_ {
            Use::Free => None,
            Use::Leaving { .. } => {
                self.release(index);
                None
            }
            Use::Watch { bell, .. } => {
                let bell = *bell;
                self.rearm.push(index);
                watch_result(user_data, bell, result)
            }
            Use::Read(read) => {
                let result = match result {
                    // The real-time class needs a capability that containers drop. A file system
                    // may answer the same for the file itself, as servers of FUSE do. So it is sent
                    // once more without the class.
                    Err(Errno(1)) if read.class == IoClass::RealTime => {
                        read.class = IoClass::BestEffort;
                        read.was_refused = true;
                        self.resend.push_back(index);
                        return None;
                    }
                    // EINTR, EAGAIN: send it again.
                    Err(Errno(4 | 11)) => {
                        self.resend.push_back(index);
                        return None;
                    }
                    Err(errno) => Err(errno),
                    Ok(count) => {
                        read.done += u64::from(count);
                        if count != 0 && read.done < read.expected && can_go_on(read.done) {
                            advance(&mut entry.vectors, u64::from(count));
                            self.resend.push_back(index);
                            return None;
                        }
                        Ok(ByteCount(read.done))
                    }
                };
                // Without the class it got another answer: so the class was refused, not the file.
                self.facts.real_time_refused |= read.was_refused && result != Err(Errno(1));
                let is_write = read.memory.is_some();
                self.read_count -= 1;
                self.release(index);
                Some(if is_write {
                    Completion::Written { user_data, result }
                } else {
                    Completion::Read { user_data, result }
                })
            }
        }
    }

    fn release(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.use_ = Use::Free;
        entry.generation = (entry.generation + 1) & GENERATION_MASK;
        self.free.push(index);
    }

    fn arm(&mut self, index: u32) {
        let entry = &self.entries[index as usize];
        let Use::Watch { fd, bell } = &entry.use_ else {
            return;
        };
        let fd = Fd(fd.as_raw_fd());
        let sqe = if *bell {
            opcode::Read::new(fd, entry.bell_count.get().cast(), 8)
                .offset(u64::MAX)
                .build()
        } else {
            opcode::PollAdd::new(fd, (libc::POLLIN | libc::POLLRDHUP) as u32).build()
        };
        let sqe = sqe.user_data(tag(index, entry.generation));
        // SAFETY: the doorbell's word lives in the entry, which does not move and is not reused
        // until the kernel has answered; no code reads it.
        unsafe { self.push(&sqe) };
        self.sent(index);
    }

    fn send_read(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        let Use::Read(read) = &mut entry.use_ else {
            return;
        };
        let fd = Fd(read.file.as_raw_fd());
        if read.class == IoClass::RealTime && self.facts.real_time_refused {
            read.class = IoClass::BestEffort;
        }
        let priority = priority_of(read.class);
        let offset = read.offset + read.done;
        let vectors = entry.vectors.as_ptr();
        let count = entry.vectors.len() as u32;
        let is_write = read.memory.is_some();
        let entry = &self.entries[index as usize];
        if is_write {
            let sqe = opcode::Writev::new(fd, vectors, count)
                .offset(offset)
                .ioprio(priority)
                .build()
                .user_data(tag(index, entry.generation));
            // SAFETY: the vectors lie in memory that the entry holds (`FileWrite::check`), and are
            // owned by `self`; both are kept until the kernel has answered (see `drop`).
            unsafe { self.push(&sqe) };
            self.sent(index);
            return;
        }
        let sqe = match (self.registered_index(&entry.vectors), &entry.vectors[..]) {
            (Some(buffer), [one]) => {
                let length = one.iov_len as u32;
                opcode::ReadFixed::new(fd, one.iov_base.cast(), length, buffer)
                    .offset(offset)
                    .ioprio(priority)
                    .build()
            }
            (Some(buffer), _) if self.facts.vectored_registered => {
                opcode::ReadvFixed::new(fd, vectors, count, buffer)
                    .offset(offset)
                    .ioprio(priority)
                    .build()
            }
            _ => opcode::Readv::new(fd, vectors, count)
                .offset(offset)
                .ioprio(priority)
                .build(),
        };
        let sqe = sqe.user_data(tag(index, entry.generation));
        // SAFETY: the vectors point into the segment, checked against its bounds when they were
        // made; the segment and the vectors are owned by `self` and kept until the kernel has
        // answered (see `drop`). The file is held by the entry.
        unsafe { self.push(&sqe) };
        self.sent(index);
    }

    fn sent(&mut self, index: u32) {
        self.entries[index as usize].in_kernel = true;
        self.in_kernel += 1;
    }

    /// The registered buffer that all the vectors lie in, if it is one.
    fn registered_index(&self, vectors: &[libc::iovec]) -> Option<u16> {
        if self.registered_bytes == 0 {
            return None;
        }
        let start = self.segment.mapping().start().as_ptr() as u64;
        let mut buffer = None;
        for vector in vectors {
            let first = vector.iov_base as u64 - start;
            let last = first + vector.iov_len as u64 - 1;
            let index = first / self.registered_bytes;
            if last / self.registered_bytes != index || *buffer.get_or_insert(index) != index {
                return None;
            }
        }
        buffer.and_then(|index| u16::try_from(index).ok())
    }

    /// Queue a request, making room by submitting when there is none.
    ///
    /// # Safety
    /// The memory that the request points to stays valid until its completion.
    unsafe fn push(&mut self, sqe: &squeue::Entry) {
        loop {
            // SAFETY: passed on to our caller.
            if unsafe { self.uring.submission().push(sqe) }.is_ok() {
                return;
            }
            // The kernel takes the whole queue, or answers EBUSY when its completion queue has
            // overflowed: that does not last, as this queue is as large as the table.
            let _ = self.uring.submit();
        }
    }
}

impl Drop for KernelRing {
    /// Frees no memory that the kernel may still write to. If a request does not end in time, its
    /// memory is leaked: a read that a hung disk answers in an hour must not land in memory that
    /// has another use by then.
    fn drop(&mut self) {
        let deadline = clock::now() + DROP_WAIT;
        let _ = self.uring.submit();
        let limit = Timespec::new().sec(1);
        let _ = self
            .uring
            .submitter()
            .register_sync_cancel(Some(limit), CancelBuilder::any());
        while self.in_kernel > 0 && clock::now() < deadline {
            let span = Timespec::new().nsec(20_000_000);
            let args = SubmitArgs::new().timespec(&span);
            let _ = self.uring.submitter().submit_with_args(1, &args);
            while self.next_completion().is_some() {}
            self.resend.clear();
            self.rearm.clear();
            // A request that would be sent again counts as ended.
        }
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if self.in_kernel == 0 {
            // SAFETY: dropped once; the kernel holds no request, so it touches neither any more.
            unsafe {
                ManuallyDrop::drop(&mut self.entries);
                ManuallyDrop::drop(&mut self.segment);
            }
        }
    }
}

fn watch_result(user_data: u64, bell: bool, result: Result<u32, Errno>) -> Option<Completion> {
    if bell {
        // EINTR, EAGAIN, ECANCELED: arm it again. An eventfd gives no other error.
        return result.ok().map(|_| Completion::Bell { user_data });
    }
    let events = match result {
        Ok(events) => events as i32,
        Err(_) => i32::from(libc::POLLERR),
    };
    let any = |mask: i16| events & i32::from(mask) != 0;
    Some(Completion::Ready {
        user_data,
        readable: any(libc::POLLIN),
        hung_up: any(libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR | libc::POLLNVAL),
    })
}

/// Direct I/O can only go on from an aligned place; a short answer that ends elsewhere is the end
/// of the file.
fn can_go_on(done: u64) -> bool {
    done.is_multiple_of(512)
}

/// Drop the first `count` bytes from the vectors.
fn advance(vectors: &mut Vec<libc::iovec>, mut count: u64) {
    let mut whole = 0;
    for vector in vectors.iter_mut() {
        let length = vector.iov_len as u64;
        if count < length {
            vector.iov_base = vector.iov_base.wrapping_byte_add(count as usize);
            vector.iov_len -= count as usize;
            break;
        }
        count -= length;
        whole += 1;
    }
    vectors.drain(..whole);
}

/// As ioprio_set(2) counts: class in the upper three bits, level 0 (first) to 7 below. We use a
/// middle level of the real-time class, so that an operator can put other programs before or behind
/// us.
fn priority_of(class: IoClass) -> u16 {
    const fn prio(class: u16, level: u16) -> u16 {
        class << 13 | level
    }
    match class {
        IoClass::RealTime => prio(1, 4),
        IoClass::BestEffort => prio(2, 4),
        IoClass::Idle => prio(3, 7),
    }
}

fn tag(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

fn untag(tag: u64) -> (u32, u32) {
    (tag as u32, (tag >> 32) as u32)
}

fn build(entry_count: u32) -> Result<(IoUring, bool), SysError> {
    let completions = entry_count
        .saturating_add(SUBMISSION_ENTRIES)
        .next_power_of_two();
    let mut builder = IoUring::builder();
    builder
        .dontfork()
        .setup_clamp()
        .setup_cqsize(completions)
        .setup_submit_all();
    let mut best = builder.clone();
    best.setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    if let Ok(uring) = best.build(SUBMISSION_ENTRIES) {
        return Ok((uring, true));
    }
    let mut plain = IoUring::builder();
    plain.dontfork().setup_clamp().setup_cqsize(completions);
    match builder
        .build(SUBMISSION_ENTRIES)
        .or_else(|_| plain.build(SUBMISSION_ENTRIES))
    {
        Ok(uring) => Ok((uring, false)),
        Err(error) => {
            let about = match errno_of(&error) {
                Errno(1) => {
                    "forbidden here: see kernel.io_uring_disabled and the service's SystemCallFilter"
                }
                _ => "",
            };
            Err(SysError::new("set up io_uring", about, error))
        }
    }
}

/// Register the whole segment, in buffers of equal size. Returns that size; 0 when the kernel
/// refuses.
fn register(uring: &IoUring, segment: &Segment) -> u64 {
    let total = segment.mapping().bytes() as u64;
    let each = REGISTERED_BYTES_MAX.min(total);
    if total.div_ceil(each) > REGISTERED_COUNT_MAX {
        return 0;
    }
    let start = segment.mapping().start().as_ptr();
    let mut vectors = Vec::new();
    let mut position = 0;
    while position < total {
        vectors.push(libc::iovec {
            iov_base: start.wrapping_add(position as usize).cast(),
            iov_len: each.min(total - position) as usize,
        });
        position += each;
    }
    // SAFETY: the buffers are the segment's mapping, which the ring owns and gives back only after
    // the ring itself is closed and idle.
    match unsafe { uring.submitter().register_buffers(&vectors) } {
        Ok(()) => each,
        Err(_) => 0,
    }
}
