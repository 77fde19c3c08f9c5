// SPDX-License-Identifier: Apache-2.0
//! The mounts that this process sees, and those that a mount namespace of its own does without.

use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Every mount: device number and mount point, oldest first.
pub fn mounts() -> Vec<(String, PathBuf)> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(2);
            let device = fields.next()?.to_owned();
            let point = fields.nth(1)?;
            Some((device, unescape(point)))
        })
        .collect()
}

/// Every mount point at or below `folder`, deepest first.
pub fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = mounts()
        .into_iter()
        .map(|(_, point)| point)
        .filter(|point| point.starts_with(folder))
        .collect();
    found.reverse();
    found
}

/// Has everything written that the file systems at and below `folder` have not written yet, those
/// first that lie on others.
///
/// Of these alone: `sync` writes to all disks, and tests beside this one count on bytes that the
/// kernel has not written. A mount whose process is gone has nothing to write, and is skipped.
pub fn sync_below(folder: &Path) -> Result<()> {
    for place in mounts_below(folder)
        .iter()
        .map(PathBuf::as_path)
        .chain([folder])
    {
        if let Ok(opened) = File::open(place) {
            rustix::fs::syncfs(opened)
                .with_context(|| format!("{} cannot be synced", place.display()))?;
        }
    }
    Ok(())
}

/// True as well where the process behind a FUSE mount is gone.
pub fn is_mounted(point: &Path) -> bool {
    mounts().iter().any(|(_, at)| at == point)
}

/// mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let code = (first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// A program for `/bin/sh`: unmounts the mounts of other tests and of other rooms of the lab, but
/// those at the folders of its arguments, and becomes the command behind `--`. Shell scripts run
/// the same file.
const LET_GO: &str = include_str!("let-go.sh");

/// Arguments: a folder, the one to show it over, then the command to become.
const SHOW_OVER: &str = r#"mount --bind "$1" "$2" || exit 1; shift 2; exec "$@""#;

/// Arguments for the program `unshare`: the program whose name and arguments follow gets a mount
/// namespace of its own, without the mounts of other tests and of other rooms of the lab, which
/// could not end before it.
///
/// `keeps`   folders whose mounts stay, and on whose mounts they lie
/// `over`    a folder, and the folder that it is mounted over in there
pub fn in_own_namespace<'a>(
    unshare: &'a mut Command,
    keeps: &[&Path],
    over: Option<(&Path, &Path)>,
) -> &'a mut Command {
    // mountinfo has real paths.
    let real = |path: &&Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    unshare
        .args(["--mount", "--propagation", "private", "/bin/sh", "-c"])
        .args([LET_GO, "let-go.sh"])
        .args(keeps.iter().map(real))
        .arg("--");
    if let Some((ours, theirs)) = over {
        unshare
            .args(["/bin/sh", "-c", SHOW_OVER, "sh"])
            .args([ours, theirs]);
    }
    unshare
}

