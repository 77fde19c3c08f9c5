// SPDX-License-Identifier: Apache-2.0
//! A file of a pool as a disk, through Debian's tgt, and the same bytes behind iSCSI, NFS and the
//! mount at once.

use rushes_kit::free_port;
use rushes_tests::disk::run;
use rushes_tests::export::{self, Export, ISCSI, NFS};
use rushes_tests::needs;
use rushes_tests::nfs4::Nfs4;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const DISK_BYTES: u64 = 64 << 20;

fn world(members: &[rushes_tests::pool::Made]) -> Option<PoolWorld> {
    if !needs::all_there(ISCSI) || !needs::all_there(NFS) {
        return None;
    }
    PoolWorld::build(members)
}

/// `qemu-io`, which is libiscsi with a command line.
fn qemu(disk: &str, commands: &[&str]) -> (bool, String) {
    let mut command = Command::new(needs::path_of("qemu-io"));
    command.args(["-f", "raw", "-t", "none"]);
    for one in commands {
        command.args(["-c", one]);
    }
    let output = command.arg(disk).output().expect("qemu-io starts");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    let is_good = output.status.success() && !text.contains("failed") && !text.contains("error");
    (is_good, text)
}

fn done(disk: &str, commands: &[&str]) {
    let (is_good, text) = qemu(disk, commands);
    assert!(is_good, "{commands:?}: {text}");
}

fn tool(name: &str, words: &[&str]) -> (bool, String) {
    let output = Command::new(needs::path_of(name))
        .args(words)
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), text)
}

