// SPDX-License-Identifier: Apache-2.0
//! Layers: the files that an editor's program plays at once, such as the cameras of a multicam
//! clip, or a picture and its sounds.
//!
//! Such a program reads a frame of one file after the other. By the second read of the first file
//! it shows that it plays. Until the others have a second read as well, each of them would wait for
//! a visit of its own, one after the other, in the time that is meant for all of them together. So
//! the sign of the first layer counts for those to which the reader went meanwhile.

use super::state::*;
use super::*;
use alloc::vec::Vec;

/// Layers of one cut, at most.
const LAYERS_MAX: usize = 32;

/// A reader that has an answer asks for the next layer within this time: the wire, and the reader's
/// own machine.
const TURN: Duration = Duration::from_ms(5);

impl Server {
    /// A read arrived: whether its reader asks for it because another file's answer has come, as it
    /// did before. Then that file's reads are part of the time for which it waits for us.
    pub(super) fn note_turn(&mut self, id: StreamId, arrived: Instant) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let session = self.sessions.get(&stream.session);
        let session = session.filter(|session| session.is_seat());
        let last = session.and_then(|session| session.last_answer);
        let before = last.filter(|(other, at)| *other != id && arrived.since(*at) <= TURN);
        let Some((other, at)) = before else {
            stream.turn = None;
            return;
        };
        let is_again = stream.turn == Some(other);
        stream.turn = Some(other);
        if is_again {
            for clock in [&mut stream.clock, &mut stream.begun].into_iter().flatten() {
                clock.waited_until(at);
            }
        }
    }

    /// A reader goes on in a file where it began at `since`: files where it began after that, and
    /// that have no second read yet, are its other layers.
    pub(super) fn follow_layers(&mut self, id: StreamId, since: Instant, actions: &mut Actions) {
        let Some(session) = self.streams.get(id.0).map(|stream| stream.session) else {
            return;
        };
        let is_seat = (self.sessions.get(&session)).is_some_and(|session| session.is_seat());
        if !is_seat {
            return;
        }
        let is_layer = |stream: &Stream| {
            let began = stream
                .first_read
                .is_some_and(|began| began.arrived >= since);
            stream.session == session && began && stream.frames.is_none() && !stream.is_copy
        };
        let layers: Vec<(StreamId, FirstRead)> = self
            .streams
            .iter()
            .filter(|(key, stream)| StreamId(*key) != id && is_layer(stream))
            .filter(|(_, stream)| self.told_rate(stream).is_some())
            .filter(|(_, stream)| !self.glances_about(stream))
            .filter_map(|(key, stream)| Some((StreamId(key), stream.first_read?)))
            .take(LAYERS_MAX)
            .collect();
        for (layer, began) in layers {
            let Some(stream) = self.streams.get_mut(layer.0) else {
                continue;
            };
            stream.first_read = None;
            if stream.cursor != Some(began.cursor) {
                stream.is_presumed = true;
                let read = (began.range, began.arrived);
                self.restart(layer, began.cursor, Flow::Forward, read, actions);
                self.advance(layer, began.range, began.arrived);
            }
            self.settle_rate(layer);
        }
    }
}
