// SPDX-License-Identifier: Apache-2.0
//! The kernel's side: the mount, its requests and replies, the process that serves them, and its
//! end.

pub(crate) mod answer;
pub(crate) mod crew;
pub(crate) mod keeper;
pub(crate) mod kept;
pub(crate) mod mounting;
pub(crate) mod protocol;
pub(crate) mod stopping;
pub(crate) mod table;
