// SPDX-License-Identifier: Apache-2.0
//! A rescue makes a lost catalogue anew from the members: with all that is in the log of names, and
//! with objects that are not.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, check, fill, pattern, put};
use rushes_pool::{
    ByteCount, ByteRange, INODE_ATTRIBUTE, Layout, MemberNumber, MemberState, NameLog,
    OBJECT_ATTRIBUTE, ObjectName, Pool, PoolError, Rescued, SpillReason, State, fsck, newest_log,
    rescue,
};
use rustix::fs::{XattrFlags, setxattr};
use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

const MIB: usize = 1 << 20;

/// All facts of stat(2) and readlink(2) about a tree, apart from numbers of inodes.
fn shown(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let seen = fs::symlink_metadata(&path).unwrap();
            let size = if seen.is_dir() { 0 } else { seen.len() };
            let times = (seen.mtime(), seen.mtime_nsec());
            let owner = (seen.uid(), seen.gid(), seen.rdev());
            let links = if seen.is_dir() { 0 } else { seen.nlink() };
            let mut value = [0; 64];
            let count = rustix::fs::lgetxattr(&path, "trusted.note", &mut value[..]).unwrap_or(0);
            found.push(format!(
                "{} {:o} {size} {times:?} {owner:?} {links} {:?} {:?}",
                path.strip_prefix(root).unwrap().display(),
                seen.mode(),
                fs::read_link(&path).ok(),
                &value[..count],
            ));
            if seen.is_dir() {
                waiting.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A tree with some of everything.
fn furnish(pool: &Pool) {
    let tree = pool.catalogue().path().join("tree");
    fs::create_dir_all(tree.join("reel/scene")).unwrap();
    put(pool, "reel/a.mov", MIB);
    put(pool, "reel/scene/b\n.mov", 3 * MIB + 5);
    drop(Written::new(pool, "empty"));
    fs::write(tree.join("never written"), "").unwrap();
    fs::hard_link(tree.join("reel/a.mov"), tree.join("also")).unwrap();
    symlink("reel/../nowhere", tree.join("link")).unwrap();
    let none = XattrFlags::empty();
    setxattr(tree.join("reel/a.mov"), "trusted.note", b"take 2", none).unwrap();
    chown(tree.join("reel/a.mov"), Some(1234), Some(99)).unwrap();
    chown(tree.join("reel"), Some(7), Some(8)).unwrap();
    fs::set_permissions(tree.join("reel"), fs::Permissions::from_mode(0o2750)).unwrap();
    fs::set_permissions(tree.join("reel/a.mov"), fs::Permissions::from_mode(0o4711)).unwrap();
    for (name, seconds) in [("reel/a.mov", 77), ("reel/scene", 12_345), ("reel", 99)] {
        let time = UNIX_EPOCH + Duration::new(seconds, 123);
        fs::File::open(tree.join(name))
            .unwrap()
            .set_modified(time)
            .unwrap();
    }
}

fn log(pool: &Pool) -> NameLog {
    let log = NameLog::open(pool);
    assert!(
        log.write(pool, Vec::new),
        "it is on all members it should be"
    );
    log
}

fn paths(pool: &Pool) -> Vec<PathBuf> {
    let members = pool.members();
    members
        .iter()
        .map(|member| member.path().to_path_buf())
        .collect()
}

/// Lose the catalogue: its disk is empty.
fn lose(place: &mut Place, pool: Pool) -> PathBuf {
    let catalogue = pool.catalogue().path().to_path_buf();
    drop(pool);
    place.unmount(&catalogue);
    place.mount(&catalogue, 16);
    catalogue
}

/// Lose this catalogue, too, and rescue it.
fn rescued_again(place: &mut Place, catalogue: PathBuf, members: &[PathBuf]) -> (Pool, Rescued) {
    let pool = Pool::serve(&catalogue).unwrap();
    log(&pool);
    let catalogue = lose(place, pool);
    rescued(&catalogue, members)
}

fn rescued(catalogue: &Path, members: &[PathBuf]) -> (Pool, Rescued) {
    let done = rescue(catalogue, members, |_| {}).unwrap();
    let pool = Pool::serve(catalogue).unwrap();
    (pool, done)
}

#[test]
fn names_owners_rights_times_and_bytes_come_back_and_a_repeated_rescue_makes_the_same() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16, 16]);
    furnish(&pool);
    let (members, id) = (paths(&pool), pool.id());
    log(&pool);
    let before = shown(&pool.catalogue().path().join("tree"));
    let catalogue = lose(&mut place, pool);
    for round in 0..2 {
        let (pool, done) = rescued(&catalogue, &members);
        assert_eq!(shown(&catalogue.join("tree")), before);
        assert_eq!((pool.id(), done.attributes_lost), (id, 0));
        assert_eq!(done.log_serial, Some(round + 1));
        assert_eq!(done.name_count, 8);
        assert!(done.fsck.issues.is_empty(), "{:?}", done.fsck.issues);
        check(&pool, "reel/a.mov", MIB);
        check(&pool, "also", MIB);
        check(&pool, "reel/scene/b\n.mov", 3 * MIB + 5);
        assert!(pool.new_file().unwrap().number > 3);
        if round == 0 {
            // As after an interruption before its last step, and in the middle.
            drop(pool);
            fs::rename(
                catalogue.join("rushes-pool"),
                catalogue.join("rushes-pool.rescue"),
            )
            .unwrap();
            fs::remove_file(catalogue.join("tree/also")).unwrap();
            fs::write(catalogue.join("tree/half"), "").unwrap();
            assert!(Pool::serve(&catalogue).is_err(), "it is no pool yet");
        }
    }
}

