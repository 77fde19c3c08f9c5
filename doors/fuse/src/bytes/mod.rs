// SPDX-License-Identifier: Apache-2.0
//! Contents: open files, and their reads and writes on the members' objects.

pub(crate) mod data;
pub(crate) mod descriptors;
pub(crate) mod files;
pub(crate) mod lines;
pub(crate) mod passthrough;
pub(crate) mod reads;
pub(crate) mod spare;
pub(crate) mod stored;
pub(crate) mod unsettled;
