// SPDX-License-Identifier: Apache-2.0
//! The data of a dead daemon when the next one, or `rushes recover`, cannot write all of them yet:
//! it throws none away, writes those that it can, and names the rest with the reason, to be written
//! when that is over. It deletes only the bytes of a file that is proved gone.
//!
//! Runs alone (tests/programs.sh): a kill must come before the daemon has written the bytes by
//! itself.

use rushes_tests::disk::{run, said};
use rushes_tests::fsx::{self, client};
use rushes_tests::needs;
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition};
use rushes_tests::world::{Backing, World};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

const FILES: u64 = 60;
const LENGTH: usize = 20_000;

fn name_of(index: u64) -> String {
    format!("{index}.mov")
}

/// Only the test starts a recovery, not smbd.
fn world() -> Option<World> {
    let mut setup = fsx::setup("64MiB");
    setup.backing = Backing::Ext4;
    setup.share.push(String::from("rushes:recover after = 600"));
    World::build(&setup)
}

fn record(client: &Connection, name: &str, seed: u64) {
    let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
    let bytes = pattern::bytes(seed, 0, LENGTH);
    client.write(file, 0, &bytes).expect("written");
    client.close(file).expect("closed");
}

/// Makes `count` files whose bytes are in a lane alone, and kills the daemon.
fn left(count: u64) -> Option<(World, Connection)> {
    let mut world = world()?;
    let client = client(&world);
    for index in 0..count {
        record(&client, &name_of(index), index);
    }
    world.daemon().kill();
    assert!(world.left_count() >= count / 2, "hardly anything is left");
    Some((world, client))
}

fn has_its_bytes(world: &World, name: &str, seed: u64) -> bool {
    let found = fs::read(world.path(name)).expect("the file is there");
    found == pattern::bytes(seed, 0, LENGTH)
}

fn all_have_their_bytes(world: &World, files: impl Iterator<Item = u64>) {
    let lacking: Vec<u64> = files
        .filter(|&index| !has_its_bytes(world, &name_of(index), index))
        .collect();
    assert_eq!(lacking, [0; 0], "these have not what was acknowledged");
}

