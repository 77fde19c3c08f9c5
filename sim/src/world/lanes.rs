// SPDX-License-Identifier: Apache-2.0
//! The world's part in writes through lanes: sessions get lanes, workers reserve blocks and sync,
//! and devices write.
//!
//! Lanes and buffers have no bytes here. The checker's books track the bytes ([`crate::written`]).

use super::{What, Work, World};
use crate::client::{Answer, Message, Stage, Waiting};
use crate::disk::volatile::{Asker, News, Wake};
use crate::disk::{Done, Job, Owner};
use crate::files::FileIndex;
use rushes_core::server::*;
use rushes_core::units::*;

/// Records in the table of a lane.
const RECORDS: u32 = 16_384;

impl World {
    /// A new session gets its lane, in a world with lanes.
    pub(super) fn add_lane(&mut self, session: SessionId) {
        if self.lane_pages == 0 {
            return;
        }
        self.lane_count += 1;
        self.step(Event::LaneAdded {
            lane: LaneId(self.lane_count),
            session: Some(session),
            page_count: self.lane_pages,
            record_count: RECORDS,
        });
    }

    /// The event for a client's message about a write.
    pub(super) fn write_event(&mut self, session: SessionId, message: Message) -> Event {
        match message {
            Message::WriteBegin {
                handle,
                request,
                range,
                sent,
            } => Event::WriteBegin {
                session,
                handle,
                request,
                range,
                sent,
            },
            Message::WriteEnd { request } => Event::WriteEnd { session, request },
            Message::Sync { handle, request } => Event::Sync {
                session,
                handle,
                request,
            },
            Message::Hold { request, file } => Event::Hold {
                session,
                request,
                key: self.files.get(file).key,
            },
            Message::Wrote {
                request,
                file,
                range,
                write,
            } => {
                let change = (file, range);
                self.checker
                    .native_asked(self.now, session, request, change, write);
                Event::Changed {
                    session,
                    request,
                    key: self.files.get(file).key,
                    range,
                    has_bytes: true,
                }
            }
            _ => unreachable!("a message about a write"),
        }
    }

    /// Handles an answer that is not the last one of its request. False: it is.
    pub(super) fn write_goes_on(
        &mut self,
        client: u32,
        life: u32,
        request: RequestId,
        answer: Answer,
    ) -> bool {
        let hand = &mut self.clients[client as usize].hand;
        let mut waiting = hand.waiting.iter().copied();
        let Some(waiting) = waiting.find(|waiting| waiting.request == request) else {
            return false;
        };
        let message = match (waiting.stage, answer) {
            (_, Answer::Granted(_)) => Message::WriteEnd { request },
            (Stage::Write, Answer::Plain) => {
                hand.set_stage(request, Stage::Held);
                let file = waiting.file;
                Message::Hold { request, file }
            }
            (Stage::Held, Answer::Done) => {
                hand.set_stage(request, Stage::Asked);
                self.write_natively(client, &waiting)
            }
            (Stage::Sync, Answer::Plain) => {
                // The client's own sync: neither kernel nor drive has any byte to write.
                let answer = Answer::Done;
                let at = self.now + self.latency.door;
                let answered = What::Answered {
                    client,
                    life,
                    request,
                    answer,
                };
                self.queue.push(at, answered);
                return true;
            }
            _ => return false,
        };
        let arrive = What::Arrive {
            client,
            life,
            message,
        };
        self.queue.push(self.now + self.latency.door, arrive);
        true
    }

    /// A client writes on its own descriptor, and reports that. Readers see its bytes at once.
    fn write_natively(&mut self, client: u32, waiting: &Waiting) -> Message {
        let Waiting {
            request,
            file,
            range,
            ..
        } = *waiting;
        let it = self.files.get_mut(file);
        self.spaces[it.device.0 as usize].reserve(it, range, 0);
        it.size = it.size.max(range.end());
        it.told_at = Some(self.now);
        let disk = it.device;
        self.files.stamp(file, self.now);
        let write = self.checker.written.native_write(file, range);
        let job = Job::native_write(client, file, range, self.now);
        self.queue.push(self.now, What::Job { disk, job });
        Message::Wrote {
            request,
            file,
            range,
            write,
        }
    }

    /// An action for a device or a worker.
    pub(super) fn perform_write(&mut self, action: &Action) {
        let (file, work, span) = match *action {
            Action::SubmitWrite(io) => return self.submit_write(&io),
            Action::Flush { device } => return self.flush(device, Asker::Server),
            Action::Reserve {
                file,
                needed,
                wished_end,
            } => {
                let work = Work::Reserve { needed, wished_end };
                (file, work, self.latency.reserve)
            }
            Action::Trim { file, size } => (file, Work::Trim { size }, self.latency.submit),
            Action::Clean { file } => (file, Work::Settle, self.latency.submit),
            Action::Sync { file } => (file, Work::Sync, self.latency.submit),
            Action::WriteOut { file } => (file, Work::WriteOut, self.latency.submit),
            _ => return,
        };
        self.queue
            .push(self.now + span, What::Worked { file, work });
    }

    fn submit_write(&mut self, io: &IoWrite) {
        let Some(file) = self.files.by_id(io.file) else {
            return;
        };
        let job = Job {
            owner: Owner::Server(io.io),
            file: Some(file),
            range: io.range,
            write: true,
            class: io.class,
            arrived: self.now,
        };
        let disk = io.device;
        let at = self.now + self.latency.submit;
        self.queue.push(at, What::Job { disk, job });
    }

