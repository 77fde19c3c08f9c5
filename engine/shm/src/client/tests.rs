// SPDX-License-Identifier: Apache-2.0
//! Both ends against each other.