#[test]
fn what_came_after_the_log_is_found_with_its_number_and_what_moved_is_where_it_is() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let mut grown = put(&pool, "grown", MIB);
    let mut moved = put(&pool, "moved", MIB);
    let members = paths(&pool);
    log(&pool);
    // From here on the log gets no changes.
    let late = put(&pool, "late", 2 * MIB);
    grown
        .write(&pool, MIB as u64, &pattern(MIB as u64, MIB))
        .unwrap();
    let wanted = ByteRange::new(0, MIB as u64);
    let stub = moved.stub.as_fd();
    pool.spill(stub, &mut moved.layout, wanted, SpillReason::Full)
        .unwrap();
    moved
        .write(&pool, MIB as u64, &pattern(MIB as u64, 100))
        .unwrap();
    let identity = late.layout.file;
    let catalogue = lose(&mut place, pool);
    let (pool, done) = rescued(&catalogue, &members);
    let name = format!("lost+found/{}.{:08x}", identity.number, identity.generation);
    check(&pool, &name, 2 * MIB);
    check(&pool, "grown", 2 * MIB);
    check(&pool, "moved", MIB + 100);
    assert_eq!(done.fsck.left_count(), 0, "{:?}", done.fsck.issues);
    assert!(fsck(&pool, false, |_| {}).unwrap().issues.is_empty());
}

#[test]
fn facts_behind_the_checkpoint_count_and_a_torn_one_ends_the_log() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let members = paths(&pool);
    let names = log(&pool);
    let tree = pool.catalogue().path().join("tree");
    // The rename of a folder is one fact, and takes its contents along.
    fs::rename(tree.join("reel"), tree.join("day 2")).unwrap();
    let folder = fs::metadata(tree.join("day 2")).unwrap().ino();
    let file = put(&pool, "new", MIB);
    names.name(1, b"reel", 0);
    names.name(1, b"day 2", folder);
    let changed = || {
        let number = file.stub.metadata().unwrap().ino();
        vec![rushes_pool::inode(number, file.stub.as_fd()).unwrap()]
    };
    names.name(1, b"new", file.stub.metadata().unwrap().ino());
    assert!(names.write(&pool, changed));
    let before = shown(&tree);
    // One copy has a torn end, the other one is whole; then the next door goes on behind it.
    let torn = members[0].join("names/0000000000000001.log");
    let mut end = fs::File::options().append(true).open(&torn).unwrap();
    end.write_all(&[9; 30]).unwrap();
    let length = torn.metadata().unwrap().len();
    drop(NameLog::open(&pool));
    assert_eq!(torn.metadata().unwrap().len(), length - 30);
    fs::remove_file(members[1].join("names/0000000000000001.log")).unwrap();
    let catalogue = lose(&mut place, pool);
    let (pool, _) = rescued(&catalogue, &members);
    assert_eq!(shown(&catalogue.join("tree")), before);
    check(&pool, "day 2/a.mov", MIB);
    check(&pool, "new", MIB);
    // Rescue has written a log of the new inodes; the next checkpoint follows it.
    assert_eq!(
        newest_log(&pool),
        Some((2, vec![MemberNumber(0), MemberNumber(1)]))
    );
    assert!(!torn.exists(), "older logs go");
    log(&pool);
    assert!(members[0].join("names/0000000000000003.log").is_file());
}

