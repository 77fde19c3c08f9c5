// SPDX-License-Identifier: Apache-2.0
//! An acknowledged write is kept when the disk is full, a device fails, or its writer is killed; a
//! write that cannot be kept is refused before it is acknowledged.

use rushes_tests::disk::{forget, make_cold, run, said};
use rushes_tests::fsx::{client, setup, world};
use rushes_tests::needs::path_of;
use rushes_tests::pattern;
use rushes_tests::smb2::{
    Access, Chunk, Connection, DISK_FULL, Disposition, Handle, QUOTA_EXCEEDED, Status,
};
use rushes_tests::world::{Backing, Setup, World};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 65_536;

/// Free bytes for any user, and those for root alone.
fn room(world: &World) -> (u64, u64) {
    let output = Command::new("stat")
        .args(["-f", "-c", "%S %f %a"])
        .arg(world.disk.path())
        .output()
        .expect("coreutils");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<u64> = text
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let [block, free, available] = numbers.as_slice() else {
        panic!("stat -f says {text:?}");
    };
    (block * available, block * (free - available))
}

/// Flushes until that succeeds: a disk that works again has all bytes by `end`.
fn flush_by(client: &Connection, file: Handle, end: Instant) {
    while client.flush(file).is_err() {
        assert!(Instant::now() < end, "the disk works again");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes several files until the disk is full, then makes room again.
fn a_full_disk(mkfs: &'static [&'static str]) {
    let Some(mut world) = world(Backing::Small(mkfs)) else {
        return;
    };
    let filler = world.path("filler");
    let (available, reserve) = room(&world);
    run(Command::new("fallocate")
        .arg("-l")
        .arg((available - (24 << 20)).to_string())
        .arg(&filler));
    let client = client(&world);
    let names = ["a.mov", "b.mov", "c.mov"];
    let mut written = [0_u64; 3];
    for (index, name) in names.iter().enumerate() {
        let (file, _) = client.open(name, Disposition::OpenIf).expect("made");
        // The last one takes the rest.
        let most = if index == 2 { u64::MAX } else { 4 << 20 };
        while written[index] < most {
            let bytes = pattern::bytes(index as u64, written[index], BLOCK);
            match client.write(file, written[index], &bytes) {
                Ok(()) => written[index] += BLOCK as u64,
                Err(status) => {
                    assert_eq!(status, Status(DISK_FULL), "{name} at {}", written[index]);
                    assert_eq!(index, 2, "{written:?}");
                    break;
                }
            }
            assert!(written[index] < 64 << 20, "the disk is never full");
        }
        client
            .flush(file)
            .expect("what was acknowledged has its room");
        client.close(file).expect("closed");
    }
    world.everything_is_written();
    assert!(written[2] > 1 << 20, "full too early: {written:?}");
    let (_, left) = room(&world);
    assert!(
        left >= reserve / 2,
        "of {reserve} bytes reserved for root {left} are left"
    );
    for (index, name) in names.iter().enumerate() {
        let found = fs::read(world.path(name)).expect("the file is there");
        assert_eq!(found.len() as u64, written[index], "{name}");
        pattern::check(index as u64, 0, &found, name);
    }
    fs::remove_file(&filler).expect("our own disk");
    let (file, _) = client.open("c.mov", Disposition::Open).expect("opened");
    client
        .write(file, written[2], &[7; 1000])
        .expect("there is room again");
    client.close(file).expect("closed");
}

#[test]
fn a_full_ext4_is_told_before_bytes_are_acknowledged_and_roots_reserve_stays() {
    a_full_disk(&["mkfs.ext4", "-q", "-F", "-m", "10"]);
}

#[test]
fn a_full_xfs_is_told_before_bytes_are_acknowledged() {
    a_full_disk(&["mkfs.xfs", "-q", "-f"]);
}

#[test]
fn a_full_btrfs_is_told_before_bytes_are_acknowledged() {
    a_full_disk(&["mkfs.btrfs", "-q", "-f"]);
}

#[test]
fn what_a_killed_smbd_had_acknowledged_is_written() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    const FILES: usize = 8;
    let client = client(&world);
    let acknowledged: Vec<AtomicU64> = (0..FILES).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for (index, acknowledged) in acknowledged.iter().enumerate() {
            let client = &client;
            scope.spawn(move || {
                let name = format!("{index}.mov");
                let (file, _) = client.open(&name, Disposition::OpenIf).expect("made");
                for at in (0_u64..).step_by(BLOCK) {
                    let bytes = pattern::bytes(index as u64, at, BLOCK);
                    if client.try_write(file, at, &bytes).is_err() {
                        return;
                    }
                    acknowledged.store(at + BLOCK as u64, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(700));
        let status = world.daemon().status();
        let pid = status["sessions"][0]["pid"].as_u64().expect("one session");
        run(Command::new("kill").args(["-KILL", &pid.to_string()]));
    });
    world.everything_is_written();
    let mut sum = 0;
    for (index, acknowledged) in acknowledged.iter().enumerate() {
        let acknowledged = acknowledged.load(Ordering::Relaxed);
        let name = format!("{index}.mov");
        let found = fs::read(world.path(&name)).expect("the file is there");
        assert!(
            found.len() as u64 >= acknowledged,
            "{name}: {} of {acknowledged}",
            found.len()
        );
        pattern::check(index as u64, 0, &found, &name);
        sum += acknowledged;
    }
    assert!(sum > 1 << 20, "hardly anything was written: {sum}");
    world.daemon().wait_for("the session is gone", |status| {
        status["sessions"].as_array().is_some_and(Vec::is_empty)
    });
}

/// smbd names the folder of the daemon that it misses; that daemon has named its configuration
/// there.
#[test]
fn smbd_has_the_bytes_of_the_daemon_that_it_misses_written_wherever_that_has_its_folder() {
    let mut setup = setup("64MiB");
    let rushes = path_of("rushes");
    setup.share.push(format!(
        "rushes:recover = {} recover --hung-after 2s",
        rushes.display()
    ));
    setup.share.push(String::from("rushes:recover after = 1"));
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let bytes = pattern::bytes(2, 1 << 20, BLOCK);
    client
        .write(file, 1 << 20, &bytes)
        .expect("it is in memory");
    world.daemon().kill();
    let found = client.read(file, 1 << 20, BLOCK).expect("read");
    assert!(found == bytes, "other bytes");
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert!(
        found[1 << 20..(1 << 20) + BLOCK] == bytes,
        "they were not written"
    );
}

#[test]
fn a_device_that_fails_is_told_and_gets_the_bytes_when_it_works_again() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let place = world.disk.physical(&world.path("take.mov"), 1 << 20) & !4095;
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    world.disk.tell(&format!("fail write {place} 65536"));
    let bytes = pattern::bytes(2, 1 << 20, BLOCK);
    client
        .write(file, 1 << 20, &bytes)
        .expect("it is in memory");
    assert!(client.flush(file).is_err(), "the device has failed");
    let more = pattern::bytes(3, 2 << 20, BLOCK);
    assert!(client.write(file, 2 << 20, &more).is_err(), "told once");
    client.write(file, 2 << 20, &more).expect("and only once");
    assert!(client.flush(file).is_err(), "it is not all there yet");
    let begun = Instant::now();
    assert!(
        client.set_size(file, 3 << 20).is_err(),
        "it would be cut before it has its bytes"
    );
    assert!(
        begun.elapsed() < Duration::from_secs(30),
        "and nobody waits for that"
    );
    // A reader gets the acknowledged bytes, not those of the device.
    assert_eq!(client.read(file, 1 << 20, BLOCK), Ok(bytes.clone()));
    let log = world.daemon().log();
    assert!(log.contains("take.mov"), "it is told loudly:\n{log}");
    let unwritten = |world: &mut World| world.daemon().status()["daemon"]["unwritten"].clone();
    let told = unwritten(&mut world).to_string();
    assert!(
        told.contains("take.mov"),
        "and for as long as it is so: {told}"
    );
    world.disk.tell("clear");
    world.everything_is_written();
    assert_eq!(unwritten(&mut world), serde_json::json!([]));
    client.flush(file).expect("nobody is told of what is over");
    client.write(file, 3 << 20, &more).expect("nor refused");
    client.set_size(file, 5 << 20).expect("nor kept from it");
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert!(found[1 << 20..(1 << 20) + BLOCK] == bytes);
    assert!(found[2 << 20..(2 << 20) + BLOCK] == more);
    client.close(file).expect("closed");
}

#[test]
fn a_second_daemon_on_one_runtime_folder_leaves_the_first_alone() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    client.write(file, 0, &[1; BLOCK]).expect("written");
    let log = world.scratch.path().join("second.log");
    let status = Command::new(rushes_tests::needs::path_of("rushes"))
        .args(["serve", "--config"])
        .arg(world.scratch.path().join("rushes.toml"))
        .stderr(File::create(&log).expect("scratch is writable"))
        .status()
        .expect("rushes was built");
    assert!(!status.success());
    let said = fs::read_to_string(&log).expect("its own log");
    assert!(said.contains("another daemon serves from"), "{said}");
    client
        .write(file, BLOCK as u64, &[2; BLOCK])
        .expect("written");
    client.flush(file).expect("flushed");
    assert!(world.daemon().is_alive());
    let found = fs::read(world.path("a.mov")).expect("the file is there");
    assert_eq!(found.len(), 2 * BLOCK);
}

