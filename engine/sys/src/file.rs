// SPDX-License-Identifier: Apache-2.0
//! Vets descriptors of other processes without touching their file system, then reopens them.
//!
//! A stranger's descriptor may lie on a FUSE mount or a dead NFS server where even fstat(2) hangs
//! for ever. So we first read `/proc/self/fdinfo/N`, which the kernel answers from its own memory:
//! the mount, the access, and whether it is O_PATH. Only if the mount is that of a configured share
//! do we use the descriptor any further. We then open the same file again, for ourselves, and never
//! change the flags of a shared description.

use crate::clock;
use crate::error::errno_of;
use rushes_core::server::{Errno, FileKey};
use rushes_core::units::{ByteCount, Duration};
use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, fcntl_getfl, fcntl_setfl, open, openat2, statx,
};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// A mount, as `/proc/self/mountinfo` numbers it (first column) within our mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MountId(pub u64);

/// The kernel's facts of a descriptor, without asking its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdInfo {
    /// The mount it was opened through.
    pub mount: MountId,
    /// O_PATH: a name, not an open file.
    pub path_only: bool,
    /// Opened for reading.
    pub readable: bool,
    /// Opened for writing.
    pub writable: bool,
    /// Its file's inode, as the kernel itself counts them: mostly that of `fstat`. None: a kernel
    /// before 5.14.
    pub inode: Option<u64>,
}

impl FdInfo {
    /// Look at a descriptor. Never waits for a file system.
    pub fn of(fd: impl AsFd) -> io::Result<FdInfo> {
        let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
        parse_fdinfo(&std::fs::read_to_string(path)?).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "fdinfo without flags or mnt_id")
        })
    }
}

fn parse_fdinfo(text: &str) -> Option<FdInfo> {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
    };
    let flags = i32::from_str_radix(field("flags")?, 8).ok()?;
    let path_only = flags & libc::O_PATH != 0;
    let access = flags & libc::O_ACCMODE;
    Some(FdInfo {
        mount: MountId(field("mnt_id")?.parse().ok()?),
        path_only,
        readable: !path_only && matches!(access, libc::O_RDONLY | libc::O_RDWR),
        writable: !path_only && matches!(access, libc::O_WRONLY | libc::O_RDWR),
        inode: field("ino").and_then(|inode| inode.parse().ok()),
    })
}

/// Why a descriptor is not served.
#[derive(Debug)]
pub enum Unserved {
    /// O_PATH.
    PathOnly,
    /// Opened for neither reading nor writing.
    NotReadable,
    /// Not on the mount of a configured share, so we have not touched the file.
    OtherMount(MountId),
    /// A directory, device, pipe, socket…
    NotRegular,
    /// A system call failed.
    Failed(io::Error),
}

impl Unserved {
    /// For [`rushes_core::server::Event::Opened`].
    pub fn errno(&self) -> Errno {
        match self {
            Unserved::PathOnly | Unserved::NotReadable => Errno::BAD_HANDLE,
            Unserved::OtherMount(_) => Errno(libc::EXDEV as u32),
            Unserved::NotRegular => Errno::INVALID,
            Unserved::Failed(error) => errno_of(error),
        }
    }
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unserved::PathOnly => write!(f, "an O_PATH descriptor; expected one open for reading"),
            Unserved::NotReadable => write!(
                f,
                "a descriptor that is open for neither reading nor writing"
            ),
            Unserved::OtherMount(mount) => {
                write!(
                    f,
                    "a file of mount {}, which is not a configured share",
                    mount.0
                )
            }
            Unserved::NotRegular => write!(f, "not a regular file"),
            Unserved::Failed(error) => write!(f, "{error}"),
        }
    }
}

impl From<io::Error> for Unserved {
    fn from(error: io::Error) -> Unserved {
        Unserved::Failed(error)
    }
}

impl From<rustix::io::Errno> for Unserved {
    fn from(error: rustix::io::Errno) -> Unserved {
        Unserved::Failed(error.into())
    }
}

