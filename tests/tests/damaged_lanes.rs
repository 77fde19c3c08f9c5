// SPDX-License-Identifier: Apache-2.0
//! A damaged lane: no daemon starts with it, `rushes recover --list` shows the writes in it that
//! can be read, and an operator may give it up.

use rushes_tests::disk::said;
use rushes_tests::fsx::{self, client};
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition};
use rushes_tests::world::{Setup, World};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const BLOCK: usize = 65_536;
const OLD_LENGTH: usize = 4 << 20;

// Offsets in a lane's table, and the length of a record; see core/src/format/lane.rs.
const VERSION_AT: u64 = 8;
const PAGE_COUNT_AT: u64 = 16;
const PIECES_AT: u64 = 8192 + 16_384 * 256;
const PIECE_BYTES: u64 = 128;
/// Offset in a piece's record, as the next one.
const START_AT: u64 = 24;
const LENGTH_AT: u64 = 32;

/// `rushes ARGS` for this world; it must end.
fn rushes(world: &World, args: &[&str]) -> Output {
    let mut child = Command::new(needs::path_of("rushes"))
        .args(args)
        .arg("--config")
        .arg(world.scratch.path().join("rushes.toml"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("rushes was built");
    let end = Instant::now() + Duration::from_secs(20);
    while child.try_wait().expect("it is our child").is_none() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    child.wait_with_output().expect("it is our child")
}

fn list(world: &World) -> Vec<Value> {
    let output = rushes(world, &["recover", "--list", "--json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A server over which two clients have written, each into a lane of its own, and whose daemon is
/// dead.
struct Left {
    world: World,
    one: Connection,
    other: Connection,
    /// The first one's lane.
    lane: Value,
}

/// Blocks that the first client wrote to take.mov.
const BLOCKS: [u64; 4] = [0, BLOCK as u64, 1 << 20, 3 << 20];

fn left() -> Option<Left> {
    let mut setup: Setup = fsx::setup("64MiB");
    // Only the test starts a recovery.
    setup.share.push(String::from("rushes:recover after = 600"));
    let mut world = World::build(&setup)?;
    for name in ["take.mov", "safe.mov"] {
        world.put(name, 1, OLD_LENGTH);
    }
    let (one, other) = (client(&world), client(&world));
    let (take, _) = one.open("take.mov", Disposition::Open).expect("opened");
    let (made, _) = one.open("made.mov", Disposition::OpenIf).expect("made");
    let (safe, _) = other.open("safe.mov", Disposition::Open).expect("opened");
    other
        .write(safe, 0, &pattern::bytes(3, 0, BLOCK))
        .expect("written");
    for at in BLOCKS {
        let bytes = pattern::bytes(2, at, BLOCK);
        one.write(take, at, &bytes).expect("written");
    }
    one.write(made, 0, &pattern::bytes(4, 0, 5000))
        .expect("written");
    let refused = rushes(&world, &["recover", "--give-up", "1", "--yes"]);
    assert!(!refused.status.success(), "its daemon lives: {refused:?}");
    world.daemon().kill();
    let lanes = list(&world);
    let lane = lanes.into_iter().find(|lane| lane["write_count"] == 5);
    Some(Left {
        world,
        one,
        other,
        lane: lane.expect("five writes in a lane"),
    })
}

impl Left {
    fn number(&self) -> String {
        self.lane["lane"].to_string()
    }

    fn table(&self) -> PathBuf {
        PathBuf::from(self.lane["table"].as_str().expect("a path"))
    }

    fn change(&self, at: u64) {
        let table = File::options().read(true).write(true).open(self.table());
        let table = table.expect("our own daemon's");
        let mut byte = [0];
        table.read_exact_at(&mut byte, at).expect("it is that long");
        table.write_all_at(&[byte[0] ^ 2], at).expect("tmpfs");
    }

    /// The record of the piece that begins at this byte of its file.
    fn record_of(&self, start: u64) -> u64 {
        let table = fs::read(self.table()).expect("our own daemon's");
        let word = |at: u64| {
            let at = at as usize;
            u64::from_le_bytes(table[at..at + 8].try_into().expect("eight bytes"))
        };
        let is_it = |&record: &u64| {
            let at = PIECES_AT + record * PIECE_BYTES;
            word(at) as u32 != 0 && word(at + START_AT) == start
        };
        (0..100).find(is_it).expect("a piece that begins there")
    }

    fn now(&self) -> Value {
        let lanes = list(&self.world);
        let number = &self.lane["lane"];
        let lane = lanes.into_iter().find(|lane| lane["lane"] == *number);
        lane.expect("it is still there")
    }

    /// Neither a daemon nor a recovery starts, and both messages name the command to give it up.
    fn is_refused(&self, why: &str) {
        for command in ["serve", "recover"] {
            let output = rushes(&self.world, &[command]);
            let text = said(&output);
            assert_eq!(output.status.code(), Some(2), "{command}: {text}");
            let number = self.number();
            let lane = format!("lane {number} in ");
            let way_out = format!("rushes recover --give-up {number}");
            for part in [why, &lane, "rushes recover --list", &way_out] {
                assert!(text.contains(part), "{command}, {part:?}: {text}");
            }
        }
    }

    /// Only `--yes` deletes the lane.
    fn give_up(&self) {
        let number = self.number();
        let asked = rushes(&self.world, &["recover", "--give-up", &number]);
        let text = said(&asked);
        assert!(!asked.status.success(), "{text}");
        let words = format!("--give-up {number} --yes");
        for part in ["take.mov", "nothing is given up", &words] {
            assert!(text.contains(part), "{part:?}: {text}");
        }
        assert!(self.table().exists());
        let done = rushes(&self.world, &["recover", "--give-up", &number, "--yes"]);
        assert!(done.status.success(), "{done:?}");
        assert!(!self.table().exists());
    }
}

fn ranges(starts: &[(u64, u64)]) -> Value {
    starts
        .iter()
        .map(|(start, end)| json!({ "start": start, "end": end }))
        .collect()
}

/// A file of a lane, by its name.
fn file<'a>(left: &Left, lane: &'a Value, name: &str) -> &'a Value {
    let path = fs::canonicalize(left.world.path(name)).expect("it is there");
    let files = lane["files"].as_array().expect("a list");
    let found = files.iter().find(|file| file["path"] == json!(path));
    found.unwrap_or_else(|| panic!("no {path:?} in {lane:#}"))
}

#[test]
fn a_damaged_lane_is_told_and_given_up_and_nobody_elses_bytes_go_with_it() {
    let Some(mut left) = left() else {
        return;
    };
    let block = BLOCK as u64;
    let whole = ranges(&[
        (0, 2 * block),
        (1 << 20, (1 << 20) + block),
        (3 << 20, (3 << 20) + block),
    ]);
    assert_eq!(file(&left, &left.lane, "take.mov")["ranges"], whole);
    assert_eq!(left.lane["damage"], json!([]));

    let record = left.record_of(1 << 20);
    let at = PIECES_AT + record * PIECE_BYTES;
    left.change(at + LENGTH_AT);
    left.is_refused("record");
    let lane = left.now();
    let readable = ranges(&[(0, 2 * block), (3 << 20, (3 << 20) + block)]);
    assert_eq!(file(&left, &lane, "take.mov")["ranges"], readable);
    assert_eq!(
        file(&left, &lane, "made.mov")["ranges"],
        ranges(&[(0, 5000)])
    );
    assert_eq!(lane["write_count"], 4, "{lane:#}");
    let damage = &lane["damage"][0];
    assert_eq!(lane["damage"].as_array().map(Vec::len), Some(1));
    let told = (&damage["what"], &damage["record"], &damage["table_offset"]);
    assert_eq!(told, (&json!("piece"), &json!(record), &json!(at)));
    let text = said(&rushes(&left.world, &["recover", "--list"]));
    for part in [
        String::from("take.mov (inode"),
        format!(
            "readable are bytes 0-{}, {}-{}",
            2 * block - 1,
            3 << 20,
            (3 << 20) + block - 1
        ),
        format!(
            "damaged: record {record} of a piece, at byte {at} of {}",
            left.table().display()
        ),
    ] {
        assert!(text.contains(&part), "{part:?}: {text}");
    }

    // With a damaged head, too, the same ranges can be read.
    left.change(PAGE_COUNT_AT);
    left.is_refused("head of its table is damaged");
    assert_eq!(file(&left, &left.now(), "take.mov")["ranges"], readable);

    left.give_up();
    left.world.daemon().start_again();
    left.world.everything_is_written();
    assert!(list(&left.world).is_empty());
    let found = fs::read(left.world.path("safe.mov")).expect("the file is there");
    pattern::check(3, 0, &found[..BLOCK], "the other lane's");
    pattern::check(1, block, &found[BLOCK..], "what nobody wrote to");
    // Clients go on with the bytes on the disk.
    for client in [&left.one, &left.other] {
        let (take, info) = client.open("take.mov", Disposition::Open).expect("opened");
        assert_eq!(info.size, OLD_LENGTH as u64);
        let back = client.read(take, 1 << 20, BLOCK).expect("read");
        pattern::check(1, 1 << 20, &back, "as it was");
        let (_, info) = client.open("made.mov", Disposition::Open).expect("opened");
        assert_eq!(info.size, 0);
    }
    let opened = left.one.open("take.mov", Disposition::Open);
    let (take, _) = opened.expect("opened");
    let bytes = pattern::bytes(5, 1 << 20, BLOCK);
    left.one.write(take, 1 << 20, &bytes).expect("written");
    let back = left.one.read(take, 1 << 20, BLOCK).expect("read");
    assert!(back == bytes);
}

#[test]
fn a_lane_of_a_newer_version_waits_for_the_release_that_wrote_it() {
    let Some(mut left) = left() else {
        return;
    };
    left.change(VERSION_AT);
    left.is_refused("its table is of version 3; expected 1: start the release that wrote it");
    let lane = left.now();
    assert_eq!(
        (&lane["write_count"], &lane["files"]),
        (&json!(0), &json!([]))
    );
    let memory = lane["memory_bytes"].as_u64().expect("a number");
    assert!(memory >= (4 * BLOCK + 5000) as u64, "{memory}");
    let fault = lane["fault"].as_str().expect("a sentence");
    assert!(fault.contains("version 3"), "{fault}");
    // The lane is unchanged: a daemon of its version finds all of it.
    left.change(VERSION_AT);
    left.world.daemon().start_again();
    left.world.everything_is_written();
    let mut model = pattern::bytes(1, 0, OLD_LENGTH);
    for at in BLOCKS {
        model[at as usize..at as usize + BLOCK].copy_from_slice(&pattern::bytes(2, at, BLOCK));
    }
    left.world.wait_for_file("take.mov", &model);
    left.world
        .wait_for_file("made.mov", &pattern::bytes(4, 0, 5000));
    let (take, _) = left
        .one
        .open("take.mov", Disposition::Open)
        .expect("opened");
    let back = left.one.read(take, 0, BLOCK).expect("read");
    pattern::check(2, 0, &back, "what was kept");
}