#[test]
fn a_lost_member_costs_what_was_on_it_and_the_names_are_on_another() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16, 16]);
    let mut kept = Vec::new();
    for at in 0..6 {
        let file = put(&pool, &format!("f{at}"), MIB);
        kept.push(file.layout.objects()[0].member.0);
    }
    assert!(kept.contains(&0), "some are on the first");
    let members = paths(&pool);
    log(&pool);
    let catalogue = lose(&mut place, pool);
    place.unmount(&members[0]);
    let (pool, done) = rescued(&catalogue, &members[1..]);
    assert_eq!(done.fsck.missing.len(), 1);
    assert_eq!(pool.members().len(), 3, "the lost one is still known");
    for (at, member) in kept.iter().enumerate() {
        let path = catalogue.join(format!("tree/f{at}"));
        let stub = fs::File::open(&path).unwrap();
        assert_eq!(stub.metadata().unwrap().len(), MIB as u64);
        if *member != 0 {
            check(&pool, &format!("f{at}"), MIB);
            continue;
        }
        // An error, not zeroes.
        let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
        let error = pool
            .open_object(&layout, layout.objects()[0], rushes_pool::Access::Read)
            .unwrap_err();
        assert!(matches!(error, PoolError::Missing { .. }), "{error}");
    }
}

#[test]
fn without_any_log_every_byte_has_a_name_by_its_number() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let one = put(&pool, "one", MIB);
    let mut two = put(&pool, "two", MIB);
    let wanted = ByteRange::new(MIB as u64, MIB as u64);
    let stub = two.stub.as_fd();
    pool.spill(stub, &mut two.layout, wanted, SpillReason::Full)
        .unwrap();
    two.write(&pool, MIB as u64, &pattern(MIB as u64, MIB))
        .unwrap();
    let members = paths(&pool);
    let named = |layout: &Layout| {
        let file = layout.file;
        format!("lost+found/{}.{:08x}", file.number, file.generation)
    };
    let (first, second) = (named(&one.layout), named(&two.layout));
    let catalogue = lose(&mut place, pool);
    let (pool, done) = rescued(&catalogue, &members);
    assert_eq!(done.log_serial, None);
    check(&pool, &first, MIB);
    check(&pool, &second, 2 * MIB);
    let all_mended = |issue: &rushes_pool::Issue| matches!(issue.state, State::Mended(_));
    assert!(done.fsck.issues.iter().all(all_mended));
}

