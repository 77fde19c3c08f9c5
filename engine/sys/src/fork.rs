// SPDX-License-Identifier: Apache-2.0
//! Notices that this process is a forked child of the one that made a session.
//!
//! A library inside another program must not write to shared rings from a child: both copies would
//! use the same counters. The kernel zeroes a page in the child (MADV_WIPEONFORK, Linux 4.14), so
//! the check takes one load instead of a getpid(2) for each call.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Made in one process; tells whether it still is in that one.
#[derive(Debug)]
pub struct ForkGuard {
    page: NonNull<u8>,
}

const PAGE_BYTES: usize = 4096;

impl ForkGuard {
    /// For this process.
    pub fn new() -> io::Result<ForkGuard> {
        // SAFETY: new anonymous memory at an address of the kernel's choice.
        let page = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let guard = ForkGuard { page };
        // SAFETY: our own page; the kernel wipes its contents only in a child.
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), PAGE_BYTES, Advice::LinuxWipeOnFork) }?;
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// False in a child made by fork(2).
    pub fn same_process(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 1
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is ours, aligned, and lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.page.as_ptr().cast()) }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: our own page, to which no reference is left.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_knows_that_it_is_one() {
        let guard = ForkGuard::new().unwrap();
        assert!(guard.same_process());
        // SAFETY: the child only loads a word and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let status = i32::from(guard.same_process());
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(status) };
        }
        let mut status = -1;
        // SAFETY: `status` is an int.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        assert!(guard.same_process());
    }
}
