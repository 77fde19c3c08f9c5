// SPDX-License-Identifier: Apache-2.0
//! The experiments, one in each file: the clients, their stage, and the measurement.

pub mod compare;
pub mod demo;
pub mod fill;
pub mod metadata;
pub mod most;
pub mod play;
pub mod preroll;
pub mod record;
pub mod scatter;
pub mod strokes;
pub mod throughput;
pub mod tidy;
pub mod trials;
