// SPDX-License-Identifier: Apache-2.0
//! The words for a pool that several commands print.

use super::state::ShownState;
use crate::show;
use rushes_pool::{Class, Member, PoolError};
use std::path::{Path, PathBuf};

pub(crate) fn told(error: PoolError) -> String {
    error.to_string()
}

pub(crate) fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The full path of something that a user may have named from the working folder.
pub(crate) fn whole(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// The class of a member, as shown.
pub(crate) fn class_of(member: &Member) -> Option<String> {
    member.class().map(Class::name).map(str::to_owned)
}

/// A size on a member's disk, as shown: not known while the disk is missing.
pub(crate) fn size_on(state: ShownState, bytes: u64) -> String {
    match state {
        ShownState::Missing => String::from("?"),
        _ => show::bytes(bytes),
    }
}

/// "most_free_space; class=ssd"
pub(crate) fn with_wish(first: &str, wish: &str) -> String {
    match wish {
        "" => first.to_owned(),
        wish => format!("{first}; {wish}"),
    }
}

/// A note on draining members: they go on draining after the command that began it has ended.
pub(crate) fn draining_text(catalogue: &str, members: impl Iterator<Item = u16>) -> String {
    members
        .map(|number| {
            format!(
                "Member {number} is draining: it takes no new bytes until it is removed from the \
                 pool or the drain is cancelled. `rushes pool drain {catalogue} {number}` moves \
                 its last files, then `rushes pool remove {catalogue} {number}` removes it; \
                 `rushes pool drain --cancel {catalogue} {number}` cancels the drain.\n"
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::draining_text;

    #[test]
    fn a_member_that_is_draining_says_how_that_goes_on_and_how_it_is_undone() {
        assert_eq!(draining_text("/c", std::iter::empty()), "");
        let said = draining_text("/c", [1].into_iter());
        for part in [
            "Member 1 is draining",
            "takes no new bytes",
            "rushes pool drain /c 1",
            "rushes pool remove /c 1",
            "rushes pool drain --cancel /c 1",
        ] {
            assert!(said.contains(part), "{part:?} is missing in {said}");
        }
    }
}
