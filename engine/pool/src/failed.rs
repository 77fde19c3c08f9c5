// SPDX-License-Identifier: Apache-2.0
//! Files that a command on a whole pool had to leave as they are: the first few with the reason,
//! and how many.

use crate::error::PoolError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// Files listed with their names.
const FIRST_MAX: usize = 8;
/// Files remembered as counted: beyond these one that fails twice counts twice.
const KNOWN_MAX: usize = 4096;

/// A file that could not be read or moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Below the tree.
    pub file: String,
    /// Why, as a sentence.
    pub sentence: String,
}

/// Files that could not be read or moved; the command went through all others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// How many.
    pub count: u64,
    /// The first of them.
    pub first: Vec<Failure>,
    #[serde(skip)]
    known: BTreeSet<u64>,
}

impl Failed {
    /// One more, unless it is known already.
    pub fn note(&mut self, file: &Path, error: &PoolError) {
        let mut hasher = DefaultHasher::new();
        file.hash(&mut hasher);
        let name = hasher.finish();
        if self.known.contains(&name) {
            return;
        }
        if self.known.len() < KNOWN_MAX {
            self.known.insert(name);
        }
        self.count += 1;
        if self.first.len() < FIRST_MAX {
            self.first.push(Failure {
                file: file.display().to_string(),
                sentence: error.to_string(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_fails_twice_counts_once_and_the_first_few_are_told() {
        let mut failed = Failed::default();
        for _ in 0..2 {
            for at in 0..20 {
                failed.note(Path::new(&format!("f{at}")), &PoolError::NoRoom);
            }
        }
        assert_eq!((failed.count, failed.first.len()), (20, FIRST_MAX));
        assert_eq!(failed.first[7].file, "f7");
        assert!(failed.first[0].sentence.contains("room"));
    }

    #[test]
    fn what_is_kept_of_it_is_bounded() {
        let mut failed = Failed::default();
        for at in 0..2 * KNOWN_MAX {
            failed.note(Path::new(&format!("f{at}")), &PoolError::NoRoom);
        }
        assert_eq!(failed.count, 2 * KNOWN_MAX as u64);
        assert_eq!(failed.known.len(), KNOWN_MAX);
    }
}
