// SPDX-License-Identifier: Apache-2.0
//! Names and attributes: the tree that programs see, on the catalogue.

pub(crate) mod attributes;
pub(crate) mod listing;
pub(crate) mod names;
pub(crate) mod nodes;
pub(crate) mod removals;
pub(crate) mod signs;
pub(crate) mod wishes;
