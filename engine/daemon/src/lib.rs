// SPDX-License-Identifier: Apache-2.0
//! The daemon.

pub mod config;
