// SPDX-License-Identifier: Apache-2.0
//! What a process may have of the machine.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Take as many descriptors as the machine allows: every file that is open is one.
pub fn raise_descriptor_limit() -> Result<(), Errno> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
}

/// How many descriptors this process may have.
pub fn descriptor_count_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_allowed_is_taken() {
        raise_descriptor_limit().expect("it is within what is allowed");
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