#[test]
fn the_same_bytes_are_behind_iscsi_nfs_and_the_mount_at_once() {
    let Some(world) = world(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let disk = Export::iscsi(&world, "edit.disk", &["--size", "64MiB"]);
    let nfs_export = Export::nfs(&world);
    let url = disk.disk("edit.disk");
    let (found, text) = tool(
        "iscsi-ls",
        &["-s", &format!("iscsi://127.0.0.1:{}/", disk.port)],
    );
    assert!(
        found && text.contains("iqn.2026-01.local.rushes:edit.disk"),
        "{text}"
    );
    let (found, text) = tool("iscsi-readcapacity16", &[&url]);
    assert!(
        found && text.contains(&format!("Total size:{DISK_BYTES}")),
        "{text}"
    );
    let (_, text) = tool("iscsi-inq", &[&url]);
    assert!(text.contains("RUSHES"), "{text}");
    let file = File::options()
        .read(true)
        .write(true)
        .open(world.path("edit.disk"))
        .expect("it is a file");
    assert_eq!(file.metadata().expect("known").len(), DISK_BYTES);
    let mut nfs = Nfs4::connect(nfs_export.port, "disk", 1);
    let root = nfs.root("media").expect("exported");
    let open = nfs.open(&root, b"edit.disk", false).expect("opened");
    for round in 0..8u64 {
        let at = round * 5 * MIB as u64;
        let other = at + 2 * MIB as u64;
        // An iSCSI write is in the next read of both others, without a flush.
        done(&url, &[&format!("write -P {} {at} 1M", round + 1)]);
        let mut bytes = vec![0; MIB];
        file.read_exact_at(&mut bytes, at).expect("read");
        assert!(bytes.iter().all(|&byte| u64::from(byte) == round + 1));
        let mut bytes = Vec::new();
        while bytes.len() < MIB {
            let more = nfs.read(&open, at + bytes.len() as u64, 65_536);
            bytes.extend(more.expect("read"));
        }
        assert!(bytes.iter().all(|&byte| u64::from(byte) == round + 1));
        // Writes by NFS and through the mount are in the next iSCSI read.
        nfs.write(&open, other, &vec![0x40 + round as u8; MIB])
            .expect("written");
        file.write_all_at(&vec![0x80 + round as u8; MIB], other + MIB as u64)
            .expect("written");
        done(
            &url,
            &[
                &format!("read -P {} {other} 1M", 0x40 + round),
                &format!("read -P {} {} 1M", 0x80 + round, other + MIB as u64),
                "flush",
            ],
        );
    }
    nfs_export.end();
    disk.end();
    // The disk's bytes lie in objects, as those of any file.
    assert!(!world.members_of("edit.disk").is_empty());
}

#[test]
fn a_disk_takes_its_room_when_it_is_made_or_is_not_made() {
    let Some(world) = world(&[(EXT4, 40), (EXT4, 90)]) else {
        return;
    };
    let free = |world: &PoolWorld| {
        let found = rustix::fs::statvfs(world.path("")).expect("mounted");
        found.f_bavail * 4096
    };
    let path = |name: &str| world.path(name).display().to_string();
    let refused_as_it_is = |words: &[&str]| {
        let output = export::export(&world, words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let refused = |words: &[&str]| refused_as_it_is(&[words, &["--client", "127.0.0.1"]].concat());
    let said = refused(&["iscsi", &path("a"), "--size", "500MiB"]);
    assert!(said.contains("no room"), "{said}");
    assert!(!world.path("a").exists());
    let said = refused(&["iscsi", &path("a")]);
    assert!(said.contains("--size"), "{said}");
    let said = refused(&["iscsi", &path("a"), "--size", "10000"]);
    assert!(said.contains("multiple of 4096"), "{said}");
    // No client is allowed by default, not even on loopback: one has to be named.
    for listen in ["0.0.0.0", "127.0.0.1"] {
        let words = ["iscsi", &path("a"), "--size", "1MiB", "--listen", listen];
        let said = refused_as_it_is(&words);
        assert!(said.contains("--client"), "{said}");
    }
    assert!(!world.path("a").exists());
    let end = Instant::now() + Duration::from_secs(30);
    while free(&world) < 100 << 20 {
        assert!(Instant::now() < end, "the room does not come back");
        std::thread::sleep(Duration::from_millis(100));
    }
    // More than the room of one member.
    let disk = Export::iscsi(&world, "a", &["--size", "100MiB"]);
    assert_eq!(world.members_of("a"), [0, 1]);
    let url = disk.disk("a");
    let before = free(&world);
    done(&url, &["write -P 7 0 50M", "write -P 8 50M 50M", "flush"]);
    done(&url, &["read -P 7 0 50M", "read -P 8 50M 50M"]);
    assert!(before - free(&world) < 4 << 20, "it had its room");
    let said = refused(&["iscsi", &path("a"), "--size", "64MiB"]);
    assert!(said.contains("the file exists and has"), "{said}");
    let port = free_port().expect("loopback has a free port").to_string();
    let runtime = world.scratch.folder("second").display().to_string();
    let said = refused(&[
        "iscsi",
        &path("a"),
        "--port",
        &port,
        "--runtime-dir",
        &runtime,
    ]);
    assert!(said.contains("served already"), "{said}");
    disk.end();
    let disk = Export::iscsi(&world, "a", &["--read-only"]);
    let (is_good, text) = qemu(&disk.disk("a"), &["write -P 9 0 1M"]);
    assert!(!is_good, "{text}");
    let mut bytes = vec![0; MIB];
    File::open(world.path("a"))
        .and_then(|file| file.read_exact_at(&mut bytes, 0))
        .expect("read");
    assert!(bytes.iter().all(|&byte| byte == 7), "it is read-only");
}

#[test]
fn an_initiator_comes_back_after_the_mount_died_and_finds_what_it_flushed() {
    let Some(mut world) = world(&[(EXT4, 100)]) else {
        return;
    };
    let mut disk = Export::iscsi(&world, "d", &["--size", "64MiB"]);
    let other = Export::iscsi(&world, "e", &["--size", "16MiB"]);
    // Two disks have two identities: a multipath client would take equal ones for one disk.
    let identity = |export: &Export, name: &str| {
        let output = Command::new(needs::path_of("iscsi-inq"))
            .args(["-e", "1", "-c", "131", &export.disk(name)])
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<String> = text
            .lines()
            .filter(|line| line.starts_with("Designator:["))
            .map(str::to_owned)
            .collect();
        assert!(!lines.is_empty(), "{output:?}");
        lines
    };
    let (one, two) = (identity(&disk, "d"), identity(&other, "e"));
    assert_ne!(one, two);
    other.end();
    done(&disk.disk("d"), &["write -P 5 1M 8M", "flush"]);
    world.kill();
    assert!(disk.says("waiting"), "{}", disk.log());
    world.start();
    assert!(disk.says("serving"), "{}", disk.log());
    done(&disk.disk("d"), &["read -P 5 1M 8M", "write -P 6 9M 1M"]);
    assert_eq!(identity(&disk, "d"), one, "it is the same disk");
    let mut bytes = vec![0; MIB];
    File::open(world.path("d"))
        .and_then(|file| file.read_exact_at(&mut bytes, 9 * MIB as u64))
        .expect("read");
    assert!(bytes.iter().all(|&byte| byte == 6));
    // When tgtd dies, its keeper ends with exit code 2; when the keeper dies, tgtd ends as well.
    run(Command::new("kill")
        .arg("-KILL")
        .arg(disk.server().to_string()));
    assert_eq!(disk.wait().code(), Some(2), "{}", disk.log());
    let mut disk = Export::iscsi(&world, "d", &[]);
    let server = disk.server();
    disk.kill();
    let end = Instant::now() + Duration::from_secs(10);
    while Path::new(&format!("/proc/{server}")).exists() {
        assert!(Instant::now() < end, "tgtd is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_member_that_is_away_is_an_error_of_the_disk_and_not_of_others() {
    let Some(world) = world(&[(EXT4, 120), (EXT4, 60)]) else {
        return;
    };
    let disk = Export::iscsi(&world, "d", &["--size", "64MiB"]);
    assert_eq!(world.members_of("d"), [0]);
    fs::write(world.path("other.mov"), pattern::bytes(1, 0, MIB)).expect("written");
    done(&disk.disk("d"), &["write -P 5 0 1M", "flush"]);
    disk.end();
    world.unplug(0);
    rushes_tests::caches::drop("3");
    let disk = Export::iscsi(&world, "d", &[]);
    let begun = Instant::now();
    let (is_good, text) = qemu(&disk.disk("d"), &["read 0 1M"]);
    assert!(!is_good, "{text}");
    assert!(begun.elapsed() < Duration::from_secs(20), "at once");
    fs::write(world.path("new.mov"), "x").expect("the other member has room");
    world.plug(0, "loop");
    done(&disk.disk("d"), &["read -P 5 0 1M"]);
}

#[test]
fn nobody_logs_in_who_was_not_named() {
    let Some(world) = world(&[(EXT4, 64)]) else {
        return;
    };
    let (named, nobody) = ("iqn.2026-01.test:named", "iqn.2026-01.test:nobody");
    let logs_in =
        |export: &Export, name: &str| tool("iscsi-inq", &["-i", name, &export.disk("d")]).0;
    let check = |options: &[&str], expected: (bool, bool)| {
        let mut all = vec!["--size", "1MiB"];
        all.extend(options);
        let disk = Export::iscsi(&world, "d", &all);
        let found = (logs_in(&disk, named), logs_in(&disk, nobody));
        assert_eq!(found, expected, "{options:?}");
        disk.end();
    };
    check(&["--client", "127.0.0.1"], (true, true));
    check(&["--initiator", named], (true, false));
    check(&["--client", "127.0.0.0/8"], (true, true));
    check(&["--client", "127.0.0.3"], (false, false));
    // tgt would let in a client that meets one of both conditions.
    let path = world.path("d").display().to_string();
    let both = [
        "iscsi",
        &path,
        "--client",
        "127.0.0.3",
        "--initiator",
        named,
    ];
    let output = export::export(&world, &both);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// tgtd on a plain file, for comparison: libiscsi's tests must give the same results for our disk.
struct Plain {
    child: Child,
    port: u16,
}

impl Plain {
    fn start(world: &PoolWorld) -> Plain {
        let folder = world.scratch.folder("plain");
        let file = folder.join("disk");
        File::create(&file)
            .and_then(|file| file.set_len(DISK_BYTES))
            .expect("the scratch folder is writable");
        let port = free_port().expect("loopback has a free port");
        let socket = folder.join("tgtd");
        let child = Command::new(needs::path_of("tgtd"))
            .args(["-f", "-C", "0", "--iscsi"])
            .arg(format!("portal=127.0.0.1:{port}"))
            .env("TGT_IPC_SOCKET", &socket)
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("tgtd starts");
        let plain = Plain { child, port };
        let tell = |line: &str, last: &str| {
            Command::new(needs::path_of("tgtadm"))
                .args(["-C", "0", "--lld", "iscsi"])
                .args(line.split(' '))
                .arg(last)
                .env("TGT_IPC_SOCKET", &socket)
                .output()
                .expect("tgtadm starts")
                .status
                .success()
        };
        let end = Instant::now() + Duration::from_secs(20);
        while !tell("--mode target --op", "show") {
            assert!(Instant::now() < end, "tgtd does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        let file = file.display().to_string();
        assert!(tell(
            "--op new --mode target --tid 1 -T",
            "iqn.2026-01.plain"
        ));
        assert!(tell(
            "--op new --mode logicalunit --tid 1 --lun 1 --bstype rdwr -b",
            &file
        ));
        assert!(tell("--op bind --mode target --tid 1 -I", "127.0.0.1"));
        plain
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tests by name, and whether each passed.
fn verdicts(url: &str) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    for family in ["SCSI", "iSCSI"] {
        let output = Command::new(needs::path_of("iscsi-test-cu"))
            .args(["--dataloss", "--test", family, url])
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (mut suite, mut test) = (String::new(), None);
        // A test prints its messages between its name and the verdict.
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("Suite: ") {
                suite = name.trim().to_owned();
            }
            if let Some(rest) = line.strip_prefix("  Test: ") {
                test = rest.split_whitespace().next();
            }
            let verdict = (line.contains("passed"), line.contains("FAILED"));
            if let (Some(name), (true, _) | (_, true)) = (test, verdict) {
                found.insert(format!("{family} {suite} {name}"), verdict.0);
                test = None;
            }
        }
    }
    found
}

#[test]
fn libiscsis_own_tests_say_of_it_what_they_say_of_a_plain_file() {
    let Some(world) = world(&[(EXT4, 100)]) else {
        return;
    };
    let plain = Plain::start(&world);
    let disk = Export::iscsi(&world, "d", &["--size", "64MiB"]);
    let plain_url = format!("iscsi://127.0.0.1:{}/iqn.2026-01.plain/1", plain.port);
    let beside = std::thread::spawn(move || verdicts(&plain_url));
    let found = verdicts(&disk.disk("d"));
    let expected = beside.join().expect("the plain one, too");
    assert!(expected.len() > 200, "only {} tests ran", expected.len());
    let passed = expected.values().filter(|passed| **passed).count();
    assert!(passed * 10 > expected.len() * 9, "{expected:?}");
    let other: Vec<_> = expected
        .iter()
        .filter(|(name, passed)| found.get(*name) != Some(passed))
        .collect();
    assert!(other.is_empty(), "otherwise than a plain file: {other:?}");
    assert_eq!(found.len(), expected.len());
    let size = fs::metadata(world.path("d")).expect("known").size();
    assert_eq!(size, DISK_BYTES, "a disk keeps its size");
}
