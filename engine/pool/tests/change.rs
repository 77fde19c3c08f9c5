// SPDX-License-Identifier: Apache-2.0
//! Members that are added, drained and removed, interrupted or not, and refused requests.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, check_start, fill, objects_on, pattern, put, remount};
use rushes_pool::{
    Access, ByteRange, Duty, MemberNumber, MemberState, NameLog, Nobody, Parting, Policy,
    PolicyChange, Pool, PoolError, SpillReason, Wanted, Wish, add, change_policy, create, drain,
    fsck, newest_log, rebalance, remove, set_draining,
};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

const MIB: usize = 1 << 20;

fn assert_sound(pool: &Pool) {
    let found = fsck(pool, false, |_| {}).unwrap();
    assert!(found.issues.is_empty(), "{:?}", found.issues);
}

fn refused<T: std::fmt::Debug>(done: Result<T, PoolError>, words: &str) {
    let error = done.unwrap_err();
    assert!(matches!(error, PoolError::Refused(_)), "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

fn numbers(pool: &Pool) -> Vec<u16> {
    let members = pool.members();
    members.iter().map(|member| member.number().0).collect()
}

#[test]
fn a_member_is_added_filled_emptied_and_removed_and_its_number_is_never_given_again() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[12]);
    let catalogue = pool.catalogue().path().to_path_buf();
    put(&pool, "old", 4 * MIB);
    let (first, second) = (place.disk("first", 40), place.disk("second", 30));
    let mut told = Vec::new();
    let given = add(&pool, &[first.clone(), second.clone()], None, |at, of| {
        told.push((at, of))
    });
    assert_eq!(given.unwrap(), [MemberNumber(1), MemberNumber(2)]);
    assert_eq!(told, [(1, 2), (2, 2)]);
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    assert_eq!(numbers(&pool), [0, 1, 2]);
    let mut new = put(&pool, "new", 3 * MIB);
    assert_eq!(new.layout.objects()[0].member, MemberNumber(1));
    fs::hard_link(catalogue.join("tree/new"), catalogue.join("tree/also")).unwrap();
    // A file on two members, with a hole, and one on its way out.
    let wanted = ByteRange::new(8 * MIB as u64, MIB as u64);
    let stub = new.stub.as_fd();
    pool.spill(stub, &mut new.layout, wanted, SpillReason::Full)
        .unwrap();
    new.write(&pool, 8 * MIB as u64, &pattern(8 * MIB as u64, MIB))
        .unwrap();
    put(&pool, "going", MIB);
    fs::rename(catalogue.join("tree/going"), catalogue.join("removed/1")).unwrap();

    refused(
        remove(
            &Pool::look(&catalogue).unwrap(),
            MemberNumber(9),
            Parting::Empty,
            &Nobody,
        ),
        "expected one of ",
    );
    drop(new);
    refused(
        remove(&pool, MemberNumber(1), Parting::Empty, &Nobody),
        "rushes pool drain",
    );
    set_draining(&pool, MemberNumber(1), true).unwrap();
    let duty = |pool: &Pool| pool.member(MemberNumber(1)).unwrap().duty();
    assert_eq!(duty(&pool), Duty::Draining);
    let late = put(&pool, "late", MIB);
    assert_ne!(late.layout.objects()[0].member, MemberNumber(1));
    let (done, failed) = drain(&pool, MemberNumber(1), |_| {}).unwrap();
    assert_eq!(failed.count, 0);
    assert_eq!(done.moved_count, 1, "a file with two names is one");
    assert!(done.moved_bytes <= 4 * MIB as u64, "holes are not copied");
    assert_eq!(
        pool.member(MemberNumber(1))
            .unwrap()
            .object_count()
            .unwrap(),
        0
    );
    check_start(&pool, "old", 4 * MIB);
    check_start(&pool, "new", 3 * MIB);
    assert_sound(&pool);
    // The drain may be cancelled.
    set_draining(&pool, MemberNumber(1), false).unwrap();
    assert_eq!(duty(&pool), Duty::Full);

    set_draining(&pool, MemberNumber(2), true).unwrap();
    drain(&pool, MemberNumber(2), |_| {}).unwrap();
    remove(&pool, MemberNumber(2), Parting::Empty, &Nobody).unwrap();
    assert_eq!(fs::read_dir(&second).unwrap().count(), 0, "a folder again");
    assert_eq!(numbers(&pool), [0, 1], "at once");
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    assert_eq!(numbers(&pool), [0, 1], "and for good");
    remove(&pool, MemberNumber(2), Parting::Empty, &Nobody).unwrap();
    assert_eq!(
        add(&pool, &[second], None, |_, _| {}).unwrap(),
        [MemberNumber(3)]
    );
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    check_start(&pool, "new", 3 * MIB);
    assert_sound(&pool);
}

