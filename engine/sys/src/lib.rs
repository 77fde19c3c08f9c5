// SPDX-License-Identifier: Apache-2.0
//! The few system calls Rushes needs.
