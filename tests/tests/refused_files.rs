// SPDX-License-Identifier: Apache-2.0
//! Obstacles that keep a daemon from writing a file whose bytes it has acknowledged: while one
//! lasts, the daemon keeps the bytes and names the file with the reason, `rushes recover` fails,
//! all other files are written, and afterwards the file gets its bytes. For immutable files see
//! pieces.rs.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::disk::{run, said};
use rushes_tests::fsx::{client, setup};
use rushes_tests::needs::{Need, all_there, path_of};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use rushes_tests::smb2::{Connection, Disposition, Handle, REQUEST_MAX};
use rushes_tests::world::{Backing, World};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LENGTH: usize = 60_000;
const MIB: u64 = 1 << 20;

fn world() -> Option<World> {
    world_on(Backing::Ext4)
}

/// Only the test starts a recovery.
fn world_on(backing: Backing) -> Option<World> {
    let mut setup = setup("64MiB");
    setup.backing = backing;
    setup.share.push(String::from("rushes:recover after = 600"));
    World::build(&setup)
}

/// Writes a file; its bytes are acknowledged, not flushed.
fn record(client: &Connection, name: &str, seed: u64) -> Handle {
    let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
    let bytes = pattern::bytes(seed, 0, LENGTH);
    client.write(file, 0, &bytes).expect("acknowledged");
    file
}

fn has_bytes_at(world: &World, name: &str, seed: u64, at: u64) -> bool {
    let mut found = vec![0; LENGTH];
    let file = File::open(world.path(name)).expect("it is there");
    file.read_exact_at(&mut found, at).is_ok() && found == pattern::bytes(seed, 0, LENGTH)
}

fn wait_until_nothing_is_left(world: &mut World) {
    world.daemon().wait_for("nothing is left", |status| {
        let notes = status["daemon"]["notes"].to_string();
        status["write"]["used_bytes"] == 0 && !notes.contains("a former daemon")
    });
}

/// Other files of any client are written, while the daemon lives and by `rushes recover` after its
/// death, which fails and names this file.
fn nobody_else_suffers(world: &mut World, client: &Connection, name: &str, words: &[&str]) {
    let other = record(client, "other.mov", 7);
    client.flush(other).expect("another file gets on");
    assert!(has_bytes_at(world, "other.mov", 7, 0));
    record(client, "left.mov", 8);
    world.daemon().kill();
    world.recover_fails(&[], &[&[name], words].concat());
    assert!(has_bytes_at(world, "left.mov", 8, 0), "it can be written");
}

