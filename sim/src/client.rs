// SPDX-License-Identifier: Apache-2.0
//! Those who read: players, copies and what they measured of themselves.
//!
//! A client knows nothing of the server but messages and answers. A player follows the lab's rule: it
//! asks for frame *n* not before `start + n·period`, and the frame is late past `start + preroll +
//! n·period`, where `start` is when its open returned. After a pause or a jump it starts anew.

use crate::files::{FileIndex, Files};
use crate::prng::Prng;
use crate::queue::Queue;
use crate::world::What;
use rushes_core::server::{Errno, Outcome};
use rushes_core::units::*;

/// How long things take between a client and the server. Units: as named.
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
    /// Finding out about a file.
    pub open: Duration,
    /// The server's timer comes so much late.
    pub timer: Duration,
    /// How fast a client takes bytes out of the cache.
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
            timer: Duration::from_us(60),
            copy_rate: BytesPerSecond(1_000_000_000),
        }
    }
}

/// What a client says to the server.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are said by their types")]
pub enum Message {
    /// Connects.
    Hello,
    /// Is gone.
    Bye,
    /// Opens a file.
    Open { handle: HandleId, file: FileIndex },
    /// Closes it.
    Close { handle: HandleId },
    /// Wants bytes.
    Read {
        handle: HandleId,
        request: RequestId,
        range: ByteRange,
        sent: Instant,
    },
    /// Has copied them.
    ReadEnd { request: RequestId },
}

/// What a client gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answer {
    /// So many bytes, copied by now.
    Data(u64),
    /// Done.
    Done,
    /// An error.
    Failed(Errno),
    /// Do it yourself.
    Plain,
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Answer {
        match outcome {
            Outcome::Data { length, .. } => Answer::Data(length.0),
            Outcome::Done => Answer::Done,
            Outcome::Failed(errno) => Answer::Failed(errno),
            Outcome::Plain => Answer::Plain,
        }
    }
}

/// In which order a player wants its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after another, from the first.
    Forward,
    /// One after another, from the last.
    Reverse,
    /// Every so many-th.
    Strided(u64),
}

/// What is played.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// One file of many frames.
    File(FileIndex),
    /// One file a frame.
    Sequence(Vec<FileIndex>),
}

/// How a player plays.
#[derive(Clone, Debug, PartialEq)]
pub struct PlayerPlan {
    /// What.
    pub source: Source,
    /// Bytes of a frame.
    pub frame_bytes: u64,
    /// Time from frame to frame.
    pub period: Duration,
    /// How late the first frame may be.
    pub preroll: Duration,
    /// Frames to play.
    pub frame_count: u64,
    /// Longest single request; a frame is asked for in such pieces.
    pub request_bytes: u64,
    /// Requests outstanding at once.
    pub in_flight: usize,
    /// Order.
    pub pattern: Pattern,
    /// Asks up to so much later than it might.
    pub jitter: Duration,
    /// Pauses before so many frames in ten thousand, from 0.1 to 3 s.
    pub pause_per_10k: u64,
    /// Jumps before so many frames in ten thousand.
    pub jump_per_10k: u64,
    /// Dies with reads outstanding, before so many frames in ten thousand.
    pub die_per_10k: u64,
}

/// What a player saw. Times in ns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlayerCount {
    /// Frames that came.
    pub frame_count: u64,
    /// Of those, late; or not come though due.
    pub late_count: u64,
    /// Of those, after a pause or jump.
    pub late_after_jump_count: u64,
    /// Frames that gave an error.
    pub failed_count: u64,
    /// By how much the worst was late.
    pub worst_late_ns: u64,
    /// Least time that a frame came before it was due (0 when one was late).
    pub slack_ns_min: u64,
    /// From open to first frame.
    pub first_frame_ns: Option<u64>,
    /// Bytes that came.
    pub bytes: u64,
    /// Reads sent.
    pub read_count: u64,
    /// Reads the server told it to do itself.
    pub plain_count: u64,
    /// When the first late frame was due.
    pub first_late_at: Option<Instant>,
    /// Times it paused or jumped.
    pub jump_count: u64,
}

/// Slack of all players over time, for tables.
#[derive(Clone, Debug, Default)]
pub struct SlackLog {
    /// By second: least slack (negative: late) in ns of frames that came then, and how many were late.
    pub seconds: Vec<(i64, u64)>,
}

impl SlackLog {
    fn note(&mut self, now: Instant, slack_ns: i64) {
        let second = (now.0 / NS_PER_S) as usize;
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, (i64::MAX, 0));
        }
        let entry = &mut self.seconds[second];
        entry.0 = entry.0.min(slack_ns);
        entry.1 += u64::from(slack_ns < 0);
    }
}