#[test]
fn a_stripe_is_spread_again_once_its_drained_member_takes_bytes_again() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[160, 160, 160]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let change = PolicyChange {
        wish: Some(Wish::of("striped unit=64KiB").unwrap()),
        ..PolicyChange::default()
    };
    change_policy(pool, change).unwrap();
    let pool = Pool::serve(&catalogue).unwrap();
    put(&pool, "wide", 3 * MIB);
    let members = |pool: &Pool| {
        let stub = fs::File::open(pool.catalogue().path().join("tree/wide")).unwrap();
        let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
        let found: BTreeSet<u16> = layout.objects().iter().map(|one| one.member.0).collect();
        found.len()
    };
    assert_eq!(members(&pool), 3);
    set_draining(&pool, MemberNumber(1), true).unwrap();
    drain(&pool, MemberNumber(1), |_| {}).unwrap();
    assert_eq!(members(&pool), 2);
    set_draining(&pool, MemberNumber(1), false).unwrap();
    let (done, failed) = rebalance(&pool, |_| {}).unwrap();
    assert_eq!((done.moved_count, failed.count), (1, 0));
    assert_eq!(members(&pool), 3);
    check_start(&pool, "wide", 3 * MIB);
    assert_sound(&pool);
    // And that was all.
    assert_eq!(rebalance(&pool, |_| {}).unwrap().0.moved_count, 0);
}

#[test]
fn what_does_not_fit_on_one_member_goes_to_several_and_what_fits_nowhere_stays() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[14, 6, 6]);
    put(&pool, "big", 8 * MIB);
    let catalogue = pool.catalogue().path().to_path_buf();
    set_draining(&pool, MemberNumber(0), true).unwrap();
    drain(&pool, MemberNumber(0), |_| {}).unwrap();
    check_start(&pool, "big", 8 * MIB);
    assert_sound(&pool);
    set_draining(&pool, MemberNumber(0), false).unwrap();
    let mut other = Written::new(&pool, "other");
    other.write(&pool, 0, &pattern(0, 9 * MIB)).unwrap();
    set_draining(&pool, MemberNumber(0), true).unwrap();
    // A file that finds room moves all the same.
    put(&pool, "small", MIB);
    let (_, failed) = drain(&pool, MemberNumber(0), |_| {}).unwrap();
    assert_eq!((failed.count, failed.first[0].file.as_str()), (1, "other"));
    assert!(failed.first[0].sentence.contains("room"), "{failed:?}");
    check_start(&pool, "big", 8 * MIB);
    check_start(&pool, "other", 9 * MIB);
    assert_sound(&pool);
    drop((pool, other));
    // With another member it goes on.
    let more = place.disk("more", 12);
    let pool = Pool::serve(&catalogue).unwrap();
    add(&pool, &[more], None, |_, _| {}).unwrap();
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    drain(&pool, MemberNumber(0), |_| {}).unwrap();
    check_start(&pool, "other", 9 * MIB);
    assert_sound(&pool);
    remove(&pool, MemberNumber(0), Parting::Empty, &Nobody).unwrap();
}

