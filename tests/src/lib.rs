// SPDX-License-Identifier: Apache-2.0
//! Tests through the real doors.