fn remount(world: &World, how: &str) {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let mut command = Command::new("mount");
        command.args(["-o", &format!("remount,{how}")]);
        let output = command.arg(world.disk.path()).output().expect("util-linux");
        if output.status.success() {
            return;
        }
        // Requests of a daemon that was killed hold its files open for a moment.
        assert!(Instant::now() < end, "{}", said(&output));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The device that is mounted as its disk.
fn mounted(world: &World) -> String {
    let output = Command::new("findmnt")
        .args(["-n", "-o", "SOURCE"])
        .arg(world.disk.path())
        .output()
        .expect("util-linux");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn notes(status: &Value) -> String {
    let notes = status["daemon"]["notes"].as_array();
    let texts = notes.into_iter().flatten().filter_map(Value::as_str);
    texts.collect::<Vec<&str>>().join("\n")
}

fn wait_until_written(world: &mut World) {
    world.daemon().wait_for("nothing is left", |status| {
        status["write"]["used_bytes"] == 0 && !notes(status).contains("a former daemon")
    });
}

#[test]
fn a_file_system_that_is_read_only_costs_no_byte() {
    let Some((world, _client)) = left(FILES) else {
        return;
    };
    let before = world.left_count();
    remount(&world, "ro");
    // The kernel knows no name of a file that was not looked up since the remount.
    world.recover_fails(
        &[],
        &["60 files", "inode", "Read-only file system", "remount"],
    );
    assert_eq!(world.left_count(), before);
    // The same once more.
    world.recover_fails(&[], &["Read-only file system"]);
    remount(&world, "rw");
    world.recover_works();
    all_have_their_bytes(&world, 0..FILES);
}

#[test]
fn a_daemon_over_a_read_only_file_system_shows_what_is_acknowledged_and_writes_it_when_it_can() {
    let Some((mut world, client)) = left(8) else {
        return;
    };
    remount(&world, "ro");
    world.daemon().start_again();
    let status = world.daemon().status();
    let told = notes(&status);
    assert!(told.contains("Read-only file system"), "{told}");
    assert!(told.contains("8 files"), "{told}");
    for index in 0..8 {
        let opened = client.open_to_read(&name_of(index));
        let (file, info) = opened.expect("opened");
        assert_eq!(info.size, LENGTH as u64);
        let found = client.read(file, 0, LENGTH).expect("read");
        assert!(found == pattern::bytes(index, 0, LENGTH), "{index}");
        client.close(file).expect("closed");
    }
    remount(&world, "rw");
    wait_until_written(&mut world);
    all_have_their_bytes(&world, 0..8);
    record(&client, "after.mov", 77);
    world.everything_is_written();
    assert!(has_its_bytes(&world, "after.mov", 77));
}

#[test]
fn a_daemon_that_is_starting_is_not_taken_for_a_hung_one() {
    let Some((mut world, _client)) = left(6) else {
        return;
    };
    let runtime = world.scratch.folder("run");
    // As a door does that changes a file on its own descriptor: the daemon waits for it.
    let change = File::open(runtime.join("lanes/facts")).expect("a daemon was there");
    change.lock_shared().expect("nobody serves");
    let mut daemon = world.daemon.take().expect("one that is dead");
    let starting = std::thread::spawn(move || {
        daemon.start_again();
        daemon
    });
    until("its socket is open", Duration::from_secs(5), || {
        UnixStream::connect(runtime.join("control.sock")).is_ok()
    });
    let output = world.rushes(&["recover", "--hung-after", "1s"]).output();
    let output = output.expect("rushes was built");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("a daemon serves from"), "{text}");
    assert!(!starting.is_finished(), "it did not wait");
    drop(change);
    world.daemon = Some(starting.join().expect("it has started"));
    wait_until_written(&mut world);
    all_have_their_bytes(&world, 0..6);
}

#[test]
fn few_descriptors_cost_no_byte() {
    let Some((world, _client)) = left(FILES) else {
        return;
    };
    let recover = format!(
        "ulimit -n 64; exec {} recover --config {}",
        needs::path_of("rushes").display(),
        world.scratch.path().join("rushes.toml").display()
    );
    let output = Command::new("sh").args(["-c", &recover]).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(world.left_count(), 0);
    all_have_their_bytes(&world, 0..FILES);
}

#[test]
fn few_descriptors_cost_no_byte_of_what_the_next_daemon_finds() {
    let Some((mut world, _client)) = left(FILES) else {
        return;
    };
    let daemon = world.daemon();
    daemon.descriptor_limit = Some(96);
    daemon.start_again();
    wait_until_written(&mut world);
    assert_eq!(world.left_count(), 0);
    all_have_their_bytes(&world, 0..FILES);
}

#[test]
fn what_is_left_is_told_alike_by_whoever_is_asked() {
    let Some((world, _client)) = left(4) else {
        return;
    };
    let count = world.left_count();
    let list = world.rushes(&["recover", "--list"]).output();
    let list = list.expect("rushes was built");
    assert_eq!(list.status.code(), Some(1), "{}", said(&list));
    let check = world.rushes(&["check"]).output().expect("rushes was built");
    assert_eq!(check.status.code(), Some(1), "{}", said(&check));
    let told = format!("{count} acknowledged writes (");
    assert!(said(&check).contains(&told), "{}", said(&check));
    let absent = world.rushes(&["recover", "--give-up", "99"]).output();
    let absent = said(&absent.expect("rushes was built"));
    assert!(absent.contains("there is no data in a lane 99"), "{absent}");

    let recover = world.rushes(&["recover"]).output();
    let recover = recover.expect("rushes was built");
    let told = format!("left {count} acknowledged writes of 4 files");
    assert!(said(&recover).contains(&told), "{}", said(&recover));
    assert!(recover.status.success(), "{}", said(&recover));
    let list = world.rushes(&["recover", "--list"]).output();
    assert!(list.expect("rushes was built").status.success());
    let check = world.rushes(&["check"]).output().expect("rushes was built");
    assert!(!said(&check).contains("acknowledged writes"));
    all_have_their_bytes(&world, 0..4);
}

#[test]
fn a_file_system_that_is_not_mounted_costs_no_byte() {
    let Some((mut world, client)) = left(4) else {
        return;
    };
    let path = world.disk.path().to_path_buf();
    let source = mounted(&world);
    // Smbd has it mounted in a name space of its own.
    run(Command::new("umount").arg("--lazy").arg(&path));
    let before = world.left_count();
    world.recover_fails(&[], &["is not mounted", "inode"]);
    assert_eq!(world.left_count(), before);
    world.daemon().start_again();
    let told = notes(&world.daemon().status());
    assert!(told.contains("is not mounted"), "{told}");
    // Its clients wait for their acknowledged bytes, or get an error.
    let opened = client.open("0.mov", Disposition::Open);
    if let Ok((file, info)) = opened {
        let found = client.read(file, 0, LENGTH);
        assert!(
            found.is_err() || found == Ok(pattern::bytes(0, 0, LENGTH)),
            "{} bytes of {}",
            found.map_or(0, |found| found.len()),
            info.size
        );
        let _ = client.close(file);
    }
    run(Command::new("mount").arg(&source).arg(&path));
    wait_until_written(&mut world);
    all_have_their_bytes(&world, 0..4);
}

#[test]
fn what_cannot_be_written_keeps_nobody_from_what_can() {
    let Some((world, client)) = left(6) else {
        return;
    };
    let path = world.path("3.mov");
    run(Command::new("chattr").arg("+i").arg(&path));
    world.recover_fails(&[], &["3.mov", "Operation not permitted", "chattr -i"]);
    all_have_their_bytes(&world, (0..6).filter(|&index| index != 3));
    assert_eq!(world.left_count(), 1);
    // Only a client that wants that file waits for it.
    record(&client, "other.mov", 9);
    record(&client, "5.mov", 5);
    assert!(has_its_bytes(&world, "other.mov", 9));
    run(Command::new("chattr").arg("-i").arg(&path));
    world.recover_works();
    all_have_their_bytes(&world, 0..6);
}

#[test]
fn a_file_that_is_gone_keeps_nobody_and_one_that_somebody_has_open_gets_its_bytes() {
    let Some((world, _client)) = left(6) else {
        return;
    };
    let open = File::open(world.path("2.mov")).expect("it is there");
    fs::remove_file(world.path("2.mov")).expect("our own disk");
    fs::remove_file(world.path("4.mov")).expect("our own disk");
    world.recover_works();
    all_have_their_bytes(&world, (0..6).filter(|&index| index != 2 && index != 4));
    let mut found = vec![0; LENGTH];
    open.read_exact_at(&mut found, 0)
        .expect("it has its bytes without a name");
    assert!(found == pattern::bytes(2, 0, LENGTH));
}

/// Some day in 2011. Units: 100 ns since 1601.
const TIME: u64 = 129_400_000_000_000_000;

/// Writes bytes and sets the time, as programs that copy do. `is_timed_first`: most bytes come
/// after the time.
fn record_with_time(client: &Connection, name: &str, seed: u64, is_timed_first: bool) {
    let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
    let bytes = pattern::bytes(seed, 0, LENGTH);
    if is_timed_first {
        client.write(file, 0, &bytes[..100]).expect("written");
        client.set_written(file, TIME).expect("set");
        client.write(file, 100, &bytes[100..]).expect("written");
    } else {
        client.write(file, 0, &bytes).expect("written");
        client.set_written(file, TIME).expect("set");
    }
    client.close(file).expect("closed");
}

fn seconds_of(world: &World, name: &str) -> i64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(world.path(name)).expect("it is there").mtime()
}