/// Writes parts of a file through the daemon: one that shares its blocks with a copy, or is
/// compressed.
fn a_file_that_is_not_its_own(mkfs: &'static [&'static str], compressed: bool) {
    let Some(mut world) = world(Backing::Small(mkfs)) else {
        return;
    };
    const LENGTH: usize = 3_000_000;
    if compressed {
        // The file system compresses files that are made in the folder from now on.
        run(Command::new("chattr").arg("+c").arg(world.disk.path()));
    }
    let text = vec![b'x'; LENGTH];
    let path = world.path("take.mov");
    fs::write(&path, &text).expect("the disk has room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("our own disk");
    if !compressed {
        run(Command::new("cp")
            .args(["--reflink=always"])
            .arg(&path)
            .arg(world.path("copy.mov")));
    }
    make_cold(&path);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let mut model = text.clone();
    for (turn, at) in [0, 70_001, 1_500_000, LENGTH - 10, 70_500, LENGTH]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern::bytes(turn as u64 + 9, at as u64, 50_000);
        client.write(file, at as u64, &bytes).expect("written");
        model.resize(model.len().max(at + bytes.len()), 0);
        model[at..at + bytes.len()].copy_from_slice(&bytes);
        let back = client.read(file, at as u64, BLOCK).expect("read");
        assert!(back == model[at..model.len().min(at + BLOCK)]);
        if turn == 3 {
            client.flush(file).expect("flushed");
        }
    }
    client.close(file).expect("closed");
    world.everything_is_written();
    world.wait_for_file("take.mov", &model);
    if !compressed {
        let copy = fs::read(world.path("copy.mov")).expect("the file is there");
        assert!(
            copy == text,
            "the file that shared its blocks keeps its bytes"
        );
    }
}

