// SPDX-License-Identifier: Apache-2.0
//! The real thing, measured.

pub mod disk;