/// The same in seconds since 1970.
const TIME_S: i64 = (TIME / 10_000_000) as i64 - 11_644_473_600;

#[test]
fn a_time_that_was_set_survives_the_daemon_whoever_writes_what_it_left() {
    let Some(mut world) = world() else {
        return;
    };
    let client = client(&world);
    for (name, next) in [("one", "recover"), ("two", "serve")] {
        let names: Vec<String> = (0..4).map(|index| format!("{name}-{index}.mov")).collect();
        for (index, name) in names.iter().enumerate() {
            record_with_time(&client, name, index as u64, index % 2 == 1);
        }
        world.daemon().kill();
        assert!(world.left_count() >= 4, "hardly anything is left");
        if next == "recover" {
            world.recover_works();
            world.daemon().start_again();
        } else {
            world.daemon().start_again();
            wait_until_written(&mut world);
            // The daemon sets the time after it has written the bytes.
            let end = Instant::now() + Duration::from_secs(10);
            while !names.iter().all(|name| seconds_of(&world, name) == TIME_S) {
                assert!(Instant::now() < end, "{:?}", seconds_of(&world, &names[0]));
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        for (index, name) in names.iter().enumerate() {
            assert!(has_its_bytes(&world, name, index as u64), "{name}");
            assert_eq!(seconds_of(&world, name), TIME_S, "{name}, {next}");
        }
    }
}

#[test]
fn a_journal_that_fails_costs_no_byte_once_the_file_system_was_checked() {
    a_journal_fails(|world| world.recover_works());
}

#[test]
fn a_journal_that_fails_costs_no_byte_of_what_the_next_daemon_finds() {
    a_journal_fails(|world| {
        world.daemon().start_again();
        wait_until_written(world);
        assert_eq!(world.left_count(), 0);
    });
}

fn a_journal_fails(end: impl FnOnce(&mut World)) {
    let mut setup = fsx::setup("64MiB");
    setup.backing = Backing::Slow;
    setup.share.push(String::from("rushes:recover after = 600"));
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    let client = client(&world);
    let names: Vec<String> = (0..6).map(name_of).collect();
    let files: Vec<_> = names
        .iter()
        .map(|name| client.open(name, Disposition::OpenIf).expect("made").0)
        .collect();
    world.disk.make_cold();
    world.disk.tell("fail write 0 1073741824");
    for (index, file) in files.iter().enumerate() {
        let bytes = pattern::bytes(index as u64, 0, LENGTH);
        client.write(*file, 0, &bytes).expect("it is in memory");
    }
    assert!(client.flush(files[0]).is_err(), "its disk has failed");
    // The kernel finds that out when it writes back its own cache.
    let _ = Command::new("sync")
        .arg("-f")
        .arg(world.disk.path())
        .status();
    world.daemon().kill();
    let before = world.left_count();
    assert!(before >= 6, "{before} writes are left");
    world.recover_fails(&[], &["Read-only file system", "fsck"]);
    assert_eq!(world.left_count(), before);

    let path = world.disk.path().to_path_buf();
    let source = mounted(&world);
    drop(client);
    // Its smbd has the disk mounted as well.
    world.smbd.stop();
    run(Command::new("umount").arg(&path));
    world.disk.tell("clear");
    let checked = Command::new("fsck.ext4")
        .args(["-f", "-y"])
        .arg(&source)
        .output();
    let checked = checked.expect("e2fsprogs");
    assert!(
        matches!(checked.status.code(), Some(0..=2)),
        "{}",
        said(&checked)
    );
    run(Command::new("mount").arg(&source).arg(&path));
    end(&mut world);
    all_have_their_bytes(&world, 0..6);
}

/// A piece of less than a page goes through the kernel's cache, which takes it each time, and
/// returns the disk's error afterwards.
#[test]
fn a_disk_that_refuses_what_the_kernel_took_ends_a_recovery_and_newer_bytes_stay() {
    let mut setup = fsx::setup("64MiB");
    setup.backing = Backing::Slow;
    setup.share.push(String::from("rushes:recover after = 600"));
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let path = world.path("take.mov");
    let offset: u64 = (1 << 20) + 100;
    let place = world.disk.physical(&path, 1 << 20) & !4095;
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let older = pattern::bytes(2, offset, 1000);
    client.write(file, offset, &older).expect("it is in memory");
    world.daemon().kill();
    assert_eq!(world.left_count(), 1);
    world.disk.tell(&format!("fail write {place} 4096"));
    let newer = pattern::bytes(3, offset, 50);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // Over a part of it, while the recovery tries to write it to the disk.
            std::thread::sleep(Duration::from_secs(3));
            client.write(file, offset + 500, &newer)
        });
        let begun = Instant::now();
        world.recover_fails(&[], &["take.mov", "left for the next daemon"]);
        assert!(begun.elapsed() < Duration::from_secs(50), "it ends");
        assert!(!writer.is_finished(), "nobody could keep those bytes");
        world.disk.tell("clear");
        world.recover_works();
        let outcome = writer.join().expect("it has not panicked");
        outcome.expect("now they belong to one process");
    });
    let found = fs::read(&path).expect("the file is there");
    let found = &found[offset as usize..offset as usize + older.len()];
    assert!(found[..500] == older[..500] && found[550..] == older[550..]);
    assert!(found[500..550] == newer);
}
