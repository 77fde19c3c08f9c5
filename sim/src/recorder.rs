// SPDX-License-Identifier: Apache-2.0
//! Clients that write through lanes: recorders, and copies that come in.
//!
//! A recorder writes frame *n* not before `start + n·period`, and the frame is late when it is
//! acknowledged past `start + preroll + n·period`. A copy in writes as fast as the server lets it,
//! one request at a time. Both write a track; a client of a pool's mount writes several.

use crate::client::{Answer, Hand, Scene, Stage, Waiting};
use crate::files::FileIndex;
use rushes_core::units::*;

/// How a file is written from its first byte to its last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrackPlan {
    /// The file.
    pub file: FileIndex,
    /// Bytes of a frame, or of a request.
    pub frame_bytes: u64,
    /// Their number.
    pub frame_count: u64,
    /// Time from frame to frame; zero: as fast as the server lets it.
    pub period: Duration,
    /// How late a frame may be acknowledged.
    pub preroll: Duration,
    /// The first frame comes so long after the client's begin.
    pub delay: Duration,
    /// It first announces the length of the file, with a byte at the end of each request, as
    /// Windows does.
    pub announces: bool,
    /// The client asks for a sync after so many frames; 0: none.
    pub sync_every: u64,
    /// The client asks for a sync after the last frame.
    pub syncs_at_end: bool,
}

/// The times and counts of a track.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackCount {
    /// When frames were acknowledged.
    pub acknowledged: Vec<Instant>,
    /// Frames that were acknowledged late, or not at all although they were due.
    pub late_count: u64,
    /// The lateness of the latest frame.
    pub worst_late: Duration,
    /// Frames and syncs that gave an error.
    pub failed_count: u64,
    /// Syncs that were answered.
    pub sync_count: u64,
    /// Longest time from one acknowledgement to the next, of a copy.
    pub longest_wait: Duration,
}

/// A track that is written.
#[derive(Clone, Debug)]
pub struct Track {
    /// How it is written.
    pub plan: TrackPlan,
    /// Its times and counts.
    pub count: TrackCount,
    start: Option<Instant>,
    handle: Option<HandleId>,
    /// Requests that announce the length, so far.
    announced: u64,
    /// Frames so far.
    next: u64,
    is_writing: bool,
    is_syncing: bool,
    is_closed: bool,
    synced_at: u64,
    progress_at: Instant,
}

impl Track {
    /// A track of which nothing is written.
    pub fn new(plan: TrackPlan) -> Track {
        Track {
            plan,
            count: TrackCount::default(),
            start: None,
            handle: None,
            announced: 0,
            next: 0,
            is_writing: false,
            is_syncing: false,
            is_closed: false,
            synced_at: 0,
            progress_at: Instant::ZERO,
        }
    }

    /// When the client may write frame `ordinal`.
    fn earliest(&self, start: Instant, ordinal: u64) -> Instant {
        start + self.plan.period.times(ordinal)
    }

    /// Bytes that were acknowledged.
    pub fn bytes(&self) -> u64 {
        self.count.acknowledged.len() as u64 * self.plan.frame_bytes
    }

    fn is_sync_due(&self) -> bool {
        let every = self.plan.sync_every;
        let is_at_end = self.plan.syncs_at_end && self.next >= self.plan.frame_count;
        let due = is_at_end || (every > 0 && self.next.is_multiple_of(every));
        due && !self.is_writing && self.next > self.synced_at
    }

    /// Does all that it may do now. True: a write was sent.
    fn act(&mut self, number: u64, hand: &mut Hand, scene: &mut Scene<'_>) -> bool {
        let start = *self.start.get_or_insert(scene.now + self.plan.delay);
        if self.is_closed || self.is_writing {
            return false;
        }
        let at = self.earliest(start, self.next);
        if at > scene.now && self.next < self.plan.frame_count {
            hand.set_alarm(scene, at);
        }
        let file = self.plan.file;
        let handle = match self.handle {
            Some(handle) => handle,
            None if scene.now < start => return false,
            None => {
                self.progress_at = scene.now;
                *self.handle.insert(hand.open(scene, file))
            }
        };
        if self.is_sync_due() && !self.is_syncing {
            self.is_syncing = true;
            self.synced_at = self.next;
            hand.sync(scene, handle, file, number);
        }
        if self.next >= self.plan.frame_count {
            if !self.is_syncing {
                self.is_closed = true;
                hand.close(scene, handle);
            }
            return false;
        }
        if at > scene.now {
            return false;
        }
        self.is_writing = true;
        hand.write(scene, handle, file, self.range(), number);
        true
    }

