// SPDX-License-Identifier: Apache-2.0
//! No client reads bytes older than an acknowledged write: not the writer, not another client, not
//! after the file was truncated, copied over, deleted, replaced or changed beside every door.

use rushes_kit::wire::Wire;
use rushes_tests::disk::run;
use rushes_tests::hand::{Hand, Held};
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::smbd::{PASSWORD, SHARE, USER};
use rushes_tests::world::{Setup, World};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 6_000_001;

/// A world with `clip.mov` of [`LENGTH`] bytes and seed 1.
fn world_with_clip() -> Option<World> {
    let world = World::build(&Setup::default())?;
    world.put("clip.mov", 1, LENGTH);
    Some(world)
}

/// A client that has all of `clip.mov` open and in the cache.
fn reader_of_clip(world: &World) -> (Hand, Held) {
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("clip.mov");
    pattern::check(1, 0, &hand.read(file, 0, LENGTH), "before any change");
    (hand, file)
}

#[test]
fn a_write_is_seen_by_its_writer_and_by_others_at_once() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    let mut writer = Hand::connect(HAND, world.smbd.port());
    let written = writer.open_rw("clip.mov");
    for (round, (offset, length)) in (2..).zip([
        (0_u64, 1_usize),
        (4095, 2),
        (1_000_000, 3_000_000),
        (LENGTH as u64 - 7, 7),
    ]) {
        writer.write(written, offset, &pattern::bytes(round, offset, length));
        let own = writer.read(written, offset, length);
        pattern::check(round, offset, &own, "the writer's own read");
        let other = reader.read(held, offset, length);
        pattern::check(round, offset, &other, "another client's read");
    }
}

#[test]
fn random_writes_and_reads_of_three_clients_agree_with_a_model() {
    // The analyser would leave scattered reads to the kernel's cache; this tests the daemon's.
    let setup = Setup {
        server: String::from("analyser = false"),
        ..Setup::default()
    };
    let Some(mut world) = World::build(&setup) else {
        return;
    };
    world.put("clip.mov", 1, LENGTH);
    let mut read_count = 0_u64;
    let mut model = pattern::bytes(1, 0, LENGTH);
    let mut hands: Vec<_> = (0..3)
        .map(|_| {
            let mut hand = Hand::connect(HAND, world.smbd.port());
            let file = hand.open_rw("clip.mov");
            (hand, file)
        })
        .collect();
    let mut random = 0x0005_eed0_u64;
    let mut below = |limit: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % limit
    };
    for step in 0..600_u64 {
        let (hand, file) = &mut hands[below(3) as usize];
        let offset = below(LENGTH as u64 + 100_000);
        let length = match below(3) {
            0 => below(100) + 1,
            1 => below(10_000) + 1,
            _ => below(2_000_000) + 1,
        } as usize;
        if below(3) == 0 {
            // Writes past the end make the file longer, with a hole.
            let bytes = pattern::bytes(1000 + step, offset, length.min(300_000));
            let end = offset as usize + bytes.len();
            if model.len() < end {
                model.resize(end, 0);
            }
            model[offset as usize..end].copy_from_slice(&bytes);
            hand.write(*file, offset, &bytes);
        } else {
            read_count += 1;
            let found = hand.read(*file, offset, length);
            let start = (offset as usize).min(model.len());
            let expected = &model[start..(start + length).min(model.len())];
            assert_eq!(
                found.len(),
                expected.len(),
                "step {step}: length at {offset}"
            );
            let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "step {step}: first wrong byte after {offset}");
        }
    }
    world.wait_for_file("clip.mov", &model);
    let status = world.daemon().status();
    let count = |key: &str| status["cache"][key].as_u64().unwrap_or_default();
    assert!(count("hit_count") > 0, "nothing came from the cache");
    // smbd itself answers reads wholly past the end; nearly all others go to the daemon.
    assert!(
        count("hit_count") + count("miss_count") >= read_count * 9 / 10,
        "the daemon saw {} of {read_count} reads",
        count("hit_count") + count("miss_count")
    );
}