/// The facts that statx gives of a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// Device and inode, as stat(2) gives them.
    pub key: FileKey,
    /// Length.
    pub size: ByteCount,
    /// Blocks that its file system has given it, also for bytes in the kernel's cache that have no
    /// place yet. 0: it may have a length, but no written byte. Units: 512 bytes.
    pub block_count: u64,
    /// Changes whenever the file does: ctime in ns since the epoch (and 0 before it).
    pub version: u64,
    /// Its ctime is less than [`FRESH`] ago.
    pub is_fresh: bool,
    /// Names that lead to it.
    pub link_count: u32,
    /// A regular file.
    pub regular: bool,
    /// The mount of the descriptor.
    pub mount: MountId,
    /// Direct I/O needs memory and offsets at multiples of these. None: no direct I/O, or the
    /// kernel (before 6.1) or file system does not say.
    pub direct_alignment: Option<DirectAlignment>,
}

/// Units: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlignment {
    /// Of the memory.
    pub memory: u32,
    /// Of offset and length in the file.
    pub offset: u32,
}

/// Ask the file system about an open file. Waits for it: only for descriptors that were vetted.
pub fn status(fd: impl AsFd) -> io::Result<FileStatus> {
    status_at(fd.as_fd(), Path::new(""), AtFlags::EMPTY_PATH)
}

/// The mount that a path lies on, for the list of configured shares.
pub fn mount_of(path: &Path) -> io::Result<MountId> {
    Ok(status_at(rustix::fs::CWD, path, AtFlags::empty())?.mount)
}

/// Within this time of a ctime, another change may give the same ctime, or the change of that ctime
/// may still be under way: ctimes go in ticks of up to 10 ms (before Linux 6.13) or in seconds
/// (ext4 with small inodes), and are set before the bytes are written.
pub const FRESH: Duration = Duration::from_s(2);

/// STATX_DIOALIGN (Linux 6.1), which rustix does not name.
const STATX_DIOALIGN: u32 = 0x2000;

fn status_at(at: BorrowedFd<'_>, path: &Path, flags: AtFlags) -> io::Result<FileStatus> {
    let wanted =
        StatxFlags::BASIC_STATS | StatxFlags::MNT_ID | StatxFlags::from_bits_retain(STATX_DIOALIGN);
    let found = statx(at, path, flags, wanted)?;
    let said = found.stx_mask;
    if said & StatxFlags::MNT_ID.bits() == 0 {
        return Err(io::Error::other(
            "the kernel (before Linux 5.8) does not name mounts",
        ));
    }
    let direct = said & STATX_DIOALIGN != 0 && found.stx_dio_offset_align != 0;
    let seconds = u64::try_from(found.stx_ctime.tv_sec).unwrap_or(0);
    Ok(FileStatus {
        key: FileKey {
            device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
        },
        size: ByteCount(found.stx_size),
        block_count: found.stx_blocks,
        version: seconds.wrapping_mul(1_000_000_000) + u64::from(found.stx_ctime.tv_nsec),
        is_fresh: clock::is_fresh(found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec, FRESH),
        link_count: found.stx_nlink,
        regular: u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFREG,
        mount: MountId(found.stx_mnt_id),
        direct_alignment: direct.then_some(DirectAlignment {
            memory: found.stx_dio_mem_align,
            offset: found.stx_dio_offset_align,
        }),
    })
}

/// A file the daemon opened for itself.
#[derive(Clone, Debug)]
pub struct PrivateFile {
    /// Read-only, close-on-exec, a description of its own.
    pub fd: Arc<OwnedFd>,
    /// Opened with O_DIRECT. False: the file system refuses it, as some tmpfs do, and reads go
    /// through the page cache.
    pub direct: bool,
    /// As it was when opened.
    pub status: FileStatus,
}

