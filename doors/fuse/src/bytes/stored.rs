// SPDX-License-Identifier: Apache-2.0
//! The mtime of a file to which programs store without the door.
//!
//! A store through a mapping by passthrough changes the object's time and not the stub's. So as
//! long as a program may store in that way, the door copies the time to the stub at each request
//! for it, and at the end: a program that looks for changed files, such as a backup, rsync or an
//! NFS client, misses none. The object's time counts only if it has changed since the last look: a
//! program may have set an older one on purpose.

use crate::bytes::files::FileSlot;
use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::{Node, status};
use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fstat, open, utimensat};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// Seconds and nanoseconds of a modification.
type Time = (i64, i64);

/// An object to which programs may store without the door.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Opened by O_PATH: it is no open file, so that the kernel refuses no lease for it.
    object: OwnedFd,
    /// The stub's time has followed the object's up to here.
    known: Time,
}

impl Stored {
    /// Follows the object's time from now on.
    pub(crate) fn begin(object: &OwnedFd) -> Answer<Stored> {
        let path = format!("/proc/self/fd/{}", object.as_raw_fd());
        let object = open(path.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let known = time_of(&object)?;
        Ok(Stored { object, known })
    }
}

fn time_of(fd: impl AsFd) -> Answer<Time> {
    let found = fstat(fd)?;
    Ok((found.st_mtime, found.st_mtime_nsec as i64))
}

impl Door {
    /// Gives the stub of this descriptor the time of the last store to the object.
    pub(crate) fn follow_stores(&self, node: &Arc<Node>, stub: impl AsFd, stored: &mut Stored) {
        let followed = time_of(&stored.object).and_then(|time| {
            if time <= stored.known {
                return Ok(false);
            }
            let is_later = time > stub_time(&stub)?;
            if is_later {
                set_time(&stub, time)?;
            }
            stored.known = time;
            Ok(is_later)
        });
        match followed {
            Ok(true) => self.changed(node),
            Ok(false) => {}
            Err(error) => tracing::warn!(
                "{}: cannot set its modification time: {error}",
                self.name_of(node)
            ),
        }
    }

    /// The same for an inode of which nothing else is known.
    ///
    /// Returns  whether a program may go on storing to it
    pub(crate) fn follow_stores_of(
        &self,
        node: &Arc<Node>,
        stub: impl AsFd,
        slot: &mut FileSlot,
    ) -> bool {
        slot.with_stored(|stored| self.follow_stores(node, stub, stored))
            .is_some()
    }

    /// The kernel has forgotten so many lookups of an inode. As long as an inode is mapped, the
    /// kernel does not forget the last.
    pub(crate) fn forget(&self, number: u64, lookups: u64) {
        // First: a program that looks the inode up again finds its time.
        if let Ok(node) = self.nodes.get(number) {
            self.follow_at_last(&node);
        }
        self.nodes.forget(number, lookups);
    }

    fn follow_at_last(&self, node: &Arc<Node>) {
        if !locked(&node.file).may_be_stored() {
            return;
        }
        if let Ok(stub) = self.nodes.descriptor(node) {
            self.follow_stores_of(node, stub, &mut locked(&node.file));
        }
    }

    /// Call it before the door closes: the kernel does not report which inodes it forgets then.
    pub(crate) fn follow_all_at_last(&self) {
        for node in self.nodes.all() {
            self.follow_at_last(&node);
        }
    }
}

fn stub_time(stub: impl AsFd) -> Answer<Time> {
    let found = status(stub)?;
    Ok((found.stx_mtime.tv_sec, i64::from(found.stx_mtime.tv_nsec)))
}

fn set_time(stub: impl AsFd, (tv_sec, tv_nsec): Time) -> Answer<()> {
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec { tv_sec, tv_nsec },
    };
    utimensat(stub, c"", &times, AtFlags::EMPTY_PATH)
}
