// SPDX-License-Identifier: Apache-2.0
//! Pools over small file systems in memory: create, place, spill, truncate, bury, and the effects
//! of a missing member and a damaged layout.
//!
//! One test at a time: a program that one starts has, from its fork to its exec, the locks of
//! another. The file systems are tmpfs: it has the attributes, the holes and the "full" that
//! members need. tests/tests/pool.rs has the tests with a disk.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, objects_on, pattern, remount};
use rushes_pool::{
    Access, ByteCount, ByteRange, Layout, LayoutFault, MemberNumber, MemberState, ObjectFault,
    ObjectName, Policy, Pool, PoolError, SpillReason, Wanted, create, find,
};
use rustix::fs::{XattrFlags, fsetxattr};
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

const PIECE: usize = 64 << 10;

#[test]
fn a_file_spills_over_unequal_members_until_all_are_full_and_every_byte_is_there() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[5, 3, 9]);
    let free = pool.usage().bytes_free.0;
    let mut file = Written::new(&pool, "big");
    let mut size = 0;
    let last = loop {
        let bytes = pattern(size, PIECE);
        match file.write(&pool, size, &bytes) {
            Ok(()) => size += PIECE as u64,
            Err(error) => break error,
        }
    };
    assert!(matches!(last, PoolError::NoRoom), "{last}");
    assert!(size * 100 >= free * 97, "{size} of {free} bytes were taken");
    assert_eq!(file.layout.objects().len(), 3);
    for at in (0..size).step_by(PIECE) {
        assert_eq!(file.read(&pool, at, PIECE), pattern(at, PIECE), "at {at}");
    }
    // The stub's layout is the door's.
    let kept = pool.layout(file.stub.as_fd()).unwrap();
    assert_eq!(kept.as_ref(), Some(&file.layout));

    let tree = pool.catalogue().path().join("tree/big");
    fs::rename(tree, pool.catalogue().path().join("removed/1")).unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&file.stub.metadata().unwrap());
    assert_eq!(
        pool.bury(|open| open == inode, || ()).unwrap().file_count,
        0
    );
    assert_eq!(file.read(&pool, 0, PIECE), pattern(0, PIECE), "it is open");
    let buried = pool.bury(|_| false, || ()).unwrap();
    assert_eq!((buried.file_count, buried.kept.len()), (1, 0));
    assert_eq!(pool.usage().bytes_free.0, free);
}

#[test]
fn a_member_beside_the_catalogue_takes_new_files_until_only_the_reserve_is_left() {
    let Some(mut place) = Place::new() else {
        return;
    };
    const MIB: usize = 1 << 20;
    let shared = place.disk("shared", 64);
    let wanted = Wanted {
        catalogue: shared.join("catalogue"),
        members: vec![shared.join("member"), place.disk("member1", 16)],
        policy: Policy::MostFreeSpace,
    };
    fs::create_dir(&wanted.catalogue).unwrap();
    fs::create_dir(&wanted.members[0]).unwrap();
    create(&wanted, |_, _| {}).unwrap();
    let pool = Pool::serve(&wanted.catalogue).unwrap();
    let warning = pool.place_warnings().concat();
    assert!(
        warning.contains("on the file system of member 0"),
        "{warning}"
    );
    let last = (0..).find_map(|at| {
        let mut file = Written::new(&pool, &format!("f{at}"));
        file.write(&pool, 0, &pattern(0, MIB)).err()
    });
    let last = last.unwrap();
    assert_eq!(last.errno(), rustix::io::Errno::NOSPC);
    assert!(matches!(last, PoolError::KeptForCatalogue { .. }), "{last}");
    let free = |folder: &Path| {
        let found = rustix::fs::statvfs(folder).unwrap();
        (found.f_bavail * found.f_frsize) as usize
    };
    assert!(
        free(&shared) >= 7 * MIB && free(&shared) <= 9 * MIB,
        "{}",
        free(&shared)
    );
    assert!(
        free(&wanted.members[1]) < MIB,
        "{}",
        free(&wanted.members[1])
    );
}

#[test]
fn bytes_that_come_back_to_a_member_never_show_what_was_there_before() {
    let Some(mut place) = Place::new() else {
        return;
    };
    const MIB: u64 = 1 << 20;
    let pool = place.pool(&[8, 8]);
    let mut file = Written::new(&pool, "f");
    file.write(&pool, 0, &pattern(0, MIB as usize)).unwrap();
    let first = file.layout.objects()[0];
    let spill = |file: &mut Written, at| {
        let wanted = ByteRange::new(at, 4096);
        let stub = file.stub.as_fd();
        pool.spill(stub, &mut file.layout, wanted, SpillReason::Full)
            .unwrap()
            .object
    };
    // Bytes move as they are, there and back.
    let second = spill(&mut file, MIB / 2);
    assert_ne!(second.member, first.member);
    assert_eq!(file.read(&pool, 0, MIB as usize), pattern(0, MIB as usize));
    assert_eq!(spill(&mut file, MIB / 2), first);
    assert_eq!(file.read(&pool, 0, MIB as usize), pattern(0, MIB as usize));
    // The part behind the last byte moves; then the old object has outdated bytes there, as a crash
    // may leave them.
    assert_eq!(objects_on(&pool), 1, "the other one is named no longer");
    assert_eq!(spill(&mut file, 2 * MIB).member, second.member);
    let old = pool
        .open_object(&file.layout, first, Access::Write)
        .unwrap();
    rustix::io::pwrite(&old, &[0xee; 1 << 16], 3 * MIB).unwrap();
    assert_eq!(spill(&mut file, 3 * MIB), first);
    let hole = file.read(&pool, MIB, 3 * MIB as usize);
    assert!(hole.iter().all(|&byte| byte == 0));
}

