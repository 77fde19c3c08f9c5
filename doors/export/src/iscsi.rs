// SPDX-License-Identifier: Apache-2.0
//! iSCSI by tgt: one file of a pool as one disk of one target.
//!
//! tgtd starts with no target and gets its commands from `tgtadm`, over a socket in its own folder.
//! The list of clients that may log in comes last, so that no client gets in before the rest is
//! set. tgtd keeps no bytes: a write is in the mount when it is acknowledged, and a flush is an
//! fsync.

use crate::error::ExportError;
use crate::keep::Server;
use crate::mount::Mount;
use crate::program;
use crate::refusal::{DiskFault, MachineRefusal, Refusal, TargetRefusal};
use rustix::fs::{
    CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, fallocate, flock,
    fstat, fsync, ftruncate, lstat, open, renameat_with,
};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A disk's sectors. Units: bytes.
const SECTOR_BYTES: u64 = 512;
/// A disk's size is a multiple of this, so that it has whole sectors for systems that want long
/// ones. Units: bytes.
pub(crate) const SIZE_STEP_BYTES: u64 = 4096;
/// Longest path of a Unix socket, with its NUL.
const SOCKET_PATH_BYTES: usize = 108;
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// A client that may log in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Initiator {
    /// From this address or network, by any name.
    Address(String),
    /// By this name (IQN), from any address.
    Name(String),
}

/// A file as a disk.
#[derive(Clone, Debug)]
pub struct DiskExport {
    /// Canonical, on the mount.
    pub file: PathBuf,
    /// The target's name (IQN).
    pub target: String,
    /// The address on which it listens.
    pub listen: SocketAddr,
    /// Clients that may log in.
    pub initiators: Vec<Initiator>,
    /// No client may write.
    pub read_only: bool,
    /// Socket of tgtd; goes with a reboot.
    pub runtime: PathBuf,
}

/// The refusal of a file as a disk.
fn refused(file: &Path, fault: DiskFault) -> ExportError {
    let file = file.to_path_buf();
    ExportError::Refused(Box::new(Refusal::Disk { file, fault }))
}

