// SPDX-License-Identifier: Apache-2.0
//! Headers of files: when they are read, and the effect of their rates.
//!
//! The driver reads a header by itself, in a few places of the file, beside all requests of the
//! server to its device. A client that opens a file for the first time wants a frame of it, and one
//! that opens a clip in nine files wants nine of them one after the other: headers read between
//! those would delay all of them, and can wait for a moment. So on a device with positioning the
//! driver reads one header at a time, and only once the device has had nothing to do for a moment;
//! or at once when a reader goes on in a file, which is played without a contract until its header
//! is known.

use super::state::*;
use super::*;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// A client that was just served asks for something else within that time, if it is not done.
const QUIET: Duration = Duration::from_ms(10);
/// A reader that has read so much in a row, or so often, goes on reading. Units: bytes, reads.
const GOES_ON_BYTES: u64 = 2 << 20;
const GOES_ON_READS: u32 = 32;
/// The server waits so long for an answer of the driver.
const ANSWER: Duration = Duration::from_s(1);

/// The header of a file that goes on changing is read again after so long, then less and less
/// often.
pub(super) const REREAD: Duration = Duration::from_s(1);
const REREAD_MAX: Duration = Duration::from_s(8);
/// The beginning of a file that may hold its header. Units: bytes.
const HEADER_BYTES: u64 = 1 << 20;

/// Headers on a device that the driver has not read.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadHeaders {
    /// Since when they wait, oldest first; before them, with None, those that a reader needs now.
    /// [`File::is_header_wanted`] is true of each that still waits.
    waiting: VecDeque<(Option<Instant>, FileId)>,
    /// The file whose header the driver is reading, and since when.
    reading: Option<(FileId, Instant)>,
    /// The driver was reading one since the device last ended a batch.
    disturbs: bool,
}

impl UnreadHeaders {
    /// A batch of requests has ended: whether a header was read beside it.
    pub(super) fn disturbed(&mut self, now: Instant) -> bool {
        let is_reading = self.is_reading(now);
        core::mem::replace(&mut self.disturbs, is_reading)
    }

    fn is_reading(&self, now: Instant) -> bool {
        self.reading.is_some_and(|(_, at)| now.since(at) < ANSWER)
    }

    /// The driver has answered, or the file is gone. True: it was this one's turn, and the next may
    /// come.
    pub(super) fn ended(&mut self, id: FileId) -> bool {
        let is_this = self.reading.is_some_and(|(file, _)| file == id);
        if is_this {
            self.reading = None;
        }
        is_this
    }
}

impl Server {
    /// A client opened a file whose header was not read yet.
    pub(super) fn want_header(&mut self, id: FileId) {
        let now = self.now;
        let policy = &self.policy;
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let Some(device) = self.devices.get_mut(&file.device) else {
            return;
        };
        let is_being_read = device
            .queue
            .headers
            .reading
            .is_some_and(|(other, _)| other == id);
        if file.is_header_wanted || is_being_read || !policy.reads_headers() {
            return;
        }
        file.is_header_wanted = true;
        device.queue.headers.waiting.push_back((Some(now), id));
        let device = file.device;
        self.touch(device);
    }

    /// A read of a stream was noted: if its reader goes on, the header is needed now.
    pub(super) fn need_header(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let (id, read) = (stream.file, stream.row.read_in_a_row());
        let Some(file) = self.files.get(&id) else {
            return;
        };
        let goes_on = read.0 >= GOES_ON_BYTES || read.1 >= GOES_ON_READS;
        if !file.is_header_wanted || !goes_on {
            return;
        }
        let device_id = file.device;
        let Some(device) = self.devices.get_mut(&device_id) else {
            return;
        };
        let waiting = &mut device.queue.headers.waiting;
        if let Some(place) = waiting
            .iter()
            .position(|&(since, file)| file == id && since.is_some())
        {
            waiting.remove(place);
            waiting.push_front((None, id));
            self.touch(device_id);
        }
    }