/// A frame of which not all bytes have come.
#[derive(Clone, Copy, Debug)]
struct Frame {
    ordinal: u64,
    handle: HandleId,
    due: Instant,
    after_jump: bool,
    missing: u64,
    unasked: u64,
    failed: bool,
}

/// A player at work.
pub struct Player {
    /// How it plays.
    pub plan: PlayerPlan,
    /// What it saw.
    pub count: PlayerCount,
    /// When the present stretch began; frame `stretch_ordinal` may be asked for then.
    stretch_start: Instant,
    stretch_ordinal: u64,
    /// Where in the source the stretch began.
    stretch_frame: u64,
    after_jump: bool,
    /// It died in the middle of a read: what did not come is nobody's fault.
    pub died: bool,
    /// Next frame to ask for.
    ordinal: u64,
    frames: Vec<Frame>,
}

/// A copy at work: requests back to back.
pub struct Copy {
    /// What is copied, one after another, and again from the first.
    pub files: Vec<FileIndex>,
    /// Longest request.
    pub request_bytes: u64,
    /// Requests at once.
    pub in_flight: usize,
    /// Bytes that came.
    pub bytes: u64,
    /// Requests that gave an error.
    pub failed_count: u64,
    /// When bytes came last.
    pub progress_at: Instant,
    /// Longest time without progress.
    pub longest_wait: Duration,
    turn: usize,
    offset: u64,
    handle: Option<HandleId>,
}

/// What a client does.
pub enum Kind {
    /// Plays.
    Play(Player),
    /// Copies.
    Copy(Copy),
}

/// Whose answer is awaited.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Which request.
    pub request: RequestId,
    /// On which file.
    pub file: FileIndex,
    /// Which bytes.
    pub range: ByteRange,
    /// Which frame, in a player.
    pub ordinal: u64,
    /// Sent when.
    pub sent: Instant,
}

/// A client: one session, one thing to do.
pub struct Client {
    /// Its number in the world.
    pub index: u32,
    /// Its session, while it has one.
    pub session: Option<SessionId>,
    /// Raised when a session ends, so that what is still on its way is known to be void.
    pub life: u32,
    /// What it does.
    pub kind: Kind,
    /// When it begins.
    pub begin: Instant,
    /// When it stops at the latest.
    pub end: Instant,
    /// Requests without an answer.
    pub waiting: Vec<Waiting>,
    /// Finished, or dead.
    pub over: bool,
    prng: Prng,
    next_request: u64,
    next_handle: u32,
    alarm: Option<Instant>,
}

/// What a client may touch.
pub struct Scene<'a> {
    /// Now.
    pub now: Instant,
    /// Where to put what follows.
    pub queue: &'a mut Queue<What>,
    /// How long things take.
    pub latency: &'a Latency,
    /// The files.
    pub files: &'a Files,
    /// Slack of all players.
    pub slack: &'a mut SlackLog,
}

impl Client {
    /// A client that begins at `begin` and stops at `end`.
    pub fn new(index: u32, kind: Kind, begin: Instant, end: Instant, prng: Prng) -> Client {
        Client {
            index,
            session: None,
            life: 0,
            kind,
            begin,
            end,
            waiting: Vec::with_capacity(16),
            over: false,
            prng,
            next_request: 1,
            next_handle: 1,
            alarm: None,
        }
    }

    /// A player that has seen nothing yet.
    pub fn player(plan: PlayerPlan) -> Kind {
        let count = PlayerCount {
            slack_ns_min: u64::MAX,
            ..PlayerCount::default()
        };
        Kind::Play(Player {
            plan,
            count,
            stretch_start: Instant::ZERO,
            stretch_ordinal: 0,
            stretch_frame: 0,
            after_jump: false,
            died: false,
            ordinal: 0,
            frames: Vec::with_capacity(8),
        })
    }

    /// A copy of `files` with `in_flight` requests of `request_bytes`.
    pub fn copy(files: Vec<FileIndex>, request_bytes: u64, in_flight: usize) -> Kind {
        Kind::Copy(Copy {
            files,
            request_bytes,
            in_flight,
            bytes: 0,
            failed_count: 0,
            progress_at: Instant::ZERO,
            longest_wait: Duration::ZERO,
            turn: 0,
            offset: 0,
            handle: None,
        })
    }

    /// The instant it waited for has come.
    pub fn wake(&mut self, scene: &mut Scene<'_>) {
        self.alarm = None;
        if self.over {
            return;
        }
        if self.session.is_none() {
            self.say(scene, Message::Hello, Duration::ZERO);
            // The world sets the session when the server hears of it; the first open follows then.
            return;
        }
        self.act(scene);
    }

