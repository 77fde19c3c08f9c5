// SPDX-License-Identifier: Apache-2.0
//! Reads that the kernel does straight from an object, and writes past its cache: all programs see
//! the same bytes.

use rushes_tests::mapper::{Mapper, hex};
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, PoolWorld, XFS, check, put};
use rustix::fs::{FallocateFlags, OFlags};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Of memory and offsets of a read or a write with O_DIRECT. Units: bytes.
const DIRECT_ALIGN: usize = 4096;
/// Bytes that the mount reads for itself meanwhile, at most: layouts, requests.
const OWN_BYTES: u64 = 64 << 10;

fn writer(path: &Path) -> File {
    File::options().write(true).open(path).expect("there")
}

/// Opens a file that the kernel then reads itself. The kernel tells the mount of a close a moment
/// after it: an open before that gets no passthrough.
fn passed(world: &PoolWorld, name: &str) -> File {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let mut file = File::open(world.path(name)).expect("there");
        let length = file.metadata().expect("known").len();
        let before = world.read_by_mount();
        std::io::copy(&mut file, &mut std::io::sink()).expect("read");
        let read = world.read_by_mount() - before;
        if read < OWN_BYTES.min(length) {
            file.rewind().expect("a file");
            return file;
        }
        assert!(Instant::now() < end, "{name}: the mount read {read} bytes");
        drop(file);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// All bytes that a reader gets, from the start on.
fn seen(file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut file = file;
    file.seek(SeekFrom::Start(0)).expect("a file");
    file.read_to_end(&mut bytes).expect("read");
    bytes
}

#[test]
fn a_file_that_is_only_read_is_read_by_the_kernel_itself() {
    for made in [(EXT4, 64), (XFS, 300), (BTRFS, 120)] {
        let Some(mut world) = PoolWorld::build(&[made]) else {
            return;
        };
        let length = 5 * MIB + 17;
        put(&world.path("f"), 1, length).expect("there is room");
        let one = passed(&world, "f");
        pattern::check(1, 0, &seen(&one), "f");
        let other = passed(&world, "f");
        // With an empty cache of the kernel, after the other open was closed.
        drop(one);
        rushes_tests::caches::drop("3");
        pattern::check(1, 0, &seen(&other), "f");
        // A copy inside the kernel goes through the mount, and is whole.
        drop(other);
        fs::copy(world.path("f"), world.path("copy")).expect("there is room");
        check(&world.path("copy"), 1, length);
        // A program has it open for writing: the mount sees each read.
        let file = writer(&world.path("f"));
        let before = world.read_by_mount();
        check(&world.path("f"), 1, length);
        assert!(world.read_by_mount() - before > length as u64);
        drop(file);
        // The kernel executes a program from there.
        fs::copy("/bin/true", world.path("true")).expect("there is room");
        let ran = Command::new(world.path("true")).status();
        assert!(ran.expect("it starts").success());
        world.end_and_assert_sound();
    }
}

#[test]
fn who_reads_by_passthrough_sees_what_others_write_cut_and_add() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    put(&world.path("f"), 1, 2 * MIB).expect("there is room");
    let mut expected = pattern::bytes(1, 0, 2 * MIB);
    let reader = passed(&world, "f");
    let must_see = |expected: &[u8], context: &str| {
        assert!(seen(&reader) == expected, "{context}");
        assert_eq!(
            reader.metadata().expect("known").len(),
            expected.len() as u64,
            "{context}"
        );
        assert!(
            fs::read(world.path("f")).expect("read") == expected,
            "{context}, opened anew"
        );
    };
    let file = writer(&world.path("f"));
    file.write_all_at(b"middle", 777_777).expect("room");
    expected[777_777..777_783].copy_from_slice(b"middle");
    must_see(&expected, "written over");
    file.write_all_at(b"behind the end", 3 << 20).expect("room");
    expected.resize(3 << 20, 0);
    expected.extend(b"behind the end");
    must_see(&expected, "written behind the end");
    file.set_len(MIB as u64 + 3).expect("cut");
    expected.truncate(MIB + 3);
    must_see(&expected, "cut");
    file.set_len(4 << 20).expect("made longer");
    expected.resize(4 << 20, 0);
    must_see(&expected, "made longer");
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 4 << 20, 1 << 20).expect("room");
    expected.resize(5 << 20, 0);
    must_see(&expected, "reserved");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 4096, 65536).expect("punched");
    expected[4096..4096 + 65536].fill(0);
    must_see(&expected, "punched");
    drop(file);
    // As programs save: truncated to nothing, then written anew.
    fs::write(world.path("f"), "anew").expect("room");
    must_see(b"anew", "written anew");
    // A program that reads and writes beside it.
    let both = File::options()
        .read(true)
        .write(true)
        .open(world.path("f"))
        .expect("there");
    both.write_all_at(b"by both", 100).expect("room");
    let mut expected = b"anew".to_vec();
    expected.resize(100, 0);
    expected.extend(b"by both");
    must_see(&expected, "by one who reads and writes");
    assert!(seen(&both) == expected, "the writer sees its own bytes");
    both.sync_all().expect("synced");
    drop(both);
    let mut appended = File::options()
        .append(true)
        .open(world.path("f"))
        .expect("there");
    appended.write_all(b", appended").expect("room");
    expected.extend(b", appended");
    must_see(&expected, "appended");
    drop((appended, reader));
    world.end_and_assert_sound();
    world.start();
    assert!(fs::read(world.path("f")).expect("read") == expected);
}

