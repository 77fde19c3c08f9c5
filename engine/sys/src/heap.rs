// SPDX-License-Identifier: Apache-2.0
//! The way of the C library's heap with large buffers.

/// Longer buffers are mappings of their own. Units: bytes.
const MAPPED_BYTES_MIN: libc::c_int = 8 << 20;
/// Each heap keeps so much of the memory that was given back, for the next request. Units: bytes.
const KEPT_BYTES: libc::c_int = 4 << 20;

/// Buffers of eight MiB and more take memory only where they are written to, and give it back when
/// they go.
///
/// glibc does so until the first of them is freed, and puts further ones on heaps that it zeroes: a
/// process with a buffer of 16 MiB for each of many threads, of which each uses the first MiB, then
/// holds hundreds of MiB.
///
/// A program that sets that limit loses what glibc else does beside it: a heap would give back
/// whatever is more than 128 KiB, and a buffer of one MiB, as long as a request of the kernel,
/// would have its 256 pages taken away and faulted in again for each request: as long as copying it
/// takes.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes numbers, and sets the allocator's own under its lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}
