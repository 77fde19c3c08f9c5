// SPDX-License-Identifier: Apache-2.0
//! The door's answers and values in the form of the protocol, and those of the kernel in the
//! door's.

use crate::bytes::descriptors::Opener;
use crate::bytes::passthrough::{OpenReply, Way};
use crate::kernel::answer::Answer;
use crate::kernel::table::Unique;
use crate::tree::attributes::Attributes;
use crate::tree::names::{Entry, Maker};
use crate::tree::nodes::{S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use fuser::{
    Errno, FileAttr, FileType, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyData,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyWrite, ReplyXattr, Request, TimeOrNow,
};
use rushes_sys::thread::Identity;
use rustix::fs::{Timespec, UTIME_NOW, UTIME_OMIT, major, makedev, minor};
use std::ffi::OsStr;
use std::time::{Duration, UNIX_EPOCH};

/// How long the kernel may use names: only this mount changes the tree while it is mounted.
const NAMES_LIVE: Duration = Duration::from_secs(3600);

/// How long it may use attributes. A program's stores through a mapping change them without its
/// knowledge.
pub(super) const ATTRIBUTES_LIVE: Duration = Duration::from_secs(1);

pub(super) fn unique(request: &Request) -> Unique {
    Unique::of(request.unique().0)
}

pub(super) fn opener(request: &Request) -> Opener {
    Opener {
        user: request.uid(),
        process: request.pid(),
    }
}

pub(super) fn number(error: rustix::io::Errno) -> Errno {
    match error {
        // It is not the caller that has too many open.
        rustix::io::Errno::MFILE => Errno::ENFILE,
        error => Errno::from_i32(error.raw_os_error()),
    }
}

pub(super) fn file_type(mode: u32) -> FileType {
    match mode & S_IFMT {
        S_IFDIR => FileType::Directory,
        S_IFREG => FileType::RegularFile,
        S_IFLNK => FileType::Symlink,
        0o020_000 => FileType::CharDevice,
        0o060_000 => FileType::BlockDevice,
        0o010_000 => FileType::NamedPipe,
        _ => FileType::Socket,
    }
}

/// Device numbers in the form of the protocol: the kernel's new_encode_dev().
fn encoded(device: u64) -> u32 {
    let (major, minor) = (major(device), minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

pub(super) fn decoded(device: u32) -> u64 {
    makedev(
        (device >> 8) & 0xfff,
        (device & 0xff) | ((device >> 12) & 0xfff00),
    )
}

/// How long the kernel may use these attributes.
pub(super) fn live(attributes: &Attributes) -> &'static Duration {
    match attributes.may_be_stored {
        true => &Duration::ZERO,
        false => &ATTRIBUTES_LIVE,
    }
}

pub(super) fn translated(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: attributes.accessed,
        mtime: attributes.modified,
        ctime: attributes.changed,
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.mode),
        perm: (attributes.mode & 0o7777) as u16,
        nlink: attributes.link_count,
        uid: attributes.user,
        gid: attributes.group,
        rdev: encoded(attributes.device),
        blksize: attributes.block_bytes,
        flags: 0,
    }
}

pub(super) fn timestamp(time: Option<TimeOrNow>) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(TimeOrNow::Now) => (0, UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => (after.as_secs() as i64, i64::from(after.subsec_nanos())),
            // fuser takes both seconds and nanoseconds off for a time before 1970, whereas the
            // kernel's nanoseconds always count up.
            Err(before) => {
                let before = before.duration();
                (-(before.as_secs() as i64), i64::from(before.subsec_nanos()))
            }
        },
    };
    Timespec { tv_sec, tv_nsec }
}

pub(super) fn maker(request: &Request, umask: u32) -> Maker {
    Maker {
        identity: Identity {
            user: request.uid(),
            group: request.gid(),
        },
        umask,
    }
}

pub(super) fn reply_entry(reply: ReplyEntry, entry: Answer<Entry>) {
    match entry {
        Ok(entry) => reply.entry_with_ttls(
            live(&entry.attributes),
            &NAMES_LIVE,
            &translated(&entry.attributes),
            Generation(u64::from(entry.node.generation)),
        ),
        Err(error) => reply.error(number(error)),
    }
}

pub(super) fn reply_empty(reply: ReplyEmpty, done: Answer<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(number(error)),
    }
}

pub(super) fn reply_attributes(reply: ReplyAttr, attributes: Answer<Attributes>) {
    match attributes {
        Ok(attributes) => reply.attr(live(&attributes), &translated(&attributes)),
        Err(error) => reply.error(number(error)),
    }
}

pub(super) fn reply_data(reply: ReplyData, data: Answer<Vec<u8>>) {
    match data {
        Ok(data) => reply.data(&data),
        Err(error) => reply.error(number(error)),
    }
}

pub(super) fn reply_written(reply: ReplyWrite, written: Answer<usize>) {
    match written {
        Ok(written) => reply.written(written as u32),
        Err(error) => reply.error(number(error)),
    }
}

/// Replies with the length of a value, or with the value within `room`.
pub(super) fn reply_value(reply: ReplyXattr, room: u32, value: Answer<(usize, Vec<u8>)>) {
    match value {
        Ok((length, _)) if room == 0 => reply.size(length as u32),
        Ok((length, _)) if length > room as usize => reply.error(Errno::ERANGE),
        Ok((_, value)) => reply.data(&value),
        Err(error) => reply.error(number(error)),
    }
}

/// Data stays in the kernel's cache between opens, since it changes only through this mount. At a
/// close no data waits for a write, so close(2) need not send a request.
const CACHED: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE.union(FopenFlags::FOPEN_NOFLUSH);

/// While a file is open by passthrough, the kernel's cache has none of it, and must have none.
const PASSED: FopenFlags = FopenFlags::FOPEN_NOFLUSH;

pub(super) fn flags(opened: &OpenReply) -> FopenFlags {
    match (opened.way, &opened.backing) {
        (Way::Direct, _) => CACHED | FopenFlags::FOPEN_DIRECT_IO,
        (_, None) => CACHED,
        (_, Some((_, true))) => PASSED,
        (_, Some((_, false))) => PASSED | FopenFlags::FOPEN_DIRECT_IO,
    }
}

/// `.` and `..`: the kernel takes the number and counts no lookup.
pub(super) fn add_plain(
    reply: &mut ReplyDirectoryPlus,
    number: u64,
    next: u64,
    name: &OsStr,
) -> bool {
    let attributes = FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    };
    reply.add(
        INodeNo(number),
        next,
        name,
        &Duration::ZERO,
        &attributes,
        Generation(0),
    )
}