#[test]
fn who_has_it_open_keeps_a_file_that_loses_its_name() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    for (seed, name) in ["removed", "replaced", "new"].into_iter().enumerate() {
        put(&world.path(name), seed as u64, MIB).expect("there is room");
    }
    let (removed, replaced) = (passed(&world, "removed"), passed(&world, "replaced"));
    fs::remove_file(world.path("removed")).expect("removed");
    fs::rename(world.path("new"), world.path("replaced")).expect("renamed");
    rushes_tests::caches::drop("3");
    pattern::check(0, 0, &seen(&removed), "removed");
    pattern::check(1, 0, &seen(&replaced), "replaced");
    check(&world.path("replaced"), 2, MIB);
    assert_eq!(removed.metadata().expect("known").nlink(), 0);
    drop((removed, replaced));
    world.end_and_assert_sound();
}

/// Drains a member: all but `kept`, which its reader keeps there until `let_go`, then that, too.
fn emptied_beside(world: &PoolWorld, member: u64, kept: &str, other: &str, let_go: impl FnOnce()) {
    let mut drain = world.command(&["drain", &member.to_string()], &[]);
    let mut drain = drain.stdout(Stdio::null()).spawn().expect("rushes starts");
    let end = Instant::now() + Duration::from_secs(60);
    while world.members_of(other).contains(&member) {
        assert!(Instant::now() < end, "{other} stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        world.members_of(kept),
        [member],
        "{kept} waits for its reader"
    );
    assert_eq!(drain.try_wait().expect("ours"), None);
    let_go();
    assert_eq!(drain.wait().expect("ours").code(), Some(0));
    assert_eq!(world.members_of(kept), [1 - member]);
}

#[test]
fn a_file_that_is_read_by_passthrough_is_moved_when_nobody_has_it_any_more() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    let length = 3 * MIB + 5;
    put(&world.path("kept"), 1, length).expect("there is room");
    let home = world.members_of("kept")[0];
    let mut other = 0;
    while !world.path("other").exists() || world.members_of("other") != [home] {
        let _ = fs::remove_file(world.path("other"));
        put(&world.path("other"), 2, MIB).expect("there is room");
        // One more file, or two: members that are equally full take turns.
        for number in 0..=other % 2 {
            let name = format!("more{other}.{number}");
            put(&world.path(name), 3, MIB).expect("there is room");
        }
        other += 1;
        assert!(other < 10, "the emptier member gets the next file");
    }
    let reader = passed(&world, "kept");
    emptied_beside(&world, home, "kept", "other", || {
        pattern::check(1, 0, &seen(&reader), "kept");
        drop(reader);
    });
    check(&world.path("kept"), 1, length);
    // Back to the first member; this time the file is closed, and mapped.
    let (report, code) = world.json(&["drain", &home.to_string(), "--cancel"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let mut mapper = Mapper::new(&world.path("kept"), "r");
    emptied_beside(&world, 1 - home, "kept", "other", || {
        let expected = pattern::bytes(1, 2 << 20, 64);
        assert_eq!(mapper.sees(2 << 20, 64), hex(&expected));
        // The mapping sees a write, although it has no open file any more.
        rushes_tests::caches::drop("3");
        let file = writer(&world.path("kept"));
        file.write_all_at(b"new", 12345).expect("room");
        assert_eq!(mapper.sees(12345, 3), hex(b"new"));
        drop(file);
        drop(mapper);
    });
    let mut expected = pattern::bytes(1, 0, length);
    expected[12345..12348].copy_from_slice(b"new");
    assert!(fs::read(world.path("kept")).expect("read") == expected);
    world.end_and_assert_sound();
}

#[test]
fn stores_through_a_mapping_and_writes_past_the_cache_are_seen_by_everybody() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    for name in ["passed", "cached"] {
        put(&world.path(name), 1, MIB).expect("there is room");
        let mut expected = pattern::bytes(1, 0, MIB);
        // Beside a writer, readers use the kernel's cache.
        let first = (name == "cached").then(|| writer(&world.path(name)));
        let reader = File::open(world.path(name)).expect("there");
        assert!(seen(&reader) == expected, "{name}");
        let old = fs::metadata(world.path(name)).expect("known");
        let mut mapper = Mapper::new(&world.path(name), "w");
        let mut watcher = Mapper::new(&world.path(name), "r");
        assert_eq!(watcher.sees(5000, 4), hex(&expected[5000..5004]));
        mapper.stores(5000, b"stored");
        expected[5000..5006].copy_from_slice(b"stored");
        assert_eq!(watcher.sees(5000, 6), hex(b"stored"), "{name}");
        let file = writer(&world.path(name));
        // A write of a part of a page, over and beside bytes that were just stored there.
        file.write_all_at(b"written", 5003).expect("room");
        expected[5003..5010].copy_from_slice(b"written");
        assert_eq!(watcher.sees(5000, 10), hex(&expected[5000..5010]), "{name}");
        assert!(seen(&reader) == expected, "{name}");
        drop(first);
        drop((mapper, watcher, file));
        assert!(seen(&reader) == expected, "{name}");
        drop(reader);
        assert!(
            fs::read(world.path(name)).expect("read") == expected,
            "{name}"
        );
        let new = fs::metadata(world.path(name)).expect("known");
        assert!(
            (new.mtime(), new.mtime_nsec()) > (old.mtime(), old.mtime_nsec()),
            "{name}: its time"
        );
    }
    // A mapping alone: its store comes after the close of its file.
    put(&world.path("f"), 2, MIB).expect("there is room");
    let reader = passed(&world, "f");
    let mut mapper = Mapper::new(&world.path("f"), "w");
    drop(reader);
    let other = File::options()
        .read(true)
        .write(true)
        .open(world.path("f"))
        .expect("there");
    assert_eq!(seen(&other).len(), MIB);
    mapper.stores(99, b"late");
    assert_eq!(&seen(&other)[99..103], b"late");
    drop((other, mapper));
    passed(&world, "f");
    world.end_and_assert_sound();
}

/// The time of the last change, as a stat returns it now. Units: seconds, nanoseconds.
fn changed(path: &Path) -> (i64, i64) {
    let found = fs::metadata(path).expect("known");
    (found.mtime(), found.mtime_nsec())
}

fn set_changed(path: &Path, seconds: u64) {
    let time = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    let file = File::open(path).expect("there");
    file.set_modified(time).expect("ours");
}

#[test]
fn a_file_that_is_stored_to_without_the_mount_is_never_older_than_its_bytes() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    for made in [(EXT4, 64), (XFS, 300), (BTRFS, 120)] {
        let Some(mut world) = PoolWorld::build(&[made]) else {
            return;
        };
        let path = world.path("f");
        put(&path, 1, MIB).expect("there is room");
        set_changed(&path, 1000);
        let reader = passed(&world, "f");
        // A program that may store and does not leaves the time as it was set.
        drop(File::options().read(true).write(true).open(&path));
        drop(writer(&path));
        assert_eq!(changed(&path), (1000, 0));
        let mut mapper = Mapper::new(&path, "w");
        assert_eq!(changed(&path), (1000, 0));
        let mut last = changed(&path);
        let mut must_be_later = |context: &str| {
            let now = changed(&path);
            assert!(now > last, "{context}: {now:?} after {last:?}");
            // A listing has the same time.
            let listed = fs::read_dir(world.path("")).expect("listed");
            let mut listed = listed.map(|entry| entry.expect("one").metadata().expect("known"));
            let listed = listed.next().expect("it");
            assert_eq!((listed.mtime(), listed.mtime_nsec()), now, "{context}");
            last = now;
        };
        mapper.stores(5000, b"stored");
        must_be_later("at once");
        mapper.flushes();
        mapper.stores(5000, b"again");
        must_be_later("again");
        drop(reader);
        mapper.flushes();
        mapper.stores(9000, b"nobody has it open");
        must_be_later("after the last close");
        mapper.flushes();
        set_changed(&path, 2000);
        assert_eq!(changed(&path), (2000, 0), "as it was given");
        // No stat comes before the mapping is gone and the kernel has forgotten the file.
        mapper.stores(9000, b"at last");
        drop(mapper);
        rushes_tests::caches::drop("3");
        assert!(changed(&path) > (2000, 0), "when it is forgotten");
        let last = changed(&path);
        drop(passed(&world, "f"));
        assert_eq!(changed(&path), last);
        // No stat comes before the mount ends.
        let reader = passed(&world, "f");
        let mut mapper = Mapper::new(&path, "w");
        drop(reader);
        mapper.stores(100, b"the end");
        drop(mapper);
        world.end();
        world.start();
        assert!(changed(&path) > last, "when the mount has ended");
        world.end_and_assert_sound();
    }
}