#[test]
fn who_shares_blocks_on_xfs_keeps_his_bytes() {
    a_file_that_is_not_its_own(&["mkfs.xfs", "-q", "-f", "-m", "reflink=1"], false);
}

#[test]
fn who_shares_blocks_on_btrfs_keeps_his_bytes() {
    a_file_that_is_not_its_own(&["mkfs.btrfs", "-q", "-f"], false);
}

#[test]
fn a_packed_file_on_btrfs_is_written() {
    a_file_that_is_not_its_own(&["mkfs.btrfs", "-q", "-f"], true);
}

#[test]
fn a_device_that_stalls_for_half_a_minute_costs_patience_alone() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let bytes = pattern::bytes(2, 0, BLOCK);
    client.write(file, 0, &bytes).expect("before the stall");
    world.disk.tell("timing on");
    world.disk.tell("stall 30000");
    let begun = Instant::now();
    client
        .write(file, 1 << 20, &bytes)
        .expect("it is in memory");
    assert!(begun.elapsed() < Duration::from_secs(5), "no disk is asked");
    client.flush(file).expect("late, and true");
    assert!(begun.elapsed() > Duration::from_secs(20), "it was stalled");
    world.everything_is_written();
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    assert!(found[..BLOCK] == bytes && found[1 << 20..][..BLOCK] == bytes);
    client.close(file).expect("closed");
}

#[test]
fn what_a_device_still_has_of_a_killed_daemon_never_lands_on_newer_bytes() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    const LENGTH: usize = 4 << 20;
    world.put("take.mov", 1, LENGTH);
    let mut model = pattern::bytes(1, 0, LENGTH);
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let write = |model: &mut [u8], seed: u64, from: usize, to: usize| {
        for at in (from..to).step_by(BLOCK) {
            let bytes = pattern::bytes(seed, at as u64, BLOCK.min(to - at));
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            client.write(file, at as u64, &bytes).expect("in memory");
        }
    };
    write(&mut model, 2, 0, 2 << 20);
    world.disk.tell("timing on");
    world.disk.tell("stall 6000");
    let mut daemon = world.daemon.take().expect("a daemon");
    std::thread::scope(|scope| {
        // The daemon sends the older bytes to the device, which stalls.
        let flush = scope.spawn(|| client.flush(file));
        std::thread::sleep(Duration::from_millis(300));
        write(&mut model, 3, 5_000, 1 << 20);
        daemon.kill();
        daemon.start_again();
        write(&mut model, 4, 100_000, 60_000);
        let back = client.read(file, 0, BLOCK).expect("read");
        assert!(back == model[..BLOCK], "it is in memory");
        assert_eq!(flush.join().expect("no panic"), Ok(()));
    });
    world.daemon = Some(daemon);
    world.everything_is_written();
    let found = fs::read(world.path("take.mov")).expect("the file is there");
    let wrong = found.iter().zip(&model).position(|(a, b)| a != b);
    assert_eq!((found.len(), wrong), (LENGTH, None));
    client.close(file).expect("closed");
}

