// SPDX-License-Identifier: Apache-2.0
//! The work of one client, as a list: which bytes of which files, how many frames long, by which
//! clock.
//!
//! [`super::workload`] reduces every way of working to this list, so that the client process,
//! [`super::editor`], knows nothing of timelines or thumbnails. A list is drawn from a seed:
//! clients request the same bytes from all servers of a comparison.

use crate::stage::footage::Clip;
use serde::{Deserialize, Serialize};

/// The clock by which a client requests frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pace {
    /// Requests frame *k* not before its time; it is late when it comes long after that: a player.
    #[default]
    Clock,
    /// Requests a frame one period after the request for the last, and not before that has come: a
    /// hand on the mouse waits for the picture.
    Hand,
    /// Requests the next frame when the last has come.
    Free,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Its path below the share.
    pub path: String,
    /// The number of the clip that is its content.
    pub number: u64,
    /// Units: bytes.
    pub bytes: u64,
    /// It stays open after its first use.
    pub keep_open: bool,
    /// Its content is a real file's, which the client does not know.
    pub is_real: bool,
    /// Another client writes it meanwhile: missing bytes will come.
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

/// Where one layer reads or writes in the course of a run.
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
    /// Where the piece of this frame of the run begins; `None`: this frame needs none. Units:
    /// bytes.
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
    /// The layers, all played at once; none: a gap, in which nothing is played.
    pub heads: Vec<Head>,
    /// Its length in frames.
    pub frame_count: u64,
    /// Time between frames. Units: ns.
    pub period_ns: u64,
}

/// How often a client by the clock plays its runs, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// At least 1.
    pub count: u64,
    /// From the beginning of a pass to that of the next. Units: ns.
    pub every_ns: u64,
}

impl Default for Passes {
    fn default() -> Passes {
        Passes {
            count: 1,
            every_ns: 0,
        }
    }
}

impl Passes {
    /// From the beginning of the first pass to that of pass `pass`, of which the first is 0. Units:
    /// ns.
    pub fn start_ns(&self, pass: u64) -> u64 {
        pass * self.every_ns
    }

    /// From the beginning of the first pass to that of the last. Units: ns.
    pub fn last_start_ns(&self) -> u64 {
        self.start_ns(self.count.saturating_sub(1))
    }
}

/// All that one client does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// By which clock.
    pub pace: Pace,
    /// The files of the heads.
    pub files: Vec<Source>,
    /// The runs, one after the other.
    pub runs: Vec<Run>,
    /// How long after its beginning the first run is due. Units: ns.
    pub delay_ns: u64,
    /// How often a client by the clock plays all runs.
    pub passes: Passes,
    /// The client compares only the first page of each piece: a full comparison would take much of
    /// the time of a client that only reads.
    pub is_sampled: bool,
}

impl Script {
    /// Frames of one pass, without gaps.
    pub fn frame_count(&self) -> u64 {
        let played = self.runs.iter().filter(|run| !run.heads.is_empty());
        played.map(|run| run.frame_count).sum()
    }

    /// From its beginning to the last frame's time in the last pass. Units: ns.
    pub fn length_ns(&self) -> u64 {
        let runs = self.runs.iter();
        let length: u64 = runs.map(|run| run.frame_count * run.period_ns).sum();
        self.delay_ns + self.passes.last_start_ns() + length
    }

    /// The stretches that it reads: path, first byte, first byte behind it. A head that skips
    /// frames or goes backwards yields a stretch for each piece.
    pub fn stretches(&self) -> Vec<(&str, u64, u64)> {
        let heads = self.runs.iter().flat_map(|run| {
            let heads = run.heads.iter().filter(|head| !head.writes);
            heads.map(move |head| (head, run.frame_count))
        });
        let mut all = Vec::new();
        for (head, frame_count) in heads {
            let path = self.files[head.file].path.as_str();
            let count = frame_count.div_ceil(head.every.max(1));
            if head.stride == head.bytes as i64 {
                all.push((path, head.from, head.from + count * head.bytes));
                continue;
            }
            let places = (0..count).filter_map(|index| head.place(index * head.every.max(1)));
            all.extend(places.map(|place| (path, place, place + head.bytes)));
        }
        all
    }

    /// Bytes that one pass over the runs reads and writes.
    pub fn asked_bytes(&self) -> u64 {
        let of = |run: &Run| -> u64 {
            let pieces = |head: &Head| run.frame_count.div_ceil(head.every.max(1)) * head.bytes;
            run.heads.iter().map(pieces).sum()
        };
        self.runs.iter().map(of).sum()
    }

    /// One of its heads writes.
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

    #[test]
    fn passes_follow_one_another_and_each_has_the_length_of_the_list() {
        let mut script = Script {
            runs: vec![Run {
                heads: vec![head(100, 1)],
                frame_count: 50,
                period_ns: 40,
            }],
            ..Script::default()
        };
        assert_eq!(script.length_ns(), 2000);
        script.passes = Passes {
            count: 3,
            every_ns: 2500,
        };
        assert_eq!(script.length_ns(), 2 * 2500 + 2000);
        assert_eq!(script.passes.start_ns(1), 2500);
        assert_eq!(script.frame_count(), 50, "of one pass");
    }

    #[test]
    fn stretches_are_what_heads_read_and_not_what_they_write() {
        let source = Source {
            path: "a".to_owned(),
            number: 0,
            bytes: 100_000,
            keep_open: true,
            is_real: false,
            grows: false,
        };
        let writes = Head {
            writes: true,
            ..head(100, 1)
        };
        let run = |head: Head, frame_count: u64| Run {
            heads: vec![head],
            frame_count,
            period_ns: 1,
        };
        let script = Script {
            files: vec![source],
            runs: vec![
                run(head(100, 1), 4),
                run(head(-200, 1), 2),
                run(head(100, 3), 4),
                run(writes, 9),
            ],
            ..Script::default()
        };
        assert_eq!(
            script.stretches(),
            [
                ("a", 1000, 1400),
                ("a", 1000, 1100),
                ("a", 800, 900),
                ("a", 1000, 1200)
            ]
        );
    }
}
