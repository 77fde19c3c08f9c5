// SPDX-License-Identifier: Apache-2.0
//! Files that were never synced, or whose layouts claim that for too long: whatever happens to
//! them, no byte that is there is deleted.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, look, objects_on, of, path_of, pattern, remount};
use rushes_pool::{
    ByteOffset, ByteRange, LAYOUT_ATTRIBUTE, Layout, MemberNumber, NameLog, OBJECT_ATTRIBUTE,
    Object, PolicyChange, Pool, SpillReason, State, Wish, change_policy, fsck, rescue,
};
use rustix::fs::{XattrFlags, fremovexattr, fsetxattr};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const MIB: usize = 1 << 20;
const UNIT: usize = 64 << 10;

/// Files over all members, unit by unit.
fn striped(place: &mut Place, members: &[u64]) -> Pool {
    let pool = place.pool(members);
    let catalogue = pool.catalogue().path().to_path_buf();
    let rules = PolicyChange {
        wish: Some(Wish::of("striped unit=64KiB").unwrap()),
        ..PolicyChange::default()
    };
    change_policy(pool, rules).unwrap();
    Pool::serve(&catalogue).unwrap()
}

fn never_synced(pool: &Pool, name: &str, length: usize) -> Written {
    let mut file = Written::new(pool, name);
    file.write_only(pool, 0, &pattern(0, length)).unwrap();
    assert!(file.layout.is_unsettled());
    file
}

/// The names in `lost+found`.
fn found(pool: &Pool) -> Vec<PathBuf> {
    let folder = pool.catalogue().path().join("tree/lost+found");
    let names = fs::read_dir(folder).into_iter().flatten();
    names.map(|name| name.unwrap().path()).collect()
}

/// The one file in `lost+found` has all of a pattern but the bytes of this object of a stripe.
fn check_but(pool: &Pool, length: usize, members: usize, gone: usize) {
    let names = found(pool);
    assert_eq!(names.len(), 1, "{names:?}");
    let stub = fs::File::open(&names[0]).unwrap();
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    let bytes = Written { stub, layout }.read(pool, 0, length);
    let mut expected = pattern(0, length);
    for (at, unit) in expected.chunks_mut(UNIT).enumerate() {
        if at % members == gone {
            unit.fill(0);
        }
    }
    assert!(bytes == expected, "{names:?}");
}

#[test]
fn what_is_there_of_a_file_that_nobody_synced_gets_a_name() {
    let Some(mut place) = Place::new() else {
        return;
    };
    for by_opening in [true, false] {
        let pool = striped(&mut place, &[80, 80, 80]);
        let mut file = never_synced(&pool, "f", 6 * UNIT);
        let objects = file.layout.segments()[0].objects.clone();
        assert_eq!(objects.len(), 3);
        fs::remove_file(path_of(&pool, objects[1])).unwrap();
        if by_opening {
            let lost = pool.look_for_unsettled(file.stub.as_fd(), &mut file.layout);
            assert!(lost.unwrap());
            assert!(file.layout.segments().is_empty());
            // A new write to the file: the bytes from before are not in it.
            file.write(&pool, 0, &pattern(9, UNIT)).unwrap();
        } else {
            assert_eq!(look(&pool), [("never_synced", State::Mendable)]);
        }
        for (at, object) in objects.iter().enumerate() {
            let path = path_of(&pool, *object);
            assert_eq!(path.exists(), at != 1, "object {at}, {by_opening}");
        }
        let report = fsck(&pool, true, |_| {}).unwrap();
        assert_eq!(report.left_count(), 0, "{:?}", report.issues);
        check_but(&pool, 6 * UNIT, 3, 1);
        assert_eq!(look(&pool), []);
        if by_opening {
            assert!(file.read(&pool, 0, UNIT) == pattern(9, UNIT));
        }
        drop((file, pool));
        place.unmount_all();
    }
}

#[test]
fn an_object_that_nothing_was_put_into_goes_with_the_others_of_its_file() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = striped(&mut place, &[80, 80, 80]);
    let mut file = never_synced(&pool, "f", 1);
    for &object in &file.layout.segments()[0].objects[..2] {
        fs::remove_file(path_of(&pool, object)).unwrap();
    }
    let before = file.layout.file;
    assert!(
        pool.look_for_unsettled(file.stub.as_fd(), &mut file.layout)
            .unwrap()
    );
    assert_eq!((objects_on(&pool), file.layout.file), (0, before));
}

fn log(pool: &Pool) -> NameLog {
    let log = NameLog::open(pool);
    assert!(log.write(pool, Vec::new));
    log
}

