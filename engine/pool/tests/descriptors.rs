// SPDX-License-Identifier: Apache-2.0
//! A process without a free descriptor: the error says so, and blames no member, object or file.
//!
//! Its limit is the process's own, so this is a program of its own with one test.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests too say by their line what failed"
)]

mod place;

use place::{Place, Written, pattern};
use rushes_pool::{Access, ByteRange, MemberState, Pool, PoolError, SpillReason};
use rustix::io::{Errno, dup};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::os::fd::{AsFd, OwnedFd};

/// Descriptors of the test, its threads and the pool, and some more.
const LIMIT: u64 = 128;
/// More than any of the calls has open at a time.
const FREE_MAX: usize = 10;

/// Take all descriptors but so many.
fn take_all_but(free: usize, of: impl AsFd) -> Vec<OwnedFd> {
    let mut taken: Vec<_> = std::iter::from_fn(|| dup(of.as_fd()).ok()).collect();
    taken.truncate(taken.len().saturating_sub(free));
    taken
}

/// It is done, or there was no descriptor for it.
fn is_said<T>(what: &str, free: usize, done: Result<T, PoolError>) -> bool {
    match done {
        Ok(_) => true,
        Err(error) => {
            let is_missing = matches!(error, PoolError::Missing { .. } | PoolError::Lost { .. });
            assert!(!is_missing, "{what} with {free}: {error}");
            assert_eq!(error.errno(), Errno::MFILE, "{what} with {free}: {error}");
            false
        }
    }
}

fn members_are_well(pool: &Pool, context: &str) {
    for member in pool.members().iter() {
        let state = member.status().state;
        assert!(
            matches!(state, MemberState::Present),
            "{context}: {state:?}"
        );
        assert_eq!(member.failing(), None, "{context}");
    }
}

#[test]
fn who_has_no_descriptor_left_hears_that_and_nothing_of_his_files() {
    let Some(mut place) = Place::new() else {
        return;
    };
    let mut pool = place.pool(&[16, 16]);
    let catalogue = pool.catalogue().path().to_path_buf();
    let bytes = pattern(0, 64 << 10);
    let mut file = Written::new(&pool, "file");
    file.write(&pool, 0, &bytes).unwrap();
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(LIMIT);
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut was_refused = false;
    let mut went_well = false;
    for free in 0..FREE_MAX {
        // Forget all that is known of members: each looks as in a door that has just started.
        drop(pool);
        pool = Pool::serve(&catalogue).unwrap();
        let new = Written::new(&pool, &format!("new{free}"));
        let mut layout = new.layout.clone();
        let mut spilled = file.layout.clone();
        let mut cut = file.layout.clone();
        let object = file.layout.objects()[0];
        let taken = take_all_but(free, &file.stub);
        let range = ByteRange::new(0, 4096);
        let behind = ByteRange::new(bytes.len() as u64, 4096);
        let mut all = true;
        for access in [Access::Read, Access::Write] {
            all &= is_said(
                "open an object",
                free,
                pool.open_object(&file.layout, object, access),
            );
        }
        all &= is_said("read the record", free, pool.layout(file.stub.as_fd()));
        all &= is_said(
            "make a place",
            free,
            pool.place(new.stub.as_fd(), &mut layout, range),
        );
        let spill = pool.spill(file.stub.as_fd(), &mut spilled, behind, SpillReason::Full);
        all &= is_said("go on elsewhere", free, spill);
        let length = rushes_pool::ByteCount(bytes.len() as u64);
        all &= is_said("cut", free, pool.cut(file.stub.as_fd(), &mut cut, length));
        drop(taken);
        was_refused |= !all;
        went_well |= all;
        members_are_well(&pool, &format!("with {free}"));
        assert_eq!(file.read(&pool, 0, bytes.len()), bytes, "with {free}");
        file.layout = pool.layout(file.stub.as_fd()).unwrap().unwrap();
    }
    assert!(was_refused && went_well, "each was seen");
}
