// SPDX-License-Identifier: Apache-2.0
//! Results: JSON with promised field names, tables, and plots.

pub mod arrival;
pub mod head;
pub mod outcome;
pub mod plot;
pub mod report;
pub mod written;