    /// It is connected.
    pub fn welcome(&mut self, session: SessionId, scene: &mut Scene<'_>) {
        self.session = Some(session);
        self.begin_work(scene);
    }

    /// A request got its answer, and its bytes are copied.
    pub fn answered(&mut self, request: RequestId, answer: Answer, scene: &mut Scene<'_>) {
        let Some(at) = self.waiting.iter().position(|w| w.request == request) else {
            return;
        };
        if answer == Answer::Plain {
            // Stays in the list: the bytes come from the client's own read.
            if let Kind::Play(player) = &mut self.kind {
                player.count.plain_count += 1;
            }
            return;
        }
        let waiting = self.waiting.swap_remove(at);
        match &mut self.kind {
            Kind::Play(player) => {
                let closed = player.arrived(&waiting, answer, scene);
                if let Some(handle) = closed {
                    self.say(scene, Message::Close { handle }, Duration::ZERO);
                }
            }
            Kind::Copy(copy) => copy.arrived(&waiting, answer, scene.now),
        }
        self.act(scene);
    }

    /// Its work is done or cut short; a player's frames that were due and never came are late.
    pub fn close_books(&mut self, now: Instant) {
        let Kind::Play(player) = &mut self.kind else {
            if let Kind::Copy(copy) = &mut self.kind {
                let wait = now.min(self.end).since(copy.progress_at.max(self.begin));
                copy.longest_wait = copy.longest_wait.max(wait);
            }
            return;
        };
        for frame in std::mem::take(&mut player.frames) {
            if frame.due < now && !player.died {
                player.count.note_late(frame.due, now, frame.after_jump);
            }
        }
        // Those it never came to ask for, since earlier ones were missing.
        while player.ordinal < player.plan.frame_count && !player.died && self.begin < now {
            let due = player.ask_at() + player.plan.preroll;
            if due >= now {
                break;
            }
            player.count.note_late(due, now, player.after_jump);
            player.ordinal += 1;
        }
    }

    /// True while it is at something.
    pub fn is_busy(&self) -> bool {
        !self.over && (self.session.is_some() || !self.waiting.is_empty())
    }

    fn begin_work(&mut self, scene: &mut Scene<'_>) {
        match &self.kind {
            Kind::Play(player) => {
                if let Source::File(file) = player.plan.source {
                    self.open(scene, file);
                }
                let Kind::Play(player) = &mut self.kind else {
                    return;
                };
                player.stretch_start = scene.now;
                if player.plan.pattern == Pattern::Reverse {
                    player.stretch_frame = player.plan.frame_count.saturating_sub(1);
                }
            }
            Kind::Copy(copy) => {
                let file = copy.files[copy.turn];
                let handle = self.open(scene, file);
                if let Kind::Copy(copy) = &mut self.kind {
                    copy.handle = Some(handle);
                    copy.progress_at = scene.now;
                }
            }
        }
        self.act(scene);
    }

    fn open(&mut self, scene: &mut Scene<'_>, file: FileIndex) -> HandleId {
        let handle = HandleId(self.next_handle);
        self.next_handle += 1;
        self.say(scene, Message::Open { handle, file }, Duration::ZERO);
        handle
    }

