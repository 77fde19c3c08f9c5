// SPDX-License-Identifier: Apache-2.0
//! Sessions over shared memory.