#[test]
fn add_refuses_what_it_must_not_take_and_an_interrupted_one_is_finished_by_repeating_it() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[8]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let member = pool.members()[0].path().to_path_buf();
    let new = place.disk("new", 8);
    let try_add = |paths: &[&Path], words: &str| {
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
        refused(add(&pool, &paths, None, |_, _| {}), words);
        assert!(!new.join("objects").exists(), "nothing was changed");
    };
    try_add(&[&new, &new.join(".")], "at once");
    let again = add(&pool, std::slice::from_ref(&member), None, |_, _| {});
    assert_eq!(again.unwrap(), [MemberNumber(0)], "it is in already");
    try_add(&[&member, &new], "already");
    try_add(&[&catalogue], "at once");
    fs::create_dir(member.join("inside")).unwrap();
    try_add(&[&member.join("inside")], "is inside");
    fs::remove_dir(member.join("inside")).unwrap();
    let other = Wanted {
        catalogue: place.disk("other", 8),
        members: vec![place.disk("others", 8)],
        policy: Policy::RoundRobin,
    };
    create(&other, |_, _| {}).unwrap();
    try_add(&[&other.members[0]], "expected a folder of no pool");
    let newer = r#"{"rushes_pool": "member", "format_version": 9, "colour": "blue"}"#;
    fs::write(new.join("rushes-pool"), newer).unwrap();
    try_add(&[&new], "format version 9");
    // This pool's own member, where its disk was mounted by mistake.
    fs::copy(member.join("rushes-pool"), new.join("rushes-pool")).unwrap();
    try_add(&[&new], "of this very pool; expected that member at");
    fs::remove_file(new.join("rushes-pool")).unwrap();
    fs::write(new.join("letter"), "dear").unwrap();
    try_add(&[&new], "is not empty");
    fs::remove_file(new.join("letter")).unwrap();

    // The state before the last step.
    let before = fs::read(catalogue.join("rushes-pool")).unwrap();
    add(&pool, std::slice::from_ref(&new), None, |_, _| {}).unwrap();
    let plan = catalogue.join("rushes-pool.adding");
    fs::rename(catalogue.join("rushes-pool"), &plan).unwrap();
    fs::write(catalogue.join("rushes-pool"), before).unwrap();
    fs::remove_file(new.join("rushes-pool")).unwrap();
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    assert_eq!(numbers(&pool), [0]);
    let third = place.disk("third", 8);
    refused(add(&pool, &[third], None, |_, _| {}), "repeat that add");
    refused(
        set_draining(&Pool::look(&catalogue).unwrap(), MemberNumber(0), true),
        "an add was interrupted",
    );
    assert_eq!(
        add(&pool, &[new], None, |_, _| {}).unwrap(),
        [MemberNumber(1)]
    );
    assert!(!plan.exists());
    drop(pool);
    let pool = Pool::serve(&catalogue).unwrap();
    assert_eq!(pool.members()[1].status().state, MemberState::Present);
}

#[test]
fn a_member_goes_only_when_nothing_is_on_it_and_a_dead_one_only_when_nothing_was() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 8, 8]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let file = put(&pool, "f", MIB);
    let object = file.layout.objects()[0];
    let again = || Pool::serve(&catalogue).unwrap();
    drop(pool);
    refused(
        remove(&again(), object.member, Parting::Empty, &Nobody),
        "bytes of one file are on",
    );
    let stranger = place.path.join("member1/objects/00/letter");
    fs::write(&stranger, "dear").unwrap();
    refused(
        remove(&again(), MemberNumber(1), Parting::Empty, &Nobody),
        "objects that no file names",
    );
    fs::remove_file(stranger).unwrap();
    // A dead member without files; then one with files.
    place.unmount(&place.path.join("member1"));
    remove(&again(), MemberNumber(1), Parting::Empty, &Nobody).unwrap();
    assert_eq!(numbers(&again()), [0, 2]);
    let pool = again();
    // A member that cannot be drained does not get that duty.
    let mark = place.path.join("member0/rushes-pool");
    fs::rename(&mark, mark.with_extension("away")).unwrap();
    let error = set_draining(&pool, MemberNumber(0), true).unwrap_err();
    assert!(matches!(error, PoolError::Missing { .. }), "{error}");
    refused(
        set_draining(&pool, MemberNumber(7), true),
        "no member 7; expected one of 0, 2",
    );
    let text = || fs::read_to_string(catalogue.join("rushes-pool")).unwrap();
    assert!(!text().contains("draining"), "{}", text());
    fs::rename(mark.with_extension("away"), &mark).unwrap();
    set_draining(&pool, MemberNumber(0), true).unwrap();
    place.unmount(&place.path.join("member0"));
    let error = drain(&pool, MemberNumber(0), |_| {}).unwrap_err();
    assert!(matches!(error, PoolError::Missing { .. }), "{error}");
    drop(pool);
    refused(
        remove(&again(), MemberNumber(0), Parting::Empty, &Nobody),
        "bytes of one file are on",
    );
    // An interrupted drain.
    assert!(text().contains("draining"), "{}", text());
    refused(
        remove(&again(), MemberNumber(2), Parting::Empty, &Nobody),
        "the last one",
    );
    assert_eq!(objects_on_member(&place.path.join("member2")), 0);
}