    fn say(&self, scene: &mut Scene<'_>, message: Message, extra: Duration) {
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

    /// Asks for all that may be asked for now, and sets the alarm for the rest.
    fn act(&mut self, scene: &mut Scene<'_>) {
        if self.over || self.session.is_none() {
            return;
        }
        if scene.now >= self.end {
            if self.waiting.is_empty() {
                self.finish(scene);
            }
            return;
        }
        match &self.kind {
            Kind::Play(_) => self.act_player(scene),
            Kind::Copy(_) => self.act_copy(scene),
        }
    }

    /// Closes what is open, then goes.
    fn finish(&mut self, scene: &mut Scene<'_>) {
        let handle = match &self.kind {
            Kind::Play(player) => {
                matches!(player.plan.source, Source::File(_)).then_some(HandleId(1))
            }
            Kind::Copy(copy) => copy.handle,
        };
        if let Some(handle) = handle {
            self.say(scene, Message::Close { handle }, Duration::ZERO);
        }
        self.leave(scene);
    }

    /// Goes away, whatever is outstanding.
    pub fn leave(&mut self, scene: &mut Scene<'_>) {
        self.over = true;
        self.say(scene, Message::Bye, Duration::ZERO);
    }

    fn act_player(&mut self, scene: &mut Scene<'_>) {
        loop {
            let Kind::Play(player) = &mut self.kind else {
                return;
            };
            if self.waiting.len() >= player.plan.in_flight {
                return;
            }
            if player.frames.last().is_none_or(|frame| frame.unasked == 0) {
                if player.ordinal >= player.plan.frame_count {
                    if player.frames.is_empty() {
                        self.finish(scene);
                    }
                    return;
                }
                if player.frames.is_empty() && self.meddle(scene) {
                    return;
                }
                let Kind::Play(player) = &mut self.kind else {
                    return;
                };
                let at = player.ask_at();
                if at > scene.now {
                    self.set_alarm(scene, at);
                    return;
                }
                self.begin_frame(scene);
            }
            self.ask_piece(scene);
        }
    }

    /// Between frames: pauses, jumps or dies, if its plan and chance say so. True: it waits now.
    fn meddle(&mut self, scene: &mut Scene<'_>) -> bool {
        let Kind::Play(player) = &mut self.kind else {
            return false;
        };
        let plan = &player.plan;
        if plan.pause_per_10k + plan.jump_per_10k + plan.die_per_10k == 0 || player.ordinal == 0 {
            return false;
        }
        let draw = self.prng.below(10_000);
        if draw < plan.pause_per_10k {
            let span = Duration::from_ms(self.prng.between(100, 3000));
            let frame = player.frame_index(player.ordinal);
            player.start_anew(scene.now + span, frame);
            return false;
        }
        if draw < plan.pause_per_10k + plan.jump_per_10k {
            let frame = self.prng.below(plan.frame_count);
            player.start_anew(scene.now, frame);
            return false;
        }
        if draw < plan.pause_per_10k + plan.jump_per_10k + plan.die_per_10k {
            // In the middle of a read: one more is sent, and nobody will be there for its answer.
            player.died = true;
            self.begin_frame(scene);
            self.ask_piece(scene);
            self.leave(scene);
            return true;
        }
        false
    }

    fn begin_frame(&mut self, scene: &mut Scene<'_>) {
        let Kind::Play(player) = &self.kind else {
            return;
        };
        let handle = match &player.plan.source {
            Source::File(_) => HandleId(1),
            Source::Sequence(files) => {
                let file = files[player.frame_index(player.ordinal) as usize % files.len()];
                self.open(scene, file)
            }
        };
        let Kind::Play(player) = &mut self.kind else {
            return;
        };
        let due = player.ask_at() + player.plan.preroll;
        player.frames.push(Frame {
            ordinal: player.ordinal,
            handle,
            due,
            after_jump: player.after_jump,
            missing: player.plan.frame_bytes,
            unasked: player.plan.frame_bytes,
            failed: false,
        });
        player.ordinal += 1;
    }

    fn ask_piece(&mut self, scene: &mut Scene<'_>) {
        let Kind::Play(player) = &mut self.kind else {
            return;
        };
        let plan = &player.plan;
        let Some(frame) = player.frames.last().copied() else {
            return;
        };
        let (file, base) = player.place(frame.ordinal);
        let bytes = frame.unasked.min(plan.request_bytes);
        let range = ByteRange::new(base + plan.frame_bytes - frame.unasked, bytes);
        if let Some(frame) = player.frames.last_mut() {
            frame.unasked -= bytes;
        }
        player.count.read_count += 1;
        self.read(scene, frame.handle, file, range, frame.ordinal);
    }

    fn read(
        &mut self,
        scene: &mut Scene<'_>,
        handle: HandleId,
        file: FileIndex,
        range: ByteRange,
        ordinal: u64,
    ) {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        self.waiting.push(Waiting {
            request,
            file,
            range,
            ordinal,
            sent: scene.now,
        });
        let extra = Duration(self.prng.below(scene.latency.reorder.0 + 1));
        let sent = scene.now + scene.latency.door;
        self.say(
            scene,
            Message::Read {
                handle,
                request,
                range,
                sent,
            },
            extra,
        );
    }

    fn act_copy(&mut self, scene: &mut Scene<'_>) {
        loop {
            let Kind::Copy(copy) = &mut self.kind else {
                return;
            };
            if self.waiting.len() >= copy.in_flight {
                return;
            }
            let Some(mut handle) = copy.handle else {
                return;
            };
            let size = scene.files.get(copy.files[copy.turn]).size;
            if copy.offset >= size {
                if !self.waiting.is_empty() {
                    return;
                }
                copy.turn = (copy.turn + 1) % copy.files.len();
                copy.offset = 0;
                let file = copy.files[copy.turn];
                self.say(scene, Message::Close { handle }, Duration::ZERO);
                handle = self.open(scene, file);
            }
            let Kind::Copy(copy) = &mut self.kind else {
                return;
            };
            copy.handle = Some(handle);
            let file = copy.files[copy.turn];
            let bytes = copy
                .request_bytes
                .min(scene.files.get(file).size.saturating_sub(copy.offset))
                .max(1);
            let range = ByteRange::new(copy.offset, bytes);
            copy.offset += bytes;
            self.read(scene, handle, file, range, 0);
        }
    }

    fn set_alarm(&mut self, scene: &mut Scene<'_>, at: Instant) {
        if self.alarm.is_some_and(|alarm| alarm <= at) {
            return;
        }
        self.alarm = Some(at);
        let jitter = match &self.kind {
            Kind::Play(player) => Duration(self.prng.below(player.plan.jitter.0 + 1)),
            Kind::Copy(_) => Duration::ZERO,
        };
        scene.queue.push(
            at + jitter,
            What::Client {
                client: self.index,
                life: self.life,
            },
        );
    }
}

impl Player {
    /// When the next frame may be asked for.
    fn ask_at(&self) -> Instant {
        self.stretch_start + self.plan.period.times(self.ordinal - self.stretch_ordinal)
    }

