// SPDX-License-Identifier: Apache-2.0
//! Eventfds as doorbells between processes.
//!
//! Both ends share one open file description, so a peer could clear its O_NONBLOCK. Reads therefore
//! say "do not wait" in each call; a write waits only when the counter is at its maximum, which
//! takes a hostile peer of our own rank (uid 0).

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// A new doorbell: close-on-exec, nonblocking, silent.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Ring it. A counter that is full already rings, so that is no error.
pub fn ring(bell: impl AsFd) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::io::write(&bell, &1u64.to_ne_bytes())) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Silence it. True when it had been rung. Never waits.
pub fn silence(bell: impl AsFd) -> io::Result<bool> {
    let mut count = [0u8; 8];
    // Offset -1: as read(2). RWF_NOWAIT rather than O_NONBLOCK: see the head of this file.
    let read = rustix::io::retry_on_intr(|| {
        rustix::io::preadv2(
            &bell,
            &mut [IoSliceMut::new(&mut count)],
            u64::MAX,
            ReadWriteFlags::NOWAIT,
        )
    });
    match read {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_setfl};

    #[test]
    fn rung_twice_is_one_silence_and_never_a_wait() {
        let bell = new().unwrap();
        ring(&bell).unwrap();
        ring(&bell).unwrap();
        assert!(silence(&bell).unwrap());
        assert!(!silence(&bell).unwrap());
        // A peer that makes the shared description blocking does not make us wait.
        fcntl_setfl(&bell, OFlags::empty()).unwrap();
        assert!(!silence(&bell).unwrap());
    }
}
