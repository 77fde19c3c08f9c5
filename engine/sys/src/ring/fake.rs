// SPDX-License-Identifier: Apache-2.0
//! A ring in which the test is the kernel.

use super::{Completion, FileWrite, PollId, RingLimits, SlotRead, pieces};
use crate::Segment;
use rushes_core::server::{Errno, IoClass};
use rushes_core::units::*;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A read that waits for the test to end it.
#[derive(Clone, Debug)]
pub struct FakeRead {
    /// The caller's tag.
    pub user_data: u64,
    /// From which file.
    pub file: Arc<OwnedFd>,
    /// Which bytes.
    pub range: ByteRange,
    /// Where to.
    pub slots: Vec<SlotIndex>,
    /// Priority.
    pub class: IoClass,
}

/// A descriptor that is watched.
#[derive(Clone, Debug)]
pub struct FakePoll {
    /// For removal.
    pub id: PollId,
    /// The caller's tag.
    pub user_data: u64,
    /// Which.
    pub fd: Arc<OwnedFd>,
    /// A doorbell, silenced by the ring.
    pub bell: bool,
}

/// The test's side of [`super::Ring::fake`]; a clone is the same ring.
#[derive(Clone)]
pub struct FakeRing {
    state: Arc<Mutex<State>>,
}

struct State {
    segment: Arc<Segment>,
    limits: RingLimits,
    reads: Vec<FakeRead>,
    writes: Vec<FileWrite>,
    polls: Vec<FakePoll>,
    completions: VecDeque<Completion>,
    next_poll: u32,
    now: Instant,
}

impl FakeRing {
    pub(super) fn new(segment: Arc<Segment>, limits: RingLimits) -> FakeRing {
        FakeRing {
            state: Arc::new(Mutex::new(State {
                segment,
                limits,
                reads: Vec::new(),
                writes: Vec::new(),
                polls: Vec::new(),
                completions: VecDeque::new(),
                next_poll: 0,
                now: Instant::ZERO,
            })),
        }
    }

    /// Reads that have not ended, in the order they were queued.
    pub fn reads(&self) -> Vec<FakeRead> {
        self.lock().reads.clone()
    }

    /// The descriptors that are watched.
    pub fn polls(&self) -> Vec<FakePoll> {
        self.lock().polls.clone()
    }

    /// Really read the bytes of the first read with this tag, and end it. False: there is none.
    pub fn serve(&self, user_data: u64) -> bool {
        let Some(read) = self.take(user_data) else {
            return false;
        };
        let segment = Arc::clone(&self.lock().segment);
        let result = serve(&segment, &read)
            .map(ByteCount)
            .map_err(|error| crate::error::errno_of(&error));
        self.lock()
            .completions
            .push_back(Completion::Read { user_data, result });
        true
    }

    /// End the first read with this tag by `result`, without reading. False: there is none.
    pub fn finish(&self, user_data: u64, result: Result<ByteCount, Errno>) -> bool {
        if self.take(user_data).is_none() {
            return false;
        }
        self.lock()
            .completions
            .push_back(Completion::Read { user_data, result });
        true
    }

    /// Report all watched descriptors that are really ready now.
    pub fn poll_now(&self) {
        for poll in self.polls() {
            let completion = if poll.bell {
                match crate::bell::silence(&*poll.fd) {
                    Ok(true) => Completion::Bell {
                        user_data: poll.user_data,
                    },
                    _ => continue,
                }
            } else {
                match readiness(&poll) {
                    Some(completion) => completion,
                    None => continue,
                }
            };
            self.lock().completions.push_back(completion);
        }
    }

    /// Set the clock that [`super::Ring::wake_at`] is compared with.
    pub fn set_now(&self, now: Instant) {
        self.lock().now = now;
    }

    pub(super) fn now(&self) -> Instant {
        self.lock().now
    }

