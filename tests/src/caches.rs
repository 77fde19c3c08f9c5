// SPDX-License-Identifier: Apache-2.0
//! The kernel's caches, which all tests on a machine share.
//!
//! A page that a disk has refused is nowhere but in the kernel's cache, and counts as clean: a test
//! that lets the kernel forget its caches takes it from another one, which runs beside it.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};

fn lock(operation: FlockOperation) -> File {
    let path = std::env::temp_dir().join("rushes-tests-caches.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    flock(&file, operation).expect("a lock of a file in the folder for temporary files");
    file
}

/// Let the kernel forget clean pages ("1") or all that it can ("3"), once no test keeps its caches.
pub fn drop(kinds: &str) {
    let _lock = lock(FlockOperation::LockExclusive);
    fs::write("/proc/sys/vm/drop_caches", kinds).expect("root may drop caches");
}

/// Keep the pages in the kernel's caches for as long as the value lives.
#[must_use]
pub fn keep() -> File {
    lock(FlockOperation::LockShared)
}