#[test]
fn rescue_refuses_what_would_do_harm_and_changes_nothing_then() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let members = paths(&pool);
    log(&pool);
    let old = pool.catalogue().path().to_path_buf();
    drop(pool);
    let new = place.disk("new", 8);
    let copy = place.disk("copy", 8);
    let refused = |catalogue: &Path, members: &[PathBuf], words: &str| {
        let error = rescue(catalogue, members, |_| {}).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(&old, &members, "rushes pool fsck");
    refused(&new, &[], "one at least");
    refused(&new, std::slice::from_ref(&copy), "no member of a pool");
    fs::copy(members[0].join("rushes-pool"), copy.join("rushes-pool")).unwrap();
    let twice = [members[0].clone(), members[1].clone(), copy.clone()];
    refused(&new, &twice, "are both member 0");
    refused(&new, &[members[0].clone(), members[0].clone()], "at once");
    let newer = r#"{"rushes_pool": "member", "format_version": 9, "colour": "blue"}"#;
    fs::write(copy.join("rushes-pool"), newer).unwrap();
    refused(&new, &twice, "format version 9");
    let text = fs::read_to_string(members[0].join("rushes-pool")).unwrap();
    let of_other = text.replace(&text[text.find("pool_id").unwrap() + 11..][..8], "deadbeef");
    fs::write(copy.join("rushes-pool"), of_other).unwrap();
    refused(&new, &twice, "another pool");
    fs::write(new.join("letter"), "dear").unwrap();
    refused(&new, &members, "is not empty");
    fs::remove_file(new.join("letter")).unwrap();
    assert_eq!(fs::read_dir(&new).unwrap().count(), 0);
    // The pool's catalogue is there, only not given.
    let format = |member: &PathBuf| fs::read(member.join("rushes-pool")).unwrap();
    let formats = || members.iter().map(format).collect::<Vec<_>>();
    let before = formats();
    refused(&new, &members, "the catalogue of this pool is there");
    assert_eq!(formats(), before, "no member was taken over");
    assert!(
        Pool::serve(&old).is_ok(),
        "it is the pool's catalogue still"
    );
    // An object of uncertain origin stays as it is.
    let stranger = ObjectName::of(rushes_pool::ObjectId(5));
    fs::write(members[0].join(stranger.as_str()), "bytes").unwrap();
    let path = members[0].join(stranger.as_str());
    setxattr(
        &path,
        OBJECT_ATTRIBUTE,
        b"RSO\x03newer",
        XattrFlags::empty(),
    )
    .unwrap();
    fs::remove_file(old.join("rushes-pool")).unwrap();
    let done = rescue(&new, &members, |_| {}).unwrap();
    assert_eq!(done.fsck.issues.len(), 1);
    assert_eq!(done.fsck.issues[0].state, State::Open);
    assert_eq!(fs::read(&path).unwrap(), b"bytes");
}

#[test]
fn a_folder_that_is_renamed_while_a_checkpoint_is_made_keeps_what_is_in_it() {
    let Some(mut place) = Place::new() else {
        return;
    };
    for into_other in [false, true] {
        let pool = place.pool(&[16, 16]);
        let tree = pool.catalogue().path().join("tree");
        fs::create_dir_all(tree.join("reel/scene/take")).unwrap();
        put(&pool, "reel/scene/take/a.mov", MIB);
        let members = paths(&pool);
        log(&pool);
        // A door that was started again makes a checkpoint at once.
        let names = NameLog::open(&pool);
        let mut calls = 0;
        let is_whole = names.write(&pool, || {
            calls += 1;
            // The walk has seen the name "reel", and nothing below it.
            if calls == 2 {
                let folder = fs::metadata(tree.join("reel")).unwrap().ino();
                let scene = fs::metadata(tree.join("reel/scene")).unwrap().ino();
                if into_other {
                    fs::rename(tree.join("reel/scene"), tree.join("scene")).unwrap();
                    names.name(folder, b"scene", 0);
                    names.name(1, b"scene", scene);
                } else {
                    fs::rename(tree.join("reel"), tree.join("day 2")).unwrap();
                    names.name(1, b"reel", 0);
                    names.name(1, b"day 2", folder);
                }
                names.folder_moved();
            }
            Vec::new()
        });
        assert!(calls > 2, "it was renamed in the middle");
        let mut before = shown(&tree);
        let catalogue = lose(&mut place, pool);
        let (pool, _) = rescued(&catalogue, &members);
        // No door has reported the times.
        let names = |shown: &mut Vec<String>| {
            shown
                .iter_mut()
                .for_each(|line| line.truncate(line.find(" 40").unwrap_or(line.len())));
        };
        let mut after = shown(&catalogue.join("tree"));
        names(&mut before);
        names(&mut after);
        assert_eq!(after, before, "into another: {into_other}");
        assert!(!is_whole, "the checkpoint is made again");
        for name in fs::read_dir(members[0].join("names")).unwrap() {
            assert!(!name.unwrap().path().to_string_lossy().ends_with(".new"));
        }
        // A checkpoint that no rename spoils is whole.
        assert!(NameLog::open(&pool).write(&pool, Vec::new));
        drop(pool);
        place.unmount_all();
    }
}

