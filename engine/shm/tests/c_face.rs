// SPDX-License-Identifier: Apache-2.0
//! The C face: header and library declare the same, and the calls behave as the header promises.
#![allow(unsafe_code, clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_shm::ffi::*;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null, null_mut};
use support::{Folder, Running, SMALL};

const HEADER: &str = include_str!("../include/rushes_client.h");

fn names(text: &str, before: &str) -> BTreeSet<String> {
    text.match_indices(before)
        .map(|(at, _)| {
            let rest = &text[at + before.len() - "rushes_".len()..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            rest[..end.unwrap_or(rest.len())].to_owned()
        })
        .collect()
}

#[test]
fn header_declares_what_the_library_exports() {
    let exported = names(include_str!("../src/ffi.rs"), "extern \"C\" fn rushes_");
    assert!(exported.len() >= 14, "{exported:?}");
    // A declaration's name is followed by its parenthesis; comments mention names without.
    let declared: BTreeSet<String> = names(HEADER, "rushes_")
        .into_iter()
        .filter(|name| HEADER.contains(&format!("{name}(")))
        .collect();
    assert_eq!(declared, exported);
}

#[test]
fn constants_and_structures_are_those_of_the_header() {
    let define = |name: &str| {
        let line = HEADER
            .lines()
            .find(|line| line.starts_with(&format!("#define {name} ")))
            .unwrap();
        let value = line.split_whitespace().nth(2).unwrap();
        value.trim_matches(['(', ')']).parse::<i64>().unwrap()
    };
    assert_eq!(define("RUSHES_PLAIN"), RUSHES_PLAIN as i64);
    use rushes_core::format::{REPLY_SLOTS_MAX, door};
    assert_eq!(define("RUSHES_LEASE_IOV_MAX"), REPLY_SLOTS_MAX as i64);
    assert_eq!(define("RUSHES_DOOR_SMB"), i64::from(door::SMB));
    assert_eq!(define("RUSHES_DOOR_FUSE"), i64::from(door::FUSE));
    assert_eq!(define("RUSHES_DOOR_LOCAL"), i64::from(door::LOCAL));
    // As a C compiler lays the header's structures out on 64-bit machines.
    assert_eq!(
        [
            offset_of!(rushes_lease, id),
            offset_of!(rushes_lease, length),
            offset_of!(rushes_lease, iov_count),
            offset_of!(rushes_lease, iov),
            size_of::<rushes_lease>(),
        ],
        [0, 8, 16, 24, 24 + 16 * 16]
    );
    assert_eq!(
        [
            offset_of!(rushes_completion, private_data),
            offset_of!(rushes_completion, result),
            size_of::<rushes_completion>(),
        ],
        [0, 8, 16]
    );
}

fn connect(path: &Path) -> (*mut rushes_client, &'static CStr) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let mut reason = null();
    // SAFETY: strings and a place for the reason.
    unsafe {
        let client = rushes_connect(
            path.as_ptr(),
            3,
            c"media".as_ptr(),
            c"eva".as_ptr(),
            null(),
            // A machine busy with other tests may keep the server from answering soon.
            5000,
            &mut reason,
        );
        (client, CStr::from_ptr(reason))
    }
}

#[test]
fn calls_do_what_the_header_says() {
    let folder = Folder::new("c-face");
    let (file, bytes) = folder.footage("clip.mov", 300_000);
    let server = Running::start(&folder.socket(), SMALL);
    let (client, reason) = connect(&folder.socket());
    assert!(!client.is_null(), "{reason:?}");
    // SAFETY: each call is made as the header demands.
    unsafe {
        assert!(rushes_alive(client));
        let handle = rushes_open(client, file.as_raw_fd(), c"clip.mov".as_ptr(), 0, 0);
        assert!(!handle.is_null());
        let mut buffer = vec![0u8; 300_000];
        let count = rushes_read(handle, buffer.as_mut_ptr().cast(), 200_000, 1000);
        assert_eq!(count, 200_000);
        assert!(buffer[..200_000] == bytes[1000..201_000]);

        let mut seven = 7;
        let private_data: *mut c_void = (&raw mut seven).cast();
        let target = buffer.as_mut_ptr().cast();
        let ticket = rushes_read_send(handle, target, 300_000, 100_000, private_data);
        assert_ne!(ticket, 0);
        let mut fds = [-1; 2];
        rushes_event_fds(client, fds.as_mut_ptr());
        let mut done = MaybeUninit::<[rushes_completion; 4]>::uninit();
        let mut polled = fds.map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        let mut count = 0;
        while count == 0 {
            assert!(
                libc::poll(polled.as_mut_ptr(), 2, 10_000) > 0,
                "nobody rang"
            );
            count = rushes_poll(client, done.as_mut_ptr().cast(), 4);
        }
        let first = &(*done.as_ptr())[0];
        assert_eq!(
            (count, first.private_data, first.result),
            (1, private_data, 200_000)
        );
        assert!(buffer[..200_000] == bytes[100_000..]);
        rushes_request_cancel(client, ticket);
        rushes_request_cancel(client, 12345);

        let mut lease = MaybeUninit::<rushes_lease>::uninit();
        assert_eq!(
            rushes_read_begin(handle, 10_000, 5_000, lease.as_mut_ptr()),
            0
        );
        let lease = lease.assume_init_mut();
        assert_eq!(lease.length, 10_000);
        let pieces = &lease.iov[..lease.iov_count as usize];
        let seen: Vec<u8> = pieces
            .iter()
            .flat_map(|piece| {
                std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len)
            })
            .copied()
            .collect();
        assert!(seen == bytes[5_000..15_000]);
        rushes_read_end(handle, lease);
        rushes_read_end(handle, lease);
        rushes_changed(client, 1, 2, 0, u64::MAX);
        rushes_resized(client, 1, 2, 0);
        rushes_gone(client, 1, 2);
        rushes_close(handle);
        // The end of the session frees one that is left open.
        assert!(!rushes_open(client, file.as_raw_fd(), c"clip.mov".as_ptr(), 0, 0).is_null());
        rushes_disconnect(client);
    }
    let echo = server.stop();
    assert_eq!(echo.notices, [(1, 2), (1, 2), (1, 2)]);
    assert_eq!(echo.resized_count, 1);
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

#[test]
fn nothing_there_gives_a_reason_and_null_is_harmless() {
    let folder = Folder::new("c-face-absent");
    let (client, reason) = connect(&folder.socket());
    assert!(client.is_null());
    assert_eq!(reason, c"no daemon listens on its socket");
    // SAFETY: null is allowed everywhere but for buffers.
    unsafe {
        assert!(!rushes_alive(client));
        assert!(rushes_open(client, 0, c"a".as_ptr(), 0, 0).is_null());
        assert_eq!(rushes_read(null_mut(), null_mut(), 10, 0), RUSHES_PLAIN);
        assert_eq!(
            rushes_read_send(null_mut(), null_mut(), 10, 0, null_mut()),
            0
        );
        assert_eq!(
            rushes_read_begin(null_mut(), 10, 0, null_mut()),
            RUSHES_PLAIN as i32
        );
        rushes_read_end(null_mut(), null_mut());
        rushes_request_cancel(client, 1);
        assert_eq!(rushes_poll(client, null_mut(), 1), 0);
        rushes_changed(client, 1, 2, 0, 1);
        rushes_resized(client, 1, 2, 0);
        rushes_gone(client, 1, 2);
        rushes_close(null_mut());
        rushes_disconnect(client);
    }
}
