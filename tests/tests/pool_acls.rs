// SPDX-License-Identifier: Apache-2.0
//! POSIX ACLs on the mount of a pool: given, inherited and enforced as on a plain ext4, and kept
//! over renames, another mount and a rescue.

use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{EXT4, PoolWorld, XFS};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Users that every Debian has, by number.
const DAEMON: u32 = 1;
const BIN: u32 = 2;
const SYS: u32 = 3;
const NOBODY: u32 = 65_534;

fn setfacl(words: &[&str], path: &Path) {
    let output = Command::new(needs::path_of("setfacl"))
        .args(words)
        .arg(path)
        .output()
        .expect("setfacl starts");
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// The ACL of a file with users as numbers, without the line that names the file.
fn getfacl(path: &Path) -> String {
    let output = Command::new(needs::path_of("getfacl"))
        .args(["--numeric", "--omit-header"])
        .arg(path)
        .output()
        .expect("getfacl starts");
    assert!(output.status.success(), "{}: {output:?}", path.display());
    let rights = fs::metadata(path).expect("known").permissions().mode();
    let text = String::from_utf8(output.stdout).expect("text");
    format!("{:o}\n{text}", rights & 0o7777)
}

/// Whether a user, whose only group is that of the same number, can run this script.
fn may(user: u32, script: &str, path: &Path) -> bool {
    let output = Command::new(needs::path_of("setpriv"))
        .args([&format!("--reuid={user}"), &format!("--regid={user}")])
        .args(["--clear-groups", "sh", "-c", script, "sh"])
        .arg(path)
        .output()
        .expect("setpriv starts");
    output.status.success()
}

/// Makes files and folders with ACLs, as user `daemon`. Returns the ACLs, and for each of three
/// users whether it may read, list, write and change the ACL.
fn use_acls(folder: &Path) -> Vec<String> {
    let mut said = Vec::new();
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(folder, everybody).expect("our own");
    let (file, shared) = (folder.join("file"), folder.join("shared"));
    let as_daemon = "umask 027; echo text > \"$1/file\" && mkdir \"$1/shared\"";
    assert!(may(DAEMON, as_daemon, folder));
    let mut note = |what: &str, path: &Path| {
        let mut line = format!("{what}: {}", getfacl(path));
        for user in [DAEMON, BIN, SYS] {
            let can = |script: &str| u8::from(may(user, script, path));
            let reads = can("exec <\"$1\" && { [ -d \"$1\" ] || cat \"$1\" >/dev/null; }");
            let lists = can("ls \"$1\" >/dev/null");
            let writes =
                can("[ -d \"$1\" ] && { : > \"$1/by$$\" && rm \"$1/by$$\"; } || : >> \"$1\"");
            let rules = can("setfacl -m u:77:r \"$1\" && setfacl -x u:77 \"$1\"");
            line += &format!("{user}: {reads}{lists}{writes}{rules}\n");
        }
        said.push(line);
    };
    note("as made", &file);
    setfacl(&["-m", "u:2:rw,g:3:r"], &file);
    note("two more", &file);
    setfacl(&["-m", "m::r"], &file);
    note("masked", &file);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o660)).expect("set");
    note("the mask by chmod", &file);
    setfacl(&["-m", "u:2:---,o::rw"], &file);
    note("one fewer than all others", &file);
    setfacl(&["-b"], &file);
    note("none", &file);

    setfacl(&["-m", "u:2:rwx,d:u:2:rwx,d:g:3:rx,d:o::-"], &shared);
    note("a default", &shared);
    let as_bin = "umask 077; echo text > \"$1/inner\"; mkdir \"$1/deep\"; ln -s inner \"$1/link\"; \
        mkfifo \"$1/pipe\"; echo text > \"$1/deep/inner\"";
    assert!(may(BIN, as_bin, &shared));
    for name in ["inner", "deep", "deep/inner"] {
        note(name, &shared.join(name));
    }
    assert!(may(
        DAEMON,
        "umask 0; mkdir \"$1/daemons\"; : > \"$1/wide\"",
        &shared
    ));
    note("a folder of another user", &shared.join("daemons"));
    note("a file of another user", &shared.join("wide"));
    setfacl(&["-k"], &shared);
    assert!(may(DAEMON, ": > \"$1/later\"", &shared));
    note("without a default", &shared.join("later"));
    setfacl(&["-m", "d:u:3:rwx,d:m::rx"], &shared);
    // The mount's root has a default ACL, too.
    setfacl(&["-m", "d:u:3:rw"], folder);
    assert!(may(BIN, "umask 077; : > \"$1/top\"", folder));
    note("at the top", &folder.join("top"));
    said.push(getfacl(&shared.join("pipe")));
    said
}

