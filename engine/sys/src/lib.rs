// SPDX-License-Identifier: Apache-2.0
//! The few system calls Rushes needs, behind types that cannot be misused.
//!
//! Nothing here decides: no policy, no retry beyond the needs of the call itself, no logging. A
//! feature that a kernel lacks is returned as a value, so that the daemon can log it once and go
//! on. `unsafe` is allowed here and in `engine/shm`, nowhere else; every block says why it is
//! sound.
#![allow(unsafe_code)]

pub mod bell;
pub mod cached;
pub mod clock;
pub mod descriptor;
pub mod device;
pub mod entries;
mod error;
pub mod extents;
pub mod file;
mod fork;
pub mod handle;
pub mod heap;
pub mod lease;
pub mod limits;
mod map;
pub mod notify;
pub mod priority;
mod ring;
mod segment;
pub mod socket;
pub mod space;
pub mod thread;
pub mod watch;

pub use error::{SysError, errno_of};
pub use fork::ForkGuard;
pub use map::{Access, Mapping};
pub use ring::{
    Completion, FakePoll, FakeRead, FakeRing, FileWrite, MemoryPart, PollId, Ring, RingFacts,
    RingLimits, SlotRead, WRITE_PART_COUNT_MAX,
};
pub use segment::{Segment, SegmentHome, SegmentWarning, memory_file};

/// Print that a test is skipped, and why; it then returns.
///
/// Panics   when `RUSHES_TEST_ALL` is 1: under `make test` everything runs
#[cfg(test)]
fn skip(sentence: &str) {
    assert!(
        std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
        "{sentence}; it may not be skipped under RUSHES_TEST_ALL=1"
    );
    eprintln!("SKIPPED: {sentence}");
}

/// A folder for one test of this process.
#[cfg(test)]
fn test_folder(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("rushes-sys-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}
