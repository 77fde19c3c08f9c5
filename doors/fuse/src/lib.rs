// SPDX-License-Identifier: Apache-2.0
//! The mount of a pool: names and attributes on the catalogue's tree, data on the members' objects.