    /// Ask the driver for the next header of a device, if this is a moment for it.
    pub(super) fn read_next_header(&mut self, id: DeviceId, actions: &mut Actions) {
        let now = self.now;
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let positions = device.positions();
        let headers = &mut device.queue.headers;
        let files = &mut self.files;
        // A file that is closed again does without.
        let is_unwanted = |file: &File| !file.is_header_wanted || file.use_count == 0;
        while let Some((_, file)) = headers.waiting.front()
            && files.get(file).is_none_or(is_unwanted)
        {
            if let Some(file) = files.get_mut(file) {
                file.is_header_wanted = false;
            }
            headers.waiting.pop_front();
        }
        let Some(&(since, file_id)) = headers.waiting.front() else {
            return;
        };
        let is_reading = headers.is_reading(now);
        let has_nothing = device.queue.flight_count == 0 && device.queue.demands.is_empty();
        let is_idle = has_nothing && !device.gaps.is_open();
        let at = match since {
            None => Instant::ZERO,
            Some(since) if is_idle => device.queue.service_started.max(since) + QUIET,
            // The end of all that the device has to do brings us here again.
            Some(_) => Instant::NEVER,
        };
        if positions && (is_reading || now < at) {
            if !is_reading && at < Instant::NEVER {
                self.rest_wake = self.rest_wake.min(at);
            }
            return self.block(id);
        }
        headers.waiting.pop_front();
        headers.reading = Some((file_id, now));
        headers.disturbs = true;
        if !headers.waiting.is_empty() {
            self.touch(id);
        }
        let Some(file) = self.files.get_mut(&file_id) else {
            return;
        };
        file.is_header_wanted = false;
        let size = ByteCount(file.size);
        actions.list.push(Action::ReadHeader {
            file: file_id,
            size,
        });
    }

    /// A header has a rate for the file, or has none any more: the contracts follow.
    pub(super) fn hinted(&mut self, id: FileId, hint: Option<RateHint>) {
        let device = self.files.get(&id).map(|file| file.device);
        if let Some((device, entry)) = device.and_then(|id| Some((id, self.devices.get_mut(&id)?)))
            && entry.queue.headers.ended(id)
        {
            self.touch(device);
        }
        let mut told: Vec<(StreamId, Option<RateHint>)> = Vec::new();
        for handle in self.handles.values_mut() {
            if matches!(handle.state, HandleState::Ready(file) if file == id) && handle.is_unruled()
            {
                let hint = hint.and_then(|hint| handle.part_of(hint));
                if handle.hint != hint {
                    handle.hint = hint;
                    told.extend(handle.stream.map(|stream| (stream, hint)));
                }
            }
        }
        for (stream, hint) in told {
            self.rate_told(stream, hint);
        }
    }

    /// A file that is being read has changed since its header was read: the header may have another
    /// rate, or may only now be there. While the file's beginning is dirty the device has an old
    /// one.
    pub(super) fn reread_header(
        &mut self,
        (session, handle): (SessionId, HandleId),
        id: FileId,
        actions: &mut Actions,
    ) {
        let (now, policy) = (self.now, &self.policy);
        let reads_header = self
            .handles
            .get(&(session, handle))
            .is_some_and(|handle| handle.is_unruled() && handle.part.is_whole());
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let likeness = file.likeness();
        if likeness == file.header.likeness || now.since(file.header.at) < file.header.wait {
            return;
        }
        let front = file.writing.dirty.next_run(0);
        let is_there = front.is_none_or(|run| run.start.0 >= HEADER_BYTES);
        if !reads_header || !is_there || !policy.reads_headers() {
            return;
        }
        file.header = Looked {
            at: now,
            wait: Duration(file.header.wait.0 * 2).min(REREAD_MAX),
            likeness,
        };
        actions.list.push(Action::ReadHeader {
            file: id,
            size: ByteCount(file.size),
        });
    }
}