/// Lose the catalogue, and make a new one of the members.
fn rescued(place: &mut Place, pool: Pool) -> Pool {
    let members = pool.members();
    let members: Vec<PathBuf> = members.iter().map(|one| one.path().into()).collect();
    let catalogue = pool.catalogue().path().to_path_buf();
    drop(pool);
    place.unmount(&catalogue);
    place.mount(&catalogue, 16);
    rescue(&catalogue, &members, |_| {}).unwrap();
    Pool::serve(&catalogue).unwrap()
}

fn record(pool: &Pool, name: &str) -> (fs::File, Layout) {
    let stub = fs::File::open(pool.catalogue().path().join("tree").join(name)).unwrap();
    let layout = pool.layout(stub.as_fd()).unwrap().unwrap();
    (stub, layout)
}

#[test]
fn a_file_that_was_synced_and_moved_behind_the_log_is_whole_after_a_rescue() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let mut file = never_synced(&pool, "f", MIB);
    log(&pool);
    // From here on the log gets no changes, as in its last second.
    pool.settle(file.stub.as_fd(), &mut file.layout).unwrap();
    file.stub.sync_all().unwrap();
    let before = file.layout.objects()[0];
    let whole = ByteRange::new(0, MIB as u64);
    let stub = file.stub.as_fd();
    pool.spill(stub, &mut file.layout, whole, SpillReason::Full)
        .unwrap();
    // Delete the old object, which has no byte of the file any more, as a move would have done.
    fs::remove_file(path_of(&pool, before)).unwrap();
    let pool = rescued(&mut place, pool);
    let (stub, layout) = record(&pool, "f");
    assert!(!layout.is_unsettled());
    assert!(Written { stub, layout }.read(&pool, 0, MIB) == pattern(0, MIB));
}

#[test]
fn an_object_that_is_gone_of_a_file_that_was_synced_behind_the_log_is_a_loss_after_a_rescue() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = striped(&mut place, &[80, 80, 80]);
    let mut file = never_synced(&pool, "f", 6 * UNIT);
    let never = never_synced(&pool, "never", UNIT);
    log(&pool);
    pool.settle(file.stub.as_fd(), &mut file.layout).unwrap();
    let objects = file.layout.segments()[0].objects.clone();
    fs::remove_file(path_of(&pool, objects[1])).unwrap();
    // The power cut has taken all objects of this one.
    for object in never.layout.objects() {
        fs::remove_file(path_of(&pool, object)).unwrap();
    }
    let pool = rescued(&mut place, pool);
    let (_, layout) = record(&pool, "f");
    assert_eq!(
        layout.segments()[0].objects,
        objects,
        "an error, not zeroes"
    );
    assert!(path_of(&pool, objects[0]).exists() && path_of(&pool, objects[2]).exists());
    assert_eq!(look(&pool), [("object_absent", State::Open)]);
    let (_, layout) = record(&pool, "never");
    assert!(layout.segments().is_empty(), "nobody had synced it");
}

#[test]
fn a_file_is_settled_only_if_its_objects_are_there() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let mut file = never_synced(&pool, "f", MIB);
    fs::remove_file(path_of(&pool, file.layout.objects()[0])).unwrap();
    let settled = pool.settled(file.stub.as_fd(), &mut file.layout);
    assert!(settled.is_err() && file.layout.is_unsettled());
    assert!(record(&pool, "f").1.is_unsettled());
}

#[test]
fn a_removed_file_whose_object_lost_its_mark_is_buried() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let file = never_synced(&pool, "f", MIB);
    let path = path_of(&pool, file.layout.objects()[0]);
    let object = fs::File::options().write(true).open(path).unwrap();
    fremovexattr(&object, OBJECT_ATTRIBUTE).unwrap();
    let catalogue = pool.catalogue().path();
    fs::rename(catalogue.join("tree/f"), catalogue.join("removed/1")).unwrap();
    let buried = pool.bury(|_| false, || ()).unwrap();
    assert!(buried.kept.is_empty(), "{:?}", buried.kept);
    assert_eq!((buried.file_count, objects_on(&pool)), (1, 0));
}

#[test]
fn a_file_that_is_half_buried_was_not_lost() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let file = never_synced(&pool, "f", MIB);
    fs::remove_file(path_of(&pool, file.layout.objects()[0])).unwrap();
    let catalogue = pool.catalogue().path();
    fs::rename(catalogue.join("tree/f"), catalogue.join("removed/1")).unwrap();
    assert_eq!(look(&pool), [("removed", State::Mendable)]);
}

