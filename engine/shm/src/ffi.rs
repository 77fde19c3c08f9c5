// SPDX-License-Identifier: Apache-2.0
//! The C face of the client.
