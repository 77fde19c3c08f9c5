// SPDX-License-Identifier: Apache-2.0
//! The two rings of a session in their shared memory.
//!
//! Each ring has one producer and one consumer. Each side keeps its own counter in private memory
//! and only publishes it; it reads the other's and checks it. Both copy entries word by word with
//! relaxed atomics: a peer that writes at the wrong time gives a torn entry, which the reader
//! checks like any other.

use crate::doorbell;
use crate::layout::{
    PeerError, REPLY_WORDS, REQUEST_WORDS, broken, reply_of, reply_words, request_of, request_words,
};
use rushes_core::format::{RING_ENTRIES, Reply, Request, ring};
use rushes_sys::{Access, Mapping};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The mapped ring segment.
pub(crate) struct RingMemory(Mapping);

/// Which of the two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Requests,
    Replies,
}

impl Which {
    fn head(self) -> usize {
        match self {
            Which::Requests => ring::REQUEST_HEAD,
            Which::Replies => ring::REPLY_HEAD,
        }
    }
    fn tail(self) -> usize {
        match self {
            Which::Requests => ring::REQUEST_TAIL,
            Which::Replies => ring::REPLY_TAIL,
        }
    }
    fn bell(self) -> usize {
        match self {
            Which::Requests => ring::REQUEST_BELL,
            Which::Replies => ring::REPLY_BELL,
        }
    }
    fn name(self) -> &'static str {
        match self {
            Which::Requests => "request",
            Which::Replies => "reply",
        }
    }
}

impl RingMemory {
    /// Map it. The file was checked to be [`ring::BYTES`] long and sealed against shrinking.
    pub(crate) fn map(fd: impl AsFd) -> io::Result<RingMemory> {
        Ok(RingMemory(Mapping::shared(
            fd,
            ring::BYTES,
            Access::ReadWrite,
        )?))
    }

    /// How many entries the producer, whose tail is `tail`, has that the consumer has not taken.
    pub(crate) fn untaken(&self, which: Which, tail: u32) -> Result<u32, PeerError> {
        let head = self.0.word32(which.head()).load(Acquire);
        distance(which, head, tail)
    }

    /// How many entries wait for the consumer, whose head is `head`.
    pub(crate) fn waiting(&self, which: Which, head: u32) -> Result<u32, PeerError> {
        let tail = self.0.word32(which.tail()).load(Acquire);
        distance(which, head, tail)
    }

    /// Producer: make entries up to `tail` visible.
    pub(crate) fn publish_tail(&self, which: Which, tail: u32) {
        self.0.word32(which.tail()).store(tail, Release);
    }

    /// Consumer: give entries up to `head` back.
    pub(crate) fn publish_head(&self, which: Which, head: u32) {
        self.0.word32(which.head()).store(head, Release);
    }

    /// Producer, after publishing: see [`doorbell`].
    pub(crate) fn must_ring(&self, which: Which) -> bool {
        doorbell::must_ring(self.0.word32(which.bell()))
    }

    /// Consumer, before the last look.
    pub(crate) fn arm(&self, which: Which) {
        doorbell::arm(self.0.word32(which.bell()));
    }

    /// Consumer, awake. True: a ring has come or will.
    pub(crate) fn disarm(&self, which: Which) -> bool {
        doorbell::disarm(self.0.word32(which.bell()))
    }

    pub(crate) fn server_flags(&self) -> u32 {
        self.0.word32(ring::SERVER_FLAGS).load(Relaxed)
    }

    pub(crate) fn set_server_flags(&self, flags: u32) {
        self.0.word32(ring::SERVER_FLAGS).store(flags, Relaxed);
    }

    pub(crate) fn heartbeat(&self) -> u32 {
        self.0.word32(ring::HEARTBEAT).load(Relaxed)
    }

    pub(crate) fn beat(&self) {
        self.0.word32(ring::HEARTBEAT).fetch_add(1, Relaxed);
    }

    pub(crate) fn write_request(&self, index: u32, request: &Request) {
        self.write(ring::REQUESTS, index, request_words(request));
    }

    pub(crate) fn read_request(&self, index: u32) -> Request {
        request_of(self.read::<REQUEST_WORDS>(ring::REQUESTS, index))
    }

    pub(crate) fn write_reply(&self, index: u32, reply: &Reply) {
        self.write(ring::REPLIES, index, reply_words(reply));
    }

    pub(crate) fn read_reply(&self, index: u32) -> Reply {
        reply_of(self.read::<REPLY_WORDS>(ring::REPLIES, index))
    }

    /// `index` is a free-running counter; its place is its remainder.
    fn write<const N: usize>(&self, start: usize, index: u32, words: [u64; N]) {
        let place = start + (index % RING_ENTRIES) as usize * N * 8;
        for (n, word) in words.into_iter().enumerate() {
            self.0.word64(place + n * 8).store(word, Relaxed);
        }
    }

    fn read<const N: usize>(&self, start: usize, index: u32) -> [u64; N] {
        let place = start + (index % RING_ENTRIES) as usize * N * 8;
        std::array::from_fn(|n| self.0.word64(place + n * 8).load(Relaxed))
    }

    #[cfg(test)]
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0
    }
}

fn distance(which: Which, head: u32, tail: u32) -> Result<u32, PeerError> {
    let count = tail.wrapping_sub(head);
    if count > RING_ENTRIES {
        return Err(broken(format!(
            "read {} ring counters head {head} and tail {tail}; expected them at most {RING_ENTRIES} apart",
            which.name()
        )));
    }
    Ok(count)
}