#[test]
fn cutting_and_growing_again_reads_zeroes() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 4]);
    let mut file = Written::new(&pool, "f");
    file.write(&pool, 0, &pattern(0, 300_000)).unwrap();
    pool.cut(file.stub.as_fd(), &mut file.layout, ByteCount(1000))
        .unwrap();
    file.stub.set_len(1000).unwrap();
    file.write(&pool, 200_000, b"x").unwrap();
    assert_eq!(file.read(&pool, 0, 1000), pattern(0, 1000));
    assert!(
        file.read(&pool, 1000, 199_000)
            .iter()
            .all(|&byte| byte == 0)
    );
    pool.cut(file.stub.as_fd(), &mut file.layout, ByteCount(0))
        .unwrap();
    assert!(file.layout.objects().is_empty());
    assert_eq!(objects_on(&pool), 0, "no object is left");
}

#[test]
fn a_missing_member_costs_what_is_on_it_and_comes_back_by_itself() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 6]);
    let mut file = Written::new(&pool, "f");
    file.write(&pool, 0, &pattern(0, PIECE)).unwrap();
    let object = file.layout.objects()[0];
    assert_eq!(object.member, MemberNumber(1), "most free space");
    let path = pool.members()[1].path().to_path_buf();

    // Another file system is mounted over it, as when the disk's own mount has failed.
    place.mount(&path, 1);
    let error = pool
        .open_object(&file.layout, object, Access::Read)
        .unwrap_err();
    assert!(matches!(error, PoolError::Missing { .. }), "{error}");
    assert!(
        error.to_string().contains("is its file system mounted?"),
        "{error}"
    );
    assert!(matches!(
        pool.members()[1].status().state,
        MemberState::Missing(_)
    ));
    assert_eq!(pool.usage().missing_count, 1);
    let mut other = Written::new(&pool, "g");
    other.write(&pool, 0, &pattern(7, PIECE)).unwrap();
    assert_eq!(other.layout.objects()[0].member, MemberNumber(0));
    // Removal waits for it.
    fs::rename(
        pool.catalogue().path().join("tree/f"),
        pool.catalogue().path().join("removed/f"),
    )
    .unwrap();
    let buried = pool.bury(|_| false, || ()).unwrap();
    assert_eq!((buried.file_count, buried.kept.len()), (0, 1));

    place.unmount(&path);
    assert_eq!(file.read(&pool, 0, PIECE), pattern(0, PIECE));
    assert_eq!(pool.members()[1].status().state, MemberState::Present);
    assert_eq!(pool.bury(|_| false, || ()).unwrap().file_count, 1);

    remount(&path, "ro");
    assert_eq!(pool.members()[1].status().state, MemberState::ReadOnly);
    let mut third = Written::new(&pool, "h");
    third.write(&pool, 0, b"h").unwrap();
    assert_eq!(third.layout.objects()[0].member, MemberNumber(0));
    remount(&path, "rw");
    assert_eq!(pool.members()[1].status().state, MemberState::Present);
}