#[test]
fn a_quota_is_told_before_bytes_are_acknowledged() {
    // A limit of a subvolume, which this kernel enforces. Limits of users on ext4 need
    // CONFIG_QFMT_V2.
    let Some(mut world) = world(Backing::Small(&["mkfs.btrfs", "-q", "-f"])) else {
        return;
    };
    let btrfs = |words: &[&str]| {
        run(Command::new("btrfs").args(words).arg(world.disk.path()));
    };
    btrfs(&["quota", "enable"]);
    btrfs(&["qgroup", "limit", "20M"]);
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    let mut written = 0;
    let refused = loop {
        let bytes = pattern::bytes(5, written, BLOCK);
        match client.write(file, written, &bytes) {
            Ok(()) => written += BLOCK as u64,
            Err(status) => break status,
        }
        assert!(written < 64 << 20, "no limit is kept");
    };
    assert!(
        matches!(refused.0, DISK_FULL | QUOTA_EXCEEDED),
        "{refused:?}"
    );
    client.flush(file).expect("what was acknowledged fits");
    client.close(file).expect("closed");
    world.everything_is_written();
    let found = fs::read(world.path("a.mov")).expect("the file is there");
    // As of any write, a part of the refused one may be there.
    let lengths = written..written + BLOCK as u64;
    assert!(lengths.contains(&(found.len() as u64)), "{}", found.len());
    pattern::check(5, 0, &found, "within the limit");
}

/// A kernel that cannot write back its cache returns the error once to each open file, and takes
/// the bytes for written from then on. The bytes are less than a page, so that they go through that
/// cache.
#[test]
fn what_the_kernel_could_not_write_is_on_the_disk_when_a_flush_is_answered_well() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let path = world.path("take.mov");
    let offset = (1 << 20) + 100;
    let place = world.disk.physical(&path, 1 << 20) & !4095;
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let bytes = pattern::bytes(2, offset, 1000);
    world.disk.tell(&format!("fail write {place} 4096"));
    client.write(file, offset, &bytes).expect("it is in memory");
    world.everything_is_written();
    // The kernel tries to write the bytes, and another program gets the error.
    kernel_loses(&path, offset, &bytes);
    world.disk.tell("clear");
    // The bytes are in the kernel's cache, where a reader without a daemon would find them, and not
    // on the disk.
    let read = client.read(file, offset, bytes.len()).expect("read");
    assert!(read == bytes, "what was acknowledged is read");
    let end = Instant::now() + Duration::from_secs(20);
    flush_by(&client, file, end);
    // The kernel's cache has the bytes in any case; this reads the disk.
    forget(&path);
    let found = fs::read(&path).expect("the file is there");
    let place = offset as usize..offset as usize + bytes.len();
    assert!(found[place] == bytes, "answered well, and not on the disk");
}

/// The next daemon has to write bytes of which a daemon knows that the kernel has lost them. Found
/// by torture, seed 1000, round 27.
#[test]
fn what_the_kernel_could_not_write_is_written_by_the_next_daemon() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let path = world.path("take.mov");
    let place = world.disk.physical(&path, 1 << 20) & !4095;
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    world.disk.tell(&format!("fail write {place} 8192"));
    // Two parts that share a page, and a third one that cuts one of them in two.
    let parts = [(2, 100, 1000), (3, 1100, 4000), (4, 500, 20)];
    let start = 1_u64 << 20;
    for (seed, offset, length) in parts {
        let bytes = pattern::bytes(seed, start + offset, length);
        client.write(file, start + offset, &bytes).expect("taken");
    }
    let end = Instant::now() + Duration::from_secs(20);
    assert!(client.flush(file).is_err(), "the disk fails");
    while !world.daemon().log().contains("could not be flushed") {
        assert!(Instant::now() < end, "{}", world.daemon().log());
        let _ = client.flush(file);
    }
    world.daemon().kill();
    world.disk.tell("clear");
    world.daemon().start_again();
    flush_by(&client, file, end);
    forget(&path);
    let mut expected = pattern::bytes(1, start, 8192);
    for (seed, offset, length) in parts {
        let bytes = pattern::bytes(seed, start + offset, length);
        expected[offset as usize..offset as usize + length].copy_from_slice(&bytes);
    }
    let found = fs::read(&path).expect("the file is there");
    let place = start as usize..start as usize + 8192;
    assert!(
        found[place] == expected,
        "answered well, and not on the disk"
    );
}

