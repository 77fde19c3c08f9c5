// SPDX-License-Identifier: Apache-2.0
//! A fingerprint of a whole run: every instant, event and action, in order.
//!
//! Two runs of one seed must have the same; a difference means that something reads a clock, an
//! address or an unordered map. Not a checksum of anything stored.

use rushes_core::server::{
    Action, Actions, Event, FileFacts, IoClass, LanePart, Outcome, RateHint, RateSource, Runs,
    SlotRun, WritePart,
};
use rushes_core::units::*;

/// The fingerprint so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0x517C_C1B7_2722_0A95)
    }
}

impl Digest {
    /// Adds a number.
    pub fn mix(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 29);
    }

    fn all<const N: usize>(&mut self, values: [u64; N]) {
        for value in values {
            self.mix(value);
        }
    }

    fn text(&mut self, text: &str) {
        self.mix(text.len() as u64);
        for chunk in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn range(&mut self, range: ByteRange) {
        self.all([range.start.0, range.length.0]);
    }

    fn hint(&mut self, hint: Option<RateHint>) {
        let source = |source: RateSource| source as u64;
        match hint {
            None => self.mix(0),
            Some(RateHint::Rate(rate, from)) => self.all([1, rate.0, source(from)]),
            Some(RateHint::FramesPerKilosecond(rate, from)) => {
                self.all([2, u64::from(rate), source(from)]);
            }
        }
    }

    fn facts(&mut self, facts: &Result<FileFacts, rushes_core::server::Errno>) {
        match facts {
            Err(errno) => self.all([0, u64::from(errno.0)]),
            Ok(facts) => {
                self.all([
                    1,
                    u64::from(facts.file.0),
                    facts.key.device,
                    facts.key.inode,
                    u64::from(facts.device.0),
                    facts.size.0,
                    facts.version,
                    facts.extents.len() as u64,
                ]);
                self.hint(facts.hint);
            }
        }
    }

    /// Adds an event and its instant.
    pub fn event(&mut self, now: Instant, event: &Event) {
        self.mix(now.0);
        let (s, h, r) = (
            |s: &SessionId| u64::from(s.0),
            |h: &HandleId| u64::from(h.0),
            |r: &RequestId| r.0,
        );
        match event {
            Event::DeviceAdded { device, model } => {
                self.all([1, u64::from(device.0), model.size.0, model.read.rate.0]);
            }
            Event::PolicyChanged(policy) => self.all([2, policy.preroll.0]),
            Event::SessionOpened { session, .. } => self.all([3, s(session)]),
            Event::SessionClosed { session } => self.all([4, s(session)]),
            Event::Opening {
                session,
                handle,
                path,
                part,
            } => {
                self.all([5, s(session), h(handle)]);
                self.text(path);
                self.all([u64::from(part.index()), u64::from(part.count())]);
            }
            Event::Opened {
                session,
                handle,
                facts,
            } => {
                self.all([6, s(session), h(handle)]);
                self.facts(facts);
            }
            Event::Closed { session, handle } => self.all([7, s(session), h(handle)]),
            Event::Read {
                session,
                handle,
                request,
                range,
                sent,
            } => {
                self.all([8, s(session), h(handle), r(request), sent.0]);
                self.range(*range);
            }
            Event::ReadEnd { session, request } => self.all([9, s(session), r(request)]),
            Event::Changed {
                session,
                request,
                key,
                range,
            } => {
                self.all([10, s(session), r(request), key.inode]);
                self.range(*range);
            }
            Event::Gone {
                session,
                request,
                key,
            } => self.all([11, s(session), r(request), key.inode]),
            Event::LaneAdded {
                lane,
                session,
                page_count,
                record_count,
            } => self.all([
                19,
                u64::from(lane.0),
                session.map_or(u64::MAX, |session| u64::from(session.0)),
                u64::from(*page_count),
                u64::from(*record_count),
            ]),
            Event::Recovered {
                lane,
                record,
                facts,
                range,
                runs,
            } => {
                self.all([20, u64::from(lane.0), u64::from(*record)]);
                self.facts(&Ok(facts.clone()));
                self.range(*range);
                self.runs(runs);
            }
            Event::WriteBegin {
                session,
                handle,
                request,
                range,
                sent,
            } => {
                self.all([21, s(session), h(handle), r(request), sent.0]);
                self.range(*range);
            }
            Event::WriteEnd { session, request } => self.all([22, s(session), r(request)]),
            Event::Sync {
                session,
                handle,
                request,
            } => self.all([23, s(session), h(handle), r(request)]),
            Event::Hold {
                session,
                request,
                key,
            } => self.all([24, s(session), r(request), key.inode]),
            Event::Reserved { file, result } => {
                let found = match result {
                    Ok(extents) => extents.len() as u64,
                    Err(errno) => u64::MAX - u64::from(errno.0),
                };
                self.all([25, u64::from(file.0), found]);
            }
            Event::RecoveryEnded => self.all([29]),
            Event::RecoveryBegun => self.all([60]),
            Event::HasReserve { file } => self.all([30, u64::from(file.0)]),
            Event::WriteAbort { session, request } => self.all([27, s(session), r(request)]),
            Event::Settled { file, version } => self.all([28, u64::from(file.0), *version]),
            Event::Synced { file, result } => {
                let errno = result.err().map_or(0, |errno| errno.0);
                self.all([26, u64::from(file.0), u64::from(errno)]);
            }
            Event::Flushed { device, outcome } => {
                self.all([31, u64::from(device.0), *outcome as u64]);
            }
            Event::ForeignChange { key } => self.all([12, key.inode]),
            Event::Unlinked { key } => self.all([112, key.inode]),
            Event::LetGo { key } => self.all([34, key.inode]),
            Event::Stat {
                file,
                size,
                version,
                ..
            } => self.all([13, u64::from(file.0), size.0, *version]),
            Event::NeighbourOpened {
                beside,
                name,
                facts,
            } => {
                self.all([14, u64::from(beside.0)]);
                self.text(name);
                self.facts(facts);
            }
            Event::SessionOfPool { session, pool } => self.all([32, s(session), pool.0]),
            Event::PoolFileOpened { pool, path, facts } => {
                self.all([33, pool.0]);
                self.text(path);
                self.facts(facts);
            }
            Event::IoDone { io, result } => {
                let result = match result {
                    Ok(bytes) => bytes.0,
                    Err(errno) => u64::MAX - u64::from(errno.0),
                };
                self.all([15, io.0, result]);
            }
            Event::Timer => self.mix(16),
            Event::ForeignLoad {
                device,
                requests_per_kilosecond,
                rate,
            } => self.all([18, u64::from(device.0), *requests_per_kilosecond, rate.0]),
            Event::Hint { file, hint } => {
                self.all([17, u64::from(file.0)]);
                self.hint(*hint);
            }
        }
    }

    fn runs(&mut self, runs: &Runs) {
        for run in runs.as_slice() {
            self.all([u64::from(run.first), u64::from(run.count)]);
        }
    }

    fn lane_part(&mut self, part: &LanePart) {
        self.all([u64::from(part.lane.0), part.offset, part.length]);
    }

    fn parts(&mut self, parts: &[WritePart]) {
        for part in parts {
            match part {
                WritePart::Lane(part) => self.lane_part(part),
                WritePart::Slot {
                    slot,
                    offset,
                    length,
                } => self.all([
                    1 << 32 | u64::from(slot.0),
                    (*offset).into(),
                    (*length).into(),
                ]),
            }
        }
    }

    fn slots(&mut self, actions: &Actions, run: SlotRun) {
        for slot in actions.slots_of(run) {
            self.mix(u64::from(slot.0));
        }
    }

    /// Adds what the server wants done.
    pub fn actions(&mut self, actions: &Actions) {
        for action in &actions.list {
            match action {
                Action::Reply {
                    session,
                    request,
                    outcome,
                } => {
                    self.all([101, u64::from(session.0), request.0]);
                    match outcome {
                        Outcome::Data {
                            slots,
                            first_offset,
                            length,
                        } => {
                            self.all([1, u64::from(*first_offset), length.0]);
                            self.slots(actions, *slots);
                        }
                        Outcome::Done => self.mix(2),
                        Outcome::Failed(errno) => self.all([3, u64::from(errno.0)]),
                        Outcome::Plain => self.mix(4),
                        Outcome::Granted {
                            runs, first_offset, ..
                        } => {
                            self.all([5, u64::from(*first_offset)]);
                            self.runs(runs);
                        }
                    }
                }
                Action::Submit(io) => {
                    let class = match io.class {
                        IoClass::RealTime => 0,
                        IoClass::BestEffort => 1,
                        IoClass::Idle => 2,
                    };
                    self.all([102, io.io.0, u64::from(io.file.0), io.deadline.0, class]);
                    self.range(io.range);
                    self.slots(actions, io.slots);
                }
                Action::SubmitWrite(io) => {
                    self.all([107, io.io.0, u64::from(io.file.0), io.deadline.0]);
                    self.range(io.range);
                    self.parts(actions.parts_of(io.parts));
                }
                Action::Fill { slot, offset, from } => {
                    self.all([108, u64::from(slot.0), u64::from(*offset)]);
                    self.lane_part(from);
                }
                Action::Zero {
                    slot,
                    offset,
                    length,
                } => self.all([
                    109,
                    u64::from(slot.0),
                    u64::from(*offset),
                    u64::from(*length),
                ]),
                Action::Publish {
                    lane,
                    record,
                    file,
                    range,
                    runs,
                    request,
                } => {
                    self.all([
                        110,
                        u64::from(lane.0),
                        u64::from(*record),
                        u64::from(file.0),
                        request.0,
                    ]);
                    self.range(*range);
                    self.runs(runs);
                }
                Action::Strike { lane, record } => {
                    self.all([111, u64::from(lane.0), u64::from(*record)]);
                }
                Action::Spent { lane, record } => {
                    self.all([119, u64::from(lane.0), u64::from(*record)]);
                }
                Action::GiveMemoryBack { lane, run } => {
                    self.all([
                        126,
                        u64::from(lane.0),
                        u64::from(run.first),
                        u64::from(run.count),
                    ]);
                }
                Action::LaneDone { lane } => self.all([113, u64::from(lane.0)]),
                Action::Known { file, size } => self.all([114, u64::from(file.0), size.0]),
                Action::Clean { file } => self.all([118, u64::from(file.0)]),
                Action::Reserve {
                    file,
                    needed,
                    wished_end,
                } => {
                    self.all([115, u64::from(file.0), *wished_end]);
                    self.range(*needed);
                }
                Action::Sync { file } => self.all([116, u64::from(file.0)]),
                Action::WriteOut { file } => self.all([127, u64::from(file.0)]),
                Action::Flush { device } => self.all([125, u64::from(device.0)]),
                Action::Trim { file, size } => self.all([117, u64::from(file.0), size.0]),
                Action::OpenNeighbour { beside, name } => {
                    self.all([103, u64::from(beside.0)]);
                    self.text(name);
                }
                Action::AskPool { pool, path } => {
                    self.all([126, pool.0]);
                    self.text(path);
                }
                Action::Stat { file } => self.all([104, u64::from(file.0)]),
                Action::LookAgain { file, size } => {
                    self.all([127, u64::from(file.0), size.0]);
                }
                Action::Forget { file } => self.all([105, u64::from(file.0)]),
                Action::Wake { at } => self.all([106, at.0]),
            }
        }
    }
}
