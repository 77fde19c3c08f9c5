// SPDX-License-Identifier: Apache-2.0
//! The same calls on the mount of a pool and on a plain ext4: each has the same outcome, except
//! where the table says otherwise. Calls that docs/guide/pool.md, "Mount it", names as refused are
//! refused here.
//!
//! pjdfstest covers POSIX (tests/fuse/posix.sh). Here are Linux's own calls: fallocate, ioctls,
//! attributes, flags of open and rename.

use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS};
use rustix::fs::{
    self as calls, Advice, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags,
    RenameFlags, SeekFrom, XattrFlags,
};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Length of the file that each call finds: no whole number of blocks.
const FILE_BYTES: u64 = 300_001;
const KIB: u64 = 1024;
/// Beyond the longest file of ext4, and below any limit of the kernel. Units: bytes.
const TOO_FAR: u64 = 1 << 60;

/// The outcome of a call: its result with the state after it, or an error.
type Outcome = Result<String, Errno>;

/// The expected answer of the pool, compared with that of ext4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Same,
    /// This error, where ext4 succeeds.
    Refused(Errno),
    /// Both refuse it, the pool by this error.
    Otherwise(Errno),
}
use Beside::{Otherwise, Refused, Same};

/// Where a call is tried: `f` of a known pattern, `d` with `inner` in it, the link `l` to `f`.
struct Place(PathBuf);

