// SPDX-License-Identifier: Apache-2.0
//! Users of the server: each has one session and one kind of work.
//!
//! A client knows nothing of the server but messages and answers. All share the [`Hand`]; their
//! work is in [`crate::player`] and [`crate::others`].

use crate::files::{FileIndex, Files};
use crate::op_atom::OpAtom;
use crate::others::{Copy, Foreign, Rambler, Writer};
use crate::player::{Player, SlackLog};
use crate::prng::Prng;
use crate::queue::Queue;
use crate::recorder::Recorder;
use crate::scatterer::Scatterer;
use crate::scrubber::Scrubber;
use crate::world::What;
use rushes_core::server::{Errno, Outcome};
use rushes_core::units::*;

/// Latencies between a client and the server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// From client to server, and back.
    pub door: Duration,
    /// Reads of one client overtake each other by up to so much.
    pub reorder: Duration,
    /// From the server to the disk.
    pub submit: Duration,
    /// From the disk to the server.
    pub complete: Duration,
    /// Looking up a file.
    pub open: Duration,
    /// Small reads of the file's disk for that look-up: names, inode and extents that are in no
    /// cache.
    pub open_reads: u32,
    /// Small reads to find that a name does not exist, the first time.
    pub absent_reads: u32,
    /// Lateness of the server's timer.
    pub timer: Duration,
    /// Reserving blocks for a file.
    pub reserve: Duration,
    /// The rate at which a client copies bytes out of the cache, or into a lane.
    pub copy_rate: BytesPerSecond,
}

impl Default for Latency {
    /// As with smbd on one machine: 0.2 ms a turn of the daemon, 1 GB/s out of the cache.
    fn default() -> Latency {
        Latency {
            door: Duration::from_us(100),
            reorder: Duration::ZERO,
            submit: Duration::from_us(100),
            complete: Duration::from_us(100),
            open: Duration::from_us(500),
            open_reads: 0,
            absent_reads: 0,
            timer: Duration::from_us(60),
            reserve: Duration::from_ms(3),
            copy_rate: BytesPerSecond(1_000_000_000),
        }
    }
}

/// A client's first handle.
pub const FIRST_HANDLE: HandleId = HandleId(1);

/// A client's message to the server.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are said by their types")]
pub enum Message {
    /// Connects.
    Hello,
    /// Leaves.
    Bye,
    /// Opens a file.
    Open { handle: HandleId, file: FileIndex },
    /// Closes it.
    Close { handle: HandleId },
    /// Asks for bytes.
    Read {
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// Has copied them.
    ReadEnd { request: RequestId },
    /// Has changed bytes; the file's serial is now `serial`.
    Changed {
        request: RequestId,
        file: FileIndex,
        range: ByteRange,
        serial: u64,
    },
    /// Has removed a name.
    Gone { request: RequestId, file: FileIndex },
    /// Asks for pages of its lane.
    WriteBegin {
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// Has put its bytes there.
    WriteEnd { request: RequestId },
    /// Waits until the medium has all acknowledged bytes.
    Sync {
        handle: HandleId,
        request: RequestId,
    },
    /// Asks for a hold, to write on its own descriptor.
    Hold { request: RequestId, file: FileIndex },
    /// Has done so; `write` is the number in the checker's books.
    Wrote {
        request: RequestId,
        file: FileIndex,
        range: ByteRange,
        write: u64,
    },
}

/// The answer to a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answer {
    /// So many bytes, copied by now.
    Data(u64),
    /// Done.
    Done,
    /// An error.
    Failed(Errno),
    /// The client must do it itself.
    Plain,
    /// Pages for so many bytes, which the client has filled by now.
    Granted(u64),
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Answer {
        match outcome {
            Outcome::Data { length, .. } => Answer::Data(length.0),
            Outcome::Done => Answer::Done,
            Outcome::Failed(errno) => Answer::Failed(errno),
            Outcome::Plain => Answer::Plain,
            Outcome::Granted { length, .. } => Answer::Granted(length.0),
        }
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// It has one answer.
    #[default]
    Asked,
    /// A write through a lane: the client waits for pages, then for the acknowledgement.
    Write,
    /// Left to the client, which waits for a hold.
    Held,
    /// A sync.
    Sync,
}

/// A request that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The request.
    pub request: RequestId,
    /// Its file.
    pub file: FileIndex,
    /// Its bytes.
    pub range: ByteRange,
    /// The frame, for a player.
    pub ordinal: u64,
    /// The instant when it was sent.
    pub sent: Instant,
    /// How far it has come.
    pub stage: Stage,
}

/// The work of a client.
pub enum Kind {
    /// Plays.
    Play(Player),
    /// Copies.
    Copy(Copy),
    /// Reads here and there.
    Ramble(Rambler),
    /// Looks at single frames.
    Scrub(Scrubber),
    /// Plays clips of several files each.
    OpAtom(OpAtom),
    /// Writes beside the cache.
    Write(Writer),
    /// Writes, and reports to no server; no session.
    Foreign(Foreign),
    /// Records, or copies files in.
    Record(Recorder),
    /// Writes here and there.
    Scatter(Scatterer),
}

/// The state that every client has.
pub struct Hand {
    /// The client's number in the world.
    pub index: u32,
    /// Its session, while it has one.
    pub session: Option<SessionId>,
    /// Increases when a session ends, which makes messages still on their way void.
    pub life: u32,
    /// The instant when it begins.
    pub begin: Instant,
    /// The instant when it stops at the latest.
    pub end: Instant,
    /// Requests without an answer.
    pub waiting: Vec<Waiting>,
    /// Finished, or dead.
    pub over: bool,
    /// Its login; empty: one of its own.
    pub login: String,
    /// How long it holds slots before it releases them.
    pub hold: Duration,
    /// A read of it has reached the server.
    pub has_read: bool,
    /// One of its first read and its first open has reached the server.
    pub half_taken: bool,
    /// Its random numbers.
    pub prng: Prng,
    next_request: u64,
    next_handle: u32,
    alarm: Option<Instant>,
}

/// A client.
pub struct Client {
    /// Its state.
    pub hand: Hand,
    /// Its work.
    pub kind: Kind,
}

/// The parts of the world that a client may touch.
pub struct Scene<'a> {
    /// Now.
    pub now: Instant,
    /// The queue for its next events.
    pub queue: &'a mut Queue<What>,
    /// The latencies.
    pub latency: &'a Latency,
    /// The files.
    pub files: &'a mut Files,
    /// Slack of all players.
    pub slack: &'a mut SlackLog,
}

