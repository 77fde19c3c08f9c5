// SPDX-License-Identifier: Apache-2.0
//! Players, and their own measurements.
//!
//! The lab's rule: a player asks for frame *n* not before `start + n·period`, and the frame is late
//! past `start + preroll + n·period`, where `start` is the return of its open. After a pause or a
//! jump it starts again.

use crate::client::{Answer, Hand, Kind, Scene, Waiting};
use crate::files::FileIndex;
use rushes_core::units::*;

/// The order in which a player wants its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after another, from the first.
    Forward,
    /// One after another, from the last.
    Reverse,
    /// Every so many-th.
    Strided(u64),
}

/// The source of a player.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// One file of many frames.
    File(FileIndex),
    /// One file a frame.
    Sequence(Vec<FileIndex>),
    /// A cut list over files that stay open once they were opened: an editor's timeline.
    Timeline(Vec<Shot>),
}

/// A piece of one file in a cut list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shot {
    /// Number of its first frame in the order of playing; ascending in a cut list, the first is 0.
    pub first: u64,
    /// The file of the piece.
    pub file: FileIndex,
    /// The frame of that file with which it begins.
    pub frame: u64,
}

/// How a player plays.
#[derive(Clone, Debug, PartialEq)]
pub struct PlayerPlan {
    /// The source.
    pub source: Source,
    /// Bytes of a frame.
    pub frame_bytes: u64,
    /// Time from frame to frame.
    pub period: Duration,
    /// How late the first frame may be.
    pub preroll: Duration,
    /// Frames to play.
    pub frame_count: u64,
    /// Longest single request; the player asks for a frame in such pieces.
    pub request_bytes: u64,
    /// Requests outstanding at once.
    pub in_flight: usize,
    /// Closes each clip of a timeline with its last frame, and opens the next with its first;
    /// otherwise all stay open.
    pub closes_first: bool,
    /// Frames of a pass of a timeline that is played again: each pass begins when the time of the
    /// one before is over, and a second later.
    pub pass_frames: u64,
    /// Order.
    pub pattern: Pattern,
    /// Asks up to so much later than it may.
    pub jitter: Duration,
    /// Pauses before so many frames in ten thousand, from 0.1 to 3 s.
    pub pause_per_10k: u64,
    /// Jumps before so many frames in ten thousand.
    pub jump_per_10k: u64,
    /// Dies with reads outstanding, before so many frames in ten thousand.
    pub die_per_10k: u64,
}

/// The times and counts of a player. Times in ns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlayerCount {
    /// Frames that came.
    pub frame_count: u64,
    /// Late frames; also those that were due and never came.
    pub late_count: u64,
    /// Those of them in the last pass of a timeline.
    pub late_last_pass_count: u64,
    /// Those of them that were after a pause or jump.
    pub late_after_jump_count: u64,
    /// Late by more than a period and 5 ms: the ledger must know of these.
    pub clearly_late_count: u64,
    /// Late, or in time by less than 5 ms: the ledger may count these.
    pub nearly_late_count: u64,
    /// Frames that gave an error.
    pub failed_count: u64,
    /// The lateness of the latest frame.
    pub worst_late_ns: u64,
    /// The shortest time between a frame and its due instant; 0 if a frame was late.
    pub slack_ns_min: u64,
    /// From open to first frame.
    pub first_frame_ns: Option<u64>,
    /// Time from the request for the first frame of a shot until it came, for each cut of a
    /// timeline.
    pub cut_ns: Vec<u64>,
    /// Bytes that came.
    pub bytes: u64,
    /// Reads sent.
    pub read_count: u64,
    /// Reads answered.
    pub answered_count: u64,
    /// Reads that the server left to it.
    pub plain_count: u64,
    /// When the first late frame was due.
    pub first_late_at: Option<Instant>,
    /// Times it paused or jumped.
    pub jump_count: u64,
    /// When it first reached the end of its source and went on at the other end, which is a jump,
    /// too.
    pub wrapped_at: Option<Instant>,
}

/// Slack of all players over time, for tables.
#[derive(Clone, Debug, Default)]
pub struct SlackLog {
    /// By second: the least slack in ns of frames that came then (negative: late), and the number
    /// of late ones.
    pub seconds: Vec<(i64, u64)>,
    /// The first late frames: client, its frame, its due instant, and its lateness.
    pub late: Vec<(u32, u64, Instant, Duration)>,
}

/// Between two passes of a timeline.
const REST: Duration = Duration::from_s(1);