impl Place {
    fn new(folder: &Path, number: usize) -> Place {
        let place = Place(folder.join(format!("call{number}")));
        fs::create_dir(&place.0).expect("made");
        fs::write(place.at("f"), pattern::bytes(1, 0, FILE_BYTES as usize)).expect("room");
        fs::create_dir(place.at("d")).expect("made");
        fs::write(place.at("d/inner"), "inner").expect("room");
        symlink("f", place.at("l")).expect("made");
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn open(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        calls::open(self.at(name), flags, Mode::from(0o644))
    }

    fn writable(&self) -> OwnedFd {
        self.open("f", OFlags::RDWR).expect("it is there")
    }

    fn readable(&self) -> OwnedFd {
        self.open("f", OFlags::RDONLY).expect("it is there")
    }

    /// Names, lengths and a sum of the bytes of all entries.
    fn state(&self) -> String {
        let mut names: Vec<String> = fs::read_dir(&self.0)
            .expect("listed")
            .map(|entry| entry.expect("listed").file_name().into_string())
            .map(|name| name.expect("text"))
            .collect();
        names.sort();
        let said = names.iter().map(|name| {
            let path = self.at(name);
            let kind = fs::symlink_metadata(&path).expect("known");
            if !kind.is_file() {
                return name.clone();
            }
            let bytes = fs::read(&path).expect("read");
            // FNV-1a, to compare bytes.
            let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
                (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
            format!("{name}: {} bytes, {sum:016x}", bytes.len())
        });
        said.collect::<Vec<_>>().join("; ")
    }

    fn allocate(&self, flags: FallocateFlags, at: u64, length: u64) -> Outcome {
        calls::fallocate(self.writable(), flags, at, length).map(|()| self.state())
    }

    /// An ioctl by its number; its argument begins with these bytes.
    fn ioctl_with(&self, name: &str, number: u32, bytes: &[u8]) -> Outcome {
        let script = "import fcntl, os, sys\n\
            fd = os.open(sys.argv[1], os.O_RDONLY)\n\
            given = bytes.fromhex(sys.argv[3])\n\
            try: fcntl.ioctl(fd, int(sys.argv[2]), bytearray(given + bytes(512)))\n\
            except OSError as error: print(error.errno)\n\
            else: print(0)";
        let output = Command::new(needs::path_of("python3"))
            .args(["-c", script])
            .arg(self.at(name))
            .arg(number.to_string())
            .arg(
                bytes
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect::<String>(),
            )
            .output()
            .expect("python3 starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match text.trim().parse().expect("a number") {
            0 => Ok(self.state()),
            error => Err(Errno::from_raw_os_error(error)),
        }
    }

    fn ioctl(&self, name: &str, number: u32) -> Outcome {
        self.ioctl_with(name, number, &[])
    }

    fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> Outcome {
        calls::renameat_with(CWD, self.at(from), CWD, self.at(to), flags).map(|()| self.state())
    }

    fn set(&self, name: &str, attribute: &str, value: &[u8], flags: XattrFlags) -> Outcome {
        calls::lsetxattr(self.at(name), attribute, value, flags).map(|()| String::from("set"))
    }
}

fn opened(fd: Result<OwnedFd, Errno>) -> Outcome {
    fd.map(|_| String::from("opened"))
}

fn count(done: Result<usize, Errno>) -> Outcome {
    done.map(|count| count.to_string())
}

fn position(done: Result<u64, Errno>) -> Outcome {
    done.map(|at| at.to_string())
}

fn done(result: Result<(), Errno>) -> Outcome {
    result.map(|()| String::from("done"))
}

/// Numbers of ioctls, by their names in the kernel's headers.
mod ioctls {
    pub(super) const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
    pub(super) const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
    pub(super) const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
    pub(super) const FS_IOC_GETVERSION: u32 = 0x8008_7601;
    pub(super) const FS_IOC_FIEMAP: u32 = 0xc020_660b;
    pub(super) const FIGETBSZ: u32 = 2;
    pub(super) const FITRIM: u32 = 0xc018_5879;
    pub(super) const FIFREEZE: u32 = 0xc004_5877;
    /// Flags as ext4 gives them to a file.
    pub(super) const EXTENTS_FLAG: [u8; 4] = 0x0008_0000_u32.to_le_bytes();
    /// Argument of FIEMAP: the whole file, and only the count of its extents.
    pub(super) const WHOLE_FILE: [u8; 16] = (u64::MAX as u128).wrapping_shl(64).to_le_bytes();
    /// A number of no ioctl.
    pub(super) const UNKNOWN: u32 = 0xc004_fee1;
    /// EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: it would end a member.
    pub(super) const SHUTDOWN: u32 = 0x8004_587d;
}

type Call = fn(&Place) -> Outcome;

const NONE: FallocateFlags = FallocateFlags::empty();
const KEEP: FallocateFlags = FallocateFlags::KEEP_SIZE;
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE;
const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE;

/// The table of calls: name, the pool's answer compared with ext4's, call.
#[rustfmt::skip]
const CALLS: &[(&str, Beside, Call)] = &[
    ("fallocate, inside", Same, |p| p.allocate(NONE, 5_000, 10_000)),
    ("fallocate, over the end", Same, |p| p.allocate(NONE, FILE_BYTES - 5, 100_000)),
    ("fallocate, far behind the end", Same, |p| p.allocate(NONE, 3 << 20, 4096)),
    ("fallocate KEEP_SIZE, inside", Same, |p| p.allocate(KEEP, 5_000, 10_000)),
    ("fallocate KEEP_SIZE, over the end", Same, |p| p.allocate(KEEP, FILE_BYTES - 5, 100_000)),
    ("fallocate KEEP_SIZE, behind the end", Same, |p| p.allocate(KEEP, 1 << 20, 100_000)),
    ("fallocate PUNCH_HOLE KEEP_SIZE, whole blocks", Same, |p| p.allocate(PUNCH | KEEP, 8 * KIB, 64 * KIB)),
    ("fallocate PUNCH_HOLE KEEP_SIZE, parts of blocks", Same, |p| p.allocate(PUNCH | KEEP, 5_001, 70_001)),
    ("fallocate PUNCH_HOLE KEEP_SIZE, over the end", Same, |p| p.allocate(PUNCH | KEEP, FILE_BYTES - 5_001, 100_000)),
    ("fallocate PUNCH_HOLE alone", Same, |p| p.allocate(PUNCH, 8 * KIB, 64 * KIB)),
    ("fallocate ZERO_RANGE, whole blocks", Same, |p| p.allocate(ZERO, 8 * KIB, 64 * KIB)),
    ("fallocate ZERO_RANGE, parts of blocks", Same, |p| p.allocate(ZERO, 5_001, 70_001)),
    ("fallocate ZERO_RANGE, inside one block", Same, |p| p.allocate(ZERO, 5_001, 7)),
    ("fallocate ZERO_RANGE, over the end", Same, |p| p.allocate(ZERO, FILE_BYTES - 5_001, 100_000)),
    ("fallocate ZERO_RANGE KEEP_SIZE, parts of blocks", Same, |p| p.allocate(ZERO | KEEP, 5_001, 70_001)),
    ("fallocate ZERO_RANGE KEEP_SIZE, over the end", Same, |p| p.allocate(ZERO | KEEP, FILE_BYTES - 5_001, 100_000)),
    ("fallocate ZERO_RANGE KEEP_SIZE, behind the end", Same, |p| p.allocate(ZERO | KEEP, 1 << 20, 100_000)),
    ("fallocate ZERO_RANGE PUNCH_HOLE", Same, |p| p.allocate(ZERO | PUNCH | KEEP, 8 * KIB, 64 * KIB)),
    ("fallocate COLLAPSE_RANGE", Refused(Errno::OPNOTSUPP), |p| p.allocate(FallocateFlags::COLLAPSE_RANGE, 64 * KIB, 64 * KIB)),
    ("fallocate INSERT_RANGE", Refused(Errno::OPNOTSUPP), |p| p.allocate(FallocateFlags::INSERT_RANGE, 64 * KIB, 64 * KIB)),
    ("fallocate UNSHARE_RANGE", Same, |p| p.allocate(FallocateFlags::UNSHARE_RANGE, 0, 64 * KIB)),
    ("fallocate, no length", Same, |p| p.allocate(NONE, 0, 0)),
    ("fallocate, further than a file can be", Same, |p| p.allocate(NONE, TOO_FAR, 4096)),
    ("fallocate, opened for reading", Same, |p| done(calls::fallocate(p.readable(), NONE, 0, 4096))),
    ("fallocate, a folder", Same, |p| done(calls::fallocate(p.open("d", OFlags::RDONLY)?, NONE, 0, 4096))),
    ("open O_TMPFILE", Refused(Errno::OPNOTSUPP), |p| opened(p.open("d", OFlags::TMPFILE | OFlags::RDWR))),
    ("open O_TMPFILE O_EXCL", Refused(Errno::OPNOTSUPP), |p| opened(p.open("d", OFlags::TMPFILE | OFlags::WRONLY | OFlags::EXCL))),
    ("open O_TMPFILE for reading", Same, |p| opened(p.open("d", OFlags::TMPFILE | OFlags::RDONLY))),
    ("open O_DIRECT", Same, |p| opened(p.open("f", OFlags::DIRECT | OFlags::RDWR))),
    ("open O_DIRECTORY, a file", Same, |p| opened(p.open("f", OFlags::DIRECTORY | OFlags::RDONLY))),
    ("open O_NOFOLLOW, a link", Same, |p| opened(p.open("l", OFlags::NOFOLLOW | OFlags::RDONLY))),
    ("open O_CREAT O_EXCL, a link", Same, |p| opened(p.open("l", OFlags::CREATE | OFlags::EXCL | OFlags::RDWR))),
    ("open for writing, a folder", Same, |p| opened(p.open("d", OFlags::WRONLY))),
    ("open O_CREAT, a name of 256 bytes", Same, |p| opened(p.open(&"n".repeat(256), OFlags::CREATE | OFlags::WRONLY))),
    ("open O_PATH, then read", Same, |p| count(rustix::io::read(p.open("f", OFlags::PATH)?, &mut [0; 8][..]))),
    ("open O_TRUNC", Same, |p| p.open("f", OFlags::TRUNC | OFlags::WRONLY).map(|_| p.state())),
    ("ioctl FS_IOC_GETFLAGS", Refused(Errno::NOTTY), |p| p.ioctl("f", ioctls::FS_IOC_GETFLAGS)),
    ("ioctl FS_IOC_SETFLAGS", Refused(Errno::NOTTY), |p| p.ioctl_with("f", ioctls::FS_IOC_SETFLAGS, &ioctls::EXTENTS_FLAG)),
    ("ioctl FS_IOC_GETFLAGS, a folder", Refused(Errno::NOTTY), |p| p.ioctl("d", ioctls::FS_IOC_GETFLAGS)),
    ("ioctl FS_IOC_FSGETXATTR", Refused(Errno::NOTTY), |p| p.ioctl("f", ioctls::FS_IOC_FSGETXATTR)),
    ("ioctl FS_IOC_GETVERSION", Refused(Errno::NOTTY), |p| p.ioctl("f", ioctls::FS_IOC_GETVERSION)),
    ("ioctl FS_IOC_FIEMAP", Refused(Errno::OPNOTSUPP), |p| p.ioctl_with("f", ioctls::FS_IOC_FIEMAP, &ioctls::WHOLE_FILE)),
    ("ioctl FIGETBSZ", Same, |p| p.ioctl("f", ioctls::FIGETBSZ)),
    ("ioctl FITRIM, the folder", Otherwise(Errno::NOTTY), |p| p.ioctl("", ioctls::FITRIM)),
    ("ioctl, a number that nobody has", Same, |p| p.ioctl("f", ioctls::UNKNOWN)),
    ("ioctl FICLONE", Same, |p| done(calls::ioctl_ficlone(p.open("new", OFlags::CREATE | OFlags::RDWR)?, p.readable()))),
    ("setxattr user.", Same, |p| p.set("f", "user.a", b"1", XattrFlags::empty())),
    ("setxattr user., a folder", Same, |p| p.set("d", "user.a", b"1", XattrFlags::empty())),
    ("setxattr user., a link", Same, |p| p.set("l", "user.a", b"1", XattrFlags::empty())),
    ("setxattr trusted.", Same, |p| p.set("f", "trusted.a", b"1", XattrFlags::empty())),
    ("setxattr security.", Same, |p| p.set("f", "security.a", b"1", XattrFlags::empty())),
    ("setxattr of no family", Same, |p| p.set("f", "nobodys.a", b"1", XattrFlags::empty())),
    ("setxattr XATTR_REPLACE, none there", Same, |p| p.set("f", "user.a", b"1", XattrFlags::REPLACE)),
    ("setxattr XATTR_CREATE twice", Same, |p| {
        p.set("f", "user.a", b"1", XattrFlags::CREATE)?;
        p.set("f", "user.a", b"2", XattrFlags::CREATE)
    }),
    ("setxattr, longer than the kernel takes", Same, |p| p.set("f", "user.a", &[1; 65_537], XattrFlags::empty())),
    ("setxattr, a name of 256 bytes", Same, |p| p.set("f", &format!("user.{}", "a".repeat(251)), b"1", XattrFlags::empty())),
    ("getxattr, none there", Same, |p| count(calls::getxattr(p.at("f"), "user.a", &mut [0; 8][..]))),
    ("getxattr, longer than asked", Same, |p| {
        p.set("f", "user.a", b"four", XattrFlags::empty())?;
        count(calls::getxattr(p.at("f"), "user.a", &mut [0; 2][..]))
    }),
    ("removexattr, none there", Same, |p| done(calls::removexattr(p.at("f"), "user.a"))),
    ("an ACL that is none", Same, |p| p.set("f", "system.posix_acl_access", b"none", XattrFlags::empty())),
    ("a default ACL, a file", Same, |p| p.set("f", "system.posix_acl_default", &[2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255], XattrFlags::empty())),
    ("rename NOREPLACE, a name that is there", Same, |p| p.rename("f", "l", RenameFlags::NOREPLACE)),
    ("rename NOREPLACE", Same, |p| p.rename("f", "g", RenameFlags::NOREPLACE)),
    ("rename EXCHANGE", Same, |p| p.rename("f", "d", RenameFlags::EXCHANGE)),
    ("rename EXCHANGE, with nothing", Same, |p| p.rename("f", "g", RenameFlags::EXCHANGE)),
    ("rename EXCHANGE NOREPLACE", Same, |p| p.rename("f", "d", RenameFlags::EXCHANGE | RenameFlags::NOREPLACE)),
    ("rename WHITEOUT", Refused(Errno::INVAL), |p| p.rename("f", "g", RenameFlags::WHITEOUT)),
    ("rename, a folder into itself", Same, |p| p.rename("d", "d/e", RenameFlags::empty())),
    ("rename, a file over a folder", Same, |p| p.rename("f", "d", RenameFlags::empty())),
    ("rename, a folder over a file", Same, |p| p.rename("d", "f", RenameFlags::empty())),
    ("rename, over a link of its own", Same, |p| {
        calls::link(p.at("f"), p.at("g"))?;
        p.rename("f", "g", RenameFlags::empty())
    }),
    ("link, a folder", Same, |p| done(calls::link(p.at("d"), p.at("e")))),
    ("link, a link", Same, |p| calls::linkat(CWD, p.at("l"), CWD, p.at("m"), AtFlags::empty()).map(|()| p.state())),
    ("unlink, a folder", Same, |p| done(calls::unlink(p.at("d")))),
    ("rmdir, a file", Same, |p| done(calls::rmdir(p.at("f")))),
    ("rmdir, not empty", Same, |p| done(calls::rmdir(p.at("d")))),
    ("mkdir, there already", Same, |p| done(calls::mkdir(p.at("f"), Mode::from(0o755)))),
    ("mkdir, below a file", Same, |p| done(calls::mkdir(p.at("f/x"), Mode::from(0o755)))),
    ("mknod, a pipe", Same, |p| calls::mknodat(CWD, p.at("pipe"), FileType::Fifo, Mode::from(0o644), 0).map(|()| p.state())),
    ("mknod, a socket", Same, |p| calls::mknodat(CWD, p.at("socket"), FileType::Socket, Mode::from(0o644), 0).map(|()| p.state())),
    ("symlink, there already", Same, |p| done(calls::symlink("x", p.at("f")))),
    ("readlink, a file", Same, |p| calls::readlink(p.at("f"), Vec::new()).map(|name| format!("{name:?}"))),
    ("read, a folder", Same, |p| count(rustix::io::read(p.open("d", OFlags::RDONLY)?, &mut [0; 8][..]))),
    ("pread, behind the end", Same, |p| count(rustix::io::pread(p.readable(), &mut [0; 8][..], FILE_BYTES + 7))),
    ("pread, over the end", Same, |p| count(rustix::io::pread(p.readable(), &mut [0; 8][..], FILE_BYTES - 3))),
    ("pwrite, opened for reading", Same, |p| count(rustix::io::pwrite(p.readable(), b"x", 0))),
    ("pwrite, O_APPEND", Same, |p| rustix::io::pwrite(p.open("f", OFlags::APPEND | OFlags::WRONLY)?, b"x", 0).map(|_| p.state())),
    ("pwrite, further than a file can be", Same, |p| count(rustix::io::pwrite(p.writable(), b"x", TOO_FAR))),
    ("pwrite, nothing far behind the end", Same, |p| rustix::io::pwrite(p.writable(), b"", 1 << 20).map(|_| p.state())),
    ("ftruncate, longer", Same, |p| calls::ftruncate(p.writable(), 1 << 20).map(|()| p.state())),
    ("ftruncate, shorter", Same, |p| calls::ftruncate(p.writable(), 5_001).map(|()| p.state())),
    ("ftruncate, longer than a file can be", Same, |p| done(calls::ftruncate(p.writable(), TOO_FAR))),
    ("ftruncate, opened for reading", Same, |p| done(calls::ftruncate(p.readable(), 0))),
    ("ftruncate, a folder", Same, |p| done(calls::ftruncate(p.open("d", OFlags::RDONLY)?, 0))),
    ("lseek SEEK_DATA, behind the end", Same, |p| position(calls::seek(p.readable(), SeekFrom::Data(FILE_BYTES + 1)))),
    ("lseek SEEK_HOLE, behind the end", Same, |p| position(calls::seek(p.readable(), SeekFrom::Hole(FILE_BYTES + 1)))),
    ("lseek SEEK_HOLE, none but the end", Same, |p| position(calls::seek(p.readable(), SeekFrom::Hole(0)))),
    ("lseek SEEK_DATA, a hole before the end", Same, |p| {
        calls::ftruncate(p.writable(), 3 << 20)?;
        position(calls::seek(p.readable(), SeekFrom::Data(2 << 20)))
    }),
    ("lseek, before the beginning", Same, |p| position(calls::seek(p.readable(), SeekFrom::Current(-1)))),
    ("copy_file_range", Same, |p| {
        let (from, to) = (p.readable(), p.open("new", OFlags::CREATE | OFlags::WRONLY)?);
        let count = calls::copy_file_range(from, Some(&mut 5_001), to, Some(&mut 7_003), 100_000)?;
        Ok(format!("{count}: {}", p.state()))
    }),
    ("copy_file_range, into itself, over itself", Same, |p| count(calls::copy_file_range(p.readable(), Some(&mut 0), p.writable(), Some(&mut 5), 100))),
    ("copy_file_range, to O_APPEND", Same, |p| count(calls::copy_file_range(p.readable(), Some(&mut 0), p.open("new", OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY)?, None, 100))),
    ("copy_file_range, to what is opened for reading", Same, |p| count(calls::copy_file_range(p.writable(), Some(&mut 0), p.open("d/inner", OFlags::RDONLY)?, None, 100))),
    ("copy_file_range, behind the end", Same, |p| count(calls::copy_file_range(p.readable(), Some(&mut (FILE_BYTES + 5)), p.open("new", OFlags::CREATE | OFlags::WRONLY)?, None, 100))),
    ("fsync, fdatasync, syncfs", Same, |p| {
        let file = p.writable();
        calls::fsync(&file)?;
        calls::fdatasync(&file)?;
        calls::fsync(p.open("d", OFlags::RDONLY)?)?;
        done(calls::syncfs(&file))
    }),
    ("fadvise", Same, |p| done(calls::fadvise(p.readable(), 0, None, Advice::DontNeed))),
    ("flock, twice", Same, |p| {
        let (one, other) = (p.readable(), p.readable());
        calls::flock(&one, FlockOperation::LockExclusive)?;
        done(calls::flock(&other, FlockOperation::NonBlockingLockExclusive))
    }),
    ("fcntl F_SETLK, opened for reading", Same, |p| done(calls::fcntl_lock(p.readable(), FlockOperation::NonBlockingLockExclusive))),
    ("chmod, a link", Same, |p| done(calls::chmodat(CWD, p.at("l"), Mode::from(0o600), AtFlags::SYMLINK_NOFOLLOW))),
    ("an empty name", Same, |p| opened(calls::openat(p.open("d", OFlags::RDONLY)?, "", OFlags::RDONLY, Mode::empty()))),
];

fn shown(outcome: &Outcome) -> String {
    match outcome {
        Ok(said) => said.clone(),
        Err(error) => std::io::Error::from(*error).to_string(),
    }
}

/// Makes all calls on ext4 and on the pool, prints the matrix, and fails for unexpected answers.
fn compare(world: &PoolWorld, what: &str) {
    let (bare, pool) = (world.scratch.folder("bare/places"), world.path("places"));
    fs::create_dir_all(&pool).expect("made");
    let mut wrong = Vec::new();
    println!("{what}: call | ext4 | pool");
    for (number, (name, beside, call)) in CALLS.iter().enumerate() {
        let on_bare = call(&Place::new(&bare, number));
        let on_pool = call(&Place::new(&pool, number));
        println!("{name} | {} | {}", shown(&on_bare), shown(&on_pool));
        let is_as_said = match beside {
            Same => on_bare == on_pool,
            Refused(error) => on_bare.is_ok() && on_pool == Err(*error),
            Otherwise(error) => on_bare.is_err() && on_pool == Err(*error),
        };
        if !is_as_said {
            wrong.push(format!(
                "{name}: ext4 {}, pool {}, expected {beside:?}",
                shown(&on_bare),
                shown(&on_pool)
            ));
        }
    }
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

/// A pool of these members, and an ext4 of its own beside it, in the folder `bare`.
fn beside(members: &[Made]) -> Option<PoolWorld> {
    if !needs::all_there(&[needs::Need::Program("python3")]) {
        return None;
    }
    let world = PoolWorld::build(members)?;
    world.disk("bare", (EXT4, 64));
    Some(world)
}

#[test]
fn calls_come_to_the_same_on_a_pool_as_on_ext4_but_for_those_that_are_documented() {
    for (what, made) in [
        ("ext4", (EXT4, 100)),
        ("XFS", (XFS, 300)),
        ("btrfs", (BTRFS, 200)),
    ] {
        let Some(world) = beside(&[made]) else {
            return;
        };
        compare(&world, &format!("a pool on {what}"));
    }
}

#[test]
fn calls_come_to_the_same_on_striped_files() {
    let Some(world) = beside(&[(EXT4, 100), (XFS, 300), (EXT4, 100), (BTRFS, 200)]) else {
        return;
    };
    let policy = b"striped=2x2 unit=4KiB group_unit=8KiB";
    calls::setxattr(
        world.path(""),
        "user.rushes.policy",
        policy,
        XattrFlags::empty(),
    )
    .expect("a wish");
    compare(&world, "stripes");
}

#[test]
fn calls_come_to_the_same_by_way_of_a_daemon() {
    let Some(world) = beside(&[(EXT4, 100), (XFS, 300)]) else {
        return;
    };
    let _daemon = world.served(2, "");
    compare(&world, "a pool with a daemon");
}

/// pjdfstest asks the C library for the limit, which knows none for FUSE: it is that of the
/// catalogue.
#[test]
fn a_file_has_as_many_names_as_on_ext4() {
    let Some(world) = beside(&[(EXT4, 100)]) else {
        return;
    };
    let link_until_refused = |folder: &Path| {
        let first = folder.join("first");
        File::create(&first).expect("made");
        let links = (1..100_000).map(|number| calls::link(&first, folder.join(number.to_string())));
        let names = links.take_while(Result::is_ok).count() + 1;
        (names, calls::link(&first, folder.join("last")))
    };
    let on_bare = link_until_refused(&world.scratch.folder("bare/names"));
    fs::create_dir(world.path("names")).expect("made");
    let on_pool = link_until_refused(&world.path("names"));
    assert_eq!(on_pool, on_bare);
    assert_eq!(on_pool.1, Err(Errno::MLINK));
}

/// If the mount passed on these calls, they would shut a member down or freeze all its users.
#[test]
fn no_ioctl_reaches_a_member_or_the_catalogue() {
    let Some(world) = beside(&[(EXT4, 100)]) else {
        return;
    };
    let place = Place::new(&world.path(""), 0);
    for name in ["f", "d", ""] {
        for number in [ioctls::SHUTDOWN, ioctls::UNKNOWN] {
            assert_eq!(place.ioctl(name, number), Err(Errno::NOTTY), "{name}");
        }
        let frozen = place.ioctl(name, ioctls::FIFREEZE);
        assert_eq!(frozen, Err(Errno::OPNOTSUPP), "{name}");
    }
    // The member and the catalogue still work.
    let file = File::create(place.at("after")).expect("made");
    file.write_all_at(b"after", 0).expect("room");
    file.sync_all().expect("synced");
    assert_eq!(fs::read(place.at("after")).expect("read"), b"after");
}