    /// Which frame of the source is the `ordinal`-th played.
    fn frame_index(&self, ordinal: u64) -> u64 {
        let step = ordinal - self.stretch_ordinal.min(ordinal);
        let count = self.plan.frame_count.max(1);
        match self.plan.pattern {
            Pattern::Forward => (self.stretch_frame + step) % count,
            Pattern::Reverse => (self.stretch_frame + count - step % count) % count,
            Pattern::Strided(stride) => (self.stretch_frame + step * stride) % count,
        }
    }

    /// File and offset of a frame.
    fn place(&self, ordinal: u64) -> (FileIndex, u64) {
        let index = self.frame_index(ordinal);
        match &self.plan.source {
            Source::File(file) => (*file, index * self.plan.frame_bytes),
            Source::Sequence(files) => (files[index as usize % files.len()], 0),
        }
    }

    fn start_anew(&mut self, at: Instant, frame: u64) {
        self.count.jump_count += 1;
        self.stretch_frame = frame;
        self.stretch_start = at;
        self.stretch_ordinal = self.ordinal;
        self.after_jump = true;
    }

    /// Takes an answer; returns the handle to close when it was the last of a sequence's frame.
    fn arrived(
        &mut self,
        waiting: &Waiting,
        answer: Answer,
        scene: &mut Scene<'_>,
    ) -> Option<HandleId> {
        let at = self
            .frames
            .iter()
            .position(|frame| frame.ordinal == waiting.ordinal)?;
        let frame = &mut self.frames[at];
        frame.missing -= waiting.range.length.0;
        match answer {
            Answer::Data(bytes) => self.count.bytes += bytes,
            Answer::Failed(_) => frame.failed = true,
            Answer::Done | Answer::Plain => {}
        }
        if frame.missing > 0 {
            return None;
        }
        let frame = self.frames.remove(at);
        self.count.note_frame(&frame, scene.now, self.stretch_start);
        let slack = frame.due.0 as i64 - scene.now.0 as i64;
        scene.slack.note(scene.now, slack);
        matches!(self.plan.source, Source::Sequence(_)).then_some(frame.handle)
    }
}

impl PlayerCount {
    fn note_frame(&mut self, frame: &Frame, now: Instant, start: Instant) {
        self.frame_count += 1;
        self.failed_count += u64::from(frame.failed);
        if self.first_frame_ns.is_none() {
            self.first_frame_ns = Some(now.since(start).0);
        }
        if now > frame.due {
            self.note_late(frame.due, now, frame.after_jump);
        }
        self.slack_ns_min = self.slack_ns_min.min(frame.due.since(now).0);
    }

    fn note_late(&mut self, due: Instant, now: Instant, after_jump: bool) {
        self.late_count += 1;
        self.late_after_jump_count += u64::from(after_jump);
        self.worst_late_ns = self.worst_late_ns.max(now.since(due).0);
        self.slack_ns_min = 0;
        if self.first_late_at.is_none() {
            self.first_late_at = Some(due);
        }
    }
}

impl Copy {
    fn arrived(&mut self, _waiting: &Waiting, answer: Answer, now: Instant) {
        match answer {
            Answer::Data(bytes) => self.bytes += bytes,
            Answer::Failed(_) => self.failed_count += 1,
            Answer::Done | Answer::Plain => {}
        }
        self.longest_wait = self.longest_wait.max(now.since(self.progress_at));
        self.progress_at = now;
    }
}
