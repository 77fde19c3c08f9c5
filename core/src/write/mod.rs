// SPDX-License-Identifier: Apache-2.0
//! Bytes that were acknowledged and are not on their device yet; see docs/decisions/0014.
//!
//! A write is a *piece*: it lies in pages of its session's *lane* ([`Lane`]) and is never changed.
//! The file's [`DirtyMap`] says which piece has which bytes of the file. Both hold numbers, never
//! bytes.

mod lane;
mod map;
mod pace;

pub use lane::{Lane, PageRun, RUNS_MAX, Runs};
pub use map::{DirtyMap, PieceKey, Released, Span};
pub use pace::Pace;
