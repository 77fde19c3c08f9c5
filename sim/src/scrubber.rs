// SPDX-License-Identifier: Apache-2.0
//! Readers of single frames: a hand on the mouse, and a conform.
//!
//! Both ask for one frame, wait for it, and ask for another, forwards or backwards, near or far. A
//! hand is no faster than its period; a conform asks at once, and always for another place. Neither
//! plays, so a fetch of bytes behind a frame is never worth it.

use crate::client::{Answer, Hand, Scene, Waiting};
use crate::files::FileIndex;
use rushes_core::units::*;

/// How a client reads single frames.
#[derive(Clone, Debug, PartialEq)]
pub struct ScrubPlan {
    /// Clips that all of the group use.
    pub files: Vec<FileIndex>,
    /// Bytes of a frame.
    pub frame_bytes: u64,
    /// Longest single request; the client asks for a frame in such pieces, one after the other.
    pub request_bytes: u64,
    /// Least time from one frame to the request for the next; zero: none.
    pub every: Duration,
    /// Longest step from one frame to the next.
    pub step_frames_max: u64,
    /// So many steps in a thousand change direction.
    pub turn_permille: u64,
    /// So many go to another clip and place.
    pub elsewhere_permille: u64,
}

/// A reader of single frames at work.
pub struct Scrubber {
    /// How it works.
    pub plan: ScrubPlan,
    /// Frames that came whole.
    pub frame_count: u64,
    /// Requests that gave an error.
    pub failed_count: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Time from the request for a frame until it came. Units: ns.
    pub frame_ns: Vec<u64>,
    open: Vec<(FileIndex, HandleId)>,
    clip: usize,
    frame: u64,
    is_forward: bool,
    /// Bytes of the present frame for which no request was sent yet.
    unasked: u64,
    asked_at: Instant,
    next_at: Instant,
}

impl Scrubber {
    /// A client that has read nothing yet.
    pub fn new(plan: ScrubPlan) -> Scrubber {
        Scrubber {
            plan,
            frame_count: 0,
            failed_count: 0,
            bytes: 0,
            frame_ns: Vec::new(),
            open: Vec::new(),
            clip: 0,
            frame: 0,
            is_forward: true,
            unasked: 0,
            asked_at: Instant::ZERO,
            next_at: Instant::ZERO,
        }
    }

    /// Asks for the rest of its frame, or for the next one.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if !hand.waiting.is_empty() {
            return;
        }
        if self.unasked == 0 {
            if self.next_at > scene.now {
                hand.set_alarm(scene, self.next_at);
                return;
            }
            self.step(hand, scene);
            self.unasked = self.plan.frame_bytes;
            self.asked_at = scene.now;
            self.next_at = scene.now + self.plan.every;
        }
        let file = self.plan.files[self.clip];
        let handle = hand.keep_open(scene, &mut self.open, file);
        let done = self.plan.frame_bytes - self.unasked;
        let bytes = self.unasked.min(self.plan.request_bytes);
        self.unasked -= bytes;
        let start = self.frame * self.plan.frame_bytes + done;
        hand.read(scene, handle, file, ByteRange::new(start, bytes), 0);
    }

    fn step(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        let is_first = self.open.is_empty();
        if is_first || hand.prng.chance(self.plan.elsewhere_permille) {
            self.clip = hand.prng.below(self.plan.files.len() as u64) as usize;
            let count = self.frames(scene);
            self.frame = hand.prng.below(count);
            return;
        }
        let last = self.frames(scene) - 1;
        let step = 1 + hand.prng.below(self.plan.step_frames_max.max(1));
        self.is_forward ^= hand.prng.chance(self.plan.turn_permille);
        // At an end the hand turns.
        self.is_forward = (self.is_forward && self.frame + step <= last)
            || (!self.is_forward && self.frame < step);
        self.frame = match self.is_forward {
            true => (self.frame + step).min(last),
            false => self.frame.saturating_sub(step),
        };
    }

    fn frames(&self, scene: &Scene<'_>) -> u64 {
        let size = scene.files.get(self.plan.files[self.clip]).size;
        (size / self.plan.frame_bytes.max(1)).max(1)
    }

    /// Takes an answer.
    pub fn arrived(&mut self, now: Instant, waiting: &Waiting, answer: Answer) {
        match answer {
            Answer::Data(bytes) => self.bytes += bytes,
            Answer::Failed(_) => self.failed_count += 1,
            Answer::Done | Answer::Plain | Answer::Granted(_) => {}
        }
        let is_last = waiting.range.end() == (self.frame + 1) * self.plan.frame_bytes;
        if is_last && self.unasked == 0 {
            self.frame_count += 1;
            self.frame_ns.push(now.since(self.asked_at).0);
        }
    }
}
