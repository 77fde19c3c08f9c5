// SPDX-License-Identifier: Apache-2.0
//! Clients that read a part of a file and then write a few pages anywhere in all of it.

use crate::client::{Answer, Hand, Scene, Stage, Waiting};
use crate::files::FileIndex;
use rushes_core::server::PAGE_BYTES;
use rushes_core::units::*;

/// How a client reads and scatters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScatterPlan {
    /// The file.
    pub file: FileIndex,
    /// The first byte of its part.
    pub first: u64,
    /// Length of a read.
    pub read_bytes: u64,
    /// Number of reads.
    pub read_count: u64,
    /// Number of writes after them.
    pub write_count: u64,
    /// Longest write. Units: pages.
    pub pages_max: u64,
}

/// A client that scatters.
#[derive(Clone, Debug)]
pub struct Scatterer {
    /// How it works.
    pub plan: ScatterPlan,
    /// Bytes that it read.
    pub read_bytes: u64,
    /// Bytes that were acknowledged.
    pub bytes: u64,
    /// Requests that gave an error.
    pub failed_count: u64,
    /// When it first wrote.
    pub writes_from: Instant,
    /// When it last got an answer.
    pub progress_at: Instant,
    next: u64,
    handle: Option<HandleId>,
}

impl Scatterer {
    /// A client that has read nothing yet.
    pub fn new(plan: ScatterPlan) -> Scatterer {
        Scatterer {
            plan,
            read_bytes: 0,
            bytes: 0,
            failed_count: 0,
            writes_from: Instant::NEVER,
            progress_at: Instant::ZERO,
            next: 0,
            handle: None,
        }
    }

    /// Sends the next request when the last one is answered.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if !hand.waiting.is_empty() {
            return;
        }
        let plan = self.plan;
        let handle = match self.handle {
            Some(handle) => handle,
            None => *self.handle.insert(hand.open(scene, plan.file)),
        };
        let ordinal = self.next;
        self.next += 1;
        if ordinal < plan.read_count {
            let start = plan.first + ordinal * plan.read_bytes;
            let range = ByteRange::new(start, plan.read_bytes);
            hand.read(scene, handle, plan.file, range, ordinal);
        } else if ordinal < plan.read_count + plan.write_count {
            self.writes_from = self.writes_from.min(scene.now);
            let pages = scene.files.get(plan.file).size / PAGE_BYTES;
            let count = hand.prng.between(1, plan.pages_max);
            let first = hand.prng.below(pages - count + 1);
            let range = ByteRange::new(first * PAGE_BYTES, count * PAGE_BYTES);
            hand.write(scene, handle, plan.file, range, ordinal);
        } else {
            hand.close(scene, handle);
            hand.leave(scene);
        }
    }

    /// Takes an answer.
    pub fn arrived(&mut self, now: Instant, waiting: &Waiting, answer: Answer) {
        self.progress_at = now;
        match answer {
            Answer::Data(bytes) => self.read_bytes += bytes,
            Answer::Failed(_) => self.failed_count += 1,
            _ if waiting.stage == Stage::Asked => {}
            _ => self.bytes += waiting.range.length.0,
        }
    }
}