/// After a failed write-back of a file Linux sends direct writes to it through its cache, and
/// returns success whatever happens to them there. Found by torture, seed 900, round 15.
fn falls_back(backing: Backing) {
    const MIB: u64 = 1 << 20;
    let Some(mut world) = world(backing) else {
        return;
    };
    world.put("take.mov", 1, 4 << 20);
    let path = world.path("take.mov");
    let place = world.disk.physical(&path, MIB) & !4095;
    let client = client(&world);
    let (file, _) = client.open("take.mov", Disposition::Open).expect("opened");
    let head = pattern::bytes(2, MIB + 100, 1000);
    world.disk.tell(&format!("fail write {place} {BLOCK}"));
    client
        .write(file, MIB + 100, &head)
        .expect("it is in memory");
    world.everything_is_written();
    // As the kernel does by itself in time. After a sync of the file itself the kernel would forget
    // the failure.
    let _ = Command::new("sync").arg("-f").arg(&path).output();
    let bytes = pattern::bytes(3, MIB, BLOCK);
    client.write(file, MIB, &bytes).expect("it is in memory");
    let end = Instant::now() + Duration::from_secs(20);
    let is_tried = |world: &mut World| {
        world.daemon().status()["write"]["used_bytes"] == 0
            || world.daemon().log().contains("failed: Input/output error")
    };
    while !is_tried(&mut world) {
        assert!(Instant::now() < end, "nobody writes it");
        std::thread::sleep(Duration::from_millis(20));
    }
    let read = client.read(file, MIB, BLOCK).expect("read");
    assert!(read == bytes, "what was acknowledged is read");
    world.disk.tell("clear");
    flush_by(&client, file, end);
    forget(&path);
    let found = fs::read(&path).expect("the file is there");
    let place = MIB as usize..MIB as usize + BLOCK;
    assert!(found[place] == bytes, "answered well, and not on the disk");
}

#[test]
fn what_ext4_writes_through_its_cache_unasked_and_loses_is_written_again() {
    falls_back(Backing::Slow);
}

#[test]
fn what_xfs_writes_through_its_cache_unasked_and_loses_is_written_again() {
    falls_back(Backing::SlowXfs);
}

/// The daemon writes bytes again that the kernel could not write from its cache, also if the name
/// by which it knew the file is gone.
#[test]
fn what_the_kernel_could_not_write_is_written_again_though_another_name_of_it_goes() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    let offset = (1 << 20) + 100;
    let bytes = pattern::bytes(2, offset, 1000);
    let other = |name: &str| world.path(&format!("other-{name}"));
    let names = ["removed.mov", "replaced.mov"];
    world.put("next.mov", 3, 1 << 20);
    for name in names {
        world.put(name, 1, 4 << 20);
        fs::hard_link(world.path(name), other(name)).expect("it has two names");
    }
    let others = names.map(other);
    let places = names.map(|name| world.disk.physical(&world.path(name), 1 << 20) & !4095);
    let client = client(&world);
    for (name, place) in names.into_iter().zip(places) {
        world.disk.tell(&format!("fail write {place} 4096"));
        let (file, _) = client.open(name, Disposition::Open).expect("opened");
        client.write(file, offset, &bytes).expect("it is in memory");
        client.close(file).expect("closed");
    }
    world.everything_is_written();
    let (file, _) = client.open(names[0], Disposition::Open).expect("opened");
    client.delete_on_close(file).expect("marked");
    client.close(file).expect("removed");
    let (next, _) = client.open("next.mov", Disposition::Open).expect("opened");
    client.rename(next, names[1]).expect("replaced");
    client.close(next).expect("closed");
    for path in &others {
        kernel_loses(path, offset, &bytes);
    }
    world.disk.tell("clear");
    // No client has them open: the daemon asks the kernel, in time, and writes lost bytes again.
    let end = Instant::now() + Duration::from_secs(90);
    let is_written = |path: &std::path::PathBuf| {
        forget(path);
        let found = fs::read(path).expect("the file is there");
        found[offset as usize..offset as usize + bytes.len()] == bytes
    };
    while !others.iter().all(is_written) {
        assert!(Instant::now() < end, "they were never written again");
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// The kernel takes bytes that it could not write for written, and evicts them at any time: the
/// next reader must not get the disk's older bytes. Found by torture, seed 6000, round 49.
fn lets_go(backing: Backing) {
    let Some(mut world) = world(backing) else {
        return;
    };
    world.put("a.mov", 1, 4 << 20);
    let path = world.path("a.mov");
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::Open).expect("opened");
    for seed in 2..5 {
        let (offset, bytes) = lost_by_the_kernel(&mut world, &client, file, seed);
        let read = client.read(file, offset, 1000).expect("read");
        assert!(read == bytes, "round {seed}: old bytes were read");
        // It succeeds once the failure has been returned.
        let end = Instant::now() + Duration::from_secs(30);
        flush_by(&client, file, end);
        forget(&path);
        let found = fs::read(&path).expect("the file is there");
        assert!(found[offset as usize..offset as usize + 1000] == bytes);
    }
}

#[test]
fn who_reads_what_the_kernel_lost_on_ext4_gets_it_from_us() {
    lets_go(Backing::Slow);
}

#[test]
fn who_reads_what_the_kernel_lost_on_xfs_gets_it_from_us() {
    lets_go(Backing::SlowXfs);
}

