// SPDX-License-Identifier: Apache-2.0
//! The real server with one mistake about writes, as a test of the checker: each mistake changes
//! the server's actions, and the checker must find it.

use crate::machine::Machine;
use rushes_core::server::*;
use rushes_core::units::*;

/// Changes one of so many of the actions concerned.
const EVERY: u64 = 40;

/// A mistake that a [`Spoiled`] server makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMistake {
    /// None.
    None,
    /// A write is acknowledged and never published.
    Unpublished,
    /// A write is acknowledged, then published.
    PublishedLate,
    /// A piece is struck as soon as it is published.
    StruckEarly,
    /// A piece loses its pages as soon as it is published.
    SpentEarly,
    /// A sync is answered at once.
    SyncedEarly,
    /// Two writes get the same pages.
    SamePages,
    /// The server frees pages that are in use.
    GivenBackUsed,
    /// A request to a device is not sent.
    NotSent,
    /// A request is sent to another place of the file.
    Misplaced,
    /// A request is sent twice.
    SentTwice,
    /// The doors get a wrong length.
    WrongLength,
    /// A file is declared clean at once.
    CleanEarly,
    /// Blocks past the end are not freed.
    BlocksKept,
    /// A lane ends with pieces in it.
    LaneDoneEarly,
    /// The bytes of a lane do not replace those of the device.
    NotFilled,
    /// A read of bytes that the device lacks is left to the client.
    ReadLeft,
}

/// The server with its mistake.
pub struct Spoiled {
    server: Server,
    mistake: WriteMistake,
    count: u64,
}

impl Spoiled {
    /// A server that makes `mistake`.
    pub fn new(server: Server, mistake: WriteMistake) -> Spoiled {
        Spoiled {
            server,
            mistake,
            count: 0,
        }
    }

    /// True for one in so many.
    fn is_turn(&mut self) -> bool {
        self.count += 1;
        self.count.is_multiple_of(EVERY)
    }

    fn spoil(&mut self, actions: &mut Actions) {
        let mut list = Vec::with_capacity(actions.list.len());
        let mut late = Vec::new();
        for action in std::mem::take(&mut actions.list) {
            match action {
                Action::Publish { .. } => self.spoil_publish(action, &mut list, &mut late),
                Action::SubmitWrite(io) => self.spoil_write(io, &mut list),
                Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Granted { .. },
                } if self.mistake == WriteMistake::SamePages => {
                    let Action::Reply { outcome, .. } = action else {
                        continue;
                    };
                    list.push(Action::Reply {
                        session,
                        request,
                        outcome: at_page_zero(outcome),
                    });
                }
                Action::Known { file, size } if self.mistake == WriteMistake::WrongLength => {
                    let size = ByteCount(size.0 + u64::from(self.is_turn()));
                    list.push(Action::Known { file, size });
                }
                Action::Trim { .. } if self.mistake == WriteMistake::BlocksKept => {}
                Action::Fill { .. } if self.mistake == WriteMistake::NotFilled => {
                    if !self.is_turn() {
                        list.push(action);
                    }
                }
                Action::Reply {
                    session,
                    request,
                    outcome: Outcome::Data { .. },
                } if self.mistake == WriteMistake::ReadLeft => {
                    let outcome = Outcome::Plain;
                    list.push(Action::Reply {
                        session,
                        request,
                        outcome,
                    });
                }
                other => list.push(other),
            }
        }
        list.extend(late);
        actions.list = list;
    }

    fn spoil_publish(&mut self, action: Action, list: &mut Vec<Action>, late: &mut Vec<Action>) {
        let Action::Publish {
            lane,
            record,
            file,
            runs,
            ..
        } = action
        else {
            return;
        };
        if !self.is_turn() {
            return list.push(action);
        }
        match self.mistake {
            WriteMistake::Unpublished => return,
            WriteMistake::PublishedLate => return late.push(action),
            WriteMistake::StruckEarly => late.push(Action::Strike { lane, record }),
            WriteMistake::SpentEarly => late.push(Action::Spent { lane, record }),
            WriteMistake::LaneDoneEarly => late.push(Action::LaneDone { lane }),
            WriteMistake::CleanEarly => late.push(Action::Clean { file }),
            WriteMistake::GivenBackUsed => {
                let run = runs.as_slice()[0];
                late.push(Action::GiveMemoryBack { lane, run });
            }
            _ => {}
        }
        list.push(action);
    }

    fn spoil_write(&mut self, io: IoWrite, list: &mut Vec<Action>) {
        let is_turn = self.is_turn();
        let elsewhere = ByteRange::new(io.range.start.0 + (4 << 30), io.range.length.0);
        match self.mistake {
            WriteMistake::NotSent if is_turn => {}
            WriteMistake::Misplaced if is_turn => list.push(Action::SubmitWrite(IoWrite {
                range: elsewhere,
                ..io
            })),
            WriteMistake::SentTwice if is_turn => {
                let again = IoId(io.io.0 + (1 << 40));
                list.push(Action::SubmitWrite(io));
                list.push(Action::SubmitWrite(IoWrite { io: again, ..io }));
            }
            _ => list.push(Action::SubmitWrite(io)),
        }
    }
}

/// The same grant at the first pages of the lane.
fn at_page_zero(outcome: Outcome) -> Outcome {
    let Outcome::Granted {
        runs,
        first_offset,
        length,
        record,
    } = outcome
    else {
        return outcome;
    };
    let count = runs.page_count();
    let first = Runs::from_runs(&[PageRun { first: 0, count }]);
    Outcome::Granted {
        runs: first.unwrap_or(runs),
        first_offset,
        length,
        record,
    }
}

impl Machine for Spoiled {
    fn step(&mut self, now: Instant, event: Event, actions: &mut Actions) {
        let sync = match event {
            Event::Sync {
                session, request, ..
            } if self.mistake == WriteMistake::SyncedEarly => Some(Action::Reply {
                session,
                request,
                outcome: Outcome::Done,
            }),
            _ => None,
        };
        self.server.step(now, event, actions);
        self.spoil(actions);
        actions.list.extend(sync);
    }

    fn streams(&self, now: Instant) -> Vec<StreamRecord> {
        self.server.streams(now)
    }

    fn devices(&self) -> Vec<DeviceRecord> {
        self.server.devices()
    }

    fn cache(&self) -> CacheRecord {
        self.server.cache()
    }

    fn writes(&self) -> WriteRecord {
        self.server.writes()
    }

    fn check(&self) -> Vec<String> {
        self.server.check()
    }

    fn could_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
    ) -> Verdict {
        self.server.could_admit(now, device, rate, count)
    }
}
