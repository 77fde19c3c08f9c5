// SPDX-License-Identifier: Apache-2.0
//! Writes through a lane, both ends.
#![allow(unsafe_code, clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_core::units::Duration;
use rushes_shm::Connect;
use rushes_shm::client::{Client, ReadError};
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use support::{Echo, EchoSize, Folder, Numbers, Running, SMALL};

fn connect(path: &Path) -> Client {
    let who = Connect {
        door: 3,
        ..Connect::default()
    };
    loop {
        if let Ok(client) = Client::connect(path, &who) {
            return client;
        }
        std::thread::yield_now();
    }
}

fn size(lane_pages: u32) -> EchoSize {
    EchoSize {
        lane_pages,
        ..SMALL
    }
}

fn opened(folder: &Folder, name: &str) -> File {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(folder.0.join(name))
        .unwrap()
}

#[test]
fn written_bytes_arrive_whole_or_are_left_to_the_caller() {
    let folder = Folder::new("writes");
    let file = opened(&folder, "take.mov");
    let server = Running::start(&folder.socket(), size(64));
    let mut client = connect(&folder.socket());
    assert!(client.takes_writes());
    let handle = client.open(&file, b"take.mov").unwrap();
    let mut flat = Vec::new();
    let mut numbers = Numbers(3);
    let (mut plain, mut full) = (0, 0);
    for round in 0..500u64 {
        let offset = numbers.below(300_000);
        let length = 1 + numbers.below(if round % 50 == 0 { 400_000 } else { 60_000 });
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + round) as u8).collect();
        match client.write(handle, &bytes, offset) {
            Ok(count) => {
                assert_eq!(count as u64, length);
                let end = (offset + length) as usize;
                if flat.len() < end {
                    flat.resize(end, 0);
                }
                flat[offset as usize..end].copy_from_slice(&bytes);
            }
            Err(ReadError::Plain) => plain += 1,
            Err(ReadError::Errno(errno)) => {
                assert_eq!(errno, 28);
                full += 1;
            }
        }
    }
    assert!(plain > 20 && full > 0, "{plain} {full}");
    client.sync(handle).unwrap();
    assert_eq!(client.hold(1, 2), Ok(()));
    assert!(std::fs::read(folder.0.join("take.mov")).unwrap() == flat);
    let mut back = vec![0; flat.len()];
    assert_eq!(client.read(handle, &mut back, 0), Ok(flat.len()));
    assert!(back == flat);
    assert_eq!(client.write(handle, &[], 0), Err(ReadError::Plain));
    drop(client);
    let echo = server.stop();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

#[test]
fn many_writes_under_way_and_some_given_up() {
    let folder = Folder::new("many-writes");
    let file = opened(&folder, "take.mov");
    let server = Running::start(&folder.socket(), size(4096));
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"take.mov").unwrap();
    let mut numbers = Numbers(5);
    let mut flat = vec![0u8; 64 * 40_000];
    for round in 0..20u8 {
        let mut under_way = HashMap::new();
        for n in 0..60usize {
            let start = n * 40_000;
            let length = 1 + numbers.below(40_000) as usize;
            let bytes = vec![round.wrapping_mul(60).wrapping_add(n as u8) | 1; length];
            // SAFETY: the buffer's memory stays where it is in the map until the write is reported
            // or cancelled.
            let ticket =
                unsafe { client.write_send(handle, bytes.as_ptr(), length, start as u64, n) };
            under_way.insert(n, (ticket.unwrap(), bytes));
        }
        // A cancelled one: it is written whole or not at all.
        let (ticket, given_up) = under_way.remove(&7).unwrap();
        client.cancel_request(ticket);
        drop(given_up);
        while !under_way.is_empty() {
            let Some(finished) = client.poll() else {
                std::thread::yield_now();
                continue;
            };
            let n = finished.private_data;
            let (_, bytes) = under_way.remove(&n).unwrap();
            match finished.result {
                Ok(count) => {
                    assert_eq!(count, bytes.len());
                    flat[n * 40_000..n * 40_000 + count].copy_from_slice(&bytes);
                }
                Err(error) => assert_eq!(error, ReadError::Plain),
            }
        }
    }
    client.sync(handle).unwrap();
    let mut found = std::fs::read(folder.0.join("take.mov")).unwrap();
    found.resize(flat.len(), 0);
    for n in (0..60).filter(|n| *n != 7) {
        let part = n * 40_000..(n + 1) * 40_000;
        assert!(found[part.clone()] == flat[part], "write {n}");
    }
    drop(client);
    let echo = server.stop();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
    assert!(echo.write_counts[0] > 900, "{:?}", echo.write_counts);
}

#[test]
fn without_a_lane_writes_are_the_callers_own() {
    let folder = Folder::new("no-lane");
    let file = opened(&folder, "take.mov");
    let server = Running::start(&folder.socket(), SMALL);
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"take.mov").unwrap();
    assert!(!client.takes_writes());
    assert_eq!(client.write(handle, b"x", 0), Err(ReadError::Plain));
    assert_eq!(client.sync(handle), Err(ReadError::Plain));
    assert_eq!(client.hold(1, 2), Ok(()));
    assert_eq!(client.fact(1, 2), None);
    drop(client);
    server.stop();
}

