// SPDX-License-Identifier: Apache-2.0
//! Settings of the C library's heap for large buffers.

/// Longer buffers are mappings of their own. Units: bytes.
const MAPPED_BYTES_MIN: libc::c_int = 8 << 20;
/// Each heap keeps so much freed memory for the next request. Units: bytes.
const KEPT_BYTES: libc::c_int = 4 << 20;

/// Buffers of eight MiB and more take memory only where they are written to, and release it when
/// they are freed.
///
/// glibc does so until the first of them is freed, and puts further ones on heaps that it zeroes: a
/// process with a buffer of 16 MiB for each of many threads, of which each uses the first MiB, then
/// holds hundreds of MiB.
///
/// If a program sets that limit, glibc no longer adapts the limit of trimming: a heap would release
/// all free memory beyond 128 KiB. A buffer of one MiB, as long as a request of the kernel, would
/// lose its 256 pages and fault them in again for each request, which takes as long as copying it.
pub fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes numbers, and sets the allocator's own under its lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}