#[test]
fn the_log_of_another_catalogue_is_not_gone_on_with() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let members = paths(&pool);
    log(&pool);
    let old = pool.catalogue().path().to_path_buf();
    drop(pool);
    let length = |serial: u64| {
        let path = members[0].join(format!("names/{serial:016x}.log"));
        fs::metadata(path).map(|found| found.len()).ok()
    };
    let first = length(1);
    let write = |catalogue: &Path, serial: u64| {
        let pool = Pool::serve(catalogue).unwrap();
        let names = NameLog::open(&pool);
        names.name(1, b"told", 4711);
        let mut before = None;
        assert!(names.write(&pool, || {
            before = length(serial);
            Vec::new()
        }));
        before
    };
    // Inodes of the copied catalogue have other numbers.
    let new = place.disk("new", 16);
    fs::create_dir(new.join("before")).unwrap();
    let copied = std::process::Command::new("cp")
        .args(["--archive", "--no-target-directory"])
        .args([&old, &new])
        .status();
    assert!(copied.unwrap().success());
    assert_eq!(
        write(&new, 1),
        first,
        "nothing is put behind facts of others"
    );
    assert!(length(1).is_none() && length(2).is_some());
    // It appends to its own log.
    let second = length(2);
    assert!(write(&new, 2) > second);
}

/// Take a member's disk away with its bytes; `plug_in` brings it back.
fn unplug(member: &Path) {
    fs::rename(member.join("rushes-pool"), member.join("unplugged")).unwrap();
}

fn plug_in(member: &Path) {
    fs::rename(member.join("unplugged"), member.join("rushes-pool")).unwrap();
}

#[test]
fn bytes_that_were_cut_off_while_a_member_was_away_do_not_come_back_into_the_file() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[24, 16, 16]);
    let mut cut = put(&pool, "cut", 2 * MIB);
    let object = cut.layout.objects()[0];
    assert_eq!(object.member, MemberNumber(0));
    let members = paths(&pool);
    std::thread::sleep(Duration::from_millis(50));
    unplug(&members[0]);
    let stub = cut.stub.as_fd();
    pool.cut(stub, &mut cut.layout, ByteCount(0)).unwrap();
    cut.stub.set_len(0).unwrap();
    cut.write(&pool, 0, &pattern(7, 100)).unwrap();
    log(&pool);
    plug_in(&members[0]);
    let catalogue = lose(&mut place, pool);
    let (pool, done) = rescued(&catalogue, &members);
    assert_eq!(fs::metadata(catalogue.join("tree/cut")).unwrap().len(), 100);
    let stub = fs::File::open(catalogue.join("tree/cut")).unwrap();
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    assert!(!layout.objects().contains(&object));
    assert!(Written { stub, layout }.read(&pool, 0, 100) == pattern(7, 100));
    assert_eq!(done.fsck.left_count(), 0);
    // It loses no byte.
    check(
        &pool,
        &format!("lost+found/0.{:016x}", object.id.0),
        2 * MIB,
    );
}