/// The mount points of this mountinfo that a program of [`in_own_namespace`] lets go of.
///
/// Errors   a shell or awk cannot be run
pub fn others(mountinfo: &str, keeps: &[&Path]) -> Result<Vec<PathBuf>> {
    let mut shell = Command::new("/bin/sh")
        .args(["-c", LET_GO, "let-go.sh", "--list"])
        .args(keeps)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("/bin/sh cannot be run")?;
    if let Some(mut input) = shell.stdin.take() {
        input.write_all(mountinfo.as_bytes())?;
    }
    let output = shell.wait_with_output()?;
    ensure!(
        output.status.success(),
        "let-go.sh ended with {}",
        output.status
    );
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_mount_points_are_read() {
        for (text, expect) in [
            ("/mnt/plain", "/mnt/plain"),
            ("/mnt/two\\040words", "/mnt/two words"),
            ("/mnt/back\\134slash", "/mnt/back\\slash"),
            ("/odd\\9", "/odd\\9"),
        ] {
            assert_eq!(unescape(text), Path::new(expect));
        }
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(is_mounted(Path::new("/")));
        assert_eq!(mounts_below(Path::new("/")).len(), mounts().len());
        assert!(mounts_below(Path::new("/nowhere")).is_empty());
    }

    fn others(points: &[&str], keeps: &[&str]) -> Vec<PathBuf> {
        let line = |point: &&str| format!("36 35 7:0 / {point} rw - ext4 /dev/loop0 rw\n");
        let mountinfo: String = points.iter().map(line).collect();
        let keeps: Vec<&Path> = keeps.iter().map(Path::new).collect();
        super::others(&mountinfo, &keeps).expect("every system has awk")
    }

    const POINTS: [&str; 11] = [
        "/",
        "/proc",
        "/mnt/footage",
        "/tmp/rushes-tests.7.0/disk",
        "/tmp/rushes-tests.7.0/disk/inner",
        "/tmp/rushes-tests.7.10/disk",
        "/tmp/rushes-lab.8-0/stage",
        "/dev/shm/rushes-lab.8-1",
        "/tmp/rushes-lab-test-array-5/rushes-lab.9-0/stage",
        "/run/rushes-lab/disks/8-0",
        "/mnt/rushes-lab.archive",
    ];

    #[test]
    fn an_smbd_of_a_test_lets_go_of_other_tests_and_of_the_lab() {
        let found = others(
            &POINTS,
            &["/tmp/rushes-tests.7.0", "/tmp/rushes-tests.7.0/disk"],
        );
        let expected = [
            "/run/rushes-lab/disks/8-0",
            "/tmp/rushes-lab-test-array-5/rushes-lab.9-0/stage",
            "/dev/shm/rushes-lab.8-1",
            "/tmp/rushes-lab.8-0/stage",
            "/tmp/rushes-tests.7.10/disk",
        ]
        .map(PathBuf::from);
        assert_eq!(found, expected);
    }

    #[test]
    fn an_smbd_of_the_lab_keeps_its_room_and_a_disk_of_the_user() {
        let found = others(&POINTS, &["/tmp/rushes-lab.8-0", "/mnt/footage/reels"]);
        let expected = [
            "/run/rushes-lab/disks/8-0",
            "/tmp/rushes-lab-test-array-5/rushes-lab.9-0/stage",
            "/dev/shm/rushes-lab.8-1",
            "/tmp/rushes-tests.7.10/disk",
            "/tmp/rushes-tests.7.0/disk/inner",
            "/tmp/rushes-tests.7.0/disk",
        ]
        .map(PathBuf::from);
        assert_eq!(found, expected);
    }

    #[test]
    fn what_a_share_lies_on_stays_wherever_it_is() {
        let room = "/tmp/rushes-lab.8-0";
        for (points, share) in [
            // In another room, on a disk of the lab itself, and in a folder with a blank.
            (
                ["/tmp/rushes-lab.9-0", "/tmp/rushes-lab.9-0/stage"],
                "/tmp/rushes-lab.9-0/stage/footage",
            ),
            (
                ["/run/rushes-lab/disks/a", "/run/rushes-lab/disks/a/b"],
                "/run/rushes-lab/disks/a",
            ),
            (
                [
                    "/mnt/my\\040disk/rushes-tests.1.0",
                    "/mnt/my\\040disk/rushes-tests.1.0/d",
                ],
                "/mnt/my disk/rushes-tests.1.0",
            ),
        ] {
            assert!(others(&points, &[room, share]).is_empty(), "{share}");
        }
        // A room inside a disk of a test keeps that disk.
        let nested = others(
            &["/tmp/rushes-tests.7.0/disk", "/tmp/rushes-tests.7.0/other"],
            &["/tmp/rushes-tests.7.0/disk/rushes-lab.8-0", "/mnt/footage"],
        );
        assert_eq!(nested, [Path::new("/tmp/rushes-tests.7.0/other")]);
    }

    #[test]
    fn a_name_that_begins_like_a_kept_one_is_another() {
        let found = others(
            &["/tmp/rushes-tests.7.1/disk", "/tmp/rushes-tests.7.10/disk"],
            &["/tmp/rushes-tests.7.1", "/mnt"],
        );
        assert_eq!(found, [Path::new("/tmp/rushes-tests.7.10/disk")]);
    }
}