impl Client {
    /// A client that begins at `begin` and stops at `end`.
    pub fn new(index: u32, kind: Kind, begin: Instant, end: Instant, prng: Prng) -> Client {
        Client {
            hand: Hand {
                index,
                session: None,
                life: 0,
                begin,
                end,
                waiting: Vec::with_capacity(16),
                over: false,
                login: String::new(),
                hold: Duration::ZERO,
                prng,
                next_request: 1,
                has_read: false,
                next_handle: FIRST_HANDLE.0,
                half_taken: false,
                alarm: None,
            },
            kind,
        }
    }

    /// The instant for which it waited has come.
    pub fn wake(&mut self, scene: &mut Scene<'_>) {
        self.hand.alarm = None;
        if self.hand.over {
            return;
        }
        if self.hand.session.is_none() && !matches!(self.kind, Kind::Foreign(_)) {
            // The world sets the session when the server gets the message; work begins then.
            self.hand.say(scene, Message::Hello, Duration::ZERO);
            return;
        }
        self.act(scene);
    }

    /// It is connected.
    pub fn welcome(&mut self, session: SessionId, scene: &mut Scene<'_>) {
        let hand = &mut self.hand;
        hand.session = Some(session);
        match &mut self.kind {
            Kind::Play(player) => player.begin(hand, scene),
            Kind::Copy(copy) => copy.begin(hand, scene),
            Kind::Ramble(_)
            | Kind::Scrub(_)
            | Kind::OpAtom(_)
            | Kind::Write(_)
            | Kind::Foreign(_)
            | Kind::Record(_)
            | Kind::Scatter(_) => {}
        }
        self.act(scene);
    }

    /// A request got its answer, and its bytes are copied.
    pub fn answered(&mut self, request: RequestId, answer: Answer, scene: &mut Scene<'_>) {
        let hand = &mut self.hand;
        let Some(at) = hand.waiting.iter().position(|w| w.request == request) else {
            return;
        };
        if answer == Answer::Plain {
            // It stays in the list: the bytes come from the client's own read.
            if let Kind::Play(player) = &mut self.kind {
                player.count.plain_count += 1;
            }
            return;
        }
        let waiting = hand.waiting.swap_remove(at);
        match &mut self.kind {
            Kind::Play(player) => player.arrived(hand, scene, &waiting, answer),
            Kind::Copy(copy) => copy.arrived(answer, scene.now),
            Kind::Ramble(rambler) => rambler.arrived(answer),
            Kind::Scrub(scrubber) => scrubber.arrived(scene.now, &waiting, answer),
            Kind::OpAtom(editor) => editor.arrived(scene.now, answer),
            Kind::Write(writer) => writer.count += 1,
            Kind::Record(recorder) => recorder.arrived(scene.now, &waiting, answer),
            Kind::Scatter(scatterer) => scatterer.arrived(scene.now, &waiting, answer),
            Kind::Foreign(_) => {}
        }
        self.act(scene);
    }

    /// Its work is done or cut short: frames that were due and never came are late.
    pub fn close_books(&mut self, now: Instant) {
        match &mut self.kind {
            Kind::Play(player) => player.close_books(&self.hand, now),
            Kind::Copy(copy) => copy.close_books(&self.hand, now),
            Kind::Record(recorder) => recorder.close_books(&self.hand, now),
            Kind::Ramble(_)
            | Kind::Scrub(_)
            | Kind::OpAtom(_)
            | Kind::Write(_)
            | Kind::Foreign(_)
            | Kind::Scatter(_) => {}
        }
    }

    /// True while it has work.
    pub fn is_busy(&self) -> bool {
        self.hand.session.is_some() && !self.hand.over
    }