/// Makes the kernel lose a few acknowledged bytes of a.mov: only the daemon has them now, and does
/// not know of the loss. Returns  their offset, and the bytes
fn lost_by_the_kernel(
    world: &mut World,
    client: &Connection,
    file: Handle,
    seed: u64,
) -> (u64, Vec<u8>) {
    let path = world.path("a.mov");
    let place = world.disk.physical(&path, 1 << 20) & !4095;
    let offset = (1 << 20) + 100;
    let bytes = pattern::bytes(seed, offset, 1000);
    world.disk.tell(&format!("fail write {place} 4096"));
    client.write(file, offset, &bytes).expect("it is in memory");
    world.everything_is_written();
    kernel_loses(&path, offset, &bytes);
    world.disk.tell("clear");
    (offset, bytes)
}

/// The kernel writes its bytes of a file, on a disk that refuses these bytes, and has only the
/// disk's older ones then.
///
/// The disk must refuse them before they come to the kernel: it may write them at any time, and a
/// `sync` after that succeeds.
fn kernel_loses(path: &std::path::Path, offset: u64, bytes: &[u8]) {
    let _ = Command::new("sync").arg(path).output().expect("coreutils");
    forget(path);
    let mut found = vec![0; bytes.len()];
    let file = File::open(path).expect("the file is there");
    file.read_exact_at(&mut found, offset).expect("read");
    assert!(found != bytes, "this disk loses nothing");
    forget(path);
}

/// The kernel makes the copy, and has only the disk's old bytes.
#[test]
fn a_copy_that_the_server_makes_has_what_the_kernel_lost() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("a.mov", 1, 4 << 20);
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::Open).expect("opened");
    let (offset, bytes) = lost_by_the_kernel(&mut world, &client, file, 2);
    let copy = client.open("copy.mov", Disposition::OpenIf);
    let (copy, _) = copy.expect("made");
    let chunk = Chunk {
        from: offset,
        to: 0,
        length: 1000,
    };
    client.copy(file, copy, &[chunk]).expect("copied");
    let found = client.read(copy, 0, 1000).expect("read");
    assert!(found == bytes, "the copy has what the disk had before");
}

/// smbd itself flushes a handle that writes through, on a descriptor that gets the error of the
/// loss once.
#[test]
fn a_flush_past_the_daemon_is_answered_well_when_the_disk_has_what_the_kernel_lost() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("a.mov", 1, 4 << 20);
    let client = client(&world);
    let through = Access {
        write_through: true,
        ..Access::default()
    };
    let through = client.open_as("a.mov", Disposition::OpenIf, through);
    let through = through.expect("opened");
    let (file, _) = client.open("a.mov", Disposition::Open).expect("opened");
    let (offset, bytes) = lost_by_the_kernel(&mut world, &client, file, 2);
    flush_by(&client, through, Instant::now() + Duration::from_secs(30));
    let path = world.path("a.mov");
    forget(&path);
    let found = fs::read(&path).expect("the file is there");
    assert!(
        found[offset as usize..offset as usize + 1000] == bytes,
        "the flush was answered well, and the disk has what it had before"
    );
}

