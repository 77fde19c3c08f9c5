// SPDX-License-Identifier: Apache-2.0
//! The state of an inode by its number, as XFS gives it.
//!
//! open_by_handle_at(2) answers ESTALE for a free inode and for one that cannot be read. The ioctl
//! by which xfsdump walks a file system tells them apart (Linux 6.18, fs/xfs/xfs_itable.c): EINVAL
//! or ENOENT for a free inode, EUCLEAN for one with a wrong checksum, EIO for one that the disk
//! cannot read.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

/// `_IOWR('X', 102, struct xfs_fsop_bulkreq)`.
const FSBULKSTAT_SINGLE: u64 = 0xc020_5866;
/// `FILEID_INO32_GEN` of include/linux/exportfs.h, without and with a parent; XFS adds a bit for
/// inode numbers of 64 bits.
const INO32_GEN: [i32; 2] = [1, 2];
const WIDE: i32 = 0x80;
/// More than the size of `struct xfs_bstat`. Units: bytes.
const ANSWER_BYTES: usize = 256;
/// Offset of `bs_gen` in it. Units: bytes.
const GENERATION_AT: usize = 108;

/// `struct xfs_fsop_bulkreq`.
#[repr(C)]
struct Request {
    last: *mut u64,
    count: i32,
    buffer: *mut u8,
    given: *mut i32,
}

const _: () = assert!(size_of::<Request>() == 32);

/// Whether the file of this stale handle is deleted: its inode is free, or another file's. `root`:
/// a folder of its file system.
///
/// Errors   its inode cannot be read, or matches the handle; or the handle is not of XFS
pub(super) fn prove_gone(root: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<()> {
    let (number, generation) = parts(kind, handle)
        .ok_or_else(|| io::Error::other("its handle has no form that XFS is known to use"))?;
    match generation_of(root, number) {
        Ok(found) if found == generation => Err(io::Error::other(
            "XFS finds its inode, but does not open it",
        )),
        Ok(_) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Number and generation of the inode in a handle.
fn parts(kind: i32, handle: &[u8]) -> Option<(u64, u32)> {
    if !INO32_GEN.contains(&(kind & !WIDE)) {
        return None;
    }
    let (number, rest) = match kind & WIDE {
        0 => {
            let (number, rest) = handle.split_first_chunk()?;
            (u64::from(u32::from_ne_bytes(*number)), rest)
        }
        _ => {
            let (number, rest) = handle.split_first_chunk()?;
            (u64::from_ne_bytes(*number), rest)
        }
    };
    Some((number, u32::from_ne_bytes(*rest.first_chunk()?)))
}

fn generation_of(root: impl AsFd, number: u64) -> io::Result<u32> {
    let mut last = number;
    let mut given = 0i32;
    let mut answer = [0u8; ANSWER_BYTES];
    let mut request = Request {
        last: &raw mut last,
        count: 1,
        buffer: answer.as_mut_ptr(),
        given: &raw mut given,
    };
    // SAFETY: the kernel reads `request` and `last`, and writes one struct xfs_bstat, which is
    // smaller than `answer`, and the two numbers; all of them live until the call has returned.
    let result = unsafe {
        libc::ioctl(
            root.as_fd().as_raw_fd(),
            FSBULKSTAT_SINGLE as _,
            &raw mut request,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let generation = answer
        .get(GENERATION_AT..)
        .and_then(|rest| rest.first_chunk());
    let generation = generation.expect("the answer is longer than that");
    Ok(u32::from_ne_bytes(*generation))
}

#[cfg(test)]
mod tests {
    use super::super::{open_by_handle, prove_gone};
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::{Path, PathBuf};
    use std::process::Command;

    struct Mounted {
        folder: PathBuf,
        image: PathBuf,
        mount: PathBuf,
    }

    impl Mounted {
        fn new() -> Option<Mounted> {
            let name = format!("rushes-xfs-gone-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            let mount = folder.join("mount");
            std::fs::create_dir_all(&mount).unwrap();
            let image = folder.join("image");
            File::create(&image).unwrap().set_len(320 << 20).unwrap();
            let mounted = Mounted {
                folder,
                image,
                mount,
            };
            let made = Command::new("mkfs.xfs")
                .arg("-q")
                .arg(&mounted.image)
                .status();
            (made.is_ok_and(|status| status.success()) && mounted.mount()).then_some(mounted)
        }

        fn mount(&self) -> bool {
            let mut mount = Command::new("mount");
            mount.args(["-o", "loop"]).arg(&self.image).arg(&self.mount);
            mount.status().is_ok_and(|status| status.success())
        }

        fn unmount(&self) {
            let _ = Command::new("umount").arg(&self.mount).status();
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            self.unmount();
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    /// Make the checksum of an inode wrong. XFS inodes begin with "IN" and have their number,
    /// big-endian, at byte 152.
    fn damage(image: &Path, number: u64) {
        const STEP: usize = 512;
        let bytes = std::fs::read(image).unwrap();
        let is_it =
            |inode: &&[u8]| inode.starts_with(b"IN") && inode[152..160] == number.to_be_bytes();
        let place = bytes
            .chunks_exact(STEP)
            .position(|chunk| is_it(&chunk))
            .unwrap();
        let file = File::options().write(true).open(image).unwrap();
        file.write_all_at(&[0xff; 3], (place * STEP + 40) as u64)
            .unwrap();
    }

    #[test]
    fn an_inode_that_cannot_be_read_is_not_gone() {
        let Some(disk) = Mounted::new() else {
            crate::skip("no XFS can be made and mounted here");
            return;
        };
        let handle_of = |name: &str| {
            let path = disk.mount.join(name);
            std::fs::write(&path, name).unwrap();
            let file = File::open(&path).unwrap();
            let handle = crate::watch::handle_of(&file).unwrap();
            let (kind, bytes) = handle.split_first_chunk::<4>().unwrap();
            let number = file.metadata().unwrap().ino();
            (i32::from_ne_bytes(*kind), bytes.to_vec(), number)
        };
        let damaged = handle_of("damaged");
        let removed = handle_of("removed");
        let whole = handle_of("whole");
        std::fs::remove_file(disk.mount.join("removed")).unwrap();
        disk.unmount();
        damage(&disk.image, damaged.2);
        assert!(disk.mount());
        let root = File::open(&disk.mount).unwrap();
        for (kind, bytes, _) in [&damaged, &removed] {
            let error = open_by_handle(&root, *kind, bytes).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
        }
        prove_gone(&root, removed.0, &removed.1).unwrap();
        let told = prove_gone(&root, damaged.0, &damaged.1).unwrap_err();
        assert_eq!(told.raw_os_error(), Some(libc::EUCLEAN));
        // No caller asks this about a file that can be opened; still it does not count as deleted.
        prove_gone(&root, whole.0, &whole.1).unwrap_err();
    }
}