#[test]
fn what_was_never_synced_is_left_as_it_is_where_that_is_in_doubt() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16, 16]);
    let file = never_synced(&pool, "f", MIB);
    fs::remove_file(path_of(&pool, file.layout.objects()[0])).unwrap();
    assert_eq!(look(&pool), [("never_synced", State::Mendable)]);
    let is_left = |pool: &Pool| {
        let report = fsck(pool, true, |_| {}).unwrap();
        let states = report
            .issues
            .iter()
            .filter(|one| one.kind.name() == "never_synced");
        let states: Vec<_> = states.map(|one| one.state.clone()).collect();
        assert!(!states.is_empty() && states.iter().all(|one| *one == State::Open));
        assert_eq!(record(pool, "f").1, file.layout);
    };
    // A layout that may name anything.
    let newer = Written::new(&pool, "newer");
    let bytes = b"RSL\x63what a newer Rushes wrote";
    fsetxattr(&newer.stub, LAYOUT_ATTRIBUTE, bytes, XattrFlags::empty()).unwrap();
    is_left(&pool);
    fs::remove_file(pool.catalogue().path().join("tree/newer")).unwrap();
    // A member that is away.
    let away = pool.member(MemberNumber(2)).unwrap().path().to_path_buf();
    fs::rename(away.join("rushes-pool"), away.join("unplugged")).unwrap();
    is_left(&pool);
    fs::rename(away.join("unplugged"), away.join("rushes-pool")).unwrap();
    // Two files with the same objects.
    let twin = Written::new(&pool, "twin");
    pool.set_layout(twin.stub.as_fd(), &file.layout).unwrap();
    is_left(&pool);
}

#[test]
fn a_stripe_that_is_not_whole_gets_one_name_however_often_that_is_interrupted() {
    let Some(mut place) = Place::new() else {
        return;
    };
    for has_stub in [false, true] {
        let pool = striped(&mut place, &[80, 80, 80, 80]);
        let mut file = never_synced(&pool, "f", 8 * UNIT);
        pool.settle(file.stub.as_fd(), &mut file.layout).unwrap();
        let objects = file.layout.segments()[0].objects.clone();
        fs::remove_file(path_of(&pool, objects[1])).unwrap();
        if has_stub {
            // The layout from before the first write, as in a catalogue put back from a backup.
            let empty = Layout::new(file.layout.file);
            pool.set_layout(file.stub.as_fd(), &empty).unwrap();
        } else {
            fs::remove_file(pool.catalogue().path().join("tree/f")).unwrap();
        }
        // The first repair cannot go on behind the second member.
        let third = pool.member(objects[2].member).unwrap().path().to_path_buf();
        remount(&third, "ro");
        let _ = fsck(&pool, true, |_| {});
        remount(&third, "rw");
        let report = fsck(&pool, true, |_| {}).unwrap();
        assert_eq!(report.left_count(), 0, "{:?}", report.issues);
        check_but(&pool, 8 * UNIT, 4, 1);
        assert_eq!(look(&pool), [], "{has_stub}");
        assert_eq!(objects_on(&pool), 4);
        drop((file, pool));
        place.unmount_all();
    }
}

#[test]
fn a_record_that_another_forged_gets_no_mark() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = place.pool(&[16, 16]);
    let mut file = never_synced(&pool, "f", MIB);
    pool.settle(file.stub.as_fd(), &mut file.layout).unwrap();
    let forged = Written::new(&pool, "forged");
    let mut layout = Layout::new(forged.layout.file);
    let object = file.layout.objects()[0];
    layout.assign(ByteRange::new(0, u64::MAX), ByteOffset(0), object);
    pool.set_layout(forged.stub.as_fd(), &layout).unwrap();
    pool.set_layout(file.stub.as_fd(), &Layout::new(file.layout.file))
        .unwrap();
    let report = fsck(&pool, true, |_| {}).unwrap();
    assert_eq!(of(&report), [("object_of_other", State::Open)]);
    let mut byte = [0];
    let object = fs::File::open(path_of(&pool, object)).unwrap();
    object.read_exact_at(&mut byte, 5).unwrap();
    assert_eq!(byte[..], pattern(5, 1));
}

#[test]
fn members_that_are_there_do_not_keep_what_another_does() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let pool = striped(&mut place, &[80, 80, 80]);
    let file = never_synced(&pool, "f", 3 * UNIT);
    let objects = file.layout.objects();
    let away = pool.members()[1].path().to_path_buf();
    let left = || {
        let there = |&&object: &&Object| path_of(&pool, object).exists();
        objects.iter().filter(there).count()
    };
    assert_eq!((objects.len(), left()), (3, 3));
    let catalogue = pool.catalogue().path();
    fs::rename(catalogue.join("tree/f"), catalogue.join("removed/f")).unwrap();
    place.mount(&away, 1);
    let buried = pool.bury(|_| false, || ()).unwrap();
    assert_eq!((buried.file_count, buried.kept.len()), (0, 1));
    assert!(!pool.can_bury_on(MemberNumber(1)) && pool.can_bury_on(MemberNumber(0)));
    place.unmount(&away);
    assert_eq!(left(), 1, "the one that was away");
    assert!(pool.can_bury_on(MemberNumber(1)));
    assert_eq!(pool.bury(|_| false, || ()).unwrap().file_count, 1);
    assert_eq!(left(), 0);
}
