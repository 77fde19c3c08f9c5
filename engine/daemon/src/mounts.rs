// SPDX-License-Identifier: Apache-2.0
//! The kernel's table of mounts: the facts of a mount, and the mount on which a folder lies.
//!
//! It reads only /proc/self/mountinfo and /etc/fstab and touches no file system that is asked
//! about, so a file system that hangs does not delay questions about others.

use rushes_sys::file::MountId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A copy of the table.
#[derive(Clone, Debug)]
pub(crate) struct MountTable(String);

/// One line: see proc_pid_mountinfo(5).
#[derive(Clone, Copy, Debug)]
struct Line<'a>(&'a str);

impl<'a> Line<'a> {
    fn field(self, index: usize) -> &'a str {
        self.0.split(' ').nth(index).unwrap_or("")
    }

    fn id(self) -> Option<MountId> {
        self.field(0).parse().ok().map(MountId)
    }

    fn parent(self) -> Option<MountId> {
        self.field(1).parse().ok().map(MountId)
    }

    fn point(self) -> PathBuf {
        unescaped(self.field(4))
    }
}

impl MountTable {
    /// The table of our mount namespace, as it is now.
    pub(crate) fn read() -> io::Result<MountTable> {
        std::fs::read_to_string("/proc/self/mountinfo").map(MountTable)
    }

    /// The table of another process, which may have another mount namespace.
    fn of(pid: i32) -> io::Result<MountTable> {
        std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).map(MountTable)
    }

    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.0.lines().map(Line)
    }

    fn line(&self, mount: MountId) -> Option<Line<'_>> {
        self.lines().find(|line| line.id() == Some(mount))
    }

    /// Kind of the file system behind a mount.
    pub(crate) fn file_system(&self, mount: MountId) -> Option<String> {
        let (_, tail) = self.line(mount)?.0.split_once(" - ")?;
        tail.split(' ').next().map(str::to_owned)
    }

    /// `major:minor` of a mount.
    fn device(&self, mount: MountId) -> Option<&str> {
        Some(self.line(mount)?.field(2))
    }

    /// The folder on which a mount lies.
    pub(crate) fn point(&self, mount: MountId) -> Option<PathBuf> {
        self.line(mount).map(Line::point)
    }

    /// The mount on which a path lies. None: the table does not show it, since the path lies in a
    /// folder that is our root and no mount.
    ///
    /// Assumes  `path`: absolute, no symbolic link in it
    pub(crate) fn over(&self, path: &Path) -> Option<MountId> {
        let mounts: Vec<(MountId, MountId, PathBuf)> = self
            .lines()
            .filter_map(|line| Some((line.id()?, line.parent()?, line.point())))
            .collect();
        let is_known = |id: MountId| mounts.iter().any(|(known, _, _)| *known == id);
        let mut folders: Vec<&Path> = path.ancestors().collect();
        folders.reverse();
        let mut now: Option<MountId> = None;
        for folder in folders {
            // Follow a stack of mounts on one folder: each has the mount below it for its parent.
            while let Some((next, _, _)) = mounts.iter().find(|(id, parent, point)| {
                let is_on_it = match now {
                    Some(now) => *parent == now && *id != now,
                    None => *parent == *id || !is_known(*parent),
                };
                is_on_it && point == folder
            }) {
                now = Some(*next);
            }
        }
        now
    }
}

/// Decodes the octal escapes of these tables: a space is `\040`.
fn unescaped(name: &str) -> PathBuf {
    let bytes = name.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let octal = (byte == b'\\')
            .then(|| name.get(at + 1..at + 4))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(octal.unwrap_or(byte));
        at += if octal.is_some() { 4 } else { 1 };
    }
    PathBuf::from(std::ffi::OsString::from_vec(out))
}

/// The folder nearest above a path (or the path) for which /etc/fstab has a file system, if that is
/// not mounted there.
///
/// Assumes  `point`: the mount point on which the path lies now
pub(crate) fn lacks_mount(path: &Path, point: &Path) -> Option<PathBuf> {
    lacks_mount_by(&std::fs::read_to_string("/etc/fstab").ok()?, path, point)
}

fn lacks_mount_by(fstab: &str, path: &Path, point: &Path) -> Option<PathBuf> {
    fstab
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .filter_map(|line| line.split_ascii_whitespace().nth(1).map(unescaped))
        .filter(|wanted| path.starts_with(wanted) && wanted.starts_with(point))
        .filter(|wanted| wanted != point)
        .max_by_key(|wanted| wanted.components().count())
}

/// Notices mounts and unmounts.
#[derive(Debug)]
pub(crate) struct MountWatch(File);

impl MountWatch {
    pub(crate) fn new() -> io::Result<MountWatch> {
        let watch = MountWatch(File::open("/proc/self/mountinfo")?);
        watch.has_changed();
        Ok(watch)
    }

    /// Whether the table has changed since the last call. Never waits.
    pub(crate) fn has_changed(&self) -> bool {
        // proc_pid_mounts(5): a change is an exceptional condition.
        let mut fds = [PollFd::new(&self.0, PollFlags::PRI)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&at_once)).is_ok_and(|count| count > 0)
    }
}

