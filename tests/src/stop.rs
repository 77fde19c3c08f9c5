// SPDX-License-Identifier: Apache-2.0
//! A flag that stops the programs and threads beside a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when it is dropped, so that the others stop when one has failed.
#[derive(Debug)]
pub struct StopAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