#[test]
fn damaged_records_and_objects_of_others_are_refused() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4]);
    let mut one = Written::new(&pool, "one");
    let mut two = Written::new(&pool, "two");
    one.write(&pool, 0, b"one").unwrap();
    two.write(&pool, 0, b"two").unwrap();

    // A layout that names the object of another file.
    let mut forged = Layout::new(one.layout.file);
    let all = ByteRange::new(0, u64::MAX);
    forged.assign(all, rushes_pool::ByteOffset(0), two.layout.objects()[0]);
    let error = pool
        .open_object(&forged, two.layout.objects()[0], Access::Read)
        .unwrap_err();
    let PoolError::Object { fault, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*fault, ObjectFault::OtherFile(two.layout.file));
    assert_eq!(error.errno(), rustix::io::Errno::IO);

    // A damaged layout, and one that is gone.
    let mut record = one.layout.encode();
    record[30] ^= 4;
    fsetxattr(
        &one.stub,
        rushes_pool::LAYOUT_ATTRIBUTE,
        &record,
        XattrFlags::empty(),
    )
    .unwrap();
    let error = pool.layout(one.stub.as_fd()).unwrap_err();
    assert!(
        matches!(error, PoolError::Layout(LayoutFault::Checksum)),
        "{error}"
    );
    rustix::fs::fremovexattr(&one.stub, rushes_pool::LAYOUT_ATTRIBUTE).unwrap();
    let error = pool.layout(one.stub.as_fd()).unwrap_err();
    assert!(matches!(error, PoolError::NoLayout { size: 3 }), "{error}");

    // An object that is gone, and a member that the pool does not have.
    let object = two.layout.objects()[0];
    let path = pool.members()[0]
        .path()
        .join(ObjectName::of(object.id).as_str());
    fs::remove_file(path).unwrap();
    let error = pool
        .open_object(&two.layout, object, Access::Read)
        .unwrap_err();
    assert!(error.to_string().contains("there is none"), "{error}");
    let mut forged = Layout::new(two.layout.file);
    let nowhere = rushes_pool::Object {
        member: MemberNumber(9),
        id: object.id,
    };
    forged.assign(all, rushes_pool::ByteOffset(0), nowhere);
    pool.set_layout(two.stub.as_fd(), &forged).unwrap();
    fs::rename(
        pool.catalogue().path().join("tree/two"),
        pool.catalogue().path().join("removed/two"),
    )
    .unwrap();
    let buried = pool.bury(|_| false, || ()).unwrap();
    assert!(
        matches!(buried.kept.as_slice(), [PoolError::Missing { member, .. }] if member.0 == 9),
        "{buried:?}"
    );
}

#[test]
fn a_pool_has_one_door_and_numbers_are_never_given_twice() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let first = pool.new_file().unwrap();
    let second = pool.new_file().unwrap();
    assert_eq!((first.number, second.number), (1, 2));
    let error = Pool::serve(&catalogue).unwrap_err();
    assert!(matches!(&error, PoolError::Served { holder, .. } if holder.contains("process")));
    assert_eq!(error.errno(), rustix::io::Errno::BUSY);
    Pool::look(&catalogue).unwrap();
    drop(pool);
    let again = Pool::serve(&catalogue).unwrap();
    assert!(again.new_file().unwrap().number > second.number);
}

#[test]
fn an_interrupted_create_is_finished_by_repeating_it_and_by_nothing_else() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4, 4]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let members: Vec<PathBuf> = pool.members().iter().map(|m| m.path().into()).collect();
    let id = pool.id();
    drop(pool);
    fs::remove_file(catalogue.join("lock")).unwrap();
    // The state after the first member.
    fs::rename(
        catalogue.join("rushes-pool"),
        catalogue.join("rushes-pool.plan"),
    )
    .unwrap();
    fs::remove_file(members[1].join("rushes-pool")).unwrap();
    fs::remove_dir(members[1].join("objects/7f")).unwrap();
    assert!(Pool::look(&catalogue).is_err(), "it is no pool yet");

    let wanted = |members: &[PathBuf], policy| Wanted {
        catalogue: catalogue.clone(),
        members: members.to_vec(),
        policy,
    };
    let swapped = [members[1].clone(), members[0].clone()];
    for other in [
        wanted(&swapped, Policy::MostFreeSpace),
        wanted(&members, Policy::RoundRobin),
        wanted(&members[..1], Policy::MostFreeSpace),
    ] {
        let error = create(&other, |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("repeat that create"), "{error}");
    }
    let stranger = members[1].join("objects/00/letter");
    fs::write(&stranger, "dear").unwrap();
    let same = wanted(&members, Policy::MostFreeSpace);
    let error = create(&same, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("\"letter\""), "{error}");
    fs::remove_file(stranger).unwrap();

    let mut told = Vec::new();
    let made = create(&same, |done, of| told.push((done, of))).unwrap();
    assert!(made.is_resumed);
    assert_eq!(made.pool.id(), id);
    assert_eq!(told, [(1, 2), (2, 2)]);
    let members_made = made.pool.members();
    let states = members_made.iter().map(|m| m.status().state);
    assert!(states.eq([MemberState::Present, MemberState::Present]));
    assert!(members[1].join("objects/7f").is_dir());
}

#[test]
fn a_path_in_the_catalogue_leads_to_its_pool_and_others_to_none() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[4]);
    let catalogue = pool.catalogue().path().to_path_buf();
    fs::create_dir(catalogue.join("tree/reel")).unwrap();
    fs::write(catalogue.join("tree/reel/a"), "").unwrap();
    let found = find(&catalogue.join("tree/reel/../reel/a")).unwrap();
    assert_eq!(found.catalogue, catalogue);
    assert_eq!(found.below, Path::new("reel/a"));
    assert_eq!(find(&catalogue).unwrap().below, Path::new(""));
    assert!(find(&catalogue.join("removed")).is_err());
    assert!(find(&place.path).is_err());
    // No way out of the tree, and nothing but files.
    std::os::unix::fs::symlink("/etc/passwd", catalogue.join("tree/out")).unwrap();
    for below in ["out", "../numbers", "reel", "no"] {
        assert!(
            pool.catalogue().open_file_below(Path::new(below)).is_err(),
            "{below}"
        );
    }
    assert!(pool.catalogue().open_file_below(&found.below).is_ok());
}
