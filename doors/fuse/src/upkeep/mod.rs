// SPDX-License-Identifier: Apache-2.0
//! Care of a mounted pool: members that come and go, files that move, devices that fail.

pub(crate) mod care;
pub(crate) mod control;
pub(crate) mod failing;
pub(crate) mod tidying;
