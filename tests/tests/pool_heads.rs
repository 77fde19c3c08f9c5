// SPDX-License-Identifier: Apache-2.0
//! A clip whose head is in the kernel's cache: the daemon sees none of its first reads, and gives
//! it a contract by its header all the same. And a sequence whose first frames are in that cache.

use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const LENGTH: u64 = 48 * MIB;
/// Bytes that the kernel has in its cache.
const HEAD: u64 = 16 * MIB;
/// 4.6 MB/s.
const BYTES_PER_SECOND: u32 = 8 * 192_000 * 3;
const BLOCK: u64 = 256 << 10;

/// The header of a sound of eight channels, 192 kHz, 24 bits.
fn header() -> Vec<u8> {
    let data = LENGTH as u32 - 44;
    let mut bytes = Vec::new();
    bytes.extend(b"RIFF");
    bytes.extend((data + 36).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(8u16.to_le_bytes());
    bytes.extend(192_000u32.to_le_bytes());
    bytes.extend(BYTES_PER_SECOND.to_le_bytes());
    bytes.extend(24u16.to_le_bytes());
    bytes.extend(24u16.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend(data.to_le_bytes());
    bytes
}

fn stream_of<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    let streams = status["streams"].as_array()?;
    streams.iter().find(|stream| stream["path"] == name)
}

/// The state of the program that copied the clip in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Copier {
    Gone,
    /// Gone, without a sync.
    JustGone,
    /// Keeps the file open, as a file server does for a while.
    Stays,
}

/// The clip was copied in through the mount a moment ago: the kernel's cache has its head.
#[test]
fn a_clip_that_was_just_copied_in_is_played_by_its_header() {
    let Some(world) = PoolWorld::kept(&[(EXT4, 200)]) else {
        return;
    };
    let daemon = world.served(1, "");
    let mut bytes = pattern::bytes(5, 0, LENGTH as usize);
    bytes[..44].copy_from_slice(&header());
    for copier in [Copier::Gone, Copier::Stays, Copier::JustGone] {
        let name = format!("{copier:?}.wav");
        let mut options = File::options();
        let copy = options.read(true).write(true).create_new(true);
        let copy = copy.open(world.path(&name)).expect("made");
        copy.write_all_at(&bytes, 0).expect("there is room");
        if copier != Copier::JustGone {
            copy.sync_all().expect("written");
        }
        let kept = (copier == Copier::Stays).then_some(copy);
        let file = File::open(world.path(&name)).expect("there");
        let rest = std::num::NonZero::new(LENGTH - HEAD);
        rustix::fs::fadvise(&file, HEAD, rest, rustix::fs::Advice::DontNeed).expect("dropped");
        let begun = Instant::now();
        let mut found = vec![0; BLOCK as usize];
        let mut promised = None;
        for block in 0..LENGTH / BLOCK {
            let at = block * BLOCK;
            file.read_exact_at(&mut found, at).expect("read");
            let expected = &bytes[at as usize..][..BLOCK as usize];
            assert!(found == expected, "{name} at {at}");
            // Four times the speed of playback.
            let due = Duration::from_millis(BLOCK * 250 / u64::from(BYTES_PER_SECOND));
            std::thread::sleep((due * block as u32).saturating_sub(begun.elapsed()));
            let status = daemon.status();
            let stream = stream_of(&status, &name);
            if promised.is_none() && stream.is_some_and(|one| one["standing"] == "contract") {
                promised = Some(at);
            }
        }
        let status = daemon.status();
        let stream = stream_of(&status, &name).unwrap_or(&Value::Null);
        let at = promised.unwrap_or_else(|| panic!("{name}: {stream:#}"));
        assert!(at < HEAD + 8 * MIB, "{name}: promised at {at}");
        drop((file, kept));
        std::fs::remove_file(world.path(&name)).expect("removed");
    }
}

const FRAMES: u64 = 72;
const FRAME_BYTES: usize = 1 << 20;
/// The first frames, which the kernel has in its cache.
const KEPT: u64 = 24;

/// The kernel's cache has the first second of it: no read of that reaches the daemon.
#[test]
fn a_sequence_that_begins_in_the_kernels_cache_is_one_and_fetched_ahead_from_where_it_leaves_it() {
    let Some(world) = PoolWorld::kept(&[(EXT4, 200)]) else {
        return;
    };
    let rule = "[[rule]]\nmatch = \"shot/*.dpx\"\nframes_per_second = 24\n";
    let daemon = world.served(1, rule);
    let frame = |number: u64| world.path(format!("shot/f.{number:04}.dpx"));
    std::fs::create_dir(world.path("shot")).expect("made");
    for number in 1..=FRAMES {
        put(&frame(number), number, FRAME_BYTES).expect("there is room");
        // Opened to write: the daemon takes a program that opens one frame after the other to read
        // for their reader.
        let file = File::options().write(true).open(frame(number));
        let file = file.expect("there");
        file.sync_all().expect("written");
        if number > KEPT {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("dropped");
        }
    }
    // The daemon drops cached bytes of a version that is less than 2 s old (decision 0038).
    std::thread::sleep(Duration::from_millis(2500));
    let of_shot = |status: &Value| -> Vec<Value> {
        let streams = status["streams"].as_array().expect("a list");
        let is_it = |one: &&Value| one["sequence"] == true && one["open"] == true;
        streams.iter().filter(is_it).cloned().collect()
    };
    let counts = |status: &Value| -> (u64, u64) {
        let sum = |name: &str| {
            let all = of_shot(status);
            all.iter().filter_map(|one| one[name].as_u64()).sum()
        };
        (sum("read_count"), sum("hit_count"))
    };
    let begun = Instant::now();
    let mut before = None;
    for number in 1..=FRAMES {
        check(&frame(number), number, FRAME_BYTES);
        let due = Duration::from_micros(41_667) * number as u32;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        if number == KEPT {
            before = Some(counts(&daemon.status()));
        }
    }
    let status = daemon.status();
    let all = of_shot(&status);
    assert_eq!(all.len(), 1, "{all:#?}");
    assert_eq!(all[0]["standing"], "contract", "{:#}", all[0]);
    let ((reads, hits), before) = (counts(&status), before.unwrap_or_default());
    let (reads, hits) = (reads - before.0, hits - before.1);
    assert!(reads >= FRAMES - KEPT, "{:#}", all[0]);
    assert_eq!(reads - hits, 0, "missed of {reads}: {:#}", all[0]);
}
