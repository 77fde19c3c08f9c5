// SPDX-License-Identifier: Apache-2.0
//! The work of one client, as a list: which bytes of which files, how many frames long, by which clock.
//!
//! Every way of working comes down to this list ([`super::workload`] draws it), so that the client process ([`super::editor`]) knows
//! nothing of timelines or thumbnails. A list is drawn from a seed: all servers of a comparison are asked for the same bytes.

use crate::stage::footage::Clip;
use serde::{Deserialize, Serialize};

/// By which clock frames are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pace {
    /// Frame *k* not before its time, and late when it comes long after that: a player.
    #[default]
    Clock,
    /// The next so long after the last was asked for, or when that has come: a hand on the mouse waits for the picture.
    Hand,
    /// The next when the last has come.
    Free,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Below the share.
    pub path: String,
    /// Which clip its bytes are.
    pub number: u64,
    /// Units: bytes.
    pub bytes: u64,
    /// It stays open once it was opened.
    pub keep_open: bool,
    /// Its bytes are a real file's, which the client does not know.
    pub is_real: bool,
    /// Another client writes it meanwhile: bytes that are missing will come.
    pub grows: bool,
}

impl Source {
    /// The content that its bytes must have.
    pub fn clip(&self, seed: u64) -> Clip {
        Clip {
            seed,
            number: self.number,
        }
    }
}

/// Where one layer reads (or writes) in the course of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Index of its file.
    pub file: usize,
    /// Where its first piece begins. Units: bytes.
    pub from: u64,
    /// From one piece to the next; backwards when negative. Units: bytes.
    pub stride: i64,
    /// Size of a piece. Units: bytes.
    pub bytes: u64,
    /// One piece in so many frames.
    pub every: u64,
    /// It writes.
    pub writes: bool,
}

impl Head {
    /// Where the piece of this frame of the run begins; `None`: this frame needs none. Units: bytes.
    pub fn place(&self, frame: u64) -> Option<u64> {
        let every = self.every.max(1);
        frame.is_multiple_of(every).then(|| {
            let index = (frame / every) as i64;
            self.from.saturating_add_signed(index * self.stride)
        })
    }
}

/// A stretch from one cut to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// All at once; none: nothing is played meanwhile.
    pub heads: Vec<Head>,
    /// How long.
    pub frame_count: u64,
    /// Time between frames. Units: ns.
    pub period_ns: u64,
}

/// All that one client does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// By which clock.
    pub pace: Pace,
    /// Of the heads.
    pub files: Vec<Source>,
    /// One after the other.
    pub runs: Vec<Run>,
    /// How long after its beginning the first run is due. Units: ns.
    pub delay_ns: u64,
}

impl Script {
    /// Frames that somebody looks at.
    pub fn frame_count(&self) -> u64 {
        let played = self.runs.iter().filter(|run| !run.heads.is_empty());
        played.map(|run| run.frame_count).sum()
    }

    /// From its beginning to the last frame's time. Units: ns.
    pub fn length_ns(&self) -> u64 {
        let runs = self.runs.iter();
        let length: u64 = runs.map(|run| run.frame_count * run.period_ns).sum();
        self.delay_ns + length
    }

    /// Bytes that one pass over the runs asks for, read and written.
    pub fn asked_bytes(&self) -> u64 {
        let of = |run: &Run| -> u64 {
            let pieces = |head: &Head| run.frame_count.div_ceil(head.every.max(1)) * head.bytes;
            run.heads.iter().map(pieces).sum()
        };
        self.runs.iter().map(of).sum()
    }

    /// Somebody writes.
    pub fn writes(&self) -> bool {
        self.runs
            .iter()
            .flat_map(|run| &run.heads)
            .any(|head| head.writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(stride: i64, every: u64) -> Head {
        Head {
            file: 0,
            from: 1000,
            stride,
            bytes: 100,
            every,
            writes: false,
        }
    }

    #[test]
    fn a_head_moves_by_its_stride_and_rests_between_its_pieces() {
        let places = |head: Head| (0..4).map(|frame| head.place(frame)).collect::<Vec<_>>();
        assert_eq!(
            places(head(100, 1)),
            [Some(1000), Some(1100), Some(1200), Some(1300)]
        );
        assert_eq!(
            places(head(-200, 1)),
            [Some(1000), Some(800), Some(600), Some(400)]
        );
        assert_eq!(places(head(100, 3)), [Some(1000), None, None, Some(1100)]);
    }

    #[test]
    fn frames_and_bytes_are_those_of_runs_that_show_something() {
        let script = Script {
            runs: vec![
                Run {
                    heads: vec![head(100, 1), head(100, 25)],
                    frame_count: 50,
                    period_ns: 40,
                },
                Run {
                    heads: Vec::new(),
                    frame_count: 10,
                    period_ns: 40,
                },
            ],
            delay_ns: 7,
            ..Script::default()
        };
        assert_eq!(script.frame_count(), 50);
        assert_eq!(script.length_ns(), 60 * 40 + 7);
        assert_eq!(script.asked_bytes(), 50 * 100 + 2 * 100);
        assert!(!script.writes());
    }
}