#[test]
fn a_file_that_goes_on_elsewhere_beside_its_reader_is_whole_for_who_opens_it_then() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 24), (EXT4, 100)]) else {
        return;
    };
    // Put a file onto the smaller member, with the larger one full.
    let (filler, _) = world.fill("filler", 9, 200 << 20);
    drop(filler);
    fs::remove_file(world.path("filler")).expect("removed");
    let end = Instant::now() + Duration::from_secs(30);
    while rustix::fs::statvfs(world.member(1))
        .expect("mounted")
        .f_bavail
        < 20_000
    {
        assert!(Instant::now() < end, "its room does not come back");
        std::thread::sleep(Duration::from_millis(20));
    }
    let ballast = world.member(1).join("ballast");
    rustix::fs::fallocate(
        File::create(&ballast).expect("made"),
        FallocateFlags::empty(),
        0,
        70 << 20,
    )
    .expect("room");
    let mut length = 8 * MIB;
    let mut small = None;
    for number in 0..4 {
        let name = format!("f{number}");
        put(&world.path(&name), 1, length).expect("there is room");
        if world.members_of(&name) == [0] {
            small = Some(name);
            break;
        }
    }
    let name = small.expect("one is on the smaller member");
    fs::remove_file(&ballast).expect("removed");
    let reader = passed(&world, &name);
    let mut file = File::options()
        .append(true)
        .open(world.path(&name))
        .expect("there");
    while world.members_of(&name) == [0] {
        file.write_all(&pattern::bytes(1, length as u64, MIB))
            .expect("there is room elsewhere");
        length += MIB;
        assert!(length < 60 * MIB, "the smaller member never fills");
    }
    let found = seen(&reader);
    assert!(found.len() >= 8 * MIB && found.len() < length);
    pattern::check(1, 0, &found, "to where its object ends");
    // Opened beside the reader, and after it.
    check(&world.path(&name), 1, length);
    drop(reader);
    check(&world.path(&name), 1, length);
    let reader = File::open(world.path(&name)).expect("there");
    fs::write(world.path(&name), "short").expect("room");
    assert_eq!(seen(&reader), b"short");
    drop((reader, file));
    world.end_and_assert_sound();
}

