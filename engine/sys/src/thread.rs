// SPDX-License-Identifier: Apache-2.0
//! Acts as another user for one call: user, group and umask of a single thread.
//!
//! A new file's properties depend on the user that makes it: its owner, its group in a setgid
//! directory, its mode under a default ACL, and the quota that counts. So a door that runs as root
//! acts as the caller. The C library changes the credentials of all threads at once; the kernel
//! does it for one, so these calls bypass the library. The thread keeps root's rights meanwhile:
//! the caller's rights were checked before.

use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, set_capabilities, unshare_unsafe};
use std::cell::Cell;
use std::io;
use std::marker::PhantomData;

/// A caller's user and group, as files count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub user: u32,
    /// Group.
    pub group: u32,
}

/// Until it is dropped, this thread makes files as another user.
#[must_use = "dropping it makes the thread itself again"]
#[derive(Debug)]
pub struct ActingAs {
    before: Option<(Identity, CapabilitySet)>,
    /// It belongs to its thread.
    not_send: PhantomData<*const ()>,
}

impl ActingAs {
    /// Take on `identity` for making files; capabilities stay as they are.
    ///
    /// Errors   EPERM when this process may not (it needs CAP_SETUID and CAP_SETGID)
    pub fn new(identity: Identity) -> io::Result<ActingAs> {
        let ours = Identity {
            user: file_user(u32::MAX),
            group: file_group(u32::MAX),
        };
        let mut acting = ActingAs {
            before: None,
            not_send: PhantomData,
        };
        if ours == identity {
            return Ok(acting);
        }
        let sets = capabilities(None)?;
        acting.before = Some((ours, sets.effective));
        take_on(identity, sets.effective)?;
        Ok(acting)
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        let Some((ours, effective)) = self.before else {
            return;
        };
        // A thread that stayed another user would make the next caller's files in that user's name.
        take_on(ours, effective).expect("a thread may always become itself again");
    }
}

/// Sets the group first: a change of the user drops the right to change it, until the capabilities
/// are set again.
fn take_on(identity: Identity, effective: CapabilitySet) -> io::Result<()> {
    file_group(identity.group);
    file_user(identity.user);
    // Leaving user 0 removes the file capabilities from the effective set (capabilities(7)), never
    // from the permitted one.
    let mut sets = capabilities(None)?;
    sets.effective = effective;
    set_capabilities(None, sets)?;
    // setfsuid(2) reports no error, so read the result.
    let now = Identity {
        user: file_user(u32::MAX),
        group: file_group(u32::MAX),
    };
    if now == identity {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

/// setfsuid(2): returns the former user; u32::MAX changes nothing.
fn file_user(user: u32) -> u32 {
    // SAFETY: takes and returns a number; it touches this thread's credentials and no memory of
    // ours.
    unsafe { libc::syscall(libc::SYS_setfsuid, user) as u32 }
}

/// setfsgid(2): returns the former group; u32::MAX changes nothing.
fn file_group(group: u32) -> u32 {
    // SAFETY: takes and returns a number; it touches this thread's credentials and no memory of
    // ours.
    unsafe { libc::syscall(libc::SYS_setfsgid, group) as u32 }
}

thread_local! {
    static HAS_OWN_UMASK: Cell<bool> = const { Cell::new(false) };
}

/// Set this thread's umask; other threads keep theirs.
///
/// The first call also separates the thread's working folder from the others' (unshare(2),
/// CLONE_FS).
pub fn set_own_umask(mask: u32) -> io::Result<()> {
    if !HAS_OWN_UMASK.get() {
        // SAFETY: CLONE_FS separates umask, root and working folder; no descriptor and no memory is
        // concerned.
        unsafe { unshare_unsafe(UnshareFlags::FS) }?;
        HAS_OWN_UMASK.set(true);
    }
    rustix::process::umask(Mode::from_raw_mode(mask));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn files_are_made_as_somebody_else_and_then_as_oneself() {
        if !rustix::process::geteuid().is_root() {
            crate::skip("acting as somebody else needs root");
            return;
        }
        let folder = crate::test_folder("acting");
        let identity = Identity {
            user: 65_534,
            group: 1,
        };
        let before = capabilities(None).unwrap();
        let acting = ActingAs::new(identity).unwrap();
        // The folder is root's and 0755: root's rights stay.
        std::fs::write(folder.join("theirs"), b"x").unwrap();
        let elsewhere = std::thread::scope(|scope| {
            let other = scope.spawn(|| std::fs::write(folder.join("other"), b"x"));
            other.join().unwrap()
        });
        drop(acting);
        std::fs::write(folder.join("ours"), b"x").unwrap();
        elsewhere.unwrap();
        let owner = |name: &str| {
            let found = std::fs::metadata(folder.join(name)).unwrap();
            (found.uid(), found.gid())
        };
        assert_eq!(owner("theirs"), (65_534, 1));
        assert_eq!(owner("ours").0, 0);
        assert_eq!(capabilities(None).unwrap(), before);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn umask_is_the_threads_own() {
        let folder = crate::test_folder("umask");
        let path = |name: &str| folder.join(name);
        let result = std::thread::scope(|scope| {
            let inner = scope.spawn(|| {
                set_own_umask(0o077)?;
                std::fs::write(path("strict"), b"x")
            });
            inner.join().unwrap()
        });
        if let Err(error) = result {
            crate::skip(&format!("unshare(CLONE_FS) is refused here: {error}"));
            return;
        }
        std::fs::write(path("usual"), b"x").unwrap();
        let mode = |name: &str| std::fs::metadata(path(name)).unwrap().mode() & 0o777;
        assert_eq!(mode("strict"), 0o600);
        assert_ne!(mode("usual"), 0o600);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
