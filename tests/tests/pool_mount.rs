// SPDX-License-Identifier: Apache-2.0
//! A pool through its mount: the work of applications, members of several kinds that fill, vanish
//! and come back, and a mount that is killed.

use rushes_tests::disk::run;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::pool::{BTRFS, EXT4, PoolWorld, XFS};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const EIO: i32 = 5;

/// Makes a file whose pattern differs by its seed and by offset.
fn put(world: &PoolWorld, name: &str, seed: u64, length: usize) {
    let mut file = File::create(world.path(name)).expect("there is room");
    for at in (0..length).step_by(MIB) {
        let bytes = pattern::bytes(seed, at as u64, MIB.min(length - at));
        file.write_all(&bytes).expect("there is room");
    }
    file.sync_all().expect("synced");
}

fn check(world: &PoolWorld, name: &str, seed: u64, length: usize) {
    let mut file = File::open(world.path(name)).expect("it is there");
    assert_eq!(
        file.metadata().expect("known").len(),
        length as u64,
        "{name}"
    );
    for at in (0..length).step_by(MIB) {
        let mut bytes = vec![0; MIB.min(length - at)];
        file.read_exact(&mut bytes).expect("read");
        pattern::check(seed, at as u64, &bytes, name);
    }
}

#[test]
fn a_tree_is_as_it_was_after_its_mount_was_killed_and_after_it_ended() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (XFS, 300), (BTRFS, 120)]) else {
        return;
    };
    let long = "n".repeat(255);
    let strange = OsStr::from_bytes(b"a\xff\nb");
    fs::create_dir(world.path("d")).expect("made");
    fs::write(world.path("d").join(&long), "long").expect("written");
    fs::write(world.path(strange), "strange").expect("written");
    symlink("d", world.path("link")).expect("made");
    for seed in 0..6 {
        put(&world, &format!("clip{seed}.mov"), seed, 3 * MIB + 17);
    }
    let used: Vec<u64> = (0..6)
        .flat_map(|seed| world.members_of(&format!("clip{seed}.mov")))
        .collect();
    assert!(!used.is_empty(), "some member has them");
    fs::hard_link(world.path("clip0.mov"), world.path("d/other.mov")).expect("linked");
    fs::set_permissions(world.path("clip1.mov"), fs::Permissions::from_mode(0o640)).expect("set");
    File::open(world.path("d"))
        .and_then(|folder| folder.sync_all())
        .expect("synced");
    let before = fs::metadata(world.path("clip0.mov")).expect("known");
    assert_eq!(before.nlink(), 2);
    for killed in [true, false] {
        world.start_again(killed);
        for seed in 0..6 {
            check(&world, &format!("clip{seed}.mov"), seed, 3 * MIB + 17);
        }
        let after = fs::metadata(world.path("d/other.mov")).expect("known");
        assert_eq!((after.ino(), after.nlink()), (before.ino(), 2));
        let mode = fs::metadata(world.path("clip1.mov")).expect("known").mode();
        assert_eq!(mode & 0o7777, 0o640);
        assert_eq!(
            fs::read(world.path("link").join(&long)).expect("read"),
            b"long"
        );
        assert_eq!(fs::read(world.path(strange)).expect("read"), b"strange");
        let names = fs::read_dir(world.path("")).expect("listed").count();
        assert_eq!(names, 9);
    }
}

#[test]
fn files_go_on_elsewhere_when_a_member_is_full_and_every_member_is_filled() {
    let Some(world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 90)]) else {
        return;
    };
    let begun = Instant::now();
    let (file, length) = world.fill("long.mov", 3, 200 << 20);
    assert!(
        begun.elapsed() < Duration::from_secs(300),
        "it gave up long ago"
    );
    file.sync_all().expect("what was written fits");
    assert_eq!(world.members_of("long.mov"), [0, 1]);
    for number in 0..2 {
        world.must_be_full(number);
    }
    let mut found = Vec::new();
    File::open(world.path("long.mov"))
        .and_then(|mut file| file.read_to_end(&mut found))
        .expect("read");
    assert_eq!(found.len() as u64, length);
    pattern::check(3, 0, &found, "long.mov");
    // A removed file gives its room back, and the next file gets it.
    drop(file);
    fs::remove_file(world.path("long.mov")).expect("removed");
    let end = Instant::now() + Duration::from_secs(30);
    while rustix::fs::statvfs(world.path(""))
        .expect("mounted")
        .f_bavail
        * 4096
        < 90 << 20
    {
        assert!(Instant::now() < end, "the room does not come back");
        std::thread::sleep(Duration::from_millis(50));
    }
    put(&world, "next.mov", 4, 30 * MIB);
    check(&world, "next.mov", 4, 30 * MIB);
}

