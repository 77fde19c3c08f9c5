// SPDX-License-Identifier: Apache-2.0
//! A peer that may break every rule: packets and ring entries by hand.
#![allow(dead_code, clippy::unwrap_used)]

use rushes_core::format::{MAGIC, PLAIN, RING_ENTRIES, VERSION, message, op, ring};
use rushes_sys::{Access, Mapping, bell, socket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The daemon's answer to a packet before the handshake was done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Welcome,
    Refused { errno: u32, reason: String },
    Closed,
    Nothing,
}

pub(crate) fn head(message: u32) -> Vec<u8> {
    [MAGIC, VERSION, message, 0].map(u32::to_le_bytes).concat()
}

pub(crate) fn connect_packet(share: &str) -> Vec<u8> {
    let mut packet = head(message::CONNECT);
    packet.extend(3u32.to_le_bytes());
    packet.extend(0u32.to_le_bytes());
    for name in [share, "mallory", "there"] {
        let mut field = [0u8; 64];
        field[..name.len()].copy_from_slice(name.as_bytes());
        packet.extend(field);
    }
    // Of no pool.
    packet.extend(0u64.to_le_bytes());
    packet
}

pub(crate) fn open_packet(handle: u32, path: &[u8]) -> Vec<u8> {
    let mut packet = head(message::OPEN);
    packet.extend(handle.to_le_bytes());
    packet.extend((path.len() as u32).to_le_bytes());
    // User and group 0; part 0 of 1.
    packet.extend([0; 12]);
    packet.extend(1u32.to_le_bytes());
    packet.extend(path);
    packet
}

/// Wait for the next packet; None: closed. Panics after some seconds.
fn packet(socket: &OwnedFd, patience: Duration) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let end = Instant::now() + patience;
    let mut buffer = [0; 8192];
    loop {
        match socket::receive(socket, &mut buffer) {
            Ok(Some(packet)) if packet.bytes == 0 => return None,
            Ok(Some(packet)) => return Some((buffer[..packet.bytes].to_vec(), packet.fds)),
            Ok(None) => {}
            Err(_) => return None,
        }
        assert!(
            Instant::now() < end,
            "the daemon neither answers nor closes"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Send one packet to the daemon and return its answer.
pub(crate) fn say(path: &Path, packet_bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
    let socket = socket::connect_to(path).unwrap();
    socket::send(&socket, &[packet_bytes], fds).unwrap();
    answer(&socket, Duration::from_secs(20))
}

pub(crate) fn answer(socket: &OwnedFd, patience: Duration) -> Answer {
    let Some((bytes, _)) = packet(socket, patience) else {
        return Answer::Closed;
    };
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    match word(8) {
        message::WELCOME => Answer::Welcome,
        message::REFUSED => {
            let text = &bytes[24..];
            let length = text.iter().position(|b| *b == 0).unwrap();
            Answer::Refused {
                errno: word(16),
                reason: String::from_utf8(text[..length].to_vec()).unwrap(),
            }
        }
        _ => Answer::Nothing,
    }
}

/// A session whose rings are in our own hands.
pub(crate) struct Raw {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: Mapping,
    /// The data segment, as the daemon gave it.
    pub(crate) data: OwnedFd,
    wake_daemon: OwnedFd,
    tail: u32,
    reply_head: u32,
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Raw {
        let socket = socket::connect_to(path).unwrap();
        socket::send(&socket, &[&connect_packet("media")], &[]).unwrap();
        let (_, mut fds) = packet(&socket, Duration::from_secs(10)).expect("a welcome");
        assert_eq!(fds.len(), 4, "data, rings, two bells");
        let memory = Mapping::shared(&fds[1], ring::BYTES, Access::ReadWrite).unwrap();
        Raw {
            socket,
            memory,
            wake_daemon: fds.remove(2),
            data: fds.remove(0),
            tail: 0,
            reply_head: 0,
        }
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        socket::send(&self.socket, &[bytes], fds).unwrap();
    }

    pub(crate) fn open(&self, handle: u32, fd: impl AsFd) {
        self.send(&open_packet(handle, b"x"), &[fd.as_fd()]);
    }

    /// Write a request: id, op and handle, offset, length, device, inode, sent, reserved.
    pub(crate) fn request(&mut self, words: [u64; 8]) {
        let at = ring::REQUESTS + (self.tail % RING_ENTRIES) as usize * 64;
        for (index, word) in words.into_iter().enumerate() {
            self.memory
                .word64(at + index * 8)
                .store(word, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        self.publish(self.tail);
    }

    /// Claim to have written requests up to `tail`.
    pub(crate) fn publish(&self, tail: u32) {
        self.memory
            .word32(ring::REQUEST_TAIL)
            .store(tail, Ordering::Release);
        bell::ring(&self.wake_daemon).unwrap();
    }

    pub(crate) fn read(&mut self, id: u64, handle: u32, offset: u64, length: u64) {
        let what = u64::from(op::READ) | u64::from(handle) << 32;
        self.request([id, what, offset, length, 0, 0, 0, 0]);
    }

    /// Unpin the slots of a read.
    pub(crate) fn read_end(&mut self, id: u64) {
        self.request([id, u64::from(op::READ_END), 0, 0, 0, 0, 0, 0]);
    }

    /// Whether a reply waits to be taken.
    pub(crate) fn has_reply(&self) -> bool {
        self.memory.word32(ring::REPLY_TAIL).load(Ordering::Acquire) != self.reply_head
    }

    /// The next reply: id, errno, slot count.
    pub(crate) fn reply(&mut self) -> (u64, u32, u32) {
        let end = Instant::now() + Duration::from_secs(10);
        while !self.has_reply() {
            assert!(Instant::now() < end, "no reply");
            std::thread::sleep(Duration::from_millis(1));
        }
        let at = ring::REPLIES + (self.reply_head % RING_ENTRIES) as usize * 128;
        let id = self.memory.word64(at).load(Ordering::Relaxed);
        let both = self.memory.word64(at + 8).load(Ordering::Relaxed);
        self.reply_head = self.reply_head.wrapping_add(1);
        self.memory
            .word32(ring::REPLY_HEAD)
            .store(self.reply_head, Ordering::Release);
        (id, both as u32, (both >> 32) as u32)
    }

    /// Panics unless the daemon answers a read of the handle with [`PLAIN`].
    pub(crate) fn expect_plain(&mut self, handle: u32, what: &str) {
        let id = u64::from(handle) + 1;
        self.read(id, handle, 0, 100);
        assert_eq!(self.reply(), (id, PLAIN, 0), "{what}");
    }

    /// Panics unless the daemon closes the session.
    pub(crate) fn expect_put_out(&self, what: &str) {
        let end = Instant::now() + Duration::from_secs(10);
        let mut buffer = [0; 512];
        loop {
            match socket::receive(&self.socket, &mut buffer) {
                Ok(Some(packet)) if packet.bytes == 0 => return,
                Err(_) => return,
                _ => {}
            }
            assert!(Instant::now() < end, "still welcome after {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
