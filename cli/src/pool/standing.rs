// SPDX-License-Identifier: Apache-2.0
//! The state of a member or of an object, in reports and tables.

use rushes_pool::MemberState;
use serde::Serialize;

/// The state of a member, or of an object on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    /// It can be read and written.
    Present,
    /// It can be read.
    ReadOnly,
    /// It is missing.
    Missing,
    /// It is there, and its device returns errors.
    Failing,
    /// Its member was given up.
    Lost,
    /// Its member is there, and it cannot be opened.
    Unusable,
}

impl Standing {
    /// The word in tables.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Standing::Present => "present",
            Standing::ReadOnly => "read-only",
            Standing::Missing => "missing",
            Standing::Failing => "failing",
            Standing::Lost => "lost",
            Standing::Unusable => "unusable",
        }
    }
}

pub(crate) fn state_of(state: &MemberState) -> (Standing, Option<String>) {
    match state {
        MemberState::Present => (Standing::Present, None),
        MemberState::ReadOnly => (Standing::ReadOnly, None),
        MemberState::Missing(why) => (Standing::Missing, Some(why.clone())),
    }
}