#[test]
fn a_file_cut_and_grown_again_has_none_of_its_old_bytes() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    let mut writer = Hand::connect(HAND, world.smbd.port());
    let new = writer.create("clip.mov");
    assert_eq!(reader.read(held, 0, 1000).len(), 0, "cut to nothing");
    writer.write(new, 3_000_000, &pattern::bytes(2, 3_000_000, 1000));
    let hole = reader.read(held, 0, 3_000_000);
    assert_eq!(hole.len(), 3_000_000);
    assert!(hole.iter().all(|byte| *byte == 0), "old bytes in the hole");
    pattern::check(2, 3_000_000, &reader.read(held, 3_000_000, 5000), "new end");
}

#[test]
fn a_server_side_copy_in_the_place_of_a_cached_file_is_seen() {
    let Some(world) = world_with_clip() else {
        return;
    };
    world.put("other.mov", 2, LENGTH);
    let (mut reader, held) = reader_of_clip(&world);
    reader.close(held);
    reader.unlink("clip.mov");
    // `scopy` asks the server to copy: the bytes pass no read and no write of smbd. It only makes
    // new files, and ext4 gives this one the inode number that was just freed.
    run(Command::new(needs::path_of("smbclient"))
        .arg(format!("//127.0.0.1/{SHARE}"))
        .args(["-p", &world.smbd.port().to_string()])
        .args(["-U", &format!("{USER}%{PASSWORD}"), "-c"])
        .arg("scopy other.mov clip.mov"));
    let copied = reader.open("clip.mov");
    pattern::check(2, 0, &reader.read(copied, 0, LENGTH), "the copy");
}

/// A world whose share admits guests, as [`Wire`] needs, and two clients that have read all of
/// `clip.mov`, the second of them from the cache.
fn readers_of_a_share_for_all() -> Option<(World, [(Hand, Held); 2])> {
    let setup = Setup {
        share: vec![String::from("guest ok = yes")],
        ..Setup::default()
    };
    let world = World::build(&setup)?;
    world.put("clip.mov", 1, LENGTH);
    // The next open drops the cached bytes of a file that was written less than two seconds ago.
    std::thread::sleep(Duration::from_millis(2100));
    let first = reader_of_clip(&world);
    let hits = |world: &World| {
        let daemon = world.daemon.as_ref().expect("it runs with a daemon");
        daemon.status()["cache"]["hit_count"].as_u64()
    };
    let before = hits(&world);
    let second = reader_of_clip(&world);
    assert!(hits(&world) > before, "clip.mov is not in the cache");
    Some((world, [first, second]))
}

#[test]
fn a_server_side_copy_into_a_cached_file_is_seen_by_who_has_it_open() {
    let Some((world, readers)) = readers_of_a_share_for_all() else {
        return;
    };
    world.put("other.mov", 2, LENGTH);
    let mut wire = Wire::connect(world.smbd.port(), SHARE).expect("guests are let in");
    let other = wire.open("other.mov").expect("it is there");
    let clip = wire.open("clip.mov").expect("it is there");
    wire.copy_chunks(other, clip, LENGTH as u64)
        .expect("the server copies");
    for (mut hand, held) in readers {
        pattern::check(2, 0, &hand.read(held, 0, LENGTH), "the copy");
    }
}

#[test]
fn zeros_that_no_write_put_into_a_cached_file_are_seen_by_who_has_it_open() {
    let Some((world, mut readers)) = readers_of_a_share_for_all() else {
        return;
    };
    let mut wire = Wire::connect(world.smbd.port(), SHARE).expect("guests are let in");
    let clip = wire.open("clip.mov").expect("it is there");
    // In a plain file smbd zeroes a range, in a sparse one it punches a hole; it calls fallocate
    // for both.
    for (offset, length) in [(1_000_000, 1_500_000), (4_000_001, 1_000_000)] {
        wire.zero(clip, offset, length).expect("zeros");
        for (hand, held) in &mut readers {
            let found = hand.read(*held, offset - 1000, length as usize + 2000);
            let (before, rest) = found.split_at(1000);
            let (zeros, after) = rest.split_at(length as usize);
            pattern::check(1, offset - 1000, before, "before the zeros");
            let old = zeros.iter().position(|byte| *byte != 0);
            assert_eq!(old, None, "first old byte after {offset}");
            pattern::check(1, offset + length, after, "after the zeros");
        }
        wire.set_sparse(clip).expect("sparse");
    }
    let allocated = 512 * fs::metadata(world.path("clip.mov")).unwrap().blocks();
    assert!(
        allocated < LENGTH as u64 - 900_000,
        "no hole was punched: {allocated} bytes are allocated"
    );
}