    /// A worker has done its work on a file.
    pub(super) fn worked(&mut self, id: FileId, work: Work) {
        let Some(file) = self.files.by_id(id) else {
            return;
        };
        let event = match work {
            Work::Reserve { needed, wished_end } => {
                let it = self.files.get_mut(file);
                let space = &mut self.spaces[it.device.0 as usize];
                let result = match space.reserve(it, needed, wished_end) {
                    true => Ok(it.extents.clone()),
                    false => Err(Errno::NO_SPACE),
                };
                Event::Reserved { file: id, result }
            }
            Work::Trim { size } => {
                self.trim(file, size.0);
                self.settled(id, file)
            }
            Work::Settle => self.settled(id, file),
            Work::Sync => return self.flush(self.files.get(file).device, Asker::Sync(id)),
            // Bytes through the kernel's cache go to the device at once.
            Work::WriteOut => synced(id),
        };
        self.step(event);
    }

    /// Sets times, which is a change like any other.
    fn settled(&mut self, id: FileId, file: FileIndex) -> Event {
        self.files.stamp(file, self.now);
        let version = self.files.get(file).version;
        Event::Settled { file: id, version }
    }

    fn trim(&mut self, file: FileIndex, size: u64) {
        let it = self.files.get_mut(file);
        self.spaces[it.device.0 as usize].trim(it, size);
    }

    /// The driver frees the blocks that a forgotten file had reserved.
    pub(super) fn give_back(&mut self, id: FileId) {
        if let Some(file) = self.files.by_id(id)
            && self.checker.written.has(file)
        {
            self.trim(file, self.files.get(file).size);
        }
    }

    /// The drive flushes its memory to the medium, if it has one.
    fn flush(&mut self, disk: DeviceId, asker: Asker) {
        let it = &mut self.disks[disk.0 as usize];
        if it.volatile.is_none() {
            let outcome = match asker {
                Asker::Server => Flushed::Never,
                Asker::Sync(_) => Flushed::Done,
            };
            return self.flushed(disk, asker, outcome);
        }
        let next = it.flush(self.now, asker, &self.files);
        self.drive_goes_on(disk, next);
    }

    fn flushed(&mut self, device: DeviceId, asker: Asker, outcome: Flushed) {
        let event = match asker {
            Asker::Server => Event::Flushed { device, outcome },
            Asker::Sync(file) => synced(file),
        };
        let at = self.now + self.latency.complete;
        self.queue.push(at, What::Told(Box::new(event)));
    }

    /// A drive with a memory is woken.
    pub(super) fn drive_wakes(&mut self, disk: DeviceId, wake: Wake) {
        if let Wake::Taken(job, failed) = wake {
            let done = Done {
                job,
                failed,
                serial: 0,
            };
            self.ended(disk, &done);
        }
        let next = self.disks[disk.0 as usize].wake(self.now, wake, &self.files);
        self.drive_goes_on(disk, next);
    }

    /// A disk got work. `next`: the end of its request in service, if that is new.
    pub(super) fn drive_goes_on(&mut self, disk: DeviceId, next: Option<Instant>) {
        if let Some(at) = next {
            self.queue.push(at, What::DiskDone { disk });
        }
        for news in self.disks[disk.0 as usize].take_news() {
            let written = &mut self.checker.written;
            match news {
                News::Wake(at, wake) => self.queue.push(at, What::Drive { disk, wake }),
                News::Takes(io, pieces) => written.drive_took(disk, io, &pieces),
                News::Destages(run) => written.destage_begins(disk, run),
                News::Destaged => written.destage_ends(disk),
                News::Flushed(asker, outcome) => self.flushed(disk, asker, outcome),
            }
        }
    }

    /// A device has written the server's request.
    pub(super) fn wrote(&mut self, io: IoId, done: &Done) {
        let range = done.job.range;
        let result = match done.failed {
            true => Err(Errno::IO),
            false => Ok(range.length),
        };
        if let (Some(file), false) = (done.job.file, done.failed) {
            let it = self.files.get_mut(file);
            let volatile = &self.disks[it.device.0 as usize].volatile;
            let is_volatile = volatile.as_ref().is_some_and(|it| !it.plan.no_flush);
            self.checker.written.device_wrote(self.now, io, is_volatile);
            self.wrote_at = self.now;
            it.size = it.size.max(range.end());
            self.files.stamp(file, self.now);
        }
        let at = self.now + self.latency.complete;
        self.queue.push(at, What::IoDone { io, result });
    }

    /// At the end: no client waits, and no acknowledged byte is missing.
    pub fn finish(&mut self) {
        let (files, disks) = (&self.files, &self.disks);
        let never_heals = |file: FileIndex| {
            let bad = &disks[files.get(file).device.0 as usize].faults.bad;
            let mut bad = bad.iter().filter(|bad| bad.to_ms == 0);
            bad.any(|bad| {
                let mut extents = files.get(file).extents.iter();
                extents.any(|extent| {
                    let start = extent.physical.0;
                    start < bad.start + bad.bytes && bad.start < start + extent.length.0
                })
            })
        };
        self.checker.finish(self.now, files, never_heals);
    }
}

fn synced(file: FileId) -> Event {
    Event::Synced {
        file,
        result: Ok(()),
    }
}
