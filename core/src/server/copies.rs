// SPDX-License-Identifier: Apache-2.0
//! Copies, which need no contract: told from players by how far they get ahead.

use super::*;
use crate::stream::Lately;

/// How far ahead of the rate of its file a reader has to be to be a copy, and not a player: less if
/// it waits for us all the time, more if it is seldom idle, most if it goes on as fast as that
/// however often it pauses. Idle time in thousandths at most, ns ahead.
const COPY_AHEAD: [(u64, i64); 3] = [
    (50, NS_PER_S as i64),
    (250, 3 * NS_PER_S as i64),
    (1000, 10 * NS_PER_S as i64),
];
/// The same for a client that has never played, where another one was refused. Units: ns.
const DOUBTED_AHEAD: i64 = NS_PER_S as i64 / 4;
/// A reader that waits for us counts as behind by so much at most. Units: ns.
const AHEAD_OWED: i64 = 10 * NS_PER_S as i64;
/// A player is idle, with no read waiting, for so much of the time. Thousandths.
const PLAYER_IDLE: u64 = 250;
/// So often a reader that has fallen behind counts as a player after all.
const COPIED_MAX: u32 = 1;

impl Server {
    /// A copy takes all bandwidth that it can get: it gets no contract, or loses it. The sign of a
    /// copy is that it goes on getting ahead of the rate at which its file is played, and does not
    /// stop to wait for anything. A player that fills its buffers looks the same until they are
    /// full; then it waits for its clock, and gets its contract, or gets it back.
    pub(super) fn tell_copy(&mut self, id: StreamId, length: ByteCount, lately: Option<Lately>) {
        let now = self.now;
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let before = core::mem::replace(&mut stream.ahead_at, now);
        let Some((rate, _)) = stream.rate else {
            return;
        };
        let signed = |duration: Duration| i64::try_from(duration.0).unwrap_or(i64::MAX);
        // A reader that waits for long is behind by that much, and not more.
        let floor = -AHEAD_OWED;
        stream.ahead_ns = stream
            .ahead_ns
            .saturating_sub(signed(now.since(before)))
            .max(floor)
            .saturating_add(signed(rate.time_for(length)));
        let Some(lately) = lately else {
            return;
        };
        let plays = lately.idle_permille >= PLAYER_IDLE
            && lately.rate.0 <= rate.0.saturating_add(rate.0 / 2);
        let ahead = stream.ahead_ns;
        if plays {
            stream.ahead_ns = 0;
        }
        let (session, device) = (stream.session, stream.device);
        let is_doubted = self.is_doubted(session, device, plays);
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let copies = !plays
            && (COPY_AHEAD
                .iter()
                .any(|&(idle, least)| lately.idle_permille <= idle && ahead >= least)
                || is_doubted && lately.idle_permille <= COPY_AHEAD[0].0 && ahead >= DOUBTED_AHEAD);
        let starves = ahead <= -(NS_PER_S as i64) && stream.copied_count <= COPIED_MAX;
        let is_copy = match stream.is_copy {
            true => !plays && !starves,
            false => copies,
        };
        if is_copy == stream.is_copy {
            return;
        }
        // The reader reads all parts of a striped file alike.
        let mut all = self.siblings(id);
        all.push(id);
        for &one in &all {
            let Some(stream) = self.streams.get_mut(one.0) else {
                continue;
            };
            stream.is_copy = is_copy;
            stream.copied_count += u32::from(is_copy);
            if is_copy {
                self.ask_no_more(one);
            } else {
                stream.ahead_ns = 0;
                stream.reanchor(now);
            }
        }
        if !is_copy {
            for one in all {
                self.ask_admission(one);
            }
        }
    }

    /// Whether the client has not shown yet that it plays, while its device refused another one.
    fn is_doubted(&mut self, session: SessionId, device: DeviceId, plays: bool) -> bool {
        let Some(entry) = self.sessions.get_mut(&session) else {
            return false;
        };
        entry.has_played |= plays;
        let has_played = entry.has_played;
        let refused = self.devices.get(&device).map(|device| &device.refused);
        let mut others = refused.into_iter().flatten();
        let is_of_another = |id: &StreamId| {
            let stream = self.streams.get(id.0);
            stream.is_some_and(|stream| stream.session != session)
        };
        !has_played && others.any(is_of_another)
    }
}