#[test]
fn a_copy_ends_where_its_source_cannot_be_read() {
    let Some(world) = PoolWorld::build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    // Two files fill half of each member; the third fills the rest of one and continues on the
    // other.
    for (name, seed) in [("a", 1), ("b", 2)] {
        put(&world, name, seed, 30 * MIB);
    }
    put(&world, "source", 3, 36 * MIB);
    let source = world.where_is("source");
    let segments = source["segments"].as_array().expect("a list");
    assert_eq!(segments.len(), 2, "{source:#}");
    let number = |at: usize, name: &str| segments[at][name].as_u64().expect("a number");
    let member = |at: usize| segments[at]["objects"][0]["member"].as_u64().expect("one");
    let (border, (first, second)) = (number(1, "start"), (member(0), member(1)));
    assert_ne!(first, second);
    // Make room for the copy on the member that stays.
    let on_first = ["a", "b"].map(|name| (name, world.members_of(name) == [first]));
    let (filler, _) = on_first
        .into_iter()
        .find(|(_, is)| *is)
        .expect("one of both");
    fs::remove_file(world.path(filler)).expect("removed");
    let end = Instant::now() + Duration::from_secs(30);
    let room = || {
        let found = rustix::fs::statvfs(world.member(first as usize)).expect("mounted");
        found.f_bavail * found.f_frsize
    };
    while room() < 20 << 20 {
        assert!(Instant::now() < end, "the room does not come back");
        std::thread::sleep(Duration::from_millis(50));
    }
    world.unplug(second as usize);
    let source = File::open(world.path("source")).expect("opened");
    let target = File::create(world.path("target")).expect("made");
    let mut at = border - (5 << 19);
    let copied = rustix::fs::copy_file_range(&source, Some(&mut at), &target, None, 8 * MIB);
    // The mount copies by 1 MiB: the third one has bytes of the missing member.
    assert_eq!(copied, Ok(2 * MIB));
    let copied = rustix::fs::copy_file_range(&source, Some(&mut at), &target, None, 8 * MIB);
    assert_eq!(copied, Err(rustix::io::Errno::IO));
    let found = fs::read(world.path("target")).expect("read");
    assert_eq!(found.len(), 2 * MIB);
    pattern::check(3, border - (5 << 19), &found, "target");
    drop((source, target));
    world.plug(second as usize, "rw");
}

#[test]
fn a_member_that_is_away_costs_what_is_on_it_and_comes_back_without_ceremony() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 120)]) else {
        return;
    };
    // The emptiest member takes a new file.
    put(&world, "on1.mov", 1, 70 * MIB);
    put(&world, "on0.mov", 2, 5 * MIB);
    assert_eq!(world.members_of("on1.mov"), [1]);
    assert_eq!(world.members_of("on0.mov"), [0]);
    world.unplug(1);
    rushes_tests::caches::drop("3");
    let begun = Instant::now();
    let error = fs::read(world.path("on1.mov")).expect_err("it is away");
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert!(begun.elapsed() < Duration::from_secs(5), "at once");
    let known = fs::metadata(world.path("on1.mov")).expect("known all the same");
    assert_eq!(known.len(), 70 * MIB as u64);
    check(&world, "on0.mov", 2, 5 * MIB);
    put(&world, "new.mov", 3, 5 * MIB);
    assert_eq!(world.members_of("new.mov"), [0]);
    world.plug(1, "loop,ro");
    check(&world, "on1.mov", 1, 70 * MIB);
    put(&world, "newer.mov", 5, 20 * MIB);
    assert_eq!(world.members_of("newer.mov"), [0]);
    world.unplug(1);
    world.plug(1, "loop");
    check(&world, "on1.mov", 1, 70 * MIB);
    put(&world, "newest.mov", 6, 5 * MIB);
    let status = world.json(&["status"], &[]);
    assert_eq!(
        world.members_of("newest.mov"),
        [1],
        "{status:?} {}",
        world.log()
    );
    check(&world, "new.mov", 3, 5 * MIB);
}

