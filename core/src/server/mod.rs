// SPDX-License-Identifier: Apache-2.0
//! All of the server as one machine: an event in, actions out.
//!
//! [`Server::step`] is total: every event in every state has an answer, it never blocks and never
//! reads a clock. What goes wrong outside arrives as an event. Two drivers exist, the daemon and the
//! simulator; a run is replayed by giving the same events at the same instants.

mod api;

pub use api::*;

use crate::units::*;
use alloc::vec::Vec;

/// The server's whole state.
pub struct Server {
    limits: Limits,
    policy: Policy,
}

impl Server {
    /// A server with empty cache and no devices.
    pub fn new(limits: Limits, policy: Policy) -> Server {
        Server { limits, policy }
    }

    /// Take one event at `now` (never earlier than the last one) and append what is to be done.
    pub fn step(&mut self, now: Instant, event: Event, actions: &mut Actions) {
        let _ = (now, event, actions, &self.limits, &self.policy);
    }

    /// Whether `count` more streams of `rate` could be promised on `device`.
    pub fn could_admit(
        &self,
        now: Instant,
        device: DeviceId,
        rate: BytesPerSecond,
        count: u32,
    ) -> Verdict {
        let _ = (now, device, rate, count);
        Verdict {
            admitted: false,
            reason: alloc::string::String::from("not yet built"),
            more_count: 0,
            left: BytesPerSecond(0),
        }
    }

    /// The ledger: open streams, then the most recent closed ones.
    pub fn streams(&self, now: Instant) -> Vec<StreamRecord> {
        let _ = now;
        Vec::new()
    }

    /// Every device.
    pub fn devices(&self) -> Vec<DeviceRecord> {
        Vec::new()
    }

    /// The cache.
    pub fn cache(&self) -> CacheRecord {
        CacheRecord::default()
    }
}