impl DiskExport {
    /// Makes the file of a new disk, or checks an existing one.
    ///
    /// Units    size: bytes
    /// Returns  its size
    /// Errors   Refused: there is none and no size is given, or one of another size; no room for it
    pub fn prepare(path: &Path, size: Option<u64>, sparse: bool) -> Result<u64, ExportError> {
        let refused = |fault| refused(path, fault);
        if let Ok(found) = std::fs::metadata(path) {
            let wrong = !found.is_file() || found.len() == 0 || found.len() % SECTOR_BYTES != 0;
            return match size {
                _ if wrong => Err(refused(DiskFault::NotSectors)),
                Some(size) if size != found.len() => Err(refused(DiskFault::OtherSize {
                    found: found.len(),
                    wanted: size,
                })),
                _ => Ok(found.len()),
            };
        }
        let size = size.ok_or_else(|| refused(DiskFault::Absent))?;
        if size == 0 || size % SIZE_STEP_BYTES != 0 {
            return Err(refused(DiskFault::Size(size)));
        }
        let no_room = |free| refused(DiskFault::NoRoom { size, free });
        if !sparse {
            // Ask first: a reservation that fails has taken all free space from other programs for
            // a moment.
            let folder = path.parent().unwrap_or(Path::new("/"));
            let free = rustix::fs::statvfs(folder)
                .map(|found| found.f_bavail.saturating_mul(found.f_frsize));
            if let Ok(free) = free
                && free < size
            {
                return Err(no_room(Some(free)));
            }
        }
        // Under its final name a file is complete; the next program removes the remains of a killed
        // one.
        let (new, fd) = unfinished(path)?;
        let made = ftruncate(&fd, size)
            .and_then(|()| match sparse {
                true => Ok(()),
                false => fallocate(&fd, FallocateFlags::empty(), 0, size),
            })
            .and_then(|()| fsync(&fd))
            .and_then(|()| renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE));
        if let Err(error) = made {
            let _ = std::fs::remove_file(&new);
            return Err(match error {
                Errno::EXIST => refused(DiskFault::MadeMeanwhile),
                Errno::NOSPC => no_room(None),
                error => ExportError::at("take room for", path, error),
            });
        }
        Ok(size)
    }

    fn check(&self) -> Result<(), ExportError> {
        if self.initiators.is_empty() {
            return Err(TargetRefusal::NoClient.into());
        }
        let by_address = |initiator: &Initiator| matches!(initiator, Initiator::Address(_));
        if self.initiators.iter().any(by_address) && !self.initiators.iter().all(by_address) {
            return Err(TargetRefusal::BothKinds.into());
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || ".:-/".contains(c);
        let is_name = |name: &str| {
            ["iqn.", "eui.", "naa."]
                .iter()
                .any(|kind| name.starts_with(kind))
                && name.len() <= 223
                && name.chars().all(plain)
        };
        if !is_name(&self.target) {
            return Err(TargetRefusal::Name(self.target.clone()).into());
        }
        for initiator in &self.initiators {
            let is_good = match initiator {
                Initiator::Name(name) => is_name(name),
                Initiator::Address(address) => {
                    !address.is_empty()
                        && (address == "ALL"
                            || address
                                .chars()
                                .all(|c| c.is_ascii_hexdigit() || ".:/".contains(c)))
                }
            };
            if !is_good {
                return Err(TargetRefusal::Initiator(initiator.clone()).into());
            }
        }
        if self.socket().as_os_str().len() + ".0.lock".len() >= SOCKET_PATH_BYTES {
            return Err(TargetRefusal::LongFolder(self.runtime.clone()).into());
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.runtime.join("tgtd")
    }

    fn portal(&self) -> String {
        format!("portal={}", self.listen)
    }

    /// The commands of `tgtadm` to tgtd, one line each, without `tgtadm --lld iscsi`.
    ///
    /// A client with multipath takes two disks of one identity for two paths to one disk, and would
    /// mix their bytes: tgt's own identity is the same for all. Ours is made of the pool and the
    /// file's inode.
    ///
    /// `file`   the path by which tgtd opens the file
    fn steps(
        &self,
        mount: &Mount,
        inode: u64,
        file: &Path,
    ) -> Result<Vec<Vec<String>>, ExportError> {
        let file = file
            .to_str()
            .ok_or_else(|| refused(file, DiskFault::NotUtf8))?;
        let number = identity(mount.pool().0, inode);
        // tgt's second number (NAA, locally assigned) depends on target and unit alone.
        let (identity, tid) = (format!("{number:032x}"), tid(number));
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<String>>();
        let mut target = words(&format!("--op new --mode target --tid {tid} -T"));
        target.push(self.target.clone());
        let mut unit = words(&format!(
            "--op new --mode logicalunit --tid {tid} --lun 1 --bstype rdwr -b"
        ));
        unit.push(file.to_owned());
        let mut identified = words(&format!(
            "--op update --mode logicalunit --tid {tid} --lun 1 --params"
        ));
        identified.push(format!(
            "vendor_id=RUSHES,product_id=POOL,scsi_id={identity},scsi_sn={identity},readonly={}",
            u8::from(self.read_only)
        ));
        let mut steps = vec![target, unit, identified];
        for initiator in &self.initiators {
            let mut bind = words(&format!("--op bind --mode target --tid {tid}"));
            bind.extend(match initiator {
                Initiator::Address(address) => ["-I".to_owned(), address.clone()],
                Initiator::Name(name) => ["-Q".to_owned(), name.clone()],
            });
            steps.push(bind);
        }
        Ok(steps)
    }

    /// The commands that do the same, for people.
    pub fn command_lines(&self, mount: &Mount) -> Result<String, ExportError> {
        self.check()?;
        let inode = rustix::fs::stat(&self.file)
            .map_err(|error| ExportError::at("open", &self.file, error))?
            .st_ino;
        let mut text = format!(
            "export TGT_IPC_SOCKET={}\ntgtd -f -C 0 --iscsi {} &\n",
            program::quoted(&self.socket().to_string_lossy()),
            program::quoted(&self.portal())
        );
        for step in self.steps(mount, inode, &self.file)? {
            let words: Vec<String> = step.iter().map(|word| program::quoted(word)).collect();
            text.push_str(&format!("tgtadm -C 0 --lld iscsi {}\n", words.join(" ")));
        }
        Ok(text)
    }

    /// tgtd for this disk.
    ///
    /// Errors   Refused: there is no tgt here, or it cannot get this configuration
    pub fn server(self, mount: &Mount) -> Result<impl Server + use<>, ExportError> {
        self.check()?;
        Ok(DiskServer {
            daemon: program::find("tgtd", "tgt")?,
            tell: program::find("tgtadm", "tgt")?,
            mount: mount.clone(),
            export: self,
            held: None,
            folder: None,
        })
    }
}

/// Makes an empty, locked file beside `path`, and returns its name. First removes one that a killed
/// process left, with the space that it has.
///
/// Errors   Refused when another process makes it at this moment
fn unfinished(path: &Path) -> Result<(PathBuf, OwnedFd), ExportError> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".unfinished");
    let new = path.with_file_name(name);
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let failed = |error| ExportError::at("make", &new, error);
    // The locked file may have got another name, or none, during the wait for the lock.
    let is_at = |fd: &OwnedFd| {
        let (own, found) = (fstat(fd)?, lstat(&new)?);
        Ok((own.st_dev, own.st_ino) == (found.st_dev, found.st_ino))
    };
    let busy = || refused(path, DiskFault::BeingMade);
    let locked = |fd: &OwnedFd| match flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => is_at(fd).map_err(failed),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(failed(error)),
    };
    match open(&new, flags, Mode::empty()) {
        Ok(left) if locked(&left)? => {
            std::fs::remove_file(&new).map_err(|error| ExportError::at("remove", &new, error))?
        }
        Ok(_) => return Err(busy()),
        Err(Errno::NOENT) => {}
        Err(error) => return Err(failed(error)),
    }
    let flags = flags | OFlags::CREATE | OFlags::EXCL;
    match open(&new, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) if locked(&fd)? => Ok((new, fd)),
        Ok(_) | Err(Errno::EXIST) => Err(busy()),
        Err(error) => Err(failed(error)),
    }
}