#[test]
fn a_new_file_of_an_old_name_is_the_new_one() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    reader.close(held);
    let mut writer = Hand::connect(HAND, world.smbd.port());
    // ext4 gives the freed inode number to the next file: the same key, other bytes.
    writer.unlink("clip.mov");
    let new = writer.create("clip.mov");
    writer.write(new, 0, &pattern::bytes(2, 0, LENGTH));
    writer.close(new);
    let again = reader.open("clip.mov");
    pattern::check(2, 0, &reader.read(again, 0, LENGTH), "made new");
    reader.close(again);

    world.put("third.mov", 3, LENGTH);
    writer.unlink("clip.mov");
    writer.rename("third.mov", "clip.mov");
    let again = reader.open("clip.mov");
    pattern::check(3, 0, &reader.read(again, 0, LENGTH), "renamed to");
}

#[test]
fn a_removed_file_stays_readable_to_who_has_it_open() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    fs::remove_file(world.path("clip.mov")).unwrap();
    world.put("next.mov", 2, LENGTH);
    pattern::check(1, 0, &reader.read(held, 0, LENGTH), "the removed file");
    let next = reader.open("next.mov");
    pattern::check(2, 0, &reader.read(next, 0, LENGTH), "the next file");
}

#[test]
fn a_change_beside_every_door_is_seen_by_the_next_open() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    reader.close(held);
    world.overwrite(
        "clip.mov",
        1_000_000,
        &pattern::bytes(2, 1_000_000, 2_000_000),
    );
    let again = reader.open("clip.mov");
    let found = reader.read(again, 0, LENGTH);
    pattern::check(1, 0, &found[..1_000_000], "before the change");
    pattern::check(2, 1_000_000, &found[1_000_000..3_000_000], "the change");
    pattern::check(1, 3_000_000, &found[3_000_000..], "after the change");
}

#[test]
fn a_change_beside_every_door_reaches_an_open_file_soon() {
    let Some(mut world) = world_with_clip() else {
        return;
    };
    if world.daemon().status()["shares"][0]["foreign_changes_noticed"] != true {
        // Without fanotify a change is promised to the next open alone, and status says so.
        needs::skip("this test needs fanotify (CAP_SYS_ADMIN, and a file system that has it)");
        return;
    }
    let (mut reader, held) = reader_of_clip(&world);
    world.overwrite("clip.mov", 0, &pattern::bytes(2, 0, 1000));
    let end = Instant::now() + Duration::from_secs(5);
    while reader.read(held, 0, 1000) != pattern::bytes(2, 0, 1000) {
        assert!(
            Instant::now() < end,
            "old bytes five seconds after the change"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_file_truncated_underneath_ends_where_it_ends_now() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    File::options()
        .write(true)
        .open(world.path("clip.mov"))
        .and_then(|file| file.set_len(1_000_000))
        .unwrap();
    reader.close(held);
    let again = reader.open("clip.mov");
    let found = reader.read(again, 0, LENGTH);
    assert_eq!(found.len(), 1_000_000);
    pattern::check(1, 0, &found, "what is left");
    assert_eq!(
        reader.read(again, 2_000_000, 1000).len(),
        0,
        "past the new end"
    );
}

#[test]
fn a_file_replaced_underneath_is_the_old_one_to_who_has_it_open() {
    let Some(world) = world_with_clip() else {
        return;
    };
    let (mut reader, held) = reader_of_clip(&world);
    world.put("new.mov", 2, LENGTH + 1000);
    fs::rename(world.path("new.mov"), world.path("clip.mov")).unwrap();
    pattern::check(1, 0, &reader.read(held, 0, LENGTH), "the open file");
    assert_eq!(reader.read(held, LENGTH as u64, 1000).len(), 0, "its end");
    let mut other = Hand::connect(HAND, world.smbd.port());
    let new = other.open("clip.mov");
    pattern::check(2, 0, &other.read(new, 0, LENGTH + 1000), "the new file");
}