/// Vet a stranger's descriptor and open its file again for reading, also if the descriptor itself
/// only allows writing: the caller checks the stranger's access by [`crate::space::Allows`].
///
/// Assumes  `mounts`: those of the configured shares, on file systems that answer
/// Errors   [`Unserved`] says which test it failed; the file is unchanged then
pub fn reopen_vetted(fd: impl AsFd, mounts: &[MountId]) -> Result<PrivateFile, Unserved> {
    let fd = fd.as_fd();
    let info = FdInfo::of(fd)?;
    if info.path_only {
        return Err(Unserved::PathOnly);
    }
    if !info.readable && !info.writable {
        return Err(Unserved::NotReadable);
    }
    if !mounts.contains(&info.mount) {
        return Err(Unserved::OtherMount(info.mount));
    }
    let before = status(fd)?;
    if !before.regular {
        return Err(Unserved::NotRegular);
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let (opened, direct) = open_reading(|flags| open(path.as_str(), flags, Mode::empty()))?;
    finish(opened, direct, Some(before.key))
}

/// A descriptor of the same file that reads through the kernel's cache. None: this one does, or it
/// cannot be opened.
pub fn through_the_cache(direct: impl AsFd) -> Option<OwnedFd> {
    let direct = direct.as_fd();
    let flags = fcntl_getfl(direct).ok()?;
    if !flags.contains(OFlags::DIRECT) {
        return None;
    }
    let path = format!("/proc/self/fd/{}", direct.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = open(path.as_str(), flags, Mode::empty()).ok()?;
    fcntl_setfl(&fd, fcntl_getfl(&fd).ok()? - OFlags::NONBLOCK).ok()?;
    Some(fd)
}

/// Open the regular file `name` in the folder `folder`: beneath it, no symlink, no other mount.
///
/// Never waits for a FIFO's other end or for a lease to be broken.
/// Errors   [`Unserved::NotRegular`]; ELOOP, EXDEV and so on, as openat2(2)
pub fn open_beneath(folder: impl AsFd, name: &Path) -> Result<PrivateFile, Unserved> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let (opened, direct) = open_reading(|flags| {
        openat2(
            &folder,
            name,
            flags | OFlags::NOFOLLOW,
            Mode::empty(),
            resolve,
        )
    })?;
    finish(opened, direct, None)
}

/// Open the folder that holds an open file, by the file's present name. None: the file has no name,
/// or the folder is on another mount.
///
/// The caller has to check that the file of that name is still the same one when it opens it.
pub fn folder_of(
    fd: impl AsFd,
    mount: MountId,
) -> io::Result<Option<(OwnedFd, std::ffi::OsString)>> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?;
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(None);
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(folder, flags, Mode::empty())?;
    if FdInfo::of(&folder)?.mount != mount {
        return Ok(None);
    }
    Ok(Some((folder, name.to_owned())))
}

