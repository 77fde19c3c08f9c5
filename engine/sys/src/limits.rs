// SPDX-License-Identifier: Apache-2.0
//! The resource limits of this process.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raise the limit of descriptors to the hard limit: every open file takes one.
pub fn raise_descriptor_limit() -> Result<(), Errno> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)
}

/// How many descriptors this process may have.
pub fn descriptor_count_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Write files of any length: the limit that a shell or a service sets for this process is not
/// meant for the clients whose bytes it writes. From now on a write past a limit that stays is an
/// error, and does not end the process.
///
/// Errors   the hard limit stays: to raise it takes CAP_SYS_RESOURCE
pub fn lift_file_size_limit() -> Result<(), Errno> {
    // SAFETY: no handler is installed; the signal is ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = getrlimit(Resource::Fsize);
    let nothing = Rlimit {
        current: None,
        maximum: None,
    };
    if limit.current.is_none() {
        return Ok(());
    }
    setrlimit(Resource::Fsize, nothing).inspect_err(|_| {
        let most = Rlimit {
            current: limit.maximum,
            ..limit
        };
        // The most that takes no privilege.
        let _ = setrlimit(Resource::Fsize, most);
    })
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

    #[test]
    fn files_may_be_of_any_length() {
        let before = getrlimit(Resource::Fsize);
        let limit = Rlimit {
            current: Some(1 << 40),
            ..before
        };
        setrlimit(Resource::Fsize, limit).expect("less is always allowed");
        let lifted = lift_file_size_limit();
        let limit = getrlimit(Resource::Fsize);
        assert_eq!(lifted.is_ok(), limit.current.is_none());
    }
}
