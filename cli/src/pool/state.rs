// SPDX-License-Identifier: Apache-2.0
//! The state of a member or of an object, in reports and tables.

use rushes_pool::MemberState;
use serde::Serialize;

/// The state of a member, or of an object on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ShownState {
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

impl ShownState {
    /// The word in tables.
    pub(crate) fn word(self) -> &'static str {
        match self {
            ShownState::Present => "present",
            ShownState::ReadOnly => "read-only",
            ShownState::Missing => "missing",
            ShownState::Failing => "failing",
            ShownState::Lost => "lost",
            ShownState::Unusable => "unusable",
        }
    }
}

pub(crate) fn state_of(state: &MemberState) -> (ShownState, Option<String>) {
    match state {
        MemberState::Present => (ShownState::Present, None),
        MemberState::ReadOnly => (ShownState::ReadOnly, None),
        MemberState::Missing(why) => (ShownState::Missing, Some(why.clone())),
    }
}
