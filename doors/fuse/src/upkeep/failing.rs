// SPDX-License-Identifier: Apache-2.0
//! Members whose devices fail, and members that are missing or read-only: the log has one line on
//! each, and another when it is back. Where new bytes go meanwhile: engine/pool.

use crate::door::Door;
use crate::lock::locked;
use rushes_pool::{Member, MemberNumber, MemberState};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The state of members is read only every so many times: each look keeps a member's file system
/// busy for a moment.
const STATES_EVERY: u32 = 2;
/// A class has room again when one of its members has so much. Units: bytes.
const ROOM_AGAIN: u64 = 64 << 20;

/// The members whose bad state is in the log, and whether that is read-only.
#[derive(Debug, Default)]
struct Said(BTreeMap<MemberNumber, bool>);

impl Said {
    /// A message if the member's state differs from the last message, and whether it is bad.
    fn of(&mut self, member: &Member, state: &MemberState) -> Option<(bool, String)> {
        let number = member.number();
        let name = format!("member {} ({})", number.0, member.path().display());
        let now = match state {
            MemberState::Present => None,
            MemberState::ReadOnly => Some(true),
            MemberState::Missing(_) => Some(false),
        };
        if self.0.get(&number).copied() == now {
            return None;
        }
        match now {
            Some(now) => self.0.insert(number, now),
            None => self.0.remove(&number),
        };
        Some(match state {
            MemberState::Present => (false, format!("{name} is there again, and takes bytes")),
            MemberState::ReadOnly => (
                true,
                format!(
                    "{name} is mounted read-only: its bytes can be read, and no new bytes go \
                     there; the kernel's log may say why: remount it for writing"
                ),
            ),
            MemberState::Missing(why) => (
                true,
                format!(
                    "{name} is missing, its folder {why}: files that have bytes there give input/output errors, all others go on; mount it there, nothing else is needed"
                ),
            ),
        })
    }
}

impl Door {
    /// The numbers of failing members, each with its error.
    pub(crate) fn failing(&self) -> Vec<(u16, String)> {
        let members = self.pool.members();
        let failing = |member: &Arc<Member>| Some((member.number().0, member.failing()?));
        members.iter().filter_map(failing).collect()
    }

    /// Runs until the door closes.
    pub(crate) fn look_after_failing(&self) {
        let mut said: BTreeSet<MemberNumber> = BTreeSet::new();
        let mut states = Said::default();
        let mut turn = 0u32;
        while !self.closing.load(Ordering::Acquire) {
            for member in self.pool.members().iter() {
                let number = member.number();
                if let Some(why) = member.failing()
                    && said.insert(number)
                {
                    tracing::warn!(
                        "member {} ({}) fails: {why}; new files go to others until it works again",
                        number.0,
                        member.path().display()
                    );
                }
                member.try_again();
                if member.failing().is_none() && said.remove(&number) {
                    tracing::info!("member {} works again", number.0);
                }
            }
            if turn.is_multiple_of(STATES_EVERY) {
                self.look_at_states(&mut states);
            }
            turn = turn.wrapping_add(1);
            std::thread::park_timeout(LOOK_EVERY);
        }
    }

    fn look_at_states(&self, said: &mut Said) {
        let members = self.pool.members();
        for member in members.iter().filter(|member| member.failing().is_none()) {
            let status = member.status();
            if member.failing().is_some() {
                // This look has found it, and the log has it.
                continue;
            }
            match said.of(member, &status.state) {
                Some((true, sentence)) => tracing::warn!("{sentence}"),
                Some((false, sentence)) => tracing::info!("{sentence}"),
                None => {}
            }
            let has_room =
                status.state == MemberState::Present && status.bytes_free.0 >= ROOM_AGAIN;
            if let Some(class) = member.class()
                && has_room
            {
                locked(&self.full_classes).remove(class);
            }
        }
        said.0
            .retain(|number, _| members.iter().any(|member| member.number() == *number));
    }
}