#[test]
fn layouts_are_nobodys_to_see_or_to_change_and_a_damaged_one_is_an_error() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world, "a.mov", 1, 2 * MIB);
    put(&world, "b.mov", 2, 2 * MIB);
    let said = |words: &[&str], path: &std::path::Path| {
        let output = Command::new(needs::path_of(words[0]))
            .args(&words[1..])
            .arg(path)
            .output()
            .expect("it starts");
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let a = world.path("a.mov");
    let (shown, text) = said(&["getfattr", "-d", "-m", "-", "--absolute-names"], &a);
    assert!(shown && !text.contains("rushes"), "{text}");
    assert!(!said(&["getfattr", "-n", "trusted.rushes.layout"], &a).0);
    assert!(!said(&["setfattr", "-n", "trusted.rushes.layout", "-v", "x"], &a).0);
    assert!(!said(&["setfattr", "-x", "trusted.rushes.layout"], &a).0);
    check(&world, "a.mov", 1, 2 * MIB);
    // Damage a layout by hand, in the catalogue.
    world.end();
    let stub = world.catalogue().join("tree/a.mov");
    assert!(
        said(
            &["setfattr", "-n", "trusted.rushes.layout", "-v", "x"],
            &stub
        )
        .0
    );
    world.start();
    let error = fs::read(world.path("a.mov")).expect_err("nobody knows where it is");
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert!(world.log().contains("layout"), "{}", world.log());
    check(&world, "b.mov", 2, 2 * MIB);
    assert_eq!(
        fs::metadata(world.path("a.mov")).expect("known").len(),
        2 * MIB as u64
    );
}

#[test]
fn a_pool_has_one_mount_at_a_time_and_an_open_file_outlives_its_name() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60)]) else {
        return;
    };
    let second = Command::new(needs::path_of("rushes"))
        .args(["pool", "mount"])
        .arg(world.catalogue())
        .arg(world.scratch.folder("second"))
        .output()
        .expect("rushes starts");
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("served"), "{said}");

    put(&world, "take.mov", 1, MIB);
    put(&world, "over.mov", 2, MIB);
    let (open, over) = (
        File::options()
            .read(true)
            .write(true)
            .open(world.path("take.mov"))
            .expect("opened"),
        File::open(world.path("over.mov")).expect("opened"),
    );
    fs::rename(world.path("take.mov"), world.path("over.mov")).expect("renamed over it");
    fs::remove_file(world.path("over.mov")).expect("removed");
    let mut bytes = vec![0; MIB];
    over.read_exact_at(&mut bytes, 0).expect("it is open");
    pattern::check(2, 0, &bytes, "over.mov");
    open.write_all_at(&pattern::bytes(1, MIB as u64, MIB), MIB as u64)
        .expect("it is open");
    open.read_exact_at(&mut bytes, MIB as u64)
        .expect("it is open");
    pattern::check(1, MIB as u64, &bytes, "take.mov");
    assert_eq!(open.metadata().expect("known").nlink(), 0);
    drop((open, over));
    // No object of them is left.
    let objects = world.member(0).join("pool/objects");
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let left = run_text(Command::new("find").arg(&objects).args(["-type", "f"]));
        if left.is_empty() {
            break;
        }
        assert!(Instant::now() < end, "objects that nobody names: {left}");
        std::thread::sleep(Duration::from_millis(50));
    }
    run(Command::new("ls").arg(world.path("")));
}

fn run_text(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