/// Two catalogues would give the same room twice, and each would take the other's objects for
/// unnamed ones.
#[test]
fn the_catalogue_before_a_rescue_is_no_pools_any_more() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    put(&pool, "a", MIB);
    let members = paths(&pool);
    log(&pool);
    let old = pool.catalogue().path().parent().unwrap().join("old");
    let copied = Command::new("cp")
        .args(["-a", "--preserve=all"])
        .args([pool.catalogue().path(), &old])
        .status();
    assert!(copied.unwrap().success());
    assert!(Pool::look(&old).is_ok(), "nothing tells them apart yet");
    let catalogue = lose(&mut place, pool);
    unplug(&members[1]);
    let (pool, _) = rescued(&catalogue, &members[..1]);
    let refuses = || {
        for opened in [Pool::serve(&old), Pool::look(&old)] {
            let error = opened.err().map(|error| error.to_string());
            let error = error.expect("it would write beside the new one");
            let says = "belongs to a later catalogue of this pool";
            assert!(error.contains(says) && error.contains("rm -r"), "{error}");
        }
    };
    refuses();
    // A member that was away learns of the new catalogue as soon as that is served.
    drop(pool);
    plug_in(&members[1]);
    drop(Pool::serve(&catalogue).unwrap());
    unplug(&members[0]);
    refuses();
    plug_in(&members[0]);
    let (again, _) = rescued_again(&mut place, catalogue, &members);
    check(&again, "a", MIB);
}

/// All that a member's folder has, with the bytes of its format file.
fn untouched(member: &Path) -> (Vec<String>, Vec<u8>) {
    let format = fs::read(member.join("rushes-pool")).unwrap();
    (shown(member), format)
}

fn refuses_with(catalogue: &Path, words: &str) {
    for opened in [Pool::serve(catalogue), Pool::look(catalogue)] {
        let error = opened.err().map(|error| error.to_string());
        let error = error.expect("it would have members of another one");
        assert!(error.contains(words), "{error}");
    }
}

/// Each would take the other's member for its own, with files that it does not know.
#[test]
fn two_rescues_of_different_members_do_not_mix_and_one_of_all_makes_one_pool_again() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[24, 24]);
    let on = ["a", "b"].map(|name| put(&pool, name, MIB).layout.objects()[0].member.0);
    assert_eq!(on, [0, 1]);
    let members = paths(&pool);
    log(&pool);
    lose(&mut place, pool);
    let catalogues = ["first", "second"].map(|name| place.disk(name, 16));
    let mut files = Vec::new();
    for (own, other) in [(0, 1), (1, 0)] {
        unplug(&members[other]);
        let (pool, _) = rescued(&catalogues[own], &members[own..=own]);
        let file = put(&pool, ["c", "d"][own], 2 * MIB + own);
        files.push(file.layout.file);
        log(&pool);
        drop(pool);
        plug_in(&members[other]);
    }
    assert_eq!(files[0].number, files[1].number);
    assert_ne!(files[0].generation, files[1].generation);
    let before = members
        .iter()
        .map(|member| untouched(member))
        .collect::<Vec<_>>();

    for (own, other) in [(0, 1), (1, 0)] {
        let catalogue = &catalogues[own];
        let path = members[other].display();
        refuses_with(
            catalogue,
            &format!("member {other} in {path} belongs to another catalogue of this pool"),
        );
        refuses_with(catalogue, &format!("expected {}", catalogue.display()));
        refuses_with(catalogue, "all members of both");
        // A member that comes back while the pool is in use.
        unplug(&members[other]);
        let pool = Pool::serve(catalogue).unwrap();
        check(&pool, ["c", "d"][own], 2 * MIB + own);
        plug_in(&members[other]);
        let state = pool.members()[other].status().state;
        let MemberState::Missing(why) = state else {
            panic!("{state:?}");
        };
        assert!(why.contains("belongs to another catalogue"), "{why}");
    }
    assert_eq!(
        members
            .iter()
            .map(|member| untouched(member))
            .collect::<Vec<_>>(),
        before
    );

    // As the error advises: both catalogues out of the way, and all members given.
    let third = place.disk("third", 16);
    let error = rescue(&third, &members, |_| {}).unwrap_err().to_string();
    assert!(
        error.contains("the catalogue of this pool is there"),
        "{error}"
    );
    for catalogue in &catalogues {
        unplug(catalogue);
    }
    let (pool, done) = rescued(&third, &members);
    assert_eq!(done.fsck.left_count(), 0, "{:?}", done.fsck.issues);
    for name in ["a", "b"] {
        check(&pool, name, MIB);
    }
    // The names come from one of the two; the other one's file is named by its number, which is the
    // same.
    for (own, name) in ["c", "d"].into_iter().enumerate() {
        let file = files[own];
        let lost = format!("lost+found/{}.{:08x}", file.number, file.generation);
        let is_there = third.join("tree").join(name).exists();
        let found = if is_there { name } else { &lost };
        check(&pool, found, 2 * MIB + own);
    }
    assert!(fsck(&pool, false, |_| {}).unwrap().issues.is_empty());
    drop(pool);
    drop(Pool::serve(&third).unwrap());
    for catalogue in &catalogues {
        plug_in(catalogue);
        for (own, other) in [(0, 1), (1, 0)] {
            unplug(&members[other]);
            refuses_with(catalogue, &format!("member {own} in "));
            refuses_with(catalogue, "belongs to a later catalogue");
            plug_in(&members[other]);
        }
    }
}

