// SPDX-License-Identifier: Apache-2.0
//! A connection to the kernel that outlives its serving process: the messages on the device beside
//! requests and answers, and the start of threads on a running connection.
//!
//! The device has one open file, which the keeper holds, too (docs/decisions/0032). There are no
//! clones of it: the close of a clone ends, with errors, the requests that were read through it.

use crate::lock::locked;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// From the protocol: `struct fuse_in_header`, and FUSE_FORGET's argument. Units: bytes.
const REQUEST_HEAD_BYTES: usize = 40;
const FORGET_BYTES: usize = 8;
const FUSE_FORGET: u32 = 2;
/// An INIT is 104 bytes long in Linux 6.18; but a read must have room for the longest request.
/// Units: bytes.
const READ_BYTES: usize = 1 << 20;
/// FUSE_NOTIFY_RESEND, in the place of an errno.
const ASK_AGAIN: i32 = 7;
/// Longest wait for threads to start.
const GATE_PATIENCE: Duration = Duration::from_secs(60);

/// Reads the first request of a connection.
pub(crate) fn read_init(device: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut init = vec![0; READ_BYTES];
    let length = rustix::io::retry_on_intr(|| rustix::io::read(device, &mut init))?;
    init.truncate(length);
    Ok(init)
}

/// Makes the kernel send all requests again that were read from the device and not answered, before
/// any other.
///
/// Returns  false: the kernel cannot (it can from Linux 6.9 on)
pub(crate) fn ask_again(device: &OwnedFd) -> io::Result<bool> {
    // `struct fuse_out_header` of a notification.
    let mut notice = [0; 16];
    notice[..4].copy_from_slice(&16u32.to_ne_bytes());
    notice[4..8].copy_from_slice(&ASK_AGAIN.to_ne_bytes());
    match rustix::io::write(device, &notice) {
        Ok(_) => Ok(true),
        Err(Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Two ends of a socket that keeps packets whole, for packets of up to this length.
pub(crate) fn socket_pair(packet_bytes_max: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, its) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_send_buffer_size_force(&ours, 2 * packet_bytes_max)?;
    Ok((ours, its))
}

/// Sends requests that ask for nothing and get no answer, each in a packet of this length.
pub(crate) fn send_nothing(
    socket: &OwnedFd,
    node: u64,
    count: usize,
    length: usize,
) -> io::Result<()> {
    let mut packet = vec![0; length];
    let whole = (REQUEST_HEAD_BYTES + FORGET_BYTES) as u32;
    packet[..4].copy_from_slice(&whole.to_ne_bytes());
    packet[4..8].copy_from_slice(&FUSE_FORGET.to_ne_bytes());
    packet[16..24].copy_from_slice(&node.to_ne_bytes());
    for _ in 0..count {
        match rustix::io::write(socket, &packet) {
            Ok(_) => {}
            // Memory is fragmented: a short packet does the same, but does not touch the thread's
            // whole buffer.
            Err(Errno::NOBUFS | Errno::NOMEM | Errno::MSGSIZE) => {
                rustix::io::write(socket, &packet[..whole as usize])?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Threads wait here until it is opened, once.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    /// How many have come, and whether it is open.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Latch {
    /// Waits for it to open.
    pub(crate) fn pass(&self) {
        let mut state = locked(&self.state);
        state.0 += 1;
        self.changed.notify_all();
        while !state.1 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until so many threads wait.
    pub(crate) fn wait_for(&self, count: usize) -> io::Result<()> {
        let state = locked(&self.state);
        let (state, waited) = self
            .changed
            .wait_timeout_while(state, GATE_PATIENCE, |(come, _)| *come < count)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            let sentence = format!(
                "{} of {count} threads have started; expected all of them",
                state.0
            );
            return Err(io::Error::other(sentence));
        }
        Ok(())
    }

    pub(crate) fn open(&self) {
        locked(&self.state).1 = true;
        self.changed.notify_all();
    }
}
