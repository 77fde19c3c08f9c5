// SPDX-License-Identifier: Apache-2.0
//! Editors with several files for each frame, all cut at once: those that work Avid's way, whose
//! clips are one file of picture and several of sound, and those that play several layers, such as
//! the cameras of a multicam clip.
//!
//! Such a program reads one file after the other: a frame of each layer's picture when it is due,
//! and a second of each sound at the start of that second. The frame is complete when the last of
//! them has come. Handles stay open.

use crate::client::{Answer, Hand, Scene};
use crate::files::FileIndex;
use rushes_core::units::*;

/// How an editor works.
#[derive(Clone, Debug, PartialEq)]
pub struct OpAtomPlan {
    /// Clips: picture first, then sounds.
    pub clips: Vec<Vec<FileIndex>>,
    /// Layers, each of another clip and from another place; the first one has sounds.
    pub layers: u64,
    /// Bytes of a frame of picture.
    pub frame_bytes: u64,
    /// From one frame to the next.
    pub period: Duration,
    /// Bytes of a second of one sound.
    pub sound_bytes: u64,
    /// Frames of a second.
    pub sound_frames: u64,
    /// Shortest and longest run between two cuts. Units: frames.
    pub run_frames: (u64, u64),
    /// A frame that comes so long after its time is late.
    pub late: Duration,
}

/// An editor at work.
pub struct OpAtom {
    /// How it works.
    pub plan: OpAtomPlan,
    /// Frames that came, or failed.
    pub frame_count: u64,
    /// Of those, late ones.
    pub late_count: u64,
    /// The longest delay of a frame. Units: ns.
    pub worst_ns: u64,
    /// Requests that gave an error.
    pub failed_count: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Time from each cut until its first frame was complete. Units: ns.
    pub cut_ns: Vec<u64>,
    open: Vec<(FileIndex, HandleId)>,
    clip: usize,
    /// The first frame of the run in the clip of each layer, and the length of the run. Units:
    /// frames.
    origins: Vec<u64>,
    run: u64,
    /// The present frame of the run, and the file of it that is read now.
    nth: u64,
    part: usize,
    /// The instant of the request for the run's first frame.
    begun: Instant,
}

impl OpAtom {
    /// An editor that has read nothing yet.
    pub fn new(plan: OpAtomPlan) -> OpAtom {
        OpAtom {
            plan,
            frame_count: 0,
            late_count: 0,
            worst_ns: 0,
            failed_count: 0,
            bytes: 0,
            cut_ns: Vec::new(),
            open: Vec::new(),
            clip: 0,
            origins: Vec::new(),
            run: 0,
            nth: 0,
            part: 0,
            begun: Instant::ZERO,
        }
    }

    /// Asks for the next bytes, or sets the alarm for them.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if !hand.waiting.is_empty() {
            return;
        }
        if self.nth >= self.run {
            let due = self.begun + self.plan.period.times(self.run);
            if self.run > 0 && due > scene.now {
                hand.set_alarm(scene, due);
                return;
            }
            self.cut(hand, scene);
        }
        let due = self.begun + self.plan.period.times(self.nth);
        if self.part == 0 && due > scene.now {
            hand.set_alarm(scene, due);
            return;
        }
        let layer = self.part.min(self.origins.len());
        let (file, unit, bytes) = match self.origins.get(layer) {
            Some(origin) => {
                let clip = (self.clip + layer) % self.plan.clips.len();
                let file = self.plan.clips[clip][0];
                (file, origin + self.nth, self.plan.frame_bytes)
            }
            None => {
                let file = self.plan.clips[self.clip][self.part - layer + 1];
                let second = (self.origins[0] + self.nth) / self.plan.sound_frames;
                (file, second, self.plan.sound_bytes)
            }
        };
        let handle = hand.keep_open(scene, &mut self.open, file);
        let range = ByteRange::new(unit * bytes, bytes);
        hand.read(scene, handle, file, range, 0);
    }

    fn cut(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        let (least, most) = self.plan.run_frames;
        self.clip = hand.prng.below(self.plan.clips.len() as u64) as usize;
        self.run = least + hand.prng.below(most.saturating_sub(least) + 1);
        let size = scene.files.get(self.plan.clips[self.clip][0]).size;
        let frames = (size / self.plan.frame_bytes).saturating_sub(self.run);
        // Whole seconds, so that a cut reads all files of a clip in its first frame.
        let seconds = frames / self.plan.sound_frames;
        let mut origin = || hand.prng.below(seconds.max(1)) * self.plan.sound_frames;
        self.origins = (0..self.plan.layers.max(1)).map(|_| origin()).collect();
        (self.nth, self.part) = (0, 0);
        self.begun = scene.now;
    }

    /// Takes an answer.
    pub fn arrived(&mut self, now: Instant, answer: Answer) {
        match answer {
            Answer::Data(bytes) => self.bytes += bytes,
            Answer::Failed(_) => self.failed_count += 1,
            Answer::Done | Answer::Plain | Answer::Granted(_) => {}
        }
        let has_sound = self.nth.is_multiple_of(self.plan.sound_frames);
        let parts = match has_sound {
            true => self.origins.len() + self.plan.clips[self.clip].len() - 1,
            false => self.origins.len(),
        };
        self.part += 1;
        if self.part < parts {
            return;
        }
        let due = self.begun + self.plan.period.times(self.nth);
        let behind = now.since(due);
        self.frame_count += 1;
        self.late_count += u64::from(behind > self.plan.late);
        self.worst_ns = self.worst_ns.max(behind.0);
        if self.nth == 0 {
            self.cut_ns.push(behind.0);
        }
        self.nth += 1;
        self.part = 0;
    }
}
