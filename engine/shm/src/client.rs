// SPDX-License-Identifier: Apache-2.0
//! The door's end of a session.
