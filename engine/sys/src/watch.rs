// SPDX-License-Identifier: Apache-2.0
//! Changes of files by other processes (fanotify).
//!
//! Every served file gets a mark of its own inode, rather than its whole mount: then only writes to
//! files that we serve wake us, and no others on the file system. Events name the file by its
//! kernel handle (FAN_REPORT_FID), which we compare with the handles of the files we watch: we open
//! nothing and ask the file system nothing, unlike with event descriptors.
//!
//! Changes that fanotify does not see: stores through a writable mmap, and writes by io_submit(2).
//! See docs/decisions/0038-looks.md.

use crate::error::errno_of;
use rushes_core::server::{Errno, FileKey};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// A change, or the loss of some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file was written to or truncated by process `pid` (0: not in our process namespace).
    Modified {
        /// Which file, as given to [`ChangeWatch::watch`].
        key: FileKey,
        /// The process that wrote. Sessions report their own writes, so theirs may be ignored.
        pid: i32,
    },
    /// Its attributes changed: its names, its owner, its times. Also by this process.
    Attributes {
        /// Which file.
        key: FileKey,
    },
    /// The kernel's queue was full: any watched file may have changed.
    Overflow,
}

/// A kernel file handle: type, then bytes.
type Handle = Box<[u8]>;

/// Watches files for changes by others.
pub struct ChangeWatch {
    fd: Arc<OwnedFd>,
    files: HashMap<Handle, FileKey>,
    handles: HashMap<FileKey, Handle>,
    own_pid: i32,
}

/// As name_to_handle_at(2) bounds it (MAX_HANDLE_SZ).
pub(crate) const HANDLE_BYTES_MAX: usize = 128;

/// `struct file_handle` with room for the longest.
#[repr(C)]
pub(crate) struct RawHandle {
    pub(crate) bytes: u32,
    pub(crate) kind: i32,
    pub(crate) handle: [u8; HANDLE_BYTES_MAX],
}

