// SPDX-License-Identifier: Apache-2.0
//! When headers are read.
