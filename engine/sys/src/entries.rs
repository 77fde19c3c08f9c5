// SPDX-License-Identifier: Apache-2.0
//! Names of a directory, many at a time: getdents64(2), and its entries parsed in place.

use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

/// Before a name: inode number (8), offset of the next entry (8), length of the entry (2), type
/// (1).
const HEAD_BYTES: usize = 19;

/// One name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The inode that it leads to.
    pub inode: u64,
    /// Offset of the next entry, as lseek(2) takes it.
    pub next: u64,
    /// The type of that inode, as the type bits of a mode; 0: the file system does not say.
    pub mode: u32,
    /// The name.
    pub name: &'a CStr,
}

/// Read the next entries, and append them to `entries`.
///
/// `room`: the most to read. Units: bytes
/// Returns  how many bytes they take; 0: there are no more
/// Errors   EINVAL: not even one fits
pub fn read_entries(
    directory: impl AsFd,
    room: usize,
    entries: &mut Vec<u8>,
) -> Result<usize, Errno> {
    entries.reserve(room);
    let spare = entries.spare_capacity_mut();
    // SAFETY: the kernel writes at most `room` bytes there, and so much was reserved.
    let read = unsafe {
        libc::syscall(
            libc::SYS_getdents64,
            directory.as_fd().as_raw_fd(),
            spare.as_mut_ptr(),
            room,
        )
    };
    let Ok(read) = usize::try_from(read) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    };
    // SAFETY: the kernel has written so many bytes behind the others, and no more than was
    // reserved.
    unsafe { entries.set_len(entries.len() + read) };
    Ok(read)
}

/// The first of these entries, and how many bytes it takes. None: there is none.
pub fn first_entry(entries: &[u8]) -> Option<(Entry<'_>, usize)> {
    let (inode, rest) = entries.split_first_chunk()?;
    let (next, rest) = rest.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let kind = rest.first()?;
    let length = usize::from(u16::from_ne_bytes(*length));
    let name = CStr::from_bytes_until_nul(entries.get(HEAD_BYTES..length)?).ok()?;
    let entry = Entry {
        inode: u64::from_ne_bytes(*inode),
        next: u64::from_ne_bytes(*next),
        mode: u32::from(*kind) << 12,
        name,
    };
    Some((entry, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
    use std::collections::BTreeSet;

    #[test]
    fn every_name_comes_once_and_offsets_lead_on() {
        let folder =
            std::env::temp_dir().join(format!("rushes-sys-entries-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("folder")).unwrap();
        for number in 0..100 {
            std::fs::write(folder.join(format!("a rather long name {number}")), b"").unwrap();
        }
        let directory = open(&folder, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let mut entries = Vec::new();
        while read_entries(&directory, 1024, &mut entries).unwrap() > 0 {}
        let (mut names, mut offsets) = (Vec::new(), Vec::new());
        let mut rest = entries.as_slice();
        while let Some((entry, length)) = first_entry(rest) {
            if entry.name == c"folder" {
                assert_eq!(entry.mode, libc::S_IFDIR);
            }
            names.push(entry.name.to_owned());
            offsets.push(entry.next);
            rest = &rest[length..];
        }
        assert_eq!(names.len(), 103, "with . and ..");
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 103);
        let mut again = Vec::new();
        seek(&directory, SeekFrom::Start(offsets[50])).unwrap();
        read_entries(&directory, 1024, &mut again).unwrap();
        let (entry, _) = first_entry(&again).unwrap();
        assert_eq!(entry.name, names[51].as_c_str());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn half_an_entry_is_none() {
        assert_eq!(first_entry(&[]), None);
        let mut bytes = vec![0; 24];
        bytes[16] = 24;
        assert!(first_entry(&bytes).is_some());
        assert_eq!(first_entry(&bytes[..23]), None);
        // Without the end of its name.
        bytes[HEAD_BYTES..].fill(b'x');
        assert_eq!(first_entry(&bytes), None);
        bytes[16] = 0;
        assert_eq!(first_entry(&bytes), None);
    }
}