    /// The next bytes to write.
    fn range(&self) -> ByteRange {
        let bytes = self.plan.frame_bytes;
        match self.plan.announces && self.announced < self.plan.frame_count {
            true => ByteRange::new((self.announced + 1) * bytes - 1, 1),
            false => ByteRange::new(self.next * bytes, bytes),
        }
    }

    fn arrived(&mut self, now: Instant, stage: Stage, answer: Answer) {
        let has_failed = matches!(answer, Answer::Failed(_));
        self.count.failed_count += u64::from(has_failed);
        if stage == Stage::Sync {
            self.is_syncing = false;
            self.count.sync_count += 1;
            return;
        }
        self.is_writing = false;
        if self.plan.announces && self.announced < self.plan.frame_count {
            self.announced += 1;
            return;
        }
        let due = self.earliest(self.start.unwrap_or(now), self.next) + self.plan.preroll;
        self.next += 1;
        if self.plan.period == Duration::ZERO {
            // The first ones wait for one-time work of the file system.
            if self.next > 8 {
                let wait = now.since(self.progress_at);
                self.count.longest_wait = self.count.longest_wait.max(wait);
            }
            self.progress_at = now;
        } else if now > due && !has_failed {
            self.note_late(due, now);
        }
        if !has_failed {
            self.count.acknowledged.push(now);
        }
    }

    fn note_late(&mut self, due: Instant, now: Instant) {
        self.count.late_count += 1;
        self.count.worst_late = self.count.worst_late.max(now.since(due));
    }

    /// A frame that was due and was not acknowledged is late.
    fn close_books(&mut self, stopped: Instant) {
        let Some(start) = self.start.filter(|_| self.plan.period > Duration::ZERO) else {
            return;
        };
        while self.next < self.plan.frame_count {
            let due = self.earliest(start, self.next) + self.plan.preroll;
            if due >= stopped {
                break;
            }
            self.note_late(due, stopped);
            self.next += 1;
        }
    }
}

/// A client that writes tracks.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// The tracks.
    pub tracks: Vec<Track>,
    /// It dies with a write outstanding, before so many frames in ten thousand.
    pub die_per_10k: u64,
    /// It died.
    pub died: bool,
}

impl Recorder {
    /// A client that writes these tracks.
    pub fn new(plans: Vec<TrackPlan>, die_per_10k: u64) -> Recorder {
        Recorder {
            tracks: plans.into_iter().map(Track::new).collect(),
            die_per_10k,
            died: false,
        }
    }

    /// Writes all that it may write now.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        for (number, track) in self.tracks.iter_mut().enumerate() {
            let has_written = track.act(number as u64, hand, scene);
            if has_written && self.die_per_10k > 0 && hand.prng.below(10_000) < self.die_per_10k {
                self.died = true;
                return hand.leave(scene);
            }
        }
        if self.tracks.iter().all(|track| track.is_closed) {
            hand.leave(scene);
        }
    }

    /// Takes an answer.
    pub fn arrived(&mut self, now: Instant, waiting: &Waiting, answer: Answer) {
        if let Some(track) = self.tracks.get_mut(waiting.ordinal as usize) {
            track.arrived(now, waiting.stage, answer);
        }
    }

    /// Its work is done or cut short.
    pub fn close_books(&mut self, hand: &Hand, now: Instant) {
        if self.died || (hand.session.is_none() && !hand.over) {
            return;
        }
        for track in &mut self.tracks {
            track.close_books(now.min(hand.end));
        }
    }
}