fn objects_on_member(path: &Path) -> usize {
    let folders = fs::read_dir(path.join("objects")).unwrap();
    folders
        .map(|folder| fs::read_dir(folder.unwrap().path()).unwrap().count())
        .sum()
}

#[test]
fn a_member_that_is_read_only_can_be_emptied() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 12]);
    put(&pool, "f", 2 * MIB);
    let path = pool.members()[0].path().to_path_buf();
    set_draining(&pool, MemberNumber(0), true).unwrap();
    remount(&path, "ro");
    let (done, _) = drain(&pool, MemberNumber(0), |_| {}).unwrap();
    assert_eq!(done.moved_bytes, 2 * MIB as u64);
    check_start(&pool, "f", 2 * MIB);
    remount(&path, "rw");
    // fsck proves that the object that could not be removed there is a copy.
    assert_eq!(objects_on(&pool), 2);
    assert_eq!(fsck(&pool, true, |_| {}).unwrap().left_count(), 0);
    assert_eq!(objects_on(&pool), 1);
    let stub = fs::File::open(pool.catalogue().path().join("tree/f")).unwrap();
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    pool.open_object(&layout, layout.objects()[0], Access::Read)
        .unwrap();
    remove(&pool, MemberNumber(0), Parting::Empty, &Nobody).unwrap();
}

#[test]
fn the_log_of_names_is_on_others_before_a_member_is_emptied_of_it() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[12, 16, 12]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let again = || Pool::serve(&catalogue).unwrap();
    let members: Vec<_> = [0, 1, 2]
        .map(|at| place.path.join(format!("member{at}")))
        .into();
    put(&pool, "f", MIB);
    // Only the first has room for the log.
    fill(&members[1], 0);
    fill(&members[2], 0);
    NameLog::open(&pool).write(&pool, Vec::new);
    let has = |numbers: &[u16]| {
        numbers
            .iter()
            .copied()
            .map(MemberNumber)
            .collect::<Vec<_>>()
    };
    assert_eq!(newest_log(&pool), Some((1, has(&[0]))));
    set_draining(&pool, MemberNumber(0), true).unwrap();
    for words in [
        "the log of names could not be written",
        "member 1 takes bytes (0.",
        "takes in another one, then repeat the drain",
    ] {
        refused(drain(&pool, MemberNumber(0), |_| {}), words);
    }
    drop(pool);
    refused(
        remove(&again(), MemberNumber(0), Parting::Empty, &Nobody),
        "no other member than 0 has the log of names",
    );
    assert_eq!(newest_log(&again()), Some((1, has(&[0]))));
    // There is room, and the removal stops in the middle.
    for member in &members[1..] {
        fs::remove_file(member.join("filler")).unwrap();
    }
    fs::create_dir(members[0].join("names/folder.log")).unwrap();
    remove(&again(), MemberNumber(0), Parting::Empty, &Nobody).unwrap_err();
    assert_eq!(newest_log(&again()), Some((2, has(&[1, 2]))));
    fs::remove_dir(members[0].join("names/folder.log")).unwrap();
    remove(&again(), MemberNumber(0), Parting::Empty, &Nobody).unwrap();
    assert_eq!(numbers(&again()), [1, 2]);
    assert!(!members[0].join("names").exists());
    assert_eq!(newest_log(&again()).unwrap().1, has(&[1, 2]));
}