/// Whether mount `theirs` of process `pid`, which lives in another mount namespace than we, is the
/// same file system as our mount `ours`.
///
/// A service manager may give either side a mount namespace of its own, in which the same mounts
/// have other numbers.
pub(crate) fn same_file_system_elsewhere(pid: i32, theirs: MountId, ours: MountId) -> bool {
    let namespace = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
    let peer = pid.to_string();
    let (Some(our_space), Some(their_space)) = (namespace("self"), namespace(&peer)) else {
        return false;
    };
    if our_space == their_space {
        return false;
    }
    let (Ok(our_table), Ok(their_table)) = (MountTable::read(), MountTable::of(pid)) else {
        return false;
    };
    match (our_table.device(ours), their_table.device(theirs)) {
        (Some(ours), Some(theirs)) => ours == theirs,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_sys::file;

    const TABLE: &str = "24 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
         30 24 0:45 / /m rw - tmpfs tmpfs rw\n\
         31 30 7:0 / /m/a\\040b rw - ext4 /dev/loop0 rw\n\
         32 24 7:1 / /srv rw - xfs /dev/loop1 rw\n\
         33 32 7:2 / /srv rw - ext4 /dev/loop2 rw\n\
         34 24 7:3 / /srv/under rw - ext4 /dev/loop3 rw\n";

    fn table() -> MountTable {
        MountTable(TABLE.to_owned())
    }

    #[test]
    fn a_mount_line_tells_kind_device_and_folder() {
        assert_eq!(table().device(MountId(30)), Some("0:45"));
        assert_eq!(table().device(MountId(4)), None);
        assert_eq!(table().file_system(MountId(32)).as_deref(), Some("xfs"));
        let point = table().point(MountId(31)).unwrap();
        assert_eq!(point, Path::new("/m/a b"));
    }

    #[test]
    fn a_path_lies_on_what_was_mounted_over_it_last() {
        let check = |path: &str, expected: u64| {
            assert_eq!(
                table().over(Path::new(path)),
                Some(MountId(expected)),
                "{path}"
            );
        };
        check("/", 24);
        check("/opt/x", 24);
        check("/m", 30);
        check("/m/a", 30);
        check("/m/a b/clips", 31);
        check("/srv", 33);
        // Mounted before others were mounted over all of /srv.
        check("/srv/under", 33);
        assert_eq!(MountTable(String::new()).over(Path::new("/m")), None);
        // If our root is no mount, the table shows only the mounts below it.
        let inner = MountTable(String::from("40 24 0:5 / /proc rw - proc proc rw\n"));
        assert_eq!(inner.over(Path::new("/proc/self")), Some(MountId(40)));
        assert_eq!(inner.over(Path::new("/media")), None);
    }

    #[test]
    fn a_file_system_that_fstab_has_and_nobody_mounted_is_named() {
        let fstab = "# <file system> <mount point>\n\
                     /dev/vda / ext4 defaults 0 1\n\
                     LABEL=clips /srv/clips ext4 nofail 0 2\n\
                     LABEL=x /srv/two\\040words xfs nofail 0 2\n\
                     none none swap sw 0 0\n";
        let check = |path: &str, point: &str, expected: Option<&str>| {
            assert_eq!(
                lacks_mount_by(fstab, Path::new(path), Path::new(point)).as_deref(),
                expected.map(Path::new),
                "{path} on {point}"
            );
        };
        check("/srv/clips", "/", Some("/srv/clips"));
        check("/srv/clips/today", "/srv", Some("/srv/clips"));
        check("/srv/clips/today", "/srv/clips", None);
        check("/srv/clips/today", "/srv/clips/today", None);
        check("/srv/two words", "/", Some("/srv/two words"));
        check("/srv/clipsother", "/", None);
        check("/opt", "/", None);
    }

    #[test]
    fn a_watch_is_quiet_about_what_it_has_said() {
        let watch = MountWatch::new().unwrap();
        // Another program may mount something at this moment, but not a hundred times.
        assert!((0..100).any(|_| !watch.has_changed()));
    }

    /// Print that a test is skipped, and why; it then returns.
    ///
    /// Panics   when `RUSHES_TEST_ALL` is 1: under `make test` everything runs
    fn skip(sentence: &str) {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "{sentence}; it may not be skipped under RUSHES_TEST_ALL=1"
        );
        eprintln!("SKIPPED: {sentence}");
    }

    /// `unshare -m` gives a process the same mounts under other numbers.
    #[test]
    fn a_mount_is_known_again_in_another_namespace() {
        let spawned = std::process::Command::new("unshare")
            .args(["-m", "sleep", "20"])
            .spawn();
        let Ok(mut child) = spawned else {
            skip("no unshare(1)");
            return;
        };
        let pid = i32::try_from(child.id()).unwrap();
        let ours = file::mount_of(Path::new("/")).unwrap();
        let own = std::fs::read_link("/proc/self/ns/mnt").unwrap();
        let mut table = String::new();
        for _ in 0..500 {
            let theirs = std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            if theirs.is_some_and(|theirs| theirs != own) {
                table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let mount_at = |point: &str| {
            let line = table.lines().find(|l| l.split(' ').nth(4) == Some(point))?;
            Some(MountId(line.split(' ').next()?.parse().ok()?))
        };
        let found = mount_at("/").map(|theirs| {
            let proc_mount = mount_at("/proc").unwrap();
            (
                theirs != ours,
                same_file_system_elsewhere(pid, theirs, ours),
                same_file_system_elsewhere(pid, proc_mount, ours),
            )
        });
        let _ = child.kill();
        let _ = child.wait();
        match found {
            None => skip("unshare -m is not allowed here"),
            Some(found) => assert_eq!(found, (true, true, false)),
        }
        // In our own namespace another number is another mount.
        let own_pid = i32::try_from(std::process::id()).unwrap();
        assert!(!same_file_system_elsewhere(own_pid, MountId(0), ours));
    }
}