/// Bytes that smbd wrote by itself are in the kernel's cache, and nowhere else if the disk refuses
/// them: a client that reads through the next daemon gets the same bytes as without one, before the
/// kernel has tried to write them, after that, and when the disk works again. Found by torture,
/// seed 700, round 18.
#[test]
fn what_was_written_without_a_daemon_and_refused_by_the_disk_is_read_from_the_kernels_cache() {
    const LENGTH: usize = 4 << 20;
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("little.mov", 1, 512 << 10);
    world.put("large.mov", 1, LENGTH);
    // Nobody else lets the kernel forget them.
    let _caches = rushes_tests::caches::keep();
    let files = [("little.mov", 100_000), ("large.mov", (1 << 20) + 100)];
    let client = client(&world);
    world.everything_is_written();
    files.iter().for_each(|(name, _)| forget(&world.path(name)));
    world.daemon().end();
    let bytes = |offset: u64| pattern::bytes(2, offset, 60_000);
    let opened = files.map(|(name, offset)| {
        let (file, _) = client.open(name, Disposition::Open).expect("opened");
        let place = world.disk.physical(&world.path(name), 0) & !4095;
        world.disk.tell(&format!("fail write {place} {LENGTH}"));
        client.write(file, offset, &bytes(offset)).expect("taken");
        (file, offset)
    });
    world.daemon().start_again();
    let reads = |world: &mut World| -> u64 {
        let cache = &world.daemon().status()["cache"];
        let of = |name: &str| cache[name].as_u64().expect("a number");
        of("hit_count") + of("miss_count")
    };
    let by_daemon = |world: &mut World, when: &str| {
        let before = reads(world);
        let end = Instant::now() + Duration::from_secs(30);
        while reads(world) < before + 4 {
            assert!(Instant::now() < end, "{when}: the daemon is not asked");
            for (file, offset) in opened {
                let found = client.read(file, offset, 60_000).expect("read");
                assert!(found == bytes(offset), "{when}: not what was acknowledged");
                // The bytes before it are as they were.
                let found = client.read(file, offset - 5000, 5000).expect("read");
                assert!(found == pattern::bytes(1, offset - 5000, 5000), "{when}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    by_daemon(&mut world, "before the kernel has tried");
    for (name, _) in files {
        let synced = Command::new("sync").arg(world.path(name)).output();
        synced.expect("coreutils");
    }
    by_daemon(&mut world, "after the kernel has tried");
    world.disk.tell("clear");
    by_daemon(&mut world, "when the disk works again");
    // The next daemon does not know of the failure either.
    world.daemon().end();
    world.daemon().start_again();
    by_daemon(&mut world, "with another daemon");
}

/// The next daemon cannot write again the bytes that smbd wrote by itself. If the disk refuses
/// them, their writer gets the error, as without a daemon, although another client has got it
/// before. Found by torture, seed 8000, round 37.
#[test]
fn who_wrote_without_a_daemon_hears_that_the_disk_has_not_kept_it() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("a.mov", 1, 1 << 20);
    let path = world.path("a.mov");
    let (one, other) = (client(&world), client(&world));
    let (file, _) = one.open("a.mov", Disposition::Open).expect("opened");
    let (same, _) = other.open("a.mov", Disposition::Open).expect("opened");
    world.everything_is_written();
    world.daemon().end();
    let (offset, bytes) = (100_000, pattern::bytes(2, 100_000, 60_000));
    one.write(file, offset, &bytes).expect("taken");
    world.daemon().start_again();
    let later = pattern::bytes(3, 600_100, 3000);
    let end = Instant::now() + Duration::from_secs(30);
    while world.daemon().status()["write"]["used_bytes"] == 0 {
        assert!(Instant::now() < end, "the daemon takes nothing");
        other.write(same, 600_100, &later).expect("taken");
    }
    let place = world.disk.physical(&path, 0) & !4095;
    world.disk.tell(&format!("fail write {place} {}", 1 << 20));
    assert!(other.flush(same).is_err(), "the disk fails");
    world.disk.tell("clear");
    flush_by(&other, same, Instant::now() + Duration::from_secs(30));
    // With this write the daemon is the one that syncs.
    other.write(same, 600_100, &later).expect("taken");
    assert!(
        one.flush(file).is_err(),
        "its bytes are lost, and it is told that all is well"
    );
    one.write(file, offset, &bytes).expect("taken");
    flush_by(&one, file, Instant::now() + Duration::from_secs(30));
    forget(&path);
    let found = fs::read(&path).expect("the file is there");
    for (offset, bytes) in [(offset, bytes), (600_100, later)] {
        assert!(found[offset as usize..][..bytes.len()] == bytes, "{offset}");
    }
}

/// Makes the runtime folder that of a machine on which no daemon ever ran.
fn remove_runtime_files(world: &World) {
    let run = world.scratch.folder("run");
    for entry in fs::read_dir(&run).expect("it is there").flatten() {
        let left = entry.path();
        let _ = fs::remove_file(&left).or_else(|_| fs::remove_dir_all(&left));
    }
}

/// The same where no daemon had run before the write: the writer's smbd has seen no table of a
/// daemon's facts.
#[test]
fn who_wrote_before_the_first_daemon_hears_that_the_disk_has_not_kept_it() {
    let Some(mut world) = world(Backing::Slow) else {
        return;
    };
    world.put("a.mov", 1, 1 << 20);
    let path = world.path("a.mov");
    world.daemon().end();
    remove_runtime_files(&world);
    let (one, other) = (client(&world), client(&world));
    let (file, _) = one.open("a.mov", Disposition::Open).expect("opened");
    let (same, _) = other.open("a.mov", Disposition::Open).expect("opened");
    let (offset, bytes) = (100_000, pattern::bytes(2, 100_000, 60_000));
    one.write(file, offset, &bytes).expect("taken");
    let place = world.disk.physical(&path, 0) & !4095;
    world.disk.tell(&format!("fail write {place} {}", 1 << 20));
    assert!(other.flush(same).is_err(), "the disk fails");
    world.disk.tell("clear");
    world.daemon().start_again();
    let later = pattern::bytes(3, 600_100, 3000);
    let end = Instant::now() + Duration::from_secs(30);
    while world.daemon().status()["write"]["used_bytes"] == 0 {
        assert!(Instant::now() < end, "the daemon takes nothing");
        one.write(file, 600_100, &later).expect("taken");
    }
    assert!(
        one.flush(file).is_err(),
        "its bytes are lost, and it is told that all is well"
    );
}

/// Fills the file system of `path` to the last byte.
fn fill(path: &std::path::Path) {
    use std::io::Write;
    let mut file = File::create(path).expect("a file without bytes");
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}

#[test]
fn a_full_runtime_folder_costs_no_byte_and_nobody_his_life() {
    let made = World::build(&Setup {
        runtime_bytes: Some(24 << 20),
        ..setup("64MiB")
    });
    let Some(mut world) = made else {
        return;
    };
    let filler = world.scratch.folder("run").join("filler");
    let first = client(&world);
    let (file, _) = first.open("a.mov", Disposition::OpenIf).expect("made");
    let write = |client: &Connection, file, from: usize, to: usize| {
        for at in (from..to).step_by(BLOCK) {
            let bytes = pattern::bytes(1, at as u64, BLOCK);
            let written = client.write(file, at as u64, &bytes);
            written.unwrap_or_else(|status| panic!("at {at}: {status:?}"));
        }
    };
    write(&first, file, 0, 1 << 20);
    fill(&filler);
    write(&first, file, 1 << 20, 16 << 20);
    first.flush(file).expect("it is on the disk");
    let log = world.daemon().log();
    assert!(log.contains("no room"), "it is said:\n{log}");
    // A client that comes now gets no lane, and the daemon expels none.
    let second = client(&world);
    let (other, _) = second.open("b.mov", Disposition::OpenIf).expect("made");
    write(&second, other, 0, 2 << 20);
    second.flush(other).expect("it is on the disk");
    // A next daemon that finds no room does not lose the bytes that this one leaves.
    write(&first, file, 16 << 20, 17 << 20);
    world.daemon().kill();
    world.daemon().start_again();
    write(&first, file, 17 << 20, 18 << 20);
    fs::remove_file(&filler).expect("our own");
    write(&first, file, 18 << 20, 20 << 20);
    write(&second, other, 2 << 20, 4 << 20);
    world.everything_is_written();
    for (name, length) in [("a.mov", 20 << 20), ("b.mov", 4 << 20)] {
        let found = fs::read(world.path(name)).expect("the file is there");
        assert_eq!(found.len(), length, "{name}");
        pattern::check(1, 0, &found, name);
    }
}

/// The first daemon takes the memory of its table from the runtime folder, all of it when it
/// starts.
#[test]
fn a_daemon_without_room_for_its_table_says_so_and_starts_when_there_is_room() {
    let made = World::build(&Setup {
        runtime_bytes: Some(24 << 20),
        ..setup("64MiB")
    });
    let Some(mut world) = made else {
        return;
    };
    assert!(world.daemon().end().success());
    remove_runtime_files(&world);
    let filler = world.scratch.folder("run").join("filler");
    fill(&filler);
    // The table takes 4 MiB.
    let length = fs::metadata(&filler).expect("our own").len();
    let file = File::options().write(true).open(&filler);
    file.and_then(|file| file.set_len(length - (3 << 20)))
        .expect("our own");
    let client = client(&world);
    let (file, _) = client.open("a.mov", Disposition::OpenIf).expect("made");
    let write = |block: usize| {
        let at = (block * BLOCK) as u64;
        let bytes = pattern::bytes(1, at, BLOCK);
        client.write(file, at, &bytes).expect("taken");
    };
    for block in 0..2 {
        let serve = world.rushes(&["serve"]);
        let refused = Command::new("timeout")
            .arg("30")
            .arg(serve.get_program())
            .args(serve.get_args())
            .current_dir(world.scratch.path())
            .output()
            .expect("coreutils");
        let text = said(&refused);
        assert_eq!(refused.status.code(), Some(2), "{text}");
        for words in [
            "4 MiB",
            "run/lanes/facts",
            "No space left on device",
            "remount,size=",
        ] {
            assert!(text.contains(words), "{words:?} in {text}");
        }
        // Samba writes by itself, and leaves nothing to recover.
        write(block);
        client.flush(file).expect("it is on the disk");
        world.wait_for_file("a.mov", &pattern::bytes(1, 0, (block + 1) * BLOCK));
        assert_eq!(world.left_count(), 0);
        let list = world.rushes(&["recover", "--list"]).output();
        let list = list.expect("rushes was built");
        assert!(list.status.success(), "{}", said(&list));
    }
    fs::remove_file(&filler).expect("our own");
    world.daemon().start_again();
    let mut block = 2;
    let end = Instant::now() + Duration::from_secs(30);
    while world.daemon().status()["write"]["write_count"] == 0 {
        assert!(Instant::now() < end, "the daemon takes nothing");
        write(block);
        block += 1;
    }
    world.everything_is_written();
    let found = fs::read(world.path("a.mov")).expect("the file is there");
    assert!(found == pattern::bytes(1, 0, block * BLOCK));
}