/// Late frames reported one by one.
const LATE_TOLD_MAX: usize = 200;

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
    /// When it was requested, if it is the first of its shot.
    cut_at: Option<Instant>,
}

/// A player at work.
pub struct Player {
    /// How it plays.
    pub plan: PlayerPlan,
    /// Its times and counts.
    pub count: PlayerCount,
    /// It died in the middle of a read: frames that did not come then do not count.
    pub died: bool,
    /// When the present stretch began; the player may then ask for frame `stretch_ordinal`.
    stretch_start: Instant,
    stretch_ordinal: u64,
    /// The frame of the source with which the stretch began.
    stretch_frame: u64,
    after_jump: bool,
    /// When the present pass of a timeline began.
    pass_start: Instant,
    /// The next frame to ask for, and the instant.
    ordinal: u64,
    ask_at: Instant,
    frames: Vec<Frame>,
    handle: Option<HandleId>,
    /// Files of a timeline that are open.
    clips: Vec<(FileIndex, HandleId)>,
}

impl Player {
    /// A player that has read nothing yet.
    pub fn kind(plan: PlayerPlan) -> Kind {
        let stretch_frame = match plan.pattern {
            Pattern::Reverse => plan.frame_count.saturating_sub(1),
            Pattern::Forward | Pattern::Strided(_) => 0,
        };
        let count = PlayerCount {
            slack_ns_min: u64::MAX,
            ..PlayerCount::default()
        };
        Kind::Play(Player {
            plan,
            count,
            died: false,
            stretch_start: Instant::ZERO,
            stretch_ordinal: 0,
            stretch_frame,
            after_jump: false,
            pass_start: Instant::ZERO,
            ordinal: 0,
            ask_at: Instant::ZERO,
            frames: Vec::with_capacity(8),
            handle: None,
            clips: Vec::new(),
        })
    }

    /// Its open returned.
    pub fn begin(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if let Source::File(file) = self.plan.source {
            self.handle = Some(hand.open(scene, file));
        }
        self.stretch_start = scene.now;
        self.pass_start = scene.now;
        self.ask_at = scene.now;
    }

