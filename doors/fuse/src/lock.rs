// SPDX-License-Identifier: Apache-2.0
//! One way to take a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Poisoned or not: the values that the locks here guard are whole between two statements.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
