// SPDX-License-Identifier: Apache-2.0
//! Sequences: one file a frame.

use super::state::*;
use super::*;

impl Server {
    pub(super) fn frame_opened(&mut self, _session: SessionId, _handle: HandleId, _actions: &mut Actions) {}
    pub(super) fn end_session_sequences(&mut self, _session: SessionId, _actions: &mut Actions) {}
    pub(super) fn neighbour_opened(
        &mut self,
        _beside: FileId,
        _name: &str,
        facts: Result<FileFacts, Errno>,
        actions: &mut Actions,
    ) {
        if let Ok(facts) = facts {
            let file = self.adopt(facts, actions);
            self.release(file, actions);
        }
    }
    pub(super) fn frame_read(&mut self, _id: StreamId, _file: FileId, _range: ByteRange, _arrived: Instant) -> Instant {
        Instant::NEVER
    }
    pub(super) fn frame_place(&self, _stream: &Stream) -> (u64, u64) {
        (0, 0)
    }
    pub(super) fn frame_piece(&self, _stream: &Stream, _bytes: u64) -> Option<(FileId, ByteRange, u64)> {
        None
    }
    pub(super) fn frame_will_fetch(&self, _stream: &Stream, _id: FileId, _missing: ByteRange) -> bool {
        false
    }
    /// Thousandths of its buffers that a stream can fill: a frame that ends in the middle of a slot wastes the rest.
    pub(super) fn packing(&self, _stream: &Stream) -> u64 {
        1000
    }
}

impl Stream {
    pub(super) fn frame_end(&self) -> u64 {
        self.fetched
    }
}