#[test]
fn writes_under_way_when_a_daemon_dies_happen_once_by_the_next() {
    let folder = Folder::new("lost-writes");
    let former = opened(&folder, "take.mov");
    let mut numbers = Numbers(11);
    let mut flat = vec![0u8; 40 * 20_000];
    let who = Connect {
        door: 3,
        ..Connect::default()
    };
    let mut committed_before = 0;
    let mut first = Some(Running::start(&folder.socket(), size(4096)));
    let mut client = connect(&folder.socket());
    let handle = client.open(&former, b"take.mov").unwrap();
    // Renewed by another descriptor of the file, but not by one of another file.
    assert!(!client.renew(handle, opened(&folder, "other.mov")));
    let file = opened(&folder, "take.mov");
    assert!(client.renew(handle, &file));
    drop(former);
    for round in 0..20u8 {
        let mut under_way = HashMap::new();
        for n in 0..40usize {
            let bytes = vec![round.wrapping_mul(40).wrapping_add(n as u8) | 1; 20_000];
            let start = n as u64 * 20_000;
            // SAFETY: the buffer's memory stays where it is in the map until the write is reported.
            let ticket =
                unsafe { client.write_send(handle, bytes.as_ptr(), bytes.len(), start, n) };
            under_way.insert(n, (ticket.unwrap(), bytes));
        }
        client.sync_send(handle, 99).unwrap();
        let some = numbers.below(30) as usize;
        let mut collected = 0;
        let mut echo: Option<Echo> = None;
        while !under_way.is_empty() {
            if collected >= some && first.is_some() {
                // It dies in the middle, and has done some writes without an answer.
                let mut dying = first.take().unwrap().stop();
                dying.mute = true;
                let _ = dying.turn(0);
                while client.poll().is_some_and(|finished| {
                    if finished.private_data == 99 {
                        return true;
                    }
                    let (_, bytes) = under_way.remove(&finished.private_data).unwrap();
                    let n = finished.private_data;
                    if finished.result.is_ok() {
                        flat[n * 20_000..n * 20_000 + bytes.len()].copy_from_slice(&bytes);
                    }
                    true
                }) {}
                let _ = dying.turn(0);
                dying.kill_sessions();
                let committed = std::mem::take(&mut dying.committed);
                drop(dying);
                while client.alive() {
                    let _ = client.poll();
                }
                assert!(client.is_lost() && !client.is_recovered());
                let mut next = Echo::new(&folder.socket(), size(4096)).unwrap();
                committed_before += committed.len();
                next.committed = committed;
                echo = Some(next);
            }
            if let Some(mut next) = echo.take() {
                let serving = std::thread::spawn(move || {
                    for _ in 0..200 {
                        next.turn(1).unwrap();
                        if next.session_count() > 0 {
                            break;
                        }
                    }
                    next
                });
                client
                    .reconnect(&folder.socket(), &who, Duration::from_s(5))
                    .unwrap();
                first = Some(Running::resume(serving.join().unwrap()));
            }
            let Some(finished) = client.poll() else {
                std::thread::yield_now();
                continue;
            };
            collected += 1;
            if finished.private_data == 99 {
                assert_eq!(finished.result, Ok(0));
                continue;
            }
            let n = finished.private_data;
            let (_, bytes) = under_way.remove(&n).unwrap();
            match finished.result {
                Ok(count) => {
                    assert_eq!(count, bytes.len());
                    flat[n * 20_000..n * 20_000 + count].copy_from_slice(&bytes);
                }
                Err(error) => assert_eq!(error, ReadError::Plain),
            }
        }
    }
    client.sync(handle).unwrap();
    let found = std::fs::read(folder.0.join("take.mov")).unwrap();
    let wrong = found.iter().zip(&flat).position(|(a, b)| a != b);
    assert_eq!(wrong.map(|at| at / 20_000), None);
    assert!(committed_before > 20, "{committed_before}");
    drop(client);
    let echo = first.unwrap().stop();
    assert!(echo.faults.is_empty(), "{:?}", echo.faults);
}

#[test]
fn without_another_daemon_what_waits_is_left_to_the_caller_in_the_end() {
    let folder = Folder::new("given-up");
    let file = opened(&folder, "take.mov");
    let server = Running::start(&folder.socket(), size(64));
    let mut client = connect(&folder.socket());
    let handle = client.open(&file, b"take.mov").unwrap();
    let mut echo = server.stop();
    let bytes = [7; 5000];
    // SAFETY: the buffer outlives the client's use of it, which ends below.
    let ticket = unsafe { client.write_send(handle, bytes.as_ptr(), bytes.len(), 0, 1) };
    let mut read = [0; 100];
    // SAFETY: as above.
    let reading = unsafe { client.read_send(handle, read.as_mut_ptr(), read.len(), 0, 2) };
    assert!(ticket.is_some() && reading.is_some());
    echo.kill_sessions();
    drop(echo);
    let finished = loop {
        if let Some(finished) = client.poll() {
            break finished;
        }
    };
    // A read needs no daemon; a write may not overtake acknowledged writes.
    assert_eq!(
        (finished.private_data, finished.result),
        (2, Err(ReadError::Plain))
    );
    assert_eq!(client.poll(), None);
    let who = Connect::default();
    let again = client.reconnect(&folder.socket(), &who, Duration::from_ms(10));
    assert!(again.is_err() && client.is_lost());
    assert_eq!(client.write(handle, b"x", 0), Err(ReadError::Plain));
    client.give_up();
    let finished = client.poll().unwrap();
    assert_eq!(
        (finished.private_data, finished.result),
        (1, Err(ReadError::Plain))
    );
    assert!(!client.is_lost() && client.is_recovered());
}