#[test]
fn a_file_that_is_swap_is_kept_until_it_is_not() {
    let needs = [Need::Program("mkswap"), Need::Program("swapon")];
    if !all_there(&needs) {
        return;
    }
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    let path = world.path("swap.mov");
    fs::write(&path, vec![0; 8 << 20]).expect("there is room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    // The kernel uses its first mebibyte as swap.
    run(Command::new("mkswap").arg(&path).arg("1024"));
    world.disk.make_cold();
    let (file, _) = client.open("swap.mov", Disposition::Open).expect("opened");
    run(Command::new("swapon").arg(&path));
    let _swap = Swap(path.clone());
    let bytes = pattern::bytes(1, 0, LENGTH);
    client.write(file, 4 * MIB, &bytes).expect("acknowledged");
    assert!(client.flush(file).is_err(), "it cannot be written");
    assert!(client.read(file, 4 * MIB, LENGTH) == Ok(bytes.clone()));
    world.daemon().wait_for_log("swapoff");
    nobody_else_suffers(
        &mut world,
        &client,
        "swap.mov",
        &["Text file busy", "swapoff"],
    );
    world.daemon().start_again();
    assert!(client.read(file, 4 * MIB, LENGTH) == Ok(bytes));
    let again = record(&client, "again.mov", 9);
    client.flush(again).expect("another file gets on");
    run(Command::new("swapoff").arg(&path));
    client_flushes(&client, file);
    world.everything_is_written();
    assert!(has_bytes_at(&world, "swap.mov", 1, 4 * MIB));
}

/// Flushes until that succeeds: a daemon retries each second.
fn client_flushes(client: &Connection, file: Handle) {
    let end = Instant::now() + Duration::from_secs(20);
    while let Err(status) = client.flush(file) {
        assert!(Instant::now() < end, "still {status:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Runs swapoff when it is dropped, also if the test fails.
struct Swap(PathBuf);

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).output();
    }
}

#[test]
fn a_file_that_the_limit_of_the_process_refuses_is_kept_until_it_is_lifted() {
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    // The first write gets the blocks that the second one needs.
    let bytes = pattern::bytes(1, 0, LENGTH);
    client.write(file, 300 * MIB, &bytes).expect("acknowledged");
    client.flush(file).expect("flushed");
    let limit = |bytes: &str| {
        let pid = world.daemon.as_ref().expect("it runs").pid().to_string();
        run(Command::new("prlimit").args([&format!("--fsize={bytes}:"), "--pid", &pid]));
    };
    limit(&(256 * MIB).to_string());
    let bytes = pattern::bytes(2, 0, LENGTH);
    client.write(file, 300 * MIB, &bytes).expect("acknowledged");
    assert!(client.flush(file).is_err(), "it cannot be written");
    world.daemon().wait_for_log("prlimit --fsize=unlimited");
    assert!(client.read(file, 300 * MIB, LENGTH) == Ok(bytes));
    let other = record(&client, "other.mov", 7);
    client.flush(other).expect("another file gets on");
    let limit = |bytes: &str| {
        let pid = world.daemon.as_ref().expect("it runs").pid().to_string();
        run(Command::new("prlimit").args([&format!("--fsize={bytes}:"), "--pid", &pid]));
    };
    limit("unlimited");
    client_flushes(&client, file);
    assert!(has_bytes_at(&world, "a.mov", 2, 300 * MIB));

    // A recovery that may not lift the limit.
    let bytes = pattern::bytes(3, 0, LENGTH);
    client.write(file, 300 * MIB, &bytes).expect("acknowledged");
    record(&client, "left.mov", 8);
    world.daemon().kill();
    let fsize = format!("--fsize={}", 256 * MIB);
    let limited = ["prlimit", &fsize, "setpriv", "--bounding-set=-sys_resource"];
    let words = ["a.mov", "File too large", "prlimit --fsize=unlimited"];
    world.recover_fails(&limited, &words);
    assert!(has_bytes_at(&world, "left.mov", 8, 0), "it can be written");
    assert!(has_bytes_at(&world, "a.mov", 2, 300 * MIB), "as it was");
    // A recovery that may lift it does so.
    world.recover_works();
    assert!(has_bytes_at(&world, "a.mov", 3, 300 * MIB));
}

#[test]
fn what_is_longer_than_a_file_can_be_is_not_acknowledged() {
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    let file = record(&client, "a.mov", 1);
    let bytes = pattern::bytes(2, 0, LENGTH);
    // The last block of an ext4 of 4 KiB is the one before 16 TiB.
    for at in [(16 << 40) - 4096, (16 << 40) + 4096, 1 << 50] {
        let written = client.write(file, at, &bytes);
        assert!(written.is_err(), "acknowledged at {at}");
    }
    client
        .flush(file)
        .expect("what was acknowledged is written");
    assert!(has_bytes_at(&world, "a.mov", 1, 0));
    client
        .write(file, 0, &bytes)
        .expect("it is a file as before");
    client.flush(file).expect("flushed");
    assert!(has_bytes_at(&world, "a.mov", 2, 0));
    client.close(file).expect("closed");
    world.everything_is_written();
    assert!(world.daemon().end().success(), "nothing is left");
}

#[test]
fn a_file_made_append_only_is_kept_by_the_next_daemon_until_it_is_not() {
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    let path = world.path("a.mov");
    let chattr = |how: &str| run(Command::new("chattr").arg(how).arg(&path));
    let file = record(&client, "a.mov", 1);
    chattr("+a");
    client.flush(file).expect("who has it open writes on");
    assert!(has_bytes_at(&world, "a.mov", 1, 0));
    let bytes = pattern::bytes(2, 0, LENGTH);
    client.write(file, 0, &bytes).expect("acknowledged");
    let words = ["Operation not permitted", "chattr -a"];
    nobody_else_suffers(&mut world, &client, "a.mov", &words);
    assert!(has_bytes_at(&world, "a.mov", 1, 0), "as it was");
    world.daemon().start_again();
    let notes = world.daemon().status()["daemon"]["notes"].to_string();
    assert!(notes.contains("Operation not permitted"), "{notes}");
    // Clients read the acknowledged bytes, and other files are written.
    let (again, _) = client.open_to_read("a.mov").expect("opened");
    assert!(client.read(again, 0, LENGTH) == Ok(bytes));
    let other = record(&client, "again.mov", 9);
    client.flush(other).expect("another file gets on");
    chattr("-a");
    wait_until_nothing_is_left(&mut world);
    assert!(has_bytes_at(&world, "a.mov", 2, 0));
}

/// A program on the server, which ends when it is dropped.
struct Running(Child);

impl Running {
    /// The kernel runs no file that a process has open for writing, and requests of a daemon that
    /// was killed hold its files open for a moment.
    fn start(path: &Path) -> Running {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            match Command::new(path).arg("600").spawn() {
                Ok(child) => return Running(child),
                Err(error) => assert!(Instant::now() < end, "{}: {error}", path.display()),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The kernel runs no program whose file a daemon has open for writing, so only the next daemon
/// meets one.
#[test]
fn a_program_that_runs_is_kept_until_it_ends() {
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    let program = fs::read(path_of("sleep")).expect("coreutils");
    let end = program.len() as u64;
    let (file, _) = client.open("tool", Disposition::OpenIf).expect("made");
    for (number, part) in program.chunks(REQUEST_MAX).enumerate() {
        let at = (number * REQUEST_MAX) as u64;
        client.write(file, at, part).expect("acknowledged");
    }
    client.flush(file).expect("flushed");
    let bytes = pattern::bytes(1, 0, LENGTH);
    client.write(file, end, &bytes).expect("acknowledged");
    client.close(file).expect("closed");
    record(&client, "left.mov", 8);
    world.daemon().kill();
    let path = world.path("tool");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
    let running = Running::start(&path);
    world.recover_fails(&[], &["tool", "Text file busy", "end the program"]);
    assert!(has_bytes_at(&world, "left.mov", 8, 0), "it can be written");
    world.daemon().start_again();
    let notes = world.daemon().status()["daemon"]["notes"].to_string();
    assert!(notes.contains("Text file busy"), "{notes}");
    // Clients see what was acknowledged, and others get on.
    let (again, info) = client.open_to_read("tool").expect("opened");
    assert_eq!(info.size, end + LENGTH as u64);
    assert!(client.read(again, end, LENGTH) == Ok(bytes));
    let other = record(&client, "again.mov", 9);
    client.flush(other).expect("another file gets on");
    drop(running);
    wait_until_nothing_is_left(&mut world);
    assert!(has_bytes_at(&world, "tool", 1, end));
    let found = fs::read(&path).expect("it is there");
    assert!(found[..program.len()] == program, "the program itself");
}

/// Root without CAP_DAC_OVERRIDE writes no file of another user.
#[test]
fn a_file_that_a_recovery_may_not_write_is_kept_until_another_may() {
    if !all_there(&[Need::Program("setpriv")]) {
        return;
    }
    let Some(mut world) = world() else {
        return;
    };
    // Everybody may write this one.
    world.put("free.mov", 5, LENGTH);
    let client = client(&world);
    record(&client, "free.mov", 8);
    record(&client, "a.mov", 1);
    world.daemon().kill();
    let limited = ["setpriv", "--bounding-set=-dac_override"];
    let words = ["a.mov", "Permission denied", "rushes.service"];
    world.recover_fails(&limited, &words);
    assert!(has_bytes_at(&world, "free.mov", 8, 0), "it can be written");
    assert!(!has_bytes_at(&world, "a.mov", 1, 0), "it cannot");
    world.recover_works();
    assert!(has_bytes_at(&world, "a.mov", 1, 0));
}

/// The key of an encrypted folder: made for it, given to the kernel again, and taken away until no
/// file is in use.
const FSCRYPT: &str = r#"
import fcntl, os, struct, sys, time
ADD, REMOVE, SET = 0xC0506617, 0xC0406618, 0x800C6613
word, mount, folder = sys.argv[1:]
fd = os.open(mount, os.O_RDONLY)
key = bytearray(struct.pack("=II32sII8I", 2, 0, bytes(32), 64, *[0] * 9) + bytes(range(64)))
fcntl.ioctl(fd, ADD, key)
name = bytes(key[8:24])
if word == "set":
    policy = bytearray(struct.pack("=8B16s", 2, 1, 4, 3, 0, 0, 0, 0, name))
    fcntl.ioctl(os.open(folder, os.O_RDONLY), SET, policy)
if word == "remove":
    for _ in range(100):
        key = bytearray(struct.pack("=II16s16s6I", 2, 0, name, bytes(16), *[0] * 6))
        fcntl.ioctl(fd, REMOVE, key)
        if struct.unpack_from("=I", key, 40) == (0,):
            sys.exit()
        time.sleep(0.1)
    sys.exit("files are in use")
"#;

#[test]
fn a_file_whose_key_is_not_there_is_kept_until_it_is() {
    if !all_there(&[Need::Program("python3")]) {
        return;
    }
    let mkfs = &["mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "encrypt"];
    let Some(mut world) = world_on(Backing::Small(mkfs)) else {
        return;
    };
    let folder = world.path("locked");
    fs::create_dir(&folder).expect("ours");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("ours");
    let mount = world.path("");
    let key = |word: &str| {
        let mut command = Command::new(path_of("python3"));
        run(command.args(["-c", FSCRYPT, word]).args([&mount, &folder]));
    };
    key("set");
    let client = client(&world);
    let file = record(&client, "locked\\a.mov", 1);
    client.close(file).expect("closed");
    record(&client, "left.mov", 8);
    world.daemon().kill();
    key("remove");
    world.recover_fails(&[], &["Required key not available"]);
    assert!(has_bytes_at(&world, "left.mov", 8, 0), "it can be written");
    key("add");
    world.recover_works();
    assert!(has_bytes_at(&world, "locked/a.mov", 1, 0));
}

/// A daemon of two pools has bytes for one of them that it cannot write: fsck checks the other one
/// all the same.
#[test]
fn a_pool_that_is_not_concerned_is_looked_through_meanwhile() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100)]) else {
        return;
    };
    let folders = ["second", "its-member"].map(|name| world.disk(name, (EXT4, 64)));
    let rushes = |words: &[&str]| {
        let mut command = Command::new(path_of("rushes"));
        command.args(words).stdin(Stdio::null());
        command
    };
    run(rushes(&["pool", "create"]).args(&folders));
    let members = [world.member(0).join("pool"), folders[1].clone()];
    let mut daemon = Daemon::start(&world.scratch, &DaemonSpec::of_members(members));
    let run_dir = world.scratch.folder("run");
    let mount = world.scratch.folder("second-mnt");
    let mut second = rushes(&["pool", "mount"])
        .arg(&folders[0])
        .arg(&mount)
        .arg("--runtime-dir")
        .arg(&run_dir)
        .stdout(Stdio::piped())
        .spawn()
        .expect("built");
    let mut line = String::new();
    let output = second.stdout.take().expect("piped");
    BufReader::new(output).read_line(&mut line).expect("a line");
    assert!(line.contains(" is mounted on "), "{line}");
    daemon.wait_for_members(2);
    let write = |path: &Path, seed: u64| {
        let file = File::create(path).expect("made");
        let bytes = pattern::bytes(seed, 0, LENGTH);
        file.write_all_at(&bytes, 0).expect("taken");
        file
    };
    write(&mount.join("b.mov"), 2).sync_all().expect("synced");
    run(Command::new("umount").arg(&mount));
    assert!(second.wait().expect("ours").success());

    let file = write(&world.path("a.mov"), 1);
    file.sync_all().expect("synced");
    let found = world.where_is("a.mov");
    let object = world.object_of(&found["segments"][0]);
    let chattr = |how: &str| run(Command::new("chattr").arg(how).arg(&object));
    let bytes = pattern::bytes(3, 0, LENGTH);
    file.write_all_at(&bytes, 0).expect("taken");
    chattr("+i");
    assert!(file.sync_all().is_err(), "it cannot be written");
    daemon.kill();
    drop(file);
    world.kill();
    let _ = Command::new("umount")
        .arg("--lazy")
        .arg(world.path(""))
        .output();
    let fsck = |catalogue: &Path| {
        let output = rushes(&["pool", "fsck"]).arg(catalogue).output();
        output.expect("built")
    };
    let recover = || {
        let config = world.scratch.path().join("rushes.toml");
        let output = rushes(&["recover", "--config"]).arg(config).output();
        output.expect("built")
    };
    for _ in 0..2 {
        let checked = fsck(&folders[0]);
        assert!(checked.status.success(), "{}", said(&checked));
        let checked = fsck(&world.catalogue());
        assert!(!checked.status.success(), "{}", said(&checked));
        let recovered = recover();
        let text = said(&recovered);
        assert_eq!(recovered.status.code(), Some(1), "{text}");
        assert!(text.contains("Operation not permitted"), "{text}");
    }
    chattr("-i");
    let recovered = recover();
    assert!(recovered.status.success(), "{}", said(&recovered));
    let checked = fsck(&world.catalogue());
    assert!(checked.status.code().is_some_and(|code| code <= 1));
    assert!(!said(&checked).contains("recover"), "{}", said(&checked));
    let mut found = vec![0; LENGTH];
    let object = File::open(&object).expect("it is there");
    object.read_exact_at(&mut found, 0).expect("all of it");
    assert!(found == bytes);
}