    pub(super) fn read(&self, read: &SlotRead<'_>) -> io::Result<()> {
        let mut state = self.lock();
        if state.reads.len() + state.writes.len() >= state.limits.read_count_max as usize {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        pieces(&state.segment, state.limits, read, |_| ())?;
        state.reads.push(FakeRead {
            user_data: read.user_data,
            file: Arc::clone(read.file),
            range: read.range,
            slots: read.slots.to_vec(),
            class: read.class,
        });
        Ok(())
    }

    pub(super) fn write(&self, write: FileWrite) -> io::Result<()> {
        let mut state = self.lock();
        if state.reads.len() + state.writes.len() >= state.limits.read_count_max as usize {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        state.writes.push(write);
        Ok(())
    }

    /// Writes that have not ended, in the order they were queued.
    pub fn writes(&self) -> Vec<FileWrite> {
        self.lock().writes.clone()
    }

    /// End the first write with this tag by `result`, without writing. False: there is none.
    pub fn finish_write(&self, user_data: u64, result: Result<ByteCount, Errno>) -> bool {
        let mut state = self.lock();
        let Some(position) = state
            .writes
            .iter()
            .position(|write| write.user_data == user_data)
        else {
            return false;
        };
        state.writes.remove(position);
        state
            .completions
            .push_back(Completion::Written { user_data, result });
        true
    }

    pub(super) fn poll_add(
        &self,
        fd: Arc<OwnedFd>,
        user_data: u64,
        bell: bool,
    ) -> io::Result<PollId> {
        let mut state = self.lock();
        if state.polls.len() >= state.limits.poll_count_max as usize {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let id = PollId {
            index: state.next_poll,
            generation: 0,
        };
        state.next_poll += 1;
        state.polls.push(FakePoll {
            id,
            user_data,
            fd,
            bell,
        });
        Ok(id)
    }

    pub(super) fn poll_remove(&self, id: PollId) {
        let mut state = self.lock();
        let Some(position) = state.polls.iter().position(|poll| poll.id == id) else {
            return;
        };
        let gone = state.polls.remove(position).user_data;
        state.completions.retain(|completion| match completion {
            Completion::Ready { user_data, .. } | Completion::Bell { user_data } => {
                *user_data != gone
            }
            _ => true,
        });
    }

    pub(super) fn next_completion(&self) -> Option<Completion> {
        self.lock().completions.pop_front()
    }

    pub(super) fn read_count(&self) -> u32 {
        let state = self.lock();
        (state.reads.len() + state.writes.len()) as u32
    }

    fn take(&self, user_data: u64) -> Option<FakeRead> {
        let mut state = self.lock();
        let position = state
            .reads
            .iter()
            .position(|read| read.user_data == user_data)?;
        Some(state.reads.remove(position))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(segment: &Segment, read: &FakeRead) -> io::Result<u64> {
    let slot_bytes = u64::from(segment.slot_bytes());
    let mut done = 0;
    for slot in &read.slots {
        let position = read.range.start.0 + done;
        let offset = (position % slot_bytes) as u32;
        let wanted = (slot_bytes - u64::from(offset)).min(read.range.length.0 - done);
        let count =
            segment.read_into(read.file.as_fd(), position, *slot, offset, wanted as u32)? as u64;
        done += count;
        if count < wanted {
            break;
        }
    }
    Ok(done)
}

fn readiness(poll: &FakePoll) -> Option<Completion> {
    use rustix::event::{PollFd, PollFlags};
    let mut fds = [PollFd::new(&*poll.fd, PollFlags::IN | PollFlags::RDHUP)];
    let zero = crate::clock::timespec(Duration::ZERO);
    rustix::event::poll(&mut fds, Some(&zero)).ok()?;
    let events = fds[0].revents();
    if events.is_empty() {
        return None;
    }
    Some(Completion::Ready {
        user_data: poll.user_data,
        readable: events.contains(PollFlags::IN),
        hung_up: events.intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR),
    })
}