/// Every file and folder below, in order, with its ACL.
fn all_of(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(below) = folders.pop() {
        for entry in fs::read_dir(folder.join(&below)).expect("listed") {
            let entry = entry.expect("listed");
            let name = below.join(entry.file_name());
            let kind = entry.file_type().expect("known");
            if kind.is_symlink() {
                continue;
            }
            if kind.is_dir() {
                folders.push(name.clone());
            }
            found.push(format!(
                "{}: {}",
                name.display(),
                getfacl(&folder.join(&name))
            ));
        }
    }
    found.sort();
    found.insert(0, getfacl(folder));
    found
}

fn world() -> Option<PoolWorld> {
    let programs = ["setfacl", "getfacl", "setpriv"].map(Need::Program);
    if !needs::all_there(&programs) {
        return None;
    }
    PoolWorld::build(&[(EXT4, 100), (XFS, 300)])
}

#[test]
fn acls_are_given_inherited_and_enforced_as_on_ext4() {
    let Some(world) = world() else {
        return;
    };
    let bare = world.disk("bare", (EXT4, 64));
    let on_bare = use_acls(&bare);
    let on_pool = use_acls(&world.path(""));
    for (bare, pool) in on_bare.iter().zip(&on_pool) {
        assert_eq!(pool, bare, "left: the pool, right: ext4");
    }
    assert_eq!(on_pool.len(), on_bare.len());
    // The rights differ between users, or the test would prove nothing.
    assert!(on_bare[0].contains("2: 0100") && on_bare[1].contains("2: 1110"));
}

#[test]
fn acls_outlive_renames_the_mount_and_a_lost_catalogue() {
    let Some(mut world) = world() else {
        return;
    };
    use_acls(&world.path(""));
    let folder = getfacl(&world.path("shared"));
    let inner = getfacl(&world.path("shared/inner"));
    assert!(
        folder.contains("default:user:3:rwx") && inner.contains("user:2:rw"),
        "{inner}"
    );
    fs::rename(world.path("shared"), world.path("renamed")).expect("renamed");
    fs::rename(world.path("renamed/inner"), world.path("out")).expect("renamed");
    fs::rename(world.path("top"), world.path("renamed/top")).expect("renamed");
    assert_eq!(getfacl(&world.path("renamed")), folder);
    assert_eq!(getfacl(&world.path("out")), inner);
    let before = all_of(&world.path(""));
    for killed in [true, false] {
        world.start_again(killed);
        assert_eq!(all_of(&world.path("")), before, "killed: {killed}");
    }
    // The log of names is a second behind at most.
    std::thread::sleep(Duration::from_millis(2500));
    world.end();
    world.lose_catalogue();
    let members = [0, 1].map(|number| world.member(number).join("pool"));
    let (report, code) = world.json(&["rescue"], &members);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["attributes_lost"], 0, "{report}");
    world.start();
    assert_eq!(all_of(&world.path("")), before, "behind a rescue");
    assert!(may(BIN, "cat \"$1\"", &world.path("out")));
    assert!(may(SYS, "cat \"$1\"", &world.path("out")));
    assert!(!may(NOBODY, "cat \"$1\"", &world.path("out")));
}
