// SPDX-License-Identifier: Apache-2.0
//! Waits for a state, and says which one did not come.

use std::time::{Duration, Instant};

/// Waits until `is_so`.
///
/// Panics   when it is not so within `patience`
pub fn until(what: &str, patience: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + patience;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not within {patience:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
