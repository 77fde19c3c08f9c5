// SPDX-License-Identifier: Apache-2.0
//! The shares that clients without a contract use of a device, and those that may go first.
//!
//! Reads without a contract are served in the order in which they came, and long ones keep a queue
//! full. A program that opened a clip beside six copies of 8 MiB a read got each of its reads in
//! 2.2 s; a kernel without Rushes takes a tenth of that. So a session that used less than its share
//! of the device goes before those that used theirs (start-time fair queueing, Goyal, Vin and Cheng
//! 1996, with half a share as the bound, so that long reads keep their long visits). Within a
//! session the same holds for its streams: all clients of one NFS server or of one mount are one
//! session.

use super::state::*;
use super::*;

/// A session or stream may be ahead of half its share by so much: the first reads of a clip are
/// small and far apart.
const CREDIT: Duration = Duration::from_s(1);

/// So long after its last request a session or stream has all its share again, at the latest.
const MEMORY: Duration = Duration::from_s(5);

/// A reader of a device without a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub session: SessionId,
    /// None: its reads follow no order.
    pub stream: Option<StreamId>,
}

impl User {
    pub(super) fn of(id: StreamId, stream: &Stream) -> User {
        User {
            session: stream.session,
            stream: Some(id),
        }
    }
}

/// The use of a device by reads without a contract.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// The time that all other requests have cost: they are of nobody's share.
    others: Duration,
    sessions: Used<SessionId>,
    streams: Used<StreamId>,
}

impl Shares {
    /// Whether a read of `one` goes before those of `other`: its session has not used its share, or
    /// its stream not that of the session of both.
    pub(super) fn goes_first(&self, now: Instant, one: User, other: User) -> bool {
        let time = self.time(now);
        let has_used = |user: User| match one.session == other.session {
            true => (user.stream).is_some_and(|stream| self.streams.has_used(time, stream)),
            false => self.sessions.has_used(time, user.session),
        };
        !has_used(one) && has_used(other)
    }

    /// Whether its session has used its share.
    pub(super) fn is_heavy(&self, now: Instant, user: User) -> bool {
        self.sessions.has_used(self.time(now), user.session)
    }

    /// The device was sent a read for this one that costs so much of its time.
    pub(super) fn charge(&mut self, now: Instant, user: User, cost: Duration) {
        let time = self.time(now);
        self.sessions.charge(time, user.session, cost);
        if let Some(stream) = user.stream {
            self.streams.charge(time, stream, cost);
        }
    }

    /// It was sent another request than a read without a contract.
    pub(super) fn leave_out(&mut self, cost: Duration) {
        self.others += cost;
    }

    /// A clock that stands while the device is busy for others.
    fn time(&self, now: Instant) -> Instant {
        Instant(now.0.saturating_sub(self.others.0))
    }
}

/// When each of some sessions, or streams, has all its share again. One without an entry has it.
#[derive(Clone, Debug)]
struct Used<K>(BTreeMap<K, Instant>);

impl<K> Default for Used<K> {
    fn default() -> Used<K> {
        Used(BTreeMap::new())
    }
}

impl<K: Copy + Ord> Used<K> {
    fn has_used(&self, time: Instant, key: K) -> bool {
        let until = self.0.get(&key);
        until.is_some_and(|until| *until > time + CREDIT)
    }

    fn charge(&mut self, time: Instant, key: K, cost: Duration) {
        if cost == Duration::ZERO {
            return;
        }
        self.0.retain(|_, until| *until > time);
        let known = self.0.get(&key).copied();
        let count = self.0.len() as u64 + u64::from(known.is_none());
        let until = known.unwrap_or(time) + cost.times(2 * count);
        self.0.insert(key, until.min(time + MEMORY));
    }
}