/// Reads at `at` until `to` is full, or to the end of the file. Returns how many bytes there were.
pub fn read_full(fd: impl AsFd, to: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = to.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pread(&fd, rest, at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

/// Read-only, direct where that is possible. O_NONBLOCK: a FIFO or a lease must not make us wait.
fn open_reading(
    open: impl Fn(OFlags) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<(OwnedFd, bool)> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    match open(flags | OFlags::DIRECT) {
        Ok(fd) => Ok((fd, true)),
        // open(2) answers EINVAL where direct I/O is not supported.
        Err(rustix::io::Errno::INVAL) => Ok((open(flags)?, false)),
        Err(error) => Err(error),
    }
}

fn finish(fd: OwnedFd, direct: bool, expected: Option<FileKey>) -> Result<PrivateFile, Unserved> {
    let found = status(&fd)?;
    if !found.regular {
        return Err(Unserved::NotRegular);
    }
    if expected.is_some_and(|key| key != found.key) {
        return Err(Unserved::Failed(io::Error::from_raw_os_error(libc::ESTALE)));
    }
    // This description is ours alone. On file systems without nonblocking reads, io_uring answers
    // EAGAIN to every read of an O_NONBLOCK file instead of handing it to a worker.
    let flags = fcntl_getfl(&fd)?;
    fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
    Ok(PrivateFile {
        fd: Arc::new(fd),
        direct,
        status: found,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(path: &Path) -> [MountId; 1] {
        [mount_of(path).unwrap()]
    }

    #[test]
    fn fdinfo_tells_access_and_mount_apart() {
        let info = parse_fdinfo("pos:\t0\nflags:\t012100001\nmnt_id:\t29\nino:\t5\n").unwrap();
        assert_eq!((info.mount, info.inode), (MountId(29), Some(5)));
        assert!(info.path_only && !info.writable && !info.readable);
        assert!(parse_fdinfo("pos:\t0\nflags:\t0100002\n").is_none());
        let info = parse_fdinfo("flags:\t0100002\nmnt_id:\t3\n").unwrap();
        assert!(info.readable && info.writable && !info.path_only);
    }

    #[test]
    fn the_inode_is_known_without_the_file_system() {
        let path = crate::test_folder("inode").join("clip.mov");
        let file = std::fs::File::create(path).unwrap();
        let inode = status(&file).unwrap().key.inode;
        assert_eq!(FdInfo::of(&file).unwrap().inode, Some(inode));
    }

    #[test]
    fn regular_file_of_a_share_is_reopened_for_ourselves() {
        let folder = crate::test_folder("reopen");
        let path = folder.join("clip.mov");
        std::fs::write(&path, vec![7; 5000]).unwrap();
        let theirs = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let ours = reopen_vetted(&theirs, &mounts(&folder)).unwrap();
        assert_eq!(ours.status.size, ByteCount(5000));
        let flags = fcntl_getfl(&*ours.fd).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK));
        assert_eq!(flags.contains(OFlags::DIRECT), ours.direct);
        assert_eq!(flags & OFlags::RWMODE, OFlags::RDONLY);
        // Their descriptor is unchanged.
        assert!(!fcntl_getfl(&theirs).unwrap().contains(OFlags::DIRECT));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn tmpfs_is_served_and_said_to_be_buffered_or_direct() {
        let path = format!("/dev/shm/rushes-sys-{}", std::process::id());
        std::fs::write(&path, b"abc").unwrap();
        let theirs = std::fs::File::open(&path).unwrap();
        let ours = reopen_vetted(&theirs, &mounts(Path::new("/dev/shm"))).unwrap();
        // tmpfs has taken O_DIRECT since Linux 6.6; `direct` must agree with the descriptor's
        // flags.
        assert_eq!(
            fcntl_getfl(&*ours.fd).unwrap().contains(OFlags::DIRECT),
            ours.direct
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn strange_descriptors_are_refused_by_name() {
        let folder = crate::test_folder("strange");
        let path = folder.join("file");
        std::fs::write(&path, b"x").unwrap();
        let mounts = mounts(&folder);
        let check = |fd: OwnedFd, expected: &str| {
            let error = reopen_vetted(&fd, &mounts).unwrap_err();
            assert!(
                error.to_string().contains(expected),
                "{error} has no {expected:?}"
            );
        };
        let opened = |flags| open(&path, flags, Mode::empty()).unwrap();
        check(opened(OFlags::PATH), "O_PATH");
        let directory = open(&folder, OFlags::RDONLY, Mode::empty()).unwrap();
        check(directory, "not a regular file");
        check(rustix::pipe::pipe().unwrap().0, "not a configured share");
        check(
            crate::memory_file("strange", 4096).unwrap(),
            "not a configured share",
        );
        let device = open("/dev/null", OFlags::RDONLY, Mode::empty()).unwrap();
        check(device, "mount");
        let process = open("/proc/self/stat", OFlags::RDONLY, Mode::empty()).unwrap();
        check(process, "not a configured share");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn neighbours_are_opened_beneath_and_nowhere_else() {
        let path = crate::test_folder("beneath");
        std::fs::write(path.join("a.0002.dpx"), b"frame").unwrap();
        std::fs::create_dir_all(path.join("sub")).unwrap();
        std::os::unix::fs::symlink("a.0002.dpx", path.join("link")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path.join("fifo"),
            rustix::fs::FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        let first = std::fs::File::create(path.join("a.0001.dpx")).unwrap();
        let mount = mount_of(&path).unwrap();
        let (folder, name) = folder_of(&first, mount).unwrap().unwrap();
        assert_eq!(name, "a.0001.dpx");
        let frame = open_beneath(&folder, Path::new("a.0002.dpx")).unwrap();
        assert_eq!(frame.status.size, ByteCount(5));
        for wrong in ["link", "sub", "fifo", "../passwd", "/etc/passwd", "absent"] {
            assert!(open_beneath(&folder, Path::new(wrong)).is_err(), "{wrong}");
        }
        std::fs::remove_dir_all(path).unwrap();
    }

    /// A file system whose server answers the opening of its root and nothing after that.
    struct HangingMount {
        path: std::path::PathBuf,
        device: Arc<OwnedFd>,
    }

    impl HangingMount {
        fn new() -> io::Result<HangingMount> {
            let device = Arc::new(open(
                "/dev/fuse",
                OFlags::RDWR | OFlags::CLOEXEC,
                Mode::empty(),
            )?);
            let options = format!(
                "fd={},rootmode=40000,user_id=0,group_id=0",
                device.as_raw_fd()
            );
            let options = std::ffi::CString::new(options)?;
            let flags = rustix::mount::MountFlags::empty();
            let served = Arc::clone(&device);
            // Its drop removes the folder also if the mount fails.
            let path = crate::test_folder("hanging");
            let mount = HangingMount { path, device };
            rustix::mount::mount("hanging", &mount.path, "fuse", flags, options.as_c_str())?;
            // Ends when the mount does: the read then fails.
            std::thread::spawn(move || while answer(&served).is_ok() {});
            Ok(mount)
        }
    }

    impl Drop for HangingMount {
        fn drop(&mut self) {
            let flags = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(&self.path, flags);
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    /// linux/fuse.h: a request is 0·4 length, 4·4 operation, 8·8 id, …; a reply 0·4 length, 4·4
    /// error, 8·8 id, then the operation's own.
    fn answer(device: &OwnedFd) -> io::Result<()> {
        const INIT: u32 = 26;
        const OPENDIR: u32 = 27;
        let mut request = vec![0u8; 1 << 17];
        rustix::io::read(device, &mut request)?;
        let operation = u32::from_ne_bytes([request[4], request[5], request[6], request[7]]);
        let mut body = match operation {
            // Version 7.12, no features.
            INIT => [7u32.to_ne_bytes(), 12u32.to_ne_bytes()].concat(),
            OPENDIR => vec![],
            _ => return Ok(()),
        };
        body.resize(if operation == INIT { 24 } else { 16 }, 0);
        let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
        reply.extend([0; 4]);
        reply.extend(&request[8..16]);
        reply.extend(body);
        rustix::io::write(device, &reply)?;
        Ok(())
    }

    #[test]
    fn descriptor_of_a_hanging_mount_is_refused_without_touching_it() {
        let mount = match HangingMount::new() {
            Ok(mount) => mount,
            Err(error) => {
                crate::skip(&format!("cannot mount a FUSE file system here: {error}"));
                return;
            }
        };
        let path = mount.path.clone();
        let (send, receive) = std::sync::mpsc::channel();
        // In threads, so that a hang is a failure and not a hang of the tests.
        std::thread::spawn(move || {
            let theirs = open(&path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
            let mounts = [mount_of(Path::new("/")).unwrap()];
            let refused = reopen_vetted(&theirs, &mounts);
            let stat_hangs = send.clone();
            send.send(refused.unwrap_err().to_string()).unwrap();
            // Proof that the mount does hang: this call returns only when the mount is gone.
            let _ = status(&theirs);
            let _ = stat_hangs.send("stat was answered".into());
        });
        let patience = std::time::Duration::from_secs(10);
        let said = receive.recv_timeout(patience).expect("vetting hung");
        assert!(said.contains("not a configured share"), "{said}");
        let short = std::time::Duration::from_millis(50);
        assert!(
            receive.recv_timeout(short).is_err(),
            "the mount does not hang"
        );
        let _ = &mount.device;
    }
}