impl ChangeWatch {
    /// A watch on nothing yet. Needs CAP_SYS_ADMIN.
    pub fn new() -> io::Result<ChangeWatch> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_REPORT_FID
            | libc::FAN_UNLIMITED_MARKS;
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as u32) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor; nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(ChangeWatch {
            fd: Arc::new(fd),
            files: HashMap::new(),
            handles: HashMap::new(),
            own_pid: std::process::id() as i32,
        })
    }

    /// Readable when there are changes: for [`crate::Ring::poll_add`].
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Watch an open file, to be reported as `key`. Watching it twice is watching it once.
    ///
    /// Errors   EOPNOTSUPP, ENODEV, EXDEV: the file system has no handles, so its files cannot be
    /// watched
    pub fn watch(&mut self, file: impl AsFd, key: FileKey) -> io::Result<()> {
        let handle = handle_of(file.as_fd())?;
        self.mark(libc::FAN_MARK_ADD, file)?;
        self.files.insert(handle.clone(), key);
        self.handles.insert(key, handle);
        Ok(())
    }

    /// Stop watching it. `file` is any descriptor of it.
    pub fn unwatch(&mut self, file: impl AsFd, key: FileKey) {
        if let Some(handle) = self.handles.remove(&key) {
            self.files.remove(&handle);
            // Fails only when the inode, and with it the mark, is gone.
            let _ = self.mark(libc::FAN_MARK_REMOVE, file);
        }
    }

    /// Report the changes since the last call, without our own modifications. Never waits.
    pub fn read(&mut self, mut report: impl FnMut(Change)) -> io::Result<()> {
        let mut buffer = [0u8; 4096];
        loop {
            match rustix::io::retry_on_intr(|| rustix::io::read(&*self.fd, &mut buffer)) {
                Ok(0) => return Ok(()),
                Ok(count) => self.events(&buffer[..count], &mut report),
                Err(error) if errno_of(&error.into()) == Errno(libc::EAGAIN as u32) => {
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// `struct fanotify_event_metadata`: 0·4 length, 4·1 version, 6·2 head length, 8·8 mask, 16·4
    /// fd, 20·4 pid; then records `struct fanotify_event_info_fid`: 0·1 type, 2·2 length, 4·8 fsid,
    /// 12·… handle.
    fn events(&self, mut bytes: &[u8], report: &mut impl FnMut(Change)) {
        while let (Some(length), Some(head), Some(mask), Some(pid)) = (
            u32_at(bytes, 0),
            u16_at(bytes, 6),
            u64_at(bytes, 8),
            u32_at(bytes, 20),
        ) {
            let Some(event) = bytes
                .get(..length as usize)
                .filter(|event| !event.is_empty())
            else {
                return;
            };
            if mask & libc::FAN_Q_OVERFLOW != 0 {
                report(Change::Overflow);
            } else if let Some(key) = event
                .get(usize::from(head)..)
                .and_then(|info| self.file(info))
            {
                let pid = pid as i32;
                if mask & libc::FAN_MODIFY != 0 && pid != self.own_pid {
                    report(Change::Modified { key, pid });
                }
                if mask & libc::FAN_ATTRIB != 0 {
                    report(Change::Attributes { key });
                }
            }
            bytes = &bytes[length as usize..];
        }
    }

    fn file(&self, mut info: &[u8]) -> Option<FileKey> {
        loop {
            let length = usize::from(u16_at(info, 2)?);
            let record = info.get(..length).filter(|record| record.len() >= 12)?;
            if record[0] == libc::FAN_EVENT_INFO_TYPE_FID {
                let handle = &record[12..];
                let bytes = u32_at(handle, 0)? as usize;
                return self.files.get(handle.get(4..8 + bytes)?).copied();
            }
            info = &info[length..];
        }
    }

    fn mark(&self, how: u32, file: impl AsFd) -> io::Result<()> {
        // SAFETY: a null path means the descriptor itself; no memory is involved.
        let result = unsafe {
            libc::fanotify_mark(
                self.fd.as_raw_fd(),
                how,
                libc::FAN_MODIFY | libc::FAN_ATTRIB,
                file.as_fd().as_raw_fd(),
                std::ptr::null(),
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// The kernel's handle of an open file, by which the kernel finds it again, as events carry it:
/// kind (four bytes, host order), then the handle proper.
///
/// Errors   EOPNOTSUPP: the file system has none.
pub fn handle_of(file: impl AsFd) -> io::Result<Box<[u8]>> {
    let mut raw = RawHandle {
        bytes: HANDLE_BYTES_MAX as u32,
        kind: 0,
        handle: [0; HANDLE_BYTES_MAX],
    };
    let mut mount = 0;
    // SAFETY: the path is a NUL-terminated literal; the kernel writes at most `bytes` behind the
    // head of `raw`, which has that room, and one int to `mount`.
    let result = unsafe {
        libc::name_to_handle_at(
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            (&raw mut raw).cast(),
            &mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let length = (raw.bytes as usize).min(HANDLE_BYTES_MAX);
    Ok([&raw.kind.to_ne_bytes(), &raw.handle[..length]]
        .concat()
        .into())
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(
        bytes.get(offset..offset + 2)?.try_into().ok()?,
    ))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(
        bytes.get(offset..offset + 4)?.try_into().ok()?,
    ))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(
        bytes.get(offset..offset + 8)?.try_into().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_others_are_reported_and_our_own_are_not() {
        let mut watch = match ChangeWatch::new() {
            Ok(watch) => watch,
            Err(error) => {
                crate::skip(&format!("no fanotify here: {error}"));
                return;
            }
        };
        let folder = std::env::temp_dir();
        let path = folder.join(format!("rushes-watch-{}", std::process::id()));
        let other = folder.join(format!("rushes-watch-other-{}", std::process::id()));
        std::fs::write(&path, b"one").unwrap();
        std::fs::write(&other, b"one").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let key = FileKey {
            device: 1,
            inode: 2,
        };
        watch.watch(&file, key).unwrap();
        let append = |path: &std::path::Path| {
            let script = format!("echo more >> '{}'", path.display());
            let status = std::process::Command::new("sh")
                .arg("-c")
                .arg(script)
                .status();
            assert!(status.unwrap().success());
        };
        let changes = |watch: &mut ChangeWatch| {
            let mut changes = Vec::new();
            watch.read(|change| changes.push(change)).unwrap();
            changes
        };
        std::fs::write(&path, b"ours").unwrap();
        append(&other);
        assert_eq!(changes(&mut watch), []);
        append(&path);
        let seen = changes(&mut watch);
        assert!(
            matches!(seen[..], [Change::Modified { key: k, pid }] if k == key && pid != 0),
            "{seen:?}"
        );
        // The loss of a name is reported, also when this process removed it.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(changes(&mut watch), [Change::Attributes { key }]);
        std::fs::write(&path, b"two").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        watch.watch(&file, key).unwrap();
        watch.unwatch(&file, key);
        append(&path);
        assert_eq!(changes(&mut watch), []);
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(other).unwrap();
    }

    #[test]
    fn broken_event_records_are_not_read_past_their_end() {
        let Ok(watch) = ChangeWatch::new() else {
            crate::skip("no fanotify here (it needs CAP_SYS_ADMIN)");
            return;
        };
        for length in 0..64u32 {
            for fill in [0u8, 1, 24, 255] {
                let mut bytes = vec![fill; length as usize];
                if length >= 4 {
                    bytes[..4].copy_from_slice(&length.to_ne_bytes());
                }
                watch.events(&bytes, &mut |_| ());
            }
        }
    }
}