#[test]
fn what_a_member_that_is_away_has_is_not_replaced_by_an_object_that_nobody_names() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[24, 16, 16]);
    let mut file = put(&pool, "file", MIB);
    let old = file.layout.objects()[0];
    let members = paths(&pool);
    let at = members[0].join(ObjectName::of(old.id).as_str());
    fs::hard_link(&at, members[0].join("kept")).unwrap();
    let wanted = ByteRange::new(0, MIB as u64);
    let stub = file.stub.as_fd();
    pool.spill(stub, &mut file.layout, wanted, SpillReason::Unwritable)
        .unwrap();
    let new = file.layout.objects()[0];
    assert_ne!(new.member, old.member);
    file.write(&pool, 0, &pattern(3, MIB)).unwrap();
    log(&pool);
    // As if its removal had not come to the disk, and with outdated bytes.
    fs::rename(members[0].join("kept"), &at).unwrap();
    fs::write(&at, pattern(0, 2 * MIB)).unwrap();
    let catalogue = lose(&mut place, pool);
    unplug(&members[usize::from(new.member.0)]);
    let given: Vec<_> = members
        .iter()
        .filter(|path| path.join("rushes-pool").exists())
        .cloned()
        .collect();
    let (pool, _) = rescued(&catalogue, &given);
    let stub = fs::File::open(catalogue.join("tree/file")).unwrap();
    assert_eq!(stub.metadata().unwrap().len(), MIB as u64);
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    assert_eq!(layout.objects(), [new], "an error, not old bytes");
}

fn files_in_names(members: &[PathBuf]) -> Vec<Vec<String>> {
    let list = |member: &PathBuf| {
        let found = fs::read_dir(member.join("names")).into_iter().flatten();
        let mut names: Vec<String> = found
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    members.iter().map(list).collect()
}

#[test]
fn a_log_goes_where_there_is_room_for_the_next_one_and_no_half_one_stays() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[40, 40, 40]);
    let members = paths(&pool);
    assert_eq!(newest_log(&pool), None);
    assert!(!members[0].join("names").exists(), "a look makes nothing");
    // Long attributes make a long log.
    let tree = pool.catalogue().path().join("tree");
    for at in 0..150 {
        let path = tree.join(format!("f{at}"));
        fs::write(&path, "").unwrap();
        let none = XattrFlags::empty();
        setxattr(&path, "trusted.note", &[7; 60_000], none).unwrap();
    }
    log(&pool);
    let first = "0000000000000001.log".to_owned();
    let has = vec![first.clone()];
    assert_eq!(files_in_names(&members), [has.clone(), has, vec![]]);
    // More than the least, and less than two logs.
    fill(&members[0], 17 << 20);
    for member in [0, 2] {
        fs::create_dir_all(members[member].join("names")).unwrap();
        fs::write(members[member].join("names/0000000000000009.new"), "half").unwrap();
    }
    log(&pool);
    let second = vec!["0000000000000002.log".to_owned()];
    assert_eq!(
        files_in_names(&members),
        [vec![], second.clone(), second.clone()]
    );
    // No member has room: the former log stays, and nothing else.
    for member in [1, 2] {
        fill(&members[member], 1 << 20);
    }
    fs::write(members[0].join("more"), vec![1; 24 << 20]).unwrap();
    let names = NameLog::open(&pool);
    let mut calls = 0;
    let mut count = || {
        calls += 1;
        Vec::new()
    };
    assert!(!names.write(&pool, &mut count));
    assert_eq!(files_in_names(&members), [vec![], second.clone(), second]);
    // It does not try again at once.
    calls = 0;
    assert!(!names.write(&pool, || {
        calls += 1;
        Vec::new()
    }));
    assert_eq!(calls, 1);
}