/// The same for a disk as long as it lives, and different for each disk; tgt makes of it the number
/// by which clients know the disk (NAA 6).
fn identity(pool: u128, inode: u64) -> u128 {
    // splitmix64
    let mixed = |seed: u64| {
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let (high, low) = ((pool >> 64) as u64, pool as u64);
    let first = mixed(mixed(mixed(high) ^ low) ^ inode);
    u128::from(first) << 64 | u128::from(mixed(first))
}

fn tid(identity: u128) -> u128 {
    1 + identity % 0x7fff
}

struct DiskServer {
    daemon: PathBuf,
    tell: PathBuf,
    mount: Mount,
    export: DiskExport,
    /// Our lock on the file, and the target's number once tgtd has it.
    held: Option<(OwnedFd, Option<u128>)>,
    /// The folder of its socket, locked.
    folder: Option<OwnedFd>,
}

impl DiskServer {
    fn tell(&self, words: &[String]) -> Result<bool, ExportError> {
        let output = Command::new(&self.tell)
            .args(["-C", "0", "--lld", "iscsi"])
            .args(words)
            .env("TGT_IPC_SOCKET", self.export.socket())
            .stdin(Stdio::null())
            .output()
            .map_err(|error| ExportError::at("start", &self.tell, error))?;
        if !output.status.success() {
            tracing::debug!(
                "tgtadm {words:?}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(output.status.success())
    }
}

impl Server for DiskServer {
    fn program(&self) -> &'static str {
        "tgtd"
    }

    fn address(&self) -> SocketAddr {
        self.export.listen
    }

    /// Two servers of one disk would each let a client write to it without the other's knowledge.
    fn start(&mut self) -> Result<Child, ExportError> {
        let file = &self.export.file;
        self.held = None;
        if self.folder.is_none() {
            self.folder = Some(program::own_folder(&self.export.runtime, "--runtime-dir")?);
        }
        let fd = self.mount.open(file, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let found = fstat(&fd).map_err(|error| ExportError::at("look at", file, error))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(refused(file, DiskFault::NotFile));
        }
        flock(&fd, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            Errno::WOULDBLOCK => MachineRefusal::DiskInUse(file.clone()).into(),
            error => ExportError::at("lock", file, error),
        })?;
        self.held = Some((fd, None));
        let mut command = program::bound(&self.daemon, "KILL")?;
        command
            .args(["-f", "-C", "0", "--iscsi"])
            .arg(self.export.portal())
            .env("TGT_IPC_SOCKET", self.export.socket())
            .current_dir(&self.export.runtime)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| ExportError::at("start", &self.daemon, error))
    }

    fn make_ready(&mut self) -> Result<bool, ExportError> {
        let (inode, file) = match &self.held {
            Some((fd, None)) => {
                let found = fstat(fd)
                    .map_err(|error| ExportError::at("look at", &self.export.file, error))?;
                // The file that was checked and locked, even if its name leads to another by now.
                let file = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
                (found.st_ino, PathBuf::from(file))
            }
            held => return Ok(held.is_some()),
        };
        let show = ["--op", "show", "--mode", "target"].map(str::to_owned);
        if !self.tell(&show)? {
            return Ok(false);
        }
        for step in self.export.steps(&self.mount, inode, &file)? {
            if !self.tell(&step)? {
                return Err(ExportError::Server {
                    program: "tgtd",
                    what: format!("refused `tgtadm {}`", step.join(" ")),
                });
            }
        }
        if let Some((_, told)) = &mut self.held {
            *told = Some(tid(identity(self.mount.pool().0, inode)));
        }
        Ok(true)
    }

    /// tgtd takes a signal to end as one to wait for its clients.
    fn stop(&mut self, mut child: Child) {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<String>>();
        if let Some((_, Some(tid))) = &self.held {
            let _ = self.tell(&words(&format!(
                "--op delete --mode target --tid {tid} --force"
            )));
        }
        let _ = self.tell(&words("--op delete --mode system"));
        let end = Instant::now() + STOP_WITHIN;
        while Instant::now() < end && matches!(child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // It has no data that is not in the mount.
        let _ = child.kill();
        let _ = child.wait();
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const SIZE: u64 = 1 << 20;

    /// A folder that is removed with the test.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn folder(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("rushes-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("the temporary folder is writable");
        Folder(path)
    }

    fn names(folder: &Folder) -> Vec<String> {
        let all = fs::read_dir(&folder.0).expect("it is there").flatten();
        all.map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn what_a_killed_maker_left_is_no_disk_and_in_nobodys_way() {
        let folder = folder("disk-left");
        let path = folder.0.join("a.disk");
        let left = folder.0.join(".a.disk.unfinished");
        // Killed before its space was allocated.
        let file = fs::File::create(&left).expect("made");
        file.set_len(SIZE).expect("made longer");
        drop(file);
        let none = DiskExport::prepare(&path, None, false);
        assert!(matches!(none, Err(ExportError::Refused(_))), "{none:?}");
        assert_eq!(
            DiskExport::prepare(&path, Some(SIZE), false).ok(),
            Some(SIZE)
        );
        assert_eq!(names(&folder), ["a.disk"]);
        let found = fs::metadata(&path).expect("made");
        assert_eq!(found.len(), SIZE);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&found);
        assert!(blocks * 512 >= SIZE, "it has {blocks} blocks");
        assert_eq!(DiskExport::prepare(&path, None, false).ok(), Some(SIZE));
    }

    #[test]
    fn a_disk_that_somebody_makes_is_left_to_him() {
        let folder = folder("disk-busy");
        let path = folder.0.join("a.disk");
        let (new, held) = unfinished(&path).expect("nobody else");
        ftruncate(&held, SIZE).expect("made longer");
        let second = DiskExport::prepare(&path, Some(SIZE), true);
        assert!(matches!(second, Err(ExportError::Refused(_))), "{second:?}");
        assert_eq!(fs::metadata(&new).expect("it stays").len(), SIZE);
        // It died.
        drop(held);
        assert_eq!(
            DiskExport::prepare(&path, Some(SIZE), true).ok(),
            Some(SIZE)
        );
        assert_eq!(names(&folder), ["a.disk"]);
    }

    #[test]
    fn a_link_under_the_unfinished_name_is_not_followed() {
        let folder = folder("disk-link");
        let other = folder.0.join("other");
        fs::write(&other, "mine").expect("written");
        std::os::unix::fs::symlink(&other, folder.0.join(".a.disk.unfinished")).expect("made");
        let made = DiskExport::prepare(&folder.0.join("a.disk"), Some(SIZE), true);
        assert!(matches!(made, Err(ExportError::System { .. })), "{made:?}");
        assert_eq!(fs::read(&other).expect("read"), b"mine");
    }
}
