// SPDX-License-Identifier: Apache-2.0
//! The one command of Rushes.

fn main() {}
