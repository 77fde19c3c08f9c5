// SPDX-License-Identifier: Apache-2.0
//! Answers of members that did not take bytes, and the error that the program gets when none did.

use crate::error::PoolError;
use crate::failing::is_of_process;
use rustix::io::Errno;

/// Why the members asked so far did not take bytes.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    is_full: bool,
    /// One is full but for the room that it keeps for the catalogue.
    kept: Option<PoolError>,
    is_over_quota: bool,
    /// A lack of the process: that member might have taken them.
    lack: Option<PoolError>,
    other: Option<PoolError>,
}

impl Refused {
    /// Whether to ask another member: this is one member's answer, and not of the catalogue or of
    /// the bytes to be moved.
    pub(crate) fn is_of_member(error: &PoolError) -> bool {
        match error {
            PoolError::Missing { .. }
            | PoolError::Lost { .. }
            | PoolError::ReadOnly { .. }
            | PoolError::Failing { .. } => true,
            PoolError::System(_) => error.is_full(),
            _ => false,
        }
    }

    /// One more has refused.
    pub(crate) fn note(&mut self, error: PoolError) {
        match error.errno() {
            Errno::NOSPC => {
                self.is_full = true;
                if let PoolError::KeptForCatalogue { .. } = error {
                    self.kept = Some(error);
                }
            }
            Errno::DQUOT => self.is_over_quota = true,
            lack if is_of_process(lack) => drop(self.lack.get_or_insert(error)),
            // Count it as not there.
            _ if matches!(
                error,
                PoolError::Missing { .. } | PoolError::Lost { .. } | PoolError::ReadOnly { .. }
            ) => {}
            _ => drop(self.other.get_or_insert(error)),
        }
    }

    /// All have refused. A lack of the process comes first. Then no room, since a person can make
    /// some; a quota where no member is full, and a failing device where nothing else is in the
    /// way.
    pub(crate) fn all(self) -> PoolError {
        if let Some(lack) = self.lack {
            return lack;
        }
        match self.other {
            _ if self.is_full => self.kept.unwrap_or(PoolError::NoRoom),
            _ if self.is_over_quota => PoolError::OverQuota,
            Some(error) => error,
            None => PoolError::NoRoom,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(errors: &[Errno]) -> Errno {
        let mut refused = Refused::default();
        for error in errors {
            refused.note(PoolError::system("make an object", "", *error));
        }
        refused.all().errno()
    }

    #[test]
    fn a_quota_is_heard_where_no_member_is_full_and_a_fault_where_that_is_all_there_is() {
        let (quota, full, fault) = (Errno::DQUOT, Errno::NOSPC, Errno::IO);
        assert_eq!(answered(&[quota, quota]), quota);
        assert_eq!(answered(&[quota, fault]), quota);
        assert_eq!(answered(&[quota, full]), full);
        assert_eq!(answered(&[fault, full]), full);
        assert_eq!(answered(&[full, Errno::MFILE, fault]), Errno::MFILE);
        assert_eq!(answered(&[fault]), fault);
        assert_eq!(answered(&[]), full);
        let mut left = Refused::default();
        left.note(PoolError::OverQuota);
        assert_eq!(left.all().errno(), quota);
    }
}