    /// Asks for all frames that it may ask for now.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        self.end_pass(scene.now);
        while hand.waiting.len() < self.plan.in_flight {
            if self.frames.last().is_none_or(|frame| frame.unasked == 0) {
                if self.ordinal >= self.plan.frame_count {
                    if self.frames.is_empty() {
                        let clips = self.clips.iter().map(|&(_, handle)| handle);
                        for handle in self.handle.into_iter().chain(clips) {
                            hand.close(scene, handle);
                        }
                        hand.leave(scene);
                    }
                    return;
                }
                if self.ask_at > scene.now {
                    hand.set_alarm(scene, self.ask_at);
                    return;
                }
                self.begin_frame(hand, scene);
                if self.dies(hand) {
                    // In the middle of a read: no client will get its answer.
                    self.ask_piece(hand, scene);
                    self.died = true;
                    hand.leave(scene);
                    return;
                }
            }
            self.ask_piece(hand, scene);
        }
    }

    fn dies(&self, hand: &mut Hand) -> bool {
        self.plan.die_per_10k > 0 && hand.prng.below(10_000) < self.plan.die_per_10k
    }

    fn begin_frame(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if self.wraps_at(self.ordinal) {
            self.count.jump_count += 1;
            self.count.wrapped_at = self.count.wrapped_at.or(Some(scene.now));
            self.after_jump = true;
        }
        let handle = match (&self.plan.source, self.handle) {
            (Source::Sequence(files), _) => {
                let file = files[self.frame_index(self.ordinal) as usize % files.len()];
                hand.open(scene, file)
            }
            (Source::File(_), handle) => handle.unwrap_or_default(),
            (Source::Timeline(_), _) => {
                let (file, _) = self.place(self.ordinal);
                let open = self.clips.iter().find(|&&(clip, _)| clip == file);
                match open.map(|&(_, handle)| handle) {
                    Some(handle) => handle,
                    None => {
                        let handle = hand.open(scene, file);
                        self.clips.push((file, handle));
                        handle
                    }
                }
            }
        };
        self.frames.push(Frame {
            ordinal: self.ordinal,
            handle,
            due: self.earliest(self.ordinal) + self.plan.preroll,
            after_jump: self.after_jump,
            missing: self.plan.frame_bytes,
            unasked: self.plan.frame_bytes,
            failed: false,
            cut_at: self.is_cut(self.ordinal).then_some(scene.now),
        });
        self.ordinal += 1;
        self.ask_at = self.earliest(self.ordinal);
        if self.plan.jitter > Duration::ZERO {
            self.ask_at = self.ask_at + Duration(hand.prng.below(self.plan.jitter.0));
        }
    }

    fn ask_piece(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        let bytes = frame.unasked.min(self.plan.request_bytes);
        let done = self.plan.frame_bytes - frame.unasked;
        frame.unasked -= bytes;
        let frame = *frame;
        let (file, base) = self.place(frame.ordinal);
        let range = ByteRange::new(base + done, bytes);
        self.count.read_count += 1;
        hand.read(scene, frame.handle, file, range, frame.ordinal);
    }

    /// When the player may ask for a frame.
    fn earliest(&self, ordinal: u64) -> Instant {
        self.stretch_start + self.plan.period.times(ordinal - self.stretch_ordinal)
    }

    /// The frame of the source that is played as the `ordinal`-th.
    fn frame_index(&self, ordinal: u64) -> u64 {
        let step = ordinal - self.stretch_ordinal.min(ordinal);
        let count = self.plan.frame_count.max(1);
        match self.plan.pattern {
            Pattern::Forward => (self.stretch_frame + step) % count,
            Pattern::Reverse => (self.stretch_frame + count - step % count) % count,
            Pattern::Strided(stride) => (self.stretch_frame + step * stride) % count,
        }
    }

    /// True when the `ordinal`-th frame lies at the other end of the source from the one before.
    fn wraps_at(&self, ordinal: u64) -> bool {
        if ordinal <= self.stretch_ordinal {
            return false;
        }
        let (before, here) = (self.frame_index(ordinal - 1), self.frame_index(ordinal));
        match self.plan.pattern {
            Pattern::Forward | Pattern::Strided(_) => here < before,
            Pattern::Reverse => here > before,
        }
    }

    /// File and offset of a frame.
    fn place(&self, ordinal: u64) -> (FileIndex, u64) {
        let index = self.frame_index(ordinal);
        match &self.plan.source {
            Source::File(file) => (*file, index * self.plan.frame_bytes),
            Source::Sequence(files) => (files[index as usize % files.len()], 0),
            Source::Timeline(shots) => {
                let after = shots.partition_point(|shot| shot.first <= ordinal);
                let shot = shots[after.saturating_sub(1)];
                let frame = shot.frame + (ordinal - shot.first);
                (shot.file, frame * self.plan.frame_bytes)
            }
        }
    }

    /// True for the first frame of a shot, except the very first.
    fn is_cut(&self, ordinal: u64) -> bool {
        match &self.plan.source {
            Source::Timeline(shots) => shots
                .binary_search_by_key(&ordinal, |shot| shot.first)
                .is_ok_and(|at| at > 0),
            Source::File(_) | Source::Sequence(_) => false,
        }
    }

    /// Takes an answer.
    pub fn arrived(
        &mut self,
        hand: &mut Hand,
        scene: &mut Scene<'_>,
        waiting: &Waiting,
        answer: Answer,
    ) {
        let of = |frame: &Frame| frame.ordinal == waiting.ordinal;
        let Some(at) = self.frames.iter().position(of) else {
            return;
        };
        let frame = &mut self.frames[at];
        self.count.answered_count += 1;
        frame.missing -= waiting.range.length.0;
        match answer {
            Answer::Data(bytes) => self.count.bytes += bytes,
            Answer::Failed(_) => frame.failed = true,
            Answer::Done | Answer::Plain | Answer::Granted(_) => {}
        }
        if frame.missing > 0 {
            return;
        }
        let frame = self.frames.remove(at);
        self.note_frame(&frame, scene.now);
        // A frame that gave an error is no frame in time, but breaks no promise either.
        if !frame.failed {
            let slack = frame.due.0 as i64 - scene.now.0 as i64;
            scene.slack.note(scene.now, slack);
            if slack < 0 && scene.slack.late.len() < LATE_TOLD_MAX {
                let by = scene.now.since(frame.due);
                let told = (hand.index, frame.ordinal, frame.due, by);
                scene.slack.late.push(told);
            }
        }
        if matches!(self.plan.source, Source::Sequence(_)) {
            hand.close(scene, frame.handle);
        }
        if self.frames.is_empty() {
            if self.plan.closes_first && self.is_cut(self.ordinal) {
                for (_, handle) in self.clips.drain(..) {
                    hand.close(scene, handle);
                }
            }
            self.meddle(hand, scene.now);
        }
    }

    /// Between frames: pauses or jumps, by its plan and at random.
    fn meddle(&mut self, hand: &mut Hand, now: Instant) {
        let plan = &self.plan;
        if plan.pause_per_10k + plan.jump_per_10k == 0 {
            return;
        }
        let draw = hand.prng.below(10_000);
        if draw < plan.pause_per_10k {
            let span = Duration::from_ms(hand.prng.between(100, 3000));
            let frame = self.frame_index(self.ordinal);
            self.start_anew(now + span, frame);
        } else if draw < plan.pause_per_10k + plan.jump_per_10k {
            let frame = hand.prng.below(plan.frame_count);
            self.start_anew(now, frame);
        }
    }

    /// The time of a pass is over: frames of it that were never asked for are late, and the next
    /// pass begins in time.
    fn end_pass(&mut self, now: Instant) {
        let pass = self.plan.pass_frames;
        if pass >= self.plan.frame_count {
            return;
        }
        let nth = self.ordinal / pass;
        let is_at_end = self.ordinal.is_multiple_of(pass) && self.ordinal > self.stretch_ordinal;
        let end = self.pass_start + self.plan.period.times(pass);
        let is_over = now > end + self.plan.preroll;
        if !is_at_end && !is_over || !self.frames.is_empty() {
            return;
        }
        let next = if is_at_end {
            nth * pass
        } else {
            (nth + 1) * pass
        };
        while self.ordinal < next {
            let due = self.earliest(self.ordinal) + self.plan.preroll;
            self.note_late(self.ordinal, (due, now), self.after_jump);
            self.ordinal += 1;
        }
        let begin = (end + REST).max(now);
        self.pass_start = begin;
        self.stretch_frame = self.frame_index(self.ordinal);
        self.stretch_start = begin;
        self.stretch_ordinal = self.ordinal;
        self.ask_at = begin;
    }

    fn start_anew(&mut self, at: Instant, frame: u64) {
        self.count.jump_count += 1;
        self.stretch_frame = frame;
        self.stretch_start = at;
        self.stretch_ordinal = self.ordinal;
        self.ask_at = at;
        self.after_jump = true;
    }

    /// A frame that was due and never came is late.
    pub fn close_books(&mut self, hand: &Hand, now: Instant) {
        if self.died || (hand.session.is_none() && !hand.over) {
            return;
        }
        // At its end it stops asking. Frames that it had not asked for by then could still have
        // been in time, since they are at most a preroll behind.
        let stopped = now.min(hand.end);
        for frame in std::mem::take(&mut self.frames) {
            // Part of it may have come late although the rest was never asked for.
            self.count.nearly_late_count += 1;
            let known = if frame.unasked > 0 { stopped } else { now };
            if frame.due < known {
                self.note_late(frame.ordinal, (frame.due, known), frame.after_jump);
            }
        }
        // Frames that it never asked for, since earlier ones were missing: only the player knows of
        // these.
        let clearly_late_count = self.count.clearly_late_count;
        while self.ordinal < self.plan.frame_count {
            let due = self.earliest(self.ordinal) + self.plan.preroll;
            if due >= stopped {
                break;
            }
            self.note_late(self.ordinal, (due, stopped), self.after_jump);
            self.ordinal += 1;
        }
        self.count.clearly_late_count = clearly_late_count;
    }

    fn note_frame(&mut self, frame: &Frame, now: Instant) {
        let count = &mut self.count;
        count.frame_count += 1;
        count.failed_count += u64::from(frame.failed);
        if count.first_frame_ns.is_none() {
            count.first_frame_ns = Some(now.since(self.stretch_start).0);
        }
        count.cut_ns.extend(frame.cut_at.map(|at| now.since(at).0));
        if frame.failed {
            return;
        }
        count.slack_ns_min = count.slack_ns_min.min(frame.due.since(now).0);
        count.nearly_late_count += u64::from(now + Duration::from_ms(5) > frame.due);
        if now > frame.due {
            self.note_late(frame.ordinal, (frame.due, now), frame.after_jump);
        }
    }

    fn note_late(&mut self, ordinal: u64, (due, now): (Instant, Instant), after_jump: bool) {
        let is_last = ordinal.saturating_add(self.plan.pass_frames) >= self.plan.frame_count;
        let count = &mut self.count;
        count.late_count += 1;
        count.late_last_pass_count += u64::from(is_last);
        count.late_after_jump_count += u64::from(after_jump);
        let clearly = now > due + self.plan.period + Duration::from_ms(5);
        count.clearly_late_count += u64::from(clearly);
        count.worst_late_ns = count.worst_late_ns.max(now.since(due).0);
        count.slack_ns_min = 0;
        count.first_late_at = count.first_late_at.or(Some(due));
    }
}
