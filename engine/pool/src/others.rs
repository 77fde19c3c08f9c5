// SPDX-License-Identifier: Apache-2.0
//! The members beside one that is to be drained or removed: whether any takes bytes then, and
//! sentences that say which one does not, why, and which command lets it. This module does not
//! decide which member gets which bytes.

use crate::error::PoolError;
use crate::format::Duty;
use crate::member::{Member, MemberState, MemberStatus};
use crate::pool::Pool;
use crate::refusal::{MemberRefusal, NoLog, refused};
use rushes_core::pool::MemberNumber;
use rushes_core::units::ByteCount;
use std::sync::Arc;

/// Members that a sentence names.
const NAMED_MAX: usize = 8;

/// All members but one, as they are now.
struct Others {
    catalogue: String,
    all: Vec<(Arc<Member>, MemberStatus)>,
}

impl Others {
    /// Asks the file systems of all of them.
    fn than(pool: &Pool, number: MemberNumber) -> Others {
        let members = pool.members();
        let others = members.iter().filter(|one| one.number() != number);
        Others {
            catalogue: pool.catalogue().path().display().to_string(),
            all: others.map(|one| (Arc::clone(one), one.status())).collect(),
        }
    }

    /// Members that would take bytes if they were not draining; the one with most room first.
    fn draining(&self) -> Vec<&(Arc<Member>, MemberStatus)> {
        let mut found: Vec<_> = self
            .all
            .iter()
            .filter(|(member, status)| {
                member.duty() == Duty::Draining && status.state == MemberState::Present
            })
            .collect();
        found.sort_by_key(|(member, status)| {
            (std::cmp::Reverse(status.bytes_free), member.number())
        });
        found
    }

    /// "member 0 is draining (39.8 MiB free), member 1 is missing"
    fn clauses(&self) -> String {
        if self.all.is_empty() {
            return String::from("the pool has no other one");
        }
        let named = self.all.iter().take(NAMED_MAX);
        let mut clauses: Vec<String> = named
            .map(|(member, status)| clause(member, status))
            .collect();
        let more = self.all.len().saturating_sub(NAMED_MAX);
        if more > 0 {
            clauses.push(format!("and {more} more"));
        }
        clauses.join(", ")
    }

    /// The remedy, as a clause.
    fn way_out(&self) -> String {
        let add = format!(
            "`rushes pool add {} FOLDER` takes in another one",
            self.catalogue
        );
        match self.draining().first() {
            Some((member, _)) => format!("{}, or {add}", self.cancel(member.number())),
            None => add,
        }
    }

    fn cancel(&self, number: MemberNumber) -> String {
        format!(
            "`rushes pool drain --cancel {} {1}` lets member {1} take bytes again",
            self.catalogue, number.0
        )
    }
}

fn clause(member: &Member, status: &MemberStatus) -> String {
    let duty = match member.duty() {
        Duty::Full => "takes bytes",
        Duty::Draining => "is draining",
        Duty::Leaving => "is being removed",
    };
    let (number, free) = (member.number().0, free(status.bytes_free));
    match (&status.state, member.duty()) {
        (MemberState::Present, _) => format!("member {number} {duty} ({free} free)"),
        (MemberState::ReadOnly, Duty::Full) => format!("member {number} is read-only"),
        (MemberState::ReadOnly, _) => format!("member {number} {duty} and read-only"),
        (MemberState::Missing(_), Duty::Full) => format!("member {number} is missing"),
        (MemberState::Missing(_), _) => format!("member {number} {duty} and missing"),
    }
}

fn free(bytes: ByteCount) -> String {
    let (shift, unit) = match bytes.0 {
        0..0x4000_0000 => (20, "MiB"),
        _ => (30, "GiB"),
    };
    let tenths = (u128::from(bytes.0) * 10) >> shift;
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

/// Before a member drains: another one must take bytes. The drain finds out file by file whether
/// that is there, and has room: this asks no disk, which may hang, but to say why it refuses.
pub(crate) fn check_takes_bytes_beside(pool: &Pool, number: MemberNumber) -> Result<(), PoolError> {
    let members = pool.members();
    let mut others = members.iter().filter(|other| other.number() != number);
    if others.any(|other| other.takes_bytes()) {
        return Ok(());
    }
    let others = Others::than(pool, number);
    let is_taking = members
        .iter()
        .any(|one| one.number() == number && one.takes_bytes());
    refused(MemberRefusal::NoTaker {
        number,
        is_taking,
        others: others.clauses(),
        remedy: others.way_out(),
    })
}

/// Before a member is removed: another one must take bytes, now or when its disk is there again; or
/// the member takes none itself, so that nothing is worse without it. Asks no disk, but to say why
/// it refuses.
pub(crate) fn check_takes_bytes_without(pool: &Pool, member: &Member) -> Result<(), PoolError> {
    let (members, number) = (pool.members(), member.number());
    let mut others = members.iter().filter(|other| other.number() != number);
    if others.any(|other| other.takes_bytes()) || (!member.takes_bytes() && members.len() > 1) {
        return Ok(());
    }
    let others = Others::than(pool, number);
    let remedy = others.way_out();
    refused(match members.len() {
        1 => MemberRefusal::Only { number, remedy },
        _ => MemberRefusal::LastTaker {
            number,
            others: others.clauses(),
            remedy,
        },
    })
}

/// Why no other member than this one took the log of names.
pub(crate) fn why_no_log(pool: &Pool, number: MemberNumber, error: &PoolError) -> NoLog {
    if !error.is_full() {
        return NoLog {
            number,
            cause: error.to_string(),
            remedy: None,
        };
    }
    let others = Others::than(pool, number);
    let cause = match error {
        // No member was asked.
        PoolError::NoRoom => String::from("no other member takes bytes and has room"),
        error => error.to_string(),
    };
    NoLog {
        number,
        cause: format!("{cause}: {}", others.clauses()),
        remedy: Some(others.way_out()),
    }
}

/// For a member that could not be drained: a sentence that names members with room that take
/// nothing because they drain as well, and the command that lets them. None: there is none.
pub fn draining_with_room(pool: &Pool, number: MemberNumber) -> Option<String> {
    let others = Others::than(pool, number);
    let draining = others.draining();
    let with_room = draining
        .into_iter()
        .filter(|(_, status)| status.bytes_free.0 > 0);
    let with_room: Vec<_> = with_room.collect();
    let (first, _) = with_room.first()?;
    let named = with_room.iter().take(NAMED_MAX);
    let named: Vec<String> = named
        .map(|(member, status)| {
            format!(
                "member {} ({} free)",
                member.number().0,
                free(status.bytes_free)
            )
        })
        .collect();
    Some(format!(
        "Draining as well, so that nothing goes there: {}. {}.",
        named.join(", "),
        others.cancel(first.number())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_said_in_a_unit_that_fits() {
        assert_eq!(free(ByteCount(0)), "0.0 MiB");
        assert_eq!(free(ByteCount(41_733_325)), "39.8 MiB");
        assert_eq!(free(ByteCount(u64::MAX)), "17179869183.9 GiB");
    }
}