    /// Does all that may be done now, and sets the alarm for the rest.
    fn act(&mut self, scene: &mut Scene<'_>) {
        let hand = &mut self.hand;
        if hand.over {
            return;
        }
        if scene.now >= hand.end {
            if hand.waiting.is_empty() {
                hand.leave(scene);
            }
            return;
        }
        match &mut self.kind {
            Kind::Play(player) => player.act(hand, scene),
            Kind::Copy(copy) => copy.act(hand, scene),
            Kind::Ramble(rambler) => rambler.act(hand, scene),
            Kind::Scrub(scrubber) => scrubber.act(hand, scene),
            Kind::OpAtom(editor) => editor.act(hand, scene),
            Kind::Write(writer) => writer.act(hand, scene),
            Kind::Foreign(foreign) => foreign.act(hand, scene),
            Kind::Record(recorder) => recorder.act(hand, scene),
            Kind::Scatter(scatterer) => scatterer.act(hand, scene),
        }
    }
}

impl Hand {
    /// Sends a message, `extra` later than usual.
    pub fn say(&self, scene: &mut Scene<'_>, message: Message, extra: Duration) {
        let at = scene.now + scene.latency.door + extra;
        scene.queue.push(
            at,
            What::Arrive {
                client: self.index,
                life: self.life,
                message,
            },
        );
    }

    /// Opens a file.
    pub fn open(&mut self, scene: &mut Scene<'_>, file: FileIndex) -> HandleId {
        let handle = HandleId(self.next_handle);
        self.next_handle += 1;
        self.say(scene, Message::Open { handle, file }, Duration::ZERO);
        handle
    }

    /// The handle of a file that is kept open; opens the file if it is not.
    pub fn keep_open(
        &mut self,
        scene: &mut Scene<'_>,
        open: &mut Vec<(FileIndex, HandleId)>,
        file: FileIndex,
    ) -> HandleId {
        if let Some(&(_, handle)) = open.iter().find(|(other, _)| *other == file) {
            return handle;
        }
        let handle = self.open(scene, file);
        open.push((file, handle));
        handle
    }

    /// Closes a handle. No read on it may be outstanding.
    pub fn close(&self, scene: &mut Scene<'_>, handle: HandleId) {
        self.say(scene, Message::Close { handle }, scene.latency.reorder);
    }

    /// Leaves, also with requests outstanding.
    pub fn leave(&mut self, scene: &mut Scene<'_>) {
        self.over = true;
        if self.session.is_some() {
            self.say(scene, Message::Bye, scene.latency.reorder);
        }
    }

    /// Adds a request that waits for its answer.
    pub fn expect(
        &mut self,
        now: Instant,
        file: FileIndex,
        range: ByteRange,
        ordinal: u64,
    ) -> RequestId {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        self.waiting.push(Waiting {
            request,
            file,
            range,
            ordinal,
            sent: now,
            stage: Stage::Asked,
        });
        request
    }

    /// Asks for pages for a write.
    pub fn write(
        &mut self,
        scene: &mut Scene<'_>,
        handle: HandleId,
        file: FileIndex,
        range: ByteRange,
        ordinal: u64,
    ) {
        let request = self.expect(scene.now, file, range, ordinal);
        self.set_stage(request, Stage::Write);
        let sent = scene.now + scene.latency.door;
        let message = Message::WriteBegin {
            handle,
            request,
            range,
            sent,
        };
        self.say(scene, message, Duration::ZERO);
    }

    /// Asks for stable storage.
    pub fn sync(&mut self, scene: &mut Scene<'_>, handle: HandleId, file: FileIndex, ordinal: u64) {
        let request = self.expect(scene.now, file, ByteRange::default(), ordinal);
        self.set_stage(request, Stage::Sync);
        self.say(scene, Message::Sync { handle, request }, Duration::ZERO);
    }

    /// A request has reached this stage.
    pub fn set_stage(&mut self, request: RequestId, stage: Stage) {
        let mut waiting = self.waiting.iter_mut();
        if let Some(waiting) = waiting.find(|waiting| waiting.request == request) {
            waiting.stage = stage;
        }
    }

    /// Asks for bytes.
    pub fn read(
        &mut self,
        scene: &mut Scene<'_>,
        handle: HandleId,
        file: FileIndex,
        range: ByteRange,
        ordinal: u64,
    ) {
        let request = self.expect(scene.now, file, range, ordinal);
        let extra = match scene.latency.reorder {
            Duration::ZERO => Duration::ZERO,
            most => Duration(self.prng.below(most.0 + 1)),
        };
        let sent = scene.now + scene.latency.door;
        let message = Message::Read {
            handle,
            request,
            range,
            sent,
        };
        self.say(scene, message, extra);
    }

    /// Wakes it at `at`, unless it wakes earlier anyway.
    pub fn set_alarm(&mut self, scene: &mut Scene<'_>, at: Instant) {
        if self.alarm.is_some_and(|alarm| alarm <= at) {
            return;
        }
        self.alarm = Some(at);
        scene.queue.push(
            at,
            What::Client {
                client: self.index,
                life: self.life,
            },
        );
    }
}