#[test]
fn what_is_told_while_nothing_can_be_written_has_a_bound_and_a_checkpoint_follows() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[40, 40]);
    furnish(&pool);
    let names = log(&pool);
    let name = [b'n'; 255];
    for number in 0..70_000 {
        names.name(1, &name, number % 2);
    }
    assert!(names.write(&pool, Vec::new));
    assert_eq!(newest_log(&pool).unwrap().0, 2);
    let log = paths(&pool)[0].join("names/0000000000000002.log");
    assert!(log.metadata().unwrap().len() < 1 << 20);
    // And only then.
    names.name(1, &name, 0);
    assert!(names.write(&pool, Vec::new));
    assert_eq!(newest_log(&pool).unwrap().0, 2);
}

#[test]
fn a_copy_of_the_log_that_cannot_be_read_is_said_and_the_other_one_is_taken() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let members = paths(&pool);
    log(&pool);
    let before = shown(&pool.catalogue().path().join("tree"));
    let [first, second] =
        [0, 1].map(|member: usize| members[member].join("names/0000000000000001.log"));
    // read(2) of a folder fails.
    let unreadable = |log: &Path| {
        fs::rename(log, log.with_extension("aside")).unwrap();
        fs::create_dir(log).unwrap();
    };
    unreadable(&first);
    unreadable(&second);
    let catalogue = lose(&mut place, pool);
    let error = rescue(&catalogue, &members, |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("0000000000000001.log"),
        "{error}"
    );
    fs::remove_dir(&second).unwrap();
    fs::rename(second.with_extension("aside"), &second).unwrap();
    let (_, done) = rescued(&catalogue, &members);
    assert_eq!(shown(&catalogue.join("tree")), before);
    let said: Vec<_> = done
        .fsck
        .issues
        .iter()
        .map(|issue| issue.kind.name())
        .collect();
    assert_eq!(said, ["log_of_names"]);
}

#[test]
fn what_a_door_knows_inodes_by_comes_back_too() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let tree = pool.catalogue().path().join("tree");
    let status = std::process::Command::new("mkfifo")
        .arg(tree.join("pipe"))
        .status();
    assert!(status.unwrap().success());
    let (members, id) = (paths(&pool), pool.id());
    log(&pool);
    let catalogue = lose(&mut place, pool);
    let (pool, _) = rescued(&catalogue, &members);
    for name in ["link", "pipe"] {
        let mut found = [0; 16];
        let path = catalogue.join("tree").join(name);
        let length = rustix::fs::lgetxattr(&path, INODE_ATTRIBUTE, &mut found[..]);
        assert_eq!((length, found), (Ok(16), id.0.to_le_bytes()), "{name}");
    }
    let record = |name: &str| {
        let stub = fs::File::open(catalogue.join("tree").join(name)).unwrap();
        pool.layout(stub.as_fd()).unwrap().expect("it has a record")
    };
    let [never, empty] = ["never written", "empty"].map(record);
    assert!(never.segments().is_empty());
    assert_ne!(never.file, empty.file);
    assert!(fsck(&pool, false, |_| {}).unwrap().issues.is_empty());
}

#[test]
fn a_rename_that_is_told_just_behind_a_checkpoint_has_it_made_again_and_a_later_one_has_not() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    furnish(&pool);
    let names = log(&pool);
    let serial = || newest_log(&pool).unwrap().0;
    names.folder_moved();
    assert!(names.write(&pool, Vec::new));
    assert_eq!(
        serial(),
        2,
        "it may have been renamed before the walk's end"
    );
    for _ in 0..3 {
        assert!(names.write(&pool, Vec::new));
        names.folder_moved();
    }
    assert_eq!(serial(), 2, "one fact is enough");
}
