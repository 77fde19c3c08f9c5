// SPDX-License-Identifier: Apache-2.0
//! File systems in memory for a test, a pool over them, and a file as a door has it.
//!
//! One test at a time: a program that one starts has, from its fork to its exec, the locks of
//! another.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each program of tests uses a part; helpers of tests too say by their line what failed"
)]

use rushes_pool::{
    Access, ByteRange, Fsck, Layout, Object, ObjectName, Policy, Pool, PoolError, SpillReason,
    State, Wanted, create, fsck,
};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A folder with mounts in it; its drop unmounts all.
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    mounts: Vec<PathBuf>,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    /// None, with a message: the test cannot mount.
    pub(crate) fn new() -> Option<Place> {
        static ALONE: Mutex<()> = Mutex::new(());
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: this test needs uid 0 (it mounts)"
            );
            return None;
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("rushes-pool.{}.{serial}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Some(Place {
            path,
            mounts: Vec::new(),
            _alone: alone,
        })
    }

    /// A new tmpfs of this size.
    pub(crate) fn disk(&mut self, name: &str, mib: u64) -> PathBuf {
        let path = self.path.join(name);
        fs::create_dir_all(&path).unwrap();
        self.mount(&path, mib);
        path
    }

    pub(crate) fn mount(&mut self, path: &Path, mib: u64) {
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"])
            .arg(path)
            .status();
        assert!(done.unwrap().success());
        self.mounts.push(path.to_path_buf());
    }

    pub(crate) fn unmount(&mut self, path: &Path) {
        let done = Command::new("umount").arg("--lazy").arg(path).status();
        assert!(done.unwrap().success());
        let at = self.mounts.iter().rposition(|mount| mount == path);
        self.mounts.remove(at.unwrap());
    }

    /// Unmount all disks, so that there can be another pool.
    pub(crate) fn unmount_all(&mut self) {
        for path in self.mounts.clone() {
            self.unmount(&path);
        }
    }

    /// A pool over members of these sizes.
    pub(crate) fn pool(&mut self, sizes_mib: &[u64]) -> Pool {
        let members = sizes_mib
            .iter()
            .enumerate()
            .map(|(at, &mib)| self.disk(&format!("member{at}"), mib))
            .collect();
        let wanted = Wanted {
            catalogue: self.disk("catalogue", 16),
            members,
            policy: Policy::MostFreeSpace,
        };
        create(&wanted, |_, _| {}).unwrap();
        Pool::serve(&wanted.catalogue).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for mount in self.mounts.iter().rev() {
            let _ = Command::new("umount").arg("--lazy").arg(mount).status();
        }
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A file as a door has it.
pub(crate) struct Written {
    pub(crate) stub: File,
    pub(crate) layout: Layout,
}

impl Written {
    pub(crate) fn new(pool: &Pool, name: &str) -> Written {
        let path = pool.catalogue().path().join("tree").join(name);
        let stub = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        let layout = Layout::new(pool.new_file().unwrap());
        pool.set_layout(stub.as_fd(), &layout).unwrap();
        Written { stub, layout }
    }

    /// Write and sync as a door does: to the present segment, and elsewhere when that is full.
    pub(crate) fn write(&mut self, pool: &Pool, at: u64, bytes: &[u8]) -> Result<(), PoolError> {
        self.write_only(pool, at, bytes)?;
        pool.settle(self.stub.as_fd(), &mut self.layout)
    }

    /// The same without the sync.
    pub(crate) fn write_only(
        &mut self,
        pool: &Pool,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), PoolError> {
        let mut done = 0;
        let mut spill_count = 0;
        while done < bytes.len() {
            let start = at + done as u64;
            let left = ByteRange::new(start, (bytes.len() - done) as u64);
            let located = pool.place(self.stub.as_fd(), &mut self.layout, left)?;
            let fd = pool.open_object(&self.layout, located.object, Access::Write)?;
            let count = (bytes.len() - done).min(located.length.0 as usize);
            let part = &bytes[done..done + count];
            match rustix::io::pwrite(&fd, part, located.object_offset.0) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::NOSPC) => {
                    spill_count += 1;
                    assert!(spill_count < 1000, "each spill is progress");
                    pool.spill(self.stub.as_fd(), &mut self.layout, left, SpillReason::Full)?;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let size = self.stub.metadata().unwrap().len();
        self.stub
            .set_len(size.max(at + bytes.len() as u64))
            .unwrap();
        Ok(())
    }

    pub(crate) fn read(&self, pool: &Pool, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut done = 0;
        while done < length {
            let offset = rushes_pool::ByteOffset(at + done as u64);
            let located = self.layout.locate(offset).unwrap();
            let fd = pool
                .open_object(&self.layout, located.object, Access::Read)
                .unwrap();
            let count = (length - done).min(located.length.0 as usize);
            // A range that an object does not reach is zero.
            let part = &mut bytes[done..done + count];
            let _ = File::from(fd)
                .read_at(part, located.object_offset.0)
                .unwrap();
            done += count;
        }
        bytes
    }
}

pub(crate) fn pattern(at: u64, length: usize) -> Vec<u8> {
    (at..at + length as u64)
        .map(|byte| (byte.wrapping_mul(0x9e37_79b9) >> 13) as u8 | 1)
        .collect()
}

/// A file of the pattern.
pub(crate) fn put(pool: &Pool, name: &str, length: usize) -> Written {
    let mut file = Written::new(pool, name);
    file.write(pool, 0, &pattern(0, length)).unwrap();
    file
}

/// A file begins with so much of the pattern, by the layout that is on its stub now.
pub(crate) fn check_start(pool: &Pool, below: &str, length: usize) {
    let stub = File::open(pool.catalogue().path().join("tree").join(below)).unwrap();
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    let file = Written { stub, layout };
    assert!(file.read(pool, 0, length) == pattern(0, length), "{below}");
}

/// It has that and no more.
pub(crate) fn check(pool: &Pool, below: &str, length: usize) {
    let stub = pool.catalogue().path().join("tree").join(below);
    assert_eq!(fs::metadata(stub).unwrap().len(), length as u64, "{below}");
    check_start(pool, below, length);
}

/// Makes a member read-only, "ro", or writable again, "rw".
pub(crate) fn remount(member: &Path, how: &str) {
    let done = Command::new("mount")
        .args(["-o", &format!("remount,{how}")])
        .arg(member)
        .status();
    assert!(done.unwrap().success());
}

pub(crate) fn objects_on(pool: &Pool) -> usize {
    pool.members()
        .iter()
        .flat_map(|member| fs::read_dir(member.path().join("objects")).unwrap())
        .map(|folder| fs::read_dir(folder.unwrap().path()).unwrap().count())
        .sum()
}

/// Leave so much room on a disk.
pub(crate) fn fill(disk: &Path, free: u64) {
    let room = || {
        let found = rustix::fs::statvfs(disk).unwrap();
        found.f_bavail * found.f_frsize
    };
    let mut filler = fs::File::create(disk.join("filler")).unwrap();
    filler
        .write_all(&vec![1; (room() - free) as usize])
        .unwrap();
    assert_eq!(room(), free);
}

/// The findings of fsck, which changes nothing.
pub(crate) fn look(pool: &Pool) -> Vec<(&'static str, State)> {
    of(&fsck(pool, false, |_| {}).unwrap())
}

pub(crate) fn of(report: &Fsck) -> Vec<(&'static str, State)> {
    let issues = report.issues.iter();
    issues
        .map(|issue| (issue.kind.name(), issue.state.clone()))
        .collect()
}

/// Where an object is.
pub(crate) fn path_of(pool: &Pool, object: Object) -> PathBuf {
    let member = pool.member(object.member).unwrap();
    member.path().join(ObjectName::of(object.id).as_str())
}
