// SPDX-License-Identifier: Apache-2.0
//! Clients that make one file longer together: each sees the end as the other left it, and no byte
//! of either is lost.
//!
//! Samba writes at the offset in the request, also for handles that may append alone: a client
//! that appends beside others takes a lock, asks for the end, writes there and releases the lock.

use rushes_tests::fsx::{client, setup, world};
use rushes_tests::pattern;
use rushes_tests::random::Random;
use rushes_tests::smb2::{
    Access, Connection, Disposition, Handle, LOCK_NOT_GRANTED, REQUEST_MAX, Status,
};
use rushes_tests::world::{Backing, World};
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn append_handle(client: &Connection, name: &str) -> Handle {
    let alone = Access {
        write: false,
        ..Access::default()
    };
    client
        .open_as(name, Disposition::OpenIf, alone)
        .expect("opened")
}

/// Offset of a byte that no file has; clients lock it.
const BATON: u64 = 1 << 62;

fn take_baton(client: &Connection, file: Handle) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match client.lock(file, BATON, 1, true) {
            Ok(()) => return,
            Err(Status(LOCK_NOT_GRANTED)) => {}
            Err(other) => panic!("a lock: {other:?}"),
        }
        assert!(Instant::now() < end, "the other one keeps the lock");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Appends `count` times. `model`: the file as it must be; only the holder of the lock uses it.
fn append(client: &Connection, who: u64, model: &Mutex<Vec<u8>>, count: u64) {
    let mut random = Random(who);
    let mut file = append_handle(client, "log.txt");
    for turn in 0..count {
        take_baton(client, file);
        let mut model = model.try_lock().expect("nobody else has the lock");
        let end = model.len() as u64;
        assert_eq!(
            client.info(file).expect("known").size,
            end,
            "{who}, {turn}: the end that its handle shows"
        );
        if random.below(8) == 0 {
            let listed = client.list("log.txt").expect("listed").expect("there");
            assert_eq!(listed.size, end, "{who}, {turn}: the end in the folder");
        }
        let length = match random.below(3) {
            0 => random.below(80) + 1,
            1 => random.below(9_000) + 1,
            _ => random.below(REQUEST_MAX as u64) + 1,
        };
        let bytes = pattern::bytes(who << 32 | turn, end, length as usize);
        let written = client.write(file, end, &bytes);
        assert_eq!(written, Ok(()), "{who}, {turn}");
        model.extend(&bytes);
        // Sometimes read the last bytes of the other client, across the border.
        if random.below(4) == 0 {
            let from = end.saturating_sub(5_000);
            let back = read_whole(client, from, 9_000);
            let to = model.len().min(from as usize + 9_000);
            assert!(
                back == model[from as usize..to],
                "{who}, {turn}: from {from}"
            );
        }
        drop(model);
        client.lock(file, BATON, 1, false).expect("unlocked");
        if random.below(20) == 0 {
            client.close(file).expect("closed");
            file = append_handle(client, "log.txt");
        }
    }
    client.close(file).expect("closed");
}

fn read_whole(client: &Connection, from: u64, length: usize) -> Vec<u8> {
    let (file, _) = client.open("log.txt", Disposition::Open).expect("opened");
    let back = client.read(file, from, length).expect("read");
    client.close(file).expect("closed");
    back
}

fn two_append(backing: Backing, kills: u64) {
    let Some(mut world) = world(backing) else {
        return;
    };
    const COUNT: u64 = 150;
    let clients = [client(&world), client(&world)];
    let model = Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    let mut daemon = world.daemon.take().expect("a daemon");
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            for turn in 0..kills {
                std::thread::sleep(Duration::from_millis(60 + 37 * (turn % 5)));
                if done.load(Ordering::Relaxed) {
                    break;
                }
                daemon.kill();
                daemon.start_again();
            }
        });
        let writers: Vec<_> = (0..2)
            .map(|who| {
                let (client, model) = (&clients[who], &model);
                scope.spawn(move || append(client, who as u64 + 1, model, COUNT))
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        killer.join().expect("the killer");
        for end in ended {
            end.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    world.daemon = Some(daemon);
    world.everything_is_written();
    let model = model.into_inner().expect("nobody has failed");
    let found = fs::read(world.path("log.txt")).expect("the file is there");
    let wrong = found.iter().zip(&model).position(|(a, b)| a != b);
    assert_eq!((found.len(), wrong), (model.len(), None));
    assert!(model.len() as u64 > COUNT * 2 * 5_000);
}

#[test]
fn two_clients_append_in_turn_and_no_byte_is_lost() {
    two_append(Backing::Ext4, 0);
}

#[test]
fn two_clients_append_in_turn_while_the_daemon_is_killed() {
    two_append(Backing::Ext4, 12);
}

#[test]
fn two_clients_append_in_turn_where_writes_go_through() {
    two_append(Backing::Small(&["mkfs.btrfs", "-q", "-f"]), 0);
}

/// Two clients write at the end of one file, each with several writes under way, at offsets that
/// the other leaves out.
#[test]
fn two_clients_that_lengthen_one_file_at_once_leave_no_hole() {
    let Some(mut world) = world(Backing::Ext4) else {
        return;
    };
    const WRITERS: u64 = 3;
    const STEP: u64 = 10_007;
    const COUNT: u64 = 240;
    let clients = [client(&world), client(&world)];
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in &clients {
            let next = &next;
            for _ in 0..WRITERS {
                scope.spawn(move || {
                    let file = append_handle(client, "log.txt");
                    let mut size = 0;
                    loop {
                        let turn = next.fetch_add(1, Ordering::Relaxed);
                        if turn >= COUNT {
                            break;
                        }
                        let at = turn * STEP;
                        let bytes = pattern::bytes(9, at, STEP as usize);
                        client.write(file, at, &bytes).expect("written");
                        let now = client.info(file).expect("known").size;
                        assert!(now >= at + STEP && now >= size, "{now} after {size}");
                        size = now;
                    }
                    client.close(file).expect("closed");
                });
            }
        }
    });
    let back = read_whole(&clients[0], COUNT * STEP - 50_000, REQUEST_MAX);
    assert_eq!(back.len(), 50_000);
    world.everything_is_written();
    let found = fs::read(world.path("log.txt")).expect("the file is there");
    assert_eq!(found.len() as u64, COUNT * STEP);
    pattern::check(9, 0, &found, "both clients'");
}

/// "At the end, wherever that is" is an offset of -1 to a Windows server; Samba refuses it, with
/// our module as without.
#[test]
fn a_write_at_no_place_is_refused_and_changes_nothing() {
    let mut setup = setup("64MiB");
    setup.plain_share = Some("plain");
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    let ours = client(&world);
    let plain = Connection::connect(world.smbd.port(), "plain").expect("smbd lets guests in");
    let refused = [("ours.txt", &ours), ("plain.txt", &plain)].map(|(name, client)| {
        let file = append_handle(client, name);
        client.write(file, 0, b"slate").expect("written");
        let refused = [u64::MAX, u64::MAX - 1, 1 << 63].map(|at| client.write(file, at, b"clap"));
        assert!(refused.iter().all(Result::is_err), "{name}: {refused:?}");
        client.write(file, 5, b" and board").expect("written");
        client.close(file).expect("closed");
        refused
    });
    assert_eq!(refused[0], refused[1], "with our module and without");
    world.everything_is_written();
    for name in ["ours.txt", "plain.txt"] {
        let found = fs::read(world.path(name)).expect("the file is there");
        assert_eq!(found, b"slate and board", "{name}");
    }
}
