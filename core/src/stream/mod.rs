// SPDX-License-Identifier: Apache-2.0
//! Recognises how a file, or a folder of frames, is being read, and predicts the next reads.
//!
//! Four types, each fed with events and asked for a prediction:
//!
//! | type | watches | says |
//! |---|---|---|
//! | [`Recogniser`] | the reads of one open file | cursors, their [`Pattern`], the ranges that come next |
//! | [`Cadence`] | when reads arrive and are answered | the rate a player keeps, or that there is none; how idle the client is |
//! | [`FrameName`] | one file name | prefix, number, width, suffix |
//! | [`SequenceTracker`] | the opens of one folder by one session | readers, direction, the frames that come next |
//!
//! Nothing here fetches, promises or holds bytes; a wrong prediction costs a fetch and nothing
//! else. Nothing here knows the file's size except where it is handed in, and nothing here reads a
//! clock.

mod ahead;
mod cadence;
mod cursor;
mod frame_name;
mod places;
mod recogniser;
mod sequence;
mod stretches;

pub use ahead::AheadIter;
pub use cadence::{Cadence, Lately};
pub use cursor::{Cursor, Pattern};
pub use frame_name::FrameName;
pub use recogniser::{CURSOR_COUNT_MAX, CursorIndex, Moved, Observation, Recogniser};
pub use sequence::{
    AheadFrames, NUMBERS_LEAST_OF_OTHERS, READER_COUNT_MAX, ReaderIndex, SequenceObservation,
    SequenceTracker,
};

#[cfg(test)]
mod tests;