#[test]
fn writing_past_the_cache_is_as_on_any_disk() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 64)]) else {
        return;
    };
    // Two programs append: each record is whole, none is lost.
    const RECORD_COUNT: usize = 300;
    const RECORD_BYTES: usize = 5003;
    File::create(world.path("log")).expect("made");
    std::thread::scope(|scope| {
        for letter in [b'a', b'b'] {
            let path = world.path("log");
            scope.spawn(move || {
                let mut file = File::options().append(true).open(path).expect("there");
                for _ in 0..RECORD_COUNT {
                    file.write_all(&[letter; RECORD_BYTES]).expect("room");
                }
            });
        }
    });
    let log = fs::read(world.path("log")).expect("read");
    assert_eq!(log.len(), 2 * RECORD_COUNT * RECORD_BYTES);
    let records: Vec<&[u8]> = log.chunks(RECORD_BYTES).collect();
    for letter in [b'a', b'b'] {
        let whole = |record: &&&[u8]| record.iter().all(|byte| *byte == letter);
        assert_eq!(records.iter().filter(whole).count(), RECORD_COUNT);
    }
    // Limits and short writes.
    let limited = |folder: &Path| {
        let script =
            "ulimit -f 64; trap '' XFSZ; dd if=/dev/zero of=\"$0\" bs=10000 count=100 2>/dev/null";
        let path = folder.join("limited");
        let status = Command::new("bash")
            .args(["-c", script])
            .arg(&path)
            .status()
            .expect("bash");
        (status.code(), fs::metadata(&path).expect("made").len())
    };
    assert_eq!(limited(&world.path("")), limited(&world.member(0)));
    fs::remove_file(world.member(0).join("limited")).expect("ours");
    // By sendfile: from page to page, through a pipe in the kernel.
    let source = world.scratch.path().join("source");
    fs::write(&source, pattern::bytes(5, 0, 3 * MIB + 1)).expect("room");
    let (from, to) = (
        File::open(&source).expect("there"),
        File::create(world.path("sent")).expect("made"),
    );
    let mut sent = 0;
    while sent < 3 * MIB + 1 {
        sent += rustix::fs::sendfile(&to, &from, None, 3 * MIB + 1 - sent).expect("sent");
    }
    drop(to);
    check(&world.path("sent"), 5, 3 * MIB + 1);
    // In small pieces, and from memory that is not aligned.
    let bytes = pattern::bytes(6, 0, 2 * MIB + 100);
    let mut file = File::create(world.path("odd")).expect("made");
    file.write_all(&bytes[..13]).expect("room");
    file.write_all(&bytes[13..MIB + 7]).expect("room");
    for piece in bytes[MIB + 7..].chunks(4099) {
        file.write_all(piece).expect("room");
    }
    drop(file);
    assert!(fs::read(world.path("odd")).expect("read") == bytes);
    // With O_SYNC, as databases do.
    let made_with = |name: &str, flags: OFlags| {
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(flags.bits() as i32)
            .open(world.path(name))
            .expect("made")
    };
    let synced = made_with("synced", OFlags::SYNC);
    synced.write_all_at(&bytes, 0).expect("room");
    drop(synced);
    assert!(fs::read(world.path("synced")).expect("read") == bytes);
    // With O_DIRECT, as recorders do: from aligned memory, in another order than that of the file,
    // and over bytes that a read has left in the kernel's cache.
    let direct = made_with("direct", OFlags::DIRECT);
    let mut memory = vec![0; 2 * MIB + DIRECT_ALIGN];
    let start = memory.as_ptr().align_offset(DIRECT_ALIGN);
    let aligned = &mut memory[start..start + 2 * MIB];
    for seed in [7, 8] {
        aligned.copy_from_slice(&pattern::bytes(seed, 0, 2 * MIB));
        for at in [MIB, 0] {
            direct
                .write_all_at(&aligned[at..at + MIB], at as u64)
                .expect("room");
        }
        aligned.fill(0);
        direct.read_exact_at(aligned, 0).expect("it is as long");
        pattern::check(seed, 0, aligned, "by the descriptor that wrote it");
        check(&world.path("direct"), seed, 2 * MIB);
    }
    drop(direct);
    check(&world.path("direct"), 8, 2 * MIB);
    world.end_and_assert_sound();
}
